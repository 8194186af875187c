"""What is tuned for, and how it is measured. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lantern_hpu.errors import OptionError, choices, require
from lantern_hpu.methods.request import MAX_SEED
from lantern_hpu.methods.setting import Setting
from lantern_hpu.methods.table import METHODS

TUNABLE = [name for name, method in METHODS.items() if method.tunable]
MOST_NODES, MOST_DEPTH = 96, 12
# Of a stretched model, whose images take minutes
LARGE = {"max_nodes": 12, "max_depth": 4, "images": 1}
HELD_OUT = 1_000_000  # added to the seeds of images that check what was expected


@dataclass(frozen=True)
class TuneOptions:
    """Which trees may be found, for what, and how many images are drawn with each that is measured.

    Attributes:
        method: its name, or a setting without a tree.
        batch_size: images decoded together. max_nodes: with the root. max_depth: drafts in a row.
        seed: of the first image.
    """

    method: str = "lantern++"
    batch_size: int = 1
    max_nodes: int = 64
    max_depth: int = 6
    images: int = 8
    seed: int = 0

    @property
    def setting(self) -> Setting:
        """The method, and how it is relaxed."""
        return Setting.parse(self.method)

    def __post_init__(self) -> None:
        if self.setting.method not in TUNABLE:
            raise OptionError(f"--method {self.method} cannot be tuned", hint=choices(TUNABLE))
        if self.setting.tree is not None:
            what = f"--method {self.method} has a tree of its own"
            raise OptionError(what, "the tree is what is looked for", "leave @ and the tree out")
        require(
            2 <= self.max_nodes <= MOST_NODES, "--max-nodes", self.max_nodes, f"2 to {MOST_NODES}"
        )
        require(
            1 <= self.max_depth <= MOST_DEPTH, "--max-depth", self.max_depth, f"1 to {MOST_DEPTH}"
        )
        require(self.batch_size >= 1, "--batch-size", self.batch_size, "1 or more")
        require(self.images >= 1, "--images", self.images, "1 or more")
        last = MAX_SEED - HELD_OUT - self.images - self.batch_size
        require(0 <= self.seed <= last, "--seed", self.seed, f"0 to {last}")
