#include "models/config_reader.hpp"

#include <cmath>

#include "models/json.hpp"
#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {

using nlohmann::json;

ConfigReader::ConfigReader(std::string file, std::string path, std::shared_ptr<const json> object)
    : file_(std::move(file)), path_(std::move(path)), object_(std::move(object)) {
  if (!object_->is_object())
    throw FileError(tw::format("{}: {} is not an object", file_, path_.empty() ? "the document" : path_.substr(0, path_.size() - 1)));
}

const json* ConfigReader::find(const std::string& field) const {
  const auto found = object_->find(field);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

bool ConfigReader::has(const std::string& field) const { return find(field) != nullptr; }

ConfigReader ConfigReader::child(const std::string& field) const {
  const json* value = find(field);
  return {file_, path_ + field + ".", value ? std::shared_ptr<const json>(object_, value) : std::make_shared<const json>(json::object())};
}

void ConfigReader::fail(const std::string& field, const std::string& wanted) const {
  const json* value = find(field);
  throw FileError(tw::format("{}: {}{} is {}; {}", file_, path_, field, value ? brief(*value) : "missing", wanted));
}

std::int64_t ConfigReader::integer(const std::string& field, std::int64_t least, std::int64_t most,
                                   std::optional<std::int64_t> missing) const {
  const json* value = find(field);
  if (!value && missing) return *missing;
  const auto wanted = [&] { return tw::format("allowed: an integer from {} to {}", least, most); };
  if (!value || !value->is_number_integer() || (value->is_number_unsigned() && value->get<std::uint64_t>() > INT64_MAX))
    fail(field, wanted());
  const auto number = value->get<std::int64_t>();
  if (number < least || number > most) fail(field, wanted());
  return number;
}

double ConfigReader::number(const std::string& field, double least, double most, std::optional<double> missing) const {
  const json* value = find(field);
  if (!value && missing) return *missing;
  const auto wanted = [&] { return tw::format("allowed: a number from {} to {}", least, most); };
  if (!value || !value->is_number()) fail(field, wanted());
  const double number = value->get<double>();
  if (!(number >= least && number <= most)) fail(field, wanted());
  return number;
}

bool ConfigReader::flag(const std::string& field, bool missing) const {
  const json* value = find(field);
  if (value && !value->is_boolean()) fail(field, "allowed: true or false");
  return value ? value->get<bool>() : missing;
}

std::string ConfigReader::text(const std::string& field, std::optional<std::string> missing) const {
  const json* value = find(field);
  if (!value && missing) return *missing;
  if (!value || !value->is_string()) fail(field, "allowed: a string");
  return value->get<std::string>();
}

std::vector<int> ConfigReader::integers(const std::string& field, std::int64_t least, std::int64_t most) const {
  const json* value = find(field);
  if (!value) return {};
  constexpr std::size_t kMost = 1024;
  std::vector<int> numbers;
  const auto add = [&](const json& entry) {
    const bool fits = entry.is_number_integer() && !(entry.is_number_unsigned() && entry.get<std::uint64_t>() > INT64_MAX);
    if (!fits || entry.get<std::int64_t>() < least || entry.get<std::int64_t>() > most)
      fail(field, tw::format("allowed: an integer from {} to {}, or a list of them", least, most));
    numbers.push_back(entry.get<int>());
  };
  if (!value->is_array()) {
    add(*value);
  } else {
    if (value->size() > kMost) fail(field, tw::format("a list of {}; allowed: at most {}", value->size(), kMost));
    for (const json& entry : *value) add(entry);
  }
  return numbers;
}

}  // namespace tw::models
