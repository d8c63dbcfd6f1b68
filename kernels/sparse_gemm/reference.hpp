#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace tw::kernels::sparse_gemm {

/// [rows, cols] with zeros instead of all but the two elements of largest magnitude in each group of four; of equal ones the first are
/// kept.
inline std::vector<float> pruned(std::vector<float> x) {
  for (std::size_t group = 0; group < x.size(); group += 4) {
    int order[4] = {0, 1, 2, 3};
    std::stable_sort(order, order + 4, [&](int a, int b) {
      return std::abs(x[group + static_cast<std::size_t>(a)]) > std::abs(x[group + static_cast<std::size_t>(b)]);
    });
    for (const int smallest : {order[2], order[3]}) x[group + static_cast<std::size_t>(smallest)] = 0;
  }
  return x;
}

/// [cols, rows] of [rows, cols].
template <class T>
std::vector<T> transposed(const std::vector<T>& x, std::int64_t rows, std::int64_t cols) {
  std::vector<T> y(x.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c) y[static_cast<std::size_t>(c * rows + r)] = x[static_cast<std::size_t>(r * cols + c)];
  return y;
}

}  // namespace tw::kernels::sparse_gemm
