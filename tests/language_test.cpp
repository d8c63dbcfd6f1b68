// The tile language: layouts and schedules as plain arithmetic on the host, and kernels that use one part of it each, on the CPU and on a
// GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "kernels/gemm/gemm.tile.hpp"
#include "kernels/gemm/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/language_kernels.tile.hpp"
#include "tests/launch_kernel.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/attention.tile.hpp"

namespace tw::test {
namespace {

// Layouts.

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
  for (int i = 0; i < 300; ++i) {
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

// Kernels.

class Language : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
  }
  void TearDown() override { cpu::set_poison_released_slots(poison_before_); }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();

 private:
  const bool poison_before_ = cpu::poison_released_slots();
};

INSTANTIATE_TEST_SUITE_P(Tile, Language, testing::ValuesIn(kDevices), device_name);

/// Ways for a tensor to lie: dense, aligned with gaps, unaligned, strided in every dimension, transposed, backwards.
std::vector<Placement> placements(DType dtype, bool batched) {
  const std::int64_t sixteen_bytes = 16 / static_cast<std::int64_t>(size_of(dtype));
  return {{},
          {.offset = 2 * sixteen_bytes, .gap = sixteen_bytes, .align = sixteen_bytes},
          {.offset = 1},
          {.offset = 3, .gap = 5},
          {.offset = 1, .step = 3, .gap = 2},
          {.order = batched ? std::vector{0, 2, 1} : std::vector{1, 0}, .gap = 1},
          {.gap = 4, .reversed = true}};
}

/// Copies tensors of several sizes in every placement through `Kernel`, whose tiles are R x C; the result must be `in`, rounded.
template <class Kernel, int R, int C>
void expect_copies(Device device, DType in_dtype, DType out_dtype, std::mt19937_64& random) {
  const std::vector<Placement> from = placements(in_dtype, true), to = placements(out_dtype, true);
  const std::vector<std::array<std::int64_t, 2>> sizes = {{R, C},         {2 * R, 2 * C}, {R - 1, C - 1},
                                                          {R + 1, C + 1}, {1, 1},         {2 * R + 3, 3 * C - 5}};
  for (std::size_t i = 0; i < sizes.size() * from.size(); ++i) {
    const auto [rows, cols] = sizes[i % sizes.size()];
    if (rows < 1 || cols < 1) continue;
    const Placement& in_place = from[i / sizes.size()];
    const Placement& out_place = to[(i / sizes.size() + i) % to.size()];
    SCOPED_TRACE(tw::format("{} x {}, placements {} and {}", rows, cols, i / sizes.size(), (i / sizes.size() + i) % to.size()));
    PlacedTensor in({2, rows, cols}, in_dtype, device, in_place), out({2, rows, cols}, out_dtype, device, out_place);
    const std::vector<float> values = in.fill_random(random);
    launch_kernel<Kernel>(device, {ceil_div(static_cast<int>(rows), R), ceil_div(static_cast<int>(cols), C), 2}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      bind(p.out, out);
    });
    const std::vector<double> got = out.values();
    for (std::size_t e = 0; e < got.size(); ++e) ASSERT_EQ(got[e], round_to(out_dtype, values[e])) << "element " << e;
    ASSERT_TRUE(out.gaps_intact());
  }
}

TEST_P(Language, RowsLoadAndStoreWithBounds) {
  expect_copies<CopyRows<bf16, bf16, 8, 256>, 8, 256>(device, DType::bf16, DType::bf16, random);
  expect_copies<CopyRows<f16, float, 4, 128>, 4, 128>(device, DType::f16, DType::f32, random);
  expect_copies<CopyRows<float, float, 8, 64>, 8, 64>(device, DType::f32, DType::f32, random);
  expect_copies<CopyRows<float, bf16, 8, 32>, 8, 32>(device, DType::f32, DType::bf16, random);
}

TEST_P(Language, FragmentsLoadAndStoreWithBounds) {
  expect_copies<CopyFragment<bf16, bf16, 64, 64>, 64, 64>(device, DType::bf16, DType::bf16, random);
  expect_copies<CopyFragment<float, f16, 128, 40>, 128, 40>(device, DType::f32, DType::f16, random);
  expect_copies<CopyFragment<f16, float, 64, 8>, 64, 8>(device, DType::f16, DType::f32, random);
}

template <class Kernel, int R, int C>
void expect_row_softmax(Device device, DType dtype, std::mt19937_64& random) {
  for (const auto& [rows, cols] : {std::pair{R, C}, {3 * R - 1, C}, {R, C - 1}, {2 * R + 1, 1}, {1, C / 2 + 1}}) {
    SCOPED_TRACE(tw::format("{} x {}", rows, cols));
    PlacedTensor in({rows, cols}, dtype, device, {.offset = 1, .gap = 3}), out({rows, cols}, DType::f32, device, {.gap = 1});
    const std::vector<float> x = in.fill_random(random, 4);
    launch_kernel<Kernel>(device, {ceil_div(rows, R)}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      bind(p.out, out);
    });
    const std::vector<double> got = out.values();
    for (int row = 0; row < rows; ++row) {
      const float* const begin = x.data() + row * cols;
      double total = 0;
      for (int col = 0; col < cols; ++col) total += std::exp(static_cast<double>(begin[col]));
      for (int col = 0; col < cols; ++col)
        ASSERT_NEAR(got[static_cast<std::size_t>(row * cols + col)], std::exp(static_cast<double>(begin[col])) / total, 2e-6);
    }
    EXPECT_TRUE(out.gaps_intact());
  }
}

TEST_P(Language, RowsReduceAndBroadcast) {
  expect_row_softmax<RowSoftmax<bf16, 8, 256>, 8, 256>(device, DType::bf16, random);
  expect_row_softmax<RowSoftmax<float, 4, 32>, 4, 32>(device, DType::f32, random);
  expect_row_softmax<RowSoftmax<float, 16, 192>, 16, 192>(device, DType::f32, random);
  expect_row_softmax<RowSoftmax<float, 1, 1024, 4>, 1, 1024>(device, DType::f32, random);
  expect_row_softmax<RowSoftmax<bf16, 2, 1536, 8>, 2, 1536>(device, DType::bf16, random);
}

template <class Kernel, int R, int C>
void expect_broadcasts(Device device, DType dtype, std::mt19937_64& random) {
  for (const std::int64_t gap : {0, 3}) {  // pieces of 16 bytes, and single elements
    for (const auto& [rows, cols] : {std::pair{R, C}, {2 * R + 1, C - 8}, {1, C / 2 + 1}}) {
      SCOPED_TRACE(tw::format("{} x {}, gap {}", rows, cols, gap));
      PlacedTensor in({rows, cols}, dtype, device, {.gap = gap}), factor({1, cols}, dtype, device), out({rows, cols}, DType::f32, device);
      const std::vector<float> x = in.fill_random(random), f = factor.fill_random(random);
      launch_kernel<Kernel>(device, {ceil_div(rows, R)}, [&](auto& bind, auto& p) {
        bind(p.in, in);
        bind(p.by_column, factor);
        bind(p.out, out);
      });
      const std::vector<double> got = out.values();
      for (int row = 0; row < rows; ++row) {
        const float* const begin = x.data() + row * cols;
        const float largest = std::abs(*std::max_element(begin, begin + cols, [](float a, float b) { return std::abs(a) < std::abs(b); }));
        for (int col = 0; col < cols; ++col)
          ASSERT_NEAR(got[static_cast<std::size_t>(row * cols + col)], begin[col] * f[static_cast<std::size_t>(col)] + largest + begin[col],
                      1e-5);
      }
    }
  }
}

TEST_P(Language, MapTakesRowsColumnsAndTiles) {
  expect_broadcasts<Broadcasts<float, 8, 64, 4>, 8, 64>(device, DType::f32, random);
  expect_broadcasts<Broadcasts<bf16, 1, 1024, 4>, 1, 1024>(device, DType::bf16, random);
  expect_broadcasts<Broadcasts<f16, 4, 512, 8>, 4, 512>(device, DType::f16, random);
  expect_broadcasts<Broadcasts<bf16, 16, 128, 4, 8>, 16, 128>(device, DType::bf16, random);
}

template <class In, class Out, int R, int C, int Width>
void expect_gathered_rows(Device device, std::mt19937_64& random) {
  // Whole pieces; rows and bases that are none; columns that are none.
  for (const auto& [cols, place] : {std::pair{2 * C, Placement{}}, {2 * C, Placement{.offset = 1, .gap = 3}}, {C + 3, Placement{}}}) {
    SCOPED_TRACE(tw::format("{} columns, offset {}", cols, place.offset));
    const int rows = 2 * R + 1, in_rows = 4 * R;
    PlacedTensor in({2, in_rows, cols}, dtype_of<In>, device, place), out({2, rows, cols}, dtype_of<Out>, device, place);
    const std::vector<float> x = in.fill_random(random);
    launch_kernel<GatherRows<In, Out, R, C, Width>>(device, {ceil_div(rows, R), ceil_div(cols, C), 2}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      bind(p.out, out);
    });
    const std::vector<double> got = out.values();
    EXPECT_TRUE(out.gaps_intact());
    for (int batch = 0; batch < 2; ++batch) {
      for (int row = 0; row < rows; ++row) {
        const int from = 3 * row - 2;
        for (int col = 0; col < cols; ++col) {
          const float value = from < 0 || from >= in_rows ? 7 : x[static_cast<std::size_t>((batch * in_rows + from) * cols + col)];
          ASSERT_EQ(got[static_cast<std::size_t>((batch * rows + row) * cols + col)], static_cast<float>(to<Out>(value)))
              << batch << ", " << row << ", " << col;
        }
      }
    }
  }
}

TEST_P(Language, GathersRows) {
  expect_gathered_rows<float, float, 8, 128, 4>(device, random);
  expect_gathered_rows<bf16, float, 16, 64, 4>(device, random);
  expect_gathered_rows<f16, bf16, 4, 256, 8>(device, random);
}

template <class T, class Tiles, int R, int C>
void expect_row_statistics(Device device, std::mt19937_64& random) {
  for (const auto& [rows, cols] : {std::pair{R, C}, {2 * R + 5, C}, {R - 1, C - 3}}) {
    SCOPED_TRACE(tw::format("{} x {}", rows, cols));
    PlacedTensor in({rows, cols}, dtype_of<T>, device, {.offset = 1, .gap = 1});
    PlacedTensor largest({rows}, DType::f32, device), sum({rows}, DType::f32, device), squares({rows}, DType::f32, device);
    const std::vector<float> x = in.fill_random(random);
    launch_kernel<RowStatistics<T, Tiles>>(device, {ceil_div(rows, R)}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      p.largest = largest.tensor().template data<float>();
      p.sum = sum.tensor().template data<float>();
      p.squares = squares.tensor().template data<float>();
    });
    const std::vector<double> got_largest = largest.values(), got_sum = sum.values(), got_squares = squares.values();
    for (int row = 0; row < rows; ++row) {
      // Columns beyond the tensor are zeros.
      double m = cols < C ? 0 : -std::numeric_limits<double>::infinity(), s = 0, s2 = 0, magnitudes = 0;
      for (int col = 0; col < cols; ++col) {
        const double value = x[static_cast<std::size_t>(row * cols + col)];
        m = std::max(m, value);
        s += value;
        s2 += value * value;
        magnitudes += std::abs(value);
      }
      const auto at = static_cast<std::size_t>(row);
      const double unit = cols * std::ldexp(1.0, -24);  // most by which a sum of `cols` terms is off, relative to that of their magnitudes
      ASSERT_EQ(got_largest[at], m) << "row " << row;
      ASSERT_NEAR(got_sum[at], s, unit * magnitudes) << "row " << row;
      ASSERT_NEAR(got_squares[at], s2, unit * s2) << "row " << row;
    }
    EXPECT_TRUE(largest.gaps_intact() && sum.gaps_intact() && squares.gaps_intact());
  }
}

TEST_P(Language, RowsOfEveryKindReduce) {
  expect_row_statistics<float, InFragment<64, 8>, 64, 8>(device, random);
  expect_row_statistics<bf16, InFragment<128, 104>, 128, 104>(device, random);
  expect_row_statistics<float, InRows<64, 32>, 64, 32>(device, random);
  expect_row_statistics<bf16, InRows<8, 256>, 8, 256>(device, random);
}

TEST_P(Language, AnyLooksAtEveryRow) {
  constexpr int kRows = 64, kCols = 16;
  for (int round = 0; round < 20; ++round) {
    const int above = round == 0 ? -1 : pick(kRows);
    PlacedTensor in({kRows, kCols}, DType::f32, device), flags({kRows}, DType::f32, device);
    std::vector<float> x(kRows * kCols, 0.0f);
    if (above >= 0) x[static_cast<std::size_t>(above * kCols + pick(kCols))] = 2;
    in.fill(x);
    launch_kernel<AnyAbove<kRows, kCols>>(device, {}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      p.flags = flags.tensor().template data<float>();
      p.limit = 1;
    });
    const std::vector<double> got = flags.values();
    // Which rows a thread looks at is the target's affair; those of one warp are 16.
    for (int row = 0; row < kRows; ++row) {
      if (above < 0) {
        ASSERT_EQ(got[static_cast<std::size_t>(row)], 0);
      } else if (row / 16 == above / 16) {
        ASSERT_EQ(got[static_cast<std::size_t>(row)], 1) << "rows " << row << " and " << above;
      }
    }
  }
}

template <class Kernel, int R, int C>
void expect_column_reductions(Device device, std::mt19937_64& random) {
  for (const auto& [rows, cols] : {std::pair{R, C}, {2 * R, 3 * C}, {2 * R - 3, C + 5}}) {
    SCOPED_TRACE(tw::format("{} x {}", rows, cols));
    PlacedTensor in({rows, cols}, DType::f32, device, {.offset = 1}), minus_sum({rows, cols}, DType::f32, device),
        minus_max({rows, cols}, DType::f32, device);
    const std::vector<float> x = in.fill_random(random);
    launch_kernel<Kernel>(device, {ceil_div(rows, R), ceil_div(cols, C)}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      bind(p.minus_sum, minus_sum);
      bind(p.minus_max, minus_max);
    });
    const std::vector<double> got_sum = minus_sum.values(), got_max = minus_max.values();
    for (int row0 = 0; row0 < rows; row0 += R) {
      const int end = std::min(row0 + R, rows);
      for (int col = 0; col < cols; ++col) {
        const auto at = [col, width = cols](int row) { return static_cast<std::size_t>(row * width + col); };
        float largest = end - row0 < R ? 0 : -std::numeric_limits<float>::infinity();  // rows beyond the tensor are zeros
        double sum = 0;
        for (int row = row0; row < end; ++row) {
          sum += x[at(row)];
          largest = std::max(largest, x[at(row)]);
        }
        for (int row = row0; row < end; ++row) {
          ASSERT_NEAR(got_sum[at(row)], x[at(row)] - sum, 1e-4);
          ASSERT_EQ(got_max[at(row)], x[at(row)] - largest);
        }
      }
    }
  }
}

TEST_P(Language, FragmentsReduceTheirColumns) {
  expect_column_reductions<ColumnReductions<64, 16>, 64, 16>(device, random);
  expect_column_reductions<ColumnReductions<128, 40>, 128, 40>(device, random);
  expect_column_reductions<ColumnReductions<256, 64>, 256, 64>(device, random);
}

template <class Tiles, int R, int C>
void expect_indices(Device device, std::mt19937_64& random) {
  for (const auto& [rows, cols] : {std::pair{R, C}, {2 * R, 2 * C}, {R + 1, C - 1}}) {
    for (const Placement& place : placements(DType::f32, false)) {
      SCOPED_TRACE(tw::format("{} x {}", rows, cols));
      PlacedTensor other({rows, cols}, DType::f32, device, place), out({rows, cols}, DType::f32, device, place);
      const std::vector<float> z = other.fill_random(random);
      launch_kernel<Indices<Tiles>>(device, {ceil_div(rows, R), ceil_div(cols, C)}, [&](auto& bind, auto& p) {
        bind(p.other, other);
        bind(p.out, out);
      });
      const std::vector<double> got = out.values();
      for (int row = 0; row < rows; ++row) {
        for (int col = 0; col < cols; ++col) {
          const auto at = static_cast<std::size_t>(row * cols + col);
          ASSERT_EQ(got[at], static_cast<float>(row % R * 1000 + col % C) + 2 * z[at]) << "(" << row << ", " << col << ")";
        }
      }
      ASSERT_TRUE(out.gaps_intact());
    }
  }
}

TEST_P(Language, ForEachKnowsWhereItIs) {
  expect_indices<InRows<8, 64>, 8, 64>(device, random);
  expect_indices<InRows<4, 256>, 4, 256>(device, random);
  expect_indices<InFragment<64, 24>, 64, 24>(device, random);
  expect_indices<InFragment<128, 64>, 128, 64>(device, random);
}

/// Copies tensors through a ring of tiles; beyond the tensor the tiles are zeros.
template <class T, int R, int C, Contract contract, int Stages, int Hold>
void expect_ring(Device device, std::mt19937_64& random, bool every_placement = false) {
  SCOPED_TRACE(tw::format("{} stages, {} held", Stages, Hold));
  const std::vector<Placement> all = placements(dtype_of<T>, true);
  for (std::size_t i = 0; i < (every_placement ? all.size() : 2); ++i) {
    for (const auto& [rows, cols] : {std::pair{R, 7 * C}, {R + 3, C}, {2 * R - 1, 4 * C - 1}, {1, 1}}) {
      SCOPED_TRACE(tw::format("{} x {}, placement {}", rows, cols, i));
      PlacedTensor in({2, rows, cols}, dtype_of<T>, device, all[i]);
      const int tiles_m = ceil_div(rows, R), steps = ceil_div(cols, C);
      PlacedTensor out({2, tiles_m * R, steps * C}, dtype_of<T>, device);
      const std::vector<float> x = in.fill_random(random);
      launch_kernel<ThroughRing<T, R, C, contract, Stages, Hold>>(device, {tiles_m, 1, 2}, [&](auto& bind, auto& p) {
        bind(p.in, in);
        bind(p.out, out);
        p.steps = steps;
      });
      const std::vector<double> got = out.values();
      for (std::size_t e = 0; e < got.size(); ++e) {
        const auto col = static_cast<int>(e % static_cast<std::size_t>(steps * C)),
                   row = static_cast<int>(e / static_cast<std::size_t>(steps * C));
        const int batch = row / (tiles_m * R), in_batch = row % (tiles_m * R);
        const bool inside = in_batch < rows && col < cols;
        const float expected = inside ? x[static_cast<std::size_t>((batch * rows + in_batch) * cols + col)] : 0.0f;
        ASSERT_EQ(got[e], expected) << "batch " << batch << " (" << in_batch << ", " << col << ")";
      }
    }
  }
}

TEST_P(Language, RingsOfEveryDepth) {
  expect_ring<bf16, 64, 64, Contract::columns, 1, 1>(device, random);
  expect_ring<bf16, 64, 64, Contract::columns, 2, 1>(device, random);
  expect_ring<bf16, 64, 64, Contract::columns, 3, 2>(device, random);
  expect_ring<bf16, 64, 64, Contract::columns, 4, 4>(device, random);
  expect_ring<bf16, 64, 64, Contract::columns, 5, 3>(device, random);
  expect_ring<bf16, 64, 64, Contract::columns, 6, 6>(device, random);
}

TEST_P(Language, TilesOfEveryKindAndPlacement) {
  expect_ring<f16, 64, 128, Contract::columns, 2, 2>(device, random, true);
  expect_ring<bf16, 128, 64, Contract::rows, 3, 2>(device, random, true);
  expect_ring<float, 64, 32, Contract::columns, 2, 1>(device, random, true);
}

template <class T, int R, int C>
void expect_windows(Device device, std::mt19937_64& random) {
  const std::vector<Placement> all = placements(dtype_of<T>, true);
  for (const auto& [log_width, log_height] : {std::pair{0, 0}, {6, 0}, {4, 2}, {2, 3}, {1, 1}}) {
    for (const int step : {1, 2, 3}) {
      for (const std::size_t i : {0, 1, 3}) {
        for (const int cols : {C, C - 8, C - 1}) {
          SCOPED_TRACE(
              tw::format("window {} x {} of {}, step {}, {} columns, placement {}", 1 << log_width, 1 << log_height, R, step, cols, i));
          constexpr int kImages = 3, kHeight = 9, kWidth = 21, kOutHeight = 5, kOutWidth = 19;
          PlacedTensor in({kImages, kHeight, kWidth, cols}, dtype_of<T>, device, all[i]);
          PlacedTensor out({kImages, kOutHeight, kOutWidth, cols}, dtype_of<T>, device, all[i]);
          const std::vector<float> x = in.fill_random(random);
          const int width = 1 << log_width, height = 1 << log_height;
          const TileGrid grid{ceil_div(kOutHeight, height), ceil_div(kOutWidth, width), ceil_div(kImages, R / (width * height))};
          launch_kernel<ThroughWindows<T, R, C>>(device, grid, [&](auto& bind, auto& p) {
            bind(p.in, in, Window{log_width, log_height, step, step});
            bind(p.out, out, Window{log_width, log_height});
          });
          const std::vector<double> got = out.values();
          std::size_t e = 0;
          for (int n = 0; n < kImages; ++n) {
            for (int oh = 0; oh < kOutHeight; ++oh) {
              for (int ow = 0; ow < kOutWidth; ++ow) {
                for (int c = 0; c < cols; ++c, ++e) {
                  const int h = oh * step - 1, w = ow * step - 2;
                  const bool inside = h >= 0 && h < kHeight && w >= 0 && w < kWidth;
                  const float expected = inside ? x[static_cast<std::size_t>(((n * kHeight + h) * kWidth + w) * cols + c)] : 0.0f;
                  ASSERT_EQ(got[e], expected) << "image " << n << " (" << oh << ", " << ow << ", " << c << ")";
                }
              }
            }
          }
          ASSERT_TRUE(out.gaps_intact());
        }
      }
    }
  }
}

TEST_P(Language, WindowsOfEveryShape) {
  expect_windows<bf16, 64, 64>(device, random);
  expect_windows<f16, 128, 128>(device, random);
  expect_windows<float, 128, 32>(device, random);
}

TEST_P(Language, AtomicsAddUp) {
  constexpr int kBatch = 37;
  for (const Placement& place : placements(DType::f32, false)) {
    PlacedTensor in({kBatch, 67, 41}, DType::f32, device), out({67, 41}, DType::f32, device, place);
    std::vector<float> x(kBatch * 67 * 41), expected(67 * 41);
    for (float& value : x) value = static_cast<float>(pick(2001) - 1000);  // sums of integers are exact in any order
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = static_cast<float>(pick(100));
    in.fill(x);
    out.fill(expected);
    for (std::size_t i = 0; i < x.size(); ++i) expected[i % expected.size()] += x[i];
    launch_kernel<AddUp<64, 16>>(device, {2, 3, kBatch}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      bind(p.out, out);
    });
    const std::vector<double> got = out.values();
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], expected[i]) << "element " << i;
    EXPECT_TRUE(out.gaps_intact());
  }
}

template <class T, Contract a_contract, Contract b_contract, int Stages>
void expect_product(Device device, std::mt19937_64& random, std::int64_t m, std::int64_t n, std::int64_t k) {
  SCOPED_TRACE(tw::format("{} x {} x {}, {} stages", m, n, k, Stages));
  constexpr int kBM = 64, kBN = 64, kBK = 64;
  PlacedTensor a(a_contract == Contract::columns ? Shape{m, k} : Shape{k, m}, dtype_of<T>, device, {.gap = 8, .align = 8});
  PlacedTensor b(b_contract == Contract::columns ? Shape{n, k} : Shape{k, n}, dtype_of<T>, device, {.gap = 8, .align = 8});
  PlacedTensor d({m, n}, dtype_of<T>, device, {.align = 8});
  std::vector<float> av = a.fill_random(random), bv = b.fill_random(random, 1 / std::sqrt(static_cast<float>(k)));
  namespace g = kernels::gemm;
  launch_kernel<g::Gemm<g::Operands<T, a_contract, b_contract>, g::Finish<T, Identity, false>, g::Tiles<kBM, kBN, kBK, Stages, 1, 8>>>(
      device, {ceil_div(static_cast<int>(m), kBM), ceil_div(static_cast<int>(n), kBN)}, [&](auto& bind, auto& p) {
        bind(p.in.a, a);
        bind(p.in.b, b);
        bind(p.d, d);
        bind(p.c, nullptr);
        bind(p.residual, nullptr);
        p.alpha = 1;
        p.in.depth = static_cast<int>(k);
      });
  const auto transpose = [](const std::vector<float>& x, std::int64_t rows, std::int64_t cols) {
    std::vector<float> y(x.size());
    for (std::int64_t r = 0; r < rows; ++r)
      for (std::int64_t c = 0; c < cols; ++c) y[static_cast<std::size_t>(c * rows + r)] = x[static_cast<std::size_t>(r * cols + c)];
    return y;
  };
  if (a_contract == Contract::rows) av = transpose(av, k, m);
  if (b_contract == Contract::columns) bv = transpose(bv, n, k);
  const kernels::gemm::PlainCall plain{.m = m, .n = n, .k = k, .a = av, .b = bv};
  EXPECT_TRUE(accurate(
      {d.values(), kernels::gemm::reference(plain), kernels::gemm::naive(plain, dtype_of<T>, false), arithmetic_of(dtype_of<T>, device)}));
  EXPECT_TRUE(d.gaps_intact());
}

TEST_P(Language, ProductsOverColumnsAndRows) {
  for (const auto& [m, n, k] : {std::tuple{64, 64, 64}, {65, 63, 129}, {130, 200, 500}, {1, 7, 3}}) {
    expect_product<bf16, Contract::columns, Contract::columns, 2>(device, random, m, n, k);
    expect_product<bf16, Contract::columns, Contract::rows, 3>(device, random, m, n, k);
    expect_product<f16, Contract::rows, Contract::columns, 2>(device, random, m, n, k);
    expect_product<f16, Contract::rows, Contract::rows, 5>(device, random, m, n, k);
  }
}

template <class T, int M, int N, int D>
void expect_chain(Device device, std::mt19937_64& random) {
  const DType dtype = dtype_of<T>;
  for (const auto& [queries, keys] : {std::pair{M, N}, {M, 5 * N}, {M + 3, 4 * N - 1}, {1, 1}}) {
    SCOPED_TRACE(tw::format("{} queries, {} keys", queries, keys));
    PlacedTensor q({queries, D}, dtype, device), k({keys, D}, dtype, device), v({keys, D}, dtype, device),
        out({queries, D}, DType::f32, device, {.gap = 1});
    const std::vector<float> qv = q.fill_random(random), kv = k.fill_random(random, 0.1f), vv = v.fill_random(random, 0.1f);
    launch_kernel<Chain<T, M, N, D>>(device, {ceil_div(queries, M)}, [&](auto& bind, auto& p) {
      bind(p.q, q);
      bind(p.k, k);
      bind(p.v, v);
      bind(p.out, out);
    });
    const std::vector<double> got = out.values();
    double error = 0, norm = 0;
    for (int i = 0; i < queries; ++i) {
      std::array<double, D> expected{};
      for (int j = 0; j < keys; ++j) {
        double score = 0;
        for (int c = 0; c < D; ++c)
          score += static_cast<double>(qv[static_cast<std::size_t>(i * D + c)]) * kv[static_cast<std::size_t>(j * D + c)];
        for (int c = 0; c < D; ++c) expected[static_cast<std::size_t>(c)] += score * vv[static_cast<std::size_t>(j * D + c)];
      }
      for (int c = 0; c < D; ++c) {
        const double difference = got[static_cast<std::size_t>(i * D + c)] - expected[static_cast<std::size_t>(c)];
        error += difference * difference;
        norm += expected[static_cast<std::size_t>(c)] * expected[static_cast<std::size_t>(c)];
      }
    }
    // The scores are rounded to T on their way.
    EXPECT_LE(std::sqrt(error / norm), dtype == DType::bf16 ? 4e-3 : 5e-4);
    EXPECT_TRUE(out.gaps_intact());
  }
}

TEST_P(Language, ProductsFromRegistersAndRingsOfTheirOwnPace) {
  expect_chain<bf16, 64, 64, 64>(device, random);
  expect_chain<f16, 128, 128, 64>(device, random);
  expect_chain<bf16, 128, 80, 128>(device, random);
}

template <class T, int N, int D, Contract contract>
void expect_paged_product(Device device, std::mt19937_64& random, int part, int rows_used, int rows_end, const Placement& place) {
  SCOPED_TRACE(
      tw::format("{} x {} in parts of {}, {} rows used, {} rows stored, offset {}", N, D, part, rows_used, rows_end, place.offset));
  constexpr bool over_rows = contract == Contract::rows;
  constexpr int kM = 128, kRows = 300, kDepth = over_rows ? N : D, kCols = over_rows ? D : N;
  const int pages = 2 * ceil_div(N, 2 * part);  // half of them belong to others
  PlacedTensor a({kRows, kDepth}, dtype_of<T>, device, place), b({pages, 2 * part, D}, dtype_of<T>, device, place),
      out({kRows, kCols}, dtype_of<T>, device, place);
  // Sums of such integers are exact in every type.
  const auto integers = [&](std::size_t count, unsigned most) {
    std::vector<float> x(count);
    for (float& value : x) value = static_cast<float>(static_cast<int>(random() % (2 * most + 1)) - static_cast<int>(most));
    return x;
  };
  const std::vector<float> av = integers(kRows * kDepth, 1), bv = integers(N * D, 2);
  a.fill(av);
  std::vector<i32> table(static_cast<std::size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), random);
  std::vector<float> paged(static_cast<std::size_t>(pages * 2 * part * D), std::numeric_limits<float>::quiet_NaN());
  for (int row = 0; row < rows_used; ++row)
    std::copy_n(bv.begin() + row * D, D,
                paged.begin() + (table[static_cast<std::size_t>(row / (2 * part))] * 2 * part + row % (2 * part)) * D);
  b.fill(paged);
  const Tensor host = Tensor::empty({pages}, DType::i32, Stream::standard(Device::cpu()));
  std::copy(table.begin(), table.end(), host.data<i32>());
  const Tensor there = host.to(device);
  launch_kernel<PagedProduct<T, kM, N, D, contract>>(device, {ceil_div(kRows, kM)}, [&](auto& bind, auto& p) {
    bind(p.a, a);
    bind(p.b, b, CopiedRows{part});
    bind(p.out, out);
    p.pages = there.data<i32>();
    p.part = part, p.rows_used = rows_used, p.rows_end = rows_end;
  });
  const std::vector<double> got = out.values();
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kCols; ++j) {
      double sum = 0;
      for (int n = 0; n < kDepth; ++n) {
        const int row = over_rows ? n : j, col = over_rows ? j : n;
        if (row < rows_used)
          sum += static_cast<double>(av[static_cast<std::size_t>(i * kDepth + n)]) * bv[static_cast<std::size_t>(row * D + col)];
      }
      const double x = got[static_cast<std::size_t>(i * kCols + j)];
      if (i < rows_end)
        ASSERT_EQ(x, sum) << "(" << i << ", " << j << ")";
      else
        ASSERT_TRUE(std::isnan(x)) << "(" << i << ", " << j << ") was written: " << x;
    }
  }
  EXPECT_TRUE(out.gaps_intact());
}

TEST_P(Language, TilesInPartsWithRowsLeftOut) {
  for (const Placement& place : {Placement{.align = 8}, Placement{.offset = 1, .gap = 3}}) {
    for (const auto& [part, rows_used, rows_end] :
         {std::tuple{16, 64, 300}, {16, 1, 299}, {32, 17, 256}, {32, 32, 129}, {64, 63, 64}, {16, 47, 1}, {16, 0, 0}}) {
      expect_paged_product<bf16, 64, 64, Contract::rows>(device, random, part, rows_used, rows_end, place);
      expect_paged_product<f16, 64, 128, Contract::columns>(device, random, part, rows_used, rows_end, place);
    }
  }
}

TEST_P(Language, ProductsSeeWhatWasStoredInSharedMemory) {
  for (const auto& [m, n, k] : {std::tuple{64, 128, 64}, {70, 100, 330}}) {
    SCOPED_TRACE(tw::format("{} x {} x {}", m, n, k));
    PlacedTensor a({m, k}, DType::bf16, device, {.align = 8}), b({n, k}, DType::bf16, device, {.align = 8}),
        out({m, n}, DType::f32, device);
    const std::vector<float> av = a.fill_random(random), bv = b.fill_random(random);
    launch_kernel<DoubledProduct<bf16, 64, 128, 64>>(device, {ceil_div(m, 64), ceil_div(n, 128)}, [&](auto& bind, auto& p) {
      bind(p.a, a);
      bind(p.b, b);
      bind(p.out, out);
    });
    const std::vector<double> got = out.values();
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        double sum = 0;
        for (int c = 0; c < k; ++c) sum += 2.0 * av[static_cast<std::size_t>(i * k + c)] * bv[static_cast<std::size_t>(j * k + c)];
        ASSERT_NEAR(got[static_cast<std::size_t>(i * n + j)], sum, 1e-3);
      }
    }
  }
}

/// Products of 8-bit types on the CPU, against sums in double: exact for int8.
template <class T, class Sum, Contract a_contract, Contract b_contract, class Sample>
void expect_negated_product(Sum start, int m, int n, int k, Sample sample) {
  SCOPED_TRACE(tw::format("{} x {} x {}", m, n, k));
  constexpr int kTile = 64, kDepth = 96;
  const auto at = [](const Tensor& t, int row, int col) -> T& { return t.data<T>()[row * t.stride(0) + col * t.stride(1)]; };
  const auto operand = [&](int outer, Contract contract) {  // a view of wider memory
    const bool columns = contract == Contract::columns;
    const Tensor whole = Tensor::poisoned({columns ? outer : k, (columns ? k : outer) + 3}, dtype_of<T>);
    const Tensor view = whole.slice(1, 1, whole.shape(1) - 2);
    for (int row = 0; row < view.shape(0); ++row)
      for (int col = 0; col < view.shape(1); ++col) at(view, row, col) = sample();
    return view;
  };
  const Tensor a = operand(m, a_contract), b = operand(n, b_contract);
  const Tensor out = Tensor::poisoned({m, n}, dtype_of<Sum>), rounded = Tensor::poisoned({m, n}, DType::i8);
  launch_cpu<NegatedProduct<T, Sum, kTile, kTile, kDepth, a_contract, b_contract>>({ceil_div(m, kTile), ceil_div(n, kTile)},
                                                                                   [&](auto& bind, auto& p) {
                                                                                     bind(p.a, a);
                                                                                     bind(p.b, b);
                                                                                     bind(p.out, out);
                                                                                     bind(p.rounded, rounded);
                                                                                     p.start = start;
                                                                                     p.depth = k;
                                                                                   });
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = static_cast<double>(start) + 1000 * (i % kTile) + j % kTile, magnitude = std::abs(sum);
      for (int c = 0; c < k; ++c) {
        const T x = a_contract == Contract::columns ? at(a, i, c) : at(a, c, i),
                y = b_contract == Contract::columns ? at(b, j, c) : at(b, c, j);
        const double negated =
            std::is_same_v<T, i8> ? std::min(-static_cast<double>(static_cast<float>(x)), 127.0) : -static_cast<float>(x);
        sum += negated * static_cast<double>(static_cast<float>(y));
        magnitude += std::abs(negated * static_cast<double>(static_cast<float>(y)));
      }
      const auto got = static_cast<double>(out.data<Sum>()[i * n + j]);
      const double allowed = std::is_same_v<Sum, i32> ? 0 : std::ldexp(magnitude * (k + 2), -23);
      ASSERT_LE(std::abs(got - sum), allowed) << i << ", " << j << ": " << got;
      ASSERT_EQ(rounded.data<i8>()[i * n + j], std::clamp(std::nearbyint(got), -128.0, 127.0)) << i << ", " << j;
    }
  }
}

TEST(NarrowProducts, OfInt8AreExactOnTheCpu) {
  std::mt19937_64 random = random_engine();
  const auto anything = [&] { return static_cast<i8>(random()); };
  const auto extremes = [&] { return static_cast<i8>(random() % 2 == 0 ? -128 : 127); };
  constexpr i32 kStart = (1 << 30) + 1;  // f32 would round it
  for (const auto& [m, n, k] : {std::tuple{64, 64, 96}, {65, 63, 193}, {1, 7, 3}, {130, 100, 500}, {5, 70, 0}}) {
    expect_negated_product<i8, i32, Contract::columns, Contract::columns>(kStart, m, n, k, anything);
    expect_negated_product<i8, i32, Contract::columns, Contract::rows>(-kStart, m, n, k, extremes);
    expect_negated_product<i8, i32, Contract::rows, Contract::columns>(0, m, n, k, extremes);
    expect_negated_product<i8, i32, Contract::rows, Contract::rows>(kStart, m, n, k, anything);
  }
}

TEST(NarrowProducts, OfFp8AreMultipliedInF32OnTheCpu) {
  std::mt19937_64 random = random_engine();
  std::normal_distribution<float> normal;
  for (const auto& [m, n, k] : {std::tuple{64, 64, 96}, {65, 63, 193}, {1, 7, 3}}) {
    expect_negated_product<fp8_e4m3, float, Contract::columns, Contract::rows>(0.5f, m, n, k, [&] { return fp8_e4m3(normal(random)); });
    expect_negated_product<fp8_e5m2, float, Contract::rows, Contract::columns>(0.5f, m, n, k, [&] { return fp8_e5m2(normal(random)); });
  }
}

template <int R, int C, int Warps>
void expect_largest_columns(Device device, std::mt19937_64& random) {
  for (const auto& [rows, cols] : {std::pair{R, C}, {3 * R + 1, C - 1}, {1, 1}}) {
    SCOPED_TRACE(tw::format("{} x {} of {} x {}", rows, cols, R, C));
    PlacedTensor in({rows, cols}, DType::f32, device), columns({rows}, DType::i32, device), above({rows}, DType::i32, device);
    std::vector<float> x(static_cast<std::size_t>(rows * cols));
    for (float& value : x) value = static_cast<float>(random() % 50);
    in.fill(x);
    launch_kernel<LargestColumn<R, C, Warps>>(device, {ceil_div(rows, R)}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      p.columns = columns.tensor().template data<i32>();
      p.above = above.tensor().template data<i32>();
      p.limit = 40;
    });
    const std::vector<double> got_columns = columns.values(), got_above = above.values();
    for (int row = 0; row < rows; ++row) {
      const float* const begin = x.data() + row * cols;
      EXPECT_EQ(got_columns[static_cast<std::size_t>(row)], static_cast<double>(std::max_element(begin, begin + cols) - begin));
      EXPECT_EQ(got_above[static_cast<std::size_t>(row)],
                static_cast<double>(std::count_if(begin, begin + cols, [](float value) { return value > 40; })));
    }
  }
}

TEST_P(Language, RowsOfIntegersReduce) {
  expect_largest_columns<8, 256, 4>(device, random);
  expect_largest_columns<16, 64, 4>(device, random);
  expect_largest_columns<1, 1024, 4>(device, random);
  expect_largest_columns<2, 512, 8>(device, random);
}

/// Rows of `cols` numbers, `distinct` of them at most; the n-th largest is looked for.
template <int Warps, int Counters, int Capacity>
void expect_largest_numbers(Device device, std::mt19937_64& random, int cols, int distinct, int n) {
  SCOPED_TRACE(tw::format("{} numbers, {} distinct, n {}", cols, distinct, n));
  constexpr int kRows = 3;
  const int sorted = random() % 2 == 0 ? Capacity : n;
  PlacedTensor in({kRows, cols}, DType::f32, device), located({kRows, 4}, DType::i32, device), out({kRows, Capacity}, DType::i64, device);
  std::vector<float> x(static_cast<std::size_t>(kRows * cols));
  const auto step = static_cast<unsigned>(Counters / distinct);
  for (float& value : x) value = static_cast<float>(random() % static_cast<unsigned>(distinct) * step + step - 1);
  in.fill(x);
  launch_kernel<LargestNumbers<Warps, Counters, Capacity>>(device, {}, [&](auto& bind, auto& p) {
    bind(p.in, in);
    bind(p.located, located);
    bind(p.numbers, out);
    p.n = n;
    p.sorted = sorted;
  });
  const std::vector<double> got = located.values(), numbers = out.values();
  for (int row = 0; row < kRows; ++row) {
    std::vector<double> expected;  // number << 32 | column
    for (int col = 0; col < cols; ++col)
      expected.push_back(std::ldexp(static_cast<double>(x[static_cast<std::size_t>(row * cols + col)]), 32) + col);
    std::sort(expected.begin(), expected.end(), std::greater<>());
    const auto number = [&](double key) { return std::floor(std::ldexp(key, -32)); };
    const double nth = number(expected[static_cast<std::size_t>(n - 1)]);
    const auto above = std::count_if(expected.begin(), expected.end(), [&](double key) { return number(key) > nth; });
    const auto count = std::count_if(expected.begin(), expected.end(), [&](double key) { return number(key) == nth; });
    const auto* const result = got.data() + row * 4;
    EXPECT_EQ(result[0], nth);
    EXPECT_EQ(result[1], static_cast<double>(above));
    EXPECT_EQ(result[2], static_cast<double>(count));
    ASSERT_EQ(result[3], static_cast<double>(above + count));
    expected.resize(static_cast<std::size_t>(std::min<std::int64_t>(above + count, sorted)));
    expected.resize(Capacity, 0);
    for (int i = 0; i < Capacity; ++i)
      ASSERT_EQ(numbers[static_cast<std::size_t>(row * Capacity + i)], expected[static_cast<std::size_t>(i)]) << "row " << row << ", " << i;
  }
}

TEST_P(Language, HistogramsLocateAndListsSort) {
  for (const int n : {1, 2, 99, 100}) expect_largest_numbers<4, 256, 1024>(device, random, 100, 256, n);
  expect_largest_numbers<4, 256, 1024>(device, random, 1000, 1, 500);  // all in one counter
  expect_largest_numbers<4, 256, 1024>(device, random, 1024, 2, 1024);
  expect_largest_numbers<4, 256, 1024>(device, random, 1, 3, 1);
  expect_largest_numbers<4, 128, 1024>(device, random, 5000, 128, 700);
  for (const int n : {1, 1000, 2000}) expect_largest_numbers<16, 2048, 4096>(device, random, 3001, 2048, n);
  expect_largest_numbers<32, 2048, 4096>(device, random, 10007, 2048, 4000);
}

TEST_P(Language, PrintShowsTheTile) {
  std::string expected;
  for (int row = 0; row < 64; ++row) {
    expected += tw::format("x[{}]:", row);
    for (int col = 0; col < 8; ++col) expected += tw::format(" {}", 100 * row + col);
    expected += "\n";
  }
  testing::internal::CaptureStdout();
  launch_kernel<Printed>(device, {3, 2, 1}, [](auto&, auto&) {});
  Stream::standard(device).synchronize();
  EXPECT_EQ(testing::internal::GetCapturedStdout(), expected);
}

TEST_P(Language, NoTilesNoLaunch) {
  PlacedTensor x({4, 64}, DType::f32, device);
  for (const TileGrid& grid : {TileGrid{0, 1, 1}, TileGrid{1, 0, 1}, TileGrid{1, 1, 0}}) {
    launch_kernel<CopyRows<float, float, 8, 64>>(device, grid, [&](auto&, auto&) { FAIL() << "nothing to bind"; });
  }
  EXPECT_TRUE(x.untouched());
}

TEST_P(Language, BindRefusesWhatTheKernelCannotTake) {
  PlacedTensor x({4, 64}, DType::f32, device), half({4, 64}, DType::f16, device), five({1, 1, 1, 4, 64}, DType::f32, device);
  const auto launch_with = [&](const Tensor& in, const Tensor& out) {
    launch_kernel<CopyRows<float, float, 8, 64>>(device, {}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      bind(p.out, out);
    });
  };
  expect_error<InvalidArgument>([&] { launch_with(half, x); }, {"dtype", "f16[4, 64]", "f32"});
  expect_error<InvalidArgument>([&] { launch_with(five, x); }, {"dimensions", "f32[1, 1, 1, 4, 64]", "1 to 4"});
  const Device other = device.is_cuda() ? Device::cpu() : Device::cuda();
  alignas(16) float memory[8] = {};
  const Tensor elsewhere = Tensor::borrow(memory, {1, 8}, DType::f32, other);
  expect_error<InvalidArgument>([&] { launch_with(elsewhere, x); }, {"device", "f32[1, 8] on " + other.name(), device.name()});
  const Tensor huge = Tensor::borrow(x.tensor().data(), {std::int64_t{1} << 31, 1}, DType::f32, device, {0, 0});
  expect_error<InvalidArgument>([&] { launch_with(huge, x); }, {"extent", "2147483648", "2^31 - 1"});
  EXPECT_TRUE(x.untouched());
}

// What would hang or race on a GPU is an error on the CPU.

/// A kernel of one ring whose steps, puts per step and `compute` are given: a host type, which only the CPU can run.
template <class Body, int Stages>
struct Scheduled {
  template <class Target>
  struct On {
    using Piece = Shared<Target, float, 64, 32>;
    struct Params {
      Global<Target, const float, Piece> in;
    };
    struct Memory {
      Ring<Target, Piece, Stages> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {
      Fragment<Target, float, 64, 64> acc;
    };
    static constexpr int rows = 64;
    static int steps(const Params&, Tile) { return Body::steps; }
    static void load(auto& producer, const Params& p, Tile, int step, Memory& memory) {
      for (int i = 0; i < Body::puts; ++i)
        producer.put(memory.ring, [&](auto copy, Piece& piece) { copy.tile(p.in, piece, Body::first_row, step * 32); });
    }
    static void compute(auto& block, const Params&, Tile, Memory& memory, State& state) { Body::run(block, memory.ring, state.acc); }
    static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};

template <int kSteps, int kPuts = 1, int kFirstRow = 0>
struct Steps {
  static constexpr int steps = kSteps;
  static constexpr int puts = kPuts;
  static constexpr int first_row = kFirstRow;
};

class ScheduleErrors : public testing::Test {
 protected:
  void SetUp() override { cpu::set_poison_released_slots(true); }
  void TearDown() override { cpu::set_poison_released_slots(before_); }
  template <class Body, int Stages>
  void run() {
    PlacedTensor in({64, 96}, DType::f32, Device::cpu());
    std::mt19937_64 random = random_engine();
    in.fill_random(random);
    launch<Scheduled<Body, Stages>>(Stream::standard(Device::cpu()), {}, [&](auto& bind, auto& p) { bind(p.in, in); });
  }

 private:
  const bool before_ = cpu::poison_released_slots();
};

struct Correct : Steps<3> {
  static void run(auto& block, auto& ring, auto& acc) {
    for (int step = 0; step < 3; ++step) {
      auto& piece = block.take(ring);
      block.mma(acc, piece, piece, step == 0);
      block.wait(leave<0>, acc);
      block.release(ring);
    }
  }
};

TEST_F(ScheduleErrors, NoneInACorrectKernel) {
  EXPECT_NO_THROW((run<Correct, 1>()));
  EXPECT_NO_THROW((run<Correct, 2>()));
}

struct HoldsTwo : Steps<3> {
  static void run(auto& block, auto& ring, auto&) {
    block.take(ring);
    block.take(ring);
    block.release(ring);
    block.release(ring);
    block.take(ring);
    block.release(ring);
  }
};

TEST_F(ScheduleErrors, PutIntoAFullRing) {
  expect_error<Error>([&] { run<HoldsTwo, 1>(); }, {"schedule", "put into a ring with no free slot"});
  EXPECT_NO_THROW((run<HoldsTwo, 2>()));
}

TEST_F(ScheduleErrors, PutIntoTheFullRingOfAProductThatNeedsTwoStages) {
  // One product is in flight while the next slot is taken.
  std::mt19937_64 random = random_engine();
  expect_error<Error>([&] { expect_product<float, Contract::columns, Contract::columns, 1>(Device::cpu(), random, 64, 64, 65); },
                      {"schedule", "put into a ring with no free slot"});
  expect_product<float, Contract::columns, Contract::columns, 1>(Device::cpu(), random, 64, 64, 64);  // a single step
  expect_product<float, Contract::columns, Contract::columns, 2>(Device::cpu(), random, 64, 64, 65);
}

struct TakesFour : Steps<3> {
  static void run(auto& block, auto& ring, auto&) {
    for (int i = 0; i < 4; ++i) {
      block.take(ring);
      block.release(ring);
    }
  }
};

TEST_F(ScheduleErrors, TakeWithNothingLeft) {
  expect_error<Error>([&] { run<TakesFour, 2>(); }, {"schedule", "empty ring with no step left to load"});
}

struct ReleasesFirst : Steps<1> {
  static void run(auto& block, auto& ring, auto&) { block.release(ring); }
};
struct ReleasesTwice : Steps<2> {
  static void run(auto& block, auto& ring, auto&) {
    block.take(ring);
    block.release(ring);
    block.release(ring);
  }
};

TEST_F(ScheduleErrors, ReleaseWithoutTake) {
  expect_error<Error>([&] { run<ReleasesFirst, 2>(); }, {"schedule", "released, but none is taken"});
  expect_error<Error>([&] { run<ReleasesTwice, 2>(); }, {"schedule", "released, but none is taken"});
}

struct ReleasesUnderProduct : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    block.mma(acc, piece, piece, true);
    block.release(ring);
  }
};
struct WaitsForTooFew : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    block.mma(acc, piece, piece, true);
    block.wait(leave<1>, acc);  // the only one
    block.release(ring);
  }
};
struct ReleasesTheOlder : Steps<2> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& first = block.take(ring);
    block.mma(acc, first, first, true);
    auto& second = block.take(ring);
    block.mma(acc, second, second, false);
    block.wait(leave<1>, acc);
    block.release(ring);  // the first: its product is done
    block.wait(leave<0>, acc);
    block.release(ring);
  }
};

TEST_F(ScheduleErrors, ReleaseUnderAProduct) {
  expect_error<Error>([&] { run<ReleasesUnderProduct, 2>(); }, {"schedule", "release of a slot that a product in flight reads"});
  expect_error<Error>([&] { run<WaitsForTooFew, 2>(); }, {"schedule", "release of a slot that a product in flight reads"});
  EXPECT_NO_THROW((run<ReleasesTheOlder, 2>()));
}

template <int kWhat>
struct TouchesUnderProduct : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    cpu::Operand<float, 64, 32> operand{};
    cpu::Fragment<float, 64, 32> other;
    block.fill(other, 1.0f);
    block.mma(acc, operand, piece, true);
    if (kWhat == 1) block.for_each(acc, [](int, int, float& x) { x = 0; });
    if (kWhat == 2) block.rows(acc, [](int, auto row) { row.map([](auto x) { return x; }); });
    if (kWhat == 3) block.map(acc, 2.0f, [](auto x, auto y) { return x * y; });
    if (kWhat == 4) block.convert(operand, other);
    if (kWhat == 5) block.store(other, piece);
    if (kWhat == 6) block.zero_rows(piece, 8);
    if (kWhat == 7) block.fill(other, 2.0f);  // not the product's
    block.wait(leave<0>, acc);
    block.for_each(acc, [](int, int, float& x) { x = 0; });
    block.release(ring);
  }
};

TEST_F(ScheduleErrors, TouchingWhatAProductUses) {
  expect_error<Error>([&] { run<TouchesUnderProduct<1>, 2>(); }, {"schedule", "accumulators are read or written while a product adds"});
  expect_error<Error>([&] { run<TouchesUnderProduct<2>, 2>(); }, {"schedule", "accumulators are read or written while a product adds"});
  expect_error<Error>([&] { run<TouchesUnderProduct<3>, 2>(); }, {"schedule", "accumulators are read or written while a product adds"});
  expect_error<Error>([&] { run<TouchesUnderProduct<4>, 2>(); }, {"schedule", "an operand is written while a product reads it"});
  expect_error<Error>([&] { run<TouchesUnderProduct<5>, 2>(); }, {"schedule", "an operand is written while a product reads it"});
  expect_error<Error>([&] { run<TouchesUnderProduct<6>, 2>(); }, {"schedule", "an operand is written while a product reads it"});
  EXPECT_NO_THROW((run<TouchesUnderProduct<7>, 2>()));
}

struct MultipliesReleased : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    block.release(ring);
    block.mma(acc, piece, piece, true);
  }
};
struct MultipliesReleasedFromRegisters : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    block.release(ring);
    cpu::Operand<float, 64, 32> operand{};
    block.mma(acc, operand, piece, true);
  }
};
struct LoadsReleased : Steps<1> {
  static void run(auto& block, auto& ring, auto&) {
    auto& piece = block.take(ring);
    block.release(ring);
    cpu::Fragment<float, 64, 32> x;
    block.load(x, piece);
  }
};

TEST_F(ScheduleErrors, UseAfterRelease) {
  expect_error<Error>([&] { run<MultipliesReleased, 2>(); }, {"schedule", "a product reads a slot that was released"});
  expect_error<Error>([&] { run<MultipliesReleasedFromRegisters, 2>(); }, {"schedule", "a product reads a slot that was released"});
  expect_error<Error>([&] { run<LoadsReleased, 2>(); }, {"schedule", "slot that was released"});
}

struct ManyProducts : Steps<1> {
  static void run(auto& block, auto& ring, auto& acc) {
    auto& piece = block.take(ring);
    for (int i = 0; i < 100; ++i) block.mma(acc, piece, piece, i == 0);
  }
};

TEST_F(ScheduleErrors, TooManyProductsInFlight) {
  expect_error<Error>([&] { run<ManyProducts, 1>(); }, {"schedule", "too many products in flight"});
}

struct TakesOne {
  static void run(auto& block, auto& ring, auto&) {
    block.take(ring);
    block.release(ring);
  }
};
struct LeavesAStep : Steps<2>, TakesOne {};
struct LeavesASlot : Steps<1, 2>, TakesOne {};
struct KeepsASlot : Steps<1> {
  static void run(auto& block, auto& ring, auto&) { block.take(ring); }
};

TEST_F(ScheduleErrors, TilesThatLeaveSomethingToTheNext) {
  expect_error<Error>([&] { run<LeavesAStep, 2>(); }, {"schedule", "ends before its last step was loaded"});
  expect_error<Error>([&] { run<LeavesASlot, 2>(); }, {"schedule", "filled and never taken"});
  expect_error<Error>([&] { run<KeepsASlot, 2>(); }, {"schedule", "taken and never released"});
}

struct BeginsBefore : Steps<1, 1, -1>, TakesOne {};

/// A tile wholly before its tensor is zeros, as one wholly behind it is.
struct LiesBefore : Steps<1, 1, -64> {
  static void run(auto& block, auto& ring, auto&) {
    cpu::Fragment<float, 64, 32> x;
    block.load(x, block.take(ring));
    block.for_each(x, [](int, int, float& value) { EXPECT_EQ(value, 0); });
    block.release(ring);
  }
};

TEST_F(ScheduleErrors, TilesThatBeginBeforeTheirTensor) {
  expect_error<Error>([&] { run<BeginsBefore, 2>(); }, {"schedule", "begins before its tensor and ends inside"});
  EXPECT_NO_THROW((run<LiesBefore, 2>()));
}

TEST_F(ScheduleErrors, LeaveTheNextLaunchAlone) {
  expect_error<Error>([&] { run<ReleasesUnderProduct, 2>(); }, {"schedule"});
  EXPECT_NO_THROW((run<Correct, 2>()));
}

/// Kernels of a list of four values, and of a histogram in which three things were counted.
struct AppendsFive {
  static void run(auto& block, auto& memory) {
    for (u64 i = 0; i < 5; ++i) block.append(memory.list, i);
  }
};
struct LocatesTheFourth {
  static void run(auto& block, auto& memory) {
    block.clear(memory.counters);
    for (int i = 0; i < 3; ++i) block.count(memory.counters, i);
    block.locate(memory.counters, 4);
  }
};
template <class Body>
struct Shares {
  template <class Target>
  struct On {
    struct Params {};
    struct Memory {
      Histogram<Target, 128> counters;
      List<Target, u64, 4> list;
      explicit constexpr Memory(auto& block) : counters(block), list(block) {}
    };
    static void compute(auto& block, const Params&, Tile, Memory& memory) { Body::run(block, memory); }
  };
};

TEST_F(ScheduleErrors, FullListsAndCountersThatHoldTooLittle) {
  const auto launch_body = [](auto body) { launch<Shares<decltype(body)>>(Stream::standard(Device::cpu()), {}, [](auto&, auto&) {}); };
  expect_error<Error>([&] { launch_body(AppendsFive{}); }, {"schedule", "list is full"});
  expect_error<Error>([&] { launch_body(LocatesTheFourth{}); }, {"schedule", "more than was counted"});
}

// With TILEWAVE_TEST_PACK they are kept in that folder, so that the tests run where there is no compiler (scripts/bundle.sh).
TEST(LanguageKernels, CompileForTheGpu) {
  skip_without_nvrtc();
  const char* pack = std::getenv("TILEWAVE_TEST_PACK");
  compile_all(internal::launched_kernels(), 0, [&](std::size_t i, const CompiledKernel& kernel) {
    if (pack != nullptr) write_pack(pack, internal::launched_kernels()[i], kernel);
    EXPECT_FALSE(kernel.cubin.empty());
    EXPECT_EQ(!kernel.tensor_core_instruction.empty(),
              internal::launched_kernels()[i].type.find("::Through") == std::string::npos && kernel.module.loads)
        << internal::launched_kernels()[i].name << ": " << kernel.tensor_core_instruction;
  });
}

TEST(HostKernel, IsForTheCpuAlone) {
  // Its text is not embedded, so there is nothing that the run-time compiler could be given. Said before any device is asked.
  expect_error<InvalidArgument>([&] { launch_gpu<Scheduled<Correct, 2>>(Stream::standard(Device::cpu()), {}, [](auto&, auto&) {}); },
                                {"cannot run on a GPU", "Scheduled", "source"});
}

}  // namespace
}  // namespace tw::test
