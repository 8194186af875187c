"""Comparing reports: like with like, the same bytes each time, a chart that can be read."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.style
import pytest
from matplotlib.figure import Figure

from lantern_hpu.errors import OptionError
from lantern_hpu.methods.relaxation import EXACT, PRESETS, Multiplicative, parse
from lantern_lab.commands import compare
from lantern_lab.commands.compare import Run, differences, latency, load, main_table, names_of
from lantern_lab.measure.plots import STYLE
from lantern_lab.measure.reports import KIND, VERSION, check_report
from lantern_lab.measure.rows import PARTS, SPEED, Row, in_numbers, relaxed_name, with_speeds
from tests.marks import mostly_slow

Report = dict[str, Any]
ROOT = Path(__file__).parent.parent
TREES = {"ar": "root", "eagle": "naive_extend_57", "lantern++": "naive_extend_57"}
ACCEPTED = {"ar": [], "eagle": [0.5, 0.3, 0.2, 0.1, 0.0], "lantern++": [0.6, 0.4, 0.2, 0.1, 0.1]}


def row_of(method: str, graphs: str, batch: int, scale: float) -> Row:
    """A made-up row: an image of 16 tokens, a step of `scale` milliseconds for ar and four times that else."""
    tokens = 1 + sum(ACCEPTED[method])
    ms = scale * (1 if method == "ar" else 4) * batch**0.5 * (3 if graphs == "eager" else 1)
    seconds = 15 / tokens * ms / 1000 / batch
    figures = dict.fromkeys(SPEED, 1.0) | {
        "ms_per_step": ms,
        "eager_step_ms": dict.fromkeys(PARTS, 1.0),
        "tokens_per_step": tokens,
        "seconds_per_image": seconds,
        "p95_seconds_per_image": seconds * 1.2,
        "speed_against_ar": tokens / 4,
        "tv_per_token": None,
        "projected_ms": None,
    }
    relaxation = Multiplicative(10, lam=5.0).as_json()
    return Row(method, TREES[method], relaxation, graphs, batch, figures)


def report_of(
    title: str = "Some Card",
    scale: float = 2.0,
    dtype: str = "bfloat16",
    best: str = "cuda_graph",
    **environment: str,
) -> Report:
    """A made-up report of all methods in TREES, in batches of 1 and 8."""
    modes = list(dict.fromkeys(["eager", best]))
    sampling = {"cfg_scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    prompts = ["a red apple", "a sun"]
    rates = dict.fromkeys(("copy_bytes_per_s", "bf16_operations_per_s", "operations_per_s"), 1.0)
    return {
        "kind": KIND,
        "version": VERSION,
        "command": "lantern-hpu bench --output <x>.json",
        "model": "some-model",
        "dtype": dtype,
        "weights": {"target": "abc", "drafter": "def"},
        "environment": {"lantern_hpu": "0.1.0", **environment},
        "device_title": title,
        "settings": {
            "sampling": sampling,
            "seed": 8,
            "prompts": prompts,
            "images": 8,
            "warm_up": "x",
        },
        "sizes": {"tokens": 16},
        "rates": rates,
        "graphs": {"best": best},
        "notes": ["a note with <angles> & more"],
        "rows": [
            row_of(method, mode, batch, scale).as_json()
            for mode in modes
            for batch in (1, 8)
            for method in TREES
        ],
    }


@pytest.fixture
def put(tmp_path: Path) -> Callable[..., Path]:
    """Writes a report and returns its file."""

    def write(report: Report, name: str = "a.json") -> Path:
        check_report(report, name)
        file = tmp_path / name
        file.write_text(json.dumps(report))
        return file

    return write


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A card, and a processor in another format."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "card.json").write_text(json.dumps(report_of()))
    slow = report_of("A Processor, 2 threads", 50.0, "float32", "eager")
    (folder / "processor.json").write_text(json.dumps(slow))
    files = [str(folder / "card.json"), str(folder / "processor.json")]
    assert compare.main([*files, "--output", str(folder / "out")]) == 0
    return folder / "out"


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


# ------------------------------------------------------------------------------------ what is written

ALONE = """
import sys
from lantern_lab.commands import compare
code = compare.main(sys.argv[1:])
sys.exit("torch was loaded" if "torch" in sys.modules else code)
"""


@pytest.mark.slow
def test_same_reports_give_the_same_bytes_in_any_process_and_without_torch(
    written: Path, tmp_path: Path
) -> None:
    assert {f.suffix for f in written.iterdir()} == {".md", ".png"}
    files = [str(written.parent / name) for name in ("card.json", "processor.json")]
    command = [sys.executable, "-c", ALONE, *files, "--output", str(tmp_path / "again")]
    environment = {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert digests(tmp_path / "again") == digests(written)


def test_table_has_a_line_for_each_row_and_keeps_formats_apart(written: Path) -> None:
    lines = (written / "comparison.md").read_text().splitlines()
    body = [line for line in lines if line.startswith(("| ar |", "| eagle |", "| lantern++ |"))]
    # The card in two modes, the processor in its only one: 3 methods, 2 batch sizes
    assert len(body) == 3 * 2 * 3
    for line in body:
        *_, card, processor, _ = (cell.strip() for cell in line.split("|"))
        assert bool(card) != bool(processor)
    assert any("bfloat16 on Some Card, float32 on A Processor" in line for line in lines)


def test_runs_in_one_format_share_their_rows(put: Callable[..., Path]) -> None:
    files = [put(report_of(), "a.json"), put(report_of("Other", 1.0, best="hpu_graph"), "b.json")]
    runs = load(files)
    head, _, *lines = main_table(runs).splitlines()
    assert head.endswith("| A: Some Card | B: Other |")
    assert all("2.00 x A |" in line for line in lines) and len(lines) == 12
    assert not [*differences(runs)]


def test_runs_of_one_device_are_told_apart(put: Callable[..., Path]) -> None:
    files = [put(report_of(scale=s), f"{n}.json") for n, s in (("old", 2.0), ("new", 1.0))]
    assert [run.title for run in load(files)] == ["Some Card (old)", "Some Card (new)"]
    other = put(report_of(dtype="float32"), "other.json")
    titles = [run.title for run in load([files[0], other])]
    assert titles == ["Some Card (bfloat16)", "Some Card (float32)"]


def test_what_may_differ_is_said(put: Callable[..., Path]) -> None:
    other = report_of("Other", lantern_hpu="0.2.0")
    other["settings"]["images"] = 4
    for row in other["rows"]:
        row["relaxation"]["bound"] = 20.0
    said = " ".join(differences(load([put(report_of()), put(other, "b.json")])))
    assert "0.1.0 on Some Card, 0.2.0 on Other" in said and "images: 8" in said
    # What is relaxed otherwise has rows of its own; what is exact does not care.
    assert "lantern++ with the tree" in said and "eagle with" not in said


# ------------------------------------------------------------------------------------ refusals

WRONG: dict[str, Callable[[Report], None]] = {
    "model: some-model and another": lambda r: r.update(
        model="another", weights={"target": "xyz", "drafter": None}
    ),
    "weights: abc and xyz": lambda r: r["weights"].update(target="xyz"),
    "drafter: def and ghi": lambda r: r["weights"].update(drafter="ghi"),
    "sampling: ": lambda r: r["settings"]["sampling"].update(top_k=7),
    "seed: 8 and 1": lambda r: r["settings"].update(seed=1),
    "prompts: ": lambda r: r["settings"].update(prompts=["a sun"]),
    "emulated": lambda r: r["environment"].update(card="GAUDI2 (emulated, bridge 1.24)"),
}


@pytest.mark.parametrize("said", WRONG)
def test_incomparable_runs_are_refused(
    said: str, put: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = report_of("Other")
    WRONG[said](other)
    files = [str(put(report_of())), str(put(other, "b.json"))]
    assert compare.main([*files, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert said in error and "b.json" in error and error.count("error: ") == 1
    assert not (tmp_path / "out").exists()


WHOLE = json.dumps(report_of())
BAD: dict[str, tuple[str | None, list[str], str]] = {  # file's content, options, what is said
    "newer": (json.dumps(report_of() | {"version": 3}), [], "newer"),
    "older": (json.dumps({"kind": "lantern_hpu.bench", "rows": []}), [], "version 1"),
    "empty": ("", [], "cannot read"),
    "truncated": (WHOLE[:5000], [], "cannot read"),
    "no JSON": ("# figures", [], "cannot read"),
    "NaN": (WHOLE.replace(": 1.0", ": NaN", 1), [], "not JSON compliant"),
    "another kind": ('{"kind": "lantern_hpu.fidelity"}', [], "not a report of lantern_hpu.bench"),
    "a list": ("[]", [], "not an object"),
    "missing": (None, [], "cannot read"),
    "twice": (WHOLE, ["x.json"], "is given twice"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_error(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    content, options, said = BAD[name]
    if content is not None:
        Path("x.json").write_text(content)
    assert compare.main([*options, "x.json", "--output", "out"]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("error: ") == 1
    assert not Path("out").exists()


def test_an_existing_folder_is_left_alone(put: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for output in ("out", "a.json"):
        assert compare.main([str(put(report_of())), "--output", str(tmp_path / output)]) == 2
    assert not any((tmp_path / "out").iterdir())


def test_without_matplotlib_the_extra_is_named(
    put: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(report_of())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    asked = compare.CompareRequest((file,), tmp_path / "out")
    with pytest.raises(OptionError, match="matplotlib is not installed"):
        compare.compare_reports(asked)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------ the chart


def drawn(runs: list[Run]) -> Figure:
    with matplotlib.style.context(STYLE, after_reset=True):
        return latency(runs)


def texts_of(figure: Figure) -> Iterator[Any]:
    for axes in figure.axes:
        if axes.get_visible():
            for axis in (axes.xaxis, axes.yaxis):
                low, high = sorted(axis.get_view_interval())
                yield from (t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high)
            yield from [axes.xaxis.label, axes.yaxis.label, axes.title, *axes.texts]
    for legend in figure.legends:
        yield from legend.get_texts()


@pytest.mark.parametrize("alone", mostly_slow([True, False], False), ids=["alone", "beside others"])
def test_the_chart_has_axes_units_and_legends_that_can_be_read(
    put: Callable[..., Path], alone: bool
) -> None:
    slow = put(report_of("A Processor, 2 threads", 50.0, "float32", "eager"), "b.json")
    figure = drawn(load([slow] if alone else [put(report_of()), slow]))
    figure.draw_without_rendering()
    shown = [text for text in texts_of(figure) if text.get_text() and text.get_visible()]
    assert any("s an image" in text.get_text() for text in shown)
    for axes in figure.axes:
        assert axes.get_xlabel()
        minor = [t.label1.get_text() for t in axes.xaxis.get_minor_ticks()]
        assert not any(minor)
        assert axes.dataLim.x1 < axes.get_xlim()[1]  # lines to the 95th percentile stay inside
    (legend,) = figure.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels and all(labels) and len(set(labels)) == len(labels)
    assert all(text.get_fontsize() >= 8 for text in shown)
    boxes = [(text.get_text(), text.get_window_extent()) for text in shown]
    for i, (mine, box) in enumerate(boxes):
        for other, rest in boxes[i + 1 :]:
            beside = box.x1 - 1 <= rest.x0 or box.x0 + 1 >= rest.x1
            above = box.y1 - 1 <= rest.y0 or box.y0 + 1 >= rest.y1
            assert beside or above, f"{mine!r} lies over {other!r}"


@pytest.mark.filterwarnings("error")
def test_a_report_of_ar_alone_is_drawn_too(put: Callable[..., Path]) -> None:
    report = report_of(best="eager")
    report["rows"] = report["rows"][:1]
    assert len(drawn(load([put(report)])).axes) == 1


def test_a_single_run_shows_its_eager_figures_too(put: Callable[..., Path]) -> None:
    (legend,) = drawn(load([put(report_of())])).legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["Some Card, bfloat16, eager", "Some Card, bfloat16, cuda_graph"]


def test_rows_of_several_relaxations_are_told_apart(put: Callable[..., Path]) -> None:
    """By the written form; each is divided by its own eager run, and a table has a line for each."""
    rules = "lambda=20:k=10", "tv=0.1"
    rows = [
        replace(
            row_of("lantern++", graphs, 1, scale),
            relaxation=parse(rule).as_json(),
        ).adding(tv_per_token=0.09)
        for rule, scale in zip(rules, (1.0, 2.0), strict=True)
        for graphs in ("eager", "cuda_graph")
    ]
    report = report_of()
    report["rows"] = [row.as_json() for row in with_speeds(rows)]
    assert [round(row["speed_against_eager"], 3) for row in report["rows"]] == [1, 3, 1, 3]
    (run,) = load([put(report)])
    text = main_table([run])
    assert "| lantern++:tv=0.1 |" in text and "| lantern++:lambda=20:k=10 |" in text
    assert relaxed_name("eagle", EXACT.as_json()) == "eagle"
    assert relaxed_name("scd", PRESETS["lambda-5"].as_json()) == "scd:lambda-5"


def test_windows_are_in_order_of_their_width_and_named_as_one_writes_them() -> None:
    lines = [("scd", f"scd:{width}", "scd") for width in (16, 2, 8)]
    lines.sort(key=lambda line: in_numbers(line[1]))
    assert names_of([*lines, ("ar", "root", "ar")]) == ["scd@2", "scd@8", "scd@16", "ar"]
