"""The folder of an evaluation: pictures by setting and prompt, and what there is to know of each. Needs no torch.

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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from PIL import Image

from lantern_hpu.errors import Arg, OptionError, OutputError, words
from lantern_hpu.files import parse_json, write_file
from lantern_lab.evaluate.statistics import Array, Rows

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
