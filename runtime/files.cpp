#include "runtime/files.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "runtime/format.hpp"

namespace tw {
namespace {

class File {
 public:
  File(const std::string& path, int flags) : descriptor_(open(path.c_str(), flags | O_CLOEXEC, 0644)) {}
  ~File() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }

  bool write_all(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = write(descriptor_, bytes.data(), bytes.size());
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
  }

  /// Closing reports what a file system wrote late (NFS, quotas).
  bool sync_and_close() {
    const bool synced = fsync(descriptor_) == 0;
    const bool closed = close(descriptor_) == 0;
    descriptor_ = -1;
    return synced && closed;
  }

 private:
  int descriptor_;
};

}  // namespace

std::optional<std::string> read_file(const std::string& path, std::size_t largest) {
  File file(path, O_RDONLY | O_NONBLOCK);  // a FIFO without a writer is refused below, not waited for
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

bool replace_file(const std::string& path, std::initializer_list<std::string_view> pieces, std::string* problem) {
  auto fail = [&](const std::string& what, int reason) {
    if (problem != nullptr) *problem = tw::format("{}: {}", what, std::strerror(reason));
    return false;
  };
  static std::atomic<unsigned> count = 0;
  const std::string temporary = tw::format("{}.{}.{}.tmp", path, getpid(), count.fetch_add(1));
  bool written = true;
  int reason = 0;
  {
    File file(temporary, O_WRONLY | O_CREAT | O_TRUNC);
    if (!file.is_open()) return fail(temporary, errno);
    for (const std::string_view piece : pieces) written = written && file.write_all(piece);
    written = written && file.sync_and_close();
    reason = errno;
  }
  if (written && std::rename(temporary.c_str(), path.c_str()) == 0) return true;
  if (written) reason = errno;
  unlink(temporary.c_str());
  return fail(path, reason);
}

FileLock::FileLock(const std::string& path) : descriptor_(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644)) {
  while (descriptor_ >= 0 && flock(descriptor_, LOCK_EX) != 0 && errno == EINTR) {
  }
}

FileLock::~FileLock() {
  if (descriptor_ >= 0) close(descriptor_);
}

}  // namespace tw
