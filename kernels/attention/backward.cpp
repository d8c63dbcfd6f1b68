#include "kernels/attention/backward.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "kernels/attention/delta.tile.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/packed_rows.tile.hpp"
#include "kernels/attention/packed_tiles.tile.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/launch.hpp"

namespace tw {
namespace kernels::attention {

namespace {

/// A tensor of the call that the forward pass does not have: of the dtype and the shape of one that it has.
void check_like(const Form& form, NamedTensor argument, NamedTensor like) {
  const auto& [name, t] = argument;
  check_operand(form.op, name, *t, like.tensor->dtype(), like.tensor->device());
  form.require(t->shape() == like.tensor->shape(), "{} is {}; it must have {}'s shape, {}", name, *t, like.name, *like.tensor);
  form.require(t->stride(t->rank() - 1) == 1 || t->numel() == 0, "{} is {}; its last dimension must be contiguous", name, *t);
}

template <class P>
void fill_padded(P& p, const BackwardCall& call) {
  p.sequences = call.padded_sequences;
  p.cu = call.forward.cu_q, p.used = call.forward.used_q;
}

/// delta and lse_log2. Rows are read in pieces, so a tile is as wide as the next size.
template <class T, int R, int C>
void launch_delta(const BackwardCall& call) {
  const Tensor& delta = call.delta;
  const TileGrid grid{ceil_div(static_cast<int>(delta.shape(2)), R), static_cast<int>(delta.shape(0) * delta.shape(1))};
  launch<Delta<T, R, C>>(call.forward.stream, grid, [&](auto& bind, auto& p) {
    bind(p.o, call.forward.o);
    bind(p.d_o, call.d_o);
    bind(p.dq_sum, call.dq_sum.numel() > 0 ? &call.dq_sum : nullptr);
    p.turns = call.turns.numel() > 0 ? reinterpret_cast<u32*>(call.turns.template data<std::int32_t>()) : nullptr;
    p.turn_queries = call.turns.numel() > 0 ? static_cast<int>(delta.shape(2) / call.turns.shape(2)) : 1;
    p.lse = call.lse;
    p.lse_log2 = call.lse_log2.template data<float>();
    p.delta = delta.template data<float>();
    p.queries = static_cast<int>(call.forward.q.shape(2));
    p.heads = static_cast<int>(delta.shape(1));
    p.padded = static_cast<int>(delta.shape(2));
    fill_padded(p.packed, call);
  });
}

template <class T, int R, int C>
void launch_scaled_sum(const BackwardCall& call) {
  const Tensor& sum = call.dq_sum;
  const TileGrid grid{ceil_div(static_cast<int>(sum.shape(2)), R), static_cast<int>(sum.shape(0) * sum.shape(1))};
  launch<ScaledSum<T, R, C>>(call.forward.stream, grid, [&](auto& bind, auto& p) {
    bind(p.sum, sum);
    bind(p.dq, call.dq);
    p.scale = call.forward.scale;
    p.heads = static_cast<int>(sum.shape(1));
    fill_padded(p.packed, call);
  });
}

/// Calls f.operator()<T, R, C>() for the call's type and rows that hold its columns.
template <class F>
void with_rows(const BackwardCall& call, F f) {
  with_float_type(call.d_o.dtype(), [&]<class T>(std::type_identity<T>) {
    if (!call.forward.stream.device().is_cuda()) return f.template operator()<T, 16, 256>();
    const std::int64_t dim = std::max(call.dq.shape(3), call.d_o.shape(3));
    if constexpr (!is_same<T, float>) {
      if (dim <= 64) return f.template operator()<T, 64, 64>();
      if (dim <= 128) return f.template operator()<T, 32, 128>();
      f.template operator()<T, 16, 256>();
    }
  });
}

void run_sink_gradient(const BackwardCall& call) {
  constexpr int kQueries = 1024;
  launch<SinkGradient<kQueries>>(call.forward.stream, {static_cast<int>(call.forward.q.shape(1))}, [&](auto& bind, auto& p) {
    bind(p.lse_log2, call.lse_log2);
    bind(p.delta, call.delta);
    p.sink = call.forward.sink;
    p.d_sink = call.d_sink;
    p.batches = has_queries(call) ? static_cast<int>(call.forward.q.shape(0)) : 0;
  });
}

}  // namespace

TileGrid key_gradients_grid(const BackwardCall& call, int tile_keys) {
  const int heads = call.query_lists.head_count > 0 ? call.query_lists.head_count : static_cast<int>(call.dk.shape(0) * call.dk.shape(1));
  const auto bytes = [](const Tensor& t) { return t.numel() * static_cast<std::int64_t>(size_of(t.dtype())); };
  const std::int64_t passing = bytes(call.forward.q) + bytes(call.d_o) + bytes(call.dq_sum);
  const int group = heads_in_cache(passing / std::max(1, heads), heads);
  const int keys = static_cast<int>(call.dk.shape(2));
  return {call.packed() ? keys / tile_keys + call.forward.batch : ceil_div(keys, tile_keys), group, heads / group};
}
TileGrid mask_gradient_grid(const BackwardCall& call, const AttentionConfig& config) {
  const Tensor& d_mask = *call.d_mask;
  return {ceil_div(static_cast<int>(d_mask.shape(2)), config.rows), ceil_div(static_cast<int>(d_mask.shape(3)), config.keys),
          static_cast<int>(d_mask.shape(0) * d_mask.shape(1))};
}
int padded_queries(int queries) {
  constexpr int kMultiple = 128;
  return std::max(1, ceil_div(queries, kMultiple)) * kMultiple;
}
int padded_queries(const BackwardCall& call) {
  const int queries = static_cast<int>(call.forward.q.shape(2));
  return call.packed() ? std::max(1, queries / kPaddedQueries + call.forward.batch) * kPaddedQueries : padded_queries(queries);
}

namespace {

bool has_sequences(const BackwardCall& call) { return !call.packed() || call.forward.batch > 0; }

}  // namespace

bool has_queries(const BackwardCall& call) { return call.forward.q.numel() > 0 && has_sequences(call); }
bool has_keys(const BackwardCall& call) { return call.dk.numel() > 0 && has_sequences(call); }

void run_checked_sequences(BackwardCall& call) {
  AttentionCall& forward = call.forward;
  const int batch = forward.batch, blocks = padded_queries(call) / kPaddedQueries;
  const std::int64_t per_side = 2 * batch + 1;
  call.lengths = workspace({2 * per_side + blocks}, DType::i32, forward.stream);
  std::int32_t* const memory = call.lengths.data<std::int32_t>();
  launch<CheckedSequences<256>>(forward.stream, {batch + 1}, [&](auto&, auto& p) {
    const auto fill = [&](auto& side, const std::int32_t* cu, const std::int32_t* used, std::int64_t rows, std::int32_t* to) {
      side.cu = cu, side.used = used;
      side.to_cu = to, side.to_used = to + batch + 1;
      side.rows = static_cast<int>(rows);
    };
    fill(p.q, forward.cu_q, forward.used_q, forward.q.shape(2), memory);
    fill(p.k, forward.cu_k, forward.used_k, forward.k.shape(2), memory + per_side);
    p.batch = batch;
    p.sequences = memory + 2 * per_side;
    p.blocks = blocks;
  });
  forward.cu_q = memory, forward.used_q = memory + batch + 1;
  forward.cu_k = memory + per_side, forward.used_k = memory + per_side + batch + 1;
  call.padded_sequences = memory + 2 * per_side;
}

void run_zero_unused(const BackwardCall& call) {
  constexpr int kRows = 64;
  const AttentionCall& forward = call.forward;
  const int rows = static_cast<int>(std::max(call.dq.shape(2), call.dk.shape(2)));
  with_float_type(call.dq.dtype(), [&]<class T>(std::type_identity<T>) {
    launch<ZeroUnused<T, kRows>>(forward.stream, {ceil_div(rows, kRows), 3}, [&](auto& bind, auto& p) {
      bind(p.dq, call.dq);
      bind(p.dk, call.dk);
      bind(p.dv, call.dv);
      p.cu_q = forward.cu_q, p.cu_k = forward.cu_k, p.used_q = forward.used_q, p.used_k = forward.used_k;
      p.batch = forward.batch;
    });
  });
}

Tensor list_tiles(const BackwardCall& call, TilesOf of, const TileGrid& grid, int tile_rows) {
  // Each sequence is compared with each other: beyond some thousands that takes longer than it saves.
  constexpr int kMostSequences = 4096;
  const AttentionCall& forward = call.forward;
  const Device device = forward.stream.device();
  if (!call.packed() || !device.is_cuda() || forward.batch > kMostSequences) return {};
  if (grid.count() < 2 * usable_units(forward)) return {};
  Tensor tiles = workspace({grid.m, PackedTile::numbers}, DType::i32, forward.stream);
  launch<PackedTiles<256>>(forward.stream, {forward.batch}, [&](auto&, auto& p) {
    p.cu_q = forward.cu_q, p.used_q = forward.used_q, p.queries = static_cast<int>(forward.q.shape(2));
    p.cu_k = forward.cu_k, p.used_k = forward.used_k, p.keys = forward.keys;
    if (of != TilesOf::queries) {
      std::swap(p.cu_q, p.cu_k);
      std::swap(p.used_q, p.used_k);
      std::swap(p.queries, p.keys);
    }
    p.longest_first = of == TilesOf::keys;
    p.batch = forward.batch;
    p.tile_rows = tile_rows;
    p.count = grid.m;
    p.tiles = tiles.data<std::int32_t>();
  });
  return tiles;
}

void run_delta(BackwardCall& call, bool adds_up) {
  const Tensor& q = call.forward.q;
  const std::int64_t batch = std::max<std::int64_t>(1, q.shape(0)), heads = std::max<std::int64_t>(1, q.shape(1));
  const int padded = padded_queries(call);
  const Tensor memory = workspace({2, batch, heads, padded}, DType::f32, call.forward.stream);
  call.lse_log2 = memory.select(0, 0);
  call.delta = memory.select(0, 1);
  if (adds_up && q.numel() > 0) {
    call.dq_sum = workspace({batch, heads, call.packed() ? padded : q.shape(2), q.shape(3)}, DType::f32, call.forward.stream);
    if (call.deterministic)
      call.turns = workspace({batch, heads, call.delta.shape(2) / all_gradients_config(call).rows}, DType::i32, call.forward.stream);
  }
  if (has_queries(call)) with_rows(call, [&]<class T, int kRows, int kCols>() { launch_delta<T, kRows, kCols>(call); });
}
void run_scaled_sum(const BackwardCall& call) {
  with_rows(call, [&]<class T, int kRows, int kCols>() { launch_scaled_sum<T, kRows, kCols>(call); });
}

namespace {

/// Checks the output for the mask's gradient and returns it as [batch, head, query, key].
Tensor check_d_mask(const Form& form, const AttentionCall& forward, const AttentionBackwardOptions& options) {
  const Tensor& d_mask = *options.d_mask;
  const Tensor* const mask = options.forward.mask;
  form.require(mask != nullptr, "d_mask is {}, but forward.mask is not given", d_mask);
  form.require(mask->dtype() != DType::boolean, "d_mask is {}, but forward.mask is {}; only masks that are added have a gradient", d_mask,
               *mask);
  form.require(!options.forward.blocks, "d_mask is given; it is not supported with forward.blocks");
  form.require(d_mask.dtype() == DType::f32 || d_mask.dtype() == mask->dtype(), "d_mask is {}; it must be f32 or of the mask's dtype, {}",
               d_mask, name_of(mask->dtype()));
  check_operand(form.op, "d_mask", d_mask, d_mask.dtype(), forward.o.device());
  form.require(d_mask.shape() == mask->shape() && d_mask.is_contiguous(), "d_mask is {}; it must be contiguous, of the mask's shape, {}",
               d_mask, *mask);
  Shape shape(static_cast<std::size_t>(4 - d_mask.rank()), 1);
  shape.insert(shape.end(), d_mask.shape().begin(), d_mask.shape().end());
  // Blocks of scores are counted in 32 bits. The smallest ones have 64 queries and 16 keys.
  const auto shared_by = [&](std::size_t dim, std::int64_t extent) { return shape[dim] == 1 ? static_cast<double>(extent) : 1.0; };
  const std::int64_t more = form.cu_seqlens_q ? forward.batch : 1;
  const double blocks = (form.cu_seqlens_q ? 1.0 : shared_by(0, forward.batch)) * shared_by(1, forward.q.shape(1)) *
                        shared_by(2, forward.q.shape(2) / 64 + more) * shared_by(3, forward.keys / 16 + more);
  form.require(blocks < 2147483648.0, "d_mask is {}; its elements would be sums over {:.0f} blocks of 64 x 16 scores, limited to 2^31 - 1",
               d_mask, blocks);
  return d_mask.reshape(std::move(shape));
}

/// What both forms check. `call`: of check_common(); `sequences`: more inputs, null where they are not given.
BackwardCall check_gradients(const Form& form, const AttentionCall& forward, const NamedTensor (&inputs)[6],
                             const NamedTensor (&outputs)[5], const AttentionBackwardOptions& options,
                             std::span<const NamedTensor> sequences) {
  BackwardCall call{.forward = forward};
  const Device device = forward.o.device();
  check_like(form, inputs[5], inputs[3]);
  for (int i = 0; i < 3; ++i) check_like(form, outputs[i], inputs[i]);
  const std::int64_t heads = forward.q.shape(1), queries = forward.q.shape(2);
  call.lse = form.elements<float>(inputs[4], form.cu_seqlens_q ? Shape{heads, queries} : Shape{forward.q.shape(0), heads, queries}, device);
  if (options.d_sink) form.require(forward.sink != nullptr, "d_sink is {}, but forward.sink is not given", *options.d_sink);
  call.d_sink = form.elements<float>(outputs[3], {heads}, device);
  if (options.d_mask) call.d_mask = check_d_mask(form, forward, options);
  for (const NamedTensor& output : outputs) {
    if (output.tensor == nullptr) continue;
    check_output(form.op, output.name, *output.tensor);
    for (const NamedTensor& input : inputs) check_disjoint(form.op, output, {input});
    check_disjoint(form.op, output,
                   {{"forward.alibi_slopes", options.forward.alibi_slopes},
                    {"forward.sink", options.forward.sink},
                    {"forward.mask", options.forward.mask},
                    {"forward.dropout_state", options.forward.dropout_state}});
    if (const AttentionBlocks* const blocks = options.forward.blocks)
      check_disjoint(
          form.op, output,
          {{"forward.blocks.mask", blocks->mask}, {"forward.blocks.indices", blocks->indices}, {"forward.blocks.counts", blocks->counts}});
    for (const NamedTensor& t : sequences) check_disjoint(form.op, output, {t});
    for (const NamedTensor& other : outputs)
      if (&other < &output) check_disjoint(form.op, output, {other});
  }
  call.deterministic = options.deterministic;
  const auto by_head = [&](const NamedTensor& t) { return (form.cu_seqlens_q ? as_batch(*t.tensor) : *t.tensor).transpose(1, 2); };
  call.d_o = by_head(inputs[5]);
  call.dq = by_head(outputs[0]);
  call.dk = by_head(outputs[1]);
  call.dv = by_head(outputs[2]);
  return call;
}

void run_mask_gradient(const BackwardCall& call) {
  const Tensor& d_mask = *call.d_mask;
  const Stream& stream = call.forward.stream;
  if (d_mask.numel() == 0) return;
  if (!has_queries(call) || !has_keys(call)) return d_mask.copy_from(Tensor::zeros(d_mask.shape(), d_mask.dtype(), stream), stream);
  stream.device().is_cuda() ? mask_gradient_on_gpu(call) : mask_gradient_on_cpu(call);
}

AttentionOptions without_lse(AttentionOptions options) {
  options.lse = nullptr;
  return options;
}

}  // namespace

void run_backward(BackwardCall& call, bool with_sink) {
  if (call.packed()) {
    run_checked_sequences(call);
    run_zero_unused(call);
  }
  const bool cuda = call.forward.stream.device().is_cuda(), adds_up = adds_up_query_gradient(call);
  run_delta(call, adds_up);
  if (call.forward.blocks && !cuda) {
    listed_gradients_on_cpu(call);
  } else if (adds_up) {
    if (has_keys(call)) all_gradients_on_gpu(call);
    if (has_queries(call)) run_scaled_sum(call);
  } else {
    if (has_keys(call)) cuda ? key_gradients_on_gpu(call) : key_gradients_on_cpu(call);
    if (has_queries(call)) cuda ? query_gradient_on_gpu(call) : query_gradient_on_cpu(call);
  }
  if (call.d_mask) run_mask_gradient(call);
  if (with_sink) run_sink_gradient(call);
}

BackwardCall check_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                            const Tensor& dq, const Tensor& dk, const Tensor& dv, const AttentionBackwardOptions& options) {
  const Form form{.op = "attention_backward", .without_qv = "gradients"};
  const AttentionCall forward = check_common(form, q, k, v, o, without_lse(options.forward));
  form.require(k.shape(0) == q.shape(0), "k is {}; its batch must be q's, {}", k, q.shape(0));
  return check_gradients(form, forward, {{"q", &q}, {"k", &k}, {"v", &v}, {"o", &o}, {"lse", &lse}, {"d_o", &d_o}},
                         {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"d_sink", options.d_sink}, {"d_mask", options.d_mask}}, options, {});
}

BackwardCall check_varlen_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                                   const Tensor& dq, const Tensor& dk, const Tensor& dv, const PackedSequences& sequences,
                                   const AttentionBackwardOptions& options) {
  Form form = varlen_form("attention_varlen_backward", sequences);
  form.without_qv = "gradients";
  const AttentionCall forward = check_varlen(form, q, k, v, o, sequences, without_lse(options.forward));
  BackwardCall call = check_gradients(form, forward, {{"q", &q}, {"k", &k}, {"v", &v}, {"o", &o}, {"lse", &lse}, {"d_o", &d_o}},
                                      {{"dq", &dq}, {"dk", &dk}, {"dv", &dv}, {"d_sink", options.d_sink}, {"d_mask", options.d_mask}},
                                      options, tensors_of(sequences));
  check_varlen_contents(form, forward, sequences, options.forward);
  return call;
}

}  // namespace kernels::attention

void attention_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                        const Tensor& dq, const Tensor& dk, const Tensor& dv, const AttentionBackwardOptions& options) {
  using namespace kernels::attention;
  BackwardCall call = check_backward(q, k, v, o, lse, d_o, dq, dk, dv, options);
  const detail::ScopedSmMargin margin(call.forward.sm_margin);
  run_backward(call, options.d_sink != nullptr);
}

void attention_varlen_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                               const Tensor& dq, const Tensor& dk, const Tensor& dv, const PackedSequences& sequences,
                               const AttentionBackwardOptions& options) {
  using namespace kernels::attention;
  BackwardCall call = check_varlen_backward(q, k, v, o, lse, d_o, dq, dk, dv, sequences, options);
  const detail::ScopedSmMargin margin(call.forward.sm_margin);
  run_backward(call, options.d_sink != nullptr);
}

}  // namespace tw
