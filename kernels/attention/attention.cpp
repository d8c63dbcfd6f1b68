#include "tilewave/attention.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <tuple>
#include <utility>

#include "kernels/attention/call.hpp"
#include "kernels/attention/dropout_mask.tile.hpp"
#include "tilewave/launch.hpp"

namespace tw {

namespace kernels::attention {

namespace {

/// Of extents and tiles: ints, even at the end of a last, incomplete tile or group of heads, and sums of three of them.
constexpr std::int64_t kLargest = std::int64_t{1} << 29;
constexpr std::int64_t kLargestHeadDim = 256;

/// [sequence, heads, row, dim] of [sequence, row, heads, dim].
Tensor by_head(const Tensor& t) { return t.transpose(1, 2); }

}  // namespace

void check_mask(const Form& form, AttentionCall& call, const Tensor& mask) {
  const std::int64_t scores[] = {call.batch, call.q.shape(1), call.q.shape(2), call.keys};
  const bool any_extent[] = {false, false, form.cu_seqlens_q != nullptr, form.packed_keys};  // what the host does not know
  const DType dtype = mask.dtype();
  form.require(dtype == DType::boolean || dtype == DType::f32 || dtype == call.o.dtype(),
               "mask is {}; bool, f32 and {}'s dtype are allowed", mask, call.descaled ? "o" : "q");
  check_operand(form.op, "mask", mask, dtype, call.o.device());
  const int missing = 4 - mask.rank();
  bool fits = missing >= 0 && mask.rank() > 0;
  for (int dim = 0; dim < 4 && fits; ++dim) {
    const std::int64_t size = dim < missing ? 1 : mask.shape(dim - missing);
    fits = size == 1 || (any_extent[dim] ? size > 0 && size <= kLargest : size == scores[dim]);
    call.mask_strides[dim] = size == 1 ? 0 : mask.stride(dim - missing);
    if (dim == 2) call.mask_queries = static_cast<int>(size);
    if (dim == 3) call.mask_keys = static_cast<int>(size);
  }
  form.require(fits, "mask is {}; it must be broadcastable to [{}, {}, {}, {}], [batch, heads, seqlen_q, seqlen_k]", mask, scores[0],
               scores[1], any_extent[2] ? "longest seqlen_q" : std::to_string(scores[2]),
               any_extent[3] ? "longest seqlen_k" : std::to_string(scores[3]));
  call.mask = mask.data();
  call.mask_type = dtype == DType::boolean ? MaskTensor::Type::boolean
                   : dtype == DType::f32   ? MaskTensor::Type::f32
                   : dtype == DType::f16   ? MaskTensor::Type::f16
                                           : MaskTensor::Type::bf16;
}

namespace {

void check_qv(const Form& form, AttentionCall& call, const AttentionOptions& options) {
  constexpr std::int64_t kLargestWithQv = 128;
  const Tensor& qv = *options.qv;
  form.require(!form.without_qv, "qv is given; it is not supported with {}", form.without_qv ? form.without_qv : "");
  form.require(!call.descaled, "qv is given; it is not supported with q of fp8_e4m3");
  form.require(!options.blocks, "qv is given; it is not supported with blocks");
  form.require(call.q.shape(3) <= kLargestWithQv, "q is {}; with qv its head_dim is limited to {}", call.q.transpose(1, 2), kLargestWithQv);
  check_operand(form.op, "qv", qv, call.q.dtype(), call.o.device());
  const bool packed = form.cu_seqlens_q != nullptr;
  form.require(qv.rank() == (packed ? 3 : 4), "qv is {}; it must be {}", qv, form.q_dims);
  Shape expected = call.o.transpose(1, 2).shape();
  if (packed) expected.erase(expected.begin());
  form.require(qv.shape() == expected, "qv is {}; it must have o's shape, [{}]", qv, tw::join(expected, ", "));
  form.require(qv.stride(-1) == 1 || qv.numel() == 0, "qv is {}; its last dimension must be contiguous", qv);
  call.qv = by_head(packed ? as_batch(qv) : qv);
}

void check_tensors(const Form& form, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o) {
  const Device device = o.device();
  const DType dtype = q.dtype();
  const bool fp8 = form.fp8 && dtype == DType::fp8_e4m3;
  form.require(dtype == DType::bf16 || dtype == DType::f16 || (dtype == DType::f32 && (form.f32_on_gpu || !device.is_cuda())) || fp8,
               "q is {}; bf16 and f16 are supported, and f32 {}{}", q, form.f32_on_gpu ? "too" : "on the CPU",
               form.fp8 ? ", and fp8_e4m3 with o in bf16 or f16" : "");
  form.require(!fp8 || o.dtype() == DType::bf16 || o.dtype() == DType::f16, "o is {}; for q of fp8_e4m3 it must be bf16 or f16", o);
  const int multiple = fp8 ? 16 : 8;
  const NamedTensor operands[] = {{"q", &q}, {form.k, &k}, {form.v, &v}, {"o", &o}};
  for (const auto& [name, t] : operands) {
    check_operand(form.op, name, *t, fp8 && t == &o ? o.dtype() : dtype, device);
    for (const std::int64_t extent : t->shape())
      form.require(extent <= kLargest, "{} is {}; extents are limited to {}", name, *t, kLargest);
    form.require(t->shape(3) > 0 && t->shape(3) % multiple == 0 && t->shape(3) <= kLargestHeadDim,
                 "{} is {}; its last dimension must be a multiple of {} from {} to {}", name, *t, multiple, multiple, kLargestHeadDim);
  }
  check_output(form.op, "o", o);
  for (const auto& [name, t] : operands)
    form.require(t->stride(3) == 1 || t->numel() == 0, "{} is {}; its last dimension must be contiguous", name, *t);
  for (const auto& [a, b] : {std::pair{operands[3], operands[0]}, std::pair{operands[2], operands[1]}})
    form.require(std::equal(a.tensor->shape().begin(), a.tensor->shape().end() - 1, b.tensor->shape().begin()),
                 "{} is {}; {} is {}: only the last dimension may differ", a.name, *a.tensor, b.name, *b.tensor);
  form.require(k.shape(3) == q.shape(3), "{} is {}; its head_dim must be q's, {}", form.k, k, q.shape(3));
  form.require(o.shape(3) == v.shape(3), "o is {}; its last dimension must be {}'s, {}", o, form.v, v.shape(3));
  form.require(q.shape(2) == 0 || (k.shape(2) > 0 && q.shape(2) % k.shape(2) == 0),
               "q has {} heads and {} {}; q's must be a multiple of {}'s", q.shape(2), form.k, k.shape(2), form.k);
  const std::int64_t tiles = q.shape(0) * q.shape(2) * ((q.shape(1) + 63) / 64);  // of the smallest size on all devices
  form.require(tiles <= kLargest, "q is {}, which is {} tiles; they are limited to {}", q, tiles, kLargest);
}

void set_options(const Form& form, AttentionCall& call, const AttentionOptions& options) {
  const Device device = call.o.device();
  const std::int64_t heads = call.q.shape(1), seqlen_q = call.q.shape(2);
  for (const auto& [name, value, standard] :
       {std::tuple{"scale", options.scale, "1 / sqrt(head_dim)"}, {"softcap", options.softcap, "none"}})
    form.require(value >= 0 && std::isfinite(value), "{} is {}; it must be positive and finite, or 0 for {}", name, value, standard);
  for (const auto& [name, value] : {std::pair{"window_left", options.window_left}, {"window_right", options.window_right}})
    form.require(value >= -1, "{} is {}; it must be 0 or more, or -1 for no bound", name, value);
  form.require(options.sm_margin >= 0, "sm_margin is {}; it must be 0 or more", options.sm_margin);
  call.sm_margin = options.sm_margin;
  form.require(options.attention_chunk >= 0 && options.attention_chunk <= kLargest,
               "attention_chunk is {}; it must be 1 to 2^29, or 0 for none", options.attention_chunk);
  const std::int64_t key_columns = call.q.shape(3) + (options.qv ? call.v.shape(3) : 0);
  call.scale = options.scale > 0 ? options.scale : 1 / std::sqrt(static_cast<float>(key_columns));
  call.softcap = options.softcap;
  call.stream = options.stream ? *options.stream : Stream::standard(device);
  form.require(call.stream.device() == device, "the stream is on {}, the tensors on {}", call.stream.device().name(), device.name());
  if (options.sm_margin > 0 && device.is_cuda()) {
    const int sms = device_info(device).units;
    form.require(options.sm_margin < sms, "sm_margin is {}; it must be less than the {} SMs of {}", options.sm_margin, sms, device.name());
  }
  Shape lse_shape{call.q.shape(0), heads, seqlen_q};
  if (form.cu_seqlens_q) lse_shape.erase(lse_shape.begin());
  call.lse = form.elements<float>({"lse", options.lse}, lse_shape, device);
  call.lse_stride_batch = heads * seqlen_q;
  call.lse_stride_head = seqlen_q;
  call.sink = form.elements<float>({"sink", options.sink}, {heads}, device);
  if (options.alibi_slopes) {
    const Tensor& slopes = *options.alibi_slopes;
    check_operand(form.op, "alibi_slopes", slopes, DType::f32, device);
    form.require(slopes.shape() == Shape{heads} || slopes.shape() == Shape{call.batch, heads},
                 "alibi_slopes is {}; it must be f32[{}] or f32[{}, {}]", slopes, heads, call.batch, heads);
    call.slopes = slopes.data<float>();
    call.slopes_stride_batch = slopes.rank() == 2 ? slopes.stride(0) : 0;
    call.slopes_stride_head = slopes.stride(slopes.rank() - 1);
  }
  const auto descale = [&](const char* name, const Tensor* t) -> detail::DescaleOf {
    if (t == nullptr) return {};
    form.require(call.descaled, "{} is given, but q is {}; only fp8_e4m3 has descales", name, call.q.transpose(1, 2));
    check_operand(form.op, name, *t, DType::f32, device);
    const std::int64_t kv_heads = call.k.shape(1);
    form.require(t->shape() == Shape{call.batch, kv_heads}, "{} is {}; it must be f32[{}, {}], [batch, kv_heads]", name, *t, call.batch,
                 kv_heads);
    return {t->data<float>(), t->stride(0), t->stride(1)};
  };
  call.q_descale = descale("q_descale", options.q_descale);
  call.k_descale = descale("k_descale", options.k_descale);
  call.v_descale = descale("v_descale", options.v_descale);
  call.lower = options.window_left >= 0;
  call.upper = options.causal || options.window_right >= 0;
  call.left = std::min(options.window_left, (1 << 30) - 1);
  call.right = options.causal ? 0 : std::min(options.window_right, (1 << 30) - 1);
  call.chunk = options.attention_chunk;
  if (options.causal_offset) {
    call.diagonal = *options.causal_offset;
    form.require(std::abs(std::int64_t{*call.diagonal}) <= kLargest, "causal_offset is {}; it must lie within +-2^29", *call.diagonal);
  }
  if (options.qv) check_qv(form, call, options);
  if (options.mask && !form.cache) check_mask(form, call, *options.mask);
  if (options.blocks && !form.cache) check_blocks(form, call, *options.blocks);
  set_dropout(form, call, options, device);
}

}  // namespace

void set_dropout(const Form& form, AttentionCall& call, const AttentionOptions& options, Device device) {
  form.require(options.dropout >= 0 && options.dropout < 1, "dropout is {}; it must be in [0, 1)", options.dropout);
  form.require(options.dropout == 0 || !form.without_dropout, "dropout is {}; it is not supported with {}", options.dropout,
               form.without_dropout ? form.without_dropout : "");
  form.require(options.dropout == 0 || !call.descaled, "dropout is {}; it is not supported with q of fp8_e4m3", options.dropout);
  call.dropout_state = form.elements<std::int64_t>({"dropout_state", options.dropout_state}, {2}, device);
  call.dropout_seed = options.dropout_seed, call.dropout_offset = options.dropout_offset;
  if (options.dropout > 0) call.kept = std::clamp(static_cast<int>(std::lround((1 - options.dropout) * 256)), 1, 255);
}

Tensor as_batch(const Tensor& t) {
  return Tensor::borrow(t.data(), {1, t.shape(0), t.shape(1), t.shape(2)}, t.dtype(), t.device(),
                        {t.stride(0) * t.shape(0), t.stride(0), t.stride(1), t.stride(2)});
}

AttentionCall check_common(const Form& form, const Tensor& of_q, const Tensor& of_k, const Tensor& of_v, const Tensor& of_o,
                           const AttentionOptions& options, std::initializer_list<NamedTensor> inputs) {
  const Tensor* const cu_seqlens = form.cu_seqlens_q;
  Tensor packed[4];
  const auto operand = [&](int i, const char* name, const Tensor& t, const char* dims, bool is_packed) -> const Tensor& {
    form.require(t.rank() == (is_packed ? 3 : 4), "{} is {}; it must be {}", name, t, dims);
    return is_packed ? packed[i] = as_batch(t) : t;
  };
  const Tensor& q = operand(0, "q", of_q, form.q_dims, cu_seqlens != nullptr);
  const Tensor& k = operand(1, form.k, of_k, form.kv_dims, form.packed_keys);
  const Tensor& v = operand(2, form.v, of_v, form.kv_dims, form.packed_keys);
  const Tensor& o = operand(3, "o", of_o, form.q_dims, cu_seqlens != nullptr);
  if (cu_seqlens)
    form.require(cu_seqlens->rank() == 1 && cu_seqlens->shape(0) >= 1, "cu_seqlens_q is {}; it must be i32[batch + 1]", *cu_seqlens);
  check_tensors(form, q, k, v, o);
  AttentionCall call{.q = by_head(q), .k = by_head(k), .v = by_head(v), .o = by_head(o), .partial = {}};
  call.batch = static_cast<int>(cu_seqlens ? cu_seqlens->shape(0) - 1 : q.shape(0));
  call.keys = static_cast<int>(k.shape(1));
  call.descaled = q.dtype() == DType::fp8_e4m3;
  const NamedTensor mask{"mask", options.mask}, slopes{"alibi_slopes", options.alibi_slopes}, sink{"sink", options.sink},
      state{"dropout_state", options.dropout_state}, qv{"qv", options.qv};
  check_disjoint(form.op, {"o", &o}, {{"lse", options.lse}});
  for (const NamedTensor& output : {NamedTensor{"o", &o}, NamedTensor{"lse", options.lse}}) {
    check_disjoint(form.op, output, {{"q", &q}, {form.k, &k}, {form.v, &v}, mask, slopes, sink, state, qv});
    check_disjoint(form.op, output, {{"q_descale", options.q_descale}, {"k_descale", options.k_descale}, {"v_descale", options.v_descale}});
    check_disjoint(form.op, output, inputs);
    if (const AttentionBlocks* const blocks = options.blocks)
      check_disjoint(form.op, output,
                     {{"blocks.mask", blocks->mask}, {"blocks.indices", blocks->indices}, {"blocks.counts", blocks->counts}});
  }
  set_options(form, call, options);
  call.cu_q = form.elements<std::int32_t>({"cu_seqlens_q", cu_seqlens}, {call.batch + 1}, o.device());
  return call;
}

bool contents_are_checked(const AttentionCall& call, const AttentionOptions& options) {
  if (!options.check_contents && call.o.device().is_cuda()) return false;
  call.stream.synchronize();
  return true;
}

void check_offsets(const Form& form, const NamedTensor& cu_seqlens, std::int64_t total, const char* what, const NamedTensor& used,
                   std::int64_t masked) {
  const auto& [name, offsets] = cu_seqlens;
  const Tensor host = offsets->to(Device::cpu()), lengths = used.tensor ? used.tensor->to(Device::cpu()) : Tensor();
  const std::span cu(host.data<std::int32_t>(), static_cast<std::size_t>(host.numel()));
  form.require(cu[0] >= 0, "{}[0] is {}; it must be 0 or more", name, cu[0]);
  for (std::size_t b = 0; b + 1 < cu.size(); ++b)
    form.require(cu[b] <= cu[b + 1], "{}[{}] is {} and {}[{}] is {}; they must not decrease", name, b, cu[b], name, b + 1, cu[b + 1]);
  form.require(cu.back() <= total, "{}[{}] is {}; there are {} {}", name, cu.size() - 1, cu.back(), total, what);
  for (std::size_t b = 0; used.tensor && b + 1 < cu.size(); ++b) {
    const std::int32_t length = lengths.data<std::int32_t>()[b], size = cu[b + 1] - cu[b];
    form.require(length >= 0 && length <= size, "{}[{}] is {}; the sequence has {} {}", used.name, b, length, size, what);
  }
  for (std::size_t b = 0; masked > 1 && b + 1 < cu.size(); ++b) {
    const std::int32_t length = used.tensor ? lengths.data<std::int32_t>()[b] : cu[b + 1] - cu[b];
    form.require(length <= masked, "mask has {} {}; sequence {} has {}", masked, what, b, length);
  }
}

Form varlen_form(const char* op, const PackedSequences& sequences) {
  const char* const dims = "[total, heads, head_dim]";
  return {.op = op, .q_dims = dims, .kv_dims = dims, .cu_seqlens_q = &sequences.cu_seqlens_q, .packed_keys = true};
}

std::array<NamedTensor, 4> tensors_of(const PackedSequences& sequences) {
  return {{{"cu_seqlens_q", &sequences.cu_seqlens_q},
           {"cu_seqlens_k", &sequences.cu_seqlens_k},
           {"seqused_q", sequences.seqused_q},
           {"seqused_k", sequences.seqused_k}}};
}

AttentionCall check_varlen(const Form& form, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                           const PackedSequences& sequences, const AttentionOptions& options) {
  const auto [cu_q, cu_k, used_q, used_k] = tensors_of(sequences);
  AttentionCall call = check_common(form, q, k, v, o, options, {cu_q, cu_k, used_q, used_k});
  call.cu_k = form.elements<std::int32_t>(cu_k, {call.batch + 1}, o.device());
  call.used_q = form.elements<std::int32_t>(used_q, {call.batch}, o.device());
  call.used_k = form.elements<std::int32_t>(used_k, {call.batch}, o.device());
  return call;
}

void check_varlen_contents(const Form& form, const AttentionCall& call, const PackedSequences& sequences, const AttentionOptions& options) {
  if (!contents_are_checked(call, options)) return;
  const auto [cu_q, cu_k, used_q, used_k] = tensors_of(sequences);
  check_offsets(form, cu_q, call.q.shape(2), "queries", used_q, call.mask_queries);
  check_offsets(form, cu_k, call.k.shape(2), "keys", used_k, call.mask_keys);
}

void run(const AttentionCall& call) {
  if (call.q.dtype() == DType::fp8_e4m3) return run_in_fp8(call);
  if (!call.stream.device().is_cuda()) return run_on_cpu(call);
  call.q.dtype() == DType::f32 ? run_in_f32(call) : run_on_gpu(call);
}

}  // namespace kernels::attention

using namespace kernels::attention;

detail::AttentionCall detail::check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                                              const AttentionOptions& options) {
  const Form form{.op = "attention", .f32_on_gpu = true, .fp8 = true};
  const AttentionCall call = check_common(form, q, k, v, o, options);
  form.require(k.shape(0) == q.shape(0), "k is {}; its batch must be q's, {}", k, q.shape(0));
  return call;
}

void detail::check_attention_with(const AttentionCall& call, DType dtype, int head_dim) {
  require(!call.blocks, "attention_with: blocks are given; they are not supported with a user-defined rule");
  require(call.qv.numel() == 0, "attention_with: qv is given; it is not supported with a user-defined rule");
  require(dtype != DType::f32 || !call.stream.device().is_cuda(), "attention_with: q is {}; on a GPU bf16 and f16 are supported",
          call.q.transpose(1, 2));
  require(call.q.dtype() == dtype, "attention_with: q is {}; the kernel was made for {}", call.q.transpose(1, 2), name_of(dtype));
  require(call.q.shape(3) <= head_dim && call.v.shape(3) <= head_dim,
          "attention_with: q has head_dim {} and v {}; the kernel was made for {} and less", call.q.shape(3), call.v.shape(3), head_dim);
}

void attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const AttentionOptions& options) {
  const AttentionCall call = detail::check_attention(q, k, v, o, options);
  if (o.numel() == 0) return;
  const detail::ScopedSmMargin margin(call.sm_margin);
  run(call);
}

void attention_dropout_mask(const Tensor& mask, const AttentionOptions& options) {
  const Form form{.op = "attention_dropout_mask"};
  check_operand(form.op, "mask", mask, DType::boolean, mask.device());
  form.require(mask.rank() == 4 && mask.is_contiguous(), "mask is {}; it must be contiguous, bool[batch, heads, seqlen_q, seqlen_k]", mask);
  for (const std::int64_t extent : mask.shape()) form.require(extent <= kLargest, "mask is {}; extents are limited to {}", mask, kLargest);
  const std::int64_t heads = mask.shape(0) * mask.shape(1), rows = mask.shape(2);
  form.require(heads * rows <= kLargest, "mask is {}; its rows are limited to {}", mask, kLargest);
  AttentionCall call;
  set_dropout(form, call, options, mask.device());
  check_output(form.op, "mask", mask);
  if (mask.numel() == 0) return;
  using Kernel = DropoutMask<256>;
  const Stream stream = options.stream ? *options.stream : Stream::standard(mask.device());
  form.require(stream.device() == mask.device(), "the stream is on {}, the mask on {}", stream.device().name(), mask.device().name());
  launch<Kernel>(stream, {static_cast<int>(rows), ceil_div(static_cast<int>(mask.shape(3)), 256), static_cast<int>(heads)},
                 [&](auto&, auto& p) {
                   fill_dropout(p.dropout, call);
                   p.mask = static_cast<u8*>(mask.data());
                   p.queries = static_cast<int>(rows), p.keys = static_cast<int>(mask.shape(3));
                 });
}

void attention_varlen(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const PackedSequences& sequences,
                      const AttentionOptions& options) {
  Form form = varlen_form("attention_varlen", sequences);
  form.fp8 = true;
  AttentionCall call = check_varlen(form, q, k, v, o, sequences, options);
  check_varlen_contents(form, call, sequences, options);
  if (o.numel() == 0 || call.batch == 0) return;
  const detail::ScopedSmMargin margin(call.sm_margin);
  if (call.descaled) widen(call);
  const Tensor tiles = list_packed_tiles(call);
  run(call);
}

}  // namespace tw
