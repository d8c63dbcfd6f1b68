#include <map>
#include <mutex>

#include "kernels/attention/call.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/key_blocks.hpp"
#include "kernels/attention/packed_tiles.tile.hpp"
#include "kernels/attention/variants.hpp"
#include "kernels/named.hpp"
#include "kernels/workspace.hpp"

namespace tw {

namespace kernels::attention {

std::string text_of(const AttentionConfig& c) {
  return tw::format(
      "tw::AttentionConfig{{.head_dim = {}, .value_dim = {}, .rows = {}, .keys = {}, .stages = {}, .form = {}, .dropout = "
      "tw::Use::{}, .min_blocks = {}, .lag = {}, "
      ".queries_in_registers = {}, .queries_back_early = {}, .maxima_first = {}, .rules_in_halves = {}}}",
      c.head_dim, c.value_dim, c.rows, c.keys, c.stages, c.form, c.dropout == Use::always ? "always" : "never", c.min_blocks, c.lag,
      c.queries_in_registers, c.queries_back_early, c.maxima_first, c.rules_in_halves);
}

std::string text_of(const RuleSet& rules, const detail::UserRuleInfo* user) {
  const auto use = [](bool used) { return used ? "always" : "never"; };
  return tw::format(
      "tw::Rules<tw::Optional<tw::Softcap, tw::Use::{}>, tw::Optional<tw::Alibi, tw::Use::{}>, tw::Optional<tw::MaskTensor, tw::Use::{}>, "
      "{}tw::Band<{}, {}{}>>",
      use(rules.softcap), use(rules.alibi), use(rules.mask), user ? tw::format("tw::UserRule<{}>, ", user->type) : "", rules.lower,
      rules.upper, rules.chunks ? ", true" : "");
}

namespace {

const detail::NamedKernel& named(const Kernel& kernel) {
  static KernelTable<Kernel> table(type_of, "tilewave/tile/attention.tile.hpp");
  if (kernel.user == nullptr) return table[kernel];
  // A user-defined rule's file includes the kernel's.
  static std::mutex mutex;
  static std::map<const char*, KernelTable<Kernel>> tables;
  const std::lock_guard lock(mutex);
  return tables.try_emplace(kernel.user->source, type_of, kernel.user->source).first->second[kernel];
}

}  // namespace

RuleSet rules_of(const detail::AttentionCall& call) {
  return {call.softcap > 0, call.slopes != nullptr, call.mask != nullptr, call.lower, call.upper, call.chunk > 0};
}

std::string type_of(const Kernel& k) {
  const std::string output = k.dtype == DType::fp8_e4m3 ? tw::format(", {}", element_name(k.output)) : "";
  return tw::format("tw::Attention<{}, {}, {}{}>", element_name(k.dtype), text_of(k.config), text_of(k.rules, k.user), output);
}

void run_on_gpu(const detail::AttentionCall& call) { run_on_gpu(call, tuned_config(call)); }

namespace {

void launch_on_gpu(const detail::AttentionCall& call, const AttentionConfig& config) {
  const DType dtype = call.q.dtype();
  const detail::AttentionKernel kernel{named({nullptr, dtype, rules_of(call), config, call.o.dtype()}), config};
  if (dtype == DType::fp8_e4m3) {
    return call.o.dtype() == DType::f16 ? detail::run_attention_gpu_as<fp8_e4m3, f16>(call, kernel, kNoUserRule)
                                        : detail::run_attention_gpu_as<fp8_e4m3, bf16>(call, kernel, kNoUserRule);
  }
  dtype == DType::f16 ? detail::run_attention_gpu<f16>(call, kernel, kNoUserRule)
                      : detail::run_attention_gpu<bf16>(call, kernel, kNoUserRule);
}

}  // namespace

void run_on_gpu(const detail::AttentionCall& call, const AttentionConfig& config) {
  if (!call.blocks) return launch_on_gpu(call, config);
  with_lists(call, config.rows, config.keys, [&](const AttentionCall& some) { launch_on_gpu(some, config); });
}

Tensor list_packed_tiles(detail::AttentionCall& call) {
  // Each sequence is held against each other: beyond some thousands that takes longer than it saves.
  constexpr int kMostSequences = 4096;
  if (!call.stream.device().is_cuda() || call.batch > kMostSequences) return {};
  const int units = usable_units(call), tile_rows = choose_config(call).rows;
  const TileGrid grid = detail::attention_grid(call, tile_rows);
  if (grid.count() < 2 * units) return {};
  Tensor tiles = workspace({grid.m, PackedTile::numbers}, DType::i32, call.stream);
  packed_tiles(call, tile_rows, tiles);
  call.tiles = tiles.data<std::int32_t>();
  return tiles;
}

void packed_tiles(const detail::AttentionCall& call, int tile_rows, const Tensor& tiles) {
  launch<PackedTiles<256>>(call.stream, {call.batch, 1, 1}, [&](auto&, auto& p) {
    p.cu_q = call.cu_q, p.cu_k = call.cu_k;
    p.used_q = call.used_q, p.used_k = call.used_k;
    p.batch = call.batch;
    p.queries = static_cast<int>(call.q.shape(2)), p.keys = call.keys;
    p.longest_first = false;
    p.tile_rows = tile_rows;
    p.count = static_cast<int>(tiles.shape(0));
    p.tiles = tiles.data<std::int32_t>();
  });
}

}  // namespace kernels::attention

namespace detail {

AttentionKernel attention_kernel_with(const AttentionCall& call, DType dtype, int head_dim, const UserRuleInfo& rule) {
  using namespace kernels::attention;
  require(rule.source != nullptr,
          "attention_with: {} cannot run on a GPU: it has no `source`, the embedded *.tile.hpp file that defines it (a rule defined in a "
          "host file is CPU-only)",
          rule.type);
  const AttentionConfig config = config_of(call, {head_dim, head_dim}, TileUse::narrow, kEqualLengths, traits_of(call, &rule));
  return {kernels::attention::named({&rule, dtype, rules_of(call), config}), config};
}

}  // namespace detail

}  // namespace tw
