"""What `lantern-hpu fidelity` and `lantern-hpu evaluate` measure, and how much of it. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lantern_hpu.backends import DeviceOptions
from lantern_hpu.core import Sampling
from lantern_hpu.errors import Arg, OptionError, words
from lantern_hpu.fields import MAX_IMAGES, check_ranges, option
from lantern_hpu.methods.setting import AUTO, Setting
from lantern_hpu.models.files.names import PartOverrides
from lantern_lab.evaluate.protocols import Library

EXPORTED = (
    "geneval",
    "dpg",
    "t2i-compbench",
)  # sets whose benchmarks read pictures in a layout of their own


@dataclass(frozen=True)
class PaintedOptions:
    """Pictures of the embedded model's protocol; a Frechet distance of 64 features needs more than 64."""

    images: int = option(
        400, "captions that are drawn once each", name="num_images", low=65, high=MAX_IMAGES
    )
    panels: int = option(
        25, "captions with four images each, to compare by eye", low=2, high=MAX_IMAGES
    )
    fresh: int = option(4000, "reference images from the scene generator", low=65, high=MAX_IMAGES)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class EvaluateRequest:
    """What is drawn, by which protocol it is scored, and where it goes.

    Attributes:
        library: of a protocol of the literature; None is the embedded model's, of which `painted` says how much.
        sampling: in place of the protocol's and the model's.
        images: of the set's first prompts; None is all.
        folders: pictures drawn elsewhere, by the names of their rows. floor: draw `ar` with a second set of seeds.
    """

    output: Path
    settings: Sequence[Setting]
    library: Library | None = None
    painted: PaintedOptions = field(default_factory=PaintedOptions)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    given: PartOverrides = field(default_factory=PartOverrides)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    folders: Mapping[str, Path] = field(default_factory=dict)
    floor: bool = True
    images: int | None = option(None, "", name="num_images")
    seed: int = option(0, "seed of the first image", low=0)
    batch_size: int = option(8, "images per batch", low=1)
    rounds: int = option(200, "bootstrap samples", low=2)
    places: int = option(
        0,
        "positions at which to measure the next-token distribution, as `fidelity` does",
        low=0,
        marks={0: "none"},
    )
    model: str = option("builtin", "model name, Hub id, folder or weights file")
    workers: int | None = option(
        None,
        "Ray processes that generate, one per card; this process scores (default: generate in this process)",
        metavar="N",
        low=1,
        high=4096,
    )
    export: Path | None = option(
        None,
        "also copy the images in the layout of GenEval, DPG-Bench or T2I-CompBench",
        metavar="FOLDER",
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        Sampling(**self.sampling)
        if self.export and (self.library is None or self.library.prompts not in EXPORTED):
            hint = words(Arg("prompts", "geneval"), ", dpg or t2i-compbench")
            raise OptionError(words(Arg("export"), "needs the prompts of a benchmark"), hint=hint)
        tuned = any(setting.tree == AUTO for setting in self.settings)
        if self.workers is not None and (self.places or tuned):
            what = words(Arg("workers"), "excludes", Arg("places"), "and tuned trees")
            hint = words(
                "the same command without", Arg("workers"), "continues with what was drawn"
            )
            raise OptionError(what, "the process that scores does not draw", hint)


def folders_of(texts: Sequence[str]) -> dict[str, Path]:
    """Folders of pictures by their names, of options of the form NAME=FOLDER."""
    folders: dict[str, Path] = {}
    for text in texts:
        name, equals, place = text.partition("=")
        if not equals or not name or name in folders:
            raise OptionError(words(Arg("folder"), f"is {text}"), "a new NAME=FOLDER was expected")
        if not Path(place).is_dir():
            raise OptionError(words(Arg("folder"), f"is {text}"), f"{place} is not a folder")
        folders[name] = Path(place)
    return folders
