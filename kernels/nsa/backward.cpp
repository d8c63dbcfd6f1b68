#include <algorithm>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/nsa/binding.hpp"
#include "kernels/nsa/call.hpp"
#include "kernels/nsa/key_gradients.tile.hpp"
#include "kernels/nsa/query_gradient.tile.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/elementwise.hpp"

namespace tw {

namespace kernels::nsa {

namespace {

constexpr const char* kQuerySource = "kernels/nsa/query_gradient.tile.hpp";
constexpr const char* kKeySource = "kernels/nsa/key_gradients.tile.hpp";
constexpr std::int64_t kHopperShared = 227 * 1024, kHalfOfHopper = 113 * 1024;
constexpr int kSize = 2;            ///< of an element, on a GPU
constexpr int kColumns = 128;       ///< of tiles without products: the largest head dimension
constexpr int kSummedRows = 16;     ///< rows of a tile of SumParts
constexpr int kScannedTiles = 512;  ///< tiles of tokens that ListTokens lists together: 4 for each thread
/// Tokens of a part: long enough that adding up parts takes little time, short enough that the first block of a sequence, which all tokens
/// select, is divided.
constexpr int kPartTokens = 512;

template <Kernel k>
using HostQueryGradient = QueryGradient<ElementOf<k.dtype>, k.head_dim, k.value_dim, k.group, k.rows, k.keys, k.stages>;
template <KeyGradientsKernel k>
using HostKeyGradients = KeyGradients<ElementOf<k.dtype>, k.head_dim, k.value_dim, k.group, k.stages, k.gradient>;

/// Sums of queries, and the lists of the tokens of each block.
struct Prepared {
  Kernel query;
  KeyGradientsKernel key;
  Lists lists;            ///< for tiles of query.tokens() tokens
  Tensor sums;            ///< f32 [kv_heads, tokens * 2 * group of the kernels]
  int blocks = 0;         ///< of a head of keys, each of query.keys keys
  int pairs = 0;          ///< of a token and a block, at most
  int parts = 0;          ///< tiles of KeyGradients
  Tensor begins, tokens;  ///< i32 [kv_heads * blocks + 1], [pairs]
};

int token_count(const Call& call) { return static_cast<int>(call.q.shape(0)); }

void bind_blocks(auto& p, const Call& call, const Prepared& prepared) {
  bind_sequences(p.sequences, call.layout);
  p.block_keys = prepared.query.keys;
  p.count = prepared.blocks;
}
void bind_segments(auto& p, const Call& call, const Prepared& prepared) {
  p.offsets = prepared.begins.data<std::int32_t>();
  p.count = call.kv_heads() * prepared.blocks;
  p.rows = prepared.pairs;
}

template <class T, int kGroup>
void sum_queries(const Call& call, const Gradients& g, const Prepared& prepared) {
  launch<QuerySums<T, kGroup, kColumns>>(call.stream, {.m = token_count(call), .n = call.kv_heads()}, [&](auto& bind, auto& p) {
    bind(p.o, g.o);
    bind(p.d_o, g.d_o);
    p.lse = g.lse;
    p.sums = prepared.sums.data<float>();
    p.tokens = token_count(call);
    p.group = call.group();
    p.heads = call.kv_heads() * call.group();
  });
}
template <class T>
void sum_queries(const Call& call, const Gradients& g, const Prepared& prepared) {
  switch (prepared.query.group) {
    case 16:
      return sum_queries<T, 16>(call, g, prepared);
    case 32:
      return sum_queries<T, 32>(call, g, prepared);
    default:
      return sum_queries<T, 64>(call, g, prepared);
  }
}

/// Lists the tokens of each block.
void list_tokens(const Call& call, Prepared& prepared) {
  const Stream& stream = call.stream;
  const int heads = call.kv_heads(), keys = prepared.query.keys, tiles = call.layout.tiles(prepared.query.tokens());
  prepared.blocks = KeyBlocks<cpu::Target>::total(call.layout.count, call.layout.keys, call.layout.cu_k != nullptr, keys);
  const std::int64_t blocks_of_token =
      call.selection.listed
          ? std::min<std::int64_t>(prepared.blocks, std::int64_t{call.selection.slots} * (call.selection.block_size / keys))
          : prepared.blocks;
  const std::int64_t pairs = call.q.shape(0) * heads * blocks_of_token;
  require(pairs <= kLargestExtent, "nsa: there are up to {} pairs of a token and a block; the gradients are limited to {}", pairs,
          kLargestExtent);
  prepared.pairs = static_cast<int>(pairs);
  const int rows = heads * prepared.blocks;
  prepared.parts = Segments<cpu::Target>::tiles(prepared.pairs, rows, kPartTokens);
  prepared.begins = workspace({std::int64_t{rows} + 1}, DType::i32, stream);
  prepared.tokens = workspace({std::max<std::int64_t>(pairs, 1)}, DType::i32, stream);
  const Tensor masks = zeros({rows, tiles}, DType::u8, stream), counts = workspace({rows}, DType::i32, stream);
  launch<MarkBlocks>(stream, {.m = tiles, .n = heads}, [&](auto&, auto& p) {
    bind_blocks(p.blocks, call, prepared);
    bind_sequences(p.sequences, call.layout);
    bind_lists(p.lists, prepared.lists, call, keys);
    p.masks = masks.data<std::uint8_t>();
    p.tokens = prepared.query.tokens();
    p.tiles = tiles;
  });
  launch<CountTokens<kScannedTiles>>(stream, {.m = rows}, [&](auto&, auto& p) {
    p.masks = masks.data<std::uint8_t>();
    p.counts = counts.data<std::int32_t>();
    p.tiles = tiles;
  });
  launch<ListTokens<kScannedTiles>>(stream, {.m = rows}, [&](auto&, auto& p) {
    bind_sequences(p.sequences, call.layout);
    p.masks = masks.data<std::uint8_t>();
    p.counts = counts.data<std::int32_t>();
    p.begins = prepared.begins.data<std::int32_t>();
    p.tokens = prepared.tokens.data<std::int32_t>();
    p.blocks = rows;
    p.tiles = tiles;
    p.tokens_of_tile = prepared.query.tokens();
  });
}

template <class Params>
void bind_query_gradient(auto& bind, Params& p, const Call& call, const Gradients& g, const Prepared& prepared) {
  bind(p.q, call.q, CopiedRows{prepared.query.group});
  bind(p.d_o, g.d_o, CopiedRows{prepared.query.group});
  bind(p.k, call.k);
  bind(p.v, call.v);
  bind(p.dq, g.dq);
  p.sums = prepared.sums.template data<float>();
  bind_sequences(p.sequences, call.layout);
  bind_lists(p.lists, prepared.lists, call, prepared.query.keys);
  p.token_count = token_count(call);
  p.group = call.group();
  p.heads = call.kv_heads() * call.group();
  p.scale = call.scale;
  p.scale_log2 = call.scale * kLog2E;
}

template <class Params>
void bind_key_gradients(auto& bind, Params& p, const Call& call, const Gradients& g, const Prepared& prepared, const Tensor& dk,
                        const Tensor& dv) {
  bind(p.q, call.q, CopiedRows{prepared.key.group});
  bind(p.d_o, g.d_o, CopiedRows{prepared.key.group});
  bind(p.k, call.k);
  bind(p.v, call.v);
  bind(p.sums, prepared.sums);
  bind(p.dk, dk);
  bind(p.dv, dv);
  bind_blocks(p.blocks, call, prepared);
  bind_segments(p.lists, call, prepared);
  p.listed = prepared.tokens.template data<std::int32_t>();
  p.part = kPartTokens;
  p.scale_log2 = call.scale * kLog2E;
}

/// The kernel, or one for each gradient.
std::vector<KeyGradientsKernel> by_gradient(KeyGradientsKernel kernel) {
  if (kernel.gradient == Gradient::keys_and_values) return {kernel};
  KeyGradientsKernel of_values = kernel;
  of_values.gradient = Gradient::values;
  return {kernel, of_values};
}

/// The kernels of the CPU, as those of the forward pass.
constexpr Kernel cpu_query_kernel(DType dtype, int group, int keys) {
  return {.dtype = dtype, .group = group <= 16 ? 16 : 64, .keys = keys, .stages = 2};
}
constexpr KeyGradientsKernel cpu_key_kernel(DType dtype, int group) { return {.dtype = dtype, .group = group <= 16 ? 16 : 64}; }

template <DType dtype>
void run_products(const Call& call, const Gradients& g, const Prepared& prepared, const Tensor& dk, const Tensor& dv) {
  const TileGrid query_grid{.m = call.layout.tiles(prepared.query.tokens()), .n = call.kv_heads()}, key_grid{.m = prepared.parts};
  const auto bind_query = [&](auto& bind, auto& p) { bind_query_gradient(bind, p, call, g, prepared); };
  const auto bind_key = [&](auto& bind, auto& p) { bind_key_gradients(bind, p, call, g, prepared, dk, dv); };
  if constexpr (dtype != DType::f32) {
    if (call.stream.device().is_cuda()) {
      static KernelTable<Kernel> query_table(query_gradient_type, kQuerySource);
      static KernelTable<KeyGradientsKernel> key_table(type_of, kKeySource);
      using QueryParams = typename HostQueryGradient<Kernel{.dtype = dtype}>::template On<sm_90a::Target<>>::Params;
      using KeyParams = typename HostKeyGradients<KeyGradientsKernel{.dtype = dtype}>::template On<sm_90a::Target<>>::Params;
      for (const KeyGradientsKernel& kernel : by_gradient(prepared.key))
        detail::launch_named<KeyParams>(key_table[kernel], call.stream, key_grid, bind_key);
      return detail::launch_named<QueryParams>(query_table[prepared.query], call.stream, query_grid, bind_query);
    }
  }
  const auto launch_with = [&]<int group>() {
    constexpr KeyGradientsKernel key = cpu_key_kernel(dtype, group);
    if (key != prepared.key) return;
    launch_cpu<HostKeyGradients<key>>(key_grid, bind_key);
    constexpr Kernel wide = cpu_query_kernel(dtype, group, 64), narrow = cpu_query_kernel(dtype, group, 32);
    prepared.query == wide ? launch_cpu<HostQueryGradient<wide>>(query_grid, bind_query)
                           : launch_cpu<HostQueryGradient<narrow>>(query_grid, bind_query);
  };
  launch_with.template operator()<16>();
  launch_with.template operator()<64>();
}

template <class T>
void sum_parts(const Call& call, const Prepared& prepared, const Tensor& parts, const Tensor& to, float scale) {
  const TileGrid grid{.m = call.kv_heads() * prepared.blocks, .n = ceil_div(prepared.query.keys, kSummedRows)};
  launch<SumParts<T, kSummedRows, kColumns>>(call.stream, grid, [&](auto& bind, auto& p) {
    bind(p.parts, parts);
    bind(p.to, to);
    bind_blocks(p.blocks, call, prepared);
    bind_segments(p.lists, call, prepared);
    p.part = kPartTokens;
    p.scale = scale;
  });
}

template <DType dtype>
void run_backward_as(const Call& call, const Gradients& g) {
  using T = ElementOf<dtype>;
  const std::int64_t generic_shared = generic_shared_bytes(call.stream);
  Prepared prepared;
  prepared.query = choose_kernel(call, generic_shared);
  if (call.stream.device().is_cuda()) {
    prepared.key = key_gradients_kernel(prepared.query, generic_shared);
    prepared.query = query_gradient_kernel(prepared.query, generic_shared);
  } else {
    prepared.key = cpu_key_kernel(dtype, call.group());
  }
  prepared.lists = make_lists(call, prepared.query.tokens());
  prepared.sums = workspace({call.kv_heads(), std::int64_t{token_count(call)} * 2 * prepared.query.group}, DType::f32, call.stream);
  sum_queries<T>(call, g, prepared);
  list_tokens(call, prepared);
  const Tensor dk = workspace({prepared.parts, kGradientKeys, prepared.key.head_dim}, DType::f32, call.stream),
               dv = workspace({prepared.parts, kGradientKeys, prepared.key.value_dim}, DType::f32, call.stream);
  run_products<dtype>(call, g, prepared, dk, dv);
  sum_parts<T>(call, prepared, dk, g.dk, call.scale);
  sum_parts<T>(call, prepared, dv, g.dv, 1);
}

}  // namespace

Kernel query_gradient_kernel(Kernel kernel, std::int64_t generic_shared) {
  const auto fit = [&](std::int64_t shared, int most) {
    const int row = (kernel.head_dim + kernel.value_dim) * kSize;
    return generic_stages(shared, kernel.keys * row, kernel.rows * row + 1024, most);
  };
  if (generic_shared > 0) {
    kernel.rows = 64;
    kernel.stages = fit(generic_shared, 2);
  } else {
    kernel.rows = 128;  // also where a sequence is short: a backward pass has many tokens
    kernel.stages = fit(kHopperShared, 4);
  }
  return kernel;
}
std::string query_gradient_type(const Kernel& k) {
  return tw::format("tw::kernels::nsa::QueryGradient<{}, {}, {}, {}, {}, {}, {}>", element_name(k.dtype), k.head_dim, k.value_dim, k.group,
                    k.rows, k.keys, k.stages);
}

KeyGradientsKernel key_gradients_kernel(const Kernel& forward, std::int64_t generic_shared) {
  KeyGradientsKernel kernel{forward.dtype, forward.head_dim, forward.value_dim, forward.group};
  if (generic_shared > 0 && (kernel.head_dim > 64 || kernel.value_dim > 64)) kernel.gradient = Gradient::keys;
  const int keys = kGradientKeys * (kernel.head_dim + kernel.value_dim) * kSize;
  const int vectors = 1024 * (64 / kernel.group);  // a vector takes a kilobyte
  // Two blocks share an SM: each has one warpgroup.
  kernel.stages = generic_stages(generic_shared > 0 ? generic_shared : kHalfOfHopper, keys + vectors, keys + 1024, 3);
  return kernel;
}
std::string type_of(const KeyGradientsKernel& k) {
  constexpr const char* kGradients[] = {"keys_and_values", "keys", "values"};
  return tw::format("tw::kernels::nsa::KeyGradients<{}, {}, {}, {}, {}, tw::kernels::nsa::Gradient::{}>", element_name(k.dtype), k.head_dim,
                    k.value_dim, k.group, k.stages, kGradients[static_cast<std::size_t>(k.gradient)]);
}

std::vector<KernelSpec> backward_specs(const Kernel& forward, std::int64_t generic_shared) {
  const auto spec = [](std::string type, const char* source) { return make_spec({type, source, nullptr}, true, true, type); };
  std::vector<KernelSpec> specs{spec(query_gradient_type(query_gradient_kernel(forward, generic_shared)), kQuerySource),
                                make_spec(kernel_info<QuerySums<bf16, 16, kColumns>>, true, true),
                                make_spec(kernel_info<QuerySums<bf16, 64, kColumns>>, true, true),
                                make_spec(kernel_info<MarkBlocks>, true, true),
                                make_spec(kernel_info<CountTokens<kScannedTiles>>, true, true),
                                make_spec(kernel_info<ListTokens<kScannedTiles>>, true, true),
                                make_spec(kernel_info<SumParts<bf16, kSummedRows, kColumns>>, true, true)};
  for (const KeyGradientsKernel& kernel : by_gradient(key_gradients_kernel(forward, generic_shared)))
    specs.push_back(spec(type_of(kernel), kKeySource));
  return specs;
}

void run_backward(const Call& call, const Gradients& gradients) {
  switch (call.q.dtype()) {
    case DType::f16:
      return run_backward_as<DType::f16>(call, gradients);
    case DType::f32:
      return run_backward_as<DType::f32>(call, gradients);
    default:
      return run_backward_as<DType::bf16>(call, gradients);
  }
}

}  // namespace kernels::nsa

namespace {

using namespace kernels::nsa;
using kernels::workspace;

void differentiate(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor* block_indices, const Tensor& o,
                   const Tensor& lse, const Tensor& d_o, const Tensor& dq, const Tensor& dk, const Tensor& dv, const NsaOptions& options) {
  require(!options.seqlens, "{}: seqlens is given; gradients are for keys that are not in a cache", op);
  Call call = check_call(op, q, k, v, block_indices, options);
  const Device device = q.device();
  per_head(op, "lse", lse, q);
  const Shape of_o{q.shape(0), q.shape(1), q.shape(2), v.shape(3)};
  const struct {
    const char* name;
    const Tensor& tensor;
    const Shape& shape;
    bool output;
  } others[] = {{"o", o, of_o, false},
                {"d_o", d_o, of_o, false},
                {"dq", dq, q.shape(), true},
                {"dk", dk, k.shape(), true},
                {"dv", dv, v.shape(), true}};
  for (const auto& other : others) {
    check_operand(op, other.name, other.tensor, q.dtype(), device);
    require(other.tensor.shape() == other.shape, "{}: {} is {}; it must be {}[{}]", op, other.name, other.tensor, name_of(q.dtype()),
            tw::join(other.shape, ", "));
    check_columns(op, other.name, other.tensor);
    if (!other.output) continue;
    check_output(op, other.name, other.tensor);
    check_disjoint(op, {other.name, &other.tensor},
                   {{"q", &q},
                    {"k", &k},
                    {"v", &v},
                    {"o", &o},
                    {"lse", &lse},
                    {"d_o", &d_o},
                    {"block_indices", block_indices},
                    {"block_counts", options.block_counts},
                    {"cu_seqlens", options.cu_seqlens},
                    {"cu_seqlens_k", options.cu_seqlens_k}});
  }
  check_disjoint(op, {"dk", &dk}, {{"dq", &dq}});
  check_disjoint(op, {"dv", &dv}, {{"dq", &dq}, {"dk", &dk}});
  if (q.numel() == 0 || k.numel() == 0) {
    // There is nothing to add up.
    for (const Tensor* const t : {&dq, &dk, &dv})
      if (t->numel() > 0) cast(zeros(t->shape(), t->dtype(), call.stream), *t, {.stream = call.stream});
    return;
  }
  fit_operands(call, q, k, v);
  const bool rows = are_rows(dq);
  const Tensor of_dq = rows ? dq : workspace(dq.shape(), dq.dtype(), call.stream);
  run_backward(call, {.o = by_group(o, k.shape(2), call.stream),
                      .d_o = by_group(d_o, k.shape(2), call.stream),
                      .lse = lse.data<float>(),
                      .dq = as_rows(of_dq),
                      .dk = by_head(dk),
                      .dv = by_head(dv)});
  if (!rows) cast(of_dq, dq, {.stream = call.stream});
}

}  // namespace

void nsa_selected_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& block_indices, const Tensor& o,
                           const Tensor& lse, const Tensor& d_o, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                           const NsaOptions& options) {
  differentiate("nsa_selected_backward", q, k, v, &block_indices, o, lse, d_o, dq, dk, dv, options);
}

void nsa_compressed_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse, const Tensor& d_o,
                             const Tensor& dq, const Tensor& dk, const Tensor& dv, const NsaOptions& options) {
  differentiate("nsa_compressed_backward", q, k, v, nullptr, o, lse, d_o, dq, dk, dv, options);
}

}  // namespace tw
