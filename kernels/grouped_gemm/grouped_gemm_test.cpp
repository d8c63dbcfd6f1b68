// grouped_gemm() and k_grouped_gemm() against loops in double, on the CPU and, where there is one, on a GPU.

#include "tilewave/grouped_gemm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "kernels/generic_tiles.hpp"
#include "kernels/grouped_gemm/kernels.hpp"
#include "kernels/grouped_gemm/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::grouped_gemm {
namespace {

using namespace tw::test;
using Offsets = std::vector<std::int32_t>;

Tensor on_device(const Offsets& offsets, Device device) {
  return Tensor::from(std::span<const std::int32_t>(offsets), {static_cast<std::int64_t>(offsets.size())}).to(device);
}
double rounded(DType dtype, double x) { return round_to(dtype, static_cast<float>(x)); }
std::string describe(const Offsets& offsets) { return tw::join(offsets, " "); }

struct Case {
  Offsets offsets;
  std::int64_t m, n, k;
  bool b_rows = false;  ///< B is stored [groups, K, N]
  bool bias = false;
  Activation activation = Activation::none;
  std::int64_t gap = 0;
  int config = -1;
};

void check(const Case& c, Device device, DType dtype, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("m {} n {} k {} b_rows {} bias {} activation {} gap {} config {} offsets {}", c.m, c.n, c.k, c.b_rows, c.bias,
                          static_cast<int>(c.activation), c.gap, c.config, describe(c.offsets)));
  const auto groups = static_cast<std::int64_t>(c.offsets.size()) - 1, width = c.activation == Activation::swiglu ? c.n / 2 : c.n;
  const Placement placement{.offset = c.gap > 0 ? 1 : 0, .gap = c.gap};
  Placement of_b = placement;
  if (!c.b_rows) of_b.order = {0, 2, 1};
  PlacedTensor a({c.m, c.k}, dtype, device, placement), b({groups, c.k, c.n}, dtype, device, of_b),
      d({c.m, width}, dtype, device, placement);
  PlacedTensor bias({groups, c.n}, dtype, device);
  const std::vector<float> a_values = a.fill_random(random);
  const std::vector<float> b_values = b.fill_random(random, 1 / std::sqrt(static_cast<float>(std::max<std::int64_t>(c.k, 1))));
  std::vector<float> bias_values;
  if (c.bias) bias_values = bias.fill_random(random);
  constexpr float kOutside = 7.5f;
  d.fill(std::vector<float>(static_cast<std::size_t>(c.m * width), kOutside));
  const GroupedGemmOptions options{.bias = c.bias ? &bias.tensor() : nullptr, .activation = c.activation, .config = c.config};
  if (!launched([&] { tw::grouped_gemm(a, b, on_device(c.offsets, device), d, options); })) return;

  const PlainCall plain{{c.offsets, c.m}, a_values, b_values, bias_values, c.n, c.k, c.activation};
  const std::vector<double> exact = evaluate(plain, kOutside, [](const gemm::PlainCall& call) { return gemm::reference(call); });
  const std::vector<double> naive = evaluate(plain, kOutside, [&](const gemm::PlainCall& call) { return gemm::naive(call, dtype, false); });
  const std::vector<double> results = d.values();
  EXPECT_TRUE(accurate({results, exact, naive, arithmetic_of(dtype, device), c.k}));
  EXPECT_TRUE(d.gaps_intact());
  std::vector<bool> inside(static_cast<std::size_t>(c.m));
  for (std::int64_t g = 0; g < groups; ++g)
    for (std::int64_t r = 0; r < plain.groups.size(g); ++r) inside[static_cast<std::size_t>(plain.groups.begin(g) + r)] = true;
  for (std::int64_t i = 0; i < c.m * width; ++i) {
    if (inside[static_cast<std::size_t>(i / width)]) continue;
    ASSERT_EQ(results[static_cast<std::size_t>(i)], kOutside) << "row " << i / width;
  }
}

class GroupedGemm : public testing::TestWithParam<Device> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    cpu::set_poison_released_slots(true);
  }
  std::vector<DType> dtypes() const {
    return device.is_cuda() ? std::vector{DType::bf16, DType::f16} : std::vector{DType::bf16, DType::f16, DType::f32};
  }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }
  /// Offsets of `groups` groups within `rows` rows, some of them empty; the first may begin later, the last end earlier.
  Offsets draw(int groups, int rows) {
    Offsets offsets;
    for (int i = 0; i <= groups; ++i) offsets.push_back(pick(3) == 0 && i > 0 ? offsets.back() : pick(rows + 1));
    std::sort(offsets.begin(), offsets.end());
    if (pick(2)) offsets.front() = 0;
    if (pick(2)) offsets.back() = rows;
    return offsets;
  }

  const Device device = GetParam();
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, GroupedGemm, testing::ValuesIn(kDevices), device_name);

TEST_P(GroupedGemm, GroupsOfManySizes) {
  for (const DType dtype : dtypes()) {
    check({{0, 300}, 300, 136, 72}, device, dtype, random);
    check({{0, 1, 2, 3, 4, 5}, 5, 64, 256}, device, dtype, random);
    check({{0, 0, 0, 130, 130}, 130, 64, 64}, device, dtype, random);
    check({{0, 127, 255, 256, 512}, 512, 264, 128}, device, dtype, random);
    check({{10, 70, 200, 201}, 220, 72, 200, true}, device, dtype, random);
    check({{0, 0, 0}, 40, 64, 64}, device, dtype, random);
  }
}

TEST_P(GroupedGemm, RandomGroups) {
  for (int n = 0; n < random_cases(24); ++n) {
    const int groups = 1 + pick(12), rows = 1 + pick(600);
    Case c{.offsets = draw(groups, rows), .m = rows, .n = 2 * (1 + pick(150)), .k = 1 + pick(300)};
    if (pick(2)) c.n = c.n / 8 * 8 + 8, c.k = c.k / 8 * 8 + 8;  // TMA copies
    c.b_rows = pick(2);
    c.bias = pick(2);
    c.gap = pick(3) == 0 ? 1 + pick(4) : 0;
    constexpr Activation kActivations[] = {Activation::none, Activation::silu, Activation::swiglu};
    c.activation = kActivations[pick(3)];
    check(c, device, pick(2) ? DType::bf16 : DType::f16, random);
  }
}

TEST_P(GroupedGemm, Epilogues) {
  for (const Activation activation :
       {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu, Activation::swiglu})
    check({{0, 65, 65, 200}, 200, 192, 136, false, true, activation}, device, DType::bf16, random);
}

TEST_P(GroupedGemm, NothingToSum) {
  check({{0, 3, 9}, 9, 16, 0, false, true, Activation::silu}, device, DType::bf16, random);
  check({{0, 0}, 0, 16, 8}, device, DType::bf16, random);
}

/// The experts of a large mixture of which a few tokens use a few.
TEST_P(GroupedGemm, ManyGroupsOfWhichFewHaveRows) {
  Offsets offsets(513, 0);
  for (std::size_t g = 0; g <= 512; ++g) offsets[g] = static_cast<std::int32_t>((g > 3) + (g > 77) + (g > 500) * 3 + (g > 511));
  check({offsets, 6, 64, 64}, device, DType::bf16, random);
  // More than the kernel that lists tiles counts at a time.
  Offsets more(1301, 0);
  for (std::size_t g = 0; g <= 1300; ++g) more[g] = static_cast<std::int32_t>(g / 9);
  check({more, 144, 16, 32}, device, DType::bf16, random);
}

/// Offsets outside the tensor are clamped, and a group whose offsets decrease is empty.
TEST_P(GroupedGemm, WrongOffsetsStayInsideTheTensors) {
  check({{-50, 20, 90, 1000}, 100, 64, 64}, device, DType::bf16, random);
  check({{70, 30, 60, 60, 100}, 100, 64, 64}, device, DType::bf16, random);
  check({{100, 0}, 100, 64, 64}, device, DType::bf16, random);
  // Groups that overlap: each row is one group's.
  const std::int64_t m = 100, n = 64, k = 64;
  PlacedTensor a({m, k}, DType::bf16, device), b({2, k, n}, DType::bf16, device), d({m, n}, DType::bf16, device);
  a.fill(std::vector<float>(m * k, 1.0f));
  std::vector<float> ones(2 * k * n, 1.0f);
  std::fill(ones.begin() + k * n, ones.end(), 2.0f);
  b.fill(ones);
  Tensor three = Tensor::empty({3, k, n}, DType::bf16, Stream::standard(device));
  three.slice(0, 0, 2).copy_from(b);
  three.slice(0, 2, 3).copy_from(b.tensor().slice(0, 1, 2));
  if (!launched([&] { tw::grouped_gemm(a, three, on_device({0, 100, 40, 100}, device), d); })) return;
  const std::vector<double> results = d.values();
  for (std::int64_t i = 0; i < m * n; ++i) {
    const double x = results[static_cast<std::size_t>(i)];
    ASSERT_TRUE(x == 64 || (i / n >= 40 && x == 128)) << "row " << i / n << ": " << x;
  }
}

/// A row's NaN stays in its row, whichever tile it is in.
TEST_P(GroupedGemm, RowsAreIndependent) {
  const std::int64_t m = 200, n = 64, k = 128;
  PlacedTensor a({m, k}, DType::bf16, device), b({3, k, n}, DType::bf16, device, {.order = {0, 2, 1}}), d({m, n}, DType::bf16, device);
  std::vector<float> values = a.fill_random(random);
  b.fill_random(random);
  for (const std::int64_t row : {std::int64_t{65}, std::int64_t{130}}) values[static_cast<std::size_t>(row * k + 5)] = kNaN;
  a.fill(values);
  if (!launched([&] { tw::grouped_gemm(a, b, on_device({0, 66, 130, 200}, device), d); })) return;
  const std::vector<double> results = d.values();
  for (std::int64_t i = 0; i < m * n; ++i)
    ASSERT_EQ(std::isnan(results[static_cast<std::size_t>(i)]), i / n == 65 || i / n == 130) << "row " << i / n;
}

TEST_P(GroupedGemm, EveryConfiguration_cuda) {
  if (!device.is_cuda()) GTEST_SKIP() << "configurations are the GPU's";
  const std::int64_t generic = generic_shared_bytes(Stream::standard(device));
  for (int config = 0; config < static_cast<int>(configs(generic).size()); ++config) {
    const ProductTile tile = configs(generic)[static_cast<std::size_t>(config)];
    for (const bool b_rows : {false, true})
      if (valid(tile, b_rows, false))
        check({{0, 70, 70, 600, 857}, 857, 520, 200, b_rows, true, Activation::none, 0, config}, device, DType::bf16, random);
  }
}

struct BlockScaledCase {
  Offsets offsets;
  std::int64_t m, n, k;
  bool columns = false;  ///< the rows of a_scale are adjacent, as TMA wants them
};

void check(const BlockScaledCase& c, Device device, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("block scales: m {} n {} k {} columns {} offsets {}", c.m, c.n, c.k, c.columns, describe(c.offsets)));
  const auto groups = static_cast<std::int64_t>(c.offsets.size()) - 1, depth = (c.k + 127) / 128, blocks = (c.n + 127) / 128;
  PlacedTensor a({c.m, c.k}, DType::fp8_e4m3, device), b({groups, c.n, c.k}, DType::fp8_e4m3, device), d({c.m, c.n}, DType::bf16, device);
  PlacedTensor a_scale({c.m, depth}, DType::f32, device,
                       {.order = c.columns ? std::vector{1, 0} : std::vector{0, 1}, .align = c.columns ? 4 : 1});
  PlacedTensor b_scale({groups, blocks, depth}, DType::f32, device);
  std::vector<float> av = a.fill_random(random, 2), bv = b.fill_random(random, 2), sa, sb;
  std::uniform_real_distribution<float> factor(0.01f, 0.2f);
  for (std::int64_t i = 0; i < c.m * depth; ++i) sa.push_back(factor(random));
  for (std::int64_t i = 0; i < groups * blocks * depth; ++i) sb.push_back(factor(random));
  a_scale.fill(sa);
  b_scale.fill(sb);
  constexpr float kOutside = 7.5f;
  d.fill(std::vector<float>(static_cast<std::size_t>(c.m * c.n), kOutside));
  const Tensor scale_of_b = b_scale.tensor().transpose(1, 2);
  const GroupedGemmOptions options{.a_scale = &a_scale.tensor(), .b_scale = &scale_of_b};
  if (!launched([&] { tw::grouped_gemm(a, b.tensor().transpose(1, 2), on_device(c.offsets, device), d, options); })) return;

  const PlainGroups plain{c.offsets, c.m};
  std::vector<double> exact(static_cast<std::size_t>(c.m * c.n), kOutside), naive = exact;
  for (std::int64_t g = 0; g < groups; ++g) {
    for (std::int64_t row = plain.begin(g); row < plain.begin(g) + plain.size(g); ++row) {
      for (std::int64_t col = 0; col < c.n; ++col) {
        double sum = 0;
        float rounded_sum = 0, partial = 0;
        for (std::int64_t k = 0; k < c.k; ++k) {
          const float x = av[static_cast<std::size_t>(row * c.k + k)], y = bv[static_cast<std::size_t>((g * c.n + col) * c.k + k)];
          const float s = sa[static_cast<std::size_t>(row * depth + k / 128)];
          const float t = sb[static_cast<std::size_t>((g * blocks + col / 128) * depth + k / 128)];
          sum += static_cast<double>(x) * y * s * t;
          partial += x * y;
          if (k % 128 != 127 && k + 1 != c.k) continue;
          rounded_sum += partial * (s * t);
          partial = 0;
        }
        exact[static_cast<std::size_t>(row * c.n + col)] = sum;
        naive[static_cast<std::size_t>(row * c.n + col)] = rounded(DType::bf16, rounded_sum);
      }
    }
  }
  EXPECT_TRUE(accurate({d.values(), exact, naive, Arithmetic::bf16, c.k}));
  EXPECT_TRUE(d.gaps_intact());
}

TEST_P(GroupedGemm, BlockScales) {
  for (const bool columns : {false, true}) {
    check(BlockScaledCase{{0, 130, 130, 200}, 200, 136, 256, columns}, device, random);
    check(BlockScaledCase{{0, 1, 2, 66}, 70, 300, 400, columns}, device, random);
    check(BlockScaledCase{{3, 300}, 310, 64, 144, columns}, device, random);
    check(BlockScaledCase{{0, 1, 2}, 2, 260, 100, columns}, device, random);
  }
}

struct DepthCase {
  Offsets offsets;
  std::int64_t m, n, k;
  DType out;
  bool accumulate = false;
  std::int64_t gap = 0;
  bool dense_k = false;  ///< A is stored [M, K], B [N, K]
  int config = -1;
};

void check(const DepthCase& c, Device device, DType dtype, std::mt19937_64& random) {
  SCOPED_TRACE(tw::format("k-grouped: m {} n {} k {} out {} accumulate {} gap {} dense_k {} config {} offsets {}", c.m, c.n, c.k,
                          name_of(c.out), c.accumulate, c.gap, c.dense_k, c.config, describe(c.offsets)));
  const auto groups = static_cast<std::int64_t>(c.offsets.size()) - 1;
  // [K, M] and [K, N], whose order in memory is that or the other.
  Placement placement{.offset = c.gap > 0 ? 1 : 0, .gap = c.gap};
  PlacedTensor d({groups, c.m, c.n}, c.out, device, placement);
  if (c.dense_k) placement.order = {1, 0};
  PlacedTensor a({c.k, c.m}, dtype, device, placement), b({c.k, c.n}, dtype, device, placement);
  std::vector<float> a_values = a.fill_random(random), b_values = b.fill_random(random, 0.25f), before;
  const PlainGroups plain{c.offsets, c.k};
  // What is in no group must not be used: as NaN it would be seen.
  std::vector<bool> inside(static_cast<std::size_t>(c.k));
  for (std::int64_t g = 0; g < groups; ++g)
    for (std::int64_t r = 0; r < plain.size(g); ++r) inside[static_cast<std::size_t>(plain.begin(g) + r)] = true;
  for (std::int64_t i = 0; i < c.k * c.m; ++i)
    if (!inside[static_cast<std::size_t>(i / c.m)]) a_values[static_cast<std::size_t>(i)] = kNaN;
  for (std::int64_t i = 0; i < c.k * c.n; ++i)
    if (!inside[static_cast<std::size_t>(i / c.n)]) b_values[static_cast<std::size_t>(i)] = kInf;
  a.fill(a_values);
  b.fill(b_values);
  if (c.accumulate) before = d.fill_random(random);
  const KGroupedGemmOptions options{.accumulate = c.accumulate, .config = c.config};
  if (!launched([&] { tw::k_grouped_gemm(a.tensor().transpose(0, 1), b, on_device(c.offsets, device), d, options); })) return;
  const std::vector<double> exact = evaluate_k_grouped<double>(plain, a_values, b_values, before, c.m, c.n, [](double x) { return x; });
  const std::vector<double> naive =
      evaluate_k_grouped<float>(plain, a_values, b_values, before, c.m, c.n, [&](double x) { return rounded(c.out, x); });
  EXPECT_TRUE(accurate({d.values(), exact, naive, arithmetic_of(c.out, Device::cpu()), c.k}));
  EXPECT_TRUE(d.gaps_intact());
}

TEST_P(GroupedGemm, DepthInGroupsOfManySizes) {
  for (const DType dtype : dtypes()) {
    for (const DType out : {dtype, DType::f32}) {
      check({{0, 300}, 136, 72, 300, out}, device, dtype, random);
      check({{0, 1, 2, 3, 64, 128, 192}, 64, 256, 192, out}, device, dtype, random);
      check({{5, 70, 70, 193, 200}, 130, 200, 210, out, true}, device, dtype, random);
      check({{0, 0, 0}, 24, 40, 16, out}, device, dtype, random);
    }
  }
}

TEST_P(GroupedGemm, DepthInRandomGroups) {
  for (int n = 0; n < random_cases(16); ++n) {
    const int groups = 1 + pick(7), depth = 1 + pick(500);
    DepthCase c{.offsets = draw(groups, depth), .m = 1 + pick(200), .n = 1 + pick(200), .k = depth, .out = DType::f32};
    if (pick(2)) c.m = c.m / 8 * 8 + 8, c.n = c.n / 8 * 8 + 8;  // TMA copies
    c.accumulate = pick(2);
    c.gap = pick(3) == 0 ? 1 + pick(4) : 0;
    c.dense_k = pick(4) == 0;
    const DType dtype = pick(2) ? DType::bf16 : DType::f16;
    if (pick(2)) c.out = dtype;
    check(c, device, dtype, random);
  }
}

TEST_P(GroupedGemm, WrongOffsetsOfDepth) {
  check({{-50, 20, 90, 1000}, 64, 64, 100, DType::f32}, device, DType::bf16, random);
  check({{70, 30, 60, 60, 100}, 64, 64, 100, DType::f32}, device, DType::bf16, random);
  check({{0, 4, 4}, 16, 24, 0, DType::f32}, device, DType::bf16, random);
}

TEST_P(GroupedGemm, EveryConfigurationOfDepth_cuda) {
  if (!device.is_cuda()) GTEST_SKIP() << "configurations are the GPU's";
  const std::int64_t generic = generic_shared_bytes(Stream::standard(device));
  for (int config = 0; config < static_cast<int>(configs(generic).size()); ++config) {
    const ProductTile tile = configs(generic)[static_cast<std::size_t>(config)];
    for (const bool accumulate : {false, true})
      if (valid(tile, true, accumulate))
        check({{3, 70, 70, 400, 457}, 328, 520, 457, DType::bf16, accumulate, 0, false, config}, device, DType::bf16, random);
  }
}

}  // namespace
}  // namespace tw::kernels::grouped_gemm
