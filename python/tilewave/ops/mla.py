"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) in its absorbed form: decoding, and attention to listed keys. include/tilewave/mla.hpp has the details.

Arrays are NumPy's, PyTorch's or DLPack's, on the CPU or on CUDA, all on one device, in bf16 or f16.
"""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import Gradient, define

_mla_decode = _library.bind("tw_mla_decode", out="o")
_mla_sparse = _library.bind("tw_mla_sparse", out="o")
_mla_sparse_backward = _library.bind("tw_mla_sparse_backward")
_mla_append = _library.bind("tw_mla_append")

LATENT_DIM, KEY_DIM = 512, 576


def mla_decode(
    q: Array,
    kv_cache: Array,
    *,
    seqlens: Array | None = None,
    block_table: Array | None = None,
    scale: float | None = None,
    causal: bool = True,
    max_seqlen: int = 0,
    num_splits: int = 0,
    return_lse: bool = False,
    check_contents: bool | None = None,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """o = softmax(scale q k^T) v, where a token's row of the cache is the key of all heads, and the first 512 columns of it are the value.

    q: [batch, seqlen_q, heads, 576]; kv_cache: [batch, capacity, 576] or, with a block_table, [pages, page_size, 576]. Gives o: [batch,
    seqlen_q, heads, 512], and with `return_lse` lse: f32 [batch, heads, seqlen_q], the natural logarithm of the softmax's denominator.
    Where a query sees no key, o is 0 and lse -inf. The last dimension is contiguous. With q in bf16 the cache may be of 8 bits: uint8 or
    float8_e4m3fn with 656 columns for each token, 512 of e4m3, four f32 scales, one for each 128 columns, and 64 columns of bf16.

    Both int32: seqlens [batch], tokens of each sequence, the new ones included (default: the cache is full); block_table [batch, pages of
    a sequence]. Pages may be of any size; multiples of 16 are copied faster. What no sequence uses of the cache may hold anything.

    scale: default 1 / sqrt(576). causal: token i of q sees the first seqlen - seqlen_q + i + 1 keys, else all. max_seqlen: no sequence is
    longer; helps to choose splits. num_splits: splits of a sequence's keys that run in parallel, up to 128; 0: the library's choice.
    check_contents: waits for the device and refuses wrong lengths and page numbers, which are otherwise clamped; None: as in
    tilewave.check_contents(). out: o's memory. There is no gradient.
    """
    if _dispatch.through_operator(q, kv_cache):
        o, lse = _dispatch.compiled_ops().mla_decode(
            q, kv_cache, seqlens, block_table, scale, causal, max_seqlen, num_splits, check_contents, return_lse
        )
        o = _dispatch.into(out, o)
        return (o, lse) if return_lse else o
    if scale is not None and not float(scale) > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    of_q, of_kv = tensor("q", q), tensor("kv_cache", kv_cache)
    _arrays.require_dims(4, q=q)
    batch, seqlen_q, heads, _ = q.shape
    if out is None:
        out = _arrays.empty(q, (batch, seqlen_q, heads, LATENT_DIM))
    lse = _arrays.empty(q, (batch, heads, seqlen_q), "float32") if return_lse else None
    options = _library.MlaOptions(
        scale=0.0 if scale is None else float(scale),
        not_causal=not causal,
        max_seqlen=_arrays.int32("max_seqlen", max_seqlen),
        num_splits=_arrays.int32("num_splits", num_splits),
        check_contents=_arrays.checks_contents(check_contents),
    )
    for name, array, written in (("seqlens", seqlens, False), ("block_table", block_table, False), ("lse", lse, True)):
        if array is not None:
            setattr(options, name, tensor(name, array, written))
    _mla_decode(of_q, of_kv, tensor("out", out, written=True), _library.byref(options), _arrays.stream(q))
    return (out, lse) if return_lse else out


def mla_sparse(
    q: Array,
    kv: Array,
    indices: Array,
    *,
    topk_length: Array | None = None,
    scale: float | None = None,
    sink: Array | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    return_max_logits: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, ...]:
    """mla_decode() where each query token sees the keys that its list names (DeepSeek-V3.2), in prefilling and decoding.

    q: [tokens, heads, 576]; indices: int32 [tokens, topk]; kv: [kv_tokens, 576], or [pages, page_size, 576], where index page * page_size +
    t is token t of the page; of 8 bits as in mla_decode(). Gives o: [tokens, heads, 512]. An index outside the cache, such as -1, selects
    nothing; one that is listed several times counts as often. Tokens that no list names may hold anything.

    topk_length: int32 [tokens]; only so many entries of each list count. scale: default 1 / sqrt(576). sink: float32 [heads]; exp(sink) is
    added to the softmax denominator of o. num_splits: splits of a list that run in parallel, up to 128; 0: the library's choice.

    With `return_lse` the result is (o, lse), with `return_max_logits` (o, max_logits), with both (o, lse, max_logits). Both are f32
    [tokens, heads]: the natural logarithm of the sum of exp(logit), without the sink, and the largest logit, scale q k. Where a query sees
    no key, o is 0 and these are -inf. out: o's memory. PyTorch's autograd differentiates o, without a sink, with respect to q and a kv of two
    dimensions, by mla_sparse_backward(); deterministic, if PyTorch is asked for deterministic algorithms.
    """
    if _dispatch.through_operator(q, kv):
        needs_lse = return_lse or _dispatch.needs_gradients(q, kv)
        o, lse, max_logits = _dispatch.compiled_ops().mla_sparse(
            q, kv, indices, topk_length, scale, sink, num_splits, needs_lse, return_max_logits
        )
        o = _dispatch.into(out, o)
    else:
        if scale is not None and not float(scale) > 0:
            raise ValueError(f"scale is {scale}; it must be positive")
        of_q, of_kv, of_indices = tensor("q", q), tensor("kv", kv), tensor("indices", indices)
        _arrays.require_dims(3, q=q)
        tokens, heads, _ = q.shape
        o = _arrays.empty(q, (tokens, heads, LATENT_DIM)) if out is None else out
        lse = _arrays.empty(q, (tokens, heads), "float32") if return_lse else None
        max_logits = _arrays.empty(q, (tokens, heads), "float32") if return_max_logits else None
        options = _library.MlaSparseOptions(
            scale=0.0 if scale is None else float(scale), num_splits=_arrays.int32("num_splits", num_splits)
        )
        for name, array, written in (
            ("topk_length", topk_length, False),
            ("sink", sink, False),
            ("lse", lse, True),
            ("max_logits", max_logits, True),
        ):
            if array is not None:
                setattr(options, name, tensor(name, array, written))
        _mla_sparse(of_q, of_kv, of_indices, tensor("out", o, written=True), _library.byref(options), _arrays.stream(q))
    asked = [result for result, wanted in ((lse, return_lse), (max_logits, return_max_logits)) if wanted]
    return (o, *asked) if asked else o


def mla_sparse_backward(
    q: Array,
    kv: Array,
    indices: Array,
    o: Array,
    lse: Array,
    d_o: Array,
    *,
    topk_length: Array | None = None,
    scale: float | None = None,
    deterministic: bool = False,
) -> tuple[Array, Array]:
    """Gradients (dq, dkv) of mla_sparse(), whose results are o and lse, without a sink. d_o is the gradient of o.

    kv: [kv_tokens, 576]. A row's gradient is that of the key, with that of the value added to its first 512 columns, summed in f32 over all
    entries of the lists that name it. deterministic: in the same order in every run.
    """
    if _dispatch.through_operator(q, kv, d_o):
        return _dispatch.compiled_ops().mla_sparse_backward(q, kv, indices, o, lse, d_o, topk_length, scale, deterministic)
    if scale is not None and not float(scale) > 0:
        raise ValueError(f"scale is {scale}; it must be positive")
    names = ("q", "kv", "indices", "o", "lse", "d_o")
    inputs = [tensor(name, x) for name, x in zip(names, (q, kv, indices, o, lse, d_o))]
    gradients = _arrays.empty(q, q.shape), _arrays.empty(kv, kv.shape)
    outputs = [tensor(name, x, written=True) for name, x in zip(("dq", "dkv"), gradients)]
    options = _library.MlaSparseBackwardOptions(
        topk_length=optional("topk_length", topk_length), scale=0.0 if scale is None else float(scale), deterministic=deterministic
    )
    _mla_sparse_backward(*inputs, *outputs, _library.byref(options), _arrays.stream(q))
    return gradients


def mla_append(
    latent: Array,
    rotary: Array,
    kv_cache: Array,
    *,
    seqlens: Array | None = None,
    block_table: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_interleaved: bool = True,
    check_contents: bool | None = None,
) -> Array:
    """Writes new tokens into a latent cache, and returns it: token i of sequence b becomes token seqlens[b] + i.

    latent: [batch, seqlen_new, 512]; rotary: [batch, seqlen_new, 64], which is rotated by row seqlens[b] + i of rotary_cos and rotary_sin,
    [positions, 32] in f32 or the cache's dtype, if they are given; pairs are 2 k and 2 k + 1, or without `rotary_interleaved` k and k + 32.
    kv_cache and block_table: as in mla_decode(); to a cache of 8 bits the scale of 128 columns is their largest magnitude / 448. seqlens: int32 [batch], tokens before this call; None: none. Tokens that do not fit are
    dropped on CUDA, and refused on the CPU or with check_contents. Queries are rotated by rope() with offsets=seqlens.
    """
    if _dispatch.through_operator(latent, rotary, kv_cache):
        _dispatch.compiled_ops().mla_append(
            latent, rotary, kv_cache, seqlens, block_table, rotary_cos, rotary_sin, rotary_interleaved, check_contents
        )
        return kv_cache
    options = _library.MlaAppendOptions(rotary_half_split=not rotary_interleaved, check_contents=_arrays.checks_contents(check_contents))
    for name, array in (("seqlens", seqlens), ("block_table", block_table), ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if array is not None:
            setattr(options, name, tensor(name, array))
    of_latent, of_rotary = tensor("latent", latent), tensor("rotary", rotary)
    _mla_append(of_latent, of_rotary, tensor("kv_cache", kv_cache, written=True), _library.byref(options), _arrays.stream(kv_cache))
    return kv_cache


# As operators of PyTorch. mla_decode returns two tensors always, and mla_sparse three.


def _operator_mla_decode(q, kv_cache, seqlens, block_table, scale, causal, max_seqlen, num_splits, check_contents, return_lse):
    result = mla_decode(
        q,
        kv_cache,
        seqlens=seqlens,
        block_table=block_table,
        scale=scale,
        causal=causal,
        max_seqlen=max_seqlen,
        num_splits=num_splits,
        check_contents=check_contents,
        return_lse=return_lse,
    )
    return result if return_lse else (result, _arrays.empty(q, (0,), "float32"))


def _fake_mla_decode(q, kv_cache, *rest):
    if q.dim() != 4:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must have 4 dimensions")
    batch, seqlen_q, heads, _ = q.shape
    lse_shape = (batch, heads, seqlen_q) if rest[-1] else (0,)
    return q.new_empty((batch, seqlen_q, heads, LATENT_DIM)), _arrays.empty(q, lse_shape, "float32")


define(
    "mla_decode(Tensor q, Tensor kv_cache, Tensor? seqlens, Tensor? block_table, float? scale, bool causal, SymInt max_seqlen, "
    "SymInt num_splits, bool? check_contents, bool return_lse) -> (Tensor, Tensor)",
    _operator_mla_decode,
    _fake_mla_decode,
)


def _operator_mla_sparse(q, kv, indices, topk_length, scale, sink, num_splits, return_lse, return_max_logits):
    result = mla_sparse(
        q,
        kv,
        indices,
        topk_length=topk_length,
        scale=scale,
        sink=sink,
        num_splits=num_splits,
        return_lse=return_lse,
        return_max_logits=return_max_logits,
    )
    o, *asked = result if return_lse or return_max_logits else (result,)
    lse = asked.pop(0) if return_lse else _arrays.empty(q, (0,), "float32")
    max_logits = asked.pop(0) if return_max_logits else _arrays.empty(q, (0,), "float32")
    return o, lse, max_logits


def _fake_mla_sparse(q, kv, indices, topk_length, scale, sink, num_splits, return_lse, return_max_logits):
    if q.dim() != 3:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must have 3 dimensions")
    tokens, heads, _ = q.shape
    results = [_arrays.empty(q, (tokens, heads) if wanted else (0,), "float32") for wanted in (return_lse, return_max_logits)]
    return q.new_empty((tokens, heads, LATENT_DIM)), *results


def _keep_mla_sparse(ctx, inputs, output):
    q, kv, indices, topk_length, ctx.scale, sink, *_ = inputs
    ctx.has_sink = sink is not None
    ctx.save_for_backward(q, kv, indices, topk_length, *output[:2])
    ctx.mark_non_differentiable(*output[1:])


def _gradients_mla_sparse(ctx, d_o, *_):
    q, kv, indices, topk_length, o, lse = ctx.saved_tensors
    if ctx.has_sink:
        raise NotImplementedError("sink is given; mla_sparse() has gradients without a sink")
    if kv.dim() != 2 or kv.dtype != q.dtype:
        given = f"kv is {kv.dtype} with shape {tuple(kv.shape)}"
        raise NotImplementedError(f"{given}; mla_sparse() has gradients for [kv_tokens, 576] of q's dtype")
    deterministic = _dispatch.deterministic_algorithms()
    gradients = _dispatch.compiled_ops().mla_sparse_backward(
        q, kv, indices, o, lse, d_o.contiguous(), topk_length, ctx.scale, deterministic
    )
    return (*gradients, *[None] * 7)


define(
    "mla_sparse(Tensor q, Tensor kv, Tensor indices, Tensor? topk_length, float? scale, Tensor? sink, SymInt num_splits, "
    "bool return_lse, bool return_max_logits) -> (Tensor, Tensor, Tensor)",
    _operator_mla_sparse,
    _fake_mla_sparse,
    Gradient(_keep_mla_sparse, _gradients_mla_sparse),
)


def _operator_mla_sparse_backward(q, kv, indices, o, lse, d_o, topk_length, scale, deterministic):
    return mla_sparse_backward(q, kv, indices, o, lse, d_o, topk_length=topk_length, scale=scale, deterministic=deterministic)


define(
    "mla_sparse_backward(Tensor q, Tensor kv, Tensor indices, Tensor o, Tensor lse, Tensor d_o, Tensor? topk_length, float? scale, "
    "bool deterministic) -> (Tensor, Tensor)",
    _operator_mla_sparse_backward,
    lambda q, kv, *_: (q.new_empty(q.shape), kv.new_empty(kv.shape)),
)


def _operator_mla_append(latent, rotary, kv_cache, seqlens, block_table, rotary_cos, rotary_sin, rotary_interleaved, check_contents):
    mla_append(
        latent,
        rotary,
        kv_cache,
        seqlens=seqlens,
        block_table=block_table,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        check_contents=check_contents,
    )


define(
    "mla_append(Tensor latent, Tensor rotary, Tensor(a!) kv_cache, Tensor? seqlens, Tensor? block_table, Tensor? rotary_cos, "
    "Tensor? rotary_sin, bool rotary_interleaved, bool? check_contents) -> ()",
    _operator_mla_append,
    lambda *arguments: None,
)
