"""The rule that bounds the total variation of a token, and the budget of an image."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from lantern_hpu.core import Request
from lantern_hpu.decode.rules import Rules
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import Bounds
from lantern_hpu.methods.relaxation import EXACT, PRESETS, Blended, Verify, read_relaxation
from lantern_hpu.methods.setting import Setting
from lantern_hpu.tree import DraftTree, Tree, Window, load_tree
from lantern_lab.measure.fidelity import expectation, root
from tests.marks import mostly_slow
from tests.reference import Relaxed
from tests.test_accept import random_probs, siblings_probs
from tests.test_generate import generate
from tests.test_step import DISTRIBUTIONS, SETTINGS, SMALL, count_images, exact_probs, surprise
from tests.tiny import (
    SMALL_TREE,
    Models,
    condition,
    draw,
    make_engine,
    request,
    sample,
    spec_for,
    tiny_models,
)
from tests.twin import Twin

TREES = [SMALL_TREE, load_tree("scd:3"), load_tree("sjd-pac:3:2x1")]
# And how their drafts are verified
VERIFIED: list[tuple[Tree, Verify]] = [*((tree, "auto") for tree in TREES), (SMALL_TREE, "block")]
verified_trees = pytest.mark.parametrize(("tree", "verify"), VERIFIED, ids=str)
PAIRS, V = 4096, 9


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Over the last dimension."""
    return (a - b).abs().sum(-1) / 2


def many_pairs() -> tuple[Tensor, Tensor]:
    """p and q [PAIRS, V], with exact zeros, some far apart and some close."""
    generator = torch.Generator().manual_seed(3)

    def some() -> Tensor:
        logits = 2 * torch.randn(PAIRS, V, generator=generator, dtype=torch.float64)
        few = torch.rand(PAIRS, V, generator=generator) < 0.2
        few[:, 0] = False
        return logits.masked_fill(few, -torch.inf).softmax(-1)

    p, q = some(), some()
    close = torch.rand(PAIRS, 1, generator=generator, dtype=torch.float64) ** 2
    return p, close * q + (1 - close) * p


def accepting(tree: Tree) -> Rules:
    return Rules(Spec(1, False, tree, blended=True))


@pytest.mark.parametrize("tv", [0.0, 0.05, 0.15, 0.6, 1.0])
def test_distribution_is_the_blend_and_its_total_variation_the_bound(tv: float) -> None:
    """Summed over every draft in `expectation`, for thousands of pairs at once."""
    p, q = many_pairs()
    tree = DraftTree.from_paths("one", [[0]])
    acceptance = accepting(tree)
    bounds = Bounds.of([Blended(tv=tv)] * PAIRS, 1)
    bounds.tv = torch.full((PAIRS,), tv, dtype=torch.float64)
    probs = torch.zeros_like(p)
    for token in range(V):
        child, exists = torch.full((PAIRS, 1), token), torch.ones(PAIRS, 1, dtype=torch.bool)
        after = expectation(acceptance, root(p, q, bounds), child, exists)
        probs += q[:, token : token + 1] * after
    distance = total_variation(p, q)
    share = (tv / distance).clamp(max=1)[:, None]
    torch.testing.assert_close(probs, share * q + (1 - share) * p, rtol=0, atol=1e-12)
    wanted = distance.clamp(max=tv)
    torch.testing.assert_close(total_variation(probs, p), wanted, rtol=0, atol=1e-12)
    blend = acceptance.blend(p[:, None], q[:, None], bounds)
    assert blend is not None
    torch.testing.assert_close(blend.spent[:, 0], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("children", [1, 2, 4])
@pytest.mark.parametrize("seed", mostly_slow(range(4), 0))
def test_siblings_leave_the_blend_as_it_is(children: int, seed: int) -> None:
    """The real walk, every sequence of drafts, the chance of each found by bisection."""
    p, q = random_probs(seed, 6)
    distance = float(total_variation(p, q))
    share = min(1.0, 0.1 / distance)
    probs = siblings_probs(p, q, children, Relaxed(tv=0.1))
    torch.testing.assert_close(probs, share * q + (1 - share) * p, rtol=0, atol=1e-12)


def test_no_other_rule_accepts_more_at_the_same_total_variation() -> None:
    """Acceptance is 1 - D + min(D, T), the most that a distribution so far from p allows."""
    p, q = many_pairs()
    bounds = Bounds.of([Blended(tv=0.1)] * PAIRS, 1)
    tree = DraftTree.from_paths("one", [[0]])
    blend = accepting(tree).blend(p[:, None], q[:, None], bounds)
    assert blend is not None
    accepted = torch.minimum(blend.accept_mass(p, q), q).sum(-1)
    distance = total_variation(p, q)
    torch.testing.assert_close(accepted, 1 - distance + distance.clamp(max=0.1), rtol=0, atol=1e-7)


# ------------------------------------------------------------------------------------ budget


def test_budget_along_a_window_is_that_of_one_place_after_the_other() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (2 * torch.randn(2, 64, 7, V, generator=generator)).softmax(-1)
    acceptance = accepting(Window.of("scd", 7))
    budget = torch.linspace(0, 1.2, 64)
    bounds = Bounds.of([Blended(tv=0.2, budget=b) for b in budget.tolist()], 7)
    found = acceptance.blend(p, q, bounds)
    assert found is not None
    left = budget
    for place in range(7):
        spent = torch.minimum(total_variation(p, q)[:, place].clamp(max=0.2), left)
        torch.testing.assert_close(found.spent[:, place], spent, rtol=0, atol=1e-6)
        left = left - spent
    assert bool((found.spent.sum(1) <= budget + 1e-6).all())
    assert bool((found.spent.sum(1)[:20] > budget[:20] - 1e-6).all())  # and it is used up


@verified_trees
@pytest.mark.parametrize("budget", mostly_slow([0.0, 0.3, 1.0], 0.3))
def test_images_spend_no_more_than_their_budget(
    models: Models, tree: Tree, verify: Verify, budget: float
) -> None:
    rules = [Blended(tv=0.2, budget=budget), Blended(tv=0.2), EXACT, Blended(tv=0.05, budget=9.0)]
    requests = [
        request(p, 7 + i, relaxation=replace(rule, verify=verify))
        for i, (p, rule) in enumerate(zip("abcd", rules, strict=True))
    ]
    drawn = draw(make_engine(models, spec_for(tree, requests)), requests)
    assert drawn.spent is not None
    (first, _), (free, most), (none, _), (last, least) = drawn.spent
    assert first == pytest.approx(budget, abs=1e-5) and free > budget
    assert most <= 0.2 + 1e-6 and least <= 0.05 + 1e-6 and none == 0
    assert 0 < last < 9
    # Each by itself is drawn as in this company
    for i, one in enumerate(requests):
        alone = draw(make_engine(models, spec_for(tree, [one])), [one])
        assert alone.tokens[0].tolist() == drawn.tokens[i].tolist()


def images_of(p: Tensor, q: Tensor, depth: int, rule: Blended) -> tuple[Tensor, float]:
    """How probable each image is, and how much its tokens spend on average; every draw of every step enumerated.

    Args:
        p, q: [S, S, S, S], the target's and the drafter's distribution after three tokens (the first ones repeated
            where there are fewer). depth: of the chain that is drafted.
    """
    size, tokens = p.shape[-1], 4
    found, spending = torch.zeros((size,) * tokens, dtype=torch.float64), 0.0
    acceptance = accepting(DraftTree.from_paths("one", [[0]]))

    def after(table: Tensor, known: tuple[int, ...]) -> Tensor:
        return table[tuple(([0] * 3 + list(known))[-3:])][None]  # [1, S]

    def go(known: tuple[int, ...], place: int, left: float, chance: float) -> None:
        nonlocal spending
        if len(known) == tokens or chance == 0:
            found[known] += chance if len(known) == tokens else 0.0
            return
        target, drafter = after(p, known), after(q, known)
        if place == depth:  # the bonus token
            for token in range(size):
                go((*known, token), 0, left, chance * float(target[0, token]))
            return
        bounds = Bounds.of([rule], 1)
        bounds.tv, bounds.budget = torch.tensor([[rule.tv], [left]], dtype=torch.float64)
        blend = acceptance.blend(target[:, None], drafter[:, None], bounds)
        assert blend is not None
        left, refused = left - float(blend.spent), 0.0
        spending += chance * float(blend.spent)
        for token in range(size):
            node = root(target, drafter, bounds)
            trial = acceptance.trial(node, torch.tensor([[token]]), blend)
            drawn = chance * float(drafter[0, token])
            accepted = min(1.0, float(trial.mass) / float(drafter[0, token]))
            go((*known, token), place + 1, left, drawn * accepted)
            refused += drawn * (1 - accepted)
        for token in range(size):  # what is left is the same whatever was refused
            go((*known, token), 0, left, refused * float(trial.rest.p[0, token]))

    go((), 0, torch.inf if rule.budget is None else rule.budget, 1.0)
    return found, spending


@pytest.mark.parametrize("depth", [1, 2])
def test_images_are_within_their_budget_of_the_targets(depth: int) -> None:
    generator = torch.Generator().manual_seed(5)
    p, q = (1.5 * torch.randn(2, 3, 3, 3, 3, generator=generator).double()).softmax(-1)
    exact, nothing = images_of(p, q, depth, Blended())
    assert nothing == 0 and float(exact.sum()) == pytest.approx(1)
    moved = []
    for budget in (0.05, 0.2, 0.6, None):
        images, spent = images_of(p, q, depth, Blended(tv=0.3, budget=budget))
        assert float(images.sum()) == pytest.approx(1)
        moved.append(float((images - exact).abs().sum()) / 2)
        assert moved[-1] <= spent + 1e-12
        assert budget is None or spent <= budget + 1e-12
    assert 0.01 < moved[0] < moved[1] < moved[2] < moved[3]


# ------------------------------------------------------------------------------------ the step


def window_images(models: Models, one: Request, rule: Blended) -> Tensor:
    """How probable each image of three tokens is [6, 6, 6], drawn with a window of two places.

    The first step tries drafts of the distribution before the root. Where it refuses the first, the second step tries
    one of the target's distribution after the refused draft.
    """
    rows = condition(models[0].config, [one.prompt], one.sampling.cfg_scale != 1)[:2]
    twin = Twin(models, one, *rows)

    def target(*known: int) -> Tensor:
        return torch.tensor(twin.target_probs(list(known)), dtype=torch.float64)

    def blended(p: Tensor, q: Tensor, left: float) -> tuple[Tensor, Tensor, float]:
        """The chance of each draft, of that and its acceptance; and what is spent."""
        distance = float((p - q).clamp(min=0).sum())
        spent = min(distance, rule.tv, left)
        share = spent / distance if distance else 0.0
        return share * q + (1 - share) * p, share * q + (1 - share) * torch.minimum(p, q), spent

    begin, found = target(), torch.zeros(6, 6, 6, dtype=torch.float64)
    budget = torch.inf if rule.budget is None else rule.budget
    for first in range(6):
        p = target(first)
        _, accepted, spent = blended(p, begin, budget)
        refused = begin - accepted  # [6] by draft
        rest = (p - begin).clamp(min=0)
        rest = rest / rest.sum()
        for second in range(6):
            after = target(first, second)
            third = blended(after, begin, budget - spent)[0]
            found[first, second] += begin[first] * accepted[second] * third
            for draft in range(6):
                third = blended(after, target(first, draft), budget - spent)[0]
                found[first, second] += begin[first] * refused[draft] * rest[second] * third
    return found


RULED = {"free": Blended(tv=0.2), "budget": Blended(tv=0.3, budget=0.35)}


@torch.no_grad()
@pytest.mark.parametrize("name", mostly_slow(RULED, "budget"))
@pytest.mark.parametrize("settings", mostly_slow(["guided top-k", "unguided"], "unguided"))
def test_windows_draw_images_of_the_distribution_that_the_rule_says(
    name: str, settings: str
) -> None:
    small, rule = tiny_models(SMALL, seed=3), RULED[name]
    options = {**DISTRIBUTIONS[settings], "relaxation": rule}
    counts, one = count_images(small, Window.of("scd", 2), **options)
    assert surprise(counts, window_images(small, one, rule)) < 4
    assert surprise(counts, exact_probs(small[0], one)) > 10


@verified_trees
@pytest.mark.parametrize("settings", mostly_slow(SETTINGS, "guided"))
def test_tv_of_zero_draws_the_exact_images(
    models: Models, tree: Tree, verify: Verify, settings: str
) -> None:
    rule = replace(EXACT, verify=verify)
    exact = [request(p, 5 + i, relaxation=rule, **SETTINGS[settings]) for i, p in enumerate("abcd")]
    want = sample(models, tree, exact)
    # Beside an image that is blended, so that the rule is in the graph
    for none in (Blended(tv=0.0), Blended(tv=0.5, budget=0.0)):
        zero = [replace(one, relaxation=replace(none, verify=verify)) for one in exact]
        blended = Blended(tv=0.5, verify=verify)
        other = request("xy", 1, relaxation=blended, **SETTINGS[settings])
        requests = [*zero, other]
        assert spec_for(tree, requests).blended
        drawn = sample(models, tree, requests)
        assert drawn.tokens[:4].tolist() == want.tokens.tolist()
        assert drawn.steps[:4] == want.steps and drawn.relaxed[:4] == [0] * 4


@verified_trees
def test_more_is_accepted_the_more_a_token_may_cost(tree: Tree, verify: Verify) -> None:
    strangers, steps = tiny_models(seed=3, likeness=0.0), []
    for tv in (0.0, 0.2, 1.0):
        rule = Blended(tv=tv, verify=verify)
        requests = [request("abcd", i, relaxation=rule) for i in range(32)]
        steps.append(sum(sample(strangers, tree, requests).steps))
    assert steps[0] > steps[1] > steps[2]
    total = strangers[0].config.tokens
    assert steps[2] == 32 * -(-(total - 1) // (tree.depth + 1))  # all drafts pass


# ------------------------------------------------------------------------------------ how it is asked for


def test_written_forms() -> None:
    assert Setting.parse("scd:tv=0.15").relaxation == Blended(tv=0.15)
    assert Setting.parse("scd:tv").relaxation == PRESETS["tv"]
    budgeted = Setting.parse("lantern++:tv=0.25:budget=4@broad_7")
    assert budgeted.relaxation == Blended(tv=0.25, budget=4.0)
    for setting in (budgeted, Setting.parse("sjd-pac:tv=0.15@8"), Setting.parse("scd:tv")):
        assert Setting.parse(str(setting)) == setting
    for rule in (Blended(tv=0.25, budget=4.0), Blended(tv=0.0), PRESETS["tv"]):
        assert read_relaxation(json.loads(json.dumps(rule.as_json()))) == rule


def test_a_picture_says_what_it_spent_and_is_drawn_again(model: Path, tmp_path: Path) -> None:
    first, again, report = tmp_path / "a.png", tmp_path / "b.png", tmp_path / "r.json"
    options = ("--method", "scd:tv=0.2:budget=0.7@4")
    asked = ("--prompt", "cat", "--seed", 5, *options, "--output", first, "--report", report)
    assert generate(model, *asked) == 0
    assert generate(model, "--from-png", first, "--output", again) == 0
    assert Image.open(first).tobytes() == Image.open(again).tobytes()
    data = json.loads(report.read_text())
    (image,), rule = data["images"], data["config"]["relaxation"]
    assert rule["rule"] == "tv" and (rule["bound"], rule["budget"]) == (0.2, 0.7)
    assert 0.2 < image["tv_sum"] < 0.7 + 1e-5 and image["tv_max"] < 0.2 + 1e-6
    with Image.open(again) as drawn:
        kept = json.loads(drawn.text["lantern_hpu"])["tv"]
    assert kept == {"sum": image["tv_sum"], "mean": image["tv_mean"], "max": image["tv_max"]}
