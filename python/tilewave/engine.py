"""Speech to text for many requests at a time, which share a model by continuous batching."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import itertools
import os
import threading
import weakref
from dataclasses import dataclass
from typing import Callable

from . import _arrays, _library, _speech
from ._arrays import Array
from ._speech import SAMPLE_RATE, Transcript


@dataclass(frozen=True)
class EngineCounters:
    waiting: int  #: requests of which nothing was processed yet
    running: int  #: other requests
    sequences: int  #: segments in the decoding batch
    cache_tokens: int  #: that the key-value cache holds
    cache_tokens_used: int


class _Pending:
    """A request that has not ended."""

    def __init__(self, future, options, raised):
        self.future, self.options, self.raised = future, options, raised  # the options hold the callback for C


class _Shared:
    """What the thread of an engine needs. It does not hold the Engine, which ends the thread when nothing refers to it any more."""

    def __init__(self, handle):
        self.handle = handle
        self.pending: dict[int, _Pending] = {}
        self.failure: BaseException | None = None
        self.changed = threading.Condition()
        self.open, self.users = True, 0
        self.on_done = _speech.ON_DONE(self._done)

    def _done(self, key, completion):
        c = completion.contents
        request = self.pending.pop(key)
        if not request.future.set_running_or_notify_cancel():
            if c.transcript:
                _speech.library().tw_transcript_free(c.transcript)
            return
        if request.raised:
            request.future.set_exception(request.raised[0])
        elif c.status:
            error = _library.exception(c.status, c.error.decode())
            request.future.set_exception(self.failure if self.failure and isinstance(error, _library.Cancelled) else error)
        else:
            request.future.set_result(_speech.read_transcript(ctypes.c_void_p(c.transcript)))

    @contextlib.contextmanager
    def in_use(self):
        """The engine is not freed meanwhile."""
        with self.changed:
            if not self.open:
                raise RuntimeError(f"the engine has failed: {self.failure}" if self.failure else "the engine is closed")
            self.users += 1
        try:
            yield
        finally:
            with self.changed:
                self.users -= 1
                self.changed.notify_all()

    def cancel(self, identifier):
        with contextlib.suppress(RuntimeError), self.in_use():
            _speech.library().tw_engine_cancel(self.handle, identifier)

    def run(self):
        speech = _speech.library()
        try:
            _speech.check(speech.tw_engine_run(self.handle))
        except Exception as error:
            self.failure = error
        with self.changed:
            self.open = False
            self.changed.wait_for(lambda: self.users == 0)
        speech.tw_engine_free(self.handle)


def _close(shared: _Shared, thread: threading.Thread) -> None:
    with shared.changed:
        if shared.open:
            _speech.library().tw_engine_stop(shared.handle)
    if threading.current_thread() is not thread:
        thread.join()


class Engine:
    """A loaded checkpoint for many requests at a time: their windows are encoded together, and their sequences join and leave the decoding
    batch at every step. A thread of its own does the work.

        with tilewave.Engine("glm-asr-nano") as engine:
            futures = [engine.submit(file) for file in files]
            texts = [future.result().text for future in futures]

    Arguments are those of Transcriber, and: batch, sequences that are decoded together, 1 to 16 on the CPU and to 256 on a GPU (0: 16, or
    64 on a GPU); cache_tokens, what the key-value cache holds (0: 1024 for each of batch); queue, requests that may wait.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        weights: str = "plain",
        progress: Callable[[int, int], None] | None = None,
        mmproj: str | os.PathLike[str] | None = None,
        batch: int = 0,
        cache_tokens: int = 0,
        queue: int = 256,
    ):
        raised: list[BaseException] = []
        load = _speech.load_options(device, dtype, weights, progress, mmproj, raised)
        options = _speech.EngineOptions(
            batch=_arrays.integer("batch", batch, 0, 256),
            cache_tokens=_arrays.integer("cache_tokens", cache_tokens, 0, (1 << 63) - 1),
            queue=_arrays.integer("queue", queue, 1, (1 << 63) - 1),
        )
        path = _speech.path_bytes("directory", _library.bundled_model() if directory is None else directory)
        handle = ctypes.c_void_p()
        speech = _speech.library()
        status = speech.tw_engine_load(path, ctypes.byref(load), ctypes.byref(options), ctypes.byref(handle))
        if raised:
            if handle:
                speech.tw_engine_free(handle)
            raise raised[0]
        _speech.check(status, path)
        self._shared = _Shared(handle)
        self._keys = itertools.count(1)
        self._thread = threading.Thread(target=self._shared.run, name="tilewave-engine", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _close, self._shared, self._thread)  # also at the interpreter's exit

    def submit(
        self,
        audio: str | os.PathLike[str] | bytes | Array,
        *,
        sampling_rate: int = SAMPLE_RATE,
        segmentation: bool = True,
        prompt: str | None = None,
        max_new_tokens: int = 500,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        on_text: Callable[[str], bool | None] | None = None,
        client: int = 0,
    ) -> concurrent.futures.Future[Transcript]:
        """Queues a request. Arguments are those of Transcriber's call, and client: clients get equal shares of the work.

        Decodes and segments the audio first, on the caller's thread; what is wrong with it or with the arguments is raised here, and so
        is tilewave.QueueFull. The future has the Transcript; its cancel() frees the request's place. on_text and callbacks of the future are
        called by the engine's thread: they may submit, but must not wait for the engine.
        """
        raised: list[BaseException] = []
        options = _speech.transcribe_options(segmentation, prompt, max_new_tokens, 0, temperature, top_p, seed, on_text, raised)
        client = _arrays.integer("client", client, 0, (1 << 64) - 1)
        if _speech.is_file(audio):
            _speech.check_file_rate(sampling_rate)
            samples = _speech.read_audio(audio)
        else:
            samples = _speech.samples_of(audio, sampling_rate)
        future: concurrent.futures.Future[Transcript] = concurrent.futures.Future()
        shared, key, identifier = self._shared, next(self._keys), ctypes.c_uint64()
        with shared.in_use():
            shared.pending[key] = _Pending(future, options, raised)
            status = _speech.library().tw_engine_submit(
                shared.handle,
                samples.ctypes.data,
                samples.size,
                ctypes.byref(options),
                client,
                shared.on_done,
                key,
                ctypes.byref(identifier),
            )
            if status:
                del shared.pending[key]
                _speech.check(status)
        future.add_done_callback(lambda done: shared.cancel(identifier) if done.cancelled() else None)
        return future

    def __call__(self, audio: str | os.PathLike[str] | bytes | Array, **options) -> Transcript:
        """submit(audio, ...).result()"""
        if threading.current_thread() is self._thread:
            raise RuntimeError("the engine's thread would wait for itself; use submit() in callbacks")
        return self.submit(audio, **options).result()

    @property
    def failure(self) -> BaseException | None:
        """Why the engine has ended by itself; None if it has not."""
        return self._shared.failure

    def counters(self) -> EngineCounters:
        c = _speech.EngineCounters()
        with self._shared.in_use():
            _speech.check(_speech.library().tw_engine_read_counters(self._shared.handle, ctypes.byref(c)))
        return EngineCounters(c.waiting, c.running, c.sequences, c.cache_tokens, c.cache_tokens_used)

    def close(self) -> None:
        """Ends the engine. Requests that have not ended get tilewave.Cancelled."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()
