// A checkpoint's configuration: config.json, generation_config.json, processor_config.json, tokenizer_config.json and chat_template.jinja,
// with a zero byte between them. What is read is in its limits.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <tuple>

#include "speech/glm_asr/config.hpp"
#include "tilewave/error.hpp"

namespace {

const std::filesystem::path& directory() {
  static const std::filesystem::path made = [] {
    std::string pattern = (std::filesystem::temp_directory_path() / "tilewave-fuzz-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) std::abort();
    std::atexit([] { std::filesystem::remove_all(directory()); });
    return std::filesystem::path(pattern);
  }();
  return made;
}

void require(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  for (const char* name :
       {"config.json", "generation_config.json", "processor_config.json", "tokenizer_config.json", "chat_template.jinja"}) {
    const std::filesystem::path file = directory() / name;
    const std::string_view part = rest.substr(0, rest.find('\0'));
    rest.remove_prefix(std::min(rest.size(), part.size() + 1));
    if (part.empty()) {
      std::filesystem::remove(file);
    } else {
      std::ofstream(file, std::ios::binary) << part;
    }
  }
  try {
    const auto config = tw::speech::GlmAsrConfig::read(directory());
    const auto& [encoder, decoder, mel] = std::tie(config.encoder, config.decoder, config.mel);
    require(encoder.hidden > 0 && encoder.layers > 0 && encoder.heads > 0 && encoder.intermediate == 4 * encoder.hidden);
    require(encoder.rotary_dim >= 2 && encoder.rotary_dim <= encoder.head_dim && encoder.positions % 4 == 0);
    require(decoder.hidden > 0 && decoder.kv_heads > 0 && decoder.heads % decoder.kv_heads == 0 && decoder.max_positions > 0);
    require(config.audio_token >= 0 && config.audio_token < decoder.vocabulary && !config.end_tokens.empty());
    for (const int id : config.end_tokens) require(id >= 0 && id < decoder.vocabulary);
    require(mel.hop > 0 && mel.mel_bins > 0 && mel.n_fft >= 16 && std::int64_t{mel.sampling_rate} * mel.window_seconds / mel.hop <= 16384);
    require(config.prompt.size() <= 16384);
  } catch (const tw::FileError&) {
  }
  return 0;
}
