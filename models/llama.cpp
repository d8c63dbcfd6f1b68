#include "models/llama.hpp"

#include <array>

#include "models/observe.hpp"
#include "runtime/format.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/elementwise.hpp"
#include "tilewave/embedding.hpp"
#include "tilewave/error.hpp"
#include "tilewave/norm.hpp"
#include "tilewave/rope.hpp"
#include "tilewave/swiglu.hpp"

namespace tw::models {

namespace {

/// Views columns [begin, begin + heads * dim) of rows [n, width] as [1, n, heads, dim].
Tensor as_heads(const Tensor& rows, int begin, int heads, int dim) {
  auto* data = static_cast<std::byte*>(rows.data()) + static_cast<std::size_t>(begin) * size_of(rows.dtype());
  return Tensor::borrow(data, {1, rows.shape(0), heads, dim}, rows.dtype(), rows.device(),
                        {rows.stride(0) * rows.shape(0), rows.stride(0), dim, 1});
}

/// Attention of one new token. The query heads that share a key head become rows of one tile: [1, 1, heads, dim] is viewed as
/// [1, heads / kv_heads, kv_heads, dim].
Tensor group_as_rows(const Tensor& q, int kv_heads) {
  const std::int64_t heads = q.shape(2), dim = q.shape(3), group = heads / kv_heads;
  return Tensor::borrow(q.data(), {1, group, kv_heads, dim}, q.dtype(), q.device(), {heads * dim, dim, group * dim, 1});
}

}  // namespace

Llama::Llama(const LlamaConfig& config, Weights& weights) : config_(config) {
  const int hidden = config.hidden, q = config.heads * config.head_dim, kv = config.kv_heads * config.head_dim;
  embedding_ = weights.take("embed_tokens.weight", {config.vocabulary, hidden});
  for (int i = 0; i < config.layers; ++i) {
    const std::string name = tw::format("layers.{}.", i);
    const auto stack = [&](std::initializer_list<Weights::Part> parts, std::int64_t columns) {
      return weights.linear(std::span(parts.begin(), parts.size()), columns);
    };
    Layer layer;
    layer.input_norm = weights.take(name + "input_layernorm.weight", {hidden});
    layer.qkv = stack(
        {{name + "self_attn.q_proj.weight", q}, {name + "self_attn.k_proj.weight", kv}, {name + "self_attn.v_proj.weight", kv}}, hidden);
    layer.out = weights.linear(name + "self_attn.o_proj", hidden, q, false);
    layer.post_attention_norm = weights.take(name + "post_attention_layernorm.weight", {hidden});
    layer.gate_up =
        stack({{name + "mlp.gate_proj.weight", config.intermediate}, {name + "mlp.up_proj.weight", config.intermediate}}, hidden);
    layer.down = weights.linear(name + "mlp.down_proj", hidden, config.intermediate, false);
    layers_.push_back(std::move(layer));
  }
  norm_ = weights.take("norm.weight", {hidden});
  // Files are inconsistent about tie_word_embeddings: use the head if there is one.
  if (weights.contains("lm_head.weight"))
    head_ = weights.linear("lm_head", config.vocabulary, hidden, false, Weights::Role::head);
  else
    head_.weight = embedding_;
  if (weights.checking()) return;
  const Stream& stream = weights.stream();
  cos_ = Tensor::empty({config.max_positions, config.head_dim / 2}, DType::f32, stream);
  sin_ = Tensor::empty(cos_.shape(), DType::f32, stream);
  rope_table(cos_, sin_, {.theta = config.rope_theta, .stream = stream});
}

std::int64_t Llama::bytes_per_step() const {
  std::int64_t bytes =
      head_.bytes() + (2 * config_.layers + 1) * std::int64_t{config_.hidden} * static_cast<std::int64_t>(size_of(dtype()));
  for (const Layer& layer : layers_)
    for (const Linear* linear : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) bytes += linear->bytes();
  return bytes;
}

KvCache Llama::make_cache(int capacity, const Stream& stream) const {
  if (capacity < 0 || capacity > config_.max_positions)
    throw InvalidArgument(tw::format("capacity is {}; the model's context is {} tokens", capacity, config_.max_positions));
  return {Tensor::empty({config_.layers, capacity, 2, config_.kv_heads, config_.head_dim}, dtype(), stream)};
}

Tensor Llama::embed(std::span<const int> ids, const Stream& stream) const {
  const Tensor rows = Tensor::empty({static_cast<std::int64_t>(ids.size()), config_.hidden}, dtype(), stream);
  Tensor indices = Tensor::from(ids, {rows.shape(0)});
  if (stream.device().is_cuda()) indices = indices.to(stream.device());
  const Operators run(stream);
  run("embed", rows, {.reads = {&rows}}, [&] { embedding(embedding_, indices, rows, {.stream = stream}); });
  return rows;
}

void Llama::run_layer(int index, const Tensor& x, std::span<KvCache* const> caches, const Stream& stream) const {
  const Layer& layer = layers_[static_cast<std::size_t>(index)];
  const Operators run(stream, index);
  const std::int64_t rows = x.shape(0);
  const int q_width = config_.heads * config_.head_dim, kv_width = config_.kv_heads * config_.head_dim;
  const auto empty = [&](std::int64_t width) { return Tensor::empty({rows, width}, dtype(), stream); };

  const Tensor normed = empty(config_.hidden), qkv = empty(q_width + 2 * kv_width), attended = empty(q_width);
  const auto norm = [&](const Tensor& weight) {
    rms_norm(x, normed, {.epsilon = config_.norm_epsilon, .weight = &weight, .stream = stream});
  };
  run("input_norm", normed, {.reads = {&x}}, [&] { norm(layer.input_norm); });
  run.linear("qkv", layer.qkv, normed, qkv);
  // q and k are adjacent, so their heads are rotated together.
  const Tensor turned = as_heads(qkv, 0, config_.heads + config_.kv_heads, config_.head_dim);
  const Tensor q = as_heads(qkv, 0, config_.heads, config_.head_dim), o = as_heads(attended, 0, config_.heads, config_.head_dim);
  const Tensor fresh = as_heads(qkv, q_width, 2 * config_.kv_heads, config_.head_dim);  // k and v
  const std::int64_t each = rows / static_cast<std::int64_t>(caches.size());            // tokens per sequence
  for (std::size_t i = 0; i < caches.size(); ++i) {
    KvCache& cache = *caches[i];
    const std::int64_t row = static_cast<std::int64_t>(i) * each;
    const auto mine = [&](const Tensor& t) { return t.slice(1, row, row + each); };
    const int end = cache.length + static_cast<int>(each);
    const Tensor layer_cache = cache.tokens.select(0, index);  // [capacity, 2, kv_heads, head_dim]
    const Tensor heads = mine(turned), appended = layer_cache.slice(0, cache.length, end);
    run("rope", heads, {.reads = {&heads}}, [&] { rope(heads, cos_, sin_, heads, {.offset = cache.length, .stream = stream}); });
    run("append", appended, {.reads = {&appended}}, [&] {
      cast(mine(fresh).select(0, 0), appended.reshape({each, 2 * config_.kv_heads, config_.head_dim}), {.stream = stream});
    });
    const auto cached = [&](int which) {  // keys or values so far: [1, tokens, kv_heads, head_dim]
      const Tensor t = layer_cache.slice(0, 0, end).select(1, which);
      return Tensor::borrow(t.data(), {1, end, config_.kv_heads, config_.head_dim}, t.dtype(), t.device(),
                            {t.stride(0) * end, t.stride(0), t.stride(1), 1});
    };
    const Tensor queries = mine(q), keys = cached(0), values = cached(1), result = mine(o);
    run("attention", result, {.reads = {&queries, &keys, &values}, .keys = end - static_cast<double>(each - 1) / 2}, [&] {
      if (each == 1)
        attention(group_as_rows(queries, config_.kv_heads), keys, values, group_as_rows(result, config_.kv_heads), {.stream = stream});
      else
        attention(queries, keys, values, result, {.causal = true, .stream = stream});
    });
  }
  run.linear("out", layer.out, attended, x, {.accumulate = true});

  run("mlp_norm", normed, {.reads = {&x}}, [&] { norm(layer.post_attention_norm); });
  const Tensor gate_up = empty(2 * config_.intermediate), product = empty(config_.intermediate);
  run.linear("gate_up", layer.gate_up, normed, gate_up);
  run("swiglu", product, {.reads = {&gate_up}}, [&] {
    swiglu(gate_up.slice(1, 0, config_.intermediate), gate_up.slice(1, config_.intermediate, 2 * config_.intermediate), product,
           {.stream = stream});
  });
  run.linear("down", layer.down, product, x, {.accumulate = true});
}

Tensor Llama::scores(const Tensor& x, const Stream& stream) const {
  const Operators run(stream);
  const Tensor normed = Tensor::empty(x.shape(), dtype(), stream);
  run("norm", normed, {.reads = {&x}}, [&] { rms_norm(x, normed, {.epsilon = config_.norm_epsilon, .weight = &norm_, .stream = stream}); });
  const Tensor logits = Tensor::empty({x.shape(0), config_.vocabulary}, dtype(), stream);
  run.linear("head", head_, normed, logits);
  return logits;
}

Tensor Llama::prefill(const Tensor& embeddings, KvCache& cache, const Stream& stream) const {
  const std::int64_t n = embeddings.shape(0);
  if (n == 0 || cache.length + n > cache.capacity())
    throw InvalidArgument(tw::format("{} tokens do not fit a cache of {} that holds {}", n, cache.capacity(), cache.length));
  const Stage stage("prefill", stream);
  const Tensor x = Tensor::empty(embeddings.shape(), dtype(), stream);
  const Operators run(stream);
  run("copy", x, {.reads = {&embeddings}}, [&] { cast(embeddings, x, {.stream = stream}); });
  KvCache* const caches[] = {&cache};
  for (int i = 0; i < config_.layers; ++i) run_layer(i, x, caches, stream);
  cache.length += static_cast<int>(n);
  return scores(x.slice(0, n - 1, n), stream);
}

Tensor Llama::decode(std::span<const int> ids, std::span<KvCache* const> caches, const Stream& stream) const {
  if (ids.empty() || ids.size() != caches.size()) throw InvalidArgument(tw::format("{} ids for {} sequences", ids.size(), caches.size()));
  for (const KvCache* cache : caches)
    if (cache->length >= cache->capacity()) throw InvalidArgument(tw::format("a cache of {} tokens is full", cache->capacity()));
  const Stage stage("decode", stream);
  const Tensor x = embed(ids, stream);
  for (int i = 0; i < config_.layers; ++i) run_layer(i, x, caches, stream);
  for (KvCache* cache : caches) ++cache->length;
  return scores(x, stream);
}

}  // namespace tw::models
