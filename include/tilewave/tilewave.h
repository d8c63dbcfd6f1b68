#ifndef TILEWAVE_H
#define TILEWAVE_H

/* The C interface. Functions return a status; tw_last_error() is the message of the last failure on this thread. Sizes count elements. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
  TW_OK = 0,
  TW_INVALID_ARGUMENT = 1,
  TW_OUT_OF_MEMORY = 2,
  TW_DEVICE_ERROR = 3,
  TW_COMPILE_ERROR = 4,
  TW_FAILURE = 5,
  TW_FILE_ERROR = 6,
  TW_CANCELLED = 7,
  TW_QUEUE_FULL = 8
} tw_status;

typedef enum {
  TW_F32 = 0,
  TW_F16 = 1,
  TW_BF16 = 2,
  TW_I32 = 3,
  TW_BOOL = 4,
  TW_FP8_E4M3 = 5,
  TW_FP8_E5M2 = 6,
  TW_I8 = 7,
  TW_I64 = 8,
  TW_U8 = 9
} tw_dtype;

/* A strided tensor on the CPU (cuda_device < 0) or on a GPU. Strides count elements. */
typedef struct {
  void* data;
  tw_dtype dtype;
  int32_t cuda_device;
  int32_t rank; /* 0 to 4 */
  int64_t shape[4];
  int64_t strides[4];
} tw_tensor;

/* "" if nothing has failed yet. Valid until the next call on this thread. */
const char* tw_last_error(void);

/* The library's version, "major.minor.patch". */
const char* tw_version(void);

/* Sets the target of GPU kernels in the whole process: "auto" (the default), "sm_90a" (Hopper), or "cuda" (any NVIDIA GPU
 * since compute capability 8.0). */
tw_status tw_set_gpu_target(const char* target);

/* Sets the number of threads of the CPU target in the whole process: 1 to 1024. The default is the cores that the process may use. */
tw_status tw_set_cpu_threads(int32_t threads);

/* The operations of the C++ interface. The headers tilewave/NAME.hpp give the shapes and dtypes of each.
 *
 * `cuda_stream`: a CUstream, or null for the legacy default stream; ignored on the CPU.
 *
 * Option structures begin with `struct_size`, which the caller sets to sizeof the structure. Fields that are 0 have their default, null
 * tensors are absent, and null options mean all defaults. */

/* tilewave/elementwise.hpp */
tw_status tw_add(const tw_tensor* a, const tw_tensor* b, const tw_tensor* y, void* cuda_stream);
tw_status tw_mul(const tw_tensor* a, const tw_tensor* b, const tw_tensor* y, void* cuda_stream);
tw_status tw_silu(const tw_tensor* x, const tw_tensor* y, void* cuda_stream);
tw_status tw_gelu_erf(const tw_tensor* x, const tw_tensor* y, void* cuda_stream);
tw_status tw_gelu_tanh(const tw_tensor* x, const tw_tensor* y, void* cuda_stream);
tw_status tw_cast(const tw_tensor* x, const tw_tensor* y, void* cuda_stream);

typedef enum {
  TW_ACTIVATION_NONE = 0,
  TW_ACTIVATION_RELU = 1,
  TW_ACTIVATION_GELU_ERF = 2,
  TW_ACTIVATION_GELU_TANH = 3,
  TW_ACTIVATION_SILU = 4,
  TW_ACTIVATION_SWIGLU = 5
} tw_activation;

/* tilewave/gemm.hpp */
typedef struct {
  size_t struct_size;
  int32_t has_alpha; /* 1: alpha instead of 1 */
  float alpha, beta;
  tw_activation activation;
  const tw_tensor *bias, *residual, *a_scale, *b_scale;
  int32_t num_splits; /* number of K splits; 0: the library's choice */
} tw_gemm_options;

tw_status tw_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* d, const tw_gemm_options* options, void* cuda_stream);

/* tilewave/grouped_gemm.hpp; offsets: i32 [groups + 1]. */
typedef struct {
  size_t struct_size;
  const tw_tensor* bias; /* [groups, n] */
  tw_activation activation;
  const tw_tensor *a_scale, *b_scale; /* of TW_FP8_E4M3 */
} tw_grouped_gemm_options;

tw_status tw_grouped_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* offsets, const tw_tensor* d,
                          const tw_grouped_gemm_options* options, void* cuda_stream);
/* accumulate: 1: d += instead of d = */
tw_status tw_k_grouped_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* offsets, const tw_tensor* d, int32_t accumulate,
                            void* cuda_stream);

/* tilewave/sparse_gemm.hpp. A 2:4 sparse matrix [m, k] is two tensors: values [m, k / 2], and metadata of TW_U8, contiguous,
 * [ceil(k / block), ceil(m / 16) * block / 64, 128], where block is 128 columns of 16-bit or 256 columns of 8-bit elements. */
typedef struct {
  size_t struct_size;
  int32_t has_alpha; /* 1: alpha instead of 1 */
  float alpha, beta;
  tw_activation activation;
  const tw_tensor *bias, *residual, *a_scale, *b_scale;
} tw_sparse_gemm_options;

tw_status tw_prune_2_4(const tw_tensor* x, const tw_tensor* y, void* cuda_stream);
/* refused: TW_I32 [1] on a GPU, set to 1 if a group of four has more than two nonzeros; or null */
tw_status tw_compress_2_4(const tw_tensor* dense, const tw_tensor* values, const tw_tensor* metadata, const tw_tensor* refused,
                          void* cuda_stream);
tw_status tw_decompress_2_4(const tw_tensor* values, const tw_tensor* metadata, const tw_tensor* dense, void* cuda_stream);
/* d = a b, a [m, k] sparse */
tw_status tw_sparse_gemm(const tw_tensor* values, const tw_tensor* metadata, const tw_tensor* b, const tw_tensor* d,
                         const tw_sparse_gemm_options* options, void* cuda_stream);
/* y = x w^T, w [n, k] sparse */
tw_status tw_sparse_linear(const tw_tensor* x, const tw_tensor* values, const tw_tensor* metadata, const tw_tensor* y,
                           const tw_sparse_gemm_options* options, void* cuda_stream);

/* tilewave/block_sparse_gemm.hpp; masks of TW_U8 or TW_BOOL. */
typedef struct {
  size_t struct_size;
  int32_t block;     /* 0: 128 */
  int32_t has_alpha; /* 1: alpha instead of 1 */
  float alpha;
  tw_activation activation;
  const tw_tensor *a_mask, *b_mask, *d_mask, *product_mask, *bias;
} tw_block_sparse_gemm_options;

tw_status tw_block_sparse_gemm(const tw_tensor* a, const tw_tensor* b, const tw_tensor* d, const tw_block_sparse_gemm_options* options,
                               void* cuda_stream);

/* tilewave/quantized.hpp. A weight [n, k] in fewer bits is three tensors, row-major:
 *   int8, fp8   values [n, k] of TW_I8 or TW_FP8_E4M3, scales [n] of TW_F32, no zeros
 *   int4        values [n, k / 2] of TW_U8, scales [n, k / group] of TW_F16, zeros of TW_U8 with the shape of scales, or null
 *   int2        the same with values [n, k / 4]
 *   nf4         values [n, k / 2] of TW_U8, scales [n, k / 64] of TW_F32, no zeros
 *   fp4, mxfp4  values [n, k / 2] of TW_U8, scales [n, k / 32] of TW_F16 or TW_U8, no zeros */
typedef enum {
  TW_WEIGHT_BY_DTYPE = 0, /* int8, fp8, or int4 for values of TW_U8 */
  TW_WEIGHT_INT8 = 1,
  TW_WEIGHT_FP8 = 2,
  TW_WEIGHT_INT4 = 3,
  TW_WEIGHT_INT2 = 4,
  TW_WEIGHT_NF4 = 5,
  TW_WEIGHT_FP4 = 6,
  TW_WEIGHT_MXFP4 = 7
} tw_weight_format;

typedef struct {
  size_t struct_size;
  const tw_tensor* bias;
  tw_activation activation; /* with TW_ACTIVATION_SWIGLU y has n / 2 columns: the weight's even rows are gate, odd ones up */
  int32_t accumulate;       /* 1: y += instead of y = */
  tw_weight_format format;
  const tw_tensor* x_scales; /* [m] of TW_F32: x is of TW_I8, the weight int4, and y of TW_F32, TW_F16 or TW_BF16; or null */
} tw_dequant_gemm_options;

/* Rounds `weight` to the format of the three tensors. All are on the CPU. */
tw_status tw_quantize(const tw_tensor* weight, const tw_tensor* values, const tw_tensor* scales, const tw_tensor* zeros, void* cuda_stream);
/* The same to a given format. */
tw_status tw_quantize_to(const tw_tensor* weight, tw_weight_format format, const tw_tensor* values, const tw_tensor* scales,
                         const tw_tensor* zeros, void* cuda_stream);
/* out [n, k] of f32, f16 or bf16: the weight, rounded once. */
tw_status tw_dequantize(const tw_tensor* values, const tw_tensor* scales, const tw_tensor* zeros, tw_weight_format format,
                        const tw_tensor* out, void* cuda_stream);
tw_status tw_dequant_gemm(const tw_tensor* x, const tw_tensor* values, const tw_tensor* scales, const tw_tensor* zeros, const tw_tensor* y,
                          const tw_dequant_gemm_options* options, void* cuda_stream);

/* tilewave/bitnet.hpp. A ternary weight [n, k] is two tensors, row-major: values [n, k / 4] of TW_U8 and scales [n] of TW_F32. */
typedef struct {
  size_t struct_size;
  const tw_tensor* bias;
  int32_t accumulate; /* 1: y += instead of y = */
} tw_bit_linear_options;

tw_status tw_quantize_ternary(const tw_tensor* weight, const tw_tensor* values, const tw_tensor* scales, void* cuda_stream);
/* out: [n, k] of TW_I8 */
tw_status tw_unpack_ternary(const tw_tensor* values, const tw_tensor* scales, const tw_tensor* out, void* cuda_stream);
/* On the CPU. packed: [n / 4, k] of TW_U8, as transformers stores it. */
tw_status tw_convert_bitnet(const tw_tensor* packed, float scale, const tw_tensor* values, const tw_tensor* scales, void* cuda_stream);
/* x [m, k] to values [m, k] of TW_I8 and scales [m] of TW_F32 */
tw_status tw_quantize_activations(const tw_tensor* x, const tw_tensor* values, const tw_tensor* scales, void* cuda_stream);
/* x and x_scales as tw_quantize_activations() gives them. */
tw_status tw_ternary_gemm(const tw_tensor* x, const tw_tensor* x_scales, const tw_tensor* values, const tw_tensor* scales,
                          const tw_tensor* y, const tw_bit_linear_options* options, void* cuda_stream);
tw_status tw_bit_linear(const tw_tensor* x, const tw_tensor* values, const tw_tensor* scales, const tw_tensor* y,
                        const tw_bit_linear_options* options, void* cuda_stream);

/* tilewave/quantized_layouts.hpp: 4-bit weights as published checkpoints store them, all on the CPU. */
typedef enum {
  TW_WEIGHT_LAYOUT_AWQ = 0,               /* AutoAWQ, "gemm" */
  TW_WEIGHT_LAYOUT_GPTQ = 1,              /* AutoGPTQ, whose zero points are stored minus 1 */
  TW_WEIGHT_LAYOUT_GPTQ_V2 = 2,           /* as they are */
  TW_WEIGHT_LAYOUT_COMPRESSED_TENSORS = 3 /* "pack-quantized": weight_packed, weight_zero_point and weight_scale */
} tw_weight_layout;

/* Writes values, to_scales and to_zeros as int4 weights of tw_dequant_gemm() have them. `qzeros` is null only where compressed-tensors has
 * none, `g_idx` where GPTQ has none and in the other layouts, `to_zeros` only if every zero point is 8. */
tw_status tw_convert_weight(const tw_tensor* qweight, const tw_tensor* qzeros, const tw_tensor* scales, const tw_tensor* g_idx,
                            tw_weight_layout layout, const tw_tensor* values, const tw_tensor* to_scales, const tw_tensor* to_zeros,
                            void* cuda_stream);

/* tilewave/convolution.hpp; tw_conv1d uses the first of each pair. */
typedef struct {
  size_t struct_size;
  int64_t stride[2], padding[2], dilation[2]; /* stride, dilation: 0 means 1 */
  const tw_tensor* bias;
  tw_activation activation;
} tw_conv_options;

tw_status tw_conv1d(const tw_tensor* x, const tw_tensor* w, const tw_tensor* y, const tw_conv_options* options, void* cuda_stream);
tw_status tw_conv2d(const tw_tensor* x, const tw_tensor* w, const tw_tensor* y, const tw_conv_options* options, void* cuda_stream);

/* tilewave/norm.hpp */
typedef struct {
  size_t struct_size;
  int32_t has_epsilon; /* 1: epsilon instead of 1e-5 */
  float epsilon;
  const tw_tensor *weight, *bias, *residual, *sum;
} tw_norm_options;

tw_status tw_layer_norm(const tw_tensor* x, const tw_tensor* y, const tw_norm_options* options, void* cuda_stream);
tw_status tw_rms_norm(const tw_tensor* x, const tw_tensor* y, const tw_norm_options* options, void* cuda_stream);

/* tilewave/softmax.hpp */
tw_status tw_softmax(const tw_tensor* x, const tw_tensor* y, float scale, void* cuda_stream);

/* tilewave/hadamard.hpp; factors: f32 [n], or null. */
tw_status tw_hadamard(const tw_tensor* x, const tw_tensor* y, const tw_tensor* factors, float scale, void* cuda_stream);

/* tilewave/swiglu.hpp */
tw_status tw_swiglu(const tw_tensor* gate, const tw_tensor* up, const tw_tensor* y, void* cuda_stream);
tw_status tw_swiglu_interleaved(const tw_tensor* x, const tw_tensor* y, void* cuda_stream);

/* tilewave/rope.hpp; `positions` may be null. */
tw_status tw_rope_table(const tw_tensor* cos, const tw_tensor* sin, double theta, int64_t offset, const tw_tensor* positions,
                        void* cuda_stream);

typedef struct {
  size_t struct_size;
  int32_t interleaved; /* 1: pairs 2 k, 2 k + 1 instead of k, k + rotary_dim / 2 */
  int64_t offset;
  const tw_tensor *offsets, *positions;
} tw_rope_options;

tw_status tw_rope(const tw_tensor* x, const tw_tensor* cos, const tw_tensor* sin, const tw_tensor* y, const tw_rope_options* options,
                  void* cuda_stream);

/* tilewave/causal_conv1d.hpp; x, y [batch, seqlen, channels], weight [channels, width], states [sequences, channels, width - 1]. */
typedef struct {
  size_t struct_size;
  const tw_tensor *bias, *initial_state, *final_state;
  const tw_tensor* cu_seqlens; /* i32 [sequences + 1] */
  int32_t silu;                /* 0 or 1 */
} tw_causal_conv1d_options;

tw_status tw_causal_conv1d(const tw_tensor* x, const tw_tensor* weight, const tw_tensor* y, const tw_causal_conv1d_options* options,
                           void* cuda_stream);
/* Continues sequences, in generation. `state` is read and written; bias may be null; silu: 0 or 1. */
tw_status tw_causal_conv1d_update(const tw_tensor* x, const tw_tensor* state, const tw_tensor* weight, const tw_tensor* bias,
                                  const tw_tensor* y, int32_t silu, void* cuda_stream);
/* d_final_state is an input, d_weight, d_bias and d_initial_state are outputs; all may be null. Of the forward options, final_state is
 * ignored. */
tw_status tw_causal_conv1d_backward(const tw_tensor* dy, const tw_tensor* x, const tw_tensor* weight, const tw_tensor* d_final_state,
                                    const tw_tensor* dx, const tw_tensor* d_weight, const tw_tensor* d_bias,
                                    const tw_tensor* d_initial_state, const tw_causal_conv1d_options* forward, void* cuda_stream);

/* tilewave/gated_delta.hpp; q, k [batch, seqlen, heads of keys, dim], v, o [batch, seqlen, heads, values], beta [batch, seqlen, heads],
 * g [batch, seqlen, heads] or, of each channel of a key, [batch, seqlen, heads, dim], states [sequences, heads, dim, values] of TW_F32. */
typedef struct {
  size_t struct_size;
  const tw_tensor* g;
  int32_t has_scale; /* 1: scale instead of 1 / sqrt(dim) */
  float scale;
  int32_t normalise_qk; /* 0 or 1 */
  const tw_tensor *initial_state, *final_state;
  const tw_tensor* cu_seqlens; /* i32 [sequences + 1] */
} tw_gated_delta_options;

tw_status tw_gated_delta_rule(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* beta, const tw_tensor* o,
                              const tw_gated_delta_options* options, void* cuda_stream);
/* Continues sequences, in generation. `state` is read and written; of the options, states and cu_seqlens must be null. */
tw_status tw_gated_delta_rule_step(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* beta,
                                   const tw_tensor* state, const tw_tensor* o, const tw_gated_delta_options* options, void* cuda_stream);

typedef struct {
  size_t struct_size;
  const tw_tensor* g;
  int32_t has_scale; /* 1: scale instead of 1 / sqrt(dim) */
  float scale;
  int32_t normalise_qk; /* 0 or 1 */
  const tw_tensor *initial_state, *cu_seqlens;
  const tw_tensor* d_final_state;   /* gradient of the final state; null: 0 */
  const tw_tensor* dg;              /* output, f32 of g's shape */
  const tw_tensor* d_initial_state; /* output */
} tw_gated_delta_backward_options;

/* Gradients of tw_gated_delta_rule: dq, dk, dv and d_beta have the shapes and types of q, k, v and beta, and d_o is the gradient of o. */
tw_status tw_gated_delta_rule_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* beta,
                                       const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dk, const tw_tensor* dv,
                                       const tw_tensor* d_beta, const tw_gated_delta_backward_options* options, void* cuda_stream);

/* tilewave/reduce.hpp, transpose.hpp, embedding.hpp */
typedef enum { TW_SUM = 0, TW_MEAN = 1, TW_MAX = 2, TW_MIN = 3, TW_ABS_MAX = 4 } tw_reduction;

tw_status tw_reduce(tw_reduction reduction, const tw_tensor* x, const tw_tensor* y, int32_t dim, void* cuda_stream);
tw_status tw_transpose(const tw_tensor* x, const tw_tensor* y, void* cuda_stream);
tw_status tw_embedding(const tw_tensor* table, const tw_tensor* ids, const tw_tensor* y, float scale, void* cuda_stream);

/* tilewave/topk.hpp; `values` of argmax may be null. */
tw_status tw_argmax(const tw_tensor* x, const tw_tensor* indices, const tw_tensor* values, void* cuda_stream);

typedef struct {
  size_t struct_size;
  int32_t smallest, unsorted; /* 1: instead of the largest, sorted */
  const tw_tensor *starts, *ends;
} tw_topk_options;

tw_status tw_topk(const tw_tensor* x, int32_t k, const tw_tensor* values, const tw_tensor* indices, const tw_topk_options* options,
                  void* cuda_stream);

/* tilewave/moe.hpp */
typedef enum { TW_MOE_SOFTMAX = 0, TW_MOE_SIGMOID = 1 } tw_moe_score;
typedef enum { TW_MOE_LARGEST = 0, TW_MOE_SUM_OF_TWO = 1 } tw_moe_group_score;

typedef struct {
  size_t struct_size;
  tw_moe_score score;
  tw_moe_group_score group_score;
  const tw_tensor* bias;
  int32_t groups, groups_taken; /* 0: 1 */
  int32_t renormalise;          /* 0 or 1 */
  int32_t has_scale;            /* 1: scale instead of 1 */
  float scale;
} tw_moe_route_options;

tw_status tw_moe_route(const tw_tensor* logits, const tw_tensor* weights, const tw_tensor* experts, const tw_moe_route_options* options,
                       void* cuda_stream);
tw_status tw_moe_permutation(const tw_tensor* experts, int32_t n_experts, int32_t first_expert, const tw_tensor* offsets,
                             const tw_tensor* rows, const tw_tensor* places, void* cuda_stream);
/* `scales`: those of a y of TW_FP8_E4M3, otherwise null. */
tw_status tw_moe_dispatch(const tw_tensor* x, const tw_tensor* places, const tw_tensor* y, const tw_tensor* scales, void* cuda_stream);
/* `addend` may be null. */
tw_status tw_moe_combine(const tw_tensor* y, const tw_tensor* places, const tw_tensor* weights, const tw_tensor* addend,
                         const tw_tensor* out, void* cuda_stream);

typedef struct {
  size_t struct_size;
  int32_t first_expert;
  const tw_tensor *shared_gate_up, *shared_down, *addend;
  const tw_tensor *gate_up_scale, *down_scale, *shared_gate_up_scale, *shared_down_scale; /* of fp8 and u8 weights */
} tw_moe_experts_options;

tw_status tw_moe_experts(const tw_tensor* x, const tw_tensor* weights, const tw_tensor* experts, const tw_tensor* w_gate_up,
                         const tw_tensor* w_down, const tw_tensor* out, const tw_moe_experts_options* options, void* cuda_stream);
tw_status tw_fused_moe(const tw_tensor* x, const tw_tensor* logits, int32_t k, const tw_tensor* w_gate_up, const tw_tensor* w_down,
                       const tw_tensor* out, const tw_moe_route_options* route, const tw_moe_experts_options* options, void* cuda_stream);

/* tilewave/cast_fp8.hpp; powers_of_two: 0 or 1. */
tw_status tw_cast_fp8(const tw_tensor* x, const tw_tensor* y, const tw_tensor* scales, int32_t powers_of_two, void* cuda_stream);
tw_status tw_cast_fp8_swiglu(const tw_tensor* gate, const tw_tensor* up, const tw_tensor* y, const tw_tensor* scales, int32_t powers_of_two,
                             void* cuda_stream);
tw_status tw_cast_fp8_blocks(const tw_tensor* x, const tw_tensor* y, const tw_tensor* scales, int32_t powers_of_two, void* cuda_stream);
/* scales: f32 [batch, kv_heads], an input, attention's descale; rotate: 0 or 1; signs: f32 [head_dim], or null. */
tw_status tw_cast_fp8_heads(const tw_tensor* x, const tw_tensor* y, const tw_tensor* scales, int32_t rotate, const tw_tensor* signs,
                            void* cuda_stream);
tw_status tw_head_scales(const tw_tensor* x, const tw_tensor* scales, int32_t rotate, const tw_tensor* signs, void* cuda_stream);
tw_status tw_cast_fp8_grouped(const tw_tensor* x, const tw_tensor* sizes, const tw_tensor* y, const tw_tensor* scales,
                              int32_t powers_of_two, void* cuda_stream);

/* tilewave/attention.hpp: options of all forms of attention. */
typedef struct {
  size_t struct_size;
  float scale;               /* 0: 1 / sqrt(head_dim) */
  int32_t causal;            /* 0 or 1 */
  int32_t has_causal_offset; /* 1: causal_offset instead of seqlen_k - seqlen_q */
  int32_t causal_offset;
  int32_t has_window_left, window_left; /* 1: query i sees no key before i + diagonal - window_left */
  int32_t has_window_right, window_right;
  float softcap;
  const tw_tensor* alibi_slopes; /* f32 [heads] or [batch, heads] */
  const tw_tensor* sink;         /* f32 [heads] */
  const tw_tensor* mask;         /* bool, f32 or o's dtype; broadcast to [batch, heads, seqlen_q, seqlen_k] */
  const tw_tensor* lse;          /* output, f32 [batch, heads, seqlen_q]; packed: [heads, total_q] */
  int32_t check_contents;        /* 1: wait and check lengths, offsets and page numbers on a GPU */
  float dropout;                 /* the probability with which a weight is dropped, in [0, 1); not with a cache */
  int64_t dropout_seed, dropout_offset;
  const tw_tensor* dropout_state; /* i64 [2], on the tensors' device: replaces dropout_seed and dropout_offset */

  /* Of tw_attention in e4m3 (o: bf16 or f16), f32 [batch, kv_heads]. */
  const tw_tensor *q_descale, *k_descale, *v_descale;

  /* tw::AttentionBlocks: only these blocks of keys. Either block_mask, bool [batch, heads, query_blocks, key_blocks], or block_indices, i32
     [batch, heads, query_blocks, entries], with block_counts, i32 [batch, heads, query_blocks], or without. */
  const tw_tensor *block_mask, *block_indices, *block_counts;
  int32_t query_block, key_block; /* queries and keys of a block: 64 or 128; 0: 128 */

  int32_t attention_chunk; /* C above 0: query i sees only keys j with floor(j / C) = floor((i + diagonal) / C) */
  int32_t sm_margin;       /* on a GPU: SMs that are left to other work; less than there are */

  const tw_tensor* qv; /* of q's dtype and o's shape: multiplied by v and added to the products of q and k; no gradients */
} tw_attention_options;

tw_status tw_attention(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_attention_options* options,
                       void* cuda_stream);

/* mask: bool [batch, heads, seqlen_q, seqlen_k], which weights tw_attention keeps. Of the options only those of dropout are used. */
tw_status tw_attention_dropout_mask(const tw_tensor* mask, const tw_attention_options* options, void* cuda_stream);

/* tw::AttentionBackwardOptions. */
typedef struct {
  size_t struct_size;
  const tw_attention_options*
      forward;             /* those of tw_attention, null: defaults; lse is ignored, and check_contents without packed sequences */
  const tw_tensor* d_sink; /* output, f32 [heads]: the gradient of forward->sink */
  int deterministic;       /* the same inputs give the same bits, on a GPU too, where this takes longer */
  const tw_tensor* d_mask; /* output, f32 or of the mask's dtype, of its shape, contiguous: the gradient of forward->mask, not of bool */
} tw_attention_backward_options;

/* Gradients of tw_attention: dq, dk and dv have the shapes of q, k and v; o and lse are its results, and d_o is the gradient of o. */
tw_status tw_attention_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* lse,
                                const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dk, const tw_tensor* dv,
                                const tw_attention_backward_options* options, void* cuda_stream);

/* Packed sequences; seqused_q and seqused_k may be null. */
tw_status tw_attention_varlen(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* cu_seqlens_q,
                              const tw_tensor* cu_seqlens_k, const tw_tensor* seqused_q, const tw_tensor* seqused_k,
                              const tw_attention_options* options, void* cuda_stream);

/* Gradients of tw_attention_varlen; seqused_q and seqused_k may be null. options->forward->check_contents is as in tw_attention_varlen. */
tw_status tw_attention_varlen_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* lse,
                                       const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dk, const tw_tensor* dv,
                                       const tw_tensor* cu_seqlens_q, const tw_tensor* cu_seqlens_k, const tw_tensor* seqused_q,
                                       const tw_tensor* seqused_k, const tw_attention_backward_options* options, void* cuda_stream);

/* tilewave/linear_attention.hpp. q, k: [batch, seqlen, heads, dk]; v, o: [batch, seqlen, heads of v, dv]; states: f32
 * [sequences, heads of v, dk, dv], any strides. */
typedef struct {
  size_t struct_size;
  int32_t has_scale; /* 1: scale instead of 1 / sqrt(dk) */
  float scale;
  const tw_tensor* g; /* f32 [batch, seqlen, heads of v] or [heads of v]: logarithms of the decay; null: none */
  const tw_tensor* initial_state;
  const tw_tensor* final_state; /* output */
  const tw_tensor* cu_seqlens;  /* i32 [sequences + 1]: the batch is 1 and holds packed sequences */
} tw_linear_attention_options;

tw_status tw_linear_attention(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o,
                              const tw_linear_attention_options* options, void* cuda_stream);

typedef struct {
  size_t struct_size;
  int32_t has_scale;
  float scale;
  const tw_tensor* g;
} tw_linear_attention_step_options;

/* The same for few steps, in f32 arithmetic; state is read and replaced. */
tw_status tw_linear_attention_step(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* state,
                                   const tw_linear_attention_step_options* options, void* cuda_stream);

typedef struct {
  size_t struct_size;
  int32_t has_scale;
  float scale;
  const tw_tensor *g, *initial_state, *cu_seqlens;
  const tw_tensor* d_final_state;   /* gradient of the final state; null: 0 */
  const tw_tensor* dg;              /* output, f32 [batch, seqlen, heads of v] */
  const tw_tensor* d_initial_state; /* output */
} tw_linear_attention_backward_options;

/* Gradients of tw_linear_attention: dq, dk and dv have the shapes of q, k and v, and d_o is the gradient of o. */
tw_status tw_linear_attention_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* d_o,
                                       const tw_tensor* dq, const tw_tensor* dk, const tw_tensor* dv,
                                       const tw_linear_attention_backward_options* options, void* cuda_stream);

/* tilewave/mamba2.hpp. x, y: [batch, seqlen, heads, headdim]; dt: [batch, seqlen, heads]; a: f32 [heads]; b, c: [batch, seqlen, groups,
 * dstate]; states: f32 [sequences, heads, headdim, dstate]. */
typedef struct {
  size_t struct_size;
  const tw_tensor *d, *z, *dt_bias; /* f32 [heads] or [heads, headdim]; x's shape; f32 [heads] */
  int32_t dt_softplus;
  int32_t has_dt_limit; /* 1: dt_min and dt_max instead of 0 and infinity */
  float dt_min, dt_max;
  const tw_tensor* initial_states;
  const tw_tensor* final_states; /* output */
  const tw_tensor* cu_seqlens;   /* i32 [sequences + 1]: the batch is 1 and holds packed sequences */
  const tw_tensor* seq_idx;      /* i32 [batch, seqlen]: where it changes, a state of 0 */
} tw_mamba2_options;

tw_status tw_mamba2(const tw_tensor* x, const tw_tensor* dt, const tw_tensor* a, const tw_tensor* b, const tw_tensor* c, const tw_tensor* y,
                    const tw_mamba2_options* options, void* cuda_stream);

typedef struct {
  size_t struct_size;
  const tw_tensor *d, *z, *dt_bias;
  int32_t dt_softplus;
  int32_t has_dt_limit;
  float dt_min, dt_max;
  const tw_tensor* state_indices; /* i32 [batch]: sequence n has the state of this index; null: n */
} tw_mamba2_step_options;

/* The same for few steps, in f32 arithmetic; states, of f32 or x's type, are read and replaced. */
tw_status tw_mamba2_step(const tw_tensor* x, const tw_tensor* dt, const tw_tensor* a, const tw_tensor* b, const tw_tensor* c,
                         const tw_tensor* states, const tw_tensor* y, const tw_mamba2_step_options* options, void* cuda_stream);

typedef struct {
  size_t struct_size;
  const tw_tensor *d, *z, *dt_bias;
  int32_t dt_softplus;
  int32_t has_dt_limit;
  float dt_min, dt_max;
  const tw_tensor *initial_states, *cu_seqlens, *seq_idx;
  const tw_tensor* d_final_states;                              /* gradient of the final states; null: 0 */
  const tw_tensor *da, *dd, *dz, *d_dt_bias, *d_initial_states; /* outputs; each may be null, but not dz if z is given */
} tw_mamba2_backward_options;

/* Gradients of tw_mamba2: dx, d_dt, db and dc have the shapes and types of x, dt, b and c, and dy is the gradient of y. */
tw_status tw_mamba2_backward(const tw_tensor* x, const tw_tensor* dt, const tw_tensor* a, const tw_tensor* b, const tw_tensor* c,
                             const tw_tensor* dy, const tw_tensor* dx, const tw_tensor* d_dt, const tw_tensor* db, const tw_tensor* dc,
                             const tw_mamba2_backward_options* options, void* cuda_stream);

/* tilewave/mamba2_chunks.hpp: the scan in five steps. da_cumsum and the step sizes, dt_out and then dt: f32 [batch, heads, chunks,
 * chunk_size]. As a tw_tensor has four dimensions, those of batch and chunks are one here: cb: f32 [batch * chunks, groups, chunk_size,
 * chunk_size]; states and passed: [batch * chunks, heads, headdim, dstate]. */
typedef struct {
  size_t struct_size;
  const tw_tensor* dt_bias;
  int32_t dt_softplus;
  int32_t has_dt_limit; /* 1: dt_min and dt_max instead of 0 and infinity */
  float dt_min, dt_max;
  const tw_tensor* seq_idx; /* i32 [batch, seqlen]: where it changes, a state of 0 */
} tw_mamba2_chunk_cumsum_options;

tw_status tw_mamba2_chunk_cumsum(const tw_tensor* dt, const tw_tensor* a, const tw_tensor* da_cumsum, const tw_tensor* dt_out,
                                 const tw_mamba2_chunk_cumsum_options* options, void* cuda_stream);

/* states: f32, what each chunk adds. */
tw_status tw_mamba2_chunk_state(const tw_tensor* b, const tw_tensor* x, const tw_tensor* dt, const tw_tensor* da_cumsum,
                                const tw_tensor* states, void* cuda_stream);

/* passed: the state before each chunk. da_chunk_cumsum: f32 [batch, heads, chunks]. initial_states and final_states, which is an output:
 * f32 [batch, heads, headdim, dstate]; each may be null. */
tw_status tw_mamba2_state_passing(const tw_tensor* states, const tw_tensor* da_chunk_cumsum, const tw_tensor* passed,
                                  const tw_tensor* initial_states, const tw_tensor* final_states, void* cuda_stream);

/* causal: 1: cb is 0 above the diagonal. */
tw_status tw_mamba2_bmm_chunk(const tw_tensor* c, const tw_tensor* b, const tw_tensor* cb, int32_t causal, void* cuda_stream);

typedef struct {
  size_t struct_size;
  const tw_tensor *d, *z;
  const tw_tensor* ungated; /* output: y before the gate; may be null */
} tw_mamba2_chunk_scan_options;

/* states: tw_mamba2_state_passing's `passed`, of x's type. */
tw_status tw_mamba2_chunk_scan(const tw_tensor* cb, const tw_tensor* x, const tw_tensor* dt, const tw_tensor* da_cumsum, const tw_tensor* c,
                               const tw_tensor* states, const tw_tensor* y, const tw_mamba2_chunk_scan_options* options, void* cuda_stream);

/* Gradients of the five steps. Those of the steps' outputs are inputs here, and d_states, d_passed and d_cb are f32, whatever the type of
 * states, passed and cb. Each other gradient has the shape and type of what it is the gradient of. */
typedef struct {
  size_t struct_size;
  const tw_tensor* dt_bias;
  int32_t dt_softplus;
  int32_t has_dt_limit;
  float dt_min, dt_max;
  const tw_tensor* seq_idx;
  const tw_tensor *da, *d_dt_bias; /* outputs; each may be null */
} tw_mamba2_chunk_cumsum_backward_options;

tw_status tw_mamba2_chunk_cumsum_backward(const tw_tensor* dt, const tw_tensor* a, const tw_tensor* d_da_cumsum, const tw_tensor* d_dt_out,
                                          const tw_tensor* d_dt, const tw_mamba2_chunk_cumsum_backward_options* options, void* cuda_stream);

tw_status tw_mamba2_chunk_state_backward(const tw_tensor* b, const tw_tensor* x, const tw_tensor* dt, const tw_tensor* da_cumsum,
                                         const tw_tensor* d_states, const tw_tensor* db, const tw_tensor* dx, const tw_tensor* d_dt,
                                         const tw_tensor* d_da_cumsum, void* cuda_stream);

/* d_states: the gradient of tw_mamba2_state_passing's states. d_final_states, an input, and d_initial_states, an output, may be null. */
tw_status tw_mamba2_state_passing_backward(const tw_tensor* passed, const tw_tensor* da_chunk_cumsum, const tw_tensor* d_passed,
                                           const tw_tensor* d_states, const tw_tensor* d_da_chunk_cumsum, const tw_tensor* d_final_states,
                                           const tw_tensor* d_initial_states, void* cuda_stream);

tw_status tw_mamba2_bmm_chunk_backward(const tw_tensor* c, const tw_tensor* b, const tw_tensor* d_cb, const tw_tensor* dc,
                                       const tw_tensor* db, int32_t causal, void* cuda_stream);

typedef struct {
  size_t struct_size;
  const tw_tensor *d, *z;
  const tw_tensor* ungated; /* with z: y before the gate */
  const tw_tensor *dd, *dz; /* outputs; dd may be null, dz only without z */
} tw_mamba2_chunk_scan_backward_options;

tw_status tw_mamba2_chunk_scan_backward(const tw_tensor* cb, const tw_tensor* x, const tw_tensor* dt, const tw_tensor* da_cumsum,
                                        const tw_tensor* c, const tw_tensor* states, const tw_tensor* dy, const tw_tensor* d_cb,
                                        const tw_tensor* dx, const tw_tensor* d_dt, const tw_tensor* d_da_cumsum, const tw_tensor* dc,
                                        const tw_tensor* d_states, const tw_mamba2_chunk_scan_backward_options* options, void* cuda_stream);

/* tw::CacheOptions. */
typedef struct {
  size_t struct_size;
  const tw_tensor *seqlens, *batch_idx, *leftpad, *block_table; /* i32 */
  const tw_tensor *new_k, *new_v;
  const tw_tensor *rotary_cos, *rotary_sin;
  int32_t rotary_interleaved;      /* 1: pairs 2 k, 2 k + 1 instead of k, k + rotary_dim / 2 */
  int32_t num_splits;              /* splits of a sequence's keys; 0: the library's choice */
  const tw_tensor* cu_seqlens_q;   /* i32 [batch + 1]: q, o and lse are packed */
  const tw_tensor* cu_seqlens_new; /* i32 [batch + 1]: new_k and new_v are packed */
} tw_cache_options;

tw_status tw_attention_decode(const tw_tensor* q, const tw_tensor* k_cache, const tw_tensor* v_cache, const tw_tensor* o,
                              const tw_cache_options* cache, const tw_attention_options* options, void* cuda_stream);

/* tw::DecodeProblem. */
typedef struct {
  size_t struct_size;
  int32_t cuda_device; /* less than 0: the CPU */
  int32_t attention_chunk, sm_margin;
  int64_t batch, seqlen_q, heads, kv_heads;
  int64_t seqlen_k; /* the longest sequence's, with new keys */
} tw_decode_problem;

/* tw::decode_plan: for num_splits of tw_cache_options. Enqueues nothing. */
tw_status tw_decode_plan(const tw_decode_problem* problem, int32_t* num_splits);

/* tw::MlaOptions: tilewave/mla.hpp. */
typedef struct {
  size_t struct_size;
  const tw_tensor *seqlens, *block_table; /* i32 */
  float scale;                            /* softmax scale; 0: 1 / sqrt(576) */
  int32_t not_causal;                     /* 1: every new token sees all keys */
  const tw_tensor* lse;                   /* output, f32 [batch, heads, seqlen_q] */
  int64_t max_seqlen;                     /* 0: the capacity */
  int32_t num_splits;                     /* splits of a sequence's keys; 0: the library's choice */
  int32_t check_contents;                 /* 1: wait, and refuse wrong lengths and page numbers */
} tw_mla_options;

/* q: [batch, seqlen_q, heads, 576]; kv_cache: [batch, capacity, 576] or with a block_table [pages, page_size, 576]; o: [batch, seqlen_q,
 * heads, 512]. A cache of 8 bits is of TW_U8 or TW_FP8_E4M3, with 656 columns. */
tw_status tw_mla_decode(const tw_tensor* q, const tw_tensor* kv_cache, const tw_tensor* o, const tw_mla_options* options,
                        void* cuda_stream);

/* tw::MlaSparseOptions. */
typedef struct {
  size_t struct_size;
  const tw_tensor *topk_length, *sink; /* i32 [tokens], f32 [heads] */
  float scale;                         /* softmax scale; 0: 1 / sqrt(576) */
  int32_t num_splits;                  /* splits of a list; 0: the library's choice */
  const tw_tensor *lse, *max_logits;   /* outputs, f32 [tokens, heads] */
} tw_mla_sparse_options;

/* q: [tokens, heads, 576]; kv: [kv_tokens, 576] or [pages, page_size, 576], or of 8 bits as in tw_mla_decode; indices: i32 [tokens, topk];
 * o: [tokens, heads, 512]. */
tw_status tw_mla_sparse(const tw_tensor* q, const tw_tensor* kv, const tw_tensor* indices, const tw_tensor* o,
                        const tw_mla_sparse_options* options, void* cuda_stream);

/* tw::MlaSparseBackwardOptions. */
typedef struct {
  size_t struct_size;
  const tw_tensor* topk_length; /* i32 [tokens] */
  float scale;                  /* softmax scale; 0: 1 / sqrt(576) */
  int32_t deterministic;        /* 1: the same bits in every run */
} tw_mla_sparse_backward_options;

/* q, kv [kv_tokens, 576], indices: those of tw_mla_sparse; o, lse: its results. Outputs: dq, of q's shape; dkv, of kv's shape, in f32 or of
 * kv's dtype. */
tw_status tw_mla_sparse_backward(const tw_tensor* q, const tw_tensor* kv, const tw_tensor* indices, const tw_tensor* o,
                                 const tw_tensor* lse, const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dkv,
                                 const tw_mla_sparse_backward_options* options, void* cuda_stream);

/* tw::MlaAppendOptions. */
typedef struct {
  size_t struct_size;
  const tw_tensor *seqlens, *block_table; /* i32; seqlens: the tokens before this call */
  const tw_tensor *rotary_cos, *rotary_sin;
  int32_t rotary_half_split; /* 1: pairs k, k + 32 instead of 2 k, 2 k + 1 */
  int32_t check_contents;
} tw_mla_append_options;

/* latent: [batch, seqlen_new, 512]; rotary: [batch, seqlen_new, 64]; kv_cache, which is written: as in tw_mla_decode. */
tw_status tw_mla_append(const tw_tensor* latent, const tw_tensor* rotary, const tw_tensor* kv_cache, const tw_mla_append_options* options,
                        void* cuda_stream);

/* tw::IndexerOptions. */
typedef struct {
  size_t struct_size;
  const tw_tensor* k_scale;       /* f32 [keys]: for keys of e4m3 */
  const tw_tensor *starts, *ends; /* i32 [queries] */
  int32_t causal;                 /* 1: query i sees at most the first keys - queries + i + 1 keys */
  int32_t no_clear;               /* 1: scores of keys that a query does not see are left as they are instead of -infinity */
  int32_t num_splits;             /* splits of the keys; 0: the library's choice */
} tw_indexer_options;

/* q: [queries, heads, 128]; k: [keys, 128]; weights: f32 [queries, heads]; scores: f32 [queries, keys]. */
tw_status tw_indexer_scores(const tw_tensor* q, const tw_tensor* k, const tw_tensor* weights, const tw_tensor* scores,
                            const tw_indexer_options* options, void* cuda_stream);

/* tw::IndexerPagedOptions. */
typedef struct {
  size_t struct_size;
  const tw_tensor* seqlens; /* i32 [batch] or [batch, seqlen_q] */
  int32_t not_causal;       /* 1: every query of a sequence sees all of its keys */
  int32_t no_clear, num_splits;
} tw_indexer_paged_options;

/* q: e4m3 [batch, seqlen_q, heads, 128]; k_cache: [pages, 64, 132]; weights: f32 [batch, seqlen_q, heads]; block_table: i32 [batch, pages];
 * scores: f32 [batch, seqlen_q, columns]. */
tw_status tw_indexer_scores_paged(const tw_tensor* q, const tw_tensor* k_cache, const tw_tensor* weights, const tw_tensor* block_table,
                                  const tw_tensor* scores, const tw_indexer_paged_options* options, void* cuda_stream);

/* tw::NsaOptions. All integers are i32. */
typedef struct {
  size_t struct_size;
  int32_t block_size; /* tokens of a block; 0: 64 */
  float scale;
  const tw_tensor* block_counts;                        /* [batch, seqlen, kv_heads] */
  const tw_tensor *cu_seqlens, *cu_seqlens_k, *seqlens; /* [sequences + 1] twice; [batch] */
  const tw_tensor* lse;                                 /* output, f32 [batch, seqlen, heads] */
} tw_nsa_options;

/* q, o: [batch, seqlen, heads, dim]; k, v: [batch, keys, kv_heads, dim]; block_indices: i32 [batch, seqlen, kv_heads, slots]. */
tw_status tw_nsa_selected(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* block_indices, const tw_tensor* o,
                          const tw_nsa_options* options, void* cuda_stream);
/* The same for compressed keys, without lists. */
tw_status tw_nsa_compressed(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_nsa_options* options,
                            void* cuda_stream);
/* Gradients; options->lse is ignored. */
tw_status tw_nsa_selected_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* block_indices,
                                   const tw_tensor* o, const tw_tensor* lse, const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dk,
                                   const tw_tensor* dv, const tw_nsa_options* options, void* cuda_stream);
tw_status tw_nsa_compressed_backward(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* o, const tw_tensor* lse,
                                     const tw_tensor* d_o, const tw_tensor* dq, const tw_tensor* dk, const tw_tensor* dv,
                                     const tw_nsa_options* options, void* cuda_stream);

/* tw::NsaSelectOptions. */
typedef struct {
  size_t struct_size;
  int32_t block_size; /* 0: 64 */
  float scale;
  int32_t initial_blocks, local_blocks; /* always taken; 0: 1 and 2; -1: none */
  const tw_tensor *cu_seqlens, *cu_seqlens_k, *seqlens;
} tw_nsa_select_options;

/* q, k: those of tw_nsa_compressed; lse: its result; block_indices, which is written: i32 [batch, seqlen, kv_heads, slots]. */
tw_status tw_nsa_select(const tw_tensor* q, const tw_tensor* k, const tw_tensor* lse, const tw_tensor* block_indices,
                        const tw_nsa_select_options* options, void* cuda_stream);

/* o = the sum over n < 3 of gates[n] outputs[n]; null outputs are left out. outputs: [batch, seqlen, heads, dim]; gates: [batch, seqlen,
 * heads]. */
tw_status tw_nsa_combine(const tw_tensor* o, const tw_tensor* output0, const tw_tensor* gate0, const tw_tensor* output1,
                         const tw_tensor* gate1, const tw_tensor* output2, const tw_tensor* gate2, void* cuda_stream);

/* tw::VerticalSlashOptions. */
typedef struct {
  size_t struct_size;
  int32_t query_block; /* 64 or 128; 0: 64 */
  float scale;
  const tw_tensor* seqlens; /* i32 [batch] */
  const tw_tensor* lse;     /* output, f32 [batch, heads, seqlen] */
} tw_vertical_slash_options;

/* q, o: [batch, seqlen, heads, dim]; k, v: [batch, seqlen, kv_heads, dim]; vertical: i32 [batch, heads, columns]; slash: i32 [batch, heads,
 * slashes]. */
tw_status tw_vertical_slash_attention(const tw_tensor* q, const tw_tensor* k, const tw_tensor* v, const tw_tensor* vertical,
                                      const tw_tensor* slash, const tw_tensor* o, const tw_vertical_slash_options* options,
                                      void* cuda_stream);
/* Lists, all i32: block_count, column_count: [batch, heads, blocks]; block_offset: [batch, heads, blocks, slashes]; column_index: [batch,
 * heads, blocks, columns]. options->scale and options->lse are ignored. */
tw_status tw_vertical_slash_index(const tw_tensor* vertical, const tw_tensor* slash, int64_t seqlen, const tw_tensor* block_count,
                                  const tw_tensor* block_offset, const tw_tensor* column_count, const tw_tensor* column_index,
                                  const tw_vertical_slash_options* options, void* cuda_stream);

/* Speech to text: tilewave/speech.hpp in C, in the library tilewave_speech.
 *
 * Structures begin with their size, which the caller sets to sizeof the structure. Fields that are 0 have their default, so
 * `tw_transcribe_options options = {sizeof options};` is a complete initialisation, also with later versions. Null options mean all
 * defaults. Strings are UTF-8. */

typedef struct tw_transcriber tw_transcriber; /* a loaded model; several threads may use it, one call runs at a time */
typedef struct tw_transcript tw_transcript;   /* a result; owned by the caller */

typedef struct {
  size_t struct_size;
  const char* device;                                      /* "auto" (default), "cpu", "cuda" or "cuda:N" */
  const char* dtype;                                       /* "auto" (default), "f32", "bf16" or "f16" */
  void (*progress)(void* user, int64_t done, int64_t all); /* bytes of weights read so far, and in total */
  void* user;
  const char* mmproj;  /* of a model in GGUF files: the one with the audio encoder; null for a directory */
  const char* weights; /* of linear layers: "plain" (default), "int8", "fp8", "int4", "int4:128", "int4:32:zeros" ... */
} tw_load_options;

typedef enum { TW_SEGMENTATION_AUTOMATIC = 0, TW_SEGMENTATION_NONE = 1, TW_SEGMENTATION_VAD = 2 } tw_segmentation;

typedef struct {
  size_t struct_size;
  tw_segmentation segmentation;
  const char* prompt;     /* replaces the checkpoint's */
  int32_t max_new_tokens; /* per segment; default 500 */
  int32_t batch;          /* default 8 */
  double temperature;     /* default 0: greedy */
  double top_p;           /* default 1 */
  uint64_t seed;
  int32_t (*on_text)(void* user, const char* text, size_t bytes); /* text as it is produced; return non-zero to stop with TW_CANCELLED */
  void* user;
} tw_transcribe_options;

typedef struct {
  size_t struct_size;
  double begin, end;     /* seconds */
  const char* text;      /* valid as long as the transcript */
  const int32_t* tokens; /* the same */
  size_t token_count;
  int32_t truncated;  /* ended by a limit, not by the model */
  int32_t repetition; /* ended because the model repeated itself */
} tw_transcript_segment;

/* Loads a checkpoint: the directory `model`, or with options->mmproj the GGUF file `model`. *transcriber is set on success only. */
tw_status tw_transcriber_load(const char* model, const tw_load_options* options, tw_transcriber** transcriber);
void tw_transcriber_free(tw_transcriber* transcriber); /* null is fine */

/* Transcribes a file (WAV, FLAC, OGG, Opus, MP3), or mono samples at 16 kHz (at most a week). *transcript is set on success only. */
tw_status tw_transcribe_file(const tw_transcriber* transcriber, const char* file, const tw_transcribe_options* options,
                             tw_transcript** transcript);
tw_status tw_transcribe_samples(const tw_transcriber* transcriber, const float* samples, size_t count, const tw_transcribe_options* options,
                                tw_transcript** transcript);
/* Mono samples at 16 kHz from samples at `rate` Hz, 1000 to 768000. *out_count: on input the capacity of `out`, for which ceil(count *
 * 16000 / rate) is enough; on output the number of samples written. */
tw_status tw_resample(const float* samples, size_t count, int32_t rate, float* out, size_t* out_count);
void tw_transcript_free(tw_transcript* transcript); /* null is fine */

/* The texts of all segments, joined by spaces; valid as long as the transcript. */
const char* tw_transcript_text(const tw_transcript* transcript);
size_t tw_transcript_segment_count(const tw_transcript* transcript);
/* Fills *segment; the caller sets its struct_size first. TW_INVALID_ARGUMENT if the index is not below the count. */
tw_status tw_transcript_segment_at(const tw_transcript* transcript, size_t index, tw_transcript_segment* segment);

/* A recording: mono samples at 16 kHz. */
typedef struct tw_audio tw_audio;

/* Decodes a file, or a file's bytes; messages of errors begin with `name`. *audio is set on success only. */
tw_status tw_audio_read_file(const char* file, tw_audio** audio);
tw_status tw_audio_read_bytes(const void* bytes, size_t count, const char* name, tw_audio** audio);
const float* tw_audio_samples(const tw_audio* audio); /* valid as long as the audio */
size_t tw_audio_sample_count(const tw_audio* audio);
void tw_audio_free(tw_audio* audio); /* null is fine */

/* tilewave/speech_engine.hpp: a loaded model that many requests share, at any time and from any thread. One thread at a time makes
 * progress, in tw_engine_step or tw_engine_run, and calls the callbacks. */
typedef struct tw_engine tw_engine;

typedef struct {
  size_t struct_size;
  int32_t batch;          /* sequences that are decoded together, 1 to 16 on the CPU, to 256 on a GPU; default 16, or 64 on a GPU */
  int32_t prefill_tokens; /* tokens of prompts to process between two decoding steps; default 1024, or 4096 on a GPU */
  int64_t cache_tokens;   /* tokens that the key-value cache holds; default 1024 for each of `batch` */
  size_t queue;           /* requests that may wait; default 256 */
} tw_engine_options;

/* How a request ended. Valid during the callback. */
typedef struct {
  size_t struct_size;
  tw_status status;           /* TW_CANCELLED after tw_engine_cancel, tw_engine_free, or when on_text said so */
  const char* error;          /* the message; "" for TW_OK */
  tw_transcript* transcript;  /* for TW_OK; now the callee's, which calls tw_transcript_free */
  double waiting, first_text; /* seconds from submission to the first stage, and to the first token (0: none) */
  double total;               /* seconds from submission to the end */
} tw_completion;

typedef void (*tw_on_done)(void* user, const tw_completion* completion);

typedef struct {
  size_t struct_size;
  size_t waiting, running, sequences; /* requests not begun, begun; segments in the decoding batch */
  int64_t cache_tokens, cache_tokens_used;
} tw_engine_counters;

tw_status tw_engine_load(const char* model, const tw_load_options* load, const tw_engine_options* options, tw_engine** engine);
/* Requests that have not ended end with TW_CANCELLED. tw_engine_run must have returned. Null is fine. */
void tw_engine_free(tw_engine* engine);

/* Queues a request and copies its samples (mono, 16 kHz). `client`: clients get equal shares of the work. `on_done` is called once, unless
 * this fails: TW_QUEUE_FULL, TW_INVALID_ARGUMENT. options->batch must be 0. `id`, which may be null, is for tw_engine_cancel. Callbacks
 * may submit and cancel. */
tw_status tw_engine_submit(tw_engine* engine, const float* samples, size_t count, const tw_transcribe_options* options, uint64_t client,
                           tw_on_done on_done, void* user, uint64_t* id);
/* Ends a request at the next step. Nothing happens if it has ended already. */
tw_status tw_engine_cancel(tw_engine* engine, uint64_t id);
/* Does the next piece of work. *more, unless null: 1 if there is more to do. */
tw_status tw_engine_step(tw_engine* engine, int32_t* more);
/* Calls tw_engine_step, and sleeps while there is nothing to do, until tw_engine_stop. */
tw_status tw_engine_run(tw_engine* engine);
tw_status tw_engine_stop(tw_engine* engine); /* any thread; for good */
/* Fills *counters; the caller sets its struct_size first. Any thread. */
tw_status tw_engine_read_counters(const tw_engine* engine, tw_engine_counters* counters);

#ifdef __cplusplus
}
#endif

#endif /* TILEWAVE_H */
