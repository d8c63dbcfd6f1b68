#include "speech/audio/wav_header.hpp"

#include <algorithm>
#include <array>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {
namespace {

constexpr std::uint64_t kLargestFormat = 4096, kLargestFact = 64;  // maximum bytes of these chunks; longer ones are not valid
constexpr std::int64_t kLargestRiff = 0xFFFFFF00;                  // bytes of samples that a header of 32 bits can have
constexpr std::int64_t kAnySize = std::int64_t{1} << 60;

/// Whether this is a size that writers use if they do not know it. `block`: bytes per sample of all channels, to which writers round down.
bool is_placeholder(std::uint64_t size, std::uint64_t block) {
  if (size >= 0xFFFFFF00) return true;
  constexpr std::array<std::uint64_t, 3> kKnown = {0x7FFFF000, 0x7FFFFFFF, 0x80000000};
  return std::any_of(kKnown.begin(), kKnown.end(), [&](std::uint64_t known) { return size <= known && known - size < block; });
}

/// Whether libsndfile's RF64 reader knows the format: PCM, floats, A-law and mu-law.
bool fits_rf64(std::uint64_t tag) { return tag == 1 || tag == 3 || tag == 6 || tag == 7 || tag == 0xFFFE; }

void append(std::string& to, std::uint64_t value, int bytes, bool big) {
  for (int i = 0; i < bytes; ++i) to += static_cast<char>(value >> 8 * (big ? bytes - 1 - i : i));
}

void append_chunk(std::string& to, const char* name, const std::string& content, bool big) {
  to += name;
  append(to, content.size(), 4, big);
  to += content;
  if (content.size() % 2 != 0) to += '\0';
}

}  // namespace

WavView view_wav(Bytes& file, const std::string& name) {
  const auto refuse = [&](const std::string& why) {
    throw FileError(tw::format("{}: cannot be read as WAV: {}", name, file.problem().empty() ? why : file.problem()));
  };
  const std::string magic = file.read(0, 4);
  const bool big = magic == "RIFX";
  const auto number = [&](std::string_view bytes) { return big ? big_endian(bytes) : little_endian(bytes); };
  const std::uint64_t riff_size = number(file.read(4, 4));
  std::string format, fact;
  std::uint64_t size64 = 0;  // of RF64
  std::int64_t at = 12;
  for (int chunk = 0; chunk < 10000; ++chunk) {
    const std::string head = file.read(at, 8);
    if (head.empty()) break;
    const std::string_view id = std::string_view(head).substr(0, 4);
    std::uint64_t size = number(std::string_view(head).substr(4));
    at += 8;
    if (id == "ds64") {
      const std::string sizes = file.read(at, 16);
      if (sizes.size() == 16) size64 = little_endian(std::string_view(sizes).substr(8));
    } else if (id == "fmt ") {
      if (size > kLargestFormat || size < 16) refuse(tw::format("its format takes {} bytes", size));
      format = file.read(at, static_cast<std::int64_t>(size));
      if (format.empty()) break;
    } else if (id == "fact" && size <= kLargestFact) {
      fact = file.read(at, static_cast<std::int64_t>(size));
    } else if (id == "data") {
      if (format.empty()) refuse("its samples have no format");
      const std::uint64_t tag = number(std::string_view(format).substr(0, 2));
      const std::uint64_t block = std::max<std::uint64_t>(number(std::string_view(format).substr(12, 2)), 1);
      WavView view;
      view.begin = at;
      const bool rf64 = magic == "RF64" && size == 0xFFFFFFFF;
      if (rf64) size = size64;
      // A header that was written before the samples has no size.
      const bool unwritten = size == 0 && (rf64 || riff_size < static_cast<std::uint64_t>(at) - 8) && !file.read(at, 1).empty();
      if (!unwritten && (rf64 || !is_placeholder(size, block))) view.promised = size;
      std::uint64_t most = kAnySize;
      if (const std::optional<std::int64_t> there = file.size()) most = static_cast<std::uint64_t>(*there - at);
      view.shown = static_cast<std::int64_t>(std::min(most, view.promised.value_or(kAnySize)));
      if (view.shown > kLargestRiff && (big || !fits_rf64(tag))) view.shown = kLargestRiff;

      const bool wide = view.shown > kLargestRiff;
      const std::uint64_t shown = static_cast<std::uint64_t>(view.shown);
      std::string chunks;
      if (wide) {
        std::string sizes;
        append(sizes, shown + 1024, 8, false);
        append(sizes, shown, 8, false);
        append(sizes, shown / block, 8, false);
        append(sizes, 0, 4, false);
        append_chunk(chunks, "ds64", sizes, false);
      }
      append_chunk(chunks, "fmt ", format, big);
      if (!fact.empty() && !wide) append_chunk(chunks, "fact", fact, big);
      view.header = wide ? "RF64" : big ? "RIFX" : "RIFF";
      append(view.header, wide ? 0xFFFFFFFF : std::min<std::uint64_t>(shown + chunks.size() + 12, 0xFFFFFFFF), 4, big);
      view.header += "WAVE" + chunks + "data";
      append(view.header, wide ? 0xFFFFFFFF : shown, 4, big);
      return view;
    }
    at += static_cast<std::int64_t>(size + size % 2);
  }
  refuse("it ends before its samples begin");
  return {};
}

}  // namespace tw::speech
