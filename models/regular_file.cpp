#include "models/regular_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

const char* kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

bool is_same_version(const struct stat& a, const struct stat& b) {
  return a.st_size == b.st_size && a.st_mtim.tv_sec == b.st_mtim.tv_sec && a.st_mtim.tv_nsec == b.st_mtim.tv_nsec;
}

}  // namespace

RegularFile::RegularFile(const std::filesystem::path& path) : name_(path.string()) {
  const auto fail = [&](const std::string& what) { throw FileError(tw::format("{}: {}", name_, what)); };
  const auto require_regular = [&] {
    if (!S_ISREG(opened_.st_mode)) fail(tw::format("is {}; allowed: a regular file", kind_of(opened_.st_mode)));
  };
  if (stat(path.c_str(), &opened_) != 0) fail(std::strerror(errno));
  require_regular();  // before opening, which has side effects for some devices
  descriptor_ = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);  // O_NONBLOCK: it may be a FIFO by now
  if (descriptor_ < 0) fail(std::strerror(errno));
  try {
    if (fstat(descriptor_, &opened_) != 0) fail(std::strerror(errno));
    require_regular();
  } catch (...) {
    close(descriptor_);
    throw;
  }
}

RegularFile::~RegularFile() { close(descriptor_); }

void RegularFile::read(std::size_t offset, std::span<std::byte> target) const {
  const auto fail = [&](const std::string& what) { throw FileError(tw::format("{}: {}", name_, what)); };
  while (!target.empty()) {
    const ssize_t count = pread(descriptor_, target.data(), target.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail(tw::format("cannot be read at byte {}: {}", offset, std::strerror(errno)));
    if (count == 0) break;
    offset += static_cast<std::size_t>(count);
    target = target.subspan(static_cast<std::size_t>(count));
  }
  struct stat now {};
  if (fstat(descriptor_, &now) != 0) fail(std::strerror(errno));
  if (now.st_size != opened_.st_size)
    fail(tw::format("was changed while it was read: {} bytes when it was opened, {} now", opened_.st_size, now.st_size));
  if (!is_same_version(now, opened_)) fail("was changed while it was read: its modification time is another one than when it was opened");
  if (!target.empty()) fail(tw::format("ends at byte {}, before its size of {} bytes", offset, opened_.st_size));
}

void FileBytes::read(std::size_t offset, std::span<std::byte> target) const {
  if (on_disk) {
    on_disk->read(offset, target);
  } else if (!target.empty()) {
    std::memcpy(target.data(), in_memory.data() + offset, target.size());
  }
}

std::string FileBytes::read_text(std::size_t offset, std::size_t bytes) const {
  std::string text(bytes, '\0');
  read(offset, std::as_writable_bytes(std::span(text)));
  return text;
}

std::string read_text(const std::filesystem::path& path, std::size_t largest) {
  const RegularFile file(path);
  if (file.size() > largest) throw FileError(tw::format("{}: {} bytes; at most {} are read", file.name(), file.size(), largest));
  std::string text(file.size(), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  refuse_lfs_pointer(text, file.name());
  return text;
}

void refuse_lfs_pointer(std::string_view content, const std::string& name) {
  if (content.starts_with("version https://git-lfs.github.com/spec/"))
    throw FileError(
        tw::format("{}: a git-LFS pointer, not the file that it stands for, which was not downloaded: run \"git lfs pull\" in the "
                   "checkpoint's directory, or download it with \"hf download zai-org/GLM-ASR-Nano-2512 --local-dir DIRECTORY\"",
                   name));
}

}  // namespace tw::models
