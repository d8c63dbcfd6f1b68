#include "kernels/attention/key_blocks.hpp"

#include <algorithm>
#include <bit>

#include "kernels/attention/heuristics.hpp"
#include "kernels/named.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

namespace {

struct ListKernel {
  int rows, keys;
  int form = 0;  ///< of ListQueryBlocks
  auto operator<=>(const ListKernel&) const = default;
};
std::string type_of_key_lists(const ListKernel& k) { return tw::format("tw::kernels::attention::ListKeyBlocks<{}, {}>", k.rows, k.keys); }
std::string type_of_query_lists(const ListKernel& k) {
  return tw::format("tw::kernels::attention::ListQueryBlocks<{}, {}, {}>", k.rows, k.keys, k.form);
}

using CpuKeyLists = ListKeyBlocks<detail::kCpuListedRows, detail::kCpuListedKeys>;
using CpuQueryLists = ListQueryBlocks<detail::kCpuListedRows, detail::kCpuListedKeys, kRagged>;

const Tensor& given(const AttentionBlocks& blocks) { return blocks.mask ? *blocks.mask : *blocks.indices; }

TileGrid list_grid(const Tensor& lists) { return {ceil_div(static_cast<int>(lists.shape(0)), CpuKeyLists::rows)}; }

Tensor first_rows(const Tensor& t, std::int64_t rows) { return Tensor::borrow(t.data(), {rows, t.shape(1)}, t.dtype(), t.device()); }

int key_blocks_of(const AttentionCall& call) { return ceil_div(call.keys, call.blocks.of.key_block); }

/// Sequences whose indices a part reads, of the tensor. Packed sequences are all in one batch of q.
std::int64_t sequences_of(const AttentionCall& call, const ListedHeads& part) {
  return call.blocks.one_sequence ? 1 : call.cu_q ? call.batch : part.batches;
}
/// Bytes of the mask that indices of one head are marked in.
std::int64_t mark_bytes(const AttentionCall& call) {
  if (!call.blocks.of.indices) return 0;
  return (call.cu_q && !call.blocks.one_sequence ? call.batch : 1) * call.blocks.of.indices->shape(2) * key_blocks_of(call);
}
/// Memory for the marks of `part`, heads of the tensor.
Tensor mark_memory(const AttentionCall& call, const ListedHeads& part) {
  if (!call.blocks.of.indices) return {};
  const std::int64_t bytes = sequences_of(call, part) * part.heads * call.blocks.of.indices->shape(2) * key_blocks_of(call);
  return workspace({bytes}, DType::u8, call.stream);
}

/// The call's mask, or one in which the indices of `part` are marked, heads of the tensor. `memory` holds it.
HostMask mask_of(const AttentionCall& call, const ListedHeads& part, int heads_per_list, const Tensor& memory) {
  const KeyBlocks& blocks = call.blocks;
  HostMask mask{};
  mask.query_block = blocks.all_queries ? kOneBlock : blocks.of.query_block;
  mask.key_block = blocks.of.key_block;
  mask.heads_per_list = heads_per_list;
  if (const Tensor* const given_mask = blocks.of.mask) {
    mask.data = static_cast<const u8*>(given_mask->data());
    mask.stride_batch = blocks.one_sequence ? 0 : given_mask->stride(0);
    mask.stride_head = given_mask->stride(1), mask.stride_query = given_mask->stride(2), mask.stride_key = given_mask->stride(3);
    mask.queries = static_cast<int>(given_mask->shape(2)), mask.keys = static_cast<int>(given_mask->shape(3));
    return mask;
  }
  const Tensor& indices = *blocks.of.indices;
  const Tensor* const counts = blocks.of.counts;
  const int batches = static_cast<int>(sequences_of(call, part)), first_batch = blocks.one_sequence ? 0 : part.first_batch;
  mask.queries = static_cast<int>(indices.shape(2)), mask.keys = key_blocks_of(call);
  if (memory.numel() > 0) mask.data = memory.data<std::uint8_t>();
  mask.stride_key = 1, mask.stride_query = mask.keys;
  mask.stride_head = std::int64_t{mask.queries} * mask.keys;
  mask.stride_batch = blocks.one_sequence ? 0 : part.heads * mask.stride_head;
  mask.first = -(first_batch * mask.stride_batch + part.first_head * mask.stride_head);
  if (memory.numel() == 0) return mask;
  launch<MarkBlocks>(call.stream, {batches * part.heads * mask.queries}, [&](auto&, auto& p) {
    p.indices = indices.data<std::int32_t>() + first_batch * indices.stride(0) + part.first_head * indices.stride(1);
    p.stride_batch = indices.stride(0), p.stride_head = indices.stride(1), p.stride_query = indices.stride(2);
    p.stride_entry = indices.stride(3);
    p.counts = nullptr;
    if (counts) p.counts = counts->data<std::int32_t>() + first_batch * counts->stride(0) + part.first_head * counts->stride(1);
    p.counts_stride_batch = counts ? counts->stride(0) : 0, p.counts_stride_head = counts ? counts->stride(1) : 0;
    p.counts_stride_query = counts ? counts->stride(2) : 0;
    p.heads = part.heads, p.queries = mask.queries;
    p.entries = static_cast<int>(indices.shape(3));
    p.blocks = mask.keys;
    p.mask = memory.data<std::uint8_t>();
  });
  return mask;
}

void write_key_lists(const AttentionCall& call, int tile_rows, int tile_keys, const HostMask& mask, const Tensor& lists) {
  const auto fill = [&](auto&, auto& p) { fill_lists(p, call, mask, lists); };
  if (!call.stream.device().is_cuda()) return launch_cpu<CpuKeyLists>(list_grid(lists), fill);
  static KernelTable<ListKernel> table(type_of_key_lists, CpuKeyLists::source);
  detail::launch_named<typename CpuKeyLists::template On<sm_90a::Target<>>::Params>(table[{tile_rows, tile_keys}], call.stream,
                                                                                    list_grid(lists), fill);
}

void write_query_lists(const BackwardCall& call, int tile_rows, int tile_keys, const Tensor& tiles, const HostMask& mask,
                       const Tensor& lists) {
  const AttentionCall& forward = call.forward;
  const auto fill = [&](auto&, auto& p) { fill_query_lists(p, call, tiles, mask, lists); };
  if (!forward.stream.device().is_cuda()) return launch_cpu<CpuQueryLists>(list_grid(lists), fill);
  static KernelTable<ListKernel> table(type_of_query_lists, CpuQueryLists::source);
  detail::launch_named<typename CpuQueryLists::template On<sm_90a::Target<>>::Params>(
      table[{tile_rows, tile_keys, call.packed() ? kRagged : kEqualLengths}], forward.stream, list_grid(lists), fill);
}

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
  const std::int64_t heads = call.q.shape(1), kv_heads = call.k.shape(1), queries = call.q.shape(2);
  form.require(t.rank() == 4, "{} is {}; it must be [batch, heads, query_blocks, {}]", name, t, blocks.mask ? "key_blocks" : "entries");
  form.require(t.shape(0) == 1 || t.shape(0) == call.batch, "{} is {}; its batch must be {} or 1", name, t, call.batch);
  if (form.cache) {
    form.require(t.shape(1) == 1 || t.shape(1) == kv_heads, "{} is {}; its heads must be {}'s, {}, or 1", name, t, form.k, kv_heads);
    form.require(t.shape(2) == 1, "{} is {}; with a cache it must have one query_block, for all queries of a sequence", name, t);
  } else {
    form.require(t.shape(1) == 1 || t.shape(1) == heads || t.shape(1) == kv_heads, "{} is {}; its heads must be q's, {}, or {}'s, {}, or 1",
                 name, t, heads, form.k, kv_heads);
    const std::int64_t expected = (queries + blocks.query_block - 1) / blocks.query_block;
    form.require(form.cu_seqlens_q || t.shape(2) == expected, "{} is {}; with {} queries in blocks of {} it must have {} query_blocks",
                 name, t, queries, blocks.query_block, expected);
  }
  if (blocks.mask && !form.packed_keys) {
    const std::int64_t expected = (call.keys + blocks.key_block - 1) / blocks.key_block;
    form.require(t.shape(3) == expected, "{} is {}; with {} keys in blocks of {} it must have {} key_blocks", name, t, call.keys,
                 blocks.key_block, expected);
  }
  for (const std::int64_t extent : t.shape())
    form.require(extent < kOneBlock, "{} is {}; extents are limited to {}", name, t, kOneBlock - 1);
  form.require(t.shape(0) * t.shape(2) < kOneBlock, "{} is {}; its batch times query_blocks is limited to {}", name, t, kOneBlock - 1);
  if (blocks.counts) {
    check_operand(form.op, "blocks.counts", *blocks.counts, DType::i32, device);
    const Shape expected{t.shape(0), t.shape(1), t.shape(2)};
    form.require(blocks.counts->shape() == expected, "blocks.counts is {}; it must be i32[{}]", *blocks.counts, tw::join(expected, ", "));
  }
  call.blocks.of = blocks;
  call.blocks.heads = static_cast<int>(t.shape(1));
  call.blocks.one_sequence = t.shape(0) == 1;
  call.blocks.all_queries = form.cache;
}

std::vector<ListedHeads> listed_heads(int batches, int heads, int unit, std::int64_t unit_bytes, std::int64_t most_bytes, bool shared) {
  const int units = ceil_div(heads, unit);
  const std::int64_t batch_bytes = units * unit_bytes;
  if ((shared ? 1 : batches) * batch_bytes <= most_bytes) return {{0, batches, 0, heads}};
  std::vector<ListedHeads> parts;
  if (batch_bytes <= most_bytes) {
    const int together = static_cast<int>(most_bytes / std::max<std::int64_t>(1, batch_bytes));
    for (int b = 0; b < batches; b += together) parts.push_back({b, std::min(together, batches - b), 0, heads});
    return parts;
  }
  const int together = unit * static_cast<int>(std::max<std::int64_t>(1, most_bytes / unit_bytes));
  for (int b = 0; b < batches; ++b)
    for (int head = 0; head < heads; head += together) parts.push_back({b, 1, head, std::min(together, heads - head)});
  return parts;
}

void with_lists(const AttentionCall& given_call, int tile_rows, int tile_keys, const WriteLists& write, const Launch& launch) {
  AttentionCall call = given_call;
  KeyBlocks& blocks = call.blocks;
  const int batches = static_cast<int>(call.q.shape(0)), heads = static_cast<int>(call.q.shape(1)),
            unit = heads / std::max(1, blocks.heads);
  // Packed sequences have tiles of their own; sequences of different lengths see different blocks of the same mask.
  const bool shared = call.cu_q || (blocks.one_sequence && !call.ragged());
  blocks.heads_per_list = unit;
  blocks.lists_of_batch = shared ? 0 : blocks.heads;
  blocks.list_tiles = detail::attention_grid(call, tile_rows).m / call.splits;
  std::int64_t entries = ceil_div(call.keys, tile_keys);
  if (const Tensor* const indices = blocks.of.indices) entries = std::min(entries, indices->shape(3) * (blocks.of.key_block / tile_keys));
  blocks.list_numbers = BlockList::blocks + entries;
  const std::int64_t list_bytes = blocks.list_tiles * blocks.list_numbers * std::int64_t{sizeof(std::int32_t)};
  const std::vector<ListedHeads> parts = listed_heads(batches, heads, unit, list_bytes + mark_bytes(call), blocks.most_list_bytes, shared);
  // The first one is the largest.
  const ListedHeads& largest = parts.front();
  const std::int64_t most_heads = std::int64_t{shared ? 1 : largest.batches} * (largest.heads / unit);
  const Tensor memory = workspace({most_heads * blocks.list_tiles, blocks.list_numbers}, DType::i32, call.stream);
  const auto of_tensor = [&](const ListedHeads& part) {
    return ListedHeads{part.first_batch, part.batches, part.first_head / unit, part.heads / unit};
  };
  const Tensor marks = mark_memory(call, of_tensor(largest));
  blocks.lists = memory.data<std::int32_t>();
  for (const ListedHeads& part : parts) {
    const ListedHeads selecting = of_tensor(part);
    blocks.first_head = part.first_batch * heads + part.first_head;
    blocks.head_count = part.batches * part.heads;
    blocks.first_list = (shared ? 0 : part.first_batch * blocks.heads) + selecting.first_head;
    const std::int64_t lists = std::int64_t{shared ? 1 : part.batches} * selecting.heads * blocks.list_tiles;
    write(call, mask_of(call, selecting, unit, marks), first_rows(memory, lists));
    launch(call);
  }
}

void with_lists(const AttentionCall& call, int tile_rows, int tile_keys, const Launch& launch) {
  const auto write = [&](const AttentionCall& some, const HostMask& mask, const Tensor& lists) {
    write_key_lists(some, tile_rows, tile_keys, mask, lists);
  };
  with_lists(call, tile_rows, tile_keys, write, launch);
}

void with_key_lists(const BackwardCall& call, int tile_rows, int tile_keys, const Tensor& tiles, const LaunchBackward& launch) {
  if (!call.forward.blocks) return launch(call);
  AttentionCall forward = call.forward;
  forward.tiles = tiles.numel() > 0 ? tiles.data<std::int32_t>() : nullptr;
  with_lists(forward, tile_rows, tile_keys, [&](const AttentionCall& some) {
    BackwardCall of_some = call;
    of_some.forward = some;
    launch(of_some);
  });
}

void with_query_lists(const BackwardCall& call, int tile_rows, int tile_keys, const Tensor& tiles, const LaunchBackward& launch) {
  const auto write = [&](const BackwardCall& some, const Tensor& of, const HostMask& mask, const Tensor& lists) {
    write_query_lists(some, tile_rows, tile_keys, of, mask, lists);
  };
  with_query_lists(call, tile_rows, tile_keys, tiles, write, launch);
}

void with_query_lists(const BackwardCall& given_call, int tile_rows, int tile_keys, const Tensor& tiles, const WriteQueryLists& write,
                      const LaunchBackward& launch) {
  if (!given_call.forward.blocks) return launch(given_call);
  BackwardCall call = given_call;
  const AttentionCall& forward = call.forward;
  QueryLists& lists = call.query_lists;
  const int batches = static_cast<int>(call.dk.shape(0)), kv_heads = static_cast<int>(call.dk.shape(1));
  const int group = static_cast<int>(forward.q.shape(1)) / kv_heads,
            per_list = std::max(1, static_cast<int>(forward.q.shape(1)) / std::max(1, forward.blocks.heads));
  lists.list_tiles = key_gradients_grid(call, tile_keys).m;
  lists.list_blocks = ceil_div(static_cast<int>(forward.q.shape(2)), tile_rows);
  lists.list_bits = std::bit_width(static_cast<unsigned>(lists.list_blocks));
  lists.list_numbers = QueryList::entries + std::int64_t{group} * lists.list_blocks;
  // Heads of the tensor that a key head's queries select with.
  const auto of_tensor = [&](const ListedHeads& part) {
    const int first = part.first_head * group / per_list, end = ceil_div((part.first_head + part.heads) * group, per_list);
    return ListedHeads{part.first_batch, part.batches, first, end - first};
  };
  const std::int64_t bytes =
      lists.list_tiles * lists.list_numbers * std::int64_t{sizeof(std::int32_t)} + ceil_div(group, per_list) * mark_bytes(forward);
  const std::vector<ListedHeads> parts = listed_heads(batches, kv_heads, 1, bytes, forward.blocks.most_list_bytes, false);
  const ListedHeads& largest = parts.front();
  const Tensor memory =
      workspace({std::int64_t{largest.batches} * largest.heads * lists.list_tiles, lists.list_numbers}, DType::i32, forward.stream);
  const Tensor marks = mark_memory(forward, of_tensor(largest));
  lists.lists = memory.data<std::int32_t>();
  for (const ListedHeads& part : parts) {
    lists.first_head = part.first_batch * kv_heads + part.first_head;
    lists.head_count = part.batches * part.heads;
    const Tensor written = first_rows(memory, std::int64_t{lists.head_count} * lists.list_tiles);
    write(call, tiles, mask_of(forward, of_tensor(part), per_list, marks), written);
    launch(call);
  }
}

}  // namespace tw::kernels::attention
