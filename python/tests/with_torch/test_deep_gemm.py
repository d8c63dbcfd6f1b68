"""DeepGEMM's functions for the lightning indexer against their formula in float64, on the CPU and on CUDA."""

import pytest

torch = pytest.importorskip("torch")

from tilewave import deep_gemm  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def close(got, wanted, device):
    """Tensor cores keep about 14 bits of sums of fp8 products."""
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=(1e-3 if device == "cuda" else 1e-5) * wanted.abs().max().item())


def reference(q, k, scale, weights):
    """[queries, keys] of q [queries, heads, 128] and k [keys, 128]."""
    products = torch.einsum("qhd,kd->qkh", q.double(), k.double()).relu()
    return torch.einsum("qkh,qh->qk", products, weights.double()) * scale.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [32, 64])
def test_fp8_mqa_logits(device, heads):
    torch.manual_seed(1)
    queries, keys = 37, 290
    q = torch.randn(queries, heads, 128).to(device, torch.float8_e4m3fn)
    k, scale = torch.randn(keys, 128).to(device, torch.float8_e4m3fn), torch.rand(keys, device=device)
    weights = torch.randn(queries, heads, device=device)
    start = torch.randint(0, keys, (queries,), dtype=torch.int32, device=device)
    end = torch.randint(0, keys + 20, (queries,), dtype=torch.int32, device=device)
    columns = torch.arange(keys, device=device)
    seen = (columns >= start[:, None]) & (columns < end[:, None])
    wanted = reference(q, k, scale, weights)
    logits = deep_gemm.fp8_mqa_logits(q, (k, scale), weights, start, end)
    assert logits.shape == (queries, keys) and logits.dtype == torch.float32
    assert (logits[~seen] == -float("inf")).all()
    close(logits[seen], wanted[seen], device)
    unclean = deep_gemm.fp8_mqa_logits(q, (k, scale), weights, start, end, clean_logits=False)
    assert torch.equal(unclean[seen], logits[seen])
    with pytest.raises(NotImplementedError, match="max_seqlen_k is 5"):
        deep_gemm.fp8_mqa_logits(q, (k, scale), weights, start, end, False, 5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("of_queries", [False, True])
def test_fp8_paged_mqa_logits(device, next_n, of_queries):
    torch.manual_seed(2)
    lengths, heads, longest = [2, 64, 130, 191], 64, 200
    batch, each = len(lengths), 4
    table = torch.randperm(batch * each, dtype=torch.int32).reshape(batch, each).to(device)
    k, scale = torch.randn(batch * each, 64, 128).to(device, torch.float8_e4m3fn), torch.rand(batch * each, 64, device=device)
    parts = [k.flatten(1).view(torch.uint8), scale.view(torch.uint8)]
    kv_cache = torch.cat(parts, dim=1).reshape(batch * each, 64, 1, 132)
    q = torch.randn(batch, next_n, heads, 128).to(device, torch.float8_e4m3fn)
    weights = torch.randn(batch * next_n, heads, device=device)
    ends = torch.tensor([[n - next_n + i + 1 for i in range(next_n)] for n in lengths], dtype=torch.int32, device=device)
    context_lens = ends if of_queries else torch.tensor(lengths, dtype=torch.int32, device=device)
    metadata = deep_gemm.get_paged_mqa_logits_metadata(context_lens, 64, 132)
    assert metadata.shape == (133, 2) and metadata.dtype == torch.int32 and metadata.device == context_lens.device
    logits = deep_gemm.fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, table, metadata, longest, clean_logits=True)
    assert logits.shape == (batch * next_n, longest)
    for b in range(batch):
        rows = slice(b * next_n, (b + 1) * next_n)
        wanted = reference(q[b], k[table[b].long()].flatten(0, 1), scale[table[b].long()].flatten(), weights[rows])
        for i in range(next_n):
            end = ends[b, i]
            close(logits[b * next_n + i, :end], wanted[i, :end], device)
            assert (logits[b * next_n + i, end:] == -float("inf")).all()


def test_errors():
    q, weights = torch.zeros(1, 1, 64, 128, dtype=torch.float8_e4m3fn), torch.zeros(1, 64)
    cache, lengths, table = torch.zeros(2, 64, 1, 132, dtype=torch.uint8), torch.ones(1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="block_kv is 32"):
        deep_gemm.get_paged_mqa_logits_metadata(lengths, 32, 132)
    with pytest.raises(NotImplementedError, match="indices"):
        deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 132, lengths)
    for change, error, part in [
        ({"kv_cache": cache[:, :32]}, ValueError, r"kv_cache has shape \(2, 32, 1, 132\)"),
        ({"weights": weights[0]}, ValueError, r"weights has shape \(64,\)"),
        ({"indices": lengths}, NotImplementedError, "indices"),
        ({"q": q.float()}, ValueError, "q is f32"),
    ]:
        arguments = {"q": q, "kv_cache": cache, "weights": weights, "context_lens": lengths, "block_table": table, "schedule_meta": None}
        with pytest.raises(error, match=part):
            deep_gemm.fp8_paged_mqa_logits(**{**arguments, **change}, max_context_len=128)
