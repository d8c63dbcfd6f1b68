#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tilewave/quantized.hpp"

namespace tw::kernels::dequant_gemm {

/// W [N, K] in double, element by element from the formulas in tilewave/quantized.hpp.
inline std::vector<double> decode(const QuantizedMatrix& w) {
  std::vector<double> result;
  for (std::int64_t n = 0; n < w.rows(); ++n) {
    for (std::int64_t k = 0; k < w.columns(); ++k) {
      if (w.format != WeightFormat::int4) {
        result.push_back(w.scales.at({n}) * w.values.at({n, k}));
        continue;
      }
      const auto both = static_cast<int>(w.values.at({n, k / 2}));
      const double zero = w.zeros.numel() == 0 ? 8 : w.zeros.at({n, k / w.group});
      result.push_back(w.scales.at({n, k / w.group}) * ((k % 2 == 0 ? both % 16 : both / 16) - zero));
    }
  }
  return result;
}

/// x W^T, [M, N], and the same sums of magnitudes.
struct Sums {
  std::vector<double> values, magnitudes;
};
inline Sums plain(std::span<const float> x, std::span<const double> w, std::int64_t m, std::int64_t n, std::int64_t k) {
  Sums sums;
  for (std::int64_t r = 0; r < m; ++r) {
    for (std::int64_t i = 0; i < n; ++i) {
      double sum = 0, magnitude = 0;
      for (std::int64_t c = 0; c < k; ++c) {
        const double product = x[static_cast<std::size_t>(r * k + c)] * w[static_cast<std::size_t>(i * k + c)];
        sum += product, magnitude += std::abs(product);
      }
      sums.values.push_back(sum), sums.magnitudes.push_back(magnitude);
    }
  }
  return sums;
}

}  // namespace tw::kernels::dequant_gemm
