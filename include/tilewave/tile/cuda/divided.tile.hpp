#pragma once

#include "tilewave/tile/cuda/fragment.tile.hpp"
#include "tilewave/tile/cuda/mma.tile.hpp"

// Products with a few columns, whose time is that of reading the left operand: the warps divide its columns among them, so that a block
// needs only 16 rows of it. In shared memory each warp's columns are a tile of their own.

namespace tw::cuda {

/// R x N sums of each warp: those over its own columns. A thread holds them as mma.sync leaves them.
template <int R, int N, int Warps>
struct DividedSums {
  static_assert(R % 16 == 0 && N % 8 == 0, TW_DIVIDED_SUMS);
  static constexpr int rows = R;
  static constexpr int cols = N;
  static constexpr int warps = Warps;
  static constexpr int size = R * N / 32;
  float x[size];  ///< four for each 16 rows and 8 columns
};

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

/// Rows row0 to row0 + N - 1 and columns from col0 on; zeros outside the tensor.
template <class T, int N, int C, int Warps, class G>
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
  if (from.template whole_pieces<T, D::width>() && col0 % D::width == 0) {
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

/// sums(r, n) += the sum over the warp's columns of a(r, c) * operand(n, c), where a is the warp's R rows of the tile.
template <class T, int R, int N, int C, int Warps, class S>
TW_INLINE void add_divided([[maybe_unused]] const Position& at, [[maybe_unused]] DividedSums<R, N, Warps>& sums,
                           [[maybe_unused]] const S& tile, [[maybe_unused]] const DividedOperand<T, N, C, Warps>& operand) {
  static_assert(S::rows == R * Warps && S::cols * Warps == C && is_same<typename S::Element, T>, TW_DIVIDED_TILE);
#if TW_ON_GPU
  const int row = at.block_warp() * R + at.lane / 4, col = at.lane % 4 * operand.width;
  TW_UNROLL
  for (int n = 0; n < S::cols / 32; ++n) {
    TW_UNROLL
    for (int r = 0; r < R; r += 16) {
      u32 upper[4], lower[4];  // 8 neighbours each, of a row and the one 8 below
      ptx::load_shared_16(ptx::address(tile.bytes) + static_cast<u32>(S::offset(row + r, n * 32 + col)), upper);
      ptx::load_shared_16(ptx::address(tile.bytes) + static_cast<u32>(S::offset(row + r + 8, n * 32 + col)), lower);
      TW_UNROLL
      for (int k = 0; k < 4; k += 2) {  // the order of columns within a product is free, as long as both operands have the same
        const u32 left[4] = {upper[k], lower[k], upper[k + 1], lower[k + 1]};
        TW_UNROLL
        for (int column = 0; column < N / 8; ++column)
          Mma<T>::add(sums.x + (r / 16 * (N / 8) + column) * 4, left, operand.x[n][column] + k);
      }
    }
  }
#endif
}

/// to(n, r) = the sum of the warps' sums(r, n), in the order of the warps. Rows of `to` from N on become zeros: the threads of a block may
/// be more than the sums.
template <int R, int N, int Warps, class F, class Sync>
TW_INLINE void complete_divided(const Position& at, const DividedSums<R, N, Warps>& sums, F& to, float* memory, Sync sync) {
  static_assert(F::rows >= N && F::cols == R, "complete() transposes: at least N rows of R results of R x N sums");
  sync();  // the previous sums have been read
  TW_UNROLL
  for (int i = 0; i < sums.size; ++i) {
    const int tile = i / 4, r = tile / (N / 8) * 16 + at.lane / 4 + i % 4 / 2 * 8, n = tile % (N / 8) * 8 + at.lane % 4 * 2 + i % 2;
    memory[at.block_warp() * R * N + n * R + r] = sums.x[i];
  }
  sync();
  TW_UNROLL
  for (int i = 0; i < F::size; ++i) {
    to.x[i] = 0;
    if (F::rows > N && F::row(at, i) >= N) continue;
    const float* const from = memory + F::row(at, i) * R + F::col(at, i);
    TW_UNROLL
    for (int warp = 0; warp < Warps; ++warp) to.x[i] += from[warp * R * N];
  }
}

}  // namespace tw::cuda
