#include "runtime/paths.hpp"

#include <dlfcn.h>

#include <cstdlib>

namespace tw {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::filesystem::path own_folder() {
  std::error_code error;
  Dl_info info{};
  // In an executable dladdr repeats argv[0], which may be relative to a folder left long ago.
  if (dladdr(reinterpret_cast<void*>(&own_folder), &info) != 0 && info.dli_fname != nullptr && info.dli_fname[0] == '/') {
    std::filesystem::path path = std::filesystem::canonical(info.dli_fname, error);
    if (!error) return path.parent_path();
  }
  std::filesystem::path path = std::filesystem::read_symlink("/proc/self/exe", error);
  return error ? std::filesystem::path() : path.parent_path();
}

}  // namespace tw
