"""FlashMLA's functions against attention in float64, on the CPU and on CUDA."""

import pytest

torch = pytest.importorskip("torch")

from tilewave import flash_mla  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def attention(q, kv, scale, causal):
    """One sequence in float64: q [seqlen_q, heads, 576], kv [tokens, 576]."""
    scores = torch.einsum("shd,td->hst", q.double(), kv.double()) * scale
    if causal:
        positions = torch.arange(len(q), device=q.device)[:, None] + len(kv) - len(q)
        scores = scores.masked_fill(torch.arange(len(kv), device=q.device)[None] > positions, -float("inf"))
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    lse = torch.logsumexp(scores, -1)
    return torch.einsum("hst,td->shd", weights, kv.double()[:, :512]), lse.masked_fill(lse == -float("inf"), float("inf"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [64, 1])
def test_flash_mla_with_kvcache(device, causal, page_size):
    torch.manual_seed(1)
    lengths, seqlen_q, heads = [70, 1, 0, 130], 2, 16
    pages_each = -(-130 // page_size)
    q = torch.randn(len(lengths), seqlen_q, heads, 576).to(device, torch.bfloat16)
    k_cache = torch.full((len(lengths) * pages_each + 1, page_size, 1, 576), float("nan")).to(device, torch.bfloat16)
    block_table = torch.randperm(len(k_cache))[: len(lengths) * pages_each].reshape(len(lengths), pages_each).to(device, torch.int32)
    tokens = [torch.randn(n, 576).to(device, torch.bfloat16) for n in lengths]
    for b, kv in enumerate(tokens):
        for t in range(len(kv)):
            k_cache[block_table[b, t // page_size], t % page_size, 0] = kv[t]
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    metadata, num_splits = flash_mla.get_mla_metadata(cache_seqlens, seqlen_q * heads, 1)
    assert metadata.dtype == num_splits.dtype == torch.int32 and num_splits.shape == (len(lengths) + 1,)
    o, lse = flash_mla.flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, metadata, num_splits, causal=causal)
    assert o.shape == (len(lengths), seqlen_q, heads, 512) and o.dtype == torch.bfloat16
    for b, kv in enumerate(tokens):
        wanted, wanted_lse = attention(q[b], kv, 576**-0.5, causal)
        torch.testing.assert_close(o[b].double(), wanted, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[b].double(), wanted_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_cache_of_8_bits(device):
    torch.manual_seed(2)
    length, heads = 100, 16
    q = torch.randn(1, 1, heads, 576).to(device, torch.bfloat16)
    codes, scales = torch.randn(2, 64, 512).to(torch.float8_e4m3fn), torch.rand(2, 64, 4) + 0.5
    rotary = torch.randn(2, 64, 64).to(torch.bfloat16)
    k_cache = torch.cat([codes.view(torch.uint8), scales.view(torch.uint8), rotary.view(torch.uint8)], dim=-1)[:, :, None].to(device)
    widened = (codes.float().reshape(2, 64, 4, 128) * scales[..., None]).reshape(2, 64, 512).to(torch.bfloat16)
    kv = torch.cat([widened, rotary], dim=-1).flatten(0, 1)[:length].to(device)
    block_table = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    cache_seqlens = torch.tensor([length], dtype=torch.int32, device=device)
    wanted, wanted_lse = attention(q[0], kv, 576**-0.5, False)
    for cache in (k_cache, k_cache.view(torch.float8_e4m3fn)):
        o, lse = flash_mla.flash_mla_with_kvcache(q, cache, block_table, cache_seqlens, 512, None, None, is_fp8_kvcache=True)
        torch.testing.assert_close(o[0].double(), wanted, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[0].double(), wanted_lse, rtol=0, atol=1e-3)


def listed_attention(q, kv, lists, scale, sink=None):
    """In float64: q [tokens, heads, 576], and rows of kv for each token, as lists; out, max_logits and lse as flash_mla_sparse_fwd()."""
    out, max_logits, lse = [], [], []
    for of_token, rows in zip(q.double(), lists):
        scores = of_token @ kv[rows].double().T * scale
        total = torch.logsumexp(scores, -1)
        with_sink = total if sink is None else torch.logaddexp(total, sink.double())
        out.append(torch.exp(scores - with_sink[:, None]) @ kv[rows].double()[:, :512])
        max_logits.append(scores.amax(-1) if rows else total)
        lse.append(total.masked_fill(total == -float("inf"), float("inf")))
    return torch.stack(out), torch.stack(max_logits), torch.stack(lse)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_sink", [False, True])
def test_flash_mla_sparse_fwd(device, with_sink):
    torch.manual_seed(3)
    tokens, heads, topk, s_kv = 5, 16, 70, 200
    q, kv = (torch.randn(*shape, 576).to(device, torch.bfloat16) for shape in ((tokens, heads), (s_kv, 1)))
    indices = torch.randint(-20, s_kv + 20, (tokens, 1, topk), dtype=torch.int32, device=device)
    lengths = [topk, 64, 1, 0, 33]
    indices[2, 0, 0] = -1
    lists = [[i for i in row[0][:n] if 0 <= i < s_kv] for row, n in zip(indices.tolist(), lengths)]
    sink = torch.randn(heads, device=device) if with_sink else None
    got = flash_mla.flash_mla_sparse_fwd(
        q, kv, indices, 0.05, attn_sink=sink, topk_length=torch.tensor(lengths, dtype=torch.int32, device=device)
    )
    for result, wanted, tolerance in zip(got, listed_attention(q, kv[:, 0], lists, 0.05, sink), (1e-2, 1e-3, 1e-3)):
        torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fp8", [False, True])
def test_indices_of_a_cache(device, fp8):
    torch.manual_seed(4)
    batch, seqlen_q, heads, topk, pages, page_size = 3, 2, 16, 70, 4, 64
    q = torch.randn(batch, seqlen_q, heads, 576).to(device, torch.bfloat16)
    kv = torch.randn(pages, page_size, 1, 576).to(device, torch.bfloat16)
    k_cache = kv
    if fp8:
        codes = kv[..., :512].to(torch.float8_e4m3fn)
        scales = torch.ones(pages, page_size, 1, 4, device=device)
        k_cache = torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scales, kv[..., 512:])], dim=-1)
        kv = torch.cat([codes.to(torch.bfloat16), kv[..., 512:]], dim=-1)
    indices = torch.randint(-20, pages * page_size, (batch, seqlen_q, topk), dtype=torch.int32, device=device)
    lengths, sink = [topk, 0, 40], torch.randn(heads, device=device)
    lists = [[i for i in row[: lengths[n // seqlen_q]] if i >= 0] for n, row in enumerate(indices.flatten(0, 1).tolist())]
    metadata, _ = flash_mla.get_mla_metadata(torch.zeros(batch, dtype=torch.int32, device=device), seqlen_q * heads, 1, heads, fp8, topk)
    o, lse = flash_mla.flash_mla_with_kvcache(
        q,
        k_cache,
        None,
        None,
        512,
        metadata,
        is_fp8_kvcache=fp8,
        indices=indices,
        attn_sink=sink,
        topk_length=torch.tensor(lengths, dtype=torch.int32, device=device),
    )
    wanted, _, wanted_lse = listed_attention(q.flatten(0, 1), kv.flatten(0, 2), lists, 576**-0.5, sink)
    torch.testing.assert_close(o.flatten(0, 1).double(), wanted, rtol=1e-2, atol=1e-2)
    assert lse.shape == (batch, heads, seqlen_q)
    torch.testing.assert_close(lse.transpose(1, 2).flatten(0, 1).double(), wanted_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_flash_mla_sparse_fwd(device):
    torch.manual_seed(3)
    q, kv, d_out = (torch.randn(*shape, device=device).bfloat16() for shape in ((5, 4, 576), (12, 1, 576), (5, 4, 512)))
    q.requires_grad_(), kv.requires_grad_()
    lists = torch.randint(-1, 14, (5, 1, 9), dtype=torch.int32, device=device)
    lengths = torch.tensor([9, 4, 1, 9, 6], dtype=torch.int32, device=device)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, kv, lists, 0.05, topk_length=lengths)
    assert not max_logits.requires_grad and not lse.requires_grad
    got = torch.autograd.grad(out, (q, kv), d_out)
    exact_q, exact_kv = (x.detach().double().requires_grad_() for x in (q, kv))
    rows = [[n for n in lists[i, 0, : lengths[i]].tolist() if 0 <= n < 12] for i in range(5)]
    outs = [
        (0.05 * exact_q[i] @ exact_kv[n, 0].T).softmax(-1) @ exact_kv[n, 0, :512] if n else torch.zeros(4, 512, device=device).double()
        for i, n in enumerate(rows)
    ]
    wanted = torch.autograd.grad(torch.stack(outs), (exact_q, exact_kv), d_out.double())
    for x, y in zip(got, wanted):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x.double(), y, atol=2e-2 * y.abs().max().item(), rtol=2e-2)
    with pytest.raises(NotImplementedError, match="sink is given"):
        flash_mla.flash_mla_sparse_fwd(q, kv, lists, 0.05, attn_sink=torch.zeros(4, device=device))[0].sum().backward()


def test_unsupported():
    lengths = torch.tensor([3], dtype=torch.int32)
    q, cache, table = torch.zeros(1, 1, 4, 576), torch.zeros(1, 64, 2, 576), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="num_heads_k is 2"):
        flash_mla.get_mla_metadata(lengths, 4, 2)
    with pytest.raises(NotImplementedError, match="head_dim_v is 256"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 256, None, None)
    with pytest.raises(NotImplementedError, match=r"k_cache.shape\[2\] is 2"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, lengths, 512, None, None)
    one_head, lists = cache[:, :, :1], torch.zeros(1, 1, 8, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="extra_k_cache is given"):
        flash_mla.flash_mla_with_kvcache(q, one_head, None, None, 512, None, indices=lists, extra_k_cache=one_head)
    with pytest.raises(NotImplementedError, match="attn_sink is given without indices"):
        flash_mla.flash_mla_with_kvcache(q, one_head, table, lengths, 512, None, attn_sink=torch.zeros(4))
    with pytest.raises(ValueError, match="causal is True"):
        flash_mla.flash_mla_with_kvcache(q, one_head, None, None, 512, None, causal=True, indices=lists)
    with pytest.raises(ValueError, match="indices has shape"):
        flash_mla.flash_mla_with_kvcache(q, one_head, None, None, 512, None, indices=lists[0])
    with pytest.raises(ValueError, match="block_table or cache_seqlens is None"):
        flash_mla.flash_mla_with_kvcache(q, one_head, None, None, 512, None)
    with pytest.raises(NotImplementedError, match="d_v is 256"):
        flash_mla.flash_mla_sparse_fwd(q[0], one_head[0], lists, 0.1, d_v=256)
    with pytest.raises(NotImplementedError, match=r"kv.shape\[1\] is 2"):
        flash_mla.flash_mla_sparse_fwd(q[0], cache[0], lists, 0.1)
