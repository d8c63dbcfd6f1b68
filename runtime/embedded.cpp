#include <map>
#include <mutex>

#include "tilewave/kernel.hpp"

// The library's own files, in the source that tilewave_embed() generates. Nothing else refers to it, so a static link would otherwise leave
// it out.
extern "C" const bool tilewave_embedded_tilewave_tiles;

namespace tw {
namespace {

[[gnu::used]] const bool* const kLibraryFiles = &tilewave_embedded_tilewave_tiles;

struct Registry {
  std::mutex mutex;
  std::map<std::string_view, EmbeddedFile> files;  // with stable addresses, because find_embedded() returns pointers
};

/// Made at first use, since files register themselves before main() in no particular order, and never destroyed.
Registry& registry() {
  static Registry& instance = *new Registry;
  return instance;
}

}  // namespace

bool register_embedded(const EmbeddedFile* files, std::size_t count) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  for (std::size_t i = 0; i < count; ++i) r.files.emplace(files[i].name, files[i]);
  return true;
}

const EmbeddedFile* find_embedded(std::string_view name) {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  auto found = r.files.find(name);
  return found == r.files.end() ? nullptr : &found->second;
}

std::vector<std::string> embedded_names() {
  Registry& r = registry();
  const std::lock_guard lock(r.mutex);
  std::vector<std::string> names;
  for (const auto& [name, file] : r.files) names.emplace_back(name);
  return names;
}

}  // namespace tw
