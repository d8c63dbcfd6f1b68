"""flash_attn_with_kvcache() of both versions against attention in float64, on the CPU and on CUDA."""

import math

import pytest

torch = pytest.importorskip("torch")

from flash_reference import (
    ON_ALL,
    VERSIONS,
    as_arguments,
    attention,
    batched,
    check_lse,
    check_out,
    ints,
    normal,
    offsets,
    rotary_tables,
    turn,
    ulp,
    unseen_as,
)
from tilewave import flash_attn as fa2
from tilewave import flash_attn_interface as fa3
from tilewave import ops

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
CHUNKS = {
    "chunks": {"seqlens": [29, 0, 17], "chunk": 8},
    "chunks-leftpad": {"seqlens": [29, 4, 17], "leftpad": [3, 0, 11], "chunk": 5},
    "chunks-rotary": {"seqlens": [29, 0, 17], "new": 5, "chunk": 6, "rotary": (16, True)},
    "chunks-pages-causal": {"seqlens": [29, 3, 17], "page_size": 16, "new": 5, "causal": True, "chunk": 10, "num_splits": 2},
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
    advance = case.get("causal", False) or case.get("window", (-1, -1)) != (-1, -1) or case.get("chunk", 0) > 0
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
    rules = {name: case[name] for name in ("causal", "window", "softcap", "scale", "chunk") if name in case}
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
@pytest.mark.parametrize("seqlen_q", [1, 5])
@pytest.mark.parametrize("name", CHUNKS)
def test_kvcache_chunks(name, seqlen_q, device, dtype):
    case = CHUNKS[name]
    (out, lse, *_), of_sequences, check_caches = run_cache(fa3, case, seqlen_q, 64, device, dtype, return_softmax_lse=True)
    check_cache_result(fa3, case, out, lse, of_sequences, dtype)
    check_caches()


@ON_ALL
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("dim, value_dim", [(64, 256), (18, 40), (64, 512)])
@pytest.mark.parametrize("layout", ["contiguous", "neighbours", "pages"])
def test_kvcache_qv(layout, dim, value_dim, seqlen_q, causal, device, dtype):
    if value_dim == 512:
        dtype = torch.bfloat16 if dtype == torch.float32 else dtype
    lengths = [29, 0, 17]
    q, qv = (normal(3, seqlen_q, 4, n, device=device, dtype=dtype) for n in (dim, value_dim))
    rows = normal(3, 37, 1, value_dim + dim, dtype=dtype)
    for b, length in enumerate(lengths):
        rows[b, length:] = math.nan
    given = {"cache_seqlens": ints(lengths, device)}
    cache = rows.to(device)
    if layout == "pages":
        cache = torch.full((3 * 3 + 1, 16, 1, value_dim + dim), math.nan, dtype=dtype, device=device)
        table = torch.randperm(9).view(3, 3)
        for b in range(3):
            for at in range(lengths[b]):
                cache[table[b, at // 16], at % 16] = rows[b, at].to(device)
        given["page_table"] = table.to(device, torch.int32)
    v_cache, k_cache = cache[..., :value_dim], cache[..., value_dim:]
    if layout == "contiguous":
        v_cache, k_cache = v_cache.contiguous(), k_cache.contiguous()
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv, causal=causal, return_softmax_lse=True, **given)
    for b, length in enumerate(lengths):
        of_b = q[b], rows[b, :length, :, value_dim:], rows[b, :length, :, :value_dim]
        wanted, wanted_lse = attention(*of_b, causal=causal, qv=qv[b])
        check_out(out[b], wanted, attention(*of_b, causal=causal, qv=qv[b], rounded=dtype)[0])
        check_lse(lse[b], wanted_lse)


@ON_ALL
def test_kvcache_qv_of_packed_queries(device, dtype):
    for value_dim in (256, 512):
        dtype = torch.bfloat16 if dtype == torch.float32 and value_dim == 512 else dtype
        q, qv = (normal(3, 4, n, device=device, dtype=dtype) for n in (64, value_dim))
        k_cache, v_cache = (normal(3, 21, 1, n, device=device, dtype=dtype) for n in (64, value_dim))
        wanted = fa3.flash_attn_with_kvcache(q[:, None], k_cache, v_cache, qv=qv[:, None], causal=True, return_softmax_lse=True)
        packed = {"cu_seqlens_q": offsets([1, 1, 1], device), "max_seqlen_q": 1}
        out, lse, *_ = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv, causal=True, return_softmax_lse=True, **packed)
        assert torch.equal(out, wanted[0][:, 0]) and torch.equal(lse, wanted[1][:, :, 0].T)


def test_latent_cache_is_not_copied(monkeypatch):
    cache = normal(2, 30, 1, 576, dtype=torch.bfloat16)
    q, qv = (normal(2, 1, 4, n, dtype=torch.bfloat16) for n in (64, 512))
    seen, decode = [], ops.mla_decode
    monkeypatch.setattr(ops, "mla_decode", lambda q, kv, **options: seen.append(kv.data_ptr()) or decode(q, kv, **options))
    out = fa3.flash_attn_with_kvcache(q, cache[..., 512:], cache[..., :512], qv=qv)
    apart = fa3.flash_attn_with_kvcache(q, cache[..., 512:].contiguous(), cache[..., :512].contiguous(), qv=qv)
    assert torch.equal(out, apart) and torch.equal(out, fa3.flash_attn_func(q, cache[..., 512:], cache[..., :512], qv=qv))
    assert [pointer == cache.data_ptr() for pointer in seen] == [True, False, True]


def metadata(device, **changes):
    given = {"batch_size": 2, "max_seqlen_q": 1, "max_seqlen_k": 4096, "num_heads_q": 8, "num_heads_kv": 2, "headdim": 64, **changes}
    return fa3.get_scheduler_metadata(**given, cache_seqlens=ints([4096] * given["batch_size"], device))


@ON_ALL
def test_scheduler_metadata(device, dtype, monkeypatch):
    plan = metadata(device)
    assert plan.dtype == torch.int32 and plan.device.type == device and (plan == len(plan)).all()
    assert len(metadata(device, num_splits=7)) == 7 and len(metadata(device, num_splits=1000)) == 128
    assert len(metadata(device, max_seqlen_q=100)) == 1
    assert len(metadata(device, max_seqlen_k=64)) == len(metadata(device, max_seqlen_k=4096, attention_chunk=64)) == 1
    q, caches = normal(2, 1, 8, 64, device=device, dtype=dtype), [normal(2, 700, 2, 64, device=device, dtype=dtype) for _ in range(2)]
    given, decode = [], ops.attention_decode

    def recorded(*arguments, num_splits, **options):
        given.append(num_splits)
        return decode(*arguments, num_splits=num_splits, **options)

    monkeypatch.setattr(ops, "attention_decode", recorded)
    out = fa3.flash_attn_with_kvcache(q, *caches, scheduler_metadata=metadata(device, num_splits=3))
    assert torch.equal(out, fa3.flash_attn_with_kvcache(q, *caches, num_splits=3))
    fa3.flash_attn_with_kvcache(q, *caches, scheduler_metadata=metadata(device, num_splits=3), num_splits=5)
    fa3.flash_attn_with_kvcache(q, *caches)
    assert given == [3, 3, 5, 0]


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
