"""Acceptance: the vectorised rule is the textbook one, exact means exact, relaxed stays within its bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lantern_hpu.decode.common import Drafts, StaticTables
from lantern_hpu.decode.rules import Clusters, Node, Verdict, descending
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import Bounds
from lantern_hpu.decode.walk import Acceptance
from lantern_hpu.errors import OptionError
from lantern_hpu.methods.relaxation import Residual
from lantern_hpu.ops.sampling import sample_distinct
from lantern_hpu.tree import DraftTree
from tests.marks import mostly_slow
from tests.reference import (
    Outcome,
    Probs,
    Relaxed,
    cluster,
    greedy_walk,
    raised_mass,
    residual_probs,
    walk,
)
from tests.tiny import circle, random_tree, ring

V, B = 12, 80  # vocabulary, images a tree
TREES = 16
CODES = circle(V).tolist()
RULES = {
    "exact": Relaxed(),
    "additive": Relaxed(k=6, delta=0.2),
    "multiplicative": Relaxed(k=6, lam=3.0),
    "additive official": Relaxed(k=6, delta=0.2, residual="official"),
    "multiplicative official": Relaxed(k=6, lam=3.0, residual="official"),
    "annealed": Relaxed(weights=(1.8, 1.2, 0.8, 0.5)),
    "clusters": Relaxed(codes=CODES, limits=(3, 0.3, 1.2)),
    "tv": Relaxed(tv=0.15),
    "tv budget": Relaxed(tv=0.15, budget=0.2),
}
KINDS = {"drawn": True, "given": False}  # how the drafts came about: static trees, dynamic trees
EMPTY = {"no ranks": (0, 0.3, 1.2), "no gap": (3, 0.0, 1.2), "no distance": (3, 0.3, 0.0)}
EXACT_RULES = [
    Relaxed(k=6, lam=1.0),
    Relaxed(k=6, delta=0.0),
    Relaxed(k=0, delta=0.5),
    Relaxed(k=0, lam=9.0),
    Relaxed(weights=(1.0,) * 4),
    Relaxed(tv=0.0),
    Relaxed(tv=0.5, budget=0.0),
    *(Relaxed(codes=CODES, limits=limits) for limits in EMPTY.values()),
]


def bounds_of(rule: Relaxed, images: int, depth: int = 4) -> Bounds:
    def each(value: float) -> Tensor:
        return torch.full((images,), value, dtype=torch.float64)

    weight = torch.tensor([rule.weight(d) for d in range(depth)], dtype=torch.float64)
    k = torch.full((images,), rule.k)
    limits = torch.tensor(rule.limits, dtype=torch.float64).expand(images, -1)
    shared = (k, each(rule.delta), each(rule.lam - 1), weight.expand(images, -1), limits)
    return Bounds(*shared, each(rule.tv), each(rule.budget))


def acceptance_of(tree: DraftTree, rule: Relaxed, vocabulary: int = V) -> Acceptance:
    spec = spec_of(tree, rule.residual, annealed=bool(rule.weights), blended=rule.tv > 0)
    near = ring(vocabulary) if rule.k else None
    return Acceptance(spec, near, circle(vocabulary) if rule.codes else None)


def spec_of(tree: DraftTree, residual: str = "sound", **changes: Any) -> Spec:
    kind: Residual = "official" if residual == "official" else "sound"
    return Spec(B, False, tree, residual=kind, **{"ranks": 7, "metered": True} | changes)


def lent_to(case: Tensor, rule: Relaxed) -> Tensor:
    """What each token is lent under probabilities [n, V]: [n, V]."""
    bounds, every = bounds_of(rule, len(case)), torch.arange(V).expand(len(case), -1)
    node = Node(case, None, bounds.weight[:, :1], bounds)
    _, lent = acceptance_of(CASES[0].tree, rule).rules.accept_mass(node, every, case)
    assert lent is not None
    return lent.mass


def with_neighbours(rule: Relaxed) -> Relaxed:
    return replace(rule, neighbours=ring(V).tolist())


class Case:
    """A tree with random probs for a batch of images: peaked, with exact zeros, some with few tokens left."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tree = random_tree(seed)
        nodes = len(self.tree.expanded)

        def draw() -> Tensor:
            logits = 2 * torch.randn(B, nodes, V, generator=generator, dtype=torch.float64)
            limit = logits.topk(8 if seed % 4 else 2, -1).values[..., -1:]
            return logits.masked_fill(logits < limit, float("-inf")).softmax(-1)

        self.p, self.q = draw(), draw()
        tokens = torch.randint(V, (B, self.tree.size), generator=generator, dtype=torch.int32)
        for row, node in enumerate(self.tree.expanded):
            below = list(self.tree.children[node])
            uniform = torch.rand(B, len(below), generator=generator, dtype=torch.float64)
            tokens[:, below] = sample_distinct(self.q[:, row], uniform)
        self.tokens = tokens
        shape = (B, self.tree.depth, self.tree.max_children)
        self.uniform = torch.rand(shape, generator=generator, dtype=torch.float64)

    def probs(self, image: int) -> tuple[dict[int, Probs], dict[int, Probs]]:
        nodes = self.tree.expanded
        p, q = self.p[image].tolist(), self.q[image].tolist()
        return dict(zip(nodes, p, strict=True)), dict(zip(nodes, q, strict=True))

    def drafts(self, drawn: bool) -> Drafts:
        return Drafts(self.tokens, self.q if drawn else None, StaticTables(self.tree)(B))

    def sampled(self, rule: Relaxed, drawn: bool = True, **changes: Any) -> Verdict:
        given = {"p": self.p, "uniform": self.uniform} | changes
        acceptance = given.pop("acceptance", acceptance_of(self.tree, rule))
        return acceptance.walk_sampled(
            **given, drafts=self.drafts(drawn), bounds=bounds_of(rule, B)
        )

    def greedy(self, rule: Relaxed, acceptance: Acceptance | None = None) -> Verdict:
        acceptance = acceptance or acceptance_of(self.tree, rule)
        return acceptance.walk_greedy(self.p, self.drafts(False), bounds_of(rule, B))


CASES = [Case(seed) for seed in range(TREES)]


def check_outcome(verdict: Verdict, image: int, want: Outcome) -> None:
    """What a walk found of an image is what the textbook found."""
    taken = len(want.relaxed)
    assert int(verdict.node[image]) == want.node
    assert verdict.relaxed[image].tolist()[:taken] == want.relaxed
    assert verdict.spent is not None
    spent = verdict.spent[image].tolist()
    assert spent[: len(want.spent)] == pytest.approx(want.spent, abs=1e-12)
    assert not any(spent[len(want.spent) :])
    if want.residual is not None:
        residual = verdict.residual[image].tolist()
        torch.testing.assert_close(residual, want.residual, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RULES)
def test_vectorised_rule_is_the_textbook_rule(name: str, kind: str) -> None:
    rule, reached, drawn = with_neighbours(RULES[name]), set(), KINDS[kind]
    for case in CASES:
        verdict = case.sampled(rule, drawn)
        for image in range(B):
            p, q = case.probs(image)
            draws = case.tokens[image].tolist(), case.uniform[image].tolist()
            want = walk(case.tree, p, q if drawn else None, *draws, rule)
            check_outcome(verdict, image, want)
            reached |= {("depth", case.tree.depths[want.node]), ("helped", any(want.relaxed))}
    assert {("depth", d) for d in range(4)} < reached
    moved = name != "exact" and (drawn or not name.startswith("tv"))
    assert (("helped", True) in reached) == moved


@pytest.mark.parametrize("name", RULES)
def test_greedy_rule_is_the_textbook_rule(name: str) -> None:
    rule, depths = with_neighbours(RULES[name]), set()
    for case in CASES:
        verdict = case.greedy(rule)
        for image in range(B):
            path = greedy_walk(case.tree, case.probs(image)[0], case.tokens[image].tolist(), rule)
            assert int(verdict.node[image]) == path[-1]
            depths.add(len(path) - 1)
    assert {0, 1, 2} <= depths


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residual", mostly_slow(["sound", "official"], "sound"))
@pytest.mark.parametrize(
    "rule",
    EXACT_RULES,
    ids=lambda rule: f"{rule.k} {rule.lam} {rule.delta} {rule.tv} {rule.limits}",
)
def test_relaxed_with_zero_bound_is_exact(rule: Relaxed, residual: str, kind: str) -> None:
    zero, drawn = replace(rule, residual=residual), KINDS[kind]
    for case in CASES[::3]:
        # All tables are given even for k = 0, so that the neighbours really are looked up and found too many.
        spec = spec_of(case.tree, residual, annealed=True, blended=True, metered=False)
        acceptance = Acceptance(spec, ring(V), circle(V))
        relaxed = case.sampled(zero, drawn, acceptance=acceptance)
        exact = case.sampled(Relaxed(), drawn)
        assert torch.equal(relaxed.node, exact.node)
        assert torch.equal(relaxed.residual, exact.residual)
        assert not relaxed.relaxed.any()
        greedy = case.greedy(zero, acceptance)
        assert torch.equal(greedy.node, case.greedy(Relaxed()).node)


BOUNDED = [*(Relaxed(k=V - 1, lam=lam) for lam in (1.0, 1.5, 2.0, 5.0))]
BOUNDED += [Relaxed(k=V - 1, delta=delta) for delta in (0.1, 0.3)]


@pytest.mark.parametrize("rule", BOUNDED, ids=lambda rule: f"{rule.lam} {rule.delta}")
def test_lent_mass_is_at_most_the_bound(rule: Relaxed) -> None:
    p = torch.stack([case.p[:, 0] for case in CASES]).flatten(0, 1)
    lent, bound = lent_to(p, rule), rule.delta + (rule.lam - 1) * p
    assert (lent <= bound * (1 + 1e-12)).all()
    assert bool((lent > bound / 2).any()) == (rule.lam > 1 or rule.delta > 0)


@pytest.mark.parametrize("residual", ["sound", "official"])
def test_token_of_probability_zero_is_never_accepted_under_lambda(residual: str) -> None:
    rule, tempted = Relaxed(k=6, lam=50.0, residual=residual), 0
    for case in CASES:
        case_p = torch.where(torch.arange(V) % 2 == 0, case.p, 0.0)
        case_p = case_p / case_p.sum(-1, keepdim=True)
        acceptance = acceptance_of(case.tree, rule)
        zero = torch.zeros_like(case.uniform)  # u = 0 accepts whatever can be accepted at all
        node = case.sampled(rule, acceptance=acceptance, p=case_p, uniform=zero).node
        for image in range(B):
            path = list(dict.fromkeys(case.tree.path_table[int(node[image])]))[1:]
            assert all(case.tokens[image, n] % 2 == 0 for n in path)
        tempted += int((case.tokens[:, 1] % 2 == 1).sum())
    assert tempted > B


def siblings_probs(
    p: Tensor, q: Tensor, children: int, rule: Relaxed, draws: Tensor | None = None
) -> Tensor:
    """The exact distribution of the token after the root, by enumerating all draws and bisecting each bar.

    Given draws [1, children] are sure: the children of a dynamic tree.

    All ordered draws are one batch. Whether child i is accepted depends on u_i alone once the children
    before it were refused, so bisection on u_i finds the chance of its acceptance.
    """
    size = len(p)
    tree = DraftTree.from_paths("flat", [[rank] for rank in range(children)])
    drawn = draws is None
    if draws is None:
        draws = torch.tensor(list(permutations(range(size), children)))
    count = len(draws)
    chance = torch.ones(count, dtype=torch.float64)
    left = torch.ones(count, dtype=torch.float64)
    for i in range(children if drawn else 0):
        chance, left = chance * q[draws[:, i]] / left, left - q[draws[:, i]]
    acceptance = acceptance_of(tree, rule, size)
    tokens = torch.cat([torch.zeros(count, 1, dtype=torch.int32), draws], 1)
    own, bounds = q.expand(count, 1, -1) if drawn else None, bounds_of(rule, count)
    drafts = Drafts(tokens, own, StaticTables(tree)(count))

    def run(uniform: Tensor) -> Verdict:
        return acceptance.walk_sampled(p.expand(count, 1, -1), drafts, uniform[:, None], bounds)

    out = torch.zeros(size, dtype=torch.float64)
    uniform = torch.ones(count, children, dtype=torch.float64)
    for i in range(children):
        low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
        for _ in range(55):
            uniform[:, i] = (low + high) / 2
            accepted = run(uniform).node == i + 1
            low = torch.where(accepted, uniform[:, i], low)
            high = torch.where(accepted, high, uniform[:, i])
        out.index_add_(0, draws[:, i], chance * low)
        chance = chance * (1 - low)
        uniform[:, i] = 1.0
    return out + (chance[:, None] * run(uniform).residual).sum(0)


def random_probs(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    p, q = (2 * torch.randn(2, size, generator=generator, dtype=torch.float64)).softmax(-1)
    return p, q


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0, 1.7])
def test_annealed_acceptance_is_exact_up_to_weight_one(weight: float, kind: str) -> None:
    p, q = random_probs(1, 6)
    sure = None if KINDS[kind] else torch.arange(3)[None]
    found = siblings_probs(p, q, 3, Relaxed(weights=(weight,) * 4), sure)
    moved = float((found - p).abs().sum()) / 2
    assert moved < 1e-12 if weight <= 1 else moved > 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("children", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", mostly_slow(range(4), 0))
def test_exact_acceptance_reproduces_the_target(children: int, seed: int, kind: str) -> None:
    p, q = random_probs(seed, 6)
    sure = None if KINDS[kind] else torch.arange(children)[None]
    found = siblings_probs(p, q, children, Relaxed(), sure)
    torch.testing.assert_close(found, p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_sure_draft_moves_the_distribution_by_exactly_the_lent_mass(seed: int) -> None:
    p, _ = random_probs(seed, 6)
    for token in range(6):
        rule = Relaxed(ring(6).tolist(), k=5, delta=0.3)
        lent = lent_mass(p.tolist(), token, rule)
        q = torch.zeros(6, dtype=torch.float64)
        q[token] = 1.0
        # Drawn from a distribution that has nothing else, or given
        for sure in (None, torch.tensor([[token]])):
            moved = float((siblings_probs(p, q, 1, rule, sure) - p).abs().sum()) / 2
            assert moved == pytest.approx(lent, abs=1e-12) and moved <= 0.3


@pytest.mark.parametrize("seed", range(4))
def test_drawn_draft_is_accepted_with_the_chance_of_its_cluster(seed: int) -> None:
    """The distribution of the next token, written out: each draft's chance, and [p - q]+ for what was refused."""
    p, q = random_probs(seed, 6)
    rule = Relaxed(codes=circle(6).tolist(), limits=(2, 0.5, 2.1))
    want = torch.zeros_like(p)
    for x in range(6):
        together = cluster(p.tolist(), x, rule)
        want[x] = q[x] * min(1.0, float(p[together].sum() / q[together].sum()))
    rest = (p - q).clamp(min=0)
    want += (1 - want.sum()) * rest / rest.sum()
    found = siblings_probs(p, q, 1, rule)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    assert float((found - p).abs().sum()) / 2 > 0.001


def test_codebook_too_large_for_clusters_is_refused() -> None:
    with pytest.raises(OptionError, match="no clusters with this codebook"):
        Clusters(torch.zeros(46_341, 1), 7)


class Sorted(NamedTuple):
    values: Tensor
    indices: Tensor


def test_codes_of_equal_probability_are_in_order_whatever_the_sort_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Devices sort ties as they like: here the last comes first."""
    p = torch.randint(1, 4, (5, 40), generator=torch.Generator().manual_seed(1)) / 4
    sort = Tensor.sort

    def backwards(x: Tensor, dim: int, descending: bool = False) -> Sorted:
        values, order = sort(x.flip(dim), dim=dim, descending=descending, stable=True)
        return Sorted(values, x.shape[dim] - 1 - order)

    stable = sort(p, dim=-1, descending=True, stable=True).indices
    monkeypatch.setattr(Tensor, "sort", backwards)
    assert not torch.equal(p.sort(-1, descending=True).indices, stable)
    for row, order in zip(p.tolist(), descending(p).tolist(), strict=True):
        assert order == sorted(range(len(row)), key=lambda code: -row[code])


def test_hand_made_cluster() -> None:
    """Five tokens on a line: near in rank, in probability and in place, or not by one of the three.

    As published: of n ranks, n less probable and n - 1 more; where fewer than n are less probable, the draft alone;
    codes of probability 0 are members.
    """
    p, q = [0.4, 0.3, 0.15, 0.1, 0.05], [0.1, 0.2, 0.5, 0.1, 0.1]
    places = [[0.0], [2.0], [0.5], [0.6], [0.4]]
    wide = Relaxed(codes=places, limits=(2, 1.0, 3.0))
    assert cluster(p, 2, wide) == [2, 4, 3, 1]
    assert cluster(p, 2, replace(wide, limits=(2, 1.0, 0.5))) == [2, 4, 3]  # token 1 lies 1.5 away
    assert cluster(p, 2, replace(wide, limits=(1, 1.0, 3.0))) == [2, 3]
    assert cluster(p, 2, replace(wide, limits=(3, 1.0, 3.0))) == [2]
    assert cluster(p, 2, replace(wide, limits=(2, 0.07, 3.0))) == [2, 3]
    assert cluster([0.5, 0.5, 0.0, 0.0, 0.0], 3, replace(wide, limits=(1, 1.0, 0.5))) == [3, 4]
    acceptance = Clusters(torch.tensor(places), 7)
    probs = torch.tensor([p]).double(), torch.tensor([q]).double()
    for limits in ((2, 1.0, 3.0), (2, 1.0, 0.5), (1, 1.0, 3.0), (3, 1.0, 3.0), (2, 0.07, 3.0)):
        rule = replace(wide, limits=limits)
        tokens = torch.arange(5, dtype=torch.int32)[None]
        mass = acceptance(*probs, tokens, torch.tensor([limits], dtype=torch.float64))
        want = [raised_mass(p, token, rule, q=q) for token in range(5)]
        assert mass[0].tolist() == pytest.approx(want)


def lent_mass(p: Probs, token: int, rule: Relaxed) -> float:
    return raised_mass(p, token, rule) - p[token]


# The example of the literature's table: 5 tokens, neighbours of 0 are 1, 2, 3, 4.
P5, Q5 = [0.2, 0.1, 0.1, 0.3, 0.3], [0.5, 0.2, 0.1, 0.1, 0.1]
NEAR5 = [[1, 2, 3, 4], [0, 2, 3, 4], [1, 0, 3, 4], [2, 4, 1, 0], [3, 2, 1, 0]]


# lambda a little above 2: at exactly 2 rounding decides whether 0.1 + 0.1 is within (2 - 1) 0.2.
LAMBDA = Relaxed(NEAR5, k=2, lam=2.0 + 1e-9)
DELTA = Relaxed(NEAR5, k=2, delta=0.15)


@pytest.mark.parametrize(
    ("rule", "residual", "q", "chance", "after"),
    [
        (LAMBDA, "sound", Q5, 0.4 / 0.5, [0, 0, 0, 0.5, 0.5]),
        (LAMBDA, "official", Q5, 0.4 / 0.5, [0, 0.1 / 0.7, 0.1 / 0.7, 0.3 / 0.7, 0.2 / 0.7]),
        (DELTA, "sound", None, 0.3, [0, 0, 0.1 / 0.7, 0.3 / 0.7, 0.3 / 0.7]),
        (DELTA, "official", None, 0.3, [0, 0, 0, 0, 1]),
    ],
)
def test_hand_made_examples(
    rule: Relaxed, residual: Residual, q: Probs | None, chance: float, after: list[float]
) -> None:
    """Of one draft, drawn from q or sure: accepted just below its chance, refused just above it."""
    rule = replace(rule, residual=residual)
    assert residual_probs(P5, q, 0, rule) == pytest.approx(after)
    tree = DraftTree.from_paths("one", [[0]])
    acceptance = Acceptance(spec_of(tree, residual, metered=False), torch.tensor(NEAR5))
    p = torch.tensor(P5, dtype=torch.float64).expand(2, 1, -1)
    drawn = None if q is None else torch.tensor(q, dtype=torch.float64).expand(2, 1, -1)
    uniform = torch.tensor([chance - 0.01, chance + 0.01], dtype=torch.float64)[:, None, None]
    drafts = Drafts(torch.zeros(2, 2, dtype=torch.int32), drawn, StaticTables(tree)(2))
    verdict = acceptance.walk_sampled(p, drafts, uniform, bounds_of(rule, 2))
    assert verdict.node.tolist() == [1, 0]
    assert verdict.relaxed[0].tolist() == [True]
    assert verdict.residual[1].tolist() == pytest.approx(after)
