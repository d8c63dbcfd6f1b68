#!/usr/bin/env python3
"""Saves what transformers computes in every layer of a checkpoint, for `tilewave debug transcribe --compare`.

    python3 tools/dump_reference.py assets/digits assets/samples/digits-1.wav reference
    build/tilewave debug transcribe --model assets/digits --device cpu --compare reference assets/samples/digits-1.wav

Writes one safetensors file for each operator's result, in f32, under the name that the engine gives it: encoder_0.layer_3.down. Results
that transformers does not hold, such as rotated queries, are left out. --steps adds greedy decoding steps. Needs PyTorch and transformers.
AUDIO: WAV, 16 bits, mono, 16 kHz, at most 30 s.
"""

import argparse
import pathlib
import sys

import torch
from parity import read_wav
from safetensors.torch import save_file
from transformers import GlmAsrForConditionalGeneration, GlmAsrProcessor, PreTrainedTokenizerFast, WhisperFeatureExtractor

WINDOW_SECONDS = 30


class Results:
    """The results of one forward pass, collected by hooks: name to tensor."""

    def __init__(self, model):
        self.tensors = {}
        self.stage = None  # None: nothing is collected
        tower, projector, decoder = model.model.audio_tower, model.model.multi_modal_projector, model.model.language_model
        gelu = torch.nn.functional.gelu
        self.after(tower.conv1, "encoder_0.conv1", lambda y: gelu(y).transpose(1, 2))
        self.after(tower.conv2, "encoder_0.conv2", lambda y: gelu(y).transpose(1, 2))
        for i, layer in enumerate(tower.layers):
            name = f"encoder_0.layer_{i}."
            self.attention(layer, name)
            self.before(layer.mlp.fc2, name + "up")
            self.after(layer, name + "down")
        self.after(tower.norm, "encoder_0.norm")
        self.before(projector.linear_2, "encoder_0.projector_1")
        self.after(projector.linear_2, "encoder_0.projector_2")
        # The decoder's names begin with the stage, which changes from step to step.
        self.before(decoder.layers[0].input_layernorm, "{stage}.{embeddings}")
        for i, layer in enumerate(decoder.layers):
            name = f"{{stage}}.layer_{i}."
            self.attention(layer, name)
            self.pieces(layer.mlp, ("gate_proj", "up_proj"), name + "gate_up")
            self.before(layer.mlp.down_proj, name + "swiglu")
            self.after(layer, name + "down")
        self.after(decoder.norm, "{stage}.norm", lambda y: y[:, -1])
        self.after(model.lm_head, "{stage}.head", lambda y: y[:, -1])

    def attention(self, layer, name):
        self.after(layer.input_layernorm, name + "input_norm")
        self.pieces(layer.self_attn, ("q_proj", "k_proj", "v_proj"), name + "qkv")
        self.before(layer.self_attn.o_proj, name + "attention")
        self.before(layer.post_attention_layernorm, name + "out")
        self.after(layer.post_attention_layernorm, name + "mlp_norm")

    def keep(self, name, tensor):
        if self.stage is None:
            return
        embeddings = "embed" if self.stage.startswith("decode") else "copy"
        self.tensors[name.format(stage=self.stage, embeddings=embeddings)] = tensor.detach().float().cpu().contiguous()

    def after(self, module, name, change=lambda y: y):
        module.register_forward_hook(lambda m, i, o: self.keep(name, change(o[0] if isinstance(o, tuple) else o)))

    def before(self, module, name):
        module.register_forward_pre_hook(lambda m, i: self.keep(name, i[0]))

    def pieces(self, parent, children, name):
        """The outputs of several linear layers side by side."""
        outputs = {}

        def collect(child, output):
            outputs[child] = output
            if child == children[-1]:
                self.keep(name, torch.cat([outputs[each] for each in children], -1))

        for child in children:
            getattr(parent, child).register_forward_hook(lambda m, i, o, child=child: collect(child, o))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("audio")
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=0, help="decoding steps to save; default: none")
    parser.add_argument("--dtype", choices=("f32", "bf16", "f16"), default="f32", help="the arithmetic of transformers; default: f32")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    audio = read_wav(arguments.audio)
    if len(audio) > WINDOW_SECONDS * 16000:
        sys.exit(f"{arguments.audio}: {len(audio) / 16000:.1f} s; at most {WINDOW_SECONDS} s are supported")
    folder = arguments.checkpoint
    processor = GlmAsrProcessor(WhisperFeatureExtractor(feature_size=128), PreTrainedTokenizerFast.from_pretrained(folder),
                                chat_template=(folder / "chat_template.jinja").read_text())
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[arguments.dtype]
    model = GlmAsrForConditionalGeneration.from_pretrained(folder, dtype=dtype).to(arguments.device).eval()
    inputs = processor.apply_transcription_request(audio).to(arguments.device)
    results = Results(model)
    with torch.no_grad():
        results.stage = "prefill_0"
        results.keep("features_0.mel", inputs["input_features"].transpose(1, 2))
        inputs["input_features"] = inputs["input_features"].to(dtype)
        out = model(**inputs, use_cache=True)
        for step in range(arguments.steps):
            results.stage = f"decode_{step}"
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
    arguments.directory.mkdir(parents=True, exist_ok=True)
    for name, tensor in results.tensors.items():
        save_file({name: tensor}, arguments.directory / f"{name}.safetensors")
    print(f"{arguments.directory}: {len(results.tensors)} results")


if __name__ == "__main__":
    main()
