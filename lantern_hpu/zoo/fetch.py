"""Downloads of known models from the Hugging Face Hub, by `huggingface_hub.snapshot_download`.

A file counts once it is whole and has the sha256 that our list or the Hub states. In a user's folder it is moved to its
place then; in the cache a mark says that it is still to be checked. So what an interrupted run leaves is never taken
for a model, and the next run fetches only what is missing.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType

from lantern_hpu.errors import Arg, LanternError, OutputError, WeightsError, needing, shell, words
from lantern_hpu.files import amount, clear_temporary, is_plain_path, sha256, write_file
from lantern_hpu.zoo.find import LABEL, UNCHECKED, Located, hub_cache, store
from lantern_hpu.zoo.registry import ANY, KnownModel, Part

STAGING = ".fetching"  # in a user's folder, until files are whole and checked
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # the second is not known everywhere
# Errors and packages by which the network is at fault, or was switched off (HF_HUB_OFFLINE)
UNREACHABLE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "TimeoutError"}
NETWORK = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}
LARGER = words(Arg("to"), "a folder on a larger disk, or set HF_HOME to one")


@dataclass(frozen=True)
class Listing:
    """Files of a part to fetch, as the Hub lists them at a commit.

    Attributes:
        sizes: bytes by name; 0 where the Hub states none. sha256: by name, where it is known.
    """

    part: Part
    commit: str
    sizes: dict[str, int]
    sha256: dict[str, str]


def list_files(hub: ModuleType, part: Part, absent: Sequence[str]) -> Listing:
    """The files that a part lacks, with the sizes and digests that the Hub states.

    Raises:
        WeightsError: the Hub lacks files, has others than the known ones, or its list is malformed.
    """
    info = hub.HfApi().model_info(part.repo, files_metadata=True)
    there = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    chosen = {spec: matching_names(spec, there) for spec in absent}
    names = [name for matching in chosen.values() for name in matching]
    odd = [f"the file {name!r}" for name in names if not is_plain_path(name)]
    if not re.fullmatch("[0-9a-f]{40}", str(info.sha)):
        odd.append(f"the commit {info.sha!r}")
    if odd:
        what = f"the Hub's list of {part.repo} is refused"
        raise WeightsError(what, f"it names {odd[0][:100]}", f"compare with {part.page}")
    gone = [spec for spec, matching in chosen.items() if not matching]
    if gone:
        raise WeightsError(f"{part.repo} lacks files", ", ".join(gone), part.page)
    stated = {name: getattr(there[name].lfs, "sha256", None) for name in names}
    for name, known in part.sha256.items():
        if stated.get(name) not in (None, known):
            what = f"{part.repo} has another {name} than the known one"
            raise WeightsError(what, f"its sha256 is {stated[name]} there, {known} here", part.page)
    digests = {name: part.sha256.get(name) or stated[name] for name in names}
    sizes = {name: there[name].size for name in names}
    return Listing(
        part,
        info.sha,
        {name: size if isinstance(size, int) else 0 for name, size in sizes.items()},
        {name: digest for name, digest in digests.items() if digest},
    )


def matching_names(spec: str, there: Sequence[str] | dict[str, object]) -> list[str]:
    """The listed names that a part's entry stands for: the first of `a|b`, or all that match a pattern."""
    if ANY in spec:
        return sorted(name for name in there if fnmatchcase(name, spec))
    return [name for name in spec.split("|") if name in there][:1]


def check_space(size: int, where: Path) -> None:
    """Raise an OutputError unless the disk has room for so many bytes."""
    there = next(folder for folder in (where, *where.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if size > free:
        why = f"{amount(size)} needed, {amount(free)} free"
        raise OutputError(f"not enough space for {where}", why, LARGER)


def fetch(hub: ModuleType, files: Listing, to: Path | None) -> None:
    """Download, check and put into place the files of a part."""
    part = files.part
    staging = to / STAGING / part.role if to else None
    with nullcontext() if to else marked(files):
        folder = hub.snapshot_download(
            part.repo,
            revision=files.commit,
            allow_patterns=[glob.escape(name) for name in files.sizes],
            local_dir=staging,
        )
        for name in files.sizes:
            check_sum(files, name, Path(folder) / name)
    if to is None:  # `main` is looked up later; what is asked for by a commit leaves no ref
        write_once(store(part.repo) / "refs" / "main", files.commit)
        return
    for name in files.sizes:
        place = to / part.role / name
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(Path(folder) / name, place)


def check_sum(files: Listing, name: str, file: Path) -> None:
    """Compare a file's digest with the stated one, if there is one; what killed runs left of the file is deleted."""
    if not file.is_file():
        raise WeightsError(f"{name} of {files.part.repo} did not arrive", hint="try again later")
    real = file.resolve()  # in the cache the file is a link
    for half in real.parent.glob(f"{glob.escape(real.name)}.*.incomplete"):
        half.unlink(missing_ok=True)
    expected = files.sha256.get(name)
    if expected and (got := sha256(file)) != expected:
        file.unlink()
        real.unlink(missing_ok=True)
        why = f"its sha256 is {got}, expected {expected}; it was deleted"
        raise WeightsError(f"{name} of {files.part.repo} is corrupted", why, "run it again")


def write_once(path: Path, text: str) -> None:
    """Write a small file whole, first under a random name. What a killed run left of it is deleted."""
    if not path.is_file() or path.read_text() != text:
        clear_temporary([path])
        write_file(path, text.encode(), force=True)


@contextmanager
def marked(files: Listing) -> Iterator[None]:
    """Marks in the cache while files are fetched and checked; they outlast only what leaves files unchecked."""
    root = store(files.part.repo)
    marks = {name: root / UNCHECKED / Path(name).name for name in files.sizes}
    for mark in marks.values():
        write_once(mark, "")
    checked = False
    try:
        yield
        checked = True
    finally:
        for name, mark in marks.items():
            if checked or not (root / "snapshots" / files.commit / name).exists():
                mark.unlink(missing_ok=True)
        for folder in (root / UNCHECKED, root):
            with suppress(OSError):  # not empty
                folder.rmdir()


def clean_up(folder: Path, done: bool) -> None:
    """Drop the staging folder, unless it holds files that a later run may take up; and empty folders."""
    staging = folder / STAGING
    begun = (path for path in staging.rglob("*") if path.is_file() and ".cache" not in path.parts)
    if done or not any(begun):
        shutil.rmtree(staging, ignore_errors=True)
    for empty in (staging, folder):
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()


@contextmanager
def explained(entry: KnownModel, part: Part, where: Path) -> Iterator[None]:
    """Around what can go wrong between the Hub and the disk, which is raised as errors that say what to do."""
    try:
        yield
    except LanternError:
        raise
    except Exception as error:
        known = explain_download(error, entry, part, where)
        if known is None:
            raise
        raise known from error


def explain_download(
    error: Exception, entry: KnownModel, part: Part, where: Path
) -> LanternError | None:
    """A known error in plain words. Classes go by name: not every version of huggingface_hub has them all."""
    kinds = {cls.__name__ for cls in type(error).__mro__}
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    repo, page = part.repo, part.page
    if "GatedRepoError" in kinds:
        hint = f"accept them at {page}, then `hf auth login`, or set HF_TOKEN"
        return WeightsError(f"{repo} wants its terms accepted first", "it is gated", hint)
    if kinds & {"RepositoryNotFoundError", "RevisionNotFoundError"}:
        hint = f"see {page}; for a private one `hf auth login`, or set HF_TOKEN"
        return WeightsError(f"{repo} is not on the Hub", "it was removed or is private", hint)
    if "RemoteEntryNotFoundError" in kinds:
        return WeightsError(f"a file is not in {repo}", text, f"see {page}")
    if getattr(error, "errno", None) in FULL or "No space left on device" in str(error):
        return OutputError(f"the disk is full at {where}", "no space left", LARGER)
    if kinds & UNREACHABLE or type(error).__module__.split(".")[0] in NETWORK:
        elsewhere = shell("models download", entry.handle, Arg("to", "FOLDER"))
        copied = "; copy FOLDER here and give it as"
        hint = words("with a network elsewhere:", elsewhere, copied, Arg("model"))
        return WeightsError("the Hugging Face Hub cannot be reached", text, hint)
    if "HfHubHTTPError" in kinds:
        return WeightsError(f"the Hub refused {repo}", text, "try again later")
    if isinstance(error, OSError):
        return OutputError(f"cannot write to {where}", error.strerror or text)
    if isinstance(error, RuntimeError):
        hint = "the same command again, perhaps with HF_HUB_DISABLE_XET=1"
        return WeightsError(f"{repo} could not be fetched", text, hint)
    return None


def fetch_all(entry: KnownModel, parts: Sequence[Part], located: Located, to: Path | None) -> None:
    """List, check and fetch what the parts lack."""
    with needing("huggingface_hub", "it fetches the files"):
        import huggingface_hub as hub
    where = to or hub_cache()
    listings = []
    for part in parts:
        with explained(entry, part, where):
            listings.append(list_files(hub, part, located.absent[part.role]))
    count = sum(len(files.sizes) for files in listings)
    size = sum(sum(files.sizes.values()) for files in listings)
    check_space(size, where)
    print(f"fetching {count} file{'s' * (count > 1)}, {amount(size)}, to {where}", flush=True)
    done = False
    try:
        for files in listings:
            with explained(entry, files.part, where):
                fetch(hub, files, to)
                if to is not None:  # so that the folder says which model it holds
                    write_once(to / LABEL, json.dumps({"model": entry.name}, indent=1) + "\n")
        done = True
    finally:
        if to is not None:
            clean_up(to, done)
