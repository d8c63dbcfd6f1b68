#include <algorithm>

#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/key_blocks.hpp"
#include "kernels/named.hpp"
#include "kernels/workspace.hpp"

namespace tw::kernels::attention {

namespace {

struct ListKernel {
  int rows, keys;
  auto operator<=>(const ListKernel&) const = default;
};
std::string type_of_lists(const ListKernel& k) { return tw::format("tw::kernels::attention::ListKeyBlocks<{}, {}>", k.rows, k.keys); }

using CpuLists = ListKeyBlocks<detail::kCpuListedRows, detail::kCpuListedKeys>;

const Tensor& given(const AttentionBlocks& blocks) { return blocks.mask ? *blocks.mask : *blocks.indices; }

}  // namespace

void check_blocks(const Form& form, AttentionCall& call, const AttentionBlocks& blocks) {
  const Device device = call.o.device();
  form.require(!form.without_blocks, "blocks are given; they are not supported with {}", form.without_blocks ? form.without_blocks : "");
  form.require(!call.descaled && (call.q.dtype() != DType::f32 || !device.is_cuda()),
               "blocks are given; with them q may be bf16 or f16, and f32 on the CPU, not {}", name_of(call.q.dtype()));
  form.require((blocks.mask != nullptr) != (blocks.indices != nullptr), "either blocks.mask or blocks.indices must be given");
  form.require(blocks.counts == nullptr || blocks.indices != nullptr, "blocks.counts is given without blocks.indices");
  for (const auto& [name, size] : {std::pair{"query_block", blocks.query_block}, {"key_block", blocks.key_block}})
    form.require(size == 64 || size == 128, "blocks.{} is {}; it must be 64 or 128", name, size);

  const char* const name = blocks.mask ? "blocks.mask" : "blocks.indices";
  const Tensor& t = given(blocks);
  check_operand(form.op, name, t, blocks.mask ? DType::boolean : DType::i32, device);
  const std::int64_t heads = call.q.shape(1), kv_heads = call.k.shape(1);
  form.require(t.rank() == 4, "{} is {}; it must be [batch, heads, query_blocks, {}]", name, t, blocks.mask ? "key_blocks" : "entries");
  form.require(t.shape(0) == 1 || t.shape(0) == call.batch, "{} is {}; its batch must be {} or 1", name, t, call.batch);
  form.require(t.shape(1) == 1 || t.shape(1) == heads || t.shape(1) == kv_heads, "{} is {}; its heads must be q's, {}, or {}'s, {}, or 1",
               name, t, heads, form.k, kv_heads);
  if (!form.cu_seqlens_q) {
    const std::int64_t expected = (call.q.shape(2) + blocks.query_block - 1) / blocks.query_block;
    form.require(t.shape(2) == expected, "{} is {}; with {} queries in blocks of {} it must have {} query_blocks", name, t, call.q.shape(2),
                 blocks.query_block, expected);
  }
  if (blocks.mask && !form.packed_keys) {
    const std::int64_t expected = (call.keys + blocks.key_block - 1) / blocks.key_block;
    form.require(t.shape(3) == expected, "{} is {}; with {} keys in blocks of {} it must have {} key_blocks", name, t, call.keys,
                 blocks.key_block, expected);
  }
  for (const std::int64_t extent : t.shape())
    form.require(extent < kOneBlock, "{} is {}; extents are limited to {}", name, t, kOneBlock - 1);
  if (blocks.counts) {
    check_operand(form.op, "blocks.counts", *blocks.counts, DType::i32, device);
    const Shape expected{t.shape(0), t.shape(1), t.shape(2)};
    form.require(blocks.counts->shape() == expected, "blocks.counts is {}; it must be i32[{}]", *blocks.counts, tw::join(expected, ", "));
  }
  call.blocks.of = blocks;
  call.blocks.heads_per_list = static_cast<int>(heads / std::max<std::int64_t>(1, t.shape(1)));
  call.blocks.one_sequence = t.shape(0) == 1;
}

Tensor blocks_mask(const AttentionCall& call) {
  if (call.blocks.of.mask) return *call.blocks.of.mask;
  const int key_blocks = ceil_div(call.keys, call.blocks.of.key_block);
  const Tensor& indices = *call.blocks.of.indices;
  const Tensor* const counts = call.blocks.of.counts;
  Tensor mask = workspace({indices.shape(0), indices.shape(1), indices.shape(2), key_blocks}, DType::u8, call.stream);
  if (mask.numel() == 0) return mask;
  launch<MarkBlocks>(call.stream, {static_cast<int>(mask.numel() / key_blocks)}, [&](auto&, auto& p) {
    p.indices = indices.data<std::int32_t>();
    p.stride_batch = indices.stride(0), p.stride_head = indices.stride(1), p.stride_query = indices.stride(2);
    p.stride_entry = indices.stride(3);
    p.counts = counts ? counts->data<std::int32_t>() : nullptr;
    p.counts_stride_batch = counts ? counts->stride(0) : 0, p.counts_stride_head = counts ? counts->stride(1) : 0;
    p.counts_stride_query = counts ? counts->stride(2) : 0;
    p.heads = static_cast<int>(indices.shape(1)), p.queries = static_cast<int>(indices.shape(2));
    p.entries = static_cast<int>(indices.shape(3));
    p.blocks = key_blocks;
    p.mask = mask.data<std::uint8_t>();
  });
  return mask;
}

Tensor allocate_lists(AttentionCall& call, int tile_rows, int tile_keys) {
  KeyBlocks& blocks = call.blocks;
  const int heads = static_cast<int>(call.q.shape(1)), list_heads = heads / blocks.heads_per_list;
  // Packed sequences have tiles of their own; sequences of different lengths see different blocks of the same mask.
  const bool shared = call.cu_q || (blocks.one_sequence && !call.ragged());
  blocks.lists_of_batch = shared ? 0 : list_heads;
  blocks.list_tiles = detail::attention_grid(call, tile_rows).m / call.splits;
  blocks.list_numbers = BlockList::blocks + ceil_div(call.keys, tile_keys);
  const std::int64_t count = std::int64_t{list_heads} * (shared ? 1 : call.q.shape(0)) * blocks.list_tiles;
  Tensor lists = workspace({count, blocks.list_numbers}, DType::i32, call.stream);
  blocks.lists = lists.data<std::int32_t>();
  return lists;
}

Tensor list_key_blocks(AttentionCall& call) {
  if (!call.blocks) return {};
  const Tensor mask = blocks_mask(call);
  if (!call.stream.device().is_cuda()) {
    Tensor lists = allocate_lists(call, detail::kCpuListedRows, detail::kCpuListedKeys);
    launch_cpu<CpuLists>(list_grid<CpuLists>(lists), [&](auto&, auto& p) { fill_lists(p, call, mask, lists); });
    return lists;
  }
  static KernelTable<ListKernel> table(type_of_lists, CpuLists::source);
  const AttentionConfig config = choose_config(call);
  Tensor lists = allocate_lists(call, config.rows, config.keys);
  detail::launch_named<typename CpuLists::template On<sm_90a::Target<>>::Params>(table[{config.rows, config.keys}], call.stream,
                                                                                 list_grid<CpuLists>(lists),
                                                                                 [&](auto&, auto& p) { fill_lists(p, call, mask, lists); });
  return lists;
}

}  // namespace tw::kernels::attention
