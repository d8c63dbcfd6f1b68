"""The project's accuracy rule: how far a result may be from a float64 reference, beside what the same arithmetic in its own dtype gives."""

import math

import torch

RELATIVE_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def ulp(x, dtype):
    """Distance between neighbours of `dtype` at magnitude x."""
    if x == 0:
        return 0.0
    bits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    return 2.0 ** (math.floor(math.log2(x)) - bits)


def wrong_values(where, out, naive, reference, factor=2, relative=None):
    """What is wrong with `out`: max|out - ref| <= factor max|naive - ref| + 2 ulp(max|ref|) + 1e-5, and a bound of the relative L2 error. `naive`: computed in
    out's dtype; `reference`: in float64; `factor`: 3 for gradients; `relative`: the bound in L2, if operands are rounded more coarsely than out."""
    dtype, out = out.dtype, out.double()
    error = (out - reference).abs().max().item()
    allowed = factor * (naive.double() - reference).abs().max().item() + 2 * ulp(reference.abs().max().item(), dtype) + 1e-5
    relative_l2, most = relative_error(out, reference), relative or RELATIVE_ERROR[dtype]
    wrong = []
    if not error <= allowed:  # written so that NaN fails
        wrong.append(f"{where}: error {error:.3g}, allowed {allowed:.3g}")
    if not relative_l2 <= most:
        wrong.append(f"{where}: relative L2 error {relative_l2:.3g}, allowed {most}")
    return wrong


def relative_error(a, b):
    """|a - b| / |b|, in L2."""
    return ((a - b).norm() / b.norm()).item()


def some_rows(count, rng, device):
    """The ends, those around the edges of tiles, and random ones."""
    picked = {0, count - 1, *(r for r in (63, 64, 127, 128, 191, 192) if r < count), *(rng.randrange(count) for _ in range(96))}
    return torch.tensor(sorted(picked), device=device)


def poisoned(*shape, dtype, device):
    """Memory in which what is not written shows."""
    return torch.full(shape, math.nan, dtype=dtype, device=device)
