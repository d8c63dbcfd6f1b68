// block_sparse_gemm() against loops in double, on the CPU and, where there is one, on a GPU.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "kernels/activation_reference.hpp"
#include "kernels/block_sparse_gemm/kernels.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/block_sparse_gemm.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::block_sparse_gemm {
namespace {

using namespace tw::test;

/// Which masks a call has.
enum Masks { of_a = 1, of_b = 2, of_d = 4, of_product = 8 };

struct Case {
  std::int64_t m, n, k;
  int block = 64;
  int masks = 0;     ///< of Masks
  int density = 50;  ///< per cent of the blocks that are kept
  bool b_rows = false, bias = false;
  Activation activation = Activation::none;
  float alpha = 1;
  std::int64_t gap = 0;
  int config = -1;
};

class BlockSparseGemmTest : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
  }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }

  /// A mask in memory: `values` row-major, `tensor` with its first two dimensions swapped in memory.
  struct MaskValues {
    Tensor tensor = {};
    std::vector<std::uint8_t> values = {};
    bool given = false;
    std::int64_t rows = 0, cols = 0;
    bool keeps(std::int64_t i, std::int64_t j) const { return !given || values[static_cast<std::size_t>(i * cols + j)] != 0; }
  };
  MaskValues draw(bool given, std::int64_t rows, std::int64_t cols, int density) {
    MaskValues mask{.given = given, .rows = rows, .cols = cols};
    if (!given) return mask;
    mask.values.resize(static_cast<std::size_t>(rows * cols));
    std::vector<std::uint8_t> transposed(mask.values.size());
    for (std::int64_t i = 0; i < rows; ++i)
      for (std::int64_t j = 0; j < cols; ++j)
        transposed[static_cast<std::size_t>(j * rows + i)] = mask.values[static_cast<std::size_t>(i * cols + j)] =
            pick(100) < density ? static_cast<std::uint8_t>(1 + pick(255)) : std::uint8_t{0};
    const bool swap = pick(2) && rows > 0 && cols > 0;
    mask.tensor = Tensor::from(std::span<const std::uint8_t>(swap ? transposed : mask.values), swap ? Shape{cols, rows} : Shape{rows, cols})
                      .to(device);
    if (swap) mask.tensor = mask.tensor.transpose(0, 1);
    return mask;
  }

  void check(const Case& c, DType dtype = DType::bf16) {
    SCOPED_TRACE(tw::format("{} m {} n {} k {} block {} masks {} density {} b_rows {} bias {} activation {} alpha {} gap {} config {}",
                            name_of(dtype), c.m, c.n, c.k, c.block, c.masks, c.density, c.b_rows, c.bias, static_cast<int>(c.activation),
                            c.alpha, c.gap, c.config));
    const auto blocks = [&](std::int64_t x) { return (x + c.block - 1) / c.block; };
    const std::int64_t mb = blocks(c.m), nb = blocks(c.n), kb = blocks(c.k);
    const MaskValues a_mask = draw(c.masks & of_a, mb, kb, c.density), b_mask = draw(c.masks & of_b, kb, nb, c.density),
                     d_mask = draw(c.masks & of_d, mb, nb, c.density), product = draw(c.masks & of_product, mb * nb, kb, c.density);
    const Placement placement{.offset = c.gap > 0 ? 1 : 0, .gap = c.gap};
    Placement b_placement = placement;
    if (!c.b_rows) b_placement.order = {1, 0};
    PlacedTensor a({c.m, c.k}, dtype, device, placement), b({c.k, c.n}, dtype, device, b_placement),
        d({c.m, c.n}, dtype, device, placement);
    PlacedTensor bias({c.n}, dtype, device);
    std::vector<float> a_values = a.fill_random(random);
    std::vector<float> b_values = b.fill_random(random, 1 / std::sqrt(static_cast<float>(std::max<std::int64_t>(c.k, 1))));
    std::vector<float> bias_values;
    if (c.bias) bias_values = bias.fill_random(random);
    // Hidden blocks of A and B must not be read.
    for (std::int64_t i = 0; i < c.m; ++i)
      for (std::int64_t k = 0; k < c.k; ++k)
        if (!a_mask.keeps(i / c.block, k / c.block)) a_values[static_cast<std::size_t>(i * c.k + k)] = kNaN;
    for (std::int64_t k = 0; k < c.k; ++k)
      for (std::int64_t j = 0; j < c.n; ++j)
        if (!b_mask.keeps(k / c.block, j / c.block)) b_values[static_cast<std::size_t>(k * c.n + j)] = kNaN;
    a.fill(a_values);
    b.fill(b_values);
    BlockSparseGemmOptions options{.block = c.block, .alpha = c.alpha, .activation = c.activation, .config = c.config};
    if (a_mask.given) options.a_mask = &a_mask.tensor;
    if (b_mask.given) options.b_mask = &b_mask.tensor;
    if (d_mask.given) options.d_mask = &d_mask.tensor;
    Tensor products;
    if (product.given) {
      products = Tensor::from(std::span<const std::uint8_t>(product.values), {mb, nb, kb}).to(device);
      options.product_mask = &products;
    }
    if (c.bias) options.bias = &bias.tensor();
    if (!launched([&] { tw::block_sparse_gemm(a, b, d, options); })) return;

    const auto evaluate = [&]<class Real>(Real, auto round) {
      std::vector<double> out(static_cast<std::size_t>(c.m * c.n));
      for (std::int64_t i = 0; i < c.m; ++i) {
        for (std::int64_t j = 0; j < c.n; ++j) {
          const std::int64_t bi = i / c.block, bj = j / c.block;
          if (!d_mask.keeps(bi, bj)) continue;
          Real sum = 0;
          for (std::int64_t k = 0; k < c.k; ++k) {
            const std::int64_t bk = k / c.block;
            if (a_mask.keeps(bi, bk) && b_mask.keeps(bk, bj) && product.keeps(bi * nb + bj, bk))
              sum += static_cast<Real>(a_values[static_cast<std::size_t>(i * c.k + k)]) *
                     static_cast<Real>(b_values[static_cast<std::size_t>(k * c.n + j)]);
          }
          sum *= static_cast<Real>(c.alpha);
          if (c.bias) sum += static_cast<Real>(bias_values[static_cast<std::size_t>(j)]);
          out[static_cast<std::size_t>(i * c.n + j)] = round(static_cast<double>(activate(c.activation, sum)));
        }
      }
      return out;
    };
    const std::vector<double> exact = evaluate(double{}, [](double x) { return x; });
    const std::vector<double> naive = evaluate(float{}, [&](double x) -> double { return round_to(dtype, static_cast<float>(x)); });
    const std::vector<double> results = d.values();
    EXPECT_TRUE(accurate({results, exact, naive, arithmetic_of(dtype, device), c.k}));
    EXPECT_TRUE(d.gaps_intact());
    for (std::int64_t i = 0; i < c.m * c.n; ++i) {
      if (!d_mask.keeps(i / c.n / c.block, i % c.n / c.block)) {
        ASSERT_EQ(results[static_cast<std::size_t>(i)], 0) << "row " << i / c.n << ", column " << i % c.n;
      }
    }
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, BlockSparseGemmTest, testing::ValuesIn(kDevices), device_name);

TEST_P(BlockSparseGemmTest, EveryMask) {
  for (const int masks : {0, +of_a, +of_b, +of_d, +of_product, of_a | of_b, of_a | of_b | of_d | of_product}) {
    check({.m = 256, .n = 256, .k = 256, .block = 128, .masks = masks});
    check({.m = 150, .n = 200, .k = 264, .masks = masks, .b_rows = true, .bias = true}, DType::f16);
  }
  check({.m = 300, .n = 264, .k = 520, .block = 256, .masks = of_a | of_d});
}

TEST_P(BlockSparseGemmTest, RandomShapes) {
  for (int i = 0; i < random_cases(16); ++i) {
    Case c{.m = 1 + pick(300), .n = 1 + pick(300), .k = 1 + pick(400)};
    if (pick(2)) c.m = c.m / 8 * 8 + 8, c.n = c.n / 8 * 8 + 8, c.k = c.k / 8 * 8 + 8;  // TMA copies
    c.block = pick(2) ? 64 : 128;
    c.masks = pick(16);
    c.density = 10 + pick(90);
    c.b_rows = pick(2);
    c.bias = pick(2);
    c.activation = pick(2) ? Activation::none : Activation::gelu_tanh;
    c.alpha = pick(2) ? 1.0f : -0.5f;
    c.gap = pick(3) == 0 ? 1 + pick(4) : 0;
    check(c, pick(2) ? DType::bf16 : DType::f16);
  }
}

TEST_P(BlockSparseGemmTest, NothingIsKept) {
  for (const int masks : {+of_a, +of_b, +of_d, +of_product})
    check({.m = 130, .n = 136, .k = 136, .masks = masks, .density = 0, .bias = true, .activation = Activation::silu});
  check({.m = 70, .n = 72, .k = 0, .masks = of_d, .bias = true});
  check({.m = 0, .n = 72, .k = 8, .masks = of_a});
  check({.m = 72, .n = 0, .k = 8, .masks = of_b});
}

/// More blocks of the sum than a list's kernel looks at at a time.
TEST_P(BlockSparseGemmTest, LongSums) {
  check({.m = 9, .n = 16, .k = 64 * 600, .masks = of_a});
  check({.m = 9, .n = 16, .k = 64 * 600, .masks = of_product, .density = 97});
}

TEST_P(BlockSparseGemmTest, EveryConfiguration_cuda) {
  if (!device.is_cuda()) GTEST_SKIP() << "configurations are the GPU's";
  const std::vector<CostedTile> all = configs(generic_shared_bytes(Stream::standard(device)));
  for (int config = 0; config < static_cast<int>(all.size()); ++config) {
    const CostedTile& t = all[static_cast<std::size_t>(config)];
    const int masks = (256 % t.bm == 0 ? of_a : 0) | (256 % t.bn == 0 ? of_b : 0);
    check({.m = 700, .n = 520, .k = 1000, .block = 256, .masks = masks, .bias = true, .config = config});
    if (t.bn % 64 == 0) check({.m = 700, .n = 520, .k = 1000, .block = 256, .masks = masks, .b_rows = true, .config = config});
  }
}

TEST_P(BlockSparseGemmTest, BadInput) {
  const Stream stream = Stream::standard(device);
  const auto make = [&](Shape shape, DType dtype = DType::bf16) { return Tensor::zeros(std::move(shape), dtype, stream); };
  const Tensor a = make({100, 200}), b = make({200, 70}), mask = make({2, 3}, DType::u8);
  const auto refused = [&](const Tensor& of_a, const Tensor& of_b, Shape shape, std::initializer_list<std::string_view> parts,
                           const BlockSparseGemmOptions& options = {}) {
    const PlacedTensor d(std::move(shape), DType::bf16, device, {.offset = 8});
    expect_error<InvalidArgument>([&] { tw::block_sparse_gemm(of_a, of_b, d, options); }, parts);
    EXPECT_TRUE(d.untouched());
  };
  refused(make({100, 200}, DType::f32), b, {100, 70}, {"block_sparse_gemm", "a is f32[100, 200]", "bf16"});
  refused(make({100}), b, {100, 70}, {"a is bf16[100]", "[M, K]"});
  refused(a, make({100, 70}), {100, 70}, {"b is bf16[100, 70]", "[200, N]"});
  refused(a, b, {100, 71}, {"d is bf16[100, 71]", "[100, 70]"});
  refused(a, b, {100, 70}, {"block is 96", "128"}, {.block = 96});
  refused(a, b, {100, 70}, {"a_mask is u8[2, 3]", "[1, 2]"}, {.a_mask = &mask});
  refused(a, b, {100, 70}, {"b_mask is u8[2, 3]", "[2, 1]"}, {.b_mask = &mask});
  refused(a, b, {100, 70}, {"d_mask is u8[2, 3]", "[1, 1]"}, {.d_mask = &mask});
  refused(a, b, {100, 70}, {"product_mask is u8[2, 3]", "[1, 1, 2]"}, {.product_mask = &mask});
  const Tensor wrong = make({1, 2}, DType::i32), bias = make({71});
  refused(a, b, {100, 70}, {"a_mask is i32[1, 2]", "u8 or bool"}, {.a_mask = &wrong});
  refused(a, b, {100, 70}, {"bias is bf16[71]", "[70]"}, {.bias = &bias});
  refused(a, b, {100, 70}, {"swiglu"}, {.activation = Activation::swiglu});
  if (device.is_cuda()) refused(a, b, {100, 70}, {"config is 99"}, {.config = 99});
}

}  // namespace
}  // namespace tw::kernels::block_sparse_gemm
