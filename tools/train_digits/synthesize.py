"""Speaks digits with the synthetic voices of espeak-ng and flite: WAV files, 16 kHz mono PCM16.

    python synthesize.py --output DIR

DIR/{train,test}/{voice}-{setting}/{digits}_{n}.wav, where `digits` are the digits spoken, as in 7.wav or 731.wav. A voice is in one of the two
folders only: the voices of `test` (each fifth espeak-ng variant by name, and flite's rms) are never trained on. Every setting of a voice has
its own accent, pitch and speed, drawn with a fixed seed. Needs the programs espeak-ng and flite.
"""

import argparse
import random
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import soundfile
import soxr

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
RATE = 16000
ACCENTS = ["en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-029", "en-gb-x-gbclan", "en-gb-x-gbcwmd", "en-us-nyc"]

# Variants that sound like a person. Left out: robots, announcers, whispers and effects, and variants that repeat another one's settings.
VARIANTS = """Alex Alicia Andrea Andy Annie Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario Michael Mike Nguyen Storm adam anika antonio
aunty belinda benjamin boris caleb david ed edward edward2 f1 f2 f3 f4 f5 grandma grandpa gustave iven iven2 iven3 iven4 john kaukovalta klatt
klatt2 klatt3 klatt4 klatt5 klatt6 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel norbert pablo paul pedro quincy rob robert sandro
shelby steph steph2 steph3 travis victor zac""".split()
TEST_VARIANTS = VARIANTS[2::5]
FLITE_TRAIN, FLITE_TEST = ["kal", "kal16", "awb", "slt"], ["rms"]
PHRASES = 2  # spoken as one, of 3 to 6 digits


def espeak(variant, rng):
    """The arguments of one setting: an accent, a pitch around the variant's own, a speed in words per minute."""
    return ["espeak-ng", "-v", f"{rng.choice(ACCENTS)}+{variant}", "-p", str(rng.randint(30, 70)), "-s", str(rng.randint(115, 210))]


def flite(voice, rng):
    stretch, pitch = f"duration_stretch={rng.uniform(0.75, 1.4):.2f}", f"int_f0_target_mean={rng.randint(80, 190)}"
    return ["flite", "-voice", voice, "--setf", stretch, "--setf", pitch]


def speak(command, text):
    """The samples that the command speaks, float32 at 16 kHz, silence at both ends removed."""
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        tail = ["-w", file.name, text] if command[0] == "espeak-ng" else ["-t", text, "-o", file.name]
        subprocess.run(command + tail, check=True, capture_output=True)
        samples, rate = soundfile.read(file.name, dtype="float32")
    if rate != RATE:
        samples = soxr.resample(samples, rate, RATE)
    loud = np.flatnonzero(np.abs(samples) > 0.01 * np.abs(samples).max())
    margin = RATE // 50
    return samples[max(loud[0] - margin, 0) : loud[-1] + margin]


def write(folder, command, rng):
    folder.mkdir(parents=True, exist_ok=True)
    strings = [[d] for d in range(10)] + [[rng.randrange(10) for _ in range(rng.randint(3, 6))] for _ in range(PHRASES)]
    for n, digits in enumerate(strings):
        samples = speak(command, " ".join(WORDS[d] for d in digits))
        samples = 0.7 * samples / np.abs(samples).max()
        soundfile.write(folder / f"{''.join(map(str, digits))}_{n}.wav", samples, RATE, subtype="PCM_16")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    rng = random.Random(4)
    for variant in VARIANTS:
        split, settings = ("test", 1) if variant in TEST_VARIANTS else ("train", 2)
        for setting in range(settings):
            write(args.output / split / f"espeak_{variant}-{setting}", espeak(variant, rng), rng)
    for voice in FLITE_TRAIN + FLITE_TEST:
        split = "test" if voice in FLITE_TEST else "train"
        for setting in range(2 if split == "test" else 8):
            write(args.output / split / f"flite_{voice}-{setting}", flite(voice, rng), rng)


if __name__ == "__main__":
    main()
