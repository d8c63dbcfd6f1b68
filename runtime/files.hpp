#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace tw {

/// The content of a regular file; nothing if it cannot be read or has more than `largest` bytes.
std::optional<std::string> read_file(const std::string& path, std::size_t largest);

/// Writes `pieces`, one after the other, so that a reader, also one in another process, sees all of the new file or all of the old one. On
/// failure nothing is left behind, the reason is in `problem` (it begins with the path) and the result is false. Replaces whatever `path`
/// names, a link or a device, too: use write_file() for names that users give.
bool replace_file(const std::string& path, std::initializer_list<std::string_view> pieces, std::string* problem);

/// Writes `pieces` to what a user named:
/// - Symbolic links are followed and stay.
/// - A regular file is replaced as by replace_file() and keeps its mode and, where the system allows it, its owner. A new file gets the
/// mode
///   that the umask allows.
/// - A regular file that cannot be replaced (its folder is read-only, or it is a mount of its own) is overwritten in place.
/// - Anything else, such as a device or a FIFO, is written in place, and so are this process's descriptors (/dev/stdout, /dev/fd/3).
/// On failure the reason is in `problem` (it begins with the path) and the result is false.
bool write_file(const std::string& path, std::initializer_list<std::string_view> pieces, std::string* problem);

/// While it lives no other FileLock on this path does, in this process or another. Where the file system has no locks it does nothing.
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
