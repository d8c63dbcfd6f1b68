#pragma once

// The fastest configurations found by `tilewave tune`. One file for each device, driver and compiler in the cache's folder.

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "tilewave/device.hpp"

namespace tw {

/// A family's choice for one problem.
struct TunedChoice {
  std::string name;         ///< as shown to people: "bm=128,bn=256"
  std::vector<int> values;  ///< of the family's parameters
};

/// Maps problems to choices. A problem is named by its family and everything that the choice depends on: "gemm bf16 nt M=4096,...".
using TunedChoices = std::map<std::string, TunedChoice, std::less<>>;

/// The file: "tuned-NVIDIA_H200-NVRTC_13.0__driver_13.0.json" in cache_directory(), "tuned-<model>-avx512.json" for the CPU; empty without
/// a cache folder.
std::string tuned_file(Device device);

/// The choices in the device's file. None if it is missing, damaged, another device's, or in a folder that others can write.
TunedChoices read_tuned(Device device);

/// The device's choices, read from the file at the first call in a process. Valid until the process ends. Later calls cost an atomic load.
const TunedChoices& tuned_choices(Device device);

/// Throws Error with the reason if choices cannot be stored.
void require_tuned_folder();

/// Adds a choice to the file, or replaces the problem's, and updates this process. Other processes may write at the same time.
/// Throws Error with the reason if the file cannot be written.
void keep_tuned(Device device, const std::string& problem, const TunedChoice& choice);

/// Removes the problems that begin with `prefix` and returns their number. Throws the same as keep_tuned.
int forget_tuned(Device device, std::string_view prefix);

}  // namespace tw
