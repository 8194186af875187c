"""What `tune` may search, and which of it can be refused before a model is loaded. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_hpu.errors import Arg, OptionError, choices, require, words
from lantern_hpu.fields import MAX_SEED, check_ranges, option
from lantern_hpu.files import parse_json
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.setting import METHODS, Setting

if TYPE_CHECKING:
    from lantern_hpu.train.acceptance_counts import ChildCounts

TUNABLE = [name for name, method in METHODS.items() if method.tunable]
MOST_NODES, MOST_DEPTH = 96, 12
# Of a large model on a processor, whose images take long
LARGE = {"max_nodes": 12, "max_depth": 4, "images": 3}
HELD_OUT = 1_000_000  # added to the seeds of images that check what was expected


@dataclass(frozen=True)
class TuneOptions:
    """Which trees may be found, for what, how many images are drawn with each that is measured, and where it goes."""

    method: str = option("eagle", f"{', '.join(TUNABLE)}, or a setting without a tree")
    batch_size: int = option(1, "images per batch", low=1)
    max_nodes: int = option(
        64,
        f"largest number of tree nodes, root included; large on a processor {LARGE['max_nodes']}",
        low=2,
        high=MOST_NODES,
    )
    max_depth: int = option(
        6, f"largest tree depth; large on a processor {LARGE['max_depth']}", low=1, high=MOST_DEPTH
    )
    model: str = option("builtin", "model name, Hub id, folder or weights file")
    prompts: Path | None = option(
        None, "prompts: .txt, .tsv or .json (eight built-in prompts)", metavar="FILE"
    )
    images: int = option(
        8,
        f"least number of images per tree; large on a processor {LARGE['images']}",
        name="num_images",
        low=1,
    )
    seed: int = option(0, "of the first image")
    profile: Path | None = option(
        None, "reuse the acceptance statistics of an earlier report", metavar="FILE.json"
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
            raise OptionError(what, "tune searches for the tree", "the method without a tree")
        check_ranges(self)
        last = MAX_SEED - HELD_OUT - self.images - self.batch_size
        require(0 <= self.seed <= last, "seed", self.seed, f"0 to {last}")
        for file in (self.output, self.report):
            if file and file.suffix != ".json":
                hint = "a name ending in .json"
                raise OptionError(f"cannot write {file}", "it will be JSON", hint)


def read_profile(file: Path) -> tuple[ChildCounts, tuned_trees.Situation]:
    """The counts of an earlier run, from its report, and what they hold for."""
    from lantern_hpu.train.acceptance_counts import ChildCounts

    try:
        profile = parse_json(file.read_text(encoding="utf-8"))["profile"]
        return ChildCounts.from_json(profile), dict(profile["situation"])
    except OSError as error:
        raise OptionError(f"cannot read {file}", str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        why = words("it is not the", Arg("report"), "of an earlier run")
        raise OptionError(f"{file} holds no profile", why) from error


def check_profile(
    situation: tuned_trees.Situation, here: tuned_trees.Situation, file: Path
) -> None:
    for name in ("target", "drafter", "method"):
        if situation.get(name) != here[name]:
            raise OptionError(f"the profile in {file} cannot be used", f"it is of another {name}")
