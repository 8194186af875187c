"""What a benchmark is to measure: its options, and the rows that follow on a device. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lantern_hpu.backends import LARGE_PARAMETERS, DeviceOptions
from lantern_hpu.core import Request
from lantern_hpu.errors import Arg, DeviceError, OptionError, as_option, choices, words
from lantern_hpu.fields import MAX_IMAGES, check_ranges, option
from lantern_hpu.methods.relaxation import Relaxation
from lantern_hpu.methods.setting import (
    AUTO,
    METHODS,
    SMALL_DYNAMIC,
    SMALL_TREE,
    Resolved,
    Setting,
)

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend
    from lantern_hpu.pipeline import LanternPipeline

GRAPHS = "eager,auto"
# What a run measures unless something else is asked for
USUAL = {"methods": ",".join(METHODS), "batch_sizes": "1,8"}
# The same of a large model where arithmetic is scarce: an image takes long, small trees and windows can pay
LARGE = {
    "methods": ",".join(METHODS),
    "trees": f"{SMALL_TREE},chain,{SMALL_DYNAMIC},jacobi:2,scd:2,scd:5,scd:8,sjd-pac:2:2x1,sjd-pac:4:2x1",
    "batch_sizes": "1",
    "images": "1",
}


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The options of a run."""

    model: str = option("builtin", "`builtin`, a known model, a Hub id or a model folder")
    options: DeviceOptions = field(default_factory=DeviceOptions)
    settings: list[Setting]  # one a row of each graph mode and batch size
    modes: list[str]
    by_name: bool = True  # whether the graph modes were asked for, or are the usual ones
    batches: list[int]
    images: int = option(
        8,
        f"least number of timed images per row; {LARGE['images']} of a large model on a CPU",
        name="num_images",
        low=1,
        high=MAX_IMAGES,
    )
    interleave: bool = option(
        False,
        "rows of a graph mode and batch size draw a batch each in turn, so that a drift of the machine's speed affects "
        "all alike; needs the memory of all at once",
    )
    seed: int = option(0, "of the first image")

    def __post_init__(self) -> None:
        check_ranges(self)
        Request("any", self.seed)

    @property
    def mode(self) -> str:
        """What a device prepares for: its best graph mode, if that is asked for."""
        return AUTO if AUTO in self.modes else self.modes[0]


def has_long_steps(pipeline: LanternPipeline) -> bool:
    """Whether the model is large for a device on which arithmetic is scarce, as processors."""
    parameters = pipeline.model.config.target.parameters
    return parameters >= LARGE_PARAMETERS and not pipeline.drafting_defaults.idle_arithmetic


# ------------------------------------------------------------------------------------ rows


@dataclass(frozen=True)
class Case:
    """What one row measures."""

    setting: Resolved
    mode: str
    batch: int

    def __str__(self) -> str:
        return f"{self.setting}, {self.mode}, batch {self.batch}"

    def timed_batches(self, images: int) -> int:
        """How many batches are timed: enough for this many images."""
        return -(-images // self.batch)


def measurable_modes(
    backend: Backend, modes: Sequence[str], by_name: bool
) -> tuple[list[str], list[str]]:
    """The graph modes to measure, and what to say about those that are not."""
    best = backend.graph_mode(AUTO)
    result: list[str] = []
    notes = []
    for mode in modes:
        real = best if mode == AUTO else mode
        if real in result:
            notes.append(f"`auto` is `{real}` on this device: measured once")
        elif real in backend.graph_modes:
            result.append(real)
        elif by_name:
            hint = choices([AUTO, *backend.graph_modes])
            why = f"only {best} can run in this process"
            raise DeviceError(f"{backend.name} has no graph mode {real!r}", why, hint)
        else:
            notes.append(
                f"`{real}` and `{best}` cannot run in one process: measure it with {as_option(Arg('graphs', real))} "
                "into a second file; lantern-hpu compare takes both"
            )
    return result, notes


def cases_of(pipeline: LanternPipeline, wanted: BenchRequest, modes: Sequence[str]) -> list[Case]:
    """What each row is of. A tuned tree is the one found for the mode that the pipeline is in, in all modes."""
    result: dict[tuple[str, Relaxation, str, int], Resolved] = {}
    for batch in wanted.batches:
        for setting in wanted.settings:
            chosen = pipeline.resolve(setting, batch)
            rule = chosen.relaxation
            if rule.verify == "block":  # as all trees of this name are, but for those of one level
                rule = replace(rule, verify="auto")
            key = (chosen.method, rule, chosen.tree.name, batch)
            # The tuned tree may be a named one that is asked for as well.
            if result.setdefault(key, chosen) != chosen:
                what = words(
                    Arg("tree"), f"has two different ones of the name {chosen.tree.name!r}"
                )
                raise OptionError(what, "rows are identified by the names of trees")
    return [Case(setting, mode, batch) for mode in modes for (*_, batch), setting in result.items()]
