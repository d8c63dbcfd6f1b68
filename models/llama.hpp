#pragma once

#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kernels/decode_step/decode_step.hpp"
#include "models/decode_graphs.hpp"
#include "models/kv_cache.hpp"
#include "models/linear.hpp"
#include "models/weights.hpp"
#include "tilewave/tensor.hpp"

namespace tw::models {

class ConfigReader;

struct LlamaConfig {
  int hidden = 0, intermediate = 0, layers = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  int vocabulary = 0;
  int max_positions = 0;
  double rope_theta = 10000;
  float norm_epsilon = 1e-5f;
  /// BitNet b1.58: weights of -1, 0 and 1, a squared ReLU instead of SiLU, and RMS norms of attention's results and of the gated ones,
  /// before the products that follow.
  bool bitnet = false;
  Weights::Ternary ternary = Weights::Ternary::rounded_here;  ///< how BitNet's weights are in the file
  /// A text_config. Throws FileError for values out of range and for unsupported features: an activation other than silu (relu2 for
  /// BitNet), biases, scaled rotary embeddings, a head_dim other than 64 and 128.
  static LlamaConfig read(const ConfigReader& reader);
};

/// The decoder of Llama models (Touvron et al., arXiv 2302.13971), and of BitNet b1.58 (Ma et al., arXiv 2402.17764), with grouped-query
/// attention, RMS pre-norm, half-split rotary embedding and SwiGLU.
class Llama {
 public:
  /// Takes its tensors from `weights`, under the names "embed_tokens.weight", "layers.N....", "norm.weight" and "lm_head.weight".
  Llama(const LlamaConfig& config, Weights& weights);

  const LlamaConfig& config() const { return config_; }
  DType dtype() const { return embedding_.dtype(); }

  /// Whether the embedding is also the head.
  bool tied() const { return head_.weight.data() == embedding_.data(); }

  /// The bytes of the weights that a decoding step reads.
  std::int64_t bytes_per_step() const;
  /// The operations of one token's products with weights, a multiply-add counting twice.
  double flops_per_token() const;

  /// Memory for `tokens` tokens of any number of sequences, in whole pages. Throws OutOfMemory.
  std::shared_ptr<KvPool> make_pool(std::int64_t tokens, const Stream& stream) const;

  /// Caches for `capacity` tokens each, in a pool of their own. Throws InvalidArgument beyond max_positions, OutOfMemory.
  std::vector<KvCache> make_caches(int count, int capacity, const Stream& stream) const;
  KvCache make_cache(int capacity, const Stream& stream) const { return std::move(make_caches(1, capacity, stream).front()); }

  /// The embeddings of `ids` (each below the vocabulary): [ids, hidden].
  Tensor embed(std::span<const int> ids, const Stream& stream) const;

  /// Runs the tokens `embeddings` [n, hidden] through the model after those in `cache`, and adds them to it. Returns the scores of the next
  /// token: [1, vocabulary], of the model's dtype.
  Tensor prefill(const Tensor& embeddings, KvCache& cache, const Stream& stream) const;
  /// The same for several sequences of one pool: [sequences, vocabulary]. Each is processed as if it had as many tokens as the longest. The
  /// keys and values of the tokens that it has not lie behind its own, where later ones replace them, and in the pool's spare page.
  Tensor prefill(std::span<const Tensor> embeddings, std::span<KvCache* const> caches, const Stream& stream) const;

  /// One token for each of several sequences of the same pool: ids[i] after those in *caches[i]. Returns the scores, [sequences,
  /// vocabulary]. In f32 on the CPU a sequence's scores do not depend on the other sequences, up to 16 of them.
  /// With `graphs`, of the caches' pool and for this model, a step is one launch of a graph, and the scores are valid until the next one.
  /// An observer that needs operators gets them one by one all the same.
  Tensor decode(std::span<const int> ids, std::span<KvCache* const> caches, const Stream& stream, DecodeGraphs* graphs = nullptr) const;

 private:
  struct Layer {
    Tensor input_norm, post_attention_norm;
    Linear qkv;                 ///< rows of q, k, v
    Tensor attention_sub_norm;  ///< BitNet's
    Linear out;
    Linear gate_up;       ///< rows of gate, then up
    Tensor mlp_sub_norm;  ///< BitNet's
    Linear down;
  };
  /// Sequences that are processed together, on the model's device.
  struct Batch {
    const KvPool* pool = nullptr;
    Tensor ids;               ///< [sequences]: their next tokens
    Tensor lengths;           ///< [sequences]: tokens in their caches
    Tensor block_table;       ///< [sequences, pages of the longest]
    std::int64_t cached = 0;  ///< tokens in all caches
  };
  /// What make_batch() has on the device, for `size.rows` rows of `size.pages` pages: `ids`, one for each cache, or none; then lengths and
  /// pages. Rows without a cache are of the pool's spare page.
  static std::vector<int> numbers(std::span<const int> ids, std::span<KvCache* const> caches, DecodeGraphs::Size size);
  static Batch batch_of(const Tensor& numbers, const KvPool& pool, DecodeGraphs::Size size);
  /// `ids`: one for each cache, or none. `added`: tokens that each sequence gets.
  static Batch make_batch(std::span<const int> ids, std::span<KvCache* const> caches, int added, const Stream& stream);

  /// x + attention(...) + mlp(...) of one layer, in place. The rows of x are new tokens, the same number of each sequence.
  void run_layer(int index, const Tensor& x, const Batch& batch, const Stream& stream) const;
  void embed_on_device(const Tensor& ids, const Tensor& rows, const Stream& stream) const;
  Tensor empty_scores(std::int64_t rows, const Stream& stream) const;
  void score(const Tensor& x, const Tensor& scores, const Stream& stream) const;
  /// One token of each sequence of a batch, in one launch where the GPU has a kernel for it; a head in fewer bits follows apart. Writes
  /// `scores`. Memory is the graph's while the stream is captured.
  void run_step(const Batch& batch, const Tensor& scores, const Stream& stream) const;

  LlamaConfig config_;
  Tensor embedding_;           ///< [vocabulary, hidden]
  std::vector<Layer> layers_;  ///< parts of whole_'s tensors, where these are not empty
  kernels::decode_step::Decoder whole_;
  Tensor norm_;
  Linear head_;
  Tensor cos_, sin_;  ///< [max_positions, head_dim / 2], f32
};

}  // namespace tw::models
