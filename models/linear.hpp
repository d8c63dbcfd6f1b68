#pragma once

#include "tilewave/bitnet.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/quantized.hpp"
#include "tilewave/tensor.hpp"

namespace tw::models {

struct LinearOptions {
  Activation activation = Activation::none;
  bool accumulate = false;  ///< y += instead of y =; not allowed with an activation
};

/// y = x W^T + b. W is `weight`, or `quantized` or `ternary` if that is not empty. With `ternary` x is rounded to 8-bit integers.
struct Linear {
  Tensor weight;                   ///< [out, in]; without elements if W is quantized or ternary
  Tensor bias;                     ///< [out], or without elements if there is none
  QuantizedMatrix quantized = {};  ///< [out, in]
  TernaryMatrix ternary = {};      ///< [out, in]

  /// Rows [begin, end) of a weight that is not ternary, without a bias: a view.
  Linear rows(std::int64_t begin, std::int64_t end) const {
    Linear part;
    if (quantized.empty())
      part.weight = weight.slice(0, begin, end);
    else
      part.quantized = quantized.slice(begin, end);
    return part;
  }
  std::int64_t out() const { return !ternary.empty() ? ternary.rows() : quantized.empty() ? weight.shape(0) : quantized.rows(); }
  std::int64_t in() const { return !ternary.empty() ? ternary.columns() : quantized.empty() ? weight.shape(1) : quantized.columns(); }
  /// Of the weight, also where it is a convolution's.
  std::int64_t elements() const { return quantized.empty() && ternary.empty() ? weight.numel() : out() * in(); }
  /// Of the weight and the bias, in memory.
  std::int64_t bytes() const {
    const auto bytes_of = [](const Tensor& t) { return t.numel() * static_cast<std::int64_t>(size_of(t.dtype())); };
    return bytes_of(weight) + bytes_of(bias) + quantized.bytes() + ternary.bytes();
  }

  /// x [rows, in], y [rows, out], of the model's dtype, on `stream`.
  void operator()(const Tensor& x, const Tensor& y, const Stream& stream, const LinearOptions& options = {}) const {
    const Tensor* b = bias.numel() > 0 ? &bias : nullptr;
    if (!ternary.empty())
      bit_linear(x, ternary, y, {.accumulate = options.accumulate, .bias = b, .stream = stream, .constant_weight = true});
    else if (quantized.empty())
      gemm(x, weight.transpose(0, 1), y,
           {.beta = options.accumulate ? 1.0f : 0.0f, .bias = b, .activation = options.activation, .stream = stream, .constant_b = true});
    else
      dequant_gemm(
          x, quantized, y,
          {.accumulate = options.accumulate, .bias = b, .activation = options.activation, .stream = stream, .constant_weight = true});
  }
};

}  // namespace tw::models
