"""The layer in plain PyTorch and float64, without Tilewave, and the comparison with it."""

import math
import typing

import torch

BF16, E4M3 = 2.0**-9, 2.0**-4  # the largest relative error of one rounding

# Roundings to bf16 on the way from x to a step's result. Each adds at most BF16 to the relative error. Products with random weights,
# norms and rotations hardly change the errors that their inputs have.
ROUNDINGS = {
    "q_a": 3,  # the product, the normalised row, its product with the weight
    "q": 5,  # q_b_proj, W_uk or the rotation
    "kv": 3,
    "index_q": 6,  # q_a's, wq_b, the rotation, the Hadamard transform
    "index_k": 4,  # wk, the norm, the rotation, the Hadamard transform
    "attention": 10,  # q's and kv's, the softmax weights, the result
    "output": 12,  # W_uv, o_proj
}
DEVIATIONS = 3  # bound of selection_error()


class Row(typing.NamedTuple):
    step: str
    error: float
    bound: float

    @property
    def holds(self):
        return self.error <= self.bound  # not for NaN


def angles(config, tokens):
    """[tokens, 32]: positions times YaRN's frequencies."""
    dim, scaling = config.qk_rope_head_dim, config.rope_scaling
    frequencies = []
    for i in range(dim // 2):
        frequency = config.rope_theta ** (-2 * i / dim)
        # The ramp's ends are the pairs with beta_fast and beta_slow rotations over the original context.
        ends = []
        for rotations, rounded in ((scaling.beta_fast, math.floor), (scaling.beta_slow, math.ceil)):
            radians = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
            ends.append(min(max(rounded(dim / 2 * math.log(radians, config.rope_theta)), 0), dim - 1))
        ramp = min(max((i - ends[0]) / (ends[1] - ends[0]), 0), 1)
        frequencies.append((1 - ramp) * frequency + ramp * frequency / scaling.factor)
    return torch.arange(tokens).double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)


def rotated(x, angle, interleaved):
    """x [tokens, heads, 64] with pairs of columns, 2 k and 2 k + 1 or k and k + 32, multiplied by exp(i angle) as complex numbers."""
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).mT
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle)[:, None])
    return (product if interleaved else product.mT).flatten(-2)


def rms_norm(x, weight, epsilon):
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def layer_norm(x, weight, bias):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt() * weight + bias


def hadamard(x):
    """x H / sqrt(n), where H is Sylvester's matrix: its own inverse."""
    h = torch.ones(1, 1, dtype=x.dtype)
    while len(h) < x.shape[-1]:
        h = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=x.dtype), h)
    return x @ h / math.sqrt(len(h))


def selected_keys(selection, tokens):
    """[queries, tokens]: the keys that `selection` [queries, topk] names; -1 names none."""
    named = torch.zeros(len(selection), tokens + 1, dtype=torch.bool)
    named.scatter_(1, selection.long().where(selection >= 0, tokens), True)
    return named[:, :tokens]


def attention_layer(config, weights, x, selection):
    """Every step's result in double, by layer.py's names, without rounding. Attention sees the keys that `selection` names.

    Each head has keys and values of its own, as in the definition of latent attention: nothing is absorbed. "deviation" bounds the standard
    deviation of the error of "scores" that comes from rounding index_q and index_k.
    """
    x, weights = x.double(), {name: weight.double() for name, weight in weights.items()}
    tokens, heads, latent = len(x), config.num_attention_heads, config.kv_lora_rank
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    angle = angles(config, tokens)

    def project(x, name):
        return x @ weights[name + ".weight"].T

    q_a = rms_norm(project(x, "q_a_proj"), weights["q_a_layernorm.weight"], config.rms_norm_eps)
    q_nope, q_rope = project(q_a, "q_b_proj").view(tokens, heads, -1).split([nope, rope], -1)
    q_rope = rotated(q_rope, angle, interleaved=True)
    c, k_rope = project(x, "kv_a_proj_with_mqa").split([latent, rope], -1)
    c = rms_norm(c, weights["kv_a_layernorm.weight"], config.rms_norm_eps)
    k_rope = rotated(k_rope[:, None], angle, interleaved=True)[:, 0]

    index_q = project(q_a, "indexer.wq_b").view(tokens, config.index_n_heads, -1)
    index_k = layer_norm(project(x, "indexer.wk"), weights["indexer.k_norm.weight"], weights["indexer.k_norm.bias"])[:, None]
    index_q, index_k = (torch.cat([rotated(y[..., :rope], angle, interleaved=False), y[..., rope:]], -1) for y in (index_q, index_k))
    index_k = index_k[:, 0]
    dim = config.index_head_dim
    head_weights = project(x, "indexer.weights_proj") / math.sqrt(config.index_n_heads * dim)
    products = torch.einsum("ihd,jd->ihj", index_q, index_k)
    scores = torch.einsum("ih,ihj->ij", head_weights, products.relu())

    # A score's error is a sum of independent errors, one for each element of the query's heads and of the key. After a Hadamard transform
    # the elements of a vector are about as large as each other: the vector's length / sqrt(dim).
    seen = head_weights[:, :, None] * (products > 0)
    of_q = torch.einsum("ihj,ih->ij", seen.square(), index_q.square().sum(-1)) * step_bound("index_q") ** 2
    of_k = torch.einsum("ihj,ihd->ijd", seen, index_q).square().sum(-1) * step_bound("index_k") ** 2
    deviation = ((of_q + of_k) / dim).sqrt() * index_k.norm(dim=-1)

    w_uk, w_uv = weights["kv_b_proj.weight"].view(heads, nope + value, latent).split([nope, value], 1)
    k_nope, v = torch.einsum("jc,hnc->jhn", c, w_uk), torch.einsum("jc,hvc->jhv", c, w_uv)
    logits = torch.einsum("ihn,jhn->hij", q_nope, k_nope) + torch.einsum("ihr,jr->hij", q_rope, k_rope)
    factor = 0.1 * config.rope_scaling.mscale_all_dim * math.log(config.rope_scaling.factor) + 1
    logits = logits * factor * factor / math.sqrt(nope + rope)
    p = logits.masked_fill(~selected_keys(selection, tokens), -math.inf).softmax(-1)
    return {
        "q_a": q_a,
        "q": torch.cat([torch.einsum("ihn,hnc->ihc", q_nope, w_uk), q_rope], -1),
        "kv": torch.cat([c, k_rope], -1),
        "index_q": hadamard(index_q),
        "index_k": hadamard(index_k),
        "scores": scores,
        "deviation": deviation,
        "attention": torch.einsum("hij,jc->ihc", p, c),
        "output": project(torch.einsum("hij,jhv->ihv", p, v).flatten(1), "o_proj"),
    }


def step_bound(step):
    """The bound of a step's relative error. index_q and index_k are finally rounded to e4m3."""
    return ROUNDINGS[step] * BF16 + (E4M3 if step in ("index_q", "index_k") else 0)


def selection_error(selection, scores, deviation):
    """The largest excess of an unselected key's exact score over a selected one's, in standard deviations of their difference's error.

    Infinite unless each query i selects min(topk, i + 1) different keys of the first i + 1, followed by -1.
    """
    worst = 0.0
    for i, row in enumerate(selection.tolist()):
        count = min(len(row), i + 1)
        chosen = row[:count]
        if len(set(chosen)) != count or not all(0 <= j <= i for j in chosen) or any(j != -1 for j in row[count:]):
            return math.inf
        others = [j for j in range(i + 1) if j not in chosen]
        if others:
            excess = scores[i, others][:, None] - scores[i, chosen]
            variance = deviation[i, others].square()[:, None] + deviation[i, chosen].square()
            worst = max(worst, float((excess / variance.sqrt()).max()))
    return worst


def compare(config, weights, x, steps):
    """A Row for each of layer.attention_layer()'s `steps`. The error is ||step - exact|| / ||exact||, or selection_error()."""
    exact = attention_layer(config, weights, x, steps["selection"])
    seen = torch.ones(len(x), len(x), dtype=torch.bool).tril()

    def relative_error(step, exact):
        return float((step.double() - exact).norm() / exact.norm())

    rows = []
    for step, result in steps.items():
        if step == "selection":
            rows.append(Row(step, selection_error(result, exact["scores"], exact["deviation"]), DEVIATIONS))
        elif step == "scores":
            unseen_is_left_out = bool((result[~seen] == -math.inf).all())
            error = relative_error(result[seen], exact["scores"][seen]) if unseen_is_left_out else math.inf
            rows.append(Row(step, error, float(exact["deviation"][seen].norm() / exact["scores"][seen].norm())))
        else:
            rows.append(Row(step, relative_error(result, exact[step]), step_bound(step)))
    return rows
