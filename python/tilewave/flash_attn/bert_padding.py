"""Padded batches to packed tokens and back, by flash_attn.bert_padding's names (2.8), in PyTorch's own operations: gradients flow."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] of input [rows, ...], which has 2 dimensions or more: [n, ...]."""
    if input.dim() < 2:
        raise ValueError(f"input has shape {tuple(input.shape)}; 2 dimensions or more are wanted")
    return input.index_select(0, indices)


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None):
    """The tokens that attention_mask or unused_mask selects, one sequence behind the other.

    hidden_states: [batch, seqlen, ...]. attention_mask: bool or int [batch, seqlen], nonzero for a token. unused_mask: the same, nonzero
    for a place that keeps its memory but holds no token. Gives

        hidden_states   [total, ...]
        indices         int64 [total], the tokens' rows in [batch * seqlen, ...]
        cu_seqlens      int32 [batch + 1], where the sequences lie
        max_seqlen      int, the longest sequence (on CUDA it waits for the device)
        seqused         int32 [batch], tokens that attention_mask selects
    """
    import torch

    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            raise ValueError(f"{name} has shape {tuple(mask.shape)}; hidden_states' first two are {tuple(hidden_states.shape[:2])}")
    used = attention_mask != 0
    kept = used if unused_mask is None else used | (unused_mask != 0)
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    return (
        index_first_axis(hidden_states.flatten(0, 1), indices),
        indices,
        cu_seqlens,
        int(seqlens.max()),
        used.sum(dim=-1, dtype=torch.int32),
    )


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """unpad_input's tokens [total, ...] back in their places, zeros elsewhere: [batch, seqlen, ...]."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
