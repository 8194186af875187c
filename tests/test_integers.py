"""Products of numbers of 8 and 4 bits equal a twin in numpy's integers to the bit, by every instruction set; tiles are
tested in their plain form, which equals the processor's."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lantern_hpu.backends.cpu import native
from lantern_hpu.backends.cpu.native import INTEGERS, INTEGERS_FLOAT32, NativeLinear
from lantern_hpu.ops.quantized import QuantizedLinear

pytestmark = pytest.mark.skipif(not native.isa(), reason="no native decoder")
SCALED, LARGEST = 256, np.float32(32512)  # inputs that share a scale, and its largest number

fmaf: Any = ctypes.CDLL(ctypes.util.find_library("m")).fmaf
fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
add_products: Callable[..., Any] = np.vectorize(fmaf, otypes=[np.float32])


def layer_of(inputs: int, outputs: int, group: int, bias: bool = True) -> QuantizedLinear:
    """With zeros of all kinds, where it has them."""
    plain = nn.Linear(inputs, outputs, bias).requires_grad_(False)
    layer = QuantizedLinear(plain, group)
    layer.take("weight", torch.randn(outputs, inputs))
    if group:
        layer.take("zero", torch.randint(0, 17, (outputs, inputs // group)).to(torch.uint8))
    return layer


def numbers_of(layer: QuantizedLinear) -> Any:
    """Whole numbers int64 [out, in]."""
    weight = layer.weight.long().numpy()
    if not layer.group:
        return weight
    numbers = np.stack((weight % 16, weight // 16), -1).reshape(len(weight), -1, layer.group)
    assert layer.zero is not None
    return (numbers - layer.zero.numpy()[..., None]).reshape(len(weight), -1)


def integer_product(layer: QuantizedLinear, x: Tensor) -> Any:
    """The twin: inputs as fixed point, exact sums of groups, and a float for each, in the order of inputs."""
    weight, scale = numbers_of(layer), layer.scale.numpy().reshape(layer.out_features, -1)
    inputs: Any = x.float().numpy()
    total = np.zeros((len(inputs), layer.out_features), dtype=np.float32)
    for first in range(0, layer.in_features, SCALED):
        part = inputs[:, first : first + SCALED]
        largest = np.abs(part).max(1, keepdims=True)
        steps = LARGEST / largest
        fixed = np.rint(part * steps).astype(np.int64)
        group = layer.group or SCALED
        for k in range(0, part.shape[1], group):
            sums = fixed[:, k : k + group] @ weight[:, first + k : first + k + group].T
            floats = sums.astype(np.float32) * (largest / LARGEST)
            which = (first + k) // group if layer.group else 0
            total = add_products(floats, scale[:, which], total)
    bias = 0 if layer.bias is None else layer.bias.float().numpy()
    return torch.from_numpy(total + bias).to(x.dtype)


def rows_like_activations(rows: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Small and large ones, and such with a few huge entries."""
    x = torch.randn(rows, inputs) * torch.logspace(-8, 4, rows)[:, None]
    x[:, 5] *= 1000
    return x.to(dtype)


# Inputs of a group, inputs and outputs: also such that fill no tile, no panel, or more than one block of 256
SIZES = [
    (0, 64, 64),
    (0, 80, 100),
    (0, 576, 33),
    (32, 96, 100),
    (32, 576, 33),
    (64, 320, 100),
    (128, 512, 70),
]


@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_exact_integers(sizes: tuple[int, int, int], isa: str) -> None:
    torch.manual_seed(0)
    group, inputs, outputs = sizes
    layer = layer_of(inputs, outputs, group)
    for form, dtype in ((INTEGERS, torch.bfloat16), (INTEGERS_FLOAT32, torch.float32)):
        x = rows_like_activations(53, inputs, dtype)
        assert torch.equal(NativeLinear(layer, form)(x), integer_product(layer, x))


@pytest.mark.parametrize("group", [0, 128])
def test_they_are_within_their_step_of_the_plain_ones(group: int, isa: str) -> None:
    """Whatever is rounded: an input by half a step of its 256 at most."""
    torch.manual_seed(1)
    layer = layer_of(512, 70, group, bias=False)
    x = rows_like_activations(7, 512, torch.float32)
    weight = layer.dequantized(torch.float32).double()
    steps = x.unflatten(1, (-1, SCALED)).abs().amax(2) / float(LARGEST)  # [7, 2]
    bound = 0.51 * steps.double() @ weight.abs().unflatten(1, (-1, SCALED)).sum(2).T
    error = (NativeLinear(layer, INTEGERS_FLOAT32)(x).double() - x.double() @ weight.T).abs()
    assert bool((error <= bound + 1e-6 * (x.double().abs() @ weight.abs().T)).all())


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_spoils_its_row_alone(odd: float, isa: str) -> None:
    torch.manual_seed(2)
    for group in (0, 64):
        mine, x = NativeLinear(layer_of(320, 70, group), INTEGERS), torch.randn(9, 320).bfloat16()
        clean = mine(x)
        x[4, 300] = odd
        spoiled = mine(x)
        assert bool(spoiled[4].isnan().all())
        kept = torch.arange(9) != 4
        assert torch.equal(spoiled[kept], clean[kept])


def test_rows_of_zeros_give_the_bias(isa: str) -> None:
    layer = layer_of(128, 70, 0)
    assert layer.bias is not None
    got = NativeLinear(layer, INTEGERS_FLOAT32)(torch.zeros(3, 128))
    assert torch.equal(got, layer.bias.expand(3, -1))
