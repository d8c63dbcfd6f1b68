"""mamba_ssm's functions for what ops.mamba2() and ops.mamba2_step() cover, with their names and the order of their arguments:

    from tilewave.mamba_ssm import mamba_chunk_scan_combined  # instead of mamba_ssm.ops.triton.ssd_combined
    from tilewave.mamba_ssm import selective_state_update  # instead of mamba_ssm.ops.triton.selective_state_update
    from tilewave.mamba_ssm import _chunk_cumsum_fwd  # and the scan's other four steps, instead of mamba_ssm.ops.triton.ssd_...

Tensors are PyTorch's. A, D and dt_bias may have any floating-point dtype, and are converted to f32; B, C and z are converted to x's dtype.
Autograd differentiates mamba_chunk_scan_combined() and the steps. Those take x, B and C of f16 or bf16, and a chunk_size that is a multiple of
16, up to 256.
"""

from __future__ import annotations

import math

from . import _arrays
from .ops import mamba2, mamba2_bmm_chunk, mamba2_chunk_cumsum, mamba2_chunk_scan, mamba2_chunk_state, mamba2_state_passing, mamba2_step

__all__ = [
    "_bmm_chunk_fwd",
    "_chunk_cumsum_fwd",
    "_chunk_scan_fwd",
    "_chunk_state_fwd",
    "_state_passing_fwd",
    "mamba_chunk_scan_combined",
    "selective_state_update",
]


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

    chunk_size is not used: ops.mamba2() chooses its chunks. cu_seqlens is used with return_varlen_states only, which also returns the state after each
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


_FORGETS = -160 * math.log(2)  #: the logarithm of a decay to 0, also in f32: mamba2_chunk_cumsum()'s lowest


def _begun(seq_idx, chunk_size):
    """What seq_idx [batch, seqlen] adds to dA_cumsum: _FORGETS for each step of a chunk, up to each step, whose number differs from that of the
    step before. [batch, 1, nchunks, chunk_size].
    """
    torch = _torch(seq_idx)
    begins = torch.zeros_like(seq_idx, dtype=torch.float32)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    begins = torch.nn.functional.pad(begins, (0, -seq_idx.shape[1] % chunk_size))
    return begins.unflatten(1, (-1, chunk_size)).cumsum(-1)[:, None] * _FORGETS


def _chunk_cumsum_fwd(dt, A, chunk_size, dt_bias=None, dt_softplus=False, dt_limit=(0.0, float("inf"))):
    """dt: [batch, seqlen, nheads]. Returns (dA_cumsum, dt), f32 [batch, nheads, nchunks, chunk_size]."""
    return mamba2_chunk_cumsum(dt, _f32(A), chunk_size, dt_bias=_f32(dt_bias), dt_softplus=dt_softplus, dt_limit=dt_limit)


def _chunk_state_fwd(B, x, dt, dA_cumsum, seq_idx=None, states=None, states_in_fp32=True):
    """What each chunk adds to the state, [batch, nchunks, nheads, headdim, dstate], of f32 or x's dtype; `states`: its memory."""
    if seq_idx is not None:
        dA_cumsum = dA_cumsum + _begun(seq_idx, dA_cumsum.shape[-1])
    result = mamba2_chunk_state(B.to(x.dtype), x, dt.float().contiguous(), dA_cumsum.float().contiguous())
    if states is not None:
        return states.copy_(result)
    return result if states_in_fp32 else result.to(x.dtype)


def _state_passing_fwd(states, dA_chunk_cumsum, initial_states=None, seq_idx=None, chunk_size=None, out_dtype=None):
    """states: what each chunk adds, [batch, nchunks, nheads, dim]; dA_chunk_cumsum: [batch, nheads, nchunks]. Returns (the state before each
    chunk, of out_dtype or states' dtype, the last states, f32 [batch, nheads, dim]). chunk_size is needed with seq_idx.
    """
    if seq_idx is not None:
        if chunk_size is None:
            raise ValueError("seq_idx is given, but chunk_size is None; it is needed")
        dA_chunk_cumsum = dA_chunk_cumsum + _begun(seq_idx, chunk_size)[..., -1]
    passed, final = mamba2_state_passing(
        states.float().contiguous()[..., None],
        dA_chunk_cumsum.float(),
        initial_states=None if initial_states is None else _f32(initial_states).contiguous()[..., None],
        dtype=states.dtype if out_dtype is None else out_dtype,
    )
    return passed[..., 0], final[..., 0]


def _bmm_chunk_fwd(a, b, chunk_size, seq_idx=None, causal=False, output_dtype=None):
    """a, b: [batch, seqlen, ngroups, k], or without ngroups. Returns [batch, nchunks, ngroups, chunk_size, chunk_size], without ngroups if they
    have none, of output_dtype or a's dtype. 0 where seq_idx differs and, with `causal`, above the diagonal.
    """
    torch = _torch(a)
    grouped = a.dim() == 4
    products = mamba2_bmm_chunk(*(t if grouped else t[:, :, None] for t in (a, b)), chunk_size, causal=causal)
    if seq_idx is not None:
        numbers = torch.nn.functional.pad(seq_idx, (0, -seq_idx.shape[1] % chunk_size), value=-1).unflatten(1, (-1, chunk_size))
        products = torch.where((numbers[..., None] == numbers[..., None, :])[:, :, None], products, 0.0)
    products = products.to(a.dtype if output_dtype is None else output_dtype)
    return products if grouped else products[:, :, 0]


def _chunk_scan_fwd(cb, x, dt, dA_cumsum, C, states, D=None, z=None, seq_idx=None):
    """Returns (the outputs, [batch, seqlen, nheads, headdim], those before the gate, or None without z). cb: _bmm_chunk_fwd()'s, with ngroups;
    states: _state_passing_fwd()'s, as [batch, nchunks, nheads, headdim, dstate].
    """
    if seq_idx is not None:
        dA_cumsum = dA_cumsum + _begun(seq_idx, dA_cumsum.shape[-1])
    given = {"D": _f32(D), "z": None if z is None else z.to(x.dtype), "return_ungated": z is not None}
    between = [array.float().contiguous() for array in (cb, dt, dA_cumsum)]
    result = mamba2_chunk_scan(between[0], x, *between[1:], C.to(x.dtype), states.to(x.dtype).contiguous(), **given)
    return result if z is not None else (result, None)
