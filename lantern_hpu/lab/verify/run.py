"""All stages of a device, one process after the other; what is known so far is in the file at any time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lantern_hpu import __version__
from lantern_hpu.backends import EMULATED
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.errors import OutputError
from lantern_hpu.files import reading, write_file
from lantern_hpu.lab.verify.items import Result, Stage, items_of, stages_of

KIND = "lantern_hpu.verify"
SLOWEST = 300.0  # seconds that one question may take
LEAST = 5.0  # seconds that are worth beginning a stage for
POLL = 0.1
Say = Callable[[str], None]


@dataclass
class Wanted:
    """The options of a run."""

    device: str
    emulate: bool
    model: str
    output: Path
    minutes: float


@dataclass
class Report:
    """The one file."""

    wanted: Wanted
    results: dict[tuple[str, str], Result] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "lantern_hpu": __version__,
            "torch": hpu_env.installed("torch"),
            "device": self.wanted.device,
            "emulated": self.wanted.emulate,
            "model": self.wanted.model,
            "hardware": self.hardware,
            "checks": [asdict(c) for c in hpu_env.checks()]
            if self.wanted.device == EMULATED
            else [],
            "seconds": round(self.seconds, 1),
            "results": [result.as_json() for result in self.results.values()],
        }

    def add(self, result: Result) -> None:
        self.results[result.stage, result.item] = result

    def save(self) -> None:
        data = json.dumps(self.as_json(), indent=1).encode()
        write_file(self.wanted.output, data, force=True)


def resumed(wanted: Wanted) -> Report:
    """A new report, or the one in the file: what is answered in it is not asked again.

    Raises:
        OutputError: the file is another run's.
    """
    report = Report(wanted)
    if not wanted.output.exists():
        return report
    with reading(wanted.output, "another --output") as found:
        now = report.as_json()
        for name in ("kind", "lantern_hpu", "torch", "device", "emulated", "model"):
            if found.get(name) != now[name]:
                why = f"it is of {name} {found.get(name)!r}, and this run of {now[name]!r}"
                raise OutputError(
                    f"{wanted.output} cannot be gone on with", why, "another --output, or --force"
                )
        report.hardware, report.seconds = found["hardware"], found["seconds"]
        for entry in found["results"]:
            if entry["state"] != "unanswered":
                report.add(Result(**entry))
    return report


def verify(wanted: Wanted, report: Report, say: Say) -> None:
    """Ask everything that has no answer yet."""
    began, before = time.monotonic(), report.seconds
    ends = began + 60 * wanted.minutes
    for stage in stages_of(wanted.device):
        try:
            ask_stage(wanted, report, stage, ends, say)
        finally:
            report.seconds = before + time.monotonic() - began
            report.save()


def ask_stage(wanted: Wanted, report: Report, stage: Stage, ends: float, say: Say) -> None:
    """One stage; after a question that ended its process, a new one goes on behind it."""
    while missing := [i for i in items_of(stage) if (stage.name, i[0]) not in report.results]:
        if ends - time.monotonic() < LEAST:
            give_up(report, stage, missing, f"no time left of {wanted.minutes:g} minutes", say)
            return
        open_question: tuple[str, str] | None = None
        why = ""
        done = [item for name, item in report.results if name == stage.name]
        with tempfile.TemporaryDirectory() as folder:
            for note in notes_of(wanted, stage, done, Path(folder) / "notes", ends):
                if "begun" in note:
                    open_question = (note["begun"], note["source"])
                    if stage.kind != "facts":  # those take no time
                        say(f"{'asking':<10} {stage.name}, {note['begun']}")
                elif "result" in note:
                    result = Result(**note["result"])
                    report.add(result)
                    open_question = None
                    report.save()
                    tell(result, say)
                elif "hardware" in note:
                    report.hardware = note["hardware"]
                elif "ended" in note:
                    why = note["ended"]
        if open_question is None:
            rest = [i for i in items_of(stage) if (stage.name, i[0]) not in report.results]
            give_up(report, stage, rest, why or "the process ended before it was asked", say)
            return
        give_up(report, stage, [open_question], why, say)


def give_up(report: Report, stage: Stage, items: list[tuple[str, str]], why: str, say: Say) -> None:
    for item, source in items:
        result = Result(stage.name, item, "unanswered", why, source)
        report.add(result)
        tell(result, say)


def tell(result: Result, say: Say) -> None:
    detail = f": {result.detail}" if result.detail else ""
    say(f"{result.state:<10} {result.stage}, {result.item}{detail}")


def notes_of(
    wanted: Wanted, stage: Stage, done: list[str], file: Path, ends: float
) -> Iterator[dict[str, Any]]:
    """What the process of a stage notes while it works, then how it ended if not by itself."""
    file.touch()
    program = [
        sys.executable,
        "-m",
        "lantern_hpu.lab.verify.ask",
        stage.kind,
        stage.graphs,
        wanted.device,
    ]
    program += ["emulate" if wanted.emulate else "real", wanted.model, str(file), *done]
    noise = file.with_name("noise")
    # What this process has set, its children would take for the user's.
    flags = {n: v for n, v in os.environ.items() if n != hpu_env.LAZY_MODE}
    with open(noise, "wb") as sink, open(file, encoding="utf-8") as notes:
        child = subprocess.Popen(program, stdout=sink, stderr=sink, env=flags)
        try:
            last, part = time.monotonic(), ""
            while True:
                ended = child.poll() is not None
                while line := notes.readline():
                    part += line
                    if part.endswith("\n"):
                        last = time.monotonic()
                        yield json.loads(part)
                        part = ""
                if ended:
                    break
                now = time.monotonic()
                if now - last > SLOWEST or now > ends:
                    late = now > ends
                    why = "the time was over" if late else f"no answer in {SLOWEST:g} seconds"
                    yield {"ended": why}
                    return
                time.sleep(POLL)
        finally:
            if child.poll() is None:
                child.kill()
            child.wait()
    if child.returncode:
        said = noise.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        yield {
            "ended": f"its process ended with {child.returncode}: {said[-1] if said else 'nothing said'}"
        }
