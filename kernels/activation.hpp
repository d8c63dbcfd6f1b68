#pragma once

#include <type_traits>

#include "tilewave/gemm.hpp"
#include "tilewave/tile/epilogue.tile.hpp"

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

/// The activation for the Params of a Linear epilogue. swiglu gives identity, because it has a kernel of its own.
inline AnyActivation::Kind any_activation(Activation activation) {
  switch (activation) {
    case Activation::relu:
      return AnyActivation::relu;
    case Activation::silu:
      return AnyActivation::silu;
    case Activation::gelu_erf:
      return AnyActivation::gelu_erf;
    case Activation::gelu_tanh:
      return AnyActivation::gelu_tanh;
    case Activation::none:
    case Activation::swiglu:
      break;
  }
  return AnyActivation::identity;
}

}  // namespace tw::kernels
