#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tw::speech {

/// The source of a recording: memory, a file, or a pipe.
class Bytes {
 public:
  Bytes() = default;
  virtual ~Bytes() = default;
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;

  /// Their number; nothing for a pipe, where only reading finds the end.
  virtual std::optional<std::int64_t> size() const = 0;

  /// Reads up to `count` bytes from position `at` on; fewer only at the end or if there is a problem(). In a pipe,
  /// positions may go back by up to 64 KiB.
  virtual std::int64_t read(std::int64_t at, void* to, std::int64_t count) = 0;

  /// Exactly `count` bytes, or none.
  std::string read(std::int64_t at, std::int64_t count);

  /// Why reading stopped before the end; empty if it did not.
  const std::string& problem() const { return problem_; }

 protected:
  std::string problem_;
};

/// Bytes that the caller owns.
class MemoryBytes : public Bytes {
 public:
  explicit MemoryBytes(std::string_view bytes) : bytes_(bytes) {}
  std::optional<std::int64_t> size() const override { return static_cast<std::int64_t>(bytes_.size()); }
  using Bytes::read;
  std::int64_t read(std::int64_t at, void* to, std::int64_t count) override;

 private:
  std::string_view bytes_;
};

/// An open regular file from position `begin` on, `size` bytes.
class FileBytes : public Bytes {
 public:
  FileBytes(int descriptor, std::int64_t begin, std::int64_t size) : descriptor_(descriptor), begin_(begin), size_(size) {}
  std::optional<std::int64_t> size() const override { return size_; }
  using Bytes::read;
  std::int64_t read(std::int64_t at, void* to, std::int64_t count) override;

 private:
  int descriptor_;
  std::int64_t begin_, size_;
};

/// Input from a pipe, a socket or a terminal. Memory does not grow with its length.
class PipeBytes : public Bytes {
 public:
  explicit PipeBytes(int descriptor) : descriptor_(descriptor) {}
  std::optional<std::int64_t> size() const override { return {}; }
  using Bytes::read;
  std::int64_t read(std::int64_t at, void* to, std::int64_t count) override;

 private:
  bool fill();

  int descriptor_;
  std::vector<char> buffer_;
  std::int64_t begin_ = 0, known_ = 0;  ///< the buffer's first known_ bytes are those from position begin_ on
  bool ended_ = false;
};

/// Closes its descriptor.
class File {
 public:
  explicit File(int descriptor) : descriptor_(descriptor) {}
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

/// All of `pipe`, of which at most the first 64 KiB have been read, in an unnamed file, for formats with readers that seek. Throws
/// FileError, which begins with `name`.
class SpooledBytes : public Bytes {
 public:
  SpooledBytes(Bytes& pipe, const std::string& name);
  std::optional<std::int64_t> size() const override { return file_->size(); }
  using Bytes::read;
  std::int64_t read(std::int64_t at, void* to, std::int64_t count) override;

 private:
  std::unique_ptr<File> holder_;
  std::unique_ptr<FileBytes> file_;
};

inline std::uint64_t little_endian(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

inline std::uint64_t big_endian(std::string_view bytes) {
  std::uint64_t value = 0;
  for (const char byte : bytes) value = value << 8 | static_cast<unsigned char>(byte);
  return value;
}

}  // namespace tw::speech
