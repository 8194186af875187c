"""Probabilities and draws: the batched tensors say the same as plain Python, image by image."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch import Tensor

from lantern_hpu.core import Sampling
from lantern_hpu.decode.common import sampling_params
from lantern_hpu.ops import sampling as draws
from lantern_hpu.ops.sampling import (
    apply_guidance,
    race_noise,
    sample,
    sample_distinct,
    sample_distinct_in_order,
    sample_in_order,
    to_probs,
    topk_tokens,
)
from tests import twin
from tests.twin import slow_distinct, slow_probs, slow_sample

V = 24
MIXED = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5, top_k=3),
    Sampling(temperature=2.0, top_k=10),
    Sampling(temperature=1.0, top_p=0.7),
    Sampling(temperature=0.8, top_p=0.9, top_k=5),
    Sampling(temperature=1.3, top_p=1e-6),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=V),
    Sampling(temperature=0.0, top_k=3, top_p=0.5),  # greedy: its probs is unfiltered
]


def probs_of(logits: Tensor, samplings: list[Sampling], top_p_first: bool = False) -> Tensor:
    largest, uses_top_p = max(s.top_k for s in samplings), any(s.top_p < 1 for s in samplings)
    return to_probs(logits, sampling_params(samplings, V), largest, uses_top_p, top_p_first)


def random_logits(seed: int, *shape: int) -> Tensor:
    return 3 * torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("top_p_first", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_each_image_of_a_batch_gets_the_distribution_of_its_own_settings(
    seed: int, top_p_first: bool
) -> None:
    logits = random_logits(seed, len(MIXED), 4)
    probs = probs_of(logits, MIXED, top_p_first)
    for image, sampling in enumerate(MIXED):
        for position in range(4):
            row = logits[image, position].tolist()
            want = torch.tensor(slow_probs(row, sampling, top_p_first))
            got = probs[image, position]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
            assert torch.equal(got > 0, want > 0)


def test_ties_with_the_kth_token_stay() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0] + [-5.0] * (V - 6))[None, None]
    kept = probs_of(logits, [Sampling(top_k=2)])[0, 0] > 0
    assert kept.nonzero().flatten().tolist() == [0, 2, 3, 4]
    kept = probs_of(logits, [Sampling(top_k=5)])[0, 0] > 0
    assert kept.nonzero().flatten().tolist() == [0, 1, 2, 3, 4]


def test_token_that_crosses_top_p_stays() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04] + [0.0] * (V - 5))
    logits = probabilities.log()[None, None]
    for top_p, count in ((0.45, 1), (0.55, 2), (0.79, 2), (0.85, 3), (0.95, 4)):
        assert int((probs_of(logits, [Sampling(top_p=top_p)]) > 0).sum()) == count


def test_the_order_of_the_filters_matters_where_both_cut() -> None:
    """Of 0.5, 0.3, 0.1, 0.1 top-k 2 leaves 0.625 and 0.375: 0.6 of that is one token, of the whole mass it is two."""
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1] + [0.0] * (V - 4)).log()[None, None]
    both = [Sampling(top_k=2, top_p=0.6)]
    for top_p_first, count in ((False, 1), (True, 2)):
        assert int((probs_of(logits, both, top_p_first) > 0).sum()) == count


def test_guidance_extrapolates_from_the_unconditional_logits() -> None:
    logits = torch.tensor([[[2.0, 1.0]], [[5.0, 5.0]], [[1.0, 1.0]], [[4.0, 6.0]]])  # two images
    settings = sampling_params([Sampling(cfg_scale=3), Sampling(cfg_scale=1)], V)
    assert apply_guidance(logits, settings, guidance=True).tolist() == [[[4.0, 1.0]], [[5.0, 5.0]]]


def test_probs_are_float32_whatever_the_model_computes_in() -> None:
    logits = random_logits(0, 2, 3).bfloat16()
    settings = sampling_params([Sampling(cfg_scale=2, top_k=5)], V)
    for guidance, rows in ((True, 1), (False, 2)):
        guided = apply_guidance(logits, settings, guidance)
        assert guided.dtype == torch.float32 and guided.shape == (rows, 3, V)
    exact = apply_guidance(logits, settings, True)
    assert torch.equal(exact, logits.float()[1:] + 2 * (logits.float()[:1] - logits.float()[1:]))


def test_choose_takes_the_first_token_past_the_mass() -> None:
    probs = random_logits(2, 40).double().softmax(-1) * torch.rand(40, 1)  # need not sum to 1
    probs = probs.masked_fill(probs < 0.01 * probs.sum(-1, keepdim=True), 0.0)
    grid = torch.linspace(0, 1 - 2**-24, 97, dtype=torch.float64)
    for one in probs:
        got = sample(one.expand(len(grid), -1), grid).tolist()
        assert got == [slow_sample(one.tolist(), u) for u in grid.tolist()]
        assert (one[got] > 0).all()


def test_largest_uniform_never_draws_a_token_of_probability_zero() -> None:
    generator = torch.Generator().manual_seed(8)
    probs = (3 * torch.randn(2000, 1000, generator=generator)).softmax(-1)
    probs[:, 500:] = 0  # as after top-k: the sum need not be 1 and the last tokens have no mass
    tokens = sample(probs, torch.full((2000,), 1 - 2**-24))
    assert (probs.gather(-1, tokens[:, None]) > 0).all()


def test_distinct_draws_are_those_of_striking_out() -> None:
    generator = torch.Generator().manual_seed(4)
    probs = random_logits(4, 300, 2).double().softmax(-1)
    uniform = torch.rand(300, 2, 10, generator=generator, dtype=torch.float64)
    tokens = sample_distinct(probs, uniform)
    for image, node in product(range(300), range(2)):
        drawn = tokens[image, node].tolist()
        assert len(set(drawn)) == 10
        assert drawn == slow_distinct(probs[image, node].tolist(), uniform[image, node].tolist())


def test_distinct_draws_in_float32_do_not_repeat() -> None:
    generator = torch.Generator().manual_seed(5)
    probs = (4 * torch.randn(500, 4000, generator=generator)).softmax(-1)
    tokens = sample_distinct(probs, torch.rand(500, 10, generator=generator))
    ordered = tokens.sort(-1).values
    assert (ordered[:, 1:] != ordered[:, :-1]).all()
    assert (probs.gather(-1, tokens) > 0).all()


@pytest.mark.parametrize("draws", [1, 2, 3])
def test_distinct_draws_follow_sequential_sampling_without_replacement(draws: int) -> None:
    weights = torch.tensor([0.45, 0.05, 0.2, 0.02, 0.28], dtype=torch.float64)
    generator = torch.Generator().manual_seed(6)
    count = 200_000
    uniform = torch.rand(count, draws, generator=generator, dtype=torch.float64)
    tokens = sample_distinct(weights.expand(count, -1), uniform)
    code = (tokens * 5 ** torch.arange(draws)).sum(-1)
    observed = torch.bincount(code, minlength=5**draws)
    chi2, cells = 0.0, 0
    for order in permutations(range(5), draws):
        chance, left = 1.0, 1.0
        for token in order:
            chance, left = chance * float(weights[token]) / left, left - float(weights[token])
        expected = count * chance
        chi2 += (
            float(observed[sum(t * 5**i for i, t in enumerate(order))]) - expected
        ) ** 2 / expected
        cells += 1
    assert chi2 < (cells - 1) + 4 * (2 * (cells - 1)) ** 0.5
    assert int(observed.sum()) == count


def test_running_out_of_tokens_draws_nothing_new() -> None:
    one = torch.zeros(V)
    one[[3, 7, 20]] = torch.tensor([0.5, 0.3, 0.2])
    generator = torch.Generator().manual_seed(7)
    for row in sample_distinct(
        one.expand(200, -1), torch.rand(200, 6, generator=generator)
    ).tolist():
        assert set(row[:3]) == {3, 7, 20}
        assert all(token in row[:3] or one[token] == 0 for token in row[3:])


# The most probable


@pytest.mark.parametrize("count", [1, 2, 5, V])
def test_of_equally_probable_tokens_the_lower_comes_first(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for levels in (2, 4, 1000):  # few levels: many ties, also with the last that is taken
        probs = torch.randint(levels, (3, 4, V), generator=generator).float()
        want = [[twin.topk_tokens(row, count) for row in rows] for rows in probs.tolist()]
        assert topk_tokens(probs, count).tolist() == want


def shaken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums as of a card: made in parallel, so that the mass of a token may be below or above that of the next."""
    exact = Tensor.cumsum

    def cumsum(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        mass = exact(x, dim, dtype=dtype)
        if not mass.is_floating_point():
            return mass
        noise = torch.rand(mass.shape, generator=torch.Generator().manual_seed(3)) - 0.5
        return mass + 2e-3 * noise * (mass > 0)

    monkeypatch.setattr(Tensor, "cumsum", cumsum)


@pytest.mark.parametrize("draw", [sample, sample_distinct])
def test_no_token_of_probability_zero_is_drawn_where_sums_are_not_monotone(
    monkeypatch: pytest.MonkeyPatch, draw: Any
) -> None:
    generator = torch.Generator().manual_seed(9)
    probs = (3 * torch.randn(4000, 60, generator=generator)).softmax(-1)
    probs[:, ::2] = 0
    shaken(monkeypatch)
    uniform = torch.rand(4000, generator=generator)
    tokens = draw(probs, uniform if draw is sample else uniform[:, None]).view(4000)
    assert (probs.gather(-1, tokens[:, None].long()) > 0).all()


def test_processors_search_their_sums_and_find_the_same() -> None:
    generator = torch.Generator().manual_seed(10)
    probs = (3 * torch.randn(500, 300, generator=generator)).softmax(-1)
    probs = probs.masked_fill(probs < 1e-4, 0.0)
    uniform = torch.rand(500, 5, generator=generator)
    uniform[0] = 1 - 2**-24
    assert torch.equal(sample_in_order(probs, uniform[:, 0]), sample(probs, uniform[:, 0]))
    assert torch.equal(sample_distinct_in_order(probs, uniform), sample_distinct(probs, uniform))


def test_probabilities_that_are_nan_give_a_token_of_the_vocabulary() -> None:
    probs = torch.full((2, V), float("nan"))
    for tokens in (
        sample(probs, torch.rand(2)),
        sample_distinct(probs, torch.rand(2, 3)),
        topk_tokens(probs, 3),
    ):
        assert bool(((tokens >= 0) & (tokens < V)).all())


def test_a_certain_token_wins_its_race_whatever_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest words make a share that rounds to 1, once in 2^25 draws."""
    monkeypatch.setattr(draws, "FACTORS", (1,))  # one round, after which both words are ones
    key, token = torch.tensor([0xFFFF]).int(), torch.tensor([0, 0xFFFF]).int()
    noise, certain = race_noise(key, token), torch.tensor([0.0, 1.0])
    assert topk_tokens(certain * noise, 1).tolist() == [1] and bool((noise > 0).all())
