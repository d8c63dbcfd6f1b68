#pragma once

#include <cstdint>
#include <numeric>
#include <optional>

#include "tilewave/attention.hpp"
#include "tilewave/detail/sm_margin.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/tile/attention.tile.hpp"

// From a checked call of attention to its kernel, with the library's rules and optionally a user-defined one (attention_with.hpp).

namespace tw::detail {

/// A factor for each batch and key head.
struct DescaleOf {
  const float* data = nullptr;  ///< null: 1
  std::int64_t stride_batch = 0, stride_head = 0;
};

/// The blocks of keys that a call's tiles see.
struct KeyBlocks {
  AttentionBlocks of = {};    ///< the tensors, which live as long as the call; neither of them: all blocks
  int heads = 1;              ///< with blocks of their own: of the tensors
  bool one_sequence = false;  ///< all sequences have the same blocks
  bool all_queries = false;   ///< all queries of a sequence have the same blocks
  /// Limit of the memory for lists. If those of all heads take more, they are made for some of the heads at a time, each time with a launch
  /// of attention that is still large enough to fill a GPU.
  std::int64_t most_list_bytes = std::int64_t{64} << 20;
  /// What a launch's tiles read: see Attention's Params.
  const std::int32_t* lists = nullptr;
  int list_tiles = 0;
  std::int64_t list_numbers = 0;
  int lists_of_batch = 0, heads_per_list = 1;
  int first_head = 0, first_list = 0;
  int head_count = 0;  ///< heads of the launch, of batch * heads; 0: all
  explicit operator bool() const { return of.mask != nullptr || of.indices != nullptr; }
};

/// Single keys that a call's tiles see besides the blocks in their lists: see Attention's Params.
struct KeyColumns {
  Tensor k, v;  ///< [batch, head, column, dim]; no elements: none
  const std::int32_t* positions = nullptr;
  int numbers = 0;  ///< positions of a tile
};

/// A checked call. Tensors are [batch, head, row, dim]; for packed sequences the batch is 1.
struct AttentionCall {
  Tensor q, k, v, o;
  Tensor qv = {};  ///< AttentionOptions::qv; no elements: none
  DescaleOf q_descale = {}, k_descale = {}, v_descale = {};
  bool descaled = false;           ///< for q, k and v of e4m3, whose types may since have changed
  bool values_transposed = false;  ///< v is [batch, head, dim, key], with keys in the order of eight_bit_key()
  Tensor partial;                  ///< f32 [splits * batch, head, row, dim], if the keys are split
  const float* sink = nullptr;
  float* lse = nullptr;
  std::int64_t lse_stride_batch = 0, lse_stride_head = 0;
  int batch = 0;
  int keys = 0;       ///< maximum number per sequence
  int sm_margin = 0;  ///< AttentionOptions::sm_margin
  Stream stream = Stream::standard(Device::cpu());

  // Rules
  float scale = 0;
  float softcap = 0;  ///< 0: none
  const float* slopes = nullptr;
  std::int64_t slopes_stride_batch = 0, slopes_stride_head = 0;
  const void* mask = nullptr;
  MaskTensor::Type mask_type = MaskTensor::Type::boolean;
  std::int64_t mask_strides[4] = {};
  int mask_queries = 1, mask_keys = 1;  ///< extents of the mask
  bool lower = false, upper = false;    ///< bounds of the band
  int left = 0, right = 0;
  int chunk = 0;  ///< 0: none
  std::optional<int> diagonal = {};

  KeyBlocks blocks = {};
  KeyColumns columns = {};

  // Dropout
  int kept = 256;  ///< of 256 weights
  std::int64_t dropout_seed = 0, dropout_offset = 0;
  const std::int64_t* dropout_state = nullptr;  ///< replaces both
  bool drops() const { return kept < 256; }

  // Lengths on the device; see the kernel's Params
  const std::int32_t *cu_q = nullptr, *cu_k = nullptr, *used_q = nullptr, *used_k = nullptr, *k_batch = nullptr, *k_begin = nullptr;
  int keys_added = 0;
  const std::int32_t* cu_added = nullptr;
  const std::int32_t* tiles = nullptr;
  bool ragged() const { return cu_q || cu_k || used_q || used_k || k_batch || k_begin; }

  // Split keys: rows are the queries of all heads that share the keys
  bool split = false;
  int heads_together = 1;  ///< their queries are the rows of q and o
  int queries = 1;         ///< per head
  int splits = 1;

  // Pages
  const std::int32_t* pages = nullptr;
  std::int64_t pages_stride = 0;
  int page_tables = 0;
  int page_size = 1;
};

/// Throws InvalidArgument, with nothing written.
AttentionCall check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options);

/// Throws InvalidArgument unless a kernel for `dtype` and head dimensions up to `head_dim` can run the call.
void check_attention_with(const AttentionCall& call, DType dtype, int head_dim);

/// The rules whose Params the host fills in for a GPU. The layout of Params does not depend on which rules are used, so one list serves all
/// kernels.
template <class... User>
using CallRules = Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, UserRule<User>...,
                        Band<true, true>>;
/// The grid of tiles with `bm` rows each.
TileGrid attention_grid(const AttentionCall& call, int bm);

/// Fills in the parameters of a list of rules. `unit` is the unit of scores (docs/attention-tour.md) before the first rule, and is set to
/// that after the last one.
template <class Rule, class... Rest, class P, class BindUser>
void fill_rules([[maybe_unused]] Rules<Rule, Rest...> list, P& p, const AttentionCall& call, float& unit, BindUser& bind_user) {
  constexpr int kUnlimited = (1 << 30) - 1;  // more than any number of keys, without integer overflow
  auto& rule = p.first;
  using Known = typename RuleOf<Rule>::Type;
  if constexpr (is_same<Known, Softcap>) {
    rule.used = call.softcap > 0;
    if (rule.used) {
      rule.factor = unit / call.softcap;
      unit = call.softcap;
    }
  } else if constexpr (is_same<Known, Alibi>) {
    rule.used = call.slopes != nullptr;
    rule.slopes = call.slopes;
    rule.stride_batch = call.slopes_stride_batch, rule.stride_head = call.slopes_stride_head;
    rule.per_unit = 1 / unit;
  } else if constexpr (is_same<Known, MaskTensor>) {
    rule.used = call.mask != nullptr;
    rule.data = call.mask;
    rule.type = call.mask_type;
    rule.stride_batch = call.mask_strides[0], rule.stride_head = call.mask_strides[1];
    rule.stride_query = call.mask_strides[2], rule.stride_key = call.mask_strides[3];
    rule.last_query = call.mask_queries - 1, rule.last_key = call.mask_keys - 1;
    rule.per_unit = 1 / unit;
  } else if constexpr (sizeof...(Rest) == 0) {
    rule.left = call.lower ? call.left : kUnlimited;
    rule.right = call.upper ? call.right : kUnlimited;
    rule.chunks = Chunks::of(call.chunk);
  } else {
    bind_user(rule);
    rule.unit = unit, rule.per_unit = 1 / unit;
  }
  if constexpr (sizeof...(Rest) > 0) fill_rules(Rules<Rest...>{}, p.rest, call, unit, bind_user);
}

/// Fills in a kernel's DropoutParams.
template <class P>
void fill_dropout(P& p, const AttentionCall& call) {
  p.state = reinterpret_cast<const i64*>(call.dropout_state);
  p.seed = call.dropout_seed, p.offset = call.dropout_offset;
  p.kept = call.kept;
  p.scale = 256.0f / static_cast<float>(call.kept);
}

template <class RuleList, class P, class BindUser>
void fill_attention(auto& bind, P& p, const AttentionCall& call, int bn, BindUser& bind_user) {
  bind(p.q, call.q);
  // Without keys nothing is read, but a tensor map must describe some memory.
  const bool keys = call.k.numel() > 0 && call.v.numel() > 0;
  const CopiedRows rows{call.pages ? std::gcd(call.page_size, bn) : bn};
  bind(p.k, keys ? call.k : call.q, rows);
  if (call.values_transposed)
    bind(p.v, keys ? call.v : call.q);
  else
    bind(p.v, keys ? call.v : call.q, rows);
  bind(p.o, call.o);
  if constexpr (requires { p.qv; }) bind(p.qv, call.qv);
  if constexpr (requires { p.column_k; }) {
    const KeyColumns& columns = call.columns;
    bind(p.column_k, columns.k.numel() > 0 ? columns.k : call.q, CopiedRows{bn});
    bind(p.column_v, columns.v.numel() > 0 ? columns.v : call.q, CopiedRows{bn});
    p.column_positions = columns.positions;
    p.column_numbers = columns.numbers;
  }
  bind(p.partial, call.partial.numel() > 0 ? &call.partial : nullptr);
  p.lse = call.lse;
  p.sink = call.sink;
  p.lse_stride_j = call.lse_stride_batch;
  p.lse_stride_i = call.lse_stride_head;
  p.heads_per_kv = call.k.shape(1) > 0 ? static_cast<int>(call.q.shape(1) / call.k.shape(1)) : 1;
  p.has_diagonal = call.diagonal.has_value();
  p.diagonal = call.diagonal.value_or(0);
  float unit = call.scale;
  fill_rules(RuleList{}, p.rules, call, unit, bind_user);
  p.scale_log2 = unit * kLog2E;
  fill_dropout(p.dropout, call);
  p.batch = call.batch;
  p.cu_q = call.cu_q, p.cu_k = call.cu_k, p.used_q = call.used_q, p.used_k = call.used_k;
  p.k_batch = call.k_batch, p.k_begin = call.k_begin;
  p.keys_added = call.keys_added;
  p.cu_added = call.cu_added;
  p.tiles = call.tiles;
  p.heads_together = call.heads_together;
  p.queries = call.split ? call.queries : 0;
  p.splits = call.splits;
  p.pages = call.pages;
  p.pages_stride = call.pages_stride;
  p.page_tables = call.page_tables;
  p.page_size = call.page_size;
  p.page_rows = rows.count;
  p.keys = call.keys;
  const auto descale = [](auto& to, const DescaleOf& from) {
    to.data = from.data;
    to.stride_j = from.stride_batch, to.stride_i = from.stride_head;
  };
  descale(p.q_descale, call.q_descale);
  descale(p.k_descale, call.k_descale);
  descale(p.v_descale, call.v_descale);
  p.lists = call.blocks.lists;
  p.list_tiles = call.blocks.list_tiles;
  p.list_numbers = call.blocks.list_numbers;
  p.lists_of_batch = call.blocks.lists_of_batch;
  p.heads_per_list = call.blocks.heads_per_list;
  p.first_head = call.blocks.first_head, p.first_list = call.blocks.first_list;
}

/// Rows per tile on the CPU (fewer for few queries), and keys per block.
inline constexpr int kCpuRows = 128, kCpuFewRows = 16;
inline constexpr int kCpuKeys = 256;
/// Rows per tile, and keys per block, of kernels with lists of blocks: they divide all blocks.
inline constexpr int kCpuListedRows = 64, kCpuListedKeys = 64;
constexpr AttentionConfig cpu_config(int head_dim, int rows, int keys = kCpuKeys, int more_form = 0) {
  return {.head_dim = head_dim,
          .value_dim = head_dim,
          .rows = rows,
          .keys = keys,
          .stages = 2,
          .form = kRagged | kSplit | kPaged | kDescaled | more_form,
          .dropout = Use::runtime,
          .maxima_first = true};
}

/// The library's rules that change scores, for the CPU: a kernel checks at run time which ones are used.
using CpuChanges = Rules<Optional<Softcap, Use::runtime>, Optional<Alibi, Use::runtime>, Optional<MaskTensor, Use::runtime>>;
using CpuBand = Band<true, true, true>;

// Of `rows` rows of `keys` scores, kCpuKeys or kCpuListedKeys; `first` says where each row's first score stands.
void change_scores(const CpuChanges::Params<cpu::Target>& changes, const Score* first, float* scores, int rows, int keys);
void hide_scores(const CpuBand::Params<cpu::Target>& band, const Score* first, float* scores, int rows, int keys);
/// Whether the band hides scores of a tile, judged by its first and last row. May be true for a tile without hidden scores.
bool hides_scores(const CpuBand::Params<cpu::Target>& band, const Score& first, const Score& last, int keys);

/// The rules of the CPU's kernels. The library's own are functions that all kernels call: a copy of them in each kernel, for each place in
/// its loop and each instruction set, would take most of the time that a compiler spends on the kernel.
template <class... User>
struct CpuRules : Rules<Optional<Softcap, Use::runtime>, Optional<Alibi, Use::runtime>, Optional<MaskTensor, Use::runtime>,
                        UserRule<User>..., CpuBand> {
  using Users = Rules<UserRule<User>...>;
  // The band itself finds the blocks that it cuts.
  static constexpr bool lower = Users::lower;
  TW_INLINE static KeyRange untouched(const auto& p, const ScoreRows& rows, KeyRange all) {
    return Users::untouched(p.rest.rest.rest, rows, all);
  }

  template <bool kEdge, int kFirst, int kCount>
  TW_INLINE static void apply(auto& block, const auto& p, auto& scores, auto at) {
    static_assert(kFirst == 0 && (kCount == kCpuKeys || kCount == kCpuListedKeys),
                  "the CPU's kernels have maxima_first: rules get whole rows");
    constexpr int rows = static_cast<int>(sizeof scores.x / sizeof(float)) / kCount;
    if (p.first.used || p.rest.first.used || p.rest.rest.first.used) change<rows, kCount>(p, scores.x, at);
    Users::template apply<kEdge, kFirst, kCount>(block, p.rest.rest.rest, scores, at);
    hide<rows, kCount>(last_of(p), scores.x, at);
  }

 private:
  // Not in the kernel, whose frame they would widen and whose every line is compiled for each instruction set.
  template <int kRows, int kKeys>
  [[gnu::noinline]] static void change(const auto& p, float* scores, auto at) {
    Score first[kRows];
    for (int r = 0; r < kRows; ++r) first[r] = at(r, 0);
    change_scores({p.first, {p.rest.first, {p.rest.rest.first, {}}}}, first, scores, kRows, kKeys);
  }
  template <int kRows, int kKeys>
  [[gnu::noinline]] static void hide(const CpuBand::Params<cpu::Target>& band, float* scores, auto at) {
    if (!hides_scores(band, at(0, 0), at(kRows - 1, 0), kKeys)) return;
    Score first[kRows];
    for (int r = 0; r < kRows; ++r) first[r] = at(r, 0);
    hide_scores(band, first, scores, kRows, kKeys);
  }
  TW_INLINE static const auto& last_of(const auto& p) {
    if constexpr (requires { p.rest.first; })
      return last_of(p.rest);
    else
      return p.first;
  }
};

template <class T, int kHeadDim, int kRows, class... User>
void run_attention_cpu(const AttentionCall& call, auto&& bind_user) {
  using List = CpuRules<User...>;
  launch_cpu<Attention<T, cpu_config(kHeadDim, kRows), List>>(
      attention_grid(call, kRows), [&](auto& bind, auto& p) { fill_attention<List>(bind, p, call, kCpuKeys, bind_user); });
}

/// The properties of a user-defined rule that the library needs to name and schedule a kernel.
struct UserRuleInfo {
  std::string_view type;    ///< as the run-time compiler reads it
  const char* source;       ///< the embedded file that defines it, or null
  bool anywhere, changing;  ///< as in Rules
};
template <class Rule>
inline constexpr UserRuleInfo kUserRule{type_name<Rule>(), rule_source<Rule>(), Rules<UserRule<Rule>>::anywhere,
                                        Rules<UserRule<Rule>>::changing};

/// A kernel of the GPU.
struct AttentionKernel {
  const NamedKernel& name;
  AttentionConfig config;
};

/// The kernel for the call's rules and `rule`, tensors of `dtype` and head dimensions up to `head_dim`. Throws InvalidArgument for a rule
/// without a source.
AttentionKernel attention_kernel_with(const AttentionCall& call, DType dtype, int head_dim, const UserRuleInfo& rule);

/// Attention<T, ..., Output>, named by `kernel`.
template <class T, class Output, class... User>
void run_attention_gpu_as(const AttentionCall& call, const AttentionKernel& kernel, auto&& bind_user) {
  using List = CallRules<User...>;
  const auto launch = [&]<int kForm>() {
    using AnySizes = Attention<T, cpu_config(64, 64, kCpuKeys, kForm), List, Output>;
    launch_named<typename AnySizes::template On<sm_90a::Target<>>::Params>(
        kernel.name, call.stream, attention_grid(call, kernel.config.rows),
        [&](auto& bind, auto& p) { fill_attention<List>(bind, p, call, kernel.config.keys, bind_user); });
  };
  if constexpr (sizeof(T) == 2 && sizeof...(User) == 0) {
    if (kernel.config.form & kQueryValues) return launch.template operator()<kQueryValues>();
    if (kernel.config.form & kColumns) return launch.template operator()<kListed | kColumns>();
  }
  launch.template operator()<kEqualLengths>();
}
template <class T, class... User>
void run_attention_gpu(const AttentionCall& call, const AttentionKernel& kernel, auto&& bind_user) {
  run_attention_gpu_as<T, T, User...>(call, kernel, bind_user);
}

}  // namespace tw::detail
