// What the functions of tilewave/sparse_gemm.hpp refuse, and what they say.

#include <gtest/gtest.h>

#include <limits>

#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/sparse_gemm.hpp"

namespace tw {
namespace {

using namespace tw::test;

class SparseGemmBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  Tensor make(Shape shape, DType dtype = DType::bf16) const { return Tensor::zeros(std::move(shape), dtype, Stream::standard(device)); }
  SparseMatrix matrix(std::int64_t m, std::int64_t k, DType dtype = DType::bf16) const {
    return SparseMatrix::allocate(m, k, dtype, Stream::standard(device));
  }
  void refused(const SparseMatrix& a, const Tensor& b, Shape shape, std::initializer_list<std::string_view> parts,
               const SparseGemmOptions& options = {}, DType dtype = DType::bf16) {
    const PlacedTensor d(std::move(shape), dtype, device, {.offset = 8});
    expect_error<InvalidArgument>([&] { sparse_gemm(a, b, d, options); }, parts);
    EXPECT_TRUE(d.untouched());
  }
  void linear_refused(const Tensor& x, const SparseMatrix& w, Shape shape, std::initializer_list<std::string_view> parts,
                      const SparseGemmOptions& options = {}) {
    const PlacedTensor y(std::move(shape), DType::bf16, device, {.offset = 8});
    expect_error<InvalidArgument>([&] { sparse_linear(x, w, y, options); }, parts);
    EXPECT_TRUE(y.untouched());
  }
  const Device device = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Ops, SparseGemmBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(SparseGemmBadInput, Matrices) {
  const Tensor b = make({16, 8});
  SparseMatrix a = matrix(4, 16);
  a.values = make({4, 7});
  refused(a, b, {4, 8}, {"values are bf16[4, 7]", "multiple of 4"});
  a.values = make({4, 8}, DType::f32);
  refused(a, b, {4, 8}, {"values are f32[4, 8]", "i8"});
  a.values = make({8, 4}).transpose(0, 1);
  refused(a, b, {4, 8}, {"values are bf16[4, 8]", "adjacent"});
  a = matrix(4, 16);
  a.metadata = make({1, 2, 64}, DType::u8);
  refused(a, b, {4, 8}, {"metadata are u8[1, 2, 64]", "u8[1, 2, 128]"});
  a.metadata = make({1, 2, 128}, DType::i8);
  refused(a, b, {4, 8}, {"metadata are i8[1, 2, 128]"});
  if (device.is_cuda()) {
    a.metadata = Tensor::zeros({1, 2, 128}, DType::u8);
    refused(a, b, {4, 8}, {"metadata", "cpu"});
  }
  expect_error<InvalidArgument>([&] { SparseMatrix::metadata_shape(4, 6, DType::bf16); }, {"[4, 6]", "multiple of 4"});
  expect_error<InvalidArgument>([&] { SparseMatrix::metadata_shape(4, 8, DType::f32); }, {"f32"});
}

TEST_P(SparseGemmBadInput, Operands) {
  const SparseMatrix a = matrix(4, 16);
  refused(a, make({16}), {4, 8}, {"b is bf16[16]", "[16, N]"});
  refused(a, make({12, 8}), {4, 8}, {"b is bf16[12, 8]", "[16, 8]"});
  refused(a, make({16, 8}, DType::f16), {4, 8}, {"b is f16[16, 8]", "bf16"});
  refused(a, make({16, 8}), {4, 9}, {"d is bf16[4, 9]", "[4, 8]"});
  refused(a, make({16, 8}), {4, 8}, {"d is f16[4, 8]", "bf16"}, {}, DType::f16);
  linear_refused(make({16}), a, {3, 4}, {"sparse_linear", "x is bf16[16]", "[M, 16]"});
  linear_refused(make({3, 12}), a, {3, 4}, {"x is bf16[3, 12]", "[3, 16]"});
  linear_refused(make({3, 16}), a, {4, 3}, {"y is bf16[4, 3]", "[3, 4]"});
}

TEST_P(SparseGemmBadInput, Options) {
  const SparseMatrix a = matrix(4, 16);
  const Tensor b = make({16, 8}), bias = make({9}), scale = make({1}, DType::f32), residual = make({4, 7});
  refused(a, b, {4, 8}, {"bias is bf16[9]", "[8]"}, {.bias = &bias});
  refused(a, b, {4, 8}, {"swiglu"}, {.activation = Activation::swiglu});
  refused(a, b, {4, 8}, {"alpha is", "finite"}, {.alpha = std::numeric_limits<float>::infinity()});
  refused(a, b, {4, 8}, {"residual is bf16[4, 7]", "[4, 8]"}, {.residual = &residual});
  refused(a, b, {4, 8}, {"b_scale is not given"}, {.a_scale = &scale});
  refused(a, b, {4, 8}, {"bf16", "scales"}, {.a_scale = &scale, .b_scale = &scale});
  refused(matrix(4, 16, DType::i8), make({16, 8}, DType::i8), {4, 8}, {"i8", "alpha"}, {.alpha = 2}, DType::i32);
  linear_refused(make({3, 16}), a, {3, 4}, {"bias is bf16[9]", "[4]"}, {.bias = &bias});
  if (device.is_cuda()) refused(a, b, {4, 8}, {"config is 99"}, {.config = 99});
}

TEST_P(SparseGemmBadInput, Conversions) {
  const Tensor x = make({4, 16});
  expect_error<InvalidArgument>([&] { prune_2_4(make({4, 6}), make({4, 6})); }, {"prune_2_4", "x is bf16[4, 6]", "multiple of 4"});
  expect_error<InvalidArgument>([&] { prune_2_4(x, make({4, 12})); }, {"y is bf16[4, 12]", "[4, 16]"});
  expect_error<InvalidArgument>([&] { prune_2_4(x.slice(0, 0, 3), x.slice(0, 1, 4)); }, {"x", "y"});
  expect_error<InvalidArgument>([&] { compress_2_4(x, matrix(4, 12)); }, {"values is bf16[4, 6]", "[4, 8]"});
  expect_error<InvalidArgument>([&] { compress_2_4(make({4, 16}, DType::f32), matrix(4, 16)); }, {"dense is f32[4, 16]"});
  const Tensor flag = make({2}, DType::i32);
  expect_error<InvalidArgument>([&] { compress_2_4(x, matrix(4, 16), {.refused = &flag}); }, {"refused is i32[2]", "i32[1]"});
  expect_error<InvalidArgument>([&] { decompress_2_4(matrix(4, 16), make({4, 16}, DType::f16)); }, {"dense is f16[4, 16]", "bf16"});
}

}  // namespace
}  // namespace tw
