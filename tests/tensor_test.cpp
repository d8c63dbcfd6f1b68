#include "tilewave/tensor.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "tests/expect_error.hpp"
#include "tests/support.hpp"

namespace tw::test {
namespace {

constexpr DType kAll[] = {DType::f32, DType::f16, DType::bf16, DType::fp8_e4m3, DType::fp8_e5m2,
                          DType::i8,  DType::i32, DType::i64,  DType::u8,       DType::boolean};

/// 0, 1, 2, ... as i32.
Tensor counting(Shape shape) {
  std::int64_t count = 1;
  for (std::int64_t extent : shape) count *= extent;
  std::vector<std::int32_t> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return Tensor::from<std::int32_t>(values, std::move(shape));
}

template <class T>
Tensor vector_of(std::vector<T> values) {
  const auto count = static_cast<std::int64_t>(values.size());
  return Tensor::from<T>(values, {count});
}

template <class F>
std::string message_of(F f) {
  try {
    f();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  ADD_FAILURE() << "no InvalidArgument";
  return "";
}

TEST(DTypes, NamesAndSizes) {
  for (DType dtype : kAll) EXPECT_EQ(parse_dtype(name_of(dtype)), dtype);
  EXPECT_EQ(size_of(DType::f32), 4u);
  EXPECT_EQ(size_of(DType::bf16), 2u);
  EXPECT_EQ(size_of(DType::fp8_e5m2), 1u);
  EXPECT_EQ(size_of(DType::i64), 8u);
  EXPECT_EQ(size_of(DType::boolean), 1u);
  EXPECT_EQ(name_of(DType::boolean), "bool");
  EXPECT_NE(message_of([] { parse_dtype("float"); }).find("\"float\""), std::string::npos);
  EXPECT_THROW(parse_dtype(""), InvalidArgument);
  EXPECT_THROW(size_of(static_cast<DType>(99)), InvalidArgument);
}

class Tensors : public testing::TestWithParam<Device> {
 protected:
  Stream stream() const { return Stream::standard(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(, Tensors, testing::ValuesIn(kDevices), device_name);

TEST_P(Tensors, HaveShapeStridesAndMemory) {
  skip_unless_present(GetParam());
  const Tensor t = Tensor::empty({2, 3, 5}, DType::bf16, stream());
  EXPECT_EQ(t.rank(), 3);
  EXPECT_EQ(t.shape(), (Shape{2, 3, 5}));
  EXPECT_EQ(t.strides(), (std::vector<std::int64_t>{15, 5, 1}));
  EXPECT_EQ(t.numel(), 30);
  EXPECT_EQ(t.device(), GetParam());
  EXPECT_EQ(t.dtype(), DType::bf16);
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_NE(t.data(), nullptr);
  EXPECT_EQ(t.data<bf16>(), t.data());
  EXPECT_THROW(t.data<float>(), InvalidArgument);
  EXPECT_EQ(t.describe(), "bf16[2, 3, 5] on " + GetParam().name());
}

TEST_P(Tensors, ZerosAndPoison) {
  skip_unless_present(GetParam());
  for (DType dtype : kAll) {
    const Tensor zeros = Tensor::zeros({3, 7}, dtype, stream()).to(Device::cpu());
    const Tensor poison = Tensor::poisoned({3, 7}, dtype, stream()).to(Device::cpu());
    for (std::int64_t i = 0; i < 3; ++i) {
      for (std::int64_t j = 0; j < 7; ++j) {
        EXPECT_EQ(zeros.at({i, j}), 0) << name_of(dtype);
        switch (dtype) {
          case DType::i8:
          case DType::i32:
          case DType::i64:
            EXPECT_EQ(poison.at({i, j}), -1);
            break;
          case DType::u8:
            EXPECT_EQ(poison.at({i, j}), 255);
            break;
          case DType::boolean:
            EXPECT_EQ(poison.at({i, j}), 1);
            break;
          default:
            EXPECT_TRUE(std::isnan(poison.at({i, j}))) << name_of(dtype);
        }
      }
    }
  }
}

TEST_P(Tensors, GoThereAndBack) {
  skip_unless_present(GetParam());
  const Tensor source = counting({4, 6});
  const Tensor there = source.to(GetParam());
  EXPECT_EQ(there.device(), GetParam());
  EXPECT_NE(there.data(), source.data());
  const Tensor back = there.to(Device::cpu());
  for (std::int64_t i = 0; i < 4; ++i) {
    for (std::int64_t j = 0; j < 6; ++j) EXPECT_EQ(back.at({i, j}), i * 6 + j);
  }
}

TEST_P(Tensors, ViewsGoThereAndBack) {
  skip_unless_present(GetParam());
  const Tensor source = counting({5, 7, 3});
  const Tensor there = source.to(GetParam());
  // The same view before and after the way: the result is row-major with the view's elements.
  auto view = [](const Tensor& t) { return t.transpose(0, 2).slice(1, 2, 6).select(0, 1); };
  const Tensor expected = view(source);
  for (const Tensor& result :
       {view(there).to(Device::cpu()), view(source).to(GetParam()).to(Device::cpu()), view(there).to(GetParam()).to(Device::cpu())}) {
    EXPECT_TRUE(result.is_contiguous());
    ASSERT_EQ(result.shape(), (Shape{4, 5}));
    for (std::int64_t i = 0; i < 4; ++i) {
      for (std::int64_t j = 0; j < 5; ++j) EXPECT_EQ(result.at({i, j}), expected.at({i, j}));
    }
  }
}

TEST_P(Tensors, CopyFrom) {
  skip_unless_present(GetParam());
  const Tensor source = counting({6, 2});
  const Tensor target = Tensor::poisoned({6, 2}, DType::i32, stream());
  stream().synchronize();
  target.copy_from(source);
  const Tensor back = Tensor::poisoned({6, 2}, DType::i32);
  back.copy_from(target);
  EXPECT_EQ(back.at({5, 1}), 11);
  EXPECT_EQ(back.at({0, 0}), 0);
  EXPECT_THROW(target.copy_from(counting({2, 6})), InvalidArgument);
  EXPECT_THROW(target.copy_from(Tensor::zeros({6, 2}, DType::f32)), InvalidArgument);
}

TEST_P(Tensors, CopiesInTheOrderOfAStream) {
  skip_unless_present(GetParam());
  const Stream own(GetParam());
  std::vector<std::int32_t> values(1000);
  const Tensor device = Tensor::empty({1000}, DType::i32, own), again = Tensor::empty({1000}, DType::i32, own);
  const Tensor back = Tensor::poisoned({1000}, DType::i32);
  for (std::int32_t round = 1; round <= 100; ++round) {
    std::fill(values.begin(), values.end(), round);
    device.copy_from(Tensor::from(std::span<const std::int32_t>(values), {1000}), own);
    std::fill(values.begin(), values.end(), -1);
    again.copy_from(device, own);
    device.copy_from(Tensor::from(std::span<const std::int32_t>(values), {1000}), own);
    back.copy_from(again, own);
    own.synchronize();
    for (std::int64_t i = 0; i < 1000; ++i) ASSERT_EQ(back.at({i}), round);
  }
  const Tensor columns = back.reshape({10, 100}).transpose(0, 1);
  if (GetParam().is_cuda()) {
    expect_error<InvalidArgument>([&] { Tensor::empty({100, 10}, DType::i32, own).copy_from(columns, own); }, {"both row-major"});
    expect_error<InvalidArgument>([&] { back.copy_from(device, Stream(Device::cpu())); }, {"the stream's device"});
  }
  expect_error<InvalidArgument>([&] { device.copy_from(back.slice(0, 0, 10), own); }, {"copy_from: source is i32[10]"});
}

#if !defined(__SANITIZE_ADDRESS__)  // under which nothing is kept
std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t size = 0, pages = 0;
  file >> size >> pages;
  return pages * 4096;
}

TEST(HostMemory, CanBeReleasedAtAnyTime) {
  { const Tensor large = Tensor::zeros({64 << 20}, DType::i8); }
  const std::int64_t before = resident_bytes();
  release_host_memory();
  EXPECT_LE(resident_bytes(), before - (60 << 20));
  EXPECT_EQ(Tensor::zeros({100}, DType::i8).at({99}), 0);
}
#endif

TEST_P(Tensors, EmptyOnes) {
  skip_unless_present(GetParam());
  const Tensor t = Tensor::zeros({3, 0, 2}, DType::f32, stream());
  EXPECT_EQ(t.numel(), 0);
  EXPECT_EQ(t.data(), nullptr);
  EXPECT_TRUE(t.is_contiguous());
  EXPECT_EQ(t.to(Device::cpu()).shape(), (Shape{3, 0, 2}));
  EXPECT_NO_THROW(t.copy_from(Tensor::zeros({3, 0, 2}, DType::f32)));
  EXPECT_EQ(t.slice(0, 1, 3).shape(), (Shape{2, 0, 2}));
  EXPECT_EQ(t.select(2, 1).shape(), (Shape{3, 0}));
  // Extents beside a zero may be huge: there is nothing to address.
  EXPECT_EQ(Tensor::empty({std::int64_t{1} << 60, std::int64_t{1} << 60, 0}, DType::f32, stream()).numel(), 0);
}

TEST(Tensor, DefaultHasNoElements) {
  const Tensor t;
  EXPECT_EQ(t.numel(), 0);
  EXPECT_EQ(t.data(), nullptr);
}

TEST(Tensor, ScalarsHaveRankZero) {
  const Tensor t = vector_of<float>({2.5f}).reshape({});
  EXPECT_EQ(t.rank(), 0);
  EXPECT_EQ(t.numel(), 1);
  EXPECT_EQ(t.at({}), 2.5);
  EXPECT_EQ(t.to(Device::cpu()).at({}), 2.5);
}

TEST(Tensor, BadShapes) {
  const std::int64_t huge = std::int64_t{1} << 40;
  EXPECT_NE(message_of([] { Tensor::empty({2, -1}, DType::f32); }).find("[2, -1]"), std::string::npos);
  EXPECT_THROW(Tensor::empty({huge, huge}, DType::f32), InvalidArgument);
  EXPECT_THROW(Tensor::empty({std::int64_t{1} << 62, 4}, DType::u8), InvalidArgument);
  EXPECT_THROW(Tensor::empty({std::numeric_limits<std::int64_t>::max()}, DType::i64), InvalidArgument);
  EXPECT_THROW(Tensor::empty({std::numeric_limits<std::int64_t>::min()}, DType::u8), InvalidArgument);
  EXPECT_THROW(Tensor::empty({std::int64_t{1} << 60}, DType::u8), OutOfMemory);
  EXPECT_THROW(vector_of<float>({1, 2, 3}).reshape({2, 2}), InvalidArgument);
  const std::vector<float> three = {1, 2, 3};
  EXPECT_THROW(Tensor::from<float>(three, {4}), InvalidArgument);
}

TEST(Tensor, BorrowChecksWhatItIsGiven) {
  alignas(16) float memory[12] = {};
  EXPECT_EQ(Tensor::borrow(memory, {3, 4}, DType::f32, Device::cpu()).strides(), (std::vector<std::int64_t>{4, 1}));
  EXPECT_THROW(Tensor::borrow(nullptr, {3, 4}, DType::f32, Device::cpu()), InvalidArgument);
  EXPECT_THROW(Tensor::borrow(reinterpret_cast<char*>(memory) + 2, {2}, DType::f32, Device::cpu()), InvalidArgument);
  EXPECT_NO_THROW(Tensor::borrow(reinterpret_cast<char*>(memory) + 2, {2}, DType::bf16, Device::cpu()));
  EXPECT_THROW(Tensor::borrow(memory, {3, 4}, DType::f32, Device::cpu(), {1}), InvalidArgument);
  EXPECT_THROW(Tensor::borrow(memory, {3, 4}, DType::f32, Device::cpu(), {std::int64_t{1} << 62, 1}), InvalidArgument);
  EXPECT_THROW(Tensor::borrow(memory, {3, 4}, DType::f32, Device::cpu(), {-(std::int64_t{1} << 61), 1}), InvalidArgument);
  EXPECT_NO_THROW(Tensor::borrow(nullptr, {0, 4}, DType::f32, Device::cpu()));
}

TEST(Tensor, BorrowKeepsTheOwnerAlive) {
  auto owner = std::make_shared<std::vector<float>>(std::vector<float>{1, 2, 3, 4});
  const std::weak_ptr<std::vector<float>> watch = owner;
  {
    Tensor view;
    {
      const Tensor t = Tensor::borrow(owner->data(), {2, 2}, DType::f32, Device::cpu(), {}, owner);
      view = t.select(0, 1);
    }
    owner.reset();
    EXPECT_FALSE(watch.expired());
    EXPECT_EQ(view.at({1}), 4);
  }
  EXPECT_TRUE(watch.expired());
}

TEST(Tensor, ViewsShareMemory) {
  const Tensor t = counting({4, 5});
  EXPECT_EQ(t.slice(0, 1, 3).at({0, 0}), 5);
  EXPECT_EQ(t.slice(1, 2, 5).at({3, 2}), 19);
  EXPECT_EQ(t.slice(1, 2, 5).strides(), t.strides());
  EXPECT_EQ(t.select(1, 4).at({2}), 14);
  EXPECT_EQ(t.transpose(0, 1).at({3, 2}), 13);
  EXPECT_EQ(t.reshape({2, 10}).at({1, 0}), 10);
  EXPECT_EQ(t.slice(0, 2, 2).numel(), 0);
  EXPECT_FALSE(t.transpose(0, 1).is_contiguous());
  EXPECT_FALSE(t.slice(1, 0, 4).is_contiguous());
  EXPECT_TRUE(t.slice(0, 1, 2).slice(1, 1, 3).is_contiguous()) << "a single row's stride does not matter";
  EXPECT_EQ(t.transpose(0, 1).describe(), "i32[5, 4] on cpu (strides 1, 5)");
  EXPECT_EQ(t.shape(-1), 5);
  EXPECT_EQ(t.stride(-2), 5);
  EXPECT_EQ(t.transpose(-1, -2).at({3, 2}), 13);
  EXPECT_EQ(t.select(-1, 4).at({2}), 14);
  t.select(0, 3).data<std::int32_t>()[2] = 1000;
  EXPECT_EQ(t.at({3, 2}), 1000);
  EXPECT_THROW(t.transpose(0, 1).reshape({20}), InvalidArgument);
  EXPECT_THROW(t.slice(2, 0, 1), InvalidArgument);
  EXPECT_THROW(t.slice(0, -1, 1), InvalidArgument);
  EXPECT_THROW(t.slice(0, 3, 2), InvalidArgument);
  EXPECT_THROW(t.slice(0, 0, 5), InvalidArgument);
  EXPECT_THROW(t.select(0, 4), InvalidArgument);
  EXPECT_THROW(t.select(-3, 0), InvalidArgument);
  EXPECT_THROW(t.transpose(0, 2), InvalidArgument);
  EXPECT_THROW(t.shape(2), InvalidArgument);
  EXPECT_THROW(t.stride(-3), InvalidArgument);
  EXPECT_THROW(t.at({4, 0}), InvalidArgument);
  EXPECT_THROW(t.at({0, -1}), InvalidArgument);
  EXPECT_THROW(t.at({0}), InvalidArgument);
}

TEST(Tensor, NegativeAndZeroStrides) {
  std::vector<float> values = {0, 1, 2, 3, 4, 5};
  const Tensor reversed = Tensor::borrow(values.data() + 5, {6}, DType::f32, Device::cpu(), {-1});
  const Tensor copy = reversed.to(Device::cpu());
  for (std::int64_t i = 0; i < 6; ++i) EXPECT_EQ(copy.at({i}), 5 - i);
  const Tensor repeated = Tensor::borrow(values.data(), {3, 2}, DType::f32, Device::cpu(), {0, 1});
  EXPECT_EQ(repeated.to(Device::cpu()).at({2, 1}), 1);
  EXPECT_THROW(repeated.copy_from(Tensor::zeros({3, 2}, DType::f32)), InvalidArgument);
  // Memory onto itself, backwards.
  Tensor::borrow(values.data(), {6}, DType::f32, Device::cpu()).copy_from(reversed);
  EXPECT_EQ(values, (std::vector<float>{5, 4, 3, 2, 1, 0}));
}

TEST(Tensor, StridedCopiesMatchElementByElement) {
  std::mt19937_64 random = random_engine();
  auto pick = [&](int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); };
  for (int round = 0; round < random_cases(200); ++round) {
    Shape shape;
    for (int rank = pick(1, 4); rank > 0; --rank) shape.push_back(pick(1, 6));
    Tensor source = counting(shape);
    Tensor target = Tensor::poisoned(shape, DType::i32);
    auto twist = [&](Tensor& a, Tensor& b) {
      const int x = pick(0, a.rank() - 1);
      const int y = pick(0, a.rank() - 1);
      a = a.transpose(x, y);
      b = b.transpose(x, y);
    };
    // The same shape for both, but different strides: the target is a transposed copy of a transposed shape.
    twist(source, target);
    target = target.to(Device::cpu());
    twist(source, target);
    const int dim = pick(0, source.rank() - 1);
    const std::int64_t begin = pick(0, static_cast<int>(source.shape(dim)) - 1);
    source = source.slice(dim, begin, source.shape(dim));
    target = target.slice(dim, begin, target.shape(dim));
    target.copy_from(source);
    std::vector<std::int64_t> index(static_cast<std::size_t>(source.rank()), 0);
    for (bool more = true; more;) {
      ASSERT_EQ(target.at(index), source.at(index)) << source.describe() << " to " << target.describe();
      more = false;
      for (std::size_t d = index.size(); d-- > 0 && !more;) {
        more = ++index[d] < source.shape()[d];
        if (!more) index[d] = 0;
      }
    }
  }
}

TEST(TensorConversion, RoundsOnceToNearestEven) {
  // 1 + 2^-8 lies halfway between two bf16 values; the even one is 1. A little more goes up.
  const float half = 1.0f + 0x1p-8f;
  const Tensor f =
      vector_of<float>({half, std::nextafter(half, 2.0f), 1.0f + 3 * 0x1p-8f, -half, 65504.0f, 65520.0f, INFINITY, NAN, -0.0f});
  const Tensor b = f.to(DType::bf16);
  EXPECT_EQ(b.at({0}), 1.0);
  EXPECT_EQ(b.at({1}), 1.0 + 0x1p-7);
  EXPECT_EQ(b.at({2}), 1.0 + 0x1p-6);
  EXPECT_EQ(b.at({3}), -1.0);
  EXPECT_EQ(b.at({6}), INFINITY);
  EXPECT_TRUE(std::isnan(b.at({7})));
  EXPECT_TRUE(std::signbit(b.at({8})));
  const Tensor h = f.to(DType::f16);
  EXPECT_EQ(h.at({4}), 65504.0);
  EXPECT_EQ(h.at({5}), INFINITY);
  EXPECT_TRUE(std::isnan(h.at({7})));

  // Integers that a float cannot hold: rounding twice would give a tie, and the wrong neighbour.
  const std::int64_t tie = (std::int64_t{1} << 40) + (std::int64_t{1} << 32);  // halfway between two bf16
  const Tensor i = vector_of<std::int64_t>({tie, tie + 1, tie - 1, -(tie + 1), (std::int64_t{1} << 62) + (std::int64_t{1} << 54) + 1});
  const Tensor r = i.to(DType::bf16);
  EXPECT_EQ(r.at({0}), 0x1p40);
  EXPECT_EQ(r.at({1}), 0x1p40 + 0x1p33);
  EXPECT_EQ(r.at({2}), 0x1p40);
  EXPECT_EQ(r.at({3}), -0x1p40 - 0x1p33);
  EXPECT_EQ(r.at({4}), 0x1p62 + 0x1p55);
  EXPECT_EQ(vector_of<std::int32_t>({(1 << 24) + 1, (1 << 24) + 3}).to(DType::f32).at({0}), 0x1p24);
  EXPECT_EQ(vector_of<std::int32_t>({(1 << 24) + 1, (1 << 24) + 3}).to(DType::f32).at({1}), 0x1p24 + 4);
}

TEST(TensorConversion, ToIntegersSaturates) {
  const Tensor f = vector_of<float>({0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 127.4f, 300.0f, -300.0f, NAN, INFINITY, -INFINITY, 3e9f});
  const Tensor b = f.to(DType::i8);
  const double expected[] = {0, 2, 2, 0, -2, 127, 127, -128, 0, 127, -128, 127};
  for (std::int64_t i = 0; i < 12; ++i) EXPECT_EQ(b.at({i}), expected[i]) << i;
  EXPECT_EQ(f.to(DType::u8).at({7}), 0);
  EXPECT_EQ(f.to(DType::u8).at({6}), 255);
  EXPECT_EQ(f.to(DType::i32).at({11}), 2147483647.0);
  EXPECT_EQ(f.to(DType::i64).at({9}), 0x1p63);
  EXPECT_EQ(f.to(DType::i64).data<std::int64_t>()[9], std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(f.to(DType::boolean).at({8}), 1);
  EXPECT_EQ(f.to(DType::boolean).at({3}), 1);
  const Tensor i = vector_of<std::int64_t>({-1, 0, 255, 256, std::int64_t{1} << 40, -(std::int64_t{1} << 40)});
  EXPECT_EQ(i.to(DType::u8).at({0}), 0);
  EXPECT_EQ(i.to(DType::u8).at({2}), 255);
  EXPECT_EQ(i.to(DType::u8).at({3}), 255);
  EXPECT_EQ(i.to(DType::i32).at({4}), 2147483647.0);
  EXPECT_EQ(i.to(DType::i32).at({5}), -2147483648.0);
  EXPECT_EQ(i.to(DType::boolean).at({1}), 0);
}

TEST(TensorConversion, EveryPairKeepsSmallNumbers) {
  const Tensor small = vector_of<float>({0, 1, 2, 3, 8});
  for (DType from : kAll) {
    for (DType to : kAll) {
      const Tensor t = small.to(from).to(to);
      ASSERT_EQ(t.dtype(), to);
      for (std::int64_t i = 0; i < 5; ++i) {
        const bool flag = from == DType::boolean || to == DType::boolean;
        EXPECT_EQ(t.at({i}), flag ? std::min(small.at({i}), 1.0) : small.at({i})) << name_of(from) << " to " << name_of(to);
      }
    }
  }
}

TEST(TensorConversion, StridedAndLarge) {
  const Tensor t = counting({700, 300});
  const Tensor converted = t.transpose(0, 1).slice(0, 1, 300).to(DType::f32);
  ASSERT_EQ(converted.shape(), (Shape{299, 700}));
  const float* values = converted.data<float>();
  for (int i = 0; i < 299; ++i) {
    for (int j = 0; j < 700; ++j) ASSERT_EQ(values[i * 700 + j], static_cast<float>(j * 300 + i + 1));
  }
}

TEST(Tensor, cuda_IsNotReadOnTheCpu) {
  skip_without_cuda();
  const Tensor t = Tensor::zeros({2}, DType::f32, Stream::standard(Device::cuda()));
  EXPECT_THROW(t.at({0}), InvalidArgument);
  EXPECT_THROW(t.to(DType::f16), InvalidArgument);
  const Tensor matrix = Tensor::zeros({2, 3}, DType::f32, Stream::standard(Device::cuda()));
  EXPECT_THROW(matrix.transpose(0, 1).copy_from(Tensor::zeros({3, 2}, DType::f32)), InvalidArgument);
}

TEST(RandomTensor, IsStandardNormal) {
  const Tensor t = Tensor::random({1000, 200}, DType::f32, 7);
  ASSERT_EQ(t.shape(), (Shape{1000, 200}));
  const auto n = static_cast<double>(t.numel());
  double moments[5] = {};
  std::int64_t within_one = 0;
  for (std::int64_t i = 0; i < t.numel(); ++i) {
    const double x = t.data<float>()[i];
    ASSERT_TRUE(std::isfinite(x));
    for (int power = 1; power <= 4; ++power) moments[power] += std::pow(x, power) / n;
    within_one += std::abs(x) < 1 ? 1 : 0;
  }
  // Five standard deviations of each estimate.
  EXPECT_NEAR(moments[1], 0, 5 / std::sqrt(n));
  EXPECT_NEAR(moments[2], 1, 5 * std::sqrt(2 / n));
  EXPECT_NEAR(moments[3], 0, 5 * std::sqrt(15 / n));
  EXPECT_NEAR(moments[4], 3, 5 * std::sqrt(96 / n));
  EXPECT_NEAR(static_cast<double>(within_one) / n, 0.6827, 5 * std::sqrt(0.6827 * 0.3173 / n));
  // Neighbours, and tensors of neighbouring seeds, have nothing to do with one another.
  const Tensor other = Tensor::random({1000, 200}, DType::f32, 8);
  double neighbours = 0, seeds = 0;
  for (std::int64_t i = 1; i < t.numel(); ++i) {
    neighbours += static_cast<double>(t.data<float>()[i]) * static_cast<double>(t.data<float>()[i - 1]) / n;
    seeds += static_cast<double>(t.data<float>()[i]) * static_cast<double>(other.data<float>()[i]) / n;
  }
  EXPECT_NEAR(neighbours, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(seeds, 0, 5 / std::sqrt(n));
}

TEST(RandomTensor, FollowsTheSeedAlone) {
  const Tensor t = Tensor::random({100, 300}, DType::f32, 3);
  set_cpu_threads(1);
  EXPECT_EQ(max_difference(t, Tensor::random({100, 300}, DType::f32, 3)), 0);
  set_cpu_threads(device_info(Device::cpu()).units);
  EXPECT_GT(max_difference(t, Tensor::random({100, 300}, DType::f32, 4)), 0);
  for (const DType dtype : {DType::f16, DType::bf16}) EXPECT_EQ(max_difference(t.to(dtype), Tensor::random({100, 300}, dtype, 3)), 0);
  EXPECT_EQ(Tensor::random({0, 3}, DType::f16, 1).numel(), 0);
}

TEST(RandomTensor, RefusesOtherTypes) {
  EXPECT_NE(message_of([] { Tensor::random({2}, DType::i32, 1); }).find("f32, f16, bf16"), std::string::npos);
  EXPECT_THROW(Tensor::random({-2}, DType::f32, 1), InvalidArgument);
}

TEST(RandomTensor, cuda_IsTheSameOnAGpu) {
  skip_without_cuda();
  const Stream stream(Device::cuda());
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Tensor t = Tensor::random({70, 130}, dtype, 5, stream);
    ASSERT_EQ(t.device(), Device::cuda());
    EXPECT_EQ(max_difference(t, Tensor::random({70, 130}, dtype, 5)), 0);
  }
}

TEST(MaxDifference, IsTheLargest) {
  const Tensor a = vector_of<float>({1, -2, 3, 4}), b = vector_of<float>({1.5f, -2, 0.5f, 5});
  EXPECT_EQ(max_difference(a, b), 2.5);
  EXPECT_EQ(max_difference(b, a), 2.5);
  EXPECT_EQ(max_difference(a, a), 0);
  EXPECT_EQ(max_difference(vector_of<float>({}), vector_of<float>({})), 0);
}

TEST(MaxDifference, TakesViewsAndAnyTypes) {
  const Tensor t = counting({3, 4});
  const Tensor transposed = t.transpose(0, 1);
  EXPECT_EQ(max_difference(transposed, transposed.to(DType::f32)), 0);
  EXPECT_EQ(max_difference(t.reshape({4, 3}), transposed), 6);  // (3, 0) is 9 in one and 3 in the other
  EXPECT_EQ(max_difference(vector_of<std::int64_t>({(std::int64_t{1} << 40) + 1}), vector_of<std::int64_t>({std::int64_t{1} << 40})), 1);
}

TEST(MaxDifference, SaysWhenThereIsNoNumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), infinity = std::numeric_limits<float>::infinity();
  const Tensor numbers = vector_of<float>({1, 2, 3});
  EXPECT_TRUE(std::isnan(max_difference(numbers, vector_of<float>({9, nan, 3}))));
  EXPECT_TRUE(std::isnan(max_difference(vector_of<float>({1, 2, nan}), numbers)));
  EXPECT_TRUE(std::isnan(max_difference(vector_of<float>({nan}), vector_of<float>({nan}))));
  EXPECT_EQ(max_difference(vector_of<float>({infinity, 1}), vector_of<float>({infinity, 3})), 2);
  EXPECT_EQ(max_difference(vector_of<float>({infinity}), vector_of<float>({-infinity})), std::numeric_limits<double>::infinity());
}

TEST(MaxDifference, RefusesOtherShapes) {
  const std::string message = message_of([] { max_difference(counting({2, 3}), counting({3, 2})); });
  EXPECT_NE(message.find("i32[3, 2]"), std::string::npos) << message;
}

TEST(MaxDifference, cuda_TakesTensorsOfAGpu) {
  skip_without_cuda();
  const Tensor t = counting({3, 4}).to(DType::f32), on_gpu = t.to(Device::cuda());
  EXPECT_EQ(max_difference(t, on_gpu), 0);
  EXPECT_EQ(max_difference(on_gpu.transpose(0, 1), t.transpose(0, 1)), 0);
  EXPECT_EQ(max_difference(on_gpu.slice(0, 0, 2), t.slice(0, 1, 3)), 4);
}

}  // namespace
}  // namespace tw::test
