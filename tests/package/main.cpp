// Finds every embedded file: the library's, those of a static library in between, its own.
#include <cstdio>
#include <string_view>
#include <tilewave/kernel.hpp>

int answer();

int main() {
  int missing = 0;
  for (const char* name : {"tilewave/tile/types.tile.hpp", "mine/of_library.tile.hpp", "of_app.tile.hpp", "second.tile.hpp"}) {
    const tw::EmbeddedFile* file = tw::find_embedded(name);
    if (file == nullptr || std::string_view(file->text).size() != file->size || file->size == 0) {
      std::printf("%s: not embedded\n", name);
      ++missing;
    }
  }
  return answer() == 42 ? missing : 1;
}
