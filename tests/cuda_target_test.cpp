// What the generic CUDA target computes without a GPU: where fragments, operands and ring slots are.

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "tilewave/tile/cuda/fragment.tile.hpp"
#include "tilewave/tile/cuda/lines.tile.hpp"
#include "tilewave/tile/cuda/ring.tile.hpp"

namespace tw::test {
namespace {

// --- Operands in shared memory

/// A Shared tile whose every element is a number of its own.
template <class S>
std::vector<u8> numbered() {
  using E = typename S::Element;
  std::vector<u8> bytes(sizeof(S));
  for (int row = 0; row < S::rows; ++row) {
    for (int col = 0; col < S::cols; ++col) {
      const u32 number = static_cast<u32>(row * S::cols + col);  // what does not fit the element is cut off
      std::memcpy(bytes.data() + S::offset(row, col), &number, sizeof(E));
    }
  }
  return bytes;
}

/// PTX manual, ldmatrix: lanes 8 i to 8 i + 7 give the addresses of matrix i's rows of 16 bytes; register i of a lane holds bytes 4 (lane
/// mod 4) on of row lane / 4, or transposed elements (2 (lane mod 4), lane / 4) and the one below it.
template <bool kTransposed>
std::vector<std::array<u32, 4>> load_matrices(const std::vector<u8>& memory, const std::vector<u32>& addresses) {
  std::vector<std::array<u32, 4>> registers(32);
  for (u32 lane = 0; lane < 32; ++lane) {
    for (u32 i = 0; i < 4; ++i) {
      u8 bytes[4];
      for (u32 k = 0; k < 4; ++k) {
        const u32 row = kTransposed ? lane % 4 * 2 + k / 2 : lane / 4;
        const u32 byte = kTransposed ? lane / 4 * 2 + k % 2 : lane % 4 * 4 + k;
        bytes[k] = memory.at(addresses[8 * i + row] + byte);
      }
      std::memcpy(&registers[lane][i], bytes, 4);
    }
  }
  return registers;
}

/// PTX manual, mma's operands: register r of a lane's 16 x 32-byte A holds row lane / 4 + 8 (r mod 2), bytes 4 (lane mod 4) + 16 (r / 2) of
/// the sum; of two 8 x 32-byte B it holds column lane / 4 + 8 (r / 2), bytes 4 (lane mod 4) + 16 (r mod 2).
template <class S, bool kLeft, int kWidth>
void expect_operands(int warps) {
  using E = typename S::Element;
  constexpr bool along_columns = S::contract == Contract::columns;
  constexpr int depth = along_columns ? S::cols : S::rows, step = 32 / static_cast<int>(sizeof(E)), word = 4 / static_cast<int>(sizeof(E));
  const std::vector<u8> memory = numbered<S>();
  for (int warp = 0; warp < warps; ++warp) {
    std::vector<cuda::Lines<S, kLeft, kWidth>> lines;
    for (int lane = 0; lane < 32; ++lane) lines.emplace_back(0u, lane, warp * kWidth);
    for (int k = 0; k < depth / step; ++k) {
      for (int n = 0; n < kWidth / 16; ++n) {
        std::vector<u32> addresses;
        for (const auto& of_lane : lines) addresses.push_back(of_lane.address(k, n));
        // A matrix's eight lines lie in eight groups of four banks.
        for (int matrix = 0; matrix < 4; ++matrix) {
          std::set<u32> banks;
          for (int row = 0; row < 8; ++row) banks.insert(addresses[static_cast<std::size_t>(matrix * 8 + row)] / 16 % 8);
          EXPECT_EQ(banks.size(), 8u);
        }
        const auto registers = load_matrices<!along_columns>(memory, addresses);
        for (int lane = 0; lane < 32; ++lane) {
          for (int r = 0; r < 4; ++r) {
            const int down = warp * kWidth + n * 16 + lane / 4 + 8 * (kLeft ? r % 2 : r / 2);
            for (int e = 0; e < word; ++e) {
              const int along = k * step + lane % 4 * word + (kLeft ? r / 2 : r % 2) * 4 * word + e;
              const u32 number = static_cast<u32>(along_columns ? down * S::cols + along : along * S::cols + down);
              const u32 mask = sizeof(E) == 4 ? 0xffffffffu : (1u << 8 * sizeof(E)) - 1;
              const u32 got = registers[static_cast<std::size_t>(lane)][static_cast<std::size_t>(r)] >> (e * 8 * sizeof(E)) % 32 & mask;
              ASSERT_EQ(got, number & mask) << "warp " << warp << " step " << k << " block " << n << " lane " << lane << " register " << r;
            }
          }
        }
      }
    }
  }
}

TEST(CudaTarget, LanesFindTheirOperands) {
  constexpr Contract kColumns = Contract::columns, kRows = Contract::rows;
  expect_operands<cuda::Shared<bf16, 128, 64, kColumns>, true, 16>(8);
  expect_operands<cuda::Shared<bf16, 128, 128, kColumns>, true, 64>(2);
  expect_operands<cuda::Shared<i8, 128, 128, kColumns>, true, 32>(4);
  expect_operands<cuda::Shared<float, 64, 64, kColumns>, true, 32>(2);
  expect_operands<cuda::Shared<f16, 256, 64, kColumns>, false, 64>(4);
  expect_operands<cuda::Shared<f16, 64, 96, kColumns>, false, 64>(1);
  expect_operands<cuda::Shared<float, 64, 32, kColumns>, false, 32>(2);
  // Transposed: 16, 32 and 64 columns a warp, whole panels, and columns that begin anywhere in a panel.
  expect_operands<cuda::Shared<bf16, 64, 128, kRows>, true, 16>(8);
  expect_operands<cuda::Shared<bf16, 64, 128, kRows>, true, 32>(4);
  expect_operands<cuda::Shared<bf16, 64, 128, kRows>, true, 64>(2);
  expect_operands<cuda::Shared<bf16, 64, 256, kRows>, false, 64>(4);
  expect_operands<cuda::Shared<bf16, 64, 128, kRows>, false, 128>(1);
  expect_operands<cuda::Shared<bf16, 64, 192, kRows>, false, 48>(4);
  expect_operands<cuda::Shared<f16, 32, 80, kRows>, false, 80>(1);
}

// --- Fragments

/// Every element of the tile belongs to one thread, where operands of its warp put it: 16 rows by 8 columns at a time as mma's
/// accumulators.
template <class F>
void expect_fragment() {
  std::set<std::pair<int, int>> seen;
  for (int thread = 0; thread < F::warps * 32; ++thread) {
    const cuda::Position at = cuda::Position::of(static_cast<u32>(thread));
    for (int i = 0; i < F::size; ++i) {
      const int row = F::row(at, i), col = F::col(at, i);
      EXPECT_TRUE(seen.emplace(row, col).second) << row << ", " << col;
      const int tile = i / F::tile_size, group = i % F::tile_size / 4, c = i % 4;
      EXPECT_EQ(row, F::warp_row(at) + tile * 16 + thread % 32 / 4 + c / 2 * 8);
      EXPECT_EQ(col, F::warp_col(at) + group * 8 + thread % 4 * 2 + c % 2);
    }
    for (int r = 0; r < F::row_count; ++r) {
      for (int j = 0; j < F::share; ++j) {
        EXPECT_EQ(F::row(at, F::in_row(r, j)), F::row(at, F::in_row(r, 0)));
        EXPECT_EQ(F::column_index(F::in_row(r, j)), j);
      }
    }
  }
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(F::rows * F::cols));
  EXPECT_LT(seen.rbegin()->first, F::rows);
}

TEST(CudaTarget, FragmentsAreDealtToWarps) {
  expect_fragment<cuda::Fragment<float, 128, 64>>();
  expect_fragment<cuda::Fragment<float, 128, 256, 64, 4>>();
  expect_fragment<cuda::Fragment<float, 128, 64, 32, 1>>();
  expect_fragment<cuda::Fragment<i32, 64, 48, 32, 2>>();
}

// --- Rings

struct CountingAllocator {
  int bytes = 0;
  constexpr int tiles(int n) { return std::exchange(bytes, bytes + n); }
};

TEST(CudaTarget, SlotsAreFilledAgainAfterAMeeting) {
  CountingAllocator allocator;
  cuda::Ring<u64, 2> ring(allocator);
  u32 meetings = 0;
  EXPECT_TRUE(ring.has_room(meetings));
  ring.fill(254);
  ring.fill(255);
  EXPECT_FALSE(ring.has_room(meetings));
  EXPECT_EQ(ring.group(), 254u);
  ++ring.taken;
  EXPECT_EQ(ring.group(), 255u);
  ring.release(meetings);
  EXPECT_FALSE(ring.has_room(meetings)) << "another warp may still read the slot";
  ++meetings;
  EXPECT_TRUE(ring.has_room(meetings));
  ring.fill(256);  // groups are told apart by their lowest byte
  ++ring.taken;
  EXPECT_EQ(ring.group(), 0u);
  ring.release(meetings);
  EXPECT_FALSE(ring.has_room(meetings)) << "released after the meeting";
  ++ring.taken;
  ring.release(meetings);
  ++meetings;
  EXPECT_TRUE(ring.has_room(meetings));
  ring.fill(257);
  EXPECT_TRUE(ring.has_room(meetings)) << "both slots were released";
}

}  // namespace
}  // namespace tw::test
