"""What FlashAttention 2's and 3's functions share: checks that name the caller's arguments, head dimensions of any size, rotary positions.

The LSE conventions, in which the two versions differ, are in flash_attn and flash_attn_interface.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import ops

if TYPE_CHECKING:
    import torch

_HEAD_DIM_STEP, _LARGEST_HEAD_DIM = 8, 256
_PAGE_STEP = 16
_MOST_SPLITS = 128
_NO_BOUND = 1 << 30  # longer than any sequence that the library takes, and an int32


def unsupported(name: str, given, allowed: str) -> NotImplementedError:
    return NotImplementedError(f"{name} is {given}; tilewave supports only {allowed}")


def refuse(**arguments) -> None:
    """NotImplementedError for an argument that is given."""
    for name, given in arguments.items():
        if given is not None:
            raise NotImplementedError(f"{name} is not supported by tilewave; only None is")


def tensor(name: str, x: torch.Tensor, rank: int, like: torch.Tensor | None = None, dtypes: tuple | None = None) -> None:
    """Raises unless x is a tensor of `rank`, on like's device, of like's dtype or one of `dtypes`."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is wanted")
    if x.dim() != rank:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; {rank} dimensions are wanted")
    if dtypes is None:
        dtypes = (torch.bfloat16, torch.float16, torch.float32) if like is None else (like.dtype,)
    if x.dtype not in dtypes:
        if x.dtype.is_floating_point and x.dtype.itemsize == 1:
            raise unsupported(name, x.dtype, "bfloat16 and float16, and float32 on the CPU")
        raise TypeError(f"{name} has dtype {x.dtype}; {' or '.join(map(str, dtypes))} is wanted")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} is on {x.device}; {like.device} is wanted")


def int32(name: str, x: torch.Tensor, shape: tuple, like: torch.Tensor) -> torch.Tensor:
    """x, contiguous; raises unless it is int32 of that shape, -1 for any extent, on like's device."""
    import torch

    tensor(name, x, len(shape), like, (torch.int32,))
    for extent, wanted in zip(x.shape, shape):
        if wanted not in (-1, extent):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {list(shape)} is wanted")
    return x.contiguous()


def _optional_int32(name: str, x: torch.Tensor | None, shape: tuple, like: torch.Tensor) -> torch.Tensor | None:
    return None if x is None else int32(name, x, shape, like)


def _operands(rank: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str, str]) -> None:
    of_q, of_k, of_v = names
    tensor(of_q, q, rank)
    tensor(of_k, k, rank, q)
    tensor(of_v, v, rank, q)
    for name, x in zip(names, (q, k, v)):
        if not 0 < x.shape[-1] <= _LARGEST_HEAD_DIM:
            raise ValueError(f"{name} has head dimension {x.shape[-1]}; 1 to {_LARGEST_HEAD_DIM} are allowed")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{of_k} has head dimension {k.shape[-1]}; {of_q} has {q.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"{of_v} has shape {tuple(v.shape)}; {of_k} has {tuple(k.shape)}: only the last dimension may differ")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"{of_q} has {q.shape[-2]} heads; {of_k} has {k.shape[-2]}, which must divide them")


def _rules(q: torch.Tensor, softmax_scale, causal, window_size, softcap, alibi_slopes) -> dict:
    """tilewave.ops' arguments of the same meaning."""
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5  # of the head dimension before padding
    elif not softmax_scale > 0:
        raise unsupported("softmax_scale", softmax_scale, "positive ones")
    if alibi_slopes is not None:
        import torch

        tensor("alibi_slopes", alibi_slopes, alibi_slopes.dim(), q, (torch.float32,))
    left, right = (-1 if size < 0 else min(size, _NO_BOUND) for size in window_size)  # FlashAttention takes any negative size as no bound
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": (left, right),
        "softcap": max(softcap, 0.0),
        "alibi_slopes": alibi_slopes,
    }


def _padded(x: torch.Tensor) -> torch.Tensor:
    """x, with zeros behind its last dimension up to a multiple of 8, and that dimension contiguous. Zeros change no score."""
    missing = -x.shape[-1] % _HEAD_DIM_STEP
    if missing:
        import torch

        return torch.nn.functional.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


def _unpadded(out: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return out if out.shape[-1] == v.shape[-1] else out[..., : v.shape[-1]]


def sequences_of_tokens(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of packed tokens 0 to total - 1 the sequence and the place there, int32 [total]. Tokens behind the last sequence count to it."""
    import torch

    tokens = torch.arange(total, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], tokens, right=True, out_int32=True).clamp_(max=cu_seqlens.shape[0] - 2)
    return sequence, tokens - cu_seqlens[sequence]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool,
    names: tuple[str, str, str] = ("q", "k", "v"),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ops.attention() with FlashAttention's arguments: out, and lse [batch, heads, seqlen_q] or None."""
    _operands(4, q, k, v, names)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"{names[1]} has a batch of {k.shape[0]}; {names[0]} has {q.shape[0]}")
    rules = _rules(q, softmax_scale, causal, window_size, softcap, alibi_slopes)
    out = ops.attention(_padded(q), _padded(k), _padded(v), return_lse=return_lse, **rules)
    out, lse = out if return_lse else (out, None)
    return _unpadded(out, v), lse


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None = None,
    return_lse: bool,
    names: tuple[str, str, str] = ("q", "k", "v"),
    offset_names: tuple[str, str] = ("cu_seqlens_q", "cu_seqlens_k"),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ops.attention_varlen() with FlashAttention's arguments: out, and lse [heads, total_q] or None."""
    _operands(3, q, k, v, names)
    cu_seqlens_q = int32(offset_names[0], cu_seqlens_q, (-1,), q)
    cu_seqlens_k = int32(offset_names[1], cu_seqlens_k, (cu_seqlens_q.shape[0],), q)
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError(f"{offset_names[0]} is empty; [batch + 1] is wanted")
    out = ops.attention_varlen(
        _padded(q),
        _padded(k),
        _padded(v),
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q=_optional_int32("seqused_q", seqused_q, (batch,), q),
        seqused_k=_optional_int32("seqused_k", seqused_k, (batch,), q),
        return_lse=return_lse,
        **_rules(q, softmax_scale, causal, window_size, softcap, alibi_slopes),
    )
    out, lse = out if return_lse else (out, None)
    return _unpadded(out, v), lse


def cache_lengths(cache_seqlens: torch.Tensor | int | None, q: torch.Tensor) -> torch.Tensor | None:
    """cache_seqlens as a tensor [batch]."""
    if isinstance(cache_seqlens, int):
        import torch

        tensor("q", q, 4)
        return torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    return cache_seqlens


def _check_new_keys(q, k_cache, v_cache, k, v, cache_seqlens, capacity) -> None:
    if (k is None) != (v is None):
        raise ValueError(f"{'v' if v is None else 'k'} is None; k and v are given together, or neither")
    if k is None:
        return
    if cache_seqlens is None:
        raise ValueError("cache_seqlens is None; it says where k and v go")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        tensor(name, x, 4, q)
        wanted = (q.shape[0], k.shape[1], cache.shape[2], cache.shape[3])
        if tuple(x.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; {wanted} is wanted")
    if k.shape[1] > capacity:
        raise ValueError(f"k has {k.shape[1]} tokens; a sequence of k_cache holds {capacity}")


def _check_rotary(q, k, cos, sin) -> None:
    if (cos is None) != (sin is None):
        raise ValueError(f"{'rotary_sin' if sin is None else 'rotary_cos'} is None; both tables are given, or neither")
    if cos is None:
        return
    if k is None:
        raise ValueError("rotary_cos is given without k and v; q is turned only together with new keys")
    import torch

    tensor("rotary_cos", cos, 2, q, (q.dtype, torch.float32))
    tensor("rotary_sin", sin, 2, q, (cos.dtype,))
    if sin.shape != cos.shape or not 2 <= 2 * cos.shape[1] <= q.shape[-1]:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)} and rotary_sin {tuple(sin.shape)}; [positions, rotary_dim / 2] is wanted of both, "
            f"with a rotary_dim of 2 to {q.shape[-1]}"
        )


def attend_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    rotary_interleaved: bool,
    rotary_seqlens: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    block_table: torch.Tensor | None,
    table_name: str = "block_table",
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ops.attention_decode() with FlashAttention's arguments: out, and lse [batch, heads, seqlen_q] or None."""
    _operands(4, q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    batch = q.shape[0]
    cache_seqlens = _optional_int32("cache_seqlens", cache_seqlens, (batch,), q)
    cache_batch_idx = _optional_int32("cache_batch_idx", cache_batch_idx, (batch,), q)
    cache_leftpad = _optional_int32("cache_leftpad", cache_leftpad, (batch,), q)
    rotary_seqlens = _optional_int32("rotary_seqlens", rotary_seqlens, (batch,), q)
    block_table = _optional_int32(table_name, block_table, (batch, -1), q)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension; it must be contiguous")
    if block_table is None:
        capacity = k_cache.shape[1]
        if cache_batch_idx is None and k_cache.shape[0] != batch:
            raise ValueError(f"k_cache has a batch of {k_cache.shape[0]}; q has {batch}, and cache_batch_idx is None")
    else:
        for name, x in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if x is not None:
                raise NotImplementedError(f"{name} is given with {table_name}; tilewave supports only one of them")
        if k_cache.shape[1] == 0 or k_cache.shape[1] % _PAGE_STEP != 0:
            raise unsupported("k_cache's page size", k_cache.shape[1], f"multiples of {_PAGE_STEP}")
        capacity = block_table.shape[1] * k_cache.shape[1]
    _check_new_keys(q, k_cache, v_cache, k, v, cache_seqlens, capacity)
    _check_rotary(q, k, rotary_cos, rotary_sin)
    rules = _rules(q, softmax_scale, causal, window_size, softcap, alibi_slopes)

    if rotary_cos is not None and (rotary_seqlens is not None or cache_leftpad is not None):
        # FlashAttention counts positions from the cache's start, or from rotary_seqlens; ops.attention_decode from behind the left pad.
        start = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        advance = causal or rules["window"] != (-1, -1)
        of_q = {"offsets": start} if advance else {"positions": start[:, None].expand(-1, q.shape[1]).contiguous()}
        q = ops.rope(q, rotary_cos, rotary_sin, interleaved=rotary_interleaved, **of_q)
        k = ops.rope(k, rotary_cos, rotary_sin, interleaved=rotary_interleaved, offsets=start)
        rotary_cos = rotary_sin = None

    padded_k, padded_v = _padded(k_cache), _padded(v_cache)
    out = ops.attention_decode(
        _padded(q),
        padded_k,
        padded_v,
        seqlens=cache_seqlens,
        batch_idx=cache_batch_idx,
        leftpad=cache_leftpad,
        block_table=block_table,
        new_k=None if k is None else _padded(k),
        new_v=None if v is None else _padded(v),
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        num_splits=min(max(num_splits, 0), _MOST_SPLITS),
        return_lse=return_lse,
        **rules,
    )
    if k is not None:  # the new keys and values went into padded copies
        for cache, padded in ((k_cache, padded_k), (v_cache, padded_v)):
            if padded is not cache:
                cache.copy_(padded[..., : cache.shape[-1]])
    out, lse = out if return_lse else (out, None)
    return _unpadded(out, v_cache), lse
