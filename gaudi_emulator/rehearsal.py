"""A function that is to be captured, run twice uncaptured from equal state: whatever differs would be baked in.

A capture keeps Python's values as they were. So each operator of both runs is noted with its constants and its line,
the runs are laid side by side, and the first difference is a value that Python varies. A tensor of the first run that
the second reads was carried over in an attribute; a tensor of the state that is another object afterwards was bound
anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gaudi_emulator import ops
from gaudi_emulator.lint.rules import call_site
from gaudi_emulator.tensor import Args, HPUTensor, Kwargs, flat

if TYPE_CHECKING:
    from gaudi_emulator.device import Device

Site = tuple[str, int]


@dataclass
class Run:
    steps: list[tuple[Any, Site]] = field(default_factory=list)  # operator with its constants, line
    read: list[tuple[int, Site]] = field(default_factory=list)  # CPU tensors that went in
    made: dict[int, tuple[Tensor, Site]] = field(default_factory=dict)  # by id; they stay alive
    before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # what is to be put back

    def note(self, op: ops.Op, args: Args, kwargs: Kwargs, result: Any) -> None:
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


def rehearse(
    card: Device,
    body: Callable[[], object],
    state: Callable[[], Mapping[str, Tensor]],
    known: Run | None = None,
) -> Run | None:
    """Run a function twice and report what a capture of it would keep for good.

    Args:
        body: what is about to be captured.
        state: the tensors that it works on, by name.
        known: a run from before the capture; then one more is compared with it.

    Returns:
        The last run, without its tensors.
    """
    if not card.differential or card.recording is not None or card.rehearsed is not None:
        return None
    card.flush("synchronize")
    names = "counts recipes variants again blamed credit earned values_read uploaded staged warm".split()
    books = {name: copy.copy(getattr(card, name)) for name in names}
    books["counts"], seed = copy.deepcopy(card.counts), card.generator.get_state()
    bound = dict(state())  # held, so that no later tensor gets the address of one
    card.findings.muted = True
    runs = [known] if known else []
    try:
        while len(runs) < 2:
            card.generator.set_state(seed)
            card.rehearsed = run = Run()
            runs.append(run)
            try:
                body()
            finally:
                card.rehearsed = None
                run.restore()
    except Exception:
        return None  # the capture itself will say it
    finally:
        card.pending, card.sites, card.written = [], [], set()
        for name, value in books.items():
            setattr(card, name, value)
        card.generator.set_state(seed)
        card.findings.muted = False
    compare_runs(card, runs[0], runs[1])
    for name, tensor in state().items():
        if bound.get(name, tensor) is not tensor and isinstance(tensor, HPUTensor):
            _, site = runs[1].made.get(id(tensor.raw), (None, None))
            card.findings.hit("H069", name, "error", site)
    return Run(runs[1].steps)


def compare_runs(card: Device, first: Run, second: Run) -> None:
    """Report the first operator whose constants differ, and tensors carried from run to run."""
    for (then, _), (now, site) in zip(first.steps, second.steps, strict=False):
        if then != now:
            card.findings.hit("H068", f"{now[0]} had other values in a second run", "error", site)
            break
    else:
        if len(first.steps) != len(second.steps):
            longer = max(first.steps, second.steps, key=len)
            site = longer[min(len(first.steps), len(second.steps))][1]
            what = f"{len(first.steps)} operators, then {len(second.steps)}"
            card.findings.hit("H068", what, "error", site)
    for key, site in second.read:
        if key in first.made and key not in second.made:
            card.findings.hit("H068", "a tensor of the run before is read", "error", site)
            return


def plain_attributes(function: Callable[..., Any]) -> list[Any]:
    """Numbers, strings and switches that a method's module and those in it hold."""
    owner = getattr(function, "__self__", None)
    modules = owner.modules() if isinstance(owner, nn.Module) else ()
    kinds = (bool, int, float, str, type(None))
    return [(n, v) for module in modules for n, v in vars(module).items() if type(v) in kinds]


def module_tensors(function: Callable[..., Any]) -> dict[str, Tensor]:
    """The tensors that a method's module holds, by name."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, nn.Module):
        return {}
    found: dict[str, Tensor] = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
    for prefix, module in owner.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[f"{prefix}.{name}".lstrip(".")] = value
    return found
