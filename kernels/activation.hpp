#pragma once

#include <type_traits>

#include "tilewave/gemm.hpp"
#include "tilewave/tile/math.tile.hpp"

namespace tw::kernels {

/// Calls f(std::type_identity<activation's functor>{}).
template <class F>
decltype(auto) with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::relu:
      return f(std::type_identity<Relu>{});
    case Activation::gelu_erf:
      return f(std::type_identity<GeluErf>{});
    case Activation::gelu_tanh:
      return f(std::type_identity<GeluTanh>{});
    case Activation::silu:
      return f(std::type_identity<Silu>{});
    case Activation::swiglu:  // of pairs: gemm's own
    case Activation::none:
      break;
  }
  return f(std::type_identity<Identity>{});
}

}  // namespace tw::kernels
