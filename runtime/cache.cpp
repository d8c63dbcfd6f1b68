#include "runtime/cache.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "runtime/files.hpp"
#include "runtime/format.hpp"
#include "runtime/paths.hpp"
#include "runtime/sha256.hpp"

namespace tw {
namespace {

// An entry: the magic (which holds the format's version), the SHA-256 of all that follows, then the fields in the order of `encode`.
// Numbers are little-endian; a text is its length in 8 bytes and its bytes.
constexpr std::string_view kMagic = "TWKERN01";
constexpr std::size_t kHeaderBytes = 8 + 32;
// Far more than any kernel needs. Limits what is read from a damaged or foreign file.
constexpr std::size_t kLargestEntry = std::size_t{32} << 20;

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
  /// True if the file was complete and had nothing more.
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

std::string entry_path(const std::string& folder, const std::string& key) { return folder + "/" + key + ".kernel"; }

/// Like mkdir -p, with mode 0700 for all new folders (XDG Base Directory Specification). Returns 0 or errno.
int make_private(const std::filesystem::path& folder) {
  struct stat status {};
  if (stat(folder.c_str(), &status) == 0) return S_ISDIR(status.st_mode) ? 0 : ENOTDIR;
  if (errno != ENOENT) return errno;
  if (const std::filesystem::path parent = folder.parent_path(); !parent.empty() && parent != folder) {
    if (const int reason = make_private(parent)) return reason;
  }
  return mkdir(folder.c_str(), 0700) == 0 || errno == EEXIST ? 0 : errno;
}

/// "<key>.kernel.<number>.tmp" or "tuned-<device>.json.<number>.tmp". The folder may also contain a user's own files.
bool is_temporary(const std::string& name) {
  return name.ends_with(".tmp") &&
         (name.find(".kernel.") != std::string::npos || (name.starts_with("tuned-") && name.find(".json.") != std::string::npos));
}

}  // namespace

std::string folder_problem(const std::string& path) {
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) return errno == ENOENT ? "" : tw::format("{}: {}", path, std::strerror(errno));
  if (!S_ISDIR(status.st_mode)) return tw::format("{}: {}", path, std::strerror(ENOTDIR));
  constexpr const char* kAdvice = "set TILEWAVE_CACHE to a folder of your own; to share kernels use a pack, TILEWAVE_PACK";
  if (status.st_uid != geteuid() && status.st_uid != 0)
    return tw::format("{} belongs to user {}, who could change its contents: {}", path, status.st_uid, kAdvice);
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0)
    return tw::format("{} can be written by others (mode {:04o}): chmod go-w, or {}", path, status.st_mode & 07777u, kAdvice);
  return "";
}

std::string cache_folder(const std::string& below, std::string* problem) {
  const auto refuse = [&](std::string why) {
    if (problem != nullptr) *problem = std::move(why);
    return std::string();
  };
  std::string folder = cache_directory();
  if (folder.empty()) return refuse("there is no cache folder: TILEWAVE_CACHE, XDG_CACHE_HOME and HOME are not set");
  for (const std::string& part : {std::string(), below}) {
    if (!part.empty()) folder += "/" + part;
    if (const int reason = make_private(folder)) return refuse(tw::format("{}: {}", folder, std::strerror(reason)));
    if (std::string why = folder_problem(folder); !why.empty()) return refuse(std::move(why));
  }
  return folder;
}

void remove_stale_files(const std::string& folder) {
  constexpr std::chrono::hours kStale{1};  // writing a file never takes this long
  const auto now = std::filesystem::file_time_type::clock::now();
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (!is_temporary(entry->path().filename().string())) continue;
    std::error_code gone;  // another process may be removing it at the same time
    const auto written = entry->last_write_time(gone);
    if (!gone && now - written > kStale) std::filesystem::remove(entry->path(), gone);
  }
}

std::string encode_entry(const std::string& key, const CompiledKernel& kernel) {
  const std::string content = encode(key, kernel);
  const Sha256::Digest digest = checksum(content);
  std::string bytes(kMagic);
  bytes.append(reinterpret_cast<const char*>(digest.data()), digest.size());
  return bytes += content;
}

std::optional<CompiledKernel> decode_entry(const std::string& key, std::string_view bytes) {
  if (bytes.size() < kHeaderBytes || !bytes.starts_with(kMagic)) return {};
  const std::string_view content = bytes.substr(kHeaderBytes);
  const Sha256::Digest digest = checksum(content);
  if (std::memcmp(digest.data(), bytes.data() + kMagic.size(), digest.size()) != 0) return {};
  return decode(key, content);
}

std::optional<CompiledKernel> read_entry(const std::string& folder, const std::string& key) {
  if (folder.empty()) return {};
  const std::optional<std::string> bytes = read_file(entry_path(folder, key), kLargestEntry);
  return bytes ? decode_entry(key, *bytes) : std::nullopt;
}

bool write_entry(const std::string& folder, const std::string& key, const CompiledKernel& kernel, std::string* problem) {
  auto fail = [&](const std::string& what, const std::string& why) {
    if (problem != nullptr) *problem = tw::format("{}: {}", what, why);
    return false;
  };
  if (folder.empty()) return fail("cache", "no folder");
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return fail(folder, error.message());
  remove_stale_files(folder);
  return replace_file(entry_path(folder, key), {encode_entry(key, kernel)}, problem);
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
