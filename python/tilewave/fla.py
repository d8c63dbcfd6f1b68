"""flash-linear-attention's functions for what ops.linear_attention() and ops.gated_delta_rule() cover, with their names and the order of their
arguments:

    from tilewave.fla import chunk_simple_gla  # instead of fla.ops.simple_gla

Tensors are PyTorch's, [batch, time, heads, dim]. A function returns (o, final state), and None for the state unless output_final_state.
chunk_ and fused_chunk_ functions run in chunks if the tensors are bf16 or f16, fused_recurrent_ ones too: their results differ in rounding
only. f32 runs step by step in all of them. Heads of v may be a multiple of those of q and k.
"""

from __future__ import annotations

from . import _arrays
from .ops import gated_delta_rule, linear_attention

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_linear_attn",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
]


def _torch(q):
    """PyTorch, which need not be installed to import this module."""
    torch = _arrays.torch_of(q)
    if torch is None:
        raise TypeError(f"q is a {type(q).__name__}; PyTorch tensors are taken")
    return torch


def _run(q, k, v, g, g_gamma, scale, initial_state, output_final_state, reverse, cu_seqlens):
    if reverse:
        raise NotImplementedError("reverse is True; only sequences from their first step to the last are supported")
    if g is not None and g_gamma is not None:
        raise ValueError("g and g_gamma are given; allowed: one of them")
    _torch(q)
    decay = g if g is not None else g_gamma
    result = linear_attention(
        q,
        k,
        v,
        g=None if decay is None else decay.float(),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float().contiguous(),
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(_torch(q).int32),
        return_state=output_final_state,
    )
    return result if output_final_state else (result, None)


def _refuse(head_first):
    if head_first:
        raise NotImplementedError("head_first is True; only [batch, time, heads, dim] is supported")


def _linear(q, k, v, scale, initial_state, output_final_state, normalize, head_first):
    _refuse(head_first)
    o, state = _run(q, k, v, None, None, scale, initial_state, output_final_state, False, None)
    if normalize:
        # The sum of the products of a step's query with the keys so far: linear attention of ones. TMA copies 8 columns, not one.
        sums = linear_attention(q, k, _torch(q).ones_like(v[..., :1]).expand(*v.shape[:3], 8).contiguous(), scale=scale)
        o = (o / (sums[..., :1].float() + 1e-10)).to(o.dtype)
    return o, state


def _retention_decay(q, heads):
    """log(1 - 2^(-5 - head)), of each head."""
    torch = _torch(q)
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float32, device=q.device)))


def chunk_simple_gla(
    q,
    k,
    v,
    g=None,
    g_gamma=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
):
    """g: logarithm of the decay, [batch, time, heads]; g_gamma: [heads]. state_v_first: states are [.., dim of v, dim of k]."""
    if state_v_first and initial_state is not None:
        initial_state = initial_state.transpose(-1, -2)
    o, state = _run(q, k, v, g, g_gamma, scale, initial_state, output_final_state, False, cu_seqlens)
    return o, state.transpose(-1, -2).contiguous() if state_v_first and state is not None else state


def fused_recurrent_simple_gla(
    q,
    k,
    v,
    g=None,
    g_gamma=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    reverse=False,
    state_v_first=False,
    cu_seqlens=None,
):
    """As chunk_simple_gla()."""
    if reverse:
        raise NotImplementedError("reverse is True; only sequences from their first step to the last are supported")
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens)


def chunk_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, head_first=False):
    """The decay of head h is 1 - 2^(-5 - h)."""
    _refuse(head_first)
    return _run(q, k, v, None, _retention_decay(q, v.shape[2]), scale, initial_state, output_final_state, False, cu_seqlens)


def fused_recurrent_retention(q, k, v, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None):
    decay = _retention_decay(q, v.shape[2])
    return _run(q, k, v, None, decay, scale, initial_state, output_final_state, reverse, cu_seqlens)


def chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, head_first=False):
    """normalize: o is divided by the sum of scale q_t k_s over the steps s up to t, plus 1e-10; the initial state is not part of the sum."""
    return _linear(q, k, v, scale, initial_state, output_final_state, normalize, head_first)


def fused_chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, head_first=False):
    return _linear(q, k, v, scale, initial_state, output_final_state, normalize, head_first)


def fused_recurrent_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=False, head_first=False):
    return _linear(q, k, v, scale, initial_state, output_final_state, normalize, head_first)


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
):
    """g: logarithm of the decay, [batch, time, heads]. use_beta_sigmoid_in_kernel: beta is sigmoid(beta), with allow_neg_eigval twice that.
    state_v_first: states are [.., dim of v, dim of k]."""
    torch = _torch(q)
    if use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta.float()) * (2.0 if allow_neg_eigval else 1.0)
    if initial_state is not None:
        initial_state = (initial_state.transpose(-1, -2) if state_v_first else initial_state).float().contiguous()
    result = gated_delta_rule(
        q,
        k,
        v,
        beta,
        g=None if g is None else g.float(),
        scale=scale,
        initial_state=initial_state,
        return_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(torch.int32),
    )
    o, state = result if output_final_state else (result, None)
    return o, state.transpose(-1, -2).contiguous() if state_v_first and state is not None else state


def fused_recurrent_gated_delta_rule(
    q,
    k,
    v,
    g=None,
    gk=None,
    gv=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
):
    """As chunk_gated_delta_rule(); without beta it is 1. gk: gates of channels of keys, [batch, time, heads, dim], added to g."""
    if gv is not None:
        raise NotImplementedError("gv is given; gates of heads, g, and of channels of keys, gk, are supported")
    if gk is not None:
        g = gk.float() if g is None else g.float().unsqueeze(-1) + gk.float()
    if beta is None:
        beta = v.new_ones(v.shape[:3])
    return chunk_gated_delta_rule(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens
    )


def _kda_gate(g, a_log, dt_bias, lower_bound):
    """-exp(A_log) softplus(g + dt_bias), or with a lower bound that times sigmoid(exp(A_log) (g + dt_bias)); [batch, time, heads, dim]."""
    torch = _torch(g)
    heads, dim = g.shape[2:]
    x = g.float() if dt_bias is None else g.float() + dt_bias.float().view(heads, dim)
    rate = None if a_log is None else a_log.float().exp().view(heads, 1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(x if rate is None else rate * x)
    if rate is None:
        raise ValueError("A_log is None; allowed with use_gate_in_kernel only if lower_bound is given")
    return -rate * torch.nn.functional.softplus(x)


def chunk_kda(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    A_log=None,
    dt_bias=None,
):
    """Kimi Delta Attention: chunk_gated_delta_rule() with a gate for each channel of a key, g [batch, time, heads, dim].

    use_gate_in_kernel: the gate is -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)), with A_log [heads] and
    dt_bias [heads * dim]. safe_gate and disable_recompute choose among flash-linear-attention's kernels and change nothing here.
    """
    if return_intermediate_states:
        raise NotImplementedError("return_intermediate_states is True; only the final state is returned")
    if use_gate_in_kernel:
        g = _kda_gate(g, A_log, dt_bias, lower_bound)
    return chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
        cu_seqlens,
    )


def fused_recurrent_kda(
    q,
    k,
    v,
    g,
    beta,
    A_log=None,
    dt_bias=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    lower_bound=None,
    state_v_first=False,
    cu_seqlens=None,
):
    """As chunk_kda()."""
    return chunk_kda(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        A_log=A_log,
        dt_bias=dt_bias,
    )
