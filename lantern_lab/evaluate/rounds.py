"""Draw a set of prompts with many settings, in rounds, so that all of them see the same load of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from lantern_hpu.errors import OptionError
from lantern_hpu.methods.request import MAX_SEED, Request, Sampling
from lantern_hpu.methods.setting import METHODS, Resolved, Setting
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import GenerationResult
from lantern_hpu.tree import load_tree
from lantern_lab.evaluate.folder import Line, SettingFolder
from lantern_lab.evaluate.sets import Item

ROUND = 8  # batches of a setting before the next one's turn
OTHER_SEEDS = 10**9  # added to those of the second set of `ar`
AGAIN = "ar, other seeds"


@dataclass(frozen=True)
class Column:
    """What is drawn with.

    Attributes:
        name: of the setting as it was asked for. shift: added to the seeds.
    """

    name: str
    setting: Resolved
    shift: int = 0

    @property
    def slug(self) -> str:
        """Its folder's name."""
        return self.name.replace(", ", "-").replace(" ", "-").replace(":", "-").replace("/", "-")

    def about(self) -> dict[str, Any]:
        about = self.setting.as_json()
        return {name: about[name] for name in ("method", "tree", "relaxation")}


def settings_columns(
    pipeline: LanternPipeline, settings: Sequence[Setting], tree: str | None, size: int, floor: bool
) -> list[Column]:
    """What the settings come to with this model; and `ar` once more, for the floor.

    Args:
        tree: comma-separated, each for the methods that can draft it; None for each method's own.
        size: of a batch.
    """
    trees = [load_tree(name) for name in tree.split(",")] if tree else []
    result = []
    for setting in settings:
        name, takes = str(setting), METHODS[setting.drafting].takes
        if setting.tree is None and (chosen := next(filter(takes, trees), None)):
            setting = replace(setting, tree=chosen)
        result.append(Column(name, pipeline.resolve(setting, size)))
    first = [column for column in result if column.name == "ar"]
    return result + [replace(column, name=AGAIN, shift=OTHER_SEEDS) for column in first if floor]


Batch = tuple[Column, list[int]]  # a setting, and numbers of items


class RemoteDrawing(Protocol):
    """Other processes that draw; see `pictures.workers`."""

    def drawn(
        self, wanted: Sequence[Column], batches: Iterable[Batch]
    ) -> Iterator[tuple[Column, list[Line]]]:
        """Batches as they are done, with their pictures written."""
        ...


@dataclass(frozen=True)
class Drawing:
    """All that is drawn in a run.

    Attributes:
        seed: of the first item; the next take the next numbers, whatever the setting.
        size: images decoded together.
    """

    pipeline: LanternPipeline
    items: Sequence[Item]
    sampling: Sampling
    seed: int
    size: int
    folder: Path

    def folder_of(self, column: Column) -> SettingFolder:
        return SettingFolder(self.folder / "pictures" / column.slug, self.items)

    def request(self, column: Column, index: int) -> Request:
        seed = self.seed + column.shift + index
        return Request(self.items[index].prompt, seed, self.sampling, column.setting.relaxation)

    def draw(self, wanted: Sequence[Column], workers: RemoteDrawing | None = None) -> None:
        """Whatever is not there yet, with a bar.

        Args:
            workers: other processes that draw; None: this one does.
        """
        if self.pipeline.model.vq is None:
            raise OptionError(
                f"{self.pipeline.model.name} has no tokenizer", "it draws no pictures"
            )
        last = self.seed + OTHER_SEEDS + len(self.items)
        if not 0 <= self.seed <= last <= MAX_SEED:
            raise OptionError(f"--seed is {self.seed}", f"allowed: 0 to {MAX_SEED - OTHER_SEEDS}")
        left = {}
        for column in wanted:
            pictures = self.folder_of(column)
            pictures.check_settings(column.about())
            there = pictures.drawn()
            left[column.name] = [i for i, item in enumerate(self.items) if item.id not in there]
        total = len(wanted) * len(self.items)
        missing = sum(map(len, left.values()))
        if not missing:
            return
        batches = in_rounds(wanted, left, self.size)
        with tqdm(total=total, initial=total - missing, unit="image", mininterval=1) as bar:
            for column, lines in (workers or self).drawn(wanted, batches):
                bar.set_description(column.name)
                self.folder_of(column).note(lines)
                bar.update(len(lines))

    def drawn(
        self, wanted: Sequence[Column], batches: Iterable[Batch]
    ) -> Iterator[tuple[Column, list[Line]]]:
        """Batches, one after the other."""
        for column, indices in batches:
            yield column, self.draw_batch(column, indices)

    def draw_batch(self, column: Column, indices: Sequence[int]) -> list[Line]:
        """One batch: its pictures are written, their lines are not."""
        requests = [self.request(column, index) for index in indices]
        result = self.pipeline.draw(requests, column.setting, self.size)
        spent = result.timing
        seconds = (spent.text_s + spent.generate_s + spent.decode_s) / self.size
        pictures, lines = pictures_of(result, self.items, indices, seconds)
        self.folder_of(column).write(pictures, lines)
        return lines


def in_rounds(wanted: Sequence[Column], left: dict[str, list[int]], size: int) -> Iterator[Batch]:
    """Batches of indices, `ROUND` of a setting at a time."""
    step = ROUND * size
    for start in range(0, max(map(len, left.values())), step):
        for column in wanted:
            mine = left[column.name][start : start + step]
            for first in range(0, len(mine), size):
                yield column, mine[first : first + size]


def pictures_of(
    result: GenerationResult, items: Sequence[Item], indices: Sequence[int], seconds: float
) -> tuple[list[bytes], list[Line]]:
    """PNG files of a batch, and their lines."""
    lines = [
        Line(
            items[index].id,
            record.seed,
            record.tokens,
            record.steps,
            round(seconds, 6),
            record.tv_sum,
        )
        for index, record in zip(indices, result.records, strict=True)
    ]
    return [result.png(i) for i in range(len(lines))], lines
