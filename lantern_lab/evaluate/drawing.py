"""Draw a set of prompts with many settings, in rounds, so that all of them see the same load of the machine.

This process draws, or Ray's workers do, one a card: they write pictures and answer with their lines, which this process
writes, so that a worker that ends leaves nothing half done. Needs no torch at import: a worker prepares its device
before that is imported. The folder:

    run.json                      what is drawn: model, prompts, seed, sampling
    pictures/SETTING/ID.png       in folders of a thousand if there are many
    pictures/SETTING/setting.json method, tree, relaxation
    pictures/SETTING/drawn.jsonl  a line a picture, written after it: steps, tokens, seconds
    features/SETTING.npz          rows of the metrics, as long as the pictures are the same
    evaluation.json, .md, .png    what came out

A picture counts once its line is there; so a run that was stopped at any point continues with the next picture, and
none is drawn twice but those of the batch in hand.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
from PIL import Image

from lantern_hpu.backends import prepare
from lantern_hpu.core import Request, Sampling
from lantern_hpu.errors import Arg, OptionError, OutputError, words
from lantern_hpu.fields import MAX_SEED
from lantern_hpu.files import parse_json, write_file
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.workers import share_work
from lantern_lab.evaluate.metrics import Array, Rows
from lantern_lab.evaluate.options import EvaluateRequest
from lantern_lab.evaluate.sets import Item

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline


HINT = words("another", Arg("output"), ", or the options of the first run")


def check_same(file: Path, about: Mapping[str, Any], what: str) -> None:
    fresh = json.loads(json.dumps(about))
    if not file.exists():
        write_file(file, json.dumps(fresh, indent=1).encode())
        return
    try:
        known = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot read {file}", str(error)) from error
    if known != fresh:
        names = [name for name in fresh.keys() | known.keys() if fresh.get(name) != known.get(name)]
        raise OutputError(f"{what} are of another run", f"other {', '.join(sorted(names))}", HINT)


def open_evaluation(folder: Path, about: Mapping[str, Any]) -> None:
    """Begin an evaluation there, or go on with it."""
    if folder.is_file():
        raise OutputError(f"{folder} is a file", "a folder cannot be written there")
    if folder.exists() and any(folder.iterdir()) and not (folder / "run.json").exists():
        raise OutputError(f"{folder} is no evaluation's folder", "it holds other files", HINT)
    check_same(folder / "run.json", about, f"the pictures in {folder}")


# What other programs leave in folders of pictures, with a dot in front or without
LEFT = ("@eaDir", "__MACOSX", "$RECYCLE.BIN", "lost+found")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


def pictures_in(folder: Path) -> list[Path]:
    """Pictures in a folder and those below, without what other programs leave there: thumbnails, copies, waste."""

    def is_left(name: str) -> bool:
        return name.startswith(".") or name in LEFT

    return sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in PICTURES
        and not any(map(is_left, file.relative_to(folder).parts))
        and file.is_file()
    )


def read_picture(file: Path) -> Image.Image:
    try:
        with Image.open(file) as image:
            image.load()
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"its numbers are of mode {image.mode}, not of 8 bits")
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        hint = "another copy of it; one that was drawn here is drawn again once it is deleted"
        raise OptionError(f"{file} is not a whole picture", str(error), hint) from error


# ------------------------------------------------------------------------------------ rows that are kept


def stamps(files: Iterable[Path]) -> list[list[Any]]:
    """What changes when a file does."""
    return [[file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]


@dataclass(frozen=True)
class Cache:
    """Rows, kept next to the pictures they were made of.

    Attributes:
        network: what else they depend on.
    """

    folder: Path
    network: object

    def rows(self, name: str, key: object, make: Callable[[], Rows]) -> dict[str, Array]:
        """Those of this name and key, from the cache or made now."""
        full, file = json.dumps([self.network, key]), self.folder / "features" / f"{name}.npz"
        try:
            with np.load(file, allow_pickle=False) as data:
                if str(data["key"]) == full:
                    return {name: data[name] for name in data.files if name != "key"}
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):
            pass  # none there, or damaged
        result, buffer = dict(make()), io.BytesIO()
        np.savez_compressed(buffer, **result, key=np.asarray(full))  # type: ignore[arg-type]
        write_file(file, buffer.getvalue(), force=True)
        return result


ROUND = 8  # batches of a setting before the next one's turn
OTHER_SEEDS = 10**9  # added to those of the second set of `ar`
AGAIN = "ar, other seeds"
MANY = 5000  # pictures, from which they are kept in folders of a thousand
OPENER = "lantern_lab.evaluate.drawing:open_picture_worker"


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
        return self.name.replace(", ", "-").replace(" ", "-").replace(":", "-").replace("/", "-")

    def about(self) -> dict[str, Any]:
        about = self.setting.as_json()
        return {name: about[name] for name in ("method", "tree", "relaxation")}


def settings_columns(pipeline: LanternPipeline, request: EvaluateRequest) -> list[Column]:
    """What the settings come to with this model; and `ar` once more, for the floor."""
    size = request.batch_size
    result = [Column(str(setting), pipeline.resolve(setting, size)) for setting in request.settings]
    first = [column for column in result if column.name == "ar" and request.floor]
    return result + [replace(column, name=AGAIN, shift=OTHER_SEEDS) for column in first]


# ------------------------------------------------------------------------------------ pictures of a setting


@dataclass(frozen=True)
class Line:
    """A picture's line.

    Attributes:
        steps: until it was done. seconds: prompt to pixels, of its batch over the batch's size.
        tv: total variation that relaxation cost its tokens together; None where it was not metered.
    """

    id: str
    seed: int
    tokens: int
    steps: int
    seconds: float
    tv: float | None = None


@dataclass(frozen=True)
class SettingFolder:
    folder: Path
    items: Sequence[Item]

    @property
    def places(self) -> dict[str, Path]:
        """The file of each item, by its id."""
        parts = [
            f"{i // 1000:03d}" if len(self.items) > MANY else "" for i in range(len(self.items))
        ]
        pairs = zip(self.items, parts, strict=True)
        return {item.id: self.folder / part / f"{item.id}.png" for item, part in pairs}

    def check_settings(self, about: Mapping[str, Any]) -> None:
        """Write down what the pictures are drawn with, or see that it is the same."""
        check_same(self.folder / "setting.json", about, f"the pictures in {self.folder}")

    def drawn(self) -> dict[str, Line]:
        """Lines of the pictures that are there, by id; half a line at the end is of a picture that does not count."""
        file, places, result = self.folder / "drawn.jsonl", self.places, {}
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        for line in lines:
            try:
                one = Line(**parse_json(line))
            except (ValueError, TypeError):
                continue
            if one.id in places and places[one.id].exists():
                result[one.id] = one
        return result

    def write(self, pictures: Iterable[bytes], lines: Sequence[Line]) -> None:
        """Write PNG files, which count once `note` has their lines."""
        places = self.places
        for data, line in zip(pictures, lines, strict=True):
            write_file(places[line.id], data, force=True)

    def note(self, lines: Sequence[Line]) -> None:
        """Write the lines of pictures that are there; one process alone does."""
        file = self.folder / "drawn.jsonl"
        half = file.exists() and not file.read_bytes().endswith(b"\n")
        text = "\n" * half + "".join(json.dumps(asdict(line)) + "\n" for line in lines)
        with open(file, "a", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())


# ------------------------------------------------------------------------------------ drawing

Batch = tuple[Column, list[int]]  # a setting, and numbers of items
# Batches as they are done, with their pictures written
Share = Callable[[Sequence[Column], Iterable[Batch]], Iterator[tuple[Column, list[Line]]]]


@dataclass(frozen=True)
class Drawing:
    """All that is drawn in a run.

    Attributes:
        seed: of the first item; the next take the next numbers, with every setting.
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

    def draw(self, wanted: Sequence[Column], share: Share | None = None) -> None:
        """What is not there yet, with a bar.

        Args:
            share: has other processes draw; None: this one does.
        """
        if self.pipeline.model.vq is None:
            raise OptionError(
                f"{self.pipeline.model.name} has no tokenizer", "it draws no pictures"
            )
        last = self.seed + OTHER_SEEDS + len(self.items)
        if not 0 <= self.seed <= last <= MAX_SEED:
            raise OptionError(
                words(Arg("seed"), f"is {self.seed}"), f"allowed: 0 to {MAX_SEED - OTHER_SEEDS}"
            )
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
        with ProgressBar(total, "image", initial=total - missing, mininterval=1) as bar:
            here = ((column, self.draw_batch(column, indices)) for column, indices in batches)
            for column, lines in share(wanted, batches) if share else here:
                bar.set_description(column.name)
                self.folder_of(column).note(lines)
                bar.update(len(lines))

    def draw_batch(self, column: Column, indices: Sequence[int]) -> list[Line]:
        """One batch: its pictures are written, their lines are not."""
        requests = [self.request(column, index) for index in indices]
        result = self.pipeline.draw(requests, column.setting, self.size)
        timing = result.timing  # prompt to pixels, without loading and warm-up
        seconds = (timing.text_s + timing.generate_s + timing.decode_s) / self.size
        lines = [
            Line(self.items[i].id, one.seed, one.tokens, one.steps, round(seconds, 6), one.tv_sum)
            for i, one in zip(indices, result.records, strict=True)
        ]
        self.folder_of(column).write([result.png(i) for i in range(len(lines))], lines)
        return lines


def in_rounds(wanted: Sequence[Column], left: dict[str, list[int]], size: int) -> Iterator[Batch]:
    """Batches of indices, `ROUND` of a setting at a time."""
    step = ROUND * size
    for start in range(0, max(map(len, left.values())), step):
        for column in wanted:
            mine = left[column.name][start : start + step]
            for first in range(0, len(mine), size):
                yield column, mine[first : first + size]


def share_with_workers(
    request: EvaluateRequest, items: Sequence[Item], sampling: Sampling, workers: int
) -> Share:
    """Other processes draw; the output folder is one that all of them see."""
    order = replace(request, given=request.given.resolved(), output=request.output.resolve())

    def share(
        wanted: Sequence[Column], batches: Iterable[Batch]
    ) -> Iterator[tuple[Column, list[Line]]]:
        # A picture's number: the place of its setting times the number of items, and its own
        device, images = request.device, len(items)
        start = {column.name: place * images for place, column in enumerate(wanted)}
        work = [[start[column.name] + i for i in indices] for column, indices in batches]
        given = (OPENER, [order, items, sampling], work, workers, device.device)
        for numbers, lines in share_work(*given):
            yield wanted[numbers[0] // images], lines

    return share


def open_picture_worker(
    request: EvaluateRequest, items: Sequence[Item], sampling: Sampling
) -> Callable[[list[int]], list[Line]]:
    """What a worker does: the pictures of these numbers, all of one setting. -> their lines"""
    device = request.device
    prepare(device.device, device.graphs)
    from lantern_hpu.pipeline import LanternPipeline

    pipeline = LanternPipeline.from_pretrained(request.model, given=request.given, **vars(device))
    size, images = request.batch_size, len(items)
    wanted = settings_columns(pipeline, request)
    drawing = Drawing(pipeline, items, sampling, request.seed, size, request.output)

    def draw_piece(numbers: list[int]) -> list[Line]:
        column = wanted[numbers[0] // images]
        drawing.folder_of(column).check_settings(column.about())
        with pipeline.backend.errors():
            return drawing.draw_batch(column, [number % images for number in numbers])

    return draw_piece
