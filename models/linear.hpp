#pragma once

#include "tilewave/gemm.hpp"
#include "tilewave/tensor.hpp"

namespace tw::models {

struct LinearOptions {
  Activation activation = Activation::none;
  bool accumulate = false;  ///< y += instead of y =; not allowed with an activation
};

/// y = x W^T + b.
struct Linear {
  Tensor weight;  ///< [out, in]
  Tensor bias;    ///< [out], or without elements if there is none

  /// x [rows, in], y [rows, out], of the weight's dtype, on `stream`.
  void operator()(const Tensor& x, const Tensor& y, const Stream& stream, const LinearOptions& options = {}) const {
    gemm(x, weight.transpose(0, 1), y,
         {.beta = options.accumulate ? 1.0f : 0.0f,
          .bias = bias.numel() > 0 ? &bias : nullptr,
          .activation = options.activation,
          .stream = stream});
  }
};

}  // namespace tw::models
