// sparse_gemm() and sparse_linear() against loops in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/gemm/reference.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/sparse_gemm/kernels.hpp"
#include "kernels/sparse_gemm/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/sparse_gemm.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::sparse_gemm {
namespace {

using namespace tw::test;

struct Case {
  std::int64_t m, n, k;                                  ///< the sparse matrix is [m, k]
  bool linear = false;                                   ///< y[n, m] = x[n, k] W^T by sparse_linear(), instead of D[m, n] = A B
  bool b_rows = false;                                   ///< B is stored [K, N] (of a linear layer: x is stored [K, N])
  bool bias = false, residual = false, columns = false;  ///< columns: D is column-major
  Activation activation = Activation::none;
  float alpha = 1, beta = 0;
  std::int64_t gap = 0;
  int config = -1;
};

/// A 2:4 sparse matrix, and memory for its compressed form. Many groups have fewer than two nonzeros.
struct SparseValues {
  std::vector<float> values;
  Tensor dense;
  SparseMatrix sparse;
};

class SparseGemm : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
  }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }

  std::vector<float> integers(std::int64_t count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& x : values) x = static_cast<float>(pick(17) - 8);
    return values;
  }
  SparseValues random_sparse(std::int64_t rows, std::int64_t cols, DType dtype, std::int64_t gap) {
    PlacedTensor dense({rows, cols}, dtype, device);
    std::vector<float> values = dtype == DType::i8 ? integers(rows * cols) : dense.fill_random(random);
    for (float& x : values)
      if (pick(3) == 0) x = 0;
    values = pruned(std::move(values));
    dense.fill(values);
    const Stream stream = Stream::standard(device);
    const PlacedTensor kept({rows, cols / 2}, dtype, device, {.offset = gap > 0 ? 1 : 0, .gap = gap});
    const SparseMatrix sparse{kept, Tensor::poisoned(SparseMatrix::metadata_shape(rows, cols, dtype), DType::u8, stream)};
    return {std::move(values), dense, sparse};
  }

  void check(const Case& c, DType dtype) {
    SCOPED_TRACE(
        tw::format("{} m {} n {} k {} linear {} b_rows {} bias {} residual {} columns {} activation {} alpha {} beta {} gap {} "
                   "config {}",
                   name_of(dtype), c.m, c.n, c.k, c.linear, c.b_rows, c.bias, c.residual, c.columns, static_cast<int>(c.activation),
                   c.alpha, c.beta, c.gap, c.config));
    const DType out = gemm::result_of(dtype);
    const Placement placement{.offset = c.gap > 0 ? 1 : 0, .gap = c.gap};
    Placement of_b = placement, of_d = placement;
    if (!c.b_rows) of_b.order = {1, 0};
    if (c.linear || c.columns) of_d.order = {1, 0};
    // As D = A B, whose tensors a linear layer takes transposed.
    PlacedTensor b({c.k, c.n}, dtype, device, of_b), d({c.m, c.n}, out, device, of_d), residual({c.m, c.n}, out, device, of_d);
    const std::int64_t biases = c.linear ? c.m : c.n;
    PlacedTensor bias({biases}, out, device);
    const SparseValues a = random_sparse(c.m, c.k, dtype, c.gap);
    std::vector<float> b_values, c_values, residual_values, bias_values;
    if (dtype == DType::i8) {
      b.fill(b_values = integers(c.k * c.n));
    } else {
      b_values = b.fill_random(random, 1 / std::sqrt(static_cast<float>(std::max<std::int64_t>(c.k, 1))));
    }
    if (c.beta != 0) c_values = d.fill_random(random);
    if (c.residual) residual_values = residual.fill_random(random);
    if (c.bias) bias_values = bias.fill_random(random);
    const std::vector<float> ones{0.5f};
    const Tensor half = Tensor::from(std::span<const float>(ones), {1}).to(device);
    SparseGemmOptions options{.alpha = c.alpha, .beta = c.beta, .activation = c.activation, .config = c.config};
    if (dtype == DType::fp8_e4m3) options.a_scale = options.b_scale = &half;
    if (c.bias) options.bias = &bias.tensor();
    const Tensor transposed_residual = residual.tensor().transpose(0, 1);
    if (c.residual) options.residual = c.linear ? &transposed_residual : &residual.tensor();
    const bool done = launched([&] {
      compress_2_4(a.dense, a.sparse);
      if (c.linear)
        tw::sparse_linear(b.tensor().transpose(0, 1), a.sparse, d.tensor().transpose(0, 1), options);
      else
        tw::sparse_gemm(a.sparse, b, d, options);
    });
    if (!done) return;

    // A linear layer's bias belongs to the columns of its result.
    const float alpha = dtype == DType::fp8_e4m3 ? c.alpha / 4 : c.alpha;
    gemm::PlainCall plain{.m = c.m,
                          .n = c.n,
                          .k = c.k,
                          .a = a.values,
                          .b = b_values,
                          .c = c_values,
                          .bias = bias_values,
                          .residual = residual_values,
                          .alpha = alpha,
                          .beta = c.beta,
                          .activation = c.activation};
    std::vector<float> bt, at, ct, rt;
    if (c.linear) {
      plain.m = c.n, plain.n = c.m;
      plain.a = bt = transposed(b_values, c.k, c.n);
      plain.b = at = transposed(a.values, c.m, c.k);
      if (c.beta != 0) plain.c = ct = transposed(c_values, c.m, c.n);
      if (c.residual) plain.residual = rt = transposed(residual_values, c.m, c.n);
    }
    std::vector<double> results = d.values();
    const std::vector<double> exact = gemm::reference(plain);
    if (c.linear) {
      results = transposed(results, c.m, c.n);
    }
    EXPECT_TRUE(d.gaps_intact());
    if (dtype == DType::i8) {
      EXPECT_EQ(results, exact);
    } else {
      EXPECT_TRUE(accurate({results, exact, gemm::naive(plain, out, false), arithmetic_of(out, device), c.k}));
    }
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, SparseGemm, testing::ValuesIn(kDevices), device_name);

constexpr DType kDTypes[] = {DType::f16, DType::bf16, DType::fp8_e4m3, DType::i8};

TEST_P(SparseGemm, EveryDtype) {
  for (const DType dtype : kDTypes) {
    for (const bool linear : {false, true}) {
      check({.m = 128, .n = 128, .k = 256, .linear = linear}, dtype);
      check({.m = 200, .n = 136, .k = 592, .linear = linear}, dtype);
      check({.m = 1, .n = 1, .k = 4, .linear = linear}, dtype);
      check({.m = 17, .n = 63, .k = 132, .linear = linear}, dtype);
    }
    check({.m = 72, .n = 96, .k = 264, .b_rows = true}, dtype);
    check({.m = 72, .n = 96, .k = 264, .columns = true}, dtype);
  }
}

TEST_P(SparseGemm, RandomShapes) {
  for (int i = 0; i < random_cases(24); ++i) {
    Case c{.m = 1 + pick(300), .n = 1 + pick(300), .k = 4 * (1 + pick(150))};
    if (pick(2)) c.m = c.m / 8 * 8 + 8, c.n = c.n / 8 * 8 + 8, c.k = c.k / 32 * 32 + 32;  // TMA copies
    c.linear = pick(2);
    c.b_rows = pick(2);
    c.columns = pick(3) == 0;
    c.gap = pick(3) == 0 ? 1 + pick(4) : 0;
    const DType dtype = kDTypes[pick(4)];
    if (dtype != DType::i8) {
      c.bias = pick(2);
      c.residual = pick(4) == 0;
      c.activation = pick(2) ? Activation::none : Activation::silu;
      if (pick(4) == 0) c.alpha = 0.75f, c.beta = -0.5f;
    }
    check(c, dtype);
  }
}

TEST_P(SparseGemm, Epilogues) {
  for (const bool linear : {false, true}) {
    for (const Activation activation : {Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu})
      check({.m = 96, .n = 72, .k = 128, .linear = linear, .bias = true, .activation = activation}, DType::bf16);
    check({.m = 96, .n = 72, .k = 128, .linear = linear, .residual = true, .alpha = 2, .beta = 0.5f}, DType::f16);
    // A bias of a column-major result's columns.
    check({.m = 96, .n = 72, .k = 128, .linear = linear, .bias = true, .columns = true}, DType::bf16);
  }
}

TEST_P(SparseGemm, NothingToComputeOrToSum) {
  for (const DType dtype : kDTypes) {
    for (const bool linear : {false, true}) {
      check({.m = 0, .n = 8, .k = 8, .linear = linear}, dtype);
      check({.m = 8, .n = 0, .k = 8, .linear = linear}, dtype);
      check({.m = 24, .n = 40, .k = 0, .linear = linear, .bias = dtype != DType::i8}, dtype);
    }
  }
}

/// A row's NaN stays in its row, and what a pruned element would have met does not matter.
TEST_P(SparseGemm, RowsAndColumnsAreIndependent) {
  const std::int64_t m = 70, n = 66, k = 256;
  std::vector<float> a_values(m * k), b_values(k * n, 1.0f);
  for (std::size_t i = 0; i < a_values.size(); ++i) a_values[i] = i % 4 == 1 || i % 4 == 2 ? 1.0f : 0.0f;
  a_values[65 * k + 5] = kNaN;
  for (std::int64_t i = 0; i < n; ++i) b_values[static_cast<std::size_t>(8 * n + i)] = kNaN;  // column 8 of A is 0 everywhere
  PlacedTensor dense({m, k}, DType::bf16, device), b({k, n}, DType::bf16, device), d({m, n}, DType::bf16, device);
  dense.fill(a_values);
  b.fill(b_values);
  const SparseMatrix a = SparseMatrix::allocate(m, k, DType::bf16, Stream::standard(device));
  if (!launched([&] {
        compress_2_4(dense, a);
        tw::sparse_gemm(a, b, d);
      }))
    return;
  const std::vector<double> results = d.values();
  for (std::int64_t i = 0; i < m * n; ++i) {
    const double x = results[static_cast<std::size_t>(i)];
    if (i / n == 65)
      ASSERT_TRUE(std::isnan(x)) << "column " << i % n;
    else
      ASSERT_EQ(x, 128) << "row " << i / n << ", column " << i % n;
  }
}

TEST_P(SparseGemm, EveryConfiguration_cuda) {
  if (!device.is_cuda()) GTEST_SKIP() << "configurations are the GPU's";
  const std::int64_t generic = generic_shared_bytes(Stream::standard(device));
  for (const DType dtype : kDTypes) {
    const std::vector<CostedTile> all = configs(generic, static_cast<int>(size_of(dtype)));
    for (int config = 0; config < static_cast<int>(all.size()); ++config) {
      for (const bool linear : {false, true})
        check({.m = 456, .n = 520, .k = 800, .linear = linear, .bias = dtype != DType::i8, .config = config}, dtype);
      check({.m = 456, .n = 520, .k = 800, .b_rows = true, .config = config}, dtype);
    }
  }
}

/// The first word of a lane, spelled out as the PTX ISA describes it, against metadata_place().
TEST(SparseMetadata, PlacesAreThoseOfTheInstructions) {
  for (int lane = 0; lane < 32; ++lane) {
    for (int bit = 0; bit < 32; bit += 4) {
      const int quad = lane / 4, j = lane % 4;
      // 16-bit elements: half words of rows quad and quad + 8. The selector's pair of lanes has 32 columns.
      const int row = quad + bit / 16 * 8, column = j / 2 * 32 + j % 2 * 16 + bit % 16;
      const MetadataPlace half = metadata_place(2, row, column / 4);
      EXPECT_EQ(half.row, 0);
      EXPECT_EQ(half.byte * 8 + half.shift, lane * 32 + bit);
      // 8-bit elements: a word of one row.
      const MetadataPlace whole = metadata_place(1, quad + j % 2 * 8, (j / 2 * 32 + bit) / 4);
      EXPECT_EQ(whole.row, 0);
      EXPECT_EQ(whole.byte * 8 + whole.shift, lane * 32 + bit);
    }
  }
  EXPECT_EQ(metadata_place(2, 16 + 3, 16).row, 3);
  EXPECT_EQ(metadata_place(1, 32 + 3, 48).row, 11);
}

TEST(SparseMetadata, TheCpuRefusesWrongOnes) {
  const SparseMatrix a{Tensor::zeros({16, 64}, DType::bf16), Tensor::zeros(SparseMatrix::metadata_shape(16, 128, DType::bf16), DType::u8)};
  const Tensor b = Tensor::zeros({128, 8}, DType::bf16), d = Tensor::zeros({16, 8}, DType::bf16);
  expect_error<Error>([&] { tw::sparse_gemm(a, b, d); }, {"metadata", "ascending"});
}

TEST(SparseMetadata, TilesFitSharedMemory) {
  for (const int bytes : {1, 2})
    for (const CostedTile& t : configs(0, bytes))
      EXPECT_LE(1024 + t.stages * slot_bytes(t, bytes) + t.bm / 64 * 2 * 64 * kStepBytes, kSharedBytesPerBlock) << t.bm << " x " << t.bn;
}

}  // namespace
}  // namespace tw::kernels::sparse_gemm
