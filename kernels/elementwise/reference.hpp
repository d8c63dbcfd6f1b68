#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "tilewave/tensor.hpp"

namespace tw::kernels::elementwise {

template <class Real>
Real silu(Real x) {
  return x / (1 + std::exp(-x));
}
template <class Real>
Real gelu_erf(Real x) {
  return x * (1 + std::erf(x / std::sqrt(Real{2}))) / 2;
}
template <class Real>
Real gelu_tanh(Real x) {
  return x * (1 + std::tanh(std::sqrt(2 / static_cast<Real>(3.14159265358979323846)) * (x + static_cast<Real>(0.044715) * x * x * x))) / 2;
}

/// A dense row-major tensor.
struct Plain {
  Shape shape;
  std::vector<float> values;
};

/// f(values of the inputs at the element) for every element of `shape`, in row-major order; inputs are broadcast to it.
template <class Real, class F>
std::vector<double> apply(std::span<const Plain> inputs, const Shape& shape, F f) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  std::vector<double> result;
  std::vector<Real> arguments(inputs.size());
  for (std::int64_t element = 0; element < count; ++element) {
    for (std::size_t n = 0; n < inputs.size(); ++n) {
      std::int64_t left = element, offset = 0, stride = 1;
      for (std::size_t dim = shape.size(); dim-- > 0;) {
        if (inputs[n].shape[dim] != 1) offset += left % shape[dim] * stride;
        stride *= inputs[n].shape[dim];
        left /= shape[dim];
      }
      arguments[n] = inputs[n].values[static_cast<std::size_t>(offset)];
    }
    result.push_back(f(arguments));
  }
  return result;
}

}  // namespace tw::kernels::elementwise
