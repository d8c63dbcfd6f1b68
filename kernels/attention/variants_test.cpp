// Which tiles a call of attention() takes, and the kernels that are registered.

#include "tests/compiled_kernels.hpp"
#include "tilewave/attention.hpp"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "kernels/attention/backward.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/score_softmax.tile.hpp"
#include "kernels/attention/variants.hpp"
#include "runtime/format.hpp"
#include "tests/support.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/tile/cpu/target.tile.hpp"

namespace tw::kernels::attention {
namespace {

using namespace tw::test;

TEST(AttentionTileUse, FollowsFromWhatATileSees) {
  struct Case {
    std::int64_t rows, keys, head_dim;
    AttentionOptions options;
    TileUse expected;
  };
  const Case cases[] = {
      {4096, 4096, 64, {}, TileUse::widest},
      {8192, 8192, 64, {}, TileUse::wide},
      {512, 512, 64, {}, TileUse::widest},
      {2048, 2048, 64, {.causal = true}, TileUse::paired},
      {2048, 2048, 40, {.causal = true}, TileUse::paired},
      {2049, 2049, 64, {.causal = true}, TileUse::widest},
      {512, 8192, 64, {.causal = true}, TileUse::narrow},  // the last queries of many keys
      {8192, 8192, 64, {.causal = true, .window_left = 1024}, TileUse::paired},
      {8192, 8192, 64, {.window_left = 512, .window_right = 512}, TileUse::paired},
      {8192, 8192, 64, {.window_left = 1024, .window_right = 1}, TileUse::wide},
      {8192, 8192, 64, {.window_left = 512}, TileUse::wide},  // all keys behind
      {8192, 8192, 64, {.attention_chunk = 1024}, TileUse::paired},
      {8192, 8192, 64, {.attention_chunk = 1025}, TileUse::wide},
      {8192, 8192, 64, {.causal = true, .attention_chunk = 2048}, TileUse::paired},
      {1024, 1024, 96, {.causal = true}, TileUse::wide},
      {1024, 1024, 128, {.causal = true}, TileUse::narrow},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(tw::format("{} queries, {} keys, head_dim {}, causal {}, window {} {}, chunk {}", c.rows, c.keys, c.head_dim,
                            c.options.causal, c.options.window_left, c.options.window_right, c.options.attention_chunk));
    const auto tensor = [&](std::int64_t rows) { return placeholder({1, rows, 2, c.head_dim}, DType::bf16); };
    EXPECT_EQ(tile_use(tw::detail::check_attention(tensor(c.rows), tensor(c.keys), tensor(c.keys), tensor(c.rows), c.options)), c.expected);
  }
  // 16 sequences of 1024: most work is in those longer than that.
  const auto packed = [] { return placeholder({1, 16384, 2, 64}, DType::bf16); };
  tw::detail::AttentionCall call = tw::detail::check_attention(packed(), packed(), packed(), packed(), {.causal = true});
  const std::int32_t starts[17] = {};
  call.cu_q = call.cu_k = starts;
  call.batch = 16;
  EXPECT_EQ(tile_use(call), TileUse::paired);
  call.batch = 8;
  EXPECT_EQ(tile_use(call), TileUse::wide);
}

// The kernel of attention in f32 on a GPU, which is not registered.
TEST(AttentionInF32, SoftmaxOfScoresCompiles) {
  skip_without_nvrtc();
  const CompiledKernel kernel = compile(make_spec(kernel_info<ScoreSoftmax<1024>>, true, true, "score_softmax"));
  EXPECT_EQ(kernel.spill_bytes, 0);
}

TEST(AttentionInChunks, CompilesWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs = chunks_backward_specs();
  const auto add = [&](int head_dim, TileUse use, int form) {
    const Kernel kernel{
        .dtype = DType::bf16, .rules = {.upper = true, .chunks = true}, .config = gpu_config({head_dim, head_dim}, use, form)};
    specs.push_back(make_spec({type_of(kernel), "tilewave/tile/attention.tile.hpp", nullptr}, true, true,
                              tw::format("attention in chunks, D {}, use {}, form {}", head_dim, static_cast<int>(use), form)));
  };
  for (const TileUse use : {TileUse::widest, TileUse::wide, TileUse::paired}) add(64, use, kEqualLengths);
  add(96, TileUse::wide, kEqualLengths);
  for (const int head_dim : {128, 192, 256}) add(head_dim, TileUse::narrow, kEqualLengths);
  for (const int head_dim : {64, 128, 256}) add(head_dim, TileUse::split, kRagged | kSplit | kPaged);
  add(128, TileUse::narrow, kRagged);
  compile_and_check(specs, "sm_90a", [](const KernelSpec& spec, const CompiledKernel& kernel) {
    // All gradients of D 64 leave few registers, with a window too.
    EXPECT_LE(kernel.spill_bytes, spec.name.starts_with("all ") && spec.name.find("d64 ") != std::string::npos ? 64 : 0) << spec.name;
    EXPECT_EQ(kernel.performance_losses.size(), 0u) << spec.name;
  });
}

TEST(AttentionOfQueryValues, CompilesWithoutSpills) {
  skip_without_nvrtc();
  std::vector<KernelSpec> specs;
  const auto add = [&](const AttentionConfig& config, GpuTarget target, const RuleSet& rules) {
    const Kernel kernel{.dtype = DType::bf16, .rules = rules, .config = config};
    const KernelSpec spec = make_spec({type_of(kernel), "tilewave/tile/attention.tile.hpp", nullptr}, true, true,
                                      tw::format("attention with qv, {}", text_of(config)));
    specs.push_back(target == GpuTarget::cuda ? for_target(spec, target) : spec);
  };
  constexpr int kDecode = kRagged | kSplit | kPaged;
  for (const HeadDims dims : {HeadDims{64, 256}, {64, 128}, {64, 64}, {128, 128}, {128, 256}}) {
    add(query_values_config(dims, TileUse::narrow, kEqualLengths), GpuTarget::sm_90a, {.upper = true});
    add(query_values_config(dims, TileUse::split, kDecode), GpuTarget::sm_90a, {});
  }
  add(query_values_config({64, 256}, TileUse::narrow, kRagged), GpuTarget::sm_90a, {.upper = true});
  for (const std::int64_t shared : {std::int64_t{99} << 10, std::int64_t{163} << 10}) {
    for (const HeadDims dims : {HeadDims{64, 256}, {128, 256}})
      for (const int form : {0, kDecode}) add(generic_config(dims, form | kQueryValues, {}, shared), GpuTarget::cuda, {.upper = true});
  }
  compile_and_check(specs, "sm_90a", expect_fast);
}

TEST(AttentionRegistered, NamesAreUniqueAndLaunchesPossible) {
  std::set<std::string> names, kernels;
  for (const KernelSpec& spec : specs_of(registered())) {
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name << " twice";
    EXPECT_TRUE(kernels.insert(spec.type + " on " + spec.target).second) << spec.name << " is another name's kernel";
    EXPECT_NE(find_embedded(spec.source), nullptr) << spec.source;
  }
  EXPECT_FALSE(names.empty());
}

TEST(AttentionRegistered, PairedTilesAreTwoBlocksOnAnSM) {
  skip_without_nvrtc();
  for (const KernelSpec& spec : specs_of(registered())) {
    if (!spec.type.starts_with("tw::Attention<") || !spec.name.ends_with("_d64_causal")) continue;
    const CompiledKernel kernel = compile(spec);
    // An SM has so much shared memory and so many registers; the system takes 1 KB for each block.
    EXPECT_LE(2 * (kernel.module.shared_bytes + 1024), 233472) << spec.name;
    EXPECT_LE(2 * kernel.module.threads * kernel.registers, 65536) << spec.name;
  }
}

}  // namespace
}  // namespace tw::kernels::attention
