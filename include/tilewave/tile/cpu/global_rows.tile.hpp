#pragma once

#include "tilewave/tile/cpu/target.tile.hpp"

// Rows between registers and global memory. Only loops over contiguous elements of the kernel's own types are inlined. Everything else is
// kept out of line, because a kernel is compiled for each instruction set.

#if !TW_ON_GPU

namespace tw::cpu {

/// The row that the next tile will load. It is prefetched while this tile's row is computed: loading, computing and storing happen one
/// after the other, so memory would be idle during the computation.
struct Ahead {
  const u8* row = nullptr;
  int cols = 0, size = 0;
  /// Prefetches columns `col` to col + count - 1.
  TW_INLINE void fetch(int col, int count) const {
    const u8* const end = row + static_cast<i64>(min(col + count, cols)) * size;
    for (const u8* p = row + static_cast<i64>(col) * size; p < end; p += 64) __builtin_prefetch(p, 0, 2);
  }
};

/// The range of `size` indices, counted from `first`, that is inside a dimension of size `limit`.
struct Extent {
  int begin = 0, end = 0;
  constexpr Extent() = default;
  constexpr Extent(int first, int size, int limit)
      : begin(first < 0 ? min(-first, size) : 0), end(limit - first < size ? max(limit - first, 0) : size) {}
  constexpr bool has(int n) const { return n >= begin && n < end; }
};
inline void dots(float* sums, const float* rows, i64 stride, const float* vector, int count, int cols) {
  library().dots_f32(sums, rows, stride, vector, count, cols);
}
inline void dots(float* sums, const bf16* rows, i64 stride, const bf16* vector, int count, int cols) {
  library().dots_bf16(sums, &rows->bits, stride, &vector->bits, count, cols);
}
inline void dots(float* sums, const f16* rows, i64 stride, const f16* vector, int count, int cols) {
  library().dots_f16(sums, &rows->bits, stride, &vector->bits, count, cols);
}

/// Adds atomically; the sum is rounded to T.
template <class T>
TW_INLINE void add_element(T* to, T x) {
  using Bits = conditional<sizeof(T) == 4, u32, u16>;
  Bits* const bits = reinterpret_cast<Bits*>(to);
  Bits before = __atomic_load_n(bits, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(bits, &before,
                                      bit_cast<Bits>(tw::to<T>(static_cast<float>(bit_cast<T>(before)) + static_cast<float>(x))), true,
                                      __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
template <class T>
[[gnu::noinline]] void fill_around(T* to, int size, int begin, int end, T value) {
  for (int c = 0; c < begin; ++c) to[c] = value;
  for (int c = max(begin, end); c < size; ++c) to[c] = value;
}
template <class T, class E>
[[gnu::noinline]] void load_strided(T* to, const E* from, long stride, int n) {
  for (int c = 0; c < n; ++c) to[c] = tw::to<T>(from[c * stride]);
}
template <class E, class T>
[[gnu::noinline]] void store_strided(E* to, const T* from, long stride, int n) {
  for (int c = 0; c < n; ++c) to[c * stride] = tw::to<E>(from[c]);
}
/// Whether convert_row() supports this conversion: between equal types, or one for which the library has a function.
template <class From, class To>
inline constexpr bool converts = is_same<From, To> ||
                                 (is_same<From, float> && (is_same<To, bf16> || is_same<To, f16> || is_same<To, AnyFloat>)) ||
                                 (is_same<To, float> && (is_same<From, bf16> || is_same<From, f16>));
template <class T>
TW_INLINE void convert_row(T* to, const T* from, int n) {
  __builtin_memcpy(to, from, static_cast<unsigned long>(n) * sizeof(T));
}
TW_INLINE void convert_row(float* to, const bf16* from, int n) { library().widen_bf16(to, &from->bits, n); }
TW_INLINE void convert_row(float* to, const f16* from, int n) { library().widen_f16(to, &from->bits, n); }
TW_INLINE void convert_row(bf16* to, const float* from, int n) { library().narrow_bf16(&to->bits, from, n); }
TW_INLINE void convert_row(f16* to, const float* from, int n) { library().narrow_f16(&to->bits, from, n); }
inline void stream_row(float* to, const float* from, int n) { library().stream_f32(to, from, n); }
inline void stream_row(bf16* to, const float* from, int n) { library().stream_bf16(&to->bits, from, n); }
/// Stores `n` elements of one row from (row, col) on, of types that convert_row() supports. f32 values for a large tensor of f32 or bf16
/// bypass the caches.
template <class G, class T>
[[gnu::noinline]] void store_part(const G& to, int row, int col, int i, int j, const T* from, int n) {
  with_type(to, [&]<class Typed>(const Typed& typed) {
    using E = typename Typed::Element;
    E* const target = typed.template at<E>(row, col, i, j);
    if (to.stride_col != 1) return store_strided(target, from, to.stride_col, n);
    if constexpr (is_same<T, float> && (is_same<E, float> || is_same<E, bf16>)) {
      const bool large = static_cast<i64>(to.size_j) * to.size_i * to.rows * to.cols * static_cast<i64>(sizeof(E)) >= kStreamBytes;
      if (large) return stream_row(target, from, n);
    }
    convert_row(target, from, n);
  });
}
/// Stores row r of a tile to a row of the tensor. `cols`: which of the tile's columns are inside the tensor.
template <class F, class G>
TW_INLINE void store_row(const F& from, int r, const G& to, int row, int col0, Extent cols, int i, int j) {
  using T = typename G::Element;
  const auto* const source = from.x + r * F::cols;
  if constexpr (converts<typename F::Element, T>) {
    store_part(to, row, col0 + cols.begin, i, j, source + cols.begin, cols.end - cols.begin);
  } else {
    T* const target = to.template at<T>(row, col0 + cols.begin, i, j);
    if (to.stride_col != 1)
      store_strided(target, source + cols.begin, to.stride_col, cols.end - cols.begin);
    else if (cols.begin == 0 && cols.end == F::cols)
      for (int c = 0; c < F::cols; ++c) target[c] = tw::to<T>(source[c]);
    else
      for (int c = cols.begin; c < cols.end; ++c) target[c - cols.begin] = tw::to<T>(source[c]);
  }
}
template <class T, class G>
TW_INLINE void load_typed_row(T* to, int size, const G& from, int row, int col0, Extent cols, int i, int j, Fill fill) {
  using E = typename G::Element;
  const bool whole = cols.begin == 0 && cols.end == size;
  if (!whole) fill_around(to, size, cols.begin, cols.end, tw::to<T>(fill.value));
  if (cols.begin >= cols.end) return;
  const E* const source = from.template at<const E>(row, col0 + cols.begin, i, j);
  if (from.stride_col != 1)
    load_strided(to + cols.begin, source, from.stride_col, cols.end - cols.begin);
  else if constexpr (converts<E, T>)
    convert_row(to + cols.begin, source, cols.end - cols.begin);
  else if (whole)
    for (int c = 0; c < size; ++c) to[c] = tw::to<T>(source[c]);
  else
    for (int c = 0; c < cols.end - cols.begin; ++c) to[cols.begin + c] = tw::to<T>(source[c]);
}
template <class G>
[[gnu::noinline]] void load_any_row(float* to, int size, const G& from, int row, int col0, Extent cols, int i, int j, Fill fill) {
  with_type(from, [&](const auto& typed) { load_typed_row(to, size, typed, row, col0, cols, i, j, fill); });
}
template <class T, class G>
TW_INLINE void load_row(T* to, int size, const G& from, int row, int col0, Extent cols, int i, int j, Fill fill) {
  static_assert(!is_awaited<G>, TW_AWAITED_LOAD);
  if constexpr (G::any_float) {
    load_any_row(to, size, from, row, col0, cols, i, j, fill);
  } else {
    load_typed_row(to, size, from, row, col0, cols, i, j, fill);
  }
}

}  // namespace tw::cpu

#endif  // !TW_ON_GPU
