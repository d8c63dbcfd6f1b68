#pragma once

#include "tilewave/tile/language.tile.hpp"

#if !TW_ON_GPU

namespace tw::cpu {

typedef float Eight __attribute__((vector_size(32)));
// By reference: how such vectors are returned depends on the instruction set.
TW_INLINE void load_eight(Eight& v, const float* x) { __builtin_memcpy(&v, x, sizeof v); }
TW_INLINE void store_eight(float* x, const Eight& v) { __builtin_memcpy(x, &v, sizeof v); }

/// Replaces every run of kSpan of the `count` numbers by its Walsh-Hadamard transform.
template <int kSpan>
TW_INLINE void hadamard(float* x, int count) {
  // Numbers less than 8 apart are in one vector. They are swapped, and the sign of the upper one of each pair is changed.
  if constexpr (kSpan >= 2) {
    for (int i = 0; i < count; i += 8) {
      Eight v;
      load_eight(v, x + i);
      v = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6) + v * Eight{1, -1, 1, -1, 1, -1, 1, -1};
      if constexpr (kSpan >= 4) v = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5) + v * Eight{1, 1, -1, -1, 1, 1, -1, -1};
      if constexpr (kSpan >= 8) v = __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3) + v * Eight{1, 1, 1, 1, -1, -1, -1, -1};
      store_eight(x + i, v);
    }
  }
  // Two steps in one pass: half of the loads and stores.
  int step = 8;
  for (; 4 * step <= kSpan; step *= 4) {
    for (int first = 0; first < count; first += 4 * step) {
      for (int i = first; i < first + step; i += 8) {
        Eight a, b, c, d;
        load_eight(a, x + i);
        load_eight(b, x + i + step);
        load_eight(c, x + i + 2 * step);
        load_eight(d, x + i + 3 * step);
        const Eight sum = a + b, difference = a - b, next_sum = c + d, next_difference = c - d;
        store_eight(x + i, sum + next_sum);
        store_eight(x + i + step, difference + next_difference);
        store_eight(x + i + 2 * step, sum - next_sum);
        store_eight(x + i + 3 * step, difference - next_difference);
      }
    }
  }
  if (2 * step <= kSpan) {
    for (int first = 0; first < count; first += 2 * step) {
      for (int i = first; i < first + step; i += 8) {
        Eight a, b;
        load_eight(a, x + i);
        load_eight(b, x + i + step);
        store_eight(x + i, a + b);
        store_eight(x + i + step, a - b);
      }
    }
  }
}

}  // namespace tw::cpu

#endif  // !TW_ON_GPU
