"""FlashAttention 3's public functions (flash-attention's hopper/flash_attn_interface.py), by its names and with its semantics.

Names, order and defaults of arguments and the values that are returned are those of commit 01afd16d248c4c7d0f9aed1914084f16c490eaed.
Compared with the file in version 2.8.3, return_attn_probs is new.

Tensors are PyTorch's, on CUDA in bfloat16 or float16, on the CPU in float32 too. Head dimensions are 1 to 256, and v's may differ from q's.
heads is a multiple of kv_heads: query head h uses key head h // (heads // kv_heads). There is no backward yet: a tensor that requires grad
is refused while gradients are recorded.

Query i stands beside key i + seqlen_k - seqlen_q, the last query beside the last key. `causal`: query i sees the keys up to that one.
window_size (left, right): those from `left` before it to `right` behind it; a negative size is no bound, and `causal` makes right 0.
softmax_scale: default 1 / sqrt(headdim). softcap: scores become softcap * tanh(score / softcap); 0 is none. Rows that see no key are 0. The
LSE is the natural logarithm of the softmax's denominator, float32; -inf for a row that sees no key.

Accepted, because they change the speed at most: deterministic, pack_gqa, sm_margin, scheduler_metadata, num_splits (flash_attn_with_kvcache
uses it). NotImplementedError: float8 tensors, qv, q_descale, k_descale, v_descale, attention_chunk, get_scheduler_metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _flash

if TYPE_CHECKING:
    import torch

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def _refuse(attention_chunk: int, **tensors) -> None:
    _flash.refuse(**tensors)
    if attention_chunk != 0:
        raise _flash.unsupported("attention_chunk", attention_chunk, "0")


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
):
    """flash_attn_func of the parts of qkv, which are not copied.

    qkv: [batch, seqlen, 3, heads, headdim], or with num_heads_q [batch, seqlen, num_heads_q + 2 * kv_heads, headdim].
    """
    import torch

    _refuse(attention_chunk, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if isinstance(qkv, torch.Tensor) and qkv.dim() == 4:
        if num_heads_q is None:
            raise ValueError(f"num_heads_q is None; qkv of 4 dimensions, {tuple(qkv.shape)}, needs it")
        kv_heads, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if kv_heads <= 0 or rest:
            raise ValueError(f"num_heads_q is {num_heads_q}; qkv has {qkv.shape[2]} heads: as many must be left for k as for v")
        q, k, v = qkv.split([num_heads_q, kv_heads, kv_heads], dim=-2)
    else:
        _flash.tensor("qkv", qkv, 5)
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv has shape {tuple(qkv.shape)}; its dimension 2 must be 3")
        q, k, v = qkv.unbind(2)
    out, lse = _flash.attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_attn_probs,
        names=("qkv", "qkv", "qkv"),
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
):
    """softmax(q k^T * softmax_scale) v.

    q: [batch, seqlen_q, heads, headdim]; k: [batch, seqlen_k, kv_heads, headdim]; v: [batch, seqlen_k, kv_heads, headdim_v]. Gives out
    [batch, seqlen_q, heads, headdim_v], or with `return_attn_probs` (out, softmax_lse): softmax_lse [batch, heads, seqlen_q].
    """
    _refuse(attention_chunk, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    out, lse = _flash.attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_attn_probs,
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
):
    """flash_attn_func of sequences of different lengths, one behind the other.

    q: [total_q, heads, headdim]; k: [total_k, kv_heads, headdim]; v: [total_k, kv_heads, headdim_v]. cu_seqlens_q, cu_seqlens_k: int32
    [batch + 1]: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1, likewise its keys; lengths may be 0. seqused_q,
    seqused_k: int32 [batch], of a sequence only so many, the first ones; other queries' rows are 0, their LSE is -inf. Gives out
    [total_q, heads, headdim_v], or with `return_attn_probs` (out, softmax_lse): softmax_lse [heads, total_q].

    max_seqlen_q and max_seqlen_k are accepted; lengths come from the offsets.
    """
    _refuse(attention_chunk, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    out, lse = _flash.attend_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_attn_probs,
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from attention over each of several parts of them.

    out_partial: float32 [num_splits, batch, seqlen, heads, headdim]; lse_partial: float32 [num_splits, batch, seqlen, heads]. Gives
    (out, lse) of [batch, seqlen, heads, headdim] in `out_dtype` (default: out's, or float32; written into `out` if that is given) and
    [batch, seqlen, heads]:

        lse = log(sum over s of exp(lse_partial[s])),  out = sum over s of exp(lse_partial[s] - lse) * out_partial[s]

    A part with lse -inf does not count, whatever its out is; where no part counts, out is 0 and lse -inf. In PyTorch's own operations.
    """
    import torch

    _flash.tensor("out_partial", out_partial, 5, dtypes=(torch.float32,))
    _flash.tensor("lse_partial", lse_partial, 4, out_partial, (torch.float32,))
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(f"lse_partial has shape {tuple(lse_partial.shape)}; {tuple(out_partial.shape[:-1])} is wanted")
    if out is not None and (out.shape != out_partial.shape[1:] or out_dtype not in (None, out.dtype)):
        wanted = f"{tuple(out_partial.shape[1:])} and {out_dtype or out.dtype}"
        raise ValueError(f"out has shape {tuple(out.shape)} and dtype {out.dtype}; {wanted} are wanted")
    lse = torch.logsumexp(lse_partial, dim=0)
    weight = torch.exp(lse_partial - lse)[..., None]  # NaN where no part counts, which is not > 0
    combined = torch.where(weight > 0, weight * out_partial, 0.0).sum(0)
    if out is not None:
        return out.copy_(combined), lse
    return combined.to(out_dtype or combined.dtype), lse


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
):
    """Attention of few queries against a cache of keys and values, to which new ones may be appended first.

    q: [batch, seqlen_q, heads, headdim]. k_cache: [cache_batch, capacity, kv_heads, headdim] or, with a page_table, [pages, page_size,
    kv_heads, headdim], page_size a multiple of 16; v_cache likewise with headdim_v. Their last dimension is contiguous. k: [batch,
    seqlen_new, kv_heads, headdim] and v are written into the caches behind the cache_seqlens tokens of each sequence. Gives out [batch,
    seqlen_q, heads, headdim_v], or with `return_softmax_lse` (out, softmax_lse, out_accum, softmax_lse_accum): softmax_lse [batch,
    heads, seqlen_q]; the other two are the parts of a split in FlashAttention and empty here.

    All int32: cache_seqlens, a number or [batch]; cache_batch_idx [batch], which of the cache's sequences is whose; cache_leftpad [batch],
    so many of the first tokens do not count; page_table [batch, pages of a sequence], not together with these two. num_splits: parts of the
    keys that are worked on at once, 0 for a number that suits the device; at most 128 are made.

    rotary_cos, rotary_sin: [positions, rotary_dim / 2], with which new key i is turned at position rotary_seqlens + i (int32 [batch];
    default: cache_seqlens, left pad included); query i too if `causal` or with a window, else at rotary_seqlens. Pairs are 2 n and
    2 n + 1 (`rotary_interleaved`), or n and n + rotary_dim / 2.

    cu_seqlens_q, int32 [batch + 1]: q is packed, [total_q, heads, headdim], and so is out; softmax_lse is [heads, total_q]. Not together
    with k, cache_batch_idx, cache_leftpad or page_table. max_seqlen_q is accepted. cu_seqlens_k_new is not supported.

    A headdim that is no multiple of 8 costs copies of both caches.
    """
    _refuse(attention_chunk, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    if cu_seqlens_q is not None:
        for name, given in {
            "k": k,
            "v": v,
            "rotary_cos": rotary_cos,
            "cache_batch_idx": cache_batch_idx,
            "cache_leftpad": cache_leftpad,
            "page_table": page_table,
        }.items():
            if given is not None:
                raise NotImplementedError(f"cu_seqlens_q is given with {name}; tilewave supports only one of them")
        out, lse = _packed_queries(
            q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, softmax_scale, causal, window_size, softcap, return_softmax_lse
        )
    else:
        out, lse = _flash.attend_cache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            rotary_seqlens=rotary_seqlens,
            cache_seqlens=_flash.cache_lengths(cache_seqlens, q),
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=page_table,
            table_name="page_table",
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            num_splits=num_splits,
            return_lse=return_softmax_lse,
        )
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


def _packed_queries(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, softmax_scale, causal, window_size, softcap, return_lse):
    """Packed queries against a cache: its sequences are packed keys of which cache_seqlens are used."""
    import torch

    _flash.tensor("k_cache", k_cache, 4)
    _flash.tensor("v_cache", v_cache, 4)
    batch, capacity = k_cache.shape[:2]
    _flash.int32("cu_seqlens_q", cu_seqlens_q, (batch + 1,), k_cache)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=k_cache.device)
    elif cache_seqlens is not None:
        cache_seqlens = _flash.int32("cache_seqlens", cache_seqlens, (batch,), k_cache)
    return _flash.attend_varlen(
        q,
        k_cache.flatten(0, 1),
        v_cache.flatten(0, 1),
        cu_seqlens_q,
        torch.arange(batch + 1, dtype=torch.int32, device=k_cache.device) * capacity,
        seqused_k=cache_seqlens,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_lse,
        names=("q", "k_cache", "v_cache"),
    )


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype | None = None,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
):
    """NotImplementedError: flash_attn_with_kvcache plans its own work. (In FlashAttention qkv_dtype's default is torch.bfloat16.)"""
    raise NotImplementedError("get_scheduler_metadata is not supported by tilewave; scheduler_metadata=None is what it needs")
