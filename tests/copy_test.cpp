// Packed and 8-bit operands, copies that gather and scatter, schedules of segments: kernels of each on the CPU and on a GPU, against loops
// in double.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "runtime/format.hpp"
#include "tests/expect_error.hpp"
#include "tests/language_launches.hpp"
#include "tests/support.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/tile/cuda/operand.tile.hpp"

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

/// The registers of an 8-bit or 16-bit left operand, as the PTX manual numbers the elements of matrix A of wgmma's k32 and k16.
template <class T>
void expect_operand_layout() {
  constexpr int kRows = 128, kCols = 64, k = 32 / static_cast<int>(sizeof(T)), in_register = k / 8;
  using Operand = cuda::Operand<T, kRows, kCols>;
  std::vector<int> owners(kRows * kCols);
  for (int thread = 0; thread < 256; ++thread) {
    const cuda::Position at = cuda::Position::of(static_cast<u32>(thread));
    const int group = thread % 32 / 4, in_group = thread % 4;
    for (int e = 0; e < Operand::size; ++e) {
      const int number = e % (4 * in_register);  // of the elements of one instruction
      const int row = group + (number / in_register % 2 == 0 ? 0 : 8),
                col = in_group * in_register + number % in_register + (number < 2 * in_register ? 0 : k / 2);
      ASSERT_EQ(Operand::row(at, e), thread / 32 * 16 + row);
      ASSERT_EQ(Operand::col(at, e), e / (4 * in_register) * k + col);
      ++owners[static_cast<std::size_t>(Operand::row(at, e) * kCols + Operand::col(at, e))];
    }
  }
  for (const int count : owners) ASSERT_EQ(count, 1);
}

struct Factors {
  static constexpr int group = 32;
  float operator()(int row, int number) const { return static_cast<float>(1 + (row + number) % 3); }
};
/// What each thread of a GPU decodes is what its registers stand for. 16-bit integers are in no product, but are packed here too.
template <class T, class Codes>
void expect_decoded_operand(std::mt19937_64& random, int first) {
  constexpr int kRows = 128, kCols = 64, count = codes_in<Codes>;
  using Operand = cuda::Operand<T, kRows, kCols>;
  const auto tile = std::make_unique<cuda::Shared<Codes, kRows, 4 * kCols / count, Contract::columns>>();
  for (u8& byte : tile->bytes) byte = static_cast<u8>(random());
  for (int thread = 0; thread < 256; ++thread) {
    const cuda::Position at = cuda::Position::of(static_cast<u32>(thread));
    Operand operand;
    cuda::load_codes(at, operand, *tile, Factors{}, TimesScale{}, first);
    for (int e = 0; e < Operand::size; ++e) {
      const int row = Operand::row(at, e), col = first + Operand::col(at, e);
      const float expected = static_cast<float>(tile->get(row, col / count).get(col % count)) * Factors{}(row, col / 32);
      const int in_register = Operand::width, bits = 8 * static_cast<int>(sizeof(T));
      const T got = static_cast<T>(operand.x[e / in_register] >> (e % in_register * bits));
      ASSERT_EQ(static_cast<float>(got), expected) << "row " << row << ", column " << col;
    }
  }
}

TEST(OperandLayout, IsTheOneThatProductsRead) {
  expect_operand_layout<i8>();
  expect_operand_layout<bf16>();
}

TEST(OperandLayout, IsFilledWithDecodedCodes) {
  std::mt19937_64 random = random_engine();
  for (const int first : {0, 64, 128}) {
    expect_decoded_operand<i8, i4x2>(random, first);
    expect_decoded_operand<i8, i2x4>(random, first);
    expect_decoded_operand<short, i4x2>(random, first);
    expect_decoded_operand<short, u2x4>(random, first);
  }
}

/// A scale and a zero point for each row and group, as a kernel holds them in RowVectors.
struct InRegisters {
  static constexpr int group = 32;
  cuda::Position at;
  static float scale(int row, int g) { return static_cast<float>(1 + row % 7) / 8 * static_cast<float>(g % 3 - 1); }
  static float zero(int row, int g) { return static_cast<float>((row + 5 * g) % 16); }
  ScaleAndZero<float> in_registers(int i, int g) const {
    const int row = cuda::RowVector<float, cuda::Fragment<float, 128, 64>>::row(at, i);
    return {scale(row, g), zero(row, g)};
  }
};

/// The same with the decoders of pairs, in every thread: each element is the formula's, rounded once.
template <class T, class Codes, class Scales, class Decode, class Expected>
void expect_decoded_pairs(std::mt19937_64& random, int first, Scales scales_of, Decode decode, Expected expected) {
  constexpr int kRows = 128, kCols = 64, count = codes_in<Codes>;
  using Operand = cuda::Operand<T, kRows, kCols>;
  const auto tile = std::make_unique<cuda::Shared<Codes, kRows, 4 * kCols / count, Contract::columns>>();
  for (u8& byte : tile->bytes) byte = static_cast<u8>(random() % 127);  // no NaN of fp8
  for (int thread = 0; thread < 256; ++thread) {
    const cuda::Position at = cuda::Position::of(static_cast<u32>(thread));
    Operand operand;
    cuda::load_codes(at, operand, *tile, scales_of(at), decode, first);
    for (int e = 0; e < Operand::size; ++e) {
      const int row = Operand::row(at, e), col = first + Operand::col(at, e);
      const T got = bit_cast<T>(static_cast<u16>(operand.x[e / 2] >> (e % 2 * 16)));
      ASSERT_EQ(static_cast<float>(got), static_cast<float>(T(expected(*tile, row, col)))) << "row " << row << ", column " << col;
    }
  }
}
template <class T>
void expect_decoded_pairs(std::mt19937_64& random) {
  const auto in_registers = [](const cuda::Position& at) { return InRegisters{at}; };
  const auto none = [](const cuda::Position&) { return Unscaled{}; };
  const auto from_zero = [](const auto& tile, int row, int col) {
    constexpr int count = codes_in<decltype(tile.get(0, 0))>;
    const auto code = static_cast<float>(tile.get(row, col / count).get(col % count));
    return (code - InRegisters::zero(row, col / 32)) * InRegisters::scale(row, col / 32);
  };
  const auto as_stored = [](const auto& tile, int row, int col) { return static_cast<float>(tile.get(row, col)); };
  for (const int first : {0, 64, 128}) {
    expect_decoded_pairs<T, u4x2>(random, first, in_registers, FromZero{}, from_zero);
    expect_decoded_pairs<T, u2x4>(random, first, in_registers, FromZero{}, from_zero);
    expect_decoded_pairs<T, i8>(random, first, none, AsStored{}, as_stored);
    expect_decoded_pairs<T, fp8_e4m3>(random, first, none, AsStored{}, as_stored);
  }
}
TEST(OperandLayout, IsFilledWithPairsOfDecodedCodes) {
  std::mt19937_64 random = random_engine();
  expect_decoded_pairs<bf16>(random);
  expect_decoded_pairs<f16>(random);
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

testing::AssertionResult equal_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.to(Device::cpu()), y = b.to(Device::cpu());
  const auto bytes = static_cast<std::size_t>(size_of(x.dtype())), count = static_cast<std::size_t>(x.numel());
  const char *const x_bytes = static_cast<const char*>(x.data()), *const y_bytes = static_cast<const char*>(y.data());
  std::size_t differing = 0, first = 0;
  for (std::size_t i = count; i-- > 0;) {
    if (std::memcmp(x_bytes + i * bytes, y_bytes + i * bytes, bytes) == 0) continue;
    first = i;
    ++differing;
  }
  if (differing == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << differing << " of " << count << " elements differ, from number " << first << " on";
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
  using On = typename PackedProduct<T, Sum, Codes, Scaling, Decode, BM, BN>::template On<cpu::Target>;
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
    launch_packed_product<T, Sum, Codes, Scaling, Decode, BM, BN>(
        Stream::standard(device),
        {.w = w_there, .x = x_there, .scales = scales_there, .row_scales = row_scales_there, .out = there, .depth = k});
    if (repetition == 0) first = there;
    ASSERT_TRUE(equal_bits(first, there)) << "repetition " << repetition;
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
  if (device.is_cuda())  // several tiles for each block
    expect_packed_product<bf16, float, i4x2, Transposed, TimesScale, 128, 64>(device, random, 8192, 1000, 64);
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
    launch_narrow_chain<T, Sum, M, N, D>(Stream::standard(device),
                                         {.a = a_there, .b = b_there, .c = c_there, .out = there, .factor = factor});
    if (repetition == 0) first = there;
    ASSERT_TRUE(equal_bits(first, there)) << "repetition " << repetition;
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
  if (device.is_cuda())
    expect_narrow_chain<i8, i32, 64, 64, 64>(device, random, 100000, 16, 127, 1.0f / 1024);  // several tiles for each block
}

// Rows gathered and scattered

template <class T>
Tensor tensor_of(const std::vector<T>& values, Device device) {
  const Tensor host =
      Tensor::empty({std::max<std::int64_t>(static_cast<std::int64_t>(values.size()), 1)}, dtype_of<T>, Stream::standard(Device::cpu()));
  std::copy(values.begin(), values.end(), host.data<T>());
  return host.to(device);
}

template <class T, class Out, bool Reduce, int BM, int BN>
void expect_expert_product(Device device, std::mt19937_64& random, int tokens, int n, int k, int pad) {
  SCOPED_TRACE(tw::format("{} tokens, {} columns, depth {}, rows {} apart", tokens, n, k, k + pad));
  constexpr int kExperts = 3, kTopK = 2;
  const auto uniform = [&] { return static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 512; };
  const int choices = tokens * kTopK, blocks = ceil_div(choices, BM) + 2;
  std::vector<i32> ids = random_list(random, blocks, BM, choices), experts(static_cast<std::size_t>(blocks));
  for (i32& expert : experts) expert = static_cast<i32>(random() % kExperts);
  std::vector<float> weights(static_cast<std::size_t>(choices));
  for (float& weight : weights) weight = uniform();
  Matrix<T> x(tokens, k, k + pad), w(kExperts * n, k, k + pad);
  x.fill([&] { return to<T>(uniform()); });
  w.fill([&] { return to<T>(uniform()); });
  const int rows = Reduce ? tokens : choices;
  const Tensor x_there = x.on(device), w_there = w.on(device), ids_there = tensor_of(ids, device),
               experts_there = tensor_of(experts, device), weights_there = tensor_of(weights, device);
  const Tensor experts_weights =
      Tensor::borrow(w_there.data(), {kExperts, n, k}, dtype_of<T>, device, {std::int64_t{n} * (k + pad), k + pad, 1});
  Tensor first;
  for (int repetition = 0; repetition < kTimes; ++repetition) {
    const Tensor there = Reduce ? Tensor::zeros({rows, n}, dtype_of<Out>, Stream::standard(device))
                                : Tensor::poisoned({rows, n}, dtype_of<Out>, Stream::standard(device));
    launch_expert_product<T, Out, Reduce, BM, BN>(Stream::standard(device), {.x = x_there,
                                                                             .w = experts_weights,
                                                                             .ids = ids_there,
                                                                             .experts = experts_there,
                                                                             .weights = weights_there,
                                                                             .out = there,
                                                                             .top_k = kTopK});
    if (repetition == 0) first = there;
    if (!Reduce) {
      ASSERT_TRUE(equal_bits(first, there)) << "repetition " << repetition;
    }
    Matrix<Out> out(rows, n);
    out.take(there);
    std::vector<double> sums(static_cast<std::size_t>(rows) * static_cast<std::size_t>(n)), magnitudes(sums.size()), terms(sums.size());
    for (std::size_t entry = 0; entry < ids.size(); ++entry) {
      if (ids[entry] < 0) continue;
      const int token = ids[entry] / kTopK, row = Reduce ? token : ids[entry], expert = experts[entry / BM];
      const double weight = weights[static_cast<std::size_t>(ids[entry])];
      for (int c = 0; c < n; ++c) {
        double sum = 0, magnitude = 0;
        for (int e = 0; e < k; ++e) {
          const double product = static_cast<double>(x.value(token, e)) * w.value(expert * n + c, e);
          sum += product;
          magnitude += std::abs(product);
        }
        const auto at = static_cast<std::size_t>(row * n + c);
        sums[at] += weight * sum;
        magnitudes[at] += std::abs(weight) * magnitude;
        terms[at] += std::abs(weight * sum);
      }
    }
    // Roundings to bf16: of every term and of every sum of them.
    const double roundings = std::is_same_v<Out, float> ? 0 : (Reduce ? 2 * kTopK : 1) * std::ldexp(1.01, -8);
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < n; ++c) {
        const auto at = static_cast<std::size_t>(r * n + c);
        const double allowed = std::ldexp(magnitudes[at] * (k + 2 + kTopK), -23) + terms[at] * roundings;
        ASSERT_LE(std::abs(static_cast<double>(out.value(r, c)) - sums[at]), allowed)
            << r << ", " << c << ": " << out.value(r, c) << " for " << sums[at];
      }
    }
  }
}

TEST_P(Copies, ExpertsTakeAndGiveRowsByTheirNumbers) {
  for (const auto& [tokens, n, k, pad] : {std::tuple{150, 128, 256, 0}, {70, 72, 72, 8}, {33, 67, 65, 0}, {1, 5, 3, 5}}) {
    expect_expert_product<bf16, bf16, false, 128, 64>(device, random, tokens, n, k, pad);
    expect_expert_product<bf16, float, true, 64, 64>(device, random, tokens, n, k, pad);
    expect_expert_product<f16, bf16, true, 64, 32>(device, random, tokens, n, k, pad);
  }
  if (device.is_cuda()) {  // several tiles for each block
    expect_expert_product<bf16, bf16, false, 128, 64>(device, random, 5000, 520, 64, 0);
    expect_expert_product<bf16, float, true, 64, 64>(device, random, 5000, 520, 64, 0);
  }
}

template <class T, int R, int C>
void expect_gathered_rows(Device device, std::mt19937_64& random, int rows, int cols, int count, int pad) {
  SCOPED_TRACE(tw::format("{} of {} rows of {} columns, {} apart", count, rows, cols, cols + pad));
  constexpr int kBatch = 2;
  Matrix<T> in(kBatch * rows, cols, cols + pad);
  in.fill([&] { return to<T>(static_cast<float>(1 + random() % 100)); });  // no zeros
  std::vector<i32> ids(static_cast<std::size_t>(count));
  for (i32& id : ids) id = static_cast<i32>(random() % static_cast<unsigned>(2 * rows)) - rows / 2;
  const Tensor in_rows = in.on(device), ids_there = tensor_of(ids, device);
  const Tensor in_there =
      Tensor::borrow(in_rows.data(), {kBatch, rows, cols}, dtype_of<T>, device, {std::int64_t{rows} * (cols + pad), cols + pad, 1});
  for (int repetition = 0; repetition < kTimes; ++repetition) {
    const Tensor there = Tensor::poisoned({kBatch, count, cols}, DType::f32, Stream::standard(device));
    launch_kernel<ThroughGather<T, R, C>>(device, {ceil_div(count, R), ceil_div(cols, C), kBatch}, [&](auto& bind, auto& p) {
      bind(p.in, in_there);
      bind(p.out, there);
      p.ids = ids_there.data<i32>();
    });
    const Tensor here = there.to(Device::cpu());
    for (int batch = 0; batch < kBatch; ++batch) {
      for (int r = 0; r < count; ++r) {
        const int row = ids[static_cast<std::size_t>(r)];
        for (int c = 0; c < cols; ++c) {
          const float expected = row >= 0 && row < rows ? in.value(batch * rows + row, c) : 0.0f;
          ASSERT_EQ(here.data<float>()[(batch * count + r) * cols + c], expected) << batch << ": " << r << ", " << c;
        }
      }
    }
  }
}

TEST_P(Copies, GatheredTilesHaveZerosForHoles) {
  for (const auto& [rows, cols, count, pad] : {std::tuple{100, 128, 300, 0}, {50, 136, 200, 8}, {33, 67, 130, 0}, {1, 1, 1, 0}}) {
    expect_gathered_rows<bf16, 64, 64>(device, random, rows, cols, count, pad);
    expect_gathered_rows<bf16, 128, 48>(device, random, rows, cols, count, pad);
    expect_gathered_rows<float, 64, 64>(device, random, rows, cols, count, pad);
  }
  if (device.is_cuda()) expect_gathered_rows<bf16, 64, 64>(device, random, 3000, 256, 20000, 0);  // several tiles for each block
}

TEST_P(Copies, RowsAreGatheredIntoTilesThatAreSummedOver) {
  for (const auto& [m, n, depth, count] : {std::tuple{64, 64, 200, 150}, {61, 80, 100, 333}, {3, 7, 9, 1}}) {
    SCOPED_TRACE(tw::format("{} x {}, {} of {} rows", m, n, count, depth));
    Matrix<bf16> y(count, m, 64), x(depth, n, 80);
    const auto integer = [&] { return to<bf16>(static_cast<float>(static_cast<int>(random() % 9) - 4)); };  // their sums are exact
    y.fill(integer), x.fill(integer);
    std::vector<i32> ids(static_cast<std::size_t>(count));
    for (i32& id : ids) id = static_cast<i32>(random() % static_cast<unsigned>(depth + depth / 4 + 1)) - depth / 8 - 1;  // some are outside
    const Tensor y_there = y.on(device), x_there = x.on(device), ids_there = tensor_of(ids, device);
    const Tensor there = Tensor::poisoned({m, n}, DType::f32, Stream::standard(device));
    launch_kernel<GatheredDepth<bf16, 64, 64>>(device, {ceil_div(m, 64), ceil_div(n, 64)}, [&, count = count](auto& bind, auto& p) {
      bind(p.y, y_there);
      bind(p.x, x_there);
      bind(p.out, there);
      p.ids = ids_there.data<i32>();
      p.count = count;
    });
    Matrix<float> out(m, n);
    out.take(there);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        double sum = 0;
        for (int e = 0; e < count; ++e) {
          const int row = ids[static_cast<std::size_t>(e)];
          if (row >= 0 && row < depth) sum += static_cast<double>(y.value(e, i)) * x.value(row, j);
        }
        ASSERT_EQ(out(i, j), sum) << i << ", " << j;
      }
    }
  }
}

template <class T, bool Add, int R, int C>
void expect_scattered_rows(Device device, std::mt19937_64& random, int rows, int cols, int targets, int pad) {
  SCOPED_TRACE(tw::format("{} x {} to {} rows", rows, cols, targets));
  Matrix<float> in(rows, cols);
  in.fill([&] { return static_cast<float>(static_cast<int>(random() % 17) - 8); });  // all sums of which are exact in T
  std::vector<i32> ids(static_cast<std::size_t>(rows));
  std::iota(ids.begin(), ids.end(), -2);
  std::shuffle(ids.begin(), ids.end(), random);
  if (Add)
    for (i32& id : ids) id = id % std::max(targets, 1);
  Matrix<T> out(targets, cols, cols + pad);
  out.fill([] { return to<T>(3.0f); });
  const Tensor in_there = in.on(device), there = out.on(device), ids_there = tensor_of(ids, device);
  launch_kernel<ScatterRows<T, Add, R, C>>(device, {ceil_div(rows, R), ceil_div(cols, C)}, [&](auto& bind, auto& p) {
    bind(p.in, in_there);
    bind(p.out, there);
    p.ids = ids_there.data<i32>();
  });
  Matrix<T> got(targets, cols, cols + pad);
  got.take(there);
  std::vector<double> expected(static_cast<std::size_t>(targets) * static_cast<std::size_t>(cols), 3.0);
  for (int r = 0; r < rows; ++r) {
    const int row = ids[static_cast<std::size_t>(r)];
    if (row < 0 || row >= targets) continue;
    for (int c = 0; c < cols; ++c) {
      double& sum = expected[static_cast<std::size_t>(row * cols + c)];
      sum = in(r, c) + (Add ? sum : 0);
    }
  }
  for (int r = 0; r < targets; ++r)
    for (int c = 0; c < cols; ++c) ASSERT_EQ(got.value(r, c), expected[static_cast<std::size_t>(r * cols + c)]) << r << ", " << c;
}

TEST_P(Copies, RowsLeaveForRowsByTheirNumbers) {
  for (const auto& [rows, cols, pad] : {std::tuple{64, 256, 0}, {29, 251, 0}, {30, 248, 8}, {1, 1, 3}}) {
    expect_scattered_rows<float, false, 8, 256>(device, random, rows, cols, 40, pad);
    expect_scattered_rows<bf16, false, 8, 128>(device, random, rows, cols, 40, pad);
    expect_scattered_rows<float, true, 8, 256>(device, random, rows, cols, 7, pad);
    expect_scattered_rows<f16, true, 16, 64>(device, random, rows, cols, 7, pad);
    expect_scattered_rows<bf16, true, 8, 128>(device, random, rows, cols, 7, pad);
  }
}

// A kernel that keeps a slot's address and multiplies what is on its way there: on a GPU the copies may not have arrived.
struct EarlyReader {
  template <class Target>
  struct On {
    using Piece = Shared<Target, bf16, 64, 64>;
    static constexpr int rows = 64;
    struct Params {
      Global<Target, const bf16, Piece> in;
      bool early;
    };
    struct Memory {
      GatherRing<Target, Piece, 1> gathered;
      Ring<Target, Piece, 2> plain;
      explicit constexpr Memory(auto& block) : gathered(block), plain(block) {}
    };
    struct State {
      Fragment<Target, float, 64, 64> acc;
    };
    static int steps(const Params&, Tile) { return 2; }
    static void load(auto& producer, const Params& p, Tile, int step, Memory& memory) {
      producer.put(memory.gathered, [&](auto copy, Piece& piece) {
        copy.gather(
            p.in, piece, [&](int row) { return 64 * step + row; }, 0);
      });
      producer.put(memory.plain, [&](auto copy, Piece& piece) { copy.tile(p.in, piece, 0, 0); });
    }
    static void compute(auto& block, const Params& p, Tile, Memory& memory, State& state) {
      auto& gathered = block.take(memory.gathered);
      block.take(memory.plain);
      block.release(memory.gathered);
      block.release(memory.plain);
      auto& plain = block.take(memory.plain);  // loads the second step
      if (!p.early) block.take(memory.gathered);
      block.mma(state.acc, gathered, plain, true);
      block.wait(leave<0>, state.acc);
      if (p.early) block.take(memory.gathered);
      block.release(memory.gathered);
      block.release(memory.plain);
    }
    static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};

TEST(CopyErrors, AGatheredSlotIsNotReadBeforeItIsTaken) {
  const bool before = cpu::poison_released_slots();
  cpu::set_poison_released_slots(true);
  const Tensor in = Tensor::zeros({128, 64}, DType::bf16);
  const auto run = [&](bool early) {
    launch<EarlyReader>(Stream::standard(Device::cpu()), {}, [&](auto& bind, auto& p) {
      bind(p.in, in);
      p.early = early;
    });
  };
  EXPECT_NO_THROW(run(false));
  expect_error<Error>([&] { run(true); }, {"schedule", "a product reads a slot that was released"});
  cpu::set_poison_released_slots(before);
}

// Copies from column `col` on. TMA and cp.async move whole pieces of 16 bytes: with any other column an H200 stops with an illegal
// instruction.
enum class CopyKind { tile, part, vector, gather };
template <CopyKind kind>
struct CopyFrom {
  template <class Target>
  struct On {
    using Piece = Shared<Target, bf16, 64, 64>;
    using Line = SharedVector<Target, bf16, 64>;
    using Slot = conditional<kind == CopyKind::vector, Line, Piece>;
    static constexpr int rows = 64;
    struct Params {
      Global<Target, const bf16, Slot> in;
      int col;
    };
    struct Memory {
      conditional<kind == CopyKind::gather, GatherRing<Target, Slot, 1>, Ring<Target, Slot, 1>> ring;
      explicit constexpr Memory(auto& block) : ring(block) {}
    };
    struct State {};
    static int steps(const Params&, Tile) { return 1; }
    static void load(auto& producer, const Params& p, Tile, int, Memory& memory) {
      producer.put(memory.ring, [&](auto copy, Slot& slot) {
        if constexpr (kind == CopyKind::tile) copy.tile(p.in, slot, 0, p.col);
        if constexpr (kind == CopyKind::part) copy.part(p.in, slot, 0, 64, 0, p.col);
        if constexpr (kind == CopyKind::vector) copy.vector(p.in, slot, 0, p.col);
        if constexpr (kind == CopyKind::gather)
          copy.gather(
              p.in, slot, [](int row) { return row; }, p.col);
      });
    }
    static void compute(auto& block, const Params&, Tile, Memory& memory, State&) {
      block.take(memory.ring);
      block.release(memory.ring);
    }
    static void finish(auto&, const Params&, Tile, Memory&, State&) {}
  };
};
template <CopyKind kind>
void expect_whole_pieces() {
  const Tensor in = Tensor::zeros({64, 128}, DType::bf16);
  const auto bind_from = [&](int col) {
    return [&, col](auto& bind, auto& p) {
      bind(p.in, in);
      p.col = col;
    };
  };
  for (const int col : {0, 8, 120, 128}) {
    EXPECT_NO_THROW(launch_cpu<CopyFrom<kind>>({}, bind_from(col))) << col;
    EXPECT_NO_THROW(analyze<CopyFrom<kind>>({}, bind_from(col))) << col;
  }
  for (const int col : {1, 4, 127}) {
    expect_error<Error>([&] { launch_cpu<CopyFrom<kind>>({}, bind_from(col)); }, {"schedule", "no multiple of 16 bytes"});
    expect_error<Error>([&] { analyze<CopyFrom<kind>>({}, bind_from(col)); }, {"no multiple of 16 bytes"});
  }
}
TEST(CopyErrors, CopiesBeginAtWholePieces) {
  expect_whole_pieces<CopyKind::tile>();
  expect_whole_pieces<CopyKind::part>();
  expect_whole_pieces<CopyKind::vector>();
  expect_whole_pieces<CopyKind::gather>();
}

// Segments

const std::vector<std::vector<int>> kSegmentations = {
    {300, 1, 0, 255, 256, 257, 0}, {0, 0, 0}, {700}, {0, 64, 0, 0, 5, 1000}, {1, 1, 1, 1, 1, 1, 1, 1, 1}};

/// Each row of each segment is in one tile, no tile has rows of two segments, and the tiles of a cluster are in one segment.
TEST(Segments, GiveEveryRowToOneTile) {
  for (const std::vector<int>& sizes : kSegmentations) {
    for (const int before : {0, 150}) {  // rows that are in no segment
      std::vector<i32> offsets = offsets_of(sizes);
      for (i32& offset : offsets) offset += before;
      const int rows = offsets.back() + before;
      const Segments<cpu::Target> segments{offsets.data(), static_cast<int>(sizes.size()), rows};
      for (const int tile_rows : {1, 64, 128, 100}) {
        for (const int cluster : {1, 2, 4}) {
          SCOPED_TRACE(tw::format("{} segments from row {} on, tiles of {}, clusters of {}", sizes.size(), before, tile_rows, cluster));
          std::vector<int> owners(static_cast<std::size_t>(rows));
          const int tiles = segments.tiles(rows, segments.count, tile_rows, cluster);
          ASSERT_EQ(tiles % cluster, 0);
          for (int m = 0; m < tiles; ++m) {
            const auto part = segments.find(m, tile_rows, cluster), first = segments.find(m / cluster * cluster, tile_rows, cluster);
            ASSERT_EQ(part.segment, first.segment);
            ASSERT_EQ(part.empty, first.empty);
            ASSERT_EQ(part.first, first.first + m % cluster * tile_rows);
            ASSERT_EQ(part.end, offsets[static_cast<std::size_t>(part.segment + 1)]);
            const bool has_rows = first.first >= offsets[static_cast<std::size_t>(part.segment)] && first.first < part.end;
            ASSERT_EQ(part.empty, !has_rows);
            if (part.empty) continue;
            for (int row = part.first; row < std::min(part.first + tile_rows, part.end); ++row) ++owners[static_cast<std::size_t>(row)];
          }
          for (int row = 0; row < rows; ++row)
            ASSERT_EQ(owners[static_cast<std::size_t>(row)], row >= before && row < offsets.back()) << "owners of row " << row;
        }
      }
    }
  }
}

TEST(Segments, CutOffWhatIsOutsideTheTensor) {
  const std::vector<i32> offsets = {-5, 3, 50, 40, 2000000000};
  const Segments<cpu::Target> segments{offsets.data(), 4, 60};
  const std::pair<int, int> expected[] = {{0, 3}, {3, 47}, {50, 0}, {40, 20}};
  for (int g = 0; g < 4; ++g) {
    EXPECT_EQ(segments.at(g).begin, expected[g].first);
    EXPECT_EQ(segments.at(g).size, expected[g].second);
  }
}

template <class T, int BM, int BN, int Cluster>
void expect_grouped_product(Device device, std::mt19937_64& random, const std::vector<int>& sizes, int n, int k, int pad) {
  SCOPED_TRACE(tw::format("{} segments, {} columns, depth {}, rows {} apart", sizes.size(), n, k, k + pad));
  const std::vector<i32> offsets = offsets_of(sizes);
  constexpr int kBehind = 40;  // rows that are in no segment
  const int rows = offsets.back() + kBehind, segments = static_cast<int>(sizes.size());
  const auto normal = [&] { return to<T>(static_cast<float>(static_cast<int>(random() % 2001) - 1000) / 512); };
  Matrix<T> x(rows, k, k + pad), w(segments * n, k, k + pad);
  x.fill(normal), w.fill(normal);
  const Tensor x_there = x.on(device), w_rows = w.on(device), offsets_there = tensor_of(offsets, device);
  const Tensor w_there = Tensor::borrow(w_rows.data(), {segments, n, k}, dtype_of<T>, device, {std::int64_t{n} * (k + pad), k + pad, 1});
  Tensor first;
  for (int repetition = 0; repetition < kTimes; ++repetition) {
    const Tensor there = Tensor::poisoned({rows, n}, dtype_of<T>, Stream::standard(device));
    launch_grouped_product<T, BM, BN, Cluster>(Stream::standard(device),
                                               {.x = x_there, .w = w_there, .offsets = offsets_there, .out = there});
    if (repetition == 0) first = there;
    ASSERT_TRUE(equal_bits(first, there)) << "repetition " << repetition;
  }
  Matrix<T> out(rows, n);
  out.take(first);
  for (int r = offsets.back(); r < rows; ++r)
    for (int c = 0; c < n; ++c) ASSERT_TRUE(std::isnan(out.value(r, c))) << r << ", " << c << " was written";
  for (int g = 0; g < segments; ++g) {
    for (int r = offsets[static_cast<std::size_t>(g)]; r < offsets[static_cast<std::size_t>(g + 1)]; ++r) {
      for (int c = 0; c < n; ++c) {
        double sum = 0, magnitude = 0;
        for (int e = 0; e < k; ++e) {
          const double product = static_cast<double>(x.value(r, e)) * w.value(g * n + c, e);
          sum += product;
          magnitude += std::abs(product);
        }
        const double allowed = std::ldexp(magnitude * (k + 2), -23) + std::abs(sum) * std::ldexp(1.01, -8);
        ASSERT_LE(std::abs(static_cast<double>(out.value(r, c)) - sum), allowed)
            << r << ", " << c << ": " << out.value(r, c) << " for " << sum;
      }
    }
  }
}

TEST_P(Copies, ProductsOfRaggedSegmentsAlone) {
  for (const std::vector<int>& sizes : kSegmentations) expect_grouped_product<bf16, 64, 32, 1>(device, random, sizes, 72, 136, 0);
  expect_grouped_product<bf16, 64, 32, 1>(device, random, {3, 100, 0, 70}, 33, 65, 1);
  if (device.is_cuda()) expect_grouped_product<bf16, 64, 32, 1>(device, random, random_sizes(random, 40, 1000), 256, 64, 0);
}

TEST_P(Copies, ProductsOfRaggedSegmentsInClusters) {
  for (const std::vector<int>& sizes : kSegmentations) expect_grouped_product<bf16, 64, 64, 2>(device, random, sizes, 72, 136, 8);
  expect_grouped_product<bf16, 64, 64, 2>(device, random, {3, 300, 0, 70}, 33, 65, 0);
  if (device.is_cuda()) expect_grouped_product<bf16, 64, 64, 2>(device, random, random_sizes(random, 40, 1000), 520, 64, 0);
}

TEST_P(Copies, SumsOverRaggedSegments) {
  std::vector<std::vector<int>> all = kSegmentations;
  if (device.is_cuda()) all.push_back(random_sizes(random, 600, 130));
  for (const std::vector<int>& sizes : all) {
    const std::vector<i32> offsets = offsets_of(sizes);
    const int rows = offsets.back(), segments = static_cast<int>(sizes.size()), m = 70, n = 40;
    SCOPED_TRACE(tw::format("{} rows in {} segments", rows, segments));
    Matrix<bf16> y(rows, m, 72), x(rows, n);
    const auto integer = [&] { return to<bf16>(static_cast<float>(static_cast<int>(random() % 9) - 4)); };  // their sums are exact
    y.fill(integer), x.fill(integer);
    // NaN in a segment stays there.
    const int poisoned = static_cast<int>(random() % static_cast<unsigned>(segments));
    for (int r = offsets[static_cast<std::size_t>(poisoned)]; r < offsets[static_cast<std::size_t>(poisoned + 1)]; ++r)
      for (int c = 0; c < n; ++c) x(r, c) = to<bf16>(kNaN), y(r, c) = to<bf16>(kNaN);
    const Tensor y_there = y.on(device), x_there = x.on(device), offsets_there = tensor_of(offsets, device);
    const Tensor there = Tensor::poisoned({segments, m, n}, DType::f32, Stream::standard(device));
    launch_ragged_depth<bf16, 64, 32>(Stream::standard(device), {.y = y_there, .x = x_there, .offsets = offsets_there, .out = there});
    const Tensor here = there.to(Device::cpu());
    for (int g = 0; g < segments; ++g) {
      if (g == poisoned && sizes[static_cast<std::size_t>(g)] > 0) continue;
      for (int i = 0; i < m; ++i) {
        for (int j = 0; j < n; ++j) {
          double sum = 0;
          for (int r = offsets[static_cast<std::size_t>(g)]; r < offsets[static_cast<std::size_t>(g + 1)]; ++r)
            sum += static_cast<double>(y.value(r, i)) * x.value(r, j);
          ASSERT_EQ(here.data<float>()[(g * m + i) * n + j], sum) << g << ": " << i << ", " << j;
        }
      }
    }
  }
}

TEST_P(Copies, ProductsOfListsOfBlocks) {
  constexpr int kBM = 64, kBK = 64, kRows = 5, kCols = 6, n = 100;
  std::vector<i32> begins = {0}, blocks;
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kCols; ++col)
      if (row != 2 && random() % 3 == 0) blocks.push_back(col);
    begins.push_back(static_cast<i32>(blocks.size()));
  }
  const int count = static_cast<int>(blocks.size());
  Matrix<f16> a(std::max(count, 1) * kBM, kBK), b(kCols * kBK, n, 104);
  const auto integer = [&] { return to<f16>(static_cast<float>(static_cast<int>(random() % 9) - 4)); };
  a.fill(integer), b.fill(integer);
  const Tensor a_there = a.on(device).reshape({std::max(count, 1), kBM, kBK}), b_there = b.on(device),
               begins_there = tensor_of(begins, device), blocks_there = tensor_of(blocks, device);
  const Tensor there = Tensor::poisoned({kRows * kBM, n}, DType::f32, Stream::standard(device));
  launch_kernel<BlockSparseProduct<f16, kBM, 64>>(device, {kRows, ceil_div(n, 64)}, [&](auto& bind, auto& p) {
    bind(p.a, a_there);
    bind(p.b, b_there);
    bind(p.out, there);
    p.lists = {begins_there.data<i32>(), blocks_there.data<i32>()};
  });
  Matrix<float> out(kRows * kBM, n);
  out.take(there);
  for (int r = 0; r < kRows * kBM; ++r) {
    for (int c = 0; c < n; ++c) {
      double sum = 0;
      for (int block = begins[static_cast<std::size_t>(r / kBM)]; block < begins[static_cast<std::size_t>(r / kBM + 1)]; ++block)
        for (int e = 0; e < kBK; ++e)
          sum += static_cast<double>(a.value(block * kBM + r % kBM, e)) * b.value(blocks[static_cast<std::size_t>(block)] * kBK + e, c);
      ASSERT_EQ(out(r, c), sum) << r << ", " << c;
    }
  }
}

TEST(CopyErrors, BlocksOfAClusterTakeEquallyManySteps) {
  const std::vector<i32> offsets = offsets_of({64, 64});
  const Tensor x = Tensor::zeros({128, 64}, DType::bf16), w = Tensor::zeros({2, 64, 64}, DType::bf16),
               out = Tensor::zeros({128, 64}, DType::bf16);
  const auto run = [&]<class Kernel>(Kernel, int tiles) {
    launch_cpu<Kernel>({tiles, 1}, [&](auto& bind, auto& p) {
      bind(p.x, x);
      bind(p.w, w);
      bind(p.out, out);
      p.segments = {offsets.data(), 2, 128};
    });
  };
  EXPECT_NO_THROW(run(GroupedProduct<bf16, 64, 64, 2>{}, Segments<cpu::Target>::tiles(128, 2, 64, 2)));
  expect_error<Error>([&] { run(GroupedProduct<bf16, 64, 64, 2, 1>{}, 4); }, {"schedule", "cluster", "different numbers of steps"});
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
  // In each of a tile's four steps the slot is written, and two times 64 columns of codes, 128 scales and a tile of X are read, the last by
  // two warpgroups.
  constexpr int kSlot = 128 * 64 + 2 * 64 * 64 * 2 + 8 * 128 * 2, kOperand = 128 * 64 / 2 + 128 * 2 + 2 * 64 * 64 * 2;
  EXPECT_EQ(counts.shared_traffic, 4u * kTilesN * (kM / 128) * (kSlot + 2 * kOperand));
  constexpr int kScaleRows = 8 + 6 + 4 + 2;  // a tile has 8, from every second one on
  EXPECT_EQ(counts.global_read, kTilesN * (kM * kK / 2 + kScaleRows * kM * 2) + kM / 128 * kN * kK * 2);
}

// Rows that are gathered and scattered count where their numbers lie inside the tensor.
TEST(CopyAnalysis, CountsRowsByTheirNumbers) {
  constexpr int kN = 64, kK = 128, kTokens = 50;
  const float weight = 1;
  std::vector<i32> ids(64, -1), experts = {1};
  std::iota(ids.begin(), ids.begin() + 40, 7);  // two for each of the tokens 3 to 23
  const auto count = [&]<class Kernel>(Kernel) {
    return analyze<Kernel>({1, 1}, [&](auto& bind, auto& p) {
      bind(p.x, placeholder({kTokens, kK}, DType::bf16));
      bind(p.w, placeholder({3, kN, kK}, DType::bf16));
      bind(p.out, placeholder({2 * kTokens, kN}, DType::f32));
      p.ids = ids.data();
      p.experts = experts.data();
      p.weights = &weight;
      p.count = 64;
      p.top_k = 2;
    });
  };
  const Analysis scattered = count(ExpertProduct<bf16, float, false, 64, 64>{}), added = count(ExpertProduct<bf16, float, true, 64, 64>{});
  EXPECT_EQ(scattered.global_written, 40u * kN * 4);
  EXPECT_EQ(added.global_written, 40u * kN * 4);
  EXPECT_EQ(added.global_read - scattered.global_read, 40u * kN * 4);
  EXPECT_EQ(added.operations.f32 - scattered.operations.f32, 40u * kN);
  const std::uint64_t tiles = (40 + kN) * kK * 2;  // X and W; the lists are a few bytes
  EXPECT_GE(scattered.global_read, tiles);
  EXPECT_LE(scattered.global_read, tiles + 4096);
  EXPECT_EQ(scattered.operations.inside[static_cast<std::size_t>(OperandType::bf16)], 2u * 40 * kN * kK);
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
    const bool multiplies = kernel.module.loads && specs[i].type.find("::Through") == std::string::npos;
    EXPECT_EQ(kernel.tensor_core_instruction != "", multiplies) << specs[i].name;
  });
}

}  // namespace
}  // namespace tw::test
