#!/usr/bin/env python3
"""Measures Tilewave's norms, softmax and SwiGLU on a GPU, called from Python, against PyTorch's kernels, Inductor's Triton kernels and a copy, in one process and run.

    python3 benchmarks/norms_peer.py --json benchmarks/results/nvidia-h200/norms_peer.json

A group of cases for each operation (--group softmax,swiglu picks some), in bf16: matrices that the memory's bandwidth bounds, and 1500 x 1280. GB/s: bytes read plus
bytes written, each tensor counted once; the copy moves as many.

Needs PyTorch with CUDA and a Hopper GPU. Each case is first checked: against float64 on some rows, against each peer on all. A case that fails does not stop the
others. Exit codes: 0 done, 1 something failed or is missing, 2 wrong usage. benchmarks/README.md explains the modes.
"""

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import gpu_timing
import torch
from accuracy import poisoned, some_rows, wrong_values
from gpu_timing import Contender, Group, expected_seconds, require_right
from torch.nn import functional

EPSILON = 1e-5
LARGE = ((32768, 4096), (8192, 16384), (131072, 1280))
SMALL = (1500, 1280)
PEERS = ("copy", "pytorch", "triton")
WANTED = {"copy": 0.90}  # of the large ones
COMPILE_S = 3


class Operation(NamedTuple):
    """Of so many matrices [rows, columns] and vectors [columns]. `ours(ops, *inputs, out)` writes the matrices `out`; `plain(*inputs)` gives them, by PyTorch."""

    matrices: int
    vectors: int
    outputs: int
    ours: Callable
    plain: Callable


def rms_norm(x, weight):
    return (functional.rms_norm(x, weight.shape, weight, EPSILON),)


def rms_norm_residual(x, residual, weight):
    h = x + residual
    return functional.rms_norm(h, weight.shape, weight, EPSILON), h


def layer_norm(x, weight, bias):
    return (functional.layer_norm(x, weight.shape, weight, bias, EPSILON),)


def softmax(x):
    return (torch.softmax(x, -1),)


def swiglu(gate, up):
    return (functional.silu(gate) * up,)


OPERATIONS = {
    "rms-norm": Operation(1, 1, 1, lambda ops, x, weight, out: ops.rms_norm(x, weight, epsilon=EPSILON, out=out[0]), rms_norm),
    "rms-norm-residual": Operation(
        2,
        1,
        2,
        lambda ops, x, residual, weight, out: ops.rms_norm(x, weight, epsilon=EPSILON, residual=residual, sum_out=out[1], out=out[0]),
        rms_norm_residual,
    ),
    "layer-norm": Operation(
        1, 2, 1, lambda ops, x, weight, bias, out: ops.layer_norm(x, weight, bias, epsilon=EPSILON, out=out[0]), layer_norm
    ),
    "softmax": Operation(1, 0, 1, lambda ops, x, out: ops.softmax(x, out=out[0]), softmax),
    "swiglu": Operation(2, 0, 1, lambda ops, gate, up, out: ops.swiglu(gate, up, out=out[0]), swiglu),
}


def check(run, operation, matrices, vectors, out):
    rows = some_rows(out[0].shape[0], run.rng, run.device)
    of_rows = [t[rows] for t in matrices]
    naive = operation.plain(*of_rows, *vectors)
    reference = operation.plain(*(t.double() for t in (*of_rows, *vectors)))
    wrong = []
    for index, (result, in_dtype, in_double) in enumerate(zip(out, naive, reference)):
        wrong += wrong_values(f"output {index}", result[rows], in_dtype, in_double)
    require_right(wrong)


def copy_of(run, elements):
    """A launch that copies so many."""
    source = run.normal(elements)
    return functools.partial(torch.empty_like(source).copy_, source)


def run_case(run, name, operation, rows, columns):
    matrices = [run.normal(rows, columns) for _ in range(operation.matrices)]
    vectors = [run.normal(columns) for _ in range(operation.vectors)]
    out = [poisoned(rows, columns, dtype=matrices[0].dtype, device=run.device) for _ in range(operation.outputs)]
    elements = rows * columns * (operation.matrices + operation.outputs) + columns * operation.vectors
    gigabytes = 2e-9 * elements

    def first_result(function):
        launch = functools.partial(function, *matrices, *vectors)
        return lambda: launch()[0]

    ours = functools.partial(operation.ours, run.ops, *matrices, *vectors, out)
    ours()
    check(run, operation, matrices, vectors, out)
    contenders = [Contender("tilewave", ours, gigabytes)]
    if "copy" not in run.options.skip_peer:
        contenders.append(Contender("copy", copy_of(run, elements // 2), gigabytes))
    contenders += run.peer(name, "pytorch", lambda: first_result(operation.plain), gigabytes, out[0])
    contenders += run.peer(name, "triton", lambda: first_result(gpu_timing.compiled(operation.plain)), gigabytes, out[0])
    for mode in run.modes([mode_of(rows, columns)]):
        for record in run.compare(name, "bf16", mode, "GB/s", contenders, run.memory_gbps, group="Python"):
            run.add(record, WANTED.get(record["peer"]) if mode == "hot" else None)


def mode_of(rows, columns):
    return "graph" if (rows, columns) == SMALL else "hot"


def run_operation(operation_name, run):
    for rows, columns in (*LARGE, SMALL):
        name = f"{operation_name}-{rows}x{columns}"
        if run.wants(name):
            with run.case(name):
                run_case(run, name, OPERATIONS[operation_name], rows, columns)


def plan(quick):
    return sum(1 + COMPILE_S + expected_seconds(mode_of(*shape), 4, quick, 0.01 if shape == SMALL else 0.3) for shape in (*LARGE, SMALL))


GROUPS = {name: Group(name, functools.partial(run_operation, name), plan) for name in OPERATIONS}


if __name__ == "__main__":
    sys.exit(gpu_timing.main(__doc__.split("\n")[0], "norm", GROUPS, PEERS))
