#pragma once

#include "tilewave/tile/types.tile.hpp"

// 2:4 sparse operands. Of every four neighbours in a row at most two are not zero. The two that are kept are stored side by side, as
// `values`, and `metadata` says where they were.
//
// A group is four neighbours, columns 4 g to 4 g + 3 of a row. Its metadata are four bits: the column of the first kept element within the
// group in bits 0-1, that of the second in bits 2-3. The first is less than the second, so 4, 8, 9, 12, 13 and 14 are the only values. A
// group with fewer nonzeros also names two columns, whose values may be 0.
//
// Instructions (PTX ISA, "Sparse matrix storage" of mma.sp and wgmma.mma_async.sp) take 32-bit words of eight groups from a warp's lanes. A
// warp has 16 rows, and lanes 4 q to 4 q + 3 have rows q and q + 8, where q is 0 to 7. With j = lane % 4 and columns counted from the
// instruction's first one:
//
//   16-bit elements, 32 columns: a lane's bits 0-15 are row q, bits 16-31 row q + 8, both of columns 16 (j % 2) to 16 (j % 2) + 15. Two of
//     four lanes are read: j = 0 and 1 if the sparsity selector is 0, j = 2 and 3 if it is 1.
//   8-bit elements, 64 columns: a lane's word is row q + 8 (j % 2), columns 32 (j / 2) to 32 (j / 2) + 31. The selector is 0.
//
// In each half or whole word the first group has the lowest bits. So a word in each lane covers 64 columns in both cases: two instructions
// with the two selectors, or one. This is the order in memory, too. Metadata of a matrix of M rows and K columns are bytes
//
//   [ceil(K / sparse_block), ceil(M / 16) * metadata_words, 128]
//
// where sparse_block is 128 columns of 16-bit or 256 columns of 8-bit elements, 128 bytes of values; metadata_words = sparse_block / 64.
// Row `metadata_words * (row / 16) + w` of a block has the words of the block's columns from 64 w on, one for each lane in order, the
// lowest byte first. A warp loads such a row as one line of 128 bytes. Groups outside the matrix have the metadata kNoGroup.

namespace tw {

/// Columns of a sparse matrix whose values are 128 bytes in each row.
template <class T>
inline constexpr int sparse_block = 256 / static_cast<int>(sizeof(T));
/// Rows of metadata for each 16 rows of a block.
template <class T>
inline constexpr int metadata_words = sparse_block<T> / 64;
/// Bytes in a row of metadata: a word for each lane of a warp.
inline constexpr int kMetadataBytes = 128;
/// The metadata of groups outside the matrix: columns 0 and 1.
inline constexpr u32 kNoGroup = 4;

/// The position of a group's four bits in a block's metadata.
struct MetadataPlace {
  int row, byte;
  int shift;  ///< 0 or 4
};
/// `group`: counted from the block's first column. `bytes`: of an element.
TW_INLINE constexpr MetadataPlace metadata_place(int bytes, int row, int group) {
  const int words = 4 / bytes, in_word = group % 16, second = row % 16 / 8;
  const int lane = row % 8 * 4 + (bytes == 2 ? in_word / 4 : in_word / 8 * 2 + second);
  const int bit = bytes == 2 ? second * 16 + in_word % 4 * 4 : in_word % 8 * 4;
  return {row / 16 * words + group / 16, lane * 4 + bit / 8, bit % 8};
}

/// The metadata of a group whose elements `first` < `second` are kept, and these two numbers.
TW_INLINE constexpr u32 group_metadata(int first, int second) { return static_cast<u32>(first | second << 2); }
TW_INLINE constexpr int first_kept(u32 metadata) { return static_cast<int>(metadata & 3u); }
TW_INLINE constexpr int second_kept(u32 metadata) { return static_cast<int>(metadata >> 2 & 3u); }

/// A 2:4 sparse tile in shared memory, as the left operand of mma(acc, a, b, overwrite). Its columns are one block, so that one copy fills
/// each of its tiles. The right operand contracts as many columns or rows.
template <class Values, class Metadata>
struct Sparse {
  using Element = typename Values::Element;
  static constexpr int rows = Values::rows, cols = 2 * Values::cols;
  static constexpr Contract contract = Contract::columns;
  static_assert(cols == sparse_block<Element>, "a sparse tile has one block of columns: 128 bytes of values in each row");
  static_assert(rows % 64 == 0, "a sparse tile has a multiple of 64 rows");
  static_assert(Metadata::rows == rows / 16 * metadata_words<Element>, "metadata of another shape");

  Values values;      ///< [rows, cols / 2]
  Metadata metadata;  ///< [rows / 16 * metadata_words, 128] bytes
};

}  // namespace tw
