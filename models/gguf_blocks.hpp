#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tilewave/dtype.hpp"

namespace tw::models {

/// How a GGUF file stores the elements of a tensor: in blocks of a fixed number of elements and bytes, each with scales of its own.
struct BlockFormat {
  std::string name;  ///< "Q4_K"
  std::uint32_t id;  ///< in a file
  int elements;      ///< of a block
  int bytes;         ///< of a block
  DType dtype;       ///< of the elements after decoding; f32 for blocks with scales
  /// Decodes one block. Null if the elements are stored as `dtype`.
  void (*decode)(const unsigned char* block, float* values);
};

/// The format with this id: F32, F16, BF16, Q8_0, Q4_0, Q4_K, Q5_K or Q6_K. Null for any other.
const BlockFormat* block_format(std::uint32_t id);

/// The name of a format that is not supported, or the number.
std::string unsupported_format_name(std::uint32_t id);

/// "F32, F16, ..."
std::string supported_formats();

/// Decodes whole blocks of a format that has decode().
void decode_blocks(const BlockFormat& format, std::span<const std::byte> blocks, std::span<float> values);

}  // namespace tw::models
