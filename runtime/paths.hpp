#pragma once

#include <filesystem>
#include <string>

namespace tw {

/// The value of an environment variable, empty if it is not set. The variables in use are listed in tilewave/kernel.hpp.
std::string environment(const char* name);

/// The folder of the library or executable that holds the runtime; empty if the system does not say.
std::filesystem::path own_folder();

}  // namespace tw
