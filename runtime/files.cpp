#include "runtime/files.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

#include "runtime/format.hpp"

namespace tw {
namespace {

class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(const std::string& path, int flags, mode_t mode = 0644) : File(open(path.c_str(), flags | O_CLOEXEC, mode)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }

  bool write_all(std::initializer_list<std::string_view> pieces) {
    return std::all_of(pieces.begin(), pieces.end(), [this](std::string_view piece) { return write_all(piece); });
  }

  /// Closing reports errors of delayed writes (NFS, quotas).
  bool close_now() { return close(std::exchange(descriptor_, -1)) == 0; }
  bool sync_and_close() { return fsync(descriptor_) == 0 && close_now(); }

 private:
  bool write_all(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = write(descriptor_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
  }

  int descriptor_;
};

using Pieces = std::initializer_list<std::string_view>;

bool fail(const std::string& path, int reason, std::string* problem) {
  if (problem != nullptr) *problem = tw::format("{}: {}", path, std::strerror(reason));
  return false;
}

/// Why a file was not replaced.
struct Replacement {
  int reason = 0;              ///< errno; 0: it was replaced
  bool only_in_place = false;  ///< writing in place may still work
};

/// `old`: the existing file, whose mode and owner are kept; null: a new file with `mode`, as the umask allows.
Replacement replace(const std::string& path, Pieces pieces, const struct stat* old, mode_t mode) {
  // O_EXCL and an unpredictable name prevent writing to a file or link that another user put there.
  std::random_device random;
  const std::string temporary = tw::format("{}.{:08x}{:08x}.tmp", path, random(), random());
  int reason = 0;
  {
    File file(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, old != nullptr ? 0600 : mode);
    if (!file.is_open()) return {errno, errno == EACCES || errno == EPERM || errno == EROFS};
    if (old != nullptr) {
      // Only root may change the owner; a set-user-id bit must not pass to another owner.
      const bool owner_kept = fchown(file.descriptor(), old->st_uid, old->st_gid) == 0;
      if (fchmod(file.descriptor(), old->st_mode & (owner_kept ? 07777 : 0777)) != 0) reason = errno;
    }
    if (reason == 0 && !(file.write_all(pieces) && file.sync_and_close())) reason = errno;
  }
  if (reason != 0) {
    unlink(temporary.c_str());
    return {reason, false};
  }
  if (std::rename(temporary.c_str(), path.c_str()) == 0) return {};
  reason = errno;
  unlink(temporary.c_str());
  return {reason, reason == EBUSY || reason == EACCES || reason == EPERM};
}

/// The number of the open file of this process that `path` stands for (/proc/self/fd/1, which /dev/stdout leads to), or -1.
int own_descriptor(const std::filesystem::path& path) {
  const std::string name = path.filename().string();
  int number = -1;
  const auto [end, parsed] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (parsed != std::errc() || end != name.data() + name.size()) return -1;
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::canonical(path.parent_path(), error);
  return !error && folder == tw::format("/proc/{}/fd", getpid()) ? number : -1;
}

/// Follows symbolic links except those that stand for open files. Returns false, with errno set, if there are too many.
bool follow_links(std::filesystem::path& path) {
  constexpr int kMostLinks = 40;  // Linux's own limit
  for (int i = 0; i < kMostLinks; ++i) {
    std::error_code error;
    const std::filesystem::path target = std::filesystem::read_symlink(path, error);
    if (error || own_descriptor(path) >= 0) return true;
    path = path.parent_path() / target;  // an absolute target replaces all of it
  }
  errno = ELOOP;
  return false;
}

}  // namespace

std::optional<std::string> read_file(const std::string& path, std::size_t largest) {
  File file(path, O_RDONLY | O_NONBLOCK);  // do not wait for a FIFO's writer; it is refused below
  struct stat status {};
  if (!file.is_open() || fstat(file.descriptor(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  if (status.st_size < 0 || static_cast<std::size_t>(status.st_size) > largest) return {};
  std::string bytes(static_cast<std::size_t>(status.st_size), '\0');
  std::size_t filled = 0;
  while (filled < bytes.size()) {
    const ssize_t n = read(file.descriptor(), bytes.data() + filled, bytes.size() - filled);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return {};
    filled += static_cast<std::size_t>(n);
  }
  return bytes;
}

bool replace_file(const std::string& path, Pieces pieces, std::string* problem) {
  const int reason = replace(path, pieces, nullptr, 0644).reason;
  return reason == 0 || fail(path, reason, problem);
}

bool write_file(const std::string& path, Pieces pieces, std::string* problem) {
  std::filesystem::path followed = path;
  if (!follow_links(followed)) return fail(path, errno, problem);
  const auto write_in_place = [&](File&& file) {
    const bool written = file.is_open() && file.write_all(pieces) && file.close_now();
    return written || fail(path, errno, problem);
  };
  // A descriptor may be in append mode, or its file may have no name: opening it by name would be something else.
  if (const int own = own_descriptor(followed); own >= 0) return write_in_place(File(fcntl(own, F_DUPFD_CLOEXEC, 0)));
  const std::string target = followed.string();
  struct stat old {};
  const bool there = stat(target.c_str(), &old) == 0;
  if (!there && errno != ENOENT) return fail(path, errno, problem);
  if (there && !S_ISREG(old.st_mode)) return write_in_place(File(target, O_WRONLY | O_NOCTTY));
  // Renaming only needs the folder's permissions, but a write-protected file must stay.
  if (there && faccessat(AT_FDCWD, target.c_str(), W_OK, AT_EACCESS) != 0) return fail(path, errno, problem);
  const Replacement replaced = replace(target, pieces, there ? &old : nullptr, 0666);
  if (replaced.reason == 0) return true;
  if (there && replaced.only_in_place) return write_in_place(File(target, O_WRONLY | O_TRUNC));
  return fail(path, replaced.reason, problem);
}

FileLock::FileLock(const std::string& path) : descriptor_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
  while (descriptor_ >= 0 && flock(descriptor_, LOCK_EX) != 0 && errno == EINTR) {
  }
}

FileLock::~FileLock() {
  if (descriptor_ >= 0) close(descriptor_);
}

}  // namespace tw
