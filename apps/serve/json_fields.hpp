#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "apps/serve/error.hpp"
#include "models/json.hpp"
#include "models/one_line.hpp"
#include "runtime/format.hpp"

namespace tw::serve {

[[noreturn]] inline void refuse_field(const std::string& field, const std::string& message, const std::string& code = "invalid_value") {
  throw ApiError(400, message, field, code);
}

[[noreturn]] inline void refuse_value(const std::string& field, const nlohmann::json& value, const std::string& allowed,
                                      const std::string& code = "invalid_value") {
  refuse_field(field, tw::format("{} is {}; it must be {}", field, models::brief(value), allowed), code);
}

/// Reads an object that a client sent. All functions throw ApiError 400, which names the field with its path: session.audio.input.
class JsonFields {
 public:
  /// Refuses what is not an object, and members that are not in `known`.
  JsonFields(const nlohmann::json& object, std::string path, std::initializer_list<std::string_view> known)
      : object_(object), path_(std::move(path)) {
    if (!object.is_object()) refuse_value(path_, object, "an object", "invalid_type");
    for (const auto& [key, value] : object.items()) {
      if (std::find(known.begin(), known.end(), key) != known.end()) continue;
      std::string names;
      for (const std::string_view name : known) names += tw::format("{}{}", names.empty() ? "" : ", ", name);
      const std::string field = path_of(models::one_line(key));
      refuse_field(field, tw::format("{} is unknown; allowed are {}", field, names), "unknown_parameter");
    }
  }

  std::string path_of(std::string_view name) const { return path_.empty() ? std::string(name) : tw::format("{}.{}", path_, name); }

  /// Null if there is none.
  const nlohmann::json* find(std::string_view name) const {
    const auto found = object_.find(std::string(name));
    return found == object_.end() ? nullptr : &*found;
  }

  const nlohmann::json& require(std::string_view name) const {
    const nlohmann::json* value = find(name);
    if (!value) refuse_field(path_of(name), tw::format("{} is missing", path_of(name)), "missing_required_parameter");
    return *value;
  }

  /// Nothing if there is none.
  std::optional<double> number(std::string_view name, double least, double most) const {
    const nlohmann::json* value = find(name);
    if (!value) return {};
    const std::string allowed = tw::format("a number from {} to {}", least, most);
    if (!value->is_number()) refuse_value(path_of(name), *value, allowed, "invalid_type");
    const double number = value->get<double>();
    if (!(number >= least && number <= most)) refuse_value(path_of(name), *value, allowed);
    return number;
  }

  std::optional<std::string> text(std::string_view name, std::size_t most_bytes) const {
    const nlohmann::json* value = find(name);
    if (!value) return {};
    if (!value->is_string()) refuse_value(path_of(name), *value, "a string", "invalid_type");
    const std::string& text = value->get_ref<const std::string&>();
    if (text.size() > most_bytes)
      refuse_field(path_of(name), tw::format("{} has {} bytes; at most {} are allowed", path_of(name), text.size(), most_bytes));
    return text;
  }

  void check_boolean(std::string_view name) const {
    const nlohmann::json* value = find(name);
    if (value && !value->is_boolean()) refuse_value(path_of(name), *value, "true or false", "invalid_type");
  }

 private:
  const nlohmann::json& object_;
  std::string path_;
};

}  // namespace tw::serve
