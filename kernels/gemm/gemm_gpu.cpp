#include <utility>

#include "kernels/check.hpp"
#include "kernels/gemm/block_scaled.tile.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/configs.hpp"
#include "kernels/gemm/few_rows.tile.hpp"
#include "runtime/format.hpp"
#include "runtime/stream.hpp"

namespace tw::kernels::gemm {

namespace {

constexpr Contract kColumns = Contract::columns;
constexpr Contract kRows = Contract::rows;

// --- Tiles on tensor cores

/// A slot's rows have 128 bytes.
template <class T, Config c>
using TilesOf = Tiles<c.bm, c.bn, 128 / static_cast<int>(sizeof(T)), c.stages, c.cluster, c.band>;

template <class T, class Out, Contract a, Contract b, class Act, bool kAddends, Config c>
using Variant = Gemm<Operands<T, a, b>, Finish<Out, Act, kAddends>, TilesOf<T, c>>;

template <class T, Contract a, Contract b, Config c>
using PartialVariant = Gemm<Operands<T, a, b>, Partial, TilesOf<T, c>>;

template <class T, class Out, Contract a, Contract b, Config c>
const KernelInfo& info_of(Activation activation, bool addends) {
  if constexpr (is_same<T, i8>) {
    return kernel_info<Variant<T, Out, a, b, Identity, false, c>>;
  } else {
    return with_epilogue(activation, [&]<class Act>(std::type_identity<Act>) -> const KernelInfo& {
      if constexpr (!is_same<Act, SwiGlu>)
        if (addends) return kernel_info<Variant<T, Out, a, b, Act, true, c>>;
      return kernel_info<Variant<T, Out, a, b, Act, false, c>>;
    });
  }
}

/// `a`, `b`: as stored for these contractions.
template <class T, class Out, Contract a_contract, Contract b_contract, Config c>
void launch_whole(const Call& call, const Tensor& a, const Tensor& b) {
  // Parameters do not depend on the activation and the addends, so one binding serves all variants but swiglu's, whose D has its own tile.
  const auto launch = [&]<class Act>(std::type_identity<Act>) {
    detail::launch_bound<Variant<T, Out, a_contract, b_contract, Act, false, c>>(
        info_of<T, Out, a_contract, b_contract, c>(call.activation, call.addends()), call.stream,
        {ceil_div(call.m, c.bm), ceil_div(call.n, c.bn), call.batch}, [&](auto& bind, auto& p) { bind_call(bind, p, call, a, b); });
  };
  if constexpr (!is_same<T, i8>)
    if (call.activation == Activation::swiglu) return launch(std::type_identity<SwiGlu>{});
  launch(std::type_identity<Identity>{});
}

// --- Parts of K summed apart

/// `partial`: [batch, splits, M, N].
void bind_sum(auto& bind, auto& p, const Call& call, const Tensor& partial) {
  bind(p.partial, partial);
  bind(p.d, call.d);
  bind(p.c, call.beta != 0 ? &call.d : nullptr);
  bind(p.residual, call.residual);
  bind(p.bias, call.bias);
  p.alpha = call.alpha;
  p.beta = call.beta;
  p.splits = static_cast<int>(partial.shape(1));
  p.has_bias = call.bias != nullptr;
  p.has_residual = call.residual != nullptr;
}

constexpr int kSumRows = 4, kSumCols = 256;
TileGrid grid_of_sum(const Call& call) { return {ceil_div(call.m, kSumRows), ceil_div(call.n, kSumCols), call.batch}; }

template <class T>
void sum_partials(const Call& call, const Tensor& partial) {
  with_activation(call.activation, [&]<class Act>(std::type_identity<Act>) {
    const auto launch = [&]<bool kAddends>() {
      using Kernel = SumPartials<T, Act, kAddends, kSumRows, kSumCols>;
      launch_gpu<Kernel>(call.stream, grid_of_sum(call), [&](auto& bind, auto& p) { bind_sum(bind, p, call, partial); });
    };
    call.addends() ? launch.template operator()<true>() : launch.template operator()<false>();
  });
}

template <Config c, bool turned>
TileGrid grid_of_split(const Call& call, int splits) {
  return {ceil_div(turned ? call.n : call.m, c.bm), ceil_div(turned ? call.m : call.n, c.bn), call.batch * splits};
}

/// `partial`: [batch, splits, M, N].
template <bool turned>
void bind_split(auto& bind, auto& p, const Call& call, const Tensor& a, const Tensor& b, const Tensor& partial) {
  const int splits = static_cast<int>(partial.shape(1));
  const Tensor planes = partial.reshape({call.batch * splits, call.m, call.n});
  bind_inputs(bind, p.in, call, turned ? b : a, turned ? a : b);
  if (turned) std::swap(p.in.a_batches, p.in.b_batches);
  bind(p.d, turned ? planes.transpose(1, 2) : planes);
  bind(p.c, nullptr);
  bind(p.residual, nullptr);
  p.splits = splits;
}

/// The product as `splits` sums over parts of K in a workspace, which a second kernel adds up. `turned`: the kernel computes B A^T, so that
/// the few rows of A are its columns.
/// In how many parts K is done that shall be done in `splits`: none may be empty; nine steps in eight parts of two are five.
int parts_of(const Call& call, std::size_t element_bytes, int splits) {
  const int steps = ceil_div(call.k * static_cast<int>(element_bytes), 128);
  return ceil_div(steps, ceil_div(steps, splits));
}

template <class T, Contract a_contract, Contract b_contract, Config c, bool turned>
void launch_split(const Call& call, const Tensor& a, const Tensor& b, int splits) {
  splits = parts_of(call, sizeof(T), splits);
  const Shape shape{call.batch, splits, call.m, call.n};
  const std::size_t bytes = sizeof(float) * static_cast<std::size_t>(call.batch) * static_cast<std::size_t>(splits) *
                            static_cast<std::size_t>(call.m) * static_cast<std::size_t>(call.n);
  const std::shared_ptr<void> workspace = allocate_workspace(bytes, call.stream);
  const Tensor partial = Tensor::borrow(workspace.get(), shape, DType::f32, call.stream.device());
  launch_gpu<PartialVariant<T, a_contract, b_contract, c>>(call.stream, grid_of_split<c, turned>(call, splits),
                                                           [&](auto& bind, auto& p) { bind_split<turned>(bind, p, call, a, b, partial); });
  sum_partials<T>(call, partial);
}

// --- Few rows

TileGrid grid_of_gemv(const Call& call) { return {ceil_div(call.n, kGemv.rows), call.batch}; }

/// One row, B row by row.
template <class T>
void launch_gemv(const Call& call) {
  const auto launch = [&]<class Act, bool kAddends>() {
    constexpr GemvConfig c = kGemv;
    using Kernel = Gemv<T, Act, kAddends, c.rows, c.piece, c.warps>;
    launch_gpu<Kernel>(call.stream, grid_of_gemv(call), [&](auto& bind, auto& p) { bind_gemv(bind, p, call); });
  };
  with_activation(call.activation, [&]<class Act>(std::type_identity<Act>) {
    call.addends() ? launch.template operator()<Act, true>() : launch.template operator()<Act, false>();
  });
}

// --- Choosing

template <class T, class Out, Contract a_contract, Contract b_contract>
void launch_contracts(const Call& call, const Tensor& a, const Tensor& b) {
  constexpr bool kBRows = b_contract == kRows;
  constexpr bool kSplits = sizeof(T) == 2 && a_contract == kColumns;
  const Problem problem{call.m, call.n, call.k, call.batch, sizeof(T), call.addends(), kBRows, device_info(call.stream.device()).units};
  const int chosen = call.config >= 0 ? call.config : choose_config(problem);
  require(chosen < static_cast<int>(kConfigs.size()) && allowed(kConfigs[static_cast<std::size_t>(chosen)], call.addends(), kBRows),
          "gemm: config is {}; it must be below {}, and with beta or a residual have at most 128 columns, with B stored [K, N] a "
          "multiple of 64",
          chosen, kConfigs.size());
  int splits = 1;
  if (kSplits && call.k > 0 && call.activation != Activation::swiglu)
    splits = call.splits > 0 ? call.splits : choose_splits(problem, kConfigs[static_cast<std::size_t>(chosen)]);
  [&]<int... kConfig>(std::integer_sequence<int, kConfig...>) {
    const auto launch_if_chosen = [&]<int kIndex>() {
      constexpr Config c = kConfigs[kIndex];
      if constexpr (allowed(c, false, kBRows)) {
        if (chosen != kIndex) return;
        if constexpr (kSplits)
          if (splits > 1) return launch_split<T, a_contract, b_contract, c, false>(call, a, b, splits);
        launch_whole<T, Out, a_contract, b_contract, c>(call, a, b);
      }
    };
    (launch_if_chosen.template operator()<kConfig>(), ...);
  }
  (std::make_integer_sequence<int, static_cast<int>(kConfigs.size())>{});
}

template <class T>
void launch_16bit(const Call& call) {
  const bool a_rows = stored_transposed(call.a);
  const bool b_rows = stored_transposed(call.b);
  if (!b_rows && call.m <= kMostFewRows && call.k > 0 && call.activation != Activation::swiglu) {
    if (call.m == 1) return launch_gemv<T>(call);
    const Problem turned{call.n, call.m, call.k, call.batch, sizeof(T), false, false, device_info(call.stream.device()).units};
    return launch_split<T, kColumns, kColumns, kTurned, true>(call, call.a, call.b,
                                                              call.splits > 0 ? call.splits : choose_turned_splits(turned));
  }
  if (a_rows && b_rows)
    launch_contracts<T, T, kRows, kRows>(call, call.a.transpose(-2, -1), call.b.transpose(-2, -1));
  else if (b_rows)
    launch_contracts<T, T, kColumns, kRows>(call, call.a, call.b.transpose(-2, -1));
  else
    launch_contracts<T, T, kColumns, kColumns>(call, call.a, call.b);
}

void launch_block_scaled(const Call& call) {
  const int chosen = call.config >= 0 ? call.config : 0;
  require(chosen < static_cast<int>(kBlockScaledConfigs.size()), "gemm: config is {}; with block scales it must be below {}", chosen,
          kBlockScaledConfigs.size());
  [&]<int... kConfig>(std::integer_sequence<int, kConfig...>) {
    const auto launch_if_chosen = [&]<int kIndex>() {
      constexpr Config c = kBlockScaledConfigs[kIndex];
      if (chosen == kIndex)
        launch_gpu<BlockScaledGemm<bf16, TilesOf<fp8_e4m3, c>>>(call.stream, {ceil_div(call.m, c.bm), ceil_div(call.n, c.bn)},
                                                                [&](auto& bind, auto& p) { bind_block_scaled(bind, p, call); });
    };
    (launch_if_chosen.template operator()<kConfig>(), ...);
  }
  (std::make_integer_sequence<int, static_cast<int>(kBlockScaledConfigs.size())>{});
}

// --- Compiled ahead of time

template <class T, class Out, Contract a, Contract b, class Act, bool kAddends, Config c>
Analysis analyze_call(const Call& call) {
  const auto stored = [](Contract contract, const Tensor& t) { return contract == kRows ? t.transpose(-2, -1) : t; };
  return analyze<Variant<T, Out, a, b, Act, kAddends, c>>(
      {ceil_div(call.m, c.bm), ceil_div(call.n, c.bn), call.batch},
      [&](auto& bind, auto& p) { bind_call(bind, p, call, stored(a, call.a), stored(b, call.b)); });
}

/// f(call) for the call of the shape, whose operands are placeholders.
template <class T, class Out, bool kAddends, bool swiglu = false, class F>
Analysis with_call(const ShapeValues& shape, F f) {
  const int m = shape.integer("M"), n = shape.integer("N"), k = shape.integer("K"), batch = shape.integer("batch");
  const Tensor d = placeholder({batch, m, swiglu ? n / 2 : n}, dtype_of<Out>), bias = placeholder({n}, dtype_of<Out>);
  return f(Call{.a = placeholder({batch, m, k}, dtype_of<T>),
                .b = placeholder({batch, n, k}, dtype_of<T>),
                .d = d,
                .bias = shape["bias"] ? &bias : nullptr,
                .residual = kAddends ? &d : nullptr,
                .a_scale = nullptr,
                .b_scale = Tensor(),
                .activation = Activation::none,
                .alpha = 1,
                .beta = 0,
                .m = m,
                .n = n,
                .k = k,
                .batch = batch,
                .config = -1,
                .splits = std::max(shape.integer("splits"), 1),
                .stream = Stream::standard(Device::cpu())});
}

template <class T, class Out, Contract a, Contract b, class Act, bool kAddends, Config c>
Analysis analyze_shape(const ShapeValues& shape) {
  return with_call<T, Out, kAddends, is_same<Act, SwiGlu>>(shape, analyze_call<T, Out, a, b, Act, kAddends, c>);
}

template <class T, bool kAddends>
Analysis analyze_gemv(const ShapeValues& shape) {
  require(shape["M"] == 1, "shape: M is {}; the kernel is for one row", shape["M"]);
  return with_call<T, T, kAddends>(shape, [](const Call& call) {
    return analyze<Gemv<T, Identity, kAddends, kGemv.rows, kGemv.piece, kGemv.warps>>(
        grid_of_gemv(call), [&](auto& bind, auto& p) { bind_gemv(bind, p, call); });
  });
}

Tensor placeholder_of_partials(const Call& call, std::size_t element_bytes) {
  return placeholder({call.batch, parts_of(call, element_bytes, call.splits), call.m, call.n}, DType::f32);
}

template <class T, Config c, bool turned>
Analysis analyze_partial(const ShapeValues& shape) {
  require(shape["K"] > 0, "shape: K is 0; there are no parts of it");
  return with_call<T, T, false>(shape, [](const Call& call) {
    const Tensor partial = placeholder_of_partials(call, sizeof(T));
    return analyze<PartialVariant<T, kColumns, kColumns, c>>(
        grid_of_split<c, turned>(call, static_cast<int>(partial.shape(1))),
        [&](auto& bind, auto& p) { bind_split<turned>(bind, p, call, call.a, call.b, partial); });
  });
}

template <class T>
Analysis analyze_sum(const ShapeValues& shape) {
  require(shape["K"] > 0, "shape: K is 0; there are no parts of it");
  return with_call<T, T, false>(shape, [](const Call& call) {
    const Tensor partial = placeholder_of_partials(call, sizeof(T));
    return analyze<SumPartials<T, Identity, false, kSumRows, kSumCols>>(grid_of_sum(call),
                                                                        [&](auto& bind, auto& p) { bind_sum(bind, p, call, partial); });
  });
}

template <Config c>
Analysis analyze_block_scaled(const ShapeValues& shape) {
  require(shape["batch"] == 1, "shape: batch is {}; products with block scales have none", shape["batch"]);
  return with_call<fp8_e4m3, bf16, false>(shape, [](Call call) {
    const Tensor a_scale = placeholder({call.m, ceil_div(call.k, 128)}, DType::f32);
    call.a_scale = &a_scale;
    call.b_scale = placeholder({ceil_div(call.n, 128), ceil_div(call.k, 128)}, DType::f32);
    return analyze<BlockScaledGemm<bf16, TilesOf<fp8_e4m3, c>>>({ceil_div(call.m, c.bm), ceil_div(call.n, c.bn)},
                                                                [&](auto& bind, auto& p) { bind_block_scaled(bind, p, call); });
  });
}

template <class T, class Out, Contract a, Contract b>
Analysis analyze_contracts(const Call& call, int config) {
  Analysis result;
  [&]<int... kConfig>(std::integer_sequence<int, kConfig...>) {
    const auto analyze_if_chosen = [&]<int kIndex>() {
      if constexpr (allowed(kConfigs[kIndex], false, b == kRows))
        if (config == kIndex) result = analyze_call<T, Out, a, b, Identity, false, kConfigs[kIndex]>(call);
    };
    (analyze_if_chosen.template operator()<kConfig>(), ...);
  }
  (std::make_integer_sequence<int, static_cast<int>(kConfigs.size())>{});
  return result;
}

template <class T>
Analysis analyze_16bit(const Call& call, int config) {
  if (!stored_transposed(call.b)) return analyze_contracts<T, T, kColumns, kColumns>(call, config);
  return stored_transposed(call.a) ? analyze_contracts<T, T, kRows, kRows>(call, config)
                                   : analyze_contracts<T, T, kColumns, kRows>(call, config);
}

template <class T, class Out, Contract a, Contract b, int kConfig, class Act = Identity, bool kAddends = false>
KernelVariant variant(const char* dtype, const char* layout, const char* suffix = "", bool tma_load = true, bool tma_store = true) {
  constexpr Config c = kConfigs[kConfig];
  return {make_spec(kernel_info<Variant<T, Out, a, b, Act, kAddends, c>>, tma_load, tma_store,
                    tw::format("gemm_{}_{}_{}x{}{}{}", dtype, layout, c.bm, c.bn, c.cluster > 1 ? "_cluster" : "", suffix)),
          analyze_shape<T, Out, a, b, Act, kAddends, c>};
}

template <class T>
void register_16bit(std::vector<KernelVariant>& variants, const char* dtype) {
  [&]<int... kConfig>(std::integer_sequence<int, kConfig...>) {
    const auto add = [&]<int kIndex>() {
      variants.push_back(variant<T, T, kColumns, kColumns, kIndex>(dtype, "nt"));
      if constexpr (allowed(kConfigs[kIndex], false, true)) {
        variants.push_back(variant<T, T, kColumns, kRows, kIndex>(dtype, "nn"));
        // Seldom wanted: those that are chosen most.
        if constexpr (kIndex == 1 || kIndex == 3) variants.push_back(variant<T, T, kRows, kRows, kIndex>(dtype, "tn"));
      }
    };
    (add.template operator()<kConfig>(), ...);
  }
  (std::make_integer_sequence<int, static_cast<int>(kConfigs.size())>{});
}

void register_few_rows(std::vector<KernelVariant>& variants) {
  const auto gemv = [&]<class T, bool kAddends>(const char* name) {
    variants.push_back({make_spec(kernel_info<Gemv<T, Identity, kAddends, kGemv.rows, kGemv.piece, kGemv.warps>>, true, true, name),
                        analyze_gemv<T, kAddends>});
  };
  const auto partial = [&]<class T, Config c, bool turned>(const char* name) {
    variants.push_back({make_spec(kernel_info<PartialVariant<T, kColumns, kColumns, c>>, true, true, name), analyze_partial<T, c, turned>});
  };
  gemv.template operator()<bf16, false>("gemv_bf16");
  gemv.template operator()<bf16, true>("gemv_bf16_addends");
  partial.template operator()<bf16, kTurned, true>("gemm_bf16_turned_partial");
  partial.template operator()<bf16, kConfigs[3], false>("gemm_bf16_nt_128x128_partial");
  variants.push_back({make_spec(kernel_info<SumPartials<bf16, Identity, false, kSumRows, kSumCols>>, true, true, "gemm_bf16_sum_partials"),
                      analyze_sum<bf16>});
}

template <Config c>
KernelVariant block_scaled_variant(const char* name) {
  return {make_spec(kernel_info<BlockScaledGemm<bf16, TilesOf<fp8_e4m3, c>>>, true, true, name), analyze_block_scaled<c>};
}

}  // namespace

void run_on_gpu(const Call& call) {
  if (call.block_scaled()) return launch_block_scaled(call);
  switch (call.a.dtype()) {
    case DType::f16:
      return launch_16bit<f16>(call);
    case DType::bf16:
      return launch_16bit<bf16>(call);
    // The tensor cores' products of other types have no transposes.
    case DType::fp8_e4m3:
      return launch_contracts<fp8_e4m3, bf16, kColumns, kColumns>(call, call.a, call.b);
    case DType::i8:
      return launch_contracts<i8, i32, kColumns, kColumns>(call, call.a, call.b);
    default:
      return launch_contracts<float, float, kColumns, kColumns>(call, call.a, call.b);
  }
}

Analysis analyze_gpu_config(const Call& call, int config) {
  switch (call.a.dtype()) {
    case DType::f16:
      return analyze_16bit<f16>(call, config);
    case DType::bf16:
      return analyze_16bit<bf16>(call, config);
    case DType::fp8_e4m3:
      return analyze_contracts<fp8_e4m3, bf16, kColumns, kColumns>(call, config);
    case DType::i8:
      return analyze_contracts<i8, i32, kColumns, kColumns>(call, config);
    default:
      return analyze_contracts<float, float, kColumns, kColumns>(call, config);
  }
}

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  register_16bit<bf16>(variants, "bf16");
  register_16bit<f16>(variants, "f16");
  const auto add = [&](KernelVariant each) { variants.push_back(std::move(each)); };
  add(variant<float, float, kColumns, kColumns, 0>("tf32", "nt"));
  add(variant<float, float, kColumns, kColumns, 3>("tf32", "nt"));
  add(variant<float, float, kColumns, kColumns, 4>("tf32", "nt"));
  add(variant<fp8_e4m3, bf16, kColumns, kColumns, 0>("fp8", "nt"));
  add(variant<fp8_e4m3, bf16, kColumns, kColumns, 3>("fp8", "nt"));
  add(variant<i8, i32, kColumns, kColumns, 0>("i8", "nt"));
  add(variant<i8, i32, kColumns, kColumns, 3>("i8", "nt"));
  add(block_scaled_variant<kBlockScaledConfigs[0]>("gemm_fp8_block_scaled_cluster"));
  add(block_scaled_variant<kBlockScaledConfigs[1]>("gemm_fp8_block_scaled"));
  // Epilogues, on the widest tiles that each may use and that are chosen for all but the largest products.
  add(variant<bf16, bf16, kColumns, kColumns, 1, GeluErf>("bf16", "nt", "_gelu_erf"));
  add(variant<bf16, bf16, kColumns, kColumns, 1, GeluTanh>("bf16", "nt", "_gelu_tanh"));
  add(variant<bf16, bf16, kColumns, kColumns, 1, Silu>("bf16", "nt", "_silu"));
  add(variant<bf16, bf16, kColumns, kColumns, 1, SwiGlu>("bf16", "nt", "_swiglu"));
  add(variant<bf16, bf16, kColumns, kColumns, 3, SwiGlu>("bf16", "nt", "_swiglu"));
  add(variant<bf16, bf16, kColumns, kColumns, 3, Identity, true>("bf16", "nt", "_addends"));
  add(variant<bf16, bf16, kColumns, kColumns, 4, GeluErf, true>("bf16", "nt", "_addends_gelu_erf"));
  add(variant<float, float, kColumns, kColumns, 3, Identity, true>("tf32", "nt", "_addends"));
  // Tensors that TMA cannot take.
  add(variant<bf16, bf16, kColumns, kColumns, 3>("bf16", "nt", "_strided", false, false));
  add(variant<bf16, bf16, kColumns, kColumns, 4, Identity, true>("bf16", "nt", "_addends_strided", false, false));
  register_few_rows(variants);
  return variants;
}

}  // namespace tw::kernels::gemm
