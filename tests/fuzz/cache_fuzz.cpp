// Entries of the cache and of packs.

#include <cstdint>
#include <cstdlib>
#include <string>

#include "runtime/cache.hpp"
#include "runtime/sha256.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  tw::decode_entry("key", bytes);

  // No mutation finds a checksum: give it the right one.
  const tw::Sha256::Digest digest = tw::Sha256().add(bytes).finish();
  const auto kernel = tw::decode_entry("key", "TWKERN01" + std::string(digest.begin(), digest.end()) + bytes);
  if (!kernel) return 0;
  const std::string again = tw::encode_entry("key", *kernel);
  const auto same = tw::decode_entry("key", again);
  if (!same || tw::encode_entry("key", *same) != again) std::abort();
  return 0;
}
