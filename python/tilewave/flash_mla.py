"""FlashMLA's public functions for decoding (github.com/deepseek-ai/FlashMLA), by its names and argument order, on Tilewave's kernels.

    tile_scheduler_metadata, num_splits = get_mla_metadata(cache_seqlens, s_q * h_q, 1)
    for layer in layers:
        o, lse = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, tile_scheduler_metadata, num_splits, softmax_scale, causal=True)

Tensors are PyTorch's, on CUDA or on the CPU, in bfloat16 or float16. There is one head of keys, of 576 columns, whose first 512 are the
value. A cache may have 8 bits, with q in bfloat16. Sparse attention (`indices`, `topk`) raises NotImplementedError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import ops

if TYPE_CHECKING:
    import torch

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]

_KEY_DIM, _VALUE_DIM, _FP8_BYTES = 576, 512, 656


def _one_head(name: str, heads: int) -> None:
    if heads != 1:
        raise NotImplementedError(f"{name} is {heads}; tilewave supports only 1: all heads share their keys")


def get_mla_metadata(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What flash_mla_with_kvcache() takes as tile_scheduler_metadata and num_splits, for all layers of a decoding step.

    cache_seqlens: int32 [batch]. num_q_tokens_per_head_k: seqlen_q * heads. Tilewave splits each sequence's keys evenly and chooses the number
    of splits from the shapes of the call, so both results, int32 [1, 8] and int32 [batch + 1] on cache_seqlens' device, are placeholders.
    """
    _one_head("num_heads_k", num_heads_k)
    if topk is not None:
        raise NotImplementedError(f"topk is {topk}; tilewave supports only None")
    if num_q_tokens_per_head_k <= 0:
        raise ValueError(f"num_q_tokens_per_head_k is {num_q_tokens_per_head_k}; it must be positive")
    return cache_seqlens.new_zeros((1, 8)), cache_seqlens.new_zeros((cache_seqlens.shape[0] + 1,))


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [batch, seqlen_q, heads, 512] and lse, f32 [batch, heads, seqlen_q], the natural logarithm of the softmax's denominator.

    q: [batch, seqlen_q, heads, 576]; k_cache: [pages, page_size, 1, 576], or with is_fp8_kvcache 656 bytes of uint8 or float8_e4m3fn: 512 of
    e4m3, four float32 scales, 64 columns of bfloat16; block_table: int32 [batch, pages of a sequence]; cache_seqlens: int32
    [batch], the new tokens included. Any page_size. softmax_scale: default 576 ** -0.5. causal: token i of q sees the first seqlen -
    seqlen_q + i + 1 keys. tile_scheduler_metadata and num_splits are get_mla_metadata()'s and not read. A query that sees no key has o = 0
    and, as in FlashMLA, lse = +inf.
    """
    if indices is not None:
        raise NotImplementedError("indices are given; tilewave supports only None")
    if head_dim_v != _VALUE_DIM:
        raise NotImplementedError(f"head_dim_v is {head_dim_v}; tilewave supports only {_VALUE_DIM}")
    columns = _FP8_BYTES if is_fp8_kvcache else _KEY_DIM
    if k_cache.dim() != 4 or k_cache.shape[3] != columns:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}; it must be [pages, page_size, 1, {columns}]")
    _one_head("k_cache.shape[2]", k_cache.shape[2])
    o, lse = ops.mla_decode(
        q,
        k_cache.select(2, 0),
        seqlens=cache_seqlens.contiguous(),
        block_table=block_table,
        scale=softmax_scale,
        causal=causal,
        return_lse=True,
    )
    return o, lse.masked_fill(lse == -float("inf"), float("inf"))
