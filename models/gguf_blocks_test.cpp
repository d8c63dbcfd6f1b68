#include "models/gguf_blocks.hpp"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <random>
#include <vector>

#include "tests/expect_error.hpp"
#include "tests/gguf_writer.hpp"
#include "tests/support.hpp"
#include "tilewave/error.hpp"

namespace tw::models {
namespace {

using Bytes = std::vector<unsigned char>;

std::vector<float> decoded(const char* name, const Bytes& block) {
  const BlockFormat* format = block_format(test::gguf_format(name).id);
  EXPECT_EQ(format->name, name);
  EXPECT_EQ(static_cast<std::size_t>(format->bytes), block.size());
  std::vector<float> values(static_cast<std::size_t>(format->elements));
  decode_blocks(*format, std::as_bytes(std::span(block)), values);
  return values;
}

void expect_values(const std::vector<float>& values, const std::function<float(int)>& wanted) {
  for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(values[i], wanted(static_cast<int>(i))) << "element " << i;
}

void append(Bytes& to, int count, const std::function<int(int)>& byte) {
  for (int i = 0; i < count; ++i) to.push_back(static_cast<unsigned char>(byte(i)));
}

// Blocks whose bytes follow from the formats' definitions by hand. As f16, 1 is 0x3C00, -0.5 is 0xB800 and 0.25 is 0x3400.

TEST(GgufBlocks, Q8_0) {
  Bytes block = {0x00, 0xB8};
  append(block, 32, [](int i) { return i * 8 - 128; });
  expect_values(decoded("Q8_0", block), [](int i) { return -0.5f * static_cast<float>(i * 8 - 128); });
}

TEST(GgufBlocks, Q4_0) {
  Bytes block = {0x00, 0x34};
  append(block, 16, [](int i) { return i | (i * 7 % 16) << 4; });
  expect_values(decoded("Q4_0", block), [](int i) { return 0.25f * static_cast<float>(i < 16 ? i - 8 : (i - 16) * 7 % 16 - 8); });
}

// Factors with all bits of both parts in use.
constexpr std::array<int, 8> kScales = {1, 2, 3, 63, 33, 17, 48, 5}, kMinima = {0, 1, 62, 63, 16, 32, 47, 9};
const Bytes kFactors = {0x00,       0x3C,       0x00,        0x34,         // 1 and 0.25
                        1 | 2 << 6, 2 | 1 << 6, 3 | 3 << 6,  63,           // scales 0 to 3, and 33, 17, 48, 5 without their low bits
                        0 | 1 << 6, 1 | 2 << 6, 62 | 2 << 6, 63,           // minima 0 to 3, and 16, 32, 47, 9 without theirs
                        1 | 0 << 4, 1 | 0 << 4, 0 | 15 << 4, 5 | 9 << 4};  // the low bits

float of_group(int group, int q) {
  const auto g = static_cast<std::size_t>(group);
  return static_cast<float>(kScales[g] * q) - 0.25f * static_cast<float>(kMinima[g]);
}

TEST(GgufBlocks, Q4_K) {
  Bytes block = kFactors;
  append(block, 128, [](int i) { return (i * 5 + i / 32) % 16 | (i * 3 + 1) % 16 << 4; });
  expect_values(decoded("Q4_K", block), [](int element) {
    const int group = element / 32, i = group / 2 * 32 + element % 32;
    return of_group(group, group % 2 == 0 ? (i * 5 + i / 32) % 16 : (i * 3 + 1) % 16);
  });
}

TEST(GgufBlocks, Q5_K) {
  Bytes block = kFactors;
  append(block, 32, [](int i) { return i * 73 % 256; });  // bit g for group g
  append(block, 128, [](int i) { return (i * 5 + i / 32) % 16 | (i * 3 + 1) % 16 << 4; });
  expect_values(decoded("Q5_K", block), [](int element) {
    const int group = element / 32, i = group / 2 * 32 + element % 32;
    const int low = group % 2 == 0 ? (i * 5 + i / 32) % 16 : (i * 3 + 1) % 16;
    return of_group(group, low + 16 * (element % 32 * 73 % 256 >> group & 1));
  });
}

TEST(GgufBlocks, Q6_K) {
  Bytes block;
  append(block, 128, [](int i) { return (i * 7 + i / 64) % 16 | (i * 11 + 3) % 16 << 4; });
  append(block, 64, [](int i) { return i * 57 % 256; });
  append(block, 16, [](int i) { return i * 16 - 128; });
  block.insert(block.end(), {0x00, 0xB8});
  expect_values(decoded("Q6_K", block), [](int element) {
    const int half = element / 128, run = element / 32 % 4, i = element % 32;
    const int byte = half * 64 + run % 2 * 32 + i;
    const int low = run < 2 ? (byte * 7 + byte / 64) % 16 : (byte * 11 + 3) % 16;
    const int high = (half * 32 + i) * 57 % 256 >> (2 * run) & 3;
    return -0.5f * static_cast<float>((element / 16 * 16 - 128) * (low + 16 * high - 32));
  });
}

TEST(GgufBlocks, ErrorsAreWithinTheFormats) {
  std::mt19937_64 random = test::random_engine();
  for (const test::GgufFormat& given : test::kGgufFormats) {
    SCOPED_TRACE(given.name);
    const BlockFormat* format = block_format(given.id);
    ASSERT_NE(format, nullptr);
    EXPECT_EQ(format->name, given.name);
    if (format->decode == nullptr) continue;
    for (const float scale : {0.1f, 1.0f, 300.0f}) {
      std::normal_distribution<float> normal(0, scale);
      std::vector<float> values(4096), back(4096);
      for (float& value : values) value = normal(random);
      std::fill_n(values.begin(), 256, 0.0f);
      const std::string blocks = test::gguf_encode(given, values);
      decode_blocks(*format, std::as_bytes(std::span(blocks)), back);
      test::expect_within_format(given, values, back);
    }
  }
}

TEST(GgufBlocks, OthersAreNamed) {
  EXPECT_EQ(block_format(3), nullptr);
  EXPECT_EQ(unsupported_format_name(3), "Q4_1");
  EXPECT_EQ(unsupported_format_name(1000), "number 1000");
  EXPECT_EQ(supported_formats(), "F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K, Q6_K");
  std::vector<std::byte> bytes(35);
  std::vector<float> values(32);
  test::expect_error<InvalidArgument>([&] { decode_blocks(*block_format(8), bytes, values); }, {"35 bytes of Q8_0 are not 32 elements"});
}

}  // namespace
}  // namespace tw::models
