#include "kernels/norm/folded.hpp"

#include "kernels/check.hpp"
#include "kernels/norm/folded.tile.hpp"
#include "kernels/rows.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::norm {

namespace {

/// Calls f(std::type_identity<Kernel>{}) with a kernel of rows of as few columns as hold `cols`.
template <template <class, int, int, int, int> class Kernel, class F>
void with_rows(const char* op, DType dtype, std::int64_t cols, F f) {
  require(cols >= 1 && cols <= kLongestFolded, "{}: rows have {} columns; 1 to {} are supported", op, cols, kLongestFolded);
  with_float_type(dtype, [&]<class T>(std::type_identity<T>) {
    constexpr int kWidth = kPieceColumns<T>;
    if (cols <= 1280)
      f(std::type_identity<Kernel<T, 4, 1280, 4, kWidth>>{});
    else if (cols <= 2048)
      f(std::type_identity<Kernel<T, 4, 2048, 8, kWidth>>{});
    else
      f(std::type_identity<Kernel<T, 1, kLongestFolded, 8, kWidth>>{});
  });
}

template <class Kernel>
TileGrid grid_for(std::int64_t rows) {
  return {.m = ceil_div(static_cast<int>(rows), Kernel::template On<cpu::Target>::Values::rows)};
}

}  // namespace

void row_scales(const Tensor& x, float epsilon, const Tensor& scales, const Stream& stream) {
  constexpr const char* kOp = "row_scales";
  check_operand(kOp, "x", x, x.dtype(), stream.device());
  check_operand(kOp, "scales", scales, DType::f32, stream.device());
  require(x.rank() == 2 && x.is_contiguous() && is_float(x.dtype()) && x.shape(0) <= kLargestExtent,
          "{}: x is {}; it must be contiguous, [rows, K], f32, f16 or bf16", kOp, x);
  require(scales.shape() == Shape{x.shape(0)} && scales.is_contiguous(), "{}: scales is {}; it must be contiguous, [{}]", kOp, scales,
          x.shape(0));
  if (scales.numel() == 0) return;
  with_rows<RowScales>(kOp, x.dtype(), x.shape(1), [&]<class Kernel>(std::type_identity<Kernel>) {
    launch<Kernel>(stream, grid_for<Kernel>(x.shape(0)), [&](auto& bind, auto& p) {
      bind(p.x, x);
      bind(p.scales, scales.reshape({scales.numel(), 1}));
      p.per_column = 1.0f / static_cast<float>(x.shape(1));
      p.epsilon = epsilon;
    });
  });
}

void fold_norm(const Tensor& weight, const Tensor& bias, const Tensor& gamma, const Tensor& beta, const Stream& stream) {
  constexpr const char* kOp = "fold_norm";
  require(weight.rank() == 2 && is_float(weight.dtype()) && weight.shape(0) <= kLargestExtent,
          "{}: weight is {}; it must be [N, K], f32, f16 or bf16", kOp, weight);
  const std::int64_t rows = weight.shape(0), cols = weight.shape(1);
  for (const auto& [name, t, size] :
       {std::tuple{"weight", &weight, weight.numel()}, {"bias", &bias, rows}, {"gamma", &gamma, cols}, {"beta", &beta, cols}}) {
    check_operand(kOp, name, *t, weight.dtype(), stream.device());
    require(t->is_contiguous() && t->numel() == size, "{}: {} is {}; it must be contiguous, with {} elements", kOp, name, *t, size);
  }
  if (rows == 0) return;
  with_rows<FoldNorm>(kOp, weight.dtype(), cols, [&]<class Kernel>(std::type_identity<Kernel>) {
    launch<Kernel>(stream, grid_for<Kernel>(rows), [&](auto& bind, auto& p) {
      bind(p.weight, weight);
      bind(p.folded, weight);
      bind(p.gamma, gamma.reshape({1, cols}));
      bind(p.beta, beta.reshape({1, cols}));
      bind(p.bias, bias.reshape({rows, 1}));
      bind(p.folded_bias, bias.reshape({rows, 1}));
      p.per_column = 1.0f / static_cast<float>(cols);
    });
  });
}

}  // namespace tw::kernels::norm
