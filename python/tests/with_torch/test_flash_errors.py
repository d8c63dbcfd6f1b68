"""FlashAttention's functions under torch.compile() and autograd, and what they refuse."""

import math

import pytest

torch = pytest.importorskip("torch")

from flash_reference import ON_ALL, ints, normal, rotary_tables
from tilewave import flash_attn as fa2
from tilewave import flash_attn_interface as fa3
from tilewave.flash_attn.bert_padding import index_put_first_axis, unpad_input, unpad_input_for_concatenated_sequences
from tilewave.flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_


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


def of_width(columns):
    return torch.zeros(2, 8, 4, columns)


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
        case(ValueError, "dropout_p is 1.0", lambda: fa2.flash_attn_func(X, X, X, 1.0)),
        case(ValueError, "dropout_p is -0.5", lambda: fa2.flash_attn_varlen_func(FLAT, FLAT, FLAT, CU, CU, 8, 8, -0.5)),
        case(ValueError, "dropout_p is nan", lambda: fa2.flash_attn_qkvpacked_func(None, math.nan)),
        case(ValueError, "dropout_p is 2", lambda: fa2.flash_attn_varlen_func(X[0, 0], FLAT, None, CU, CU, 8, 8, 2)),
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
        case(NotImplementedError, "q is torch.float8_e5m2", lambda: fa3.flash_attn_func(*[X.to(torch.float8_e5m2)] * 3)),
        case(NotImplementedError, "qkv is torch.float8_e5m2", lambda: fa3.flash_attn_qkvpacked_func(X.to(torch.float8_e5m2))),
        case(NotImplementedError, "softmax_scale is -1", lambda: fa3.flash_attn_func(*[X.to(torch.float8_e4m3fn)] * 3, softmax_scale=-1.0)),
        case(ValueError, "^qv has shape", lambda: fa3.flash_attn_func(X, X, X, qv=X[:, :1])),
        case(TypeError, "^qv has dtype", lambda: fa3.flash_attn_func(X, X, X, qv=X.half())),
        case(TypeError, "^qv is a list", lambda: fa3.flash_attn_with_kvcache(X, X, X, qv=[1])),
        case(NotImplementedError, "^qv", lambda: fa3.flash_attn_func(*[X.to(torch.float8_e4m3fn)] * 3, qv=X.to(torch.float8_e4m3fn))),
        case(NotImplementedError, "^q's head dimension is 136", lambda: fa3.flash_attn_func(of_width(136), of_width(136), X, qv=X)),
        case(NotImplementedError, "^softmax_scale is -1", lambda: fa3.flash_attn_func(X, X, X, qv=X, softmax_scale=-1.0)),
        case(NotImplementedError, "^v's head dimension is 264", lambda: fa3.flash_attn_func(X, X, of_width(264), qv=of_width(264))),
        case(
            NotImplementedError,
            "^window is",
            lambda: fa3.flash_attn_func(of_width(64), of_width(64), of_width(512), qv=of_width(512), window_size=(3, 0)),
        ),
        case(NotImplementedError, "^kv_heads is", lambda: fa3.flash_attn_func(of_width(64), of_width(64), of_width(512), qv=of_width(512))),
        case(ValueError, "q_descale is given, but q is", lambda: fa3.flash_attn_func(X, X, X, q_descale=X)),
        case(ValueError, "k_descale is", lambda: fa3.flash_attn_func(*[X.to(torch.float8_e4m3fn)] * 3, k_descale=X)),
        case(ValueError, "v_descale is given, but q is", lambda: fa3.flash_attn_with_kvcache(X, X, X, v_descale=X)),
        case(
            NotImplementedError,
            "^rotary_cos is given",
            lambda: fa3.flash_attn_with_kvcache(
                *[X.to(torch.float8_e4m3fn)] * 5, rotary_cos=TABLE, rotary_sin=TABLE, cache_seqlens=LENGTHS
            ),
        ),
        case(ValueError, "^attention_chunk is -4", lambda: fa3.flash_attn_func(X, X, X, attention_chunk=-4)),
        case(TypeError, "^attention_chunk is 4.5", lambda: fa3.flash_attn_with_kvcache(X, X, X, attention_chunk=4.5)),
        case(ValueError, "^sm_margin is -1", lambda: fa3.flash_attn_varlen_func(FLAT, FLAT, FLAT, CU, CU, 8, 8, sm_margin=-1)),
        case(TypeError, "^scheduler_metadata has dtype", lambda: fa3.flash_attn_with_kvcache(X, X, X, scheduler_metadata=torch.zeros(4))),
        case(ValueError, "^scheduler_metadata has 0", lambda: fa3.flash_attn_with_kvcache(X, X, X, scheduler_metadata=CU[:0])),
        case(ValueError, "^scheduler_metadata has shape", lambda: fa3.flash_attn_with_kvcache(X, X, X, scheduler_metadata=CU[None])),
        case(ValueError, "^cu_seqlens_k_new is given without", lambda: fa3.flash_attn_with_kvcache(X, X, X, cu_seqlens_k_new=CU)),
        case(ValueError, "^q has shape", lambda: fa3.flash_attn_with_kvcache(X, X, X, cu_seqlens_q=CU)),
        case(
            ValueError,
            "^page_table has shape",
            lambda: fa3.flash_attn_with_kvcache(FLAT, X, X, cu_seqlens_q=CU, page_table=PAGES[:1]),
        ),
        case(ValueError, "heads is 3.*multiple of kv_heads, 2", lambda: fa3.get_scheduler_metadata(len(LENGTHS), 1, 1, 3, 2, 64, LENGTHS)),
        case(ValueError, "^cache_seqlens has shape", lambda: fa3.get_scheduler_metadata(77, 1, 1, 2, 2, 64, LENGTHS)),
        case(TypeError, "^cache_seqlens is a list", lambda: fa3.get_scheduler_metadata(1, 1, 1, 2, 2, 64, [5])),
        case(ValueError, "seqlen_k is -5", lambda: fa3.get_scheduler_metadata(len(LENGTHS), 1, -5, 2, 2, 64, LENGTHS)),
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
        case(ValueError, "^v has shape .*allowed", lambda: fa2.flash_attn_with_kvcache(X, X, X, X, KV1, cache_seqlens=LENGTHS)),
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
