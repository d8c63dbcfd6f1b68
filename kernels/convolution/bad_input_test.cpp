// What conv1d() and conv2d() refuse, and what they say.

#include "tilewave/convolution.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::convolution {
namespace {

using namespace tw::test;

/// What is thrown names the argument, what was given and what is allowed; and y is as it was.
class ConvolutionBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  PlacedTensor make(Shape shape, DType dtype = DType::f32) const { return PlacedTensor(std::move(shape), dtype, device, {.offset = 4}); }
  void refused(const Tensor& x, const Tensor& w, const PlacedTensor& y, std::initializer_list<std::string_view> parts,
               const Conv2dOptions& options = {}) {
    expect_error<InvalidArgument>([&] { conv2d(x, w, y, options); }, parts);
    EXPECT_TRUE(y.untouched());
  }
  void refused_1d(const Tensor& x, const Tensor& w, const PlacedTensor& y, std::initializer_list<std::string_view> parts,
                  const Conv1dOptions& options = {}) {
    expect_error<InvalidArgument>([&] { conv1d(x, w, y, options); }, parts);
    EXPECT_TRUE(y.untouched());
  }

  const Device device = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Ops, ConvolutionBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(ConvolutionBadInput, Shapes) {
  const PlacedTensor x = make({2, 6, 7, 3}), w = make({5, 3, 2, 3}), y = make({2, 4, 6, 5});
  refused(make({6, 7, 3}), w, y, {"conv2d", "x is f32[6, 7, 3]", "[N, H, W, C]"});
  refused(x, make({5, 3, 3}), y, {"w is f32[5, 3, 3]", "[F, KH, KW, C]"});
  refused(x, make({5, 3, 2, 4}), y, {"x is f32[2, 6, 7, 3]", "w is f32[5, 3, 2, 4]", "C"});
  refused(x, w, make({2, 4, 7, 5}), {"y is f32[2, 4, 7, 5]", "[2, 4, 6, 5]"});
  refused(x, w, make({2, 4, 6, 4}), {"y is f32[2, 4, 6, 4]", "[2, 4, 6, 5]"});
  refused(x, w, make({1, 4, 6, 5}), {"y is f32[1, 4, 6, 5]", "[2, 4, 6, 5]"});
  refused(x, w, make({4, 6, 5}), {"y is f32[4, 6, 5]", "[2, 4, 6, 5]"});
  refused(x, w, y, {"y is f32[2, 4, 6, 5]", "stride 2, 1", "[2, 2, 6, 5]"}, {.stride = {2, 1}});
  refused(x, make({5, 0, 2, 3}), y, {"w is f32[5, 0, 2, 3]", "taps"});
  refused(x, make({5, 7, 2, 3}), y, {"x is f32[2, 6, 7, 3]", "7 long in dimension 1", "fit into the padded image, 6"});
  refused(x, w, y, {"dilation 1, 9", "10 long in dimension 2", "padded image, 9"}, {.padding = {0, 1}, .dilation = {1, 9}});

  const PlacedTensor x1 = make({2, 7, 3}), w1 = make({5, 2, 3}), y1 = make({2, 6, 5});
  refused_1d(x, w1, y1, {"conv1d", "x is f32[2, 6, 7, 3]", "[N, L, C]"});
  refused_1d(x1, w, y1, {"w is f32[5, 3, 2, 3]", "[F, K, C]"});
  refused_1d(x1, w1, make({2, 7, 5}), {"y is f32[2, 7, 5]", "[2, 6, 5]"});
  refused_1d(x1, w1, y1, {"y is f32[2, 6, 5]", "stride 3", "[2, 2, 5]"}, {.stride = 3});
}

TEST_P(ConvolutionBadInput, Numbers) {
  const PlacedTensor x = make({2, 6, 7, 3}), w = make({5, 3, 2, 3}), y = make({2, 4, 6, 5});
  refused(x, w, y, {"stride is 1, 0", "1 to 65536"}, {.stride = {1, 0}});
  refused(x, w, y, {"stride is -1, 1"}, {.stride = {-1, 1}});
  refused(x, w, y, {"stride is 65537, 1", "65536"}, {.stride = {65537, 1}});
  refused(x, w, y, {"padding is 0, -1", "0 to"}, {.padding = {0, -1}});
  refused(x, w, y, {"padding is 1099511627776, 0"}, {.padding = {std::int64_t{1} << 40, 0}});
  refused(x, w, y, {"dilation is 0, 1", "1 to"}, {.dilation = {0, 1}});
  refused(x, w, y, {"padding 268435456, 0", "limited to 536870912"}, {.padding = {std::int64_t{1} << 28, 0}});
  refused(x, w, y, {"activation is swiglu", "allowed: any other"}, {.activation = Activation::swiglu});
  refused(x, w, y, {"config is 4", "below 4"}, {.config = 4});
  const PlacedTensor x1 = make({2, 7, 3}), w1 = make({5, 2, 3}), y1 = make({2, 6, 5});
  refused_1d(x1, w1, y1, {"conv1d", "stride is 0"}, {.stride = 0});
  refused_1d(x1, w1, y1, {"padding is -2"}, {.padding = -2});
  refused_1d(x1, w1, y1, {"dilation is -1"}, {.dilation = -1});
}

TEST_P(ConvolutionBadInput, DtypesAndBias) {
  const PlacedTensor x = make({2, 6, 7, 3}), w = make({5, 3, 2, 3}), y = make({2, 4, 6, 5});
  refused(make({2, 6, 7, 3}, DType::f16), w, y, {"w is f32[5, 3, 2, 3]", "f16"});
  refused(x, make({5, 3, 2, 3}, DType::bf16), y, {"w is bf16[5, 3, 2, 3]", "f32"});
  refused(x, w, make({2, 4, 6, 5}, DType::f16), {"y is f16[2, 4, 6, 5]", "f32"});
  const Tensor integers = Tensor::zeros({2, 6, 7, 3}, DType::i32, Stream::standard(device));
  refused(integers, w, y, {"x is i32[2, 6, 7, 3]", "f32, f16 and bf16"});
  const PlacedTensor half = make({5}, DType::f16);
  refused(x, w, y, {"bias is f16[5]", "f32"}, {.bias = &half.tensor()});
  for (const Shape& shape : {Shape{4}, Shape{1, 5}, Shape{0}}) {
    const PlacedTensor bias = make(shape);
    refused(x, w, y, {"bias is f32[", "[5]"}, {.bias = &bias.tensor()});
  }
  const PlacedTensor apart({5}, DType::f32, device, {.step = 2});
  refused(x, w, y, {"bias is f32[5]", "contiguous"}, {.bias = &apart.tensor()});
}

TEST_P(ConvolutionBadInput, Outputs) {
  const PlacedTensor x = make({1, 4, 4, 4}), w = make({4, 1, 1, 4}), y = make({1, 4, 4, 4});
  const Tensor folded = Tensor::borrow(y.tensor().data(), {1, 4, 4, 4}, DType::f32, device, {16, 4, 0, 1});
  expect_error<InvalidArgument>([&] { conv2d(x, w, folded); }, {"y is f32[1, 4, 4, 4]", "stride 0", "distinct"});
  refused(y, w, y, {"y is", "shares memory with x"});
  const PlacedTensor square = make({4, 1, 1, 4}), image = make({1, 1, 1, 4});
  expect_error<InvalidArgument>([&] { conv2d(make({4, 1, 1, 4}), square, square); }, {"y is", "shares memory with w"});
  EXPECT_TRUE(y.untouched());
}

TEST_P(ConvolutionBadInput, TooLarge) {
  // A few elements of memory stand for all: the sizes are refused before anything is read.
  const PlacedTensor memory = make({8});
  const auto repeated = [&](Shape shape) {
    const std::vector<std::int64_t> strides(shape.size(), 0);
    return Tensor::borrow(memory.tensor().data<float>(), std::move(shape), DType::f32, device, strides);
  };
  const auto output = [&](Shape shape) { return Tensor::borrow(memory.tensor().data<float>() + 4, std::move(shape), DType::f32, device); };
  constexpr std::int64_t kHuge = std::int64_t{1} << 31;
  expect_error<InvalidArgument>(
      [&] {
        conv2d(repeated({kHuge, 1, 1, 1}), repeated({1, 1, 1, 1}), output({kHuge, 1, 1, 1}));
      },
      {"x is f32[2147483648, 1, 1, 1]", "limited"});
  expect_error<InvalidArgument>(
      [&] {
        conv2d(repeated({1, kHuge, 1, 1}), repeated({1, 1, 1, 1}), output({1, kHuge, 1, 1}));
      },
      {"x is f32[1, 2147483648, 1, 1]", "limited"});
  constexpr std::int64_t kLarge = 1 << 16;
  expect_error<InvalidArgument>(
      [&] {
        conv2d(repeated({1, kLarge, kLarge, 1}), repeated({1, 1, 1, 1}), output({1, kLarge, kLarge, 1}));
      },
      {"y is f32[1, 65536, 65536, 1]", "limited"});
  expect_error<InvalidArgument>(
      [&] {
        conv2d(repeated({1, kLarge, kLarge, 1}), repeated({1, kLarge, kLarge, 1}), output({1, 1, 1, 1}));
      },
      {"w is f32[1, 65536, 65536, 1]", "taps", "limited"});
  EXPECT_TRUE(memory.untouched());
}

TEST(ConvolutionBadMemory, OperandsOnAnotherDevice) {
  // Only looked at: a tensor may say that it lies on a GPU without there being one.
  alignas(16) float values[32] = {};
  const PlacedTensor x({1, 2, 2, 2}, DType::f32, Device::cpu()), w({2, 1, 1, 2}, DType::f32, Device::cpu()),
      y({1, 2, 2, 2}, DType::f32, Device::cpu());
  const Tensor gpu = Tensor::borrow(values, {1, 2, 2, 2}, DType::f32, Device::cuda());
  expect_error<InvalidArgument>([&] { conv2d(gpu, w, y); }, {"x is f32[1, 2, 2, 2] on cuda", "cpu"});
  expect_error<InvalidArgument>([&] { conv2d(x, w, gpu); }, {"x is f32[1, 2, 2, 2] on cpu", "cuda"});
  const Tensor bias = Tensor::borrow(values, {2}, DType::f32, Device::cuda());
  expect_error<InvalidArgument>([&] { conv2d(x, w, y, {.bias = &bias}); }, {"bias is f32[2] on cuda", "cpu"});
  EXPECT_TRUE(y.untouched());
}

}  // namespace
}  // namespace tw::kernels::convolution
