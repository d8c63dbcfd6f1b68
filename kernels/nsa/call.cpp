#include "kernels/nsa/call.hpp"

#include <cmath>

#include "kernels/check.hpp"
#include "kernels/rows.hpp"
#include "kernels/workspace.hpp"
#include "tilewave/elementwise.hpp"

namespace tw::kernels::nsa {

namespace {

constexpr std::int64_t kMostDim = 128, kMostGroup = 64;

/// An i32 vector.
const std::int32_t* integers(const char* op, const char* name, const Tensor& t, std::int64_t count, Device device) {
  check_operand(op, name, t, DType::i32, device);
  require(t.shape() == Shape{count} && t.is_contiguous(), "{}: {} is {}; it must be i32[{}], contiguous", op, name, t, count);
  return t.data<std::int32_t>();
}

/// The stride of tokens, whose first two dimensions are batch and sequence.
bool equally_far(const Tensor& t) { return t.shape(0) <= 1 || t.shape(1) <= 1 || t.stride(0) == t.shape(1) * t.stride(1); }
std::int64_t token_stride(const Tensor& t) { return t.shape(1) <= 1 ? t.stride(0) : t.stride(1); }

}  // namespace

void check_columns(const char* op, const char* name, const Tensor& t) {
  require(t.stride(-1) == 1 || t.shape(-1) <= 1, "{}: {} is {} with stride {} in its last dimension; it must be contiguous", op, name, t,
          t.stride(-1));
  check_extents(op, name, t);
}

Call check_call(const char* op, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor* block_indices, const NsaOptions& options) {
  const Device device = q.device();
  require(is_float(q.dtype()), "{}: q is {}; bf16 and f16 are supported, and f32 on a CPU", op, q);
  require(q.dtype() != DType::f32 || !device.is_cuda(), "{}: q is {}; f32 is supported on a CPU only", op, q);
  check_operand(op, "q", q, q.dtype(), device);
  check_operand(op, "k", k, q.dtype(), device);
  check_operand(op, "v", v, q.dtype(), device);
  require(q.rank() == 4 && q.shape(3) >= 8 && q.shape(3) <= kMostDim && q.shape(3) % 8 == 0,
          "{}: q is {}; it must be [batch, seqlen, heads, head_dim] with a multiple of 8 up to {} as head_dim", op, q, kMostDim);
  const std::int64_t batch = q.shape(0), heads = q.shape(2);
  require(k.rank() == 4 && k.shape(0) == batch && k.shape(3) == q.shape(3), "{}: k is {}; for q {} it must be {}[{}, keys, kv_heads, {}]",
          op, k, q, name_of(q.dtype()), batch, q.shape(3));
  const std::int64_t kv_heads = k.shape(2);
  require(kv_heads >= 1 ? heads % kv_heads == 0 && heads <= kMostGroup * kv_heads : heads == 0,
          "{}: q is {} and k {}; the query heads must be 1 to {} times those of k", op, q, k, kMostGroup);
  require(v.rank() == 4 && v.shape(0) == batch && v.shape(1) == k.shape(1) && v.shape(2) == kv_heads && v.shape(3) >= 8 &&
              v.shape(3) <= kMostDim && v.shape(3) % 8 == 0,
          "{}: v is {}; for k {} it must be {}[{}, {}, {}, value_dim] with a multiple of 8 up to {} as value_dim", op, v, k,
          name_of(q.dtype()), batch, k.shape(1), kv_heads, kMostDim);
  for (const auto& [name, t] : {std::pair{"q", &q}, std::pair{"k", &k}, std::pair{"v", &v}}) check_columns(op, name, *t);
  require(batch * q.shape(1) * heads <= kLargestExtent, "{}: q is {}; batch times seqlen times heads is limited to {}", op, q,
          kLargestExtent);
  const int block_size = options.block_size;
  require(block_size == 32 || (block_size > 0 && block_size % 64 == 0 && block_size <= 4096),
          "{}: block_size is {}; it must be 32, or a multiple of 64 up to 4096", op, block_size);
  constexpr std::int64_t kMostBlocks = std::int64_t{1} << 23;  // what an entry of a tile's list holds
  require(k.shape(1) / block_size < kMostBlocks, "{}: k is {}; with blocks of {} it is limited to {} keys", op, k, block_size,
          kMostBlocks * block_size);
  require(std::isfinite(options.scale) && options.scale >= 0, "{}: scale is {}; it must be positive, or 0 for 1 / sqrt(head_dim)", op,
          options.scale);

  Call call{.scale = options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<float>(q.shape(3))),
            .stream = checked_stream(op, options.stream, device)};
  Layout& layout = call.layout;
  const bool compressed = block_indices == nullptr;
  layout.count = static_cast<int>(batch);
  layout.queries = static_cast<int>(q.shape(1));
  layout.keys = static_cast<int>(k.shape(1));
  layout.span = compressed ? block_size : 1;
  layout.length = compressed ? layout.queries : layout.keys;
  require(options.cu_seqlens || !options.cu_seqlens_k, "{}: there is a cu_seqlens_k but no cu_seqlens", op);
  require(compressed || !options.cu_seqlens_k, "{}: cu_seqlens_k is for compressed keys", op);
  require(!compressed || !options.block_counts, "{}: block_counts are for keys that tokens select", op);
  if (const Tensor* const cu = options.cu_seqlens) {
    require(batch == 1, "{}: q is {}; with cu_seqlens its batch must be 1", op, q);
    require(!options.seqlens, "{}: cu_seqlens and seqlens are given; only one of them may be", op);
    require(cu->rank() == 1 && cu->shape(0) >= 1, "{}: cu_seqlens is {}; it must be i32[sequences + 1]", op, *cu);
    require(!compressed || options.cu_seqlens_k, "{}: cu_seqlens is given but not cu_seqlens_k", op);
    require(compressed || k.shape(1) == q.shape(1), "{}: k is {}; with cu_seqlens it must have as many tokens as q {}", op, k, q);
    layout.cu_q = integers(op, "cu_seqlens", *cu, cu->shape(0), device);
    layout.cu_k = compressed ? integers(op, "cu_seqlens_k", *options.cu_seqlens_k, cu->shape(0), device) : layout.cu_q;
    layout.count = static_cast<int>(cu->shape(0)) - 1;
  }
  if (options.seqlens) layout.tokens = integers(op, "seqlens", *options.seqlens, batch, device);

  Selection& selection = call.selection;
  selection.block_size = block_size;
  if (compressed) {
    selection.block_size = 64;  // blocks of compressed keys are steps of the kernel
    return call;
  }
  const Tensor& indices = *block_indices;
  check_operand(op, "block_indices", indices, DType::i32, device);
  require(indices.rank() == 4 && indices.shape(0) == batch && indices.shape(1) == q.shape(1) && indices.shape(2) == kv_heads &&
              indices.shape(3) <= kNsaSlots,
          "{}: block_indices is {}; it must be i32[{}, {}, {}, slots], with up to {} slots", op, indices, batch, q.shape(1), kv_heads,
          kNsaSlots);
  require(equally_far(indices), "{}: block_indices is {} with strides [{}]; the tokens of all sequences must be equally far apart", op,
          indices, tw::join(indices.strides(), ", "));
  selection.listed = true;
  selection.indices = indices.data<std::int32_t>();
  selection.token_stride = token_stride(indices);
  selection.head_stride = indices.stride(2);
  selection.slot_stride = indices.stride(3);
  selection.slots = static_cast<int>(indices.shape(3));
  if (const Tensor* const counts = options.block_counts) {
    check_operand(op, "block_counts", *counts, DType::i32, device);
    const Shape shape{batch, q.shape(1), kv_heads};
    require(counts->shape() == shape && counts->is_contiguous(), "{}: block_counts is {}; it must be i32[{}], contiguous", op, *counts,
            tw::join(shape, ", "));
    selection.counts = counts->data<std::int32_t>();
  }
  return call;
}

const Tensor* per_head(const char* op, const char* name, const Tensor& t, const Tensor& q) {
  check_operand(op, name, t, DType::f32, q.device());
  const Shape shape{q.shape(0), q.shape(1), q.shape(2)};
  require(t.shape() == shape && t.is_contiguous(), "{}: {} is {}; it must be f32[{}], contiguous", op, name, t, tw::join(shape, ", "));
  return &t;
}

Tensor by_group(const Tensor& t, std::int64_t kv_heads, const Stream& stream) {
  Tensor from = t;
  if (!equally_far(t)) {
    from = workspace(t.shape(), t.dtype(), stream);
    cast(t, from, {.stream = stream});
  }
  const std::int64_t group = t.shape(2) / kv_heads;
  return Tensor::borrow(from.data(), {t.shape(0) * t.shape(1), kv_heads, group, t.shape(3)}, t.dtype(), t.device(),
                        {token_stride(from), group * from.stride(2), from.stride(2), from.stride(3)}, std::make_shared<Tensor>(from));
}

Tensor by_head(const Tensor& t) {
  return Tensor::borrow(t.data(), {t.shape(0), t.shape(2), t.shape(1), t.shape(3)}, t.dtype(), t.device(),
                        {t.stride(0), t.stride(2), t.stride(1), t.stride(3)});
}

void fit_operands(Call& call, const Tensor& q, const Tensor& k, const Tensor& v) {
  call.q = by_group(q, k.shape(2), call.stream);
  if (k.shape(1) > 0) {
    call.k = by_head(k);
    call.v = by_head(v);
  } else {  // nothing is read, but a tensor map must describe some memory
    const auto of = [&](std::int64_t dim) { return Tensor::borrow(q.data(), {1, 1, 1, dim}, q.dtype(), q.device()); };
    call.k = of(q.shape(3));
    call.v = of(v.shape(3));
  }
}

bool are_rows(const Tensor& t) {
  const std::int64_t heads = t.shape(2);
  return equally_far(t) && (t.shape(0) * t.shape(1) <= 1 || heads == 1 || token_stride(t) == heads * t.stride(2));
}

Tensor as_rows(const Tensor& t) {
  return Tensor::borrow(t.data(), {t.shape(0) * t.shape(1) * t.shape(2), t.shape(3)}, t.dtype(), t.device(),
                        {t.shape(2) == 1 ? token_stride(t) : t.stride(2), t.stride(3)});
}

}  // namespace tw::kernels::nsa
