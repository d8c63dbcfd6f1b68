#!/usr/bin/env python3
"""Writes tests/data/mel/golden.json: some frames of what transformers' WhisperFeatureExtractor makes of signals that speech/mel/mel_test.cpp makes, too.

    pip install torch transformers numpy
    tools/goldens/mel.py tests/data/mel/golden.json

Signals are sequences of 16-bit integers from integer arithmetic alone, so that both sides have the same to the bit.
"""

import json
import sys

import numpy
from transformers import WhisperFeatureExtractor

FRAMES = [0, 1, 2, 17, 99, 100, 101, 299, 301, 1500, 2998, 2999]


def noise(count):
    """The high half of a 32-bit linear congruential generator."""
    state, values = 1, numpy.empty(count, numpy.int64)
    for i in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        values[i] = (state >> 16) - 32768
    return values


def signals():
    i = numpy.arange(480000)
    triangle = numpy.abs(i % 36 - 18) * 3000 - 27000
    return {
        "noise": noise(480000),
        "short noise": noise(48000),
        "a few samples": noise(100),
        "silence": numpy.zeros(480000, numpy.int64),
        "faint noise": noise(480000) // 16384,
        "triangle": triangle,
        "clicks": (i % 7001 == 0) * 32767,
        "noise after silence": numpy.where(i < 160000, 0, noise(480000) // 8),
        "second window": noise(500000)[480000:],
    }


def features(extractor, samples):
    out = extractor(samples, sampling_rate=16000, return_attention_mask=True, return_tensors="np")
    return out["input_features"][0].T, int(out["attention_mask"][0].sum())


def main():
    extractor = WhisperFeatureExtractor(feature_size=128)
    cases = []
    for name, values in signals().items():
        mel, real = features(extractor, (values / 32768).astype(numpy.float32))
        cases.append({"name": name, "real_frames": real, "values": [[round(float(x), 5) for x in mel[frame]] for frame in FRAMES]})
    with open(sys.argv[1], "w") as file:
        json.dump({"frames": FRAMES, "cases": cases}, file, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
