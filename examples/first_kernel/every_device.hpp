#pragma once

#include <cstdio>
#include <tilewave/launch.hpp>

/// Calls test(device) for the CPU and for the GPU, if there is one. test() returns the largest error that it found. Returns the program's
/// exit code: 0 if no error exceeds `allowed`.
int on_every_device(double allowed, auto test) {
  int failures = 0;
  for (const tw::Device device : {tw::Device::cpu(), tw::Device::cuda()}) {
    try {
      const double error = test(device);
      const bool correct = error <= allowed;  // false for NaN
      failures += !correct;
      std::printf("%s: %s, largest error %.2g (allowed: %.2g)\n", device.name().c_str(), correct ? "correct" : "WRONG", error, allowed);
    } catch (const tw::DeviceError& error) {
      std::printf("%s: skipped: %s\n", device.name().c_str(), error.what());
    }
  }
  return failures != 0;
}

/// The larger of the two; NaN if either is.
inline double worse(double a, double b) { return a != a || b <= a ? a : b; }

/// A tensor of values between -1 and 1, different for every seed.
inline tw::Tensor random_tensor(const tw::Shape& shape, tw::DType dtype, unsigned seed) {
  const tw::Tensor values = tw::Tensor::empty(shape, tw::DType::f32);
  unsigned state = seed * 2654435761u + 1;
  for (int i = 0; i < values.numel(); ++i) {
    state = state * 1664525u + 1013904223u;  // the generator of Numerical Recipes
    values.data<float>()[i] = static_cast<float>(state >> 8) / 8388608.0f - 1.0f;
  }
  return values.to(dtype);
}
