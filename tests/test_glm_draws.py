"""GLM-Image's tokens: distributed as transformers draws them, by windows too, and relaxed by its own codes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from lantern_hpu.core import Request, Sampling
from lantern_hpu.models.model import nearest_codes
from tests.marks import mostly_slow
from tests.test_glm_image import PROMPTS, drawn, inputs_of, pipeline_of, reference, their_logits

pytest.importorskip("transformers.models.glm_image")

GRID, SIZE = (2, 3), (64, 96)
LEAST = 40.0  # draws expected of a class
RELAXED = ("scd:lambda=3:k=8@8", "scd:tv=0.2@8", "sjd-pac:lambda=20:k=8@8")


@pytest.fixture(scope="module")
def folder(public: Path) -> Path:
    return public / "glm-image"


# ------------------------------------------------------------------------------------ distribution


def kept(probs: Tensor, keep: Tensor) -> Tensor:
    """Probs [.., V] of what is kept alone."""
    rest = probs * keep
    return rest / rest.sum(-1, keepdim=True)


def of_top_k(probs: Tensor, k: int) -> Tensor:
    return kept(probs, probs >= probs.sort(descending=True).values[..., k - 1 : k])


def of_top_p(probs: Tensor, mass: float) -> Tensor:
    ordered = probs.sort(descending=True)
    before = ordered.values.cumsum(-1) - ordered.values
    keep = torch.zeros_like(probs, dtype=torch.bool).scatter(-1, ordered.indices, before < mass)
    return kept(probs, keep)


def reference_order(logits: Tensor, sampling: Sampling) -> Tensor:
    """transformers' own: temperature, top-k, then top-p of what that leaves. -> probs [n, V]"""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    none = torch.zeros(len(logits), 1, dtype=torch.long)
    scores = logits
    for warper in (
        TemperatureLogitsWarper(sampling.temperature),
        TopKLogitsWarper(sampling.top_k),
        TopPLogitsWarper(sampling.top_p),
    ):
        scores = warper(none, scores)
    return scores.softmax(-1)


def top_p_first(logits: Tensor, sampling: Sampling) -> Tensor:
    probs = (logits / sampling.temperature).softmax(-1)
    return of_top_k(of_top_p(probs, sampling.top_p), sampling.top_k)


def temperature_last(logits: Tensor, sampling: Sampling) -> Tensor:
    probs = of_top_p(of_top_k(logits.softmax(-1), sampling.top_k), sampling.top_p)
    return (probs.log() / sampling.temperature).softmax(-1)


def p_value(probs: Tensor, tokens: Tensor) -> float:
    """By chi-square over the rank of each token among the probs of its place.

    Neighbouring ranks are one class until it is expected often enough; what no place expects is part of the last.

    Args:
        probs: [n, V]. tokens: [n].
    """
    ordered = probs.double().sort(descending=True)
    ranks = (ordered.indices == tokens[:, None]).int().argmax(1)  # [n]
    expected = ordered.values.sum(0).tolist()
    observed = torch.bincount(ranks, minlength=len(expected)).tolist()
    classes = [[0.0, 0.0]]
    for want, got in zip(expected, observed, strict=True):
        if classes[-1][0] >= LEAST:
            classes.append([0.0, 0.0])
        classes[-1][0] += want
        classes[-1][1] += got
    if classes[-1][0] < LEAST:
        want, got = classes.pop()
        classes[-1][0] += want
        classes[-1][1] += got
    assert len(classes) > 3
    distance = sum((got - want) ** 2 / want for want, got in classes)
    return float(chi2.sf(distance, len(classes) - 1))


@cache
def sampled(folder: Path, method: str, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens [n] of eight pictures, and transformers' logits [n, codes] of their places."""
    prompts = [f"{PROMPTS[i % 3]} {i}" for i in range(8)]
    pipeline, (theirs, processor) = pipeline_of(folder), reference(folder)
    tokens = torch.from_numpy(drawn(pipeline, prompts, SIZE, method, sampling).tokens)
    with torch.no_grad():
        logits = their_logits(theirs, inputs_of(processor, prompts, GRID), tokens)
    return tokens.flatten(), logits[..., : pipeline.model.codes].flatten(0, 1)


PUBLISHED, FLAT = Sampling(1.0, 0.9, 50, 0.75), Sampling(1.0, 2.0, 10, 0.8)


AR = [("ar", PUBLISHED), ("ar", FLAT)]


@pytest.mark.parametrize(
    ("method", "sampling"),
    mostly_slow([*AR, ("scd@8", PUBLISHED), ("jacobi", FLAT), ("sjd-pac@8", FLAT)], *AR),
)
def test_tokens_are_distributed_as_transformers_draws_them(
    folder: Path, method: str, sampling: Sampling
) -> None:
    tokens, logits = sampled(folder, method, sampling)
    assert p_value(reference_order(logits, sampling), tokens) > 1e-3


@pytest.mark.parametrize("wrong", [top_p_first, temperature_last])
def test_another_order_of_filters_would_be_noticed(
    folder: Path, wrong: Callable[[Tensor, Sampling], Tensor]
) -> None:
    """The test above can fail: the same tokens are not those of another order."""
    tokens, logits = sampled(folder, "ar", FLAT)
    assert p_value(wrong(logits, FLAT), tokens) < 1e-6


# ------------------------------------------------------------------------------------ every method


def test_neighbours_are_those_of_the_codes_at_length_1(folder: Path) -> None:
    """As the tokenizer looks codes up: long codes are no farther away."""
    model = pipeline_of(folder).model
    raw = model.code_vectors_alone
    assert raw is not None
    unit = raw.double() / raw.double().norm(dim=1, keepdim=True)
    alike = (unit @ unit.T).fill_diagonal_(-2)  # [codes, codes] cosines
    best = alike.sort(descending=True).indices[:, :5]
    assert torch.equal(model.nearest(5)[: model.codes].long(), best)
    assert not torch.equal(nearest_codes(raw, 5).long(), best)


@pytest.mark.parametrize("method", mostly_slow(RELAXED, RELAXED[0]))
def test_relaxed_windows_draw_codes_in_fewer_steps(folder: Path, method: str) -> None:
    """In fewer steps than the exact window takes."""
    pipeline = pipeline_of(folder)
    chosen = pipeline.resolve(method)
    exact = pipeline.resolve(f"{chosen.method}@8")
    drawn, steps = [], []
    for one in (chosen, exact):
        requests = [Request(PROMPTS[0], s, FLAT, one.relaxation, size=SIZE) for s in range(6)]
        drawn.append(pipeline.draw(requests, one, decode=False))
        steps.append(sum(record.steps for record in drawn[-1].records))
    assert drawn[0].tokens.max() < pipeline.model.codes
    assert all(record.relaxed_accepts > 0 for record in drawn[0].records)
    assert steps[0] < steps[1]
    assert not any(record.relaxed_accepts for record in drawn[1].records)


@pytest.mark.parametrize("method", mostly_slow(("scd:lambda=1:k=8@8", "scd:tv=0@8")))
def test_relaxation_of_nothing_is_exact(folder: Path, method: str) -> None:
    pipeline = pipeline_of(folder)
    want = drawn(pipeline, PROMPTS, SIZE, "scd@8", PUBLISHED).tokens
    assert (drawn(pipeline, PROMPTS, SIZE, method, PUBLISHED).tokens == want).all()
