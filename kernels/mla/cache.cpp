#include <cmath>
#include <type_traits>

#include "kernels/check.hpp"
#include "kernels/mla/append.tile.hpp"
#include "kernels/mla/kernels.hpp"
#include "kernels/rows.hpp"
#include "tilewave/analyze.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace kernels::mla {

void check_columns(const char* op, const char* name, const Tensor& t) {
  require(t.stride(-1) == 1, "{}: {} is {} with stride {} in its last dimension; it must be contiguous", op, name, t, t.stride(-1));
  check_extents(op, name, t);
}

bool is_fp8_cache(const Tensor& kv) { return kv.dtype() == DType::u8 || kv.dtype() == DType::fp8_e4m3; }

Fp8Parts Fp8Parts::of(const Tensor& kv, DType dtype) {
  const auto part = [&](std::int64_t offset, std::int64_t columns, DType type) {
    const auto size = static_cast<std::int64_t>(size_of(type));
    return Tensor::borrow(static_cast<char*>(kv.data()) + offset, {kv.shape(0), kv.shape(1), columns}, type, kv.device(),
                          {kv.stride(0) / size, kv.stride(1) / size, 1});
  };
  constexpr std::int64_t kScales = kMlaLatentDim, kRotary = kScales + 16;
  return {part(0, kMlaLatentDim, DType::fp8_e4m3), part(kScales, 4, DType::f32), part(kRotary, kMlaRotaryDim, dtype)};
}
Fp8Parts Fp8Parts::of_memory(const Tensor& memory) {
  const auto part = [&](std::int64_t columns, DType type) { return Tensor::borrow(memory.data(), {1, 1, columns}, type, memory.device()); };
  return {part(kMlaLatentDim, DType::fp8_e4m3), part(4, DType::f32), part(kMlaRotaryDim, memory.dtype())};
}

void check_rows(const char* op, const char* name, const Tensor& kv, const Common& common, const char* dims) {
  const bool fp8 = is_fp8_cache(kv);
  check_operand(op, name, kv, fp8 ? kv.dtype() : common.dtype, common.device);
  require(kv.rank() == 3 && kv.shape(2) == (fp8 ? kMlaFp8Bytes : kMlaKeyDim), "{}: {} is {}; it must be [{}, {}]", op, name, kv, dims,
          fp8 ? kMlaFp8Bytes : kMlaKeyDim);
  check_columns(op, name, kv);
  if (fp8) {
    require(common.dtype == DType::bf16, "{}: {} is {}, whose rotary columns are bf16; the other tensors are {}", op, name, kv,
            name_of(common.dtype));
    require(reinterpret_cast<std::uintptr_t>(kv.data()) % 16 == 0 && kv.stride(0) % 16 == 0 && kv.stride(1) % 16 == 0,
            "{}: {} is {} with strides [{}]; memory and strides must be multiples of 16 bytes", op, name, kv, tw::join(kv.strides(), ", "));
  }
}

float check_scale(const char* op, float scale) {
  require(std::isfinite(scale) && scale >= 0, "{}: scale is {}; it must be positive, or 0 for 1 / sqrt(576)", op, scale);
  return scale > 0 ? scale : 1 / std::sqrt(static_cast<float>(kMlaKeyDim));
}

void check_num_splits(const char* op, int num_splits) {
  require(num_splits >= 0 && num_splits <= kMostSplits, "{}: num_splits is {}; it must be 1 to {}, or 0 for a number that suits the device",
          op, num_splits, kMostSplits);
}

CacheOf check_cache(const char* op, const Tensor& kv, const Common& common, const Tensor* seqlens, const Tensor* block_table) {
  check_rows(op, "kv_cache", kv, common, block_table ? "pages, page_size" : "batch, capacity");
  CacheOf cache{.batch = common.batch};
  std::int64_t capacity = kv.shape(1);
  if (block_table) {
    const Tensor& table = *block_table;
    check_operand(op, "block_table", table, DType::i32, common.device);
    require(table.rank() == 2 && table.shape(0) == common.batch && (table.stride(1) == 1 || table.shape(1) <= 1),
            "{}: block_table is {}; it must be i32[{}, pages], a sequence's pages side by side", op, table, common.batch);
    require(kv.shape(1) > 0, "{}: kv_cache is {}; its page_size must be 1 or more", op, kv);
    require(table.numel() == 0 || kv.shape(0) > 0, "{}: kv_cache is {}; for block_table {} it must have a page", op, kv, table);
    require(table.shape(1) <= kMostTokens / kv.shape(1), "{}: block_table is {}; with pages of {} a sequence is limited to {} tokens", op,
            table, kv.shape(1), kMostTokens);
    require(kv.shape(0) <= kLargestExtent / kv.shape(1), "{}: kv_cache is {}; it is limited to {} tokens", op, kv, kLargestExtent);
    capacity = table.shape(1) * kv.shape(1);
    cache.pages = table.data<std::int32_t>();
    cache.pages_stride = table.stride(0);
  } else {
    require(kv.shape(0) == common.batch, "{}: kv_cache is {}; without block_table it must be [{}, capacity, {}], one for each sequence", op,
            kv, common.batch, kv.shape(2));
    require(capacity <= kMostTokens, "{}: kv_cache is {}; a sequence is limited to {} tokens", op, kv, kMostTokens);
  }
  cache.capacity = static_cast<int>(capacity);
  if (!seqlens) return cache;
  check_operand(op, "seqlens", *seqlens, DType::i32, common.device);
  require(seqlens->shape() == Shape{common.batch} && seqlens->is_contiguous(), "{}: seqlens is {}; it must be i32[{}], contiguous", op,
          *seqlens, common.batch);
  cache.seqlens = seqlens->data<std::int32_t>();
  return cache;
}

void check_cache_contents(const char* op, const Tensor& kv, const CacheOf& cache, const Tensor* seqlens, const Tensor* block_table,
                          std::int64_t added) {
  const Tensor lengths = seqlens ? seqlens->to(Device::cpu()) : Tensor(), table = block_table ? block_table->to(Device::cpu()) : Tensor();
  for (std::int64_t b = 0; b < cache.batch; ++b) {
    const std::int64_t otherwise = added > 0 ? 0 : cache.capacity;
    const std::int64_t seqlen = seqlens ? std::int64_t{lengths.data<std::int32_t>()[b]} : otherwise, page_size = kv.shape(1);
    require(seqlen >= 0 && seqlen + added <= cache.capacity, "{}: seqlens[{}] is {}; {}it must be 0 to {}, what {} holds", op, b, seqlen,
            added > 0 ? tw::format("with {} new tokens ", added) : "", cache.capacity - added,
            block_table ? "the sequence's row of block_table" : "kv_cache");
    if (!block_table) continue;
    const std::int64_t first = added > 0 ? seqlen / page_size : 0;
    for (std::int64_t n = first; n * page_size < seqlen + added; ++n) {
      const int page = table.data<std::int32_t>()[b * table.stride(0) + n];
      require(page >= 0 && page < kv.shape(0), "{}: block_table[{}, {}] is {}; it must be 0 to {}, a page of kv_cache", op, b, n, page,
              kv.shape(0) - 1);
    }
  }
}

namespace {

struct AppendCall {
  const Tensor &latent, &rotary, &kv;
  const MlaAppendOptions& options;
  CacheOf cache;
  Stream stream;
};

TileGrid grid_of(const AppendCall& call) {
  return {.m = static_cast<int>(call.latent.shape(1)), .n = static_cast<int>(call.latent.shape(0))};
}

template <class Params>
void bind_append(auto& bind, Params& p, const AppendCall& call) {
  constexpr std::int64_t kHalf = kMlaRotaryDim / 2;
  using Table = typename decltype(p.cos)::Element;
  const bool interleaved = call.options.rotary_pairing == RopePairing::interleaved;
  const std::int64_t step = interleaved ? 2 : 1, second = interleaved ? 1 : kHalf;
  const Tensor none = Tensor::borrow(call.latent.data(), {0, kHalf}, dtype_of<std::remove_const_t<Table>>, call.kv.device());
  // Groups of columns, which have a scale each if the cache is of 8 bits.
  const auto in_groups = [](const Tensor& t) {
    constexpr std::int64_t kGroup = 128;
    return Tensor::borrow(t.data(), {t.shape(0), t.shape(1), kMlaLatentDim / kGroup, kGroup}, t.dtype(), t.device(),
                          {t.stride(0), t.stride(1), kGroup, 1});
  };
  const bool fp8 = is_fp8_cache(call.kv);
  Fp8Parts parts;
  if (fp8) parts = Fp8Parts::of(call.kv, call.latent.dtype());
  const Tensor latent_out = fp8 ? parts.codes : columns_of(call.kv, 0, kMlaLatentDim);
  const Tensor rotary_out = fp8 ? parts.rotary : columns_of(call.kv, kMlaLatentDim, kMlaRotaryDim);
  p.scales = fp8 ? parts.scales.data<float>() : nullptr;
  p.scales_stride_page = fp8 ? parts.scales.stride(0) : 0;
  p.scales_stride_token = fp8 ? parts.scales.stride(1) : 0;
  bind(p.latent, in_groups(call.latent));
  bind(p.first_in, columns_of(call.rotary, 0, kHalf, step));
  bind(p.second_in, columns_of(call.rotary, second, kHalf, step));
  bind(p.latent_out, in_groups(latent_out));
  bind(p.first_out, columns_of(rotary_out, 0, kHalf, step));
  bind(p.second_out, columns_of(rotary_out, second, kHalf, step));
  bind(p.cos, call.options.rotary_cos ? *call.options.rotary_cos : none);
  bind(p.sin, call.options.rotary_sin ? *call.options.rotary_sin : none);
  p.seqlens = call.cache.seqlens;
  p.pages = call.cache.pages;
  p.pages_stride = call.cache.pages_stride;
  p.capacity = call.cache.capacity;
}

template <class T, class Table>
void run_append(const AppendCall& call) {
  launch<Append<T, Table, T>>(call.stream, grid_of(call), [&](auto& bind, auto& p) { bind_append(bind, p, call); });
}
template <class Table>
void run_append_fp8(const AppendCall& call) {
  launch<Append<bf16, Table, fp8_e4m3>>(call.stream, grid_of(call), [&](auto& bind, auto& p) { bind_append(bind, p, call); });
}

using RegisteredAppend = Append<bf16, float, bf16>;
Analysis analyze_append(const ShapeValues& shape) {
  const std::int64_t batch = shape["batch"], tokens = shape["seqlen_q"], keys = shape["keys"];
  require(batch > 0 && tokens > 0 && keys > 0, "mla: batch is {}, seqlen_q {} and keys {}; they must be positive", batch, tokens, keys);
  const Tensor latent = placeholder({batch, tokens, kMlaLatentDim}, DType::bf16),
               rotary = placeholder({batch, tokens, kMlaRotaryDim}, DType::bf16), kv = placeholder({batch, keys, kMlaKeyDim}, DType::bf16),
               table = placeholder({keys, kMlaRotaryDim / 2}, DType::f32);
  const MlaAppendOptions options{.rotary_cos = &table, .rotary_sin = &table};
  const AppendCall call{latent, rotary, kv, options, {.batch = batch, .capacity = static_cast<int>(keys)}, Stream::standard(Device::cpu())};
  return analyze<RegisteredAppend>(grid_of(call), [&](auto& bind, auto& p) { bind_append(bind, p, call); });
}

void check_tables(const char* op, const MlaAppendOptions& o, DType dtype, Device device) {
  require(!o.rotary_cos == !o.rotary_sin, "{}: {} is given without {}; both are needed, or none", op,
          o.rotary_cos ? "rotary_cos" : "rotary_sin", o.rotary_cos ? "rotary_sin" : "rotary_cos");
  if (!o.rotary_cos) return;
  const Tensor &cos = *o.rotary_cos, &sin = *o.rotary_sin;
  require(cos.dtype() == dtype || cos.dtype() == DType::f32, "{}: rotary_cos is {}; it must be of latent's dtype, {}, or f32", op, cos,
          name_of(dtype));
  check_operand(op, "rotary_cos", cos, cos.dtype(), device);
  check_operand(op, "rotary_sin", sin, cos.dtype(), device);
  require(cos.rank() == 2 && cos.shape(0) > 0 && cos.shape(1) == kMlaRotaryDim / 2,
          "{}: rotary_cos is {}; it must be [positions, {}], with positions", op, cos, kMlaRotaryDim / 2);
  require(sin.shape() == cos.shape(), "{}: rotary_sin is {}; it must have rotary_cos's shape, {}", op, sin, cos);
  check_extents(op, "rotary_cos", cos);
}

}  // namespace

KernelVariant append_variant() { return {make_spec(kernel_info<RegisteredAppend>, true, true, "mla_append_bf16"), analyze_append}; }

}  // namespace kernels::mla

void mla_append(const Tensor& latent, const Tensor& rotary, const Tensor& kv_cache, const MlaAppendOptions& options) {
  using namespace kernels::mla;
  constexpr const char* op = "mla_append";
  const Device device = kv_cache.device();
  const bool fp8 = is_fp8_cache(kv_cache);
  const DType dtype = fp8 ? DType::bf16 : kv_cache.dtype();
  require(dtype == DType::bf16 || dtype == DType::f16, "{}: kv_cache is {}; bf16, f16 and 656 bytes of u8 or fp8_e4m3 are supported", op,
          kv_cache);
  check_operand(op, "latent", latent, dtype, device);
  check_operand(op, "rotary", rotary, dtype, device);
  require(latent.rank() == 3 && latent.shape(2) == kMlaLatentDim, "{}: latent is {}; it must be [batch, seqlen_new, 512]", op, latent);
  const Shape expected{latent.shape(0), latent.shape(1), kMlaRotaryDim};
  require(rotary.shape() == expected, "{}: rotary is {}; it must be {}[{}]", op, rotary, name_of(dtype), tw::join(expected, ", "));
  check_columns(op, "latent", latent);
  check_columns(op, "rotary", rotary);
  const CacheOf cache = check_cache(op, kv_cache, {latent.shape(0), dtype, device}, options.seqlens, options.block_table);
  check_tables(op, options, dtype, device);
  check_output(op, "kv_cache", kv_cache);
  check_disjoint(op, {"kv_cache", &kv_cache},
                 {{"latent", &latent},
                  {"rotary", &rotary},
                  {"seqlens", options.seqlens},
                  {"block_table", options.block_table},
                  {"rotary_cos", options.rotary_cos},
                  {"rotary_sin", options.rotary_sin}});
  const Stream stream = checked_stream(op, options.stream, device);
  if (latent.shape(0) * latent.shape(1) == 0) return;
  if (!device.is_cuda() || options.check_contents) {
    stream.synchronize();
    check_cache_contents(op, kv_cache, cache, options.seqlens, options.block_table, latent.shape(1));
  }
  if (kv_cache.numel() == 0) return;
  const AppendCall call{latent, rotary, kv_cache, options, cache, stream};
  const bool f32_table = options.rotary_cos && options.rotary_cos->dtype() == DType::f32;
  if (fp8)
    f32_table ? run_append_fp8<float>(call) : run_append_fp8<bf16>(call);
  else if (dtype == DType::f16)
    f32_table ? run_append<f16, float>(call) : run_append<f16, f16>(call);
  else
    f32_table ? run_append<bf16, float>(call) : run_append<bf16, bf16>(call);
}

}  // namespace tw
