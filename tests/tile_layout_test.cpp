// Layouts of tiles and schedules of grids, as plain arithmetic on the host.

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <vector>

#include "runtime/format.hpp"
#include "tests/support.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/tile/attention.tile.hpp"

namespace tw::test {
namespace {

template <class S>
void expect_shared_layout() {
  constexpr int elements = S::rows * S::cols;
  std::set<int> offsets;
  for (int row = 0; row < S::rows; ++row) {
    for (int col = 0; col < S::cols; ++col) {
      const int offset = S::offset(row, col);
      ASSERT_TRUE(offsets.insert(offset).second) << "(" << row << ", " << col << ") shares its place";
      ASSERT_GE(offset, 0);
    }
  }
  EXPECT_EQ(offsets.size(), static_cast<std::size_t>(elements));
}

template <class T, int R, int C, Contract contract>
void expect_gpu_shared_layout() {
  using S = sm_90a::Shared<T, R, C, contract>;
  SCOPED_TRACE(tw::format("{} x {} elements of {} bytes", R, C, sizeof(T)));
  expect_shared_layout<S>();
  constexpr int size = sizeof(T);
  constexpr int piece = 16 / size;
  for (int row = 0; row < R; ++row) {
    for (int col = 0; col < C; ++col) {
      ASSERT_EQ(S::offset(row, col) % size, 0);
      ASSERT_LE(S::offset(row, col) + size, static_cast<int>(sizeof(S)));
      // Copies move 16 bytes at a time, and TMA's boxes are panels of 128 bytes a row.
      ASSERT_EQ(S::offset(row, col), S::offset(row, col / piece * piece) + col % piece * size);
      ASSERT_EQ(S::offset(row, col) / S::panel_bytes, col / S::panel_cols);
    }
    // The 128-byte swizzle: the 16-byte piece's number is xor-ed with the row's, modulo 8.
    ASSERT_EQ(S::offset(row, 0), row * 128 + row % 8 * 16);
  }
}

template <class T, int R, int C, Contract contract>
void expect_cpu_shared_layout() {
  using S = cpu::Shared<T, R, C, contract>;
  SCOPED_TRACE(tw::format("{} x {}", R, C));
  expect_shared_layout<S>();
  for (int row = 0; row < R; ++row) {
    for (int col = 0; col < C; ++col) {
      const int outer = contract == Contract::columns ? row : col, k = contract == Contract::columns ? col : row;
      ASSERT_LT(S::offset(row, col), static_cast<int>(sizeof(S::panels) / sizeof(S::panels[0])));
      // What the library's products read; see library.tile.hpp.
      const int group = is_same<T, bf16> ? 2 : is_same<T, i8> ? 4 : 1, whole_depth = (S::depth + group - 1) / group * group;
      ASSERT_EQ(S::offset(row, col), outer / 16 * 16 * whole_depth + k / group * group * 16 + outer % 16 * group + k % group);
    }
  }
}

TEST(Layout, SharedTilesAreBijections) {
  expect_gpu_shared_layout<bf16, 128, 64, Contract::columns>();
  expect_gpu_shared_layout<f16, 64, 128, Contract::columns>();
  expect_gpu_shared_layout<bf16, 64, 256, Contract::rows>();
  expect_gpu_shared_layout<bf16, 8, 64, Contract::rows>();
  expect_gpu_shared_layout<float, 256, 32, Contract::columns>();
  expect_gpu_shared_layout<float, 64, 96, Contract::columns>();
  expect_gpu_shared_layout<u8, 64, 128, Contract::columns>();
  expect_cpu_shared_layout<float, 64, 64, Contract::columns>();
  expect_cpu_shared_layout<bf16, 192, 96, Contract::columns>();
  expect_cpu_shared_layout<f16, 13, 5, Contract::columns>();
  expect_cpu_shared_layout<bf16, 64, 128, Contract::rows>();
  expect_cpu_shared_layout<float, 7, 33, Contract::rows>();
  expect_cpu_shared_layout<bf16, 17, 33, Contract::columns>();
  expect_cpu_shared_layout<i8, 33, 17, Contract::rows>();
  expect_cpu_shared_layout<fp8_e4m3, 64, 128, Contract::columns>();
}

/// Every element belongs to one thread, and to one place in it.
template <class F>
void expect_fragment_layout(int threads) {
  SCOPED_TRACE(tw::format("{} x {}", F::rows, F::cols));
  std::vector<int> owners(static_cast<std::size_t>(F::rows) * F::cols, 0);
  for (int thread = 0; thread < threads; ++thread) {
    const sm_90a::Position p = sm_90a::Position::of(thread);
    for (int i = 0; i < F::size; ++i) {
      const int row = F::row(p, i), col = F::col(p, i);
      ASSERT_TRUE(row >= 0 && row < F::rows && col >= 0)
          << "element " << i << " of thread " << thread << " is (" << row << ", " << col << ")";
      if (col < F::cols) ++owners[static_cast<std::size_t>(row * F::cols + col)];
      // Neighbours in a row stand side by side, where vectors of them are moved.
      ASSERT_EQ(F::col(p, i), F::col(p, i / F::width * F::width) + i % F::width);
      ASSERT_EQ(row, F::row(p, i / F::width * F::width));
    }
  }
  for (std::size_t i = 0; i < owners.size(); ++i) ASSERT_EQ(owners[i], 1) << "owners of (" << i / F::cols << ", " << i % F::cols << ")";

  // A thread's rows: in_row() counts its elements row by row, and the lanes that share the row are the ones that reductions ask.
  for (int thread = 0; thread < threads; ++thread) {
    const sm_90a::Position p = sm_90a::Position::of(thread);
    const sm_90a::Position first = sm_90a::Position::of(thread / F::row_threads * F::row_threads);
    std::set<int> elements;
    for (int r = 0; r < F::row_count; ++r) {
      for (int j = 0; j < F::size / F::row_count; ++j) {
        const int i = F::in_row(r, j);
        ASSERT_TRUE(i >= 0 && i < F::size && elements.insert(i).second);
        ASSERT_EQ(F::row(p, i), F::row(p, F::in_row(r, 0)));
        ASSERT_EQ(F::row(p, i), F::row(first, F::in_row(r, 0)));
      }
    }
    ASSERT_EQ(static_cast<int>(elements.size()), F::size);
  }
}

template <class F>
void expect_column_vector_layout(int threads) {
  using V = sm_90a::ColumnVector<float, F>;
  for (int thread = 0; thread < threads; ++thread) {
    const sm_90a::Position p = sm_90a::Position::of(thread);
    for (int i = 0; i < F::size; ++i) ASSERT_EQ(V::col(p, F::column_index(i)), F::col(p, i));
  }
}

/// Copies of a row's value lie with the threads that hold the row.
template <class F>
void expect_row_vector_layout(int threads) {
  using V = sm_90a::RowVector<float, F>;
  for (int thread = 0; thread < threads; ++thread) {
    const sm_90a::Position p = sm_90a::Position::of(thread);
    for (int i = 0; i < V::size; ++i)
      for (int j = 0; j < F::size / F::row_count; ++j) ASSERT_EQ(V::row(p, i), F::row(p, F::in_row(i, j)));
  }
}

TEST(Layout, FragmentsGiveEachElementToOneThread) {
  expect_fragment_layout<sm_90a::Fragment<float, 64, 8>>(128);
  expect_fragment_layout<sm_90a::Fragment<float, 64, 80>>(128);
  expect_fragment_layout<sm_90a::Fragment<float, 128, 256>>(256);
  expect_fragment_layout<sm_90a::Fragment<float, 192, 128>>(384);
  expect_row_vector_layout<sm_90a::Fragment<float, 64, 8>>(128);
  expect_row_vector_layout<sm_90a::Fragment<float, 128, 96>>(256);
  expect_column_vector_layout<sm_90a::Fragment<float, 64, 8>>(128);
  expect_column_vector_layout<sm_90a::Fragment<float, 128, 96>>(256);
}

TEST(Layout, RowsGiveEachElementToOneThread) {
  expect_fragment_layout<sm_90a::Rows<float, 16, 32, 4, 0>>(128);
  expect_fragment_layout<sm_90a::Rows<bf16, 8, 96, 4, 0>>(128);
  expect_fragment_layout<sm_90a::Rows<float, 8, 64, 4, 0>>(128);
  expect_fragment_layout<sm_90a::Rows<float, 8, 128, 4, 0>>(128);
  expect_fragment_layout<sm_90a::Rows<float, 4, 256, 4, 0>>(128);
  expect_fragment_layout<sm_90a::Rows<bf16, 4, 768, 4, 0>>(128);
  expect_fragment_layout<sm_90a::Rows<float, 64, 32, 4, 0>>(128);
  expect_row_vector_layout<sm_90a::Rows<float, 64, 32, 4, 0>>(128);
  expect_row_vector_layout<sm_90a::Rows<float, 8, 256, 4, 0>>(128);
  expect_column_vector_layout<sm_90a::Rows<float, 8, 256, 4, 0>>(128);
  // Warps that share a row, and narrower pieces than the columns allow.
  expect_fragment_layout<sm_90a::Rows<float, 1, 2048, 4, 4>>(128);
  expect_fragment_layout<sm_90a::Rows<float, 2, 512, 8, 0>>(256);
  expect_fragment_layout<sm_90a::Rows<i64, 16, 1024, 16, 2>>(512);
  // Rows that share a warp.
  expect_fragment_layout<sm_90a::Rows<float, 32, 64, 4, 8>>(128);
  expect_row_vector_layout<sm_90a::Rows<float, 32, 64, 4, 8>>(128);
  expect_column_vector_layout<sm_90a::Rows<float, 32, 64, 4, 8>>(128);
  expect_row_vector_layout<sm_90a::Rows<float, 2, 512, 8, 0>>(256);
  expect_column_vector_layout<sm_90a::Rows<float, 2, 512, 8, 0>>(256);
}

// Schedules.

/// Every (m, n, batch) of `m` x `n` x `batch` once, in the numbers below `grid`.
template <class Schedule>
void expect_each_tile_once(const TileGrid& grid, int m, int n, int batch) {
  SCOPED_TRACE(tw::format("{} x {} x {}", grid.m, grid.n, grid.batch));
  ASSERT_EQ(grid.count(), m * n * batch);
  std::vector<bool> seen(static_cast<std::size_t>(grid.count()), false);
  for (int i = 0; i < grid.count(); ++i) {
    const Tile t = Schedule::at(grid, i);
    ASSERT_TRUE(t.m >= 0 && t.m < m && t.n >= 0 && t.n < n && t.batch >= 0 && t.batch < batch)
        << "tile " << i << " is (" << t.m << ", " << t.n << ", " << t.batch << ")";
    const auto at = static_cast<std::size_t>((t.batch * m + t.m) * n + t.n);
    ASSERT_FALSE(seen[at]) << "tile " << i << " comes twice: (" << t.m << ", " << t.n << ", " << t.batch << ")";
    seen[at] = true;
  }
}

TEST(Schedule, VisitsEachTileOnce) {
  std::mt19937_64 random = random_engine();
  const auto extent = [&](int most) { return 1 + static_cast<int>(random() % static_cast<unsigned>(most)); };
  for (int i = 0; i < random_cases(300); ++i) {
    const TileGrid grid{extent(40), extent(20), extent(5)};
    expect_each_tile_once<RowMajor>(grid, grid.m, grid.n, grid.batch);
    expect_each_tile_once<Banded<1>>(grid, grid.m, grid.n, grid.batch);
    expect_each_tile_once<Banded<3>>(grid, grid.m, grid.n, grid.batch);
    expect_each_tile_once<Banded<8>>(grid, grid.m, grid.n, grid.batch);
    expect_each_tile_once<Banded<16, Dispatch::dynamic>>(grid, grid.m, grid.n, grid.batch);
    // Its batches are groups of heads; a tile's n is the head's number in all groups.
    expect_each_tile_once<LongestFirst>(grid, grid.m, grid.n * grid.batch, 1);
  }
}

TEST(Schedule, RowMajorGoesAlongRows) {
  const TileGrid grid{3, 4, 2};
  for (int i = 0; i < grid.count(); ++i) {
    const Tile t = RowMajor::at(grid, i);
    EXPECT_EQ((t.batch * grid.m + t.m) * grid.n + t.n, i);
  }
}

TEST(Schedule, BandedFinishesABandBeforeTheNext) {
  const TileGrid grid{21, 6, 2};
  int last = 0;
  for (int i = 0; i < grid.count(); ++i) {
    const Tile t = Banded<8>::at(grid, i);
    const int band = t.batch * 3 + t.m / 8;
    EXPECT_GE(band, last);
    last = band;
  }
}

TEST(Schedule, LongestFirstTakesTheLastRowsOfAllHeadsOfAGroupFirst) {
  const TileGrid grid{5, 4, 3};
  for (int i = 1; i < grid.count(); ++i) {
    const Tile before = LongestFirst::at(grid, i - 1), now = LongestFirst::at(grid, i);
    if (now.n / grid.n == before.n / grid.n) {
      EXPECT_LE(now.m, before.m);
    }
  }
}

}  // namespace
}  // namespace tw::test
