"""Files of models: where the package's own lie, model folders whose files are checked, checksums. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lantern_hpu.errors import WeightsError

ASSETS = Path(__file__).parent / "assets"
CONFIG = "model.json"
SAFE = ".safetensors"
PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def weights_files(folder: Path) -> list[Path]:
    """The weights files that lie directly in a folder."""
    return sorted(f for f in folder.iterdir() if f.suffix in (SAFE, *PICKLES) and f.is_file())


def source(folder: Path) -> str:
    """What `--model` takes to find a folder again from anywhere."""
    return "builtin" if folder == ASSETS / "builtin" else str(folder.resolve())


def again(folder: Path) -> str:
    """How to get a model folder anew."""
    return (
        "install the package again" if source(folder) == "builtin" else "convert or copy it again"
    )


@contextmanager
def reading(file: Path, hint: str = "") -> Iterator[dict[str, Any]]:
    """The object in a JSON file; what goes wrong while it is read and used is an error that names the file.

    Raises:
        WeightsError: instead of an OSError, KeyError, ValueError and the like.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
        yield found
    except KeyError as error:
        raise WeightsError(f"cannot read {file}", f"{error.args[0]} is missing", hint) from error
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise WeightsError(f"cannot read {file}", why, hint) from error


def read_config(folder: Path) -> dict[str, Any]:
    """`model.json` of a folder whose files are all there and whole.

    Raises:
        WeightsError: unreadable configuration; missing files (all are listed); a checksum that differs.
    """
    with reading(folder / CONFIG) as config:
        files: dict[str, str] = dict(config["files"])
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise WeightsError(f"files are missing in {folder}", ", ".join(missing), again(folder))
    for name, digest in files.items():
        if sha256(folder / name) != digest:
            why = "its checksum differs from the one in model.json: damaged, cut off, or another version"
            raise WeightsError(f"{folder / name} cannot be used", why, again(folder))
    return config


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file.

    Raises:
        WeightsError: the file cannot be read.
    """
    try:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()
    except OSError as error:
        raise WeightsError(f"cannot read {path}", error.strerror or str(error)) from error
