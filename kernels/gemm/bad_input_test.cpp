// What gemm() refuses, and what it says.

#include "tilewave/gemm.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::test;

/// The GPU's configurations, of the target that tests run on.
std::vector<Config> gpu_configs() { return configs(generic_shared_bytes(Stream::standard(Device::cuda()))); }

/// What gemm() throws names the argument, what was given and what is allowed; and D is as it was.
class GemmBadInput : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  PlacedTensor make(Shape shape, DType dtype = DType::f32) const { return PlacedTensor(std::move(shape), dtype, device, {.offset = 4}); }
  void refused(const Tensor& a, const Tensor& b, const PlacedTensor& d, std::initializer_list<std::string_view> parts,
               const GemmOptions& options = {}) {
    expect_error<InvalidArgument>([&] { tw::gemm(a, b, d, options); }, parts);
    EXPECT_TRUE(d.untouched());
  }

  const Device device = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Ops, GemmBadInput, testing::ValuesIn(kDevices), device_name);

TEST_P(GemmBadInput, Shapes) {
  const PlacedTensor a = make({4, 6}), b = make({6, 8}), d = make({4, 8});
  refused(make({4, 7}), b, d, {"gemm", "a is f32[4, 7]", "b is f32[6, 8]", "K"});
  refused(a, make({5, 8}), d, {"b is f32[5, 8]", "K"});
  refused(a, b, make({4, 9}), {"d is f32[4, 9]", "[4, 8]"});
  refused(a, b, make({8, 4}), {"d is f32[8, 4]", "[4, 8]"});
  refused(a, b, make({1, 4, 8}), {"d is f32[1, 4, 8]", "[4, 8]"});
  refused(make({6}), b, d, {"a is f32[6]", "[M, K] or [batch, M, K]"});
  refused(a, make({6}), d, {"b is f32[6]", "[K, N] or [batch, K, N]"});
  refused(make({1, 1, 4, 6}), b, d, {"a is f32[1, 1, 4, 6]", "[M, K]"});
  refused(make({2, 4, 6}), make({3, 6, 8}), make({2, 4, 8}), {"a is f32[2, 4, 6]", "b is f32[3, 6, 8]", "batch"});
  refused(make({2, 4, 6}), b, d, {"d is f32[4, 8]", "[2, 4, 8]"});
  refused(a, b, make({0, 8}), {"d is f32[0, 8]", "[4, 8]"});
}

TEST_P(GemmBadInput, Dtypes) {
  const PlacedTensor a = make({4, 6}), b = make({6, 8}), d = make({4, 8});
  refused(make({4, 6}, DType::f16), b, d, {"b is f32[6, 8]", "f16"});
  refused(a, make({6, 8}, DType::bf16), d, {"b is bf16[6, 8]", "f32"});
  refused(a, b, make({4, 8}, DType::f16), {"d is f16[4, 8]", "f32"});
  const Tensor integers = Tensor::zeros({4, 6}, DType::i32, Stream::standard(device));
  refused(integers, b, d, {"a is i32[4, 6]", "f32, f16, bf16"});
  const PlacedTensor bias = make({8}, DType::f16), residual = make({4, 8}, DType::bf16);
  refused(a, b, d, {"bias is f16[8]", "f32"}, {.bias = &bias.tensor()});
  refused(a, b, d, {"residual is bf16[4, 8]", "f32"}, {.residual = &residual.tensor()});
}

TEST_P(GemmBadInput, Addends) {
  const PlacedTensor a = make({4, 6}), b = make({6, 8}), d = make({4, 8});
  for (const Shape& shape : {Shape{7}, Shape{9}, Shape{1, 8}, Shape{0}, Shape{}}) {
    const PlacedTensor bias = make(shape);
    refused(a, b, d, {"bias is f32[", "[8]"}, {.bias = &bias.tensor()});
  }
  const PlacedTensor apart({8}, DType::f32, device, {.step = 2});
  refused(a, b, d, {"bias is f32[8]", "contiguous"}, {.bias = &apart.tensor()});
  for (const Shape& shape : {Shape{4, 7}, Shape{8}, Shape{1, 4, 8}, Shape{8, 4}}) {
    const PlacedTensor residual = make(shape);
    refused(a, b, d, {"residual is f32[", "[4, 8]"}, {.residual = &residual.tensor()});
  }
}

TEST_P(GemmBadInput, OutputWhoseElementsAreNotDistinct) {
  const PlacedTensor a = make({4, 6}), b = make({6, 8}), d = make({4, 8});
  for (const std::vector<std::int64_t>& strides : {std::vector<std::int64_t>{0, 1}, {8, 0}, {0, 0}}) {
    const Tensor folded = Tensor::borrow(d.tensor().data(), {4, 8}, DType::f32, device, strides);
    expect_error<InvalidArgument>([&] { tw::gemm(a, b, folded); }, {"d is f32[4, 8]", "stride 0", "distinct"});
  }
  EXPECT_TRUE(d.untouched());
  // One element has nothing to be distinct from.
  const PlacedTensor one_a = make({1, 1}), one_b = make({1, 1}), one = make({1, 1});
  const Tensor folded = Tensor::borrow(one.tensor().data(), {1, 1}, DType::f32, device, {0, 0});
  // On a GPU with a configuration that other tests compile, too.
  const int config = device.is_cuda() ? static_cast<int>(gpu_configs().size()) - 1 : -1;
  EXPECT_NO_THROW(launched([&] { tw::gemm(one_a, one_b, folded, {.config = config}); }));
}

TEST_P(GemmBadInput, SwiGlu) {
  const PlacedTensor a = make({4, 6}), b = make({6, 8}), d = make({4, 4});
  const GemmOptions swiglu{.activation = Activation::swiglu};
  refused(a, b, make({4, 8}), {"d is f32[4, 8]", "[4, 4]"}, swiglu);
  refused(a, make({6, 7}), d, {"b is f32[6, 7]", "even"}, swiglu);
  refused(a, b, d, {"swiglu", "beta", "residual"}, {.beta = 1, .activation = Activation::swiglu});
  refused(a, b, d, {"splits is -2"}, {.activation = Activation::swiglu, .splits = -2});
}

TEST_P(GemmBadInput, OutputThatIsAnOperand) {
  const PlacedTensor a = make({6, 6}), b = make({6, 6}), d = make({6, 6});
  refused(d, b, d, {"d is", "shares memory with a"});
  refused(a, d, d, {"d is", "shares memory with b"});
}

TEST_P(GemmBadInput, Numbers) {
  const PlacedTensor a = make({4, 6}), b = make({6, 8}), d = make({4, 8});
  refused(a, b, d, {"alpha is inf", "finite"}, {.alpha = std::numeric_limits<float>::infinity()});
  refused(a, b, d, {"beta is nan", "finite"}, {.beta = std::numeric_limits<float>::quiet_NaN()});
  expect_error<InvalidArgument>([&] { matmul(a, b, {.beta = 1}); }, {"matmul", "beta is 1", "0"});
  expect_error<InvalidArgument>([&] { matmul(make({6}), b); }, {"matmul", "a is f32[6]", "two dimensions"});
}

TEST_P(GemmBadInput, TooLarge) {
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
        tw::gemm(repeated({kHuge, 1}), repeated({1, 1}), output({kHuge, 1}));
      },
      {"a is f32[2147483648, 1]", "limited"});
  expect_error<InvalidArgument>(
      [&] {
        tw::gemm(repeated({1, 1}), repeated({1, kHuge}), output({1, kHuge}));
      },
      {"b is f32[1, 2147483648]", "limited"});
  expect_error<InvalidArgument>(
      [&] {
        tw::gemm(repeated({1, kHuge}), repeated({kHuge, 1}), output({1, 1}));
      },
      {"a is f32[1, 2147483648]", "limited"});
  expect_error<InvalidArgument>(
      [&] {
        tw::gemm(repeated({kHuge, 1, 1}), repeated({1, 1}), output({kHuge, 1, 1}));
      },
      {"a is f32[2147483648, 1, 1]", "limited"});
  // Every extent would do, but there are more tiles than can be counted.
  constexpr std::int64_t kLarge = std::int64_t{1} << 30;
  expect_error<InvalidArgument>(
      [&] {
        tw::gemm(repeated({kLarge, 1}), repeated({1, kLarge}), output({kLarge, kLarge}));
      },
      {"gemm", "b is f32[1, 1073741824]", "281474976710656 tiles", "tiles"});
  EXPECT_TRUE(memory.untouched());
}

TEST(GemmBadMemory, NullAndUnalignedPointersAreNoTensors) {
  float values[8] = {};
  expect_error<InvalidArgument>([&] { Tensor::borrow(nullptr, {2, 4}, DType::f32, Device::cpu()); }, {"data is null", "2, 4"});
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    char* const odd = reinterpret_cast<char*>(values) + 1;
    expect_error<InvalidArgument>([&] { Tensor::borrow(odd, {1, 2}, dtype, Device::cpu()); }, {"data is 0x", "multiple of"});
  }
  expect_error<InvalidArgument>(
      [&] {
        Tensor::borrow(values, {std::int64_t{1} << 40, std::int64_t{1} << 40}, DType::f32, Device::cpu());
      },
      {"shape is", "2^62"});
  expect_error<InvalidArgument>(
      [&] {
        Tensor::borrow(values, {2, 2}, DType::f32, Device::cpu(), {std::numeric_limits<std::int64_t>::max(), 2});
      },
      {"strides are", "2^62"});
}

TEST(GemmBadMemory, OperandsOnAnotherDevice) {
  // Only looked at: a tensor may say that it lies on a GPU without there being one.
  alignas(16) float values[32] = {};
  const PlacedTensor host({4, 4}, DType::f32, Device::cpu()), d({4, 4}, DType::f32, Device::cpu());
  const Tensor gpu = Tensor::borrow(values, {4, 4}, DType::f32, Device::cuda());
  expect_error<InvalidArgument>([&] { tw::gemm(gpu, host, d); }, {"a is f32[4, 4] on cuda", "cpu"});
  expect_error<InvalidArgument>([&] { tw::gemm(host, gpu, d); }, {"b is f32[4, 4] on cuda", "cpu"});
  expect_error<InvalidArgument>([&] { tw::gemm(host, host, gpu); }, {"a is f32[4, 4] on cpu", "cuda"});
  const Tensor bias = Tensor::borrow(values, {4}, DType::f32, Device::cuda());
  expect_error<InvalidArgument>([&] { tw::gemm(host, host, d, {.bias = &bias}); }, {"bias is f32[4] on cuda", "cpu"});
  expect_error<InvalidArgument>([&] { tw::gemm(host, host, d, {.residual = &gpu}); }, {"residual is f32[4, 4] on cuda", "cpu"});
  EXPECT_TRUE(d.untouched());
}

TEST(GemmBadMemory, StreamOnCuda_cuda) {
  skip_without_cuda();
  const PlacedTensor a({4, 4}, DType::f32, Device::cpu()), d({4, 4}, DType::f32, Device::cpu());
  const PlacedTensor b({4, 4}, DType::f32, Device::cpu());
  expect_error<InvalidArgument>([&] { tw::gemm(a, b, d, {.stream = Stream::standard(Device::cuda())}); }, {"stream is on cuda", "cpu"});
  EXPECT_TRUE(d.untouched());
}

TEST(GemmBadConfig, IsRefused_cuda) {
  skip_without_cuda();
  const PlacedTensor a({4, 4}, DType::bf16, Device::cuda()), b({4, 4}, DType::bf16, Device::cuda()), d({4, 4}, DType::bf16, Device::cuda());
  const std::vector<Config> all = gpu_configs();
  const int count = static_cast<int>(all.size());
  const std::string of_count = tw::format("config is {}; it must be below {}", count, count);
  expect_error<InvalidArgument>([&] { tw::gemm(a, b, d, {.config = count}); }, {of_count});
  for (int i = 0; i < count; ++i) {
    if (all[static_cast<std::size_t>(i)].bn <= 128) continue;
    expect_error<InvalidArgument>([&] { tw::gemm(a, b, d, {.beta = 0.5f, .config = i}); }, {tw::format("config is {};", i), "128 columns"});
  }
  EXPECT_TRUE(d.untouched());
}

}  // namespace
}  // namespace tw::kernels::gemm
