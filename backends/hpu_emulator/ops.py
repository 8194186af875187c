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
COMPOSED = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
COMPOSED_TOO = ("CompositeExplicitAutogradNonFunctional",)  # views and structured operators

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
    native = not schema.name.startswith("aten::") or name in NATIVE or is_composed(func)
    return Op(
        name,
        packet,
        native,
        tuple(writes),
        None if writes else view_of,
        frozenset(scalars),
        packet in RANDOM,
    )


def is_composed(func: Any) -> bool:
    """Whether torch makes the operator of others, or it is the in-place or `out` form of a native one."""
    keys = COMPOSED if func._schema.name.endswith("_backward") else (*COMPOSED, *COMPOSED_TOO)
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in keys):
        return True
    plain = func._schema.name.partition("::")[2].rstrip("_")
    overload = func._schema.overload_name.removesuffix("out").rstrip("_")
    return (f"{plain}.{overload}" if overload else plain) in NATIVE


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
