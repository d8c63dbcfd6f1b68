#pragma once

// Rows of f32 to rows of tensors, as library.tile.hpp says. Included by files that are compiled with flags of their own, so everything has
// internal linkage. A set is given as a class V:
//   stream_line(float* to, const float* from)                16 elements past the caches; `to` is 64-byte aligned
//   stream_narrowed(unsigned short* to, const float* from)   32 elements to bf16, likewise
//   store_narrowed(unsigned short* to, const float* from)    the same with ordinary stores, at any address

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

}  // namespace
}  // namespace tw::cpu
