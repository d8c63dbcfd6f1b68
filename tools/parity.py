#!/usr/bin/env python3
"""Compares the engine with transformers on one checkpoint, in bf16 or f16, both against transformers in f32.

    python3 tools/random_checkpoint.py nano /tmp/nano
    python3 tools/parity.py /tmp/nano assets/samples/digits-1.wav --dtype bf16 --device cuda

Prints the relative L2 distance from f32 of the encoder's output and of the first token's scores, for transformers and for the engine, and
their ratio; exit code 1 when a ratio exceeds 1.5. The engine's come from build/tests/dump_stages. Needs PyTorch and transformers.
AUDIO: WAV, 16 bits, mono, 16 kHz.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import wave

import numpy as np
import torch
from transformers import GlmAsrForConditionalGeneration, GlmAsrProcessor, PreTrainedTokenizerFast, WhisperFeatureExtractor

LARGEST_RATIO = 1.5


def read_wav(file: str) -> np.ndarray:
    with wave.open(file) as audio:
        if audio.getnchannels() != 1 or audio.getsampwidth() != 2 or audio.getframerate() != 16000:
            sys.exit(f"{file}: 16-bit mono WAV of 16 kHz is wanted")
        return np.frombuffer(audio.readframes(audio.getnframes()), np.int16).astype(np.float32) / 32768


def reference(folder: str, audio: np.ndarray, dtype: torch.dtype, device: str) -> dict:
    path = pathlib.Path(folder)
    processor = GlmAsrProcessor(WhisperFeatureExtractor(feature_size=128), PreTrainedTokenizerFast.from_pretrained(folder),
                                chat_template=(path / "chat_template.jinja").read_text())
    inputs = processor.apply_transcription_request(audio).to(device)
    inputs["input_features"] = inputs["input_features"].to(dtype)
    model = GlmAsrForConditionalGeneration.from_pretrained(folder, dtype=dtype).to(device).eval()
    with torch.no_grad():
        encoder = model.model.audio_tower(inputs["input_features"]).last_hidden_state
        logits = model(**inputs, logits_to_keep=1).logits[:, -1]
    return {"encoder": encoder.float().cpu().numpy(), "logits": logits.float().cpu().numpy()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("audio")
    parser.add_argument("--dtype", choices=("bf16", "f16"), default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--program", default="build/tests/dump_stages")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    audio = read_wav(arguments.audio)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[arguments.dtype]
    exact = reference(arguments.checkpoint, audio, torch.float32, arguments.device)
    torch.cuda.empty_cache()
    peer = reference(arguments.checkpoint, audio, dtype, arguments.device)
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([arguments.program, arguments.checkpoint, arguments.audio, arguments.device, arguments.dtype, folder], check=True)
        ours = {stage: np.load(f"{folder}/{stage}.npy") for stage in exact}
    distance = lambda a, b: float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b.astype(np.float64)))
    figures, failed = {}, False
    for stage in exact:
        theirs, mine = distance(peer[stage], exact[stage]), distance(ours[stage].reshape(exact[stage].shape), exact[stage])
        failed |= not mine <= LARGEST_RATIO * theirs
        figures[stage] = {"transformers": theirs, "tilewave": mine, "ratio": mine / theirs}
        print(f"{stage}: relative L2 from f32: transformers {theirs:.3e}, tilewave {mine:.3e}: {mine / theirs:.2f} of it")
    if arguments.json:
        device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
        record = {"dtype": arguments.dtype, "device": device, "torch": torch.__version__, "stages": figures}
        pathlib.Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
