#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/gemm/block_scaled.tile.hpp"
#include "kernels/gemm/call.hpp"
#include "kernels/gemm/kernels.hpp"
#include "kernels/gemm/skinny.tile.hpp"

// The kernels that are worth compiling ahead of time. Their names cost nothing; the analysis of a kernel is an instantiation for the
// analysis target, which a short list of configurations has.

namespace tw::kernels::gemm {

namespace {

constexpr std::array<Config, 5> kConfigs{kProductTiles[0], kProductTiles[1], kProductTiles[2], kProductTiles[3], kProductTiles[4]};
constexpr Contract kColumns = Contract::columns;

/// f(call) for a call of the shape, on placeholders.
template <class T, class Out, class Act, bool kAddends, class F>
Analysis with_call(const ShapeValues& shape, F f) {
  constexpr bool kSwiglu = is_same<Act, SwiGlu>;
  const std::int64_t m = shape["M"], n = shape["N"], k = shape["K"], batch = shape["batch"];
  const Tensor d = placeholder({batch, m, kSwiglu ? n / 2 : n}, dtype_of<Out>), bias = placeholder({n}, dtype_of<Out>);
  const Tensor residual = placeholder(d.shape(), dtype_of<Out>);
  GemmOptions options{.splits = std::max(shape.integer("splits"), 1)};
  options.activation = kSwiglu ? Activation::swiglu : Activation::none;
  options.bias = shape["bias"] ? &bias : nullptr;
  options.residual = kAddends ? &residual : nullptr;
  return f(make_call(placeholder({batch, m, k}, dtype_of<T>), placeholder({batch, n, k}, dtype_of<T>).transpose(1, 2), d, options));
}

template <class T, Config c>
using TilesOf = Tiles<c.bm, c.bn, 128 / static_cast<int>(sizeof(T)), c.stages, c.cluster, c.band>;

template <class T, class Out, class Act, bool kAddends>
using EpilogueOf =
    conditional<is_same<T, i8>, StoreSums<Out>, Linear<Out, Act, LinearOptions{.addends = kAddends, .scales = sizeof(T) == 1}>>;

/// What is known of a kernel from its instantiations on the host.
struct Instantiated {
  GemmKernel kernel;
  Analysis (*analyze)(const ShapeValues&);
  void (*record_tiles)(detail::TileRecorder&);
};

template <class T, class Out, Config c, class Act, bool kAddends>
Analysis analyze_shape(const ShapeValues& shape) {
  return with_call<T, Out, Act, kAddends>(shape, [](const Call& call) {
    return analyze<Gemm<Operands<T, kColumns, kColumns>, EpilogueOf<T, Out, Act, kAddends>, TilesOf<T, c>>>(
        {ceil_div(call.m, c.bm), ceil_div(call.n, c.bn), call.batch},
        [&](auto& bind, auto& p) { bind_call(bind, p, call, call.a, call.b); });
  });
}

/// How operands are stored does not change the counts: one analysis serves all.
template <class T, class Out, Config c, class Act = Identity, bool kAddends = false, Contract a = kColumns, Contract b = kColumns>
Instantiated instantiated(Activation activation = Activation::none) {
  return {{.dtype = dtype_of<T>,
           .out = dtype_of<Out>,
           .a_rows = a == Contract::rows,
           .b_rows = b == Contract::rows,
           .activation = activation,
           .addends = kAddends,
           .tile = c},
          analyze_shape<T, Out, c, Act, kAddends>,
          detail::tile_recorder<Gemm<Operands<T, a, b>, EpilogueOf<T, Out, Act, kAddends>, TilesOf<T, c>>>()};
}

template <class T>
void add_16bit(std::vector<Instantiated>& all) {
  constexpr Contract kRows = Contract::rows;
  const auto add = [&]<Config c>() {
    all.push_back(instantiated<T, T, c>());
    all.push_back(instantiated<T, T, c, Identity, false, kColumns, kRows>());
  };
  add.template operator()<kConfigs[0]>();
  add.template operator()<kConfigs[1]>();
  add.template operator()<kConfigs[2]>();
  add.template operator()<kConfigs[3]>();
  add.template operator()<kConfigs[4]>();
  all.push_back(instantiated<T, T, kConfigs[1], Identity, false, kRows, kRows>());
  all.push_back(instantiated<T, T, kConfigs[3], Identity, false, kRows, kRows>());
}

std::vector<Instantiated> make_instantiated() {
  std::vector<Instantiated> all{
      instantiated<float, float, kConfigs[0]>(),
      instantiated<float, float, kConfigs[3]>(),
      instantiated<float, float, kConfigs[4]>(),
      instantiated<float, float, kConfigs[3], Identity, true>(),
      instantiated<fp8_e4m3, bf16, kConfigs[0]>(),
      instantiated<fp8_e4m3, bf16, kConfigs[3]>(),
      instantiated<i8, i32, kConfigs[0]>(),
      instantiated<i8, i32, kConfigs[3]>(),
      instantiated<bf16, bf16, kConfigs[1], GeluErf>(Activation::gelu_erf),
      instantiated<bf16, bf16, kConfigs[1], GeluTanh>(Activation::gelu_tanh),
      instantiated<bf16, bf16, kConfigs[1], Silu>(Activation::silu),
      instantiated<bf16, bf16, kConfigs[1], SwiGlu>(Activation::swiglu),
      instantiated<bf16, bf16, kConfigs[3], SwiGlu>(Activation::swiglu),
      instantiated<bf16, bf16, kConfigs[3], Identity, true>(),
      instantiated<bf16, bf16, kConfigs[4], Identity, true>(),
      instantiated<bf16, bf16, kConfigs[4], GeluErf, true>(Activation::gelu_erf),
  };
  add_16bit<bf16>(all);
  add_16bit<f16>(all);
  return all;
}

const Instantiated* find_instantiated(const GemmKernel& kernel) {
  static const std::vector<Instantiated> all = make_instantiated();
  const auto found = std::find_if(all.begin(), all.end(), [&](const Instantiated& i) { return i.kernel == kernel; });
  return found == all.end() ? nullptr : &*found;
}

template <class T, Config c>
using PartialGemm = Gemm<Operands<T, kColumns, kColumns>, StoreSums<float>, TilesOf<T, c>, true>;

Tensor placeholder_of_partials(const Call& call) {
  return placeholder({call.batch, used_splits(call.k, size_of(call.a.dtype()), call.splits), call.m, call.n}, DType::f32);
}

template <class T, Config c, bool kSwapped>
Analysis analyze_partial(const ShapeValues& shape) {
  require(shape["K"] > 0, "shape: K is 0; it cannot be split");
  return with_call<T, T, Identity, false>(shape, [](const Call& call) {
    const Tensor partial = placeholder_of_partials(call);
    const int batch = call.batch * static_cast<int>(partial.shape(1));
    return analyze<PartialGemm<T, c>>(
        {ceil_div(kSwapped ? call.n : call.m, c.bm), ceil_div(kSwapped ? call.m : call.n, c.bn), batch},
        [&](auto& bind, auto& p) { bind_split(bind, p, call, kSwapped ? call.b : call.a, kSwapped ? call.a : call.b, partial, kSwapped); });
  });
}

template <class T>
Analysis analyze_sum(const ShapeValues& shape) {
  require(shape["K"] > 0, "shape: K is 0; it cannot be split");
  return with_call<T, T, Identity, false>(shape, [](const Call& call) {
    return analyze<SumPartials<Linear<T, Identity>, kSum.rows, kSum.cols>>(
        {ceil_div(call.m, kSum.rows), ceil_div(call.n, kSum.cols), call.batch},
        [&](auto& bind, auto& p) { bind_sum(bind, p, call, placeholder_of_partials(call)); });
  });
}

template <class T, bool kAddends>
Analysis analyze_gemv(const ShapeValues& shape) {
  require(shape["M"] == 1, "shape: M is {}; the kernel is for one row", shape["M"]);
  return with_call<T, T, Identity, kAddends>(shape, [](const Call& call) {
    return analyze<Gemv<T, Linear<T, Identity, LinearOptions{.addends = kAddends}>, kGemv.rows, kGemv.piece, kGemv.warps>>(
        {ceil_div(call.n, kGemv.rows), call.batch}, [&](auto& bind, auto& p) { bind_gemv(bind, p, call); });
  });
}

template <Config c>
using BlockScaled = BlockScaledGemm<bf16, TilesOf<fp8_e4m3, c>>;

template <Config c>
Analysis analyze_block_scaled(const ShapeValues& shape) {
  require(shape["batch"] == 1, "shape: batch is {}; products with block scales have none", shape["batch"]);
  return with_call<fp8_e4m3, bf16, Identity, false>(shape, [](Call call) {
    const Tensor a_scale = placeholder({call.m, ceil_div(call.k, 128)}, DType::f32);
    call.a_scale = &a_scale;
    call.b_scale = placeholder({ceil_div(call.n, 128), ceil_div(call.k, 128)}, DType::f32);
    return analyze<BlockScaled<c>>({ceil_div(call.m, c.bm), ceil_div(call.n, c.bn)},
                                   [&](auto& bind, auto& p) { bind_block_scaled(bind, p, call); });
  });
}

}  // namespace

std::vector<KernelVariant> registered() {
  using Recorder = void (*)(detail::TileRecorder&);
  constexpr Recorder kNoTiles = nullptr;
  std::vector<KernelVariant> variants;
  const auto add_spec = [&](std::string type, const char* source, std::string name, bool tma, Recorder record_tiles, auto analyze) {
    variants.push_back({make_spec({type, source, record_tiles}, tma, tma, std::move(name)), analyze});
  };
  const auto add = [&](const char* dtype, const GemmKernel& kernel, const char* suffix = "", bool tma = true) {
    const char* const layout = kernel.a_rows ? "tn" : kernel.b_rows ? "nn" : "nt";
    const Instantiated* const known = find_instantiated(kernel);
    add_spec(type_of(kernel), "tilewave/tile/gemm.tile.hpp",
             tw::format("gemm_{}_{}_{}x{}{}{}", dtype, layout, kernel.tile.bm, kernel.tile.bn, kernel.tile.cluster > 1 ? "_cluster" : "",
                        suffix),
             tma, known ? known->record_tiles : nullptr, known ? known->analyze : nullptr);
  };
  const auto plain = [](DType dtype, DType out, const Config& tile) { return GemmKernel{.dtype = dtype, .out = out, .tile = tile}; };
  for (const auto& [dtype, name] : {std::pair{DType::bf16, "bf16"}, std::pair{DType::f16, "f16"}}) {
    for (const Config& tile : kConfigs) {
      GemmKernel kernel = plain(dtype, dtype, tile);
      add(name, kernel);
      kernel.b_rows = true;
      if (tile.bn % 64 == 0) add(name, kernel);
      // Rarely needed: those that are chosen most.
      kernel.a_rows = true;
      if (tile == kConfigs[1] || tile == kConfigs[3]) add(name, kernel);
    }
  }
  for (const int i : {0, 3, 4}) add("tf32", plain(DType::f32, DType::f32, kConfigs[static_cast<std::size_t>(i)]));
  for (const int i : {0, 3}) {
    add("fp8", plain(DType::fp8_e4m3, DType::bf16, kConfigs[static_cast<std::size_t>(i)]));
    add("i8", plain(DType::i8, DType::i32, kConfigs[static_cast<std::size_t>(i)]));
  }
  // Epilogues, on the widest tiles that each may use and that are chosen for all but the largest products.
  const auto with = [&](Activation activation, bool addends, const Config& tile, DType dtype = DType::bf16) {
    return GemmKernel{.dtype = dtype, .out = dtype, .activation = activation, .addends = addends, .tile = tile};
  };
  add("bf16", with(Activation::gelu_erf, false, kConfigs[1]), "_gelu_erf");
  add("bf16", with(Activation::gelu_tanh, false, kConfigs[1]), "_gelu_tanh");
  add("bf16", with(Activation::silu, false, kConfigs[1]), "_silu");
  add("bf16", with(Activation::swiglu, false, kConfigs[1]), "_swiglu");
  add("bf16", with(Activation::swiglu, false, kConfigs[3]), "_swiglu");
  add("bf16", with(Activation::none, true, kConfigs[3]), "_addends");
  add("bf16", with(Activation::gelu_erf, true, kConfigs[4]), "_addends_gelu_erf");
  add("tf32", with(Activation::none, true, kConfigs[3], DType::f32), "_addends");
  // Tensors that TMA cannot take.
  add("bf16", plain(DType::bf16, DType::bf16, kConfigs[3]), "_strided", false);
  add("bf16", with(Activation::none, true, kConfigs[4]), "_addends_strided", false);

  add_spec(block_scaled_type_of(kBlockScaledConfigs[0]), "kernels/gemm/block_scaled.tile.hpp", "gemm_fp8_block_scaled_cluster", true,
           detail::tile_recorder<BlockScaled<kBlockScaledConfigs[0]>>(), analyze_block_scaled<kBlockScaledConfigs[0]>);
  add_spec(block_scaled_type_of(kBlockScaledConfigs[1]), "kernels/gemm/block_scaled.tile.hpp", "gemm_fp8_block_scaled", true,
           detail::tile_recorder<BlockScaled<kBlockScaledConfigs[1]>>(), analyze_block_scaled<kBlockScaledConfigs[1]>);
  const auto partial = [](const Config& tile) {
    return GemmKernel{.dtype = DType::bf16, .out = DType::f32, .partial = true, .tile = tile};
  };
  const char* const skinny = "kernels/gemm/skinny.tile.hpp";
  add_spec(type_of(GemvKernel{DType::bf16}), skinny, "gemv_bf16", true, kNoTiles, analyze_gemv<bf16, false>);
  add_spec(type_of(GemvKernel{DType::bf16, Activation::none, true}), skinny, "gemv_bf16_addends", true, kNoTiles, analyze_gemv<bf16, true>);
  add_spec(type_of(partial(kSwapped)), "tilewave/tile/gemm.tile.hpp", "gemm_bf16_swapped_partial", true,
           detail::tile_recorder<PartialGemm<bf16, kSwapped>>(), analyze_partial<bf16, kSwapped, true>);
  add_spec(type_of(partial(kConfigs[3])), "tilewave/tile/gemm.tile.hpp", "gemm_bf16_nt_128x128_partial", true,
           detail::tile_recorder<PartialGemm<bf16, kConfigs[3]>>(), analyze_partial<bf16, kConfigs[3], false>);
  add_spec(type_of(SumKernel{DType::bf16}), skinny, "gemm_bf16_sum_partials", true, kNoTiles, analyze_sum<bf16>);
  return variants;
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  const auto add = [&](std::string type, const char* source, std::string name, bool pieces = true) {
    specs.push_back(for_target(make_spec({type, source, nullptr}, pieces, pieces, std::move(name)), GpuTarget::cuda));
  };
  const char* const gemm = "tilewave/tile/gemm.tile.hpp";
  const char* const skinny = "kernels/gemm/skinny.tile.hpp";
  const std::vector<Config> tiles = configs(shared_bytes);
  const auto products = [&](const char* dtype, const GemmKernel& kernel, const char* suffix = "", bool pieces = true) {
    const char* const layout = kernel.a_rows ? "tn" : kernel.b_rows ? "nn" : "nt";
    for (const Config& tile : tiles) {
      if (kernel.addends && tile.bn > 128) continue;
      GemmKernel tiled = kernel;
      tiled.tile = tile;
      add(type_of(tiled), gemm, tw::format("gemm_{}_{}_{}x{}{}", dtype, layout, tile.bm, tile.bn, suffix), pieces);
    }
  };
  for (const auto& [dtype, name] : {std::pair{DType::bf16, "bf16"}, std::pair{DType::f16, "f16"}}) {
    products(name, {.dtype = dtype, .out = dtype});
    products(name, {.dtype = dtype, .out = dtype, .b_rows = true});
    products(name, {.dtype = dtype, .out = dtype, .a_rows = true, .b_rows = true});
  }
  products("tf32", {.dtype = DType::f32, .out = DType::f32});
  products("fp8", {.dtype = DType::fp8_e4m3, .out = DType::bf16});
  products("i8", {.dtype = DType::i8, .out = DType::i32});
  products("bf16", {.dtype = DType::bf16, .out = DType::bf16, .activation = Activation::gelu_erf}, "_gelu_erf");
  products("bf16", {.dtype = DType::bf16, .out = DType::bf16, .activation = Activation::swiglu}, "_swiglu");
  products("bf16", {.dtype = DType::bf16, .out = DType::bf16, .addends = true}, "_addends");
  products("bf16", {.dtype = DType::bf16, .out = DType::bf16}, "_strided", false);
  products("bf16", {.dtype = DType::bf16, .out = DType::f32, .partial = true}, "_partial");
  add(type_of(GemmKernel{.dtype = DType::bf16, .out = DType::f32, .partial = true, .tile = fit_generic(kSwapped, shared_bytes)}), gemm,
      "gemm_bf16_swapped_partial");
  add(block_scaled_type_of(fit_generic(kBlockScaledConfigs[1], shared_bytes)), "kernels/gemm/block_scaled.tile.hpp",
      "gemm_fp8_block_scaled");
  add(type_of(GemvKernel{DType::bf16}), skinny, "gemv_bf16");
  add(type_of(GemvKernel{DType::bf16, Activation::none, true}), skinny, "gemv_bf16_addends");
  add(type_of(SumKernel{DType::bf16}), skinny, "gemm_bf16_sum_partials");
  return specs;
}

}  // namespace tw::kernels::gemm
