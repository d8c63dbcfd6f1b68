#pragma once

#include "tilewave/tile/math.tile.hpp"

// Schedules that read memory: segments of a tensor's rows, the position of a tile in its segment, and lists of blocks. A kernel uses them
// in work(), once per tile, or in steps() and load().

namespace tw {

/// Groups of neighbouring rows of a tensor: segment g has rows offsets[g] to offsets[g + 1] - 1. Examples are the tokens of each expert and
/// the sequences of a batch. Offsets must be ascending; they are clamped to the tensor's rows.
template <class Target>
struct Segments {
  typename Target::template Pointer<const i32> offsets;  ///< count + 1 offsets
  int count;
  int rows;  ///< the tensor's rows

  /// Rows `begin` to `begin` + size - 1.
  struct Segment {
    int begin, size;
  };
  TW_INLINE Segment at(int g) const {
    const int begin = clamp(offsets[g]);
    return {begin, max(clamp(offsets[g + 1]) - begin, 0)};
  }

  /// A tile of a segment's rows.
  struct Part {
    int segment;
    int first;   ///< the tile's first row
    int end;     ///< the row after the segment's last one; may be inside the tile
    bool empty;  ///< no tile of the cluster has rows of the segment, so there is nothing to do
  };
  /// Finds tile number `m`, for tiles of `tile_rows` rows. No tile has rows of two segments. The tiles of a cluster are in one segment, so
  /// they can share its operands and take the same number of steps; the last of them may have no rows.
  ///
  /// Segment g has the tiles from offsets[g] / tile_rows + g on, some of which may be empty. So the number of tiles does not depend on the
  /// offsets, and a binary search finds a tile's segment.
  TW_INLINE Part find(int m, int tile_rows, int cluster = 1) const {
    const u32 together = static_cast<u32>(tile_rows * cluster);
    const int group = static_cast<int>(static_cast<u32>(m) / static_cast<u32>(cluster));
    const auto first_group = [&](int g) { return static_cast<int>(static_cast<u32>(clamp(offsets[g])) / together) + g; };
    int low = 0, high = count;  // segment `low` begins at or before this group, segment `high` after it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_group(middle) <= group ? low : high) = middle;
    }
    const Segment segment = at(low);
    const int in_segment = (group - first_group(low)) * static_cast<int>(together);  // negative before the first segment
    return {low, segment.begin + in_segment + (m - group * cluster) * tile_rows, segment.begin + segment.size,
            static_cast<u32>(in_segment) >= static_cast<u32>(segment.size)};
  }
  /// The number of tiles for `count` segments of a tensor with `rows` rows, a multiple of the cluster size.
  static constexpr int tiles(int rows, int count, int tile_rows, int cluster = 1) {
    return (rows / (tile_rows * cluster) + count) * cluster;
  }

 private:
  TW_INLINE int clamp(int row) const { return max(min(row, rows), 0); }
};

/// The blocks of a block-sparse matrix (compressed sparse rows): block row r has blocks[n] for n from begins[r] to begins[r + 1] - 1.
template <class Target>
struct BlockLists {
  typename Target::template Pointer<const i32> begins;  ///< one offset for each block row, and the end of the last one
  typename Target::template Pointer<const i32> blocks;  ///< block columns

  struct List {
    int begin, size;
  };
  TW_INLINE List at(int row) const {
    const int begin = begins[row];
    return {begin, max(begins[row + 1] - begin, 0)};
  }
  TW_INLINE int block(const List& list, int n) const { return blocks[list.begin + n]; }
};

}  // namespace tw
