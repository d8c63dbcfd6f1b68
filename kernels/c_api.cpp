#include <exception>
#include <string>

#include "tilewave/attention.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/tilewave.h"

namespace {

thread_local std::string last_error;

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

/// Runs f and turns what it throws into a status.
template <class F>
tw_status guard(F f) noexcept {
  try {
    try {
      f();
      return TW_OK;
    } catch (const std::exception& error) {
      last_error = error.what();
      throw;
    }
  } catch (const tw::InvalidArgument&) {
    return TW_INVALID_ARGUMENT;
  } catch (const tw::OutOfMemory&) {
    return TW_OUT_OF_MEMORY;
  } catch (const tw::DeviceError&) {
    return TW_DEVICE_ERROR;
  } catch (const tw::CompileError&) {
    return TW_COMPILE_ERROR;
  } catch (const tw::FileError&) {
    return TW_FILE_ERROR;
  } catch (...) {
    return TW_FAILURE;
  }
}

}  // namespace

const char* tw_last_error(void) { return last_error.c_str(); }

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
