"""Tables and the chart of speeds in the pages, made from raw files of `bench`, `evaluate` and `measure.frontier`.

    python -m scripts.docs.figures            # rewrite the tables between their marks, and docs/images/speed.png
    python -m scripts.docs.figures --check    # exit with 1 if a page has other figures than its raw file

A page marks a table with the comments `figures: FILE.json` and `end of figures`; the file lies in
benchmarks/results. After it a graph mode may follow, in place of the best one, `batches` for a column a batch size,
`pictures` for what `evaluate` measured, or `tv` for what `scripts.measure.frontier` did.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from lantern_hpu.bench.columns import relaxed_name
from lantern_hpu.files import write_file
from lantern_hpu.methods.relaxation import read_relaxation
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.results.tables import markdown
from lantern_lab import plots
from scripts import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(
    r"(<!-- figures: (\S+)(?: (\w+))? -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL
)
MACHINES = ("2 cores with AMX", "2 cores, AVX512-BF16", "2 cores, limited to AVX2")
# Panels of the chart: a title, and the files of each machine
PANELS: dict[str, dict[str, tuple[str, ...]]] = {
    "LlamaGen-XL's sizes": {
        "2 cores with AMX": ("xl-amx-default.json", "xl-amx-relaxed.json"),
        "2 cores, AVX512-BF16": ("xl-avx512.json",),
        "2 cores, limited to AVX2": ("xl-avx2-limited.json",),
    },
    "the embedded model, 13 M": {
        "2 cores with AMX": ("embedded-amx.json",),
        "2 cores, AVX512-BF16": ("embedded-avx512.json",),
    },
}


def read(file: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    return data


def rows_of(file: str, graphs: str | None = None) -> list[dict[str, Any]]:
    """The rows of a raw file in one graph mode, its best if none is named."""
    data = read(file)
    mode = graphs or data["graphs"]["best"]
    return [row for row in data["rows"] if row["graphs"] == mode]


def speeds(file: str, graphs: str | None = None) -> list[tuple[float, dict[str, Any]]]:
    """Rows of one image at a time, each with its speed relative to `ar`, by medians: a disturbed image moves a mean."""
    rows = [row for row in rows_of(file, graphs) if row["batch_size"] == 1]
    ar = next(row["p50_seconds_per_image"] for row in rows if row["method"] == "ar")
    return [(ar / row["p50_seconds_per_image"], row) for row in rows]


def label_of(row: dict[str, Any]) -> str:
    """The setting of a row, short: `scd@8`, `lantern++@flat_4`, `scd:lambda-5@16`."""
    tree = row["tree"].removeprefix(f"{row['method']}:").removesuffix(":law")
    label = relaxed_name(row["method"], row["relaxation"])
    return label + (f"@{tree}" if METHODS[row["method"]].drafts else "")


def table(file: str, graphs: str | None = None) -> str:
    """The rows of a raw file, fastest first."""
    head = "setting | lossless | s an image | tokens a step | ms a step | speed against `ar`"
    lines = []
    for ratio, row in sorted(speeds(file, graphs), key=lambda pair: -pair[0]):
        exact = "no" if read_relaxation(row["relaxation"]).active else "yes"
        times = f"{row['p50_seconds_per_image']:.3g}", f"{row['tokens_per_step']:.2f}"
        step = f"{row['p50_ms_per_step']:.3g}", f"{ratio:.2f}"
        lines.append([f"`{label_of(row)}`", exact, *times, *step])
    return markdown(head.split(" | "), lines)


def batches_table(file: str) -> str:
    """Images a second of each setting by batch size, and relative to those of `ar`."""
    rows = rows_of(file)
    sizes = sorted({row["batch_size"] for row in rows})
    rates: dict[str, dict[int, float]] = {}
    for row in rows:
        rates.setdefault(label_of(row), {})[row["batch_size"]] = row["images_per_second"]
    lines = [
        [f"`{label}`", *(f"{of[n]:.2f} ({of[n] / rates['ar'][n]:.2f})" for n in sizes)]
        for label, of in rates.items()
    ]
    return markdown(["setting", *(f"batch {size}" for size in sizes)], lines)


def pictures_table(file: str) -> str:
    """What `evaluate` measured: of `ar` with two series of seeds, of the other settings, of what no method drew."""
    data, lines = read(file), []
    rows = sorted(data["rows"], key=lambda row: not row["row"].startswith("ar"))
    for row in rows + data["baselines"]:
        cells = [row["row"], "", ""]
        if "method" in row:
            name, comma, seeds = row["row"].partition(", ")  # `ar`, other seeds
            tv = row["tv_per_token"]
            cells = [f"`{name}`{comma}{seeds}", f"{row['tokens_per_step']:.2f}"]
            cells.append(f"{tv:.3f}" if tv else "0")
        for name, digits in (("frechet", 2), ("agreement", 3), ("diversity", 2)):
            low, high = row["intervals"][name]
            cells.append(f"{row[name]:.{digits}f} ± {(high - low) / 2:.{digits}f}")
        lines.append(cells)
    head = "setting | tokens a step | TV a token | Frechet distance | caption agreement | diversity"
    return markdown(head.split(" | "), lines)


def tv_table(file: str) -> str:
    """Tokens a step and TV a token of each setting, with half of 95 % intervals, in the file's order."""
    lines = []
    for row in read(file)["rows"]:
        rate = f"{row['tokens_per_step']:.2f} ± {row['tokens_per_step_around']:.2f}"
        tv = f"{row['tv_per_token']:.3f} ± {row['tv_per_token_around']:.3f}"
        lines.append([f"`{row['row']}`", rate, tv if row["tv_per_token"] else "0"])
    return markdown(["setting", "tokens a step", "TV a token"], lines)


MAKERS: dict[str | None, Callable[[str], str]] = {
    "batches": batches_table,
    "pictures": pictures_table,
    "tv": tv_table,
}


def rewritten(text: str) -> str:
    """A page with its tables made again."""

    def make(match: re.Match[str]) -> str:
        mark, file, how, _, end = match.groups()
        return f"{mark}{MAKERS.get(how, partial(table, graphs=how))(file)}\n{end}"

    return MARKED.sub(make, text)


def chart() -> bytes:
    """Speed by setting, one colour a machine, with a line at `ar`."""
    with plots.in_style("compare"):
        figure, axes = plots.panels(9, 4.6, columns=len(PANELS), sharey=False)
        for panel, (title, machines) in zip(axes, PANELS.items(), strict=True):
            draw_panel(panel, title, machines)
        plots.legend_under(figure, axes[0], 3)
        return plots.saved(figure, "png")


def draw_panel(panel: Any, title: str, machines: dict[str, tuple[str, ...]]) -> None:
    """A line for each setting, with a point for each machine that it was measured on."""
    found = {
        machine: {label_of(row): ratio for f in files for ratio, row in speeds(f)}
        for machine, files in machines.items()
    }
    for ratios in found.values():
        del ratios["ar"]
    settings = dict.fromkeys(label for ratios in found.values() for label in ratios)
    order = sorted(settings, key=lambda label: max(r.get(label, 0) for r in found.values()))
    for machine, ratios in found.items():
        index = MACHINES.index(machine)
        places = [order.index(label) for label in ratios]
        look = {"color": f"C{index}", "marker": plots.MARKERS[index], "linestyle": "none"}
        panel.plot(list(ratios.values()), places, label=machine, markersize=7, **look)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_yticks(range(len(order)), order)
    panel.set_ylim(-0.7, len(order) - 0.3)
    panel.set_xlim(0, 2.2)
    panel.set_xlabel("speed against ar on the same machine")
    panel.set_title(title)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Make the tables and the chart of the pages again."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a page differs")
    check, wrong = parser.parse_args().check, []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if rewritten(text) != text:
            wrong.append(page.name)
            if not check:
                write_file(page, rewritten(text).encode(), force=True)
    if not check:
        write_file(ROOT / "docs" / "images" / "speed.png", chart(), force=True)
    print(f"{'differ' if check else 'rewritten'}: {', '.join(wrong) or 'none'}")
    return int(check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
