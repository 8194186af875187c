"""`torch.autocast` on the device: which operators run in the lower format and which in float32.

torch casts by dispatch keys, which the emulated tensors do not have, so arguments are cast where a function is
called. The lists are the default ones of Habana's page on mixed precision, unless flags name files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gaudi_emulator.device import current
from gaudi_emulator.nested import mapped
from gaudi_emulator.releases import listed
from gaudi_emulator.tensor import DEVICE, HPUTensor

OWNERS = (torch, F, torch._C._nn, Tensor)
LOWER = listed("autocast_lower")
LOWER_FIRST = frozenset({"batch_norm", "group_norm", "instance_norm", "layer_norm"})
FLOAT32 = listed("autocast_float32")
SIGNS = {"add", "matmul", "mul", "pow"}  # which Python has operators for, from either side
# Files with a name a line, which take the place of the lists
FILES = ("PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST", "PT_HPU_AUTOCAST_FP32_OPS_LIST")


@dataclass(frozen=True)
class Lists:
    """Functions by what autocast does to their arguments."""

    lower: frozenset[Callable[..., Any]]
    # Of `lower`, those that have the first argument cast alone
    first: frozenset[Callable[..., Any]]
    float32: frozenset[Callable[..., Any]]


def lists(flags: Mapping[str, str]) -> Lists:
    return lists_of(*map(flags.get, FILES))


@cache
def lists_of(lower_file: str | None, float32_file: str | None) -> Lists:
    """As the bridge has them (hpu_ops/autocast_helpers.h): the default ones, or those of the files of its flags."""
    lowered = functions(names(lower_file, LOWER))
    float32 = functions(names(float32_file, FLOAT32))
    return Lists(lowered, lowered & functions(LOWER_FIRST), float32 - lowered)


def names(file: str | None, default: Iterable[str]) -> Iterable[str]:
    """A file's, or the default ones if there is none to read."""
    if file and Path(file).is_file():
        return Path(file).read_text(encoding="utf-8").split()
    if file:
        warnings.warn(f"no {file} to read: autocast has its default list", stacklevel=2)
    return default


def functions(names: Iterable[str]) -> frozenset[Callable[..., Any]]:
    every = {*names}
    for name in every & SIGNS:
        every |= {f"__{name}__", f"__r{name}__"}
    if every & {"div", "true_divide"}:
        every.add("__truediv__")
    found = (getattr(owner, name, None) for owner in OWNERS for name in every)
    return frozenset(function for function in found if function is not None)


def cast(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments in the format that autocast has the function run in, if it is on and says one."""
    if not torch.is_autocast_enabled(DEVICE):
        return args, kwargs
    known = lists(current().flags)
    if func in known.lower:
        goal = torch.get_autocast_dtype(DEVICE)
    elif func in known.float32:
        goal = torch.float32
    else:
        return args, kwargs

    def change(tensor: Tensor) -> Tensor:
        floats = isinstance(tensor, HPUTensor) and tensor.is_floating_point()
        return tensor.to(goal) if floats and tensor.dtype != goal else tensor

    if func in known.first:
        given = {"input": kwargs["input"]} if "input" in kwargs else {}
        return (*mapped(args[:1], change), *args[1:]), kwargs | mapped(given, change)
    return mapped(args, change), mapped(kwargs, change)
