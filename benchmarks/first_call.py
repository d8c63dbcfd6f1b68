#!/usr/bin/env python3
"""Measures the first call of an operation in a process, on a GPU: with the compiled kernels of a pack, and with NVRTC compiling them.

    build/tilewave kernels compile --arch sm_90a --output pack
    python3 benchmarks/first_call.py --library build/libtilewave.so --pack pack --json benchmarks/results/nvidia-h200/first_call.json

Each time is that of a process of its own, whose CUDA context exists, with an empty cache of kernels: from before `import tilewave` until the result is on the GPU.
At most 1 s is wanted with the pack and 6 s without. Needs PyTorch with CUDA. Exit codes: 0 done, 1 something failed or is missing, 2 wrong usage.
"""

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import records

PROCESSES = 3
CALLS = {
    "attention-d128-causal": "ops.attention(t(1, 4096, 16, 128), t(1, 4096, 16, 128), t(1, 4096, 16, 128), causal=True)",
    "attention-decode-d128": "ops.attention_decode(t(1, 1, 32, 128), t(1, 8192, 8, 128), t(1, 8192, 8, 128))",
    "gemm-4096": "ops.gemm(t(4096, 4096), t(4096, 4096).T)",
    "rms-norm-4096": "ops.rms_norm(t(4096, 4096), t(4096))",
}
WANTED_US = {"with pack": 1e6, "compiled": 6e6}

CHILD = """
import time, torch
def t(*shape): return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
t(1)
torch.cuda.synchronize()
begin = time.perf_counter()
from tilewave import ops
call = lambda: {call}
result = call()
torch.cuda.synchronize()
print("seconds", time.perf_counter() - begin, torch.cuda.get_device_name())
"""


def first_call(call, environment):
    """Seconds of one process, and the device's name."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", CHILD.format(call=call)],
            env={**environment, "TILEWAVE_CACHE": cache},
            capture_output=True,
            text=True,
            timeout=120,
        )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}")
    _, seconds, device = done.stdout.split("\n")[-2].split(" ", 2)
    return float(seconds), device


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=pathlib.Path, default=records.ROOT / "build/libtilewave.so", help="default: build/libtilewave.so")
    parser.add_argument("--pack", type=pathlib.Path, required=True, help="the folder that `tilewave kernels compile` wrote")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file, as a list of records")
    parser.add_argument("--commit", help="the commit to record (default: what git says)")
    options = parser.parse_args()
    if not any(options.pack.glob("*.kernel")):
        parser.error(f"--pack: {options.pack} holds no compiled kernels")  # they would be compiled, and the time of that recorded

    search = [str(records.ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "TILEWAVE_LIBRARY": str(options.library.resolve().parent),
        "PYTHONPATH": os.pathsep.join(filter(None, search)),
    }
    environment.pop("TILEWAVE_PACK", None)
    shared = {
        "commit": options.commit or records.find_commit(),
        "date": records.now(),
        "versions": {"nvrtc": (records.library_devices(options.library).get("nvrtc") or "").split(" ")[0]},
    }
    results, failed = [], False
    for mode, extra in (("with pack", {"TILEWAVE_PACK": str(options.pack.resolve())}), ("compiled", {})):
        for case, call in CALLS.items():
            begin = time.monotonic()
            try:
                times, devices = zip(*(first_call(call, {**environment, **extra}) for _ in range(PROCESSES)))
            except (RuntimeError, subprocess.TimeoutExpired, ValueError) as error:
                print(f"{case} {mode}: FAILED: {error}", file=sys.stderr)
                failed = True
                continue
            microseconds = [1e6 * s for s in times]
            median, wanted = statistics.median(microseconds), WANTED_US[mode]
            print(
                f"{case:24} {mode:10} {median / 1e6:6.2f} s  ({min(times):.2f} to {max(times):.2f})  wanted {wanted / 1e6:g}"
                f"{' MISSED' if median > wanted else ''}  [{time.monotonic() - begin:.0f} s]",
                flush=True,
            )
            results.append(
                {
                    **{"family": "first call", "case": case, "dtype": "bf16", "mode": mode, "unit": "us", "ours": records.rounded(median)},
                    **{"peer": None, "peer_value": None, "limit": wanted, "ratio": None, "time_us": records.rounded(median)},
                    **{"spread": {"ours": [records.rounded(min(microseconds)), records.rounded(max(microseconds))], "peer": None}},
                    **shared,
                    "device": devices[0],
                }
            )
    if options.json and results:
        records.write(options.json, results, append=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
