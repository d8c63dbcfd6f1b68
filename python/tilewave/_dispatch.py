"""Whether a call goes through torch.ops.tilewave, which torch.compile() and autograd see, or straight to the library."""

from __future__ import annotations

import sys

from ._arrays import Array


def through_operator(*arrays: Array | None) -> bool:
    """Whether a call with these inputs must go through torch.ops.tilewave: torch.compile() is tracing it, or autograd records it."""
    torch = sys.modules.get("torch")  # the first call may be traced
    if torch is None:
        return False
    return torch.compiler.is_compiling() or needs_gradients(*arrays)


def needs_gradients(*arrays: Array | None) -> bool:
    """Whether autograd records a call with these inputs."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    for array in arrays:
        if isinstance(array, torch.Tensor) and array.requires_grad:
            return True
    return False


def deterministic_algorithms() -> bool:
    """Whether PyTorch was asked for the same bits in every run."""
    return sys.modules["torch"].are_deterministic_algorithms_enabled()


def compiled_ops():
    """torch.ops.tilewave."""
    from . import _torch_ops  # noqa: F401  defines the operators

    return sys.modules["torch"].ops.tilewave


def into(out, result):
    """An operator's `result`, copied to `out` if that is given. Both may be tuples."""
    if out is None:
        return result
    if isinstance(out, tuple):
        return tuple(into(*pair) for pair in zip(out, result))
    return out.copy_(result)
