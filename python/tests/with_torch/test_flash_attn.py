"""tilewave.flash_attn and tilewave.flash_attn_interface against attention in float64, on the CPU and on CUDA; caches, rotary embedding,
padding and bad arguments have files of their own."""

import math

import pytest

torch = pytest.importorskip("torch")

from flash_reference import (
    ON_ALL,
    PLACES,
    VERSIONS,
    as_arguments,
    attention,
    batched,
    check_lse,
    check_out,
    ints,
    normal,
    offsets,
    same_call,
    unseen_as,
)
from tilewave import flash_attn as fa2
from tilewave import flash_attn_interface as fa3

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


CHUNKS = [{"chunk": 1}, {"chunk": 8}, {"chunk": 10, "causal": True}, {"chunk": 16, "window": (5, 3)}, {"chunk": 1 << 40}]


@ON_ALL
@pytest.mark.parametrize("rules", CHUNKS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks(rules, shape, device, dtype):
    seqlen_q, seqlen_k, heads, kv_heads, dim, value_dim = shape
    q = normal(2, seqlen_q, heads, dim, device=device, dtype=dtype)
    k = normal(2, seqlen_k, kv_heads, dim, device=device, dtype=dtype)
    v = normal(2, seqlen_k, kv_heads, value_dim, device=device, dtype=dtype)
    wanted, wanted_lse = map(torch.stack, batched(q, k, v, **rules))
    naive, _ = map(torch.stack, batched(q, k, v, rounded=dtype, **rules))
    out, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True, sm_margin=1, **as_arguments(rules))
    check_out(out, wanted, naive)
    check_lse(lse, wanted_lse)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    cu_q, cu_k = offsets([seqlen_q] * 2, device), offsets([seqlen_k] * 2, device)
    packed = fa3.flash_attn_varlen_func(*flat, cu_q, cu_k, seqlen_q, seqlen_k, **as_arguments(rules))
    check_out(packed.unflatten(0, (2, -1)), wanted, naive)


@ON_ALL
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"window": (5, 3), "scale": 0.1}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("dim, value_dim", [(64, 256), (24, 40), (13, 13)])
def test_qv(rules, dim, value_dim, device, dtype):
    q, qv = (normal(2, 19, 4, n, device=device, dtype=dtype) for n in (dim, value_dim))
    k, v = (normal(2, 31, 2, n, device=device, dtype=dtype) for n in (dim, value_dim))
    wanted, wanted_lse = map(torch.stack, batched(q, k, v, qv=qv, **rules))
    naive, _ = map(torch.stack, batched(q, k, v, qv=qv, rounded=dtype, **rules))
    out, lse = fa3.flash_attn_func(q, k, v, qv=qv, return_attn_probs=True, **as_arguments(rules))
    check_out(out, wanted, naive)
    check_lse(lse, wanted_lse)
    cu_q, cu_k = offsets([19, 19], device), offsets([31, 31], device)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed = fa3.flash_attn_varlen_func(*flat, cu_q, cu_k, 19, 31, qv=qv.flatten(0, 1), **as_arguments(rules))
    check_out(packed.unflatten(0, (2, -1)), wanted, naive)
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: fa3.flash_attn_func(*x[:3], qv=x[3], **as_arguments(rules)), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, qv), out)


def test_qv_has_no_gradient():
    q, k, v, qv = (normal(1, 5, 2, 16).requires_grad_(n == 3) for n in range(4))
    with pytest.raises(NotImplementedError, match="attention_qv"):
        fa3.flash_attn_func(q, k, v, qv=qv).sum().backward()


@pytest.mark.parametrize("device", sorted({device for device, _ in PLACES}))
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("dim, value_dim", [(64, 64), (13, 40), (128, 300)])
def test_float8(rules, dim, value_dim, device):
    fp8 = torch.float8_e4m3fn
    q = normal(2, 37, 4, dim, device=device, dtype=torch.float32).to(fp8)
    k = normal(2, 53, 2, dim, device=device, dtype=torch.float32).to(fp8)
    v = normal(2, 53, 2, value_dim, device=device, dtype=torch.float32).to(fp8)
    descales = [torch.rand(2, 2, device=device) + 0.5 for _ in range(3)]
    of_q = descales[0].repeat_interleave(2, dim=1)
    in_f32 = [x.float() * d[:, None, :, None] for x, d in zip((q, k, v), (of_q, *descales[1:]))]
    wanted, wanted_lse = map(torch.stack, batched(*in_f32, **rules))
    given = dict(zip(("q_descale", "k_descale", "v_descale"), descales))
    out, lse = fa3.flash_attn_func(q, k, v, return_attn_probs=True, **given, **as_arguments(rules))
    assert out.dtype == torch.bfloat16
    error = out.double().cpu() - wanted.cpu()
    assert error.norm() <= 0.05 * wanted.norm()  # weights of e4m3
    assert ((lse.double().cpu() - wanted_lse.cpu()).abs() <= 1e-2).logical_or(wanted_lse.cpu() == -math.inf).all()
    assert torch.equal(fa3.flash_attn_func(q, k, v, **given, **as_arguments(rules)), out)


@pytest.mark.parametrize("device", sorted({device for device, _ in PLACES}))
@pytest.mark.parametrize("rules", [{}, {"causal": True, "window": (9, -1)}], ids=str)
@pytest.mark.parametrize("dim", [64, 20])
def test_float8_sequences(rules, dim, device):
    fp8, lengths_q, lengths_k = torch.float8_e4m3fn, [13, 0, 21], [40, 7, 33]
    q = normal(34, 4, dim, device=device).to(fp8)
    k, v = (normal(80, 2, dim, device=device).to(fp8) for _ in range(2))
    descales = [torch.rand(3, 2, device=device) + 0.5 for _ in range(3)]
    given = dict(zip(("q_descale", "k_descale", "v_descale"), descales))
    cu_q, cu_k = offsets(lengths_q, device), offsets(lengths_k, device)
    out, lse = fa3.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 21, 40, return_attn_probs=True, **given, **as_arguments(rules))
    assert out.dtype == torch.bfloat16
    for b in (0, 2):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        of_b = [
            x.float() * d[b].repeat_interleave(x.shape[1] // 2)[:, None] for x, d in zip((q[rows], k[keys], v[keys]), descales)
        ]
        wanted, wanted_lse = attention(*of_b, **rules)
        assert (out[rows].double().cpu() - wanted).norm() <= 0.02 * wanted.norm()
        check_lse(lse[:, rows], wanted_lse)


@pytest.mark.parametrize("device", sorted({device for device, _ in PLACES}))
@pytest.mark.parametrize("paged", [False, True], ids=["", "paged"])
def test_float8_cache(paged, device):
    fp8, lengths = torch.float8_e4m3fn, [29, 0, 47]
    q, new_k, new_v = (normal(3, 2, heads, 64, device=device).to(fp8) for heads in (4, 2, 2))
    caches = [normal(3, 64, 2, 64, device=device).to(fp8) for _ in range(2)]
    descales = [torch.rand(3, 2, device=device) + 0.5 for _ in range(3)]
    given = {**dict(zip(("q_descale", "k_descale", "v_descale"), descales)), "cache_seqlens": ints(lengths, device)}
    if paged:
        given["page_table"] = torch.arange(11, -1, -1, device=device, dtype=torch.int32).view(3, 4)
        k_cache, v_cache = (x.view(torch.uint8).reshape(12, 16, 2, 64).flip(0).contiguous().view(fp8) for x in caches)
    else:
        k_cache, v_cache = (x.clone() for x in caches)
    out, lse, *_ = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, causal=True, return_softmax_lse=True, **given)
    assert out.dtype == torch.bfloat16
    for b, length in enumerate(lengths):
        k, v = (torch.cat([x[b, :length].float(), new[b].float()]) for x, new in zip(caches, (new_k, new_v)))
        of_b = [x.float() * d[b].repeat_interleave(x.shape[1] // 2)[:, None] for x, d in zip((q[b], k, v), descales)]
        wanted, wanted_lse = attention(*of_b, causal=True)
        assert (out[b].double().cpu() - wanted).norm() <= 0.02 * wanted.norm()
        check_lse(lse[b], wanted_lse)


def test_float8_packed():
    qkv = torch.randn(2, 21, 3, 4, 32).to(torch.float8_e4m3fn)
    descale = torch.tensor([0.5]).expand(2, 4)  # one for all
    wanted = fa3.flash_attn_func(*qkv.unbind(2), causal=True, k_descale=descale)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, causal=True, k_descale=descale), wanted)


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
