#!/usr/bin/env python3
"""Trains the network of the voice activity detector and writes its weights: speech/segment/README.md.

    tools/train_vad.py recordings/*_[1-4][0-9].wav recordings/*_[5-9].wav     # the training set of the Free Spoken Digit Dataset

Speech is made of the recordings, at other speeds and so other pitches, whole or cut into pieces of 50 to 200 ms that are joined in any
order, so that words are not learnt. What is no speech: silence and noise of many kinds, crowds, music, hum, clicks. Needs NumPy and PyTorch;
takes some minutes.
"""

import argparse
import pathlib

import numpy as np
import torch

from vad_noise import RATE, close_gaps, read_wav

STEP, WINDOW, FFT, BANDS, FIRST, AHEAD, HIDDEN = 160, 400, 512, 20, 30, 5, 32
LOWEST, HIGHEST = 120, 6500  # Hz
QUIETEST = -90  # dB
OUTPUT = pathlib.Path(__file__).resolve().parent.parent / "speech/segment/vad_weights.hpp"


def band_edges():
    mel = np.linspace(np.log1p(LOWEST / 700), np.log1p(HIGHEST / 700), BANDS + 1)
    edges = np.rint(np.expm1(mel) * 700 * FFT / RATE).astype(int)
    for b in range(BANDS):
        edges[b + 1] = max(edges[b + 1], edges[b] + 1)
    return edges


def features(audio):
    """[recordings, samples] to [recordings, steps, 2 * BANDS + 1]: what SpeechLikelihood::observe computes."""
    steps = audio.shape[1] // STEP
    before = (WINDOW - STEP) // 2
    padded = np.pad(audio, ((0, 0), (before, WINDOW)))
    window = 0.5 - 0.5 * np.cos(2 * np.pi * (np.arange(WINDOW) + 0.5) / WINDOW)
    edges = band_edges()
    x = np.empty((len(audio), steps, BANDS), np.float32)
    for t in range(steps):
        frame = padded[:, t * STEP : t * STEP + WINDOW]
        present = WINDOW - (before if t == 0 else 0)
        power = np.abs(np.fft.rfft((frame - frame.sum(1, keepdims=True) / present) * window, FFT)) ** 2
        for b in range(BANDS):
            x[:, t, b] = power[:, edges[b] : edges[b + 1]].mean(1) / (0.375 * WINDOW)
    x = np.maximum(10 * np.log10(np.maximum(x, 1e-20)), QUIETEST)
    floor, mean = x[:, :FIRST].min(1), x[:, :FIRST].mean(1)
    peak = np.full(len(audio), QUIETEST, np.float32)
    result = np.empty((len(audio), steps, 2 * BANDS + 1), np.float32)
    for t in range(steps):
        now = x[:, t]
        floor += np.where(now < floor, 0.1 * (now - floor), np.minimum(now - floor, 0.03))
        mean += 0.01 * (now - mean)
        level = now.max(1)
        peak = np.maximum(peak - 0.02, level)
        result[:, t, :BANDS] = (now - floor) / 10
        result[:, t, BANDS : 2 * BANDS] = (now - mean) / 10
        result[:, t, -1] = (level - peak) / 10
    return result


def faster(clip, factor):
    return np.interp(np.arange(0, len(clip) - 1, factor), np.arange(len(clip)), clip)


def active(clip):
    steps = len(clip) // STEP
    power = (clip[: steps * STEP].reshape(steps, STEP) ** 2).mean(1)
    power = np.convolve(power, np.ones(3) / 3, "same")
    return close_gaps(power > max(power.max() * 10**-3, 1e-9), 10)


def trim(clip):
    on = np.flatnonzero(active(clip))
    return clip[on[0] * STEP : (on[-1] + 1) * STEP] if len(on) else clip


def sentence(clips, random):
    """A few words of one speaker; half of the time none that exist."""
    factor = np.exp(random.uniform(np.log(0.7), np.log(1.45)))
    speaker = clips[random.integers(len(clips))]
    words = []
    for _ in range(random.integers(1, 9)):
        word = faster(trim(speaker[random.integers(len(speaker))]), factor)
        word = word / (np.abs(word).max() + 1e-9) * random.uniform(0.3, 1)
        words.append(word)
    if random.random() < 0.5:
        pieces = []
        for word in words:
            at = 0
            while at < len(word):
                length = int(random.uniform(0.05, 0.2) * RATE)
                piece = word[at : at + length].copy()
                ramp = min(80, len(piece) // 2)
                if ramp:
                    piece[:ramp] *= np.linspace(0, 1, ramp)
                    piece[-ramp:] *= np.linspace(1, 0, ramp)
                pieces.append(piece)
                at += length
        random.shuffle(pieces)
        words = pieces
        longest = 0.05
    else:
        longest = random.choice((0.02, 0.1, 0.25))
    out = []
    for word in words:
        out += [word, np.zeros(int(random.uniform(0, longest) * RATE))]
    return np.concatenate(out)


def coloured(length, slope, random):
    spectrum = np.fft.rfft(random.standard_normal(length))
    frequency = np.maximum(np.arange(len(spectrum)), length * 20 / RATE)
    noise = np.fft.irfft(spectrum * frequency ** (-slope / 2), length)
    return noise / noise.std()


def crowd(length, clips, random):
    noise = np.zeros(length)
    for _ in range(random.integers(5, 16)):
        at = -int(random.uniform(0, RATE))
        gain = random.uniform(0.5, 1)
        while at < length:
            voice = sentence(clips, random)
            if random.random() < 0.7:
                voice = voice[::-1]
            voice = gain * voice / (voice.std() + 1e-9)
            begin, end = max(at, 0), min(at + len(voice), length)
            if end > begin:
                noise[begin:end] += voice[begin - at : end - at]
            at += len(voice) + int(random.uniform(0, 0.3) * RATE)
    return noise


def tune(length, random):
    """Notes of some instruments, with or without drums."""
    noise = np.zeros(length + 4 * RATE)
    beat = 60 / random.uniform(60, 180)
    overtones, fall = random.integers(1, 14), random.uniform(0.3, 1.5)
    decay, attack = random.uniform(0.3, 6), random.uniform(0.003, 0.1)
    vibrato = random.choice((0, 0, 0.003, 0.01))
    drums, bass, chords = random.random() < 0.6, random.random() < 0.6, random.random() < 0.7
    key = random.uniform(110, 440)

    def note(at, hertz, seconds, gain):
        time = np.arange(int(seconds * RATE)) / RATE
        phase = 2 * np.pi * hertz * (time + vibrato * np.sin(2 * np.pi * 5 * time) / 5)
        sound = sum(np.sin(k * phase + random.uniform(0, 6)) / k**fall for k in range(1, overtones + 1) if k * hertz < 7500)
        sound = sound * np.minimum(time / attack, 1) * np.exp(-decay * time / seconds) * np.minimum((seconds - time) / 0.02, 1)
        begin = int(at * RATE)
        noise[begin : begin + len(sound)] += gain * sound[: len(noise) - begin]

    at, index, root = 0.0, 0, 0
    while at * RATE < length:
        if index % 4 == 0:
            root = random.choice((0, 2, 3, 5, 7, 8, 9))
        for step in (0, random.choice((3, 4)), 7) if chords and index % 2 == 0 else (random.choice((0, 2, 4, 5, 7, 9, 11, 12)),):
            if random.random() < 0.85:
                note(at, key * 2 ** ((root + step) / 12), beat * random.choice((0.5, 1, 2)), 0.5)
        if bass:
            note(at, key / 4 * 2 ** (root / 12), beat, 1)
        if drums:
            for place in (0, 0.5):
                hit = random.standard_normal(RATE // 8) * np.exp(-np.arange(RATE // 8) / (random.uniform(0.005, 0.04) * RATE))
                begin = int((at + place * beat) * RATE)
                noise[begin : begin + len(hit)] += random.uniform(0.2, 1) * hit[: len(noise) - begin]
        at += beat
        index += 1
    return noise[:length]


def clatter(length, random):
    """Clicks, knocks and beeps."""
    noise = np.zeros(length + RATE)
    for _ in range(random.integers(3, 40)):
        at, size = random.integers(length), int(np.exp(random.uniform(np.log(0.002), np.log(0.4))) * RATE)
        kind = random.random()
        if kind < 0.6:
            hit = random.standard_normal(size) * np.exp(-4 * np.arange(size) / size)
        else:
            hit = np.sin(2 * np.pi * random.uniform(200, 4000) * np.arange(size) / RATE)
        noise[at : at + size] += random.uniform(0.1, 1) * hit
    return noise[:length]


def noise_of(length, clips, random):
    """At a mean power of 1."""
    kind = random.choice(["coloured", "modulated", "crowd", "crowd", "music", "music", "music", "clatter", "hum"])
    if kind in ("coloured", "modulated"):
        noise = coloured(length, random.uniform(-0.5, 2), random)
        if kind == "modulated":
            points = np.arange(0, length + RATE, RATE // 2)
            noise = noise * np.interp(np.arange(length), points, random.uniform(0.05, 1, len(points)))
    elif kind == "crowd":
        noise = crowd(length, clips, random)
    elif kind == "music":
        noise = tune(length, random)
    elif kind == "clatter":
        noise = clatter(length, random)
    else:
        time = np.arange(length) / RATE
        hertz = random.choice((50, 60, 100, 120))
        noise = sum(random.uniform(0, 1) / k * np.sin(2 * np.pi * hertz * k * time) for k in range(1, 20)) + 0.1 * coloured(length, 1, random)
    return noise / (noise.std() + 1e-9)


def speech_of(length, clips, random):
    """Sentences with pauses, at a mean power of 1, and which steps they are in."""
    speech, said = np.zeros(length), np.zeros(length // STEP, bool)
    at = 0 if random.random() < 0.3 else int(random.uniform(0, 4) * RATE)
    while at < length - RATE // 4:
        words = sentence(clips, random) * np.exp(random.uniform(np.log(0.4), 0))
        at = at // STEP * STEP
        words = words[: (length - at) // STEP * STEP]
        words = words[: len(words) // STEP * STEP]
        if len(words) < 5 * STEP:
            break
        speech[at : at + len(words)] += words
        on = active(words)
        said[at // STEP : at // STEP + len(on)] |= on
        at += len(words) + int(random.choice((random.uniform(0.2, 0.6), random.uniform(0.5, 6))) * RATE)
    if random.random() < 0.5:  # another microphone, another room
        echo = random.standard_normal(RATE // 10) * np.exp(-np.arange(RATE // 10) / (0.02 * RATE)) * random.uniform(0, 0.05)
        speech = np.fft.irfft(np.fft.rfft(speech, 2 * length) * np.fft.rfft(np.concatenate([[1.0], echo]), 2 * length))[:length]
    if random.random() < 0.5:
        speech = speech + random.uniform(-0.9, 0.5) * np.concatenate([[0], speech[:-1]])
    level = np.sqrt((speech**2).reshape(-1, STEP).mean(1)[said].mean()) if said.any() else 1
    return speech / level, said


def mix(speech, noises, random):
    """Samples, and which steps are speech."""
    mixed, said = speech[random.integers(len(speech))]
    if random.random() < 0.1:
        mixed, said = np.zeros_like(mixed), np.zeros_like(said)
    said = said.copy()
    length = len(mixed)
    noise = np.roll(noises[random.integers(len(noises))], random.integers(length))
    if random.random() < 0.3:
        noise = noise + random.uniform(0, 1) * np.roll(noises[random.integers(len(noises))], random.integers(length))
    if random.random() < 0.9:
        mixed = mixed + noise * 10 ** (-random.uniform(0, 30) / 20)
    if random.random() < 0.2:  # nothing at all for a while
        mixed = mixed.copy()
        begin = random.integers(length)
        end = begin + int(random.uniform(0.3, 4) * RATE)
        mixed[begin:end] = 0
        said[begin // STEP : end // STEP + 1] = False
    mixed = mixed * 10 ** (random.uniform(-55, -15) / 20)
    mixed = mixed + 10 ** (random.uniform(-110, -75) / 20) * random.standard_normal(length)
    return np.clip(mixed, -1, 1).astype(np.float32), said


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(2 * BANDS + 1, HIDDEN, batch_first=True)
        self.out = torch.nn.Linear(HIDDEN, 1)

    def forward(self, x):
        return self.out(self.gru(x)[0])[..., 0]


def write_weights(network):
    """Rows of 8-bit integers, each with its scale."""
    lines = ["#pragma once", "", "#include <cstdint>", "", "// Written by tools/train_vad.py.", "// clang-format off", "", "namespace tw::speech::vad_weights {", ""]
    lines += [f"inline constexpr int kInputs = {2 * BANDS + 1}, kHidden = {HIDDEN}, kAhead = {AHEAD};", ""]

    def matrix(name, values):
        scale = np.abs(values).max(1) / 127
        whole = np.rint(values / scale[:, None]).astype(int)
        lines.append(f"inline constexpr float {name}Scale[{len(scale)}] = {{{', '.join(f'{s:.6g}F' for s in scale)}}};")
        lines.append(f"inline constexpr std::int8_t {name}[{values.shape[0]}][{values.shape[1]}] = {{")
        lines.extend("    {" + ", ".join(map(str, row)) + "}," for row in whole)
        lines.append("};")

    def vector(name, values):
        lines.append(f"inline constexpr float {name}[{len(values)}] = {{{', '.join(f'{v:.6g}F' for v in values)}}};")

    state = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    lines.append("// Rows: reset, update and new gate, as in PyTorch's GRU.")
    matrix("kInput", state["gru.weight_ih_l0"])
    matrix("kRecurrent", state["gru.weight_hh_l0"])
    vector("kInputBias", state["gru.bias_ih_l0"])
    vector("kRecurrentBias", state["gru.bias_hh_l0"])
    vector("kOutput", state["out.weight"][0])
    lines.append(f"inline constexpr float kOutputBias = {state['out.bias'][0]:.6g}F;")
    lines += ["", "}  // namespace tw::speech::vad_weights", ""]
    OUTPUT.write_text("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", nargs="+", type=pathlib.Path)
    parser.add_argument("--count", type=int, default=640, help="recordings of 20 s to make (640)")
    parser.add_argument("--steps", type=int, default=800, help="of the optimizer (800)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cache", type=pathlib.Path, help="file to keep the features in")
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    torch.manual_seed(arguments.seed)
    if arguments.cache and arguments.cache.exists():
        stored = np.load(arguments.cache)
        x, y = stored["x"], stored["y"]
    else:
        speakers = {}
        for path in arguments.recordings:
            speakers.setdefault(path.stem.split("_")[1], []).append(read_wav(path))
        clips = list(speakers.values())
        x, y = [], []
        speech = [speech_of(20 * RATE, clips, random) for _ in range(arguments.count // 8)]
        noises = [noise_of(20 * RATE, clips, random) for _ in range(arguments.count // 3)]
        print("mixing", flush=True)
        for _ in range(0, arguments.count, 40):
            made = [mix(speech, noises, random) for _ in range(40)]
            x.append(features(np.stack([audio for audio, _ in made])).astype(np.float16))
            y.append(np.stack([said for _, said in made]))
            print(f"{40 * len(x)} of {arguments.count} recordings", flush=True)
        x, y = np.concatenate(x), np.concatenate(y)
        if arguments.cache:
            np.savez(arguments.cache, x=x, y=y)
    print(f"{len(x) * 20} s, {y.mean():.0%} of it speech", flush=True)
    network = Network()
    optimizer = torch.optim.AdamW(network.parameters(), 4e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=arguments.steps)
    held = len(x) // 20
    x, y = torch.from_numpy(x), torch.from_numpy(y.astype(np.float32))
    for step in range(arguments.steps):
        index = torch.randint(held, len(x), (64,))
        begin = 0 if step % 2 else int(torch.randint(0, 1700, ()))
        output = network(x[index, begin : begin + 300].float())[:, AHEAD:]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(output, y[index, begin : begin + 300][:, : output.shape[1]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1)
        optimizer.step()
        schedule.step()
        if step % 100 == 99:
            with torch.no_grad():
                output = network(x[:held].float())[:, AHEAD:] > 0
                wanted = y[:held, : output.shape[1]] > 0.5
                f1 = 2 * (output & wanted).sum() / (output.sum() + wanted.sum())
            print(f"{step + 1}: loss {loss:.4f}, F1 of recordings held out {f1:.4f}", flush=True)
            write_weights(network)
    write_weights(network)


if __name__ == "__main__":
    main()
