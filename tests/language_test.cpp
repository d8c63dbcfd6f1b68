// The tile language: kernels that use one part of it each, on the CPU and on a GPU. Products and rings: language_products_test.cpp.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/language_fixture.hpp"
#include "tests/language_kernels.tile.hpp"
#include "tests/launch_kernel.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::test {
namespace {

INSTANTIATE_TEST_SUITE_P(Tile, Language, testing::ValuesIn(kDevices), device_name);

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

/// A part's rows are read and written as a tensor of their own: what is outside of it is `fill`, and stays as it is.
template <class T, int R, int C, int Warps, int Width>
void expect_parts(Device device, DType dtype, std::mt19937_64& random) {
  for (const std::int64_t gap : {0, 3}) {  // whole pieces, and single elements
    for (const auto& [first, count, rows] : {std::array{0, R, 3 * R}, {1, R - 2, 3 * R}, {2, 1, 2 * R}, {3, R, 2 * R + 1}, {2 * R, 5, R}}) {
      SCOPED_TRACE(tw::format("gap {}, part of {} rows from {} of {}", gap, count, first, rows));
      const int cols = C - 8, tiles = 2;
      PlacedTensor in({2, rows, cols}, dtype, device, {.gap = gap}), out({2, rows, cols}, dtype, device, {.gap = gap});
      PlacedTensor all({2, tiles * R, C}, DType::f32, device);
      const std::vector<float> values = in.fill_random(random);
      launch_kernel<Parts<T, R, C, Warps, Width>>(device, {tiles, 1, 2}, [&](auto& bind, auto& p) {
        bind(p.in, in);
        bind(p.out, out);
        bind(p.all, all);
        p.first = first;
        p.count = count;
        p.fill = 7;
      });
      const std::vector<double> read = all.values(), written = out.values();
      for (int i = 0; i < 2; ++i) {
        std::vector<bool> in_a_part(static_cast<std::size_t>(rows), false);
        for (int row = 0; row < tiles * R; ++row) {
          const int source = first + row;
          const bool inside = row % R < count && source < rows;
          if (inside) in_a_part[static_cast<std::size_t>(source)] = true;
          for (int col = 0; col < C; ++col) {
            const double expected =
                inside && col < cols ? static_cast<double>(values[static_cast<std::size_t>((i * rows + source) * cols + col)]) : 7;
            ASSERT_EQ(read[static_cast<std::size_t>((i * tiles * R + row) * C + col)], expected) << "row " << row << " column " << col;
          }
        }
        for (int row = 0; row < rows; ++row) {
          const std::size_t place = static_cast<std::size_t>((i * rows + row) * cols);
          if (in_a_part[static_cast<std::size_t>(row)])
            ASSERT_EQ(written[place], values[place]) << "row " << row;
          else
            ASSERT_TRUE(std::isnan(written[place])) << "row " << row;
        }
      }
      ASSERT_TRUE(out.gaps_intact());
    }
  }
}

TEST_P(Language, PartsAreTensorsOfTheirOwn) {
  expect_parts<bf16, 8, 128, 4, 8>(device, DType::bf16, random);
  expect_parts<float, 16, 32, 4, 4>(device, DType::f32, random);
  expect_parts<f16, 8, 256, 4, 4>(device, DType::f16, random);
}

template <class T, int R, int C, int Warps, int Width>
void expect_vectors_from_rows(Device device, DType dtype, std::mt19937_64& random) {
  for (const std::int64_t cols : {R, 2 * R - 4, 2 * R - 3, 3}) {  // the last two are not whole pieces
    SCOPED_TRACE(tw::format("{} columns", cols));
    const std::int64_t rows = 3;
    PlacedTensor in({2, rows, cols}, dtype, device), out({2, rows, cols}, dtype, device),
        out_any({2, rows, cols}, dtype, device, {.gap = 5});
    PlacedTensor spread({rows, cols, C}, DType::f32, device);
    const std::vector<float> values = in.fill_random(random);
    launch_kernel<VectorsFromRows<T, R, C, Warps, Width>>(device, {ceil_div(static_cast<int>(cols), R), 1, static_cast<int>(rows)},
                                                          [&](auto& bind, auto& p) {
                                                            bind(p.in, in);
                                                            bind(p.in_any, in);
                                                            bind(p.out, out);
                                                            bind(p.out_any, out_any);
                                                            bind(p.spread, spread);
                                                          });
    const std::vector<double> got = spread.values(), stored = out.values(), stored_any = out_any.values();
    for (std::int64_t n = 0; n < rows * cols; ++n) {
      const auto place = static_cast<std::size_t>(rows * cols + n);
      for (std::int64_t c = 0; c < C; ++c) ASSERT_EQ(got[static_cast<std::size_t>(n * C + c)], values[place]) << n;
      ASSERT_EQ(stored[place], values[place]) << n;
      ASSERT_EQ(stored_any[place], values[place]) << n;
      ASSERT_TRUE(std::isnan(stored[static_cast<std::size_t>(n)])) << n;
    }
    ASSERT_TRUE(out_any.gaps_intact());
  }
}

TEST_P(Language, RowsBecomeVectorsOfRows) {
  expect_vectors_from_rows<bf16, 32, 128, 4, 4>(device, DType::bf16, random);
  expect_vectors_from_rows<float, 128, 32, 4, 4>(device, DType::f32, random);
  expect_vectors_from_rows<f16, 16, 256, 4, 8>(device, DType::f16, random);
}

template <int R, int C, int Warps>
void expect_pair_of_folds(Device device, std::mt19937_64& random) {
  constexpr int tiles = 3;
  PlacedTensor x({tiles * R, C}, DType::f32, device), y({tiles * R, C}, DType::f32, device), sums({tiles, R, C}, DType::f32, device);
  const auto integers = [&](PlacedTensor& tensor) {  // whose sums are exact
    std::vector<float> values(tiles * R * C);
    for (float& value : values) value = static_cast<float>(static_cast<int>(random() % 9) - 4);
    tensor.fill(values);
    return values;
  };
  const std::vector<float> of_x = integers(x), of_y = integers(y);
  launch_kernel<PairOfFolds<R, C, Warps>>(device, {tiles}, [&](auto& bind, auto& p) {
    bind(p.x, x);
    bind(p.y, y);
    bind(p.sums, sums);
  });
  const std::vector<double> got = sums.values();
  for (int t = 0; t < tiles; ++t) {
    for (int col = 0; col < C; ++col) {
      double expected = 0;
      for (int row = 0; row < R; ++row) {
        const auto place = static_cast<std::size_t>((t * R + row) * C + col);
        expected += static_cast<double>(of_x[place]) + 1000 * static_cast<double>(of_y[place]);
      }
      for (int row = 0; row < R; ++row) ASSERT_EQ(got[static_cast<std::size_t>((t * R + row) * C + col)], expected) << "tile " << t;
    }
  }
}

TEST_P(Language, ColumnsOfTwoTilesFoldTogether) {
  expect_pair_of_folds<128, 32, 4>(device, random);
  expect_pair_of_folds<8, 256, 8>(device, random);
  expect_pair_of_folds<1, 512, 4>(device, random);
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

/// Integers, so that sums are exact in any order.
template <int R, int C, int Span, int Warps, int Width>
void expect_row_hadamard(Device device, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{} x {}, runs of {}, {} warps, pieces of {}", R, C, Span, Warps, Width));
  constexpr int rows = 2 * R - 1;
  PlacedTensor in({rows, C}, DType::f32, device, {.gap = 8}), out({rows, C}, DType::f32, device);
  std::vector<float> x(rows * C);
  for (float& value : x) value = static_cast<float>(static_cast<int>(random() % 17) - 8);
  in.fill(x);
  launch_kernel<RowHadamard<float, R, C, Span, Warps, Width>>(device, {2}, [&](auto& bind, auto& p) {
    bind(p.in, in);
    bind(p.out, out);
  });
  const std::vector<double> got = out.values();
  for (std::size_t run = 0; run < x.size(); run += Span) {
    for (unsigned col = 0; col < Span; ++col) {
      double sum = 0;
      for (unsigned k = 0; k < Span; ++k) sum += std::popcount(col & k) % 2 == 0 ? x[run + k] : -x[run + k];
      ASSERT_EQ(got[run + col], sum) << "element " << run + col;
    }
  }
  ASSERT_TRUE(out.gaps_intact());
}

TEST_P(Language, RunsOfColumnsAreTransformed) {
  expect_row_hadamard<512, 8, 8, 4, 8>(device, random);  // in a thread
  expect_row_hadamard<512, 8, 2, 4, 8>(device, random);
  expect_row_hadamard<64, 64, 64, 4, 4>(device, random);  // in the lanes of half a warp
  expect_row_hadamard<64, 64, 16, 4, 4>(device, random);
  expect_row_hadamard<8, 256, 256, 4, 8>(device, random);    // in a warp
  expect_row_hadamard<4, 1024, 1024, 4, 8>(device, random);  // in a warp, over several pieces of each lane
  expect_row_hadamard<4, 384, 128, 4, 4>(device, random);    // several runs in a row
  expect_row_hadamard<8, 384, 1, 4, 4>(device, random);
  expect_row_hadamard<1, 768, 4, 4, 2>(device, random);  // a row of several warps
  expect_row_hadamard<1, 1536, 64, 4, 4>(device, random);
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

/// Lists the elements of rows apart. Each row has `cols` elements, and a `share` of them is negative. Of the others there must be no more
/// than Capacity; of the negative ones there may be.
template <int Warps, int Columns, int Capacity>
void expect_parted_rows(Device device, std::mt19937_64& random, int cols, double share) {
  SCOPED_TRACE(tw::format("{} warps, {} at a time, {} columns, {} of them below 0", Warps, Columns, cols, share));
  constexpr int kRows = 3;
  PlacedTensor in({kRows, cols}, DType::f32, device), elements({kRows, Capacity}, DType::f32, device);
  PlacedTensor columns({kRows, Capacity}, DType::i32, device), counts({kRows, 2}, DType::i32, device);
  std::vector<float> x(static_cast<std::size_t>(kRows * cols));
  for (float& value : x) {
    const auto size = static_cast<float>(random() % 1000);
    value = std::bernoulli_distribution(share)(random) ? -1 - size : size;
  }
  in.fill(x);
  launch_kernel<PartedRows<Warps, Columns, Capacity>>(device, {kRows}, [&](auto& bind, auto& p) {
    bind(p.in, in);
    bind(p.elements, elements);
    bind(p.columns, columns);
    bind(p.counts, counts);
  });
  const std::vector<double> got_elements = elements.values(), got_columns = columns.values(), sizes = counts.values();
  for (int row = 0; row < kRows; ++row) {
    std::vector<double> positive, negative;
    for (int col = 0; col < cols; ++col) {
      const float value = x[static_cast<std::size_t>(row * cols + col)];
      value < 0 ? negative.push_back(2 * col + 1) : positive.push_back(value);
    }
    ASSERT_LE(positive.size(), static_cast<std::size_t>(Capacity));
    negative.resize(std::min(negative.size(), static_cast<std::size_t>(Capacity)));
    ASSERT_EQ(sizes[static_cast<std::size_t>(2 * row)], static_cast<double>(positive.size())) << "row " << row;
    ASSERT_EQ(sizes[static_cast<std::size_t>(2 * row + 1)], static_cast<double>(negative.size())) << "row " << row;
    for (std::size_t i = 0; i < positive.size(); ++i)
      ASSERT_EQ(got_elements[static_cast<std::size_t>(row * Capacity) + i], positive[i]) << "row " << row << ", " << i;
    for (std::size_t i = 0; i < negative.size(); ++i)
      ASSERT_EQ(got_columns[static_cast<std::size_t>(row * Capacity) + i], negative[i]) << "row " << row << ", " << i;
  }
}

TEST_P(Language, ListsInTheOrderOfColumns) {
  for (const double share : {0.0, 0.1, 0.9, 1.0}) {
    expect_parted_rows<4, 128, 1024>(device, random, 900, share);      // a column for each thread
    expect_parted_rows<4, 1024, 1024>(device, random, 1000, share);    // a piece of 8
    expect_parted_rows<16, 16384, 4096>(device, random, 4000, share);  // four pieces
    expect_parted_rows<8, 6144, 8192>(device, random, 8000, share);    // three
  }
  expect_parted_rows<8, 8192, 512>(device, random, 20000, 0.99);  // more than fit
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

// With TILEWAVE_TEST_PACK they are kept in that folder, so that the tests run where there is no compiler (scripts/bundle.sh).
TEST(LanguageKernels, CompileForTheGpu) {
  skip_without_nvrtc();
  const char* pack = std::getenv("TILEWAVE_TEST_PACK");
  compile_all(internal::launched_kernels(), 0, [&](std::size_t i, const CompiledKernel& kernel) {
    if (pack != nullptr) write_pack(pack, internal::launched_kernels()[i], kernel);
    EXPECT_FALSE(kernel.cubin.empty());
    const std::string& type = internal::launched_kernels()[i].type;
    const bool multiplies =
        (kernel.module.loads && type.find("::Through") == std::string::npos) || type.find("UnitLowerInverses") != std::string::npos;
    EXPECT_EQ(!kernel.tensor_core_instruction.empty(), multiplies)
        << internal::launched_kernels()[i].name << ": " << kernel.tensor_core_instruction;
  });
}

}  // namespace
}  // namespace tw::test
