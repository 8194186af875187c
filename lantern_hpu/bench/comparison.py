"""Several reports beside each other: what may stand in one row, and what differs. Needs no torch.

A row is a method with its tree and relaxation, in a number format, graph mode and batch size. Runs of another model,
sampling, seed or prompts are never put beside each other; of another number format or setting they get rows of their
own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lantern_hpu.bench.columns import EAGER, Report, SpeedRow, read_report
from lantern_hpu.errors import OptionError
from lantern_hpu.methods.setting import METHODS

BEST = "best mode"


@dataclass(frozen=True)
class ComparedRun:
    """A column: a report under the title that readers know it by, which is unique."""

    title: str
    origin: str  # name of its file
    report: Report
    rows: tuple[SpeedRow, ...]

    @property
    def dtype(self) -> str:
        return str(self.report["dtype"])

    @property
    def best(self) -> str:
        """The device's best graph mode."""
        return str(self.report["graphs"]["best"])

    def key(self, row: SpeedRow) -> Key:
        """What one of its rows is of."""
        named = (row.method, row.tree, setting(row))
        return Key(*named, self.dtype, row.graphs, row.batch_size)

    def find(self, key: Key) -> SpeedRow | None:
        """Its row of a key, if it has one."""
        if key.graphs == BEST:
            key = replace(key, graphs=self.best)
        return next((row for row in self.rows if self.key(row) == key), None)


@dataclass(frozen=True)
class Key:
    """What must be equal of all that stands in one row."""

    method: str
    tree: str
    setting: str  # of the relaxation
    dtype: str
    graphs: str  # EAGER, BEST, or another mode by its name
    batch: int


@dataclass(frozen=True)
class Comparison:
    """All runs with their rows, and what a reader must know about them."""

    runs: tuple[ComparedRun, ...]
    keys: tuple[Key, ...]
    differences: tuple[str, ...]

    @property
    def rows(self) -> list[SpeedRow]:
        """Of all runs."""
        return [row for run in self.runs for row in run.rows]

    @property
    def of_steps(self) -> bool:
        """Whether steps alone were timed, of random weights."""
        return self.runs[0].report["random_weights"] is not None

    @property
    def batches(self) -> list[int]:
        return sorted({key.batch for key in self.keys})


def setting(row: SpeedRow) -> str:
    """A relaxation as text; exact ones are alike whatever their numbers."""
    if METHODS[row.method].relaxation is None:
        return "exact"
    return ", ".join(f"{name} {value}" for name, value in sorted(row.relaxation.items()))


# ------------------------------------------------------------------------------------ what may be compared

# What must be equal for reports to be compared at all: how it is called, and where it is found
SAME: dict[str, Callable[[Report], Any]] = {
    "model": lambda r: r["model"],
    "weights": lambda r: r["weights"]["target"],
    "drafter": lambda r: r["weights"]["drafter"],
    "tokens of an image": lambda r: r["sizes"]["tokens"],
    "sampling": lambda r: r["settings"]["sampling"],
    "seed": lambda r: r["settings"]["seed"],
    "prompts": lambda r: r["settings"]["prompts"],
}
OF_THE_MODEL = ("weights", "drafter", "tokens of an image", "sampling")
# What may differ, and is named
NAMED: dict[str, tuple[Callable[[Report], Any], str]] = {
    "number format": (lambda r: r["dtype"], "their rows are apart; --dtype makes them alike"),
    "images": (lambda r: r["settings"]["images"], "the means are over other images"),
    "kernels": (lambda r: r["settings"].get("kernels", "auto"), "a device's own were switched off"),
    "lantern_hpu": (lambda r: r["environment"]["lantern_hpu"], "the code may differ"),
}


def brief(value: Any) -> str:
    """A value in a message."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def check_comparable(files: Sequence[Path], reports: Sequence[Report]) -> None:
    """Raise an OptionError that lists what keeps reports from being compared."""
    for file, report in zip(files, reports, strict=True):
        if report["environment"].get("emulated"):
            what = f"{file} is of an emulated device"
            raise OptionError(what, "its times say nothing about the real one")
    for file, report in zip(files[1:], reports[1:], strict=True):
        first = {name: get(reports[0]) for name, get in SAME.items()}
        other = {name: get(report) for name, get in SAME.items()}
        skip: tuple[str, ...] = ()
        if first["weights"] == other["weights"]:
            skip = ("model",)  # one model may have several names
        elif first["model"] != other["model"]:
            skip = OF_THE_MODEL  # another model has another drafter, and so on
        wrong = [
            f"{name}: {brief(first[name])} and {brief(other[name])}"
            for name in SAME
            if first[name] != other[name] and name not in skip
        ]
        if wrong:
            what = f"{files[0]} and {file} cannot be one row of the table"
            hint = "compare reports of one model, measured with the same options"
            raise OptionError(what, "; ".join(wrong), hint)


def differences(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """What differs between runs that may be compared all the same."""
    first = runs[0]
    for run in runs[1:]:
        for name, (get, why) in NAMED.items():
            mine, other = get(first.report), get(run.report)
            if mine != other:
                yield f"{name}: {mine} on {first.title}, {other} on {run.title} ({why})"
        here, there = ({(r.method, r.tree, setting(r)) for r in x.rows} for x in (first, run))
        for method, tree, relaxed in sorted(here ^ there):
            side = first if (method, tree, relaxed) in here else run
            yield f"{method} with the tree {tree} ({relaxed}): on {side.title} alone"


# ------------------------------------------------------------------------------------ putting them together


def load(files: Sequence[Path]) -> Comparison:
    """The comparison of these files."""
    file, count = Counter(file.resolve() for file in files).most_common(1)[0]
    if count > 1:
        raise OptionError(f"{file} is given twice")
    reports = [read_report(file) for file in files]
    check_comparable(files, reports)
    titles = titles_of(files, reports)
    runs = [
        ComparedRun(title, file.name, report, tuple(map(SpeedRow.from_json, report["rows"])))
        for title, file, report in zip(titles, files, reports, strict=True)
    ]
    return Comparison(tuple(runs), tuple(keys_of(runs)), tuple(differences(runs)))


def titles_of(files: Sequence[Path], reports: Sequence[Report]) -> list[str]:
    """The devices; runs of one tell themselves apart by number format, or by their files."""
    formats = [(report["device_title"], report["dtype"]) for report in reports]
    devices = [device for device, _ in formats]
    result = []
    for file, (device, dtype) in zip(files, formats, strict=True):
        more = f" ({dtype})" if devices.count(device) > 1 else ""
        alike = formats.count((device, dtype)) > 1
        result.append(device + (f" ({file.stem})" if alike else more))
    # Files of one name in several folders
    return [
        f"{title} {i + 1}" if result.count(title) > 1 else title for i, title in enumerate(result)
    ]


def keys_of(runs: Sequence[ComparedRun]) -> list[Key]:
    """The rows of the table, by method, tree, number format, graph mode and batch size.

    A device whose best mode is its eager one stands beside the others' best, and beside their eager runs if there
    are any; alone, its rows are called what they are.
    """
    result = set()
    for run in runs:
        others = [other for other in runs if other.dtype == run.dtype and other.best != EAGER]
        for row in run.rows:
            kinds = {BEST if row.graphs == run.best else row.graphs}
            if run.best == EAGER and row.graphs == EAGER:
                eager = any(r.graphs == EAGER for other in others for r in other.rows)
                kinds = ({BEST} if others else {EAGER}) | ({EAGER} if eager else set())
            result |= {replace(run.key(row), graphs=kind) for kind in kinds}
    return sorted(result, key=row_order)


def row_order(key: Key) -> tuple[Any, ...]:
    """Of a row in the table."""
    graphs = {EAGER: 0, BEST: 1}.get(key.graphs, 2)
    method = list(METHODS).index(key.method)
    return key.dtype, key.batch, graphs, key.graphs, method, key.tree, key.setting
