"""What the commands that measure are asked for, and what follows from the device. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_hpu.backends import LARGE_PARAMETERS, DeviceOptions
from lantern_hpu.core import Request, check_prompt
from lantern_hpu.errors import Arg, DeviceError, OptionError, as_option, choices, words
from lantern_hpu.fields import MAX_IMAGES, MAX_SEED, check_ranges, option
from lantern_hpu.methods.relaxation import Relaxation
from lantern_hpu.methods.setting import (
    AUTO,
    METHODS,
    SMALL_DYNAMIC,
    SMALL_TREE,
    Resolved,
    Setting,
)
from lantern_lab.measure.rows import Case

if TYPE_CHECKING:
    from lantern_hpu.backends.base import Backend
    from lantern_hpu.pipeline import LanternPipeline

GRAPHS = "eager,auto"
# What `bench` measures unless something else is asked for
USUAL = {"methods": ",".join(METHODS), "batch_sizes": "1,8"}
# The same of a large model where arithmetic is scarce: an image takes long, small trees and windows can pay
LARGE = {
    "methods": f"ar,eagle@{SMALL_TREE},eagle@chain,eagle2@{SMALL_DYNAMIC},lantern@{SMALL_DYNAMIC},"
    f"lantern++@{SMALL_TREE},lantern++@chain,lantern++:tv=0.1@{SMALL_TREE},lantern++:tv=0.1@chain,"
    "jacobi@2,scd@2,scd@5,scd@8,sjd-pac@2:2x1",
    "batch_sizes": "1",
    "images": "1",
}
# The same with random weights, whose images say nothing
RANDOM = {"methods": "ar,scd@8", "batch_sizes": "1", "graphs": AUTO}
TUNABLE = [name for name, method in METHODS.items() if method.tunable]
TUNE_LARGE = {"max_nodes": 12, "images": 3}  # what `tune` measures of a large model on a processor
HELD_OUT = 1_000_000  # added to seeds: a tree is not chosen on images that are looked at


def has_long_steps(pipeline: LanternPipeline) -> bool:
    """Whether the model is large for a device on which arithmetic is scarce, as processors."""
    parameters = pipeline.model.config.target.parameters
    return parameters >= LARGE_PARAMETERS and not pipeline.drafting_defaults.idle_arithmetic


def large(pipeline: LanternPipeline) -> dict[str, str]:
    """`LARGE`, and the device's own window where it is a longer one."""
    own = f"scd@{pipeline.drafting_defaults.window}"
    methods = LARGE["methods"]
    return LARGE if own in methods.split(",") else {**LARGE, "methods": f"{methods},{own}"}


# ------------------------------------------------------------------------------------ bench


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """The options of `bench`."""

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
    random_weights: bool = option(
        False,
        "time the tokens of a known model without its files: random weights of its sizes, in parts if memory is short, "
        "beside the figures that others print",
    )
    seed: int = option(0, "of the first image")

    def __post_init__(self) -> None:
        check_ranges(self)
        Request("any", self.seed)

    @property
    def mode(self) -> str:
        """What a device prepares for: its best graph mode, if that is asked for."""
        return AUTO if AUTO in self.modes else self.modes[0]


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
                what = f"two different trees have the name {chosen.tree.name!r}"
                raise OptionError(what, "rows are identified by the names of trees")
    return [Case(setting, mode, batch) for mode in modes for (*_, batch), setting in result.items()]


# ------------------------------------------------------------------------------------ tune, race, fidelity


@dataclass(frozen=True)
class TuneOptions:
    """For what trees are compared, how many images are drawn with each, and where the fastest goes."""

    method: str = option("eagle", f"{', '.join(TUNABLE)}, or a setting without a tree")
    batch_size: int = option(1, "images per batch", low=1)
    model: str = option("builtin", "model name, Hub id, folder or weights file")
    prompts: Path | None = option(
        None, "prompts: .txt, .tsv or .json (eight built-in prompts)", metavar="FILE"
    )
    images: int = option(
        8,
        f"least number of images per tree; large on a processor {TUNE_LARGE['images']}",
        name="num_images",
        low=1,
    )
    output: Path | None = option(
        None, "write the tree, which `generate` takes as a tree", metavar="TREE.json"
    )
    report: Path | None = option(None, "write all measurements", metavar="FILE.json")
    force: bool = option(False, "replace existing files")

    @property
    def setting(self) -> Setting:
        """The method, and how it is relaxed."""
        return Setting.parse(self.method)

    def __post_init__(self) -> None:
        if self.setting.method not in TUNABLE:
            what = words(Arg("method", self.method), "cannot be tuned")
            raise OptionError(what, hint=choices(TUNABLE))
        if self.setting.tree is not None:
            what = words(Arg("method", self.method), "has a tree of its own")
            raise OptionError(what, "tune finds the tree", "the method without a tree")
        check_ranges(self)
        for file in (self.output, self.report):
            if file and file.suffix != ".json":
                hint = "a name ending in .json"
                raise OptionError(f"cannot write {file}", "it will be JSON", hint)


@dataclass(frozen=True)
class FidelityOptions:
    """How much is measured."""

    images: int = option(
        64, "positions to measure, one per image", name="num_images", low=1, high=MAX_IMAGES
    )
    draws: int = option(
        256, "samples per position to estimate rejected drafts of a static tree", low=1
    )
    timed: int = option(8, "images to time", low=1, high=MAX_IMAGES)
    seed: int = option(0, "of the first image")

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class RaceRequest:
    """What is drawn with which model, and where it goes."""

    prompt: str = option("a red balloon over green hills", "text to draw")
    seed: int = option(2, "of the image", low=0, high=MAX_SEED)
    turns: int = option(1, "times that each setting draws, in turns; the fastest counts", low=1)
    model: str = option(
        "llamagen-xl",
        "a model, or sizes that the embedded one is widened to: llamagen-b, -l, -xl, -xxl",
    )
    output: Path = option(
        Path("race"), "folder for race.gif, race.png and race.json; must not exist"
    )

    def __post_init__(self) -> None:
        check_prompt(self.prompt)
        check_ranges(self)
