#!/usr/bin/env python3
"""Measures Tilewave's attention against PyTorch's cuDNN and FlashAttention-2 kernels, in one process and run.

    python3 benchmarks/attention_peer.py --library build/libtilewave.so --json benchmarks/results/nvidia-h200/attention.json

Needs PyTorch with CUDA and a Hopper GPU. Each case is first checked: against a float64 reference on some rows, and against cuDNN on all. Exit codes: 0 done,
1 a check failed or something is missing, 2 wrong usage. benchmarks/README.md explains the modes.
"""

import argparse
import ctypes
import datetime
import json
import math
import os
import pathlib
import random
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

try:
    import torch
    import torch.nn.functional as functional
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as error:
    sys.exit(f"attention_peer.py: {error}")

ROOT = pathlib.Path(__file__).resolve().parent.parent
TENSOR_CORE_TFLOPS = {"GH200": 989, "H200": 989, "H100 80GB HBM3": 989, "H100 PCIe": 756}  # dense bf16, NVIDIA's data sheets
COOL_PAUSE_S = 0.040
COOL_BURST = 3
ROUNDS_IN_FLIGHT = 4


# --- Tilewave's C interface (include/tilewave/tilewave.h)


class TwTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("cuda_device", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
    ]


TW_DTYPE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def tw_tensor(t):
    rank = t.dim()
    return TwTensor(t.data_ptr(), TW_DTYPE[t.dtype], t.device.index, rank, (ctypes.c_int64 * 4)(*t.shape), (ctypes.c_int64 * 4)(*t.stride()))


class Tilewave:
    def __init__(self, path):
        self.lib = ctypes.CDLL(str(path))
        self.lib.tw_last_error.restype = ctypes.c_char_p
        self.lib.tw_last_error.argtypes = []
        pointer = ctypes.POINTER(TwTensor)
        self.lib.tw_attention.restype = ctypes.c_int
        self.lib.tw_attention.argtypes = [pointer] * 5 + [ctypes.c_float, ctypes.c_int32, ctypes.c_void_p]

    def attention(self, q, k, v, o, lse=None, causal=False):
        """Gives a function without arguments that enqueues one execution on torch's current stream. The tensors must outlive it."""
        described = [tw_tensor(t) for t in (q, k, v, o)] + ([tw_tensor(lse)] if lse is not None else [])
        arguments = [ctypes.byref(t) for t in described] + ([None] if lse is None else [])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call, last_error = self.lib.tw_attention, self.lib.tw_last_error

        def launch(keep=(described, q, k, v, o, lse)):
            if call(*arguments, 0.0, int(causal), stream) != 0:
                raise RuntimeError("tw_attention: " + last_error().decode())

        return launch


# --- Cases and peers


@dataclass
class Case:
    head_dim: int
    seqlen: int
    causal: bool
    tokens: int = 16384  # batch * seqlen
    width: int = 2048  # heads * head_dim

    @property
    def batch(self):
        return self.tokens // self.seqlen

    @property
    def heads(self):
        return self.width // self.head_dim

    @property
    def name(self):
        return f"d{self.head_dim}-s{self.seqlen}-{'causal' if self.causal else 'full'}"

    @property
    def tflop(self):
        flops = 4 * self.batch * self.heads * self.seqlen * self.seqlen * self.head_dim
        return (flops / 2 if self.causal else flops) * 1e-12


CASES = [Case(d, s, causal) for d in (128, 64) for s in (1024, 4096, 16384) for causal in (False, True)]
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash_attention_2": SDPBackend.FLASH_ATTENTION}


def peer_attention(backend, q, k, v, causal):
    """The same memory as [B, H, S, D] views, as PyTorch wants it. K and V have Q's number of heads."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def launch():
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return launch, sdpa_kernel([backend])


# --- Checks


def ulp(x, dtype):
    """Distance between neighbours of `dtype` at magnitude x."""
    if x == 0:
        return 0.0
    bits = {torch.bfloat16: 7, torch.float16: 10}[dtype]
    return 2.0 ** (math.floor(math.log2(x)) - bits)


def check_rows(q, k, v, o, lse, causal, rng):
    """The accuracy rule on some rows of some heads: max|o - ref| <= 2 max|naive - ref| + 2 ulp(max|ref|) + 1e-5, relative L2 error <= 1e-2 (bf16), and LSE
    within 1e-3. Gives a list of what is wrong."""
    batch, seqlen, heads, head_dim = q.shape
    group = heads // k.shape[2]
    scale = 1 / math.sqrt(head_dim)
    wrong = []
    for _ in range(4):
        b, h = rng.randrange(batch), rng.randrange(heads)
        picked = {0, seqlen - 1, *(r for r in (63, 64, 127, 128, 191, 192) if r < seqlen), *(rng.randrange(seqlen) for _ in range(96))}
        rows = torch.tensor(sorted(picked), device=q.device)
        hidden = torch.arange(seqlen, device=q.device)[None, :] > rows[:, None] if causal else None
        query, key, value = q[b, rows, h], k[b, :, h // group], v[b, :, h // group]

        scores = query.double() @ key.double().T * scale
        if causal:
            scores.masked_fill_(hidden, -math.inf)
        reference = torch.softmax(scores, dim=-1) @ value.double()
        reference_lse = torch.logsumexp(scores, dim=-1)

        naive = (query @ key.T) * scale
        if causal:
            naive.masked_fill_(hidden, -math.inf)
        naive = torch.softmax(naive, dim=-1) @ value

        out = o[b, rows, h].double()
        error = (out - reference).abs().max().item()
        allowed = 2 * (naive.double() - reference).abs().max().item() + 2 * ulp(reference.abs().max().item(), q.dtype) + 1e-5
        relative = ((out - reference).norm() / reference.norm()).item()
        lse_error = (lse[b, h, rows].double() - reference_lse).abs().max().item()
        where = f"batch {b} head {h}"
        if not error <= allowed:  # written so that NaN fails
            wrong.append(f"{where}: error {error:.3g}, allowed {allowed:.3g}")
        if not relative <= 1e-2:
            wrong.append(f"{where}: relative L2 error {relative:.3g}, allowed 0.01")
        if not lse_error <= 1e-3:
            wrong.append(f"{where}: LSE error {lse_error:.3g}, allowed 0.001")
    return wrong


def poisoned_output(q):
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan, dtype=torch.float32, device=q.device)
    return torch.full_like(q, math.nan), lse


def check_gqa(tilewave, device, rng):
    """Query heads 4 to 1, lengths that are no multiple of a tile."""
    failures = 0
    for head_dim in (64, 128):
        for seqlen in (1, 127, 1021, 2048):
            for causal in (False, True):
                heads = 16
                q = torch.randn(2, seqlen, heads, head_dim, dtype=torch.bfloat16, device=device)
                k, v = (torch.randn(2, seqlen, heads // 4, head_dim, dtype=torch.bfloat16, device=device) for _ in range(2))
                o, lse = poisoned_output(q)
                tilewave.attention(q, k, v, o, lse, causal)()
                wrong = check_rows(q, k, v, o, lse, causal, rng)
                for text in wrong:
                    print(f"gqa 4:1 d{head_dim} s{seqlen} {'causal' if causal else 'full'}: {text}", file=sys.stderr)
                failures += bool(wrong)
    print(f"gqa 4:1: {'passed' if failures == 0 else f'{failures} shapes FAILED'}")
    return failures


# --- Timing, as in benchmarks/harness.cpp


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


def measure_hot(contenders, samples, warm_up_s):
    lengths = []
    for launch in contenders:
        launch()
        torch.cuda.synchronize()
        lengths.append(max(1, math.ceil(2 / max(milliseconds(burst(launch, 3)), 1e-3))))
    deadline = time.monotonic() + warm_up_s
    while time.monotonic() < deadline:
        for launch, length in zip(contenders, lengths):
            burst(launch, length)
        torch.cuda.synchronize()
    results = [[] for _ in contenders]
    in_flight = []
    order = list(range(len(contenders)))
    for _ in range(samples):
        random.shuffle(order)
        in_flight += [(i, burst(contenders[i], lengths[i])) for i in order]
        while len(in_flight) > ROUNDS_IN_FLIGHT * len(contenders):
            i, timed = in_flight.pop(0)
            results[i].append(milliseconds(timed))
    for i, timed in in_flight:
        results[i].append(milliseconds(timed))
    return results


def measure_cool(contenders, samples):
    results = [[] for _ in contenders]
    order = list(range(len(contenders)))
    for _ in range(samples):
        random.shuffle(order)
        for i in order:
            torch.cuda.synchronize()
            time.sleep(COOL_PAUSE_S)
            contenders[i]()  # not timed: the host enqueues the burst behind it
            results[i].append(milliseconds(burst(contenders[i], COOL_BURST)))
    return results


def fraction(values, f):
    values = sorted(values)
    position = f * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return values[below] + (position - below) * (values[above] - values[below])


def rounded(x):
    return float(f"{x:.5g}")


# --- The run


def version_text(number):
    return f"{number // 1000}.{number % 1000 // 10}"


def find_versions(library):
    driver = ctypes.c_int(0)
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
    cudnn = torch.backends.cudnn.version()
    versions = {
        "driver": version_text(driver.value),
        "torch": torch.__version__,
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
    }
    tool = pathlib.Path(library).parent / "tilewave"
    try:
        found = json.loads(subprocess.run([tool, "devices", "--json"], capture_output=True, check=True, timeout=60).stdout)
        versions["nvrtc"] = (found["nvrtc"] or "").split(" ")[0]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        pass  # the command line is not beside the library: the figures are good without this
    return versions


def find_commit():
    try:
        text = subprocess.run(
            ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], capture_output=True, check=True, text=True, timeout=60
        ).stdout.strip()
        return text or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def make_record(case, mode, ours, peer, peer_samples, shared):
    def rates(samples):
        return [case.tflop / (fraction(samples, f) * 1e-3) for f in (0.9, 0.5, 0.1)]  # the slowest tenth first

    low, mid, high = rates(ours)
    peer_low, peer_mid, peer_high = rates(peer_samples)
    return {
        "family": "attention",
        "case": case.name,
        "dtype": "bf16",
        "mode": mode,
        "unit": "TFLOP/s",
        "ours": rounded(mid),
        "peer": peer,
        "peer_value": rounded(peer_mid),
        "limit": shared["limit"],
        "ratio": round(mid / peer_mid, 4),
        "spread": {"ours": [rounded(low), rounded(high)], "peer": [rounded(peer_low), rounded(peer_high)]},
        **{key: shared[key] for key in ("commit", "date", "versions", "device")},
    }


def run_case(tilewave, case, options, shared, device, rng):
    """Gives the case's records, or None when a check failed."""
    shape = (case.batch, case.seqlen, case.heads, case.head_dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(3))
    o, lse = poisoned_output(q)
    tilewave.attention(q, k, v, o, lse, case.causal)()
    wrong = check_rows(q, k, v, o, lse, case.causal, rng)
    ours = tilewave.attention(q, k, v, o, None, case.causal)
    records = []
    for peer, backend in PEERS.items():
        if peer in options.skip_peer:
            continue
        theirs, chosen = peer_attention(backend, q, k, v, case.causal)
        with chosen:
            try:
                peer_o = theirs().transpose(1, 2)
            except RuntimeError as error:
                print(f"{case.name}: no {peer}: {error}", file=sys.stderr)
                continue
            if peer == "cudnn":
                difference = ((o.float() - peer_o.float()).norm() / peer_o.float().norm()).item()
                if not difference <= 1e-2:
                    wrong.append(f"differs from cuDNN by {difference:.3g} (relative L2, allowed 0.01)")
            if wrong:
                break
            quick = options.quick
            for mode in options.modes:
                if mode == "hot":
                    samples = measure_hot([ours, theirs], 11 if quick else 60, 0.1 if quick else 0.3)
                else:
                    samples = measure_cool([ours, theirs], 9 if quick else 40)
                record = make_record(case, mode, samples[0], peer, samples[1], shared)
                records.append(record)
                print(f"  {case.name:18} {mode:5} {record['ours']:7.1f}  {peer} {record['peer_value']:7.1f}  {record['ratio']:.3f}", flush=True)
    for text in wrong:
        print(f"{case.name}: WRONG: {text}", file=sys.stderr)
    return None if wrong else records


def print_table(records):
    print(f"\n{'TFLOP/s':18} {'mode':5} {'ours':>7} {'cuDNN':>7} {'ratio':>6} {'FA2':>7} {'ratio':>6} {'/limit':>7}")
    rows = {}
    for record in records:
        rows.setdefault((record["case"], record["mode"]), {})[record["peer"]] = record
    for (case, mode), by_peer in rows.items():
        cells = []
        for peer in PEERS:
            record = by_peer.get(peer)
            cells.append(f"{record['peer_value']:7.1f} {record['ratio']:6.3f}" if record else f"{'-':>7} {'-':>6}")
        first = next(iter(by_peer.values()))
        limit = f"{first['ours'] / first['limit']:7.3f}" if first["limit"] else f"{'-':>7}"
        print(f"{case:18} {mode:5} {first['ours']:7.1f} {' '.join(cells)} {limit}")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=pathlib.Path, default=ROOT / "build/libtilewave.so", help="libtilewave.so (default: build/libtilewave.so)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file, as a list of records")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name contains this; may be repeated")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["hot", "cool"], help="hot,cool (default: both)")
    parser.add_argument("--skip-peer", action="append", default=[], choices=list(PEERS), help="do not measure this peer")
    parser.add_argument("--gqa", action="store_true", help="also check 4 query heads to one key head")
    parser.add_argument("--check-only", action="store_true", help="check, do not measure")
    parser.add_argument("--commit", help="the commit to record (default: what git says)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds after which the process ends itself, in case a kernel hangs (default: 900)")
    options = parser.parse_args()
    if not set(options.modes) <= {"hot", "cool"}:
        parser.error(f"--modes is {','.join(options.modes)}; allowed: hot, cool")
    if options.check_only:
        options.modes = []
    return options


def give_up(seconds):
    print(f"attention_peer.py: not done after {seconds:g} s, giving up", file=sys.stderr, flush=True)
    os._exit(1)


def main():
    options = parse_arguments()
    if not torch.cuda.is_available():
        print("attention_peer.py: PyTorch finds no CUDA device", file=sys.stderr)
        return 1
    if options.json:
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.open("a").close()  # an unwritable path must not cost the run
        except OSError as error:
            print(f"attention_peer.py: {error}", file=sys.stderr)
            return 1
    watchdog = threading.Timer(options.timeout, give_up, [options.timeout])
    watchdog.daemon = True
    watchdog.start()

    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    try:
        tilewave = Tilewave(options.library)
    except (OSError, AttributeError) as error:
        print(f"attention_peer.py: {error}", file=sys.stderr)
        return 1
    shared = {
        "limit": next((tflops for part, tflops in TENSOR_CORE_TFLOPS.items() if part in name), None),
        "commit": options.commit or find_commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "versions": find_versions(options.library),
        "device": name,
    }
    seed = random.SystemRandom().randrange(2**32)
    print(f"{name}, {shared['versions']}, seed {seed}")
    torch.manual_seed(seed)
    rng = random.Random(seed)

    failures = 0
    records = []
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)), torch.no_grad():
            if options.gqa:
                failures += check_gqa(tilewave, device, rng)
            for case in CASES:
                if options.case and not any(part in case.name for part in options.case):
                    continue
                made = run_case(tilewave, case, options, shared, device, rng)
                failures += made is None
                records += made or []
    except RuntimeError as error:
        print(f"attention_peer.py: {error}", file=sys.stderr)
        failures += 1
    if options.json and records:
        options.json.write_text(json.dumps(records, indent=2) + "\n")
    if records:
        print_table(records)
    if failures:
        print(f"attention_peer.py: {failures} failed", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
