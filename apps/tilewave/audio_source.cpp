#include "apps/tilewave/audio_source.hpp"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech.hpp"

#if TILEWAVE_ALSA
#include <alsa/asoundlib.h>
#endif

namespace tw::cli {
namespace {

constexpr int kPiecesPerSecond = 10;
constexpr int kWaitMilliseconds = 1000 / kPiecesPerSecond;

float sample_of(std::int16_t value) { return static_cast<float>(value) / 32768; }

class RecordingSource : public AudioSource {
 public:
  explicit RecordingSource(std::vector<float> samples) : samples_(std::move(samples)) {}

  std::vector<float> read() override {
    const std::size_t count = std::min(samples_.size() - at_, std::size_t{16000 / kPiecesPerSecond});
    const auto begin = samples_.begin() + static_cast<std::ptrdiff_t>(at_);
    at_ += count;
    return {begin, begin + static_cast<std::ptrdiff_t>(count)};
  }
  bool ended() const override { return at_ == samples_.size(); }

 private:
  std::vector<float> samples_;
  std::size_t at_ = 0;
};

class Pcm16Source : public AudioSource {
 public:
  Pcm16Source(std::string name, int descriptor, int sampling_rate)
      : name_(std::move(name)), descriptor_(descriptor), sampling_rate_(sampling_rate) {}
  ~Pcm16Source() override {
    if (descriptor_ != STDIN_FILENO) close(descriptor_);
  }

  std::vector<float> read() override {
    pollfd source{descriptor_, POLLIN, 0};
    std::vector<float> samples;
    if (poll(&source, 1, kWaitMilliseconds) <= 0) return samples;
    const std::size_t most = 2 * static_cast<std::size_t>(sampling_rate_ / kPiecesPerSecond);
    bytes_.resize(most);
    const ssize_t count = ::read(descriptor_, bytes_.data() + odd_, most - odd_);
    if (count < 0 && errno != EINTR && errno != EAGAIN) throw Error(tw::format("{}: {}", name_, std::strerror(errno)));
    ended_ = count == 0;
    const std::size_t all = odd_ + static_cast<std::size_t>(std::max<ssize_t>(count, 0)), whole = all / 2 * 2;
    for (std::size_t i = 0; i < whole; i += 2)
      samples.push_back(
          sample_of(static_cast<std::int16_t>(static_cast<std::uint8_t>(bytes_[i]) | static_cast<std::uint8_t>(bytes_[i + 1]) << 8)));
    odd_ = all - whole;
    if (odd_ > 0) bytes_[0] = bytes_[whole];
    return samples;
  }
  bool ended() const override { return ended_; }
  int sampling_rate() const override { return sampling_rate_; }

 private:
  std::string name_;
  int descriptor_, sampling_rate_;
  std::vector<char> bytes_;
  std::size_t odd_ = 0;  ///< 1: the first half of a sample is at the beginning of bytes_
  bool ended_ = false;
};

#if TILEWAVE_ALSA

void be_silent(const char*, int, const char*, int, const char*, ...) {}  // errors are returned, too

class Microphone : public AudioSource {
 public:
  explicit Microphone(const std::string& name) : name_(name) {
    snd_lib_error_set_handler(be_silent);
    check(snd_pcm_open(&pcm_, name.c_str(), SND_PCM_STREAM_CAPTURE, SND_PCM_NONBLOCK));
    try {
      constexpr unsigned kBufferMicroseconds = 500000;  // the model's work on another thread must not lose audio
      check(snd_pcm_set_params(pcm_, SND_PCM_FORMAT_S16, SND_PCM_ACCESS_RW_INTERLEAVED, 1, 16000, 1, kBufferMicroseconds));
      check(snd_pcm_start(pcm_));
    } catch (...) {
      snd_pcm_close(pcm_);
      throw;
    }
  }
  ~Microphone() override { snd_pcm_close(pcm_); }

  std::vector<float> read() override {
    std::int16_t values[16000 / kPiecesPerSecond];
    snd_pcm_sframes_t count = snd_pcm_wait(pcm_, kWaitMilliseconds);
    if (count > 0) count = snd_pcm_readi(pcm_, values, std::size(values));
    if (count < 0 && count != -EAGAIN && count != -EINTR) {
      lost_ = true;
      check(snd_pcm_recover(pcm_, static_cast<int>(count), 1));  // after an overrun or a suspended computer
      check(snd_pcm_start(pcm_));
    }
    std::vector<float> samples;
    for (snd_pcm_sframes_t i = 0; i < count; ++i) samples.push_back(sample_of(values[i]));
    return samples;
  }
  bool ended() const override { return false; }
  bool lost_audio() override { return std::exchange(lost_, false); }

 private:
  void check(int result) const {
    if (result >= 0) return;
    throw Error(
        tw::format("microphone \"{}\": {}. `arecord -L` lists what --microphone may be; PulseAudio needs the package "
                   "libasound2-plugins, PipeWire pipewire-alsa",
                   name_, snd_strerror(result)));
  }

  std::string name_;
  snd_pcm_t* pcm_ = nullptr;
  bool lost_ = false;
};

#endif

}  // namespace

std::unique_ptr<AudioSource> open_recording(const std::string& file) {
  return std::make_unique<RecordingSource>(file == "-" ? speech::read_audio_stream(STDIN_FILENO, "standard input")
                                                       : speech::read_audio(file));
}

std::unique_ptr<AudioSource> open_pcm16(const std::string& file, int sampling_rate) {
  const int descriptor = file == "-" ? STDIN_FILENO : open(file.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw Error(tw::format("{}: {}", file, std::strerror(errno)));
  return std::make_unique<Pcm16Source>(file == "-" ? "standard input" : file, descriptor, sampling_rate);
}

#if TILEWAVE_ALSA

std::unique_ptr<AudioSource> open_microphone(const std::string& name) { return std::make_unique<Microphone>(name); }

std::vector<std::string> microphone_names() {
  std::vector<std::string> names;
  void** hints = nullptr;
  if (snd_device_name_hint(-1, "pcm", &hints) != 0) return names;
  for (void** each = hints; *each != nullptr; ++each) {
    char *name = snd_device_name_get_hint(*each, "NAME"), *direction = snd_device_name_get_hint(*each, "IOID");  // null: both
    if (name != nullptr && (direction == nullptr || std::strcmp(direction, "Input") == 0)) names.push_back(name);
    free(name);
    free(direction);
  }
  snd_device_name_free_hint(hints);
  return names;
}

#else

std::unique_ptr<AudioSource> open_microphone(const std::string&) {
  throw Error(
      "listen: this program was built without support for microphones: install the package libasound2-dev and build it again. --input "
      "needs none");
}

std::vector<std::string> microphone_names() { return {"default"}; }

#endif

}  // namespace tw::cli
