"""First tokens of many seeds against the model's probabilities: lossless methods pass, planted faults do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lantern_hpu.pipeline import LanternPipeline
from lantern_lab.verify.ask import Asked
from lantern_lab.verify.distribution import binned_tv, chance_of, measure, placed
from lantern_lab.verify.items import Stage

SEEDS = 128


@pytest.fixture(scope="module")
def host(model: Path) -> LanternPipeline:
    return LanternPipeline.from_pretrained(
        str(model), device="cpu", dtype="float32", graphs="eager", kernels="plain", layout="plain"
    )


@pytest.mark.parametrize("method", ["ar", "scd@4", "eagle"])
def test_lossless_methods_draw_from_the_distribution(
    pipeline: LanternPipeline, host: LanternPipeline, method: str
) -> None:
    found = measure(pipeline, host, pipeline.resolve(method), "red cat", SEEDS)
    assert found.chance > 1e-3 and found.tv < 0.05 and found.metered is None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle@chain", "eagle@deep_7"])
def test_drafts_verified_together_are_drawn_from_the_distribution(
    pipeline: LanternPipeline, host: LanternPipeline, method: str
) -> None:
    setting = pipeline.resolve(method)
    assert setting.relaxation.verify == "block"
    assert measure(pipeline, host, setting, "red cat", 4096).chance > 1e-4


def test_a_relaxed_method_is_told_from_a_lossless_one(
    pipeline: LanternPipeline, host: LanternPipeline
) -> None:
    """Its distance, as far as the bins show it, is near the meter's."""
    found = measure(pipeline, host, pipeline.resolve("scd:tv=1@4"), "red cat", SEEDS)
    assert found.chance < 1e-4 and found.metered is not None
    assert 0.1 < found.tv < found.metered + 0.1


def test_a_device_that_draws_too_sharply_is_refuted(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(Stage("distribution", "auto", "cpu"), "cpu", str(model))
    monkeypatch.setattr("lantern_lab.verify.ask.SEEDS", SEEDS)
    with asked.stack:
        assert asked.answer("ar")[0] == "confirmed"
        own = asked.pipeline.model  # on its device alone
        own.sampling = replace(own.sampling, temperature=0.5)
        state, detail, _ = asked.answer("ar")
        assert state == "refuted" and "chance" in detail


def test_places_of_exact_draws_are_uniform_and_others_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(4096, 1, 7, generator=generator).pow(4)
    p /= p.sum(-1, keepdim=True)

    def counts(drawn_from: Tensor) -> Tensor:
        tokens = torch.multinomial(drawn_from[:, 0], 1, generator=generator)
        where, possible = placed(p, tokens, generator)
        assert possible.all() and where.min() >= 0 and where.max() <= 1
        return torch.bincount((where[:, 0] * 16).long().clamp(max=15), minlength=16)[None].float()

    exact, sharper = counts(p), counts(p.square())
    assert chance_of(exact) > 1e-3 and binned_tv(exact) < 0.02
    assert chance_of(sharper) < 1e-9 and binned_tv(sharper) > 0.1
    assert not placed(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[1]]), generator)[1].any()
