"""Fetch the files of a known model from the Hugging Face Hub.

    python -m lantern_hpu.download llamagen-t2i-256
    python -m lantern_hpu.download llamagen-t2i-256 --to /models/llamagen   # for a machine without network

What is here already is not fetched again. A file gets its name when it is whole: huggingface_hub writes to a name
that ends in `.incomplete` and renames it. With `--to` files are checked before they are moved to their place; in the
cache a mark says that a file is still to be checked. So what an interrupted run leaves is never taken for a model.
The same command goes on with the files that lack; a half of one is used by those versions of huggingface_hub that
keep it (2.4 does not).
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from types import ModuleType

from lantern_hpu.errors import (
    LanternError,
    OptionError,
    OutputError,
    WeightsError,
    choices,
    exit_code,
    needing,
)
from lantern_hpu.hub import sha256
from lantern_hpu.registry import (
    LABEL,
    UNCHECKED,
    Entry,
    Located,
    Part,
    briefly,
    cache_folder,
    draw_command,
    get,
    locate,
    of_folder,
    size,
    snapshot,
    store,
)

STAGING = ".fetching"  # in the folder of --to, until files are whole and checked
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # the second is not known everywhere
NETWORK = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}
LARGER = "--to a folder on a larger disk, or set HF_HOME to one"
WIDTH = 100
INTERRUPTED = 130  # what a shell returns for it


@dataclass(frozen=True)
class File:
    """One file to fetch, as the Hub lists it."""

    part: Part
    name: str
    bytes: int | None
    sha256: str | None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.download",
        description="Fetch a known model from the Hugging Face Hub.",
        epilog="python -m lantern_hpu.models lists the known models.",
    )
    parser.add_argument("name", metavar="NAME", help="a known model, or the Hub id of its target")
    parser.add_argument(
        "--only", metavar="PART,...", help="these parts alone: target, drafter, vq, ..."
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="a folder with a subfolder for each part (default: the Hugging Face cache)",
    )
    parser.add_argument(
        "--without-drafter", action="store_true", help="enough for --method ar: one token a step"
    )
    return parser


def choose(entry: Entry, only: str | None, drafting: bool) -> list[Part]:
    """The parts to have: those named, or all that drawing needs.

    Raises:
        OptionError: the model has no such part, or the options contradict each other.
    """
    if only is None:
        return entry.needed(drafting)
    roles = [role.strip() for role in only.split(",") if role.strip()]
    unknown = [role for role in roles if role not in entry.parts]
    if unknown or not roles:
        what = (
            f"{entry.name} has no part {', '.join(unknown)}" if unknown else "--only names no part"
        )
        raise OptionError(what, hint=choices(entry.parts))
    if "drafter" in roles and not drafting:
        raise OptionError("--only drafter and --without-drafter contradict each other")
    return [part for role, part in entry.parts.items() if role in roles]


def list_files(hub: ModuleType, part: Part, absent: Sequence[str]) -> list[File]:
    """The files that a part lacks, with the sizes and digests that the Hub states.

    Raises:
        WeightsError: the repository lacks a file, or has another version of one than is known here.
    """
    info = hub.HfApi().model_info(part.repo, files_metadata=True)
    there = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    found, gone = [], []
    for spec in absent:
        name = next((name for name in spec.split("|") if name in there), None)
        if name is None:
            gone.append(spec)
            continue
        stated = getattr(there[name].lfs, "sha256", None)
        known = part.sha256.get(name)
        if known and stated and known != stated:
            why = f"its sha256 is {stated} there, {known} here"
            raise WeightsError(f"{part.repo} has another {name} than the known one", why, part.page)
        found.append(File(part, name, there[name].size, known or stated))
    if gone:
        raise WeightsError(f"{part.repo} lacks files", ", ".join(gone), part.page)
    return found


def check_space(files: Sequence[File], where: Path) -> None:
    """Raise an OutputError unless the disk has room for all files."""
    need = sum(file.bytes or 0 for file in files)
    there = next(folder for folder in (where, *where.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if need > free:
        why = f"{size(need)} needed, {size(free)} free"
        raise OutputError(f"not enough space for {where}", why, LARGER)


def fetch(hub: ModuleType, file: File, to: Path | None) -> None:
    """Fetch and check one file.

    Raises:
        WeightsError: its digest differs from the stated one; the file is deleted.
    """
    staging = None if to is None else to / STAGING / file.part.role
    with nullcontext() if to else marked(file):
        found = Path(hub.hf_hub_download(file.part.repo, file.name, local_dir=staging))
        check(file, found)
    if to is not None:
        place = to / file.part.role / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(found, place)


@contextmanager
def marked(file: File) -> Iterator[None]:
    """In the cache, a mark while a file is fetched and checked; it outlasts only what leaves the file unchecked."""
    mark = store(file.part.repo) / UNCHECKED / file.name
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    done = False
    try:
        yield
        done = True
    finally:
        folder = snapshot(file.part.repo)
        if done or folder is None or not (folder / file.name).exists():
            mark.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                mark.parent.rmdir()
                mark.parent.parent.rmdir()


def check(file: File, found: Path) -> None:
    """Compare a fetched file's digest with the stated one, if there is one; see `fetch`."""
    if file.sha256 and (got := sha256(found)) != file.sha256:
        remove(found)
        why = f"its sha256 is {got}, expected {file.sha256}; it was deleted"
        raise WeightsError(
            f"{file.name} of {file.part.repo} came damaged", why, "the same command again"
        )


def remove(path: Path) -> None:
    """Delete a file; in the cache, where it is a link, also what the link points to."""
    real = path.resolve()
    path.unlink()
    real.unlink(missing_ok=True)


def label(entry: Entry, folder: Path) -> None:
    """Note in a folder which model it holds."""
    (folder / LABEL).write_text(json.dumps({"model": entry.name}, indent=1) + "\n")


def tidy(folder: Path, done: bool) -> None:
    """Drop the staging folder, unless it holds half a file that a later run may go on with; and what is empty."""
    staging = folder / STAGING
    if done or not any(staging.rglob("*.incomplete")):
        shutil.rmtree(staging, ignore_errors=True)
    for empty in (staging, folder):
        if empty.is_dir() and not any(empty.iterdir()):
            empty.rmdir()


# ------------------------------------------------------------------------------------ errors


@contextmanager
def plainly(entry: Entry, part: Part, where: Path) -> Iterator[None]:
    """Turns what can go wrong on the way from the Hub to the disk into errors that say what to do."""
    try:
        yield
    except LanternError:
        raise
    except Exception as error:
        known = explain(error, entry, part, where)
        if known is None:
            raise
        raise known from error


def explain(error: Exception, entry: Entry, part: Part, where: Path) -> LanternError | None:
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
    if no_space(error):
        return OutputError(f"the disk is full at {where}", "no space left", LARGER)
    if unreachable(error, kinds):
        hint = (
            f"with a network elsewhere: python -m lantern_hpu.download {entry.handle} --to FOLDER; "
            "copy FOLDER here and give it as --model"
        )
        return WeightsError("the Hugging Face Hub cannot be reached", text, hint)
    if "HfHubHTTPError" in kinds:
        return WeightsError(f"the Hub refused {repo}", text, "try again later")
    if isinstance(error, OSError):
        return OutputError(f"cannot write to {where}", error.strerror or text)
    if isinstance(error, RuntimeError):
        hint = "the same command again, perhaps with HF_HUB_DISABLE_XET=1"
        return WeightsError(f"{repo} could not be fetched", text, hint)
    return None


def no_space(error: Exception) -> bool:
    full = isinstance(error, OSError) and error.errno in FULL
    return full or "No space left on device" in str(error)


def unreachable(error: Exception, kinds: set[str]) -> bool:
    """Whether the network is at fault, or was switched off (HF_HUB_OFFLINE)."""
    if kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"}:
        return True
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    return type(error).__module__.split(".")[0] in NETWORK


# ------------------------------------------------------------------------------------ the command


def announce(entry: Entry, parts: Sequence[Part], located: Located) -> str:
    """What will be fetched: parts, sizes, licences, and what is here already."""
    rows = []
    for part in parts:
        here = "here already" if located[part.role] else size(part.bytes)
        rows.append((part.role, here, part.licence, part.repo))
    wide = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{entry.name}: {entry.title}"]
    for part, row in zip(parts, rows, strict=True):
        columns = "  ".join(f"{text:<{width}}" for text, width in zip(row, wide, strict=False))
        lines.append(f"  {columns}  {row[3]}: {briefly(part.files)}")
    note = f"note: {entry.note}" if entry.note else ""
    lines += wrap(note, WIDTH, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(lines)


def fetch_all(entry: Entry, parts: Sequence[Part], located: Located, to: Path | None) -> None:
    """List, check and fetch what the parts lack."""
    with needing("huggingface_hub", "it fetches the files"):
        import huggingface_hub as hub
    where = to or cache_folder()
    files: list[File] = []
    for part in parts:
        with plainly(entry, part, where):
            files += list_files(hub, part, located.absent[part.role])
    check_space(files, where)
    amount = size(sum(file.bytes or 0 for file in files))
    print(f"fetching {len(files)} file{'s' * (len(files) > 1)}, {amount}, to {where}", flush=True)
    done = False
    try:
        for file in files:
            with plainly(entry, file.part, where):
                fetch(hub, file, to)
                if to is not None:
                    label(entry, to)
        done = True
    finally:
        if to is not None:
            tidy(to, done)


def run(args: argparse.Namespace) -> None:
    if args.name == "builtin":
        raise OptionError("builtin is here already", "it comes with the package", "--model builtin")
    entry, to = get(args.name), args.to
    parts = choose(entry, args.only, not args.without_drafter)
    other = of_folder(to) if to else None
    if other is not None and other.name != entry.name:
        raise OutputError(f"{to} holds {other.name}", "one folder, one model", "another --to")
    located = locate(entry, to)
    print(announce(entry, parts, located), flush=True)
    lacking = [part for part in parts if located[part.role] is None]
    if lacking:
        fetch_all(entry, lacking, located, to)
    print(summary(entry, locate(entry, to), to))


def summary(entry: Entry, located: Located, to: Path | None) -> str:
    """Where the parts are, and how to draw with them or what it still takes."""
    lines = [f"{role}: {path}" for role, path in located.items() if path is not None]
    lacking = [part.role for part in located.missing(drafting=False)]
    if lacking:
        return "\n".join([*lines, f"to draw it still lacks: {', '.join(lacking)}"])
    method = " --method ar" if located.missing(drafting=True) else ""
    return "\n".join([*lines, f"draw with: {draw_command(entry, to)}{method}"])


def main(argv: Sequence[str] | None = None) -> int:
    """The `download` command: 0; 2 after an error; 130 if interrupted."""
    args = make_parser().parse_args(argv)
    try:
        return exit_code(lambda: run(args))
    except KeyboardInterrupt:
        said = "interrupted: files that are whole stay, the same command fetches the others"
        print(f"\n{said}", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
