"""The shared libraries: their paths, the arguments of their functions, and the exceptions for their errors."""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import pathlib
import re
from ctypes import addressof, byref  # noqa: F401  for callers

from ._version import __version__

_PACKAGE = pathlib.Path(__file__).resolve().parent


class DeviceError(RuntimeError):
    """A GPU is missing, or the driver or a kernel failed."""


class CompileError(RuntimeError):
    """The run-time compiler is missing, or a kernel did not compile."""


class Cancelled(RuntimeError):
    """A callback asked to stop."""


class QueueFull(RuntimeError):
    """An engine has as many waiting requests as it may."""


# tw_status
_ERRORS = {1: ValueError, 2: MemoryError, 3: DeviceError, 4: CompileError, 5: RuntimeError, 6: OSError, 7: Cancelled, 8: QueueFull}

_TENSOR = ctypes.c_char_p  # a tw_tensor's bytes (_arrays.py), or None
_STREAM = ctypes.c_void_p
_OPTIONS = ctypes.c_void_p


class Options(ctypes.Structure):
    """A structure of options. It begins with its size; fields that are 0 have their default. Tensors are passed as bytes."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.struct_size = ctypes.sizeof(self)


class AttentionOptions(Options):
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
        ("alibi_slopes", _TENSOR),
        ("sink", _TENSOR),
        ("mask", _TENSOR),
        ("lse", _TENSOR),
        ("check_contents", ctypes.c_int32),
        ("dropout", ctypes.c_float),
        ("dropout_seed", ctypes.c_int64),
        ("dropout_offset", ctypes.c_int64),
        ("dropout_state", _TENSOR),
        ("q_descale", _TENSOR),
        ("k_descale", _TENSOR),
        ("v_descale", _TENSOR),
        ("block_mask", _TENSOR),
        ("block_indices", _TENSOR),
        ("block_counts", _TENSOR),
        ("query_block", ctypes.c_int32),
        ("key_block", ctypes.c_int32),
        ("attention_chunk", ctypes.c_int32),
        ("sm_margin", ctypes.c_int32),
        ("qv", _TENSOR),
    ]


class AttentionBackwardOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("forward", ctypes.c_void_p),  # the address of an AttentionOptions, which the caller keeps
        ("d_sink", _TENSOR),
        ("deterministic", ctypes.c_int),
        ("d_mask", _TENSOR),
    ]


class CacheOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, _TENSOR) for name in ("seqlens", "batch_idx", "leftpad", "block_table", "new_k", "new_v", "rotary_cos", "rotary_sin")),
        ("rotary_interleaved", ctypes.c_int32),
        ("num_splits", ctypes.c_int32),
        ("cu_seqlens_q", _TENSOR),
        ("cu_seqlens_new", _TENSOR),
    ]


class DecodeProblem(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_int32) for name in ("cuda_device", "attention_chunk", "sm_margin")),
        *((name, ctypes.c_int64) for name in ("batch", "seqlen_q", "heads", "kv_heads", "seqlen_k")),
    ]


class MlaOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("seqlens", _TENSOR),
        ("block_table", _TENSOR),
        ("scale", ctypes.c_float),
        ("not_causal", ctypes.c_int32),
        ("lse", _TENSOR),
        ("max_seqlen", ctypes.c_int64),
        ("num_splits", ctypes.c_int32),
        ("check_contents", ctypes.c_int32),
    ]


class MlaSparseOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("topk_length", _TENSOR),
        ("sink", _TENSOR),
        ("scale", ctypes.c_float),
        ("num_splits", ctypes.c_int32),
        ("lse", _TENSOR),
        ("max_logits", _TENSOR),
    ]


class MlaSparseBackwardOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("topk_length", _TENSOR),
        ("scale", ctypes.c_float),
        ("deterministic", ctypes.c_int32),
    ]


class MlaAppendOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, _TENSOR) for name in ("seqlens", "block_table", "rotary_cos", "rotary_sin")),
        ("rotary_half_split", ctypes.c_int32),
        ("check_contents", ctypes.c_int32),
    ]


class IndexerOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, _TENSOR) for name in ("k_scale", "starts", "ends")),
        *((name, ctypes.c_int32) for name in ("causal", "no_clear", "num_splits")),
    ]


class IndexerPagedOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("seqlens", _TENSOR),
        *((name, ctypes.c_int32) for name in ("not_causal", "no_clear", "num_splits")),
    ]


class NsaOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("block_size", ctypes.c_int32),
        ("scale", ctypes.c_float),
        *((name, _TENSOR) for name in ("block_counts", "cu_seqlens", "cu_seqlens_k", "seqlens", "lse")),
    ]


class NsaSelectOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("block_size", ctypes.c_int32),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("initial_blocks", "local_blocks")),
        *((name, _TENSOR) for name in ("cu_seqlens", "cu_seqlens_k", "seqlens")),
    ]


class VerticalSlashOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("query_block", ctypes.c_int32),
        ("scale", ctypes.c_float),
        *((name, _TENSOR) for name in ("seqlens", "lse")),
    ]


class LinearAttentionOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("has_scale", ctypes.c_int32),
        ("scale", ctypes.c_float),
        *((name, _TENSOR) for name in ("g", "initial_state", "final_state", "cu_seqlens")),
    ]


class LinearAttentionStepOptions(Options):
    _fields_ = [("struct_size", ctypes.c_size_t), ("has_scale", ctypes.c_int32), ("scale", ctypes.c_float), ("g", _TENSOR)]


class LinearAttentionBackwardOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("has_scale", ctypes.c_int32),
        ("scale", ctypes.c_float),
        *((name, _TENSOR) for name in ("g", "initial_state", "cu_seqlens", "d_final_state", "dg", "d_initial_state")),
    ]


_MAMBA2 = [
    ("struct_size", ctypes.c_size_t),
    *((name, _TENSOR) for name in ("d", "z", "dt_bias")),
    ("dt_softplus", ctypes.c_int32),
    ("has_dt_limit", ctypes.c_int32),
    ("dt_min", ctypes.c_float),
    ("dt_max", ctypes.c_float),
]


class Mamba2Options(Options):
    _fields_ = [*_MAMBA2, *((name, _TENSOR) for name in ("initial_states", "final_states", "cu_seqlens", "seq_idx"))]


class Mamba2StepOptions(Options):
    _fields_ = [*_MAMBA2, ("state_indices", _TENSOR)]


class Mamba2BackwardOptions(Options):
    _fields_ = [
        *_MAMBA2,
        *((name, _TENSOR) for name in ("initial_states", "cu_seqlens", "seq_idx", "d_final_states")),
        *((name, _TENSOR) for name in ("da", "dd", "dz", "d_dt_bias", "d_initial_states")),
    ]


class Mamba2ChunkCumsumOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("dt_bias", _TENSOR),
        ("dt_softplus", ctypes.c_int32),
        ("has_dt_limit", ctypes.c_int32),
        ("dt_min", ctypes.c_float),
        ("dt_max", ctypes.c_float),
        ("seq_idx", _TENSOR),
    ]


class Mamba2ChunkScanOptions(Options):
    _fields_ = [("struct_size", ctypes.c_size_t), *((name, _TENSOR) for name in ("d", "z", "ungated"))]


class Mamba2ChunkCumsumBackwardOptions(Options):
    _fields_ = [*Mamba2ChunkCumsumOptions._fields_, *((name, _TENSOR) for name in ("da", "d_dt_bias"))]


class Mamba2ChunkScanBackwardOptions(Options):
    _fields_ = [*Mamba2ChunkScanOptions._fields_, *((name, _TENSOR) for name in ("dd", "dz"))]


class GemmOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("has_alpha", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("activation", ctypes.c_int32),
        *((name, _TENSOR) for name in ("bias", "residual", "a_scale", "b_scale")),
        ("num_splits", ctypes.c_int32),
    ]


class GroupedGemmOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("bias", _TENSOR),
        ("activation", ctypes.c_int32),
        *((name, _TENSOR) for name in ("a_scale", "b_scale")),
    ]


class SparseGemmOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("has_alpha", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("activation", ctypes.c_int32),
        *((name, _TENSOR) for name in ("bias", "residual", "a_scale", "b_scale")),
    ]


class BlockSparseGemmOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("block", ctypes.c_int32),
        ("has_alpha", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("activation", ctypes.c_int32),
        *((name, _TENSOR) for name in ("a_mask", "b_mask", "d_mask", "product_mask", "bias")),
    ]


class DequantGemmOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("bias", _TENSOR),
        ("activation", ctypes.c_int32),
        ("accumulate", ctypes.c_int32),
        ("format", ctypes.c_int32),
        ("x_scales", _TENSOR),
    ]


class BitLinearOptions(Options):
    _fields_ = [("struct_size", ctypes.c_size_t), ("bias", _TENSOR), ("accumulate", ctypes.c_int32)]


class NormOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("has_epsilon", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        *((name, _TENSOR) for name in ("weight", "bias", "residual", "sum")),
    ]


class RopeOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("interleaved", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("offsets", _TENSOR),
        ("positions", _TENSOR),
    ]


class CausalConv1dOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, _TENSOR) for name in ("bias", "initial_state", "final_state", "cu_seqlens")),
        ("silu", ctypes.c_int32),
    ]


class GatedDeltaOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("g", _TENSOR),
        ("has_scale", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("normalise_qk", ctypes.c_int32),
        *((name, _TENSOR) for name in ("initial_state", "final_state", "cu_seqlens")),
    ]


class GatedDeltaBackwardOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("g", _TENSOR),
        ("has_scale", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("normalise_qk", ctypes.c_int32),
        *((name, _TENSOR) for name in ("initial_state", "cu_seqlens", "d_final_state", "dg", "d_initial_state")),
    ]


class ConvOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        *((name, ctypes.c_int64 * 2) for name in ("stride", "padding", "dilation")),
        ("bias", _TENSOR),
        ("activation", ctypes.c_int32),
    ]


class TopkOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("smallest", ctypes.c_int32),
        ("unsorted", ctypes.c_int32),
        ("starts", _TENSOR),
        ("ends", _TENSOR),
    ]


class MoeRouteOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("score", ctypes.c_int32),
        ("group_score", ctypes.c_int32),
        ("bias", _TENSOR),
        ("groups", ctypes.c_int32),
        ("groups_taken", ctypes.c_int32),
        ("renormalise", ctypes.c_int32),
        ("has_scale", ctypes.c_int32),
        ("scale", ctypes.c_float),
    ]


class MoeExpertsOptions(Options):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("first_expert", ctypes.c_int32),
        *((name, _TENSOR) for name in ("shared_gate_up", "shared_down", "addend")),
        *((name, _TENSOR) for name in ("gate_up_scale", "down_scale", "shared_gate_up_scale", "shared_down_scale")),
    ]


# The arguments of the functions in tilewave.h, in order, without the last one, which is always the stream.
_FUNCTIONS = {
    "tw_add": [_TENSOR] * 3,
    "tw_mul": [_TENSOR] * 3,
    "tw_silu": [_TENSOR] * 2,
    "tw_gelu_erf": [_TENSOR] * 2,
    "tw_gelu_tanh": [_TENSOR] * 2,
    "tw_cast": [_TENSOR] * 2,
    "tw_gemm": [_TENSOR] * 3 + [_OPTIONS],
    "tw_grouped_gemm": [_TENSOR] * 4 + [_OPTIONS],
    "tw_k_grouped_gemm": [_TENSOR] * 4 + [ctypes.c_int32],
    "tw_prune_2_4": [_TENSOR] * 2,
    "tw_compress_2_4": [_TENSOR] * 4,
    "tw_decompress_2_4": [_TENSOR] * 3,
    "tw_sparse_gemm": [_TENSOR] * 4 + [_OPTIONS],
    "tw_sparse_linear": [_TENSOR] * 4 + [_OPTIONS],
    "tw_block_sparse_gemm": [_TENSOR] * 3 + [_OPTIONS],
    "tw_quantize": [_TENSOR] * 4,
    "tw_quantize_to": [_TENSOR] + [ctypes.c_int32] + [_TENSOR] * 3,
    "tw_dequantize": [_TENSOR] * 3 + [ctypes.c_int32] + [_TENSOR],
    "tw_dequant_gemm": [_TENSOR] * 5 + [_OPTIONS],
    "tw_quantize_ternary": [_TENSOR] * 3,
    "tw_unpack_ternary": [_TENSOR] * 3,
    "tw_convert_bitnet": [_TENSOR] + [ctypes.c_float] + [_TENSOR] * 2,
    "tw_quantize_activations": [_TENSOR] * 3,
    "tw_ternary_gemm": [_TENSOR] * 5 + [_OPTIONS],
    "tw_bit_linear": [_TENSOR] * 4 + [_OPTIONS],
    "tw_convert_weight": [_TENSOR] * 4 + [ctypes.c_int32] + [_TENSOR] * 3,
    "tw_layer_norm": [_TENSOR] * 2 + [_OPTIONS],
    "tw_rms_norm": [_TENSOR] * 2 + [_OPTIONS],
    "tw_softmax": [_TENSOR] * 2 + [ctypes.c_float],
    "tw_hadamard": [_TENSOR] * 3 + [ctypes.c_float],
    "tw_swiglu": [_TENSOR] * 3,
    "tw_swiglu_interleaved": [_TENSOR] * 2,
    "tw_rope_table": [_TENSOR] * 2 + [ctypes.c_double, ctypes.c_int64, _TENSOR],
    "tw_rope": [_TENSOR] * 4 + [_OPTIONS],
    "tw_causal_conv1d": [_TENSOR] * 3 + [_OPTIONS],
    "tw_causal_conv1d_update": [_TENSOR] * 5 + [ctypes.c_int32],
    "tw_causal_conv1d_backward": [_TENSOR] * 8 + [_OPTIONS],
    "tw_gated_delta_rule": [_TENSOR] * 5 + [_OPTIONS],
    "tw_gated_delta_rule_step": [_TENSOR] * 6 + [_OPTIONS],
    "tw_gated_delta_rule_backward": [_TENSOR] * 9 + [_OPTIONS],
    "tw_reduce": [ctypes.c_int] + [_TENSOR] * 2 + [ctypes.c_int32],
    "tw_transpose": [_TENSOR] * 2,
    "tw_embedding": [_TENSOR] * 3 + [ctypes.c_float],
    "tw_conv1d": [_TENSOR] * 3 + [_OPTIONS],
    "tw_conv2d": [_TENSOR] * 3 + [_OPTIONS],
    "tw_argmax": [_TENSOR] * 3,
    "tw_topk": [_TENSOR, ctypes.c_int32] + [_TENSOR] * 2 + [_OPTIONS],
    "tw_moe_route": [_TENSOR] * 3 + [_OPTIONS],
    "tw_moe_permutation": [_TENSOR] + [ctypes.c_int32] * 2 + [_TENSOR] * 3,
    "tw_moe_dispatch": [_TENSOR] * 4,
    "tw_moe_combine": [_TENSOR] * 5,
    "tw_moe_experts": [_TENSOR] * 6 + [_OPTIONS],
    "tw_fused_moe": [_TENSOR] * 2 + [ctypes.c_int32] + [_TENSOR] * 3 + [_OPTIONS] * 2,
    "tw_cast_fp8": [_TENSOR] * 3 + [ctypes.c_int32],
    "tw_cast_fp8_swiglu": [_TENSOR] * 4 + [ctypes.c_int32],
    "tw_cast_fp8_blocks": [_TENSOR] * 3 + [ctypes.c_int32],
    "tw_cast_fp8_heads": [_TENSOR] * 3 + [ctypes.c_int32, _TENSOR],
    "tw_head_scales": [_TENSOR] * 2 + [ctypes.c_int32, _TENSOR],
    "tw_cast_fp8_grouped": [_TENSOR] * 4 + [ctypes.c_int32],
    "tw_attention": [_TENSOR] * 4 + [_OPTIONS],
    "tw_attention_dropout_mask": [_TENSOR, _OPTIONS],
    "tw_attention_backward": [_TENSOR] * 9 + [_OPTIONS],
    "tw_attention_varlen": [_TENSOR] * 8 + [_OPTIONS],
    "tw_attention_varlen_backward": [_TENSOR] * 13 + [_OPTIONS],
    "tw_attention_decode": [_TENSOR] * 4 + [_OPTIONS] * 2,
    "tw_mla_decode": [_TENSOR] * 3 + [_OPTIONS],
    "tw_mla_sparse": [_TENSOR] * 4 + [_OPTIONS],
    "tw_mla_sparse_backward": [_TENSOR] * 8 + [_OPTIONS],
    "tw_mla_append": [_TENSOR] * 3 + [_OPTIONS],
    "tw_indexer_scores": [_TENSOR] * 4 + [_OPTIONS],
    "tw_indexer_scores_paged": [_TENSOR] * 5 + [_OPTIONS],
    "tw_nsa_selected": [_TENSOR] * 5 + [_OPTIONS],
    "tw_nsa_compressed": [_TENSOR] * 4 + [_OPTIONS],
    "tw_nsa_selected_backward": [_TENSOR] * 10 + [_OPTIONS],
    "tw_nsa_compressed_backward": [_TENSOR] * 9 + [_OPTIONS],
    "tw_nsa_select": [_TENSOR] * 4 + [_OPTIONS],
    "tw_nsa_combine": [_TENSOR] * 7,
    "tw_vertical_slash_attention": [_TENSOR] * 6 + [_OPTIONS],
    "tw_vertical_slash_index": [_TENSOR] * 2 + [ctypes.c_int64] + [_TENSOR] * 4 + [_OPTIONS],
    "tw_linear_attention": [_TENSOR] * 4 + [_OPTIONS],
    "tw_linear_attention_step": [_TENSOR] * 5 + [_OPTIONS],
    "tw_linear_attention_backward": [_TENSOR] * 7 + [_OPTIONS],
    "tw_mamba2": [_TENSOR] * 6 + [_OPTIONS],
    "tw_mamba2_step": [_TENSOR] * 7 + [_OPTIONS],
    "tw_mamba2_backward": [_TENSOR] * 10 + [_OPTIONS],
    "tw_mamba2_chunk_cumsum": [_TENSOR] * 4 + [_OPTIONS],
    "tw_mamba2_chunk_state": [_TENSOR] * 5,
    "tw_mamba2_state_passing": [_TENSOR] * 5,
    "tw_mamba2_bmm_chunk": [_TENSOR] * 3 + [ctypes.c_int32],
    "tw_mamba2_chunk_scan": [_TENSOR] * 7 + [_OPTIONS],
    "tw_mamba2_chunk_cumsum_backward": [_TENSOR] * 5 + [_OPTIONS],
    "tw_mamba2_chunk_state_backward": [_TENSOR] * 9,
    "tw_mamba2_state_passing_backward": [_TENSOR] * 7,
    "tw_mamba2_bmm_chunk_backward": [_TENSOR] * 5 + [ctypes.c_int32],
    "tw_mamba2_chunk_scan_backward": [_TENSOR] * 13 + [_OPTIONS],
}


def _places(name: str) -> list[pathlib.Path]:
    given = os.environ.get("TILEWAVE_LIBRARY")
    if given:  # a file, a folder, or a file next to the library
        path = pathlib.Path(given)
        if path.is_dir():
            return [path / name]
        return [path] if name == "libtilewave.so" else [path.parent / name]
    # In an installed package, or in a checkout that `make` built.
    return [_PACKAGE / "lib" / name, _PACKAGE.parents[1] / "build" / name]


def program() -> pathlib.Path:
    """The path of the command line's program. An ImportError lists the paths searched."""
    folders = [_PACKAGE / "bin", _PACKAGE.parents[1] / "build"]
    given = os.environ.get("TILEWAVE_LIBRARY")
    if given and os.path.isdir(given):
        folders.insert(0, pathlib.Path(given))
    return _existing("tilewave", [folder / "tilewave" for folder in folders])


def bundled_model() -> pathlib.Path:
    """The directory of the checkpoint that comes with the package: spoken English digits."""
    return _existing("digits", [_PACKAGE / "share/tilewave/models/digits", _PACKAGE.parents[1] / "assets/digits"])


def _existing(name: str, places: list[pathlib.Path]) -> pathlib.Path:
    """The first path that exists: in an installed package, or in a checkout built by `make`."""
    for path in places:
        if path.exists():
            return path
    raise ImportError(f"{name} was not found; looked for {', '.join(map(str, places))}")


def open_library(name: str) -> ctypes.CDLL:
    """The shared library with that file name. An ImportError lists the paths searched."""
    places = _places(name)
    for path in places:
        if path.is_file():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                raise ImportError(f"{path} cannot be loaded: {error}") from error
    looked = ", ".join(map(str, places))
    raise ImportError(f"{name} was not found; looked for {looked}. TILEWAVE_LIBRARY may name another file or folder.")


@functools.cache
def library() -> ctypes.CDLL:
    """libtilewave.so in the version of this package. An ImportError says where it was searched for, or which version was found."""
    loaded = open_library("libtilewave.so")
    try:
        loaded.tw_version.restype = ctypes.c_char_p
        loaded.tw_version.argtypes = []
        version = loaded.tw_version().decode()
        if version != __version__:
            raise ImportError(f"{loaded._name} is version {version}, but this package is {__version__}")
        loaded.tw_last_error.restype = ctypes.c_char_p
        loaded.tw_last_error.argtypes = []
        loaded.tw_set_gpu_target.restype = ctypes.c_int
        loaded.tw_set_gpu_target.argtypes = [ctypes.c_char_p]
        loaded.tw_set_cpu_threads.restype = ctypes.c_int
        loaded.tw_set_cpu_threads.argtypes = [ctypes.c_int32]
        loaded.tw_decode_plan.restype = ctypes.c_int
        loaded.tw_decode_plan.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int32)]
        for name, arguments in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes = [*arguments, _STREAM]
            function.restype = ctypes.c_int
    except AttributeError as error:
        raise ImportError(f"{loaded._name} is not version {__version__} of Tilewave: {error}") from error
    return loaded


def check(status: int, library: ctypes.CDLL, renamed: str = "") -> None:
    """Raises the exception for `status`, which is not 0, with the library's message. The library's argument `renamed` is called `out` here."""
    message = library.tw_last_error().decode()
    if renamed:
        message = re.sub(rf"\b{renamed}\b(?!\[)", "out", message)
    raise exception(status, message)


def exception(status: int, message: str) -> Exception:
    """The exception for `status`, which is not 0."""
    return _ERRORS.get(status, RuntimeError)(message)


def set_gpu_target(target: str) -> None:
    """Sets the target of GPU kernels for future calls in the whole process: "auto" (the default), "sm_90a" (Hopper), or "cuda" (any NVIDIA GPU since compute
    capability 8.0)."""
    status = library().tw_set_gpu_target(target.encode())
    if status:
        check(status, library())


def set_cpu_threads(threads: int) -> None:
    """Sets the number of threads of the CPU target in the whole process: 1 to 1024. The default is the cores that the process may use."""
    try:
        threads = operator.index(threads)
    except TypeError:
        raise TypeError(f"threads is {threads!r}; allowed: an integer") from None
    if not 1 <= threads <= 1024:
        raise ValueError(f"threads is {threads}; allowed: 1 to 1024")
    status = library().tw_set_cpu_threads(threads)
    if status:
        check(status, library())


def decode_plan(**problem: int) -> int:
    """tw_decode_plan() of a DecodeProblem's fields."""
    num_splits = ctypes.c_int32()
    status = library().tw_decode_plan(byref(DecodeProblem(**problem)), ctypes.byref(num_splits))
    if status:
        check(status, library())
    return num_splits.value


def bind(name: str, out: str = ""):
    """A function call(*arguments) for the library's function, whose output is called `out`. Loads the library at the first call."""
    function = None

    def call(*arguments):
        nonlocal function
        if function is None:
            function = getattr(library(), name)
        status = function(*arguments)
        if status:
            check(status, library(), out)

    return call
