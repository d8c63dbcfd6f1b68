// What grouped_gemm() and k_grouped_gemm() refuse, and what they say.

#include <gtest/gtest.h>

#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/grouped_gemm.hpp"

namespace tw {
namespace {

using namespace tw::test;

/// Errors name the argument, what was given and what is allowed; and D is as it was.
class GroupedGemmBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  PlacedTensor make(Shape shape, DType dtype = DType::bf16) const { return PlacedTensor(std::move(shape), dtype, device, {.offset = 8}); }
  Tensor offsets(std::int64_t groups) const { return Tensor::zeros({groups + 1}, DType::i32, Stream::standard(device)); }
  void refused(const Tensor& a, const Tensor& b, const Tensor& at, const PlacedTensor& d, std::initializer_list<std::string_view> parts,
               const GroupedGemmOptions& options = {}) {
    expect_error<InvalidArgument>([&] { grouped_gemm(a, b, at, d, options); }, parts);
    EXPECT_TRUE(d.untouched());
  }
  void depth_refused(const Tensor& a, const Tensor& b, const Tensor& at, const PlacedTensor& d,
                     std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { k_grouped_gemm(a, b, at, d); }, parts);
    EXPECT_TRUE(d.untouched());
  }

  const Device device = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Ops, GroupedGemmBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(GroupedGemmBadInput, Shapes) {
  const PlacedTensor a = make({4, 6}), b = make({3, 6, 8}), d = make({4, 8});
  refused(make({6}), b, offsets(3), d, {"grouped_gemm", "a is bf16[6]", "[M, K]"});
  refused(a, make({6, 8}), offsets(3), d, {"b is bf16[6, 8]", "[groups, 6, N]"});
  refused(a, make({3, 7, 8}), offsets(3), d, {"b is bf16[3, 7, 8]", "[groups, 6, N]"});
  refused(a, b, offsets(3), make({4, 9}), {"d is bf16[4, 9]", "[4, 8]"});
  refused(a, b, offsets(3), d, {"d is bf16[4, 8]", "[4, 4]"}, {.activation = Activation::swiglu});
  refused(a, make({3, 6, 7}), offsets(3), d, {"b is bf16[3, 6, 7]", "even"}, {.activation = Activation::swiglu});
  refused(a, b, offsets(2), d, {"offsets is i32[3]", "3 groups", "i32[4]"});
  const PlacedTensor bias = make({3, 9});
  refused(a, b, offsets(3), d, {"bias is bf16[3, 9]", "[3, 8]"}, {.bias = &bias.tensor()});
}

TEST_P(GroupedGemmBadInput, Dtypes) {
  const PlacedTensor a = make({4, 6}), b = make({3, 6, 8}), d = make({4, 8});
  refused(make({4, 6}, DType::i32), b, offsets(3), d, {"a is i32[4, 6]", "supported"});
  refused(a, make({3, 6, 8}, DType::f16), offsets(3), d, {"b is f16[3, 6, 8]", "bf16"});
  refused(a, b, offsets(3), make({4, 8}, DType::f32), {"d is f32[4, 8]", "bf16"});
  refused(a, b, Tensor::zeros({4}, DType::i64, Stream::standard(device)), d, {"offsets is i64[4]", "i32[4]"});
  const PlacedTensor bias = make({3, 8}, DType::f16);
  refused(a, b, offsets(3), d, {"bias is f16[3, 8]", "bf16"}, {.bias = &bias.tensor()});
  if (device.is_cuda()) {
    refused(make({4, 6}, DType::f32), make({3, 6, 8}, DType::f32), offsets(3), make({4, 8}, DType::f32), {"a is f32[4, 6]", "CPU only"});
    refused(a, b, offsets(3).to(Device::cpu()), d, {"offsets", "cpu"});
  }
}

TEST_P(GroupedGemmBadInput, Scales) {
  const PlacedTensor a = make({4, 256}, DType::fp8_e4m3), b = make({3, 256, 8}, DType::fp8_e4m3), d = make({4, 8});
  const PlacedTensor sa = make({4, 2}, DType::f32), sb = make({3, 2, 1}, DType::f32), wrong = make({3, 1, 2}, DType::f32);
  refused(a, b, offsets(3), d, {"a_scale is not given", "fp8_e4m3"});
  refused(a, b, offsets(3), d, {"b_scale is not given"}, {.a_scale = &sa.tensor()});
  refused(a, b, offsets(3), d, {"b_scale is f32[3, 1, 2]", "[3, 2, 1]"}, {.a_scale = &sa.tensor(), .b_scale = &wrong.tensor()});
  refused(a, b, offsets(3), d, {"a_scale is f32[3, 2, 1]", "[4, 2]"}, {.a_scale = &sb.tensor(), .b_scale = &sb.tensor()});
  refused(a, b, offsets(3), make({4, 4}), {"activation"},
          {.activation = Activation::swiglu, .a_scale = &sa.tensor(), .b_scale = &sb.tensor()});
  refused(a, b, offsets(3), make({4, 8}, DType::f32), {"d is f32[4, 8]", "bf16"}, {.a_scale = &sa.tensor(), .b_scale = &sb.tensor()});
  refused(make({4, 256}), make({3, 256, 8}), offsets(3), d, {"a is bf16[4, 256]", "scales are for operands of fp8_e4m3"},
          {.a_scale = &sa.tensor()});
}

TEST_P(GroupedGemmBadInput, Memory) {
  const PlacedTensor a = make({4, 8}), b = make({3, 8, 8});
  expect_error<InvalidArgument>([&] { grouped_gemm(a, b, offsets(3), a); }, {"d", "a", "share"});
  const Tensor wide = Tensor::zeros({8}, DType::i32, Stream::standard(device));
  const Tensor stepped = Tensor::borrow(wide.data(), {4}, DType::i32, device, {2});
  refused(a, b, stepped, make({4, 8}), {"offsets", "contiguous"});
}

TEST_P(GroupedGemmBadInput, Depth) {
  const PlacedTensor a = make({4, 6}), b = make({6, 8}), d = make({3, 4, 8});
  depth_refused(make({6}), b, offsets(3), d, {"k_grouped_gemm", "a is bf16[6]", "[M, K]"});
  depth_refused(a, make({7, 8}), offsets(3), d, {"b is bf16[7, 8]", "[6, N]"});
  depth_refused(a, b, offsets(3), make({3, 8, 4}), {"d is bf16[3, 8, 4]", "[groups, 4, 8]"});
  depth_refused(a, b, offsets(3), make({4, 8}), {"d is bf16[4, 8]", "[groups, 4, 8]"});
  depth_refused(a, b, offsets(4), d, {"offsets is i32[5]", "i32[4]"});
  depth_refused(a, b, offsets(3), make({3, 4, 8}, DType::f16), {"d is f16[3, 4, 8]", "bf16 or f32"});
  depth_refused(make({4, 6}, DType::f16), b, offsets(3), make({3, 4, 8}, DType::f16), {"b is bf16[6, 8]", "f16"});
}

}  // namespace
}  // namespace tw
