"""Block-sparse attention: each block of queries attends to the blocks of keys that a mask or indices select.

Either block_mask is given, bool [batch, heads, query_blocks, key_blocks], or block_indices, int32 [batch, heads, query_blocks, entries], with
block_counts, int32 [batch, heads, query_blocks], how many entries of each list are used, or without: all. Indices come in any order, a block
listed twice counts once, and entries that are not a block's number are ignored. batch may be 1, for all sequences, and heads may be q's, k's
or 1. Blocks have 64 or 128 queries and keys. Queries that select nothing give 0 and an lse of -inf.

Other arguments are as in attention(). bf16 or f16, on the CPU f32 too.
"""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import Gradient, define
from .attention import (
    _as_input,
    _attention,
    _attention_backward,
    _attention_decode,
    _attention_varlen,
    _attention_varlen_backward,
    _fake,
    _missing,
    _options,
    _output,
    _packed_lse,
    _with_lse,
)


def _with_blocks(options, block_mask, block_indices, block_counts, query_block, key_block):
    if block_mask is None and block_indices is None:
        raise ValueError("block_mask and block_indices are None; one of them is needed")
    given, options = options, _library.AttentionOptions.from_buffer_copy(options)  # options without tensors are shared
    options.given = given  # keeps the tensors that the copy points to
    options.block_mask = optional("block_mask", block_mask)
    options.block_indices = optional("block_indices", block_indices)
    options.block_counts = optional("block_counts", block_counts)
    options.query_block, options.key_block = _arrays.int32("query_block", query_block), _arrays.int32("key_block", key_block)
    return options


def _check_packed(cu_seqlens_q, cu_seqlens_k):
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        missing = "cu_seqlens_k" if cu_seqlens_k is None else "cu_seqlens_q"
        raise ValueError(f"{missing} is None; packed sequences need cu_seqlens_q and cu_seqlens_k")


def block_sparse_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    block_mask: Array | None = None,
    block_indices: Array | None = None,
    block_counts: Array | None = None,
    query_block: int = 128,
    key_block: int = 128,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    causal_offset: int | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: Array | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    check_contents: bool | None = None,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """attention(), or with cu_seqlens_q and cu_seqlens_k attention_varlen(), of the selected blocks.

    PyTorch's autograd differentiates o with respect to q, k, v and sink by block_sparse_attention_backward(). deterministic: its results have
    the same bits in every run.
    """
    _check_packed(cu_seqlens_q, cu_seqlens_k)
    blocks = (block_mask, block_indices, block_counts, query_block, key_block)
    if _dispatch.through_operator(q, k, v, sink):
        needs_lse = return_lse or _dispatch.needs_gradients(q, k, v, sink)
        o, lse = _dispatch.compiled_ops().block_sparse_attention(
            q, k, v, *blocks, cu_seqlens_q, cu_seqlens_k, scale, causal, causal_offset, window[0], window[1], softcap, sink, deterministic,
            check_contents, needs_lse,
        )  # fmt: skip
        o = _dispatch.into(out, o)
        return (o, lse) if return_lse else o
    of_q, of_k, of_v = tensor("q", q), tensor("k", k), tensor("v", v)
    if cu_seqlens_q is None:
        out = _output(q, v, "v") if out is None else out
        lse = _arrays.empty(q, (q.shape[0], q.shape[2], q.shape[1]), "float32") if return_lse else None
    else:
        _arrays.require_dims(3, q=q, v=v)
        out = _arrays.full(q, (*q.shape[:2], v.shape[2]), 0.0) if out is None else out
        lse = _packed_lse(q) if return_lse else None
    options = _options(scale, causal, causal_offset, window, softcap, None, sink, None, lse, check_contents)
    options = _with_blocks(options, *blocks)
    results = tensor("out", out, written=True)
    if cu_seqlens_q is None:
        _attention(of_q, of_k, of_v, results, _library.byref(options), _arrays.stream(q))
    else:
        offsets = tensor("cu_seqlens_q", cu_seqlens_q), tensor("cu_seqlens_k", cu_seqlens_k)
        _attention_varlen(of_q, of_k, of_v, results, *offsets, None, None, _library.byref(options), _arrays.stream(q))
    return (out, lse) if return_lse else out


def block_sparse_attention_backward(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    d_o: Array,
    *,
    block_mask: Array | None = None,
    block_indices: Array | None = None,
    block_counts: Array | None = None,
    query_block: int = 128,
    key_block: int = 128,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    causal_offset: int | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: Array | None = None,
    deterministic: bool = False,
    check_contents: bool | None = None,
) -> tuple[Array, ...]:
    """Gradients of block_sparse_attention() with respect to q, k and v, and to `sink` if that is given: (dq, dk, dv) or (dq, dk, dv, d_sink).
    See attention_backward()."""
    _check_packed(cu_seqlens_q, cu_seqlens_k)
    blocks = (block_mask, block_indices, block_counts, query_block, key_block)
    if _dispatch.through_operator(q, k, v, o, lse, d_o, sink):
        gradients = _dispatch.compiled_ops().block_sparse_attention_backward(
            q, k, v, o, lse, d_o, *blocks, cu_seqlens_q, cu_seqlens_k, scale, causal, causal_offset, window[0], window[1], softcap, sink,
            deterministic, check_contents,
        )  # fmt: skip
        return tuple(gradients[: 3 if sink is None else 4])
    inputs = [tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("d_o", d_o))]
    forward = _options(scale, causal, causal_offset, window, softcap, None, sink, None, None, check_contents)
    forward = _with_blocks(forward, *blocks)
    out = tuple(_arrays.empty(x, x.shape) for x in ((q, k, v) if sink is None else (q, k, v, sink)))
    outputs = [tensor(name, x, written=True) for name, x in zip(("dq", "dk", "dv", "d_sink"), out)]
    options = _library.AttentionBackwardOptions(
        forward=_library.addressof(forward), d_sink=None if sink is None else outputs[3], deterministic=bool(deterministic)
    )
    if cu_seqlens_q is None:
        _attention_backward(*inputs, *outputs[:3], _library.byref(options), _arrays.stream(q))
    else:
        offsets = tensor("cu_seqlens_q", cu_seqlens_q), tensor("cu_seqlens_k", cu_seqlens_k)
        _attention_varlen_backward(*inputs, *outputs[:3], *offsets, None, None, _library.byref(options), _arrays.stream(q))
    return out


def block_sparse_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    block_mask: Array | None = None,
    block_indices: Array | None = None,
    block_counts: Array | None = None,
    key_block: int = 64,
    seqlens: Array | None = None,
    batch_idx: Array | None = None,
    leftpad: Array | None = None,
    block_table: Array | None = None,
    num_splits: int = 0,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: Array | None = None,
    return_lse: bool = False,
    check_contents: bool | None = None,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """attention_decode() of the selected blocks of a cache.

    All queries of a sequence, of all heads that share keys, have the same blocks: heads of the mask or indices are kv_heads or 1, and
    query_blocks is 1. Blocks count from the sequence's first key, after leftpad, whatever the pages. Keys are split by the number of blocks
    that are selected.
    """
    blocks = (block_mask, block_indices, block_counts)
    if _dispatch.through_operator(q, k_cache, v_cache, sink):
        o, lse = _dispatch.compiled_ops().block_sparse_decode(
            q, k_cache, v_cache, *blocks, key_block, seqlens, batch_idx, leftpad, block_table, num_splits, scale, causal, window[0],
            window[1], softcap, sink, check_contents, return_lse,
        )  # fmt: skip
        o = _dispatch.into(out, o)
        return (o, lse) if return_lse else o
    of_q, of_k, of_v = tensor("q", q), tensor("k_cache", k_cache), tensor("v_cache", v_cache)
    out = _output(q, v_cache, "v_cache") if out is None else out
    lse = _arrays.empty(q, (q.shape[0], q.shape[2], q.shape[1]), "float32") if return_lse else None
    cache = _library.CacheOptions(num_splits=_arrays.int32("num_splits", num_splits))
    for name, array in (("seqlens", seqlens), ("batch_idx", batch_idx), ("leftpad", leftpad), ("block_table", block_table)):
        setattr(cache, name, optional(name, array))
    options = _options(scale, causal, None, window, softcap, None, sink, None, lse, check_contents)
    options = _with_blocks(options, *blocks, 128, key_block)
    results = tensor("out", out, written=True)
    _attention_decode(of_q, of_k, of_v, results, _library.byref(cache), _library.byref(options), _arrays.stream(q))
    return (out, lse) if return_lse else out


# As operators of PyTorch.

_BLOCKS = ("block_mask", "block_indices", "block_counts", "query_block", "key_block", "cu_seqlens_q", "cu_seqlens_k")
_BLOCKS_SCHEMA = (
    "Tensor? block_mask, Tensor? block_indices, Tensor? block_counts, SymInt query_block, SymInt key_block, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k"
)
_OPTIONS_SCHEMA = (
    "float? scale, bool causal, SymInt? causal_offset, SymInt window_left, SymInt window_right, float softcap, Tensor? sink, "
    "bool deterministic, bool? check_contents"
)


def _named(arguments: tuple) -> dict:
    """Keyword arguments from what follows the tensors of an operator, in the order of the schemas."""
    scale, causal, causal_offset, left, right, softcap, sink, deterministic, check_contents = arguments[len(_BLOCKS) :]
    return {
        **dict(zip(_BLOCKS, arguments)),
        "scale": scale,
        "causal": causal,
        "causal_offset": causal_offset,
        "window": (left, right),
        "softcap": softcap,
        "sink": sink,
        "deterministic": deterministic,
        "check_contents": check_contents,
    }


def _operator(q, k, v, *rest):
    *arguments, return_lse = rest
    return _with_lse(block_sparse_attention(q, k, v, **_named(tuple(arguments)), return_lse=return_lse), q, return_lse)


def _keep_for_backward(ctx, inputs, output):
    q, k, v, *arguments, _ = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    tensors = [x if hasattr(x, "dim") else None for x in arguments]
    ctx.save_for_backward(q, k, v, o, lse, *tensors)
    ctx.others = [None if kept is not None else x for kept, x in zip(tensors, arguments)]


def _gradients(ctx, d_o, _):
    q, k, v, o, lse, *tensors = ctx.saved_tensors
    arguments = [other if kept is None else kept for kept, other in zip(tensors, ctx.others)]
    sink, deterministic = arguments[-3], arguments[-2] or _dispatch.deterministic_algorithms()
    what = None
    if lse.numel() == 0 and q.numel() > 0:
        what = "operator block_sparse_attention has no backward if return_lse is False"
    elif q.is_cuda and _arrays.dtype_name(q) == "float32":
        what = "block_sparse_attention has no backward of float32 on CUDA, only of bfloat16 and float16"
    if what is not None:
        dq, dk, dv, d_sink = (None if x is None else _missing(d_o, what, x) for x in (q, k, v, sink))
    else:
        # The forward pass has checked the offsets, if that was asked for.
        dq, dk, dv, d_sink = _dispatch.compiled_ops().block_sparse_attention_backward(
            q, k, v, o, lse, d_o, *arguments[:-2], deterministic, False
        )
    return dq, dk, dv, *(None,) * (len(arguments) - 3), None if sink is None else d_sink, None, None, None


define(
    f"block_sparse_attention(Tensor q, Tensor k, Tensor v, {_BLOCKS_SCHEMA}, {_OPTIONS_SCHEMA}, bool return_lse) -> (Tensor, Tensor)",
    _operator,
    _fake,
    Gradient(_keep_for_backward, _gradients),
)


def _operator_backward(q, k, v, o, lse, d_o, *arguments):
    gradients = block_sparse_attention_backward(q, k, v, o, lse, _as_input(d_o), **_named(arguments))
    return gradients if len(gradients) == 4 else (*gradients, _arrays.empty(lse, (0,)))


def _fake_backward(q, k, v, o, lse, d_o, *arguments):
    sink = arguments[-3]
    return (*(x.new_empty(x.shape) for x in (q, k, v)), _arrays.empty(lse, (0,) if sink is None else sink.shape))


define(
    f"block_sparse_attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor d_o, {_BLOCKS_SCHEMA}, {_OPTIONS_SCHEMA}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _operator_backward,
    _fake_backward,
)


def _operator_decode(q, k_cache, v_cache, *rest):
    names = (
        "block_mask",
        "block_indices",
        "block_counts",
        "key_block",
        "seqlens",
        "batch_idx",
        "leftpad",
        "block_table",
        "num_splits",
        "scale",
        "causal",
    )
    left, right, softcap, sink, check_contents, return_lse = rest[len(names) :]
    result = block_sparse_decode(
        q,
        k_cache,
        v_cache,
        **dict(zip(names, rest)),
        window=(left, right),
        softcap=softcap,
        sink=sink,
        check_contents=check_contents,
        return_lse=return_lse,
    )
    return _with_lse(result, q, return_lse)


define(
    "block_sparse_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? block_mask, Tensor? block_indices, Tensor? block_counts, "
    "SymInt key_block, Tensor? seqlens, Tensor? batch_idx, Tensor? leftpad, Tensor? block_table, SymInt num_splits, float? scale, bool causal, "
    "SymInt window_left, SymInt window_right, float softcap, Tensor? sink, bool? check_contents, bool return_lse) -> (Tensor, Tensor)",
    _operator_decode,
    _fake,
)
