"""Layers of BitNet b1.58: ternary weights and inputs rounded to 8-bit integers. include/tilewave/bitnet.hpp has the formulas."""

from __future__ import annotations

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import define

_quantize_ternary = _library.bind("tw_quantize_ternary")
_unpack_ternary = _library.bind("tw_unpack_ternary", out="out")
_convert_bitnet = _library.bind("tw_convert_bitnet")
_quantize_activations = _library.bind("tw_quantize_activations")
_ternary_gemm = _library.bind("tw_ternary_gemm", out="y")
_bit_linear = _library.bind("tw_bit_linear", out="y")


def _ternary_parts(like: Array, n: int, k: int) -> tuple[Array, Array]:
    if k % 4 != 0:
        raise ValueError(f"the weight has {k} columns; they must be a multiple of 4")
    return _arrays.empty(like, (n, k // 4), "uint8"), _arrays.empty(like, (n,), "float32")


def quantize_ternary(weight: Array) -> tuple[Array, Array]:
    """weight [n, k] (f32, f16, bf16) rounded to -1, 0 and 1 times its mean magnitude, for bit_linear(): (values, scales).

    values: uint8 [n, k / 4], four codes in a byte; scales: f32 [n], all equal. k must be a multiple of 4.
    """
    _arrays.require_dims(2, weight=weight)
    if _dispatch.through_operator(weight):
        return _dispatch.compiled_ops().quantize_ternary(weight)
    of_weight = tensor("weight", weight)
    values, scales = _ternary_parts(weight, *weight.shape)
    _quantize_ternary(of_weight, tensor("values", values, True), tensor("scales", scales, True), _arrays.stream(weight))
    return values, scales


def convert_bitnet(packed: Array, scale: float) -> tuple[Array, Array]:
    """A weight as checkpoints of transformers' BitNet have it, for bit_linear(): (values, scales), on the CPU.

    packed: uint8 [n / 4, k], in which bits 2 i and 2 i + 1 of [r, c] hold the number of row i n / 4 + r, plus 1. scale: what the numbers are
    multiplied with; layers of the class BitLinear store its inverse.
    """
    _arrays.require_dims(2, packed=packed)
    of_packed = tensor("packed", packed)
    values, scales = _ternary_parts(packed, 4 * packed.shape[0], packed.shape[1])
    _convert_bitnet(of_packed, float(scale), tensor("values", values, True), tensor("scales", scales, True), _arrays.stream(packed))
    return values, scales


def unpack_ternary(values: Array, scales: Array, *, out: Array | None = None) -> Array:
    """The numbers of a ternary weight, without their scales: int8 [n, k]."""
    _arrays.require_dims(2, values=values)
    if _dispatch.through_operator(values, scales):
        return _dispatch.into(out, _dispatch.compiled_ops().unpack_ternary(values, scales))
    of_values, of_scales = tensor("values", values), tensor("scales", scales)
    if out is None:
        out = _arrays.empty(values, (values.shape[0], 4 * values.shape[1]), "int8")
    _unpack_ternary(of_values, of_scales, tensor("out", out, written=True), _arrays.stream(values))
    return out


def quantize_activations(x: Array) -> tuple[Array, Array]:
    """x [m, k] (f32, f16, bf16) rounded to 8-bit integers with a scale for each row: (int8 [m, k], f32 [m]).

    The largest magnitude of a row becomes 127. Ties are rounded to even. A row that is not finite gets zeros and the scale NaN.
    """
    _arrays.require_dims(2, x=x)
    if _dispatch.through_operator(x):
        return _dispatch.compiled_ops().quantize_activations(x)
    of_x = tensor("x", x)
    values, scales = _arrays.empty(x, x.shape, "int8"), _arrays.empty(x, (x.shape[0],), "float32")
    _quantize_activations(of_x, tensor("values", values, True), tensor("scales", scales, True), _arrays.stream(x))
    return values, scales


def ternary_gemm(
    x: Array,
    x_scales: Array,
    values: Array,
    scales: Array,
    *,
    bias: Array | None = None,
    dtype: str = "float32",
    accumulate: bool = False,
    out: Array | None = None,
) -> Array:
    """x [m, k] of int8 times a ternary weight [n, k], times both scales, plus bias: [m, n] of `dtype`, float32, float16 or bfloat16.

    x and x_scales are what quantize_activations() gives, values and scales what quantize_ternary() does. Sums are exact. accumulate: out +=
    this; needs `out`, and does not work under torch.compile().
    """
    if _dispatch.through_operator(x, x_scales, values, scales, bias):
        if accumulate:
            raise NotImplementedError("accumulate is True; under torch.compile() it is not supported")
        return _dispatch.into(out, _dispatch.compiled_ops().ternary_gemm(x, x_scales, values, scales, bias, dtype))
    given = tensor("x", x), tensor("x_scales", x_scales), tensor("values", values), tensor("scales", scales)
    if out is None:
        if accumulate:
            raise ValueError("accumulate is True, but no out is given")
        out = _arrays.empty(x, _product_shape(x, values), _arrays.known_dtype("dtype", dtype))
    options = _library.BitLinearOptions(bias=optional("bias", bias), accumulate=bool(accumulate))
    _ternary_gemm(*given, tensor("out", out, written=True), _library.byref(options), _arrays.stream(x))
    return out


def bit_linear(
    x: Array, values: Array, scales: Array, *, bias: Array | None = None, accumulate: bool = False, out: Array | None = None
) -> Array:
    """A BitNet layer: x [m, k] (f32, f16, bf16) rounded to 8-bit integers, times a ternary weight [n, k], plus bias: [m, n] of x's dtype.

    The same as quantize_activations() and ternary_gemm(), in one call. accumulate: out += this; needs `out`, and does not work under
    torch.compile().
    """
    if _dispatch.through_operator(x, values, scales, bias):
        if accumulate:
            raise NotImplementedError("accumulate is True; under torch.compile() it is not supported")
        return _dispatch.into(out, _dispatch.compiled_ops().bit_linear(x, values, scales, bias))
    given = tensor("x", x), tensor("values", values), tensor("scales", scales)
    if out is None:
        if accumulate:
            raise ValueError("accumulate is True, but no out is given")
        out = _arrays.empty(x, _product_shape(x, values))
    options = _library.BitLinearOptions(bias=optional("bias", bias), accumulate=bool(accumulate))
    _bit_linear(*given, tensor("out", out, written=True), _library.byref(options), _arrays.stream(x))
    return out


def _product_shape(x: Array, values: Array) -> tuple:
    _arrays.require_dims(2, x=x, values=values)
    return (x.shape[0], values.shape[0])


# Operators of PyTorch.

define(
    "quantize_ternary(Tensor weight) -> (Tensor, Tensor)",
    quantize_ternary,
    lambda weight: _ternary_parts(weight, *weight.shape),
)
define(
    "unpack_ternary(Tensor values, Tensor scales) -> Tensor",
    unpack_ternary,
    lambda values, scales: _arrays.empty(values, (values.shape[0], 4 * values.shape[1]), "int8"),
)
define(
    "quantize_activations(Tensor x) -> (Tensor, Tensor)",
    quantize_activations,
    lambda x: (_arrays.empty(x, x.shape, "int8"), _arrays.empty(x, (x.shape[0],), "float32")),
)
define(
    "ternary_gemm(Tensor x, Tensor x_scales, Tensor values, Tensor scales, Tensor? bias, str dtype) -> Tensor",
    lambda x, x_scales, values, scales, bias, dtype: ternary_gemm(x, x_scales, values, scales, bias=bias, dtype=dtype),
    lambda x, x_scales, values, scales, bias, dtype: _arrays.empty(x, _product_shape(x, values), dtype),
)
define(
    "bit_linear(Tensor x, Tensor values, Tensor scales, Tensor? bias) -> Tensor",
    lambda x, values, scales, bias: bit_linear(x, values, scales, bias=bias),
    lambda x, values, *rest: x.new_empty(_product_shape(x, values)),
)
