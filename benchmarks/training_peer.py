#!/usr/bin/env python3
"""Measures a training step of one Llama block on a GPU, compiled by torch.compile, with tilewave's attention and with each of PyTorch's, in one process and run.

    python3 benchmarks/training_peer.py --json benchmarks/results/nvidia-h200/training_peer.json

A step is a forward and a backward pass with the gradients of all weights, in bf16: 16384 tokens in sequences of 4096, 4096 columns, heads of 128, causal, an MLP of 11008
columns; with as many heads of keys as of queries, and with a quarter of them. TFLOP/s counts the visible scores, and products only.

Needs PyTorch with CUDA and a Hopper GPU. Each peer's loss and gradients are first compared with ours. A case that fails does not stop the others.
Exit codes: 0 done, 1 something failed or is missing, 2 wrong usage. benchmarks/README.md explains the modes.
"""

import functools
import sys

import gpu_timing
import torch
from gpu_timing import Contender, Group, expected_seconds
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, SEQLEN, WIDTH, HEAD_DIM, MLP = 16384, 4096, 4096, 128, 11008
HEADS = WIDTH // HEAD_DIM
KV_HEADS = (HEADS, HEADS // 4)
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash_attention_2": SDPBackend.FLASH_ATTENTION}
WANTED = 1.10
COMPILE_S = 30  # of a block, forward and backward


class Block(torch.nn.Module):
    """A Llama block. `attend`: takes what scaled_dot_product_attention takes."""

    def __init__(self, kv_heads, attend):
        super().__init__()
        self.kv_heads, self.attend = kv_heads, attend
        linear = functools.partial(torch.nn.Linear, bias=False, device="cuda", dtype=torch.bfloat16)
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.qkv, self.out = linear(WIDTH, (HEADS + 2 * kv_heads) * HEAD_DIM), linear(WIDTH, WIDTH)
        self.gate_up, self.down = linear(WIDTH, 2 * MLP), linear(MLP, WIDTH)

    def forward(self, x, cos, sin):
        batch, seqlen, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, seqlen, -1, HEAD_DIM).transpose(1, 2)
        q, k, v = heads.split([HEADS, self.kv_heads, self.kv_heads], dim=1)
        q, k = (rotated(t, cos, sin) for t in (q, k))
        o = self.attend(q, k, v, is_causal=True, enable_gqa=self.kv_heads != HEADS)
        x = x + self.out(o.transpose(1, 2).reshape(batch, seqlen, WIDTH))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def tables():
    positions = torch.arange(SEQLEN, device="cuda", dtype=torch.float32)
    angles = positions[:, None] * 10000.0 ** -(torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
    return (torch.cat((f(angles), f(angles)), dim=-1).bfloat16() for f in (torch.cos, torch.sin))


def teraflop(kv_heads):
    weights = WIDTH * (HEADS + 2 * kv_heads) * HEAD_DIM + WIDTH * WIDTH + 3 * WIDTH * MLP
    scores = TOKENS // SEQLEN * HEADS * SEQLEN * (SEQLEN + 1) / 2
    return (6 * TOKENS * weights + (4 + 10) * scores * HEAD_DIM) / 1e12


def pytorch_attention(backend):
    """scaled_dot_product_attention by this backend alone. The choice is made in the compiled code: outside it, TorchDynamo would take the code of another one."""

    def attend(q, k, v, **options):
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, **options)

    return attend


def make_step(state, kv_heads, attend, inputs):
    """A training step as a function that gives the loss and the gradients of all weights."""
    block = Block(kv_heads, attend)
    block.load_state_dict(state)
    forward, weights = torch.compile(block), list(block.parameters())
    x, cos, sin, wanted = inputs

    def step():
        with torch.enable_grad():
            loss = functional.mse_loss(forward(x, cos, sin), wanted)
        return loss.detach(), *torch.autograd.grad(loss, weights)

    return step


def require_ours(state, kv_heads, x):
    """Calls in a compiled block are not counted, so the block is run as it is."""
    import tilewave

    block = Block(kv_heads, tilewave.scaled_dot_product_attention)
    block.load_state_dict(state)
    before = tilewave.sdpa_counts().get("tilewave", 0)
    block(x, *tables())
    if tilewave.sdpa_counts().get("tilewave", 0) != before + 1:
        raise gpu_timing.WrongResult(f"PyTorch's attention would be measured as ours: {tilewave.why_fallback()}")


def run_block(kv_heads, run):
    import tilewave

    name = f"llama-block-s{SEQLEN}-kv{kv_heads}"
    if not run.wants(name):
        return
    with run.case(name):
        state = Block(kv_heads, None).state_dict()
        x, wanted = (run.normal(TOKENS // SEQLEN, SEQLEN, WIDTH) for _ in range(2))
        make = functools.partial(make_step, state, kv_heads, inputs=(x, *tables(), wanted))
        require_ours(state, kv_heads, x)
        ours = make(tilewave.scaled_dot_product_attention)
        results = ours()
        work = teraflop(kv_heads)
        contenders = [Contender("tilewave", ours, work)]
        for peer, backend in BACKENDS.items():
            theirs = functools.partial(make, pytorch_attention(backend))
            contenders += run.peer(name, peer, theirs, work, results)
        for mode in run.modes(("hot", "cool")):
            for record in run.compare(name, "bf16", mode, "TFLOP/s", contenders, run.tflops, group="Python"):
                run.add(record, WANTED)


def plan(quick):
    return len(BACKENDS) * COMPILE_S + COMPILE_S + 2 * expected_seconds("hot", 3, quick, 40)


GROUPS = {f"kv{kv_heads}": Group(f"Llama block, {kv_heads} heads of keys", functools.partial(run_block, kv_heads), plan) for kv_heads in KV_HEADS}


if __name__ == "__main__":
    sys.exit(gpu_timing.main(__doc__.split("\n")[0], "training", GROUPS, tuple(BACKENDS)))
