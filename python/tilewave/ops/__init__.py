"""The operations of the library, except the C++ templates attention_with and elementwise<F>, on NumPy arrays, PyTorch tensors and DLPack.
Arrays are not copied.

All arrays of a call are on one device, the CPU or a CUDA GPU. Results are new arrays of the first argument's kind, or `out`, which is
written and returned. On CUDA calls are enqueued on PyTorch's current stream and return. TypeError and ValueError name the argument that
does not fit and what is allowed; nothing is written then. DeviceError and CompileError (tilewave.DeviceError) come from the GPU.
"""

from .attention import attention, attention_backward, attention_decode, attention_dropout_mask, attention_varlen, attention_varlen_backward
from .bitnet import bit_linear, convert_bitnet, quantize_activations, quantize_ternary, ternary_gemm, unpack_ternary
from .blocks import block_sparse_attention, block_sparse_attention_backward, block_sparse_decode
from .elements import add, cast, embedding, gelu_erf, gelu_tanh, mul, silu, swiglu, swiglu_interleaved, transpose
from .indexer import indexer_scores, indexer_scores_paged
from .linear_attention import linear_attention, linear_attention_backward, linear_attention_step
from .mamba2 import mamba2, mamba2_backward, mamba2_step
from .mamba2_chunks import mamba2_bmm_chunk, mamba2_chunk_cumsum, mamba2_chunk_scan, mamba2_chunk_state, mamba2_state_passing
from .mla import mla_append, mla_decode, mla_sparse, mla_sparse_backward
from .moe import fused_moe, moe_combine, moe_dispatch, moe_dispatch_fp8, moe_experts, moe_permutation, moe_route
from .nsa import nsa_combine, nsa_compressed, nsa_compressed_backward, nsa_select, nsa_selected, nsa_selected_backward
from .products import (
    cast_fp8,
    cast_fp8_blocks,
    cast_fp8_grouped,
    cast_fp8_heads,
    cast_fp8_swiglu,
    conv1d,
    conv2d,
    convert_weight,
    dequant_gemm,
    dequantize,
    gemm,
    grouped_gemm,
    head_scales,
    k_grouped_gemm,
    quantize,
)
from .recurrences import (
    causal_conv1d,
    causal_conv1d_backward,
    causal_conv1d_update,
    gated_delta_rule,
    gated_delta_rule_backward,
    gated_delta_rule_step,
)
from .rows import argmax, hadamard, layer_norm, reduce, rms_norm, rope, rope_table, softmax, topk
from .sparse import block_sparse_gemm, compress_2_4, decompress_2_4, prune_2_4, sparse_gemm, sparse_linear
from .vertical_slash import vertical_slash_attention, vertical_slash_index

__all__ = [
    "add",
    "argmax",
    "attention",
    "attention_backward",
    "attention_decode",
    "attention_dropout_mask",
    "attention_varlen",
    "attention_varlen_backward",
    "bit_linear",
    "block_sparse_attention",
    "block_sparse_attention_backward",
    "block_sparse_decode",
    "block_sparse_gemm",
    "cast",
    "cast_fp8",
    "cast_fp8_blocks",
    "cast_fp8_grouped",
    "cast_fp8_heads",
    "cast_fp8_swiglu",
    "causal_conv1d",
    "causal_conv1d_backward",
    "causal_conv1d_update",
    "compress_2_4",
    "conv1d",
    "conv2d",
    "convert_bitnet",
    "convert_weight",
    "decompress_2_4",
    "dequant_gemm",
    "dequantize",
    "embedding",
    "fused_moe",
    "gated_delta_rule",
    "gated_delta_rule_backward",
    "gated_delta_rule_step",
    "gelu_erf",
    "gelu_tanh",
    "gemm",
    "grouped_gemm",
    "hadamard",
    "head_scales",
    "indexer_scores",
    "indexer_scores_paged",
    "k_grouped_gemm",
    "layer_norm",
    "linear_attention",
    "linear_attention_backward",
    "linear_attention_step",
    "mamba2",
    "mamba2_backward",
    "mamba2_bmm_chunk",
    "mamba2_chunk_cumsum",
    "mamba2_chunk_scan",
    "mamba2_chunk_state",
    "mamba2_state_passing",
    "mamba2_step",
    "mla_append",
    "mla_decode",
    "mla_sparse",
    "mla_sparse_backward",
    "moe_combine",
    "moe_dispatch",
    "moe_dispatch_fp8",
    "moe_experts",
    "moe_permutation",
    "moe_route",
    "mul",
    "nsa_combine",
    "nsa_compressed",
    "nsa_compressed_backward",
    "nsa_select",
    "nsa_selected",
    "nsa_selected_backward",
    "prune_2_4",
    "quantize",
    "quantize_activations",
    "quantize_ternary",
    "reduce",
    "rms_norm",
    "rope",
    "rope_table",
    "silu",
    "softmax",
    "sparse_gemm",
    "sparse_linear",
    "swiglu",
    "swiglu_interleaved",
    "ternary_gemm",
    "topk",
    "transpose",
    "unpack_ternary",
    "vertical_slash_attention",
    "vertical_slash_index",
]
