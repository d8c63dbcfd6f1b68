#pragma once

#include <cmath>

#include "tilewave/gemm.hpp"

namespace tw::kernels {

/// The activation of a number, for tests.
template <class Real>
Real activate(Activation activation, Real x) {
  switch (activation) {
    case Activation::relu:
      return x < 0 ? Real{0} : x;
    case Activation::gelu_erf:
      return x * (1 + std::erf(x / std::sqrt(Real{2}))) / 2;
    case Activation::gelu_tanh:
      return x * (1 + std::tanh(std::sqrt(2 / static_cast<Real>(3.14159265358979323846)) * (x + static_cast<Real>(0.044715) * x * x * x))) /
             2;
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::swiglu:  // of pairs: gemm's own
    case Activation::none:
      break;
  }
  return x;
}

}  // namespace tw::kernels
