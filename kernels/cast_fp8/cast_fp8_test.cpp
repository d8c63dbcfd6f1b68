// cast_fp8(), cast_fp8_blocks() and cast_fp8_grouped() against plain loops, bit for bit, and cast_fp8_swiglu() against its formula, on the
// CPU and, where there is one, on a GPU; their bad inputs.

#include "tilewave/cast_fp8.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <span>
#include <tuple>
#include <vector>

#include "kernels/cast_fp8/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::cast_fp8 {
namespace {

using namespace tw::test;

std::int64_t groups_of(std::int64_t n) { return (n + 127) / 128; }

class CastFp8 : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }
  Tensor empty(Shape shape, DType type) { return Tensor::poisoned(std::move(shape), type, Stream::standard(device)); }
  /// Numbers of very different size from group to group.
  std::vector<float> numbers(std::int64_t count) {
    std::vector<float> x(static_cast<std::size_t>(count));
    std::normal_distribution<float> normal;
    float size = 1;
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (i % 64 == 0) size = std::exp2(static_cast<float>(pick(20) - 12));
      x[i] = round_to(dtype, normal(random) * size);
    }
    return x;
  }
  /// The elements of a tensor on any device, in row-major order.
  static std::vector<float> values(const Tensor& t) {
    const Tensor host = t.to(Device::cpu()).to(DType::f32);
    const auto* const data = host.data<float>();
    return {data, data + host.numel()};
  }
  static void expect_same(const std::vector<float>& out, const std::vector<float>& expected, const char* what) {
    ASSERT_EQ(out.size(), expected.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (std::isnan(expected[i]))
        ASSERT_TRUE(std::isnan(out[i])) << what << " " << i << " is " << out[i];
      else
        ASSERT_EQ(out[i], expected[i]) << what << " " << i;
    }
  }
  void check(std::vector<float> x_values, Shape shape, Placement place = {}, bool columns = false) {
    const std::int64_t cols = shape.back();
    std::int64_t rows = 1;
    for (std::size_t dim = 0; dim + 1 < shape.size(); ++dim) rows *= shape[dim];
    for (const Fp8Scales kind : {Fp8Scales::exact, Fp8Scales::powers_of_two}) {
      SCOPED_TRACE(tw::format("[{}] kind {} scales in columns {}", tw::join(shape, ", "), static_cast<int>(kind), columns));
      PlacedTensor x(shape, dtype, device, place);
      x.fill(x_values);
      Shape scale_shape = shape;
      scale_shape.back() = groups_of(cols);
      const Tensor y = empty(shape, DType::fp8_e4m3);
      const Tensor scales =
          columns ? column_major_scales(rows, groups_of(cols), 0, Stream::standard(device)) : empty(scale_shape, DType::f32);
      tw::cast_fp8(x, y, scales, {.kind = kind});
      const PlainResult expected = plain(x_values, rows, cols, 1, kind == Fp8Scales::powers_of_two);
      expect_same(values(y), expected.y, "element");
      // A view that is not row-major cannot be copied from a GPU: the memory that it lies in can.
      if (columns && rows > 0 && cols > 0) {
        const std::int64_t padded = (rows + 3) / 4 * 4;
        ASSERT_EQ(scales.strides(), (std::vector<std::int64_t>{1, padded}));
        ASSERT_EQ(reinterpret_cast<std::uintptr_t>(scales.data()) % 16, 0u);
        const Tensor whole = Tensor::borrow(scales.data(), {groups_of(cols), padded}, DType::f32, device);
        const std::vector<float> by_column = values(whole);
        std::vector<float> by_row;
        for (std::int64_t row = 0; row < rows; ++row)
          for (std::int64_t g = 0; g < groups_of(cols); ++g) by_row.push_back(by_column[static_cast<std::size_t>(g * padded + row)]);
        expect_same(by_row, expected.scales, "scale");
      } else {
        expect_same(values(scales), expected.scales, "scale");
      }
    }
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, CastFp8, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(CastFp8, AnyShape) {
  for (const std::int64_t cols : {0, 1, 3, 64, 127, 128, 129, 255, 256, 257, 1000, 1024}) {
    for (const std::int64_t rows : {1, 5}) {
      check(numbers(rows * cols), {rows, cols});
      check(numbers(rows * cols), {rows, cols}, {}, true);
    }
  }
  for (const std::int64_t rows : {0, 1, 4, 31, 32, 33, 67}) check(numbers(rows * 200), {rows, 200}, {}, true);
  check(numbers(300), {300});
  check(numbers(2 * 3 * 5 * 130), {2, 3, 5, 130});
  check(numbers(2 * 3 * 5 * 256), {2, 3, 5, 256});
}

TEST_P(CastFp8, AnyStrides) {
  check(numbers(3 * 5 * 256), {3, 5, 256}, {.offset = 1, .gap = 3});
  check(numbers(3 * 5 * 256), {3, 5, 256}, {.offset = 8, .gap = 8, .align = 8});
  check(numbers(3 * 5 * 200), {3, 5, 200}, {.order = {2, 0, 1}});
  check(numbers(5 * 200), {5, 200}, {.step = 2, .gap = 1, .reversed = true}, true);
}

TEST_P(CastFp8, LargestSmallestAndZero) {
  std::vector<float> x(4 * 128, 0.0f);  // the first group: zeros
  const float largest = dtype == DType::f16 ? 65504.0f : 1e30f;
  for (std::size_t i = 0; i < 128; ++i) {
    x[128 + i] = round_to(dtype, i % 2 == 0 ? largest : -largest);
    x[256 + i] = round_to(dtype, 1e-6f * static_cast<float>(i));      // below the floor of amax
    x[384 + i] = round_to(dtype, std::exp2(-static_cast<float>(i)));  // down to where f16 and the quotients are subnormal, and 0
  }
  check(x, {1, 512});
  check(x, {4, 128});
}

TEST_P(CastFp8, NaNAndInfinityMakeTheirGroupNaN) {
  for (const float bad : {kNaN, kInf, -kInf}) {
    std::vector<float> x = numbers(3 * 300);
    x[300 + 130] = bad;
    check(x, {3, 300});
  }
}

TEST_P(CastFp8, OfGatedActivations) {
  for (const std::int64_t cols : {1, 100, 128, 200, 384}) {
    for (const std::int64_t rows : {0, 1, 33, 70}) {
      for (const Fp8Scales kind : {Fp8Scales::exact, Fp8Scales::powers_of_two}) {
        SCOPED_TRACE(tw::format("[{}, {}] kind {}", rows, cols, static_cast<int>(kind)));
        // Both are halves of one tensor, as a product gives them.
        const std::vector<float> gate_values = numbers(rows * cols), up_values = numbers(rows * cols);
        PlacedTensor both({rows, 2 * cols}, dtype, device, {.gap = pick(2) * 8});
        std::vector<float> rows_of_both;
        for (std::int64_t row = 0; row < rows; ++row)
          for (const std::vector<float>* half : {&gate_values, &up_values})
            rows_of_both.insert(rows_of_both.end(), half->begin() + row * cols, half->begin() + (row + 1) * cols);
        both.fill(rows_of_both);
        const Shape shape{rows, cols}, scale_shape{rows, groups_of(cols)};
        const Tensor y = empty(shape, DType::fp8_e4m3), scales = empty(scale_shape, DType::f32);
        tw::cast_fp8_swiglu(both.tensor().slice(1, 0, cols), both.tensor().slice(1, cols, 2 * cols), y, scales, {.kind = kind});
        const std::vector<float> got = values(y), got_scales = values(scales);
        for (std::int64_t row = 0; row < rows; ++row) {
          for (std::int64_t group = 0; group < groups_of(cols); ++group) {
            const double scale = got_scales[static_cast<std::size_t>(row * groups_of(cols) + group)];
            double amax = 1e-4;
            for (std::int64_t c = group * 128; c < std::min(cols, group * 128 + 128); ++c) {
              const auto i = static_cast<std::size_t>(row * cols + c);
              const double gate = gate_values[i], gated = gate / (1 + std::exp(-gate)) * up_values[i];
              amax = std::max(amax, std::abs(gated));
              // Half a step of e4m3, which has 3 bits and a smallest step of 2^-9, and what f32 rounds.
              ASSERT_NEAR(got[i] * scale, gated, std::max(std::abs(gated) / 16, scale / 1024) * 1.0001 + std::abs(gated) * 1e-6) << i;
            }
            const double steps = scale * 448 / amax;
            ASSERT_GE(steps, 1 - 1e-5);
            ASSERT_LE(steps, kind == Fp8Scales::exact ? 1 + 1e-5 : 2 + 1e-5);
            if (kind == Fp8Scales::powers_of_two) {
              ASSERT_EQ(scale, std::exp2(std::round(std::log2(scale))));
            }
          }
        }
      }
    }
  }
}

TEST_P(CastFp8, Blocks) {
  for (const std::int64_t rows : {0, 1, 31, 32, 127, 128, 129, 300}) {
    for (const std::int64_t cols : {0, 1, 100, 128, 257}) {
      for (const Fp8Scales kind : {Fp8Scales::exact, Fp8Scales::powers_of_two}) {
        SCOPED_TRACE(tw::format("[{}, {}] kind {}", rows, cols, static_cast<int>(kind)));
        std::vector<float> values_x = numbers(rows * cols);
        if (rows == 300 && cols == 257) values_x[200 * 257 + 200] = kNaN;
        PlacedTensor x({rows, cols}, dtype, device, {.gap = pick(2) * 3});
        x.fill(values_x);
        const Tensor y = empty({rows, cols}, DType::fp8_e4m3), scales = empty({groups_of(rows), groups_of(cols)}, DType::f32);
        tw::cast_fp8_blocks(x, y, scales, {.kind = kind});
        const PlainResult expected = plain(values_x, rows, cols, 128, kind == Fp8Scales::powers_of_two);
        expect_same(values(y), expected.y, "element");
        if (x.tensor().numel() > 0) expect_same(values(scales), expected.scales, "scale");
      }
    }
  }
}

TEST_P(CastFp8, GroupsOfRows) {
  struct Groups {
    std::int64_t rows, most;
    std::vector<std::int32_t> sizes;
  };
  for (const Groups& g : {Groups{60, 40, {20, 0, 33, 7}}, Groups{60, 64, {60}}, Groups{40, 35, {0, 0, 40, -3}},  // more rows than y has
                          Groups{30, 40, {20, 20, 5}},                                                           // more than x has
                          Groups{0, 5, {0, 3}}, Groups{70, 1, std::vector<std::int32_t>(70, 1)}}) {
    for (const std::int64_t cols : {130, 256}) {
      for (const Fp8Scales kind : {Fp8Scales::exact, Fp8Scales::powers_of_two}) {
        SCOPED_TRACE(tw::format("rows {} most {} sizes {} cols {}", g.rows, g.most, tw::join(g.sizes, " "), cols));
        const std::vector<float> values_x = numbers(g.rows * cols);
        PlacedTensor x({g.rows, cols}, dtype, device);
        x.fill(values_x);
        const auto count = static_cast<std::int64_t>(g.sizes.size());
        const Tensor sizes = Tensor::from(std::span<const std::int32_t>(g.sizes), {count}).to(device);
        const Tensor y = empty({count, g.most, cols}, DType::fp8_e4m3), scales = empty({count, g.most, groups_of(cols)}, DType::f32);
        tw::cast_fp8_grouped(x, sizes, y, scales, {.kind = kind});
        std::vector<float> padded(static_cast<std::size_t>(count * g.most * cols), 0.0f);
        std::int64_t begin = 0;
        for (std::int64_t n = 0; n < count; ++n) {
          const std::int64_t size = std::max(g.sizes[static_cast<std::size_t>(n)], 0);
          for (std::int64_t r = 0; r < std::min({size, g.most, g.rows - begin}); ++r)
            for (std::int64_t c = 0; c < cols; ++c)
              padded[static_cast<std::size_t>((n * g.most + r) * cols + c)] = values_x[static_cast<std::size_t>((begin + r) * cols + c)];
          begin += size;
        }
        const PlainResult expected = plain(padded, count * g.most, cols, 1, kind == Fp8Scales::powers_of_two);
        expect_same(values(y), expected.y, "element");
        expect_same(values(scales), expected.scales, "scale");
      }
    }
  }
}

class CastFp8Arguments : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Tensor tensor(Shape shape, DType dtype = DType::bf16) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Ops, CastFp8Arguments, testing::ValuesIn(kDevices), device_name);

TEST_P(CastFp8Arguments, AreRefusedByName) {
  const DType f8 = DType::fp8_e4m3, f32 = DType::f32;
  const Tensor x = tensor({3, 200}), y = tensor({3, 200}, f8), scales = tensor({3, 2}, f32);
  const auto refused = [&](const Tensor& from, const Tensor& to, const Tensor& s, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { tw::cast_fp8(from, to, s); }, parts);
  };
  refused(tensor({3, 200}, DType::i8), y, scales, {"cast_fp8: x is i8[3, 200]"});
  refused(x, tensor({3, 200}, DType::fp8_e5m2), scales, {"y is fp8_e5m2", "must be fp8_e4m3"});
  refused(x, tensor({3, 201}, f8), scales, {"y is fp8_e4m3[3, 201]", "[3, 200]"});
  refused(x, y, tensor({3, 2}), {"scales is bf16[3, 2]", "f32"});
  refused(x, y, tensor({3, 1}, f32), {"scales is f32[3, 1]", "[3, 2]"});
  refused(x, y, Tensor::borrow(scales.data(), {3, 2}, f32, x.device(), {0, 1}), {"scales", "stride 0"});
  refused(x, Tensor::borrow(x.data(), {3, 200}, f8, x.device()), scales, {"y is", "shares memory with x"});
  expect_error<InvalidArgument>([&] { tw::cast_fp8_blocks(x, y, scales); }, {"cast_fp8_blocks: scales is f32[3, 2]", "[1, 2]"});
  expect_error<InvalidArgument>([&] { tw::cast_fp8_blocks(tensor({2, 3, 4}), tensor({2, 3, 4}, f8), scales); }, {"[N, K]"});
  const auto gated_refused = [&](const Tensor& gate, const Tensor& up, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { tw::cast_fp8_swiglu(gate, up, y, scales); }, parts);
  };
  gated_refused(tensor({3, 200}, DType::i8), x, {"cast_fp8_swiglu: gate is i8[3, 200]"});
  gated_refused(tensor({3, 100}), x, {"y is fp8_e4m3[3, 200]", "for gate bf16[3, 100]", "[3, 100]"});
  gated_refused(x, tensor({3, 201}), {"up is bf16[3, 201]", "gate's shape, bf16[3, 200]"});
  gated_refused(x, tensor({3, 200}, DType::f16), {"up is f16[3, 200]"});
  gated_refused(x, Tensor::borrow(y.data(), {3, 200}, DType::bf16, x.device(), {0, 1}), {"y is", "shares memory with up"});
  const Tensor sizes = tensor({2}, DType::i32), grouped = tensor({2, 5, 200}, f8), grouped_scales = tensor({2, 5, 2}, f32);
  const auto grouped_refused = [&](const Tensor& n, const Tensor& to, const Tensor& s, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { tw::cast_fp8_grouped(x, n, to, s); }, parts);
  };
  grouped_refused(tensor({2}, f32), grouped, grouped_scales, {"cast_fp8_grouped: sizes is f32[2]"});
  grouped_refused(tensor({2, 1}, DType::i32), grouped, grouped_scales, {"sizes is i32[2, 1]", "[G]"});
  grouped_refused(sizes, tensor({3, 5, 200}, f8), grouped_scales, {"y is fp8_e4m3[3, 5, 200]", "[2, M, 200]"});
  grouped_refused(sizes, grouped, tensor({2, 5, 1}, f32), {"scales is f32[2, 5, 1]", "[2, 5, 2]"});
  expect_error<InvalidArgument>([&] { column_major_scales(-1, 2); }, {"rows is -1"});
}

}  // namespace
}  // namespace tw::kernels::cast_fp8
