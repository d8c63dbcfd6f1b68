"""mamba_ssm's functions for what ops.mamba2() and ops.mamba2_step() cover, with their names and the order of their arguments:

    from tilewave.mamba_ssm import mamba_chunk_scan_combined  # instead of mamba_ssm.ops.triton.ssd_combined
    from tilewave.mamba_ssm import selective_state_update  # instead of mamba_ssm.ops.triton.selective_state_update

Tensors are PyTorch's. A, D and dt_bias may have any floating-point dtype, and are converted to f32; B, C and z are converted to x's dtype.
Autograd differentiates mamba_chunk_scan_combined().
"""

from __future__ import annotations

from . import _arrays
from .ops import mamba2, mamba2_step

__all__ = ["mamba_chunk_scan_combined", "selective_state_update"]


def _torch(x):
    """PyTorch, which need not be installed to import this module."""
    torch = _arrays.torch_of(x)
    if torch is None:
        raise TypeError(f"x is a {type(x).__name__}; PyTorch tensors are taken")
    return torch


def _f32(tensor):
    return None if tensor is None else tensor.float()


def _operands(x, dt, B, C, z):
    """Those whose dtype the operations do not take, converted."""
    dt = dt if dt.dtype == x.dtype else dt.float()
    return dt, B.to(x.dtype), C.to(x.dtype), None if z is None else z.to(x.dtype)


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
):
    """x: [batch, seqlen, nheads, headdim]; dt: [batch, seqlen, nheads]; A: [nheads]; B, C: [batch, seqlen, ngroups, dstate]; states: [batch,
    nheads, headdim, dstate], returned in f32.

    chunk_size is not used: chunks have 64 steps. cu_seqlens is used with return_varlen_states only, which also returns the state after each
    of the packed sequences; they then begin with states of 0, and seq_idx is not used.
    """
    torch = _torch(x)
    dt, B, C, z = _operands(x, dt, B, C, z)
    given = {"D": _f32(D), "z": z, "dt_bias": _f32(dt_bias), "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    if not return_varlen_states:
        numbers = None if seq_idx is None else seq_idx.to(torch.int32)
        given.update(initial_states=_f32(initial_states), seq_idx=numbers, return_final_states=return_final_states)
        return mamba2(x, dt, _f32(A), B, C, **given)
    if cu_seqlens is None:
        raise ValueError("return_varlen_states is True, but cu_seqlens is None; it is needed")
    if initial_states is not None:
        raise NotImplementedError("initial_states and return_varlen_states are given; only one of them is supported")
    y, states = mamba2(x, dt, _f32(A), B, C, **given, cu_seqlens=cu_seqlens.to(torch.int32), return_final_states=True)
    return (y, states[-1:], states) if return_final_states else (y, states)


def _shared(name, tensor, dims):
    """The tensor without its last `dims` dimensions, in which all elements must be one, by strides of 0, as Mamba-2 expands them."""
    for dim in range(-dims, 0):
        if tensor.shape[dim] != 1 and tensor.stride(dim) != 0:
            raise NotImplementedError(
                f"{name} is {list(tensor.shape)} with a stride of {tensor.stride(dim)} in dimension {dim}; only Mamba-2's, which a head has in "
                "common and expand() made, with a stride of 0, is supported"
            )
    return tensor[(..., *(0,) * dims)]


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None):
    """A decoding step of Mamba-2. state: [batch, nheads, headdim, dstate] of f32 or x's dtype, updated in place; x, z: [batch, nheads,
    headdim]; B, C: [batch, ngroups, dstate]. dt: [batch, nheads, headdim], A: [nheads, headdim, dstate] and dt_bias: [nheads, headdim] must be
    expanded from one number for each head. D: [nheads, headdim]. state_batch_indices: int32 [batch], the state of each sequence; negative: the
    sequence is left out. Returns y, [batch, nheads, headdim].
    """
    torch = _torch(x)
    if x.dim() != 3 or state.dim() != 4:
        raise NotImplementedError(
            f"x is {list(x.shape)} and state {list(state.shape)}; only Mamba-2's [batch, nheads, headdim] and [batch, nheads, headdim, dstate] "
            "are supported"
        )
    # Before it is converted: a copy has no strides of 0.
    dt, B, C, z = _operands(x, _shared("dt", dt, 1), B, C, z)
    return mamba2_step(
        x,
        dt,
        _f32(_shared("A", A, 2)),
        B,
        C,
        state,
        D=_f32(D),
        z=z,
        dt_bias=None if dt_bias is None else _f32(_shared("dt_bias", dt_bias, 1)),
        dt_softplus=dt_softplus,
        state_indices=None if state_batch_indices is None else state_batch_indices.to(torch.int32),
    )
