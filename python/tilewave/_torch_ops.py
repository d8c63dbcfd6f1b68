"""Registers the operators (_operators.py) with PyTorch as torch.ops.tilewave: one node each to torch.compile() and torch.export().

An operator without a backward still runs on arguments that require grad: its results require it too, and their backward raises.

Imported at the first use of an operator, if torch is installed.
"""

from __future__ import annotations

import torch

from . import _operators

_LIBRARY = torch.library.Library("tilewave", "FRAGMENT")
# Arguments keep the strides that they had when traced: a contiguous last dimension stays contiguous when compiled.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


def _register(definition: _operators.Operator) -> None:
    name = definition.schema.partition("(")[0]
    _LIBRARY.define(definition.schema, tags=_TAGS)
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, definition.implementation, key)
    torch.library.register_fake(f"tilewave::{name}", definition.fake, lib=_LIBRARY)
    if definition.gradient is None:
        _register_without_backward(name)
    else:
        setup_context, backward = definition.gradient
        torch.library.register_autograd(f"tilewave::{name}", backward, setup_context=setup_context, lib=_LIBRARY)


def _register_without_backward(name: str) -> None:
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
        # By an operator, because torch.compile() traces the backward together with the forward even if only the forward will run.
        missing = torch.ops.tilewave.missing_backward
        of, _, backward = ctx.name.rpartition("_")
        what = f"{of} has no second derivatives" if backward == "backward" else f"{ctx.name} has no backward yet"
        return None, *(None if shape is None else missing(gradients[0], what, shape) for shape in ctx.shapes)


def _missing_backward(gradient, what, shape):
    raise NotImplementedError(
        f"tilewave's {what}: call it under torch.no_grad(), or detach what it returns, or use PyTorch's own operations "
        "where gradients are needed"
    )


_LIBRARY.define("missing_backward(Tensor gradient, str what, SymInt[] shape) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("missing_backward", _missing_backward, _key)
torch.library.register_fake("tilewave::missing_backward", lambda gradient, what, shape: gradient.new_empty(shape), lib=_LIBRARY)

_operators.register_with(_register)
