"""Matrices of 8 bits: whole numbers from -127 to 127, and a float32 scale a row, by which its sums are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.errors import WeightsError

LARGEST = 127
ROWS = 1024  # of a matrix that are rounded at a time


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix [out, in] as numbers int8 [out, in] and scales float32 [out]: the nearest, symmetric in each row.

    Raises:
        WeightsError: a number is infinite or NaN.
    """
    scale = weight.abs().amax(1).float() / LARGEST
    if not bool(scale.isfinite().all()):
        why = "it has numbers that are not finite"
        raise WeightsError("a matrix cannot be kept in 8 bits", why, "another checkpoint")
    steps = scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]  # a row of zeros stays one
    parts = zip(weight.split(ROWS), steps.split(ROWS), strict=True)
    return torch.cat([(part.float() / step).round().to(torch.int8) for part, step in parts]), scale


def in_range(stored: Tensor) -> bool:
    """Whether numbers int8 or scales are those that `quantized` may give."""
    if stored.dtype == torch.int8:
        return bool(stored.amin() >= -LARGEST)
    return bool((stored.isfinite() & (stored >= 0)).all())


def dequantized(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix int8 [out, in] with scales [out] as numbers of a format."""
    result = weight.new_empty(weight.shape, dtype=dtype)
    return torch.mul(weight, scale[:, None], out=result)  # rounded once, without a float32 matrix


class QuantizedLinear(nn.Module):
    """`nn.Linear` for inference, [.., in] -> [.., out], whose matrix has 8 bits a number.

    Args:
        like: has its sizes and its bias. Numbers and scales are empty until `take`.
    """

    weight: nn.Parameter  # [out, in] int8
    scale: nn.Parameter  # [out] float32
    bias: nn.Parameter | None  # [out] in the model's number format

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.out_features: int = like.out_features
        self.in_features: int = like.in_features
        empty = torch.empty_like(like.weight, dtype=torch.int8)
        self.take("weight", empty)
        self.take("scale", empty.new_empty(len(empty), dtype=torch.float32))
        self.register_parameter("bias", like.bias)

    def take(self, name: str, tensor: Tensor) -> None:
        """Fill `weight`, from floats together with `scale`, or `scale`."""
        if name == "weight" and tensor.is_floating_point():
            tensor, scale = quantized(tensor)
            self.take("scale", scale)
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in] as numbers of a format."""
        return dequantized(self.weight, self.scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantized(x.dtype), self.bias)


def quantized_layer(linear: nn.Linear) -> QuantizedLinear:
    """Of the same sizes; of the numbers of a matrix that is there."""
    result = QuantizedLinear(linear)
    if not linear.weight.is_meta:
        result.take("weight", linear.weight.detach())
    return result


def plain_layer(layer: QuantizedLinear, dtype: torch.dtype) -> nn.Linear:
    """The dequantised matrix as a layer of torch."""
    with torch.device("meta"):
        result = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
    result.weight = nn.Parameter(layer.dequantized(dtype), requires_grad=False)
    result.register_parameter("bias", layer.bias)
    return result


def matrix_layers(module: nn.Module, kind: type) -> Iterator[tuple[nn.Module, str, Any]]:
    """Layers of a class in a target or a drafter, each behind its parent and its name there.

    Those that make embeddings keep their number format, and are left out.
    """
    for name, child in [*module.named_children()]:
        if type(child) is kind:
            yield module, name, child
        elif name != "embed":
            yield from matrix_layers(child, kind)


def replace_layers(module: nn.Module, kind: type, change: Callable[[Any], nn.Module]) -> None:
    """Replace the layers of a class in a target or a drafter."""
    for parent, name, layer in matrix_layers(module, kind):
        setattr(parent, name, change(layer))
