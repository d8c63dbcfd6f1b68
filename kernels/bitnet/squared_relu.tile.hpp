#pragma once

#include "tilewave/tile/elementwise.tile.hpp"

// BitNet's activation, for tw::elementwise.

namespace tw::kernels::bitnet {

/// max(gate, 0)^2 up.
struct SquaredReluGate {
  static constexpr const char* source = "kernels/bitnet/squared_relu.tile.hpp";
  static float apply(float gate, float up) {
    const float positive = gate > 0.0f ? gate : 0.0f;
    return positive * positive * up;
  }
};

}  // namespace tw::kernels::bitnet
