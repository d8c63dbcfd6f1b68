#!/usr/bin/env python3
"""Measures Tilewave's attention on a GPU, in one process and run with what it is held against.

    python3 benchmarks/attention_peer.py --json benchmarks/results/nvidia-h200/attention_peer.json

Groups of cases (--group a,b picks some; B S = 16384 and H D = 2048 in the first three):
  a  plain forward passes, the grid of FlashAttention 3's paper, against PyTorch's cuDNN, FlashAttention-2, memory-efficient and Triton kernels
  b  GQA, window, softcap, ALiBi, ragged sequences, f16: each against our own plain rate for the operations that it has; ragged ones against FlashAttention 2
  c  head dimensions 96 and 192 against our own 128 and 256, and cuDNN
  d  decode from contiguous and paged caches against the bandwidth of a large read; contiguous ones against FlashAttention 2
  e  memory: a sequence of 131072
  f  plain backward passes, against PyTorch's cuDNN and FlashAttention-2 kernels, and deterministic ones against ours that are not
  g  backward passes of GQA and of ragged sequences, each against our own plain rate, and ragged ones against FlashAttention 2
  h  e4m3 with descales against our own bf16, the transposition of V included; and the error on inputs with outliers, with and without a rotation of Q and K
  i  dropout, forward and backward, against our own calls without it

Needs PyTorch with CUDA and a Hopper GPU. Each case is first checked: against a float64 reference on some rows, against each peer on all. A case that fails does
not stop the others. Exit codes: 0 done, 1 something failed or is missing, 2 wrong usage. benchmarks/README.md explains the modes.
"""

import functools
import math
import sys

import attention_work as work
import gpu_timing
import records
import torch
from accuracy import poisoned, some_rows, wrong_values
from attention_reference import Features, softmax_rows, wrong_rows
from gpu_timing import COLD_BYTES, Contender, Group, WrongResult, burst, expected_seconds, require_right, synchronize, taking_turns
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

TOKENS = 16384  # batch * seqlen
WIDTH = 2048  # heads * head_dim
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash_attention_2": SDPBackend.FLASH_ATTENTION,
    "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PEERS = (*BACKENDS, "triton")
RAGGED = (985, 3001, 66, 512, 1777, 129, 2050, 333, 1408, 700, 2500, 192, 896, 300, 1023, 512)  # 16384 tokens
WINDOW = 1024
SOFTCAP = 30.0
MEMORY_SEQLEN = 131072

CACHE_HEADS, CACHE_KV_HEADS, CACHE_HEAD_DIM, PAGE = 32, 8, 128, 64
CACHE_BATCHES = (1, 4, 16, 64)
CACHE_SEQLENS = (8192, 32768, 131072)
MOST_CACHE_BYTES = 60e9
# The least cache for which a part of the bandwidth is asked for. In hot mode Python must enqueue a launch, up to 20 us, in less time than it takes.
LEAST_CACHE_BYTES = {"graph": 64e6, "hot": 256e6}
READ_ELEMENTS = 1 << 30  # f32: 4.3 GB


# --- Calls of ours


PLAIN = Features()


class Prefill:
    """One call on random tensors: [batch, seqlen, heads, head_dim], or packed sequences of the given lengths."""

    def __init__(self, run, head_dim, seqlen, heads, features=PLAIN, dtype=torch.bfloat16, kv_heads=None, batch=None, lengths=None):
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

    def call(self, o, return_lse=False):
        """A function that enqueues one execution, and gives what it wrote."""
        ops, arguments = self.run.ops, {**self.features.arguments(), "return_lse": return_lse, "out": o}
        if self.cu_seqlens is not None:
            return functools.partial(ops.attention_varlen, self.q, self.k, self.v, self.cu_seqlens, self.cu_seqlens, **arguments)
        return functools.partial(ops.attention, self.q, self.k, self.v, **arguments)

    def contender(self, name):
        return Contender(name, self.launch, self.tflop)

    def check(self):
        """Throws WrongResult: the accuracy rule on some rows of some heads, with LSE; without it the output must be the same."""
        heads, group = self.q.shape[-2], self.q.shape[-2] // self.k.shape[-2]
        o = poisoned(*self.o.shape, dtype=self.o.dtype, device=self.run.device)
        packed = self.cu_seqlens is not None
        _, lse = self.call(o, return_lse=True)()
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


# --- Calls of the peers', on the memory that ours uses. They give [.., seqlen, heads, head_dim] as ours


def sdpa(backend, q, k, v, causal):
    """scaled_dot_product_attention. K and V have Q's number of heads."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def launch():
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return launch


def flash_attention_2(q, k, v, causal=False, cu_seqlens=None, longest=None):
    """The operator behind scaled_dot_product_attention's flash backend: with fewer heads of keys than of queries, and of packed sequences."""
    seqlen_q, seqlen_k = (q.shape[1], k.shape[1]) if cu_seqlens is None else (longest, longest)
    arguments = (q, k, v, cu_seqlens, cu_seqlens, seqlen_q, seqlen_k, 0.0, causal, False)  # no dropout, no debug mask
    return lambda: torch.ops.aten._flash_attention_forward(*arguments)[0]


def triton_attention(q, k, v, causal):
    """flex_attention."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device=q.device) if causal else None
    attention = gpu_timing.compiled(flex_attention)
    return lambda: attention(q, k, v, block_mask=mask).transpose(1, 2)


def suffix(causal):
    return "causal" if causal else "full"


# --- a: plain forward passes


PLAIN_HEAD_DIMS, PLAIN_SEQLENS = (128, 64, 256), (512, 1024, 2048, 4096, 8192, 16384)
COMPILE_S = 8  # of flex_attention, for each shape


def triton_seqlens(quick):
    return (4096,) if quick else (1024, 4096, 16384)


def plain_modes(seqlen):
    return ("hot", "cool", "graph") if seqlen <= 2048 else ("hot", "cool")


def plain_wanted(peer, head_dim, seqlen, mode):
    if peer == "flash_attention_2":
        return 2.0 if seqlen >= 4096 and head_dim != 64 else 1.5
    if peer != "cudnn":
        return None
    if seqlen >= 4096:
        return {64: 1.05, 128: 1.08, 256: 1.10}[head_dim]
    return 1.0 if mode == "graph" else None


def run_plain(run):
    for head_dim in PLAIN_HEAD_DIMS:
        for seqlen in PLAIN_SEQLENS:
            for causal in (False, True):
                name = f"d{head_dim}-s{seqlen}-{suffix(causal)}"
                if run.wants(name):
                    with run.case(name):
                        run_plain_case(run, name, head_dim, seqlen, causal)


def run_plain_case(run, name, head_dim, seqlen, causal):
    ours = Prefill(run, head_dim, seqlen, WIDTH // head_dim, Features(causal=causal))
    ours.check()
    makers = {peer: functools.partial(sdpa, backend) for peer, backend in BACKENDS.items()}
    if seqlen in triton_seqlens(run.options.quick):
        makers["triton"] = triton_attention
    contenders = [ours.contender("tilewave")]
    for peer, make in makers.items():
        contenders += run.peer(name, peer, functools.partial(make, ours.q, ours.k, ours.v, causal), ours.tflop, ours.o)
    for mode in run.modes(plain_modes(seqlen)):
        for record in run.compare(name, "bf16", mode, "TFLOP/s", contenders, run.tflops, group="plain"):
            run.add(record, plain_wanted(record["peer"], head_dim, seqlen, mode))


def plan_plain(quick):
    total = 0
    for seqlen in PLAIN_SEQLENS:
        triton = seqlen in triton_seqlens(quick)
        launch_ms = work.teraflop(TOKENS * seqlen, 1, WIDTH) / 400 * 1e3  # all in all: full ones and causal ones, ours and slower ones
        total += 1 + triton * COMPILE_S + sum(expected_seconds(mode, 4 + triton, quick, launch_ms) for mode in plain_modes(seqlen))
    return 2 * len(PLAIN_HEAD_DIMS) * total


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
            calls, peers = {}, []
            for feature, arguments in features_of(run, head_dim, causal).items():
                name = f"d{head_dim}-{feature}-{suffix(causal)}"
                if run.device_lost or (feature != "plain" and not run.wants(name)):
                    continue
                with run.case(name):
                    call = Prefill(run, head_dim, FEATURE_SEQLEN, WIDTH // head_dim, **{"features": Features(causal=causal), **arguments})
                    call.check()
                    calls[name] = call
                    if call.cu_seqlens is not None:
                        make = functools.partial(flash_attention_2, call.q, call.k, call.v, causal, call.cu_seqlens, max(call.lengths))
                        peers += [(name, peer) for peer in run.peer(name, "flash_attention_2", make, call.tflop, call.o)]
            plain = f"d{head_dim}-plain-{suffix(causal)}"
            if plain in calls and len(calls) > 1:
                with run.case(f"d{head_dim}-features-{suffix(causal)}"):
                    measure_features(run, calls, plain, peers)


def measure_features(run, calls, plain, peers):
    """`peers`: of each the case that it belongs to, and the contender."""
    contenders = [*(call.contender(name) for name, call in calls.items()), *(peer for _, peer in peers)]
    for mode in run.modes(("hot", "cool")):
        measured = run.measure(mode, contenders)
        without = calls[plain]
        pairs = [(name, measured[plain]._replace(name="tilewave plain")) for name in calls if name != plain]
        for name, of_peer in pairs + [(name, measured[peer.name]) for name, peer in peers]:
            call = calls[name]
            dtype = "f16" if call.q.dtype == torch.float16 else "bf16"
            record = run.record(name, dtype, mode, "TFLOP/s", measured[name], of_peer, run.tflops, group="features")
            if of_peer.name == "tilewave plain":
                # A block that a mask cuts takes the time of a whole one: the same ratio with such blocks counted whole.
                blocks = (call.touched_tflop / call.tflop) / (without.touched_tflop / without.tflop)
                record["ratio_by_blocks"] = round(record["ratio"] * blocks, 4)
            run.add(record, 0.90 if of_peer.name == "tilewave plain" else None)


def plan_features(quick):
    return 4 * (sum(expected_seconds(mode, 8, quick) for mode in ("hot", "cool")) + 6.5 * 3)


# --- c: head dimensions between


NEXT_SIZE = {96: 128, 192: 256}
BETWEEN_SEQLENS = (4096, 16384)


def run_between(run):
    for head_dim in NEXT_SIZE:
        for seqlen in BETWEEN_SEQLENS:
            for causal in (False, True):
                name = f"d{head_dim}-s{seqlen}-{suffix(causal)}"
                if run.wants(name):
                    with run.case(name):
                        run_between_case(run, name, head_dim, seqlen, causal)


def run_between_case(run, name, head_dim, seqlen, causal):
    features = Features(causal=causal)
    larger = NEXT_SIZE[head_dim]
    ours = Prefill(run, head_dim, seqlen, WIDTH // head_dim, features)  # 21 heads of 96, 10 of 192
    next_size = Prefill(run, larger, seqlen, WIDTH // larger, features)
    ours.check()
    contenders = [ours.contender("tilewave"), next_size.contender("tilewave next size")]
    make = functools.partial(sdpa, BACKENDS["cudnn"], ours.q, ours.k, ours.v, causal)
    contenders += run.peer(name, "cudnn", make, ours.tflop, ours.o)
    for mode in run.modes(("hot", "cool")):
        for record in run.compare(name, "bf16", mode, "TFLOP/s", contenders, run.tflops, group="head dimensions between"):
            run.add(record, 0.85 if record["peer"] == "tilewave next size" else None)


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
    medians = {name: records.fraction(of_way.samples, 0.5) for name, of_way in run.measure("hot", contenders).items()}
    for name, median in medians.items():
        print(f"  read by {name:26} {contenders[0].work / median * 1e3:8.1f} GB/s")
    return min(contenders, key=lambda contender: medians[contender.name])


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

    def call(self, caches, paged, o, return_lse=False):
        arguments = {"seqlens": self.seqlens, "return_lse": return_lse, "out": o}
        if paged:
            caches = [t.view(-1, PAGE, *t.shape[2:]) for t in caches]
            arguments["block_table"] = self.block_table
        return functools.partial(self.run.ops.attention_decode, self.q, *caches, **arguments)

    def contender(self, name, paged):
        return Contender(name, taking_turns([self.call(caches, paged, self.o) for caches in self.caches]), self.bytes * 1e-9)

    def peer(self, case):
        """PyTorch has no operator that reads pages."""
        make = functools.partial(taking_turns, [flash_attention_2(self.q, *caches) for caches in self.caches])
        expected = self.call(self.caches[0], False, poisoned(*self.o.shape, dtype=self.o.dtype, device=self.run.device))()
        return self.run.peer(case, "flash_attention_2", make, self.bytes * 1e-9, expected)

    def check(self, paged):
        batch, group = self.q.shape[0], CACHE_HEADS // CACHE_KV_HEADS
        o = poisoned(*self.o.shape, dtype=self.o.dtype, device=self.run.device)
        _, lse = self.call(self.caches[0], paged, o, return_lse=True)()
        wrong = []
        for _ in range(6):
            b, head = self.run.rng.randrange(batch), self.run.rng.randrange(CACHE_HEADS)
            key, value = (t[b, :, head // group] for t in self.caches[0])
            if paged:
                where = self.block_table[b].long()
                key, value = (t.view(-1, PAGE, *t.shape[2:])[where, :, head // group].reshape(self.seqlen, -1) for t in self.caches[0])
            rows = torch.zeros(1, dtype=torch.int64, device=self.run.device)
            wrong += wrong_rows(f"sequence {b} head {head}", self.q[b, :, head], key, value, o[b, :, head], lse[b, head], rows, PLAIN, head)
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
    right, peers = [], []
    for paged, name in wanted.items():
        with run.case(name):
            decode.check(paged)
            right.append(decode.contender(name, paged))
            if not paged:
                peers = [(name, peer) for peer in decode.peer(name)]
    if not right:
        return
    for mode in run.modes(("hot", "graph")):
        measured = run.measure(mode, [read, *right, *(peer for _, peer in peers)])
        of_read = measured[read.name]._replace(name="read")
        for ours in right:
            record = run.record(
                ours.name, "bf16", mode, "GB/s", measured[ours.name], of_read, run.memory_gbps, peer_variant=read.name, group="decode"
            )
            run.add(record, 0.85 if decode.bytes > LEAST_CACHE_BYTES[mode] else None)
        for name, peer in peers:
            run.add(run.record(name, "bf16", mode, "GB/s", measured[name], measured[peer.name], run.memory_gbps, group="decode"))


def plan_decode(quick):
    total = 5
    for batch, seqlen in decode_sizes():
        launch_ms = work.cache_bytes(batch, seqlen, CACHE_KV_HEADS, CACHE_HEAD_DIM) / 3.5e9
        total += 1 + sum(expected_seconds(mode, 4, quick, max(launch_ms, 0.3)) for mode in ("hot", "graph"))
    return total


# --- e: memory


def run_memory(run):
    """What a call takes of the device's memory besides its tensors: what is free while it runs and after it, against before."""
    name = f"memory-d128-s{MEMORY_SEQLEN}-causal"
    if not run.wants(name):
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
        print(
            f"  {name}: free before {before >> 20} MiB, least while it ran {least >> 20} MiB, after {after >> 20} MiB, of {total >> 20} MiB"
        )
        print(f"  extra {extra / 2**20:.1f} MiB, allowed {allowed / 2**20:.1f} MiB; the scores would be {scores >> 30} GiB")
        print(f"  {begin.elapsed_time(end):.1f} ms, {call.tflop / begin.elapsed_time(end) * 1e3:.1f} TFLOP/s")
        call.check()
        if extra > allowed:
            raise WrongResult(f"took {extra} bytes, allowed {allowed}")
        record = records.make_record(run.shared, name, "bf16", "once", "MiB", (1, [1]), group="memory", limit=round(allowed / 2**20, 1))
        record.update(
            ours=round(extra / 2**20, 1), spread={"ours": None, "peer": None}, time_us=records.rounded(begin.elapsed_time(end) * 1e3)
        )
        run.records.append(record)


# --- f: plain backward passes


BACKWARD_SEQLENS = (2048, 4096, 16384)


class Backward:
    """The gradients of one call, plain or with what Prefill takes besides."""

    def __init__(self, run, head_dim, seqlen, causal, **arguments):
        forward = Prefill(run, head_dim, seqlen, WIDTH // head_dim, Features(causal=causal), **arguments)
        self.run, self.causal, self.lengths, self.cu_seqlens = run, causal, forward.lengths, forward.cu_seqlens
        self.q, self.k, self.v, self.d_o = forward.q, forward.k, forward.v, run.normal(*forward.q.shape)
        self.o, self.lse = forward.call(forward.o, return_lse=True)()
        self.gradients = tuple(poisoned(*t.shape, dtype=t.dtype, device=run.device) for t in (self.q, self.k, self.v))
        self.tflop, self.touched_tflop = 2.5 * forward.tflop, 2.5 * forward.touched_tflop  # five products where the forward pass has two

    def call(self, out, deterministic=False):
        results, options = (self.o, self.lse, self.d_o), {"causal": self.causal, "deterministic": deterministic, "out": out}
        if self.cu_seqlens is not None:
            inputs = (self.q, self.k, self.v, self.cu_seqlens, self.cu_seqlens)
            return functools.partial(self.run.ops.attention_varlen_backward, *inputs, *results, **options)
        return functools.partial(self.run.ops.attention_backward, self.q, self.k, self.v, *results, **options)

    def of_sequence(self, t, sequence):
        """[seqlen, heads, head_dim]."""
        if self.cu_seqlens is None:
            return t[sequence]
        begin = sum(self.lengths[:sequence])
        return t[begin : begin + self.lengths[sequence]]

    def check(self):
        """Throws WrongResult: the accuracy rule for one head of keys, and with `deterministic` the same bits twice."""
        sequence, head = (self.run.rng.randrange(n) for n in (len(self.lengths), self.k.shape[-2]))
        group = self.q.shape[-2] // self.k.shape[-2]
        of_q, of_k = slice(head * group, (head + 1) * group), slice(head, head + 1)
        operands = [self.of_sequence(t, sequence)[:, at] for t, at in ((self.q, of_q), (self.k, of_k), (self.v, of_k), (self.d_o, of_q))]
        reference, naive = gradients_of_group([t.double() for t in operands], self.causal), gradients_of_group(operands, self.causal)
        wrong, deterministic = [], []
        for out in ([torch.full_like(g, math.nan) for g in self.gradients] for _ in range(2)):
            deterministic.append(self.call(tuple(out), deterministic=True)())
        self.call(self.gradients)()
        for way, results in (("", self.gradients), ("deterministic ", deterministic[0])):
            for name, out, near, exact in zip(("dq", "dk", "dv"), results, naive, reference):
                got = self.of_sequence(out, sequence)[:, of_q if name == "dq" else of_k]
                wrong += wrong_values(f"{way}{name}, sequence {sequence} head {head}", got, near, exact, factor=3)
        if not all(torch.equal(first, second) for first, second in zip(*deterministic)):
            wrong.append("deterministic gradients differ from one call to the next")
        require_right(wrong)


def gradients_of_group(operands, causal):
    """Of the heads of queries that share one head of keys: [seqlen, heads, head_dim]. Sums over them are rounded once."""
    q, k, v, d_o = operands
    of_heads = [gradients((q[:, h], k[:, 0], v[:, 0], d_o[:, h]), causal) for h in range(q.shape[1])]
    dq, dk, dv = (torch.stack(g, 1) for g in zip(*of_heads))
    return dq, dk.sum(1, keepdim=True), dv.sum(1, keepdim=True)


def gradients(operands, causal, kept=1.0):
    """Of one head, in the dtype of its operands: q, k, v and the output's gradient, [seqlen, head_dim]. `kept`: what dropout multiplies weights by."""
    q, k, v, d_o = operands
    scale = 1 / math.sqrt(q.shape[1])
    scores = (q @ k.T) * scale
    if causal:
        scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -math.inf)
    weights = torch.softmax(scores, dim=-1)
    delta = (d_o * ((weights * kept) @ v)).sum(-1, keepdim=True)
    d_scores = weights * ((d_o @ v.T) * kept - delta) * scale
    return d_scores @ k, d_scores.T @ q, (weights * kept).T @ d_o


def sdpa_backward(backend, q, k, v, d_o, causal):
    """The backward of scaled_dot_product_attention."""
    inputs = [t.transpose(1, 2).detach().requires_grad_() for t in (q, k, v)]
    with torch.enable_grad(), sdpa_kernel(backend):
        o = functional.scaled_dot_product_attention(*inputs, is_causal=causal)
    return lambda: torch.autograd.grad(o, inputs, d_o.transpose(1, 2), retain_graph=True)


def backward_wanted(peer, head_dim, seqlen):
    if peer == "tilewave not deterministic":
        return 0.80
    if peer == "flash_attention_2":
        return 1.6 if head_dim == 128 else None
    return {64: 1.05, 128: 1.05, 256: 1.20}[head_dim] if seqlen >= 4096 or head_dim == 128 else None


def run_backward(run):
    for head_dim in PLAIN_HEAD_DIMS:
        for seqlen in BACKWARD_SEQLENS:
            for causal in (False, True):
                name = f"backward-d{head_dim}-s{seqlen}-{suffix(causal)}"
                if run.wants(name):
                    with run.case(name):
                        run_backward_case(run, name, head_dim, seqlen, causal)


def run_backward_case(run, name, head_dim, seqlen, causal):
    ours = Backward(run, head_dim, seqlen, causal)
    ours.check()
    fast = Contender("tilewave", ours.call(ours.gradients), ours.tflop)
    deterministic = Contender("tilewave deterministic", ours.call(ours.gradients, deterministic=True), ours.tflop)
    peers = []
    expected = tuple(g.transpose(1, 2) for g in ours.gradients)
    for peer in ("cudnn", "flash_attention_2"):
        make = functools.partial(sdpa_backward, BACKENDS[peer], ours.q, ours.k, ours.v, ours.d_o, causal)
        peers += run.peer(name, peer, make, ours.tflop, expected)
    for mode in run.modes(("hot", "cool")):
        for record in run.compare(name, "bf16", mode, "TFLOP/s", [fast, *peers], run.tflops, group="backward"):
            run.add(record, backward_wanted(record["peer"], head_dim, seqlen))
        if head_dim <= 128:  # above it dQ is never added up
            plain = Contender("tilewave not deterministic", fast.launch, ours.tflop)
            for record in run.compare(
                f"{name}-deterministic", "bf16", mode, "TFLOP/s", [deterministic, plain], run.tflops, group="backward"
            ):
                run.add(record, backward_wanted(record["peer"], head_dim, seqlen))


def plan_backward(quick):
    total = 0
    for seqlen in BACKWARD_SEQLENS:
        launch_ms = 2.5 * work.teraflop(TOKENS * seqlen, 1, WIDTH) / 350 * 1e3
        total += 2 + sum(expected_seconds(mode, 5, quick, launch_ms) for mode in ("hot", "cool"))
    return 2 * len(PLAIN_HEAD_DIMS) * total


# --- g: features of the backward pass


def backward_features(head_dim):
    return {"plain": {}, "gqa4": {"kv_heads": WIDTH // head_dim // 4}, "varlen": {"lengths": list(RAGGED)}}


def flash_attention_2_backward(ours):
    """The operator behind the flash backend's backward, of packed sequences."""
    q, k, v, cu_seqlens, longest = ours.q, ours.k, ours.v, ours.cu_seqlens, max(ours.lengths)
    o, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, ours.causal, False
    )
    rest = (cu_seqlens, cu_seqlens, longest, longest, 0.0, ours.causal, seed, offset)
    return lambda: torch.ops.aten._flash_attention_backward(ours.d_o, q, k, v, o, lse, *rest)


def run_backward_features(run):
    """All of one head dimension and mask in one measurement, with the plain call."""
    for head_dim in (128, 64):
        for causal in (False, True):
            calls, peers = {}, []
            for feature, arguments in backward_features(head_dim).items():
                name = f"backward-d{head_dim}-{feature}-{suffix(causal)}"
                if run.device_lost or (feature != "plain" and not run.wants(name)):
                    continue
                with run.case(name):
                    call = Backward(run, head_dim, FEATURE_SEQLEN, causal, **arguments)
                    call.check()
                    calls[name] = call
                    if call.cu_seqlens is not None:
                        make = functools.partial(flash_attention_2_backward, call)
                        peers += [(name, peer) for peer in run.peer(name, "flash_attention_2", make, call.tflop, call.gradients)]
            plain = f"backward-d{head_dim}-plain-{suffix(causal)}"
            if plain in calls and len(calls) > 1:
                with run.case(f"backward-d{head_dim}-features-{suffix(causal)}"):
                    measure_backward_features(run, calls, plain, peers)


def measure_backward_features(run, calls, plain, peers):
    """`peers`: of each the case that it belongs to, and the contender."""
    ours = [Contender(name, call.call(call.gradients), call.tflop) for name, call in calls.items()]
    for mode in run.modes(("hot", "cool")):
        measured = run.measure(mode, [*ours, *(peer for _, peer in peers)])
        without = calls[plain]
        pairs = [(name, measured[plain]._replace(name="tilewave plain")) for name in calls if name != plain]
        for name, of_peer in pairs + [(name, measured[peer.name]) for name, peer in peers]:
            call = calls[name]
            record = run.record(name, "bf16", mode, "TFLOP/s", measured[name], of_peer, run.tflops, group="backward features")
            if of_peer.name != "tilewave plain":
                run.add(record)
                continue
            blocks = (call.touched_tflop / call.tflop) / (without.touched_tflop / without.tflop)
            record["ratio_by_blocks"] = round(record["ratio"] * blocks, 4)
            run.add(record, 0.88, of="ratio_by_blocks")


def plan_backward_features(quick):
    launch_ms = 2.5 * work.teraflop(TOKENS * FEATURE_SEQLEN, 1, WIDTH) / 350 * 1e3
    return 4 * (sum(expected_seconds(mode, 4, quick, launch_ms) for mode in ("hot", "cool")) + 6.5 * 3)


# --- h: e4m3


FP8 = torch.float8_e4m3fn
FP8_SEQLENS = (4096, 16384)
FP8_HEADS_CHECKED = 3


def to_fp8(x):
    """[batch, seqlen, heads, head_dim] in e4m3, and what 1 stands for in each head: f32 [batch, heads]."""
    descale = x.abs().amax((1, 3)).float().clamp(min=1e-4) / torch.finfo(FP8).max
    return (x.float() / descale[:, None, :, None]).to(FP8), descale


def fp8_rows(query, key, value, rows, causal):
    """The unfused operations on rows of one head whose inputs are e4m3 times a descale: weights rounded to e4m3 with a row's largest at 2^8, sums in f32."""
    scores = (query[rows].float() @ key.float().T) * (1 / math.sqrt(query.shape[1]))
    if causal:
        ahead = torch.arange(key.shape[0], device=key.device)[None, :] - (rows + key.shape[0] - query.shape[0])[:, None]
        scores = scores.masked_fill(ahead > 0, -math.inf)
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    rounded = (weights * 256).to(FP8).float() / 256
    return (rounded @ value.float() / weights.sum(1, keepdim=True)).to(torch.bfloat16)


class Fp8Prefill:
    """The inputs of a Prefill, cast to e4m3."""

    def __init__(self, plain):
        self.run, self.plain = plain.run, plain
        self.operands, self.descales = zip(*(to_fp8(x) for x in (plain.q, plain.k, plain.v)))
        self.o = poisoned(*plain.o.shape, dtype=torch.bfloat16, device=plain.run.device)
        names = ("q_descale", "k_descale", "v_descale")
        arguments = {**plain.features.arguments(), **dict(zip(names, self.descales)), "out": self.o}
        self.launch = functools.partial(plain.run.ops.attention, *self.operands, **arguments)

    def check(self):
        """Some rows of some heads against float64 on the same e4m3 numbers: at most 3 times the error of the unfused operations, and 5 % in L2."""
        self.launch()
        wrong = []
        for _ in range(FP8_HEADS_CHECKED):
            b, head = self.run.rng.randrange(self.o.shape[0]), self.run.rng.randrange(self.o.shape[2])
            q, k, v = (x[b, :, head].double() * d[b, head].double() for x, d in zip(self.operands, self.descales))
            rows = some_rows(q.shape[0], self.run.rng, self.run.device)
            reference, _ = softmax_rows(q[rows], k, v, rows, self.plain.features, head, 0)
            unfused = fp8_rows(q, k, v, rows, self.plain.features.causal)
            wrong += wrong_values(f"batch {b} head {head}", self.o[b, :, head][rows], unfused, reference, factor=3, relative=0.05)
        require_right(wrong)


def run_fp8(run):
    for head_dim in PLAIN_HEAD_DIMS:
        for seqlen in FP8_SEQLENS:
            for causal in (False, True):
                name = f"fp8-d{head_dim}-s{seqlen}-{suffix(causal)}"
                if run.wants(name):
                    with run.case(name):
                        run_fp8_case(run, name, head_dim, seqlen, causal)
    for head_dim in PLAIN_HEAD_DIMS:
        name = f"fp8-outliers-d{head_dim}"
        if run.wants(name):
            with run.case(name):
                run_outliers(run, name, head_dim)


def run_fp8_case(run, name, head_dim, seqlen, causal):
    plain = Prefill(run, head_dim, seqlen, WIDTH // head_dim, Features(causal=causal))
    ours = Fp8Prefill(plain)
    ours.check()
    wanted = {128: 1.20 if causal else 1.30, 256: 1.40 if causal else 1.50}.get(head_dim)
    contenders = [Contender("tilewave fp8", ours.launch, plain.tflop), plain.contender("tilewave bf16")]
    for mode in run.modes(("hot", "cool")):
        for record in run.compare(name, "fp8_e4m3", mode, "TFLOP/s", contenders, 2 * run.tflops, group="fp8"):
            run.add(record, wanted)


def run_outliers(run, name, head_dim, seqlen=4096, heads=16):
    """FlashAttention 3's test: N(0, 1) + N(0, 100) with probability 0.001. Prints the root mean square error of some heads against float64 on the inputs before
    the cast."""

    def with_outliers():
        x = run.normal(1, seqlen, heads, head_dim, dtype=torch.float32)
        return x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001)

    q, k, v = (with_outliers() for _ in range(3))
    signs = torch.randint(0, 2, (head_dim,), device=run.device).float() * 2 - 1
    rotate = functools.partial(run.ops.hadamard, scale=head_dim**-0.5, factors=signs)
    rows = torch.arange(0, seqlen, 4, device=run.device)
    references = [softmax_rows(q[0, rows, h].double(), k[0, :, h].double(), v[0, :, h].double(), rows, PLAIN, h, 0)[0] for h in range(4)]

    def error(o):
        return math.sqrt(sum((o[0, rows, h].double() - reference).square().mean().item() for h, reference in enumerate(references)) / 4)

    def fp8(q, k):
        operands, descales = zip(*(to_fp8(x) for x in (q, k, v)))
        return run.ops.attention(*operands, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2])

    bf16 = error(run.ops.attention(*(x.bfloat16() for x in (q, k, v))))
    without, rotated = error(fp8(q, k)), error(fp8(rotate(q), rotate(k)))
    ratio = rotated / without
    print(
        f"  {name:26} RMSE bf16 {bf16:.2e}  fp8 {without:.2e}  fp8, Q and K rotated {rotated:.2e}  ratio {ratio:.3f}  wanted at most 0.50",
        flush=True,
    )
    if not ratio <= 0.5:
        run.missed.append(f"{name}: with the rotation {ratio:.3f} of the error without, wanted at most 0.50")


def plan_fp8(quick):
    total = 0
    for seqlen in FP8_SEQLENS:
        launch_ms = work.teraflop(TOKENS * seqlen, 1, WIDTH) / 700 * 1e3
        total += 2 + sum(expected_seconds(mode, 2, quick, launch_ms) for mode in ("hot", "cool"))
    return 2 * len(PLAIN_HEAD_DIMS) * total + 6


# --- i: dropout


DROPOUT, KEPT = 0.1, 230 / 256


class Dropout:
    """A call with dropout, and its gradients; `kept`: what it multiplies the weights of the first head by."""

    def __init__(self, run, head_dim, causal):
        self.run, self.plain = run, Backward(run, head_dim, FEATURE_SEQLEN, causal)
        inputs = (self.plain.q, self.plain.k, self.plain.v)
        self.o = poisoned(*self.plain.o.shape, dtype=self.plain.o.dtype, device=run.device)
        self.out = tuple(poisoned(*t.shape, dtype=t.dtype, device=run.device) for t in inputs)
        state = torch.tensor([17, 4], device=run.device)
        mask = torch.empty(1, 1, FEATURE_SEQLEN, FEATURE_SEQLEN, dtype=torch.bool, device=run.device)
        self.kept = run.ops.attention_dropout_mask(mask, DROPOUT, state)[0, 0] / KEPT
        options = {"causal": causal, "dropout": DROPOUT, "dropout_state": state}
        self.forward = functools.partial(run.ops.attention, *inputs, out=self.o, **options)
        lse = run.ops.attention(*inputs, return_lse=True, **options)[1]
        self.backward = functools.partial(run.ops.attention_backward, *inputs, self.o, lse, self.plain.d_o, out=self.out, **options)

    def check(self):
        """Throws WrongResult: the accuracy rule for the first head."""
        self.forward()
        self.backward()
        operands = [t[0, :, 0] for t in (self.plain.q, self.plain.k, self.plain.v, self.plain.d_o)]
        exact = gradients([t.double() for t in operands], self.plain.causal, self.kept.double())
        near = gradients(operands, self.plain.causal, self.kept.to(operands[0].dtype))
        wrong = []
        for name, out, naive, reference in zip(("dq", "dk", "dv"), self.out, near, exact):
            wrong += wrong_values(name, out[0, :, 0], naive, reference, factor=3)
        wrong += wrong_values("o", self.o[0, :, 0], *(self.output(t) for t in (operands, [t.double() for t in operands])))
        require_right(wrong)

    def output(self, operands):
        q, k, v, _ = operands
        scores = (q @ k.T) / math.sqrt(q.shape[1])
        if self.plain.causal:
            scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu_(1), -math.inf)
        return (torch.softmax(scores, dim=-1) * self.kept.to(q.dtype)) @ v


def run_dropout(run):
    for head_dim in (128, 64):
        for causal in (False, True):
            name = f"dropout-d{head_dim}-{suffix(causal)}"
            if run.wants(name):
                with run.case(name):
                    run_dropout_case(run, name, head_dim, causal)


def run_dropout_case(run, name, head_dim, causal):
    ours = Dropout(run, head_dim, causal)
    ours.check()
    plain = ours.plain
    forward_out = torch.empty_like(ours.o)
    without = functools.partial(run.ops.attention, plain.q, plain.k, plain.v, causal=causal, out=forward_out)
    passes = {
        "forward": (ours.forward, without, plain.tflop / 2.5, 0.85),
        "backward": (ours.backward, plain.call(plain.gradients), plain.tflop, 0.90),
    }
    for mode in run.modes(("hot", "cool")):
        for which, (dropping, keeping, tflop, wanted) in passes.items():
            contenders = [Contender("tilewave dropout", dropping, tflop), Contender("tilewave plain", keeping, tflop)]
            for record in run.compare(f"{name}-{which}", "bf16", mode, "TFLOP/s", contenders, run.tflops, group="dropout"):
                run.add(record, wanted)


def plan_dropout(quick):
    launch_ms = 2.5 * work.teraflop(TOKENS * FEATURE_SEQLEN, 1, WIDTH) / 350 * 1e3
    return 4 * (2 * sum(expected_seconds(mode, 2, quick, launch_ms) for mode in ("hot", "cool")) + 4)


GROUPS = {
    "a": Group("plain forward passes", run_plain, plan_plain),
    "b": Group("features", run_features, plan_features),
    "c": Group("head dimensions between", run_between, plan_between),
    "d": Group("decode", run_decode, plan_decode),
    "e": Group("memory", run_memory, lambda quick: 6),
    "f": Group("plain backward passes", run_backward, plan_backward),
    "g": Group("features of the backward pass", run_backward_features, plan_backward_features),
    "h": Group("e4m3", run_fp8, plan_fp8),
    "i": Group("dropout", run_dropout, plan_dropout),
}


if __name__ == "__main__":
    sys.exit(gpu_timing.main(__doc__.split("\n")[0], "attention", GROUPS, PEERS))
