// gemm() against loops in double, on the CPU and, where there is one, on a GPU.

#include "tilewave/gemm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/gemm/reference.hpp"
#include "kernels/gemm/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::gemm {
namespace {

using namespace tw::test;

/// The GPU's configurations, of the target that tests run on.
std::vector<Config> gpu_configs() { return configs(generic_shared_bytes(Stream::standard(Device::cuda()))); }

/// The GPU's last configuration unless a test is about them: few shapes here fill wider tiles, and every further variant costs a
/// compilation.
constexpr int kNarrow = -2;
int config_on(Device device, int config) {
  if (!device.is_cuda()) return -1;
  return config == kNarrow ? static_cast<int>(gpu_configs().size()) - 1 : config;
}
int narrow(Device device) { return config_on(device, kNarrow); }
/// Whether the GPU's sums of 16-bit products may begin with the residual: on Hopper.
bool sums_can_begin() { return generic_shared_bytes(Stream::standard(Device::cuda())) == 0; }

/// Where an operand lies. A GPU copies `dense` and `aligned` ones by TMA where their shapes allow it, the others by ordinary loads.
enum class Place { dense, aligned, unaligned, stepped, reversed };

Placement placement(Place place, bool transposed, int rank, DType dtype) {
  Placement p;
  if (transposed) p.order = rank == 3 ? std::vector{0, 2, 1} : std::vector{1, 0};
  switch (place) {
    case Place::dense:
      break;
    case Place::aligned:
      p.align = p.gap = 16 / static_cast<std::int64_t>(size_of(dtype));
      p.offset = 2 * p.align;
      break;
    case Place::unaligned:
      p.offset = 3;
      p.gap = 5;
      break;
    case Place::stepped:
      p.offset = 1;
      p.step = 2;
      p.gap = 3;
      break;
    case Place::reversed:
      p.gap = 1;
      p.reversed = true;
      break;
  }
  return p;
}

struct Operand {
  Place place = Place::dense;
  bool transposed = false;  ///< stored [K, M], [N, K] or [N, M]
};

struct Case {
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t batch = 0;  ///< 0: two-dimensional
  bool a_batched = true, b_batched = true;
  Operand a = {}, b = {}, d = {}, residual = {};
  bool with_bias = false, with_residual = false;
  float alpha = 1, beta = 0;
  Activation activation = Activation::none;
  int config = kNarrow;
  int splits = 1;

  std::string describe() const {
    const auto text = [](const Operand& o) { return tw::format("{}{}", o.transposed ? "T" : "N", static_cast<int>(o.place)); };
    return tw::format(
        "m {} n {} k {} batch {} ({} {}) a {} b {} d {} bias {} residual {} alpha {} beta {} activation {} config {} splits {}", m, n, k,
        batch, a_batched, b_batched, text(a), text(b), text(d), with_bias, with_residual, alpha, beta, static_cast<int>(activation), config,
        splits);
  }
};

/// Runs one case on random numbers and holds it against the rule.
void check(const Case& c, Device device, DType dtype, std::mt19937_64& random) {
  SCOPED_TRACE(c.describe());
  const std::int64_t batch = std::max<std::int64_t>(c.batch, c.batch == 0 ? 1 : 0);
  const bool a_batched = c.batch != 0 && c.a_batched, b_batched = c.batch != 0 && c.b_batched;
  const auto make = [&](const Operand& o, bool batched, std::int64_t rows, std::int64_t cols) {
    const Shape shape = batched ? Shape{c.batch, rows, cols} : Shape{rows, cols};
    return PlacedTensor(shape, dtype, device, placement(o.place, o.transposed, static_cast<int>(shape.size()), dtype));
  };
  PlacedTensor a = make(c.a, a_batched, c.m, c.k);
  PlacedTensor b = make(c.b, b_batched, c.k, c.n);
  PlacedTensor d = make(c.d, c.batch != 0, c.m, c.activation == Activation::swiglu ? c.n / 2 : c.n);
  PlacedTensor residual = make(c.residual, c.batch != 0, c.m, c.n);
  PlacedTensor bias({c.n}, dtype, device, {.offset = 1});

  // Elements of D are then about N(0, 1) for any K, as behind a layer's weights.
  std::vector<float> a_values = a.fill_random(random);
  std::vector<float> b_values = b.fill_random(random, 1 / std::sqrt(static_cast<float>(std::max<std::int64_t>(c.k, 1))));
  if (c.activation == Activation::swiglu && arithmetic_of(dtype, device) == Arithmetic::tf32) {
    // A product of two results has the error of both: with operands that tensor cores need not truncate there is none to begin with.
    for (std::vector<float>* values : {&a_values, &b_values})
      for (float& x : *values) x = static_cast<float>(tf32(x));
    a.fill(a_values);
    b.fill(b_values);
  }
  std::vector<float> c_values, bias_values, residual_values;
  if (c.beta != 0) c_values = d.fill_random(random);
  if (c.with_bias) bias_values = bias.fill_random(random);
  if (c.with_residual) residual_values = residual.fill_random(random);

  const GemmOptions options{.alpha = c.alpha,
                            .beta = c.beta,
                            .bias = c.with_bias ? &bias.tensor() : nullptr,
                            .activation = c.activation,
                            .residual = c.with_residual ? &residual.tensor() : nullptr,
                            .config = config_on(device, c.config),
                            .splits = c.splits};
  if (!launched([&] { tw::gemm(a, b, d, options); })) return;

  const PlainCall plain{c.m,       c.n,       c.k,     batch,  a_values,    b_values, c_values, bias_values, residual_values,
                        a_batched, b_batched, c.alpha, c.beta, c.activation};
  const Arithmetic arithmetic = arithmetic_of(dtype, device);
  EXPECT_TRUE(accurate({d.values(), reference(plain), naive(plain, dtype, arithmetic == Arithmetic::tf32), arithmetic, c.k}));
  EXPECT_TRUE(d.gaps_intact());
}

/// Compiles the registered kernels of the target on all cores before the first test on the GPU; the tests use most of them. On Hopper only:
/// compile_all() knows no other architecture.
void warm_up() {
  if (device_info(Device::cuda()).target != GpuTarget::sm_90a) return;
  const std::int64_t generic_shared = generic_shared_bytes(Stream::standard(Device::cuda()));
  [[maybe_unused]] static const bool done =
      (compile_all(generic_shared > 0 ? registered_generic(generic_shared) : specs_of(registered())), true);
}

class Gemm : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    if (device.is_cuda()) warm_up();
    cpu::set_poison_released_slots(true);
  }
  void check(const Case& c) { gemm::check(c, device, dtype, random); }
  int pick(int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); }
  /// On a GPU there is a kernel for each order of storage, with and without TMA for loads and for stores. What these differ in does not
  /// depend on the dtype, so bf16 tries them all there, and the others stay with few.
  bool all_variants() const { return !device.is_cuda() || dtype == DType::bf16; }
  /// Where operands lie in tests of something else.
  Place usual() const { return all_variants() ? Place::dense : Place::aligned; }
  Case usual_case(std::int64_t m, std::int64_t n, std::int64_t k) {
    return {.m = m, .n = n, .k = k, .a = {usual()}, .b = {usual(), pick(2) == 1}, .d = {usual()}};
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Gemm, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

/// Primes, powers of two, and one less and one more than the tiles' sizes on both devices.
constexpr std::array kExtents = {1,  2,  3,  5,  7,   8,   13,  15,  16,  17,  31,  32,  33,  47,  61,  63,
                                 64, 65, 67, 97, 101, 127, 128, 129, 131, 191, 192, 193, 211, 255, 256, 257};
constexpr long kMostProducts = 3'000'000;

TEST_P(Gemm, AnyShape) {
  for (int n : {1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193}) {
    check(usual_case(n, 1, 1));
    check(usual_case(1, n, 1));
    check(usual_case(1, 1, n));
    check(usual_case(1, n, 97));
    check(usual_case(n, 1, 97));
  }
  for (int i = 0; i < random_cases(60); ++i) {
    const int m = kExtents[static_cast<std::size_t>(pick(kExtents.size()))];
    const int n = kExtents[static_cast<std::size_t>(pick(kExtents.size()))];
    const int k = kExtents[static_cast<std::size_t>(pick(kExtents.size()))];
    if (static_cast<long>(m) * n * k > kMostProducts) continue;
    check(usual_case(m, n, k));
  }
}

TEST_P(Gemm, ManyTiles) {
  // One more than the CPU's large tiles in every dimension; on a GPU more rows of tiles than a band of the raster has.
  check(usual_case(385, 385, 193));
  check(usual_case(1089, 129, 70));
  // So deep that every ring goes round several times.
  check(usual_case(65, 33, 2111));
}

TEST_P(Gemm, AnyOrderOfStorage) {
  const std::vector<Place> places =
      all_variants() ? std::vector{Place::dense, Place::aligned, Place::unaligned} : std::vector{Place::aligned};
  for (const bool a_transposed : {false, true}) {
    for (const bool b_transposed : {false, true}) {
      for (const Place place : places) {
        check({.m = 67, .n = 130, .k = 101, .a = {place, a_transposed}, .b = {place, b_transposed}});
        check({.m = 128, .n = 128, .k = 64, .a = {place, a_transposed}, .b = {place, b_transposed}});
        check({.m = 1, .n = 72, .k = 40, .a = {place, a_transposed}, .b = {place, b_transposed}});
      }
    }
  }
  for (const Place place : places) check({.m = 67, .n = 130, .k = 41, .d = {place, true}});
}

TEST_P(Gemm, AnyStrides) {
  constexpr Place kPlaces[] = {Place::dense, Place::aligned, Place::unaligned, Place::stepped, Place::reversed};
  check({.m = 67, .n = 130, .k = 101, .a = {Place::unaligned}, .b = {Place::unaligned}, .d = {Place::unaligned}});
  if (!all_variants()) return;
  for (int i = 0; i < random_cases(40); ++i) {
    const auto operand = [&] { return Operand{kPlaces[pick(5)], pick(2) == 1}; };
    check({.m = 1 + pick(150), .n = 1 + pick(150), .k = 1 + pick(150), .a = operand(), .b = operand(), .d = operand()});
  }
}

// On a GPU such results leave in the widest words for which their rows are aligned, the last one in part.
TEST_P(Gemm, ColumnsThatEndWithinAWord) {
  for (const std::int64_t n : {60, 61, 62, 130})
    for (const Place place : {Place::dense, Place::aligned, Place::unaligned}) check({.m = 70, .n = n, .k = 40, .d = {place}});
}

TEST_P(Gemm, Batches) {
  for (const Place place : {Place::aligned, Place::unaligned}) {
    for (const bool a_batched : {true, false}) {
      for (const bool b_batched : {true, false}) {
        if (!a_batched && !b_batched) continue;
        check({.m = 33,
               .n = 70,
               .k = 65,
               .batch = 3,
               .a_batched = a_batched,
               .b_batched = b_batched,
               .a = {place},
               .b = {place, true},
               .d = {place}});
      }
    }
  }
  check({.m = 65, .n = 129, .k = 32, .batch = 1});
  check({.m = 5, .n = 7, .k = 3, .batch = 67, .a = {Place::reversed}});
  check({.m = 16, .n = 24, .k = 40, .batch = 2, .with_bias = true, .with_residual = true, .beta = 0.5f});
}

TEST_P(Gemm, OneMatrixForAllBatchesByStrideZero) {
  PlacedTensor a({1, 33, 40}, dtype, device), b({4, 40, 65}, dtype, device), d({4, 33, 65}, dtype, device);
  const std::vector<float> av = a.fill_random(random), bv = b.fill_random(random, 0.2f);
  const Tensor repeated = Tensor::borrow(a.tensor().data(), {4, 33, 40}, dtype, device, {0, 40, 1});
  tw::gemm(repeated, b, d, {.config = narrow(device)});
  const PlainCall plain{.m = 33, .n = 65, .k = 40, .batch = 4, .a = av, .b = bv, .b_batched = true};
  const Arithmetic arithmetic = arithmetic_of(dtype, device);
  EXPECT_TRUE(accurate({d.values(), reference(plain), naive(plain, dtype, arithmetic == Arithmetic::tf32), arithmetic, plain.k}));
}

TEST_P(Gemm, Epilogues) {
  constexpr Activation kActivations[] = {Activation::none, Activation::relu, Activation::gelu_erf, Activation::gelu_tanh, Activation::silu};
  const auto check_epilogue = [&](Case c) {
    c.a = {Place::aligned};
    c.b = {Place::aligned, true};
    c.d = {Place::aligned};
    for (const bool bias : {false, true}) {
      c.with_bias = bias;
      c.alpha = bias ? 0.75f : -1.5f;
      c.m = 70, c.n = 131, c.k = 72;  // ragged
      check(c);
      c.m = 64, c.n = 128, c.k = 64;  // whole tiles
      check(c);
    }
  };
  for (const Activation activation : kActivations) {
    const bool exotic = activation == Activation::gelu_tanh || activation == Activation::silu;
    if (exotic && !all_variants()) continue;
    check_epilogue({.activation = activation});
    if (activation == Activation::relu && !all_variants()) continue;
    for (const float beta : {0.0f, -0.5f, 1.0f}) {
      if (beta != 0) check_epilogue({.beta = beta, .activation = activation});
      for (const Operand& residual : {Operand{Place::dense}, Operand{Place::unaligned}, Operand{Place::stepped, true}})
        check_epilogue({.residual = residual, .with_residual = true, .beta = beta, .activation = activation});
    }
  }
}

TEST_P(Gemm, FewRows) {
  // For one row B is read row by row; 2 to 16 have a kernel for multiples of 64 of K. Both only where B is stored [N, K].
  for (const int m : {1, 2, 3, 4, 5, 8, 15, 16, 17}) {
    for (const int k : {8, 64, 200, 1024, 2624}) {
      const Operand b{usual(), true};
      check({.m = m, .n = 131, .k = k, .a = {usual()}, .b = b, .d = {usual()}, .config = -1, .splits = 0});
    }
    for (const int k : {1088, 1096})
      check({.m = m, .n = 64, .k = k, .batch = 3, .b = {usual(), true}, .with_bias = true, .config = -1, .splits = 0});
    check({.m = m,
           .n = 72,
           .k = 576,
           .b = {usual(), true},
           .with_bias = true,
           .with_residual = true,
           .alpha = 0.5f,
           .beta = -0.25f,
           .activation = Activation::gelu_erf,
           .config = -1,
           .splits = 0});
  }
  if (all_variants())
    for (const int k : {320, 333})
      check({.m = 3, .n = 50, .k = k, .a = {Place::unaligned}, .b = {Place::unaligned, true}, .d = {Place::stepped}, .config = -1});
}

TEST_P(Gemm, SwiGluTakesPairsOfColumns) {
  // The widest tiles, and the narrowest two.
  const int narrowest = narrow(device);
  for (const int config : device.is_cuda() ? std::vector{0, narrowest - 1, narrowest} : std::vector{-1}) {
    if (dtype == DType::f32 && config == 0) continue;  // not among the variants that are compiled ahead of time
    check({.m = 130, .n = 260, .k = 96, .b = {usual(), true}, .activation = Activation::swiglu, .config = config});
    check({.m = 65,
           .n = 34,
           .k = 70,
           .b = {usual(), true},
           .with_bias = true,
           .alpha = 2,
           .activation = Activation::swiglu,
           .config = config});
  }
  check({.m = 1, .n = 512, .k = 256, .b = {usual(), true}, .activation = Activation::swiglu});
}

TEST_P(Gemm, AlphaZeroLeavesTheAddends) { check({.m = 20, .n = 30, .k = 40, .with_bias = true, .alpha = 0, .beta = 2}); }

TEST_P(Gemm, NoElements) {
  check({0, 5, 3});
  check({5, 0, 3});
  check({0, 0, 0});
  check({.m = 5, .n = 6, .k = 7, .batch = 0});
  for (const Shape& shape : {Shape{0, 4, 5}, Shape{3, 0, 5}, Shape{3, 4, 0}}) {
    PlacedTensor a({shape[0], shape[1], 7}, dtype, device), b({shape[0], 7, shape[2]}, dtype, device), d(shape, dtype, device);
    a.fill_random(random);
    b.fill_random(random);
    tw::gemm(a, b, d);
    EXPECT_TRUE(d.untouched());
  }
}

TEST_P(Gemm, NoTermsLeaveTheEpilogue) {
  check({70, 33, 0});
  check({.m = 70, .n = 33, .k = 0, .batch = 3});
  check({.m = 70, .n = 33, .k = 0, .with_bias = true, .with_residual = true, .beta = 0.5f, .activation = Activation::gelu_erf});
  check({.m = 1, .n = 1, .k = 0, .with_bias = true, .activation = Activation::relu});
}

TEST_P(Gemm, ResidualMayBeTheOutput) {
  PlacedTensor a({50, 40}, dtype, device), b({40, 70}, dtype, device), d({50, 70}, dtype, device);
  const std::vector<float> av = a.fill_random(random), bv = b.fill_random(random, 0.2f), dv = d.fill_random(random);
  tw::gemm(a, b, d, {.activation = Activation::relu, .residual = &d.tensor(), .config = narrow(device)});
  const PlainCall plain{.m = 50, .n = 70, .k = 40, .a = av, .b = bv, .residual = dv, .activation = Activation::relu};
  const Arithmetic arithmetic = arithmetic_of(dtype, device);
  EXPECT_TRUE(accurate({d.values(), reference(plain), naive(plain, dtype, arithmetic == Arithmetic::tf32), arithmetic, plain.k}));
}

TEST_P(Gemm, NanReachesItsRowAndNothingElse) {
  PlacedTensor a({70, 80}, dtype, device), b({80, 40}, dtype, device), d({70, 40}, dtype, device);
  std::vector<float> av = a.fill_random(random);
  b.fill_random(random);
  av[33 * 80 + 79] = std::numeric_limits<float>::quiet_NaN();
  a.fill(av);
  tw::gemm(a, b, d, {.activation = Activation::relu, .config = narrow(device)});
  const std::vector<double> out = d.values();
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(std::isnan(out[i]), i / 40 == 33) << "element " << i;
}

TEST_P(Gemm, TooLargeForTheTypeIsInfinity) {
  PlacedTensor a({2, 8}, dtype, device), b({8, 8}, dtype, device), d({2, 8}, dtype, device);
  const float large = dtype == DType::f16 ? 300.0f : 1e19f;  // whose square is beyond the type
  a.fill(std::vector<float>(16, large));
  b.fill(std::vector<float>(64, -large));
  tw::gemm(a, b, d, {.alpha = 2, .config = narrow(device)});
  for (const double x : d.values()) EXPECT_EQ(x, -std::numeric_limits<double>::infinity());
}

TEST_P(Gemm, IsDeterministic) {
  PlacedTensor a({300, 200}, dtype, device), b({200, 500}, dtype, device);
  a.fill_random(random);
  b.fill_random(random);
  const auto run = [&] {
    PlacedTensor d({300, 500}, dtype, device);
    tw::gemm(a, b, d, {.config = narrow(device)});
    return d.values();
  };
  const std::vector<double> first = run();
  EXPECT_EQ(run(), first);
}

TEST_P(Gemm, MatmulMakesItsResult) {
  PlacedTensor a({2, 30, 40}, dtype, device), b({40, 50}, dtype, device), d({2, 30, 50}, dtype, device);
  a.fill_random(random);
  b.fill_random(random);
  const GemmOptions options{.activation = Activation::relu, .config = narrow(device)};
  tw::gemm(a, b, d, options);
  const Tensor made = matmul(a, b, options);
  EXPECT_EQ(made.shape(), (Shape{2, 30, 50}));
  EXPECT_EQ(made.dtype(), dtype);
  EXPECT_EQ(made.device(), device);
  EXPECT_TRUE(made.is_contiguous());
  const Tensor host = made.to(Device::cpu());
  const std::vector<double> expected = d.values();
  for (std::int64_t i = 0; i < made.numel(); ++i)
    ASSERT_EQ(host.at({i / 1500, i / 50 % 30, i % 50}), expected[static_cast<std::size_t>(i)]);
}

TEST_P(Gemm, RunsOnTheStreamGiven) {
  PlacedTensor a({30, 40}, dtype, device), b({40, 50}, dtype, device), d({30, 50}, dtype, device), on_stream({30, 50}, dtype, device);
  a.fill_random(random);
  b.fill_random(random);
  tw::gemm(a, b, d, {.config = narrow(device)});
  const std::vector<double> expected = d.values();  // also waits for the standard stream, which made the operands
  on_stream.values();
  const Stream stream(device);
  tw::gemm(a, b, on_stream, {.stream = stream, .config = narrow(device)});
  stream.synchronize();
  EXPECT_EQ(on_stream.values(), expected);
}

// What a sequence of a batch is answered must not depend on the others.
TEST(GemmCpu, OfFewRowsNoneDependsOnTheOthers) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const Tensor a = Tensor::random({16, 301}, dtype, 1), b = Tensor::random({77, 301}, dtype, 2);
    const Tensor all = matmul(a, b.transpose(0, 1));
    for (const int rows : {1, 2, 5, 15}) {
      const Tensor some = matmul(a.slice(0, 0, rows), b.transpose(0, 1));
      EXPECT_EQ(max_difference(some, all.slice(0, 0, rows)), 0) << name_of(dtype) << ", " << rows << " rows";
    }
  }
}

TEST(GemmCpu, DoesNotDependOnTheNumberOfThreads) {
  std::mt19937_64 random = random_engine();
  const int threads = cpu_threads();
  PlacedTensor a({200, 300}, DType::f32, Device::cpu()), b({300, 900}, DType::f32, Device::cpu());
  a.fill_random(random);
  b.fill_random(random);
  std::vector<std::vector<double>> results;
  for (const int n : {1, 2, 3}) {
    set_cpu_threads(n);
    PlacedTensor d({200, 900}, DType::f32, Device::cpu());
    tw::gemm(a, b, d);
    results.push_back(d.values());
  }
  set_cpu_threads(threads);
  EXPECT_EQ(results[1], results[2]);  // one thread may choose other tiles, whose sums are grouped otherwise
  for (std::size_t i = 0; i < results[0].size(); ++i) ASSERT_NEAR(results[0][i], results[1][i], 1e-3);
}

/// Every configuration of the GPU, whatever the heuristic would choose.
class GemmConfig : public testing::TestWithParam<DType> {};

INSTANTIATE_TEST_SUITE_P(cuda, GemmConfig, testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& instance) { return tw::format("cuda_{}", name_of(instance.param)); });

TEST_P(GemmConfig, IsCorrect) {
  skip_without_cuda();
  const Device device = Device::cuda();
  const DType dtype = GetParam();
  warm_up();
  std::mt19937_64 random = random_engine();
  const std::vector<Config> all = gpu_configs();
  for (int config = 0; config < static_cast<int>(all.size()); ++config) {
    const Config& tile = all[static_cast<std::size_t>(config)];
    if (tile.teams > 1 && size_of(dtype) != 2) continue;
    // Not multiples of the tiles; of 520 rows the last cluster of two has a block without any.
    check({.m = 136, .n = 264, .k = 200, .b = {Place::dense, true}, .config = config}, device, dtype, random);
    check({.m = 520, .n = 520, .k = 72, .batch = 2, .b = {Place::dense, true}, .config = config}, device, dtype, random);
    if (dtype != DType::bf16) continue;  // f32 has no other orders of storage, f16 the same ones
    if (tile.teams == 1 && (sums_can_begin() ? tile.bn <= 192 : tile.bm <= 128 && tile.bn <= 128)) {
      check({.m = 136, .n = 264, .k = 200, .b = {Place::dense, true}, .with_bias = true, .with_residual = true, .config = config}, device,
            dtype, random);
      check({.m = 136, .n = 264, .k = 40, .b = {Place::dense, true}, .with_bias = true, .beta = 1, .config = config}, device, dtype,
            random);
      check({.m = 70, .n = 130, .k = 65, .batch = 2, .b = {Place::dense, true}, .d = {Place::unaligned}, .beta = 1, .config = config},
            device, dtype, random);
    }
    if (tile.bn % 64 != 0) continue;
    check({.m = 136, .n = 264, .k = 200, .config = config}, device, dtype, random);
    check({.m = 136, .n = 264, .k = 200, .a = {Place::dense, true}, .config = config}, device, dtype, random);
  }
}

/// More tiles than two for each SM, of a few steps each: fewer than the ring has slots, as many, more.
TEST_P(GemmConfig, TeamsTakeManyTilesInTurn) {
  skip_without_cuda();
  const DType dtype = GetParam();
  if (size_of(dtype) != 2) return;
  std::mt19937_64 random = random_engine();
  const std::vector<Config> all = gpu_configs();
  for (int config = 0; config < static_cast<int>(all.size()); ++config) {
    const Config& tile = all[static_cast<std::size_t>(config)];
    if (tile.teams == 1) continue;
    Case many{.m = 19 * tile.bm + 8, .n = 17 * tile.bn + 8, .k = 64, .b = {Place::dense, true}, .config = config};
    const auto check_many = [&] { check(many, Device::cuda(), dtype, random); };
    check_many();
    many.with_bias = true;
    many.k = 136;
    many.activation = Activation::gelu_erf;
    check_many();
    many.k = tile.stages * 64;
    check_many();
  }
}

/// `splits` is for the GPU: the CPU never divides K.
TEST_P(GemmConfig, PartsOfKAreSummed) {
  skip_without_cuda();
  const Device device = Device::cuda();
  const DType dtype = GetParam();
  warm_up();
  std::mt19937_64 random = random_engine();
  const Operand b{dtype == DType::bf16 ? Place::dense : Place::aligned, true};
  for (const int splits : {2, 3, 8}) {
    check({.m = 70, .n = 129, .k = 1000, .b = b, .splits = splits}, device, dtype, random);
    check({.m = 33, .n = 64, .k = 64, .b = b, .splits = splits}, device, dtype, random);
    const Case all{.m = 40, .n = 80, .k = 640, .batch = 2, .b = b, .with_bias = true, .with_residual = true, .beta = 1, .splits = splits};
    check(all, device, dtype, random);
  }
}

/// Fewer tiles than SMs, and more, by tiles and operands' layouts; what sums begin with and what is added at the end.
TEST_P(GemmConfig, SharesOfKAreSummed) {
  skip_without_cuda();
  const Device device = Device::cuda();
  const DType dtype = GetParam();
  if (size_of(dtype) != 2) return;  // others are not divided
  warm_up();
  std::mt19937_64 random = random_engine();
  const int units = device_info(device).units;
  const std::vector<Config> all = gpu_configs();
  for (int config = 0; config < static_cast<int>(all.size()); ++config) {
    const Config& tile = all[static_cast<std::size_t>(config)];
    if (tile.cluster > 1 || tile.teams > 1) continue;
    Case c{.m = 520, .n = 520, .k = 1000, .b = {Place::dense, true}, .config = config, .splits = kStreamK};
    check(c, device, dtype, random);
    Case many = c;
    many.m = tile.bm * (units / 8 + 1) - 8;
    many.n = tile.bn * 9 - 8;
    many.k = 200;
    many.with_bias = true;
    many.activation = Activation::relu;
    check(many, device, dtype, random);
    if (dtype != DType::bf16) continue;
    c.batch = 3;
    c.with_bias = true;
    if (sums_can_begin() ? tile.bn <= 192 : tile.bm <= 128 && tile.bn <= 128) {
      c.with_residual = true;
      check(c, device, dtype, random);
      if (tile.bm <= 128 && tile.bn <= 128) {
        c.alpha = 0.5f;
        check(c, device, dtype, random);
      }
    }
    if (tile.bn % 64 != 0) continue;
    c = {.m = 520, .n = 520, .k = 1000, .config = config, .splits = kStreamK};
    check(c, device, dtype, random);
    c.a = {Place::dense, true};
    check(c, device, dtype, random);
  }
  check({.m = 1500, .n = 1280, .k = 512, .b = {Place::aligned, true}, .config = -1, .splits = kStreamK}, device, dtype, random);
}

TEST_P(GemmConfig, OfTheHeuristicIsCorrect) {
  skip_without_cuda();
  warm_up();
  std::mt19937_64 random = random_engine();
  check({.m = 512, .n = 256, .k = 128, .b = {Place::dense, true}, .config = -1}, Device::cuda(), GetParam(), random);
  check({.m = 8, .n = 1024, .k = 512, .b = {Place::dense, true}, .config = -1}, Device::cuda(), GetParam(), random);
}

}  // namespace
}  // namespace tw::kernels::gemm
