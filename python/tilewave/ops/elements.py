"""Elementwise functions, and functions that move elements."""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, tensor
from .._operators import define, empty_like

_binary = {name: _library.bind(f"tw_{name}", out="y") for name in ("add", "mul", "swiglu")}
_unary = {
    name: _library.bind(f"tw_{name}", out="y") for name in ("silu", "gelu_erf", "gelu_tanh", "cast", "swiglu_interleaved", "transpose")
}
_embedding = _library.bind("tw_embedding", out="y")


def _of_two(op: str, a: Array, b: Array, out: Array | None, names: tuple[str, str]) -> Array:
    like, rank = a, max(len(a.shape), len(b.shape))
    of_a, of_b = (tensor(name, _with_rank(rank, x)) for name, x in zip(names, (a, b)))
    if out is None:
        out = _arrays.empty(like, _broadcast(names, a, b))
    _binary[op](of_a, of_b, tensor("out", out, written=True), _arrays.stream(like))
    return out


def _with_rank(rank: int, x: Array) -> Array:
    """x with leading dimensions of 1, as in broadcasting."""
    return x if len(x.shape) == rank else x[(None,) * (rank - len(x.shape))]


def _broadcast(names: tuple[str, str], a: Array, b: Array) -> tuple:
    rank = max(len(a.shape), len(b.shape))
    extents = list(zip(*((1,) * (rank - len(x.shape)) + tuple(x.shape) for x in (a, b))))
    if any(m != n and 1 not in (m, n) for m, n in extents):
        raise ValueError(f"{names[1]} has shape {tuple(b.shape)}, which cannot be broadcast with {names[0]}'s, {tuple(a.shape)}")
    return tuple(n if m == 1 else m for m, n in extents)


def _of_one(op: str, x: Array, out: Array | None, shape=None, dtype: str | None = None) -> Array:
    of_x = tensor("x", x)
    if out is None:
        out = _arrays.empty(x, x.shape if shape is None else shape, dtype)
    _unary[op](of_x, tensor("out", out, written=True), _arrays.stream(x))
    return out


def add(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """a + b. f32, f16 or bf16, one dtype; up to 4 dimensions of any strides, extents of 1 are broadcast; `out` may be a or b."""
    if _dispatch.through_operator(a, b):
        return _dispatch.into(out, _dispatch.compiled_ops().add(a, b))
    return _of_two("add", a, b, out, ("a", "b"))


def mul(a: Array, b: Array, *, out: Array | None = None) -> Array:
    """a b, otherwise as add()."""
    if _dispatch.through_operator(a, b):
        return _dispatch.into(out, _dispatch.compiled_ops().mul(a, b))
    return _of_two("mul", a, b, out, ("a", "b"))


def silu(x: Array, *, out: Array | None = None) -> Array:
    """x / (1 + exp(-x)) of f32, f16 or bf16, in f32, rounded once; any shape up to 4 dimensions; `out` may be x."""
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().silu(x))
    return _of_one("silu", x, out)


def gelu_erf(x: Array, *, out: Array | None = None) -> Array:
    """x Phi(x), otherwise as silu()."""
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().gelu_erf(x))
    return _of_one("gelu_erf", x, out)


def gelu_tanh(x: Array, *, out: Array | None = None) -> Array:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), otherwise as silu()."""
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().gelu_tanh(x))
    return _of_one("gelu_tanh", x, out)


def cast(x: Array, dtype: str, *, out: Array | None = None) -> Array:
    """x as `dtype`: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, int8, int32, int64, uint8 or bool, from any of them.

    To the nearest, ties to even. To an integer type out-of-range values become the nearest integer in range and NaN 0; to fp8 it saturates.
    """
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().cast(x, dtype))
    return _of_one("cast", x, out, dtype=_arrays.known_dtype("dtype", dtype))


def swiglu(gate: Array, up: Array, *, out: Array | None = None) -> Array:
    """silu(gate) * up, in f32, rounded once. gate, up: 1 to 4 dimensions, one shape and dtype (f32, f16 or bf16); `out` may be either."""
    if _dispatch.through_operator(gate, up):
        return _dispatch.into(out, _dispatch.compiled_ops().swiglu(gate, up))
    return _of_two("swiglu", gate, up, out, ("gate", "up"))


def swiglu_interleaved(x: Array, *, out: Array | None = None) -> Array:
    """swiglu() of alternating columns, gate, up, gate, up: x [.., 2 n] gives [.., n]."""
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().swiglu_interleaved(x))
    return _of_one("swiglu_interleaved", x, out, shape=(*x.shape[:-1], x.shape[-1] // 2) if len(x.shape) else ())


def transpose(x: Array, *, out: Array | None = None) -> Array:
    """y[.., n, m] = x[.., m, n], moved in memory. x: [m, n] or [batch, m, n] of any dtype and strides."""
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().transpose(x))
    return _of_one("transpose", x, out, shape=(*x.shape[:-2], *x.shape[:-3:-1]))


def embedding(table: Array, ids: Array, *, scale: float = 1.0, out: Array | None = None) -> Array:
    """scale * table[ids]. table: [vocabulary, dim] of f32, f16, bf16 or fp8; ids: int32 or int64, contiguous; gives [*ids.shape, dim].

    Ids out of range: ValueError on the CPU. On CUDA they are clamped to the table, because checking them would have to wait for the
    device.
    """
    if _dispatch.through_operator(table, ids):
        return _dispatch.into(out, _dispatch.compiled_ops().embedding(table, ids, scale))
    of_table, of_ids = tensor("table", table), tensor("ids", ids)
    if out is None:
        out = _arrays.empty(table, (*ids.shape, table.shape[-1] if len(table.shape) else 0))
    _embedding(of_table, of_ids, tensor("out", out, written=True), scale, _arrays.stream(table))
    return out


# Operators of PyTorch. Results are contiguous, like those of the eager functions.


def _broadcast_fake(a, b):
    import torch  # which calls this

    return a.new_empty(torch.broadcast_shapes(a.shape, b.shape))


define("add(Tensor a, Tensor b) -> Tensor", add, _broadcast_fake)
define("mul(Tensor a, Tensor b) -> Tensor", mul, _broadcast_fake)
define("swiglu(Tensor gate, Tensor up) -> Tensor", swiglu, empty_like)
define("silu(Tensor x) -> Tensor", silu, empty_like)
define("gelu_erf(Tensor x) -> Tensor", gelu_erf, empty_like)
define("gelu_tanh(Tensor x) -> Tensor", gelu_tanh, empty_like)
define("cast(Tensor x, str dtype) -> Tensor", cast, lambda x, dtype: _arrays.empty(x, x.shape, _arrays.known_dtype("dtype", dtype)))
define("swiglu_interleaved(Tensor x) -> Tensor", swiglu_interleaved, lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
define("transpose(Tensor x) -> Tensor", transpose, lambda x: x.new_empty(x.mT.shape))
define(
    "embedding(Tensor table, Tensor ids, float scale) -> Tensor",
    lambda table, ids, scale: embedding(table, ids, scale=scale),
    lambda table, ids, scale: table.new_empty((*ids.shape, table.shape[-1])),
)
