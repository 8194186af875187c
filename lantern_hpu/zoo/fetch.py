"""Fetching the files of known models from the Hugging Face Hub.

A file gets its name when it is whole: huggingface_hub writes to `*.incomplete` and renames. In a user's folder files
are checked before they are moved into place; in the cache a mark says that a file is still to be checked. So what an
interrupted run leaves is never taken for a model, and the next run fetches only what is missing. Halves are resumed by
the versions of huggingface_hub that keep them; those of the others (2.4) are deleted once the file is whole.
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
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path
from textwrap import wrap
from types import ModuleType

from lantern_hpu.errors import (
    Arg,
    LanternError,
    OptionError,
    OutputError,
    WeightsError,
    choices,
    needing,
    shell,
    words,
)
from lantern_hpu.files import amount, clear_temporary, is_plain_path, sha256, write_file
from lantern_hpu.results.tables import WIDTH, aligned
from lantern_hpu.zoo.find import LABEL, UNCHECKED, Located, briefly, cached, hub_cache, store
from lantern_hpu.zoo.registry import ANY, KnownModel, Part

STAGING = ".fetching"  # in a user's folder, until files are whole and checked
COMMIT = re.compile("[0-9a-f]{40}")
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # the second is not known everywhere
# Errors and packages by which the network is at fault, or was switched off (HF_HUB_OFFLINE)
UNREACHABLE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "TimeoutError"}
NETWORK = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}
LARGER = words(Arg("to"), "a folder on a larger disk, or set HF_HOME to one")


@dataclass(frozen=True)
class File:
    """One file to fetch, as the Hub lists it at a commit."""

    part: Part
    commit: str
    name: str
    bytes: int | None
    sha256: str | None


def choose_parts(entry: KnownModel, only: str | None, drafting: bool) -> list[Part]:
    """The parts to have: those named, or all that drawing needs."""
    if only is None:
        return entry.needed(drafting)
    roles = [role.strip() for role in only.split(",") if role.strip()]
    unknown = [role for role in roles if role not in entry.parts]
    if unknown:
        what = f"{entry.name} has no part {', '.join(unknown)}"
        raise OptionError(what, hint=choices(entry.parts))
    if not roles:
        raise OptionError(words(Arg("only"), "names no part"), hint=choices(entry.parts))
    if "drafter" in roles and not drafting:
        both = Arg("only", "drafter"), "and", Arg("without_drafter", True)
        raise OptionError(words(*both, "contradict each other"))
    return [part for role, part in entry.parts.items() if role in roles]


def list_files(hub: ModuleType, part: Part, absent: Sequence[str]) -> list[File]:
    """The files that a part lacks, with the sizes and digests that the Hub states."""
    info = hub.HfApi().model_info(part.repo, files_metadata=True)
    there = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    result, gone = [], []
    for spec in absent:
        names = [name for name in spec.split("|") if name in there][:1]
        if ANY in spec:
            names = sorted(name for name in there if fnmatch(name, spec))
        gone += [] if names else [spec]
        for name in names:
            stated, known = getattr(there[name].lfs, "sha256", None), part.sha256.get(name)
            if known and stated and known != stated:
                what = f"{part.repo} has another {name} than the known one"
                raise WeightsError(what, f"its sha256 is {stated} there, {known} here", part.page)
            size = there[name].size
            size = size if isinstance(size, int) else None
            result.append(File(part, info.sha, name, size, known or stated))
    odd = [f"the file {file.name!r}" for file in result if not is_plain_path(file.name)]
    odd += [] if COMMIT.fullmatch(str(info.sha)) else [f"the commit {info.sha!r}"]
    if odd:
        what = f"the Hub's list of {part.repo} is refused"
        raise WeightsError(what, f"it names {odd[0][:100]}", f"compare with {part.page}")
    if gone:
        raise WeightsError(f"{part.repo} lacks files", ", ".join(gone), part.page)
    return result


def check_space(files: Sequence[File], where: Path) -> None:
    """Raise an OutputError unless the disk has room for all files."""
    need = sum(file.bytes or 0 for file in files)
    there = next(folder for folder in (where, *where.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        why = f"{amount(need)} needed, {amount(free)} free"
        raise OutputError(f"not enough space for {where}", why, LARGER)


def fetch(hub: ModuleType, file: File, to: Path | None) -> None:
    repo, role = file.part.repo, file.part.role
    staging = None if to is None else to / STAGING / role
    with nullcontext() if to else marked(file):
        path = Path(hub.hf_hub_download(repo, file.name, revision=file.commit, local_dir=staging))
        if to is None:  # `main` is looked up later; a file asked for by its commit leaves no ref
            write_once(store(repo) / "refs" / "main", file.commit)
            drop_halves(path)
        check_sum(file, path)
    if to is not None:
        place = to / role / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)


def write_once(path: Path, text: str) -> None:
    """Write a small file whole, first under a random name. What a killed run left of it is deleted."""
    if not path.is_file() or path.read_text() != text:
        clear_temporary([path])
        write_file(path, text.encode(), force=True)


def drop_halves(whole: Path) -> None:
    """Delete what killed runs left of a file that is whole now; the library names each try differently."""
    blob = whole.resolve()  # in the cache the file is a link
    for half in blob.parent.glob(f"{glob.escape(blob.name)}.*.incomplete"):
        half.unlink(missing_ok=True)


@contextmanager
def marked(file: File) -> Iterator[None]:
    """In the cache, a mark while a file is fetched and checked; it outlasts only what leaves the file unchecked."""
    mark = store(file.part.repo) / UNCHECKED / file.name
    write_once(mark, "")
    done = False
    try:
        yield
        done = True
    finally:
        if done or cached(file.part.repo, file.name) is None:
            mark.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                for folder in mark.parents[: len(Path(file.name).parts) + 1]:
                    folder.rmdir()


def check_sum(file: File, found: Path) -> None:
    """Compare a fetched file's digest with the stated one, if there is one."""
    if file.sha256 and (got := sha256(found)) != file.sha256:
        real = found.resolve()  # in the cache the file is a link
        found.unlink()
        real.unlink(missing_ok=True)
        what = f"{file.name} of {file.part.repo} came damaged"
        why = f"its sha256 is {got}, expected {file.sha256}; it was deleted"
        raise WeightsError(what, why, "the same command again")


def clean_up(folder: Path, done: bool) -> None:
    """Drop the staging folder, unless it holds half a file that a later run may resume; and empty folders."""
    staging = folder / STAGING
    if done or not any(staging.rglob("*.incomplete")):
        shutil.rmtree(staging, ignore_errors=True)
    for empty in (staging, folder):
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()


@contextmanager
def explain_errors(entry: KnownModel, part: Part, where: Path) -> Iterator[None]:
    """What can go wrong between the Hub and the disk, as errors that say what to do."""
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
        elsewhere = shell("download", entry.handle, Arg("to", "FOLDER"))
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


def fetch_text(entry: KnownModel, parts: Sequence[Part], located: Located) -> str:
    """What will be fetched: parts, sizes, licences, and what is here already."""
    rows = []
    for part in parts:
        here = "here already" if located[part.role] else amount(part.bytes)
        rows.append((part.role, here, part.licence, f"{part.repo}: {briefly(part.files)}"))
    lines = [f"{entry.name}: {entry.title}", *(f"  {x}" for x in aligned(rows).split("\n"))]
    note = f"note: {entry.note}" if entry.note else ""
    lines += wrap(note, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def fetch_all(entry: KnownModel, parts: Sequence[Part], located: Located, to: Path | None) -> None:
    """List, check and fetch what the parts lack."""
    with needing("huggingface_hub", "it fetches the files"):
        import huggingface_hub as hub
    where, done = to or hub_cache(), False
    files: list[File] = []
    for part in parts:
        with explain_errors(entry, part, where):
            files += list_files(hub, part, located.absent[part.role])
    check_space(files, where)
    size = amount(sum(file.bytes or 0 for file in files))
    print(f"fetching {len(files)} file{'s' * (len(files) > 1)}, {size}, to {where}", flush=True)
    try:
        for file in files:
            with explain_errors(entry, file.part, where):
                fetch(hub, file, to)
                if to is not None:  # so that the folder says which model it holds
                    label = json.dumps({"model": entry.name}, indent=1) + "\n"
                    write_once(to / LABEL, label)
        done = True
    finally:
        if to is not None:
            clean_up(to, done)
