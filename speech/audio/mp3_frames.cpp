#include "speech/audio/mp3_frames.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {
namespace {

/// The fields in the four bytes of a frame header (ISO 11172-3, 13818-3).
struct FrameHeader {
  int version = 0;  // 1; 2 for MPEG-2 and MPEG-2.5
  int layer = 0;
  int rate = 0;  // Hz
  bool mono = false;
  std::int64_t bytes = 0;

  int samples() const { return layer == 1 ? 384 : layer == 3 && version == 2 ? 576 : 1152; }
  /// Whether both may be in the same file: only bit rate, mode and padding change from frame to frame.
  bool goes_with(const FrameHeader& other) const { return version == other.version && layer == other.layer && rate == other.rate; }
};

/// Nothing for other bytes, and for frames in free format, whose header does not tell their length.
std::optional<FrameHeader> parse_header(const unsigned char* b) {
  constexpr std::array<std::array<int, 15>, 5> kKilobits = {{
      {0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448},  // version 1, layer I
      {0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384},     // II
      {0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320},      // III
      {0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256},     // version 2, layer I
      {0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160},          // II and III
  }};
  constexpr std::array<int, 3> kRates = {44100, 48000, 32000};  // version 1; half of it in MPEG-2, a quarter in MPEG-2.5
  const int version = b[1] >> 3 & 3, layer = 4 - (b[1] >> 1 & 3), kilobits = b[2] >> 4, rate = b[2] >> 2 & 3;
  if (b[0] != 0xFF || (b[1] & 0xE0) != 0xE0 || version == 1 || layer == 4 || kilobits == 0 || kilobits == 15 || rate == 3) return {};
  FrameHeader header;
  header.version = version == 3 ? 1 : 2;
  header.layer = layer;
  header.rate = kRates[static_cast<std::size_t>(rate)] / (version == 3 ? 1 : version == 2 ? 2 : 4);
  header.mono = b[3] >> 6 == 3;
  const std::size_t row = header.version == 1 ? static_cast<std::size_t>(layer - 1) : layer == 1 ? 3 : 4;
  const int bits = kKilobits[row][static_cast<std::size_t>(kilobits)] * 1000, padding = b[2] >> 1 & 1;
  header.bytes = layer == 1 ? (12 * bits / header.rate + padding) * 4 : header.samples() / 8 * bits / header.rate + padding;
  return header;
}

/// A file that is read sequentially, piece by piece.
class Walk {
 public:
  Walk(Bytes& file, std::int64_t size) : file_(file), size_(size), piece_(1 << 16) {}

  std::int64_t size() const { return size_; }

  /// The `count` (at most 64) bytes from `at` on; null if some are missing.
  const unsigned char* bytes(std::int64_t at, std::int64_t count) {
    if (at < begin_ || at + count > begin_ + known_) {
      begin_ = at;
      known_ = file_.read(at, piece_.data(), std::ssize(piece_));
      if (!file_.problem().empty()) size_ = begin_ + known_;  // the walk ends here
    }
    return at + count <= begin_ + known_ ? piece_.data() + (at - begin_) : nullptr;
  }

  std::optional<FrameHeader> header(std::int64_t at) {
    const unsigned char* const b = bytes(at, 4);
    return b ? parse_header(b) : std::nullopt;
  }

  /// The first position from `at` on and before `end` with two consecutive frames that match `like`, or with one that fills the rest.
  std::optional<std::int64_t> find(std::int64_t at, std::int64_t end, const std::optional<FrameHeader>& like) {
    for (; at < std::min(end, size_ - 3); ++at) {
      const std::optional<FrameHeader> first = header(at);
      if (!first || (like && !first->goes_with(*like))) continue;
      const std::int64_t next = at + first->bytes;
      const std::optional<FrameHeader> second = header(next);
      if (next == size_ || (second && second->goes_with(*first))) return at;
    }
    return {};
  }

 private:
  Bytes& file_;
  std::int64_t size_;
  std::vector<unsigned char> piece_;
  std::int64_t begin_ = 0, known_ = 0;
};

/// The number of frames according to a header in the frame at `at`, if it has one.
std::optional<std::uint64_t> promised_frames(Walk& walk, std::int64_t at, const FrameHeader& first) {
  if (first.layer != 3) return {};
  const auto text = [&](std::int64_t place, std::int64_t count) {
    const unsigned char* const b = walk.bytes(at + place, count);
    return b && place + count <= first.bytes ? std::string(b, b + count) : std::string();
  };
  const std::int64_t side = first.version == 1 ? (first.mono ? 17 : 32) : (first.mono ? 9 : 17);
  for (const std::int64_t checksum : {0, 2}) {
    const std::string tag = text(4 + checksum + side, 12);
    if ((tag.starts_with("Xing") || tag.starts_with("Info")) && (tag[7] & 1) != 0) return big_endian(std::string_view(tag).substr(8));
  }
  const std::string tag = text(4 + 32, 18);
  if (tag.starts_with("VBRI")) return big_endian(std::string_view(tag).substr(14));
  return {};
}

}  // namespace

void check_mp3_frames(Bytes& file, const std::string& name) {
  constexpr std::int64_t kFirstWithin = 1 << 16;  // bytes in which a decoder looks for the first frame
  Walk walk(file, file.size().value());
  std::int64_t at = 0;
  for (const unsigned char* b = walk.bytes(at, 10); b && std::equal(b, b + 3, "ID3"); b = walk.bytes(at, 10)) {
    const std::int64_t size = (b[6] & 0x7F) << 21 | (b[7] & 0x7F) << 14 | (b[8] & 0x7F) << 7 | (b[9] & 0x7F);
    at += 10 + size + ((b[5] & 0x10) != 0 ? 10 : 0);
  }
  std::optional<std::int64_t> begin = walk.find(at, at + kFirstWithin, {});
  if (!begin) return;  // the decoder reports what it is
  const FrameHeader first = walk.header(*begin).value();
  const std::optional<std::uint64_t> promised = promised_frames(walk, *begin, first);

  std::uint64_t frames = 0;
  const auto truncated = [&](const std::string& why) {
    if (!file.problem().empty()) return;  // the caller sees it
    throw FileError(tw::format("{}: truncated after {:.3f} s: {}", name, static_cast<double>(frames) * first.samples() / first.rate, why));
  };
  for (at = *begin; at < walk.size();) {
    const std::optional<FrameHeader> header = walk.header(at);
    if (header && header->goes_with(first)) {
      if (at + header->bytes > walk.size())
        truncated(tw::format("{} bytes of its last frame are missing", at + header->bytes - walk.size()));
      at += header->bytes;
      ++frames;
      continue;
    }
    const std::int64_t left = walk.size() - at;
    const unsigned char* const sync = left < 4 ? walk.bytes(at, left) : nullptr;
    if (sync && sync[0] == 0xFF && (left == 1 || (sync[1] & 0xE0) == 0xE0)) truncated("all but the begin of its last frame is missing");
    const std::optional<std::int64_t> next = walk.find(at, walk.size(), first);
    if (!next) break;  // tags
    at = *next;
  }
  const std::uint64_t own = promised ? 1 : 0;  // the header's frame contains no sound
  if (promised && frames - own + 1 < *promised)
    truncated(tw::format("its header promises {} frames and {} are there", *promised, frames - own));
}

}  // namespace tw::speech
