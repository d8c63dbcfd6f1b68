"""tilewave.nsa, with flash-linear-attention's names, against PyTorch's own operations and autograd."""

import pytest

torch = pytest.importorskip("torch")

import tilewave.ops as ops  # noqa: E402
from tilewave import nsa  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def tensors(device, tokens, heads=2, group=16, dim=64, value_dim=32, dtype=torch.bfloat16):
    shapes = (tokens, heads * group, dim), (tokens, heads, dim), (tokens, heads, value_dim)
    return [torch.randn(1, *shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def gates(device, tokens, heads):
    return [torch.rand(1, tokens, heads, device=device).requires_grad_() for _ in range(3)]


def masked(q, k, v, visible, scale=None):
    """Attention in f64: visible [tokens, heads of k, keys]. (o, lse), 0 and -inf where a query sees nothing."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x[0].double() for x in (q, k, v))
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,khd->thk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~visible.repeat_interleave(group, 1), float("-inf"))
    some = visible.any(-1).repeat_interleave(group, 1)
    weights = torch.where(some[..., None], scores, torch.zeros_like(scores)).softmax(-1) * some[..., None]
    return torch.einsum("thk,khd->thd", weights, v)[None], scores.logsumexp(-1)[None]


def positions(bounds, device):
    return torch.cat([torch.arange(end - begin, device=device) for begin, end in zip(bounds, bounds[1:])])


def blocks_visible(block_indices, counts, bounds, block_size):
    """[tokens, heads, keys]"""
    _, tokens, heads, slots = block_indices.shape
    visible = torch.zeros(tokens, heads, tokens, dtype=torch.bool)
    for begin, end in zip(bounds, bounds[1:]):
        for t in range(begin, end):
            for h in range(heads):
                listed = block_indices[0, t, h].tolist()[: slots if counts is None else int(counts[0, t, h])]
                for b in listed:
                    if b >= 0:
                        visible[t, h, begin + b * block_size : max(min(begin + (b + 1) * block_size, t + 1), begin + b * block_size)] = True
    return visible.to(block_indices.device)


def close(got, wanted, tolerance=2e-2):
    assert torch.isfinite(got).all()
    error = (got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-9)
    assert error < tolerance, error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bounds", [(0, 150), (0, 37, 37, 150)])
def test_all_branches(device, bounds):
    """With gradients, of blocks that are selected from the compressed keys."""
    torch.manual_seed(1)
    tokens, block, window = bounds[-1], 32, 40
    q, k, v = tensors(device, tokens)
    g = gates(device, tokens, q.shape[2])
    cu_seqlens = None if len(bounds) == 2 else torch.tensor(bounds, device=device)
    o = nsa.parallel_nsa(q, k, v, *g, block_counts=3, block_size=block, window_size=window, cu_seqlens=cu_seqlens)
    assert o.shape == v.shape[:2] + (q.shape[2], v.shape[3]) and o.dtype == q.dtype

    k_cmp, v_cmp = (nsa.mean_pooling(x, block, cu_seqlens) for x in (k, v))
    o_cmp, lse = nsa.parallel_nsa_compression(q, k_cmp, v_cmp, block, None, cu_seqlens)
    lists = nsa.parallel_nsa_topk(q, k_cmp, lse, 3, block, None, cu_seqlens)
    assert torch.equal(lists, nsa.parallel_nsa_topk(q, k_cmp, None, 3, block, None, cu_seqlens))
    at = positions(bounds, device)
    own = (at // block)[None, :, None].expand(1, tokens, 2)
    assert torch.equal(lists[..., 0], own.int())
    assert (lists[0][at >= block] == 0).any(-1).all()

    doubles = [x.detach().double().requires_grad_() for x in (q, k, v, *g)]
    dq, dk, dv, g_cmp, g_slc, g_swa = doubles
    means = [nsa.mean_pooling(x, block, cu_seqlens) for x in (dk, dv)]
    first = [sum((end - begin + block - 1) // block for begin, end in zip(bounds[:n], bounds[1:])) for n in range(len(bounds))]
    key = torch.arange(means[0].shape[1], device=device)
    sequence = torch.cat([torch.full((end - begin,), n) for n, (begin, end) in enumerate(zip(bounds, bounds[1:]))]).to(device)
    begin_k = torch.tensor(first, device=device)[sequence]
    visible = (key[None] >= begin_k[:, None]) & ((key[None] - begin_k[:, None] + 1) * block <= at[:, None] + 1)
    of_cmp, of_lse = masked(dq, *means, visible[:, None].expand(-1, 2, -1))
    seen = torch.isfinite(of_lse)
    assert torch.equal(torch.isfinite(lse), seen) and (lse[seen] - of_lse[seen]).abs().max() < 2e-2
    close(o_cmp, of_cmp)
    of_slc, _ = masked(dq, dk, dv, blocks_visible(lists, None, bounds, block))
    t = torch.arange(tokens, device=device)
    in_window = (t[:, None] >= t[None]) & (t[:, None] - t[None] < window) & (sequence[:, None] == sequence[None])
    of_swa, _ = masked(dq, dk, dv, in_window[:, None].expand(-1, 2, -1))
    wanted = g_cmp[..., None] * of_cmp + g_slc[..., None] * of_slc + g_swa[..., None] * of_swa
    close(o, wanted)

    d_o = torch.randn_like(wanted)
    wanted.backward(d_o)
    o.backward(d_o.to(o.dtype))
    for got, expected in zip((q, k, v, *g), doubles):
        close(got.grad, expected.grad, 3e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_given_blocks(device):
    """Without compressed keys, with a count for each token, duplicates and entries that name no block."""
    torch.manual_seed(2)
    tokens, block = 130, 64
    q, k, v = tensors(device, tokens, group=4)
    g_slc = torch.rand(1, tokens, 8, device=device)
    lists = torch.randint(-1, 4, (1, tokens, 2, 5), device=device)
    counts = torch.randint(0, 6, (1, tokens, 2), device=device)
    o = nsa.parallel_nsa(q, k, v, None, g_slc, None, lists, counts, block)
    wanted, _ = masked(q, k, v, blocks_visible(lists, counts, (0, tokens), block))
    close(o, g_slc[..., None] * wanted)
    first = nsa.parallel_nsa(q, k, v, None, g_slc, None, lists, 2, block, scale=0.2)
    wanted, _ = masked(q, k, v, blocks_visible(lists[..., :2], None, (0, tokens), block), 0.2)
    close(first, g_slc[..., None] * wanted)
    turned = [x.transpose(1, 2) for x in (q, k, v, g_slc, lists, counts)]
    swapped = nsa.parallel_nsa(*turned[:3], None, turned[3], None, turned[4], turned[5], block, head_first=True)
    assert torch.equal(swapped.transpose(1, 2), o)


@pytest.mark.parametrize("device", DEVICES)
def test_decoding(device):
    """A token of each sequence gives what the whole sequence gave."""
    torch.manual_seed(3)
    tokens, block = 200, 64
    q, k, v = (x.detach() for x in tensors(device, tokens))
    k_cmp, v_cmp = nsa.mean_pooling(k, block), nsa.mean_pooling(v, block)
    o_cmp, lse = nsa.parallel_nsa_compression(q, k_cmp, v_cmp, block)
    lists = nsa.parallel_nsa_topk(q, k_cmp, lse, 3, block)
    o = ops.nsa_selected(q, k, v, lists, block_size=block)
    seqlens = torch.tensor([1, 64, 130, 200], dtype=torch.int32, device=device)
    of_token = [x[0, seqlens.long() - 1].unsqueeze(1) for x in (q, lists, o, o_cmp, lse)]
    caches = [x.expand(4, *x.shape[1:]).contiguous() for x in (k, v, k_cmp, v_cmp)]
    one, one_lse = ops.nsa_compressed(of_token[0], *caches[2:], block_size=block, seqlens=seqlens, return_lse=True)
    close(one, of_token[3], 1e-2)
    assert torch.equal(ops.nsa_select(of_token[0], caches[2], one_lse, 3, block_size=block, seqlens=seqlens), of_token[1])
    close(ops.nsa_selected(of_token[0], *caches[:2], of_token[1], block_size=block, seqlens=seqlens), of_token[2], 1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(device):
    """One graph without breaks, forward and backward."""
    torch.manual_seed(4)
    q, k, v = tensors(device, 96)
    g = gates(device, 96, q.shape[2])
    run = lambda *x: nsa.parallel_nsa(*x, block_counts=2, block_size=32, window_size=16)  # noqa: E731
    eager = run(q, k, v, *g)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v, *g)
    close(compiled, eager.detach(), 1e-2)
    d_o = torch.randn_like(eager)
    wanted = torch.autograd.grad(eager, (q, k, v, *g), d_o)
    for got, expected in zip(torch.autograd.grad(compiled, (q, k, v, *g), d_o), wanted):
        close(got, expected, 1e-2)


def test_gradients_are_deterministic():
    torch.manual_seed(5)
    device = DEVICES[-1]
    q, k, v = tensors(device, 300)
    lists = torch.randint(0, 10, (1, 300, 2, 4), device=device, dtype=torch.int32)
    o, lse = ops.nsa_selected(q.detach(), k.detach(), v.detach(), lists, block_size=32, return_lse=True)
    d_o = torch.randn_like(o)
    run = lambda: ops.nsa_selected_backward(q.detach(), k.detach(), v.detach(), lists, o, lse, d_o, block_size=32)  # noqa: E731
    first = run()
    for _ in range(3):
        for x, y in zip(first, run()):
            assert torch.equal(x, y)


def test_what_is_refused():
    q, k, v = tensors("cpu", 40)
    g = gates("cpu", 40, q.shape[2])
    for call, message in (
        (lambda: nsa.parallel_nsa(q, k, v, *g, block_counts=None), "block_counts is None"),
        (lambda: nsa.parallel_nsa(q, k, v, None, *g[1:]), "g_cmp and block_indices"),
        (lambda: nsa.parallel_nsa(q, k, v, *g, block_size=48), "block_size is 48"),
        (lambda: nsa.parallel_nsa(q, k, v, *g, block_size=0), "block_size is 0|modulo|division"),
        (lambda: ops.nsa_combine((q,), (None,)), "outputs or gates are missing"),
        (lambda: ops.nsa_select(q, k, g[0], 257), "slots is 257"),
        (lambda: ops.nsa_selected(q, k, v, torch.zeros(1, 40, 2, 1, dtype=torch.int32), scale=-1.0), "scale is -1.0"),
    ):
        with pytest.raises((ValueError, ZeroDivisionError, RuntimeError), match=message):
            call()
    with pytest.raises(TypeError, match="PyTorch tensors are taken"):
        nsa.mean_pooling([1.0], 32)
    caches = torch.tensor([40], dtype=torch.int32)
    o = ops.nsa_selected(q, k, v, torch.zeros(1, 40, 2, 1, dtype=torch.int32), seqlens=caches)
    with pytest.raises(NotImplementedError, match="seqlens is given"):
        o.sum().backward()
