#pragma once

#include "tilewave/tile/analysis/target.tile.hpp"

// Counts the operations of element functions and of operations on rows.

#if !TW_ON_GPU

namespace tw::analysis {

/// Returns the cost of `f` without adding it to `cost`.
template <class F>
Cost cost_of(F f) {
  const Cost before = cost;
  cost = {};
  f();
  const Cost result = cost;
  cost = before;
  return result;
}

/// Calls `f` with the elements if it accepts Counted. Otherwise it passes plain numbers and counts them as uncounted.
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

/// Extrapolates the cost of all elements. `along_rows` is the cost of column 0, `along_cols` that of row 0; both include the element
/// `first`. Assumes that an element's cost is a factor for its row times a factor for its column.
constexpr u64 combine(u64 first, u64 along_rows, u64 along_cols, u64 rows, u64 cols) {
  if (first > 0) return along_rows * along_cols / first;
  const u64 by_rows = along_rows * cols, by_cols = along_cols * rows;
  return by_rows > by_cols ? by_rows : by_cols;
}

/// Counts `f(row, col)` for all elements of a tile, from its first row and its first column, or from fewer elements if all cost the same.
/// (They do not if a function tests whether a row or column is inside the tensor.) The state that `f` leaves is that of element (0, 0).
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

/// A row of a tile, as block.rows() passes it on.
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

}  // namespace tw::analysis

#endif  // !TW_ON_GPU
