#!/usr/bin/env python3
"""Makes tests/data/glm_asr/: tiny GLM-ASR checkpoints with random weights, and what transformers computes with them.

    python3 -m venv venv && venv/bin/pip install torch==2.11.0 transformers==5.17.0
    venv/bin/python tools/goldens/glm_asr.py            (about two minutes on two cores)

Each checkpoint exercises another way in which published files differ: names, dtypes, shards, tied or untied vocabulary, config spellings.
golden.safetensors of each holds, for audio of 1, 2 and 3 windows (made by audio() below, and by the same integers in the C++ test), some
rows of every stage in f32, the prompt's tokens and 64 greedy ones. Seeds are taken until every one of those tokens wins by at least 1e-3.
"""

import json
import math
import pathlib
import shutil
import sys

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (GlmAsrConfig, GlmAsrForConditionalGeneration, GlmAsrProcessor, LlamaConfig, PreTrainedTokenizerFast,
                          WhisperFeatureExtractor)

HERE = pathlib.Path(__file__).resolve().parents[2] / "tests" / "data" / "glm_asr"
SECONDS = {1: 5.3, 2: 41.7, 3: 70.1}
TOKENS = 64
MARGIN = 1e-3
SPECIAL = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|begin_of_audio|>", "<|end_of_audio|>", "<|pad|>"]
TEMPLATE = (
    "{%- for message in messages -%}{%- if message['role'] == 'user' -%}<|user|>\n"
    "{% for part in message['content'] -%}{%- if part['type'] == 'audio' -%}<|begin_of_audio|><|pad|><|end_of_audio|>"
    "{%- elif part['type'] == 'text' -%}<|user|>\n{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>\n{% endif -%}")
GLM_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def audio(seconds: float) -> np.ndarray:
    """A triangle wave of changing pitch and loudness with noise, in integers: the same in every language."""
    n = int(round(seconds * 16000))
    samples = np.zeros(n, np.int64)
    state, phase = 12345, 0
    for i in range(n):
        state = (1103515245 * state + 12345) % (1 << 31)
        phase = (phase + 400 + (i // 1600) * 37 % 1500) % 65536
        triangle = abs(phase - 32768) - 16384
        loudness = (i // 800) * 29 % 97
        samples[i] = triangle * loudness // 128 + (state >> 16) % 2048 - 1024
    return samples.astype(np.float32) / 32768


def tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tok = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(__import__("tokenizers").Regex(GLM_PATTERN), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tok, pad_token="<|endoftext|>", eos_token="<|endoftext|>")


# name: audio sub-config, text sub-config, how it is stored
CASES = {
    "gqa": dict(
        audio=dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=1),
        text=dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=64),
        tied=False, dtype=torch.bfloat16, spelling="prefixed"),
    "tied_wide_head": dict(
        audio=dict(hidden_size=128, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2),
        text=dict(hidden_size=96, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=128),
        tied=True, dtype=torch.float16, linear_1=72, spelling="nested", shards=True, old_config=True),
    "three_layers": dict(
        audio=dict(hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=1),
        text=dict(hidden_size=48, intermediate_size=72, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1, head_dim=64,
                  rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}),
        tied=False, dtype=torch.float32, eos_list=True),
}


def build(case: dict, seed: int, tok) -> GlmAsrForConditionalGeneration:
    torch.manual_seed(seed)
    ids = tok.convert_tokens_to_ids
    eos = [ids("<|endoftext|>"), ids("<|user|>")] if case.get("eos_list") else ids("<|endoftext|>")
    config = GlmAsrConfig(
        audio_config=dict(model_type="glmasr_encoder", **case["audio"]),
        text_config=dict(model_type="llama", vocab_size=len(tok), eos_token_id=eos, bos_token_id=None, pad_token_id=ids("<|endoftext|>"),
                         tie_word_embeddings=case["tied"], max_position_embeddings=2048, **case["text"]),
        audio_token_id=ids("<|pad|>"), tie_word_embeddings=case["tied"])
    model = GlmAsrForConditionalGeneration(config).eval()
    if "linear_1" in case:
        projector = model.model.multi_modal_projector
        projector.linear_1 = torch.nn.Linear(projector.linear_1.in_features, case["linear_1"])
        projector.linear_2 = torch.nn.Linear(case["linear_1"], projector.linear_2.out_features)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                p.copy_(1 + 0.1 * torch.randn_like(p))
            elif p.ndim == 1:
                p.copy_(0.1 * torch.randn_like(p))
            else:
                fan_in = p[0].numel()
                # A tied vocabulary of large rows would repeat its last token for ever.
                scale = (0.05 if case["tied"] else 0.5) if "embed_tokens" in name or "lm_head" in name else 1.5 / math.sqrt(fan_in)
                p.copy_(scale * torch.randn_like(p))
            p.copy_(p.to(case["dtype"]).float())  # what the file holds
    return model.float()


def run(model, processor, windows: int) -> dict | None:
    """Stages and tokens, or None when some token does not win clearly."""
    inputs = processor.apply_transcription_request(audio(SECONDS[windows]))
    features, mask, ids = inputs["input_features"], inputs["input_features_mask"], inputs["input_ids"]
    stages = {}
    tower = model.model.audio_tower
    hooks = [tower.layers[0].register_forward_hook(lambda m, i, o: stages.__setitem__("layer_1", o)),
             tower.layers[0].register_forward_pre_hook(lambda m, i: stages.__setitem__("conv", i[0])),
             tower.register_forward_hook(lambda m, i, o: stages.__setitem__("encoder", o.last_hidden_state))]
    with torch.no_grad():
        embeds = model.get_audio_features(features, mask).pooler_output
        out = model(**inputs, use_cache=True)
        for hook in hooks:
            hook.remove()
        logits = out.logits[0, -1]
        first, tokens, cache = logits, [], out.past_key_values
        for _ in range(TOKENS):
            top = logits.topk(2).values
            if top[0] - top[1] < MARGIN:
                return None
            tokens.append(int(logits.argmax()))
            step = model(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=cache, use_cache=True)
            logits, cache = step.logits[0, -1], step.past_key_values
    if len(set(tokens)) < 8:
        return None  # a short loop would prove little
    golden = {"mel": features.transpose(1, 2)[:, 3::200].contiguous(), "conv": stages["conv"][:, 1::100].contiguous(),
              "layer_1": stages["layer_1"][:, 1::100].contiguous(), "encoder": stages["encoder"][:, 1::100].contiguous(),
              "projector": embeds[::8].contiguous(), "logits": first.contiguous()}
    golden = {k: v.float().clone() for k, v in golden.items()}
    golden["prompt"] = ids[0].to(torch.int32).clone()
    golden["tokens"] = torch.tensor(tokens, dtype=torch.int32)
    return {f"{windows}.{k}": v for k, v in golden.items()}


def respell(name: str, spelling: str) -> str:
    """A name as save_pretrained wrote it in one of the published spellings: "nested" (language_model.model.layers...) or "prefixed"
    (model.language_model.layers...)."""
    plain = name.removeprefix("model.")
    if plain.startswith("language_model."):
        plain = plain.removeprefix("language_model.")
        while plain.startswith("model."):
            plain = plain.removeprefix("model.")
        head = plain.startswith("lm_head")
        if spelling == "nested":
            return f"language_model.{plain}" if head else f"language_model.model.{plain}"
        return plain if head else f"model.language_model.{plain}"
    if plain.startswith("lm_head"):
        return f"language_model.{plain}" if spelling == "nested" else plain
    return plain if spelling == "nested" else f"model.{plain}"


def store(model, case: dict, folder: pathlib.Path, processor) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.to(case["dtype"]).save_pretrained(folder, max_shard_size="200KB" if case.get("shards") else "1GB")
    processor.save_pretrained(folder)
    if "spelling" in case:
        for file in folder.glob("*.safetensors"):
            save_file({respell(k, case["spelling"]): v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
        index = folder / "model.safetensors.index.json"
        if index.exists():
            content = json.loads(index.read_text())
            content["weight_map"] = {respell(k, case["spelling"]): v for k, v in content["weight_map"].items()}
            index.write_text(json.dumps(content, indent=1))
    if case.get("old_config"):  # rope_theta and the rest where older files put them
        config = json.loads((folder / "config.json").read_text())
        for sub in ("audio_config", "text_config"):
            rope = config[sub].pop("rope_parameters", None) or {}
            config[sub]["rope_theta"] = rope.get("rope_theta", 10000.0)
            if "partial_rotary_factor" in rope:
                config[sub]["partial_rotary_factor"] = rope["partial_rotary_factor"]
        config["audio_config"]["num_key_value_heads"] = None
        config["torch_dtype"] = config.pop("dtype", "float16")
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "README.md").unlink(missing_ok=True)


def main() -> None:
    only = sys.argv[1:]
    tok = tokenizer()
    processor = GlmAsrProcessor(WhisperFeatureExtractor(feature_size=128), tok, chat_template=TEMPLATE)
    for name, case in CASES.items():
        if only and name not in only:
            continue
        for seed in range(1, 1000):
            model = build(case, seed, tok)
            golden = {}
            for windows in (1, 2, 3):
                part = run(model, processor, windows)
                if part is None:
                    break
                golden.update(part)
            else:
                break
        print(f"{name}: seed {seed}")
        store(model, case, HERE / name, processor)
        save_file(golden, HERE / name / "golden.safetensors", metadata={"seed": str(seed)})


if __name__ == "__main__":
    main()
