"""flash-linear-attention's functions for native sparse attention (NSA; arXiv 2502.11089; github.com/fla-org/native-sparse-attention), by their names and argument order, on Tilewave's
kernels:

    from tilewave.nsa import parallel_nsa

    o = parallel_nsa(q, k, v, g_cmp, g_slc, g_swa, block_counts=16, block_size=64, window_size=512)

Tensors are PyTorch's, on CUDA or on the CPU, in bfloat16 or float16, on the CPU also float32: q [batch, time, query heads, dim], k and v [batch, time, heads, dim], dims up to 128. Query
heads are heads times 1 to 64; fla wants a multiple of 16. All functions but parallel_nsa_topk() have gradients, with respect to q, k, v and gates.

What differs: a block that a list names twice counts once; where a query sees no compressed key, lse is -inf and not 0; lists of parallel_nsa_topk() end with -1 instead of repeating block
0, and always have the first block and the last two.
"""

from __future__ import annotations

from . import _arrays
from .ops import attention, attention_varlen, nsa_combine, nsa_compressed, nsa_select, nsa_selected

__all__ = ["mean_pooling", "parallel_nsa", "parallel_nsa_compression", "parallel_nsa_topk"]


def _torch(q):
    """PyTorch, which need not be installed to import this module."""
    torch = _arrays.torch_of(q)
    if torch is None:
        raise TypeError(f"q is a {type(q).__name__}; PyTorch tensors are taken")
    return torch


def _int32(torch, x):
    return None if x is None else x.to(torch.int32).contiguous()


def _compressed_offsets(torch, cu_seqlens, block_size):
    """The offsets of compressed keys. fla has one for an incomplete last block, too."""
    if cu_seqlens is None:
        return None
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    blocks = torch.div(lengths + block_size - 1, block_size, rounding_mode="floor")
    return _int32(torch, torch.cat([cu_seqlens.new_zeros(1), blocks.cumsum(0)]))


def mean_pooling(x, chunk_size, cu_seqlens=None, head_first=False):
    """Means of blocks of `chunk_size` tokens: x [batch, time, heads, dim], result [batch, blocks, heads, dim]. A last block that is incomplete has the mean of its tokens. With cu_seqlens
    blocks begin anew in each sequence; their number is read from the device."""
    torch = _torch(x)
    if head_first:
        return mean_pooling(x.transpose(1, 2), chunk_size, cu_seqlens).transpose(1, 2)
    if cu_seqlens is not None:
        bounds = cu_seqlens.tolist()
        parts = [mean_pooling(x[:, begin:end], chunk_size) for begin, end in zip(bounds, bounds[1:]) if end > begin]
        return torch.cat(parts, 1) if parts else x[:, :0]
    batch, time, heads, dim = x.shape
    whole = time // chunk_size * chunk_size
    means = x[:, :whole].reshape(batch, -1, chunk_size, heads, dim).float().mean(2)
    if whole < time:
        means = torch.cat([means, x[:, whole:].float().mean(1, keepdim=True)], 1)
    return means.to(x.dtype)


def parallel_nsa_compression(q, k, v, block_size=64, scale=None, offsets=None):
    """Attention over compressed keys: (o, lse). k and v: [batch, blocks, heads, dim], as mean_pooling() gives them; lse: f32 [batch, time, query heads]. offsets: cu_seqlens of the tokens."""
    torch = _torch(q)
    return nsa_compressed(
        q,
        k,
        v,
        block_size=block_size,
        scale=scale,
        cu_seqlens=_int32(torch, offsets),
        cu_seqlens_k=_compressed_offsets(torch, offsets, block_size),
        return_lse=True,
    )


def parallel_nsa_topk(q, k, lse, block_counts, block_size=64, scale=None, offsets=None):
    """The blocks that each token selects, int32 [batch, time, heads, blocks]: `block_counts` of them, or the largest count if it is a tensor. lse: parallel_nsa_compression()'s; None:
    computed here."""
    torch = _torch(q)
    slots = block_counts if isinstance(block_counts, int) else int(block_counts.max())
    cu_seqlens, cu_seqlens_k = _int32(torch, offsets), _compressed_offsets(torch, offsets, block_size)
    options = {"block_size": block_size, "scale": scale, "cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
    with torch.no_grad():
        if lse is None:
            _, lse = nsa_compressed(q, k, k, return_lse=True, **options)
        return nsa_select(q.detach(), k.detach(), lse.detach().contiguous(), slots, **options)


def _window(q, k, v, window_size, scale, cu_seqlens):
    options = {"causal": True, "window": (window_size - 1, 0), "scale": scale}
    if cu_seqlens is None:
        return attention(q, k, v, **options)
    return attention_varlen(q[0], k[0], v[0], cu_seqlens, cu_seqlens, **options)[None]


def parallel_nsa(
    q,
    k,
    v,
    g_cmp,
    g_slc,
    g_swa,
    block_indices=None,
    block_counts=16,
    block_size=64,
    window_size=0,
    scale=None,
    cu_seqlens=None,
    head_first=False,
):
    """Native sparse attention: g_slc times attention over selected blocks, plus g_cmp times attention over means of blocks, plus g_swa times attention over a window of `window_size`
    tokens if that is not 0.

    Gates are [batch, time, query heads]. With g_cmp blocks are selected here, and block_indices is ignored; without it, block_indices [batch, time, heads, slots] are the blocks.
    block_counts: how many count, for all tokens or as a tensor [batch, time, heads]. block_size: 32 or a multiple of 64. cu_seqlens: the batch is 1 and holds packed sequences.
    """
    torch = _torch(q)
    if block_counts is None:
        raise ValueError("block_counts is None; it must be a number or a tensor")
    if g_cmp is None and block_indices is None:
        raise ValueError("g_cmp and block_indices are None; one of them must be given")
    if head_first:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        g_cmp, g_slc, g_swa = (None if g is None else g.transpose(1, 2) for g in (g_cmp, g_slc, g_swa))
        if not isinstance(block_counts, int):
            block_counts = block_counts.transpose(1, 2)
        if block_indices is not None:
            block_indices = block_indices.transpose(1, 2)
    o_cmp = o_swa = None
    if g_cmp is not None:
        k_cmp, v_cmp = mean_pooling(k, block_size, cu_seqlens), mean_pooling(v, block_size, cu_seqlens)
        o_cmp, lse = parallel_nsa_compression(q, k_cmp, v_cmp, block_size, scale, cu_seqlens)
        block_indices = parallel_nsa_topk(q, k_cmp, lse, block_counts, block_size, scale, cu_seqlens)
    if isinstance(block_counts, int):
        block_indices, block_counts = block_indices[..., :block_counts], None
    o_slc = nsa_selected(
        q,
        k,
        v,
        _int32(torch, block_indices),
        block_size=block_size,
        block_counts=_int32(torch, block_counts),
        scale=scale,
        cu_seqlens=_int32(torch, cu_seqlens),
    )
    if window_size > 0:
        o_swa = _window(q, k, v, window_size, scale, _int32(torch, cu_seqlens))
    o = nsa_combine((o_slc, o_cmp, o_swa), (g_slc, g_cmp, g_swa))
    return o.transpose(1, 2) if head_first else o
