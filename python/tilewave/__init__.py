"""Tilewave: attention, matrix products, norms and speech to text, on CPUs and Hopper GPUs. Nothing is compiled against NumPy or PyTorch.

    tilewave.ops.attention(q, k, v, causal=True)        every operation: NumPy, PyTorch, DLPack
    tilewave.flash_attn.flash_attn_func(q, k, v)        FlashAttention 2's functions; tilewave.flash_attn_interface has FlashAttention 3's
    tilewave.scaled_dot_product_attention(q, k, v)      PyTorch's; install_sdpa() puts it in its place
    tilewave.Transcriber("glm-asr-nano")("talk.flac")   text

PyTorch is imported by what needs it, not here.
"""

from __future__ import annotations

import importlib

from ._library import Cancelled, CompileError, DeviceError
from ._version import __version__

_SDPA = ("install_sdpa", "register_transformers", "scaled_dot_product_attention", "sdpa_counts", "uninstall_sdpa", "why_fallback")
_MODULES = ("flash_attn", "flash_attn_interface", "ops", "sdpa", "transcriber")

__all__ = ["Cancelled", "CompileError", "DeviceError", "Transcriber", "__version__", *_MODULES, *_SDPA]


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _SDPA:
        return getattr(importlib.import_module(".sdpa", __name__), name)
    if name == "Transcriber":
        return importlib.import_module(".transcriber", __name__).Transcriber
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
