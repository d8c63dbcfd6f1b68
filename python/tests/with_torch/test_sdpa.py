"""scaled_dot_product_attention() against PyTorch's in float64; what stands in for it in PyTorch and in transformers."""

import math
import threading
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import tilewave
import torch.nn.functional as F
from tilewave import sdpa

SEED = np.random.SeedSequence().entropy % 2**31
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
CASES = [(d, t) for d in DEVICES for t in (torch.float32, torch.float16, torch.bfloat16) if (d, t) != ("cuda", torch.float32)]
L2 = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PYTORCH = torch._C._nn.scaled_dot_product_attention


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0]}-{str(c[1])[6:]}")
def place(request):
    return request.param


@pytest.fixture(autouse=True)
def seed(request):
    print(f"seed {SEED}")  # shown where a test fails
    torch.manual_seed(SEED)
    request.addfinalizer(tilewave.uninstall_sdpa)
    with torch.no_grad():
        yield np.random.default_rng(SEED)


def in_float64(q, k, v, mask, is_causal, scale):
    """PyTorch's, heads repeated; 0 where a query sees nothing (older versions give NaN)."""
    if mask is not None:  # whole: PyTorch 2.4 is wrong where a mask is one key wide
        mask = (mask if mask.dtype == torch.bool else mask.double()).expand(*q.shape[:-1], k.shape[-2]).contiguous()
    q, k, v = q.double(), k.double(), v.double()
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    return PYTORCH(q, k, v, mask, 0.0, is_causal, scale=scale).nan_to_num(0.0)


def naive(q, k, v, mask, is_causal, scale):
    """Step by step, each rounded to the dtype, sums in f32."""
    dtype = q.dtype
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = ((q.float() @ k.float().transpose(-1, -2)).to(dtype) * scale).to(dtype)
    if is_causal:
        mask = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else (s + mask).to(dtype)
    p = torch.softmax(s.float(), -1).to(dtype).nan_to_num(0.0)
    return (p.float() @ v.float()).to(dtype)


def check(out, arguments, what=""):
    reference, simple = in_float64(*arguments), naive(*arguments)
    assert out.shape == reference.shape and out.dtype == simple.dtype, what
    if not out.numel():
        return
    largest = reference.abs().max().item()
    ulp = torch.finfo(out.dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest > 0 else 0.0
    bound = 2 * (simple.double() - reference).abs().max().item() + 2 * ulp + 1e-5
    error = (out.double() - reference).abs().max().item()
    assert error <= bound, f"{what}: {error} > {bound}"
    assert (out.double() - reference).norm() <= L2[out.dtype] * reference.norm() + 1e-12, what


def normal(*shape, device="cpu", dtype=torch.float32, layout=0):
    """layout 1: as of [..., seqlen, heads, dim]; 2: rows with a gap; 3: the last dimension not contiguous."""
    if layout == 1 and len(shape) > 2:
        return torch.randn(*shape[:-3], shape[-2], shape[-3], shape[-1], device=device).to(dtype).transpose(-3, -2)
    if layout == 2:
        return torch.randn(*shape[:-1], shape[-1] + 8, device=device).to(dtype)[..., : shape[-1]]
    if layout == 3:
        return torch.randn(*shape[:-2], shape[-1], shape[-2], device=device).to(dtype).transpose(-1, -2)
    return torch.randn(*shape, device=device).to(dtype)


def sampled(random, device, dtype):
    rank = int(random.choice([2, 3, 4, 4, 4, 5]))
    lead = [int(n) for n in random.integers(1, 4, max(rank - 3, 0))]
    kv_heads, group = int(random.integers(1, 4)), int(random.choice([1, 1, 2, 3]))
    seqlen_q, seqlen_k = (int(random.choice([1, 2, 5, 16, 31, 64, 67, 129])) for _ in range(2))
    head_dim, value_dim = int(random.choice([8, 16, 20, 33, 64, 128])), int(random.choice([8, 24, 30, 64]))
    layout = int(random.integers(0, 4))
    where = {"device": device, "dtype": dtype, "layout": layout}
    q = normal(*lead, *([kv_heads * group] if rank > 2 else []), seqlen_q, head_dim, **where)
    k = normal(*lead, *([kv_heads] if rank > 2 else []), seqlen_k, head_dim, **where)
    v = normal(*lead, *([kv_heads] if rank > 2 else []), seqlen_k, value_dim, **where)
    kind = str(random.choice(["none", "causal", "bool", "own dtype", "float32"]))
    mask = None
    if kind not in ("none", "causal"):
        scores = (*q.shape[:-1], seqlen_k)
        shape = [n if random.random() < 0.6 else 1 for n in scores[rank - int(random.integers(2, rank + 1)) :]]
        if kind == "bool":
            mask = torch.rand(shape, device=device) > 0.4  # some rows see nothing
        else:
            mask = torch.randn(shape, device=device).masked_fill(torch.rand(shape, device=device) > 0.8, -math.inf)
            mask = mask.to(dtype if kind == "own dtype" else torch.float32)
    scale = None if random.random() < 0.7 else float(random.uniform(0.05, 1))
    shapes = f"{tuple(q.shape)} {tuple(k.shape)} {tuple(v.shape)} layout {layout} {kind} {None if mask is None else tuple(mask.shape)}"
    return (q, k, v, mask, kind == "causal", scale), f"{shapes} scale {scale}"


def test_sampled_cases(place, seed):
    for _ in range(60):
        arguments, what = sampled(seed, *place)
        q, k, v, mask, is_causal, scale = arguments
        out = tilewave.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal, scale, enable_gqa=q.dim() > 2)
        assert tilewave.why_fallback() is None, what
        check(out, arguments, what)


def test_no_keys_and_rows_that_see_nothing(place):
    device, dtype = place
    q, k = normal(2, 3, 5, 16, device=device, dtype=dtype), normal(2, 3, 7, 16, device=device, dtype=dtype)
    assert not tilewave.scaled_dot_product_attention(q, k[:, :, :0], k[:, :, :0]).any()
    mask = torch.ones(5, 7, dtype=torch.bool, device=device)
    mask[2] = False
    out = tilewave.scaled_dot_product_attention(q, k, k, mask)
    assert not out[:, :, 2].any() and out[:, :, [0, 1, 3, 4]].all()
    check(out, (q, k, k, mask, False, None))


def test_views_are_not_copied(monkeypatch):
    q = normal(2, 4, 5, 64, layout=1)
    taken = []
    attention = sdpa.ops.attention
    monkeypatch.setattr(sdpa.ops, "attention", lambda *a, **b: taken.extend(a) or attention(*a, **b))
    for x in (q, q.contiguous(), normal(2, 4, 5, 64, layout=2)):
        tilewave.scaled_dot_product_attention(x, x, x)
        assert all(t.data_ptr() == x.data_ptr() and t.shape == (2, 5, 4, 64) for t in taken[-3:])


# ---- arguments ----


@pytest.mark.parametrize(
    "change, error, named",
    [
        ({"query": [1.0]}, TypeError, "query"),
        ({"key": torch.randn(4)}, ValueError, "key"),
        ({"key": torch.randn(2, 4, 7, 8)}, ValueError, "key"),
        ({"value": torch.randn(2, 4, 6, 16)}, ValueError, "value"),
        ({"attn_mask": 1}, TypeError, "attn_mask"),
        ({"attn_mask": torch.zeros(5, 7, dtype=torch.int32)}, TypeError, "attn_mask"),
        ({"attn_mask": torch.ones(5, 7, dtype=torch.bool), "is_causal": True}, ValueError, "is_causal"),
        ({"dropout_p": 1.5}, ValueError, "dropout_p"),
    ],
)
def test_wrong_arguments(change, error, named):
    arguments = {"query": torch.randn(2, 4, 5, 16), "key": torch.randn(2, 4, 7, 16), "value": torch.randn(2, 4, 7, 16), **change}
    with pytest.raises(error, match=named):
        tilewave.scaled_dot_product_attention(**arguments)
    if named in ("value", "is_causal"):
        return  # some of PyTorch's own code takes it; it is asked
    with tilewave.install_sdpa(), pytest.raises((RuntimeError, TypeError, IndexError)):  # PyTorch's own
        F.scaled_dot_product_attention(**arguments)


def fallbacks():
    x = torch.randn(2, 4, 5, 16)
    half = x.half()
    wide = torch.randn(1, 1, 3, 264)
    return [
        ((x, x, x), {"dropout_p": 1.0}, "dropout of 1 or more"),
        ((x.clone().requires_grad_(), x, x), {"dropout_p": 1.0}, "dropout of 1 or more"),
        ((x.double(), x.double(), x.double()), {}, "dtype"),
        ((wide, wide, wide), {}, "head_dim"),
        ((x, x[:1], x[:1]), {}, "batches or heads that differ"),
        ((x, x, x), {"scale": -1.0}, "scale"),
        ((x, x, x), {"scale": 0.0}, "scale"),
        ((x, x, x, torch.ones(5, 5, dtype=torch.bool)), {"is_causal": True}, "attn_mask and is_causal"),
        ((half.to("meta"), half.to("meta"), half.to("meta")), {}, "device"),
    ]


def result_or_error(function, *arguments, **options):
    """The result, or the text of PyTorch's error: versions differ in what they refuse."""
    torch.manual_seed(1)
    try:
        return function(*arguments, **options)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("arguments, options, reason", fallbacks(), ids=lambda x: x if isinstance(x, str) else "")
def test_fallback(arguments, options, reason):
    before = tilewave.sdpa.sdpa_counts().get(reason, 0)
    with torch.enable_grad(), tilewave.install_sdpa():
        out = result_or_error(F.scaled_dot_product_attention, *arguments, **options)
        assert tilewave.why_fallback() == reason
        expected = result_or_error(PYTORCH, *arguments, **options)
    assert tilewave.sdpa.sdpa_counts()[reason] == before + 1
    if isinstance(expected, str):
        assert out == expected
    elif out.device.type == "meta":
        assert out.shape == expected.shape
    else:
        assert out.requires_grad == expected.requires_grad
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
    x = torch.randn(2, 4, 5, 16)
    tilewave.scaled_dot_product_attention(x, x, x)
    assert tilewave.why_fallback() is None


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_fallback_on_cuda():
    x = torch.randn(2, 4, 5, 16, device="cuda")
    torch.testing.assert_close(tilewave.scaled_dot_product_attention(x, x, x), PYTORCH(x, x, x))
    assert tilewave.why_fallback() == "float32 on CUDA"


def test_gpus_of_compute_capability_8_and_higher_run_kernels(monkeypatch):
    majors = [7, 8, 9, 12]
    monkeypatch.setattr(sdpa, "_gpus", {})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(major=majors[index]))
    assert [sdpa._runs_kernels(index) for index in range(len(majors))] == [False, True, True, True]


def test_why_fallback_is_of_the_thread():
    x = torch.randn(2, 4, 5, 16)
    tilewave.scaled_dot_product_attention(x, x, x, dropout_p=1)
    reasons = []

    def other():
        with torch.no_grad():
            reasons.append(tilewave.why_fallback())
            tilewave.scaled_dot_product_attention(x, x, x)
            reasons.append(tilewave.why_fallback())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert reasons == [None, None] and tilewave.why_fallback() == "dropout of 1 or more"


def test_autocast(place):
    device, dtype = place
    if dtype == torch.float32:
        pytest.skip("not a dtype of autocast")
    x = torch.randn(2, 4, 9, 16, device=device)
    with torch.autocast(device, dtype=dtype):
        out = tilewave.scaled_dot_product_attention(x, x, x, is_causal=True)
        assert tilewave.why_fallback() is None
    x = x.to(dtype)
    check(out, (x, x, x, None, True, None))


# ---- in PyTorch's place ----


def test_install_and_uninstall():
    original, fastpath = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    x = torch.randn(2, 4, 5, 16)
    first, again = tilewave.install_sdpa(), tilewave.install_sdpa()
    ours = F.scaled_dot_product_attention
    assert ours is not original
    with again:
        F.scaled_dot_product_attention(x, x, x)
        assert tilewave.why_fallback() is None
    assert F.scaled_dot_product_attention is ours  # the first holds on
    first.uninstall()
    first.uninstall()
    tilewave.uninstall_sdpa()
    assert F.scaled_dot_product_attention is original and torch.backends.mha.get_fastpath_enabled() == fastpath
    with pytest.raises(KeyError), tilewave.install_sdpa():
        assert F.scaled_dot_product_attention is ours
        raise KeyError
    assert F.scaled_dot_product_attention is original
    torch.testing.assert_close(ours(x, x, x), original(x, x, x), rtol=0, atol=0)  # who kept it has PyTorch's again


def test_other_patches_stay(monkeypatch):
    x = torch.randn(2, 4, 5, 16)
    calls = []
    original = F.scaled_dot_product_attention

    def below(*arguments, **options):
        calls.append("below")
        return original(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", below)
    tilewave.install_sdpa()
    ours = F.scaled_dot_product_attention
    ours(x, x, x, dropout_p=1)
    ours(x, x, x)
    assert calls == ["below"]

    def above(*arguments, **options):
        calls.append("above")
        return ours(*arguments, **options)

    F.scaled_dot_product_attention = above
    tilewave.uninstall_sdpa()
    assert F.scaled_dot_product_attention is above
    above(x, x, x)
    assert calls == ["below", "above", "below"]
    F.scaled_dot_product_attention = below


@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention(batch_first):
    module = torch.nn.MultiheadAttention(64, 4, batch_first=batch_first, dropout=0.1).eval()
    x, y = torch.randn(3, 9, 64), torch.randn(3, 9, 64)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(9 if batch_first else 3)
    hidden = torch.zeros((3, 9) if batch_first else (9, 3), dtype=torch.bool)
    hidden[:, 0 if batch_first else -1] = True
    for arguments, options in [
        ((x, x, x), {}),
        ((x, y, y), {}),
        ((x, x, x), {"attn_mask": causal}),
        ((x, x, x), {"attn_mask": causal, "is_causal": True}),
        ((x, x, x), {"key_padding_mask": hidden}),
        ((x, x, x), {"key_padding_mask": hidden, "attn_mask": causal < 0}),
        ((x[0], x[0], x[0]), {}),
    ]:
        with tilewave.install_sdpa():
            before = tilewave.sdpa.sdpa_counts().get("tilewave", 0)
            out, _ = module(*arguments, need_weights=False, **options)
            assert tilewave.sdpa.sdpa_counts()["tilewave"] == before + 1
        expected, _ = module.double()(*(a.double() for a in arguments), need_weights=False, **in_double(options))
        module.float()
        # A query of which all keys are hidden is 0 or NaN in PyTorch, by version and path.
        torch.testing.assert_close(out.double(), expected.nan_to_num(0), rtol=0, atol=2e-6) if not expected.isnan().any() else None


def in_double(options):
    return {n: o.double() if isinstance(o, torch.Tensor) and o.is_floating_point() else o for n, o in options.items()}


def test_transformer_encoder():
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(3, 9, 64)
    expected = model(x)
    with tilewave.install_sdpa():
        before = tilewave.sdpa.sdpa_counts().get("tilewave", 0)
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        assert tilewave.sdpa.sdpa_counts()["tilewave"] == before + 2


def test_causal_bias():
    bias = pytest.importorskip("torch.nn.attention.bias")
    q, k = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 8, 16)
    for mask in (bias.causal_upper_left(5, 8), bias.causal_lower_right(5, 8)):
        expected = F.scaled_dot_product_attention(q, k, k, mask)
        with tilewave.install_sdpa():
            out = F.scaled_dot_product_attention(q, k, k, mask)
            assert tilewave.why_fallback() is None
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_under_vmap():
    x = torch.randn(6, 2, 5, 16)
    with tilewave.install_sdpa():
        out = torch.vmap(lambda x: F.scaled_dot_product_attention(x, x, x))(x)
        assert tilewave.why_fallback() == "torch.func"
    torch.testing.assert_close(out, F.scaled_dot_product_attention(x, x, x))


# ---- transformers ----


def tiny(kind, **changes):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "AttentionInterface"):
        pytest.skip("transformers is too old")
    tilewave.register_transformers()
    tilewave.register_transformers()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        **changes,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(7)  # some models say one word for ever
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        parameter.mul_(10 if parameter.dim() > 1 else 1)  # scores that differ
    return model


def both(model, call):
    """call(model) with attention in PyTorch and in the library; how often the library was called."""
    model.set_attn_implementation("eager")
    expected = call(model)
    model.set_attn_implementation("tilewave")
    before = tilewave.sdpa.sdpa_counts().get("tilewave", 0)
    got = call(model)
    assert tilewave.why_fallback() is None
    return expected, got, tilewave.sdpa.sdpa_counts()["tilewave"] - before


def prompts():
    ids = torch.randint(2, 96, (3, 11))
    attention_mask = torch.ones_like(ids)
    attention_mask[1, :4], attention_mask[2, :7] = 0, 0
    return ids.masked_fill(attention_mask == 0, 0), attention_mask


@pytest.mark.parametrize("padded", [False, True])
def test_llama_gives_the_same_tokens(padded):
    model = tiny("Llama")
    ids, attention_mask = prompts()
    ids, attention_mask = (ids, attention_mask) if padded else (ids[:1], attention_mask[:1])
    options = {"attention_mask": attention_mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected, got, calls = both(model, lambda m: m.generate(ids, **options))
    assert got.tolist() == expected.tolist() and calls == 4 * 12
    assert all(len(set(tokens.tolist())) > 3 for tokens in got[:, 11:])


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("Gemma2", {"attn_logit_softcapping": 2.0, "sliding_window": 4, "query_pre_attn_scalar": 16}),
        ("GptOss", {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}),
        ("Mistral", {"sliding_window": 4}),
    ],
)
def test_softcap_windows_and_sinks(kind, changes):
    model = tiny(kind, **changes)
    ids, attention_mask = prompts()
    for options in ({}, {"attention_mask": attention_mask}):
        expected, got, calls = both(model, lambda m: m(ids, **options).logits)  # noqa: B023
        assert calls == 4
        seen = attention_mask.bool() if options else slice(None)
        scale = expected[seen].abs().max()
        assert (got - expected)[seen].abs().max() < 2e-5 * scale
        assert (expected[seen] - expected[seen].mean(0)).abs().max() > 1e-2 * scale


@pytest.mark.parametrize("sliding_window", [None, 3])
@pytest.mark.parametrize("softcap, sinks, biased", [(None, False, False), (2.0, False, False), (None, True, False), (1.5, True, True)])
def test_training_with_transformers_arguments(sliding_window, softcap, sinks, biased, monkeypatch):
    """By the library and by PyTorch: the same results and gradients, also of a bias."""
    q, k = torch.randn(2, 4, 7, 16, requires_grad=True), torch.randn(2, 2, 7, 16, requires_grad=True)
    v, sink = torch.randn(2, 2, 7, 16, requires_grad=True), torch.randn(4, requires_grad=True) if sinks else None
    bias = torch.randn(1, 4, 7, 7, requires_grad=True) if biased else None
    inputs = [x for x in (q, k, v, sink, bias) if x is not None]
    extra = {"softcap": softcap, "s_aux": sink, "sliding_window": sliding_window}
    for is_causal in (False, True):

        def run():
            out, _ = sdpa.transformers_attention(torch.nn.Module(), q, k, v, None, is_causal=is_causal, position_bias=bias, **extra)  # noqa: B023
            return out, *torch.autograd.grad(out.square().sum(), inputs)

        with torch.enable_grad():
            got = run()
            assert tilewave.why_fallback() is None
            with monkeypatch.context() as patched:
                patched.setattr(sdpa, "_refusal", lambda *_: "a test")
                expected = run()
            assert tilewave.why_fallback() == "a test"
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_installing_registers_with_transformers():
    transformers = pytest.importorskip("transformers")
    interface = getattr(transformers, "AttentionInterface", None)
    if interface is None:
        pytest.skip("transformers is too old")
    import transformers.modeling_utils

    with tilewave.install_sdpa():
        assert "tilewave" in interface._global_mapping
