#pragma once

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

namespace tw::kernels::swiglu {

/// silu(gate) * up, computed in arithmetic of type Real.
template <class Real>
std::vector<Real> plain(std::span<const float> gate, std::span<const float> up) {
  std::vector<Real> y(gate.size());
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const Real g = gate[i];
    y[i] = g / (1 + std::exp(-g)) * static_cast<Real>(up[i]);
  }
  return y;
}

}  // namespace tw::kernels::swiglu
