"""Block-sparse and vertical-slash attention by the names and the order of arguments of published packages, on Tilewave's kernels.

    from tilewave.sparse import block_sparse_attn_func  # instead of block_sparse_attn (github.com/mit-han-lab/Block-Sparse-Attention)
    from tilewave.sparse import flash_attn_with_kvcache  # FlashAttention's, of the blocks that a mask or indices select
    from tilewave.sparse import top_k_blocks, threshold_blocks  # from SeerAttention-like gates or pooled scores to a mask
    from tilewave.sparse import vertical_slash_sparse_attention  # instead of minference (github.com/microsoft/MInference)
    from tilewave.sparse import estimate_vertical_slash  # MInference's choice of columns and slashes, from the last queries

Tensors are PyTorch's. What is not supported raises NotImplementedError with the name of the argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _arrays
from .ops import block_sparse_attention, block_sparse_decode, vertical_slash_attention, vertical_slash_index

if TYPE_CHECKING:
    import torch

__all__ = [
    "block_sparse_attn_func",
    "convert_vertical_slash_indexes",
    "estimate_vertical_slash",
    "flash_attn_with_kvcache",
    "threshold_blocks",
    "top_k_blocks",
    "vertical_slash_sparse_attention",
]

_BLOCK = 128


def _torch(x):
    """PyTorch, which need not be installed to import this module."""
    torch = _arrays.torch_of(x)
    if torch is None:
        raise TypeError(f"{type(x).__name__} is given; PyTorch tensors are taken")
    return torch


def block_sparse_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    head_mask_type: torch.Tensor,
    streaming_info: torch.Tensor | None,
    base_blockmask: torch.Tensor | None,
    max_seqlen_q_: int,
    max_seqlen_k_: int,
    p_dropout: float = 0.0,
    deterministic: bool = False,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    exact_streaming: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, None]:
    """Attention of packed sequences, [total, heads, head_dim], some of whose heads see blocks of 128 x 128 only.

    head_mask_type: int32 [heads]: 0 for a head that sees all keys; 1 for one with blocks, of which the n-th has base_blockmask[:, n - 1].
    Heads of -1, which stream, are not supported; streaming_info is not read. base_blockmask: bool [batch, heads with blocks, query blocks, key
    blocks], of at least the longest sequence. Waits for head_mask_type if that is on a GPU. Gives o, or with return_attn_probs (o, lse, None),
    where lse is float32 [heads, total_q]. Differentiable with respect to q, k and v.
    """
    torch = _torch(q)
    if p_dropout:
        raise NotImplementedError(f"p_dropout is {p_dropout}; only 0 is supported")
    if exact_streaming:
        raise NotImplementedError("exact_streaming is True; streaming heads are not supported")
    types = head_mask_type.tolist()
    if any(t < 0 for t in types):
        raise NotImplementedError("head_mask_type has negative entries; streaming heads are not supported")
    if len(types) != q.shape[1]:
        raise ValueError(f"head_mask_type has {len(types)} entries; q has {q.shape[1]} heads")
    sparse = sum(t > 0 for t in types)
    given = 0 if base_blockmask is None else base_blockmask.shape[1]
    if given != sparse:
        raise ValueError(f"base_blockmask has {given} heads; head_mask_type has {sparse} heads with blocks")
    batch = cu_seqlens_q.shape[0] - 1
    if base_blockmask is None:
        query_blocks, key_blocks = ((n + _BLOCK - 1) // _BLOCK for n in (max_seqlen_q_, max_seqlen_k_))
    else:
        query_blocks, key_blocks = base_blockmask.shape[2:]
    if sparse == len(types):
        mask = base_blockmask.bool()
    else:
        mask = torch.ones(batch, len(types), query_blocks, key_blocks, dtype=torch.bool, device=q.device)
        if sparse:
            heads = torch.tensor([head for head, t in enumerate(types) if t > 0], device=q.device)
            mask[:, heads] = base_blockmask.bool()
    o = block_sparse_attention(
        q,
        k,
        v,
        block_mask=mask,
        query_block=_BLOCK,
        key_block=_BLOCK,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        scale=softmax_scale,
        causal=is_causal,
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    return (*o, None) if return_attn_probs else o


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    block_mask: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    block_counts: torch.Tensor | None = None,
    block_size: int = 64,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """FlashAttention 2's flash_attn_with_kvcache() of the blocks of block_size keys, 64 or 128, that are selected for each key head.

    block_mask: bool [batch or 1, kv_heads or 1, blocks of the capacity]. Or block_indices: int32 [batch or 1, kv_heads or 1, entries], in any
    order, where numbers outside the blocks, such as -1, are ignored, with block_counts: int32 [batch or 1, kv_heads or 1], or without. Keys are
    not written: k, v and the rotary tables are not supported.
    """
    torch = _torch(q)
    for name, x in (("k", k), ("v", v), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin), ("alibi_slopes", alibi_slopes)):
        if x is not None:
            raise NotImplementedError(f"{name} is given; it is not supported with blocks")
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    for name, x, dims in (("block_mask", block_mask, 3), ("block_indices", block_indices, 3), ("block_counts", block_counts, 2)):
        if x is not None and x.dim() != dims:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have {dims} dimensions")
    return block_sparse_decode(
        q,
        k_cache,
        v_cache,
        block_mask=None if block_mask is None else block_mask.unsqueeze(2),
        block_indices=None if block_indices is None else block_indices.unsqueeze(2),
        block_counts=None if block_counts is None else block_counts.unsqueeze(2),
        key_block=block_size,
        seqlens=cache_seqlens,
        batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        block_table=block_table,
        num_splits=num_splits,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        return_lse=return_softmax_lse,
    )


def _visible(scores, causal):
    """Which blocks a causal mask leaves, aligned with the last blocks: [query_blocks, key_blocks]."""
    torch = _torch(scores)
    queries, keys = scores.shape[-2:]
    visible = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
    return visible.tril(keys - queries) if causal else visible


def _dense_rows(mask, visible, dense_last):
    if dense_last < 0:
        raise ValueError(f"dense_last is {dense_last}; it must be 0 or more")
    if dense_last:
        mask[..., -dense_last:, :] = visible[-dense_last:, :]
    return mask


def top_k_blocks(scores: torch.Tensor, k: int, *, causal: bool = False, dense_last: int = 0) -> torch.Tensor:
    """A mask of the k blocks of keys with the largest scores, for each block of queries: bool, of the shape of scores, [..., query_blocks,
    key_blocks], on their device, without waiting for it.

    causal: only blocks up to the diagonal, which is aligned with the last blocks, are chosen from; a row with k or fewer of them has them
    all. NaN and -inf are never chosen. dense_last: so many last rows have all blocks that `causal` leaves.
    """
    torch = _torch(scores)
    if k < 0:
        raise ValueError(f"k is {k}; it must be 0 or more")
    visible = _visible(scores, causal)
    scores = scores.masked_fill(~visible | scores.isnan(), -float("inf"))
    values, chosen = scores.topk(min(k, scores.shape[-1]), dim=-1)
    mask = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device).scatter(-1, chosen, values != -float("inf"))
    return _dense_rows(mask, visible, dense_last)


def threshold_blocks(scores: torch.Tensor, threshold: float, *, causal: bool = False, dense_last: int = 0) -> torch.Tensor:
    """A mask of the blocks of keys whose scores are larger than a threshold: as top_k_blocks()."""
    visible = _visible(scores, causal)
    return _dense_rows((scores > threshold) & visible, visible, dense_last)


def _one_block(block_size_m, block_size_n):
    if block_size_m != block_size_n:
        raise NotImplementedError(f"block_size_M is {block_size_m} and block_size_N {block_size_n}; they must be equal, 64 or 128")
    return block_size_m


def _lists(name, x):
    """int32 and contiguous, as the kernels read them. Numbers that do not fit are not a key or a distance either way."""
    if x.dim() != 3:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have 3 dimensions")
    return x.clamp(-1, 2**31 - 1).int().contiguous() if x.dtype == _torch(x).int64 else x.int().contiguous()


def vertical_slash_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    v_idx: torch.Tensor,
    s_idx: torch.Tensor,
    block_size_M: int = 64,
    block_size_N: int = 64,
    *,
    softmax_scale: float | None = None,
    seqlens: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """MInference's causal attention, [batch, heads, seqlen, head_dim], of the columns v_idx, [batch, heads, columns], and the slashes s_idx,
    [batch, heads, slashes], distances of queries and keys. Both of any integer type and in any order.

    key and value may have fewer heads, by which query's are divided. block_size_M, block_size_N: 64 as in MInference, or 128: more keys beside
    the slashes, computed faster. seqlens: int32 [batch], tokens of each sequence, the first ones; others give 0. Gives o, and with
    return_lse lse: float32 [batch, heads, seqlen]. It has no gradient.
    """
    _torch(query)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have 4 dimensions")
    o = vertical_slash_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        _lists("v_idx", v_idx),
        _lists("s_idx", s_idx),
        query_block=_one_block(block_size_M, block_size_N),
        scale=softmax_scale,
        seqlens=seqlens,
        return_lse=return_lse,
    )
    return (o[0].transpose(1, 2), o[1]) if return_lse else o.transpose(1, 2)


def convert_vertical_slash_indexes(
    seqlens: torch.Tensor | None,
    vertical_indexes: torch.Tensor,
    slash_indexes: torch.Tensor,
    context_size: int,
    block_size_M: int = 64,
    block_size_N: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """MInference's lists (block_count, block_offset, column_count, column_index) of each block of block_size_M queries, of [batch, heads, any]
    columns and slashes. Where MInference's are defined, these are the same; the inputs need not be sorted or distinct, columns after the last
    block are there, and slashes may all be longer than the context."""
    _torch(vertical_indexes)
    return vertical_slash_index(
        _lists("vertical_indexes", vertical_indexes),
        _lists("slash_indexes", slash_indexes),
        context_size,
        query_block=_one_block(block_size_M, block_size_N),
        seqlens=seqlens,
    )


def estimate_vertical_slash(
    query: torch.Tensor,
    key: torch.Tensor,
    vertical_size: int,
    slash_size: int,
    *,
    last_queries: int = 64,
    first_columns: int = 30,
    first_distances: int = 30,
    softmax_scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """MInference's choice (v_idx, s_idx) for vertical_slash_sparse_attention(), int32 [batch, heads, vertical_size] and [batch, heads,
    slash_size], both at most seqlen.

    The last queries attend to all keys, with a causal mask: the columns are those with the largest sums of weights over these queries, the
    slashes those with the largest sums over a diagonal. The diagonal of distance d is that of query seqlen - last_queries + r and key
    seqlen - last_queries + r - d for all r that have one. The first columns and the first distances are always chosen, as many of them as
    there is room for. query: [batch, heads, seqlen, head_dim]; key: [batch, kv_heads, seqlen, head_dim].
    """
    torch = _torch(query)
    for name, x in (("query", query), ("key", key)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must have 4 dimensions")
    for name, size in (("vertical_size", vertical_size), ("slash_size", slash_size), ("last_queries", last_queries)):
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be 1 or more")
    (batch, heads, seqlen, head_dim), kv_heads = query.shape, key.shape[1]
    if heads % kv_heads or key.shape[2] != seqlen:
        raise ValueError(f"key has shape {tuple(key.shape)}; its heads must divide query's, {heads}, and its seqlen be {seqlen}")
    rows = min(last_queries, seqlen)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    visible = torch.ones(rows, seqlen, dtype=torch.bool, device=query.device).tril(seqlen - rows)
    columns, slashes = [], []
    for of_query, of_key in zip(query[:, :, seqlen - rows :].chunk(kv_heads, 1), key.split(1, 1)):  # scores of one head of keys at a time
        scores = (of_query.float() @ of_key.float().transpose(2, 3)) * scale
        weights = scores.masked_fill(~visible, -float("inf")).softmax(-1)
        of_columns = weights.sum(2)
        # Rows with one column more than `shifted` has: row r begins r columns later, so that a column is a diagonal, the largest distance first.
        shifted = torch.nn.functional.pad(weights, (rows - 1, 0)).contiguous()
        of_diagonals = shifted.as_strided(weights.shape, (*shifted.stride()[:2], shifted.shape[-1] + 1, 1)).sum(2).flip(-1)
        of_columns[..., :first_columns] = float("inf")
        of_diagonals[..., :first_distances] = float("inf")
        columns.append(of_columns.topk(min(vertical_size, seqlen), -1).indices.int())
        slashes.append(of_diagonals.topk(min(slash_size, seqlen), -1).indices.int())
    return torch.cat(columns, 1), torch.cat(slashes, 1)
