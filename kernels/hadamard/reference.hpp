#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tw::kernels::hadamard {

/// A square matrix of 1 and -1, row by row.
struct SignMatrix {
  int order;
  std::vector<int> signs;
  int operator()(int row, int col) const { return signs[static_cast<std::size_t>(row * order + col)]; }
};

/// 1 if a - b is a square of the field of `q` elements, -1 if not, 0 if a is b: found by squaring all elements. A field of 9 has a + b I
/// with I * I = -1 as its element 3 a + b.
inline int quadratic_character(int q, int a, int b) {
  if (a == b) return 0;
  for (int root = 1; root < q; ++root) {
    if (q == 9) {
      const int real = root / 3, imaginary = root % 3;
      const int square_real = (real * real + 2 * imaginary * imaginary) % 3, square_imaginary = 2 * real * imaginary % 3;
      if (square_real == (a / 3 - b / 3 + 3) % 3 && square_imaginary == (a % 3 - b % 3 + 3) % 3) return 1;
    } else if (root * root % q == (a - b + q) % q) {
      return 1;
    }
  }
  return -1;
}

/// The matrix of order 1, 12, 20 or 28: [C + I, C - I; C - I, -C - I] with the conference matrix C.
inline SignMatrix small_matrix(int order) {
  if (order == 1) return {1, {1}};
  const int half = order / 2, q = half - 1;
  const auto conference = [q](int i, int j) {
    if (i == 0 || j == 0) return i == j ? 0 : 1;
    return quadratic_character(q, i - 1, j - 1);
  };
  SignMatrix h{order, std::vector<int>(static_cast<std::size_t>(order * order))};
  for (int i = 0; i < order; ++i) {
    for (int j = 0; j < order; ++j) {
      const int c = conference(i % half, j % half), one = i % half == j % half ? 1 : 0;
      h.signs[static_cast<std::size_t>(i * order + j)] = i < half && j < half ? c + one : i >= half && j >= half ? -c - one : c - one;
    }
  }
  return h;
}

/// scale (x * factors) H of each row of [rows, n], computed in arithmetic of type Real; factors may be empty. H is the Kronecker product of
/// `small` and the Walsh-Hadamard matrix.
template <class Real>
std::vector<Real> plain(std::span<const float> x, std::int64_t n, const SignMatrix& small, std::span<const float> factors, Real scale) {
  const auto cols = static_cast<std::size_t>(n), order = static_cast<std::size_t>(small.order), power = cols / order;
  std::vector<Real> y(x.begin(), x.end());
  for (std::size_t row = 0; row < x.size(); row += cols) {
    Real* const to = y.data() + row;
    for (std::size_t c = 0; c < factors.size(); ++c) to[c] *= static_cast<Real>(factors[c]);
    for (std::size_t step = 1; step < power; step *= 2) {
      for (std::size_t c = 0; c < cols; ++c) {
        if ((c % power & step) != 0) continue;
        const Real low = to[c], high = to[c + step];
        to[c] = low + high;
        to[c + step] = low - high;
      }
    }
    for (std::size_t b = 0; b < power; ++b) {
      std::vector<Real> column(order);
      for (std::size_t a = 0; a < order; ++a) column[a] = to[a * power + b];
      for (std::size_t c = 0; c < order; ++c) {
        Real sum = 0;
        for (std::size_t a = 0; a < order; ++a) sum += column[a] * static_cast<Real>(small(static_cast<int>(a), static_cast<int>(c)));
        to[c * power + b] = scale * sum;
      }
    }
  }
  return y;
}

}  // namespace tw::kernels::hadamard
