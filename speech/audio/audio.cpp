#include "speech/audio/audio.hpp"

#include <fcntl.h>
#include <sndfile.h>
#include <soxr.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "runtime/format.hpp"
#include "speech/audio/av_module.hpp"
#include "speech/audio/bytes.hpp"
#include "speech/audio/containers.hpp"
#include "speech/audio/mp3_frames.hpp"
#include "speech/audio/wav_header.hpp"
#include "tilewave/error.hpp"

namespace tw::speech {
namespace {

constexpr int kLowestRate = 1000, kHighestRate = 768000;  // Hz: the range of recordings; limits the growth by resampling
constexpr int kMostChannels = 1024;
constexpr float kLargestSample = 1e10F;                        // 32-bit integers stored as floats still pass
constexpr std::int64_t kEndless = std::int64_t{1} << 60;       // the size of a pipe for libsndfile
constexpr std::int64_t kMostExpected = std::int64_t{1} << 28;  // samples to reserve memory for in advance: 4.6 hours

enum class Format { unknown, riff, aiff, flac, ogg, mp3, mp4, adts, matroska };

/// Detects the format by the first bytes. libsndfile reads more formats, most of them obsolete: nobody transcribes such files, and their
/// readers are hardly tested.
Format format_of(Bytes& file) {
  std::string head(16, '\0');
  head.resize(static_cast<std::size_t>(file.read(0, head.data(), 16)));
  const auto at = [&](std::size_t place, std::string_view text) {
    return head.size() >= place + text.size() && head.compare(place, text.size(), text) == 0;
  };
  if ((at(0, "RIFF") || at(0, "RIFX") || at(0, "RF64")) && at(8, "WAVE")) return Format::riff;
  if (at(0, "FORM") && (at(8, "AIFF") || at(8, "AIFC"))) return Format::aiff;
  if (at(0, "fLaC")) return Format::flac;
  if (at(0, "OggS")) return Format::ogg;
  if (at(0, "ID3")) return Format::mp3;
  if (at(4, "ftyp")) return Format::mp4;
  if (at(0, "\x1A\x45\xDF\xA3")) return Format::matroska;
  if (head.size() >= 2 && head[0] == '\xFF' && (head[1] & 0xE0) == 0xE0) {  // 11 bits of sync, version, layer: 0 is AAC's
    const int version = head[1] >> 3 & 3, layer = head[1] >> 1 & 3;
    if (layer == 0 && version >= 2) return Format::adts;
    if (layer != 0 && version != 1) return Format::mp3;
  }
  return Format::unknown;
}

const char* name_of(Format format) {
  switch (format) {
    case Format::riff:
      return "WAV";
    case Format::aiff:
      return "AIFF";
    case Format::flac:
      return "FLAC";
    case Format::ogg:
      return "OGG";
    case Format::mp3:
      return "MP3";
    case Format::mp4:
      return "MP4 (m4a)";
    case Format::adts:
      return "AAC";
    case Format::matroska:
      return "Matroska (webm)";
    case Format::unknown:
      break;
  }
  return "unknown";
}

/// The command that converts the file to WAV.
std::string ffmpeg_command(const std::string& name) {
  const std::filesystem::path file(name);
  std::filesystem::path from = "RECORDING", to = "talk.wav";
  if (file.has_extension()) {
    from = file;
    to = file;
    to.replace_extension(".wav");
    if (to == from) to.replace_extension("").concat("-16k.wav");
  }
  const auto quoted = [](const std::string& word) {
    const bool plain = std::all_of(word.begin(), word.end(),
                                   [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || std::strchr("/._-+,", c); });
    if (plain) return word;
    std::string result = "'";
    for (const char c : word) c == '\'' ? result += "'\\''" : result += c;
    return result + "'";
  };
  return tw::format("ffmpeg -i {} -ar 16000 -ac 1 {}", quoted(from.string()), quoted(to.string()));
}

[[noreturn]] void truncated(const std::string& name, const std::string& why, const std::string& when = "") {
  throw FileError(tw::format("{}: truncated{}: {}", name, when, why));
}

/// Throws if an AIFF file's chunk of samples continues after the end of the file, which libsndfile ignores.
void check_aiff_chunks(Bytes& file, const std::string& name) {
  std::int64_t at = 12;
  for (int chunk = 0; chunk < 10000; ++chunk) {
    const std::string head = file.read(at, 8);
    if (head.empty()) return;  // no samples at all: libsndfile reports this
    const std::uint64_t size = big_endian(std::string_view(head).substr(4));
    at += 8;
    if (head.compare(0, 4, "SSND") == 0) {
      const std::uint64_t there = static_cast<std::uint64_t>(file.size().value() - at);
      if (size > there) truncated(name, tw::format("its header promises {} bytes of samples and {} are there", size, there));
      return;
    }
    at += static_cast<std::int64_t>(size + size % 2);
  }
}

/// Throws if the last page of an OGG file is incomplete.
void check_last_page(Bytes& file, const std::string& name) {
  constexpr std::int64_t kLargestPage = 27 + 255 + 255 * 255;
  const std::int64_t all = file.size().value(), from = std::max<std::int64_t>(0, all - kLargestPage);
  const std::string tail = file.read(from, all - from);
  const std::size_t page = tail.rfind("OggS");
  if (page == std::string::npos) truncated(name, "there is no page in its last 64 KiB");
  std::size_t size = 27;
  if (tail.size() >= page + 27) {
    const std::size_t segments = static_cast<unsigned char>(tail[page + 26]);
    size += segments;
    for (std::size_t i = 0; i < segments && page + 27 + i < tail.size(); ++i) size += static_cast<unsigned char>(tail[page + 27 + i]);
  }
  if (page + size > tail.size()) truncated(name, tw::format("{} bytes of its last page are missing", page + size - tail.size()));
}

/// The input of libsndfile: a header, then `size` bytes of the file from `begin` on.
struct VirtualFile {
  Bytes& bytes;
  std::string header = {};
  std::int64_t begin = 0;
  std::int64_t size = 0;
  std::optional<std::uint64_t> promised = {};  ///< number of bytes according to the file's header
  std::int64_t at = 0, reached = 0;            ///< position in that input; bytes of the file read so far, from `begin` on

  std::int64_t length() const { return std::ssize(header) + size; }

  std::int64_t read(char* to, std::int64_t count) {
    count = std::clamp<std::int64_t>(length() - at, 0, std::max<std::int64_t>(count, 0));
    const std::int64_t of_header = std::clamp<std::int64_t>(std::ssize(header) - at, 0, count);
    if (of_header > 0) std::memcpy(to, header.data() + at, static_cast<std::size_t>(of_header));
    at += of_header;
    if (of_header == count) return count;
    const std::int64_t got = bytes.read(begin + at - std::ssize(header), to + of_header, count - of_header);
    at += got;
    reached = std::max(reached, at - std::ssize(header));
    return of_header + got;
  }

  /// Whether the file has a byte at `begin` + `place`.
  bool has(std::int64_t place) {
    char byte = 0;
    return bytes.read(begin + place, &byte, 1) == 1;
  }

  static SF_VIRTUAL_IO callbacks() {
    SF_VIRTUAL_IO io;
    io.get_filelen = [](void* self) { return static_cast<sf_count_t>(static_cast<VirtualFile*>(self)->length()); };
    io.seek = [](sf_count_t offset, int whence, void* self) {
      VirtualFile& stream = *static_cast<VirtualFile*>(self);
      const std::int64_t base = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? stream.at : stream.length();
      std::int64_t to = 0;
      if (__builtin_add_overflow(base, static_cast<std::int64_t>(offset), &to) || to < 0) return sf_count_t{-1};
      stream.at = to;
      return static_cast<sf_count_t>(to);
    };
    io.read = [](void* to, sf_count_t count, void* self) {
      return static_cast<sf_count_t>(static_cast<VirtualFile*>(self)->read(static_cast<char*>(to), count));
    };
    io.write = [](const void*, sf_count_t, void*) { return sf_count_t{0}; };
    io.tell = [](void* self) { return static_cast<sf_count_t>(static_cast<VirtualFile*>(self)->at); };
    return io;
  }
};

struct Close {
  void operator()(SNDFILE* file) const { sf_close(file); }
  void operator()(soxr* resampler) const { soxr_delete(resampler); }
};

/// libsndfile's message without its decoration.
std::string reason(SNDFILE* file) {
  std::string text = sf_strerror(file);
  if (text.rfind("Error : ", 0) == 0) text.erase(0, 8);
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (!text.empty() && (text.back() == '.' || text.back() == ' ')) text.pop_back();
  return text;
}

std::unique_ptr<SNDFILE, Close> open(VirtualFile& stream, SF_INFO& info, Format format, const std::string& name) {
  static std::mutex mutex;  // libsndfile keeps the reason why opening failed in a global variable
  const std::lock_guard lock(mutex);
  SF_VIRTUAL_IO io = VirtualFile::callbacks();
  std::unique_ptr<SNDFILE, Close> file(sf_open_virtual(&io, SFM_READ, &info, &stream));
  if (!file && !stream.bytes.problem().empty()) throw FileError(tw::format("{}: {}", name, stream.bytes.problem()));
  if (!file) throw FileError(tw::format("{}: cannot be read as {}: {}", name, name_of(format), reason(nullptr)));
  return file;
}

/// Resamples mono samples from any rate to kSamplingRate, piece by piece.
class Resampler {
 public:
  Resampler(int rate, const std::string& name) {
    if (rate == kSamplingRate) return;
    const soxr_io_spec_t io = soxr_io_spec(SOXR_FLOAT32_I, SOXR_FLOAT32_I);
    const soxr_quality_spec_t quality = soxr_quality_spec(SOXR_HQ, 0);
    soxr_error_t error = nullptr;
    soxr_.reset(soxr_create(rate, kSamplingRate, 1, &error, &io, &quality, nullptr));
    if (error) throw FileError(tw::format("{}: cannot be resampled from {} Hz: {}", name, rate, soxr_strerror(error)));
  }

  /// Appends the output for `samples`. No samples mean the end: appends the rest.
  void process(std::span<const float> samples, std::vector<float>& out) {
    if (!soxr_) {
      out.insert(out.end(), samples.begin(), samples.end());
      return;
    }
    const bool end = samples.empty();
    std::size_t used = 0;
    for (;;) {
      std::size_t took = 0, gave = 0;
      piece_.resize(1 << 16);
      // Without input soxr returns its last samples.
      if (const soxr_error_t error = soxr_process(soxr_.get(), end ? nullptr : samples.data() + used, end ? 0 : samples.size() - used,
                                                  &took, piece_.data(), piece_.size(), &gave))
        throw Error(tw::format("soxr: {}", soxr_strerror(error)));
      used += took;
      out.insert(out.end(), piece_.begin(), piece_.begin() + static_cast<std::ptrdiff_t>(gave));
      if (gave < piece_.size() && used == samples.size()) return;
    }
  }

 private:
  std::unique_ptr<soxr, Close> soxr_;
  std::vector<float> piece_;
};

/// Makes mono samples at kSamplingRate from decoded ones.
class Mixer {
 public:
  Mixer(const std::string& name, const AudioOptions& options) : name_(name), options_(options) {}

  /// Memory for what is expected, which at most `most` samples are.
  void reserve(double seconds, std::int64_t most) {
    samples_.reserve(static_cast<std::size_t>(std::clamp(seconds * kSamplingRate + 1, 0.0, static_cast<double>(most))));
  }

  void add(std::span<const float> interleaved, int channels, int rate) {
    if (rate_ == 0) {
      if (rate < kLowestRate || rate > kHighestRate)
        throw FileError(tw::format("{}: its sampling rate is {} Hz; allowed are {} to {}", name_, rate, kLowestRate, kHighestRate));
      rate_ = rate;
      resampler_.emplace(rate, name_);
    }
    if (rate != rate_)
      throw FileError(tw::format("{}: its sampling rate changes after {:.3f} s, from {} to {} Hz", name_, seconds(), rate_, rate));
    if (channels < 1 || channels > kMostChannels)
      throw FileError(tw::format("{}: it has {} channels; allowed are 1 to {}", name_, channels, kMostChannels));
    const std::size_t each = static_cast<std::size_t>(channels), count = interleaved.size() / each;
    mono_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      double sum = 0;
      for (std::size_t c = 0; c < each; ++c) {
        const float sample = interleaved[i * each + c];
        if (!(std::abs(sample) <= kLargestSample))
          throw FileError(
              tw::format("{}: the sample at {:.6f} s is {}", name_, static_cast<double>(frames_ + std::int64_t(i)) / rate_, sample));
        sum += sample;
      }
      mono_[i] = static_cast<float>(sum / channels);
    }
    frames_ += static_cast<std::int64_t>(count);
    if (seconds() > options_.longest_seconds)
      throw FileError(tw::format("{}: it holds more than {:.0f} s of audio; that is the limit", name_, options_.longest_seconds));
    if (count > 0) resampler_->process(mono_, samples_);
  }

  std::int64_t frames() const { return frames_; }
  double seconds() const { return rate_ == 0 ? 0 : static_cast<double>(frames_) / rate_; }

  /// All samples. Throws if there are none.
  std::vector<float> finish() {
    if (frames_ == 0) throw FileError(tw::format("{}: it holds no audio: 0 samples", name_));
    resampler_->process({}, samples_);
    return std::move(samples_);
  }

 private:
  const std::string& name_;
  const AudioOptions& options_;
  int rate_ = 0;
  std::int64_t frames_ = 0;  // of the file
  std::optional<Resampler> resampler_;
  std::vector<float> mono_, samples_;
};

/// All samples that libsndfile reads from `stream`. Throws if it cannot read all.
std::vector<float> decode(VirtualFile& stream, Format format, const std::string& name, const AudioOptions& options) {
  SF_INFO info{};
  const std::unique_ptr<SNDFILE, Close> file = open(stream, info, format, name);
  Mixer mixer(name, options);
  mixer.add({}, info.channels, info.samplerate);  // checks both
  // In most formats a sample takes at least one byte, which limits the number of samples. The length of a pipe is unknown.
  mixer.reserve(static_cast<double>(info.frames) / info.samplerate, stream.bytes.size().value_or(kMostExpected));
  const sf_count_t block = std::max<sf_count_t>(1, (1 << 16) / info.channels);
  std::vector<float> interleaved(static_cast<std::size_t>(block * info.channels));
  while (const sf_count_t count = sf_readf_float(file.get(), interleaved.data(), block)) {
    if (count < 0) break;
    mixer.add(std::span(interleaved).first(static_cast<std::size_t>(count * info.channels)), info.channels, info.samplerate);
  }
  const sf_count_t frames = mixer.frames();
  const std::string when = tw::format(" after {:.3f} s", mixer.seconds());
  std::int64_t there = stream.reached;  // and the rest, less than a sample, that libsndfile did not read
  while (stream.promised && static_cast<std::uint64_t>(there) < *stream.promised && stream.has(there)) ++there;
  const bool more = format == Format::riff && !stream.promised && stream.has(stream.size);
  if (!stream.bytes.problem().empty()) throw FileError(tw::format("{}: {}{}", name, stream.bytes.problem(), when));
  if (sf_error(file.get()) != SF_ERR_NO_ERROR) throw FileError(tw::format("{}: damaged{}: {}", name, when, reason(file.get())));
  if (stream.promised && static_cast<std::uint64_t>(there) < *stream.promised)
    truncated(name, tw::format("its header promises {} bytes of samples and {} are there", *stream.promised, there), when);
  if (more) throw FileError(tw::format("{}: it goes on{}, where 4 GiB of samples end; its format holds no more", name, when));
  if ((format == Format::flac || format == Format::aiff) && info.frames < SF_COUNT_MAX && frames < info.frames)
    truncated(name, tw::format("its header promises {} samples and {} are there", info.frames, frames), when);
  return mixer.finish();
}

/// All samples that FFmpeg's libraries read.
std::vector<float> decode_av(Bytes& bytes, Format format, const std::string& name, const AudioOptions& options) {
  if (format == Format::mp4) check_mp4_boxes(bytes, name);
  if (format == Format::matroska) check_matroska_elements(bytes, name);
  if (format == Format::adts) check_adts_frames(bytes, name);
  Mixer mixer(name, options);
  const std::string& problem = av_module_problem();
  const bool known = problem.empty() && decode_with_av(bytes, name, [&](std::span<const float> samples, int channels, int rate) {
                       mixer.add(samples, channels, rate);
                     });
  if (known) return mixer.finish();
  if (problem.empty() || format == Format::unknown)
    throw FileError(
        tw::format("{}: no audio that can be read (WAV, FLAC, OGG Vorbis, Opus, MP3, AIFF{} can); other audio must be converted, as in: {}",
                   name, problem.empty() ? ", webm, m4a and AAC" : "", ffmpeg_command(name)));
  throw FileError(tw::format("{}: {} needs FFmpeg's libraries, and the module for them cannot be loaded ({}); convert the file: {}", name,
                             name_of(format), problem, ffmpeg_command(name)));
}

/// Whether libsndfile reads the format sequentially. For the others it seeks to the end first.
bool read_onward(Format format) { return format == Format::riff || format == Format::flac; }

std::vector<float> decode(Bytes& bytes, const std::string& name, const AudioOptions& options) {
  const Format format = format_of(bytes);
  char first = 0;
  const bool empty = bytes.read(0, &first, 1) == 0;
  if (!bytes.problem().empty()) throw FileError(tw::format("{}: {}", name, bytes.problem()));
  if (empty) throw FileError(tw::format("{}: empty", name));
  if (!bytes.size() && !read_onward(format)) {
    SpooledBytes all(bytes, name);
    return decode(all, name, options);
  }
  if (format == Format::unknown || format == Format::mp4 || format == Format::adts || format == Format::matroska)
    return decode_av(bytes, format, name, options);
  VirtualFile stream{.bytes = bytes, .size = bytes.size().value_or(kEndless)};
  if (format == Format::riff) {
    WavView view = view_wav(bytes, name);
    stream.header = std::move(view.header);
    stream.begin = view.begin;
    stream.size = view.shown;
    stream.promised = view.promised;
  }
  if (format == Format::aiff) check_aiff_chunks(bytes, name);
  if (format == Format::ogg) check_last_page(bytes, name);
  if (format == Format::mp3) check_mp3_frames(bytes, name);
  return decode(stream, format, name, options);
}

std::vector<float> decode_or_throw(Bytes& bytes, const std::string& name, const AudioOptions& options) {
  try {
    return decode(bytes, name, options);
  } catch (const std::bad_alloc&) {
    throw OutOfMemory(tw::format("{}: its audio does not fit into memory", name));
  }
}

struct stat status_of(int descriptor, const std::string& name) {
  struct stat status {};
  if (descriptor < 0 || fstat(descriptor, &status) != 0) throw FileError(tw::format("{}: {}", name, std::strerror(errno)));
  if (S_ISDIR(status.st_mode)) throw FileError(tw::format("{}: a folder, no audio file", name));
  return status;
}

}  // namespace

std::vector<float> load_audio(const std::string& name, const AudioOptions& options) {
  const File file(::open(name.c_str(), O_RDONLY | O_CLOEXEC));
  const struct stat status = status_of(file.get(), name);
  if (S_ISCHR(status.st_mode) || S_ISBLK(status.st_mode)) throw FileError(tw::format("{}: a device, no audio file", name));
  return load_audio_stream(file.get(), name, options);
}

std::vector<float> load_audio_stream(int descriptor, const std::string& name, const AudioOptions& options) {
  const struct stat status = status_of(descriptor, name);
  const off_t begin = S_ISREG(status.st_mode) ? lseek(descriptor, 0, SEEK_CUR) : -1;
  if (begin >= 0) {
    FileBytes bytes(descriptor, begin, std::max<off_t>(status.st_size - begin, 0));
    return decode_or_throw(bytes, name, options);
  }
  fcntl(descriptor, F_SETPIPE_SZ, 1 << 20);  // a larger pipe buffer, if allowed, means fewer switches between writer and reader
  PipeBytes bytes(descriptor);
  return decode_or_throw(bytes, name, options);
}

std::vector<float> decode_audio(std::string_view bytes, const std::string& name, const AudioOptions& options) {
  MemoryBytes memory(bytes);
  return decode_or_throw(memory, name, options);
}

}  // namespace tw::speech
