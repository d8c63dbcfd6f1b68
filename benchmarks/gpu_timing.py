"""What the benchmarks against PyTorch's kernels share: timing on a GPU, the run with its records, and the command line."""

import argparse
import contextlib
import ctypes
import importlib
import importlib.util
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
from typing import NamedTuple

import package
import records

PROGRAM = pathlib.Path(sys.argv[0]).name

try:
    import torch
    from accuracy import relative_error
except ImportError as error:
    sys.exit(f"{PROGRAM}: {error}")

TENSOR_CORE_TFLOPS = {"GH200": 989, "H200": 989, "H100 80GB HBM3": 989, "H100 PCIe": 756}  # dense bf16, NVIDIA's data sheets
MEMORY_GBPS = {"GH200": 4000, "H200": 4800, "H100 80GB HBM3": 3350, "H100 PCIe": 2000}  # the same
MODES = ("hot", "cool", "graph")
COOL_PAUSE_S = 0.040
COOL_BURST = 3
ROUNDS_IN_FLIGHT = 4
GRAPH_LAUNCHES = 20
GRAPH_MS = 20  # fewer launches where these take longer
COLD_BYTES = 512e6  # so much memory takes turns that an L2 cache of 60 MB keeps nothing


# --- Timing, as in benchmarks/harness.cpp


@dataclass
class Contender:
    """`launch` enqueues one execution, `work` is what it does, in the record's unit times seconds."""

    name: str
    launch: Callable[[], object]
    work: float


class Measured(NamedTuple):
    """A contender's name and work, and its milliseconds per launch, one for each sample."""

    name: str
    work: float
    samples: list[float]


def taking_turns(launches):
    """A launch of the next one each time."""
    turn = -1

    def launch():
        nonlocal turn
        turn = (turn + 1) % len(launches)
        return launches[turn]()

    return launch


def compiled(function, **options):
    """`function` by Inductor, as Triton kernels for the shapes of its first call. What was compiled before is forgotten: after eight shapes PyTorch would
    compile no more."""
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, dynamic=False, **options)


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
    """A Measured for each contender."""
    launches = [contender.launch for contender in contenders]
    if mode == "cool":
        samples = measure_cool(launches, 9 if quick else 40)
    else:
        samples = {"hot": measure_hot, "graph": measure_graph}[mode](launches, 11 if quick else 60, 0.1 if quick else 0.3)
    return [Measured(contender.name, contender.work, of_one) for contender, of_one in zip(contenders, samples)]


def expected_seconds(mode, contenders, quick, launch_ms=0.5):
    """About what measure() takes."""
    if mode == "cool":
        return (9 if quick else 40) * contenders * (COOL_PAUSE_S + 4e-3 * launch_ms)
    sample_ms = max(2, launch_ms) if mode == "hot" else min(GRAPH_MS, GRAPH_LAUNCHES * launch_ms) + launch_ms
    return (
        (0.1 if quick else 0.3) + ((11 if quick else 60) + 5) * contenders * sample_ms * 1e-3 + (0.2 * contenders if mode == "graph" else 0)
    )


# --- The run


class WrongResult(Exception):
    pass


def require_right(wrong):
    if wrong:
        raise WrongResult("; ".join(wrong))


class Run:
    """What the user asked for, and what came of it. `ops`: tilewave's; `shared`: what all records have."""

    def __init__(self, options, ops, device, shared, seed):
        self.options = options
        self.ops = ops
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

    def wants(self, name):
        return not self.device_lost and (not self.options.case or any(part in name for part in self.options.case))

    def modes(self, wanted):
        return [mode for mode in wanted if mode in self.options.modes]

    @contextlib.contextmanager
    def case(self, name):
        """What goes wrong inside is reported and counted, and the next case goes on."""
        try:
            yield
            synchronize()
        except Exception as error:  # noqa: BLE001  whatever it is, the other cases are worth having
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

    def peer(self, case, name, make, work, expected):
        """[the contender], whose launch `make` gives; [] where it is not wanted, or does not run. Raises WrongResult where its result is not `expected`, a
        tensor or a tuple of them."""
        if name in self.options.skip_peer:
            return []
        try:
            launch = make()
            result = launch()
            synchronize()
        except Exception as error:  # noqa: BLE001  whatever the peer's compiler raises
            why = (str(error).strip().splitlines() or [""])[0]
            print(f"{case}: no {name}: {type(error).__name__}: {why}", file=sys.stderr, flush=True)
            return []
        pairs = zip(*((t if isinstance(t, tuple) else (t,)) for t in (result, expected)), strict=True)
        differences = [relative_error(theirs.float(), ours.float()) for theirs, ours in pairs]
        if not all(difference <= 1e-2 for difference in differences):
            raise WrongResult(f"differs from {name} by {', '.join(f'{d:.3g}' for d in differences)} (relative L2, allowed 0.01)")
        return [Contender(name, launch, work)]

    def measure(self, mode, contenders):
        """By name, what came of it. All take turns."""
        return {measured.name: measured for measured in measure(mode, contenders, self.options.quick)}

    def compare(self, case, dtype, mode, unit, contenders, limit=None, **more):
        """Ours, the first contender, against the others in one measurement: a record for each of them, or one without a peer."""
        ours, *peers = self.measure(mode, contenders).values()
        return [self.record(case, dtype, mode, unit, ours, peer, limit, **more) for peer in peers or [None]]

    def record(self, case, dtype, mode, unit, ours, peer=None, limit=None, **more):
        return records.make_record(self.shared, case, dtype, mode, unit, ours[1:], peer, limit, **more)

    def add(self, record, wanted=None, of="ratio"):
        """`wanted`: the least ratio that is asked for, of the record's field `of`."""
        self.records.append(record)
        cells = f"  {record['case']:26} {record['dtype']:8} {record['mode']:5} {record['ours']:8.1f} {record['unit']}"
        if record["peer"]:
            cells += f"  {record['peer']:18} {record['peer_value']:8.1f}  {record['ratio']:.3f}"
        if "ratio_by_blocks" in record:
            cells += f"  by blocks {record['ratio_by_blocks']:.3f}"
        if wanted is not None and record["peer"]:
            missed = record[of] < wanted
            cells += f"  wanted {wanted:.2f}{' MISSED' if missed else ''}"
            if missed:
                self.missed.append(cells.strip())
        print(cells, flush=True)

    def normal(self, *shape, dtype=torch.bfloat16):
        return torch.randn(shape, dtype=dtype, device=self.device)


# --- The program


class Group(NamedTuple):
    """Cases that belong together. `run` takes the Run; `plan` gives the seconds that it is expected to take, with or without --quick."""

    what: str
    run: Callable[[Run], None]
    plan: Callable[[bool], float]


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
        "triton": importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None,
        "nvrtc": (records.library_devices(library).get("nvrtc") or "").split(" ")[0],
    }


def listed(allowed):
    def parse(text):
        chosen = text.split(",")
        if not set(chosen) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text}; allowed: {','.join(allowed)}")
        return chosen

    return parse


def parse_arguments(description, groups, peers):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--library", type=pathlib.Path, help="the libtilewave.so to measure (default: what the package tilewave finds)")
    parser.add_argument("--target", choices=["auto", "sm_90a", "cuda"], default="auto", help="what kernels are compiled for (default: auto)")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file, as a list of records")
    parser.add_argument("--append", action="store_true", help="keep what the file has besides the cases that are measured")
    parser.add_argument("--quick", action="store_true", help="fewer samples, and fewer cases of what has to be compiled first")
    parser.add_argument("--group", type=listed(groups), default=list(groups), help=f"of {','.join(groups)} (default: all)")
    parser.add_argument("--case", action="append", default=[], help="only cases whose name contains this; may be repeated")
    parser.add_argument("--modes", type=listed(MODES), default=list(MODES), help=f"of {','.join(MODES)} (default: each case's)")
    parser.add_argument("--skip-peer", action="append", default=[], choices=list(peers), help="do not measure this peer; may be repeated")
    parser.add_argument("--check-only", action="store_true", help="check, do not measure")
    parser.add_argument("--commit", help="the commit to record (default: what git says)")
    parser.add_argument(
        "--timeout", type=float, default=1800, help="seconds after which the process ends itself, in case a kernel hangs (default: 1800)"
    )
    options = parser.parse_args()
    if options.check_only:
        options.modes = []
    return options


def give_up(seconds):
    print(f"{PROGRAM}: not done after {seconds:g} s, giving up", file=sys.stderr, flush=True)
    os._exit(1)


def run_groups(run, groups):
    for name in run.options.group:
        group = groups[name]
        if run.device_lost:
            break
        print(f"\n{name}: {group.what}, all of it about {group.plan(run.options.quick):.0f} s", flush=True)
        begin = time.monotonic()
        group.run(run)
        print(f"{name}: took {time.monotonic() - begin:.0f} s", flush=True)
        if run.options.json and run.records:
            records.write(run.options.json, run.records, run.options.append)


def main(description, family, groups, peers):
    """Runs the groups that the command line asks for; gives the exit code."""
    options = parse_arguments(description, groups, peers)
    if not torch.cuda.is_available():
        print(f"{PROGRAM}: PyTorch finds no CUDA device", file=sys.stderr)
        return 1
    try:
        ops, library = package.load(options.library)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.open("a").close()  # an unwritable path must not cost the run
    except (ImportError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    if options.target != "auto":
        importlib.import_module("tilewave").set_gpu_target(options.target)
    watchdog = threading.Timer(options.timeout, give_up, [options.timeout])
    watchdog.daemon = True
    watchdog.start()

    device = torch.device("cuda", torch.cuda.current_device())
    shared = {
        "family": family,
        "commit": options.commit or records.find_commit(),
        "date": records.now(),
        "versions": find_versions(library),
        "device": torch.cuda.get_device_name(device),
    }
    seed = random.SystemRandom().randrange(2**32)
    print(f"{shared['device']}, {shared['versions']}, seed {seed}")
    torch.manual_seed(seed)
    run = Run(options, ops, device, shared, seed)
    with torch.cuda.stream(torch.cuda.Stream(device)), torch.no_grad():
        run_groups(run, groups)
    if run.missed:
        print("\nLess than wanted:\n  " + "\n  ".join(run.missed))
    if run.failures:
        print(f"{PROGRAM}: {run.failures} failed", file=sys.stderr)
    return 1 if run.failures else 0
