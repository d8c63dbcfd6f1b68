// gemm() with operands of 8 bits: int8 exactly, fp8 with and without scales.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/gemm/kernels.hpp"
#include "kernels/gemm/reference.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/compiled_kernels.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/launch.hpp"
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
  Tensor place(const std::vector<T>& values, std::int64_t rows, std::int64_t cols, std::int64_t pitch, DType dtype = dtype_of<T>) const {
    std::vector<T> padded(static_cast<std::size_t>(std::max<std::int64_t>(rows * pitch, 1)));
    for (std::int64_t r = 0; r < rows; ++r) std::copy_n(values.begin() + r * cols, cols, padded.begin() + r * pitch);
    const auto memory =
        std::make_shared<Tensor>(Tensor::from(std::span<const T>(padded), {static_cast<std::int64_t>(padded.size())}).to(device));
    return Tensor::borrow(memory->data(), {rows, cols}, dtype, device, {pitch, 1}, memory);
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
  DType dtype;
  std::vector<unsigned char> bits;
  std::vector<float> values;
  Fp8(std::int64_t count, std::mt19937_64& random, float sigma, DType type = DType::fp8_e4m3) : dtype(type) {
    std::normal_distribution<float> normal(0, sigma);
    const auto add = [&](auto x) {
      bits.push_back(x.bits);
      values.push_back(static_cast<float>(x));
    };
    for (std::int64_t i = 0; i < count; ++i) dtype == DType::fp8_e4m3 ? add(fp8_e4m3(normal(random))) : add(fp8_e5m2(normal(random)));
  }
};

/// Element types of a product.
struct Types {
  DType a = DType::fp8_e4m3, b = DType::fp8_e4m3, d = DType::bf16;
};
const Types kOtherFp8[] = {{.b = DType::fp8_e5m2}, {.a = DType::fp8_e5m2}, {.a = DType::fp8_e5m2, .b = DType::fp8_e5m2}};

/// rows: of A and columns of B; columns: of B, with a scalar for A.
enum class Scales { none, scalar, block, rows, columns };

class GemmFp8 : public Gemm8Bit {
 protected:
  void check(const Extents& e, Scales scales, GemmOptions options = {}, Types types = {}) {
    const DType out = types.d;
    SCOPED_TRACE(tw::format("m {} n {} k {} scales {}, {} and {} to {}", e.m, e.n, e.k, static_cast<int>(scales), name_of(types.a),
                            name_of(types.b), name_of(out)));
    const Fp8 a(e.m * e.k, random, 2, types.a), b(e.n * e.k, random, 2, types.b);
    const auto blocks = [](std::int64_t x) { return (x + 127) / 128; };
    const bool block = scales == Scales::block;
    const std::int64_t depth_blocks = blocks(e.k);
    const bool rows = scales == Scales::rows, columns = rows || scales == Scales::columns;
    // Scales of rows lie in every second place, where the operands have gaps.
    const std::int64_t step = e.gap > 0 ? 2 : 1;
    std::vector<float> sa(static_cast<std::size_t>(block  ? e.m * depth_blocks
                                                   : rows ? e.m * step
                                                          : 1),
                          1),
        sb(static_cast<std::size_t>(block     ? blocks(e.n) * depth_blocks
                                    : columns ? e.n * step
                                              : 1),
           1);
    std::uniform_real_distribution<float> factor(0.01f, 0.2f);
    if (scales != Scales::none) {
      for (float& x : sa) x = factor(random);
      for (float& x : sb) x = factor(random);
    }
    const auto vector = [&](const std::vector<float>& v, Shape shape) {
      return Tensor::from(std::span<const float>(v), std::move(shape)).to(device);
    };
    const auto first_column = [](const Tensor& t) { return t.slice(1, 0, 1); };
    const Tensor a_scale = block ? vector(sa, {e.m, depth_blocks}) : rows ? first_column(vector(sa, {e.m, step})) : vector(sa, {1});
    const Tensor b_scale = (block     ? vector(sb, {blocks(e.n), depth_blocks}).transpose(0, 1)
                            : columns ? first_column(vector(sb, {e.n, step})).transpose(0, 1)
                                      : vector(sb, {1}));
    if (scales != Scales::none) {
      options.a_scale = &a_scale;
      options.b_scale = &b_scale;
    }
    PlacedTensor d({e.m, e.n}, out, device, {.gap = e.gap});
    const Tensor at = place(a.bits, e.m, e.k, e.k + e.gap, a.dtype), bt = place(b.bits, e.n, e.k, e.k + e.gap, b.dtype);
    tw::gemm(at, bt.transpose(0, 1), d, options);

    std::vector<double> reference, naive;
    for (std::int64_t m = 0; m < e.m; ++m) {
      for (std::int64_t n = 0; n < e.n; ++n) {
        double exact = 0;
        float sum = 0, partial = 0;
        for (std::int64_t k = 0; k < e.k; ++k) {
          const float x = a.values[static_cast<std::size_t>(m * e.k + k)], y = b.values[static_cast<std::size_t>(n * e.k + k)];
          const float s = sa[static_cast<std::size_t>(block ? m * depth_blocks + k / 128 : rows ? m * step : 0)];
          const float t = sb[static_cast<std::size_t>(block ? n / 128 * depth_blocks + k / 128 : columns ? n * step : 0)];
          exact += static_cast<double>(x) * y * s * t;
          partial += x * y;
          if (k % 128 == 127 || k + 1 == e.k) {
            sum += partial * (s * t);
            partial = 0;
          }
        }
        reference.push_back(exact * options.alpha);
        naive.push_back(round_to(out == DType::f32 ? out : DType::bf16, sum * options.alpha));
      }
    }
    if (size_of(out) == 1)
      check_roundings(out, d.values(), reference);
    else  // a GPU's tensor cores add up fp8 in less than f32
      EXPECT_TRUE(
          accurate({d.values(), reference, naive, out == DType::f32 && !device.is_cuda() ? Arithmetic::f32 : Arithmetic::bf16, e.k}));
    EXPECT_TRUE(d.gaps_intact());
  }

  /// Each result is an fp8 number next to the exact one, or to what is off by as much as sums in the tensor cores.
  static void check_roundings(DType out, const std::vector<double>& got, const std::vector<double>& reference) {
    double largest = 0;
    for (const double x : reference) largest = std::max(largest, std::abs(x));
    const double error = largest / 512;
    const auto rounded = [&](double x) { return static_cast<double>(round_to(out, static_cast<float>(x))); };
    for (std::size_t i = 0; i < reference.size(); ++i) {
      ASSERT_GE(got[i], rounded(reference[i] - error)) << "element " << i << ", exact " << reference[i];
      ASSERT_LE(got[i], rounded(reference[i] + error)) << "element " << i << ", exact " << reference[i];
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Ops, GemmFp8, testing::ValuesIn(kDevices), device_name);

TEST_P(GemmFp8, WithoutScales) {
  for (const Extents& e : kExtents) check(e, Scales::none);
}
TEST_P(GemmFp8, ScalarScales) {
  for (const Extents& e : kExtents) check(e, Scales::scalar, {.alpha = 0.5f});
}
TEST_P(GemmFp8, ScalesOfRowsAndColumns) {
  for (const Extents& e : kExtents) {
    check(e, Scales::rows, {.alpha = 0.5f});
    check(e, Scales::columns);
  }
}
TEST_P(GemmFp8, ResultsOfOtherTypes) {
  for (const Extents& e : kExtents) {
    for (const Scales scales : {Scales::none, Scales::scalar, Scales::rows}) check(e, scales, {.alpha = 0.5f}, {.d = DType::f32});
    // Some are beyond the largest fp8 number.
    for (const Scales scales : {Scales::none, Scales::rows}) check(e, scales, {.alpha = 4}, {.d = DType::fp8_e4m3});
    check(e, Scales::none, {.alpha = 2000}, {.d = DType::fp8_e5m2});
  }
}
TEST_P(GemmFp8, BiasActivationAndResidualAfterScalesOfRows) {
  const std::int64_t m = 70, n = 130, k = 96;
  const Fp8 a(m * k, random, 2), b(n * k, random, 2);
  std::uniform_real_distribution<float> factor(0.01f, 0.2f);
  std::vector<float> sa(static_cast<std::size_t>(m)), sb(static_cast<std::size_t>(n));
  for (float& x : sa) x = factor(random);
  for (float& x : sb) x = factor(random);
  const auto on_device = [&](const std::vector<float>& v, Shape shape) {
    return Tensor::from(std::span<const float>(v), shape).to(device);
  };
  const Tensor a_scale = on_device(sa, {m, 1}), b_scale = on_device(sb, {1, n});
  for (const DType out : {DType::bf16, DType::f32}) {
    for (const Activation activation : {Activation::none, Activation::silu}) {
      SCOPED_TRACE(tw::format("to {}, activation {}", name_of(out), static_cast<int>(activation)));
      PlacedTensor d({m, n}, out, device, {}), bias({n}, out, device, {}), residual({m, n}, out, device, {});
      const std::vector<float> bias_values = bias.fill_random(random), residual_values = residual.fill_random(random);
      const Tensor at = place(a.bits, m, k, k, a.dtype), bt = place(b.bits, n, k, k, b.dtype), bias_tensor = bias,
                   residual_tensor = residual;
      tw::gemm(at, bt.transpose(0, 1), d,
               {.bias = &bias_tensor, .activation = activation, .residual = &residual_tensor, .a_scale = &a_scale, .b_scale = &b_scale});
      std::vector<double> reference, naive;
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n; ++j) {
          double exact = 0;
          float sum = 0;
          for (std::int64_t l = 0; l < k; ++l) {
            const float x = a.values[static_cast<std::size_t>(i * k + l)], y = b.values[static_cast<std::size_t>(j * k + l)];
            exact += static_cast<double>(x) * y;
            sum += x * y;
          }
          const float s = sa[static_cast<std::size_t>(i)], t = sb[static_cast<std::size_t>(j)],
                      c = bias_values[static_cast<std::size_t>(j)];
          const float r = residual_values[static_cast<std::size_t>(i * n + j)];
          reference.push_back(activate(activation, exact * s * t + c) + r);
          naive.push_back(round_to(out, activate(activation, sum * (s * t) + c) + r));
        }
      }
      EXPECT_TRUE(accurate({d.values(), reference, naive, out == DType::f32 && !device.is_cuda() ? Arithmetic::f32 : Arithmetic::bf16, k}));
    }
  }
}
TEST_P(GemmFp8, OtherKindsOfOperands) {
  std::size_t kind = random() % 3;
  for (const Extents& e : kExtents) {
    Types types = kOtherFp8[kind++ % 3];
    check(e, Scales::none, {}, types);
    check(e, Scales::rows, {.alpha = 0.5f}, types);
    types.d = DType::f32;
    check(e, Scales::scalar, {}, types);
    types.d = types.a;
    check(e, Scales::none, {.alpha = 4}, types);
  }
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
    if (tiles[i].teams == 1)
      for (const Scales scales : {Scales::scalar, Scales::rows}) {
        check({300, 520, 640}, scales, {.config = static_cast<int>(i)});
        for (const Types& types : kOtherFp8) check({300, 520, 640}, scales, {.config = static_cast<int>(i)}, types);
      }
}

TEST_P(GemmFp8, BadInput) {
  const auto make = [&](Shape shape, DType dtype) { return Tensor::zeros(std::move(shape), dtype, Stream::standard(device)); };
  const auto refused = [&](const Tensor& a, const Tensor& b, const Tensor& d, std::initializer_list<std::string_view> texts,
                           const GemmOptions& options = {}) { expect_error<InvalidArgument>([&] { tw::gemm(a, b, d, options); }, texts); };
  const Tensor a = make({4, 256}, DType::fp8_e4m3), b = make({256, 8}, DType::fp8_e4m3), d = make({4, 8}, DType::bf16);
  const Tensor one = make({1}, DType::f32), sa = make({4, 2}, DType::f32), sb = make({2, 1}, DType::f32);
  refused(a, b, make({4, 8}, DType::f16), {"d is f16[4, 8]", "bf16, f32, fp8_e4m3 or fp8_e5m2"});
  const Tensor eight = make({4, 8}, DType::fp8_e4m3), eight_bias = make({8}, DType::fp8_e4m3), words = make({4, 8}, DType::f32);
  refused(a, b, eight, {"d is fp8_e4m3[4, 8]", "bias"}, {.bias = &eight_bias});
  refused(a, b, words, {"d is f32[4, 8]", "block scales"}, {.a_scale = &sa, .b_scale = &sb});
  const Tensor of_rows = make({4, 1}, DType::f32), of_columns = make({1, 8}, DType::f32), of_seven = make({1, 7}, DType::f32);
  refused(a, b, d, {"b_scale is f32[1, 7]", "[1, 8]"}, {.a_scale = &of_rows, .b_scale = &of_seven});
  refused(a, b, d, {"a_scale is f32[1, 8]", "[4, 1]"}, {.a_scale = &of_columns, .b_scale = &of_columns});
  refused(make({2, 4, 256}, DType::fp8_e4m3), b, make({2, 4, 8}, DType::bf16), {"a is fp8_e4m3[2, 4, 256]", "without a batch"},
          {.a_scale = &of_rows, .b_scale = &of_columns});
  refused(a, b, d, {"b_scale is not given", "a_scale"}, {.a_scale = &one});
  refused(a, b, d, {"a_scale is not given", "b_scale"}, {.b_scale = &one});
  refused(a, b, d, {"b_scale is f32[1]", "[2, 1]"}, {.a_scale = &sa, .b_scale = &one});
  const Tensor wrong = make({4, 3}, DType::f32);
  refused(a, b, d, {"a_scale is f32[4, 3]", "[4, 2]"}, {.a_scale = &wrong, .b_scale = &sb});
  refused(a, b, d, {"block scales", "alpha"}, {.alpha = 2, .a_scale = &sa, .b_scale = &sb});
  const Tensor half = make({4, 256}, DType::bf16), half_b = make({256, 8}, DType::bf16);
  refused(half, half_b, d, {"a is bf16[4, 256]", "fp8_e4m3"}, {.a_scale = &one, .b_scale = &one});
  const Tensor range = make({4, 256}, DType::fp8_e5m2), range_b = make({256, 8}, DType::fp8_e5m2);
  refused(range, b, d, {"a is fp8_e5m2[4, 256]", "block scales are for fp8_e4m3"}, {.a_scale = &sa, .b_scale = &sb});
  refused(a, range_b, d, {"b is fp8_e5m2[256, 8]", "block scales are for fp8_e4m3"}, {.a_scale = &sa, .b_scale = &sb});
  refused(half, range_b, d, {"b is fp8_e5m2[256, 8]", "bf16"});
  refused(range, half_b, d, {"b is bf16[256, 8]", "fp8_e5m2"});
  refused(make({4, 6}, DType::i32), make({6, 8}, DType::i32), d, {"a is i32[4, 6]", "fp8_e4m3, fp8_e5m2 and i8 are supported"});
  const Tensor ia = make({4, 6}, DType::i8), ib = make({6, 8}, DType::i8), id = make({4, 8}, DType::i32);
  refused(ia, ib, make({4, 8}, DType::f32), {"d is f32[4, 8]", "i32"});
  refused(ia, ib, id, {"i8", "alpha"}, {.alpha = 2});
  refused(ia, ib, id, {"i8", "activation"}, {.activation = Activation::relu});
}

TEST(GemmFp8Kernels, OfOtherKindsOfOperandsCompileWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs;
  for (const bool pieces : {true, false})
    for (const Config& tile : configs(0))
      for (Kernel kernel : {Kernel{.dtype = DType::fp8_e4m3, .mixed_fp8 = true}, Kernel{.dtype = DType::fp8_e5m2, .mixed_fp8 = true},
                            Kernel{.dtype = DType::fp8_e5m2, .fp8_result = DType::fp8_e5m2}}) {
        // Copies by elements and two teams of 192 columns are too much for the registers, whatever the type.
        if (!pieces && tile.teams > 1) continue;
        kernel.tile = tile;
        specs.push_back(make_spec({type_of(kernel), source_of(kernel), nullptr}, pieces, pieces));
      }
  compile_and_check(specs, "sm_90a", expect_fast);
}

}  // namespace
}  // namespace tw::kernels::gemm
