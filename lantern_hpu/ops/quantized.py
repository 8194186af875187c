"""Matrices of 8 or 4 bits a number.

Of 8 bits: whole numbers from -127 to 127, and a float32 scale a row, by which its sums are multiplied. Of 4 bits: whole
numbers q from 0 to 15, two in a byte; each group of inputs of a row has a float32 scale and a zero, and stands for
scale * (q - zero).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.errors import WeightsError

LARGEST = 127  # of 8 bits
HIGHEST = 15  # of 4 bits
GROUPS = (128, 64, 32)  # inputs of a group: the first that divides a matrix's
PARTS = ("weight", "scale", "zero")  # of a matrix
ROWS = 1024  # of a matrix that are rounded at a time


def group_of(inputs: int, form: str) -> int:
    """Inputs of a group of a matrix in this format; 0 where it has 8 bits, as one of 4 has that no group divides."""
    fitting = (group for group in GROUPS if inputs % group == 0)
    return next(fitting, 0) if form == "int4" else 0


def matrix_bytes(matrix: Tensor, form: str) -> int:
    """Of a matrix [out, in] in a smaller format, with scales and zeros."""
    rows, columns = matrix.shape
    group = group_of(columns, form)
    return rows * (columns // 2 + 5 * columns // group) if group else rows * (columns + 4)


def quantized(weight: Tensor, group: int = 0) -> tuple[Tensor, ...]:
    """A matrix [out, in] as numbers and scales.

    Returns int8 [out, in] and float32 [out], the nearest, symmetric in each row; with groups uint8 [out, in / 2], where
    input 2 i is the lower half of a byte, float32 [out, in / group], and zeros uint8 [out, in / group].

    Raises:
        WeightsError: a number is infinite or NaN.
    """
    if not bool(weight.abs().amax(1).isfinite().all()):
        what = f"a matrix cannot be kept in {4 if group else 8} bits"
        raise WeightsError(what, "it has numbers that are not finite", "another checkpoint")
    parts = [in_groups(part, group) if group else in_rows(part) for part in weight.split(ROWS)]
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


def in_rows(weight: Tensor) -> tuple[Tensor, ...]:
    """Some rows of a matrix in 8 bits."""
    scale = weight.abs().amax(1).float() / LARGEST
    steps = scale.clamp(min=torch.finfo(torch.float32).tiny)[:, None]  # a row of zeros stays one
    return (weight.float() / steps).round().to(torch.int8), scale


def in_groups(weight: Tensor, group: int) -> tuple[Tensor, ...]:
    """Some rows of a matrix in 4 bits: from the least to the largest number of a group, and to 0."""
    values = weight.float().unflatten(1, (-1, group))  # [out, groups, group]
    least = values.amin(-1).clamp(max=0)  # [out, groups]
    scale = (values.amax(-1).clamp(min=0) - least) / HIGHEST
    steps = scale.clamp(min=torch.finfo(torch.float32).tiny)
    zero = (-least / steps).round()
    numbers = (values / steps[..., None]).round() + zero[..., None]
    pairs = numbers.clamp(0, HIGHEST).to(torch.uint8).view(len(weight), -1, 2)
    return pairs[..., 0] + 16 * pairs[..., 1], scale, zero.to(torch.uint8)


def halves(packed: Tensor) -> Tensor:
    """Bytes [.., n] as the two numbers of each [.., 2 n], the lower half first."""
    return torch.stack((packed & HIGHEST, packed >> 4), -1).flatten(-2)


def dequantized(
    weight: Tensor, scale: Tensor, dtype: torch.dtype, zero: Tensor | None = None
) -> Tensor:
    """A matrix [out, in] as numbers of a format, from what `quantized` returns."""
    if zero is not None:
        numbers = halves(weight).view(*zero.shape, -1).to(torch.int8)  # [out, groups, group]
        weight = numbers - zero.to(torch.int8)[..., None]
    result = weight.new_empty(weight.shape, dtype=dtype)
    # Rounded once, without a float32 matrix
    return torch.mul(weight, scale[..., None], out=result).flatten(1)


class QuantizedLinear(nn.Module):
    """`nn.Linear` for inference, [.., in] -> [.., out], whose matrix has 8 or 4 bits a number.

    Args:
        like: has its sizes and its bias. Numbers, scales and zeros are empty until `take`.
        group: inputs of a group of 4 bits; 0: there are none, and 8 bits.
    """

    weight: nn.Parameter  # [out, in] int8, or of 4 bits [out, in / 2] uint8
    scale: nn.Parameter  # [out] float32, or of 4 bits [out, in / group]
    zero: nn.Parameter | None  # of 4 bits [out, in / group] uint8, from 0 to 16
    bias: nn.Parameter | None  # [out] in the model's number format

    def __init__(self, like: nn.Linear, group: int = 0) -> None:
        super().__init__()
        self.out_features: int = like.out_features
        self.in_features: int = like.in_features
        self.group = group
        self.bits = 4 if group else 8
        empty = like.weight.new_empty
        rows, columns = like.weight.shape
        groups = (columns // group,) if group else ()
        numbers = torch.uint8 if group else torch.int8
        self.take("weight", empty(rows, columns * self.bits // 8, dtype=numbers))
        self.take("scale", empty(rows, *groups, dtype=torch.float32))
        self.register_parameter("zero", None)
        if group:
            self.take("zero", empty(rows, *groups, dtype=torch.uint8))
        self.register_parameter("bias", like.bias)

    def take(self, name: str, tensor: Tensor) -> None:
        """Fill one of `PARTS`; `weight` from floats, together with the others."""
        if name == "weight" and tensor.is_floating_point():
            tensor, *others = quantized(tensor, self.group)
            for other, part in zip(PARTS[1:], others, strict=False):
                self.take(other, part)
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def allows(self, name: str, stored: Tensor) -> bool:
        """Whether all numbers of a stored part are such as kernels are made for."""
        if name == "scale":
            return bool(stored.isfinite().all() and (self.bits == 4 or stored.amin() >= 0))
        if name == "zero":
            return bool(stored.amax() <= HIGHEST + 1)
        return self.bits == 4 or bool(stored.amin() >= -LARGEST)

    def dequantized(self, dtype: torch.dtype, rows: Tensor | slice = slice(None)) -> Tensor:
        """The matrix [out, in], or rows of it, as numbers of a format."""
        zero = None if self.zero is None else self.zero[rows]
        return dequantized(self.weight[rows], self.scale[rows], dtype, zero)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantized(x.dtype), self.bias)


def quantized_layer(linear: nn.Linear, form: str = "int8") -> QuantizedLinear:
    """Of the same sizes; of the numbers of a matrix that is there."""
    result = QuantizedLinear(linear, group_of(linear.in_features, form))
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


def matrix_layers(module: nn.Module, kind: type) -> Iterator[tuple[str, Any]]:
    """Layers of a class in a target or a drafter, by name.

    Those that make embeddings keep their number format, and are left out.
    """
    for name, layer in [*module.named_modules(remove_duplicate=False)]:
        if type(layer) is kind and "embed" not in name.split("."):
            yield name, layer


def put(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Replace the layer of a name in a module."""
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, layer)


def replace_layers(module: nn.Module, kind: type, change: Callable[[Any], nn.Module]) -> None:
    """Replace the layers of a class in a target or a drafter."""
    for name, layer in matrix_layers(module, kind):
        put(module, name, change(layer))
