"""The folder of an evaluation: pictures by setting and prompt, and what there is to know of each. Needs no torch.

    run.json                      what is drawn: model, prompts, seed, sampling
    pictures/SETTING/ID.png       in folders of a thousand if there are many
    pictures/SETTING/setting.json method, tree, relaxation
    pictures/SETTING/drawn.jsonl  a line a picture, written after it: steps, tokens, seconds
    features/SETTING.npz          rows of the metrics, as long as the pictures are the same
    evaluation.json, .md, .png    what came out

A picture counts once its line is there; so a run that was stopped at any point goes on with the next picture, and
none is drawn twice but those of the batch in hand.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from PIL import Image

from lantern_hpu.errors import OptionError, OutputError
from lantern_hpu.files import parse_json, write_file
from lantern_lab.evaluate.sets import Item
from lantern_lab.evaluate.statistics import Array, Rows

MANY = 5000  # pictures, from which they lie in folders of a thousand
HINT = "another --output, or the options of the first run"


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
    """The pictures of a setting."""

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


def check_same(file: Path, about: Mapping[str, Any], what: str) -> None:
    """Write a JSON file, or see that it holds the same."""
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


def read_picture(file: Path) -> Image.Image:
    """A whole picture."""
    try:
        with Image.open(file) as image:
            image.load()
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        hint = "delete it, and it is drawn again"
        raise OptionError(f"{file} is no whole picture", str(error), hint) from error


# ------------------------------------------------------------------------------------ rows that are kept


def stamps(files: Iterable[Path]) -> list[list[Any]]:
    """What changes when a file does."""
    return [[file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files]


def kept_rows(file: Path, key: object) -> dict[str, Array] | None:
    """Arrays of a key that were written by `keep_rows`; None where there are none, or of another key."""
    try:
        with np.load(file, allow_pickle=False) as data:
            if str(data["key"]) != json.dumps(key):
                return None
            return {name: data[name] for name in data.files if name != "key"}
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None


@dataclass(frozen=True)
class Cache:
    """Rows beside the pictures they were made of.

    Attributes:
        network: what they depend on beside the pictures.
    """

    folder: Path
    network: object

    def rows(self, name: str, key: object, make: Callable[[], Rows]) -> dict[str, Array]:
        """Those of this name and key that were kept, or made now."""
        full = json.loads(json.dumps([self.network, key]))
        file = self.folder / "features" / f"{name}.npz"
        result = kept_rows(file, full)
        if result is None:
            result = dict(make())
            keep_rows(file, full, result)
        return result


def keep_rows(file: Path, key: object, rows: Rows) -> None:
    buffer, arrays = io.BytesIO(), {**rows, "key": np.asarray(json.dumps(key))}
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    write_file(file, buffer.getvalue(), force=True)
