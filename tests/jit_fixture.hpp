#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "runtime/cache.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"

// What the tests of run-time compilation and of its cache share: kernels, and a folder for each test.

namespace tw::test {

// A kernel without shared memory: every tile of the launch adds one to its own word.
inline constexpr char kHits[] = R"(#pragma once
#include "tests/jit/shared.tile.hpp"
#include "tilewave/tile/language.tile.hpp"
namespace jit_test {
template <int Step>
struct Hits {
  template <class Target>
  struct On {
    struct Params {
      tw::u32* hits;
      int m, n;
    };
    static void compute(auto&, const Params& p, tw::Tile t) {
      if (tw::sm_90a::ptx::thread_index() == 0) tw::sm_90a::ptx::fetch_add(p.hits + (t.batch * p.m + t.m) * p.n + t.n, kOne * Step);
    }
  };
};
}  // namespace jit_test
)";
inline constexpr char kShared[] = R"(#pragma once
#include "tests/jit/hits.tile.hpp"  // a circle must not matter
namespace jit_test { inline constexpr int kOne = 1; }
)";
inline constexpr char kBroken[] = R"(#pragma once
namespace jit_test { struct Broken { no_such_type member; }; }
)";
inline constexpr char kUnused[] = "#pragma once\n";

inline const bool kernels_embedded = [] {
  static const EmbeddedFile files[] = {
      {"tests/jit/hits.tile.hpp", kHits, sizeof(kHits) - 1},
      {"tests/jit/shared.tile.hpp", kShared, sizeof(kShared) - 1},
      {"tests/jit/broken.tile.hpp", kBroken, sizeof(kBroken) - 1},
      {"tests/jit/unused.tile.hpp", kUnused, sizeof(kUnused) - 1},
  };
  return register_embedded(files, std::size(files));
}();

inline KernelSpec hits_spec(int step = 1) {
  KernelSpec spec;
  spec.name = "hits_" + std::to_string(step);
  spec.type = "jit_test::Hits<" + std::to_string(step) + ">";
  spec.target = "tw::sm_90a::Target<true, true>";
  spec.source = "tests/jit/hits.tile.hpp";
  return spec;
}

/// What a compilation might have given.
inline CompiledKernel some_kernel() {
  CompiledKernel kernel;
  kernel.cubin = std::string(
      "\x7f"
      "ELF\0binary\0with zeros",
      23);
  kernel.log = "ptxas info    : Used 168 registers";
  kernel.compiler = "NVRTC 13.0";
  kernel.registers = 168;
  kernel.spill_bytes = 12;
  kernel.static_shared_bytes = 1024;
  kernel.compile_ms = 123.5;
  kernel.tensor_core_instruction = "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16";
  kernel.performance_losses = {"(C7510) one", "(C7512) two"};
  return kernel;
}

inline std::string read_all(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_all(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::vector<std::filesystem::path> files_below(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  if (!std::filesystem::exists(folder)) return files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  return files;
}

/// Sets an environment variable for one test.
class Variable {
 public:
  Variable(const char* name, const std::string& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before, was_set_ = true;
    setenv(name, value.c_str(), 1);
  }
  ~Variable() {
    if (was_set_) {
      setenv(name_, before_.c_str(), 1);
    } else {
      unsetenv(name_);
    }
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string before_;
  bool was_set_ = false;
};

/// A folder of its own for each test.
class JitCache : public testing::Test {
 protected:
  JitCache() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tilewave-jit-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    cache_ = std::make_unique<Variable>("TILEWAVE_CACHE", (folder_ / "cache").string());
    pack_ = std::make_unique<Variable>("TILEWAVE_PACK", "");
  }
  ~JitCache() override {
    cache_.reset();
    pack_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  std::string entries() const { return (folder_ / "entries").string(); }

  /// Runs `work` in a child process, where limits and crashes do no harm here. True if it returned true.
  template <class F>
  static bool in_child(F work) {
    const pid_t child = fork();
    if (child == 0) {
      bool ok = false;
      try {
        ok = work();
      } catch (...) {
      }
      _exit(ok ? 0 : 1);
    }
    int status = 0;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

  std::filesystem::path folder_;
  std::unique_ptr<Variable> cache_;
  std::unique_ptr<Variable> pack_;
};

}  // namespace tw::test
