"""Files: read and write them whole or not at all, tell them apart, and where ours are kept. Needs no torch."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import re
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lantern_hpu.errors import Arg, OutputError, WeightsError, words

VERSION = "0.5.0"  # of this package
ASSETS = Path(__file__).parent / "assets"
LONGEST, LONGEST_PATH = 255, 1000  # bytes of a name and characters of a path that systems take
MOST_TEXT = 10**9  # bytes of a text that is read whole; a large index or tokenizer has 10^8
STARTED = time.time()  # of this process
UNASKED = "existing files are not overwritten"
OVERWRITE = words(Arg("force", True), "or another name")


def cache_folder() -> Path:
    """Where what was computed once is kept: LANTERN_HPU_CACHE, else the user's cache folder."""
    folder = os.environ.get("LANTERN_HPU_CACHE")
    if folder:
        return Path(os.path.expanduser(folder))
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lantern_hpu"


def own_cache(name: str) -> Path:
    """A folder of the cache, made for the user alone; an OutputError where others may write: what is there is run."""
    for folder in (cache_folder(), cache_folder() / name):
        with suppress(OSError):
            folder.mkdir(0o700, parents=True, exist_ok=True)
        if folder.exists() and hasattr(os, "getuid"):
            about = folder.stat()
            if about.st_uid != os.getuid() or about.st_mode & 0o022:
                why = "another user owns it, or may write there"
                hint = f"chmod go-w {folder}, or LANTERN_HPU_CACHE=FOLDER"
                raise OutputError(f"the cache folder {folder} is not used", why, hint)
    return folder


@contextmanager
def reported_as(what: str, hint: str = "") -> Iterator[None]:
    """Errors of missing or wrong contents of files that are used inside, in these words."""
    try:
        yield
    except KeyError as error:
        raise WeightsError(what, f"{error.args[0]} is missing", hint) from error
    except (OSError, ValueError, TypeError, IndexError, AttributeError, ArithmeticError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise WeightsError(what, why, hint) from error


def check_regular(path: Path) -> None:
    """Raise a WeightsError for a pipe or a device under a file's name: reading it may never end."""
    kind = other_kind(path)
    if kind:
        raise WeightsError(f"cannot read {path}", f"it is {kind}", "a copy of it in a file")


def check_content(path: Path) -> None:
    """Raise a WeightsError where a download left something else under a file's name."""
    what, hint = f"cannot read {path}", "download it again, by the link to the raw file"
    with reported_as(what), open(path, "rb") as file:
        start = file.read(64).lstrip(codecs.BOM_UTF8 + b" \t\r\n").lower()
    if start.startswith(b"version https://git-lfs"):
        why = "it is a pointer of git-lfs, not the file it points to"
        raise WeightsError(what, why, "git lfs pull")
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"entry not found")):
        raise WeightsError(what, "it is a web page, not the file", hint)


def read_text(file: Path) -> str:
    """The text of a file: see `text_of`.

    Raises:
        OSError, WeightsError: it cannot be read.
    """
    if file.stat().st_size > MOST_TEXT:
        raise ValueError(f"it has more than {amount(MOST_TEXT)}")
    data = file.read_bytes()
    check_content(file)
    return text_of(data)


def text_of(data: bytes) -> str:
    """A text in UTF-8, with a byte order mark or without; each line ends in a line feed.

    Raises:
        ValueError: it is too long, or not such text; with the line.
    """
    if len(data) > MOST_TEXT:
        raise ValueError(f"it has more than {amount(MOST_TEXT)}")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("line 1 is UTF-16; save the file as UTF-8")
    try:
        return re.sub("\r\n?", "\n", data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line, byte = data.count(b"\n", 0, error.start) + 1, data[error.start]
        why = f"line {line} is not UTF-8 (byte 0x{byte:02x}); save the file as UTF-8"
        raise ValueError(why) from error


def parse_json(text: str | bytes, **how: Any) -> Any:
    try:
        return json.loads(text, **how)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


@contextmanager
def reading(file: Path, hint: str = "") -> Iterator[dict[str, Any]]:
    """The object in a JSON file; what goes wrong while it is read and used is a WeightsError that names the file."""
    check_regular(file)
    with reported_as(f"cannot read {file}", hint):
        result = parse_json(read_text(file))
        if not isinstance(result, dict):
            raise ValueError("it is not an object")
        yield result


def is_plain_path(name: object) -> bool:
    """Whether a name that others give is a relative path by names alone, and so leads nowhere but into its folder."""
    if not isinstance(name, str) or not name.isprintable() or re.search(r"\\|^[A-Za-z]:", name):
        return False
    if len(name) > LONGEST_PATH:
        return False
    parts = name.split("/")
    return all(part not in ("", ".", "..") and len(part.encode()) <= LONGEST for part in parts)


def file_in(folder: Path, name: object) -> Path:
    """A file that a description in a folder names; it is there, or below."""
    if not is_plain_path(name):
        what = f"{folder} names a file that cannot be in it"
        raise WeightsError(what, repr(name)[:100], "another copy of it")
    return folder / str(name)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with reported_as(f"cannot read {path}"), open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def lock_file(opened: int) -> None:
    """Lock an open file until it is closed or its process ends; not where there are no such locks."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


def check_free(paths: Iterable[Path], force: bool, kept: Collection[Path | None] = ()) -> None:
    """Refuse to go on if a result could not be written later; those that are `kept` may be there."""
    paths = list(paths)
    twice = [path for path, count in Counter(paths).items() if count > 1]
    if twice:
        raise OutputError(f"{twice[0]} would hold two results", "each needs its own file")
    taken = [path for path in paths if path.exists() and path not in kept]
    for path in paths:
        check_kind(path)
    if taken and not force:
        raise OutputError(f"{some_of(taken)} exists", UNASKED, OVERWRITE)
    for folder in {path.parent for path in paths}:
        try:
            try_folder(folder)
        except OSError as error:
            why = error.strerror or str(error)
            raise OutputError(f"cannot write into {folder}", why) from error


def try_folder(folder: Path) -> None:
    """Raise an OSError unless files can be written into a folder; one that did not exist is removed again."""
    missing = [part for part in (folder, *folder.parents) if not part.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        for part in missing:
            with suppress(OSError):
                part.rmdir()


def some_names(names: Iterable[str], shown: int = 8) -> str:
    """The first ones, for a message, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - shown} more" if len(every) > shown else ""
    return ", ".join(every[:shown]) + more


def some_of(paths: Iterable[Path]) -> str:
    return some_names(map(str, paths), 3)


def check_kind(path: Path) -> None:
    """Refuse a place where something else is than a file, such as a device, which a file would take the place of."""
    kind = other_kind(path)
    if kind:
        raise OutputError(f"{path} is {kind}", "a file cannot be written there")


def other_kind(path: Path) -> str:
    """The kind of thing under a name that is not a file; empty where there is a file, or nothing yet."""
    if os.path.isfile(path) or not os.path.exists(path):
        return ""
    return "a folder" if path.is_dir() else "no regular file"


def temporary(path: Path, word: str) -> Path:
    """The name that a file has until it is whole."""
    return path.with_name(f".{path.name[:100]}.{word}.tmp")


def clear_temporary(paths: Iterable[Path]) -> None:
    """Remove what killed runs have left of these files; what is younger than this process is a run's that goes on."""
    paths = list(paths)
    starts = {temporary(path, "x").stem.removesuffix(".x") for path in paths}
    for folder in {path.parent for path in paths}:
        for part in folder.glob(".*.tmp"):
            if part.stem.rpartition(".")[0] in starts:
                with suppress(OSError):
                    if part.lstat().st_mtime < STARTED:
                        part.unlink()


def write_file(path: Path, data: bytes, force: bool = False) -> None:
    """Write a whole file or none: first under another name, then moved over.

    That name is random, so that no one can have put a link there.
    """
    check_kind(path)
    if path.exists() and not force:
        raise OutputError(f"{path} exists", UNASKED, OVERWRITE)
    part = temporary(path, secrets.token_hex(8))
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb", opener=lambda name, _: os.open(name, new, 0o666)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        place(part, path, force)
    except OSError as error:
        raise OutputError(f"cannot write {path}", error.strerror or str(error)) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def place(part: Path, path: Path, force: bool) -> None:
    """Give a finished file its name; unlike a move, a link fails if there is such a file by now."""
    if not force:
        try:
            os.link(part, path)
            return
        except FileExistsError:
            raise
        except OSError:  # a file system without links
            pass
    os.replace(part, path)


def amount(count: int | None) -> str:
    """Bytes in words; the Hub counts a thousand to the kilo, and so does this."""
    if count is None:
        return "size unknown"
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            number = count / unit
            digits = 2 if number < 10 else 1 if number < 100 else 0
            return f"{number:.{digits}f} {name}"
    return f"{count} bytes"
