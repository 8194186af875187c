"""Which parts of the known models are on this machine, and how to get those that are not. Needs no torch.

No network is asked: `huggingface_hub` looks into its cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from lantern_hpu.errors import WeightsError
from lantern_hpu.files import reading
from lantern_hpu.results.tables import amount
from lantern_hpu.zoo.registry import FOLDER, KnownModel, Part, entries

LABEL = "lantern.json"  # in a folder that `lantern_hpu.commands.download --to` filled
UNCHECKED = ".lantern-unchecked"  # beside a repository's files in the cache: see `unchecked`


class Located(dict[str, Path | None]):
    """Where an entry's parts are on this machine, by role.

    A part's file where it has one, else the folder with its files; None if not all of them are there. `absent` has
    the missing files of each such part.
    """

    def __init__(
        self,
        entry: KnownModel,
        paths: Mapping[str, Path | None],
        absent: Mapping[str, tuple[str, ...]],
    ) -> None:
        super().__init__(paths)
        self.entry, self.absent = entry, absent

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
    for name in (name for name in names if not name.endswith(FOLDER)):
        if file := cached(part.repo, name):
            return file.parents[len(Path(name).parts) - 1]
    return None


def unchecked(repo: str) -> set[str]:
    """Files in the cache that were fetched, but whose checksums were not compared: that was interrupted."""
    marks = store(repo) / UNCHECKED
    return {mark.name for mark in marks.rglob("*") if mark.is_file()} if marks.is_dir() else set()


def of_folder(folder: Path) -> KnownModel | None:
    """The model that `lantern_hpu.commands.download --to` put into a folder, or None.

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


def locate_model(entry: KnownModel, folder: Path | None = None) -> Located:
    """Where the parts of a model are: in a folder with a subfolder for each, or in the Hugging Face cache.

    A part counts only when all its files are there. huggingface_hub gives a file its name when it is whole, so
    what an interrupted download leaves is not taken for one; nor is a file that is still to be checked.
    """
    paths: dict[str, Path | None] = {}
    absent: dict[str, tuple[str, ...]] = {}
    for role, part in entry.parts.items():
        result = [look(source, folder) for source in part.sources]
        paths[role] = next((path for path, _ in result if path), None)
        if paths[role] is None:
            absent[role] = result[0][1]
    return Located(entry, paths, absent)


def look(part: Part, folder: Path | None) -> tuple[Path | None, tuple[str, ...]]:
    """Where a part is, or None and the files that lack."""
    place = folder / part.role if folder else cached_folder(part)
    absent = part.absent(place, unchecked(part.repo) if place and not folder else ())
    return (part.path(place) if place and not absent else None), absent


def require_parts(
    entry: KnownModel, folder: Path | None = None, given: Collection[str] = ()
) -> Located:
    """Where the parts are, if all that drawing without a drafter needs are here, or given in their place.

    Raises:
        WeightsError: some are not; the error lists all of their missing files, with sizes and how to get them.
    """
    located = locate_model(entry, folder)
    lacking = [part for part in located.missing(drafting=False) if part.role not in given]
    if not lacking:
        return located
    said = "; ".join(
        f"{p.role} {amount(p.bytes)} ({briefly(located.absent[p.role])} of {p.repo})"
        for p in lacking
    )
    where = f"in {folder}" if folder else "on this machine"
    hint = f"lantern-hpu download {entry.handle}" + (f" --to {folder}" if folder else "")
    if "drafter" in located.absent:
        less = amount(entry.parts["drafter"].bytes)
        hint += f"; --without-drafter saves {less} and is enough for ar and for windows"
    raise WeightsError(f"{entry.handle} is not all {where}", "missing: " + said, hint)


def briefly(files: tuple[str, ...]) -> str:
    """Names of files, or how many they are."""
    return ", ".join(files) if len(files) <= 2 else f"{len(files)} files"


def draw_command(entry: KnownModel, folder: Path | None = None) -> str:
    """The command that draws with a model."""
    classes = entry.family == "llamagen-c2i"
    what = "--class-label goldfish" if classes else '--prompt "a red apple"'
    return f"python -m lantern_hpu.generate --model {folder or entry.handle} {what}"
