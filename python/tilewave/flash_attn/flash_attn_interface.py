"""FlashAttention 2's public functions (flash_attn.flash_attn_interface, version 2.8.3), by its names and with its semantics.

Tensors are PyTorch's, on CUDA in bfloat16 or float16, on the CPU also in float32. Head dimensions are 1 to 256; v's may differ from q's, up
to 512: above 256 the scores are computed once for each 256 of its columns. heads is a multiple of kv_heads: query head h uses key head
h // (heads // kv_heads).

flash_attn_func, flash_attn_varlen_func and their packed forms are differentiable, once, with respect to q, k and v: in bfloat16 and
float16, on the CPU in float32 too. The gradients of rows that belong to no sequence are 0. The backward of the functions with a cache, of
float32 on CUDA and of alibi_slopes raises NotImplementedError. The LSE does not require grad.

Query i is aligned with key i + seqlen_k - seqlen_q, the last query with the last key. `causal`: query i sees the keys up to that one.
window_size (left, right): the keys from `left` before it to `right` after it; a negative size is no bound, and `causal` makes right 0.
softmax_scale: default 1 / sqrt(headdim). softcap: scores become softcap * tanh(score / softcap); 0 is none. alibi_slopes: float32 [heads]
or [batch, heads], adds -slope * |i + seqlen_k - seqlen_q - j| to the score of query i and key j. Rows that see no key are 0.

The LSE is the natural logarithm of the softmax's denominator, float32; +inf for a row that sees no key. With alibi_slopes and `causal`
without a left bound FlashAttention 2 adds slope * j instead, and so does this LSE.

deterministic: the gradients have the same bits in every run.

dropout_p: each weight is 0 with this probability, in [0, 1) and rounded to a multiple of 1/256 but not to 0, else divided by 1 - dropout_p.
The seed is drawn from the generator of q's device. S_dmask, [batch, heads, seqlen_q, seqlen_k], is 1 for each weight that is kept and -1 for
each that is dropped; with dropout_p = 0 it is empty. Not with a block_table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .. import _flash, ops
from ..ops.attention import drawn_dropout_state

if TYPE_CHECKING:
    import torch

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _require_probability(dropout_p: float) -> None:
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}; allowed: 0 to less than 1")


def _dropout_signs(q: torch.Tensor, shape: tuple[int, ...], dropout_p: float, state: torch.Tensor | None) -> torch.Tensor:
    """S_dmask: 1 for each weight that is kept and -1 for each that is dropped, of q's dtype; empty without dropout."""
    import torch

    if state is None:
        return q.new_empty(0)
    kept = ops.attention_dropout_mask(torch.empty(shape, dtype=torch.bool, device=q.device), dropout_p, state)
    return torch.where(kept, q.new_ones(()), -q.new_ones(()))


def _adds_slope_times_key(alibi_slopes: torch.Tensor | None, causal: bool, window_size: tuple[int, int], seqlen_k: int) -> bool:
    """Whether FlashAttention 2 is on its causal path, where ALiBi is slope * j: ours plus slope * (i + seqlen_k - seqlen_q)."""
    return alibi_slopes is not None and (causal or window_size[1] == 0) and not 0 <= window_size[0] < seqlen_k


def _unseen_is_infinite(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == -math.inf, math.inf)


def _attend(
    q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs, deterministic, names=("q", "k", "v")
):
    state = drawn_dropout_state(q, dropout_p)
    out, lse = _flash.attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        dropout=(dropout_p, state),
        deterministic=deterministic,
        return_lse=return_attn_probs,
        names=names,
    )
    if not return_attn_probs:
        return out
    if _adds_slope_times_key(alibi_slopes, causal, window_size, k.shape[1]):
        import torch

        lse = lse + alibi_slopes[..., None] * (torch.arange(q.shape[1], device=q.device) + (k.shape[1] - q.shape[1]))
    return out, _unseen_is_infinite(lse), _dropout_signs(q, (q.shape[0], q.shape[2], q.shape[1], k.shape[1]), dropout_p, state)


def _attend_varlen(
    q,
    k,
    v,
    dropout_p,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    softcap,
    alibi_slopes,
    return_attn_probs,
    deterministic,
    names=("q", "k", "v"),
    offset_names=("cu_seqlens_q", "cu_seqlens_k"),
    block_table=None,
    max_seqlen_q=None,
):
    rules = {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "return_lse": return_attn_probs,
    }
    if block_table is None:
        state = drawn_dropout_state(q, dropout_p)
        out, lse = _flash.attend_varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            dropout=(dropout_p, state),
            deterministic=deterministic,
            names=names,
            offset_names=offset_names,
            **rules,
        )
    else:
        if dropout_p:
            raise _flash.unsupported("dropout_p with a block_table", dropout_p, "0.0")
        state = None
        cu_seqlens_q = _flash.int32("cu_seqlens_q", cu_seqlens_q, (-1,), q)
        cu_seqlens_k = _flash.int32("cu_seqlens_k", cu_seqlens_k, (cu_seqlens_q.shape[0],), q)
        out, lse = _flash.attend_cache(
            q,
            k,
            v,
            None,
            None,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            cache_seqlens=cu_seqlens_k.diff(),
            block_table=block_table,
            names=names,
            **rules,
        )
    if not return_attn_probs:
        return out
    if _adds_slope_times_key(alibi_slopes, causal, window_size, max_seqlen_k) and cu_seqlens_q.shape[0] > 1:
        sequence, place = _flash.sequences_of_tokens(cu_seqlens_q, q.shape[0])
        diagonal = (cu_seqlens_k.diff() - cu_seqlens_q.diff())[sequence]
        slopes = alibi_slopes[:, None] if alibi_slopes.dim() == 1 else alibi_slopes[sequence].T
        lse = lse + slopes * (place + diagonal)
    shape = (cu_seqlens_q.shape[0] - 1, q.shape[1], max_seqlen_q, max_seqlen_k)
    return out, _unseen_is_infinite(lse), _dropout_signs(q, shape, dropout_p, state)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """flash_attn_func of views of qkv [batch, seqlen, 3, heads, headdim], without copies."""
    _require_probability(dropout_p)
    q, k, v = _flash.unpack("qkv", qkv, 5, 3)
    rules = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attend(q, k, v, *rules, return_attn_probs, deterministic, ("qkv", "qkv", "qkv"))


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """flash_attn_func of q and of views of kv [batch, seqlen_k, 2, kv_heads, headdim], without copies."""
    _require_probability(dropout_p)
    _flash.refuse_fp8(q=q)
    k, v = _flash.unpack("kv", kv, 5, 2)
    rules = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attend(q, k, v, *rules, return_attn_probs, deterministic, ("q", "kv", "kv"))


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """softmax(q k^T * softmax_scale) v.

    q: [batch, seqlen_q, heads, headdim]; k: [batch, seqlen_k, kv_heads, headdim]; v: [batch, seqlen_k, kv_heads, headdim_v]. Gives out
    [batch, seqlen_q, heads, headdim_v], or with `return_attn_probs` (out, softmax_lse, S_dmask): softmax_lse [batch, heads, seqlen_q];
    S_dmask says which weights were dropped.
    """
    _require_probability(dropout_p)
    return _attend(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs, deterministic)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """flash_attn_varlen_func of views of qkv [total, 3, heads, headdim], all with cu_seqlens, without copies."""
    _require_probability(dropout_p)
    q, k, v = _flash.unpack("qkv", qkv, 4, 3)
    return _attend_varlen(
        q,
        k,
        v,
        dropout_p,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
        deterministic,
        names=("qkv", "qkv", "qkv"),
        offset_names=("cu_seqlens", "cu_seqlens"),
        max_seqlen_q=max_seqlen,
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
):
    """flash_attn_varlen_func of q and of views of kv [total_k, 2, kv_heads, headdim], without copies."""
    _require_probability(dropout_p)
    _flash.refuse_fp8(q=q)
    k, v = _flash.unpack("kv", kv, 4, 2)
    return _attend_varlen(
        q,
        k,
        v,
        dropout_p,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
        deterministic,
        names=("q", "kv", "kv"),
        max_seqlen_q=max_seqlen_q,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
):
    """flash_attn_func of packed sequences of different lengths.

    q: [total_q, heads, headdim]; k: [total_k, kv_heads, headdim]; v: [total_k, kv_heads, headdim_v]. cu_seqlens_q, cu_seqlens_k: int32
    [batch + 1]: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1; the same for its keys. Lengths may be 0. Gives out
    [total_q, heads, headdim_v], or with `return_attn_probs` (out, softmax_lse, S_dmask): softmax_lse [heads, total_q]; S_dmask is empty.

    block_table, int32 [batch, pages of a sequence]: k and v are paged, [pages, page_size, kv_heads, ...], as in flash_attn_with_kvcache.
    Then only the lengths in cu_seqlens_k are used.

    Lengths come from the offsets; max_seqlen_k is ignored. max_seqlen_q of 1 with a block_table and as many queries as sequences means
    one query for each.
    """
    _require_probability(dropout_p)
    return _attend_varlen(
        q,
        k,
        v,
        dropout_p,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        return_attn_probs,
        deterministic,
        block_table=block_table,
        max_seqlen_q=max_seqlen_q,
    )


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
):
    """Attention of few queries against a cache of keys and values. New keys and values may be appended first.

    q: [batch, seqlen_q, heads, headdim]. k_cache: [cache_batch, capacity, kv_heads, headdim] or, with a block_table, [pages, page_size,
    kv_heads, headdim]; v_cache likewise with headdim_v. Their last dimension is contiguous. k: [batch, seqlen_new, kv_heads, headdim] and v
    are written into the caches after the cache_seqlens tokens of each sequence. Gives out [batch, seqlen_q, heads, headdim_v], or with
    `return_softmax_lse` (out, softmax_lse): softmax_lse [batch, heads, seqlen_q].

    All int32: cache_seqlens, a number or [batch]; cache_batch_idx [batch], maps batch index to cache index, or to a row of the block_table;
    cache_leftpad [batch], the number of first tokens to ignore; block_table [tables, pages of a sequence]. num_splits: splits of the keys
    that run in parallel, at most 128; 0: the library's choice.

    rotary_cos, rotary_sin: [positions, rotary_dim / 2], which rotate new key i at position cache_seqlens + i, including left pad;
    query i too if `causal` or with a window, else at cache_seqlens. Pairs are 2 n and 2 n + 1 (`rotary_interleaved`), or n and
    n + rotary_dim / 2.

    Page sizes that are not a multiple of 16, and pages with cache_leftpad, are slower: the tokens in use are copied first. A headdim that
    is not a multiple of 8 costs copies of both caches.
    """
    _flash.refuse_fp8(q=q, k_cache=k_cache, v_cache=v_cache)
    cache_seqlens = _flash.cache_lengths(cache_seqlens, q)
    out, lse = _flash.attend_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        num_splits=num_splits,
        return_lse=return_softmax_lse,
    )
    if not return_softmax_lse:
        return out
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if _adds_slope_times_key(alibi_slopes, causal, window_size, capacity):
        import torch

        seqlens = torch.full((q.shape[0],), capacity, device=q.device) if cache_seqlens is None else cache_seqlens
        keys = seqlens + (0 if k is None else k.shape[1]) - (0 if cache_leftpad is None else cache_leftpad)
        lse = lse + alibi_slopes[..., None] * (torch.arange(q.shape[1], device=q.device) + (keys - q.shape[1])[:, None, None])
    return out, _unseen_is_infinite(lse)
