#include "tilewave/vertical_slash.hpp"

#include <algorithm>

#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/key_blocks.hpp"
#include "kernels/attention/vertical_slash.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/workspace.hpp"
#include "runtime/stream.hpp"

namespace tw {

namespace kernels::attention {

namespace {

/// They are sorted by comparing each with each.
constexpr std::int64_t kMostColumns = 65536;
constexpr std::int64_t kMostSlashes = 1 << 29;

/// Columns and slashes as the kernels that make lists read them.
struct Sets {
  Tensor bits;     ///< u64 words of SlashSets, as i64
  Tensor columns;  ///< i32 [batch * heads, columns], ascending
};

Sets make_sets(const VerticalSlash& x) {
  const int heads = x.all_heads(), words = ceil_div(x.seqlen, 64), columns = x.columns();
  Sets sets{workspace({heads, words}, DType::i64, x.stream), workspace({heads, columns}, DType::i32, x.stream)};
  const Tensor marks = workspace({heads, x.seqlen}, DType::u8, x.stream);
  launch<MarkBlocks>(x.stream, {heads}, [&](auto&, auto& p) {
    p.indices = x.slash->data<std::int32_t>();
    p.counts = nullptr;
    p.stride_query = 0, p.stride_entry = 1;
    p.stride_head = x.slash->shape(2), p.stride_batch = x.heads * p.stride_head;
    p.counts_stride_batch = p.counts_stride_head = p.counts_stride_query = 0;
    p.heads = x.heads, p.queries = 1, p.entries = static_cast<int>(x.slash->shape(2));
    p.blocks = x.seqlen;
    p.mask = marks.data<std::uint8_t>();
  });
  launch<PackSlashes>(x.stream, {ceil_div(words, PackSlashes::kWords), heads}, [&](auto&, auto& p) {
    p.marks = marks.data<std::uint8_t>();
    p.bits = static_cast<u64*>(sets.bits.data());
    p.seqlen = x.seqlen, p.words = words;
  });
  if (columns == 0) return sets;
  launch<SortColumns>(x.stream, {ceil_div(columns, SortColumns::kColumnsOfTile), heads}, [&](auto&, auto& p) {
    p.columns = x.vertical->data<std::int32_t>();
    p.sorted = sets.columns.data<std::int32_t>();
    p.count = columns, p.seqlen = x.seqlen;
  });
  return sets;
}

/// Blocks of keys that a block of queries has at most: they do not overlap, and each has a slash of its own.
std::int64_t most_blocks(const VerticalSlash& x) { return std::min<std::int64_t>(ceil_div(x.seqlen, x.query_block), x.slash->shape(2)); }

/// Lists of blocks and where they are.
struct Lists {
  std::int32_t *headers, *blocks;
  std::int64_t header_stride, block_stride;
  int first_head, heads;  ///< of batch * heads
  int tile_rows, tile_keys;
  int of_head;  ///< lists of a head
  bool for_attention;

  int count() const { return heads * of_head; }
};

void fill_blocks(auto& to, const Lists& lists) {
  to.headers = lists.headers, to.blocks = lists.blocks;
  to.header_stride = lists.header_stride, to.block_stride = lists.block_stride;
  to.size = lists.tile_keys;
}

void list_blocks(const VerticalSlash& x, const Sets& sets, const Lists& lists) {
  launch<ListSlashBlocks>(x.stream, {ceil_div(lists.count(), ListSlashBlocks::kLists)}, [&](auto&, auto& p) {
    p.slashes.bits = static_cast<const u64*>(sets.bits.data());
    p.slashes.words = static_cast<int>(sets.bits.shape(1));
    p.seqlens = x.seqlens;
    p.seqlen = x.seqlen, p.heads = x.heads;
    p.first_head = lists.first_head;
    p.query_block = x.query_block, p.tile_rows = lists.tile_rows;
    p.lists = lists.count(), p.lists_of_head = lists.of_head;
    fill_blocks(p.to, lists);
    p.for_attention = lists.for_attention;
    p.columns = sets.columns.data<std::int32_t>();
    p.column_count = x.columns();
  });
}

/// The columns of `t`, [batch, kv_head, key, dim], for each query head.
template <class T>
Tensor copy_columns(const VerticalSlash& x, const Sets& sets, const Tensor& t) {
  Tensor copy = workspace({x.batch, x.heads, x.columns(), t.shape(3)}, t.dtype(), x.stream);
  launch<CopyColumns<T>>(x.stream, {ceil_div(x.columns(), CopyColumns<T>::R), x.heads, x.batch}, [&](auto& bind, auto& p) {
    bind(p.in, t);
    bind(p.out, copy);
    p.columns = sets.columns.data<std::int32_t>();
    p.seqlens = x.seqlens;
    p.count = x.columns();
    p.heads_per_kv = x.heads / static_cast<int>(t.shape(1));
  });
  return copy;
}
Tensor columns_of(const VerticalSlash& x, const Sets& sets, const Tensor& t) {
  if (x.columns() == 0) return {};
  switch (t.dtype()) {
    case DType::f16:
      return copy_columns<f16>(x, sets, t);
    case DType::bf16:
      return copy_columns<bf16>(x, sets, t);
    default:
      return copy_columns<float>(x, sets, t);
  }
}

template <class T>
void clear_unused(const VerticalSlashCall& call) {
  const Tensor& o = call.attention.o;
  const int tiles = ceil_div(call.selected.seqlen, ClearUnused<T>::R);
  launch<ClearUnused<T>>(call.selected.stream, {tiles, call.selected.heads, call.selected.batch}, [&](auto& bind, auto& p) {
    bind(p.o, o);
    p.lse = call.attention.lse;
    p.seqlens = call.selected.seqlens;
  });
}
/// Checks what both functions take.
VerticalSlash check(const Form& form, const Tensor& vertical, const Tensor& slash, std::int64_t batch, std::int64_t heads,
                    std::int64_t seqlen, Device device, const VerticalSlashOptions& options) {
  const auto numbers = [&](const char* name, const Tensor& t, const char* dims, std::int64_t most) {
    check_operand(form.op, name, t, DType::i32, device);
    form.require(t.rank() == 3 && t.shape(0) == batch && t.shape(1) == heads && t.is_contiguous(),
                 "{} is {}; it must be i32[{}, {}, {}], contiguous", name, t, batch, heads, dims);
    form.require(t.shape(2) <= most, "{} is {}; {} are limited to {}", name, t, dims, most);
  };
  numbers("vertical", vertical, "columns", kMostColumns);
  numbers("slash", slash, "slashes", kMostSlashes);
  form.require(options.query_block == 64 || options.query_block == 128, "query_block is {}; it must be 64 or 128", options.query_block);
  return {.vertical = &vertical,
          .slash = &slash,
          .seqlens = form.elements<std::int32_t>({"seqlens", options.seqlens}, {batch}, device),
          .batch = static_cast<int>(batch),
          .heads = static_cast<int>(heads),
          .seqlen = static_cast<int>(seqlen),
          .query_block = options.query_block,
          .stream = checked_stream(form.op, options.stream, device)};
}

}  // namespace

void clear_unused(const VerticalSlashCall& call) {
  if (call.selected.seqlens == nullptr) return;
  switch (call.attention.o.dtype()) {
    case DType::f16:
      return clear_unused<f16>(call);
    case DType::bf16:
      return clear_unused<bf16>(call);
    default:
      return clear_unused<float>(call);
  }
}

void with_slash_lists(const VerticalSlashCall& call, int tile_rows, int tile_keys,
                      const std::function<void(const AttentionCall&)>& launch_attention) {
  const VerticalSlash& x = call.selected;
  const Sets sets = make_sets(x);
  AttentionCall some = call.attention;
  some.columns.k = columns_of(x, sets, some.k), some.columns.v = columns_of(x, sets, some.v);
  some.columns.numbers = ceil_div(x.columns(), 128) * 128;  // whole blocks of all sizes
  KeyBlocks& blocks = some.blocks;
  blocks.list_tiles = ceil_div(x.seqlen, tile_rows);
  blocks.list_numbers = BlockList::blocks + most_blocks(x) * (x.query_block / tile_keys);
  blocks.lists_of_batch = x.heads;
  const std::int64_t list_bytes = blocks.list_tiles * (blocks.list_numbers + some.columns.numbers) * std::int64_t{sizeof(std::int32_t)};
  const std::vector<ListedHeads> parts = listed_heads(x.batch, x.heads, 1, list_bytes, blocks.most_list_bytes, false);
  const std::int64_t most_lists = std::int64_t{parts.front().batches} * parts.front().heads * blocks.list_tiles;
  const Tensor lists = workspace({most_lists, blocks.list_numbers}, DType::i32, x.stream);
  const Tensor positions = workspace({most_lists, some.columns.numbers}, DType::i32, x.stream);
  blocks.lists = lists.data<std::int32_t>();
  some.columns.positions = positions.data<std::int32_t>();
  for (const ListedHeads& part : parts) {
    const Lists of_part{.headers = lists.data<std::int32_t>(),
                        .blocks = lists.data<std::int32_t>() + BlockList::blocks,
                        .header_stride = blocks.list_numbers,
                        .block_stride = blocks.list_numbers,
                        .first_head = part.first_batch * x.heads + part.first_head,
                        .heads = part.batches * part.heads,
                        .tile_rows = tile_rows,
                        .tile_keys = tile_keys,
                        .of_head = blocks.list_tiles,
                        .for_attention = true};
    list_blocks(x, sets, of_part);
    if (some.columns.numbers > 0) {
      launch<PlaceColumns>(x.stream, {of_part.count(), ceil_div(some.columns.numbers, PlaceColumns::kColumnsOfTile)}, [&](auto&, auto& p) {
        fill_blocks(p.blocks, of_part);
        p.columns = sets.columns.data<std::int32_t>();
        p.column_count = x.columns();
        p.first_head = of_part.first_head, p.lists_of_head = of_part.of_head;
        p.positions = positions.data<std::int32_t>();
        p.numbers = some.columns.numbers;
      });
    }
    blocks.first_head = blocks.first_list = of_part.first_head;
    blocks.head_count = of_part.heads;
    launch_attention(some);
  }
}

AttentionConfig vertical_slash_config(const VerticalSlashCall& call) {
  const AttentionCall& attention = call.attention;
  const HeadDims dims = compiled_dims(attention.q.shape(3), attention.v.shape(3));
  const int form = attention.ragged() ? kRagged : kEqualLengths, block = call.selected.query_block;
  const std::int64_t shared = generic_shared_bytes(attention.stream);
  return shared ? generic_config(dims, form | kListed | kColumns, {}, shared, block) : columns_config(dims, block, form);
}

VerticalSlashCall check_vertical_slash(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& vertical, const Tensor& slash,
                                       const Tensor& o, const VerticalSlashOptions& options) {
  const Form form{.op = "vertical_slash_attention"};
  const AttentionOptions of_attention{
      .scale = options.scale, .causal = true, .causal_offset = 0, .lse = options.lse, .stream = options.stream};
  AttentionCall attention =
      check_common(form, q, k, v, o, of_attention, {{"vertical", &vertical}, {"slash", &slash}, {"seqlens", options.seqlens}});
  form.require(k.shape(0) == q.shape(0) && k.shape(1) == q.shape(1), "k is {}; its batch and seqlen must be q's, {} and {}", k, q.shape(0),
               q.shape(1));
  const VerticalSlash selected = check(form, vertical, slash, q.shape(0), q.shape(2), q.shape(1), o.device(), options);
  attention.used_q = attention.used_k = selected.seqlens;
  return {attention, selected};
}

}  // namespace kernels::attention

using namespace kernels::attention;

void vertical_slash_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& vertical, const Tensor& slash,
                              const Tensor& o, const VerticalSlashOptions& options) {
  const VerticalSlashCall call = check_vertical_slash(q, k, v, vertical, slash, o, options);
  if (o.numel() == 0) return;
  clear_unused(call);
  if (!o.device().is_cuda()) return run_vertical_slash_on_cpu(call);
  const AttentionConfig config = vertical_slash_config(call);
  with_slash_lists(call, config.rows, config.keys, [&](const AttentionCall& some) { run_on_gpu(some, config); });
}

void vertical_slash_index(const Tensor& vertical, const Tensor& slash, std::int64_t seqlen, const VerticalSlashLists& lists,
                          const VerticalSlashOptions& options) {
  const Form form{.op = "vertical_slash_index"};
  const Device device = vertical.device();
  constexpr std::int64_t kLongest = std::int64_t{1} << 29;
  form.require(seqlen >= 0 && seqlen <= kLongest, "seqlen is {}; it must be 0 to {}", seqlen, kLongest);
  form.require(vertical.rank() == 3, "vertical is {}; it must be i32[batch, heads, columns]", vertical);
  const std::int64_t batch = vertical.shape(0), heads = vertical.shape(1);
  const VerticalSlash x = check(form, vertical, slash, batch, heads, seqlen, device, options);
  const std::int64_t of_head = (seqlen + x.query_block - 1) / x.query_block;
  form.require(batch * heads * of_head <= kLongest, "{} heads of {} tokens have {} lists; they are limited to {}", batch * heads, seqlen,
               batch * heads * of_head, kLongest);
  const struct {
    NamedTensor tensor;
    Shape shape;
  } outputs[] = {{{"block_count", &lists.block_count}, {batch, heads, of_head}},
                 {{"block_offset", &lists.block_offset}, {batch, heads, of_head, slash.shape(2)}},
                 {{"column_count", &lists.column_count}, {batch, heads, of_head}},
                 {{"column_index", &lists.column_index}, {batch, heads, of_head, vertical.shape(2)}}};
  for (const auto& [output, shape] : outputs) {
    form.elements<std::int32_t>(output, shape, device);
    check_disjoint(form.op, output, {{"vertical", &vertical}, {"slash", &slash}, {"seqlens", options.seqlens}});
    for (const auto& other : outputs)
      if (other.tensor.name != output.name) check_disjoint(form.op, output, {other.tensor});
  }
  if (lists.block_count.numel() == 0) return;
  const Sets sets = make_sets(x);
  for (const auto& [output, shape] : outputs)
    fill_bytes(output.tensor->data(), static_cast<std::size_t>(output.tensor->numel()) * sizeof(std::int32_t), 0, x.stream);
  const Lists to{.headers = lists.block_count.data<std::int32_t>(),
                 .blocks = lists.block_offset.data<std::int32_t>(),
                 .header_stride = 1,
                 .block_stride = slash.shape(2),
                 .first_head = 0,
                 .heads = x.all_heads(),
                 .tile_rows = x.query_block,
                 .tile_keys = x.query_block,
                 .of_head = static_cast<int>(of_head),
                 .for_attention = false};
  list_blocks(x, sets, to);
  if (x.columns() == 0) return;
  launch<ListColumns>(x.stream, {ceil_div(to.count(), ListColumns::rows)}, [&](auto&, auto& p) {
    fill_blocks(p.blocks, to);
    p.columns = sets.columns.data<std::int32_t>();
    p.seqlens = x.seqlens;
    p.column_count = x.columns();
    p.seqlen = x.seqlen, p.heads = x.heads;
    p.lists = to.count(), p.lists_of_head = to.of_head, p.query_block = x.query_block;
    p.counts = lists.column_count.data<std::int32_t>();
    p.indices = lists.column_index.data<std::int32_t>();
  });
}

}  // namespace tw
