"""Collects the recordings into one file, clips.npz, that training and evaluation read.

    python clips.py --fsdd DIR --synthetic DIR --output clips.npz

FSDD's files are {digit}_{speaker}_{index}.wav; index 0 to 4 is its test set, as its authors define it. The synthetic ones are what
synthesize.py wrote.
"""

import argparse
import lzma
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import scipy.io.wavfile
import scipy.signal

RATE = 16000
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
FSDD_TEST = range(5)


@dataclass
class Clips:
    """Recordings of one voice each. A clip's samples are float32 at 16 kHz in [-1, 1]."""

    samples: list  # of arrays
    digits: list  # of tuples: the digits spoken, one for most clips
    voices: list  # of names, as "george" or "espeak_f3-0"
    test: np.ndarray  # bool: never trained on

    def select(self, keep):
        indices = np.flatnonzero(keep)
        return Clips([self.samples[i] for i in indices], [self.digits[i] for i in indices], [self.voices[i] for i in indices], self.test[indices])

    @property
    def synthetic(self):
        return np.array([is_synthetic(voice) for voice in self.voices])

    @staticmethod
    def load(path):
        data = np.load(path)
        # A WAV's samples as differences, high and low bytes apart, are half as large once packed.
        planes = np.frombuffer(lzma.decompress(data["packed"].tobytes()), np.uint8).reshape(2, -1)
        pcm = np.cumsum((planes[0].astype(np.uint16) << 8) | planes[1], dtype=np.uint16).view(np.int16)
        bounds = np.concatenate([[0], np.cumsum(data["lengths"])])
        samples = []
        for begin, end, rate in zip(bounds[:-1], bounds[1:], data["rates"]):
            clip = pcm[begin:end].astype(np.float32) / 32768
            samples.append(clip if rate == RATE else scipy.signal.resample_poly(clip, RATE // rate, 1).astype(np.float32))
        digits = [tuple(int(c) for c in text) for text in data["digits"]]
        return Clips(samples, digits, [str(v) for v in data["voices"]], data["test"])


def is_synthetic(voice):
    return voice.startswith(("espeak_", "flite_"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fsdd", type=Path, required=True, help="folder with FSDD's recordings")
    parser.add_argument("--synthetic", type=Path, required=True, help="what synthesize.py wrote")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()

    files = []
    for path in sorted(args.fsdd.glob("*.wav")):
        digit, voice, index = path.stem.split("_")
        files.append((path, digit, voice, int(index) in FSDD_TEST))
    for path in sorted(args.synthetic.glob("*/*/*.wav")):
        files.append((path, path.stem.split("_")[0], path.parent.name, path.parent.parent.name == "test"))
    rates, clips = zip(*[scipy.io.wavfile.read(path) for path, *_ in files])
    for (path, *_), rate, clip in zip(files, rates, clips):
        if clip.dtype != np.int16 or clip.ndim != 1 or rate not in (8000, 16000):
            raise SystemExit(f"{path}: mono PCM16 at 8 or 16 kHz expected")
    differences = np.diff(np.concatenate(clips).view(np.uint16), prepend=np.uint16(0))
    planes = np.stack([differences >> 8, differences & 255]).astype(np.uint8)
    packed = lzma.compress(planes.tobytes(), preset=6)
    np.savez(
        args.output, packed=np.frombuffer(packed, np.uint8), lengths=[len(c) for c in clips], rates=rates, digits=[f[1] for f in files],
        voices=[f[2] for f in files], test=np.array([f[3] for f in files]),
    )
    print(f"{args.output}: {len(files)} clips, {sum(len(c) / r for c, r in zip(clips, rates)) / 60:.0f} minutes, {len(packed) / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
