"""Tilewave: attention, matrix products, norms and speech to text, on CPUs and NVIDIA GPUs. Nothing is compiled against NumPy or PyTorch.

    tilewave.ops.attention(q, k, v, causal=True)        the operations: NumPy, PyTorch, DLPack
    tilewave.flash_attn.flash_attn_func(q, k, v)        FlashAttention 2's functions; tilewave.flash_attn_interface has FlashAttention 3's
    tilewave.scaled_dot_product_attention(q, k, v)      PyTorch's function; install_sdpa() replaces it
    tilewave.Transcriber("glm-asr-nano")("talk.flac")   text

PyTorch is imported only when a function needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._library import Cancelled, CompileError, DeviceError, set_gpu_target
from ._version import __version__

if TYPE_CHECKING:  # __getattr__ imports these at first use
    from . import flash_attn as flash_attn
    from . import flash_attn_interface as flash_attn_interface
    from . import ops as ops
    from . import sdpa as sdpa
    from . import transcriber as transcriber
    from ._arrays import check_contents as check_contents
    from .sdpa import install_sdpa as install_sdpa
    from .sdpa import register_transformers as register_transformers
    from .sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from .sdpa import sdpa_counts as sdpa_counts
    from .sdpa import uninstall_sdpa as uninstall_sdpa
    from .sdpa import why_fallback as why_fallback
    from .transcriber import Transcriber as Transcriber

_SDPA = ("install_sdpa", "register_transformers", "scaled_dot_product_attention", "sdpa_counts", "uninstall_sdpa", "why_fallback")
_MODULES = ("flash_attn", "flash_attn_interface", "ops", "sdpa", "transcriber")

__all__ = ["Cancelled", "CompileError", "DeviceError", "Transcriber", "__version__", "check_contents", "set_gpu_target", *_MODULES, *_SDPA]


if not TYPE_CHECKING:  # type checkers would accept any name because of __getattr__

    def __getattr__(name: str):
        if name in _MODULES:
            return importlib.import_module(f".{name}", __name__)
        if name in _SDPA:
            return getattr(importlib.import_module(".sdpa", __name__), name)
        if name == "Transcriber":
            return importlib.import_module(".transcriber", __name__).Transcriber
        if name == "check_contents":
            return importlib.import_module("._arrays", __name__).check_contents
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
