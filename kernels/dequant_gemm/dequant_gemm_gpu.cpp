#include "kernels/dequant_gemm/call.hpp"
#include "kernels/dequant_gemm/dequantize.tile.hpp"
#include "kernels/dequant_gemm/kernels.hpp"
#include "kernels/dequant_gemm/variants.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::dequant_gemm {

namespace {

constexpr int kRows = 8, kColumns = 256;  ///< of a tile, in codes (int8, fp8) or in bytes (int4): 16 for each of 128 threads

TileGrid grid_of(std::int64_t rows, std::int64_t columns) {
  return {.m = static_cast<int>((rows + kRows - 1) / kRows), .n = static_cast<int>((columns + kColumns - 1) / kColumns)};
}

/// [N, K] as words of two elements.
template <class Word>
Tensor words_of(const Tensor& out) {
  return Tensor::borrow(out.data(), {out.shape(0), out.shape(1) / 2}, dtype_of<Word>, out.device());
}

template <class Format, class Out>
using CodesKernel = DequantizeCodes<Format, Out, kRows, kColumns>;
template <class Code, class Out>
using RowsKernel = DequantizeRows<Code, Out, kRows, kColumns>;
template <class Out, int kGroup>
using GroupsKernel = DequantizeGroups<Out, kGroup, kRows, kColumns>;

/// f.operator()<Kernel>(grid, bind) for the weight's format and out's type.
template <class F>
auto with_kernel(const QuantizedMatrix& weight, const Tensor& out, F f) {
  const auto rows_kernel = [&]<class Code, class Out>() {
    const Tensor scales = Tensor::borrow(weight.scales.data(), {weight.rows(), 1}, DType::f32, weight.device());
    return f.template operator()<RowsKernel<Code, Out>>(grid_of(weight.rows(), weight.columns()), [&](auto& bind, auto& p) {
      bind(p.values, weight.values);
      bind(p.scales, scales);
      bind(p.out, out);
    });
  };
  const auto groups_kernel = [&]<class Out, int kGroup>() {
    using Kernel = GroupsKernel<Out, kGroup>;
    const Tensor words = words_of<typename Kernel::Word>(out);
    return f.template operator()<Kernel>(grid_of(weight.rows(), weight.columns() / 2), [&](auto& bind, auto& p) {
      bind(p.codes, weight.values);
      bind(p.scales, weight.scales);
      bind(p.zeros, weight.zeros.numel() == 0 ? nullptr : &weight.zeros);
      bind(p.out, words);
    });
  };
  const auto codes_kernel = [&]<class Format, class Out>(std::type_identity<Format>, std::type_identity<Out>) {
    return f.template operator()<CodesKernel<Format, Out>>(grid_of(weight.rows(), weight.columns()), [&](auto& bind, auto& p) {
      bind(p.codes, weight.values);
      bind(p.scales, weight.scales);
      bind(p.zeros, weight.zeros.numel() == 0 ? nullptr : &weight.zeros);
      bind(p.out, out);
    });
  };
  const auto with_out = [&]<class Out>(std::type_identity<Out> type) {
    if (weight.format == WeightFormat::nf4) return codes_kernel(std::type_identity<NormalFloats>{}, type);
    if (weight.format == WeightFormat::fp4) return codes_kernel(std::type_identity<ScaledFloats<f16>>{}, type);
    if (weight.format == WeightFormat::mxfp4) return codes_kernel(std::type_identity<ScaledFloats<e8m0>>{}, type);
    if (weight.format == WeightFormat::int2) {
      if (weight.group == 32) return codes_kernel(std::type_identity<ScaledGroups<32, true, u2x4>>{}, type);
      return codes_kernel(std::type_identity<ScaledGroups<128, true, u2x4>>{}, type);
    }
    if (weight.format == WeightFormat::int8) return rows_kernel.template operator()<i8, Out>();
    if (weight.format == WeightFormat::fp8) return rows_kernel.template operator()<fp8_e4m3, Out>();
    return weight.group == 32 ? groups_kernel.template operator()<Out, 32>() : groups_kernel.template operator()<Out, 128>();
  };
  switch (out.dtype()) {
    case DType::bf16:
      return with_out(std::type_identity<bf16>{});
    case DType::f16:
      return with_out(std::type_identity<f16>{});
    default:
      return with_out(std::type_identity<float>{});
  }
}

}  // namespace

void dequantize_on_gpu(const QuantizedMatrix& weight, const Tensor& out, const Stream& stream) {
  with_kernel(weight, out, [&]<class Kernel>(const TileGrid& grid, auto bind) { launch_gpu<Kernel>(stream, grid, bind); });
}

void dequantize_with_tiles(const QuantizedMatrix& weight, const Tensor& out) {
  with_kernel(weight, out, [&]<class Kernel>(const TileGrid& grid, auto bind) { launch_cpu<Kernel>(grid, bind); });
}

void run_on_gpu(const Call& call) {
  if (call.has_integers()) {
    if (is_w4a8(call)) return run_w4a8(call);
    const Tensor x = workspace({call.m(), call.k()}, call.y.dtype(), call.stream);
    if (x.numel() > 0)
      dequantize_on_gpu({.format = WeightFormat::int8, .values = call.x, .scales = *call.options.x_scales}, x, call.stream);
    return run_widened(call, x, run_on_gpu);
  }
  if (is_skinny(call)) return run_skinny(call);
  if (is_wide(call)) return run_wide(call);
  const Tensor weight = workspace({call.n(), call.k()}, call.x.dtype(), call.stream);
  if (weight.numel() > 0) dequantize_on_gpu(call.weight, weight, call.stream);
  tw::gemm(call.x, weight.transpose(0, 1), call.y,
           {.beta = call.options.accumulate ? 1.0f : 0.0f,
            .bias = call.options.bias,
            .activation = call.options.activation,
            .stream = call.stream});
}

namespace {

template <WeightFormat kFormat, class Out, int kGroup = 0>
Analysis analyze_shape(const ShapeValues& shape) {
  const std::int64_t n = shape["N"], k = shape["K"];
  QuantizedMatrix weight{.format = kFormat, .group = kGroup};
  if constexpr (kFormat == WeightFormat::int4) {
    weight.values = placeholder({n, k / 2}, DType::u8);
    weight.scales = placeholder({n, (k + kGroup - 1) / kGroup}, DType::f16);
  } else {
    weight.values = placeholder({n, k}, kFormat == WeightFormat::int8 ? DType::i8 : DType::fp8_e4m3);
    weight.scales = placeholder({n}, DType::f32);
  }
  return with_kernel(weight, placeholder({n, k}, dtype_of<Out>),
                     [&]<class Kernel>(const TileGrid& grid, auto bind) { return analyze<Kernel>(grid, bind); });
}

template <WideKernel k>
Analysis analyze_product(const ShapeValues& shape) {
  const std::int64_t m = shape["M"], n = shape["N"], depth = shape["K"];
  QuantizedMatrix weight{.format = k.format, .group = k.group};
  if constexpr (k.format == WeightFormat::int4) {
    weight.values = placeholder({n, depth / 2}, DType::u8);
    weight.scales = placeholder({n, depth / k.group}, DType::f16);
  } else {
    weight.values = placeholder({n, depth}, DType::i8);
    weight.scales = placeholder({n}, DType::f32);
  }
  const Tensor x = placeholder({m, depth}, k.dtype), y = placeholder({m, n}, k.dtype);
  const DequantGemmOptions options;
  const Call call{x, weight, y, options, Stream::standard(Device::cpu())};
  const WidePlan plan{k.tile, 0};
  return analyze<WideHostKernel<k>>(wide_grid(call, plan), [&](auto& bind, auto& p) { bind_wide(bind, p, call, plan, {}); });
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add = [&]<class Kernel>(std::type_identity<Kernel>, const char* name, Analysis (*analysis)(const ShapeValues&)) {
    variants.push_back({make_spec(kernel_info<Kernel>, true, true, name), analysis});
  };
  add(std::type_identity<RowsKernel<i8, bf16>>{}, "dequantize_int8_bf16", analyze_shape<WeightFormat::int8, bf16>);
  add(std::type_identity<RowsKernel<fp8_e4m3, bf16>>{}, "dequantize_fp8_bf16", analyze_shape<WeightFormat::fp8, bf16>);
  add(std::type_identity<GroupsKernel<bf16, 32>>{}, "dequantize_int4_32_bf16", analyze_shape<WeightFormat::int4, bf16, 32>);
  add(std::type_identity<GroupsKernel<bf16, 128>>{}, "dequantize_int4_128_bf16", analyze_shape<WeightFormat::int4, bf16, 128>);
  const auto add_product = [&]<WideKernel k>(const char* name) {
    const std::string type = type_of(k);
    variants.push_back({make_spec({type, WideHostKernel<k>::source, nullptr}, true, true, name), analyze_product<k>});
  };
  constexpr WideTile tile = kWideTiles[3];
  add_product.template operator()<WideKernel{.format = WeightFormat::int8, .tile = tile}>("dequant_gemm_int8_bf16_128x256");
  add_product.template operator()<WideKernel{.format = WeightFormat::int4, .group = 128, .tile = tile}>(
      "dequant_gemm_int4_128_bf16_128x256");
  return variants;
}

}  // namespace tw::kernels::dequant_gemm
