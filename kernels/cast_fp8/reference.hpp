#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tilewave/tile/types.tile.hpp"

namespace tw::kernels::cast_fp8 {

/// The result of a cast, as numbers: `y` is [rows, cols], `scales` [row groups, column groups].
struct PlainResult {
  std::vector<float> y, scales;
};

/// The cast of x, [rows, cols], in groups of `group_rows` x 128, bit for bit.
inline PlainResult plain(std::span<const float> x, std::int64_t rows, std::int64_t cols, std::int64_t group_rows, bool powers_of_two) {
  PlainResult result;
  result.y.resize(x.size());
  for (std::int64_t row0 = 0; row0 < rows; row0 += group_rows) {
    for (std::int64_t col0 = 0; col0 < cols; col0 += 128) {
      const auto for_each = [&](auto f) {
        for (std::int64_t row = row0; row < std::min(row0 + group_rows, rows); ++row)
          for (std::int64_t col = col0; col < std::min(col0 + 128, cols); ++col) f(static_cast<std::size_t>(row * cols + col));
      };
      float amax = 1e-4f;
      bool finite = true;
      for_each([&](std::size_t i) {
        finite = finite && std::isfinite(x[i]);
        amax = std::max(amax, std::abs(x[i]));
      });
      float scale = amax / 448;
      if (powers_of_two) scale = static_cast<float>(std::exp2(std::ceil(std::log2(static_cast<double>(scale)))));
      if (!finite) scale = std::numeric_limits<float>::quiet_NaN();
      result.scales.push_back(scale);
      for_each([&](std::size_t i) { result.y[i] = static_cast<float>(fp8_e4m3(x[i] / scale)); });
    }
  }
  return result;
}

}  // namespace tw::kernels::cast_fp8
