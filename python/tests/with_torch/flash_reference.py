"""What tests of FlashAttention's functions share: attention and rotary embedding in float64, written out here, and the devices and dtypes tried."""

import math

import pytest

torch = pytest.importorskip("torch")

from tilewave import flash_attn as fa2
from tilewave import flash_attn_interface as fa3

PLACES = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
if torch.cuda.is_available():
    PLACES += [("cuda", torch.bfloat16), ("cuda", torch.float16)]
ON_ALL = pytest.mark.parametrize("device, dtype", PLACES, ids=[f"{device}-{str(dtype)[6:]}" for device, dtype in PLACES])
VERSIONS = pytest.mark.parametrize("version", [fa2, fa3], ids=["fa2", "fa3"])


def normal(*shape, device="cpu", dtype=torch.float32):
    return torch.randn(shape).to(device, dtype)


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(lengths, device="cpu"):
    return ints([sum(lengths[:n]) for n in range(len(lengths) + 1)], device)


def positions_seen(seqlen_q, seqlen_k, causal, window, chunk=0):
    beside = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)[None, :]
    left, right = window
    right = 0 if causal else right
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= key >= beside - left
    if right >= 0:
        seen &= key <= beside + right
    if chunk > 0:
        seen &= key // chunk == beside // chunk
    return seen, beside, key


def attention(q, k, v, causal=False, window=(-1, -1), scale=None, softcap=0.0, slopes=None, rounded=None, chunk=0, qv=None):
    """out and lse (-inf where nothing is seen) of one sequence: q [seqlen_q, heads, dim]. In float64, or with every result in `rounded`."""
    exact = torch.float64 if rounded is None else torch.float32
    q, k, v = (x.detach().cpu().to(exact) for x in (q, k, v))

    def stored(x):
        return x if rounded is None else x.to(rounded).to(exact)

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    products, columns = torch.einsum("qhd,khd->hqk", q, k), q.shape[2]
    if qv is not None:
        products, columns = products + torch.einsum("qhd,khd->hqk", qv.detach().cpu().to(exact), v), columns + v.shape[2]
    scores = stored(products) * (columns**-0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    seen, beside, key = positions_seen(q.shape[0], k.shape[0], causal, window, chunk)
    if slopes is not None:
        scores = scores - slopes.cpu().to(exact)[:, None, None] * (beside - key).abs()
    scores = stored(scores).masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = stored(torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]))
    return stored(torch.einsum("hqk,khd->qhd", weights, v)), lse


def batched(q, k, v, slopes=None, qv=None, **rules):
    """attention() of each q[b], k[b], v[b]; slopes [heads] or [batch, heads]."""
    of = [
        attention(
            q[b],
            k[b],
            v[b],
            slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b],
            qv=None if qv is None else qv[b],
            **rules,
        )
        for b in range(len(q))
    ]
    return [out for out, _ in of], [lse for _, lse in of]


def ulp(magnitude, dtype):
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(magnitude)) if magnitude > 0 else 0.0


def check_out(out, wanted, naive):
    """max|out - wanted| <= 2 max|naive - wanted| + 2 ulp + 1e-5"""
    got = out.detach().cpu().double()
    assert got.shape == wanted.shape
    assert not got.isnan().any()
    if got.numel() == 0:
        return
    allowed = 2 * (naive.double() - wanted).abs().max() + 2 * ulp(wanted.abs().max().item(), out.dtype) + 1e-5
    assert (got - wanted).abs().max() <= allowed


def check_lse(lse, wanted):
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.cpu().double(), wanted, rtol=1e-5, atol=1e-3)  # infinities only where they are wanted


def unseen_as(version, lse):
    return lse.masked_fill(lse == -math.inf, math.inf if version is fa2 else -math.inf)


def turn(x, cos, sin, positions, interleaved):
    """Rotary embedding in float64 of x [tokens, heads, dim]."""
    x, cos, sin = x.cpu().double(), cos.cpu().double()[positions][:, None], sin.cpu().double()[positions][:, None]
    half = cos.shape[-1]
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    turned = x.clone()
    turned[..., first] = x[..., first] * cos - x[..., second] * sin
    turned[..., second] = x[..., first] * sin + x[..., second] * cos
    return turned


def rotary_tables(positions, rotary_dim, device, dtype):
    angles = torch.arange(positions)[:, None] * 10000.0 ** (-torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def same_call(version, result):
    """(out, lse) of what a function of that version returns with the probabilities asked for."""
    if version is fa2:
        out, lse, probabilities = result
        assert probabilities.shape == (0,) and probabilities.dtype == out.dtype and probabilities.device == out.device
        return out, lse
    return result


def as_arguments(rules):
    named = {"window": "window_size", "scale": "softmax_scale", "chunk": "attention_chunk"}
    return {named.get(name, name): value for name, value in rules.items()}
