"""Linear attention with a decay, S_t = exp(g_t) S_(t-1) + k_t v_t^T and o_t = scale S_t^T q_t, its steps for decoding and its gradients.

Arrays are NumPy's, PyTorch's or DLPack's, on the CPU or on CUDA, all on one device: q and k [batch, seqlen, heads, dk], v and o [batch,
seqlen, heads of v, dv], in f32, f16 or bf16, with any strides; dk and dv up to 256. Heads of v are a multiple of q's, and neighbours share a
head of q and k. States are f32, [sequences, heads of v, dk, dv]. On CUDA calls are enqueued on PyTorch's current stream and
return. include/tilewave/linear_attention.hpp has the rest.
"""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import Gradient, define

_linear_attention = _library.bind("tw_linear_attention", out="o")
_linear_attention_step = _library.bind("tw_linear_attention_step", out="o")
_linear_attention_backward = _library.bind("tw_linear_attention_backward")


def _scale(scale: float | None) -> dict:
    return {"has_scale": scale is not None, "scale": 0.0 if scale is None else float(scale)}


def _state_shape(q, v, cu_seqlens):
    _arrays.require_dims(4, q=q, v=v)
    if cu_seqlens is not None:
        _arrays.require_dims(1, cu_seqlens=cu_seqlens)
    return (q.shape[0] if cu_seqlens is None else max(cu_seqlens.shape[0] - 1, 0), v.shape[2], q.shape[3], v.shape[3])


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    g: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    return_state: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """o, and with `return_state` the state after the last step.

    g: f32, the logarithm of the decay, [batch, seqlen, heads of v] or [heads of v]; None: no decay. scale: default 1 / sqrt(dk). initial_state:
    None is 0. cu_seqlens: int32 [sequences + 1], ascending: the batch is 1 and holds sequence n in the steps cu_seqlens[n] to
    cu_seqlens[n + 1] - 1; outputs of other steps are 0, or left unchanged in a given `out`. out: o's memory.

    f16 and bf16 run in chunks on tensor cores, with states rounded to that type in between; f32 runs step by step.

    PyTorch's autograd differentiates both results with respect to q, k, v, g and initial_state, once, by linear_attention_backward().
    """
    if _dispatch.through_operator(q, k, v, g, initial_state):
        o, state = _dispatch.compiled_ops().linear_attention(q, k, v, g, initial_state, cu_seqlens, scale, return_state)
        o = _dispatch.into(out, o)
        return (o, state) if return_state else o
    of_q, of_k, of_v = tensor("q", q), tensor("k", k), tensor("v", v)
    shape = _state_shape(q, v, cu_seqlens)
    if out is None:
        out = _arrays.empty(v, v.shape) if cu_seqlens is None else _arrays.full(v, v.shape, 0.0)
    state = _arrays.empty(q, shape, "float32") if return_state else None
    options = _library.LinearAttentionOptions(
        **_scale(scale),
        g=optional("g", g),
        initial_state=optional("initial_state", initial_state),
        final_state=optional("state", state, written=True),
        cu_seqlens=optional("cu_seqlens", cu_seqlens),
    )
    _linear_attention(of_q, of_k, of_v, tensor("out", out, written=True), _library.byref(options), _arrays.stream(q))
    return (out, state) if return_state else out


def linear_attention_step(
    q: Array,
    k: Array,
    v: Array,
    state: Array,
    *,
    g: Array | None = None,
    scale: float | None = None,
    out: Array | None = None,
) -> Array:
    """linear_attention() of few steps, as decoding has them: `state` [batch, heads of v, dk, dv] is read and replaced. All arithmetic is in
    f32. It has no gradient."""
    if _dispatch.through_operator(q, k, v, state, g):
        return _dispatch.into(out, _dispatch.compiled_ops().linear_attention_step(q, k, v, state, g, scale))
    of_q, of_k, of_v, of_state = tensor("q", q), tensor("k", k), tensor("v", v), tensor("state", state, written=True)
    if out is None:
        out = _arrays.empty(v, v.shape)
    options = _library.LinearAttentionStepOptions(**_scale(scale), g=optional("g", g))
    _linear_attention_step(of_q, of_k, of_v, tensor("out", out, written=True), of_state, _library.byref(options), _arrays.stream(q))
    return out


def linear_attention_backward(
    q: Array,
    k: Array,
    v: Array,
    d_o: Array,
    *,
    g: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    d_state: Array | None = None,
) -> tuple[Array, Array, Array, Array | None, Array | None]:
    """Gradients of linear_attention(): (dq, dk, dv, dg, d_initial_state); the last two are None if g or initial_state is.

    q, k, v and the options are those of the linear_attention() call, d_o is the gradient of o, and d_state that of the returned state; None
    is 0. dg has a number for each step and head, also where g is [heads of v]. Of steps that belong to no sequence all gradients are 0.
    """
    if _dispatch.through_operator(q, k, v, d_o, g, initial_state, d_state):
        *gradients, dg, d_initial = _dispatch.compiled_ops().linear_attention_backward(
            q, k, v, d_o, g, initial_state, cu_seqlens, d_state, scale
        )
        return (*gradients, None if g is None else dg, None if initial_state is None else d_initial)
    inputs = [tensor(name, x) for name, x in (("q", q), ("k", k), ("v", v), ("d_o", d_o))]
    shape = _state_shape(q, v, cu_seqlens)
    new = _arrays.empty if cu_seqlens is None else lambda like, shape, dtype=None: _arrays.full(like, shape, 0.0, dtype)
    outputs = [new(x, x.shape) for x in (q, k, v)]
    dg = None if g is None else new(q, v.shape[:3], "float32")
    d_initial = None if initial_state is None else _arrays.empty(q, shape, "float32")
    options = _library.LinearAttentionBackwardOptions(
        **_scale(scale),
        g=optional("g", g),
        initial_state=optional("initial_state", initial_state),
        cu_seqlens=optional("cu_seqlens", cu_seqlens),
        d_final_state=optional("d_state", d_state),
        dg=optional("dg", dg, written=True),
        d_initial_state=optional("d_initial_state", d_initial, written=True),
    )
    of_outputs = [tensor(name, x, written=True) for name, x in zip(("dq", "dk", "dv"), outputs)]
    _linear_attention_backward(*inputs, *of_outputs, _library.byref(options), _arrays.stream(q))
    return (*outputs, dg, d_initial)


# As operators of PyTorch. They return the same number of tensors always.


def _operator_linear_attention(q, k, v, g, initial_state, cu_seqlens, scale, return_state):
    result = linear_attention(
        q, k, v, g=g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, return_state=return_state
    )
    return result if return_state else (result, _arrays.empty(q, (0,), "float32"))


def _fake_linear_attention(q, k, v, g, initial_state, cu_seqlens, scale, return_state):
    shape = _state_shape(q, v, cu_seqlens) if return_state else (0,)
    return v.new_empty(v.shape), _arrays.empty(q, shape, "float32")


def _keep_for_backward(ctx, inputs, output):
    q, k, v, g, initial_state, cu_seqlens, ctx.scale, ctx.return_state = inputs
    ctx.save_for_backward(q, k, v, g, initial_state, cu_seqlens)


def _gradients(ctx, d_o, d_state):
    q, k, v, g, initial_state, cu_seqlens = ctx.saved_tensors
    d_state = d_state.contiguous() if ctx.return_state else None
    dq, dk, dv, dg, d_initial = _dispatch.compiled_ops().linear_attention_backward(
        q, k, v, d_o, g, initial_state, cu_seqlens, d_state, ctx.scale
    )
    if g is None:
        dg = None
    elif g.dim() == 1:
        dg = dg.sum((0, 1))
    return dq, dk, dv, dg, None if initial_state is None else d_initial, None, None, None


define(
    "linear_attention(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, float? scale, "
    "bool return_state) -> (Tensor, Tensor)",
    _operator_linear_attention,
    _fake_linear_attention,
    Gradient(_keep_for_backward, _gradients),
)


def _operator_backward(q, k, v, d_o, g, initial_state, cu_seqlens, d_state, scale):
    *gradients, dg, d_initial = linear_attention_backward(
        q, k, v, d_o, g=g, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, d_state=d_state
    )
    none = [_arrays.empty(q, (0,), "float32") for _ in range(2)]
    return (*gradients, none[0] if dg is None else dg, none[1] if d_initial is None else d_initial)


def _fake_backward(q, k, v, d_o, g, initial_state, cu_seqlens, d_state, scale):
    return (
        *(x.new_empty(x.shape) for x in (q, k, v)),
        _arrays.empty(q, (0,) if g is None else v.shape[:3], "float32"),
        _arrays.empty(q, (0,) if initial_state is None else initial_state.shape, "float32"),
    )


define(
    "linear_attention_backward(Tensor q, Tensor k, Tensor v, Tensor d_o, Tensor? g, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor? d_state, float? scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_backward,
    _fake_backward,
)


def _operator_step(q, k, v, state, g, scale):
    return linear_attention_step(q, k, v, state, g=g, scale=scale)


define(
    "linear_attention_step(Tensor q, Tensor k, Tensor v, Tensor(a!) state, Tensor? g, float? scale) -> Tensor",
    _operator_step,
    lambda q, k, v, state, g, scale: v.new_empty(v.shape),
)
