#pragma once

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/safetensors.hpp"
#include "runtime/format.hpp"
#include "tests/gguf_writer.hpp"

// The bundled checkpoint as GGUF files, with the names, the order of rows, the types and the metadata that llama.cpp's converter gives
// them (convert_hf_to_gguf.py and its --mmproj).

namespace tw::test {

inline const std::string kDigitsCheckpoint = std::string(TILEWAVE_SOURCE_DIR) + "/assets/digits";

/// A tensor of the checkpoint as f32, under a name without the prefixes of the decoder.
struct DigitsTensor {
  Shape shape;
  std::vector<float> values;
};
inline std::map<std::string, DigitsTensor> digits_tensors() {
  const auto file = models::SafeTensors::open_directory(kDigitsCheckpoint);
  std::map<std::string, DigitsTensor> tensors;
  for (const std::string& name : file.names()) {
    std::string canonical = name;
    for (const std::string_view prefix : {"language_model.", "model.", "model."})
      if (canonical.starts_with(prefix)) canonical.erase(0, prefix.size());
    const Tensor tensor = file.tensor(name).to(DType::f32);
    tensors[canonical] = {tensor.shape(), {tensor.data<float>(), tensor.data<float>() + tensor.numel()}};
  }
  return tensors;
}

/// The converter's order of the rows of each head: first and second members of rotated pairs alternate.
inline std::vector<float> pairs_as_neighbours(const DigitsTensor& tensor, int head_dim, int rotary_dim) {
  const auto rows = static_cast<std::size_t>(tensor.shape[0]), row = tensor.values.size() / rows;
  std::vector<float> values;
  for (std::size_t r = 0; r < rows; ++r) {
    const int i = static_cast<int>(r) % head_dim;
    const int from = i >= rotary_dim ? i : i / 2 + i % 2 * rotary_dim / 2;
    const auto begin =
        tensor.values.begin() + static_cast<std::ptrdiff_t>((r - static_cast<std::size_t>(i) + static_cast<std::size_t>(from)) * row);
    values.insert(values.end(), begin, begin + static_cast<std::ptrdiff_t>(row));
  }
  return values;
}

/// The two files.
struct DigitsGguf {
  GgufWriter model, mmproj;
  /// What each tensor of a file holds, before it is encoded, and its format.
  std::map<std::string, std::pair<std::vector<float>, GgufFormat>> written;

  struct Paths {
    std::filesystem::path model, mmproj;
  };
  Paths write(const std::filesystem::path& folder) const {
    const Paths paths{folder / "model.gguf", folder / "mmproj.gguf"};
    std::ofstream(paths.model, std::ios::binary) << model.file();
    std::ofstream(paths.mmproj, std::ios::binary) << mmproj.file();
    return paths;
  }
};

inline void add_digits_tokenizer(GgufWriter& model, int vocabulary) {
  const auto json = nlohmann::json::parse(std::ifstream(kDigitsCheckpoint + "/tokenizer.json"));
  std::vector<std::string> tokens, merges;
  std::vector<std::int32_t> types(static_cast<std::size_t>(vocabulary), 5);  // unused
  for (int i = 0; i < vocabulary; ++i) tokens.push_back(tw::format("[PAD{}]", i));
  const auto add = [&](std::size_t id, const std::string& text, std::int32_t type) { tokens[id] = text, types[id] = type; };
  for (const auto& [text, id] : json["model"]["vocab"].items()) add(id, text, 1);
  for (const auto& token : json["added_tokens"]) add(token["id"], token["content"], token["special"] ? 3 : 4);
  for (const auto& merge : json["model"]["merges"])
    merges.push_back(merge.is_string() ? merge.get<std::string>() : merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  const auto id = [&](const char* text) {
    return static_cast<std::uint32_t>(std::find(tokens.begin(), tokens.end(), text) - tokens.begin());
  };
  model.set("tokenizer.ggml.model", "gpt2").set("tokenizer.ggml.pre", "glm4").set_array("tokenizer.ggml.tokens", tokens);
  model.set_array("tokenizer.ggml.token_type", types).set_array("tokenizer.ggml.merges", merges);
  model.set("tokenizer.ggml.eos_token_id", id("<|endoftext|>")).set("tokenizer.ggml.eot_token_id", id("<|user|>"));
  model.set("tokenizer.ggml.bos_token_id", id("<|endoftext|>")).set("tokenizer.ggml.unknown_token_id", id("<|endoftext|>"));
}

/// Matrices are in the format of this name, or in Q8_0 if their rows are not whole blocks; everything else is in F32, convolutions are in
/// F16 unless the format is exact.
inline DigitsGguf digits_gguf(const std::string& format) {
  constexpr std::uint32_t kVocabulary = 384, kHidden = 256, kEncoderHidden = 192;
  DigitsGguf files;
  files.model.set("general.architecture", "llama").set("general.type", "model").set("general.name", "digits");
  files.model.set<std::uint32_t>("llama.block_count", 4).set<std::uint32_t>("llama.context_length", 2048);
  files.model.set<std::uint32_t>("llama.embedding_length", kHidden).set<std::uint32_t>("llama.feed_forward_length", 512);
  files.model.set<std::uint32_t>("llama.attention.head_count", 4).set<std::uint32_t>("llama.attention.head_count_kv", 2);
  files.model.set<std::uint32_t>("llama.attention.key_length", 64).set<std::uint32_t>("llama.attention.value_length", 64);
  files.model.set("llama.rope.freq_base", 10000.0f).set<std::uint32_t>("llama.rope.dimension_count", 64);
  files.model.set("llama.attention.layer_norm_rms_epsilon", 1e-5f).set<std::uint32_t>("llama.vocab_size", kVocabulary);
  files.model.set<std::uint32_t>("general.quantization_version", 2);
  add_digits_tokenizer(files.model, kVocabulary);

  files.mmproj.set("general.architecture", "clip").set("general.type", "mmproj").set("clip.has_audio_encoder", true);
  files.mmproj.set("clip.projector_type", "glma").set<std::uint32_t>("clip.audio.projection_dim", kHidden);
  files.mmproj.set<std::uint32_t>("clip.audio.embedding_length", kEncoderHidden).set<std::uint32_t>("clip.audio.block_count", 2);
  files.mmproj.set<std::uint32_t>("clip.audio.feed_forward_length", 768).set<std::uint32_t>("clip.audio.attention.head_count", 3);
  files.mmproj.set<std::uint32_t>("clip.audio.num_mel_bins", 128).set("clip.audio.attention.layer_norm_epsilon", 1e-5f);
  files.mmproj.set<std::uint32_t>("clip.audio.projector.stack_factor", 4);

  const auto add = [&](GgufWriter& file, const std::string& name, const Shape& shape, std::vector<float> values) {
    const bool is_exact = format == "F32" || format == "BF16", is_convolution = shape.size() == 3;
    GgufFormat used = gguf_format("F32");
    if (is_convolution && !is_exact) used = gguf_format("F16");
    if (shape.size() == 2 && shape[1] > 1) used = gguf_format(shape[1] % gguf_format(format).elements == 0 ? format : "Q8_0");
    file.tensor(name, shape, used.id, gguf_encode(used, values));
    files.written[name] = {std::move(values), used};
  };
  const auto tensors = digits_tensors();
  const auto copy = [&](GgufWriter& file, const std::string& name, const std::string& from) {
    add(file, name, tensors.at(from).shape, tensors.at(from).values);
  };
  const auto copy_pairs = [&](GgufWriter& file, const std::string& name, const std::string& from, int rotary_dim) {
    add(file, name, tensors.at(from).shape, pairs_as_neighbours(tensors.at(from), 64, rotary_dim));
  };

  copy(files.model, "token_embd.weight", "embed_tokens.weight");
  copy(files.model, "output_norm.weight", "norm.weight");
  copy(files.model, "output.weight", "lm_head.weight");
  for (int i = 0; i < 4; ++i) {
    const std::string to = tw::format("blk.{}.", i), from = tw::format("layers.{}.", i);
    copy(files.model, to + "attn_norm.weight", from + "input_layernorm.weight");
    copy_pairs(files.model, to + "attn_q.weight", from + "self_attn.q_proj.weight", 64);
    copy_pairs(files.model, to + "attn_k.weight", from + "self_attn.k_proj.weight", 64);
    copy(files.model, to + "attn_v.weight", from + "self_attn.v_proj.weight");
    copy(files.model, to + "attn_output.weight", from + "self_attn.o_proj.weight");
    copy(files.model, to + "ffn_norm.weight", from + "post_attention_layernorm.weight");
    for (const char* each : {"gate", "up", "down"})
      copy(files.model, tw::format("{}ffn_{}.weight", to, each), tw::format("{}mlp.{}_proj.weight", from, each));
  }

  GgufWriter& mmproj = files.mmproj;
  for (int i = 1; i <= 2; ++i) {
    copy(mmproj, tw::format("a.conv1d.{}.weight", i), tw::format("audio_tower.conv{}.weight", i));
    add(mmproj, tw::format("a.conv1d.{}.bias", i), {kEncoderHidden, 1}, tensors.at(tw::format("audio_tower.conv{}.bias", i)).values);
  }
  for (const char* suffix : {".weight", ".bias"}) {
    for (int i = 0; i < 2; ++i) {
      const std::string to = tw::format("a.blk.{}.", i), from = tw::format("audio_tower.layers.{}.", i);
      copy_pairs(mmproj, to + "attn_q" + suffix, from + "self_attn.q_proj" + suffix, 32);
      if (std::string(suffix) == ".weight") copy_pairs(mmproj, to + "attn_k" + suffix, from + "self_attn.k_proj" + suffix, 32);
      copy(mmproj, to + "attn_v" + suffix, from + "self_attn.v_proj" + suffix);
      copy(mmproj, to + "attn_out" + suffix, from + "self_attn.o_proj" + suffix);
      copy(mmproj, to + "ln1" + suffix, from + "input_layernorm" + suffix);
      copy(mmproj, to + "ln2" + suffix, from + "post_attention_layernorm" + suffix);
      copy(mmproj, to + "ffn_up" + suffix, from + "mlp.fc1" + suffix);
      copy(mmproj, to + "ffn_down" + suffix, from + "mlp.fc2" + suffix);
    }
    copy(mmproj, std::string("mm.a.norm_pre") + suffix, std::string("audio_tower.norm") + suffix);
    copy(mmproj, std::string("mm.a.mlp.1") + suffix, std::string("multi_modal_projector.linear_1") + suffix);
    copy(mmproj, std::string("mm.a.mlp.2") + suffix, std::string("multi_modal_projector.linear_2") + suffix);
  }
  // Not part of the model; a model that used them would fail with NaN.
  const auto add_unused = [&](const std::string& name, const Shape& shape, std::size_t count) {
    add(mmproj, name, shape, std::vector<float>(count, std::nanf("")));
  };
  mmproj.tensor("a.position_embd.weight", {1500, kEncoderHidden}, 1, std::string(std::size_t{1500} * kEncoderHidden * 2, '\x7F'));
  add_unused("v.boi", {kHidden}, kHidden);
  add_unused("v.eoi", {kHidden}, kHidden);
  return files;
}

}  // namespace tw::test
