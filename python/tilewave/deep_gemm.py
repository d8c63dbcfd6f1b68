"""DeepGEMM's public functions for the lightning indexer of DeepSeek-V3.2 (github.com/deepseek-ai/DeepGEMM), by its names and argument order, on
Tilewave's kernels.

    logits = fp8_mqa_logits(q, (k, k_scale), weights, cu_seq_len_k_start, cu_seq_len_k_end)  # prefilling

    schedule_meta = get_paged_mqa_logits_metadata(context_lens, 64, num_sms)  # decoding
    logits = fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len)

Tensors are PyTorch's, on CUDA or on the CPU. Heads have 128 elements, of float8_e4m3fn; there are up to 128. Pages have 64 keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import ops

if TYPE_CHECKING:
    import torch

__all__ = ["fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"]

_PAGE, _KEY_BYTES = 64, 132


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """logits[i, j] = scale[j] * sum over heads h of weights[i, h] * max(0, q[i, h] . k[j]) for start[i] <= j < end[i], otherwise -inf.

    q: [queries, heads, 128]; kv: k [keys, 128] and its scales, float32 [keys]; weights: float32 [queries, heads]; cu_seq_len_k_start and
    cu_seq_len_k_end: int32 [queries]. Gives float32 [queries, keys]. Without clean_logits the others are not written. max_seqlen_k: 0; logits
    that begin at a query's first key are not supported.
    """
    if max_seqlen_k != 0:
        raise NotImplementedError(f"max_seqlen_k is {max_seqlen_k}; tilewave supports only 0")
    k, k_scale = kv
    return ops.indexer_scores(
        q, k, weights, k_scale=k_scale, starts=cu_seq_len_k_start, ends=cu_seq_len_k_end, clear=clean_logits
    )


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """What fp8_paged_mqa_logits() takes as schedule_meta, for all layers of a decoding step.

    context_lens: int32 [batch] or [batch, next_n]. Tilewave's blocks take the next part of a sequence when they have finished one, so the
    result, int32 [num_sms + 1, 2] on context_lens' device, is a placeholder. indices: None.
    """
    if block_kv != _PAGE:
        raise NotImplementedError(f"block_kv is {block_kv}; tilewave supports only {_PAGE}")
    if indices is not None:
        raise NotImplementedError("indices is given; tilewave supports only None")
    return context_lens.new_zeros((num_sms + 1, 2))


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same for decoding: float32 [batch * next_n, max_context_len].

    q: [batch, next_n, heads, 128]; kv_cache: uint8 [pages, 64, 1, 132], in each page 64 keys of 128 bytes and then their scales in float32;
    weights: float32 [batch * next_n, heads]; block_table: int32 [batch, pages of a sequence]. context_lens: int32 [batch], where query i of a
    sequence sees the first length - next_n + i + 1 keys, or [batch, next_n], the keys that each query sees. schedule_meta is not read.
    clean_logits: write -inf where a query does not see a key; otherwise nothing is written there. indices: None.
    """
    if indices is not None:
        raise NotImplementedError("indices is given; tilewave supports only None")
    if kv_cache.dim() != 4 or tuple(kv_cache.shape[1:]) != (_PAGE, 1, _KEY_BYTES):
        raise ValueError(f"kv_cache has shape {tuple(kv_cache.shape)}; it must be [pages, {_PAGE}, 1, {_KEY_BYTES}]")
    if q.dim() != 4 or weights.dim() != 2 or weights.shape[0] != q.shape[0] * q.shape[1]:
        raise ValueError(f"weights has shape {tuple(weights.shape)}; for q {tuple(q.shape)} it must be [batch * next_n, heads]")
    logits = ops.indexer_scores_paged(
        q,
        kv_cache.select(2, 0),
        weights.unflatten(0, q.shape[:2]),
        block_table,
        seqlens=context_lens,
        columns=max_context_len,
        clear=clean_logits,
    )
    return logits.flatten(0, 1)
