"""tilewave.flash_attn and tilewave.flash_attn_interface against attention in float64, written out here, on the CPU and on CUDA."""

import math
import zlib

import pytest

torch = pytest.importorskip("torch")

from tilewave import flash_attn as fa2
from tilewave import flash_attn_interface as fa3
from tilewave.flash_attn.bert_padding import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from tilewave.flash_attn.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_func,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

PLACES = [("cpu", torch.float32), ("cpu", torch.bfloat16)]
if torch.cuda.is_available():
    PLACES += [("cuda", torch.bfloat16), ("cuda", torch.float16)]
ON_ALL = pytest.mark.parametrize("device, dtype", PLACES, ids=[f"{device}-{str(dtype)[6:]}" for device, dtype in PLACES])
VERSIONS = pytest.mark.parametrize("version", [fa2, fa3], ids=["fa2", "fa3"])


@pytest.fixture(autouse=True)
def _seed(request):
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def normal(*shape, device="cpu", dtype=torch.float32):
    return torch.randn(shape).to(device, dtype)


def ints(values, device="cpu"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(lengths, device="cpu"):
    return ints([sum(lengths[:n]) for n in range(len(lengths) + 1)], device)


def positions_seen(seqlen_q, seqlen_k, causal, window):
    beside = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)[None, :]
    left, right = window
    right = 0 if causal else right
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if left >= 0:
        seen &= key >= beside - left
    if right >= 0:
        seen &= key <= beside + right
    return seen, beside, key


def attention(q, k, v, causal=False, window=(-1, -1), scale=None, softcap=0.0, slopes=None, rounded=None):
    """out and lse (-inf where nothing is seen) of one sequence: q [seqlen_q, heads, dim]. In float64, or with every result in `rounded`."""
    exact = torch.float64 if rounded is None else torch.float32
    q, k, v = (x.detach().cpu().to(exact) for x in (q, k, v))

    def stored(x):
        return x if rounded is None else x.to(rounded).to(exact)

    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = stored(torch.einsum("qhd,khd->hqk", q, k)) * (q.shape[2] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    seen, beside, key = positions_seen(q.shape[0], k.shape[0], causal, window)
    if slopes is not None:
        scores = scores - slopes.cpu().to(exact)[:, None, None] * (beside - key).abs()
    scores = stored(scores).masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = stored(torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]))
    return stored(torch.einsum("hqk,khd->qhd", weights, v)), lse


def batched(q, k, v, slopes=None, **rules):
    """attention() of each q[b], k[b], v[b]; slopes [heads] or [batch, heads]."""
    of = [attention(q[b], k[b], v[b], slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b], **rules) for b in range(len(q))]
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


SHAPES = [  # seqlen_q, seqlen_k, heads, kv_heads, dim, value_dim
    (37, 37, 4, 2, 64, 64),
    (7, 53, 6, 2, 40, 40),
    (53, 7, 3, 1, 13, 13),  # rows that see nothing, and a padded head dimension
    (1, 31, 4, 4, 128, 128),
    (17, 131, 2, 1, 72, 24),
]
RULES = [
    {},
    {"causal": True},
    {"window": (5, 3)},
    {"window": (3, -1)},
    {"window": (-1, 0)},
    {"causal": True, "window": (4, 7)},
    {"softcap": 2.0, "scale": 0.4},
]


def as_arguments(rules):
    named = {"window": "window_size", "scale": "softmax_scale"}
    return {named.get(name, name): value for name, value in rules.items()}


@ON_ALL
@VERSIONS
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_func(version, rules, shape, device, dtype):
    seqlen_q, seqlen_k, heads, kv_heads, dim, value_dim = shape
    q = normal(2, seqlen_q, heads, dim, device=device, dtype=dtype)
    k = normal(2, seqlen_k, kv_heads, dim, device=device, dtype=dtype)
    v = normal(2, seqlen_k, kv_heads, value_dim, device=device, dtype=dtype)
    wanted, wanted_lse = map(torch.stack, batched(q, k, v, **rules))
    naive, _ = map(torch.stack, batched(q, k, v, rounded=dtype, **rules))
    out, lse = same_call(version, version.flash_attn_func(q, k, v, return_attn_probs=True, **as_arguments(rules)))
    check_out(out, wanted, naive)
    check_lse(lse, unseen_as(version, wanted_lse))
    assert torch.equal(version.flash_attn_func(q, k, v, **as_arguments(rules)), out)


@ON_ALL
@pytest.mark.parametrize("by_batch", [False, True], ids=["slopes", "slopes-by-batch"])
@pytest.mark.parametrize(
    "rules", [{}, {"causal": True}, {"window": (-1, 0)}, {"causal": True, "window": (6, -1)}, {"window": (60, 0)}], ids=str
)
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(11, 29), (29, 11)])
def test_alibi(rules, seqlen_q, seqlen_k, by_batch, device, dtype):
    q = normal(2, seqlen_q, 4, 32, device=device, dtype=dtype)
    k, v = (normal(2, seqlen_k, 2, 32, device=device, dtype=dtype) for _ in range(2))
    slopes = (torch.rand(2, 4) if by_batch else torch.rand(4)).to(device)
    wanted, wanted_lse = map(torch.stack, batched(q, k, v, slopes, **rules))
    naive, _ = map(torch.stack, batched(q, k, v, slopes, rounded=dtype, **rules))
    out, lse, _ = fa2.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True, **as_arguments(rules))
    check_out(out, wanted, naive)
    left = rules.get("window", (-1, -1))[0]
    if rules and (left < 0 or left >= seqlen_k):  # FlashAttention 2's causal path: slope * j instead of -slope * (i + diagonal - j)
        wanted_lse += slopes.cpu().double()[..., None] * (torch.arange(seqlen_q) + seqlen_k - seqlen_q)
    check_lse(lse, unseen_as(fa2, wanted_lse))


@ON_ALL
def test_alibi_varlen(device, dtype):
    lengths_q, lengths_k = [5, 0, 13, 1], [11, 3, 7, 1]
    q = normal(sum(lengths_q) + 2, 4, 32, device=device, dtype=dtype)  # two rows of no sequence
    k, v = (normal(sum(lengths_k), 2, 32, device=device, dtype=dtype) for _ in range(2))
    cu_q, cu_k = offsets(lengths_q, device), offsets(lengths_k, device)
    for slopes in (torch.rand(4, device=device), torch.rand(4, 4, device=device)):
        out, lse, _ = fa2.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 13, 11, causal=True, alibi_slopes=slopes, return_attn_probs=True)
        for b in range(4):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            of_b = slopes if slopes.dim() == 1 else slopes[b]
            wanted, wanted_lse = attention(q[rows], k[keys], v[keys], causal=True, slopes=of_b)
            naive, _ = attention(q[rows], k[keys], v[keys], causal=True, slopes=of_b, rounded=dtype)
            check_out(out[rows], wanted, naive)
            wanted_lse += of_b.cpu().double()[:, None] * (torch.arange(lengths_q[b]) + lengths_k[b] - lengths_q[b])
            check_lse(lse[:, rows], unseen_as(fa2, wanted_lse))


@ON_ALL
def test_packed(device, dtype):
    qkv = normal(2, 23, 3, 4, 48, device=device, dtype=dtype)
    q, k, v = qkv.unbind(2)
    wanted = fa2.flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(fa2.flash_attn_qkvpacked_func(qkv, causal=True), wanted)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, causal=True), wanted)
    assert torch.equal(fa2.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), wanted)
    out, lse, _ = fa2.flash_attn_qkvpacked_func(qkv, causal=True, return_attn_probs=True)
    assert torch.equal(out, wanted) and lse.shape == (2, 4, 23)

    heads_together = normal(2, 23, 6 + 2 + 2, 48, device=device, dtype=dtype)
    q, k, v = heads_together.split([6, 2, 2], dim=2)
    wanted, wanted_lse = fa3.flash_attn_func(q, k, v, window_size=(3, 3), return_attn_probs=True)
    out, lse = fa3.flash_attn_qkvpacked_func(heads_together, num_heads_q=6, window_size=(3, 3), return_attn_probs=True)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)

    flat, cu = qkv.flatten(0, 1), ints([0, 9, 9, 46], device)
    q, k, v = (x.contiguous() for x in flat.unbind(1))
    wanted = fa2.flash_attn_varlen_func(q, k, v, cu, cu, 37, 37, window_size=(5, 2))
    assert torch.equal(fa2.flash_attn_varlen_qkvpacked_func(flat, cu, 37, window_size=(5, 2)), wanted)
    assert torch.equal(fa2.flash_attn_varlen_kvpacked_func(q, flat[:, 1:], cu, cu, 37, 37, window_size=(5, 2)), wanted)


@ON_ALL
def test_last_dimension_of_any_stride(device, dtype):
    q, k, v = (normal(1, 2, 16, 19, device=device, dtype=dtype).transpose(2, 3) for _ in range(3))
    assert q.stride(-1) != 1
    assert torch.equal(fa2.flash_attn_func(q, k, v), fa2.flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous()))


@ON_ALL
@VERSIONS
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"causal": True, "window": (3, 0)}, {"softcap": 5.0}], ids=str)
@pytest.mark.parametrize("dim", [64, 21])
def test_varlen(version, rules, dim, device, dtype):
    lengths_q, lengths_k = [5, 0, 1, 37, 7], [11, 3, 1, 41, 0]
    cu_q, cu_k = offsets(lengths_q, device), offsets(lengths_k, device)
    q = normal(sum(lengths_q), 4, dim, device=device, dtype=dtype)
    k, v = (normal(sum(lengths_k), 2, dim, device=device, dtype=dtype) for _ in range(2))
    out, lse = same_call(
        version, version.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 37, 41, return_attn_probs=True, **as_arguments(rules))
    )
    assert lse.shape == (4, sum(lengths_q))
    for b in range(len(lengths_q)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        wanted, wanted_lse = attention(q[rows], k[keys], v[keys], **rules)
        naive, _ = attention(q[rows], k[keys], v[keys], rounded=dtype, **rules)
        check_out(out[rows], wanted, naive)
        check_lse(lse[:, rows], unseen_as(version, wanted_lse))


@ON_ALL
def test_varlen_seqused(device, dtype):
    cu_q, cu_k = offsets([7, 5], device), offsets([13, 17], device)
    used_q, used_k = [4, 5], [13, 9]
    q = normal(12, 4, 64, device=device, dtype=dtype)
    k, v = (normal(30, 4, 64, device=device, dtype=dtype) for _ in range(2))
    k[13 + 9 :], v[13 + 9 :] = math.nan, math.nan
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 7, 17, seqused_q=ints(used_q, device), seqused_k=ints(used_k, device), causal=True, return_attn_probs=True
    )
    for b, (row, key) in enumerate([(0, 0), (7, 13)]):
        rows, keys = slice(row, row + used_q[b]), slice(key, key + used_k[b])
        wanted, wanted_lse = attention(q[rows], k[keys], v[keys], causal=True)
        naive, _ = attention(q[rows], k[keys], v[keys], causal=True, rounded=dtype)
        check_out(out[rows], wanted, naive)
        check_lse(lse[:, rows], wanted_lse)
    assert (out[4:7] == 0).all() and (lse[:, 4:7] == -math.inf).all()


CACHES = {  # what flash_attn_with_kvcache is given besides, and how
    "full": {},
    "lengths": {"seqlens": [29, 0, 17]},
    "append": {"seqlens": [29, 0, 17], "new": 5},
    "append-causal": {"seqlens": [29, 0, 17], "new": 5, "causal": True},
    "append-window": {"seqlens": [29, 0, 17], "new": 5, "window": (9, 1)},
    "rotary-interleaved": {"seqlens": [29, 0, 17], "new": 5, "causal": True, "rotary": (16, True)},
    "rotary-halves": {"seqlens": [29, 0, 17], "new": 5, "window": (9, 1), "rotary": (16, False)},
    "rotary-of-one-position": {"seqlens": [29, 3, 17], "new": 5, "rotary": (8, False)},
    "leftpad": {"seqlens": [29, 4, 17], "leftpad": [3, 0, 11]},
    "leftpad-rotary": {"seqlens": [29, 4, 17], "leftpad": [3, 0, 11], "new": 5, "causal": True, "rotary": (16, True)},
    "leftpad-rotary-of-one-position": {"seqlens": [29, 4, 17], "leftpad": [3, 0, 11], "new": 2, "rotary": (16, False)},
    "batch-idx": {"seqlens": [29, 4, 17], "batch_idx": [3, 0, 2], "new": 5},
    "batch-idx-leftpad": {"seqlens": [29, 4, 17], "batch_idx": [1, 4, 2], "leftpad": [2, 2, 2], "causal": True},
    "pages-of-16": {"seqlens": [29, 3, 17], "page_size": 16},
    "pages-of-16-append": {"seqlens": [29, 3, 17], "page_size": 16, "new": 5, "causal": True, "rotary": (16, True)},
    "pages-of-10": {"seqlens": [29, 0, 17], "page_size": 10, "new": 5},
    "pages-of-1": {"seqlens": [29, 3, 17], "page_size": 1, "new": 2, "causal": True, "rotary": (16, False)},
    "pages-leftpad": {"seqlens": [29, 4, 17], "page_size": 16, "leftpad": [3, 0, 11], "new": 5, "causal": True},
    "pages-batch-idx": {"seqlens": [29, 4, 17], "page_size": 16, "batch_idx": [3, 0, 2], "new": 5},
    "pages-of-10-all": {
        "seqlens": [29, 4, 17],
        "page_size": 10,
        "batch_idx": [1, 4, 2],
        "leftpad": [2, 0, 12],
        "new": 5,
        "window": (9, 0),
        "rotary": (8, True),
    },
    "pages-of-256": {"seqlens": [270, 3, 254], "page_size": 256, "new": 5, "causal": True},
    "softcap": {"seqlens": [29, 0, 17], "softcap": 3.0, "scale": 0.5},
    "splits": {"seqlens": [29, 0, 17], "num_splits": 3},
}


def run_cache(version, case, seqlen_q, dim, device, dtype, **more):
    """Calls flash_attn_with_kvcache on caches that hold NaN wherever nothing may be read. Gives its result and what it should be:
    (q, k, v) of each sequence, turned; and a function that checks the caches."""
    case = dict(case)
    seqlens, new, page_size = case.pop("seqlens", None), case.pop("new", 0), case.pop("page_size", None)
    leftpad, batch_idx, rotary = case.pop("leftpad", [0, 0, 0]), case.pop("batch_idx", None), case.pop("rotary", None)
    num_splits = case.pop("num_splits", 0)
    batch, heads, kv_heads, capacity = 3, 4, 2, 37
    kept = seqlens or [capacity] * batch
    q = normal(batch, seqlen_q, heads, dim, device=device, dtype=dtype)
    given = {**as_arguments(case), "num_splits": num_splits, **more}
    if page_size is None:
        place = batch_idx or [0, 1, 2]
        caches = [torch.full((max(5, batch) if batch_idx else batch, capacity, kv_heads, dim), math.nan, dtype=dtype) for _ in range(2)]

        def row(b, at):
            return place[b], at
    else:
        pages = -(-(max(kept) + new) // page_size) + 1
        table = torch.randperm(batch * pages + 2)[: batch * pages].view(batch, pages)
        caches = [torch.full((batch * pages + 2, page_size, kv_heads, dim), math.nan, dtype=dtype) for _ in range(2)]
        rows = table
        if batch_idx:
            rows = torch.full((5, pages), -1)
            rows[batch_idx] = table
        given["block_table" if version is fa2 else "page_table"] = rows.to(device, torch.int32)

        def row(b, at):
            return int(table[b, at // page_size]), at % page_size

    for cache in caches:
        for b in range(batch):
            for at in range(leftpad[b], kept[b]):
                cache[row(b, at)] = normal(kv_heads, dim, dtype=dtype)
    before = [cache.clone() for cache in caches]
    k_cache, v_cache = (cache.to(device) for cache in caches)
    if seqlens:
        given["cache_seqlens"] = ints(seqlens, device)
    if any(leftpad):
        given["cache_leftpad"] = ints(leftpad, device)
    if batch_idx:
        given["cache_batch_idx"] = ints(batch_idx, device)
    new_k = new_v = None
    if new:
        new_k, new_v = (normal(batch, new, kv_heads, dim, device=device, dtype=dtype) for _ in range(2))
    if rotary:
        rotary_dim, interleaved = rotary
        cos, sin = rotary_tables(400, rotary_dim, device, dtype)
        given.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved)
    result = version.flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, **given)

    start = given["rotary_seqlens"].tolist() if "rotary_seqlens" in given else kept
    advance = case.get("causal", False) or case.get("window", (-1, -1)) != (-1, -1)
    of_sequences, appended = [], []
    for b in range(batch):
        q_b, k_b, v_b = (
            q[b].cpu().double(),
            *(x[b].cpu().double() if new else torch.empty(0, kv_heads, dim).double() for x in (new_k, new_v)),
        )
        if rotary:
            q_b = turn(q_b, cos, sin, start[b] + torch.arange(seqlen_q) * int(advance), interleaved)
            k_b = turn(k_b, cos, sin, start[b] + torch.arange(new), interleaved)
        appended.append((k_b, v_b))
        old = [
            torch.stack([x[row(b, at)] for at in range(leftpad[b], kept[b])] or [torch.empty(kv_heads, dim)])[: kept[b] - leftpad[b]]
            for x in before
        ]
        of_sequences.append((q_b, torch.cat([old[0].double(), k_b]), torch.cat([old[1].double(), v_b])))

    def check_caches():
        for cache, was, part in ((k_cache.cpu(), before[0], 0), (v_cache.cpu(), before[1], 1)):
            for b in range(batch):
                for n in range(new):
                    wanted = appended[b][part][n]
                    turned = bool(rotary) and part == 0
                    allowed = 2 * ulp(wanted.abs().max().item(), dtype) + 2e-6 if turned else 0.0
                    assert (cache[row(b, kept[b] + n)].double() - wanted).abs().max() <= allowed
                    cache[row(b, kept[b] + n)] = was[row(b, kept[b] + n)]
            torch.testing.assert_close(cache, was, rtol=0, atol=0, equal_nan=True)  # nothing else is written

    return result, of_sequences, check_caches


def check_cache_result(version, case, out, lse, of_sequences, dtype):
    rules = {name: case[name] for name in ("causal", "window", "softcap", "scale") if name in case}
    wanted, wanted_lse = map(torch.stack, batched(*zip(*of_sequences), **rules))
    naive, _ = map(torch.stack, batched(*zip(*([x.to(dtype) for x in of_b] for of_b in of_sequences)), rounded=dtype, **rules))
    check_out(out, wanted, naive)
    if dtype == torch.float32 or "rotary" not in case:  # what is turned is rounded before its scores are made
        check_lse(lse, unseen_as(version, wanted_lse))


@ON_ALL
@VERSIONS
@pytest.mark.parametrize("seqlen_q, dim", [(1, 64), (5, 24), (3, 18)])
@pytest.mark.parametrize("name", CACHES)
def test_kvcache(version, name, seqlen_q, dim, device, dtype):
    case = CACHES[name]
    (out, lse, *rest), of_sequences, check_caches = run_cache(version, case, seqlen_q, dim, device, dtype, return_softmax_lse=True)
    assert [part.numel() for part in rest] == ([] if version is fa2 else [0, 0])
    check_cache_result(version, case, out, lse, of_sequences, dtype)
    check_caches()


@ON_ALL
def test_kvcache_rotary_seqlens(device, dtype):
    case = {"seqlens": [29, 4, 17], "new": 5, "causal": True, "rotary": (16, True)}
    (out, lse, *_), of_sequences, check_caches = run_cache(
        fa3, case, 3, 32, device, dtype, rotary_seqlens=ints([100, 0, 3], device), return_softmax_lse=True
    )
    check_cache_result(fa3, case, out, lse, of_sequences, dtype)
    check_caches()


@ON_ALL
@VERSIONS
def test_kvcache_one_length_for_all(version, device, dtype):
    q = normal(2, 1, 4, 64, device=device, dtype=dtype)
    k_cache, v_cache = (normal(5, 33, 4, 64, device=device, dtype=dtype) for _ in range(2))
    choice = {"cache_batch_idx": ints([4, 1], device)}
    out = version.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=19, **choice)
    assert torch.equal(out, version.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=ints([19, 19], device), **choice))
    assert not torch.equal(out, version.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=20, **choice))


def test_values_that_mean_none_or_only_change_the_speed():
    q, k, v = (normal(1, 9, 2, 32) for _ in range(3))
    for version in (fa2, fa3):
        bounded = version.flash_attn_func(q, k, v, window_size=(-1, 2))
        assert not torch.equal(bounded, version.flash_attn_func(q, k, v))
        for left in (-7, 9, 1 << 40):
            assert torch.equal(bounded, version.flash_attn_func(q, k, v, window_size=(left, 2)))
        assert torch.equal(version.flash_attn_func(q, k, v, softcap=-1.0, deterministic=True), version.flash_attn_func(q, k, v))
        for num_splits in (-1, 1, 1000):
            torch.testing.assert_close(
                version.flash_attn_with_kvcache(q, k, v, num_splits=num_splits), version.flash_attn_func(q, k, v), rtol=0, atol=1e-6
            )
    hints = {"pack_gqa": True, "sm_margin": 8, "num_splits": 4}
    assert torch.equal(fa3.flash_attn_func(q, k, v, **hints), fa3.flash_attn_func(q, k, v))


@ON_ALL
def test_kvcache_alibi(device, dtype):
    slopes = torch.rand(3, 4)
    case = {"seqlens": [29, 4, 17], "leftpad": [3, 0, 11], "new": 5}
    for causal in (False, True):
        (out, lse), of_sequences, _ = run_cache(
            fa2, case, 3, 32, device, dtype, causal=causal, alibi_slopes=slopes.to(device), return_softmax_lse=True
        )
        for b, (q, k, v) in enumerate(of_sequences):
            wanted, wanted_lse = attention(q, k, v, causal=causal, slopes=slopes[b])
            naive, _ = attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=causal, slopes=slopes[b], rounded=dtype)
            check_out(out[b], wanted, naive)
            if causal:
                wanted_lse += slopes[b].double()[:, None] * (torch.arange(3) + len(k) - 3)
            check_lse(lse[b], wanted_lse)


@ON_ALL
@pytest.mark.parametrize("dim", [64, 20])
def test_kvcache_packed_queries(dim, device, dtype):
    cu_q, seqlens = offsets([3, 0, 8], device), [5, 1, 19]
    q = normal(11, 4, dim, device=device, dtype=dtype)
    k_cache, v_cache = (normal(3, 19, 2, dim, device=device, dtype=dtype) for _ in range(2))
    k_cache[0, 5:], v_cache[0, 5:] = math.nan, math.nan
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=ints(seqlens, device),
        cu_seqlens_q=cu_q,
        max_seqlen_q=8,
        causal=True,
        return_softmax_lse=True,
    )
    for b in range(3):
        rows, used = slice(cu_q[b], cu_q[b + 1]), (b, slice(seqlens[b]))
        wanted, wanted_lse = attention(q[rows], k_cache[used], v_cache[used], causal=True)
        naive, _ = attention(q[rows], k_cache[used], v_cache[used], causal=True, rounded=dtype)
        check_out(out[rows], wanted, naive)
        check_lse(lse[:, rows], wanted_lse)


@ON_ALL
@pytest.mark.parametrize("packed_new", [False, True], ids=["new-keys", "packed-new-keys"])
@pytest.mark.parametrize("rotary", [None, True, False], ids=["", "interleaved", "halves"])
@pytest.mark.parametrize("page_size", [None, 16, 6])
def test_kvcache_packed_queries_and_new_keys(page_size, rotary, packed_new, device, dtype):
    lengths_q, seqlens, leftpad, choice, new = [3, 0, 8], [5, 1, 14], [2, 0, 3], [3, 0, 2], [1, 0, 5] if packed_new else [4, 4, 4]
    q = normal(11, 4, 32, device=device, dtype=dtype)
    new_k, new_v = (normal(sum(new), 2, 32, device=device, dtype=dtype) for _ in range(2))
    pages = -(-24 // (page_size or 24))
    caches = [torch.full((4 * pages, page_size or 24, 2, 32), math.nan, dtype=dtype) for _ in range(2)]
    table = torch.randperm(4 * pages).view(4, pages) if page_size else torch.arange(4)[:, None]

    def place(b, at):
        return table[choice[b], at // (page_size or 24)], at % (page_size or 24)

    for cache in caches:
        for b in range(3):
            for at in range(leftpad[b], seqlens[b]):
                cache[place(b, at)] = normal(2, 32, dtype=dtype)
    given = {"causal": True, "cu_seqlens_q": offsets(lengths_q, device), "max_seqlen_q": 8, "cache_seqlens": ints(seqlens, device)}
    given.update(cache_leftpad=ints(leftpad, device), cache_batch_idx=ints(choice, device), return_softmax_lse=True)
    if page_size:
        given["page_table"] = ints(table.tolist(), device)
    if rotary is not None:
        cos, sin = rotary_tables(40, 16, device, torch.float32)
        given.update(rotary_cos=cos, rotary_sin=sin, rotary_interleaved=rotary)
    if packed_new:
        given["cu_seqlens_k_new"] = offsets(new, device)
    k, v = (new_k, new_v) if packed_new else (x.view(3, 4, 2, 32) for x in (new_k, new_v))
    k_cache, v_cache = (cache.to(device) for cache in caches)
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, **given)
    for b in range(3):
        rows, added = slice(sum(lengths_q[:b]), sum(lengths_q[: b + 1])), slice(sum(new[:b]), sum(new[: b + 1]))
        q_b, k_b = q[rows].cpu().double(), new_k[added].cpu().double()
        if rotary is not None:
            q_b = turn(q_b, cos, sin, seqlens[b] + torch.arange(lengths_q[b]), rotary).to(dtype).double()
            k_b = turn(k_b, cos, sin, seqlens[b] + torch.arange(new[b]), rotary).to(dtype).double()
        keys, values = (
            torch.cat([*(cache[place(b, at)][None].double() for at in range(leftpad[b], seqlens[b])), x])
            for cache, x in zip(caches, (k_b, new_v[added].cpu().double()))
        )
        wanted, wanted_lse = attention(q_b, keys, values, causal=True)
        naive, _ = attention(*(x.to(dtype) for x in (q_b, keys, values)), causal=True, rounded=dtype)
        check_out(out[rows], wanted, naive)
        if rotary is None or dtype == torch.float32:
            check_lse(lse[:, rows], wanted_lse)
        for n in range(new[b]):
            assert torch.equal(v_cache[place(b, seqlens[b] + n)], new_v[added][n])


@ON_ALL
def test_kvcache_one_packed_query_each(device, dtype):
    q, k_cache, v_cache = (normal(*shape, device=device, dtype=dtype) for shape in ((3, 4, 32), (3, 20, 2, 32), (3, 20, 2, 32)))
    given = {"cache_seqlens": ints([7, 20, 1], device), "return_softmax_lse": True}
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cu_seqlens_q=offsets([1, 1, 1], device), max_seqlen_q=1, **given)
    wanted, wanted_lse, *_ = fa3.flash_attn_with_kvcache(q[:, None], k_cache, v_cache, **given)
    assert torch.equal(out, wanted[:, 0]) and torch.equal(lse, wanted_lse[:, :, 0].T)


@ON_ALL
@pytest.mark.parametrize("page_size", [16, 10])
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"window": (4, 1), "softcap": 3.0}], ids=str)
def test_varlen_with_block_table(rules, page_size, device, dtype):
    lengths_q, lengths_k = [5, 0, 1, 37], [11, 3, 1, 41]
    cu_q, cu_k = offsets(lengths_q, device), offsets(lengths_k, device)
    q = normal(sum(lengths_q), 4, 64, device=device, dtype=dtype)
    pages = -(-41 // page_size)
    table = torch.randperm(4 * pages).view(4, pages)
    k, v = (torch.full((4 * pages, page_size, 2, 64), math.nan, dtype=dtype) for _ in range(2))
    for b, length in enumerate(lengths_k):
        for at in range(length):
            k[table[b, at // page_size], at % page_size] = normal(2, 64, dtype=dtype)
            v[table[b, at // page_size], at % page_size] = normal(2, 64, dtype=dtype)
    out, lse, probabilities = fa2.flash_attn_varlen_func(
        q,
        k.to(device),
        v.to(device),
        cu_q,
        cu_k,
        37,
        41,
        return_attn_probs=True,
        block_table=table.to(device, torch.int32),
        **as_arguments(rules),
    )
    assert probabilities.shape == (0,)
    for b, length in enumerate(lengths_k):
        of_k, of_v = (x[table[b]].flatten(0, 1)[:length] for x in (k, v))
        rows = slice(cu_q[b], cu_q[b + 1])
        wanted, wanted_lse = attention(q[rows], of_k, of_v, **rules)
        naive, _ = attention(q[rows], of_k, of_v, rounded=dtype, **rules)
        check_out(out[rows], wanted, naive)
        check_lse(lse[:, rows], unseen_as(fa2, wanted_lse))


@ON_ALL
@VERSIONS
@pytest.mark.parametrize("value_dim", [512, 300])
def test_wide_values(version, value_dim, device, dtype):
    q, k, v = (normal(2, n, heads, dim, device=device, dtype=dtype) for n, heads, dim in ((5, 4, 64), (19, 2, 64), (19, 2, value_dim)))
    wanted, wanted_lse = map(torch.stack, batched(q, k, v, causal=True))
    naive, _ = map(torch.stack, batched(q, k, v, causal=True, rounded=dtype))
    out, lse = same_call(version, version.flash_attn_func(q, k, v, causal=True, return_attn_probs=True))
    check_out(out, wanted, naive)
    check_lse(lse, wanted_lse)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    cu_q, cu_k = offsets([5, 5], device), offsets([19, 19], device)
    check_out(version.flash_attn_varlen_func(*packed, cu_q, cu_k, 5, 19, causal=True).unflatten(0, (2, 5)), wanted, naive)
    k_cache, v_cache = k.clone(), v.clone()
    k_cache[:, 14:], v_cache[:, 14:] = math.nan, math.nan
    new = (k[:, 14:].contiguous(), v[:, 14:].contiguous())
    check_out(version.flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=14, causal=True), wanted, naive)
    assert torch.equal(k_cache, k) and torch.equal(v_cache, v)


@ON_ALL
@VERSIONS
@pytest.mark.parametrize("scale", [0.0, -0.3, 1e-60])
def test_scales_that_are_not_positive(version, scale, device, dtype):
    q, k, v = (normal(2, n, heads, 32, device=device, dtype=dtype) for n, heads in ((5, 4), (19, 2), (19, 2)))
    for rules in ({"causal": True}, {"window": (6, 2), "softcap": 1.5}):
        wanted, wanted_lse = map(torch.stack, batched(q, k, v, scale=scale, **rules))
        naive, _ = map(torch.stack, batched(q, k, v, scale=scale, rounded=dtype, **rules))
        given = {"softmax_scale": scale, **as_arguments(rules)}
        out, lse = same_call(version, version.flash_attn_func(q, k, v, return_attn_probs=True, **given))
        check_out(out, wanted, naive)
        check_lse(lse, wanted_lse)
        check_out(version.flash_attn_with_kvcache(q, k, v, **given), wanted, naive)


def test_contents_are_checked_on_request():
    # On the CPU they are always looked at; what a GPU is asked for is seen where it is handed over.
    from tilewave import _arrays, check_contents

    assert not _arrays.checks_contents(None) and _arrays.checks_contents(True)
    with check_contents():
        assert _arrays.checks_contents(None) and not _arrays.checks_contents(False)
        with check_contents(False):
            assert not _arrays.checks_contents(None)
    assert not _arrays.checks_contents(None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="on a GPU only")
def test_contents_of_a_gpu_are_checked_on_request():
    import tilewave

    q, k = (normal(2, 4, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = ints([3, 5], "cuda")
    fa3.flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths)
    with tilewave.check_contents(), pytest.raises(ValueError, match=r"seqlens\[1\] is 5"):
        fa3.flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths)


def test_combine_takes_no_second_tensor_of_the_parts_size():
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and all(
                result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in given
            ):
                self.numbers = max(self.numbers, result.numel())
            return result

    given = (normal(16, 2, 5, 4, 16), normal(16, 2, 5, 4))
    with Largest() as largest:
        fa3.flash_attn_combine(*given)
    assert 0 < largest.numbers <= given[0].numel() // 16


@pytest.mark.parametrize("device", sorted({device for device, _ in PLACES}))
def test_combine(device):
    out_partial, lse_partial = normal(3, 2, 5, 4, 16, device=device), normal(3, 2, 5, 4, device=device)
    lse_partial[1, 0, 0], out_partial[1, 0, 0] = -math.inf, math.nan
    lse_partial[:, 1, 2] = -math.inf
    out, lse = fa3.flash_attn_combine(out_partial, lse_partial)
    weights = lse_partial.double().exp()
    wanted = (weights[..., None] * out_partial.double().nan_to_num()).sum(0) / weights.sum(0).clamp(min=1e-300)[..., None]
    torch.testing.assert_close(out, wanted.float())
    torch.testing.assert_close(lse, weights.sum(0).log().float())
    assert (out[1, 2] == 0).all() and (lse[1, 2] == -math.inf).all()

    target = torch.empty_like(out, dtype=torch.bfloat16)
    assert fa3.flash_attn_combine(out_partial, lse_partial, out=target)[0] is target
    assert torch.equal(target, out.bfloat16())
    assert torch.equal(fa3.flash_attn_combine(out_partial, lse_partial, out_dtype=torch.bfloat16)[0], target)


@ON_ALL
def test_combine_of_two_halves(device, dtype):
    q, k, v = (normal(2, 31, 4, 64, device=device, dtype=dtype) for _ in range(3))
    whole, whole_lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    halves = [fa3.flash_attn_func(q, k[:, part], v[:, part], return_attn_probs=True) for part in (slice(0, 9), slice(9, None))]
    out, lse = fa3.flash_attn_combine(torch.stack([o.float() for o, _ in halves]), torch.stack([x.transpose(1, 2) for _, x in halves]))
    torch.testing.assert_close(out, whole.float(), rtol=0, atol=4 * torch.finfo(dtype).eps + 1e-6)
    torch.testing.assert_close(lse.transpose(1, 2), whole_lse, rtol=0, atol=1e-5)


@ON_ALL
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("table_dtype", [None, torch.float32])
def test_rotary(interleaved, table_dtype, device, dtype):
    x = normal(2, 13, 3, 40, device=device, dtype=dtype)
    cos, sin = rotary_tables(50, 24, device, table_dtype or dtype)
    for given, starts in ((0, [0, 0]), (7, [7, 7]), (ints([3, 31], device), [3, 31]), (ints([3, 31], device).long(), [3, 31])):
        wanted = torch.stack([turn(x[b], cos, sin, starts[b] + torch.arange(13), interleaved) for b in range(2)])
        out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=given)
        torch.testing.assert_close(out.cpu(), wanted.to(dtype), rtol=torch.finfo(dtype).eps, atol=2e-6)
        changed = x.clone()
        assert apply_rotary_emb(changed, cos, sin, interleaved, True, given) is changed
        assert torch.equal(changed, out)


@ON_ALL
def test_rotary_of_packed_tokens(device, dtype):
    lengths = [4, 0, 7, 1]
    x = normal(sum(lengths), 3, 32, device=device, dtype=dtype)
    cos, sin = rotary_tables(50, 32, device, dtype)
    for given, starts in ((2, [2] * 4), (ints([3, 31, 0, 9], device), [3, 31, 0, 9])):
        positions = torch.cat([starts[b] + torch.arange(lengths[b]) for b in range(4)])
        out = apply_rotary_emb(x, cos, sin, seqlen_offsets=given, cu_seqlens=offsets(lengths, device), max_seqlen=7)
        wanted = turn(x, cos, sin, positions, False)
        torch.testing.assert_close(out.cpu(), wanted.to(dtype), rtol=torch.finfo(dtype).eps, atol=2e-6)
        changed = x.clone()
        assert apply_rotary_emb(changed, cos, sin, False, True, given, offsets(lengths, device), 7) is changed
        assert torch.equal(changed, out)


@ON_ALL
def test_rotary_in_place(device, dtype):
    assert apply_rotary_emb_func is apply_rotary_emb
    cos, sin = rotary_tables(50, 24, device, dtype)
    cos_k, sin_k = cos.flip(0).contiguous(), sin.flip(0).contiguous()
    starts = ints([3, 31], device)
    qkv = normal(2, 13, 3, 4, 40, device=device, dtype=dtype)
    heads_together = normal(2, 13, 6 + 2 + 2, 40, device=device, dtype=dtype)
    kv = normal(2, 13, 2, 4, 40, device=device, dtype=dtype)
    for interleaved in (False, True):
        for tables in ((), (cos_k, sin_k)):
            of_k = tables or (cos, sin)
            changed = qkv.clone()
            assert apply_rotary_emb_qkv_(changed, cos, sin, *(tables or (None, None)), interleaved, starts) is changed
            q, k, v = qkv.unbind(2)
            wanted = [apply_rotary_emb(q, cos, sin, interleaved, False, starts), apply_rotary_emb(k, *of_k, interleaved, False, starts), v]
            assert torch.equal(changed, torch.stack(wanted, 2)) and not torch.equal(changed, qkv)
            changed = heads_together.clone()
            assert apply_rotary_emb_qkv_(changed, cos, sin, *(tables or (None, None)), interleaved, 7, num_heads_q=6) is changed
            q, k, v = heads_together.split([6, 2, 2], 2)
            wanted = [apply_rotary_emb(q, cos, sin, interleaved, False, 7), apply_rotary_emb(k, *of_k, interleaved, False, 7), v]
            assert torch.equal(changed, torch.cat(wanted, 2))
        changed = kv.clone()
        assert apply_rotary_emb_kv_(changed, cos, sin, interleaved, starts) is changed
        wanted = [apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, False, starts), kv[:, :, 1]]
        assert torch.equal(changed, torch.stack(wanted, 2))


@ON_ALL
@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved, scale_base, device, dtype):
    module = RotaryEmbedding(24, base=5000.0, interleaved=interleaved, scale_base=scale_base, device=device).to(dtype).eval()
    assert not module.state_dict() and module.inv_freq.shape == (12,)
    positions = torch.arange(21).double()
    pairs = torch.arange(0, 24, 2).double()
    angles = positions[:, None] * 5000.0 ** (-pairs / 24)
    power = torch.zeros(21) if scale_base is None else (positions - 21 // 2) / scale_base
    scale = ((pairs + 0.4 * 24) / (1.4 * 24)) ** power[:, None]
    of_q, of_k = (angles.cos() * scale, angles.sin() * scale), (angles.cos() / scale, angles.sin() / scale)

    def wanted(x, tables, starts):
        return torch.stack([turn(x[b], *tables, starts[b] + torch.arange(13), interleaved) for b in range(2)])

    def close(got, exact):
        # Tables and result are rounded to the dtype.
        torch.testing.assert_close(got.cpu().double(), exact, rtol=0, atol=12 * torch.finfo(dtype).eps if dtype != torch.float32 else 3e-5)

    qkv = normal(2, 13, 3, 4, 40, device=device, dtype=dtype)
    changed = qkv.clone()
    assert module(changed, seqlen_offset=8) is changed
    close(changed[:, :, 0], wanted(qkv[:, :, 0], of_q, [8, 8]))
    close(changed[:, :, 1], wanted(qkv[:, :, 1], of_k, [8, 8]))
    assert torch.equal(changed[:, :, 2], qkv[:, :, 2])
    q, kv = qkv[:, :, 0].clone(), qkv[:, :, 1:].clone()
    turned, changed = module(q, kv, seqlen_offset=ints([3, 8], device), max_seqlen=21)
    assert turned is q and changed is kv
    close(q, wanted(qkv[:, :, 0], of_q, [3, 8]))
    close(kv[:, :, 0], wanted(qkv[:, :, 1], of_k, [3, 8]))
    assert torch.equal(kv[:, :, 1], qkv[:, :, 2])
    grouped = normal(2, 13, 4 + 2, 40, device=device, dtype=dtype)
    changed = grouped.clone()
    assert module(changed, num_heads_q=2, seqlen_offset=8) is changed
    close(changed[:, :, 2:4], wanted(grouped[:, :, 2:4], of_k, [8, 8]))
    with pytest.raises(ValueError, match="max_seqlen is None"):
        RotaryEmbedding(24)(qkv, seqlen_offset=ints([0, 0], device))


def test_signature_of_rotary_embedding():
    # flash_attn 2.8.3
    import inspect

    def plain(function):
        parameters = list(inspect.signature(function).parameters.values())
        return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))

    assert plain(RotaryEmbedding) == "(dim, base=10000.0, interleaved=False, scale_base=None, device=None)"
    assert plain(RotaryEmbedding.forward) == "(self, qkv, kv=None, seqlen_offset=0, max_seqlen=None, num_heads_q=None)"
    import tilewave.flash_attn.flash_attn_interface as module

    assert module.flash_attn_func is fa2.flash_attn_func and fa2.__version__ == "2.8.3"


def test_concatenated_sequences():
    hidden = normal(3, 6, 2, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    tokens, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(hidden, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert longest == 6 and type(longest) is int
    assert torch.equal(tokens, hidden.flatten(0, 1)[indices])
    values = normal(2, 3).requires_grad_()
    put = index_put_first_axis(values, torch.tensor([3, 0]), 5)
    assert torch.equal(put[[3, 0]], values) and (put[[1, 2, 4]] == 0).all()
    put.sum().backward()
    assert torch.equal(values.grad, torch.ones_like(values))


def test_bert_padding():
    hidden = normal(3, 5, 2, 4)
    used = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 1, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    for of_mask in (used, used.bool()):
        tokens, indices, cu_seqlens, longest, seqused = unpad_input(hidden, of_mask)
        assert indices.tolist() == [0, 1, 5, 6, 7, 8, 9, 13]
        assert torch.equal(tokens, hidden[used.bool()])
        assert cu_seqlens.tolist() == [0, 2, 7, 8] and cu_seqlens.dtype == torch.int32
        assert longest == 5 and type(longest) is int
        assert seqused.tolist() == [2, 5, 1] and seqused.dtype == torch.int32
        assert torch.equal(pad_input(tokens, indices, 3, 5), hidden * used[..., None, None])

        tokens, indices, cu_seqlens, longest, seqused = unpad_input(hidden, of_mask, unused.to(of_mask.dtype))
        assert indices.tolist() == [0, 1, 2, 5, 6, 7, 8, 9, 13, 14]
        assert cu_seqlens.tolist() == [0, 3, 8, 10] and longest == 5
        assert seqused.tolist() == [2, 5, 1]
    assert torch.equal(index_first_axis(hidden, torch.tensor([2, 0, 2])), hidden[[2, 0, 2]])
    hidden.requires_grad_()
    tokens, indices, *_ = unpad_input(hidden, used)
    (pad_input(2 * tokens, indices, 3, 5)).sum().backward()
    assert torch.equal(hidden.grad, 2.0 * used[..., None, None].expand_as(hidden))


@ON_ALL
def test_unpad_and_varlen_give_what_each_sequence_gives(device, dtype):
    mask = torch.zeros(3, 11, dtype=torch.bool)
    lengths = [4, 11, 1]
    for b, length in enumerate(lengths):
        mask[b, :length] = True
    hidden = normal(3, 11, 3, 4, 32, device=device, dtype=dtype)
    tokens, indices, cu_seqlens, longest, _ = unpad_input(hidden, mask.to(device))
    out = pad_input(fa2.flash_attn_varlen_qkvpacked_func(tokens, cu_seqlens, longest, causal=True), indices, 3, 11)
    for b, length in enumerate(lengths):
        q, k, v = hidden[b, :length].unbind(1)
        wanted, _ = attention(q, k, v, causal=True)
        naive, _ = attention(q, k, v, causal=True, rounded=dtype)
        check_out(out[b, :length], wanted, naive)
        assert (out[b, length:] == 0).all()


def check_compiled(function, *arguments):
    """function, which may write its arguments, does the same compiled without a graph break."""
    copies = [[x.clone() for x in arguments] for _ in range(2)]
    wanted = function(*copies[0])
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*copies[1])
    for a, b in zip((*got, *copies[1]), (*wanted, *copies[0])):
        assert torch.equal(a, b)


@ON_ALL
def test_compiled(device, dtype):
    q, k, v = (normal(2, 7, 4, 20, device=device, dtype=dtype) for _ in range(3))
    slopes, cu = torch.rand(4, device=device), ints([0, 5, 14], device)
    cos, sin = rotary_tables(64, 16, device, dtype)

    def call(q, k, v, k_cache, v_cache):
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        return (
            *fa2.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)[:2],
            *fa2.flash_attn_varlen_func(*packed, cu, cu, 9, 9, causal=True, alibi_slopes=slopes, return_attn_probs=True)[:2],
            *fa3.flash_attn_func(q, k, v, window_size=(2, 1), softcap=3.0, return_attn_probs=True),
            *fa2.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, cache_seqlens=3, causal=True, return_softmax_lse=True),
            fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=ints([3, 20], device)),
        )

    check_compiled(call, q, k, v, *normal(2, 2, 32, 4, 20, device=device, dtype=dtype))


@ON_ALL
def test_compiled_rotary(device, dtype):
    q, k, v = (normal(2, 7, 4, 32, device=device, dtype=dtype) for _ in range(3))
    cos, sin = rotary_tables(64, 16, device, dtype)
    lengths, leftpad, cu = ints([3, 20], device), ints([1, 0], device), ints([0, 5, 14], device)

    def call(q, k, v, k_cache, v_cache):
        tables = {"rotary_cos": cos, "rotary_sin": sin}
        return (
            fa3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, cache_leftpad=leftpad, causal=True, **tables),
            apply_rotary_emb(v.flatten(0, 1), cos, sin, seqlen_offsets=lengths, cu_seqlens=cu, max_seqlen=9),
            apply_rotary_emb(q, cos, sin, inplace=True),
        )

    check_compiled(call, q, k, v, *normal(2, 2, 32, 4, 32, device=device, dtype=dtype))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: fa2.flash_attn_func(x, x, x, causal=True, return_attn_probs=True)[0],
        lambda x: fa2.flash_attn_qkvpacked_func(torch.stack([x, x, x], 2)),
        lambda x: fa3.flash_attn_varlen_func(*[x.flatten(0, 1)] * 3, *[ints([0, 4])] * 2, 4, 4),
        lambda x: fa3.flash_attn_with_kvcache(x, x.detach(), x.detach()),
        lambda x: apply_rotary_emb(2 * x, *rotary_tables(4, 16, "cpu", torch.float32), inplace=True),
        lambda x: apply_rotary_emb_kv_(torch.stack([x, x], 2), *rotary_tables(4, 16, "cpu", torch.float32)),
    ],
)
def test_forward_of_what_requires_grad(call):
    x = normal(1, 4, 2, 20)
    wanted = call(x)
    x.requires_grad_()
    out = call(x)
    assert torch.equal(out, wanted) and out.requires_grad
    with pytest.raises(NotImplementedError, match="has no backward yet"):
        out.sum().backward()
    with torch.no_grad():
        assert not call(x).requires_grad


def case(error, match, call):
    return pytest.param(error, match, call, id=match)


X = torch.zeros(2, 8, 4, 32)
FLAT = torch.zeros(16, 4, 32)
CU = torch.tensor([0, 8, 16], dtype=torch.int32)
KV1 = torch.zeros(2, 8, 1, 32)
TABLE = torch.zeros(8, 8)
PAGES = torch.zeros(2, 1, dtype=torch.int32)
LENGTHS = torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    "error, match, call",
    [
        case(NotImplementedError, "dropout_p", lambda: fa2.flash_attn_func(X, X, X, 0.1)),
        case(NotImplementedError, "dropout_p is", lambda: fa2.flash_attn_varlen_func(FLAT, FLAT, FLAT, CU, CU, 8, 8, 0.5)),
        case(NotImplementedError, "dropout_p is 0.2", lambda: fa2.flash_attn_qkvpacked_func(None, 0.2)),
        case(NotImplementedError, "dropout_p is 0.3", lambda: fa2.flash_attn_varlen_func(X[0, 0], FLAT, None, CU, CU, 8, 8, 0.3)),
        case(ValueError, "softmax_scale is inf", lambda: fa2.flash_attn_func(X, X, X, softmax_scale=math.inf)),
        case(ValueError, "softmax_scale is nan", lambda: fa3.flash_attn_func(X, X, X, softmax_scale=math.nan)),
        case(
            ValueError,
            "^block_table has shape",
            lambda: fa2.flash_attn_varlen_func(FLAT, X, X, CU, CU, 8, 8, block_table=PAGES[:1]),
        ),
        case(NotImplementedError, "k is torch.float8", lambda: fa2.flash_attn_func(X[0], X.to(torch.float8_e4m3fn), None)),
        case(NotImplementedError, "v_cache is torch.float8", lambda: fa3.flash_attn_with_kvcache(X[0], X, X.to(torch.float8_e5m2))),
        case(NotImplementedError, "qkv is torch.float8", lambda: fa2.flash_attn_qkvpacked_func(X.to(torch.float8_e4m3fn))),
        case(NotImplementedError, "kv is torch.float8", lambda: fa2.flash_attn_kvpacked_func(None, X.to(torch.float8_e4m3fn))),
        case(NotImplementedError, "q is torch.float8", lambda: fa3.flash_attn_func(*[X.to(torch.float8_e4m3fn)] * 3)),
        case(NotImplementedError, "^qv", lambda: fa3.flash_attn_func(X, X, X, qv=X)),
        case(NotImplementedError, "^q_descale", lambda: fa3.flash_attn_func(X, X, X, q_descale=X)),
        case(NotImplementedError, "^k_descale", lambda: fa3.flash_attn_qkvpacked_func(X[:, :, None].expand(2, 8, 3, 4, 32), k_descale=X)),
        case(NotImplementedError, "^v_descale", lambda: fa3.flash_attn_with_kvcache(X, X, X, v_descale=X)),
        case(NotImplementedError, "^attention_chunk", lambda: fa3.flash_attn_func(X, X, X, attention_chunk=4)),
        case(ValueError, "^cu_seqlens_k_new is given without", lambda: fa3.flash_attn_with_kvcache(X, X, X, cu_seqlens_k_new=CU)),
        case(ValueError, "^q has shape", lambda: fa3.flash_attn_with_kvcache(X, X, X, cu_seqlens_q=CU)),
        case(
            ValueError,
            "^page_table has shape",
            lambda: fa3.flash_attn_with_kvcache(FLAT, X, X, cu_seqlens_q=CU, page_table=PAGES[:1]),
        ),
        case(NotImplementedError, "^get_scheduler_metadata", lambda: fa3.get_scheduler_metadata(1, 1, 1, 1, 1, 64, LENGTHS)),
        case(ValueError, "^k_cache has shape .*pages of 0", lambda: fa2.flash_attn_with_kvcache(X, *[X[:, :0]] * 2, block_table=PAGES)),
        case(ValueError, "^cache_seqlens is 4294967297", lambda: fa2.flash_attn_with_kvcache(X, X, X, cache_seqlens=(1 << 32) + 1)),
        case(TypeError, "^q is a list", lambda: fa2.flash_attn_func([1.0], X, X)),
        case(TypeError, "^q has dtype torch.float64", lambda: fa2.flash_attn_func(X.double(), X, X)),
        case(TypeError, "^v has dtype", lambda: fa2.flash_attn_func(X, X, X.half())),
        case(TypeError, "^alibi_slopes", lambda: fa2.flash_attn_func(X, X, X, alibi_slopes=torch.zeros(4).half())),
        case(ValueError, "alibi_slopes is", lambda: fa2.flash_attn_func(X, X, X, alibi_slopes=torch.zeros(3))),
        case(ValueError, "^k has shape", lambda: fa2.flash_attn_func(X, X[0], X)),
        case(ValueError, "^k has a batch of 1", lambda: fa2.flash_attn_func(X, X[:1], X[:1])),
        case(ValueError, "^k has head dimension 16", lambda: fa2.flash_attn_func(X, X[..., :16], X)),
        case(ValueError, "^v has shape", lambda: fa2.flash_attn_func(X, X, X[:, :7])),
        case(ValueError, "^q has 4 heads; kv has 3", lambda: fa2.flash_attn_kvpacked_func(X, torch.zeros(2, 8, 2, 3, 32))),
        case(NotImplementedError, "^q's head dimension is 264", lambda: fa2.flash_attn_func(*[torch.zeros(1, 1, 1, 264)] * 3)),
        case(NotImplementedError, "^v's head dimension is 520", lambda: fa3.flash_attn_func(X, X, torch.zeros(2, 8, 4, 520))),
        case(ValueError, "^attention_mask_in_length", lambda: unpad_input_for_concatenated_sequences(X, torch.ones(2, 7))),
        case(ValueError, "^values has shape", lambda: index_put_first_axis(X, CU[None], 5)),
        case(ValueError, "^num_heads_q is 5", lambda: apply_rotary_emb_qkv_(X, TABLE, TABLE, num_heads_q=5)),
        case(ValueError, "^kv has shape", lambda: apply_rotary_emb_kv_(X[:, :, None].expand(2, 8, 3, 4, 32), TABLE, TABLE)),
        case(ValueError, "^qkv has shape", lambda: fa2.flash_attn_qkvpacked_func(torch.zeros(2, 8, 2, 4, 32))),
        case(ValueError, "^num_heads_q is None", lambda: fa3.flash_attn_qkvpacked_func(X)),
        case(ValueError, "^num_heads_q is 3", lambda: fa3.flash_attn_qkvpacked_func(X, num_heads_q=3)),
        case(TypeError, "^cu_seqlens_q has dtype", lambda: fa2.flash_attn_varlen_func(FLAT, FLAT, FLAT, CU.long(), CU, 8, 8)),
        case(ValueError, "^cu_seqlens_k has shape", lambda: fa3.flash_attn_varlen_func(FLAT, FLAT, FLAT, CU, CU[:2], 8, 8)),
        case(
            TypeError,
            "^cu_seqlens is a NoneType",
            lambda: fa2.flash_attn_varlen_qkvpacked_func(FLAT[:, None].expand(16, 3, 4, 32), None, 8),
        ),
        case(ValueError, "^seqused_k has shape", lambda: fa3.flash_attn_varlen_func(FLAT, FLAT, FLAT, CU, CU, 8, 8, seqused_k=CU)),
        case(TypeError, "^cache_seqlens has dtype", lambda: fa2.flash_attn_with_kvcache(X, X, X, cache_seqlens=LENGTHS.long())),
        case(ValueError, "^cache_seqlens has shape", lambda: fa2.flash_attn_with_kvcache(X, X, X, cache_seqlens=CU)),
        case(ValueError, "^cache_seqlens is None", lambda: fa2.flash_attn_with_kvcache(X, X, X, X, X)),
        case(ValueError, r"seqlens\[0\] is 9", lambda: fa2.flash_attn_with_kvcache(X, X, X, cache_seqlens=9)),
        case(ValueError, "^v is None", lambda: fa2.flash_attn_with_kvcache(X, X, X, X, cache_seqlens=LENGTHS)),
        case(ValueError, "^v has shape .*wanted", lambda: fa2.flash_attn_with_kvcache(X, X, X, X, KV1, cache_seqlens=LENGTHS)),
        case(ValueError, "^k_cache has a batch of 1", lambda: fa2.flash_attn_with_kvcache(X, X[:1], X[:1])),
        case(ValueError, "^k_cache has stride", lambda: fa2.flash_attn_with_kvcache(X, X.mT.contiguous().mT, X)),
        case(TypeError, "^page_table has dtype", lambda: fa3.flash_attn_with_kvcache(X, X, X, page_table=PAGES.long())),
        case(
            ValueError, "^rotary_cos is given without k", lambda: fa2.flash_attn_with_kvcache(X, X, X, rotary_cos=TABLE, rotary_sin=TABLE)
        ),
        case(
            ValueError,
            "^rotary_sin is None",
            lambda: fa2.flash_attn_with_kvcache(X, X, X, X, X, rotary_cos=TABLE, cache_seqlens=LENGTHS),
        ),
        case(TypeError, "^out_partial", lambda: fa3.flash_attn_combine(X[None].half(), X[None, ..., 0])),
        case(ValueError, "^out has shape", lambda: fa3.flash_attn_combine(X[None], X[None, ..., 0], X[:1])),
        case(ValueError, "^lse_partial", lambda: fa3.flash_attn_combine(X[None], X[None, :, :7, :, 0])),
        case(ValueError, "^cu_seqlens has shape", lambda: apply_rotary_emb(FLAT, TABLE, TABLE, cu_seqlens=CU[:1])),
        case(ValueError, "^seqlen_offsets has shape", lambda: apply_rotary_emb(X, TABLE, TABLE, seqlen_offsets=CU)),
        case(ValueError, "^attention_mask", lambda: unpad_input(X, torch.ones(2, 7))),
    ],
)
def test_errors(error, match, call):
    with pytest.raises(error, match=match):
        call()
