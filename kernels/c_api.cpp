#include <cstring>
#include <string>

#include "kernels/c_api.hpp"
#include "tilewave/attention.hpp"
#include "tilewave/gemm.hpp"
#include "tilewave/tilewave.h"

namespace tw::c_api {

std::string& last_error() {
  thread_local std::string message;
  return message;
}

}  // namespace tw::c_api

namespace {

using tw::c_api::guard;

tw::Tensor borrow(const char* argument, const tw_tensor* t) {
  if (t == nullptr) throw tw::InvalidArgument(std::string(argument) + " is null");
  if (t->rank < 1 || t->rank > 4)
    throw tw::InvalidArgument(std::string(argument) + " has rank " + std::to_string(t->rank) + "; 1 to 4 are allowed");
  tw::DType dtype;
  int code;  // of any value: what a C program puts there need be none of the enumeration's
  std::memcpy(&code, &t->dtype, sizeof code);
  switch (code) {
    case TW_F32:
      dtype = tw::DType::f32;
      break;
    case TW_F16:
      dtype = tw::DType::f16;
      break;
    case TW_BF16:
      dtype = tw::DType::bf16;
      break;
    case TW_I32:
      dtype = tw::DType::i32;
      break;
    case TW_BOOL:
      dtype = tw::DType::boolean;
      break;
    default:
      throw tw::InvalidArgument(std::string(argument) + " has dtype " + std::to_string(code) + "; see tw_dtype");
  }
  const tw::Device device = t->cuda_device < 0 ? tw::Device::cpu() : tw::Device::cuda(t->cuda_device);
  return tw::Tensor::borrow(t->data, tw::Shape(t->shape, t->shape + t->rank), dtype, device, {t->strides, t->strides + t->rank});
}

tw::Stream stream_of(const tw::Tensor& tensor, void* cuda_stream) {
  return tensor.device().is_cuda() ? tw::Stream::borrow(tensor.device(), cuda_stream) : tw::Stream::standard(tensor.device());
}

/// A tensor that may be left out.
class Given {
 public:
  Given(const char* argument, const tw_tensor* tensor) {
    if (tensor != nullptr) tensor_ = borrow(argument, tensor);
    given_ = tensor != nullptr;
  }
  const tw::Tensor* get() const { return given_ ? &tensor_ : nullptr; }

 private:
  tw::Tensor tensor_;
  bool given_ = false;
};

/// Options and the tensors that they point to.
struct AttentionArguments {
  AttentionArguments(const tw_attention_options* options_or_null, const tw::Stream& stream)
      : given(tw::c_api::known("options", options_or_null)),
        alibi_slopes("alibi_slopes", given.alibi_slopes),
        sink("sink", given.sink),
        mask("mask", given.mask),
        lse("lse", given.lse) {
    options.scale = given.scale;
    options.causal = given.causal != 0;
    if (given.has_causal_offset != 0) options.causal_offset = given.causal_offset;
    if (given.has_window_left != 0) options.window_left = given.window_left;
    if (given.has_window_right != 0) options.window_right = given.window_right;
    options.softcap = given.softcap;
    options.alibi_slopes = alibi_slopes.get();
    options.sink = sink.get();
    options.mask = mask.get();
    options.lse = lse.get();
    options.check_contents = given.check_contents != 0;
    options.stream = stream;
  }
  AttentionArguments(const AttentionArguments&) = delete;
  AttentionArguments& operator=(const AttentionArguments&) = delete;

  const tw_attention_options given;
  const Given alibi_slopes, sink, mask, lse;
  tw::AttentionOptions options;
};

}  // namespace

const char* tw_last_error(void) { return tw::c_api::last_error().c_str(); }

tw_status tw_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* d, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("d", d);
    tw::gemm(borrow("a", a), borrow("b", b), out, {.stream = stream_of(out, cuda_stream)});
  });
}

tw_status tw_attention(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_attention_options* options,
                       void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const AttentionArguments arguments(options, stream_of(out, cuda_stream));
    tw::attention(borrow("q", q), borrow("k", k), borrow("v", v), out, arguments.options);
  });
}

tw_status tw_attention_varlen(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* cu_seqlens_q,
                              const tw_tensor* cu_seqlens_k, const tw_tensor* seqused_q, const tw_tensor* seqused_k,
                              const tw_attention_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const AttentionArguments arguments(options, stream_of(out, cuda_stream));
    const Given used_q("seqused_q", seqused_q), used_k("seqused_k", seqused_k);
    tw::attention_varlen(borrow("q", q), borrow("k", k), borrow("v", v), out,
                         {borrow("cu_seqlens_q", cu_seqlens_q), borrow("cu_seqlens_k", cu_seqlens_k), used_q.get(), used_k.get()},
                         arguments.options);
  });
}

tw_status tw_attention_decode(const tw_tensor* q, const tw_tensor* k_cache, const tw_tensor* v_cache, const tw_tensor* o,
                              const tw_cache_options* cache, const tw_attention_options* options, void* cuda_stream) {
  return guard([&] {
    const tw::Tensor out = borrow("o", o);
    const AttentionArguments arguments(options, stream_of(out, cuda_stream));
    const auto given = tw::c_api::known("cache", cache);
    const Given seqlens("seqlens", given.seqlens), batch_idx("batch_idx", given.batch_idx), leftpad("leftpad", given.leftpad),
        block_table("block_table", given.block_table), new_k("new_k", given.new_k), new_v("new_v", given.new_v),
        rotary_cos("rotary_cos", given.rotary_cos), rotary_sin("rotary_sin", given.rotary_sin);
    tw::attention_decode(borrow("q", q), borrow("k_cache", k_cache), borrow("v_cache", v_cache), out,
                         {.seqlens = seqlens.get(),
                          .batch_idx = batch_idx.get(),
                          .leftpad = leftpad.get(),
                          .block_table = block_table.get(),
                          .new_k = new_k.get(),
                          .new_v = new_v.get(),
                          .rotary_cos = rotary_cos.get(),
                          .rotary_sin = rotary_sin.get(),
                          .rotary_pairing = given.rotary_interleaved != 0 ? tw::RopePairing::interleaved : tw::RopePairing::half_split,
                          .num_splits = given.num_splits},
                         arguments.options);
  });
}
