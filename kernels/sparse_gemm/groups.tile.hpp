#pragma once

#include "tilewave/tile/language.tile.hpp"

// Kernels between a dense matrix and its 2:4 sparse form (tilewave/tile/sparse.tile.hpp). Elements are taken as bits: `Bits` is u16 or u8,
// and `kInteger` says whether these are integers instead of floating-point numbers. A tile is 16 rows of one block of columns, an item two
// groups of four, which share a byte of metadata.

namespace tw::kernels::sparse_gemm {

/// |x| as an integer of the same order. Of floating-point numbers NaN is the largest.
template <class Bits, bool kInteger>
TW_INLINE constexpr u32 magnitude(Bits x) {
  if constexpr (kInteger)
    return x < 0x80 ? x : 256u - x;
  else
    return x & (sizeof(Bits) == 2 ? 0x7fffu : 0x7fu);
}

/// The positions of the two elements of a group with the largest magnitudes, `first` < `second`, and the number of nonzeros.
struct Kept {
  int first, second, nonzeros;
};
/// Of equal magnitudes the first are kept.
template <class Bits, bool kInteger>
TW_INLINE constexpr Kept kept_of(const Bits (&x)[4]) {
  u32 size[4] = {};
  int nonzeros = 0;
  TW_UNROLL
  for (int i = 0; i < 4; ++i) {
    size[i] = magnitude<Bits, kInteger>(x[i]);
    nonzeros += size[i] != 0;
  }
  Kept kept{3, 0, nonzeros};
  TW_UNROLL
  for (int i = 0; i < 4; ++i) {
    int larger = 0;
    TW_UNROLL
    for (int k = 0; k < 4; ++k) larger += k < i ? size[k] >= size[i] : size[k] > size[i];
    if (larger < 2) {
      kept.first = min(kept.first, i);
      kept.second = i;
    }
  }
  return kept;
}

/// A matrix in global memory.
template <class Target, class T>
struct Matrix {
  using Element = T;
  Pointer<Target, T> data;
  i64 stride_row, stride_col;
  TW_INLINE auto at(int row, int col) const { return data + (row * stride_row + col * stride_col); }
};

template <class Bits>
struct Groups {
  static constexpr int rows = 16, block = sparse_block<Bits>, items = rows * block / 8;
  /// Calls f(row, col) for the first column of every item of the tile.
  TW_INLINE static void for_items(auto& block_of, Tile t, auto f) {
    block_of.parallel(items, [&](int n) { f(t.m * rows + n / (block / 8), t.n * block + n % (block / 8) * 8); });
  }
  /// The index of the item's byte in metadata of `rows16` times 16 rows.
  TW_INLINE static i64 metadata_byte(int row, int col, int rows16) {
    const MetadataPlace place = metadata_place(static_cast<int>(sizeof(Bits)), row % 16, col % block / 4);
    const i64 line = (static_cast<i64>(col / block) * rows16 + row / 16) * metadata_words<Bits> + place.row;
    return line * kMetadataBytes + place.byte;
  }
};

/// y = x with zeros instead of the two smallest of each group.
template <class Bits, bool kInteger>
struct Prune {
  static constexpr const char* source = "kernels/sparse_gemm/groups.tile.hpp";
  template <class Target>
  struct On {
    struct Params {
      Matrix<Target, const Bits> x;
      Matrix<Target, Bits> y;
      int rows, cols;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Groups<Bits>::for_items(block, t, [&](int row, int first_col) {
        for (int col = first_col; col < first_col + 8; col += 4) {
          if (row >= p.rows || col >= p.cols) continue;
          const auto from = p.x.at(row, col);
          Bits x[4];
          TW_UNROLL
          for (int i = 0; i < 4; ++i) x[i] = from[i * p.x.stride_col];
          const Kept kept = kept_of<Bits, kInteger>(x);
          const auto to = p.y.at(row, col);
          TW_UNROLL
          for (int i = 0; i < 4; ++i) to[i * p.y.stride_col] = i == kept.first || i == kept.second ? x[i] : Bits{0};
        }
      });
    }
  };
};

/// Values and metadata of a dense matrix. Groups outside it have the metadata kNoGroup.
template <class Bits, bool kInteger>
struct Compress {
  static constexpr const char* source = "kernels/sparse_gemm/groups.tile.hpp";
  template <class Target>
  struct On {
    struct Params {
      Matrix<Target, const Bits> dense;
      Matrix<Target, Bits> values;
      Pointer<Target, u8> metadata;
      Pointer<Target, i32> refused;  ///< set to 1 if a group has more than two nonzeros; or null
      int rows, cols;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Groups<Bits>::for_items(block, t, [&](int row, int first_col) {
        u32 metadata = 0;
        for (int half = 0; half < 2; ++half) {
          const int col = first_col + 4 * half;
          u32 bits = kNoGroup;
          if (row < p.rows && col < p.cols) {
            const auto from = p.dense.at(row, col);
            Bits x[4];
            TW_UNROLL
            for (int i = 0; i < 4; ++i) x[i] = from[i * p.dense.stride_col];
            const Kept kept = kept_of<Bits, kInteger>(x);
            Bits first = x[0], second = x[1];
            TW_UNROLL
            for (int i = 1; i < 4; ++i) {
              if (i == kept.first) first = x[i];
              if (i == kept.second) second = x[i];
            }
            const auto to = p.values.at(row, col / 2);
            to[0] = first;
            to[p.values.stride_col] = second;
            bits = group_metadata(kept.first, kept.second);
            if (kept.nonzeros > 2 && p.refused) p.refused[0] = 1;
          }
          metadata |= bits << (4 * half);
        }
        p.metadata[Groups<Bits>::metadata_byte(row, first_col, ceil_div(p.rows, 16))] = static_cast<u8>(metadata);
      });
    }
  };
};

/// The dense matrix.
template <class Bits>
struct Decompress {
  static constexpr const char* source = "kernels/sparse_gemm/groups.tile.hpp";
  template <class Target>
  struct On {
    struct Params {
      Matrix<Target, const Bits> values;
      Pointer<Target, const u8> metadata;
      Matrix<Target, Bits> dense;
      int rows, cols;
    };
    TW_INLINE static void compute(auto& block, const Params& p, Tile t) {
      Groups<Bits>::for_items(block, t, [&](int row, int first_col) {
        const u32 metadata = p.metadata[Groups<Bits>::metadata_byte(row, first_col, ceil_div(p.rows, 16))];
        for (int half = 0; half < 2; ++half) {
          const int col = first_col + 4 * half;
          if (row >= p.rows || col >= p.cols) continue;
          const u32 bits = metadata >> (4 * half);
          const auto from = p.values.at(row, col / 2);
          const Bits first = from[0], second = from[p.values.stride_col];
          const auto to = p.dense.at(row, col);
          TW_UNROLL
          for (int i = 0; i < 4; ++i)
            to[i * p.dense.stride_col] = i == first_kept(bits) ? first : i == second_kept(bits) ? second : Bits{0};
        }
      });
    }
  };
};

}  // namespace tw::kernels::sparse_gemm
