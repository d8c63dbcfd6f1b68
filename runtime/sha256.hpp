#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tw {

/// SHA-256 (FIPS 180-4) with incremental input.
class Sha256 {
 public:
  using Digest = std::array<std::uint8_t, 32>;

  Sha256& add(std::string_view bytes);
  /// The length, then the bytes: two different lists of fields never give the same stream of bytes.
  Sha256& add_field(std::string_view bytes);
  /// Ends the message. The object cannot be used afterwards.
  Digest finish();

 private:
  void compress(const std::uint8_t* block);

  std::array<std::uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<std::uint8_t, 64> pending_ = {};
  std::size_t pending_size_ = 0;
  std::uint64_t total_ = 0;
};

/// Lower-case hexadecimal digits.
std::string hex(const Sha256::Digest& digest);

}  // namespace tw
