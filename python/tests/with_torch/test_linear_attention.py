"""Linear attention under autograd, and flash-linear-attention's functions, against the recurrence in PyTorch's own operations."""

import pytest
import torch

from tilewave import fla, ops


def recurrence(q, k, v, g, scale, state):
    shared = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    o = []
    for t in range(q.shape[1]):
        state = torch.exp(g[:, t])[..., None, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        o.append(scale * torch.einsum("bhd,bhde->bhe", q[:, t], state))
    return torch.stack(o, 1), state


def operands(dtype=torch.float32, steps=70, shared=2, dim=8):
    torch.manual_seed(0)
    shapes = ((2, steps, 2, dim), (2, steps, 2, dim), (2, steps, 2 * shared, 16))
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("per_head", [False, True])
def test_gradients(per_head):
    q, k, v = operands()
    g = (-torch.rand(4) if per_head else -torch.rand(2, 70, 4)).requires_grad_()
    state = torch.randn(2, 4, 8, 16, requires_grad=True)
    inputs = q, k, v, g, state
    weights = torch.randn(v.shape), torch.randn(state.shape)

    def gradients(results):
        return torch.autograd.grad(sum((x * w).sum() for x, w in zip(results, weights)), inputs)

    ours = ops.linear_attention(q, k, v, g=g, scale=0.3, initial_state=state, return_state=True)
    exact = recurrence(*(x.double() for x in (q, k, v)), g.double().expand(2, 70, 4), 0.3, state.double())
    for got, wanted in zip(ours, exact):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)
    for got, wanted in zip(gradients(ours), gradients(exact)):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)


def test_gradients_without_a_state():
    q, k, v = operands(torch.bfloat16)
    o = ops.linear_attention(q, k, v)
    gradients = torch.autograd.grad(o.float().square().sum(), (q, k, v))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = recurrence(*exact, torch.zeros(2, 70, 4, dtype=torch.float64), 8**-0.5, torch.zeros(2, 4, 8, 16, dtype=torch.float64))[0]
    for got, expected in zip(gradients, torch.autograd.grad(wanted.square().sum(), exact)):
        assert got.dtype == torch.bfloat16
        assert (got.double() - expected).norm() <= 2e-2 * expected.norm()


def test_names_of_flash_linear_attention():
    q, k, v = (x.detach() for x in operands(shared=1))
    q, k = q.abs(), k.abs()  # sums of their products do not cancel
    g = -torch.rand(2, 70, 2)
    zero = torch.zeros(2, 2, 8, 16)
    none = torch.zeros(2, 70, 2)
    decay = torch.log(1 - 2.0 ** (-5 - torch.arange(2.0))).expand(2, 70, 2)
    for function, arguments, gates in (
        (fla.chunk_simple_gla, (g,), g),
        (fla.fused_recurrent_simple_gla, (g,), g),
        (fla.chunk_simple_gla, (None, decay[0, 0]), decay),
        (fla.chunk_retention, (), decay),
        (fla.fused_recurrent_retention, (), decay),
    ):
        o, state = function(q, k, v, *arguments, output_final_state=True)
        wanted = recurrence(q, k, v, gates, 8**-0.5, zero)
        torch.testing.assert_close(o, wanted[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state, wanted[1], rtol=1e-4, atol=1e-4)
        assert function(q, k, v, *arguments)[1] is None
    state = fla.chunk_simple_gla(q, k, v, g, output_final_state=True, state_v_first=True)[1]
    torch.testing.assert_close(state.transpose(-1, -2), recurrence(q, k, v, g, 1, zero)[1], rtol=1e-4, atol=1e-4)
    plain, _ = recurrence(q, k, v, none, 8**-0.5, zero)
    sums = torch.einsum("bthd,bthd->bth", q, k.cumsum(1))[..., None] * 8**-0.5
    for function in (fla.chunk_linear_attn, fla.fused_chunk_linear_attn, fla.fused_recurrent_linear_attn):
        torch.testing.assert_close(function(q, k, v, normalize=True)[0], plain / sums, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(function(q, k, v, normalize=False)[0], plain, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="g and g_gamma"):
        fla.chunk_simple_gla(q, k, v, g, decay[0, 0])
    with pytest.raises(NotImplementedError, match="reverse"):
        fla.fused_recurrent_retention(q, k, v, reverse=True)


def delta_rule(q, k, v, g, beta, scale, state):
    o = []
    for t in range(q.shape[1]):
        decay = torch.exp(g[:, t])
        state = (decay[..., None] if g.ndim == 4 else decay[..., None, None]) * state
        update = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhd,bhde->bhe", k[:, t], state))
        state = state + k[:, t, :, :, None] * update[:, :, None, :]
        o.append(scale * torch.einsum("bhd,bhde->bhe", q[:, t], state))
    return torch.stack(o, 1), state


def test_gated_delta_rule_by_its_names():
    q, k, v = (x.detach() for x in operands(shared=1))
    g, raw, state = -torch.rand(2, 70, 2), torch.randn(2, 70, 2), torch.randn(2, 2, 8, 16)
    unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    exact = delta_rule(*unit, v, g, torch.sigmoid(raw), 8**-0.5, state)
    given = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    for got in (
        fla.chunk_gated_delta_rule(q, k, v, g, torch.sigmoid(raw), **given),
        fla.chunk_gated_delta_rule(q, k, v, g, raw, use_beta_sigmoid_in_kernel=True, **given),
        fla.fused_recurrent_gated_delta_rule(q, k, v, g, beta=torch.sigmoid(raw), **given),
    ):
        for x, wanted in zip(got, exact):
            torch.testing.assert_close(x, wanted, rtol=1e-4, atol=1e-4)
    turned = {**given, "initial_state": state.transpose(-1, -2), "state_v_first": True}
    o, final = fla.chunk_gated_delta_rule(q, k, v, g, torch.sigmoid(raw), **turned)
    torch.testing.assert_close(o, exact[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final.transpose(-1, -2), exact[1], rtol=1e-4, atol=1e-4)
    twice = delta_rule(*unit, v, g, 2 * torch.sigmoid(raw), 8**-0.5, torch.zeros_like(state))[0]
    o, none = fla.chunk_gated_delta_rule(q, k, v, g, raw, None, None, False, True, True, True)
    torch.testing.assert_close(o, twice, rtol=1e-4, atol=1e-4)
    assert none is None
    with pytest.raises(NotImplementedError, match="gv is given"):
        fla.fused_recurrent_gated_delta_rule(q, k, v, g, gv=q)


def test_kda_by_its_names():
    q, k, v = (x.detach() for x in operands(shared=1))
    raw, beta, state = torch.randn(2, 70, 2, 8), torch.rand(2, 70, 2), torch.randn(2, 2, 8, 16)
    a_log, bias = torch.randn(2), torch.randn(16)
    gate = -a_log.exp().view(2, 1) * torch.nn.functional.softplus(raw + bias.view(2, 8))
    bounded = -5 * torch.sigmoid(a_log.exp().view(2, 1) * (raw + bias.view(2, 8)))
    unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
    given = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    inside = {**given, "use_gate_in_kernel": True, "A_log": a_log, "dt_bias": bias}
    for wanted_gate, results in (
        (gate, (fla.chunk_kda(q, k, v, gate, beta, **given), fla.fused_recurrent_kda(q, k, v, gate, beta, **given))),
        (gate, (fla.chunk_kda(q, k, v, raw, beta, **inside), fla.fused_recurrent_kda(q, k, v, raw, beta, **inside))),
        (bounded, (fla.chunk_kda(q, k, v, raw, beta, lower_bound=-5, safe_gate=True, **inside),)),
        (gate, (fla.fused_recurrent_gated_delta_rule(q, k, v, None, gate, None, beta, **given),)),
    ):
        exact = delta_rule(*unit, v, wanted_gate, beta, 8**-0.5, state)
        for got in results:
            for x, wanted in zip(got, exact):
                torch.testing.assert_close(x, wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="A_log is None"):
        fla.chunk_kda(q, k, v, raw, beta, use_gate_in_kernel=True)
    with pytest.raises(NotImplementedError, match="return_intermediate_states is True"):
        fla.chunk_kda(q, k, v, gate, beta, return_intermediate_states=True)


@pytest.mark.parametrize(("dim", "channels"), [(8, False), (8, True), (192, False)])
@pytest.mark.parametrize("shared", [1, 2])
def test_gradients_of_the_gated_delta_rule(shared, dim, channels):
    q, k, v = operands(shared=shared, dim=dim)
    heads = v.shape[2]
    g, beta = -torch.rand(2, 70, heads, dim) if channels else -torch.rand(2, 70, heads), torch.rand(2, 70, heads)
    state, d_o, d_state = torch.randn(2, heads, dim, 16), torch.randn(2, 70, heads, 16), torch.randn(2, heads, dim, 16)
    given = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}

    def exact(q, k, v, g, beta, state):
        unit = [x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k)]
        return delta_rule(*(x.repeat_interleave(shared, 2) for x in unit), v, g, beta, dim**-0.5, state)

    def ours(q, k, v, g, beta, state):
        function = fla.chunk_kda if channels else fla.chunk_gated_delta_rule
        return function(q, k, v, g, beta, initial_state=state, **given)

    results = []
    for function in (ours, exact):
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v, g, beta, state)]
        with torch.enable_grad():
            o, last = function(*inputs)
            ((o * d_o).sum() + (last * d_state).sum()).backward()
        results.append([x.grad for x in inputs])
    for got, wanted in zip(*results):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
