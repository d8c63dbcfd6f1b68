#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>

namespace tw::models {

/// What a document may take in memory: a tokenizer of 262144 tokens and twice as many merges takes half of it.
constexpr std::size_t kMostJsonMemory = std::size_t{384} << 20;

/// The JSON document in `file`, of at most `largest` bytes, 64 levels and kMostJsonMemory. Throws FileError, whose message begins with
/// the file's name, when it cannot be read, is no regular file, exceeds a limit, or is no JSON. Takes time in proportion to the bytes.
nlohmann::json load_json(const std::filesystem::path& file, std::size_t largest = 64u << 20);

/// The same of a text; `name` begins the messages.
nlohmann::json parse_json(std::string_view text, const std::string& name, std::size_t memory = kMostJsonMemory);

/// A value for a message: its JSON, cut to about 60 bytes of one line.
std::string brief(const nlohmann::json& value);

}  // namespace tw::models
