"""How a drafter is trained, and what can be refused before torch is loaded."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from lantern_hpu.backends import DeviceOptions
from lantern_hpu.errors import Arg, OptionError, OutputError, choices, require, words
from lantern_hpu.fields import argument_name, check_ranges, option
from lantern_hpu.files import check_free
from lantern_hpu.models.files.names import PartOverrides

PRECISIONS = ("no", "bf16", "fp16")
NEEDED = ("accelerate", "matplotlib")


@dataclass(frozen=True)
class TrainOptions:
    """Of a training run; all but `steps` and `lr` must stay the same when it is resumed."""

    steps: int = option(2000, "optimizer steps", low=1)
    batch: int = option(4, "images per step and process", low=1)
    unroll: int = option(3, "draft depth to train for", low=1)
    lr: float = option(1e-3, "peak learning rate: above 0, at most 1")
    measure_every: int = option(250, "steps", low=1)
    measured: int = option(8, "held-out images per measurement", low=1)
    seed: int = option(0, "seed of the first image and of training")
    aux_layers: str = option(
        "", "target layers, from 0, that the drafter reads too, such as 2,5 (the drafter's)"
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        require(0 < self.lr <= 1, "lr", self.lr, "above 0, up to 1")
        self.read_layers()

    def read_layers(self) -> tuple[int, ...]:
        try:
            layers = tuple(map(int, filter(None, self.aux_layers.split(","))))
        except ValueError:
            layers = (-1,)
        if list(layers) != sorted(set(layers)) or min(layers, default=0) < 0:
            what = words(Arg("aux_layers"), f"is {self.aux_layers}")
            raise OptionError(what, hint="numbers that rise: 2,5")
        return layers

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to 2 %."""
        warm = min(1.0, (step + 1) / max(1, min(50, self.steps // 10)))
        return self.lr * warm * (0.51 + 0.49 * math.cos(math.pi * min(1.0, step / self.steps)))

    def check_resumed(self, earlier: dict[str, Any]) -> None:
        """Raise an OptionError that names an option which must not change."""
        for part in fields(self):
            value = getattr(self, part.name)
            before = earlier[part.name]
            if part.name not in ("steps", "lr") and before != value:
                name = argument_name(part)
                why = f"the run was begun with {before}"
                raise OptionError(words(Arg(name), f"is {value}"), why, Arg(name, before))


@dataclass(frozen=True)
class TrainRequest:
    """What is trained, from what, and where it goes."""

    data: Path = option(MISSING, "prompts: .txt, .tsv or .json", metavar="FILE")
    output: Path = option(MISSING, "folder for the drafter and its checkpoints", metavar="FOLDER")
    options: TrainOptions = field(default_factory=TrainOptions)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    given: PartOverrides = field(default_factory=PartOverrides)
    model: str = option("builtin", "target model to train the drafter for")
    tokens: Path | None = option(
        None, "additional training images as tokens (.npz)", metavar="FILE"
    )
    finetune: bool = option(False, "start from the model's drafter, or the one that is given")
    resume: bool = option(False, "resume the run in the output folder")
    mixed_precision: str = option("no", ", ".join(PRECISIONS))
    samples: int = option(1024, "images to generate for training")

    def __post_init__(self) -> None:
        if self.mixed_precision not in PRECISIONS:
            what = words(Arg("mixed_precision"), f"is {self.mixed_precision}")
            raise OptionError(what, hint=choices(PRECISIONS))
        least = int(self.tokens is None)
        require(self.samples >= least, "samples", self.samples, f"{least} or more")


@dataclass(frozen=True)
class CodesRequest:
    """Which pictures become codes, and of which model."""

    data: Path = option(
        MISSING, "pictures: a folder a class, or .jsonl with image_path and text", metavar="PATH"
    )
    output: Path = option(MISSING, "file for the codes and captions", metavar="FILE.npz")
    device: DeviceOptions = field(default_factory=DeviceOptions)
    given: PartOverrides = field(default_factory=PartOverrides)
    model: str = option("builtin", "model whose tokenizer encodes them")


def check_training(wanted: TrainRequest) -> None:
    """Refuse what can be refused before torch is loaded."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = 'pip install "lantern-hpu[train]"'
        raise OptionError(f"training needs {' and '.join(missing)}", "not installed", hint)
    state = wanted.output / "state.pt"
    if state.exists() and not wanted.resume:
        why = "it holds an earlier training run"
        hint = words(Arg("resume"), ", or another", Arg("output"))
        raise OutputError(f"{wanted.output} is in use", why, hint)
    if wanted.resume and not state.exists():
        why = f"there is no {state.name}"
        hint = words("without", Arg("resume"), "; samples in the folder are used again")
        raise OutputError(f"nothing to resume in {wanted.output}", why, hint)
    if wanted.output.exists() and not wanted.output.is_dir():
        raise OutputError(f"{wanted.output} is a file", "a folder cannot be written there")


def check_output(file: Path) -> None:
    """Refuse a file of codes that is there already, or cannot be written."""
    require(file.suffix == ".npz", "output", file, "a file .npz")
    if file.exists():
        raise OutputError(f"{file} exists", hint=words("another", Arg("output")))
    check_free([file], False)
