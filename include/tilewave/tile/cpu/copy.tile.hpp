#pragma once

#include "tilewave/tile/cpu/target.tile.hpp"

#if !TW_ON_GPU

namespace tw::cpu {

/// Copies from global memory to the tiles of a slot.
struct Copy {
  template <class G, class S>
  void tile(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    using T = typename S::Element;
    require(cut_piece<T>(col));
    if ((row < 0 && row + S::rows > 0) || (col < 0 && col + S::cols > 0))
      schedule_error("a tile begins before its tensor and ends inside it");
    const int rows = row < 0 ? 0 : clamp(from.rows - row, S::rows);
    const int cols = col < 0 ? 0 : clamp(from.cols - col, S::cols);
    constexpr bool columns = S::contract == Contract::columns;
    to.valid_outer = columns ? rows : cols;
    to.valid_depth = columns ? cols : rows;
    if (rows == 0 || cols == 0) return;
    const T* source = from.template at<const T>(row, col, i, j);
    const long outer_stride = columns ? from.stride_row : from.stride_col;
    const long depth_stride = columns ? from.stride_col : from.stride_row;
    pack(to.panels, source, outer_stride, depth_stride, to.valid_outer, to.valid_depth, S::panel_depth);
  }
  template <class G, class S>
  void part(const G& from, S& to, int first, int count, int row, int col, int i = 0, int j = 0) const {
    constexpr bool columns = S::contract == Contract::columns;
    require(cut_piece<typename S::Element>(col));
    const int rows = clamp(from.rows - row, count), cols = clamp(from.cols - col, S::cols);
    // The whole tile is valid: rows outside the tensor are zeros.
    to.valid_outer = columns ? S::rows : cols;
    to.valid_depth = columns ? cols : S::rows;
    const auto* const source = from.template at<const typename S::Element>(row, col, i, j);
    const long outer_stride = columns ? from.stride_row : from.stride_col;
    const long depth_stride = columns ? from.stride_col : from.stride_row;
    auto* const at = to.panels + S::offset(first, 0);
    if (rows < count || cols == 0) zero(to, first, count);
    if (rows == 0 || cols == 0) return;
    pack(at, source, outer_stride, depth_stride, columns ? rows : cols, columns ? cols : rows, S::panel_depth);
  }
  /// The tile whose rows are the window that begins at (row, i, j). The window may be entirely outside the tensor.
  template <class G, class S>
  void window(const G& from, S& to, int row, int col, int i, int j) const {
    static_assert(S::contract == Contract::columns && S::rows % kPanelRows == 0, "windows are tiles of whole panels of rows");
    require(cut_piece<typename S::Element>(col));
    const Window& w = from.window;
    to.valid_outer = 0;
    to.valid_depth = clamp(from.cols - col, S::cols);
    if (to.valid_depth == 0) return;
    for (int panel = 0; panel < S::rows; panel += kPanelRows) {
      auto* const target = to.panels + panel * S::panel_depth;
      bool zeroed = false;
      // Works line by line: in each line of the window, the pixels inside the tensor are one contiguous run.
      for (int first = panel; first < panel + kPanelRows;) {
        const int line_end = first - first % w.width() + w.width();
        const int end = min(line_end, panel + kPanelRows);
        const int in_i = i + w.i(first), in_j = j + w.j(first), in_row = row + w.row(first);
        int begin = first, size = 0;
        if (in_i >= 0 && in_i < from.size_i && in_j >= 0 && in_j < from.size_j) {
          const int before = in_row < 0 ? (-in_row + w.row_step - 1) / w.row_step : 0;
          const int inside = in_row < from.rows ? (from.rows - in_row + w.row_step - 1) / w.row_step : 0;
          begin = first + min(before, end - first);
          size = max(first + min(inside, end - first) - begin, 0);
        }
        if (size < kPanelRows && !zeroed) {
          __builtin_memset(target, 0, static_cast<unsigned long>(S::panel_depth) * kPanelRows * sizeof *target);
          zeroed = true;
        }
        if (size > 0) {
          pack_run(target, begin - panel,
                   from.template at<const typename S::Element>(in_row + (begin - first) * w.row_step, col, in_i, in_j),
                   w.row_step * from.stride_row, from.stride_col, size, to.valid_depth, S::panel_depth);
          to.valid_outer = begin + size;
        }
        first = end;
      }
    }
  }
  template <class G, class S>
  void tile_for_cluster(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    tile(from, to, row, col, i, j);
  }
  template <class G, class S>
  void window_for_cluster(const G& from, S& to, int row, int col, int i, int j) const {
    window(from, to, row, col, i, j);
  }
  /// Copies elements of one row; 0 outside the tensor.
  template <class G, class T, int N>
  void vector(const G& from, SharedVector<T, N>& to, int row, int col, int i = 0, int j = 0) const {
    require(cut_piece<T>(col));
    const bool has_row = row >= 0 && row < from.rows;
    for (int n = 0; n < N; ++n)
      to.x[n] = has_row && col + n >= 0 && col + n < from.cols ? *from.template at<const T>(row, col + n, i, j) : tw::to<T>(0.0f);
  }
  template <class T>
  static void pack(Packed<T>* panels, const T* source, long row_stride, long depth_stride, int rows, int depth, int panel_depth) {
    const Library& lib = library();
    const auto run = [&](auto packer, const auto* bits, auto* to) { packer(to, bits, row_stride, depth_stride, rows, depth, panel_depth); };
    if constexpr (is_same<T, float>) {
      run(lib.pack_f32, source, panels);
    } else if constexpr (is_same<T, f16>) {
      run(lib.pack_f16, &source->bits, panels);
    } else if constexpr (is_same<T, bf16>) {
      run(lib.pack_bf16, &source->bits, &panels->bits);
    } else if constexpr (is_same<T, fp8_e4m3>) {
      run(lib.pack_e4m3, &source->bits, panels);
    } else if constexpr (is_same<T, fp8_e5m2>) {
      run(lib.pack_e5m2, &source->bits, panels);
    } else if constexpr (is_bits<T>) {
      run(lib.pack_i8, reinterpret_cast<const i8*>(source), panels);
    } else {
      static_assert(is_same<T, i8>, "the cpu target packs f32, f16, bf16, fp8 and i8 tiles, codes and e8m0");
      run(lib.pack_i8, source, panels);
    }
  }

 protected:
  static int clamp(int left, int size) { return left < 0 ? 0 : left > size ? size : left; }
  /// Clears `count` rows of a tile, starting at a multiple of 16.
  template <class S>
  static void zero(S& to, int first, int count) {
    constexpr bool columns = S::contract == Contract::columns;
    constexpr long panels = round_up(S::outer, kPanelRows) / kPanelRows;
    auto* const at = to.panels + S::offset(first, 0);
    // These rows are whole panels or, if rows are contracted, the same lines in every panel.
    const unsigned long size = static_cast<unsigned long>(count) * (columns ? S::panel_depth : kPanelRows) * sizeof *to.panels;
    for (long panel = 0; panel < (columns ? 1 : panels); ++panel) __builtin_memset(at + panel * kPanelRows * S::panel_depth, 0, size);
  }

  /// Packs `rows` rows into a panel of zeros, starting at the panel's row `first`.
  template <class T>
  static void pack_run(Packed<T>* panel, int first, const T* source, long row_stride, long depth_stride, int rows, int depth,
                       int panel_depth) {
    if (rows == kPanelRows) return pack(panel, source, row_stride, depth_stride, rows, depth, panel_depth);
    constexpr int piece = 64;  // this many columns at a time go through a panel on the stack
    using Piece = Panels<T, kPanelRows, piece>;
    Piece packed;
    for (int k = 0; k < depth; k += piece) {
      const int columns = min(piece, depth - k);
      pack(packed.panels, source + k * depth_stride, row_stride, depth_stride, rows, columns, piece);
      for (int c = 0; c < columns; c += Piece::group)  // a line holds 4 bytes of each row
        __builtin_memcpy(panel + (k + c) * kPanelRows + first * Piece::group, packed.panels + c * kPanelRows,
                         static_cast<unsigned long>(rows) * 4);
    }
  }
};

/// Copies into a slot of a GatherRing.
struct GatherCopy : Copy {
  /// Fills row r of the tile with row row_of(r) of the tensor, or with zeros if that is outside the tensor.
  template <class G, class S, class RowOf>
  void gather(const G& from, S& to, RowOf row_of, int col, int i = 0, int j = 0) const {
    using T = typename S::Element;
    require(cut_piece<T>(col));
    const int cols = col < 0 ? 0 : clamp(from.cols - col, S::cols);
    const auto source = [&](int r) {
      const int row = row_of(r);
      return row >= 0 && row < from.rows ? from.template at<const T>(row, col, i, j) : nullptr;
    };
    if constexpr (S::contract == Contract::columns) {
      to.valid_outer = 0;
      to.valid_depth = cols;
      if (cols == 0) return;
      for (int panel = 0; panel < S::rows; panel += kPanelRows) {
        auto* const target = to.panels + panel * S::panel_depth;
        __builtin_memset(target, 0, static_cast<unsigned long>(S::panel_depth) * kPanelRows * sizeof *target);
        for (int r = panel; r < min(panel + kPanelRows, S::rows); ++r) {
          if (const T* const row = source(r)) {
            pack_run(target, r - panel, row, 0, from.stride_col, 1, cols, S::panel_depth);
            to.valid_outer = r + 1;
          }
        }
      }
    } else {
      __builtin_memset(to.panels, 0, sizeof to.panels);
      to.valid_outer = cols;
      to.valid_depth = S::rows;
      for (int r = 0; r < S::rows; ++r)
        if (const T* const row = source(r))
          for (int c = 0; c < cols; ++c) to.panels[S::offset(r, c)] = to_packed<T>(row[c * from.stride_col]);
    }
  }
};

struct Producer {
  template <class G>
  void prefetch(const G&, int, int, int, int) const {}
  void wait_for_previous_launch() const {}
  template <int N, class RingType>
  void limit(const RingType&) const {
    static_assert(N >= 1, "one slot must be allowed on its way");
  }
  template <class RingType, class Fill>
  void put(RingType& ring, Fill fill) const {
    if (ring.filled + ring.taken == RingType::stages)
      schedule_error("put into a ring with no free slot: on a GPU the kernel would wait forever");
    auto& slot = ring.slots[ring.next_put];
    if constexpr (RingType::gathers) {
      const bool later = poison_released_slots();
      if (later) __builtin_memset(static_cast<void*>(&slot), 0xff, sizeof slot);
      fill(GatherCopy{}, later ? ring.arriving[ring.next_put] : slot);
    } else {
      fill(Copy{}, slot);
    }
    ring.next_put = (ring.next_put + 1) % RingType::stages;
    ++ring.filled;
  }
};

}  // namespace tw::cpu

#endif  // !TW_ON_GPU
