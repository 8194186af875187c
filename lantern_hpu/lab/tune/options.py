"""What is tuned for, and how it is measured. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lantern_hpu.errors import OptionError, check_ranges, choices, option, require
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
    """Which trees may be found, for what, and how many images are drawn with each that is measured."""

    method: str = option("eagle", f"{', '.join(TUNABLE)}, or a setting without a tree")
    batch_size: int = option(1, "images per batch", low=1)
    max_nodes: int = option(
        64,
        f"largest number of tree nodes, root included; with --stretch {LARGE['max_nodes']}",
        low=2,
        high=MOST_NODES,
    )
    max_depth: int = option(
        6, f"largest tree depth; with --stretch {LARGE['max_depth']}", low=1, high=MOST_DEPTH
    )
    images: int = option(
        8, f"least number of images per tree; with --stretch {LARGE['images']}", low=1
    )
    seed: int = option(0, "of the first image")

    @property
    def setting(self) -> Setting:
        """The method, and how it is relaxed."""
        return Setting.parse(self.method)

    def __post_init__(self) -> None:
        if self.setting.method not in TUNABLE:
            raise OptionError(f"--method {self.method} cannot be tuned", hint=choices(TUNABLE))
        if self.setting.tree is not None:
            what = f"--method {self.method} has a tree of its own"
            raise OptionError(what, "tune searches for the tree", "the method without @TREE")
        check_ranges(self)
        last = MAX_SEED - HELD_OUT - self.images - self.batch_size
        require(0 <= self.seed <= last, "--seed", self.seed, f"0 to {last}")
