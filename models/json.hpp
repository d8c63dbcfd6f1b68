#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace tw::models {

/// The most memory for a document: a tokenizer of 262144 tokens and twice as many merges takes half of it.
constexpr std::size_t kMostJsonMemory = std::size_t{384} << 20;

/// The JSON document in `file`, of at most `largest` bytes, 64 levels and kMostJsonMemory. Throws FileError, whose message begins with
/// the file's name, if it cannot be read, is not a regular file, exceeds a limit, or is not JSON. Takes time in proportion to the bytes.
nlohmann::json load_json(const std::filesystem::path& file, std::size_t largest = 64u << 20);

/// The same for a text. Messages begin with `name`.
nlohmann::json parse_json(std::string_view text, const std::string& name, std::size_t memory = kMostJsonMemory);

/// A value for a message: its JSON on one line, cut to about 60 bytes.
std::string brief(const nlohmann::json& value);

}  // namespace tw::models
