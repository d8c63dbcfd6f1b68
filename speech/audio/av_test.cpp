// What FFmpeg's libraries read: audio as browsers and phones record it.
#include "speech/audio/av_module.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sndfile.h>
#include <unistd.h>

#include <cmath>
#include <complex>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numbers>
#include <thread>

#include "speech/audio/audio.hpp"
#include "speech/audio/containers.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"
#include "tilewave/speech.hpp"

namespace tw::speech {
namespace {

using test::expect_error;

std::string bytes_of(const std::string& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

std::string big_endian_bytes(std::uint64_t value, int count) {
  std::string bytes;
  for (int i = count - 1; i >= 0; --i) bytes += static_cast<char>(value >> 8 * i);
  return bytes;
}

/// The amplitude of 440 Hz in the middle half, and of what else is there.
std::pair<double, double> tone_in(const std::vector<float>& samples) {
  std::complex<double> sum = 0;
  double energy = 0, count = 0;
  for (std::size_t i = samples.size() / 4; i < samples.size() * 3 / 4; ++i, ++count) {
    const double x = samples[i];
    sum += x * std::polar(1.0, -2 * std::numbers::pi * 440 * static_cast<double>(i) / kSamplingRate);
    energy += x * x;
  }
  const double found = 2 * std::abs(sum) / count;
  return {found, std::sqrt(std::max(energy / count - found * found / 2, 0.0))};
}

/// The packets of a logical OGG stream.
std::vector<std::string> ogg_packets(const std::string& ogg) {
  std::vector<std::string> packets(1);
  for (std::size_t page = 0; page + 27 <= ogg.size();) {
    const std::size_t segments = static_cast<unsigned char>(ogg[page + 26]);
    std::size_t at = page + 27 + segments;
    for (std::size_t i = 0; i < segments; ++i) {
      const std::size_t length = static_cast<unsigned char>(ogg[page + 27 + i]);
      packets.back() += ogg.substr(at, length);
      at += length;
      if (length < 255) packets.emplace_back();
    }
    page = at;
  }
  packets.pop_back();
  return packets;
}

std::string element(std::uint32_t id, const std::string& data) {
  const int length = id > 0xFFFFFF ? 4 : id > 0xFFFF ? 3 : id > 0xFF ? 2 : 1;
  return big_endian_bytes(id, length) + big_endian_bytes(data.size() | 0x10000000u, 4) + data;
}
std::string element(std::uint32_t id, std::uint64_t number) { return element(id, big_endian_bytes(number, 8)); }
/// The begin of an element of unknown size.
std::string open_element(std::uint32_t id) { return big_endian_bytes(id, 4) + "\x01\xFF\xFF\xFF\xFF\xFF\xFF\xFF"; }

constexpr double kSeconds = 3;

/// A tone as a browser's MediaRecorder writes it: Opus in WebM, the segment and its clusters of unknown size, no duration.
const std::string& recorded_webm() {
  static const std::string webm = [] {
    std::string file = testing::TempDir() + "tilewave-opus-XXXXXX";
    close(mkstemp(file.data()));
    SF_INFO info{};
    info.samplerate = 48000;
    info.channels = 1;
    info.format = SF_FORMAT_OGG | SF_FORMAT_OPUS;
    SNDFILE* const out = sf_open(file.c_str(), SFM_WRITE, &info);
    std::vector<float> tone(static_cast<std::size_t>(kSeconds * 48000));
    for (std::size_t i = 0; i < tone.size(); ++i)
      tone[i] = static_cast<float>(0.5 * std::sin(2 * std::numbers::pi * 440 * static_cast<double>(i) / 48000));
    EXPECT_EQ(sf_write_float(out, tone.data(), std::ssize(tone)), std::ssize(tone));
    sf_close(out);
    const std::vector<std::string> packets = ogg_packets(bytes_of(file));
    std::filesystem::remove(file);
    std::string rate = big_endian_bytes(std::bit_cast<std::uint64_t>(48000.0), 8);
    std::string result =
        element(0x1A45DFA3, element(0x4282, "webm")) + open_element(0x18538067) + element(0x1549A966, element(0x2AD7B1, 1000000));
    result += element(0x1654AE6B, element(0xAE, element(0xD7, 1) + element(0x73C5, 1) + element(0x83, 2) + element(0x86, "A_OPUS") +
                                                    element(0x63A2, packets[0]) + element(0xE1, element(0xB5, rate) + element(0x9F, 1))));
    for (std::size_t i = 2; i < packets.size(); ++i) {  // after the two headers, 20 ms each
      const std::size_t time = 20 * (i - 2);
      if (time % 1000 == 0) result += open_element(0x1F43B675) + element(0xE7, time);
      result += element(0xA3, "\x81" + big_endian_bytes(time % 1000, 2) + "\x80" + packets[i]);
    }
    return result;
  }();
  return webm;
}

const std::string kToneFile = std::string(TILEWAVE_SOURCE_DIR) + "/tests/data/audio/tone.m4a";

/// Its AAC frames in ADTS.
std::string tone_adts() {
  const std::string m4a = bytes_of(kToneFile);
  const auto number = [&](std::size_t at) { return static_cast<std::size_t>(big_endian(std::string_view(m4a).substr(at, 4))); };
  const std::size_t sizes = m4a.find("stsz") + 12, offset = m4a.find("stco") + 12;
  std::string adts;
  std::size_t at = number(offset);
  for (std::size_t i = 0; i < number(sizes); ++i) {
    const std::size_t size = number(sizes + 4 + 4 * i), all = size + 7;
    adts += big_endian_bytes(0xFFF1, 2) + big_endian_bytes(0x60400000u | all << 5 | 0x1Fu, 4) + "\xFC";  // AAC-LC, 16 kHz, one channel
    adts += m4a.substr(at, size);
    at += size;
  }
  return adts;
}

class FfmpegAudio : public testing::Test {
 protected:
  void SetUp() override {
    if (!av_module_problem().empty()) GTEST_SKIP() << av_module_problem();
  }
};

TEST_F(FfmpegAudio, ARecordingOfABrowserIsRead) {
  const std::vector<float> samples = decode_audio(recorded_webm(), "x.webm");
  EXPECT_NEAR(static_cast<double>(samples.size()), kSeconds * kSamplingRate, 500);  // the last packet may be longer
  EXPECT_NEAR(tone_in(samples).first, 0.5, 0.01);
  EXPECT_LT(tone_in(samples).second, 0.02);
}

TEST_F(FfmpegAudio, AnM4aAndItsAacAreRead) {
  const std::vector<float> m4a = decode_audio(bytes_of(kToneFile), "x");
  EXPECT_NEAR(static_cast<double>(m4a.size()), 9600 + 512, 512) << "more is left than the padding of the last frame";
  EXPECT_NEAR(tone_in(m4a).first, 0.5, 0.02);
  EXPECT_LT(tone_in(m4a).second, 0.05);
  const std::vector<float> aac = decode_audio(tone_adts(), "x");
  EXPECT_EQ(aac.size(), m4a.size() + 1024);  // the encoder's delay, which ADTS does not tell
  EXPECT_NEAR(tone_in(aac).first, 0.5, 0.02);
}

TEST_F(FfmpegAudio, FilesBytesAndPipesGiveTheSame) {
  const std::string whole = bytes_of(kToneFile);
  const std::vector<float> samples = read_audio(whole, "x");
  EXPECT_EQ(read_audio(kToneFile), samples);
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  std::thread writer([&] {
    EXPECT_EQ(write(ends[1], whole.data(), whole.size()), std::ssize(whole));
    close(ends[1]);
  });
  EXPECT_EQ(read_audio_stream(ends[0], "standard input"), samples);
  writer.join();
  close(ends[0]);
}

TEST_F(FfmpegAudio, TruncatedFilesAreRefused) {
  const std::string webm = recorded_webm(), m4a = bytes_of(kToneFile), adts = tone_adts();
  for (const std::string* whole : {&webm, &m4a, &adts})
    for (const std::size_t missing : {std::size_t{1}, std::size_t{10}, whole->size() / 2})
      expect_error<FileError>([&] { decode_audio(whole->substr(0, whole->size() - missing), "x"); }, {"x: truncated: "});
  const std::size_t index = m4a.find("moov") - 4;  // written last, when a recording ends
  expect_error<FileError>([&] { decode_audio(m4a.substr(0, index), "x"); }, {"x: truncated: it has no index"});
}

TEST_F(FfmpegAudio, DamagedFilesAreRefused) {
  std::string webm = recorded_webm();
  webm.replace(webm.size() / 2, 2000, std::string(2000, '\0'));
  expect_error<FileError>([&] { decode_audio(webm, "x"); }, {"x: damaged: "});
  std::string adts = tone_adts();
  for (std::size_t i = adts.size() / 2; i < adts.size(); ++i) adts[i] = static_cast<char>(i * i);
  expect_error<FileError>([&] { decode_audio(adts, "x"); }, {"x: damaged after 0."});
  expect_error<FileError>(
      [&] {
        decode_audio(std::string("\0\0\0\x08"
                                 "ftyp\0\0\0\x02moov",
                                 16),
                     "x");
      },
      {"x: damaged: the box at byte 8 has 2 bytes"});
}

TEST_F(FfmpegAudio, NoBytesAtAllMakeItFailOtherwise) {
  const std::string webm = recorded_webm().substr(0, 6000), m4a = bytes_of(kToneFile), adts = tone_adts();
  std::mt19937_64 random = test::random_engine();
  int refused = 0;
  for (int i = 0; i < test::random_cases(200); ++i) {
    std::string bytes = i % 3 == 0 ? webm : i % 3 == 1 ? m4a : adts;
    for (int k = 0; k < 1 + i % 8; ++k) bytes[random() % bytes.size()] = static_cast<char>(random());
    try {
      for (const float x : decode_audio(bytes, "x", {.longest_seconds = 10})) ASSERT_TRUE(std::isfinite(x));
    } catch (const FileError& error) {
      ++refused;
      EXPECT_EQ(std::string_view(error.what()).substr(0, 3), "x: ");
      EXPECT_EQ(std::string_view(error.what()).find('\n'), std::string_view::npos);
    }
  }
  EXPECT_GT(refused, 0);
}

TEST_F(FfmpegAudio, WhatHasNoSoundAndWhatIsTooLongIsRefused) {
  expect_error<FileError>([] { decode_audio(recorded_webm(), "x", {.longest_seconds = 1}); }, {"x: it holds more than 1 s of audio"});
  const std::string webm = recorded_webm();
  std::string video = webm;
  const std::size_t type = video.find(element(0x83, 2));
  video.replace(type, element(0x83, 1).size(), element(0x83, 1));
  expect_error<FileError>([&] { decode_audio(video, "x"); }, {"x: it holds no audio"});
  std::string codec = webm;
  codec.replace(codec.find("A_OPUS"), 6, "A_NONE");
  expect_error<FileError>([&] { decode_audio(codec, "x"); }, {"x: its audio cannot be decoded: "});
}

TEST_F(FfmpegAudio, NoOtherFileIsOpened) {
  // A playlist, which FFmpeg would follow.
  const std::string list = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n" + kToneFile + "\n#EXT-X-ENDLIST\n";
  expect_error<FileError>([&] { decode_audio(list, "x.m3u8"); }, {"x.m3u8: no audio that can be read"});
  expect_error<FileError>([&] { decode_audio("ffconcat version 1.0\nfile " + kToneFile + "\n", "x"); }, {"x: no audio that can be read"});
}

}  // namespace
}  // namespace tw::speech
