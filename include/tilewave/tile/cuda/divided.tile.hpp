#pragma once

#include "tilewave/tile/cuda/code_pairs.tile.hpp"
#include "tilewave/tile/cuda/fragment.tile.hpp"
#include "tilewave/tile/cuda/mma.tile.hpp"

// Products with a few columns, whose time is that of reading the left operand: the warps divide its columns among them, so that a block
// needs only 16 rows of it. In shared memory each warp's columns are a tile of their own.

namespace tw::cuda {

/// The row, of 8, that row lane / 4 of mma.sync stands for: its number with the bits in reverse order. Lanes that read pieces of 16 bytes
/// together, four for each of two rows, then read rows 4 apart, and those of 8 bytes, of four rows, read rows 2 apart: different banks of
/// swizzled lines.
TW_INLINE constexpr int divided_row(int lane) { return (lane >> 4 & 1) | (lane >> 2 & 2) | (lane & 4); }

/// R x N sums of each warp: those over its own columns. A thread holds them as mma.sync leaves them, for rows in the order of
/// divided_row().
template <int R, int N, int Warps>
struct DividedSums {
  static_assert(R % 16 == 0 && N % 8 == 0, TW_DIVIDED_SUMS);
  static constexpr int rows = R;
  static constexpr int cols = N;
  static constexpr int warps = Warps;
  static constexpr int size = R * N / 32;
  float x[size];  ///< four for each 16 rows and 8 columns
};

/// For each of N rows, the sum over the warp's columns of the elements' squares: four lanes hold a part each.
template <int N, int Warps>
struct DividedSquares {
  static_assert(N % 8 == 0, TW_DIVIDED_SUMS);
  static constexpr int warps = Warps;
  float x[N / 8];
};

/// The first or the second of the two 16-bit floats in a register.
template <class T>
TW_INLINE float half_of(u32 pair, int which) {
  return static_cast<float>(bit_cast<T>(static_cast<u16>(pair >> which * 16)));
}

/// N rows of C columns: each warp holds its own columns. Its lanes hold 16 bytes of every 64, which is the order of a sum's terms here.
template <class T, int N, int C, int Warps>
struct DividedOperand {
  static constexpr int width = 16 / static_cast<int>(sizeof(T));  ///< columns of a lane, neighbours, of every `run`
  static constexpr int run = 4 * width;
  static_assert((sizeof(T) == 2 || is_same<T, i8>)&&N % 8 == 0 && C % (run * Warps) == 0, TW_DIVIDED_OPERAND);
  static constexpr int rows = N;
  static constexpr int cols = C;
  static constexpr int warps = Warps;
  static constexpr int share = C / Warps;  ///< columns of a warp
  using Element = T;
  u32 x[share / run][N / 8][4];

  /// The lane's first column of the warp's n-th run.
  TW_INLINE static constexpr int col(const Position& p, int n) { return p.block_warp() * share + n * run + p.lane % 4 * width; }
};

/// Rows row0 to row0 + N - 1 and columns from col0 on; zeros outside the tensor. `kWhole`: its rows are whole pieces.
template <bool kWhole, class T, int N, int C, int Warps, class G>
TW_INLINE void load_divided(const Position& at, DividedOperand<T, N, C, Warps>& to, const G& from, int row0, int col0, int i, int j) {
  using D = DividedOperand<T, N, C, Warps>;
  const int row = row0 + at.lane / 4, col = col0 + D::col(at, 0);
  const auto for_pieces = [&](auto load) {
    TW_UNROLL
    for (int r = 0; r < N / 8; ++r) {
      TW_UNROLL
      for (int n = 0; n < D::share / D::run; ++n) load(r * 8, n * D::run, to.x[n][r]);
    }
  };
  for_pieces([](int, int, u32* words) {
    TW_UNROLL
    for (int k = 0; k < 4; ++k) words[k] = 0;
  });
  // One branch around all pieces, so that the loads are in flight together and the path for other tensors is short.
  if constexpr (is_polled<G>) {
    const T* const first = from.template piece_at<const T>(row, col, i, j);
    for_pieces([&](int r, int n, u32* words) {
      ptx::load_relaxed_16_if(from.inside(row + r, col + n), first + (r * from.stride_row + n), words);
    });
    TW_UNROLL
    for (int r = 0; r < N / 8; ++r) {
      TW_UNROLL
      for (int n = 0; n < D::share / D::run; ++n) from.see(to.x[n][r]);
    }
  } else if (kWhole || (from.template whole_pieces<T, D::width>() && col0 % D::width == 0)) {
    const T* const first = from.template piece_at<const T>(row, col, i, j);
    for_pieces([&](int r, int n, u32* words) { ptx::load_16_if(from.inside(row + r, col + n), first + (r * from.stride_row + n), words); });
  } else {
    TW_NO_UNROLL
    for (int k = 0; k < D::width; ++k) {
      for_pieces([&](int r, int n, u32* words) {
        u32 element = 0;
        const bool inside = from.inside(row + r, col + n + k);
        const T* const place = from.template at<const T>(row + r, col + n + k, i, j);
        if constexpr (sizeof(T) == 2)
          ptx::load_2_if(inside, place, element);
        else
          ptx::load_1_if(inside, place, element);
        TW_UNROLL
        for (int word = 0; word < 4; ++word)
          words[word] = ptx::permute_bytes(words[word], word < 3 ? words[word + 1] : element, sizeof(T) == 2 ? 0x5432u : 0x4321u);
      });
    }
  }
}

/// operand(n, c) = x(c) for all n, where the vectors hold x one after the other.
template <class T, int N, int C, int Warps, class V, int Count>
TW_INLINE void load_divided(const Position& at, DividedOperand<T, N, C, Warps>& to, const V (&vectors)[Count]) {
  using D = DividedOperand<T, N, C, Warps>;
  static_assert(Count * V::size == C && V::size % D::run == 0, TW_DIVIDED_VECTORS);
  TW_UNROLL
  for (int n = 0; n < D::share / D::run; ++n) {
    const int col = D::col(at, n);
    ptx::load_shared_16(ptx::address(vectors[col / V::size].x + col % V::size), to.x[n][0]);
    TW_UNROLL
    for (int r = 1; r < N / 8; ++r) {
      TW_UNROLL
      for (int k = 0; k < 4; ++k) to.x[n][r][k] = to.x[n][0][k];
    }
  }
}

/// operand(n, c) *= factors(n % 8, c), rounded to T.
template <class T, int N, int C, int Warps>
TW_INLINE void scale_divided(DividedOperand<T, N, C, Warps>& operand, const DividedOperand<T, 8, C, Warps>& factors) {
  using D = DividedOperand<T, N, C, Warps>;
  TW_UNROLL
  for (int i = 0; i < D::share / D::run * N / 2; ++i) {
    u32& pair = operand.x[i / (N / 2)][i / 4 % (N / 8)][i % 4];
    constexpr u32 zeros = 0x80008000;  // -0, which changes no product
    pair = multiply_add_pairs<T>(pair, factors.x[i / (N / 2)][0][i % 4], zeros);
  }
}
/// squares(n) += the sum over the warp's columns of operand(n, c)^2.
template <class T, int N, int C, int Warps>
TW_INLINE void add_squares_divided(DividedSquares<N, Warps>& squares, const DividedOperand<T, N, C, Warps>& operand) {
  using D = DividedOperand<T, N, C, Warps>;
  TW_UNROLL
  for (int i = 0; i < D::share / D::run * N; ++i) {
    const float x = half_of<T>(operand.x[i / N][i / 8 % (N / 8)][i / 2 % 4], i % 2);
    squares.x[i / 8 % (N / 8)] += x * x;
  }
}

/// sums(r, n) += the sum over the warp's columns of a(r, c) * operand(n, c), where a is the warp's R rows of the tile: one after the other,
/// or in groups of 8, the first group of all warps before the second.
template <bool kGroups = false, class T, int R, int N, int C, int Warps, class S>
TW_INLINE void add_divided([[maybe_unused]] const Position& at, [[maybe_unused]] DividedSums<R, N, Warps>& sums,
                           [[maybe_unused]] const S& tile, [[maybe_unused]] const DividedOperand<T, N, C, Warps>& operand) {
  static_assert(S::rows == R * Warps && S::cols * Warps == C && is_same<typename S::Element, T>, TW_DIVIDED_TILE);
#if TW_ON_GPU
  float odd[R * N / 32] = {};  // a product waits for the one before that adds to the same sums
  const int row = at.block_warp() * (kGroups ? 8 : R) + divided_row(at.lane), col = at.lane % 4 * operand.width;
  constexpr int group = kGroups ? Warps * 8 : 8;  // rows from one group of 8 to the next
  TW_UNROLL
  for (int n = 0; n < S::cols / 32; ++n) {
    TW_UNROLL
    for (int r = 0; r < R; r += 16) {
      u32 upper[4], lower[4];  // 8 neighbours each, of a row and the one 8 below
      ptx::load_shared_16(ptx::address(tile.bytes) + static_cast<u32>(S::offset(row + r / 8 * group, n * 32 + col)), upper);
      ptx::load_shared_16(ptx::address(tile.bytes) + static_cast<u32>(S::offset(row + (r / 8 + 1) * group, n * 32 + col)), lower);
      TW_UNROLL
      for (int k = 0; k < 4; k += 2) {  // the order of columns within a product is free, as long as both operands have the same
        const u32 left[4] = {upper[k], lower[k], upper[k + 1], lower[k + 1]};
        TW_UNROLL
        for (int column = 0; column < N / 8; ++column)
          Mma<T>::add((k == 0 ? sums.x : odd) + (r / 16 * (N / 8) + column) * 4, left, operand.x[n][column] + k);
      }
    }
  }
  TW_UNROLL
  for (int i = 0; i < sums.size; ++i) sums.x[i] += odd[i];
#endif
}

/// Writes every warp's sums(r, n) to memory[warp][n][r].
template <int R, int N, int Warps, class Sync>
TW_INLINE void share_divided(const Position& at, const DividedSums<R, N, Warps>& sums, float* memory, Sync sync) {
  sync();  // the previous sums have been read
  TW_UNROLL
  for (int i = 0; i < sums.size; ++i) {
    const int tile = i / 4, r = tile / (N / 8) * 16 + divided_row(at.lane) + i % 4 / 2 * 8,
              n = tile % (N / 8) * 8 + at.lane % 4 * 2 + i % 2;
    memory[at.block_warp() * R * N + n * R + r] = sums.x[i];
  }
  sync();
}
/// to(n, r) = the sum of what the warps have shared for row `first` + r.
template <int R, int N, int Warps, class F>
TW_INLINE void add_shares(const Position& at, F& to, int first, const float* memory) {
  TW_UNROLL
  for (int i = 0; i < F::size; ++i) {
    to.x[i] = 0;
    if (F::rows > N && F::row(at, i) >= N) continue;
    const float* const from = memory + F::row(at, i) * R + first + F::col(at, i);
    TW_UNROLL
    for (int warp = 0; warp < Warps; ++warp) to.x[i] += from[warp * R * N];
  }
}

/// to(n, r) = the sum of the warps' sums(r, n), in the order of the warps. Rows of `to` from N on become zeros: the threads of a block may
/// be more than the sums.
template <int R, int N, int Warps, class F, class Sync>
TW_INLINE void complete_divided(const Position& at, const DividedSums<R, N, Warps>& sums, F& to, float* memory, Sync sync) {
  static_assert(F::rows >= N && F::cols == R, "complete() transposes: at least N rows of R results of R x N sums");
  share_divided(at, sums, memory, sync);
  add_shares<R, N, Warps>(at, to, 0, memory);
}
/// The same for halves of the rows: first(n, r) is row r, second(n, r) row r + R / 2.
template <int R, int N, int Warps, class F, class Sync>
TW_INLINE void complete_divided(const Position& at, const DividedSums<R, N, Warps>& sums, F& first, F& second, float* memory, Sync sync) {
  static_assert(F::rows >= N && F::cols == R / 2, "complete() transposes: at least N rows of R / 2 results, twice, of R x N sums");
  share_divided(at, sums, memory, sync);
  add_shares<R, N, Warps>(at, first, 0, memory);
  add_shares<R, N, Warps>(at, second, R / 2, memory);
}
/// to[n] = the sum of the warps' squares(n), in the order of the warps; 0 for rows of the vector's tile from N on.
template <int N, int Warps, class T, class F, class Sync>
TW_INLINE void complete_divided(const Position& at, const DividedSquares<N, Warps>& squares, RowVector<T, F>& to, float* memory,
                                Sync sync) {
  sync();  // the previous squares have been read
  TW_UNROLL
  for (int r = 0; r < N / 8; ++r) {
    float sum = squares.x[r];
    sum += ptx::shuffle_xor(sum, 1);
    sum += ptx::shuffle_xor(sum, 2);
    if (at.lane % 4 == 0) memory[at.block_warp() * N + r * 8 + at.lane / 4] = sum;
  }
  sync();
  TW_UNROLL
  for (int i = 0; i < to.size; ++i) {
    to.x[i] = 0;
    if (to.row(at, i) >= N) continue;
    TW_UNROLL
    for (int warp = 0; warp < Warps; ++warp) to.x[i] += memory[warp * N + to.row(at, i)];
  }
}

}  // namespace tw::cuda
