#pragma once

#include "tilewave/tile/cpu/target.tile.hpp"

// Elements of Awaited tensors. Other threads store them while this one waits.
#if !TW_ON_GPU
namespace tw::cpu {

/// Whether the element's bits are all ones.
template <class E>
bool is_absent(E x) {
  static_assert(is_same<E, float> || is_same<E, f16> || is_same<E, bf16>, TW_AWAITED);
  using Bits = conditional<sizeof(E) == 4, u32, u16>;
  return bit_cast<Bits>(x) == static_cast<Bits>(~Bits{0});
}

/// Waits for columns col0 to col0 + cols - 1 of a row; for none outside the tensor.
template <class G>
void await_row(const G& from, int row, int col0, int cols, int i, int j) {
  using E = typename G::Element;
  if (row < 0 || row >= from.rows) return;
  for (int col = max(col0, 0); col < min(col0 + cols, from.cols); ++col) {
    const E* const place = from.template at<const E>(row, col, i, j);
    Waiting waiting;
    for (E x;;) {
      __atomic_load(place, &x, __ATOMIC_ACQUIRE);
      if (!is_absent(x)) break;
      wait_for_others(waiting, "await() waits for an element that no block stores");
    }
  }
}

/// Stores an element that nobody has stored before. A NaN whose bits are all ones becomes another.
template <class G, class T>
void store_awaited(const G& to, int row, int col, int i, int j, T value) {
  using E = typename G::Element;
  E* const place = to.template at<E>(row, col, i, j);
  E x;
  __atomic_load(place, &x, __ATOMIC_RELAXED);
  if (!is_absent(x)) schedule_error("an element of an Awaited tensor is stored again, or the launch did not fill it with ones");
  x = tw::to<E>(value);
  if (is_absent(x)) x = bit_cast<E>(static_cast<conditional<sizeof(E) == 4, u32, u16>>(sizeof(E) == 4 ? 0x7fffffffu : 0x7fffu));
  __atomic_store(place, &x, __ATOMIC_RELEASE);
}

/// What block.await() gives a kernel.
template <class Block>
struct AwaitedLoads {
  const Block& block;

  template <class F, class G>
  void load(F& to, const G& from, int row, int col, int i = 0, int j = 0) const {
    for (int r = 0; r < F::rows; ++r) await_row(from, row + r, col, F::cols, i, j);
    block.load(to, plain(from), row, col, i, j);
  }
  template <class T, int N, int C, int Warps, class G>
  void load(DividedOperand<T, N, C, Warps>& to, const G& from, int row, int col, int i = 0, int j = 0) const {
    for (int r = 0; r < N; ++r) await_row(from, row + r, col, C, i, j);
    block.load(to, plain(from), row, col, i, j);
  }
  template <class T, class Tile, class G>
  void load(ColumnVector<T, Tile>& to, const G& from, int row, int col, int i = 0, int j = 0) const {
    await_row(from, row, col, Tile::cols, i, j);
    block.load(to, plain(from), row, col, i, j);
  }
  template <class F, class G, class RowOf>
  void gather(F& to, const G& from, RowOf row_of, int col, int i = 0, int j = 0) const {
    for (int r = 0; r < F::rows; ++r) await_row(from, row_of(r), col, F::cols, i, j);
    block.gather(to, plain(from), row_of, col, i, j);
  }

 private:
  template <class G>
  static const typename G::Plain& plain(const G& from) {
    return from;
  }
};

}  // namespace tw::cpu
#endif
