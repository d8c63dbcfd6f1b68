#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cli_fixture.hpp"
#include "runtime/format.hpp"

namespace tw::test {

inline const std::string kRoot = TILEWAVE_SOURCE_DIR;

/// A bundled recording and what it says.
inline std::string sample(int number) { return tw::format("'{}/assets/samples/digits-{}.wav'", kRoot, number); }
inline const std::string kWords[] = {"", "six seven nine one", "eight zero seven", "four three seven five seven four"};

inline std::vector<std::string> lines(const std::string& text) {
  std::vector<std::string> all;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) all.push_back(line);
  return all;
}

class Transcribe : public CommandLine {
 protected:
  /// On the CPU: texts are compared. Without the note about the bundled checkpoint, that is.
  Outcome transcribe(const std::string& arguments) const { return run("transcribe --device cpu --quiet " + arguments); }

  /// Writes a file into the test's folder; the result is its path, quoted.
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder() / name, std::ios::binary) << bytes;
    return quoted(folder() / name);
  }
  static std::string quoted(const std::filesystem::path& path) { return "'" + path.string() + "'"; }

  /// The names in a folder, sorted.
  static std::vector<std::string> names(const std::filesystem::path& directory) {
    std::vector<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(directory)) all.push_back(entry.path().filename().string());
    std::sort(all.begin(), all.end());
    return all;
  }
};

/// A WAV file of 16 kHz, mono, 16 bits.
inline std::string wav(const std::vector<std::int16_t>& samples) {
  const auto number = [](std::uint32_t x, int bytes) {
    std::string text;
    for (int i = 0; i < bytes; ++i) text += static_cast<char>(x >> (8 * i) & 0xFF);
    return text;
  };
  const auto size = static_cast<std::uint32_t>(2 * samples.size());
  std::string file = "RIFF" + number(36 + size, 4) + "WAVEfmt " + number(16, 4) + number(1, 2) + number(1, 2) + number(16000, 4) +
                     number(32000, 4) + number(2, 2) + number(16, 2) + "data" + number(size, 4);
  for (const std::int16_t sample : samples) file += number(static_cast<std::uint16_t>(sample), 2);
  return file;
}

}  // namespace tw::test
