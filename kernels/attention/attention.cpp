#include "tilewave/attention.hpp"

#include <algorithm>
#include <cmath>
#include <span>

#include "kernels/attention/call.hpp"
#include "kernels/attention/kernels.hpp"
#include "kernels/check.hpp"

namespace tw {

namespace kernels::attention {

using detail::AttentionCall;

namespace {

constexpr const char *kOp = "attention", *kVarlen = "attention_varlen";
/// Of extents and tiles: ints, even at the end of a last, incomplete tile or group of heads, and sums of three of them.
constexpr std::int64_t kLargest = std::int64_t{1} << 29;
constexpr std::int64_t kLargestHeadDim = 256;

struct Argument {
  const char* name;
  const Tensor& tensor;
};

/// [sequence, heads, row, dim] of [sequence, row, heads, dim].
Tensor by_head(const Tensor& t) { return t.transpose(1, 2); }

void check_mask(AttentionCall& call, const Tensor& mask, const Shape& scores) {
  const DType dtype = mask.dtype();
  require(dtype == DType::boolean || dtype == DType::f32 || dtype == call.q.dtype(), "{}: mask is {}; bool, f32 and q's dtype are allowed",
          kOp, mask);
  check_operand(kOp, "mask", mask, dtype, call.o.device());
  const int missing = 4 - mask.rank();
  bool fits = missing >= 0 && mask.rank() > 0;
  for (int dim = 0; dim < 4 && fits; ++dim) {
    const std::int64_t size = dim < missing ? 1 : mask.shape(dim - missing);
    fits = size == 1 || size == scores[static_cast<std::size_t>(dim)];
    call.mask_strides[dim] = size == 1 ? 0 : mask.stride(dim - missing);
  }
  require(fits, "{}: mask is {}; it must be broadcastable to [{}, {}, {}, {}], [batch, heads, seqlen_q, seqlen_k]", kOp, mask, scores[0],
          scores[1], scores[2], scores[3]);
  call.mask = mask.data();
  call.mask_type = dtype == DType::boolean ? MaskTensor::Type::boolean
                   : dtype == DType::f32   ? MaskTensor::Type::f32
                   : dtype == DType::f16   ? MaskTensor::Type::f16
                                           : MaskTensor::Type::bf16;
}

}  // namespace

AttentionCall check_common(const Names& names, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, std::int64_t batch,
                           const Shape& lse_shape, const AttentionOptions& options) {
  const char* const op = names.op;
  const Device device = o.device();
  const DType dtype = q.dtype();
  require(dtype == DType::bf16 || dtype == DType::f16 || (dtype == DType::f32 && !device.is_cuda()),
          "{}: q is {}; bf16 and f16 are supported, and f32 on the CPU", op, q);
  for (const auto& [name, tensor] : {Argument{"q", q}, Argument{names.k, k}, Argument{names.v, v}, Argument{"o", o}}) {
    check_operand(op, name, tensor, dtype, device);
    for (int dim = 0; dim < 4; ++dim)
      require(tensor.shape(dim) <= kLargest, "{}: {} is {}; extents are limited to {}", op, name, tensor, kLargest);
    require(tensor.shape(3) > 0 && tensor.shape(3) % 8 == 0 && tensor.shape(3) <= kLargestHeadDim,
            "{}: {} is {}; its last dimension must be a multiple of 8 from 8 to {}", op, name, tensor, kLargestHeadDim);
  }
  check_output(op, "o", o);
  for (const auto& [name, tensor] : {Argument{"q", q}, Argument{names.k, k}, Argument{names.v, v}, Argument{"o", o}})
    require(tensor.stride(3) == 1 || tensor.numel() == 0, "{}: {} is {}; its last dimension must be contiguous", op, name, tensor);
  require(o.shape(0) == q.shape(0) && o.shape(1) == q.shape(1) && o.shape(2) == q.shape(2),
          "{}: o is {}; q is {}: only the last dimension may differ", op, o, q);
  require(k.shape(3) == q.shape(3), "{}: {} is {}; its head_dim must be q's, {}", op, names.k, k, q.shape(3));
  require(o.shape(3) == v.shape(3), "{}: o is {}; its last dimension must be {}'s, {}", op, o, names.v, v.shape(3));
  require(v.shape(0) == k.shape(0) && v.shape(1) == k.shape(1) && v.shape(2) == k.shape(2),
          "{}: {} is {}; {} is {}: only the last dimension may differ", op, names.v, v, names.k, k);
  require(q.shape(2) == 0 || (k.shape(2) > 0 && q.shape(2) % k.shape(2) == 0),
          "{}: q has {} heads and {} {}; q's must be a multiple of {}'s", op, q.shape(2), names.k, k.shape(2), names.k);
  require(options.scale >= 0 && std::isfinite(options.scale),
          "{}: scale is {}; it must be positive and finite, or 0 for 1 / sqrt(head_dim)", op, options.scale);
  require(options.softcap >= 0 && std::isfinite(options.softcap), "{}: softcap is {}; it must be positive and finite, or 0 for none", op,
          options.softcap);
  require(options.window_left >= -1, "{}: window_left is {}; it must be 0 or more, or -1 for no bound", op, options.window_left);
  require(options.window_right >= -1, "{}: window_right is {}; it must be 0 or more, or -1 for no bound", op, options.window_right);
  const std::int64_t tiles = q.shape(0) * q.shape(2) * ((q.shape(1) + 63) / 64);  // of the smallest size on all devices
  require(tiles <= kLargest, "{}: q is {}, which is {} tiles; they are limited to {}", op, q, tiles, kLargest);
  const NamedTensor named_mask{"mask", options.mask}, named_slopes{"alibi_slopes", options.alibi_slopes}, named_sink{"sink", options.sink};
  check_disjoint(op, {"o", &o}, {{"q", &q}, {names.k, &k}, {names.v, &v}, {"lse", options.lse}, named_mask, named_slopes, named_sink});
  check_disjoint(op, {"lse", options.lse}, {{"q", &q}, {names.k, &k}, {names.v, &v}, named_mask, named_slopes, named_sink});

  AttentionCall call{.q = by_head(q), .k = by_head(k), .v = by_head(v), .o = by_head(o), .partial = {}};
  call.batch = static_cast<int>(batch);
  call.keys = static_cast<int>(k.shape(1));
  call.stream = options.stream ? *options.stream : Stream::standard(device);
  require(call.stream.device() == device, "{}: the stream is on {}, the tensors on {}", op, call.stream.device().name(), device.name());
  call.scale = options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<float>(q.shape(3)));
  call.softcap = options.softcap;
  if (options.lse) {
    const Tensor& lse = *options.lse;
    check_operand(op, "lse", lse, DType::f32, device);
    require(lse.shape() == lse_shape && lse.is_contiguous(), "{}: lse is {}; it must be contiguous, f32[{}]", op, lse,
            tw::join(lse_shape, ", "));
    call.lse = lse.data<float>();
    call.lse_stride_batch = q.shape(1) * q.shape(2);
    call.lse_stride_head = q.shape(1);
  }
  if (options.alibi_slopes) {
    const Tensor& slopes = *options.alibi_slopes;
    check_operand(op, "alibi_slopes", slopes, DType::f32, device);
    require(slopes.shape() == Shape{q.shape(2)} || slopes.shape() == Shape{batch, q.shape(2)},
            "{}: alibi_slopes is {}; it must be f32[{}] or f32[{}, {}]", op, slopes, q.shape(2), batch, q.shape(2));
    call.slopes = slopes.data<float>();
    call.slopes_stride_batch = slopes.rank() == 2 ? slopes.stride(0) : 0;
    call.slopes_stride_head = slopes.stride(slopes.rank() - 1);
  }
  if (options.sink) {
    check_operand(op, "sink", *options.sink, DType::f32, device);
    require(options.sink->shape() == Shape{q.shape(2)} && options.sink->is_contiguous(), "{}: sink is {}; it must be contiguous, f32[{}]",
            op, *options.sink, q.shape(2));
    call.sink = options.sink->data<float>();
  }
  call.lower = options.window_left >= 0;
  call.upper = options.causal || options.window_right >= 0;
  call.left = std::min(options.window_left, (1 << 30) - 1);
  call.right = options.causal ? 0 : std::min(options.window_right, (1 << 30) - 1);
  if (options.causal_offset) {
    require(std::abs(std::int64_t{*options.causal_offset}) <= kLargest, "{}: causal_offset is {}; it must lie within +-2^29", op,
            *options.causal_offset);
    call.diagonal = *options.causal_offset;
  }
  return call;
}

const std::int32_t* check_integers(const char* op, const char* name, const Tensor* t, std::int64_t size, Device device) {
  if (!t) return nullptr;
  check_operand(op, name, *t, DType::i32, device);
  require(t->shape() == Shape{size} && t->is_contiguous(), "{}: {} is {}; it must be contiguous, i32[{}]", op, name, *t, size);
  return t->data<std::int32_t>();
}

void check_offsets(const char* op, const char* name, const Tensor& cu_seqlens, std::int64_t total, const char* what) {
  const Tensor offsets = cu_seqlens.to(Device::cpu());
  const std::span cu(offsets.data<std::int32_t>(), static_cast<std::size_t>(offsets.numel()));
  require(cu[0] >= 0, "{}: {}[0] is {}; it must be 0 or more", op, name, cu[0]);
  for (std::size_t b = 0; b + 1 < cu.size(); ++b)
    require(cu[b] <= cu[b + 1], "{}: {}[{}] is {} and {}[{}] is {}; they must not decrease", op, name, b, cu[b], name, b + 1, cu[b + 1]);
  require(cu.back() <= total, "{}: {}[{}] is {}; there are {} {}", op, name, cu.size() - 1, cu.back(), total, what);
}

namespace {

void check_sequences(const char* name, const Tensor& cu_seqlens, const char* used_name, const Tensor* seqused, std::int64_t total,
                     const char* what) {
  check_offsets(kVarlen, name, cu_seqlens, total, what);
  if (seqused == nullptr) return;
  const Tensor offsets = cu_seqlens.to(Device::cpu());
  const std::span cu(offsets.data<std::int32_t>(), static_cast<std::size_t>(offsets.numel()));
  const Tensor lengths = seqused->to(Device::cpu());
  for (std::size_t b = 0; b + 1 < cu.size(); ++b) {
    const std::int32_t used = lengths.data<std::int32_t>()[b];
    require(used >= 0 && used <= cu[b + 1] - cu[b], "{}: {}[{}] is {}; the sequence has {} {}", kVarlen, used_name, b, used,
            cu[b + 1] - cu[b], what);
  }
}

AttentionCall check_attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const PackedSequences& sequences,
                                     const AttentionOptions& options) {
  for (const auto& [name, tensor] : {Argument{"q", q}, Argument{"k", k}, Argument{"v", v}, Argument{"o", o}})
    require(tensor.rank() == 3, "{}: {} is {}; it must be [total, heads, head_dim]", kVarlen, name, tensor);
  require(options.mask == nullptr, "{}: mask is given; it is not supported with packed sequences", kVarlen);
  const Tensor& cu_q = sequences.cu_seqlens_q;
  require(cu_q.rank() == 1 && cu_q.shape(0) >= 1, "{}: cu_seqlens_q is {}; it must be i32[batch + 1]", kVarlen, cu_q);
  const std::int64_t batch = cu_q.shape(0) - 1;
  AttentionCall call =
      check_common({kVarlen}, as_batch(q), as_batch(k), as_batch(v), as_batch(o), batch, {q.shape(1), q.shape(0)}, options);
  const auto integers = [&](const char* name, const Tensor& t, std::int64_t size) {
    check_disjoint(kVarlen, {"o", &o}, {{name, &t}});
    check_disjoint(kVarlen, {"lse", options.lse}, {{name, &t}});
    return check_integers(kVarlen, name, &t, size, o.device());
  };
  call.cu_q = integers("cu_seqlens_q", cu_q, batch + 1);
  call.cu_k = integers("cu_seqlens_k", sequences.cu_seqlens_k, batch + 1);
  if (sequences.seqused_q) call.used_q = integers("seqused_q", *sequences.seqused_q, batch);
  if (sequences.seqused_k) call.used_k = integers("seqused_k", *sequences.seqused_k, batch);
  if (options.check_contents || !o.device().is_cuda()) {
    call.stream.synchronize();
    check_sequences("cu_seqlens_q", cu_q, "seqused_q", sequences.seqused_q, q.shape(0), "queries");
    check_sequences("cu_seqlens_k", sequences.cu_seqlens_k, "seqused_k", sequences.seqused_k, k.shape(0), "keys");
  }
  return call;
}

}  // namespace

void run(const AttentionCall& call) { call.stream.device().is_cuda() ? run_on_gpu(call) : run_on_cpu(call); }

}  // namespace kernels::attention

using namespace kernels::attention;

detail::AttentionCall detail::check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                              const AttentionOptions& options) {
  for (const auto& [name, tensor] : {Argument{"q", q}, Argument{"k", k}, Argument{"v", v}, Argument{"o", o}})
    require(tensor.rank() == 4, "{}: {} is {}; it must be [batch, seqlen, heads, head_dim]", kOp, name, tensor);
  require(k.shape(0) == q.shape(0), "{}: k is {}; its batch must be q's, {}", kOp, k, q.shape(0));
  AttentionCall call = check_common({kOp}, q, k, v, o, q.shape(0), {q.shape(0), q.shape(2), q.shape(1)}, options);
  if (options.mask) check_mask(call, *options.mask, {q.shape(0), q.shape(2), q.shape(1), k.shape(1)});
  return call;
}

void detail::check_attention_with(const AttentionCall& call, DType dtype, int head_dim) {
  require(call.q.dtype() == dtype, "attention_with: q is {}; the kernel was made for {}", call.q.transpose(1, 2), name_of(dtype));
  require(call.q.shape(3) <= head_dim && call.v.shape(3) <= head_dim,
          "attention_with: q has head_dim {} and v {}; the kernel was made for {} and less", call.q.shape(3), call.v.shape(3), head_dim);
}

void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options) {
  const detail::AttentionCall call = detail::check_attention(q, k, v, o, options);
  if (o.numel() > 0) run(call);
}

void attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const PackedSequences& sequences,
                      const AttentionOptions& options) {
  detail::AttentionCall call = check_attention_varlen(q, k, v, o, sequences, options);
  if (o.numel() == 0 || call.batch == 0) return;
  const Tensor tiles = list_packed_tiles(call);
  run(call);
}

}  // namespace tw
