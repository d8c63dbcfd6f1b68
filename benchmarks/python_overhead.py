#!/usr/bin/env python3
"""Host time of the Python package's operations on PyTorch tensors (a GPU's, where there is one), without the library's own: its functions are replaced by ones that do nothing.

    PYTHONPATH=python python3 benchmarks/python_overhead.py

Printed are microseconds of a call of tilewave.ops, of the same with `out` given, and of torch.ops.tilewave, through PyTorch's dispatcher. At most 15 are wanted of the first.
Exit codes: 0 done, 1 something is missing.
"""

import importlib
import statistics
import sys
import time

try:
    import torch
except ImportError:
    sys.exit("python_overhead.py: PyTorch is missing")
from tilewave import _dispatch, ops

CALLS, REPEATS = 2000, 15
WANTED_US = 15


def microseconds(call):
    """The median over REPEATS of a call's CPU time."""
    samples = []
    for _ in range(REPEATS):
        begin = time.process_time()
        for _ in range(CALLS):
            call()
        samples.append((time.process_time() - begin) / CALLS * 1e6)
    return statistics.median(samples)


def do_nothing(*arguments):
    return None


def main():
    for module, functions in (("attention", ("_attention", "_attention_decode")), ("rows", ("_rms_norm",)), ("products", ("_gemm",))):
        for function in functions:
            setattr(importlib.import_module(f"tilewave.ops.{module}"), function, do_nothing)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, x, w = (torch.randn(shape, device=device).bfloat16() for shape in ((1, 4, 2, 64), (4, 64), (64,)))
    of_q, of_x, product = torch.empty_like(q), torch.empty_like(x), x.new_empty(4, 4)
    seqlens = torch.tensor([4], dtype=torch.int32, device=device)
    compiled = _dispatch.compiled_ops()
    plain = (None, False, None, -1, -1, 0, 0, 0.0, None, None)  # numbers and tensors of the options
    rows = {
        "attention": (
            lambda: ops.attention(q, q, q, causal=True),
            lambda: ops.attention(q, q, q, causal=True, out=of_q),
            lambda: compiled.attention(q, q, q, *plain, 0.0, None, None, False, False),
        ),
        "attention_decode": (
            lambda: ops.attention_decode(q, q, q, seqlens=seqlens),
            lambda: ops.attention_decode(q, q, q, seqlens=seqlens, out=of_q),
            lambda: compiled.attention_decode_read(q, q, q, seqlens, *[None] * 9, False, 0, *plain, *[None] * 7, False),
        ),
        "rms_norm": (
            lambda: ops.rms_norm(x, w),
            lambda: ops.rms_norm(x, w, out=of_x),
            lambda: compiled.rms_norm(x, w, 1e-5, None),
        ),
        "gemm": (
            lambda: ops.gemm(x, x.T),
            lambda: ops.gemm(x, x.T, out=product),
            lambda: compiled.gemm(x, x.T, None, "none", None, 1.0, None, None, 0),
        ),
    }
    print(f"{device:18}{'tilewave.ops':>14}{'with out':>10}{'torch.ops':>11}   us")
    with torch.no_grad():
        for name, calls in rows.items():
            eager, into, dispatched = map(microseconds, calls)
            print(f"{name:18}{eager:14.1f}{into:10.1f}{dispatched:11.1f}{'   MISSED' if eager > WANTED_US else ''}")


if __name__ == "__main__":
    main()
