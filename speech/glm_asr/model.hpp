#pragma once

#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "models/llama.hpp"
#include "models/tokenizer.hpp"
#include "speech/glm_asr/config.hpp"
#include "speech/glm_asr/encoder.hpp"
#include "speech/mel/mel.hpp"
#include "tilewave/speech.hpp"

namespace tw::speech {

/// A GLM-ASR checkpoint, loaded.
struct GlmAsr {
  GlmAsrConfig config;
  models::Tokenizer tokenizer;
  LogMel mel;
  Encoder encoder;
  models::Llama decoder;

  /// From a directory, or from a GGUF file and options.mmproj. Throws FileError, InvalidArgument, OutOfMemory. `options` has a dtype
  /// afterwards.
  static GlmAsr load(const std::filesystem::path& model, LoadOptions& options, const Stream& stream);

  ModelSize size() const;

  /// The prompt's tokens: the user's turn with `audio_embeddings` placeholders for audio and `text`, then the start of the assistant's.
  std::vector<int> prompt(std::string_view text, int audio_embeddings) const;

  /// The embeddings of a prompt [tokens, hidden], with the placeholders replaced by the audio embeddings [n, hidden]. Throws
  /// InvalidArgument if their numbers differ.
  Tensor embed(std::span<const int> prompt, std::span<const Tensor> audio, const Stream& stream) const;
};

/// The checkpoint's tensors, after Weights::check() with the model that `config` describes. Throws FileError.
models::Weights open_weights(const std::filesystem::path& directory, const GlmAsrConfig& config);

/// The dtype of LoadOptions; `stored`: the checkpoint's. Throws InvalidArgument.
DType choose_dtype(const LoadOptions& options, DType stored);

/// The model's name of a tensor in either published spelling: without the leading "model." and "language_model.".
std::string canonical_weight_name(const std::string& name);

}  // namespace tw::speech
