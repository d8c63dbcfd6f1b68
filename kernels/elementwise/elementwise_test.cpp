// add, mul, silu, gelu, functions of a user, chains and casts against loops in double, on the CPU and, where there is one, on a GPU.

#include "tilewave/elementwise.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/elementwise/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/elementwise_functors.tile.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::elementwise {
namespace {

using namespace tw::test;

class Elementwise : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  std::int64_t pick(std::int64_t below) { return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(below)); }

  struct Operand {
    Shape shape;
    Placement place = {};
  };
  /// op(inputs, y) on random numbers, against f of their values.
  template <class Op, class F>
  void check(const std::vector<Operand>& inputs, const Operand& out, Op op, F f) {
    SCOPED_TRACE(tw::format("y [{}]", tw::join(out.shape, ", ")));
    std::vector<PlacedTensor> tensors;
    std::vector<Plain> plain;
    for (const Operand& input : inputs) {
      tensors.emplace_back(input.shape, dtype, device, input.place);
      plain.push_back({input.shape, tensors.back().fill_random(random)});
    }
    const PlacedTensor y(out.shape, dtype, device, out.place);
    op(tensors, y.tensor());
    const std::vector<double> exact = apply<double>(plain, out.shape, f);
    std::vector<double> naive = apply<float>(plain, out.shape, f);
    for (double& x : naive) x = round_to(dtype, static_cast<float>(x));
    const Arithmetic arithmetic = dtype == DType::f32 ? Arithmetic::f32 : arithmetic_of(dtype, device);
    EXPECT_TRUE(accurate({y.values(), exact, naive, arithmetic}));
    EXPECT_TRUE(y.gaps_intact());
  }
  void check_add(const Operand& a, const Operand& b, const Operand& y) {
    check(
        {a, b}, y, [](const auto& in, const Tensor& out) { add(in[0], in[1], out); }, [](const auto& x) { return x[0] + x[1]; });
  }
  /// What op makes of `values`.
  template <class Op>
  std::vector<double> of(const std::vector<float>& values, Op op) {
    PlacedTensor x({static_cast<std::int64_t>(values.size())}, dtype, device);
    x.fill(values);
    const PlacedTensor y(x.tensor().shape(), dtype, device);
    op(x, y);
    return y.values();
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Elementwise,
                         testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(Elementwise, AnyNumberOfElements) {
  // Around the columns and the elements of a tile, for 4- and 2-byte elements; primes.
  for (const std::int64_t n : {0, 1, 2, 7, 127, 128, 129, 255, 256, 257, 1021, 1024, 2047, 2048, 2049, 4095, 4096, 4097, 10007, 65537})
    check_add({{n}}, {{n}}, {{n}});
  check_add({{}}, {{}}, {{}});
  check_add({{7, 5, 3, 11}}, {{7, 5, 3, 11}}, {{7, 5, 3, 11}});
  check_add({{3, 0, 4}}, {{3, 1, 4}}, {{3, 0, 4}});
}

TEST_P(Elementwise, EveryFunction) {
  const Operand x{{31, 67}}, unaligned{{31, 67}, {.offset = 1}};
  check(
      {x, unaligned}, x, [](const auto& in, const Tensor& y) { mul(in[0], in[1], y); }, [](const auto& v) { return v[0] * v[1]; });
  check(
      {x}, x, [](const auto& in, const Tensor& y) { tw::silu(in[0], y); }, [](const auto& v) { return silu(v[0]); });
  check(
      {x}, x, [](const auto& in, const Tensor& y) { tw::gelu_erf(in[0], y); }, [](const auto& v) { return gelu_erf(v[0]); });
  check(
      {x}, x, [](const auto& in, const Tensor& y) { tw::gelu_tanh(in[0], y); }, [](const auto& v) { return gelu_tanh(v[0]); });
}

TEST_P(Elementwise, AnyStrides) {
  const std::vector<Placement> places = {
      {}, {.offset = 3}, {.offset = 8, .gap = 8}, {.offset = 1, .gap = 3}, {.step = 2}, {.gap = 1, .reversed = true}};
  for (int i = 0; i < random_cases(40); ++i) {
    Shape shape;
    std::vector<int> order;
    for (std::int64_t rank = 1 + pick(4), d = 0; d < rank; ++d) {
      shape.push_back(1 + pick(rank == 4 ? 9 : rank == 3 ? 23 : rank == 2 ? 150 : 5000));
      order.push_back(static_cast<int>(d));
    }
    const auto operand = [&] {
      Placement place = places[static_cast<std::size_t>(pick(static_cast<std::int64_t>(places.size())))];
      place.order = order;
      if (pick(2) == 0) std::shuffle(place.order.begin(), place.order.end(), random);
      return Operand{shape, place};
    };
    const Operand a = operand(), b = operand(), y = operand();
    check_add(a, b, y);
  }
  // All permuted alike: dense in another order of dimensions.
  const Placement permuted{.order = {2, 0, 1}};
  check_add({{33, 7, 65}, permuted}, {{33, 7, 65}, permuted}, {{33, 7, 65}, permuted});
}

TEST_P(Elementwise, Broadcasts) {
  for (const Shape& shape : {Shape{37, 517}, Shape{5, 37, 129}, Shape{3, 4, 5, 77}}) {
    for (unsigned mask = 0; mask < 1u << shape.size(); ++mask) {
      Shape small = shape;
      for (std::size_t d = 0; d < shape.size(); ++d)
        if ((mask >> d & 1) != 0) small[d] = 1;
      check_add({small}, {shape}, {shape});
    }
  }
  check_add({{300, 1}}, {{1, 70}}, {{300, 70}});
  check_add({{1}}, {{1}}, {{5001}});
}

TEST_P(Elementwise, InPlace) {
  for (const Placement& place : {Placement{}, Placement{.offset = 1, .gap = 3}, Placement{.order = {1, 0}}}) {
    PlacedTensor x({67, 129}, dtype, device, place);
    PlacedTensor bias({1, 129}, dtype, device);
    const std::vector<Plain> plain = {{{67, 129}, x.fill_random(random)}, {{1, 129}, bias.fill_random(random)}};
    add(x, bias, x);
    const auto sum = [](const auto& v) { return v[0] + v[1]; };
    std::vector<double> naive = apply<float>(plain, {67, 129}, sum);
    for (double& value : naive) value = round_to(dtype, static_cast<float>(value));
    EXPECT_TRUE(accurate(
        {x.values(), apply<double>(plain, {67, 129}, sum), naive, dtype == DType::f32 ? Arithmetic::f32 : arithmetic_of(dtype, device)}));
    EXPECT_TRUE(x.gaps_intact());
  }
}

TEST_P(Elementwise, FunctionsOfAUser) {
  const Operand x{{13, 301}};
  check(
      {x}, x, [](const auto& in, const Tensor& y) { tw::elementwise<Softcap>({in[0]}, y); },
      [](const auto& v) { return 30 * std::tanh(v[0] / 30); });
  check(
      {x, x, {{13, 1}}}, x,
      [](const auto& in, const Tensor& y) {
        tw::elementwise<Lerp>({in[0], in[1], in[2]}, y);
      },
      [](const auto& v) { return v[0] + (v[1] - v[0]) * v[2]; });
}

TEST_P(Elementwise, Chains) {
  const Operand x{{13, 301}};
  check(
      {x, x}, x,
      [](const auto& in, const Tensor& y) {
        tw::elementwise<Chain<Silu, Mul>>({in[0], in[1]}, y);
      },
      [](const auto& v) { return silu(v[0]) * v[1]; });
  // The result so far is always the first argument: (softcap((a + b) / 4) lerp(., c, d))
  check(
      {x, x, x, {{1, 301}}}, x,
      [](const auto& in, const Tensor& y) {
        tw::elementwise<Chain<Add, Scale<1, 4>, Softcap, Lerp>>({in[0], in[1], in[2], in[3]}, y);
      },
      [](const auto& v) {
        const auto capped = 30 * std::tanh((v[0] + v[1]) / 4 / 30);
        return capped + (v[2] - capped) * v[3];
      });
  static_assert(Chain<Chain<Silu, Mul>, Add>::arity == 3);
}

TEST_P(Elementwise, NanAndInfinity) {
  const auto silus = of({kNaN, kInf, -100.0f}, [](const Tensor& x, const Tensor& y) { tw::silu(x, y); });
  const auto gelus = of({kNaN, kInf, -100.0f}, [](const Tensor& x, const Tensor& y) { tw::gelu_erf(x, y); });
  const auto tanhs = of({kNaN, kInf, -100.0f}, [](const Tensor& x, const Tensor& y) { tw::gelu_tanh(x, y); });
  for (const auto& values : {silus, gelus, tanhs}) {
    EXPECT_TRUE(std::isnan(values[0]));
    EXPECT_EQ(values[1], kInf);
    EXPECT_NEAR(values[2], 0, 1e-30);
  }
  const auto sums = of({kInf, -kInf, kNaN, 1.0f}, [](const Tensor& x, const Tensor& y) { add(x, x, y); });
  EXPECT_EQ(sums[0], kInf);
  EXPECT_EQ(sums[1], -kInf);
  EXPECT_TRUE(std::isnan(sums[2]));
  EXPECT_EQ(sums[3], 2);
}

TEST_P(Elementwise, BadInput) {
  const PlacedTensor x({4, 6}, dtype, device), other({4, 5}, dtype, device), y({4, 6}, dtype, device);
  const DType wrong = dtype == DType::f16 ? DType::bf16 : DType::f16;
  const auto message = [&](auto call, std::initializer_list<std::string_view> parts) {
    expect_error<InvalidArgument>(call, parts);
    EXPECT_TRUE(y.untouched());
  };
  message([&] { add(x, other, y); }, {"add: b is", "[4, 5]", "[4, 6]"});
  message([&] { add(x, x.tensor().select(0, 0), y); }, {"add: b is", "[6]", "[4, 6]"});
  message([&] { tw::silu(PlacedTensor({4, 6}, wrong, device), y); }, {"silu: x is", std::string(name_of(wrong)), "like y"});
  message([&] { tw::silu(x, Tensor::borrow(y.tensor().data(), {4, 6}, dtype, device, {0, 1})); }, {"silu: y is", "stride 0"});
  message([&] { tw::silu(y.tensor().slice(1, 0, 1), y); }, {"silu: y is", "shares memory with x"});
  message([&] { tw::silu(Tensor::borrow(y.tensor().data(), {4, 6}, dtype, device, {1, 4}), y); }, {"silu: y is", "shares memory with x"});
  message([&] { tw::silu(x, Tensor::empty({4, 6}, DType::i32, Stream::standard(device))); }, {"silu: y is i32", "f32, f16 and bf16"});
  message([&] { tw::elementwise<Lerp>({x, x}, y); }, {"elementwise: 2 inputs are given", "has 3"});
  message(
      [&] {
        tw::silu(Tensor::empty({1, 1, 1, 4, 6}, dtype, Stream::standard(device)),
                 Tensor::empty({1, 1, 1, 4, 6}, dtype, Stream::standard(device)));
      },
      {"silu: y is", "at most 4 dimensions"});
}

TEST(ElementwisePlan, ManyElements) {
  // Never touched: only addresses are computed.
  char byte = 0;
  const auto tensor = [&](Shape shape, std::vector<std::int64_t> strides = {}) {
    return Tensor::borrow(&byte, std::move(shape), DType::u8, Device::cpu(), std::move(strides));
  };
  const auto plan = [&](const Tensor& x, const Tensor& y) {
    const tw::detail::ElementwiseOperand inputs[] = {{"x", x}};
    return tw::detail::plan_elementwise("op", inputs, y, {}, 16, 256);
  };
  const std::int64_t many = (std::int64_t{1} << 33) + 77;
  const auto flat = plan(tensor({many}), tensor({many}));
  EXPECT_EQ(flat.parts[0].back().shape(), (Shape{many / 256, 256}));
  EXPECT_EQ(flat.parts[1].back().shape(), (Shape{77}));
  EXPECT_EQ(static_cast<char*>(flat.parts[1].back().data()) - static_cast<char*>(flat.parts[0].back().data()), many - 77);
  EXPECT_EQ(flat.grid.m, many / 256 / 16 + 1);
  EXPECT_EQ(plan(tensor({3, 5, 7}, {35, 7, 1}), tensor({3, 5, 7})).parts[1].back().shape(), (Shape{105}));
  const std::int64_t wide = std::int64_t{1} << 31;
  expect_error<InvalidArgument>(
      [&] {
        plan(tensor({3, wide}, {wide + 1, 1}), tensor({3, wide}, {wide + 1, 1}));
      },
      {"op: y is", "limited to"});
  const std::int64_t square = 1 << 28;
  expect_error<InvalidArgument>(
      [&] {
        plan(tensor({square, square}, {square + 1, 1}), tensor({square, square}, {square + 1, 1}));
      },
      {"op: y is", "tiles", "limited to"});
}

constexpr DType kDTypes[] = {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2,
                             DType::i8,  DType::i32, DType::i64,  DType::u8,       DType::boolean};

class Cast : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  /// Random bits, and numbers of the sizes that a conversion finds hard.
  Tensor source(DType dtype, Shape shape) {
    Tensor bits = Tensor::empty(shape, dtype);
    const std::int64_t count = bits.numel();
    auto* const bytes = static_cast<unsigned char*>(bits.data());
    for (std::int64_t i = 0; i < count * static_cast<std::int64_t>(size_of(dtype)); ++i) bytes[i] = static_cast<unsigned char>(random());
    if (dtype == DType::boolean || size_of(dtype) == 1) return bits;
    // Half of them: up to a random number of bits, with halves.
    Tensor numbers = Tensor::empty(shape, DType::f32);
    std::uniform_int_distribution<std::int64_t> number(-4096, 4096);
    for (std::int64_t i = 0; i < count; ++i)
      numbers.data<float>()[i] = std::ldexp(static_cast<float>(number(random)), static_cast<int>(random() % 40) - 20);
    const Tensor converted = numbers.to(dtype);
    const std::size_t size = size_of(dtype);
    for (std::int64_t i = 0; i < count; i += 2)
      std::memcpy(bytes + i * static_cast<std::int64_t>(size), static_cast<char*>(converted.data()) + i * static_cast<std::int64_t>(size),
                  size);
    return bits;
  }
  /// `y`, row-major on the CPU, has the elements that Tensor::to gives.
  static testing::AssertionResult same(const Tensor& y, const Tensor& x, DType dtype) {
    const Tensor expected = x.to(dtype);
    const std::size_t size = size_of(dtype);
    const Tensor flat = y.reshape({y.numel()}), flat_expected = expected.reshape({y.numel()}),
                 flat_x = x.to(Device::cpu()).reshape({y.numel()});
    for (std::int64_t i = 0; i < y.numel(); ++i) {
      const auto offset = i * static_cast<std::int64_t>(size);
      if (std::memcmp(static_cast<char*>(y.data()) + offset, static_cast<char*>(expected.data()) + offset, size) == 0) continue;
      if (std::isnan(flat.at({i})) && std::isnan(flat_expected.at({i}))) continue;
      if (dtype == DType::boolean && flat.at({i}) == flat_expected.at({i})) continue;
      return testing::AssertionFailure() << "element " << i << ": " << flat_x.at({i}) << " became " << flat.at({i}) << " instead of "
                                         << flat_expected.at({i});
    }
    return testing::AssertionSuccess();
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Cast, testing::ValuesIn(kDevices), device_name);

TEST_P(Cast, EveryPairOfDTypes) {
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      if (device.is_cuda() && random() % 6 != 0) continue;  // each pair is a compilation there
      SCOPED_TRACE(tw::format("{} to {}", name_of(from), name_of(to)));
      const Tensor x = source(from, {3, 1511});
      const Tensor y = Tensor::poisoned({3, 1511}, to, Stream::standard(device));
      cast(device.is_cuda() ? x.to(device) : x, y);
      ASSERT_TRUE(same(y.to(Device::cpu()), x, to));
    }
  }
}

TEST_P(Cast, Views) {
  const std::pair<DType, DType> pairs[] = {
      {DType::f32, DType::bf16}, {DType::bf16, DType::f32}, {DType::i64, DType::i32}, {DType::f32, DType::i8}};
  for (const auto& [from, to] : pairs) {
    SCOPED_TRACE(tw::format("{} to {}", name_of(from), name_of(to)));
    const Tensor all = source(from, {70, 300});
    const Tensor on_device = device.is_cuda() ? all.to(device) : all;
    const Tensor y = Tensor::poisoned({257, 70}, to, Stream::standard(device));
    cast(on_device.slice(1, 3, 260).transpose(0, 1), y);
    EXPECT_TRUE(same(y.to(Device::cpu()), all.slice(1, 3, 260).transpose(0, 1), to));
    const Tensor row = Tensor::poisoned({70, 300}, to, Stream::standard(device));
    cast(on_device.slice(0, 5, 6), row);
    for (int i : {0, 41, 69}) EXPECT_TRUE(same(row.slice(0, i, i + 1).to(Device::cpu()), all.slice(0, 5, 6), to));
  }
}

TEST_P(Cast, InPlaceOnlyWithElementsOfOneSize) {
  const Tensor x = source(DType::f16, {1000});
  const Tensor memory = x.to(device);
  const auto view = [&](DType dtype, std::int64_t count) { return Tensor::borrow(memory.data(), {count}, dtype, device); };
  expect_error<InvalidArgument>([&] { cast(view(DType::f16, 500), view(DType::f32, 500)); },
                                {"cast: y is f32", "shares memory with x", "element size"});
  cast(view(DType::f16, 1000), view(DType::bf16, 1000));
  Stream::standard(device).synchronize();
  EXPECT_TRUE(same(Tensor::borrow(memory.to(Device::cpu()).data(), {1000}, DType::bf16, Device::cpu(), {}, nullptr).to(Device::cpu()), x,
                   DType::bf16));
}

}  // namespace
}  // namespace tw::kernels::elementwise
