#!/usr/bin/env python3
"""How well is speech found in noise? Precision and recall of `tilewave vad` in each 10 ms, by voice activity and by level.

    tools/vad_noise.py                                        # the bundled recordings
    tools/vad_noise.py recordings/*_[0-4].wav --clips 200     # of these, 200 at random

Clean recordings are joined with pauses of 1 to 3 s. Where they have speech is read off their level: within 30 dB of the recording's
loudest, pauses below 0.3 s included. Then noise is added, 20, 10 and 5 dB below the mean power of the speech:

- white, pink (power falls by 3 dB per octave)
- babble: 12 voices at once without pauses, all from the same recordings, each played backwards
- music: chords of three decaying notes with overtones, a bass and a drum

Both detectors run without margins, so that what is measured is their decisions. Needs NumPy and build/tilewave.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import wave

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
RATE = 16000
STEP = RATE // 100
SNRS = (20, 10, 5)


def read_wav(path):
    with wave.open(str(path)) as file:
        rate = file.getframerate()
        if file.getnchannels() != 1 or file.getsampwidth() != 2 or RATE % rate != 0:
            sys.exit(f"{path}: needed is a channel of 16 bits at a rate that divides {RATE}")
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    spectrum = np.fft.rfft(samples)
    length = len(samples) * RATE // rate
    return np.fft.irfft(spectrum, length) * RATE / rate


def write_wav(path, samples):
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes())


def close_gaps(active, shortest):
    """Fills runs of fewer than `shortest` inactive steps between active ones."""
    steps = np.flatnonzero(active)
    for before, after in zip(steps, steps[1:]):
        if after - before - 1 < shortest:
            active[before:after] = True
    return active


def speech_steps(clip):
    steps = len(clip) // STEP
    power = (clip[: steps * STEP].reshape(steps, STEP) ** 2).mean(1)
    power = np.convolve(power, np.ones(3) / 3, "same")
    return close_gaps(power > power.max() * 10 ** (-30 / 10), 30)


def join(clips, random):
    """Clean audio, whole steps, and which of them are speech."""
    audio, speech = [], []
    for clip in clips:
        clip = clip[: len(clip) // STEP * STEP]
        clip = clip * (0.1 / np.sqrt((clip**2).max()) * random.uniform(1, 3))
        pause = int(random.uniform(100, 300))
        audio += [np.zeros(pause * STEP), clip]
        speech += [np.zeros(pause, bool), speech_steps(clip)]
    audio.append(np.zeros(150 * STEP))
    speech.append(np.zeros(150, bool))
    return np.concatenate(audio), np.concatenate(speech)


def white(length, clips, random):
    return random.standard_normal(length)


def pink(length, clips, random):
    spectrum = np.fft.rfft(random.standard_normal(length))
    return np.fft.irfft(spectrum / np.sqrt(np.maximum(np.arange(len(spectrum)), length * 20 / RATE)), length)


def babble(length, clips, random):
    clips = [clip[: len(clip) // STEP * STEP].reshape(-1, STEP)[speech_steps(clip)].reshape(-1) for clip in clips]
    noise = np.zeros(length)
    for _ in range(12):
        at = -int(random.uniform(0, RATE))
        while at < length:
            clip = clips[random.integers(len(clips))][::-1]
            clip = clip / np.sqrt((clip**2).mean())
            begin, end = max(at, 0), min(at + len(clip), length)
            if end > begin:
                noise[begin:end] += clip[begin - at : end - at]
            at += len(clip)
    return noise


def music(length, clips, random):
    noise = np.zeros(length + 2 * RATE)

    def add(at, sound):
        noise[at : at + len(sound)] += sound[: len(noise) - at]

    def note(hertz, seconds, overtones):
        time = np.arange(int(seconds * RATE)) / RATE
        sound = sum(np.sin(2 * np.pi * hertz * k * time + random.uniform(0, 6)) / k for k in range(1, overtones + 1) if hertz * k < 7000)
        return sound * np.minimum(time / 0.01, 1) * np.exp(-3 * time / seconds)

    beat = RATE // 2  # 120 beats a minute
    roots = (0, 9, 5, 7)
    for index, at in enumerate(range(0, length, beat)):
        root = 220 * 2 ** (roots[index // 4 % 4] / 12)
        for step in (0, 4, 7) if index % 2 == 0 else (random.choice((0, 4, 7, 12, 16)),):
            add(at, 0.5 * note(root * 2 ** (step / 12), 1.0, 8))
        add(at, note(root / 4, 0.5, 4))
        drum = random.standard_normal(RATE // 10) * np.exp(-np.arange(RATE // 10) / (0.02 * RATE))
        add(at if index % 2 else at + beat // 2, 0.7 * drum)
    return noise[:length]


NOISES = {"white": white, "pink": pink, "babble": babble, "music": music}


def found_steps(tilewave, arguments, paths, steps):
    run = subprocess.run([str(tilewave), "vad", "--json", *arguments, *map(str, paths)], capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(run.stderr)
    for line in run.stdout.splitlines():
        found = np.zeros(steps, bool)
        for span in json.loads(line)["spans"]:
            found[round(span["begin"] * 100) : round(span["end"] * 100)] = True
        yield close_gaps(found, 30)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="*", type=pathlib.Path, help="WAV files; default: assets/samples")
    parser.add_argument("--clips", type=int, default=24, help="how many of them, drawn with repetition (24)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tilewave", default=ROOT / "build/tilewave")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the recordings that are made")
    arguments = parser.parse_args()
    paths = arguments.recordings or sorted((ROOT / "assets/samples").glob("*.wav"))
    random = np.random.default_rng(arguments.seed)
    clips = [read_wav(path) for path in paths]
    clean, speech = join([clips[i] for i in random.integers(len(clips), size=arguments.clips)], random)
    level = np.sqrt((clean.reshape(-1, STEP) ** 2).mean(1)[speech].mean())
    detectors = {
        "voice": ["--by", "voice", "--prefix", "0", "--suffix", "0", "--silence", "0.3"],
        "level": ["--by", "level", "--prefix", "0", "--suffix", "0", "--silence", "0.3"],
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or pathlib.Path(temporary)
        folder.mkdir(exist_ok=True)
        cases = [("none", None)] + [(name, snr) for name in NOISES for snr in SNRS]
        files = []
        for name, snr in cases:
            mixed = clean + 1e-4 * random.standard_normal(len(clean))
            if snr is not None:
                noise = NOISES[name](len(clean), clips, random)
                mixed = mixed + noise * (level * 10 ** (-snr / 20) / np.sqrt((noise**2).mean()))
            files.append(folder / f"{name}-{snr}.wav")
            write_wav(files[-1], mixed)
        results = {name: found_steps(arguments.tilewave, options, files, len(speech)) for name, options in detectors.items()}
        print(f"{len(speech) / 100:.0f} s, {speech.mean():.0%} of it speech. Precision / recall / F1, in percent:\n")
        print("| noise | dB | " + " | ".join(results) + " |")
        print("|---|---|" + "---|" * len(results))
        for name, snr in cases:
            cells = []
            for found in results.values():
                steps = next(found)
                both = np.sum(steps & speech)
                precision, recall = both / max(np.sum(steps), 1), both / np.sum(speech)
                cells.append(f"{100 * precision:.1f} / {100 * recall:.1f} / {200 * both / (np.sum(steps) + np.sum(speech)):.1f}")
            print(f"| {name} | {snr if snr is not None else ''} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
