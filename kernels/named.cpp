#include "kernels/named.hpp"

#include "kernels/check.hpp"

namespace tw::kernels {

const char* element_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float";
    case DType::f16:
      return "tw::f16";
    case DType::bf16:
      return "tw::bf16";
    case DType::fp8_e4m3:
      return "tw::fp8_e4m3";
    case DType::fp8_e5m2:
      return "tw::fp8_e5m2";
    case DType::i8:
      return "tw::i8";
    case DType::i32:
      return "tw::i32";
    default:
      throw InvalidArgument(tw::format("dtype is {}; allowed: f32, f16, bf16, fp8, i8 and i32", name_of(dtype)));
  }
}

const char* functor_name(Activation activation) {
  switch (activation) {
    case Activation::relu:
      return "tw::Relu";
    case Activation::gelu_erf:
      return "tw::GeluErf";
    case Activation::gelu_tanh:
      return "tw::GeluTanh";
    case Activation::silu:
      return "tw::Silu";
    case Activation::swiglu:
      return "tw::SwiGlu";
    case Activation::none:
      break;
  }
  return "tw::Identity";
}

std::string linear_name(DType out, Activation activation, const LinearOptions& options) {
  return tw::format("tw::Linear<{}, {}, tw::LinearOptions{{{}, {}, {}, {}, {}, {}}}>", element_name(out), functor_name(activation),
                    bool_name(options.addends), bool_name(options.scales), bool_name(options.windowed), bool_name(options.transposed),
                    bool_name(options.begins), bool_name(options.row_scales));
}

}  // namespace tw::kernels
