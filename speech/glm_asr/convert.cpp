#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "models/convert.hpp"
#include "models/json.hpp"
#include "models/weights.hpp"
#include "runtime/files.hpp"
#include "runtime/format.hpp"
#include "runtime/sha256.hpp"
#include "speech/glm_asr/model.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech.hpp"

namespace tw::speech {

namespace fs = std::filesystem;

namespace {

/// A folder beside the result, with a name that no other process uses; removed unless it is renamed.
class PartialDirectory {
 public:
  explicit PartialDirectory(const fs::path& result) : path_(result) {
    path_ += tw::format(".partial-{}", ::getpid());
    std::error_code error;
    if (!fs::create_directory(path_, error)) throw FileError(tw::format("{}: {}", path_.string(), error ? error.message() : "exists"));
  }
  ~PartialDirectory() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  PartialDirectory(const PartialDirectory&) = delete;
  PartialDirectory& operator=(const PartialDirectory&) = delete;

  const fs::path& path() const { return path_; }
  void become(const fs::path& result) {
    std::error_code error;
    fs::rename(path_, result, error);
    if (error) throw FileError(tw::format("{}: {}", result.string(), error.message()));
    path_.clear();
  }

 private:
  fs::path path_;
};

/// Whether a file of a checkpoint is copied: not weights in any format, nor what lists them, nor what is written anew.
bool is_copied(const fs::path& file) {
  constexpr std::array<std::string_view, 9> kWeights = {".safetensors", ".bin",     ".pt", ".pth", ".ckpt",
                                                        ".gguf",        ".msgpack", ".h5", ".onnx"};
  const std::string name = file.filename().string(), extension = file.extension().string();
  if (name.starts_with('.') || name == "config.json" || name == "SHA256SUMS" || name.ends_with(".index.json")) return false;
  return std::find(kWeights.begin(), kWeights.end(), extension) == kWeights.end();
}

void write(const fs::path& file, const std::string& text) {
  std::string problem;
  if (!write_file(file.string(), {text}, &problem)) throw FileError(problem);
}

}  // namespace

void convert_checkpoint(const fs::path& directory, const fs::path& given, const QuantizedMatrix::Layout& layout,
                        const std::function<void(std::int64_t, std::int64_t)>& progress) {
  const fs::path result = given.has_filename() ? given : given.parent_path();  // "OUT/"
  if (layout.format == WeightFormat::plain) throw InvalidArgument("weights are plain; a checkpoint is converted to int8, fp8 or int4");
  const GlmAsrConfig config = GlmAsrConfig::read(directory);
  if (config.weights.format != WeightFormat::plain)
    throw InvalidArgument(
        tw::format("{}: the weights are in {} already; convert the original checkpoint", directory.string(), text_of(config.weights)));
  std::error_code error;
  if (fs::exists(fs::symlink_status(result, error)))
    throw FileError(tw::format("{}: exists; a converted checkpoint is written to a new directory", result.string()));

  const models::SafeTensors files = models::SafeTensors::open_directory(directory);
  models::Weights weights(directory.string(), files, canonical_weight_name);
  weights.set_layouts({.format = WeightFormat::plain}, layout);
  weights.check([&](models::Weights& from) {
    const Encoder encoder(config, from);
    const models::Llama decoder(config.decoder, from);
  });

  PartialDirectory partial(result);
  const std::string weights_hash = models::write_quantized(files, weights.linear_layouts(), partial.path() / "model.safetensors", progress);
  nlohmann::json json = models::load_json(directory / "config.json");
  json["quantization_config"] = {{"quant_method", "tilewave"},
                                 {"format", name_of(layout.format)},
                                 {"source", fs::absolute(directory).lexically_normal().filename().string()}};
  if (layout.format == WeightFormat::int4)
    json["quantization_config"].update({{"group", layout.group}, {"zero_points", layout.zero_points}});
  const std::string text = json.dump(2) + "\n";
  write(partial.path() / "config.json", text);
  write(partial.path() / "SHA256SUMS",
        tw::format("{}  model.safetensors\n{}  config.json\n", weights_hash, hex(Sha256().add(text).finish())));
  for (const fs::directory_entry& entry : fs::directory_iterator(directory)) {
    if (!entry.is_regular_file() || !is_copied(entry.path())) continue;
    fs::copy_file(entry.path(), partial.path() / entry.path().filename(), error);
    if (error) throw FileError(tw::format("{}: {}", entry.path().string(), error.message()));
  }
  partial.become(result);
}

}  // namespace tw::speech
