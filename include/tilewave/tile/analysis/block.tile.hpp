#pragma once

#include "tilewave/tile/analysis/elements.tile.hpp"
#include "tilewave/tile/block_model.tile.hpp"
#include "tilewave/tile/block_operations.tile.hpp"

#if !TW_ON_GPU

namespace tw::analysis {

/// What a kernel's compute() and finish() are given on the analysis target. It has the same members as the other targets' blocks. `kRows`:
/// the rows of the kernel's Fragments.
template <int kRows>
class Block : public BlockModel<kRows>, public BlockOperations<Block<kRows>> {
  using Base = BlockModel<kRows>;
  using Operations = BlockOperations<Block>;
  using Base::buffers_, Base::use_of;

 public:
  /// `pull` runs load() for the next step and returns false if there is none.
  explicit Block(
      bool (*pull)(void* context) = [](void*) { return false; }, void* context = nullptr, BufferUse* last_buffer = nullptr)
      : Base(unread_stores, last_buffer), pull_(pull), context_(context) {}

  using Base::sync;
  using Operations::complete, Operations::load;

  // Rings

  template <class RingType>
  auto& take(RingType& ring) const {
    auto& slot = peek(ring, 0);
    --ring.filled;
    return slot;
  }
  template <class RingType>
  auto& peek(RingType& ring, int ahead) const {
    while (ring.filled <= ahead)
      if (!pull_(context_)) schedule_error("a block waits for a slot of an empty ring with no step left to load");
    return *ring.slots;
  }
  template <class RingType>
  void release(RingType& ring) const {
    if (ring.buffer) *ring.buffer = {};
  }

  // Solos

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

  // Products

  /// Each warpgroup reads its own rows of the left operand and all of the right operand.
  template <class Acc, class A, class B>
  void mma(Acc& acc, const A& a, const B& b, bool) {
    Base::template own<Acc>();
    static_assert(A::depth == B::depth, "both operands contract over the same length");
    constexpr bool own_rows = A::contract == Contract::columns && A::rows == kRows && Base::template is_default<Acc>;
    require(buffers_.product(use_of(a), own_rows ? Reach::warpgroup : Reach::block, use_of(b)));
    tally.shared += A::byte_count * left_reads<Acc>() + B::byte_count * right_reads<Acc>();
    multiply<typename A::Element, A::depth>(acc, a.inside().outer, b.inside().outer, min(a.inside().depth, b.inside().depth));
  }
  /// Counts the products of the values: zeros that are not stored take no time.
  template <class Acc, class Values, class Metadata, class B>
  void mma(Acc& acc, const Sparse<Values, Metadata>& a, const B& b, bool) {
    using A = Sparse<Values, Metadata>;
    Base::template own<Acc>();
    static_assert(Base::template is_default<Acc> && Acc::rows == A::rows, "a sparse left operand has the kernel's rows");
    static_assert(A::cols == B::depth && B::outer == Acc::cols, "both operands contract over the same length");
    require(buffers_.product(nullptr, Reach::block, use_of(b)));
    tally.shared += Values::byte_count + Metadata::byte_count + B::byte_count * right_reads<Acc>();
    const Inside values = a.values.inside(), right = b.inside();
    multiply<typename A::Element, A::cols / 2>(acc, values.outer, right.outer, min(values.depth, ceil_div(right.depth, 2)));
  }
  template <class Acc, class T, int R, int C, class B>
  void mma(Acc& acc, const Operand<T, R, C>&, const B& b, bool) {
    Base::template own<Acc>();
    static_assert(Acc::rows == R, TW_OPERAND_ROWS);
    static_assert(C == B::depth, "both operands contract over the same length");
    require(buffers_.product(nullptr, Reach::block, use_of(b)));
    tally.shared += B::byte_count * right_reads<Acc>();
    multiply<T, C>(acc, R, b.inside().outer, b.inside().depth);
  }
  template <class T, int R, int N, int C, int Warps, class S, class Scales = Unscaled>
  void add_products_of_groups(DividedSums<R, N, Warps>& sums, const S& tile, const DividedOperand<T, N, C, Warps>& operand,
                              const Scales& scales = {}) const {
    add_products<true>(sums, tile, operand, scales);
  }
  template <bool kGroups = false, class T, int R, int N, int C, int Warps, class S, class Scales = Unscaled>
  void add_products(DividedSums<R, N, Warps>&, const S& tile, const DividedOperand<T, N, C, Warps>& operand, const Scales& = {}) const {
    static_assert(Warps * 16 == kRows, "DividedSums name the kernel's `warps`");
    constexpr bool digits = is_same<Scales, DigitScales<N, Warps>>;
    constexpr int type = static_cast<int>(operand_type<conditional<digits, i8, T>>), in_byte = codes_in<typename S::Element>;
    constexpr int count = digits ? 2 : 1;  // a product for each digit
    tally.shared += sizeof tile;
    tally.products[type] += count * operations(R, N, C);
    tally.inside[type] += count * operations(tile.inside().outer, operand.inside_rows, tile.inside().depth * in_byte);
    if constexpr (is_same<typename S::Element, T>) {
      static_assert(S::rows == R * Warps && S::cols * Warps == C, TW_DIVIDED_TILE);
    } else {
      constexpr int parts = kGroups ? Warps : 1;  // of the columns, each in rows of its own
      static_assert(S::rows == R * parts && S::cols * in_byte * parts == C, TW_DIVIDED_CODES);
      // A multiply-add for each sum of a group. Decoding takes no operations of f32.
      if constexpr (in_byte > 1 && !is_same<T, i8>) cost.f32 += 2 * static_cast<u64>(R) * N * (C / Scales::group);
    }
  }
  template <int Left, class... Acc>
  void wait(Constant<Left>, Acc&...) {
    buffers_.wait(Left);
  }
  template <class T, class S, int R, int C>
  void convert(Operand<T, R, C>&, const Fragment<S, R, C>&) const {}
  template <class T, class S, int R, int C>
  void convert(Fragment<S, R, C>&, const Operand<T, R, C>&) const {}
  template <class T, int R, int C>
  void load(Operand<T, R, C>&, const Shared<T, R, C, Contract::columns>&) const {}
  /// Counts one read of each code and of each group's scale.
  template <class T, int R, int C, class Codes, int Bytes, class Scales, class Decode = TimesScale>
  requires(is_decoded<Codes, T>) void load(Operand<T, R, C>&, const Shared<Codes, R, Bytes, Contract::columns>&, const Scales& scales,
                                           Decode decode = {}, int = 0) const {
    tally.shared += static_cast<u64>(R) * C / codes_in<Codes>;
    Counted number = 1.0f;
    const auto element = [&](auto scale) { cost += cost_of([&] { apply(decode, number, scale); }) * (static_cast<u64>(R) * C); };
    if constexpr (requires { Scales::group; }) {
      const Cost before = cost;
      cost = {};
      const auto scale = [&] {
        if constexpr (requires { scales.in_registers(0, 0); })
          return scales.in_registers(0, 0);
        else
          return scales(0, 0);
      }();
      cost = cost * (static_cast<u64>(R) * static_cast<u64>(ceil_div(C, Scales::group)));
      cost += before;
      element(scale);
    } else {
      element(scales.x);
    }
  }
  template <class T, int R, int C>
  void load(Operand<T, R, C>&, const Buffer<T, R, C, Contract::columns>& from) {
    require(buffers_.load(from.use, R == kRows ? Reach::warpgroup : Reach::block));
    tally.shared += from.byte_count;
  }

  // Elements and rows

  template <class F>
  void fill(F& values, auto value) const {
    Base::template own<F>();
    values.x = tw::to<typename F::Element>(value);
  }
  template <class F, class Fn>
  void for_each(F& tile, Fn f) const {
    Base::template own<F>();
    visit(F::rows, F::cols, f, tile.x);
  }
  template <int kFirst, int kCount, class F, class Fn>
  void for_columns(F& tile, Fn f) const {
    auto shifted = [&](int row, int col, auto& x) { return f(row, kFirst + col, x); };
    visit(F::rows, kCount, shifted, tile.x);
  }
  template <int kDistance, int kPeriod, class F, class Fn>
  void for_pairs(F& tile, Fn f) const {
    Base::template own<F>();
    visit(F::rows, F::cols / kPeriod * kDistance, f, tile.x, tile.x);
  }
  template <class F, class Other, class Fn>
  void for_each(F& first, Other& second, Fn f) const {
    Base::template own<F>();
    visit(F::rows, F::cols, f, first.x, second.x);
  }
  template <class F, class G, class Fn>
  void for_each_with(F& tile, const G& other, int row0, int col0, int, int, Fn f) const {
    tally.read[other.place] += other.bytes(row0, col0, F::rows, F::cols);
    Counted element = 1.0f;
    visit(F::rows, F::cols, f, tile.x, element);
  }
  template <class F, class Fn>
  void rows(F& tile, Fn f) const {
    Base::template own<F>();
    for_elements(F::rows, 1, [&](int row, int) { f(row, RowView<F>{tile}); });
  }
  template <class T, class Tile, class Fn>
  void for_rows(RowVector<T, Tile>& vector, Fn f) const {
    const auto before = vector.x;
    for_elements(Tile::rows, 1, [&](int row, int) {
      vector.x = before;
      apply(f, row, row, vector.x);
    });
  }
  template <class T, class Tile>
  bool owns_rows(const RowVector<T, Tile>&) const {
    return true;
  }
  template <int R, int N, int Warps>
  void fill(DividedSums<R, N, Warps>&, float) const {}
  template <int N, int Warps>
  void fill(DividedSquares<N, Warps>&, float) const {}
  template <class T, int N, int C, int Warps>
  void scale(DividedOperand<T, N, C, Warps>&, const DividedOperand<T, 8, C, Warps>&) const {
    cost.f32 += N * C;
  }
  template <class T, int N, int C, int Warps>
  void add_squares(DividedSquares<N, Warps>&, const DividedOperand<T, N, C, Warps>&) const {
    cost.f32 += N * C;
  }
  template <class T, int C, int Warps>
  void scale(DividedRow<T, C, Warps>&, const DividedRow<T, C, Warps>&) const {
    cost.f32 += C;
  }
  template <class T, int N, int C, int Warps>
  void add_squares(DividedSquares<N, Warps>&, const DividedRow<T, C, Warps>&) const {
    cost.f32 += C;
  }
  template <class T, int C, int Warps, class G>
  void load(DividedRow<T, C, Warps>&, const G& from, int row, int col, int = 0, int = 0) const {
    tally.read[from.place] += from.bytes(row, col, 1, C);
  }
  template <class T, int N, int C, int Warps>
  void spread(DividedOperand<T, N, C, Warps>& operand, const DividedRow<T, C, Warps>&) const {
    operand = {1};
  }
  template <class T, int N, int C, int Warps>
  void make_digits(DividedRow<T, C, Warps>&, DigitScales<N, Warps>&) const {
    cost.f32 += 2 * C;
  }
  template <class T, int N, int C, int Warps>
  void make_digits(DividedOperand<T, N, C, Warps>&, DigitScales<N, Warps>&) const {
    cost.f32 += 2 * N * C;
  }
  template <class T, int N, int C, int Warps, class G>
  void load(DividedOperand<T, N, C, Warps>& to, const G& from, int row, int col, int = 0, int = 0) const {
    tally.read[from.place] += from.bytes(row, col, N, C);
    to = {overlap(row, N, from.rows)};
  }
  template <class T, int N, int C, int Warps, int V, int Count>
  void load(DividedOperand<T, N, C, Warps>& to, const SharedVector<T, V> (&)[Count]) const {
    to = {1};
  }
  template <int R, int C, class Format, int Warps, class S, int Count, class H>
  void load(DividedScales<R, C, Format, Warps>&, const S (&)[Count], const H& zeros, int row, int col) const {
    if constexpr (Format::zeros) tally.read[zeros.place] += zeros.bytes(row, col / Format::group, R, C / Format::group);
  }
  template <int R, int C, class Format, int Warps, class G, class H>
  void load(DividedScales<R, C, Format, Warps>&, const G& scales, const H& zeros, int row, int col, int apart = 8) const {
    constexpr int group = Format::group;
    for (int r = 0; r < R; r += 8) {
      tally.read[scales.place] += scales.bytes(row + r / 8 * apart, col / group, 8, C / group);
      if constexpr (Format::zeros) tally.read[zeros.place] += zeros.bytes(row + r / 8 * apart, col / group, 8, C / group);
    }
  }
  template <int R, int N, int Warps, class F>
  void complete(const DividedSums<R, N, Warps>&, F& to, const Scratch<float, 16 * Warps, R * N>& scratch) const {
    static_assert(F::rows >= N && F::cols == R, "complete() transposes: at least N rows of R results of R x N sums");
    cost.f32 += static_cast<u64>(R * N) * (Warps - 1);
    tally.shared += 2 * sizeof(float) * R * N * Warps;
    to.x = decltype(to.x)(1.0f);
    static_cast<void>(scratch);
  }
  template <int R, int N, int Warps, class F>
  void complete(const DividedSums<R, N, Warps>&, F& first, F& second, const Scratch<float, 16 * Warps, R * N>&) const {
    static_assert(F::rows >= N && F::cols == R / 2, "complete() transposes: at least N rows of R / 2 results, twice, of R x N sums");
    cost.f32 += static_cast<u64>(R * N) * (Warps - 1);
    tally.shared += 2 * sizeof(float) * R * N * Warps;
    first.x = decltype(first.x)(1.0f);
    second.x = decltype(second.x)(1.0f);
  }
  template <int N, int Warps, class T, class Tile>
  void complete(const DividedSquares<N, Warps>&, RowVector<T, Tile>& to, const VectorBuffer<float, N * Warps>&) const {
    cost.f32 += static_cast<u64>(N) * (Warps - 1);
    tally.shared += 2 * sizeof(float) * N * Warps;
    to.x = decltype(to.x)(1.0f);
  }
  template <class T, class Tile>
  void complete(RowVector<T, Tile>&) const {
    static_assert(!splits_rows<Tile>, TW_SPLIT_ROW);
  }
  /// Each warpgroup writes its part of each row to the exchange and reads all parts.
  template <class T, class Tile, class Op>
  void combine_rows(RowVector<T, Tile>&, const RowExchange<T, Tile>&, Op) const {
    cost.f32 += static_cast<u64>(Tile::rows) * (RowExchange<T, Tile>::parts() - 1);
    tally.shared += 2 * RowExchange<T, Tile>::bytes;
    sync();
  }
  /// What f computes is not counted.
  template <int N, class Fn>
  int values_of_rows(Fn) const {
    return N;
  }
  template <class Codes, int R, int C, class Fn>
  void widen(Widened<Codes, R, C>& tile, int, int end, Fn) const {
    tally.shared += 3 * R * C;
    cost.f32 += static_cast<u64>(R) * C;
    tile.set_inside({min(max(end, 0), R), C});
  }
  /// x = f(x, y...) for every element: see map().
  template <class F, class Fn, class... Operands>
  void map_with(F& tile, Fn f, const Operands&... operands) const {
    Base::template own<F>();
    const auto once = [&](auto... values) { tile.x = apply(f, tile.x, values...); };
    cost += cost_of([&] { once(value_of(operands)...); }) * (static_cast<u64>(F::rows) * static_cast<u64>(F::cols));
  }
  template <class T, int R, int C, class Op>
  void column_reduce(const Fragment<T, R, C>& tile, ColumnVector<T, Fragment<T, R, C>>& vector, const Scratch<T, R, C>&, Op) const {
    cost.f32 += static_cast<u64>(R - 1) * C;
    tally.shared += 2 * Scratch<T, R, C>::bytes;
    vector.x = tile.x;
  }
  template <class T, int R, int C, TileKind kKind, class Fn>
  void column_fold(const Fragment<T, R, C, kKind>& tile, ColumnVector<T, Fragment<T, R, C, kKind>>& vector, Fn f) const {
    vector.x = tile.x;
    cost += cost_of([&] { vector.x = apply(f, vector.x, tile.x); }) * (static_cast<u64>(R - 1) * C);
  }
  template <class T, int R, int C, TileKind kKind, int kCount, class Fn>
  void column_fold(const Fragment<T, R, C, kKind> (&tiles)[kCount], ColumnVector<T, Fragment<T, R, C, kKind>> (&vectors)[kCount],
                   Fn f) const {
    for (int n = 0; n < kCount; ++n) column_fold(tiles[n], vectors[n], f);
  }
  template <class T, int R, int C, TileKind kKind, int kCount, class To, class Fn>
  void column_fold(const Fragment<T, R, C, kKind> (&tiles)[kCount], To& to, Fn f) const {
    to.x = tiles[0].x;
    cost += cost_of([&] { to.x = apply(f, to.x, tiles[0].x); }) * (static_cast<u64>(R - 1) * C * kCount);
  }
  template <class T, int R, int C, TileKind kKind>
  void transpose(const Fragment<T, R, C, kKind>& from, Fragment<T, C, R, kKind>& to) const {
    to.x = from.x;
  }
  template <class T, int R, int C, TileKind kKind, class U>
  void add_products(RowVector<float, Fragment<T, R, C, kKind>>&, const Fragment<T, R, C, kKind>&,
                    const ColumnVector<U, Fragment<T, R, C, kKind>>&) const {
    cost.f32 += 2 * static_cast<u64>(R) * C;
  }
  template <class F, class G, class H>
  void add_products(RowVector<float, F>& sums, const G& tile, int row0, int tile_i, const H& vector, int vector_i, int col0) const {
    F rows;
    ColumnVector<typename H::Element, F> columns;
    load(rows, tile, row0, col0, tile_i);
    load(columns, vector, 0, col0, vector_i);
    add_products(sums, rows, columns);
  }
  template <class T, int R, int C, TileKind kKind, class Fn>
  void pairs(Fragment<T, R, C / 2, kKind>& to, const Fragment<T, R, C, kKind>& from, Fn f) const {
    cost += cost_of([&] { to.x = apply(f, from.x, from.x); }) * (static_cast<u64>(R) * (C / 2));
  }
  template <class T, int R, int C, class Fn>
  void map_row_pairs(Fragment<T, R, C>& tile, Fn f) const {
    cost += cost_of([&] { tile.x = apply(f, tile.x, tile.x); }) * (static_cast<u64>(R / 2) * C);
  }
  template <class T, class Tile, class Fn>
  bool any(const RowVector<T, Tile>& vector, Fn f) const {
    bool found = false;
    cost += cost_of([&] { found = apply(f, vector.x); }) * Tile::rows;
    return found;
  }
  template <class T, class Tile, class Fn>
  bool sync_any(const RowVector<T, Tile>& vector, Fn f) const {
    sync();
    return any(vector, f);
  }

  // Global memory

  template <class T, int R, int C, TileKind kKind, class G>
  void load(Fragment<T, R, C, kKind>& to, const G& from, int row, int col, int = 0, int = 0, Fill = {}) const {
    Base::template own<Fragment<T, R, C, kKind>>();
    tally.read[from.place] += from.bytes(row, col, R, C);
    to.x = decltype(to.x)(1.0f);
  }
  template <class T, int R, int C, int Warpgroups, class G>
  void load(HeldFragment<T, R, C, Warpgroups>& to, const G& from, int row, int col, int = 0, int = 0, Fill = {}) const {
    Base::template own<HeldFragment<T, R, C, Warpgroups>>();
    tally.read[from.place] += from.bytes(row, col, R, C);
    to.x = decltype(to.x)(1.0f);
  }
  /// Neighbouring rows of the tile that are the same row of the tensor are read once: the next reads hit the L1 cache.
  template <class T, int R, int C, TileKind kKind, class G, class RowOf>
  void gather(Fragment<T, R, C, kKind>& to, const G& from, RowOf row_of, int col, int = 0, int = 0, Fill = {}) const {
    for (int r = 0; r < R; ++r)
      if (r == 0 || row_of(r) != row_of(r - 1)) tally.read[from.place] += from.bytes(row_of(r), col, 1, C);
    to.x = decltype(to.x)(1.0f);
  }
  template <class T, class Tile, class G>
  void load(ColumnVector<T, Tile>& to, const G& from, int row, int col, int = 0, int = 0, Fill = {}) const {
    tally.read[from.place] += from.bytes(row, col, 1, Tile::cols);
    to.x = decltype(to.x)(1.0f);
  }
  template <class T, class Tile, class G>
  void load(RowVector<T, Tile>& to, const G& from, int row, int col, int = 0, int = 0, Fill = {}) const {
    tally.read[from.place] += from.bytes(row, col, Tile::rows, 1);
    to.x = decltype(to.x)(1.0f);
  }
  template <class T, class Tile, class G>
  void load_from_row(RowVector<T, Tile>& to, const G& from, int row, int col, int = 0, int = 0) const {
    tally.read[from.place] += from.bytes(row, col, 1, Tile::rows);
    to.x = decltype(to.x)(1.0f);
  }
  template <class T, class Tile, class G>
  void store(const RowVector<T, Tile>&, const G& to, int row, int col, int = 0, int = 0) const {
    tally.written[to.place] += to.bytes(row, col, Tile::rows, 1);
  }
  template <class T, class Tile, class G>
  void store_to_row(const RowVector<T, Tile>&, const G& to, int row, int col, int = 0, int = 0) const {
    tally.written[to.place] += to.bytes(row, col, 1, Tile::rows);
  }
  /// Returns a plain number, like the targets that compute. Arithmetic that involves nothing else is not counted.
  template <class G>
  float value(const G& from, int row, int col, int = 0, int = 0) const {
    tally.read[from.place] += from.bytes(row, col, 1, 1);
    return 1.0f;
  }
  template <class F, class G>
  void store(const F&, const G& to, int row, int col, int = 0, int = 0) const {
    Base::template own<F>();
    tally.written[to.place] += to.bytes(row, col, F::rows, F::cols);
  }
  template <class F, class G>
  void save(const F& from, const G& to, int i) const {
    store(from, to, 0, 0, i);
  }
  template <class F, class G>
  void add_saved(F& to, const G& from, int i) const {
    for_each_with(to, from, 0, 0, i, 0, [](int, int, auto& x, auto y) { x += y; });
  }
  template <class S, class T, int R, int C, class G>
  void store(const Fragment<S, R, C>& from, const Staging<T, R, C>& staging, const G& to, int row, int col, int i = 0, int j = 0) {
    pass(staging, col);
    store(from, to, row, col, i, j);
  }
  template <class S, class T, int R, int C, class G>
  void store(const Fragment<S, R, C>& from, const Staging<T, R, C>& staging, const G& to, int row, int col, int i, int j, int rows_end) {
    G first_rows = to;
    first_rows.rows = min(to.rows, rows_end);
    store(from, staging, first_rows, row, col, i, j);
  }
  template <class S, class T, int R, int C, class G>
  void store_transposed(const Fragment<S, R, C>&, const Staging<T, R, C>& staging, const G& to, int row, int col, int = 0, int = 0) {
    static_assert(sizeof(T) == 2 && C % 64 == 0, TW_STORED_TRANSPOSED);
    pass(staging, col);
    tally.written[to.place] += to.bytes(row, col, C, R);
  }
  template <class T, int R, int C, class G>
  void store_window(const Fragment<float, R, C>&, const Staging<T, R, C>& staging, const G& to, int row, int col, int i, int j) {
    pass(staging, col);
    tally.written[to.place] +=
        static_cast<u64>(inside_window(to, R, row, i, j)) * static_cast<u64>(overlap(col, C, to.cols)) * sizeof(typename G::Element);
  }
  template <class F, class G, class RowOf>
  void scatter(const F&, const G& to, RowOf row_of, int col, int = 0, int = 0) const {
    Base::template own<F>();
    for (int r = 0; r < F::rows; ++r) tally.written[to.place] += to.bytes(row_of(r), col, 1, F::cols);
  }
  /// Counts a read and a write.
  template <class F, class G, class RowOf>
  void scatter_add(const F& from, const G& to, RowOf row_of, int col, int = 0, int = 0) const {
    const u64 before = tally.written[to.place];
    scatter(from, to, row_of, col);
    const u64 bytes = tally.written[to.place] - before;
    tally.read[to.place] += bytes;
    cost.f32 += bytes / sizeof(typename G::Element);
  }

  // Shared memory, element by element

  template <class F, class T, int R, int C, Contract contract>
  void load(F& to, const Shared<T, R, C, contract>& from) const {
    tally.shared += sizeof from;
    to.x = decltype(to.x)(1.0f);
  }
  template <class F, class T, int R, int C, Contract contract>
  void store(F&, Shared<T, R, C, contract>& to) const {
    tally.shared += sizeof to;
    to.set_inside({to.outer, to.depth});
  }
  template <class T, int R, int C, Contract contract>
  void zero_rows(Shared<T, R, C, contract>& tile, int first) const {
    using S = Shared<T, R, C, contract>;
    typename S::Inside inside = tile.inside();
    int& rows = contract == Contract::columns ? inside.outer : inside.depth;
    rows = min(rows, first);
    tally.shared += sizeof(S) / R * static_cast<u64>(max(R - first, 0));
    tile.set_inside(inside);
  }

  // Buffers

  template <class F, class T, int R, int C, Contract contract>
  void store(const F&, const Buffer<T, R, C, contract>& to) {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    Base::template own<F>();
    require(buffers_.store(to.use, Base::template reach<F>, &Base::template dealing<F>));
    tally.shared += to.byte_count;
  }
  template <class F, class T, int R, int C, Contract contract>
  void store_transposed(const F&, const Buffer<T, R, C, contract>& to) {
    static_assert(F::rows == C && F::cols == R, "a Buffer has its Fragment's shape, transposed");
    Base::template own<F>();
    require(buffers_.store(to.use, Reach::block, &Base::template dealing<F>));
    tally.shared += to.byte_count;
  }
  template <class F, class T, int R, int C, Contract contract>
  void load(F& to, const Buffer<T, R, C, contract>& from) {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    Base::template own<F>();
    require(buffers_.load(from.use, Base::template reach<F>));
    tally.shared += from.byte_count;
    to.x = decltype(to.x)(1.0f);
  }
  template <class T, int R, int C, Contract contract, class Fn>
  void update(const Buffer<T, R, C, contract>& buffer, int count, Fn f) {
    update(count, f, buffer);
  }
  template <class Fn, class... Buffers>
  void update(int count, Fn f, const Buffers&... buffers) {
    require(buffers_.update(buffers.use...));
    parallel(count, f);
  }
  /// Counts a write and a read of shared memory, and a read and a write of global memory.
  template <class F, int R, int C, class G>
  void reduce_add(const F&, const Outbox<R, C>&, const G& to, int row, int col, int = 0, int = 0) const {
    static_assert(F::rows == R && F::cols == C, "an Outbox has its Fragment's shape");
    Base::template own<F>();
    require(cut_piece<float>(col));
    const u64 bytes = to.bytes(row, col, R, C);
    tally.shared += 2 * Outbox<R, C>::byte_count;
    tally.read[to.place] += bytes;
    tally.written[to.place] += bytes;
  }
  /// Every turn has come: blocks run one after the other. Counters are not counted.
  template <class F, int R, int C, class G>
  void reduce_add_in_turn(const F& from, const Outbox<R, C>& box, const G& to, int row, int col, int i, int j, const auto&, i64,
                          int) const {
    reduce_add(from, box, to, row, col, i, j);
  }
  template <class T, int R, int C, TileKind kKind>
  void interleave(Fragment<T, R, C, kKind>&) const {
    static_assert(kKind == TileKind::rows && C % 8 == 0, TW_INTERLEAVED);
  }
  /// Everything has been stored: blocks run one after the other.
  template <class Fn>
  bool attempt(Fn f) const {
    f(*this);
    return true;
  }
  template <class Fn>
  void await(Fn f) const {
    f(*this);
  }
  template <class Fn>
  void await(bool, Fn) const {}
  void wait_for(const auto&, i64, int) const {}
  void announce(const auto&, i64) const {}
  template <class T, class Tile, int N>
  void load(RowVector<T, Tile>& to, const SharedVector<T, N>& from) const {
    load_vector<Tile::rows>(to, from);
  }
  template <class T, class Tile, int N>
  void load(RowVector<T, Tile>& to, const VectorBuffer<T, N>& from) const {
    load_vector<Tile::rows>(to, from);
  }
  template <class T, class Tile, int N>
  void load(ColumnVector<T, Tile>& to, const SharedVector<T, N>& from) const {
    load_vector<Tile::cols>(to, from);
  }
  template <class T, class Tile, int N>
  void load(ColumnVector<T, Tile>& to, const VectorBuffer<T, N>& from, int = 0) const {
    load_vector<Tile::cols>(to, from);
  }
  template <class T, class Tile, int N>
  void store(const RowVector<T, Tile>&, const VectorBuffer<T, N>&) {
    static_assert(N == Tile::rows, "a vector has an element for each row");
    tally.shared += N * sizeof(T);
    sync();
  }

  // Cumulative sums: one addition for every element except the first

  template <class F, class Direction = Forward>
  void row_cumsum(F&, Direction = {}) const {
    static_assert(!splits_rows<F>, "row_cumsum() is for tiles whose rows lie in one warpgroup");
    Base::template own<F>();
    cost.f32 += static_cast<u64>(F::rows) * (F::cols - 1);
  }
  template <class T, int R, int C, class Direction = Forward>
  void column_cumsum(Fragment<T, R, C>&, const Scratch<T, R, C>&, Direction = {}) const {
    Base::template own<Fragment<T, R, C>>();
    cost.f32 += static_cast<u64>(R - 1) * C;
    tally.shared += 2 * Scratch<T, R, C>::bytes;
  }
  template <class V, class T, int N, class Direction = Forward>
  void cumsum(const V&, const VectorBuffer<T, N>&, Direction = {}) {
    static_assert(V::size == N, "vectors of two lengths");
    cost.f32 += N - 1;
    tally.shared += 2 * N * sizeof(T);
    sync();
  }
  template <int kSpan, class F>
  void row_hadamard(F&) const {
    static_assert(is_run<kSpan, F::cols>, TW_RUN);
    Base::template own<F>();
    for (int step = 1; step < kSpan; step *= 2) cost.f32 += static_cast<u64>(F::rows) * F::cols;
  }
  /// Ends a tile. `persistent`: the block has more tiles to run.
  void end(bool persistent) const {
    if (persistent) require(Base::at_the_end());
  }

  // Histograms and lists: the traffic of their values

  template <class Fn>
  void parallel(int count, Fn f) const {
    if (count > 0) for_elements(count, 1, [&](int n, int) { f(n); });
  }
  template <int N>
  void clear(Histogram<N>&) const {
    cost.shared += N * sizeof(u32);
  }
  /// Counts a read and a write.
  template <int N>
  void count(Histogram<N>&, int) const {
    cost.shared += 2 * sizeof(u32);
  }
  template <int N>
  Located locate(const Histogram<N>&, int n) const {
    cost.shared += 2 * N * sizeof(u32);
    return {0, 0, n};
  }
  template <class T, int N>
  void clear(List<T, N>& list) const {
    list.size = 0;
    cost.shared += sizeof(u32);
  }
  /// The list's size is read and written, and the value is written.
  template <class T, int N>
  void append(List<T, N>& list, T) const {
    ++list.size;
    cost.shared += 2 * sizeof(u32) + sizeof(T);
  }
  template <class T, int N, class F, class Chosen>
  void append_in_order(List<T, N>& list, F& row, Chosen chosen) const {
    auto append = [&](int, int col, auto& x) {
      if (chosen(col, x)) cost.shared += sizeof(T);
    };
    visit(1, F::cols, append, row.x);
    // visit() may call a function more than once for an element.
    cost_of([&] {
      for (int col = 0; col < F::cols; ++col) list.size += chosen(col, row.x) ? 1 : 0;
    });
  }
  /// Appends until the list is half full.
  template <class T, int N, class F, class Chosen, class ValueOf>
  void append_few(List<T, N>& list, F& row, Chosen chosen, ValueOf value_of) const {
    auto ask = [&](int, int col, auto& x) {
      if (chosen(col, x)) static_cast<void>(value_of(col, x));
    };
    visit(1, F::cols, ask, row.x);
    const int before = list.size;
    cost_of([&] {
      for (int col = 0; col < F::cols && list.size < N / 2; ++col) list.size += chosen(col, row.x) ? 1 : 0;
    });
    cost.shared += static_cast<u64>(list.size - before) * sizeof(T);
  }
  template <class T, int N>
  int size(const List<T, N>& list) const {
    cost.shared += sizeof(u32);
    return min(list.size, N);
  }
  /// Counts a bitonic sort of the n values wanted, which moves all of them in every step.
  template <int N>
  void sort(List<u64, N>&, int n = N) const {
    u64 padded = 2, rounds = 1, steps = 1;
    for (; padded < static_cast<u64>(n); padded *= 2) steps += ++rounds;
    cost.shared += steps * padded * 2 * sizeof(u64);
  }

  template <class F>
  void print(const char*, F&) const {}

 private:
  bool (*pull_)(void* context);
  void* context_;

  template <int Count, class Vector, class V>
  static void load_vector(Vector& to, const V&) {
    static_assert(V::size >= Count, "a vector has an element for each row, or for each column");
    tally.shared += Count * sizeof(typename V::Element);
    to.x = decltype(to.x)(1.0f);
  }
  /// Counts writing and reading the staging slots, and checks the order of a warpgroup's stores.
  template <class T, int R, int C>
  void pass(const Staging<T, R, C>& staging, int col) {
    if constexpr (sizeof(T) == 2) {
      require(Base::issue_stores(staging, col));
      tally.shared += 2 * R * C * sizeof(T);
    }
  }
  /// How often a product reads its operands: the left one once for each group of columns, the right one once for every 64 rows.
  template <class Acc>
  static constexpr u64 left_reads() {
    if constexpr (requires { Acc::column_groups; }) return Acc::column_groups;
    return 1;
  }
  template <class Acc>
  static constexpr u64 right_reads() {
    return static_cast<u64>(ceil_div(Acc::rows, Base::kWarpgroupRows));
  }
  static constexpr u64 operations(int m, int n, int k) { return 2 * static_cast<u64>(m) * static_cast<u64>(n) * static_cast<u64>(k); }
  template <class T, int Depth, class Acc>
  static void multiply(Acc& acc, int rows, int cols, int depth) {
    constexpr int type = static_cast<int>(operand_type<T>);
    tally.products[type] += operations(Acc::rows, Acc::cols, Depth);
    tally.inside[type] += operations(rows, cols, depth);
    acc.x = decltype(acc.x)(1.0f);
  }
  /// Calls f(row, col, x...) for every element. Each call starts from the tile's value.
  template <class Fn, class... X>
  static void visit(int rows, int cols, Fn& f, X&... x) {
    [&](auto... before) {
      for_elements(rows, cols, [&](int row, int col) {
        ((x = before), ...);
        apply(f, row, col, x...);
      });
    }(x...);
  }
  template <class Vector>
  static auto value_of(const Vector& vector) requires requires {
    vector.x;
  }
  { return vector.x; }
  static float value_of(float number) { return number; }
};

}  // namespace tw::analysis

#endif  // !TW_ON_GPU
