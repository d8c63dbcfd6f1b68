"""Mamba-2 under autograd, and mamba_ssm's functions, against the recurrence in PyTorch's own operations."""

import pytest
import torch
import torch.nn.functional as F

from tilewave import mamba_ssm, ops


def recurrence(x, dt, A, B, C, D=None, z=None, dt_bias=None, states=None, begins=()):
    """(y, states), with softplus. D is [nheads, headdim]; a step in `begins` begins with a state of 0."""
    shared = x.shape[2] // B.shape[2]
    B, C = (array.repeat_interleave(shared, 2) for array in (B, C))
    dt = F.softplus(dt if dt_bias is None else dt + dt_bias)
    states = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3]) if states is None else states
    y = []
    for t in range(x.shape[1]):
        states = states * (0 if t in begins else torch.exp(dt[:, t] * A)[..., None, None])
        states = states + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        y.append((states * C[:, t, :, None, :]).sum(-1) + (0 if D is None else D * x[:, t]))
    y = torch.stack(y, 1)
    return y if z is None else y * F.silu(z), states


def operands(dtype=torch.float32, steps=70):
    torch.manual_seed(0)
    x, z = torch.randn(2, steps, 4, 8), torch.randn(2, steps, 4, 8)
    B, C = torch.randn(2, steps, 2, 16) / 4, torch.randn(2, steps, 2, 16)
    of_dtype = [array.to(dtype) for array in (x, torch.randn(2, steps, 4) - 1, B, C, z)]
    return *of_dtype[:2], -torch.rand(4) * 2, *of_dtype[2:4], torch.randn(4, 8), of_dtype[4], torch.randn(4), torch.randn(2, 4, 8, 16)


def doubled(arrays):
    return [array.detach().double() for array in arrays]


@pytest.mark.parametrize("per_head", [False, True])
def test_gradients(per_head):
    inputs = list(operands())
    if per_head:
        inputs[5] = inputs[5][:, 0].clone()
    weights = torch.randn(2, 70, 4, 8), torch.randn(2, 4, 8, 16)

    def run(function, arrays):
        arrays = [array.requires_grad_() for array in arrays]
        results = function(*arrays)
        return results, torch.autograd.grad(sum((result * weight).sum() for result, weight in zip(results, weights)), arrays)

    def ours(x, dt, A, B, C, D, z, dt_bias, states):
        given = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": True, "initial_states": states}
        return ops.mamba2(x, dt, A, B, C, **given, return_final_states=True)

    def exact(x, dt, A, B, C, D, z, dt_bias, states):
        return recurrence(x, dt, A, B, C, D[:, None] if per_head else D, z, dt_bias, states)

    wanted, of_exact = run(exact, doubled(inputs))
    got, of_ours = run(ours, inputs)
    for a, b in zip(got, wanted):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    for a, b in zip(of_ours, of_exact):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-3)


def test_gradients_of_few_inputs():
    x, dt, A, B, C, *_ = operands(torch.bfloat16)
    arrays = [array.requires_grad_() for array in (x, dt, A, B, C)]
    y = ops.mamba2(*arrays, dt_softplus=True)
    exact = [array.requires_grad_() for array in doubled(arrays)]
    wanted = recurrence(*exact)[0]
    for a, b, of in zip(
        torch.autograd.grad(y.float().square().sum(), arrays), torch.autograd.grad(wanted.square().sum(), exact), arrays
    ):
        assert a.dtype == of.dtype
        assert (a.double() - b).norm() <= 2e-2 * b.norm()


def test_mamba_chunk_scan_combined():
    x, dt, A, B, C, D, z, dt_bias, states = operands()
    exact = recurrence(*doubled((x, dt, A, B, C, D, z, dt_bias, states)))
    given = {"z": z, "dt_bias": dt_bias, "dt_softplus": True}
    got = mamba_ssm.mamba_chunk_scan_combined(x, dt, A, B, C, 256, D, initial_states=states, return_final_states=True, **given)
    for a, b in zip(got, exact):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)

    half = [array.bfloat16() for array in (x, dt, B, C)]
    y = mamba_ssm.mamba_chunk_scan_combined(half[0], half[1], A, half[2], half[3], 64, D.bfloat16(), **given)
    wanted = recurrence(*doubled((half[0], half[1], A, half[2], half[3], D.bfloat16(), z.bfloat16(), dt_bias)))[0]
    assert y.dtype == torch.bfloat16
    assert (y.double() - wanted).norm() <= 1e-2 * wanted.norm()

    one = [array[:1] for array in (x, dt, B, C)]
    seq_idx = torch.tensor([[0] * 20 + [1] * 50])
    packed = {"D": D, "z": z[:1], "dt_bias": dt_bias, "dt_softplus": True}
    exact = recurrence(*doubled((one[0], one[1], A, one[2], one[3], D, z[:1], dt_bias)), begins=(20,))
    first = recurrence(*doubled((one[0][:, :20], one[1][:, :20], A, one[2][:, :20], one[3][:, :20], D, z[:1, :20], dt_bias)))[1]
    y = mamba_ssm.mamba_chunk_scan_combined(one[0], one[1], A, one[2], one[3], 64, seq_idx=seq_idx, **packed)
    torch.testing.assert_close(y.double(), exact[0], rtol=1e-4, atol=1e-4)
    cu = {"cu_seqlens": torch.tensor([0, 20, 70]), "return_varlen_states": True}
    y, final, each = mamba_ssm.mamba_chunk_scan_combined(
        one[0], one[1], A, one[2], one[3], 64, seq_idx=seq_idx, return_final_states=True, **packed, **cu
    )
    torch.testing.assert_close(y.double(), exact[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final.double(), exact[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(each.double(), torch.cat([first, exact[1]]), rtol=1e-4, atol=1e-4)
    assert len(mamba_ssm.mamba_chunk_scan_combined(one[0], one[1], A, one[2], one[3], 64, **packed, **cu)) == 2
    with pytest.raises(ValueError, match="cu_seqlens is None"):
        mamba_ssm.mamba_chunk_scan_combined(x, dt, A, B, C, 64, return_varlen_states=True)
    with pytest.raises(NotImplementedError, match="initial_states"):
        mamba_ssm.mamba_chunk_scan_combined(*one[:2], A, *one[2:], 64, initial_states=states[:1], **cu)


@pytest.mark.parametrize("numbered", [False, True])
def test_the_five_steps(numbered):
    x, dt, A, B, C, D, z, dt_bias, states = operands(torch.bfloat16)
    seq_idx = torch.tensor([[0] * 20 + [1] * 28 + [2] * 22, [0] * 48 + [5] * 22]) if numbered else None
    given = {"dt_bias": dt_bias, "dt_softplus": True}
    sums, sizes = mamba_ssm._chunk_cumsum_fwd(dt, A, 48, **given)
    added = mamba_ssm._chunk_state_fwd(B, x, sizes, sums, seq_idx)
    passed, final = mamba_ssm._state_passing_fwd(
        added.flatten(3), sums[..., -1], initial_states=states.flatten(2), seq_idx=seq_idx, chunk_size=48, out_dtype=C.dtype
    )
    cb = mamba_ssm._bmm_chunk_fwd(C, B, 48, seq_idx, causal=True, output_dtype=torch.float32)
    y, ungated = mamba_ssm._chunk_scan_fwd(cb, x, sizes, sums, C, passed.unflatten(3, (8, 16)), D, z, seq_idx)
    for n, begins in enumerate(((20, 48), (48,))):
        one = doubled(array[n : n + 1] for array in (x, dt, B, C, z, states))
        wanted, last = recurrence(
            *one[:2], A.double(), *one[2:4], D.double(), one[4], dt_bias.double(), one[5], begins=begins if numbered else ()
        )
        assert (y[n].double() - wanted[0]).norm() <= 1e-2 * wanted.norm()
        assert (final[n].double().view(last[0].shape) - last[0]).norm() <= 1e-2 * last.norm()
        torch.testing.assert_close(ungated[n] * F.silu(z[n].float()), y[n].float(), rtol=2e-2, atol=2e-2)


def chunked(array, size=32):
    """[batch, seqlen, ...] as [batch, nchunks, size, ...], with zeros after the end."""
    padding = array.new_zeros(array.shape[0], -array.shape[1] % size, *array.shape[2:])
    return torch.cat([array, padding], 1).unflatten(1, (-1, size))


def cumsum_of(dt, A, dt_bias):
    sizes = chunked(F.softplus(dt + dt_bias).clamp(0.1, 0.4)).permute(0, 3, 1, 2)
    return (sizes * A[:, None, None]).cumsum(-1), sizes


def state_of(B, x, sizes, sums):
    wide = chunked(B).repeat_interleave(2, 3)
    return torch.einsum("bhcl,bclhp,bclhn->bchpn", torch.exp(sums[..., -1:] - sums) * sizes, chunked(x), wide)


def passing_of(added, decays, states):
    passed = []
    for chunk in range(added.shape[1]):
        passed.append(states)
        states = states * torch.exp(decays[:, :, chunk, None, None]) + added[:, chunk]
    return torch.stack(passed, 1), states


def scan_of(CB, x, sizes, sums, C, states, D, z):
    wide, decays = CB.repeat_interleave(2, 2), (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()
    y = torch.einsum("bchls,bhcls,bhcs,bcshp->bclhp", wide, decays, sizes, chunked(x))
    y = y + torch.einsum("bhcl,bclhn,bchpn->bclhp", sums.exp(), chunked(C).repeat_interleave(2, 3), states)
    return (y.flatten(1, 2)[:, : x.shape[1]] + D * x) * F.silu(z)


STEPS = {
    "cumsum": (lambda *a: ops.mamba2_chunk_cumsum(*a[:2], 32, dt_bias=a[2], dt_softplus=True, dt_limit=(0.1, 0.4)), cumsum_of),
    "state": (ops.mamba2_chunk_state, state_of),
    "passing": (lambda *a: ops.mamba2_state_passing(*a[:2], initial_states=a[2], dtype="bfloat16"), passing_of),
    "products": (
        lambda *a: ops.mamba2_bmm_chunk(*a, 32),
        lambda C, B: torch.einsum("bclgn,bcsgn->bcgls", chunked(C), chunked(B)),
    ),
    "causal products": (
        lambda *a: ops.mamba2_bmm_chunk(*a, 32, causal=True),
        lambda C, B: torch.einsum("bclgn,bcsgn->bcgls", chunked(C), chunked(B)).tril(),
    ),
    "scan": (lambda *a: ops.mamba2_chunk_scan(*a[:6], D=a[6], z=a[7]), scan_of),
}


@pytest.mark.parametrize("step", STEPS)
def test_gradients_of_each_step(step):
    x, dt, A, B, C, D, z, dt_bias, states = operands(torch.bfloat16)
    sums, sizes = ops.mamba2_chunk_cumsum(dt, A, 32, dt_bias=dt_bias, dt_softplus=True)
    added = ops.mamba2_chunk_state(B, x, sizes, sums)
    passed, _ = ops.mamba2_state_passing(added, sums[..., -1], initial_states=states, dtype="bfloat16")
    inputs = {
        "cumsum": (dt, A, dt_bias),
        "state": (B, x, sizes, sums),
        "passing": (added, sums[..., -1], states),
        "scan": (ops.mamba2_bmm_chunk(C, B, 32), x, sizes, sums, C, passed, D, z),
    }.get(step, (C, B))
    arrays = [array.detach().requires_grad_() for array in inputs]
    exact = [array.requires_grad_() for array in doubled(inputs)]
    results, wanted = (given if isinstance(given, tuple) else (given,) for given in (STEPS[step][0](*arrays), STEPS[step][1](*exact)))
    weights = [torch.randn(result.shape) for result in wanted]

    def gradients(results, arrays):
        return torch.autograd.grad(sum((result * weight.to(result.dtype)).sum() for result, weight in zip(results, weights)), arrays)

    for a, b, of in zip(gradients(results, arrays), gradients(wanted, exact), arrays):
        assert a.dtype == of.dtype and a.shape == of.shape
        assert (a.double() - b).norm() <= 1e-2 * b.norm()


def test_gradients_of_the_steps_in_a_row_are_those_of_mamba2():
    inputs = operands(torch.bfloat16)
    dy = torch.randn(2, 70, 4, 8)

    def in_steps(x, dt, A, B, C, D, z, dt_bias, states):
        sums, sizes = ops.mamba2_chunk_cumsum(dt, A, 48, dt_bias=dt_bias, dt_softplus=True)
        added = ops.mamba2_chunk_state(B, x, sizes, sums)
        passed, final = ops.mamba2_state_passing(added, sums[..., -1], initial_states=states, dtype="bfloat16")
        y, ungated = ops.mamba2_chunk_scan(
            ops.mamba2_bmm_chunk(C, B, 48, causal=True), x, sizes, sums, C, passed, D=D, z=z, return_ungated=True
        )
        assert not ungated.requires_grad
        return y, final

    def fused(x, dt, A, B, C, D, z, dt_bias, states):
        given = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": True, "initial_states": states}
        return ops.mamba2(x, dt, A, B, C, **given, return_final_states=True)

    def by_mamba_ssm(x, dt, A, B, C, D, z, dt_bias, states):
        sums, sizes = mamba_ssm._chunk_cumsum_fwd(dt, A, 48, dt_bias=dt_bias, dt_softplus=True)
        added = mamba_ssm._chunk_state_fwd(B, x, sizes, sums)
        passed, final = mamba_ssm._state_passing_fwd(added.flatten(3), sums[..., -1], states.flatten(2), out_dtype=C.dtype)
        cb = mamba_ssm._bmm_chunk_fwd(C, B, 48, causal=True, output_dtype=torch.float32)
        return mamba_ssm._chunk_scan_fwd(cb, x, sizes, sums, C, passed.unflatten(3, (8, 16)), D, z)[0], final.view(states.shape)

    def gradients(function, arrays):
        arrays = [array.detach().requires_grad_() for array in arrays]
        y, final = function(*arrays)
        return torch.autograd.grad((y * dy.to(y.dtype)).sum() + final.square().sum() / 8, arrays)

    exact = gradients(recurrence, doubled(inputs))
    for function in (in_steps, by_mamba_ssm, fused):
        for a, b in zip(gradients(function, inputs), exact):
            assert (a.double() - b).norm() <= 1e-2 * b.norm()
    for a, b in zip(gradients(in_steps, inputs), gradients(fused, inputs)):
        assert (a.double() - b.double()).norm() <= 1e-2 * b.double().norm()


def test_gradients_of_the_steps_compiled():
    torch._dynamo.reset()
    x, dt, A, B, C, D, z, dt_bias, states = operands(torch.bfloat16)
    arrays = [array.requires_grad_() for array in (B, x)]
    sums, sizes = ops.mamba2_chunk_cumsum(dt, A, 32, dt_bias=dt_bias, dt_softplus=True)
    function = lambda *a: ops.mamba2_chunk_state(*a, sizes, sums).square().sum()  # noqa: E731
    wanted = torch.autograd.grad(function(*arrays), arrays)
    got = torch.autograd.grad(torch.compile(function, fullgraph=True, backend="aot_eager")(*arrays), arrays)
    for a, b in zip(got, wanted):
        assert torch.equal(a, b)


def test_the_five_steps_have_mamba_ssms_dtypes():
    x, dt, A, B, C, D, *_ = operands(torch.bfloat16)
    sums, sizes = mamba_ssm._chunk_cumsum_fwd(dt, A.bfloat16(), 64)
    added = mamba_ssm._chunk_state_fwd(B, x, sizes, sums, states_in_fp32=False)
    assert added.dtype == torch.bfloat16 and added.shape == (2, 2, 4, 8, 16)
    memory = torch.empty_like(added, dtype=torch.float32)
    assert mamba_ssm._chunk_state_fwd(B, x, sizes, sums, states=memory) is memory
    torch.testing.assert_close(memory.bfloat16(), added)
    passed, final = mamba_ssm._state_passing_fwd(added.flatten(3), sums[..., -1])
    assert passed.dtype == torch.bfloat16 and passed.shape == (2, 2, 4, 128) and final.dtype == torch.float32
    cb, of_one = mamba_ssm._bmm_chunk_fwd(C, B, 64), mamba_ssm._bmm_chunk_fwd(C[:, :, 1], B[:, :, 1], 64)
    assert cb.dtype == torch.bfloat16
    torch.testing.assert_close(of_one, cb[:, :, 1])
    assert mamba_ssm._chunk_scan_fwd(cb, x, sizes, sums, C, passed.unflatten(3, (8, 16)), D)[1] is None
    with pytest.raises(ValueError, match="chunk_size is None"):
        mamba_ssm._state_passing_fwd(added.flatten(3), sums[..., -1], seq_idx=torch.zeros(2, 70))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selective_state_update(dtype):
    x, dt, A, B, C, D, z, dt_bias, states = operands(dtype, steps=1)
    exact = recurrence(*doubled((x, dt, A, B, C, D, z, dt_bias, states)))

    def expanded():
        return (
            x[:, 0],
            dt[:, 0, :, None].expand(2, 4, 8),
            A[:, None, None].expand(4, 8, 16),
            B[:, 0],
            C[:, 0],
            D.to(dtype),
            z[:, 0],
            dt_bias[:, None].expand(4, 8),
        )

    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    state = states.clone()
    y = mamba_ssm.selective_state_update(state, *expanded(), dt_softplus=True)
    assert y.dtype == dtype and y.shape == (2, 4, 8)
    assert (y.double() - exact[0][:, 0]).norm() <= tolerance * exact[0].norm()
    assert (state.double() - exact[1]).norm() <= 1e-5 * exact[1].norm()
    pool = torch.stack([states[1], torch.full_like(states[0], 7), states[0]])
    y = mamba_ssm.selective_state_update(pool, *expanded(), dt_softplus=True, state_batch_indices=torch.tensor([2, -1]))
    assert (y[0].double() - exact[0][0, 0]).norm() <= tolerance * exact[0].norm()
    assert (pool[2].double() - exact[1][0]).norm() <= 1e-5 * exact[1].norm()
    assert torch.equal(pool[:2], torch.stack([states[1], torch.full_like(states[0], 7)]))
    own = list(expanded())
    own[2] = own[2].contiguous()
    with pytest.raises(NotImplementedError, match="A is .*with a stride of 16 in dimension -2"):
        mamba_ssm.selective_state_update(state, *own)
    with pytest.raises(NotImplementedError, match=r"state \[2, 8, 16\]"):
        mamba_ssm.selective_state_update(state[:, 0], *expanded())
