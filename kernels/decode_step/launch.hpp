#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <numbers>
#include <numeric>
#include <type_traits>
#include <utility>

#include "kernels/decode_step/decode_step.hpp"
#include "kernels/decode_step/decode_step.tile.hpp"
#include "kernels/dequant_gemm/formats.hpp"
#include "kernels/named.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::decode_step {

/// One of the family's kernels by the values that name it.
struct Kernel {
  WeightFormat format = WeightFormat::plain;  ///< or int8, fp8 or int4
  DType dtype = DType::bf16;
  int head_dim = 128;
  int group = 4;      ///< query heads for each head of keys and values
  int sequences = 8;  ///< that it has room for
  int stages = 6;
  int code_group = 0;  ///< of int4: codes with one scale
  bool zeros = false;  ///< of int4: zero points
  auto operator<=>(const Kernel&) const = default;
};
/// Kernel::sequences for a step of so many.
constexpr int room_for(int sequences) { return sequences == 1 ? 1 : sequences <= 8 ? 8 : kMostSequences; }
/// The format of a kernel's weights as a type, in a std::type_identity.
template <WeightFormat format, int code_group, bool zeros, class T>
constexpr auto weight_type() {
  if constexpr (format == WeightFormat::plain)
    return std::type_identity<Plain<T>>{};
  else
    return dequant_gemm::format_type<format, code_group, zeros>();
}
/// The same kernel as a type.
template <Kernel k>
using HostKernel = DecodeStep<typename decltype(weight_type<k.format, k.code_group, k.zeros, ElementOf<k.dtype>>())::type,
                              ElementOf<k.dtype>, k.head_dim, k.group, k.sequences, k.stages>;

/// A view of rows of weights in groups of 8, [groups of `apart` rows, panels, apart, elements of a panel], from which a slot gets two
/// groups.
inline Tensor in_panels(const Weight& weight, std::int64_t apart, int panel) {
  const Tensor& values = weight.values();
  const std::int64_t rows = values.shape(0), k = values.shape(1);
  return Tensor::borrow(values.data(), {rows / apart, k / panel, apart, panel}, values.dtype(), values.device(), {apart * k, panel, k, 1});
}

/// A step with the memory that it needs while it runs.
struct Launch {
  const Decoder& decoder;
  const Step& step;
  int sequences = 0, splits = 0;
  Tiles tiles = {};
  // What tiles hand to other tiles: see the kernel's Params.
  Tensor x, middle, q, attended, new_keys, new_values, product, parts, peaks, totals;

  /// `units`: the blocks that run at once.
  Launch(const Decoder& d, const Step& s, int units, const Stream& stream)
      : decoder(d), step(s), sequences(static_cast<int>(s.ids.shape(0))) {
    const int hidden = static_cast<int>(d.norms.shape(1));
    splits = std::clamp(units / (sequences * d.kv_heads), 1, 32);
    const int pairs[] = {(d.heads + 2 * d.kv_heads) * d.head_dim / 16,
                         sequences * d.kv_heads * splits,
                         hidden / 16,
                         static_cast<int>(d.down.columns()) / 8,
                         hidden / 16,
                         d.has_head() ? ceil_div(static_cast<int>(d.head.rows()), 16) : 0,
                         ceil_div(hidden, d.head_dim)};
    int end = 0;
    for (int i = 0; i < static_cast<int>(std::size(pairs)); ++i) {
      constexpr int kHeadPairs = 4;
      const auto part = static_cast<Part>(i);
      const bool product = part != Part::attention && part != Part::embed;
      tiles.pairs[i] = pairs[i];
      tiles.in_tile[i] = !product ? 1 : part == Part::head ? kHeadPairs : ceil_div(pairs[i], units);
      const int count = ceil_div(pairs[i], tiles.in_tile[i]);
      if (part == Part::head)
        tiles.head = count;
      else if (part == Part::embed)
        tiles.embed = count;
      else
        tiles.end[i] = end += count;
    }
    tiles.layers = d.layers;
    allocate_awaited(hidden, stream);
  }

  TileGrid grid() const { return {.m = tiles.count()}; }

  template <class Params>
  void bind_to(auto& bind, Params& p) const {
    const Decoder& d = decoder;
    constexpr int kGroup = 8, kWarps = 8;
    const Window window{std::countr_zero(unsigned{kGroup}), std::countr_zero(unsigned{kWarps})};
    const auto bind_weight = [&](auto& to, const Weight& weight, std::int64_t apart) {
      bind(to.rows, in_panels(weight, apart, Params::panel_codes), window);
      const QuantizedMatrix& q = weight.quantized;
      const bool by_row = !Params::plain && !Params::by_group;
      const Tensor row_scales = by_row ? q.scales.reshape({1, weight.rows()}) : Tensor();
      bind(to.scales, by_row ? &row_scales : nullptr);
      bind(to.group_scales, Params::by_group ? &q.scales : nullptr);
      bind(to.zeros, Params::by_group && q.zeros.numel() > 0 ? &q.zeros : nullptr);
    };
    bind_weight(p.qkv, d.qkv, d.head_dim / 2);
    bind_weight(p.out, d.out, kGroup);
    bind_weight(p.gate_up, d.gate_up, d.gate_up.rows() / d.layers / 2);
    bind_weight(p.down, d.down, kGroup);
    bind_weight(p.head, d.has_head() ? d.head : d.down, kGroup);  // without a head there is no tile of it
    bind(p.scores, d.has_head() ? &step.scores : nullptr);
    bind(p.embedding, d.embedding);
    const std::int64_t hidden = d.norms.shape(1);
    bind(p.norms, Tensor::borrow(d.norms.data(), {d.norms.shape(0), kGroup, hidden}, d.norms.dtype(), d.norms.device(), {hidden, 0, 1}));
    const auto by_token = [](const Tensor& t) {
      return Tensor::borrow(t.data(), {t.shape(0), 1, t.shape(1) * t.shape(2), t.shape(3) * t.shape(4)}, t.dtype(), t.device(),
                            {t.stride(0), 0, t.stride(2), 1});
    };
    bind(p.keys, by_token(step.keys));
    bind(p.values, by_token(step.values));
    bind(p.cosines, d.cosines);
    bind(p.sines, d.sines);
    bind(p.last, d.has_head() ? nullptr : &step.x);
    bind(p.x, x);
    bind(p.middle, middle);
    bind(p.q, q);
    bind(p.attended, attended);
    bind(p.attended_heads, attended.reshape({d.layers, std::int64_t{sequences} * d.kv_heads, d.heads / d.kv_heads, d.head_dim}));
    bind(p.new_keys, new_keys);
    bind(p.new_values, new_values);
    bind(p.product, product);
    bind(p.parts, parts);
    bind(p.peaks, peaks);
    bind(p.totals, totals);
    p.ids = step.ids.data<std::int32_t>();
    p.lengths = step.lengths.data<std::int32_t>();
    p.pages = step.pages.data<std::int32_t>();
    p.tiles = tiles;
    p.sequences = sequences;
    p.heads = d.heads;
    p.kv_heads = d.kv_heads;
    p.page_count = static_cast<int>(step.pages.shape(1));
    p.splits = splits;
    p.epsilon = d.epsilon;
    p.scale = std::numbers::log2e_v<float> / std::sqrt(static_cast<float>(d.head_dim));
  }

 private:
  /// Allocates what tiles hand to other tiles in one piece of memory. One operation fills it with ones: no element is there yet.
  void allocate_awaited(std::int64_t hidden, const Stream& stream) {
    struct Wanted {
      Tensor& tensor;
      Shape shape;
      DType dtype;
      std::size_t bytes() const {
        constexpr std::size_t kAlignment = 256;
        const std::int64_t elements = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies());
        return (static_cast<std::size_t>(elements) * size_of(dtype) + kAlignment - 1) / kAlignment * kAlignment;
      }
    };
    const Decoder& d = decoder;
    const std::int64_t layers = d.layers, n = sequences, groups = n * d.kv_heads, group = d.heads / d.kv_heads, dim = d.head_dim;
    const DType dtype = d.norms.dtype();
    const Wanted all[] = {{x, {layers + 1, n, hidden}, dtype},
                          {middle, {layers, n, hidden}, dtype},
                          {q, {layers, n, d.heads * dim}, dtype},
                          {attended, {layers, n, d.heads * dim}, dtype},
                          {new_keys, {layers, n, d.kv_heads * dim}, dtype},
                          {new_values, {layers, n, d.kv_heads * dim}, dtype},
                          {product, {layers, n, d.down.columns()}, dtype},
                          {parts, {layers, splits * groups, group, dim}, DType::f32},
                          {peaks, {layers, groups, group, splits}, DType::f32},
                          {totals, {layers, groups, group, splits}, DType::f32}};
    std::size_t bytes = 0;
    for (const Wanted& wanted : all) bytes += wanted.bytes();
    const std::shared_ptr<void> memory = allocate_workspace(bytes, stream);
    fill_bytes(memory.get(), bytes, 0xff, stream);
    auto* at = static_cast<std::byte*>(memory.get());
    for (const Wanted& wanted : all) {
      wanted.tensor = Tensor::borrow(at, wanted.shape, wanted.dtype, stream.device(), {}, memory);
      at += wanted.bytes();
    }
  }
};

}  // namespace tw::kernels::decode_step
