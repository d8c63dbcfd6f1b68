#include "models/gguf_blocks.hpp"

#include <algorithm>
#include <array>
#include <vector>

#include "runtime/format.hpp"
#include "tilewave/error.hpp"

// The formats are defined by the ggml library; its documentation is
// https://github.com/ggml-org/llama.cpp/wiki/Tensor-Encoding-Schemes. All numbers are little-endian.

namespace tw::models {

namespace {

float f16_at(const unsigned char* bytes) {
  f16 value;
  value.bits = static_cast<std::uint16_t>(bytes[0] | bytes[1] << 8);
  return static_cast<float>(value);
}

/// f16 d; i8 q[32]. x = d q.
void decode_q8_0(const unsigned char* block, float* x) {
  const float d = f16_at(block);
  for (int i = 0; i < 32; ++i) x[i] = d * static_cast<float>(static_cast<signed char>(block[2 + i]));
}

/// f16 d; 32 numbers q of 4 bits: byte i has q[i] below q[i + 16]. x = d (q - 8).
void decode_q4_0(const unsigned char* block, float* x) {
  const float d = f16_at(block);
  for (int i = 0; i < 16; ++i) {
    const int both = block[2 + i];
    x[i] = d * static_cast<float>((both & 15) - 8);
    x[i + 16] = d * static_cast<float>((both >> 4) - 8);
  }
}

/// The factors of 8 groups of 32 elements in Q4_K and Q5_K, 6 bits each.
struct GroupFactors {
  std::array<float, 8> scale, minimum;
};

/// f16 d, dmin; 12 bytes. The first four bytes hold the scales of groups 0 to 3 in their low 6 bits, the next four the minima. Of groups 4
/// to 7, the last four bytes hold the low 4 bits, scale below minimum, and the first eight bytes the high 2 bits, above those of groups 0
/// to 3.
GroupFactors read_factors(const unsigned char* block) {
  const float d = f16_at(block), dmin = f16_at(block + 2);
  const unsigned char *scales = block + 4, *minima = scales + 4, *low = minima + 4;
  GroupFactors factors;
  for (std::size_t i = 0; i < 4; ++i) {
    factors.scale[i] = d * static_cast<float>(scales[i] & 63);
    factors.minimum[i] = dmin * static_cast<float>(minima[i] & 63);
    factors.scale[i + 4] = d * static_cast<float>((low[i] & 15) | (scales[i] >> 6) << 4);
    factors.minimum[i + 4] = dmin * static_cast<float>((low[i] >> 4) | (minima[i] >> 6) << 4);
  }
  return factors;
}

/// Two groups in the low and the high halves of 32 bytes, four times. `fifth`, if any, has a bit for each: bit g of byte i is for element i
/// of group g. x = scale q - minimum.
void decode_groups(const GroupFactors& factors, const unsigned char* q, const unsigned char* fifth, float* x) {
  for (std::size_t group = 0; group < 8; ++group) {
    const unsigned shift = group % 2 * 4;
    const unsigned char* bytes = q + group / 2 * 32;
    for (std::size_t i = 0; i < 32; ++i) {
      unsigned value = bytes[i] >> shift & 15u;
      if (fifth != nullptr) value |= (fifth[i] >> group & 1u) << 4;
      x[group * 32 + i] = factors.scale[group] * static_cast<float>(value) - factors.minimum[group];
    }
  }
}

/// The factors (16 bytes); 4 bits of each element (128 bytes).
void decode_q4_k(const unsigned char* block, float* x) { decode_groups(read_factors(block), block + 16, nullptr, x); }

/// The factors (16 bytes); the fifth bit of each element (32 bytes); 4 bits of each (128 bytes).
void decode_q5_k(const unsigned char* block, float* x) { decode_groups(read_factors(block), block + 48, block + 16, x); }

/// The low 4 bits of 256 elements (128 bytes); their high 2 bits (64 bytes); i8 scales of 16 groups of 16; f16 d. x = d scale (q - 32).
///
/// Each half of the block is four runs of 32 elements: runs 0 and 1 are in the low halves of 64 bytes, runs 2 and 3 in the high halves.
/// 32 bytes hold the high bits, 2 for each run.
void decode_q6_k(const unsigned char* block, float* x) {
  const unsigned char *low = block, *high = block + 128, *scales = block + 192;
  const float d = f16_at(block + 208);
  for (int half = 0; half < 2; ++half) {
    for (int run = 0; run < 4; ++run) {
      for (int i = 0; i < 32; ++i) {
        const int q = (low[half * 64 + run % 2 * 32 + i] >> run / 2 * 4 & 15) | (high[half * 32 + i] >> run * 2 & 3) << 4;
        const int element = half * 128 + run * 32 + i;
        const float scale = d * static_cast<float>(static_cast<signed char>(scales[element / 16]));
        x[element] = scale * static_cast<float>(q - 32);
      }
    }
  }
}

const std::array<BlockFormat, 8>& formats() {
  static const std::array<BlockFormat, 8> all = {{
      {"F32", 0, 1, 4, DType::f32, nullptr},
      {"F16", 1, 1, 2, DType::f16, nullptr},
      {"BF16", 30, 1, 2, DType::bf16, nullptr},
      {"Q8_0", 8, 32, 34, DType::f32, decode_q8_0},
      {"Q4_0", 2, 32, 18, DType::f32, decode_q4_0},
      {"Q4_K", 12, 256, 144, DType::f32, decode_q4_k},
      {"Q5_K", 13, 256, 176, DType::f32, decode_q5_k},
      {"Q6_K", 14, 256, 210, DType::f32, decode_q6_k},
  }};
  return all;
}

}  // namespace

const BlockFormat* block_format(std::uint32_t id) {
  const auto& all = formats();
  const auto found = std::find_if(all.begin(), all.end(), [&](const BlockFormat& format) { return format.id == id; });
  return found == all.end() ? nullptr : &*found;
}

std::string unsupported_format_name(std::uint32_t id) {
  static constexpr std::array<std::pair<std::uint32_t, const char*>, 23> kOthers = {{
      {3, "Q4_1"},    {6, "Q5_0"},     {7, "Q5_1"},   {9, "Q8_1"},    {10, "Q2_K"},  {11, "Q3_K"},  {15, "Q8_K"},   {16, "IQ2_XXS"},
      {17, "IQ2_XS"}, {18, "IQ3_XXS"}, {19, "IQ1_S"}, {20, "IQ4_NL"}, {21, "IQ3_S"}, {22, "IQ2_S"}, {23, "IQ4_XS"}, {24, "I8"},
      {25, "I16"},    {26, "I32"},     {27, "I64"},   {28, "F64"},    {29, "IQ1_M"}, {34, "TQ1_0"}, {39, "MXFP4"},
  }};
  for (const auto& [other, name] : kOthers)
    if (other == id) return name;
  return tw::format("number {}", id);
}

std::string supported_formats() {
  std::vector<std::string> names;
  for (const BlockFormat& format : formats()) names.push_back(format.name);
  return tw::join(names, ", ");
}

void decode_blocks(const BlockFormat& format, std::span<const std::byte> blocks, std::span<float> values) {
  const auto bytes = static_cast<std::size_t>(format.bytes), elements = static_cast<std::size_t>(format.elements);
  if (blocks.size() % bytes != 0 || values.size() != blocks.size() / bytes * elements)
    throw InvalidArgument(tw::format("{} bytes of {} are not {} elements", blocks.size(), format.name, values.size()));
  const auto* block = reinterpret_cast<const unsigned char*>(blocks.data());
  for (std::size_t i = 0; i < values.size(); i += elements, block += bytes) format.decode(block, values.data() + i);
}

}  // namespace tw::models
