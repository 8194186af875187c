"""The models that are known by name, as `assets/registry.json` has them. Needs no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lantern_hpu.errors import OptionError, choices
from lantern_hpu.files import ASSETS, reading
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.models.files.names import indexed_files, series_of

FILE = ASSETS / "registry.json"
PARTS = ("target", "drafter", "vq", "text", "pixels")
ANY = "*"  # in a name: all files that match, of `a/*` those of a folder
NEEDED_FOR = ("always", "drafting", "prompts", "optional")


@dataclass(frozen=True)
class Part:
    """Files of one repository of the Hub."""

    role: str  # one of `PARTS`
    repo: str
    files: tuple[str, ...]  # `a|b` is either; see `ANY`
    bytes: int | None  # of all files; None if unknown
    sha256: Mapping[str, str]  # of the files whose digest is known
    licence: str  # as the repository states it
    needed_for: str  # one of `NEEDED_FOR`
    confirmed: bool  # whether a public page names the repository and the files
    instead: tuple[Part, ...] = ()  # other repositories with the same weights
    note: str = ""

    @property
    def sources(self) -> tuple[Part, ...]:
        return (self, *self.instead)

    @property
    def page(self) -> str:
        return f"https://huggingface.co/{self.repo}"

    def absent(self, folder: Path | None, without: Collection[str] = ()) -> tuple[str, ...]:
        """The files that a folder lacks; neither a link without its file counts, nor those named `without`."""
        if folder is None:
            return self.files
        absent = []
        for spec in self.files:
            there = [file.name not in without for file in alternative_files(spec, folder)]
            if not (all(there) if ANY in spec and there else any(there)):
                absent.append(spec)
        return tuple(absent)

    def path(self, folder: Path) -> Path:
        """What a loader opens: the file where there is one, else the folder."""
        return next(alternative_files(self.files[0], folder)) if len(self.files) == 1 else folder


def alternative_files(spec: str, folder: Path) -> Iterator[Path]:
    """Those of the names `a|b` that are files in a folder; with `ANY` all that match, if no part of one is missing."""
    if ANY in spec:
        return iter(matching_files(folder / spec))
    return (folder / name for name in spec.split("|") if (folder / name).is_file())


def matching_files(pattern: Path) -> list[Path]:
    """The files of a folder that match; none if an index or a numbered file there names weights that are not."""
    folder, found = pattern.parent, sorted(pattern.parent.glob(pattern.name))
    numbered = [folder / name for file in found for name in series_of(file)]
    for index in folder.glob("[!.]*.index.json"):
        if not (folder / index.name.removesuffix(".index.json")).is_file():
            numbered += indexed_files(index).values()  # else the whole file is read
    whole = all(file.is_file() for file in numbered)
    return [file for file in found if file.is_file()] if whole else []


@dataclass(frozen=True)
class KnownModel:
    name: str
    title: str
    family: str
    licence: str
    config: ModelConfig
    sampling: Mapping[str, float]  # published: cfg_scale, temperature, top_k, top_p
    parts: Mapping[str, Part]
    note: str = ""
    # Of its target, where it was asked for by that and the name stands for another one
    repo: str = ""

    @property
    def image_size(self) -> int:
        """Pixels of a side: all that are published are square."""
        return self.config.image_size[0]

    @property
    def handle(self) -> str:
        """What commands take to find it with these parts."""
        return self.repo or self.name

    def needed(self, drafting: bool = True) -> list[Part]:
        """The parts without which it does not draw from prompts; with a drafter if it has one and is to draft."""
        kinds = ("always", "prompts", "drafting") if drafting else ("always", "prompts")
        return [part for part in self.parts.values() if part.needed_for in kinds]


@cache
def entries() -> dict[str, KnownModel]:
    """The known models by name, without `builtin`."""
    with reading(FILE, "install the package again") as data:
        result = [read_entry(values, data) for values in data["models"]]
    return {entry.name: entry for entry in result}


def read_entry(values: Mapping[str, Any], data: Mapping[str, Any]) -> KnownModel:
    """An entry as JSON holds it; parts, tokenizers and text encoders may be the names of shared ones, or null."""
    parts = {}
    for role, part in values["parts"].items():
        if part is not None:
            parts[role] = read_part(role, data["parts"][part] if isinstance(part, str) else part)
    config, shared = dict(values["config"]), data["configs"]
    for name in ("vq", "text"):
        config[name] = config[name] and shared[name][config[name]]
    return KnownModel(**{**values, "config": ModelConfig.from_json(config), "parts": parts})


def read_part(role: str, values: Mapping[str, Any]) -> Part:
    instead = tuple(read_part(role, other) for other in values.get("instead", ()))
    files, digests = tuple(values["files"]), values["sha256"] or {}
    replaced = {"role": role, "files": files, "sha256": digests, "instead": instead}
    return Part(**{**values, **replaced})


def find_model_by_name(name: str) -> KnownModel | None:
    """The model of a name, or of its target's Hub id; None if there is none, or an id stands for several.

    By the id of another repository with the same weights, the entry prefers that one. An id may be followed by a
    file: `FoundationVision/LlamaGen/c2i_B_256.pt`.
    """
    known = entries()
    if name in known:
        return known[name]
    result = sources(name)
    if len(result) != 1:
        return None
    entry, target = result[0]
    usual = entry.parts["target"]
    others = tuple(source for source in usual.sources if source is not target)
    parts = {**entry.parts, "target": replace(target, instead=others)}
    return replace(entry, parts=parts, repo="" if target is usual else target.repo)


def sources(name: str) -> list[tuple[KnownModel, Part]]:
    return [
        (entry, source)
        for entry in entries().values()
        for source in entry.parts["target"].sources
        if name in (source.repo, *(f"{source.repo}/{file}" for file in source.files))
    ]


def get(name: str, *others: str) -> KnownModel:
    """The model of a name or Hub id; `others` could have been named as well."""
    entry = find_model_by_name(name)
    if entry is not None:
        return entry
    several = [entry.name for entry, _ in sources(name)]
    if several:
        raise OptionError(f"{name} holds several models", "name the one you mean", choices(several))
    raise OptionError(
        f"unknown model {name!r}", hint=choices(["builtin", *entries(), *others], name)
    )
