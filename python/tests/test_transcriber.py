"""The bundled checkpoint on the bundled recordings."""

import pathlib
import wave

import numpy as np
import pytest

import tilewave

ASSETS = pathlib.Path(__file__).resolve().parents[2] / "assets"
SPOKEN = dict(line.split(None, 1) for line in (ASSETS / "samples/transcripts.txt").read_text().splitlines())


@pytest.fixture(scope="module")
def transcriber():
    return tilewave.Transcriber(ASSETS / "digits", device="cpu")


def samples_of(name):
    with wave.open(str(ASSETS / "samples" / name)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


@pytest.mark.parametrize("name", SPOKEN)
def test_recordings(transcriber, name):
    pieces = []
    transcript = transcriber(ASSETS / "samples" / name, on_text=pieces.append)
    assert transcript.text == str(transcript) == SPOKEN[name] == "".join(pieces).strip()
    samples = samples_of(name)
    assert transcriber(samples) == transcript
    (segment,) = transcript.segments
    assert segment.text == transcript.text and 0 <= segment.begin < segment.end <= len(samples) / tilewave.transcriber.SAMPLE_RATE
    assert segment.tokens and not segment.truncated and not segment.repetition


def test_limits(transcriber):
    transcript = transcriber(ASSETS / "samples/digits-3.wav", max_new_tokens=2, segmentation=False)
    assert transcript.segments[0].truncated and len(transcript.segments[0].tokens) == 2
    with pytest.raises(tilewave.Cancelled):
        transcriber(ASSETS / "samples/digits-1.wav", on_text=lambda text: False)


def test_an_exception_in_a_callback_arrives(transcriber):
    def fails(*arguments):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        transcriber(ASSETS / "samples/digits-1.wav", on_text=fails)
    with pytest.raises(KeyError, match="mine"):
        tilewave.Transcriber(ASSETS / "digits", progress=fails)


def test_progress():
    calls = []
    tilewave.Transcriber(ASSETS / "digits", dtype="f32", progress=lambda done, size: calls.append((done, size)))
    assert calls[-1][0] == calls[-1][1] > 1_000_000


@pytest.mark.parametrize(
    "call, error, part",
    [
        (lambda t: tilewave.Transcriber("/nonexistent"), OSError, "/nonexistent"),
        (lambda t: tilewave.Transcriber(ASSETS / "digits", device="tpu"), ValueError, 'device is "tpu"'),
        (lambda t: t("/nonexistent.wav"), OSError, "/nonexistent.wav"),
        (lambda t: t([0.0]), TypeError, "audio is a list"),
        (lambda t: t(np.zeros(16000)), ValueError, "audio is float64"),
        (lambda t: t(np.zeros((2, 16000), np.float32)), ValueError, r"float32\[2, 16000\]"),
    ],
)
def test_bad_input(transcriber, call, error, part):
    with pytest.raises(error, match=part):
        call(transcriber)
