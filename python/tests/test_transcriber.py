"""The bundled checkpoint on the bundled recordings."""

import errno
import pathlib
import wave

import numpy as np
import pytest

import tilewave

SILENCE = np.zeros(16000, np.float32)
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


def test_the_bundled_checkpoint_is_the_default():
    assert tilewave.Transcriber(device="cpu")(ASSETS / "samples/digits-1.wav").text == SPOKEN["digits-1.wav"]


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_other_sampling_rates(transcriber, rate):
    samples = samples_of("digits-1.wav")
    spectrum = np.fft.rfft(samples)
    count = round(len(samples) * rate / tilewave.transcriber.SAMPLE_RATE)  # by the spectrum: what the library did not do itself
    resampled = (np.fft.irfft(spectrum[: count // 2 + 1], count) * (count / len(samples))).astype(np.float32)
    transcript = transcriber(resampled, sampling_rate=rate)
    assert transcript.text == SPOKEN["digits-1.wav"]
    wanted = transcriber(samples)
    assert abs(transcript.segments[0].begin - wanted.segments[0].begin) < 0.05
    assert abs(transcript.segments[0].end - wanted.segments[0].end) < 0.05
    assert transcriber(np.zeros(0, np.float32), sampling_rate=rate).text == ""


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


def test_weights_in_fewer_bits():
    transcriber = tilewave.Transcriber(ASSETS / "digits", device="cpu", weights="int4:32:zeros")
    assert transcriber(ASSETS / "samples/digits-1.wav").text == SPOKEN["digits-1.wav"]


def test_progress():
    calls = []
    tilewave.Transcriber(ASSETS / "digits", dtype="f32", progress=lambda done, size: calls.append((done, size)))
    assert calls[-1][0] == calls[-1][1] > 1_000_000


@pytest.mark.parametrize(
    "call, error, part",
    [
        (lambda t: tilewave.Transcriber("/nonexistent"), FileNotFoundError, "/nonexistent"),
        (lambda t: tilewave.Transcriber("some/model"), FileNotFoundError, "hf download some/model"),
        (lambda t: tilewave.Transcriber(ASSETS), OSError, "assets"),
        (lambda t: tilewave.Transcriber(ASSETS / "digits", device="tpu"), ValueError, 'device is "tpu"'),
        (lambda t: tilewave.Transcriber(ASSETS / "digits", device="cpu\0"), ValueError, "device has a NUL character at byte 3"),
        (lambda t: tilewave.Transcriber(ASSETS / "digits", dtype="f32\0x"), ValueError, "dtype has a NUL"),
        (lambda t: tilewave.Transcriber(ASSETS / "digits", weights="int3"), ValueError, 'weights are "int3"; allowed: plain, int8'),
        (lambda t: tilewave.Transcriber(ASSETS / "digits", dtype=None), TypeError, "dtype is a NoneType"),
        (lambda t: tilewave.Transcriber(f"{ASSETS}/digits\0/x"), ValueError, "directory has a NUL"),
        (lambda t: tilewave.Transcriber("model.gguf"), ValueError, "mmproj is missing"),
        (lambda t: tilewave.Transcriber(ASSETS / "digits", mmproj="m.gguf"), ValueError, "mmproj is m.gguf, but .*digits is a directory"),
        (lambda t: tilewave.Transcriber("model.gguf", mmproj="a\0"), ValueError, "mmproj has a NUL"),
        (lambda t: t("/nonexistent.wav"), FileNotFoundError, "/nonexistent.wav"),
        (lambda t: t(f"{ASSETS}/samples/digits-1.wav\0.txt"), ValueError, "audio has a NUL"),
        (lambda t: t(SILENCE, prompt="a\0b"), ValueError, "prompt has a NUL character at byte 1"),
        (lambda t: t(SILENCE, prompt=b"a"), TypeError, "prompt is a bytes"),
        (lambda t: t(SILENCE, max_new_tokens=(1 << 32) + 1), ValueError, "max_new_tokens is 4294967297; allowed: 1 to 1048576"),
        (lambda t: t(SILENCE, max_new_tokens=0), ValueError, "max_new_tokens is 0"),
        (lambda t: t(SILENCE, max_new_tokens=1.5), TypeError, "max_new_tokens is 1.5; allowed: an integer"),
        (lambda t: t(SILENCE, batch=0), ValueError, "batch is 0; allowed: 1 to 16"),
        (lambda t: t(SILENCE, batch=(1 << 32) + 8), ValueError, "batch is 4294967304"),
        (lambda t: t(SILENCE, seed=-1), ValueError, "seed is -1"),
        (lambda t: t(SILENCE, seed=1 << 64), ValueError, "seed is 18446744073709551616"),
        (lambda t: t(SILENCE, top_p=0), ValueError, "top_p is 0.0"),
        (lambda t: t(SILENCE, temperature=-1), ValueError, "temperature is -1"),
        (lambda t: t(SILENCE, sampling_rate=0), ValueError, "sampling_rate is 0; allowed: 1000 to 768000"),
        (lambda t: t(SILENCE, sampling_rate=(1 << 32) + 16000), ValueError, "sampling_rate is 4294983296"),
        (lambda t: t(SILENCE * np.nan, sampling_rate=8000), ValueError, "sample 0 is nan"),
        (lambda t: t(ASSETS / "samples/digits-1.wav", sampling_rate=8000), ValueError, "audio is a file, which has its own"),
        (lambda t: t([0.0]), TypeError, "audio is a list"),
        (lambda t: t(np.zeros(16000)), ValueError, "audio is float64"),
        (lambda t: t(np.zeros((2, 16000), np.float32)), ValueError, r"float32\[2, 16000\]"),
    ],
)
def test_bad_input(transcriber, call, error, part):
    with pytest.raises(error, match=part):
        call(transcriber)


def test_a_missing_file_is_named(transcriber):
    with pytest.raises(FileNotFoundError) as raised:
        transcriber("/nonexistent.wav")
    assert raised.value.errno == errno.ENOENT and raised.value.filename == "/nonexistent.wav"
    assert "No such file" in str(raised.value)
