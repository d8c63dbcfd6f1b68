#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace tw {

/// The content of a regular file; nothing if it cannot be read or has more than `largest` bytes.
std::optional<std::string> read_file(const std::string& path, std::size_t largest);

/// Writes `pieces` in sequence, atomically: a reader in any process sees all of the new file or all of the old one. Returns false on
/// failure, with the reason in `problem` (it begins with the path) and no file left. Also replaces a link or a device: use write_file() for
/// names that users give.
bool replace_file(const std::string& path, std::initializer_list<std::string_view> pieces, std::string* problem);

/// Writes `pieces` to a path that a user gave:
/// - Symbolic links are followed and stay.
/// - A regular file is replaced as by replace_file() and keeps its mode and, where the system allows it, its owner. A new file gets the
///   umask's mode.
/// - A regular file that cannot be replaced (its folder is read-only, or it is a mount of its own) is overwritten in place.
/// - Anything else, such as a device or a FIFO, is written in place, and so are this process's descriptors (/dev/stdout, /dev/fd/3).
/// On failure the reason is in `problem` (it begins with the path) and the result is false.
bool write_file(const std::string& path, std::initializer_list<std::string_view> pieces, std::string* problem);

/// An exclusive lock on a path, for all processes and threads. Does nothing if the file system has no locks.
class FileLock {
 public:
  explicit FileLock(const std::string& path);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int descriptor_;
};

}  // namespace tw
