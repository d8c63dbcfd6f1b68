"""Speech to text: GLM-ASR checkpoints, from audio files or samples."""

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

_PROGRESS = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
_ON_TEXT = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t)


class _LoadOptions(_library.Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("device", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("progress", _PROGRESS),
        ("user", ctypes.c_void_p),
        ("mmproj", ctypes.c_char_p),
        ("weights", ctypes.c_char_p),
    ]


class _TranscribeOptions(_library.Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("segmentation", ctypes.c_int),
        ("prompt", ctypes.c_char_p),
        ("max_new_tokens", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("temperature", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("on_text", _ON_TEXT),
        ("user", ctypes.c_void_p),
    ]


class _Segment(_library.Options):
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


@functools.cache
def _speech() -> ctypes.CDLL:
    _library.library()  # it is linked with this one, which is searched for in the same places
    speech = _library.open_library("libtilewave_speech.so")
    handle, handle_out = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    for name, result, arguments in (
        ("tw_last_error", ctypes.c_char_p, []),
        ("tw_transcriber_load", ctypes.c_int, [ctypes.c_char_p, ctypes.c_void_p, handle_out]),
        ("tw_transcriber_free", None, [handle]),
        ("tw_transcribe_file", ctypes.c_int, [handle, ctypes.c_char_p, ctypes.c_void_p, handle_out]),
        ("tw_transcribe_samples", ctypes.c_int, [handle, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, handle_out]),
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


class Transcriber:
    """A loaded checkpoint. Several threads may use it; one call runs at a time.

        transcriber = tilewave.Transcriber("glm-asr-nano")
        print(transcriber("talk.flac"))

    directory: of a GLM-ASR checkpoint as published; None: the bundled one, which knows only spoken English digits. A model in GGUF
    files: the language model's file, and in mmproj the audio encoder's. device: "auto", "cpu", "cuda" or "cuda:1"; dtype: "auto",
    "f32", "bf16" or "f16"; weights: "int8", "fp8", "int4", "int4:128" or "int4:32:zeros" round the weights of linear layers,
    "plain" leaves them as the checkpoint has them. progress(done, all): called with the bytes of weights read and the total.
    FileNotFoundError if there is no such directory; OSError if it is not a checkpoint, or damaged.
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
    ):
        self._handle = ctypes.c_void_p()
        raised: list[BaseException] = []

        def forward(_, done, size):
            try:
                progress(done, size)
            except BaseException as error:  # no exception passes through C
                raised.append(error)

        options = _LoadOptions(
            device=_arrays.text("device", device),
            dtype=_arrays.text("dtype", dtype),
            progress=_PROGRESS(forward) if progress else _PROGRESS(),
            mmproj=None if mmproj is None else _path("mmproj", mmproj),
            weights=_arrays.text("weights", weights),
        )
        path = _path("directory", _library.bundled_model() if directory is None else directory)
        self._speech = _speech()
        status = self._speech.tw_transcriber_load(path, ctypes.byref(options), ctypes.byref(self._handle))
        if raised:
            raise raised[0]
        self._check(status, path)

    def __del__(self):
        if getattr(self, "_handle", None):
            self._speech.tw_transcriber_free(self._handle)

    def __call__(
        self,
        audio: str | os.PathLike[str] | Array,
        *,
        sampling_rate: int = SAMPLE_RATE,
        segmentation: bool = True,
        prompt: str | None = None,
        max_new_tokens: int = 500,
        batch: int = 8,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        on_text: Callable[[str], bool | None] | None = None,
    ) -> Transcript:
        """The text of a file (WAV, FLAC, OGG, Opus, MP3), or of samples: float32 [n], mono.

        sampling_rate: of samples, in Hz; other rates than 16000 are resampled. A file has its own. segmentation: cut long audio at
        silences; otherwise it is one segment. max_new_tokens: per segment, 1 to 1048576. batch: segments that are decoded together, 1 to
        16. temperature: 0 is greedy; otherwise top_p, above 0 and up to 1, and seed, 0 to 2^64 - 1, apply. on_text(text): called with text
        as it is produced; return False to stop with tilewave.Cancelled. FileNotFoundError if there is no such file; OSError if it cannot be
        read.
        """
        is_file = isinstance(audio, (str, os.PathLike))
        if is_file and sampling_rate != SAMPLE_RATE:
            raise ValueError(f"sampling_rate is {sampling_rate}, but audio is a file, which has its own")
        sampling_rate = _arrays.integer("sampling_rate", sampling_rate, 1000, 768000)
        temperature, top_p = float(temperature), float(top_p)
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}; it must be greater than 0 and at most 1")
        raised: list[BaseException] = []

        def forward(_, text, size):
            try:
                return int(on_text(ctypes.string_at(text, size).decode()) is False)
            except BaseException as error:
                raised.append(error)
                return 1

        options = _TranscribeOptions(
            segmentation=0 if segmentation else 1,
            prompt=None if prompt is None else _arrays.text("prompt", prompt),
            max_new_tokens=_arrays.integer("max_new_tokens", max_new_tokens, 1, 1 << 20),
            batch=_arrays.integer("batch", batch, 1, 16),
            temperature=temperature,
            top_p=top_p,
            seed=_arrays.integer("seed", seed, 0, (1 << 64) - 1),
            on_text=_ON_TEXT(forward) if on_text else _ON_TEXT(),
        )
        transcript = ctypes.c_void_p()
        result = ctypes.byref(transcript)
        path = None
        if is_file:
            path = _path("audio", audio)
            status = self._speech.tw_transcribe_file(self._handle, path, ctypes.byref(options), result)
        else:
            samples = self._resampled(_samples(audio), sampling_rate)
            status = self._speech.tw_transcribe_samples(self._handle, samples.ctypes.data, samples.size, ctypes.byref(options), result)
        if raised:
            raise raised[0]
        self._check(status, path)
        try:
            return self._read(transcript)
        finally:
            self._speech.tw_transcript_free(transcript)

    def _check(self, status: int, path: bytes | None = None) -> None:
        """Raises what `status` stands for. `path`: what the call was to read."""
        try:
            if status:
                _library.check(status, self._speech)
        except OSError as error:
            if path is None or os.path.exists(path):
                raise
            raise FileNotFoundError(errno.ENOENT, str(error), os.fsdecode(path)) from None

    def _resampled(self, samples: np.ndarray, rate: int) -> np.ndarray:
        """At SAMPLE_RATE."""
        if rate == SAMPLE_RATE:
            return samples
        count = ctypes.c_size_t(-(-samples.size * SAMPLE_RATE // rate))
        out = np.empty(count.value, np.float32)
        self._check(self._speech.tw_resample(samples.ctypes.data, samples.size, rate, out.ctypes.data, ctypes.byref(count)))
        return out[: count.value]

    def _read(self, transcript) -> Transcript:
        segments = []
        for index in range(self._speech.tw_transcript_segment_count(transcript)):
            s = _Segment()
            self._speech.tw_transcript_segment_at(transcript, index, ctypes.byref(s))
            tokens = tuple(s.tokens[: s.token_count])
            segments.append(Segment(s.begin, s.end, s.text.decode(), tokens, bool(s.truncated), bool(s.repetition)))
        return Transcript(self._speech.tw_transcript_text(transcript).decode(), tuple(segments))


def _path(name: str, given) -> bytes:
    return _arrays.without_nul(name, os.fsencode(given))


def _samples(audio: Array) -> np.ndarray:
    samples = audio.detach().cpu().numpy() if _arrays.torch_of(audio) is not None else audio
    if not isinstance(samples, np.ndarray):
        raise TypeError(f"audio is a {type(audio).__name__}; allowed: a file name, a NumPy array, a PyTorch tensor")
    if samples.dtype != np.float32 or samples.ndim != 1:
        raise ValueError(f"audio is {samples.dtype}{list(samples.shape)}; allowed: float32[n], mono")
    return np.ascontiguousarray(samples)
