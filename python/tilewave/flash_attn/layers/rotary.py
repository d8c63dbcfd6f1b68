"""Rotary position embedding with the names of flash_attn.layers.rotary in FlashAttention 2.8."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._rotary import apply_rotary_emb, apply_rotary_emb_func, apply_rotary_emb_kv_, apply_rotary_emb_qkv_

if TYPE_CHECKING:
    from ._rotary_embedding import RotaryEmbedding as RotaryEmbedding
else:

    def __getattr__(name: str):
        if name == "RotaryEmbedding":
            from ._rotary_embedding import RotaryEmbedding

            return RotaryEmbedding
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["RotaryEmbedding", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_"]
