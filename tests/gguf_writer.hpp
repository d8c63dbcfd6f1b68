#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "tilewave/tensor.hpp"

// Writes GGUF files, and blocks of their formats, for tests of the reader. Nothing is shared with it.

namespace tw::test {

/// The little-endian bytes of a number.
template <class T>
std::string gguf_bytes(T value) {
  std::string bytes(sizeof(T), '\0');
  std::memcpy(bytes.data(), &value, sizeof(T));
  return bytes;
}
inline std::string gguf_string(const std::string& text) { return gguf_bytes<std::uint64_t>(text.size()) + text; }

/// The number of a type of metadata.
template <class T>
constexpr std::uint32_t gguf_type() {
  if constexpr (std::is_same_v<T, bool>) return 7;
  if constexpr (std::is_same_v<T, float>) return 6;
  if constexpr (std::is_same_v<T, double>) return 12;
  constexpr std::uint32_t sizes = sizeof(T) == 1 ? 0 : sizeof(T) == 2 ? 2 : sizeof(T) == 4 ? 4 : 10;
  return sizes + std::is_signed_v<T>;
}

/// A file; what is written wrongly on purpose is changed in its members.
struct GgufWriter {
  struct Info {
    std::string name;
    std::vector<std::uint64_t> extents;  ///< innermost first, as in the file
    std::uint32_t type = 0;
    std::uint64_t offset = 0;
  };

  std::string start = "GGUF" + gguf_bytes<std::uint32_t>(3);
  std::vector<std::string> entries;
  std::vector<Info> infos;
  std::string data;
  std::uint64_t alignment = 32;

  template <class T>
  GgufWriter& set(const std::string& key, T value) {
    return entry(key, gguf_type<T>(), gguf_bytes(value));
  }
  GgufWriter& set(const std::string& key, const std::string& value) { return entry(key, 8, gguf_string(value)); }
  GgufWriter& set(const std::string& key, const char* value) { return set(key, std::string(value)); }
  template <class T>
  GgufWriter& set_array(const std::string& key, const std::vector<T>& values) {
    std::string bytes;
    for (const T& value : values) bytes += gguf_bytes(value);
    return entry(key, 9, gguf_bytes(gguf_type<T>()) + gguf_bytes<std::uint64_t>(values.size()) + bytes);
  }
  GgufWriter& set_array(const std::string& key, const std::vector<std::string>& values) {
    std::string bytes;
    for (const std::string& value : values) bytes += gguf_string(value);
    return entry(key, 9, gguf_bytes<std::uint32_t>(8) + gguf_bytes<std::uint64_t>(values.size()) + bytes);
  }
  /// Removes a key that is there.
  GgufWriter& erase(const std::string& key) {
    const auto begins = [&](const std::string& each) { return each.starts_with(gguf_string(key)); };
    if (std::erase_if(entries, begins) != 1) throw std::logic_error("no key " + key);
    return *this;
  }
  /// The value of a key that is there.
  template <class T>
  GgufWriter& change(const std::string& key, const T& value) {
    return erase(key).set(key, value);
  }

  GgufWriter& tensor(const std::string& name, const Shape& shape, std::uint32_t type, const std::string& bytes) {
    data.resize((data.size() + alignment - 1) / alignment * alignment, '\0');
    infos.push_back({name, {shape.rbegin(), shape.rend()}, type, data.size()});
    data += bytes;
    return *this;
  }

  std::string file() const {
    std::string bytes = start + gguf_bytes<std::uint64_t>(infos.size()) + gguf_bytes<std::uint64_t>(entries.size());
    for (const std::string& each : entries) bytes += each;
    for (const Info& info : infos) {
      bytes += gguf_string(info.name) + gguf_bytes(static_cast<std::uint32_t>(info.extents.size()));
      for (const std::uint64_t extent : info.extents) bytes += gguf_bytes(extent);
      bytes += gguf_bytes(info.type) + gguf_bytes(info.offset);
    }
    bytes.resize((bytes.size() + alignment - 1) / alignment * alignment, '\0');
    return bytes + data;
  }

 private:
  GgufWriter& entry(const std::string& key, std::uint32_t type, const std::string& value) {
    entries.push_back(gguf_string(key) + gguf_bytes(type) + value);
    return *this;
  }
};

/// How tensors are stored, the numbers of these in a file, and the elements of a block.
struct GgufFormat {
  const char* name;
  std::uint32_t id;
  int elements;
};
constexpr std::array<GgufFormat, 8> kGgufFormats = {{
    {"F32", 0, 1},
    {"F16", 1, 1},
    {"BF16", 30, 1},
    {"Q8_0", 8, 32},
    {"Q4_0", 2, 32},
    {"Q4_K", 12, 256},
    {"Q5_K", 13, 256},
    {"Q6_K", 14, 256},
}};
inline const GgufFormat& gguf_format(const std::string& name) {
  return *std::find_if(kGgufFormats.begin(), kGgufFormats.end(), [&](const GgufFormat& format) { return format.name == name; });
}

namespace detail {

/// The smallest f16 that is not below x.
inline f16 f16_above(float x) {
  f16 half(x);
  if (static_cast<float>(half) < x) ++half.bits;  // x is positive
  return half;
}
inline std::string bytes_of(f16 value) { return gguf_bytes(value.bits); }

inline int nearest(float x, int least, int most) { return std::clamp(static_cast<int>(std::lround(x)), least, most); }

/// The least number of steps that reach x.
inline int steps_to(float x, float step) { return step == 0 ? 0 : static_cast<int>(std::min(63.0f, std::ceil(x / step))); }

inline std::string encode_q8_0(std::span<const float> x) {
  float largest = 0;
  for (const float value : x) largest = std::max(largest, std::abs(value));
  const f16 d = f16_above(largest / 127);
  std::string block = bytes_of(d);
  for (const float value : x) block += static_cast<char>(largest == 0 ? 0 : nearest(value / static_cast<float>(d), -127, 127));
  return block;
}

inline std::string encode_q4_0(std::span<const float> x) {
  const float extreme = *std::max_element(x.begin(), x.end(), [](float a, float b) { return std::abs(a) < std::abs(b); });
  const f16 d(extreme / -8);
  const auto q = [&](std::size_t i) { return extreme == 0 ? 8 : nearest(x[i] / static_cast<float>(d) + 8, 0, 15); };
  std::string block = bytes_of(d);
  for (std::size_t i = 0; i < 16; ++i) block += static_cast<char>(q(i) | q(i + 16) << 4);
  return block;
}

/// Q4_K, and with `bits` 5 Q5_K.
inline std::string encode_groups(std::span<const float> x, int bits) {
  const int levels = (1 << bits) - 1;
  std::array<float, 8> lowest{}, highest{};
  for (std::size_t i = 0; i < 256; ++i) {
    lowest[i / 32] = std::min(lowest[i / 32], x[i]);
    highest[i / 32] = std::max(highest[i / 32], x[i]);
  }
  const f16 dmin = f16_above(-*std::min_element(lowest.begin(), lowest.end()) / 63);
  std::array<int, 8> minimum{}, scale{};
  std::array<float, 8> step{};
  for (std::size_t g = 0; g < 8; ++g) {
    minimum[g] = steps_to(-lowest[g], static_cast<float>(dmin));
    step[g] = (highest[g] + static_cast<float>(dmin) * static_cast<float>(minimum[g])) / static_cast<float>(levels);
  }
  const f16 d = f16_above(*std::max_element(step.begin(), step.end()) / 63);
  for (std::size_t g = 0; g < 8; ++g) scale[g] = steps_to(step[g], static_cast<float>(d));

  std::string block = bytes_of(d) + bytes_of(dmin);
  for (std::size_t i = 0; i < 4; ++i) block += static_cast<char>(scale[i] | scale[i + 4] >> 4 << 6);
  for (std::size_t i = 0; i < 4; ++i) block += static_cast<char>(minimum[i] | minimum[i + 4] >> 4 << 6);
  for (std::size_t i = 4; i < 8; ++i) block += static_cast<char>((scale[i] & 15) | (minimum[i] & 15) << 4);
  std::array<int, 256> q{};
  for (std::size_t i = 0; i < 256; ++i) {
    const float width = static_cast<float>(d) * static_cast<float>(scale[i / 32]);
    const float above = x[i] + static_cast<float>(dmin) * static_cast<float>(minimum[i / 32]);
    q[i] = width == 0 ? 0 : nearest(above / width, 0, levels);
  }
  if (bits == 5) {
    for (std::size_t i = 0; i < 32; ++i) {
      int fifth = 0;
      for (std::size_t g = 0; g < 8; ++g) fifth |= q[g * 32 + i] >> 4 << g;
      block += static_cast<char>(fifth);
    }
  }
  for (std::size_t g = 0; g < 8; g += 2)
    for (std::size_t i = 0; i < 32; ++i) block += static_cast<char>((q[g * 32 + i] & 15) | (q[(g + 1) * 32 + i] & 15) << 4);
  return block;
}

inline std::string encode_q6_k(std::span<const float> x) {
  std::array<float, 16> largest{};
  for (std::size_t i = 0; i < 256; ++i) largest[i / 16] = std::max(largest[i / 16], std::abs(x[i]));
  const f16 d = f16_above(*std::max_element(largest.begin(), largest.end()) / 31 / 127);
  std::array<int, 16> scale{};
  for (std::size_t g = 0; g < 16; ++g)
    scale[g] = static_cast<float>(d) == 0 ? 0 : static_cast<int>(std::min(127.0f, std::ceil(largest[g] / 31 / static_cast<float>(d))));
  std::array<int, 256> q{};
  for (std::size_t i = 0; i < 256; ++i) {
    const float step = static_cast<float>(d) * static_cast<float>(scale[i / 16]);
    q[i] = step == 0 ? 32 : nearest(x[i] / step, -32, 31) + 32;
  }
  std::string low, high;
  for (std::size_t half = 0; half < 256; half += 128) {
    for (std::size_t i = 0; i < 64; ++i) low += static_cast<char>((q[half + i] & 15) | (q[half + 64 + i] & 15) << 4);
    for (std::size_t i = 0; i < 32; ++i)
      high += static_cast<char>(q[half + i] >> 4 | q[half + 32 + i] >> 4 << 2 | q[half + 64 + i] >> 4 << 4 | q[half + 96 + i] >> 4 << 6);
  }
  std::string block = low + high;
  for (const int each : scale) block += static_cast<char>(each);
  return block + bytes_of(d);
}

}  // namespace detail

/// Whole blocks. Each error is at most half the distance of two values that the block can have.
inline std::string gguf_encode(const GgufFormat& format, std::span<const float> values) {
  const std::string name = format.name;
  std::string bytes;
  for (std::size_t i = 0; i < values.size(); i += static_cast<std::size_t>(format.elements)) {
    const auto block = values.subspan(i, static_cast<std::size_t>(format.elements));
    if (name == "F32") bytes += gguf_bytes(block[0]);
    if (name == "F16") bytes += gguf_bytes(f16(block[0]).bits);
    if (name == "BF16") bytes += gguf_bytes(bf16(block[0]).bits);
    if (name == "Q8_0") bytes += detail::encode_q8_0(block);
    if (name == "Q4_0") bytes += detail::encode_q4_0(block);
    if (name == "Q4_K") bytes += detail::encode_groups(block, 4);
    if (name == "Q5_K") bytes += detail::encode_groups(block, 5);
    if (name == "Q6_K") bytes += detail::encode_q6_k(block);
  }
  return bytes;
}

/// The largest error of gguf_encode for values whose magnitudes are at most `largest`, from the formats' definitions.
inline float gguf_error_bound(const GgufFormat& format, float largest) {
  const std::string name = format.name;
  const float half_ulp = 1.0f / 2048;  // of f16, relative
  if (name == "F32") return 0;
  if (name == "F16") return std::max(largest * half_ulp, 0x1p-25f);
  if (name == "BF16") return largest / 256;
  // Scales are rounded up to f16, by at most two halves of its distance. In Q4_0 a value at the end without a code is a whole step off.
  if (name == "Q8_0") return largest / 127 / 2 * (1 + 2 * half_ulp);
  if (name == "Q4_0") return largest / 8 * (1 + 16 * half_ulp);
  // A group's scale is the next of 63 (in Q6_K: 127) steps above the one that it needs, and so is its minimum.
  if (name == "Q6_K") return largest / 31 / 2 * (1 + 1.0f / 127) * (1 + 4 * half_ulp);
  const float levels = name == "Q4_K" ? 15 : 31;
  return 2 * largest * (1 + 1.0f / 63) / levels / 2 * (1 + 1.0f / 63) * (1 + 8 * half_ulp);
}

/// Expects what is decoded to be as near to the values as the format allows in each block.
inline void expect_within_format(const GgufFormat& format, std::span<const float> values, std::span<const float> decoded) {
  ASSERT_EQ(values.size(), decoded.size());
  for (std::size_t begin = 0; begin < values.size(); begin += static_cast<std::size_t>(format.elements)) {
    const std::size_t end = begin + static_cast<std::size_t>(format.elements);
    float largest = 0;
    for (std::size_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
    const float bound = gguf_error_bound(format, largest);
    for (std::size_t i = begin; i < end; ++i) {
      const float error = std::abs(values[i] - decoded[i]);
      if (!(error <= bound))
        FAIL() << format.name << " element " << i << ": " << decoded[i] << " instead of " << values[i] << "; allowed: an error of "
               << bound;
    }
  }
}

}  // namespace tw::test
