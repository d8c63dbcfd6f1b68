"""tilewave.sparse and the operators of block-sparse attention against PyTorch in double, on the CPU and on CUDA."""

import pytest

torch = pytest.importorskip("torch")

from tilewave import ops, sparse  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def expand(mask, heads, query_block, key_block, seqlen_q, seqlen_k):
    """[batch, heads, query_blocks, key_blocks] as [batch, heads, seqlen_q, seqlen_k]."""
    mask = mask.expand(mask.shape[0], mask.shape[1], *mask.shape[2:]).repeat_interleave(heads // mask.shape[1], 1)
    return mask.repeat_interleave(query_block, 2)[:, :, :seqlen_q].repeat_interleave(key_block, 3)[..., :seqlen_k]


def reference(q, k, v, mask, causal=False, scale=None):
    """o and lse in double; mask: [batch, heads, seqlen_q, seqlen_k]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scale or q.shape[-1] ** -0.5)
    if causal:
        mask = mask & torch.ones(scores.shape[2:], dtype=torch.bool, device=mask.device).tril(scores.shape[3] - scores.shape[2])
    scores = scores.masked_fill(~mask, -float("inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -float("inf"), 0).unsqueeze(-1)).exp()
    return (weights @ v).transpose(1, 2), lse


def normal(*shape, device="cpu"):
    """In float32, on CUDA in bfloat16."""
    return torch.randn(*shape).to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def close(got, wanted, factor=1):
    error = factor * (1e-5 if got.device.type == "cpu" else 2e-2)
    torch.testing.assert_close(got.double(), wanted.double(), atol=error, rtol=error)


def as_indices(mask):
    """Lists in descending order, padded with -1, and their counts."""
    keys = mask.shape[-1]
    numbers = torch.where(mask, torch.arange(keys, device=mask.device), -1).sort(-1, descending=True).values
    return numbers.int(), mask.sum(-1).int()


@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_block_sparse_attention_and_its_gradients(indices, causal, device):
    torch.manual_seed(1)
    q, k, v = (normal(2, s, h, 64, device=device).requires_grad_() for s, h in ((200, 4), (300, 2), (300, 2)))
    mask = torch.rand(2, 4, 4, 3, device=device) < 0.5
    blocks = dict(zip(("block_indices", "block_counts"), as_indices(mask))) if indices else {"block_mask": mask}
    o, lse = ops.block_sparse_attention(q, k, v, **blocks, query_block=64, key_block=128, causal=causal, return_lse=True)
    whole = expand(mask, 4, 64, 128, 200, 300)
    expected, expected_lse = reference(q, k, v, whole, causal)
    close(o, expected)
    close(lse, expected_lse)
    d_o = normal(*o.shape, device=device)
    gradients = torch.autograd.grad(o, (q, k, v), d_o)
    for got, wanted in zip(gradients, torch.autograd.grad(expected, (q, k, v), d_o.double())):
        close(got, wanted, 10 if device == "cpu" else 2)
    direct = ops.block_sparse_attention_backward(
        *(x.detach() for x in (q, k, v, o)), lse, d_o, **blocks, query_block=64, key_block=128, causal=causal
    )
    for got, wanted in zip(direct, gradients):
        close(got, wanted)


def test_rows_that_select_nothing():
    q, k, v = (normal(1, 100, 1, 64).requires_grad_() for _ in range(3))
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    o, lse = ops.block_sparse_attention(q, k, v, block_mask=mask, return_lse=True)
    assert not o.any() and (lse == -float("inf")).all()
    for gradient in torch.autograd.grad(o.sum(), (q, k, v)):
        assert not gradient.any()


def test_block_sparse_attn_func():
    torch.manual_seed(2)
    lengths_q, lengths_k = (130, 257), (300, 257)
    cu_q, cu_k = (torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32) for n in (lengths_q, lengths_k))
    q, k, v = (normal(n, h, 64).requires_grad_() for n, h in ((387, 4), (557, 2), (557, 2)))
    mask = torch.rand(2, 2, 3, 3) < 0.6
    types = torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    o, lse, probs = sparse.block_sparse_attn_func(
        q, k, v, cu_q, cu_k, types, None, mask, 257, 300, 0.0, is_causal=True, return_attn_probs=True
    )
    assert probs is None and lse.shape == (4, 387)
    all_heads = torch.ones(2, 4, 3, 3, dtype=torch.bool)
    all_heads[:, 1::2] = mask
    d_o = normal(*o.shape)
    expected = []
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k)):
        of_q, of_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        whole = expand(all_heads[b : b + 1], 4, 128, 128, n, m)
        expected.append(reference(q[None, of_q], k[None, of_k], v[None, of_k], whole, causal=True)[0][0])
    expected = torch.cat(expected)
    close(o, expected)
    got, wanted = torch.autograd.grad(o, (q, k, v), d_o), torch.autograd.grad(expected, (q, k, v), d_o.double())
    for x, y in zip(got, wanted):
        close(x, y, 10)


def test_block_sparse_attn_func_without_blocks_is_dense():
    cu = torch.tensor([0, 150], dtype=torch.int32)
    q, k, v = (normal(150, 2, 64) for _ in range(3))
    o = sparse.block_sparse_attn_func(q, k, v, cu, cu, torch.zeros(2, dtype=torch.int32), None, None, 150, 150, 0.0)
    close(o, ops.attention(q[None], k[None], v[None])[0])


@pytest.mark.parametrize("indices", [False, True])
@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("device", DEVICES)
def test_flash_attn_with_kvcache(indices, page_size, device):
    torch.manual_seed(3)
    batch, capacity = 3, 256
    q, k, v = (normal(batch, *shape, 64, device=device) for shape in ((1, 8), (capacity, 2), (capacity, 2)))
    lengths = torch.tensor([256, 1, 130], dtype=torch.int32, device=device)
    mask = torch.rand(batch, 2, 4, device=device) < 0.6
    cache, table = (k, v), None
    if page_size:
        table = torch.randperm(batch * 4, device=device).int().view(batch, 4)
        pages = torch.empty(2, batch * 4, page_size, 2, 64, dtype=k.dtype, device=device)
        for i, x in enumerate((k, v)):
            pages[i, table.flatten().long()] = x.reshape(batch * 4, page_size, 2, 64)
        cache = tuple(pages)
    blocks = dict(zip(("block_indices", "block_counts"), as_indices(mask))) if indices else {"block_mask": mask}
    o, lse = sparse.flash_attn_with_kvcache(
        q, *cache, cache_seqlens=lengths, block_table=table, return_softmax_lse=True, **blocks, block_size=64, num_splits=2
    )
    whole = expand(mask.unsqueeze(2), 8, 1, 64, 1, capacity) & (torch.arange(capacity, device=device) < lengths[:, None, None, None])
    expected, expected_lse = reference(q, k, v, whole)
    close(o, expected)
    close(lse, expected_lse)


def test_masks_from_scores():
    scores = torch.tensor([[[[3.0, 1.0, 2.0], [1.0, 5.0, 9.0], [float("nan"), 0.0, -1.0]]]])
    mask = sparse.top_k_blocks(scores, 1)
    assert mask.tolist() == [[[[True, False, False], [False, False, True], [False, True, False]]]]
    # Never above the diagonal, and a row with fewer blocks has them all.
    assert sparse.top_k_blocks(scores, 2, causal=True).tolist() == [[[[True, False, False], [True, True, False], [False, True, True]]]]
    assert sparse.top_k_blocks(scores, 0, causal=True, dense_last=1).tolist() == [[[[False] * 3, [False] * 3, [True] * 3]]]
    assert sparse.threshold_blocks(scores, 1.5).tolist() == [[[[True, False, True], [False, True, True], [False] * 3]]]
    assert sparse.threshold_blocks(scores, 1.5, causal=True).tolist() == [[[[True, False, False], [False, True, False], [False] * 3]]]
    # More keys than queries: the last rows are aligned.
    assert sparse.threshold_blocks(torch.ones(1, 3), 0, causal=True).tolist() == [[True] * 3]


def merged(vertical, slash, begin, size, seqlen):
    """MInference's blocks and columns of the `size` queries from `begin` on, by its serial merge."""
    ranges = []
    for distance in sorted({d for d in slash if 0 <= d < min(seqlen, begin + size)}, reverse=True):
        last = max(begin + size - distance, size)
        if not ranges or last > ranges[-1][1] + size:
            ranges.append([last - size, last])
        elif last > ranges[-1][1]:
            ranges[-1][1] += size
    held = lambda column: any(first <= column < last for first, last in ranges)  # noqa: E731
    columns = [c for c in sorted(set(vertical)) if 0 <= c < min(seqlen, begin + size) and not held(c)]
    return [key for first, last in ranges for key in range(first, last, size)], columns


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("device", DEVICES)
def test_vertical_slash_sparse_attention(size, device):
    torch.manual_seed(5)
    seqlen, heads = 333, 4
    q, k, v = (normal(1, h, seqlen, 64, device=device) for h in (heads, 2, 2))
    v_idx = torch.randint(0, seqlen, (1, heads, 12), device=device)
    s_idx = torch.randint(0, seqlen, (1, heads, 6), device=device)
    s_idx[:, 0, 0], v_idx[:, 0, 1] = 0, 1 << 40
    lists = sparse.convert_vertical_slash_indexes(None, v_idx, s_idx, seqlen, size, size)
    seen = torch.zeros(1, heads, seqlen, seqlen, dtype=torch.bool)
    for h in range(heads):
        for i in range(-(-seqlen // size)):
            blocks, columns = merged(v_idx[0, h].tolist(), s_idx[0, h].tolist(), i * size, size, seqlen)
            counts, offsets, column_counts, indices = (x[0, h, i] for x in lists)
            assert offsets.tolist() == blocks + [0] * (6 - len(blocks)) and counts == len(blocks)
            assert indices.tolist() == columns + [0] * (12 - len(columns)) and column_counts == len(columns)
            for key in blocks:
                seen[0, h, i * size : i * size + size, key : key + size] = True
            seen[0, h, i * size : i * size + size, columns] = True
    wanted, wanted_lse = reference(*(x.transpose(1, 2) for x in (q, k, v)), seen.to(device), True)
    o, lse = sparse.vertical_slash_sparse_attention(q, k, v, v_idx, s_idx, size, size, return_lse=True)
    close(o, wanted.transpose(1, 2))
    close(lse, wanted_lse)
    close(sparse.vertical_slash_sparse_attention(q, k, v, v_idx.clamp(max=seqlen).int(), s_idx.int(), size, size), o, 0.1)
    seqlens = torch.tensor([100], dtype=torch.int32, device=device)
    cut = sparse.vertical_slash_sparse_attention(q, k, v, v_idx, s_idx, size, size, seqlens=seqlens)
    close(cut[:, :, :100], wanted.transpose(1, 2)[:, :, :100])
    assert not cut[:, :, 100:].any()


@pytest.mark.parametrize("seqlen", [40, 300])
@pytest.mark.parametrize("device", DEVICES)
def test_estimate_vertical_slash(seqlen, device):
    torch.manual_seed(6)
    q, k = (normal(2, h, seqlen, 64, device=device) for h in (4, 2))
    v_idx, s_idx = sparse.estimate_vertical_slash(q, k, 35, 37)
    rows = min(64, seqlen)
    for b in range(2):
        for h in range(4):
            scores = q[b, h, seqlen - rows :].double() @ k[b, h // 2].double().T / 8
            columns, distances = torch.zeros(seqlen, dtype=torch.double), torch.zeros(seqlen, dtype=torch.double)
            for r in range(rows):
                own = seqlen - rows + r
                weights = scores[r, : own + 1].softmax(-1).cpu()
                columns[: own + 1] += weights
                distances[: own + 1] += weights.flip(-1)
            for got, sums in ((v_idx[b, h], columns), (s_idx[b, h], distances)):
                size = 35 if sums is columns else 37
                assert got.shape[0] == size and len(set(got.tolist())) == size and set(range(30)) <= set(got.tolist())
                # The others are the largest ones, but for rounding.
                least = sums[30:].sort(descending=True).values[size - 31]
                assert (sums[got.long().cpu()[got.long().cpu() >= 30]] >= least - 1e-4).all()
    # A whole estimate is dense attention.
    all_v, all_s = sparse.estimate_vertical_slash(q, k, 10**6, 10**6)
    assert all_v.shape == all_s.shape == (2, 4, seqlen)
    whole = sparse.vertical_slash_sparse_attention(q, k, k, all_v, all_s)
    wanted, _ = reference(*(x.transpose(1, 2) for x in (q, k, k)), torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool, device=device), True)
    close(whole, wanted.transpose(1, 2))


def test_what_is_not_supported_is_refused():
    cu = torch.tensor([0, 100], dtype=torch.int32)
    q = normal(100, 2, 64)
    call = lambda types, mask=None, **more: sparse.block_sparse_attn_func(  # noqa: E731
        q, q, q, cu, cu, torch.tensor(types), None, mask, 100, 100, **{"p_dropout": 0.0, **more}
    )
    with pytest.raises(NotImplementedError, match="p_dropout is 0.5"):
        call([0, 0], p_dropout=0.5)
    with pytest.raises(NotImplementedError, match="exact_streaming"):
        call([0, 0], exact_streaming=True)
    with pytest.raises(NotImplementedError, match="streaming heads"):
        call([0, -1])
    with pytest.raises(ValueError, match="base_blockmask has 0 heads"):
        call([1, 1])
    with pytest.raises(ValueError, match="head_mask_type has 1 entries; q has 2 heads"):
        call([0])
    with pytest.raises(ValueError, match="block_mask and block_indices are None"):
        ops.block_sparse_attention(q[None], q[None], q[None])
    with pytest.raises(ValueError, match="cu_seqlens_k is None"):
        ops.block_sparse_attention(q, q, q, block_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool), cu_seqlens_q=cu)
    with pytest.raises(NotImplementedError, match="k is given"):
        sparse.flash_attn_with_kvcache(q[None, :1], q[None], q[None], q[None], q[None])
    with pytest.raises(ValueError, match="k is -1"):
        sparse.top_k_blocks(torch.ones(2, 2), -1)
    x, numbers = normal(1, 2, 100, 64), torch.zeros(1, 2, 3, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="block_size_M is 64 and block_size_N 128"):
        sparse.vertical_slash_sparse_attention(x, x, x, numbers, numbers, 64, 128)
    with pytest.raises(ValueError, match=r"v_idx has shape \(2, 3\)"):
        sparse.vertical_slash_sparse_attention(x, x, x, numbers[0], numbers)
    with pytest.raises(ValueError, match=r"key has shape \(2, 100, 64\)"):
        sparse.vertical_slash_sparse_attention(x, x[0], x, numbers, numbers)
    with pytest.raises(NotImplementedError, match="vertical_slash_attention"):
        sparse.vertical_slash_sparse_attention(x.clone().requires_grad_(), x, x, numbers, numbers).sum().backward()
    with pytest.raises(ValueError, match="slash_size is 0"):
        sparse.estimate_vertical_slash(x, x, 30, 0)
    with pytest.raises(ValueError, match=r"key has shape \(1, 2, 99, 64\)"):
        sparse.estimate_vertical_slash(x, x[:, :, 1:], 30, 30)


def test_operators_are_registered_correctly():
    q, k, v = (normal(1, 100, 2, 64).requires_grad_() for _ in range(3))
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    none = (None,) * 2
    blocks = (mask, None, None, 128, 128, *none)
    options = (None, True, None, -1, -1, 0.0, None, True, None)
    torch.library.opcheck(torch.ops.tilewave.block_sparse_attention.default, (q, k, v, *blocks, *options, True))
    o, lse = ops.block_sparse_attention(q.detach(), k.detach(), v.detach(), block_mask=mask, causal=True, return_lse=True)
    arguments = (*(x.detach() for x in (q, k, v)), o, lse, torch.ones_like(o), *blocks, *options)
    torch.library.opcheck(torch.ops.tilewave.block_sparse_attention_backward.default, arguments)
    decode = (q.detach()[:, :1], k.detach(), v.detach(), mask, None, None, 128, *(None,) * 4, 0, None, False, -1, -1, 0.0, None, None, True)
    torch.library.opcheck(torch.ops.tilewave.block_sparse_decode.default, decode)
    lists = torch.randint(0, 100, (2, 1, 2, 5), dtype=torch.int32)
    for return_lse in (False, True):
        slashes = (q.detach(), k.detach(), v.detach(), *lists, torch.tensor([80], dtype=torch.int32), 64, None, return_lse)
        torch.library.opcheck(torch.ops.tilewave.vertical_slash_attention.default, slashes)
    torch.library.opcheck(torch.ops.tilewave.vertical_slash_index.default, (*lists, None, 100, 128))
