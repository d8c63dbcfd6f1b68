#include "speech/audio/containers.hpp"

#include <bit>
#include <optional>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {
namespace {

[[noreturn]] void cut_short(const std::string& name, std::int64_t at, std::uint64_t size, std::int64_t all, const char* what) {
  throw FileError(tw::format("{}: truncated: the {} at byte {} has {} bytes and {} are there", name, what, at, size, all - at));
}

/// A number of 1 to 8 bytes whose leading zeros tell its length (RFC 8794).
struct VariableInteger {
  int length;
  std::uint64_t value;   ///< without the marker
  std::uint64_t marked;  ///< with it, as identifiers are written
  bool unknown;          ///< all ones: a size that was not known
};

/// Nothing if it is longer than `longest` bytes or not all there.
std::optional<VariableInteger> variable_integer(Bytes& file, std::int64_t at, int longest) {
  unsigned char first = 0;
  if (file.read(at, &first, 1) != 1) return {};
  const int length = std::countl_zero(first) + 1;
  if (length > longest) return {};
  const std::string bytes = file.read(at, length);
  if (bytes.empty()) return {};
  const std::uint64_t marked = big_endian(bytes), marker = std::uint64_t{1} << (7 * length);
  return VariableInteger{length, marked - marker, marked, marked == 2 * marker - 1};
}

}  // namespace

void check_mp4_boxes(Bytes& file, const std::string& name) {
  const std::int64_t all = file.size().value();
  bool index = false;
  for (std::int64_t at = 0; at < all;) {
    const std::string head = file.read(at, 8);
    if (head.empty()) {
      if (!file.problem().empty()) return;  // the caller sees it
      cut_short(name, at, 8, all, "header of a box");
    }
    std::uint64_t size = big_endian(std::string_view(head).substr(0, 4));
    const std::string type = head.substr(4);
    index = index || type == "moov";
    if (size == 0) break;  // up to the end
    std::uint64_t least = 8;
    if (size == 1) {
      size = big_endian(file.read(at + 8, 8));
      least = 16;
    }
    if (size < least) throw FileError(tw::format("{}: damaged: the box at byte {} has {} bytes", name, at, size));
    if (size > static_cast<std::uint64_t>(all - at)) cut_short(name, at, size, all, "box");
    at += static_cast<std::int64_t>(size);
  }
  if (!index) throw FileError(tw::format("{}: truncated: it has no index (box moov); its recording was not finished", name));
}

void check_matroska_elements(Bytes& file, const std::string& name) {
  constexpr std::uint64_t kSegment = 0x18538067, kCluster = 0x1F43B675;
  const std::int64_t all = file.size().value();
  std::int64_t end = all;  // of the segment
  for (std::int64_t at = 0; at < end;) {
    const std::optional<VariableInteger> id = variable_integer(file, at, 4);
    const std::optional<VariableInteger> size = id ? variable_integer(file, at + id->length, 8) : std::nullopt;
    if (!file.problem().empty()) return;  // the caller sees it
    if (!size && all - at < 12) cut_short(name, at, 12, all, "last element");
    if (!size) throw FileError(tw::format("{}: damaged: there is no element at byte {}", name, at));
    const std::int64_t begin = at + id->length + size->length;
    if (!size->unknown && size->value > static_cast<std::uint64_t>(all - begin))
      cut_short(name, begin, size->value, all, id->marked == kSegment ? "segment" : "element");
    if (id->marked == kSegment || id->marked == kCluster) {
      if (id->marked == kSegment && !size->unknown) end = begin + static_cast<std::int64_t>(size->value);
      at = begin;
    } else if (size->unknown) {
      throw FileError(tw::format("{}: damaged: the element at byte {} has no size", name, at));
    } else {
      at = begin + static_cast<std::int64_t>(size->value);
    }
  }
}

void check_adts_frames(Bytes& file, const std::string& name) {
  const std::int64_t all = file.size().value();
  for (std::int64_t at = 0; at < all;) {
    const std::string head = file.read(at, 7);
    if (head.empty()) {
      if (file.problem().empty() && file.read(at, 1) == "\xFF") cut_short(name, at, 7, all, "header of a frame");
      return;
    }
    const auto byte = [&](std::size_t i) { return static_cast<unsigned>(static_cast<unsigned char>(head[i])); };
    if (byte(0) != 0xFF || (byte(1) & 0xF6) != 0xF0) return;  // tags, or damage, which the decoder reports
    const std::int64_t size = (byte(3) & 3) << 11 | byte(4) << 3 | byte(5) >> 5;
    if (size < 7) throw FileError(tw::format("{}: damaged: the frame at byte {} has {} bytes", name, at, size));
    if (size > all - at) cut_short(name, at, static_cast<std::uint64_t>(size), all, "frame");
    at += size;
  }
}

}  // namespace tw::speech
