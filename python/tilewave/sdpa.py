"""scaled_dot_product_attention through the library: as a function, as a replacement for PyTorch's, and as an attention implementation for transformers.

    tilewave.install_sdpa()              F.scaled_dot_product_attention, and with it nn.MultiheadAttention and most models
    with tilewave.install_sdpa(): ...    the same, until the end of the block (in the whole process, for all threads)
    tilewave.register_transformers()     AutoModel...(..., attn_implementation="tilewave")

Works in training: autograd differentiates it, once, with respect to query, key, value and a mask that is added. PyTorch does what the
library does not support: dropout of 1, torch.func, f32 on CUDA, GPUs below compute capability 8.0, head dimensions above 256. why_fallback() gives the reason for a thread's last call, sdpa_counts() the number of calls for each reason.

Imports torch. The package imports this module at the first use of one of its names.
"""

from __future__ import annotations

import collections
import math
import sys
import threading
from typing import Any, Callable

import torch
import torch.nn.functional as F

from . import _dispatch, ops
from .ops.attention import drawn_dropout_state

_PYTORCH = torch._C._nn.scaled_dot_product_attention  # the original, even if F's has been replaced
_KNOWS_EXPORTING = hasattr(torch.compiler, "_is_exporting_flag")
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HEAD_DIM_MULTIPLE = 8
_LARGEST_HEAD_DIM = 256

_lock = threading.Lock()
_counts: collections.Counter = collections.Counter()
_last = threading.local()
_gpus: dict[int, bool] = {}


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(scale query key^T + attn_mask) value, with the arguments and the meaning of torch.nn.functional's function of this name.

    query: [..., heads, seqlen_q, head_dim]; key: [..., heads, seqlen_k, head_dim]; value: [..., heads, seqlen_k, value_dim]. Gives [...,
    heads, seqlen_q, value_dim], with the memory layout [..., seqlen_q, heads, value_dim] where there are batch dimensions. Any strides work
    without copies if the last dimension is contiguous and a multiple of 8.

    attn_mask: bool (True: visible), f32 or query's dtype (added), broadcast to [..., heads, seqlen_q, seqlen_k]. is_causal: query i sees
    keys j <= i, also if seqlen_q != seqlen_k; not allowed with a mask. scale: default 1 / sqrt(head_dim). enable_gqa: query's heads may be
    a multiple of key's and value's. A query that sees no key gives 0.

    Differentiable once with respect to query, key, value and a mask that is added. Falls back to PyTorch (see why_fallback()) for
    dropout_p = 1, f64, f32 on CUDA, head dimensions above 256 and anything else that the library does not support. ValueError, TypeError
    name a wrong argument.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
        if tensor.dim() < 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be [..., seqlen, head_dim]")
    if attn_mask is not None:
        if not isinstance(attn_mask, torch.Tensor):
            raise TypeError(f"attn_mask is a {type(attn_mask).__name__}; it must be a torch.Tensor or None")
        if is_causal:
            raise ValueError("is_causal is True and attn_mask is given; only one of them is allowed")
        if attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
            raise TypeError(f"attn_mask has dtype {attn_mask.dtype}; allowed: bool, float32 and query's dtype, {query.dtype}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p is {dropout_p}; allowed: 0 to 1")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key has shape {tuple(key.shape)}; its last dimension must be query's, {query.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value has shape {tuple(value.shape)}; its seqlen must be key's, {key.shape[-2]}")
    return _attend(_PYTORCH, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _attend(pytorch: Callable, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> torch.Tensor:
    """By the library or, where it refuses, by `pytorch`."""
    reason = _refusal(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if _runs_now(query):
        _count(reason)
    if reason is None:
        return _by_library(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return pytorch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **_gqa(enable_gqa))


def _gqa(enable_gqa: bool) -> dict[str, bool]:
    """The argument where it is set: PyTorch 2.4 has none."""
    return {"enable_gqa": True} if enable_gqa else {}


def _refusal(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) -> str | None:
    """Why the library cannot do a call, None if it can. Wrong arguments too are PyTorch's, which says what is wrong with them."""
    if not torch.compiler.is_compiling():  # these only know PyTorch's own functions
        if torch._C._get_tracing_state() is not None:
            return "torch.jit.trace"
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return "torch.func"
    if not _is_plain(query) or not _is_plain(key) or not _is_plain(value):
        return "query, key or value is not a plain tensor"
    if attn_mask is not None and not _is_plain(attn_mask):
        return "attn_mask is not a plain tensor"
    if not 0 <= dropout_p < 1:  # 1, or what PyTorch refuses
        return "dropout of 1 or more"
    device = query.device
    if device.type not in ("cpu", "cuda"):
        return "device"
    if key.device != device or value.device != device or (attn_mask is not None and attn_mask.device != device):
        return "arguments on different devices"
    dtype = _dtype_of(query)
    if (key.dtype != query.dtype or value.dtype != query.dtype) and (_dtype_of(key) != dtype or _dtype_of(value) != dtype):
        return "dtypes that differ"
    if dtype not in _DTYPES:
        return "dtype"
    if device.type == "cuda":
        if dtype == torch.float32:
            return "float32 on CUDA"
        if not _runs_kernels(device.index):
            return "a GPU below compute capability 8.0"
    if query.layout != torch.strided or key.layout != torch.strided or value.layout != torch.strided:
        return "layout"
    of_q, of_k, of_v = query.shape, key.shape, value.shape
    rank = len(of_q)
    if rank < 2 or len(of_k) != rank or len(of_v) != rank:
        return "numbers of dimensions"
    if of_q[-1] != of_k[-1] or of_k[-2] != of_v[-2]:
        return "shapes that do not fit"
    if not 0 < of_q[-1] <= _LARGEST_HEAD_DIM or not 0 < of_v[-1] <= _LARGEST_HEAD_DIM:
        return "head_dim"
    if rank > 2:
        if of_q[:-3] != of_k[:-3] or of_k[:-2] != of_v[:-2]:
            return "batches or heads that differ"
        heads, kv_heads = of_q[-3], of_k[-3]
        if heads != kv_heads and not (enable_gqa and kv_heads > 0 and heads % kv_heads == 0):
            return "batches or heads that differ"
    if scale is not None and not (isinstance(scale, (int, float)) and 0 < scale < math.inf):
        return "scale"
    if attn_mask is not None:
        if is_causal:
            return "attn_mask and is_causal"
        if attn_mask.dtype not in (torch.bool, torch.float32, dtype) or attn_mask.layout != torch.strided:
            return "attn_mask's dtype or layout"
        scores = (*of_q[:-1], of_k[-2])
        if not 2 <= attn_mask.dim() <= rank:
            return "attn_mask's shape"
        for extent, whole in zip(attn_mask.shape, scores[rank - attn_mask.dim() :]):
            if extent != 1 and extent != whole:
                return "attn_mask's shape"
    return None


def _is_plain(tensor: Any) -> bool:
    """Whether it is a tensor and nothing more, or stands for one while PyTorch traces what torch.compile() did not look into."""
    if type(tensor) in _TENSORS:
        return True
    if not isinstance(tensor, torch.Tensor):
        return False
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return type(tensor) in (FakeTensor, FunctionalTensor)


def _runs_now(tensor: torch.Tensor) -> bool:
    """Whether a call is no traced one, which runs later, or never."""
    return not torch.compiler.is_compiling() and type(tensor) in _TENSORS


def _dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which PyTorch would compute: autocast narrows arguments."""
    dtype = tensor.dtype
    if torch.is_autocast_enabled(tensor.device.type) and tensor.is_floating_point() and dtype != torch.float64:
        return torch.get_autocast_dtype(tensor.device.type)
    return dtype


def _runs_kernels(index: int) -> bool:
    if torch.compiler.is_compiling():
        of_device = torch.cuda.get_device_properties(index)
        return of_device.major >= 8
    known = _gpus.get(index)
    if known is None:
        known = _gpus[index] = torch.cuda.get_device_properties(index).major >= 8
    return known


def _by_library(query, key, value, attn_mask, dropout_p, is_causal, scale) -> torch.Tensor:
    """Computes attention for arguments that _refusal() accepts."""
    rank = query.dim()
    lead = query.shape[:-3]
    if rank == 2:
        query, key, value = query[None, None], key[None, None], value[None, None]
    elif rank == 3 and query.shape[0] == key.shape[0]:
        # As batches, so that the result is contiguous like PyTorch's.
        query, key, value = query[:, None], key[:, None], value[:, None]
        attn_mask = attn_mask[:, None] if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    elif rank == 3:  # grouped heads
        query, key, value = query[None], key[None], value[None]
    elif rank > 4:
        query, key, value = query.flatten(0, -4), key.flatten(0, -4), value.flatten(0, -4)
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*lead, *attn_mask.shape[-3:]).flatten(0, -4)
    offset = 0 if is_causal else None
    out = _attention(query, key, value, causal=is_causal, causal_offset=offset, scale=scale, dropout=dropout_p, mask=attn_mask)
    out = out.transpose(1, 2)
    if rank == 2:
        return out[0, 0]
    if rank == 3:
        return out[:, 0] if out.shape[1] == 1 else out[0]
    return out if rank == 4 else out.unflatten(0, lead)


def _attention(query, key, value, *, scale, **options) -> torch.Tensor:
    """ops.attention() of [batch, heads, seqlen, dim], padded to head dimensions that it takes: [batch, seqlen_q, heads, value_dim]."""
    value_dim = value.shape[-1]
    dtype = _dtype_of(query)
    if query.dtype != dtype or key.dtype != dtype or value.dtype != dtype:  # in autocast
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.shape[-1] % _HEAD_DIM_MULTIPLE:
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        query, key = _padded(query), _padded(key)
    if value_dim % _HEAD_DIM_MULTIPLE:
        value = _padded(value)
    query, key, value = _as_rows(query), _as_rows(key), _as_rows(value)
    if not torch.compiler.is_compiling() and (type(query) not in _TENSORS or torch._C._len_torch_dispatch_stack() > 0):
        attend = _operator  # visible to tools that record PyTorch's operations
    else:
        attend = ops.attention
    out = attend(query, key, value, scale=scale, **options)
    return out if value.shape[-1] == value_dim else out[..., :value_dim]


def _operator(
    query, key, value, *, scale=None, causal=False, causal_offset=None, window=(-1, -1), softcap=0.0, sink=None, dropout=0.0, mask=None
) -> torch.Tensor:
    """ops.attention(), as the operator."""
    from . import _torch_ops  # noqa: F401  defines it

    operator = torch.ops.tilewave.attention
    needs_lse = _dispatch.needs_gradients(query, key, value, sink, mask)
    rules = (scale, causal, causal_offset, window[0], window[1], 0, 0, softcap, None, sink)
    state = drawn_dropout_state(query, dropout)
    return operator(query, key, value, *rules, dropout, state, mask, False, needs_lse)[0]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    return F.pad(tensor, (0, -tensor.shape[-1] % _HEAD_DIM_MULTIPLE))


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, seqlen, heads, dim] of [batch, heads, seqlen, dim], a copy only where the last dimension is not contiguous."""
    tensor = tensor.transpose(1, 2)
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _count(reason: str | None) -> None:
    _last.reason = reason
    with _lock:
        _counts["tilewave" if reason is None else reason] += 1


def why_fallback() -> str | None:
    """Why this thread's last scaled_dot_product_attention used PyTorch; None if it used the library, or there was none.

    Calls in compiled code are not counted: a graph always uses what its first call used.
    """
    return getattr(_last, "reason", None)


def sdpa_counts() -> dict[str, int]:
    """The number of calls of the process, in all threads, that used the library ("tilewave"), and that fell back, by reason."""
    with _lock:
        return dict(_counts)


# ---- replacing PyTorch's function ----


class SdpaInstallation:
    """The result of install_sdpa(). As a context manager it uninstalls at its end, unless the library was installed before."""

    def __init__(self, by_this: bool):
        self._by_this = by_this

    def __enter__(self) -> SdpaInstallation:
        return self

    def __exit__(self, *_: object) -> None:
        if self._by_this:
            self.uninstall()

    def uninstall(self) -> None:
        uninstall_sdpa()


_before: Callable = _PYTORCH  # F.scaled_dot_product_attention before ours
_installed = False
_fastpath_before = True


def _installed_sdpa(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """torch.nn.functional.scaled_dot_product_attention while install_sdpa() holds."""
    if not _installed or _is_exporting():  # a caller kept a reference, or another patch wraps it; exported programs must not depend on this package
        return _before(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **_gqa(enable_gqa))
    if attn_mask is not None and type(attn_mask) not in _TENSORS and hasattr(attn_mask, "_dispatch"):
        # torch.nn.attention.bias.CausalBias looks PyTorch's function up in F and calls what it finds.
        return torch.overrides.handle_torch_function(
            F.scaled_dot_product_attention,
            (attn_mask,),
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            is_causal,
            scale=scale,
            **_gqa(enable_gqa),
        )
    return _attend(_before, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _is_exporting() -> bool:
    # is_exporting() itself is true inside torch.compile().
    return torch.compiler._is_exporting_flag if _KNOWS_EXPORTING else False


def install_sdpa() -> SdpaInstallation:
    """Replaces torch.nn.functional.scaled_dot_product_attention by the library's, for the whole process. A second call does nothing.

    F.scaled_dot_product_attention then uses the library where it supports the call, else PyTorch. nn.MultiheadAttention and
    nn.TransformerEncoderLayer in eval() have a fast path that bypasses it, so that path is disabled (torch.backends.mha). With
    need_weights=True, the default, they need the scores and call no attention function.

    Install first: code that has already imported the function by name, or that torch.compile() has already compiled, is not affected. If
    transformers is imported, register_transformers() is also called.
    """
    global _before, _installed, _fastpath_before
    with _lock:
        by_this = not _installed
        if by_this:
            if F.scaled_dot_product_attention is not _installed_sdpa:  # another patch has put it back
                _before = F.scaled_dot_product_attention
                F.scaled_dot_product_attention = _installed_sdpa
            _fastpath_before = torch.backends.mha.get_fastpath_enabled()
            torch.backends.mha.set_fastpath_enabled(False)
            _installed = True
    if "transformers.modeling_utils" in sys.modules:
        register_transformers()
    return SdpaInstallation(by_this)


def uninstall_sdpa() -> None:
    """Restores PyTorch's function, or the one that install_sdpa() replaced. Does nothing without install_sdpa()."""
    global _installed
    with _lock:
        if not _installed:
            return
        _installed = False
        if F.scaled_dot_product_attention is _installed_sdpa:  # otherwise another patch wraps ours, which now only passes calls through
            F.scaled_dot_product_attention = _before
        torch.backends.mha.set_fastpath_enabled(_fastpath_before)


# ---- transformers ----


def transformers_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers. Gives ([batch, seqlen_q, heads, value_dim], None).

    query: [batch, heads, seqlen_q, head_dim]; key, value: [batch, kv_heads, seqlen_k, dim]. attention_mask: as made for "sdpa", bool or
    added, [batch, 1 or heads, seqlen_q, seqlen_k]; None: causal if the module is and there is more than one query, as in transformers.
    sliding_window: keys i - sliding_window + 1 to i, if there is no mask. s_aux: [heads], sinks. position_bias: added, as a mask.
    """
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.shape[-1] > seqlen_k:
        attention_mask = attention_mask[..., :seqlen_k]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal) and attention_mask is None and seqlen_q > 1
    window = (-1, -1)
    if sliding_window is not None and attention_mask is None and seqlen_k > sliding_window:
        # One query is aligned with the last key; several, without a mask, with the first ones.
        window = (sliding_window - 1, -1 if causal or seqlen_q == 1 else sliding_window - 1)
    mask = attention_mask
    if position_bias is not None:
        if mask is None:
            mask = position_bias
        elif mask.dtype == torch.bool:
            mask = position_bias.masked_fill(~mask, torch.finfo(position_bias.dtype).min)
        else:
            mask = position_bias + mask
    enable_gqa = key.shape[1] != query.shape[1]
    reason = _refusal(query, key, value, mask, dropout, False, scaling, enable_gqa)
    if _runs_now(query):
        _count(reason)
    offset = 0 if causal or (window != (-1, -1) and seqlen_q > 1) else None
    if reason is not None:
        return _in_pytorch(query, key, value, mask, dropout, scaling, causal, offset, window, softcap, s_aux), None
    out = _attention(
        query,
        key,
        value,
        scale=scaling,
        causal=causal,
        causal_offset=offset,
        window=window,
        softcap=softcap or 0.0,
        sink=None if s_aux is None else s_aux.float().contiguous(),
        dropout=dropout,
        mask=mask,
    )
    return out.contiguous(), None


def _in_pytorch(query, key, value, mask, dropout, scaling, causal, offset, window, softcap, sinks) -> torch.Tensor:
    """transformers_attention() by PyTorch, for what the library does not support."""
    heads, kv_heads, seqlen_q, seqlen_k = query.shape[1], key.shape[1], query.shape[2], key.shape[2]
    if kv_heads != heads:
        key, value = key.repeat_interleave(heads // kv_heads, 1), value.repeat_interleave(heads // kv_heads, 1)
    if window != (-1, -1):
        beside = torch.arange(seqlen_q, device=query.device)[:, None] + (seqlen_k - seqlen_q if offset is None else offset)
        keys = torch.arange(seqlen_k, device=query.device)
        seen = keys >= beside - window[0]
        if causal or window[1] >= 0:
            seen = seen & (keys <= beside + max(window[1], 0))
        mask, causal = (seen if mask is None else mask.masked_fill(~seen, -math.inf)), False
    elif causal and mask is not None:
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device).tril()
        mask, causal = mask.masked_fill(~seen, -math.inf), False
    if not softcap and sinks is None:
        out = _PYTORCH(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling)
        return out.transpose(1, 2).contiguous()
    scores = query.matmul(key.transpose(2, 3)) * (1 / math.sqrt(query.shape[-1]) if scaling is None else scaling)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(value.dtype)[..., :seqlen_k]
    return F.dropout(weights, dropout).matmul(value).transpose(1, 2).contiguous()


def register_transformers(name: str = "tilewave") -> None:
    """Registers attn_implementation=`name` in transformers. Masks are made as for "sdpa". ImportError without transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, transformers_attention)
    try:
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError:  # before 4.53 models made masks themselves: as for "sdpa", for every name except FlashAttention's
        return
    AttentionMaskInterface.register(name, sdpa_mask)
