#pragma once

#include <span>
#include <vector>

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
  /// A text_config. Throws FileError for values out of range and for unsupported features: an activation other than silu, biases,
  /// scaled rotary embeddings, a head_dim other than 64 and 128.
  static LlamaConfig read(const ConfigReader& reader);
};

/// Keys and values of one sequence: for every layer [capacity, 2, kv_heads, head_dim], keys before values, so that a token's are
/// contiguous.
struct KvCache {
  Tensor tokens;   ///< [layers, capacity, 2, kv_heads, head_dim]
  int length = 0;  ///< tokens in it

  int capacity() const { return static_cast<int>(tokens.shape(1)); }
};

/// The decoder of Llama models (Touvron et al., arXiv 2302.13971) with grouped-query attention, RMS pre-norm, half-split rotary embedding
/// and SwiGLU.
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

  /// A cache for `capacity` tokens. Throws InvalidArgument beyond max_positions, OutOfMemory.
  KvCache make_cache(int capacity, const Stream& stream) const;

  /// The embeddings of `ids` (each below the vocabulary): [ids, hidden].
  Tensor embed(std::span<const int> ids, const Stream& stream) const;

  /// Runs the tokens `embeddings` [n, hidden] through the model after those in `cache`, and adds them to it. Returns the scores of the next
  /// token: [1, vocabulary], of the model's dtype.
  Tensor prefill(const Tensor& embeddings, KvCache& cache, const Stream& stream) const;

  /// One token for each of several sequences: ids[i] after those in *caches[i]. Returns the scores, [sequences, vocabulary]. In f32 on the
  /// CPU a sequence's scores do not depend on the other sequences.
  Tensor decode(std::span<const int> ids, std::span<KvCache* const> caches, const Stream& stream) const;

 private:
  struct Layer {
    Tensor input_norm, post_attention_norm;
    Linear qkv;  ///< rows of q, k, v
    Linear out;
    Linear gate_up;  ///< rows of gate, then up
    Linear down;
  };
  /// x + attention(...) + mlp(...) of one layer, in place. Rows of x are tokens: all from one sequence, or one from each.
  void run_layer(int index, const Tensor& x, std::span<KvCache* const> caches, const Stream& stream) const;
  Tensor scores(const Tensor& x, const Stream& stream) const;

  LlamaConfig config_;
  Tensor embedding_;  ///< [vocabulary, hidden]
  std::vector<Layer> layers_;
  Tensor norm_;
  Linear head_;
  Tensor cos_, sin_;  ///< [max_positions, head_dim / 2], f32
};

}  // namespace tw::models
