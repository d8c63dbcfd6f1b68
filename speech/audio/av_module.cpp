#include "speech/audio/av_module.hpp"

#include <dlfcn.h>

#include <exception>
#include <filesystem>

#include "runtime/format.hpp"
#include "runtime/paths.hpp"
#include "speech/audio/av/decoder.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {
namespace {

struct AvModule {
  AvDecode* decode = nullptr;
  std::string problem;

  AvModule() {
    const std::filesystem::path own = own_folder();
    if (!own.empty())
      for (const std::filesystem::path& folder : {own, own.parent_path() / "lib", own.parent_path()})
        if (std::error_code none; std::filesystem::exists(folder / kAvModuleName, none) && load(folder / kAvModuleName)) return;
    if (load(kAvModuleName)) problem.clear();
  }

  bool load(const std::filesystem::path& path) {
    void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle) decode = reinterpret_cast<AvDecode*>(dlsym(handle, kAvDecodeName));
    if (!decode && problem.empty()) problem = handle ? tw::format("{}: of another version of Tilewave", path.string()) : dlerror();
    return decode != nullptr;
  }
};

const AvModule& av_module() {
  static const AvModule module;  // never unloaded
  return module;
}

}  // namespace

const std::string& av_module_problem() { return av_module().problem; }

bool decode_with_av(Bytes& bytes, const std::string& name,
                    const std::function<void(std::span<const float> samples, int channels, int rate)>& take) {
  struct Taker {
    const std::function<void(std::span<const float> samples, int channels, int rate)>& take;
    std::exception_ptr error;
  } taker{take, nullptr};
  const AvInput input{&bytes, bytes.size().value(), [](void* self, std::int64_t at, void* to, std::int64_t count) {
                        return static_cast<Bytes*>(self)->read(at, to, count);
                      }};
  const AvOutput output{&taker, [](void* self, const float* samples, std::size_t frames, int channels, int rate) {
                          Taker& t = *static_cast<Taker*>(self);
                          try {
                            t.take({samples, frames * static_cast<std::size_t>(channels)}, channels, rate);
                          } catch (...) {  // to be thrown on the other side of the module
                            t.error = std::current_exception();
                          }
                          return !t.error;
                        }};
  char message[256] = "";
  const AvResult result = av_module().decode(&input, &output, message, sizeof(message));
  if (taker.error) std::rethrow_exception(taker.error);
  if (!bytes.problem().empty()) throw FileError(tw::format("{}: {}", name, bytes.problem()));
  if (result == AvResult::failed) throw FileError(tw::format("{}: {}", name, message));
  return result == AvResult::done;
}

}  // namespace tw::speech
