"""Tables and charts of speeds in the pages, made from raw files of `bench`, `race`, `evaluate` and `measure.frontier`.

    python -m scripts.docs.figures            # rewrite the tables between their marks, and the charts
    python -m scripts.docs.figures --check    # exit with 1 if a page has other figures than its raw file
    lantern-hpu race --turns 3 --output race
    python -m scripts.docs.figures --race race    # with another race in the tutorial

A page marks a table with the comments `figures: FILE.json` and `end of figures`; the file lies in
benchmarks/results. After it a graph mode may follow, in place of the best one, `batches` for a column a batch size,
`pictures` for what `evaluate` measured, `tv` for what `lantern_lab.measure.frontier` did, `projected` for its tokens a
step with the projected steps of a Gaudi 2, `race`, `objects` for
what `scripts.docs.missing_objects` counted, or `fastest` for the best settings by machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from lantern_hpu.decode.accelerators import accelerators, projected_ms
from lantern_hpu.files import write_file
from lantern_hpu.methods.relaxation import read_relaxation
from lantern_hpu.methods.setting import METHODS, Setting
from lantern_hpu.methods.setting import ROOT as ALONE
from lantern_hpu.results.tables import between, markdown
from lantern_hpu.tree import DraftTree
from lantern_hpu.zoo.registry import entries
from lantern_lab.evaluate.metrics import QualityMetric, built_in
from lantern_lab.evaluate.quality_rows import SPENT, STEPS, QualityRow, plot
from lantern_lab.measure import frontier, plots, race
from lantern_lab.measure.rows import in_numbers, relaxed_name
from scripts import ROOT

RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"
RACE = "race.json"  # the tutorial's
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(
    r"(<!-- figures: (\S+)(?: (\w+))? -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL
)
MACHINES = ("2 cores with AMX", "2 cores, AVX512-BF16 (Zen 4)", "2 cores, limited to AVX2")
# Panels of the chart: a title, and the file of each machine, which is one run
PANELS = {
    "LlamaGen-XL's sizes": {
        "2 cores with AMX": "xl-amx-default.json",
        "2 cores, AVX512-BF16 (Zen 4)": "xl-zen4.json",
        "2 cores, limited to AVX2": "xl-avx2-limited.json",
    },
    "the embedded model, 13 M": {
        "2 cores with AMX": "embedded-amx.json",
        "2 cores, AVX512-BF16 (Zen 4)": "embedded-avx512.json",
    },
}


# LlamaGen-XL's sizes by machine: a file each, which is one run, and what it is called
MACHINES_OF_XL = {
    "xl-zen4.json": "2 cores of an AMD EPYC (Zen 4), bfloat16",
    "xl-int8.json": "2 cores of an AMD EPYC (Zen 4), weights of 8 bits",
    "xl-h200.json": "NVIDIA H200, bfloat16",
}
PEERS = "peers-xl.json"  # passes of programs in turns
PROGRAMS = {
    "transformers": "transformers",
    "openvino": "OpenVINO",
    "llama.cpp": "llama.cpp",
    "llama.cpp Q4_0": "llama.cpp, Q4_0 (4 bits)",
    "lantern_hpu": "this package",
}
COST = 0.1  # total variation a token, at most, of the chart's relaxed setting
LOSSLESS, BOUNDED = "lossless", f"TV at most {COST:g}"


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
        exact = "no" if is_relaxed(row) else "yes"
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


def projected_table(file: str) -> str:
    """Counted tokens a step, and the speed relative to `ar` with the projected steps of a Gaudi 2."""
    card, models = accelerators()["gaudi2"], ("llamagen-t2i-256", "anole-7b")
    lines = []
    for row in read(file)["rows"]:
        tree = Setting.parse(row["row"]).tree
        assert isinstance(tree, DraftTree)
        cells = [f"`{row['row']}`", f"{row['tokens_per_step']:.2f}"]
        for model in (entries()[name].config for name in models):
            step, alone = (projected_ms(card, model, each, 2) for each in (tree, ALONE))
            speed = min(row["tokens_per_step"] * a / b for a, b in zip(alone, step, strict=True))
            cells += [between(step), f"{speed:.2f}"]
        lines.append(cells)
    heads = (f"{name}: ms a step | speed against `ar`" for name in ("LlamaGen-XL", "Anole-7B"))
    return markdown(["setting", "tokens a step", *" | ".join(heads).split(" | ")], lines)


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


def best_settings(file: str) -> dict[str, tuple[float, dict[str, Any]]]:
    """The fastest setting of each kind that was measured, with its speed."""
    kinds = {
        "ar": lambda row: row["method"] == "ar",
        LOSSLESS: lambda row: not is_relaxed(row),
        BOUNDED: lambda row: is_relaxed(row) and (row.get("tv_per_token") or 1) <= COST,
    }
    found = {kind: [pair for pair in speeds(file) if fits(pair[1])] for kind, fits in kinds.items()}
    return {kind: max(pairs, key=lambda pair: pair[0]) for kind, pairs in found.items() if pairs}


def fastest_table() -> str:
    """The one answer to what is fastest: a line a machine."""
    lines = []
    for file, machine in MACHINES_OF_XL.items():
        best = best_settings(file)
        cells = [machine, read(file)["date"], f"{best['ar'][1]['p50_seconds_per_image']:.3g} s"]
        for kind in (LOSSLESS, BOUNDED):
            speed, row = best.get(kind, (0, {}))
            cells.append(f"{speed:.2f}x, `{label_of(row)}`" if row else "not measured")
        lines.append(cells)
    head = ["machine", "date", "`ar`", f"fastest {LOSSLESS}", f"fastest at {BOUNDED}"]
    return markdown(head, lines)


def objects_table(file: str) -> str:
    """Shares of pictures that lack the object of their caption, by caption and sampling, and of all captions."""
    rows = read(file)["rows"]
    heads = [
        f"{row['sampling']['guidance_scale']} : {row['sampling']['temperature']}" for row in rows
    ]
    counts = {caption: [row["missing"][caption] for row in rows] for caption in rows[0]["missing"]}
    shares = {
        caption: [found / row["seeds"] for found, row in zip(of, rows, strict=True)]
        for caption, of in counts.items()
    }
    shares["all"] = [sum(column) / len(counts) for column in zip(*shares.values(), strict=True)]
    lines = [[caption, *(f"{100 * share:.0f} %" for share in of)] for caption, of in shares.items()]
    return markdown(["caption", *heads], lines)


def race_table(file: str) -> str:
    """What a race measured."""
    return race.table(read(file)["rows"]).markdown()


MAKERS: dict[str | None, Callable[[str], str]] = {
    "race": race_table,
    "objects": objects_table,
    "fastest": lambda _: fastest_table(),
    "batches": batches_table,
    "pictures": pictures_table,
    "tv": tv_table,
    "projected": projected_table,
}


def rewritten(text: str) -> str:
    """A page with its tables made again."""

    def make(match: re.Match[str]) -> str:
        mark, file, how, _, end = match.groups()
        return f"{mark}{MAKERS.get(how, partial(table, graphs=how))(file)}\n{end}"

    return MARKED.sub(make, text)


def is_relaxed(row: dict[str, Any]) -> bool:
    return read_relaxation(row["relaxation"]).active


def take_race(folder: Path) -> None:
    """The raw file and the animation of a race, in place of those of the tutorial."""
    write_file(RESULTS / RACE, (folder / RACE).read_bytes(), force=True)
    write_file(IMAGES / "race.gif", (folder / "race.gif").read_bytes(), force=True)


# ------------------------------------------------------------------------------------ charts


def minutes(file: str) -> dict[str, float]:
    """Images a minute by what draws them: `ar`, the fastest lossless setting, the fastest of bounded cost."""
    return {
        kind if kind == "ar" else f"{kind}: {label_of(row)}": 60 / row["p50_seconds_per_image"]
        for kind, (_, row) in best_settings(file).items()
    }


def minutes_of_programs() -> dict[str, float]:
    """The same by program: of as many passes over one token as an image has, without prompt and pixels."""
    tokens, ms = read(next(iter(MACHINES_OF_XL)))["sizes"]["tokens"], read(PEERS)["ms"]
    return {label: 60_000 / (ms[name]["1"] * tokens) for name, label in PROGRAMS.items()}


def minutes_chart() -> bytes:
    """Images a minute at LlamaGen-XL's sizes: a panel a run."""
    programs = "One token a step, by program: 2 cores of an AMD EPYC (Zen 4), bfloat16"
    panels = {programs: minutes_of_programs()}
    panels |= {machine: minutes(file) for file, machine in MACHINES_OF_XL.items()}
    with plots.in_style("compare"):
        figure, axes = plots.panels(8, 7, rows=len(panels), sharey=False)
        for panel, (title, found) in zip(axes, panels.items(), strict=True):
            draw_minutes(panel, title, found)
        axes[-1].set_xlabel("images a minute")
        return plots.saved(figure, "png")


def draw_minutes(panel: Any, title: str, found: dict[str, float]) -> None:
    """A bar for each of what draws, the slowest first."""
    rates = [*found.values()]
    bars = panel.barh([*found], rates)
    panel.bar_label(bars, [f"{rate:.3g}" for rate in rates], padding=4)
    panel.set_ylim(len(rates) - 0.5, -0.5)
    panel.set_xlim(0, max(rates) * 1.1)
    panel.grid(axis="y", visible=False)
    panel.set_title(title, fontsize=10)


def chart() -> bytes:
    """Speed by setting, one colour a machine, with a line at `ar`; settings in one order, by method and length."""
    found = {
        title: {
            machine: {label_of(row): ratio for ratio, row in speeds(file) if row["method"] != "ar"}
            for machine, file in machines.items()
        }
        for title, machines in PANELS.items()
    }
    best: dict[str, float] = {}
    for ratios in (each for panel in found.values() for each in panel.values()):
        for label, ratio in ratios.items():
            best[label] = max(best.get(label, 0), ratio)
    order = sorted((label for label in best if best[label] >= 1), key=place_of, reverse=True)
    losers = ", ".join(sorted(best.keys() - {*order}, key=place_of))
    with plots.in_style("compare"):
        figure, axes = plots.panels(9, 5.6, columns=len(PANELS))
        for panel, (title, machines) in zip(axes, found.items(), strict=True):
            draw_panel(panel, title, machines, order)
        axes[0].set_yticks(range(len(order)), order)
        figure.supxlabel(fill(f"slower than ar wherever measured: {losers}", 110), fontsize=8)
        known = axes[0].get_legend_handles_labels()
        figure.legend(*known, loc="outside upper center", ncols=len(MACHINES), fontsize=8)
        return plots.saved(figure, "png")


def place_of(label: str) -> Any:
    """Sorts settings by method as the tables of methods have them, then by relaxation and length."""
    method = re.split("[:@]", label)[0]
    return list(METHODS).index(method), in_numbers(label)


def draw_panel(
    panel: Any, title: str, machines: dict[str, dict[str, float]], order: list[str]
) -> None:
    """A line for each setting, with a point for each machine that it was measured on."""
    for machine, ratios in machines.items():
        index = MACHINES.index(machine)
        shown = {label: ratio for label, ratio in ratios.items() if label in order}
        places = [order.index(label) for label in shown]
        look = {"color": f"C{index}", "marker": plots.MARKERS[index], "linestyle": "none"}
        panel.plot(list(shown.values()), places, label=machine, markersize=7, **look)
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_ylim(-0.7, len(order) - 0.3)
    fastest = max(max(of.values()) for of in machines.values())
    panel.set_xlim(0, 1.05 * fastest)
    panel.set_xlabel("speed against ar on the same machine")
    panel.set_title(title)


def pictures_chart(pace: QualityMetric) -> bytes:
    """What `evaluate` measured of the embedded model."""
    data = read("pictures-embedded.json")
    rows, baselines = (
        [QualityRow.of_json(one) for one in data[name]] for name in ("rows", "baselines")
    )
    return plot(rows, baselines, built_in(np.eye(2)), pace)


CHARTS: dict[str, Callable[[], bytes]] = {
    "speed.png": chart,
    "minutes.png": minutes_chart,
    "quality.png": partial(pictures_chart, STEPS),
    "pictures-tv.png": partial(pictures_chart, SPENT),
    "tv.png": lambda: frontier.plot(read("tv-embedded.json")["rows"]),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Make the tables and the charts of the pages again."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if a page differs")
    parser.add_argument("--race", type=Path, help="a folder that `lantern-hpu race` wrote")
    args = parser.parse_args()
    check, wrong = args.check, []
    if args.race:
        take_race(args.race)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if rewritten(text) != text:
            wrong.append(page.name)
            if not check:
                write_file(page, rewritten(text).encode(), force=True)
    if not check:
        for name, draw in CHARTS.items():
            write_file(IMAGES / name, draw(), force=True)
    print(f"{'differ' if check else 'rewritten'}: {', '.join(wrong) or 'none'}")
    return int(check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
