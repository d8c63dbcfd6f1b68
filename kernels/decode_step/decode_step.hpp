#pragma once

#include <cstdint>
#include <vector>

#include "kernels/variant.hpp"
#include "tilewave/quantized.hpp"
#include "tilewave/tensor.hpp"

// A decoding step of a Llama in one launch: see decode_step.tile.hpp.

namespace tw::kernels::decode_step {

/// The most sequences of a step: with more, a launch for each operation is as fast.
inline constexpr int kMostSequences = 16;
inline constexpr int kPageTokens = 64;

/// The weights of one kind of product, [out, in] and contiguous, those of all layers one after the other: `plain`, of the decoder's dtype,
/// or, if that is without elements, `quantized`, in int8, fp8 or int4.
struct Weight {
  Tensor plain = {};
  QuantizedMatrix quantized = {};

  WeightFormat format() const { return quantized.format; }
  const Tensor& values() const { return quantized.empty() ? plain : quantized.values; }
  std::int64_t rows() const { return values().shape(0); }
  std::int64_t columns() const { return values().shape(1) * (quantized.empty() ? 1 : codes_in_byte(format())); }
};

/// A decoder of one 16-bit dtype, whose weights have one format, with the same groups and zero points. It may be without a head.
struct Decoder {
  Weight qkv = {};                  ///< [layers * (heads + 2 kv_heads) * head_dim, hidden]
  Weight out = {};                  ///< [layers * hidden, heads * head_dim]
  Weight gate_up = {};              ///< [layers * 2 * intermediate, hidden]: of each layer the rows of gate, then those of up
  Weight down = {};                 ///< [layers * hidden, intermediate]
  Tensor embedding = {};            ///< [vocabulary, hidden]
  Tensor norms = {};                ///< [2 layers + 1, hidden]: of each layer those before qkv and before gate_up; the one before the head
  Weight head = {};                 ///< [vocabulary, hidden], or without elements
  Tensor cosines = {}, sines = {};  ///< f32 [positions, head_dim / 2]
  int layers = 0, heads = 0, kv_heads = 0, head_dim = 0;
  float epsilon = 0;  ///< of the RMS norms

  bool has_head() const { return head.values().numel() > 0; }
};

/// What a step reads and writes.
struct Step {
  Tensor ids = {};                ///< i32 [sequences]: the tokens, below the vocabulary
  Tensor keys = {}, values = {};  ///< [layers, pages, kPageTokens, kv_heads, head_dim]: a cache, which gets the new ones
  Tensor lengths = {};            ///< i32 [sequences]: tokens of each sequence in the cache
  Tensor pages = {};              ///< i32 [sequences, pages of the longest]
  Tensor scores = {};             ///< [sequences, vocabulary], with a head
  Tensor x = {};                  ///< [sequences, hidden], without a head: what the last layer leaves, before the norm
};

/// Whether run() is for such a step: on a Hopper GPU, up to kMostSequences sequences, sizes that its tiles divide.
bool supports(const Decoder& decoder, std::int64_t sequences, const Stream& stream);

/// One token of each sequence through the decoder, on any GPU. In a stream beside others it waits until all of the GPU's SMs are free: its
/// blocks run at once.
void run(const Decoder& decoder, const Step& step, const Stream& stream);

/// The decoder's sizes, by default those of GLM-ASR-Nano.
inline constexpr ShapeKey kShape[] = {{"sequences", "tokens that are decoded together", 1},
                                      {"length", "tokens in the cache of each sequence", 512},
                                      {"layers", "of the decoder", 28},
                                      {"hidden", "size of a token's vector", 2048},
                                      {"intermediate", "size between gate_up and down", 6144},
                                      {"heads", "of queries", 16},
                                      {"vocabulary", "tokens that there are", 59264}};
std::vector<KernelVariant> registered();

}  // namespace tw::kernels::decode_step
