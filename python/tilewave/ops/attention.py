"""Attention: exact softmax(S) V in O(seqlen) memory and its gradients, packed sequences of any lengths, and few queries against a cache.

Query i of a sequence is aligned with key i + diagonal. The diagonal is seqlen_k - seqlen_q, which aligns the last query with the last key
(FlashAttention's convention). The score of query i and key j is s = scale q_i k_j. Then follow, in this order, the options that are set:
s = softcap tanh(s / softcap), s -= slope |i + diagonal - j|, s += mask. Finally s is -inf if `causal`, the window,
attention_chunk or a boolean mask hides the key.

Arrays are NumPy's, PyTorch's or DLPack's, on the CPU or on CUDA, all on one device. bf16 or f16, on the CPU f32 too. Head dimensions are
multiples of 8 up to 256, the last dimension is contiguous. q, k and v may be float8_e4m3fn. heads is a multiple of kv_heads: query head h
uses key head h // (heads // kv_heads). On CUDA calls are enqueued on PyTorch's current stream and return.
"""

from __future__ import annotations

import functools

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import Gradient, define

_attention = _library.bind("tw_attention", out="o")
_attention_backward = _library.bind("tw_attention_backward")
_attention_dropout_mask = _library.bind("tw_attention_dropout_mask")
_attention_varlen = _library.bind("tw_attention_varlen", out="o")
_attention_varlen_backward = _library.bind("tw_attention_varlen_backward")
_attention_decode = _library.bind("tw_attention_decode", out="o")

_LONGEST = (1 << 30) - 1  # a window beyond it hides nothing


def _options(
    scale, causal, causal_offset, window, softcap, alibi_slopes, sink, mask, lse, check_contents, dropout=0.0, dropout_state=None,
    descales=(None, None, None), attention_chunk=0, sm_margin=0, qv=None,
):  # fmt: skip
    scale = None if scale is None else float(scale)  # not what may change its value, like a tensor
    check_contents = _arrays.checks_contents(check_contents)
    numbers = _numbers(scale, bool(causal), causal_offset, *window, float(softcap), check_contents, attention_chunk, sm_margin)
    if alibi_slopes is sink is mask is lse is qv is None and not dropout and all(descale is None for descale in descales):
        return numbers
    options = _library.AttentionOptions.from_buffer_copy(numbers)
    options.alibi_slopes = optional("alibi_slopes", alibi_slopes)
    options.sink = optional("sink", sink)
    options.mask = optional("mask", mask)
    options.lse = optional("lse", lse, written=True)
    options.qv = optional("qv", qv)
    if dropout:
        if dropout_state is None:
            raise ValueError("dropout_state is None; dropout needs it: int64 [2], seed and offset")
        options.dropout = dropout
        options.dropout_state = tensor("dropout_state", dropout_state)
    for name, descale in zip(("q_descale", "k_descale", "v_descale"), descales):
        setattr(options, name, optional(name, descale))
    return options


def drawn_dropout_state(q, dropout, state=None):
    """The state of dropout: the caller's, or one that PyTorch's generator draws, as it does in CUDA graphs and compiled functions too."""
    torch = _arrays.torch_of(q)
    if not dropout or state is not None or torch is None:
        return state
    return torch.randint(-(1 << 63), (1 << 63) - 1, (2,), dtype=torch.int64, device=q.device)


@functools.lru_cache(maxsize=256)
def _numbers(scale, causal, causal_offset, left, right, softcap, check_contents, attention_chunk, sm_margin):
    """Options without tensors, cached because filling them in takes longer than a launch. Callers must not change them."""
    left, right = (min(_arrays.int32("window", n), _LONGEST) for n in (left, right))
    options = _library.AttentionOptions(
        scale=0.0 if scale is None else scale,
        causal=causal,
        has_causal_offset=causal_offset is not None,
        causal_offset=_arrays.int32("causal_offset", 0 if causal_offset is None else causal_offset),
        has_window_left=left != -1,
        window_left=left,
        has_window_right=right != -1,
        window_right=right,
        softcap=softcap,
        check_contents=check_contents,
        attention_chunk=_arrays.int32("attention_chunk", attention_chunk),
        sm_margin=_arrays.int32("sm_margin", sm_margin),
    )
    for name, given, smallest in (("scale", scale, "positive"), ("softcap", softcap or None, "0 for none, or positive")):
        if given is not None and not getattr(options, name) > 0:  # as a float: 0 is the default
            raise ValueError(f"{name} is {given}; it must be {smallest}, and not so small that a float32 is 0")
    return options


def _output(q, v, name):
    """[batch, seqlen_q, heads, value_dim]; `name` is v's."""
    shape, value_shape = q.shape, v.shape  # PyTorch makes a new object each time
    if len(shape) != 4 or len(value_shape) != 4:
        _arrays.require_dims(4, **{"q": q, name: v})
    return _arrays.empty(q, (shape[0], shape[1], shape[2], value_shape[3]), _result_dtype(q))


def _result_dtype(q):
    """None: q's."""
    return "bfloat16" if _arrays.dtype_name(q) == "float8_e4m3fn" else None


def _packed_lse(q):
    """lse with -inf for rows that belong to no sequence."""
    return _arrays.full(q, (q.shape[1], q.shape[0]), -float("inf"), "float32")


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_offset: int | None = None,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sink: Array | None = None,
    mask: Array | None = None,
    dropout: float = 0.0,
    dropout_state: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    qv: Array | None = None,
    sm_margin: int = 0,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """o = softmax(scale q k^T) v.

    q: [batch, seqlen_q, heads, head_dim]; k: [batch, seqlen_k, kv_heads, head_dim]; v: [batch, seqlen_k, kv_heads, value_dim]. Gives o:
    [batch, seqlen_q, heads, value_dim], and with `return_lse` also lse: f32 [batch, heads, seqlen_q], the natural logarithm of the
    softmax's denominator. Where a query sees no key, o is 0 and lse -inf.

    scale: default 1 / sqrt(head_dim). causal: query i sees keys j <= i + diagonal; `causal_offset` replaces the diagonal (0: PyTorch's
    is_causal). window: (left, right), query i sees keys i + diagonal - left to i + diagonal + right; -1: no bound. attention_chunk: C above
    0, query i sees only keys j of its own chunk of C keys, those with j // C == (i + diagonal) // C. softcap: 0 is none.
    alibi_slopes: f32 [heads] or [batch, heads]. sink: f32 [heads], the logit of a key without a value. mask: bool (True: visible), or f32
    or o's dtype (added), broadcast to [batch, heads, seqlen_q, seqlen_k]. out: o's memory.

    q, k and v may be float8_e4m3fn, with head dimensions that are multiples of 16; then o is bfloat16, or float16 if `out` is. q_descale,
    k_descale, v_descale: f32 [batch, kv_heads], the number that 1 stands for in q, k and v: the scores are multiplied by the first two and o
    by the third. float8 has no gradient.

    qv: of q's dtype and o's shape, a second query that is multiplied by v: the scores are scale (q k^T + qv v^T), by default with scale
    1 / sqrt(head_dim + value_dim). head_dim is up to 128 then, and there is no gradient, nor float8. FlashAttention 3's meaning.

    sm_margin: on CUDA, this many SMs are left to other work.

    dropout: each weight is 0 with this probability, in [0, 1) and rounded to a multiple of 1/256, but not to 0 or 1; the others are divided
    by the probability to be kept. lse is that without dropout. dropout_state: int64 [2], a seed and an offset, on q's device; which weights
    are dropped depends on them, the batch, the head, the query and the key only (attention_dropout_mask). Of PyTorch tensors the default is
    drawn from the generator of q's device; other arrays need it.

    PyTorch's autograd differentiates o with respect to q, k, v, sink and a mask that is added, once, by attention_backward(); on CUDA in
    bf16 and f16 only. deterministic: the gradients have the same bits in every run, as with torch.use_deterministic_algorithms(True). There
    is no gradient of lse or alibi_slopes: lse does not require grad, and a backward that needs that of alibi_slopes raises
    NotImplementedError.
    """
    descales = (q_descale, k_descale, v_descale)
    dropout_state = drawn_dropout_state(q, dropout, dropout_state)
    if any(descale is not None for descale in descales) or _arrays.dtype_name(q) == "float8_e4m3fn":
        if dropout:
            raise ValueError(f"dropout is {dropout}; it is not supported with q of float8_e4m3fn")
        if _dispatch.through_operator(q, k, v, *descales, alibi_slopes, sink, mask):
            o_dtype = None if out is None else out.dtype
            o, lse = _dispatch.compiled_ops().attention_fp8(
                q, k, v, *descales, scale, causal, causal_offset, window[0], window[1], attention_chunk, sm_margin, softcap, alibi_slopes,
                sink, mask, o_dtype, return_lse,
            )  # fmt: skip
            o = _dispatch.into(out, o)
            return (o, lse) if return_lse else o
    elif qv is not None and _dispatch.through_operator(q, k, v, qv, alibi_slopes, sink, mask):
        o, lse = _dispatch.compiled_ops().attention_qv(
            q, k, v, qv, scale, causal, causal_offset, window[0], window[1], attention_chunk, sm_margin, softcap, alibi_slopes, sink,
            dropout, dropout_state, mask, return_lse,
        )  # fmt: skip
        o = _dispatch.into(out, o)
        return (o, lse) if return_lse else o
    elif _dispatch.through_operator(q, k, v, alibi_slopes, sink, mask):
        needs_lse = return_lse or _dispatch.needs_gradients(q, k, v, alibi_slopes, sink, mask)
        o, lse = _dispatch.compiled_ops().attention(
            q, k, v, scale, causal, causal_offset, window[0], window[1], attention_chunk, sm_margin, softcap, alibi_slopes, sink, dropout,
            dropout_state, mask, deterministic, needs_lse,
        )  # fmt: skip
        o = _dispatch.into(out, o)
        return (o, lse) if return_lse else o
    of_q, of_k, of_v = tensor("q", q), tensor("k", k), tensor("v", v)
    if out is None:
        out = _output(q, v, "v")
    lse = _arrays.empty(q, (q.shape[0], q.shape[2], q.shape[1]), "float32") if return_lse else None
    rules = (scale, causal, causal_offset, window, softcap, alibi_slopes, sink, mask)
    options = _options(*rules, lse, None, dropout, dropout_state, descales, attention_chunk, sm_margin, qv)
    _attention(of_q, of_k, of_v, tensor("out", out, written=True), _library.byref(options), _arrays.stream(q))
    return (out, lse) if return_lse else out


def attention_backward(
    q: Array,
    k: Array,
    v: Array,
    o: Array,
    lse: Array,
    d_o: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    causal_offset: int | None = None,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sink: Array | None = None,
    mask: Array | None = None,
    dropout: float = 0.0,
    dropout_state: Array | None = None,
    deterministic: bool = False,
    return_d_mask: bool = False,
    sm_margin: int = 0,
    out: tuple[Array, ...] | None = None,
) -> tuple[Array, ...]:
    """Gradients of attention() with respect to q, k and v, to `sink` if that is given, and to `mask` with return_d_mask: (dq, dk, dv), then
    d_sink, then d_mask.

    q, k, v and the options are those of the attention() call, dropout_state included, o and lse its results, and d_o is the gradient of o, of its shape. dq, dk
    and dv have the shapes and the dtype of q, k and v; dk and dv are sums over the query heads that share a key head. d_sink: f32 [heads].
    d_mask: of the shape and dtype of the mask, which is one that is added. Queries that see no key and keys that no query sees have gradients
    of 0. bf16 and f16, on the CPU f32 too; sums are in f32. There is no gradient of alibi_slopes. deterministic: the same inputs give the same bits. Without it, on a Hopper GPU, the last bits of
    dq differ from run to run, and the call is faster. out: memory for all of the results.
    """
    differentiated = _differentiated(q, k, v, sink, mask, return_d_mask, out)
    if _dispatch.through_operator(q, k, v, o, lse, d_o, alibi_slopes, sink, mask):
        gradients = _dispatch.compiled_ops().attention_backward(
            q, k, v, o, lse, d_o, scale, causal, causal_offset, window[0], window[1], attention_chunk, sm_margin, softcap, alibi_slopes,
            sink, dropout, dropout_state, mask, deterministic, return_d_mask,
        )  # fmt: skip
        return _dispatch.into(None if out is None else tuple(out), _of_operator(gradients, differentiated))
    inputs = [tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("d_o", d_o))]
    rules = (scale, causal, causal_offset, window, softcap, alibi_slopes, sink, mask)
    forward = _options(*rules, None, False, dropout, dropout_state, attention_chunk=attention_chunk, sm_margin=sm_margin)
    if out is None:
        out = tuple(_arrays.empty(x, x.shape) for x in differentiated.values())
    outputs = {name: tensor(name, x, written=True) for name, x in zip(differentiated, out)}
    options = _library.AttentionBackwardOptions(
        forward=_library.addressof(forward),
        d_sink=outputs.get("d_sink"),
        d_mask=outputs.get("d_mask"),
        deterministic=bool(deterministic),
    )
    _attention_backward(*inputs, outputs["dq"], outputs["dk"], outputs["dv"], _library.byref(options), _arrays.stream(q))
    return tuple(out)


def _differentiated(q, k, v, sink, mask, return_d_mask, out) -> dict:
    """The names of a backward's results, in their order, and what each is the gradient of."""
    if return_d_mask and mask is None:
        raise ValueError("return_d_mask is True, but mask is None")
    of = {"dq": q, "dk": k, "dv": v}
    if sink is not None:
        of["d_sink"] = sink
    if return_d_mask:
        of["d_mask"] = mask
    if out is not None and len(out) != len(of):
        raise ValueError(f"out has {len(out)} arrays; allowed: {len(of)}, ({', '.join(of)})")
    return of


def _of_operator(gradients, differentiated: dict) -> tuple:
    """Those that were asked for: an operator returns all five."""
    return tuple(x for name, x in zip(("dq", "dk", "dv", "d_sink", "d_mask"), gradients) if name in differentiated)


def attention_dropout_mask(out: Array, dropout: float, dropout_state: Array) -> Array:
    """Which weights attention() keeps with these arguments. Writes to `out`, bool [batch, heads, seqlen_q, seqlen_k] and contiguous, and
    returns it: True where a weight is kept. For tests and for looking at masks: O(seqlen^2) memory."""
    options = _options(None, False, None, (-1, -1), 0.0, None, None, None, None, False, dropout, dropout_state)
    _attention_dropout_mask(tensor("out", out, written=True), _library.byref(options), _arrays.stream(out))
    return out


def attention_varlen(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    *,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    causal_offset: int | None = None,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sink: Array | None = None,
    mask: Array | None = None,
    dropout: float = 0.0,
    dropout_state: Array | None = None,
    deterministic: bool = False,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    return_lse: bool = False,
    check_contents: bool | None = None,
    qv: Array | None = None,
    sm_margin: int = 0,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """attention() of packed sequences of different lengths.

    q: [total_q, heads, head_dim]; k: [total_k, kv_heads, head_dim]; v: [total_k, kv_heads, value_dim]. cu_seqlens_q, cu_seqlens_k: int32
    [batch + 1], on q's device: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1; the same for its keys. seqused_q,
    seqused_k: int32 [batch], use only this many of a sequence, the first ones. Gives o: [total_q, heads, value_dim], and with `return_lse`
    lse: f32 [heads, total_q]; rows that belong to no sequence are 0 and -inf; in a given `out` they are left unchanged.

    On CUDA the host does not know the offsets: wrong ones are clamped. With `check_contents` the call waits for the device and refuses
    them; None: as in tilewave.check_contents(). Under torch.compile() all of `out` is written. mask: [batch, heads, seqlen_q,
    seqlen_k] with the number of sequences and at least the longest one's lengths; longer ones read its last row or column, or are refused
    where contents are checked. float8_e4m3fn is converted to o's dtype first. Other arguments as in attention().

    PyTorch's autograd differentiates o as attention()'s, by attention_varlen_backward().
    """
    dropout_state = drawn_dropout_state(q, dropout, dropout_state)
    descales = (q_descale, k_descale, v_descale)
    if any(descale is not None for descale in descales) or _arrays.dtype_name(q) == "float8_e4m3fn":
        if dropout:
            raise ValueError(f"dropout is {dropout}; it is not supported with q of float8_e4m3fn")
        if _dispatch.through_operator(q, k, v, *descales, alibi_slopes, sink, mask):
            o, lse = _dispatch.compiled_ops().attention_varlen_fp8(
                q, k, v, *descales, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, scale, causal, causal_offset, window[0], window[1],
                attention_chunk, sm_margin, softcap, alibi_slopes, sink, mask, check_contents, None if out is None else out.dtype,
                return_lse,
            )  # fmt: skip
            o = _dispatch.into(out, o)
            return (o, lse) if return_lse else o
    elif qv is not None and _dispatch.through_operator(q, k, v, qv, alibi_slopes, sink, mask):
        o, lse = _dispatch.compiled_ops().attention_varlen_qv(
            q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, scale, causal, causal_offset, window[0], window[1],
            attention_chunk, sm_margin, softcap, alibi_slopes, sink, dropout, dropout_state, mask, check_contents, return_lse,
        )  # fmt: skip
        o = _dispatch.into(out, o)
        return (o, lse) if return_lse else o
    elif _dispatch.through_operator(q, k, v, alibi_slopes, sink, mask):
        needs_lse = return_lse or _dispatch.needs_gradients(q, k, v, alibi_slopes, sink, mask)
        o, lse = _dispatch.compiled_ops().attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, scale, causal, causal_offset, window[0], window[1], attention_chunk,
            sm_margin, softcap, alibi_slopes, sink, dropout, dropout_state, mask, deterministic, check_contents, needs_lse,
        )  # fmt: skip
        o = _dispatch.into(out, o)
        return (o, lse) if return_lse else o
    of_q, of_k, of_v = tensor("q", q), tensor("k", k), tensor("v", v)
    if out is None:
        _arrays.require_dims(3, q=q, v=v)
        out = _arrays.full(q, (*q.shape[:2], v.shape[2]), 0.0, _result_dtype(q))
    lse = _packed_lse(q) if return_lse else None
    rules = (scale, causal, causal_offset, window, softcap, alibi_slopes, sink, mask)
    options = _options(*rules, lse, check_contents, dropout, dropout_state, descales, attention_chunk, sm_margin, qv)
    _attention_varlen(
        of_q,
        of_k,
        of_v,
        tensor("out", out, written=True),
        tensor("cu_seqlens_q", cu_seqlens_q),
        tensor("cu_seqlens_k", cu_seqlens_k),
        optional("seqused_q", seqused_q),
        optional("seqused_k", seqused_k),
        _library.byref(options),
        _arrays.stream(q),
    )
    return (out, lse) if return_lse else out


def attention_varlen_backward(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    o: Array,
    lse: Array,
    d_o: Array,
    *,
    seqused_q: Array | None = None,
    seqused_k: Array | None = None,
    scale: float | None = None,
    causal: bool = False,
    causal_offset: int | None = None,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sink: Array | None = None,
    mask: Array | None = None,
    dropout: float = 0.0,
    dropout_state: Array | None = None,
    deterministic: bool = False,
    return_d_mask: bool = False,
    check_contents: bool | None = None,
    sm_margin: int = 0,
    out: tuple[Array, ...] | None = None,
) -> tuple[Array, ...]:
    """Gradients of attention_varlen() with respect to q, k and v, to `sink` if that is given, and to `mask` with return_d_mask: (dq, dk, dv),
    then d_sink, then d_mask.

    q, k, v, the offsets and the options are those of the attention_varlen() call, o and lse its results, and d_o is the gradient of o, of
    its shape. All rows of dq, dk and dv are written: those of queries and keys that are not in use, because they belong to no sequence or
    lie after seqused_q or seqused_k, are 0. So are elements of d_mask beyond the sequences' lengths. Other arguments and results as in attention_backward(), check_contents as in
    attention_varlen().
    """
    differentiated = _differentiated(q, k, v, sink, mask, return_d_mask, out)
    if _dispatch.through_operator(q, k, v, o, lse, d_o, alibi_slopes, sink, mask):
        gradients = _dispatch.compiled_ops().attention_varlen_backward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, o, lse, d_o, scale, causal, causal_offset, window[0], window[1],
            attention_chunk, sm_margin, softcap, alibi_slopes, sink, dropout, dropout_state, mask, deterministic, check_contents, return_d_mask,
        )  # fmt: skip
        return _dispatch.into(None if out is None else tuple(out), _of_operator(gradients, differentiated))
    inputs = [tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("o", o), ("lse", lse), ("d_o", d_o))]
    rules = (scale, causal, causal_offset, window, softcap, alibi_slopes, sink, mask)
    forward = _options(*rules, None, check_contents, dropout, dropout_state, attention_chunk=attention_chunk, sm_margin=sm_margin)
    if out is None:
        out = tuple(_arrays.empty(x, x.shape) for x in differentiated.values())
    outputs = {name: tensor(name, x, written=True) for name, x in zip(differentiated, out)}
    options = _library.AttentionBackwardOptions(
        forward=_library.addressof(forward),
        d_sink=outputs.get("d_sink"),
        d_mask=outputs.get("d_mask"),
        deterministic=bool(deterministic),
    )
    _attention_varlen_backward(
        *inputs,
        outputs["dq"],
        outputs["dk"],
        outputs["dv"],
        tensor("cu_seqlens_q", cu_seqlens_q),
        tensor("cu_seqlens_k", cu_seqlens_k),
        optional("seqused_q", seqused_q),
        optional("seqused_k", seqused_k),
        _library.byref(options),
        _arrays.stream(q),
    )
    return tuple(out)


def attention_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    seqlens: Array | None = None,
    batch_idx: Array | None = None,
    leftpad: Array | None = None,
    block_table: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_new: Array | None = None,
    new_k: Array | None = None,
    new_v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    rotary_interleaved: bool = False,
    num_splits: int = 0,
    scale: float | None = None,
    causal: bool = False,
    causal_offset: int | None = None,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    sink: Array | None = None,
    mask: Array | None = None,
    q_descale: Array | None = None,
    k_descale: Array | None = None,
    v_descale: Array | None = None,
    return_lse: bool = False,
    check_contents: bool | None = None,
    qv: Array | None = None,
    sm_margin: int = 0,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """Attention of few queries against a cache of keys and values ("flash decoding").

    q: [batch, seqlen_q, heads, head_dim]; k_cache: [cache_batch, capacity, kv_heads, head_dim] or, with a block_table, [pages, page_size,
    kv_heads, head_dim]; v_cache likewise with value_dim. Gives o: [batch, seqlen_q, heads, value_dim], and with `return_lse` lse: f32
    [batch, heads, seqlen_q].

    All int32: seqlens [batch], tokens in the cache before this call (default: it is full); batch_idx [batch], maps batch index to
    cache index, or to a row of the block_table; leftpad [batch], the number of first tokens to ignore; block_table [tables, pages of a
    sequence]. Page sizes that are not a multiple of 16, and pages with leftpad, are slower: the tokens in use are copied first.

    new_k: [batch, seqlen_new, kv_heads, head_dim] and new_v are written into the caches after each sequence's tokens first. rotary_cos,
    rotary_sin: [positions, rotary_dim / 2], by which q and new_k are rotated; pairs are k and k + rotary_dim / 2, or `rotary_interleaved`
    2 k and 2 k + 1.

    cu_seqlens_q: int32 [batch + 1]: q, o and lse are packed as in attention_varlen(). cu_seqlens_new: int32 [batch + 1]: new_k and new_v
    are packed, [total_new, kv_heads, ..]. Neither with rotary tables: call rope() first.

    num_splits: splits of a sequence's keys that run in parallel; 0: the library's choice. check_contents: waits for the device and refuses
    wrong lengths and page numbers, which are otherwise clamped; None: as in tilewave.check_contents(). mask: keys count from the first one
    after leftpad, and there are `capacity`. q, caches and new keys may be float8_e4m3fn, without rotary tables: the tokens in use are
    converted to o's dtype first. Other arguments as in attention().
    """
    descales = (q_descale, k_descale, v_descale)
    if _dispatch.through_operator(q, k_cache, v_cache, new_k, new_v, rotary_cos, rotary_sin, alibi_slopes, sink, mask, qv, *descales):
        ops = _dispatch.compiled_ops()
        o, lse = (ops.attention_decode_read if new_k is None and new_v is None else ops.attention_decode)(
            q, k_cache, v_cache, seqlens, batch_idx, leftpad, block_table, cu_seqlens_q, cu_seqlens_new, new_k, new_v, rotary_cos,
            rotary_sin, rotary_interleaved, num_splits, scale, causal, causal_offset, window[0], window[1], attention_chunk, sm_margin,
            softcap, alibi_slopes, sink, qv, mask, *descales, check_contents, None if out is None else out.dtype, return_lse,
        )  # fmt: skip
        o = _dispatch.into(out, o)
        return (o, lse) if return_lse else o
    written = new_k is not None
    of_q, of_k, of_v = tensor("q", q), tensor("k_cache", k_cache, written), tensor("v_cache", v_cache, written)
    packed = cu_seqlens_q is not None
    if out is None and packed:
        _arrays.require_dims(3, q=q)
        _arrays.require_dims(4, v_cache=v_cache)
        out = _arrays.full(q, (*q.shape[:2], v_cache.shape[3]), 0.0, _result_dtype(q))
    elif out is None:
        out = _output(q, v_cache, "v_cache")
    lse = None
    if return_lse:
        lse = _packed_lse(q) if packed else _arrays.empty(q, (q.shape[0], q.shape[2], q.shape[1]), "float32")
    cache = _library.CacheOptions(rotary_interleaved=bool(rotary_interleaved), num_splits=_arrays.int32("num_splits", num_splits))
    for name, array in (
        ("seqlens", seqlens),
        ("batch_idx", batch_idx),
        ("leftpad", leftpad),
        ("block_table", block_table),
        ("cu_seqlens_q", cu_seqlens_q),
        ("cu_seqlens_new", cu_seqlens_new),
        ("new_k", new_k),
        ("new_v", new_v),
        ("rotary_cos", rotary_cos),
        ("rotary_sin", rotary_sin),
    ):
        if array is not None:
            setattr(cache, name, tensor(name, array))
    rules = (scale, causal, causal_offset, window, softcap, alibi_slopes, sink, mask)
    options = _options(*rules, lse, check_contents, 0.0, None, descales, attention_chunk, sm_margin, qv)
    _attention_decode(of_q, of_k, of_v, tensor("out", out, written=True), _library.byref(cache), _library.byref(options), _arrays.stream(q))
    return (out, lse) if return_lse else out


# As operators of PyTorch. They return the same number of tensors always.


def _with_lse(result, q, return_lse):
    """(o, lse) from the result of an eager function."""
    return result if return_lse else (result, _arrays.empty(q, (0,), "float32"))


def _fake(q, k, v, *rest):
    """The fake for q [batch, seqlen_q, heads, head_dim], or packed [total_q, heads, head_dim]."""
    return_lse = rest[-1]
    if v.dim() not in (3, 4) or q.dim() not in (3, 4):
        raise ValueError(f"q has shape {tuple(q.shape)}, v {tuple(v.shape)}; both must have 4 dimensions, or 3 if they are packed")
    rows, heads = q.shape[:-2], q.shape[-2]
    lse_shape = (*rows[:-1], heads, rows[-1]) if return_lse else (0,)
    return q.new_empty((*rows, heads, v.shape[-1])), _arrays.empty(q, lse_shape, "float32")


def _named_options(arguments: tuple) -> dict:
    scale, causal, causal_offset, window_left, window_right, attention_chunk, sm_margin, softcap, alibi_slopes, sink, *dropout = arguments
    return {
        **dict(zip(("dropout", "dropout_state"), dropout)),
        "scale": scale,
        "causal": causal,
        "causal_offset": causal_offset,
        "window": (window_left, window_right),
        "attention_chunk": attention_chunk,
        "sm_margin": sm_margin,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sink": sink,
    }


# Numbers that may be computed from shapes are SymInt.
_OPTIONS_SCHEMA = (
    "float? scale, bool causal, SymInt? causal_offset, SymInt window_left, SymInt window_right, SymInt attention_chunk, SymInt sm_margin, "
    "float softcap, Tensor? alibi_slopes, Tensor? sink"
)
_DROPOUT_SCHEMA = f"{_OPTIONS_SCHEMA}, float dropout, Tensor? dropout_state"


def _operator_attention(q, k, v, *rest):
    *options, mask, _, return_lse = rest  # what is between them is for the backward
    return _with_lse(attention(q, k, v, **_named_options(options), mask=mask, return_lse=return_lse), q, return_lse)


def _keep_for_backward(ctx, inputs, output):
    q, k, v, *options, alibi_slopes, sink, dropout, dropout_state, mask, deterministic, _ = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, o, lse, alibi_slopes, sink, dropout_state, mask)
    ctx.options, ctx.dropout, ctx.deterministic = options, dropout, deterministic


def _missing(d_o, what, x):
    """By an operator, so that torch.compile() can trace a backward that will not run."""
    return _dispatch.compiled_ops().missing_backward(d_o, what, x.shape)


def _attention_gradients(ctx, d_o, _):
    q, k, v, o, lse, alibi_slopes, sink, dropout_state, mask = ctx.saved_tensors
    ops = _dispatch.compiled_ops()
    needs_d_slopes, needs_d_mask = ctx.needs_input_grad[11], ctx.needs_input_grad[15]
    missing = functools.partial(_missing, d_o)
    differentiated = (q, k, v, sink, mask if needs_d_mask else None)
    if q.is_cuda and _arrays.dtype_name(q) == "float32":
        what = "attention has no backward of float32 on CUDA, only of bfloat16 and float16"
        dq, dk, dv, d_sink, d_mask = (None if x is None else missing(what, x) for x in differentiated)
    elif lse.shape != (q.shape[0], q.shape[2], q.shape[1]):
        what = "operator attention has no backward if return_lse is False"
        dq, dk, dv, d_sink, d_mask = (None if x is None else missing(what, x) for x in differentiated)
    else:
        deterministic = ctx.deterministic or _dispatch.deterministic_algorithms()
        dq, dk, dv, d_sink, d_mask = ops.attention_backward(
            q, k, v, o, lse, d_o, *ctx.options, alibi_slopes, sink, ctx.dropout, dropout_state, mask, deterministic, needs_d_mask
        )
    d_slopes = missing("attention has no gradient of alibi_slopes", alibi_slopes) if needs_d_slopes else None
    d_sink, d_mask = None if sink is None else d_sink, d_mask if needs_d_mask else None
    return dq, dk, dv, *(None,) * 8, d_slopes, d_sink, None, None, d_mask, None, None


define(
    f"attention(Tensor q, Tensor k, Tensor v, {_DROPOUT_SCHEMA}, Tensor? mask, bool deterministic, bool return_lse) -> (Tensor, Tensor)",
    _operator_attention,
    _fake,
    Gradient(_keep_for_backward, _attention_gradients),
)


def _operator_attention_fp8(q, k, v, q_descale, k_descale, v_descale, *rest):
    *options, mask, o_dtype, return_lse = rest
    out = None if o_dtype is None else _arrays.empty(q, (*q.shape[:3], v.shape[3]), str(o_dtype).removeprefix("torch."))
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    return _with_lse(attention(q, k, v, **_named_options(options), mask=mask, **descales, return_lse=return_lse, out=out), q, return_lse)


def _fake_fp8(q, k, v, *rest):
    o, lse = _fake(q, k, v, *rest)
    return _arrays.empty(q, o.shape, "bfloat16" if rest[-2] is None else str(rest[-2]).removeprefix("torch.")), lse


# Apart from `attention`, which has a gradient, and whose results have q's dtype.
define(
    f"attention_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, {_OPTIONS_SCHEMA}, Tensor? mask, "
    "ScalarType? o_dtype, bool return_lse) -> (Tensor, Tensor)",
    _operator_attention_fp8,
    _fake_fp8,
)


def _operator_attention_qv(q, k, v, qv, *rest):
    *options, mask, return_lse = rest
    return _with_lse(attention(q, k, v, **_named_options(options), mask=mask, qv=qv, return_lse=return_lse), q, return_lse)


# Apart from `attention`, which has a gradient.
define(
    f"attention_qv(Tensor q, Tensor k, Tensor v, Tensor qv, {_DROPOUT_SCHEMA}, Tensor? mask, bool return_lse) -> (Tensor, Tensor)",
    _operator_attention_qv,
    _fake,
)


def _as_input(d_o):
    """d_o as the library takes it. Autograd's gradients may be expanded, and have any strides."""
    return d_o if d_o.stride(-1) == 1 and 0 not in d_o.stride() else d_o.contiguous()


def _operator_attention_backward(q, k, v, o, lse, d_o, *rest):
    *options, mask, deterministic, return_d_mask = rest
    named = {**_named_options(options), "mask": mask, "deterministic": deterministic, "return_d_mask": return_d_mask}
    return _all_five(attention_backward(q, k, v, o, lse, _as_input(d_o), **named), lse, named)


def _all_five(gradients, lse, named):
    """A backward's results with an empty tensor for each that is missing."""
    gradients = iter(gradients)
    dq, dk, dv = next(gradients), next(gradients), next(gradients)
    d_sink = _arrays.empty(lse, (0,)) if named["sink"] is None else next(gradients)
    return dq, dk, dv, d_sink, next(gradients) if named["return_d_mask"] else _arrays.empty(lse, (0,))


def _fake_gradients(q, k, v, lse, sink, mask, return_d_mask):
    d_sink = _arrays.empty(lse, (0,) if sink is None else sink.shape)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), d_sink, mask.new_empty(mask.shape) if return_d_mask else _arrays.empty(lse, (0,)))


def _fake_backward(q, k, v, o, lse, d_o, *rest):
    sink, _, _, mask, _, return_d_mask = rest[-6:]
    return _fake_gradients(q, k, v, lse, sink, mask, return_d_mask)


define(
    f"attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor d_o, {_DROPOUT_SCHEMA}, Tensor? mask, "
    "bool deterministic, bool return_d_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_attention_backward,
    _fake_backward,
)


def _operator_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *rest):
    *options, mask, _, check_contents, return_lse = rest  # what is between them is for the backward
    result = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        **_named_options(options),
        mask=mask,
        check_contents=check_contents,
        return_lse=return_lse,
    )
    return _with_lse(result, q, return_lse)


def _keep_for_varlen_backward(ctx, inputs, output):
    *tensors_and_options, alibi_slopes, sink, dropout, dropout_state, mask, deterministic, _, _ = inputs
    tensors, options = tensors_and_options[:7], tensors_and_options[7:]
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(*tensors, o, lse, alibi_slopes, sink, dropout_state, mask)
    ctx.options, ctx.dropout, ctx.deterministic = options, dropout, deterministic


def _varlen_gradients(ctx, d_o, _):
    q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, o, lse, alibi_slopes, sink, dropout_state, mask = ctx.saved_tensors
    missing = functools.partial(_missing, d_o)
    needs_d_slopes, needs_d_mask = ctx.needs_input_grad[15], ctx.needs_input_grad[19]
    if lse.shape != (q.shape[1], q.shape[0]):
        what = "operator attention_varlen has no backward if return_lse is False"
        differentiated = (q, k, v, sink, mask if needs_d_mask else None)
        dq, dk, dv, d_sink, d_mask = (None if x is None else missing(what, x) for x in differentiated)
    else:
        deterministic = ctx.deterministic or _dispatch.deterministic_algorithms()
        # The forward pass has checked the offsets, if that was asked for.
        dq, dk, dv, d_sink, d_mask = _dispatch.compiled_ops().attention_varlen_backward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, o, lse, d_o, *ctx.options, alibi_slopes, sink, ctx.dropout,
            dropout_state, mask, deterministic, False, needs_d_mask,
        )  # fmt: skip
    d_slopes = missing("attention_varlen has no gradient of alibi_slopes", alibi_slopes) if needs_d_slopes else None
    d_sink, d_mask = None if sink is None else d_sink, d_mask if needs_d_mask else None
    return dq, dk, dv, *(None,) * 12, d_slopes, d_sink, None, None, d_mask, *(None,) * 3


_VARLEN_SCHEMA = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"

define(
    f"attention_varlen(Tensor q, Tensor k, Tensor v, {_VARLEN_SCHEMA}, {_DROPOUT_SCHEMA}, Tensor? mask, bool deterministic, "
    "bool? check_contents, bool return_lse) -> (Tensor, Tensor)",
    _operator_attention_varlen,
    _fake,
    Gradient(_keep_for_varlen_backward, _varlen_gradients),
)


def _operator_varlen_qv(q, k, v, qv, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *rest):
    *options, mask, check_contents, return_lse = rest
    lengths = {"seqused_q": seqused_q, "seqused_k": seqused_k, "check_contents": check_contents, "mask": mask}
    o = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **lengths, **_named_options(options), qv=qv, return_lse=return_lse)
    return _with_lse(o, q, return_lse)


define(
    f"attention_varlen_qv(Tensor q, Tensor k, Tensor v, Tensor qv, {_VARLEN_SCHEMA}, {_DROPOUT_SCHEMA}, Tensor? mask, "
    "bool? check_contents, bool return_lse) -> (Tensor, Tensor)",
    _operator_varlen_qv,
    _fake,
)


def _operator_varlen_fp8(q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *rest):
    *options, mask, check_contents, o_dtype, return_lse = rest
    out = None if o_dtype is None else _arrays.full(q, (*q.shape[:2], v.shape[2]), 0.0, str(o_dtype).removeprefix("torch."))
    lengths = {"seqused_q": seqused_q, "seqused_k": seqused_k, "check_contents": check_contents, "mask": mask}
    descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    others = {**lengths, **descales, **_named_options(options)}
    return _with_lse(attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **others, return_lse=return_lse, out=out), q, return_lse)


define(
    f"attention_varlen_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, {_VARLEN_SCHEMA}, "
    f"{_OPTIONS_SCHEMA}, Tensor? mask, bool? check_contents, ScalarType? o_dtype, bool return_lse) -> (Tensor, Tensor)",
    _operator_varlen_fp8,
    _fake_fp8,
)


def _operator_varlen_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, o, lse, d_o, *rest):
    *options, mask, deterministic, check_contents, return_d_mask = rest
    named = {
        **_named_options(options),
        "mask": mask,
        "deterministic": deterministic,
        "check_contents": check_contents,
        "return_d_mask": return_d_mask,
    }
    gradients = attention_varlen_backward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        o,
        lse,
        _as_input(d_o),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        **named,
    )
    return _all_five(gradients, lse, named)


def _fake_varlen_backward(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, o, lse, d_o, *rest):
    sink, _, _, mask, _, _, return_d_mask = rest[-7:]
    return _fake_gradients(q, k, v, lse, sink, mask, return_d_mask)


define(
    f"attention_varlen_backward(Tensor q, Tensor k, Tensor v, {_VARLEN_SCHEMA}, Tensor o, Tensor lse, Tensor d_o, {_DROPOUT_SCHEMA}, "
    "Tensor? mask, bool deterministic, bool? check_contents, bool return_d_mask) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_varlen_backward,
    _fake_varlen_backward,
)


def _operator_attention_decode(q, k_cache, v_cache, *rest):
    names = (
        "seqlens",
        "batch_idx",
        "leftpad",
        "block_table",
        "cu_seqlens_q",
        "cu_seqlens_new",
        "new_k",
        "new_v",
        "rotary_cos",
        "rotary_sin",
        "rotary_interleaved",
        "num_splits",
    )
    cache, rest = dict(zip(names, rest)), rest[len(names) :]
    *options, qv, mask, q_descale, k_descale, v_descale, check_contents, o_dtype, return_lse = rest
    others = {"qv": qv, "mask": mask, "q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    others |= {"check_contents": check_contents, "return_lse": return_lse}
    if o_dtype is not None:
        others["out"] = _arrays.full(q, (*q.shape[:-1], v_cache.shape[3]), 0.0, str(o_dtype).removeprefix("torch."))
    result = attention_decode(q, k_cache, v_cache, **cache, **_named_options(options), **others)
    return _with_lse(result, q, return_lse)


def _operator_attention_decode_read(*arguments):
    if arguments[9] is not None or arguments[10] is not None:
        raise ValueError("new_k, new_v: attention_decode_read writes no cache; attention_decode does")
    return _operator_attention_decode(*arguments)


_DECODE_SCHEMA = (
    "Tensor? seqlens, Tensor? batch_idx, Tensor? leftpad, Tensor? block_table, Tensor? cu_seqlens_q, Tensor? cu_seqlens_new, "
    "Tensor? new_k, Tensor? new_v, Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, SymInt num_splits, "
    f"{_OPTIONS_SCHEMA}, Tensor? qv, Tensor? mask, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, bool? check_contents, "
    "ScalarType? o_dtype, bool return_lse) -> (Tensor, Tensor)"
)


def _fake_decode(q, k_cache, v_cache, *rest):
    o, lse = _fake(q, k_cache, v_cache, *rest)
    o_dtype = rest[-2]
    return _arrays.empty(q, o.shape, _result_dtype(q) if o_dtype is None else str(o_dtype).removeprefix("torch.")), lse



define(
    f"attention_decode(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_DECODE_SCHEMA}",
    _operator_attention_decode,
    _fake_decode,
)
# The same without new keys. Graphs whose inputs are written cannot become CUDA graphs, and copies are made before writes: not for nothing.
define(
    f"attention_decode_read(Tensor q, Tensor k_cache, Tensor v_cache, {_DECODE_SCHEMA}",
    _operator_attention_decode_read,
    _fake_decode,
)
