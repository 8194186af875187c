"""Fetching the files of known models from the Hugging Face Hub.

What is here already is not fetched again. A file gets its name when it is whole: huggingface_hub writes to a name
that ends in `.incomplete` and renames it. In a folder of the user's, files are checked before they are moved to their
place; in the cache a mark says that a file is still to be checked. So what an interrupted run leaves is never taken
for a model. The next run goes on with the files that lack; a half of one is used by those versions of huggingface_hub
that keep it; those that do not (2.4) leave it, and it is deleted once the file is whole.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from types import ModuleType
from typing import Any

from lantern_hpu.errors import (
    LanternError,
    OptionError,
    OutputError,
    WeightsError,
    choices,
    needing,
)
from lantern_hpu.files import reading, sha256, write_file
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.results.tables import WIDTH, aligned, amount
from lantern_hpu.zoo.find import LABEL, UNCHECKED, Located, briefly, cached, hub_cache, store
from lantern_hpu.zoo.registry import FOLDER, KnownModel, Part, find_model_by_name

# ------------------------------------------------------------------------------------------- cards

# Model cards of the Hugging Face Hub for what `train` and `convert` write: README.md of the folder.
#
# Figures come from the folder's own report or are left out.

CARD, REPORT = "README.md", "report.json"
LICENCES = {"MIT": "mit", "Apache-2.0": "apache-2.0"}  # by the Hub's identifiers; others are named
TAGS = ("image-generation", "speculative-decoding")
REPORT_KIND = "lantern_hpu.train drafter"


@dataclass(frozen=True)
class Subject:
    """What a card is about.

    Attributes:
        model: its name, or that of the drafter's target. config: of the model. fingerprint: of the target's weights.
        part: of a known model, whose licence holds.
    """

    model: str
    config: ModelConfig
    fingerprint: str
    part: str = "target"

    @property
    def repository(self) -> str | None:
        """Of the target's weights on the Hub; None if it is not a known one."""
        entry = find_model_by_name(self.model)
        return entry.parts["target"].repo if entry else None

    @property
    def licence(self) -> str:
        """Of the weights, as their page states it; empty if none is known."""
        if self.model == "builtin":
            return "Apache-2.0"
        entry = find_model_by_name(self.model)
        part = entry.parts.get(self.part, entry.parts["target"]) if entry else None
        return part.licence if part and part.licence != "not stated" else ""

    def command(self, options: str) -> str:
        classes = self.config.condition.kind == "classes"
        what = "--class-label goldfish" if classes else '--prompt "a red apple"'
        return f"lantern-hpu generate {options} {what} --output picture.png"


def drafter_card(
    subject: Subject, folder: str, report: Mapping[str, Any] | None, *tags: str
) -> str:
    """The card of a drafter.

    Args:
        folder: its name. report: of its training; None where it is not known.
    """
    sizes = subject.config.target
    use = subject.command(f"--model {subject.model} --drafter {folder} --method eagle")
    lines = [
        f"# EAGLE drafter for {subject.model}",
        "",
        "One transformer layer that drafts image tokens for speculative decoding. Method `eagle` is lossless:",
        f"images, of {sizes.tokens} tokens each, come from the distribution of {subject.model} itself. The drafter",
        f"belongs to the target with fingerprint `{subject.fingerprint[:12]}`.",
        "",
        *usage(use),
        *drafter_figures(report),
    ]
    return card(subject, lines, ("eagle", *tags))


def folder_card(subject: Subject, folder: str) -> str:
    """The card of a converted model folder."""
    height, width = subject.config.image_size
    drafts = "with" if subject.config.drafter else "without"
    lines = [
        f"# {subject.model}, converted for lantern_hpu",
        "",
        f"The parts of {subject.model} as safetensors files, {drafts} a drafter: {width} x {height} pixels,",
        f"{subject.config.target.tokens} tokens an image. `model.json` has sizes, default sampling and the checksum",
        "of each file. A text encoder is not included.",
        "",
        *usage(subject.command(f"--model {folder}")),
        "Speed and quality were not measured when this folder was written.",
    ]
    return card(subject, lines, ())


def usage(command: str) -> Sequence[str]:
    return ("```bash", 'pip install "lantern-hpu[models]"', command, "```", "")


def drafter_figures(report: Mapping[str, Any] | None) -> list[str]:
    """What its training measured, as a table; or that nothing is known."""
    if report is None:
        return ["Its acceptance was not measured when this folder was written."]
    head = [
        f"Measured on {report['held_out_prompts']} held-out prompts, after step {report['kept_step']}:",
        "",
        "| method | tokens a step | share accepted, by depth |",
        "|---|---|---|",
    ]
    rows = []
    for method in ("eagle", "lantern++"):
        depths = ", ".join(f"{share:.2f}" for share in report[method]["by_depth"])
        rows.append(f"| `{method}` | {report[method]['tokens_per_step']:.2f} | {depths} |")
    return [*head, *rows]


def card(subject: Subject, lines: Sequence[str], tags: Sequence[str]) -> str:
    """The whole text, with the metadata that the Hub reads."""
    from huggingface_hub import ModelCard, ModelCardData

    licence, name = LICENCES.get(subject.licence, "other"), None
    if licence == "other":
        name = re.sub(r"[^a-z0-9.]+", "-", subject.licence.lower()).strip("-")
    data = ModelCardData(
        license=licence if subject.licence else "unknown",
        license_name=name or None,
        base_model=subject.repository,
        library_name="lantern-hpu",
        pipeline_tag="text-to-image",
        tags=[*TAGS, *tags],
    )
    content = "\n".join(["---", data.to_yaml(), "---", "", *lines, ""])
    return str(ModelCard(content))


def report_of(folder: Path) -> dict[str, Any] | None:
    """The report that a training left in a folder; None if there is none."""
    if not (folder / REPORT).is_file():
        return None
    with reading(folder / REPORT) as report:
        return report if report.get("kind") == REPORT_KIND else None


def write_card(folder: Path, make: Any, *what: Any) -> None:
    """Write README.md, unless `huggingface_hub` is missing: then a line on stderr says so."""
    try:
        text = make(*what)
    except ImportError:
        hint = 'pip install "lantern-hpu[models]"'
        print(f"no model card was written: huggingface_hub is missing ({hint})", file=sys.stderr)
        return
    write_file(folder / CARD, text.encode(), force=True)


# ------------------------------------------------------------------------------------------- fetch

STAGING = ".fetching"  # in a user's folder, until files are whole and checked
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}  # the second is not known everywhere
# Errors and packages by which the network is at fault, or was switched off (HF_HUB_OFFLINE)
UNREACHABLE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "TimeoutError"}
NETWORK = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"}
LARGER = "--to a folder on a larger disk, or set HF_HOME to one"


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
        raise OptionError("--only names no part", hint=choices(entry.parts))
    if "drafter" in roles and not drafting:
        raise OptionError("--only drafter and --without-drafter contradict each other")
    return [part for role, part in entry.parts.items() if role in roles]


def list_files(hub: ModuleType, part: Part, absent: Sequence[str]) -> list[File]:
    """The files that a part lacks, with the sizes and digests that the Hub states."""
    info = hub.HfApi().model_info(part.repo, files_metadata=True)
    there = {sibling.rfilename: sibling for sibling in info.siblings or ()}
    result, gone = [], []
    for spec in absent:
        names = [name for name in spec.split("|") if name in there][:1]
        if spec.endswith(FOLDER):
            names = sorted(n for n in there if n.startswith(spec.removesuffix("*")))
        if not names:
            gone.append(spec)
        for name in names:
            stated = getattr(there[name].lfs, "sha256", None)
            known = part.sha256.get(name)
            if known and stated and known != stated:
                why, what = f"its sha256 is {stated} there, {known} here", "than the known one"
                raise WeightsError(f"{part.repo} has another {name} {what}", why, part.page)
            result.append(File(part, info.sha, name, there[name].size, known or stated))
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
    """Fetch and check one file."""
    staging = None if to is None else to / STAGING / file.part.role
    with nullcontext() if to else marked(file):
        where = {"revision": file.commit, "local_dir": staging}
        result = Path(hub.hf_hub_download(file.part.repo, file.name, **where))
        if (
            to is None
        ):  # where `main` is looked up later: a file asked for by its commit leaves no such entry
            reference = store(file.part.repo) / "refs" / "main"
            reference.parent.mkdir(exist_ok=True)
            reference.write_text(file.commit)
            drop_halves(result)
        check_sum(file, result)
    if to is not None:
        place = to / file.part.role / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(result, place)


def drop_halves(whole: Path) -> None:
    """Delete what killed runs left of a file that is whole now; the library names each try anew and forgets it."""
    blob = whole.resolve()  # in the cache the file is a link
    for half in blob.parent.glob(f"{blob.name}.*.incomplete"):
        half.unlink(missing_ok=True)


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
        if done or cached(file.part.repo, file.name) is None:
            mark.unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                for folder in mark.parents[: len(Path(file.name).parts) + 1]:
                    folder.rmdir()


def check_sum(file: File, found: Path) -> None:
    """Compare a fetched file's digest with the stated one, if there is one; see `fetch`."""
    if file.sha256 and (got := sha256(found)) != file.sha256:
        real = found.resolve()  # in the cache the file is a link
        found.unlink()
        real.unlink(missing_ok=True)
        what = f"{file.name} of {file.part.repo} came damaged"
        why = f"its sha256 is {got}, expected {file.sha256}; it was deleted"
        raise WeightsError(what, why, "the same command again")


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
def plainly(entry: KnownModel, part: Part, where: Path) -> Iterator[None]:
    """Turns what can go wrong on the way from the Hub to the disk into errors that say what to do."""
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
        hint = (
            f"with a network elsewhere: lantern-hpu download {entry.handle} --to FOLDER; "
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
    where = to or hub_cache()
    files: list[File] = []
    for part in parts:
        with plainly(entry, part, where):
            files += list_files(hub, part, located.absent[part.role])
    check_space(files, where)
    size = amount(sum(file.bytes or 0 for file in files))
    print(f"fetching {len(files)} file{'s' * (len(files) > 1)}, {size}, to {where}", flush=True)
    done = False
    try:
        for file in files:
            with plainly(entry, file.part, where):
                fetch(hub, file, to)
                if to is not None:  # so that the folder says which model it holds
                    label = json.dumps({"model": entry.name}, indent=1)
                    (to / LABEL).write_text(label + "\n")
        done = True
    finally:
        if to is not None:
            tidy(to, done)
