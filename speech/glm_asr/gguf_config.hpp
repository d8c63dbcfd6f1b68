#pragma once

#include <memory>
#include <string>

#include "models/gguf.hpp"
#include "models/tokenizer.hpp"
#include "speech/glm_asr/config.hpp"

// GLM-ASR in the two GGUF files that llama.cpp's converter writes: the decoder and the tokenizer in the model's, the audio encoder and the
// projector in that of "mmproj".

namespace tw::speech {

struct GgufPair {
  models::Gguf model, mmproj;

  /// "model.gguf and mmproj.gguf"
  std::string name() const { return model.file() + " and " + mmproj.file(); }
};

/// Throws FileError if a file is not of the kind that it was given as.
void check_gguf_kinds(const GgufPair& files);

/// The tokenizer in the model's metadata. Throws FileError for one that is not GLM-ASR's.
models::Tokenizer gguf_tokenizer(const models::Gguf& model);

/// The configuration in the metadata. What it does not hold is as in the published checkpoint: windows of 30 s, the prompt, rotation of
/// half of each of the encoder's heads. Throws FileError for other models and for metadata that contradicts itself.
GlmAsrConfig gguf_config(const GgufPair& files, const models::Tokenizer& tokenizer);

/// All tensors of both files, under the files' names and with the rows and shapes of the safetensors checkpoint. Those that are not part of
/// the model are left out: embeddings of positions, and those of two tokens that the decoder's embedding also has.
std::shared_ptr<const models::TensorSource> gguf_tensors(const GgufPair& files, const GlmAsrConfig& config);

/// The model's name of a tensor in a GGUF file, and the inverse. Other names are returned as they are.
std::string canonical_gguf_name(const std::string& name);
std::string stored_gguf_name(const std::string& name);

}  // namespace tw::speech
