"""From a model's name to the files of its parts. Needs no torch and no network.

`--model` takes a name of the list of known models, a Hub id, a folder of our own (`model.json`), a folder with
published checkpoints, or one weights file. Parts beside the target are found by their usual names; each can be
given on its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from lantern_hpu.errors import WeightsError, choices
from lantern_hpu.models.files.names import BUILTIN, CONFIG, PICKLES, SAFE, weights_files
from lantern_hpu.models.files.parts import OPTIONS, Given, Parts
from lantern_hpu.zoo import located, registry
from lantern_hpu.zoo.located import Located
from lantern_hpu.zoo.registry import KnownModel

# Where parts lie in a folder: the first that is there is taken.
BESIDE = {
    "drafter": ("drafter", "*drafter*"),
    "vq": ("vq", "vqvae", "vqgan.ckpt", "vq_*.pt", "vq*.safetensors", "vqvae*", "vqgan*"),
    "text": ("text", "text_encoder", "flan-t5*", "t5*"),
    "neighbours": ("neighbours", "neighbours.npy", "vq_distances", "top_*_indices.npy"),
}
# Folders of a pipeline of diffusers whose codes come from a language model (GLM-Image)
AUTOREGRESSIVE, PROCESSOR, DIFFUSION = "vision_language_encoder", "processor", "transformer"


def find_parts(model: str, given: Given = Given(), spared: tuple[str, ...] = ()) -> Parts:
    """The parts of a model, those in `given` in place of its own.

    Args:
        spared: parts that may be missing.

    Raises:
        WeightsError: nothing of that name; parts that are not here, all of them listed.
    """
    given_paths = {
        name: Path(value) for name in OPTIONS if (value := getattr(given, name)) is not None
    }
    absent = [f"{OPTIONS[name]} {path}" for name, path in given_paths.items() if not exists(path)]
    if absent:
        raise WeightsError("no such file or folder", ", ".join(absent), "check the path")
    result, wanted = parts_of(model, tuple(given_paths), spared), given.image_size
    size = result.image_size
    if wanted is not None and size not in (None, wanted):
        why = f"{model} draws {size} x {size} pixels"
        raise WeightsError(f"--image-size is {wanted}", why, "leave it out")
    result = replace(in_pipeline(result), image_size=wanted or size, spared=spared)
    return replace(result, **given_paths)  # type: ignore[arg-type]


def parts_of(model: str, given: Collection[str], spared: Collection[str] = ()) -> Parts:
    """The parts of a model where they usually lie."""
    if model == "builtin":
        return Parts("builtin", "builtin", BUILTIN)
    path = Path(model)
    if exists(path) and path.is_dir():
        return from_folder(path, given, spared)
    if exists(path):
        return Parts(path.stem, str(path.resolve()), path, **beside(path.parent, path, given))
    if model in registry.entries() or registry.sources(model):
        entry = registry.get(model)
        return known(entry, located.require_parts(entry, given=(*given, *spared)), entry.name)
    why = "neither a known name nor a file or folder"
    raise WeightsError(f"unknown model {model!r}", why, choices(["builtin", *registry.entries()]))


def in_pipeline(parts: Parts) -> Parts:
    """The parts by their own folders, where the target's is a pipeline of diffusers, which has a folder for each."""
    root = parts.target
    if not (root / AUTOREGRESSIVE).is_dir():
        return parts
    text = parts.text or root
    if (text / PROCESSOR).is_dir():
        text = text / PROCESSOR
    pixels = parts.pixels or (root if (root / DIFFUSION).is_dir() else None)
    return replace(parts, target=root / AUTOREGRESSIVE, text=text, pixels=pixels)


def exists(path: Path) -> bool:
    """Whether there is such a file or folder; a name too long for one is none."""
    try:
        return path.exists()
    except OSError:
        return False


def known(entry: KnownModel, found: Located, where: str) -> Parts:
    """The parts of a known model, wherever they are."""
    size, sampling, paths = entry.image_size, dict(entry.sampling), found.items()
    roles: dict[str, Any] = {role: path for role, path in paths if path is not None}
    return Parts(entry.name, where, **roles, image_size=size, sampling=sampling)


def from_folder(folder: Path, given: Collection[str], spared: Collection[str] = ()) -> Parts:
    """A folder of our own, or published checkpoints side by side.

    Raises:
        WeightsError: it is neither, or it is not clear which files to take.
    """
    name, result = folder.resolve().name, str(folder.resolve())
    if (folder / CONFIG).is_file():
        return Parts(name, result, folder)
    entry = located.of_folder(folder)
    if entry is not None:
        return known(entry, located.require_parts(entry, folder, (*given, *spared)), result)
    if (folder / AUTOREGRESSIVE).is_dir():
        return Parts(name, result, folder)
    target = target_in(folder)
    if target is None:
        why = f"it has neither a {CONFIG} nor weights of a target"
        inside = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
        hint = f"one of the folders in it ({', '.join(inside)})" if inside else "another folder"
        raise WeightsError(f"{folder} is not a model", why, hint)
    return Parts(name, result, target, **beside(folder, target, given))


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
    result: dict[str, Any] = {}
    for part, names in BESIDE.items():
        if part in given:
            continue
        matching = (
            [p for p in sorted(folder.glob(name)) if p != target and may_be(part, p)]
            for name in names
        )
        paths = next(filter(None, matching), [])
        if len(paths) > 1:
            # vq_ds16_t2i.pt and vq_ds16_c2i.pt may lie side by side; a target's name says which it is.
            paths = [p for p in paths if condition_kind(p) == condition_kind(target)] or paths
        if len(paths) > 1:
            why, hint = ", ".join(path.name for path in paths), f"{OPTIONS[part]} with one of them"
            raise WeightsError(f"{folder} holds several parts of one kind", why, hint)
        if paths:
            result[part] = paths[0]
    return result


def may_be(part: str, path: Path) -> bool:
    """Whether a file or folder can be a part of this kind: the log of a drafter's training is no drafter."""
    return part != "drafter" or path.is_dir() or path.suffix in (SAFE, *PICKLES)


def condition_kind(path: Path) -> str:
    """`t2i` or `c2i`, where a name has it."""
    return next((kind for kind in ("t2i", "c2i") if kind in path.name), "")
