#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace tw::models {

/// The JSON document in `file`, of at most `largest` bytes and 64 levels. Throws FileError, whose message begins with the file's name, when
/// it cannot be read, is larger or deeper, or is no JSON.
nlohmann::json load_json(const std::filesystem::path& file, std::size_t largest = 64u << 20);

/// The same of a text; `name` begins the messages.
nlohmann::json parse_json(std::string_view text, const std::string& name);

}  // namespace tw::models
