#pragma once

#include <algorithm>
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
      if (w.format == WeightFormat::int8 || w.format == WeightFormat::fp8) {
        result.push_back(w.scales.at({n}) * w.values.at({n, k}));
        continue;
      }
      const int in_byte = w.format == WeightFormat::int2 ? 4 : 2, bits = 8 / in_byte;
      const int code = static_cast<int>(w.values.at({n, k / in_byte})) >> (k % in_byte * bits) & ((1 << bits) - 1);
      const double scale = w.scales.at({n, k / w.group});
      constexpr double floats[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
      if (w.format == WeightFormat::nf4) {
        result.push_back(scale * static_cast<double>(kNormalFloats[code]));
      } else if (w.format == WeightFormat::fp4 || w.format == WeightFormat::mxfp4) {
        const double factor = w.format == WeightFormat::fp4 ? scale : std::exp2(scale - 127);
        result.push_back((code < 8 ? factor : -factor) * floats[code % 8]);
      } else {
        const double middle = w.format == WeightFormat::int4 ? 8 : 2;
        result.push_back(scale * (code - (w.zeros.numel() == 0 ? middle : w.zeros.at({n, k / w.group}))));
      }
    }
  }
  return result;
}

/// A number, and the most that a result in f32 differs from it.
struct Bounded {
  double value, error;
};
/// silu(gate) up. Its slope is at most 1.1, and the exponential of -gate has an error that grows with it.
inline Bounded swiglu(const Bounded& gate, const Bounded& up) {
  const double silu = gate.value / (1 + std::exp(-gate.value));
  const double error = 1.1 * gate.error + 0x1p-22 * std::abs(silu) * (8 + std::max(0.0, -gate.value));
  return {silu * up.value, error * (std::abs(up.value) + up.error) + std::abs(silu) * up.error};
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
