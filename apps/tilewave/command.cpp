#include "command.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "runtime/format.hpp"

namespace tw::cli {
namespace {

/// Levenshtein's distance.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string json_text(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string json_line(const nlohmann::ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void print_json(const nlohmann::ordered_json& json) {
  const std::string text = json_text(json);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

std::string did_you_mean(const std::string& given, std::span<const std::string> known) {
  std::vector<std::pair<std::size_t, std::string>> near;
  for (const std::string& name : known) {
    const bool part = !given.empty() && name.find(given) != std::string::npos;
    const std::size_t distance = part ? 0 : edit_distance(given, name);
    if (distance <= std::max<std::size_t>(2, name.size() / 4)) near.emplace_back(distance, tw::format("\"{}\"", name));
  }
  std::sort(near.begin(), near.end());
  std::vector<std::string> names;
  for (auto& [distance, name] : near) {
    if (names.size() < 5) names.push_back(std::move(name));
  }
  return names.empty() ? "" : tw::format(" (did you mean {}?)", tw::join(names, ", "));
}

std::string bytes_text(std::size_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return tw::format("{:.4g} {}", value, kUnits[unit]);
}

}  // namespace tw::cli
