#!/usr/bin/env python3
"""Measures Tilewave's attention on the CPU against PyTorch's scaled_dot_product_attention, in one process for each number of threads.

    python3 benchmarks/attention_cpu_peer.py --json benchmarks/results/amd-epyc-avx512/attention_cpu_peer.json

Both have the same cores: a process is bound to as many as it has threads. The contenders take turns in random order; a sample is one call, or as many as take
20 ms. Each case is first checked against a float64 reference on some rows. Exit codes: 0 done, 1 something failed or is missing, 2 wrong usage.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import time

import attention_work as work
import package
import records

HEADS = 8
SEQLENS = (1024, 2048, 4096, 8192)
HEAD_DIMS = (64, 128)
DTYPES = ("f32", "bf16")
WANTED = {"f32": 1.2}  # of PyTorch's rate; bf16 is reported
SAMPLE_S = 0.020


def mode_of(threads):
    return "one-thread" if threads == 1 else f"{threads} threads"


def measure(launches, samples):
    """Milliseconds per launch, a list of samples for each."""
    lengths = []
    for launch in launches:
        launch()
        begin = time.perf_counter()
        launch()
        lengths.append(max(1, round(SAMPLE_S / (time.perf_counter() - begin))))
    results = [[] for _ in launches]
    order = list(range(len(launches)))
    for _ in range(samples):
        random.shuffle(order)
        for i in order:
            begin = time.perf_counter()
            for _ in range(lengths[i]):
                launches[i]()
            results[i].append((time.perf_counter() - begin) * 1e3 / lengths[i])
    return results


def run_case(ops, options, shared, dtype_name, head_dim, seqlen, causal):
    import torch
    from accuracy import poisoned, some_rows
    from attention_reference import Features, wrong_rows
    from torch.nn import functional

    name = f"d{head_dim}-s{seqlen}-{'causal' if causal else 'full'}"
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype_name]
    q, k, v = (torch.randn(1, seqlen, HEADS, head_dim, dtype=dtype) for _ in range(3))
    o = poisoned(*q.shape, dtype=dtype, device=q.device)
    features = Features(causal=causal)
    _, lse = ops.attention(q, k, v, **features.arguments(), return_lse=True, out=o)
    wrong = []
    for head in random.sample(range(HEADS), 2):
        rows = some_rows(seqlen, random, q.device)
        wrong += wrong_rows(f"head {head}", *(t[0, :, head] for t in (q, k, v, o)), lse[0, head], rows, features, head)
    if wrong:
        raise RuntimeError("; ".join(wrong))
    by_head = [t.transpose(1, 2) for t in (q, k, v)]
    samples = measure(
        [
            lambda: ops.attention(q, k, v, causal=causal, out=o),
            lambda: functional.scaled_dot_product_attention(*by_head, is_causal=causal),
        ],
        5 if options.quick else 15,
    )
    gigaflop = work.teraflop(work.visible_pairs(seqlen, seqlen, causal), HEADS, head_dim) * 1e3
    return records.make_record(
        shared,
        name,
        dtype_name,
        mode_of(options.threads),
        "GFLOP/s",
        (gigaflop, samples[0]),
        ("pytorch", gigaflop, samples[1]),
        group="CPU",
    )


def run_cases(options):
    """All cases in this process, which has its threads: prints them, gives the records."""
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)  # before either library counts the cores
    try:
        import torch

        torch.set_num_threads(options.threads)
        ops, library = package.load(options.library)
    except ImportError as error:
        sys.exit(f"attention_cpu_peer.py: {error}")
    shared = records.shared_on_cpu("attention", options.commit, library, torch)
    made, failures = [], 0
    with torch.no_grad():
        for dtype in options.dtype:
            for head_dim in HEAD_DIMS:
                for seqlen in SEQLENS:
                    for causal in (False, True):
                        if options.case and not any(
                            part in f"d{head_dim}-s{seqlen}-{'causal' if causal else 'full'}" for part in options.case
                        ):
                            continue
                        try:
                            record = run_case(ops, options, shared, dtype, head_dim, seqlen, causal)
                        except RuntimeError as error:
                            failures += 1
                            print(f"{dtype} d{head_dim}-s{seqlen}: FAILED: {error}", file=sys.stderr, flush=True)
                            continue
                        made.append(record)
                        missed = " MISSED" if record["ratio"] < WANTED.get(dtype, 0) else ""
                        line = f"  {record['case']:18} {dtype:5} {record['mode']:12} {record['ours']:8.1f} GFLOP/s  pytorch {record['peer_value']:8.1f}"
                        print(f"{line}  {record['ratio']:.3f}{missed}", file=sys.stderr, flush=True)
    print(json.dumps(made))
    return 1 if failures else 0


def thread_counts(text):
    available = len(os.sched_getaffinity(0))
    counts = [available if part == "all" else int(part) for part in text.split(",")]
    if not all(1 <= count <= available for count in counts):
        raise argparse.ArgumentTypeError(f"{text}; this process may use {available} cores")
    return list(dict.fromkeys(counts))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=pathlib.Path, help="the libtilewave.so to measure (default: what the package tilewave finds)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file, as a list of records")
    parser.add_argument("--append", action="store_true", help="keep what the file has besides the cases that are measured")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--threads", type=thread_counts, default="1,all", help="of both: 1,all (default), or numbers")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="only this; may be repeated")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name contains this; may be repeated")
    parser.add_argument("--commit", help="the commit to record (default: what git says)")
    parser.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)  # one number of threads; records to standard output
    options = parser.parse_args()
    options.dtype = options.dtype or list(DTYPES)
    return options


def main():
    options = parse_arguments()
    if options.in_process:
        options.threads = options.threads[0]
        return run_cases(options)
    made, status = [], 0
    for threads in options.threads:
        print(mode_of(threads), flush=True)
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--threads", str(threads), "--in-process"],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        status |= done.returncode != 0
        made += json.loads(done.stdout or "[]")
    if options.json and made:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        records.write(options.json, made, options.append)
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
