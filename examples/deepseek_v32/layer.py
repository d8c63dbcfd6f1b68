#!/usr/bin/env python3
"""An attention layer of DeepSeek-V3.2 on Tilewave's operators, compared step by step with a reference in double.

README.md explains it. The exit status is 1 if a step's error exceeds its bound.
"""

import argparse
import math
import pathlib
import sys
import tempfile

import checkpoint
import reference
import torch
from tilewave import ops


def rotary_table(config, tokens, device):
    """cos and sin, f32 [tokens, 32], of positions times YaRN's frequencies.

    A frequency with more than beta_fast rotations over the original context is kept. One with fewer than beta_slow is divided by the
    factor. Between them is a linear ramp over the index.
    """
    dim, scaling = config.qk_rope_head_dim, config.rope_scaling

    def index_of(rotations):
        wavelength = scaling.original_max_position_embeddings / rotations
        return dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = max(math.floor(index_of(scaling.beta_fast)), 0), min(math.ceil(index_of(scaling.beta_slow)), dim - 1)
    index = torch.arange(dim // 2, dtype=torch.float64)
    ramp = ((index - low) / (high - low)).clamp(0, 1)
    frequencies = config.rope_theta ** (-2 * index / dim) * (1 - ramp + ramp / scaling.factor)
    angles = torch.arange(tokens)[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


def softmax_scale(config):
    """1 / sqrt(192), times the square of YaRN's factor for attention."""
    factor = 0.1 * config.rope_scaling.mscale_all_dim * math.log(config.rope_scaling.factor) + 1
    return factor**2 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)


def attention_layer(config, weights, x):
    """The results of all steps by their names, of which the last, "output", is the layer's: bf16 [tokens, hidden_size].

    x: bf16 [tokens, hidden_size], one sequence from position 0, after input_layernorm. weights: checkpoint.read()'s, on x's device.
    """
    tokens, heads, latent = len(x), config.num_attention_heads, config.kv_lora_rank
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    cos, sin = rotary_table(config, tokens, x.device)

    def project(x, name):
        return ops.gemm(x, weights[name + ".weight"].T)

    # Queries. W_uk maps latent vectors to a head's keys. Applied to its queries instead, it makes the latent vectors the keys of all heads.
    w_uk, w_uv = weights["kv_b_proj.weight"].view(heads, nope + config.v_head_dim, latent).split([nope, config.v_head_dim], dim=1)
    q_a = ops.rms_norm(project(x, "q_a_proj"), weights["q_a_layernorm.weight"], epsilon=config.rms_norm_eps)
    q_b = project(q_a, "q_b_proj").view(tokens, heads, nope + rope)
    q = x.new_empty(tokens, heads, latent + rope)
    ops.gemm(q_b[..., :nope].transpose(0, 1), w_uk, out=q[..., :latent].transpose(0, 1))
    ops.rope(q_b[..., nope:], cos, sin, interleaved=True, out=q[..., latent:])

    # A token's row of the cache: its latent vector and its rotary key, shared by all heads.
    kv_a = project(x, "kv_a_proj_with_mqa")
    kv = x.new_empty(tokens, latent + rope)
    ops.rms_norm(kv_a[:, :latent], weights["kv_a_layernorm.weight"], epsilon=config.rms_norm_eps, out=kv[:, :latent])
    ops.rope(kv_a[:, None, latent:], cos, sin, interleaved=True, out=kv[:, None, latent:])

    # The indexer's queries and keys. The Hadamard transform of both preserves their products and spreads outliers, which suits e4m3.
    index_heads, index_dim = config.index_n_heads, config.index_head_dim
    normed = ops.layer_norm(project(x, "indexer.wk"), weights["indexer.k_norm.weight"], weights["indexer.k_norm.bias"], epsilon=1e-6)
    index_q = ops.rope(project(q_a, "indexer.wq_b").view(tokens, index_heads, index_dim), cos, sin)
    index_k = ops.rope(normed[:, None], cos, sin)[:, 0]
    index_q, q_scale = ops.cast_fp8(ops.hadamard(index_q, scale=index_dim**-0.5), powers_of_two=True)
    index_k, k_scale = ops.cast_fp8(ops.hadamard(index_k, scale=index_dim**-0.5), powers_of_two=True)

    # Scores of each token and those before it, and the best keys among them.
    head_weights = project(x, "indexer.weights_proj").float() * q_scale[..., 0] * (index_heads * index_dim) ** -0.5
    scores = ops.indexer_scores(index_q, index_k, head_weights, k_scale=k_scale[:, 0], causal=True)
    ends = torch.arange(1, tokens + 1, dtype=torch.int32, device=x.device)
    selection = ops.topk(scores, config.index_topk, ends=ends)[1].int()

    # Attention to these in latent space. W_uv maps latent vectors to a head's values; as a linear map it can follow the weighted sum.
    attention = ops.mla_sparse(q, kv, selection, scale=softmax_scale(config))
    values = x.new_empty(tokens, heads, config.v_head_dim)
    ops.gemm(attention.transpose(0, 1), w_uv.transpose(1, 2), out=values.transpose(0, 1))
    return {
        "q_a": q_a,
        "q": q,
        "kv": kv,
        "index_q": index_q.float() * q_scale,
        "index_k": index_k.float() * k_scale,
        "scores": scores,
        "selection": selection,
        "attention": attention,
        "output": project(values.flatten(1), "o_proj"),
    }


def check_layer(folder, tokens, device):
    """reference.compare()'s rows for the checkpoint in `folder` and random tokens."""
    config, weights = checkpoint.read(folder)
    x = torch.randn(tokens, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    steps = attention_layer(config, {name: weight.to(device) for name, weight in weights.items()}, x.to(device))
    return reference.compare(config, weights, x, {name: step.cpu() for name, step in steps.items()})


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", type=pathlib.Path, help="a folder; if it is new or empty, a random checkpoint is written there")
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error(f"--tokens is {options.tokens}; it must be positive")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.checkpoint or pathlib.Path(temporary)
        if not folder.is_dir() or not any(folder.iterdir()):
            checkpoint.write(folder, checkpoint.Config(), checkpoint.random_weights(checkpoint.Config()))
        rows = check_layer(folder, options.tokens, options.device)
    print(f"{'step':<12}{'error':>12}{'bound':>12}")
    for row in rows:
        print(f"{row.step:<12}{row.error:>12.2e}{row.bound:>12.2e}{'' if row.holds else '  exceeded'}")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
