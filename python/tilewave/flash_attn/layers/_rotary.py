"""The functions of rotary.py, without the class: they need no PyTorch until they are called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import _flash, ops

if TYPE_CHECKING:
    import torch


def apply_rotary_emb(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotates pairs of a head's first rotary_dim dimensions by the angle of their position; the other dimensions pass through.

    x: [batch, seqlen, heads, headdim], or with cu_seqlens (int32 [batch + 1]) packed, [total, heads, headdim]. cos, sin: [positions,
    rotary_dim / 2] of x's dtype or float32. Pairs are n and n + rotary_dim / 2, or `interleaved` 2 n and 2 n + 1. Token s of sequence b has
    the position s + seqlen_offsets, a number or int32 or int64 [batch]. Gives a tensor like x, or `inplace` x itself.

    max_seqlen is accepted; lengths come from cu_seqlens. Packed tokens after the last sequence are also rotated.
    """
    import torch

    _flash.tensor("x", x, 4 if cu_seqlens is None else 3)
    where: dict = {}
    if cu_seqlens is not None:
        cu_seqlens = _flash.int32("cu_seqlens", cu_seqlens, (-1,), x)
        if cu_seqlens.shape[0] < 2:
            raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; allowed: [batch + 1]")
    if isinstance(seqlen_offsets, torch.Tensor):
        _flash.tensor("seqlen_offsets", seqlen_offsets, 1, x, (torch.int32, torch.int64))
        seqlen_offsets = _flash.int32(
            "seqlen_offsets", seqlen_offsets.int(), (x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1,), x
        )
        where["offsets"] = seqlen_offsets
    else:
        where["offset"] = seqlen_offsets
    if cu_seqlens is not None:
        sequence, place = _flash.sequences_of_tokens(cu_seqlens, x.shape[0])
        where = {"positions": place + (seqlen_offsets[sequence] if isinstance(seqlen_offsets, torch.Tensor) else seqlen_offsets)}
    return ops.rope(x, cos, sin, interleaved=interleaved, out=x if inplace else None, **where)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cos_k: torch.Tensor | None = None,
    sin_k: torch.Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
    num_heads_q: int | None = None,
) -> torch.Tensor:
    """apply_rotary_emb() of the queries and keys in qkv, in place; gives qkv.

    qkv: [batch, seqlen, 3, heads, headdim], or with num_heads_q [batch, seqlen, num_heads_q + 2 * kv_heads, headdim]. cos_k, sin_k: tables
    for the keys, if they differ from those of the queries.
    """
    q, k, _ = _flash.unpack_qkv(qkv, num_heads_q)
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(
    kv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | torch.Tensor = 0,
) -> torch.Tensor:
    """apply_rotary_emb() of the keys in kv [batch, seqlen, 2, kv_heads, headdim], in place; gives kv."""
    apply_rotary_emb(_flash.unpack("kv", kv, 5, 2)[0], cos, sin, interleaved, True, seqlen_offsets)
    return kv
