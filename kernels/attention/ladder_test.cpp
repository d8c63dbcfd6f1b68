// Every rung of the ladder gives attention's result.

#include "kernels/attention/ladder.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/attention/reference.hpp"
#include "runtime/format.hpp"
#include "tests/accuracy.hpp"
#include "tests/placed_tensor.hpp"
#include "tests/support.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

constexpr std::int64_t kBatch = 2, kHeads = 2;

class Ladder : public testing::TestWithParam<std::tuple<Device, DType>> {
 protected:
  void SetUp() override {
    skip_unless_present(device);
    if (device.is_cuda() && nvrtc_problem().empty()) compile_all(ladder_kernels());  // on all cores
    cpu::set_poison_released_slots(true);
  }
  /// `magnitude`: standard deviation of the scores.
  void check(std::int64_t seqlen, bool causal, float magnitude) {
    // In the tests' order of dimensions, [batch, row, head, dim].
    const Shape shape = {kBatch, seqlen, kHeads, kLadderHeadDim};
    const Placement by_head{.order = {0, 2, 1, 3}};
    PlacedTensor q(shape, dtype, device, by_head), k(shape, dtype, device, by_head), v(shape, dtype, device, by_head);
    const std::vector<float> q_values = q.fill_random(random), k_values = k.fill_random(random, magnitude),
                             v_values = v.fill_random(random);
    PlainCall plain{
        .batch = kBatch, .heads = kHeads, .kv_heads = kHeads, .seqlen_q = seqlen, .seqlen_k = seqlen, .head_dim = kLadderHeadDim};
    plain.q = q_values, plain.k = k_values, plain.v = v_values;
    plain.scale = 1 / std::sqrt(static_cast<double>(kLadderHeadDim));
    plain.causal = causal;
    const std::vector<double> expected = reference(plain).o, unfused = naive(plain, dtype).o;
    const Stream stream = Stream::standard(device);
    for (const Rung& rung : ladder()) {
      // Scores that pass through memory are rounded to bf16: of large ones that is more than the rule on relative errors allows.
      if (magnitude > 1 && dtype == DType::bf16 && &rung == &ladder().front()) continue;
      SCOPED_TRACE(tw::format("{} of {} tokens, causal {}, magnitude {}", rung.name, seqlen, causal, magnitude));
      PlacedTensor o(shape, dtype, device, by_head);
      const LadderCall call{.q = q.tensor().transpose(1, 2),
                            .k = k.tensor().transpose(1, 2),
                            .v = v.tensor().transpose(1, 2),
                            .o = o.tensor().transpose(1, 2),
                            .scores = Tensor::poisoned({kBatch * kHeads, seqlen, seqlen}, dtype, stream),
                            .causal = causal,
                            .stream = stream};
      if (!launched([&] { rung.run(call); })) continue;
      EXPECT_TRUE(accurate({o.values(), expected, unfused, arithmetic_of(dtype, device)}));
    }
  }

  const Device device = std::get<0>(GetParam());
  const DType dtype = std::get<1>(GetParam());
  std::mt19937_64 random = random_engine();
};

TEST_P(Ladder, RungsAgreeWithTheReference) {
  // One key, less than a tile, tiles of 64 and 128 and their neighbours, several blocks of keys.
  for (const std::int64_t seqlen : {1, 37, 64, 65, 127, 128, 129, 192, 256, 331}) {
    for (const bool causal : {false, true}) check(seqlen, causal, 1);
  }
}

TEST_P(Ladder, RowsWhoseMaximumGrowsByMuch) {
  // Of 257 tokens the last sees one key of the block that comes first: exponentials relative to its score would overflow.
  for (const std::int64_t seqlen : {129, 257, 331}) check(seqlen, true, 60);
}

TEST(LadderNames, AreOnceEachAndEndWithTheProduct) {
  std::vector<std::string> names;
  for (const Rung& rung : ladder()) names.emplace_back(rung.name);
  EXPECT_EQ(names.front(), "naive");
  EXPECT_EQ(names.back(), "tilewave");
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

TEST(LadderKernels, CompileForTheGpuWithoutLosses) {
  skip_without_nvrtc();
  const std::vector<KernelSpec> kernels = ladder_kernels();
  ASSERT_EQ(kernels.size(), 6u);
  for (const KernelSpec& spec : kernels) {
    SCOPED_TRACE(spec.type);
    const CompiledKernel kernel = compile(spec);
    EXPECT_EQ(kernel.spill_bytes, 0);
    EXPECT_EQ(kernel.performance_losses, std::vector<std::string>());
    EXPECT_EQ(kernel.tensor_core_instruction.empty(), !kernel.module.loads);
  }
}

std::string name(const testing::TestParamInfo<Ladder::ParamType>& param) {
  return tw::format("{}_{}", std::get<0>(param.param).is_cuda() ? "cuda" : "cpu", name_of(std::get<1>(param.param)));
}
INSTANTIATE_TEST_SUITE_P(Devices, Ladder,
                         testing::Values(std::tuple(Device::cpu(), DType::bf16), std::tuple(Device::cpu(), DType::f32),
                                         std::tuple(Device::cuda(), DType::bf16)),
                         name);

}  // namespace
}  // namespace tw::kernels::attention
