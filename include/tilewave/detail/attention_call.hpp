#pragma once

#include <cstdint>
#include <optional>

#include "tilewave/attention.hpp"
#include "tilewave/launch.hpp"
#include "tilewave/tile/attention.tile.hpp"

// From a checked call of attention to its kernel: for the library's own rules, and for lists with a rule of a user's (attention_with.hpp).

namespace tw::detail {

/// A checked call. Tensors are [batch, head, row, dim]; of packed sequences the batch is 1.
struct AttentionCall {
  Tensor q, k, v, o;
  Tensor partial;  ///< f32 [splits * batch, head, row, dim], where the keys are divided
  const float* sink = nullptr;
  float* lse = nullptr;
  std::int64_t lse_stride_batch = 0, lse_stride_head = 0;
  int batch = 0;
  int keys = 0;  ///< of a sequence, at most
  Stream stream = Stream::standard(Device::cpu());

  // Rules
  float scale = 0;
  float softcap = 0;  ///< 0: none
  const float* slopes = nullptr;
  std::int64_t slopes_stride_batch = 0, slopes_stride_head = 0;
  const void* mask = nullptr;
  MaskTensor::Type mask_type = MaskTensor::Type::boolean;
  std::int64_t mask_strides[4] = {};
  bool lower = false, upper = false;  ///< bounds of the band
  int left = 0, right = 0;
  std::optional<int> diagonal = {};

  // Lengths on the device; see the kernel's Params
  const std::int32_t *cu_q = nullptr, *cu_k = nullptr, *used_q = nullptr, *used_k = nullptr, *k_batch = nullptr, *k_begin = nullptr;
  int keys_added = 0;
  const std::int32_t* cu_added = nullptr;
  const std::int32_t* tiles = nullptr;
  bool ragged() const { return cu_q || cu_k || used_q || used_k || k_batch || k_begin; }

  // Keys divided among blocks: rows are the queries of all heads that share them
  bool split = false;
  int heads_together = 1;  ///< their queries are the rows of q and o
  int queries = 1;         ///< of one of them
  int splits = 1;

  // Pages
  const std::int32_t* pages = nullptr;
  std::int64_t pages_stride = 0;
  int page_tables = 0;
  int page_size = 1;
};

/// Throws InvalidArgument, with nothing written.
AttentionCall check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options);

/// That a call is one that a kernel for T and a head dimension up to `head_dim` can do. Throws InvalidArgument.
void check_attention_with(const AttentionCall& call, DType dtype, int head_dim);

/// The rules of one kernel for all calls: those that a call does not have are taken out of the type when it is compiled for a GPU.
template <class... User>
using CallRules = Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, UserRule<User>...,
                        Band<true, true>>;
/// And where they are asked for at run time.
template <class... User>
using RuntimeRules = Rules<Optional<Softcap, Use::runtime>, Optional<Alibi, Use::runtime>, Optional<MaskTensor, Use::runtime>,
                           UserRule<User>..., Band<true, true>>;

/// `base` with the rules that the call has. Lives until the process ends.
const KernelInfo& attention_variant(const KernelInfo& base, const AttentionCall& call);

/// Tiles of a launch with BM rows each.
TileGrid attention_grid(const AttentionCall& call, int bm);

/// Keys that are copied from a page at once by a kernel that takes `bn` at a time.
int attention_page_rows(const AttentionCall& call, int bn);

/// Fills in the parameters of a list of rules; `unit` is what a score's number stands for, and becomes that behind the last rule.
template <class Rule, class... Rest, class P, class BindUser>
void fill_rules([[maybe_unused]] Rules<Rule, Rest...> list, P& p, const AttentionCall& call, float& unit, BindUser& bind_user) {
  constexpr int kUnlimited = (1 << 30) - 1;  // beyond all keys, and no int overflows
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
    rule.per_unit = 1 / unit;
  } else if constexpr (sizeof...(Rest) == 0) {
    rule.left = call.lower ? call.left : kUnlimited;
    rule.right = call.upper ? call.right : kUnlimited;
  } else {
    bind_user(rule);
    rule.unit = unit, rule.per_unit = 1 / unit;
  }
  if constexpr (sizeof...(Rest) > 0) fill_rules(Rules<Rest...>{}, p.rest, call, unit, bind_user);
}

template <class RuleList, class P, class BindUser>
void fill_attention(auto& bind, P& p, const AttentionCall& call, int bn, BindUser& bind_user) {
  bind(p.q, call.q);
  // Without keys nothing is read, but a tensor map must describe some memory.
  const bool keys = call.k.numel() > 0 && call.v.numel() > 0;
  const CopiedRows rows{call.pages ? attention_page_rows(call, bn) : bn};
  bind(p.k, keys ? call.k : call.q, rows);
  bind(p.v, keys ? call.v : call.q, rows);
  bind(p.o, call.o);
  bind(p.partial, call.partial.numel() > 0 ? &call.partial : nullptr);
  p.lse = call.lse;
  p.sink = call.sink;
  p.lse_stride_j = call.lse_stride_batch;
  p.lse_stride_i = call.lse_stride_head;
  p.heads_per_kv = keys ? static_cast<int>(call.q.shape(1) / call.k.shape(1)) : 1;
  p.has_diagonal = call.diagonal.has_value();
  p.diagonal = call.diagonal.value_or(0);
  float unit = call.scale;
  fill_rules(RuleList{}, p.rules, call, unit, bind_user);
  p.scale_log2 = unit * kLog2E;
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
}

inline constexpr int kCpuForm = kRagged | kSplit | kPaged;
/// Rows of a tile on the CPU, or few for few queries; and its keys.
inline constexpr int kCpuRows = 128, kCpuFewRows = 16;
inline constexpr int kCpuKeys = 256;

template <class T, int D, int DV, int kBM, class... User>
void run_attention_cpu(const AttentionCall& call, auto&& bind_user) {
  using List = RuntimeRules<User...>;
  launch_cpu<Attention<T, D, DV, kBM, kCpuKeys, 2, kCpuForm, List>>(
      attention_grid(call, kBM), [&](auto& bind, auto& p) { fill_attention<List>(bind, p, call, kCpuKeys, bind_user); });
}

/// Tiles of the GPU for head dimensions up to D and DV: 64 rows a warpgroup. kernels/attention/README.md has the measurements.
struct AttentionTiles {
  int bm, bn, stages;
};
enum class TileUse {
  widest,  ///< four warpgroups, where D is 64: for sequences that these tiles fill better
  wide,    ///< three warpgroups, where D is small: fast, for long sequences, TMA and rules that need few registers
  narrow,  ///< two, for everything
  paired,  ///< two in each of the two blocks on a multiprocessor, where D is 64: for tiles that see few keys, TMA and rules as `wide`
  split    ///< one: few rows, and many keys in flight
};
template <int D, int DV>
constexpr AttentionTiles attention_tiles(TileUse use) {
  if (use == TileUse::widest && D == 64) return {256, 64, 4};
  if (use == TileUse::wide && D == 64) return {192, 128, 3};
  if ((use == TileUse::wide || use == TileUse::widest) && D == 96) return {192, 96, 2};
  if (use == TileUse::paired && D == 64) return {128, 64, 4};
  if (use == TileUse::split) return {64, D <= 128 ? 128 : DV <= 128 ? 96 : 64, D <= 64 ? 4 : D <= 192 ? 3 : 2};
  return {128, D <= 128 ? 128 : D <= 192 ? 96 : 64, 2};
}

template <class T, int D, int DV, int kBM, int kBN, int kStages, int kForm, class... User>
void run_attention_gpu(const AttentionCall& call, auto&& bind_user) {
  using List = CallRules<User...>;
  using Kernel = Attention<T, D, DV, kBM, kBN, kStages, kForm, List>;
  const KernelInfo& info = attention_variant(kernel_info<Kernel>, call);
  launch_named<typename Kernel::template On<sm_90a::Target<>>::Params>(
      named_kernel(info.type, info.source), call.stream, attention_grid(call, kBM),
      [&](auto& bind, auto& p) { fill_attention<List>(bind, p, call, kBN, bind_user); });
}

}  // namespace tw::detail
