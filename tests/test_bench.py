"""The benchmark: its report follows the schema, its figures hang together, and everything in it was measured."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lantern_hpu.backends.base import Backend, get_backend
from lantern_hpu.core import Request
from lantern_hpu.decode.accelerators import Rates
from lantern_hpu.decode.engine import Engine
from lantern_hpu.errors import DeviceError, OptionError
from lantern_hpu.methods import tuned_trees
from lantern_hpu.methods.setting import Resolved, Setting
from lantern_hpu.models.config import ConditionConfig, DrafterConfig, ModelConfig, TransformerConfig
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results import progress
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.tree import DraftTree, DynamicTree, load_static, load_tree
from lantern_hpu.zoo.registry import entries
from lantern_lab.commands import bench
from lantern_lab.measure import bench as run_bench
from lantern_lab.measure import floors
from lantern_lab.measure import meter as metering
from lantern_lab.measure import options as measuring
from lantern_lab.measure.bench import projected_step
from lantern_lab.measure.floors import Floor, Pass, StepPasses, floor, sizes
from lantern_lab.measure.meter import Meter
from lantern_lab.measure.options import LARGE, BenchRequest, cases_of, measurable_modes
from lantern_lab.measure.reports import KIND, VERSION, check_report, damage_of, read_report
from lantern_lab.measure.rows import PARTS, SPEED, Case, Row, speed_tables, with_speeds
from tests.emulated import emulated

Report = dict[str, Any]
ROOT = Path(__file__).parent.parent
RATES = Rates(1e9, 1e9)


@pytest.fixture(scope="module", autouse=True)
def few_steps() -> Iterator[None]:
    """Few steps, small tensors: the figures are not the point."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metering, "WARM_STEPS", 2)
        patch.setattr(metering, "SPLIT_STEPS", 2)
        for name, value in {"COPIED": 2**20, "LARGEST": 256, "TIMES": 1, "ENOUGH": 1e-4}.items():
            patch.setattr(metering, name, value)
        yield


@pytest.fixture(scope="module")
def report(model: Path) -> Report:
    """{ar, eagle2} x {eager, strict}; three images in batches of two are four."""
    file = model.parent / "bench.json"
    what = "--method ar,eagle2@dynamic:2x1x4 --graphs eager,auto,strict --batch-sizes 2"
    how = [*what.split(), "--num-images", "3", "--interleave", "--output", str(file)]
    assert bench.main(["--model", str(model), *how]) == 0
    return read_report(file)


def rows_of(report: Report, **wanted: object) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if all(row[k] == v for k, v in wanted.items())]


def parsed(*texts: str) -> list[Setting]:
    return [Setting.parse(text) for text in texts]


def case_of(
    pipeline: LanternPipeline, method: str, tree: str | None = None, mode: str = "eager"
) -> tuple[Case, list[Request]]:
    """One image in a batch of one."""
    chosen = pipeline.resolve(f"{method}@{tree}" if tree else method)
    requests = [Request("red cat", 0, pipeline.model.sampling, chosen.relaxation)]
    return Case(chosen, mode, 1), requests


# ------------------------------------------------------------------------------------ the report


def test_promise_a_report_is_a_square_of_rows_whose_figures_hang_together(report: Report) -> None:
    """Everything was measured, `auto` once, and modes draw the same images: only times differ."""
    assert report["version"] == VERSION
    assert [(row["method"], row["graphs"]) for row in report["rows"]] == [
        (method, mode) for mode in ("eager", "strict") for method in ("ar", "eagle2")
    ]
    assert report["graphs"]["measured"] == ["eager", "strict"]
    notes = "\n".join(report["notes"])
    assert "`auto` is `eager` on this device" in notes and "took turns" in notes
    for method in ("ar", "eagle2"):
        rows = rows_of(report, method=method)
        assert len({(row["tokens_per_step"], *row["accepted_by_depth"]) for row in rows}) == 1
    for row in report["rows"]:
        assert row.keys() >= SPEED.keys() and set(PARTS) == set(row["eager_step_ms"])
        assert (row["eager_step_ms"]["tables"] > 0) == (row["method"] == "eagle2")
        seconds = row["seconds_per_image"]
        assert row["images"] == 4 and seconds == pytest.approx(sum(row["batch_seconds"]) / 4)
        assert 0 < row["p50_seconds_per_image"] <= row["p95_seconds_per_image"]
        assert 0 < row["p50_ms_per_step"] <= row["p95_ms_per_step"]
        assert row["images_per_second"] * seconds == pytest.approx(1)
        assert row["steps_s_per_image"] < seconds and 0 <= row["host_share"] < 1
        assert row["floor_ratio"] == pytest.approx(row["floor_ms"] / row["ms_per_step"])
        assert row["startup_s"] == pytest.approx(sum(report["startup"].values()) + row["warmup_s"])
        assert row["recompiles_after_warmup"] == 0 < row["state_bytes"]
        assert row["tv_per_token"] == 0 or row["relaxation"]["rule"] != "exact"
        assert row["graph_replays"] >= row["steps"] and sum(row["eager_step_ms"].values()) > 0
        assert row["accepted_per_step"] == pytest.approx(sum(row["accepted_by_depth"]))
        reached = 1.0
        for share, given in zip(row["accepted_by_depth"], row["accept_rate_by_depth"], strict=True):
            assert given is None if reached == 0 else given == pytest.approx(share / reached)
            reached = share
        for column, same in (("ar", {"method": "ar", "graphs": row["graphs"]}),
                             ("eager", {"method": row["method"], "graphs": "eager"})):  # fmt: skip
            (other,) = rows_of(report, **same)
            assert row[f"speed_against_{column}"] == pytest.approx(
                other["seconds_per_image"] / seconds
            )
        assert row["projected_ms"] is None
        (alone,) = with_speeds([Row.from_json(row)])
        assert (alone["speed_against_ar"] is None) == (row["method"] != "ar")
        assert Row.from_json(row | {"projected": []}).as_json() == row  # of earlier programs


PUBLISHED = [
    file
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    if json.loads(file.read_text()).get("kind") == KIND
]


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: str(file.stem))
def test_published_results_can_be_read(file: Path) -> None:
    report = read_report(file)
    shown = speed_tables(report)
    assert f"| {report['rows'][0]['method']} |" in shown
    heads = [line for line in shown.splitlines() if line.startswith("| method |")]
    assert heads and all(line.count("|") <= 13 for line in heads), "at most 12 columns"
    assert "x ar: speed against ar" in shown  # what they mean


# ------------------------------------------------------------------------------------ measuring


def test_measuring_leaves_the_engine_as_it_was(pipeline: LanternPipeline) -> None:
    case, requests = case_of(pipeline, "eagle", "chain")
    before = pipeline.draw(requests, case.setting, 1).tokens
    meter = Meter(pipeline, case, requests)
    engine, prefix = meter.engine, pipeline.prefix(meter.engine, requests)
    parts = metering.split_step(engine, prefix, requests, 2)
    assert set(parts) == set(PARTS) and parts["tables"] == 0
    alone = metering.step_alone(engine, prefix, requests, 2)
    assert min(parts["draft"], parts["verify"], alone) > 0
    assert (pipeline.draw(requests, case.setting, 1).tokens == before).all()


def test_steps_are_timed_even_past_the_end_of_an_image(pipeline: LanternPipeline) -> None:
    case, requests = case_of(pipeline, "ar")
    meter = Meter(pipeline, case, requests, 0)
    done = meter.run_steps(20)  # an image takes 15
    assert [batch.stats.steps for batch in done] == [15, 5]
    assert sum(steps for batch in done for _, steps in batch.blocks) == 20
    meter.draw()
    row = run_bench.speed_of(meter, RATES, 1.0)
    assert row["steps"] == 15 and row["startup_s"] == 1.0 + row["warmup_s"]


class Picky(Backend):
    """A device whose best mode settles which others there are."""

    name, graph_modes = "picky", {"hpu_graph": "best"}

    def available(self) -> tuple[bool, str]:
        return True, ""

    synchronize = memory = describe = None  # type: ignore[assignment]


def test_a_mode_that_cannot_be_had_is_noted_or_refused() -> None:
    backend = Picky()
    found, notes = measurable_modes(backend, ["eager", "auto"], by_name=False)
    assert found == ["hpu_graph"]
    assert "--graphs eager" in notes[0]
    with pytest.raises(DeviceError, match="no graph mode 'eager'"):
        measurable_modes(backend, ["eager", "auto"], by_name=True)


def test_a_row_that_does_not_fit_is_noted_and_the_others_are_measured(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_bench.open_meter

    def crowded(pipeline: LanternPipeline, wanted: BenchRequest, case: Case, *given: Any) -> Meter:
        if case.batch > 1:
            raise DeviceError("the GPU has too little memory", "0 GB are free")
        return whole(pipeline, wanted, case, *given)

    monkeypatch.setattr(run_bench, "open_meter", crowded)
    given = ["--model", str(model), "--method", "ar", "--graphs", "eager", "--num-images", "1"]
    assert bench.main([*given, "--batch-sizes", "1,2"]) == 0
    assert "note: not measured: ar, eager, batch 2: the GPU has" in capsys.readouterr().out
    assert bench.main([*given, "--batch-sizes", "2"]) == 2
    assert "nothing could be measured" in capsys.readouterr().err


@pytest.mark.parametrize(("mode", "stays"), [("eager", False), ("strict", True)])
def test_a_recorded_mode_keeps_its_first_engine_until_its_rows_are_done(
    pipeline: LanternPipeline, mode: str, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph holds the memory that recorded graphs share; all others give theirs back, also after a failure."""
    opened: list[LanternPipeline] = []
    kept: list[list[int]] = []
    whole = run_bench.open_meter

    def measured(drawing: LanternPipeline, *given: Any) -> Meter:
        kept.append([len(other.engines.engines) for other in opened])
        opened.append(drawing)
        meter = whole(drawing, *given)
        if len(opened) == 1:
            raise DeviceError("the GPU has too little memory")
        return meter

    monkeypatch.setattr(run_bench, "open_meter", measured)
    wanted = BenchRequest(
        settings=parsed("ar", "eagle@chain", "lantern++@chain"),
        modes=[],
        batches=[1, 2],
        images=1,
    )
    cases = cases_of(pipeline, wanted, [mode])[:4]
    rows, missed = run_bench.measure_all(pipeline, wanted, cases, RATES, 0.0)
    assert len(rows) == 3 and len(missed) == 1
    assert kept == [[], [0], [0, stays], [0, stays, 0]]
    assert not any(drawing.engines.engines for drawing in opened)


@pytest.mark.slow
def test_rows_that_take_turns_draw_what_they_draw_alone(
    pipeline: LanternPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of each, then the next of each; one that fails half-way gives its engine back, and the others go on."""
    order: list[str] = []
    failed: list[weakref.ref[Engine]] = []
    bars: list[Any] = []
    whole = Meter.draw

    def draw(meter: Meter, pixels: bool) -> None:
        gc.collect()
        assert all(engine() is None for engine in failed)
        order.append(meter.case.setting.method)
        if meter.case.setting.method == "lantern++" and len(meter.batches) == 1:
            failed.append(weakref.ref(meter.engine))
            raise DeviceError("the GPU has too little memory")
        whole(meter, pixels)

    def kept_bar(*given: Any) -> Any:
        bars.append(ProgressBar(*given))
        return bars[-1]

    settings = parsed("ar", "lantern++@chain", "eagle@chain")
    wanted = BenchRequest(settings=settings, modes=[], batches=[1], images=3)
    cases = cases_of(pipeline, wanted, ["eager"])
    alone, _ = run_bench.measure_all(pipeline, wanted, cases, RATES, 0.0)
    monkeypatch.setattr(Meter, "draw", draw)
    monkeypatch.setattr(run_bench, "ProgressBar", kept_bar)
    rows, missed = run_bench.measure_all(
        pipeline, replace(wanted, interleave=True), cases, RATES, 0.0
    )
    assert order == ["ar", "lantern++", "eagle"] * 2 + ["ar", "eagle"]
    assert len(failed) == len(missed) == 1 and "lantern++" in missed[0]
    assert bars[0].n == bars[0].total == 9
    assert [row.method for row in rows] == ["ar", "eagle"]
    names = ("images", "tokens_per_step", "steps")
    same = [[row[n] for n in names] for row in rows]
    assert same == [[row[n] for n in names] for row in (alone[0], alone[2])]


def test_progress_in_a_pipe_is_lines_with_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each quarter, and where that takes long after each half minute."""
    at = iter([0, 10, 20, 45, 50, 90, 100])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(at))))
    with ProgressBar(10, "batch") as bar:
        bar.set_description("ar", refresh=False)
        for _ in range(4):
            bar.update()
        bar.update(6)
    assert capsys.readouterr().err.splitlines() == [
        "ar: 1 of 10 batches, 01:30 left",
        "ar: 3 of 10 batches, 01:45 left",
        "ar: 10 of 10 batches",
    ]
    at = iter([0, 10])
    with ProgressBar(10, "image", initial=8) as bar:  # a run that goes on
        bar.update()
    assert capsys.readouterr().err == "done: 9 of 10 images, 00:10 left\n"


def test_a_row_draws_no_more_images_than_were_asked_for() -> None:
    """Unless sizes of batches are given."""
    for words, batches in (
        ("", [1, 8]),
        ("--num-images 1", [1]),
        ("--num-images 1 --batch-sizes 4", [4]),
    ):
        assert bench.bench_request(bench.make_parser().parse_args(words.split())).batches == batches


def test_turns_are_taken_within_a_batch_size(
    pipeline: LanternPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def draw(meter: Meter, pixels: bool) -> None:
        order.append(f"{meter.case.setting.method} {meter.case.batch}")
        whole(meter, pixels)

    whole = Meter.draw
    monkeypatch.setattr(Meter, "draw", draw)
    settings = parsed("ar", "scd@2")
    wanted = BenchRequest(settings=settings, modes=[], batches=[1, 2], images=2, interleave=True)
    run_bench.measure_all(pipeline, wanted, cases_of(pipeline, wanted, ["eager"]), RATES, 0.0)
    assert order == ["ar 1", "scd 1"] * 2 + ["ar 2", "scd 2"]


# ------------------------------------------------------------------------------------ options


def test_compiled_modes_get_a_layout_that_they_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: dict[str, Any] = {}
    monkeypatch.setattr(LanternPipeline, "load", lambda name, given: loaded.update(vars(given)))
    asked = bench.make_parser().parse_args(["--graphs", "eager,compile"])
    run_bench.open_pipeline(bench.bench_request(asked))
    assert (loaded["layout"], loaded["graphs"]) == ("plain", "eager")


def test_what_is_measured_of_a_large_model_fits_its_methods() -> None:
    def settings(*options: str) -> list[str]:
        parsed = bench.make_parser().parse_args([*options])
        return [*map(str, bench.bench_request(parsed, LARGE).settings)]

    usual = settings()
    assert {"eagle@chain_2", "eagle2@dynamic:1x0x1", "scd@8"} < set(usual) and len(usual) == 14
    assert settings("--method", "ar,eagle@chain") == ["ar", "eagle@chain"]
    plain = bench.bench_request(bench.make_parser().parse_args([]))
    assert (plain.images, plain.batches, len(plain.settings)) == (8, [1, 8], 8)


def test_a_large_model_on_a_processor_is_measured_briefly(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "LARGE_PARAMETERS", 1000)
    file = tmp_path / "large.json"
    what = ["--model", str(model), "--method", "ar,eagle@flat_4", "--graphs", "eager"]
    assert bench.main([*what, "--output", str(file)]) == 0
    report = read_report(file)
    assert [(row["images"], row["tree"]) for row in report["rows"]] == [(1, "root"), (1, "flat_4")]
    assert "steps of the first batch" not in report["settings"]["warm_up"]


def test_a_row_says_what_its_relaxation_cost(pipeline: LanternPipeline) -> None:
    asked = BenchRequest(settings=parsed("scd:tv=0.2@3"), modes=[], batches=[1])
    (case,) = cases_of(pipeline, asked, ["eager"])
    requests = [Request("red cat", 0, pipeline.model.sampling, case.setting.relaxation)]
    meter = Meter(pipeline, case, requests)
    meter.draw()
    row = run_bench.speed_of(meter, RATES, 0.0)
    (record,) = pipeline.draw(requests, case.setting, 1).records
    assert row["tv_per_token"] == record.tv_mean is not None
    assert 0 < record.tv_mean <= 0.2


def test_tuned_tree_is_measured_in_every_mode(pipeline: LanternPipeline, tmp_path: Path) -> None:
    tree = DraftTree.from_paths("tuned_2", [[0], [0, 0]])
    tuned_trees.save_tree(pipeline.situation("eagle", 2), tuned_trees.TunedTree(tree, 0.9))
    settings = parsed("ar", "eagle@auto", "eagle@chain")
    wanted = BenchRequest(settings=settings, modes=[], batches=[2])
    cases = cases_of(pipeline, wanted, ["eager", "strict"])
    assert [
        (case.setting.tree.name, case.graphs) for case in cases if case.setting.method == "eagle"
    ] == [(tree, mode) for mode in ("eager", "strict") for tree in ("tuned_2", "chain")]
    other = tmp_path / "chain.json"
    other.write_text('{"name": "chain", "paths": [[0]]}')
    twice = replace(wanted, settings=parsed("eagle@chain", f"eagle@{other}"))
    with pytest.raises(OptionError, match="two different trees have the name 'chain'"):
        cases_of(pipeline, twice, ["eager"])
    tuned_trees.save_tree(
        pipeline.situation("eagle", 2), tuned_trees.TunedTree(load_static("chain"), 1.5)
    )
    assert [case.setting.tree.name for case in cases_of(pipeline, wanted, ["eager"])][1:] == [
        "chain"
    ]
    with pytest.raises(OptionError, match="none was tuned for eagle and batches of 7"):
        cases_of(pipeline, replace(wanted, batches=[2, 7]), ["eager"])


def test_floors_in_the_docs_are_those_of_the_script() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for name in floors.MODELS:
        assert floors.table(name) in page
    assert floors.projected_table() in page


def test_promise_measured_steps_of_a_gaudi_2_stand_beside_projected_ones_and_emulated_steps_do_not(
    model: Path, report: Report
) -> None:
    with emulated(model) as (pipeline, _):
        emulated_card = pipeline.backend.describe()["card"]
    config = entries()["llamagen-t2i-256"].config

    def projected(card: object, graphs: str, batch: int, dtype: torch.dtype) -> object:
        meter: Any = SimpleNamespace(pipeline=SimpleNamespace(), engine=SimpleNamespace())
        meter.pipeline.backend = SimpleNamespace(describe=lambda: {"card": card})
        meter.pipeline.model = SimpleNamespace(config=config, target=SimpleNamespace(dtype=dtype))
        meter.engine.spec = SimpleNamespace(rows=2)
        meter.case = Case(Resolved("ar"), graphs, batch)
        return projected_step(meter)

    usual = ("GAUDI2", "hpu_graph", 1, torch.bfloat16)
    assert projected(*usual) == pytest.approx((2.337, 2.638), abs=1e-3)
    others: list[Any] = [(card, *usual[1:]) for card in (emulated_card, "GAUDI3", "H200", None)]
    others += [(*usual[:1], "eager", *usual[2:]), (*usual[:2], 2, *usual[3:])]
    for other in (*others, (*usual[:3], torch.float32)):
        assert projected(*other) is None
    assert "projected" not in speed_tables(report)
    first, *rest = report["rows"]
    row = first | {"ms_per_step": 2.5, "projected_ms": [2.337, 2.638]}
    said = "measured against projected ms a step: ar root 2.50 against 2.3 to 2.6"
    assert said in speed_tables(report | {"rows": [row, *rest]}).splitlines()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": []}, "it has no rows"),
        ({"weights": {}}, "it lacks 'target'"),
        ({"graphs": {}}, "it lacks 'best'"),
        ({"rows": [{"method": "magic"}]}, "rows[0] lacks tree"),
        ({"rows": 7}, "'int' object is not iterable"),
    ],
)
def test_damage_names_its_place(report: Report, change: Report, said: str) -> None:
    assert not damage_of(report)
    with pytest.raises(OptionError, match=r"x\.json is damaged") as caught:
        check_report(report | change, "x.json")
    assert caught.value.why == said
    (row,) = report["rows"][:1]
    assert damage_of(report | {"rows": [row | {"seconds_per_image": "?"}]})
    assert damage_of(report | {"rows": [row | {"method": "magic"}]})


# ------------------------------------------------------------------------------------ floors

TARGET = TransformerConfig(20, 8, 2, 2, ffn_dim=6, prefix=6, grid=(2, 4), kv_heads=1)
SMALL = ModelConfig(TARGET, ConditionConfig("tokens"), DrafterConfig())
# Matrices and norms of a block; all blocks, the head, and the drafter: its fc, and a block with one norm
BLOCK = 8 * (8 + 4 + 4) + 8 * 8 + 3 * 8 * 6 + 2 * 8
BODY, HEAD, OWN = 2 * BLOCK, 20 * 8, 2 * 8 * 8 + 8 + BLOCK - 8


def test_floor_of_a_pass_is_the_longer_of_reading_and_multiplying() -> None:
    # 2 rows of 10 positions, each with a key and a value of 4 numbers in 2 layers; queries are 8 numbers wide
    read = 2 * (BODY + HEAD + 2 * 10 * 2 * 2 * 4)
    multiply = 2 * (2 * (BODY + HEAD) + 4 * 10 * 2 * 8)
    one = StepPasses((), Pass(1, 1))
    assert floor(SMALL, one, 2, Rates(read, 1e12)) == Floor(0.0, 1.0, "bandwidth")
    slow = floor(SMALL, one, 2, Rates(1e12, multiply))
    assert slow.bound == "arithmetic" and slow.step == pytest.approx(1)
    assert floor(SMALL, one, 2, Rates(read, 1e12, number_bytes=4)).step == pytest.approx(2)
    halved = floor(SMALL, one, 2, Rates(read, 1e12, number_bytes=4, weight_bytes=2)).step
    assert halved == pytest.approx(2 - 2 * (BODY + HEAD) / read)


def test_passes_of_a_step_add_up() -> None:
    passes = StepPasses.of(load_tree("chain"))
    assert passes.draft == (Pass(1, 1),) * 5 and passes.verify == Pass(6, 6)
    grown = StepPasses.of(DynamicTree(top_k=3, expansions=2, drafts=7))
    assert grown.draft == (Pass(1, 1), Pass(3, 3), Pass(3, 3)) and grown.verify.tokens == 8
    whole = floor(SMALL, passes, 2, Rates(1.0, 1e12))
    # A drafter's pass reads drafter, head, and a cache of one layer.
    assert whole.draft == pytest.approx(5 * 2 * (OWN + HEAD + 2 * 10 * 2 * 4))
    alone = floor(SMALL, StepPasses((), Pass(6, 6)), 2, Rates(1.0, 1e12))
    assert whole.step > whole.verify == alone.verify


def test_sizes_of_a_report_are_those_of_the_model() -> None:
    counted = {"body": BODY, "head": HEAD, "drafter": OWN, "layers": 2, "width": 8, "kv_width": 4}
    about = {"prefix": 6, "tokens": 8, "rows_per_image": 2, "number_bytes": 4}
    assert sizes(SMALL, True, 4) == counted | about
    assert sizes(replace(SMALL, drafter=None), False, 4)["drafter"] == 0


def test_rates_are_in_the_runs_format() -> None:
    found = metering.measure_rates(get_backend("cpu"), torch.float32)
    assert found["copy_bytes_per_s"] > 0 and found["operations_per_s"] > 0
    assert found["bf16_operations_per_s"] is not None and found["bf16_operations_per_s"] > 0
