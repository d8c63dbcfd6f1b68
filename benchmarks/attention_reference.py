"""Rows of attention in float64, held against a result by the accuracy rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from accuracy import wrong_values


@dataclass(frozen=True)
class Features:
    """What a call does besides softmax(Q K^T / sqrt(head_dim)) V. alibi_slopes: f32 [heads]."""

    causal: bool = False
    window_left: int | None = None
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None

    def arguments(self):
        """tilewave.ops's."""
        window = (-1 if self.window_left is None else self.window_left, -1)
        return {"causal": self.causal, "window": window, "softcap": self.softcap, "alibi_slopes": self.alibi_slopes}


def softmax_rows(query, key, value, rows, features, head, diagonal):
    """Output and log-sum-exp of `query`, the rows `rows` of one head, in the dtype of its operands."""
    scores = (query @ key.T) * (1 / math.sqrt(query.shape[1]))
    if features.softcap:
        scores = features.softcap * torch.tanh(scores / features.softcap)
    ahead = (
        torch.arange(key.shape[0], device=key.device)[None, :] - (rows + diagonal)[:, None]
    )  # how many keys after the one beside the query
    if features.alibi_slopes is not None:
        scores = scores - (features.alibi_slopes[head].double() * ahead.abs()).to(scores.dtype)
    if features.causal:
        scores = scores.masked_fill(ahead > 0, -math.inf)
    if features.window_left is not None:
        scores = scores.masked_fill(ahead < -features.window_left, -math.inf)
    return torch.softmax(scores, dim=-1) @ value, torch.logsumexp(scores, dim=-1)


def wrong_rows(where, query, key, value, out, lse, rows, features, head):
    """What is wrong with rows of one head, by the accuracy rule; LSE may be off by 1e-3. `query`, `key`, `value`: all of one sequence and head, [seqlen,
    head_dim]; `out`, `lse` likewise."""
    diagonal = key.shape[0] - query.shape[0]
    reference, reference_lse = softmax_rows(query[rows].double(), key.double(), value.double(), rows, features, head, diagonal)
    naive, _ = softmax_rows(query[rows], key, value, rows, features, head, diagonal)
    wrong = wrong_values(where, out[rows], naive, reference)
    lse_error = (lse[rows].double() - reference_lse).abs().max().item()
    if not lse_error <= 1e-3:
        wrong.append(f"{where}: LSE error {lse_error:.3g}, allowed 0.001")
    return wrong
