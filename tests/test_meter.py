"""The meter: what a step adds up is the total variation that relaxation costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lantern_hpu.decode.rules import tv_cost
from lantern_hpu.methods.relaxation import Additive, Annealed, Clustered, Multiplicative, Relaxation
from lantern_hpu.tree import DraftTree, DynamicTree, Tree, Window, load_tree
from lantern_lab.measure.fidelity import Place, root, tv_at
from lantern_lab.measure.frontier import main as frontier
from tests.marks import mostly_slow
from tests.reference import Relaxed
from tests.test_accept import RULES, acceptance_of, bounds_of, random_probs, siblings_probs
from tests.test_step import PROMPTS
from tests.tiny import SMALL_TREE, Models, draw, make_engine, prefix_for, request, spec_for

V = 6
SOUND = {n: rule for n, rule in RULES.items() if "official" not in n and not n.startswith("tv")}
RELAXATIONS = {
    "additive": Additive(4, bound=0.3),
    "multiplicative": Multiplicative(4, lam=4.0),
    "annealed": Annealed(omega=2.0),
    "clusters": Clustered(distance=1.2),
}
TREES = [SMALL_TREE, load_tree("scd:3"), load_tree("sjd-pac:3:2x1"), DynamicTree(3, 2, 7)]


def mean_gain(p: Tensor, q: Tensor, rule: Relaxed) -> float:
    """`tv_cost` of a single child, averaged over what the drafter may draw."""
    acceptance = acceptance_of(SMALL_TREE, rule, V)
    node, every = root(p[None], q[None], bounds_of(rule, 1)), torch.arange(V)[None]
    mass, _ = acceptance.rules.accept_mass(node, every, node.p)
    return float((q * tv_cost(mass, node.p, node.q)[0]).sum())


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("seed", range(6))
def test_mean_of_the_meter_is_the_total_variation_of_a_drawn_draft(name: str, seed: int) -> None:
    """Against the distribution of the real walk, with every draft enumerated and its chance found by bisection."""
    rule, (p, q) = SOUND[name], random_probs(seed, V)
    moved = siblings_probs(p, q, 1, rule)
    found = float((moved - p).abs().sum()) / 2
    if name == "clusters":
        # They may also accept less than the exact rule, which the meter does not count
        accepts = torch.minimum(torch.tensor([1.0]), mass_of_clusters(p, q) / q)
        if float((q * (accepts - (p / q).clamp(max=1))).sum()) < 0:
            assert mean_gain(p, q, rule) <= found + 1e-12
            return
    assert mean_gain(p, q, rule) == pytest.approx(found, abs=1e-9)
    assert (found > 1e-3) == (name != "exact") or name in ("additive", "clusters")


def mass_of_clusters(p: Tensor, q: Tensor) -> Tensor:
    """[V] what each token is accepted with under `SOUND["clusters"]`."""
    rule = SOUND["clusters"]
    acceptance, every = acceptance_of(SMALL_TREE, rule, V), torch.arange(V)[None]
    node = root(p[None], q[None], bounds_of(rule, 1))
    return acceptance.rules.accept_mass(node, every, node.p)[0][0]


@pytest.mark.parametrize("seed", range(6))
def test_lent_mass_is_the_total_variation_of_a_draft_that_was_not_drawn(seed: int) -> None:
    rule, (p, q) = SOUND["additive"], random_probs(seed, V)
    acceptance, node = acceptance_of(SMALL_TREE, rule, V), root(p[None], None, bounds_of(rule, 1))
    for token in range(V):
        child = torch.tensor([[token]])
        moved = siblings_probs(p, q, 1, rule, child)
        prob = p[None, token : token + 1]
        mass, _ = acceptance.rules.accept_mass(node, child, prob)
        cost = float(tv_cost(mass, prob, None))
        assert cost == pytest.approx(float((moved - p).abs().sum()) / 2, abs=1e-9)


@pytest.mark.parametrize("tree", mostly_slow(TREES, TREES[1], TREES[3]), ids=lambda tree: tree.name)
@pytest.mark.parametrize("name", RELAXATIONS)
@pytest.mark.parametrize("temperature", mostly_slow([1.0, 0.0], 1.0), ids=["sampled", "greedy"])
def test_meter_adds_up_what_each_step_spent(
    models: Models, name: str, tree: Tree, temperature: float
) -> None:
    """Drafts of the image alone count: up to the one that was refused, and none past the end."""
    rule: Relaxation = RELAXATIONS[name]
    if rule.clusters and isinstance(tree, DynamicTree):
        pytest.skip("no clusters without drawn drafts")
    requests = [
        request(p, 10 + i, relaxation=rule, temperature=temperature) for i, p in enumerate(PROMPTS)
    ]
    engine = make_engine(models, spec_for(tree, requests))
    total = engine.target.config.tokens
    want = draw(engine, requests)
    sums, most = [0.0] * len(requests), [0.0] * len(requests)
    for step in engine.trace(prefix_for(engine, requests), requests):
        assert step.accepted.spent is not None
        depth = step.drafts.tables.depth.gather(1, step.accepted.node[:, None].long())[:, 0]
        for image, (known, taken) in enumerate(zip(step.before, depth.tolist(), strict=True)):
            tried = min(taken + 1, tree.depth, total - known)
            spent = step.accepted.spent[image, :tried].tolist()
            sums[image] += sum(spent)
            most[image] = max([most[image], *spent])
    assert want.spent is not None
    assert [s for s, _ in want.spent] == pytest.approx(sums, rel=1e-5)
    assert [m for _, m in want.spent] == pytest.approx(most, rel=1e-6)
    assert sum(sums) > 0
    if temperature == 0:
        assert [round(s) for s in sums] == want.relaxed


def test_exact_images_are_not_metered_and_beside_relaxed_ones_cost_nothing(models: Models) -> None:
    exact, relaxed = request("abcd", 3), request("xy", 4, relaxation=RELAXATIONS["multiplicative"])
    assert not spec_for(SMALL_TREE, [exact]).metered
    assert draw(make_engine(models, spec_for(SMALL_TREE, [exact])), [exact]).spent is None
    both = draw(make_engine(models, spec_for(SMALL_TREE, [exact, relaxed])), [exact, relaxed])
    assert both.spent is not None
    assert both.spent[0] == (0.0, 0.0) and both.spent[1][0] > both.spent[1][1] > 0


def test_published_residual_is_not_metered(models: Models) -> None:
    one = request("abcd", 3, relaxation=Additive(4, "official", 0.3))
    assert draw(make_engine(models, spec_for(Window.of("scd", 3), [one])), [one]).spent is None


@pytest.mark.slow
def test_the_frontier_goes_on_where_it_was_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, picture = tmp_path / "tv.json", tmp_path / "tv.png"
    rows = ["scd@3", "scd:tv=0.2@3", "lantern++:lambda=3:k=4@chain"]
    for some in (rows[:2], rows):
        options = ["--model", model, "--num-images", 3, "--output", file, "--plot", picture]
        monkeypatch.setattr(
            "sys.argv", ["frontier", *map(str, options), "--method", ",".join(some)]
        )
        frontier()
        found = json.loads(file.read_text())["rows"]
        assert [row["row"] for row in found] == some
    assert found[0]["tv_per_token"] == 0 < found[1]["tv_per_token"] <= 0.2
    assert found[1]["tokens_per_step"] > found[0]["tokens_per_step"] > 1
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize("name", [n for n in SOUND if n != "clusters"])
def test_the_mean_of_the_meter_is_what_fidelity_says(name: str) -> None:
    rule, (p, q) = SOUND[name], random_probs(2, V)
    place = Place(p[None], q[None], torch.zeros(1, 1).int(), torch.ones(1, 1, dtype=torch.bool))
    window = load_tree("scd:1")
    assert isinstance(window, DraftTree)
    acceptance = acceptance_of(window, rule, V)
    said = tv_at(place, acceptance.rules, bounds_of(rule, 1), torch.rand(4, 1))
    assert mean_gain(p, q, rule) == pytest.approx(said, abs=1e-9)
