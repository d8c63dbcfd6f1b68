#include "speech/audio/bytes.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {

namespace {

constexpr std::int64_t kKept = 1 << 16;  // bytes that a pipe remembers
constexpr std::size_t kPiece = 1 << 18;  // bytes per read

}  // namespace

std::string Bytes::read(std::int64_t at, std::int64_t count) {
  std::string text(static_cast<std::size_t>(count), '\0');
  text.resize(read(at, text.data(), count) == count ? text.size() : 0);
  return text;
}

std::int64_t MemoryBytes::read(std::int64_t at, void* to, std::int64_t count) {
  count = std::clamp<std::int64_t>(std::ssize(bytes_) - at, 0, std::max<std::int64_t>(count, 0));
  if (count > 0) std::memcpy(to, bytes_.data() + at, static_cast<std::size_t>(count));
  return count;
}

std::int64_t FileBytes::read(std::int64_t at, void* to, std::int64_t count) {
  count = std::clamp<std::int64_t>(size_ - at, 0, std::max<std::int64_t>(count, 0));
  std::int64_t done = 0;
  while (done < count) {
    const ssize_t got = pread(descriptor_, static_cast<char*>(to) + done, static_cast<std::size_t>(count - done), begin_ + at + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      problem_ = got < 0 ? std::strerror(errno) : "the file became shorter while it was read";
      break;
    }
    done += got;
  }
  return done;
}

std::int64_t PipeBytes::read(std::int64_t at, void* to, std::int64_t count) {
  std::int64_t done = 0;
  while (done < count) {
    const std::int64_t from = at + done - begin_;
    if (from < 0) {
      problem_ = "it would have to be read again, which a pipe cannot be";
      break;
    }
    if (from < known_) {
      const std::int64_t part = std::min(count - done, known_ - from);
      std::memcpy(static_cast<char*>(to) + done, buffer_.data() + from, static_cast<std::size_t>(part));
      done += part;
    } else if (!fill()) {
      break;
    }
  }
  return done;
}

bool PipeBytes::fill() {
  if (ended_) return false;
  buffer_.resize(kKept + kPiece);
  if (known_ > kKept) {
    std::memmove(buffer_.data(), buffer_.data() + known_ - kKept, kKept);
    begin_ += known_ - kKept;
    known_ = kKept;
  }
  ssize_t got = 0;
  do {
    got = ::read(descriptor_, buffer_.data() + known_, kPiece);
  } while (got < 0 && errno == EINTR);
  if (got < 0) problem_ = std::strerror(errno);
  known_ += std::max<ssize_t>(got, 0);
  ended_ = got <= 0;
  return !ended_;
}

File::~File() {
  if (descriptor_ >= 0) close(descriptor_);
}

SpooledBytes::SpooledBytes(Bytes& pipe, const std::string& name) {
  std::error_code no_folder;
  const std::string folder = std::filesystem::temp_directory_path(no_folder).string();
  std::string path = (no_folder ? "/tmp" : folder) + "/tilewave-XXXXXX";
  const auto fail = [&] {
    throw FileError(tw::format("{}: cannot be kept in a temporary file in {}: {} (TMPDIR names another folder; WAV and FLAC need none)",
                               name, no_folder ? "/tmp" : folder, std::strerror(errno)));
  };
  holder_ = std::make_unique<File>(mkostemp(path.data(), O_CLOEXEC));
  if (holder_->get() < 0) fail();
  unlink(path.c_str());
  std::vector<char> piece(kPiece);
  std::int64_t size = 0;
  while (const std::int64_t got = pipe.read(size, piece.data(), std::ssize(piece))) {
    for (std::int64_t done = 0; done < got;) {
      const ssize_t written = write(holder_->get(), piece.data() + done, static_cast<std::size_t>(got - done));
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail();
      done += written;
    }
    size += got;
  }
  if (!pipe.problem().empty()) throw FileError(tw::format("{}: {} after {} bytes", name, pipe.problem(), size));
  file_ = std::make_unique<FileBytes>(holder_->get(), 0, size);
}

std::int64_t SpooledBytes::read(std::int64_t at, void* to, std::int64_t count) {
  const std::int64_t got = file_->read(at, to, count);
  problem_ = file_->problem();
  return got;
}

}  // namespace tw::speech
