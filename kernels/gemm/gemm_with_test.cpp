// gemm_with(): epilogues of a user's against loops in double.

#include "tilewave/gemm_with.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "runtime/format.hpp"
#include "runtime/target.hpp"
#include "tests/expect_error.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tests/user_epilogues.tile.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::test;

struct WithShape {
  int m, n, k, batch;
  bool a_rows, b_rows;  ///< A is stored [K, M]; B is stored [K, N]
  std::int64_t gap;     ///< elements between one slice and the next: TMA takes none that is odd
  int tiles() const { return ceil_div(n, kGemmWithColumns); }
};

/// Operands of small integers, whose product is exact in every type and has many equal elements.
struct WithOperands {
  WithOperands(const WithShape& s, DType dtype, Device device, std::mt19937_64& random)
      : a_stored({s.batch, s.m, s.k}, dtype, device, placement(s.a_rows, s.gap)),
        b_stored({s.batch, s.k, s.n}, dtype, device, placement(!s.b_rows, s.gap)),
        d(static_cast<std::size_t>(s.batch) * s.m * s.n) {
    const std::vector<float> x = fill(a_stored, random), y = fill(b_stored, random);
    for (int i = 0; i < s.batch; ++i) {
      for (int row = 0; row < s.m; ++row) {
        for (int col = 0; col < s.n; ++col) {
          double sum = 0;
          for (int k = 0; k < s.k; ++k) sum += double{x[(i * s.m + row) * s.k + k]} * y[(i * s.k + k) * s.n + col];
          d[(i * s.m + row) * s.n + col] = sum;
        }
      }
    }
  }
  static Placement placement(bool transposed, std::int64_t gap) {
    return {.order = transposed ? std::vector{0, 2, 1} : std::vector{0, 1, 2}, .gap = gap, .align = gap == 0 ? 16 : 1};
  }
  static std::vector<float> fill(PlacedTensor& tensor, std::mt19937_64& random) {
    std::uniform_int_distribution<int> distribution(-3, 3);
    std::vector<float> values(static_cast<std::size_t>(tensor.tensor().numel()));
    for (float& x : values) x = static_cast<float>(distribution(random));
    tensor.fill(values);
    return values;
  }
  PlacedTensor a_stored, b_stored;
  std::vector<double> d;  ///< [batch, M, N]
};

class GemmWith : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override { skip_unless_present(device); }

  template <class T>
  void check_argmax(const WithShape& s) {
    SCOPED_TRACE(describe(s));
    const WithOperands x(s, dtype_of<T>, device, random);
    PlacedTensor largest({s.batch, s.m, s.tiles()}, DType::f32, device, {.gap = 3}), column({s.batch, s.m, s.tiles()}, DType::i32, device);
    if (!launched([&] {
          gemm_with<RowArgmax, T>(x.a_stored, x.b_stored, [&](auto& bind, auto& p) {
            bind(p.largest, largest);
            bind(p.column, column);
            p.columns = s.n;
          });
        }))
      return;
    EXPECT_TRUE(largest.gaps_intact());
    EXPECT_TRUE(column.gaps_intact());
    const std::vector<double> values = largest.values(), columns = column.values();
    for (std::size_t i = 0; i < values.size(); ++i) {
      const std::size_t row = i / s.tiles() * s.n, first = i % s.tiles() * kGemmWithColumns;
      const auto begin = x.d.begin() + row;
      const auto most = std::max_element(begin + first, begin + std::min<std::size_t>(first + kGemmWithColumns, s.n));
      ASSERT_EQ(values[i], *most) << "row " << i / s.tiles() << ", tile " << i % s.tiles();
      ASSERT_EQ(columns[i], most - begin) << "row " << i / s.tiles() << ", tile " << i % s.tiles();
    }
  }
  template <class T>
  void check_cast(const WithShape& s) {
    SCOPED_TRACE(describe(s));
    const WithOperands x(s, dtype_of<T>, device, random);
    const Stream stream = Stream::standard(device);
    const Tensor d = Tensor::poisoned({s.batch, s.m, s.n}, DType::fp8_e4m3, stream);
    PlacedTensor scale({s.batch, s.m, s.tiles()}, DType::f32, device);
    if (!launched([&] {
          gemm_with<CastFp8, T>(x.a_stored, x.b_stored, [&](auto& bind, auto& p) {
            bind(p.d, d);
            bind(p.scale, scale);
          });
        }))
      return;
    EXPECT_TRUE(scale.gaps_intact());
    const Tensor out = d.to(Device::cpu()).to(DType::f32);
    const std::vector<double> scales = scale.values();
    for (std::size_t i = 0; i < scales.size(); ++i) {
      const std::size_t row = i / s.tiles() * s.n, first = i % s.tiles() * kGemmWithColumns;
      const std::size_t end = std::min<std::size_t>(first + kGemmWithColumns, s.n);
      double most = 0;
      for (std::size_t col = first; col < end; ++col) most = std::max(most, std::abs(x.d[row + col]));
      ASSERT_NEAR(scales[i], most > 0 ? most / 448 : 1, 1e-6 * most / 448) << "row " << i / s.tiles() << ", tile " << i % s.tiles();
      for (std::size_t col = first; col < end; ++col) {
        // Half the distance of neighbouring numbers, which have 3 bits after the first; a thousandth of it is f32's.
        const double expected = x.d[row + col], limit = std::max(std::abs(expected) / 16, scales[i] / 1024) * 1.001;
        ASSERT_NEAR(out.data<float>()[row + col] * scales[i], expected, limit) << "element " << row + col;
      }
    }
  }
  static std::string describe(const WithShape& s) {
    return tw::format("{} x {} x {}, batch {}, a_rows {}, b_rows {}, gap {}", s.m, s.n, s.k, s.batch, s.a_rows, s.b_rows, s.gap);
  }
  int up_to(int most) { return 1 + static_cast<int>(random() % static_cast<unsigned>(most)); }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

TEST_P(GemmWith, GivesTilesToTheEpilogue) {
  for (const auto& [a_rows, b_rows] : {std::pair{false, false}, std::pair{false, true}, std::pair{true, true}}) {
    for (const std::int64_t gap : {0, 3}) {
      check_argmax<bf16>({up_to(300), up_to(300), up_to(200), 1, a_rows, b_rows, gap});
      check_cast<bf16>({up_to(300), up_to(300), up_to(200), 1, a_rows, b_rows, gap});
    }
  }
  check_argmax<bf16>({129, 257, 65, 3, false, false, 0});
  check_cast<bf16>({127, 128, 64, 3, false, false, 0});
  check_argmax<bf16>({1, 1, 1, 1, false, false, 0});
  check_cast<f16>({200, 130, 100, 2, false, false, 0});
}

TEST_P(GemmWith, HasZerosWithoutK) {
  check_argmax<bf16>({130, 140, 0, 2, false, false, 0});
  check_cast<bf16>({130, 140, 0, 2, false, false, 0});
}

TEST_P(GemmWith, UsesAnOperandWithoutBatchForAll) {
  const WithShape s{50, 140, 70, 2, false, false, 0};
  const WithOperands x(s, DType::bf16, device, random);
  const auto run = [&](const Tensor& a, std::vector<double>& values, std::vector<double>& columns) {
    PlacedTensor largest({2, 50, 2}, DType::f32, device), column({2, 50, 2}, DType::i32, device);
    gemm_with<RowArgmax, bf16>(a, x.b_stored, [&](auto& bind, auto& p) {
      bind(p.largest, largest);
      bind(p.column, column);
      p.columns = 140;
    });
    values = largest.values();
    columns = column.values();
  };
  const Tensor shared = x.a_stored.tensor().select(0, 1);
  std::vector<double> values, columns, expected, expected_columns;
  if (!launched([&] { run(shared, values, columns); })) return;
  run(Tensor::borrow(shared.data(), {2, 50, 70}, DType::bf16, device, {0, shared.stride(0), shared.stride(1)}), expected, expected_columns);
  EXPECT_EQ(values, expected);
  EXPECT_EQ(columns, expected_columns);
}

TEST_P(GemmWith, RefusesWhatDoesNotFit) {
  const auto tensor = [&](Shape shape, DType dtype) { return Tensor::poisoned(std::move(shape), dtype, Stream::standard(device)); };
  const Tensor a = tensor({4, 8}, DType::bf16), b = tensor({8, 5}, DType::bf16), out = tensor({4, 1}, DType::f32);
  const auto call = [&](const Tensor& x, const Tensor& y) { gemm_with<RowArgmax, bf16>(x, y, [](auto&, auto&) { FAIL() << "launched"; }); };
  expect_error<InvalidArgument>([&] { call(tensor({4, 8}, DType::f16), b); }, {"gemm_with: a is", "bf16"});
  expect_error<InvalidArgument>([&] { call(a, tensor({8, 5}, DType::f32)); }, {"gemm_with: b is", "bf16"});
  expect_error<InvalidArgument>([&] { call(a, tensor({7, 5}, DType::bf16)); }, {"gemm_with: a is", "K, must be equal"});
  expect_error<InvalidArgument>([&] { call(tensor({8}, DType::bf16), b); }, {"gemm_with: a is", "[M, K] or [batch, M, K]"});
  expect_error<InvalidArgument>([&] { call(tensor({2, 4, 8}, DType::bf16), tensor({3, 8, 5}, DType::bf16)); }, {"batches must be equal"});
  // A Global that was forgotten, or is given another type, is named as the epilogue names it.
  expect_error<InvalidArgument>([&] { gemm_with<RowArgmax, bf16>(a, b, [&](auto& bind, auto& p) { bind(p.largest, out); }); },
                                {"RowArgmax: params.column"});
  expect_error<InvalidArgument>([&] { gemm_with<RowArgmax, bf16>(a, b, [&](auto& bind, auto& p) { bind(p.column, out); }); },
                                {"RowArgmax: params.column", "i32"});
  // Nothing to do: the epilogue's parameters are not looked at.
  call(tensor({0, 8}, DType::bf16), b);
  call(a, tensor({8, 0}, DType::bf16));
}

INSTANTIATE_TEST_SUITE_P(Devices, GemmWith, testing::ValuesIn(kDevices), device_name);

TEST(GemmWithSums, OfIntegersAreExact) {
  const Tensor a = Tensor::empty({3, 4}, DType::i8), b = Tensor::empty({4, 2}, DType::i8), d = Tensor::empty({3, 2}, DType::i32);
  for (int i = 0; i < 12; ++i) a.data<signed char>()[i] = static_cast<signed char>(i - 5);
  for (int i = 0; i < 8; ++i) b.data<signed char>()[i] = static_cast<signed char>(100 - i);
  // One of the library's epilogues, which has no file of its own: on the CPU none is needed.
  const auto bind_d = [&](auto& bind, auto& p) { bind(p.d, d); };
  gemm_with<StoreSums<i32>, i8>(a, b, bind_d);
  for (int row = 0; row < 3; ++row) {
    for (int col = 0; col < 2; ++col) {
      int sum = 0;
      for (int k = 0; k < 4; ++k) sum += (row * 4 + k - 5) * (100 - k * 2 - col);
      EXPECT_EQ(d.data<int>()[row * 2 + col], sum);
    }
  }
  expect_error<InvalidArgument>(
      [&] {
        gemm_with<StoreSums<i32>, i8>(Tensor::empty({3, 0}, DType::i8), Tensor::empty({0, 2}, DType::i8), bind_d);
      },
      {"K must be at least 1"});
}

TEST(GemmWithKernels, CompileForSm90a) {
  skip_without_nvrtc();
  // The tiles of 128 rows: of these, threads need the most registers.
  const std::vector<KernelInfo> argmax = gemm_with_kernels<RowArgmax, bf16>(), cast = gemm_with_kernels<CastFp8, bf16>();
  ASSERT_EQ(argmax.size(), 6u);
  EXPECT_EQ((gemm_with_kernels<CastFp8, fp8_e4m3>().size()), 2u);
  for (const KernelInfo& info : {argmax[0], cast[0]}) {
    const CompiledKernel kernel = compile(make_spec(info, true, true));
    EXPECT_EQ(kernel.spill_bytes, 0) << info.type;
    EXPECT_TRUE(kernel.performance_losses.empty()) << info.type << ": " << kernel.performance_losses.front();
    EXPECT_EQ(kernel.tensor_core_instruction, "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16") << info.type;
  }
}

TEST(GemmWithKernels, LeaveTheEpilogueItsMemoryOnTheGenericTarget) {
  skip_without_nvrtc();
  constexpr int kEpilogueBytes = 64 << 10;
  // Where blocks have most and least shared memory.
  for (const char* arch : {"sm_80", "sm_86"}) {
    const std::vector<KernelInfo> infos = gemm_with_kernels<RowArgmax, bf16>(GpuTarget::cuda, arch);  // which reduces rows
    ASSERT_EQ(infos.size(), 6u);
    const CompiledKernel kernel = compile(for_target(make_spec(infos[0], true, true), GpuTarget::cuda), arch);
    EXPECT_EQ(kernel.spill_bytes, 0) << infos[0].type;
    EXPECT_LE(kernel.module.shared_bytes + kEpilogueBytes, max_shared_bytes(arch)) << infos[0].type;
    EXPECT_EQ(kernel.tensor_core_instruction, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32") << infos[0].type;
  }
}

}  // namespace
}  // namespace tw::kernels::gemm
