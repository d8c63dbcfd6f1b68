#include "kernels/indexer/kernels.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <utility>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/device.hpp"

namespace tw::kernels::indexer {

namespace {

constexpr const char* kSource = "kernels/indexer/indexer.tile.hpp";
constexpr std::array kAllHeads{16, 32, 64, 128};
/// Columns of a tile's products, two of 128: what keeps a thread's accumulators and weights in its registers.
constexpr int kMostColumns = 256;
/// Keys of a tile, at least, where keys are split: 8 steps, so that reading the queries is a small part.
constexpr int kLeastPart = 8 * kKeys;
/// The CPU's: each size is eight more kernels to build, and most models have 64 heads.
constexpr std::array kCpuHeads{64, 128};
/// On the CPU a task is that many keys for a tile's queries.
constexpr int kCpuPart = 32 * kKeys;

constexpr int bytes_of(DType dtype) { return dtype == DType::fp8_e4m3 ? 1 : 2; }

/// Fills in the parameters of any of these kernels.
template <class Params>
void bind_call(auto& bind, Params& p, const Call& call, const Kernel& kernel, int part) {
  bind(p.q, call.q, CopiedRows{kernel.heads});
  if (kernel.cache == Cache::pages)
    bind(p.k, call.k, CopiedRows{kPage});
  else
    bind(p.k, call.k);
  bind(p.scales, call.scales.data() != nullptr ? &call.scales : nullptr);
  p.weights = call.weights.data<float>();
  p.weights_stride = call.weights.stride(0);
  p.weights_step = call.weights.stride(1);
  p.scores = call.scores.data<float>();
  p.scores_stride = call.scores.stride(0);
  p.starts = call.starts;
  p.ends = call.ends;
  p.pages = call.pages;
  p.pages_stride = call.pages_stride;
  p.page_count = call.paged() ? static_cast<int>(call.k.shape(0)) : 0;
  p.queries = call.queries;
  p.heads = call.heads();
  p.keys = call.keys;
  p.columns = call.columns();
  p.part = part;
  p.by_query = call.by_query;
  p.causal = call.causal;
  p.clear = call.clear;
}

template <DType dtype, Cache cache>
void run_on_gpu(const Call& call) {
  static KernelTable<Kernel> table(type_of, kSource);
  const Kernel kernel = choose_kernel(call, generic_shared_bytes(call.stream));
  const int part = columns_of_tile(call, kernel, std::max(1, device_info(call.stream.device()).units));
  using Params = typename HostKernel<Kernel{.dtype = dtype, .cache = cache}>::template On<sm_90a::Target<>>::Params;
  detail::launch_named<Params>(table[kernel], call.stream, grid_of(call, kernel, part),
                               [&](auto& bind, auto& p) { bind_call(bind, p, call, kernel, part); });
}

/// With pages a tile has one query, otherwise two products of 128 columns, as on a GPU.
constexpr Kernel cpu_kernel(DType dtype, int heads, Cache cache) {
  return {.dtype = dtype, .heads = heads, .queries = cache == Cache::pages ? 1 : kMostColumns / heads, .stages = 2, .cache = cache};
}

template <DType dtype, Cache cache>
void run_on_cpu(const Call& call) {
  const auto launch_with = [&]<int heads>(std::integral_constant<int, heads>) {
    constexpr Kernel k = cpu_kernel(dtype, heads, cache);
    const int part = call.splits > 0 ? columns_of_tile(call, k, 1) : kCpuPart;
    launch_cpu<HostKernel<k>>(grid_of(call, k, part), [&](auto& bind, auto& p) { bind_call(bind, p, call, k, part); });
  };
  call.heads() <= kCpuHeads[0] ? launch_with(std::integral_constant<int, kCpuHeads[0]>{})
                               : launch_with(std::integral_constant<int, kCpuHeads[1]>{});
}

template <DType dtype, Cache cache = Cache::contiguous>
void run_as(const Call& call) {
  call.stream.device().is_cuda() ? run_on_gpu<dtype, cache>(call) : run_on_cpu<dtype, cache>(call);
}

/// Steps whose keys fit beside a tile's queries and weights.
int stages_of(const Kernel& k, std::int64_t shared, int query_stages, int most) {
  constexpr int kVector = 1024;  // vectors take whole kilobytes
  const int row = kDim * bytes_of(k.dtype), scales = k.dtype == DType::fp8_e4m3 ? kKeys / kPage * kVector : 0;
  return generic_stages(shared, kKeys * row + scales, query_stages * k.heads * k.queries * row + 3 * kVector, most);
}

}  // namespace

Kernel choose_kernel(const Call& call, std::int64_t generic_shared) {
  constexpr std::int64_t kHopperShared = 227 * 1024;
  constexpr int kMostStages = 7;
  Kernel kernel{.dtype = call.q.dtype(), .heads = *std::ranges::lower_bound(kAllHeads, call.heads())};
  kernel.cache = call.paged() ? Cache::pages : Cache::contiguous;
  kernel.queries = kMostColumns / kernel.heads;
  // A tile has the queries of one sequence.
  while (kernel.queries / 2 >= call.queries) kernel.queries /= 2;
  const bool generic = generic_shared > 0;
  const auto fit = [&] {
    return stages_of(kernel, generic ? generic_shared : kHopperShared, !generic && bytes_of(kernel.dtype) == 1 ? 2 : 1, kMostStages);
  };
  while (fit() < 2 && kernel.queries > 1) kernel.queries /= 2;
  kernel.stages = fit();
  return kernel;
}

int columns_of_tile(const Call& call, const Kernel& kernel, int units) {
  const std::int64_t tiles = static_cast<std::int64_t>(call.batch) * ceil_div(call.queries, kernel.queries), columns = call.columns();
  constexpr std::int64_t kTilesPerUnit = 4;  // tiles are of unequal work
  const std::int64_t wanted = call.splits > 0 ? call.splits : (kTilesPerUnit * units + tiles - 1) / tiles;
  const std::int64_t least = call.splits > 0 ? kKeys : kLeastPart;
  const std::int64_t part = std::max((columns + wanted - 1) / wanted, std::min(least, columns));
  return static_cast<int>((part + kKeys - 1) / kKeys * kKeys);
}

TileGrid grid_of(const Call& call, const Kernel& kernel, int part) {
  return {.m = ceil_div(call.queries, kernel.queries), .n = ceil_div(call.columns(), part), .batch = call.batch};
}

std::string type_of(const Kernel& k) {
  return tw::format("tw::kernels::indexer::Indexer<{}, {}, {}, {}, tw::kernels::indexer::Cache::{}>", element_name(k.dtype), k.heads,
                    k.queries, k.stages, k.cache == Cache::pages ? "pages" : "contiguous");
}
std::string name_of(const Kernel& k) {
  if (k.cache == Cache::pages) return tw::format("indexer_paged_{}_{}_{}", tw::name_of(k.dtype), k.heads, k.queries);
  return tw::format("indexer_{}_{}", tw::name_of(k.dtype), k.heads);
}

void run(const Call& call) {
  if (call.paged()) return run_as<DType::fp8_e4m3, Cache::pages>(call);
  switch (call.q.dtype()) {
    case DType::f16:
      return run_as<DType::f16>(call);
    case DType::bf16:
      return run_as<DType::bf16>(call);
    default:
      return run_as<DType::fp8_e4m3>(call);
  }
}

namespace {

/// What ships compiled: DeepSeek's 64 heads and others' 32, decoding of one and two tokens.
constexpr Kernel kRegistered[] = {{},
                                  {.heads = 32, .queries = 8},
                                  {.dtype = DType::bf16, .stages = 4},
                                  {.queries = 1, .cache = Cache::pages},
                                  {.queries = 2, .cache = Cache::pages}};

/// The call that choose_kernel() sees.
Call call_of(const Kernel& k) {
  return {.q = placeholder({k.queries, k.heads, kDim}, k.dtype),
          .k = k.cache == Cache::pages ? placeholder({1, kPage, kDim}, k.dtype) : placeholder({1, kDim}, k.dtype),
          .queries = k.queries};
}

template <std::size_t i>
Analysis analyze_shape(const ShapeValues& shape) {
  constexpr Kernel k = kRegistered[i];
  constexpr bool kPaged = k.cache == Cache::pages;
  const std::int64_t queries = shape["queries"], keys = shape["keys"], heads = shape["heads"] > 0 ? shape["heads"] : k.heads,
                     batch = kPaged ? shape["batch"] : 1;
  require(queries > 0 && keys > 0 && batch > 0, "indexer: queries is {}, keys {} and batch {}; they must be positive", queries, keys,
          batch);
  require(heads > k.heads / 2 && heads <= k.heads, "indexer: heads is {}; this kernel is for {} to {}", heads, k.heads / 2 + 1, k.heads);
  const std::int64_t pages = (keys + kPage - 1) / kPage;
  Call call{.q = placeholder({batch * queries, heads, kDim}, k.dtype),
            .k = kPaged ? placeholder({batch * pages, kPage, kDim}, k.dtype) : placeholder({keys, kDim}, k.dtype),
            .weights = placeholder({batch * queries, heads}, DType::f32),
            .scores = placeholder({batch * queries, keys}, DType::f32),
            .batch = static_cast<int>(batch),
            .queries = static_cast<int>(queries),
            .keys = static_cast<int>(keys)};
  if (k.dtype == DType::fp8_e4m3)
    call.scales = kPaged ? placeholder({batch * pages, kPage}, DType::f32) : placeholder({1, keys}, DType::f32);
  Tensor table;
  if constexpr (kPaged) {  // each sequence has pages of its own
    table = Tensor::empty({batch * pages}, DType::i32, Stream::standard(Device::cpu()));
    std::iota(table.data<std::int32_t>(), table.data<std::int32_t>() + batch * pages, 0);
    call.pages = table.data<std::int32_t>();
    call.pages_stride = pages;
  }
  constexpr int kUnits = 132;
  const int part = columns_of_tile(call, k, kUnits);
  return analyze<HostKernel<k>>(grid_of(call, k, part), [&](auto& bind, auto& p) { bind_call(bind, p, call, k, part); });
}

template <std::size_t i>
KernelVariant variant() {
  constexpr Kernel k = kRegistered[i];
  return {make_spec({type_of(k), kSource, detail::tile_recorder<HostKernel<k>>()}, true, true, name_of(k)), analyze_shape<i>};
}

}  // namespace

std::vector<KernelVariant> registered() {
  return []<std::size_t... i>(std::index_sequence<i...>) { return std::vector<KernelVariant>{variant<i>()...}; }
  (std::make_index_sequence<std::size(kRegistered)>());
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  for (const Kernel& k : kRegistered) {
    const Kernel kernel = choose_kernel(call_of(k), shared_bytes);
    specs.push_back(for_target(make_spec({type_of(kernel), kSource, nullptr}, true, true, name_of(kernel)), GpuTarget::cuda));
  }
  return specs;
}

}  // namespace tw::kernels::indexer
