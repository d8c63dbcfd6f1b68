// Kernels whose compute role writes shared memory and multiplies it (Buffers and views), holds accumulators of several shapes, scans and
// solves: tests/tile_kernels.tile.hpp, against loops in double.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/language_launches.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/device.hpp"

namespace tw::test {
namespace {

class Tiles : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();

  template <int D>
  void expect_chained_products();
  std::vector<float> integers(std::size_t count, int low, int high) {
    std::uniform_int_distribution<int> pick(low, high);
    std::vector<float> values(count);
    for (float& x : values) x = static_cast<float>(pick(random));
    return values;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, Tiles, testing::ValuesIn(kDevices), device_name);

std::size_t at(std::initializer_list<int> index, std::initializer_list<int> extents) {
  std::size_t offset = 0;
  auto extent = extents.begin();
  for (int i : index) offset = offset * static_cast<std::size_t>(*extent++) + static_cast<std::size_t>(i);
  return offset;
}

/// The elements of a tensor to which Fragments were added: of every 8 columns the even ones come first.
std::vector<double> even_first(const std::vector<double>& in_order) {
  std::vector<double> values(in_order.size());
  for (std::size_t i = 0; i < values.size(); ++i) values[i / 8 * 8 + i % 2 * 4 + i % 8 / 2] = in_order[i];
  return values;
}

/// Integers, so that every order of the additions gives the same sums, and none is rounded: exactly those of double.
template <int D>
void Tiles::expect_chained_products() {
  constexpr int M = 64, N = 128;
  // Many tiles for each block of the persistent grid; the last queries and keys fill theirs in part.
  const int queries = 150, keys = 200, batch = device.is_cuda() ? 300 : 3;
  PlacedTensor q({batch, queries, D}, DType::bf16, device), k({batch, keys, D}, DType::bf16, device);
  PlacedTensor lse({batch, queries}, DType::f32, device, {.align = 4}), delta({batch, queries}, DType::f32, device, {.align = 4});
  const auto size = [&](int rows, int cols) { return static_cast<std::size_t>(batch) * static_cast<std::size_t>(rows * cols); };
  const std::vector<float> qs = integers(size(queries, D), -1, 1), ks = integers(size(keys, D), -1, 1),
                           lses = integers(size(queries, 1), -8, 8), deltas = integers(size(queries, 1), -2, 2);
  q.fill(qs);
  k.fill(ks);
  lse.fill(lses);
  delta.fill(deltas);
  std::vector<double> dq(size(queries, D)), dk(size(keys, D));
  for (int b = 0; b < batch; ++b) {
    for (int m = 0; m < queries; ++m) {
      for (int n = 0; n < keys; ++n) {
        const float* const q_row = &qs[at({b, m, 0}, {batch, queries, D})];
        const float* const k_row = &ks[at({b, n, 0}, {batch, keys, D})];
        double s = 0;
        for (int d = 0; d < D; ++d) s += q_row[d] * k_row[d];
        const double ds = (s - lses[at({b, m}, {batch, queries})]) * deltas[at({b, m}, {batch, queries})];
        for (int d = 0; d < D; ++d) {
          dq[at({b, m, d}, {batch, queries, D})] += ds * k_row[d];
          dk[at({b, n, d}, {batch, keys, D})] += ds * q_row[d];
        }
      }
    }
  }
  for (int round = 0; round < 3; ++round) {
    PlacedTensor dq_out({batch, queries, D}, DType::f32, device, {.gap = 16}), dk_out({batch, keys, D}, DType::f32, device, {.gap = 4});
    dq_out.fill(std::vector<float>(dq.size(), 0.0f));
    launch_backward_products<bf16, M, N, D>(Stream::standard(device),
                                            {.q = q, .k = k, .lse = lse, .delta = delta, .dq = dq_out, .dk = dk_out});
    ASSERT_EQ(dq_out.values(), even_first(dq)) << "round " << round;
    ASSERT_EQ(dk_out.values(), dk) << "round " << round;
    EXPECT_TRUE(dq_out.gaps_intact() && dk_out.gaps_intact());
  }
}

TEST_P(Tiles, ChainedProductsThroughABufferAndItsTranspose) {
  expect_chained_products<128>();
  expect_chained_products<64>();  // warpgroups that split 64 columns have half a panel of the right operand each
}

double relative_error(const std::vector<double>& out, const std::vector<double>& expected) {
  double error = 0, squares = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    error += (out[i] - expected[i]) * (out[i] - expected[i]);
    squares += expected[i] * expected[i];
  }
  return std::sqrt(error / squares);  // NaN if any output is
}

TEST_P(Tiles, LatentAttentionReadsOneTileAsKeysAndAsValues) {
  constexpr int M = 64, N = 64, D = 576, Dv = 512;
  const int heads = 100, keys = 150, batch = device.is_cuda() ? 70 : 2;
  PlacedTensor q({batch, heads, D}, DType::bf16, device), k({batch, keys, D}, DType::bf16, device);
  const std::vector<float> qs = q.fill_random(random), ks = k.fill_random(random);
  const float scale = 3.0f / std::sqrt(static_cast<float>(D));  // rows with a few large weights
  std::vector<double> expected(at({batch, 0, 0}, {batch, heads, Dv}));
  std::vector<double> weights(static_cast<std::size_t>(keys));
  for (int b = 0; b < batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      double largest = -1e30, sum = 0;
      for (int n = 0; n < keys; ++n) {
        double s = 0;
        for (int d = 0; d < D; ++d) s += qs[at({b, h, d}, {batch, heads, D})] * ks[at({b, n, d}, {batch, keys, D})];
        weights[static_cast<std::size_t>(n)] = s * scale;
        largest = std::max(largest, s * scale);
      }
      for (double& w : weights) sum += w = std::exp(w - largest);
      for (int n = 0; n < keys; ++n)
        for (int d = 0; d < Dv; ++d)
          expected[at({b, h, d}, {batch, heads, Dv})] += weights[static_cast<std::size_t>(n)] / sum * ks[at({b, n, d}, {batch, keys, D})];
    }
  }
  std::vector<double> first;
  for (int round = 0; round < 3; ++round) {
    PlacedTensor out({batch, heads, Dv}, DType::f32, device, {.gap = 3});
    launch_latent_attention<bf16, M, N, D, Dv>(Stream::standard(device), {.q = q, .k = k, .out = out, .scale = scale});
    const std::vector<double> got = out.values();
    // Weights are rounded to bf16, by up to 2^-9 of each and 2^-9 / sqrt(3) on average: what is left of that in sums of several is less.
    ASSERT_LT(relative_error(got, expected), 1.5e-3);
    if (round == 0) first = got;
    ASSERT_EQ(got, first) << "round " << round;
    EXPECT_TRUE(out.gaps_intact());
  }
}

TEST_P(Tiles, ChunkedRecurrenceIsTheRecurrence) {
  constexpr int C = 64, D = 64;
  const int tokens = 200, batch = device.is_cuda() ? 150 : 3;
  PlacedTensor q({batch, tokens, D}, DType::f16, device), k({batch, tokens, D}, DType::f16, device),
      v({batch, tokens, D}, DType::f16, device);
  PlacedTensor gates({batch, tokens}, DType::f32, device, {.align = 4}), betas({batch, tokens}, DType::f32, device, {.align = 4});
  const std::vector<float> qs = q.fill_random(random, 0.125f), ks = k.fill_random(random, 0.125f), vs = v.fill_random(random);
  std::vector<float> g(static_cast<std::size_t>(batch * tokens)), beta(g.size());
  std::uniform_real_distribution<float> uniform(0, 1);
  for (float& x : g) x = -0.1f * uniform(random);
  for (float& x : beta) x = uniform(random);
  gates.fill(g);
  betas.fill(beta);
  std::vector<double> expected(qs.size()), states;
  for (int b = 0; b < batch; ++b) {
    std::vector<double> s(D * D);
    for (int t = 0; t < tokens; ++t) {
      const std::size_t token = at({b, t, 0}, {batch, tokens, D}), scalar = at({b, t}, {batch, tokens});
      for (double& x : s) x *= std::exp2(static_cast<double>(g[scalar]));
      std::vector<double> u(D);
      for (int j = 0; j < D; ++j) {
        double old = 0;
        for (int i = 0; i < D; ++i) old += s[at({i, j}, {D, D})] * ks[token + static_cast<std::size_t>(i)];
        u[static_cast<std::size_t>(j)] = beta[scalar] * (vs[token + static_cast<std::size_t>(j)] - old);
      }
      for (int i = 0; i < D; ++i) {
        for (int j = 0; j < D; ++j) {
          double& x = s[at({i, j}, {D, D})];
          x += ks[token + static_cast<std::size_t>(i)] * u[static_cast<std::size_t>(j)];
          expected[token + static_cast<std::size_t>(j)] += x * qs[token + static_cast<std::size_t>(i)];
        }
      }
    }
    states.insert(states.end(), s.begin(), s.end());
  }
  std::vector<double> first, first_state;
  for (int round = 0; round < 3; ++round) {
    PlacedTensor out({batch, tokens, D}, DType::f32, device, {.gap = 1}), last({batch, D, D}, DType::f32, device);
    launch_gated_delta_rule<f16, C, D>(Stream::standard(device),
                                       {.q = q, .k = k, .v = v, .gates = gates, .betas = betas, .out = out, .last = last});
    const std::vector<double> got = out.values(), got_state = last.values();
    // f16 operands of four products after each other, each rounded by up to 2^-11.
    ASSERT_LT(relative_error(got, expected), 1e-3);
    ASSERT_LT(relative_error(got_state, states), 1e-3);
    if (round == 0) first = got, first_state = got_state;
    ASSERT_EQ(got, first) << "round " << round;
    ASSERT_EQ(got_state, first_state) << "round " << round;
    EXPECT_TRUE(out.gaps_intact());
  }
}

/// Integers: the sums are exact.
template <int R, int C>
void expect_cumulative_sums(Device device, const std::vector<float>& values) {
  constexpr int rows = 2 * R, cols = 2 * C;
  SCOPED_TRACE(tw::format("{} x {}", R, C));
  PlacedTensor in({rows, cols}, DType::f32, device);
  in.fill(values);
  std::vector<PlacedTensor> out;
  for (int i = 0; i < 6; ++i) out.emplace_back(Shape{rows, cols}, DType::f32, device);
  launch_kernel<CumulativeSums<R, C>>(device, {2, 2}, [&](auto& bind, auto& p) {
    bind(p.in, in);
    bind(p.by_row, out[0]);
    bind(p.by_row_backward, out[1]);
    bind(p.by_column, out[2]);
    bind(p.by_column_backward, out[3]);
    bind(p.of_rows, out[4]);
    bind(p.of_rows_backward, out[5]);
  });
  std::vector<std::vector<double>> expected(6, std::vector<double>(values.begin(), values.end()));
  const auto cumulate = [&](std::vector<double>& x, bool along_rows, bool backward) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < cols; ++c) {
        const int row = backward ? rows - 1 - r : r, col = backward ? cols - 1 - c : c;
        const int step = backward ? 1 : -1;
        const int row_before = along_rows ? row : row + step, col_before = along_rows ? col + step : col;
        const bool first = along_rows ? (backward ? col % C == C - 1 : col % C == 0) : (backward ? row % R == R - 1 : row % R == 0);
        if (!first) x[at({row, col}, {rows, cols})] += x[at({row_before, col_before}, {rows, cols})];
      }
    }
  };
  for (int i = 0; i < 6; ++i) cumulate(expected[static_cast<std::size_t>(i)], i < 2 || i >= 4, i % 2 == 1);
  for (std::size_t i = 0; i < 6; ++i) ASSERT_EQ(out[i].values(), expected[i]) << "output " << i;
}

TEST_P(Tiles, CumulativeSumsOfRowsAndColumns) {
  expect_cumulative_sums<64, 32>(device, integers(4 * 64 * 32, -100, 100));
  expect_cumulative_sums<128, 32>(device, integers(4 * 128 * 32, -100, 100));
}

template <class Kernel>
void expect_scanned_vectors(Device device, const std::vector<float>& x) {
  constexpr int N = 64;
  const int length = 3 * N + 8, batch = 2, tiles = 4;
  PlacedTensor in({batch, length}, DType::f32, device, {.align = 4});
  in.fill(x);
  PlacedTensor out({batch, tiles * N, N}, DType::f32, device);
  launch_kernel<Kernel>(device, {tiles, 1, batch}, [&](auto& bind, auto& p) {
    bind(p.in, in);
    bind(p.spread, out);
  });
  std::vector<double> expected;
  for (int b = 0; b < batch; ++b) {
    for (int tile = 0; tile < tiles; ++tile) {
      // The first tile begins before the tensor, the last one ends behind it.
      double ahead[N], back[N];
      const auto value = [&](int n) {
        const int i = tile * N - N / 2 + n;
        return i < 0 || i >= length ? 0.0 : x[static_cast<std::size_t>(b * length + i)];
      };
      for (int n = 0; n < N; ++n) {
        ahead[n] = value(n) + (n > 0 ? ahead[n - 1] : 0);
        back[N - 1 - n] = value(N - 1 - n) + (n > 0 ? back[N - n] : 0);
      }
      for (int row = 0; row < N; ++row)
        for (int col = 0; col < N; ++col) expected.push_back(2 * ahead[row] - back[col]);
    }
  }
  ASSERT_EQ(out.values(), expected);
}

TEST_P(Tiles, VectorsComeThroughRingsAndAreScanned) {
  const std::vector<float> x = integers(2 * (3 * 64 + 8), -100, 100);
  expect_scanned_vectors<ThroughVectors<64>>(device, x);
  expect_scanned_vectors<ThroughVectors<64, true>>(device, x);
}

template <class T, int R, int C>
void expect_transposed(Device device, DType dtype, std::mt19937_64& random) {
  const int rows = 2 * R - 3, cols = 3 * C - 5;
  PlacedTensor in({rows, cols}, dtype, device), out({cols, rows}, dtype, device);
  const std::vector<float> x = in.fill_random(random);
  launch_kernel<TransposedFragments<T, R, C>>(device, {2, 3}, [&](auto& bind, auto& p) {
    bind(p.in, in);
    bind(p.out, out);
  });
  const std::vector<double> got = out.values();
  for (int row = 0; row < rows; ++row)
    for (int col = 0; col < cols; ++col)
      ASSERT_EQ(got[at({col, row}, {cols, rows})], x[at({row, col}, {rows, cols})]) << row << ", " << col;
}

TEST_P(Tiles, FragmentsAreTransposed) {
  expect_transposed<bf16, 64, 64>(device, DType::bf16, random);
  expect_transposed<f16, 128, 64>(device, DType::f16, random);
  expect_transposed<float, 64, 128>(device, DType::f32, random);
}

template <class Kernel>
void expect_tall_product(Device device, int m, int n, int k, const std::vector<float>& as, const std::vector<float>& bs) {
  PlacedTensor a({m, k}, DType::bf16, device), b({n, k}, DType::bf16, device), out({m, n}, DType::f32, device);
  a.fill(as);
  b.fill(bs);
  const Tensor b_bits = Tensor::borrow(b.tensor().data(), {n, k}, DType::f16, device, {k, 1}, nullptr);
  launch_kernel<Kernel>(device, {ceil_div(m, 256), ceil_div(n, 64)}, [&](auto& bind, auto& p) {
    bind(p.a, a);
    bind(p.b, b_bits);
    bind(p.out, out);
  });
  std::vector<double> expected(static_cast<std::size_t>(m * n));
  for (int row = 0; row < m; ++row)
    for (int col = 0; col < n; ++col)
      for (int i = 0; i < k; ++i) expected[at({row, col}, {m, n})] += as[at({row, i}, {m, k})] * bs[at({col, i}, {n, k})];
  ASSERT_EQ(out.values(), expected);
}

TEST_P(Tiles, AccumulatorsOfMoreRowsThanTheKernelAndElementsOfAnotherType) {
  const int m = 300, n = 100, k = 88;
  const std::vector<float> a = integers(static_cast<std::size_t>(m * k), -9, 9), b = integers(static_cast<std::size_t>(n * k), -9, 9);
  expect_tall_product<TallProduct<bf16, f16, 256, 64, 64, 64>>(device, m, n, k, a, b);
  expect_tall_product<TallProduct<bf16, f16, 256, 64, 64, 128>>(device, m, n, k, a, b);
}

template <class T, bool kFromBuffer>
void expect_viewed_products(Device device, DType dtype, const std::vector<float>& xs) {
  const int rows = 150, tiles = 3;
  PlacedTensor x({rows, 128}, dtype, device), by_columns({tiles * 64, 64}, DType::f32, device),
      by_rows({tiles * 64, 64}, DType::f32, device);
  x.fill(xs);
  launch_kernel<ViewedProducts<T, kFromBuffer>>(device, {tiles}, [&](auto& bind, auto& p) {
    bind(p.x, x);
    bind(p.by_columns, by_columns);
    bind(p.by_rows, by_rows);
  });
  std::vector<double> columns(tiles * 64 * 64), sums(columns.size());
  const auto value = [&](int tile, int row, int col) {
    return tile * 64 + row < rows ? xs[at({tile * 64 + row, col}, {rows, 128})] : 0.0f;
  };
  for (int tile = 0; tile < tiles; ++tile) {
    for (int m = 0; m < 64; ++m) {
      for (int n = 0; n < 64; ++n) {
        for (int k = 0; k < 64; ++k) {
          columns[at({tile * 64 + m, n}, {tiles * 64, 64})] += value(tile, m, 64 + k) * value(tile, n, 64 + k);
          sums[at({tile * 64 + m, n}, {tiles * 64, 64})] += value(tile, k, 64 + m) * value(tile, k, n);
        }
      }
    }
  }
  ASSERT_EQ(by_columns.values(), columns);
  ASSERT_EQ(by_rows.values(), sums);
}

TEST_P(Tiles, ViewsOfColumnsAndTheirTransposes) {
  const std::vector<float> x = integers(150 * 128, -9, 9);
  expect_viewed_products<bf16, false>(device, DType::bf16, x);
  expect_viewed_products<bf16, true>(device, DType::bf16, x);
}

template <int N>
void expect_inverses(Device device, std::mt19937_64& random) {
  const int count = 3;
  PlacedTensor in({count * N, N}, DType::f32, device), out({count * N, N}, DType::f32, device);
  const std::vector<float> x = in.fill_random(random, 0.1f);
  launch_kernel<UnitLowerInverses<N>>(device, {count}, [&](auto& bind, auto& p) {
    bind(p.in, in);
    bind(p.out, out);
  });
  std::vector<double> expected(x.size());
  for (int matrix = 0; matrix < count; ++matrix) {
    const auto element = [&](int row, int col) { return at({matrix * N + row, col}, {count * N, N}); };
    for (int col = 0; col < N; ++col) {
      for (int row = col; row < N; ++row) {
        double sum = row == col ? 1 : 0;
        for (int i = col; i < row; ++i) sum -= x[element(row, i)] * expected[element(i, col)];
        expected[element(row, col)] = sum;
      }
    }
  }
  // Each of log2(N / 16) merges multiplies an inverse, what couples two blocks, and an inverse. Each of these leaves out 2^-17 of itself.
  const std::vector<double> got = out.values();
  for (int matrix = 0; matrix < count; ++matrix) {
    const auto element = [&](int row, int col) { return at({matrix * N + row, col}, {count * N, N}); };
    for (int row = 0; row < N; ++row) {
      for (int col = 0; col < N; ++col) {
        double parts = std::abs(expected[element(row, col)]) / 8;  // f32
        for (int i = col + 1; i <= row; ++i)
          for (int k = col; k < i; ++k) parts += std::abs(expected[element(row, i)] * x[element(i, k)] * expected[element(k, col)]);
        ASSERT_NEAR(got[element(row, col)], expected[element(row, col)], std::ldexp(parts, -15)) << row << " " << col;
      }
    }
  }
}

TEST_P(Tiles, UnitLowerTriangularInverses) { expect_inverses<64>(device, random); }

TEST_P(Tiles, BuffersAreUpdatedTogether) {
  PlacedTensor out({128, 64}, DType::f32, device);
  launch_kernel<BuffersUpdatedTogether>(device, {2}, [&](auto& bind, auto& p) { bind(p.out, out); });
  const std::vector<double> got = out.values();
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], 3.0 * static_cast<double>(i % (64 * 64))) << i;
}

// What the CPU sees that a GPU would do wrong silently.

template <Slip slip, class Launch>
double run_careless(Device device, Launch launch) {
  PlacedTensor a({128, 64}, DType::bf16, device), b({128, 64}, DType::bf16, device), sum({128, 128}, DType::f32, device);
  // Each row of A has a one, and meets the threes of two rows of B.
  std::vector<float> ones(128 * 64), threes(128 * 64);
  for (std::size_t i = 0; i < 128; ++i) {
    ones[i * 64 + i % 64] = 1;
    threes[i * 64 + i % 64] = 3;
  }
  a.fill(ones);
  b.fill(threes);
  sum.fill(std::vector<float>(128 * 128));
  launch([&](auto& bind, auto& p) {
    bind(p.a, a);
    bind(p.b, b);
    bind(p.sum, sum);
  });
  double total = 0;
  for (double x : sum.values()) total += x;
  return total;
}
template <Slip slip>
double run_careless(Device device) {
  return run_careless<slip>(device, [&](auto bind) { launch_kernel<Careless<slip>>(device, {}, bind); });
}
/// Kernels that a GPU must not run.
template <Slip slip>
double run_careless_on_cpu() {
  return run_careless<slip>(Device::cpu(), [](auto bind) { launch_cpu<Careless<slip>>({}, bind); });
}
template <Slip slip>
void analyze_careless() {
  const Tensor operand = placeholder({128, 64}, DType::bf16), sum = placeholder({128, 128}, DType::f32);
  analyze<Careless<slip>>({}, [&](auto& bind, auto& p) {
    bind(p.a, operand);
    bind(p.b, operand);
    bind(p.sum, sum);
  });
}
template <Slip slip>
void expect_slip(std::string_view what) {
  SCOPED_TRACE(what);
  expect_error<Error>([] { run_careless_on_cpu<slip>(); }, {"the kernel's schedule is wrong", what});
  expect_error<Error>([] { analyze_careless<slip>(); }, {"schedule", what});
}

TEST_P(Tiles, ResultsPassThroughBuffers) {
  EXPECT_EQ(run_careless<Slip::none>(device), 128 * 2 * 3 * 2);
  EXPECT_EQ(run_careless<Slip::warpgroup_barrier>(device), 128 * 2 * 3 * 2);
}

template <class Kernel>
std::vector<double> sum_in_turn(Device device, int tiles, PlacedTensor& x) {
  PlacedTensor sum({64, 64}, DType::f32, device);
  sum.fill(std::vector<float>(64 * 64));
  const Tensor turns = Tensor::zeros({1}, DType::i32, Stream::standard(device));
  launch_kernel<Kernel>(device, {tiles}, [&](auto& bind, auto& p) {
    bind(p.x, x);
    bind(p.sum, sum);
    p.turns = static_cast<u32*>(turns.data());
  });
  return sum.values();
}

TEST_P(Tiles, BlocksAddInTurn) {
  constexpr int kTiles = 700;
  PlacedTensor x({kTiles * 64, 64}, DType::bf16, device);
  const std::vector<float> values = x.fill_random(random);
  std::vector<float> sum(64 * 64);
  for (std::size_t i = 0; i < values.size(); ++i) sum[i % sum.size()] += values[i];
  const std::vector<double> expected = even_first(std::vector<double>(sum.begin(), sum.end()));
  for (int i = 0; i < 3; ++i) ASSERT_EQ(sum_in_turn<ThroughTurns<1>>(device, kTiles, x), expected);
}

TEST_P(Tiles, ColumnsOfSumsComeBackInOrder) {
  PlacedTensor from({48, 72}, DType::f32, device), to({48, 72}, DType::f32, device, {.gap = 8});
  from.fill_random(random);
  launch_kernel<Interleaves<16, 128>>(device, {3}, [&](auto& bind, auto& p) {
    bind(p.from, from);
    bind(p.to, to);
  });
  EXPECT_EQ(even_first(to.values()), from.values());
  EXPECT_TRUE(to.gaps_intact());
}

template <class Kernel>
void check_sums_by_the_last(const Device& device, int count, int rows, int cols, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{} tiles of {} x {}", count, rows, cols));
  constexpr int kTiles = 300;
  std::uniform_int_distribution<int> small(-8, 8);
  std::vector<float> values(static_cast<std::size_t>(kTiles) * count * rows * cols);
  for (float& value : values) value = static_cast<float>(small(random));
  PlacedTensor x({std::int64_t{kTiles} * count * rows, cols}, DType::f32, device);
  x.fill(values);
  std::vector<double> expected(static_cast<std::size_t>(8 * cols));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto row = static_cast<int>(i) / cols, col = static_cast<int>(i) % cols;
    expected[static_cast<std::size_t>(row / rows % count * cols + col)] += values[i];
  }
  for (int repetition = 0; repetition < 50; ++repetition) {
    const Tensor parts = Tensor::poisoned({kTiles, 8, cols}, DType::f32, Stream::standard(device));
    PlacedTensor sum({8, cols}, DType::f32, device, {.gap = 8});
    launch_kernel<Kernel>(device, {kTiles}, [&](auto& bind, auto& p) {
      bind(p.x, x);
      bind(p.parts, parts);
      bind(p.sum, sum);
      p.tiles = kTiles;
    });
    ASSERT_EQ(sum.values(), expected) << "repetition " << repetition;
    EXPECT_TRUE(sum.gaps_intact());
  }
}

template <int R, int C>
void check_saved_sums(const Device& device, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{} x {}", R, C));
  constexpr int kTiles = 300;
  std::uniform_int_distribution<int> small(-8, 8);
  std::vector<float> values(static_cast<std::size_t>(kTiles) * R * C);
  for (float& value : values) value = static_cast<float>(small(random));
  PlacedTensor x({std::int64_t{kTiles} * R, C}, DType::f32, device, {.gap = 3});
  x.fill(values);
  std::vector<double> expected(static_cast<std::size_t>(R * C));
  for (std::size_t i = 0; i < values.size(); ++i) expected[i % expected.size()] += values[i];
  for (int repetition = 0; repetition < 20; ++repetition) {
    PlacedTensor saved({kTiles, R, C}, DType::f32, device), sum({R, C}, DType::f32, device, {.gap = 1});
    const Tensor counter = Tensor::zeros({1}, DType::i32, Stream::standard(device));
    launch_kernel<SavedSums<R, C>>(device, {kTiles}, [&](auto& bind, auto& p) {
      bind(p.x, x);
      bind(p.saved, saved);
      bind(p.sum, sum);
      p.counter = static_cast<u32*>(counter.data());
      p.tiles = kTiles;
    });
    ASSERT_EQ(sum.values(), expected) << "repetition " << repetition;
    EXPECT_TRUE(sum.gaps_intact());
  }
}

TEST_P(Tiles, SavedSumsAreThereWhenAnnounced) {
  check_saved_sums<64, 16>(device, random);
  check_saved_sums<128, 192>(device, random);
  check_saved_sums<192, 96>(device, random);
}

/// Integers whose sums f32 holds, and which need both digits: `code` and `number` are the largest magnitudes.
template <class T, int N, int C, bool One>
void check_digits(const Device& device, int code, int number, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{} {} x {}, one {}, codes to {} numbers to {}", name_of(dtype_of<T>), N, C, One, code, number));
  constexpr int kTiles = 40, kRows = One ? 1 : N;
  std::uniform_int_distribution<int> codes_of(-code - 1, code), numbers_of(-number, number);
  std::vector<float> codes(static_cast<std::size_t>(kTiles) * 16 * C), numbers(static_cast<std::size_t>(kRows) * C);
  for (float& x : codes) x = static_cast<float>(codes_of(random));
  for (float& x : numbers) x = static_cast<float>(numbers_of(random));
  if (!One) {
    numbers[3 * C + 7] = kNaN;
    numbers[5 * C + C - 1] = -std::numeric_limits<float>::infinity();
    std::fill(numbers.begin() + 6 * C, numbers.begin() + 7 * C, 0.0f);
  }
  PlacedTensor x({kRows, C}, dtype_of<T>, device), weights({kTiles * 16, C}, DType::i8, device), y({kTiles, N, 16}, DType::f32, device);
  x.fill(numbers);
  weights.fill(codes);
  launch_kernel<DigitProducts<T, N, C, One>>(device, {kTiles}, [&](auto& bind, auto& p) {
    bind(p.x, x);
    bind(p.codes, weights);
    bind(p.y, y);
  });
  const auto found = y.values();
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int n = 0; n < N; ++n) {
      for (int r = 0; r < 16; ++r) {
        double sum = 0;
        for (int c = 0; c < C; ++c)
          sum += static_cast<double>(codes[at({tile, r, c}, {kTiles, 16, C})]) * numbers[at({One ? 0 : n, c}, {kRows, C})];
        const double result = found[at({tile, n, r}, {kTiles, N, 16})];
        if (!One && (n == 3 || n == 5))
          ASSERT_TRUE(std::isnan(result)) << "row " << n;
        else
          ASSERT_EQ(result, sum) << "tile " << tile << ", row " << n << ", column " << r;
      }
    }
  }
  EXPECT_TRUE(y.gaps_intact());
}
TEST_P(Tiles, ProductsOfDigitsAreExact) {
  check_digits<f16, 8, 256, false>(device, 127, 200, random);
  check_digits<f16, 8, 256, false>(device, 15, 2000, random);
  check_digits<bf16, 16, 512, false>(device, 127, 100, random);
  check_digits<f16, 8, 2048, true>(device, 3, 2000, random);
  check_digits<bf16, 8, 256, true>(device, 127, 200, random);
}

/// Small integers and powers of two, so that sums are exact.
template <class T, int Group>
void check_products_from_slots(const Device& device, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{} groups of {}", name_of(dtype_of<T>), Group));
  constexpr int kTiles = 150, kRows = 32 * kTiles, kSteps = 3;
  constexpr int kColumns = kSteps * 1024 - (Group == 32 ? 256 : 0), kGroups = kColumns / Group;
  std::uniform_int_distribution<int> small(-3, 3), power(-1, 1), byte(0, 255);
  std::vector<float> row(kColumns), factors(static_cast<std::size_t>(kRows) * kGroups);
  for (float& value : row) value = static_cast<float>(small(random));
  for (float& value : factors) value = std::ldexp(1.0f, power(random));
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(kRows) * kColumns / 2);
  for (std::uint8_t& value : bytes) value = static_cast<std::uint8_t>(byte(random));
  PlacedTensor x({1, kColumns}, dtype_of<T>, device), scales({kRows, kGroups}, DType::f16, device), y({1, kRows}, DType::f32, device);
  x.fill(row), scales.fill(factors);
  const Tensor codes = Tensor::from<std::uint8_t>(bytes, {kRows, kColumns / 2}).to(device);
  launch_kernel<ProductsFromSlots<T, Group>>(device, {kTiles}, [&](auto& bind, auto& p) {
    bind(p.x, x);
    bind(p.codes, codes);
    bind(p.scales, scales);
    bind(p.zeros, nullptr);
    bind(p.y, y);
    p.steps = kSteps;
  });
  const std::vector<double> found = y.values();
  for (std::size_t n = 0; n < kRows; ++n) {
    double sum = 0;
    for (std::size_t c = 0; c < kColumns; ++c) {
      const int code = bytes[(n * kColumns + c) / 2] >> c % 2 * 4 & 15;
      sum += static_cast<double>(row[c]) * (code - 8) * factors[n * kGroups + c / Group];
    }
    ASSERT_EQ(found[n], sum) << "row " << n;
  }
}
TEST_P(Tiles, ARowAndScalesArriveInSlots) {
  check_products_from_slots<bf16, 32>(device, random);
  check_products_from_slots<bf16, 128>(device, random);
  check_products_from_slots<f16, 128>(device, random);
}

/// Small integers, so that sums are exact, with an infinity and with NaN: also those whose bits are all ones pass.
template <class Kernel>
void launch_relay(const Device& device, const Tensor& x, const Tensor& y, const Tensor& copies, const Tensor& reversed,
                  const Tensor& third) {
  launch_kernel<Kernel>(device, {static_cast<int>(x.shape(0))}, [&](auto& bind, auto& p) {
    bind(p.x, x);
    bind(p.y, y);
    bind(p.copies, copies);
    bind(p.reversed, reversed);
    bind(p.third, third);
  });
}
template <class T>
void check_relay(const Device& device, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("{}", name_of(dtype_of<T>)));
  constexpr int kTiles = 300, kHeight = 8, kWidth = 256, kTile = kHeight * kWidth;
  std::uniform_int_distribution<int> small(-1, 1);
  std::vector<float> values(static_cast<std::size_t>(kTiles) * kTile);
  for (float& value : values) value = static_cast<float>(small(random));
  values[5] = std::bit_cast<float>(0xffffffffu);
  values[6] = std::numeric_limits<float>::infinity();
  values[7 * kTile + 9] = kNaN;
  const Shape shape{kTiles, kHeight, kWidth};
  PlacedTensor x(shape, DType::f32, device);
  x.fill(values);
  std::vector<float> y = values;
  for (std::size_t i = kTile; i < y.size(); ++i) y[i] += y[i - kTile];
  for (int repetition = 0; repetition < 10; ++repetition) {
    const Tensor awaited = Tensor::poisoned(shape, dtype_of<T>, Stream::standard(device));
    PlacedTensor copies(shape, DType::f32, device), reversed(shape, DType::f32, device), third(shape, DType::f32, device);
    launch_relay<Relay<T>>(device, x, awaited, copies, reversed, third);
    const auto found = copies.values(), backward = reversed.values(), thirds = third.values();
    const auto same = [](double a, float b) { return std::isnan(b) ? std::isnan(a) : a == b; };
    for (std::size_t i = 0; i < y.size(); ++i) {
      const std::size_t row = i / kWidth % kHeight, col = i % kWidth;
      ASSERT_TRUE(same(found[i], y[i])) << "element " << i << ", repetition " << repetition;
      if (i < kTile) continue;
      const std::size_t before = i / kTile * kTile - kTile;
      ASSERT_TRUE(same(backward[i], y[before + (kHeight - 1 - row) * kWidth + col])) << "element " << i << ", repetition " << repetition;
      ASSERT_TRUE(same(thirds[i], y[before + 3 * kWidth + col])) << "element " << i << ", repetition " << repetition;
    }
  }
}
TEST_P(Tiles, AwaitedElementsAreThereWhenLoaded) {
  check_relay<float>(device, random);
  check_relay<f16>(device, random);
  check_relay<bf16>(device, random);
}
TEST(Awaited, MisuseIsReported) {
  const Device cpu = Device::cpu();
  const Shape shape{2, 8, 256};
  const Tensor x = Tensor::zeros(shape, DType::f32), copies = Tensor::empty(shape, DType::f32);
  const auto run = [&]<class Kernel>(std::type_identity<Kernel>, const Tensor& y) {
    return [&] { launch_relay<Kernel>(cpu, x, y, copies, copies, copies); };
  };
  const Tensor wider = Tensor::poisoned({2, 8, 512}, DType::bf16);
  expect_error<InvalidArgument>(run(std::type_identity<Relay<bf16>>(), wider.slice(2, 0, 256)), {"y", "awaited", "contiguous"});
  const Tensor zeros = Tensor::zeros(shape, DType::bf16);
  expect_error<Error>(run(std::type_identity<Relay<bf16>>(), zeros), {"the kernel's schedule is wrong", "stored again"});
  const Tensor absent = Tensor::poisoned(shape, DType::bf16), another = Tensor::poisoned(shape, DType::bf16);
  expect_error<Error>(run(std::type_identity<Relay<bf16, RelaySlip::stores_twice>>(), absent), {"stored again"});
  const int threads = cpu_threads();
  set_cpu_threads(1);
  expect_error<Error>(run(std::type_identity<Relay<bf16, RelaySlip::waits_for_itself>>(), another),
                      {"await() waits for an element that no block stores"});
  set_cpu_threads(threads);
}

TEST_P(Tiles, TheLastToWaitSeesWhatAllHaveStored) {
  check_sums_by_the_last<SumsByTheLast<1, 16, 128>>(device, 1, 16, 128, random);
  check_sums_by_the_last<SumsByTheLast<3, 32, 64>>(device, 3, 32, 64, random);
  check_sums_by_the_last<SumsByTheLast<6, 32, 128>>(device, 6, 32, 128, random);
}

auto bind_solos(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& sums) {
  return [&](auto& bind, auto& p) {
    bind(p.q, q);
    bind(p.k, k);
    bind(p.v, v);
    bind(p.o, o);
    p.sums = sums.data<float>();
  };
}

/// Integers, so that all sums are exact. Odd and even numbers of blocks: a tile begins with the first warpgroup's solo whoever played last.
TEST_P(Tiles, WarpgroupsPlaySolosInTurn) {
  const int batch = device.is_cuda() ? 300 : 3;
  for (const int blocks : {1, 2, 3, 8}) {
    const int keys = blocks * 64;
    PlacedTensor q({batch, 64, 64}, DType::bf16, device), k({batch, keys, 64}, DType::bf16, device),
        v({batch, keys, 128}, DType::bf16, device);
    const auto size = [&](int rows, int cols) { return static_cast<std::size_t>(batch) * static_cast<std::size_t>(rows * cols); };
    const std::vector<float> qs = integers(size(64, 64), -1, 1), ks = integers(size(keys, 64), -1, 1),
                             vs = integers(size(keys, 128), -2, 2);
    q.fill(qs);
    k.fill(ks);
    v.fill(vs);
    std::vector<double> o(size(64, 128)), sums(size(64, 1));
    for (std::size_t row = 0; row < sums.size(); ++row) {  // 64 of each matrix
      const float* const query = qs.data() + row * 64;
      for (std::size_t n = 0, key = row / 64 * static_cast<std::size_t>(keys); n < static_cast<std::size_t>(keys); ++n, ++key) {
        const double weight = std::max(std::inner_product(query, query + 64, ks.data() + key * 64, 0.0), 0.0);
        sums[row] += weight;
        for (std::size_t d = 0; d < 128; ++d) o[row * 128 + d] += weight * vs[key * 128 + d];
      }
    }
    for (int round = 0; round < 10; ++round) {
      PlacedTensor o_out({batch, 64, 128}, DType::f32, device, {.gap = 16}), sums_out({batch, 64}, DType::f32, device);
      launch_kernel<Solos<SoloSlip::none>>(device, {.m = 1, .batch = batch}, bind_solos(q, k, v, o_out, sums_out));
      ASSERT_EQ(o_out.values(), o) << blocks << " blocks, round " << round;
      ASSERT_EQ(sums_out.values(), sums) << blocks << " blocks, round " << round;
      EXPECT_TRUE(o_out.gaps_intact());
    }
  }
}

/// Codes, queries and scales are such that all sums are exact. The last block has rows past the end: of codes that are NaN, or of holes.
template <bool kGathers>
void check_widened(Device device, std::mt19937_64& random) {
  const int batch = device.is_cuda() ? 150 : 3;
  for (const int keys : {1, 64, 100, 130, 500}) {
    SCOPED_TRACE(keys);
    const int rows = 520;
    const auto upto = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    const Stream host = Stream::standard(Device::cpu());
    const Tensor q = Tensor::empty({batch, 64, 128}, DType::f16, host), codes = Tensor::empty({batch, rows, 128}, DType::fp8_e4m3, host),
                 scales = Tensor::empty({batch, rows, 4}, DType::f32, host), list = Tensor::empty({keys}, DType::i32, host);
    for (std::int64_t n = 0; n < q.numel(); ++n) q.data<f16>()[n] = f16(static_cast<float>(upto(3) - 1));
    for (std::int64_t n = 0; n < codes.numel(); ++n) codes.data<fp8_e4m3>()[n] = fp8_e4m3(static_cast<float>(upto(5) - 2));
    for (std::int64_t n = 0; n < scales.numel(); ++n) scales.data<float>()[n] = upto(2) == 0 ? 0.5f : 1.0f;
    for (int n = 0; n < keys; ++n) list.data<std::int32_t>()[n] = kGathers ? upto(rows + 20) - 20 : n;
    if (!kGathers) {
      for (int b = 0; b < batch; ++b)
        for (int n = keys * 128; n < rows * 128; ++n) codes.data<fp8_e4m3>()[b * rows * 128 + n] = fp8_e4m3(NAN);
    }
    std::vector<double> o(static_cast<std::size_t>(batch) * 64 * 128);
    for (int b = 0; b < batch; ++b) {
      std::array<double, 64 * 128> queries;
      for (int n = 0; n < 64 * 128; ++n) queries[static_cast<std::size_t>(n)] = static_cast<float>(q.data<f16>()[b * 64 * 128 + n]);
      double* const sums = o.data() + static_cast<std::ptrdiff_t>(b) * 64 * 128;
      for (int n = 0; n < keys; ++n) {
        const int row = list.data<std::int32_t>()[n];
        if (row < 0) continue;
        double key[128];
        for (int d = 0; d < 128; ++d) {
          key[d] = static_cast<double>(static_cast<float>(codes.data<fp8_e4m3>()[(b * rows + row) * 128 + d])) *
                   static_cast<double>(scales.data<float>()[(b * rows + row) * 4 + d / 64]);
        }
        for (int m = 0; m < 64; ++m) {
          double weight = 0;
          for (int d = 0; d < 128; ++d) weight += queries[static_cast<std::size_t>(m * 128 + d)] * key[d];
          if (weight <= 0) continue;
          for (int d = 0; d < 128; ++d) sums[m * 128 + d] += weight * key[d];
        }
      }
    }
    const Tensor q_there = q.to(device), codes_there = codes.to(device), scales_there = scales.to(device), list_there = list.to(device);
    for (int round = 0; round < 10; ++round) {
      PlacedTensor o_out({batch, 64, 128}, DType::f32, device, {.gap = 16});
      launch_kernel<WidenedSolos<kGathers>>(device, {.m = 1, .batch = batch}, [&](auto& bind, auto& p) {
        bind(p.q, q_there);
        bind(p.codes, codes_there);
        bind(p.scales, scales_there);
        bind(p.o, o_out.tensor());
        p.rows = list_there.data<std::int32_t>();
        p.keys = keys;
      });
      ASSERT_EQ(o_out.values(), o) << "round " << round;
      EXPECT_TRUE(o_out.gaps_intact());
    }
  }
}
TEST_P(Tiles, CodesAreWidenedWhileTheOtherWarpgroupPlays) { check_widened<false>(device, random); }
TEST_P(Tiles, GatheredCodesAreWidenedWhileTheOtherWarpgroupPlays) { check_widened<true>(device, random); }

template <SoloSlip slip>
void expect_solo_slip(const char* what) {
  PlacedTensor q({1, 64, 64}, DType::bf16, Device::cpu()), k({1, 192, 64}, DType::bf16, Device::cpu()),
      v({1, 192, 128}, DType::bf16, Device::cpu()), o({1, 64, 128}, DType::f32, Device::cpu()), sums({1, 64}, DType::f32, Device::cpu());
  q.fill(std::vector<float>(64 * 64));
  k.fill(std::vector<float>(192 * 64));
  v.fill(std::vector<float>(192 * 128));
  expect_error<Error>([&] { launch_kernel<Solos<slip>>(Device::cpu(), {}, bind_solos(q, k, v, o, sums)); },
                      {"the kernel's schedule is wrong", what});
  expect_error<Error>([&] { analyze<Solos<slip>>({}, bind_solos(q, k, v, o, sums)); }, {"schedule", what});
}

TEST(SoloSlips, AreErrorsOnTheCpuAndInAnalysis) {
  expect_solo_slip<SoloSlip::unjoined>("a solo begins before the last one was joined");
  expect_solo_slip<SoloSlip::same_warpgroup>("the same warpgroup plays two solos");
  expect_solo_slip<SoloSlip::unplayed>("a solo that has not been played");
  expect_solo_slip<SoloSlip::read_by_both>("other threads or their products may still read it");
}

TEST(BufferSlips, ATurnThatNeverComes) {
  PlacedTensor x({128, 64}, DType::bf16, Device::cpu());
  x.fill(std::vector<float>(128 * 64));
  const int threads = cpu_threads();
  set_cpu_threads(1);
  EXPECT_NO_THROW(sum_in_turn<ThroughTurns<1>>(Device::cpu(), 2, x));
  expect_error<Error>([&] { sum_in_turn<ThroughTurns<2>>(Device::cpu(), 2, x); }, {"the kernel's schedule is wrong", "no block passes"});
  set_cpu_threads(threads);
}

TEST(BufferSlips, AnOutboxThatTheKernelDoesNotName) {
  PlacedTensor x({64, 64}, DType::bf16, Device::cpu()), sum({64, 64}, DType::f32, Device::cpu());
  x.fill(std::vector<float>(64 * 64));
  sum.fill(std::vector<float>(64 * 64));
  const auto run = [&]<class Kernel>(std::type_identity<Kernel>) {
    launch_cpu<Kernel>({1}, [&](auto& bind, auto& p) {
      bind(p.x, x);
      bind(p.sum, sum);
    });
  };
  expect_error<Error>([&] { run(std::type_identity<ForgetsOutbox<true>>()); }, {"the kernel's schedule is wrong", "outbox()"});
  expect_error<Error>([&] { run(std::type_identity<ForgetsOutbox<false>>()); }, {"the kernel's schedule is wrong", "outbox()"});
}

TEST(BufferSlips, AreErrorsOnTheCpuAndInAnalysis) {
  EXPECT_NO_THROW(analyze_careless<Slip::none>());
  EXPECT_NO_THROW(analyze_careless<Slip::warpgroup_barrier>());
  expect_slip<Slip::no_fence>("a Buffer that was stored to after the last fence()");
  expect_slip<Slip::no_barrier>("read a Buffer before a barrier");
  expect_slip<Slip::fence_after_barrier>("read a Buffer before a barrier");
  expect_slip<Slip::no_wait>("written while a product reads it");
  expect_slip<Slip::no_barrier_before_store>("other threads or their products may still read it");
  expect_slip<Slip::no_barrier_before_load>("loaded before a barrier");
  expect_slip<Slip::no_barrier_after_load>("other threads or their products may still read it");
  expect_slip<Slip::nothing_stored>("before anything was stored to it");
  expect_slip<Slip::two_stores>("stored to by other threads than before");
  expect_slip<Slip::no_last_barrier>("the tile ends while a Buffer may still be read");
  expect_slip<Slip::warpgroup_barrier_for_all_rows>("read a Buffer before a barrier");
}

TEST(BufferAnalysis, CountsWhatBuffersMove) {
  const Analysis counts = [] {
    const Tensor operand = placeholder({128, 64}, DType::bf16), sum = placeholder({128, 128}, DType::f32);
    return analyze<Careless<Slip::none>>({}, [&](auto& bind, auto& p) {
      bind(p.a, operand);
      bind(p.b, operand);
      bind(p.sum, sum);
    });
  }();
  constexpr std::uint64_t kOperand = 128 * 64 * 2, kSum = 128 * 128 * 4;
  EXPECT_EQ(counts.shared_bytes, static_cast<std::int64_t>(3 * kOperand + kSum));
  EXPECT_EQ(counts.operations.all_products(), 2u * 2 * 128 * 128 * 64);
  EXPECT_EQ(counts.global_read, 2 * kOperand + 2 * kSum);  // what is added to is read
  EXPECT_EQ(counts.global_written, 2 * kSum);
  // In: the two operands. Twice: A read and stored, the product's operands (the right one for each of two warpgroups), and its result
  // stored, loaded and stored.
  EXPECT_EQ(counts.shared_traffic, 2 * kOperand + 2 * (2 * kOperand + 3 * kOperand + 3 * kSum));
}

/// The kernels above: every product counts, in whole tiles and, inside, for the elements that exist.
TEST(BufferAnalysis, CountsTheProductsOfTheKernels) {
  constexpr std::uint64_t kBatch = 2;
  const auto f32 = [](int rows, int cols) { return placeholder({kBatch, rows, cols}, DType::f32); };
  const auto bf16s = [](int rows, int cols) { return placeholder({kBatch, rows, cols}, DType::bf16); };
  const Tensor of_tokens = placeholder({kBatch, 100}, DType::f32);
  const auto products = [](const Analysis& counts) { return std::pair{counts.operations.all_products(), counts.operations.inside}; };
  const auto bf16_inside = [](std::uint64_t count) {
    PerOperandType<std::uint64_t> inside{};
    inside[static_cast<std::size_t>(OperandType::bf16)] = count;
    return inside;
  };
  const Analysis backward = analyze<BackwardProducts<bf16, 64, 128, 128>>({2, 1, kBatch}, [&](auto& bind, auto& p) {
    bind(p.q, bf16s(100, 128));
    bind(p.k, bf16s(200, 128));
    bind(p.lse, of_tokens);
    bind(p.delta, of_tokens);
    bind(p.dq, f32(100, 128));
    bind(p.dk, f32(200, 128));
  });
  // S; dQ and dK have whole Buffers as left operands, which say nothing of what is inside.
  const std::uint64_t dq_inside = 2 * (2 * 64) * 200 * 128, dk_inside = 2 * 100 * (2 * 128) * 128;
  EXPECT_EQ(products(backward),
            std::pair(kBatch * 3 * 2 * 128 * 256 * 128, bf16_inside(kBatch * (2 * 100 * 200 * 128 + dq_inside + dk_inside))));
  EXPECT_EQ(backward.global_written, kBatch * (2 * 100 * 128 * 4 + 200 * 128 * 4)) << "dQ of each of the two blocks of keys, and dK";

  const Analysis latent = analyze<LatentAttention<bf16, 64, 64, 576, 512>>({1, 1, kBatch}, [&](auto& bind, auto& p) {
    bind(p.q, bf16s(64, 576));
    bind(p.k, bf16s(100, 576));
    bind(p.out, f32(64, 512));
    p.scale_log2 = 1;
  });
  EXPECT_EQ(products(latent), std::pair(kBatch * 2 * 64 * 128 * (576 + 512), bf16_inside(kBatch * 2 * 64 * 100 * (576 + 512))));

  const Analysis delta = analyze<GatedDeltaRule<bf16, 64, 64>>({1, 1, kBatch}, [&](auto& bind, auto& p) {
    bind(p.q, bf16s(100, 64));
    bind(p.k, bf16s(100, 64));
    bind(p.v, bf16s(100, 64));
    bind(p.gates, of_tokens);
    bind(p.betas, of_tokens);
    bind(p.out, f32(100, 64));
    bind(p.last, f32(64, 64));
  });
  // The inverse: blocks of 16 and then of 32 are merged by two products each, of operands in two parts, whose product is three.
  EXPECT_EQ(delta.operations.all_products(), kBatch * 2 * (7 + 2 * 2 * 3) * 2 * 64 * 64 * 64) << "19 products in each of 2 chunks";
}

// For the GPU.

TEST(TileKernels, CompileWithoutSpills) {
  skip_without_nvrtc();
  // Without TMA vectors, tiles and sums go other ways.
  std::vector<KernelSpec> specs = {make_spec(kernel_info<BackwardProducts<bf16, 64, 128, 128>>, false, false),
                                   make_spec(kernel_info<ThroughVectors<64>>, false, false)};
  for (const KernelSpec& spec : internal::launched_kernels())
    if (spec.source == kTileKernels) specs.push_back(spec);
  ASSERT_GE(specs.size(), 14u);
  compile_all(specs, 0, [&](std::size_t i, const CompiledKernel& kernel) {
    SCOPED_TRACE(specs[i].type);
    EXPECT_EQ(kernel.spill_bytes, 0) << kernel.log;
    EXPECT_TRUE(kernel.performance_losses.empty()) << kernel.log;
  });
}

TEST(TileKernels, CompileForTheGenericTarget) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs, for_hopper;
  for (const KernelSpec& spec : internal::launched_kernels()) {
    if (spec.source != kTileKernels) continue;
    for_hopper.push_back(spec);
    specs.push_back(for_target(spec, GpuTarget::cuda));
  }
  ASSERT_GE(specs.size(), 14u);
  // The host fills in Params without knowing the target.
  std::vector<std::size_t> sizes(specs.size());
  compile_all(for_hopper, 0, [&](std::size_t i, const CompiledKernel& kernel) { sizes[i] = kernel.module.params.size(); });
  compile_all(specs, 0, [&](std::size_t i, const CompiledKernel& kernel) {
    EXPECT_FALSE(kernel.cubin.empty()) << specs[i].type;
    EXPECT_EQ(kernel.module.params.size(), sizes[i]) << specs[i].type;
  });
}

}  // namespace
}  // namespace tw::test
