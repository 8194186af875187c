"""What a comparison shows, in sections: the answer first, then pictures, then everything else; and its files.

`assets/comparison.html` and `comparison.md` lay them out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from lantern_hpu.bench.columns import EAGER, NAMES, OF_IMAGES, PARTS, SpeedRow
from lantern_hpu.bench.compare_plots import Chart
from lantern_hpu.bench.comparison import BEST, ComparedRun, Comparison, setting
from lantern_hpu.results.tables import Columns, Table, amount, figure

AGAINST_AR = " x ar: speed against ar of the same device, graph mode and batch."
AGAINST_FIRST = " x A: speed against the first column."
DETAILS: Columns = {
    **NAMES,
    **OF_IMAGES,
    "p95 of a step": lambda row: figure(row.p95_ms_per_step),
    "state": lambda row: amount(row.state_bytes),
    "peak so far": lambda row: (
        "" if row.peak_memory_bytes is None else amount(row.peak_memory_bytes)
    ),
    "start-up, s": lambda row: figure(row.startup_s),
    "captures after warm-up": lambda row: str(row.recompiles_after_warmup),
}


@dataclass(frozen=True)
class Section:
    """Whatever of this there is, in this order."""

    title: str
    picture: Chart | None = None
    text: str = ""
    table: Table | None = None
    entries: Sequence[str] = ()  # of a list
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class Document:
    """What is written as a page and as Markdown."""

    title: str
    lead: str
    sections: list[Section]


def document(comparison: Comparison, pictures: Sequence[Chart]) -> Document:
    """The whole of a comparison."""
    count = len(comparison.runs)
    title = f"{comparison.runs[0].report['model']}: {count} run{'s' * (count > 1)} measured"
    return Document(title, lead(comparison), list(sections(comparison, pictures)))


def lead(comparison: Comparison) -> str:
    """What was compared, in a sentence or two."""
    report = comparison.runs[0].report
    settings, tokens = report["settings"], report["sizes"]["tokens"]
    about = ", ".join(f"{name} {value:g}" for name, value in settings["sampling"].items())
    what = "steps of random weights" if comparison.of_steps else "whole images, prompt to pixels"
    return (
        f"lantern_hpu.bench, {what}, {tokens} tokens an image; the same weights, sampling ({about}), seeds "
        f"and prompts on each device. Warm-up: {settings['warm_up']}."
    )


def sections(comparison: Comparison, pictures: Sequence[Chart]) -> Iterator[Section]:
    yield Section("Side by side", text=about_main(comparison), table=main_table(comparison))
    for picture in pictures:
        yield Section(picture.title, picture, picture.caption)
    yield Section(
        "Devices",
        text="Copies and matrices are measured: one tensor copied to another, and square products.",
        table=devices_table(comparison),
    )
    yield Section(
        "All figures",
        text="Times are of an image; x eager is the same method's eager run. The floor is what reading weights and "
        "caches, or multiplying them, takes at least by the measured rates, and `reached` is its share of a step. "
        "The peak is the process's so far.",
        table=details_table(comparison),
    )
    for title, entries in notes(comparison).items():
        yield Section(title, entries=entries)
    commands = [run.report["command"] for run in comparison.runs]
    yield Section("How it was measured", commands=commands)


def notes(comparison: Comparison) -> dict[str, list[str]]:
    """Lists under their titles; empty ones are left out."""
    lines = [f"{run.title}: {note}" for run in comparison.runs for note in run.report["notes"]]
    result = {"What differs": list(comparison.differences), "Notes of the runs": lines}
    return {title: entries for title, entries in result.items() if entries}


# ------------------------------------------------------------------------------------ tables


def letters(comparison: Comparison) -> list[tuple[str, ComparedRun]]:
    """Each run with a short name."""
    names = [*ascii_uppercase, *(f"Z{i}" for i in range(26, len(comparison.runs)))]
    return list(zip(names, comparison.runs, strict=False))


def heads(comparison: Comparison) -> list[str]:
    """Of a column for each run."""
    return [f"{letter}: {run.title}" for letter, run in letters(comparison)]


def main_table(comparison: Comparison) -> Table:
    """A line for each key, a column for each run."""
    lines = []
    for key in comparison.keys:
        rows = [run.find(key) for run in comparison.runs]
        cells = [run_cell(row, rows[0] if i else None) for i, row in enumerate(rows)]
        lines.append([key.method, key.tree, key.graphs, str(key.batch), key.dtype, *cells])
    return Table(["method", "tree", "graphs", "batch", "format", *heads(comparison)], lines)


def run_cell(row: SpeedRow | None, first: SpeedRow | None) -> str:
    """What one run has to say in a row: its time, then its speeds."""
    if row is None:
        return ""
    said = [f"{figure(row.cost)} {row.unit.split()[0]}"]
    if row.speed_against_ar is not None and row.method != "ar":
        said.append(f"{row.speed_against_ar:.2f} x ar")
    if first is not None:
        said.append(f"{first.cost / row.cost:.2f} x A")
    return ", ".join(said)


def about_main(comparison: Comparison) -> str:
    """What the main table says of itself."""
    modes = {key.graphs for key in comparison.keys}
    named = "; ".join(f"{run.best} on {run.title}" for run in comparison.runs)
    best = f" The best mode is {named}." if BEST in modes and modes != {EAGER} else ""
    against = "" if comparison.of_steps else AGAINST_AR
    against += AGAINST_FIRST if len(comparison.runs) > 1 else ""
    return (
        f"Mean time ({comparison.rows[0].unit}).{against} What differs in number format, tree or setting stands in "
        f"rows of its own.{best}"
    )


def devices_table(comparison: Comparison) -> Table:
    """What each run is of: a column for each."""
    columns = [device_facts(run) for run in comparison.runs]
    lines = [[fact, *(column[fact] for column in columns)] for fact in columns[0]]
    return Table(["", *heads(comparison)], lines)


def device_facts(run: ComparedRun) -> dict[str, str]:
    """What there is to say of one."""
    report = run.report
    rates, environment, host = report["rates"], report["environment"], report["host"]
    bf16 = rates["bf16_operations_per_s"]
    cores = f", {host['cores']} cores" if host["cores"] else ""
    return {
        "from": run.origin,
        "number format": run.dtype,
        "best graph mode": run.best,
        "copies memory": f"{figure(rates['copy_bytes_per_s'] / 1e9)} GB/s",
        "bfloat16 matrices": f"{figure(bf16 / 1e12)} TFLOP/s" if bf16 else "",
        "matrices in the number format": f"{figure(rates['operations_per_s'] / 1e12)} TFLOP/s",
        "import and load": f"{figure(sum(report['startup'].values()))} s",
        "weights": amount(report["weights_bytes"]),
        "host": f"{host['processor']}{cores}, {host['system']}",
        "versions": f"lantern_hpu {environment['lantern_hpu']}, torch {environment['torch']}",
        "date": report["date"],
    }


def details_table(comparison: Comparison) -> Table:
    """Every row with its figures."""
    lines = [
        [letter, *(say(row) for say in DETAILS.values())]
        for letter, run in letters(comparison)
        for row in run.rows
    ]
    return Table(["", *DETAILS], lines)


# ------------------------------------------------------------------------------------ files


def csv_text(comparison: Comparison) -> str:
    """A line for each row of each run, with all figures."""
    lines = []
    for run in comparison.runs:
        about = {"device": run.title, "origin": run.origin, "model": run.report["model"]}
        for row in run.rows:
            said = {"format": run.dtype, "method": row.method, "tree": row.tree}
            plain = row.as_json().items()
            figures = {name: x for name, x in plain if not isinstance(x, dict | list)}
            parts = {f"eager_{part}_ms": row.eager_step_ms[part] for part in PARTS}
            lines.append(about | said | {"setting": setting(row)} | figures | parts)
    out = io.StringIO()
    writer = csv.DictWriter(out, lines[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()
