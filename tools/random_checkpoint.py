#!/usr/bin/env python3
"""Writes a GLM-ASR checkpoint with random weights, for benchmarks and for parity at full size.

    python3 tools/random_checkpoint.py nano DIR          GLM-ASR-Nano-2512's shape: 4.5 GB
    python3 tools/random_checkpoint.py exercise DIR      the exercise's defaults (decoder hidden 3584): 16 GB
    python3 tools/random_checkpoint.py small DIR         40 MB
    python3 tools/random_checkpoint.py nano --decoder DIR   only the decoder, as a Llama checkpoint: 3.2 GB

Needs NumPy. Weights are bf16, of one pseudo-random pool: what they are does not matter, only that every layer keeps the size of what passes
through it. The tokenizer knows bytes and the special tokens; the other ids stand for made-up words.
"""

import argparse
import json
import pathlib

import numpy as np

SPECIAL = {"<|endoftext|>": 59246, "<|system|>": 59252, "<|user|>": 59253, "<|assistant|>": 59254, "<|observation|>": 59255,
           "<|pad|>": 59260, "<|begin_of_audio|>": 59261, "<|end_of_audio|>": 59262}
SHAPES = {
    "nano": dict(audio=dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20),
                 text=dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=4,
                           head_dim=128, vocab_size=59264, max_position_embeddings=8192, rope_theta=10000.0), linear_1=4096),
    "exercise": dict(audio=dict(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20),
                     text=dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
                               num_key_value_heads=4, head_dim=128, vocab_size=151552, max_position_embeddings=8192, rope_theta=500000.0),
                     linear_1=4096),
    "small": dict(audio=dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4),
                  text=dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                            head_dim=64, vocab_size=59264, max_position_embeddings=8192, rope_theta=10000.0), linear_1=512),
}
TEMPLATE = (
    "{%- for message in messages -%}{%- if message['role'] == 'user' -%}<|user|>\n"
    "{% for part in message['content'] -%}{%- if part['type'] == 'audio' -%}<|begin_of_audio|><|pad|><|end_of_audio|>"
    "{%- elif part['type'] == 'text' -%}<|user|>\n{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>\n{% endif -%}")


def tensors(shape: dict):
    """(name, extents, standard deviation of a matrix's elements or None for ones) of every tensor, in the file's order."""
    audio, text = shape["audio"], shape["text"]
    hidden, wide = audio["hidden_size"], audio["intermediate_size"]
    scaled = lambda *extents: (list(extents), float(np.prod(extents[1:])) ** -0.5)
    def norm(name, n, bias=True):
        yield f"{name}.weight", [n], None
        if bias:
            yield f"{name}.bias", [n], 0.01
    def linear(name, out, into, bias=True):
        yield f"{name}.weight", *scaled(out, into)
        if bias:
            yield f"{name}.bias", [out], 0.01
    yield "audio_tower.conv1.weight", *scaled(hidden, 128, 3)
    yield "audio_tower.conv1.bias", [hidden], 0.01
    yield "audio_tower.conv2.weight", *scaled(hidden, hidden, 3)
    yield "audio_tower.conv2.bias", [hidden], 0.01
    for i in range(audio["num_hidden_layers"]):
        layer = f"audio_tower.layers.{i}"
        yield from norm(f"{layer}.input_layernorm", hidden)
        yield from linear(f"{layer}.self_attn.q_proj", hidden, hidden)
        yield from linear(f"{layer}.self_attn.k_proj", hidden, hidden, bias=False)
        yield from linear(f"{layer}.self_attn.v_proj", hidden, hidden)
        yield from linear(f"{layer}.self_attn.o_proj", hidden, hidden)
        yield from norm(f"{layer}.post_attention_layernorm", hidden)
        yield from linear(f"{layer}.mlp.fc1", wide, hidden)
        yield from linear(f"{layer}.mlp.fc2", hidden, wide)
    yield from norm("audio_tower.norm", hidden)
    width, dim = text["hidden_size"], text["head_dim"]
    yield from linear("multi_modal_projector.linear_1", shape["linear_1"], 4 * hidden)
    yield from linear("multi_modal_projector.linear_2", width, shape["linear_1"])
    yield "language_model.model.embed_tokens.weight", [text["vocab_size"], width], 0.5
    for i in range(text["num_hidden_layers"]):
        layer = f"language_model.model.layers.{i}"
        yield from norm(f"{layer}.input_layernorm", width, bias=False)
        yield from linear(f"{layer}.self_attn.q_proj", text["num_attention_heads"] * dim, width, bias=False)
        yield from linear(f"{layer}.self_attn.k_proj", text["num_key_value_heads"] * dim, width, bias=False)
        yield from linear(f"{layer}.self_attn.v_proj", text["num_key_value_heads"] * dim, width, bias=False)
        yield from linear(f"{layer}.self_attn.o_proj", width, text["num_attention_heads"] * dim, bias=False)
        yield from norm(f"{layer}.post_attention_layernorm", width, bias=False)
        yield from linear(f"{layer}.mlp.gate_proj", text["intermediate_size"], width, bias=False)
        yield from linear(f"{layer}.mlp.up_proj", text["intermediate_size"], width, bias=False)
        yield from linear(f"{layer}.mlp.down_proj", width, text["intermediate_size"], bias=False)
    yield from norm("language_model.model.norm", width, bias=False)
    yield "language_model.lm_head.weight", *scaled(text["vocab_size"], width)


def to_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) + 0x8000 >> 16).astype(np.uint16)


def decoder_tensors(shape: dict):
    """Those of the decoder, as a Llama checkpoint names them."""
    prefix = "language_model."
    return ((name.removeprefix(prefix), *rest) for name, *rest in tensors(shape) if name.startswith(prefix))


def write_weights(file: pathlib.Path, entries: list, seed: int) -> None:
    offset, header = 0, {"__metadata__": {"format": "pt"}}
    for name, extents, _ in entries:
        size = 2 * int(np.prod(extents))
        header[name] = {"dtype": "BF16", "shape": extents, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal(1 << 22, dtype=np.float32)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, extents, deviation in entries:
            left = int(np.prod(extents))
            while left > 0:
                begin = int(rng.integers(0, pool.size // 2))  # another piece of the pool for every tensor
                piece = pool[begin:begin + min(left, pool.size // 2)]
                out.write(to_bf16(np.ones_like(piece) if deviation is None else piece * deviation).tobytes())
                left -= piece.size


def byte_characters() -> dict:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def tokenizer(vocabulary: int) -> dict:
    characters = byte_characters()
    vocab = {characters[b]: b for b in range(256)}
    vocab |= {f"w{i}": i for i in range(256, vocabulary) if i not in SPECIAL.values()} | SPECIAL
    return {"version": "1.0", "truncation": None, "padding": None,
            "added_tokens": [dict(id=i, content=t, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
                             for t, i in SPECIAL.items()],
            "normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "post_processor": None, "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": []}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--decoder", action="store_true", help="only the decoder, for `tilewave generate`")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    shape, folder = SHAPES[arguments.shape], arguments.directory
    folder.mkdir(parents=True, exist_ok=True)
    eos = [59246, 59253, 59255]
    theta = shape["text"].pop("rope_theta")
    config = {
        "architectures": ["GlmAsrForConditionalGeneration"], "model_type": "glmasr", "dtype": "bfloat16", "audio_token_id": SPECIAL["<|pad|>"],
        "projector_hidden_act": "gelu", "tie_word_embeddings": False,
        "audio_config": dict(model_type="glmasr_encoder", hidden_act="gelu", num_mel_bins=128, max_position_embeddings=1500,
                             partial_rotary_factor=0.5, num_key_value_heads=shape["audio"]["num_attention_heads"],
                             rope_parameters=dict(rope_theta=10000.0, rope_type="default", partial_rotary_factor=0.5), **shape["audio"]),
        "text_config": dict(model_type="llama", hidden_act="silu", rms_norm_eps=1e-5, eos_token_id=eos, tie_word_embeddings=False,
                            rope_parameters=dict(rope_theta=theta, rope_type="default"), **shape["text"])}
    if arguments.decoder:
        config = dict(architectures=["LlamaForCausalLM"], dtype="bfloat16", **config["text_config"])
    files = {
        "config.json": config, "generation_config.json": dict(eos_token_id=eos, pad_token_id=eos[0]),
        "processor_config.json": dict(
            processor_class="GlmAsrProcessor", audio_token="<|pad|>", default_transcription_prompt="Please transcribe this audio into text",
            max_audio_len=655,
            feature_extractor=dict(feature_extractor_type="WhisperFeatureExtractor", feature_size=128, sampling_rate=16000, hop_length=160,
                                   n_fft=400, chunk_length=30, n_samples=480000, nb_max_frames=3000, padding_side="right", padding_value=0.0)),
        "tokenizer.json": tokenizer(shape["text"]["vocab_size"]),
        "tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<|endoftext|>", pad_token="<|endoftext|>")}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    entries = decoder_tensors(shape) if arguments.decoder else tensors(shape)
    write_weights(folder / "model.safetensors", list(entries), arguments.seed)


if __name__ == "__main__":
    main()
