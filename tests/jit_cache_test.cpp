#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "runtime/cache.hpp"
#include "runtime/jit.hpp"
#include "runtime/sha256.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"

namespace tw::test {
namespace {

namespace fs = std::filesystem;

// A kernel without shared memory: every tile of the launch adds one to its own word.
constexpr char kHits[] = R"(#pragma once
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
constexpr char kShared[] = R"(#pragma once
#include "tests/jit/hits.tile.hpp"  // a circle must not matter
namespace jit_test { inline constexpr int kOne = 1; }
)";
constexpr char kBroken[] = R"(#pragma once
namespace jit_test { struct Broken { no_such_type member; }; }
)";
constexpr char kUnused[] = "#pragma once\n";

const bool kernels_embedded = [] {
  static const EmbeddedFile files[] = {
      {"tests/jit/hits.tile.hpp", kHits, sizeof(kHits) - 1},
      {"tests/jit/shared.tile.hpp", kShared, sizeof(kShared) - 1},
      {"tests/jit/broken.tile.hpp", kBroken, sizeof(kBroken) - 1},
      {"tests/jit/unused.tile.hpp", kUnused, sizeof(kUnused) - 1},
  };
  return register_embedded(files, std::size(files));
}();

KernelSpec hits_spec(int step = 1) {
  KernelSpec spec;
  spec.name = "hits_" + std::to_string(step);
  spec.type = "jit_test::Hits<" + std::to_string(step) + ">";
  spec.target = "tw::sm_90a::Target<true, true>";
  spec.source = "tests/jit/hits.tile.hpp";
  return spec;
}

/// What a compilation might have given.
CompiledKernel some_kernel() {
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

std::string read_all(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_all(const fs::path& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::vector<fs::path> files_below(const fs::path& folder) {
  std::vector<fs::path> files;
  if (!fs::exists(folder)) return files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
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
    std::string pattern = (fs::temp_directory_path() / "tilewave-jit-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    cache_ = std::make_unique<Variable>("TILEWAVE_CACHE", (folder_ / "cache").string());
    pack_ = std::make_unique<Variable>("TILEWAVE_PACK", "");
  }
  ~JitCache() override {
    cache_.reset();
    pack_.reset();
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
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

  fs::path folder_;
  std::unique_ptr<Variable> cache_;
  std::unique_ptr<Variable> pack_;
};

// --- The pieces

TEST(Sha256Test, KnownAnswers) {
  EXPECT_EQ(hex(Sha256().finish()), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(Sha256().add("abc").finish()), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(Sha256().add("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq").finish()),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  const std::string million(1000000, 'a');
  EXPECT_EQ(hex(Sha256().add(million).finish()), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  // However it is cut.
  for (std::size_t cut : {1u, 55u, 56u, 63u, 64u, 65u, 127u}) {
    const std::string text(200, 'x');
    EXPECT_EQ(hex(Sha256().add(text.substr(0, cut)).add(text.substr(cut)).finish()), hex(Sha256().add(text).finish()));
  }
  EXPECT_NE(hex(Sha256().add_field("ab").add_field("c").finish()), hex(Sha256().add_field("a").add_field("bc").finish()));
}

TEST(Jit, ReadsTheCompilersLog) {
  CompiledKernel kernel;
  read_log(
      "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ... in function 'kern'\n"
      "ptxas info    : 292 bytes gmem\n"
      "ptxas info    : Function properties for helper\n"
      "    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n"
      "ptxas info    : Function properties for kern\n"
      "    0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads\n"
      "ptxas info    : Used 168 registers, used 16 barriers, 2048 bytes smem, 400 bytes cmem[0]\n",
      kernel);
  EXPECT_EQ(kernel.registers, 168);
  EXPECT_EQ(kernel.spill_bytes, 24);
  EXPECT_EQ(kernel.static_shared_bytes, 2048);
  ASSERT_EQ(kernel.performance_losses.size(), 1u);
  EXPECT_NE(kernel.performance_losses[0].find("C7510"), std::string::npos);
}

TEST(Jit, FindsTheTensorCoreInstruction) {
  EXPECT_EQ(find_tensor_core_instruction("add.f32 %f1, %f2, %f3;"), "");
  EXPECT_EQ(find_tensor_core_instruction("  wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, a;\n"
                                         "  wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16\t{%f1}, a;\n"
                                         "  wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, a;\n"),
            "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16");
}

TEST(Jit, ProgramHoldsWhatIsReached) {
  ASSERT_TRUE(kernels_embedded);
  const ProgramText program = assemble(hits_spec());
  std::vector<std::string> names;
  for (const EmbeddedFile* file : program.headers) names.emplace_back(file->name);
  auto has = [&](const char* name) { return std::find(names.begin(), names.end(), name) != names.end(); };
  EXPECT_TRUE(has("tests/jit/hits.tile.hpp"));
  EXPECT_TRUE(has("tests/jit/shared.tile.hpp"));
  EXPECT_TRUE(has("tilewave/tile/types.tile.hpp"));
  EXPECT_FALSE(has("tests/jit/unused.tile.hpp"));
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::unique(names.begin(), names.end()), names.end());

  const std::string text = kernel_source(hits_spec());
  EXPECT_NE(text.find("jit_test::Hits<1>"), std::string::npos);
  EXPECT_NE(text.find("tw::sm_90a::Target<true, true>"), std::string::npos);
}

TEST(Jit, KeyDependsOnAllThatIsCompiledAndNothingElse) {
  const ProgramText program = assemble(hits_spec());
  const std::string key = cache_key(program, "sm_90a", "NVRTC 13.0");
  EXPECT_EQ(key.size(), 64u);
  KernelSpec renamed = hits_spec();
  renamed.name = "another name";
  EXPECT_EQ(cache_key(assemble(renamed), "sm_90a", "NVRTC 13.0"), key);
  EXPECT_NE(cache_key(program, "sm_100a", "NVRTC 13.0"), key);
  EXPECT_NE(cache_key(program, "sm_90a", "NVRTC 12.9"), key);
  EXPECT_NE(cache_key(program, "sm_90a", ""), key);
  EXPECT_NE(cache_key(assemble(hits_spec(2)), "sm_90a", "NVRTC 13.0"), key);
  KernelSpec without_tma = hits_spec();
  without_tma.target = "tw::sm_90a::Target<false, false>";
  EXPECT_NE(cache_key(assemble(without_tma), "sm_90a", "NVRTC 13.0"), key);
  ProgramText changed = program;
  const EmbeddedFile other = {program.headers[0]->name, kUnused, sizeof(kUnused) - 1};
  changed.headers[0] = &other;
  EXPECT_NE(cache_key(changed, "sm_90a", "NVRTC 13.0"), key);
}

TEST(Jit, SpecsThatCannotBeAreRefused) {
  auto refused = [](auto change, const char* argument) {
    KernelSpec spec = hits_spec();
    change(spec);
    try {
      compile(spec);
      ADD_FAILURE() << argument << " was taken";
    } catch (const InvalidArgument& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find(spec.name), std::string::npos) << text;
      EXPECT_NE(text.find(argument), std::string::npos) << text;
    }
  };
  refused([](KernelSpec& s) { s.type = ""; }, "type");
  refused([](KernelSpec& s) { s.target = ""; }, "target");
  refused([](KernelSpec& s) { s.source = ""; }, "source");
  refused([](KernelSpec& s) { s.source = "a\"b"; }, "source");
  refused([](KernelSpec& s) { s.target = "tw::sm_70::Target<>"; }, "target");
  EXPECT_THROW(compile(hits_spec(), "compute_90a"), InvalidArgument);
  EXPECT_THROW(compile(hits_spec(), "sm_90a --foo"), InvalidArgument);
  EXPECT_THROW(compile(hits_spec(), "sm_"), InvalidArgument);
}

TEST(JitFolders, FollowTheEnvironment) {
  const Variable home("HOME", "/home/somebody");
  const Variable xdg("XDG_CACHE_HOME", "/xdg");
  {
    const Variable cache("TILEWAVE_CACHE", "/own");
    EXPECT_EQ(cache_directory(), "/own");
  }
  const Variable none("TILEWAVE_CACHE", "");
  EXPECT_EQ(cache_directory(), "/xdg/tilewave");
  const Variable no_xdg("XDG_CACHE_HOME", "");
  EXPECT_EQ(cache_directory(), "/home/somebody/.cache/tilewave");
  const Variable no_home("HOME", "");
  EXPECT_EQ(cache_directory(), "");
  const Variable pack("TILEWAVE_PACK", "/pack");
  ASSERT_FALSE(pack_directories().empty());
  EXPECT_EQ(pack_directories()[0], "/pack");
  EXPECT_TRUE(pack_directories().back().ends_with("/share/tilewave/kernels"));
}

// --- Entries on disk

TEST_F(JitCache, EntryComesBackWhole) {
  const CompiledKernel kernel = some_kernel();
  ASSERT_TRUE(write_entry(entries(), "key", kernel));
  const auto back = read_entry(entries(), "key");
  ASSERT_TRUE(back);
  EXPECT_EQ(back->cubin, kernel.cubin);
  EXPECT_EQ(back->log, kernel.log);
  EXPECT_EQ(back->compiler, kernel.compiler);
  EXPECT_EQ(back->registers, kernel.registers);
  EXPECT_EQ(back->spill_bytes, kernel.spill_bytes);
  EXPECT_EQ(back->static_shared_bytes, kernel.static_shared_bytes);
  EXPECT_EQ(back->compile_ms, kernel.compile_ms);
  EXPECT_EQ(back->tensor_core_instruction, kernel.tensor_core_instruction);
  EXPECT_EQ(back->performance_losses, kernel.performance_losses);
  EXPECT_TRUE(back->from_cache);
  EXPECT_FALSE(read_entry(entries(), "another key"));
  EXPECT_FALSE(read_entry("", "key"));
  EXPECT_EQ(files_below(entries()).size(), 1u) << "a temporary file was left";
}

TEST_F(JitCache, DamageToAnyByteIsSeen) {
  ASSERT_TRUE(write_entry(entries(), "key", some_kernel()));
  const fs::path path = files_below(entries()).at(0);
  const std::string good = read_all(path);
  for (std::size_t i = 0; i < good.size(); ++i) {
    for (char flip : {'\x01', '\x80', '\xff'}) {
      std::string bad = good;
      bad[i] = static_cast<char>(bad[i] ^ flip);
      write_all(path, bad);
      ASSERT_FALSE(read_entry(entries(), "key")) << "byte " << i;
    }
  }
  for (std::size_t size = 0; size < good.size(); ++size) {
    write_all(path, good.substr(0, size));
    ASSERT_FALSE(read_entry(entries(), "key")) << "cut to " << size;
  }
  write_all(path, good + 'x');
  EXPECT_FALSE(read_entry(entries(), "key"));
  write_all(path, good + good);
  EXPECT_FALSE(read_entry(entries(), "key"));
  write_all(path, std::string(good.size(), '\0'));
  EXPECT_FALSE(read_entry(entries(), "key"));
  // Under another name it is another kernel's.
  write_all(path, good);
  EXPECT_TRUE(read_entry(entries(), "key"));
  fs::rename(path, path.parent_path() / "other.kernel");
  EXPECT_FALSE(read_entry(entries(), "other"));
  fs::remove_all(path);
  fs::create_directory(path);
  EXPECT_FALSE(read_entry(entries(), "key")) << "a folder in its place";
}

TEST_F(JitCache, ImpossiblePathIsAReasonNotACrash) {
  write_all(folder_ / "file", "not a folder");
  std::string problem;
  EXPECT_FALSE(write_entry((folder_ / "file" / "below").string(), "key", some_kernel(), &problem));
  EXPECT_NE(problem.find("file"), std::string::npos) << problem;
  EXPECT_FALSE(read_entry((folder_ / "file" / "below").string(), "key"));
  EXPECT_FALSE(write_entry("", "key", some_kernel(), &problem));
  EXPECT_FALSE(write_entry(std::string(5000, 'x'), "key", some_kernel(), &problem));
  EXPECT_THROW(write_pack((folder_ / "file").string(), hits_spec(), some_kernel()), Error);
}

TEST_F(JitCache, FullDiskLeavesNothingBehind) {
  const std::string folder = entries();
  EXPECT_TRUE(in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100, 100};  // bytes per file: the write ends in the middle of the entry
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    std::string problem;
    return !write_entry(folder, "key", some_kernel(), &problem) && !problem.empty();
  }));
  EXPECT_TRUE(files_below(folder).empty());
  EXPECT_TRUE(write_entry(folder, "key", some_kernel()));
  EXPECT_TRUE(read_entry(folder, "key"));
}

TEST_F(JitCache, FullDeviceLeavesNothingBehind) {
  // A file system of 64 KB, filled: only root may mount one.
  const fs::path disk = folder_ / "disk";
  fs::create_directory(disk);
  if (geteuid() != 0 || std::system(("mount -t tmpfs -o size=64k tmpfs '" + disk.string() + "' 2>/dev/null").c_str()) != 0) {
    GTEST_SKIP() << "skipped: no file system can be mounted here";
  }
  write_all(disk / "filler", std::string(1 << 20, 'x'));  // as much as fits
  std::string problem;
  EXPECT_FALSE(write_entry((disk / "cache").string(), "key", some_kernel(), &problem));
  EXPECT_FALSE(problem.empty());
  const std::size_t files = files_below(disk).size();
  EXPECT_EQ(std::system(("umount '" + disk.string() + "'").c_str()), 0);
  EXPECT_EQ(files, 1u);
}

TEST_F(JitCache, ReadersSeeWholeEntriesWhileOthersWrite) {
  constexpr int kProcesses = 8;
  CompiledKernel kernel = some_kernel();
  kernel.cubin.assign(200000, 'c');
  ASSERT_TRUE(write_entry(entries(), "key", kernel));
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      bool ok = true;
      for (int round = 0; round < 10; ++round) {
        ok = ok && write_entry(entries(), "key", kernel);
        const auto back = read_entry(entries(), "key");
        ok = ok && back && back->cubin == kernel.cubin;
      }
      _exit(ok ? 0 : 1);
    }
    children.push_back(child);
  }
  for (pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  EXPECT_EQ(files_below(entries()).size(), 1u);
}

TEST_F(JitCache, FifoInAnEntrysPlaceIsNoEntry) {
  fs::create_directories(entries());
  ASSERT_EQ(mkfifo((entries() + "/key.kernel").c_str(), 0600), 0);
  EXPECT_FALSE(read_entry(entries(), "key")) << "and nobody is waited for";
  EXPECT_TRUE(write_entry(entries(), "key", some_kernel()));
  EXPECT_TRUE(read_entry(entries(), "key"));
}

TEST_F(JitCache, FoldersAreMadeForTheUserAlone) {
  const mode_t before = umask(0);
  const Variable cache("TILEWAVE_CACHE", (folder_ / "a" / "b").string());
  std::string problem;
  EXPECT_EQ(cache_folder("nvrtc-1.0", &problem), (folder_ / "a" / "b" / "nvrtc-1.0").string()) << problem;
  umask(before);
  for (const char* made : {"a", "a/b", "a/b/nvrtc-1.0"}) EXPECT_EQ(fs::status(folder_ / made).permissions(), fs::perms::owner_all) << made;
  EXPECT_EQ(cache_folder("nvrtc-1.0"), (folder_ / "a" / "b" / "nvrtc-1.0").string()) << "a second time";
}

TEST_F(JitCache, FoldersThatOthersCanWriteAreRefused) {
  const fs::path folder = folder_ / "cache", below = folder / "nvrtc-1.0";
  fs::create_directories(below);
  const auto refused = [&](const fs::path& which, fs::perms mode, const char* reason) {
    fs::permissions(folder, fs::perms::owner_all);
    fs::permissions(below, fs::perms::owner_all);
    fs::permissions(which, mode);
    std::string problem;
    EXPECT_EQ(cache_folder("nvrtc-1.0", &problem), "");
    EXPECT_NE(problem.find(which.string() + reason), std::string::npos) << problem;
    EXPECT_NE(problem.find("TILEWAVE_PACK"), std::string::npos) << problem;
  };
  for (const fs::path& which : {folder, below}) {
    refused(which, fs::perms(0777), " can be written by others (mode 0777)");
    refused(which, fs::perms(01777), " can be written by others (mode 1777)");
    refused(which, fs::perms(0770), " can be written by others (mode 0770)");
    refused(which, fs::perms(0702), " can be written by others (mode 0702)");
  }
  fs::permissions(below, fs::perms(0755));
  EXPECT_EQ(cache_folder("nvrtc-1.0"), below.string()) << "others may read it";
  if (geteuid() == 0) {  // nobody else can give a folder away
    ASSERT_EQ(chown(folder.c_str(), 12345, static_cast<gid_t>(-1)), 0);
    std::string problem;
    EXPECT_EQ(cache_folder("", &problem), "");
    EXPECT_NE(problem.find("belongs to user 12345"), std::string::npos) << problem;
  }
  fs::remove_all(folder);
  write_all(folder, "not a folder");
  std::string problem;
  EXPECT_EQ(cache_folder("", &problem), "");
  EXPECT_NE(problem.find("Not a directory"), std::string::npos) << problem;
}

TEST_F(JitCache, StaleTemporaryFilesAreRemoved) {
  fs::create_directories(entries());
  const auto put = [&](const std::string& name, int minutes) {
    const fs::path path = fs::path(entries()) / name;
    write_all(path, "x");
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::minutes(minutes));
    return path;
  };
  const fs::path stale = put("key.kernel.0123456789abcdef.tmp", 90), tuned = put("tuned-CPU-avx2.json.4711.0.tmp", 90);
  const fs::path young = put("key.kernel.fedcba9876543210.tmp", 10), entry = put("other.kernel", 90), foreign = put("letter.tmp", 90);
  EXPECT_TRUE(write_entry(entries(), "key", some_kernel()));
  EXPECT_FALSE(fs::exists(stale));
  EXPECT_FALSE(fs::exists(tuned));
  EXPECT_TRUE(fs::exists(young)) << "somebody may be writing it";
  EXPECT_TRUE(fs::exists(entry));
  EXPECT_TRUE(fs::exists(foreign)) << "the folder may hold more than ours";
}

TEST_F(JitCache, SharedFolderOnlyCostsTime) {
  skip_without_nvrtc();
  fs::create_directories(folder_ / "cache");
  fs::permissions(folder_ / "cache", fs::perms(0777));
  EXPECT_FALSE(compile(hits_spec()).from_cache);
  EXPECT_FALSE(compile(hits_spec()).from_cache);
  EXPECT_TRUE(files_below(folder_ / "cache").empty());
  fs::permissions(folder_ / "cache", fs::perms(0700));
  EXPECT_FALSE(compile(hits_spec()).from_cache);
  EXPECT_TRUE(compile(hits_spec()).from_cache);
}

// --- With the compiler

TEST_F(JitCache, CompilesOnceThenLoads) {
  skip_without_nvrtc();
  const CompiledKernel first = compile(hits_spec());
  EXPECT_FALSE(first.from_cache);
  EXPECT_EQ(first.cubin.substr(0, 4),
            "\x7f"
            "ELF");
  EXPECT_GT(first.registers, 0);
  EXPECT_EQ(first.spill_bytes, 0);
  EXPECT_GT(first.compile_ms, 0);
  EXPECT_EQ(first.compiler.rfind("NVRTC ", 0), 0u) << first.compiler;
  EXPECT_EQ(first.tensor_core_instruction, "");
  double best_ms = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const CompiledKernel again = compile(hits_spec());
    best_ms = std::min(best_ms, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
    EXPECT_TRUE(again.from_cache);
    EXPECT_EQ(again.cubin, first.cubin);
    EXPECT_EQ(again.compile_ms, first.compile_ms);
    EXPECT_EQ(again.registers, first.registers);
  }
  EXPECT_LT(best_ms, 20) << "loading from the cache";
  EXPECT_FALSE(compile(hits_spec(), "sm_90a", false).from_cache);
}

TEST_F(JitCache, WithoutTheCacheNothingIsWritten) {
  skip_without_nvrtc();
  EXPECT_FALSE(compile(hits_spec(), "sm_90a", false).from_cache);
  EXPECT_TRUE(files_below(folder_).empty());
}

TEST_F(JitCache, DamagedEntriesAreRebuiltSilently) {
  skip_without_nvrtc();
  const CompiledKernel first = compile(hits_spec());
  const fs::path path = files_below(folder_ / "cache").at(0);
  const std::string good = read_all(path);
  const std::size_t regions[] = {0, 7, 8, 39, 40, 48, 200, good.size() / 2, good.size() - 1};
  for (std::size_t at : regions) {
    std::string bad = good;
    bad[at] = static_cast<char>(~bad[at]);
    write_all(path, bad);
    const CompiledKernel again = compile(hits_spec());
    EXPECT_FALSE(again.from_cache) << "byte " << at;
    EXPECT_EQ(again.cubin.size(), first.cubin.size());
    EXPECT_TRUE(compile(hits_spec()).from_cache) << "byte " << at << " was not repaired";
  }
  write_all(path, "");
  EXPECT_FALSE(compile(hits_spec()).from_cache);
  EXPECT_TRUE(compile(hits_spec()).from_cache);
}

TEST_F(JitCache, UnwritablePathOnlyCostsTime) {
  skip_without_nvrtc();
  write_all(folder_ / "file", "not a folder");
  const Variable cache("TILEWAVE_CACHE", (folder_ / "file" / "cache").string());
  EXPECT_FALSE(compile(hits_spec()).from_cache);
  EXPECT_FALSE(compile(hits_spec()).from_cache);
  const Variable nowhere("TILEWAVE_CACHE", "/proc/no/such/place");
  EXPECT_FALSE(compile(hits_spec()).from_cache);
}

TEST_F(JitCache, FullDiskOnlyCostsTime) {
  skip_without_nvrtc();
  EXPECT_TRUE(in_child([] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1000, 1000};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
    return !compile(hits_spec()).from_cache && !compile(hits_spec()).from_cache;
  }));
  EXPECT_TRUE(files_below(folder_ / "cache").empty());
}

TEST_F(JitCache, EightProcessesAtOnce) {
  skip_without_nvrtc();
  constexpr int kProcesses = 8;
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      bool ok = false;
      try {
        ok = !compile(hits_spec()).cubin.empty() && compile(hits_spec()).from_cache;
      } catch (...) {
      }
      _exit(ok ? 0 : 1);
    }
    children.push_back(child);
  }
  for (pid_t child : children) {
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  }
  EXPECT_EQ(files_below(folder_ / "cache").size(), 1u);
  EXPECT_TRUE(compile(hits_spec()).from_cache);
}

TEST_F(JitCache, PackServesWhatTheCacheLacks) {
  skip_without_nvrtc();
  const CompiledKernel kernel = compile(hits_spec(3), "sm_90a", false);
  const fs::path folder = folder_ / "pack";
  write_pack(folder.string(), hits_spec(3), kernel);
  const Variable pack("TILEWAVE_PACK", folder.string());
  const CompiledKernel found = compile(hits_spec(3));
  EXPECT_TRUE(found.from_cache);
  EXPECT_EQ(found.cubin, kernel.cubin);
  EXPECT_TRUE(files_below(folder_ / "cache").empty()) << "what comes from a pack need not be kept again";
  EXPECT_FALSE(compile(hits_spec(4)).from_cache);
  const fs::path path = files_below(folder).at(0);
  write_all(path, read_all(path).substr(0, 100));
  EXPECT_FALSE(compile(hits_spec(3)).from_cache);
}

TEST_F(JitCache, CompileErrorsShowNameTypeAndMessage) {
  skip_without_nvrtc();
  KernelSpec spec = hits_spec();
  spec.name = "broken_kernel";
  spec.type = "jit_test::Broken";
  spec.source = "tests/jit/broken.tile.hpp";
  try {
    compile(spec);
    FAIL() << "it compiled";
  } catch (const CompileError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("broken_kernel"), std::string::npos) << text;
    EXPECT_NE(text.find("jit_test::Broken"), std::string::npos) << text;
    EXPECT_NE(text.find("no_such_type"), std::string::npos) << text;
  }
  EXPECT_TRUE(files_below(folder_).empty());
  KernelSpec missing = hits_spec();
  missing.source = "tests/jit/no_such_file.tile.hpp";
  EXPECT_THROW(compile(missing), InvalidArgument);
}

TEST_F(JitCache, CompilesManyAndReportsTheFailureLast) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs = {hits_spec(1), hits_spec(2), hits_spec(5)};
  std::vector<std::size_t> ready;
  compile_all(specs, 2, [&](std::size_t i, const CompiledKernel& kernel) {
    EXPECT_FALSE(kernel.from_cache);
    ready.push_back(i);
  });
  std::sort(ready.begin(), ready.end());
  EXPECT_EQ(ready, (std::vector<std::size_t>{0, 1, 2}));

  specs[0].type = "jit_test::NoSuchKernel";
  ready.clear();
  EXPECT_THROW(compile_all(specs, 1,
                           [&](std::size_t i, const CompiledKernel& kernel) {
                             EXPECT_TRUE(kernel.from_cache);
                             ready.push_back(i);
                           }),
               CompileError);
  EXPECT_EQ(ready, (std::vector<std::size_t>{1, 2}));
  EXPECT_NO_THROW(compile_all({}));
}

}  // namespace
}  // namespace tw::test
