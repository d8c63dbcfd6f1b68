#!/usr/bin/env python3
"""Measures tilewave.fla on a GPU against flash-linear-attention, whose functions have the same names and arguments, in one process and run.

    pip install flash-linear-attention
    python3 benchmarks/recurrence_peer.py --json benchmarks/results/nvidia-h200/recurrence_peer.json

Forward and backward passes in bf16. GB/s: the bytes of q, k, v and o, and backwards of their gradients too, each tensor counted once.

Needs PyTorch with CUDA, Triton and flash-linear-attention. Each case is first compared with the peer. A case that fails does not stop the others. Exit codes: 0 done,
1 something failed or is missing, 2 wrong usage. benchmarks/README.md explains the modes.
"""

import functools
import sys
from collections.abc import Callable
from typing import NamedTuple

import gpu_timing
import torch
from gpu_timing import Contender, Group, expected_seconds
from torch.nn import functional

SHAPES = ((8, 4096, 32, 128), (4, 4096, 32, 64), (1, 16384, 64, 128))  # batch, time, heads, dim
PEER = "flash-linear-attention"
WANTED = {"forward": 1.5, "backward": 1.4}
COMPILE_S = 12  # of the peer's kernels, which try configurations
GATES = 0.1  # the mean of -g


class Function(NamedTuple):
    """`module`: where flash-linear-attention has it. `gates(shape)` gives more arguments by name."""

    module: str
    more: Callable


def normal_gates(*shape):
    return -GATES * torch.rand(shape, device="cuda", dtype=torch.float32) * 2


FUNCTIONS = {
    "chunk_linear_attn": Function("linear_attn", lambda shape: {"normalize": False}),
    "chunk_retention": Function("retention", lambda shape: {}),
    "chunk_simple_gla": Function("simple_gla", lambda shape: {"g": normal_gates(*shape)}),
    "chunk_gated_delta_rule": Function(
        "gated_delta_rule", lambda shape: {"g": normal_gates(*shape), "beta": torch.rand(shape, device="cuda").bfloat16()}
    ),
}


def forward(function, q, k, v, more):
    return lambda: function(q, k, v, **more)[0]


def backward(function, q, k, v, more, d_o):
    """Of q, k and v, and of gates and beta where there are some."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    tensors = {name: t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for name, t in more.items()}
    with torch.enable_grad():
        o = function(*inputs, **tensors)[0]
    inputs += [t for t in tensors.values() if isinstance(t, torch.Tensor)]
    return lambda: torch.autograd.grad(o, inputs, d_o, retain_graph=True)


def run_case(run, name, ours, theirs, way, shape):
    """`ours` and `theirs`: makers of launches."""
    batch, time, heads, dim = shape
    gigabytes = 2e-9 * batch * time * heads * dim * (4 if way == "forward" else 7)
    launch = ours()
    contenders = [Contender("tilewave", launch, gigabytes), *run.peer(name, PEER, theirs, gigabytes, launch())]
    for mode in run.modes(["hot"]):
        for record in run.compare(name, "bf16", mode, "GB/s", contenders, run.memory_gbps, group="Python"):
            run.add(record, WANTED[way])


def run_function(function_name, run):
    import importlib

    import tilewave.fla

    spec = FUNCTIONS[function_name]
    try:
        theirs = getattr(importlib.import_module(f"fla.ops.{spec.module}"), function_name)
    except ImportError as error:
        run.failures += 1
        print(f"{function_name}: {error}", file=sys.stderr)
        return
    ours = getattr(tilewave.fla, function_name)
    for shape in SHAPES:
        batch, time, heads, dim = shape
        q, v, d_o = (run.normal(*shape) for _ in range(3))
        k = functional.normalize(run.normal(*shape).float(), dim=-1).bfloat16()  # with k of unit norm the delta rule's state is bounded
        more = spec.more((batch, time, heads))
        for way, make, last in (("forward", forward, ()), ("backward", backward, (d_o,))):
            name = f"{function_name}-{way}-b{batch}-s{time}-h{heads}-d{dim}"
            if run.wants(name):
                with run.case(name):
                    run_case(run, name, *(functools.partial(make, f, q, k, v, more, *last) for f in (ours, theirs)), way, shape)


def plan(quick):
    return len(SHAPES) * 2 * (COMPILE_S + expected_seconds("hot", 2, quick, 2.5))


GROUPS = {name: Group(name, functools.partial(run_function, name), plan) for name in FUNCTIONS}


if __name__ == "__main__":
    sys.exit(gpu_timing.main(__doc__.split("\n")[0], "recurrence", GROUPS, (PEER,)))
