"""Mamba-2's scan in five steps, for programs that need what lies between them. ops.mamba2() is faster, and has gradients.

Chunks have chunk_size steps, a multiple of 16, up to 256; nchunks is seqlen / chunk_size, rounded up. With G = dA_cumsum, i and j steps of one
chunk, and L = chunk_size:

    dt_i = softplus(dt_i + dt_bias), clamped to dt_limit    G_i = sum over j <= i of dt_j A    mamba2_chunk_cumsum()
    added = sum over i of exp(G_L - G_i) dt_i x_i B_i^T                                        mamba2_chunk_state()
    h' = exp(G_L) h + added, h the state before a chunk                                        mamba2_state_passing()
    CB(i, j) = C_i B_j                                                                         mamba2_bmm_chunk()
    y_i = (exp(G_i) h C_i + sum over j <= i of CB(i, j) exp(G_i - G_j) dt_j x_j + D x_i) silu(z_i)    mamba2_chunk_scan()

Arrays are NumPy's, PyTorch's or DLPack's, on the CPU or on CUDA, all on one device: x, y and z [batch, seqlen, nheads, headdim], B and C [batch,
seqlen, ngroups, dstate], of f16 or bf16, with any strides. dA_cumsum and the step sizes are f32 [batch, nheads, nchunks, chunk_size], states
[batch, nchunks, nheads, headdim, dstate]; these and CB are contiguous. The functions have no gradients. include/tilewave/mamba2_chunks.hpp has
the rest.
"""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import define
from .mamba2 import _NO_LIMIT

_chunk_cumsum = _library.bind("tw_mamba2_chunk_cumsum")
_chunk_state = _library.bind("tw_mamba2_chunk_state")
_state_passing = _library.bind("tw_mamba2_state_passing")
_bmm_chunk = _library.bind("tw_mamba2_bmm_chunk")
_chunk_scan = _library.bind("tw_mamba2_chunk_scan", out="y")


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
    options = _library.Mamba2ChunkCumsumOptions(
        dt_bias=optional("dt_bias", dt_bias),
        dt_softplus=bool(dt_softplus),
        has_dt_limit=True,
        dt_min=float(dt_limit[0]),
        dt_max=float(dt_limit[1]),
        seq_idx=optional("seq_idx", seq_idx),
    )
    outputs = [tensor(name, array, written=True) for name, array in (("dA_cumsum", sums), ("dt_out", sizes))]
    _chunk_cumsum(tensor("dt", dt), tensor("A", A), *outputs, _library.byref(options), _arrays.stream(dt))
    return sums, sizes


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
    chunk, of x's dtype. D: f32 [nheads] or [nheads, headdim]; None is 0. z: the gate; None is none.
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


define(
    "mamba2_chunk_cumsum(Tensor dt, Tensor A, int chunk_size, Tensor? dt_bias, Tensor? seq_idx, bool dt_softplus, float dt_min, float dt_max) "
    "-> (Tensor, Tensor)",
    _operator_cumsum,
    _fake_cumsum,
)
define(
    "mamba2_chunk_state(Tensor B, Tensor x, Tensor dt, Tensor dA_cumsum) -> Tensor",
    mamba2_chunk_state,
    lambda B, x, dt, dA_cumsum: _arrays.empty(x, _states_shape(B, x, dA_cumsum), "float32"),
)
define(
    "mamba2_state_passing(Tensor states, Tensor dA_chunk_cumsum, Tensor? initial_states, str dtype) -> (Tensor, Tensor)",
    lambda states, sums, initial, dtype: mamba2_state_passing(states, sums, initial_states=initial, dtype=dtype),
    _fake_passing,
)
define(
    "mamba2_bmm_chunk(Tensor C, Tensor B, int chunk_size, bool causal) -> Tensor",
    lambda C, B, chunk_size, causal: mamba2_bmm_chunk(C, B, chunk_size, causal=causal),
    lambda C, B, chunk_size, causal: _arrays.empty(C, _products_shape(C, chunk_size), "float32"),
)
define(
    "mamba2_chunk_scan(Tensor CB, Tensor x, Tensor dt, Tensor dA_cumsum, Tensor C, Tensor states, Tensor? D, Tensor? z, bool return_ungated) "
    "-> (Tensor, Tensor)",
    _operator_scan,
    _fake_scan,
)
