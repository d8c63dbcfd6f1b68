"""tilewave.flash_attn and tilewave.flash_attn_interface against attention in float64, written out here, on the CPU and on CUDA."""

import math
import zlib

import pytest

torch = pytest.importorskip("torch")

from tilewave import flash_attn as fa2
from tilewave import flash_attn_interface as fa3
from tilewave.flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from tilewave.flash_attn.layers.rotary import apply_rotary_emb

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
        assert probabilities is None
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
        given["block_table" if version is fa2 else "page_table"] = table.to(device, torch.int32)

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


def test_grad_is_refused():
    q = normal(1, 4, 2, 20).requires_grad_()
    k, v = (normal(1, 4, 2, 20) for _ in range(2))
    with pytest.raises(RuntimeError, match="requires grad"):
        fa2.flash_attn_func(q, k, v)
    with torch.no_grad():
        assert fa2.flash_attn_func(q, k, v).shape == q.shape


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
        case(NotImplementedError, "softmax_scale", lambda: fa2.flash_attn_func(X, X, X, softmax_scale=0.0)),
        case(
            NotImplementedError,
            "block_table is not",
            lambda: fa2.flash_attn_varlen_func(FLAT, X, X, CU, CU, 8, 8, block_table=PAGES),
        ),
        case(NotImplementedError, "q is torch.float8", lambda: fa3.flash_attn_func(*[X.to(torch.float8_e4m3fn)] * 3)),
        case(NotImplementedError, "^qv", lambda: fa3.flash_attn_func(X, X, X, qv=X)),
        case(NotImplementedError, "^q_descale", lambda: fa3.flash_attn_func(X, X, X, q_descale=X)),
        case(NotImplementedError, "^k_descale", lambda: fa3.flash_attn_qkvpacked_func(X[:, :, None].expand(2, 8, 3, 4, 32), k_descale=X)),
        case(NotImplementedError, "^v_descale", lambda: fa3.flash_attn_with_kvcache(X, X, X, v_descale=X)),
        case(NotImplementedError, "^attention_chunk", lambda: fa3.flash_attn_func(X, X, X, attention_chunk=4)),
        case(NotImplementedError, "^cu_seqlens_k_new", lambda: fa3.flash_attn_with_kvcache(X, X, X, cu_seqlens_k_new=CU)),
        case(
            NotImplementedError,
            "^cu_seqlens_q is given with page_table",
            lambda: fa3.flash_attn_with_kvcache(FLAT, X, X, cu_seqlens_q=CU, page_table=PAGES),
        ),
        case(NotImplementedError, "^get_scheduler_metadata", lambda: fa3.get_scheduler_metadata(1, 1, 1, 1, 1, 64, LENGTHS)),
        case(NotImplementedError, "page size is 8", lambda: fa2.flash_attn_with_kvcache(X, X, X, block_table=PAGES)),
        case(
            NotImplementedError,
            "^cache_leftpad",
            lambda: fa3.flash_attn_with_kvcache(X, X, X, page_table=PAGES, cache_leftpad=LENGTHS),
        ),
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
        case(ValueError, "^q has head dimension 264", lambda: fa2.flash_attn_func(*[torch.zeros(1, 1, 1, 264)] * 3)),
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
