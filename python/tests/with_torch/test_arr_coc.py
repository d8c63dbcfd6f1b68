"""examples/arr_coc: the PyTorch version against attention in plain PyTorch and float64, and against the C++ program where it was built."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess

import numpy as np
import pytest

torch = pytest.importorskip("torch")

ROOT = pathlib.Path(__file__).resolve().parents[3]
SOURCE = ROOT / "examples/arr_coc/arr_coc.py"
if not SOURCE.is_file():
    pytest.skip("the examples are not here", allow_module_level=True)
spec = importlib.util.spec_from_file_location("arr_coc", SOURCE)
arr_coc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(arr_coc)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SCORES = ("information", "salience", "match")


def plain_attention(q, k, v, mask=None, return_lse=False):
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    o = (torch.softmax(scores, -1) @ v).transpose(1, 2)  # one head of keys and values is broadcast to all heads of queries
    return (o, scores.logsumexp(-1)) if return_lse else o


def plain_attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k):
    sequences = zip(*(x.tensor_split(cu_seqlens_q[1:-1].long()) for x in (q, k, v)))
    return torch.cat([plain_attention(*(x[None] for x in sequence))[0] for sequence in sequences])


@pytest.fixture(scope="module")
def image():
    return arr_coc.lighthouse()[30:250, 20:350]  # sides that are no multiples of the patches'


@pytest.fixture(scope="module")
def texture(image):
    return arr_coc.texture_of(image)


def test_scores(texture):
    got, expected = arr_coc.plan(texture), arr_coc.plan(texture, attention=plain_attention)
    for name in (*SCORES, "relevance"):
        np.testing.assert_allclose([p[name] for p in got], [p[name] for p in expected], rtol=0, atol=1e-4)


@pytest.mark.parametrize("budget", [64 * 15, 64 * 15 + 1, 1501, 400 * 15 - 1, 400 * 15])
def test_budget(texture, budget):
    patches = arr_coc.plan(texture, budget=budget)
    tokens = [p["tokens"] for p in patches]
    assert len(patches) == 15 and sum(tokens) == budget and 64 <= min(tokens) and max(tokens) <= 400
    by_relevance = [p["tokens"] for p in sorted(patches, key=lambda p: p["relevance"])]
    assert by_relevance == sorted(tokens)


@pytest.mark.parametrize("budget", [64 * 15 - 1, 400 * 15 + 1])
def test_budget_that_cannot_be_divided(texture, budget):
    with pytest.raises(ValueError, match="15 patches take 960 to 6000"):
        arr_coc.plan(texture, budget=budget)


@pytest.mark.parametrize("device", DEVICES)
def test_encoder(texture, device):
    tokens, cu_seqlens = arr_coc.sample(texture, arr_coc.plan(texture))
    dtype, tolerance = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 0.05)
    encoder = arr_coc.Encoder().to(device, dtype)
    reference = arr_coc.Encoder(plain_attention_varlen)
    reference.load_state_dict(encoder.state_dict())  # the same rounded weights
    with torch.no_grad():
        tokens = tokens.to(dtype)
        expected = reference.double()(tokens.double(), cu_seqlens)
        got = encoder(tokens.to(device), cu_seqlens.to(device)).cpu()
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance)
        for begin, end in zip(cu_seqlens, cu_seqlens[1:]):
            alone = encoder(tokens[begin:end].to(device), torch.tensor([0, end - begin], dtype=torch.int32, device=device)).cpu()
            torch.testing.assert_close(alone, got[begin:end], rtol=0, atol=tolerance)


def ppm(tmp_path, image, header=None):
    height, width, _ = image.shape
    path = tmp_path / "image.ppm"
    path.write_bytes((header or f"P6\n# a comment\n{width} {height}\n255\n").encode() + image.numpy().tobytes())
    return path


def test_ppm(tmp_path, image):
    assert torch.equal(arr_coc.read_ppm(ppm(tmp_path, image)), image)


@pytest.mark.parametrize(
    "header, message",
    [
        ("P3 330 220 255\n", "does not begin with P6"),
        ("P6 wide 220 255\n", "header's width is not a number"),
        ("P6 330 99999999999 255\n", "header's height is not a number"),
        ("P6 330 2049 255\n", "is 330 x 2049 pixels"),
        ("P6 330 220 65535\n", "largest value of 65535"),
        ("P6 330 221 255\n", "ends after 217800 of 218790 bytes"),
    ],
)
def test_bad_ppm(tmp_path, image, header, message):
    with pytest.raises(ValueError, match=message):
        arr_coc.read_ppm(ppm(tmp_path, image, header))


def cpp_program():
    build = pathlib.Path(os.environ.get("TILEWAVE_LIBRARY", ROOT / "build"))
    program = (build if build.is_dir() else build.parent) / "examples/all/arr_coc/arr_coc"
    return program if program.is_file() else None


@pytest.mark.skipif(not cpp_program(), reason="the C++ examples are not built: ctest -R examples.all")
def test_cpp_program(tmp_path, image):
    def run(*arguments):
        files = ("--output", tmp_path / "tokens.npy", "--page", tmp_path / "page.html")
        command = (cpp_program(), "--device", "cpu", "--json", *files, *arguments)
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["patches"]

    options = ("--image", ppm(tmp_path, image), "--fixation", "0.25,0.75", "--query", "103058,c83c2c", "--budget", "2000")
    cases = [
        (arr_coc.lighthouse(), (0.5, 0.5), arr_coc.LOOKED_FOR, None, ()),
        (image, (0.25, 0.75), [(16, 48, 88), (200, 60, 44)], 2000, options),
    ]
    for image, fixation, query, budget, arguments in cases:
        expected = run(*arguments)
        texture = arr_coc.texture_of(image, fixation)
        got = arr_coc.plan(texture, query, budget)
        for name in ("x", "y", "width", "height"):
            assert [p[name] for p in got] == [p[name] for p in expected]
        for name in (*SCORES, "relevance"):
            np.testing.assert_allclose([p[name] for p in got], [p[name] for p in expected], rtol=0, atol=1e-4)

        # A relevance that differs in its last bits may move a token. From the same relevance follow the same numbers.
        tokens = [p["tokens"] for p in expected]
        assert arr_coc.allocate([p["relevance"] for p in expected], sum(tokens)) == tokens
        with torch.no_grad():
            embeddings = arr_coc.Encoder()(*arr_coc.sample(texture, expected))
        np.testing.assert_allclose(embeddings.numpy(), np.load(tmp_path / "tokens.npy"), rtol=0, atol=1e-4)

        page = (tmp_path / "page.html").read_text()
        assert json.loads(re.search(r'id="plan">(.*?)</script>', page, re.DOTALL)[1])["patches"] == expected
        assert page.split('id="pixels">')[1] == arr_coc.to_page(image, expected).split('id="pixels">')[1]
