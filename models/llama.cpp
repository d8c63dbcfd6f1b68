#include "models/llama.hpp"

#include <algorithm>
#include <array>

#include "kernels/bitnet/squared_relu.tile.hpp"
#include "kernels/gemm/swiglu_linear.hpp"
#include "kernels/workspace.hpp"
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

/// A copy on the stream's device that is made, used and freed in the stream's order: one that another stream frees would be overwritten
/// before kernels have read it.
Tensor upload(std::span<const int> values, const Stream& stream) {
  const Tensor all = Tensor::empty({std::ssize(values)}, DType::i32, stream);
  all.copy_from(Tensor::from(values, all.shape()), stream);
  return all;
}

/// Pages for the longest sequence with `added` tokens, at least what every sequence has.
int most_pages(std::span<KvCache* const> caches, int added) {
  int most = 1;
  for (const KvCache* cache : caches)
    most = std::max({most, static_cast<int>(cache->pages().size()), KvPool::pages_for(cache->length + added)});
  return most;
}

}  // namespace

Llama::Llama(const LlamaConfig& config, Weights& weights) : config_(config) {
  const int hidden = config.hidden, q = config.heads * config.head_dim, kv = config.kv_heads * config.head_dim;
  embedding_ = weights.take("embed_tokens.weight", {config.vocabulary, hidden});
  // A kernel that runs all layers finds the weights of a layer behind those of the one before.
  const auto room = [&](std::int64_t rows, std::int64_t columns) {
    return config.bitnet ? Linear() : weights.linear_room(config.layers * rows, columns);
  };
  const Linear all_qkv = room(q + 2 * kv, hidden), all_out = room(hidden, q);
  const Linear all_gate_up = room(2 * config.intermediate, hidden), all_down = room(hidden, config.intermediate);
  const auto as_weight = [](const Linear& all) { return kernels::decode_step::Weight{.plain = all.weight, .quantized = all.quantized}; };
  whole_ = {.qkv = as_weight(all_qkv),
            .out = as_weight(all_out),
            .gate_up = as_weight(all_gate_up),
            .down = as_weight(all_down),
            .norms = weights.room({2 * config.layers + 1, hidden}),
            .layers = config.layers,
            .heads = config.heads,
            .kv_heads = config.kv_heads,
            .head_dim = config.head_dim,
            .epsilon = config.norm_epsilon};
  const auto norm = [&](const std::string& name, int i) {
    return weights.take(name, {hidden}, weights.checking() ? Tensor() : whole_.norms.select(0, i));
  };
  for (int i = 0; i < config.layers; ++i) {
    const std::string name = tw::format("layers.{}.", i);
    const auto stack = [&](std::initializer_list<Weights::Part> parts, std::int64_t columns, const Linear& all) {
      const std::span of(parts.begin(), parts.size());
      if (config.bitnet) return weights.ternary(of, columns, config.ternary);
      if (weights.checking()) return weights.linear(of, columns);
      const std::int64_t rows = all.out() / config.layers;
      return weights.linear(of, columns, Weights::Role::layer, all.rows(i * rows, (i + 1) * rows));
    };
    Layer layer;
    layer.input_norm = norm(name + "input_layernorm.weight", 2 * i);
    layer.qkv =
        stack({{name + "self_attn.q_proj.weight", q}, {name + "self_attn.k_proj.weight", kv}, {name + "self_attn.v_proj.weight", kv}},
              hidden, all_qkv);
    if (config.bitnet) layer.attention_sub_norm = weights.take(name + "self_attn.attn_sub_norm.weight", {hidden});
    layer.out = stack({{name + "self_attn.o_proj.weight", hidden}}, q, all_out);
    layer.post_attention_norm = norm(name + "post_attention_layernorm.weight", 2 * i + 1);
    layer.gate_up = stack({{name + "mlp.gate_proj.weight", config.intermediate}, {name + "mlp.up_proj.weight", config.intermediate}},
                          hidden, all_gate_up);
    if (config.bitnet) layer.mlp_sub_norm = weights.take(name + "mlp.ffn_sub_norm.weight", {config.intermediate});
    layer.down = stack({{name + "mlp.down_proj.weight", hidden}}, config.intermediate, all_down);
    layers_.push_back(std::move(layer));
  }
  norm_ = norm("norm.weight", 2 * config.layers);
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
  whole_.embedding = embedding_;
  // In fewer bits the head is faster in a launch of its own: kernels/decode_step/NOTES.md.
  const bool plain = all_qkv.quantized.empty() && head_.quantized.empty();
  if (plain && config.vocabulary % 8 == 0) whole_.head = as_weight(head_);
  whole_.cosines = cos_;
  whole_.sines = sin_;
}

std::int64_t Llama::bytes_per_step() const {
  const std::int64_t sub_norms = config_.bitnet ? config_.hidden + config_.intermediate : 0;
  const std::int64_t norms = config_.layers * (2 * std::int64_t{config_.hidden} + sub_norms) + config_.hidden;
  std::int64_t bytes = head_.bytes() + norms * static_cast<std::int64_t>(size_of(dtype()));
  for (const Layer& layer : layers_)
    for (const Linear* linear : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) bytes += linear->bytes();
  return bytes;
}

double Llama::flops_per_token() const {
  std::int64_t weights = head_.elements();
  for (const Layer& layer : layers_)
    for (const Linear* linear : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) weights += linear->elements();
  return 2 * static_cast<double>(weights);
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
  const Tensor rows = Tensor::empty({std::ssize(ids), config_.hidden}, dtype(), stream);
  embed_on_device(upload(ids, stream), rows, stream);
  return rows;
}

void Llama::embed_on_device(const Tensor& ids, const Tensor& rows, const Stream& stream) const {
  const Operators run(stream);
  run("embed", rows, {.reads = {&rows}}, [&] { embedding(embedding_, ids, rows, {.stream = stream}); });
}

std::vector<int> Llama::numbers(std::span<const int> ids, std::span<KvCache* const> caches, DecodeGraphs::Size size) {
  const KvPool& pool = caches.front()->pool();
  const auto rows = static_cast<std::size_t>(size.rows), pages = static_cast<std::size_t>(size.pages);
  std::vector<int> all(ids.begin(), ids.end());
  all.resize(rows);
  for (const KvCache* cache : caches) {
    if (&cache->pool() != &pool) throw InvalidArgument("sequences that are decoded together must have their caches in one pool");
    all.push_back(cache->length);
  }
  all.resize(2 * rows);
  for (std::size_t row = 0; row < caches.size(); ++row) {
    all.insert(all.end(), caches[row]->pages().begin(), caches[row]->pages().end());
    all.resize(2 * rows + (row + 1) * pages, pool.spare_page());
  }
  all.resize(2 * rows + rows * pages, pool.spare_page());
  return all;
}

Llama::Batch Llama::batch_of(const Tensor& numbers, const KvPool& pool, DecodeGraphs::Size size) {
  const std::int64_t rows = size.rows;
  return {.pool = &pool,
          .ids = numbers.slice(0, 0, rows),
          .lengths = numbers.slice(0, rows, 2 * rows),
          .block_table = numbers.slice(0, 2 * rows, numbers.shape(0)).reshape({rows, size.pages})};
}

Llama::Batch Llama::make_batch(std::span<const int> ids, std::span<KvCache* const> caches, int added, const Stream& stream) {
  const DecodeGraphs::Size size{static_cast<int>(caches.size()), most_pages(caches, added)};
  // One tensor, since every copy to a GPU takes a while.
  Batch batch = batch_of(upload(numbers(ids, caches, size), stream), caches.front()->pool(), size);
  for (const KvCache* cache : caches) batch.cached += cache->length;
  return batch;
}

void Llama::run_layer(int index, const Tensor& x, const Batch& batch, const Stream& stream) const {
  const Layer& layer = layers_[static_cast<std::size_t>(index)];
  const Operators run(stream, index);
  const std::int64_t rows = x.shape(0), sequences = batch.lengths.shape(0), each = rows / sequences;  // tokens per sequence
  const int q_width = config_.heads * config_.head_dim, kv_width = config_.kv_heads * config_.head_dim;
  const auto empty = [&](std::int64_t width) { return kernels::workspace({rows, width}, dtype(), stream); };

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
  const auto sub_norm = [&](const char* name, const Tensor& vectors, const Tensor& weight) {
    if (!config_.bitnet) return;
    run(name, vectors, {.reads = {&vectors}},
        [&] { rms_norm(vectors, vectors, {.epsilon = config_.norm_epsilon, .weight = &weight, .stream = stream}); });
  };
  sub_norm("attention_sub_norm", attended, layer.attention_sub_norm);
  run.linear("out", layer.out, attended, x, {.accumulate = true});

  run("mlp_norm", normed, {.reads = {&x}}, [&] { norm(layer.post_attention_norm); });
  const Tensor product = empty(config_.intermediate);
  if (layer.gate_up.weight.numel() > 0 && kernels::gemm::has_swiglu_linear(dtype(), rows, stream)) {
    run("gate_up_swiglu", product, {.reads = {&normed}, .linear = &layer.gate_up},
        [&] { kernels::gemm::swiglu_linear(normed, layer.gate_up.weight, product, stream); });
  } else {
    const Tensor gate_up = empty(2 * config_.intermediate);
    run.linear("gate_up", layer.gate_up, normed, gate_up);
    const Tensor gate = gate_up.slice(1, 0, config_.intermediate), up = gate_up.slice(1, config_.intermediate, 2 * config_.intermediate);
    if (config_.bitnet)
      run("squared_relu", product, {.reads = {&gate_up}}, [&] {
        elementwise<kernels::bitnet::SquaredReluGate>({gate, up}, product, {.stream = stream});
      });
    else
      run("swiglu", product, {.reads = {&gate_up}}, [&] { swiglu(gate, up, product, {.stream = stream}); });
  }
  sub_norm("mlp_sub_norm", product, layer.mlp_sub_norm);
  run.linear("down", layer.down, product, x, {.accumulate = true});
}

Tensor Llama::empty_scores(std::int64_t rows, const Stream& stream) const {
  return Tensor::empty({rows, config_.vocabulary}, dtype(), stream);
}

void Llama::score(const Tensor& x, const Tensor& scores, const Stream& stream) const {
  const Operators run(stream);
  const Tensor normed = kernels::workspace(x.shape(), dtype(), stream);
  run("norm", normed, {.reads = {&x}}, [&] { rms_norm(x, normed, {.epsilon = config_.norm_epsilon, .weight = &norm_, .stream = stream}); });
  run.linear("head", head_, normed, scores);
}

void Llama::run_step(const Batch& batch, const Tensor& scores, const Stream& stream) const {
  const bool watched = observer() != nullptr && observer()->needs_operators();
  const bool in_one_launch = !watched && kernels::decode_step::supports(whole_, batch.ids.shape(0), stream);
  const bool with_head = in_one_launch && whole_.has_head();
  const Tensor x = with_head ? Tensor() : kernels::workspace({batch.ids.shape(0), config_.hidden}, dtype(), stream);
  if (in_one_launch) {
    kernels::decode_step::run(whole_,
                              {.ids = batch.ids,
                               .keys = batch.pool->keys(),
                               .values = batch.pool->values(),
                               .lengths = batch.lengths,
                               .pages = batch.block_table,
                               .scores = scores,
                               .x = x},
                              stream);
  } else {
    embed_on_device(batch.ids, x, stream);
    for (int i = 0; i < config_.layers; ++i) run_layer(i, x, batch, stream);
  }
  if (!with_head) score(x, scores, stream);
}

Tensor Llama::prefill(const Tensor& embeddings, KvCache& cache, const Stream& stream) const {
  KvCache* const caches[] = {&cache};
  return prefill(std::span(&embeddings, 1), caches, stream);
}

Tensor Llama::prefill(std::span<const Tensor> embeddings, std::span<KvCache* const> caches, const Stream& stream) const {
  if (embeddings.empty() || embeddings.size() != caches.size())
    throw InvalidArgument(tw::format("{} prompts for {} sequences", embeddings.size(), caches.size()));
  std::int64_t longest = 0;
  for (std::size_t i = 0; i < caches.size(); ++i) {
    const std::int64_t n = embeddings[i].shape(0);
    if (n == 0 || caches[i]->length + n > caches[i]->capacity())
      throw InvalidArgument(tw::format("{} tokens do not fit a cache of {} that holds {}", n, caches[i]->capacity(), caches[i]->length));
    longest = std::max(longest, n);
  }
  for (const KvCache* cache : caches)
    if (cache->length + longest > config_.max_positions)
      throw InvalidArgument(tw::format("{} tokens after {}, as many as the longest prompt has; the model's context is {} tokens", longest,
                                       cache->length, config_.max_positions));
  const Stage stage("prefill", stream);
  const auto sequences = static_cast<std::int64_t>(caches.size());
  const bool padded = std::any_of(embeddings.begin(), embeddings.end(), [&](const Tensor& each) { return each.shape(0) < longest; });
  const Shape shape{sequences * longest, config_.hidden};
  const Tensor x = padded ? Tensor::zeros(shape, dtype(), stream) : Tensor::empty(shape, dtype(), stream);
  const Operators run(stream);
  const auto rows_of = [&](std::int64_t i) {
    return x.slice(0, i * longest, i * longest + embeddings[static_cast<std::size_t>(i)].shape(0));
  };
  for (std::int64_t i = 0; i < sequences; ++i) {
    const Tensor &given = embeddings[static_cast<std::size_t>(i)], rows = rows_of(i);
    run("copy", rows, {.reads = {&given}}, [&] { cast(given, rows, {.stream = stream}); });
  }
  const Batch batch = make_batch({}, caches, static_cast<int>(longest), stream);
  for (int i = 0; i < config_.layers; ++i) run_layer(i, x, batch, stream);
  const Tensor last = sequences == 1 ? x.slice(0, longest - 1, longest) : Tensor::empty({sequences, config_.hidden}, dtype(), stream);
  for (std::int64_t i = 0; i < sequences; ++i) {
    const std::int64_t n = embeddings[static_cast<std::size_t>(i)].shape(0);
    const Tensor from = rows_of(i).slice(0, n - 1, n), to = last.slice(0, i, i + 1);
    if (sequences > 1) run("last", to, {.reads = {&from}}, [&] { cast(from, to, {.stream = stream}); });
    caches[static_cast<std::size_t>(i)]->length += static_cast<int>(n);
  }
  const Tensor scores = empty_scores(sequences, stream);
  score(last, scores, stream);
  return scores;
}

Tensor Llama::decode(std::span<const int> ids, std::span<KvCache* const> caches, const Stream& stream, DecodeGraphs* graphs) const {
  if (ids.empty() || ids.size() != caches.size()) throw InvalidArgument(tw::format("{} ids for {} sequences", ids.size(), caches.size()));
  for (const KvCache* cache : caches)
    if (cache->length >= cache->capacity()) throw InvalidArgument(tw::format("a cache of {} tokens is full", cache->capacity()));
  const Stage stage("decode", stream);
  Tensor scores;
  // attention_decode in f32 on a GPU reads the lengths on the host, which a graph cannot.
  const bool reads_on_host = dtype() == DType::f32 && stream.device().is_cuda();
  if (graphs == nullptr || reads_on_host || (observer() != nullptr && observer()->needs_operators())) {
    const Batch batch = make_batch(ids, caches, 1, stream);
    scores = empty_scores(batch.ids.shape(0), stream);
    run_step(batch, scores, stream);
  } else {
    const KvPool& pool = graphs->pool();
    if (&caches.front()->pool() != &pool) throw InvalidArgument("the graphs are of another pool than the caches");
    const auto make = [&](DecodeGraphs::Size size) {
      DecodeGraphs::Step step{.numbers = Tensor::empty({size.rows * (2 + size.pages)}, DType::i32, stream),
                              .scores = empty_scores(size.rows, stream),
                              .graph = {}};
      // The stream and the observer's absence are those of now; on a CPU the work itself is kept.
      step.graph = Graph::capture(
          stream, [this, stream, batch = batch_of(step.numbers, pool, size), scores = step.scores] { run_step(batch, scores, stream); });
      return step;
    };
    const DecodeGraphs::Size size = DecodeGraphs::size_for(static_cast<int>(ids.size()), most_pages(caches, 1));
    const DecodeGraphs::Step& step = graphs->find(size, make);
    const std::vector<int> values = numbers(ids, caches, size);
    step.numbers.copy_from(Tensor::from(std::span(values), {std::ssize(values)}), stream);
    step.graph.replay(stream);
    scores = step.scores.slice(0, 0, std::ssize(ids));
  }
  for (KvCache* cache : caches) ++cache->length;
  return scores;
}

}  // namespace tw::models
