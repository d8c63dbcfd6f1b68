#include "models/regular_file.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>

#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/temporary_directory.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryDirectory;

std::string bytes_of(const RegularFile& file, std::size_t offset, std::size_t count) {
  std::string bytes(count, '?');
  file.read(offset, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

TEST(RegularFile, IsReadWhereAskedFor) {
  const TemporaryDirectory directory;
  const fs::path path = directory.write("a", "0123456789");
  const RegularFile file(path);
  EXPECT_EQ(file.size(), 10u);
  EXPECT_EQ(file.name(), path.string());
  EXPECT_EQ(bytes_of(file, 0, 10), "0123456789");
  EXPECT_EQ(bytes_of(file, 7, 3), "789");
  EXPECT_EQ(bytes_of(file, 10, 0), "");
  EXPECT_EQ(read_text(path, 10), "0123456789");
  EXPECT_EQ(read_text(directory.write("empty", ""), 0), "");
  fs::create_symlink("a", directory.path() / "link");  // as the Hugging Face cache has them
  EXPECT_EQ(read_text(directory.path() / "link", 10), "0123456789");
}

TEST(RegularFile, OthersAreRefusedWithoutWaiting) {
  const TemporaryDirectory directory;
  const auto refused = [](const fs::path& path, const std::string& why) {
    expect_error<FileError>([&] { read_text(path, 100); }, {path.string() + ": " + why});
  };
  const fs::path fifo = directory.path() / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  alarm(60);  // a FIFO that nobody writes to would be waited for without end
  refused(fifo, "is a FIFO; allowed: a regular file");
  alarm(0);
  refused(directory.path(), "is a directory; allowed: a regular file");
  refused("/dev/null", "is a device; allowed: a regular file");
  refused(directory.path() / "none", "No such file");
  refused(directory.write("long", std::string(101, 'x')), "101 bytes; at most 100 are read");
}

TEST(RegularFile, ChangesWhileItIsReadAreErrors) {
  const TemporaryDirectory directory;
  const auto refused_after = [&](const auto& change, const std::string& why) {
    const fs::path path = directory.write("a", std::string(10000, 'x'));
    const RegularFile file(path);
    EXPECT_EQ(bytes_of(file, 0, 3), "xxx");
    change(path);
    expect_error<FileError>([&] { bytes_of(file, 9000, 1000); }, {path.string() + ": was changed while it was read: ", why});
    expect_error<FileError>([&] { bytes_of(file, 0, 1); }, {why});  // wherever
  };
  refused_after([](const fs::path& path) { fs::resize_file(path, 9500); }, "10000 bytes when it was opened, 9500 now");
  refused_after([](const fs::path& path) { fs::resize_file(path, 0); }, "10000 bytes when it was opened, 0 now");
  refused_after([](const fs::path& path) { fs::resize_file(path, 10001); }, "10000 bytes when it was opened, 10001 now");
  refused_after([](const fs::path& path) { fs::last_write_time(path, fs::last_write_time(path) - std::chrono::hours(1)); },
                "its modification time is another one");
  // A new file under the same name is another file: what was opened is still there.
  const fs::path path = directory.write("a", "old");
  const RegularFile file(path);
  fs::rename(directory.write("b", "new"), path);
  EXPECT_EQ(bytes_of(file, 0, 3), "old");
}

TEST(RegularFile, GitLfsPointersAreExplained) {
  const TemporaryDirectory directory;
  const fs::path path =
      directory.write("a.json", "version https://git-lfs.github.com/spec/v1\noid sha256:" + std::string(64, '0') + "\nsize 4512345678\n");
  expect_error<FileError>([&] { read_text(path, 1000); }, {path.string() + ": a git-LFS pointer", "git lfs pull", "hf download zai-org/"});
}

}  // namespace
}  // namespace tw::models
