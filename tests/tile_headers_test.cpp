// Every tile header alone through the run-time compiler, which is given the embedded files and no include path.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "runtime/nvrtc.hpp"
#include "tests/support.hpp"
#include "tilewave/kernel.hpp"

namespace tw::test {
namespace {

namespace fs = std::filesystem;

/// The names under which the project's tile headers are embedded.
std::vector<std::string> tile_headers() {
  const fs::path root = TILEWAVE_SOURCE_DIR;
  std::vector<std::string> names;
  for (const auto& [folder, base] : {std::pair{root / "include/tilewave/tile", root / "include"}, std::pair{root / "kernels", root}}) {
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(folder)) {
      if (entry.path().string().ends_with(".tile.hpp")) names.push_back(entry.path().lexically_relative(base).string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string read(const std::string& name) {
  const fs::path root = TILEWAVE_SOURCE_DIR;
  std::ifstream file(fs::exists(root / "include" / name) ? root / "include" / name : root / name);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST(TileHeaders, AreEmbeddedAsTheyStandInTheTree) {
  if (!fs::exists(TILEWAVE_SOURCE_DIR)) GTEST_SKIP() << "skipped: the sources are not there";
  const std::vector<std::string> names = tile_headers();
  EXPECT_FALSE(names.empty());
  for (const std::string& name : names) {
    const EmbeddedFile* file = find_embedded(name);
    ASSERT_NE(file, nullptr) << name << " is not embedded: is it in its family's CMakeLists.txt?";
    EXPECT_EQ(std::string(file->text, file->size), read(name)) << name;
  }
}

TEST(TileHeaders, CompileAloneForTheGpu) {
  skip_without_nvrtc();
  if (!fs::exists(TILEWAVE_SOURCE_DIR)) GTEST_SKIP() << "skipped: the sources are not there";
  std::vector<NvrtcHeader> headers;
  for (const std::string& name : tile_headers()) {
    const EmbeddedFile* file = find_embedded(name);
    if (file != nullptr) headers.push_back({file->name, file->text});
  }
  for (const NvrtcHeader& header : headers) {
    const NvrtcOutput output = compile_with(*find_nvrtc().nvrtc, "#include \"" + std::string(header.name) + "\"\n", headers,
                                            {"--gpu-architecture=sm_90a", "-std=c++20", "-default-device"});
    EXPECT_TRUE(output.ok && output.log.empty()) << header.name << " alone through NVRTC:\n" << output.log;
  }
}

}  // namespace
}  // namespace tw::test
