"""What notes the operators that run: a recording of a graph, and a run that is compared with another."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from gaudi_emulator import ops
from gaudi_emulator.rules import Site, call_site
from gaudi_emulator.tensor import Args, HPUTensor, Kwargs, each, flat

GARBAGE = -(2**31)


@dataclass(frozen=True)
class Slot:
    """A result of an earlier recorded operator."""

    index: int


@dataclass
class Recorded:
    """One operator of a recording."""

    op: ops.Op
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int]  # slots of new results; -1 for an argument given back
    site: Site


class Recording:
    """Operators in their order, and which results somebody still holds."""

    def __init__(self, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.steps: list[Recorded] = []
        self.first: list[Tensor] = []  # results at capture: they keep their storage
        self.slots: dict[int, int] = {}
        self.held: list[tuple[weakref.ref[HPUTensor], int]] = []
        self.segments = 1
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what a dry run must undo
        self.rebound: set[int] = set()  # scalars of the host that are read at each replay
        self.indexed: set[int] = set()  # storages that were written by index

    def add(self, op: ops.Op, func: Any, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Record an operator that has just run."""
        results = result if isinstance(result, (list, tuple)) else [result]
        given = {id(value) for value in (*args, *kwargs.values())}
        named = {n: self.point(v) for n, v in kwargs.items()}
        step = Recorded(op, func, tuple(map(self.point, args)), named, [], call_site())
        for made in results:
            if isinstance(made, Tensor) and id(made) not in given:
                self.slots[id(made)] = len(self.first)
                step.results.append(len(self.first))
                self.first.append(made)
            else:
                step.results.append(-1)
        self.steps.append(step)

    def write_by_index(self, target: Tensor) -> bool:
        """Note a write by index into a tensor. -> whether it is not the first into its storage"""
        key = target.untyped_storage().data_ptr()
        again = key in self.indexed
        self.indexed.add(key)
        return again

    def point(self, value: Any) -> Any:
        """An argument, with earlier results replaced by their slots."""

        def slot(value: Any) -> Any:
            known = isinstance(value, Tensor) and id(value) in self.slots
            return Slot(self.slots[id(value)]) if known else value

        return each(slot, value)

    def reads(self, raw: Tensor) -> bool:
        """Whether a recorded operator has a tensor from outside for an argument."""
        steps = (flat((*step.args, *step.kwargs.values())) for step in self.steps)
        return any(value is raw for given in steps for value in given)

    def follow(self, tensor: HPUTensor) -> None:
        """A tensor made in this capture: if it outlives the capture, replays refresh it."""
        slot = self.slots.get(id(tensor.raw))
        if slot is not None:
            self.held.append((weakref.ref(tensor), slot))

    def keep(self, target: Tensor) -> None:
        """Before a dry run changes a tensor from outside: note what was in it."""
        key = target.untyped_storage().data_ptr()
        if self.dry_run and key not in self.before:
            self.before[key] = (target, target.clone())

    def close(self) -> None:
        """The capture ends; a dry run leaves no trace but garbage in its results."""
        self.held = [(ref, slot) for ref, slot in self.held if ref() is not None]
        for target, values in self.before.values():
            target.copy_(values)
        for ref, _ in self.held if self.dry_run else ():
            tensor = ref()
            if tensor is not None:
                spoil(tensor.raw)
                tensor.stale = "H067"

    def refresh(self, now: list[Any]) -> None:
        """Put the new results where the capture left the old ones."""
        for ref, slot in self.held:
            tensor = ref()
            if tensor is not None and now[slot].data_ptr() != tensor.raw.data_ptr():
                tensor.raw.copy_(now[slot])
            if tensor is not None and tensor.stale == "H067":
                tensor.stale = None


def spoil(raw: Tensor) -> None:
    """Fill with what no honest result has."""
    raw.fill_(float("nan") if raw.is_floating_point() else GARBAGE if raw.dtype.itemsize > 2 else 1)


@dataclass
class Run:
    steps: list[tuple[Any, Site]] = field(default_factory=list)  # operator with its constants, line
    read: list[tuple[int, Site]] = field(default_factory=list)  # CPU tensors that went in
    made: dict[int, tuple[Tensor, Site]] = field(default_factory=dict)  # by id; they stay alive
    before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # what is to be put back

    def add(self, op: ops.Op, args: Args, kwargs: Kwargs, result: Any) -> None:
        """An operator on CPU tensors that has just run."""
        site = call_site()
        constants = tuple(map(ops.spec, args)), tuple((n, ops.spec(v)) for n, v in kwargs.items())
        self.steps.append(((op.name, constants), site))
        given = [t for t in flat((*args, *kwargs.values())) if isinstance(t, Tensor)]
        self.read += [(id(t), site) for t in given]
        held = {id(t) for t in given}
        for tensor in flat((result,)):
            if isinstance(tensor, Tensor) and id(tensor) not in held:
                self.made[id(tensor)] = (tensor, site)

    def keep(self, target: Tensor) -> None:
        """Before an operator changes a tensor."""
        self.before.setdefault(id(target), (target, target.clone()))

    def restore(self) -> None:
        for target, values in self.before.values():
            if target.shape == values.shape:
                target.copy_(values)
