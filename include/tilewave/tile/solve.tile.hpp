#pragma once

#include "tilewave/tile/language.tile.hpp"

// Small solves and transpositions over Buffers, written once for all targets.

namespace tw {

/// to(col, row) = from(row, col), for Fragments, through `buffer`, which has the shape of `to`. The buffer may be stored to again after a
/// barrier.
TW_INLINE void transpose(auto& block, auto& from, auto& to, const auto& buffer) {
  block.store_transposed(from, buffer);
  block.sync();
  block.load(to, buffer);
}

/// Whether an element of a lower triangular matrix is between two neighbouring blocks of `size` rows, a power of two, of which the first
/// has an even number: those that blocks of twice the size merge. Every element below the diagonal is so for one size.
TW_INLINE constexpr bool couples_blocks(int row, int col, int size) { return (row & size) != 0 && ((row ^ col) & ~(size - 1)) == size; }

/// An N x N matrix of f32 in shared memory as the sum of `Parts` of T. Two of bf16 leave out 2^-17 of each element, three 2^-25.
template <class Target, class T, int N, int Parts>
struct SplitMatrix {
  Buffer<Target, T, N, N> part;
  SplitMatrix<Target, T, N, Parts - 1> rest;
  explicit constexpr SplitMatrix(auto& block) : part(block), rest(block) {}

  /// Part n. Part 0 is the largest.
  template <int n>
  TW_INLINE const auto& at() const {
    if constexpr (n == 0)
      return part;
    else
      return rest.template at<n - 1>();
  }
};
template <class Target, class T, int N>
struct SplitMatrix<Target, T, N, 0> {
  explicit constexpr SplitMatrix(auto&) {}
};

namespace detail {
/// Products of the target take operands of f32 as they are, so that nothing needs to be split: the CPU's do.
template <class Target>
concept MultipliesF32 = requires {
  requires Target::multiplies_f32;
};

/// Other threads and tensor cores see it after a fence and a barrier.
template <class Target, class T, int N, int Parts>
TW_INLINE void store_split(auto& block, const auto& matrix, const SplitMatrix<Target, T, N, Parts>& to) {
  block.store(matrix, to.part);
  if constexpr (Parts > 1) {
    auto rest = matrix;
    block.map(rest, [](auto x) { return x - tw::to<float>(tw::to<T>(x)); });
    store_split(block, rest, to.rest);
  }
}
/// product = a b without the products of small parts: those of parts whose numbers add up to `sum`, from part `first` of a on, then those
/// of larger parts.
template <int sum, int first, bool overwrite>
TW_INLINE void multiply_parts(auto& block, auto& product, const auto& a, const auto& b) {
  block.mma(product, a.template at<first>(), view<Contract::rows>(b.template at<sum - first>()), overwrite);
  if constexpr (first < sum)
    multiply_parts<sum, first + 1, false>(block, product, a, b);
  else if constexpr (sum > 0)
    multiply_parts<sum - 1, 0, false>(block, product, a, b);
}
template <class Target, class T, int N, int Parts>
TW_INLINE void multiply_split(auto& block, auto& product, const SplitMatrix<Target, T, N, Parts>& a,
                              const SplitMatrix<Target, T, N, Parts>& b) {
  multiply_parts<Parts - 1, 0, true>(block, product, a, b);
  block.wait(leave<0>, product);
}
}  // namespace detail

/// What invert_unit_lower() needs in shared memory. `Parts`: of bf16, into which it splits operands, 2 or 3. On the CPU they stay whole.
template <class Target, int N, int Parts = 2>
struct InversionMemory {
  using Split = conditional<detail::MultipliesF32<Target>, SplitMatrix<Target, float, N, 1>, SplitMatrix<Target, bf16, N, Parts>>;
  Buffer<Target, float, N, N> matrix;
  Split inverse, coupling;
  explicit constexpr InversionMemory(auto& block) : matrix(block), inverse(block), coupling(block) {}
};

/// Inverts an N x N Fragment of f32, where N is 16, 32, 64, ... Only the part below the diagonal is read: the matrix has ones on the
/// diagonal and zeros above it. All threads call it, after a barrier if `memory` has been used before.
///
/// Blocks of 16 on the diagonal are inverted by substitution, one thread for each column. Then neighbouring blocks are merged, which
/// doubles their size: the inverse of {B1, 0; L, B2} has -inv(B2) L inv(B1) below the diagonal. Those are products of the whole matrix, in
/// which only the blocks of a size or what couples them is not zero. A GPU's operands are split into sums of bf16.
template <class Target, int N, int Parts>
TW_INLINE void invert_unit_lower(auto& block, auto& x, const InversionMemory<Target, N, Parts>& memory) {
  constexpr int base = 16;
  static_assert(N % base == 0 && (N / base & (N / base - 1)) == 0, "invert_unit_lower() is for matrices of 16, 32, 64, ... rows");
  const auto& matrix = memory.matrix;
  block.store(x, matrix);
  block.sync();
  // Column j of a block's inverse goes into its row j, above the diagonal, because other threads still read the part below.
  block.update(matrix, N, [&](int j) {
    const int first = j / base * base, column = j - first;
    decltype(matrix.at(0, 0) + 0.0f) inverse[base];
    TW_UNROLL
    for (int i = 0; i < base; ++i) {
      inverse[i] = i == column ? 1.0f : 0.0f;
      TW_UNROLL
      for (int k = 0; k < i; ++k) inverse[i] -= matrix.at(first + i, first + k) * inverse[k];
    }
    TW_UNROLL
    for (int i = 0; i < base; ++i)
      if (i > column) matrix.at(j, first + i) = inverse[i];
  });
  block.update(matrix, N, [&](int j) {
    const int first = j / base * base, column = j - first;
    TW_UNROLL
    for (int i = 0; i < base; ++i) {
      if (i > column) matrix.at(first + i, j) = matrix.at(j, first + i);
      if (i == column) matrix.at(j, j) = 1.0f;
    }
  });
  block.load(x, matrix);
  const auto a = x;  // between the blocks
  block.for_each(x, [](int row, int col, auto& value) {
    if (row / base != col / base || col > row) value = 0.0f;
  });
  TW_NO_UNROLL
  for (int size = base; size < N; size *= 2) {
    auto product = a;
    block.for_each(product, [size](int row, int col, auto& value) { value = couples_blocks(row, col, size) ? -value : 0.0f; });
    detail::store_split(block, x, memory.inverse);
    detail::store_split(block, product, memory.coupling);
    block.fence();
    block.sync();
    detail::multiply_split(block, product, memory.inverse, memory.coupling);
    block.sync();
    detail::store_split(block, product, memory.coupling);
    block.fence();
    block.sync();
    detail::multiply_split(block, product, memory.coupling, memory.inverse);
    block.map(x, product, [](auto inverse, auto between) { return inverse + between; });
    block.sync();
  }
}

}  // namespace tw
