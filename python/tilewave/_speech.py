"""The C interface of speech: structures, functions, and what Transcriber and Engine share."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from dataclasses import dataclass
from typing import Callable

import numpy as np

from . import _arrays, _library
from ._arrays import Array

SAMPLE_RATE = 16000  #: in Hz

PROGRESS = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
ON_TEXT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t)


class LoadOptions(_library.Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("progress", PROGRESS),
        ("user", ctypes.c_void_p),
        ("mmproj", ctypes.c_char_p),
        ("weights", ctypes.c_char_p),
    ]


class TranscribeOptions(_library.Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("segmentation", ctypes.c_int),
        ("prompt", ctypes.c_char_p),
        ("max_new_tokens", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("on_text", ON_TEXT),
        ("user", ctypes.c_void_p),
    ]


class SegmentInC(_library.Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("begin", ctypes.c_double),
        ("end", ctypes.c_double),
        ("text", ctypes.c_char_p),
        ("tokens", ctypes.POINTER(ctypes.c_int32)),
        ("token_count", ctypes.c_size_t),
        ("truncated", ctypes.c_int32),
        ("repetition", ctypes.c_int32),
    ]


class EngineOptions(_library.Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("batch", ctypes.c_int32),
        ("prefill_tokens", ctypes.c_int32),
        ("cache_tokens", ctypes.c_int64),
        ("queue", ctypes.c_size_t),
    ]


class Completion(_library.Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("error", ctypes.c_char_p),
        ("transcript", ctypes.c_void_p),
        ("waiting", ctypes.c_double),
        ("first_text", ctypes.c_double),
        ("total", ctypes.c_double),
    ]


class EngineCounters(_library.Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("waiting", ctypes.c_size_t),
        ("running", ctypes.c_size_t),
        ("sequences", ctypes.c_size_t),
        ("cache_tokens", ctypes.c_int64),
        ("cache_tokens_used", ctypes.c_int64),
    ]


ON_DONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(Completion))


@functools.cache
def library() -> ctypes.CDLL:
    """libtilewave_speech.so."""
    _library.library()  # it is linked with this one, which is searched for in the same places
    speech = _library.open_library("libtilewave_speech.so")
    handle, handle_out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    for name, result, arguments in (
        ("tw_last_error", ctypes.c_char_p, []),
        ("tw_transcriber_load", ctypes.c_int, [ctypes.c_char_p, ctypes.c_void_p, handle_out]),
        ("tw_transcriber_free", None, [handle]),
        ("tw_transcribe_file", ctypes.c_int, [handle, ctypes.c_char_p, ctypes.c_void_p, handle_out]),
        ("tw_transcribe_samples", ctypes.c_int, [handle, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, handle_out]),
        ("tw_audio_read_file", ctypes.c_int, [ctypes.c_char_p, handle_out]),
        ("tw_audio_read_bytes", ctypes.c_int, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, handle_out]),
        ("tw_audio_samples", ctypes.c_void_p, [handle]),
        ("tw_audio_sample_count", ctypes.c_size_t, [handle]),
        ("tw_audio_free", None, [handle]),
        ("tw_engine_load", ctypes.c_int, [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, handle_out]),
        ("tw_engine_free", None, [handle]),
        (
            "tw_engine_submit",
            ctypes.c_int,
            [handle, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint64, ON_DONE, ctypes.c_void_p, ctypes.c_void_p],
        ),
        ("tw_engine_cancel", ctypes.c_int, [handle, ctypes.c_uint64]),
        ("tw_engine_run", ctypes.c_int, [handle]),
        ("tw_engine_stop", ctypes.c_int, [handle]),
        ("tw_engine_read_counters", ctypes.c_int, [handle, ctypes.c_void_p]),
        ("tw_resample", ctypes.c_int, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p]),
        ("tw_transcript_free", None, [handle]),
        ("tw_transcript_text", ctypes.c_char_p, [handle]),
        ("tw_transcript_segment_count", ctypes.c_size_t, [handle]),
        ("tw_transcript_segment_at", ctypes.c_int, [handle, ctypes.c_size_t, ctypes.c_void_p]),
    ):
        function = getattr(speech, name)
        function.restype, function.argtypes = result, arguments
    return speech


@dataclass(frozen=True)
class Segment:
    """The text from `begin` to `end`, in seconds."""

    begin: float
    end: float
    text: str
    tokens: tuple[int, ...]
    truncated: bool  #: ended by max_new_tokens, not by the model
    repetition: bool  #: ended because the model repeated itself


@dataclass(frozen=True)
class Transcript:
    text: str  #: the texts of all segments, joined by spaces
    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        return self.text


def load_options(
    device: str,
    dtype: str,
    weights: str,
    progress: Callable[[int, int], None] | None,
    mmproj: str | os.PathLike[str] | None,
    raised: list[BaseException],
) -> LoadOptions:
    """`raised` gets the exceptions of `progress`."""

    def forward(_, done, size):
        try:
            progress(done, size)
        except BaseException as error:  # no exception passes through C
            raised.append(error)

    return LoadOptions(
        device=_arrays.text("device", device),
        dtype=_arrays.text("dtype", dtype),
        progress=PROGRESS(forward) if progress else PROGRESS(),
        mmproj=None if mmproj is None else path_bytes("mmproj", mmproj),
        weights=_arrays.text("weights", weights),
    )


def transcribe_options(
    segmentation: bool,
    prompt: str | None,
    max_new_tokens: int,
    batch: int,
    temperature: float,
    top_p: float,
    seed: int,
    on_text: Callable[[str], bool | None] | None,
    raised: list[BaseException],
) -> TranscribeOptions:
    """`batch` 0: an engine's. `raised` gets the exceptions of `on_text`."""
    temperature, top_p = float(temperature), float(top_p)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}; it must be greater than 0 and at most 1")

    def forward(_, text, size):
        try:
            return int(on_text(ctypes.string_at(text, size).decode()) is False)
        except BaseException as error:
            raised.append(error)
            return 1

    return TranscribeOptions(
        segmentation=0 if segmentation else 1,
        prompt=None if prompt is None else _arrays.text("prompt", prompt),
        max_new_tokens=_arrays.integer("max_new_tokens", max_new_tokens, 1, 1 << 20),
        batch=batch,
        temperature=temperature,
        top_p=top_p,
        seed=_arrays.integer("seed", seed, 0, (1 << 64) - 1),
        on_text=ON_TEXT(forward) if on_text else ON_TEXT(),
    )


def check(status: int, path: bytes | None = None) -> None:
    """Raises what `status` stands for. `path`: what the call was to read."""
    try:
        if status:
            _library.check(status, library())
    except OSError as error:
        if path is None or os.path.exists(path):
            raise
        raise FileNotFoundError(errno.ENOENT, str(error), os.fsdecode(path)) from None


def read_transcript(transcript) -> Transcript:
    """Frees the transcript."""
    speech = library()
    try:
        segments = []
        for index in range(speech.tw_transcript_segment_count(transcript)):
            s = SegmentInC()
            speech.tw_transcript_segment_at(transcript, index, ctypes.byref(s))
            tokens = tuple(s.tokens[: s.token_count])
            segments.append(Segment(s.begin, s.end, s.text.decode(), tokens, bool(s.truncated), bool(s.repetition)))
        return Transcript(speech.tw_transcript_text(transcript).decode(), tuple(segments))
    finally:
        speech.tw_transcript_free(transcript)


def path_bytes(name: str, given) -> bytes:
    return _arrays.without_nul(name, os.fsencode(given))


def read_audio(audio: str | os.PathLike[str] | bytes, *, name: str = "audio") -> np.ndarray:
    """The samples of a recording, float32 [n]: mono at 16000 Hz, in about [-1, 1]. `audio` is a file, or a file's bytes; messages of errors
    then begin with `name`. FileNotFoundError if there is no such file; OSError if it cannot be read or decoded."""
    speech, path, handle = library(), None, ctypes.c_void_p()
    if isinstance(audio, (bytes, bytearray, memoryview)):
        status = speech.tw_audio_read_bytes(bytes(audio), len(audio), _arrays.text("name", name), ctypes.byref(handle))
    else:
        path = path_bytes("audio", audio)
        status = speech.tw_audio_read_file(path, ctypes.byref(handle))
    check(status, path)
    try:
        samples = np.empty(speech.tw_audio_sample_count(handle), np.float32)
        ctypes.memmove(samples.ctypes.data, speech.tw_audio_samples(handle), samples.nbytes)
        return samples
    finally:
        speech.tw_audio_free(handle)


def is_file(audio) -> bool:
    """A file or a file's bytes, and not samples."""
    return isinstance(audio, (str, os.PathLike, bytes, bytearray, memoryview))


def samples_of(audio: Array, sampling_rate: int) -> np.ndarray:
    """At SAMPLE_RATE."""
    rate = _arrays.integer("sampling_rate", sampling_rate, 1000, 768000)
    samples = audio.detach().cpu().numpy() if _arrays.torch_of(audio) is not None else audio
    if not isinstance(samples, np.ndarray):
        raise TypeError(f"audio is a {type(audio).__name__}; allowed: a file name, a file's bytes, a NumPy array, a PyTorch tensor")
    if samples.dtype != np.float32 or samples.ndim != 1:
        raise ValueError(f"audio is {samples.dtype}{list(samples.shape)}; allowed: float32[n], mono")
    samples = np.ascontiguousarray(samples)
    if rate == SAMPLE_RATE:
        return samples
    count = ctypes.c_size_t(-(-samples.size * SAMPLE_RATE // rate))
    out = np.empty(count.value, np.float32)
    check(library().tw_resample(samples.ctypes.data, samples.size, rate, out.ctypes.data, ctypes.byref(count)))
    return out[: count.value]


def check_file_rate(sampling_rate: int) -> None:
    if sampling_rate != SAMPLE_RATE:
        raise ValueError(f"sampling_rate is {sampling_rate}, but audio is a file, which has its own")
