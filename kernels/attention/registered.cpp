#include "kernels/attention/backward.hpp"
#include "kernels/attention/call.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/key_blocks.hpp"
#include "kernels/attention/variants.hpp"
#include "kernels/attention/vertical_slash.tile.hpp"

// The kernels that are worth compiling ahead of time. Their names cost nothing; the analysis of a kernel is an instantiation for the
// analysis target, which these have.

namespace tw::kernels::attention {

namespace {

/// One length, all keys or a causal mask; or `split`, decode: a tile is the queries of all heads that share keys. `listed`: of the blocks
/// in lists.
struct Registered {
  int head_dim;
  bool causal = false, split = false, listed = false;

  template <class T>
  constexpr AttentionConfig config() const {
    if (sizeof(T) == 1) return fp8_config({head_dim, head_dim});
    if (listed && split) return listed_config({head_dim, head_dim}, TileUse::split, 128, 64, kRagged | kSplit | kPaged);
    if (listed) return listed_config({head_dim, head_dim}, TileUse::narrow, 128, 128, kEqualLengths);
    if (split) return gpu_config({head_dim, head_dim}, TileUse::split, kRagged | kSplit | kPaged);
    return gpu_config({head_dim, head_dim}, causal ? TileUse::paired : TileUse::widest);
  }
};

/// A call on placeholders.
template <class T>
AttentionCall make_call(const ShapeValues& shape, const Registered& kernel) {
  constexpr DType dtype = dtype_of<T>, of_o = sizeof(T) == 1 ? DType::bf16 : dtype;
  const int heads = shape.integer("heads"), seqlen_q = shape.integer("seqlen_q"), seqlen_k = shape.integer("seqlen_k");
  const int kv_heads = shape["kv_heads"] > 0 ? shape.integer("kv_heads") : heads, batch = shape.integer("batch"), d = kernel.head_dim;
  require(heads > 0 && heads % kv_heads == 0, "attention: heads is {} and kv_heads {}; heads must be a positive multiple of kv_heads",
          heads, kv_heads);
  const Tensor q = placeholder({batch, heads, seqlen_q, d}, dtype).transpose(1, 2), k = placeholder({batch, seqlen_k, kv_heads, d}, dtype);
  const Tensor o = placeholder(q.shape(), of_o), lse = placeholder({batch, heads, seqlen_q}, DType::f32);
  AttentionCall call = detail::check_attention(q, k, k, o, {.causal = kernel.causal, .lse = shape["lse"] ? &lse : nullptr});
  if (call.descaled) {
    call.v = placeholder({batch, kv_heads, d, (seqlen_k + 127) / 128 * 128}, dtype);
    call.values_transposed = true;
  }
  if (!kernel.split) return call;
  const int rows = heads / kv_heads * seqlen_q, most = kernel.config<T>().rows;
  call.splits = shape.integer("splits");
  require(call.splits > 0, "attention: splits is {}; it must be positive", call.splits);
  require(rows <= most, "attention: heads is {}, kv_heads {} and seqlen_q {}; heads / kv_heads * seqlen_q must be at most {}", heads,
          kv_heads, seqlen_q, most);
  share_keys(call, q);
  call.o = placeholder(call.q.shape(), dtype);
  if (call.splits > 1) {
    call.partial = placeholder({call.splits * batch, kv_heads, rows, d}, DType::f32);
    call.lse = lse.data<float>();
  }
  return call;
}

/// A list of all blocks for each tile, which the analysis reads.
Tensor list_all_blocks(AttentionCall& call, const AttentionConfig& config) {
  KeyBlocks& blocks = call.blocks;
  const int count = ceil_div(call.keys, config.keys);
  blocks.list_tiles = detail::attention_grid(call, config.rows).m / call.splits;
  blocks.list_numbers = BlockList::blocks + count;
  blocks.heads_per_list = static_cast<int>(call.q.shape(1));
  Tensor lists = Tensor::zeros({blocks.list_tiles, blocks.list_numbers}, DType::i32, Stream::standard(Device::cpu()));
  for (int tile = 0; tile < blocks.list_tiles; ++tile) {
    std::int32_t* const list = lists.data<std::int32_t>() + tile * blocks.list_numbers;
    list[BlockList::count] = count;
    list[BlockList::cut] = call.keys % config.keys != 0 ? 1 : 0;  // the last one
    for (int n = 0; n < count; ++n) list[BlockList::blocks + n] = count - 1 - n;
  }
  blocks.lists = lists.data<std::int32_t>();
  return lists;
}

template <class T, Registered kKernel>
KernelVariant variant(const char* dtype) {
  using List =
      Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, Band<false, kKernel.causal>>;
  static constexpr AttentionConfig kConfig = kKernel.config<T>();
  using Instantiated = Attention<T, kConfig, List, conditional<sizeof(T) == 1, bf16, T>>;
  const Kernel kernel{.dtype = dtype_of<T>, .rules = {.upper = kKernel.causal}, .config = kConfig};
  return {make_spec({type_of(kernel), Instantiated::source, detail::tile_recorder<Instantiated>()}, true, true,
                    tw::format("attention_{}{}{}_d{}{}", kKernel.split ? "decode_" : "", kKernel.listed ? "blocks_" : "", dtype,
                               kKernel.head_dim, kKernel.causal ? "_causal" : "")),
          [](const ShapeValues& shape) {
            AttentionCall call = make_call<T>(shape, kKernel);
            const Tensor lists = kKernel.listed ? list_all_blocks(call, kConfig) : Tensor();
            return analyze<Instantiated>(detail::attention_grid(call, kConfig.rows), [&](auto& bind, auto& p) {
              detail::fill_attention<List>(bind, p, call, kConfig.keys, kNoUserRule);
            });
          }};
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> all = {
      variant<bf16, Registered{64}>("bf16"),
      variant<bf16, Registered{64, true}>("bf16"),
      variant<bf16, Registered{128}>("bf16"),
      variant<bf16, Registered{128, true}>("bf16"),
      variant<f16, Registered{64}>("f16"),
      variant<f16, Registered{64, true}>("f16"),
      variant<f16, Registered{128}>("f16"),
      variant<f16, Registered{128, true}>("f16"),
      variant<bf16, Registered{256, true}>("bf16"),
      variant<bf16, Registered{128, false, true}>("bf16"),
      variant<bf16, Registered{128, true, true}>("bf16"),
      variant<bf16, Registered{128, false, false, true}>("bf16"),
      variant<bf16, Registered{128, false, true, true}>("bf16"),
      variant<fp8_e4m3, Registered{128, true}>("fp8"),
      values_variant(),
      combine_variant(),
      wide_combine_variant(),
  };
  for (const KernelVariant& backward : registered_backward()) all.push_back(backward);
  return all;
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  for (const auto& [dtype, name] : {std::pair{DType::bf16, "bf16"}, std::pair{DType::f16, "f16"}}) {
    for (const int dim : {64, 128, 256}) {
      for (const bool split : {false, true}) {
        if (split && dtype == DType::f16) continue;
        const int form = split ? kRagged | kSplit | kPaged : kEqualLengths;
        const std::string type = type_of(Kernel{.dtype = dtype, .rules = {}, .config = generic_config({dim, dim}, form, {}, shared_bytes)});
        specs.push_back(for_target(make_spec({type, "tilewave/tile/attention.tile.hpp", nullptr}, true, true,
                                             tw::format("attention{}_{}_d{}", split ? "_decode" : "", name, dim)),
                                   GpuTarget::cuda));
      }
    }
  }
  for (const int form : {0, kRagged | kSplit | kPaged}) {
    const std::string type =
        type_of(Kernel{.dtype = DType::bf16, .rules = {}, .config = generic_config({128, 128}, form | kListed, {}, shared_bytes)});
    specs.push_back(for_target(make_spec({type, "tilewave/tile/attention.tile.hpp", nullptr}, true, true,
                                         tw::format("attention{}_blocks_bf16_d128", form == 0 ? "" : "_decode")),
                               GpuTarget::cuda));
  }
  specs.push_back(for_target(make_spec({type_of(Kernel{.dtype = DType::bf16,
                                                       .rules = {.upper = true},
                                                       .config = generic_config({128, 128}, kListed | kColumns, {}, shared_bytes)}),
                                        "tilewave/tile/attention.tile.hpp", nullptr},
                                       true, true, "attention_vertical_slash_bf16_d128"),
                             GpuTarget::cuda));
  for (const auto& [info, name] : {std::pair{kernel_info<PackSlashes>, "pack_slashes"},
                                   {kernel_info<SortColumns>, "sort_columns"},
                                   {kernel_info<CopyColumns<bf16>>, "copy_columns_bf16"},
                                   {kernel_info<ListSlashBlocks>, "list_slash_blocks"},
                                   {kernel_info<PlaceColumns>, "place_columns"},
                                   {kernel_info<ListColumns>, "list_columns"},
                                   {kernel_info<ClearUnused<bf16>>, "clear_unused_bf16"}})
    specs.push_back(for_target(make_spec(info, true, true, name), GpuTarget::cuda));
  specs.push_back(for_target(make_spec(kernel_info<MarkBlocks>, true, true, "mark_blocks"), GpuTarget::cuda));
  specs.push_back(for_target(make_spec(kernel_info<ListKeyBlocks<64, 64>>, true, true, "list_key_blocks"), GpuTarget::cuda));
  specs.push_back(
      for_target(make_spec(kernel_info<ListQueryBlocks<16, 64, kEqualLengths>>, true, true, "list_query_blocks"), GpuTarget::cuda));
  specs.push_back(for_target(combine_variant().spec, GpuTarget::cuda));
  specs.push_back(for_target(wide_combine_variant().spec, GpuTarget::cuda));
  for (const KernelSpec& backward : registered_backward_generic(shared_bytes)) specs.push_back(backward);
  return specs;
}

}  // namespace tw::kernels::attention
