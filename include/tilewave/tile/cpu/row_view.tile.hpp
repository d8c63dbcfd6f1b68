#pragma once

#include "tilewave/tile/cpu/target.tile.hpp"

#if !TW_ON_GPU

namespace tw::cpu {

struct Sum {
  static constexpr float neutral = 0;
  static TW_INLINE float fold(float sum, float x) { return sum + x; }
};
struct Largest {
  static constexpr float neutral = -kInfinity;
  static TW_INLINE float fold(float largest, float x) { return x > largest ? x : largest; }  // ignores a NaN in x
};

/// Folds `n` numbers, a power of two, by halves into the first one. Each half is a loop of its own with a constant length: g++ makes scalar
/// code of a loop over all of them, which took a third of a softmax.
template <class Op, int n>
TW_INLINE void fold_halves(float* x) {
  if constexpr (n > 1) {
    for (int k = 0; k < n / 2; ++k) x[k] = Op::fold(x[k], x[k + n / 2]);
    fold_halves<Op, n / 2>(x);
  }
}

/// Folds value(c) over a row's columns in many independent chains, and combines the chains at the end. A single chain would take its length
/// times the latency of an operation, and compilers may not reorder floating-point sums.
template <class Op, int cols, class Value>
TW_INLINE float fold_columns(Value value) {
  constexpr int chains = cols % 64 == 0 ? 64 : cols % 8 == 0 ? 8 : 1;
  alignas(64) float folded[chains];
  for (float& x : folded) x = Op::neutral;
  for (int c = 0; c < cols; c += chains)
    for (int k = 0; k < chains; ++k) folded[k] = Op::fold(folded[k], static_cast<float>(value(c + k)));
  fold_halves<Op, chains>(folded);
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

  /// The largest f(x), an integer or float. NaNs are ignored unless all elements are NaN.
  template <class Fn>
  TW_INLINE auto max(Fn f) const {
    whole();
    return partial_max(f);
  }
  TW_INLINE auto max() const {
    return max([](auto x) { return x; });
  }
  TW_INLINE auto partial_max() const {
    if constexpr (is_same<typename F::Element, float> && kCount % 16 == 0) {
      const auto of_numbers = library().largest;
      const float found = of_numbers != nullptr ? of_numbers(row(), kCount) : -kInfinity;
      if (found > -kInfinity) return found;
    }
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
  /// Every x becomes 2^(x * scale - base), an exponent below 128. Returns this thread's part of the sum.
  TW_INLINE float map_exponentials(float scale, float base) const {
    if constexpr (kCount % 16 == 0) {
      if (const auto exponentials = library().exponentials; exponentials != nullptr) return exponentials(row(), scale, base, kCount);
    }
    return map_partial_sum([=](float x) { return exp2(x * scale - base); });
  }
  /// f(f(a, b), c)... over the row's elements, in an order that is the same in every run. f must be associative and commutative.
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
    for (int c = 0; c < kCount; ++c) {  // rare: all are NaN or -infinity
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

}  // namespace tw::cpu

#endif  // !TW_ON_GPU
