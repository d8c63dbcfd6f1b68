"""Mamba-2's scan in five steps, for programs that need what lies between them. ops.mamba2() is faster.

Chunks have chunk_size steps, a multiple of 16, up to 256; nchunks is seqlen / chunk_size, rounded up. With G = dA_cumsum, i and j steps of one
chunk, and L = chunk_size:

    dt_i = softplus(dt_i + dt_bias), clamped to dt_limit    G_i = sum over j <= i of dt_j A    mamba2_chunk_cumsum()
    added = sum over i of exp(G_L - G_i) dt_i x_i B_i^T                                        mamba2_chunk_state()
    h' = exp(G_L) h + added, h the state before a chunk                                        mamba2_state_passing()
    CB(i, j) = C_i B_j                                                                         mamba2_bmm_chunk()
    y_i = (exp(G_i) h C_i + sum over j <= i of CB(i, j) exp(G_i - G_j) dt_j x_j + D x_i) silu(z_i)    mamba2_chunk_scan()

Arrays are NumPy's, PyTorch's or DLPack's, on the CPU or on CUDA, all on one device: x, y and z [batch, seqlen, nheads, headdim], B and C [batch,
seqlen, ngroups, dstate], of f16 or bf16, with any strides. dA_cumsum and the step sizes are f32 [batch, nheads, nchunks, chunk_size], states
[batch, nchunks, nheads, headdim, dstate]; these and CB are contiguous. PyTorch differentiates each function, by its mamba2_..._backward().
include/tilewave/mamba2_chunks.hpp has the rest.
"""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import Gradient, define
from .mamba2 import _NO_LIMIT

_chunk_cumsum = _library.bind("tw_mamba2_chunk_cumsum")
_chunk_state = _library.bind("tw_mamba2_chunk_state")
_state_passing = _library.bind("tw_mamba2_state_passing")
_bmm_chunk = _library.bind("tw_mamba2_bmm_chunk")
_chunk_scan = _library.bind("tw_mamba2_chunk_scan", out="y")
_chunk_cumsum_backward = _library.bind("tw_mamba2_chunk_cumsum_backward")
_chunk_state_backward = _library.bind("tw_mamba2_chunk_state_backward")
_state_passing_backward = _library.bind("tw_mamba2_state_passing_backward")
_bmm_chunk_backward = _library.bind("tw_mamba2_bmm_chunk_backward")
_chunk_scan_backward = _library.bind("tw_mamba2_chunk_scan_backward")


def _merged(array: Array) -> Array:
    """[batch, nchunks, ...] as [batch * nchunks, ...], which the library's C interface takes."""
    return array.reshape((array.shape[0] * array.shape[1], *array.shape[2:]))


def _chunks(seqlen: int, chunk_size: int) -> int:
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}; it must be a multiple of 16 from 16 to 256")
    return -(-seqlen // chunk_size)


def mamba2_chunk_cumsum(
    dt: Array,
    A: Array,
    chunk_size: int,
    *,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    seq_idx: Array | None = None,
) -> tuple[Array, Array]:
    """(dA_cumsum, the step sizes). dt: [batch, seqlen, nheads], f32, f16 or bf16; A and dt_bias: f32 [nheads].

    Steps beyond the sequence's end have a size of 0. The logarithm of a step's decay is at least -110.9, of which exp is 0 in f32. seq_idx:
    int32 [batch, seqlen]: a step whose number differs from that of the step before has that decay, and so begins with a state of 0.
    """
    if _dispatch.through_operator(dt, A, dt_bias):
        return _dispatch.compiled_ops().mamba2_chunk_cumsum(dt, A, chunk_size, dt_bias, seq_idx, dt_softplus, *dt_limit)
    sums, sizes = (_arrays.empty(dt, _cumsum_shape(dt, chunk_size), "float32") for _ in range(2))
    options = _cumsum_options(_library.Mamba2ChunkCumsumOptions, dt_bias, dt_softplus, dt_limit, seq_idx)
    outputs = [tensor(name, array, written=True) for name, array in (("dA_cumsum", sums), ("dt_out", sizes))]
    _chunk_cumsum(tensor("dt", dt), tensor("A", A), *outputs, _library.byref(options), _arrays.stream(dt))
    return sums, sizes


def _cumsum_options(kind, dt_bias, dt_softplus, dt_limit, seq_idx, **others):
    return kind(
        dt_bias=optional("dt_bias", dt_bias),
        dt_softplus=bool(dt_softplus),
        has_dt_limit=True,
        dt_min=float(dt_limit[0]),
        dt_max=float(dt_limit[1]),
        seq_idx=optional("seq_idx", seq_idx),
        **others,
    )


def _cumsum_shape(dt, chunk_size):
    _arrays.require_dims(3, dt=dt)
    return (dt.shape[0], dt.shape[2], _chunks(dt.shape[1], chunk_size), chunk_size)


def mamba2_chunk_state(B: Array, x: Array, dt: Array, dA_cumsum: Array) -> Array:
    """What each chunk adds to the state, f32. dt and dA_cumsum: mamba2_chunk_cumsum()'s. headdim and dstate are up to 256."""
    if _dispatch.through_operator(B, x, dt, dA_cumsum):
        return _dispatch.compiled_ops().mamba2_chunk_state(B, x, dt, dA_cumsum)
    states = _arrays.empty(x, _states_shape(B, x, dA_cumsum), "float32")
    inputs = [tensor(name, array) for name, array in (("B", B), ("x", x), ("dt", dt), ("dA_cumsum", dA_cumsum))]
    _chunk_state(*inputs, tensor("states", _merged(states), written=True), _arrays.stream(x))
    return states


def _states_shape(B, x, dA_cumsum):
    _arrays.require_dims(4, B=B, x=x, dA_cumsum=dA_cumsum)
    return (x.shape[0], dA_cumsum.shape[2], x.shape[2], x.shape[3], B.shape[3])


def mamba2_state_passing(
    states: Array, dA_chunk_cumsum: Array, *, initial_states: Array | None = None, dtype: str = "float32"
) -> tuple[Array, Array]:
    """(the state before each chunk, of `dtype`, the states after the last one, f32 [batch, nheads, headdim, dstate]).

    states: mamba2_chunk_state()'s. dA_chunk_cumsum: f32 [batch, nheads, nchunks], dA_cumsum[..., -1]. initial_states: f32, of the final states'
    shape; None is 0. dtype: float32, float16 or bfloat16; mamba2_chunk_scan() takes x's dtype.
    """
    dtype = _arrays.known_dtype("dtype", dtype)
    if _dispatch.through_operator(states, dA_chunk_cumsum, initial_states):
        return _dispatch.compiled_ops().mamba2_state_passing(states, dA_chunk_cumsum, initial_states, dtype)
    _arrays.require_dims(5, states=states)
    passed = _arrays.empty(states, states.shape, dtype)
    final = _arrays.empty(states, _final_shape(states), "float32")
    _state_passing(
        tensor("states", _merged(states)),
        tensor("dA_chunk_cumsum", dA_chunk_cumsum),
        tensor("passed", _merged(passed), written=True),
        optional("initial_states", initial_states),
        optional("final_states", final, written=True),
        _arrays.stream(states),
    )
    return passed, final


def _final_shape(states):
    return (states.shape[0], *states.shape[2:])


def mamba2_bmm_chunk(C: Array, B: Array, chunk_size: int, *, causal: bool = False) -> Array:
    """CB, f32 [batch, nchunks, ngroups, chunk_size, chunk_size]; 0 beyond the sequence's end. causal: what is above the diagonal is 0."""
    if _dispatch.through_operator(C, B):
        return _dispatch.compiled_ops().mamba2_bmm_chunk(C, B, chunk_size, causal)
    cb = _arrays.empty(C, _products_shape(C, chunk_size), "float32")
    _bmm_chunk(tensor("C", C), tensor("B", B), tensor("CB", _merged(cb), written=True), bool(causal), _arrays.stream(C))
    return cb


def _products_shape(C, chunk_size):
    _arrays.require_dims(4, C=C)
    return (C.shape[0], _chunks(C.shape[1], chunk_size), C.shape[2], chunk_size, chunk_size)


def mamba2_chunk_scan(
    CB: Array,
    x: Array,
    dt: Array,
    dA_cumsum: Array,
    C: Array,
    states: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    return_ungated: bool = False,
) -> Array | tuple[Array, Array]:
    """y, and with `return_ungated` the outputs before the gate.

    CB: mamba2_bmm_chunk()'s, which is not used above the diagonal. dt and dA_cumsum: mamba2_chunk_cumsum()'s. states: the state before each
    chunk, of x's dtype. D: f32 [nheads] or [nheads, headdim]; None is 0. z: the gate; None is none. PyTorch does not
    differentiate the outputs before the gate.
    """
    if _dispatch.through_operator(CB, x, dt, dA_cumsum, C, states, D, z):
        y, ungated = _dispatch.compiled_ops().mamba2_chunk_scan(CB, x, dt, dA_cumsum, C, states, D, z, return_ungated)
        return (y, ungated) if return_ungated else y
    y, ungated = _arrays.empty(x, x.shape), _arrays.empty(x, x.shape) if return_ungated else None
    options = _library.Mamba2ChunkScanOptions(
        d=optional("D", D), z=optional("z", z), ungated=optional("ungated", ungated, written=True)
    )
    _arrays.require_dims(5, CB=CB, states=states)
    named = (("CB", _merged(CB)), ("x", x), ("dt", dt), ("dA_cumsum", dA_cumsum), ("C", C), ("states", _merged(states)))
    inputs = [tensor(name, array) for name, array in named]
    _chunk_scan(*inputs, tensor("out", y, written=True), _library.byref(options), _arrays.stream(x))
    return (y, ungated) if return_ungated else y


def _outputs(**arrays):
    return [tensor(name, array, written=True) for name, array in arrays.items()]


def _inputs(**arrays):
    return [tensor(name, array) for name, array in arrays.items()]


def mamba2_chunk_cumsum_backward(
    dt: Array,
    A: Array,
    d_dA_cumsum: Array,
    d_dt_out: Array,
    *,
    dt_bias: Array | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    seq_idx: Array | None = None,
) -> tuple[Array, Array, Array | None]:
    """Gradients of mamba2_chunk_cumsum(): (d_dt, dA, d_dt_bias); the last is None without dt_bias. d_dA_cumsum, d_dt_out: those of its results.

    A step whose decay is the least one, exp(-110.9), gives none to A, nor through its decay to dt.
    """
    if _dispatch.through_operator(dt, A, d_dA_cumsum, d_dt_out, dt_bias):
        d_dt, dA, d_bias = _dispatch.compiled_ops().mamba2_chunk_cumsum_backward(
            dt, A, d_dA_cumsum, d_dt_out, dt_bias, seq_idx, dt_softplus, *dt_limit
        )
        return d_dt, dA, None if dt_bias is None else d_bias
    d_dt, dA = _arrays.empty(dt, dt.shape), _arrays.empty(A, A.shape)
    d_bias = None if dt_bias is None else _arrays.empty(dt_bias, dt_bias.shape)
    options = _cumsum_options(
        _library.Mamba2ChunkCumsumBackwardOptions,
        dt_bias,
        dt_softplus,
        dt_limit,
        seq_idx,
        da=optional("dA", dA, written=True),
        d_dt_bias=optional("d_dt_bias", d_bias, written=True),
    )
    inputs = _inputs(dt=dt, A=A, d_dA_cumsum=d_dA_cumsum, d_dt_out=d_dt_out)
    _chunk_cumsum_backward(*inputs, *_outputs(d_dt=d_dt), _library.byref(options), _arrays.stream(dt))
    return d_dt, dA, d_bias


def mamba2_chunk_state_backward(B: Array, x: Array, dt: Array, dA_cumsum: Array, d_states: Array) -> tuple[Array, Array, Array, Array]:
    """Gradients of mamba2_chunk_state(): (dB, dx, d_dt, d_dA_cumsum). d_states: f32, that of its result."""
    if _dispatch.through_operator(B, x, dt, dA_cumsum, d_states):
        return _dispatch.compiled_ops().mamba2_chunk_state_backward(B, x, dt, dA_cumsum, d_states)
    _arrays.require_dims(5, d_states=d_states)
    dB, dx, d_dt, d_sums = (_arrays.empty(array, array.shape) for array in (B, x, dt, dA_cumsum))
    inputs = _inputs(B=B, x=x, dt=dt, dA_cumsum=dA_cumsum, d_states=_merged(d_states))
    _chunk_state_backward(*inputs, *_outputs(dB=dB, dx=dx, d_dt=d_dt, d_dA_cumsum=d_sums), _arrays.stream(x))
    return dB, dx, d_dt, d_sums


def mamba2_state_passing_backward(
    passed: Array, dA_chunk_cumsum: Array, d_passed: Array, *, d_final_states: Array | None = None
) -> tuple[Array, Array, Array]:
    """Gradients of mamba2_state_passing(): (d_states, d_dA_chunk_cumsum, d_initial_states), f32.

    passed: its first result; d_passed, f32, and d_final_states: the gradients of its results. None is 0.
    """
    if _dispatch.through_operator(passed, dA_chunk_cumsum, d_passed, d_final_states):
        return _dispatch.compiled_ops().mamba2_state_passing_backward(passed, dA_chunk_cumsum, d_passed, d_final_states)
    _arrays.require_dims(5, passed=passed, d_passed=d_passed)
    d_states, d_initial = (_arrays.empty(passed, shape, "float32") for shape in (passed.shape, _final_shape(passed)))
    d_decays = _arrays.empty(dA_chunk_cumsum, dA_chunk_cumsum.shape)
    _state_passing_backward(
        *_inputs(passed=_merged(passed), dA_chunk_cumsum=dA_chunk_cumsum, d_passed=_merged(d_passed)),
        *_outputs(d_states=_merged(d_states), d_dA_chunk_cumsum=d_decays),
        optional("d_final_states", d_final_states),
        optional("d_initial_states", d_initial, written=True),
        _arrays.stream(passed),
    )
    return d_states, d_decays, d_initial


def mamba2_bmm_chunk_backward(C: Array, B: Array, d_CB: Array, *, causal: bool = False) -> tuple[Array, Array]:
    """Gradients of mamba2_bmm_chunk(): (dC, dB). d_CB: f32, that of its result, with `causal` not used above the diagonal."""
    if _dispatch.through_operator(C, B, d_CB):
        return _dispatch.compiled_ops().mamba2_bmm_chunk_backward(C, B, d_CB, causal)
    _arrays.require_dims(5, d_CB=d_CB)
    dC, dB = (_arrays.empty(array, array.shape) for array in (C, B))
    _bmm_chunk_backward(*_inputs(C=C, B=B, d_CB=_merged(d_CB)), *_outputs(dC=dC, dB=dB), bool(causal), _arrays.stream(C))
    return dC, dB


def mamba2_chunk_scan_backward(
    CB: Array,
    x: Array,
    dt: Array,
    dA_cumsum: Array,
    C: Array,
    states: Array,
    dy: Array,
    *,
    D: Array | None = None,
    z: Array | None = None,
    ungated: Array | None = None,
) -> tuple:
    """Gradients of mamba2_chunk_scan(): (d_CB, dx, d_dt, d_dA_cumsum, dC, d_states, dD, dz); the last two are None if their input is.

    dy: that of y. With z, `ungated` is needed, the outputs before the gate. d_states is f32, and d_CB 0 above the diagonal.
    """
    if _dispatch.through_operator(CB, x, dt, dA_cumsum, C, states, dy, D, z, ungated):
        gradients = _dispatch.compiled_ops().mamba2_chunk_scan_backward(CB, x, dt, dA_cumsum, C, states, dy, D, z, ungated)
        return _present(gradients, D, z)
    _arrays.require_dims(5, CB=CB, states=states)
    d_cb, dx, d_dt, d_sums, dC = (_arrays.empty(array, array.shape) for array in (CB, x, dt, dA_cumsum, C))
    d_states = _arrays.empty(states, states.shape, "float32")
    dD, dz = (None if array is None else _arrays.empty(array, array.shape) for array in (D, z))
    options = _library.Mamba2ChunkScanBackwardOptions(
        d=optional("D", D),
        z=optional("z", z),
        ungated=optional("ungated", ungated),
        dd=optional("dD", dD, written=True),
        dz=optional("dz", dz, written=True),
    )
    inputs = _inputs(CB=_merged(CB), x=x, dt=dt, dA_cumsum=dA_cumsum, C=C, states=_merged(states), dy=dy)
    outputs = _outputs(d_CB=_merged(d_cb), dx=dx, d_dt=d_dt, d_dA_cumsum=d_sums, dC=dC, d_states=_merged(d_states))
    _chunk_scan_backward(*inputs, *outputs, _library.byref(options), _arrays.stream(x))
    return d_cb, dx, d_dt, d_sums, dC, d_states, dD, dz


def _present(gradients, D, z) -> tuple:
    """The scan's gradients by its operator, where those without an input are empty."""
    return (*gradients[:6], None if D is None else gradients[6], None if z is None else gradients[7])


# As operators of PyTorch.


def _operator_cumsum(dt, A, chunk_size, dt_bias, seq_idx, dt_softplus, dt_min, dt_max):
    return mamba2_chunk_cumsum(dt, A, chunk_size, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=(dt_min, dt_max), seq_idx=seq_idx)


def _fake_cumsum(dt, A, chunk_size, *_):
    return tuple(_arrays.empty(dt, _cumsum_shape(dt, chunk_size), "float32") for _ in range(2))


def _fake_passing(states, dA_chunk_cumsum, initial_states, dtype):
    return _arrays.empty(states, states.shape, dtype), _arrays.empty(states, _final_shape(states), "float32")


def _operator_scan(CB, x, dt, dA_cumsum, C, states, D, z, return_ungated):
    result = mamba2_chunk_scan(CB, x, dt, dA_cumsum, C, states, D=D, z=z, return_ungated=return_ungated)
    return result if return_ungated else (result, _arrays.empty(x, (0,)))


def _fake_scan(CB, x, dt, dA_cumsum, C, states, D, z, return_ungated):
    return x.new_empty(x.shape), x.new_empty(x.shape if return_ungated else (0,))


def _or_empty(gradients, like):
    """Operators return the same number of tensors always."""
    return tuple(_arrays.empty(like, (0,)) if gradient is None else gradient for gradient in gradients)


def _between(gradient):
    """A gradient of what lies between the steps, as their gradients take it."""
    return gradient.float().contiguous()


def _keep_cumsum(ctx, inputs, output):
    dt, A, _, dt_bias, seq_idx, *ctx.options = inputs
    ctx.save_for_backward(dt, A, dt_bias, seq_idx)


def _gradients_of_cumsum(ctx, d_sums, d_sizes):
    dt, A, dt_bias, seq_idx = ctx.saved_tensors
    d_dt, dA, d_bias = _dispatch.compiled_ops().mamba2_chunk_cumsum_backward(
        dt, A, _between(d_sums), _between(d_sizes), dt_bias, seq_idx, *ctx.options
    )
    return d_dt, dA, None, None if dt_bias is None else d_bias, None, None, None, None


def _keep_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _gradients_of_state(ctx, d_states):
    return _dispatch.compiled_ops().mamba2_chunk_state_backward(*ctx.saved_tensors, _between(d_states))


def _keep_passing(ctx, inputs, output):
    ctx.with_initial = inputs[2] is not None
    ctx.save_for_backward(output[0], inputs[1])


def _gradients_of_passing(ctx, d_passed, d_final):
    d_states, d_decays, d_initial = _dispatch.compiled_ops().mamba2_state_passing_backward(
        *ctx.saved_tensors, _between(d_passed), _between(d_final)
    )
    return d_states, d_decays, d_initial if ctx.with_initial else None, None


def _keep_products(ctx, inputs, output):
    C, B, _, ctx.causal = inputs
    ctx.save_for_backward(C, B)


def _gradients_of_products(ctx, d_CB):
    dC, dB = _dispatch.compiled_ops().mamba2_bmm_chunk_backward(*ctx.saved_tensors, _between(d_CB), ctx.causal)
    return dC, dB, None, None


def _keep_scan(ctx, inputs, output):
    *arrays, ctx.return_ungated = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*arrays, output[1])


def _gradients_of_scan(ctx, dy, _):
    *arrays, D, z, ungated = ctx.saved_tensors
    if z is None:
        ungated = None
    elif not ctx.return_ungated:
        ungated = _dispatch.compiled_ops().mamba2_chunk_scan(*arrays, D, None, False)[0]
    gradients = _present(_dispatch.compiled_ops().mamba2_chunk_scan_backward(*arrays, dy, D, z, ungated), D, z)
    return *gradients[:5], gradients[5].to(arrays[5].dtype), *gradients[6:], None


define(
    "mamba2_chunk_cumsum(Tensor dt, Tensor A, int chunk_size, Tensor? dt_bias, Tensor? seq_idx, bool dt_softplus, float dt_min, float dt_max) "
    "-> (Tensor, Tensor)",
    _operator_cumsum,
    _fake_cumsum,
    Gradient(_keep_cumsum, _gradients_of_cumsum),
)
define(
    "mamba2_chunk_state(Tensor B, Tensor x, Tensor dt, Tensor dA_cumsum) -> Tensor",
    mamba2_chunk_state,
    lambda B, x, dt, dA_cumsum: _arrays.empty(x, _states_shape(B, x, dA_cumsum), "float32"),
    Gradient(_keep_inputs, _gradients_of_state),
)
define(
    "mamba2_state_passing(Tensor states, Tensor dA_chunk_cumsum, Tensor? initial_states, str dtype) -> (Tensor, Tensor)",
    lambda states, sums, initial, dtype: mamba2_state_passing(states, sums, initial_states=initial, dtype=dtype),
    _fake_passing,
    Gradient(_keep_passing, _gradients_of_passing),
)
define(
    "mamba2_bmm_chunk(Tensor C, Tensor B, int chunk_size, bool causal) -> Tensor",
    lambda C, B, chunk_size, causal: mamba2_bmm_chunk(C, B, chunk_size, causal=causal),
    lambda C, B, chunk_size, causal: _arrays.empty(C, _products_shape(C, chunk_size), "float32"),
    Gradient(_keep_products, _gradients_of_products),
)
define(
    "mamba2_chunk_scan(Tensor CB, Tensor x, Tensor dt, Tensor dA_cumsum, Tensor C, Tensor states, Tensor? D, Tensor? z, bool return_ungated) "
    "-> (Tensor, Tensor)",
    _operator_scan,
    _fake_scan,
    Gradient(_keep_scan, _gradients_of_scan),
)


def _operator_cumsum_backward(dt, A, d_sums, d_sizes, dt_bias, seq_idx, dt_softplus, dt_min, dt_max):
    gradients = mamba2_chunk_cumsum_backward(
        dt, A, d_sums, d_sizes, dt_bias=dt_bias, dt_softplus=dt_softplus, dt_limit=(dt_min, dt_max), seq_idx=seq_idx
    )
    return _or_empty(gradients, A)


def _of_shapes(*arrays):
    return tuple(array.new_empty(array.shape) for array in arrays)


def _fake_passing_backward(passed, dA_chunk_cumsum, *_):
    d_states, d_initial = (_arrays.empty(passed, shape, "float32") for shape in (passed.shape, _final_shape(passed)))
    return d_states, dA_chunk_cumsum.new_empty(dA_chunk_cumsum.shape), d_initial


def _operator_scan_backward(CB, x, dt, dA_cumsum, C, states, dy, D, z, ungated):
    return _or_empty(mamba2_chunk_scan_backward(CB, x, dt, dA_cumsum, C, states, dy, D=D, z=z, ungated=ungated), x)


def _fake_scan_backward(CB, x, dt, dA_cumsum, C, states, dy, D, z, ungated):
    optionals = (x.new_empty((0,)) if array is None else array.new_empty(array.shape) for array in (D, z))
    return *_of_shapes(CB, x, dt, dA_cumsum, C), _arrays.empty(states, states.shape, "float32"), *optionals


define(
    "mamba2_chunk_cumsum_backward(Tensor dt, Tensor A, Tensor d_dA_cumsum, Tensor d_dt_out, Tensor? dt_bias, Tensor? seq_idx, "
    "bool dt_softplus, float dt_min, float dt_max) -> (Tensor, Tensor, Tensor)",
    _operator_cumsum_backward,
    lambda dt, A, d_sums, d_sizes, dt_bias, *_: (*_of_shapes(dt, A), A.new_empty((0,) if dt_bias is None else dt_bias.shape)),
)
define(
    "mamba2_chunk_state_backward(Tensor B, Tensor x, Tensor dt, Tensor dA_cumsum, Tensor d_states) -> (Tensor, Tensor, Tensor, Tensor)",
    mamba2_chunk_state_backward,
    lambda B, x, dt, dA_cumsum, d_states: _of_shapes(B, x, dt, dA_cumsum),
)
define(
    "mamba2_state_passing_backward(Tensor passed, Tensor dA_chunk_cumsum, Tensor d_passed, Tensor? d_final_states) "
    "-> (Tensor, Tensor, Tensor)",
    lambda passed, decays, d_passed, d_final: mamba2_state_passing_backward(passed, decays, d_passed, d_final_states=d_final),
    _fake_passing_backward,
)
define(
    "mamba2_bmm_chunk_backward(Tensor C, Tensor B, Tensor d_CB, bool causal) -> (Tensor, Tensor)",
    lambda C, B, d_CB, causal: mamba2_bmm_chunk_backward(C, B, d_CB, causal=causal),
    lambda C, B, d_CB, causal: _of_shapes(C, B),
)
define(
    "mamba2_chunk_scan_backward(Tensor CB, Tensor x, Tensor dt, Tensor dA_cumsum, Tensor C, Tensor states, Tensor dy, Tensor? D, Tensor? z, "
    "Tensor? ungated) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _operator_scan_backward,
    _fake_scan_backward,
)
