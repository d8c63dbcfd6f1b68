#pragma once

#include "tilewave/tile/cpu/target.tile.hpp"

#if !TW_ON_GPU

namespace tw::cpu {

/// Copies of global memory into tiles of a slot.
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
    // The whole tile counts: rows that are not in the tensor are zeros.
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
  /// The tile whose rows are the window that begins at (row, i, j). All of it may lie outside the tensor.
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
      // Line by line: of its neighbours inside the tensor each line gives a run.
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
  /// Elements of one row; 0 outside the tensor.
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
  /// `count` rows of a tile, from a multiple of 16 on.
  template <class S>
  static void zero(S& to, int first, int count) {
    constexpr bool columns = S::contract == Contract::columns;
    constexpr long panels = round_up(S::outer, kPanelRows) / kPanelRows;
    auto* const at = to.panels + S::offset(first, 0);
    // Rows are whole panels, or the same lines of every panel.
    const unsigned long size = static_cast<unsigned long>(count) * (columns ? S::panel_depth : kPanelRows) * sizeof *to.panels;
    for (long panel = 0; panel < (columns ? 1 : panels); ++panel) __builtin_memset(at + panel * kPanelRows * S::panel_depth, 0, size);
  }

  /// `rows` rows into one panel of zeros, from row `first` of it on.
  template <class T>
  static void pack_run(Packed<T>* panel, int first, const T* source, long row_stride, long depth_stride, int rows, int depth,
                       int panel_depth) {
    if (rows == kPanelRows) return pack(panel, source, row_stride, depth_stride, rows, depth, panel_depth);
    constexpr int piece = 64;  // columns at a time go through a panel on the stack
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
  /// Fills row r of the tile with row row_of(r) of the tensor; with zeros where that is outside.
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

// What a product reads: a tile in a ring as it is, others packed into memory `which` of this thread.

template <class T, int R, int C, Contract contract>
const Shared<T, R, C, contract>& packed(const Shared<T, R, C, contract>& tile, int) {
  return tile;
}
/// `elements`: those of the view that are valid, row by row.
template <class V, class T>
auto& pack_view(const V&, const T* elements, long stride, int valid_rows, int valid_cols, int which) {
  using P = PackedView<T, V::outer, V::depth>;
  constexpr bool columns = V::contract == Contract::columns;
  P& packed = *static_cast<P*>(operand_memory(which, sizeof(P)));
  packed.valid_outer = columns ? valid_rows : valid_cols;
  packed.valid_depth = columns ? valid_cols : valid_rows;
  Copy::pack(packed.panels, elements, columns ? stride : 1, columns ? 1 : stride, packed.valid_outer, packed.valid_depth, P::panel_depth);
  return packed;
}
template <class U, int R, int C, Contract c, class T, Contract contract, int kFirst, int Count>
auto& packed(const View<Buffer<U, R, C, c>, T, contract, kFirst, Count>& view, int which) {
  return pack_view(view, reinterpret_cast<const T*>(view.source.elements + kFirst), C, R, Count, which);
}
template <class T, int R, int C, Contract contract>
auto& packed(const Buffer<T, R, C, contract>& buffer, int which) {
  return packed(buffer.template view<T, contract, 0, C>(), which);
}
template <class U, int R, int C, Contract c, class T, Contract contract, int kFirst, int Count>
auto& packed(const View<Shared<U, R, C, c>, T, contract, kFirst, Count>& view, int which) {
  const auto& tile = view.source;
  constexpr bool columns = c == Contract::columns;
  if (tile.valid_outer < 0) schedule_error("a product reads a slot that was released");
  const int rows = columns ? tile.valid_outer : tile.valid_depth;
  const int cols = min(max((columns ? tile.valid_depth : tile.valid_outer) - kFirst, 0), Count);
  U* const elements = static_cast<U*>(operand_memory(2, R * Count * sizeof(U)));
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < cols; ++col) elements[row * Count + col] = tw::to<U>(tile.panels[tile.offset(row, kFirst + col)]);
  return pack_view(view, reinterpret_cast<const T*>(elements), Count, rows, cols, which);
}
/// The tile or Buffer in which an operand lies.
template <class S>
const S& source_of(const S& operand) {
  return operand;
}
template <class S, class T, Contract contract, int kFirst, int Count>
const S& source_of(const View<S, T, contract, kFirst, Count>& view) {
  return view.source;
}

struct Producer {
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

struct Sum {
  static constexpr float neutral = 0;
  static TW_INLINE float fold(float sum, float x) { return sum + x; }
};
struct Largest {
  static constexpr float neutral = -kInfinity;
  static TW_INLINE float fold(float largest, float x) { return x > largest ? x : largest; }  // a NaN in x is left out
};

/// Folds value(c) of a row's columns into many results at once, and these at the end: a chain of single operations would take its length
/// times their latency, and compilers may not reorder sums by themselves.
template <class Op, int cols, class Value>
TW_INLINE float fold_columns(Value value) {
  constexpr int chains = cols % 64 == 0 ? 64 : cols % 8 == 0 ? 8 : 1;
  alignas(64) float folded[chains];
  for (float& x : folded) x = Op::neutral;
  for (int c = 0; c < cols; c += chains)
    for (int k = 0; k < chains; ++k) folded[k] = Op::fold(folded[k], static_cast<float>(value(c + k)));
  for (int n = chains / 2; n > 0; n /= 2)
    for (int k = 0; k < n; ++k) folded[k] = Op::fold(folded[k], folded[k + n]);
  return folded[0];
}

template <class F, int kFirst = 0, int kCount = F::cols>
struct RowView {
  F& fragment;
  int r;

  /// `Count` columns from `First` on.
  template <int First, int Count>
  TW_INLINE auto columns() const {
    whole();
    return RowView<F, kFirst + First, Count>{fragment, r};
  }

  /// The largest f(x), an integer or float; of numbers and NaNs the largest number.
  template <class Fn>
  TW_INLINE auto max(Fn f) const {
    whole();
    return partial_max(f);
  }
  TW_INLINE auto max() const {
    return max([](auto x) { return x; });
  }
  TW_INLINE auto partial_max() const {
    return partial_max([](auto x) { return x; });
  }
  /// The sum of f(x).
  template <class Fn>
  TW_INLINE auto sum(Fn f) const {
    whole();
    if constexpr (is_same<decltype(f(row()[0])), float>)
      return fold_columns<Sum, kCount>([&](int c) { return f(row()[c]); });
    else
      return fold(f, [](auto a, auto b) { return a + b; });
  }
  TW_INLINE auto sum() const {
    return sum([](auto x) { return x; });
  }
  template <class Fn>
  TW_INLINE void map(Fn f) const {
    for (int c = 0; c < kCount; ++c) row()[c] = f(row()[c]);
  }
  template <class Fn>
  TW_INLINE bool map_any_positive(Fn f) const {
    map(f);
    return !(partial_max() < 0.0f);
  }
  template <class Fn>
  TW_INLINE float map_sum(Fn f) const {
    whole();
    return map_partial_sum(f);
  }
  template <class Fn>
  TW_INLINE float map_partial_sum(Fn f) const {
    return fold_columns<Sum, kCount>([&](int c) { return row()[c] = f(row()[c]); });
  }
  /// f(f(a, b), c)... of all the row's elements, in an order that is the same in every run; f must be associative and commutative.
  template <class Fn>
  TW_INLINE auto fold(Fn f) const {
    whole();
    constexpr int lanes = kCount % 64 == 0 ? 64 : kCount % 8 == 0 ? 8 : 1;
    typename F::Element folded[lanes];
    for (int k = 0; k < lanes; ++k) folded[k] = row()[k];
    for (int c = lanes; c < kCount; c += lanes)
      for (int k = 0; k < lanes; ++k) folded[k] = f(folded[k], row()[c + k]);
    for (int left = lanes / 2; left > 0; left /= 2)
      for (int k = 0; k < left; ++k) folded[k] = f(folded[k], folded[k + left]);
    return folded[0];
  }

 private:
  TW_INLINE auto* row() const { return fragment.x + r * F::cols + kFirst; }
  static constexpr void whole() { static_assert(!splits_rows<remove_const<F>>, TW_SPLIT_ROW); }
  template <class Fn>
  TW_INLINE auto partial_max(Fn f) const {
    if constexpr (is_same<decltype(f(row()[0])), float>)
      return largest_number(f);
    else
      return fold(f, [](auto a, auto b) { return tw::max(a, b); });
  }

  template <class Fn>
  TW_INLINE float largest_number(Fn f) const {
    const float largest = fold_columns<Largest, kCount>([&](int c) { return f(row()[c]); });
    if (largest > -kInfinity) return largest;
    for (int c = 0; c < kCount; ++c) {  // only NaNs, or nothing larger than -infinity: rare
      const float value = f(row()[c]);
      if (value == value) return largest;
    }
    return f(row()[0]);
  }
  template <class Fn, class Op>
  TW_INLINE auto fold(Fn f, Op op) const {
    auto result = f(row()[0]);
    for (int c = 1; c < kCount; ++c) result = op(result, f(row()[c]));
    return result;
  }
};

/// Vectors of 16 bytes, and two of them with their lanes taken in turn: a0 b0 a1 b1 ..., the lower half or the upper.
template <int kBytes>
struct Interleave;
template <>
struct Interleave<1> {
  typedef u8 Lanes __attribute__((vector_size(16)));
  static constexpr int lanes = 16;
  static TW_INLINE Lanes low(Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  static TW_INLINE Lanes high(Lanes a, Lanes b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
};
template <>
struct Interleave<2> {
  typedef u16 Lanes __attribute__((vector_size(16)));
  static constexpr int lanes = 8;
  static TW_INLINE Lanes low(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
  static TW_INLINE Lanes high(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
};
template <>
struct Interleave<4> {
  typedef u32 Lanes __attribute__((vector_size(16)));
  static constexpr int lanes = 4;
  static TW_INLINE Lanes low(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
  static TW_INLINE Lanes high(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
};
template <>
struct Interleave<8> {
  typedef u64 Lanes __attribute__((vector_size(16)));
  static constexpr int lanes = 2;
  static TW_INLINE Lanes low(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 0, 2); }
  static TW_INLINE Lanes high(Lanes a, Lanes b) { return __builtin_shufflevector(a, b, 1, 3); }
};

/// A square of as many rows as a vector has lanes. Taking the lanes of rows i and i + n/2 in turn, log2(n) times over, is a transposition.
template <class Vectors>
TW_INLINE void transpose_square(const void* from, long from_stride, void* to, long to_stride) {
  using Lanes = typename Vectors::Lanes;
  constexpr int n = Vectors::lanes;
  constexpr long bytes = 16 / n;
  Lanes rows[n], turned[n];
  for (int i = 0; i < n; ++i) __builtin_memcpy(&rows[i], static_cast<const u8*>(from) + i * from_stride * bytes, 16);
  for (int step = 1; step < n; step *= 2) {
    for (int i = 0; i < n / 2; ++i) {
      turned[2 * i] = Vectors::low(rows[i], rows[i + n / 2]);
      turned[2 * i + 1] = Vectors::high(rows[i], rows[i + n / 2]);
    }
    for (int i = 0; i < n; ++i) rows[i] = turned[i];
  }
  for (int i = 0; i < n; ++i) __builtin_memcpy(static_cast<u8*>(to) + i * to_stride * bytes, &rows[i], 16);
}

/// The role that computes; the same members as sm_90a's. `kRows`: of its Fragments.
template <int kRows>
class Block {
 public:
  /// `pull` runs load() for the next step; false when there is none. `first_tile`: of the launch, the one that prints.
  explicit Block(
      bool first_tile, bool (*pull)(void* context) = [](void*) { return false; }, void* context = nullptr, BufferUse* last_buffer = nullptr)
      : first_tile_(first_tile), pull_(pull), context_(context), last_buffer_(last_buffer) {}

  // Rings

  template <class RingType>
  auto& take(RingType& ring) {
    while (ring.filled == 0) {
      if (!pull_(context_))
        schedule_error("wait for a slot of an empty ring with no step left to load: on a GPU the kernel would wait forever");
    }
    auto& slot = ring.slots[ring.next_take];
    if constexpr (RingType::gathers) {
      if (poison_released_slots()) __builtin_memcpy(static_cast<void*>(&slot), &ring.arriving[ring.next_take], sizeof slot);
    }
    ring.next_take = (ring.next_take + 1) % RingType::stages;
    --ring.filled;
    ++ring.taken;
    return slot;
  }
  template <class RingType>
  void release(RingType& ring) {
    if (ring.taken == 0) schedule_error("a ring's slot is released, but none is taken");
    auto& slot = ring.slots[(ring.next_take - ring.taken + 2 * RingType::stages) % RingType::stages];
    for (int i = 0; i < in_flight_; ++i) {
      if (reads(products_[i].a, slot) || reads(products_[i].b, slot))
        schedule_error("release of a slot that a product in flight reads: wait for it first");
    }
    if (poison_released_slots()) __builtin_memset(static_cast<void*>(&slot), 0xff, sizeof slot);
    --ring.taken;
  }

  // Products

  template <class Acc, class A, class B>
  void mma(Acc& acc, const A& a_tile, const B& b_tile, bool overwrite) {
    own<Acc>();
    static_assert(A::depth == B::depth, "both operands contract over the same length");
    static_assert(A::outer == Acc::rows && B::outer == Acc::cols, "the accumulator's shape is that of the product");
    constexpr bool own_rows = A::contract == Contract::columns && A::rows == kRows && is_default<Acc>;
    require(buffers_.product(use_of(source_of(a_tile)), own_rows ? Reach::warpgroup : Reach::block, use_of(source_of(b_tile))));
    const auto& a = packed(a_tile, 0);
    const auto& b = packed(b_tile, 1);
    if (a.valid_outer < 0 || b.valid_outer < 0) schedule_error("a product reads a slot that was released");
    launch(&acc, &source_of(a_tile), &source_of(b_tile));
    multiply(acc, a, b, a.valid_outer, b.valid_outer, min(a.valid_depth, b.valid_depth), overwrite);
  }
  template <class Acc, class T, int R, int C, class B>
  void mma(Acc& acc, const Operand<T, R, C>& a, const B& b_tile, bool overwrite) {
    own<Acc>();
    static_assert(is_default<Acc>, "a left operand in registers has the kernel's rows");
    static_assert(C == B::depth, "both operands contract over the same length");
    require(buffers_.product(nullptr, Reach::block, use_of(source_of(b_tile))));
    const auto& b = packed(b_tile, 1);
    if (b.valid_outer < 0) schedule_error("a product reads a slot that was released");
    launch(&acc, &a, &source_of(b_tile));
    multiply(acc, a, b, R, b.valid_outer, b.valid_depth, overwrite);
  }
  template <int Left, class... Acc>
  void wait(Constant<Left>, Acc&...) {
    buffers_.wait(Left);
    const int done = in_flight_ > Left ? in_flight_ - Left : 0;
    for (int i = done; i < in_flight_; ++i) products_[i - done] = products_[i];
    in_flight_ -= done;
  }
  template <class T, class S, int R, int C>
  void convert(Operand<T, R, C>& to, const Fragment<S, R, C>& from) const {
    touch(from);
    overwrite(to);
    constexpr int group = Operand<T, R, C>::group;
    static_assert(C % group == 0, "an operand has whole groups of columns");
    const Library& lib = library();
    if constexpr (sizeof(T) == 1) {
      for (int row = 0; row < R; ++row)
        for (int col = 0; col < C; ++col) to.panels[to.offset(row, col)] = to_packed<T>(from.x[row * C + col]);
    } else if constexpr (is_same<T, float>) {
      lib.pack_f32(to.panels, from.x, C, 1, R, C, C);
    } else {
      static_assert(is_same<T, bf16> || is_same<T, f16>, "the cpu target makes operands of f32, bf16, f16, fp8 and i8");
      alignas(64) unsigned short narrow[kPanelRows * C];
      for (int row = 0; row < R; row += kPanelRows) {
        const int rows = min(R - row, kPanelRows);
        if constexpr (is_same<T, bf16>) {
          lib.narrow_bf16(narrow, from.x + row * C, rows * C);
          lib.pack_bf16(&to.panels[row * C].bits, narrow, C, 1, rows, C, C);
        } else {
          lib.narrow_f16(narrow, from.x + row * C, rows * C);
          lib.pack_f16(to.panels + row * C, narrow, C, 1, rows, C, C);
        }
      }
    }
  }

  /// A tile in a ring as left operand.
  template <class T, int R, int C>
  void load(Operand<T, R, C>& to, const Shared<T, R, C, Contract::columns>& from) const {
    if (from.valid_outer < 0) schedule_error("a load reads a slot that was released");
    overwrite(to);
    static_cast<Panels<T, R, C>&>(to) = from;
  }
  /// decode(number, scale) of a tile of codes, from its column `first` on.
  template <class T, int R, int C, class Codes, int Bytes, class Scales, class Decode = TimesScale>
  requires(codes_in<Codes> > 1) void load(Operand<T, R, C>& to, const Shared<Codes, R, Bytes, Contract::columns>& from,
                                          const Scales& scales, Decode decode = {}, int first = 0) const {
    if (from.valid_outer < 0) schedule_error("a load reads a slot that was released");
    overwrite(to);
    constexpr int in_byte = codes_in<Codes>, group = group_of<Scales>();
    static_assert(group % (32 / static_cast<int>(sizeof(T))) == 0,
                  "a group of scales is a multiple of 16 codes of a 16-bit operand, of 32 of an 8-bit one");
    if (first < 0 || first % min(group, C) != 0 || first + C > Bytes * in_byte)
      schedule_error("a load of codes begins inside a group of scales, or reaches over its tile");
    for (int row = 0; row < R; ++row) {
      for (int begin = 0; begin < C; begin += group) {
        const auto scale = scale_of(scales, row, (first + begin) / group);
        for (int col = begin; col < min(begin + group, C); ++col) {
          const u8 codes = bit_cast<u8>(from.get(row, (first + col) / in_byte));
          to.panels[to.offset(row, col)] = to_packed<T>(decode(value_of_code<Codes>(codes, (first + col) % in_byte), scale));
        }
      }
    }
  }
  template <class T, int R, int C>
  void load(Operand<T, R, C>& to, const Buffer<T, R, C, Contract::columns>& from) {
    require(buffers_.load(from.use, Reach::warpgroup));
    overwrite(to);
    Copy::pack(to.panels, from.elements, C, 1, R, C, Operand<T, R, C>::panel_depth);
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
  template <class T, class Tile>
  void complete(RowVector<T, Tile>&) const {
    static_assert(!splits_rows<Tile>, TW_SPLIT_ROW);
  }
  template <class T, class Tile>
  void complete(RowVector<T, Tile>&, const RowExchange<T, Tile>&) {
    sync();
  }
  template <class F, class T>
  void row_max(F& fragment, RowVector<T, F>& vector, const RowExchange<T, F>&) {
    rows(fragment, [&](int i, auto row) { vector[i] = row.partial_max(); });
    sync();
  }
  template <class F, class T>
  void row_sum(F& fragment, RowVector<T, F>& vector, const RowExchange<T, F>&) {
    rows(fragment, [&](int i, auto row) { vector[i] = row.map_partial_sum([](T x) { return x; }); });
    sync();
  }
  template <class F, class Fn>
  TW_INLINE void map(F& tile, Fn f) const {
    map_with(tile, f);
  }
  template <class F, class A, class Fn>
  TW_INLINE void map(F& tile, const A& a, Fn f) const {
    map_with(tile, f, a);
  }
  template <class F, class A, class B, class Fn>
  TW_INLINE void map(F& tile, const A& a, const B& b, Fn f) const {
    map_with(tile, f, a, b);
  }
  template <class F, class A, class B, class C, class Fn>
  TW_INLINE void map(F& tile, const A& a, const B& b, const C& c, Fn f) const {
    map_with(tile, f, a, b, c);
  }
  template <class F, class A, class B, class C, class D, class Fn>
  TW_INLINE void map(F& tile, const A& a, const B& b, const C& c, const D& d, Fn f) const {
    map_with(tile, f, a, b, c, d);
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
  template <class T, int R, int C, class Fn>
  TW_INLINE void pairs(Fragment<T, R, C / 2>& to, const Fragment<T, R, C>& from, Fn f) const {
    for (int n = 0; n < R * C / 2; ++n) to.x[n] = f(from.x[2 * n], from.x[2 * n + 1]);
  }
  template <class T, int R, int C>
  void column_sum(const Fragment<T, R, C>& fragment, ColumnVector<T, Fragment<T, R, C>>& vector, const Scratch<T, R, C>&) const {
    reduce_columns(fragment, vector, [](T a, T b) { return a + b; });
  }
  template <class T, int R, int C>
  void column_max(const Fragment<T, R, C>& fragment, ColumnVector<T, Fragment<T, R, C>>& vector, const Scratch<T, R, C>&) const {
    reduce_columns(fragment, vector, [](T a, T b) { return max(a, b); });
  }
  template <class T, int R, int C, TileKind kKind, class Fn>
  TW_INLINE void column_fold(const Fragment<T, R, C, kKind>& rows, ColumnVector<T, Fragment<T, R, C, kKind>>& vector, Fn f) const {
    reduce_columns(rows, vector, f);
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
  template <class F, class G>
  TW_INLINE void load(F& to, const G& from, int row, int col, Fill fill) const {
    load(to, from, row, col, 0, 0, fill);
  }
  template <class T, class Tile, class G>
  TW_INLINE void load(ColumnVector<T, Tile>& to, const G& from, int row, int col0, int i = 0, int j = 0, Fill fill = {}) const {
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
    using E = typename G::Element;
    const Extent rows(row, to.size, from.rows);
    const bool has_col = col >= 0 && col < from.cols;
    for (int n = 0; n < to.size; ++n)
      to.x[n] = has_col && rows.has(n) ? tw::to<T>(*from.template at<const E>(row + n, col, i, j)) : tw::to<T>(fill.value);
  }
  template <class T, class Tile, class G>
  TW_INLINE void store(const RowVector<T, Tile>& from, const G& to, int row, int col, int i = 0, int j = 0) const {
    using E = typename G::Element;
    const Extent rows(row, from.size, to.rows);
    if (col < 0 || col >= to.cols) return;
    for (int n = rows.begin; n < rows.end; ++n) *to.template at<E>(row + n, col, i, j) = tw::to<E>(from.x[n]);
  }
  template <class G>
  TW_INLINE float value(const G& from, int row, int col, int i = 0, int j = 0) const {
    return static_cast<float>(*from.template at<const typename G::Element>(row, col, i, j));
  }
  template <class F, class G>
  TW_INLINE void store(const F& from, const G& to, int row0, int col0, int i = 0, int j = 0) const {
    touch(from);
    const Extent rows(row0, F::rows, to.rows), cols(col0, F::cols, to.cols);
    if (cols.begin >= cols.end) return;
    for (int r = rows.begin; r < rows.end; ++r) store_row(from, r, to, row0 + r, col0, cols, i, j);
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
      // Memory takes a piece while the next one is computed.
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
  template <class F, class G>
  void atomic_add(const F& from, const G& to, int row0, int col0, int i = 0, int j = 0) const {
    scatter_add(
        from, to, [row0](int row) { return row0 + row; }, col0, i, j);
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
    if constexpr (S::depth != S::panel_depth) __builtin_memset(to.panels, 0, sizeof to.panels);  // what completes the last group of k
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
    // Up to the end of a product's group or panel, which may be read; what lies behind is left out.
    const int end = contract == Contract::columns ? round_up(first, kPanelRows) : round_up(first, S::group);
    for (int row = first; row < end; ++row)
      for (int col = 0; col < round_up(C, kPanelRows); ++col) tile.panels[S::offset(row, col)] = to_packed<T>(0.0f);
    valid = first;
  }
  /// A barrier of all threads that compute, as far as the model of Buffers is concerned.
  void sync() { buffers_.sync(); }
  void sync_warpgroup() {
    if constexpr (kRows <= 64)
      buffers_.sync();
    else
      buffers_.sync_warpgroup();
  }
  void fence() { buffers_.fence(); }

  // Buffers

  template <class F, class T, int R, int C, Contract contract>
  void store(const F& from, const Buffer<T, R, C, contract>& to) {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    touch(from);
    require(buffers_.store(to.use, is_default<F> ? Reach::warpgroup : Reach::block, &dealing<F>, unread_stores));
    if constexpr (converts<typename F::Element, T>)
      convert_row(to.elements, from.x, R * C);
    else
      for (int n = 0; n < R * C; ++n) to.elements[n] = tw::to<T>(from.x[n]);
  }
  template <class F, class T, int R, int C, Contract contract>
  void store_transposed(const F& from, const Buffer<T, R, C, contract>& to) {
    static_assert(F::rows == C && F::cols == R, "a Buffer has its Fragment's shape, transposed");
    touch(from);
    require(buffers_.store(to.use, Reach::block, &dealing<F>, unread_stores));
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) to.at(r, c) = tw::to<T>(from.at(c, r));
  }
  template <class F, class T, int R, int C, Contract contract>
  void load(F& to, const Buffer<T, R, C, contract>& from) {
    static_assert(F::rows == R && F::cols == C, "a Buffer has its Fragment's shape");
    touch(to);
    require(buffers_.load(from.use, is_default<F> ? Reach::warpgroup : Reach::block));
    if constexpr (converts<T, typename F::Element>)
      convert_row(to.x, from.elements, R * C);
    else
      for (int n = 0; n < R * C; ++n) to.x[n] = tw::to<typename F::Element>(from.elements[n]);
  }
  template <class T, int R, int C, Contract contract, class Fn>
  void update(const Buffer<T, R, C, contract>& buffer, int count, Fn f) {
    require(buffers_.update(buffer.use, unread_stores));
    for (int i = 0; i < count; ++i) f(i);
  }
  template <int R, int C, Contract contract, class G>
  void reduce_add(const Buffer<float, R, C, contract>& from, const G& to, int row0, int col0, int i = 0, int j = 0) {
    require(buffers_.copy(from.use, unread_stores));
    require(cut_piece<float>(col0));
    for (int r = max(-row0, 0); r < R && row0 + r < to.rows; ++r)
      for (int c = max(-col0, 0); c < C && col0 + c < to.cols; ++c)
        add_element(to.template at<float>(row0 + r, col0 + c, i, j), from.at(r, c));
  }
  template <int Left>
  void wait_stores(Constant<Left>) {
    buffers_.wait_stores(Left, unread_stores, last_buffer_);
  }
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
  void load(ColumnVector<T, Tile>& to, const VectorBuffer<T, N>& from) const {
    to.view = nullptr;
    copy_vector<Tile::cols>(to.x, from);
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
  /// After the tile: `persistent`: the block has others to do.
  void end(bool persistent) const {
    if (persistent) require(buffers_.at_the_end(last_buffer_));
  }

  // What the block's threads share: counters and lists

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
  Located locate(const Histogram<N>& histogram, int n) const {
    int above = 0;
    for (int i = N - 1; i >= 0; --i) {
      const int count = static_cast<int>(histogram.counts[i]);
      if (above + count >= n) return {i, above, count};
      above += count;
    }
    schedule_error("a histogram is asked for more than was counted: on a GPU the answer would be undefined");
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
  struct Product {
    const void* acc;
    const void* a;
    const void* b;
  };
  static constexpr int max_in_flight = 16;
  bool first_tile_;
  bool (*pull_)(void* context);
  void* context_;
  BufferUse* last_buffer_;
  BufferModel buffers_;
  Product products_[max_in_flight] = {};
  int in_flight_ = 0;

  /// The row after one that was loaded, which the next tile loads. It is fetched while this one is computed: with loops that only load,
  /// only compute and only store, memory would wait for the second.
  struct Ahead {
    const u8* row = nullptr;
    int cols = 0, size = 0;
    /// The part of columns `col` to col + count - 1.
    TW_INLINE void fetch(int col, int count) const {
      const u8* const end = row + static_cast<i64>(min(col + count, cols)) * size;
      for (const u8* p = row + static_cast<i64>(col) * size; p < end; p += 64) __builtin_prefetch(p, 0, 2);
    }
  };
  static constexpr int kPiece = 256;
  template <class F>
  static constexpr bool has_pieces = F::rows == 1 && F::cols % kPiece == 0;
  static constexpr int kMinAhead = 1024;  // shorter rows: the processor finds the next one by itself
  static constexpr int kMaxAhead = 2;
  mutable Ahead ahead_[kMaxAhead];
  mutable int ahead_count_ = 0;

  /// Which of `size` neighbours from `first` on lie inside a dimension of `limit`.
  struct Extent {
    int begin = 0, end = 0;
    constexpr Extent() = default;
    constexpr Extent(int first, int size, int limit)
        : begin(first < 0 ? min(-first, size) : 0), end(limit - first < size ? max(limit - first, 0) : size) {}
    constexpr bool has(int n) const { return n >= begin && n < end; }
  };
  static void dots(float* sums, const float* rows, i64 stride, const float* vector, int count, int cols) {
    library().dots_f32(sums, rows, stride, vector, count, cols);
  }
  static void dots(float* sums, const bf16* rows, i64 stride, const bf16* vector, int count, int cols) {
    library().dots_bf16(sums, &rows->bits, stride, &vector->bits, count, cols);
  }
  static void dots(float* sums, const f16* rows, i64 stride, const f16* vector, int count, int cols) {
    library().dots_f16(sums, &rows->bits, stride, &vector->bits, count, cols);
  }

  // Rows to and from memory. What is no loop over neighbours of the kernel's own types stays out of the kernel, whose every line is
  // compiled for each instruction set.

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
  template <class T, class G>
  static TW_INLINE void load_row(T* to, int size, const G& from, int row, int col0, Extent cols, int i, int j, Fill fill) {
    if constexpr (G::any_float) {
      load_any_row(to, size, from, row, col0, cols, i, j, fill);
    } else {
      load_typed_row(to, size, from, row, col0, cols, i, j, fill);
    }
  }
  template <class G>
  [[gnu::noinline]] static void load_any_row(float* to, int size, const G& from, int row, int col0, Extent cols, int i, int j, Fill fill) {
    with_type(from, [&](const auto& typed) { load_typed_row(to, size, typed, row, col0, cols, i, j, fill); });
  }
  template <class T, class G>
  static TW_INLINE void load_typed_row(T* to, int size, const G& from, int row, int col0, Extent cols, int i, int j, Fill fill) {
    using E = typename G::Element;
    const bool whole = cols.begin == 0 && cols.end == size;
    if (!whole) fill_around(to, size, cols.begin, cols.end, tw::to<T>(fill.value));
    if (cols.begin >= cols.end) return;
    const E* const source = from.template at<const E>(row, col0 + cols.begin, i, j);
    if (from.stride_col != 1)
      load_strided(to + cols.begin, source, from.stride_col, cols.end - cols.begin);
    else if constexpr (converts<E, T>)
      convert_row(to + cols.begin, source, cols.end - cols.begin);
    else if (whole)
      for (int c = 0; c < size; ++c) to[c] = tw::to<T>(source[c]);
    else
      for (int c = 0; c < cols.end - cols.begin; ++c) to[cols.begin + c] = tw::to<T>(source[c]);
  }
  /// Row r of a tile to a row of the tensor; `cols`: which of the tile's columns lie inside.
  template <class F, class G>
  static TW_INLINE void store_row(const F& from, int r, const G& to, int row, int col0, Extent cols, int i, int j) {
    using T = typename G::Element;
    const auto* const source = from.x + r * F::cols;
    if constexpr (converts<typename F::Element, T>) {
      store_part(to, row, col0 + cols.begin, i, j, source + cols.begin, cols.end - cols.begin);
    } else {
      T* const target = to.template at<T>(row, col0 + cols.begin, i, j);
      if (to.stride_col != 1)
        store_strided(target, source + cols.begin, to.stride_col, cols.end - cols.begin);
      else if (cols.begin == 0 && cols.end == F::cols)
        for (int c = 0; c < F::cols; ++c) target[c] = tw::to<T>(source[c]);
      else
        for (int c = cols.begin; c < cols.end; ++c) target[c - cols.begin] = tw::to<T>(source[c]);
    }
  }
  /// Atomically, rounded to T.
  template <class T>
  static TW_INLINE void add_element(T* to, T x) {
    using Bits = conditional<sizeof(T) == 4, u32, u16>;
    Bits* const bits = reinterpret_cast<Bits*>(to);
    Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(bits, &before,
                                        bit_cast<Bits>(tw::to<T>(static_cast<float>(bit_cast<T>(before)) + static_cast<float>(x))), true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
  template <class T>
  [[gnu::noinline]] static void fill_around(T* to, int size, int begin, int end, T value) {
    for (int c = 0; c < begin; ++c) to[c] = value;
    for (int c = max(begin, end); c < size; ++c) to[c] = value;
  }
  template <class T, class E>
  [[gnu::noinline]] static void load_strided(T* to, const E* from, long stride, int n) {
    for (int c = 0; c < n; ++c) to[c] = tw::to<T>(from[c * stride]);
  }
  template <class E, class T>
  [[gnu::noinline]] static void store_strided(E* to, const T* from, long stride, int n) {
    for (int c = 0; c < n; ++c) to[c * stride] = tw::to<E>(from[c]);
  }
  /// Whether convert_row() takes them: the same types, and those that the library converts.
  template <class From, class To>
  static constexpr bool converts = is_same<From, To> ||
                                   (is_same<From, float> && (is_same<To, bf16> || is_same<To, f16> || is_same<To, AnyFloat>)) ||
                                   (is_same<To, float> && (is_same<From, bf16> || is_same<From, f16>));
  template <class T>
  static TW_INLINE void convert_row(T* to, const T* from, int n) {
    __builtin_memcpy(to, from, static_cast<unsigned long>(n) * sizeof(T));
  }
  static TW_INLINE void convert_row(float* to, const bf16* from, int n) { library().widen_bf16(to, &from->bits, n); }
  static TW_INLINE void convert_row(float* to, const f16* from, int n) { library().widen_f16(to, &from->bits, n); }
  static TW_INLINE void convert_row(bf16* to, const float* from, int n) { library().narrow_bf16(&to->bits, from, n); }
  static TW_INLINE void convert_row(f16* to, const float* from, int n) { library().narrow_f16(&to->bits, from, n); }
  /// `n` elements of one row from (row, col) on, which converts<> knows; f32 to a large tensor of f32 or bf16 past the caches.
  template <class G, class T>
  [[gnu::noinline]] static void store_part(const G& to, int row, int col, int i, int j, const T* from, int n) {
    with_type(to, [&]<class Typed>(const Typed& typed) {
      using E = typename Typed::Element;
      E* const target = typed.template at<E>(row, col, i, j);
      if (to.stride_col != 1) return store_strided(target, from, to.stride_col, n);
      if constexpr (is_same<T, float> && (is_same<E, float> || is_same<E, bf16>)) {
        const bool large = static_cast<i64>(to.size_j) * to.size_i * to.rows * to.cols * static_cast<i64>(sizeof(E)) >= kStreamBytes;
        if (large) return stream_row(target, from, n);
      }
      convert_row(target, from, n);
    });
  }
  static void stream_row(float* to, const float* from, int n) { library().stream_f32(to, from, n); }
  static void stream_row(bf16* to, const float* from, int n) { library().stream_bf16(&to->bits, from, n); }
  /// Of one long row: maps a piece, fetches as much of the rows ahead, calls done(its first column), and goes on.
  template <class F, class Fn, class Done, class... Operands>
  TW_INLINE void map_in_pieces(F& tile, Fn f, Done done, const Operands&... operands) const {
    for (int c = 0; c < F::cols; c += kPiece) {
      for (int n = 0; n < ahead_count_; ++n) ahead_[n].fetch(c, kPiece);
      for (int k = c; k < c + kPiece; ++k) tile.x[k] = f(tile.x[k], value_at<F>(operands, 0, k)...);
      done(c);
    }
    ahead_count_ = 0;
  }
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
  /// Codes that share a scale.
  template <class Scales>
  static constexpr int group_of() {
    if constexpr (requires { Scales::group; }) return Scales::group;
    return Unscaled::group;
  }
  template <class Scales>
  static TW_INLINE auto scale_of(const Scales& scales, int row, int group) {
    if constexpr (requires { Scales::group; })
      return scales(row, group);
    else
      return scales[row];
  }
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
  template <class F>
  static constexpr void own() {
    if constexpr (requires { F::warpgroups; }) {
      static_assert(F::warpgroups * 64 == kRows, TW_FRAGMENT_ROWS);
    } else if constexpr (requires { F::kind; }) {
      static_assert(F::kind == TileKind::rows || F::rows == kRows, TW_FRAGMENT_ROWS);
      static_assert(F::kind == TileKind::rows || accumulates<typename F::Element>, TW_ACCUMULATES);
    }
  }
  /// Before elements of a tile in registers are read or written.
  template <class F>
  TW_INLINE void touch(const F& tile) const {
    own<F>();
    if constexpr (requires { F::kind; }) {
      if constexpr (F::kind == TileKind::fragment) {
        for (int i = 0; i < in_flight_; ++i)
          if (products_[i].acc == &tile) schedule_error("accumulators are read or written while a product adds to them: wait for it first");
      }
    }
  }
  /// Before an operand of products is written.
  template <class Operand>
  TW_INLINE void overwrite(const Operand& operand) const {
    for (int i = 0; i < in_flight_; ++i)
      if (products_[i].a == &operand || products_[i].b == &operand)
        schedule_error("an operand is written while a product reads it: wait for it first");
  }
  /// The stores that a GPU would issue.
  template <class T, int R, int C>
  void pass(const Staging<T, R, C>& staging, int col) {
    if constexpr (sizeof(T) == 2) {
      require(cut_piece<T>(col));
      for_panels<Staging<T, R, C>>([&](auto left) { wait_stores(left); },
                                   [&](int, int slot) {
                                     if (!unread_stores.issue(staging.slot + slot)) schedule_error(kWrittenUnderAStore);
                                   });
    }
  }
  void launch(const void* acc, const void* a, const void* b) {
    if (in_flight_ == max_in_flight) schedule_error("too many products in flight: wait() for some");
    products_[in_flight_++] = {acc, a, b};
  }
  template <class Slot>
  static bool reads(const void* operand, const Slot& slot) {
    const u8* const p = static_cast<const u8*>(operand);
    const u8* const first = reinterpret_cast<const u8*>(&slot);
    return p >= first && p < first + sizeof(Slot);
  }
  template <class Acc, class A, class B>
  static void multiply(Acc& acc, const A& a, const B& b, int rows, int cols, int depth, bool overwrite) {
    using Element = Packed<typename A::Element>;
    static_assert(Acc::rows % 8 == 0 && Acc::cols % kPanelRows == 0,
                  "products write whole vectors: accumulators have a multiple of 8 rows and of 16 columns");
    static_assert(is_same<Element, Packed<typename B::Element>>, "bf16 and i8 are multiplied by their own kind");
    static_assert(is_same<typename Acc::Element, conditional<is_same<Element, i8>, i32, float>>,
                  "products of i8 are accumulated in i32, all others in float");
    if (overwrite && (rows < Acc::rows || cols < Acc::cols || depth == 0)) {
      __builtin_memset(acc.x, 0, sizeof acc.x);
      if (depth == 0) return;
    }
    const auto multiply = [&](auto mma, const auto* panels_a, const auto* panels_b) {
      mma(acc.x, Acc::cols, panels_a, panels_b, rows, cols, depth, A::panel_depth, overwrite);
    };
    const Library& lib = library();
    if constexpr (is_same<Element, float>) {
      multiply(lib.mma_f32, a.panels, b.panels);
    } else if constexpr (is_same<Element, bf16>) {
      multiply(lib.mma_bf16, &a.panels->bits, &b.panels->bits);
    } else {
      multiply(lib.mma_i8, a.panels, b.panels);
    }
  }
  template <class T, int R, int C, TileKind kKind, class Op>
  static void reduce_columns(const Fragment<T, R, C, kKind>& fragment, ColumnVector<T, Fragment<T, R, C, kKind>>& vector, Op op) {
    vector.view = nullptr;
    for (int c = 0; c < C; ++c) vector.x[c] = fragment.x[c];
    for (int r = 1; r < R; ++r)
      for (int c = 0; c < C; ++c) vector.x[c] = op(vector.x[c], fragment.x[r * C + c]);
  }
};

/// At the end of a tile every step was loaded, and every slot was taken and given back: on a GPU the next tile goes on with the same rings.
inline void require_nothing_left(int steps_left, const RingState* last_ring) {
  if (steps_left != 0) schedule_error("the tile ends before its last step was loaded: on a GPU the next tile would take this one's slots");
  for (const RingState* ring = last_ring; ring != nullptr; ring = ring->previous) {
    if (ring->filled != 0)
      schedule_error("the tile ends with a slot that was filled and never taken: on a GPU the next tile would take it");
    if (ring->taken != 0)
      schedule_error("the tile ends with a slot that was taken and never released: on a GPU the kernel would wait forever");
  }
}

/// Throws unless all blocks of the tile's cluster take `steps` steps: they load parts of each other's tiles in every step.
template <class On>
void require_equal_steps(const typename On::Params& params, const Tile& tile, int steps) {
  constexpr int cluster = tw::detail::cluster_of<On>();
  Tile neighbour = tile;
  for (int rank = 0; rank < cluster; ++rank) {
    neighbour.m = tile.m / cluster * cluster + rank;
    if (On::steps(params, On::work(params, neighbour)) != steps)
      schedule_error("the blocks of a cluster take different numbers of steps: on a GPU one would wait forever for what the other loads");
  }
}

/// Bytes of tile memory that a thread needs to run the kernel.
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

template <class On>
TW_INLINE void run_here(const typename On::Params& params, const TileGrid& grid, int index, u8* arena) {
  const Tile place = tw::detail::ScheduleOf<On>::Type::at(grid, index);
  const auto tile = tw::detail::work_of<On>(params, place);
  Allocator allocator{arena};
  constexpr bool persistent = tw::detail::ScheduleOf<On>::Type::dispatch != Dispatch::plain;
  if constexpr (tw::detail::has_load<On>) {
    struct Loads {
      const typename On::Params& params;
      const decltype(tile)& work;
      typename On::Memory memory;
      int step = 0;
      int steps;
    } loads{params, tile, typename On::Memory(allocator), 0, On::steps(params, tile)};
    if constexpr (tw::detail::cluster_of<On>() > 1 && requires { typename On::Work; }) require_equal_steps<On>(params, place, loads.steps);
    const auto pull = [](void* context) {
      Loads& l = *static_cast<Loads*>(context);
      if (l.step == l.steps) return false;
      const Producer producer;
      On::load(producer, l.params, l.work, l.step++, l.memory);
      return true;
    };
    Block<tw::detail::fragment_rows_of<On>()> block(index == 0, pull, &loads, allocator.last_buffer);
    typename tw::detail::StateOf<On>::Type state;
    On::compute(block, params, tile, loads.memory, state);
    On::finish(block, params, tile, loads.memory, state);
    require_nothing_left(loads.steps - loads.step, allocator.last_ring);
    block.end(persistent);
  } else {
    using Block = Block<tw::detail::fragment_rows_of<On>()>;
    if constexpr (requires { typename On::Memory; }) {
      typename On::Memory memory(allocator);
      Block block(
          index == 0, [](void*) { return false; }, nullptr, allocator.last_buffer);
      On::compute(block, params, tile, memory);
      block.end(persistent);
    } else {
      Block block(index == 0);
      On::compute(block, params, tile);
    }
  }
}

#if defined(__x86_64__)
/// Element functions and loops over tiles are compiled in the kernel's own file, for its flags; here once more for AVX2, all in one
/// function.
template <class On>
[[gnu::target("avx2,fma,f16c"), gnu::flatten]] void run_avx2(const void* params, const TileGrid& grid, int index, u8* arena) {
  run_here<On>(*static_cast<const typename On::Params*>(params), grid, index, arena);
}

#if defined(__clang__)
#define TW_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#else
#define TW_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"
#endif
/// And for AVX-512, where such loops are all that the kernel consists of: products are the library's.
template <class On>
[[gnu::target(TW_AVX512), gnu::flatten]] void run_avx512(const void* params, const TileGrid& grid, int index, u8* arena) {
  run_here<On>(*static_cast<const typename On::Params*>(params), grid, index, arena);
}
#undef TW_AVX512
#endif

/// For processors without AVX2: few, so that it shall cost little to compile.
template <class On>
[[gnu::cold, gnu::noinline]] void run_baseline(const void* params, const TileGrid& grid, int index, u8* arena) {
  run_here<On>(*static_cast<const typename On::Params*>(params), grid, index, arena);
}

/// Runs one tile. `params`: On::Params; `arena`: memory_bytes<On>() bytes, 64-byte aligned.
using RunTile = void (*)(const void* params, const TileGrid& grid, int index, u8* arena);

/// One tile, for this processor.
template <class On>
void run(const void* params, const TileGrid& grid, int index, u8* arena) {
#if defined(__x86_64__)
  const int bytes = vector_bytes();
  if constexpr (tw::detail::vector_bytes_of<On>() > 32) {
    if (bytes == 64) return run_avx512<On>(params, grid, index, arena);
  }
  if (bytes >= 32) return run_avx2<On>(params, grid, index, arena);
  run_baseline<On>(params, grid, index, arena);
#else
  run_here<On>(*static_cast<const typename On::Params*>(params), grid, index, arena);
#endif
}

}  // namespace tw::cpu

#endif  // !TW_ON_GPU
