// rotary_linear() and its epilogue against a product and a rotation in double.

#include "kernels/gemm/rotary_linear.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/gemm/kernels.hpp"
#include "kernels/gemm/rotary_linear.tile.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/gemm_with.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::test;

struct Case {
  int sequences, positions;
  int heads, rotated;  ///< heads, of which the first ones are rotated
  int dim, half, depth;
  int rows() const { return sequences * positions; }
  int columns() const { return heads * dim; }
};

class RotaryLinearTest : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  /// Operands whose product is exact in every type, because they are small integers, and what comes of them.
  void prepare(const Case& c, DType dtype) {
    SCOPED_TRACE(describe(c, dtype));
    const auto numbers = [&](std::int64_t count, auto distribution) {
      std::vector<float> values(static_cast<std::size_t>(count));
      for (float& value : values) value = static_cast<float>(distribution(random));
      return values;
    };
    const std::uniform_int_distribution<int> small(-3, 3);
    const std::vector<float> a = numbers(c.rows() * c.depth, small), b = numbers(c.columns() * c.depth, small);
    const std::vector<float> added = numbers(c.columns(), small);
    std::vector<float> cosines, sines;
    for (int n = 0; n < c.positions * c.half; ++n) {
      const double angle = n / c.half * std::pow(10000.0, -double(n % c.half) / c.half);
      cosines.push_back(static_cast<float>(std::cos(angle)));
      sines.push_back(static_cast<float>(std::sin(angle)));
    }
    const auto tensor = [&](const std::vector<float>& values, Shape shape, DType type) {
      return Tensor::from<float>(values, std::move(shape)).to(type).to(device);
    };
    x = tensor(a, {c.rows(), c.depth}, dtype);
    weight = tensor(b, {c.columns(), c.depth}, dtype);
    bias = tensor(added, {c.columns()}, dtype);
    cos = tensor(cosines, {c.positions, c.half}, DType::f32);
    sin = tensor(sines, {c.positions, c.half}, DType::f32);
    y = Tensor::poisoned({c.rows(), c.columns()}, dtype, Stream::standard(device));

    const double unit = dtype == DType::f16 ? 0x1p-11 : 0x1p-8;  // half of the last digit
    expected.clear();
    bounds.clear();
    for (int row = 0; row < c.rows(); ++row) {
      std::vector<double> sums, terms;  // and the sum of the terms' sizes, of which f32 loses a part
      for (int col = 0; col < c.columns(); ++col) {
        double sum = 0;
        for (int k = 0; k < c.depth; ++k) sum += double{a[row * c.depth + k]} * b[col * c.depth + k];
        sums.push_back(sum + added[col]);
        terms.push_back(std::abs(sum) + std::abs(added[col]));
      }
      for (int col = 0; col < c.columns(); ++col) {
        const int k = col % c.dim;
        const bool turns = col / c.dim < c.rotated && k < 2 * c.half;
        double value = sums[col], size = terms[col];
        if (turns) {
          const int angle = row % c.positions * c.half + k % c.half;
          const int partner = k < c.half ? col + c.half : col - c.half;
          value = sums[col] * cosines[angle] + (k < c.half ? -1 : 1) * sums[partner] * sines[angle];
          size += terms[partner];
        }
        expected.push_back(value);
        bounds.push_back(unit * std::abs(value) * 1.001 + 1e-5 * size);
      }
    }
  }
  void check() const {
    const Tensor values = y.to(Device::cpu()).to(DType::f32);
    for (std::size_t i = 0; i < expected.size(); ++i) ASSERT_NEAR(values.data<float>()[i], expected[i], bounds[i]) << "element " << i;
  }
  void run(const Case& c) {
    rotary_linear(x, weight, y,
                  {.bias = &bias,
                   .cos = cos,
                   .sin = sin,
                   .positions = c.positions,
                   .heads = c.rotated,
                   .head_dim = c.dim,
                   .stream = Stream::standard(device)});
  }
  void check_linear(const Case& c, DType dtype) {
    SCOPED_TRACE(describe(c, dtype));
    prepare(c, dtype);
    if (launched([&] { run(c); })) check();
  }
  /// The epilogue in a user's product, which runs on every target.
  template <class T, int kHalf, int kDim>
  void check_epilogue(const Case& c) {
    SCOPED_TRACE(describe(c, dtype_of<T>));
    prepare(c, dtype_of<T>);
    const auto bind_all = [&](auto& bind, auto& p) {
      bind(p.d, y);
      p.bias = bias.data<T>();
      p.cosines = cos.data<float>();
      p.sines = sin.data<float>();
      p.positions = c.positions;
      p.rotated = c.rotated * kDim;
      p.has_bias = true;
    };
    if (launched([&] { gemm_with<RotaryLinear<T, kHalf, kDim>, T>(x, weight.transpose(0, 1), bind_all); })) check();
  }
  static std::string describe(const Case& c, DType dtype) {
    return tw::format("{} x {} positions, {} of {} heads of {}, half {}, depth {}, {}", c.sequences, c.positions, c.rotated, c.heads, c.dim,
                      c.half, c.depth, name_of(dtype));
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
  Tensor x, weight, bias, cos, sin, y;
  std::vector<double> expected, bounds;
};

TEST_P(RotaryLinearTest, RotatesHeads) {
  const Case small{1, 9, 2, 0, 64, 16, 16};
  if (!has_rotary_linear(DType::bf16, 64, 32, Stream::standard(device))) {
    prepare(small, DType::bf16);
    expect_error<InvalidArgument>([&] { run(small); }, {"rotary_linear: x is", "on a Hopper GPU"});
    return;
  }
  for (const DType dtype : {DType::bf16, DType::f16}) {
    check_linear({2, 150, 6, 4, 64, 16, 64}, dtype);  // the encoder's heads, in several tiles
    check_linear({1, 70, 3, 2, 128, 64, 96}, dtype);
    check_linear({3, 5, 4, 4, 64, 32, 8}, dtype);
  }
  check_linear(small, DType::bf16);
  check_linear({1, 1, 2, 1, 64, 16, 16}, DType::bf16);
  check_linear({1, 140, 20, 13, 64, 24, 72}, DType::bf16);
  check_linear({4, 1500, 60, 40, 64, 16, 64}, DType::bf16);  // many tiles for each SM
}

TEST_P(RotaryLinearTest, EpilogueWorksInAnyProduct) {
  check_epilogue<bf16, 16, 64>({2, 90, 5, 3, 64, 16, 64});
  check_epilogue<bf16, 64, 128>({1, 130, 3, 1, 128, 64, 40});
  check_epilogue<f16, 8, 32>({1, 33, 9, 7, 32, 8, 16});
}

TEST_P(RotaryLinearTest, RefusesWhatDoesNotFit) {
  if (!has_rotary_linear(DType::bf16, 64, 32, Stream::standard(device))) return;
  const Case right{2, 5, 3, 2, 64, 16, 16};
  prepare(right, DType::bf16);
  const auto refused = [&](std::initializer_list<std::string_view> words, const Case& c, auto change) {
    const auto kept = std::array{x, cos, sin, y};
    change();
    expect_error<InvalidArgument>([&] { run(c); }, words);
    std::tie(x, cos, sin, y) = std::tie(kept[0], kept[1], kept[2], kept[3]);
  };
  const Stream stream = Stream::standard(device);
  const auto nothing = [] {};
  refused({"256 of 192 columns", "whole heads"}, {2, 5, 3, 4, 64, 16, 16}, nothing);
  refused({"head_dim 96"}, {2, 5, 3, 2, 96, 16, 16}, nothing);
  refused({"cos is", "at least 6"}, {2, 6, 3, 2, 64, 16, 16}, nothing);
  refused({"sin is", "both tables"}, right, [&] { sin = Tensor::zeros({5, 8}, DType::f32, stream); });
  refused({"cos is", "f32"}, right, [&] { cos = Tensor::zeros({5, 16}, DType::bf16, stream); });
  refused({"gemm: d is"}, right, [&] { x = x.slice(0, 0, 9); });
  refused({"contiguous"}, right, [&] { y = Tensor::zeros({192, 10}, DType::bf16, stream).transpose(0, 1); });
}

INSTANTIATE_TEST_SUITE_P(Devices, RotaryLinearTest, testing::ValuesIn(kDevices), device_name);

TEST(RotaryLinearKernels, CompileForSm90a) {
  skip_without_nvrtc();
  const detail::EpilogueInfo epilogue{"tw::kernels::gemm::RotaryLinear<tw::bf16, 16, 64>", "kernels/gemm/rotary_linear.tile.hpp"};
  for (const Config& tile : {Config{128, 256, 4, 1, 8}, Config{128, 192, 4, 1, 16}, Config{128, 128, 6, 1, 16}}) {
    const Kernel form{.tile = tile, .epilogue = &epilogue};
    const CompiledKernel kernel = compile(make_spec({type_of(form), source_of(form), nullptr}, true, true));
    EXPECT_EQ(kernel.spill_bytes, 0) << type_of(form);
    EXPECT_TRUE(kernel.performance_losses.empty()) << type_of(form) << ": " << kernel.performance_losses.front();
  }
}

}  // namespace
}  // namespace tw::kernels::gemm
