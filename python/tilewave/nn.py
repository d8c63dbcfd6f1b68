"""Modules of PyTorch.

    tilewave.nn.quantize_(model, "int4")    every nn.Linear of a model, but for its head, as a QuantLinear, in place

Imports torch.
"""

from __future__ import annotations

import warnings
from typing import Iterable

import torch
from torch import nn

from . import ops


class QuantLinear(nn.Module):
    """y = x W^T + bias with a weight W in 8, 4 or 2 bits: nn.Linear by ops.dequant_gemm(), which reads W as it is stored.

    x [.., in_features] of float32, float16 or bfloat16, on the CPU or a CUDA GPU; y [.., out_features] of its dtype. The weight is constant:
    gradients are those of x and bias. It keeps its dtypes in module.to(dtype), half() and the like; bias follows them, as in nn.Linear.

    values, scales, zeros, format: as ops.quantize() and ops.convert_weight() give them. bias: [out_features].
    """

    def __init__(
        self,
        values: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None = None,
        *,
        format: str,
        bias: torch.Tensor | None = None,
    ):
        super().__init__()
        self.out_features, self.in_features = ops.products.dequantize_shape(values, format)
        if bias is not None and bias.shape != (self.out_features,):
            raise ValueError(f"bias has shape {tuple(bias.shape)}; allowed: ({self.out_features},)")
        self.format = format
        self.register_buffer("values", values)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=bias.requires_grad)

    @classmethod
    def from_linear(cls, linear: nn.Linear, format: str = "int4", *, group: int | None = None, zero_points: bool = False) -> QuantLinear:
        """A Linear with its weight rounded to `format`, one of ops.quantize()'s, on the CPU; the result is on the weight's device.

        group, zero_points: as in ops.quantize(). ValueError if in_features is not a multiple of the group.
        """
        weight = linear.weight.detach()
        parts = ops.quantize(weight.cpu(), format, group=group, zero_points=zero_points)
        return cls(*(None if part is None else part.to(weight.device) for part in parts), format=format, bias=linear.bias)

    @classmethod
    def from_checkpoint(
        cls,
        layout: str,
        qweight: torch.Tensor,
        qzeros: torch.Tensor | None,
        scales: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
    ) -> QuantLinear:
        """The 4-bit tensors of one layer of a published checkpoint: layout "awq", "gptq", "gptq_v2" or "compressed-tensors".

        The arguments are ops.convert_weight()'s, on any device; the result is on that of qweight.
        """
        given = [None if part is None else part.detach().cpu() for part in (qweight, qzeros, scales, g_idx)]
        return cls(*(part.to(qweight.device) for part in ops.convert_weight(layout, *given)), format="int4", bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x has shape {tuple(x.shape)}; allowed: [.., {self.in_features}]")
        rows = x.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = ops.dequant_gemm(rows, self.values, self.scales, self.zeros, bias=bias, format=self.format)
        return y.reshape(*x.shape[:-1], self.out_features)

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """W [out_features, in_features]."""
        return ops.dequantize(self.values, self.scales, self.zeros, format=self.format, dtype=dtype)

    def extra_repr(self) -> str:
        group = self.in_features // self.scales.shape[1] if self.scales.dim() == 2 else None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, format={self.format}"
            + (f", group={group}" if group else "")
            + (", zero_points=True" if self.zeros is not None else "")
        )

    def _apply(self, fn, recurse=True):
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if after.dtype != buffer.dtype:  # moved and rounded: only moved
                self._buffers[name] = buffer.to(after.device)
        return self


def quantize_(
    model: nn.Module,
    format: str = "int4",
    *,
    group: int | None = None,
    zero_points: bool = False,
    skip: Iterable[str] = ("lm_head",),
) -> list[str]:
    """Replaces each nn.Linear of `model` by a QuantLinear, in place, and returns the names of those replaced.

    skip: modules that stay, by their full name or its last part; a head that shares its weight with the embedding would not become smaller.
    A Linear whose in_features is not a multiple of the group stays, too, with a warning. Subclasses of nn.Linear stay.
    format, group, zero_points: as in ops.quantize(). A weight takes 8 bits (int8, fp8), 4.25 to 4.75 (int4, nf4, fp4, mxfp4) or 2.125 to
    2.75 (int2).
    """
    skipped = set(skip)
    width = ops.products.weight_group(format, group)
    made: dict[nn.Module, QuantLinear] = {}
    names, unfit = [], []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        parent, _, child = name.rpartition(".")
        if type(module) is not nn.Linear or not name or {name, child} & skipped:
            continue
        if module.in_features % width != 0:
            unfit.append(f"{name} ({module.in_features})")
            continue
        if module not in made:
            made[module] = QuantLinear.from_linear(module, format, group=group, zero_points=zero_points)
        setattr(model.get_submodule(parent), child, made[module])
        names.append(name)
    if unfit:
        warnings.warn(f"not quantised, because in_features is no multiple of {width}: {', '.join(unfit)}", stacklevel=2)
    return names
