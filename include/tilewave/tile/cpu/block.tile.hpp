#pragma once

#include "tilewave/tile/block_operations.tile.hpp"
#include "tilewave/tile/cpu/awaited.tile.hpp"
#include "tilewave/tile/cpu/global_rows.tile.hpp"
#include "tilewave/tile/cpu/hadamard.tile.hpp"
#include "tilewave/tile/cpu/products.tile.hpp"
#include "tilewave/tile/cpu/row_view.tile.hpp"
#include "tilewave/tile/cpu/transpose.tile.hpp"

#if !TW_ON_GPU

namespace tw::cpu {

/// What a kernel's compute() and finish() are given on the CPU. It has the same members as the other targets' blocks. `kRows`: the rows of
/// the kernel's Fragments.
template <int kRows>
class Block : public Products<kRows>, public BlockOperations<Block<kRows>> {
  using Base = Products<kRows>;
  using Operations = BlockOperations<Block>;
  using Base::buffers_, Base::overwrite, Base::touch;

 public:
  /// `pull` runs load() for the next step and returns false if there is none. `first_tile`: this is the launch's first tile, which prints.
  explicit Block(
      bool first_tile, bool (*pull)(void* context) = [](void*) { return false; }, void* context = nullptr, BufferUse* last_buffer = nullptr)
      : Base(unread_stores, last_buffer), first_tile_(first_tile), pull_(pull), context_(context) {}

  using Base::add_products, Base::load, Base::sync;
  using Operations::complete, Operations::load;

  // Rings

  template <class RingType>
  auto& take(RingType& ring) {
    auto& slot = peek(ring, 0);
    --ring.peeked;
    ring.next_take = (ring.next_take + 1) % RingType::stages;
    --ring.filled;
    ++ring.taken;
    return slot;
  }
  template <class RingType>
  auto& peek(RingType& ring, int ahead) {
    while (ring.filled <= ahead) {
      if (!pull_(context_))
        schedule_error("wait for a slot of an empty ring with no step left to load: on a GPU the kernel would wait forever");
    }
    for (; ring.peeked <= ahead; ++ring.peeked) {
      if constexpr (RingType::gathers) {
        const int n = (ring.next_take + ring.peeked) % RingType::stages;
        if (poison_released_slots()) __builtin_memcpy(static_cast<void*>(&ring.slots[n]), &ring.arriving[n], sizeof ring.slots[n]);
      }
    }
    return ring.slots[(ring.next_take + ahead) % RingType::stages];
  }
  template <class RingType>
  void release(RingType& ring) {
    if (ring.taken == 0) schedule_error("a ring's slot is released, but none is taken");
    auto& slot = ring.slots[(ring.next_take - ring.taken + 2 * RingType::stages) % RingType::stages];
    Base::require_unread(slot);
    if (ring.buffer) {
      if (ring.buffer->products > 0) schedule_error(kReleasedUnderAProduct);
      *ring.buffer = {};  // whoever takes the slot again has waited for all that used it
    }
    if (poison_released_slots()) __builtin_memset(static_cast<void*>(&slot), 0xff, sizeof slot);
    --ring.taken;
  }

  // Solos

  /// A CPU thread plays the solos of both warpgroups, and joins them as either would.
  template <class Fn>
  void solo(int n, Fn f) {
    require(buffers_.solo(n));
    f(*this);
  }
  template <class Fn>
  void meanwhile(int, Fn f) {
    f(*this);
  }
  template <class Fn>
  void join(int n, Fn f) {
    require(buffers_.join(n));
    f(*this);
    buffers_.end_join();
  }

  // Elements and rows

  template <class F>
  void fill(F& values, auto value) const {
    touch(values);
    for (auto& x : values.x) x = to<typename F::Element>(value);
    if constexpr (requires { values.view; }) values.view = nullptr;
  }
  template <class F, class Fn>
  void for_each(F& fragment, Fn f) const {
    touch(fragment);
    for (int r = 0; r < F::rows; ++r)
      for (int c = 0; c < F::cols; ++c) f(r, c, fragment.x[r * F::cols + c]);
  }
  template <int kFirst, int kCount, class F, class Fn>
  void for_columns(F& fragment, Fn f) const {
    touch(fragment);
    for (int r = 0; r < F::rows; ++r)
      for (int c = kFirst; c < kFirst + kCount; ++c) f(r, c, fragment.x[r * F::cols + c]);
  }
  template <int kDistance, int kPeriod, class F, class Fn>
  void for_pairs(F& fragment, Fn f) const {
    static_assert(kDistance % 8 == 0 && 2 * kDistance <= kPeriod && F::cols % kPeriod == 0, "for_pairs() takes whole periods of a row");
    touch(fragment);
    for (int r = 0; r < F::rows; ++r) {
      for (int c = 0; c < F::cols; ++c) {
        float* const x = fragment.x + r * F::cols + c;
        if (c % kPeriod < kDistance) f(r, c, x[0], x[kDistance]);
      }
    }
  }
  template <class F, class Other, class Fn>
  void for_each(F& first, Other& second, Fn f) const {
    touch(first);
    touch(second);
    static_assert(F::rows == Other::rows && F::cols == Other::cols, "tiles of two shapes");
    for (int r = 0; r < F::rows; ++r)
      for (int c = 0; c < F::cols; ++c) f(r, c, first.x[r * F::cols + c], second.x[r * F::cols + c]);
  }
  template <class F, class G, class Fn>
  void for_each_with(F& fragment, const G& other, int row0, int col0, int i, int j, Fn f) const {
    touch(fragment);
    using T = typename G::Element;
    for (int r = 0; r < F::rows; ++r) {
      for (int c = 0; c < F::cols; ++c) {
        const bool inside = row0 + r < other.rows && col0 + c < other.cols;
        f(r, c, fragment.x[r * F::cols + c], inside ? static_cast<float>(*other.template at<const T>(row0 + r, col0 + c, i, j)) : 0.0f);
      }
    }
  }
  template <class F, class Fn>
  void rows(F& fragment, Fn f) const {
    touch(fragment);
    for (int r = 0; r < F::rows; ++r) f(r, RowView<F>{fragment, r});
  }
  template <class T, class Tile, class Fn>
  void for_rows(RowVector<T, Tile>& vector, Fn f) const {
    for (int r = 0; r < vector.size; ++r) f(r, r, vector.x[r]);
  }
  template <class T, class Tile>
  bool owns_rows(const RowVector<T, Tile>&) const {
    return true;
  }
  template <int R, int N, int Warps>
  void fill(DividedSums<R, N, Warps>& sums, float value) const {
    for (float& x : sums.x) x = value;
  }
  template <int N, int Warps>
  void fill(DividedSquares<N, Warps>& squares, float value) const {
    for (float& x : squares.x) x = value;
  }
  template <class T, int N, int C, int Warps>
  void scale(DividedOperand<T, N, C, Warps>& operand, const DividedOperand<T, 8, C, Warps>& factors) const {
    for (int i = 0; i < N * C; ++i) operand.x[i] = static_cast<float>(to<T>(operand.x[i] * factors.x[i % (8 * C)]));
  }
  template <class T, int N, int C, int Warps>
  void add_squares(DividedSquares<N, Warps>& squares, const DividedOperand<T, N, C, Warps>& operand) const {
    for (int i = 0; i < N * C; ++i) squares.x[i / C] += operand.x[i] * operand.x[i];
  }
  template <class T, int C, int Warps>
  void scale(DividedRow<T, C, Warps>& row, const DividedRow<T, C, Warps>& factors) const {
    for (int c = 0; c < C; ++c) row.x[c] = static_cast<float>(to<T>(row.x[c] * factors.x[c]));
  }
  template <class T, int N, int C, int Warps>
  void add_squares(DividedSquares<N, Warps>& squares, const DividedRow<T, C, Warps>& row) const {
    for (int i = 0; i < N * C; ++i) squares.x[i / C] += row.x[i % C] * row.x[i % C];
  }
  template <class T, int C, int Warps, class G>
  void load(DividedRow<T, C, Warps>& to, const G& from, int row, int col0, int i = 0, int j = 0) const {
    load_row(to.x, C, from, row, col0, row >= 0 && row < from.rows ? Extent(col0, C, from.cols) : Extent{}, i, j, Fill{});
  }
  template <class T, int N, int C, int Warps>
  void spread(DividedOperand<T, N, C, Warps>& operand, const DividedRow<T, C, Warps>& row) const {
    for (int i = 0; i < N * C; ++i) operand.x[i] = row.x[i % C];
  }
  template <class T, int N, int C, int Warps>
  void make_digits(DividedOperand<T, N, C, Warps>& operand, DigitScales<N, Warps>&) const {
    for (int first = 0; first < N * C; first += C / Warps) round_to_fixed_point(operand.x + first, C / Warps);
  }
  template <class T, int N, int C, int Warps>
  void make_digits(DividedRow<T, C, Warps>& row, DigitScales<N, Warps>&) const {
    for (int first = 0; first < C; first += C / Warps) round_to_fixed_point(row.x + first, C / Warps);
  }
  template <class T, int N, int C, int Warps, class G>
  void load(DividedOperand<T, N, C, Warps>& to, const G& from, int row0, int col0, int i = 0, int j = 0) const {
    static_assert(!is_awaited<G>, TW_AWAITED_LOAD);
    for (int n = 0; n < N; ++n) {
      for (int c = 0; c < C; ++c) {
        const bool inside = row0 + n < from.rows && col0 + c < from.cols;
        to.x[n * C + c] = inside ? static_cast<float>(*from.template at<const T>(row0 + n, col0 + c, i, j)) : 0.0f;
      }
    }
  }
  template <class T, int N, int C, int Warps, int V, int Count>
  void load(DividedOperand<T, N, C, Warps>& to, const SharedVector<T, V> (&vectors)[Count]) const {
    static_assert(Count * V == C, TW_DIVIDED_VECTORS);
    for (int n = 0; n < N; ++n)
      for (int c = 0; c < C; ++c) to.x[n * C + c] = static_cast<float>(vectors[c / V][c % V]);
  }
  template <int R, int C, class Format, int Warps, class S, int Count, class H>
  void load(DividedScales<R, C, Format, Warps>& to, const S (&strips)[Count], const H& zeros, int row0, int col0) const {
    constexpr int groups = C / Format::group;
    static_assert(S::rows == R && Count * S::cols == groups, TW_DIVIDED_STRIPS);
    for (int n = 0; n < R * groups; ++n) {
      const int row = n / groups, group = n % groups, place = col0 / Format::group + group;
      to.scale[n] = static_cast<float>(strips[group / S::cols].get(row, group % S::cols));
      to.zero[n] = Format::middle;
      if constexpr (Format::zeros) {
        const bool inside = row0 + row < zeros.rows && place < zeros.cols;
        to.zero[n] = inside ? static_cast<float>(*zeros.template at<const u8>(row0 + row, place, 0, 0)) : 0.0f;
      }
    }
  }
  template <int R, int C, class Format, int Warps, class G, class H>
  void load(DividedScales<R, C, Format, Warps>& to, const G& scales, const H& zeros, int row0, int col0, int apart = 8) const {
    constexpr int groups = C / Format::group;
    for (int n = 0; n < R * groups; ++n) {
      const int row = row0 + n / groups / 8 * apart + n / groups % 8, group = col0 / Format::group + n % groups;
      const bool inside = row < scales.rows && group < scales.cols;
      to.scale[n] = inside ? static_cast<float>(*scales.template at<const typename Format::Scale>(row, group, 0, 0)) : 0.0f;
      if constexpr (!Format::zeros)
        to.zero[n] = Format::middle;
      else
        to.zero[n] = inside ? static_cast<float>(*zeros.template at<const u8>(row, group, 0, 0)) : 0.0f;
    }
  }
  template <int R, int N, int Warps, class F>
  void complete(const DividedSums<R, N, Warps>& sums, F& to, const Scratch<float, 16 * Warps, R * N>&) const {
    static_assert(F::rows >= N && F::cols == R, "complete() transposes: at least N rows of R results of R x N sums");
    for (int i = 0; i < F::rows * R; ++i) to.x[i] = i < N * R ? sums.x[i] : 0.0f;
  }
  template <int R, int N, int Warps, class F>
  void complete(const DividedSums<R, N, Warps>& sums, F& first, F& second, const Scratch<float, 16 * Warps, R * N>&) const {
    static_assert(F::rows >= N && F::cols == R / 2, "complete() transposes: at least N rows of R / 2 results, twice, of R x N sums");
    for (int n = 0; n < F::rows; ++n) {
      for (int r = 0; r < R / 2; ++r) {
        first.x[n * (R / 2) + r] = n < N ? sums.x[n * R + r] : 0.0f;
        second.x[n * (R / 2) + r] = n < N ? sums.x[n * R + R / 2 + r] : 0.0f;
      }
    }
  }
  template <int N, int Warps, class T, class Tile>
  void complete(const DividedSquares<N, Warps>& squares, RowVector<T, Tile>& to, const VectorBuffer<float, N * Warps>&) const {
    for (int n = 0; n < to.size; ++n) to.x[n] = n < N ? squares.x[n] : 0.0f;
  }
  template <class T, class Tile>
  void complete(RowVector<T, Tile>&) const {
    static_assert(!splits_rows<Tile>, TW_SPLIT_ROW);
  }
  /// A CPU thread holds whole rows, so there is nothing to combine.
  template <class T, class Tile, class Op>
  void combine_rows(RowVector<T, Tile>&, const RowExchange<T, Tile>&, Op) const {
    sync();
  }
  template <int N, class Fn>
  auto values_of_rows(Fn f) const {
    struct Values {
      decltype(f(0)) x[N];
    } values;
    for (int row = 0; row < N; ++row) values.x[row] = f(row);
    return values;
  }
  template <class Codes, int R, int C, class Values, class Fn>
  void widen(Widened<Codes, R, C>& tile, const Values& values, int end, Fn factor) const {
    tile.valid_outer = min(max(end, 0), R);
    tile.valid_depth = C;
    for (int row = 0; row < R; ++row) {
      for (int col = 0; col < C; ++col) {
        const float by = row < end ? static_cast<float>(factor(values.x[row], col)) : 0.0f;
        tile.panels[tile.offset(row, col)] =
            to_packed<f16>(row < end ? static_cast<float>(f16(static_cast<float>(tile.arriving.get(row, col)) * by)) : 0.0f);
      }
    }
  }
  /// x = f(x, y...) for every element: see map().
  template <class F, class Fn, class... Operands>
  TW_INLINE void map_with(F& tile, Fn f, const Operands&... operands) const {
    touch(tile);
    if constexpr (has_pieces<F>) {
      map_in_pieces(
          tile, f, [](int) {}, operands...);
    } else {
      for (int r = 0; r < F::rows; ++r)
        for (int c = 0; c < F::cols; ++c) tile.x[r * F::cols + c] = f(tile.x[r * F::cols + c], value_at<F>(operands, r, c)...);
    }
  }
  template <class T, int R, int C, TileKind kKind, class U>
  TW_INLINE void add_products(RowVector<float, Fragment<T, R, C, kKind>>& sums, const Fragment<T, R, C, kKind>& tile,
                              const ColumnVector<U, Fragment<T, R, C, kKind>>& vector) const {
    for (int r = 0; r < R; ++r) {
      sums.x[r] +=
          fold_columns<Sum, C>([&](int c) { return static_cast<float>(tile.x[r * C + c]) * static_cast<float>(vector.data()[c]); });
    }
  }
  template <class F, class G, class H>
  TW_INLINE void add_products(RowVector<float, F>& sums, const G& tile, int row0, int tile_i, const H& vector, int vector_i,
                              int col0) const {
    using T = typename G::Element;
    const int rows = min(F::rows, tile.rows - row0), cols = min(F::cols, tile.cols - col0);
    if (rows <= 0 || cols <= 0) return;
    const T* const from = tile.template at<const T>(row0, col0, tile_i, 0);
    const T* const by = vector.template at<const T>(0, col0, vector_i, 0);
    if constexpr (is_same<T, float> || is_same<T, bf16> || is_same<T, f16>) {
      if (tile.stride_col == 1 && vector.stride_col == 1) return dots(sums.x, from, tile.stride_row, by, rows, cols);
    }
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < cols; ++c)
        sums.x[r] += static_cast<float>(from[r * tile.stride_row + c * tile.stride_col]) * static_cast<float>(by[c * vector.stride_col]);
    }
  }
  template <class T, int R, int C, TileKind kKind, class Fn>
  TW_INLINE void pairs(Fragment<T, R, C / 2, kKind>& to, const Fragment<T, R, C, kKind>& from, Fn f) const {
    for (int n = 0; n < R * C / 2; ++n) to.x[n] = f(from.x[2 * n], from.x[2 * n + 1]);
  }
  template <class T, int R, int C, class Fn>
  TW_INLINE void map_row_pairs(Fragment<T, R, C>& tile, Fn f) const {
    for (int r = 0; r < R; r += 2)
      for (int c = 0; c < C; ++c) tile.at(r, c) = tile.at(r + 1, c) = f(tile.at(r, c), tile.at(r + 1, c));
  }
  template <class T, int R, int C, class Op>
  void column_reduce(const Fragment<T, R, C>& fragment, ColumnVector<T, Fragment<T, R, C>>& vector, const Scratch<T, R, C>&, Op op) const {
    reduce_columns(fragment, vector, op);
  }
  template <class T, int R, int C, TileKind kKind, class Fn>
  TW_INLINE void column_fold(const Fragment<T, R, C, kKind>& rows, ColumnVector<T, Fragment<T, R, C, kKind>>& vector, Fn f) const {
    reduce_columns(rows, vector, f);
  }
  template <class T, int R, int C, TileKind kKind, int kCount, class Fn>
  TW_INLINE void column_fold(const Fragment<T, R, C, kKind> (&tiles)[kCount], ColumnVector<T, Fragment<T, R, C, kKind>> (&vectors)[kCount],
                             Fn f) const {
    for (int n = 0; n < kCount; ++n) reduce_columns(tiles[n], vectors[n], f);
  }
  template <class T, int R, int C, TileKind kKind, int kCount, class To, class Fn>
  TW_INLINE void column_fold(const Fragment<T, R, C, kKind> (&tiles)[kCount], To& to, Fn f) const {
    static_assert(To::kind == TileKind::rows && To::cols == C && To::rows >= kCount, "column_fold() of several tiles makes a row of each");
    ColumnVector<T, Fragment<T, R, C, kKind>> vector;
    for (int n = 0; n < To::rows; ++n) {
      if (n < kCount) reduce_columns(tiles[n], vector, f);
      for (int c = 0; c < C; ++c) to.x[n * C + c] = n < kCount ? vector.x[c] : T{};
    }
  }
  /// to(col, row) = from(row, col).
  template <class T, int R, int C, TileKind kKind>
  TW_INLINE void transpose(const Fragment<T, R, C, kKind>& from, Fragment<T, C, R, kKind>& to) const {
    constexpr int side = Interleave<sizeof(T)>::lanes;
    if constexpr (R % side == 0 && C % side == 0) {
      for (int r = 0; r < R; r += side)
        for (int c = 0; c < C; c += side) transpose_square<Interleave<sizeof(T)>>(from.x + r * C + c, C, to.x + c * R + r, R);
    } else {
      for (int c = 0; c < C; ++c)
        for (int r = 0; r < R; ++r) to.x[c * R + r] = from.x[r * C + c];
    }
  }
  template <class T, class Tile, class Fn>
  bool any(const RowVector<T, Tile>& vector, Fn f) const {
    for (const auto& x : vector.x)
      if (f(x)) return true;
    return false;
  }
  template <class T, class Tile, class Fn>
  bool sync_any(const RowVector<T, Tile>& vector, Fn f) const {
    sync();
    return any(vector, f);
  }

  // Global memory

  template <class T, int R, int C, TileKind kKind, class G>
  TW_INLINE void load(Fragment<T, R, C, kKind>& to, const G& from, int row0, int col0, int i = 0, int j = 0, Fill fill = {}) const {
    touch(to);
    load_rows(to, from, row0, col0, i, j, fill);
  }
  template <class T, int R, int C, int Warpgroups, class G>
  TW_INLINE void load(HeldFragment<T, R, C, Warpgroups>& to, const G& from, int row0, int col0, int i = 0, int j = 0,
                      Fill fill = {}) const {
    touch(to);
    load_rows(to, from, row0, col0, i, j, fill);
  }
  template <class T, int R, int C, TileKind kKind, class G, class RowOf>
  TW_INLINE void gather(Fragment<T, R, C, kKind>& to, const G& from, RowOf row_of, int col0, int i = 0, int j = 0, Fill fill = {}) const {
    const Extent cols(col0, C, from.cols);
    for (int r = 0; r < R; ++r) {
      const int row = row_of(r);
      load_row(to.x + r * C, C, from, row, col0, row >= 0 && row < from.rows ? cols : Extent{}, i, j, fill);
    }
  }
  template <class T, class Tile, class G>
  TW_INLINE void load(ColumnVector<T, Tile>& to, const G& from, int row, int col0, int i = 0, int j = 0, Fill fill = {}) const {
    static_assert(!is_awaited<G>, TW_AWAITED_LOAD);
    const bool has_row = row >= 0 && row < from.rows;
    if constexpr (G::readable && is_same<T, typename G::Element>) {
      if (has_row && col0 >= 0 && col0 + Tile::cols <= from.cols && from.stride_col == 1) {
        to.view = from.template at<const T>(row, col0, i, j);
        return;
      }
    }
    to.view = nullptr;
    load_row(to.x, Tile::cols, from, row, col0, has_row ? Extent(col0, Tile::cols, from.cols) : Extent{}, i, j, fill);
  }
  template <class T, class Tile, class G>
  TW_INLINE void load(RowVector<T, Tile>& to, const G& from, int row, int col, int i = 0, int j = 0, Fill fill = {}) const {
    static_assert(!is_awaited<G>, TW_AWAITED_LOAD);
    using E = typename G::Element;
    const Extent rows(row, to.size, from.rows);
    const bool has_col = col >= 0 && col < from.cols;
    for (int n = 0; n < to.size; ++n)
      to.x[n] = has_col && rows.has(n) ? tw::to<T>(*from.template at<const E>(row + n, col, i, j)) : tw::to<T>(fill.value);
  }
  template <class T, class Tile, class G>
  TW_INLINE void load_from_row(RowVector<T, Tile>& to, const G& from, int row, int col, int i = 0, int j = 0) const {
    load_row(to.x, to.size, from, row, col, row >= 0 && row < from.rows ? Extent(col, to.size, from.cols) : Extent{}, i, j, Fill{});
  }
  template <class T, class Tile, class G>
  TW_INLINE void store(const RowVector<T, Tile>& from, const G& to, int row, int col, int i = 0, int j = 0) const {
    using E = typename G::Element;
    const Extent rows(row, from.size, to.rows);
    if (col < 0 || col >= to.cols) return;
    if constexpr (is_awaited<G>) {
      for (int n = rows.begin; n < rows.end; ++n) store_awaited(to, row + n, col, i, j, from.x[n]);
      return;
    }
    for (int n = rows.begin; n < rows.end; ++n) *to.template at<E>(row + n, col, i, j) = tw::to<E>(from.x[n]);
  }
  template <class T, class Tile, class G>
  TW_INLINE void store_to_row(const RowVector<T, Tile>& from, const G& to, int row, int col, int i = 0, int j = 0) const {
    using E = typename G::Element;
    if (row < 0 || row >= to.rows) return;
    const Extent cols(col, from.size, to.cols);
    for (int n = cols.begin; n < cols.end; ++n) *to.template at<E>(row, col + n, i, j) = tw::to<E>(from.x[n]);
  }
  template <class G>
  TW_INLINE float value(const G& from, int row, int col, int i = 0, int j = 0) const {
    static_assert(!is_awaited<G>, TW_AWAITED_LOAD);
    const bool inside = row >= 0 && row < from.rows && col >= 0 && col < from.cols;
    return inside ? static_cast<float>(*from.template at<const typename G::Element>(row, col, i, j)) : 0.0f;
  }
  template <class F, class G>
  TW_INLINE void store(const F& from, const G& to, int row0, int col0, int i = 0, int j = 0) const {
    touch(from);
    const Extent rows(row0, F::rows, to.rows), cols(col0, F::cols, to.cols);
    if (cols.begin >= cols.end) return;
    if constexpr (is_awaited<G>) {
      for (int r = rows.begin; r < rows.end; ++r)
        for (int c = cols.begin; c < cols.end; ++c) store_awaited(to, row0 + r, col0 + c, i, j, from.x[r * F::cols + c]);
      return;
    }
    for (int r = rows.begin; r < rows.end; ++r) store_row(from, r, to, row0 + r, col0, cols, i, j);
  }
  template <class F, class G>
  TW_INLINE void save(const F& from, const G& to, int i) const {
    touch(from);
    float* const first = to.template at<float>(0, 0, i, 0);
    for (int n = 0; n < F::rows * F::cols; ++n) first[n] = from.x[n];
  }
  template <class F, class G>
  TW_INLINE void add_saved(F& to, const G& from, int i) const {
    touch(to);
    const float* const first = from.template at<const float>(0, 0, i, 0);
    for (int n = 0; n < F::rows * F::cols; ++n) to.x[n] += first[n];
  }
  template <class F, class G, class RowOf>
  TW_INLINE void scatter(const F& from, const G& to, RowOf row_of, int col0, int i = 0, int j = 0) const {
    touch(from);
    const Extent cols(col0, F::cols, to.cols);
    if (cols.begin >= cols.end) return;
    for (int r = 0; r < F::rows; ++r) {
      const int row = row_of(r);
      if (row >= 0 && row < to.rows) store_row(from, r, to, row, col0, cols, i, j);
    }
  }
  template <class F, class G, class RowOf>
  void scatter_add(const F& from, const G& to, RowOf row_of, int col0, int i = 0, int j = 0) const {
    touch(from);
    using T = typename G::Element;
    static_assert(is_same<T, float> || is_same<T, bf16> || is_same<T, f16>, "tiles are scattered to f32, f16 and bf16 tensors");
    const Extent cols(col0, F::cols, to.cols);
    for (int r = 0; r < F::rows; ++r) {
      const int row = row_of(r);
      if (row < 0 || row >= to.rows) continue;
      for (int c = cols.begin; c < cols.end; ++c) add_element(to.template at<T>(row, col0 + c, i, j), tw::to<T>(from.at(r, c)));
    }
  }
  template <class F, class G, class Fn, class... Operands>
  TW_INLINE void map_store(F& tile, const G& to, int row0, int col0, int i, int j, Fn f, const Operands&... operands) const {
    if constexpr (has_pieces<F> && converts<typename F::Element, typename G::Element>) {
      // The memory system stores one piece while the next one is computed.
      const Extent rows(row0, 1, to.rows), cols(col0, F::cols, to.cols);
      map_in_pieces(
          tile, f,
          [&](int c) {
            const int begin = max(c, cols.begin), n = min(c + kPiece, cols.end) - begin;
            if (rows.has(0) && n > 0) store_part(to, row0, col0 + begin, i, j, tile.x + begin, n);
          },
          operands...);
    } else {
      map_with(tile, f, operands...);
      store(tile, to, row0, col0, i, j);
    }
  }
  template <class S, class T, int R, int C, class G>
  void store(const Fragment<S, R, C>& from, const Staging<T, R, C>& staging, const G& to, int row0, int col0, int i = 0, int j = 0) {
    pass(staging, col0);
    store(from, to, row0, col0, i, j);
  }
  template <class S, class T, int R, int C, class G>
  void store(const Fragment<S, R, C>& from, const Staging<T, R, C>& staging, const G& to, int row0, int col0, int i, int j, int rows_end) {
    G first_rows = to;
    first_rows.rows = min(to.rows, rows_end);
    store(from, staging, first_rows, row0, col0, i, j);
  }
  template <class S, class T, int R, int C, class G>
  void store_transposed(const Fragment<S, R, C>& from, const Staging<T, R, C>& staging, const G& to, int row0, int col0, int i = 0,
                        int j = 0) {
    static_assert(sizeof(T) == 2 && C % 64 == 0, TW_STORED_TRANSPOSED);
    touch(from);
    pass(staging, col0);
    const Extent rows(row0, C, to.rows), cols(col0, R, to.cols);
    for (int c = rows.begin; c < rows.end; ++c)
      for (int r = cols.begin; r < cols.end; ++r) *to.template at<T>(row0 + c, col0 + r, i, j) = tw::to<T>(from.x[r * C + c]);
  }
  template <class T, int R, int C, class G>
  void store_window(const Fragment<float, R, C>& from, const Staging<T, R, C>& staging, const G& to, int row0, int col0, int i0, int j0) {
    touch(from);
    pass(staging, col0);
    const Window& w = to.window;
    const int cols = min(C, to.cols - col0);
    for (int r = 0; r < R; ++r) {
      const int row = row0 + w.row(r), i = i0 + w.i(r), j = j0 + w.j(r);
      if (row < 0 || row >= to.rows || i < 0 || i >= to.size_i || j < 0 || j >= to.size_j) continue;
      T* const target = to.template at<T>(row, col0, i, j);
      for (int c = 0; c < cols; ++c) target[c * to.stride_col] = tw::to<T>(from.x[r * C + c]);
    }
  }

  // Shared memory, element by element

  template <class F, class T, int R, int C, Contract contract>
  void load(F& to, const Shared<T, R, C, contract>& from) const {
    using S = Shared<T, R, C, contract>;
    if (from.valid_outer < 0) schedule_error("a load reads a slot that was released");
    for_each(to, [&](int row, int col, auto& x) {
      const int outer = contract == Contract::columns ? row : col;
      const int k = contract == Contract::columns ? col : row;
      const bool inside = outer < from.valid_outer && k < from.valid_depth;
      x = inside ? tw::to<typename F::Element>(from.panels[S::offset(row, col)]) : tw::to<typename F::Element>(0);
    });
  }
  template <class F, class T, int R, int C, Contract contract>
  void store(F& from, Shared<T, R, C, contract>& to) const {
    using S = Shared<T, R, C, contract>;
    overwrite(to);
    if constexpr (S::depth != S::panel_depth) __builtin_memset(to.panels, 0, sizeof to.panels);  // padding of the last group of k must be 0
    for_each(from, [&](int row, int col, auto& x) { to.panels[S::offset(row, col)] = to_packed<T>(x); });
    to.valid_outer = S::outer;
    to.valid_depth = S::depth;
  }
  template <class T, int R, int C, Contract contract>
  void zero_rows(Shared<T, R, C, contract>& tile, int first) const {
    using S = Shared<T, R, C, contract>;
    if (tile.valid_outer < 0) schedule_error("rows of a slot that was released are set");
    overwrite(tile);
    int& valid = contract == Contract::columns ? tile.valid_outer : tile.valid_depth;
    if (first >= valid) return;
    // Clears up to the end of a product's group or panel, which products may read. Rows after that are skipped.
    const int end = contract == Contract::columns ? round_up(first, kPanelRows) : round_up(first, S::group);
    for (int row = first; row < end; ++row)
      for (int col = 0; col < round_up(C, kPanelRows); ++col) tile.panels[S::offset(row, col)] = to_packed<T>(0.0f);
    valid = first;
  }

  // Buffers

  template <class F, class T, int R, int C, Contract contract>
  void store(const F& from, const Buffer<T, R, C, contract>& to) {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    touch(from);
    Base::require_writable(to);
    require(buffers_.store(to.use, Base::template reach<F>, &Base::template dealing<F>));
    if constexpr (converts<typename F::Element, T>)
      convert_row(to.elements, from.x, R * C);
    else
      for (int n = 0; n < R * C; ++n) to.elements[n] = tw::to<T>(from.x[n]);
  }
  template <class F, class T, int R, int C, Contract contract>
  void store_transposed(const F& from, const Buffer<T, R, C, contract>& to) {
    static_assert(F::rows == C && F::cols == R, "a Buffer has its Fragment's shape, transposed");
    touch(from);
    Base::require_writable(to);
    require(buffers_.store(to.use, Reach::block, &Base::template dealing<F>));
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) to.at(r, c) = tw::to<T>(from.at(c, r));
  }
  template <class F, class T, int R, int C, Contract contract>
  void load(F& to, const Buffer<T, R, C, contract>& from) {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    touch(to);
    require(buffers_.load(from.use, Base::template reach<F>));
    if constexpr (converts<T, typename F::Element>)
      convert_row(to.x, from.elements, R * C);
    else
      for (int n = 0; n < R * C; ++n) to.x[n] = tw::to<typename F::Element>(from.elements[n]);
  }
  template <class T, int R, int C, Contract contract, class Fn>
  void update(const Buffer<T, R, C, contract>& buffer, int count, Fn f) {
    update(count, f, buffer);
  }
  template <class Fn, class... Buffers>
  void update(int count, Fn f, const Buffers&... buffers) {
    require(buffers_.update(buffers.use...));
    for (int i = 0; i < count; ++i) f(i);
  }
  template <class F, int R, int C, class G>
  void reduce_add(const F& from, const Outbox<R, C>&, const G& to, int row0, int col0, int i = 0, int j = 0) const {
    static_assert(F::rows == R && F::cols == C, "an Outbox has its Fragment's shape");
    touch(from);
    require(cut_piece<float>(col0));
    for (int r = max(-row0, 0); r < R && row0 + r < to.rows; ++r) {
      for (int c = 0; c < C; ++c) {
        const int col = col0 + even_first(c);
        if (col >= 0 && col < to.cols) add_element(to.template at<float>(row0 + r, col, i, j), from.x[r * C + c]);
      }
    }
  }
  /// Threads take tiles in the schedule's order. So each tile with an earlier turn has been computed, or another thread is computing it.
  template <class F, int R, int C, class G>
  void reduce_add_in_turn(const F& from, const Outbox<R, C>& box, const G& to, int row0, int col0, int i, int j, u32* counters, i64 counter,
                          int turn) const {
    wait_for(counters, counter, turn);
    reduce_add(from, box, to, row0, col0, i, j);
    announce(counters, counter);
  }
  template <class T, int R, int C, TileKind kKind>
  void interleave(Fragment<T, R, C, kKind>& rows) const {
    static_assert(kKind == TileKind::rows && C % 8 == 0, TW_INTERLEAVED);
    touch(rows);
    for (int n = 0; n < R * C; n += 8) {
      T x[8];
      for (int k = 0; k < 8; ++k) x[k] = rows.x[n + even_first(k)];
      for (int k = 0; k < 8; ++k) rows.x[n + k] = x[k];
    }
  }
  template <class Fn>
  bool attempt(Fn f) const {
    await(f);
    return true;
  }
  template <class Fn>
  void await(Fn f) const {
    AwaitedLoads<Block> loads{*this};
    f(loads);
  }
  template <class Fn>
  void await(bool there, Fn f) const {
    if (!there) await(f);
  }
  void wait_for(const u32* counters, i64 i, int count) const { await_turn(counters + i, static_cast<u32>(count)); }
  void announce(u32* counters, i64 i) const { __atomic_fetch_add(counters + i, 1, __ATOMIC_RELEASE); }
  template <class T, class Tile, int N>
  void load(RowVector<T, Tile>& to, const SharedVector<T, N>& from) const {
    copy_vector<Tile::rows>(to.x, from);
  }
  template <class T, class Tile, int N>
  void load(RowVector<T, Tile>& to, const VectorBuffer<T, N>& from) const {
    copy_vector<Tile::rows>(to.x, from);
  }
  template <class T, class Tile, int N>
  void load(ColumnVector<T, Tile>& to, const SharedVector<T, N>& from) const {
    to.view = nullptr;
    copy_vector<Tile::cols>(to.x, from);
  }
  template <class T, class Tile, int N>
  void load(ColumnVector<T, Tile>& to, const VectorBuffer<T, N>& from, int first = 0) const {
    static_assert(N >= Tile::cols, "a vector has an element for each column");
    to.view = nullptr;
    for (int n = 0; n < Tile::cols; ++n) to.x[n] = from[first + n];
  }
  template <class T, class Tile, int N>
  void store(const RowVector<T, Tile>& from, const VectorBuffer<T, N>& to) {
    static_assert(N == Tile::rows, "a vector has an element for each row");
    for (int n = 0; n < N; ++n) to.x[n] = from.x[n];
    sync();
  }

  // Cumulative sums

  template <class F, class Direction = Forward>
  void row_cumsum(F& tile, Direction = {}) const {
    static_assert(!splits_rows<F>, "row_cumsum() is for tiles whose rows lie in one warpgroup");
    touch(tile);
    for (int r = 0; r < F::rows; ++r) cumulate<F::cols, Direction>([&](int c) -> auto& { return tile.x[r * F::cols + c]; });
  }
  template <class T, int R, int C, class Direction = Forward>
  void column_cumsum(Fragment<T, R, C>& fragment, const Scratch<T, R, C>&, Direction = {}) const {
    touch(fragment);
    for (int c = 0; c < C; ++c) cumulate<R, Direction>([&](int r) -> auto& { return fragment.x[r * C + c]; });
  }
  template <class V, class T, int N, class Direction = Forward>
  void cumsum(const V& from, const VectorBuffer<T, N>& to, Direction = {}) {
    static_assert(V::size == N, "vectors of two lengths");
    for (int n = 0; n < N; ++n) to.x[n] = from[n];
    cumulate<N, Direction>([&](int n) -> auto& { return to.x[n]; });
    sync();
  }
  /// Replaces every run of kSpan columns by its Walsh-Hadamard transform.
  template <int kSpan, int R, int C, TileKind kKind>
  TW_INLINE void row_hadamard(Fragment<float, R, C, kKind>& tile) const {
    static_assert(kKind == TileKind::rows, "row_hadamard() is for Rows");
    static_assert(is_run<kSpan, C>, TW_RUN);
    static_assert(R * C % 8 == 0, "on a GPU a tile has an element for each lane of a warp");
    touch(tile);
    hadamard<kSpan>(tile.x, R * C);
  }
  /// Ends a tile. `persistent`: the block has more tiles to run.
  void end(bool persistent) const {
    if (persistent) require(Base::at_the_end());
  }

  // Counters and lists

  template <class Fn>
  TW_INLINE void parallel(int count, Fn f) const {
    for (int i = 0; i < count; ++i) f(i);
  }
  template <int N>
  void clear(Histogram<N>& histogram) const {
    for (int i = 0; i < N; ++i) histogram.counts[i] = 0;
  }
  template <int N>
  TW_INLINE void count(Histogram<N>& histogram, int counter) const {
    ++histogram.counts[counter];
  }
  template <int N>
  Located locate(Histogram<N>& histogram, int n) const {
    Located found{-1, 0, 0};
    int above = 0;
    for (int i = N - 1; i >= 0 && found.counter < 0; --i) {
      const int count = static_cast<int>(histogram.counts[i]);
      if (above + count >= n) found = {i, above, count};
      above += count;
    }
    if (found.counter < 0) schedule_error("a histogram is asked for more than was counted: on a GPU the answer would be undefined");
    clear(histogram);
    return found;
  }
  template <class T, int N>
  void clear(List<T, N>& list) const {
    list.size = 0;
  }
  template <class T, int N>
  TW_INLINE void append(List<T, N>& list, T value) const {
    if (list.size == N) schedule_error("a list is full: on a GPU the value would be lost");
    list.values[list.size++] = value;
  }
  template <class T, int N, class F, class Chosen>
  TW_INLINE void append_in_order(List<T, N>& list, const F& row, Chosen chosen) const {
    static_assert(F::rows == 1, "a row's columns are appended in order");
    for (int col = 0; col < F::cols; ++col)
      if (chosen(col, row.x[col])) append(list, row.x[col]);
  }
  template <class T, int N, class F, class Chosen, class ValueOf>
  TW_INLINE void append_few(List<T, N>& list, const F& row, Chosen chosen, ValueOf value_of) const {
    static_assert(F::rows == 1, "a row's columns are appended in order");
    for (int col = 0; col < F::cols && list.size < N; ++col)
      if (chosen(col, row.x[col])) append(list, static_cast<T>(value_of(col, row.x[col])));
  }
  template <class T, int N>
  int size(const List<T, N>& list) const {
    return list.size;
  }
  template <int N>
  void sort(List<u64, N>& list, int n = N) const {
    sort_descending(list.values, list.size, n);
  }

  template <class F>
  void print(const char* name, F& fragment) const {
    if (!first_tile_) return;
    for (int r = 0; r < F::rows; ++r) {
      __builtin_printf("%s[%d]:", name, r);
      for (int c = 0; c < F::cols; ++c) __builtin_printf(" %g", static_cast<double>(static_cast<float>(fragment.at(r, c))));
      __builtin_printf("\n");
    }
  }

 private:
  bool first_tile_;
  bool (*pull_)(void* context);
  void* context_;
  static constexpr int kPiece = 256;
  template <class F>
  static constexpr bool has_pieces = F::rows == 1 && F::cols % kPiece == 0;
  static constexpr int kMinAhead = 1024;  // for shorter rows the hardware prefetcher is enough
  static constexpr int kMaxAhead = 2;
  mutable Ahead ahead_[kMaxAhead];
  mutable int ahead_count_ = 0;

  template <class T, int R, int C, TileKind kKind, class G>
  TW_INLINE void load_rows(Fragment<T, R, C, kKind>& to, const G& from, int row0, int col0, int i, int j, Fill fill) const {
    const Extent rows(row0, R, from.rows), cols(col0, C, from.cols);
    if constexpr (R == 1 && C >= kMinAhead) {
      if (row0 + 1 < from.rows && col0 == 0 && C >= from.cols && from.stride_col == 1 && ahead_count_ < kMaxAhead)
        with_type(from, [&]<class Typed>(const Typed& typed) {
          using E = typename Typed::Element;
          ahead_[ahead_count_++] = {reinterpret_cast<const u8*>(typed.template at<const E>(row0 + 1, 0, i, j)), typed.cols,
                                    static_cast<int>(sizeof(E))};
        });
    }
    for (int r = 0; r < R; ++r) load_row(to.x + r * C, C, from, row0 + r, col0, rows.has(r) ? cols : Extent{}, i, j, fill);
  }
  /// Maps one long row a piece at a time. For each piece it prefetches the same part of the next rows and then calls done(first column).
  template <class F, class Fn, class Done, class... Operands>
  TW_INLINE void map_in_pieces(F& tile, Fn f, Done done, const Operands&... operands) const {
    for (int c = 0; c < F::cols; c += kPiece) {
      for (int n = 0; n < ahead_count_; ++n) ahead_[n].fetch(c, kPiece);
      for (int k = c; k < c + kPiece; ++k) tile.x[k] = f(tile.x[k], value_at<F>(operands, 0, k)...);
      done(c);
    }
    ahead_count_ = 0;
  }
  template <class F, class T, class Tile>
  static TW_INLINE T value_at(const RowVector<T, Tile>& vector, int row, int) {
    static_assert(Tile::rows == F::rows, "a RowVector of a tile with other rows");
    return vector.x[row];
  }
  template <class F, class T, class Tile>
  static TW_INLINE T value_at(const ColumnVector<T, Tile>& vector, int, int col) {
    static_assert(Tile::cols == F::cols, "a ColumnVector of a tile with other columns");
    return vector.data()[col];
  }
  template <class F, class T, int R, int C, TileKind kKind>
  static TW_INLINE T value_at(const Fragment<T, R, C, kKind>& tile, int row, int col) {
    static_assert(R == F::rows && C == F::cols, "an operand tile of another shape");
    return tile.x[row * C + col];
  }
  template <class F>
  static TW_INLINE float value_at(float number, int, int) {
    return number;
  }
  template <int Count, class T, class V>
  static void copy_vector(T* to, const V& from) {
    static_assert(V::size == Count, "a vector has an element for each row, or for each column");
    for (int n = 0; n < Count; ++n) to[n] = from[n];
  }
  template <int Count, class Direction, class At>
  static void cumulate(At at) {
    constexpr bool ascending = is_same<Direction, Forward>;
    for (int n = 1; n < Count; ++n) at(ascending ? n : Count - 1 - n) += at(ascending ? n - 1 : Count - n);
  }
  /// Checks the stores that a GPU would issue.
  template <class T, int R, int C>
  void pass(const Staging<T, R, C>& staging, int col) const {
    if constexpr (sizeof(T) == 2) require(Base::issue_stores(staging, col));
  }
  template <class T, int R, int C, TileKind kKind, class Op>
  static void reduce_columns(const Fragment<T, R, C, kKind>& fragment, ColumnVector<T, Fragment<T, R, C, kKind>>& vector, Op op) {
    vector.view = nullptr;
    for (int c = 0; c < C; ++c) vector.x[c] = fragment.x[c];
    for (int r = 1; r < R; ++r)
      for (int c = 0; c < C; ++c) vector.x[c] = op(vector.x[c], fragment.x[r * C + c]);
  }
};

}  // namespace tw::cpu

#endif  // !TW_ON_GPU
