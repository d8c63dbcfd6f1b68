#include "kernels/check.hpp"
#include "kernels/gemm/launch.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/transpose.hpp"

namespace tw::kernels::gemm {

namespace {

/// A kernel of each layout of Params: tile sizes, contractions and activations do not change it. Few rows of A have their widest results
/// here, because D's alignment is checked against them.
constexpr Kernel with_params(Kernel::Form form, DType dtype, bool interleaved = false, DType fp8_result = DType::bf16) {
  return {.dtype = dtype,
          .form = form,
          .fp8_result = fp8_result,
          .interleaved = interleaved,
          .tile = form == Kernel::skinny ? skinny_tile(kMostSkinnyRows) : Config{64, 64, 2}};
}
constexpr std::array kParams{with_params(Kernel::whole, DType::f32),
                             with_params(Kernel::whole, DType::f16),
                             with_params(Kernel::whole, DType::bf16),
                             with_params(Kernel::whole, DType::fp8_e4m3),
                             with_params(Kernel::whole, DType::i8),
                             with_params(Kernel::stream_k, DType::f16),
                             with_params(Kernel::stream_k, DType::bf16),
                             with_params(Kernel::partial, DType::f16),
                             with_params(Kernel::partial, DType::bf16),
                             with_params(Kernel::sum, DType::f16),
                             with_params(Kernel::sum, DType::bf16),
                             with_params(Kernel::gemv, DType::f16),
                             with_params(Kernel::gemv, DType::bf16),
                             with_params(Kernel::skinny, DType::f16),
                             with_params(Kernel::skinny, DType::bf16),
                             with_params(Kernel::block_scaled, DType::fp8_e4m3),
                             with_params(Kernel::whole, DType::f16, true),
                             with_params(Kernel::whole, DType::bf16, true),
                             with_params(Kernel::whole, DType::fp8_e4m3, false, DType::f32),
                             with_params(Kernel::whole, DType::fp8_e4m3, false, DType::fp8_e4m3)};

/// The kinds of fp8 have the same Params, those of e4m3: the host looks at no element.
DType host_type(DType dtype) { return is_8bit_float(dtype) ? DType::fp8_e4m3 : dtype; }
Tensor in_host_type(const Tensor& t) {
  if (t.dtype() == host_type(t.dtype())) return t;
  return Tensor::borrow(t.data(), t.shape(), host_type(t.dtype()), t.device(), t.strides());
}

void launch(const Call& call, Launch x) {
  const Kernel& kernel = x.kernel;
  for (Tensor* const t : {&x.a, &x.b, &x.d}) *t = in_host_type(*t);
  const auto launch_as = [&]<Kernel k>() {
    if (k.form != kernel.form || k.dtype != host_type(kernel.dtype) || k.interleaved != kernel.interleaved ||
        k.fp8_result != host_type(kernel.fp8_result))
      return;
    using Params = typename HostKernel<k>::template On<sm_90a::Target<>>::Params;
    detail::launch_named<Params>(named(kernel), call.stream, x.grid, [&](auto& bind, auto& p) { bind_launch(bind, p, call, x); });
  };
  [&]<std::size_t... i>(std::index_sequence<i...>) { (launch_as.template operator()<kParams[i]>(), ...); }
  (std::make_index_sequence<kParams.size()>());
}

void launch(const Call& call, const Kernel& kernel, const Tensor& partial = {}) { launch(call, make_launch(call, kernel, partial)); }

void launch_stream_k(const Call& call, Kernel kernel, int blocks) {
  kernel.form = Kernel::stream_k;
  const Tensor sums = workspace({blocks, kernel.tile.bm, kernel.tile.bn}, DType::f32, call.stream);
  launch(call, make_stream_k_launch(call, kernel, sums, counters(call.stream)));
}

/// The tiles that the call asks for.
Config asked_tile(const Call& call, const Problem& problem) {
  if (call.tile) return *call.tile;
  const std::vector<Config> all = configs(problem.generic_shared);
  require(
      call.config < static_cast<int>(all.size()) && valid(all[static_cast<std::size_t>(call.config)], problem),
      "gemm: config is {}; it must be below {}, have at most 128 columns where beta or a residual is not all that is added and 192 where "
      "it is, with B stored [K, N] a multiple of 64, and be for the operands' type and the activation",
      call.config, all.size());
  return all[static_cast<std::size_t>(call.config)];
}

/// The tiles and splits that the call asks for, or the heuristic's choice.
Choice choice_of(const Call& call, const Problem& problem) {
  const bool asks = call.tile || call.config >= 0, divides = call.splittable();
  Choice choice = asks ? Choice{asked_tile(call, problem)} : choose(problem, divides && call.splits == 0);
  if (!divides) return choice;
  if (call.splits == 0) {
    if (asks) choice.splits = choose_splits(problem, choice.tile);
    return choice;
  }
  choice.splits = call.splits;
  if (choice.splits != kStreamK) return choice;
  if (!asks) choice.tile = choose_stream_k(problem).value_or(choice.tile);
  if (!valid_stream_k(choice.tile, problem)) choice.splits = 1;
  return choice;
}

Config block_scaled_tile_of(const Call& call, int units) {
  const int chosen = call.config >= 0 ? call.config : choose_block_scaled(1, call.m, call.n, call.k, units);
  require(chosen < static_cast<int>(kBlockScaledTiles.size()), "gemm: config is {}; with block scales it must be below {}", chosen,
          kBlockScaledTiles.size());
  return kBlockScaledTiles[static_cast<std::size_t>(chosen)];
}

void run_block_scaled(const Call& call, const Config& tile) {
  Call aligned = call;
  const Tensor a_scale = tma_rows(call.a_scale->transpose(0, 1), call.stream).transpose(0, 1);
  aligned.a_scale = &a_scale;
  aligned.b_scale = tma_rows(call.b_scale, call.stream);
  launch(aligned, {.dtype = call.a.dtype(), .form = Kernel::block_scaled, .tile = tile});
}

}  // namespace

Tensor tma_rows(const Tensor& t, const Stream& stream) {
  const auto aligned = [&](std::int64_t elements) { return elements * static_cast<std::int64_t>(size_of(t.dtype())) % 16 == 0; };
  bool as_it_is = t.stride(-1) == 1 && reinterpret_cast<std::uintptr_t>(t.data()) % 16 == 0;
  for (int dim = 0; dim < t.rank() - 1; ++dim) as_it_is = as_it_is && aligned(t.stride(dim)) && t.stride(dim) > 0;
  if (as_it_is || t.numel() == 0) return t;
  Shape padded = t.shape();
  padded.back() = (padded.back() + 3) / 4 * 4;
  const Tensor copy = workspace(std::move(padded), t.dtype(), stream).slice(t.rank() - 1, 0, t.shape(-1));
  tw::transpose(t.transpose(-2, -1), copy, {.stream = stream});
  return copy;
}

void run_on_gpu(const Call& call) {
  const DType dtype = call.a.dtype();
  if (call.is_gemv()) return launch(call, {.dtype = dtype, .form = Kernel::gemv, .activation = call.activation, .addends = call.addends()});
  const Problem problem = problem_of(call, device_info(call.stream.device()).units);
  const auto fitted = [&](const Config& c) { return problem.generic_shared > 0 ? fit_generic(c, problem.generic_shared) : c; };
  if (call.block_scaled()) return run_block_scaled(call, fitted(block_scaled_tile_of(call, problem.units)));
  if (call.is_skinny() && call.config < 0 && call.splits <= 1) {
    const Config tile = problem.generic_shared > 0 ? fit_skinny(call.m, problem.generic_shared) : call.tile.value_or(skinny_tile(call.m));
    return launch(call, {.dtype = dtype, .form = Kernel::skinny, .activation = call.activation, .addends = call.addends(), .tile = tile});
  }
  const auto [tile, splits] = choice_of(call, problem);
  const Kernel whole{.dtype = dtype,
                     .fp8_result = is_8bit_float(dtype) ? call.d.dtype() : DType::bf16,
                     .layout = call.layout,
                     .activation = call.activation,
                     .addends = call.addends(),
                     .begins = call.begins(),
                     .row_scales = call.row_scales,
                     .interleaved = call.interleaved,
                     .mixed_fp8 = call.b.dtype() != dtype,
                     .tile = tile};
  if (splits == 1) return launch(call, whole);
  if (splits == kStreamK) return launch_stream_k(call, whole, problem.units);
  // Sums over splits of K, which a second kernel adds up.
  const Tensor partial = workspace({call.batch, used_splits(call.k, size_of(dtype), splits), call.m, call.n}, DType::f32, call.stream);
  launch(call, {.dtype = dtype, .form = Kernel::partial, .layout = call.layout, .tile = tile}, partial);
  launch(call, {.dtype = dtype, .form = Kernel::sum, .activation = call.activation, .addends = call.addends()}, partial);
}

}  // namespace tw::kernels::gemm
