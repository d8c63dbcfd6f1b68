"""The definitions of PyTorch's operators. Modules of `ops` define their operators here; _torch_ops.py registers them if PyTorch is used.

Needs no PyTorch. Imports go one way: _library and _arrays; _operators, _torch_ops, _dispatch; ops; then _flash, sdpa and the rest.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple


class Gradient(NamedTuple):
    """An operator's backward, as torch.library.register_autograd() takes it."""

    setup_context: Callable[..., None]  #: (ctx, inputs, output), keeps what the backward needs
    backward: Callable[..., tuple]  #: (ctx, gradient of each result), gives a gradient or None for each argument


class Operator(NamedTuple):
    schema: str  #: "name(arguments) -> results" in PyTorch's notation, which marks written arguments; results share no memory with arguments
    implementation: Callable[..., Any]  #: the eager function, which calls the operator only while PyTorch traces or records gradients
    fake: Callable[..., Any]  #: makes results with the same shapes, dtypes and strides without computing
    gradient: Gradient | None  #: None: the backward raises NotImplementedError


_defined: list[Operator] = []
_register: Callable[[Operator], None] | None = None


def define(schema: str, implementation: Callable, fake: Callable, gradient: Gradient | None = None) -> None:
    """torch.ops.tilewave.<name>."""
    operator = Operator(schema, implementation, fake, gradient)
    _defined.append(operator)
    if _register is not None:
        _register(operator)


def register_with(register: Callable[[Operator], None]) -> None:
    """Calls `register` for each operator that is or will be defined."""
    global _register
    _register = register
    for operator in _defined:
        register(operator)


def empty_like(x, *_):
    """A contiguous tensor with x's shape and dtype: the fake of most functions with one tensor."""
    return x.new_empty(x.shape)
