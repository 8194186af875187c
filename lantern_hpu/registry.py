"""Models that can be had by name: what they are made of, where the files lie, and which are here. Needs no torch.

`assets/registry.json` has the facts. Where the files are is read from the Hugging Face cache as its documentation
describes it ("Understand caching"), so nothing is imported and no network is asked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lantern_hpu.errors import OptionError, WeightsError, choices
from lantern_hpu.hub import ASSETS, reading

FILE = ASSETS / "registry.json"
PARTS = ("target", "drafter", "vq", "text", "neighbours")
NEEDED_FOR = ("always", "drafting", "prompts", "optional")
FAMILIES = ("llamagen-t2i", "llamagen-c2i", "chameleon")
LABEL = "lantern.json"  # in a folder that `lantern_hpu.download --to` filled
UNCHECKED = ".lantern-unchecked"  # beside a repository's files in the cache: see `unchecked`


@dataclass(frozen=True)
class Part:
    """Files of one repository of the Hub.

    Attributes:
        role: one of `PARTS`.
        files: names; `a|b` is either.
        bytes: of all files together, as the Hub shows it or counted from the parameters; None if unknown.
        sha256: digests of the files whose digest is known.
        licence: as the repository states it.
        needed_for: one of `NEEDED_FOR`.
        confirmed: whether a public page names the repository and the files.
        instead: other repositories with the same weights.
    """

    role: str
    repo: str
    files: tuple[str, ...]
    bytes: int | None
    sha256: Mapping[str, str]
    licence: str
    needed_for: str
    confirmed: bool
    instead: tuple[Part, ...] = ()
    note: str = ""

    @property
    def sources(self) -> tuple[Part, ...]:
        """The part itself, then those that do as well."""
        return (self, *self.instead)

    @property
    def page(self) -> str:
        return f"https://huggingface.co/{self.repo}"

    def absent(self, folder: Path | None, without: Collection[str] = ()) -> tuple[str, ...]:
        """The files that a folder lacks. A link without its file does not count as one.

        Args:
            without: names of files that do not count either.
        """
        if folder is None:
            return self.files
        return tuple(
            spec
            for spec in self.files
            if not any(file.name not in without for file in either(spec, folder))
        )

    def path(self, folder: Path) -> Path:
        """What a loader opens: the file where there is one, else the folder."""
        return next(either(self.files[0], folder)) if len(self.files) == 1 else folder


def either(spec: str, folder: Path) -> Iterator[Path]:
    """Those of the names `a|b` that are files in a folder."""
    return (folder / name for name in spec.split("|") if (folder / name).is_file())


@dataclass(frozen=True)
class Geometry:
    """Sizes of a model, for counting parameters and bytes.

    Attributes:
        vocab: rows of the head in use. embed_rows: rows of the embedding.
        caption_dim: width of caption features, 0 without. classes: rows of the class table, 0 without.
        drafter: layers, embed_rows, input_norm, qk_norm; None where there is none.
        vq_channels: of the image decoder at full resolution.
        text_parameters: of the text encoder, 0 without. text_float32: those that float16 leaves in float32.
        kv_heads: of keys and values; None: as many as heads.
    """

    layers: int
    dim: int
    heads: int
    head_dim: int
    ffn_dim: int
    vocab: int
    embed_rows: int
    prefix: int
    grid: tuple[int, int]
    image_size: int
    vq_parameters: int
    vq_channels: int
    text_parameters: int = 0
    text_float32: int = 0
    caption_dim: int = 0
    classes: int = 0
    qk_norm: bool = False
    drafter: Mapping[str, Any] | None = None
    kv_heads: int | None = None

    @property
    def tokens(self) -> int:
        """N, image tokens of one image."""
        return self.grid[0] * self.grid[1]

    @property
    def width(self) -> int:
        """Of all heads' queries together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Of all heads' keys together."""
        return (self.kv_heads or self.heads) * self.head_dim

    @property
    def block_matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of one layer's: queries to values, what mixes the heads, SwiGLU."""
        return (
            (self.width + 2 * self.kv_width, self.dim),
            (self.dim, self.width),
            (2 * self.ffn_dim, self.dim),
            (self.dim, self.ffn_dim),
        )

    def block_parameters(self, qk_norm: bool, input_norm: bool = True) -> int:
        """Attention, SwiGLU and norms of one layer."""
        matrices = sum(rows * columns for rows, columns in self.block_matrices)
        norms = 2 * (self.width + self.kv_width) if qk_norm else 0
        return matrices + (1 + input_norm) * self.dim + norms

    @property
    def condition_parameters(self) -> int:
        """The caption projection with the features of "no caption", or the class table."""
        caption = (self.prefix + self.dim) * self.caption_dim + self.dim**2
        return (caption if self.caption_dim else 0) + self.classes * self.dim

    @property
    def target_parameters(self) -> int:
        """Embedding, blocks, final norm, the head's rows in use, condition."""
        tables = (self.embed_rows + self.vocab) * self.dim
        blocks = self.layers * self.block_parameters(self.qk_norm)
        return tables + blocks + self.dim + self.condition_parameters

    @property
    def drafter_parameters(self) -> int:
        """Embedding, fc over [embedding, feature] with bias, blocks; 0 without a drafter."""
        if self.drafter is None:
            return 0
        block = self.block_parameters(self.drafter["qk_norm"], self.drafter["input_norm"])
        fc = 2 * self.dim**2 + self.dim
        return self.drafter["embed_rows"] * self.dim + fc + self.drafter["layers"] * block


@dataclass(frozen=True)
class Entry:
    """One known model.

    Attributes:
        sampling: published settings: cfg_scale, temperature, top_k, top_p.
        parts: those of `PARTS` that it has.
        repo: of its target, where it was asked for by that and the name stands for another one.
    """

    name: str
    title: str
    family: str
    image_size: int
    grid: tuple[int, int]
    prefix: int
    licence: str
    geometry: Geometry
    sampling: Mapping[str, float]
    parts: Mapping[str, Part]
    note: str = ""
    repo: str = ""

    @property
    def handle(self) -> str:
        """What commands take to find it with these parts."""
        return self.repo or self.name

    def needed(self, drafting: bool = True) -> list[Part]:
        """The parts without which it does not draw from prompts; with a drafter if it has one and is to draft."""
        kinds = ("always", "prompts", "drafting") if drafting else ("always", "prompts")
        return [part for part in self.parts.values() if part.needed_for in kinds]


class Located(Mapping[str, Path | None]):
    """Where an entry's parts are on this machine, by role.

    A part's file where it has one, else the folder with its files; None if not all of them are there. `absent` has
    the missing files of each such part.
    """

    def __init__(
        self, entry: Entry, paths: Mapping[str, Path | None], absent: Mapping[str, tuple[str, ...]]
    ) -> None:
        self.entry, self.paths, self.absent = entry, paths, absent

    def __getitem__(self, role: str) -> Path | None:
        return self.paths[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def missing(self, drafting: bool = True) -> list[Part]:
        """The parts that are needed and not all here."""
        return [part for part in self.entry.needed(drafting) if self[part.role] is None]


@cache
def entries() -> dict[str, Entry]:
    """The known models by name, without `builtin`.

    Raises:
        WeightsError: the file with the facts is unreadable.
    """
    with reading(FILE, "install the package again") as data:
        found = [read_entry(values, data["parts"]) for values in data["models"]]
    return {entry.name: entry for entry in found}


def usual_sampling(family: str) -> dict[str, Any]:
    """Published settings of a family, which its known models share."""
    return next(dict(entry.sampling) for entry in entries().values() if entry.family == family)


def read_entry(values: Mapping[str, Any], shared: Mapping[str, Any]) -> Entry:
    """An entry as JSON holds it; a part may be the name of a shared one, or null."""
    parts = {}
    for role, part in values["parts"].items():
        if part is not None:
            parts[role] = read_part(role, shared[part] if isinstance(part, str) else part)
    grid = (int(values["grid"][0]), int(values["grid"][1]))
    plain = {key: values[key] for key in ("name", "title", "family", "image_size", "prefix")}
    return Entry(
        **plain,
        grid=grid,
        licence=values["licence"],
        geometry=read_geometry(values, grid),
        sampling=values["sampling"],
        parts=parts,
        note=values.get("note", ""),
    )


def read_geometry(values: Mapping[str, Any], grid: tuple[int, int]) -> Geometry:
    sizes = dict(values["geometry"])
    vq = sizes.pop("vq")
    return Geometry(
        **sizes,
        prefix=values["prefix"],
        grid=grid,
        image_size=values["image_size"],
        vq_parameters=vq["parameters"],
        vq_channels=vq["channels"],
    )


def read_part(role: str, values: Mapping[str, Any]) -> Part:
    instead = tuple(read_part(role, other) for other in values.get("instead", ()))
    given = {**values, "files": tuple(values["files"]), "sha256": values["sha256"] or {}}
    return Part(**{**given, "role": role, "instead": instead})


def find(name: str) -> Entry | None:
    """The model of a name, or of its target's Hub id; None if there is none, or an id stands for several.

    By the id of another repository with the same weights, the entry prefers that one. An id may be followed by a
    file: `FoundationVision/LlamaGen/c2i_B_256.pt`.
    """
    known = entries()
    if name in known:
        return known[name]
    found = sources(name)
    if len(found) != 1:
        return None
    entry, target = found[0]
    usual = entry.parts["target"]
    others = tuple(source for source in usual.sources if source is not target)
    parts = {**entry.parts, "target": replace(target, instead=others)}
    return replace(entry, parts=parts, repo="" if target is usual else target.repo)


def sources(name: str) -> list[tuple[Entry, Part]]:
    """The models whose target lies in a repository, or is one of its files."""
    return [
        (entry, source)
        for entry in entries().values()
        for source in entry.parts["target"].sources
        if name in (source.repo, *(f"{source.repo}/{file}" for file in source.files))
    ]


def get(name: str) -> Entry:
    """The model of a name or Hub id.

    Raises:
        OptionError: there is none, or several lie in that repository; the error lists what there is.
    """
    entry = find(name)
    if entry is not None:
        return entry
    several = [entry.name for entry, _ in sources(name)]
    if several:
        raise OptionError(f"{name} holds several models", "name the one you mean", choices(several))
    raise OptionError(f"unknown model {name!r}", hint=choices(entries()))


def cache_folder() -> Path:
    """The Hugging Face cache; the variables and their order are those of huggingface_hub."""
    home = os.environ.get("XDG_CACHE_HOME", os.path.join("~", ".cache"))
    home = os.environ.get("HF_HOME", os.path.join(home, "huggingface"))
    hub = os.environ.get("HUGGINGFACE_HUB_CACHE", os.path.join(home, "hub"))
    hub = os.environ.get("HF_HUB_CACHE", hub)
    return Path(os.path.expandvars(os.path.expanduser(hub)))


def store(repo: str) -> Path:
    """The cache's folder of a repository."""
    return cache_folder() / f"models--{repo.replace('/', '--')}"


def snapshot(repo: str) -> Path | None:
    """The cache's folder of a repository's main version, or None."""
    try:
        revision = (store(repo) / "refs" / "main").read_text().strip()
    except OSError:
        return None
    folder = store(repo) / "snapshots" / revision
    return folder if revision and folder.is_dir() else None


def unchecked(repo: str) -> set[str]:
    """Files in the cache that were fetched, but whose checksums were not compared: that was interrupted."""
    marks = store(repo) / UNCHECKED
    return {mark.name for mark in marks.iterdir()} if marks.is_dir() else set()


def of_folder(folder: Path) -> Entry | None:
    """The model that `lantern_hpu.download --to` put into a folder, or None.

    Raises:
        WeightsError: its label is unreadable, or names a model that is not known here.
    """
    file = folder / LABEL
    if not file.is_file():
        return None
    with reading(file) as label:
        name = str(label["model"])
    entry = entries().get(name)
    if entry is None:
        raise WeightsError(f"{folder} holds {name!r}", "which this version does not know")
    return entry


def locate(entry: Entry, folder: Path | None = None) -> Located:
    """Where the parts of a model are: in a folder with a subfolder for each, or in the Hugging Face cache.

    A part counts only when all its files are there. huggingface_hub gives a file its name when it is whole, so
    what an interrupted download leaves is not taken for one; nor is a file that is still to be checked.
    """
    paths: dict[str, Path | None] = {}
    absent: dict[str, tuple[str, ...]] = {}
    for role, part in entry.parts.items():
        found = [look(source, folder) for source in part.sources]
        paths[role] = next((path for path, _ in found if path), None)
        if paths[role] is None:
            absent[role] = found[0][1]
    return Located(entry, paths, absent)


def look(part: Part, folder: Path | None) -> tuple[Path | None, tuple[str, ...]]:
    """Where a part is, or None and the files that lack."""
    place = folder / part.role if folder else snapshot(part.repo)
    absent = part.absent(place, () if folder else unchecked(part.repo))
    return (part.path(place) if place and not absent else None), absent


def missing(entry: Entry, drafting: bool = True, folder: Path | None = None) -> list[Part]:
    """The parts that drawing from prompts needs and that are not all here."""
    return locate(entry, folder).missing(drafting)


def require(entry: Entry, drafting: bool = True, folder: Path | None = None) -> Located:
    """Where the parts are, if all that are needed are here.

    Raises:
        WeightsError: some are not; the error lists all of their missing files, with sizes and how to get them.
    """
    located = locate(entry, folder)
    lacking = located.missing(drafting)
    if not lacking:
        return located
    said = [
        f"{p.role} {size(p.bytes)} ({briefly(located.absent[p.role])} of {p.repo})" for p in lacking
    ]
    where = f"in {folder}" if folder else "on this machine"
    hint = f"python -m lantern_hpu.download {entry.handle}" + (f" --to {folder}" if folder else "")
    if "drafter" in entry.parts and located["drafter"] is None and not drafting:
        less = size(entry.parts["drafter"].bytes)
        hint += f"; --without-drafter is {less} less and enough for --method ar"
    raise WeightsError(f"{entry.handle} is not all {where}", "missing: " + "; ".join(said), hint)


def briefly(files: tuple[str, ...]) -> str:
    """Names of files, or how many they are."""
    return ", ".join(files) if len(files) <= 2 else f"{len(files)} files"


def size(count: int | None) -> str:
    """Bytes in words; the Hub counts a thousand to the kilo, and so does this."""
    if count is None:
        return "size unknown"
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            number = count / unit
            digits = 2 if number < 10 else 1 if number < 100 else 0
            return f"{number:.{digits}f} {name}"
    return f"{count} bytes"


def draw_command(entry: Entry, folder: Path | None = None) -> str:
    """The command that draws with a model."""
    classes = entry.family == "llamagen-c2i"
    what = "--class-label goldfish" if classes else '--prompt "a red apple"'
    return f"python -m lantern_hpu.generate --model {folder or entry.handle} {what}"
