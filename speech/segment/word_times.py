#!/usr/bin/env python3
"""Times of words, compared with known cut points: README.md, "Times of words".

    python3 speech/segment/word_times.py RECORDINGS    # the Free Spoken Digit Dataset's folder recordings/; needs numpy

Joins recordings of the test set (index 0 to 4) to strings of five digits with pauses of 0.05 to 0.5 s, transcribes them with
`tilewave debug transcribe --dump`, and looks for each word in what the bundled checkpoint computed: by forced alignment on the encoder's
features, and by the decoder's attention.
"""

import argparse
import json
import pathlib
import random
import re
import struct
import subprocess
import tempfile
import wave

import numpy

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ROOT / "assets/digits"
NAMES = "zero one two three four five six seven eight nine".split()
RATE = 16000
WORDS = 5  # of a string
STEP = 0.08  # seconds of an embedding of audio
LAYERS, HEADS, KV_HEADS, HEAD_DIM, THETA = 4, 4, 2, 64, 10000.0  # of the decoder


def read_safetensors(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    tensors = {}
    for name, about in json.loads(data[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + size + offset for offset in about["data_offsets"])
        if about["dtype"] == "BF16":
            values = (numpy.frombuffer(data[begin:end], "<u2").astype(numpy.uint32) << 16).view(numpy.float32)
        else:
            values = numpy.frombuffer(data[begin:end], "<f4")
        tensors[name] = values.reshape(about["shape"])
    return tensors


def read_digit(path):
    with wave.open(str(path)) as file:
        rate, samples = file.getframerate(), numpy.frombuffer(file.readframes(file.getnframes()), "<i2").astype(float)
    at = numpy.arange(len(samples) * RATE // rate) * rate / RATE
    return numpy.interp(at, numpy.arange(len(samples)), samples) * 8000 / numpy.abs(samples).max()


def make_string(files, path, seed):
    """Writes a string, and returns (word, begin, end) of each digit."""
    chance = random.Random(seed)
    parts, cuts = [numpy.zeros(int(0.3 * RATE))], []
    for file in chance.sample(files, WORDS):
        at, digit = sum(map(len, parts)) / RATE, read_digit(file)
        cuts.append((NAMES[int(file.name[0])], at, at + len(digit) / RATE))
        parts += [digit, numpy.zeros(int(chance.uniform(0.05, 0.5) * RATE))]
    samples = numpy.concatenate(parts)
    samples += numpy.random.default_rng(seed).normal(0, 8, len(samples))
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return cuts


def normalized(rows):
    rows = rows - rows.mean(0)
    return rows / numpy.linalg.norm(rows, axis=1, keepdims=True)


def aligned(scores, blank):
    """The best path through the words in order, with `blank` as the score of what is between them: (begin, end) of each, in seconds."""
    frames, words = scores.shape
    states = numpy.full((frames, 2 * words + 1), float(blank))
    states[:, 1::2] = scores
    best, back = numpy.full(states.shape, -numpy.inf), numpy.zeros(states.shape, int)
    best[0, :2] = states[0, :2]
    for t in range(1, frames):
        for s in range(states.shape[1]):
            from_states = [s, *([s - 1] if s > 0 else []), *([s - 2] if s > 1 and s % 2 else [])]
            back[t, s] = max(from_states, key=lambda before: best[t - 1, before])
            best[t, s] = best[t - 1, back[t, s]] + states[t, s]
    path = [states.shape[1] - 2 + int(best[-1, -1] > best[-1, -2])]
    for t in range(frames - 1, 0, -1):
        path.append(back[t, path[-1]])
    path = numpy.array(path[::-1])
    places = [numpy.flatnonzero(path == 2 * word + 1) for word in range(words)]
    return [(place[0] * STEP, (place[-1] + 1) * STEP) for place in places]


def rotated(heads, positions):
    angles = positions[:, None] / THETA ** (numpy.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = numpy.cos(angles)[:, None], numpy.sin(angles)[:, None]
    first, second = heads[..., : HEAD_DIM // 2], heads[..., HEAD_DIM // 2 :]
    return numpy.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def attention(stage, layer, first, count):
    """How much each word's query attends to each of `count` embeddings of audio from position `first`: the mean of the heads."""
    prompt = stage(f"prefill_0.layer_{layer}.qkv")
    positions, width = len(prompt), HEADS * HEAD_DIM
    keys = rotated(prompt[:, width : width + KV_HEADS * HEAD_DIM].reshape(positions, KV_HEADS, HEAD_DIM), numpy.arange(positions))
    queries = [prompt[-1:, :width], *(stage(f"decode_{word}.layer_{layer}.qkv")[:, :width] for word in range(WORDS - 1))]
    queries = rotated(numpy.concatenate(queries).reshape(WORDS, HEADS, HEAD_DIM), numpy.arange(positions - 1, positions - 1 + WORDS))
    scores = numpy.einsum("whd,phd->hwp", queries, keys.repeat(HEADS // KV_HEADS, axis=1)[first : first + count]) / HEAD_DIM**0.5
    weights = numpy.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).mean(0)


def middle_of(weights, share):
    """Where the middle `share` of each word's weights is, in seconds."""
    spans = []
    for row in weights:
        mass = numpy.concatenate([[0], row.cumsum()])
        spans.append(tuple(numpy.interp([0.5 - share / 2, 0.5 + share / 2], mass, numpy.arange(len(mass))) * STEP))
    return spans


def times_of(folder, tables):
    """The spans of the words by each method."""

    def stage(name):
        return next(iter(read_safetensors(folder / f"{name}.safetensors").values()))

    audio, prompt = stage("embed_0.audio"), stage("prefill_0.copy")
    tokens = [int(numpy.abs(tables["embeddings"] - stage(f"decode_{word}.embed")).sum(1).argmin()) for word in range(WORDS)]
    first = int(numpy.abs(prompt - audio[0]).sum(1).argmin())
    result = {}
    for name, table in tables.items():
        similar = normalized(audio) @ normalized(table)[tokens].T
        for blank in (0, 0.1, 0.2):
            result[f"features and {name}, blank {blank}"] = aligned(similar, blank)
    for layer in range(LAYERS):
        result[f"attention of layer {layer}"] = middle_of(attention(stage, layer, first, len(audio)), 0.9)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=pathlib.Path)
    parser.add_argument("--program", default=ROOT / "build/tilewave", type=pathlib.Path)
    parser.add_argument("--strings", type=int, default=24)
    options = parser.parse_args()
    files = [file for file in sorted(options.recordings.glob("*.wav")) if re.search(r"_[0-4]\.wav$", file.name)]
    speakers = sorted({file.name.split("_")[1] for file in files})
    weights = read_safetensors(MODEL / "model.safetensors")
    tables = {
        "embeddings": weights["language_model.model.model.embed_tokens.weight"],
        "head": weights["language_model.lm_head.weight"],
    }
    errors, used = {}, 0
    for number in range(options.strings):
        speaker = speakers[number % len(speakers)]
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            cuts = make_string([file for file in files if f"_{speaker}_" in file.name], folder / "string.wav", number)
            command = [options.program, "debug", "transcribe", "--device", "cpu", "--dump", folder / "dump", "--dump-steps", str(WORDS + 1)]
            said = subprocess.run([*command, folder / "string.wav"], check=True, capture_output=True, text=True).stdout
            if f"Transcription: {' '.join(word for word, _, _ in cuts)}\n" not in said:
                continue
            used += 1
            for method, spans in times_of(folder / "dump", tables).items():
                errors.setdefault(method, []).extend((span[0] - cut[1], span[1] - cut[2]) for span, cut in zip(spans, cuts))
    print(f"{used} of {options.strings} strings without a wrong word\n")
    print("| | start: median error, within 0.2 s | end |\n|---|---|---|")
    for method, pairs in errors.items():
        cells = [f"{numpy.median(e):.2f} s, {100 * (numpy.abs(e) <= 0.2).mean():.0f} %" for e in numpy.array(pairs).T]
        print(f"| {method} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
