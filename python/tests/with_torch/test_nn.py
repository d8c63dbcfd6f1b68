"""QuantLinear against nn.Linear with the same, rounded weight."""

import warnings

import pytest

torch = pytest.importorskip("torch")

import tilewave.nn  # noqa: E402
import tilewave.ops as ops  # noqa: E402
from tilewave.nn import QuantLinear, quantize_  # noqa: E402

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
FORMATS = [
    ("int8", None, False),
    ("fp8", None, False),
    ("int4", 32, False),
    ("int4", 128, True),
    ("int2", 32, True),
    ("nf4", None, False),
    ("fp4", None, False),
    ("mxfp4", None, False),
]


def pair(format="int4", group=None, zero_points=False, bias=True, dtype=torch.float32, device="cpu", sizes=(256, 48)):
    """A QuantLinear, and the Linear that it stands for."""
    linear = torch.nn.Linear(*sizes, bias=bias, device=device).to(dtype)
    quantized = QuantLinear.from_linear(linear, format, group=group, zero_points=zero_points)
    with torch.no_grad():
        linear.weight.copy_(quantized.dequantized())
    return quantized, linear


def near(got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    tolerance = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[got.dtype]
    assert (got - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format, group, zero_points", FORMATS)
def test_forward(format, group, zero_points, device):
    for dtype, bias in [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True)]:
        if device == "cuda" and dtype == torch.float32:
            continue  # in tf32 there
        quantized, linear = pair(format, group, zero_points, bias, dtype, device)
        x = torch.randint(-127, 128, (2, 19, 256), device=device).to(dtype)
        x[..., ::64] = 127  # so that rounding to 8 bits, as the CPU does it, leaves x as it is
        near(quantized(x), linear(x))
        near(quantized(x.transpose(0, 1)), linear(x.transpose(0, 1)))
        column_major = x[0].T.contiguous().T
        near(quantized(column_major), linear(column_major))
        assert quantized(x[:0]).shape == (0, 19, 48)


def test_the_weight_of_an_open_linear_is_near():
    linear = torch.nn.Linear(256, 48)
    for (format, group, zero_points), largest in zip(FORMATS, [0.01, 0.04, 0.13, 0.13, 0.5, 0.12, 0.16, 0.2]):
        weight = QuantLinear.from_linear(linear, format, group=group, zero_points=zero_points).dequantized()
        assert 0 < (weight - linear.weight).norm() < largest * linear.weight.norm(), format


def test_casts_leave_the_weight_alone():
    quantized, _ = pair("int4", 128, True)
    weight = quantized.dequantized()
    for cast in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.to("cpu", torch.float32)):
        cast(quantized)
        assert (quantized.values.dtype, quantized.scales.dtype, quantized.zeros.dtype) == (torch.uint8, torch.float16, torch.uint8)
        assert torch.equal(quantized.dequantized(), weight)
    assert quantized.bias.dtype == torch.float32
    assert quantized.to(torch.bfloat16).bias.dtype == torch.bfloat16
    nf4, _ = pair("nf4")
    assert nf4.half().scales.dtype == torch.float32


def test_state_dict():
    first, _ = pair("int4", 128, True)
    second, _ = pair("int4", 128, True)
    x = torch.randn(3, 256)
    assert not torch.equal(first(x), second(x))
    assert set(first.state_dict()) == {"values", "scales", "zeros", "bias"}
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    quantized, linear = pair("nf4", device=device, dtype=dtype)
    x = torch.randn(2, 19, 256, device=device, dtype=dtype)
    x, same = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = torch.randn(2, 19, 48, device=device, dtype=dtype)
    (quantized(x) * weights).sum().backward()
    (linear(same) * weights).sum().backward()
    near(x.grad, same.grad)
    near(quantized.bias.grad, linear.bias.grad)
    quantized(x).sum().backward()  # the gradient has no memory of its own
    linear(same).sum().backward()
    near(x.grad, same.grad)
    with pytest.raises(NotImplementedError, match="no activation"):
        ops.dequant_gemm(x[0], quantized.values, quantized.scales, format="nf4", activation="relu").sum().backward()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad", [False, True])
def test_compiled(device, grad):
    torch._dynamo.reset()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    quantized, _ = pair("int4", device=device, dtype=dtype)
    x = torch.randn(2, 19, 256, device=device, dtype=dtype, requires_grad=grad)
    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), quantized(x))
    if grad:
        gradients = [torch.autograd.grad(module(x).square().sum(), x)[0] for module in (compiled, quantized)]
        assert torch.equal(*gradients)


def test_autocast():
    quantized, linear = pair()
    x = torch.randn(19, 256)
    with torch.autocast("cpu", torch.bfloat16):
        near(quantized(x), linear(x))


@pytest.mark.parametrize("layout", ["awq", "gptq", "gptq_v2", "compressed-tensors"])
def test_checkpoints(layout):
    codes, zeros = torch.randint(0, 16, (24, 64)), torch.randint(1, 16, (24, 2))
    scales = torch.rand(24, 2).half()
    weight = scales.float().repeat_interleave(32, 1) * (codes - zeros.repeat_interleave(32, 1))

    def words(numbers, order=tuple(range(8))):
        """[.., 8 c] numbers as [.., c] words: the i-th four bits of a word are its number order[i]."""
        parts = numbers.reshape(*numbers.shape[:-1], -1, 8)[..., list(order)]
        return (parts << (4 * torch.arange(8))).sum(-1).to(torch.int32)

    published = {
        "awq": lambda: (words(codes.T, (0, 2, 4, 6, 1, 3, 5, 7)), words(zeros.T, (0, 2, 4, 6, 1, 3, 5, 7)), scales.T.contiguous()),
        "gptq": lambda: (words(codes).T.contiguous(), words(zeros.T - 1), scales.T.contiguous()),
        "gptq_v2": lambda: (words(codes).T.contiguous(), words(zeros.T), scales.T.contiguous()),
        "compressed-tensors": lambda: (words(codes), words(zeros.T).T.contiguous(), scales),
    }[layout]()
    bias = torch.randn(24)
    quantized = QuantLinear.from_checkpoint(layout, *published, bias=bias)
    assert torch.equal(quantized.dequantized(), weight)
    x = torch.randn(20, 64)
    near(quantized(x), x @ weight.T + bias)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64, bias=False)
        self.narrow = torch.nn.Linear(40, 64)
        self.again = self.up
        self.lm_head = torch.nn.Linear(64, 32)

    def forward(self, x):
        return self.lm_head(self.down(self.up(x) + self.again(x)) + self.narrow(x[..., :40]))


def test_quantize_():
    model = Block()
    x = torch.randn(20, 64)
    expected = model(x)
    with pytest.warns(UserWarning, match=r"no multiple of 32: narrow \(40\)"):
        assert quantize_(model, "int4") == ["up", "down", "again"]
    assert type(model.narrow) is type(model.lm_head) is torch.nn.Linear and model.up is model.again
    assert "in_features=64, out_features=128, bias=True, format=int4, group=32" in repr(model)
    assert (model(x) - expected).norm() < 0.2 * expected.norm()
    assert quantize_(model, "int4", skip=["narrow"]) == ["lm_head"]
    whole = Block()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert quantize_(whole, "int8", skip=()) == ["up", "down", "narrow", "again", "lm_head"]
    assert quantize_(torch.nn.Sequential(torch.nn.ReLU()), "int8") == []


def test_bad_input():
    linear = torch.nn.Linear(96, 8)
    quantized = QuantLinear.from_linear(linear)
    for call, error, part in [
        (lambda: QuantLinear.from_linear(linear, "int3"), ValueError, "format is 'int3'"),
        (lambda: QuantLinear.from_linear(linear, "nf4"), ValueError, "group is 64, with 96 columns"),
        (lambda: QuantLinear.from_linear(linear, "nf4", zero_points=True), ValueError, "only int4 and int2"),
        (lambda: quantize_(Block(), "int5"), ValueError, "format is 'int5'"),
        (lambda: QuantLinear(quantized.values, quantized.scales, format="int4", bias=torch.zeros(9)), ValueError, r"bias has shape \(9,\)"),
        (lambda: QuantLinear.from_checkpoint("marlin", *[quantized.values] * 3), ValueError, "layout is 'marlin'"),
        (lambda: quantized(torch.zeros(2, 95)), ValueError, r"x has shape \(2, 95\); allowed: \[.., 96\]"),
        (lambda: quantized(torch.zeros(2, 96, dtype=torch.float64)), TypeError, "x has dtype torch.float64"),
    ]:
        with pytest.raises(error, match=part):
            call()


@pytest.mark.parametrize("format, largest", [("int8", 0.02), ("fp8", 0.05)])
def test_a_model_of_transformers(format, largest):
    """In two lines, and its logits are those of the same model with Linears that have the rounded weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 128, (2, 24))
    with torch.no_grad():
        before = model(tokens).logits
        names = tilewave.nn.quantize_(model, format)
        after = model(tokens).logits
        assert len(names) == 14 and "lm_head" not in names
        assert 0 < (after - before).norm() < largest * before.norm()  # fp8 elements are up to a 16th off
        for name in names:
            quantized = model.get_submodule(name)
            linear = torch.nn.Linear(quantized.in_features, quantized.out_features, bias=False)
            linear.weight.copy_(quantized.dequantized())
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, linear)
        wanted = model(tokens).logits
        if format == "fp8":
            near(after, wanted)
        else:  # the CPU rounds activations to 8 bits as well
            assert (after - wanted).norm() < 0.01 * wanted.norm()
