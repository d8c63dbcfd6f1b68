#include "runtime/cache.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "runtime/paths.hpp"
#include "runtime/sha256.hpp"

namespace tw {
namespace {

// An entry: the magic (which holds the format's version), the SHA-256 of all that follows, then the fields in the order of `encode`.
// Numbers are little-endian; a text is its length in 8 bytes and its bytes.
constexpr std::string_view kMagic = "TWKERN01";
constexpr std::size_t kHeaderBytes = 8 + 32;
// No kernel comes near this; a damaged or foreign file must not make us read gigabytes.
constexpr std::size_t kLargestEntry = std::size_t{256} << 20;

class Writer {
 public:
  void number(std::uint64_t value) {
    for (int i = 0; i < 8; ++i) bytes_ += static_cast<char>(value >> (8 * i));
  }
  void real(double value) {
    std::uint64_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    number(bits);
  }
  void text(std::string_view value) {
    number(value.size());
    bytes_ += value;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : left_(bytes) {}

  std::uint64_t number() {
    if (left_.size() < 8) return fail();
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value |= std::uint64_t{static_cast<unsigned char>(left_[i])} << (8 * i);
    left_.remove_prefix(8);
    return value;
  }
  int integer() { return static_cast<int>(number()); }
  double real() {
    const std::uint64_t bits = number();
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  std::string text() {
    const std::uint64_t size = number();
    if (size > left_.size()) {
      fail();
      return {};
    }
    std::string value(left_.substr(0, size));
    left_.remove_prefix(size);
    return value;
  }
  /// Everything was there, and nothing else.
  bool complete() const { return ok_ && left_.empty(); }
  bool ok() const { return ok_; }

 private:
  std::uint64_t fail() {
    ok_ = false;
    left_ = {};
    return 0;
  }

  std::string_view left_;
  bool ok_ = true;
};

std::string encode(const std::string& key, const CompiledKernel& kernel) {
  Writer w;
  w.text(key);
  w.text(kernel.cubin);
  w.text(kernel.log);
  w.text(kernel.compiler);
  w.number(kernel.registers);
  w.number(kernel.spill_bytes);
  w.number(kernel.static_shared_bytes);
  w.real(kernel.compile_ms);
  w.text(kernel.tensor_core_instruction);
  w.number(kernel.performance_losses.size());
  for (const std::string& message : kernel.performance_losses) w.text(message);
  return w.bytes();
}

std::optional<CompiledKernel> decode(const std::string& key, std::string_view bytes) {
  Reader r(bytes);
  if (r.text() != key) return {};
  CompiledKernel kernel;
  kernel.cubin = r.text();
  kernel.log = r.text();
  kernel.compiler = r.text();
  kernel.registers = r.integer();
  kernel.spill_bytes = r.integer();
  kernel.static_shared_bytes = r.integer();
  kernel.compile_ms = r.real();
  kernel.tensor_core_instruction = r.text();
  for (std::uint64_t left = r.number(); left > 0 && r.ok(); --left) kernel.performance_losses.push_back(r.text());
  if (!r.complete()) return {};
  kernel.from_cache = true;
  return kernel;
}

Sha256::Digest checksum(std::string_view bytes) { return Sha256().add(bytes).finish(); }

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

std::optional<std::string> read_file(const std::string& path) {
  File file(path, O_RDONLY);
  struct stat status {};
  if (!file.is_open() || fstat(file.descriptor(), &status) != 0 || !S_ISREG(status.st_mode)) return {};
  if (status.st_size < 0 || static_cast<std::size_t>(status.st_size) > kLargestEntry) return {};
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

std::string entry_path(const std::string& folder, const std::string& key) { return folder + "/" + key + ".kernel"; }

}  // namespace

std::optional<CompiledKernel> read_entry(const std::string& folder, const std::string& key) {
  if (folder.empty()) return {};
  std::optional<std::string> bytes = read_file(entry_path(folder, key));
  if (!bytes || bytes->size() < kHeaderBytes || bytes->compare(0, kMagic.size(), kMagic) != 0) return {};
  const std::string_view content = std::string_view(*bytes).substr(kHeaderBytes);
  const Sha256::Digest digest = checksum(content);
  if (std::memcmp(digest.data(), bytes->data() + kMagic.size(), digest.size()) != 0) return {};
  return decode(key, content);
}

bool write_entry(const std::string& folder, const std::string& key, const CompiledKernel& kernel, std::string* problem) {
  auto fail = [&](const std::string& what, const std::string& why) {
    if (problem != nullptr) *problem = fmt::format("{}: {}", what, why);
    return false;
  };
  if (folder.empty()) return fail("cache", "no folder");
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return fail(folder, error.message());

  static std::atomic<unsigned> count = 0;
  const std::string path = entry_path(folder, key);
  const std::string temporary = fmt::format("{}.{}.{}.tmp", path, getpid(), count.fetch_add(1));
  const std::string content = encode(key, kernel);
  const Sha256::Digest digest = checksum(content);

  bool written = false;
  int reason = 0;
  {
    File file(temporary, O_WRONLY | O_CREAT | O_TRUNC);
    if (!file.is_open()) return fail(temporary, std::strerror(errno));
    written = file.write_all(kMagic) && file.write_all({reinterpret_cast<const char*>(digest.data()), digest.size()}) &&
              file.write_all(content) && file.sync_and_close();
    reason = errno;
  }
  if (written && std::rename(temporary.c_str(), path.c_str()) == 0) return true;
  if (written) reason = errno;
  unlink(temporary.c_str());
  return fail(path, std::strerror(reason));
}

std::vector<std::string> pack_directories() {
  std::vector<std::string> list;
  if (std::string folder = environment("TILEWAVE_PACK"); !folder.empty()) list.push_back(folder);
  if (std::filesystem::path own = own_folder(); !own.empty()) list.push_back((own.parent_path() / "share/tilewave/kernels").string());
  return list;
}

std::string cache_directory() {
  if (std::string folder = environment("TILEWAVE_CACHE"); !folder.empty()) return folder;
  if (std::string folder = environment("XDG_CACHE_HOME"); !folder.empty()) return folder + "/tilewave";
  if (std::string folder = environment("HOME"); !folder.empty()) return folder + "/.cache/tilewave";
  return "";
}

}  // namespace tw
