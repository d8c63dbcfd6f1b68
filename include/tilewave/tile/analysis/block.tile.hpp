#pragma once

#include "tilewave/tile/analysis/target.tile.hpp"

#if !TW_ON_GPU

namespace tw::analysis {

constexpr int kRowsPerWarpgroup = 64;

/// What `f` costs; nothing is added to `cost`.
template <class F>
Cost cost_of(F f) {
  const Cost before = cost;
  cost = {};
  f();
  const Cost result = cost;
  cost = before;
  return result;
}

/// Gives `f` the elements, if it takes Counted; else plain numbers, which is noted.
template <class Fn, class... X>
auto apply(Fn& f, X&... x) {
  if constexpr (requires { f(x...); }) {
    return f(x...);
  } else {
    ++cost.uncounted;
    const auto plain = []<class Y>(const Y& y) {
      if constexpr (is_same<Y, Counted>)
        return y.value;
      else
        return y;
    };
    return [&f](auto... values) { return f(values...); }(plain(x)...);
  }
}

/// From the parts `along_rows` (of the elements of column 0) and `along_cols` (of row 0), which share the element `first`, a cost that is
/// the product of one for the row and one for the column.
constexpr u64 combine(u64 first, u64 along_rows, u64 along_cols, u64 rows, u64 cols) {
  if (first > 0) return along_rows * along_cols / first;
  const u64 by_rows = along_rows * cols, by_cols = along_cols * rows;
  return by_rows > by_cols ? by_rows : by_cols;
}

/// Counts `f(row, col)` for all elements of a tile, from those of its first row and column, or fewer where these do not differ. (They do
/// where a function asks whether a row or column lies in the tensor.) What `f` leaves is that of element (0, 0).
template <class F>
void for_elements(int rows, int cols, F f) {
  const auto element = [&](int row, int col) {
    at_element(row, col);
    return cost_of([&] { f(row, col); });
  };
  begin_walk();
  const Cost last_row = element(rows - 1, 0), last_col = element(0, cols - 1), first = element(0, 0);
  const u64 r = static_cast<u64>(rows), c = static_cast<u64>(cols);
  if (touched() || last_row != first || last_col != first) {
    Cost along_rows = first, along_cols = first;
    for (int row = 1; row < rows; ++row) along_rows += element(row, 0);
    for (int col = 1; col < cols; ++col) along_cols += element(0, col);
    element(0, 0);
    cost.f32 += combine(first.f32, along_rows.f32, along_cols.f32, r, c);
    cost.special += combine(first.special, along_rows.special, along_cols.special, r, c);
    cost.uncounted += combine(first.uncounted, along_rows.uncounted, along_cols.uncounted, r, c);
    cost.shared += combine(first.shared, along_rows.shared, along_cols.shared, r, c);
  } else {
    cost += first * (r * c);
  }
  end_walk();
}

/// Copies of global memory into tiles of a slot.
struct Copy {
  int rank;  ///< of the block in its cluster

  template <class G, class S>
  void tile(const G& from, S& to, int row, int col, int = 0, int = 0) const {
    require(cut_piece<typename S::Element>(col));
    tally.read[from.place] += from.bytes(row, col, S::rows, S::cols);
    fill(from, to, row, col);
  }
  template <class G, class S>
  void part(const G& from, S& to, int, int count, int row, int col, int = 0, int = 0) const {
    require(cut_piece<typename S::Element>(col));
    tally.read[from.place] += from.bytes(row, col, count, S::cols);
    tally.shared += sizeof(S) / S::rows * static_cast<u64>(count);
    const int cols = overlap(col, S::cols, from.cols);
    to.set_inside(S::contract == Contract::columns ? typename S::Inside{S::rows, cols} : typename S::Inside{cols, S::rows});
  }
  /// The tile whose rows are the window that begins at (row, i, j).
  template <class G, class S>
  void window(const G& from, S& to, int row, int col, int i, int j) const {
    require(cut_piece<typename S::Element>(col));
    const int rows = inside_window(from, S::rows, row, i, j), cols = overlap(col, S::cols, from.cols);
    tally.read[from.place] += static_cast<u64>(rows) * static_cast<u64>(cols) * sizeof(typename S::Element);
    tally.shared += sizeof(S);
    to.set_inside({rows, cols});
  }
  /// A share of the rows; the other blocks of the cluster send theirs.
  template <class G, class S>
  void tile_for_cluster(const G& from, S& to, int row, int col, int = 0, int = 0) const {
    require(cut_piece<typename S::Element>(col));
    constexpr int share = S::rows / G::split;
    tally.read[from.place] += from.bytes(row + rank * share, col, share, S::cols);
    fill(from, to, row, col);
  }
  template <class G, class T, int N>
  void vector(const G& from, SharedVector<T, N>&, int row, int col, int = 0, int = 0) const {
    require(cut_piece<T>(col));
    tally.read[from.place] += from.bytes(row, col, 1, N);
    tally.shared += N * sizeof(T);
  }

 private:
  template <class G, class S>
  static void fill(const G& from, S& to, int row, int col) {
    tally.shared += sizeof(S);
    const int rows = overlap(row, S::rows, from.rows), cols = overlap(col, S::cols, from.cols);
    to.set_inside(S::contract == Contract::columns ? typename S::Inside{rows, cols} : typename S::Inside{cols, rows});
  }
};

struct GatherCopy : Copy {
  /// A row that is gathered several times counts several times.
  template <class G, class S, class RowOf>
  void gather(const G& from, S& to, RowOf row_of, int col, int = 0, int = 0) const {
    require(cut_piece<typename S::Element>(col));
    int rows = 0;
    for (int r = 0; r < S::rows; ++r) rows += overlap(row_of(r), 1, from.rows);
    const int cols = overlap(col, S::cols, from.cols);
    tally.read[from.place] += static_cast<u64>(rows) * static_cast<u64>(cols) * sizeof(typename S::Element);
    tally.shared += sizeof(S);
    to.set_inside(S::contract == Contract::columns ? typename S::Inside{rows, cols} : typename S::Inside{cols, rows});
  }
};

struct Producer {
  int rank;
  template <class RingType, class Fill>
  void put(RingType& ring, Fill fill) const {
    if constexpr (RingType::gathers)
      fill(GatherCopy{{rank}}, *ring.slots);
    else
      fill(Copy{rank}, *ring.slots);
    ++ring.filled;
  }
};

/// A row of a tile, as block.rows() gives it.
template <class F, int kCount = F::cols>
struct RowView {
  F& tile;

  template <class Fn>
  auto max(Fn f) const {
    whole();
    return reduce(f);
  }
  auto max() const {
    return max([](auto x) { return x; });
  }
  template <class Fn>
  auto sum(Fn f) const {
    whole();
    return reduce(f);
  }
  auto sum() const {
    return sum([](auto x) { return x; });
  }
  template <class Fn>
  void map(Fn f) const {
    cost += cost_of([&] { tile.x = apply(f, tile.x); }) * kCount;
  }
  template <class Fn>
  auto map_sum(Fn f) const {
    map(f);
    return sum();
  }
  auto partial_max() const {
    return reduce([](auto x) { return x; });
  }
  template <int First, int Count>
  RowView<F, Count> columns() const {
    whole();
    return {tile};
  }
  template <class Fn>
  bool map_any_positive(Fn f) const {
    map(f);
    cost.f32 += kCount;
    return false;
  }
  template <class Fn>
  auto map_partial_sum(Fn f) const {
    map(f);
    return reduce([](auto x) { return x; });
  }
  template <class Fn>
  auto fold(Fn f) const {
    whole();
    auto value = tile.x;
    cost += cost_of([&] { value = apply(f, value, tile.x); }) * (kCount - 1);
    return value;
  }

 private:
  static constexpr void whole() { static_assert(!splits_rows<remove_const<F>>, TW_SPLIT_ROW); }
  template <class Fn>
  auto reduce(Fn f) const {
    decltype(apply(f, tile.x)) value{};
    cost += cost_of([&] { value = apply(f, tile.x); }) * kCount;
    if constexpr (is_same<typename F::Element, float>) cost.f32 += kCount - 1;
    return value;
  }
};

/// The role that computes; the same members as the other targets'. `kRows`: of its Fragments.
template <int kRows>
class Block {
 public:
  /// `pull` runs load() for the next step; false when there is none.
  explicit Block(
      bool (*pull)(void* context) = [](void*) { return false; }, void* context = nullptr, BufferUse* last_buffer = nullptr)
      : pull_(pull), context_(context), last_buffer_(last_buffer) {}

  // Rings

  template <class RingType>
  auto& take(RingType& ring) const {
    while (ring.filled == 0)
      if (!pull_(context_)) schedule_error("a block waits for a slot of an empty ring with no step left to load");
    --ring.filled;
    return *ring.slots;
  }
  template <class RingType>
  void release(RingType&) const {}

  // Products

  /// Each warpgroup reads its rows of the left operand and all of the right one.
  template <class Acc, class A, class B>
  void mma(Acc& acc, const A& a, const B& b, bool) {
    own<Acc>();
    static_assert(A::depth == B::depth, "both operands contract over the same length");
    constexpr bool own_rows = A::contract == Contract::columns && A::rows == kRows && is_default<Acc>;
    require(buffers_.product(use_of(a), own_rows ? Reach::warpgroup : Reach::block, use_of(b)));
    tally.shared += A::byte_count * left_reads<Acc>() + B::byte_count * right_reads<Acc>();
    multiply<typename A::Element, A::depth>(acc, a.inside().outer, b.inside().outer, min(a.inside().depth, b.inside().depth));
  }
  template <class Acc, class T, int R, int C, class B>
  void mma(Acc& acc, const Operand<T, R, C>&, const B& b, bool) {
    own<Acc>();
    static_assert(is_default<Acc>, "a left operand in registers has the kernel's rows");
    static_assert(C == B::depth, "both operands contract over the same length");
    require(buffers_.product(nullptr, Reach::block, use_of(b)));
    tally.shared += B::byte_count * right_reads<Acc>();
    multiply<T, C>(acc, R, b.inside().outer, b.inside().depth);
  }
  template <int Left, class... Acc>
  void wait(Constant<Left>, Acc&...) {
    buffers_.wait(Left);
  }
  template <class T, class S, int R, int C>
  void convert(Operand<T, R, C>&, const Fragment<S, R, C>&) const {}
  template <class T, int R, int C>
  void load(Operand<T, R, C>&, const Shared<T, R, C, Contract::columns>&) const {}
  /// Counts one read of each code and of each group's scale.
  template <class T, int R, int C, class Codes, int Bytes, class Scales, class Decode = TimesScale>
  requires(codes_in<Codes> > 1) void load(Operand<T, R, C>&, const Shared<Codes, R, Bytes, Contract::columns>&, const Scales& scales,
                                          Decode decode = {}, int = 0) const {
    tally.shared += static_cast<u64>(R) * C / codes_in<Codes>;
    Counted number = 1.0f;
    const auto element = [&](auto scale) { cost += cost_of([&] { apply(decode, number, scale); }) * (static_cast<u64>(R) * C); };
    if constexpr (requires { Scales::group; }) {
      const Cost before = cost;
      cost = {};
      const auto scale = scales(0, 0);
      cost = cost * (static_cast<u64>(R) * static_cast<u64>(ceil_div(C, Scales::group)));
      cost += before;
      element(scale);
    } else {
      element(scales.x);
    }
  }
  template <class T, int R, int C>
  void load(Operand<T, R, C>&, const Buffer<T, R, C, Contract::columns>& from) {
    require(buffers_.load(from.use, Reach::warpgroup));
    tally.shared += from.byte_count;
  }

  // Elements and rows

  template <class F>
  void fill(F& values, auto value) const {
    own<F>();
    values.x = tw::to<typename F::Element>(value);
  }
  template <class F, class Fn>
  void for_each(F& tile, Fn f) const {
    own<F>();
    visit(F::rows, F::cols, f, tile.x);
  }
  template <int kFirst, int kCount, class F, class Fn>
  void for_columns(F& tile, Fn f) const {
    auto shifted = [&](int row, int col, auto& x) { return f(row, kFirst + col, x); };
    visit(F::rows, kCount, shifted, tile.x);
  }
  template <class F, class Other, class Fn>
  void for_each(F& first, Other& second, Fn f) const {
    own<F>();
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
    own<F>();
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
  template <class T, class Tile>
  void complete(RowVector<T, Tile>&) const {
    static_assert(!splits_rows<Tile>, TW_SPLIT_ROW);
  }
  template <class T, class Tile>
  void complete(RowVector<T, Tile>&, const RowExchange<T, Tile>&) {
    combine<RowExchange<T, Tile>, Tile>();
  }
  template <class F, class T>
  void row_max(F& tile, RowVector<T, F>& vector, const RowExchange<T, F>&) {
    rows(tile, [&](int i, auto row) { vector[i] = row.partial_max(); });
    combine<RowExchange<T, F>, F>();
  }
  template <class F, class T>
  void row_sum(F& tile, RowVector<T, F>& vector, const RowExchange<T, F>& exchange) {
    row_max(tile, vector, exchange);  // costs the same
  }
  template <class F, class Fn>
  void map(F& tile, Fn f) const {
    map_with(tile, f);
  }
  template <class F, class A, class Fn>
  void map(F& tile, const A& a, Fn f) const {
    map_with(tile, f, value_of(a));
  }
  template <class F, class A, class B, class Fn>
  void map(F& tile, const A& a, const B& b, Fn f) const {
    map_with(tile, f, value_of(a), value_of(b));
  }
  template <class F, class A, class B, class C, class Fn>
  void map(F& tile, const A& a, const B& b, const C& c, Fn f) const {
    map_with(tile, f, value_of(a), value_of(b), value_of(c));
  }
  template <class F, class A, class B, class C, class D, class Fn>
  void map(F& tile, const A& a, const B& b, const C& c, const D& d, Fn f) const {
    map_with(tile, f, value_of(a), value_of(b), value_of(c), value_of(d));
  }
  template <class F, class G, class Fn, class... Operands>
  void map_store(F& tile, const G& to, int row, int col, int i, int j, Fn f, const Operands&... operands) const {
    map(tile, operands..., f);
    store(tile, to, row, col, i, j);
  }
  template <class T, int R, int C>
  void column_sum(const Fragment<T, R, C>& tile, ColumnVector<T, Fragment<T, R, C>>& vector, const Scratch<T, R, C>&) const {
    reduce_columns(tile, vector);
  }
  template <class T, int R, int C>
  void column_max(const Fragment<T, R, C>& tile, ColumnVector<T, Fragment<T, R, C>>& vector, const Scratch<T, R, C>&) const {
    reduce_columns(tile, vector);
  }
  template <class T, int R, int C, TileKind kKind, class Fn>
  void column_fold(const Fragment<T, R, C, kKind>& tile, ColumnVector<T, Fragment<T, R, C, kKind>>& vector, Fn f) const {
    vector.x = tile.x;
    cost += cost_of([&] { vector.x = apply(f, vector.x, tile.x); }) * (static_cast<u64>(R - 1) * C);
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
  void add_products(RowVector<float, F>& sums, const G& tile, int row0, int tile_i, const H& vector, int vector_i, int col0) {
    F rows;
    ColumnVector<typename H::Element, F> columns;
    load(rows, tile, row0, col0, tile_i);
    load(columns, vector, 0, col0, vector_i);
    add_products(sums, rows, columns);
  }
  template <class T, int R, int C, class Fn>
  void pairs(Fragment<T, R, C / 2>& to, const Fragment<T, R, C>& from, Fn f) const {
    cost += cost_of([&] { to.x = apply(f, from.x, from.x); }) * (static_cast<u64>(R) * (C / 2));
  }
  template <class T, class Tile, class Fn>
  bool any(const RowVector<T, Tile>& vector, Fn f) const {
    bool found = false;
    cost += cost_of([&] { found = apply(f, vector.x); }) * Tile::rows;
    return found;
  }

  // Global memory

  template <class T, int R, int C, TileKind kKind, class G>
  void load(Fragment<T, R, C, kKind>& to, const G& from, int row, int col, int = 0, int = 0, Fill = {}) const {
    own<Fragment<T, R, C, kKind>>();
    tally.read[from.place] += from.bytes(row, col, R, C);
    to.x = decltype(to.x)(1.0f);
  }
  template <class T, int R, int C, int Warpgroups, class G>
  void load(HeldFragment<T, R, C, Warpgroups>& to, const G& from, int row, int col, int = 0, int = 0, Fill = {}) const {
    own<HeldFragment<T, R, C, Warpgroups>>();
    tally.read[from.place] += from.bytes(row, col, R, C);
    to.x = decltype(to.x)(1.0f);
  }
  /// Neighbours that are the same row are read once: the cache next to the block has it.
  template <class T, int R, int C, TileKind kKind, class G, class RowOf>
  void gather(Fragment<T, R, C, kKind>& to, const G& from, RowOf row_of, int col, int = 0, int = 0, Fill = {}) const {
    for (int r = 0; r < R; ++r)
      if (r == 0 || row_of(r) != row_of(r - 1)) tally.read[from.place] += from.bytes(row_of(r), col, 1, C);
    to.x = decltype(to.x)(1.0f);
  }
  template <class F, class G>
  void load(F& to, const G& from, int row, int col, Fill) const {
    load(to, from, row, col);
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
  void store(const RowVector<T, Tile>&, const G& to, int row, int col, int = 0, int = 0) const {
    tally.written[to.place] += to.bytes(row, col, Tile::rows, 1);
  }
  /// A plain number, as the targets that compute have it: arithmetic on it alone is not counted.
  template <class G>
  float value(const G& from, int row, int col, int = 0, int = 0) const {
    tally.read[from.place] += from.bytes(row, col, 1, 1);
    return 1.0f;
  }
  template <class F, class G>
  void store(const F&, const G& to, int row, int col, int = 0, int = 0) const {
    own<F>();
    tally.written[to.place] += to.bytes(row, col, F::rows, F::cols);
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
  template <class T, int R, int C, class G>
  void store_window(const Fragment<float, R, C>&, const Staging<T, R, C>& staging, const G& to, int row, int col, int i, int j) {
    pass(staging, col);
    tally.written[to.place] +=
        static_cast<u64>(inside_window(to, R, row, i, j)) * static_cast<u64>(overlap(col, C, to.cols)) * sizeof(typename G::Element);
  }
  template <class F, class G>
  void atomic_add(const F& from, const G& to, int row0, int col0, int = 0, int = 0) const {
    scatter_add(
        from, to, [row0](int row) { return row0 + row; }, col0);
  }
  template <class F, class G, class RowOf>
  void scatter(const F&, const G& to, RowOf row_of, int col, int = 0, int = 0) const {
    own<F>();
    for (int r = 0; r < F::rows; ++r) tally.written[to.place] += to.bytes(row_of(r), col, 1, F::cols);
  }
  /// Read and written.
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
  void sync() { buffers_.sync(); }
  void sync_warpgroup() {
    if constexpr (kRows <= kRowsPerWarpgroup)
      buffers_.sync();
    else
      buffers_.sync_warpgroup();
  }
  void fence() { buffers_.fence(); }

  // Buffers

  template <class F, class T, int R, int C, Contract contract>
  void store(const F&, const Buffer<T, R, C, contract>& to) {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    own<F>();
    require(buffers_.store(to.use, is_default<F> ? Reach::warpgroup : Reach::block, &dealing<F>, unread_stores));
    tally.shared += to.byte_count;
  }
  template <class F, class T, int R, int C, Contract contract>
  void store_transposed(const F&, const Buffer<T, R, C, contract>& to) {
    static_assert(F::rows == C && F::cols == R, "a Buffer has its Fragment's shape, transposed");
    own<F>();
    require(buffers_.store(to.use, Reach::block, &dealing<F>, unread_stores));
    tally.shared += to.byte_count;
  }
  template <class F, class T, int R, int C, Contract contract>
  void load(F& to, const Buffer<T, R, C, contract>& from) {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    own<F>();
    require(buffers_.load(from.use, is_default<F> ? Reach::warpgroup : Reach::block));
    tally.shared += from.byte_count;
    to.x = decltype(to.x)(1.0f);
  }
  template <class T, int R, int C, Contract contract, class Fn>
  void update(const Buffer<T, R, C, contract>& buffer, int count, Fn f) {
    require(buffers_.update(buffer.use, unread_stores));
    parallel(count, f);
  }
  /// Read and written.
  template <int R, int C, Contract contract, class G>
  void reduce_add(const Buffer<float, R, C, contract>& from, const G& to, int row, int col, int = 0, int = 0) {
    require(buffers_.copy(from.use, unread_stores));
    require(cut_piece<float>(col));
    const u64 bytes = to.bytes(row, col, R, C);
    tally.shared += from.byte_count;
    tally.read[to.place] += bytes;
    tally.written[to.place] += bytes;
  }
  template <int Left>
  void wait_stores(Constant<Left>) {
    buffers_.wait_stores(Left, unread_stores, last_buffer_);
  }
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
  void load(ColumnVector<T, Tile>& to, const VectorBuffer<T, N>& from) const {
    load_vector<Tile::cols>(to, from);
  }
  template <class T, class Tile, int N>
  void store(const RowVector<T, Tile>&, const VectorBuffer<T, N>&) {
    static_assert(N == Tile::rows, "a vector has an element for each row");
    tally.shared += N * sizeof(T);
    sync();
  }

  // Cumulative sums: an addition for every element but the first

  template <class F, class Direction = Forward>
  void row_cumsum(F&, Direction = {}) const {
    static_assert(!splits_rows<F>, "row_cumsum() is for tiles whose rows lie in one warpgroup");
    own<F>();
    cost.f32 += static_cast<u64>(F::rows) * (F::cols - 1);
  }
  template <class T, int R, int C, class Direction = Forward>
  void column_cumsum(Fragment<T, R, C>&, const Scratch<T, R, C>&, Direction = {}) const {
    own<Fragment<T, R, C>>();
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
  /// After the tile: `persistent`: the block has others to do.
  void end(bool persistent) const {
    if (persistent) require(buffers_.at_the_end(last_buffer_));
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
  /// Read and written.
  template <int N>
  void count(Histogram<N>&, int) const {
    cost.shared += 2 * sizeof(u32);
  }
  template <int N>
  Located locate(const Histogram<N>&, int n) const {
    cost.shared += N * sizeof(u32);
    return {N - 1, 0, n};
  }
  template <class T, int N>
  void clear(List<T, N>&) const {
    cost.shared += sizeof(u32);
  }
  /// The list's size is read and written, and the value written.
  template <class T, int N>
  void append(List<T, N>&, T) const {
    cost.shared += 2 * sizeof(u32) + sizeof(T);
  }
  template <class T, int N>
  int size(const List<T, N>&) const {
    cost.shared += sizeof(u32);
    return N;
  }
  /// As a bitonic sort of the n values that are wanted, which moves all of them in every step.
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
  BufferUse* last_buffer_;
  BufferModel buffers_;

  /// The kernel's rows, of which each warpgroup has 64.
  template <class F>
  static constexpr bool is_default = F::kind == TileKind::fragment&& F::rows == kRows;
  /// Its address stands for the type.
  template <class F>
  static constexpr char dealing = 0;
  static BufferUse* use_of(const auto&) { return nullptr; }
  template <class T, int R, int C, Contract contract>
  static BufferUse* use_of(const Buffer<T, R, C, contract>& buffer) {
    return &buffer.use;
  }
  template <class S, class T, Contract contract, int kFirst, int Count>
  static BufferUse* use_of(const View<S, T, contract, kFirst, Count>& view) {
    return use_of(view.source);
  }
  template <int Count, class Vector, class V>
  static void load_vector(Vector& to, const V&) {
    static_assert(V::size == Count, "a vector has an element for each row, or for each column");
    tally.shared += Count * sizeof(typename V::Element);
    to.x = decltype(to.x)(1.0f);
  }
  /// What warpgroups do through an exchange: write their parts, read all.
  template <class Exchange, class Tile>
  void combine() {
    cost.f32 += static_cast<u64>(Tile::rows) * (Exchange::parts() - 1);
    tally.shared += 2 * Exchange::bytes;
    sync();
  }

  template <class F>
  static constexpr void own() {
    if constexpr (requires { F::warpgroups; }) {
      static_assert(F::warpgroups * kRowsPerWarpgroup == kRows, TW_FRAGMENT_ROWS);
    } else if constexpr (requires { F::kind; }) {
      static_assert(F::kind == TileKind::rows || F::rows == kRows, TW_FRAGMENT_ROWS);
      static_assert(F::kind == TileKind::rows || accumulates<typename F::Element>, TW_ACCUMULATES);
    }
  }
  /// Into shared memory and out of it, in the order of a warpgroup's stores.
  template <class T, int R, int C>
  void pass(const Staging<T, R, C>& staging, int col) {
    if constexpr (sizeof(T) == 2) {
      require(cut_piece<T>(col));
      tally.shared += 2 * R * C * sizeof(T);
      for_panels<Staging<T, R, C>>([&](auto left) { wait_stores(left); },
                                   [&](int, int slot) {
                                     if (!unread_stores.issue(staging.slot + slot)) schedule_error(kWrittenUnderAStore);
                                   });
    }
  }
  /// How often a product reads its left operand: once for every part of the columns; and its right one: once for every 64 rows.
  template <class Acc>
  static constexpr u64 left_reads() {
    if constexpr (requires { Acc::column_groups; }) return Acc::column_groups;
    return 1;
  }
  template <class Acc>
  static constexpr u64 right_reads() {
    return static_cast<u64>(ceil_div(Acc::rows, kRowsPerWarpgroup));
  }
  static constexpr u64 operations(int m, int n, int k) { return 2 * static_cast<u64>(m) * static_cast<u64>(n) * static_cast<u64>(k); }
  template <class T, int Depth, class Acc>
  static void multiply(Acc& acc, int rows, int cols, int depth) {
    constexpr int type = static_cast<int>(operand_type<T>);
    tally.products[type] += operations(Acc::rows, Acc::cols, Depth);
    tally.inside[type] += operations(rows, cols, depth);
    acc.x = decltype(acc.x)(1.0f);
  }
  /// f(row, col, x...) for every element; each starts from what the tile holds.
  template <class Fn, class... X>
  static void visit(int rows, int cols, Fn& f, X&... x) {
    [&](auto... before) {
      for_elements(rows, cols, [&](int row, int col) {
        ((x = before), ...);
        apply(f, row, col, x...);
      });
    }(x...);
  }
  template <class F, class Fn, class... X>
  static void map_with(F& tile, Fn& f, const X&... values) {
    own<F>();
    cost += cost_of([&] { tile.x = apply(f, tile.x, values...); }) * (static_cast<u64>(F::rows) * static_cast<u64>(F::cols));
  }
  template <class Vector>
  static auto value_of(const Vector& vector) requires requires {
    vector.x;
  }
  { return vector.x; }
  static float value_of(float number) { return number; }
  template <class T, int R, int C, TileKind kKind>
  static void reduce_columns(const Fragment<T, R, C, kKind>& tile, ColumnVector<T, Fragment<T, R, C, kKind>>& vector) {
    cost.f32 += static_cast<u64>(R - 1) * C;
    tally.shared += 2 * Scratch<T, R, C>::bytes;
    vector.x = tile.x;
  }
};

/// Bytes of shared memory that a block of the kernel needs.
template <class On>
i64 memory_bytes() {
  if constexpr (requires { typename On::Memory; }) {
    Allocator allocator;
    typename On::Memory memory(allocator);
    static_cast<void>(memory);
    return allocator.used;
  } else {
    return 0;
  }
}

/// Counts one tile into `tally` and `cost`. `arena`: memory_bytes<On>() bytes.
template <class On>
void run(const typename On::Params& params, Tile tile_of_grid, u8* arena) {
  const auto tile = tw::detail::work_of<On>(params, tile_of_grid);
  Allocator allocator{arena};
  constexpr bool persistent = tw::detail::ScheduleOf<On>::Type::dispatch != Dispatch::plain;
  if constexpr (tw::detail::has_load<On>) {
    struct Loads {
      const typename On::Params& params;
      int rank;  ///< of the block in its cluster
      const decltype(tile)& work;
      typename On::Memory memory;
      int step = 0;
      int steps;
    } loads{params, tile_of_grid.m % tw::detail::cluster_of<On>(), tile, typename On::Memory(allocator), 0, On::steps(params, tile)};
    const auto pull = [](void* context) {
      Loads& l = *static_cast<Loads*>(context);
      if (l.step == l.steps) return false;
      const Producer producer{l.rank};
      On::load(producer, l.params, l.work, l.step++, l.memory);
      return true;
    };
    Block<tw::detail::fragment_rows_of<On>()> block(pull, &loads, allocator.last_buffer);
    typename tw::detail::StateOf<On>::Type state{};
    On::compute(block, params, tile, loads.memory, state);
    On::finish(block, params, tile, loads.memory, state);
    block.end(persistent);
  } else {
    using Block = Block<tw::detail::fragment_rows_of<On>()>;
    if constexpr (requires { typename On::Memory; }) {
      typename On::Memory memory(allocator);
      Block block([](void*) { return false; }, nullptr, allocator.last_buffer);
      On::compute(block, params, tile, memory);
      block.end(persistent);
    } else {
      Block block;
      On::compute(block, params, tile);
    }
  }
}

}  // namespace tw::analysis

#endif  // !TW_ON_GPU
