"""What Gaudi forbids or punishes, and the record of who did it where.

The rules, `rules.txt`, are facts of the public PyTorch bridge (releases 1.24 and 1.19) and of Habana's documentation. A
rule has a severity outside and inside a graph capture: what merely costs time outside can be wrong for good inside.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Literal, cast

import torch

from gaudi_emulator.releases import DEFAULT, RELEASES

Severity = Literal["error", "warn", "info"]
Site = tuple[str, int]  # file and line
ORDER: tuple[Severity, ...] = ("error", "warn", "info")


@dataclass(frozen=True)
class Rule:
    """One line of the contract.

    Attributes:
        why: the reason, by release that has the rule.
        captured: the severity inside a capture.
    """

    id: str
    name: str
    why: dict[str, str] = field(hash=False)
    instead: str
    severity: Severity
    captured: Severity

    @property
    def title(self) -> str:
        return f"{self.id} {self.name}"

    @property
    def releases(self) -> tuple[str, ...]:
        """Releases that have the rule."""
        return tuple(self.why)

    def reason(self, releases: Sequence[str]) -> str:
        """Why, in these releases."""
        texts = {name: self.why[name] for name in releases}
        if len(set(texts.values())) == 1:
            return texts[releases[0]]
        return "; ".join(f"{name}: {text}" for name, text in texts.items())


def rule_table(text: str) -> dict[str, Rule]:
    """By id, of rows: id, name, severities outside and inside a capture; why; what instead. A rule that is broken in
    several ways has a row for each, `id:way`. One that not all releases have, or that differs, has a `RELEASE: why` of
    each.

    A line at the margin begins a row, indented ones are its other cells, deeper ones go on.
    """
    table = {}
    rows = (row for row in re.split(r"\n(?=\S)", text.strip()) if not row.startswith("#"))
    for row in rows:
        head, *reasons, instead = (" ".join(c.split()) for c in re.split(r"\n {4}(?=\S)", row))
        key, name, severity, captured = head.split()
        named = (reason.partition(": ") for reason in reasons)
        why = {release: text for release, _, text in named if release in RELEASES}
        table[key] = Rule(
            key.partition(":")[0],
            name,
            why or dict.fromkeys(RELEASES, reasons[0]),
            instead,
            cast(Severity, severity),
            cast(Severity, captured),
        )
    return table


RULES = rule_table(Path(__file__).with_name("rules.txt").read_text(encoding="utf-8"))
EMULATOR = os.path.dirname(os.path.abspath(__file__)) + os.sep
SKIPPED = (EMULATOR, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, "<frozen")


def call_site() -> tuple[str, int]:
    """File and line of the nearest caller outside torch and the emulator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(SKIPPED) and "contextlib" not in file:
            return file, frame.f_lineno
        frame = frame.f_back
    return "unknown", 0


Place = tuple[str, str, int, Severity]  # rule, file, line, severity


@dataclass
class Finding:
    """A rule that was hit at one place, and the releases that it was hit under."""

    rule: Rule
    severity: Severity
    file: str
    line: int
    detail: str
    captured: bool
    releases: tuple[str, ...]
    count: int = 1

    @property
    def place(self) -> Place:
        return self.rule.title, self.file, self.line, self.severity

    def as_dict(self) -> dict[str, object]:
        return {
            "rule": self.rule.id,
            "name": self.rule.name,
            "severity": self.severity,
            "file": self.file,
            "line": self.line,
            "detail": self.detail,
            "in_capture": self.captured,
            "count": self.count,
            "releases": list(self.releases),
            "why": self.rule.reason(self.releases),
            "instead": self.rule.instead,
        }


@dataclass
class Findings:
    """All findings, one for each rule, place and severity.

    Attributes:
        site: of the operator that a replay is at.
    """

    captured: Callable[[], bool]
    release: str = DEFAULT.name
    found: dict[Place, Finding] = field(default_factory=dict)
    muted: bool = False
    told: dict[Place, int] = field(default_factory=dict)  # how often, at the last call of `new`
    site: Site | None = None

    def hit(
        self,
        rule_id: str,
        detail: str = "",
        severity: Severity | None = None,
        site: tuple[str, int] | None = None,
    ) -> None:
        """Note that a rule that the release has was hit here, with its own severity unless one is given."""
        rule, captured = RULES[rule_id], self.captured()
        if self.muted or self.release not in rule.releases:
            return
        severity = severity or (rule.captured if captured else rule.severity)
        file, line = site or self.site or call_site()
        known = self.found.get((rule_id, file, line, severity))
        if known:
            known.count += 1
            return
        self.found[rule_id, file, line, severity] = Finding(
            rule, severity, file, line, detail, captured, (self.release,)
        )

    def sorted(self) -> list[Finding]:
        """Errors first, then by rule and place; a baked value that another error explains is left out."""
        explained = {
            (f.file, f.line)
            for f in self.found.values()
            if f.severity == "error" and f.rule.id not in ("H068", "H020")
        }
        return in_order(
            f
            for f in self.found.values()
            if f.rule.id != "H068" or (f.file, f.line) not in explained
        )

    def new(self) -> list[Finding]:
        """Findings since the last call, with how often they came since then."""
        before, self.told = self.told, {place: f.count for place, f in self.found.items()}
        counts = {place: f.count - before.get(place, 0) for place, f in self.found.items()}
        new = {p: replace(self.found[p], count=count) for p, count in counts.items() if count}
        return Findings(self.captured, self.release, new).sorted()

    def hits(self, severity: Severity) -> int:
        """How often rules were hit with this severity."""
        return sum(f.count for f in self.found.values() if f.severity == severity)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.sorted() if finding.severity == "error"]


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then by rule and place."""
    return sorted(findings, key=lambda f: (ORDER.index(f.severity), f.rule.id, f.file, f.line))


def joined(runs: Iterable[Iterable[Finding]]) -> list[Finding]:
    """Findings of several runs, each place once: with all releases that it holds for, and how often in the run that
    had it most."""
    together: dict[Place, Finding] = {}
    for finding in chain.from_iterable(runs):
        known = together.get(finding.place, finding)
        releases = tuple(dict.fromkeys((*known.releases, *finding.releases)))
        count = max(known.count, finding.count)
        together[finding.place] = replace(known, releases=releases, count=count)
    return in_order(together.values())
