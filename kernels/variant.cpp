#include "kernels/variant.hpp"

#include <algorithm>
#include <charconv>

#include "kernels/check.hpp"

namespace tw {

std::string key_list(std::span<const ShapeKey> keys) {
  std::string list;
  for (const ShapeKey& key : keys)
    list += tw::format("{}{}{}", list.empty() ? "" : ", ", key.name, key.standard ? tw::format(" ({})", *key.standard) : "");
  return list;
}

ShapeValues::ShapeValues(std::string_view text, std::span<const ShapeKey> keys) {
  constexpr std::int64_t largest = std::int64_t{1} << 30;
  std::vector<std::optional<std::int64_t>> given(keys.size());
  for (std::string_view left = text; !left.empty();) {
    const std::string_view item = left.substr(0, left.find(','));
    left.remove_prefix(std::min(left.size(), item.size() + 1));
    const std::size_t equals = item.find('=');
    require(equals != std::string_view::npos, "shape: \"{}\" is not NAME=NUMBER; the names are: {}", item, key_list(keys));
    const std::string_view name = item.substr(0, equals), number = item.substr(equals + 1);
    const auto key = std::find_if(keys.begin(), keys.end(), [&](const ShapeKey& k) { return k.name == name; });
    require(key != keys.end(), "shape: there is no \"{}\"; the names are: {}", name, key_list(keys));
    std::int64_t value = -1;
    const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value);
    require(error == std::errc() && end == number.data() + number.size() && value >= 0 && value <= largest,
            "shape: {} is \"{}\"; it must be a number from 0 to {}", name, number, largest);
    std::optional<std::int64_t>& place = given[static_cast<std::size_t>(key - keys.begin())];
    require(!place, "shape: {} is given twice", name);
    place = value;
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    require(given[i] || keys[i].standard, "shape: {} is missing ({}); the names are: {}", keys[i].name, keys[i].what, key_list(keys));
    values_.emplace_back(keys[i].name, given[i] ? *given[i] : *keys[i].standard);
  }
}

std::int64_t ShapeValues::operator[](std::string_view name) const {
  return std::find_if(values_.begin(), values_.end(), [&](const auto& value) { return value.first == name; })->second;
}

std::string ShapeValues::text() const {
  std::string all;
  for (const auto& [name, value] : values_) all += tw::format("{}{}={}", all.empty() ? "" : ",", name, value);
  return all;
}

}  // namespace tw
