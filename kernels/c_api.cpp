#include <string>

#include "kernels/c_api.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/tilewave.h"

namespace tw::c_api {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

}  // namespace tw::c_api

namespace {

using tw::c_api::guard;

tw::Tensor borrow(const char* argument, const tw_tensor* t) {
  if (t == nullptr) throw tw::InvalidArgument(std::string(argument) + " is null");
  if (t->rank < 1 || t->rank > 4)
    throw tw::InvalidArgument(std::string(argument) + " has rank " + std::to_string(t->rank) + "; 1 to 4 are allowed");
  tw::DType dtype;
  switch (t->dtype) {
    case TW_F32:
      dtype = tw::DType::f32;
      break;
    case TW_F16:
      dtype = tw::DType::f16;
      break;
    case TW_BF16:
      dtype = tw::DType::bf16;
      break;
    default:
      throw tw::InvalidArgument(std::string(argument) + " has dtype " + std::to_string(static_cast<int>(t->dtype)) + "; see tw_dtype");
  }
  const tw::Device device = t->cuda_device < 0 ? tw::Device::cpu() : tw::Device::cuda(t->cuda_device);
  return tw::Tensor::borrow(t->data, tw::Shape(t->shape, t->shape + t->rank), dtype, device, {t->strides, t->strides + t->rank});
}

tw::Stream stream_of(const tw::Tensor& tensor, void* cuda_stream) {
  return tensor.device().is_cuda() ? tw::Stream::borrow(tensor.device(), cuda_stream) : tw::Stream::standard(tensor.device());
}

}  // namespace

const char* tw_last_error(void) { return tw::c_api::last_error().c_str(); }

tw_status tw_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* d, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("d", d);
    tw::gemm(borrow("a", a), borrow("b", b), out, {.stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_attention(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* lse, float scale,
                       int32_t causal, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const tw::Tensor lse_out = lse ? borrow("lse", lse) : tw::Tensor();
    tw::attention(borrow("q", q), borrow("k", k), borrow("v", v), out,
                  {.scale = scale, .causal = causal != 0, .lse = lse ? &lse_out : nullptr, .stream = stream_of(out, cuda_stream)});
  });
}
