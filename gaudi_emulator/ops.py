"""What the device can do with each operator: native, view, write, or a fallback to the CPU.

`ops_v1.19.json` and `ops_v1.24.json` hold the names of the operators that these releases of the public bridge
register (HabanaAI/gaudi-pytorch-bridge, Apache-2.0, scripts/hpu_op.yaml; names only). An operator that is not among
them and that torch does not compose of others runs on the CPU: inputs down, results up, and a wait.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gaudi_emulator.releases import Release, operators, table
from gaudi_emulator.tensor import Args, Kwargs

COMPOSED = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
# A copy and a write into a view of it, or a copy of a view
COPIED_VIEWS = operators("copied_views")
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
MOVES_FLOAT8 = frozenset({"repeat", "roll"})


@dataclass(frozen=True)
class Lists:
    """What a release says of operators.

    Attributes:
        native: overloads that it registers. cpu_only: those of torch that it would run on the CPU.
        formats: number formats of the overloads that the bridge checks by a list.
        documented: those of functions by the table of its documentation, from 1.24 on.
    """

    native: frozenset[str]
    cpu_only: frozenset[str]
    formats: dict[str, frozenset[torch.dtype]]
    documented: dict[str, frozenset[torch.dtype]]


@cache
def lists(release: Release) -> Lists:
    known = table(f"ops_v{release.name}")
    formats, documented = (by_operator(known.get(name, {})) for name in ("dtypes", "dtypes_docs"))
    native, cpu_only = frozenset(known["native_overloads"]), frozenset(known["cpu_only_not_listed"])
    return Lists(native, cpu_only, formats, documented)


def by_operator(table: dict[str, list[str]]) -> dict[str, frozenset[torch.dtype]]:
    """Number formats by operator, of operators by number formats."""
    return {
        name: frozenset(getattr(torch, dtype) for dtype in dtypes.split())
        for dtypes, names in table.items()
        for name in names
    }


# Operators whose Scalar arguments are constants of the graph all the same
KEYED_SCALARS = ("arange", "full", "linspace", "new_full", "fill")
RANDOM = operators("random")
# Factories that take shape and number format of a tensor, which may be on the host
MADE_LIKE = operators("made_like")


@dataclass(frozen=True)
class Op:
    """An overload, as the device sees it."""

    name: str  # "add.Tensor", or "mm" for a default overload
    packet: str  # "add"
    native: bool
    writes: tuple[int | str, ...]  # arguments that it changes: positions, or names of keywords
    view_of: int | None  # the argument that its results are views of
    scalars: frozenset[int | str]  # arguments that are device scalars, not constants of the graph
    random: bool
    arguments: tuple[Any, ...]  # of the schema


def mark(index: int, argument: Any) -> int | str:
    return str(argument.name) if argument.kwarg_only else index


@cache
def op_of(func: Any, release: Release) -> Op:
    """What a release knows of an `OpOverload`."""
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
    viewed = view_of is not None and not writes and name not in lists(release).cpu_only
    native = not schema.name.startswith("aten::") or viewed or is_native(func, release)
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


def is_native(func: Any, release: Release) -> bool:
    """Whether a release lists an operator or another form of it, or torch makes it of others.

    A structured operator counts by its functional, in-place or `out` form; torch generates the others from it.
    """
    if any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in COMPOSED):
        return True
    packet = func._schema.name.partition("::")[2]
    if packet == "new_empty_strided" or packet in COPIED_VIEWS:
        return True
    plain = packet if packet.startswith("__") else packet.rstrip("_")
    native = lists(release).native
    return any(
        f"{name}.{overload}".removesuffix(".default") in native
        and arguments(getattr(forms, overload)) == arguments(func)
        for name in (plain, f"{plain}_")
        if (forms := getattr(torch.ops.aten, name, None)) is not None
        for overload in forms.overloads()
    )


def arguments(func: Any) -> tuple[tuple[str, str], ...]:
    """Names and types of what goes in; forms of one operator agree in it."""
    return tuple((a.name, str(a.type)) for a in func._schema.arguments if not a.is_out)


def takes(op: Op, dtype: torch.dtype, lazy: bool, release: Release) -> bool:
    """Whether an operator takes a number format: by the bridge's list (hpu_ops/supported_dtypes.cpp), and by the table
    of the documentation where a release judges at run time."""
    if dtype in FLOAT8 and op.packet in MOVES_FLOAT8:
        return True
    known = lists(release).formats.get(op.name)
    if known is not None:
        if lazy and dtype == torch.int64:
            dtype = torch.int32  # which lazy mode stores
        return dtype in known or (dtype == torch.int32 and torch.int64 in known)
    if op.view_of is not None:
        return True  # no kernel runs
    documented = lists(release).documented
    row = documented.get(op.packet)
    return row is None or dtype in row or all(dtype not in others for others in documented.values())


def written_arguments(op: Op, args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments that an operator changes."""
    return [kwargs.get(mark) if isinstance(mark, str) else args[mark] for mark in op.writes]


def spec(value: Any) -> Any:
    """Arguments as a graph depends on them: dtype and shape of tensors, values of the rest."""
    if isinstance(value, Tensor):
        return (value.dtype, tuple(value.shape))
    if isinstance(value, (list, tuple)):
        return tuple(spec(item) for item in value)
    if isinstance(value, (dict, UserDict)):
        return tuple((name, spec(item)) for name, item in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value).__name__, *(spec(getattr(value, f.name)) for f in fields(value)))
    return (type(value).__name__, value)


def recipe_key(op: Op, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """An operator's part of a recipe key; the value of a device scalar does not belong to it."""
    parts = tuple(
        (
            name,
            type(value).__name__
            if name in op.scalars and isinstance(value, (bool, int, float))
            else spec(value),
        )
        for name, value in [*enumerate(args), *kwargs.items()]
    )
    return (op.name, parts)
