#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace tw {

/// The content of a regular file; nothing if it cannot be read or has more than `largest` bytes.
std::optional<std::string> read_file(const std::string& path, std::size_t largest);

/// Writes `pieces`, one after the other, so that a reader, also one in another process, sees all of the new file or all of the old one. On
/// failure nothing is left behind, the reason is in `problem` and the result is false.
bool replace_file(const std::string& path, std::initializer_list<std::string_view> pieces, std::string* problem);

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
