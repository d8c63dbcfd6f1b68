#include "tilewave/tile/cpu/stream.tile.hpp"

#include "runtime/host.hpp"

namespace tw::cpu {

i64 stream_bytes() {
  // 32 MB where the system does not say.
  static const i64 bytes = host_cache_bytes() > 0 ? static_cast<i64>(host_cache_bytes()) : i64{32} << 20;
  return bytes;
}

}  // namespace tw::cpu
