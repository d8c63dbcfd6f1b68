"""flash_attn.layers: rotary."""
