"""Tilewave's attention through its C interface (include/tilewave/tilewave.h), and the accuracy rule on some rows."""

import ctypes
import math
from dataclasses import dataclass

import torch


class TwTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("cuda_device", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
    ]


TensorPointer = ctypes.POINTER(TwTensor)


class TwAttentionOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("scale", ctypes.c_float),
        ("causal", ctypes.c_int32),
        ("has_causal_offset", ctypes.c_int32),
        ("causal_offset", ctypes.c_int32),
        ("has_window_left", ctypes.c_int32),
        ("window_left", ctypes.c_int32),
        ("has_window_right", ctypes.c_int32),
        ("window_right", ctypes.c_int32),
        ("softcap", ctypes.c_float),
        ("alibi_slopes", TensorPointer),
        ("sink", TensorPointer),
        ("mask", TensorPointer),
        ("lse", TensorPointer),
        ("check_contents", ctypes.c_int32),
    ]


class TwCacheOptions(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("seqlens", TensorPointer),
        ("batch_idx", TensorPointer),
        ("leftpad", TensorPointer),
        ("block_table", TensorPointer),
        ("new_k", TensorPointer),
        ("new_v", TensorPointer),
        ("rotary_cos", TensorPointer),
        ("rotary_sin", TensorPointer),
        ("rotary_interleaved", ctypes.c_int32),
        ("num_splits", ctypes.c_int32),
    ]


TW_DTYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3, torch.bool: 4}


def tw_tensor(t):
    device = t.device.index if t.device.type == "cuda" else -1
    return TwTensor(t.data_ptr(), TW_DTYPE[t.dtype], device, t.dim(), (ctypes.c_int64 * 4)(*t.shape), (ctypes.c_int64 * 4)(*t.stride()))


@dataclass(frozen=True)
class Features:
    """What a call does besides softmax(Q K^T / sqrt(head_dim)) V. alibi_slopes: f32 [heads]."""

    causal: bool = False
    window_left: int | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None


class Tilewave:
    """Its methods give functions without arguments that enqueue one execution on `stream` (None on the CPU: done when they return)."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.tw_last_error.restype = ctypes.c_char_p
        self.lib.tw_last_error.argtypes = []

    def attention(self, q, k, v, o, features=Features(), lse=None, stream=None):
        return self._call("tw_attention", (q, k, v, o), features, lse, stream)

    def varlen(self, q, k, v, o, cu_seqlens, features=Features(), lse=None, stream=None):
        """The same sequences of queries and of keys."""
        return self._call("tw_attention_varlen", (q, k, v, o, cu_seqlens, cu_seqlens, None, None), features, lse, stream)

    def decode(self, q, k_cache, v_cache, o, seqlens, block_table=None, features=Features(), lse=None, stream=None):
        kept = []
        cache = TwCacheOptions(struct_size=ctypes.sizeof(TwCacheOptions), seqlens=pointer(seqlens, kept), block_table=pointer(block_table, kept))
        return self._call("tw_attention_decode", (q, k_cache, v_cache, o), features, lse, stream, cache, kept)

    def _call(self, name, tensors, features, lse, stream, cache=None, kept=()):
        kept = [tensors, features, lse, cache, *kept]
        arguments = [pointer(t, kept) for t in tensors]
        if cache is not None:
            arguments.append(ctypes.byref(cache))
        options = TwAttentionOptions(
            struct_size=ctypes.sizeof(TwAttentionOptions),
            causal=int(features.causal),
            has_window_left=int(features.window_left is not None),
            window_left=features.window_left or 0,
            softcap=features.softcap,
            alibi_slopes=pointer(features.alibi_slopes, kept),
            lse=pointer(lse, kept),
        )
        kept.append(options)
        arguments += [ctypes.byref(options), ctypes.c_void_p(stream)]
        function, last_error = getattr(self.lib, name), self.lib.tw_last_error
        function.restype = ctypes.c_int

        def launch(keep=kept):
            if function(*arguments) != 0:
                raise RuntimeError(f"{name}: {last_error().decode()}")

        return launch


def pointer(tensor, kept):
    """To a description of the tensor, both of which `kept` keeps alive; null for None."""
    if tensor is None:
        return None
    described = ctypes.pointer(tw_tensor(tensor))
    kept += [tensor, described]
    return described


# --- The accuracy rule


RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def ulp(x, dtype):
    """Distance between neighbours of `dtype` at magnitude x."""
    if x == 0:
        return 0.0
    bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    return 2.0 ** (math.floor(math.log2(x)) - bits)


def softmax_rows(query, key, value, rows, features, head, diagonal):
    """Output and log-sum-exp of `query`, the rows `rows` of one head, in the dtype of its operands."""
    scores = (query @ key.T) * (1 / math.sqrt(query.shape[1]))
    if features.softcap:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    ahead = torch.arange(key.shape[0], device=key.device)[None, :] - (rows + diagonal)[:, None]  # how many keys after the one beside the query
    if features.alibi_slopes is not None:
        scores = scores - (features.alibi_slopes[head].double() * ahead.abs()).to(scores.dtype)
    if features.causal:
        scores = scores.masked_fill(ahead > 0, -math.inf)
    if features.window_left is not None:
        scores = scores.masked_fill(ahead < -features.window_left, -math.inf)
    return torch.softmax(scores, dim=-1) @ value, torch.logsumexp(scores, dim=-1)


def wrong_rows(where, query, key, value, out, lse, rows, features, head):
    """The accuracy rule on rows of one head: max|out - ref| <= 2 max|naive - ref| + 2 ulp(max|ref|) + 1e-5, a bound of the relative L2 error, LSE within 1e-3
    (`lse` None: not looked at). `query`, `key`, `value`: all of one sequence and head, [seqlen, head_dim]; `out`, `lse` likewise. Gives what is wrong."""
    diagonal = key.shape[0] - query.shape[0]
    reference, reference_lse = softmax_rows(query[rows].double(), key.double(), value.double(), rows, features, head, diagonal)
    naive, _ = softmax_rows(query[rows], key, value, rows, features, head, diagonal)
    out = out[rows].double()
    error = (out - reference).abs().max().item()
    allowed = 2 * (naive.double() - reference).abs().max().item() + 2 * ulp(reference.abs().max().item(), query.dtype) + 1e-5
    relative = ((out - reference).norm() / reference.norm()).item()
    bound = RELATIVE_ERROR[query.dtype]
    wrong = []
    if not error <= allowed:  # written so that NaN fails
        wrong.append(f"{where}: error {error:.3g}, allowed {allowed:.3g}")
    if not relative <= bound:
        wrong.append(f"{where}: relative L2 error {relative:.3g}, allowed {bound}")
    if lse is not None:
        lse_error = (lse[rows].double() - reference_lse).abs().max().item()
        if not lse_error <= 1e-3:
            wrong.append(f"{where}: LSE error {lse_error:.3g}, allowed 0.001")
    return wrong


def some_rows(seqlen, rng, device):
    """The ends, those around the edges of tiles, and random ones."""
    picked = {0, seqlen - 1, *(r for r in (63, 64, 127, 128, 191, 192) if r < seqlen), *(rng.randrange(seqlen) for _ in range(96))}
    return torch.tensor(sorted(picked), device=device)
