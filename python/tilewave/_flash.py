"""Shared by FlashAttention 2's and 3's functions: checks that name the caller's arguments, head dimensions of any size, rotary positions.

The LSE conventions, in which the two versions differ, are in flash_attn and flash_attn_interface.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Callable

from . import _arrays, _library, ops

if TYPE_CHECKING:
    import torch

_HEAD_DIM_STEP, _LARGEST_HEAD_DIM = 8, 256
_LARGEST_VALUE_DIM = 512
_MOST_SPLITS = 128
_NO_BOUND = 1 << 30  # longer than any sequence that the library supports, and an int32
_LARGEST_CHUNK = 1 << 29  # as long as the longest sequence


def unsupported(name: str, given, allowed: str) -> NotImplementedError:
    return NotImplementedError(f"{name} is {given}; tilewave supports only {allowed}")


def refuse(**arguments) -> None:
    """The NotImplementedError for an unsupported argument."""
    for name, given in arguments.items():
        if given is not None:
            raise NotImplementedError(f"{name} is not supported by tilewave; only None is")


def refuse_fp8(*, e4m3: bool = False, **tensors) -> None:
    """Raises NotImplementedError for 8-bit tensors, before other checks. `e4m3`: float8_e4m3fn is allowed."""
    import torch

    for name, x in tensors.items():
        allowed = e4m3 and isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn
        if isinstance(x, torch.Tensor) and x.dtype.is_floating_point and x.dtype.itemsize == 1 and not allowed:
            raise unsupported(name, x.dtype, f"bfloat16, float16{', float8_e4m3fn' if e4m3 else ''} and on the CPU float32")


def unpack(name: str, packed: torch.Tensor, rank: int, parts: int, e4m3: bool = False) -> tuple[torch.Tensor, ...]:
    """The slices along dimension -3, which must have `parts` elements."""
    refuse_fp8(**{name: packed}, e4m3=e4m3)
    tensor(name, packed, rank)
    if packed.shape[-3] != parts:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; its dimension -3 must be {parts}")
    return packed.unbind(-3) if not packed.requires_grad else tuple(packed.select(-3, n) for n in range(parts))


def unpack_qkv(qkv: torch.Tensor, num_heads_q: int | None, e4m3: bool = False) -> tuple[torch.Tensor, ...]:
    """q, k, v of qkv [batch, seqlen, 3, heads, headdim], or with num_heads_q [batch, seqlen, num_heads_q + 2 * kv_heads, headdim]."""
    import torch

    refuse_fp8(qkv=qkv, e4m3=e4m3)
    if not isinstance(qkv, torch.Tensor) or qkv.dim() != 4:
        return unpack("qkv", qkv, 5, 3, e4m3)
    if num_heads_q is None:
        raise ValueError(f"num_heads_q is None; qkv of 4 dimensions, {tuple(qkv.shape)}, needs it")
    kv_heads, rest = divmod(qkv.shape[2] - num_heads_q, 2)
    if num_heads_q <= 0 or kv_heads <= 0 or rest:
        raise ValueError(f"num_heads_q is {num_heads_q}; qkv has {qkv.shape[2]} heads: as many must be left for k as for v")
    k_end = num_heads_q + kv_heads
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q:k_end], qkv[:, :, k_end:]


def tensor(name: str, x: torch.Tensor, rank: int, like: torch.Tensor | None = None, dtypes: tuple | None = None) -> None:
    """Raises unless x is a tensor of `rank`, on like's device, of like's dtype or one of `dtypes`."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; allowed: a torch.Tensor")
    if x.dim() != rank:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {rank} dimensions")
    if dtypes is None:
        dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn) if like is None else (like.dtype,)
    if x.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {x.dtype}; allowed: {' or '.join(map(str, dtypes))}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} is on {x.device}; allowed: {like.device}")


def int32(name: str, x: torch.Tensor, shape: tuple, like: torch.Tensor) -> torch.Tensor:
    """x, contiguous. Raises unless it is an int32 tensor of that shape (-1: any extent) on like's device."""
    import torch

    tensor(name, x, len(shape), like, (torch.int32,))
    for extent, wanted in zip(x.shape, shape):
        if wanted not in (-1, extent):
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {list(shape)}")
    return x.contiguous()


def _optional_int32(name: str, x: torch.Tensor | None, shape: tuple, like: torch.Tensor) -> torch.Tensor | None:
    return None if x is None else int32(name, x, shape, like)


def _operands(
    ranks: tuple[int, int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: tuple[str, str, str], e4m3: bool = False
) -> None:
    """Checks the ranks of q, and of k and v."""
    of_q, of_k, of_v = names
    for name, x in zip(names, (q, k, v)):
        refuse_fp8(**{name: x}, e4m3=e4m3)
    tensor(of_q, q, ranks[0])
    tensor(of_k, k, ranks[1], q)
    tensor(of_v, v, ranks[1], q)
    for name, x, largest in zip(names, (q, k, v), (_LARGEST_HEAD_DIM, _LARGEST_HEAD_DIM, _LARGEST_VALUE_DIM)):
        if x.shape[-1] > largest:
            raise unsupported(f"{name}'s head dimension", x.shape[-1], f"up to {largest}")
        if x.shape[-1] == 0:
            raise ValueError(f"{name} has head dimension 0; allowed: 1 to {largest}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{of_k} has head dimension {k.shape[-1]}; {of_q} has {q.shape[-1]}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"{of_v} has shape {tuple(v.shape)}; {of_k} has {tuple(k.shape)}: only the last dimension may differ")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ValueError(f"{of_q} has {q.shape[-2]} heads; {of_k} has {k.shape[-2]}, which must divide them")


_SMALLEST_FLOAT = 2.0**-149  # smaller numbers are 0 as float32


def _rules(
    q: torch.Tensor, softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk=0, sm_margin=0
) -> tuple[torch.Tensor, dict]:
    """Converts arguments to those of tilewave.ops, and returns q with them. Scales of tilewave.ops are positive, so other signs go to q."""
    for name, number in (("attention_chunk", attention_chunk), ("sm_margin", sm_margin)):
        if _arrays.integer(name, number, -(1 << 63), (1 << 63) - 1) < 0:
            raise ValueError(f"{name} is {number}; allowed: 0 or more")
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5  # from the head dimension before padding
    elif not -math.inf < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale is {softmax_scale}; it must be finite")
    elif softmax_scale < _SMALLEST_FLOAT and q.dtype.itemsize == 1:
        raise unsupported("softmax_scale", softmax_scale, f"positive numbers for {q.dtype}")
    elif abs(softmax_scale) < _SMALLEST_FLOAT:
        q, softmax_scale = q * 0.0, 1.0
    elif softmax_scale < 0:
        q, softmax_scale = -q, -softmax_scale
    if alibi_slopes is not None:
        import torch

        tensor("alibi_slopes", alibi_slopes, alibi_slopes.dim(), q, (torch.float32,))
    left, right = (-1 if size < 0 else min(size, _NO_BOUND) for size in window_size)  # in FlashAttention any negative size means no bound
    return q, {
        "scale": softmax_scale,
        "causal": causal,
        "window": (left, right),
        "attention_chunk": min(attention_chunk, _LARGEST_CHUNK),
        "sm_margin": min(sm_margin, _NO_BOUND),
        "softcap": max(softcap, 0.0),
        "alibi_slopes": alibi_slopes,
    }


_LARGEST_HEAD_DIM_WITH_QV = 128
_LATENT_DIM, _LATENT_ROTARY_DIM = 512, 64


def _check_qv(q: torch.Tensor, qv: torch.Tensor, v: torch.Tensor, softmax_scale) -> float:
    """Checks qv before q's other sizes. Gives the scale."""
    tensor("qv", qv, q.dim(), q)
    wanted = (*q.shape[:-1], v.shape[-1])
    if tuple(qv.shape) != wanted:
        raise ValueError(f"qv has shape {tuple(qv.shape)}; allowed: {wanted}")
    if q.dtype.itemsize == 1:
        raise unsupported("qv", "given", f"None for {q.dtype}")
    if q.shape[-1] > _LARGEST_HEAD_DIM_WITH_QV:
        raise unsupported("q's head dimension", q.shape[-1], f"up to {_LARGEST_HEAD_DIM_WITH_QV} with qv")
    if v.shape[-1] > _LARGEST_HEAD_DIM and (q.shape[-1], v.shape[-1]) != (_LATENT_ROTARY_DIM, _LATENT_DIM):
        allowed = f"up to {_LARGEST_HEAD_DIM} with qv, and {_LATENT_DIM} with keys of {_LATENT_ROTARY_DIM}"
        raise unsupported("v's head dimension", v.shape[-1], allowed)
    if softmax_scale is None:
        return (q.shape[-1] + v.shape[-1]) ** -0.5
    if softmax_scale < _SMALLEST_FLOAT:
        raise unsupported("softmax_scale", softmax_scale, "positive numbers with qv")
    return softmax_scale


def _attend_latent(q, qv, k, v, rules, *, return_lse, refused=(), **options) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Latent attention by ops.mla_decode(): keys of 64 columns, k, and values of 512 that are keys too, v, [batch or pages, keys, 1, ..].
    Where they are neighbours in memory, as in a cache whose rows are [v, k], nothing is copied."""
    import torch

    for name, given in refused:
        if given is not None:
            raise unsupported(name, "given", f"None with qv and values of {_LATENT_DIM} columns")
    for name, none in (("window", (-1, -1)), ("attention_chunk", 0), ("softcap", 0.0), ("sm_margin", 0)):
        if rules[name] != none:
            raise unsupported(name, rules[name], f"{none} with qv and values of {_LATENT_DIM} columns")
    if k.shape[-2] != 1:
        raise unsupported("kv_heads", k.shape[-2], f"1 with qv and values of {_LATENT_DIM} columns")
    if q.dtype == torch.float32:
        raise unsupported("q", q.dtype, f"bfloat16 and float16 with qv and values of {_LATENT_DIM} columns")
    k, v = k.squeeze(-2), v.squeeze(-2)
    together = v.stride() == k.stride() and k.stride(-1) == 1 and k.data_ptr() == v.data_ptr() + _LATENT_DIM * v.element_size()
    if together and min(v.stride()[:-1]) >= _LATENT_DIM + _LATENT_ROTARY_DIM:
        kv = v.as_strided((*v.shape[:-1], _LATENT_DIM + _LATENT_ROTARY_DIM), v.stride())
    else:
        kv = torch.cat([v, k], dim=-1)
    options |= {"scale": rules["scale"], "causal": bool(rules["causal"]), "return_lse": return_lse}
    out = ops.mla_decode(torch.cat([qv, q], dim=-1), kv, **options)
    return out if return_lse else (out, None)


def _by_values(run: Callable, *values: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls run(*values), which returns out and lse. Values that are too wide for a kernel are split by columns; the scores are the same."""
    columns = next(x.shape[-1] for x in values if x is not None)
    if columns <= _LARGEST_HEAD_DIM:
        return run(*values)
    import torch

    slices = [slice(first, first + _LARGEST_HEAD_DIM) for first in range(0, columns, _LARGEST_HEAD_DIM)]
    parts = [run(*(None if x is None else x[..., part] for x in values)) for part in slices]
    return torch.cat([out for out, _ in parts], dim=-1), parts[0][1]


def _padded(x: torch.Tensor) -> torch.Tensor:
    """x with its last dimension contiguous and padded with zeros to a multiple of 8, or of 16 8-bit numbers. The zeros change no scores."""
    bytes_each = x.dtype.itemsize
    missing = -x.shape[-1] % (_HEAD_DIM_STEP if bytes_each > 1 else 2 * _HEAD_DIM_STEP)
    if missing:
        import torch

        if bytes_each == 1:
            return torch.nn.functional.pad(x.contiguous().view(torch.uint8), (0, missing)).view(x.dtype)
        return torch.nn.functional.pad(x, (0, missing))
    return x if x.stride(-1) == 1 else x.contiguous()


def _unpadded(out: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return out if out.shape[-1] == v.shape[-1] else out[..., : v.shape[-1]]


def sequences_of_tokens(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of packed tokens 0 to total - 1, and the index in it, int32 [total]. Tokens after the last sequence belong to it."""
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
    attention_chunk: int = 0,
    sm_margin: int = 0,
    alibi_slopes: torch.Tensor | None = None,
    dropout: tuple[float, torch.Tensor | None] = (0.0, None),
    deterministic: bool = False,
    return_lse: bool,
    names: tuple[str, str, str] = ("q", "k", "v"),
    descales: dict | None = None,
    qv: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ops.attention() with FlashAttention's arguments: out, and lse [batch, heads, seqlen_q] or None. `dropout`: its probability and state.
    `descales`: if given, float8_e4m3fn is allowed, here and below."""
    _operands((4, 4), q, k, v, names, e4m3=descales is not None)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"{names[1]} has a batch of {k.shape[0]}; {names[0]} has {q.shape[0]}")
    if qv is not None:
        softmax_scale = _check_qv(q, qv, v, softmax_scale)
    q, rules = _rules(q, softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk, sm_margin)
    q, k = _padded(q), _padded(k)
    rules["dropout"], rules["dropout_state"] = dropout
    if qv is not None:
        if v.shape[-1] == _LATENT_DIM:
            return _attend_latent(q, qv, k, v, rules, return_lse=return_lse)
        rules["qv"] = _padded(qv)

    def run(v):
        out = ops.attention(q, k, _padded(v), deterministic=bool(deterministic), return_lse=return_lse, **rules, **(descales or {}))
        out, lse = out if return_lse else (out, None)
        return _unpadded(out, v), lse

    return _by_values(run, v)


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
    attention_chunk: int = 0,
    sm_margin: int = 0,
    alibi_slopes: torch.Tensor | None = None,
    dropout: tuple[float, torch.Tensor | None] = (0.0, None),
    deterministic: bool = False,
    return_lse: bool,
    names: tuple[str, str, str] = ("q", "k", "v"),
    offset_names: tuple[str, str] = ("cu_seqlens_q", "cu_seqlens_k"),
    qv: torch.Tensor | None = None,
    descales: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ops.attention_varlen() with FlashAttention's arguments: out, and lse [heads, total_q] or None."""
    _operands((3, 3), q, k, v, names, e4m3=descales is not None)
    cu_seqlens_q = int32(offset_names[0], cu_seqlens_q, (-1,), q)
    cu_seqlens_k = int32(offset_names[1], cu_seqlens_k, (cu_seqlens_q.shape[0],), q)
    batch = cu_seqlens_q.shape[0] - 1
    if batch < 0:
        raise ValueError(f"{offset_names[0]} is empty; allowed: [batch + 1]")
    seqused_q = _optional_int32("seqused_q", seqused_q, (batch,), q)
    seqused_k = _optional_int32("seqused_k", seqused_k, (batch,), q)
    if qv is not None:
        softmax_scale = _check_qv(q, qv, v, softmax_scale)
        if v.shape[-1] > _LARGEST_HEAD_DIM:
            raise unsupported("v's head dimension", v.shape[-1], f"up to {_LARGEST_HEAD_DIM} with qv and packed sequences")
    q, rules = _rules(q, softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk, sm_margin)
    q, k = _padded(q), _padded(k)
    rules["dropout"], rules["dropout_state"] = dropout
    if qv is not None:
        rules["qv"] = _padded(qv)

    def run(v):
        out = ops.attention_varlen(
            q,
            k,
            _padded(v),
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            deterministic=bool(deterministic),
            return_lse=return_lse,
            **rules,
            **(descales or {}),
        )
        out, lse = out if return_lse else (out, None)
        return _unpadded(out, v), lse

    return _by_values(run, v)


def cache_lengths(
    cache_seqlens: torch.Tensor | int | None, q: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None
) -> torch.Tensor | None:
    """cache_seqlens as a tensor [batch]."""
    if isinstance(cache_seqlens, int):
        import torch

        tensor("q", q, 4 if cu_seqlens_q is None else 3)
        batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        return torch.full((batch,), _arrays.int32("cache_seqlens", cache_seqlens), dtype=torch.int32, device=q.device)
    return cache_seqlens


def planned_splits(scheduler_metadata: torch.Tensor | None, num_splits: int) -> int:
    """num_splits, or if that leaves the choice to the library, the number in get_scheduler_metadata()'s tensor: its length. So it is known
    without waiting for the device, and in CUDA graphs."""
    if scheduler_metadata is None:
        return num_splits
    import torch

    tensor("scheduler_metadata", scheduler_metadata, 1, dtypes=(torch.int32,))
    splits = scheduler_metadata.shape[0]
    if not 1 <= splits <= _MOST_SPLITS:
        raise ValueError(f"scheduler_metadata has {splits} elements; allowed: get_scheduler_metadata()'s tensor, 1 to {_MOST_SPLITS}")
    return num_splits if num_splits > 0 else splits


def decode_plan(device: torch.device, *, num_splits: int, packed: bool, **problem: int) -> int:
    """The number of splits for get_scheduler_metadata(): tw::decode_plan() of DecodeProblem's fields, unless num_splits or packed queries
    decide."""
    for name, number in problem.items():
        problem[name] = _arrays.int32(name, number)
    problem["attention_chunk"] = min(problem["attention_chunk"], _LARGEST_CHUNK)
    cuda_device = (device.index or 0) if device.type == "cuda" else -1
    splits = _library.decode_plan(cuda_device=cuda_device, **problem)
    if num_splits > 0:
        return min(num_splits, _MOST_SPLITS)
    return 1 if packed and problem["seqlen_q"] != 1 else splits


def _check_new_keys(q, k_cache, v_cache, k, v, cache_seqlens, cu_seqlens_k_new, batch, capacity) -> None:
    if (k is None) != (v is None):
        raise ValueError(f"{'v' if v is None else 'k'} is None; k and v are given together, or neither")
    if k is None:
        if cu_seqlens_k_new is not None:
            raise ValueError("cu_seqlens_k_new is given without k and v")
        return
    if cache_seqlens is None:
        raise ValueError("cache_seqlens is None; it says where k and v go")
    packed = cu_seqlens_k_new is not None
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        tensor(name, x, 3 if packed else 4, q)
        wanted = (*((k.shape[0],) if packed else (batch, k.shape[1])), *cache.shape[2:])
        if tuple(x.shape) != wanted:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; allowed: {wanted}")
    if not packed and k.shape[1] > capacity:
        raise ValueError(f"k has {k.shape[1]} tokens; a sequence of k_cache holds {capacity}")


def _check_rotary(q, k, cos, sin) -> None:
    if (cos is None) != (sin is None):
        raise ValueError(f"{'rotary_sin' if sin is None else 'rotary_cos'} is None; both tables are given, or neither")
    if cos is None:
        return
    if k is None:
        raise ValueError("rotary_cos is given without k and v; q is rotated only together with new keys")
    import torch

    tensor("rotary_cos", cos, 2, q, (q.dtype, torch.float32))
    tensor("rotary_sin", sin, 2, q, (cos.dtype,))
    if sin.shape != cos.shape or not 2 <= 2 * cos.shape[1] <= q.shape[-1]:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)} and rotary_sin {tuple(sin.shape)}; allowed: [positions, rotary_dim / 2] for both, "
            f"with a rotary_dim of 2 to {q.shape[-1]}"
        )


def _rotate(x, cos, sin, interleaved, start, cu_seqlens, advance):
    """x, [batch, seqlen, heads, headdim] or by cu_seqlens packed, rotated: token i of sequence b at position start[b] + i, or start[b]."""
    where: dict
    if cu_seqlens is not None:
        sequence, place = sequences_of_tokens(cu_seqlens, x.shape[0])
        where = {"positions": start[sequence] + place if advance else start[sequence]}
    elif advance:
        where = {"offsets": start}
    else:
        where = {"positions": start[:, None].expand(-1, x.shape[1]).contiguous()}
    return ops.rope(x, cos, sin, interleaved=interleaved, **where)


def attend_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = False,
    rotary_seqlens: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None,
    table_name: str = "block_table",
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    attention_chunk: int = 0,
    sm_margin: int = 0,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool,
    names: tuple[str, str, str] = ("q", "k_cache", "v_cache"),
    qv: torch.Tensor | None = None,
    descales: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """ops.attention_decode() with FlashAttention's arguments: out, and lse [batch, heads, seqlen_q] (packed: [heads, total_q]) or None."""
    packed = cu_seqlens_q is not None
    e4m3 = descales is not None
    refuse_fp8(**dict(zip(names, (q, k_cache, v_cache))), e4m3=e4m3)
    refuse_fp8(k=k, v=v, e4m3=e4m3)
    _operands((3 if packed else 4, 4), q, k_cache, v_cache, names, e4m3=e4m3)
    if q.dtype.itemsize == 1 and rotary_cos is not None:
        raise unsupported("rotary_cos", "given", f"None for {q.dtype}")
    if packed:
        cu_seqlens_q = int32("cu_seqlens_q", cu_seqlens_q, (-1,), q)
        if cu_seqlens_q.shape[0] == 0:
            raise ValueError("cu_seqlens_q is empty; allowed: [batch + 1]")
    batch = cu_seqlens_q.shape[0] - 1 if packed else q.shape[0]
    cache_seqlens = _optional_int32("cache_seqlens", cache_seqlens, (batch,), q)
    cache_batch_idx = _optional_int32("cache_batch_idx", cache_batch_idx, (batch,), q)
    cache_leftpad = _optional_int32("cache_leftpad", cache_leftpad, (batch,), q)
    rotary_seqlens = _optional_int32("rotary_seqlens", rotary_seqlens, (batch,), q)
    cu_seqlens_k_new = _optional_int32("cu_seqlens_k_new", cu_seqlens_k_new, (batch + 1,), q)
    block_table = _optional_int32(table_name, block_table, (batch if cache_batch_idx is None else -1, -1), q)
    for name, x in zip(names[1:], (k_cache, v_cache)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} in its last dimension; it must be contiguous")
    if block_table is None:
        capacity = k_cache.shape[1]
        if cache_batch_idx is None and k_cache.shape[0] != batch:
            of = "cu_seqlens_q" if packed else names[0]
            raise ValueError(f"{names[1]} has a batch of {k_cache.shape[0]}; {of} has {batch}, and cache_batch_idx is None")
    else:
        if k_cache.shape[1] == 0:
            raise ValueError(f"{names[1]} has shape {tuple(k_cache.shape)}: pages of 0 tokens; allowed: 1 or more")
        capacity = block_table.shape[1] * k_cache.shape[1]
    _check_new_keys(q, k_cache, v_cache, k, v, cache_seqlens, cu_seqlens_k_new, batch, capacity)
    _check_rotary(q, k, rotary_cos, rotary_sin)
    shape = q.shape
    if qv is not None:
        softmax_scale = _check_qv(q, qv, v_cache, softmax_scale)
    q, rules = _rules(q, softmax_scale, causal, window_size, softcap, alibi_slopes, attention_chunk, sm_margin)

    if rotary_cos is not None and (rotary_seqlens is not None or cache_leftpad is not None or packed or cu_seqlens_k_new is not None):
        # FlashAttention counts positions from the beginning of the cache, or from rotary_seqlens; ops.attention_decode counts from the end of the left
        # padding, and does not rotate packed tensors.
        start = cache_seqlens if rotary_seqlens is None else rotary_seqlens
        advance = causal or rules["window"] != (-1, -1) or attention_chunk > 0
        q = _rotate(q, rotary_cos, rotary_sin, rotary_interleaved, start, cu_seqlens_q, advance)
        k = _rotate(k, rotary_cos, rotary_sin, rotary_interleaved, start, cu_seqlens_k_new, True)
        rotary_cos = rotary_sin = None

    one_each = packed and max_seqlen_q == 1 and shape[0] == batch  # then keys can be split among blocks
    if one_each:
        q, cu_seqlens_q = q[:, None], None
        qv = None if qv is None else qv[:, None]
    if qv is not None and v_cache.shape[-1] == _LATENT_DIM:
        refused = (("cu_seqlens_q", cu_seqlens_q), ("k", k), ("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad))
        lengths = {"seqlens": cache_seqlens, "block_table": block_table, "num_splits": min(max(num_splits, 0), _MOST_SPLITS)}
        out, lse = _attend_latent(q, qv, k_cache, v_cache, rules, return_lse=return_lse, refused=refused, **lengths)
        return _of_one_each(out, lse) if one_each else (out, lse)
    if qv is not None:
        rules["qv"] = _padded(qv)
    q, new_k, padded_k = _padded(q), None if k is None else _padded(k), _padded(k_cache)

    def run(v_cache, v):
        padded_v = _padded(v_cache)
        out = ops.attention_decode(
            q,
            padded_k,
            padded_v,
            seqlens=cache_seqlens,
            batch_idx=cache_batch_idx,
            leftpad=cache_leftpad,
            block_table=block_table,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_new=cu_seqlens_k_new,
            new_k=new_k,
            new_v=None if v is None else _padded(v),
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_interleaved=rotary_interleaved,
            num_splits=min(max(num_splits, 0), _MOST_SPLITS),
            return_lse=return_lse,
            **rules,
            **(descales or {}),
        )
        if v is not None and padded_v is not v_cache:  # the new values were written to a padded copy
            v_cache.copy_(padded_v[..., : v_cache.shape[-1]])
        out, lse = out if return_lse else (out, None)
        return _unpadded(out, v_cache), lse

    out, lse = _by_values(run, v_cache, v)
    if k is not None and padded_k is not k_cache:
        k_cache.copy_(padded_k[..., : k_cache.shape[-1]])
    return _of_one_each(out, lse) if one_each else (out, lse)


def _of_one_each(out, lse):
    """Packed results, [total_q, ..] and [heads, total_q], from those of sequences with one query each."""
    return out[:, 0], None if lse is None else lse[:, :, 0].T.contiguous()
