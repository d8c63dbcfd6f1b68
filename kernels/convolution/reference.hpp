#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/activation_reference.hpp"
#include "tilewave/convolution.hpp"

namespace tw::kernels::convolution {

/// A convolution of dense row-major operands, whose values have been rounded to their data type.
struct PlainCall {
  std::int64_t n = 0, h = 0, w = 0, c = 0, f = 0, kh = 1, kw = 1;
  std::int64_t stride_h = 1, stride_w = 1, padding_h = 0, padding_w = 0, dilation_h = 1, dilation_w = 1;
  std::span<const float> x = {};        ///< [n, h, w, c]
  std::span<const float> weights = {};  ///< [f, kh, kw, c]
  std::span<const float> bias = {};     ///< [f], or empty
  Activation activation = Activation::none;

  std::int64_t out_h() const { return (h + 2 * padding_h - dilation_h * (kh - 1) - 1) / stride_h + 1; }
  std::int64_t out_w() const { return (w + 2 * padding_w - dilation_w * (kw - 1) - 1) / stride_w + 1; }
};

/// Computes it in arithmetic of type Real; double is exact for our purposes. `operand` is applied first to each element of x and w,
/// `result` last to each element of y.
template <class Real, class Operand, class Result>
std::vector<double> evaluate(const PlainCall& call, Operand operand, Result result) {
  std::vector<double> y;
  y.reserve(static_cast<std::size_t>(call.n * call.out_h() * call.out_w() * call.f));
  for (std::int64_t n = 0; n < call.n; ++n) {
    for (std::int64_t oh = 0; oh < call.out_h(); ++oh) {
      for (std::int64_t ow = 0; ow < call.out_w(); ++ow) {
        for (std::int64_t f = 0; f < call.f; ++f) {
          Real sum = 0;
          for (std::int64_t kh = 0; kh < call.kh; ++kh) {
            for (std::int64_t kw = 0; kw < call.kw; ++kw) {
              const std::int64_t h = oh * call.stride_h + kh * call.dilation_h - call.padding_h;
              const std::int64_t w = ow * call.stride_w + kw * call.dilation_w - call.padding_w;
              if (h < 0 || h >= call.h || w < 0 || w >= call.w) continue;
              const float* const x = call.x.data() + ((n * call.h + h) * call.w + w) * call.c;
              const float* const weights = call.weights.data() + ((f * call.kh + kh) * call.kw + kw) * call.c;
              for (std::int64_t c = 0; c < call.c; ++c) sum += static_cast<Real>(operand(x[c])) * static_cast<Real>(operand(weights[c]));
            }
          }
          if (!call.bias.empty()) sum += static_cast<Real>(call.bias[static_cast<std::size_t>(f)]);
          y.push_back(result(activate(call.activation, sum)));
        }
      }
    }
  }
  return y;
}

/// y as [n, out_h, out_w, f], in double.
inline std::vector<double> reference(const PlainCall& call) {
  return evaluate<double>(
      call, [](float x) { return x; }, [](double x) { return x; });
}

/// The same with f32 sums and one rounding to `dtype` at the end. `tf32`: the low 13 bits of operands are dropped first, as in a GPU's f32
/// products.
inline std::vector<double> naive(const PlainCall& call, DType dtype, bool tf32) {
  const auto round = [&](float x) -> double {
    if (dtype == DType::f16) return static_cast<float>(f16(x));
    if (dtype == DType::bf16) return static_cast<float>(bf16(x));
    return x;
  };
  if (tf32)
    return evaluate<float>(
        call, [](float x) { return bit_cast<float>(bit_cast<u32>(x) & ~0x1fffu); }, round);
  return evaluate<float>(
      call, [](float x) { return x; }, round);
}

}  // namespace tw::kernels::convolution
