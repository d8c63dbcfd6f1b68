#pragma once

#include <array>
#include <bit>
#include <compare>
#include <string>
#include <type_traits>

#include "tilewave/detail/attention_call.hpp"

// Tile sizes and schedules of the GPU's kernels, which serve a call best, and their names: no template is instantiated on the host for a
// size, a schedule or a list of rules. NOTES.md has the measurements.

namespace tw {

static_assert(std::has_unique_object_representations_v<AttentionConfig>);
inline std::strong_ordering operator<=>(const AttentionConfig& a, const AttentionConfig& b) {
  using Bytes = std::array<unsigned char, sizeof(AttentionConfig)>;
  return std::bit_cast<Bytes>(a) <=> std::bit_cast<Bytes>(b);
}

}  // namespace tw

namespace tw::kernels::attention {

/// Head dimensions that kernels are made for.
struct HeadDims {
  int head_dim, value_dim;
};
/// The smallest that are at least these.
constexpr HeadDims compiled_dims(std::int64_t head_dim, std::int64_t value_dim) {
  const std::int64_t larger = head_dim > value_dim ? head_dim : value_dim;
  if (larger <= 64) return {64, 64};
  if (larger <= 96) return {96, 96};
  if (larger <= 128) return {128, 128};
  if (larger <= 192) return {192, value_dim <= 128 ? 128 : 192};
  return {256, 256};
}

/// What tiles are for: 64 rows a warpgroup.
enum class TileUse {
  widest,  ///< four warpgroups, where D is 64: for sequences that these tiles fill better
  wide,    ///< three warpgroups, where D is small: fast, for long sequences, TMA and rules that need few registers
  narrow,  ///< two, for everything
  paired,  ///< two in each of the two blocks on an SM, where D is 64: for tiles that see few keys, TMA and rules as `wide`
  split    ///< one: few rows, and many keys in flight
};

/// What a list of rules asks of a schedule.
struct RuleTraits {
  bool anywhere = false, changing = false;  ///< as in Rules
  bool user = false;                        ///< a user-defined one is among them
};

constexpr AttentionConfig gpu_config(HeadDims dims, TileUse use, int form = kEqualLengths, const RuleTraits& rules = {}) {
  const auto [d, dv] = dims;
  AttentionConfig c{.head_dim = d, .value_dim = dv, .rows = 128, .keys = d <= 128 ? 128 : d <= 192 ? 96 : 64, .stages = 2, .form = form};
  const auto tiles = [&](int rows, int keys, int stages) { c.rows = rows, c.keys = keys, c.stages = stages; };
  if (use == TileUse::widest && d == 64) tiles(256, 64, 4);
  if (use == TileUse::wide && d == 64) tiles(192, 128, 3);
  if ((use == TileUse::wide || use == TileUse::widest) && d == 96) tiles(192, 96, 2);
  if (use == TileUse::paired && d == 64) tiles(128, 64, 4);
  if (use == TileUse::split) tiles(64, d <= 128 ? 128 : dv <= 128 ? 96 : 64, d <= 64 ? 4 : d <= 192 ? 3 : 2);

  c.min_blocks = c.rows == 128 && c.keys + dv <= 128 ? 2 : 1;
  c.lag = c.min_blocks == 1 ? 1 : 0;
  // A user-defined rule may need the registers.
  c.queries_in_registers = c.rows == 128 && c.min_blocks == 1 && d <= 128 && !rules.anywhere && !rules.user;
  c.queries_back_early = d <= 96;  // with D 192 the branch in the loop costs more
  // Faster where three and more warpgroups have short products to wait for.
  c.maxima_first = (c.rows * c.min_blocks >= 192 && d == 64) || rules.anywhere;
  c.rules_in_halves = !c.maxima_first && rules.changing;
  return c;
}

/// For lists of blocks of keys, on Hopper GPUs: tiles are as large as the blocks where they fit. Blocks of 64 queries are one warpgroup,
/// two blocks on an SM where registers allow. `use`: `split`, or `narrow` for all else.
constexpr AttentionConfig listed_config(HeadDims dims, TileUse use, int query_block, int key_block, int form,
                                        const RuleTraits& rules = {}) {
  const auto [d, dv] = dims;
  const bool split = use == TileUse::split;
  AttentionConfig c = gpu_config(dims, use, form | kListed, rules);
  const int keys = d > 128 ? 64 : key_block;
  if (split && keys < c.keys) c.stages = d <= 128 ? 2 * c.stages : dv <= 128 ? 4 : c.stages;
  if (!split && query_block == 128 && keys < c.keys && d <= 128) c.stages = 4;
  c.keys = keys;
  if (!split && query_block == 64) {
    c.rows = 64, c.keys = 64;
    c.stages = d <= 128 ? 4 : 2;
    c.min_blocks = d <= 64 ? 2 : 1;  // with D 128 the 128 registers of a thread would not hold scores and output
    c.lag = c.min_blocks == 1 ? 1 : 0;
    c.queries_in_registers = false;
  }
  return c;
}

/// The same with columns, for blocks of `block` queries and keys.
constexpr AttentionConfig columns_config(HeadDims dims, int block, int form) {
  AttentionConfig c = listed_config(dims, TileUse::narrow, block, block, form | kColumns);
  if (dims.head_dim == 128) c.queries_in_registers = false;  // beside them a block's first key does not fit the registers
  return c;
}

/// With qv, on Hopper GPUs. Both queries and the blocks of keys and values fill the shared memory.
constexpr AttentionConfig query_values_config(HeadDims dims, TileUse use, int form, const RuleTraits& rules = {}) {
  const auto [d, dv] = dims;
  AttentionConfig c{.head_dim = d,
                    .value_dim = dv,
                    .rows = use == TileUse::split ? 64 : 128,
                    .keys = 64,
                    .stages = d + dv <= 256                            ? 4
                              : d + dv <= 320 && use == TileUse::split ? 3
                                                                       : 2,
                    .form = form | kQueryValues};
  c.queries_back_early = d + dv <= 192;
  c.maxima_first = rules.anywhere;
  c.rules_in_halves = !c.maxima_first && rules.changing;
  return c;
}
/// Head dimensions that its kernels are made for: those of keys, up to 128, and of values are independent.
constexpr HeadDims query_values_dims(std::int64_t head_dim, std::int64_t value_dim) {
  const auto size = [](std::int64_t x) { return x <= 64 ? 64 : x <= 128 ? 128 : 256; };
  return {size(head_dim), size(value_dim)};
}

/// For e4m3, on Hopper GPUs. Values arrive in panels of 128 keys; with D 256 the registers suffice for 96. `few_registers`: for loads
/// without TMA, and loads of a mask.
constexpr AttentionConfig fp8_config(HeadDims dims, bool few_registers = false, const RuleTraits& rules = {}) {
  const int largest = dims.head_dim > dims.value_dim ? dims.head_dim : dims.value_dim;
  const int d = largest <= 64 ? 64 : largest <= 128 ? 128 : 256;
  AttentionConfig c{.head_dim = d,
                    .value_dim = d,
                    .rows = d == 64 && !few_registers ? 192 : 128,
                    .keys = d < 256         ? 128
                            : few_registers ? 64
                                            : 96,
                    .stages = d < 256 ? 3 : 2,
                    .form = kDescaled};
  c.queries_back_early = d == 64;
  c.maxima_first = c.rows == 192 || d == 256 || rules.anywhere;
  c.rules_in_halves = !c.maxima_first && rules.changing;
  return c;
}

/// On the generic target: 32 rows of scores and output for each warp while they fit its registers, in blocks of at most `shared` bytes.
/// `most_rows`: of a tile.
AttentionConfig generic_config(HeadDims dims, int form, const RuleTraits& rules, std::int64_t shared, int most_rows = 128);

/// Either, by the target of the call's stream.
AttentionConfig config_of(const detail::AttentionCall& call, HeadDims dims, TileUse use, int form, const RuleTraits& rules);

/// How many of `heads` the L2 cache holds if each has `bytes` that its tiles share. A divisor of `heads`, so that groups are full.
int heads_in_cache(std::int64_t bytes, int heads);

/// Which tiles serve a call best whose keys are not divided: narrow ones, unless head dimensions are up to 96.
TileUse tile_use(const detail::AttentionCall& call);

/// The SMs, or threads of the CPU, that a call may use: at least one.
int usable_units(const detail::AttentionCall& call);

/// Whether TMA can load the call's tensors.
bool loads_by_tma(const detail::AttentionCall& call);

/// Which of the library's rules a kernel has.
struct RuleSet {
  bool softcap = false, alibi = false, mask = false;
  bool lower = false, upper = false;  ///< bounds of the band
  bool chunks = false;
  auto operator<=>(const RuleSet&) const = default;
};
RuleSet rules_of(const detail::AttentionCall& call);

/// As the run-time compiler reads them. Rules that are not used are not in the machine code. `user`: a user-defined one among them.
std::string text_of(const AttentionConfig& config);
std::string text_of(const RuleSet& rules, const detail::UserRuleInfo* user = nullptr);

/// Attention<T, config, rules, output>.
struct Kernel {
  const detail::UserRuleInfo* user = nullptr;  ///< kUserRule of a user-defined rule, or null
  DType dtype;
  RuleSet rules;
  AttentionConfig config;
  DType output = DType::bf16;  ///< of o, if `dtype` is fp8_e4m3; otherwise it is `dtype`
  auto operator<=>(const Kernel&) const = default;
};
std::string type_of(const Kernel& kernel);

/// What the rules of a call ask of a schedule, with a user-defined one or without.
RuleTraits traits_of(const detail::AttentionCall& call, const detail::UserRuleInfo* user = nullptr);

/// The kernel's configuration for a call on a GPU.
AttentionConfig choose_config(const detail::AttentionCall& call);

}  // namespace tw::kernels::attention
