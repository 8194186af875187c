"""Several reports beside each other: what may stand in one row, what differs, and what is only projected.

A row is a method with its tree and relaxation, in a number format, graph mode and batch size. Runs of another model,
sampling, seed or prompts are never put beside each other; of another number format or setting they get rows of their
own. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lantern_hpu.config import METHODS
from lantern_hpu.errors import OptionError
from lantern_hpu.report import Report, read_report
from lantern_hpu.roofline import Accelerator, Rates, Shape, Sizes, projected_ms, published

LABEL = "projected"  # on everything that was not measured
EAGER, BEST = "eager", "best mode"
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A column: a report, or a projection of one onto another device.

    Attributes:
        title: what readers call it; unique, and a projection's says that it is one.
        best: the device's best graph mode.
        origin: the file, or what a projection was calibrated on.
    """

    title: str
    rows: tuple[Row, ...]
    dtype: str
    best: str
    origin: str
    report: Report | None  # None for a projection

    @property
    def projected(self) -> bool:
        return self.report is None

    @property
    def kind(self) -> str:
        """What its figures are."""
        return LABEL if self.projected else "measured"

    def find(self, key: Key) -> Row | None:
        """Its row of a key, if it has one."""
        if key.dtype != self.dtype:
            return None
        mode = self.best if key.graphs == BEST else key.graphs
        return next(
            (row for row in self.rows if row["graphs"] == mode and alike(row, key)),
            None,
        )


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

    runs: tuple[Run, ...]
    keys: tuple[Key, ...]
    differences: tuple[str, ...]
    assumptions: tuple[str, ...]

    @property
    def measured(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if not run.projected)

    @property
    def reports(self) -> list[Report]:
        return [run.report for run in self.runs if run.report is not None]

    @property
    def of_steps(self) -> bool:
        """Whether steps alone were timed, of random weights."""
        return self.reports[0]["random_weights"] is not None

    @property
    def unit(self) -> str:
        """Of `cost`."""
        return "ms a step" if self.of_steps else "s an image"

    def cost(self, row: Row) -> float:
        """What rows are compared by: seconds an image, or milliseconds of a step."""
        value: float = row["ms_per_step"] if self.of_steps else row["seconds_per_image"]
        return value

    @property
    def batches(self) -> list[int]:
        return sorted({key.batch for key in self.keys})


def setting(row: Row) -> str:
    """A relaxation as text; exact ones are alike whatever their numbers."""
    about = row["relaxation"]
    if row["method"] not in ("lantern", "lantern++"):
        return "exact"
    return ", ".join(f"{name} {about[name]}" for name in sorted(about))


def alike(row: Row, key: Key) -> bool:
    """Whether a row is of a key, but for number format and graph mode."""
    named = (row["method"], row["tree"], setting(row), row["batch_size"])
    return named == (key.method, key.tree, key.setting, key.batch)


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
# What may differ, and is said
SAID: dict[str, tuple[Callable[[Report], Any], str]] = {
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
            what = f"{files[0]} and {file} cannot stand in one row"
            hint = "compare reports of one model, measured with the same options"
            raise OptionError(what, "; ".join(wrong), hint)


def differences(runs: Sequence[Run]) -> Iterator[str]:
    """What differs between measured runs that may be compared all the same."""
    first = runs[0]
    assert first.report is not None
    for run in runs[1:]:
        if run.report is None:
            continue
        for name, (get, why) in SAID.items():
            mine, other = get(first.report), get(run.report)
            if mine != other:
                yield f"{name}: {mine} on {first.title}, {other} on {run.title} ({why})"
        here, there = ({(r["method"], r["tree"], setting(r)) for r in x.rows} for x in (first, run))
        for method, tree, told in sorted(here ^ there):
            side = first if (method, tree, told) in here else run
            yield f"{method} with the tree {tree} ({told}): on {side.title} alone"


# ------------------------------------------------------------------------------------ putting them together


def load(files: Sequence[Path], accelerators: Sequence[Accelerator] = ()) -> Comparison:
    """The comparison of these files, with projections calibrated on the first.

    Raises:
        OptionError: a file cannot be read (see `report`), is given twice, or cannot be compared with the first;
            or an accelerator that is to be projected was measured.
    """
    resolved = [file.resolve() for file in files]
    for file in files:
        if resolved.count(file.resolve()) > 1:
            raise OptionError(f"{file} is given twice")
    reports = [read_report(file) for file in files]
    check_comparable(files, reports)
    runs = [measured_run(file, report) for file, report in zip(files, reports, strict=True)]
    runs = distinct(runs, files)
    for accelerator in accelerators:
        for run, report in zip(runs, reports, strict=True):
            if report["environment"].get("card") in accelerator.cards:
                raise OptionError(
                    f"--project {accelerator.name} is needless", f"{run.origin} measured it"
                )
    guessed = [project(runs[0], accelerator) for accelerator in accelerators]
    everything = (*runs, *guessed)
    return Comparison(
        everything,
        tuple(keys_of(everything)),
        tuple(differences(runs)),
        tuple(assumptions(runs[0], accelerators)),
    )


def measured_run(file: Path, report: Report) -> Run:
    return Run(
        report["device_title"],
        tuple(report["rows"]),
        report["dtype"],
        report["graphs"]["best"],
        file.name,
        report,
    )


def distinct(runs: Sequence[Run], files: Sequence[Path]) -> list[Run]:
    """Runs of one device tell themselves apart by number format, or by their files."""
    titles = [run.title for run in runs]
    formats = [(run.title, run.dtype) for run in runs]
    found = []
    for run, file in zip(runs, files, strict=True):
        title = run.title
        if formats.count((run.title, run.dtype)) > 1:
            title = f"{run.title} ({file.stem})"
        elif titles.count(run.title) > 1:
            title = f"{run.title} ({run.dtype})"
        found.append(replace(run, title=title))
    names = [run.title for run in found]
    # Files of one name in several folders
    return [
        replace(run, title=f"{run.title} {i + 1}") if names.count(run.title) > 1 else run
        for i, run in enumerate(found)
    ]


def keys_of(runs: Sequence[Run]) -> list[Key]:
    """The rows of the table, by method, tree, number format, graph mode and batch size.

    A device whose best mode is its eager one stands beside the others' best, and beside their eager runs if there
    are any; alone, its rows are called what they are.
    """
    found = set()
    for run in runs:
        others = [other for other in runs if other.dtype == run.dtype and other.best != EAGER]
        for row in run.rows:
            kinds = {BEST if row["graphs"] == run.best else row["graphs"]}
            if run.best == EAGER and row["graphs"] == EAGER:
                eager = any(r["graphs"] == EAGER for other in others for r in other.rows)
                kinds = ({BEST} if others else {EAGER}) | ({EAGER} if eager else set())
            for kind in kinds:
                named = (row["method"], row["tree"], setting(row), run.dtype, kind)
                found.add(Key(*named, row["batch_size"]))
    order = list(METHODS)

    def place(key: Key) -> tuple[Any, ...]:
        graphs = {EAGER: 0, BEST: 1}.get(key.graphs, 2)
        named = (order.index(key.method), key.tree, key.setting)
        return key.dtype, key.batch, graphs, key.graphs, *named

    return sorted(found, key=place)


# ------------------------------------------------------------------------------------ projections


def calibration(report: Report) -> tuple[Rates, bool]:
    """The rates that a projection starts from, and whether they are published ones."""
    card = published(str(report["environment"].get("card")))
    if card is not None:
        return card.rates, True
    rates = report["rates"]
    return Rates(rates["copy_bytes_per_s"], rates["operations_per_s"]), False


def project(run: Run, accelerator: Accelerator) -> Run:
    """A run's best mode on an accelerator that nobody measured; see `assumptions`."""
    report = run.report
    assert report is not None
    own, _ = calibration(report)
    mode = calibrated_mode(run)
    sizes = Sizes(**report["sizes"])
    rows = []
    for row in run.rows:
        if row["graphs"] != mode:
            continue
        shape, before = Shape.from_json(row["step_passes"]), row["ms_per_step"]
        ms = projected_ms(before, sizes, shape, row["batch_size"], own, accelerator)
        seconds = None
        if row["seconds_per_image"] is not None:
            steps = row["steps_s_per_image"]
            rest = max(row["seconds_per_image"] - steps, 0.0)
            seconds = steps * ms / before + rest * own.rate / accelerator.rate
        named = ("method", "tree", "relaxation", "batch_size", "tokens_per_step")
        rows.append(
            {name: row[name] for name in named}
            | {
                "graphs": BEST,
                "ms_per_step": ms,
                "seconds_per_image": seconds,
                "images_per_second": None if seconds is None else 1 / seconds,
            }
        )
    title = f"{accelerator.title} ({LABEL})"
    origin = f"{LABEL} from {run.title}"
    return Run(title, tuple(with_speeds(rows)), "bfloat16", BEST, origin, None)


def with_speeds(rows: Sequence[Row]) -> list[Row]:
    """Speed against `ar` of the same batch, where images were timed."""
    base = {row["batch_size"]: row["seconds_per_image"] for row in rows if row["method"] == "ar"}
    found = []
    for row in rows:
        against, own = base.get(row["batch_size"]), row["seconds_per_image"]
        found.append(row | {"speed_against_ar": against / own if against and own else None})
    return found


def calibrated_mode(run: Run) -> str:
    """The graph mode that projections start from: the best that was measured."""
    modes = [row["graphs"] for row in run.rows]
    return run.best if run.best in modes else str(modes[0])


def assumptions(run: Run, accelerators: Sequence[Accelerator]) -> Iterator[str]:
    """What every projection rests on."""
    if not accelerators:
        return
    report = run.report
    assert report is not None
    rates, known = calibration(report)
    mode = calibrated_mode(run)
    for accelerator in accelerators:
        yield (
            f"{accelerator.title} ({LABEL}): published peaks of {accelerator.bandwidth / 1e12:.3g} TB/s and "
            f"{accelerator.rate / 1e12:.4g} TFLOP/s bfloat16, dense. Source: {accelerator.source}."
        )
    start = (
        "published peaks" if known else "measured rates, for want of published peaks in our list"
    )
    yield (
        f"Calibrated on {run.title} ({run.origin}, {run.dtype}, {mode}), by its {start}: "
        f"{rates.bandwidth / 1e12:.3g} TB/s, {rates.rate / 1e12:.3g} TFLOP/s. A step is taken to miss its floor "
        "(bytes over bandwidth, operations over rate) by the same factor as there, for the same method and batch."
    )
    yield "Weights and caches in bfloat16; tokens a step as measured there; batches of the same size."
    if report["random_weights"] is None:
        yield "What is not a step - text, prefill, pixels - is scaled by the matrix rate alone."
    yield (
        "Not modelled: kernels and compilers, launches, caches, clocks and power, and whether the model fits "
        "(lantern_hpu.plan counts that). A small model, whose steps wait for launches and not for bytes or "
        "operations, comes out far too fast."
    )
    if mode == EAGER:
        yield (
            "The calibration is an eager run: what its host costs is scaled as if it were the device's work, so "
            "a recorded run may differ much."
        )
    if not known:
        yield (
            "A device that is not in the list may be of quite another kind: take the projections for orders of "
            "magnitude."
        )
