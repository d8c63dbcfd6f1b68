// combine() against loops in double, on the CPU and, where there is one, on a GPU.

#include "kernels/attention/call.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

struct Case {
  std::int64_t splits = 4, batch = 2, kv_heads = 2, group = 3, seqlen_q = 2, value_dim = 64;
  double without_keys = 0.2;  ///< share of parts that have none
  float magnitude = 3;        ///< standard deviation of the parts' lse
  bool sink = false, lse = true, sink_in_lse = true;
  Placement o = {};
};

class Combine : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    if (device.is_cuda() && dtype == DType::f32) GTEST_SKIP() << "skipped: f32 is for the CPU";
  }
  void check(const Case& c) {
    SCOPED_TRACE(tw::format("splits {} batch {} kv_heads {} group {} seqlen_q {} value_dim {} without keys {} magnitude {} sink {}",
                            c.splits, c.batch, c.kv_heads, c.group, c.seqlen_q, c.value_dim, c.without_keys, c.magnitude, c.sink));
    const std::int64_t heads = c.kv_heads * c.group, rows = c.seqlen_q * c.group, all_rows = c.batch * c.kv_heads * rows, d = c.value_dim;
    PlacedTensor parts({c.splits, c.batch, c.kv_heads, rows, d}, DType::f32, device),
        part_lse({c.splits, c.batch, c.kv_heads, rows}, DType::f32, device), sink({heads}, DType::f32, device);
    PlacedTensor o({c.batch, c.seqlen_q, heads, d}, dtype, device, c.o), lse({c.batch, heads, c.seqlen_q}, DType::f32, device);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<double> uniform;
    std::vector<float> values(static_cast<std::size_t>(c.splits * all_rows * d)), logits(static_cast<std::size_t>(c.splits * all_rows)),
        sinks(static_cast<std::size_t>(heads));
    for (std::size_t row = 0; row < logits.size(); ++row) {
      const bool empty = uniform(random) < c.without_keys;
      logits[row] = empty ? -kInf : c.magnitude * normal(random);
      for (std::size_t col = 0; col < static_cast<std::size_t>(d); ++col)
        values[row * static_cast<std::size_t>(d) + col] = empty ? std::numeric_limits<float>::quiet_NaN() : normal(random);
    }
    for (float& x : sinks) x = c.magnitude * normal(random);
    parts.fill(values);
    part_lse.fill(logits);
    sink.fill(sinks);
    const CombineCall call{.parts = parts,
                           .part_lse = part_lse,
                           .o = o,
                           .lse = c.lse ? &lse.tensor() : nullptr,
                           .sink = c.sink ? &sink.tensor() : nullptr,
                           .sink_in_lse = c.sink_in_lse};
    if (!launched([&] { combine(call, Stream::standard(device)); })) return;

    std::vector<double> expected, expected_lse, naive;
    for (std::int64_t b = 0; b < c.batch; ++b) {
      for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
        for (std::int64_t head = 0; head < heads; ++head) {
          const std::int64_t row = (b * heads + head) * c.seqlen_q + i;
          double sum = c.sink ? std::exp(static_cast<double>(sinks[static_cast<std::size_t>(head)])) : 0;
          std::vector<double> sums(static_cast<std::size_t>(d));
          for (std::int64_t split = 0; split < c.splits; ++split) {
            const auto at = static_cast<std::size_t>(split * all_rows + row);
            if (logits[at] == -kInf) continue;
            const double weight = std::exp(static_cast<double>(logits[at]));
            sum += weight;
            for (std::size_t col = 0; col < sums.size(); ++col) sums[col] += weight * static_cast<double>(values[at * sums.size() + col]);
          }
          for (const double x : sums) {
            expected.push_back(sum > 0 ? x / sum : 0);
            naive.push_back(round_to(dtype, static_cast<float>(expected.back())));
          }
        }
      }
      for (std::int64_t head = 0; head < heads; ++head) {
        for (std::int64_t i = 0; i < c.seqlen_q; ++i) {
          const std::int64_t row = (b * heads + head) * c.seqlen_q + i;
          double sum = c.sink && c.sink_in_lse ? std::exp(static_cast<double>(sinks[static_cast<std::size_t>(head)])) : 0;
          for (std::int64_t split = 0; split < c.splits; ++split)
            sum += std::exp(static_cast<double>(logits[static_cast<std::size_t>(split * all_rows + row)]));
          expected_lse.push_back(std::log(sum));
        }
      }
    }
    EXPECT_TRUE(accurate({o.values(), expected, naive, arithmetic_of(dtype, Device::cpu())}));
    EXPECT_TRUE(o.gaps_intact());
    if (!c.lse) {
      EXPECT_TRUE(lse.untouched());
      return;
    }
    const std::vector<double> sums = lse.values();
    for (std::size_t n = 0; n < sums.size(); ++n) {
      if (std::isinf(expected_lse[n]))
        ASSERT_EQ(sums[n], expected_lse[n]) << n;
      else
        ASSERT_NEAR(sums[n], expected_lse[n], 1e-5 * (1 + std::abs(expected_lse[n]))) << n;
    }
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

INSTANTIATE_TEST_SUITE_P(Ops, Combine, testing::Combine(testing::ValuesIn(kDevices), testing::Values(DType::f32, DType::f16, DType::bf16)),
                         [](const auto& instance) {
                           return tw::format("{}_{}", std::get<0>(instance.param).is_cuda() ? "cuda" : "cpu",
                                             name_of(std::get<1>(instance.param)));
                         });

TEST_P(Combine, AnyNumberOfParts) {
  for (const std::int64_t splits : {1, 2, 3, 8, 15, 16, 17, 33, 128}) {
    for (const bool sink : {false, true}) check({.splits = splits, .sink = sink});
  }
}

TEST_P(Combine, AnyShape) {
  for (const std::int64_t value_dim : {8, 64, 96, 128, 136, 256, 264, 512}) check({.value_dim = value_dim});
  for (const std::int64_t group : {1, 2, 8}) check({.batch = 3, .group = group, .seqlen_q = 5, .lse = group == 1});
  check({.batch = 1, .kv_heads = 1, .group = 1, .seqlen_q = 1});
  check({.o = {.order = {0, 2, 1, 3}, .gap = 8}});
  check({.o = {.offset = 3, .gap = 5}});
}

TEST_P(Combine, PartsWithoutKeys) {
  for (const double share : {0.0, 0.9, 1.0}) {
    check({.splits = 3, .without_keys = share});
    check({.splits = 40, .without_keys = share});
    check({.splits = 3, .without_keys = share, .sink = true});
    check({.splits = 3, .without_keys = share, .sink = true, .sink_in_lse = false});
  }
}

TEST_P(Combine, LargeLogitsDoNotOverflow) {
  // e^300 is beyond f32, and within double.
  check({.splits = 20, .magnitude = 100});
  check({.splits = 20, .magnitude = 100, .sink = true});
  check({.splits = 20, .magnitude = 100, .sink = true, .sink_in_lse = false});
}

TEST_P(Combine, OnePartPassesThrough) {
  // Its weight is 1, exactly.
  PlacedTensor parts({1, 1, 2, 2, 64}, DType::f32, device), part_lse({1, 1, 2, 2}, DType::f32, device), o({1, 1, 4, 64}, dtype, device);
  const std::vector<float> values = parts.fill_random(random);
  part_lse.fill_random(random, 20);
  if (!launched([&] { combine({.parts = parts, .part_lse = part_lse, .o = o}, Stream::standard(device)); })) return;
  const std::vector<double> out = o.values();
  for (std::size_t n = 0; n < out.size(); ++n) ASSERT_EQ(out[n], round_to(dtype, values[n])) << n;
}

}  // namespace
}  // namespace tw::kernels::attention
