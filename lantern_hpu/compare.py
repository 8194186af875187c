"""Put reports of `lantern_hpu.bench` beside each other: a table, plots, and a page to send to a colleague.

    python -m lantern_hpu.compare cpu.json h100.json --output comparison
    python -m lantern_hpu.compare h100.json --project gaudi2,gaudi3 --output comparison

Reports of different models, samplings, seeds or prompts are refused, and the error says what differs. Accelerators
that nobody measured can be added as projections: published peaks, calibrated on the first report, labelled
`projected` wherever they appear. The same files give the same bytes.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase

from lantern_hpu.bench import markdown, split
from lantern_hpu.comparison import BEST, EAGER, LABEL, Comparison, Key, Row, Run, load, setting
from lantern_hpu.errors import OutputError, exit_code
from lantern_hpu.measure import PARTS
from lantern_hpu.page import Table, page
from lantern_hpu.plots import Picture, check_library, draw
from lantern_hpu.roofline import accelerators, find_accelerators

NAME = "comparison"  # of the table and the page
AGAINST_AR = " x ar: speed against ar of the same device, graph mode and batch."
FIGURES = (
    "images seconds_per_image p50_seconds_per_image p95_seconds_per_image p50_batch_s p95_batch_s images_per_second "
    "tokens_per_step accepted_per_step ms_per_step p50_ms_per_step p95_ms_per_step speed_against_ar "
    "speed_against_eager host_share floor_ms floor_ratio floor_bound verify_floor_ms verify_floor_ratio state_bytes "
    "peak_memory_bytes startup_s warmup_s capture_s host_reads_per_image recompiles_after_warmup"
).split()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.compare",
        description="Put reports of lantern_hpu.bench beside each other: table, plots, page.",
    )
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT.json")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--project",
        metavar="NAMES",
        help=f"comma-separated accelerators to add as projections: {', '.join(accelerators())}",
    )
    parser.add_argument("--force", action="store_true", help="write into a folder that exists")
    return parser


# ------------------------------------------------------------------------------------ tables


def letters(comparison: Comparison) -> list[str]:
    """A short name for each run."""
    return [ascii_uppercase[i] if i < 26 else f"Z{i}" for i in range(len(comparison.runs))]


def figure(value: float | None, unit: str = "", digits: int = 3) -> str:
    """A number with its unit; empty where there is none."""
    if value is None:
        return ""
    number = f"{value:.0f}" if abs(value) >= 100 else f"{value:.{digits}g}"
    return f"{number} {unit}".strip()


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def amount(value: int | None) -> str:
    """Bytes in words."""
    return "" if value is None else f"{value / 2**20:,.0f} MiB"


def main_table(comparison: Comparison) -> Table:
    """A line for each key, a column for each run."""
    named = letters(comparison)
    head = ["method", "tree", "graphs", "batch", "format"]
    head += [f"{letter}: {run.title}" for letter, run in zip(named, comparison.runs, strict=True)]
    lines = []
    for key in comparison.keys:
        first = comparison.runs[0].find(key)
        cells = [
            cell(comparison, run, key, first if i else None)
            for i, run in enumerate(comparison.runs)
        ]
        lines.append([key.method, key.tree, key.graphs, str(key.batch), key.dtype, *cells])
    return head, lines


def cell(comparison: Comparison, run: Run, key: Key, first: Row | None) -> str:
    """What one run has to say in a row: its time, then its speeds."""
    row = run.find(key)
    if row is None:
        return ""
    time = comparison.cost(row)
    said = [figure(time, comparison.unit.split()[0])]
    if row["speed_against_ar"] is not None and key.method != "ar":
        said.append(f"{row['speed_against_ar']:.2f} x ar")
    if first is not None:
        said.append(f"{comparison.cost(first) / time:.2f} x A")
    return ", ".join(said) + (f" ({LABEL})" if run.projected else "")


def devices_table(comparison: Comparison) -> Table:
    """What each run is of: a column for each."""
    named = zip(letters(comparison), comparison.runs, strict=True)
    head = ["", *(f"{letter}: {run.title}" for letter, run in named)]
    columns = [device_facts(run) for run in comparison.runs]
    return head, [[fact, *(column.get(fact, "") for column in columns)] for fact in columns[0]]


def device_facts(run: Run) -> dict[str, str]:
    """What there is to say of one; the first run, which has them all, sets the order."""
    report = run.report
    facts = {"kind": run.kind, "from": run.origin, "number format": run.dtype}
    if report is None:
        return facts
    rates, environment, host = report["rates"], report["environment"], report["host"]
    bf16 = rates["bf16_operations_per_s"]
    cores = f", {host['cores']} cores" if host["cores"] else ""
    return facts | {
        "best graph mode": run.best,
        "copies memory": figure(rates["copy_bytes_per_s"] / 1e9, "GB/s"),
        "bfloat16 matrices": figure(bf16 and bf16 / 1e12, "TFLOP/s"),
        "matrices in the number format": figure(rates["operations_per_s"] / 1e12, "TFLOP/s"),
        "import and load": figure(sum(report["startup"].values()), "s"),
        "weights": amount(report["weights_bytes"]),
        "host": f"{host['processor']}{cores}, {host['system']}",
        "versions": f"lantern_hpu {environment['lantern_hpu']}, torch {environment['torch']}",
        "date": str(report["date"]),
    }


def details_table(comparison: Comparison) -> Table:
    """Every measured row with its figures."""
    head = (
        "|method|tree|graphs|batch|p50, s|p95, s|images/s|tokens a step|ms a step|p95, ms|x ar|x eager|host|floor, ms"
        "|reached|state|peak so far|start-up, s|captures after warm-up"
    ).split("|")
    lines = []
    for letter, run in zip(letters(comparison), comparison.runs, strict=True):
        for row in run.rows if not run.projected else ():
            lines.append(
                [
                    *(letter, row["method"], row["tree"], row["graphs"], str(row["batch_size"])),
                    figure(row["p50_seconds_per_image"]),
                    figure(row["p95_seconds_per_image"]),
                    figure(row["images_per_second"]),
                    figure(row["tokens_per_step"]),
                    figure(row["ms_per_step"]),
                    figure(row["p95_ms_per_step"]),
                    figure(row["speed_against_ar"]),
                    figure(row["speed_against_eager"]),
                    percent(row["host_share"]),
                    figure(row["floor_ms"]),
                    percent(row["floor_ratio"]),
                    amount(row["state_bytes"]),
                    amount(row["peak_memory_bytes"]),
                    figure(row["startup_s"]),
                    str(row["recompiles_after_warmup"]),
                ]
            )
    return head, lines


def csv_text(comparison: Comparison) -> str:
    """A line for each row of each run, with all figures."""
    out = io.StringIO()
    named = ["device", "kind", "origin", "model", "format", "method", "tree", "setting", "graphs"]
    parts = [f"eager_{part}_ms" for part in PARTS]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*named, "batch_size", *FIGURES, *parts])
    model = comparison.reports[0]["model"]
    for run in comparison.runs:
        for row in run.rows:
            start = [run.title, run.kind, run.origin, model, run.dtype]
            about = [row["method"], row["tree"], setting(row), row["graphs"], row["batch_size"]]
            shares = row.get("eager_step_ms", {})
            figures = [row.get(name) for name in FIGURES]
            writer.writerow([*start, *about, *figures, *(shares.get(part) for part in PARTS)])
    return out.getvalue()


# ------------------------------------------------------------------------------------ texts


def title_of(comparison: Comparison) -> str:
    """The model, and how many devices."""
    measured, guessed = len(comparison.measured), len(comparison.runs) - len(comparison.measured)
    said = f"{comparison.reports[0]['model']}: {measured} run{'s' * (measured > 1)} measured"
    return said + (f", {guessed} device{'s' * (guessed > 1)} {LABEL}" if guessed else "")


def lead_of(comparison: Comparison) -> str:
    """What was compared, in a sentence or two."""
    settings, sizes = comparison.reports[0]["settings"], comparison.reports[0]["sizes"]
    about = ", ".join(f"{name} {value:g}" for name, value in settings["sampling"].items())
    what = "steps of random weights" if comparison.of_steps else "whole images, prompt to pixels"
    return (
        f"lantern_hpu.bench, {what}, {sizes['tokens']} tokens an image; the same weights, sampling ({about}), seeds "
        f"and prompts on each device. Warm-up: {settings['warm_up']}."
    )


def sentences(comparison: Comparison) -> dict[str, str]:
    """What each table says of itself."""
    modes = {key.graphs for key in comparison.keys}
    best = {run.title: run.best for run in comparison.measured}
    named = "; ".join(f"{mode} on {title}" for title, mode in best.items())
    about = f" The best mode is {named}." if BEST in modes and modes != {EAGER} else ""
    against = "" if comparison.of_steps else AGAINST_AR
    against += " x A: speed against the first column." if len(comparison.runs) > 1 else ""
    return {
        "Side by side": (
            f"Mean time ({comparison.unit}).{against} What differs in number format, tree or setting stands in "
            f"rows of its own.{about}"
        ),
        "Devices": "Copies and matrices are measured: one tensor copied to another, and square products.",
        "All figures": (
            "Times are of an image; x eager is the same method's eager run. The floor is what reading weights and "
            "caches, or multiplying them, takes at least by the measured rates, and `reached` is its share of a step. "
            "The peak is the process's so far."
        ),
    }


def notes_of(comparison: Comparison) -> dict[str, list[str]]:
    """Lists under their titles."""
    told = [
        f"{run.title}: {note}"
        for run in comparison.measured
        if run.report is not None
        for note in run.report["notes"]
    ]
    return {
        "What differs": list(comparison.differences),
        f"What the figures marked `{LABEL}` rest on": list(comparison.assumptions),
        "Notes of the runs": told,
    }


def markdown_text(comparison: Comparison, pictures: Sequence[Picture]) -> str:
    """The comparison for a repository or an issue."""
    said, notes = sentences(comparison), notes_of(comparison)
    parts = [f"# {title_of(comparison)}", lead_of(comparison)]
    tables = tables_of(comparison)
    for name, table in tables.items():
        parts += [f"## {name}", said[name], markdown(*table)]
        if name == "Side by side":
            for picture in pictures:
                parts += [
                    f"## {picture.title}",
                    f"![{picture.title}]({picture.name}.png)",
                    picture.caption,
                ]
    for name, entries in notes.items():
        if entries:
            parts += [f"## {name}", "\n".join(f"- {entry}" for entry in entries)]
    commands = "\n".join(f"    {report['command']}" for report in comparison.reports)
    return "\n\n".join([*parts, "## How it was measured", commands]) + "\n"


def tables_of(comparison: Comparison) -> dict[str, Table]:
    return {
        "Side by side": main_table(comparison),
        "Devices": devices_table(comparison),
        "All figures": details_table(comparison),
    }


# ------------------------------------------------------------------------------------ the command


def files_of(comparison: Comparison) -> dict[str, bytes]:
    """Everything that is written, by name."""
    pictures = draw(comparison)
    said = sentences(comparison)
    tables = {name: (said[name], table) for name, table in tables_of(comparison).items()}
    text = page(
        comparison,
        title_of(comparison),
        lead_of(comparison),
        LABEL,
        tables,
        pictures,
        dict(notes_of(comparison)),
    )
    files = {
        f"{NAME}.html": text.encode(),
        f"{NAME}.md": markdown_text(comparison, pictures).encode(),
        f"{NAME}.csv": csv_text(comparison).encode(),
    }
    for picture in pictures:
        files |= {f"{picture.name}.png": picture.png, f"{picture.name}.svg": picture.svg}
    return files


def check_folder(folder: Path, force: bool) -> None:
    """Raise an OutputError if the folder exists, unless forced, or is a file."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file", "a folder was to be written there")
    if folder.exists() and not force:
        why = "nothing is overwritten unasked"
        raise OutputError(f"{folder} exists", why, "--force or another --output")


def run(args: argparse.Namespace) -> None:
    """Check, compare, print the table, write the files."""
    check_folder(args.output, args.force)
    names = split(args.project, "--project") if args.project is not None else []
    wanted = find_accelerators(names)
    comparison = load(args.reports, wanted)
    check_library()
    from lantern_hpu.results import write_file

    files = files_of(comparison)
    print(markdown(*main_table(comparison)))
    for entries in notes_of(comparison).values():
        for entry in entries:
            print(f"note: {entry}")
    for name, data in files.items():
        write_file(args.output / name, data, args.force)
    print(f"wrote {args.output / NAME}.html, .md and .csv, and the plots beside them")


def main(argv: Sequence[str] | None = None) -> int:
    """The `compare` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
