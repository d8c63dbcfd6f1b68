#!/usr/bin/env python3
"""Measures tilewave.fla against flash-linear-attention and tilewave.mamba_ssm against mamba_ssm, whose functions have the same names and arguments.

    pip install flash-linear-attention
    python3 benchmarks/recurrence_peer.py --json benchmarks/results/nvidia-h200/recurrence_peer.json

    pip download mamba-ssm --no-deps --no-binary :all: --no-build-isolation && tar xf mamba_ssm-*.tar.gz
    PYTHONPATH=$(echo mamba_ssm-*/) python3 benchmarks/recurrence_peer.py --group mamba_chunk_scan_combined

Forward and backward passes in bf16, both in one process and run. GB/s: the bytes of all inputs and results, each tensor counted once.

A group is one function: the layer that matters most, and as `-more` other shapes. What takes long is the peers' compilation: before the first launch Triton tries every
configuration of every kernel. Its cache keeps what is compiled, so a second run of a group takes seconds.

Needs PyTorch with CUDA, Triton, and the peers of the groups. Of mamba_ssm only Triton kernels are used, so its sources will do: nothing of it has to be compiled. Each case is first
compared with the peer. A case that fails does not stop the others. On Hopper GPUs with a Triton from 3.4.0 to 3.7.0 flash-linear-attention refuses the gradients of
chunk_simple_gla and chunk_gated_delta_rule, because they would be wrong: these cases say so and have no peer. Exit codes: 0 done, 1 something failed or is missing, 2 wrong
usage. benchmarks/README.md explains the modes.
"""

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import NamedTuple

import gpu_timing
import torch
from gpu_timing import Contender, Group, expected_seconds
from torch.nn import functional

WANTED = {"forward": 1.5, "backward": 1.4}
MAMBA2_WANTED = {"forward": 1.4, "backward": 1.3}
FLA, MAMBA_SSM = "flash-linear-attention", "mamba_ssm"

SHAPES = ((8, 4096, 32, 128), (4, 4096, 32, 64), (1, 16384, 64, 128))  # batch, time, heads, dim
# batch, time, heads, groups: layers of Mamba-2 2.7B and of Codestral Mamba, and one long sequence
MAMBA2_SHAPES = ((8, 4096, 80, 1), (8, 4096, 128, 8), (1, 65536, 80, 1))
HEADDIM, DSTATE, CHUNK = 64, 128, 256
GATES = 0.1  # the mean of -g


class Function(NamedTuple):
    """A function of tilewave.fla. `module`: where flash-linear-attention has it. `more(run, batch, time, heads, dim)` gives the arguments after q, k and v. `compile_s`: about what
    the peer takes for the first launch forward and backward."""

    module: str
    more: Callable
    compile_s: tuple[float, float]


def normal_gates(run, *shape):
    return -2 * GATES * torch.rand(shape, device=run.device)


def betas(run, *shape):
    return torch.rand(shape, device=run.device).bfloat16()


FUNCTIONS = {
    "chunk_linear_attn": Function("linear_attn", lambda run, *shape: {"normalize": False}, (10, 25)),
    "chunk_retention": Function("retention", lambda run, *shape: {}, (10, 25)),
    "chunk_simple_gla": Function("simple_gla", lambda run, *shape: {"g": normal_gates(run, *shape[:3])}, (10, 5)),
    "chunk_gated_delta_rule": Function(
        "gated_delta_rule", lambda run, *shape: {"g": normal_gates(run, *shape[:3]), "beta": betas(run, *shape[:3])}, (20, 15)
    ),
    "chunk_kda": Function("kda", lambda run, *shape: {"g": normal_gates(run, *shape), "beta": betas(run, *shape[:3])}, (25, 45)),
}
MAMBA2_COMPILE_S = (30, 50)  # other shapes take the same kernels


def fla_operands(more, run, shape):
    """The arguments by name, and the output's gradient."""
    q, v, d_o = (run.normal(*shape) for _ in range(3))
    k = functional.normalize(run.normal(*shape).float(), dim=-1).bfloat16()  # with k of unit norm the delta rule's state is bounded
    return {"q": q, "k": k, "v": v, **more(run, *shape)}, d_o


def mamba2_operands(run, shape):
    """The same, with values as a layer has them before it is trained: A from -16 to -1, step sizes from 0.001 to 0.1."""
    batch, time, heads, groups = shape
    x, d_o = (run.normal(batch, time, heads, HEADDIM) for _ in range(2))
    b, c = (run.normal(batch, time, groups, DSTATE) for _ in range(2))
    sizes = 0.001 * 100 ** torch.rand(heads, device=run.device)
    return {
        "x": x,
        "dt": 0.5 * run.normal(batch, time, heads),
        "A": -(1 + 15 * torch.rand(heads, device=run.device)),
        "B": b,
        "C": c,
        "chunk_size": CHUNK,
        "D": torch.ones(heads, device=run.device),
        "dt_bias": torch.log(torch.expm1(sizes)),
        "dt_softplus": True,
    }, d_o


def forward(function, arguments, d_o):
    def launch():
        result = function(**arguments)
        return result[0] if isinstance(result, tuple) else result

    return launch


def backward(function, arguments, d_o):
    """Of all tensors."""
    inputs = {name: t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    with torch.enable_grad():
        o = forward(function, inputs, d_o)()
    tensors = [t for t in inputs.values() if isinstance(t, torch.Tensor)]
    return lambda: torch.autograd.grad(o, tensors, d_o, retain_graph=True)


def gigabytes(way, arguments, d_o):
    inputs = sum(t.nbytes for t in arguments.values() if isinstance(t, torch.Tensor))
    return 1e-9 * ((inputs if way == "forward" else 2 * inputs) + d_o.nbytes)


def run_function(ours, find_theirs, peer, operands, name_of, shapes, wanted, run):
    """Both ways for all shapes. `ours`: tilewave's function; `find_theirs` imports the peer's; `operands(run, shape)`; `name_of(way, shape)`."""
    try:
        theirs = find_theirs()
    except ImportError as error:
        run.failures += 1
        print(f"{ours.__name__}: {error}", file=sys.stderr)
        return
    for shape in shapes:
        for way, make in (("forward", forward), ("backward", backward)):
            name = name_of(way, shape)
            if not run.wants(name):
                continue
            with run.case(name):
                given = operands(run, shape)
                work, launch = gigabytes(way, *given), make(ours, *given)
                contenders = [
                    Contender("tilewave", launch, work),
                    *run.peer(name, peer, functools.partial(make, theirs, *given), work, launch()),
                ]
                for mode in run.modes(["hot"]):
                    for record in run.compare(name, "bf16", mode, "GB/s", contenders, run.memory_gbps, group="Python"):
                        run.add(record, wanted[way])


def run_fla(name, shapes, run):
    import tilewave.fla

    spec = FUNCTIONS[name]
    run_function(
        getattr(tilewave.fla, name),
        lambda: getattr(importlib.import_module(f"fla.ops.{spec.module}"), name),
        FLA,
        functools.partial(fla_operands, spec.more),
        lambda way, shape: "{}-{}-b{}-s{}-h{}-d{}".format(name, way, *shape),
        shapes,
        WANTED,
        run,
    )


@functools.cache
def mamba_ssm_function():
    """mamba_ssm's scan, without the package's __init__.py, which imports compiled extensions that the scan does not use."""
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise ImportError("mamba_ssm was not found; PYTHONPATH may name a folder with its sources")
    package = types.ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["mamba_ssm"] = package
    return importlib.import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined


def run_mamba2(shapes, run):
    from tilewave.mamba_ssm import mamba_chunk_scan_combined

    name = "mamba_chunk_scan_combined-{}-b{}-s{}-h{}-g{}-p{}-n{}"
    run_function(
        mamba_chunk_scan_combined,
        mamba_ssm_function,
        MAMBA_SSM,
        mamba2_operands,
        lambda way, shape: name.format(way, *shape, HEADDIM, DSTATE),
        shapes,
        MAMBA2_WANTED,
        run,
    )


def plan(compile_s, shapes, quick):
    return sum(compile_s) + shapes * 2 * expected_seconds("hot", 2, quick, 5)


def groups():
    """The first shape of each function, and the others. Of flash-linear-attention each shape has kernels of its own."""
    result = {}

    def add(name, run, shapes, compile_s, compile_more_s):
        for suffix, of_group, seconds in (("", shapes[:1], compile_s), ("-more", shapes[1:], compile_more_s)):
            result[name + suffix] = Group(name, functools.partial(run, of_group), functools.partial(plan, seconds, len(of_group)))

    for name, spec in FUNCTIONS.items():
        add(name, functools.partial(run_fla, name), SHAPES, spec.compile_s, [s * (len(SHAPES) - 1) for s in spec.compile_s])
    add("mamba_chunk_scan_combined", run_mamba2, MAMBA2_SHAPES, MAMBA2_COMPILE_S, MAMBA2_COMPILE_S)
    return result


if __name__ == "__main__":
    sys.exit(gpu_timing.main(__doc__.split("\n")[0], "recurrence", groups(), (FLA, MAMBA_SSM)))
