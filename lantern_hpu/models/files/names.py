"""What the files of a model are called, which folders hold one, and what those say of it. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from lantern_hpu.errors import WeightsError
from lantern_hpu.files import ASSETS, file_in, reading, sha256
from lantern_hpu.models.config import ModelConfig, T5Config

BUILTIN = ASSETS / "builtin"
# A folder of our own; see `folder.py`
CONFIG = "model.json"
TARGET, DRAFTER_WEIGHTS, VQ = "target.safetensors", "drafter.safetensors", "vq.safetensors"
DRAFTER = "drafter.json"  # beside the weights of a drafter that lies alone
NEIGHBOURS = "neighbours.npy"
TOKENIZER = "tokenizer.json"
# Containers of weights
SAFE = ".safetensors"
PICKLES = (".pt", ".pth", ".bin", ".ckpt")


def weights_files(folder: Path) -> list[Path]:
    """The weights files that lie directly in a folder."""
    return sorted(f for f in folder.iterdir() if f.suffix in (SAFE, *PICKLES) and f.is_file())


def how_to_renew(folder: Path) -> str:
    """How to get a model folder anew."""
    return "install the package again" if folder == BUILTIN else "convert or copy it again"


def read_config(folder: Path) -> tuple[dict[str, Any], ModelConfig]:
    """`model.json` of a folder whose files are all there, and the sizes it tells.

    Raises:
        WeightsError: unreadable, or values are missing or senseless; missing files (all are listed).
    """
    with reading(folder / CONFIG) as about:
        config = ModelConfig.from_json(about)
        if min(config.target.parameters, *config.target.grid) <= 0:
            raise ValueError("its sizes are not above 0")
        if not isinstance(about["files"], dict):
            raise ValueError("its files have no checksums")
        missing = [name for name in about["files"] if not file_in(folder, name).is_file()]
    if missing:
        hint = how_to_renew(folder)
        raise WeightsError(f"files are missing in {folder}", ", ".join(missing), hint)
    return about, config


def check_sums(folder: Path, config: dict[str, Any]) -> None:
    """Raise a WeightsError unless each file has the checksum that `model.json` has of it."""
    for name, digest in config["files"].items():
        if sha256(folder / name) != digest:
            why = "its checksum differs from the one in model.json: damaged, cut off, or another version"
            raise WeightsError(f"{folder / name} cannot be used", why, how_to_renew(folder))


def with_text(config: ModelConfig, folder: Path | None) -> ModelConfig:
    """The same with the sizes of its T5, by the T5's config.json; without them where that is not here.

    Args:
        folder: of the T5, if not the one that was noted down.

    Raises:
        WeightsError: its config.json cannot be read.
    """
    if config.condition.kind != "t5":
        return config
    if folder is not None:
        condition = replace(config.condition, text=str(folder.resolve()))
        config = replace(config, condition=condition)
    file = Path(config.condition.text or "") / "config.json"
    if not file.is_file():
        return config
    with reading(file, "download it again") as result:
        return replace(config, text=T5Config.from_json(result))
