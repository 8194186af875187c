"""Put reports of `lantern-hpu bench` side by side: a table and a chart.

    lantern-hpu compare cpu.json h100.json --output comparison

Reports of different models, samplings, seeds or prompts are refused, and the error says what differs. The same files
give the same bytes.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, NamedTuple

from lantern_hpu.commands.options import Parser, add_fields, from_args
from lantern_hpu.errors import OptionError, OutputError, exit_code
from lantern_hpu.fields import option
from lantern_hpu.files import write_file
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.results.tables import Table, figure
from lantern_lab.measure import plots
from lantern_lab.measure.reports import NAMED, SAME, Report, read_report, rows_of
from lantern_lab.measure.rows import EAGER, Row, in_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BEST = "best mode"
OF_THE_MODEL = ("weights", "drafter", "tokens of an image", "sampling")


class Key(NamedTuple):
    """What must be equal of all figures of a table's row."""

    method: str
    tree: str
    setting: str  # the method with its relaxation
    dtype: str
    graphs: str  # EAGER, BEST, or another mode by its name
    batch: int


@dataclass(frozen=True)
class Run:
    """A column: a report under the title that readers know it by, which is unique."""

    title: str
    report: Report
    rows: tuple[Row, ...]

    @property
    def best(self) -> str:
        return str(self.report["graphs"]["best"])

    def key(self, row: Row) -> Key:
        dtype = str(self.report["dtype"])
        return Key(row.method, row.tree, row.name, dtype, row.graphs, row.batch_size)

    def find(self, key: Key) -> Row | None:
        """Its row of a key, if it has one."""
        key = key._replace(graphs=self.best) if key.graphs == BEST else key
        return next((row for row in self.rows if self.key(row) == key), None)


# ------------------------------------------------------------------------------------ what may be compared


def check_comparable(files: Sequence[Path], reports: Sequence[Report]) -> None:
    """Raise an OptionError that lists what keeps reports from being compared."""

    def brief(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        return text if len(text) <= 60 else text[:57] + "..."

    for file, report in zip(files, reports, strict=True):
        if "emulated" in str(report["environment"].get("card")):
            what = f"{file} is of an emulated device"
            raise OptionError(what, "its times say nothing about the real one")
    first = {name: get(reports[0]) for name, get in SAME.items()}
    for file, report in zip(files[1:], reports[1:], strict=True):
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


def differences(runs: Sequence[Run]) -> Iterator[str]:
    """What differs between runs that may be compared all the same."""
    first = runs[0]
    for run in runs[1:]:
        for name, (get, why) in NAMED.items():
            mine, other = get(first.report), get(run.report)
            if mine != other:
                yield f"{name}: {mine} on {first.title}, {other} on {run.title} ({why})"
        here, there = ({run_.key(row)[:3] for row in run_.rows} for run_ in (first, run))
        for line in sorted(here ^ there):
            side = first if line in here else run
            yield f"{line[2]} with the tree {line[1]}: on {side.title} alone"


def load(files: Sequence[Path]) -> list[Run]:
    file, count = Counter(file.resolve() for file in files).most_common(1)[0]
    if count > 1:
        raise OptionError(f"{file} is given twice")
    reports = [read_report(file) for file in files]
    check_comparable(files, reports)
    runs = zip(titles_of(files, reports), reports, map(rows_of, reports), strict=True)
    return [Run(*run) for run in runs]


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


def keys_of(runs: Sequence[Run]) -> list[Key]:
    """The rows of the table, by number format, batch size, graph mode, method and tree.

    A device whose best mode is its eager one is compared with the others' best, and with their eager runs if there
    are any; alone, its rows are called what they are.
    """
    result = set()
    for run in runs:
        dtype = run.report["dtype"]
        others = [x for x in runs if x.report["dtype"] == dtype and x.best != EAGER]
        eager = any(row.graphs == EAGER for other in others for row in other.rows)
        for row in run.rows:
            kinds = {BEST if row.graphs == run.best else row.graphs}
            if run.best == row.graphs == EAGER:
                kinds = ({BEST} if others else {EAGER}) | ({EAGER} if eager else set())
            result |= {run.key(row)._replace(graphs=kind) for kind in kinds}
    methods, modes = list(METHODS), {EAGER: 0, BEST: 1}

    def order(key: Key) -> tuple[Any, ...]:
        mode = modes.get(key.graphs, 2), key.graphs
        line = methods.index(key.method), in_numbers(key.tree), key.setting
        return key.dtype, key.batch, *mode, *line

    return sorted(result, key=order)


# ------------------------------------------------------------------------------------ the table


def main_table(runs: Sequence[Run]) -> str:
    """A line for each key, a column for each run: its time, then its speeds."""
    lines = []
    for key in keys_of(runs):
        rows = [run.find(key) for run in runs]
        cells = [run_cell(row, rows[0] if i else None) for i, row in enumerate(rows)]
        lines.append([key.setting, key.tree, key.graphs, str(key.batch), key.dtype, *cells])
    letters = [*ascii_uppercase, *(f"Z{i}" for i in range(26, len(runs)))]
    heads = [f"{letter}: {run.title}" for letter, run in zip(letters, runs, strict=False)]
    return Table(["method", "tree", "graphs", "batch", "format", *heads], lines).markdown()


def run_cell(row: Row | None, first: Row | None) -> str:
    if row is None:
        return ""
    seconds, gain = row["seconds_per_image"], row["speed_against_ar"]
    said = [f"{figure(seconds)} s"]
    if gain is not None and row.method != "ar":
        said.append(f"{gain:.2f} x ar")
    if first is not None:
        said.append(f"{first['seconds_per_image'] / seconds:.2f} x A")
    return ", ".join(said)


def document(runs: Sequence[Run], chart: str) -> str:
    """The Markdown page: the table, the chart, what differs, and how it was measured."""
    report = runs[0].report
    settings, tokens = report["settings"], report["sizes"]["tokens"]
    about = ", ".join(f"{name} {value:g}" for name, value in settings["sampling"].items())
    best = "; ".join(f"{run.best} on {run.title}" for run in runs)
    first = " x A: speed against the first column." if len(runs) > 1 else ""
    parts = [
        f"# {report['model']}: {len(runs)} run{'s' * (len(runs) > 1)} measured",
        f"Seconds an image, prompt to pixels, {tokens} tokens; the same weights, sampling ({about}), seeds and prompts "
        f"on each device. Warm-up: {settings['warm_up']}. x ar: speed against ar of the same device, graph mode and "
        f"batch.{first} Best modes: {best}.",
        main_table(runs),
        f"![Seconds an image, by method and device]({chart})",
        *(f"- {note}" for note in notes(runs)),
        *(f"    {run.report['command']}" for run in runs),
    ]
    return "\n\n".join(parts) + "\n"


def notes(runs: Sequence[Run]) -> list[str]:
    said = [f"{run.title}: {note}" for run in runs for note in run.report["notes"]]
    return [*differences(runs), *said]


# ------------------------------------------------------------------------------------ the chart


def draw_chart(runs: Sequence[Run]) -> bytes:
    with plots.in_style("compare"):
        return plots.saved(latency(runs), "png")


def latency(runs: Sequence[Run]) -> Figure:
    """Bars of seconds an image by method, one a device in its best mode; a panel for each batch size.

    The thin line reaches to the 95th percentile. A run alone is drawn in all its modes.
    """
    rows = [row for run in runs for row in run.rows]
    methods, batches = list(METHODS), sorted({row.batch_size for row in rows})
    lines = sorted({run.key(row)[:3] for run in runs for row in run.rows})
    lines.sort(key=lambda line: (methods.index(line[0]), line[2], in_numbers(line[1])))
    modes = {run.title: list(dict.fromkeys(row.graphs for row in run.rows)) for run in runs}
    series = [(run, run.best if run.best in (own := modes[run.title]) else own[0]) for run in runs]
    if len(runs) == 1:
        series = [(runs[0], mode) for mode in modes[runs[0].title]]
    height = 1.3 + len(lines) * (0.22 + 0.2 * len(series)) + 0.2 * len(series)
    size = 3.4 + 3.3 * len(batches), max(height, 3)
    result, panels = plots.panels(*size, len(batches))
    panels[0].set_yticks(range(len(lines)), names_of(lines))
    panels[0].set_ylim(len(lines) - 0.45, -0.55)
    panels[0].set_ylabel("method")
    seconds = [row["seconds_per_image"] for row in rows]
    most, log = max(map(slowest, rows)), plots.far_apart(seconds)
    for batch, axes in zip(batches, panels, strict=True):
        axes.set_title(f"batch {batch}")
        axes.grid(axis="y", visible=False)
        axes.set_xscale("log" if log else "linear")
        for index, (run, mode) in enumerate(series):
            keys = [Key(*line, str(run.report["dtype"]), mode, batch) for line in lines]
            draw_bars(axes, run, keys, index, 0.8 / len(series))
        axes.set_xlabel("s an image" + (", log scale" if log else ""))
        axes.set_xlim(*((min(seconds) / 2, most * 4) if log else (0, most * 1.22)))
        if log:
            plots.plain_ticks(axes.xaxis)
    plots.legend_under(result, panels[0], 1)
    return result


def names_of(lines: Sequence[tuple[Any, ...]]) -> list[str]:
    """The settings as one writes them, with the tree or window where a method occurs with several."""
    trees = {name: {other[1] for other in lines if other[2] == name} for _, _, name in lines}
    return [
        f"{name}@{tree.removeprefix(method + ':')}" if len(trees[name]) > 1 else name
        for method, tree, name in lines
    ]


def slowest(row: Row) -> float:
    """The 95th percentile, or the mean where a single slow batch makes that more."""
    return max(row["seconds_per_image"], row["p95_seconds_per_image"])


def draw_bars(axes: Axes, run: Run, keys: Sequence[Key], index: int, thick: float) -> None:
    """The bars of one run in one mode, with their values."""
    rows = {i: row for i, key in enumerate(keys) if (row := run.find(key))}
    seconds = [row["seconds_per_image"] for row in rows.values()]
    bars = axes.barh(
        [i - 0.4 + thick * (index + 0.5) for i in rows],
        seconds,
        thick * 0.92,
        color=f"C{index}",
        label=f"{run.title}, {keys[0].dtype}, {keys[0].graphs}",
        xerr=[
            [0.0] * len(rows),
            [slowest(row) - row["seconds_per_image"] for row in rows.values()],
        ],
        error_kw={"ecolor": "#333333", "elinewidth": 1},
    )
    axes.bar_label(bars, [figure(s) for s in seconds], padding=4, fontsize=8)


NAME = "comparison"  # of both files


@dataclass(frozen=True)
class CompareRequest:
    """What is compared, and where the files go."""

    reports: tuple[Path, ...] = option(
        MISSING, "a report of `lantern-hpu bench`", metavar="REPORT.json", positional=True
    )
    output: Path = option(MISSING, "folder for the table and the chart", metavar="FOLDER")
    force: bool = option(False, "write into an existing folder")


def make_parser() -> argparse.ArgumentParser:
    about = "Compare benchmark reports: a table (Markdown) and a chart (PNG)."
    parser = Parser("lantern-hpu compare", description=about)
    add_fields(parser, CompareRequest)
    return parser


def compare_reports(asked: CompareRequest) -> None:
    folder = asked.output
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", "a folder cannot be written there")
    if folder.exists() and not asked.force:
        why = "existing files are not overwritten"
        raise OutputError(f"{folder} exists", why, "--force or another --output")
    runs = load(asked.reports)
    chart = draw_chart(runs)
    print("\n".join([main_table(runs), *(f"note: {note}" for note in notes(runs))]))
    write_file(folder / f"{NAME}.md", document(runs, f"{NAME}.png").encode(), asked.force)
    write_file(folder / f"{NAME}.png", chart, asked.force)
    print(f"wrote {folder / NAME}.md and .png")


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return exit_code(lambda: compare_reports(from_args(CompareRequest, args)))
