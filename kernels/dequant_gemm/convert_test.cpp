// Weights as published checkpoints store them: known answers, and weights packed here by the formats' definitions.

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <random>

#include "kernels/dequant_gemm/reference.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/support.hpp"
#include "tilewave/quantized_layouts.hpp"

namespace tw::kernels::dequant_gemm {
namespace {

using namespace tw::test;
using Numbers = std::function<int(std::int64_t, std::int64_t)>;

void put(const Tensor& words, std::int64_t row, std::int64_t col, int place, int code) {
  i32& word = words.data<i32>()[row * words.shape(1) + col];
  word = static_cast<i32>((static_cast<u32>(word) & ~(15u << 4 * place)) | static_cast<u32>(code) << 4 * place);
}
Tensor words(Shape shape) {
  const Tensor t = Tensor::empty(std::move(shape), DType::i32);
  std::fill_n(t.data<i32>(), t.numel(), 0x5a5a5a5a);
  return t;
}

/// A weight of random codes, and its three published forms.
struct Weight {
  Weight(std::int64_t n, std::int64_t k, std::int64_t groups, std::mt19937_64& random, bool symmetric = false)
      : n(n), k(k), groups(groups), scales(Tensor::random({groups, n}, DType::f16, random())) {
    for (std::int64_t i = 0; i < n * k; ++i) codes.push_back(static_cast<int>(random() % 16));
    for (std::int64_t i = 0; i < n * groups; ++i) zeros.push_back(symmetric ? 8 : 1 + static_cast<int>(random() % 15));
  }
  int code(std::int64_t row, std::int64_t col) const { return codes[static_cast<std::size_t>(row * k + col)]; }
  int zero(std::int64_t row, std::int64_t g) const { return zeros[static_cast<std::size_t>(row * groups + g)]; }
  Tensor scales_by_row() const {
    const Tensor t = Tensor::empty({n, groups}, DType::f16);
    for (std::int64_t i = 0; i < n * groups; ++i) t.data<f16>()[i] = f16(static_cast<float>(scales.at({i % groups, i / groups})));
    return t;
  }
  void expect_equal(const QuantizedMatrix& w) const {
    ASSERT_EQ(w.rows(), n);
    ASSERT_EQ(w.columns(), k);
    const std::vector<double> decoded = decode(w);
    for (std::int64_t i = 0; i < n * k; ++i) {
      const std::int64_t row = i / k, g = i % k / (k / groups);
      ASSERT_EQ(decoded[static_cast<std::size_t>(i)], scales.at({g, row}) * (code(row, i % k) - zero(row, g))) << i;
    }
  }

  std::int64_t n, k, groups;
  Tensor scales;
  std::vector<int> codes, zeros;
};

QuantizedMatrix from_awq(const Weight& w) {
  constexpr std::array order = {0, 2, 4, 6, 1, 3, 5, 7};
  const Tensor weight = words({w.k, w.n / 8}), zeros = words({w.groups, w.n / 8});
  for (std::int64_t n = 0; n < w.n; n += 8) {
    for (int i = 0; i < 8; ++i) {
      const std::int64_t row = n + order[static_cast<std::size_t>(i)];
      for (std::int64_t k = 0; k < w.k; ++k) put(weight, k, n / 8, i, w.code(row, k));
      for (std::int64_t g = 0; g < w.groups; ++g) put(zeros, g, n / 8, i, w.zero(row, g));
    }
  }
  return convert_awq(weight, zeros, w.scales);
}
QuantizedMatrix from_gptq(const Weight& w, bool minus_one, const Tensor* g_idx = nullptr) {
  const Tensor weight = words({w.k / 8, w.n}), zeros = words({w.groups, w.n / 8});
  for (std::int64_t n = 0; n < w.n; ++n) {
    for (std::int64_t k = 0; k < w.k; ++k) put(weight, k / 8, n, static_cast<int>(k % 8), w.code(n, k));
    for (std::int64_t g = 0; g < w.groups; ++g) put(zeros, g, n / 8, static_cast<int>(n % 8), w.zero(n, g) - (minus_one ? 1 : 0));
  }
  return convert_gptq(weight, zeros, w.scales, {.g_idx = g_idx, .zeros_minus_one = minus_one});
}
QuantizedMatrix from_compressed_tensors(const Weight& w, bool with_zeros) {
  const Tensor weight = words({w.n, w.k / 8}), zeros = words({(w.n + 7) / 8, w.groups});
  for (std::int64_t n = 0; n < w.n; ++n) {
    for (std::int64_t k = 0; k < w.k; ++k) put(weight, n, k / 8, static_cast<int>(k % 8), w.code(n, k));
    for (std::int64_t g = 0; g < w.groups; ++g) put(zeros, n / 8, g, static_cast<int>(n % 8), w.zero(n, g));
  }
  return convert_compressed_tensors(weight, w.scales_by_row(), with_zeros ? &zeros : nullptr);
}

class Published : public testing::Test {
 protected:
  std::mt19937_64 random = random_engine();
};

/// Word 0x76543210 holds 0, 1, ..., 7 from its lowest bits on.
TEST_F(Published, KnownAnswers) {
  const auto filled = [](Shape shape, i32 word) {
    const Tensor t = Tensor::empty(std::move(shape), DType::i32);
    std::fill_n(t.data<i32>(), t.numel(), word);
    return t;
  };
  const Tensor ones = Tensor::empty({1, 8}, DType::f16), one = Tensor::empty({1, 1}, DType::f16);
  std::fill_n(ones.data<f16>(), 8, f16(1.0f));
  one.data<f16>()[0] = f16(1.0f);
  constexpr i32 numbers = 0x76543210;

  const QuantizedMatrix awq = convert_awq(filled({32, 1}, numbers), filled({1, 1}, 0), ones);
  const std::vector<double> of_awq = decode(awq);
  constexpr std::array columns = {0, 4, 1, 5, 2, 6, 3, 7};
  for (std::size_t n = 0; n < 8; ++n)
    for (std::size_t k = 0; k < 32; ++k) EXPECT_EQ(of_awq[n * 32 + k], columns[n]);

  const QuantizedMatrix gptq = convert_gptq(filled({4, 8}, numbers), filled({1, 1}, 0), ones);
  EXPECT_EQ(gptq.zeros.at({3, 0}), 1);
  const std::vector<double> of_gptq = decode(gptq);
  for (std::size_t i = 0; i < 256; ++i) EXPECT_EQ(of_gptq[i], static_cast<double>(i % 8) - 1);

  const QuantizedMatrix packed = convert_compressed_tensors(filled({1, 4}, numbers), one);
  EXPECT_EQ(packed.zeros.numel(), 0);
  const std::vector<double> of_packed = decode(packed);
  for (std::size_t k = 0; k < 32; ++k) EXPECT_EQ(of_packed[k], static_cast<double>(k % 8) - 8);
  // Byte 0xb4: column 0 is 4, column 1 is 11.
  const std::vector<double> bytes = decode(convert_compressed_tensors(filled({1, 4}, static_cast<i32>(0xb4b4b4b4u)), one));
  EXPECT_EQ(bytes[0], 4 - 8);
  EXPECT_EQ(bytes[1], 11 - 8);
}

TEST_F(Published, WeightsAreTheSameInEveryLayout) {
  for (const auto& [n, k, groups, group] : {std::tuple{8, 32, 1, 32}, {24, 256, 2, 128}, {16, 192, 3, 32}, {40, 1024, 1, 128}}) {
    SCOPED_TRACE(tw::format("{} x {}, {} groups", n, k, groups));
    const Weight w(n, k, groups, random);
    for (const QuantizedMatrix& q : {from_awq(w), from_gptq(w, true), from_gptq(w, false), from_compressed_tensors(w, true)}) {
      EXPECT_EQ(q.group, group);
      EXPECT_NE(q.zeros.numel(), 0);
      w.expect_equal(q);
    }
  }
}

TEST_F(Published, SymmetricWeightsHaveNoZeroPoints) {
  const Weight w(16, 256, 2, random, true);
  for (const QuantizedMatrix& q : {from_awq(w), from_gptq(w, true), from_compressed_tensors(w, true), from_compressed_tensors(w, false)}) {
    EXPECT_EQ(q.zeros.numel(), 0);
    w.expect_equal(q);
  }
}

TEST_F(Published, RowsNeedNotBeAMultipleOfEightWhereTheyAreNotPacked) {
  const Weight w(13, 64, 2, random);
  w.expect_equal(from_compressed_tensors(w, true));
}

TEST_F(Published, GroupsMustBeInOrder) {
  const Weight w(8, 64, 2, random);
  const Tensor g_idx = Tensor::empty({64}, DType::i32);
  for (i32 k = 0; k < 64; ++k) g_idx.data<i32>()[k] = k / 32;
  w.expect_equal(from_gptq(w, true, &g_idx));
  g_idx.data<i32>()[31] = 1;
  expect_error<InvalidArgument>([&] { from_gptq(w, true, &g_idx); }, {"convert_gptq", "g_idx[31] is 1; it must be 0"});
}

TEST_F(Published, ErrorsNameTheArgument) {
  const Tensor weight = words({64, 2}), zeros = words({2, 2}), scales = Tensor::random({2, 16}, DType::f16, 1);
  const auto refused = [](const char* part, const Tensor& a, const Tensor& b, const Tensor& c) {
    expect_error<InvalidArgument>([&] { convert_awq(a, b, c); }, {"convert_awq", part});
  };
  refused("qweight is", weight.reshape({128}), zeros, scales);
  refused("it must be i32[64, 2]", Tensor::random({64, 2}, DType::f32, 1), zeros, scales);
  refused("qzeros is", weight, words({2, 3}), scales);
  refused("scales are", weight, zeros, Tensor::random({2, 15}, DType::f16, 1));
  refused("a group has 16 inputs; it must have a multiple of 32", words({32, 2}), zeros, scales);
  refused("there are 3 groups for 64 inputs", weight, words({3, 2}), Tensor::random({3, 16}, DType::f16, 1));
  const Tensor large = Tensor::random({2, 16}, DType::f32, 1);
  large.data<float>()[16 + 3] = 1e6f;
  refused("scale [1, 3] is 1000000; it must be in the range of f16", weight, zeros, large);
  // GPTQ's 15 is a zero point of 16.
  const Tensor high = words({2, 2});
  high.data<i32>()[2] = -1;
  expect_error<InvalidArgument>(
      [&] {
        convert_gptq(words({8, 16}), high, scales);
      },
      {"convert_gptq", "zero point of row 0, group 1 is 16"});
}

}  // namespace
}  // namespace tw::kernels::dequant_gemm
