"""Vertical-slash sparse attention (MInference; arXiv 2407.02490): causal attention over columns and slashes, and their lists. include/tilewave/vertical_slash.hpp has the details.

Arrays are NumPy's, PyTorch's or DLPack's, on the CPU or on CUDA, all on one device. vertical: int32 [batch, heads, columns], keys that all later queries see, up to 65536; slash: int32
[batch, heads, slashes], distances at which each query sees a key; both contiguous, in any order. Numbers outside 0 to seqlen - 1 are ignored, and one that is there twice counts once.
"""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import define

_vertical_slash_attention = _library.bind("tw_vertical_slash_attention", out="o")
_vertical_slash_index = _library.bind("tw_vertical_slash_index")


def _options(query_block, scale, seqlens, lse):
    if scale is not None and not float(scale) > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    query_block = _arrays.int32("query_block", query_block)
    if query_block == 0:  # the library's default
        raise ValueError("query_block is 0; it must be 64 or 128")
    return _library.VerticalSlashOptions(
        query_block=query_block,
        scale=0.0 if scale is None else float(scale),
        seqlens=optional("seqlens", seqlens),
        lse=optional("lse", lse, written=True),
    )


def vertical_slash_attention(
    q: Array,
    k: Array,
    v: Array,
    vertical: Array,
    slash: Array,
    *,
    query_block: int = 64,
    scale: float | None = None,
    seqlens: Array | None = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of each block of queries over the blocks of keys and the columns that vertical_slash_index() lists for it, with a causal mask.

    q and o: [batch, seqlen, heads, dim]; k and v: [batch, seqlen, kv_heads, dim], in bf16 or f16, on the CPU also f32, with any strides but a contiguous last dimension; dims are multiples
    of 8 up to 256. query_block: queries that share blocks of keys, 64 or 128. scale: default 1 / sqrt(head_dim). seqlens: int32 [batch], tokens of each sequence, the first ones.

    Gives o, and with `return_lse` lse: f32 [batch, heads, seqlen]. A query that sees no key, or that comes after its sequence's end, has 0 and -inf. out: o's memory. It has no gradient.
    """
    if _dispatch.through_operator(q, k, v):
        o, lse = _dispatch.compiled_ops().vertical_slash_attention(q, k, v, vertical, slash, seqlens, query_block, scale, return_lse)
        o = _dispatch.into(out, o)
        return (o, lse) if return_lse else o
    inputs = [tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("vertical", vertical), ("slash", slash))]
    _arrays.require_dims(4, q=q, v=v)
    if out is None:
        out = _arrays.empty(q, (*q.shape[:3], v.shape[3]))
    lse = _arrays.empty(q, (q.shape[0], q.shape[2], q.shape[1]), "float32") if return_lse else None
    options = _options(query_block, scale, seqlens, lse)
    _vertical_slash_attention(*inputs, tensor("out", out, written=True), _library.byref(options), _arrays.stream(q))
    return (out, lse) if return_lse else out


def vertical_slash_index(
    vertical: Array, slash: Array, seqlen: int, *, query_block: int = 64, seqlens: Array | None = None
) -> tuple[Array, Array, Array, Array]:
    """The lists (block_count, block_offset, column_count, column_index) of each block of query_block queries, 64 or 128: int32 [batch, heads, blocks] and [batch, heads, blocks, slashes],
    the first keys of blocks of query_block keys that hold its slashes, which begin anywhere; [batch, heads, blocks] and [batch, heads, blocks, columns], the columns before its end that these
    do not hold. Both ascending. Entries after the counts are 0."""
    if _dispatch.through_operator(vertical, slash):
        return _dispatch.compiled_ops().vertical_slash_index(vertical, slash, seqlens, seqlen, query_block)
    of_vertical, of_slash = tensor("vertical", vertical), tensor("slash", slash)
    _arrays.require_dims(3, vertical=vertical, slash=slash)
    options = _options(query_block, None, seqlens, None)
    seqlen = _arrays.integer("seqlen", seqlen, 0, 2**29)
    counts = (*vertical.shape[:2], -(-seqlen // query_block))
    shapes = (counts, (*counts, slash.shape[2]), counts, (*counts, vertical.shape[2]))
    lists = tuple(_arrays.empty(vertical, shape, "int32") for shape in shapes)
    names = ("block_count", "block_offset", "column_count", "column_index")
    outputs = [tensor(name, x, written=True) for name, x in zip(names, lists)]
    _vertical_slash_index(of_vertical, of_slash, seqlen, *outputs, _library.byref(options), _arrays.stream(vertical))
    return lists


# As operators of PyTorch.


def _operator_attention(q, k, v, vertical, slash, seqlens, query_block, scale, return_lse):
    options = {"query_block": query_block, "scale": scale, "seqlens": seqlens}
    result = vertical_slash_attention(q, k, v, vertical, slash, return_lse=return_lse, **options)
    return result if return_lse else (result, _arrays.empty(q, (0,), "float32"))


def _fake_attention(q, k, v, vertical, slash, seqlens, query_block, scale, return_lse):
    _arrays.require_dims(4, q=q, v=v)
    lse = (q.shape[0], q.shape[2], q.shape[1]) if return_lse else (0,)
    return q.new_empty((*q.shape[:3], v.shape[3])), _arrays.empty(q, lse, "float32")


define(
    "vertical_slash_attention(Tensor q, Tensor k, Tensor v, Tensor vertical, Tensor slash, Tensor? seqlens, int query_block, "
    "float? scale, bool return_lse) -> (Tensor, Tensor)",
    _operator_attention,
    _fake_attention,
)


def _fake_index(vertical, slash, seqlens, seqlen, query_block):
    _arrays.require_dims(3, vertical=vertical, slash=slash)
    counts = (*vertical.shape[:2], (seqlen + query_block - 1) // query_block)
    shapes = (counts, (*counts, slash.shape[2]), counts, (*counts, vertical.shape[2]))
    return tuple(vertical.new_empty(shape) for shape in shapes)


define(
    "vertical_slash_index(Tensor vertical, Tensor slash, Tensor? seqlens, SymInt seqlen, int query_block) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    lambda vertical, slash, seqlens, seqlen, query_block: vertical_slash_index(
        vertical, slash, seqlen, query_block=query_block, seqlens=seqlens
    ),
    _fake_index,
)
