"""From a model's name to the files of its parts. Needs no torch and no network: huggingface_hub looks into its cache.

`model` takes a name of the list of known models, a Hub id, a folder of our own (`model.json`), a folder with
published checkpoints, or one weights file. Parts next to the target are found by their usual names; each can be
given by an option.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from lantern_hpu.errors import Arg, WeightsError, as_option, choices, joined, shell, words
from lantern_hpu.files import amount, reading
from lantern_hpu.models.files.names import (
    ARGUMENTS,
    BUILTIN,
    CONFIG,
    PartOverrides,
    Parts,
    check_folder,
    given_path,
    is_weights,
    series_of,
    weights_files,
)
from lantern_hpu.zoo import registry
from lantern_hpu.zoo.registry import ANY, KnownModel, Part, entries

LABEL = "lantern.json"  # in a folder that `models download` filled
UNCHECKED = ".lantern-unchecked"  # next to a repository's files in the cache: see `unchecked`
# Names of parts in a folder; the first that is there is taken
USUAL_NAMES = {
    "drafter": ("drafter", "*drafter*"),
    "vq": (
        "vq",
        "vqvae",
        "vqgan.ckpt",
        "decoder.jit",
        "*VisionTokenizer",
        "movqgan*.ckpt",
        "vq_*.pt",
        "vq*.safetensors",
        "vqvae*",
        "vqgan*",
        "vq*.*",
    ),
    "text": ("text", "text_encoder", "flan-t5*", "t5*"),
}
# Folders of a pipeline of diffusers whose codes come from a language model (GLM-Image)
AUTOREGRESSIVE, PROCESSOR, DIFFUSION = "vision_language_encoder", "processor", "transformer"


class Located(dict[str, Path | None]):
    """Where the parts of a model are, by role: in a folder with a subfolder for each, or in the Hugging Face cache.

    A file, else the folder with its files; None if some are missing: `absent` has those. A part counts only when all
    its files are there, whole (huggingface_hub names a file when it is) and checked.
    """

    def __init__(self, entry: KnownModel, folder: Path | None = None) -> None:
        super().__init__()
        self.entry, self.absent = entry, dict[str, tuple[str, ...]]()
        for role, part in entry.parts.items():
            found = [look(source, folder) for source in part.sources]
            self[role] = next((path for path, _ in found if path), None)
            if self[role] is None:
                self.absent[role] = found[0][1]

    def missing(self, drafting: bool = True) -> list[Part]:
        """The parts that are needed and not all here."""
        return [part for part in self.entry.needed(drafting) if self[part.role] is None]


def hub_cache() -> Path:
    """The Hugging Face cache; `huggingface_hub` must be installed."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def store(repo: str) -> Path:
    """The cache's folder of a repository; `huggingface_hub` must be installed."""
    from huggingface_hub.file_download import repo_folder_name

    return hub_cache() / repo_folder_name(repo_id=repo, repo_type="model")


def cached(repo: str, name: str) -> Path | None:
    """A file of a repository's main version in the Hugging Face cache; without `huggingface_hub` there is none."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    file = try_to_load_from_cache(repo, name)
    return Path(file) if isinstance(file, str) else None


def cached_folder(part: Part) -> Path | None:
    """The cache's folder with the files of a part, or None where not one of them is there."""
    names = (name for spec in part.files for name in spec.split("|"))
    for name in (name for name in names if ANY not in name):
        if file := cached(part.repo, name):
            return file.parents[len(Path(name).parts) - 1]
    return None


def unchecked(repo: str) -> set[str]:
    """Files in the cache that were fetched, but whose checksums were not compared: that was interrupted."""
    marks = store(repo) / UNCHECKED
    return {mark.name for mark in marks.iterdir()} if marks.is_dir() else set()


def of_folder(folder: Path) -> KnownModel | None:
    """The model that `models download` put into a folder, or None."""
    file = folder / LABEL
    if not file.is_file():
        return None
    with reading(file) as label:
        name = str(label["model"])
    entry = entries().get(name)
    if entry is None:
        raise WeightsError(f"{folder} holds {name!r}", "which this version does not know")
    return entry


def look(part: Part, folder: Path | None) -> tuple[Path | None, tuple[str, ...]]:
    """Where a part is, or None and the files that are missing."""
    place = folder / part.role if folder else cached_folder(part)
    absent = part.absent(place, unchecked(part.repo) if place and not folder else ())
    return (part.path(place) if place and not absent else None), absent


def require_parts(
    entry: KnownModel, folder: Path | None = None, given: Collection[str] = ()
) -> Located:
    """Where the parts are, if those that drawing without a drafter needs are here, or given in their place."""
    located = Located(entry, folder)
    lacking = [part for part in located.missing(drafting=False) if part.role not in given]
    if not lacking:
        return located
    said = "; ".join(
        f"{p.role} {amount(p.bytes)} ({briefly(located.absent[p.role])} of {p.repo})"
        for p in lacking
    )
    where = f"in {folder}" if folder else "on this machine"
    to = [Arg("to", folder)] if folder else []
    hint = shell("models download", entry.handle, *to)
    if "drafter" in located.absent:
        less = amount(entry.parts["drafter"].bytes)
        fewer = as_option(Arg("without_drafter", True))
        hint += f"; {fewer} saves {less} and is enough for ar and for windows"
    raise WeightsError(f"{entry.handle} is not all {where}", "missing: " + said, hint)


def briefly(files: tuple[str, ...]) -> str:
    """Names of files, or how many they are."""
    return ", ".join(files) if len(files) <= 2 else f"{len(files)} files"


def draw_command(entry: KnownModel, folder: Path | None = None) -> str:
    classes = entry.family == "llamagen-c2i"
    what = Arg("prompt", "goldfish") if classes else Arg("prompt", "a red apple")
    model = Arg("model", folder or entry.handle)
    result = entry.config.result
    made = [] if result.name == "output" else [result]
    return joined(["python -m lantern_hpu.generate", model, what, *made], as_option)


def find_parts(
    model: str, given: PartOverrides = PartOverrides(), optional: tuple[str, ...] = ()
) -> Parts:
    """The parts of a model, those in `given` in place of its own; those in `optional` may be missing."""
    given_paths = given.paths()
    absent = [
        Arg(ARGUMENTS[name], str(path))
        for name, path in given_paths.items()
        if not os.path.exists(path)
    ]
    if absent:
        raise WeightsError("no such file or folder", words(*absent), "check the path")
    result, wanted = parts_of(model, tuple(given_paths), optional), given.image_size
    size = result.image_size
    if wanted is not None and size not in (None, wanted):
        why = f"{model} draws {size} x {size} pixels"
        raise WeightsError(words(Arg("image_size"), f"is {wanted}"), why, "leave it out")
    result = replace(in_pipeline(result), image_size=wanted or size, optional=optional)
    return replace(result, **given_paths)  # type: ignore[arg-type]


def parts_of(model: str, given: Collection[str], optional: Collection[str] = ()) -> Parts:
    """The parts of a model at their usual places."""
    if model == "builtin":
        return Parts("builtin", "builtin", BUILTIN)
    path = given_path(model)
    if os.path.isdir(path):  # a name too long for a file is none
        return from_folder(path, given, optional)
    if os.path.exists(path):
        return Parts(path.stem, os.path.abspath(path), path, **parts_in(path.parent, path, given))
    if model in registry.entries() or registry.sources(model):
        entry = registry.get(model)
        return known(entry, require_parts(entry, given=(*given, *optional)), entry.name)
    why = "neither a known name nor a file or folder"
    known_names = ["builtin", *registry.entries()]
    raise WeightsError(f"unknown model {model!r}", why, choices(known_names, model))


def in_pipeline(parts: Parts) -> Parts:
    """The parts by their own folders, where the target's folder is a pipeline of diffusers."""
    root = parts.target
    if not (root / AUTOREGRESSIVE).is_dir():
        return parts
    text = parts.text or root
    if (text / PROCESSOR).is_dir():
        text = text / PROCESSOR
    pixels = parts.pixels or (root if (root / DIFFUSION).is_dir() else None)
    return replace(parts, target=root / AUTOREGRESSIVE, text=text, pixels=pixels)


def known(entry: KnownModel, found: Located, where: str) -> Parts:
    size, sampling, paths = entry.image_size, dict(entry.sampling), found.items()
    roles: dict[str, Any] = {role: path for role, path in paths if path is not None}
    return Parts(entry.name, where, **roles, image_size=size, sampling=sampling)


def from_folder(folder: Path, given: Collection[str], optional: Collection[str] = ()) -> Parts:
    """A folder of our own, or published checkpoints side by side."""
    result = os.path.abspath(folder)
    # A version of a repository in the Hub's cache is called as the repository
    name = re.sub(r".*--([^/]+)/snapshots/[^/]+$|.*/", r"\1", folder.resolve().as_posix())
    if (folder / CONFIG).is_file():
        return Parts(name, result, folder)
    entry = of_folder(folder)
    if entry is not None:
        return known(entry, require_parts(entry, folder, (*given, *optional)), result)
    if (folder / AUTOREGRESSIVE).is_dir():
        return Parts(name, result, folder)
    target = target_in(folder)
    if target is None:
        check_folder(folder)
        why = f"it has neither a {CONFIG} nor weights of a target"
        inside = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
        hint = f"one of the folders in it ({', '.join(inside)})" if inside else "another folder"
        raise WeightsError(f"{folder} is not a model", why, hint)
    return Parts(name, result, target, **parts_in(folder, target, given))


def target_in(folder: Path) -> Path | None:
    """The target's file or folder: `target/`, a Hugging Face layout, or the one file that is no other part."""
    if (folder / "target").is_dir():
        inside = weights_files(folder / "target")
        return inside[0] if len(inside) == 1 and inside[0].suffix == ".pt" else folder / "target"
    if any(folder.glob("[!.]*.index.json")) or (folder / "model.safetensors").is_file():
        return folder
    usual = [name for names in USUAL_NAMES.values() for name in names]
    others = {path for name in usual for path in folder.glob(name)}
    left = [file for file in weights_files(folder) if file not in others]
    files = [*{tuple(series_of(file)) or file: file for file in left}.values()]  # one of a series
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise WeightsError(f"{folder} holds several models", names, Arg("model", str(files[0])))
    return files[0] if files else None


def parts_in(folder: Path, target: Path, given: Collection[str]) -> dict[str, Any]:
    """Parts in a folder by their usual names, but for those that are given."""
    result: dict[str, Any] = {}
    for part, names in USUAL_NAMES.items():
        if part in given:
            continue
        matching = (
            [p for p in sorted(folder.glob(name)) if p != target and may_be(part, p)]
            for name in names
        )
        paths = next(filter(None, matching), [])
        if len(paths) > 1:  # vq_ds16_t2i.pt and vq_ds16_c2i.pt: a target's name says which it is
            paths = [p for p in paths if condition_kind(p) == condition_kind(target)] or paths
        if len(paths) > 1:
            why = ", ".join(path.name for path in paths)
            hint = words(Arg(ARGUMENTS[part]), "with one of them")
            raise WeightsError(f"{folder} holds several parts of one kind", why, hint)
        if paths:
            result[part] = paths[0]
    return result


def may_be(part: str, path: Path) -> bool:
    """Whether a file or folder can be a part of this kind: the log of a drafter's training is not one."""
    return part not in ("drafter", "vq") or path.is_dir() or is_weights(path)


def condition_kind(path: Path) -> str:
    """`t2i` or `c2i`, where a name has it."""
    return next((kind for kind in ("t2i", "c2i") if kind in path.name), "")
