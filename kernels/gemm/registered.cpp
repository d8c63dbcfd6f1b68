#include <algorithm>
#include <span>

#include "kernels/check.hpp"
#include "kernels/gemm/launch.hpp"
#include "tilewave/analyze.hpp"

// The kernels that are worth compiling ahead of time. Their names cost nothing; the analysis of a kernel is an instantiation for the
// analysis target, which a short list of configurations has.

namespace tw::kernels::gemm {

namespace {

struct Registered {
  Kernel kernel;
  bool pieces = true;  ///< TMA takes the tensors
};

constexpr auto kRegistered = [] {
  std::array<Registered, 48> all{};
  std::size_t count = 0;
  const auto add = [&](const Kernel& kernel, bool pieces = true) { all[count++] = {kernel, pieces}; };
  const auto& tiles = kProductTiles;
  constexpr std::size_t usual = 5;  // the first ones; the rest are for some sizes
  for (const DType dtype : {DType::bf16, DType::f16}) {
    for (const CostedTile& tile : std::span(tiles).first(usual)) {
      // Rarely needed: those that are chosen most.
      const bool chosen = tile == tiles[1] || tile == tiles[3], bf16 = dtype == DType::bf16;
      if (bf16 || chosen) add({.dtype = dtype, .tile = tile});
      if (!bf16 || !chosen) continue;
      add({.dtype = dtype, .layout = {.b_rows = true}, .tile = tile});
      add({.dtype = dtype, .layout = {.a_rows = true, .b_rows = true}, .tile = tile});
    }
  }
  for (const CostedTile& tile : std::span(tiles).subspan(usual)) add({.tile = tile});
  for (const int i : {0, 3, 4}) add({.dtype = DType::f32, .tile = tiles[i]});
  for (const int i : {0, 3}) {
    add({.dtype = DType::fp8_e4m3, .tile = tiles[i]});
    add({.dtype = DType::i8, .tile = tiles[i]});
  }
  // Epilogues, on the widest tiles that each may use and that are chosen for all but the largest products.
  for (const Activation activation : {Activation::gelu_erf, Activation::silu, Activation::swiglu})
    add({.activation = activation, .tile = tiles[1]});
  add({.activation = Activation::swiglu, .tile = tiles[3]});
  add({.addends = true, .tile = tiles[3]});
  for (const CostedTile& tile : kTeamTiles) add({.tile = tile});
  add({.activation = Activation::gelu_erf, .tile = kTeamTiles[0]});
  add({.addends = true, .begins = true, .tile = tiles[3]});
  add({.activation = Activation::gelu_erf, .addends = true, .tile = tiles[4]});
  add({.dtype = DType::f32, .addends = true, .tile = tiles[3]});
  // Tensors that TMA cannot take.
  add({.tile = tiles[3]}, false);
  add({.addends = true, .tile = tiles[4]}, false);
  for (const CostedTile& tile : {kBlockScaledTiles[0], kBlockScaledTiles[2]})
    add({.dtype = DType::fp8_e4m3, .form = Kernel::block_scaled, .tile = tile});
  add({.form = Kernel::gemv});
  add({.form = Kernel::gemv, .addends = true});
  add({.form = Kernel::skinny, .tile = skinny_tile(8)});
  add({.form = Kernel::skinny, .addends = true, .tile = skinny_tile(16)});
  add({.form = Kernel::partial, .tile = tiles[3]});
  add({.form = Kernel::sum});
  add({.form = Kernel::stream_k, .tile = tiles[1]});
  if (count != all.size()) throw "the array's size is not the number of kernels";
  return all;
}();

/// count(call, partial) for a call of the shape, on placeholders. `partial`: where splits of K meet.
Analysis with_call(const Kernel& k, const ShapeValues& shape, Analysis (*count)(const Call&, const Tensor& partial)) {
  const bool partial = k.form == Kernel::partial || k.form == Kernel::sum, block_scaled = k.form == Kernel::block_scaled;
  const std::int64_t m = shape["M"], n = shape["N"], depth = shape["K"], batch = shape["batch"];
  require(depth > 0 || (!partial && k.form != Kernel::stream_k), "shape: K is 0; it cannot be split");
  require(m == 1 || k.form != Kernel::gemv, "shape: M is {}; the kernel is for one row", m);
  require((m <= k.tile.bn && depth % kSkinnyPanel == 0) || k.form != Kernel::skinny,
          "shape: M is {} and K {}; the kernel is for up to {} rows and multiples of {}", m, depth, k.tile.bn, kSkinnyPanel);
  require(batch == 1 || !block_scaled, "shape: batch is {}; products with block scales have none", batch);
  const DType out = result_of(k.dtype);
  const Tensor d = placeholder({batch, m, k.activation == Activation::swiglu ? n / 2 : n}, out), bias = placeholder({n}, out);
  const Tensor residual = placeholder(d.shape(), out), a_scale = placeholder({m, (depth + 127) / 128}, DType::f32);
  Call call = make_call(placeholder({batch, m, depth}, k.dtype), placeholder({batch, n, depth}, k.dtype).transpose(1, 2), d,
                        {.bias = shape["bias"] ? &bias : nullptr, .activation = k.activation, .residual = k.addends ? &residual : nullptr});
  if (block_scaled) {
    call.a_scale = &a_scale;
    call.b_scale = placeholder({(n + 127) / 128, (depth + 127) / 128}, DType::f32);
  }
  const int splits = partial ? used_splits(depth, size_of(k.dtype), std::max(shape.integer("splits"), 1)) : 1;
  return count(call, placeholder({batch, splits, m, n}, DType::f32));
}

template <Kernel k>
Analysis count(const Call& call, const Tensor& partial) {
  constexpr int units = 132;  // an H200's
  const Launch x = k.form == Kernel::stream_k
                       ? make_stream_k_launch(call, k, placeholder({units, k.tile.bm, k.tile.bn}, DType::f32), nullptr)
                       : make_launch(call, k, partial);
  using Act = conditional<k.activation == Activation::swiglu, SwiGlu, conditional<k.begins, Identity, AnyActivation>>;
  return analyze<HostKernel<k, Act>>(x.grid, [&](auto& bind, auto& p) { bind_launch(bind, p, call, x); });
}

/// One instantiation counts for all that the host chooses when it launches: activations, addends, and how operands are stored, which does
/// not change the counts.
constexpr Kernel counted(Kernel k) {
  k.layout = {};
  if (k.activation == Activation::swiglu || k.form == Kernel::block_scaled || k.begins) return k;
  k.activation = Activation::none;
  k.addends = true;
  return k;
}

template <std::size_t i>
KernelVariant variant() {
  constexpr auto entry = kRegistered[i];
  const std::string type = type_of(entry.kernel);
  return {make_spec({type, source_of(entry.kernel), detail::tile_recorder<HostKernel<entry.kernel>>()}, entry.pieces, entry.pieces,
                    name_of(entry.kernel, entry.pieces)),
          [](const ShapeValues& shape) { return with_call(kRegistered[i].kernel, shape, count<counted(kRegistered[i].kernel)>); }};
}

}  // namespace

std::vector<KernelVariant> registered() {
  return []<std::size_t... i>(std::index_sequence<i...>) { return std::vector<KernelVariant>{variant<i>()...}; }
  (std::make_index_sequence<kRegistered.size()>());
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  const auto add = [&](const Kernel& k, bool pieces = true) {
    specs.push_back(for_target(make_spec({type_of(k), source_of(k), nullptr}, pieces, pieces, name_of(k, pieces)), GpuTarget::cuda));
  };
  const auto add_all = [&](Kernel k, bool pieces = true) {
    for (const Config& tile : configs(shared_bytes)) {
      if (k.addends && tile.bn > 128) continue;
      k.tile = tile;
      add(k, pieces);
    }
  };
  for (const DType dtype : {DType::bf16, DType::f16})
    for (const Layout& layout : {Layout{}, Layout{.b_rows = true}, Layout{.a_rows = true, .b_rows = true}})
      add_all({.dtype = dtype, .layout = layout});
  for (const DType dtype : {DType::f32, DType::fp8_e4m3, DType::i8}) add_all({.dtype = dtype});
  add_all({.activation = Activation::gelu_erf});
  add_all({.activation = Activation::swiglu});
  add_all({.addends = true});
  add_all({}, false);
  add_all({.form = Kernel::partial});
  add_all({.form = Kernel::stream_k});
  for (const int m : {8, kMostSkinnyRows}) add({.form = Kernel::skinny, .tile = fit_skinny(m, shared_bytes)});
  add({.dtype = DType::fp8_e4m3, .form = Kernel::block_scaled, .tile = fit_generic(kBlockScaledTiles[2], shared_bytes)});
  add({.form = Kernel::gemv});
  add({.form = Kernel::gemv, .addends = true});
  add({.form = Kernel::sum});
  return specs;
}

}  // namespace tw::kernels::gemm
