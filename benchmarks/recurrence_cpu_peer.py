#!/usr/bin/env python3
"""Measures Tilewave's linear attention in f32 on one thread of a CPU against the chunked formulation in PyTorch.

    python3 benchmarks/recurrence_cpu_peer.py --json benchmarks/results/amd-epyc-avx2/recurrence_cpu_peer.json

PyTorch computes it in two ways, of which the faster one counts: all chunks at once, with a state for each, and one chunk after the other. The contenders take turns in
random order; a sample is one call, or as many as take 20 ms. Each case is first compared with PyTorch in float64. Exit codes: 0 done, 1 something failed or is missing, 2
wrong usage.
"""

import argparse
import os
import pathlib
import sys

import package
import records
from attention_cpu_peer import measure

CHUNK = 64
SHAPES = ((1, 2048, 8, 64), (1, 2048, 8, 128), (1, 4096, 16, 128))  # batch, time, heads, head dimension
WANTED = 2.0  # of PyTorch's rate


def in_chunks(x):
    """[batch, time, heads, ...] as [batch, heads, chunks, CHUNK, ...]."""
    return x.transpose(1, 2).unflatten(2, (-1, CHUNK))


def decays(g):
    """Of a chunk's steps: from its start, from each to each later one, and to its end."""
    import torch

    sums = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(~later, -float("inf")).exp()
    return sums.exp()[..., None], between, (sums[..., -1:] - sums).exp()[..., None]


def chunk_by_chunk(q, k, v, g):
    import torch

    q, k, v = (in_chunks(x) for x in (q * q.shape[-1] ** -0.5, k, v))
    later = torch.ones(CHUNK, CHUNK, dtype=q.dtype).tril()
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], dtype=q.dtype)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for i in range(q.shape[2]):
        a, b, c = q[:, :, i], k[:, :, i], v[:, :, i]
        if g is None:
            out[:, :, i] = (a @ b.mT * later) @ c + a @ state
            state = state + b.mT @ c
        else:
            from_start, between, to_end = decays(in_chunks(g)[:, :, i])
            out[:, :, i] = (a @ b.mT * between) @ c + (a * from_start) @ state
            state = state * from_start[..., -1:, :] + (b * to_end).mT @ c
    return out.flatten(2, 3).transpose(1, 2)


def all_chunks(q, k, v):
    import torch

    q, k, v = (in_chunks(x) for x in (q * q.shape[-1] ** -0.5, k, v))
    added = (k.mT @ v).cumsum(2)
    states = torch.cat([torch.zeros_like(added[:, :, :1]), added[:, :, :-1]], 2)
    return ((q @ k.mT).tril_() @ v + q @ states).flatten(2, 3).transpose(1, 2)


def run_case(ops, options, shared, shape, decay):
    import torch

    batch, time, heads, dim = shape
    name = f"{'retention' if decay else 'linear-attention'}-forward-b{batch}-s{time}-h{heads}-d{dim}"
    q, k, v = (torch.randn(*shape) for _ in range(3))
    g = torch.log1p(-torch.pow(2.0, -5 - torch.arange(heads))).expand(batch, time, heads).contiguous() if decay else None
    ours = ops.linear_attention(q, k, v, g=g)
    expected = chunk_by_chunk(q.double(), k.double(), v.double(), g.double() if decay else None)
    error = ((ours - expected).norm() / expected.norm()).item()
    if not error < 1e-6:
        raise RuntimeError(f"{name}: the relative error is {error:.1e}")
    contenders = [lambda: ops.linear_attention(q, k, v, g=g), lambda: chunk_by_chunk(q, k, v, g)]
    if not decay:
        contenders.append(lambda: all_chunks(q, k, v))
    samples = measure(contenders, 5 if options.quick else 15)
    fastest = min(samples[1:], key=lambda of_one: sorted(of_one)[len(of_one) // 2])
    gigaflop = 4 * batch * time * heads * dim * (dim + CHUNK) / 1e9
    return records.make_record(
        shared, name, "f32", "one-thread", "GFLOP/s", (gigaflop, samples[0]), ("pytorch", gigaflop, fastest), group="CPU"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=pathlib.Path, help="the libtilewave.so to measure (default: what the package tilewave finds)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file, as a list of records")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--commit", help="the commit to record (default: what git says)")
    options = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # before either library counts the cores
    try:
        import torch

        torch.set_num_threads(1)
        ops, library = package.load(options.library)
    except ImportError as error:
        sys.exit(f"recurrence_cpu_peer.py: {error}")
    shared = records.shared_on_cpu("recurrence", options.commit, library, torch)
    made, failures = [], 0
    with torch.no_grad():
        for decay in (False, True):
            for shape in SHAPES:
                try:
                    record = run_case(ops, options, shared, shape, decay)
                except RuntimeError as error:
                    failures += 1
                    print(f"FAILED: {error}", file=sys.stderr, flush=True)
                    continue
                made.append(record)
                missed = " MISSED" if record["ratio"] < WANTED else ""
                print(
                    f"  {record['case']:44} {record['ours']:7.1f} GFLOP/s  pytorch {record['peer_value']:7.1f}  {record['ratio']:.3f}{missed}",
                    flush=True,
                )
    if options.json and made:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        records.write(options.json, made, append=False)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
