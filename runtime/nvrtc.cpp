#include "runtime/nvrtc.hpp"

#include <dlfcn.h>
#include <glob.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <mutex>

#include "runtime/format.hpp"
#include "runtime/paths.hpp"
#include "tilewave/error.hpp"

namespace tw {
namespace {

// CUDA 12.0 is the first version with both C++20 and sm_90a.
constexpr int kOldestMajor = 12;
constexpr const char* kNames[] = {"libnvrtc.so.13", "libnvrtc.so.12"};

std::vector<std::string> matches(const std::string& pattern) {
  std::vector<std::string> found;
  glob_t result{};
  if (glob(pattern.c_str(), 0, nullptr, &result) == 0) found.assign(result.gl_pathv, result.gl_pathv + result.gl_pathc);
  globfree(&result);
  // Newer versions first: "cuda-13.0" before "cuda-12.9", by length before by letter so that 3.10 comes before 3.9.
  std::sort(found.begin(), found.end(),
            [](const std::string& a, const std::string& b) { return a.size() != b.size() ? a.size() > b.size() : a > b; });
  return found;
}

/// Folders that may hold the library, as glob patterns, most specific first. An empty string stands for the loader's own path.
std::vector<std::string> places() {
  std::vector<std::string> list;
  if (std::string home = environment("CUDA_HOME"); !home.empty()) {
    list.push_back(home + "/lib64");
    list.push_back(home + "/lib");
  }
  list.push_back("/usr/local/cuda/lib64");
  list.push_back("/usr/local/cuda-*/lib64");
  list.push_back("");
  std::vector<std::string> packages;
  if (std::string venv = environment("VIRTUAL_ENV"); !venv.empty()) packages.push_back(venv + "/lib/python3*/site-packages");
  for (std::filesystem::path folder = own_folder(); folder.has_relative_path(); folder = folder.parent_path()) {
    if (folder.filename() == "site-packages" || folder.filename() == "dist-packages") packages.push_back(folder.string());
  }
  if (std::string home = environment("HOME"); !home.empty()) packages.push_back(home + "/.local/lib/python3*/site-packages");
  for (const char* root : {"/usr/local/lib/python3*/", "/usr/lib/python3*/", "/usr/lib/python3/"}) {
    packages.push_back(std::string(root) + "dist-packages");
    packages.push_back(std::string(root) + "site-packages");
  }
  for (const std::string& package : packages) {
    list.push_back(package + "/nvidia/cu13/lib");
    list.push_back(package + "/nvidia/cuda_nvrtc/lib");
  }
  return list;
}

/// Loads `path`. Null on failure, with a line for the report if the file exists.
const Nvrtc* try_load(const std::string& path, std::vector<std::string>& rejected) {
  void* handle = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* reason = dlerror();
    if (path.find('/') != std::string::npos) rejected.push_back(reason == nullptr ? path : reason);
    return nullptr;
  }
  auto loaded = std::make_unique<Nvrtc>();
  const char* missing = nullptr;
#define TILEWAVE_NVRTC_LOAD(name, symbol, parameters)                                                       \
  loaded->calls.name = reinterpret_cast<decltype(loaded->calls.name)>(dlsym(handle, #symbol)); /* NOLINT */ \
  if (loaded->calls.name == nullptr) missing = #symbol;
  TILEWAVE_NVRTC_CALLS(TILEWAVE_NVRTC_LOAD)
#undef TILEWAVE_NVRTC_LOAD
  loaded->calls.get_error_string = reinterpret_cast<const char* (*)(NvrtcResult)>(dlsym(handle, "nvrtcGetErrorString"));
  if (loaded->calls.get_error_string == nullptr) missing = "nvrtcGetErrorString";
  if (missing == nullptr && loaded->calls.version(&loaded->major, &loaded->minor) != NvrtcResult::success) missing = "a version";
  if (missing != nullptr || loaded->major < kOldestMajor) {
    rejected.push_back(missing != nullptr
                           ? tw::format("{}: it has no {}", path, missing)
                           : tw::format("{}: version {} is too old, {}.0 is needed", path, loaded->version_text(), kOldestMajor));
    dlclose(handle);
    return nullptr;
  }
  loaded->path = path;
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(loaded->calls.version), &info) != 0 && info.dli_fname != nullptr) loaded->path = info.dli_fname;
  return loaded.release();  // stays for the life of the process
}

const Nvrtc* search(std::string& problem) {
  std::vector<std::string> searched;
  std::vector<std::string> rejected;
  for (const std::string& place : places()) {
    if (place.empty()) {
      searched.push_back("the loader's path");
      for (const char* name : kNames) {
        if (const Nvrtc* nvrtc = try_load(name, rejected)) return nvrtc;
      }
      continue;
    }
    searched.push_back(place);
    for (const std::string& folder : matches(place)) {
      for (const char* name : kNames) {
        std::string path = folder + "/" + name;
        std::error_code ignored;
        if (!std::filesystem::exists(path, ignored)) continue;
        if (const Nvrtc* nvrtc = try_load(path, rejected)) return nvrtc;
      }
    }
  }
  problem = tw::format("NVRTC ({}, {}) was not found; searched: {}", kNames[0], kNames[1], tw::join(searched, ", "));
  if (!rejected.empty()) problem += tw::format("; not usable: {}", tw::join(rejected, "; "));
  return nullptr;
}

class Program {
 public:
  Program(const Nvrtc& nvrtc, const std::string& source, const std::vector<NvrtcHeader>& headers) : nvrtc_(nvrtc) {
    std::vector<const char*> texts;
    std::vector<const char*> names;
    for (const NvrtcHeader& header : headers) {
      texts.push_back(header.text);
      names.push_back(header.name);
    }
    check(nvrtc.calls.create_program(&program_, source.c_str(), "kernel.cu", static_cast<int>(headers.size()), texts.data(), names.data()),
          "nvrtcCreateProgram");
  }
  ~Program() { nvrtc_.calls.destroy_program(&program_); }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  NvrtcResult compile(const std::vector<std::string>& options) {
    std::vector<const char*> pointers;
    for (const std::string& option : options) pointers.push_back(option.c_str());
    return nvrtc_.calls.compile_program(program_, static_cast<int>(pointers.size()), pointers.data());
  }

  template <class Size, class Get>
  std::string text(Size size_call, Get get_call, const char* name) {
    std::size_t size = 0;
    check(size_call(program_, &size), name);
    std::string text(size, '\0');
    check(get_call(program_, text.data()), name);
    return text;
  }

  void check(NvrtcResult result, const char* call) {
    if (result != NvrtcResult::success) throw DeviceError(tw::format("{}: {}", call, nvrtc_.calls.get_error_string(result)));
  }

 private:
  const Nvrtc& nvrtc_;
  NvrtcProgram program_ = nullptr;
};

std::string without_trailing_zeros(std::string text) {
  while (!text.empty() && text.back() == '\0') text.pop_back();
  return text;
}

NvrtcOutput compile_once(const Nvrtc& nvrtc, const std::string& source, const std::vector<NvrtcHeader>& headers,
                         const std::vector<std::string>& options, NvrtcResult& result) {
  Program program(nvrtc, source, headers);
  NvrtcOutput output;
  auto begin = std::chrono::steady_clock::now();
  result = program.compile(options);
  output.milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  output.log = without_trailing_zeros(program.text(nvrtc.calls.get_log_size, nvrtc.calls.get_log, "nvrtcGetProgramLog"));
  output.ok = result == NvrtcResult::success;
  if (output.ok) {
    output.cubin = program.text(nvrtc.calls.get_cubin_size, nvrtc.calls.get_cubin, "nvrtcGetCUBIN");
    output.ptx = without_trailing_zeros(program.text(nvrtc.calls.get_ptx_size, nvrtc.calls.get_ptx, "nvrtcGetPTX"));
  } else if (output.log.empty()) {
    output.log = nvrtc.calls.get_error_string(result);
  }
  return output;
}

}  // namespace

NvrtcSearch find_nvrtc() {
  static std::mutex mutex;
  static const Nvrtc* found = nullptr;
  const std::lock_guard lock(mutex);
  NvrtcSearch result;
  if (found == nullptr) found = search(result.problem);
  result.nvrtc = found;
  return result;
}

NvrtcOutput compile_with(const Nvrtc& nvrtc, const std::string& source, const std::vector<NvrtcHeader>& headers,
                         const std::vector<std::string>& options) {
  // Newer releases have a cache of their own, which would make the reported compile times wrong. Older ones do not know the option.
  std::vector<std::string> with_option = options;
  with_option.push_back("--no-cache");
  NvrtcResult result = NvrtcResult::success;
  NvrtcOutput output = compile_once(nvrtc, source, headers, with_option, result);
  if (result == NvrtcResult::invalid_option) output = compile_once(nvrtc, source, headers, options, result);
  return output;
}

}  // namespace tw
