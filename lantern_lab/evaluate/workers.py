"""Pictures of an evaluation drawn by other processes, one a card, through Ray.

Needs no torch: a worker prepares its device before that is imported. Workers write pictures, and say what there is to
know of them; the one that asked writes that down. So whoever dies leaves nothing half done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_hpu.backends import prepare
from lantern_hpu.methods.request import Sampling
from lantern_hpu.methods.setting import Setting
from lantern_hpu.models.files.names import Given
from lantern_hpu.models.options import DeviceOptions
from lantern_hpu.workers import share_work
from lantern_lab.evaluate.folder import Line
from lantern_lab.evaluate.options import EvaluateOptions
from lantern_lab.evaluate.sets import Item

if TYPE_CHECKING:
    from lantern_lab.evaluate.rounds import Batch, Column

OPENER = "lantern_lab.evaluate.workers:open_picture_worker"


@dataclass(frozen=True)
class Order:
    """What a worker needs to draw what one process would; the folder is one that all of them see."""

    model: str
    given: Given
    device: DeviceOptions
    items: Sequence[Item]
    settings: Sequence[Setting]
    sampling: Sampling
    options: EvaluateOptions
    folder: Path


@dataclass(frozen=True)
class Workers:
    """So many processes."""

    count: int
    order: Order

    def drawn(
        self, wanted: Sequence[Column], batches: Iterable[Batch]
    ) -> Iterator[tuple[Column, list[Line]]]:
        """Batches of these settings, in the order in which they are done."""
        # A picture's number: the place of its setting times the number of items, and its own
        device, images = self.order.device, len(self.order.items)
        start = {column.name: place * images for place, column in enumerate(wanted)}
        work = [[start[column.name] + i for i in indices] for column, indices in batches]
        given = (OPENER, [self.order], work, self.count, device.device, device.emulate)
        for numbers, lines in share_work(*given):
            yield wanted[numbers[0] // images], lines


def open_picture_worker(order: Order) -> Callable[[list[int]], list[Line]]:
    """What a worker does: the pictures of these numbers, all of one setting. -> their lines"""
    device, options = order.device, order.options
    prepare(device.device, device.graphs, device.emulate)
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_lab.evaluate.rounds import Drawing, settings_columns

    pipeline = LanternPipeline.from_pretrained(order.model, given=order.given, **vars(device))
    size, images = options.batch_size, len(order.items)
    wanted = settings_columns(pipeline, order.settings, options.tree, size, options.floor)
    drawing = Drawing(pipeline, order.items, order.sampling, options.seed, size, order.folder)

    def draw_piece(numbers: list[int]) -> list[Line]:
        column = wanted[numbers[0] // images]
        drawing.folder_of(column).check_settings(column.about())
        with pipeline.backend.errors():
            return drawing.draw_batch(column, [number % images for number in numbers])

    return draw_piece
