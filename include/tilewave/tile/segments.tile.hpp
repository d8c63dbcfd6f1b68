#pragma once

#include "tilewave/tile/math.tile.hpp"

// Schedules that read memory: where segments of a tensor's rows are, which tile of a grid is in which of them, and lists of blocks. A
// kernel looks these up in work(), once for each tile, or in steps() and load().

namespace tw {

/// Groups of neighbouring rows of a tensor: segment g has the rows from offsets[g] on, up to offsets[g + 1]. The experts of a mixture have
/// their tokens so, and the sequences of a batch. Offsets ascend; what they say beyond the tensor's rows is cut off.
template <class Target>
struct Segments {
  Pointer<Target, const i32> offsets;  ///< count + 1 of them
  int count;
  int rows;  ///< of the tensor

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
    int first;   ///< its first row,
    int end;     ///< and the row after the segment's last one: the tile ends there if not before
    bool empty;  ///< its cluster has no rows of the segment: nothing is to be done
  };
  /// Tile `m` of tiles of `tile_rows`. No tile has rows of two segments, nor have `cluster` neighbours, which then may share what belongs
  /// to the segment and take equally many steps; the last ones of them may have no rows.
  ///
  /// Segment g has the tiles from offsets[g] / tile_rows + g on, some of which may be empty. So the host knows how many there are without
  /// knowing the offsets, and a tile is found by halving.
  TW_INLINE Part find(int m, int tile_rows, int cluster = 1) const {
    const u32 together = static_cast<u32>(tile_rows * cluster);
    const int group = static_cast<int>(static_cast<u32>(m) / static_cast<u32>(cluster));
    const auto first_group = [&](int g) { return static_cast<int>(static_cast<u32>(clamp(offsets[g])) / together) + g; };
    int low = 0, high = count;  // the first group: at low before this one or at it, at high after it
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_group(middle) <= group ? low : high) = middle;
    }
    const Segment segment = at(low);
    const int in_segment = (group - first_group(low)) * static_cast<int>(together);
    return {low, segment.begin + in_segment + (m - group * cluster) * tile_rows, segment.begin + segment.size, in_segment >= segment.size};
  }
  /// How many tiles find() is asked for, of `rows` rows in `count` segments: a multiple of the cluster.
  static constexpr int tiles(int rows, int count, int tile_rows, int cluster = 1) {
    return (rows / (tile_rows * cluster) + count) * cluster;
  }

 private:
  TW_INLINE int clamp(int row) const { return max(min(row, rows), 0); }
};

/// Which blocks there are of each row of a matrix of blocks (compressed sparse rows): row r has blocks[n] for n from begins[r] up to
/// begins[r + 1].
template <class Target>
struct BlockLists {
  Pointer<Target, const i32> begins;  ///< one for each row, and the last one's end
  Pointer<Target, const i32> blocks;

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
