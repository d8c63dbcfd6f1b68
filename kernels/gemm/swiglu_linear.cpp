#include "kernels/gemm/swiglu_linear.hpp"

#include "kernels/check.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/kernels.hpp"

namespace tw::kernels::gemm {

bool has_swiglu_linear(DType dtype, std::int64_t rows, const Stream& stream) {
  const bool hopper = stream.device().is_cuda() && generic_shared_bytes(stream) == 0;
  return hopper && size_of(dtype) == 2 && rows > kMostSkinnyRows;
}

void swiglu_linear(const Tensor& x, const Tensor& weight, const Tensor& y, const Stream& stream) {
  Call call = make_call(x, weight.transpose(0, 1), y, {.activation = Activation::swiglu, .stream = stream, .constant_b = true});
  require(
      has_swiglu_linear(y.dtype(), call.m, stream) && call.k > 0 && call.batch == 1 && x.is_contiguous() && weight.is_contiguous() &&
          y.is_contiguous(),
      "swiglu_linear: x is {}, weight {} and y {}; they must be contiguous, of f16 or bf16, on a Hopper GPU, with more than {} rows and "
      "K of 1 or more",
      x, weight, y, kMostSkinnyRows);
  if (y.numel() == 0) return;
  call.interleaved = true;
  run_on_gpu(call);
}

}  // namespace tw::kernels::gemm
