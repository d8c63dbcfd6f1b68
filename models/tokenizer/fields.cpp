#include "models/tokenizer/fields.hpp"

#include "models/json.hpp"
#include "models/one_line.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

Fields::Fields(const nlohmann::json& object, const std::string& file, std::string where)
    : object_(object), file_(file), where_(std::move(where)) {
  if (!object.is_object()) fail(tw::format("is {}; allowed: an object", object.type_name()));
}

void Fields::fail(const std::string& what) const { throw FileError(tw::format("{}: {}: {}", file_, where_, what)); }

void Fields::unsupported(const std::string& found, const char* allowed) const {
  fail(tw::format("{} is not supported; allowed: {}", in_quotes(found), allowed));
}

std::string Fields::type(const std::string& fallback) const { return has("type") ? string("type") : fallback; }

bool Fields::has(const char* name) const {
  const auto found = object_.find(name);
  return found != object_.end() && !found->is_null();
}

const nlohmann::json& Fields::at(const char* name) const {
  const auto found = object_.find(name);
  if (found == object_.end()) fail(tw::format("no {}", name));
  return *found;
}

std::string Fields::string(const char* name) const {
  const auto& value = at(name);
  if (!value.is_string()) fail(tw::format("{} is {}; allowed: a string", name, value.type_name()));
  return value.get<std::string>();
}

bool Fields::boolean(const char* name, bool fallback) const {
  if (!has(name)) return fallback;
  const auto& value = at(name);
  if (!value.is_boolean()) fail(tw::format("{} is {}; allowed: true or false", name, value.type_name()));
  return value.get<bool>();
}

int Fields::number(const char* name, int largest) const {
  const auto& value = at(name);
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > static_cast<std::uint64_t>(largest))
    fail(tw::format("{} is {}; allowed: whole numbers from 0 to {}", name, one_line(brief(value)), largest));
  return value.get<int>();
}

const nlohmann::json& Fields::array(const char* name) const {
  const auto& value = at(name);
  if (!value.is_array()) fail(tw::format("{} is {}; allowed: an array", name, value.type_name()));
  return value;
}

Fields Fields::object(const char* name) const { return {at(name), file_, tw::format("{}.{}", where_, name)}; }

Fields Fields::element(const char* name, std::size_t index) const {
  return {array(name)[index], file_, tw::format("{}.{}[{}]", where_, name, index)};
}

}  // namespace tw::models
