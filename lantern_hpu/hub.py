"""Files of models: where the package's own lie, model folders whose files are checked, checksums. Needs no torch."""

from __future__ import annotations

import hashlib
import json
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


def read_config(folder: Path) -> dict[str, Any]:
    """`model.json` of a folder whose files are all there and whole.

    Raises:
        WeightsError: unreadable configuration; missing files (all are listed); a checksum that differs.
    """
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        files: dict[str, str] = dict(config["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"cannot read {folder / CONFIG}", repr(error)) from error
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
