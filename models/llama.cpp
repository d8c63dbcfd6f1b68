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

/// Views columns [begin, begin + heads * dim) of rows [sequences * n, width] as [sequences, n, heads, dim].
Tensor as_heads(const Tensor& rows, std::int64_t sequences, int begin, int heads, int dim) {
  auto* data = static_cast<std::byte*>(rows.data()) + static_cast<std::size_t>(begin) * size_of(rows.dtype());
  const std::int64_t n = rows.shape(0) / sequences;
  return Tensor::borrow(data, {sequences, n, heads, dim}, rows.dtype(), rows.device(), {rows.stride(0) * n, rows.stride(0), dim, 1});
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

std::shared_ptr<KvPool> Llama::make_pool(std::int64_t tokens, const Stream& stream) const {
  const auto pages = static_cast<int>((tokens + KvPool::kPageTokens - 1) / KvPool::kPageTokens);
  return std::make_shared<KvPool>(config_.layers, config_.kv_heads, config_.head_dim, pages, dtype(), stream);
}

std::vector<KvCache> Llama::make_caches(int count, int capacity, const Stream& stream) const {
  if (capacity < 0 || capacity > config_.max_positions)
    throw InvalidArgument(tw::format("capacity is {}; the model's context is {} tokens", capacity, config_.max_positions));
  const std::int64_t pages = KvPool::pages_for(capacity);
  const auto pool = make_pool(count * pages * KvPool::kPageTokens, stream);
  std::vector<KvCache> caches;
  for (int i = 0; i < count; ++i) caches.emplace_back(pool).reserve(capacity);
  return caches;
}

Tensor Llama::embed(std::span<const int> ids, const Stream& stream) const {
  const Tensor indices = Tensor::from(ids, {static_cast<std::int64_t>(ids.size())});
  return embed_on_device(stream.device().is_cuda() ? indices.to(stream.device()) : indices, stream);
}

Tensor Llama::embed_on_device(const Tensor& ids, const Stream& stream) const {
  const Tensor rows = Tensor::empty({ids.shape(0), config_.hidden}, dtype(), stream);
  const Operators run(stream);
  run("embed", rows, {.reads = {&rows}}, [&] { embedding(embedding_, ids, rows, {.stream = stream}); });
  return rows;
}

Llama::Batch Llama::make_batch(std::span<const int> ids, std::span<KvCache* const> caches, const Stream& stream) const {
  Batch batch;
  batch.pool = &caches.front()->pool();
  std::size_t longest = 1;
  for (const KvCache* cache : caches) longest = std::max(longest, cache->pages().size());
  // One tensor, since every copy to a GPU takes a while.
  const auto sequences = static_cast<std::int64_t>(caches.size()), width = static_cast<std::int64_t>(longest);
  std::vector<int> numbers(ids.begin(), ids.end());
  numbers.resize(caches.size());
  for (const KvCache* cache : caches) {
    if (&cache->pool() != batch.pool) throw InvalidArgument("sequences that are decoded together must have their caches in one pool");
    numbers.push_back(cache->length);
    batch.cached += cache->length;
  }
  for (const KvCache* cache : caches) {
    numbers.insert(numbers.end(), cache->pages().begin(), cache->pages().end());
    numbers.resize(numbers.size() + longest - cache->pages().size());
  }
  Tensor all = Tensor::from(std::span<const int>(numbers), {static_cast<std::int64_t>(numbers.size())});
  if (stream.device().is_cuda()) all = all.to(stream.device());
  batch.ids = all.slice(0, 0, sequences);
  batch.lengths = all.slice(0, sequences, 2 * sequences);
  batch.block_table = all.slice(0, 2 * sequences, all.shape(0)).reshape({sequences, width});
  return batch;
}

void Llama::run_layer(int index, const Tensor& x, const Batch& batch, const Stream& stream) const {
  const Layer& layer = layers_[static_cast<std::size_t>(index)];
  const Operators run(stream, index);
  const std::int64_t rows = x.shape(0), sequences = batch.lengths.shape(0), each = rows / sequences;  // tokens per sequence
  const int q_width = config_.heads * config_.head_dim, kv_width = config_.kv_heads * config_.head_dim;
  const auto empty = [&](std::int64_t width) { return Tensor::empty({rows, width}, dtype(), stream); };

  const Tensor normed = empty(config_.hidden), qkv = empty(q_width + 2 * kv_width), attended = empty(q_width);
  const auto norm = [&](const Tensor& weight) {
    rms_norm(x, normed, {.epsilon = config_.norm_epsilon, .weight = &weight, .stream = stream});
  };
  run("input_norm", normed, {.reads = {&x}}, [&] { norm(layer.input_norm); });
  run.linear("qkv", layer.qkv, normed, qkv);
  const auto heads = [&](const Tensor& t, int begin, int count) { return as_heads(t, sequences, begin, count, config_.head_dim); };
  const Tensor q = heads(qkv, 0, config_.heads), o = heads(attended, 0, config_.heads);
  const Tensor k = heads(qkv, q_width, config_.kv_heads), v = heads(qkv, q_width + kv_width, config_.kv_heads);
  const Tensor keys = batch.pool->keys(index), values = batch.pool->values(index);
  const double seen = static_cast<double>(batch.cached) / static_cast<double>(sequences) + static_cast<double>(each + 1) / 2;
  // The new keys and values are written and read again, those before are read.
  const double cache_bytes = static_cast<double>((batch.cached + 2 * rows) * 2 * kv_width) * static_cast<double>(size_of(dtype()));
  run("attention", attended, {.reads = {&qkv}, .keys = seen, .other_bytes = cache_bytes}, [&] {
    attention_decode(q, keys, values, o,
                     {.seqlens = &batch.lengths,
                      .block_table = &batch.block_table,
                      .new_k = &k,
                      .new_v = &v,
                      .rotary_cos = &cos_,
                      .rotary_sin = &sin_,
                      // On a CPU splits would make a sequence's sums depend on the number of sequences.
                      .num_splits = stream.device().is_cuda() ? 0 : 1},
                     {.causal = each > 1, .stream = stream});
  });
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
  const Batch batch = make_batch({}, caches, stream);
  for (int i = 0; i < config_.layers; ++i) run_layer(i, x, batch, stream);
  cache.length += static_cast<int>(n);
  return scores(x.slice(0, n - 1, n), stream);
}

Tensor Llama::decode(std::span<const int> ids, std::span<KvCache* const> caches, const Stream& stream) const {
  if (ids.empty() || ids.size() != caches.size()) throw InvalidArgument(tw::format("{} ids for {} sequences", ids.size(), caches.size()));
  for (const KvCache* cache : caches)
    if (cache->length >= cache->capacity()) throw InvalidArgument(tw::format("a cache of {} tokens is full", cache->capacity()));
  const Stage stage("decode", stream);
  const Batch batch = make_batch(ids, caches, stream);
  const Tensor x = embed_on_device(batch.ids, stream);
  for (int i = 0; i < config_.layers; ++i) run_layer(i, x, batch, stream);
  for (KvCache* cache : caches) ++cache->length;
  return scores(x, stream);
}

}  // namespace tw::models
