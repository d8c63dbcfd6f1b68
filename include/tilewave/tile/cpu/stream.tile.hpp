#pragma once

#include "tilewave/tile/types.tile.hpp"

// Stores that go past the caches: results larger than the last-level cache would only push out what is still needed, and an ordinary store
// reads the line first.

#if !TW_ON_GPU

namespace tw::cpu {

/// Tensors of at least this many bytes are streamed: the size of the last-level cache.
i64 stream_bytes();

namespace detail {
typedef float Quad __attribute__((vector_size(16), may_alias));

TW_INLINE void stream_16_bytes(void* to, const void* from) {
#if defined(__clang__)
  __builtin_nontemporal_store(*static_cast<const Quad*>(from), static_cast<Quad*>(to));
#elif defined(__SSE2__)
  __builtin_ia32_movntps(static_cast<float*>(to), *static_cast<const Quad*>(from));
#else
  __builtin_memcpy(to, from, 16);
#endif
}
}  // namespace detail

/// to[k] = from[k], k < n, rounded to T. stream_fence() after the last, before another thread reads them.
template <class T>
TW_INLINE void stream(T* to, const float* from, int n) {
  constexpr int piece = 64 / static_cast<int>(sizeof(T));  // a line of the cache
  alignas(64) T line[piece];
  int k = 0;
  for (; k < n && reinterpret_cast<u64>(to + k) % 64 != 0; ++k) to[k] = tw::to<T>(from[k]);
  for (; k + piece <= n; k += piece) {
    for (int l = 0; l < piece; ++l) line[l] = tw::to<T>(from[k + l]);
    for (int l = 0; l < 4; ++l) detail::stream_16_bytes(reinterpret_cast<u8*>(to + k) + l * 16, reinterpret_cast<const u8*>(line) + l * 16);
  }
  for (; k < n; ++k) to[k] = tw::to<T>(from[k]);
}

TW_INLINE void stream_fence() {
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#endif
}

}  // namespace tw::cpu

#endif  // !TW_ON_GPU
