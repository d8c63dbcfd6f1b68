"""Composes strings of digits from single recordings: the test sets. The same seed gives the same samples.

    python generate.py --clips clips.npz --set unseen --output DIR      # digits-1.wav, digits-2.wav, ... and transcripts.txt

Sets: `unseen`, FSDD's test recordings of its speakers; `synthetic`, the synthetic voices that are not trained on; a speaker's name, all recordings of
this speaker; `silence`, no speech. A string has 1 to 12 digits of one voice with pauses of 0.05 to 1 s, up to 2 s without speech before and after
it, 30 s at most, a level of -20 to -1 dB; every second one has noise 15 to 40 dB below the speech.
"""

import argparse
from pathlib import Path

import numpy as np

from clips import RATE, WORDS, Clips

WINDOW = 30 * RATE


def coloured_noise(length, rng):
    """Noise whose power falls with frequency as f^-a, a in 0..2 (white to brown), of root mean square 1."""
    spectrum = np.fft.rfft(rng.standard_normal(length))
    frequency = np.maximum(np.arange(len(spectrum)), 20 * length / RATE)
    noise = np.fft.irfft(spectrum * frequency ** (-rng.uniform(0, 2) / 2), length)
    return noise / np.sqrt(np.mean(noise**2))


def compose(clips, rng):
    """One string from `clips` (at least one digit each): float32 samples at 16 kHz of PCM16's values, and its text."""
    voices = sorted(set(clips.voices))
    voice = voices[rng.integers(len(voices))]
    own = [i for i, v in enumerate(clips.voices) if v == voice]
    wanted = rng.integers(1, 13)
    parts, text, total = [np.zeros(int(rng.uniform(0, 2) * RATE))], [], 0
    while len(text) < wanted:
        i = own[rng.integers(len(own))]
        pause = np.zeros(int(rng.uniform(0.05, 1) * RATE))
        total += len(clips.samples[i]) + len(pause)
        if len(text) + len(clips.digits[i]) > 12 or total > WINDOW - 4 * RATE:
            break
        parts += [clips.samples[i] * 10 ** (rng.uniform(-3, 3) / 20), pause]
        text += [WORDS[d] for d in clips.digits[i]]
    parts[-1] = np.zeros(int(rng.uniform(0, 2) * RATE))
    samples = np.concatenate(parts)
    if rng.random() < 0.5:
        speech = np.sqrt(np.mean(np.concatenate(parts[1:-1:2]) ** 2))
        samples = samples + coloured_noise(len(samples), rng) * speech * 10 ** (-rng.uniform(15, 40) / 20)
    samples = samples / np.abs(samples).max() * 10 ** (-rng.uniform(1, 20) / 20)
    return pcm(samples), " ".join(text)


def no_speech(rng):
    """Silence or noise of 0.2 to 30 s, and the empty text."""
    samples = np.zeros(int(rng.uniform(0.2, 30) * RATE))
    if rng.random() < 0.75:
        samples = np.clip(coloured_noise(len(samples), rng) * 10 ** (-rng.uniform(15, 70) / 20), -1, 1)
    return pcm(samples), ""


def pcm(samples):
    return (np.round(np.clip(samples, -1, 32767 / 32768) * 32768) / 32768).astype(np.float32)


def test_set(clips, name, count, seed):
    """A list of (samples, text)."""
    if name == "silence":
        return [no_speech(np.random.default_rng([seed, i])) for i in range(count)]
    if name == "unseen":
        chosen = clips.select(clips.test & ~clips.synthetic)
    elif name == "synthetic":
        chosen = clips.select(clips.test & clips.synthetic)
    else:
        chosen = clips.select(np.array([voice == name for voice in clips.voices]))
    if not chosen.samples:
        raise SystemExit(f"--set {name}: no such recordings")
    return [compose(chosen, np.random.default_rng([seed, i])) for i in range(count)]


def main():
    import soundfile  # training and evaluation compose strings, too, and write no files

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clips", type=Path, required=True)
    parser.add_argument("--set", required=True)
    parser.add_argument("--strings", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--format", choices=["wav", "flac"], default="wav")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    lines = []
    for i, (samples, text) in enumerate(test_set(Clips.load(args.clips), args.set, args.strings, args.seed), 1):
        name = f"digits-{i}.{args.format}"
        soundfile.write(args.output / name, samples, RATE, subtype="PCM_16")
        lines.append(f"{name}\t{text}\n")
    (args.output / "transcripts.txt").write_text("".join(lines))


if __name__ == "__main__":
    main()
