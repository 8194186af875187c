"""What `tune` is asked for, and which of it can be refused before a model is loaded. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lantern_hpu.errors import Arg, OptionError, choices, require, words
from lantern_hpu.fields import MAX_SEED, check_ranges, option
from lantern_hpu.methods.setting import METHODS, Setting

TUNABLE = [name for name, method in METHODS.items() if method.tunable]
# Of a large model on a processor, whose images take long
LARGE = {"max_nodes": 12, "images": 3}
HELD_OUT = (
    1_000_000  # added to the seeds, so that a tree is not chosen on images that are looked at
)


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
        f"least number of images per tree; large on a processor {LARGE['images']}",
        name="num_images",
        low=1,
    )
    seed: int = option(0, "of the first image")
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
        last = MAX_SEED - HELD_OUT - self.images - self.batch_size
        require(0 <= self.seed <= last, "seed", self.seed, f"0 to {last}")
        for file in (self.output, self.report):
            if file and file.suffix != ".json":
                hint = "a name ending in .json"
                raise OptionError(f"cannot write {file}", "it will be JSON", hint)
