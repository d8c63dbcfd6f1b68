#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

namespace tw::models {

/// A file of a checkpoint, opened for reading. It is read, not mapped. So a file that becomes shorter, or a network file system that goes
/// away, is an error and not a signal that ends the process.
///
/// Several threads may call const functions.
class RegularFile {
 public:
  /// Throws FileError if the file cannot be opened or is not a regular file. Does not wait for a FIFO's other end.
  explicit RegularFile(const std::filesystem::path& path);
  ~RegularFile();
  RegularFile(const RegularFile&) = delete;
  RegularFile& operator=(const RegularFile&) = delete;

  const std::string& name() const { return name_; }
  /// In bytes, at the time of opening.
  std::size_t size() const { return static_cast<std::size_t>(opened_.st_size); }
  /// Fills `target` with the bytes from `offset` on, which must be inside the file. Throws FileError if the file cannot be read, or if its
  /// size or modification time has changed since it was opened.
  void read(std::size_t offset, std::span<std::byte> target) const;

 private:
  std::string name_;
  int descriptor_ = -1;
  struct stat opened_ {};
};

/// The bytes of a file: on disk, or in memory.
struct FileBytes {
  explicit FileBytes(const std::filesystem::path& path) : name(path.string()), on_disk(std::in_place, path), size(on_disk->size()) {}
  /// `bytes` must outlive this. Messages begin with `from`.
  FileBytes(std::string from, std::span<const std::byte> bytes) : name(std::move(from)), in_memory(bytes), size(bytes.size()) {}

  /// The range must be inside the file.
  void read(std::size_t offset, std::span<std::byte> target) const;
  std::string read_text(std::size_t offset, std::size_t bytes) const;

  std::string name;
  std::optional<RegularFile> on_disk;
  std::span<const std::byte> in_memory;
  std::size_t size;
};

/// The content of a regular file of at most `largest` bytes. Throws FileError; also for a git-LFS pointer.
std::string read_text(const std::filesystem::path& path, std::size_t largest);

/// Throws FileError if `content` is a git-LFS pointer, which replaces a file that was not downloaded.
void refuse_lfs_pointer(std::string_view content, const std::string& name);

}  // namespace tw::models
