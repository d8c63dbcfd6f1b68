#include "runtime/tuned.hpp"

#include <array>
#include <atomic>
#include <cctype>
#include <memory>
#include <mutex>

#include "runtime/cache.hpp"
#include "runtime/cuda_driver.hpp"
#include "runtime/files.hpp"
#include "runtime/format.hpp"
#include "runtime/nvrtc.hpp"
#include "runtime/tuned_json.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"

namespace tw {
namespace {

constexpr std::size_t kLargestFile = std::size_t{8} << 20;  // tens of thousands of choices

/// The compiler and driver of a GPU's kernels, or the CPU's instruction set. Timings are valid only for these.
std::string compiler_of(Device device) {
  if (!device.is_cuda()) return device_info(device).isa;
  const NvrtcSearch search = find_nvrtc();
  return tw::format("{}, driver {}", search.nvrtc == nullptr ? "no NVRTC" : "NVRTC " + search.nvrtc->version_text(),
                    cuda::version_text(cuda::find_driver().version));
}

std::string for_file_name(std::string text) {
  for (char& c : text)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '.') c = '_';
  return text;
}

/// The process's table for one device. Replaced tables are kept, because another thread may be reading them.
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
  static std::array<Known, 65> all;  // the CPU and up to 64 GPUs
  const int index = device.is_cuda() ? device.index + 1 : 0;
  return all[static_cast<std::size_t>(std::min(index, 64))];
}

/// cache_folder(). Throws Error if choices cannot be stored.
std::string tuned_folder() {
  std::string reason;
  std::string folder = cache_folder("", &reason);
  if (folder.empty()) throw Error("tuned choices cannot be kept: " + reason);
  return folder;
}

/// Reads the file, lets `edit` change it, and writes it if that returned true.
template <class Edit>
void change(Device device, Edit edit) {
  remove_stale_files(tuned_folder());
  const std::string path = tuned_file(device);
  Known& here = known(device);
  const std::lock_guard guard(here.mutex);
  const FileLock lock(path + ".lock");
  TunedChoices choices = read_tuned(device);
  if (edit(choices)) {
    std::string reason;
    if (!replace_file(path, {format_tuned(choices, device_info(device).name, compiler_of(device))}, &reason)) throw Error(reason);
  }
  here.set(std::move(choices));
}

}  // namespace

TunedChoices read_tuned(Device device) {
  const std::string path = tuned_file(device);
  if (path.empty() || !folder_problem(cache_directory()).empty()) return {};
  const std::optional<std::string> text = read_file(path, kLargestFile);
  return text ? parse_tuned(*text, device_info(device).name, compiler_of(device)) : TunedChoices();
}

std::string tuned_file(Device device) {
  const std::string folder = cache_directory();
  if (folder.empty()) return "";
  return tw::format("{}/tuned-{}-{}.json", folder, for_file_name(device_info(device).name), for_file_name(compiler_of(device)));
}

const TunedChoices& tuned_choices(Device device) {
  Known& here = known(device);
  if (const TunedChoices* choices = here.current.load(std::memory_order_acquire)) return *choices;
  const std::lock_guard guard(here.mutex);
  if (here.current.load(std::memory_order_relaxed) == nullptr) here.set(read_tuned(device));
  return *here.current.load(std::memory_order_relaxed);
}

void require_tuned_folder() { tuned_folder(); }

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
