"""`bench --random-weights` times a known model without its files, whole or in parts, beside what others print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lantern_hpu.decode.requirements import find_model
from lantern_hpu.errors import DeviceError
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.model import EmptyModel, count_numbers
from lantern_hpu.ops.quantized import QuantizedLinear, matrix_layers
from lantern_hpu.zoo.registry import KnownModel, entries, get
from lantern_lab.commands import bench
from lantern_lab.measure import first_stage
from lantern_lab.measure import meter as metering
from tests.marks import mostly_slow

# Known models, and the folder of a small one of the same family
FOLDERS = {
    "llamagen-t2i-256": "llamagen-t2i-256",
    "anole-7b": "anole",
    "janus-pro-7b": "janus-pro",
    "lumina-mgpt-2.0": "lumina-mgpt-2.0",
    "emu3-gen": "emu3",
    "emu3.5-image": "emu3.5-image",
    "simplear-1.5b-512": "simplear",
    "mammothmoda2-preview": "mammothmoda2",
    "glm-image": "glm-image",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps, small tensors: the figures are not the point."""
    changes = {"COPIED": 2**20, "LARGEST": 256, "TIMES": 1, "ENOUGH": 1e-4, "BRIEF_STEPS": 1}
    for name, value in changes.items():
        monkeypatch.setattr(metering, name, value)


def small(public: Path, name: str) -> KnownModel:
    """A known model with the sizes of a small one."""
    return replace(
        get(name), config=find_model(str(public / FOLDERS[name]), PartOverrides()).config
    )


def timed(known: KnownModel, monkeypatch: pytest.MonkeyPatch, output: Path, *more: str) -> Any:
    monkeypatch.setattr(first_stage, "get", lambda name: known)
    given = ["--random-weights", "--model", known.name, "--device", "cpu", "--dtype", "float32"]
    assert bench.main([*given, *more, "--output", str(output)]) == 0
    return json.loads(output.read_text())


@pytest.mark.parametrize("name", mostly_slow(FOLDERS, "glm-image", "llamagen-t2i-256"))
def test_every_family_is_timed_without_its_files(
    name: str, public: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    known = small(public, name)
    report = timed(known, monkeypatch, tmp_path / "first.json", "--method", "ar,scd@2")
    depth = known.config.target.layers
    assert report["layers"] == {"timed": [depth], "all": depth}
    ar, scd = report["rows"]
    steps = known.config.target.tokens - 1
    assert ar["first_stage_s"] == pytest.approx(ar["prefill_s"] + steps * ar["ms_per_step"] / 1000)
    assert ar["tokens_per_step_to_equal_ar"] == 1 and ar["share_of_least_time"] > 0
    # What random weights accept says nothing
    assert scd["first_stage_s"] is None and scd["share_of_least_time"] is None
    assert scd["tokens_per_step_to_equal_ar"] == pytest.approx(
        scd["ms_per_step"] / ar["ms_per_step"]
    )
    said = capsys.readouterr().out
    assert f"{name}, random weights, float32, cpu: {depth} of {depth} layers timed" in said
    peers = [one for one in report["others"] if one["who"] in said]
    assert len(peers) == len(report["others"]) and ("not measured here" in said) == bool(peers)
    assert bool(peers) == (name in ("glm-image", "mammothmoda2-preview"))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_small_matrices_are_timed_and_their_bytes_counted(
    form: str, public: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    known, bits = small(public, "glm-image"), set[int]()
    random_target = first_stage.random_target

    def checked(*given: Any) -> Any:
        target = random_target(*given)
        for _, layer in matrix_layers(target, QuantizedLinear):
            bits.add(layer.bits)
            assert all(layer.allows(name, part) for name, part in layer.named_parameters())
        return target

    monkeypatch.setattr(first_stage, "random_target", checked)
    report = timed(known, monkeypatch, tmp_path / "f.json", "--method", "ar", "--quantize", form)
    assert report["quantize"] == form
    assert f"float32, {form} matrices, cpu" in capsys.readouterr().out
    assert bits and bits <= {8, 4} and min(bits) == int(form[3:])


def test_what_does_not_fit_is_timed_in_parts(
    public: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two shallower models; a time that grows with the layers is that of all of them."""
    known = small(public, "llamagen-t2i-256")
    deep = replace(known.config.target, layers=10)
    known = replace(known, config=replace(known.config, target=deep))
    numbers = count_numbers(EmptyModel.of(known.config).target)
    layer = count_numbers(EmptyModel.of(known.config).target.layers) / 10
    rooms = {float("inf"): [10], numbers: [10], numbers - 4.5 * layer: [2, 5]}
    for room, depths in rooms.items():
        assert first_stage.depths_that_fit(known, room) == depths
    with pytest.raises(DeviceError, match="no room for two layers"):
        first_stage.depths_that_fit(known, numbers - 9 * layer)
    built = list[int]()

    def proportional(target: Any, *_: Any) -> first_stage.Timing:
        built.append(len(target.layers))
        return first_stage.Timing(0.5 + len(target.layers), 7 + 3 * len(target.layers))

    monkeypatch.setattr(first_stage, "depths_that_fit", lambda *_: [2, 5])
    monkeypatch.setattr(first_stage, "timing", lambda *_: first_stage.Timing(1, 1))
    given = ["--random-weights", "--model", known.name, "--device", "cpu", "--method", "ar"]
    monkeypatch.setattr(first_stage, "get", lambda name: known)
    assert bench.main(given) != 0  # on a busy machine
    monkeypatch.setattr(first_stage, "timing", proportional)
    report = timed(known, monkeypatch, tmp_path / "first.json", "--method", "ar")
    assert built == [2, 5] and report["layers"] == {"timed": [2, 5], "all": 10}
    (row,) = report["rows"]
    assert (row["prefill_s"], row["ms_per_step"]) == (pytest.approx(10.5), pytest.approx(37))


def test_what_random_weights_cannot_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in {
        "--num-images 2": "--random-weights has no --num-images",
        "--interleave": "--random-weights has no --interleave",
        "--graphs eager,strict": "one graph mode with random weights",
        "--model no-such-model": "unknown model 'no-such-model'",
        "--method eagle": "drafter",
    }.items():
        assert bench.main(["--random-weights", "--model", "glm-image", *words.split()]) == 2
        assert said in capsys.readouterr().err, words


def test_figures_of_others_have_a_source_and_a_known_model() -> None:
    figures = json.loads(first_stage.OTHERS.read_text())["figures"]
    assert figures.keys() <= entries().keys()
    assert all(one["source"] for of_model in figures.values() for one in of_model)
    for one in figures["glm-image"]:  # of 1280 tokens, where both are printed
        if one["ms_per_token"]:
            assert one["ms_per_token"] * 1.28 == pytest.approx(one["first_stage_s"], rel=0.02)
