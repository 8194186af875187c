"""Drafts verified together: every small tree is exact by enumeration, and the fast forms are the textbook's."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product
from math import prod

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lantern_hpu.decode.traversal import postorder
from lantern_hpu.decode.walk import Acceptance
from lantern_hpu.tree import DraftTree
from tests.reference import Outcome, Probs, Relaxed, blend, traverse, walk
from tests.test_accept import CASES, RULES, B, bounds_of, check_outcome, spec_of

Prefix = tuple[int, ...]
Shape = tuple["Shape", ...]


@pytest.mark.parametrize("name", ["exact", "tv", "tv budget"])
def test_vectorised_form_is_the_textbook_one(name: str) -> None:
    rule, depths, helped = RULES[name], set(), False
    for case in CASES:
        acceptance = Acceptance(spec_of(case.tree, together=True, blended=rule.tv > 0))
        generator = torch.Generator().manual_seed(case.tree.size)
        uniform = torch.rand(B, case.tree.size - 1, generator=generator, dtype=torch.float64)
        found = acceptance.walk_sampled(case.p, case.drafts(True), uniform, bounds_of(rule, B))
        for image in range(B):
            draws = case.tokens[image].tolist(), uniform[image].tolist()
            want = traverse(case.tree, *case.probs(image), *draws, rule)
            assert want is not None
            check_outcome(found, image, want)
            depths.add(len(want.relaxed))
            helped |= any(want.relaxed)
    assert set(range(4)) <= depths and helped == (name != "exact")


# ------------------------------------------------------------------------------------ enumeration

V = 3


def shapes(nodes: int) -> Iterator[Shape]:
    """Trees of so many nodes, as the trees of their children."""
    if nodes == 1:
        yield ()
    for first in range(1, nodes):
        for child, rest in product(shapes(first), shapes(nodes - first)):
            yield (child, *rest)


def paths_of(shape: Shape, above: Prefix = ()) -> Iterator[Prefix]:
    for rank, child in enumerate(shape):
        yield (*above, rank)
        yield from paths_of(child, (*above, rank))


TREES = [
    DraftTree.from_paths(f"{shape}", list(paths_of(shape)))
    for nodes in range(2, 6)
    for shape in shapes(nodes)
]
TREES = [tree for tree in TREES if tree.max_children <= V]


class Model:
    """Distributions after every prefix of up to `most` tokens; some tokens of the drafter's have no probability."""

    def __init__(self, seed: int, most: int) -> None:
        self.rng, self.most = np.random.default_rng(seed), most
        prefixes = [t for n in range(most + 1) for t in product(range(V), repeat=n)]
        self.p = {prefix: self.draw() for prefix in prefixes}
        near = seed % 2  # a drafter that resembles the target, or does not
        self.q = {t: 0.5 * near * p + (1 - 0.5 * near) * self.draw() for t, p in self.p.items()}

    def draw(self) -> NDArray[np.float64]:
        return self.rng.dirichlet([0.7] * V)

    def images(self, prefix: Prefix = ()) -> NDArray[np.float64]:
        """Probabilities [V, ..., V] of the tokens after a prefix, `most` + 1 with it."""
        p = self.p[prefix]
        if len(prefix) == self.most:
            return p
        return np.stack([p[x] * self.images((*prefix, x)) for x in range(V)])


def drafted(
    tree: DraftTree, model: Model, node: int = 0
) -> Iterator[tuple[dict[int, Prefix], float]]:
    """All drafts of a tree with their chances, as the tokens on the path to each node."""
    prefixes: list[tuple[dict[int, Prefix], float]] = [({0: ()}, 1.0)]
    for node in tree.expanded:
        more = []
        for found, chance in prefixes:
            q = model.q[found[node]]
            for draws in permutations(range(V), len(tree.children[node])):
                left = [1 - sum(q[y] for y in draws[:rank]) for rank in range(len(draws))]
                share = prod(q[x] / rest for x, rest in zip(draws, left, strict=True))
                named = zip(tree.children[node], draws, strict=True)
                more.append((found | {c: (*found[node], x) for c, x in named}, chance * share))
        prefixes = more
    yield from prefixes


def stops(
    tree: DraftTree, p: dict[int, Probs], q: dict[int, Probs], tokens: list[int], rule: Relaxed
) -> Iterator[tuple[Outcome, float]]:
    """Where the walk can stop, with the chance of each: all before it are refused."""
    left = 1.0
    for stop in postorder(tree):
        uniform = [0.0 if node == stop else 1.0 for node in range(1, tree.size)]
        found = traverse(tree, p, q, tokens, uniform, rule)
        assert found is not None
        if found.node == stop:  # else it has no chance
            yield found, left * found.chance
            left *= 1 - found.chance


def token_rate(tree: DraftTree, model: Model) -> float:
    """Tokens a step of a chain whose drafts are verified one by one."""
    rate = 1.0
    for found, drawn in drafted(tree, model):
        chance = 1.0
        for node in range(1, tree.size):
            above, token = found[node - 1], found[node][-1]
            chance *= min(1.0, model.p[above][token] / model.q[above][token])
            rate += drawn * chance
    return rate


def law(tree: DraftTree, model: Model) -> tuple[NDArray[np.float64], float]:
    """The distribution of images [V, ..., V] whose next tokens a step verifies together, and tokens a step."""
    result, rate = np.zeros((V,) * (model.most + 1)), 0.0
    for found, drawn in drafted(tree, model):
        p, q = ({n: of[found[n]].tolist() for n in tree.expanded} for of in (model.p, model.q))
        tokens = [0, *(found[node][-1] for node in range(1, tree.size))]
        for outcome, chance in stops(tree, p, q, tokens, Relaxed()):
            prefix = found[outcome.node]
            following = model.p[prefix] if outcome.residual is None else outcome.residual
            rate += drawn * chance * (len(prefix) + 1)
            for token, probability in enumerate(following):
                weight = drawn * chance * probability
                after = (*prefix, token)
                result[after] += weight * (model.images(after) if len(after) <= model.most else 1)
    return result, rate


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_images_follow_the_target_whatever_the_tree(tree: DraftTree, seed: int) -> None:
    model = Model(seed, tree.depth)
    found, _ = law(tree, model)
    np.testing.assert_allclose(found, model.images(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_no_chain_accepts_fewer_than_token_by_token(seed: int) -> None:
    for depth in (1, 2, 3):
        model = Model(seed, depth)
        tree = DraftTree.from_paths("chain", [[0] * n for n in range(1, depth + 1)])
        (_, together), alone = law(tree, model), token_rate(tree, model)
        assert together > alone * (1 + 1e-6) if depth > 1 else together == pytest.approx(alone)


@pytest.mark.parametrize("rule", [Relaxed(tv=0.15), Relaxed(tv=0.15, budget=0.2)], ids=str)
def test_a_blend_is_the_exact_rule_with_another_target(rule: Relaxed) -> None:
    """What each node spends is what nodes above it left, so that a path keeps to its budget."""
    for case in CASES[::3]:
        uniform = torch.rand(B, case.tree.size - 1, generator=torch.Generator().manual_seed(1))
        for image in range(B // 2):
            p, q = case.probs(image)
            blended, spent = {}, {0: 0.0}
            for node in case.tree.expanded:
                left = Relaxed(tv=rule.tv, budget=rule.budget - spent[node])
                share, cost = blend(p[node], q[node], left)
                pairs = zip(p[node], q[node], strict=True)
                blended[node] = [a + share * (b - a) for a, b in pairs]
                spent |= dict.fromkeys(case.tree.children[node], spent[node] + cost)
            draws = case.tokens[image].tolist(), uniform[image].tolist()
            want = traverse(case.tree, blended, q, *draws, Relaxed())
            found = traverse(case.tree, p, q, *draws, rule)
            assert want is not None and found is not None and found.node == want.node
            assert sum(found.spent) <= rule.budget + 1e-12
            if want.residual is not None:
                assert found.residual == pytest.approx(want.residual, abs=1e-9)


def test_one_level_is_verified_as_token_by_token() -> None:
    tree = DraftTree.from_paths("flat", [[0], [1], [2]])
    rng, refused = np.random.default_rng(0), 0
    for _ in range(500):
        p, q = ({0: rng.dirichlet([0.5] * 8).tolist()} for _ in range(2))
        tokens = [0, *rng.choice(8, 3, replace=False, p=q[0]).tolist()]
        uniform = rng.random(3).tolist()
        found = traverse(tree, p, q, tokens, uniform, Relaxed())
        want = walk(tree, p, q, tokens, [uniform], Relaxed())
        assert found is not None and found.node == want.node
        assert found.residual is None or found.residual == pytest.approx(want.residual)
        refused += want.node == 0
    assert 0 < refused < 500
