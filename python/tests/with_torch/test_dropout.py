"""Dropout of attention's weights under PyTorch: its generator, autograd, compiled functions, and the functions that offer it."""

import pytest

torch = pytest.importorskip("torch")

import tilewave
import torch.nn.functional as F
from flash_reference import PLACES
from tilewave import flash_attn as fa2
from tilewave import ops

P, KEPT = 0.25, 0.75
ON_ALL = pytest.mark.parametrize("device, dtype", PLACES, ids=[f"{device}-{str(dtype)[6:]}" for device, dtype in PLACES])
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 8e-2}


@pytest.fixture(autouse=True)
def clean():
    torch.compiler.reset()
    yield
    tilewave.uninstall_sdpa()


def inputs(device, dtype, seqlen_q=33, seqlen_k=70):
    return [torch.randn(2, rows, 4, 32).to(device, dtype).requires_grad_() for rows in (seqlen_q, seqlen_k, seqlen_k)]


def dropped(q, k, v, kept):
    """From the definition, in float64; q, k, v: [batch, seqlen, heads, head_dim]."""
    weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5, -1)
    return torch.einsum("bhij,bjhd->bihd", weights * kept / KEPT, v)


def gradients(out, inputs, weights):
    return torch.autograd.grad(out, inputs, weights.to(out.dtype))


@ON_ALL
def test_gradients_are_those_of_the_mask(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("float32 has no backward on CUDA")
    qkv = inputs(device, dtype)
    o, _, signs = fa2.flash_attn_func(*qkv, P, return_attn_probs=True)
    assert signs.shape == (2, 4, 33, 70) and set(signs.unique().tolist()) == {-1.0, 1.0}
    doubles = [x.detach().double().requires_grad_() for x in qkv]
    wanted = dropped(*doubles, (signs > 0).double())
    weights = torch.randn(o.shape, device=device)
    for got, exact in zip([o, *gradients(o, qkv, weights)], [wanted, *gradients(wanted, doubles, weights)]):
        torch.testing.assert_close(got.double(), exact, rtol=0, atol=TOLERANCE[dtype] * max(1, exact.abs().max().item() / 4))


@ON_ALL
def test_packed_sequences_drop_by_their_own_positions(device, dtype):
    lengths = (5, 33, 0, 18)
    offsets = torch.tensor([0, 5, 38, 38, 56], dtype=torch.int32, device=device)
    q, k, v = (torch.randn(56, 4, 32).to(device, dtype) for _ in range(3))
    o, _, signs = fa2.flash_attn_varlen_func(q, k, v, offsets, offsets, 33, 33, P, return_attn_probs=True)
    assert signs.shape == (4, 4, 33, 33)
    for b, length in enumerate(lengths):
        rows = slice(offsets[b], offsets[b + 1])
        wanted = dropped(*(x[None, rows].double() for x in (q, k, v)), (signs[b : b + 1, :, :length, :length] > 0).double())
        torch.testing.assert_close(o[None, rows].double(), wanted, rtol=0, atol=TOLERANCE[dtype])


@ON_ALL
def test_the_generator_of_the_device_draws(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("scaled_dot_product_attention in float32 on CUDA is PyTorch's")
    q, k, v = (x.detach().transpose(1, 2) for x in inputs(device, dtype))
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(tilewave.scaled_dot_product_attention(q, k, v, dropout_p=P))
        assert tilewave.why_fallback() is None
    results.append(tilewave.scaled_dot_product_attention(q, k, v, dropout_p=P))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2]) and not torch.equal(results[2], results[3])


def test_the_mean_is_that_without_dropout():
    q, k, v = (x.detach().transpose(1, 2) for x in inputs("cpu", torch.float32, 4, 300))
    mean = sum(tilewave.scaled_dot_product_attention(q, k, v, dropout_p=0.5) for _ in range(400)) / 400
    torch.testing.assert_close(mean, F.scaled_dot_product_attention(q, k, v), rtol=0, atol=0.05)


def test_compiled_functions_drop():
    q, k, v = inputs("cpu", torch.float32)

    def loss(q, k, v):
        return ops.attention(q, k, v, dropout=P).square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.manual_seed(3)
    first = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    torch.manual_seed(3)
    again = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for a, b in zip(first, again):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    other = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    assert not torch.equal(first[0], other[0])


def test_refusals():
    q, k, v = inputs("cpu", torch.float32)
    with pytest.raises(ValueError, match="dropout is 1"):
        ops.attention(q.detach(), k.detach(), v.detach(), dropout=1.0)
    with pytest.raises(NotImplementedError, match="dropout_p with a block_table"):
        pages = torch.zeros(2, 1, dtype=torch.int32)
        cache = torch.randn(2, 16, 4, 32)
        offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
        fa2.flash_attn_varlen_func(torch.randn(2, 4, 32), cache, cache, offsets, offsets, 1, 1, 0.1, block_table=pages)
    state = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"dropout_state is i64\[3\]"):
        ops.attention(q.detach(), k.detach(), v.detach(), dropout=0.1, dropout_state=state)
