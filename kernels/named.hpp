#pragma once

#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>

#include "tilewave/dtype.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/tile/epilogue.tile.hpp"

namespace tw::kernels {

/// The element type as tile code spells it: "tw::bf16", "float".
const char* element_name(DType dtype);

/// The element type itself.
template <DType dtype>
using ElementOf = conditional<dtype == DType::f16, f16,
                              conditional<dtype == DType::bf16, bf16,
                                          conditional<dtype == DType::fp8_e4m3, fp8_e4m3,
                                                      conditional<dtype == DType::i8, i8, conditional<dtype == DType::i32, i32, float>>>>>;

/// The functor of an activation as tile code spells it: "tw::Silu".
const char* functor_name(Activation activation);

/// The functor itself.
template <Activation activation>
using FunctorOf = conditional<
    activation == Activation::relu, Relu,
    conditional<
        activation == Activation::gelu_erf, GeluErf,
        conditional<activation == Activation::gelu_tanh, GeluTanh,
                    conditional<activation == Activation::silu, Silu, conditional<activation == Activation::swiglu, SwiGlu, Identity>>>>>;

/// The type of the Linear epilogue with output type `out`.
std::string linear_name(DType out, Activation activation, const LinearOptions& options);

/// "true", "false".
inline const char* bool_name(bool value) { return value ? "true" : "false"; }

/// A family's GPU kernels, found by the values that name them. `Key` is a small struct with operator<=>.
template <class Key>
class KernelTable {
 public:
  KernelTable(std::string (*type_of)(const Key&), const char* source) : type_of_(type_of), source_(source) {}
  KernelTable(std::string (*type_of)(const Key&), std::string_view (*source_of)(const Key&)) : type_of_(type_of), source_of_(source_of) {}

  /// Lives until the process ends.
  const detail::NamedKernel& operator[](const Key& key) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto found = known_.find(key); found != known_.end()) return *found->second;
    }
    const detail::NamedKernel& kernel = detail::named_kernel(type_of_(key), source_of_ != nullptr ? source_of_(key) : source_);
    const std::unique_lock lock(mutex_);
    known_.emplace(key, &kernel);
    return kernel;
  }

 private:
  std::string (*type_of_)(const Key&);
  std::string_view source_;
  std::string_view (*source_of_)(const Key&) = nullptr;
  std::shared_mutex mutex_;
  std::map<Key, const detail::NamedKernel*> known_;
};

}  // namespace tw::kernels
