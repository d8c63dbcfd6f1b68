#pragma once

// Rows of f32 to rows of tensors and back, as library.tile.hpp says. Included by files that are compiled with flags of their own, so
// everything has internal linkage. A set is given as a class V:
//   stream_line(float* to, const float* from)                16 elements past the caches; `to` is 64-byte aligned
//   stream_narrowed(unsigned short* to, const float* from)   32 elements to bf16, likewise
//   store_narrowed(unsigned short* to, const float* from)    the same with ordinary stores, at any address
//   store_f16(unsigned short* to, const float* from)         kWidth elements to f16
//   store_widened(float* to, const unsigned short* from)     kWidth elements of bf16

namespace tw::cpu {
namespace {

inline void narrow_one(unsigned short& to, float from) {
  const unsigned bits = __builtin_bit_cast(unsigned, from);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  to = static_cast<unsigned short>((nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/// one(k) for the elements before the first whole line of 64 bytes and after the last, line(k) for the first element of each of these.
template <class Element, class One, class Line>
void in_lines(const Element* to, long n, One one, Line line) {
  constexpr long kLine = 64 / static_cast<long>(sizeof(Element));
  const long before = static_cast<long>(-reinterpret_cast<unsigned long long>(to) % 64 / sizeof(Element)), head = before < n ? before : n;
  long k = 0;
  for (; k < head; ++k) one(k);
  for (; k + kLine <= n; k += kLine) line(k);
  for (; k < n; ++k) one(k);
}

template <class V>
void stream_f32(float* to, const float* from, long n) {
  in_lines(
      to, n, [&](long k) { to[k] = from[k]; }, [&](long k) { V::stream_line(to + k, from + k); });
}

template <class V>
void stream_bf16(unsigned short* to, const float* from, long n) {
  in_lines(
      to, n, [&](long k) { narrow_one(to[k], from[k]); }, [&](long k) { V::stream_narrowed(to + k, from + k); });
}

template <class V>
void narrow_bf16(unsigned short* to, const float* from, long n) {
  long k = 0;
  for (; k + 32 <= n; k += 32) V::store_narrowed(to + k, from + k);
  for (; k < n; ++k) narrow_one(to[k], from[k]);
}

/// whole(to, from) for `width` elements each; the last, incomplete ones go through memory of that size.
template <int width, class To, class From, class Whole>
void in_vectors(To* to, const From* from, long n, Whole whole) {
  long k = 0;
  for (; k + width <= n; k += width) whole(to + k, from + k);
  if (k == n) return;
  From last[width] = {};
  To converted[width];
  const unsigned long left = static_cast<unsigned long>(n - k);
  __builtin_memcpy(last, from + k, left * sizeof(From));
  whole(converted, last);
  __builtin_memcpy(to + k, converted, left * sizeof(To));
}

template <class V>
void narrow_f16(unsigned short* to, const float* from, long n) {
  in_vectors<V::kWidth>(to, from, n, [](unsigned short* t, const float* f) { V::store_f16(t, f); });
}

template <class V>
void widen_bf16(float* to, const unsigned short* from, long n) {
  in_vectors<V::kWidth>(to, from, n, [](float* t, const unsigned short* f) { V::store_widened(t, f); });
}

}  // namespace
}  // namespace tw::cpu
