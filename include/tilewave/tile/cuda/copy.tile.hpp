#pragma once

#include "tilewave/tile/cuda/buffers.tile.hpp"
#include "tilewave/tile/cuda/memory.tile.hpp"

// Copies into Shared tiles by a block's threads, 16 bytes at a time.

namespace tw::cuda {

/// The interface of both kinds of copy: it says which rows of a tensor go where. The derived `Copy` moves them.
template <class Copy>
struct TileCopy {
  /// The tile whose first element is (row, col) of outer indices (i, j). Elements outside the tensor become 0.
  template <class G, class S>
  TW_INLINE void tile(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    self().rows(from, to, 0, S::rows, row, col, i, j);
  }
  /// Part of a tile that comes from several places: its rows `first` to `first` + count - 1, from (row, col) of (i, j) on.
  template <class G, class S>
  TW_INLINE void part(const G& from, S& to, int first, int count, int row, int col, int i = 0, int j = 0) const {
    self().rows(from, to, first, count, row, col, i, j);
  }
  /// The tile whose rows are the window that begins at (row, i, j). All of it may lie outside the tensor.
  template <class G, class S>
  TW_INLINE void window(const G& from, S& to, int row, int col, int i, int j) const {
    const Window& w = from.window;
    self().places(from, to, 0, S::rows, col, [&](int r) {
      const int in_i = i + w.i(r), in_j = j + w.j(r);
      return Place{row + w.row(r), in_i, in_j, from.inside_outer(in_i, in_j)};
    });
  }
  /// Elements of one row, from (row, col) on.
  template <class G, class T, int N>
  TW_INLINE void vector(const G& from, SharedVector<T, N>& to, int row, int col, int i = 0, int j = 0) const {
    TW_NO_UNROLL
    for (int n = self().thread; n < N; n += Copy::threads)
      to.x[n] = from.inside(row, col + n) ? *from.template at<const T>(row, col + n, i, j) : tw::to<T>(0.0f);
  }
  /// The same tile for every block of a cluster: each loads its own.
  template <class G, class S>
  TW_INLINE void tile_for_cluster(const G& from, S& to, int row, int col, int i = 0, int j = 0) const {
    tile(from, to, row, col, i, j);
  }
  template <class G, class S>
  TW_INLINE void window_for_cluster(const G& from, S& to, int row, int col, int i, int j) const {
    window(from, to, row, col, i, j);
  }

 private:
  TW_INLINE const Copy& self() const { return static_cast<const Copy&>(*this); }
};

/// Copies element by element, for bases and strides that rule out wider copies. It is slower, and exists so that no tensor is refused.
template <int Threads>
struct StridedCopy : TileCopy<StridedCopy<Threads>> {
  static constexpr int threads = Threads;
  int thread;
  TW_INLINE constexpr explicit StridedCopy(int t) : thread(t) {}

  template <class G, class S>
  TW_INLINE void rows(const G& from, S& to, int first, int count, int row, int col, int i, int j) const {
    places(from, to, first, count, col, [&](int r) { return Place{row + r - first, i, j, true}; });
  }
  /// Rows `first` to `first` + count - 1 of the tile.
  template <class G, class S, class PlaceOf>
  TW_INLINE void places(const G& from, S& to, int first, int count, int col, PlaceOf place_of) const {
    using Bits = conditional<sizeof(typename S::Element) == 1, u8,
                             conditional<sizeof(typename S::Element) == 2, u16, u32>>;  // bits are moved, whatever they mean
    constexpr int width = 16 / static_cast<int>(sizeof(Bits));
    constexpr int pieces = S::panels * S::panel_cols / width;
    const bool along_rows =
        from.stride_col != 1;  // then neighbouring threads take neighbouring rows, so that they read neighbouring addresses
    TW_NO_UNROLL
    for (int n = thread; n < count * pieces; n += Threads) {
      const int r = first + (along_rows ? n % count : n / pieces);
      const int c = (along_rows ? n / count : n % pieces) * width;
      const Place place = place_of(r);
      u32 words[4] = {0, 0, 0, 0};
      TW_UNROLL
      for (int e = 0; e < width; ++e) {
        const bool inside = place.inside && from.inside(place.row, col + c + e);
        const u32 bits = inside ? u32{*from.template at<const Bits>(place.row, col + c + e, place.i, place.j)} : 0u;
        words[e * 4 / width] |= bits << (e * 32 * 4 / width % 32);
      }
      ptx::store_shared_16(ptx::address(to.bytes) + static_cast<u32>(S::offset(r, c)), words[0], words[1], words[2], words[3]);
    }
  }
};

/// Copies by cp.async: rows consist of whole, aligned pieces of 16 bytes. Neighbouring threads copy the pieces of a 128-byte line.
template <int Threads>
struct AsyncCopy : TileCopy<AsyncCopy<Threads>> {
  static constexpr int threads = Threads;
  int thread;
  TW_INLINE constexpr explicit AsyncCopy(int t) : thread(t) {}

  static constexpr int line_pieces = kPanelBytes / 16;
  static constexpr int rows_at_once = Threads / line_pieces;

  template <class G, class S>
  TW_INLINE void rows(const G& from, S& to, int first, int count, int row, int col, int i, int j) const {
    if constexpr (is_strip<S>) return places(from, to, first, count, col, [&](int r) { return Place{row + r - first, i, j, true}; });
    using E = typename S::Element;
    const int line = thread / line_pieces, piece = thread % line_pieces;
    const int r0 = first + line, c = col + piece * width<S>;
    const u8* source = reinterpret_cast<const u8*>(from.template piece_at<const E>(row + line, c, i, j));
    const i64 step = from.stride_row * static_cast<i64>(rows_at_once * sizeof(E));
    const u32 target = ptx::address(to.bytes) + static_cast<u32>(r0 * kPanelBytes) + swizzled(r0, piece);
    const auto copy_row = [&](int n, int r) {
      // The next row is 8 rows further on, where the swizzle is the same, or 4 in small blocks.
      const u32 at = rows_at_once % 8 == 0 ? target + static_cast<u32>(n * rows_at_once * kPanelBytes)
                                           : ptx::address(to.bytes) + static_cast<u32>(r * kPanelBytes) + swizzled(r, piece);
      pieces<S>(from, at, source, static_cast<u32>(row + r - first) < static_cast<u32>(from.rows), c);
      source += step;
    };
    if (count == S::rows) {
      TW_UNROLL
      for (int n = 0; n < (S::rows + rows_at_once - 1) / rows_at_once; ++n) {
        if (S::rows % rows_at_once == 0 || r0 + n * rows_at_once < S::rows) copy_row(n, r0 + n * rows_at_once);
      }
    } else {
      TW_NO_UNROLL
      for (int n = 0; n * rows_at_once + line < count; ++n) copy_row(n, r0 + n * rows_at_once);
    }
  }
  template <class G, class S, class PlaceOf>
  TW_INLINE void places(const G& from, S& to, int first, int count, int col, PlaceOf place_of) const {
    using E = typename S::Element;
    const int line = thread / line_pieces, piece = thread % line_pieces, c = col + piece * width<S>;
    TW_UNROLL
    for (int n = 0; n < (S::rows + rows_at_once - 1) / rows_at_once; ++n) {
      const int r = first + line + n * rows_at_once;
      if (r >= first + count) continue;
      const Place place = place_of(r);
      if constexpr (is_strip<S>) {
        const auto* const source = from.template piece_at<const E>(place.row, col, place.i, place.j);
        const bool inside = place.inside && static_cast<u32>(place.row) < static_cast<u32>(from.rows);
        if (piece == n % line_pieces) ptx::copy_async_16(ptx::address(to.bytes) + static_cast<u32>(r * 16), source, inside);
        continue;
      }
      pieces<S>(from, ptx::address(to.bytes) + static_cast<u32>(r * kPanelBytes) + swizzled(r, piece),
                reinterpret_cast<const u8*>(from.template piece_at<const E>(place.row, c, place.i, place.j)),
                place.inside && static_cast<u32>(place.row) < static_cast<u32>(from.rows), c);
    }
  }

 private:
  template <class S>
  static constexpr int width = 16 / static_cast<int>(sizeof(typename S::Element));
  static TW_INLINE u32 swizzled(int row, int piece) { return static_cast<u32>((piece ^ (row & 7)) * 16); }
  /// Copies this thread's piece of each panel of a row, from column `c` on.
  template <class S, class G>
  TW_INLINE void pieces(const G& from, u32 to, const u8* source, bool row_inside, int c) const {
    TW_UNROLL
    for (int panel = 0; panel < S::panels; ++panel) {
      const bool inside = row_inside && static_cast<u32>(c + panel * S::panel_cols) < static_cast<u32>(from.cols);
      ptx::copy_async_16(to + static_cast<u32>(panel * S::panel_bytes), source + panel * kPanelBytes, inside);
    }
  }
};

/// Copies into a slot of a GatherRing.
template <class Copy>
struct Gathering : Copy {
  using Copy::Copy;
  /// Fills row r of the tile with row row_of(r) of the tensor, or with zeros if there is no such row, as for -1.
  template <class G, class S, class RowOf>
  TW_INLINE void gather(const G& from, S& to, RowOf row_of, int col, int i = 0, int j = 0) const {
    Copy::places(from, to, 0, S::rows, col, [&](int r) { return Place{row_of(r), i, j, true}; });
  }
};

}  // namespace tw::cuda
