// transpose() against views of the same numbers, on the CPU and, where there is one, on a GPU. It moves bits, so results are equal.

#include "tilewave/transpose.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/transpose/reference.hpp"
#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::transpose {
namespace {

using namespace tw::test;

class Transpose : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  std::int64_t pick(std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); }

  /// Random bytes, every bit pattern of an element.
  Tensor random_bits(Shape shape, DType dtype) {
    Tensor t = Tensor::empty(std::move(shape), dtype);
    auto* const bytes = static_cast<unsigned char*>(t.data());
    for (std::int64_t i = 0; i < t.numel() * static_cast<std::int64_t>(size_of(dtype)); ++i)
      bytes[i] = static_cast<unsigned char>(random());
    return t;
  }
  void check_dense(const Shape& shape, DType dtype) {
    SCOPED_TRACE(tw::format("{} [{}]", name_of(dtype), tw::join(shape, ", ")));
    const Tensor x = random_bits(shape, dtype);
    Shape turned = shape;
    std::swap(turned[turned.size() - 1], turned[turned.size() - 2]);
    const Tensor y = Tensor::poisoned(turned, dtype, Stream::standard(device));
    tw::transpose(device.is_cuda() ? x.to(device) : x, y);
    const Tensor got = y.to(Device::cpu()), expected = reference(x);
    const std::size_t bytes = static_cast<std::size_t>(x.numel()) * size_of(dtype);
    EXPECT_TRUE(bytes == 0 || std::memcmp(got.data(), expected.data(), bytes) == 0);
  }
  void check_placed(const Shape& shape, DType dtype, const Placement& from, const Placement& to) {
    PlacedTensor x(shape, dtype, device, from);
    Shape turned = shape;
    std::swap(turned[turned.size() - 1], turned[turned.size() - 2]);
    const PlacedTensor y(turned, dtype, device, to);
    const std::vector<float> values = x.fill_random(random);
    tw::transpose(x, y);
    const Tensor expected = reference(Tensor::from<float>(values, shape));
    const std::vector<double> got = y.values();
    for (std::size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], expected.data<float>()[i]) << "element " << i;
    EXPECT_TRUE(y.gaps_intact());
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Transpose, testing::ValuesIn(kDevices), device_name);

TEST_P(Transpose, AnyShape) {
  constexpr DType dtypes[] = {DType::u8,   DType::boolean, DType::fp8_e4m3, DType::i8, DType::f16,
                              DType::bf16, DType::f32,     DType::i32,      DType::i64};
  for (const DType dtype : dtypes) {
    // Around the sides of tiles: 128, 64 and 32 elements.
    for (const std::int64_t n : {1, 31, 32, 33, 63, 64, 65, 127, 128, 129}) {
      check_dense({n, 67}, dtype);
      check_dense({67, n}, dtype);
    }
    check_dense({0, 5}, dtype);
    check_dense({5, 0}, dtype);
    check_dense({1, 1}, dtype);
    check_dense({128, 256}, dtype);
    check_dense({3, 65, 130}, dtype);
    check_dense({0, 65, 130}, dtype);
  }
  for (int i = 0; i < random_cases(30); ++i) check_dense({1 + pick(5), 1 + pick(300), 1 + pick(300)}, dtypes[pick(std::size(dtypes))]);
}

TEST_P(Transpose, AnyStrides) {
  const std::vector<Placement> places = {{},
                                         {.offset = 3},
                                         {.offset = 8, .gap = 8},
                                         {.offset = 1, .gap = 3},
                                         {.step = 2},
                                         {.gap = 1, .reversed = true},
                                         {.order = {0, 2, 1}},
                                         {.order = {1, 0, 2}}};
  for (const Placement& from : places)
    for (const Placement& to : places) check_placed({2, 67, 130}, pick(2) == 0 ? DType::bf16 : DType::f32, from, to);
}

TEST_P(Transpose, BadInput) {
  const PlacedTensor x({4, 6}, DType::f32, device), y({6, 4}, DType::f32, device);
  const auto message = [&](auto call, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>(call, parts);
    EXPECT_TRUE(y.untouched());
  };
  message([&] { tw::transpose(x, PlacedTensor({4, 6}, DType::f32, device)); }, {"transpose: y is f32[4, 6]", "[6, 4]"});
  message([&] { tw::transpose(x, PlacedTensor({6, 4}, DType::f16, device)); }, {"transpose: y is f16", "f32"});
  message([&] { tw::transpose(x.tensor().select(0, 0), y); }, {"transpose: x is f32[6]", "[M, N]"});
  message([&] { tw::transpose(y.tensor().transpose(0, 1), y); }, {"transpose: y is", "shares memory with x"});
  message(
      [&] {
        tw::transpose(x, Tensor::borrow(y.tensor().data(), {6, 4}, DType::f32, device, {0, 1}));
      },
      {"transpose: y is", "stride 0"});
  const std::int64_t many = std::int64_t{1} << 31;
  message(
      [&] {
        tw::transpose(Tensor::borrow(x.tensor().data(), {many, 1}, DType::f32, device, {0, 1}),
                      Tensor::borrow(y.tensor().data(), {1, many}, DType::f32, device));
      },
      {"transpose: x is", "limited to"});
}

}  // namespace
}  // namespace tw::kernels::transpose
