// The cache of compiled kernels: entries on disk, damaged or shared, and what compile() makes of them.

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
#include <string>
#include <vector>

#include "runtime/cache.hpp"
#include "runtime/jit.hpp"
#include "tests/jit_fixture.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"
#include "tilewave/kernel.hpp"

namespace tw::test {
namespace {

namespace fs = std::filesystem;

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
  const CompiledKernel again = compile(hits_spec());
  EXPECT_TRUE(again.from_cache);
  EXPECT_EQ(again.cubin, first.cubin);
  EXPECT_EQ(again.compile_ms, first.compile_ms);
  EXPECT_EQ(again.registers, first.registers);
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

TEST_F(JitCache, CompilesAheadWhatIsMissing) {
  skip_without_nvrtc();
  compile(hits_spec(1));
  std::vector<KernelSpec> specs = {hits_spec(1), hits_spec(2), hits_spec(3), hits_spec(4)};
  specs[3].type = "jit_test::NoSuchKernel";  // left to its launch
  std::vector<std::size_t> counts;
  const auto count = [&](std::size_t done, std::size_t all) {
    EXPECT_EQ(all, 3u);
    counts.push_back(done);
  };
  compile_ahead(specs, "sm_90a", count);
  EXPECT_EQ(counts, (std::vector<std::size_t>{0, 1, 2, 3}));
  EXPECT_TRUE(compile(hits_spec(2)).from_cache);
  EXPECT_TRUE(compile(hits_spec(3)).from_cache);
  specs.pop_back();
  compile_ahead(specs, "sm_90a", [](std::size_t, std::size_t) { ADD_FAILURE() << "all are in the cache"; });

  // An architecture has kernels of its own; a stop request leaves the rest.
  std::stop_source stop;
  compile_ahead(
      specs, "sm_90", [&](std::size_t, std::size_t) { stop.request_stop(); }, stop.get_token());
  for (const KernelSpec& spec : specs) EXPECT_FALSE(compile(spec, "sm_90").from_cache);
}

}  // namespace
}  // namespace tw::test
