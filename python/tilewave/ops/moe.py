"""Mixture of experts: the whole layer and its pieces."""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import define, empty_like
from .products import empty_fp8

_moe_route = _library.bind("tw_moe_route")
_moe_permutation = _library.bind("tw_moe_permutation")
_moe_dispatch = _library.bind("tw_moe_dispatch", out="y")
_moe_combine = _library.bind("tw_moe_combine")
_moe_experts = _library.bind("tw_moe_experts")
_fused_moe = _library.bind("tw_fused_moe")

_SCORES = {"softmax": 0, "sigmoid": 1}
_GROUP_SCORES = {"largest": 0, "sum_of_two": 1}


def _code(name: str, value: str, codes: dict[str, int]) -> int:
    if value not in codes:
        raise ValueError(f"{name} is {value!r}; allowed: {', '.join(codes)}")
    return codes[value]


def _route_options(score, bias, groups, groups_taken, group_score, renormalise, scale):
    return _library.MoeRouteOptions(
        score=_code("score", score, _SCORES),
        group_score=_code("group_score", group_score, _GROUP_SCORES),
        bias=optional("bias", bias),
        groups=_arrays.integer("groups", groups, 1, 64),
        groups_taken=_arrays.integer("groups_taken", groups_taken, 1, 64),
        renormalise=bool(renormalise),
        has_scale=1,
        scale=scale,
    )


def _experts_options(first_expert, *tensors):
    named = {name: optional(name, value) for name, value in zip(_REST_NAMES[1:], tensors)}
    return _library.MoeExpertsOptions(first_expert=_arrays.int32("first_expert", first_expert), **named)


def moe_route(
    logits: Array,
    k: int,
    *,
    score: str = "softmax",
    bias: Array | None = None,
    groups: int = 1,
    groups_taken: int = 1,
    group_score: str = "largest",
    renormalise: bool = False,
    scale: float = 1.0,
) -> tuple[Array, Array]:
    """Chooses k experts for each token: weights, float32, and experts, int32, both [tokens, k]; best expert first, of equal ones the lower.

    logits: [tokens, experts] of f32, f16 or bf16, up to 512 experts; k: 1 to 16. score: softmax or sigmoid. bias: f32 [experts], added to
    the scores for the choice, not for the weights. Experts are chosen from `groups_taken` of `groups` groups of neighbours, those whose
    best expert (`largest`) or two best experts together (`sum_of_two`) are best. renormalise: a token's weights add up to 1. All weights
    are multiplied by `scale`. A logit that is NaN counts as -inf, which comes last.
    """
    if _dispatch.through_operator(logits, bias):
        return _dispatch.compiled_ops().moe_route(logits, k, score, bias, groups, groups_taken, group_score, renormalise, scale)
    of_logits = tensor("logits", logits)
    _arrays.require_dims(2, logits=logits)
    k = _arrays.integer("k", k, 1, 16)
    weights, experts = (_arrays.empty(logits, (logits.shape[0], k), dtype) for dtype in ("float32", "int32"))
    options = _route_options(score, bias, groups, groups_taken, group_score, renormalise, scale)
    of_weights, of_experts = tensor("weights", weights, True), tensor("experts", experts, True)
    _moe_route(of_logits, of_weights, of_experts, _library.byref(options), _arrays.stream(logits))
    return weights, experts


def moe_permutation(experts: Array, n_experts: int, *, first_expert: int = 0) -> tuple[Array, Array, Array]:
    """Sorts assignments by expert, stable: offsets [n_experts + 1], rows [tokens k] and places [tokens, k], all int32.

    experts: int32 [tokens, k]. Expert first_expert + e has the sorted rows from offsets[e] on; rows[r] is sorted row r's token, or -1 from
    offsets[n_experts] on; places[t, n] is the sorted row of token t's n-th choice, or -1 for an expert that is not one of n_experts.
    """
    if _dispatch.through_operator(experts):
        return _dispatch.compiled_ops().moe_permutation(experts, n_experts, first_expert)
    of_experts = tensor("experts", experts)
    _arrays.require_dims(2, experts=experts)
    n_experts = _arrays.integer("n_experts", n_experts, 1, 512)
    tables = tuple(_arrays.empty(experts, shape, "int32") for shape in _table_shapes(experts, n_experts))
    offsets, rows, places = (tensor(name, table, True) for name, table in zip(("offsets", "rows", "places"), tables))
    first_expert = _arrays.int32("first_expert", first_expert)
    _moe_permutation(of_experts, n_experts, first_expert, offsets, rows, places, _arrays.stream(experts))
    return tables


def _table_shapes(experts: Array, n_experts: int) -> tuple:
    tokens, k = experts.shape
    return (n_experts + 1,), (tokens * k,), (tokens, k)


def moe_dispatch(x: Array, places: Array, *, out: Array | None = None) -> Array:
    """result[places[t, n]] = x[t]: copies tokens to their sorted rows, [tokens k, h]. Rows that no place names are undefined, or `out`'s.

    x: [tokens, h] of f32, f16 or bf16; places: int32 [tokens, k], no row twice; those outside the result are skipped.
    """
    if _dispatch.through_operator(x, places):
        return _dispatch.into(out, _dispatch.compiled_ops().moe_dispatch(x, places))
    of_x, of_places = tensor("x", x), tensor("places", places)
    _arrays.require_dims(2, x=x, places=places)
    if out is None:
        out = _arrays.empty(x, (places.shape[0] * places.shape[1], x.shape[1]))
    _moe_dispatch(of_x, of_places, tensor("out", out, True), None, _arrays.stream(x))
    return out


def moe_dispatch_fp8(x: Array, places: Array, *, out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
    """moe_dispatch() of tokens as cast_fp8() casts them: (y, scales), float8_e4m3fn [tokens k, h] and f32 [tokens k, h / 128].

    h is a multiple of 128.
    """
    if _dispatch.through_operator(x, places):
        return _dispatch.into(out, _dispatch.compiled_ops().moe_dispatch_fp8(x, places))
    of_x, of_places = tensor("x", x), tensor("places", places)
    if out is None:
        out = _empty_dispatched(x, places)
    _moe_dispatch(of_x, of_places, tensor("out[0]", out[0], True), tensor("out[1]", out[1], True), _arrays.stream(x))
    return out


def _empty_dispatched(x: Array, places: Array) -> tuple[Array, Array]:
    _arrays.require_dims(2, x=x, places=places)
    rows = places.shape[0] * places.shape[1]
    return empty_fp8(x, (rows, x.shape[1]), (rows, x.shape[1] // 128))


def moe_combine(y: Array, places: Array, weights: Array, *, addend: Array | None = None, out: Array | None = None) -> Array:
    """[addend[t] +] the sum over n of weights[t, n] y[places[t, n]], [tokens, h], in f32 in this order, rounded once.

    y: [rows, h] of f32, f16 or bf16; places: int32 [tokens, k], those outside y are skipped; weights: f32 [tokens, k]; addend: [tokens, h]
    of y's dtype. `out` may be the addend.
    """
    if _dispatch.through_operator(y, places, weights, addend):
        return _dispatch.into(out, _dispatch.compiled_ops().moe_combine(y, places, weights, addend))
    of_y, of_places, of_weights = tensor("y", y), tensor("places", places), tensor("weights", weights)
    _arrays.require_dims(2, y=y, places=places)
    if out is None:
        out = _arrays.empty(y, (places.shape[0], y.shape[1]))
    _moe_combine(of_y, of_places, of_weights, optional("addend", addend), tensor("out", out, True), _arrays.stream(y))
    return out


def moe_experts(
    x: Array,
    weights: Array,
    experts: Array,
    w_gate_up: Array,
    w_down: Array,
    *,
    first_expert: int = 0,
    shared_gate_up: Array | None = None,
    shared_down: Array | None = None,
    addend: Array | None = None,
    gate_up_scale: Array | None = None,
    down_scale: Array | None = None,
    shared_gate_up_scale: Array | None = None,
    shared_down_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """The experts' part of a mixture-of-experts layer: the sum over n of weights[t, n] mlp(experts[t, n], x[t]), [tokens, h].

    mlp(e, x) = w_down[e] (silu(gate) * up), with gate and up the even and odd rows of w_gate_up[e] x. x: [tokens, h] of bf16 or f16 (f32 on
    the CPU); weights: f32, experts: int32, [tokens, k] as of moe_route(); w_gate_up: [e, 2 i, h]; w_down: [e, h, i]. The weights are those
    of experts first_expert on; others contribute nothing. shared_gate_up [2 s, h] and shared_down [h, s]: an expert of every token.
    addend: [tokens, h], added. `out` may be the addend.

    With weights of float8_e4m3fn x is bf16, and the weights' scales are f32, one for each block of 128 x 128, as cast_fp8_blocks() makes them.
    The first half of w_gate_up's and shared_gate_up's rows is then gate, the second up. h, i and s are multiples of 128.

    Weights of uint8 have two codes in a byte, the first in the low half, and scales of groups of a row: w_gate_up is [e, 2 i, h / 2], w_down
    [e, h, i / 2], and gate_up_scale [e, 2 i, h / g], down_scale [e, h, i / g], all contiguous. Scales of uint8 make them mxfp4, g = 32, as
    ops.quantize(w, "mxfp4") does for each expert; scales of float16 int4 without zero points, g = 32 or 128.
    """
    scales = (gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale)
    rest = (first_expert, shared_gate_up, shared_down, addend, *scales)
    if _dispatch.through_operator(x, weights, w_gate_up, w_down, *rest[1:]):
        return _dispatch.into(out, _dispatch.compiled_ops().moe_experts(x, weights, experts, w_gate_up, w_down, *rest))
    operands = [tensor("x", x), tensor("weights", weights), tensor("experts", experts)]
    operands += [tensor("w_gate_up", w_gate_up), tensor("w_down", w_down)]
    if out is None:
        out = _arrays.empty(x, x.shape)
    options = _experts_options(*rest)
    _moe_experts(*operands, tensor("out", out, True), _library.byref(options), _arrays.stream(x))
    return out


def fused_moe(
    x: Array,
    logits: Array,
    k: int,
    w_gate_up: Array,
    w_down: Array,
    *,
    score: str = "softmax",
    bias: Array | None = None,
    groups: int = 1,
    groups_taken: int = 1,
    group_score: str = "largest",
    renormalise: bool = False,
    scale: float = 1.0,
    first_expert: int = 0,
    shared_gate_up: Array | None = None,
    shared_down: Array | None = None,
    addend: Array | None = None,
    gate_up_scale: Array | None = None,
    down_scale: Array | None = None,
    shared_gate_up_scale: Array | None = None,
    shared_down_scale: Array | None = None,
    out: Array | None = None,
) -> Array:
    """A whole mixture-of-experts layer: moe_route(), then moe_experts(). logits: [tokens, all experts]."""
    scales = (gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale)
    rest = (first_expert, shared_gate_up, shared_down, addend, *scales)
    if _dispatch.through_operator(x, logits, w_gate_up, w_down, bias, *rest[1:]):
        route = (score, bias, groups, groups_taken, group_score, renormalise, scale)
        return _dispatch.into(out, _dispatch.compiled_ops().fused_moe(x, logits, k, w_gate_up, w_down, *route, *rest))
    operands = [tensor("x", x), tensor("logits", logits), _arrays.int32("k", k), tensor("w_gate_up", w_gate_up), tensor("w_down", w_down)]
    if out is None:
        out = _arrays.empty(x, x.shape)
    route = _route_options(score, bias, groups, groups_taken, group_score, renormalise, scale)
    options = _experts_options(*rest)
    _fused_moe(*operands, tensor("out", out, True), _library.byref(route), _library.byref(options), _arrays.stream(x))
    return out


# As operators of PyTorch. Results are contiguous, as those of the eager functions.

_ROUTE = "str score, Tensor? bias, SymInt groups, SymInt groups_taken, str group_score, bool renormalise, float scale"
_ROUTE_NAMES = ("score", "bias", "groups", "groups_taken", "group_score", "renormalise", "scale")
_REST_NAMES = ("first_expert", "shared_gate_up", "shared_down", "addend", "gate_up_scale", "down_scale")
_REST_NAMES += ("shared_gate_up_scale", "shared_down_scale")
_REST = ", ".join(["SymInt first_expert", *(f"Tensor? {name}" for name in _REST_NAMES[1:])])

define(
    f"moe_route(Tensor logits, SymInt k, {_ROUTE}) -> (Tensor, Tensor)",
    lambda logits, k, *route: moe_route(logits, k, **dict(zip(_ROUTE_NAMES, route))),
    lambda logits, k, *_: tuple(_arrays.empty(logits, (logits.shape[0], k), dtype) for dtype in ("float32", "int32")),
)
define(
    "moe_permutation(Tensor experts, SymInt n_experts, SymInt first_expert) -> (Tensor, Tensor, Tensor)",
    lambda experts, n_experts, first_expert: moe_permutation(experts, n_experts, first_expert=first_expert),
    lambda experts, n_experts, _: tuple(experts.new_empty(shape) for shape in _table_shapes(experts, n_experts)),
)
define(
    "moe_dispatch(Tensor x, Tensor places) -> Tensor",
    lambda x, places: moe_dispatch(x, places),
    lambda x, places: x.new_empty((places.shape[0] * places.shape[1], x.shape[1])),
)
define(
    "moe_dispatch_fp8(Tensor x, Tensor places) -> (Tensor, Tensor)",
    lambda x, places: moe_dispatch_fp8(x, places),
    _empty_dispatched,
)
define(
    "moe_combine(Tensor y, Tensor places, Tensor weights, Tensor? addend) -> Tensor",
    lambda y, places, weights, addend: moe_combine(y, places, weights, addend=addend),
    lambda y, places, *_: y.new_empty((places.shape[0], y.shape[1])),
)
define(
    f"moe_experts(Tensor x, Tensor weights, Tensor experts, Tensor w_gate_up, Tensor w_down, {_REST}) -> Tensor",
    lambda x, weights, experts, w_gate_up, w_down, *rest: moe_experts(
        x, weights, experts, w_gate_up, w_down, **dict(zip(_REST_NAMES, rest))
    ),
    empty_like,
)
define(
    f"fused_moe(Tensor x, Tensor logits, SymInt k, Tensor w_gate_up, Tensor w_down, {_ROUTE}, {_REST}) -> Tensor",
    lambda x, logits, k, w_gate_up, w_down, *rest: fused_moe(
        x, logits, k, w_gate_up, w_down, **dict(zip(_ROUTE_NAMES + _REST_NAMES, rest))
    ),
    empty_like,
)
