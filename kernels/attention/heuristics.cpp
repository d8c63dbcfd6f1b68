#include "kernels/attention/heuristics.hpp"

#include <algorithm>
#include <iterator>

#include "kernels/attention/call.hpp"
#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"

namespace tw {

namespace kernels::attention {

namespace {

/// Keys that a row sees under a causal mask or in a window, on average, with which paired tiles are faster.
constexpr std::int64_t kFewKeys = 1024;

/// Whether TMA can load it.
bool aligned(const Tensor& t) {
  if (reinterpret_cast<std::uintptr_t>(t.data()) % 16 != 0) return false;
  for (int dim = 0; dim < 3; ++dim)
    if (t.shape(dim) > 1 && (t.stride(dim) <= 0 || t.stride(dim) * static_cast<std::int64_t>(size_of(t.dtype())) % 16 != 0)) return false;
  return true;
}

/// Heads that are worked on together: one if sequences are short, so that blocks that end at the same time read the same keys; else those
/// whose keys and values the cache holds. All their queries come before the next group's.
int heads_per_group(const detail::AttentionCall& call, int heads) {
  if (!call.cu_q && call.q.shape(2) <= (call.upper ? 512 : 2048)) return 1;
  return heads_in_cache(call.k.numel() / std::max<std::int64_t>(1, call.k.shape(0)) * 2 *
                            static_cast<std::int64_t>(size_of(call.q.dtype())) / std::max<std::int64_t>(1, call.q.shape(1)),
                        heads);
}

}  // namespace

int heads_in_cache(std::int64_t bytes, int heads) {
  constexpr std::int64_t kCacheBytes = 32 << 20;  // about half of an H200's L2 cache
  int group = static_cast<int>(std::clamp<std::int64_t>(kCacheBytes / std::max<std::int64_t>(1, bytes), 1, std::max(1, heads)));
  while (heads % group != 0) --group;
  return group;
}

int usable_units(const detail::AttentionCall& call) {
  const Device device = call.stream.device();
  return std::max(1, device_info(device).units - (device.is_cuda() ? call.sm_margin : 0));
}

bool loads_by_tma(const detail::AttentionCall& call) {
  return aligned(call.q) && aligned(call.k) && aligned(call.v) && (call.qv.numel() == 0 || aligned(call.qv));
}

TileUse tile_use(const detail::AttentionCall& call) {
  const std::int64_t head_dim = std::max(call.q.shape(3), call.v.shape(3));
  // Without TMA the loading warpgroup needs registers that three others would not leave it; nor would loads of a mask.
  if (head_dim > 96 || call.mask || !loads_by_tma(call)) return TileUse::narrow;
  if (head_dim > 64) return TileUse::wide;
  // Of sequences that follow each other most work is in those longer than the mean.
  const std::int64_t rows = call.cu_q ? 2 * call.q.shape(2) / call.batch : call.q.shape(2);
  const std::int64_t keys = call.cu_k ? 2 * call.k.shape(2) / call.batch : call.keys;
  if (call.upper || call.chunk > 0) {
    std::int64_t seen = call.upper ? keys - std::min(rows, keys) / 2 : keys;
    if (call.upper && call.lower) seen = std::min<std::int64_t>(seen, call.left + call.right);
    if (call.chunk > 0) seen = std::min<std::int64_t>(seen, call.upper ? call.chunk / 2 : call.chunk);
    // Two blocks on an SM leave none free: the first ones are spread over all SMs.
    if (seen <= kFewKeys && call.sm_margin == 0) return TileUse::paired;
    // Few tiles, and unequal ones.
    if (call.upper && rows <= 512) return TileUse::narrow;
  }
  if (rows > 4096 || call.cu_q) return TileUse::wide;
  if (call.upper) return TileUse::widest;
  // Equal tiles are done in rounds over the SMs. 192 rows take three quarters of the time of 256.
  const int units = usable_units(call);
  const auto rounds = [&](std::int64_t tile) { return ((rows + tile - 1) / tile * call.q.shape(0) * call.q.shape(1) + units - 1) / units; };
  return 4 * rounds(256) <= 3 * rounds(192) ? TileUse::widest : TileUse::wide;
}

RuleTraits traits_of(const detail::AttentionCall& call, const detail::UserRuleInfo* user) {
  const bool mask = call.mask != nullptr;
  return {mask || (user && user->anywhere), mask || call.softcap > 0 || call.slopes || (user && user->changing), user != nullptr};
}

AttentionConfig generic_config(HeadDims dims, int form, const RuleTraits& rules, std::int64_t shared, int most_rows) {
  struct Choice {
    int rows, keys, stages;
  };
  constexpr Choice choices[] = {{128, 64, 3}, {128, 64, 2}, {64, 64, 2}, {64, 64, 1}, {64, 32, 2}, {64, 32, 1}, {64, 16, 2}};
  const int largest = std::max(dims.head_dim, dims.value_dim);
  // Rows have whole lines of 128 bytes; each of four warps has 2 KB of staging, and a dynamic schedule 1 KB.
  const auto line = [](int columns) { return (columns + 63) / 64 * 128; };
  const auto fits = [&](const Choice& c) {
    if (c.rows > most_rows || (c.rows == 128 && ((form & kSplit) || largest > 128)))
      return false;  // decode has few rows; 32 rows of wide outputs: no registers
    if (c.stages == 3 && largest > 64) return false;
    const bool query_values = (form & kQueryValues) != 0;
    if (query_values && c.stages < 2) return false;
    return c.rows * (line(dims.head_dim) + (query_values ? line(dims.value_dim) : 0)) +
               c.stages * c.keys * (line(dims.head_dim) + line(dims.value_dim)) + 9 * 1024 <=
           shared;
  };
  const auto* found = std::find_if(std::begin(choices), std::end(choices) - 1, fits);
  AttentionConfig c{.head_dim = dims.head_dim,
                    .value_dim = dims.value_dim,
                    .rows = found->rows,
                    .keys = found->keys,
                    .stages = found->stages,
                    .form = form};
  c.lag = 0;  // a product is done when it returns: nothing runs under it
  c.queries_back_early = largest <= 96;
  c.maxima_first = rules.anywhere;
  c.rules_in_halves = !c.maxima_first && rules.changing;
  return c;
}

AttentionConfig config_of(const detail::AttentionCall& call, HeadDims dims, TileUse use, int form, const RuleTraits& rules) {
  const std::int64_t shared = generic_shared_bytes(call.stream);
  AttentionConfig config;
  if (const KeyBlocks& blocks = call.blocks) {
    const int query_block = blocks.all_queries ? 128 : blocks.of.query_block;
    config = shared ? generic_config(dims, form | kListed, rules, shared, query_block)
                    : listed_config(dims, call.split ? TileUse::split : TileUse::narrow, query_block, blocks.of.key_block, form, rules);
  } else if (call.qv.numel() > 0) {
    const HeadDims both = query_values_dims(call.q.shape(3), call.v.shape(3));
    config = shared ? generic_config(both, form | kQueryValues, rules, shared) : query_values_config(both, use, form, rules);
  } else {
    config = shared ? generic_config(dims, form, rules, shared) : gpu_config(dims, use, form, rules);
  }
  config.dropout = call.drops() ? Use::always : Use::never;
  return config;
}

AttentionConfig choose_config(const detail::AttentionCall& call) {
  if (call.q.dtype() == DType::fp8_e4m3)
    return fp8_config({static_cast<int>(call.q.shape(3)), static_cast<int>(call.o.shape(3))}, call.mask != nullptr || !loads_by_tma(call),
                      traits_of(call));
  const int form = (call.split      ? kRagged | kSplit | kPaged
                    : call.pages    ? kRagged | kPaged
                    : call.ragged() ? kRagged
                                    : kEqualLengths) |
                   (call.descaled ? kDescaled : 0);
  // Three warpgroups have no registers for the descales.
  const TileUse use = call.split ? TileUse::split : call.pages || call.descaled ? TileUse::narrow : tile_use(call);
  return config_of(call, compiled_dims(call.q.shape(3), call.v.shape(3)), use, form, traits_of(call));
}

}  // namespace kernels::attention

namespace detail {

TileGrid attention_grid(const AttentionCall& call, int bm) {
  const int rows = static_cast<int>(call.q.shape(2));
  const int heads = call.blocks.head_count > 0 ? call.blocks.head_count : static_cast<int>(call.q.shape(1) * call.q.shape(0));
  const int tiles = (call.cu_q ? rows / bm + call.batch : ceil_div(rows, bm)) * call.splits;
  const int group = kernels::attention::heads_per_group(call, heads);
  return {tiles, group, heads / group};
}

}  // namespace detail

int decode_splits(int sequences, int seqlen_k, int block, int multiprocessors, int most) {
  require(sequences >= 0 && seqlen_k >= 0, "decode_splits: sequences is {} and seqlen_k {}; they must not be negative", sequences,
          seqlen_k);
  require(block > 0 && multiprocessors > 0 && most > 0, "decode_splits: block is {}, multiprocessors {} and most {}; they must be positive",
          block, multiprocessors, most);
  // Parts are worked on in rounds of `multiprocessors`; in the last round some are idle.
  const auto busy = [&](int splits) {
    const std::int64_t parts = std::int64_t{sequences} * splits, rounds = (parts + multiprocessors - 1) / multiprocessors;
    return static_cast<double>(parts) / static_cast<double>(rounds * multiprocessors);
  };
  const int limit = std::clamp(seqlen_k / block, 1, most);
  if (sequences == 0) return 1;
  double best = 0;
  for (int splits = 1; splits <= limit; ++splits) best = std::max(best, busy(splits));
  int splits = 1;
  while (busy(splits) < 0.96 * best) ++splits;
  return splits;
}

}  // namespace tw
