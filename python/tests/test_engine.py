"""Many requests at a time, on the bundled checkpoint and recordings."""

import concurrent.futures
import gc
import pathlib
import subprocess
import sys
import threading

import numpy as np
import pytest

import tilewave

ASSETS = pathlib.Path(__file__).resolve().parents[2] / "assets"
SPOKEN = dict(line.split(None, 1) for line in (ASSETS / "samples/transcripts.txt").read_text().splitlines())
FIRST = ASSETS / "samples/digits-1.wav"


@pytest.fixture(scope="module")
def engine():
    with tilewave.Engine(ASSETS / "digits", device="cpu") as engine:
        yield engine


def test_many_requests(engine):
    files = [name for name in SPOKEN for _ in range(3)]
    futures = [engine.submit((ASSETS / "samples" / name).read_bytes(), client=i % 2) for i, name in enumerate(files)]
    assert [future.result().text for future in futures] == [SPOKEN[name] for name in files]
    assert engine(FIRST) == tilewave.Transcriber(ASSETS / "digits", device="cpu")(FIRST)
    counters = engine.counters()
    assert (counters.waiting, counters.sequences) == (0, 0)


def test_text_as_it_is_produced(engine):
    pieces = []
    assert engine(FIRST, on_text=pieces.append).text == "".join(pieces) == SPOKEN["digits-1.wav"]


def test_an_exception_in_a_callback_arrives(engine):
    def fails(text):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine(FIRST, on_text=fails)


def test_cancellation(engine):
    # The engine's thread waits in the first request's callback, so that nothing of the second one is processed.
    reached, free = threading.Event(), threading.Event()

    def waits(text):
        reached.set()
        free.wait(10)

    first = engine.submit(FIRST, on_text=waits)
    assert reached.wait(10)
    pieces = []
    second = engine.submit(FIRST, on_text=pieces.append)
    assert second.cancel()
    free.set()
    assert first.result().text == SPOKEN["digits-1.wav"]
    with pytest.raises(concurrent.futures.CancelledError):
        second.result()
    assert engine(FIRST).text == SPOKEN["digits-1.wav"]
    assert pieces == []
    with pytest.raises(tilewave.Cancelled):
        engine(FIRST, on_text=lambda text: False)


def test_callbacks_may_submit_but_not_wait(engine):
    results, ended = [], threading.Event()

    def then(done):
        try:
            engine(FIRST)
        except RuntimeError as error:
            results.append(str(error))
        engine.submit(FIRST).add_done_callback(lambda done: (results.append(done.result().text), ended.set()))

    # A callback added before the request ends runs on the engine's thread.
    reached = threading.Event()
    future = engine.submit(FIRST, on_text=lambda text: reached.wait(10) and None)
    future.add_done_callback(then)
    reached.set()
    assert ended.wait(20)
    assert results == ["the engine's thread would wait for itself; use submit() in callbacks", SPOKEN["digits-1.wav"]]


def test_a_full_queue():
    with tilewave.Engine(ASSETS / "digits", device="cpu", queue=2) as engine:
        reached, free = threading.Event(), threading.Event()
        futures = [engine.submit(FIRST, on_text=lambda text: (reached.set(), free.wait(10)) and None)]
        assert reached.wait(10)
        with pytest.raises(tilewave.QueueFull, match="2 requests wait"):
            for _ in range(3):  # the first one still counts during its step
                futures.append(engine.submit(FIRST))
        free.set()
        assert len(futures) in (2, 3)
        assert [future.result().text for future in futures] == [SPOKEN["digits-1.wav"]] * len(futures)


def test_the_end():
    engine = tilewave.Engine(ASSETS / "digits", device="cpu")
    thread = engine._thread
    reached, free = threading.Event(), threading.Event()
    first = engine.submit(FIRST, on_text=lambda text: (reached.set(), free.wait(10)) and None)
    assert reached.wait(10)
    second = engine.submit(FIRST)
    closing = threading.Thread(target=engine.close)
    closing.start()
    free.set()
    closing.join()
    assert not thread.is_alive()
    for future in (first, second):
        assert future.done() and isinstance(future.exception(), (tilewave.Cancelled, type(None)))
    assert isinstance(second.exception(), tilewave.Cancelled)
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.submit(FIRST)
    engine.close()

    engine = tilewave.Engine(ASSETS / "digits", device="cpu")
    thread = engine._thread
    del engine
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_program_may_end_without_closing():
    code = (
        f"import tilewave; engine = tilewave.Engine({str(ASSETS / 'digits')!r}, device='cpu'); engine.submit({str(FIRST)!r}); print('end')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


@pytest.mark.parametrize(
    "call, error, part",
    [
        (lambda e: tilewave.Engine("/nonexistent"), FileNotFoundError, "/nonexistent"),
        (lambda e: tilewave.Engine(ASSETS / "digits", batch=257), ValueError, "batch is 257; allowed: 0 to 256"),
        (lambda e: tilewave.Engine(ASSETS / "digits", device="cpu", batch=17), ValueError, "batch"),
        (lambda e: tilewave.Engine(ASSETS / "digits", queue=0), ValueError, "queue is 0"),
        (lambda e: e.submit("/nonexistent.wav"), FileNotFoundError, "/nonexistent.wav"),
        (lambda e: e.submit(b"not audio"), OSError, "^audio: "),
        (lambda e: e.submit(np.zeros(4)), ValueError, "audio is float64"),
        (lambda e: e.submit(np.full(16000, np.nan, np.float32)), ValueError, "nan"),
        (lambda e: e.submit(FIRST, max_new_tokens=0), ValueError, "max_new_tokens is 0"),
        (lambda e: e.submit(FIRST, client=-1), ValueError, "client is -1"),
        (lambda e: tilewave.read_audio("/nonexistent.wav"), FileNotFoundError, "/nonexistent.wav"),
        (lambda e: tilewave.read_audio(b"", name="upload"), OSError, "^upload: "),
        (lambda e: tilewave.set_cpu_threads(0), ValueError, "threads is 0; allowed: 1 to 1024"),
        (lambda e: tilewave.set_cpu_threads(1.5), TypeError, "threads is 1.5"),
    ],
)
def test_bad_input(engine, call, error, part):
    with pytest.raises(error, match=part):
        call(engine)


def test_bytes_and_samples_are_the_same_audio():
    samples = tilewave.read_audio(FIRST)
    assert samples.dtype == np.float32 and samples.ndim == 1 and len(samples) > 16000
    assert (tilewave.read_audio(FIRST.read_bytes()) == samples).all()
    assert tilewave.Transcriber(device="cpu")(memoryview(FIRST.read_bytes())).text == SPOKEN["digits-1.wav"]
