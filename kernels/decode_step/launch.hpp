#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <numbers>
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
  WeightFormat format = WeightFormat::plain;  ///< or int8 or fp8
  DType dtype = DType::bf16;
  int head_dim = 128;
  int group = 4;      ///< query heads for each head of keys and values
  int sequences = 8;  ///< that it has room for
  int stages = 6;
  auto operator<=>(const Kernel&) const = default;
};
/// Kernel::sequences for a step of so many.
constexpr int room_for(int sequences) { return sequences <= 8 ? 8 : kMostSequences; }
/// The format of a kernel's weights as a type, in a std::type_identity.
template <WeightFormat format, class T>
constexpr auto weight_type() {
  if constexpr (format == WeightFormat::plain)
    return std::type_identity<Plain<T>>{};
  else
    return dequant_gemm::format_type<format, 0, false>();
}
/// The same kernel as a type.
template <Kernel k>
using HostKernel = DecodeStep<typename decltype(weight_type<k.format, ElementOf<k.dtype>>())::type, ElementOf<k.dtype>, k.head_dim, k.group,
                              k.sequences, k.stages>;

/// A view of rows of weights in groups of 8, [groups of `apart` rows, K / panel, apart, panel], from which a slot gets two groups.
inline Tensor in_panels(const Weight& weight, std::int64_t apart, int panel) {
  const Tensor& values = weight.values();
  const std::int64_t rows = weight.rows(), k = weight.columns();
  return Tensor::borrow(values.data(), {rows / apart, k / panel, apart, panel}, values.dtype(), values.device(), {apart * k, panel, k, 1});
}

/// A step with the memory that it needs while it runs.
struct Launch {
  const Decoder& decoder;
  const Step& step;
  int sequences = 0, splits = 0;
  Tiles tiles = {};
  Tensor x, q, attended, product, parts, peaks, totals;
  Tensor counters, arrivals;  ///< one behind the other

  /// `units`: the blocks that run at once.
  Launch(const Decoder& d, const Step& s, int units, const Stream& stream)
      : decoder(d), step(s), sequences(static_cast<int>(s.ids.shape(0))) {
    const int hidden = static_cast<int>(d.norms.shape(1)), rows = sequences * d.heads;
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
    const auto memory = [&](Shape shape, DType dtype) { return workspace(std::move(shape), dtype, stream); };
    const DType dtype = d.norms.dtype();
    x = d.has_head() ? memory({sequences, hidden}, dtype) : s.x;
    q = memory({sequences, d.heads * d.head_dim}, dtype);
    attended = memory(q.shape(), dtype);
    product = memory({sequences, d.down.columns()}, dtype);
    parts = memory({splits, rows, d.head_dim}, DType::f32);
    peaks = memory({rows, splits}, DType::f32);
    totals = memory({rows, splits}, DType::f32);
    const std::int64_t parts_of_all = 1 + layer_parts * d.layers, heads_of_all = std::int64_t{d.layers} * sequences * d.kv_heads;
    const Tensor zeros = memory({parts_of_all + heads_of_all}, DType::i32);
    fill_bytes(zeros.data(), static_cast<std::size_t>(zeros.numel()) * size_of(DType::i32), 0, stream);
    counters = zeros.slice(0, 0, parts_of_all);
    arrivals = zeros.slice(0, parts_of_all, zeros.shape(0));
  }

  TileGrid grid() const { return {.m = tiles.count()}; }

  template <class Params>
  void bind_to(auto& bind, Params& p) const {
    const Decoder& d = decoder;
    constexpr int kGroup = 8, kWarps = 8;
    const Window window{std::countr_zero(unsigned{kGroup}), std::countr_zero(unsigned{kWarps})};
    const auto bind_weight = [&](auto& to, const Weight& weight, std::int64_t apart) {
      bind(to.rows, in_panels(weight, apart, Params::panel), window);
      if constexpr (!Params::plain) bind(to.scales, weight.quantized.scales.reshape({1, weight.rows()}));
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
    bind(p.x, x);
    bind(p.q, q);
    bind(p.attended, attended);
    bind(p.attended_heads, attended.reshape({std::int64_t{sequences} * d.heads, d.head_dim}));
    bind(p.product, product);
    bind(p.parts, parts);
    p.peaks = peaks.data<float>();
    p.totals = totals.data<float>();
    p.counters = reinterpret_cast<u32*>(counters.data<std::int32_t>());
    p.arrivals = reinterpret_cast<u32*>(arrivals.data<std::int32_t>());
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
};

}  // namespace tw::kernels::decode_step
