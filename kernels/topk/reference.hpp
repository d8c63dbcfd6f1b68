#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace tw::kernels::topk {

/// Whether `a` comes before `b`; false if they are equal. NaN is larger than all numbers.
inline bool comes_before(double a, double b, bool largest) {
  if (std::isnan(a) || std::isnan(b)) return largest ? std::isnan(a) && !std::isnan(b) : !std::isnan(a) && std::isnan(b);
  return largest ? a > b : a < b;
}

/// The columns of the first k elements of row[begin, end), or of all if there are fewer, by a stable sort.
inline std::vector<std::int64_t> reference(std::span<const float> row, std::int64_t begin, std::int64_t end, int k, bool largest) {
  begin = std::max<std::int64_t>(begin, 0);
  end = std::max(begin, std::min(end, static_cast<std::int64_t>(row.size())));
  std::vector<std::int64_t> columns(static_cast<std::size_t>(end - begin));
  std::iota(columns.begin(), columns.end(), begin);
  std::stable_sort(columns.begin(), columns.end(), [&](std::int64_t a, std::int64_t b) {
    return comes_before(row[static_cast<std::size_t>(a)], row[static_cast<std::size_t>(b)], largest);
  });
  columns.resize(std::min(columns.size(), static_cast<std::size_t>(k)));
  return columns;
}

}  // namespace tw::kernels::topk
