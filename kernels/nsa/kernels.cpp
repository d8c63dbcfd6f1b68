#include "kernels/nsa/kernels.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <iterator>
#include <utility>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "kernels/nsa/binding.hpp"
#include "kernels/nsa/combine.tile.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/device.hpp"
#include "tilewave/nsa.hpp"

namespace tw::kernels::nsa {

namespace {

constexpr const char* kSource = "kernels/nsa/selected.tile.hpp";
constexpr const char* kListsSource = "kernels/nsa/lists.tile.hpp";
constexpr std::int64_t kHopperShared = 227 * 1024;
/// A list of a tile's entries on the CPU, and the longest on a GPU: kMostTokens tokens of kNsaSlots.
constexpr int kMostEntries = 2048;

constexpr int round_up(int x, std::initializer_list<int> sizes) {
  for (const int size : sizes)
    if (x <= size) return size;
  return 0;
}

/// Fills in the parameters of any of the attention kernels.
template <class Params>
void bind_call(auto& bind, Params& p, const Call& call, const Kernel& kernel, const Lists& lists) {
  bind(p.q, call.q, CopiedRows{kernel.group});
  bind(p.k, call.k);
  bind(p.v, call.v);
  bind(p.o, call.o);
  p.lse = call.lse;
  bind_sequences(p.sequences, call.layout);
  bind_lists(p.lists, lists, call, kernel.keys);
  p.group = call.group();
  p.heads = call.kv_heads() * call.group();
  p.scale_log2 = call.scale * kLog2E;
}

TileGrid grid_of(const Call& call, const Kernel& kernel) { return {.m = call.layout.tiles(kernel.tokens()), .n = call.kv_heads()}; }

template <DType dtype>
void run_on_gpu(const Call& call, const Kernel& kernel, const Lists& lists) {
  static KernelTable<Kernel> table(type_of, kSource);
  using Params = typename HostKernel<Kernel{.dtype = dtype}>::template On<sm_90a::Target<>>::Params;
  detail::launch_named<Params>(table[kernel], call.stream, grid_of(call, kernel),
                               [&](auto& bind, auto& p) { bind_call(bind, p, call, kernel, lists); });
}

/// The kernels of the CPU: head dimensions are padded, and groups of more than 16 heads have 64 rows.
constexpr Kernel cpu_kernel(DType dtype, int group, int keys) {
  return {.dtype = dtype, .group = group <= 16 ? 16 : 64, .keys = keys, .stages = 2};
}

template <DType dtype>
void run_on_cpu(const Call& call, const Kernel& kernel, const Lists& lists) {
  const auto launch_with = [&]<int group, int keys>() {
    constexpr Kernel k = cpu_kernel(dtype, group, keys);
    if (k == kernel) launch_cpu<HostKernel<k>>(grid_of(call, k), [&](auto& bind, auto& p) { bind_call(bind, p, call, k, lists); });
  };
  launch_with.template operator()<16, 32>();
  launch_with.template operator()<16, 64>();
  launch_with.template operator()<64, 32>();
  launch_with.template operator()<64, 64>();
}

template <DType dtype>
void run_as(const Call& call) {
  const bool on_gpu = call.stream.device().is_cuda();
  const Kernel kernel = choose_kernel(call, on_gpu ? generic_shared_bytes(call.stream) : 0);
  const Lists lists = make_lists(call, kernel.tokens());
  if constexpr (dtype != DType::f32) {
    if (on_gpu) return run_on_gpu<dtype>(call, kernel, lists);
  }
  run_on_cpu<dtype>(call, kernel, lists);
}

/// Steps whose keys fit beside a tile's queries.
int stages_of(const Kernel& k, std::int64_t shared, int most) {
  constexpr int kSize = 2;  // of an element
  return generic_stages(shared, k.keys * (k.head_dim + k.value_dim) * kSize, k.rows * k.head_dim * kSize + 1024, most);
}
/// The kernel for blocks with so much shared memory, on the generic target.
Kernel fit_generic(Kernel kernel, std::int64_t shared) {
  if (stages_of(kernel, shared, 2) < 2) kernel.rows = 64;
  kernel.stages = stages_of(kernel, shared, 3);
  return kernel;
}

/// Fills in the parameters of the kernel that makes lists.
void fill_params(auto& p, const Call& call, const Lists& lists, int tokens_of_tile) {
  const Selection& selection = call.selection;
  bind_sequences(p.sequences, call.layout);
  p.indices = selection.indices;
  p.token_stride = selection.token_stride;
  p.head_stride = selection.head_stride;
  p.slot_stride = selection.slot_stride;
  p.counts = selection.counts;
  p.slots = selection.slots;
  p.heads = call.kv_heads();
  p.block_size = selection.block_size;
  p.tokens = tokens_of_tile;
  p.entries = lists.entries.data<std::int32_t>();
  p.sizes = lists.sizes.data<std::int32_t>();
  p.capacity = lists.capacity;
}

std::string lists_type(const int& capacity) { return tw::format("tw::kernels::nsa::MakeLists<{}>", capacity); }

}  // namespace

int Layout::tiles(int tokens_of_tile) const { return Sequences<cpu::Target>::tiles(count, queries, cu_q != nullptr, tokens_of_tile); }

Kernel choose_kernel(const Call& call, std::int64_t generic_shared) {
  const DType dtype = call.q.dtype();
  const int keys = call.selection.listed ? std::min(64, call.selection.block_size) : 64;
  if (!call.stream.device().is_cuda()) return cpu_kernel(dtype, call.group(), keys);
  Kernel kernel{.dtype = dtype, .group = round_up(call.group(), {16, 32, 64}), .keys = keys};
  kernel.head_dim = round_up(static_cast<int>(call.q.shape(3)), {64, 128});
  kernel.value_dim = round_up(static_cast<int>(call.v.shape(3)), {64, 128});
  // One warpgroup where a sequence has no tokens for two.
  if (call.layout.cu_q == nullptr && call.layout.queries * kernel.group <= 64) kernel.rows = 64;
  if (generic_shared > 0) return fit_generic(kernel, generic_shared);
  // One warpgroup needs another block on the SM to overlap with.
  kernel.stages = kernel.rows == 64 ? stages_of(kernel, kHopperShared / 2 - 1024, 4) : stages_of(kernel, kHopperShared, 5);
  return kernel;
}

std::string type_of(const Kernel& k) {
  return tw::format("tw::kernels::nsa::Selected<{}, {}, {}, {}, {}, {}, {}>", element_name(k.dtype), k.head_dim, k.value_dim, k.group,
                    k.rows, k.keys, k.stages);
}
std::string name_of(const Kernel& k) {
  return tw::format("nsa_selected_{}_{}_{}_{}", tw::name_of(k.dtype), k.head_dim, k.group, k.tokens());
}

Lists make_lists(const Call& call, int tokens_of_tile) {
  const Selection& selection = call.selection;
  if (!selection.listed) return {};
  const int tiles = call.layout.tiles(tokens_of_tile), heads = call.kv_heads();
  Lists lists{.capacity = std::max(1, tokens_of_tile * selection.slots)};
  lists.entries = workspace({tiles, heads, lists.capacity}, DType::i32, call.stream);
  lists.sizes = workspace({tiles, heads}, DType::i32, call.stream);
  const auto bind_params = [&](auto&, auto& p) { fill_params(p, call, lists, tokens_of_tile); };
  const TileGrid grid{.m = tiles, .n = heads};
  if (call.stream.device().is_cuda()) {
    static KernelTable<int> table(lists_type, kListsSource);
    using Params = typename MakeLists<kMostEntries>::On<sm_90a::Target<>>::Params;
    const int capacity = std::max(128, static_cast<int>(std::bit_ceil(static_cast<unsigned>(lists.capacity))));
    detail::launch_named<Params>(table[capacity], call.stream, grid, bind_params);
  } else {
    launch_cpu<MakeLists<kMostEntries>>(grid, bind_params);
  }
  return lists;
}

Tensor zeros(Shape shape, DType dtype, const Stream& stream) {
  std::int64_t bytes = static_cast<std::int64_t>(size_of(dtype));
  for (const std::int64_t extent : shape) bytes *= extent;
  const std::int64_t words = (bytes + 3) / 4;
  const Tensor memory = workspace({words}, DType::i32, stream);
  launch<Zero>(stream, {.m = static_cast<int>((words + Zero::words - 1) / Zero::words)}, [&](auto&, auto& p) {
    p.to = memory.data<std::int32_t>();
    p.count = words;
  });
  return Tensor::borrow(memory.data(), std::move(shape), dtype, stream.device(), {}, std::make_shared<Tensor>(memory));
}

void run(const Call& call) {
  switch (call.q.dtype()) {
    case DType::f16:
      return run_as<DType::f16>(call);
    case DType::f32:
      return run_as<DType::f32>(call);
    default:
      return run_as<DType::bf16>(call);
  }
}

namespace {

/// What ships compiled: the model's 16 heads and blocks of 64 keys, in prefilling and decoding.
constexpr Kernel kRegistered[] = {{}, {.rows = 64, .stages = 3}};
constexpr int kListCapacity = 128;  // 8 tokens of 16 blocks

/// A sequence whose tokens all select the same blocks, the last ones.
struct Problem {
  Call call;
  Tensor indices, entries, sizes;

  Problem(const Kernel& k, const ShapeValues& shape) {
    const int tokens = shape.integer("tokens"), keys = shape.integer("keys"), slots = shape.integer("slots"),
              heads = shape.integer("kv_heads"), group = shape.integer("group");
    require(tokens > 0 && keys >= tokens && heads > 0 && slots > 0 && slots <= kNsaSlots,
            "nsa: tokens is {}, keys {}, kv_heads {} and slots {}; there must be as many keys as tokens, and up to {} slots", tokens, keys,
            heads, slots, kNsaSlots);
    require(group > 0 && group <= k.group, "nsa: group is {}; this kernel is for up to {}", group, k.group);
    call = {.q = placeholder({tokens, heads, group, k.head_dim}, k.dtype),
            .k = placeholder({1, heads, keys, k.head_dim}, k.dtype),
            .v = placeholder({1, heads, keys, k.value_dim}, k.dtype),
            .o = placeholder({std::int64_t{tokens} * heads * group, k.value_dim}, k.dtype),
            .layout = {.queries = tokens, .keys = keys, .length = keys},
            .selection = {.listed = true, .slots = slots, .block_size = k.keys},
            .scale = 1};
    const int tiles = call.layout.tiles(k.tokens());
    const Stream cpu = Stream::standard(Device::cpu());
    const Tensor lse = placeholder({tokens, heads * group}, DType::f32);
    call.lse = lse.data<float>();
    indices = Tensor::zeros({tokens, heads, slots}, DType::i32, cpu);
    entries = Tensor::zeros({tiles, heads, k.tokens() * slots}, DType::i32, cpu);
    sizes = Tensor::zeros({tiles, heads}, DType::i32, cpu);
    for (int m = 0; m < tiles; ++m) {
      const int last = (keys - tokens + std::min((m + 1) * k.tokens(), tokens) - 1) / k.keys;
      const int blocks = std::min(last + 1, slots);
      for (int head = 0; head < heads; ++head) {
        sizes.data<std::int32_t>()[m * heads + head] = blocks;
        for (int n = 0; n < blocks; ++n)
          entries.data<std::int32_t>()[(std::int64_t{m} * heads + head) * k.tokens() * slots + n] =
              (last - n) << kMostTokens | ((1 << k.tokens()) - 1);
      }
    }
    call.selection.indices = indices.data<std::int32_t>();
    call.selection.token_stride = std::int64_t{heads} * slots;
    call.selection.head_stride = slots;
    call.selection.slot_stride = 1;
  }
  Lists lists() const { return {.entries = entries, .sizes = sizes, .capacity = static_cast<int>(entries.shape(2))}; }
};

template <std::size_t i>
Analysis analyze_selected(const ShapeValues& shape) {
  constexpr Kernel k = kRegistered[i];
  const Problem problem(k, shape);
  return analyze<HostKernel<k>>(grid_of(problem.call, k),
                                [&](auto& bind, auto& p) { bind_call(bind, p, problem.call, k, problem.lists()); });
}

template <std::size_t i>
KernelVariant variant() {
  constexpr Kernel k = kRegistered[i];
  return {make_spec({type_of(k), kSource, detail::tile_recorder<HostKernel<k>>()}, true, true, name_of(k)), analyze_selected<i>};
}

Analysis analyze_lists(const ShapeValues& shape) {
  const Kernel k;
  const Problem problem(k, shape);
  require(problem.call.selection.slots * k.tokens() <= kListCapacity, "nsa: slots is {}; this kernel is for up to {}",
          problem.call.selection.slots, kListCapacity / k.tokens());
  return analyze<MakeLists<kListCapacity>>({.m = problem.call.layout.tiles(k.tokens()), .n = problem.call.kv_heads()},
                                           [&](auto&, auto& p) { fill_params(p, problem.call, problem.lists(), k.tokens()); });
}

KernelSpec lists_spec() {
  return make_spec({lists_type(kListCapacity), kListsSource, detail::tile_recorder<MakeLists<kListCapacity>>()}, true, true, "nsa_lists");
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> all = []<std::size_t... i>(std::index_sequence<i...>) { return std::vector<KernelVariant>{variant<i>()...}; }
  (std::make_index_sequence<std::size(kRegistered)>());
  all.push_back({lists_spec(), analyze_lists});
  return all;
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  for (const Kernel& k : kRegistered) {
    const Kernel kernel = fit_generic(k, shared_bytes);
    specs.push_back(for_target(make_spec({type_of(kernel), kSource, nullptr}, true, true, name_of(k)), GpuTarget::cuda));
  }
  specs.push_back(for_target(lists_spec(), GpuTarget::cuda));
  return specs;
}

std::vector<KernelSpec> unregistered(std::int64_t generic_shared) {
  std::vector<KernelSpec> specs;
  const auto add = [&](std::string type, const char* source) { specs.push_back(make_spec({type, source, nullptr}, true, true, type)); };
  constexpr Kernel kOthers[] = {{.head_dim = 64, .value_dim = 64},
                                {.dtype = DType::f16, .value_dim = 64, .group = 32},
                                {.group = 64, .keys = 32},
                                {.head_dim = 64, .group = 64, .rows = 64, .keys = 32}};
  for (Kernel k : kOthers) {
    if (generic_shared > 0) k = fit_generic(k, generic_shared);
    add(type_of(k), kSource);
  }
  constexpr Kernel kDifferentiated[] = {{}, {.dtype = DType::f16, .head_dim = 64, .value_dim = 64, .group = 64, .keys = 32}};
  for (const Kernel& k : kDifferentiated)
    for (KernelSpec& spec : backward_specs(k, generic_shared)) specs.push_back(std::move(spec));
  for (const int capacity : {256, 2048}) add(lists_type(capacity), kListsSource);
  constexpr ScoresKernel kScores[] = {{}, {.dtype = DType::f16, .head_dim = 64, .group = 32}, {.group = 64}};
  for (ScoresKernel k : kScores) {
    if (generic_shared > 0) k.stages = scores_stages(k, generic_shared);
    add(type_of(k), "kernels/nsa/scores.tile.hpp");
  }
  specs.push_back(make_spec(kernel_info<Zero>, true, true));
  specs.push_back(make_spec(kernel_info<Combine<bf16, float, kCombinedHeads, kCombinedColumns>>, true, true));
  return specs;
}

}  // namespace tw::kernels::nsa
