"""What the device can do with each operator: native, view, write, or a fallback to the CPU.

`ops_v1.19.json` holds the names of the operators that release 1.19 of the public bridge registers
(HabanaAI/gaudi-pytorch-bridge, Apache-2.0, scripts/hpu_op.yaml; names only). An operator that is not among
them and that torch does not compose of others runs on the CPU: inputs down, results up, and a wait.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TABLE = json.loads((Path(__file__).parent / "ops_v1.19.json").read_text())
NATIVE = frozenset(TABLE["native_overloads"])
CPU_ONLY = frozenset(TABLE["cpu_only_not_listed"])
COMPOSED = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
SCALAR_TYPES = {
    "BFloat16": (torch.bfloat16,),
    "Byte": (torch.uint8,),
    "Char": (torch.int8, torch.bool),  # a bool is a byte on the device
    "Float": (torch.float32, torch.float64),  # float64 is narrowed before
    "Half": (torch.float16,),
    "Int": (torch.int32,),
    "Long": (torch.int64,),
    "Short": (torch.int16,),
}
# Number formats of the operators that the bridge checks by a list (the others have validators of their own)
DTYPES = {
    name: frozenset(dtype for kind in kinds.split() for dtype in SCALAR_TYPES[kind])
    for kinds, names in TABLE["dtypes"].items()
    for name in names
}

# Operators whose Scalar arguments are constants of the graph all the same
KEYED_SCALARS = ("arange", "full", "linspace", "new_full", "fill")
RANDOM = frozenset(
    "bernoulli bernoulli_ cauchy_ dropout exponential_ geometric_ log_normal_ multinomial native_dropout normal "
    "normal_ poisson rand rand_like randint randint_like randn randn_like random_ randperm uniform_".split()
)


@dataclass(frozen=True)
class Op:
    """An overload, as the device sees it."""

    name: str  # "add.Tensor", or "mm" for a default overload
    packet: str  # "add"
    native: bool
    writes: tuple[
        int | str, ...
    ]  # arguments that it changes: positions, or names of keyword arguments
    view_of: int | None  # the argument that its results are views of
    scalars: frozenset[int | str]  # arguments that are device scalars, not constants of the graph
    random: bool
    arguments: tuple[Any, ...]  # of the schema


def mark(index: int, argument: Any) -> int | str:
    return str(argument.name) if argument.kwarg_only else index


@cache
def describe(func: Any) -> Op:
    """What is known of an `OpOverload`."""
    schema = func._schema
    packet = schema.name.partition("::")[2]
    name = f"{packet}.{schema.overload_name}" if schema.overload_name else packet
    writes, view_of, scalars = [], None, []
    for index, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            writes.append(mark(index, argument))
        elif alias is not None and view_of is None and not argument.kwarg_only:
            view_of = index
        # `x * 2.0` reaches `mul.Tensor` with the number in a tensor's place
        number = "number" in str(argument.type) or str(argument.type) == "Tensor"
        if number and not packet.startswith(KEYED_SCALARS):
            scalars.append(mark(index, argument))
    viewed = view_of is not None and not writes and name not in CPU_ONLY
    native = not schema.name.startswith("aten::") or viewed or is_native(func)
    return Op(
        name,
        packet,
        native,
        tuple(writes),
        None if writes else view_of,
        frozenset(scalars),
        packet in RANDOM,
        tuple(schema.arguments),
    )


def is_native(func: Any) -> bool:
    """Whether the bridge lists an operator or another form of it, or torch makes it of others.

    A structured operator counts by its functional, in-place or `out` form; torch generates the others from it.
    """
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in COMPOSED):
        return True
    packet = func._schema.name.partition("::")[2]
    if packet == "new_empty_strided":
        return True  # an allocation
    plain = packet if packet.startswith("__") else packet.rstrip("_")
    return any(
        f"{name}.{overload}".removesuffix(".default") in NATIVE
        and arguments(getattr(forms, overload)) == arguments(func)
        for name in (plain, f"{plain}_")
        if (forms := getattr(torch.ops.aten, name, None)) is not None
        for overload in forms.overloads()
    )


def arguments(func: Any) -> tuple[tuple[str, str], ...]:
    """Names and types of what goes in; forms of one operator agree in it."""
    return tuple((a.name, str(a.type)) for a in func._schema.arguments if not a.is_out)


def takes(op: Op, dtype: torch.dtype, lazy: bool) -> bool:
    """Whether the bridge's list of an operator's number formats has this one (hpu_ops/supported_dtypes.cpp)."""
    if lazy and dtype == torch.int64:
        dtype = torch.int32  # which lazy mode stores
    known = DTYPES.get(op.name)
    return known is None or dtype in known or (dtype == torch.int32 and torch.int64 in known)


def written(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator changes."""
    return [kwargs.get(mark) if isinstance(mark, str) else args[mark] for mark in op.writes]


def spec(value: Any) -> Any:
    """A constant or a tensor as a recipe key sees it: dtype and shape of tensors, values of the rest."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape))
    if isinstance(value, (list, tuple)):
        return tuple(spec(item) for item in value)
    return (type(value).__name__, value)


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def key(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """An operator's part of a recipe key; the value of a device scalar does not belong to it."""
    parts = tuple(
        (name, type(value).__name__ if name in op.scalars and is_number(value) else spec(value))
        for name, value in [*enumerate(args), *kwargs.items()]
    )
    return (op.name, parts)
