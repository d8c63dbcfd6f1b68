#!/usr/bin/env python3
"""Does length cost accuracy? Joins short clips into long recordings and compares their word error rate with that of the single clips.

    tools/long_recordings.py assets/samples --pause 0 0 --order given       # the bundled samples, one after the other, for ten minutes
    tools/long_recordings.py recordings --clips '*_[0-4].wav' --seeds 5     # the test set of the Free Spoken Digit Dataset

The folder holds WAV files of 16 bits and one channel, all of one rate. What they say is in transcripts.txt, a line "name<TAB>words" for
each, or else the first character of a file's name is a digit, as in that dataset. Needs Python alone, and build/tilewave.
"""

import argparse
import array
import fnmatch
import json
import pathlib
import random
import subprocess
import sys
import tempfile
import wave

DIGITS = "zero one two three four five six seven eight nine".split()
ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_clips(folder, pattern):
    """[(path, words)] in the order of transcripts.txt or of the names."""
    transcripts = folder / "transcripts.txt"
    if transcripts.exists():
        lines = [line.split("\t") for line in transcripts.read_text().splitlines()]
        clips = [(folder / name, words.split()) for name, words in lines]
    else:
        clips = [(path, [DIGITS[int(path.name[0])]]) for path in sorted(folder.glob("*.wav")) if path.name[0].isdigit()]
    clips = [clip for clip in clips if fnmatch.fnmatch(clip[0].name, pattern)]
    if not clips:
        sys.exit(f"{folder}: no clips that match {pattern}")
    return clips


def read_wav(path):
    with wave.open(str(path)) as file:
        if file.getnchannels() != 1 or file.getsampwidth() != 2:
            sys.exit(f"{path}: {file.getnchannels()} channels of {8 * file.getsampwidth()} bits; needed is 1 of 16")
        return file.getframerate(), array.array("h", file.readframes(file.getnframes()))


def order_of(clips, generator):
    """Clips without end: all of them in one order, then in another."""
    while True:
        order = list(clips)
        if generator:
            generator.shuffle(order)
        yield from order


def build(path, clips, seconds, pauses, generator):
    """Writes clips with pauses between until they last that long; what they say."""
    words, samples, rate = [], array.array("h"), None
    # Pauses hold what a quiet room's microphone gives, not zeros: noise of one step of 16 bits.
    room = generator or random.Random(0)
    for clip, said in order_of(clips, generator):
        clip_rate, clip_samples = read_wav(clip)
        rate = rate or clip_rate
        if clip_rate != rate:
            sys.exit(f"{clip}: {clip_rate} Hz; those before have {rate}")
        samples.extend(clip_samples)
        words += said
        samples.extend(room.choice((-1, 0, 1)) for _ in range(round(room.uniform(*pauses) * rate)))
        if len(samples) >= seconds * rate:
            break
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return words


def word_errors(given, wanted):
    """Words to insert, remove or replace."""
    row = list(range(len(wanted) + 1))
    for i, word in enumerate(given):
        diagonal, row[0] = row[0], i + 1
        for j, other in enumerate(wanted):
            diagonal, row[j + 1] = row[j + 1], min(diagonal + (word != other), row[j] + 1, row[j + 1] + 1)
    return row[-1]


def transcribe(arguments, files):
    command = [arguments.tilewave, "transcribe", "--quiet", "--device", arguments.device, "--format", "json"]
    if arguments.weights:
        command += ["--weights", arguments.weights]
    if arguments.model:
        command += ["--model", arguments.model]
    done = subprocess.run(command + [str(file) for file in files], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--clips", default="*", help="pattern of the names to use")
    parser.add_argument("--minutes", type=float, default=10, help="of each recording")
    parser.add_argument("--pause", type=float, nargs=2, default=(0.2, 3), metavar=("FROM", "TO"), help="seconds between clips")
    parser.add_argument("--order", choices=("random", "given"), default="random")
    parser.add_argument("--seeds", type=int, default=3, help="recordings, each in an order of its own")
    parser.add_argument("--model", help="default: the bundled one")
    parser.add_argument("--weights", help="transcribe --weights: int8, fp8, int4 ...")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tilewave", default=str(ROOT / "build" / "tilewave"))
    parser.add_argument("--limit", type=float, help="exit code 1 if length costs more than so many per cent")
    arguments = parser.parse_args()

    clips = read_clips(arguments.folder, arguments.clips)
    results = transcribe(arguments, [path for path, _ in clips])
    errors = sum(word_errors(result["text"].split(), words) for result, (_, words) in zip(results, clips))
    count = sum(len(words) for _, words in clips)
    single = 100 * errors / count
    print(f"{len(clips)} clips, each alone: {errors} of {count} words wrong, {single:.2f} %")

    worst = 0
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(arguments.seeds if arguments.order == "random" else 1)
        paths = [pathlib.Path(folder) / f"{seed}.wav" for seed in seeds]
        said = [
            build(path, clips, 60 * arguments.minutes, arguments.pause, random.Random(seed) if arguments.order == "random" else None)
            for seed, path in zip(seeds, paths)
        ]
        for seed, result, words in zip(seeds, transcribe(arguments, paths), said):
            errors = word_errors(result["text"].split(), words)
            longest = max(segment["end"] - segment["begin"] for segment in result["segments"])
            rate = 100 * errors / len(words)
            worst = max(worst, rate - single)
            print(f"seed {seed}: {result['duration']:.0f} s in {len(result['segments'])} segments of at most {longest:.1f} s: "
                  f"{errors} of {len(words)} words wrong, {rate:.2f} %")
    if arguments.limit is not None and worst > arguments.limit:
        sys.exit(f"length costs {worst:.2f} %; allowed are {arguments.limit:g}")


if __name__ == "__main__":
    main()
