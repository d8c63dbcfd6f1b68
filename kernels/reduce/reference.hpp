#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "tilewave/reduce.hpp"

namespace tw::kernels::reduce {

/// The reduction of x, dense [outer, extent, inner], along its middle dimension, with sums in Real: dense [outer, inner].
template <class Real>
std::vector<double> reference(Reduction reduction, std::span<const float> x, std::int64_t outer, std::int64_t extent, std::int64_t inner) {
  std::vector<double> y;
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t n = 0; n < inner; ++n) {
      const bool sums = reduction == Reduction::sum || reduction == Reduction::mean;
      Real result = sums || reduction == Reduction::abs_max ? Real{0} : std::numeric_limits<Real>::infinity();
      if (reduction == Reduction::max) result = -result;
      bool nan = false;
      for (std::int64_t k = 0; k < extent; ++k) {
        const Real value = x[static_cast<std::size_t>((o * extent + k) * inner + n)];
        nan = nan || std::isnan(value);
        if (sums) result += value;
        if (reduction == Reduction::max) result = value > result ? value : result;
        if (reduction == Reduction::min) result = value < result ? value : result;
        if (reduction == Reduction::abs_max) result = std::abs(value) > result ? std::abs(value) : result;
      }
      if (reduction == Reduction::mean) result /= static_cast<Real>(extent);
      y.push_back(nan ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(result));
    }
  }
  return y;
}

}  // namespace tw::kernels::reduce
