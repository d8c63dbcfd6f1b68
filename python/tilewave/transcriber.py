"""Speech to text: GLM-ASR checkpoints, from audio files or samples."""

from __future__ import annotations

import ctypes
import os
from typing import Callable

from . import _arrays, _library, _speech
from ._arrays import Array
from ._speech import SAMPLE_RATE as SAMPLE_RATE
from ._speech import Segment as Segment
from ._speech import Transcript as Transcript


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
        options = _speech.load_options(device, dtype, weights, progress, mmproj, raised)
        path = _speech.path_bytes("directory", _library.bundled_model() if directory is None else directory)
        self._speech = _speech.library()
        status = self._speech.tw_transcriber_load(path, ctypes.byref(options), ctypes.byref(self._handle))
        if raised:
            raise raised[0]
        _speech.check(status, path)

    def __del__(self):
        if getattr(self, "_handle", None):
            self._speech.tw_transcriber_free(self._handle)

    def __call__(
        self,
        audio: str | os.PathLike[str] | bytes | Array,
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
        """The text of a file (WAV, FLAC, OGG, Opus, MP3), of a file's bytes, or of samples: float32 [n], mono.

        sampling_rate: of samples, in Hz; other rates than 16000 are resampled. A file has its own. segmentation: cut long audio at
        silences; otherwise it is one segment. max_new_tokens: per segment, 1 to 1048576. batch: segments that are decoded together, 1 to
        16. temperature: 0 is greedy; otherwise top_p, above 0 and up to 1, and seed, 0 to 2^64 - 1, apply. on_text(text): called with text
        as it is produced; return False to stop with tilewave.Cancelled. FileNotFoundError if there is no such file; OSError if it cannot be
        read.
        """
        raised: list[BaseException] = []
        batch = _arrays.integer("batch", batch, 1, 16)
        options = _speech.transcribe_options(segmentation, prompt, max_new_tokens, batch, temperature, top_p, seed, on_text, raised)
        if _speech.is_file(audio):
            _speech.check_file_rate(sampling_rate)
            samples = _speech.read_audio(audio)
        else:
            samples = _speech.samples_of(audio, sampling_rate)
        transcript = ctypes.c_void_p()
        status = self._speech.tw_transcribe_samples(
            self._handle, samples.ctypes.data, samples.size, ctypes.byref(options), ctypes.byref(transcript)
        )
        if raised:
            raise raised[0]
        _speech.check(status)
        return _speech.read_transcript(transcript)
