#pragma once

#include <vector>

#include "models/linear.hpp"
#include "models/weights.hpp"
#include "speech/glm_asr/config.hpp"
#include "tilewave/tensor.hpp"

namespace tw::speech {

struct EncoderSize {
  std::int64_t weight_bytes = 0;  ///< including the projector's
  double flops = 0;               ///< of a window: products, a multiply-add counting twice
};

/// Log-mel windows to embeddings that the decoder reads: two convolutions, transformer layers over a whole window, and the projector, which
/// makes one embedding of 4 positions.
class Encoder {
 public:
  /// Takes its tensors from `weights`, under the names "audio_tower...." and "multi_modal_projector....".
  Encoder(const GlmAsrConfig& config, models::Weights& weights);

  /// All of it: mel [windows, frames, mel_bins] in f32 on any device to [windows, positions / 4, decoder hidden] in the model's dtype.
  /// Every window's result is its own.
  Tensor encode(const Tensor& mel, const Stream& stream) const;

  EncoderSize size() const;

  // Its steps: x is [windows, positions, hidden].

  Tensor convolve(const Tensor& mel, const Stream& stream) const;
  void run_layer(int index, const Tensor& x, const Stream& stream) const;  ///< in place
  Tensor normalise(const Tensor& x, const Stream& stream) const;
  Tensor project(const Tensor& x, const Stream& stream) const;

 private:
  struct Norm {
    Tensor weight, bias;
    void operator()(const Tensor& x, const Tensor& y, const Stream& stream) const;
  };
  struct Layer {
    Norm input_norm, post_attention_norm;
    models::Linear qkv, out, up, down;
  };
  static Norm take_norm(models::Weights& weights, const std::string& name, int hidden);

  GlmAsrConfig::Encoder config_;
  Activation projector_activation_;
  models::Linear conv1_, conv2_;  ///< weights [hidden, 3, channels]
  std::vector<Layer> layers_;
  Norm norm_;
  models::Linear linear_1_, linear_2_;
  Tensor cos_, sin_;  ///< [positions, rotary_dim / 2], f32
};

}  // namespace tw::speech
