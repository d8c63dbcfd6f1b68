#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "models/llama.hpp"
#include "models/sampling.hpp"
#include "models/tokenizer.hpp"

namespace tw::models {

struct GenerateOptions {
  int max_tokens = 256;  ///< at least 1; the model's context may end before
  SamplingOptions sampling = {};
  bool ignore_end = false;  ///< go on after an end token: for measurements
};

/// What generate() did.
struct Generated {
  int prompt_tokens = 0, tokens = 0;
  double prompt_seconds = 0;  ///< until the first token is known
  double seconds = 0;         ///< for the tokens after it
  bool ended = false;         ///< by an end token, rather than by max_tokens or the context
};

struct PerplexityOptions {
  int window = 512;  ///< tokens, with those that the tokenizer puts in front of a text; at least 2, and at most the model's context
  int batch = 8;     ///< windows that are processed side by side
};

/// How well a model predicts a text.
struct Perplexity {
  double value = 0;         ///< exp of the mean of -log(probability) of the tokens
  std::int64_t tokens = 0;  ///< that were predicted
};

/// A language model in a folder as transformers saves it: config.json, tokenizer.json, safetensors, and generation_config.json if there is
/// one. Decoders of LlamaConfig: "llama" and "bitnet".
class TextModel {
 public:
  /// Weights and states are of `dtype`; without one f32 on the CPU and bf16 on a GPU. The weights of linear layers are rounded to
  /// `weights`, which must be plain for "bitnet". Throws FileError, InvalidArgument, OutOfMemory.
  static TextModel load(const std::filesystem::path& directory, Device device, std::optional<DType> dtype = {},
                        const QuantizedMatrix::Layout& weights = {.format = WeightFormat::plain});

  const Llama& decoder() const { return decoder_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }

  /// Continues `prompt`, with the tokens that the tokenizer puts around a text. `on_text` gets the text as it is completed, whole
  /// characters at a time, without special tokens. Throws InvalidArgument for options out of range and for a prompt that has no tokens or
  /// does not leave room for one.
  Generated generate(std::string_view prompt, const GenerateOptions& options, const std::function<void(std::string_view)>& on_text) const;
  /// The same after the tokens `prompt`, each below the vocabulary.
  Generated generate(std::span<const int> prompt, const GenerateOptions& options,
                     const std::function<void(std::string_view)>& on_text) const;

  /// The perplexity of `text`, cut into windows that know nothing of each other, each with the tokens that the tokenizer puts in front of
  /// a text. Every token of the text counts, but for the first of a window that has nothing in front. Throws InvalidArgument for options
  /// out of range and for a text without a token to predict.
  Perplexity perplexity(std::string_view text, const PerplexityOptions& options = {}) const;

 private:
  TextModel(Llama decoder, Tokenizer tokenizer, std::set<int> ends, Stream stream)
      : decoder_(std::move(decoder)), tokenizer_(std::move(tokenizer)), ends_(std::move(ends)), stream_(std::move(stream)) {}

  Llama decoder_;
  Tokenizer tokenizer_;
  std::set<int> ends_;  ///< tokens that end a text
  Stream stream_;
};

}  // namespace tw::models
