"""All stages of a device, in as few processes as it allows; the file has what is known so far at any time."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lantern_hpu import __version__
from lantern_hpu.backends import BACKENDS
from lantern_hpu.backends.hpu import env as hpu_env
from lantern_hpu.errors import Arg, OptionError, OutputError, choices, require, words
from lantern_hpu.fields import option
from lantern_hpu.files import reading
from lantern_lab.measure.reports import write_report
from lantern_lab.verify.items import Question, Result, Stage, items_of, stages_of

KIND = "lantern_hpu.verify"
SLOWEST = 300.0  # seconds that one question may take
LEAST = 5.0  # seconds that are worth beginning a stage for


@dataclass(frozen=True)
class VerifyRequest:
    """The options of a run."""

    device: str = option(next(iter(BACKENDS)), ", ".join(BACKENDS))
    model: str = option("builtin", "`builtin`, or a model folder")
    output: Path = option(Path("verify.json"), "report file", metavar="FILE.json")
    minutes: float = option(10.0, "time limit; remaining checks are left open: above 0")
    force: bool = option(False, "start over, even if the file has results")

    def __post_init__(self) -> None:
        if self.device not in BACKENDS:
            raise OptionError(f"unknown device {self.device!r}", hint=choices(BACKENDS))
        require(self.minutes > 0, "minutes", self.minutes, "more than 0")
        json = self.output.suffix == ".json"
        require(json, "output", self.output, "a name that ends in .json")


@dataclass
class Report:
    """The one file."""

    wanted: VerifyRequest
    say: Callable[[str], object] = str  # is called with a line of progress
    results: dict[tuple[str, str], Result] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        gaudi = bool(BACKENDS[self.wanted.device].stages)
        checks = hpu_env.checks() if gaudi else []
        return {
            "kind": KIND,
            "lantern_hpu": __version__,
            "torch": hpu_env.version_of("torch"),
            "device": self.wanted.device,
            "plugin": hpu_env.version_of(hpu_env.PLUGIN) if gaudi else None,
            "release": hpu_env.release_of().name if gaudi else None,
            "model": self.wanted.model,
            "hardware": self.hardware,
            "checks": [asdict(check) for check in checks],
            "seconds": round(self.seconds, 1),
            "results": [asdict(result) for result in self.results.values()],
        }

    def save(self) -> None:
        write_report(self.wanted.output, self.as_json(), force=True)

    def add(self, result: Result) -> None:
        """An answer, which is written at once."""
        self.results[result.stage, result.item] = result
        detail = f": {result.detail}" if result.detail else ""
        self.say(f"{result.state:<10} {result.stage}, {result.item}{detail}")
        self.save()

    def leave_open(self, questions: Sequence[Question], why: str) -> None:
        """Questions that got no answer."""
        for item, source, stage in questions:
            self.add(Result(stage.name, item, "unanswered", why, source))

    def missing(self, several: Sequence[Stage]) -> list[Question]:
        """Questions of stages that have no answer yet."""
        asked = [one for stage in several for one in items_of(stage)]
        return [one for one in asked if (one.stage.name, one.item) not in self.results]


def resumed(wanted: VerifyRequest, say: Callable[[str], object] = str) -> Report:
    """A new report, or the one in the file: what is answered in it is not asked again."""
    report = Report(wanted, say)
    if not wanted.output.exists():
        return report
    with reading(wanted.output, words("another", Arg("output"))) as earlier:
        now = report.as_json()
        for name in ("kind", "lantern_hpu", "torch", "device", "plugin", "release", "model"):
            if earlier.get(name) != now[name]:
                why = f"it is of {name} {earlier.get(name)!r}, and this run of {now[name]!r}"
                hint = words("another", Arg("output"), ", or", Arg("force"))
                raise OutputError(f"{wanted.output} cannot be resumed", why, hint)
        report.hardware, report.seconds = earlier["hardware"], earlier["seconds"]
        answers = [Result(**entry) for entry in earlier["results"]]
        report.results = {(a.stage, a.item): a for a in answers if a.state != "unanswered"}
    return report


def verify(report: Report) -> None:
    """Ask everything that has no answer yet."""
    began, before = time.monotonic(), report.seconds
    ends = began + 60 * report.wanted.minutes
    for _, together in groupby(stages_of(report.wanted.device), lambda stage: stage.process):
        try:
            ask_stages(report, list(together), ends)
        finally:
            report.seconds = before + time.monotonic() - began
            report.save()


def ask_stages(report: Report, together: Sequence[Stage], ends: float) -> None:
    """Those of a process, until the run `ends`; where a question ended it, a new one starts after that question."""
    while missing := report.missing(together):
        if ends - time.monotonic() < LEAST:
            why = f"no time left of {report.wanted.minutes:g} minutes"
            return report.leave_open(missing, why)
        asked: Question | None = None
        why = "the process ended before it was asked"
        for message in messages_of(report.wanted, missing, ends):
            if isinstance(message, Question):
                asked = message
                if asked.stage.kind != "facts":  # those take no time
                    report.say(f"{'asking':<10} {asked.stage.name}, {asked.item}")
            elif isinstance(message, Result):
                report.add(message)
                asked = None
            elif isinstance(message, dict):
                report.hardware = message
            else:
                why = message
        if asked is None:
            return report.leave_open(report.missing(together), why)
        report.leave_open([asked], why)


Message = Question | Result | dict[str, Any] | str


def messages_of(
    wanted: VerifyRequest, questions: Sequence[Question], ends: float
) -> Iterator[Message]:
    """From a process: each question, its result, the hardware; last why it ended if not by itself."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        child = context.Process(target=answer_in_process, args=(wanted, questions, writer, log))
        child.start()
        writer.close()
        try:
            while True:
                limit = min(time.monotonic() + SLOWEST, ends)
                if not reader.poll(max(limit - time.monotonic(), 0.0)):
                    late = limit == ends
                    yield "timed out" if late else f"no answer in {SLOWEST:g} seconds"
                    return
                yield reader.recv()
        except EOFError:
            child.join()
            if child.exitcode:
                lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                last = lines[-1] if lines else "it printed nothing"
                yield f"its process ended with {child.exitcode}: {last}"
        finally:
            child.kill()
            child.join()


def answer_in_process(
    wanted: VerifyRequest, questions: Sequence[Question], writer: Connection, log: Path
) -> None:
    """What a process does; all it prints goes into the log."""
    # Flags that the parent has set would count as the user's.
    os.environ.pop(hpu_env.LAZY_MODE, None)
    os.environ.update(questions[0].stage.flags)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(descriptor, number)
    from lantern_lab.verify.ask import answer_all

    answer_all(wanted.device, wanted.model, questions, writer.send)
