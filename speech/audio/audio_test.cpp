#include "speech/audio/audio.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sndfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <complex>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <span>
#include <thread>

#include "tests/expect_error.hpp"
#include "tilewave/error.hpp"

namespace {

/// Stands before each read of a file at a place: its result is errno, or 0 for the true read.
thread_local std::function<int(off_t)> before_pread;

}  // namespace

// Instead of the C library's, in this program: a disk that fails cannot be had otherwise.
extern "C" ssize_t pread(int descriptor, void* to, size_t count, off_t at) {
  if (before_pread) {
    if (const int error = before_pread(at); error != 0) {
      errno = error;
      return -1;
    }
  }
  return syscall(SYS_pread64, descriptor, to, count, at);
}

namespace tw::speech {
namespace {

using test::expect_error;

constexpr double kPi = 3.14159265358979;

/// A folder of the test's own, removed after it.
class AudioFiles : public testing::Test {
 protected:
  AudioFiles() {
    std::string pattern = testing::TempDir() + "tilewave-audio-XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  ~AudioFiles() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::string write(const std::string& name, std::string_view bytes) const {
    std::ofstream(path(name), std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return path(name);
  }

  /// Interleaved samples through libsndfile; empty if it has no encoder for that.
  std::string encode(const std::string& name, int format, int rate, int channels, std::span<const float> samples) const {
    SF_INFO info{};
    info.samplerate = rate;
    info.channels = channels;
    info.format = format;
    SNDFILE* file = sf_open(path(name).c_str(), SFM_WRITE, &info);
    if (!file) return "";
    EXPECT_EQ(sf_write_float(file, samples.data(), std::ssize(samples)), std::ssize(samples));
    EXPECT_EQ(sf_close(file), 0);
    return path(name);
  }

  static std::string read(const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }

  std::filesystem::path folder_;
};

std::vector<float> tone(double hertz, int rate, double seconds) {
  std::vector<float> samples(static_cast<std::size_t>(seconds * rate));
  for (std::size_t i = 0; i < samples.size(); ++i)
    samples[i] = static_cast<float>(0.5 * std::sin(2 * kPi * hertz * static_cast<double>(i) / rate));
  return samples;
}

/// The amplitude of a frequency in the middle half, at 16 kHz, and the root mean square of what is left without it.
std::pair<double, double> amplitude(const std::vector<float>& samples, double hertz) {
  const std::size_t first = samples.size() / 4, last = samples.size() * 3 / 4;
  std::complex<double> sum = 0;
  double energy = 0;
  for (std::size_t i = first; i < last; ++i) {
    sum += static_cast<double>(samples[i]) * std::polar(1.0, -2 * kPi * hertz * static_cast<double>(i) / kSamplingRate);
    energy += static_cast<double>(samples[i]) * samples[i];
  }
  const double count = static_cast<double>(last - first), found = 2 * std::abs(sum) / count;
  return {found, std::sqrt(std::max(0.0, energy / count - found * found / 2))};
}

void append(std::string& bytes, std::uint64_t value, int count) {
  for (int i = 0; i < count; ++i) bytes += static_cast<char>(value >> 8 * i);
}

struct WavHeader {
  std::uint32_t riff_size = 0xFFFFFFFF, data_size = 0xFFFFFFFF, rate = 16000;
  std::uint16_t tag = 1, channels = 1, bits = 16;
};

/// A WAV file whose header says what it likes.
std::string wav(const WavHeader& header, std::string_view data) {
  std::string bytes = "RIFF";
  append(bytes, header.riff_size, 4);
  bytes += "WAVEfmt ";
  append(bytes, 16, 4);
  append(bytes, header.tag, 2);
  append(bytes, header.channels, 2);
  append(bytes, header.rate, 4);
  append(bytes, header.rate * header.channels * header.bits / 8, 4);
  append(bytes, header.channels * header.bits / 8u, 2);
  append(bytes, header.bits, 2);
  bytes += "data";
  append(bytes, header.data_size, 4);
  return bytes.append(data);
}

std::string floats(std::vector<float> values) { return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)}; }

TEST_F(AudioFiles, EveryFormatIsRead) {
  struct Case {
    const char* name;
    int format, rate, channels;
    double noise;  // what the format adds, root mean square
  };
  const Case cases[] = {
      {"pcm8.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_U8, 16000, 1, 4e-3},
      {"pcm16.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_16, 16000, 1, 3e-5},
      {"pcm16-44.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_16, 44100, 2, 1e-4},
      {"pcm24.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_24, 48000, 6, 1e-4},
      {"pcm32.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_32, 22050, 1, 1e-4},
      {"extensible.wav", SF_FORMAT_WAVEX | SF_FORMAT_PCM_16, 96000, 2, 1e-4},
      {"float.wav", SF_FORMAT_WAV | SF_FORMAT_FLOAT, 8000, 1, 1e-4},
      {"double.wav", SF_FORMAT_WAV | SF_FORMAT_DOUBLE, 16000, 2, 1e-6},
      {"alaw.wav", SF_FORMAT_WAV | SF_FORMAT_ALAW, 8000, 1, 1e-2},
      {"ulaw.wav", SF_FORMAT_WAV | SF_FORMAT_ULAW, 8000, 1, 1e-2},
      {"rf64.wav", SF_FORMAT_RF64 | SF_FORMAT_PCM_16, 16000, 1, 3e-5},
      {"16.aiff", SF_FORMAT_AIFF | SF_FORMAT_PCM_16, 11025, 1, 1e-4},
      {"16.flac", SF_FORMAT_FLAC | SF_FORMAT_PCM_16, 44100, 2, 1e-4},
      {"24.flac", SF_FORMAT_FLAC | SF_FORMAT_PCM_24, 16000, 1, 1e-6},
      {"vorbis.ogg", SF_FORMAT_OGG | SF_FORMAT_VORBIS, 44100, 2, 2e-2},
      {"opus.ogg", SF_FORMAT_OGG | SF_FORMAT_OPUS, 48000, 1, 2e-2},
      {"mp3.mp3", SF_FORMAT_MPEG | SF_FORMAT_MPEG_LAYER_III, 44100, 2, 2e-2},
      {"mp3-16.mp3", SF_FORMAT_MPEG | SF_FORMAT_MPEG_LAYER_III, 16000, 1, 2e-2},
  };
  int read_back = 0;
  for (const Case& c : cases) {
    const std::vector<float> mono = tone(440, c.rate, 1.5);
    std::vector<float> interleaved;
    for (const float x : mono) interleaved.insert(interleaved.end(), static_cast<std::size_t>(c.channels), x);
    const std::string file = encode(c.name, c.format, c.rate, c.channels, interleaved);
    if (file.empty()) continue;
    ++read_back;
    const std::vector<float> samples = load_audio(file);
    // MP3 begins and ends with some padding, unless its encoder wrote how much.
    EXPECT_NEAR(static_cast<double>(samples.size()), 1.5 * kSamplingRate, (c.format & SF_FORMAT_TYPEMASK) == SF_FORMAT_MPEG ? 2000 : 1)
        << c.name;
    const auto [found, rest] = amplitude(samples, 440);
    EXPECT_NEAR(found, 0.5, 5e-3) << c.name;
    EXPECT_LT(rest, c.noise) << c.name;
    EXPECT_EQ(decode_audio(read(file), "x"), samples) << c.name;
  }
  EXPECT_GE(read_back, 16);  // libsndfile before 1.1 has no MP3
}

TEST_F(AudioFiles, SamplesAtTheRightRateAreUnchanged) {
  const std::vector<float> samples = tone(1234, kSamplingRate, 5);
  EXPECT_EQ(load_audio(encode("same.wav", SF_FORMAT_WAV | SF_FORMAT_FLOAT, kSamplingRate, 1, samples)), samples);
}

TEST_F(AudioFiles, ChannelsAreAveraged) {
  std::vector<float> interleaved;
  for (int i = 0; i < 1000; ++i) interleaved.insert(interleaved.end(), {0.5F, -0.25F, 0.125F, 0.0F});
  EXPECT_EQ(load_audio(encode("four.wav", SF_FORMAT_WAV | SF_FORMAT_FLOAT, 16000, 4, interleaved)), std::vector<float>(1000, 0.09375F));
  const std::vector<float> wide(1024 * 70, 0.5F);
  EXPECT_EQ(load_audio(encode("wide.wav", SF_FORMAT_WAV | SF_FORMAT_FLOAT, 16000, 1024, wide)), std::vector<float>(70, 0.5F));
}

TEST_F(AudioFiles, ResamplingKeepsTimeAndRemovesWhatCannotBeHeld) {
  // An impulse at 1 s stays there.
  std::vector<float> impulse(96000);
  impulse[48000] = 1;
  const std::vector<float> samples = load_audio(encode("impulse.wav", SF_FORMAT_WAV | SF_FORMAT_FLOAT, 48000, 1, impulse));
  ASSERT_EQ(samples.size(), 32000u);
  EXPECT_EQ(std::max_element(samples.begin(), samples.end()) - samples.begin(), 16000);
  const std::vector<float> high = load_audio(encode("high.wav", SF_FORMAT_WAV | SF_FORMAT_FLOAT, 48000, 1, tone(10000, 48000, 1)));
  EXPECT_LT(amplitude(high, 6000).first, 1e-4);  // where it would be mirrored to
  EXPECT_LT(amplitude(high, 6000).second, 1e-4);
  for (const int rate : {1000, 7919, 44101, 768000}) {
    const std::vector<float> odd = load_audio(encode("odd.wav", SF_FORMAT_WAV | SF_FORMAT_FLOAT, rate, 1, tone(100, rate, 1)));
    EXPECT_NEAR(static_cast<double>(odd.size()), kSamplingRate, 1) << rate;
    EXPECT_NEAR(amplitude(odd, 100).first, 0.5, 1e-3) << rate;
  }
}

TEST_F(AudioFiles, AWavFromAPipeIsReadToItsEnd) {
  const std::string data(2000, '\x10');
  for (const std::uint32_t size : {0xFFFFFFFFu, 0x7FFFF000u, 0x80000000u, 0u}) {
    const std::vector<float> samples = decode_audio(wav({.riff_size = size, .data_size = size}, data), "x");
    ASSERT_EQ(samples.size(), 1000u) << size;
    EXPECT_FLOAT_EQ(samples[500], 0x1010 / 32768.0F);
  }
}

TEST_F(AudioFiles, ANamedPipeIsRead) {
  const std::string pipe = path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  std::thread writer([&] { write("pipe", wav({}, std::string(200000, '\1'))); });
  EXPECT_EQ(load_audio(pipe).size(), 100000u);
  writer.join();
}

/// What load_audio_stream reads of a pipe that `bytes` come through.
std::vector<float> through_pipe(std::string_view bytes, const AudioOptions& options = {}) {
  int ends[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  std::thread writer([&] {
    // A reader that has seen enough closes its end: no signal then, and no more to write.
    signal(SIGPIPE, SIG_IGN);
    for (ssize_t done = 0, got = 0; done < std::ssize(bytes); done += got)
      if ((got = write(ends[1], bytes.data() + done, bytes.size() - static_cast<std::size_t>(done))) < 0) break;
    close(ends[1]);
  });
  struct Finish {
    int end;
    std::thread& thread;
    ~Finish() {
      close(end);
      thread.join();
    }
  } finish{ends[0], writer};
  return load_audio_stream(ends[0], "standard input", options);
}

TEST_F(AudioFiles, APipeGivesWhatTheFileGives) {
  const std::vector<float> mono = tone(440, 44100, 8);
  std::vector<float> stereo;
  for (const float x : mono) stereo.insert(stereo.end(), {x, 0.5F * x});
  struct {
    const char* name;
    int format;
  } const cases[] = {{"a.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_16},          {"b.wav", SF_FORMAT_WAVEX | SF_FORMAT_PCM_24},
                     {"c.wav", SF_FORMAT_RF64 | SF_FORMAT_PCM_16},         {"d.wav", SF_FORMAT_WAV | SF_FORMAT_MS_ADPCM},
                     {"e.wav", SF_FORMAT_WAV | SF_FORMAT_FLOAT},           {"f.wav", SF_FORMAT_WAV | SF_FORMAT_ULAW},
                     {"g.flac", SF_FORMAT_FLAC | SF_FORMAT_PCM_16},        {"h.ogg", SF_FORMAT_OGG | SF_FORMAT_VORBIS},
                     {"i.mp3", SF_FORMAT_MPEG | SF_FORMAT_MPEG_LAYER_III}, {"j.aiff", SF_FORMAT_AIFF | SF_FORMAT_PCM_16}};
  for (const auto& [name, format] : cases) {
    const std::string file = encode(name, format, 44100, 2, stereo);
    if (file.empty()) continue;
    const std::vector<float> samples = load_audio(file);
    EXPECT_NEAR(static_cast<double>(samples.size()), 8 * kSamplingRate, 2000) << name;
    EXPECT_EQ(through_pipe(read(file)), samples) << name;
    // An open file is read from where it stands.
    const int descriptor = open(write("behind", "12345" + read(file)).c_str(), O_RDONLY | O_CLOEXEC);
    lseek(descriptor, 5, SEEK_SET);
    EXPECT_EQ(load_audio_stream(descriptor, "x"), samples) << name;
    close(descriptor);
  }
}

TEST_F(AudioFiles, APipeThatEndsEarlyIsRefused) {
  const std::vector<float> samples = tone(440, kSamplingRate, 2);
  const std::string pcm = read(encode("a.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_16, kSamplingRate, 1, samples));
  expect_error<FileError>([&] { through_pipe(pcm.substr(0, pcm.size() / 2)); },
                          {"standard input: truncated after 0.999 s: its header promises 64000 bytes of samples and 31978 are there"});
  expect_error<FileError>([] { through_pipe(""); }, {"standard input: empty"});
  expect_error<FileError>([] { through_pipe("RIFF"); }, {"standard input: no audio that can be read"});
  expect_error<FileError>([&] { through_pipe(pcm.substr(0, 40)); }, {"standard input: cannot be read as WAV: it ends before"});
  const std::string flac = read(encode("a.flac", SF_FORMAT_FLAC | SF_FORMAT_PCM_16, kSamplingRate, 1, samples));
  expect_error<FileError>([&] { through_pipe(flac.substr(0, flac.size() / 2)); }, {"standard input: "});
  expect_error<FileError>([&] { through_pipe(pcm, {.longest_seconds = 1}); }, {"standard input: it holds more than 1 s"});
  // A long chunk of something else comes first.
  std::string tagged = pcm.substr(0, 12) + "LIST";
  append(tagged, 300000, 4);
  EXPECT_EQ(through_pipe(tagged + std::string(300000, 'x') + pcm.substr(12)), decode_audio(pcm, "x"));
}

TEST_F(AudioFiles, APipeOfWhoseSizeNobodyKnowsIsReadToItsEnd) {
  const std::string data(2'000'000, '\x10');
  for (const std::uint32_t size : {0xFFFFFFFFu, 0xFFFFFFDBu, 0x7FFFF000u, 0x7FFFFFFFu, 0x80000000u, 0u}) {
    const std::vector<float> samples = through_pipe(wav({.riff_size = size, .data_size = size}, data));
    EXPECT_EQ(samples.size(), 1'000'000u) << size;
  }
  // Rounded down to whole samples, as sox does.
  EXPECT_EQ(through_pipe(wav({.data_size = 0x7FFFF000 / 6 * 6, .channels = 3}, data.substr(0, 6000))).size(), 1000u);
  // Other sizes are promises.
  for (const std::uint32_t size : {0x7FFFEFF0u, 0x80000002u, 3'000'000'000u, 0xFFFFFE00u})
    for (const bool pipe : {false, true})
      expect_error<FileError>(
          [&] {
            const std::string bytes = wav({.data_size = size}, data);
            pipe ? through_pipe(bytes) : decode_audio(bytes, "standard input");
          },
          {"standard input: truncated after 62.500 s: its header promises " + std::to_string(size) + " bytes of samples and 2000000 are"});
}

TEST_F(AudioFiles, ReadErrorsAreNamedWithTheTimeReached) {
  const std::vector<float> samples = tone(440, kSamplingRate, 20);
  struct {
    const char* name;
    int format;
  } const cases[] = {{"a.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_16},   {"b.flac", SF_FORMAT_FLAC | SF_FORMAT_PCM_16},
                     {"c.ogg", SF_FORMAT_OGG | SF_FORMAT_VORBIS},   {"d.mp3", SF_FORMAT_MPEG | SF_FORMAT_MPEG_LAYER_III},
                     {"e.aiff", SF_FORMAT_AIFF | SF_FORMAT_PCM_16}, {"f.wav", SF_FORMAT_WAV | SF_FORMAT_IMA_ADPCM}};
  for (const auto& [name, format] : cases) {
    const std::string file = encode(name, format, kSamplingRate, 1, samples);
    if (file.empty()) continue;
    const auto size = static_cast<off_t>(std::filesystem::file_size(file));
    // A bad sector in the middle: what is before and after it can be read.
    before_pread = [&](off_t at) { return at > size / 2 && at < size - 70000 ? EIO : 0; };
    if (size > 300000) expect_error<FileError>([&] { load_audio(file); }, {file + ": Input/output error after ", " s"});
    before_pread = [&](off_t at) { return at > 8000 ? EIO : 0; };
    expect_error<FileError>([&] { load_audio(file); }, {file + ": Input/output error"});
    before_pread = [](off_t) { return EIO; };
    expect_error<FileError>([&] { load_audio(file); }, {file + ": Input/output error"});
    before_pread = {};
    EXPECT_GE(load_audio(file).size(), samples.size()) << name;
  }
}

TEST_F(AudioFiles, AFileThatBecomesShorterWhileItIsReadIsRefused) {
  const std::vector<float> samples = tone(440, kSamplingRate, 20);
  for (const int format : {SF_FORMAT_WAV | SF_FORMAT_PCM_16, SF_FORMAT_FLAC | SF_FORMAT_PCM_16}) {
    const std::string file = encode("shrinks", format, kSamplingRate, 1, samples);
    before_pread = [&](off_t at) {
      if (at > 20000) std::filesystem::resize_file(file, 20000);
      return 0;
    };
    expect_error<FileError>([&] { load_audio(file); }, {file + ": the file became shorter while it was read after ", " s"});
    before_pread = {};
  }
}

TEST_F(AudioFiles, AStreamThatFailsIsNoEnd) {
  // A terminal whose other side is gone: what was written comes, then EIO.
  const int reader = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_GE(reader, 0);
  ASSERT_EQ(grantpt(reader), 0);
  ASSERT_EQ(unlockpt(reader), 0);
  const int writer = open(ptsname(reader), O_RDWR | O_NOCTTY | O_CLOEXEC);
  ASSERT_GE(writer, 0);
  termios raw{};
  ASSERT_EQ(tcgetattr(writer, &raw), 0);
  cfmakeraw(&raw);
  ASSERT_EQ(tcsetattr(writer, TCSANOW, &raw), 0);
  const std::string bytes = wav({}, std::string(2000, '\x10'));
  ASSERT_EQ(::write(writer, bytes.data(), bytes.size()), std::ssize(bytes));
  close(writer);
  expect_error<FileError>([&] { load_audio_stream(reader, "standard input"); }, {"standard input: Input/output error after 0.0"});
  close(reader);
}

TEST_F(AudioFiles, Mp3sThatAreCutShortAreRefused) {
  const std::string file = encode("a.mp3", SF_FORMAT_MPEG | SF_FORMAT_MPEG_LAYER_III, 44100, 2, tone(440, 44100, 4));
  if (file.empty()) GTEST_SKIP() << "skipped: libsndfile has no encoder of MP3";
  const std::string whole = read(file);
  const std::size_t count = load_audio(file).size();
  for (const double part : {0.3, 0.5, 0.9})
    expect_error<FileError>([&] { decode_audio(whole.substr(0, static_cast<std::size_t>(part * static_cast<double>(whole.size()))), "x"); },
                            {"x: truncated after ", " bytes of its last frame are missing"});
  expect_error<FileError>([&] { decode_audio(whole.substr(0, whole.size() - 1), "x"); }, {"1 bytes of its last frame are missing"});
  // Frames begin with the first frame's first two bytes; here and there others do by chance.
  std::vector<std::size_t> frames;
  const std::string_view sync = std::string_view(whole).substr(0, 2);
  for (std::size_t at = 0; (at = whole.find(sync, at)) != std::string::npos; ++at) frames.push_back(at);
  ASSERT_GT(frames.size(), 70u);
  const bool header = whole.substr(0, 200).find("Xing") != std::string::npos || whole.substr(0, 200).find("Info") != std::string::npos;
  ASSERT_TRUE(header);   // lame's, with the number of frames
  bool between = false;  // cut between two frames: the header knows
  for (std::size_t i = 50; i < 60; ++i) {
    try {
      decode_audio(whole.substr(0, frames[i]), "x");
      ADD_FAILURE() << "accepted up to " << frames[i];
    } catch (const FileError& error) {
      between = between || std::string(error.what()).find("its header promises ") != std::string::npos;
    }
    // All but the begin of a frame's header.
    for (const std::size_t bytes : {1u, 2u, 3u})
      expect_error<FileError>([&] { decode_audio(whole.substr(0, frames[i] + bytes), "x"); }, {"x: truncated after "});
  }
  EXPECT_TRUE(between);
  // Tags before and after change nothing, of whatever size.
  std::string tagged = "ID3" + std::string("\x04\x00\x00\x00\x01\x00\x00", 7) + std::string(128 << 7, 'x') + whole;
  tagged += "APETAGEX" + std::string(5000, '\xFF') + "TAG" + std::string(125, ' ');
  EXPECT_EQ(decode_audio(tagged, "x").size(), count);
}

TEST_F(AudioFiles, WhatIsNoFileIsNamed) {
  expect_error<FileError>([&] { load_audio(path("none.wav")); }, {path("none.wav") + ": No such file"});
  expect_error<FileError>([&] { load_audio(folder_.string()); }, {folder_.string() + ": a folder"});
  expect_error<FileError>([] { load_audio("/dev/zero"); }, {"/dev/zero: a device"});
  expect_error<FileError>([&] { load_audio(write("empty.wav", "")); }, {path("empty.wav") + ": empty"});
}

TEST_F(AudioFiles, OtherFormatsAreRefusedWithTheCommandThatConverts) {
  const std::string text = "Dear diary, today ...";
  expect_error<FileError>([&] { load_audio(write("diary.txt", text)); },
                          {path("diary.txt") + ": no audio that can be read", "WAV, FLAC, OGG",
                           "ffmpeg -i " + path("diary.txt") + " -ar 16000 -ac 1 " + path("diary.wav")});
  expect_error<FileError>([&] { decode_audio(text, "it's mine.m4a"); },
                          {"ffmpeg -i 'it'\\''s mine.m4a' -ar 16000 -ac 1 'it'\\''s mine.wav'"});
  expect_error<FileError>([&] { decode_audio(text, "misnamed.wav"); }, {"ffmpeg -i misnamed.wav -ar 16000 -ac 1 misnamed-16k.wav"});
  expect_error<FileError>([&] { decode_audio(text, "standard input"); },
                          {"standard input: no", "ffmpeg -i RECORDING -ar 16000 -ac 1 talk.wav"});
  expect_error<FileError>([&] { decode_audio("x", "x.wav"); }, {"x.wav: no audio that can be read"});
}

TEST_F(AudioFiles, HeadersWithoutAudioAreRefused) {
  expect_error<FileError>([] { decode_audio(wav({.data_size = 0}, ""), "x.wav"); }, {"x.wav: it holds no audio: 0 samples"});
  expect_error<FileError>([] { decode_audio(wav({}, "").substr(0, 30), "x.wav"); }, {"x.wav: cannot be read as WAV: "});
  expect_error<FileError>([] { decode_audio("fLaC", "x.flac"); }, {"x.flac: "});
  expect_error<FileError>([] { decode_audio("OggS", "x.ogg"); }, {"x.ogg: truncated"});
  expect_error<FileError>([] { decode_audio("ID3", "x.mp3"); }, {"x.mp3: "});
  EXPECT_EQ(decode_audio(wav({.tag = 3, .bits = 32}, floats({0})), "x").size(), 1u);  // one sample is some
}

TEST_F(AudioFiles, TruncatedFilesAreRefused) {
  const std::vector<float> samples = tone(440, kSamplingRate, 2);
  const auto half = [&](const std::string& file) {
    const std::string bytes = read(file);
    return bytes.substr(0, bytes.size() / 2);
  };
  const std::string pcm = encode("a.wav", SF_FORMAT_WAV | SF_FORMAT_PCM_16, kSamplingRate, 1, samples);
  expect_error<FileError>([&] { decode_audio(half(pcm), "a.wav"); },
                          {"a.wav: truncated", "promises 64000 bytes of samples and 31978 are there"});
  expect_error<FileError>([&] { load_audio(write("b.wav", half(pcm))); }, {path("b.wav") + ": truncated"});
  const std::string rf64 = encode("c.wav", SF_FORMAT_RF64 | SF_FORMAT_PCM_16, kSamplingRate, 1, samples);
  expect_error<FileError>([&] { decode_audio(half(rf64), "c.wav"); }, {"c.wav: truncated", "promises 64000 bytes"});
  const std::string aiff = encode("d.aiff", SF_FORMAT_AIFF | SF_FORMAT_PCM_16, kSamplingRate, 1, samples);
  expect_error<FileError>([&] { decode_audio(half(aiff), "d.aiff"); }, {"d.aiff: truncated", "promises 64008 bytes"});
  const std::string flac = encode("e.flac", SF_FORMAT_FLAC | SF_FORMAT_PCM_16, kSamplingRate, 1, samples);
  expect_error<FileError>([&] { decode_audio(half(flac), "e.flac"); }, {"e.flac: "});
  for (const int codec : {SF_FORMAT_VORBIS, SF_FORMAT_OPUS}) {
    const std::string ogg = encode("f.ogg", SF_FORMAT_OGG | codec, kSamplingRate, 1, samples);
    if (ogg.empty()) continue;
    const std::string bytes = read(ogg);
    expect_error<FileError>([&] { decode_audio(std::string_view(bytes).substr(0, bytes.size() - 1), "f.ogg"); },
                            {"f.ogg: truncated: 1 bytes of its last page are missing"});
  }
}

TEST_F(AudioFiles, SamplesThatAreNoNumbersAreNamedByTheirTime) {
  std::vector<float> samples(16000, 0.25F);
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity(), 1e11F}) {
    samples[8000] = bad;
    expect_error<FileError>([&] { decode_audio(wav({.tag = 3, .bits = 32}, floats(samples)), "x.wav"); },
                            {"x.wav: the sample at 0.500000 s is "});
  }
}

TEST_F(AudioFiles, HostileHeadersAreRefused) {
  const std::string data(4000, '\1');
  for (const std::uint32_t rate : {0u, 999u, 768001u, 4000000000u})
    expect_error<FileError>([&] { decode_audio(wav({.rate = rate}, data), "x.wav"); }, {"x.wav: "});
  for (const std::uint16_t channels : {std::uint16_t{0}, std::uint16_t{1025}, std::uint16_t{65535}})
    expect_error<FileError>([&] { decode_audio(wav({.channels = channels}, data), "x.wav"); }, {"x.wav: "});
  // 10^18 samples, in an RF64 header.
  std::string rf64 = "RF64\xFF\xFF\xFF\xFFWAVEds64";
  append(rf64, 28, 4);
  for (int i = 0; i < 3; ++i) append(rf64, 1'000'000'000'000'000'000u, 8);
  append(rf64, 0, 4);
  rf64 += wav({}, data).substr(12);
  expect_error<FileError>([&] { decode_audio(rf64, "x.wav"); }, {"x.wav: truncated", "promises 1000000000000000000 bytes"});
  // A FLAC file's count of samples, of 36 bits, at its most.
  std::string flac = read(encode("a.flac", SF_FORMAT_FLAC | SF_FORMAT_PCM_16, kSamplingRate, 1, tone(440, kSamplingRate, 1)));
  flac[21] = static_cast<char>(flac[21] | 0x0F);
  flac.replace(22, 4, "\xFF\xFF\xFF\xFF");
  expect_error<FileError>([&] { decode_audio(flac, "x.flac"); },
                          {"x.flac: truncated after 1.000 s: its header promises 68719476735 samples and 16000 are there"});
}

TEST_F(AudioFiles, LongerAudioThanAllowedIsRefused) {
  const std::string file = encode("silence.flac", SF_FORMAT_FLAC | SF_FORMAT_PCM_16, 8000, 1, std::vector<float>(8000 * 60));
  EXPECT_EQ(load_audio(file, {.longest_seconds = 60}).size(), 960000u);
  expect_error<FileError>([&] { load_audio(file, {.longest_seconds = 59}); }, {file + ": it holds more than 59 s of audio"});
}

}  // namespace
}  // namespace tw::speech
