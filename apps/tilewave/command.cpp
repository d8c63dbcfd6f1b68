#include "command.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <limits>
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

/// The JSON library does not escape DEL and the C1 controls (U+0080 to U+009F), which some terminals obey. They occur only in strings.
std::string dump(const nlohmann::ordered_json& json, int indent) {
  const std::string text = json.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  std::string safe;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]), next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    const bool c1 = byte == 0xC2 && next < 0xA0;
    if (c1) ++i;
    if (c1 || byte == 0x7F)
      safe += tw::format("\\u{:04x}", c1 ? next : byte);
    else
      safe += text[i];
  }
  return safe;
}

}  // namespace

std::string json_text(const nlohmann::ordered_json& json) { return dump(json, 2) + "\n"; }
std::string json_line(const nlohmann::ordered_json& json) { return dump(json, -1); }

void print_json(const nlohmann::ordered_json& json) {
  const std::string text = json_text(json);
  std::fwrite(text.data(), 1, text.size(), stdout);
}

std::string did_you_mean(const std::string& given, std::span<const std::string> known) {
  std::vector<std::pair<std::size_t, std::string>> near;
  for (const std::string& name : known) {
    const bool part = !given.empty() && name.find(given) != std::string::npos;
    const std::size_t distance = edit_distance(given, name);
    if (part || distance <= std::max<std::size_t>(2, name.size() / 4)) near.emplace_back(distance, tw::format("\"{}\"", name));
  }
  std::sort(near.begin(), near.end());
  std::vector<std::string> names;
  for (auto& [distance, name] : near) {
    if (names.size() < 5) names.push_back(std::move(name));
  }
  return names.empty() ? "" : tw::format(" (did you mean {}?)", tw::join(names, ", "));
}

std::string full_name(const CLI::App& command) {
  return command.get_parent() == nullptr ? command.get_name() : full_name(*command.get_parent()) + " " + command.get_name();
}

std::string unknown_command(const CLI::App& app, const std::string& given) {
  std::vector<std::string> known;
  for (const CLI::App* command : app.get_subcommands({})) known.push_back(command->get_name());
  return tw::format("there is no command \"{}\"{}; there are: {}", given, did_you_mean(given, known), tw::join(known, ", "));
}

void add_device_option(CLI::App& command, std::string& device) {
  completes_with(
      command.add_option("--device", device, "auto (the first usable GPU, or else the CPU), cpu, cuda or cuda:N")->capture_default_str(),
      [] {
        return std::vector<std::string>{"auto", "cpu", "cuda"};
      });
  const auto set_target = [](const std::string& name) {
    try {
      set_gpu_target(parse_gpu_target(name));
    } catch (const InvalidArgument& error) {
      throw UsageError(error.what());
    }
  };
  completes_with(
      command
          .add_option_function<std::string>("--target", set_target,
                                            "The target of GPU kernels: auto, sm_90a (Hopper), or cuda (any NVIDIA GPU since compute "
                                            "capability 8.0)")
          ->type_name("TARGET"),
      [] {
        return std::vector<std::string>{"auto", "sm_90a", "cuda"};
      });
}

CLI::Validator unsigned_number() {
  const auto check = [](const std::string& given) -> std::string {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
    if (error == std::errc() && end == given.data() + given.size()) return "";
    return tw::format("{} is not a whole number from 0 to {}", given, std::numeric_limits<std::uint64_t>::max());
  };
  return CLI::Validator(check, "0 to 2^64 - 1");
}

std::string bytes_text(std::size_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return tw::format("{:.4g} {}", value, kUnits[unit]);
}

}  // namespace tw::cli
