#include "tilewave/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/attention/attention.tile.hpp"
#include "kernels/attention/variants.hpp"
#include "kernels/check.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace {

using kernels::attention::Attention;

constexpr const char* kOp = "attention";
/// Of extents and tiles: ints, even at the end of a last, incomplete tile or group of heads.
constexpr std::int64_t kLargest = std::int64_t{1} << 30;

/// A checked call. Tensors are [batch, head, row, head_dim].
struct Call {
  Tensor q, k, v, o;
  float* lse;
  float scale;
  bool causal;
  int causal_offset;
  int batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim;
  Stream stream;
};

Call check(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options) {
  const Device device = o.device();
  const DType dtype = q.dtype();
  const bool gpu = device.is_cuda();
  require(dtype == DType::bf16 || dtype == DType::f16 || (dtype == DType::f32 && !gpu),
          "{}: q is {}; bf16 and f16 are supported, and f32 on the CPU", kOp, q);
  struct Argument {
    const char* name;
    const Tensor& tensor;
  };
  for (const auto& [name, tensor] : {Argument{"q", q}, Argument{"k", k}, Argument{"v", v}, Argument{"o", o}}) {
    require(tensor.rank() == 4, "{}: {} is {}; it must be [batch, seqlen, heads, head_dim]", kOp, name, tensor);
    check_operand(kOp, name, tensor, dtype, device);
    for (int dim = 0; dim < 4; ++dim)
      require(tensor.shape(dim) <= kLargest, "{}: {} is {}; extents are limited to {}", kOp, name, tensor, kLargest);
  }
  check_output(kOp, "o", o);
  require(o.shape() == q.shape(), "{}: o is {}; it must have q's shape, {}", kOp, o, q);
  require(v.shape() == k.shape(), "{}: v is {}; it must have k's shape, {}", kOp, v, k);
  require(k.shape(0) == q.shape(0), "{}: k is {}; its batch must be q's, {}", kOp, k, q.shape(0));
  require(k.shape(3) == q.shape(3), "{}: k is {}; its head_dim must be q's, {}", kOp, k, q.shape(3));
  require(q.shape(3) == 64 || q.shape(3) == 128, "{}: q is {}; head_dim must be 64 or 128", kOp, q);
  require(q.shape(2) == 0 || (k.shape(2) > 0 && q.shape(2) % k.shape(2) == 0), "{}: q has {} heads and k {}; q's must be a multiple of k's",
          kOp, q.shape(2), k.shape(2));
  require(options.scale >= 0 && std::isfinite(options.scale),
          "{}: scale is {}; it must be positive and finite, or 0 for 1 / sqrt(head_dim)", kOp, options.scale);
  const std::int64_t tiles = q.shape(0) * q.shape(2) * ((q.shape(1) + 63) / 64);  // of the smallest size on all devices
  require(tiles <= kLargest, "{}: q is {}, which is {} tiles; they are limited to {}", kOp, q, tiles, kLargest);
  if (o.numel() > 0) {
    for (const auto& [name, tensor] : {Argument{"k", k}, Argument{"v", v}, Argument{"q", q}})
      require(o.data() != tensor.data() || tensor.numel() == 0, "{}: o is {}'s memory", kOp, name);
  }
  if (options.lse) {
    check_operand(kOp, "lse", *options.lse, DType::f32, device);
    require(options.lse->shape() == Shape{q.shape(0), q.shape(2), q.shape(1)} && options.lse->is_contiguous(),
            "{}: lse is {}; it must be contiguous, f32[{}, {}, {}]", kOp, *options.lse, q.shape(0), q.shape(2), q.shape(1));
  }
  const auto seqlen_q = q.shape(1), seqlen_k = k.shape(1);
  const auto offset = options.causal_offset ? std::int64_t{*options.causal_offset} : seqlen_k - seqlen_q;
  require(std::abs(offset) <= (1 << 30), "{}: causal_offset is {}; it must lie within +-2^30", kOp, offset);
  const Stream stream = options.stream ? *options.stream : Stream::standard(device);
  require(stream.device() == device, "{}: the stream is on {}, the tensors on {}", kOp, stream.device().name(), device.name());
  const auto by_head = [](const Tensor& t) { return t.transpose(1, 2); };
  return {by_head(q),
          by_head(k),
          by_head(v),
          by_head(o),
          options.lse ? options.lse->data<float>() : nullptr,
          options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<float>(q.shape(3))),
          options.causal,
          static_cast<int>(offset),
          static_cast<int>(q.shape(0)),
          static_cast<int>(q.shape(2)),
          static_cast<int>(k.shape(2)),
          static_cast<int>(seqlen_q),
          static_cast<int>(seqlen_k),
          static_cast<int>(q.shape(3)),
          stream};
}

/// Heads that are worked on together: as many as have keys and values of 32 MB, about half of an H200's L2 cache. All their queries come
/// before the next group's. A divisor of all heads, so that groups are full.
int heads_per_group(const Call& call) {
  const std::int64_t bytes =
      std::int64_t{2} * call.seqlen_k * call.head_dim * static_cast<std::int64_t>(size_of(call.q.dtype())) * call.kv_heads / call.heads;
  const int heads = call.heads * call.batch;
  int group = static_cast<int>(std::clamp<std::int64_t>((32 << 20) / std::max<std::int64_t>(1, bytes), 1, heads));
  while (heads % group != 0) --group;
  return group;
}

TileGrid grid_of(const Call& call, int bm) {
  const int group = heads_per_group(call);
  return {ceil_div(call.seqlen_q, bm), group, call.heads * call.batch / group};
}

void bind_call(auto& bind, auto& p, const Call& call) {
  bind(p.q, call.q);
  // Without keys nothing is read, but a tensor map must describe some memory.
  bind(p.k, call.seqlen_k > 0 ? call.k : call.q);
  bind(p.v, call.seqlen_k > 0 ? call.v : call.q);
  bind(p.o, call.o);
  p.lse = call.lse;
  p.scale_log2 = call.scale * kLog2E;
  p.heads = call.heads;
  p.heads_per_kv = call.heads / call.kv_heads;
  p.seqlen_k = call.seqlen_k;
  p.causal_offset = call.causal_offset;
}

/// Tiles on the GPU: 64 query rows a warpgroup. Three of them serve head_dim 64 best, two head_dim 128 (README.md).
template <int D>
inline constexpr int kGpuBM = D == 64 ? 192 : 128;
inline constexpr int kGpuBN = 128;

/// A 16-bit [batch, head, row, head_dim] tensor that TMA can load.
bool tma_takes(const Tensor& t) {
  if (t.stride(3) != 1 || reinterpret_cast<std::uintptr_t>(t.data()) % 16 != 0) return false;
  for (int dim = 0; dim < 3; ++dim)
    if (t.shape(dim) > 1 && (t.stride(dim) <= 0 || t.stride(dim) % 8 != 0)) return false;
  return true;
}

template <class T, int D, bool kCausal>
void run(const Call& call) {
  if (!call.stream.device().is_cuda()) {
    constexpr int bm = 64, bn = 64;
    launch_cpu<Attention<T, D, kCausal, bm, bn>>(grid_of(call, bm), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
  } else if constexpr (sizeof(T) == 2) {
    const auto launch = [&]<int kBM>() {
      launch_gpu<Attention<T, D, kCausal, kBM, kGpuBN>>(call.stream, grid_of(call, kBM),
                                                        [&](auto& bind, auto& p) { bind_call(bind, p, call); });
    };
    // Without TMA the loading warpgroup needs registers that three others would not leave it.
    tma_takes(call.q) && tma_takes(call.k) && tma_takes(call.v) ? launch.template operator()<kGpuBM<D>>()
                                                                : launch.template operator()<128>();
  }
}

template <class T>
void run_dtype(const Call& call) {
  if (call.head_dim == 64)
    call.causal ? run<T, 64, true>(call) : run<T, 64, false>(call);
  else
    call.causal ? run<T, 128, true>(call) : run<T, 128, false>(call);
}

}  // namespace

void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options) {
  const Call call = check(q, k, v, o, options);
  if (o.numel() == 0) return;
  switch (q.dtype()) {
    case DType::f16:
      return run_dtype<f16>(call);
    case DType::bf16:
      return run_dtype<bf16>(call);
    default:
      return run_dtype<float>(call);
  }
}

namespace kernels::attention {

namespace {

template <class T, int D, bool kCausal, int kBM>
Analysis analyze_variant(const ShapeValues& shape) {
  const int heads = shape.integer("heads"), seqlen_q = shape.integer("seqlen_q"), seqlen_k = shape.integer("seqlen_k");
  const int kv_heads = shape["kv_heads"] > 0 ? shape.integer("kv_heads") : heads, batch = shape.integer("batch");
  require(heads > 0 && heads % kv_heads == 0, "{}: heads is {} and kv_heads {}; heads must be a positive multiple of kv_heads", kOp, heads,
          kv_heads);
  const Tensor q = placeholder({batch, seqlen_q, heads, D}, dtype_of<T>), k = placeholder({batch, seqlen_k, kv_heads, D}, dtype_of<T>);
  const Tensor v = placeholder(k.shape(), dtype_of<T>), o = placeholder(q.shape(), dtype_of<T>);
  const Tensor lse = placeholder({batch, heads, seqlen_q}, DType::f32);
  const Call call = check(q, k, v, o, {.causal = kCausal, .lse = shape["lse"] ? &lse : nullptr});
  return analyze<Attention<T, D, kCausal, kBM, kGpuBN>>(grid_of(call, kBM), [&](auto& bind, auto& p) { bind_call(bind, p, call); });
}

template <class T, int D, bool kCausal, int kBM>
KernelVariant variant(const char* dtype, const char* suffix, bool tma) {
  return {make_spec(kernel_info<Attention<T, D, kCausal, kBM, kGpuBN>>, tma, tma, tw::format("attention_{}_d{}{}", dtype, D, suffix)),
          analyze_variant<T, D, kCausal, kBM>};
}

}  // namespace

std::vector<KernelVariant> registered() {
  std::vector<KernelVariant> variants;
  const auto add = [&]<class T>(std::type_identity<T>, const char* dtype) {
    variants.push_back(variant<T, 64, false, kGpuBM<64>>(dtype, "", true));
    variants.push_back(variant<T, 64, true, kGpuBM<64>>(dtype, "_causal", true));
    variants.push_back(variant<T, 128, false, kGpuBM<128>>(dtype, "", true));
    variants.push_back(variant<T, 128, true, kGpuBM<128>>(dtype, "_causal", true));
  };
  add(std::type_identity<bf16>{}, "bf16");
  add(std::type_identity<f16>{}, "f16");
  variants.push_back(variant<bf16, 64, true, 128>("bf16", "_causal_strided", false));
  variants.push_back(variant<bf16, 128, true, 128>("bf16", "_causal_strided", false));
  return variants;
}

}  // namespace kernels::attention
}  // namespace tw
