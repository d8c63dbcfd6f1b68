"""RotaryEmbedding, apart from _rotary.py because a module of PyTorch needs PyTorch when it is defined."""

from __future__ import annotations

import torch

from ._rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_


class RotaryEmbedding(torch.nn.Module):
    """Rotary position embedding (Su et al., arXiv 2104.09864) of the first `dim` dimensions of queries and keys, in place.

    Position p rotates pair n by the angle p * base^(-2 n / dim). interleaved: pairs are 2 n and 2 n + 1, else n and n + dim / 2.
    scale_base: XPos (Sun et al., arXiv 2212.10554): of a table of `length` positions queries are also multiplied by ((2 n + 0.4 dim) / (1.4
    dim))^((p - length // 2) / scale_base), and keys divided by it. 512 is usual.
    """

    inv_freq: torch.Tensor
    scale: torch.Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._inverse_frequencies(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._scale(device), persistent=False)
        self._length = 0
        self._tables: tuple[torch.Tensor, ...] = ()  # cos and sin; with XPos also those of keys

    def _even(self, device) -> torch.Tensor:
        return torch.arange(0, self.dim, 2, dtype=torch.float32, device=device)

    def _inverse_frequencies(self, device) -> torch.Tensor:
        return self.base ** (-self._even(device) / self.dim)

    def _scale(self, device) -> torch.Tensor:
        return (self._even(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _extend(self, length: int, device: torch.device, dtype: torch.dtype) -> None:
        """Tables of at least `length` positions. Computed in float32, whatever dtype the module was converted to."""
        fits = self._tables and self._tables[0].device == device and self._tables[0].dtype == dtype
        if fits and length <= self._length and not (self.training and self._tables[0].is_inference()):
            return
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = torch.outer(positions, self._inverse_frequencies(device))
        tables = [(angles.cos(), angles.sin())]
        if self.scale_base is not None:
            power = (positions - length // 2) / self.scale_base
            scale = self._scale(device) ** power[:, None]
            cos, sin = tables[0]
            tables = [(cos * scale, sin * scale), (cos / scale, sin / scale)]
        self._tables = tuple(x.to(dtype) for pair in tables for x in pair)
        self._length = length

    def forward(
        self,
        qkv: torch.Tensor,
        kv: torch.Tensor | None = None,
        seqlen_offset: int | torch.Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Rotates queries and keys in place, and returns its arguments.

        qkv: [batch, seqlen, 3, heads, headdim], or with num_heads_q [batch, seqlen, num_heads_q + 2 * kv_heads, headdim]. With kv, [batch,
        seqlen, 2, kv_heads, headdim], qkv is q, [batch, seqlen, heads, headdim]. Token s of sequence b has position s + seqlen_offset, a
        number or int32 or int64 [batch]. max_seqlen: positions that tables are made for, needed where seqlen_offset is a tensor and none
        are that long yet.
        """
        length = max_seqlen
        if length is None and not isinstance(seqlen_offset, torch.Tensor):
            length = qkv.shape[1] + seqlen_offset
        if length is not None:
            self._extend(length, qkv.device, qkv.dtype)
        elif not self._tables:
            raise ValueError("max_seqlen is None; it is needed where seqlen_offset is a tensor, since no table has been made yet")
        cos, sin = self._tables[:2]
        cos_k, sin_k = self._tables[2:] or (None, None)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        of_k = (cos, sin) if cos_k is None else (cos_k, sin_k)
        return q, apply_rotary_emb_kv_(kv, *of_k, self.interleaved, seqlen_offset)
