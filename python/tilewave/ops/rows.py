"""Functions of rows: norms, softmax, Hadamard transforms, rotary embedding, reductions, and the largest elements."""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import define, empty_like

_layer_norm = _library.bind("tw_layer_norm", out="y")
_rms_norm = _library.bind("tw_rms_norm", out="y")
_softmax = _library.bind("tw_softmax", out="y")
_hadamard = _library.bind("tw_hadamard", out="y")
_rope = _library.bind("tw_rope", out="y")
_rope_table = _library.bind("tw_rope_table")
_reduce = _library.bind("tw_reduce", out="y")
_argmax = _library.bind("tw_argmax", out="indices")
_topk = _library.bind("tw_topk")

_REDUCTIONS = {"sum": 0, "mean": 1, "max": 2, "min": 3, "abs_max": 4}


def _norm(function, x, weight, bias, epsilon, residual, sum_out, out):
    of_x = tensor("x", x)
    if out is None:
        out = _arrays.empty(x, x.shape)
    options = _library.NormOptions(
        has_epsilon=1,
        epsilon=epsilon,
        weight=optional("weight", weight),
        bias=optional("bias", bias),
        residual=optional("residual", residual),
        sum=optional("sum_out", sum_out, written=True),
    )
    function(of_x, tensor("out", out, written=True), _library.byref(options), _arrays.stream(x))
    return out


def _summed(x, residual, sum_out):
    """x and residual for an operator that writes no sum."""
    return (x, residual) if sum_out is None else (sum_out.copy_(x + residual), None)


def layer_norm(
    x: Array,
    weight: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-5,
    residual: Array | None = None,
    sum_out: Array | None = None,
    out: Array | None = None,
) -> Array:
    """(h - mean(h)) / sqrt(var(h) + epsilon) * weight + bias over the last dimension, n long; h is x, or x + residual.

    x: [.., n], 1 to 4 dimensions of f32, f16 or bf16; weight, bias: [n] of x's dtype or f32; residual: as x. sum_out is an output for h,
    rounded to x's dtype; it may be x or the residual. Statistics are f32; `out` may be x, or have another dtype.
    """
    if _dispatch.through_operator(x, weight, bias, residual):
        x, residual = _summed(x, residual, sum_out)
        return _dispatch.into(out, _dispatch.compiled_ops().layer_norm(x, weight, bias, epsilon, residual))
    return _norm(_layer_norm, x, weight, bias, epsilon, residual, sum_out, out)


def rms_norm(
    x: Array,
    weight: Array | None = None,
    *,
    epsilon: float = 1e-5,
    residual: Array | None = None,
    sum_out: Array | None = None,
    out: Array | None = None,
) -> Array:
    """h / sqrt(mean(h^2) + epsilon) * weight, otherwise as layer_norm(). The normalised row is rounded to x's dtype before it is multiplied
    by the weight, as Llama models do."""
    if _dispatch.through_operator(x, weight, residual):
        x, residual = _summed(x, residual, sum_out)
        return _dispatch.into(out, _dispatch.compiled_ops().rms_norm(x, weight, epsilon, residual))
    return _norm(_rms_norm, x, weight, None, epsilon, residual, sum_out, out)


def softmax(x: Array, *, scale: float = 1.0, out: Array | None = None) -> Array:
    """softmax(scale x) over the last dimension, in f32, rounded once. x: 1 to 4 dimensions of f32, f16 or bf16; `out` may be x."""
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().softmax(x, scale))
    of_x = tensor("x", x)
    if out is None:
        out = _arrays.empty(x, x.shape)
    _softmax(of_x, tensor("out", out, written=True), scale, _arrays.stream(x))
    return out


def hadamard(x: Array, *, scale: float = 1.0, factors: Array | None = None, out: Array | None = None) -> Array:
    """scale (x * factors) H over the last dimension, n long, in f32, rounded once. H is a symmetric n x n matrix of 1 and -1 with H H = n I.

    x: 1 to 4 dimensions of f32, f16 or bf16; n is 2, 4, 8, .. 32768, or 12, 20 or 28 times a power of two, at most 32768. factors: f32 [n],
    for example random signs. `out` may be x, or have another dtype. include/tilewave/hadamard.hpp defines H.
    """
    if _dispatch.through_operator(x, factors):
        return _dispatch.into(out, _dispatch.compiled_ops().hadamard(x, scale, factors))
    of_x = tensor("x", x)
    if out is None:
        out = _arrays.empty(x, x.shape)
    _hadamard(of_x, tensor("out", out, written=True), optional("factors", factors), scale, _arrays.stream(x))
    return out


def rope_table(
    positions: Array, rotary_dim: int, *, theta: float = 10000.0, dtype: str = "float32", out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """cos and sin, each [rows, rotary_dim / 2] of `dtype`, of positions[n] * theta^(-k / (rotary_dim / 2)). positions: int32 [rows]."""
    if _dispatch.through_operator(positions):
        return _dispatch.into(out, _dispatch.compiled_ops().rope_table(positions, rotary_dim, theta, dtype))
    of_positions = tensor("positions", positions)
    if out is None:
        if len(positions.shape) != 1:
            raise ValueError(f"positions has shape {tuple(positions.shape)}; allowed: [rows]")
        if _arrays.int32("rotary_dim", rotary_dim) < 2 or rotary_dim % 2:
            raise ValueError(f"rotary_dim is {rotary_dim}; allowed: a positive multiple of 2")
        shape = (positions.shape[0], rotary_dim // 2)
        known = _arrays.known_dtype("dtype", dtype)
        out = (_arrays.empty(positions, shape, known), _arrays.empty(positions, shape, known))
    cos, sin = out
    _rope_table(tensor("out[0]", cos, True), tensor("out[1]", sin, True), theta, 0, of_positions, _arrays.stream(positions))
    return cos, sin


def rope(
    x: Array,
    cos: Array,
    sin: Array,
    *,
    interleaved: bool = False,
    offset: int = 0,
    offsets: Array | None = None,
    positions: Array | None = None,
    out: Array | None = None,
) -> Array:
    """Rotary position embedding (Su et al., arXiv 2104.09864): rotates pairs in a head's first rotary_dim dimensions.

    x: [batch, seqlen, heads, dim] or [seqlen, heads, dim] of f32, f16 or bf16; cos, sin: [positions, rotary_dim / 2] of x's dtype or f32.
    Pairs are k and k + rotary_dim / 2, or `interleaved` 2 k and 2 k + 1. Row s of a sequence has position offset + s, or offsets[b] + s
    (int32 [batch]), or positions[b, s] (int32 [batch, seqlen] or [seqlen]). In f32, rounded once; `out` may be x.
    """
    if _dispatch.through_operator(x, cos, sin, offsets, positions):
        return _dispatch.into(out, _dispatch.compiled_ops().rope(x, cos, sin, interleaved, offset, offsets, positions))
    of_x = tensor("x", x)
    if out is None:
        out = _arrays.empty(x, x.shape)
    options = _library.RopeOptions(
        interleaved=bool(interleaved),
        offset=_arrays.int64("offset", offset),
        offsets=optional("offsets", offsets),
        positions=optional("positions", positions),
    )
    _rope(of_x, tensor("cos", cos), tensor("sin", sin), tensor("out", out, True), _library.byref(options), _arrays.stream(x))
    return out


def reduce(x: Array, reduction: str, *, dim: int = -1, keepdim: bool = False, out: Array | None = None) -> Array:
    """The sum, mean, max, min or abs_max (largest magnitude) of x along one dimension, accumulated in f32 in a fixed order.

    x: 1 to 4 dimensions of f32, f16 or bf16. Gives x's shape without the dimension, or with `keepdim` 1 in its place. A NaN makes NaN.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; allowed: {', '.join(_REDUCTIONS)}")
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().reduce(x, reduction, dim, keepdim))
    of_x = tensor("x", x)
    shape = reduce_shape(x, dim, keepdim)
    if out is None:
        out = _arrays.empty(x, shape)
    _reduce(_REDUCTIONS[reduction], of_x, tensor("out", out, True), dim, _arrays.stream(x))
    return out


def reduce_shape(x: Array, dim: int, keepdim: bool) -> tuple:
    """reduce()'s result's."""
    rank = len(x.shape)
    if not -rank <= dim < rank:
        raise ValueError(f"dim is {dim}; x has {rank} dimensions")
    dim %= rank
    return (*x.shape[:dim], *((1,) if keepdim else ()), *x.shape[dim + 1 :])


def argmax(x: Array, *, dtype: str = "int64", out: Array | None = None) -> Array:
    """The column of the largest element of each row x[.., :], the first of equal ones; int64 or int32. NaN is larger than all numbers."""
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().argmax(x, dtype))
    of_x = tensor("x", x)
    if out is None:
        out = _arrays.empty(x, x.shape[:-1], _arrays.known_dtype("dtype", dtype))
    _argmax(of_x, tensor("out", out, True), None, _arrays.stream(x))
    return out


def topk(
    x: Array, k: int, *, largest: bool = True, sorted: bool = True, starts: Array | None = None, ends: Array | None = None
) -> tuple[Array, Array]:
    """The k largest elements of each row x[.., :] and their columns, int64: both [.., k]; values descending, equal ones by their columns.

    x: 1 to 4 dimensions of f32, f16 or bf16; k: 1 to 2048. not `largest`: the smallest, ascending. not `sorted`: in the order of their
    columns. starts, ends: int32, x's shape without the last dimension: only x[.., start:end] is searched. If a row has fewer, columns are
    -1 and values -inf (inf for the smallest).
    """
    if _dispatch.through_operator(x, starts, ends):
        return _dispatch.compiled_ops().topk(x, k, largest, sorted, starts, ends)
    of_x = tensor("x", x)
    k = _arrays.integer("k", k, 1, 2048)
    values, indices = _arrays.empty(x, (*x.shape[:-1], k)), _arrays.empty(x, (*x.shape[:-1], k), "int64")
    options = _library.TopkOptions(
        smallest=not largest, unsorted=not sorted, starts=optional("starts", starts), ends=optional("ends", ends)
    )
    _topk(of_x, k, tensor("values", values, True), tensor("indices", indices, True), _library.byref(options), _arrays.stream(x))
    return values, indices


# As operators of PyTorch. Results are contiguous, as those of the eager functions.

define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon, Tensor? residual) -> Tensor",
    lambda x, weight, bias, epsilon, residual: layer_norm(x, weight, bias, epsilon=epsilon, residual=residual),
    empty_like,
)
define(
    "rms_norm(Tensor x, Tensor? weight, float epsilon, Tensor? residual) -> Tensor",
    lambda x, weight, epsilon, residual: rms_norm(x, weight, epsilon=epsilon, residual=residual),
    empty_like,
)
define("softmax(Tensor x, float scale) -> Tensor", lambda x, scale: softmax(x, scale=scale), empty_like)
define(
    "hadamard(Tensor x, float scale, Tensor? factors) -> Tensor",
    lambda x, scale, factors: hadamard(x, scale=scale, factors=factors),
    empty_like,
)
define(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved, SymInt offset, Tensor? offsets, Tensor? positions) -> Tensor",
    lambda x, cos, sin, interleaved, offset, offsets, positions: rope(
        x, cos, sin, interleaved=interleaved, offset=offset, offsets=offsets, positions=positions
    ),
    empty_like,
)
define(
    "rope_table(Tensor positions, SymInt rotary_dim, float theta, str dtype) -> (Tensor, Tensor)",
    lambda positions, rotary_dim, theta, dtype: rope_table(positions, rotary_dim, theta=theta, dtype=dtype),
    lambda positions, rotary_dim, theta, dtype: tuple(
        _arrays.empty(positions, (positions.shape[0], rotary_dim // 2), _arrays.known_dtype("dtype", dtype)) for _ in range(2)
    ),
)
define(
    "reduce(Tensor x, str reduction, SymInt dim, bool keepdim) -> Tensor",
    lambda x, reduction, dim, keepdim: reduce(x, reduction, dim=dim, keepdim=keepdim),
    lambda x, reduction, dim, keepdim: x.new_empty(reduce_shape(x, dim, keepdim)),
)
define(
    "argmax(Tensor x, str dtype) -> Tensor",
    lambda x, dtype: argmax(x, dtype=dtype),
    lambda x, dtype: _arrays.empty(x, x.shape[:-1], _arrays.known_dtype("dtype", dtype)),
)
define(
    "topk(Tensor x, SymInt k, bool largest, bool sorted, Tensor? starts, Tensor? ends) -> (Tensor, Tensor)",
    lambda x, k, largest, sorted, starts, ends: topk(x, k, largest=largest, sorted=sorted, starts=starts, ends=ends),
    lambda x, k, *rest: (x.new_empty((*x.shape[:-1], k)), _arrays.empty(x, (*x.shape[:-1], k), "int64")),
)
