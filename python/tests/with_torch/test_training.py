"""Attention under autograd: gradients against PyTorch's in float64, one node for each pass in compiled graphs, modules in training."""

import math
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import tilewave
import torch.nn.functional as F
from flash_reference import ON_ALL, PLACES, as_arguments, ints, ulp
from tilewave import flash_attn as fa2
from tilewave import flash_attn_interface as fa3
from tilewave import ops
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

PYTORCH = torch._C._nn.scaled_dot_product_attention
L2 = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
ON_ALL_AND_F16 = pytest.mark.parametrize(
    "device, dtype",
    [*PLACES, ("cpu", torch.float16)],
    ids=[f"{device}-{str(dtype)[6:]}" for device, dtype in [*PLACES, ("cpu", torch.float16)]],
)


@pytest.fixture(autouse=True)
def clean():
    torch.compiler.reset()
    yield
    tilewave.uninstall_sdpa()


def parameters(*shapes, device="cpu", dtype=torch.float32):
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


def gradients(function, inputs, weights=None):
    """The result of function(*inputs) and its gradients for all inputs; `weights` is the result's gradient, 1 if None."""
    out = function(*inputs)
    return out.detach(), torch.autograd.grad(out, inputs, torch.ones_like(out) if weights is None else weights.to(out.dtype))


def exactly(function, inputs, weights):
    """gradients() in float64."""
    return gradients(function, [x.detach().double().requires_grad_() for x in inputs], weights)


def check_gradients(got, exact, naive):
    """max|got - exact| <= 3 max|naive - exact| + 2 ulp + 1e-5, and the L2 norm of the error."""
    assert len(got) == len(exact)
    for a, wanted, simple in zip(got, exact, naive):
        assert a.shape == wanted.shape and a.dtype == simple.dtype
        error = (a.double() - wanted).abs().max().item()
        largest = wanted.abs().max().item()
        assert error <= 3 * (simple.double() - wanted).abs().max().item() + 2 * ulp(largest, a.dtype) + 1e-5
        assert (a.double() - wanted).norm() <= L2[a.dtype] * wanted.norm() + 1e-6 * math.sqrt(wanted.numel())


def reference(q, k, v, sink=None, *, scale=None, causal=False, window=(-1, -1), attention_chunk=0, softcap=0.0, slopes=None, mask=None):
    """ops.attention() from its definition, in PyTorch's operations: what autograd differentiates is what is written here."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1], device=q.device)
    if slopes is not None:
        s = s - slopes.to(s.dtype)[..., None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = ((distance > left) & (left >= 0)) | ((-distance > right) & (right >= 0))
    if attention_chunk:
        key = torch.arange(k.shape[1], device=q.device)
        hidden = hidden | ((distance + key) // attention_chunk != key // attention_chunk)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        s = s + mask.to(s.dtype)
    s = s.masked_fill(hidden, -1e4)
    if sink is not None:
        s = torch.cat([s, sink.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, -1)[..., : k.shape[1]].masked_fill(hidden, 0)  # 0 where a query sees no key
    return torch.einsum("bhij,bjhd->bihd", p, v)


RULES = [
    {},
    {"causal": True},
    {"window": (3, 1), "scale": 0.4},
    {"softcap": 1.5},
    {"slopes": True, "causal": True},
    {"mask": "bool"},
    {"mask": "added", "softcap": 3.0},
    {"attention_chunk": 10, "causal": True},
]
SHAPES = [  # seqlen_q, seqlen_k, heads, kv_heads, dim, value_dim
    (33, 33, 4, 2, 64, 64),
    (7, 53, 3, 1, 40, 24),
    (53, 7, 2, 2, 16, 16),  # queries that see no key
]


@ON_ALL_AND_F16
@pytest.mark.parametrize("with_sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape, rules, with_sink, device, dtype):
    seqlen_q, seqlen_k, heads, kv_heads, dim, value_dim = shape
    inputs = parameters(
        (2, seqlen_q, heads, dim), (2, seqlen_k, kv_heads, dim), (2, seqlen_k, kv_heads, value_dim), device=device, dtype=dtype
    )
    inputs += parameters((heads,), device=device) if with_sink else []
    weights = torch.randn(2, seqlen_q, heads, value_dim, device=device)
    rules = dict(rules)
    if "slopes" in rules:
        rules["slopes"] = torch.rand(2, heads, device=device)
    if "mask" in rules:
        seen = torch.rand(2, 1, seqlen_q, seqlen_k, device=device) > 0.3
        rules["mask"] = seen if rules["mask"] == "bool" else torch.randn(heads, seqlen_q, seqlen_k, device=device)

    def ours(q, k, v, sink=None, deterministic=False):
        options = dict(rules)
        return ops.attention(q, k, v, sink=sink, alibi_slopes=options.pop("slopes", None), deterministic=deterministic, **options)

    def deterministic(*inputs):
        return ours(*inputs, deterministic=True)

    def plain(*inputs):
        return reference(*inputs, **rules)

    weights = weights.to(dtype)
    out, got = gradients(ours, inputs, weights)
    wanted, exact = exactly(plain, inputs, weights)
    simple, naive = gradients(lambda *x: plain(*(y.to(dtype) for y in x)), inputs, weights)
    check_gradients((out, *got[:3]), (wanted, *exact[:3]), (simple, *naive[:3]))
    if with_sink:  # a sum over all queries, of either sign, of what has errors of the dtype
        assert got[3].dtype == torch.float32
        assert (got[3] - exact[3]).abs().max() <= torch.finfo(dtype).eps * math.sqrt(2 * seqlen_q) + 1e-5
    first, second = (gradients(deterministic, inputs, weights)[1] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    check_gradients((out, *first[:3]), (wanted, *exact[:3]), (simple, *naive[:3]))
    with torch.no_grad():
        assert torch.equal(ours(*inputs), out)


def test_gradients_of_some_inputs():
    shapes = (2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)
    q, k, v = parameters(*shapes)
    _, wanted = gradients(lambda *x: ops.attention(*x, causal=True), (q, k, v))
    for n in range(3):
        inputs = [x.detach().requires_grad_(m == n) for m, x in enumerate((q, k, v))]
        ops.attention(*inputs, causal=True).sum().backward()
        assert torch.equal(inputs[n].grad, wanted[n])
        assert all(x.grad is None for m, x in enumerate(inputs) if m != n)


def test_gradients_of_any_strides():
    """Expanded, as of sum(), and transposed."""
    q, k, v = parameters((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    weights = torch.randn(16, 4, 5, 2)

    def of(d_o):
        return torch.autograd.grad(ops.attention(q, k, v), (q, k, v), d_o)

    for strided in (weights.permute(3, 2, 1, 0), torch.ones(()).expand(2, 5, 4, 16), torch.randn(5, 1, 16).expand(2, 5, 4, 16)):
        for a, b in zip(of(strided), of(strided.contiguous())):
            assert torch.equal(a, b)


def test_results_in_given_memory():
    q, k, v = parameters((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    out = torch.empty(2, 5, 4, 16)
    result, lse = ops.attention(q, k, v, out=out, return_lse=True)
    assert result is out and out.requires_grad and not lse.requires_grad
    got = torch.autograd.grad(out.square().sum(), (q, k, v))
    _, wanted = gradients(lambda *x: ops.attention(*x).square().sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


def test_attention_backward_alone():
    """ops.attention_backward() is what autograd calls."""
    q, k, v, sink = parameters((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 24), (4,))
    d_o = torch.randn(2, 5, 4, 24)
    _, wanted = gradients(lambda *x: ops.attention(*x[:3], sink=x[3], causal=True, window=(4, -1)), (q, k, v, sink), d_o)
    q, k, v, sink = (x.detach() for x in (q, k, v, sink))
    o, lse = ops.attention(q, k, v, sink=sink, causal=True, window=(4, -1), return_lse=True)
    got = ops.attention_backward(q, k, v, o, lse, d_o, sink=sink, causal=True, window=(4, -1))
    out = [torch.empty_like(x) for x in got]
    compiled = torch.compile(
        lambda *x: ops.attention_backward(*x, sink=sink, causal=True, window=(4, -1), out=out), fullgraph=True, backend="aot_eager"
    )(q, k, v, o, lse, d_o)
    assert all(torch.equal(a, b) for a, b in zip(out, got))
    for a, b, c in zip(got, wanted, compiled):
        assert torch.equal(a, b) and torch.equal(a, c)


# ---- what has no backward ----


def test_slopes_have_no_gradient():
    q, k, v = parameters((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    slopes = torch.rand(4, requires_grad=True)
    for inputs in ((q, k, v), (q.detach(), k.detach(), v.detach())):
        out = ops.attention(*inputs, alibi_slopes=slopes)
        with pytest.raises(NotImplementedError, match="tilewave's attention has no gradient of alibi_slopes: "):
            out.sum().backward()
    out = ops.attention(q, k, v, alibi_slopes=slopes.detach())
    out.sum().backward()
    assert q.grad is not None


@pytest.mark.parametrize("asked", ["argument", "algorithms", None])
@pytest.mark.parametrize("version", [fa2, fa3], ids=["2", "3"])
def test_deterministic_is_passed_on(version, asked, monkeypatch):
    given = []
    of_operator = sys.modules["tilewave.ops.attention"]
    backward = of_operator.attention_backward

    def recorded(*arguments, deterministic, **options):
        given.append(deterministic)
        return backward(*arguments, deterministic=deterministic, **options)

    monkeypatch.setattr(of_operator, "attention_backward", recorded)
    inputs = parameters((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    torch.use_deterministic_algorithms(asked == "algorithms")
    try:
        version.flash_attn_func(*inputs, deterministic=asked == "argument").sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert given == [asked is not None]


def test_operator_without_lse():
    from tilewave import _torch_ops  # noqa: F401  defines it

    q, k, v = parameters((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    out, _ = torch.ops.tilewave.attention(q, k, v, None, False, None, -1, -1, 0, 0, 0.0, None, None, 0.0, None, None, False, False)
    with pytest.raises(NotImplementedError, match="operator attention has no backward if return_lse is False"):
        out.sum().backward()


@pytest.mark.parametrize(
    "shapes", [((1, 5, 2, 16), (1, 0, 2, 16)), ((1, 0, 2, 16), (1, 3, 2, 16)), ((0, 5, 2, 16), (0, 3, 2, 16))], ids=str
)
def test_empty(shapes):
    q, k = parameters(*shapes)
    ops.attention(q, k, k).sum().backward()
    assert q.grad.shape == q.shape and k.grad.shape == k.shape
    assert not q.grad.any() and not k.grad.any()


def test_second_derivatives_are_refused():
    q, k, v = parameters((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16))
    for attend in (ops.attention, fa2.flash_attn_func):
        (d_q,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
        assert d_q.requires_grad
        with pytest.raises(NotImplementedError, match="tilewave's attention has no second derivatives: "):
            d_q.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float32_on_cuda_is_refused(dtype):
    """Without a GPU: what the backward calls, on tensors that only have a device."""
    from tilewave.ops import attention as module
    from torch._subclasses.fake_tensor import FakeTensorMode

    calls = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append((function.name(), *args[1:2]))
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), Calls():
        x = torch.empty(1, 5, 2, 16, device="cuda", dtype=dtype)
        lse = torch.empty(1, 2, 5, device="cuda")
        ctx = types.SimpleNamespace(
            saved_tensors=(x, x, x, x, lse, None, None, None, None),
            options=[None, False, None, -1, -1, 0, 0, 0.0],
            dropout=0.0,
            deterministic=False,
            needs_input_grad=(True,) * 3 + (False,) * 15,
        )
        got = sys.modules[module.__module__]._attention_gradients(ctx, x, None)
    assert len(got) == 18 and all(x is None for x in got[3:])
    named = [call for call in calls if call[0].startswith("tilewave::")]
    if dtype == torch.bfloat16:
        assert [call[0] for call in named] == ["tilewave::attention_backward"]
    else:
        assert named == [("tilewave::missing_backward", "attention has no backward of float32 on CUDA, only of bfloat16 and float16")] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_float32_on_cuda():
    (x,) = parameters((1, 5, 2, 16), device="cuda")
    out = ops.attention(x, x, x)
    with pytest.raises(NotImplementedError, match="attention has no backward of float32 on CUDA"):
        out.sum().backward()


# ---- FlashAttention's functions ----


FLASH = [
    ({}, (17, 17, 4, 2, 64, 64)),
    ({"causal": True}, (17, 31, 4, 4, 20, 20)),  # a padded head dimension
    ({"window": (5, 2), "softcap": 2.0}, (31, 17, 2, 1, 13, 40)),
    ({"causal": True, "scale": -0.3}, (9, 9, 2, 2, 32, 320)),  # values in two parts
]


@ON_ALL
@pytest.mark.parametrize("version", [fa2, fa3], ids=["fa2", "fa3"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rules, shape", FLASH, ids=str)
def test_flash_attn_func(rules, shape, version, deterministic, device, dtype):
    seqlen_q, seqlen_k, heads, kv_heads, dim, value_dim = shape
    inputs = parameters(
        (2, seqlen_q, heads, dim), (2, seqlen_k, kv_heads, dim), (2, seqlen_k, kv_heads, value_dim), device=device, dtype=dtype
    )
    weights = torch.randn(2, seqlen_q, heads, value_dim, device=device).to(dtype)

    def ours(*inputs):
        out = version.flash_attn_func(*inputs, deterministic=deterministic, return_attn_probs=True, **as_arguments(rules))
        assert not out[1].requires_grad  # the LSE
        return out[0]

    def plain(*inputs):
        return reference(*inputs, **rules)

    _, got = gradients(ours, inputs, weights)
    check_gradients(got, exactly(plain, inputs, weights)[1], gradients(plain, inputs, weights)[1])


def test_packed_flash_attn():
    (qkv,) = parameters((2, 11, 3, 4, 16))
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    slopes = torch.rand(4)
    _, parts = gradients(lambda *x: fa2.flash_attn_func(*x, causal=True, alibi_slopes=slopes), (q, k, v))
    wanted = torch.stack(parts, 2)
    for call in (
        lambda x: fa2.flash_attn_qkvpacked_func(x, causal=True, alibi_slopes=slopes),
        lambda x: fa2.flash_attn_kvpacked_func(x[:, :, 0], x[:, :, 1:], causal=True, alibi_slopes=slopes),
    ):
        _, (got,) = gradients(call, (qkv,))
        assert torch.equal(got, wanted)
    _, (got,) = gradients(lambda x: fa3.flash_attn_qkvpacked_func(x), (qkv,))
    _, parts = gradients(fa3.flash_attn_func, (q, k, v))
    assert torch.equal(got, torch.stack(parts, 2))


def packed(device, dtype, value_dim=32):
    """q, k and v of four sequences, in which no sequence has the last rows; the offsets."""
    inputs = parameters((80, 4, 32), (100, 2, 32), (100, 2, value_dim), device=device, dtype=dtype)
    return inputs, ints([0, 11, 11, 44, 75], device), ints([0, 20, 25, 31, 90], device)


def each_sequence(inputs, cu_q, cu_k, used_q=None, used_k=None, **rules):
    """reference() sequence by sequence; rows that are not in use are 0."""
    q, k, v = inputs
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    for b in range(len(cu_q) - 1):
        rows, keys = (
            slice(int(cu[b]), int(cu[b + 1] if used is None else cu[b] + used[b])) for cu, used in ((cu_q, used_q), (cu_k, used_k))
        )
        out = out.clone()
        out[rows] = reference(q[None, rows], k[None, keys], v[None, keys], **rules)[0]
    return out


@ON_ALL_AND_F16
@pytest.mark.parametrize("rules", [{}, {"causal": True}, {"window": (3, 5)}, {"softcap": 1.5, "causal": True}, {"slopes": True}], ids=str)
@pytest.mark.parametrize("used", [False, True], ids=["", "used"])
def test_packed_sequences(used, rules, device, dtype):
    inputs, cu_q, cu_k = packed(device, dtype, 48)
    lengths = {"used_q": ints([9, 0, 33, 1], device), "used_k": ints([20, 3, 0, 41], device)} if used else {}
    weights = torch.randn(80, 4, 48, device=device)
    rules = dict(rules)
    if "slopes" in rules:
        rules["slopes"] = torch.rand(4, device=device)

    def ours(q, k, v):
        options = dict(rules)
        seqused = {f"seq{name}": x for name, x in lengths.items()}
        return ops.attention_varlen(q, k, v, cu_q, cu_k, **seqused, alibi_slopes=options.pop("slopes", None), **options)

    def simple(*inputs):
        return each_sequence(inputs, cu_q, cu_k, **lengths, **rules)

    _, got = gradients(ours, inputs, weights)
    _, naive = gradients(simple, inputs, weights)
    _, exact = exactly(simple, inputs, weights)
    check_gradients(got, exact, naive)
    for x, (cu, used_rows) in zip(got, [(cu_q, lengths.get("used_q")), *[(cu_k, lengths.get("used_k"))] * 2]):
        unused = torch.ones(len(x), dtype=torch.bool, device=device)
        for b in range(4):
            unused[int(cu[b]) : int(cu[b + 1] if used_rows is None else cu[b] + used_rows[b])] = False
        assert unused.any() and not x[unused].any()


@ON_ALL
def test_packed_sequences_give_what_each_sequence_gives(device, dtype):
    (q, k, v), cu_q, cu_k = packed(device, dtype)
    weights = torch.randn(80, 4, 32, device=device)
    _, got = gradients(lambda *x: fa2.flash_attn_varlen_func(*x, cu_q, cu_k, 33, 59, causal=True, deterministic=True), (q, k, v), weights)
    for b in range(4):
        rows, keys = slice(int(cu_q[b]), int(cu_q[b + 1])), slice(int(cu_k[b]), int(cu_k[b + 1]))
        alone = [x[None, of].detach().requires_grad_() for x, of in ((q, rows), (k, keys), (v, keys))]
        _, wanted = gradients(lambda *x: fa2.flash_attn_func(*x, causal=True, deterministic=True), alone, weights[None, rows])
        for x, y, of in zip(got, wanted, (rows, keys, keys)):
            torch.testing.assert_close(x[of], y[0], atol=L2[dtype], rtol=2 * L2[dtype])


@ON_ALL
def test_flash_attn_varlen_packed(device, dtype):
    (qkv,) = parameters((44, 3, 4, 32), device=device, dtype=dtype)
    cu = ints([0, 11, 11, 40], device)
    separate = [x.detach().requires_grad_() for x in qkv.unbind(1)]
    options = {"causal": True, "softcap": 2.0, "deterministic": True}
    _, parts = gradients(lambda *x: fa2.flash_attn_varlen_func(*x, cu, cu, 29, 29, **options), separate)
    _, (got,) = gradients(lambda x: fa2.flash_attn_varlen_qkvpacked_func(x, cu, 29, **options), (qkv,))
    assert torch.equal(got, torch.stack(parts, 1))
    _, (got,) = gradients(lambda x: fa2.flash_attn_varlen_kvpacked_func(x[:, 0], x[:, 1:], cu, cu, 29, 29, **options), (qkv,))
    assert torch.equal(got, torch.stack(parts, 1))
    _, got = gradients(lambda *x: fa3.flash_attn_varlen_func(*x, cu, cu, 29, 29, **options), separate)
    assert all(map(torch.equal, got, parts))


@pytest.mark.parametrize("asked", ["argument", "algorithms", None])
def test_deterministic_is_passed_on_for_packed_sequences(asked, monkeypatch):
    given = []
    of_operator = sys.modules["tilewave.ops.attention"]
    backward = of_operator.attention_varlen_backward

    def recorded(*arguments, deterministic, **options):
        given.append(deterministic)
        return backward(*arguments, deterministic=deterministic, **options)

    monkeypatch.setattr(of_operator, "attention_varlen_backward", recorded)
    inputs, cu_q, cu_k = packed("cpu", torch.float32)
    torch.use_deterministic_algorithms(asked == "algorithms")
    try:
        fa2.flash_attn_varlen_func(*inputs, cu_q, cu_k, 33, 59, deterministic=asked == "argument").sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert given == [asked is not None]


def test_what_packed_sequences_do_not_differentiate():
    inputs, cu_q, cu_k = packed("cpu", torch.float32)
    slopes = torch.rand(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match="attention_varlen has no gradient of alibi_slopes"):
        ops.attention_varlen(*inputs, cu_q, cu_k, alibi_slopes=slopes).sum().backward()
    (d_q,) = torch.autograd.grad(ops.attention_varlen(*inputs, cu_q, cu_k).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="attention_varlen has no second derivatives"):
        d_q.sum().backward()
    out, _ = torch.ops.tilewave.attention_varlen(
        *inputs, cu_q, cu_k, None, None, None, False, None, -1, -1, 0, 0, 0.0, None, None, 0.0, None, None, False, None, False
    )
    with pytest.raises(NotImplementedError, match="operator attention_varlen has no backward if return_lse is False"):
        out.sum().backward()


def test_packed_sequences_compiled():
    inputs, cu_q, cu_k = packed("cpu", torch.float32)
    sink = torch.randn(4, requires_grad=True)

    def function(q, k, v, sink):
        return ops.attention_varlen(2 * q, k, v, cu_q, cu_k, causal=True, sink=sink)

    _, wanted = gradients(function, (*inputs, sink))
    _, got = gradients(torch.compile(function, backend="aot_eager", fullgraph=True), (*inputs, sink))
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x, y, atol=0, rtol=0)


def test_flash_attn_without_backward():
    (x,) = parameters((1, 4, 2, 16))
    for what, call in {
        "attention_decode_read": lambda: fa2.flash_attn_with_kvcache(x, x.detach(), x.detach()),
    }.items():
        with pytest.raises(NotImplementedError, match=f"tilewave's {what} has no backward yet"):
            call().sum().backward()


# ---- scaled_dot_product_attention ----


SDPA = [  # query, key, value, mask
    ((2, 4, 33, 64), (2, 4, 33, 64), (2, 4, 33, 64), "causal"),
    ((2, 4, 7, 20), (2, 4, 53, 20), (2, 4, 53, 12), None),  # padded head dimensions
    ((2, 6, 9, 16), (2, 2, 31, 16), (2, 2, 31, 16), "bool"),  # grouped heads
    ((3, 9, 16), (3, 31, 16), (3, 31, 16), "own dtype"),
    ((2, 3, 2, 9, 16), (2, 3, 2, 9, 16), (2, 3, 2, 9, 16), "float32"),
    ((9, 16), (7, 16), (7, 24), "causal"),
]


@ON_ALL_AND_F16
@pytest.mark.parametrize("of_q, of_k, of_v, kind", SDPA, ids=str)
def test_scaled_dot_product_attention(of_q, of_k, of_v, kind, device, dtype):
    inputs = parameters(of_q, of_k, of_v, device=device, dtype=dtype)
    weights = torch.randn(*of_q[:-1], of_v[-1], device=device).to(dtype)
    group = of_q[-3] // of_k[-3] if len(of_q) > 2 else 1
    mask = None
    if kind == "bool":
        mask = torch.rand(2, 1, of_q[-2], of_k[-2], device=device) > 0.4
    elif kind in ("own dtype", "float32"):
        mask = torch.randn(of_q[-2], of_k[-2], device=device).to(dtype if kind == "own dtype" else torch.float32)

    def ours(q, k, v):
        out = tilewave.scaled_dot_product_attention(q, k, v, mask, is_causal=kind == "causal", scale=0.3, enable_gqa=group > 1)
        assert tilewave.why_fallback() is None
        return out

    def plain(q, k, v):
        given = mask if mask is None or mask.dtype == torch.bool else mask.to(q.dtype)
        if group > 1:
            k, v = (x.repeat_interleave(group, -3) for x in (k, v))
        with sdpa_kernel(SDPBackend.MATH):
            return PYTORCH(q, k, v, given, 0.0, kind == "causal", scale=0.3)

    out, got = gradients(ours, inputs, weights)
    wanted, exact = exactly(plain, inputs, weights)
    simple, naive = gradients(plain, inputs, weights)
    check_gradients((out, *got), (wanted, *exact), (simple, *naive))


def test_query_that_sees_nothing():
    """Its gradients are 0; autograd through a softmax of -inf alone is NaN."""
    q, k, v = parameters((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16))
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2], mask[:, 4] = False, False
    _, (dq, dk, dv) = gradients(lambda *x: tilewave.scaled_dot_product_attention(*x, mask), (q, k, v), torch.randn(2, 3, 5, 16))
    assert not dq[:, :, 2].any() and not dk[:, :, 4].any() and not dv[:, :, 4].any()
    assert dq[:, :, [0, 1, 3, 4]].all() and dk[:, :, :4].all() and dv[:, :, :4].all()


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 5, 7), (3, 1, 7), (2, 1, 5, 1), (1, 1), (1, 3, 5, 7)], ids=str)
def test_mask_that_requires_grad(shape):
    q, k, v, mask = parameters((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 7, 16), shape)
    weights = torch.randn(2, 3, 5, 16)
    _, got = gradients(lambda *x: tilewave.scaled_dot_product_attention(*x), (q, k, v, mask), weights)
    assert tilewave.why_fallback() is None
    _, wanted = gradients(lambda *x: PYTORCH(*x), (q, k, v, mask), weights)
    torch.testing.assert_close(got, wanted)


def test_mask_alone_requires_grad():
    q, k, v, mask = parameters((1, 2, 5, 16), (1, 2, 7, 16), (1, 2, 7, 16), (5, 7))
    q, k, v = q.detach(), k.detach(), v.detach()
    bias = torch.zeros(2, 1, 1, requires_grad=True)
    for of_mask in (lambda: mask, lambda: mask.expand(1, 2, 5, 7), lambda: mask * 2 + bias):
        weights = torch.randn(1, 2, 5, 16)
        got, wanted = (
            torch.autograd.grad((attend(q, k, v, of_mask()) * weights).sum(), (mask, bias), allow_unused=True)
            for attend in (tilewave.scaled_dot_product_attention, PYTORCH)
        )
        torch.testing.assert_close(got[0], wanted[0])
        assert (got[1] is None) == (wanted[1] is None)
        if got[1] is not None:
            torch.testing.assert_close(got[1], wanted[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mask_of_packed_sequences(dtype):
    (q, k, v), cu_q, cu_k = packed("cpu", torch.float32)
    batch, longest_q, longest_k = len(cu_q) - 1, int(cu_q.diff().max()), int(cu_k.diff().max())
    mask = torch.randn(batch, 1, longest_q, longest_k, dtype=torch.float32, requires_grad=True)
    q, k, v = (x.detach().to(dtype) for x in (q, k, v))
    weights = torch.randn(q.shape[0], q.shape[1], v.shape[2]).to(dtype)
    o = ops.attention_varlen(q, k, v, cu_q, cu_k, mask=mask, causal=True)
    (got,) = torch.autograd.grad((o * weights).sum(), mask)
    assert got.dtype == torch.float32 and got.any()
    for b in range(batch):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        lengths = rows.stop - rows.start, keys.stop - keys.start
        wanted = torch.zeros(longest_q, longest_k)
        if min(lengths) > 0:
            own = mask[b : b + 1, :, : lengths[0], : lengths[1]].detach().clone().requires_grad_()
            alone = ops.attention(q[None, rows], k[None, keys], v[None, keys], mask=own, causal=True)
            wanted[: lengths[0], : lengths[1]] = torch.autograd.grad((alone * weights[None, rows]).sum(), own)[0][0, 0]
        torch.testing.assert_close(got[b, 0], wanted)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_mask_that_requires_grad_compiled(dropout):
    state = torch.tensor([5, 9])

    def function(q, k, v, mask):
        return ops.attention(q, k, v, mask=mask, causal=True, dropout=dropout, dropout_state=state if dropout else None)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (7, 12):
        inputs = parameters((2, seqlen, 4, 16), (2, seqlen + 3, 2, 16), (2, seqlen + 3, 2, 16), (4, seqlen, seqlen + 3))
        weights = torch.randn(2, seqlen, 4, 16)
        for a, b in zip(gradients(compiled, inputs, weights)[1], gradients(function, inputs, weights)[1]):
            assert torch.equal(a, b)


def test_autocast():
    x, weight = torch.randn(2, 4, 9, 16), torch.randn(16, 16, requires_grad=True)

    def loss(attend):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x @ weight
            return attend(y, y, y, is_causal=True).float().square().sum()

    (got,) = torch.autograd.grad(loss(tilewave.scaled_dot_product_attention), weight)
    assert tilewave.why_fallback() is None and got.dtype == torch.float32
    y = (x.double() @ weight.detach().double()).requires_grad_()
    (wanted,) = torch.autograd.grad(PYTORCH(y, y, y, is_causal=True).square().sum(), y)
    wanted = torch.einsum("bhsi,bhsj->ij", x.double(), wanted)
    assert (got - wanted).norm() <= 2e-2 * wanted.norm()


# ---- compiled ----


class Graphs:
    """A backend of torch.compile() that keeps the names of the operators of the forward and of the backward."""

    def __init__(self):
        from torch._dynamo.backends.common import aot_autograd

        self.forward, self.backward = [], []
        self.backend = aot_autograd(fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward))

    def _keep(self, names):
        from functorch.compile import make_boxed_func

        def compiler(graph, _):
            names.extend(node.target.name() for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
            return make_boxed_func(graph.forward)

        return compiler


def test_compiled_is_one_node_for_each_pass():
    inputs = parameters((2, 5, 4, 16), (2, 9, 2, 16), (2, 9, 2, 24), (4,))
    slopes = torch.rand(4)

    def function(q, k, v, sink):
        return ops.attention(q * 2, k, v, causal=True, softcap=5.0, sink=sink, alibi_slopes=slopes).square().sum()

    graphs = Graphs()
    out, got = gradients(torch.compile(function, fullgraph=True, backend=graphs.backend), inputs)
    wanted_out, wanted = gradients(function, inputs)
    assert torch.equal(out, wanted_out) and all(torch.equal(a, b) for a, b in zip(got, wanted))
    assert [name for name in graphs.forward if "tilewave" in name] == ["tilewave::attention"]
    assert [name for name in graphs.backward if "tilewave" in name] == ["tilewave::attention_backward"]


def test_compiled_with_lse_and_flash():
    inputs = parameters((2, 7, 4, 20), (2, 7, 4, 20), (2, 7, 4, 20))

    def function(q, k, v):
        out, lse, _ = fa2.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        return out + F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2), lse

    with tilewave.install_sdpa():
        out, lse = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
        got = torch.autograd.grad(out.square().sum(), inputs)
        out, wanted_lse = function(*inputs)
        assert tilewave.why_fallback() is None
    assert torch.equal(lse, wanted_lse) and not lse.requires_grad
    for a, b in zip(got, torch.autograd.grad(out.square().sum(), inputs)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_compiled_with_shapes_that_change():
    def function(q, k, v):
        return ops.attention(q, k, v, causal=True, causal_offset=k.shape[1] - q.shape[1] - 1)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (7, 12, 31):
        inputs = parameters((2, seqlen, 4, 16), (2, seqlen + 3, 2, 16), (2, seqlen + 3, 2, 16))
        weights = torch.randn(2, seqlen, 4, 16)
        for a, b in zip(gradients(compiled, inputs, weights)[1], gradients(function, inputs, weights)[1]):
            assert torch.equal(a, b)


def test_compiled_forward_of_what_has_no_gradient():
    """torch.compile() traces the backward too; only running it raises."""
    q, k, v, slopes = parameters((1, 5, 2, 16), (1, 5, 2, 16), (1, 5, 2, 16), (2,))

    def function(q, k, v, slopes):
        return ops.attention(q, k, v, alibi_slopes=slopes)

    out = torch.compile(function, fullgraph=True, backend="aot_eager")(q, k, v, slopes)
    assert torch.equal(out, function(q, k, v, slopes))
    with pytest.raises(NotImplementedError, match="attention has no gradient of alibi_slopes"):
        out.sum().backward()


# ---- modules ----


class Block(torch.nn.Module):
    """A layer of a decoder, whose attention is F.scaled_dot_product_attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.feed_forward = torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norms[1](x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    block = Block(32, 4)
    (x,) = parameters((2, 9, 32))
    inputs = (x, *block.parameters())
    with tilewave.install_sdpa():
        before = tilewave.sdpa_counts().get("tilewave", 0)
        wanted = torch.autograd.grad(block(x).square().sum(), inputs)
        assert tilewave.sdpa_counts()["tilewave"] == before + 1
        checkpoint(block, x, use_reentrant=use_reentrant).square().sum().backward()
        assert tilewave.sdpa_counts()["tilewave"] == before + 3  # the forward ran twice
    assert all(torch.equal(a.grad, b) for a, b in zip(inputs, wanted))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_multihead_attention(batch_first, masked):
    module = torch.nn.MultiheadAttention(64, 4, batch_first=batch_first)
    assert module.training
    x, y = parameters((3, 9, 64), (3, 9, 64))
    inputs = (x, y, *module.parameters())
    mask = torch.randn(9, 9) if batch_first else torch.rand(3, 3) > 0.7
    mask = mask if masked else None

    def run():
        return gradients(lambda *_: module(x, y, y, need_weights=False, attn_mask=mask)[0], inputs, weights)

    weights = torch.randn(3, 9, 64)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = run()
    with tilewave.install_sdpa():
        before = tilewave.sdpa_counts().get("tilewave", 0)
        got = run()
        assert tilewave.sdpa_counts()["tilewave"] == before + 1
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformer_encoder_layer_trains(dropout):
    x = torch.randn(3, 9, 64)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=dropout, batch_first=True)
    with tilewave.install_sdpa():
        layer(x).sum().backward()
        assert tilewave.why_fallback() is None
    assert all(p.grad is not None for p in layer.parameters())
