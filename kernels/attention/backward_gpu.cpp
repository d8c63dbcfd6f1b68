#include <algorithm>
#include <iterator>

#include "kernels/attention/backward.hpp"
#include "kernels/attention/heuristics.hpp"
#include "kernels/attention/key_blocks.hpp"
#include "kernels/attention/variants.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/named.hpp"
#include "tilewave/launch.hpp"

namespace tw::kernels::attention {

namespace {

/// dK and dV leave through one staging buffer, so both have the larger of the dimensions.
int backward_dim(std::int64_t head_dim, std::int64_t value_dim) { return compiled_dims(head_dim, value_dim).head_dim; }

/// Whether the registers hold the accumulators of dK and of dV. On the generic target they also hold the addresses of copies.
constexpr bool holds_both(int dim, bool generic) { return dim <= (generic ? 96 : 128); }

/// Largest first: what fits the shared memory of a block.
struct Tiles {
  int rows, keys, stages;
};
constexpr AttentionConfig config_of(int dim, const Tiles& tiles) {
  return {.head_dim = dim, .value_dim = dim, .rows = tiles.rows, .keys = tiles.keys, .stages = tiles.stages};
}

/// A warpgroup has 64 keys: accumulators of two products and two gradients. Blocks of queries are as large as the registers allow.
/// `bending`: the rules' derivatives take as many registers as a product.
constexpr AttentionConfig key_config(int dim, bool bending) {
  if (dim <= 96) return config_of(dim, {64, 128, 2});
  if (dim <= 128) return config_of(dim, {bending ? 32 : 64, 128, 2});
  return config_of(dim, {bending ? 32 : 64, 128, 1});
}
/// dV alone does not need V, in whose place is a second slot.
constexpr AttentionConfig for_values(AttentionConfig config) {
  config.stages = 2;
  return config;
}
constexpr AttentionConfig query_config(int dim, bool bending) {
  if (dim <= 64) return config_of(dim, {128, bending ? 64 : 128, 2});
  if (dim <= 128) return config_of(dim, {128, 64, 2});
  return config_of(dim, {128, bending && dim > 192 ? 32 : 64, 1});
}

/// Accumulators of two products and their sum take 96 registers, which leaves room for dropout.
constexpr AttentionConfig mask_config(int dim) { return config_of(dim, {128, 64, dim <= 128 ? 2 : 1}); }

/// The generic target's tiles: the first of `choices` that fits `shared` bytes. `resident` and `passing` are the rows of tiles that stay
/// and that pass by.
template <int kCount>
AttentionConfig generic_config_of(int dim, const Tiles (&choices)[kCount], std::int64_t shared, int most_rows, int Tiles::*resident,
                                  int Tiles::*passing) {
  const int line = (dim + 63) / 64 * 128;
  const auto fits = [&](const Tiles& c) {
    // Two tensors each; staging, vectors and a schedule's queue.
    return c.*resident <= most_rows && 2 * line * (c.*resident + c.stages * c.*passing) + 16 * 1024 <= shared;
  };
  return config_of(dim, *std::find_if(std::begin(choices), std::end(choices) - 1, fits));
}
AttentionConfig generic_key_config(int dim, std::int64_t shared) {
  constexpr Tiles kChoices[] = {{32, 128, 1}, {32, 64, 1}, {16, 64, 1}};
  return generic_config_of(dim, kChoices, shared, dim <= 96 ? 128 : 64, &Tiles::keys, &Tiles::rows);
}
AttentionConfig generic_query_config(int dim, std::int64_t shared) {
  constexpr Tiles kChoices[] = {{128, 64, 1}, {64, 64, 1}, {64, 32, 1}, {64, 16, 1}};
  return generic_config_of(dim, kChoices, shared, dim <= 128 ? 128 : 64, &Tiles::rows, &Tiles::keys);
}

/// AllGradients' tiles. Blocks of queries are as large as the registers allow.
/// `dropping`: with dropout ptxas serialises the products of the smaller tiles.
constexpr AttentionConfig all_config(int dim, bool dropping) {
  return dim <= 64 && !dropping ? config_of(64, {128, 128, 2}) : config_of(128, {64, 128, 2});
}

/// Tiles that see one block of a call's blocks each: at most as large as these.
AttentionConfig within_blocks(const BackwardCall& call, AttentionConfig config) {
  const KeyBlocks& blocks = call.forward.blocks;
  if (!blocks) return config;
  config.rows = std::min(config.rows, blocks.of.query_block);
  config.keys = std::min(config.keys, blocks.of.key_block);
  return config;
}

AttentionConfig of_form(const BackwardCall& call, AttentionConfig config) {
  config = within_blocks(call, config);
  if (call.packed()) config.form = kRagged;
  if (call.forward.blocks) config.form |= kListed;
  if (call.forward.drops()) config.dropout = Use::always;
  return config;
}

/// Whether AllGradients with lists has registers enough: not for 128 queries, whose entries are one number too many, nor for 64 keys, where
/// one warpgroup has all of a step's dQ.
constexpr bool adds_up_in_lists(const AttentionConfig& all, int key_block) { return all.rows == 64 && all.keys <= key_block; }

struct AllGradientsKernel {
  DType dtype;
  RuleSet rules;
  AttentionConfig config;
  Additions additions = Additions::in_any_order;
  auto operator<=>(const AllGradientsKernel&) const = default;
};
std::string type_of_all(const AllGradientsKernel& k) {
  return tw::format("tw::kernels::attention::AllGradients<{}, {}, {}, tw::kernels::attention::Additions::{}>", element_name(k.dtype),
                    text_of(k.config), text_of(k.rules), k.additions == Additions::in_turn ? "in_turn" : "in_any_order");
}
struct KeyGradientsKernel {
  DType dtype;
  RuleSet rules;
  AttentionConfig config;
  Gradients gradients;
  auto operator<=>(const KeyGradientsKernel&) const = default;
};
std::string type_of_keys(const KeyGradientsKernel& k) {
  constexpr const char* kNames[] = {"keys_and_values", "keys", "values"};
  return tw::format("tw::kernels::attention::KeyGradients<{}, {}, {}, tw::kernels::attention::Gradients::{}>", element_name(k.dtype),
                    text_of(k.config), text_of(k.rules), kNames[static_cast<int>(k.gradients)]);
}
struct QueryGradientKernel {
  DType dtype;
  RuleSet rules;
  AttentionConfig config;
  auto operator<=>(const QueryGradientKernel&) const = default;
};
std::string type_of_queries(const QueryGradientKernel& k) {
  return tw::format("tw::kernels::attention::QueryGradient<{}, {}, {}>", element_name(k.dtype), text_of(k.config), text_of(k.rules));
}

struct MaskGradientKernel {
  DType dtype, out;
  RuleSet rules;
  AttentionConfig config;
  auto operator<=>(const MaskGradientKernel&) const = default;
};
std::string type_of_mask(const MaskGradientKernel& k) {
  return tw::format("tw::kernels::attention::MaskGradient<{}, {}, {}, {}>", element_name(k.dtype), element_name(k.out), text_of(k.config),
                    text_of(k.rules));
}

/// Neither tile sizes nor rules change the layout of Params.
constexpr AttentionConfig kAnySizes{.head_dim = 64, .value_dim = 64, .rows = 64, .keys = 64, .stages = 2};
constexpr const char* kAllSource = AllGradients<bf16, kAnySizes, detail::CallRules<>, Additions::in_turn>::source;
constexpr const char* kKeysSource = KeyGradients<bf16, kAnySizes, detail::CallRules<>, Gradients::keys>::source;
constexpr const char* kQueriesSource = QueryGradient<bf16, kAnySizes, detail::CallRules<>>::source;
constexpr const char* kMaskSource = MaskGradient<bf16, float, kAnySizes, detail::CallRules<>>::source;

template <class T>
void all_gradients(const BackwardCall& call) {
  static KernelTable<AllGradientsKernel> table(type_of_all, kAllSource);
  using Kernel = AllGradients<T, kAnySizes, detail::CallRules<>, Additions::in_turn>;
  const AttentionConfig config = all_gradients_config(call);
  const Additions additions = call.deterministic ? Additions::in_turn : Additions::in_any_order;
  const detail::NamedKernel& kernel = table[{dtype_of<T>, rules_of(call.forward), config, additions}];
  const Tensor tiles =
      list_tiles(call, call.deterministic ? TilesOf::keys_in_turn : TilesOf::keys, key_gradients_grid(call, config.keys), config.keys);
  with_query_lists(call, config.rows, config.keys, tiles, [&](const BackwardCall& some) {
    detail::launch_named<typename Kernel::template On<sm_90a::Target<>>::Params>(
        kernel, call.forward.stream, key_gradients_grid(some, config.keys),
        [&](auto& bind, auto& p) { fill_all_gradients<detail::CallRules<>>(bind, p, some, tiles); });
  });
}
template <class T>
void key_gradients(const BackwardCall& call, Gradients gradients, const Tensor& tiles) {
  static KernelTable<KeyGradientsKernel> table(type_of_keys, kKeysSource);
  using Kernel = KeyGradients<T, kAnySizes, detail::CallRules<>, Gradients::keys>;
  AttentionConfig config = key_gradients_config(call);
  if (gradients == Gradients::values && generic_shared_bytes(call.forward.stream) == 0) config = for_values(config);
  const detail::NamedKernel& kernel = table[{dtype_of<T>, rules_of(call.forward), config, gradients}];
  detail::launch_named<typename Kernel::template On<sm_90a::Target<>>::Params>(
      kernel, call.forward.stream, key_gradients_grid(call, config.keys),
      [&](auto& bind, auto& p) { fill_key_gradients<detail::CallRules<>>(bind, p, call, tiles); });
}
template <class T>
void query_gradient(const BackwardCall& call) {
  static KernelTable<QueryGradientKernel> table(type_of_queries, kQueriesSource);
  using Kernel = QueryGradient<T, kAnySizes, detail::CallRules<>>;
  const AttentionConfig config = query_gradient_config(call);
  const detail::NamedKernel& kernel = table[{dtype_of<T>, rules_of(call.forward), config}];
  const Tensor tiles = list_tiles(call, TilesOf::queries, detail::attention_grid(call.forward, config.rows), config.rows);
  with_key_lists(call, config.rows, config.keys, tiles, [&](const BackwardCall& some) {
    detail::launch_named<typename Kernel::template On<sm_90a::Target<>>::Params>(
        kernel, call.forward.stream, detail::attention_grid(some.forward, config.rows),
        [&](auto& bind, auto& p) { fill_query_gradient<detail::CallRules<>>(bind, p, some, tiles); });
  });
}
template <class T, class Out>
void mask_gradient(const BackwardCall& call) {
  static KernelTable<MaskGradientKernel> table(type_of_mask, kMaskSource);
  using Kernel = MaskGradient<T, Out, kAnySizes, detail::CallRules<>>;
  const AttentionConfig config = mask_gradient_config(call);
  const detail::NamedKernel& kernel = table[{dtype_of<T>, dtype_of<Out>, rules_of(call.forward), config}];
  detail::launch_named<typename Kernel::template On<sm_90a::Target<>>::Params>(
      kernel, call.forward.stream, mask_gradient_grid(call, config),
      [&](auto& bind, auto& p) { fill_mask_gradient<detail::CallRules<>>(bind, p, call); });
}

}  // namespace

AttentionConfig all_gradients_config(const BackwardCall& call) {
  return of_form(call, all_config(backward_dim(call.dk.shape(3), call.dv.shape(3)), call.forward.drops()));
}
AttentionConfig key_gradients_config(const BackwardCall& call) {
  const std::int64_t shared = generic_shared_bytes(call.forward.stream);
  const int dim = backward_dim(call.dk.shape(3), call.dv.shape(3));
  return of_form(call, shared ? generic_key_config(dim, shared) : key_config(dim, call.forward.softcap > 0));
}
AttentionConfig query_gradient_config(const BackwardCall& call) {
  const std::int64_t shared = generic_shared_bytes(call.forward.stream);
  const int dim = backward_dim(call.dk.shape(3), call.dv.shape(3));
  return of_form(call, shared ? generic_query_config(dim, shared) : query_config(dim, call.forward.softcap > 0));
}
AttentionConfig mask_gradient_config(const BackwardCall& call) {
  const std::int64_t shared = generic_shared_bytes(call.forward.stream);
  const int dim = backward_dim(call.dk.shape(3), call.dv.shape(3));
  return of_form(call, shared ? generic_query_config(dim, shared) : mask_config(dim));
}

bool adds_up_query_gradient(const BackwardCall& call) {
  const Stream& stream = call.forward.stream;
  if (!stream.device().is_cuda() || generic_shared_bytes(stream) > 0 || call.forward.softcap > 0 ||
      std::max(call.dk.shape(3), call.dv.shape(3)) > 128)
    return false;
  const KeyBlocks& blocks = call.forward.blocks;
  if (!blocks) return true;
  // With lists the order of additions is not known.
  return !call.deterministic &&
         adds_up_in_lists(all_config(backward_dim(call.dk.shape(3), call.dv.shape(3)), call.forward.drops()), blocks.of.key_block);
}
void all_gradients_on_gpu(const BackwardCall& call) {
  call.dk.dtype() == DType::f16 ? all_gradients<f16>(call) : all_gradients<bf16>(call);
}
void key_gradients_on_gpu(const BackwardCall& call) {
  const AttentionConfig config = key_gradients_config(call);
  const Tensor tiles = list_tiles(call, TilesOf::keys, key_gradients_grid(call, config.keys), config.keys);
  with_query_lists(call, config.rows, config.keys, tiles, [&](const BackwardCall& some) {
    const auto run = [&](Gradients gradients) {
      call.dk.dtype() == DType::f16 ? key_gradients<f16>(some, gradients, tiles) : key_gradients<bf16>(some, gradients, tiles);
    };
    if (holds_both(config.head_dim, generic_shared_bytes(call.forward.stream) > 0)) return run(Gradients::keys_and_values);
    run(Gradients::values);
    run(Gradients::keys);
  });
}
void query_gradient_on_gpu(const BackwardCall& call) {
  call.dq.dtype() == DType::f16 ? query_gradient<f16>(call) : query_gradient<bf16>(call);
}
void mask_gradient_on_gpu(const BackwardCall& call) {
  const auto of = [&]<class T>(std::type_identity<T>) {
    call.d_mask->dtype() == DType::f32 ? mask_gradient<T, float>(call) : mask_gradient<T, T>(call);
  };
  call.dq.dtype() == DType::f16 ? of(std::type_identity<f16>{}) : of(std::type_identity<bf16>{});
}

std::vector<KernelSpec> registered_backward_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  const auto add = [&](const std::string& type, const char* source, const std::string& name) {
    specs.push_back(for_target(make_spec({type, source, nullptr}, true, true, name), GpuTarget::cuda));
  };
  for (const int dim : {64, 128}) {
    const AttentionConfig keys = generic_key_config(dim, shared_bytes), queries = generic_query_config(dim, shared_bytes);
    if (holds_both(dim, true)) {
      add(type_of_keys({DType::bf16, {}, keys, Gradients::keys_and_values}), kKeysSource, tw::format("attention_dk_dv_bf16_d{}", dim));
    } else {
      add(type_of_keys({DType::bf16, {}, keys, Gradients::keys}), kKeysSource, tw::format("attention_dk_bf16_d{}", dim));
      add(type_of_keys({DType::bf16, {}, keys, Gradients::values}), kKeysSource, tw::format("attention_dv_bf16_d{}", dim));
    }
    add(type_of_queries({DType::bf16, {}, queries}), kQueriesSource, tw::format("attention_dq_bf16_d{}", dim));
  }
  return specs;
}

std::vector<KernelSpec> listed_backward_specs() {
  std::vector<KernelSpec> specs;
  const auto listed = [](AttentionConfig config, int query_block, int key_block) {
    config.rows = std::min(config.rows, query_block), config.keys = std::min(config.keys, key_block);
    config.form = kListed;
    return config;
  };
  const auto add = [&](const std::string& type, const char* source, const std::string& name) {
    specs.push_back(make_spec({type, source, nullptr}, true, true, name));
  };
  for (const int query_block : {64, 128}) {
    for (const int key_block : {64, 128}) {
      for (const int dim : {64, 128, 256}) {
        const RuleSet rules{.upper = true};
        const std::string sizes = tw::format("d{} of blocks {} x {}", dim, query_block, key_block);
        const AttentionConfig keys = listed(key_config(dim, false), query_block, key_block);
        if (holds_both(dim, false)) {
          add(type_of_keys({DType::bf16, rules, keys, Gradients::keys_and_values}), kKeysSource, "dk, dv " + sizes);
          const AttentionConfig all = all_config(dim, false);
          if (adds_up_in_lists(all, key_block))
            add(type_of_all({DType::bf16, rules, listed(all, query_block, key_block)}), kAllSource, "all " + sizes);
        } else {
          add(type_of_keys({DType::bf16, rules, keys, Gradients::keys}), kKeysSource, "dk " + sizes);
          add(type_of_keys({DType::bf16, rules, for_values(keys), Gradients::values}), kKeysSource, "dv " + sizes);
        }
        const AttentionConfig queries = listed(query_config(dim, false), query_block, key_block);
        add(type_of_queries({DType::bf16, rules, queries}), kQueriesSource, "dq " + sizes);
        if (dim == 128) {
          AttentionConfig packed_keys = keys, packed_queries = queries;
          packed_keys.form |= kRagged, packed_queries.form |= kRagged;
          add(type_of_keys({DType::bf16, rules, packed_keys, Gradients::keys_and_values}), kKeysSource, "packed dk, dv " + sizes);
          add(type_of_queries({DType::bf16, rules, packed_queries}), kQueriesSource, "packed dq " + sizes);
        }
      }
    }
  }
  constexpr std::int64_t kShared = std::int64_t{99} << 10;
  const auto add_generic = [&](const std::string& type, const char* source, const std::string& name) {
    specs.push_back(for_target(make_spec({type, source, nullptr}, true, true, name), GpuTarget::cuda));
  };
  for (const int dim : {64, 128}) {
    const AttentionConfig keys = listed(generic_key_config(dim, kShared), 64, 64);
    const Gradients gradients = holds_both(dim, true) ? Gradients::keys_and_values : Gradients::keys;
    add_generic(type_of_keys({DType::bf16, {.upper = true}, keys, gradients}), kKeysSource, tw::format("generic dk d{} of blocks", dim));
    add_generic(type_of_queries({DType::bf16, {.upper = true}, listed(generic_query_config(dim, kShared), 64, 64)}), kQueriesSource,
                tw::format("generic dq d{} of blocks", dim));
  }
  return specs;
}

std::vector<KernelSpec> mask_gradient_specs() {
  std::vector<KernelSpec> specs;
  const auto add = [&](const char* what, DType dtype, DType out, RuleSet rules, const AttentionConfig& config, GpuTarget target) {
    rules.mask = true;
    const KernelSpec spec = make_spec({type_of_mask({dtype, out, rules, config}), kMaskSource, nullptr}, true, true,
                                      tw::format("dmask d{}{}", config.head_dim, what));
    specs.push_back(target == GpuTarget::cuda ? for_target(spec, target) : spec);
  };
  constexpr RuleSet kAll{.softcap = true, .alibi = true, .lower = true, .upper = true, .chunks = true};
  for (const int dim : {64, 96, 128, 192, 256}) {
    const AttentionConfig config = mask_config(dim);
    add("", DType::bf16, DType::f32, {}, config, GpuTarget::sm_90a);
    add(" with all rules", DType::f16, DType::f16, kAll, config, GpuTarget::sm_90a);
    AttentionConfig packed = config, dropping = config;
    packed.form = kRagged;
    dropping.form = kRagged, dropping.dropout = Use::always;
    add(" of packed sequences", DType::bf16, DType::bf16, {.upper = true}, packed, GpuTarget::sm_90a);
    add(" of packed sequences with dropout", DType::bf16, DType::f32, {.upper = true}, dropping, GpuTarget::sm_90a);
    if (dim == 96 || dim == 192) continue;
    for (const std::int64_t shared : {std::int64_t{99} << 10, std::int64_t{163} << 10}) {
      AttentionConfig generic = generic_query_config(dim, shared);
      add(" for any GPU", DType::bf16, DType::f32, {.upper = true}, generic, GpuTarget::cuda);
      generic.form = kRagged, generic.dropout = Use::always;
      add(" of packed sequences with dropout for any GPU", DType::f16, DType::f16, kAll, generic, GpuTarget::cuda);
    }
  }
  return specs;
}

std::vector<KernelSpec> chunks_backward_specs() {
  std::vector<KernelSpec> specs;
  const auto add = [&](const std::string& type, const char* source, const std::string& name) {
    specs.push_back(make_spec({type, source, nullptr}, true, true, name));
  };
  const RuleSet rules{.upper = true, .chunks = true};
  for (const int dim : {64, 128}) {
    add(type_of_all({DType::bf16, rules, all_config(dim, false)}), kAllSource, tw::format("all d{} in chunks", dim));
    add(type_of_all({DType::bf16, rules, all_config(dim, false), Additions::in_turn}), kAllSource,
        tw::format("all in turn d{} in chunks", dim));
  }
  add(type_of_keys({DType::bf16, rules, key_config(256, false), Gradients::keys}), kKeysSource, "dk d256 in chunks");
  add(type_of_keys({DType::bf16, rules, for_values(key_config(256, false)), Gradients::values}), kKeysSource, "dv d256 in chunks");
  for (const int dim : {64, 128, 256})
    add(type_of_queries({DType::bf16, rules, query_config(dim, false)}), kQueriesSource, tw::format("dq d{} in chunks", dim));
  return specs;
}

namespace {

/// With a causal mask.
using RegisteredRules =
    Rules<Optional<Softcap, Use::never>, Optional<Alibi, Use::never>, Optional<MaskTensor, Use::never>, Band<false, true>>;

/// A call on placeholders.
BackwardCall make_call(const ShapeValues& shape, int dim) {
  const std::int64_t batch = shape["batch"], heads = shape["heads"], seqlen_q = shape["seqlen_q"], seqlen_k = shape["seqlen_k"];
  const std::int64_t kv_heads = shape["kv_heads"] > 0 ? shape["kv_heads"] : heads;
  const auto tensor = [&](std::int64_t seqlen, std::int64_t count) { return placeholder({batch, seqlen, count, dim}, DType::bf16); };
  const Tensor q = tensor(seqlen_q, heads), k = tensor(seqlen_k, kv_heads), v = tensor(seqlen_k, kv_heads), o = tensor(seqlen_q, heads);
  const Tensor d_o = tensor(seqlen_q, heads), dq = tensor(seqlen_q, heads), dk = tensor(seqlen_k, kv_heads),
               dv = tensor(seqlen_k, kv_heads);
  BackwardCall call =
      check_backward(q, k, v, o, placeholder({batch, heads, seqlen_q}, DType::f32), d_o, dq, dk, dv, {.forward = {.causal = true}});
  call.lse_log2 = placeholder({batch, heads, padded_queries(static_cast<int>(seqlen_q))}, DType::f32);
  call.delta = placeholder(call.lse_log2.shape(), DType::f32);
  return call;
}

template <int kDim>
KernelVariant all_variant() {
  static constexpr AttentionConfig kConfig = all_config(kDim, false);
  using Instantiated = AllGradients<bf16, kConfig, RegisteredRules, Additions::in_any_order>;
  const AllGradientsKernel kernel{DType::bf16, {.upper = true}, kConfig};
  return {make_spec({type_of_all(kernel), kAllSource, detail::tile_recorder<Instantiated>()}, true, true,
                    tw::format("attention_gradients_bf16_d{}_causal", kDim)),
          [](const ShapeValues& shape) {
            BackwardCall call = make_call(shape, kDim);
            call.dq_sum = placeholder(call.dq.shape(), DType::f32);
            return analyze<Instantiated>(key_gradients_grid(call, kConfig.keys),
                                         [&](auto& bind, auto& p) { fill_all_gradients<RegisteredRules>(bind, p, call); });
          }};
}
template <int kDim, Gradients kGradients>
KernelVariant key_variant(const char* gradients) {
  static constexpr AttentionConfig kConfig = key_config(kDim, false);
  using Instantiated = KeyGradients<bf16, kConfig, RegisteredRules, kGradients>;
  const KeyGradientsKernel kernel{DType::bf16, {.upper = true}, kConfig, kGradients};
  return {make_spec({type_of_keys(kernel), kKeysSource, detail::tile_recorder<Instantiated>()}, true, true,
                    tw::format("attention_{}_bf16_d{}_causal", gradients, kDim)),
          [](const ShapeValues& shape) {
            const BackwardCall call = make_call(shape, kDim);
            return analyze<Instantiated>(key_gradients_grid(call, kConfig.keys),
                                         [&](auto& bind, auto& p) { fill_key_gradients<RegisteredRules>(bind, p, call); });
          }};
}
template <int kDim>
KernelVariant query_variant() {
  static constexpr AttentionConfig kConfig = query_config(kDim, false);
  using Instantiated = QueryGradient<bf16, kConfig, RegisteredRules>;
  const QueryGradientKernel kernel{DType::bf16, {.upper = true}, kConfig};
  return {make_spec({type_of_queries(kernel), kQueriesSource, detail::tile_recorder<Instantiated>()}, true, true,
                    tw::format("attention_dq_bf16_d{}_causal", kDim)),
          [](const ShapeValues& shape) {
            const BackwardCall call = make_call(shape, kDim);
            return analyze<Instantiated>(detail::attention_grid(call.forward, kConfig.rows),
                                         [&](auto& bind, auto& p) { fill_query_gradient<RegisteredRules>(bind, p, call); });
          }};
}

}  // namespace

std::vector<KernelVariant> registered_backward() {
  return {
      all_variant<128>(),
      key_variant<256, Gradients::keys>("dk"),
      query_variant<256>(),
  };
}

}  // namespace tw::kernels::attention
