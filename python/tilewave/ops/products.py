"""Matrix products, convolutions, and the casts to fp8 for products."""

from __future__ import annotations

import functools

from .. import _arrays, _dispatch, _library
from .._arrays import Array, optional, tensor
from .._operators import Gradient, define

_gemm = _library.bind("tw_gemm", out="d")
_grouped_gemm = _library.bind("tw_grouped_gemm", out="d")
_k_grouped_gemm = _library.bind("tw_k_grouped_gemm", out="d")
_quantize_to = _library.bind("tw_quantize_to")
_dequantize = _library.bind("tw_dequantize")
_dequant_gemm = _library.bind("tw_dequant_gemm", out="y")
_convert_weight = _library.bind("tw_convert_weight")
_conv1d = _library.bind("tw_conv1d", out="y")
_conv2d = _library.bind("tw_conv2d", out="y")
_cast_fp8 = _library.bind("tw_cast_fp8", out="y")
_cast_fp8_swiglu = _library.bind("tw_cast_fp8_swiglu", out="y")
_cast_fp8_blocks = _library.bind("tw_cast_fp8_blocks", out="y")
_cast_fp8_grouped = _library.bind("tw_cast_fp8_grouped", out="y")
_cast_fp8_heads = _library.bind("tw_cast_fp8_heads", out="y")
_head_scales = _library.bind("tw_head_scales", out="scales")

_ACTIVATIONS = {"none": 0, "relu": 1, "gelu_erf": 2, "gelu_tanh": 3, "silu": 4, "swiglu": 5}


def _activation(name: str) -> int:
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation is {name!r}; allowed: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def gemm(
    a: Array,
    b: Array,
    *,
    bias: Array | None = None,
    activation: str = "none",
    residual: Array | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    num_splits: int = 0,
    dtype: str | None = None,
    out: Array | None = None,
) -> Array:
    """activation(alpha a b + beta out + bias) + residual, accumulated in f32 (int8: in int32) and rounded once.

    a: [m, k] or [batch, m, k]; b: [k, n] or [batch, k, n], any strides: with a weight stored [n, k] pass `weight.T`. bias: [n]; residual:
    the result's shape. activation: none, relu, gelu_erf, gelu_tanh, silu, or swiglu (silu(even column) * next column; n / 2 columns
    result). f32, f16 and bf16 give their own dtype, int8 int32, and fp8 (a and b each float8_e4m3fn or float8_e5m2) what `dtype` says:
    "bfloat16" (the default), "float32", "float8_e4m3fn" or "float8_e5m2". a_scale, b_scale: f32 factors of fp8, both or none: [m, 1] and
    [1, n], one for each row of a and column of b, either of them or both [1]; or block scales [m, ceil(k / 128)] and [ceil(k / 128),
    ceil(n / 128)] of float8_e4m3fn. beta needs `out`, and does not work under torch.compile(). num_splits: number of k splits on a GPU;
    0: the library's choice.
    """
    code = _activation(activation)
    if _dispatch.through_operator(a, b, bias, residual, a_scale, b_scale):
        if beta != 0:
            raise NotImplementedError(f"beta is {beta}; under torch.compile() only 0 is supported")
        given = (a, b, bias, activation, residual, alpha, a_scale, b_scale, num_splits, dtype)
        return _dispatch.into(out, _dispatch.compiled_ops().gemm(*given))
    of_a, of_b = tensor("a", a), tensor("b", b)
    if out is None:
        if beta != 0:
            raise ValueError(f"beta is {beta}, but no out is given")
        out = _arrays.empty(a, gemm_shape(a, b, activation), dtype or gemm_dtype(a))
    options = _gemm_numbers(float(alpha), float(beta), code, num_splits)
    if not (bias is residual is a_scale is b_scale is None):
        options = _library.GemmOptions.from_buffer_copy(options)
        options.bias = optional("bias", bias)
        options.residual = optional("residual", residual)
        options.a_scale = optional("a_scale", a_scale)
        options.b_scale = optional("b_scale", b_scale)
    _gemm(of_a, of_b, tensor("out", out, written=True), _library.byref(options), _arrays.stream(a))
    return out


@functools.lru_cache(maxsize=256)
def _gemm_numbers(alpha, beta, activation, num_splits):
    """Options without tensors, cached. Callers must not change them."""
    return _library.GemmOptions(
        has_alpha=1, alpha=alpha, beta=beta, activation=activation, num_splits=_arrays.int32("num_splits", num_splits)
    )


def gemm_shape(a: Array, b: Array, activation: str) -> tuple:
    """The shape of gemm()'s result."""
    of_a, of_b = a.shape, b.shape  # PyTorch makes one each time
    for name, shape in (("a", of_a), ("b", of_b)):
        if len(shape) not in (2, 3):
            raise ValueError(f"{name} has shape {tuple(shape)}; it must have 2 or 3 dimensions")
    batch = of_a[:-2] if len(of_a) == 3 else of_b[:-2]
    return (*batch, of_a[-2], of_b[-1] // 2 if activation == "swiglu" else of_b[-1])


_GEMM_DTYPES = {"float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16", "int8": "int32"}


def gemm_dtype(a: Array) -> str | None:
    """The dtype of gemm()'s result if it is not a's and the caller does not choose."""
    return _GEMM_DTYPES.get(_arrays.dtype_name(a))


def grouped_gemm(
    a: Array,
    b: Array,
    offsets: Array,
    *,
    bias: Array | None = None,
    activation: str = "none",
    a_scale: Array | None = None,
    b_scale: Array | None = None,
    zeros: bool = False,
    out: Array | None = None,
) -> Array:
    """activation(a[r] b[g] + bias[g]) for the rows r of each group g, offsets[g] <= r < offsets[g + 1]: the experts of a mixture.

    a: [m, k]; b: [groups, k, n], any strides: with weights stored [groups, n, k] pass `weight.transpose(1, 2)`; offsets: int32
    [groups + 1], on the GPU for tensors there, where the host never reads them; bias: [groups, n]. f16 or bf16, on the CPU also f32;
    fp8 (float8_e4m3fn) gives bf16, needs f32 a_scale [m, ceil(k / 128)] and b_scale [groups, ceil(k / 128), ceil(n / 128)], and takes
    neither bias nor activation. activation: as in gemm(). Rows of the result that are in no group are not written: without `out` they are undefined, or 0 with `zeros`.
    Gradients of a and b are computed where there is neither bias nor activation.
    """
    code = _activation(activation)
    if _dispatch.through_operator(a, b, offsets, bias, a_scale, b_scale):
        return _dispatch.into(out, _dispatch.compiled_ops().grouped_gemm(a, b, offsets, bias, activation, a_scale, b_scale, zeros))
    of_a, of_b, of_offsets = tensor("a", a), tensor("b", b), tensor("offsets", offsets)
    if out is None:
        shape = grouped_gemm_shape(a, b, activation)
        out = _arrays.full(a, shape, 0, gemm_dtype(a)) if zeros else _arrays.empty(a, shape, gemm_dtype(a))
    options = _library.GroupedGemmOptions(
        bias=optional("bias", bias), activation=code, a_scale=optional("a_scale", a_scale), b_scale=optional("b_scale", b_scale)
    )
    _grouped_gemm(of_a, of_b, of_offsets, tensor("out", out, written=True), _library.byref(options), _arrays.stream(a))
    return out


def grouped_gemm_shape(a: Array, b: Array, activation: str) -> tuple:
    """The shape of grouped_gemm()'s result."""
    _arrays.require_dims(2, a=a)
    _arrays.require_dims(3, b=b)
    return (a.shape[0], b.shape[2] // 2 if activation == "swiglu" else b.shape[2])


def k_grouped_gemm(
    a: Array, b: Array, offsets: Array, *, accumulate: bool = False, dtype: str | None = None, out: Array | None = None
) -> Array:
    """a[:, k] b[k, :] summed over the k of each group, offsets[g] <= k < offsets[g + 1]: [groups, m, n], the gradient of grouped weights.

    a: [m, k]; b: [k, n]; fast on a GPU if both are stored with k outermost, as `x.T` and a gradient are. offsets: as in grouped_gemm().
    dtype: the result's, that of a (the default) or "float32". accumulate: out += ...; needs `out`, and does not work under torch.compile().
    """
    if _dispatch.through_operator(a, b, offsets):
        if accumulate:
            raise NotImplementedError("accumulate is True; under torch.compile() it is not supported")
        return _dispatch.into(out, _dispatch.compiled_ops().k_grouped_gemm(a, b, offsets, dtype))
    of_a, of_b, of_offsets = tensor("a", a), tensor("b", b), tensor("offsets", offsets)
    if out is None:
        if accumulate:
            raise ValueError("accumulate is True, but no out is given")
        out = _arrays.empty(a, k_grouped_gemm_shape(a, b, offsets), dtype)
    _k_grouped_gemm(of_a, of_b, of_offsets, tensor("out", out, written=True), bool(accumulate), _arrays.stream(a))
    return out


def k_grouped_gemm_shape(a: Array, b: Array, offsets: Array) -> tuple:
    """The shape of k_grouped_gemm()'s result."""
    _arrays.require_dims(2, a=a, b=b)
    _arrays.require_dims(1, offsets=offsets)
    return (offsets.shape[0] - 1, a.shape[0], b.shape[1])


def _extent(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return max((size + 2 * padding - dilation * (kernel - 1) - 1) // max(stride, 1) + 1, 0)


def conv1d_shape(x: Array, w: Array, stride: int, padding: int, dilation: int) -> tuple:
    """conv1d()'s result's."""
    _arrays.require_dims(3, x=x, w=w)
    return (x.shape[0], _extent(x.shape[1], w.shape[1], stride, padding, dilation), w.shape[0])


def conv2d_shape(x: Array, w: Array, stride: tuple, padding: tuple, dilation: tuple) -> tuple:
    """conv2d()'s result's."""
    _arrays.require_dims(4, x=x, w=w)
    extents = (_extent(x.shape[n + 1], w.shape[n + 1], stride[n], padding[n], dilation[n]) for n in (0, 1))
    return (x.shape[0], *extents, w.shape[0])


# The number in C, dtypes of values and scales, codes in a byte, and the groups allowed (none: a scale for each row).
_WEIGHT_FORMATS = {
    "int8": (1, "int8", "float32", 1, ()),
    "fp8": (2, "float8_e4m3fn", "float32", 1, ()),
    "int4": (3, "uint8", "float16", 2, (32, 128)),
    "int2": (4, "uint8", "float16", 4, (32, 128)),
    "nf4": (5, "uint8", "float32", 2, (64,)),
    "fp4": (6, "uint8", "float16", 2, (32,)),
    "mxfp4": (7, "uint8", "uint8", 2, (32,)),
}


def _weight_format(format: str) -> tuple:
    if format not in _WEIGHT_FORMATS:
        raise ValueError(f"format is {format!r}; allowed: {', '.join(_WEIGHT_FORMATS)}")
    return _WEIGHT_FORMATS[format]


def weight_group(format: str, group: int | None = None) -> int:
    """The number of neighbours that share a scale in quantize(): `group`, or the format's own; 1 for a scale of each row."""
    allowed = _weight_format(format)[4]
    if not allowed:
        return 1
    return allowed[0] if group is None else group


def quantize(
    weight: Array, format: str = "int8", *, group: int | None = None, zero_points: bool = False
) -> tuple[Array, Array, Array | None]:
    """weight [n, k] (f32, f16, bf16, on the CPU) rounded to fewer bits for dequant_gemm(): (values, scales, zeros).

    format: int8 or fp8 (float8_e4m3fn), with an f32 scale for each row: values [n, k], scales [n]; or one with a scale for each `group`
    neighbours of a row, of which k is a multiple: values uint8 [n, k / 2], two codes in a byte, scales [n, k / group]. These are int4 and
    int2 (four codes in a byte) with f16 scales and groups of 32 (the default) or 128, nf4 (f32, 64), fp4 (f16, 32), and mxfp4 (32) with
    uint8 scales, powers of two. zero_points, of int4 and int2: zeros uint8, of the shape of scales, so that a group of one sign uses every
    code; otherwise zeros is None. A weight in a GPU's memory is rounded on the CPU: quantize(weight.cpu()), and its parts are copied.
    """
    number, dtype, scale_dtype, codes, allowed = _weight_format(format)
    if zero_points and format not in ("int4", "int2"):
        raise ValueError(f"zero_points are given, but format is {format!r}; only int4 and int2 have them")
    of_weight = tensor("weight", weight)
    _arrays.require_dims(2, weight=weight)
    n, k = weight.shape
    zeros = None
    if allowed:
        group = weight_group(format, group)
        if group not in allowed or k % group != 0:
            raise ValueError(
                f"group is {group}, with {k} columns; {' and '.join(map(str, allowed))} are allowed, of which the columns are a multiple"
            )
        values, scales = _arrays.empty(weight, (n, k // codes), dtype), _arrays.empty(weight, (n, k // group), scale_dtype)
        if zero_points:
            zeros = _arrays.empty(weight, scales.shape, "uint8")
    else:
        values, scales = _arrays.empty(weight, (n, k), dtype), _arrays.empty(weight, (n,), scale_dtype)
    parts = tensor("values", values, True), tensor("scales", scales, True), optional("zeros", zeros, True)
    _quantize_to(of_weight, number, *parts, _arrays.stream(weight))
    return values, scales, zeros


_WEIGHT_LAYOUTS = {"awq": 0, "gptq": 1, "gptq_v2": 2, "compressed-tensors": 3}


def convert_weight(
    layout: str, qweight: Array, qzeros: Array | None, scales: Array, g_idx: Array | None = None
) -> tuple[Array, Array, Array]:
    """A 4-bit weight as a published checkpoint stores it, for dequant_gemm(): (values, scales, zeros), on the CPU.

    layout: awq (AutoAWQ), gptq (AutoGPTQ, whose zero points are stored minus 1), gptq_v2 or compressed-tensors ("pack-quantized"; qweight is
    weight_packed, qzeros weight_zero_point or None). qweight and qzeros are int32, scales f16, bf16 or f32. g_idx, of GPTQ: groups must be
    in order. include/tilewave/quantized_layouts.hpp has the formulas.
    """
    if layout not in _WEIGHT_LAYOUTS:
        raise ValueError(f"layout is {layout!r}; allowed: {', '.join(_WEIGHT_LAYOUTS)}")
    _arrays.require_dims(2, qweight=qweight, scales=scales)
    rows, columns = qweight.shape
    n, k = {"awq": (columns * 8, rows), "compressed-tensors": (rows, columns * 8)}.get(layout, (columns, rows * 8))
    groups = scales.shape[1 if layout == "compressed-tensors" else 0]
    if groups == 0 or k % (32 * groups) != 0 or k == 0:
        raise ValueError(f"scales are for {groups} groups of {k} inputs; a group must have a multiple of 32")
    group = 128 if k // groups % 128 == 0 else 32
    values, to_scales = _arrays.empty(qweight, (n, k // 2), "uint8"), _arrays.empty(qweight, (n, k // group), "float16")
    zeros = _arrays.empty(qweight, to_scales.shape, "uint8")
    given = tensor("qweight", qweight), optional("qzeros", qzeros), tensor("scales", scales), optional("g_idx", g_idx)
    made = tensor("values", values, True), tensor("scales", to_scales, True), tensor("zeros", zeros, True)
    _convert_weight(*given, _WEIGHT_LAYOUTS[layout], *made, _arrays.stream(qweight))
    return values, to_scales, zeros


def dequantize(
    values: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    format: str | None = None,
    dtype: str = "float32",
    out: Array | None = None,
) -> Array:
    """The weight [n, k] that quantize() or convert_weight() gave, rounded to `dtype`: float32, float16 or bfloat16 (PyTorch).

    format: the weight's, needed for int2, nf4, fp4 and mxfp4. If `out` is given, its dtype counts.
    """
    number = 0 if format is None else _weight_format(format)[0]
    dtype = _arrays.known_dtype("dtype", dtype) if out is None else _arrays.dtype_name(out)
    if _dispatch.through_operator(values, scales, zeros):
        return _dispatch.into(out, _dispatch.compiled_ops().dequantize(values, scales, zeros, format, dtype))
    if out is None:
        out = _arrays.empty(values, dequantize_shape(values, format), dtype)
    parts = tensor("values", values), tensor("scales", scales), optional("zeros", zeros)
    _dequantize(*parts, number, tensor("out", out, written=True), _arrays.stream(values))
    return out


def dequantize_shape(values: Array, format: str | None) -> tuple:
    """The shape of dequantize()'s result."""
    _arrays.require_dims(2, values=values)
    if format is None:
        format = "int4" if "uint8" in str(values.dtype) else "int8"
    return (values.shape[0], values.shape[1] * _weight_format(format)[3])


def dequant_gemm(
    x: Array,
    values: Array,
    scales: Array,
    zeros: Array | None = None,
    *,
    format: str | None = None,
    bias: Array | None = None,
    activation: str = "none",
    accumulate: bool = False,
    x_scales: Array | None = None,
    dtype: str | None = None,
    out: Array | None = None,
) -> Array:
    """activation(x w.T + bias), with a weight w [n, k] in fewer bits, as quantize() gives it: values, scales and zeros.

    x: [m, k], f32, f16 or bf16, columns adjacent; gives [m, n] of its dtype. f16 and bf16 on a GPU read the weight as it is stored: once
    up to 16 rows, and on Hopper for every tile of rows otherwise. On a CPU with AVX2 up to 16 rows of x are rounded to 8-bit integers for
    int8 and int4, with AVX512-VNNI more rows for int8, too. format: the weight's, needed for int2, nf4, fp4 and mxfp4. bias: [n].
    activation: as in gemm(); swiglu takes the weight's even rows as gate and its odd rows as up, and gives [m, n / 2]. accumulate:
    out += x w.T + bias; needs `out`, no activation, and does not work under torch.compile(). x_scales: [m] of f32, for x of int8, both as
    quantize_activations() gives them, and a weight in int4 (W4A8); the result and bias are of dtype (float32, float16 or bfloat16; needed
    then). Hopper GPUs multiply more than 16 such rows as integers if groups are of 128. PyTorch differentiates it with respect to x and
    bias if there is no activation; the weight is constant.
    """
    code = _activation(activation)
    number = 0 if format is None else _weight_format(format)[0]
    if (x_scales is None) != (dtype is None):
        raise ValueError(f"dtype is {dtype!r}; it is the result's dtype if x_scales are given, and only then")
    if _dispatch.through_operator(x, values, scales, zeros, bias, x_scales):
        if accumulate:
            raise NotImplementedError("accumulate is True; under torch.compile() it is not supported")
        given = x, values, scales, zeros, bias, activation, format, x_scales, dtype
        return _dispatch.into(out, _dispatch.compiled_ops().dequant_gemm(*given))
    of_x, of_values, of_scales = tensor("x", x), tensor("values", values), tensor("scales", scales)
    if out is None:
        if accumulate:
            raise ValueError("accumulate is True, but no out is given")
        out = _arrays.empty(x, dequant_gemm_shape(x, values, activation), dtype)
    options = _library.DequantGemmOptions(
        bias=optional("bias", bias),
        activation=code,
        accumulate=bool(accumulate),
        format=number,
        x_scales=optional("x_scales", x_scales),
    )
    of_out = tensor("out", out, written=True)
    _dequant_gemm(of_x, of_values, of_scales, optional("zeros", zeros), of_out, _library.byref(options), _arrays.stream(x))
    return out


def dequant_gemm_shape(x: Array, values: Array, activation: str) -> tuple:
    """The shape of dequant_gemm()'s result."""
    _arrays.require_dims(2, x=x, values=values)
    return (x.shape[0], values.shape[0] // 2 if activation == "swiglu" else values.shape[0])


def _pair(name: str, given) -> tuple[int, int]:
    if isinstance(given, (tuple, list)):
        if len(given) != 2:
            raise ValueError(f"{name} is {given}; allowed: a number or two")
        return tuple(given)
    return (given, given)


_MOST = (1 << 31) - 1  # what no extent exceeds


def _steps(stride: int, padding: int, dilation: int) -> tuple[int, int, int]:
    """Of one dimension, checked: in the C interface a stride or a dilation of 0 is the default."""
    return (
        _arrays.integer("stride", stride, 1, _MOST),
        _arrays.integer("padding", padding, 0, _MOST),
        _arrays.integer("dilation", dilation, 1, _MOST),
    )


def conv1d(
    x: Array,
    w: Array,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    bias: Array | None = None,
    activation: str = "none",
    out: Array | None = None,
) -> Array:
    """conv2d() in one dimension: x [n, length, channels], w [filters, taps, channels], gives [n, length', filters]."""
    code = _activation(activation)
    if _dispatch.through_operator(x, w, bias):
        return _dispatch.into(out, _dispatch.compiled_ops().conv1d(x, w, stride, padding, dilation, bias, activation))
    of_x, of_w = tensor("x", x), tensor("w", w)
    stride, padding, dilation = _steps(stride, padding, dilation)
    if out is None:
        out = _arrays.empty(x, conv1d_shape(x, w, stride, padding, dilation))
    options = _library.ConvOptions(
        stride=(stride, 1), padding=(padding, 0), dilation=(dilation, 1), bias=optional("bias", bias), activation=code
    )
    _conv1d(of_x, of_w, tensor("out", out, written=True), _library.byref(options), _arrays.stream(x))
    return out


def conv2d(
    x: Array,
    w: Array,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    bias: Array | None = None,
    activation: str = "none",
    out: Array | None = None,
) -> Array:
    """Cross-correlation, as torch.conv2d without groups, channels last: y = activation(bias + sum x w), accumulated in f32, rounded once.

    x: [n, height, width, channels]; w: [filters, kernel height, kernel width, channels]; gives [n, height', width', filters], with
    height' = (height + 2 padding - dilation (kernel height - 1) - 1) // stride + 1. One dtype (f32, f16, bf16), any strides: PyTorch's NCHW
    is x.permute(0, 2, 3, 1). bias: [filters]. activation: as in gemm(), except swiglu.
    """
    code = _activation(activation)
    stride, padding, dilation = _pair("stride", stride), _pair("padding", padding), _pair("dilation", dilation)
    if _dispatch.through_operator(x, w, bias):
        return _dispatch.into(out, _dispatch.compiled_ops().conv2d(x, w, stride, padding, dilation, bias, activation))
    of_x, of_w = tensor("x", x), tensor("w", w)
    stride, padding, dilation = zip(*(_steps(*along) for along in zip(stride, padding, dilation)))
    if out is None:
        out = _arrays.empty(x, conv2d_shape(x, w, stride, padding, dilation))
    options = _library.ConvOptions(stride=stride, padding=padding, dilation=dilation, bias=optional("bias", bias), activation=code)
    _conv2d(of_x, of_w, tensor("out", out, written=True), _library.byref(options), _arrays.stream(x))
    return out


def cast_fp8(x: Array, *, powers_of_two: bool = False, out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
    """(y, scales): x ~ y * scales, with one scale for every 128 neighbours in a row.

    x: [.., n] of f32, f16 or bf16; y: float8_e4m3fn, x's shape; scales: f32 [.., ceil(n / 128)] = max(largest |x|, 1e-4) / 448, with
    `powers_of_two` rounded up to a power of two. A group with a NaN or an infinity is NaN.
    """
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().cast_fp8(x, powers_of_two))
    of_x = tensor("x", x)
    if out is None:
        out = empty_fp8(x, x.shape, cast_fp8_scales(x))
    _cast_fp8(of_x, tensor("out[0]", out[0], True), tensor("out[1]", out[1], True), bool(powers_of_two), _arrays.stream(x))
    return out


def cast_fp8_swiglu(
    gate: Array, up: Array, *, powers_of_two: bool = False, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """cast_fp8() of silu(gate) * up, which is not rounded before. gate, up: one shape and dtype."""
    if _dispatch.through_operator(gate, up):
        return _dispatch.into(out, _dispatch.compiled_ops().cast_fp8_swiglu(gate, up, powers_of_two))
    of_gate, of_up = tensor("gate", gate), tensor("up", up)
    if out is None:
        out = empty_fp8(gate, gate.shape, cast_fp8_scales(gate))
    _cast_fp8_swiglu(of_gate, of_up, tensor("out[0]", out[0], True), tensor("out[1]", out[1], True), bool(powers_of_two), _arrays.stream(gate))
    return out


def cast_fp8_blocks(x: Array, *, powers_of_two: bool = False, out: tuple[Array, Array] | None = None) -> tuple[Array, Array]:
    """cast_fp8() with a scale for each 128 x 128 block: x [n, k], scales [ceil(n / 128), ceil(k / 128)]."""
    if _dispatch.through_operator(x):
        return _dispatch.into(out, _dispatch.compiled_ops().cast_fp8_blocks(x, powers_of_two))
    of_x = tensor("x", x)
    if out is None:
        out = empty_fp8(x, x.shape, cast_fp8_blocks_scales(x))
    _cast_fp8_blocks(of_x, tensor("out[0]", out[0], True), tensor("out[1]", out[1], True), bool(powers_of_two), _arrays.stream(x))
    return out


def cast_fp8_grouped(
    x: Array, sizes: Array, rows: int, *, powers_of_two: bool = False, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """cast_fp8() of row groups, padded to `rows`: x [all rows, n], sizes int32 [groups]; y [groups, rows, n], scales [groups, rows, ..].

    Group g's rows are the next sizes[g] of x; the rows of y after them are 0.
    """
    if _dispatch.through_operator(x, sizes):
        return _dispatch.into(out, _dispatch.compiled_ops().cast_fp8_grouped(x, sizes, rows, powers_of_two))
    of_x, of_sizes = tensor("x", x), tensor("sizes", sizes)
    if out is None:
        _arrays.require_dims(2, x=x)
        shape = (*sizes.shape, rows)
        out = empty_fp8(x, (*shape, x.shape[1]), (*shape, scale_groups(x.shape[1])))
    _cast_fp8_grouped(
        of_x, of_sizes, tensor("out[0]", out[0], True), tensor("out[1]", out[1], True), bool(powers_of_two), _arrays.stream(x)
    )
    return out


def head_scales(
    x: Array, *, kv_heads: int | None = None, rotate: bool = False, signs: Array | None = None, out: Array | None = None
) -> Array:
    """The scales of cast_fp8_heads(x): f32 [batch, kv_heads], max(largest |x|, 1e-4) / 448 of a sequence in all heads that share one.

    kv_heads: by default as many as x has heads. `rotate`, `signs`: as in cast_fp8_heads().
    """
    if _dispatch.through_operator(x, signs):
        return _dispatch.into(out, _dispatch.compiled_ops().head_scales(x, kv_heads, rotate, signs))
    of_x = tensor("x", x)
    if out is None:
        out = _arrays.empty(x, head_scales_shape(x, kv_heads), "float32")
    _head_scales(of_x, tensor("out", out, True), bool(rotate), optional("signs", signs), _arrays.stream(x))
    return out


def cast_fp8_heads(
    x: Array,
    scales: Array | None = None,
    *,
    kv_heads: int | None = None,
    rotate: bool = False,
    signs: Array | None = None,
    out: Array | None = None,
) -> tuple[Array, Array]:
    """(y, scales): q, k or v for attention() in float8_e4m3fn, y ~ x / scales. The scales are attention()'s descale.

    x: [batch, seqlen, heads, head_dim] of f32, f16 or bf16, head_dim up to 2048. scales: f32 [batch, kv_heads], positive; default:
    head_scales(). rotate: x first becomes (x * signs) H / sqrt(head_dim), see hadamard(), where head_dim is a power of two. Rotating q and k
    by the same signs, f32 [head_dim], leaves their products unchanged and makes outliers cost less precision. out: y's memory.
    """
    if scales is None:
        scales = head_scales(x, kv_heads=kv_heads, rotate=rotate, signs=signs)
    elif kv_heads is not None:
        raise ValueError(f"kv_heads is {kv_heads}, and scales are given; only one of them is allowed")
    if _dispatch.through_operator(x, scales, signs):
        return _dispatch.into(out, _dispatch.compiled_ops().cast_fp8_heads(x, scales, rotate, signs)), scales
    of_x = tensor("x", x)
    if out is None:
        out = _arrays.empty(x, x.shape, "float8_e4m3fn")
    _cast_fp8_heads(of_x, tensor("out", out, True), tensor("scales", scales), bool(rotate), optional("signs", signs), _arrays.stream(x))
    return out, scales


def head_scales_shape(x: Array, kv_heads: int | None) -> tuple:
    """The shape of head_scales()."""
    _arrays.require_dims(4, x=x)
    return (x.shape[0], x.shape[2] if kv_heads is None else kv_heads)


def scale_groups(n: int) -> int:
    """How many scales n neighbours have."""
    return -(-n // 128)


def cast_fp8_scales(x: Array) -> tuple:
    """The shape of cast_fp8()'s scales."""
    return (*x.shape[:-1], *(scale_groups(n) for n in x.shape[-1:]))


def cast_fp8_blocks_scales(x: Array) -> tuple:
    """The shape of cast_fp8_blocks()'s scales."""
    return tuple(scale_groups(n) for n in x.shape)


def empty_fp8(like: Array, shape, scales) -> tuple[Array, Array]:
    """New elements and scales of those shapes."""
    return _arrays.empty(like, shape, "float8_e4m3fn"), _arrays.empty(like, scales, "float32")


# As operators of PyTorch. Results are contiguous, as those of the eager functions.

define(
    "gemm(Tensor a, Tensor b, Tensor? bias, str activation, Tensor? residual, float alpha, Tensor? a_scale, Tensor? b_scale, "
    "SymInt num_splits, str? dtype=None) -> Tensor",
    lambda a, b, bias, activation, residual, alpha, a_scale, b_scale, num_splits, dtype=None: gemm(
        a,
        b,
        bias=bias,
        activation=activation,
        residual=residual,
        alpha=alpha,
        a_scale=a_scale,
        b_scale=b_scale,
        num_splits=num_splits,
        dtype=dtype,
    ),
    lambda a, b, bias, activation, residual, alpha, a_scale, b_scale, num_splits, dtype=None: _arrays.empty(
        a, gemm_shape(a, b, activation), dtype or gemm_dtype(a)
    ),
)


def _keep_grouped(ctx, inputs, output):
    a, b, offsets, bias, activation, a_scale, *_ = inputs
    ctx.save_for_backward(a, b, offsets)
    ctx.plain = bias is None and a_scale is None and activation == "none"


def _differentiate_grouped(ctx, gradient):
    if not ctx.plain:
        raise NotImplementedError("tilewave's grouped_gemm has gradients only where there is neither bias nor activation nor scale")
    a, b, offsets = ctx.saved_tensors
    compiled = _dispatch.compiled_ops()
    # Rows of no group have no gradient.
    da = compiled.grouped_gemm(gradient, b.transpose(1, 2), offsets, None, "none", None, None, True) if ctx.needs_input_grad[0] else None
    db = compiled.k_grouped_gemm(a.transpose(0, 1), gradient, offsets, None) if ctx.needs_input_grad[1] else None
    return da, db, *[None] * 6


define(
    "grouped_gemm(Tensor a, Tensor b, Tensor offsets, Tensor? bias, str activation, Tensor? a_scale, Tensor? b_scale, bool zeros) -> Tensor",
    lambda a, b, offsets, bias, activation, a_scale, b_scale, zeros: grouped_gemm(
        a, b, offsets, bias=bias, activation=activation, a_scale=a_scale, b_scale=b_scale, zeros=zeros
    ),
    lambda a, b, offsets, bias, activation, *rest: _arrays.empty(a, grouped_gemm_shape(a, b, activation), gemm_dtype(a)),
    Gradient(_keep_grouped, _differentiate_grouped),
)
define(
    "k_grouped_gemm(Tensor a, Tensor b, Tensor offsets, str? dtype) -> Tensor",
    lambda a, b, offsets, dtype: k_grouped_gemm(a, b, offsets, dtype=dtype),
    lambda a, b, offsets, dtype: _arrays.empty(a, k_grouped_gemm_shape(a, b, offsets), dtype),
)
define(
    "dequantize(Tensor values, Tensor scales, Tensor? zeros, str? format, str dtype) -> Tensor",
    lambda values, scales, zeros, format, dtype: dequantize(values, scales, zeros, format=format, dtype=dtype),
    lambda values, scales, zeros, format, dtype: _arrays.empty(values, dequantize_shape(values, format), dtype),
)


def _keep_quantized(ctx, inputs, output):
    x, values, scales, zeros, bias, activation, format = inputs[:7]
    ctx.save_for_backward(values, scales, zeros)
    ctx.activation, ctx.format, ctx.dtype = activation, format, _arrays.dtype_name(x)


def _differentiate_quantized(ctx, gradient):
    if ctx.activation != "none":
        raise NotImplementedError("tilewave's dequant_gemm has gradients only where there is no activation")
    compiled = _dispatch.compiled_ops()
    dx = None
    if ctx.needs_input_grad[0]:
        weight = compiled.dequantize(*ctx.saved_tensors, ctx.format, ctx.dtype)
        dx = compiled.gemm(gradient.contiguous(), weight, None, "none", None, 1.0, None, None, 0)
    d_bias = gradient.sum(0) if ctx.needs_input_grad[4] else None
    return dx, None, None, None, d_bias, None, None, None, None


define(
    "dequant_gemm(Tensor x, Tensor values, Tensor scales, Tensor? zeros, Tensor? bias, str activation, str? format=None,"
    " Tensor? x_scales=None, str? dtype=None) -> Tensor",
    lambda x, values, scales, zeros, bias, activation, format=None, x_scales=None, dtype=None: dequant_gemm(
        x, values, scales, zeros, bias=bias, activation=activation, format=format, x_scales=x_scales, dtype=dtype
    ),
    lambda x, values, scales, zeros, bias, activation, format=None, x_scales=None, dtype=None: _arrays.empty(
        x, dequant_gemm_shape(x, values, activation), dtype
    ),
    Gradient(_keep_quantized, _differentiate_quantized),
)
define(
    "conv1d(Tensor x, Tensor w, SymInt stride, SymInt padding, SymInt dilation, Tensor? bias, str activation) -> Tensor",
    lambda x, w, stride, padding, dilation, bias, activation: conv1d(
        x, w, stride=stride, padding=padding, dilation=dilation, bias=bias, activation=activation
    ),
    lambda x, w, stride, padding, dilation, *rest: x.new_empty(conv1d_shape(x, w, stride, padding, dilation)),
)
define(
    "conv2d(Tensor x, Tensor w, SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, Tensor? bias, str activation) -> Tensor",
    lambda x, w, stride, padding, dilation, bias, activation: conv2d(
        x, w, stride=stride, padding=padding, dilation=dilation, bias=bias, activation=activation
    ),
    lambda x, w, stride, padding, dilation, *rest: x.new_empty(conv2d_shape(x, w, stride, padding, dilation)),
)
define(
    "cast_fp8(Tensor x, bool powers_of_two) -> (Tensor, Tensor)",
    lambda x, powers_of_two: cast_fp8(x, powers_of_two=powers_of_two),
    lambda x, powers_of_two: empty_fp8(x, x.shape, cast_fp8_scales(x)),
)
define(
    "cast_fp8_swiglu(Tensor gate, Tensor up, bool powers_of_two) -> (Tensor, Tensor)",
    lambda gate, up, powers_of_two: cast_fp8_swiglu(gate, up, powers_of_two=powers_of_two),
    lambda gate, up, powers_of_two: empty_fp8(gate, gate.shape, cast_fp8_scales(gate)),
)
define(
    "cast_fp8_blocks(Tensor x, bool powers_of_two) -> (Tensor, Tensor)",
    lambda x, powers_of_two: cast_fp8_blocks(x, powers_of_two=powers_of_two),
    lambda x, powers_of_two: empty_fp8(x, x.shape, cast_fp8_blocks_scales(x)),
)
define(
    "cast_fp8_grouped(Tensor x, Tensor sizes, SymInt rows, bool powers_of_two) -> (Tensor, Tensor)",
    lambda x, sizes, rows, powers_of_two: cast_fp8_grouped(x, sizes, rows, powers_of_two=powers_of_two),
    lambda x, sizes, rows, powers_of_two: empty_fp8(
        x, (*sizes.shape, rows, x.shape[1]), (*sizes.shape, rows, scale_groups(x.shape[1]))
    ),
)
define(
    "head_scales(Tensor x, SymInt? kv_heads, bool rotate, Tensor? signs) -> Tensor",
    lambda x, kv_heads, rotate, signs: head_scales(x, kv_heads=kv_heads, rotate=rotate, signs=signs),
    lambda x, kv_heads, rotate, signs: _arrays.empty(x, head_scales_shape(x, kv_heads), "float32"),
)
define(
    "cast_fp8_heads(Tensor x, Tensor scales, bool rotate, Tensor? signs) -> Tensor",
    lambda x, scales, rotate, signs: cast_fp8_heads(x, scales, rotate=rotate, signs=signs)[0],
    lambda x, scales, rotate, signs: _arrays.empty(x, x.shape, "float8_e4m3fn"),
)
