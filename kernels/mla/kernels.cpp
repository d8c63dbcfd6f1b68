#include "kernels/mla/kernels.hpp"

#include <array>
#include <iterator>
#include <numeric>
#include <utility>

#include "kernels/check.hpp"
#include "kernels/generic_tiles.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/device.hpp"

namespace tw::kernels::mla {

namespace {

constexpr const char* kSource = "kernels/mla/decode.tile.hpp";
constexpr const char* kFp8Source = "kernels/mla/decode_fp8.tile.hpp";
constexpr const char* kCaches[] = {"contiguous", "pages", "small_pages", "tokens", "selected"};
constexpr std::array kAllCaches{Cache::contiguous, Cache::pages, Cache::small_pages, Cache::tokens, Cache::selected};

const char* name_of(Cache cache) { return kCaches[static_cast<std::size_t>(cache)]; }

template <DType dtype, bool fp8>
void run_on_gpu(const Call& call, const Kernel& kernel) {
  static KernelTable<Kernel> table(type_of, fp8 ? kFp8Source : kSource);
  using Params = typename HostKernel<Kernel{.dtype = dtype, .fp8 = fp8}>::template On<sm_90a::Target<>>::Params;
  detail::launch_named<Params>(table[kernel], call.stream, grid_of(call), [&](auto& bind, auto& p) { bind_call(bind, p, call, kernel); });
}

template <DType dtype, bool fp8>
void run_on_cpu(const Call& call, const Kernel& kernel) {
  const auto launch_with = [&]<Cache cache>() {
    if (cache != kernel.cache) return;
    constexpr Kernel k{.dtype = dtype, .cache = cache, .fp8 = fp8};
    launch_cpu<HostKernel<k>>(grid_of(call), [&](auto& bind, auto& p) { bind_call(bind, p, call, k); });
  };
  [&]<std::size_t... i>(std::index_sequence<i...>) { (launch_with.template operator()<kAllCaches[i]>(), ...); }
  (std::make_index_sequence<kAllCaches.size()>());
}

template <DType dtype, bool fp8 = false>
void run_as(const Call& call) {
  const bool on_gpu = call.stream.device().is_cuda();
  const Kernel kernel = choose_kernel(call, on_gpu ? generic_shared_bytes(call.stream) : 0);
  on_gpu ? run_on_gpu<dtype, fp8>(call, kernel) : run_on_cpu<dtype, fp8>(call, kernel);
}

}  // namespace

Kernel generic_kernel(Kernel kernel, std::int64_t generic_shared) {
  // Queries, keys, weights, and what warpgroups exchange are 153 KB, with keys' scales 154.
  kernel.keys = 2 * kKey * (kRows + 64) + 2 * kRows * 64 + 768 + (kernel.fp8 ? 1024 : 0) <= generic_shared ? 64 : 16;
  return kernel;
}

Kernel choose_kernel(const Call& call, std::int64_t generic_shared) {
  Kernel kernel{.dtype = call.q.dtype(), .fp8 = call.fp8()};
  if (generic_shared > 0) kernel = generic_kernel(kernel, generic_shared);
  if (call.indices != nullptr) kernel.cache = Cache::selected;
  if (call.pages != nullptr)
    kernel.cache = call.page_size() % 64 == 0 ? Cache::pages : tokens_apart(call.kv) ? Cache::tokens : Cache::small_pages;
  return kernel;
}

std::string type_of(const Kernel& k) {
  if (k.fp8)
    return tw::format("tw::kernels::mla::DecodeFp8<{}, {}, tw::kernels::mla::Cache::{}>", element_name(k.dtype), k.keys, name_of(k.cache));
  return tw::format("tw::kernels::mla::Decode<{}, {}, tw::kernels::mla::Cache::{}>", element_name(k.dtype), k.keys, name_of(k.cache));
}
std::string name_of(const Kernel& k) {
  const std::string_view cached = k.fp8 ? "fp8" : tw::name_of(k.dtype);
  return k.cache == Cache::selected ? tw::format("mla_sparse_{}", cached) : tw::format("mla_decode_{}_{}", cached, name_of(k.cache));
}

void run(const Call& call) {
  if (call.fp8()) return run_as<DType::bf16, true>(call);
  call.q.dtype() == DType::f16 ? run_as<DType::f16>(call) : run_as<DType::bf16>(call);
}

namespace {

constexpr Kernel kRegistered[] = {{},
                                  {.cache = Cache::pages},
                                  {.cache = Cache::tokens},
                                  {.cache = Cache::pages, .fp8 = true},
                                  {.cache = Cache::selected},
                                  {.cache = Cache::selected, .fp8 = true}};

template <std::size_t i>
Analysis analyze_shape(const ShapeValues& shape) {
  constexpr Kernel k = kRegistered[i];
  constexpr bool kSelected = k.cache == Cache::selected;
  constexpr int kPageSize = kSelected || k.cache == Cache::tokens ? 1 : 64;
  const std::int64_t batch = shape["batch"], heads = shape["heads"], keys = shape["keys"], seqlen_q = shape["seqlen_q"],
                     splits = shape["splits"];
  require(batch > 0 && heads > 0 && keys > 0 && seqlen_q > 0, "mla: batch is {}, heads {}, keys {} and seqlen_q {}; they must be positive",
          batch, heads, keys, seqlen_q);
  require(splits > 0 && splits <= 128, "mla: splits is {}; it must be 1 to 128", splits);
  require(!kSelected || seqlen_q == 1, "mla: seqlen_q is {}; it must be 1 for mla_sparse, where tokens are counted by batch", seqlen_q);
  Call call{.q = placeholder({batch, seqlen_q * heads, kKey}, k.dtype),
            .kv = placeholder({batch, keys, kKey}, k.dtype),
            .o = placeholder({batch, seqlen_q * heads, kLatent}, k.dtype),
            .heads = static_cast<int>(heads),
            .seqlen_q = static_cast<int>(seqlen_q),
            .capacity = static_cast<int>(keys),
            .splits = static_cast<int>(splits),
            .scale = 1};
  const Tensor lse = placeholder({splits, batch, heads, seqlen_q}, DType::f32);
  call.lse = lse.data<float>();
  if (splits > 1) call.partial = placeholder({splits * batch, heads * seqlen_q, kLatent}, DType::f32);
  // Each sequence has pages of its own.
  const std::int64_t pages = (keys + kPageSize - 1) / kPageSize;
  Tensor table, lists;
  if constexpr (kSelected) {
    // All tokens select all keys.
    table = Tensor::empty({keys}, DType::i32, Stream::standard(Device::cpu()));
    std::iota(table.data<std::int32_t>(), table.data<std::int32_t>() + keys, 0);
    lists = Tensor::borrow(table.data(), {batch, keys}, DType::i32, table.device(), {0, 1});
    call.kv = placeholder({keys, 1, kKey}, k.dtype);
    call.indices = &lists;
    call.causal = false;
  } else if constexpr (k.cache != Cache::contiguous) {
    table = Tensor::empty({batch, pages}, DType::i32, Stream::standard(Device::cpu()));
    std::iota(table.data<std::int32_t>(), table.data<std::int32_t>() + batch * pages, 0);
    call.kv = placeholder({batch * pages, kPageSize, kKey}, k.dtype);
    call.pages = table.data<std::int32_t>();
    call.pages_stride = pages;
  }
  if constexpr (k.fp8) call.kv = placeholder({call.kv.shape(0), kPageSize, kMlaFp8Bytes}, DType::u8);
  return analyze<HostKernel<k>>(grid_of(call), [&](auto& bind, auto& p) { bind_call(bind, p, call, k); });
}

template <std::size_t i>
KernelVariant variant() {
  constexpr Kernel k = kRegistered[i];
  return {make_spec({type_of(k), k.fp8 ? kFp8Source : kSource, detail::tile_recorder<HostKernel<k>>()}, true, true, name_of(k)),
          analyze_shape<i>};
}

}  // namespace

std::vector<KernelVariant> registered() {
  return []<std::size_t... i>(std::index_sequence<i...>) { return std::vector<KernelVariant>{variant<i>()..., append_variant()}; }
  (std::make_index_sequence<std::size(kRegistered)>());
}

std::vector<KernelSpec> registered_generic(std::int64_t shared_bytes) {
  std::vector<KernelSpec> specs;
  for (const Kernel& k : kRegistered) {
    const Kernel kernel = generic_kernel(k, shared_bytes);
    specs.push_back(
        for_target(make_spec({type_of(kernel), k.fp8 ? kFp8Source : kSource, nullptr}, true, true, name_of(kernel)), GpuTarget::cuda));
  }
  specs.push_back(for_target(append_variant().spec, GpuTarget::cuda));
  return specs;
}

}  // namespace tw::kernels::mla
