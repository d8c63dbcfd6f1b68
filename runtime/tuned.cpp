#include "runtime/tuned.hpp"

#include <array>
#include <atomic>
#include <cctype>
#include <filesystem>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>

#include "runtime/files.hpp"
#include "runtime/format.hpp"
#include "runtime/nvrtc.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"

namespace tw {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormat = 1;
constexpr std::size_t kLargestFile = std::size_t{64} << 20;

/// What the kernels of a device are made with: timings do not outlive it.
std::string compiler_of(Device device) {
  if (!device.is_cuda()) return device_info(device).isa;
  const NvrtcSearch search = find_nvrtc();
  return search.nvrtc == nullptr ? "none" : "NVRTC " + search.nvrtc->version_text();
}

std::string for_file_name(std::string text) {
  for (char& c : text)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.') c = '_';
  return text;
}

TunedChoices read(Device device) {
  TunedChoices choices;
  const std::string path = tuned_file(device);
  if (path.empty()) return choices;
  const std::optional<std::string> text = read_file(path, kLargestFile);
  if (!text) return choices;
  try {
    const Json json = Json::parse(*text);
    if (json.at("format") != kFormat || json.at("device") != device_info(device).name || json.at("compiler") != compiler_of(device))
      return choices;
    for (const auto& [problem, choice] : json.at("choices").items()) choices[problem] = {choice.at("name"), choice.at("values")};
  } catch (const Json::exception&) {
    choices.clear();
  }
  return choices;
}

/// What this process knows of one device. Tables that were replaced stay: somebody may be reading them.
struct Known {
  std::mutex mutex;
  std::vector<std::unique_ptr<const TunedChoices>> tables;
  std::atomic<const TunedChoices*> current = nullptr;

  void set(TunedChoices choices) {
    tables.push_back(std::make_unique<const TunedChoices>(std::move(choices)));
    current.store(tables.back().get(), std::memory_order_release);
  }
};

Known& known(Device device) {
  static std::array<Known, 65> all;  // the CPU, and more GPUs than a machine has
  const int index = device.is_cuda() ? device.index + 1 : 0;
  return all[static_cast<std::size_t>(std::min(index, 64))];
}

/// Reads the file, lets `edit` change it, and writes it if that returned true.
template <class Edit>
void change(Device device, Edit edit) {
  const std::string path = tuned_file(device);
  if (path.empty())
    throw Error("tuned choices cannot be kept: there is no cache folder (TILEWAVE_CACHE, XDG_CACHE_HOME and HOME are not set)");
  std::error_code error;
  std::filesystem::create_directories(cache_directory(), error);
  if (error) throw Error(tw::format("{}: {}", cache_directory(), error.message()));
  Known& here = known(device);
  const std::lock_guard guard(here.mutex);
  const FileLock lock(path + ".lock");
  TunedChoices choices = read(device);
  if (edit(choices)) {
    Json json{{"format", kFormat}, {"device", device_info(device).name}, {"compiler", compiler_of(device)}, {"choices", Json::object()}};
    for (const auto& [problem, choice] : choices) json["choices"][problem] = {{"name", choice.name}, {"values", choice.values}};
    std::string problem;
    if (!replace_file(path, {json.dump(1, ' ', false, Json::error_handler_t::replace), "\n"}, &problem)) throw Error(problem);
  }
  here.set(std::move(choices));
}

}  // namespace

std::string tuned_file(Device device) {
  const std::string folder = cache_directory();
  if (folder.empty()) return "";
  return tw::format("{}/tuned-{}-{}.json", folder, for_file_name(device_info(device).name), for_file_name(compiler_of(device)));
}

const TunedChoices& tuned_choices(Device device) {
  Known& here = known(device);
  if (const TunedChoices* choices = here.current.load(std::memory_order_acquire)) return *choices;
  const std::lock_guard guard(here.mutex);
  if (here.current.load(std::memory_order_relaxed) == nullptr) here.set(read(device));
  return *here.current.load(std::memory_order_relaxed);
}

void keep_tuned(Device device, const std::string& problem, const TunedChoice& choice) {
  change(device, [&](TunedChoices& choices) {
    choices[problem] = choice;
    return true;
  });
}

int forget_tuned(Device device, std::string_view prefix) {
  int count = 0;
  change(device, [&](TunedChoices& choices) {
    count = static_cast<int>(std::erase_if(choices, [&](const auto& entry) { return std::string_view(entry.first).starts_with(prefix); }));
    return count > 0;
  });
  return count;
}

}  // namespace tw
