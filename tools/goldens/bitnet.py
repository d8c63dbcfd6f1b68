#!/usr/bin/env python3
"""Writes small random BitNet b1.58 checkpoints, and the scores that their decoder must give.

    python3 tools/goldens/bitnet.py tests/data/bitnet

Needs NumPy. The scores follow from the definition below, in double: only inputs of layers are rounded, in f32. models/bitnet_test.cpp reads
the files. `compare_with_transformers` (PyTorch, transformers) holds the same definition against BitNetForCausalLM.

    python3 tools/goldens/bitnet.py --compare DIR
"""

import argparse
import json
import pathlib

import numpy as np

SPECIAL = {"<|begin|>": 0, "<|end|>": 1}
SHAPE = dict(hidden_size=128, intermediate_size=96, num_attention_heads=2, num_key_value_heads=1, vocab_size=80,
             max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0)
LAYERS = {"offline": 2, "online": 1, "divided": 1}
TOKENS = 20


def linears(config):
    """(name, rows, columns) of a layer's ternary weights."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return [("self_attn.q_proj", hidden, hidden), ("self_attn.k_proj", kv, hidden), ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden), ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner)]


def to_bf16(x):
    """f32, rounded to bf16."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def save(path, tensors):
    """safetensors, from (dtype, array) by name."""
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        raw = (np.asarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes() if dtype == "BF16" else array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def make(kind, random):
    """(config, tensors of the file, exact weights by name: arrays, and for linear layers (numbers, scale))."""
    config = dict(SHAPE, architectures=["BitNetForCausalLM"], model_type="bitnet", hidden_act="relu2", num_hidden_layers=LAYERS[kind],
                  tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, dtype="bfloat16")
    config["quantization_config"] = {"quant_method": "bitnet", "linear_class": "bitlinear" if kind == "divided" else "autobitlinear",
                                     "quantization_mode": "online" if kind == "online" else "offline"}
    stored, exact = {}, {}

    def plain(name, array):
        exact[name] = to_bf16(array)
        stored[name] = ("BF16", exact[name])

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    plain("model.embed_tokens.weight", random.normal(0, 1, (config["vocab_size"], hidden)))
    plain("model.norm.weight", random.uniform(0.5, 1.5, hidden))
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        for name, size in [("input_layernorm", hidden), ("post_attention_layernorm", hidden), ("self_attn.attn_sub_norm", hidden),
                           ("mlp.ffn_sub_norm", inner)]:
            plain(f"{of}{name}.weight", random.uniform(0.5, 1.5, size))
        for name, rows, columns in linears(config):
            if kind == "online":
                w = to_bf16(random.normal(0, 1.5 / columns**0.5, (rows, columns)))
                stored[f"{of}{name}.weight"] = ("BF16", w)
                scale = np.float32(max(np.abs(w.astype(np.float64)).mean(), 1e-5))
                exact[of + name] = np.clip(np.rint(w / scale), -1, 1).astype(np.int64), scale
                continue
            numbers = random.integers(-1, 2, (rows, columns))
            given = to_bf16(np.array([random.uniform(0.5, 1.5) * columns ** (0.5 if kind == "divided" else -0.5)]))
            packed = sum((numbers[i * rows // 4 : (i + 1) * rows // 4] + 1) << 2 * i for i in range(4)).astype(np.uint8)
            stored[f"{of}{name}.weight"] = ("U8", packed)
            stored[f"{of}{name}.weight_scale"] = ("BF16", given)
            exact[of + name] = numbers, 1 / given[0] if kind == "divided" else given[0]
    return config, stored, exact


def bit_linear(x, weight):
    numbers, scale = weight
    rounded = x.astype(np.float32)
    largest = np.maximum(np.abs(rounded).max(axis=1, keepdims=True), np.float32(1e-5))
    integers = np.clip(np.rint(rounded * (np.float32(127) / largest)), -128, 127).astype(np.int64)
    return (integers @ numbers.T) * (largest.astype(np.float64) / 127) * float(scale)


def scores(config, exact, ids):
    """[tokens, vocabulary]: those of what follows each token."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, n = config["hidden_size"] // heads, len(ids)
    angles = np.arange(n)[:, None] * config["rope_theta"] ** (-np.arange(0, dim, 2) / dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def norm(x, name):
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + config["rms_norm_eps"]) * exact[name + ".weight"]

    def rotate(x):
        low, high = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    x = exact["model.embed_tokens.weight"][ids].astype(np.float64)
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        h = norm(x, of + "input_layernorm")
        q, k, v = (bit_linear(h, exact[f"{of}self_attn.{name}_proj"]).reshape(n, -1, dim) for name in "qkv")
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        weights = np.einsum("qhd,khd->hqk", q, k) / dim**0.5 + np.triu(np.full((n, n), -np.inf), 1)
        weights = np.exp(weights - weights.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)
        x = x + bit_linear(norm(attended, of + "self_attn.attn_sub_norm"), exact[of + "self_attn.o_proj"])
        h = norm(x, of + "post_attention_layernorm")
        gate, up = bit_linear(h, exact[of + "mlp.gate_proj"]), bit_linear(h, exact[of + "mlp.up_proj"])
        x = x + bit_linear(norm(np.maximum(gate, 0) ** 2 * up, of + "mlp.ffn_sub_norm"), exact[of + "mlp.down_proj"])
    return norm(x, "model.norm") @ exact["model.embed_tokens.weight"].astype(np.float64).T


def tokenizer():
    """Byte-level BPE without merges: a token for each of 78 characters, and the special ones. A text begins with <|begin|>."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    characters = "\u0120\u010a" + letters + letters.upper() + "0123456789" + ".,;:!?'\"()-+*/"  # space and line end as GPT-2 writes these bytes
    vocab = SPECIAL | {c: len(SPECIAL) + i for i, c in enumerate(characters)}
    assert len(vocab) == SHAPE["vocab_size"]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    first = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [dict(id=i, content=t, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
                             for t, i in SPECIAL.items()],
            "normalizer": None, "pre_tokenizer": level,
            "post_processor": {"type": "TemplateProcessing", "single": [first, text], "pair": [first, text, {"Sequence": {"id": "B", "type_id": 1}}],
                               "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}}},
            "decoder": level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []}}


def compare_with_transformers(directory):
    """Relative distances (L2) of BitNetForCausalLM's scores in f32 from the golden ones. Its weights are set here, because transformers' loader
    rounds scales to the model's dtype."""
    import torch
    from transformers import BitNetConfig, BitNetForCausalLM
    from transformers.integrations.bitnet import ActQuant

    for kind in LAYERS:
        config, _, exact = make(kind, np.random.default_rng(7))
        ids = np.random.default_rng(8).integers(0, config["vocab_size"], TOKENS)
        known = {name: value for name, value in config.items() if name not in ("quantization_config", "dtype")}
        model = BitNetForCausalLM(BitNetConfig(**known)).eval()
        state = {name: torch.tensor(value) for name, value in exact.items() if not isinstance(value, tuple)}
        for name, value in exact.items():
            if isinstance(value, tuple):
                state[name + ".weight"] = torch.tensor(value[0] * value[1], dtype=torch.float32)
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state)
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, given: (ActQuant.apply(given[0]),))
        with torch.no_grad():
            theirs = model(torch.tensor(ids)[None]).logits[0].double().numpy()
        ours = scores(config, exact, ids)
        print(f"{kind}: {np.linalg.norm(theirs - ours) / np.linalg.norm(ours):.2e}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--compare", action="store_true", help="hold the definition against transformers instead; writes nothing")
    arguments = parser.parse_args()
    if arguments.compare:
        return compare_with_transformers(arguments.directory)
    for kind in LAYERS:
        config, stored, exact = make(kind, np.random.default_rng(7))
        ids = np.random.default_rng(8).integers(0, config["vocab_size"], TOKENS)
        folder = arguments.directory / kind
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer(), indent=1) + "\n")
        save(folder / "model.safetensors", stored)
        golden = {"ids": ("I32", ids.astype(np.int32)), "scores": ("F32", scores(config, exact, ids).astype(np.float32))}
        save(folder / "golden.safetensors", golden)


if __name__ == "__main__":
    main()
