// swiglu() and swiglu_interleaved() against loops in double, on the CPU and, where there is one, on a GPU; their bad inputs.

#include "tilewave/swiglu.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/swiglu/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::swiglu {
namespace {

using namespace tw::test;

class Swiglu : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  void expect(const PlacedTensor& y, const std::vector<float>& gate, const std::vector<float>& up) {
    const DType out = y.tensor().dtype();
    std::vector<double> naive;
    for (const float v : plain<float>(gate, up)) naive.push_back(round_to(out, v));
    EXPECT_TRUE(accurate({y.values(), plain<double>(gate, up), naive, arithmetic_of(out, Device::cpu())}));
    EXPECT_TRUE(y.gaps_intact());
  }
  void check(Shape shape, DType out, Placement gate_place = {}, Placement up_place = {}, Placement y_place = {}) {
    SCOPED_TRACE(tw::format("[{}] to {}", tw::join(shape, ", "), name_of(out)));
    PlacedTensor gate(shape, dtype, device, gate_place), up(shape, dtype, device, up_place), y(shape, out, device, y_place);
    const std::vector<float> g = gate.fill_random(random, 4), u = up.fill_random(random);
    tw::swiglu(gate, up, y);
    expect(y, g, u);
  }
  void check_interleaved(Shape shape, DType out, Placement x_place = {}, Placement y_place = {}) {
    SCOPED_TRACE(tw::format("interleaved [{}] to {}", tw::join(shape, ", "), name_of(out)));
    Shape wide = shape;
    wide.back() *= 2;
    PlacedTensor x(wide, dtype, device, x_place), y(shape, out, device, y_place);
    const std::vector<float> values = x.fill_random(random, 2);
    std::vector<float> g, u;
    for (std::size_t i = 0; i < values.size(); i += 2) {
      g.push_back(values[i]);
      u.push_back(values[i + 1]);
    }
    tw::swiglu_interleaved(x, y);
    expect(y, g, u);
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Swiglu, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(Swiglu, AnyShape) {
  for (const std::int64_t cols : {0, 1, 2, 3, 31, 64, 127, 255, 256, 257, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 6144}) {
    check({3, cols}, dtype);
    check_interleaved({3, cols}, dtype);
  }
  for (const std::int64_t rows : {0, 1, 2, 7, 8, 9, 31, 33}) check({rows, 100}, dtype);
  check({2, 3, 4, 70}, dtype);
  check_interleaved({2, 3, 4, 70}, dtype);
  check({130}, dtype);
  check_interleaved({130}, dtype);
}

TEST_P(Swiglu, AnyStrides) {
  check({2, 3, 5, 70}, dtype, {.offset = 1, .gap = 3}, {.gap = 2}, {.offset = 5, .gap = 1});
  check({2, 3, 4, 256}, dtype, {.offset = 8, .gap = 8, .align = 8}, {.order = {1, 0, 2, 3}}, {.offset = 16, .gap = 16, .align = 8});
  check({5, 300}, dtype, {.step = 2}, {.gap = 1, .reversed = true}, {.order = {1, 0}});
  check_interleaved({2, 3, 5, 70}, dtype, {.offset = 1, .gap = 3}, {.offset = 5, .gap = 1});
  check_interleaved({2, 3, 5, 70}, dtype, {.offset = 2, .gap = 1}, {});
  check_interleaved({2, 3, 5, 70}, dtype, {.offset = 2, .gap = 2, .align = 2}, {.step = 2});
  check_interleaved({5, 300}, dtype, {.step = 2}, {});
  check_interleaved({5, 300}, dtype, {.gap = 2, .reversed = true}, {});
}

TEST_P(Swiglu, HalvesOfOneTensor) {
  for (const std::int64_t cols : {33, 2048}) {
    PlacedTensor x({5, 2 * cols}, dtype, device), y({5, cols}, dtype, device);
    const std::vector<float> values = x.fill_random(random);
    std::vector<float> g, u;
    for (std::size_t i = 0; i < values.size(); ++i) (static_cast<std::int64_t>(i) % (2 * cols) < cols ? g : u).push_back(values[i]);
    tw::swiglu(x.tensor().slice(-1, 0, cols), x.tensor().slice(-1, cols, 2 * cols), y);
    expect(y, g, u);
  }
}

TEST_P(Swiglu, OtherDtypeOutAndInPlace) {
  for (const DType out : {DType::f32, DType::f16, DType::bf16}) {
    check({3, 300}, out);
    check_interleaved({3, 300}, out);
  }
  for (const bool into_gate : {true, false}) {
    PlacedTensor gate({4, 3000}, dtype, device), up({4, 3000}, dtype, device);
    const std::vector<float> g = gate.fill_random(random), u = up.fill_random(random);
    tw::swiglu(gate, up, into_gate ? gate : up);
    expect(into_gate ? gate : up, g, u);
  }
}

TEST_P(Swiglu, FarFromZeroAndNotFinite) {
  constexpr float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> g{200, -200, inf, 1, nan, 1, 0, 30000, -30000}, u{2, 2, 1, inf, 1, nan, 5, 1, 1};
  const std::vector<double> expected{400, 0, inf, inf, nan, nan, 0, 30000, 0};
  const auto cols = static_cast<std::int64_t>(g.size());
  PlacedTensor gate({cols}, dtype, device), up({cols}, dtype, device), y({cols}, DType::f32, device);
  gate.fill(g);
  up.fill(u);
  tw::swiglu(gate, up, y);
  const std::vector<double> values = y.values();
  for (std::size_t i = 0; i < g.size(); ++i) {
    if (std::isnan(expected[i]))
      EXPECT_TRUE(std::isnan(values[i])) << i;
    else if (std::isinf(expected[i]))
      EXPECT_EQ(values[i], expected[i]) << i;
    else
      EXPECT_NEAR(values[i], expected[i], std::abs(expected[i]) / 100 + 1e-30) << i;
  }
}

class SwigluArguments : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(GetParam()); }
  Tensor tensor(Shape shape, DType dtype = DType::bf16) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(GetParam())); }
};
INSTANTIATE_TEST_SUITE_P(Ops, SwigluArguments, testing::ValuesIn(kDevices), device_name);

TEST_P(SwigluArguments, AreRefusedByName) {
  const auto refused = [&](const Tensor& gate, const Tensor& up, const Tensor& y, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { tw::swiglu(gate, up, y); }, parts);
  };
  const Tensor x = tensor({3, 4}), y = tensor({3, 4});
  refused(tensor({3, 4}, DType::i8), x, y, {"swiglu: gate is i8[3, 4]"});
  refused(x, tensor({3, 4}, DType::f16), y, {"up is f16[3, 4]", "must be bf16"});
  refused(x, tensor({3, 5}), y, {"up is bf16[3, 5]", "gate's shape"});
  refused(x, x, tensor({4, 3}), {"y is bf16[4, 3]", "gate's shape"});
  refused(x, x, tensor({3, 4}, DType::i32), {"y is i32[3, 4]"});
  refused(x, x, Tensor::borrow(y.data(), {3, 4}, DType::bf16, y.device(), {4, 0}), {"stride 0 in dimension 1"});
  refused(x, y, Tensor::borrow(x.data(), {3, 4}, DType::bf16, x.device(), {1, 3}), {"shares memory with gate"});
  refused(tensor({1, 1, 1, 3, 4}), tensor({1, 1, 1, 3, 4}), tensor({1, 1, 1, 3, 4}), {"1 to 4 dimensions"});
  const auto interleaved_refused = [&](const Tensor& from, const Tensor& to, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>([&] { tw::swiglu_interleaved(from, to); }, parts);
  };
  interleaved_refused(tensor({3, 5}), y, {"swiglu_interleaved: x is bf16[3, 5]", "even"});
  interleaved_refused(tensor({3, 6}), y, {"y is bf16[3, 4]", "[3, 3]"});
  interleaved_refused(x, Tensor::borrow(x.data(), {3, 2}, DType::bf16, x.device()), {"shares memory with x"});
}

}  // namespace
}  // namespace tw::kernels::swiglu
