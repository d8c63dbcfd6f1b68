// The element types' conversions: every code of every format, and every place where rounding changes its mind, against arithmetic in
// double.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tests/language_kernels.tile.hpp"
#include "tests/launch_kernel.hpp"
#include "tests/support.hpp"
#include "tilewave/tensor.hpp"
#include "tilewave/tile/types.tile.hpp"

namespace tw::test {
namespace {

enum class Beyond { infinity, saturates };

/// A format, told apart from its implementation: widths, its largest finite code, what comes beyond.
template <class T, int kExponent, int kMantissa, unsigned kLargest, Beyond kBeyond, bool kNans>
struct Format {
  using Type = T;
  static constexpr unsigned largest = kLargest;
  static constexpr Beyond beyond = kBeyond;
  static constexpr bool nans = kNans;
  static constexpr unsigned sign = 1u << (kExponent + kMantissa);

  static T of_bits(unsigned code) {
    T x{};
    x.bits = static_cast<decltype(x.bits)>(code);
    return x;
  }
  /// The value of a finite, positive code. Also of the one after the largest, as if the format went on.
  static double value(unsigned code) {
    const int exponent = static_cast<int>(code >> kMantissa);
    const int bias = (1 << (kExponent - 1)) - 1;
    const double fraction = std::ldexp(static_cast<double>(code & ((1u << kMantissa) - 1)), -kMantissa);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  }
  static float decoded(unsigned code) { return static_cast<float>(of_bits(code)); }
  static unsigned encoded(float x) { return T(x).bits; }
  static unsigned beyond_largest() { return beyond == Beyond::infinity ? largest + 1 : largest; }

  /// The code nearest to |x|, the even one of two: by bisection of the values, which ascend with the code.
  static unsigned nearest(double magnitude) {
    unsigned low = 0, high = largest + 1;  // value(low) <= magnitude < value(high)
    if (magnitude >= value(high)) return beyond_largest();
    while (high - low > 1) {
      const unsigned middle = (low + high) / 2;
      (value(middle) <= magnitude ? low : high) = middle;
    }
    const double below = magnitude - value(low), above = value(high) - magnitude;
    const unsigned code = below < above || (below == above && low % 2 == 0) ? low : high;
    return code > largest ? beyond_largest() : code;
  }
};

using Formats = testing::Types<Format<f16, 5, 10, 0x7bff, Beyond::infinity, true>, Format<bf16, 8, 7, 0x7f7f, Beyond::infinity, true>,
                               Format<fp8_e4m3, 4, 3, 0x7e, Beyond::saturates, true>, Format<fp8_e5m2, 5, 2, 0x7b, Beyond::saturates, true>,
                               Format<fp4_e2m1, 2, 1, 0x7, Beyond::saturates, false>>;

struct FormatName {
  template <class F>
  static std::string GetName(int) {
    using T = typename F::Type;
    return is_same<T, f16>        ? "f16"
           : is_same<T, bf16>     ? "bf16"
           : is_same<T, fp8_e4m3> ? "fp8_e4m3"
           : is_same<T, fp8_e5m2> ? "fp8_e5m2"
                                  : "fp4_e2m1";
  }
};

/// Where rounding decides: around the middle of every two neighbours, of both signs, and beyond the largest.
template <class F>
std::vector<float> deciding_values() {
  std::vector<float> values;
  for (unsigned code = 0; code <= F::largest; ++code) {
    const double middle = (F::value(code) + F::value(code + 1)) / 2;
    const auto exact = static_cast<float>(middle);
    for (const float x : {F::decoded(code), std::nextafter(exact, 0.0f), exact, std::nextafter(exact, kInf)}) {
      values.push_back(x);
      values.push_back(-x);
    }
  }
  return values;
}

template <class F>
class FloatFormat : public testing::Test {};
TYPED_TEST_SUITE(FloatFormat, Formats, FormatName);

TYPED_TEST(FloatFormat, EveryCodeHasItsValue) {
  using F = TypeParam;
  for (unsigned code = 0; code <= F::largest; ++code) {
    ASSERT_EQ(F::decoded(code), F::value(code)) << std::hex << code;
    ASSERT_EQ(F::decoded(code | F::sign), -F::value(code)) << std::hex << code;
    ASSERT_TRUE(std::signbit(F::decoded(code | F::sign))) << std::hex << code;
  }
  for (unsigned code = F::largest + 1; code < F::sign; ++code) {
    const bool is_infinity = code == F::largest + 1 && (F::beyond == Beyond::infinity || is_same<typename F::Type, fp8_e5m2>);
    for (const unsigned sign : {0u, F::sign}) {
      const float x = F::decoded(code | sign);
      if (is_infinity)
        ASSERT_EQ(x, sign != 0 ? -kInf : kInf) << std::hex << code;
      else
        ASSERT_TRUE(std::isnan(x)) << std::hex << code;
    }
  }
}

TYPED_TEST(FloatFormat, EveryCodeSurvivesTheRoundTrip) {
  using F = TypeParam;
  for (unsigned code = 0; code < 2 * F::sign; ++code) {
    const float x = F::decoded(code);
    if (std::isnan(x)) {
      EXPECT_TRUE(std::isnan(F::decoded(F::encoded(x)))) << std::hex << code;
    } else if (std::isinf(x) && F::beyond == Beyond::saturates) {
      EXPECT_EQ(F::encoded(x), (code & F::sign) | F::largest) << std::hex << code;
    } else {
      EXPECT_EQ(F::encoded(x), code) << std::hex << code;
    }
  }
}

TYPED_TEST(FloatFormat, RoundsToNearestEven) {
  using F = TypeParam;
  for (unsigned code = 0; code <= F::largest; ++code) {
    const double middle = (F::value(code) + F::value(code + 1)) / 2;
    const auto exact = static_cast<float>(middle);
    ASSERT_EQ(static_cast<double>(exact), middle) << "an f32 holds what lies between two codes";
    const unsigned next = code == F::largest ? F::beyond_largest() : code + 1;
    ASSERT_EQ(F::encoded(std::nextafter(exact, 0.0f)), code) << std::hex << code;
    ASSERT_EQ(F::encoded(exact), code % 2 == 0 ? code : next) << std::hex << code;
    ASSERT_EQ(F::encoded(std::nextafter(exact, kInf)), next) << std::hex << code;
    ASSERT_EQ(F::encoded(-exact), (code % 2 == 0 ? code : next) | F::sign) << std::hex << code;
  }
}

TYPED_TEST(FloatFormat, AnyNumberBecomesTheNearest) {
  using F = TypeParam;
  std::mt19937_64 random = random_engine();
  for (int i = 0; i < 200'000; ++i) {
    // Any f32 at all; and, for formats that span few of its exponents, any from around their range.
    float x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
    if (i % 2 == 0)
      x = static_cast<float>(F::decoded(F::largest) * std::exp2(-static_cast<double>(random() % 3000) / 100) *
                             (random() % 2 == 0 ? 1.5 : -1.5));
    if (std::isnan(x)) continue;
    const unsigned expected = F::nearest(std::abs(static_cast<double>(x))) | (std::signbit(x) ? F::sign : 0);
    ASSERT_EQ(F::encoded(x), expected) << x;
  }
}

TYPED_TEST(FloatFormat, Extremes) {
  using F = TypeParam;
  EXPECT_EQ(F::encoded(0.0f), 0u);
  EXPECT_EQ(F::encoded(-0.0f), F::sign);
  for (const float x : {kInf, std::numeric_limits<float>::max()}) {
    EXPECT_EQ(F::encoded(x), F::beyond_largest());
    EXPECT_EQ(F::encoded(-x), F::beyond_largest() | F::sign);
  }
  if constexpr (F::nans) {
    EXPECT_TRUE(std::isnan(F::decoded(F::encoded(kNaN))));
    EXPECT_TRUE(std::isnan(F::decoded(F::encoded(-kNaN))));
    // A NaN whose payload lies only in bits that the format drops must not become an infinity.
    EXPECT_TRUE(std::isnan(F::decoded(F::encoded(std::bit_cast<float>(0x7f800001u)))));
  } else {
    EXPECT_EQ(F::encoded(kNaN), F::largest);
  }
  // Subnormals of f32 lie far below what these formats can tell from 0, but for bf16's, which has f32's exponents.
  const float smallest = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(F::encoded(smallest), 0u);
  EXPECT_EQ(F::encoded(-smallest), F::sign);
  if constexpr (is_same<typename F::Type, bf16>) {
    EXPECT_EQ(F::encoded(std::numeric_limits<float>::min() / 2), 0x40u);
    EXPECT_EQ(F::encoded(std::ldexp(1.5f, -134)), 1u);
  }
}

TYPED_TEST(FloatFormat, ConvertsAtCompileTime) {
  using T = typename TypeParam::Type;
  static_assert(static_cast<float>(T(1.5f)) == 1.5f);
  static_assert(static_cast<float>(T(-3.0f)) == -3.0f);
  static_assert(static_cast<float>(to<T>(to<f16>(0.5f))) == 0.5f);
  EXPECT_EQ(T(2.0f).bits, TypeParam::nearest(2.0));  // the same at run time
}

TEST(Tf32, RoundsAwayThirteenBits) {
  std::mt19937_64 random = random_engine();
  for (int i = 0; i < 300'000; ++i) {
    auto bits = static_cast<std::uint32_t>(random());
    if (i % 4 == 0) bits = (bits & ~0x1fffu) | 0x1000u;  // ties
    if (i % 4 == 1) bits &= 0x807fffffu;                 // subnormals
    const float x = std::bit_cast<float>(bits);
    if (!std::isfinite(x)) continue;
    // In units of the last bit kept, nearbyint is to nearest even.
    const int exponent = std::max(x == 0 ? -126 : std::ilogb(x), -126);
    const double unit = std::ldexp(1.0, exponent - 10);
    const auto expected = static_cast<float>(std::nearbyint(x / unit) * unit);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(static_cast<float>(tf32(x))), std::bit_cast<std::uint32_t>(expected)) << x;
    ASSERT_EQ(tf32(x).bits & 0x1fffu, 0u);
    ASSERT_EQ(tf32(static_cast<float>(tf32(x))).bits, tf32(x).bits);
  }
  EXPECT_EQ(static_cast<float>(tf32(kInf)), kInf);
  EXPECT_EQ(static_cast<float>(tf32(-kInf)), -kInf);
  EXPECT_EQ(static_cast<float>(tf32(std::numeric_limits<float>::max())), kInf);
  EXPECT_TRUE(std::isnan(static_cast<float>(tf32(kNaN))));
}

TEST(E8m0, EveryCodeIsAPowerOfTwo) {
  for (unsigned code = 0; code < 255; ++code) {
    e8m0 x{};
    x.bits = static_cast<u8>(code);
    EXPECT_EQ(static_cast<float>(x), std::ldexp(1.0f, static_cast<int>(code) - 127)) << code;
    EXPECT_EQ(e8m0(static_cast<float>(x)).bits, code);
  }
  e8m0 nan{};
  nan.bits = 255;
  EXPECT_TRUE(std::isnan(static_cast<float>(nan)));
  EXPECT_EQ(e8m0(kNaN).bits, 255);
}

TEST(E8m0, RoundsUpToAPowerOfTwo) {
  std::mt19937_64 random = random_engine();
  for (int i = 0; i < 100'000; ++i) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(random()) & 0x7fffffffu);
    if (!std::isfinite(x)) continue;
    const e8m0 scale(x);
    ASSERT_NE(scale.bits, 255) << x;
    const auto value = static_cast<double>(static_cast<float>(scale));
    if (x <= std::ldexp(1.0f, 127)) {
      ASSERT_GE(value, x);
    }
    if (scale.bits > 0 && x < std::ldexp(1.0f, 127)) {
      ASSERT_LT(value / 2, x) << "a smaller scale would do for " << x;
    }
  }
  EXPECT_EQ(e8m0(0.0f).bits, 0);
  EXPECT_EQ(e8m0(-0.0f).bits, 0);
  EXPECT_EQ(e8m0(std::ldexp(1.0f, -127)).bits, 0);
  EXPECT_EQ(e8m0(std::nextafter(std::ldexp(1.0f, -127), 1.0f)).bits, 1);
  EXPECT_EQ(e8m0(1.0f).bits, 127);
  EXPECT_EQ(e8m0(std::nextafter(1.0f, 2.0f)).bits, 128);
  EXPECT_EQ(e8m0(std::numeric_limits<float>::max()).bits, 254);
  EXPECT_EQ(e8m0(kInf).bits, 254);
  EXPECT_EQ(e8m0(-1.0f).bits, 255) << "no scale is negative";
}

TEST(Int8, RoundsToNearestEvenAndSaturates) {
  for (int i = -1300; i <= 1300; ++i) {
    const float x = static_cast<float>(i) / 8;
    const double expected = std::min(127.0, std::max(-128.0, std::nearbyint(static_cast<double>(x))));
    ASSERT_EQ(to<i8>(x), static_cast<int>(expected)) << x;
  }
  EXPECT_EQ(to<i8>(kInf), 127);
  EXPECT_EQ(to<i8>(-kInf), -128);
  EXPECT_EQ(to<i8>(1e30f), 127);
  EXPECT_EQ(to<i8>(kNaN), 0);
  EXPECT_EQ(to<i8>(1e-30f), 0);
  EXPECT_EQ(to<i8>(bf16(-7.5f)), -8);
  EXPECT_EQ(to<float>(static_cast<i8>(-5)), -5.0f);
}

TEST(Integers, BecomeTheNearestInteger) {
  EXPECT_EQ(to<i8>(i32{127}), 127);
  EXPECT_EQ(to<i8>(i32{128}), 127);
  EXPECT_EQ(to<i8>(i32{-128}), -128);
  EXPECT_EQ(to<i8>(std::numeric_limits<i32>::min()), -128);
  EXPECT_EQ(to<u8>(i32{-1}), 0);
  EXPECT_EQ(to<u8>(i32{256}), 255);
  EXPECT_EQ(to<u8>(i8{-1}), 0);
  EXPECT_EQ(to<i8>(u8{200}), 127);
  EXPECT_EQ(to<i64>(i32{16777217}), 16777217) << "f32 has no such number";
  EXPECT_EQ(to<i32>(i64{16777217}), 16777217);
  EXPECT_EQ(to<i32>(std::numeric_limits<std::int64_t>::max()), 2147483647);
  EXPECT_EQ(to<i32>(std::numeric_limits<std::int64_t>::min()), -2147483647 - 1);
  EXPECT_EQ(to<i32>(u32{4294967295}), 2147483647);
  EXPECT_EQ(to<u32>(i64{-5}), 0u);
  EXPECT_EQ(to<std::int64_t>(~u64{0}), std::numeric_limits<std::int64_t>::max());
  static_assert(to<i8>(-129) == -128);
}

TEST(Integers, AreRoundedToNearestEven) {
  std::mt19937_64 random = random_engine();
  const auto expect = [](float x) {
    const double nearest = std::nearbyint(static_cast<double>(x));
    ASSERT_EQ(to<i32>(x), std::clamp(nearest, -2147483648.0, 2147483647.0)) << x;
    ASSERT_EQ(to<u8>(x), std::clamp(nearest, 0.0, 255.0)) << x;
    if (std::abs(nearest) < 0x1p62) {
      ASSERT_EQ(to<i64>(x), static_cast<i64>(nearest)) << x;
    }
  };
  for (int i = -40; i <= 40; ++i) expect(static_cast<float>(i) / 8);
  for (int i = 0; i < 100'000; ++i) {
    const float x = std::ldexp(std::uniform_real_distribution<float>(-1, 1)(random), static_cast<int>(random() % 70));
    expect(x);
    expect(std::floor(x) + 0.5f);
  }
  EXPECT_EQ(to<i32>(kInf), 2147483647);
  EXPECT_EQ(to<i32>(-kInf), -2147483647 - 1);
  EXPECT_EQ(to<i32>(kNaN), 0);
  EXPECT_EQ(to<u8>(-kInf), 0);
  EXPECT_EQ(to<i64>(kInf), std::numeric_limits<i64>::max());
}

TEST(Fp4x2, HoldsTwo) {
  for (unsigned low = 0; low < 16; ++low) {
    for (unsigned high = 0; high < 16; ++high) {
      fp4_e2m1 a{}, b{};
      a.bits = static_cast<u8>(low);
      b.bits = static_cast<u8>(high);
      fp4x2 pair{0xa5};
      pair.set(1, b);
      pair.set(0, a);
      EXPECT_EQ(pair.bits, low | high << 4);
      EXPECT_EQ(pair.get(0).bits, low);
      EXPECT_EQ(pair.get(1).bits, high);
    }
  }
}

/// The conversions inside a kernel, a GPU's instructions among them, give what the host's give.
TEST(RoundedTo, IsThereAndBack) {
  std::mt19937_64 random = random_engine();
  for (int n = 0; n < 200'000; ++n) {
    const float x =
        std::bit_cast<float>(n % 4 == 0 ? static_cast<std::uint32_t>(random()) | 0x7f800000u : static_cast<std::uint32_t>(random()));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(rounded_to<bf16>(x)), std::bit_cast<std::uint32_t>(static_cast<float>(bf16(x)))) << x;
  }
  EXPECT_EQ(rounded_to<bf16>(1.00390625f), 1.0f);
  EXPECT_EQ(rounded_to<f16>(65520.0f), kInf);
  EXPECT_EQ(rounded_to<float>(0.1f), 0.1f);
}

class NumberTypes : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  template <class F>
  void expect_same_in_kernel() {
    using T = typename F::Type;
    std::vector<float> values = deciding_values<F>();
    std::mt19937_64 random = random_engine();
    for (int i = 0; i < random_cases(50'000); ++i) values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
    values.insert(values.end(),
                  {kInf, -kInf, kNaN, 0.0f, -0.0f, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min()});
    values.resize((values.size() + 31) / 32 * 32, 1.0f);
    const auto rows = static_cast<std::int64_t>(values.size() / 32);
    const Tensor in = Tensor::from<float>(values, {rows, 32}).to(device);
    const Tensor out = Tensor::poisoned({rows, 32}, dtype_of<T>, Stream::standard(device));
    launch_kernel<CopyRows<float, T, 8, 32>>(device, {ceil_div(static_cast<int>(rows), 8)}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      bind(p.out, out);
    });
    const Tensor host = out.to(Device::cpu());
    for (std::size_t i = 0; i < values.size(); ++i) {
      const T got = host.data<T>()[i];
      if (std::isnan(values[i]))
        ASSERT_TRUE(std::isnan(static_cast<float>(got))) << "element " << i;
      else
        ASSERT_EQ(got.bits, T(values[i]).bits) << values[i];
    }
    // And back: every code.
    std::vector<T> codes;
    for (unsigned code = 0; code < 2 * F::sign; ++code) codes.push_back(F::of_bits(code));
    const std::int64_t code_rows = static_cast<std::int64_t>(codes.size()) / 32;
    const Tensor encoded = Tensor::from<T>(codes, {code_rows, 32}).to(device);
    const Tensor decoded = Tensor::poisoned({code_rows, 32}, DType::f32, Stream::standard(device));
    launch_kernel<CopyRows<T, float, 8, 32>>(device, {ceil_div(static_cast<int>(code_rows), 8)}, [&](auto& bind, auto& p) {
      bind(p.in, encoded);
      bind(p.out, decoded);
    });
    const Tensor back = decoded.to(Device::cpu());
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const float expected = static_cast<float>(codes[i]), got = back.data<float>()[i];
      if (std::isnan(expected))
        ASSERT_TRUE(std::isnan(got)) << i;
      else
        ASSERT_EQ(std::bit_cast<std::uint32_t>(got), std::bit_cast<std::uint32_t>(expected)) << i;
    }
  }

  const Device device = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Tile, NumberTypes, testing::ValuesIn(kDevices), device_name);

TEST_P(NumberTypes, F16InKernels) { expect_same_in_kernel<Format<f16, 5, 10, 0x7bff, Beyond::infinity, true>>(); }
TEST_P(NumberTypes, Bf16InKernels) { expect_same_in_kernel<Format<bf16, 8, 7, 0x7f7f, Beyond::infinity, true>>(); }
TEST_P(NumberTypes, Fp8E4m3InKernels) { expect_same_in_kernel<Format<fp8_e4m3, 4, 3, 0x7e, Beyond::saturates, true>>(); }
TEST_P(NumberTypes, Fp8E5m2InKernels) { expect_same_in_kernel<Format<fp8_e5m2, 5, 2, 0x7b, Beyond::saturates, true>>(); }

}  // namespace
}  // namespace tw::test
