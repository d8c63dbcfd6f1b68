#include <vector>

#include "kernels/dequant_gemm/call.hpp"
#include "kernels/dequant_gemm/rounded.tile.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/rows.hpp"
#include "tilewave/detail/parallel.hpp"

namespace tw::kernels::dequant_gemm {

namespace {

/// The longest rows whose products fit an i32: 128 * 127 * K < 2^31.
constexpr std::int64_t kMostColumns = std::int64_t{1} << 17;

/// Tiles, measured (NOTES.md). The first is smaller than gemm's, because sums are in memory twice: as integers, and scaled. The second: for
/// few rows, and so that small products occupy every thread.
constexpr gemm::Config kLarge{256, 256, 2}, kSmall{64, 192, 2};

bool has_large_tiles(const gemm::Call& product) {
  const std::int64_t tiles = static_cast<std::int64_t>(ceil_div(product.m, kLarge.bm)) * ceil_div(product.n, kLarge.bn);
  return product.m > 2 * kSmall.bm && tiles >= cpu_threads();
}

/// Rows of x rounded to 8-bit integers, each with one scale.
struct Rounded {
  Tensor codes;   ///< [M, K] of i8
  Tensor scales;  ///< [M] of f32
};
Rounded round(const Tensor& x) {
  const std::int64_t m = x.shape(0), k = x.shape(1);
  const Rounded to{Tensor::empty({m, k}, DType::i8), Tensor::empty({m}, DType::f32)};
  const auto* const from = static_cast<const std::byte*>(x.data());
  const std::int64_t row_bytes = x.stride(0) * static_cast<std::int64_t>(size_of(x.dtype()));
  constexpr std::int64_t kTogether = 16;
  detail::parallel_for(static_cast<long>((m + kTogether - 1) / kTogether), [&](long block) {
    std::vector<float> wide(static_cast<std::size_t>(k));
    for (std::int64_t r = block * kTogether; r < std::min(m, (block + 1) * kTogether); ++r) {
      widen(wide.data(), from + r * row_bytes, x.dtype(), k);
      to.scales.data<float>()[r] =
          cpu::quantized_library().round_to_i8(to.codes.data<signed char>() + r * k, wide.data(), static_cast<int>(k));
    }
  });
  return to;
}

template <class End, gemm::Config tile>
void multiply(const Call& call, const gemm::Call& product, const Tensor& x_scales) {
  using Kernel = gemm::Gemm<gemm::Operands<i8, Contract::columns, Contract::columns>, End,
                            gemm::Tiles<tile.bm, tile.bn, 192, tile.stages, tile.cluster, tile.band>>;
  const gemm::Launch launch = gemm::make_launch(product, {.dtype = DType::i8, .tile = tile});
  launch_cpu<Kernel>(launch.grid, [&](auto& bind, auto& p) {
    bind(p.in.a, launch.a);
    bind(p.in.b, launch.b);
    p.in.depth = product.k;
    p.splits = 1;
    bind(p.epilogue.x_scales, x_scales.reshape({call.m(), 1}));
    bind(p.epilogue.scales, call.weight.scales.reshape({1, call.n()}));
    gemm::bind_linear(bind, p.epilogue.linear, product, launch.d, false);
  });
}

}  // namespace

bool multiplies_rounded(const Call& call) {
  return call.weight.format == WeightFormat::int8 && cpu::quantized_library().round_to_i8 != nullptr && call.k() > 0 &&
         call.k() <= kMostColumns;
}

void run_rounded(const Call& call) {
  const Rounded x = round(call.x);
  const gemm::Call product{.a = x.codes,
                           .b = call.weight.values,
                           .d = call.y,
                           .bias = call.options.bias,
                           .residual = nullptr,
                           .a_scale = nullptr,
                           .b_scale = {},
                           .activation = call.options.activation,
                           .alpha = 1,
                           .beta = call.options.accumulate ? 1.0f : 0.0f,
                           .m = static_cast<int>(call.m()),
                           .n = static_cast<int>(call.n()),
                           .k = static_cast<int>(call.k()),
                           .batch = 1,
                           .config = -1,
                           .splits = 1,
                           .constant_b = false,
                           .stream = call.stream,
                           .stored = {},
                           .layout = {}};
  with_float_type(call.y.dtype(), [&]<class T>(std::type_identity<T>) {
    const auto multiply_with = [&]<class End>(std::type_identity<End>) {
      has_large_tiles(product) ? multiply<End, kLarge>(call, product, x.scales) : multiply<End, kSmall>(call, product, x.scales);
    };
    if (call.pairs()) return multiply_with(std::type_identity<Scaled<Linear<T, SwiGlu>>>{});
    multiply_with(std::type_identity<Scaled<Linear<T, AnyActivation, LinearOptions{.addends = true}>>>{});
  });
}

}  // namespace tw::kernels::dequant_gemm
