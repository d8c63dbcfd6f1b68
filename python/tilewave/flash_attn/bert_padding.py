"""Converts padded batches to packed tokens and back, with the names of flash_attn.bert_padding (2.8). Differentiable."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences"]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows `indices` [n] of input [rows, ...], which has 2 dimensions or more: [n, ...]."""
    if input.dim() < 2:
        raise ValueError(f"input has shape {tuple(input.shape)}; allowed: 2 dimensions or more")
    return input.index_select(0, indices)


def index_put_first_axis(values: torch.Tensor, indices: torch.Tensor, first_axis_dim: int) -> torch.Tensor:
    """[first_axis_dim, ...], whose rows `indices` [n] are the rows of values [n, ...] (2 dimensions or more). Other rows are zeros."""
    if values.dim() < 2 or indices.dim() != 1:
        raise ValueError(
            f"values has shape {tuple(values.shape)} and indices {tuple(indices.shape)}; allowed: 2 dimensions or more for values, 1 for indices"
        )
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def unpad_input(hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None):
    """The tokens that attention_mask or unused_mask selects, packed.

    hidden_states: [batch, seqlen, ...]. attention_mask: bool or int [batch, seqlen], nonzero for a token. unused_mask: the same, nonzero
    for a position that keeps its memory but holds no token. Gives

        hidden_states   [total, ...]
        indices         int64 [total], the tokens' rows in [batch * seqlen, ...]
        cu_seqlens      int32 [batch + 1], the sequences' offsets
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
    """unpad_input's tokens [total, ...] back in their positions, zeros elsewhere: [batch, seqlen, ...]."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def unpad_input_for_concatenated_sequences(hidden_states: torch.Tensor, attention_mask_in_length: torch.Tensor):
    """unpad_input() of rows that each hold several sequences, one after the other, padding at the end.

    hidden_states: [batch, seqlen, ...]. attention_mask_in_length: int [batch, seqlen], of each row the lengths of its sequences, then
    zeros: [2, 3, 0, 0, 0, 0] is a row with a sequence of 2 tokens, one of 3 and one place of padding. Gives

        hidden_states   [total, ...]
        indices         int64 [total], the tokens' rows in [batch * seqlen, ...]
        cu_seqlens      int32 [sequences + 1], the sequences' offsets
        max_seqlen      int, the longest sequence (on CUDA it waits for the device)
    """
    import torch

    if attention_mask_in_length.shape != hidden_states.shape[:2]:
        raise ValueError(
            f"attention_mask_in_length has shape {tuple(attention_mask_in_length.shape)}; hidden_states' first two are "
            f"{tuple(hidden_states.shape[:2])}"
        )
    places = torch.arange(attention_mask_in_length.shape[1], device=attention_mask_in_length.device)
    indices = (places < attention_mask_in_length.sum(dim=1, keepdim=True)).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, int(lengths.max())
