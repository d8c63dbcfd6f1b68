#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tw::models {

/// Reads the fields of a configuration: an object of a JSON file. Errors are FileError: "config.json: text_config.hidden_size is "x";
/// allowed: an integer from 1 to 1048576". A field that is null counts as missing.
class ConfigReader {
 public:
  /// Messages begin with `file`. Throws FileError unless `object` is an object.
  ConfigReader(std::string file, nlohmann::json object)
      : ConfigReader(std::move(file), "", std::make_shared<const nlohmann::json>(std::move(object))) {}

  bool has(const std::string& field) const;
  /// The object in `field`; an empty one if it is missing.
  ConfigReader child(const std::string& field) const;
  /// Throws if `field` is missing and there is no default, or if it is not an integer from `least` to `most`.
  std::int64_t integer(const std::string& field, std::int64_t least, std::int64_t most, std::optional<std::int64_t> missing = {}) const;
  /// Finite, from `least` to `most`.
  double number(const std::string& field, double least, double most, std::optional<double> missing = {}) const;
  bool flag(const std::string& field, bool missing) const;
  std::string text(const std::string& field, std::optional<std::string> missing = {}) const;
  /// An integer or a list of at most 1024 integers, each from `least` to `most`; empty if the field is missing.
  std::vector<int> integers(const std::string& field, std::int64_t least, std::int64_t most) const;
  /// "config.json: text_config.", the start of messages.
  std::string where() const { return file_ + ": " + path_; }
  /// Throws FileError with the value of `field`, and `wanted`.
  [[noreturn]] void fail(const std::string& field, const std::string& wanted) const;

 private:
  ConfigReader(std::string file, std::string path, std::shared_ptr<const nlohmann::json> object);
  const nlohmann::json* find(const std::string& field) const;

  std::string file_;
  std::string path_;                              ///< "text_config.", of the object in its file
  std::shared_ptr<const nlohmann::json> object_;  ///< part of the document, which it keeps alive
};

}  // namespace tw::models
