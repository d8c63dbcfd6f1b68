#!/usr/bin/env python3
"""Measures Tilewave's matrix products on a GPU, called from Python, against cuBLAS and Triton as PyTorch calls them, in one process and run.

    python3 benchmarks/gemm_peer.py --json benchmarks/results/nvidia-h200/gemm_peer.json

y = x W^T, where x is [M, K] and W is stored [N, K]. Groups of cases (--group square,fp8 picks some), named by their M x N x K:
  square    1024 to 8192, bf16 and f16
  model     16384 x 6144 x 2048, bf16 and f16
  few-rows  1, 8 and 64 x 6144 x 2048, bf16: against the bytes that they read and write, too
  fp8       4096 and 8192, e4m3 with a scale for each operand
  rows      4096 and 8192, e4m3 with a scale for each row of x and of W
  blocks    8192, 4096 x 4096 x 7168 and 64 x 7168 x 2048, e4m3 with a scale for each 128 of K of x and each 128 x 128 of W
  grouped   groups of rows, each with a W of its own; and k-grouped, the gradient of those W
  grouped-blocks  the same of e4m3 with block scales

Needs PyTorch with CUDA and a Hopper GPU. Each case is first checked: against float64 on some rows, against each peer on all. A case that fails does not stop the
others. Exit codes: 0 done, 1 something failed or is missing, 2 wrong usage. benchmarks/README.md explains the modes.
"""

import functools
import math
import sys

import gpu_timing
import torch
from accuracy import poisoned, some_rows, wrong_values
from gpu_timing import COLD_BYTES, Contender, Group, expected_seconds, require_right, taking_turns

SQUARES = (1024, 2048, 4096, 8192)
MODEL = (16384, 6144, 2048)
ROWS = (1, 8, 64)
FP8_SQUARES = (4096, 8192)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
FP8_SCALES = (0.5, 0.25)
BLOCK_SCALED = ((8192, 8192, 8192), (4096, 4096, 7168), (64, 7168, 2048))
GROUPED = tuple((groups, rows, n, k) for groups in (8, 64) for rows in (128, 1024, 4096) for n, k in ((4096, 7168), (7168, 2048)))
MOST_GROUPED_ROWS = 65536
PEERS = ("cublas", "triton", "grouped_mm", "cublas_loop")
GRAPH_TFLOP = 0.03  # less is done so soon that Python's part of a launch would be measured
TRITON = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
AUTOTUNE_S = 40


def triton_cases(quick):
    """Few: for each, Inductor times some twenty tilings."""
    return ("nt-4096",) if quick else ("nt-4096", "nt-8192", case_name(*MODEL))


def case_name(m, n, k):
    return f"nt-{m}" if m == n == k else f"nt-{m}x{n}x{k}"


def product(x, w):
    return x @ w.T


class Product:
    """Operands of random numbers; y is of their dtype, for fp8 bf16."""

    def __init__(self, run, m, n, k, dtype):
        self.run, self.shape = run, (m, n, k)
        self.tflop = 2 * m * n * k * 1e-12
        self.x, self.w = (run.normal(rows, k).to(dtype) for rows in (m, n))
        self.scales = None
        if dtype == torch.float8_e4m3fn:
            self.scales = [torch.tensor([scale], dtype=torch.float32, device=run.device) for scale in FP8_SCALES]
        out_dtype = torch.bfloat16 if self.scales else dtype
        self.y, self.peer_y = (poisoned(m, n, dtype=out_dtype, device=run.device) for _ in range(2))

    def ours(self, w=None):
        """A function that enqueues one execution and gives y; `w`: other weights."""
        a_scale, b_scale = self.scales or (None, None)
        w = self.w if w is None else w
        return functools.partial(self.run.ops.gemm, self.x, w.T, a_scale=a_scale, b_scale=b_scale, out=self.y)

    def cublas(self, w=None):
        w = self.w if w is None else w
        if self.scales:
            fp8 = {"out_dtype": torch.bfloat16, "use_fast_accum": True}  # sums as ours
            return functools.partial(torch._scaled_mm, self.x, w.T, *self.scales, **fp8, out=self.peer_y)
        return functools.partial(torch.mm, self.x, w.T, out=self.peer_y)

    def triton(self):
        return functools.partial(gpu_timing.compiled(product, options=TRITON), self.x, self.w)

    def check(self):
        rows = some_rows(self.shape[0], self.run.rng, self.run.device)
        scale = math.prod(FP8_SCALES) if self.scales else 1.0
        y = self.ours()()[rows]
        naive = self.x[rows].to(y.dtype) @ self.w.to(y.dtype).T * scale
        require_right(wrong_values("y", y, naive, self.x[rows].double() @ self.w.double().T * scale))


def run_product(run, m, n, k, dtype_name, dtype):
    name = case_name(m, n, k)
    if not run.wants(name):
        return
    with run.case(f"{name} {dtype_name}"):
        call = Product(run, m, n, k, dtype)
        call.check()
        contenders = [Contender("tilewave", call.ours(), call.tflop)]
        contenders += run.peer(name, "cublas", call.cublas, call.tflop, call.y)
        if dtype_name == "bf16" and name in triton_cases(run.options.quick):
            contenders += run.peer(name, "triton", call.triton, call.tflop, call.y)
        limit = run.tflops and run.tflops * (2 if call.scales else 1)
        for mode in run.modes(modes_of(m, n, k)):
            for record in run.compare(name, dtype_name, mode, "TFLOP/s", contenders, limit, group="Python"):
                run.add(record)


def modes_of(m, n, k):
    return ("graph",) if 2 * m * n * k * 1e-12 < GRAPH_TFLOP else ("hot", "cool")


def run_few_rows(run):
    """Each launch with other weights, so that none are in the L2 cache."""
    _, n, k = MODEL
    for m in ROWS:
        name = f"few-rows-{m}x{n}x{k}"
        if not run.wants(name):
            continue
        with run.case(name):
            call = Product(run, m, n, k, torch.bfloat16)
            call.check()
            gigabytes = 2e-9 * (m * k + n * k + m * n)
            weights = [call.w, *(run.normal(n, k) for _ in range(math.ceil(COLD_BYTES / (2 * n * k)) - 1))]
            contenders = [Contender("tilewave", taking_turns([call.ours(w) for w in weights]), gigabytes)]
            make = functools.partial(taking_turns, [call.cublas(w) for w in weights])
            contenders += run.peer(name, "cublas", make, gigabytes, call.y)
            for mode in run.modes(("graph",)):
                for record in run.compare(name, "bf16", mode, "GB/s", contenders, run.memory_gbps, group="Python"):
                    run.add(record)


class RowScaled(Product):
    """Operands with a scale for each row of x and of W."""

    def __init__(self, run, m, n, k):
        super().__init__(run, m, n, k, torch.float8_e4m3fn)
        self.scales = [0.1 + torch.rand(*shape, device=run.device) for shape in ((m, 1), (1, n))]

    def check(self):
        rows = some_rows(self.shape[0], self.run.rng, self.run.device)
        of_x, of_w = (scale.double() for scale in self.scales)
        y, exact = self.ours()()[rows], self.x[rows].double() @ self.w.double().T * of_x[rows] * of_w
        require_right(wrong_values("y", y, exact.to(torch.bfloat16), exact))


class BlockScaled(Product):
    """Operands that cast_fp8() and cast_fp8_blocks() gave, with their scales."""

    def __init__(self, run, m, n, k):
        self.run, self.shape, self.tflop = run, (m, n, k), 2 * m * n * k * 1e-12
        self.x, self.x_scale = run.ops.cast_fp8(run.normal(m, k))
        self.w, self.w_scale = run.ops.cast_fp8_blocks(run.normal(n, k))
        self.y, self.peer_y = (poisoned(m, n, dtype=torch.bfloat16, device=run.device) for _ in range(2))
        # cuBLAS wants a column of scales for each 128 of K.
        self.x_columns = self.x_scale.T.contiguous().T

    def ours(self):
        return functools.partial(self.run.ops.gemm, self.x, self.w.T, a_scale=self.x_columns, b_scale=self.w_scale.T, out=self.y)

    def cublas(self):
        # A row of scales for each 128 rows of W, padded to a multiple of four.
        n_blocks, k_blocks = self.w_scale.shape
        padded = torch.zeros(n_blocks, -(-k_blocks // 4) * 4, device=self.w_scale.device)
        padded[:, :k_blocks] = self.w_scale
        of_w = padded[:, :k_blocks].T
        return functools.partial(
            torch._scaled_mm, self.x, self.w.T, self.x_columns, of_w, out_dtype=torch.bfloat16, use_fast_accum=False, out=self.peer_y
        )

    def check(self):
        rows = some_rows(self.shape[0], self.run.rng, self.run.device)
        x = self.x[rows].double() * self.x_scale[rows].double().repeat_interleave(128, 1)[:, : self.shape[2]]
        w = self.w.double() * self.w_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[: self.shape[1], : self.shape[2]]
        y, exact = self.ours()()[rows], x @ w.T
        require_right(wrong_values("y", y, exact.to(torch.bfloat16), exact))


def run_scaled(group, make, shapes, run):
    for m, n, k in shapes:
        name = f"{group}-{m}" if m == n == k else f"{group}-{m}x{n}x{k}"
        if not run.wants(name):
            continue
        with run.case(name):
            call = make(run, m, n, k)
            call.check()
            contenders = [Contender("tilewave", call.ours(), call.tflop)]
            contenders += run.peer(name, "cublas", call.cublas, call.tflop, call.y)
            for mode in run.modes(modes_of(m, n, k)):
                for record in run.compare(name, "fp8_e4m3", mode, "TFLOP/s", contenders, run.tflops and 2 * run.tflops, group="Python"):
                    run.add(record)


class Grouped:
    """Groups of `rows` rows each, and W [groups, n, k]; bf16."""

    def __init__(self, run, groups, rows, n, k):
        self.run, self.sizes = run, (groups, rows, n, k)
        self.tflop = 2 * groups * rows * n * k * 1e-12
        self.x, self.gradient = (run.normal(groups * rows, columns).to(torch.bfloat16) for columns in (k, n))
        self.w = run.normal(groups * n, k).to(torch.bfloat16).view(groups, n, k)
        self.offsets = torch.arange(groups + 1, dtype=torch.int32, device=run.device) * rows
        self.y, self.peer_y = (poisoned(groups * rows, n, dtype=torch.bfloat16, device=run.device) for _ in range(2))

    def ours(self):
        return functools.partial(self.run.ops.grouped_gemm, self.x, self.w.transpose(1, 2), self.offsets, out=self.y)

    def grouped_mm(self):
        return functools.partial(torch._grouped_mm, self.x, self.w.transpose(1, 2), offs=self.offsets[1:].contiguous())

    def cublas_loop(self):
        groups, rows, _, _ = self.sizes
        parts = [(self.x[g * rows : (g + 1) * rows], self.w[g].T, self.peer_y[g * rows : (g + 1) * rows]) for g in range(groups)]

        def loop():
            for x, w, y in parts:
                torch.mm(x, w, out=y)
            return self.peer_y

        return loop

    def ours_over_k(self, out):
        return functools.partial(self.run.ops.k_grouped_gemm, self.gradient.T, self.x, self.offsets, out=out)

    def grouped_mm_over_k(self):
        return functools.partial(torch._grouped_mm, self.gradient.T, self.x, offs=self.offsets[1:].contiguous())


def grouped_cases():
    return [case for case in GROUPED if case[0] * case[1] <= MOST_GROUPED_ROWS]


def run_grouped(run):
    for groups, rows, n, k in grouped_cases():
        name, over_k = (f"{prefix}-{groups}x{rows}x{n}x{k}" for prefix in ("grouped", "k-grouped"))
        if not run.wants(name) and not run.wants(over_k):
            continue
        with run.case(name):
            call = Grouped(run, groups, rows, n, k)
            if run.wants(name):
                at = some_rows(groups * rows, run.rng, run.device)
                exact = torch.stack([call.x[r].double() @ call.w[r // rows].double().T for r in at.tolist()])
                require_right(wrong_values("y", call.ours()()[at], exact.to(torch.bfloat16), exact))
                contenders = [Contender("tilewave", call.ours(), call.tflop)]
                contenders += run.peer(name, "grouped_mm", call.grouped_mm, call.tflop, call.y)
                contenders += run.peer(name, "cublas_loop", call.cublas_loop, call.tflop, call.y)
                for mode in run.modes(("hot",)):
                    for record in run.compare(name, "bf16", mode, "TFLOP/s", contenders, run.tflops, group="Python"):
                        run.add(record)
            if run.wants(over_k) and rows == 1024:
                out = poisoned(groups, n, k, dtype=torch.bfloat16, device=run.device)
                exact = call.gradient[:rows, :64].double().T @ call.x[:rows].double()
                require_right(wrong_values("d", call.ours_over_k(out)()[0, :64], exact.to(torch.bfloat16), exact))
                contenders = [Contender("tilewave", call.ours_over_k(out), call.tflop)]
                contenders += run.peer(over_k, "grouped_mm", call.grouped_mm_over_k, call.tflop, out)
                for mode in run.modes(("hot",)):
                    for record in run.compare(over_k, "bf16", mode, "TFLOP/s", contenders, run.tflops, group="Python"):
                        run.add(record)


class GroupedBlockScaled(Grouped):
    """The same of fp8, with a scale for each 128 of K of x and each 128 x 128 of W."""

    def __init__(self, run, groups, rows, n, k):
        super().__init__(run, groups, rows, n, k)
        self.x, x_scale = run.ops.cast_fp8(self.x)
        w, w_scale = run.ops.cast_fp8_blocks(self.w.view(groups * n, k))
        self.w, self.w_scale = w.view(groups, n, k), w_scale.view(groups, n // 128, k // 128)
        self.x_columns = x_scale.T.contiguous().T

    def ours(self):
        scales = {"a_scale": self.x_columns, "b_scale": self.w_scale.transpose(1, 2)}
        return functools.partial(self.run.ops.grouped_gemm, self.x, self.w.transpose(1, 2), self.offsets, **scales, out=self.y)

    def cublas_loop(self):
        groups, rows, _, _ = self.sizes
        parts = []
        for g in range(groups):
            at = slice(g * rows, (g + 1) * rows)
            parts.append((self.x[at], self.w[g].T, self.x_columns[at].T.contiguous().T, self.w_scale[g].T, self.peer_y[at]))

        def loop():
            for x, w, x_scale, w_scale, y in parts:
                torch._scaled_mm(x, w, x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=False, out=y)
            return self.peer_y

        return loop


def run_grouped_block_scaled(run):
    for groups, rows, n, k in grouped_cases():
        name = f"grouped-blocks-{groups}x{rows}x{n}x{k}"
        if not run.wants(name):
            continue
        with run.case(name):
            call = GroupedBlockScaled(run, groups, rows, n, k)
            y = call.ours()()
            contenders = [Contender("tilewave", call.ours(), call.tflop)]
            contenders += run.peer(name, "cublas_loop", call.cublas_loop, call.tflop, y)
            for mode in run.modes(("hot",)):
                for record in run.compare(name, "fp8_e4m3", mode, "TFLOP/s", contenders, run.tflops and 2 * run.tflops, group="Python"):
                    run.add(record)


def products(group):
    """M, N, K, and the dtype with its name."""
    shapes = {"square": [(size,) * 3 for size in SQUARES], "model": [MODEL], "fp8": [(size,) * 3 for size in FP8_SQUARES]}[group]
    dtypes = {"fp8_e4m3": torch.float8_e4m3fn} if group == "fp8" else DTYPES
    return [(*shape, *dtype) for dtype in dtypes.items() for shape in shapes]


def run_products(group, run):
    for shape_and_dtype in products(group):
        run_product(run, *shape_and_dtype)


def plan_products(group, quick):
    total = 0
    for m, n, k, dtype_name, _ in products(group):
        triton = dtype_name == "bf16" and case_name(m, n, k) in triton_cases(quick)
        total += 1 + triton * AUTOTUNE_S + sum(expected_seconds(mode, 2 + triton, quick) for mode in modes_of(m, n, k))
    return total


def group_of(name, what):
    return Group(what, functools.partial(run_products, name), functools.partial(plan_products, name))


GROUPS = {
    "square": group_of("square", "square matrices"),
    "model": group_of("model", "a layer of a model, many tokens"),
    "few-rows": Group(
        "a layer of a model, few tokens", run_few_rows, lambda quick: len(ROWS) * (1 + expected_seconds("graph", 2, quick, 0.01))
    ),
    "fp8": group_of("fp8", "fp8"),
    "rows": Group(
        "fp8 with scales of rows",
        functools.partial(run_scaled, "rows", RowScaled, [(size,) * 3 for size in FP8_SQUARES]),
        lambda quick: len(FP8_SQUARES) * (1 + expected_seconds("hot", 2, quick)),
    ),
    "blocks": Group(
        "fp8 with block scales",
        functools.partial(run_scaled, "blocks", BlockScaled, BLOCK_SCALED),
        lambda quick: len(BLOCK_SCALED) * (1 + expected_seconds("hot", 2, quick)),
    ),
    "grouped-blocks": Group(
        "groups of rows, fp8 with block scales",
        run_grouped_block_scaled,
        lambda quick: len(grouped_cases()) * (2 + expected_seconds("hot", 2, quick)),
    ),
    "grouped": Group(
        "groups of rows", run_grouped, lambda quick: len(grouped_cases()) * (2 + 1.5 * expected_seconds("hot", 3, quick))
    ),
}


if __name__ == "__main__":
    sys.exit(gpu_timing.main(__doc__.split("\n")[0], "gemm", GROUPS, PEERS))
