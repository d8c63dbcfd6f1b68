// gemm() with operands of 8 bits: int8 exactly, fp8 with and without scales.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/gemm/reference.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::test;

class Gemm8Bit : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
  }
  /// `values` as a [rows, cols] tensor on the device; `pitch` elements from row to row.
  template <class T>
  Tensor place(const std::vector<T>& values, std::int64_t rows, std::int64_t cols, std::int64_t pitch) const {
    std::vector<T> padded(static_cast<std::size_t>(std::max<std::int64_t>(rows * pitch, 1)));
    for (std::int64_t r = 0; r < rows; ++r) std::copy_n(values.begin() + r * cols, cols, padded.begin() + r * pitch);
    const auto memory =
        std::make_shared<Tensor>(Tensor::from(std::span<const T>(padded), {static_cast<std::int64_t>(padded.size())}).to(device));
    return Tensor::borrow(memory->data(), {rows, cols}, dtype_of<T>, device, {pitch, 1}, memory);
  }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Gemm8Bit, testing::ValuesIn(kDevices), device_name);

struct Extents {
  std::int64_t m, n, k;
  std::int64_t gap = 0;  ///< 0 and K a multiple of 16: TMA copies
};
const std::vector<Extents> kExtents = {{1, 1, 1},        {3, 5, 7},        {16, 8, 16},   {64, 128, 128},
                                       {65, 129, 130},   {128, 256, 512},  {130, 70, 96}, {257, 131, 1040},
                                       {31, 300, 64, 3}, {200, 33, 47, 1}, {7, 64, 0},    {385, 400, 256}};

TEST_P(Gemm8Bit, IntegersAreExact) {
  for (const Extents& e : kExtents) {
    for (const bool extreme : {false, true}) {
      SCOPED_TRACE(tw::format("m {} n {} k {} extreme {}", e.m, e.n, e.k, extreme));
      std::vector<std::int8_t> av(static_cast<std::size_t>(e.m * e.k)), bv(static_cast<std::size_t>(e.n * e.k));
      const auto fill = [&](std::vector<std::int8_t>& values) {
        for (std::int8_t& x : values) x = static_cast<std::int8_t>(extreme ? (pick(2) ? -128 : 127) : pick(256) - 128);
      };
      fill(av);
      fill(bv);
      const Tensor a = place(av, e.m, e.k, e.k + e.gap), b = place(bv, e.n, e.k, e.k + e.gap);
      const Tensor d = Tensor::poisoned({e.m, e.n}, DType::i32, Stream::standard(device));
      tw::gemm(a, b.transpose(0, 1), d);
      const Tensor got = d.to(Device::cpu());
      for (std::int64_t m = 0; m < e.m; ++m) {
        for (std::int64_t n = 0; n < e.n; ++n) {
          std::int64_t sum = 0;
          for (std::int64_t k = 0; k < e.k; ++k)
            sum += std::int64_t{av[static_cast<std::size_t>(m * e.k + k)]} * bv[static_cast<std::size_t>(n * e.k + k)];
          ASSERT_EQ(got.data<std::int32_t>()[m * e.n + n], sum) << "row " << m << ", column " << n;
        }
      }
    }
  }
}

TEST_P(Gemm8Bit, IntegersOfAnyStorage) {
  // Weights stored [K, N]: the copy without TMA.
  const std::int64_t m = 70, n = 66, k = 90;
  std::vector<std::int8_t> av(static_cast<std::size_t>(m * k)), bv(static_cast<std::size_t>(k * n));
  for (std::int8_t& x : av) x = static_cast<std::int8_t>(pick(256) - 128);
  for (std::int8_t& x : bv) x = static_cast<std::int8_t>(pick(256) - 128);
  const Tensor d = Tensor::poisoned({m, n}, DType::i32, Stream::standard(device));
  tw::gemm(place(av, m, k, k), place(bv, k, n, n), d);
  const Tensor got = d.to(Device::cpu());
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      std::int32_t sum = 0;
      for (std::int64_t l = 0; l < k; ++l) sum += av[static_cast<std::size_t>(i * k + l)] * bv[static_cast<std::size_t>(l * n + j)];
      ASSERT_EQ(got.data<std::int32_t>()[i * n + j], sum);
    }
  }
}

/// fp8 numbers, as bits and as values.
struct Fp8 {
  std::vector<fp8_e4m3> bits;
  std::vector<float> values;
  Fp8(std::int64_t count, std::mt19937_64& random, float sigma) {
    std::normal_distribution<float> normal(0, sigma);
    for (std::int64_t i = 0; i < count; ++i) {
      bits.push_back(fp8_e4m3(normal(random)));
      values.push_back(static_cast<float>(bits.back()));
    }
  }
};

enum class Scales { none, scalar, block };

class GemmFp8 : public Gemm8Bit {
 protected:
  void check(const Extents& e, Scales scales, GemmOptions options = {}) {
    SCOPED_TRACE(tw::format("m {} n {} k {} scales {}", e.m, e.n, e.k, static_cast<int>(scales)));
    const Fp8 a(e.m * e.k, random, 2), b(e.n * e.k, random, 2);
    const auto blocks = [](std::int64_t x) { return (x + 127) / 128; };
    const bool block = scales == Scales::block;
    const std::int64_t depth_blocks = blocks(e.k);
    std::vector<float> sa(static_cast<std::size_t>(block ? e.m * depth_blocks : 1), 1),
        sb(static_cast<std::size_t>(block ? blocks(e.n) * depth_blocks : 1), 1);
    std::uniform_real_distribution<float> factor(0.01f, 0.2f);
    if (scales != Scales::none) {
      for (float& x : sa) x = factor(random);
      for (float& x : sb) x = factor(random);
    }
    const auto vector = [&](const std::vector<float>& v, Shape shape) {
      return Tensor::from(std::span<const float>(v), std::move(shape)).to(device);
    };
    const Tensor a_scale = block ? vector(sa, {e.m, depth_blocks}) : vector(sa, {1});
    const Tensor b_scale = block ? vector(sb, {blocks(e.n), depth_blocks}).transpose(0, 1) : vector(sb, {1});
    if (scales != Scales::none) {
      options.a_scale = &a_scale;
      options.b_scale = &b_scale;
    }
    PlacedTensor d({e.m, e.n}, DType::bf16, device, {.gap = e.gap});
    const Tensor at = place(a.bits, e.m, e.k, e.k + e.gap), bt = place(b.bits, e.n, e.k, e.k + e.gap);
    tw::gemm(at, bt.transpose(0, 1), d, options);

    std::vector<double> reference, naive;
    for (std::int64_t m = 0; m < e.m; ++m) {
      for (std::int64_t n = 0; n < e.n; ++n) {
        double exact = 0;
        float sum = 0, partial = 0;
        for (std::int64_t k = 0; k < e.k; ++k) {
          const float x = a.values[static_cast<std::size_t>(m * e.k + k)], y = b.values[static_cast<std::size_t>(n * e.k + k)];
          const float s = block ? sa[static_cast<std::size_t>(m * depth_blocks + k / 128)] : sa[0];
          const float t = block ? sb[static_cast<std::size_t>(n / 128 * depth_blocks + k / 128)] : sb[0];
          exact += static_cast<double>(x) * y * s * t;
          partial += x * y;
          if (k % 128 == 127 || k + 1 == e.k) {
            sum += partial * (s * t);
            partial = 0;
          }
        }
        reference.push_back(exact * options.alpha);
        naive.push_back(round_to(DType::bf16, sum * options.alpha));
      }
    }
    EXPECT_TRUE(accurate({d.values(), reference, naive, Arithmetic::bf16, e.k}));
    EXPECT_TRUE(d.gaps_intact());
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, GemmFp8, testing::ValuesIn(kDevices), device_name);

TEST_P(GemmFp8, WithoutScales) {
  for (const Extents& e : kExtents) check(e, Scales::none);
}
TEST_P(GemmFp8, ScalarScales) {
  for (const Extents& e : kExtents) check(e, Scales::scalar, {.alpha = 0.5f});
}
TEST_P(GemmFp8, BlockScales) {
  for (const Extents& e : kExtents) check(e, Scales::block);
  check({129, 260, 1100}, Scales::block);
  check({520, 130, 2048}, Scales::block);
  check({1, 300, 100}, Scales::block);  // one scale for A, several for B
}

TEST_P(GemmFp8, EveryConfiguration_cuda) {
  if (!device.is_cuda()) GTEST_SKIP() << "configurations are the GPU's";
  const std::vector<Config> tiles = configs(generic_shared_bytes(Stream::standard(device)));
  for (int config = 0; config < static_cast<int>(kBlockScaledTiles.size()); ++config)
    check({300, 300, 640}, Scales::block, {.config = config});
  for (std::size_t i = 0; i < tiles.size(); ++i)
    if (tiles[i].teams == 1) check({300, 520, 640}, Scales::scalar, {.config = static_cast<int>(i)});
}

TEST_P(GemmFp8, BadInput) {
  const auto make = [&](Shape shape, DType dtype) { return Tensor::zeros(std::move(shape), dtype, Stream::standard(device)); };
  const auto refused = [&](const Tensor& a, const Tensor& b, const Tensor& d, std::initializer_list<std::string_view> texts,
                           const GemmOptions& options = {}) { expect_error<InvalidArgument>([&] { tw::gemm(a, b, d, options); }, texts); };
  const Tensor a = make({4, 256}, DType::fp8_e4m3), b = make({256, 8}, DType::fp8_e4m3), d = make({4, 8}, DType::bf16);
  const Tensor one = make({1}, DType::f32), sa = make({4, 2}, DType::f32), sb = make({2, 1}, DType::f32);
  refused(a, b, make({4, 8}, DType::f32), {"d is f32[4, 8]", "bf16"});
  refused(a, b, d, {"b_scale is not given", "a_scale"}, {.a_scale = &one});
  refused(a, b, d, {"a_scale is not given", "b_scale"}, {.b_scale = &one});
  refused(a, b, d, {"b_scale is f32[1]", "[2, 1]"}, {.a_scale = &sa, .b_scale = &one});
  const Tensor wrong = make({4, 3}, DType::f32);
  refused(a, b, d, {"a_scale is f32[4, 3]", "[4, 2]"}, {.a_scale = &wrong, .b_scale = &sb});
  refused(a, b, d, {"block scales", "alpha"}, {.alpha = 2, .a_scale = &sa, .b_scale = &sb});
  const Tensor half = make({4, 256}, DType::bf16), half_b = make({256, 8}, DType::bf16);
  refused(half, half_b, d, {"a is bf16[4, 256]", "fp8_e4m3"}, {.a_scale = &one, .b_scale = &one});
  refused(make({4, 6}, DType::fp8_e5m2), make({6, 8}, DType::fp8_e5m2), d, {"a is fp8_e5m2[4, 6]", "supported"});
  const Tensor ia = make({4, 6}, DType::i8), ib = make({6, 8}, DType::i8), id = make({4, 8}, DType::i32);
  refused(ia, ib, make({4, 8}, DType::f32), {"d is f32[4, 8]", "i32"});
  refused(ia, ib, id, {"i8", "alpha"}, {.alpha = 2});
  refused(ia, ib, id, {"i8", "activation"}, {.activation = Activation::relu});
}

}  // namespace
}  // namespace tw::kernels::gemm
