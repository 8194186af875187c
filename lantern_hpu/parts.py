"""From a model's name to the files of its parts. Needs no torch and no network.

`--model` takes a name of the list of known models, a Hub id, a folder of our own (`model.json`), a folder with
published checkpoints, or one weights file. Parts beside the target are found by their usual names; each can be
given on its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lantern_hpu import registry
from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.hub import ASSETS, CONFIG, PICKLES, SAFE, source, weights_files
from lantern_hpu.registry import Entry, Located

CODE_PIXELS = 16  # along a code, in every published model
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

    def __post_init__(self) -> None:
        size = self.image_size
        if size is not None and (size <= 0 or size % CODE_PIXELS):
            why = f"allowed: multiples of {CODE_PIXELS}"
            raise OptionError(f"--image-size is {size}", why, "256, 384 or 512")

    def resolved(self) -> Given:
        """The same parts by paths that hold from anywhere."""
        paths = {n: str(Path(p).resolve()) for n in OPTIONS if (p := getattr(self, n)) is not None}
        return replace(self, **paths)  # type: ignore[arg-type]


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
    absent = [f"{OPTIONS[name]} {path}" for name, path in own.items() if not exists(path)]
    if absent:
        raise WeightsError("no such file or folder", ", ".join(absent), "check the path")
    found, size = find(model, tuple(own)), given.image_size
    if size is None:
        return replace(found, **own)  # type: ignore[arg-type]
    if found.image_size not in (None, size):
        why = f"{model} draws {found.image_size} x {found.image_size} pixels"
        raise WeightsError(f"--image-size is {size}", why, "leave it out")
    return replace(found, **own, image_size=size)  # type: ignore[arg-type]


def find(model: str, given: Collection[str]) -> Parts:
    """The parts of a model where they usually lie."""
    if model == "builtin":
        return Parts("builtin", "builtin", ASSETS / "builtin")
    entry = registry.find(model)
    path = Path(model)
    if entry is not None and not exists(path):
        return from_cache(entry, given)
    if exists(path) and path.is_dir():
        return from_folder(path, given)
    if exists(path):
        if path.suffix not in (SAFE, *PICKLES):
            why = f"expected {', '.join((SAFE, *PICKLES))}"
            raise WeightsError(f"{path} is not a weights file", why, "a model's weights or folder")
        return Parts(path.stem, str(path.resolve()), path, **beside(path.parent, path, given))
    if registry.sources(model):
        registry.get(model)  # says which models lie in that repository
    known = ", ".join(["builtin", *registry.entries()])
    why = "neither a known name nor a file or folder"
    raise WeightsError(f"unknown model {model!r}", why, f"one of {known}")


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; a name too long for one is none."""
    try:
        return path.exists()
    except OSError:
        return False


def known(entry: Entry, located: Located, where: str) -> Parts:
    """The parts of a known model, wherever they are."""
    target = located.paths["target"]
    assert target is not None
    own = {name: path for name, path in located.paths.items() if name != "target"}
    sampling = dict(entry.sampling)
    return Parts(entry.name, where, target, **own, image_size=entry.image_size, sampling=sampling)


def from_cache(entry: Entry, given: Collection[str]) -> Parts:
    """The parts of a known model that were downloaded.

    Raises:
        WeightsError: parts that it cannot draw without are missing; all are listed.
    """
    needed = {part.role for part in registry.missing(entry, drafting=False)}
    if needed - set(given):
        registry.require(entry, drafting=False)
    return known(entry, registry.locate(entry), entry.name)


def from_folder(folder: Path, given: Collection[str]) -> Parts:
    """A folder of our own, or published checkpoints side by side.

    Raises:
        WeightsError: it is neither, or it is not clear which files to take.
    """
    name, found = folder.resolve().name, source(folder)
    if (folder / CONFIG).is_file():
        return Parts(name, found, folder)
    entry = registry.of_folder(folder)
    if entry is not None:
        return known(entry, registry.require(entry, drafting=False, folder=folder), found)
    target = target_in(folder)
    if target is None:
        why = f"it has neither a {CONFIG} nor weights of a target"
        inside = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
        hint = f"one of the folders in it ({', '.join(inside)})" if inside else "another folder"
        raise WeightsError(f"{folder} is not a model", why, hint)
    return Parts(name, found, target, **beside(folder, target, given))


def target_in(folder: Path) -> Path | None:
    """The target's file or folder: `target/`, a Hugging Face layout, or the one file that is no other part."""
    if (folder / "target").is_dir():
        inside = weights_files(folder / "target")
        return inside[0] if len(inside) == 1 and inside[0].suffix == ".pt" else folder / "target"
    if any(folder.glob("*.index.json")) or (folder / "model.safetensors").is_file():
        return folder
    others = {path for names in BESIDE.values() for name in names for path in folder.glob(name)}
    files = [file for file in weights_files(folder) if file not in others]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise WeightsError(f"{folder} holds several models", names, f"--model {files[0]}")
    return files[0] if files else None


def beside(folder: Path, target: Path, given: Collection[str]) -> dict[str, Any]:
    """Parts that lie in a folder by their usual names, but for those that are given.

    Raises:
        WeightsError: several would do.
    """
    found: dict[str, Any] = {}
    for part, names in BESIDE.items():
        if part in given:
            continue
        paths = next((p for name in names if (p := matching(folder, name, target))), [])
        if len(paths) > 1:
            # vq_ds16_t2i.pt and vq_ds16_c2i.pt may lie side by side; a target's name says which it is.
            paths = [p for p in paths if kind(p) == kind(target)] or paths
        if len(paths) > 1:
            names_found = ", ".join(path.name for path in paths)
            hint = f"{OPTIONS[part]} with one of them"
            raise WeightsError(f"{folder} holds several parts of one kind", names_found, hint)
        if paths:
            found[part] = paths[0]
    return found


def matching(folder: Path, name: str, target: Path) -> list[Path]:
    return [path for path in sorted(folder.glob(name)) if path != target]


def kind(path: Path) -> str:
    """`t2i` or `c2i`, where a name has it."""
    return next((kind for kind in ("t2i", "c2i") if kind in path.name), "")
