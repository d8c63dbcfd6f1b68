"""Passes arrays of several kinds to the library as tensors, without copies.

A tw_tensor (tilewave.h) is passed as its bytes. Supported are NumPy arrays, PyTorch tensors on the CPU or on CUDA, and DLPack objects.
PyTorch is never imported here: a caller that has a tensor has imported it.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import operator
import struct
import sys
from typing import Any, Iterator

import numpy as np

Array = Any  #: numpy.ndarray, torch.Tensor, or an object with __dlpack__

# tw_dtype, by the names of NumPy, PyTorch and ml_dtypes
_DTYPES = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 2,
    "int32": 3,
    "bool": 4,
    "float8_e4m3fn": 5,
    "float8_e5m2": 6,
    "int8": 7,
    "int64": 8,
    "uint8": 9,
}
# DLPack's (code, bits)
_DLPACK_DTYPES = {(2, 32): 0, (2, 16): 1, (4, 16): 2, (0, 32): 3, (6, 8): 4, (0, 8): 7, (0, 64): 8, (1, 8): 9}
_NAMES = {code: name for name, code in _DTYPES.items()}

# A tw_tensor of each rank: data, dtype, cuda_device, rank, shape, strides; unused extents are 0.
_PACK = [struct.Struct(f"@Piii4x{n}q{8 * (4 - n)}x{n}q{8 * (4 - n)}x").pack for n in range(5)]

_torch_dtypes: dict = {}


def torch_of(array: Array):
    """The module torch if `array` is a PyTorch tensor, otherwise None."""
    torch = sys.modules.get("torch")  # not kept in a global variable, which would change while torch.compile() traces the first call
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def _torch_code(name: str, tensor) -> int:
    code = _torch_dtypes.get(tensor.dtype)
    if code is None:
        code = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
        if code is None:
            raise TypeError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(_DTYPES)}")
        _torch_dtypes[tensor.dtype] = code
    return code


def _pack(name: str, data: int, code: int, device: int, shape, strides) -> bytes:
    rank = len(shape)
    if rank > 4:
        raise ValueError(f"{name} has {rank} dimensions; allowed: up to 4")
    return _PACK[rank](data, code, device, rank, *shape, *strides)


def _of_torch(name: str, tensor, torch, written: bool) -> bytes:
    code = _torch_dtypes.get(tensor.dtype)
    if code is None:
        code = _torch_code(name, tensor)
    if written and tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} requires grad and would be written in place: call under torch.no_grad(), or give {name}.detach()")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is a tensor of layout {tensor.layout}; only strided ones are taken")
    if not (tensor.is_cpu or tensor.is_cuda):
        raise TypeError(f"{name} is on {tensor.device}; allowed: cpu and cuda")
    return _pack(name, tensor.data_ptr(), code, tensor.get_device(), tensor.shape, tensor.stride())  # get_device(): -1 on the CPU


def _of_numpy(name: str, array: np.ndarray, written: bool) -> bytes:
    code = _DTYPES.get(array.dtype.name)
    if code is None or not array.dtype.isnative:
        raise TypeError(f"{name} has dtype {array.dtype}; allowed: {', '.join(_DTYPES)}, in the machine's byte order")
    if written and not array.flags.writeable:
        raise ValueError(f"{name} is read-only")
    size = array.itemsize
    if any(stride % size for stride in array.strides):
        raise ValueError(f"{name} has strides of {array.strides} bytes; they must be multiples of its elements' {size}")
    return _pack(name, array.ctypes.data, code, -1, array.shape, [stride // size for stride in array.strides])


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_HOST, _CUDA = (1, 3), (2, 13)  # DLPack's devices: the CPU and pinned memory; CUDA and its managed memory


def _of_dlpack(name: str, array: Array) -> bytes:
    device_type, _ = array.__dlpack_device__()
    # On CUDA the producer makes the legacy default stream, which we use, wait for its own. The array outlives the call, so the capsule does not have to.
    capsule = array.__dlpack__(stream=1) if device_type in _CUDA else array.__dlpack__()
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    code = _DLPACK_DTYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if code is None:
        raise TypeError(f"{name} has DLPack's dtype ({tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes), which is not supported")
    if tensor.device_type not in _HOST + _CUDA:
        raise TypeError(f"{name} is on DLPack's device {tensor.device_type}; allowed: the CPU and CUDA")
    shape = tensor.shape[: tensor.ndim]
    if tensor.strides:
        strides = tensor.strides[: tensor.ndim]
    else:
        strides = [1] * len(shape)
        for n in range(len(shape) - 1, 0, -1):
            strides[n - 1] = strides[n] * shape[n]
    index = tensor.device_id if tensor.device_type in _CUDA else -1
    return _pack(name, (tensor.data or 0) + tensor.byte_offset, code, index, shape, strides)


def tensor(name: str, array: Array, written: bool = False) -> bytes:
    """The tw_tensor of an array. `written`: the library writes to it. TypeErrors and ValueErrors name the argument."""
    torch = torch_of(array)
    if torch is not None:
        return _of_torch(name, array, torch, written)
    if isinstance(array, np.ndarray):
        return _of_numpy(name, array, written)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _of_dlpack(name, array)
    raise TypeError(f"{name} is a {type(array).__name__}; NumPy arrays, PyTorch tensors and objects with __dlpack__ are taken")


def optional(name: str, array: Array | None, written: bool = False) -> bytes | None:
    return None if array is None else tensor(name, array, written)


def stream(array: Array) -> int | None:
    """PyTorch's current stream on the array's device; null, the legacy default stream, for other arrays."""
    torch = torch_of(array)
    if torch is not None and array.is_cuda:
        return torch._C._cuda_getCurrentRawStream(array.get_device())
    return None


# ctypes wraps integers that do not fit and cuts strings at the first NUL, so these functions check arguments first.


def integer(name: str, value: int, least: int, most: int) -> int:
    """`value` as an int from `least` to `most`; otherwise TypeError or ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; allowed: an integer") from None
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}; allowed: {least} to {most}")
    return number


def int32(name: str, value: int) -> int:
    return integer(name, value, -(1 << 31), (1 << 31) - 1)


def int64(name: str, value: int) -> int:
    return integer(name, value, -(1 << 63), (1 << 63) - 1)


def text(name: str, value: str) -> bytes:
    """`value` in UTF-8; otherwise TypeError or ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is a {type(value).__name__}; allowed: a str")
    return without_nul(name, value.encode())


def without_nul(name: str, value: bytes) -> bytes:
    if b"\0" in value:
        raise ValueError(f"{name} has a NUL character at byte {value.index(0)}; it must have none")
    return value


_check_contents = contextvars.ContextVar("tilewave.check_contents", default=False)


@contextlib.contextmanager
def check_contents(enabled: bool = True) -> Iterator[None]:
    """In `with tilewave.check_contents():`, or a decorated function, attention checks lengths, offsets and page numbers on a GPU.

    Each call then waits for the device and raises ValueError for wrong numbers, which are otherwise clamped to valid memory. On the CPU
    they are always checked. Applies to FlashAttention's functions and to tilewave.ops, where the argument check_contents overrides it.
    """
    token = _check_contents.set(enabled)
    try:
        yield
    finally:
        _check_contents.reset(token)


def checks_contents(argument: bool | None) -> bool:
    """The value of an operation's argument check_contents, or of the surrounding check_contents() if it is None."""
    return _check_contents.get() if argument is None else bool(argument)


def empty(like: Array, shape, dtype: str | None = None, name: str = "out") -> Array:
    """A new array of the same kind as `like`, on its device, with its dtype or the given one."""
    torch = torch_of(like)
    if torch is not None:
        return like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=getattr(torch, dtype))
    if isinstance(like, np.ndarray):
        if dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            import ml_dtypes  # installed if such arrays exist

            return np.empty(shape, getattr(ml_dtypes, dtype))
        return np.empty(shape, like.dtype if dtype is None else np.dtype(dtype))
    raise TypeError(f"{name} must be given: a new {type(like).__name__} cannot be made")


def full(like: Array, shape, value: float, dtype: str | None = None) -> Array:
    """empty(), filled with a value."""
    array = empty(like, shape, dtype)
    array.fill_(value) if torch_of(array) is not None else array.fill(value)
    return array


def require_dims(rank: int, **arrays: Array) -> None:
    """Raises ValueError for the first array with another number of dimensions."""
    for name, array in arrays.items():
        if len(array.shape) != rank:
            raise ValueError(f"{name} has {len(array.shape)} dimensions, shape {tuple(array.shape)}; allowed: {rank}")


def known_dtype(name: str, dtype: str) -> str:
    """Checks `dtype`: a name, or an object whose text is a name, such as torch.float16."""
    known = str(dtype).removeprefix("torch.")
    if known not in _DTYPES:
        raise ValueError(f"{name} is {dtype!r}; allowed: {', '.join(_DTYPES)}")
    return known


def dtype_name(array: Array) -> str:
    """The name of the dtype: float32, bfloat16 ..."""
    torch = torch_of(array)
    if torch is not None:
        return _NAMES[_torch_code("array", array)]
    return array.dtype.name
