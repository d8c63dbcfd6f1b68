"""FlashMLA's public functions for decoding and for sparse prefilling (github.com/deepseek-ai/FlashMLA), by its names and argument order, on
Tilewave's kernels.

    tile_scheduler_metadata, num_splits = get_mla_metadata(cache_seqlens, s_q * h_q, 1)
    for layer in layers:
        o, lse = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, tile_scheduler_metadata, num_splits, softmax_scale, causal=True)

    out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, sm_scale)  # prefilling, with a list of keys for each token

Tensors are PyTorch's, on CUDA or on the CPU, in bfloat16 or float16. There is one head of keys, of 576 columns, whose first 512 are the
value. A cache may have 8 bits, with q in bfloat16. A second cache (`extra_k_cache`) raises NotImplementedError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import ops

if TYPE_CHECKING:
    import torch

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]

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

    cache_seqlens: int32 [batch]. num_q_tokens_per_head_k: seqlen_q * heads. topk: the length of lists of keys. Tilewave splits each sequence's keys evenly and chooses the number
    of splits from the shapes of the call, so both results, int32 [1, 8] and int32 [batch + 1] on cache_seqlens' device, are placeholders.
    """
    _one_head("num_heads_k", num_heads_k)
    if num_q_tokens_per_head_k <= 0:
        raise ValueError(f"num_q_tokens_per_head_k is {num_q_tokens_per_head_k}; it must be positive")
    return cache_seqlens.new_zeros((1, 8)), cache_seqlens.new_zeros((cache_seqlens.shape[0] + 1,))


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [batch, seqlen_q, heads, 512] and lse, f32 [batch, heads, seqlen_q], the natural logarithm of the softmax's denominator.

    q: [batch, seqlen_q, heads, 576]; k_cache: [pages, page_size, 1, 576], or with is_fp8_kvcache 656 bytes of uint8 or float8_e4m3fn: 512 of
    e4m3, four float32 scales, 64 columns of bfloat16; block_table: int32 [batch, pages of a sequence]; cache_seqlens: int32
    [batch], the new tokens included. Any page_size. softmax_scale: default 576 ** -0.5. causal: token i of q sees the first seqlen -
    seqlen_q + i + 1 keys. tile_scheduler_metadata and num_splits are get_mla_metadata()'s and not read. A query that sees no key has o = 0
    and, as in FlashMLA, lse = +inf.

    indices: int32 [batch, seqlen_q, topk], page * page_size + offset of the keys that each token sees, whatever the sequence; block_table and
    cache_seqlens are then not read, and causal must be False. -1 and other indices outside the cache select nothing. topk_length: int32
    [batch], how many entries of a sequence's lists count. attn_sink: float32 [heads]; exp(attn_sink) is added to the denominator of o, not
    to lse.
    """
    for name, value in (
        ("extra_k_cache", extra_k_cache),
        ("extra_indices_in_kvcache", extra_indices_in_kvcache),
        ("extra_topk_length", extra_topk_length),
    ):
        if value is not None:
            raise NotImplementedError(f"{name} is given; tilewave supports only None")
    if head_dim_v != _VALUE_DIM:
        raise NotImplementedError(f"head_dim_v is {head_dim_v}; tilewave supports only {_VALUE_DIM}")
    columns = _FP8_BYTES if is_fp8_kvcache else _KEY_DIM
    if k_cache.dim() != 4 or k_cache.shape[3] != columns:
        raise ValueError(f"k_cache has shape {tuple(k_cache.shape)}; it must be [pages, page_size, 1, {columns}]")
    _one_head("k_cache.shape[2]", k_cache.shape[2])
    if indices is not None:
        if causal:
            raise ValueError("causal is True; with indices it must be False: a list names the keys that its token sees")
        if q.dim() != 4 or indices.dim() != 3 or indices.shape[:2] != q.shape[:2]:
            raise ValueError(f"indices has shape {tuple(indices.shape)}; for q {tuple(q.shape)} it must be [batch, seqlen_q, topk]")
        batch, seqlen_q, heads, _ = q.shape
        o, lse = ops.mla_sparse(
            q.flatten(0, 1),
            k_cache.select(2, 0),
            indices.flatten(0, 1),
            topk_length=None if topk_length is None else topk_length.repeat_interleave(seqlen_q),
            scale=softmax_scale,
            sink=attn_sink,
            return_lse=True,
        )
        lse = lse.masked_fill(lse == -float("inf"), float("inf"))
        return o.unflatten(0, (batch, seqlen_q)), lse.unflatten(0, (batch, seqlen_q)).transpose(1, 2)
    for name, value in (("attn_sink", attn_sink), ("topk_length", topk_length)):
        if value is not None:
            raise NotImplementedError(f"{name} is given without indices; tilewave supports it only with them")
    if block_table is None or cache_seqlens is None:
        raise ValueError("block_table or cache_seqlens is None; without indices both are needed")
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


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out [s_q, heads, 512], max_logits and lse, both float32 [s_q, heads].

    q: [s_q, heads, 576]; kv: [s_kv, 1, 576]; indices: int32 [s_q, 1, topk] of any topk, where -1 and other numbers outside kv select nothing.
    attn_sink: float32 [heads]; exp(attn_sink) is added to the denominator of out, not to lse. topk_length: int32 [s_q], how many entries of
    each list count.

    max_logits is the largest sm_scale q k, and lse the natural logarithm of the sum of exp(sm_scale q k), as in FlashMLA since it has
    attn_sink; before that it returned both times log2(e). Where a token sees no key, out is 0, max_logits -inf and, as in FlashMLA, lse +inf.

    Without attn_sink out is differentiable with respect to q and kv: see ops.mla_sparse_backward().
    """
    if d_v != _VALUE_DIM:
        raise NotImplementedError(f"d_v is {d_v}; tilewave supports only {_VALUE_DIM}")
    if kv.dim() != 3:
        raise ValueError(f"kv has shape {tuple(kv.shape)}; it must be [s_kv, 1, {_KEY_DIM}]")
    if indices.dim() != 3:
        raise ValueError(f"indices has shape {tuple(indices.shape)}; it must be [s_q, 1, topk]")
    _one_head("kv.shape[1]", kv.shape[1])
    _one_head("indices.shape[1]", indices.shape[1])
    out, lse, max_logits = ops.mla_sparse(
        q,
        kv.select(1, 0),
        indices.select(1, 0),
        topk_length=topk_length,
        scale=sm_scale,
        sink=attn_sink,
        return_lse=True,
        return_max_logits=True,
    )
    return out, max_logits, lse.masked_fill(lse == -float("inf"), float("inf"))
