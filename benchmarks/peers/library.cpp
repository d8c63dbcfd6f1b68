#include "benchmarks/peers/library.hpp"

#include <dlfcn.h>
#include <glob.h>

#include <cstdlib>

#include "runtime/format.hpp"

namespace tw::bench {
namespace {

std::vector<std::string> matches(const std::string& pattern) {
  glob_t result{};
  std::vector<std::string> found;
  if (glob(pattern.c_str(), 0, nullptr, &result) == 0) found.assign(result.gl_pathv, result.gl_pathv + result.gl_pathc);
  globfree(&result);
  return found;
}

}  // namespace

Library Library::open(const std::vector<std::string>& folders, const std::vector<std::string>& names, std::string& problem) {
  Library library;
  std::string reason;
  for (const std::string& folder : folders) {
    for (const std::string& name : names) {
      for (const std::string& path : folder.empty() ? std::vector{name} : matches(folder + "/" + name)) {
        library.handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library.handle_ != nullptr) return library;
        if (const char* text = dlerror(); text != nullptr && !folder.empty()) reason = tw::format(" ({})", text);
      }
    }
  }
  std::vector<std::string> places = folders;
  for (std::string& place : places) {
    if (place.empty()) place = "the loader's path";
  }
  problem = tw::format("{} was not found in {}{}", tw::join(names, ", "), tw::join(places, ", "), reason);
  return library;
}

void* Library::find(const char* symbol) const { return dlsym(handle_, symbol); }

std::vector<std::string> cuda_library_folders(const std::string& wheel) {
  std::vector<std::string> folders;
  if (const char* home = std::getenv("CUDA_HOME")) {
    folders.push_back(std::string(home) + "/lib64");
    folders.push_back(std::string(home) + "/lib");
  }
  folders.insert(folders.end(), {"", "/usr/local/cuda/lib64", "/usr/local/cuda-*/lib64"});
  std::vector<std::string> packages;
  if (const char* venv = std::getenv("VIRTUAL_ENV")) packages.push_back(std::string(venv) + "/lib/python3*/site-packages");
  if (const char* home = std::getenv("HOME")) packages.push_back(std::string(home) + "/.local/lib/python3*/site-packages");
  for (const char* root :
       {"/usr/local/lib/python3*/dist-packages", "/usr/local/lib/python3*/site-packages", "/usr/lib/python3/dist-packages"}) {
    packages.emplace_back(root);
  }
  // The interpreter on the PATH may belong to a virtual environment that was not activated.
  if (const char* path = std::getenv("PATH")) {
    std::string_view left = path;
    while (!left.empty()) {
      const std::size_t end = left.find(':');
      const std::string_view entry = left.substr(0, end);
      if (entry.size() > 4 && entry.substr(entry.size() - 4) == "/bin") {
        packages.push_back(std::string(entry.substr(0, entry.size() - 4)) + "/lib/python3*/site-packages");
      }
      left = end == std::string_view::npos ? std::string_view() : left.substr(end + 1);
    }
  }
  for (const std::string& package : packages) {
    folders.push_back(package + "/nvidia/cu13/lib");
    folders.push_back(tw::format("{}/nvidia/{}/lib", package, wheel));
  }
  return folders;
}

}  // namespace tw::bench
