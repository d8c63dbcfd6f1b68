#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "models/llama.hpp"
#include "speech/mel/mel.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/quantized.hpp"

namespace tw::speech {

/// The configuration in a GLM-ASR checkpoint's JSON files.
struct GlmAsrConfig {
  struct Encoder {
    int hidden = 0, intermediate = 0, layers = 0;
    int heads = 0, head_dim = 0;
    int positions = 0;   ///< of a window, after the convolutions
    int rotary_dim = 0;  ///< of head_dim
    double rope_theta = 10000;
    Activation activation = Activation::gelu_erf;
  };
  Encoder encoder;
  models::LlamaConfig decoder;
  Activation projector_activation = Activation::gelu_erf;
  int audio_token = 0;          ///< placeholder of an audio embedding
  std::vector<int> end_tokens;  ///< any of them ends the text
  MelOptions mel;
  std::string prompt;                                                 ///< the default prompt
  QuantizedMatrix::Layout weights = {.format = WeightFormat::plain};  ///< of the linear layers in the checkpoint
  double segment_seconds = 30;  ///< longest segment: a window, or generation_config.json's segment_seconds

  /// Encoder positions that make one audio embedding.
  static constexpr int kStack = 4;
  /// The number of audio embeddings for `frames` frames of a window that are not padding.
  static int embeddings(std::int64_t frames);

  /// Reads config.json, generation_config.json, processor_config.json or preprocessor_config.json, and looks at the chat template. Throws
  /// FileError for files that are missing or contradict each other, and for architectures and templates that are not GLM-ASR's.
  static GlmAsrConfig read(const std::filesystem::path& directory);
};

}  // namespace tw::speech
