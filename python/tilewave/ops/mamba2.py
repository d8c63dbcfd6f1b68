"""Mamba-2's selective state space, its steps for decoding and its gradients. With a state h [headdim, dstate] of each head:

    dt = softplus(dt + dt_bias), clamped to dt_limit
    h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T,   y_t = (h_t C_t + D x_t) silu(z_t)

Arrays are NumPy's, PyTorch's or DLPack's, on the CPU or on CUDA, all on one device: x, y and z [batch, seqlen, nheads, headdim], B and C
[batch, seqlen, ngroups, dstate], of f32, f16 or bf16, dt [batch, seqlen, nheads] of that dtype or f32, A and dt_bias f32 [nheads], D f32
[nheads] or [nheads, headdim], with any strides; headdim and dstate up to 256. nheads is a multiple of ngroups: neighbouring heads share B and
C. Without dt_softplus dt is dt + dt_bias. On CUDA calls are enqueued on PyTorch's current stream and return. include/tilewave/mamba2.hpp has
the rest.
"""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import Gradient, define

_mamba2 = _library.bind("tw_mamba2", out="y")
_mamba2_step = _library.bind("tw_mamba2_step", out="y")
_mamba2_backward = _library.bind("tw_mamba2_backward")

_NO_LIMIT = (0.0, float("inf"))


def _options(kind, D, z, dt_bias, dt_softplus, dt_limit, **others):
    least, largest = dt_limit
    return kind(
        d=optional("D", D),
        z=optional("z", z),
        dt_bias=optional("dt_bias", dt_bias),
        dt_softplus=bool(dt_softplus),
        has_dt_limit=True,
        dt_min=float(least),
        dt_max=float(largest),
        **others,
    )


def _inputs(x, dt, A, B, C):
    return [tensor(name, array) for name, array in (("x", x), ("dt", dt), ("A", A), ("B", B), ("C", C))]


def _state_shape(x, B, cu_seqlens):
    _arrays.require_dims(4, x=x, B=B)
    if cu_seqlens is not None:
        _arrays.require_dims(1, cu_seqlens=cu_seqlens)
    return (x.shape[0] if cu_seqlens is None else max(cu_seqlens.shape[0] - 1, 0), x.shape[2], x.shape[3], B.shape[3])


def mamba2(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    initial_states: Array | None = None,
    cu_seqlens: Array | None = None,
    seq_idx: Array | None = None,
    return_final_states: bool = False,
    out: Array | None = None,
) -> Array | tuple[Array, Array]:
    """y, and with `return_final_states` the states after the last steps, f32 [sequences, nheads, headdim, dstate].

    D: None is 0. z: the gate; None is none. initial_states: f32, of the final states' shape; None is 0. cu_seqlens: int32 [sequences + 1],
    ascending: the batch is 1 and holds sequence n in the steps cu_seqlens[n] to cu_seqlens[n + 1] - 1; outputs of other steps are 0, or left
    unchanged in a given `out`. seq_idx: int32 [batch, seqlen]: a step whose number differs from that of the step before begins with a state
    of 0. out: y's memory.

    f16 and bf16 run in chunks on tensor cores; f32 runs step by step.

    PyTorch's autograd differentiates both results with respect to x, dt, A, B, C, D, z, dt_bias and initial_states, once, by
    mamba2_backward().
    """
    if _dispatch.through_operator(x, dt, A, B, C, D, z, dt_bias, initial_states):
        y, states = _dispatch.compiled_ops().mamba2(
            x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, seq_idx, dt_softplus, *dt_limit, return_final_states
        )
        y = _dispatch.into(out, y)
        return (y, states) if return_final_states else y
    inputs, shape = _inputs(x, dt, A, B, C), _state_shape(x, B, cu_seqlens)
    if out is None:
        out = _arrays.empty(x, x.shape) if cu_seqlens is None else _arrays.full(x, x.shape, 0.0)
    states = _arrays.empty(x, shape, "float32") if return_final_states else None
    options = _options(
        _library.Mamba2Options,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_limit,
        initial_states=optional("initial_states", initial_states),
        final_states=optional("final_states", states, written=True),
        cu_seqlens=optional("cu_seqlens", cu_seqlens),
        seq_idx=optional("seq_idx", seq_idx),
    )
    _mamba2(*inputs, tensor("out", out, written=True), _library.byref(options), _arrays.stream(x))
    return (out, states) if return_final_states else out


def mamba2_step(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    states: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    state_indices: Array | None = None,
    out: Array | None = None,
) -> Array:
    """mamba2() of the next steps of a batch, in generation: `states` [count, nheads, headdim, dstate], of f32 or x's dtype, is updated in place.

    x, dt, B, C and z as there, or without seqlen: one step of each sequence. state_indices: int32 [batch], which state a sequence has; None: n
    for sequence n, and count is batch. A sequence with an index below 0 is left out: its outputs are 0, or left unchanged in a given `out`. All
    arithmetic is in f32. It has no gradient.
    """
    if _dispatch.through_operator(x, dt, A, B, C, states, D, z, dt_bias):
        y = _dispatch.compiled_ops().mamba2_step(x, dt, A, B, C, states, D, z, dt_bias, state_indices, dt_softplus, *dt_limit)
        return _dispatch.into(out, y)
    if out is None:
        out = _arrays.empty(x, x.shape) if state_indices is None else _arrays.full(x, x.shape, 0.0)
    y = out
    if len(x.shape) == 3:
        x, dt, B, C, y = (array[:, None] for array in (x, dt, B, C, y))
        z = None if z is None else z[:, None]
    inputs, of_states = _inputs(x, dt, A, B, C), tensor("states", states, written=True)
    indices = optional("state_indices", state_indices)
    options = _options(_library.Mamba2StepOptions, D, z, dt_bias, dt_softplus, dt_limit, state_indices=indices)
    _mamba2_step(*inputs, of_states, tensor("out", y, written=True), _library.byref(options), _arrays.stream(x))
    return out


def mamba2_backward(
    x: Array,
    dt: Array,
    A: Array,
    B: Array,
    C: Array,
    dy: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    initial_states: Array | None = None,
    cu_seqlens: Array | None = None,
    seq_idx: Array | None = None,
    d_final_states: Array | None = None,
) -> tuple:
    """Gradients of mamba2(): (dx, d_dt, dA, dB, dC, dD, dz, d_dt_bias, d_initial_states); the last four are None if their input is.

    The inputs and options are those of the mamba2() call, dy is the gradient of y, and d_final_states that of the returned states; None is 0.
    Of steps that belong to no sequence all gradients are 0. The same bits in every run. f16 and bf16 without cu_seqlens are computed in chunks
    of up to 256 steps, by the gradients of the scan's five steps.
    """
    if _dispatch.through_operator(x, dt, A, B, C, dy, D, z, dt_bias, initial_states, d_final_states):
        gradients = _dispatch.compiled_ops().mamba2_backward(
            x, dt, A, B, C, dy, D, z, dt_bias, initial_states, cu_seqlens, seq_idx, d_final_states, dt_softplus, *dt_limit
        )
        return _present(gradients, D, z, dt_bias, initial_states)
    inputs, shape = [*_inputs(x, dt, A, B, C), tensor("dy", dy)], _state_shape(x, B, cu_seqlens)
    new = _arrays.empty if cu_seqlens is None else lambda like, shape: _arrays.full(like, shape, 0.0)
    dx, d_dt, db, dc = (new(array, array.shape) for array in (x, dt, B, C))
    da = _arrays.empty(A, A.shape)
    dd, d_bias = (None if array is None else _arrays.empty(array, array.shape) for array in (D, dt_bias))
    dz = None if z is None else new(z, z.shape)
    d_initial = None if initial_states is None else _arrays.empty(x, shape, "float32")
    others = (("dA", "da", da), ("dD", "dd", dd), ("dz", "dz", dz), ("d_dt_bias",) * 2 + (d_bias,), ("d_initial_states",) * 2 + (d_initial,))
    options = _options(
        _library.Mamba2BackwardOptions,
        D,
        z,
        dt_bias,
        dt_softplus,
        dt_limit,
        initial_states=optional("initial_states", initial_states),
        cu_seqlens=optional("cu_seqlens", cu_seqlens),
        seq_idx=optional("seq_idx", seq_idx),
        d_final_states=optional("d_final_states", d_final_states),
        **{field: optional(name, array, written=True) for name, field, array in others},
    )
    outputs = [tensor(name, array, written=True) for name, array in (("dx", dx), ("d_dt", d_dt), ("dB", db), ("dC", dc))]
    _mamba2_backward(*inputs, *outputs, _library.byref(options), _arrays.stream(x))
    return dx, d_dt, da, db, dc, dd, dz, d_bias, d_initial


def _present(gradients, *inputs) -> tuple:
    """The operator's results, where those without an input are empty."""
    return (*gradients[:5], *(None if given is None else gradient for given, gradient in zip(inputs, gradients[5:])))


# As operators of PyTorch. They return the same number of tensors always.


def _operator_mamba2(x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, seq_idx, dt_softplus, dt_min, dt_max, return_final_states):
    result = mamba2(
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=(dt_min, dt_max),
        initial_states=initial_states,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
        return_final_states=return_final_states,
    )
    return result if return_final_states else (result, _arrays.empty(x, (0,), "float32"))


def _fake_mamba2(x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, seq_idx, dt_softplus, dt_min, dt_max, return_final_states):
    shape = _state_shape(x, B, cu_seqlens) if return_final_states else (0,)
    return x.new_empty(x.shape), _arrays.empty(x, shape, "float32")


def _keep_for_backward(ctx, inputs, output):
    *arrays, ctx.dt_softplus, ctx.dt_min, ctx.dt_max, ctx.return_final_states = inputs
    ctx.save_for_backward(*arrays)


def _gradients(ctx, dy, d_final_states):
    x, dt, A, B, C, D, z, dt_bias, initial_states, cu_seqlens, seq_idx = ctx.saved_tensors
    d_final_states = d_final_states if ctx.return_final_states else None
    gradients = _dispatch.compiled_ops().mamba2_backward(
        x,
        dt,
        A,
        B,
        C,
        dy,
        D,
        z,
        dt_bias,
        initial_states,
        cu_seqlens,
        seq_idx,
        d_final_states,
        ctx.dt_softplus,
        ctx.dt_min,
        ctx.dt_max,
    )
    return *_present(gradients, D, z, dt_bias, initial_states), None, None, None, None, None, None


define(
    "mamba2(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias, Tensor? initial_states, "
    "Tensor? cu_seqlens, Tensor? seq_idx, bool dt_softplus, float dt_min, float dt_max, bool return_final_states) -> (Tensor, Tensor)",
    _operator_mamba2,
    _fake_mamba2,
    Gradient(_keep_for_backward, _gradients),
)


def _operator_backward(
    x, dt, A, B, C, dy, D, z, dt_bias, initial_states, cu_seqlens, seq_idx, d_final_states, dt_softplus, dt_min, dt_max
):
    gradients = mamba2_backward(
        x,
        dt,
        A,
        B,
        C,
        dy,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=(dt_min, dt_max),
        initial_states=initial_states,
        cu_seqlens=cu_seqlens,
        seq_idx=seq_idx,
        d_final_states=d_final_states,
    )
    return tuple(_arrays.empty(x, (0,)) if gradient is None else gradient for gradient in gradients)


def _fake_backward(x, dt, A, B, C, dy, D, z, dt_bias, initial_states, *_):
    return (
        *(array.new_empty(array.shape) for array in (x, dt, A, B, C)),
        *(x.new_empty((0,)) if array is None else array.new_empty(array.shape) for array in (D, z, dt_bias, initial_states)),
    )


define(
    "mamba2_backward(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor dy, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? initial_states, Tensor? cu_seqlens, Tensor? seq_idx, Tensor? d_final_states, bool dt_softplus, float dt_min, float dt_max) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_backward,
    _fake_backward,
)


def _operator_step(x, dt, A, B, C, states, D, z, dt_bias, state_indices, dt_softplus, dt_min, dt_max):
    return mamba2_step(
        x,
        dt,
        A,
        B,
        C,
        states,
        D=D,
        z=z,
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=(dt_min, dt_max),
        state_indices=state_indices,
    )


define(
    "mamba2_step(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) states, Tensor? D, Tensor? z, Tensor? dt_bias, "
    "Tensor? state_indices, bool dt_softplus, float dt_min, float dt_max) -> Tensor",
    _operator_step,
    lambda x, *_: x.new_empty(x.shape),
)
