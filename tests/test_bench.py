"""The benchmark: its report follows the schema, its figures hang together, and nothing modelled passes for measured."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_hpu import bench, measure, rates, registry, tuned
from lantern_hpu.backends import get_backend
from lantern_hpu.backends.base import Backend
from lantern_hpu.config import METHODS, Request
from lantern_hpu.errors import DeviceError, OptionError
from lantern_hpu.models.transformer import Target
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.random_weights import make_drafter, make_model, transformer_config
from lantern_hpu.report import VERSION, check_report, problems, read_report, schema
from lantern_hpu.roofline import Floor, Pass, Rates, Shape, Sizes, accelerators, floor, projected_ms
from lantern_hpu.tree import DraftTree, DynamicTree, load_static, load_tree
from scripts import floors
from tests.folder import write_folder

Report = dict[str, Any]
# Fields that README and earlier results use
KEPT = (
    "method tree graphs batch_size images warmup_s batch_seconds seconds_per_image p50_batch_s images_per_second "
    "prefill_s_per_image steps_s_per_image vq_decode_s_per_image tokens_per_step ms_per_step accepted_by_depth "
    "relaxed_accepts_per_image host_reads_per_image recompiles_after_warmup eager_step_ms speed_against_ar"
).split()


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    """Few steps, small tensors: the figures are not the point."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "WARM_STEPS", 2)
        patch.setattr(measure, "SPLIT_STEPS", 2)
        for name, value in {"COPIED": 2**20, "LARGEST": 256, "TIMES": 1, "ENOUGH": 1e-4}.items():
            patch.setattr(rates, name, value)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def report(model: Path, small: None) -> Report:
    """{ar, eagle, eagle2} x {eager, strict}; three images in batches of two are four."""
    file = model.parent / "bench.json"
    what = ["--methods", "ar,eagle,eagle2", "--trees", "chain,dynamic:2x1x4"]
    how = ["--graphs", "eager,auto,strict", "--batch-sizes", "2", "--images", "3"]
    assert bench.main(["--model", str(model), *what, *how, "--output", str(file)]) == 0
    return read_report(file)


@pytest.fixture(scope="module")
def random_report(small: None, tmp_path_factory: pytest.TempPathFactory) -> Report:
    known = registry.entries() | {"tiny": tiny_entry("anole-7b")}
    file = tmp_path_factory.mktemp("random") / "random.json"
    what = ["--random-weights", "tiny", "--methods", "ar,lantern++", "--tree", "chain"]
    how = ["--batch-sizes", "1", "--steps", "3", "--tokens-per-step", "2,9", "--graphs", "eager"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entries", lambda: known)
        assert bench.main([*what, *how, "--output", str(file)]) == 0
    return read_report(file)


def tiny_entry(like: str) -> registry.Entry:
    """A known model, made small."""
    entry = registry.entries()[like]
    sizes = {"layers": 2, "dim": 32, "heads": 2, "head_dim": 16, "ffn_dim": 48, "vocab": 64}
    geometry = replace(entry.geometry, **sizes, embed_rows=64, prefix=4, grid=(4, 4))
    return replace(entry, name="tiny", geometry=geometry, sampling={**entry.sampling, "top_k": 20})


def rows_of(report: Report, **wanted: object) -> list[dict[str, Any]]:
    return [row for row in report["rows"] if all(row[k] == v for k, v in wanted.items())]


# ------------------------------------------------------------------------------------ the report


def test_report_is_of_this_version_and_keeps_its_fields(report: Report) -> None:
    assert report["version"] == VERSION == schema()["properties"]["version"]["const"]
    for row in report["rows"]:
        assert set(KEPT) <= set(row)
    assert set(measure.PARTS) == set(report["rows"][0]["eager_step_ms"])


def test_square_is_complete_and_auto_is_measured_once(report: Report) -> None:
    rows = report["rows"]
    assert [(row["method"], row["graphs"]) for row in rows] == [
        (method, mode) for mode in ("eager", "strict") for method in ("ar", "eagle", "eagle2")
    ]
    assert report["graphs"]["measured"] == ["eager", "strict"]
    assert any("`auto` is `eager` on this device" in note for note in report["notes"])


def test_modes_draw_the_same_images(report: Report) -> None:
    """The same weights, sampler and seeds: only times may differ."""
    for method in ("ar", "eagle", "eagle2"):
        same = {
            (row["tokens_per_step"], *row["accepted_by_depth"])
            for row in rows_of(report, method=method)
        }
        assert len(same) == 1
        assert all(row["images"] == 4 for row in rows_of(report, method=method))


def test_figures_hang_together(report: Report) -> None:
    for row in report["rows"]:
        assert 0 < row["p50_seconds_per_image"] <= row["p95_seconds_per_image"]
        assert 0 < row["p50_ms_per_step"] <= row["p95_ms_per_step"]
        total = sum(row["batch_seconds"])
        assert row["seconds_per_image"] == pytest.approx(total / row["images"])
        assert row["images_per_second"] * row["seconds_per_image"] == pytest.approx(1)
        assert row["steps_s_per_image"] < row["seconds_per_image"]
        assert 0 <= row["host_share"] < 1
        assert row["floor_ratio"] == pytest.approx(row["floor_ms"] / row["ms_per_step"])
        assert row["startup_s"] == pytest.approx(sum(report["startup"].values()) + row["warmup_s"])
        assert row["recompiles_after_warmup"] == 0
        assert row["state_bytes"] > 0 and row["projected"] == []
        assert sum(row["eager_step_ms"].values()) > 0
        assert row["graph_replays"] >= row["steps"]


def test_acceptance_is_counted_by_depth(report: Report) -> None:
    row = rows_of(report, method="eagle")[0]
    assert row["accepted_per_step"] == pytest.approx(sum(row["accepted_by_depth"]))
    reached = 1.0
    for share, given in zip(row["accepted_by_depth"], row["accept_rate_by_depth"], strict=True):
        assert given is None if reached == 0 else given == pytest.approx(share / reached)
        reached = share


def test_speed_is_against_ar_and_against_the_own_eager_run(report: Report) -> None:
    for row in report["rows"]:
        (base,) = rows_of(report, method="ar", graphs=row["graphs"], batch_size=row["batch_size"])
        (own,) = rows_of(report, method=row["method"], graphs="eager", batch_size=row["batch_size"])
        seconds = row["seconds_per_image"]
        assert row["speed_against_ar"] == pytest.approx(base["seconds_per_image"] / seconds)
        assert row["speed_against_eager"] == pytest.approx(own["seconds_per_image"] / seconds)


def test_printed_tables_have_every_row(report: Report) -> None:
    text = bench.tables(report)
    assert text.count("| eagle2 |") == 2 + 1 + 1  # rows, eager beside strict, parts of a step
    assert "GB/s" in text and "TFLOP/s" in text and "note: " in text
    assert "strict x eager" in text


def test_without_ar_there_is_no_speed_against_it() -> None:
    rows = [{"method": "eagle", "tree": "chain", "graphs": "strict", "batch_size": 1}]
    rows[0] |= {"seconds_per_image": 2.0, "ms_per_step": 3.0}
    bench.add_speeds(rows)
    assert rows[0]["speed_against_ar"] is None and rows[0]["speed_against_eager"] is None


# ------------------------------------------------------------------------------------ measuring


def test_split_leaves_the_step_as_it_was(model: Path, small: None) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), graphs="eager")
    method, tree, relaxation = pipeline.choose("eagle", "chain")
    case = measure.Case(method, tree, relaxation, "eager", 1)
    requests = [Request("red cat", 0, pipeline.model.sampling, relaxation)]
    before = pipeline.draw(requests, tree, method, 1).tokens
    other = pipeline.choose("ar")
    pipeline.draw(requests, other[1], "ar", 1)
    engine = measure.ready(pipeline, case, requests)
    assert list(pipeline.engines.values()) == [engine]  # the other one's memory is free
    parts = measure.split_step(pipeline, engine, requests)
    assert set(parts) == set(measure.PARTS) and parts["tables"] == 0
    assert not {"draft", "verify", "accept", "commit"} & set(engine.step.function.__dict__)
    assert measure.alone(pipeline, engine, requests) > 0
    assert (pipeline.draw(requests, tree, method, 1).tokens == before).all()


def test_steps_are_timed_even_past_the_end_of_an_image(model: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model), graphs="eager")
    tree = pipeline.choose("ar")[1]
    requests = [Request("red cat", 0, pipeline.model.sampling)]
    engine, _ = pipeline.engine(requests, tree, 1)
    _, blocks = measure.advance(pipeline, engine, requests, 20)  # an image takes 15
    assert 20 <= sum(count for _, count in blocks) <= 35


def test_quantiles_lie_between_their_neighbours() -> None:
    assert measure.quantile([5.0], 0.95) == 5
    assert measure.quantile([3.0, 1.0, 2.0], 0.5) == 2
    assert measure.quantile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    assert measure.per_step([(0.2, 2), (0.3, 1)]) == pytest.approx([100, 100, 300])


class Picky(Backend):
    """A device whose best mode settles which others there are."""

    name, graph_modes = "picky", {"hpu_graph": "best"}

    def available(self) -> tuple[bool, str]:
        return True, ""

    synchronize = memory = describe = None  # type: ignore[assignment]


def test_a_mode_that_cannot_be_had_is_noted_or_refused() -> None:
    backend = Picky()
    found, notes = bench.settle(backend, ["eager", "auto"], by_name=False)
    assert found == ["hpu_graph"]
    assert "--graphs eager" in notes[0]
    with pytest.raises(DeviceError, match="no graph mode 'eager'"):
        bench.settle(backend, ["eager", "auto"], by_name=True)


def test_a_row_that_does_not_fit_is_noted_and_the_others_are_measured(
    model: Path, small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = bench.measure_images

    def crowded(pipeline: LanternPipeline, case: measure.Case, *given: Any) -> dict[str, Any]:
        if case.batch > 1:
            raise DeviceError("the GPU has too little memory", "0 GB are free")
        return whole(pipeline, case, *given)

    monkeypatch.setattr(bench, "measure_images", crowded)
    options = ["--model", str(model), "--methods", "ar", "--graphs", "eager", "--images", "1"]
    assert bench.main([*options, "--batch-sizes", "1,2"]) == 0
    assert "note: not measured: ar, root, eager, batch 2: the GPU has" in capsys.readouterr().out
    assert bench.main([*options, "--batch-sizes", "2"]) == 2
    assert "nothing could be measured" in capsys.readouterr().err


def test_the_first_recorded_engine_stays_while_others_come(model: Path, small: None) -> None:
    """Its graph holds the memory that recorded graphs share."""
    pipeline = LanternPipeline.from_pretrained(str(model), graphs="strict")
    engines = []
    for method, tree in (("ar", None), ("eagle", "chain"), ("lantern++", "chain")):
        _, chosen, relaxation = pipeline.choose(method, tree)
        case = measure.Case(method, chosen, relaxation, "strict", 1)
        requests = [Request("red cat", 0, pipeline.model.sampling, relaxation)]
        engines.append(measure.ready(pipeline, case, requests))
    assert list(pipeline.engines.values()) == [engines[0], engines[2]]


# ------------------------------------------------------------------------------------ random weights


def test_random_weights_have_steps_and_no_images(random_report: Report) -> None:
    assert random_report["random_weights"] == "tiny"
    for row in random_report["rows"]:
        assert row["seconds_per_image"] is row["tokens_per_step"] is row["speed_against_ar"] is None
        assert row["images"] == 0 and row["steps"] >= 3 and row["ms_per_step"] > 0
    text = bench.tables(random_report)
    assert "tokens a step (given)" in text and "(projected)" in text
    assert any("mean nothing" in note for note in random_report["notes"])


def test_projected_speeds_are_labelled_and_follow_from_the_steps(random_report: Report) -> None:
    ar, drafted = random_report["rows"]
    # A chain of five drafts adds six tokens at most, so nine are not projected.
    (entry,) = drafted["projected"]
    assert entry["label"] == "projected" and entry["tokens_per_step"] == 2
    assert entry["steps_s_per_image"] == pytest.approx(15 / 2 * drafted["ms_per_step"] / 1000)
    assert entry["speed_against_ar"] == pytest.approx(
        2 * ar["ms_per_step"] / drafted["ms_per_step"]
    )


@pytest.mark.parametrize("name", bench.RANDOM.values())
def test_random_models_have_the_sizes_of_the_real_ones(name: str) -> None:
    entry = registry.entries()[name]
    config = transformer_config(entry)
    with torch.device("meta"):
        target = Target(config)
        drafter = make_drafter(entry, config, target.kernels)
    geometry = replace(entry.geometry, caption_dim=0, classes=0, embed_rows=config.vocab_size)
    assert sum(p.numel() for p in target.parameters()) == geometry.target_parameters
    if geometry.drafter is not None:
        shown = replace(geometry, drafter={**geometry.drafter, "embed_rows": config.vocab_size})
        assert sum(p.numel() for p in drafter.parameters()) == shown.drafter_parameters


def test_random_weights_are_made_in_their_format_and_finite() -> None:
    model = make_model(tiny_entry("llamagen-t2i-512"), get_backend("cpu"), "bfloat16")
    assert model.drafter is not None
    for module in (model.target, model.drafter):
        for weight in module.parameters():
            assert weight.dtype == torch.bfloat16 and weight.isfinite().all()
    assert float(model.target.norm.weight.float().std()) == 0
    assert 0.01 < float(model.target.head.weight.float().std()) < 0.03


# ------------------------------------------------------------------------------------ options

BAD = [
    (["--methods", "magic"], "unknown method 'magic'"),
    (["--methods", "ar,ar"], "--methods names ar twice"),
    (["--graphs", "magic"], "unknown graph mode 'magic'"),
    (["--graphs", "hpu_graph"], "has no graph mode 'hpu_graph'"),
    (["--batch-sizes", "1,0"], "--batch-sizes is 1,0"),
    (["--batch-sizes", "some"], "expected numbers"),
    (["--images", "0"], "--images is 0"),
    (["--steps", "0"], "--steps is 0"),
    (["--seed", "-1"], "--seed is -1"),
    (["--trees", "chain", "--methods", "ar,eagle2"], "--trees chain fits none of"),
    (["--trees", "nowhere"], "unknown tree 'nowhere'"),
    (["--trees", ","], "--trees is empty"),
    (["--random-weights", "magic"], "no sizes are known of 'magic'"),
    (["--random-weights", "llamagen-xl", "--model", "builtin"], "exclude each other"),
    (["--tokens-per-step", "0.5"], "--tokens-per-step is 0.5"),
    (["--output", "taken.json"], "taken.json exists"),
]


@pytest.mark.parametrize(("options", "said"), BAD, ids=lambda value: " ".join(value)[:40])
def test_bad_options_are_refused(
    options: list[str],
    said: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.json").write_text("{}")
    named = [] if "--random-weights" in options else ["--model", str(model)]
    assert bench.main([*named, *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("error: ") and error.count("error: ") == 1


def test_each_method_gets_the_trees_of_its_kind() -> None:
    pairs = bench.pairs_for(list(METHODS), ["chain", "mc_sim_7b_63"])
    assert pairs[:3] == [("ar", None), ("eagle", "chain"), ("eagle", "mc_sim_7b_63")]
    assert ("eagle2", None) in pairs and ("lantern++", "mc_sim_7b_63") in pairs


def test_tuned_tree_is_measured_in_every_mode(model: Path, tmp_path: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(model))
    tree = DraftTree.from_paths("tuned_2", [[0], [0, 0]])
    tuned.save(pipeline.situation("eagle", 2), tuned.Choice(tree, True))
    pairs = bench.pairs_for(["ar", "eagle"], ["auto", "chain"])
    assert pairs == [("ar", None), ("eagle", "auto"), ("eagle", "chain")]
    wanted = bench.Wanted(None, pairs, [], True, [2], [])
    cases = bench.cases_of(pipeline, wanted, ["eager", "strict"])
    assert [(case.tree.name, case.mode) for case in cases if case.method == "eagle"] == [
        (tree, mode) for mode in ("eager", "strict") for tree in ("tuned_2", "chain")
    ]
    other = tmp_path / "chain.json"
    other.write_text('{"name": "chain", "paths": [[0]]}')
    twice = replace(wanted, pairs=bench.pairs_for(["eagle"], ["chain", str(other)]))
    with pytest.raises(OptionError, match="two different ones of the name 'chain'"):
        bench.cases_of(pipeline, twice, ["eager"])
    tuned.save(pipeline.situation("eagle", 2), tuned.Choice(load_static("chain"), False))
    assert [case.tree.name for case in bench.cases_of(pipeline, wanted, ["eager"])][1:] == ["chain"]
    with pytest.raises(OptionError, match="none was tuned for eagle and batches of 7"):
        bench.cases_of(pipeline, replace(wanted, batches=[2, 7]), ["eager"])


def test_floors_in_the_docs_are_those_of_the_script() -> None:
    page = (Path(__file__).parent.parent / "docs" / "performance.md").read_text()
    for name in floors.MODELS:
        assert floors.table(name) in page


# ------------------------------------------------------------------------------------ the schema

KEYWORDS = {
    *("$schema", "title", "description", "type", "properties", "required", "additionalProperties"),
    *("items", "minItems", "minimum", "exclusiveMinimum", "const", "enum"),
}


def rules(rule: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield rule
    for below in rule.get("properties", {}).values():
        yield from rules(below)
    if "items" in rule:
        yield from rules(rule["items"])


def test_schema_uses_only_what_our_reader_knows() -> None:
    for rule in rules(schema()):
        assert set(rule) <= KEYWORDS
        assert set(rule.get("required", ())) <= set(rule.get("properties", {}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": []}, "rows has 0 entries"),
        ({"date": 7}, "date is 7, not of type string"),
        ({"weights_bytes": True}, "weights_bytes is true, not of type integer"),
        ({"surprise": 1}, "surprise is unknown"),
        ({"rows": [{"method": "magic"}]}, 'rows[0].method is "magic", not one of ar, eagle'),
    ],
)
def test_problems_name_their_place(report: Report, change: Report, said: str) -> None:
    assert not list(problems(report, schema()))
    assert any(problem.startswith(said) for problem in problems(report | change, schema()))


def test_every_field_is_needed(report: Report) -> None:
    for name in report["rows"][0]:
        broken = copy.deepcopy(report)
        del broken["rows"][0][name]
        assert list(problems(broken, schema())) == [f"rows[0] lacks {name}"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": VERSION + 1}, "a newer program wrote it"),
        ({"version": "2"}, "it is too old"),
        ({"kind": "lantern_hpu.fidelity"}, "lantern_hpu.fidelity"),
        ({"dtype": None}, "is damaged: dtype is null"),
    ],
)
def test_reports_of_other_kinds_are_refused_politely(
    report: Report, change: Report, said: str
) -> None:
    with pytest.raises(OptionError) as caught:
        check_report(report | change, "x.json")
    assert said in str(caught.value) and "x.json" in str(caught.value) and caught.value.hint


def test_a_report_without_a_version_is_too_old(report: Report) -> None:
    with pytest.raises(OptionError, match="version 1"):
        check_report({k: v for k, v in report.items() if k != "version"}, "x.json")


# ------------------------------------------------------------------------------------ floors

SIZES = Sizes(
    body=1000,
    head=200,
    drafter=100,
    layers=2,
    width=8,
    kv_width=4,
    prefix=6,
    tokens=8,
    rows_per_image=2,
    number_bytes=2,
)


def test_floor_of_a_pass_is_the_longer_of_reading_and_multiplying() -> None:
    # 2 rows, 10 slots: 2 (1200 + 2 * 10 * 2 * 2 * 4) bytes; 2 rows (2 (1000 + 200) + 4 * 10 * 2 * 8) operations
    one = Shape((), Pass(1, 1))
    assert floor(SIZES, one, 1, Rates(3040, 1e12)) == Floor(0.0, 1.0, "bandwidth")
    slow = floor(SIZES, one, 1, Rates(1e12, 6080))
    assert slow.bound == "arithmetic" and slow.step == pytest.approx(1)


def test_passes_of_a_step_add_up() -> None:
    shape = Shape.of(load_tree("chain"))
    assert shape.draft == (Pass(1, 1),) * 5 and shape.verify == Pass(6, 6)
    assert Shape.from_json(json.loads(json.dumps(shape.as_json()))) == shape
    grown = Shape.of(DynamicTree(top_k=3, expansions=2, drafts=7))
    assert grown.draft == (Pass(1, 1), Pass(3, 3), Pass(3, 3)) and grown.verify.tokens == 8
    whole = floor(SIZES, shape, 1, Rates(1.0, 1e12))
    # A drafter's pass reads drafter, head, and a cache of one layer.
    assert whole.draft == pytest.approx(5 * 2 * (300 + 2 * 10 * 2 * 4))
    assert (
        whole.step > whole.verify == floor(SIZES, Shape((), Pass(6, 6)), 1, Rates(1.0, 1e12)).verify
    )


def test_projection_misses_the_floor_as_the_measured_device_did() -> None:
    card = accelerators()["gaudi2"]
    shape, own = Shape((), Pass(1, 1)), Rates(card.bandwidth / 10, card.rate / 10)
    assert projected_ms(50.0, SIZES, shape, 1, own, card) == pytest.approx(5.0)
    # Measured in float32, projected in bfloat16: half the bytes
    wide = replace(SIZES, number_bytes=4)
    assert projected_ms(50.0, wide, shape, 1, own, card) == pytest.approx(2.5)


def test_every_accelerator_names_its_source() -> None:
    assert {"gaudi2", "gaudi3", "rtx3090", "rtx4090", "a100", "h100", "h200"} == set(accelerators())
    for card in accelerators().values():
        assert card.source.count('"') in (2, 4) and card.cards
        assert 0.5e12 < card.bandwidth < 10e12 and 50e12 < card.rate < 3e15


def test_rates_are_in_the_runs_format(small: None) -> None:
    found = rates.measure_rates(get_backend("cpu"), "float32")
    for name in ("copy_bytes_per_s", "bf16_operations_per_s", "operations_per_s"):
        value = found[name]
        assert isinstance(value, float) and value > 0
