// Packed and 8-bit operands, copies that gather and scatter, schedules of segments: kernels of each on the CPU and on a GPU, against loops
// in double.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "runtime/format.hpp"
#include "tests/copy_kernels.tile.hpp"
#include "tests/launch_kernel.hpp"
#include "tests/support.hpp"
#include "tilewave/analyze.hpp"

namespace tw::test {
namespace {

// Codes

template <class Codes>
void expect_codes(int lowest, int highest) {
  constexpr int count = codes_in<Codes>, width = 8 / count;
  for (int byte = 0; byte < 256; ++byte) {
    Codes codes{static_cast<u8>(byte)};
    for (int n = 0; n < count; ++n) {
      const int raw = byte >> (n * width) & ((1 << width) - 1);
      const int expected = raw > highest ? raw - (1 << width) : raw;
      ASSERT_TRUE(expected >= lowest && expected <= highest);
      ASSERT_EQ(codes.get(n), expected);
      ASSERT_EQ(value_of_code<Codes>(codes.bits, n), static_cast<float>(expected));
      Codes same{static_cast<u8>(~byte)};
      for (int k = 0; k < count; ++k) same.set(k, codes.get(k));
      ASSERT_EQ(same.bits, codes.bits);
    }
  }
}

TEST(Codes, OfEveryByteAreTheirNumbers) {
  expect_codes<i4x2>(-8, 7);
  expect_codes<u4x2>(0, 15);
  expect_codes<i2x4>(-2, 1);
  expect_codes<u2x4>(0, 3);
  const float magnitudes[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  for (int byte = 0; byte < 256; ++byte) {
    for (int n = 0; n < 2; ++n) {
      const int code = byte >> (4 * n) & 15;
      const float x = value_of_code<fp4x2>(static_cast<u32>(byte), n);
      ASSERT_EQ(x, code < 8 ? magnitudes[code] : -magnitudes[code - 8]);
      ASSERT_EQ(std::signbit(x), code >= 8);
      ASSERT_EQ(x, static_cast<float>(fp4x2{static_cast<u8>(byte)}.get(n)));
    }
  }
}

class Copies : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }
  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};
INSTANTIATE_TEST_SUITE_P(Tile, Copies, testing::ValuesIn(kDevices), device_name);

/// Values on the CPU and a copy of them on the device. Rows are `pitch` elements apart; what lies between is poison.
template <class T>
class Matrix {
 public:
  Matrix(int rows, int cols, int pitch = 0) : rows(rows), cols(cols) {
    pitch = std::max(pitch, cols);
    host_ = Tensor::poisoned({std::max(rows, 1), pitch}, dtype_of<T>);
    view_ = host_.slice(1, 0, cols);
  }
  T& operator()(int row, int col) const { return static_cast<T*>(host_.data())[std::int64_t{row} * host_.stride(0) + col]; }
  float value(int row, int col) const { return static_cast<float>((*this)(row, col)); }
  template <class F>
  Matrix& fill(F f) {
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < cols; ++c) (*this)(r, c) = f();
    return *this;
  }
  Tensor on(Device device) const { return host_.to(device).slice(1, 0, cols); }
  /// Takes what a kernel left in on(device).
  void take(const Tensor& there) {
    const Tensor here = there.to(Device::cpu());
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < cols; ++c) (*this)(r, c) = static_cast<const T*>(here.data())[r * here.stride(0) + c * here.stride(1)];
  }
  const int rows, cols;

 private:
  Tensor host_, view_;
};

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.to(Device::cpu()), y = b.to(Device::cpu());
  return std::memcmp(x.data(), y.data(), static_cast<std::size_t>(x.numel()) * size_of(x.dtype())) == 0;
}

constexpr int kTimes = 3;  // each launch is repeated, into poison again

/// What decode gives for the codes of row `m`, column `k`, rounded to T.
template <class T, class Codes, class Decode>
float decoded(const Matrix<Codes>& w, int m, int k, float scale) {
  const float number = value_of_code<Codes>(w(m, k / codes_in<Codes>).bits, k % codes_in<Codes>);
  return static_cast<float>(to<T>(Decode{}(number, scale)));
}

template <class T, class Sum, class Codes, class Scaling, class Decode, int BM, int BN>
void expect_packed_product(Device device, std::mt19937_64& random, int m, int n, int k) {
  using Kernel = PackedProduct<T, Sum, Codes, Scaling, Decode, BM, BN>;
  using On = typename Kernel::template On<cpu::Target>;
  SCOPED_TRACE(tw::format("{} x {} x {}, {} codes in a byte", m, n, k, codes_in<Codes>));
  const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % static_cast<unsigned>(high - low + 1)); };
  Matrix<Codes> w(m, ceil_div(k, codes_in<Codes>));
  w.fill([&] { return Codes{static_cast<u8>(random())}; });
  Matrix<T> x(n, k);
  x.fill([&] { return to<T>(std::is_same_v<T, i8> ? static_cast<float>(pick(-128, 127)) : static_cast<float>(pick(-1000, 1000)) / 512); });
  Matrix<float> row_scales(m, 1);
  row_scales.fill([&] { return static_cast<float>(pick(1, 99)) / 64; });
  using Scale = typename On::Scales::Element;
  int group = 1 << 20;
  bool transposed = false;
  if constexpr (On::by_group) {
    group = Scaling::group;
    transposed = Scaling::order == Contract::rows;
  }
  const int groups = ceil_div(k, group), scale_rows = transposed ? groups : m, scale_cols = transposed ? m : groups;
  Matrix<Scale> scales(scale_rows, scale_cols, ceil_div(scale_cols, 16) * 16);
  scales.fill([&] { return to<Scale>(std::ldexp(static_cast<float>(pick(1, 99)) / 64, pick(-3, 3))); });
  const auto scale_of = [&](int row, int col) {
    if constexpr (On::by_group) return transposed ? scales.value(col / group, row) : scales.value(row, col / group);
    return std::is_same_v<Scaling, ByRow> ? row_scales.value(row, 0) : 1.0f;
  };

  const Tensor w_there = w.on(device), x_there = x.on(device), scales_there = scales.on(device), row_scales_there = row_scales.on(device);
  Tensor first;
  Matrix<Sum> out(m, n);
  for (int repetition = 0; repetition < kTimes; ++repetition) {
    const Tensor there = Tensor::poisoned({m, n}, dtype_of<Sum>, Stream::standard(device));
    launch_kernel<Kernel>(device, {ceil_div(m, BM), ceil_div(n, BN)}, [&](auto& bind, auto& p) {
      bind(p.w, w_there);
      bind(p.x, x_there);
      if constexpr (On::by_group)
        bind(p.scales, scales_there);
      else
        bind(p.scales, nullptr);
      bind(p.row_scales, row_scales_there);
      bind(p.out, there);
      p.depth = k;
    });
    if (repetition == 0) first = there;
    ASSERT_TRUE(same_bits(first, there)) << "repetition " << repetition;
  }
  out.take(first);
  for (int i = 0; i < m; ++i) {
    for (int j = 0; j < n; ++j) {
      double sum = 0, magnitude = 0;
      for (int c = 0; c < k; ++c) {
        const double product = static_cast<double>(decoded<T, Codes, Decode>(w, i, c, scale_of(i, c))) * x.value(j, c);
        sum += product;
        magnitude += std::abs(product);
      }
      const double allowed = std::is_same_v<Sum, i32> ? 0 : std::ldexp(magnitude * (k + 2), -23);
      ASSERT_LE(std::abs(static_cast<double>(out(i, j)) - sum), allowed) << i << ", " << j << ": " << out(i, j) << " for " << sum;
    }
  }
}

TEST_P(Copies, WeightsOfFourBitsInGroups) {
  using Transposed = ByGroup<bf16, 64, Contract::rows>;
  for (const auto& [m, n, k] : {std::tuple{256, 64, 384}, {129, 65, 160}, {64, 3, 128}, {7, 64, 1}}) {
    expect_packed_product<bf16, float, i4x2, Transposed, TimesScale, 128, 64>(device, random, m, n, k);
    expect_packed_product<f16, float, u4x2, ByGroup<f16, 128, Contract::rows>, Affine<8>, 64, 32>(device, random, m, n, k);
    expect_packed_product<bf16, float, fp4x2, ByGroup<e8m0, 32, Contract::columns>, TimesScale, 64, 64>(device, random, m, n, k);
  }
}

TEST_P(Copies, WeightsOfTwoBitsAndScalesOfRows) {
  for (const auto& [m, n, k] : {std::tuple{128, 64, 256}, {70, 33, 200}, {1, 1, 3}}) {
    expect_packed_product<bf16, float, i2x4, ByRow, TimesScale, 64, 64>(device, random, m, n, k);
    expect_packed_product<f16, float, u2x4, ByRow, Affine<1>, 64, 64>(device, random, m, n, k);
  }
}

TEST_P(Copies, WeightsOfFourBitsTimesInt8) {
  for (const auto& [m, n, k] : {std::tuple{128, 64, 256}, {70, 33, 200}})
    expect_packed_product<i8, i32, i4x2, WithoutScales, TimesScale, 64, 64>(device, random, m, n, k);
}

template <class T, class Sum, int M, int N, int D>
void expect_narrow_chain(Device device, std::mt19937_64& random, int m, int n, int most, float factor) {
  SCOPED_TRACE(tw::format("{} x {}", m, n));
  const auto pick = [&] { return to<T>(static_cast<float>(static_cast<int>(random() % static_cast<unsigned>(2 * most + 1)) - most)); };
  Matrix<T> a(m, D), b(n, D), c(D, n);
  a.fill(pick), b.fill(pick), c.fill(pick);
  const Tensor a_there = a.on(device), b_there = b.on(device), c_there = c.on(device);
  Tensor first;
  for (int repetition = 0; repetition < kTimes; ++repetition) {
    const Tensor there = Tensor::poisoned({m, D}, dtype_of<Sum>, Stream::standard(device));
    launch_kernel<NarrowChain<T, Sum, M, N, D>>(device, {ceil_div(m, M)}, [&](auto& bind, auto& p) {
      bind(p.a, a_there);
      bind(p.b, b_there);
      bind(p.c, c_there);
      bind(p.out, there);
      p.factor = factor;
    });
    if (repetition == 0) first = there;
    ASSERT_TRUE(same_bits(first, there)) << "repetition " << repetition;
  }
  Matrix<Sum> out(m, D);
  out.take(first);
  for (int i = 0; i < m; ++i) {
    std::vector<double> q(static_cast<std::size_t>(n));
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int k = 0; k < D; ++k) sum += static_cast<double>(a.value(i, k)) * b.value(j, k);
      const Sum scaled = to<Sum>(static_cast<float>(sum) * factor);
      q[static_cast<std::size_t>(j)] = static_cast<double>(static_cast<float>(to<T>(scaled)));
    }
    for (int d = 0; d < D; ++d) {
      double sum = 0;
      for (int j = 0; j < n; ++j) sum += q[static_cast<std::size_t>(j)] * c.value(d, j);
      ASSERT_EQ(static_cast<double>(out(i, d)), sum) << i << ", " << d;
    }
  }
}

TEST_P(Copies, LeftOperandsOfEightBits) {
  for (const auto& [m, n] : {std::pair{64, 64}, {130, 200}, {1, 5}}) {
    expect_narrow_chain<i8, i32, 64, 64, 64>(device, random, m, n, 127, 1.0f / 1024);  // many are out of the range of int8
    expect_narrow_chain<i8, i32, 128, 32, 128>(device, random, m, n, 127, 1.0f / 4096);
    // Numbers so small that 8-bit floats' sums are exact.
    expect_narrow_chain<fp8_e4m3, float, 64, 64, 64>(device, random, m, n, 2, 1.0f / 16);
  }
}

// What the analysis target counts: codes once for every column of tiles, decoding, and products of the type that they are decoded to.
TEST(CopyAnalysis, CountsDecoding) {
  constexpr int kM = 256, kN = 128, kK = 512, kTilesN = kN / 64;
  using Kernel = PackedProduct<bf16, float, i4x2, ByGroup<bf16, 64, Contract::rows>, TimesScale, 128, 64>;
  const Analysis counts = analyze<Kernel>({kM / 128, kTilesN}, [&](auto& bind, auto& p) {
    bind(p.w, placeholder({kM, kK / 2}, DType::u8));
    bind(p.x, placeholder({kN, kK}, DType::bf16));
    bind(p.scales, placeholder({kK / 64, kM}, DType::bf16));
    bind(p.row_scales, placeholder({kM, 1}, DType::f32));
    bind(p.out, placeholder({kM, kN}, DType::f32));
    p.depth = kK;
  });
  EXPECT_EQ(counts.operations.products[static_cast<std::size_t>(OperandType::bf16)], 2ull * kM * kN * kK);
  EXPECT_EQ(counts.operations.f32, 1ull * kM * kK * kTilesN);
  constexpr int kScaleRows = 8 + 6 + 4 + 2;  // a tile has 8, from every second one on
  EXPECT_EQ(counts.global_read, kTilesN * (kM * kK / 2 + kScaleRows * kM * 2) + kM / 128 * kN * kK * 2);
}

TEST(CopyKernels, CompileForTheGpuWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs;
  for (const KernelSpec& spec : internal::launched_kernels())
    if (spec.source == kCopyKernels) specs.push_back(spec);
  ASSERT_FALSE(specs.empty());
  compile_all(specs, 0, [&](std::size_t i, const CompiledKernel& kernel) {
    EXPECT_EQ(kernel.spill_bytes, 0) << specs[i].name;
    EXPECT_TRUE(kernel.performance_losses.empty()) << specs[i].name << ": " << kernel.performance_losses.front();
    EXPECT_NE(kernel.tensor_core_instruction, "") << specs[i].name;
  });
}

}  // namespace
}  // namespace tw::test
