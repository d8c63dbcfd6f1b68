"""FlashAttention 3's public functions (flash-attention's hopper/flash_attn_interface.py), by its names and with its semantics.

Names, order and defaults of arguments and the values that are returned are those of commit 01afd16d248c4c7d0f9aed1914084f16c490eaed.
Compared with the file in version 2.8.3, return_attn_probs is new.

Tensors are PyTorch's, on CUDA in bfloat16 or float16, on the CPU also in float32. Head dimensions are 1 to 256; v's may differ from q's, up
to 512: above 256 the scores are computed once for each 256 of its columns. heads is a multiple of kv_heads: query head h uses key head
h // (heads // kv_heads).

flash_attn_func, flash_attn_qkvpacked_func and flash_attn_varlen_func are differentiable, once, with respect to q, k and v: in bfloat16 and
float16, on the CPU in float32 too. The gradients of rows that are not in use are 0. The backward of the functions with a cache and of
float32 on CUDA raises NotImplementedError. The LSE does not require grad.

Query i is aligned with key i + seqlen_k - seqlen_q, the last query with the last key. `causal`: query i sees the keys up to that one.
window_size (left, right): the keys from `left` before it to `right` after it; a negative size is no bound, and `causal` makes right 0.
attention_chunk: C above 0, query i sees only keys of its own chunk of C keys, in which key i + seqlen_k - seqlen_q lies; 0 is none.
softmax_scale: default 1 / sqrt(headdim). softcap: scores become softcap * tanh(score / softcap); 0 is none. Rows that see no key are 0. The
LSE is the natural logarithm of the softmax's denominator, float32; -inf for a row that sees no key.

deterministic: the gradients have the same bits in every run. sm_margin: on CUDA, this many SMs are left to other work, in the backward too;
it must be less than there are. num_splits and scheduler_metadata are for flash_attn_with_kvcache. Accepted, because they affect at most the
speed: pack_gqa, and num_splits elsewhere.

qv: [.., heads, headdim_v], a second query of each row that is multiplied by the values: the scores are softmax_scale (q k^T + qv v^T), by
default with softmax_scale 1 / sqrt(headdim + headdim_v). headdim is up to 128, headdim_v up to 256; no gradient. With headdim 64 and
headdim_v 512, one key head, bfloat16 or float16, flash_attn_func and flash_attn_with_kvcache compute it by tilewave.ops.mla_decode: without
new keys, windows, softcap, attention_chunk, cache_batch_idx, cache_leftpad and sm_margin; of packed queries one for each sequence. Where
the rows of a cache are [value, key], as those of a latent model are, nothing is copied. NotImplementedError names what is not supported.

Tensors may be float8_e4m3fn, with q_descale, k_descale and v_descale, float32 [batch, kv_heads]; results are bfloat16, without a gradient.
On a Hopper GPU flash_attn_func and flash_attn_qkvpacked_func multiply them as they are. Packed sequences and the tokens in use of a cache
are converted to bfloat16 first; rotary tables are not supported with them.
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
    """flash_attn_func of views of qkv, without copies.

    qkv: [batch, seqlen, 3, heads, headdim], or with num_heads_q [batch, seqlen, num_heads_q + 2 * kv_heads, headdim].
    """
    q, k, v = _flash.unpack_qkv(qkv, num_heads_q, e4m3=True)
    out, lse = _flash.attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
        names=("qkv", "qkv", "qkv"),
        descales={"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale},
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
    out, lse = _flash.attend(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
        qv=qv,
        descales={"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale},
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
    """flash_attn_func of packed sequences of different lengths.

    q: [total_q, heads, headdim]; k: [total_k, kv_heads, headdim]; v: [total_k, kv_heads, headdim_v]. cu_seqlens_q, cu_seqlens_k: int32
    [batch + 1]: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1; the same for its keys. Lengths may be 0. seqused_q,
    seqused_k: int32 [batch], use only this many of a sequence, the first ones. The other queries' rows are 0 and their LSE -inf. Gives out
    [total_q, heads, headdim_v], or with `return_attn_probs` (out, softmax_lse): softmax_lse [heads, total_q].

    max_seqlen_q and max_seqlen_k are accepted; lengths come from the offsets.
    """
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
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        softcap=softcap,
        qv=qv,
        descales={"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale},
        deterministic=deterministic,
        return_lse=return_attn_probs,
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_combine(
    out_partial: torch.Tensor, lse_partial: torch.Tensor, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over all keys from the results of attention over splits of the keys.

    out_partial: float32 [num_splits, batch, seqlen, heads, headdim]; lse_partial: float32 [num_splits, batch, seqlen, heads]. Gives
    (out, lse) of [batch, seqlen, heads, headdim] in `out_dtype` (default: out's, or float32; written into `out` if that is given) and
    [batch, seqlen, heads]:

        lse = log(sum over s of exp(lse_partial[s])),  out = sum over s of exp(lse_partial[s] - lse) * out_partial[s]

    A split with lse -inf is ignored, for any value of its out. If all splits are ignored, out is 0 and lse -inf. In PyTorch's own
    operations.
    """
    import torch

    _flash.tensor("out_partial", out_partial, 5, dtypes=(torch.float32,))
    _flash.tensor("lse_partial", lse_partial, 4, out_partial, (torch.float32,))
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(f"lse_partial has shape {tuple(lse_partial.shape)}; it must be {tuple(out_partial.shape[:-1])}")
    if out is not None and (out.shape != out_partial.shape[1:] or out_dtype not in (None, out.dtype)):
        wanted = f"{tuple(out_partial.shape[1:])} and {out_dtype or out.dtype}"
        raise ValueError(f"out has shape {tuple(out.shape)} and dtype {out.dtype}; they must be {wanted}")
    lse = torch.logsumexp(lse_partial, dim=0)
    weights = torch.exp(lse_partial - lse)  # NaN if all parts are empty; NaN > 0 is false
    combined = out_partial.new_zeros(out_partial.shape[1:])
    for part, weight in zip(out_partial, weights[..., None]):  # one at a time, to avoid a second tensor as large as out_partial
        counts = weight > 0
        combined.addcmul_(torch.where(counts, part, 0.0), torch.where(counts, weight, 0.0))
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
    """Attention of few queries against a cache of keys and values. New keys and values may be appended first.

    q: [batch, seqlen_q, heads, headdim]. k_cache: [cache_batch, capacity, kv_heads, headdim] or, with a page_table, [pages, page_size,
    kv_heads, headdim]; v_cache likewise with headdim_v. Their last dimension is contiguous. k: [batch, seqlen_new, kv_heads, headdim] and v
    are written into the caches after the cache_seqlens tokens of each sequence. Gives out [batch, seqlen_q, heads, headdim_v], or with
    `return_softmax_lse` (out, softmax_lse, out_accum, softmax_lse_accum): softmax_lse [batch, heads, seqlen_q]; the other two are
    FlashAttention's partial results of splits, and empty here.

    All int32: cache_seqlens, a number or [batch]; cache_batch_idx [batch], maps batch index to cache index, or to a row of the page_table;
    cache_leftpad [batch], the number of first tokens to ignore; page_table [tables, pages of a sequence]. num_splits: splits of the keys
    that run in parallel, at most 128; 0: that of scheduler_metadata, get_scheduler_metadata()'s tensor, or the library's choice.

    rotary_cos, rotary_sin: [positions, rotary_dim / 2], which rotate new key i at position rotary_seqlens + i (int32 [batch];
    default: cache_seqlens, including left pad); query i too if `causal`, with a window or with attention_chunk, else at rotary_seqlens.
    Pairs are 2 n and 2 n + 1 (`rotary_interleaved`), or n and n + rotary_dim / 2.

    cu_seqlens_q, int32 [batch + 1]: q is packed, [total_q, heads, headdim], and so is out; softmax_lse is [heads, total_q]. max_seqlen_q of
    1 with as many queries as sequences means one query for each; otherwise it is ignored. cu_seqlens_k_new, int32 [batch + 1]: k and v are
    packed, [total_new, kv_heads, headdim].

    Page sizes that are not a multiple of 16, and pages with cache_leftpad, are slower: the tokens in use are copied first. A headdim that
    is not a multiple of 8 costs copies of both caches.
    """
    _flash.refuse_fp8(q=q, k_cache=k_cache, v_cache=v_cache, e4m3=True)
    out, lse = _flash.attend_cache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        cache_seqlens=_flash.cache_lengths(cache_seqlens, q, cu_seqlens_q),
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=page_table,
        table_name="page_table",
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        softcap=softcap,
        qv=qv,
        descales={"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale},
        num_splits=_flash.planned_splits(scheduler_metadata, num_splits),
        return_lse=return_softmax_lse,
    )
    return (out, lse, lse.new_empty(0), lse.new_empty(0)) if return_softmax_lse else out


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
    """The number of splits for calls of flash_attn_with_kvcache with these arguments, whose longest sequence has max_seqlen_k keys, chosen
    once for all layers.

    Gives int32 [splits], on cache_seqlens's device: its length is the number of splits, 1 to 128, and so is each element. Only the length
    counts, so that the host knows it without waiting for the device; any int32 tensor of that length means the same. A num_splits above 0
    is the number itself. With cu_seqlens_q keys are not split unless max_seqlen_q is 1. The choice does not depend on the other arguments:
    headdim, qkv_dtype (in FlashAttention its default is torch.bfloat16), headdim_v, cu_seqlens_k_new, cache_leftpad, page_size, causal,
    window_size, has_softcap, pack_gqa.
    """
    import torch

    if not isinstance(cache_seqlens, torch.Tensor):
        raise TypeError(f"cache_seqlens is a {type(cache_seqlens).__name__}; allowed: a torch.Tensor")
    cache_seqlens = _flash.int32("cache_seqlens", cache_seqlens, (batch_size,), cache_seqlens)
    splits = _flash.decode_plan(
        cache_seqlens.device,
        batch=batch_size,
        seqlen_q=max_seqlen_q,
        heads=num_heads_q,
        kv_heads=num_heads_kv,
        seqlen_k=max_seqlen_k + max_seqlen_k_new,
        attention_chunk=attention_chunk,
        sm_margin=sm_margin,
        num_splits=num_splits,
        packed=cu_seqlens_q is not None,
    )
    return torch.full((splits,), splits, dtype=torch.int32, device=cache_seqlens.device)
