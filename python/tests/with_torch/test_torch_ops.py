"""torch.ops.tilewave: what PyTorch was told of the operators is so, and compiled functions give what eager ones give."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import tilewave
import torch.nn.functional as F
from tilewave import ops

SEED = np.random.SeedSequence().entropy % 2**31
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
CASES = [(d, t) for d in DEVICES for t in (torch.float32, torch.float16, torch.bfloat16) if (d, t) != ("cuda", torch.float32)]


@pytest.fixture(params=CASES, ids=lambda c: f"{c[0]}-{str(c[1])[6:]}")
def normal(request):
    """normal(*shape): a tensor on the device, of the dtype."""
    device, dtype = request.param
    return lambda *shape: torch.randn(*shape, device=device).to(dtype)


@pytest.fixture(autouse=True)
def seed():
    print(f"seed {SEED}")  # shown where a test fails
    torch.manual_seed(SEED)
    torch.compiler.reset()
    with torch.no_grad():
        yield


def integers(like, values):
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def full(function):
    """Compiled in one graph, as what PyTorch's tracers make of it."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# ---- the operators ----


def attention_arguments(normal):
    q, k = normal(2, 5, 4, 16), normal(2, 9, 2, 16)
    rest = (None, True, None, -1, -1, 0, 0, 0.0)
    slopes, sink = torch.rand(4, device=q.device), torch.randn(4, device=q.device)
    mask = torch.rand(5, 9, device=q.device) > 0.3
    value, state = normal(2, 9, 2, 24), torch.tensor([7, 3], device=q.device)
    in_heads = q.transpose(1, 2).contiguous().transpose(1, 2)
    return [
        (q, k, value, *rest, None, None, 0.0, None, None, False, False),
        (in_heads, k, value, 0.5, False, 2, 3, 1, 3, 2, 8.0, slopes, sink, 0.25, state, mask, True, True),
    ]


def fp8_arguments(normal):
    q, k, v = (normal(2, *shape).to(torch.float8_e4m3fn) for shape in ((5, 4, 16), (9, 2, 16), (9, 2, 32)))
    descales = [torch.rand(2, 2, device=q.device) + 0.5 for _ in range(3)]
    rest = (None, True, None, -1, -1, 0, 0, 0.0, None, None, None)
    return [(q, k, v, *descales, *rest, None, True), (q, k, v, None, descales[0].T, None, *rest, torch.float16, False)]


def varlen_arguments(normal):
    q, k = normal(12, 4, 16), normal(15, 2, 16)
    offsets = (integers(q, [0, 3, 3, 10]), integers(q, [0, 5, 9, 15]))
    rest = (None, True, None, -1, -1, 0, 0, 0.0, None, None, 0.0, None, None, False, None)
    return [(q, k, k, *offsets, None, None, *rest, False), (q, k, k, *offsets, None, integers(q, [2, 4, 6]), *rest, True)]


def varlen_backward_arguments(normal):
    q, k, k2, *offsets, used_q, used_k = varlen_arguments(normal)[1][:7]
    dropped = 0.25, torch.tensor([7, 3], device=q.device)
    sinks = (None, 0.0, None), (torch.randn(4, device=q.device), *dropped)
    rest = [(None, True, None, -1, -1, 0, 0, 0.0, None, *sink_and_dropout, None, False) for sink_and_dropout in sinks]
    arguments = []
    for options in rest:
        o, lse = torch.ops.tilewave.attention_varlen(q, k, k2, *offsets, used_q, used_k, *options, None, True)
        arguments.append((q, k, k2, *offsets, used_q, used_k, o, lse, torch.randn_like(o), *options, None, False))
    added = (*arguments[0][:-4], torch.randn(3, 1, 7, 1, device=q.device), False, None, True)
    return [*arguments, added, (*arguments[0][:9], arguments[0][7].new_ones(()).expand(q.shape), *arguments[0][10:])]


def decode_arguments(normal):
    q, new = normal(2, 2, 4, 16), normal(2, 2, 2, 16)
    lengths, rest = integers(q, [3, 6]), (False, 0, None, True, None, -1, -1, 0, 0, 0.0, *[None] * 9)
    caches, pages = (normal(2, 11, 2, 16), normal(2, 11, 2, 16)), (normal(4, 16, 2, 16), normal(4, 16, 2, 16))
    table = integers(q, [[2, 0], [1, 3]])
    cos, sin = torch.rand(20, 8, device=q.device), torch.rand(20, 8, device=q.device)
    return [
        (q, *caches, lengths, None, None, None, None, None, new, new, cos, sin, *rest, True),
        (q, *pages, lengths, None, None, table, None, None, new, new, None, None, *rest, False),
        (q[0], *pages, lengths, None, None, table, integers(q, [0, 2, 2]), integers(q, [0, 0, 2]), new[0], new[1], None, None, *rest, True),
        (q, *caches, lengths, None, integers(q, [0, 2]), None, None, None, None, None, None, None, *rest, False),
    ]


def qv_arguments(normal):
    q, k, qv, v = normal(2, 5, 4, 16), normal(2, 9, 2, 16), normal(2, 5, 4, 24), normal(2, 9, 2, 24)
    rest = (None, True, None, -1, -1, 0, 0, 0.0, None, None, 0.0, None, None)
    return [(q, k, v, qv, *rest, False), (q, k, v, qv, *rest, True)]


def varlen_qv_arguments(normal):
    q, k, *offsets, used_q, used_k = (varlen_arguments(normal)[1][n] for n in (0, 1, 3, 4, 5, 6))
    return [(q, k, k, q, *offsets, used_q, used_k, None, True, None, -1, -1, 0, 0, 0.0, None, None, 0.0, None, None, None, True)]


def varlen_fp8_arguments(normal):
    q, k, *offsets, used_q, used_k = (varlen_arguments(normal)[1][n] for n in (0, 1, 3, 4, 5, 6))
    q, k, descale = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn), torch.rand(3, 2, device=q.device) + 0.5
    rest = (None, True, None, -1, -1, 0, 0, 0.0, None, None, None, None)
    return [
        (q, k, k, descale, None, descale, *offsets, used_q, used_k, *rest, None, True),
        (q, k, k, None, None, None, *offsets, None, None, *rest, torch.float16, False),
    ]


def backward_arguments(normal):
    arguments = []
    for q, k, v, *options, _ in attention_arguments(normal):
        o, lse = torch.ops.tilewave.attention(q, k, v, *options, True)
        arguments.append((q, k, v, o, lse, torch.randn_like(o), *options, False))
    added = (*arguments[0][:-3], torch.randn(4, 1, k.shape[1], device=q.device), False, True)
    return [*arguments, added, (*arguments[0][:5], o.new_ones(()).expand(o.shape), *arguments[0][6:])]


def head_scales_arguments(normal):
    x, signs = normal(2, 5, 4, 16), torch.randn(16)
    return [(x, None, False, None), (x, 2, True, signs.to(x.device))]


def cast_fp8_heads_arguments(normal):
    return [(x, torch.rand(2, heads or 4, device=x.device) + 0.1, *rest) for x, heads, *rest in head_scales_arguments(normal)]


def grouped_gemm_arguments(normal):
    a, b = normal(9, 16), normal(3, 8, 16)
    offsets = integers(a, [1, 3, 3, 8])
    return [(a, b.transpose(1, 2), offsets, normal(3, 8), "swiglu", None, None, True), (a, b.transpose(1, 2), offsets, None, "none", None, None, True)]


def k_grouped_gemm_arguments(normal):
    a, b = normal(9, 16), normal(9, 24)
    return [(a.T, b, integers(a, [1, 3, 3, 8]), dtype) for dtype in (None, "float32")]


def decode_read_arguments(normal):
    return decode_arguments(normal)[3:]


@pytest.mark.parametrize(
    "name",
    [
        "attention",
        "attention_backward",
        "attention_fp8",
        "attention_qv",
        "attention_varlen_qv",
        "attention_varlen_fp8",
        "attention_varlen",
        "attention_varlen_backward",
        "attention_decode",
        "attention_decode_read",
        "grouped_gemm",
        "k_grouped_gemm",
        "head_scales",
        "cast_fp8_heads",
    ],
)
def test_operator_is_what_it_says(normal, name):
    from tilewave import _torch_ops  # noqa: F401

    operator = getattr(torch.ops.tilewave, name).default
    for arguments in globals()[name.replace("attention_", "") + "_arguments"](normal):
        if "fp8" in name:  # test_schema multiplies tensors, which PyTorch cannot do with float8
            torch.library.opcheck(operator, arguments, test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"))
        else:
            torch.library.opcheck(operator, arguments)
        given = [a for a in arguments if isinstance(a, torch.Tensor)]
        results = operator(*arguments)
        results = (results,) if isinstance(results, torch.Tensor) else results
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = operator(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
            fakes = (fakes,) if isinstance(fakes, torch.Tensor) else fakes
        for result, fake in zip(results, fakes):
            assert (result.shape, result.dtype, result.stride()) == (fake.shape, fake.dtype, fake.stride())
            assert all(result.untyped_storage().data_ptr() != a.untyped_storage().data_ptr() for a in given) or not result.numel()


@pytest.mark.parametrize("dtype", [None, "float32", "float8_e4m3fn"])
def test_fp8_with_scales_of_rows(normal, dtype):
    a, b = (normal(*shape).to(torch.float8_e4m3fn) for shape in ((21, 64), (40, 64)))
    a_scale, b_scale = torch.rand(21, 1, device=a.device) + 0.5, torch.rand(1, 40, device=a.device) + 0.5
    exact = (a.double() @ b.double().T * a_scale * b_scale).float()
    product = lambda *given: ops.gemm(given[0], given[1].T, a_scale=given[2], b_scale=given[3], dtype=dtype)  # noqa: E731
    for f in (product, torch.compile(product, backend="aot_eager", fullgraph=True)):
        y = f(a, b, a_scale, b_scale)
        assert y.dtype == getattr(torch, dtype or "bfloat16")
        rtol = {"bfloat16": 2**-7, "float32": 2**-9, "float8_e4m3fn": 0.07}[dtype or "bfloat16"]
        torch.testing.assert_close(y.float(), exact, rtol=rtol, atol=0.02)


def test_gradients_of_grouped_products(normal):
    a, w = normal(20, 16), normal(3, 8, 16)
    offsets = integers(a, [2, 9, 9, 18])
    weights = normal(20, 8)

    def loop(a, w):
        rows = [a[begin:end] @ w[g].T for g, (begin, end) in enumerate([(2, 9), (9, 9), (9, 18)])]
        return torch.cat([a.new_zeros(2, 8), *rows, a.new_zeros(2, 8)])

    def gradients(function, dtype):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (a, w)]
        with torch.enable_grad():
            out = function(*inputs)
            (out * weights.to(dtype)).sum().backward()
        return (out.detach(), *(x.grad for x in inputs))

    def grouped(a, w):
        return ops.grouped_gemm(a, w.transpose(1, 2), offsets, zeros=True)

    wanted = gradients(loop, torch.float64)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[a.dtype]
    for function in (grouped, full(grouped)):
        for got, exact in zip(gradients(function, a.dtype), wanted):
            torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    with torch.enable_grad(), pytest.raises(NotImplementedError, match="neither bias nor activation"):
        ops.grouped_gemm(a.requires_grad_(), w.transpose(1, 2), offsets, activation="relu").sum().backward()


def test_gradients_of_causal_convolutions(normal):
    x, weight, bias, initial = normal(2, 9, 16), normal(16, 4), normal(16), normal(2, 16, 3)
    of_y, of_state = normal(2, 9, 16), normal(2, 16, 3)

    def convolve(x, weight, bias, initial):
        padded = torch.cat([initial, x.transpose(1, 2)], dim=2)
        z = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=16).transpose(1, 2)
        return torch.nn.functional.silu(z), padded[:, :, -3:]

    def ours(x, weight, bias, initial):
        return ops.causal_conv1d(x, weight, bias, activation="silu", initial_state=initial, return_final_state=True)

    def gradients(function, dtype):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (x, weight, bias, initial)]
        with torch.enable_grad():
            y, state = function(*inputs)
            ((y * of_y.to(dtype)).sum() + (state * of_state.to(dtype)).sum()).backward()
        return (y.detach(), *(t.grad for t in inputs))

    wanted = gradients(convolve, torch.float64)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[x.dtype]
    for function in (ours, full(ours)):
        for got, exact in zip(gradients(function, x.dtype), wanted):
            torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=tolerance)
    inputs = [t.detach().requires_grad_() for t in (x, weight)]
    with torch.enable_grad():
        ops.causal_conv1d(*inputs).sum().backward()
    torch.testing.assert_close(inputs[1].grad[:, 3].double(), x.double().sum((0, 1)), rtol=tolerance, atol=10 * tolerance)


WITHOUT_BACKWARD = {
    "attention_decode": lambda x: ops.attention_decode(x, x.detach(), x.detach()),
    "rms_norm": lambda x: ops.rms_norm(x.detach(), x[0, 0, 0]),
    "gemm": lambda x: ops.gemm(x[0, 0], x.detach()[0, 0].T),
    "rope": lambda x: ops.rope(x, torch.ones(3, 8), torch.zeros(3, 8)),
    "topk": lambda x: ops.topk(x, 2)[0],
    "cast": lambda x: ops.cast(x, "bfloat16"),
    "conv1d": lambda x: ops.conv1d(x[0], x.detach()[0]),
}


@pytest.mark.parametrize("name", WITHOUT_BACKWARD)
def test_forward_of_what_requires_grad(name):
    forward = WITHOUT_BACKWARD[name]
    x = torch.randn(1, 3, 2, 16, requires_grad=True)
    with torch.no_grad():
        wanted = forward(x)
        assert not wanted.requires_grad
    with torch.enable_grad():
        for function in (forward, full(forward)):
            out = function(x)
            same(out.detach(), wanted)
            assert out.requires_grad
            with pytest.raises(NotImplementedError, match="has no backward yet"):
                out.float().sum().backward()
            assert x.grad is None
        assert not ops.argmax(x).requires_grad


def test_what_is_written_must_not_require_grad():
    x, cache = torch.randn(1, 3, 2, 16), torch.randn(1, 8, 2, 16, requires_grad=True)
    lengths = torch.tensor([2], dtype=torch.int32)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="k_cache requires grad and would be written"):
        ops.attention_decode(x, cache, cache.detach().clone(), seqlens=lengths, new_k=x, new_v=x)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="out requires grad and would be written"):
        ops.softmax(x, out=torch.zeros_like(x, requires_grad=True))


def test_gradients_flow_around_it():
    x = torch.randn(1, 3, 2, 16, requires_grad=True)
    with torch.enable_grad():
        (ops.softmax(x).detach() * x).sum().backward()
    same(x.grad, ops.softmax(x.detach()))


# ---- compiled ----


def test_attention(normal):
    q, k, v = normal(2, 5, 4, 16), normal(2, 9, 2, 16), normal(2, 9, 2, 24)
    mask = torch.rand(2, 1, 5, 9, device=q.device) > 0.3

    def plain(q, k, v):
        return ops.attention(q * 2, k, v, causal=True, window=(3, 0), softcap=5.0)

    def with_lse(q, k, v):
        o, lse = ops.attention(q, k, v, scale=0.3, mask=mask, return_lse=True)
        return o + 1, lse

    def by_shape(q, k, v):
        return ops.attention(q, k, v, causal=True, causal_offset=k.shape[1] - q.shape[1] - 1)

    for function in (plain, with_lse, by_shape):
        same(full(function)(q, k, v), function(q, k, v))


def test_shapes_may_change(normal):
    compiled = torch.compile(lambda q, k: ops.attention(q, k, k, causal=True) * 2, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (7, 12, 31):
        q, k = normal(2, seqlen, 4, 16), normal(2, seqlen + 2, 4, 16)
        same(compiled(q, k), ops.attention(q, k, k, causal=True) * 2)


def test_attention_varlen(normal):
    q, k = normal(12, 4, 16), normal(15, 2, 16)
    offsets = (integers(q, [0, 3, 3, 10]), integers(q, [0, 5, 9, 15]))

    def function(q, k, *offsets):
        return ops.attention_varlen(q, k, k, *offsets, causal=True, return_lse=True)

    got, expected = full(function)(q, k, *offsets), function(q, k, *offsets)
    same(got, expected)
    assert not got[0][10:].any()  # of no sequence


def test_attention_decode_appends(normal):
    caches, lengths = normal(2, 2, 11, 2, 16), integers(normal(1), [3, 6])

    def step(q, new, caches, lengths):
        o = ops.attention_decode(q, caches[0], caches[1], seqlens=lengths, new_k=new, new_v=new * 2, causal=True)
        return o, caches[0].sum(), lengths + 1  # the sum is of the cache with the new keys

    compiled = full(step)
    got_caches, expected_caches, got_lengths, expected_lengths = caches.clone(), caches.clone(), lengths, lengths
    for _ in range(3):
        q, new = normal(2, 1, 4, 16), normal(2, 1, 2, 16)
        *got, got_lengths = compiled(q, new, got_caches, got_lengths)
        *expected, expected_lengths = step(q, new, expected_caches, expected_lengths)
        same(got, expected)
        same(got_caches, expected_caches)
    assert (got_caches != caches).any(-1).sum() == 3 * 2 * 2 * 2  # tokens, keys and values, sequences, heads


def test_attention_decode_without_new_keys(normal):
    q, cache, lengths = normal(2, 1, 4, 16), normal(2, 11, 2, 16), integers(normal(1), [3, 6])

    def function(q, cache, lengths):
        return ops.attention_decode(q, cache, cache, seqlens=lengths, num_splits=2)

    before = cache.clone()
    same(full(function)(q, cache, lengths), function(q, cache, lengths))
    same(cache, before)


def test_scaled_dot_product_attention(normal):
    q, k = normal(2, 4, 5, 20), normal(2, 2, 9, 20)
    mask = torch.rand(5, 9, device=q.device) > 0.3
    before = F.scaled_dot_product_attention

    def direct(q, k):
        return tilewave.scaled_dot_product_attention(q + 1, k, k, mask, enable_gqa=True)

    def installed(q, k):
        return F.scaled_dot_product_attention(q[:, :2], k, k, is_causal=True)

    for function in (direct, installed):
        with tilewave.install_sdpa():
            expected = function(q, k)
            assert tilewave.why_fallback() is None
            operators = []

            def backend(graph, _, operators=operators):
                operators += [str(node.target) for node in graph.graph.nodes]
                return graph.forward

            same(torch.compile(function, fullgraph=True, backend=backend)(q, k), expected)
            assert any("tilewave.attention" in name for name in operators)
            same(full(function)(q, k), expected)
    assert F.scaled_dot_product_attention is before
    with tilewave.install_sdpa():  # what falls back does so in the graph
        x = normal(1, 1, 3, 264)
        same(full(lambda x: F.scaled_dot_product_attention(x, x, x))(x), before(x, x, x))


def test_compiled_multihead_attention():
    module = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(2, 9, 64)
    with tilewave.install_sdpa():
        expected = module(x, x, x, need_weights=False)[0]
        torch.testing.assert_close(full(lambda x: module(x, x, x, need_weights=False)[0])(x), expected, rtol=0, atol=1e-6)


def test_compiled_transformers_model():
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "AttentionInterface"):
        pytest.skip("transformers is too old")
    tilewave.register_transformers()
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.set_attn_implementation("tilewave")
    ids = torch.randint(0, 96, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    got = full(lambda ids: model(ids, attention_mask=mask, use_cache=False).logits)(ids)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


FIRST_CALL = """
{imports}
def function(q, k):
    return tilewave.ops.attention(q, k, k, causal=True)
q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16)
with torch.no_grad():
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k)
    assert torch.equal(compiled, function(q, k))
"""


IMPORTS = ["import tilewave, torch", "import tilewave.ops, torch", "import torch, tilewave", "import torch, tilewave._torch_ops"]


@pytest.mark.parametrize("imports", IMPORTS)
def test_first_call_of_a_process_is_compiled(imports):
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(tilewave.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", FIRST_CALL.format(imports=imports)], check=True, env=environment)


# ---- CUDA graphs ----


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_cuda_graph(compiled):
    def normal(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def step(q, new, caches, lengths):
        o = ops.attention_decode(q, caches[0], caches[1], seqlens=lengths, new_k=new, new_v=new, causal=True)
        o = o + ops.attention(q, caches[0][:, :64], caches[1][:, :64])
        return o + tilewave.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, new, new)), enable_gqa=True).transpose(1, 2)

    caches, lengths = normal(2, 2, 512, 2, 64), integers(normal(1), [100, 301])
    inputs = [(normal(2, 1, 8, 64), normal(2, 1, 2, 64)) for _ in range(4)]
    expected_caches, expected, steps = caches.clone(), [], lengths.clone()
    for q, new in inputs:
        expected.append(step(q, new, expected_caches, steps))
        steps = steps + 1

    function = torch.compile(step, fullgraph=True) if compiled else step
    q, new, scratch = torch.zeros_like(inputs[0][0]), torch.zeros_like(inputs[0][1]), caches.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(q, new, scratch, lengths)
    torch.cuda.current_stream().wait_stream(stream)
    scratch.copy_(caches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(q, new, scratch, lengths)
    scratch.copy_(caches)
    for n, (next_q, next_new) in enumerate(inputs):
        q.copy_(next_q), new.copy_(next_new)
        graph.replay()
        torch.testing.assert_close(out, expected[n], rtol=2e-2, atol=2e-2)
        lengths += 1
    same(scratch, expected_caches)


@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a GPU")
def test_calls_go_to_the_current_stream():
    q = torch.randn(4, 2048, 8, 64, device="cuda", dtype=torch.bfloat16)
    expected = ops.attention(q, q, q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x = q * 1
        out = ops.attention(x, x, x)
    stream.synchronize()
    same(out, expected)
