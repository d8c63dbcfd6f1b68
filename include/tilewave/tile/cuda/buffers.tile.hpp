#pragma once

#include "tilewave/tile/cuda/fragment.tile.hpp"

// Shared memory that the computing threads write: Buffers, vectors, the exchange between warpgroups, and copies of Fragments with ordinary
// loads and stores. A target may have faster ways.

namespace tw::cuda {

/// A tile owned by the computing threads, with the layout of a Shared tile.
template <class T, int R, int C, Contract kContract>
struct Buffer {
  using Layout = Shared<T, R, C, kContract>;
  using Element = T;
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr Contract contract = kContract;
  static constexpr int box_rows = Layout::box_rows;
  static constexpr int box_cols = Layout::box_cols;
  int offset;

  /// `memory`: the allocator, or a ring of one slot, whose memory it is.
  constexpr explicit Buffer(auto& memory) : offset(offset_in(memory)) {}
  TW_INLINE Layout& tile() const { return *reinterpret_cast<Layout*>(shared_memory() + offset); }
  TW_INLINE T& at(int row, int col) const { return tile().at(row, col); }
  template <class U, Contract k, int kColumn, int Count>
  TW_INLINE auto view() const {
    return tile().template view<U, k, kColumn, Count>();
  }

 private:
  template <class M>
  static constexpr int offset_in(M& memory) {
    if constexpr (requires { M::stages; }) {
      static_assert(M::stages == 1 && sizeof(Layout) <= sizeof(typename M::Slot), TW_BUFFER_IN_SLOT);
      return memory.offset();
    } else {
      return memory.tiles(sizeof(Layout));
    }
  }
};
/// The tile in shared memory that a product reads.
template <class S>
TW_INLINE const S& in_shared(const S& operand) {
  return operand;
}
template <class T, int R, int C, Contract contract>
TW_INLINE const Shared<T, R, C, contract>& in_shared(const Buffer<T, R, C, contract>& buffer) {
  return buffer.tile();
}

/// On this target threads add from registers. The box of a tensor map is Hopper's, so that Params have the same layout.
template <int R, int C>
struct Outbox {
  using Element = float;
  static constexpr int rows = R;
  static constexpr int cols = C;
  static constexpr int box_rows = Shared<float, R, C, Contract::columns>::box_rows;
  static constexpr int box_cols = Shared<float, R, C, Contract::columns>::box_cols;
  constexpr explicit Outbox(auto&) {}
};

template <class T, int N>
struct VectorBuffer {
  static constexpr int size = N;
  using Element = T;
  int offset;
  constexpr explicit VectorBuffer(auto& allocator) : offset(allocator.vectors(N * static_cast<int>(sizeof(T)))) {}
  TW_INLINE T& operator[](int i) const { return reinterpret_cast<T*>(shared_memory() + offset)[i]; }
};

/// A vector in a slot. It is aligned like a tile, so that slots contain no padding.
template <class T, int N>
struct alignas(kPanelAlignment) SharedVector {
  static_assert(N <= 256 && N * sizeof(T) % 16 == 0, "a SharedVector has up to 256 elements, which are a multiple of 16 bytes");
  static constexpr int size = N;
  static constexpr int box_rows = 1;
  static constexpr int box_cols = N;
  static constexpr int swizzle_bytes = 0;
  using Element = T;
  T x[N];
  TW_INLINE const T& operator[](int i) const { return x[i]; }
};

/// Into how many parts warpgroups divide the rows of F: each holds some of the columns or, of solos, has had all columns of some tiles.
template <class F>
constexpr int row_parts_of() {
  if constexpr (requires { F::soloists; })
    return F::soloists;
  else
    return F::column_warps;
}
/// One value for each row and each of its parts.
template <class T, class Tile>
struct RowExchange {
  static constexpr int parts = row_parts_of<Tile>();
  int offset;
  constexpr explicit RowExchange(auto& allocator) : offset(allocator.vectors(Tile::rows * parts * static_cast<int>(sizeof(T)))) {}
  TW_INLINE T& at(int part, int row) const { return reinterpret_cast<T*>(shared_memory() + offset)[part * Tile::rows + row]; }
};

/// Neighbours in a row that a thread copies between a tile in registers and one in shared memory at once: up to 16 bytes, which no swizzle
/// divides.
template <class F, class T>
inline constexpr int piece_width = min(F::width, 16 / static_cast<int>(sizeof(T)));

/// Copies a tile in registers to one in shared memory.
template <class F, class S>
TW_INLINE void store_pieces(const Position& at, const F& from, S& to) {
  using T = typename S::Element;
  constexpr int width = piece_width<F, T>;
  TW_UNROLL
  for (int e = 0; e < F::size; e += width) {
    Words<T, width> words;
    words.pack(from.x + e);
    words.store(reinterpret_cast<T*>(to.bytes + S::offset(F::row(at, e), F::col(at, e))));
  }
}
template <class F, class S>
TW_INLINE void store_transposed_elements(const Position& at, const F& from, S& to) {
  using T = typename S::Element;
  TW_UNROLL
  for (int e = 0; e < F::size; ++e) to.at(F::col(at, e), F::row(at, e)) = tw::to<T>(from.x[e]);
}
template <class F, class S>
TW_INLINE void load_pieces(const Position& at, F& to, const S& from) {
  using T = typename S::Element;
  constexpr int width = piece_width<F, T>;
  TW_UNROLL
  for (int e = 0; e < F::size; e += width) {
    const auto piece = *reinterpret_cast<const Piece<T, width>*>(from.bytes + S::offset(F::row(at, e), F::col(at, e)));
    TW_UNROLL
    for (int n = 0; n < width; ++n) to.x[e + n] = tw::to<typename F::Element>(piece.x[n]);
  }
}

/// Copies a vector in shared memory to the values of a tile's rows or columns.
template <class T, class Tile, class V>
TW_INLINE void load_vector(const Position& at, RowVector<T, Tile>& to, const V& from) {
  static_assert(V::size == Tile::rows, "a vector has an element for each row");
  TW_UNROLL
  for (int i = 0; i < to.size; ++i) to.x[i] = from[to.row(at, i)];
}
/// `first`: the element for column 0.
template <class T, class Tile, class V>
TW_INLINE void load_vector(const Position& at, ColumnVector<T, Tile>& to, const V& from, int first = 0) {
  static_assert(V::size >= Tile::cols, "a vector has an element for each column");
  TW_UNROLL
  for (int i = 0; i < to.size; ++i) to.x[i] = from[first + to.col(at, i)];
}

/// Combines the values of the kWarps warps that have parts of the rows of F, always in the same order, so that all warps get the same bits.
/// sync() waits for all threads.
template <int kWarps, class F, class T, class Op, class Sync>
TW_INLINE void exchange_rows(const Position& at, RowVector<T, F>& vector, const RowExchange<T, F>& exchange, Op op, Sync sync) {
  constexpr int row_warps = F::warps / F::column_warps, parts = kWarps / row_warps;
  if constexpr (parts > 1) {
    static_assert(parts == RowExchange<T, F>::parts, TW_SPLIT_ROW);
    if (at.lane % F::row_threads == 0) {
      TW_UNROLL
      for (int i = 0; i < vector.size; ++i) exchange.at(at.block_warp() / row_warps, vector.row(at, i)) = vector.x[i];
    }
    sync();
    TW_UNROLL
    for (int i = 0; i < vector.size; ++i) {
      const int row = vector.row(at, i);
      T value = exchange.at(0, row);
      TW_UNROLL
      for (int part = 1; part < parts; ++part) value = op(value, exchange.at(part, row));
      vector.x[i] = value;
    }
  }
  sync();  // the next exchange writes to the same memory; and this function is a barrier on every target
}

}  // namespace tw::cuda
