"""The operations as operators of PyTorch, torch.ops.tilewave, so that torch.compile() and torch.export() see each as one node.

PyTorch needs an operator's schema, with what it writes; its implementation; the shapes, dtypes and strides of its results ("fake"), without
running it. Operators do what the eager functions do, which call them while PyTorch traces or records gradients
(_arrays.through_operator()). There is no backward yet: results of arguments that require grad require it too, and their backward raises.

Imported at the first use of an operator, if torch is installed.
"""

from __future__ import annotations

import functools
from typing import Callable

import torch

from . import _arrays
from .ops import elements, products, rows
from .ops.attention import attention, attention_decode, attention_varlen

_LIBRARY = torch.library.Library("tilewave", "FRAGMENT")
# Strides of the arguments stay as they were when traced: of an argument whose last dimension is contiguous it is so when compiled.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def _register(schema: str, implementation: Callable, fake: Callable) -> None:
    """torch.ops.tilewave.<name>, of `schema` "name(arguments) -> results" in PyTorch's notation. Results share no memory with arguments."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"tilewave::{name}", fake, lib=_LIBRARY)
    operator = getattr(torch.ops.tilewave, name).default

    def recorded(*args):
        if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args):
            for argument, value in zip(operator._schema.arguments, args):
                if argument.alias_info is not None and argument.alias_info.is_write and value.requires_grad:
                    raise RuntimeError(f"{argument.name} requires grad and would be written in place: give {argument.name}.detach()")
            return _WithoutBackward.apply(operator, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    _LIBRARY.impl(name, recorded, "Autograd")


class _WithoutBackward(torch.autograd.Function):
    """An operator's forward, for arguments that require grad."""

    @staticmethod
    def forward(ctx, operator, *args):
        ctx.name = operator._schema.name.partition("::")[2]
        ctx.shapes = [value.shape if needed else None for value, needed in zip(args, ctx.needs_input_grad[1:])]
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    @staticmethod
    def backward(ctx, *gradients):
        # By an operator: torch.compile() traces the backward together with the forward, also where only the forward will run.
        missing = torch.ops.tilewave.missing_backward
        return None, *(None if shape is None else missing(gradients[0], ctx.name, shape) for shape in ctx.shapes)


def _missing_backward(gradient, name, shape):
    raise NotImplementedError(
        f"tilewave's {name} has no backward yet: call it under torch.no_grad(), or detach what it returns, or use PyTorch's own operations "
        "where gradients are needed"
    )


_LIBRARY.define("missing_backward(Tensor gradient, str name, SymInt[] shape) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("missing_backward", _missing_backward, _key)
torch.library.register_fake("tilewave::missing_backward", lambda gradient, name, shape: gradient.new_empty(shape), lib=_LIBRARY)


def _with_lse(result: object, q: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(o, lse) from the eager functions' results; operators always return the same number of tensors."""
    return result if return_lse else (result, q.new_empty(0, dtype=torch.float32))


def _fake_with_lse(q: torch.Tensor, v: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Of q [batch, seqlen_q, heads, head_dim], or packed [total_q, heads, head_dim]."""
    if v.dim() not in (3, 4) or q.dim() not in (3, 4):
        raise ValueError(f"q has shape {tuple(q.shape)}, v {tuple(v.shape)}; both must have 4 dimensions, or 3 if they are packed")
    rows, heads = q.shape[:-2], q.shape[-2]
    lse_shape = (*rows[:-1], heads, rows[-1]) if return_lse else (0,)
    return q.new_empty((*rows, heads, v.shape[-1])), q.new_empty(lse_shape, dtype=torch.float32)


def _options(arguments: tuple) -> dict:
    scale, causal, causal_offset, window_left, window_right, softcap, alibi_slopes, sink = arguments
    return {
        "scale": scale,
        "causal": causal,
        "causal_offset": causal_offset,
        "window": (window_left, window_right),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sink": sink,
    }


# Numbers that may be computed from shapes are SymInt.
_OPTIONS_SCHEMA = (
    "float? scale, bool causal, SymInt? causal_offset, SymInt window_left, SymInt window_right, float softcap, Tensor? alibi_slopes, "
    "Tensor? sink"
)


def _attention(q, k, v, *rest):
    *options, mask, return_lse = rest
    return _with_lse(attention(q, k, v, **_options(options), mask=mask, return_lse=return_lse), q, return_lse)


def _attention_fake(q, k, v, *rest):
    return _fake_with_lse(q, v, rest[-1])


_register(
    f"attention(Tensor q, Tensor k, Tensor v, {_OPTIONS_SCHEMA}, Tensor? mask, bool return_lse) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)


def _attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *rest):
    *options, check_contents, return_lse = rest
    result = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        **_options(options),
        check_contents=check_contents,
        return_lse=return_lse,
    )
    return _with_lse(result, q, return_lse)


_register(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    f"{_OPTIONS_SCHEMA}, bool? check_contents, bool return_lse) -> (Tensor, Tensor)",
    _attention_varlen,
    _attention_fake,
)


def _attention_decode(q, k_cache, v_cache, *rest):
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
    cache, (*options, check_contents, return_lse) = dict(zip(names, rest)), rest[len(names) :]
    result = attention_decode(q, k_cache, v_cache, **cache, **_options(options), check_contents=check_contents, return_lse=return_lse)
    return _with_lse(result, q, return_lse)


def _attention_decode_read(*arguments):
    if arguments[9] is not None or arguments[10] is not None:
        raise ValueError("new_k, new_v: attention_decode_read writes no cache; attention_decode does")
    return _attention_decode(*arguments)


_DECODE_SCHEMA = (
    "Tensor? seqlens, Tensor? batch_idx, Tensor? leftpad, Tensor? block_table, Tensor? cu_seqlens_q, Tensor? cu_seqlens_new, "
    "Tensor? new_k, Tensor? new_v, Tensor? rotary_cos, Tensor? rotary_sin, bool rotary_interleaved, SymInt num_splits, "
    f"{_OPTIONS_SCHEMA}, bool? check_contents, bool return_lse) -> (Tensor, Tensor)"
)
_register(f"attention_decode(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {_DECODE_SCHEMA}", _attention_decode, _attention_fake)
# The same without new keys. Graphs whose inputs are written cannot become CUDA graphs, and copies are made before writes: not for nothing.
_register(f"attention_decode_read(Tensor q, Tensor k_cache, Tensor v_cache, {_DECODE_SCHEMA}", _attention_decode_read, _attention_fake)


# The other operations. Results are contiguous, as those of the eager functions.


def _as(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def _broadcast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(torch.broadcast_shapes(a.shape, b.shape))


def _named(dtype: str) -> torch.dtype:
    return getattr(torch, _arrays.known_dtype("dtype", dtype))


_register("add(Tensor a, Tensor b) -> Tensor", elements.add, _broadcast)
_register("mul(Tensor a, Tensor b) -> Tensor", elements.mul, _broadcast)
_register("swiglu(Tensor gate, Tensor up) -> Tensor", elements.swiglu, lambda gate, up: _as(gate))
_register("silu(Tensor x) -> Tensor", elements.silu, _as)
_register("gelu_erf(Tensor x) -> Tensor", elements.gelu_erf, _as)
_register("gelu_tanh(Tensor x) -> Tensor", elements.gelu_tanh, _as)
_register("cast(Tensor x, str dtype) -> Tensor", elements.cast, lambda x, dtype: x.new_empty(x.shape, dtype=_named(dtype)))
_register("swiglu_interleaved(Tensor x) -> Tensor", elements.swiglu_interleaved, lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
_register("transpose(Tensor x) -> Tensor", elements.transpose, lambda x: x.new_empty(x.mT.shape))
_register(
    "embedding(Tensor table, Tensor ids, float scale) -> Tensor",
    lambda table, ids, scale: elements.embedding(table, ids, scale=scale),
    lambda table, ids, scale: table.new_empty((*ids.shape, table.shape[-1])),
)
_register(
    "gemm(Tensor a, Tensor b, Tensor? bias, str activation, Tensor? residual, float alpha, Tensor? a_scale, Tensor? b_scale, "
    "SymInt num_splits) -> Tensor",
    lambda a, b, bias, activation, residual, alpha, a_scale, b_scale, num_splits: products.gemm(
        a, b, bias=bias, activation=activation, residual=residual, alpha=alpha, a_scale=a_scale, b_scale=b_scale, num_splits=num_splits
    ),
    lambda a, b, bias, activation, *rest: a.new_empty(
        products.gemm_shape(a, b, activation), dtype=getattr(torch, products.gemm_dtype(a) or _arrays.dtype_name(a))
    ),
)
_register(
    "conv1d(Tensor x, Tensor w, SymInt stride, SymInt padding, SymInt dilation, Tensor? bias, str activation) -> Tensor",
    lambda x, w, stride, padding, dilation, bias, activation: products.conv1d(
        x, w, stride=stride, padding=padding, dilation=dilation, bias=bias, activation=activation
    ),
    lambda x, w, stride, padding, dilation, *rest: x.new_empty(products.conv1d_shape(x, w, stride, padding, dilation)),
)
_register(
    "conv2d(Tensor x, Tensor w, SymInt[2] stride, SymInt[2] padding, SymInt[2] dilation, Tensor? bias, str activation) -> Tensor",
    lambda x, w, stride, padding, dilation, bias, activation: products.conv2d(
        x, w, stride=stride, padding=padding, dilation=dilation, bias=bias, activation=activation
    ),
    lambda x, w, stride, padding, dilation, *rest: x.new_empty(products.conv2d_shape(x, w, stride, padding, dilation)),
)
_register(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon, Tensor? residual) -> Tensor",
    lambda x, weight, bias, epsilon, residual: rows.layer_norm(x, weight, bias, epsilon=epsilon, residual=residual),
    lambda x, *rest: _as(x),
)
_register(
    "rms_norm(Tensor x, Tensor? weight, float epsilon, Tensor? residual) -> Tensor",
    lambda x, weight, epsilon, residual: rows.rms_norm(x, weight, epsilon=epsilon, residual=residual),
    lambda x, *rest: _as(x),
)
_register("softmax(Tensor x, float scale) -> Tensor", lambda x, scale: rows.softmax(x, scale=scale), lambda x, scale: _as(x))
_register(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved, SymInt offset, Tensor? offsets, Tensor? positions) -> Tensor",
    lambda x, cos, sin, interleaved, offset, offsets, positions: rows.rope(
        x, cos, sin, interleaved=interleaved, offset=offset, offsets=offsets, positions=positions
    ),
    lambda x, *rest: _as(x),
)
_register(
    "rope_table(Tensor positions, SymInt rotary_dim, float theta, str dtype) -> (Tensor, Tensor)",
    lambda positions, rotary_dim, theta, dtype: rows.rope_table(positions, rotary_dim, theta=theta, dtype=dtype),
    lambda positions, rotary_dim, theta, dtype: tuple(
        positions.new_empty((positions.shape[0], rotary_dim // 2), dtype=_named(dtype)) for _ in range(2)
    ),
)
_register(
    "reduce(Tensor x, str reduction, SymInt dim, bool keepdim) -> Tensor",
    lambda x, reduction, dim, keepdim: rows.reduce(x, reduction, dim=dim, keepdim=keepdim),
    lambda x, reduction, dim, keepdim: x.new_empty(rows.reduce_shape(x, dim, keepdim)),
)
_register(
    "argmax(Tensor x, str dtype) -> Tensor",
    lambda x, dtype: rows.argmax(x, dtype=dtype),
    lambda x, dtype: x.new_empty(x.shape[:-1], dtype=_named(dtype)),
)
_register(
    "topk(Tensor x, SymInt k, bool largest, bool sorted, Tensor? starts, Tensor? ends) -> (Tensor, Tensor)",
    lambda x, k, largest, sorted, starts, ends: rows.topk(x, k, largest=largest, sorted=sorted, starts=starts, ends=ends),
    lambda x, k, *rest: (x.new_empty((*x.shape[:-1], k)), x.new_empty((*x.shape[:-1], k), dtype=torch.int64)),
)
for _name in ("cast_fp8", "cast_fp8_blocks"):
    _register(
        f"{_name}(Tensor x, bool powers_of_two) -> (Tensor, Tensor)",
        functools.partial(lambda function, x, powers_of_two: function(x, powers_of_two=powers_of_two), getattr(products, _name)),
        functools.partial(lambda shape, x, powers_of_two: products.empty_fp8(x, x.shape, shape(x)), getattr(products, f"{_name}_scales")),
    )
_register(
    "cast_fp8_grouped(Tensor x, Tensor sizes, SymInt rows, bool powers_of_two) -> (Tensor, Tensor)",
    lambda x, sizes, rows, powers_of_two: products.cast_fp8_grouped(x, sizes, rows, powers_of_two=powers_of_two),
    lambda x, sizes, rows, powers_of_two: products.empty_fp8(
        x, (*sizes.shape, rows, x.shape[1]), (*sizes.shape, rows, products.scale_groups(x.shape[1]))
    ),
)
