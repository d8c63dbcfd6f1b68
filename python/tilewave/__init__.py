"""Tilewave: attention, matrix products, norms and speech to text, on CPUs and NVIDIA GPUs. Nothing is compiled against NumPy or PyTorch.

    tilewave.ops.attention(q, k, v, causal=True)        the operations: NumPy, PyTorch, DLPack
    tilewave.flash_attn.flash_attn_func(q, k, v)        FlashAttention 2's functions; tilewave.flash_attn_interface has FlashAttention 3's
    tilewave.scaled_dot_product_attention(q, k, v)      PyTorch's function; install_sdpa() replaces it
    tilewave.nn.quantize_(model, "int4")                weights of 8, 4 or 2 bits in a model of PyTorch
    tilewave.Transcriber("glm-asr-nano")("talk.flac")   text
    tilewave.Engine("glm-asr-nano").submit("talk.flac") the same for many requests at a time; tilewave.ray for corpora on a cluster

PyTorch is imported only when a function needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._library import Cancelled, CompileError, DeviceError, QueueFull, set_cpu_threads, set_gpu_target
from ._version import __version__

if TYPE_CHECKING:  # __getattr__ imports these at first use
    from . import engine as engine
    from . import flash_attn as flash_attn
    from . import flash_attn_interface as flash_attn_interface
    from . import nn as nn
    from . import ops as ops
    from . import sdpa as sdpa
    from . import transcriber as transcriber
    from ._arrays import check_contents as check_contents
    from ._speech import read_audio as read_audio
    from .engine import Engine as Engine
    from .sdpa import install_sdpa as install_sdpa
    from .sdpa import register_transformers as register_transformers
    from .sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from .sdpa import sdpa_counts as sdpa_counts
    from .sdpa import uninstall_sdpa as uninstall_sdpa
    from .sdpa import why_fallback as why_fallback
    from .transcriber import Transcriber as Transcriber

_SDPA = ("install_sdpa", "register_transformers", "scaled_dot_product_attention", "sdpa_counts", "uninstall_sdpa", "why_fallback")
_MODULES = ("engine", "flash_attn", "flash_attn_interface", "nn", "ops", "sdpa", "transcriber")

_PLACES = {"Engine": ".engine", "Transcriber": ".transcriber", "check_contents": "._arrays", "read_audio": "._speech"}

__all__ = ["Cancelled", "CompileError", "DeviceError", "QueueFull", "__version__", "set_cpu_threads", "set_gpu_target", *_PLACES, *_MODULES, *_SDPA]


if not TYPE_CHECKING:  # type checkers would accept any name because of __getattr__

    def __getattr__(name: str):
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name in _SDPA:
            return getattr(importlib.import_module(".sdpa", __name__), name)
        if name in _PLACES:
            return getattr(importlib.import_module(_PLACES[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
