"""From a model's name to the files of its parts. Needs no torch and no network.

`--model` takes a name of the list of known models, a Hub id, a folder of our own (`model.json`), a folder with
published checkpoints, or one weights file. Parts beside the target are found by their usual names; each can be
given on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lantern_hpu import registry
from lantern_hpu.errors import WeightsError
from lantern_hpu.hub import ASSETS, CONFIG, source
from lantern_hpu.registry import Entry, Located

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
# Where parts lie in a folder: the first that is there is taken.
BESIDE = {
    "drafter": ("drafter", "*drafter*"),
    "vq": ("vq", "vqvae", "vqgan.ckpt", "vq_*.pt", "vq*.safetensors", "vqvae*", "vqgan*"),
    "text": ("text", "text_encoder", "flan-t5*", "t5*"),
    "neighbours": ("neighbours", "neighbours.npy", "vq_distances", "top_*_indices.npy"),
}


@dataclass(frozen=True)
class Parts:
    """Where the parts of a model lie; None where there is none."""

    name: str
    source: str  # what `--model` takes to find it again
    target: Path  # a file, or a folder
    drafter: Path | None = None
    vq: Path | None = None
    text: Path | None = None  # text encoder, or tokenizer
    neighbours: Path | None = None
    image_size: int | None = None
    sampling: dict[str, Any] | None = None


@dataclass(frozen=True)
class Given:
    """Parts that the user named on their own."""

    drafter: str | None = None
    vq: str | None = None
    text: str | None = None
    neighbours: str | None = None
    image_size: int | None = None


OPTIONS = {
    "drafter": "--drafter",
    "vq": "--vq",
    "text": "--text-encoder",
    "neighbours": "--neighbours",
}


def resolve(model: str, given: Given = Given()) -> Parts:
    """The parts of a model, those in `given` in place of its own.

    Raises:
        WeightsError: nothing of that name; parts that are not here, all of them listed.
    """
    own = {name: Path(value) for name in OPTIONS if (value := getattr(given, name)) is not None}
    absent = [f"{OPTIONS[name]} {path}" for name, path in own.items() if not path.exists()]
    if absent:
        raise WeightsError("no such file or folder", ", ".join(absent))
    found = find(model, tuple(own))
    size = given.image_size
    if size is not None and found.image_size not in (None, size):
        why = f"{model} draws {found.image_size} x {found.image_size} pixels"
        raise WeightsError(f"--image-size is {size}", why)
    return replace(found, **own, image_size=size or found.image_size)  # type: ignore[arg-type]


def find(model: str, given: tuple[str, ...]) -> Parts:
    """The parts of a model where they usually lie."""
    if model == "builtin":
        return Parts("builtin", "builtin", ASSETS / "builtin")
    entry = registry.find(model)
    path = Path(model)
    if entry is not None and not path.exists():
        return from_cache(entry, given)
    if path.is_dir():
        return from_folder(path)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise WeightsError(f"{path} is not a weights file", f"expected {', '.join(SUFFIXES)}")
        return Parts(path.stem, str(path.resolve()), path, **beside(path.parent, path))
    known = ", ".join(["builtin", *registry.entries()])
    why = "neither a known name nor a file or folder"
    raise WeightsError(f"unknown model {model!r}", why, f"one of {known}")


def known(entry: Entry, located: Located, where: str) -> Parts:
    """The parts of a known model, wherever they are."""
    target = located.paths["target"]
    assert target is not None
    own = {name: path for name, path in located.paths.items() if name != "target"}
    sampling = dict(entry.sampling)
    return Parts(entry.name, where, target, **own, image_size=entry.image_size, sampling=sampling)


def from_cache(entry: Entry, given: tuple[str, ...]) -> Parts:
    """The parts of a known model that were downloaded.

    Raises:
        WeightsError: parts that it cannot draw without are missing; all are listed.
    """
    needed = {part.role for part in registry.missing(entry, drafting=False)}
    if needed - set(given):
        registry.require(entry, drafting=False)
    return known(entry, registry.locate(entry), entry.name)


def from_folder(folder: Path) -> Parts:
    """A folder of our own, or published checkpoints side by side."""
    name, found = folder.resolve().name, source(folder)
    if (folder / CONFIG).is_file():
        return Parts(name, found, folder)
    entry = registry.of_folder(folder)
    if entry is not None:
        return known(entry, registry.require(entry, drafting=False, folder=folder), found)
    target = target_in(folder)
    if target is None:
        why = f"it has neither a {CONFIG} nor weights of a target"
        raise WeightsError(f"{folder} is not a model", why)
    return Parts(name, found, target, **beside(folder, target))


def target_in(folder: Path) -> Path | None:
    """The target's file or folder: `target/`, a Hugging Face layout, or the one file that is no other part."""
    if (folder / "target").is_dir():
        inside = weights_in(folder / "target")
        return inside[0] if len(inside) == 1 and inside[0].suffix == ".pt" else folder / "target"
    if any(folder.glob("*.index.json")) or (folder / "model.safetensors").is_file():
        return folder
    others = {path for names in BESIDE.values() for name in names for path in folder.glob(name)}
    files = [file for file in weights_in(folder) if file not in others]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise WeightsError(f"{folder} holds several models", names, f"--model {files[0]}")
    return files[0] if files else None


def weights_in(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.suffix in SUFFIXES and f.is_file())


def beside(folder: Path, target: Path) -> dict[str, Any]:
    """Parts that lie in a folder by their usual names."""
    found: dict[str, Any] = {}
    for part, names in BESIDE.items():
        paths = [p for name in names for p in sorted(folder.glob(name)) if p != target]
        if paths:
            found[part] = paths[0]
    return found
