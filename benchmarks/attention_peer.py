#!/usr/bin/env python3
"""Measures Tilewave's attention on a GPU, in one process and run with what it is held against.

    python3 benchmarks/attention_peer.py --library build/libtilewave.so --json benchmarks/results/nvidia-h200/attention_peer.json

Groups of cases (--group a,b picks some; B S = 16384 and H D = 2048 in the first three):
  a  plain forward passes against PyTorch's cuDNN and FlashAttention-2 kernels
  b  GQA, window, softcap, ALiBi, ragged sequences, f16: each against our own plain rate for the operations that it has
  c  head dimensions 96 and 192 against our own 128 and 256, and cuDNN
  d  decode from contiguous and paged caches against the bandwidth of a large read
  e  memory: a sequence of 131072

Needs PyTorch with CUDA and a Hopper GPU. Each case is first checked: against a float64 reference on some rows, in group a against cuDNN on all. A case that
fails does not stop the others. Exit codes: 0 done, 1 something failed or is missing, 2 wrong usage. benchmarks/README.md explains the modes.
"""

import argparse
import contextlib
import ctypes
import math
import os
import pathlib
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import attention_work as work
import records

try:
    import torch
    import torch.nn.functional as functional
    from attention_calls import Features, Tilewave, some_rows, wrong_rows
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    sys.exit(f"attention_peer.py: {error}")

TENSOR_CORE_TFLOPS = {"GH200": 989, "H200": 989, "H100 80GB HBM3": 989, "H100 PCIe": 756}  # dense bf16, NVIDIA's data sheets
MEMORY_GBPS = {"GH200": 4000, "H200": 4800, "H100 80GB HBM3": 3350, "H100 PCIe": 2000}  # the same
MODES = ("hot", "cool", "graph")
COOL_PAUSE_S = 0.040
COOL_BURST = 3
ROUNDS_IN_FLIGHT = 4
GRAPH_LAUNCHES = 20
GRAPH_MS = 20  # fewer launches where these take longer

TOKENS = 16384  # batch * seqlen
WIDTH = 2048  # heads * head_dim
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash_attention_2": SDPBackend.FLASH_ATTENTION}
RAGGED = (985, 3001, 66, 512, 1777, 129, 2050, 333, 1408, 700, 2500, 192, 896, 300, 1023, 512)  # 16384 tokens
WINDOW = 1024
SOFTCAP = 30.0
MEMORY_SEQLEN = 131072

CACHE_HEADS, CACHE_KV_HEADS, CACHE_HEAD_DIM, PAGE = 32, 8, 128, 64
CACHE_BATCHES = (1, 4, 16, 64)
CACHE_SEQLENS = (8192, 32768, 131072)
MOST_CACHE_BYTES = 60e9
COLD_BYTES = 512e6  # so much memory takes turns that an L2 cache of 60 MB keeps nothing
READ_ELEMENTS = 1 << 30  # f32: 4.3 GB


# --- Timing, as in benchmarks/harness.cpp


@dataclass
class Contender:
    """`launch` enqueues one execution, `work` is what it does, in the record's unit times seconds."""

    name: str
    launch: Callable[[], object]
    work: float


def burst(launch, launches):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(launches):
        launch()
    end.record()
    return begin, end, launches


def milliseconds(timed):
    begin, end, launches = timed
    end.synchronize()
    return begin.elapsed_time(end) / launches


def synchronize():
    torch.cuda.synchronize()


def capture(launch, launches):
    """Gives a function that replays so many launches."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        for _ in range(launches):
            launch()
    return graph.replay


def one_launch(launch):
    """Milliseconds, after a launch that compiles and loads."""
    launch()
    synchronize()
    return max(milliseconds(burst(launch, 3)), 1e-3)


def measure_hot(launches, samples, warm_up_s):
    lengths = [max(1, math.ceil(2 / one_launch(launch))) for launch in launches]
    deadline = time.monotonic() + warm_up_s
    while time.monotonic() < deadline:
        for launch, length in zip(launches, lengths):
            burst(launch, length)
        synchronize()
    results = [[] for _ in launches]
    in_flight = []
    order = list(range(len(launches)))
    for _ in range(samples):
        random.shuffle(order)
        in_flight += [(i, burst(launches[i], lengths[i])) for i in order]
        while len(in_flight) > ROUNDS_IN_FLIGHT * len(launches):
            i, timed = in_flight.pop(0)
            results[i].append(milliseconds(timed))
    for i, timed in in_flight:
        results[i].append(milliseconds(timed))
    return results


def measure_cool(launches, samples):
    for launch in launches:
        launch()
    results = [[] for _ in launches]
    order = list(range(len(launches)))
    for _ in range(samples):
        random.shuffle(order)
        for i in order:
            synchronize()
            time.sleep(COOL_PAUSE_S)
            launches[i]()  # not timed: the host enqueues the burst behind it
            results[i].append(milliseconds(burst(launches[i], COOL_BURST)))
    return results


def measure_graph(launches, samples, warm_up_s):
    counts = [max(1, min(GRAPH_LAUNCHES, int(GRAPH_MS / one_launch(launch)))) for launch in launches]
    replays = [capture(launch, count) for launch, count in zip(launches, counts)]
    results = measure_hot(replays, samples, warm_up_s)
    synchronize()
    return [[sample / count for sample in of_one] for of_one, count in zip(results, counts)]


def measure(mode, contenders, quick):
    """Milliseconds per launch, a list of samples for each contender."""
    launches = [contender.launch for contender in contenders]
    if mode == "cool":
        return measure_cool(launches, 9 if quick else 40)
    return {"hot": measure_hot, "graph": measure_graph}[mode](launches, 11 if quick else 60, 0.1 if quick else 0.3)


def expected_seconds(mode, contenders, quick, launch_ms=0.5):
    """About what measure() takes."""
    if mode == "cool":
        return (9 if quick else 40) * contenders * (COOL_PAUSE_S + 4e-3 * launch_ms)
    sample_ms = max(2, launch_ms) if mode == "hot" else min(GRAPH_MS, GRAPH_LAUNCHES * launch_ms) + launch_ms
    return (0.1 if quick else 0.3) + ((11 if quick else 60) + 5) * contenders * sample_ms * 1e-3 + (0.2 * contenders if mode == "graph" else 0)


# --- The run


class WrongResult(Exception):
    pass


class Run:
    """What the user asked for, and what came of it."""

    def __init__(self, options, tilewave, device, shared, seed):
        self.options = options
        self.tilewave = tilewave
        self.device = device
        self.shared = shared
        self.rng = random.Random(seed)
        self.records = []
        self.failures = 0
        self.missed = []
        self.device_lost = False
        name = shared["device"]
        self.tflops = next((value for part, value in TENSOR_CORE_TFLOPS.items() if part in name), None)
        self.memory_gbps = next((value for part, value in MEMORY_GBPS.items() if part in name), None)

    @property
    def stream(self):
        return torch.cuda.current_stream().cuda_stream

    def wants(self, name):
        return not self.options.case or any(part in name for part in self.options.case)

    def modes(self, wanted):
        return [mode for mode in wanted if mode in self.options.modes]

    @contextlib.contextmanager
    def case(self, name):
        """What goes wrong inside is reported and counted, and the next case goes on."""
        try:
            yield
            synchronize()
        except Exception as error:  # whatever it is, the other cases are worth having
            self.failures += 1
            print(f"{name}: FAILED: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            if not isinstance(error, (RuntimeError, WrongResult)):
                traceback.print_exc()
        try:
            synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as error:
            self.device_lost = True  # an error that stays: nothing else can run in this process
            print(f"{name}: the device is lost: {error}", file=sys.stderr, flush=True)

    def add(self, record, wanted=None):
        """`wanted`: the least ratio that is asked for."""
        self.records.append(record)
        cells = f"  {record['case']:22} {record['dtype']:5} {record['mode']:5} {record['ours']:8.1f} {record['unit']}"
        if record["peer"]:
            cells += f"  {record['peer']:18} {record['peer_value']:8.1f}  {record['ratio']:.3f}"
        if "ratio_by_blocks" in record:
            cells += f"  by blocks {record['ratio_by_blocks']:.3f}"
        if wanted is not None:
            missed = record["ratio"] < wanted
            cells += f"  wanted {wanted:.2f}{' MISSED' if missed else ''}"
            if missed:
                self.missed.append(cells.strip())
        print(cells, flush=True)

    def normal(self, *shape, dtype=torch.bfloat16):
        return torch.randn(shape, dtype=dtype, device=self.device)


def require_right(wrong):
    if wrong:
        raise WrongResult("; ".join(wrong))


# --- Calls of ours


def poisoned(*shape, dtype, device):
    return torch.full(shape, math.nan, dtype=dtype, device=device)


class Prefill:
    """One call on random tensors: [batch, seqlen, heads, head_dim], or packed sequences of the given lengths."""

    def __init__(self, run, head_dim, seqlen, heads, features=Features(), dtype=torch.bfloat16, kv_heads=None, batch=None, lengths=None):
        kv_heads = kv_heads or heads
        self.run, self.features = run, features
        self.lengths = lengths or [seqlen] * (batch or TOKENS // seqlen)
        leading = (sum(lengths),) if lengths else (len(self.lengths), seqlen)
        self.q = run.normal(*leading, heads, head_dim, dtype=dtype)
        self.k, self.v = (run.normal(*leading, kv_heads, head_dim, dtype=dtype) for _ in range(2))
        self.o = poisoned(*self.q.shape, dtype=dtype, device=run.device)
        self.cu_seqlens = None
        if lengths:
            starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
            self.cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=run.device)
        self.launch = self.call(self.o)
        self.tflop, self.touched_tflop = (
            work.teraflop(sum(pairs(n, n, features.causal, features.window_left) for n in self.lengths), heads, head_dim)
            for pairs in (work.visible_pairs, work.touched_pairs)
        )

    def call(self, o, lse=None):
        if self.cu_seqlens is not None:
            return self.run.tilewave.varlen(self.q, self.k, self.v, o, self.cu_seqlens, self.features, lse, self.run.stream)
        return self.run.tilewave.attention(self.q, self.k, self.v, o, self.features, lse, self.run.stream)

    def contender(self, name):
        return Contender(name, self.launch, self.tflop)

    def check(self):
        """Throws WrongResult: the accuracy rule on some rows of some heads, with LSE; without it the output must be the same."""
        heads, group = self.q.shape[-2], self.q.shape[-2] // self.k.shape[-2]
        o = poisoned(*self.o.shape, dtype=self.o.dtype, device=self.run.device)
        packed = self.cu_seqlens is not None
        lse_shape = (heads, self.q.shape[0]) if packed else (self.q.shape[0], heads, self.q.shape[1])
        lse = poisoned(*lse_shape, dtype=torch.float32, device=self.run.device)
        self.call(o, lse)()
        wrong = []
        picked = {0, len(self.lengths) - 1, *(self.run.rng.randrange(len(self.lengths)) for _ in range(2))}
        for sequence in sorted(picked):
            head = self.run.rng.randrange(heads)
            length = self.lengths[sequence]
            if packed:
                begin = sum(self.lengths[:sequence])
                at = slice(begin, begin + length)
                q, k, v, out = (t[at] for t in (self.q, self.k, self.v, o))
                of_lse = lse[head, at]
            else:
                q, k, v, out = (t[sequence] for t in (self.q, self.k, self.v, o))
                of_lse = lse[sequence, head]
            rows = some_rows(length, self.run.rng, self.run.device)
            of_kv = head // group
            where = f"sequence {sequence} head {head}"
            wrong += wrong_rows(where, q[:, head], k[:, of_kv], v[:, of_kv], out[:, head], of_lse, rows, self.features, head)
        self.launch()
        if not torch.equal(self.o, o):
            wrong.append("the output differs when LSE is not asked for")
        require_right(wrong)


def peer_attention(q, k, v, causal):
    """PyTorch's, on [B, H, S, D] views of the same memory. K and V have Q's number of heads."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def launch():
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return launch


def suffix(causal):
    return "causal" if causal else "full"


# --- a: plain forward passes


PLAIN_HEAD_DIMS, PLAIN_SEQLENS = (128, 64, 256), (512, 1024, 2048, 4096, 16384)


def plain_modes(seqlen):
    return ("hot", "cool", "graph") if seqlen <= 2048 else ("hot", "cool")


def plain_wanted(peer, head_dim, seqlen, mode):
    if peer == "flash_attention_2":
        return 2.0 if seqlen >= 4096 and head_dim != 64 else 1.5
    if seqlen >= 4096:
        return {64: 1.05, 128: 1.08, 256: 1.10}[head_dim]
    return 1.0 if mode == "graph" else None


def run_plain(run):
    for head_dim in PLAIN_HEAD_DIMS:
        for seqlen in PLAIN_SEQLENS:
            for causal in (False, True):
                name = f"d{head_dim}-s{seqlen}-{suffix(causal)}"
                if run.wants(name) and not run.device_lost:
                    with run.case(name):
                        run_plain_case(run, name, head_dim, seqlen, causal)


def run_plain_case(run, name, head_dim, seqlen, causal):
    ours = Prefill(run, head_dim, seqlen, WIDTH // head_dim, Features(causal=causal))
    ours.check()
    for peer, backend in PEERS.items():
        if peer in run.options.skip_peer:
            continue
        launch = peer_attention(ours.q, ours.k, ours.v, causal)
        with sdpa_kernel([backend]):
            try:
                peer_o = launch().transpose(1, 2)
            except RuntimeError as error:
                print(f"{name}: no {peer}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            difference = ((ours.o.float() - peer_o.float()).norm() / peer_o.float().norm()).item()
            if not difference <= 1e-2:
                raise WrongResult(f"differs from {peer} by {difference:.3g} (relative L2, allowed 0.01)")
            del peer_o
            for mode in run.modes(plain_modes(seqlen)):
                samples = measure(mode, [ours.contender("tilewave"), Contender(peer, launch, ours.tflop)], run.options.quick)
                record = records.make_record(
                    run.shared, name, "bf16", mode, "TFLOP/s", (ours.tflop, samples[0]), (peer, ours.tflop, samples[1]), run.tflops, group="plain"
                )
                run.add(record, plain_wanted(peer, head_dim, seqlen, mode))


def plan_plain(quick):
    runs = [(mode, 2) for seqlen in PLAIN_SEQLENS for mode in plain_modes(seqlen)]
    return 2 * len(PLAIN_HEAD_DIMS) * (len(PEERS) * sum(expected_seconds(mode, n, quick) for mode, n in runs) + 1.0 * len(PLAIN_SEQLENS) + 3)


# --- b: features


FEATURE_SEQLEN = 4096


def features_of(run, head_dim, causal):
    """By name, what Prefill takes besides."""
    heads = WIDTH // head_dim
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], dtype=torch.float32, device=run.device)
    variants = {
        "plain": {},
        "gqa4": {"kv_heads": heads // 4},
        "softcap": {"features": Features(causal=causal, softcap=SOFTCAP)},
        "alibi": {"features": Features(causal=causal, alibi_slopes=slopes)},
        "varlen": {"lengths": list(RAGGED)},
        "f16": {"dtype": torch.float16},
    }
    if causal:
        variants[f"window{WINDOW}"] = {"features": Features(causal=True, window_left=WINDOW)}
    return variants


def run_features(run):
    """All of one head dimension and mask in one measurement, with the plain call."""
    for head_dim in (128, 64):
        for causal in (False, True):
            calls = {}
            for feature, arguments in features_of(run, head_dim, causal).items():
                name = f"d{head_dim}-{feature}-{suffix(causal)}"
                if run.device_lost or (feature != "plain" and not run.wants(name)):
                    continue
                with run.case(name):
                    call = Prefill(run, head_dim, FEATURE_SEQLEN, WIDTH // head_dim, **{"features": Features(causal=causal), **arguments})
                    call.check()
                    calls[name] = call
            plain = f"d{head_dim}-plain-{suffix(causal)}"
            if plain in calls and len(calls) > 1:
                with run.case(f"d{head_dim}-features-{suffix(causal)}"):
                    measure_features(run, calls, plain)


def measure_features(run, calls, plain):
    for mode in run.modes(("hot", "cool")):
        samples = dict(zip(calls, measure(mode, [call.contender(name) for name, call in calls.items()], run.options.quick)))
        peer = calls[plain]
        for name, call in calls.items():
            if name == plain:
                continue
            record = records.make_record(
                run.shared,
                name,
                "f16" if call.q.dtype == torch.float16 else "bf16",
                mode,
                "TFLOP/s",
                (call.tflop, samples[name]),
                ("tilewave plain", peer.tflop, samples[plain]),
                run.tflops,
                group="features",
            )
            # A block that a mask cuts takes the time of a whole one: the same ratio with such blocks counted whole.
            record["ratio_by_blocks"] = round(record["ratio"] * (call.touched_tflop / call.tflop) / (peer.touched_tflop / peer.tflop), 4)
            run.add(record, 0.90)


def plan_features(quick):
    return 4 * (sum(expected_seconds(mode, 7, quick) for mode in ("hot", "cool")) + 6.5 * 3)


# --- c: head dimensions between


NEXT_SIZE = {96: 128, 192: 256}
BETWEEN_SEQLENS = (4096, 16384)


def run_between(run):
    for head_dim in NEXT_SIZE:
        for seqlen in BETWEEN_SEQLENS:
            for causal in (False, True):
                name = f"d{head_dim}-s{seqlen}-{suffix(causal)}"
                if run.wants(name) and not run.device_lost:
                    with run.case(name):
                        run_between_case(run, name, head_dim, seqlen, causal)


def run_between_case(run, name, head_dim, seqlen, causal):
    features = Features(causal=causal)
    larger = NEXT_SIZE[head_dim]
    ours = Prefill(run, head_dim, seqlen, WIDTH // head_dim, features)  # 21 heads of 96, 10 of 192
    next_size = Prefill(run, larger, seqlen, WIDTH // larger, features)
    ours.check()
    contenders = [ours.contender("tilewave"), next_size.contender("tilewave next size")]
    launch = peer_attention(ours.q, ours.k, ours.v, causal)
    with sdpa_kernel([PEERS["cudnn"]]):
        if "cudnn" not in run.options.skip_peer:
            try:
                launch()
                contenders.append(Contender("cudnn", launch, ours.tflop))
            except RuntimeError as error:
                print(f"{name}: no cudnn: {str(error).splitlines()[0]}", file=sys.stderr)
        for mode in run.modes(("hot", "cool")):
            samples = measure(mode, contenders, run.options.quick)
            for contender, of_peer in zip(contenders[1:], samples[1:]):
                record = records.make_record(
                    run.shared,
                    name,
                    "bf16",
                    mode,
                    "TFLOP/s",
                    (ours.tflop, samples[0]),
                    (contender.name, contender.work, of_peer),
                    run.tflops,
                    group="head dimensions between",
                )
                run.add(record, 0.85 if contender.name == "tilewave next size" else None)


def plan_between(quick):
    return 2 * len(NEXT_SIZE) * (len(BETWEEN_SEQLENS) * (sum(expected_seconds(mode, 3, quick) for mode in ("hot", "cool")) + 1) + 6)


# --- d: decode


def fastest_read(run):
    """A contender that reads 4.3 GB: the fastest of some reductions of PyTorch's and of cuBLAS's matrix times vector. work is GB."""
    x = torch.randn(READ_ELEMENTS, dtype=torch.float32, device=run.device)
    rows = x.view(-1, 8192)
    halves = x.view(torch.bfloat16).view(-1, 16384)
    vector, half_vector = run.normal(8192, dtype=torch.float32), run.normal(16384)
    ways = {
        "sum": lambda: torch.sum(x),
        "amax": lambda: torch.amax(x),
        "sum of rows": lambda: torch.sum(rows, 1),
        "sum of columns": lambda: torch.sum(rows, 0),
        "matrix times vector": lambda: torch.mv(rows, vector),
        "bf16 matrix times vector": lambda: torch.mv(halves, half_vector),
    }
    contenders = [Contender(name, launch, 4e-9 * READ_ELEMENTS) for name, launch in ways.items()]
    medians = [records.fraction(samples, 0.5) for samples in measure("hot", contenders, quick=True)]
    for contender, median in zip(contenders, medians):
        print(f"  read by {contender.name:26} {contender.work / median * 1e3:8.1f} GB/s")
    return min(zip(medians, contenders), key=lambda pair: pair[0])[1]


class Decode:
    """One query a sequence against caches of random numbers, contiguous or as shuffled pages of the same memory. So many sets of caches take turns that
    none is in the L2 cache when its turn comes."""

    def __init__(self, run, batch, seqlen):
        self.run, self.seqlen = run, seqlen
        self.bytes = work.cache_bytes(batch, seqlen, CACHE_KV_HEADS, CACHE_HEAD_DIM)
        self.q = run.normal(batch, 1, CACHE_HEADS, CACHE_HEAD_DIM)
        self.o = poisoned(*self.q.shape, dtype=self.q.dtype, device=run.device)
        shape = (batch, seqlen, CACHE_KV_HEADS, CACHE_HEAD_DIM)
        self.caches = [(run.normal(*shape), run.normal(*shape)) for _ in range(max(1, math.ceil(COLD_BYTES / self.bytes)))]
        self.seqlens = torch.full((batch,), seqlen, dtype=torch.int32, device=run.device)
        pages = batch * seqlen // PAGE
        self.block_table = torch.randperm(pages, device=run.device).to(torch.int32).view(batch, -1)

    def call(self, caches, paged, o, lse=None):
        if not paged:
            return self.run.tilewave.decode(self.q, *caches, o, self.seqlens, lse=lse, stream=self.run.stream)
        pages = [t.view(-1, PAGE, *t.shape[2:]) for t in caches]
        return self.run.tilewave.decode(self.q, *pages, o, self.seqlens, self.block_table, lse=lse, stream=self.run.stream)

    def contender(self, name, paged):
        calls = [self.call(caches, paged, self.o) for caches in self.caches]
        turn = 0

        def launch():
            nonlocal turn
            calls[turn]()
            turn = (turn + 1) % len(calls)

        return Contender(name, launch, self.bytes * 1e-9)

    def check(self, paged):
        batch, group = self.q.shape[0], CACHE_HEADS // CACHE_KV_HEADS
        o = poisoned(*self.o.shape, dtype=self.o.dtype, device=self.run.device)
        lse = poisoned(batch, CACHE_HEADS, 1, dtype=torch.float32, device=self.run.device)
        self.call(self.caches[0], paged, o, lse)()
        wrong = []
        for _ in range(6):
            b, head = self.run.rng.randrange(batch), self.run.rng.randrange(CACHE_HEADS)
            key, value = (t[b, :, head // group] for t in self.caches[0])
            if paged:
                where = self.block_table[b].long()
                key, value = (t.view(-1, PAGE, *t.shape[2:])[where, :, head // group].reshape(self.seqlen, -1) for t in self.caches[0])
            rows = torch.zeros(1, dtype=torch.int64, device=self.run.device)
            wrong += wrong_rows(f"sequence {b} head {head}", self.q[b, :, head], key, value, o[b, :, head], lse[b, head], rows, Features(), head)
        require_right(wrong)


def decode_sizes():
    for batch in CACHE_BATCHES:
        for seqlen in CACHE_SEQLENS:
            if work.cache_bytes(batch, seqlen, CACHE_KV_HEADS, CACHE_HEAD_DIM) <= MOST_CACHE_BYTES:
                yield batch, seqlen


def run_decode(run):
    cases = []
    for batch, seqlen in decode_sizes():
        name = f"decode-b{batch}-{seqlen // 1024}k"
        names = {paged: f"{name}-paged{PAGE}" if paged else name for paged in (False, True)}
        wanted = {paged: name for paged, name in names.items() if run.wants(name)}
        if wanted:
            cases.append((name, batch, seqlen, wanted))
    if not cases:
        return
    read = None
    with run.case("read bandwidth"):
        read = fastest_read(run)
    for name, batch, seqlen, wanted in cases:
        if read and not run.device_lost:
            with run.case(name):
                run_decode_case(run, Decode(run, batch, seqlen), wanted, read)


def run_decode_case(run, decode, wanted, read):
    right = []
    for paged, name in wanted.items():
        with run.case(name):
            decode.check(paged)
            right.append(decode.contender(name, paged))
    if not right:
        return
    for mode in run.modes(("hot", "graph")):
        samples = measure(mode, [read, *right], run.options.quick)
        for contender, ours in zip(right, samples[1:]):
            record = records.make_record(
                run.shared,
                contender.name,
                "bf16",
                mode,
                "GB/s",
                (contender.work, ours),
                ("read", read.work, samples[0]),
                run.memory_gbps,
                peer_variant=read.name,
                group="decode",
            )
            run.add(record, 0.85 if decode.bytes > 64e6 else None)


def plan_decode(quick):
    total = 5
    for batch, seqlen in decode_sizes():
        launch_ms = work.cache_bytes(batch, seqlen, CACHE_KV_HEADS, CACHE_HEAD_DIM) / 3.5e9
        total += 1 + sum(expected_seconds(mode, 3, quick, max(launch_ms, 0.3)) for mode in ("hot", "graph"))
    return total


# --- e: memory


def run_memory(run):
    """What a call takes of the device's memory besides its tensors: what is free while it runs and after it, against before."""
    name = f"memory-d128-s{MEMORY_SEQLEN}-causal"
    if not run.wants(name) or run.device_lost:
        return
    with run.case(name):
        Prefill(run, 128, 1024, 1, Features(causal=True)).launch()  # compiles and loads the kernel
        heads = WIDTH // 128
        call = Prefill(run, 128, MEMORY_SEQLEN, heads, Features(causal=True), batch=1)
        synchronize()
        torch.cuda.empty_cache()
        before, total = torch.cuda.mem_get_info()
        begin, end, _ = burst(call.launch, 1)
        least = before
        while not end.query():
            least = min(least, torch.cuda.mem_get_info()[0])
        after, _ = torch.cuda.mem_get_info()
        extra = before - min(least, after)
        allowed = 16 * heads * MEMORY_SEQLEN + (32 << 20)  # four numbers a row of each head, and what the driver sets aside
        scores = 2 * heads * MEMORY_SEQLEN**2
        print(f"  {name}: free before {before >> 20} MiB, least while it ran {least >> 20} MiB, after {after >> 20} MiB, of {total >> 20} MiB")
        print(f"  extra {extra / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f} MiB; the scores would be {scores >> 30} GiB")
        print(f"  {begin.elapsed_time(end):.1f} ms, {call.tflop / begin.elapsed_time(end) * 1e3:.1f} TFLOP/s")
        call.check()
        if extra > allowed:
            raise WrongResult(f"took {extra} bytes, allowed {allowed}")
        record = records.make_record(run.shared, name, "bf16", "once", "MiB", (1, [1]), group="memory", limit=round(allowed / 2**20, 1))
        record.update(ours=round(extra / 2**20, 1), spread={"ours": None, "peer": None}, time_us=records.rounded(begin.elapsed_time(end) * 1e3))
        run.records.append(record)


GROUPS = {
    "a": ("plain forward passes", run_plain, plan_plain),
    "b": ("features", run_features, plan_features),
    "c": ("head dimensions between", run_between, plan_between),
    "d": ("decode", run_decode, plan_decode),
    "e": ("memory", run_memory, lambda quick: 6),
}


# --- The program


def version_text(number):
    return f"{number // 1000}.{number % 1000 // 10}"


def find_versions(library):
    driver = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
    cudnn = torch.backends.cudnn.version() or 0
    return {
        "driver": version_text(driver.value),
        "torch": torch.__version__,
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "nvrtc": (records.library_devices(library).get("nvrtc") or "").split(" ")[0],
    }


def listed(allowed):
    def parse(text):
        chosen = text.split(",")
        if not set(chosen) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text}; allowed: {','.join(allowed)}")
        return chosen

    return parse


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=pathlib.Path, default=records.ROOT / "build/libtilewave.so", help="default: build/libtilewave.so")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file, as a list of records")
    parser.add_argument("--append", action="store_true", help="keep what the file has besides the cases that are measured")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--group", type=listed(GROUPS), default=list(GROUPS), help=f"of {','.join(GROUPS)} (default: all)")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name contains this; may be repeated")
    parser.add_argument("--modes", type=listed(MODES), default=list(MODES), help=f"of {','.join(MODES)} (default: each case's)")
    parser.add_argument("--skip-peer", action="append", default=[], choices=list(PEERS), help="do not measure this peer")
    parser.add_argument("--check-only", action="store_true", help="check, do not measure")
    parser.add_argument("--commit", help="the commit to record (default: what git says)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which the process ends itself, in case a kernel hangs (default: 1800)")
    options = parser.parse_args()
    if options.check_only:
        options.modes = []
    return options


def give_up(seconds):
    print(f"attention_peer.py: not done after {seconds:g} s, giving up", file=sys.stderr, flush=True)
    os._exit(1)


def run_groups(run):
    for letter in run.options.group:
        what, run_group, plan = GROUPS[letter]
        if run.device_lost:
            break
        print(f"\n{letter}: {what}, all of it about {plan(run.options.quick):.0f} s", flush=True)
        begin = time.monotonic()
        run_group(run)
        print(f"{letter}: took {time.monotonic() - begin:.0f} s", flush=True)
        if run.options.json and run.records:
            records.write(run.options.json, run.records, run.options.append)


def main():
    options = parse_arguments()
    if not torch.cuda.is_available():
        print("attention_peer.py: PyTorch finds no CUDA device", file=sys.stderr)
        return 1
    try:
        tilewave = Tilewave(options.library)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.open("a").close()  # an unwritable path must not cost the run
    except (OSError, AttributeError) as error:
        print(f"attention_peer.py: {error}", file=sys.stderr)
        return 1
    watchdog = threading.Timer(options.timeout, give_up, [options.timeout])
    watchdog.daemon = True
    watchdog.start()

    device = torch.device("cuda", torch.cuda.current_device())
    shared = {
        "commit": options.commit or records.find_commit(),
        "date": records.now(),
        "versions": find_versions(options.library),
        "device": torch.cuda.get_device_name(device),
    }
    seed = random.SystemRandom().randrange(2**32)
    print(f"{shared['device']}, {shared['versions']}, seed {seed}")
    torch.manual_seed(seed)
    run = Run(options, tilewave, device, shared, seed)
    with torch.cuda.stream(torch.cuda.Stream(device)), torch.no_grad():
        run_groups(run)
    if run.missed:
        print("\nLess than wanted:\n  " + "\n  ".join(run.missed))
    if run.failures:
        print(f"attention_peer.py: {run.failures} failed", file=sys.stderr)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
