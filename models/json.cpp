#include "models/json.hpp"

#include "models/one_line.hpp"
#include "runtime/files.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

nlohmann::json parse_json(std::string_view text, const std::string& name) {
  constexpr int kDeepest = 64;  // a document is destroyed recursively: one of a million levels would overflow the stack
  bool too_deep = false;
  const auto watch = [&](int depth, nlohmann::json::parse_event_t, nlohmann::json&) {
    too_deep = too_deep || depth >= kDeepest;
    return !too_deep;
  };
  try {
    nlohmann::json document = nlohmann::json::parse(text, watch);
    if (too_deep) throw FileError(tw::format("{}: JSON of more than {} levels", name, kDeepest));
    return document;
  } catch (const nlohmann::json::exception& error) {
    throw FileError(tw::format("{}: no valid JSON: {}", name, one_line(error.what())));
  }
}

nlohmann::json load_json(const std::filesystem::path& file, std::size_t largest) {
  std::error_code error;
  const auto size = std::filesystem::file_size(file, error);
  if (error) throw FileError(tw::format("{}: {}", file.string(), error.message()));
  if (size > largest) throw FileError(tw::format("{}: {} bytes; at most {} are read", file.string(), size, largest));
  const auto text = read_file(file.string(), largest);
  if (!text) throw FileError(tw::format("{}: cannot be read", file.string()));
  return parse_json(*text, file.string());
}

}  // namespace tw::models
