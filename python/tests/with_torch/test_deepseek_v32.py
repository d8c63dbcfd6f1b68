"""examples/deepseek_v32: the layer against its reference, faults that the comparison must find, the reference against transformers."""

import dataclasses
import json
import pathlib
import sys

import pytest

torch = pytest.importorskip("torch")

EXAMPLE = pathlib.Path(__file__).resolve().parents[3] / "examples/deepseek_v32"
if not EXAMPLE.is_dir():
    pytest.skip("the examples are not here", allow_module_level=True)
sys.path.insert(0, str(EXAMPLE))
import checkpoint
import layer
import reference

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
CONFIG = checkpoint.Config()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deepseek_v32")
    checkpoint.write(folder, CONFIG, checkpoint.random_weights(CONFIG))
    return folder


def exceeded(folder, tokens, device="cpu"):
    return {row.step for row in layer.check_layer(folder, tokens, device) if not row.holds}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 16, 17, 96, 301])
def test_layer(folder, tokens, device):
    assert not exceeded(folder, tokens, device)


@pytest.mark.parametrize("device", DEVICES)
def test_other_sizes(tmp_path, device):
    config = checkpoint.Config(hidden_size=136, num_attention_heads=3, q_lora_rank=72, index_n_heads=5, index_topk=7)
    checkpoint.write(tmp_path, config, checkpoint.random_weights(config, seed=2))
    assert not exceeded(tmp_path, 50, device)


def without_rope(rope):
    return lambda x, cos, sin, out=None, **_: x if out is None else out.copy_(x)


def with_the_other_pairs(rope):
    return lambda *arguments, interleaved=False, **rest: rope(*arguments, interleaved=not interleaved, **rest)


ROTATED = {"q", "kv", "index_q", "index_k"}


@pytest.mark.parametrize(
    "operator, fault, steps",
    [
        ("rope", without_rope, ROTATED),
        ("rope", with_the_other_pairs, ROTATED),
        ("hadamard", lambda hadamard: lambda x, scale: x, {"index_q", "index_k"}),
        ("rms_norm", lambda rms_norm: lambda x, weight, **rest: rms_norm(x, **rest), {"q_a", "kv"}),
        ("indexer_scores", lambda scores: lambda q, k, weights, **rest: scores(q, k, weights.abs(), **rest), {"scores", "selection"}),
        ("indexer_scores", lambda scores: lambda *arguments, causal, **rest: scores(*arguments, **rest), {"scores"}),
        ("topk", lambda topk: lambda x, k, ends: topk(x, k, ends=ends, largest=False), {"selection"}),
        ("topk", lambda topk: lambda x, k, ends: topk(x, k), {"selection"}),  # names unseen keys instead of -1
        ("topk", lambda topk: lambda x, k, ends: topk(x, k, ends=ends - 1), {"selection"}),
        ("mla_sparse", lambda mla_sparse: lambda *arguments, scale: mla_sparse(*arguments), {"attention", "output"}),
        (
            "mla_sparse",
            lambda mla_sparse: lambda q, kv, keys, scale: mla_sparse(q, kv, keys[:, 1:].contiguous(), scale=scale),
            {"attention"},
        ),
    ],
)
def test_faults_are_found(folder, monkeypatch, operator, fault, steps):
    monkeypatch.setattr(layer.ops, operator, fault(getattr(layer.ops, operator)))
    assert steps <= exceeded(folder, 96)


def test_fault_in_the_softmax_scale_is_in_attention_alone(folder, monkeypatch):
    monkeypatch.setattr(layer, "softmax_scale", lambda config: 192**-0.5)  # without YaRN's factor
    assert exceeded(folder, 96) == {"attention", "output"}


def test_program(tmp_path, monkeypatch, capsys):
    arguments = ["--tokens", "20", "--device", "cpu", "--checkpoint", str(tmp_path / "new")]
    assert layer.main(arguments) == 0
    table = capsys.readouterr().out
    assert len(table.splitlines()) == 10 and "exceeded" not in table
    assert layer.main(arguments) == 0 and capsys.readouterr().out == table  # of the checkpoint that it wrote
    monkeypatch.setattr(layer.ops, "rope", without_rope(layer.ops.rope))
    assert layer.main(arguments) == 1 and "exceeded" in capsys.readouterr().out


def test_checkpoint(folder):
    config, weights = checkpoint.read(folder)
    assert config == CONFIG
    written = checkpoint.random_weights(CONFIG)
    assert weights.keys() == written.keys() and all(torch.equal(weights[name], written[name]) for name in written)


def test_checkpoint_is_safetensors(folder):
    load_file = pytest.importorskip("safetensors.torch").load_file
    loaded, written = load_file(folder / "model.safetensors"), checkpoint.random_weights(CONFIG)
    assert loaded.keys() == {checkpoint.PREFIX + name for name in written}
    assert all(torch.equal(loaded[checkpoint.PREFIX + name], weight) for name, weight in written.items())


def test_bad_checkpoints(tmp_path):
    weights = checkpoint.random_weights(CONFIG)
    incomplete = {name: weight for name, weight in weights.items() if name != "indexer.wk.weight"}
    checkpoint.write(tmp_path, CONFIG, incomplete)
    with pytest.raises(ValueError, match="has no model.layers.0.self_attn.indexer.wk.weight"):
        checkpoint.read(tmp_path)
    checkpoint.write(tmp_path, CONFIG, weights)
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(dataclasses.replace(CONFIG, q_lora_rank=64))))
    with pytest.raises(ValueError, match=r"q_a_proj.weight is BF16 with shape \(192, 256\); the layer needs BF16 with shape \(64, 256\)"):
        checkpoint.read(tmp_path)


def test_yarn():
    """Numbers of the published configuration: pairs up to the tenth keep their frequency, those from the 23rd on have a 40th."""
    cos, sin = layer.rotary_table(CONFIG, 2, "cpu")
    frequencies = torch.atan2(sin[1], cos[1]).double() * 10000 ** (torch.arange(32).double() / 32)
    torch.testing.assert_close(frequencies[:11], torch.ones(11).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(frequencies[23:], torch.full((9,), 1 / 40).double(), rtol=1e-5, atol=0)
    assert (frequencies[10:24].diff() < 0).all()
    assert layer.softmax_scale(CONFIG) == pytest.approx(0.135234, abs=1e-6)


def test_reference_against_transformers(monkeypatch):
    """In double: with scores of all tokens from the reference, transformers' layer selects the same keys and gives the same output."""
    published = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    ours = dataclasses.asdict(CONFIG)
    scaling = {"rope_type": "yarn", "rope_theta": ours.pop("rope_theta"), "mscale": 1.0, **ours.pop("rope_scaling")}
    config = published.DeepseekV32Config(**ours, rope_parameters=scaling, num_key_value_heads=CONFIG.num_attention_heads)
    config._attn_implementation = "eager"
    module = published.DeepseekV32Attention(config, 0).double()
    weights = checkpoint.random_weights(CONFIG)
    module.load_state_dict({name: weight.double() for name, weight in weights.items()})

    tokens = 96
    x = torch.randn(tokens, CONFIG.hidden_size).bfloat16()
    every_key = torch.arange(tokens).repeat(tokens, 1).tril()
    scores = reference.attention_layer(CONFIG, weights, x, every_key)["scores"]
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    values, selection = scores.masked_fill(~seen, -torch.inf).topk(CONFIG.index_topk)
    expected = reference.attention_layer(CONFIG, weights, x, selection.masked_fill(values == -torch.inf, -1))["output"]

    positions = torch.arange(tokens)[None]
    tables = published.DeepseekV32RotaryEmbedding(config)(x.double()[None], positions)
    mask = torch.zeros(tokens, tokens).double().masked_fill(~seen, torch.finfo(torch.float64).min)[None, None]
    with torch.no_grad():
        got, _ = module(x.double()[None], tables, mask, position_ids=positions)
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-5)  # transformers' tables are in f32
