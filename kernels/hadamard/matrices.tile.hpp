#pragma once

#include "tilewave/tile/types.tile.hpp"

// Hadamard transforms of a few numbers, or of as many tuples of numbers.

namespace tw::kernels::hadamard {

/// `Count` numbers that are treated alike.
template <class T, int Count>
struct Columns {
  T x[Count];

  /// += sign * other.
  TW_INLINE void add(float sign, const Columns& other) {
    for (int k = 0; k < Count; ++k) x[k] += sign * other.x[k];
  }
};

/// a, b = a + b, a - b.
template <class T, int Count>
TW_INLINE void butterfly(Columns<T, Count>& a, Columns<T, Count>& b) {
  for (int k = 0; k < Count; ++k) {
    const T low = a.x[k], high = b.x[k];
    a.x[k] = low + high;
    b.x[k] = low - high;
  }
}

/// x H of the Walsh-Hadamard matrix, whose order is a power of two.
template <class X, int Count>
TW_INLINE void walsh_hadamard(X (&x)[Count]) {
  TW_UNROLL
  for (int step = 1; step < Count; step *= 2) {
    TW_UNROLL
    for (int n = 0; n < Count; ++n) {
      if ((n & step) == 0) butterfly(x[n], x[n + step]);
    }
  }
}

/// 1 if the i-th minus the j-th element of the field of `q` elements is a square, -1 if not, 0 if i is j. q is 5, 9 or 13. The elements
/// of the field of 9 are a + b I, with a and b modulo 3 and I * I = -1, and number 3 a + b. Their squares other than 0 are 1, -1, I and -I.
constexpr int character(int q, int i, int j) {
  if (i == j) return 0;
  if (q == 9) return (i / 3 == j / 3) != (i % 3 == j % 3) ? 1 : -1;
  const int difference = (i - j + q) % q;
  for (int root = 1; root < q; ++root)
    if (root * root % q == difference) return 1;
  return -1;
}
template <int q>
struct Characters {
  float of[q][q] = {};
  constexpr Characters() {
    for (int i = 0; i < q; ++i)
      for (int j = 0; j < q; ++j) of[i][j] = static_cast<float>(character(q, i, j));
  }
};
template <int q>
inline constexpr Characters<q> kCharacters;

/// out = x C, where C is the symmetric conference matrix of order q + 1: a border of ones, 0 on the diagonal, and the characters. C C is
/// q times the identity.
template <class X, int Count>
TW_INLINE void conference(const X (&x)[Count], X (&out)[Count]) {
  constexpr int q = Count - 1;
  out[0] = x[1];
  TW_UNROLL
  for (int n = 2; n <= q; ++n) out[0].add(1, x[n]);
  TW_UNROLL
  for (int i = 0; i < q; ++i) {
    X sum = x[0];
    TW_UNROLL
    for (int n = 0; n < q; ++n)
      if (n != i) sum.add(kCharacters<q>.of[i][n], x[n + 1]);
    out[i + 1] = sum;
  }
}

/// x H of the Hadamard matrix of order `Count`, 12, 20 or 28, by Paley's second construction: H = [C + I, C - I; C - I, -C - I]. It is
/// symmetric. The two products with C take half of the additions that one with H would.
template <class X, int Count>
TW_INLINE void small_hadamard(X (&x)[Count]) {
  constexpr int half = Count / 2;
  X sum[half], difference[half], sum_c[half], difference_c[half];
  TW_UNROLL
  for (int n = 0; n < half; ++n) {
    sum[n] = x[n];
    difference[n] = x[n + half];
    butterfly(sum[n], difference[n]);
  }
  conference(sum, sum_c);
  conference(difference, difference_c);
  TW_UNROLL
  for (int n = 0; n < half; ++n) {
    x[n] = sum_c[n];
    x[n].add(1, difference[n]);
    x[n + half] = difference_c[n];
    x[n + half].add(-1, sum[n]);
  }
}
template <class X>
TW_INLINE void small_hadamard(X (&)[1]) {}

}  // namespace tw::kernels::hadamard
