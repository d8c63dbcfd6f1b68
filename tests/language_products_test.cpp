// The tile language: rings of tiles in shared memory, and the products that read them, on the CPU and on a GPU.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <tuple>
#include <type_traits>
#include <vector>

#include "kernels/gemm/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/language_fixture.hpp"
#include "tests/launch_kernel.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/product_kernels.tile.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/gemm.tile.hpp"

namespace tw::test {
namespace {

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

template <class T>
void expect_product_in_slot(Device device, std::mt19937_64& random) {
  constexpr int kSteps = 7;
  const auto small = [&](std::size_t count) {  // all sums are exact
    std::vector<float> x(count);
    for (float& value : x) value = static_cast<float>(static_cast<int>(random() % 5) - 2);
    return x;
  };
  PlacedTensor a({64, 64}, dtype_of<T>, device), b({128 * kSteps, 64}, dtype_of<T>, device), v({128 * kSteps, 128}, dtype_of<T>, device);
  const std::vector<float> as = small(64 * 64), bs = small(128 * kSteps * 64), vs = small(128 * kSteps * 128);
  a.fill(as), b.fill(bs), v.fill(vs);
  std::vector<float> expected(64 * 128, 0.0f), largest(kSteps, -1e30f);
  for (std::size_t key = 0; key < 128 * kSteps; ++key) {
    for (std::size_t row = 0; row < 64; ++row) {
      float x = 0;
      for (std::size_t c = 0; c < 64; ++c) x += as[row * 64 + c] * bs[key * 64 + c];
      largest[key / 128] = std::max(largest[key / 128], x);
      for (std::size_t c = 0; c < 128; ++c) expected[row * 128 + c] += x * vs[key * 128 + c];
    }
  }
  std::vector<float> sorted = largest;
  std::sort(sorted.begin(), sorted.end());
  const float limit = sorted[kSteps / 2];  // some steps are above it, and some are not
  for (const float x : largest)
    for (float& value : expected) value += x > limit ? 1000.0f : 0.0f;
  for (int run = 0; run < 20; ++run) {
    PlacedTensor out({64, 128}, DType::f32, device);
    launch_kernel<InTheSlotOfB<T>>(device, {}, [&](auto& bind, auto& p) {
      bind(p.a, a);
      bind(p.b, b);
      bind(p.v, v);
      bind(p.out, out);
      p.steps = kSteps;
      p.limit = limit;
    });
    const std::vector<double> got = out.values();
    for (std::size_t n = 0; n < got.size(); ++n) ASSERT_EQ(got[n], static_cast<double>(expected[n])) << n << " of run " << run;
  }
}

TEST_P(Language, ResultsReplaceAnOperand) {
  expect_product_in_slot<bf16>(device, random);
  expect_product_in_slot<f16>(device, random);
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

template <class T, Contract a_contract, Contract b_contract, int Stages>
void expect_product(Device device, std::mt19937_64& random, std::int64_t m, std::int64_t n, std::int64_t k) {
  SCOPED_TRACE(tw::format("{} x {} x {}, {} stages", m, n, k, Stages));
  constexpr int kBM = 64, kBN = 64, kBK = 64;
  PlacedTensor a(a_contract == Contract::columns ? Shape{m, k} : Shape{k, m}, dtype_of<T>, device, {.gap = 8, .align = 8});
  PlacedTensor b(b_contract == Contract::columns ? Shape{n, k} : Shape{k, n}, dtype_of<T>, device, {.gap = 8, .align = 8});
  PlacedTensor d({m, n}, dtype_of<T>, device, {.align = 8});
  std::vector<float> av = a.fill_random(random), bv = b.fill_random(random, 1 / std::sqrt(static_cast<float>(k)));
  namespace g = kernels::gemm;
  launch_kernel<g::Gemm<g::Operands<T, a_contract, b_contract>, Linear<T, Identity>, g::Tiles<kBM, kBN, kBK, Stages, 1, 8>>>(
      device, {ceil_div(static_cast<int>(m), kBM), ceil_div(static_cast<int>(n), kBN)}, [&](auto& bind, auto& p) {
        bind(p.in.a, a);
        bind(p.in.b, b);
        bind(p.epilogue.d, d);
        bind(p.epilogue.c, nullptr);
        bind(p.epilogue.residual, nullptr);
        p.epilogue.alpha = 1;
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
        scores({queries, keys}, DType::f32, device, {.gap = 1}), out({queries, D}, DType::f32, device, {.gap = 1});
    const std::vector<float> qv = q.fill_random(random), kv = k.fill_random(random, 0.1f), vv = v.fill_random(random, 0.1f);
    launch_kernel<Chain<T, M, N, D>>(device, {ceil_div(queries, M)}, [&](auto& bind, auto& p) {
      bind(p.q, q);
      bind(p.k, k);
      bind(p.v, v);
      bind(p.scores, scores);
      bind(p.out, out);
    });
    const std::vector<double> got = out.values(), rounded = scores.values();
    double error = 0, norm = 0;
    for (int i = 0; i < queries; ++i) {
      std::array<double, D> expected{};
      for (int j = 0; j < keys; ++j) {
        double score = 0;
        for (int c = 0; c < D; ++c)
          score += static_cast<double>(qv[static_cast<std::size_t>(i * D + c)]) * kv[static_cast<std::size_t>(j * D + c)];
        const double of_operand = rounded[static_cast<std::size_t>(i * keys + j)];
        EXPECT_EQ(round_to(dtype, static_cast<float>(of_operand)), of_operand);
        EXPECT_NEAR(of_operand, score, std::abs(score) * (dtype == DType::bf16 ? 0x1p-8 : 0x1p-11) + 1e-5);
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

TEST(ProductRing, OfOneStageIsTooShortForTwoSteps) {
  // One product is in flight while the next slot is taken.
  std::mt19937_64 random = random_engine();
  expect_error<Error>([&] { expect_product<float, Contract::columns, Contract::columns, 1>(Device::cpu(), random, 64, 64, 65); },
                      {"schedule", "put into a ring with no free slot"});
  expect_product<float, Contract::columns, Contract::columns, 1>(Device::cpu(), random, 64, 64, 64);  // a single step
  expect_product<float, Contract::columns, Contract::columns, 2>(Device::cpu(), random, 64, 64, 65);
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

}  // namespace
}  // namespace tw::test
