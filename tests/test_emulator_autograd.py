"""Gradients through functions compiled for the emulated card are the CPU's: torch's own samples of its operators."""

from __future__ import annotations

import sys
import unittest
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from gaudi_emulator import emulate


def gradients(
    function: Callable[..., Any], values: Any, device: str
) -> list[Tensor]:
    """Of the sum of squares of all results, with regard to each float tensor among the values."""

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        moved = value.detach().clone().to(device)
        return moved.requires_grad_(value.requires_grad)

    args, kwargs = tree_map(placed, values)
    results = tree_flatten(function(*args, **kwargs))[0]
    learning = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    sum(r.square().sum() for r in learning).backward()
    leaves = (t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.requires_grad)
    return [torch.zeros(0) if t.grad is None else t.grad.cpu() for t in leaves]
