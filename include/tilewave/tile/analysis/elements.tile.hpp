#pragma once

#include "tilewave/tile/analysis/target.tile.hpp"

// Counting what element functions and operations on rows do.

#if !TW_ON_GPU

namespace tw::analysis {

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

}  // namespace tw::analysis

#endif  // !TW_ON_GPU
