"""The acceptance rule as a textbook would write it: one image, plain Python, float64, recursive.

Slow and obvious on purpose. Tests hold `accept.py` to it on thousands of random trees; nothing else uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lantern_hpu.tree import DraftTree

Probs = list[float]


@dataclass
class Relaxed:
    """A relaxation for one image; what its rule does not use keeps its neutral value."""

    neighbours: Sequence[Sequence[int]] = ()
    k: int = 0
    delta: float = 0.0
    lam: float = 1.0
    residual: str = "sound"
    weights: Sequence[float] = ()  # of each depth
    codes: Sequence[Sequence[float]] = ()  # the vector of each code
    limits: tuple[int, float, float] = (0, 0.0, 0.0)  # of a cluster: ranks, gap, squared distance
    tv: float = 0.0
    budget: float = math.inf  # of the tokens to come

    def weight(self, depth: int) -> float:
        return self.weights[depth] if self.weights else 1.0


@dataclass
class Outcome:
    """The last accepted node, the probs of the next token if all its children were rejected, and counts."""

    node: int
    residual: Probs | None
    relaxed: list[bool] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)  # on the drafts tried at each depth
    chance: float = 1.0  # that the walk stops here if it does not stop earlier: `traverse` alone


def lenders(p: Probs, token: int, rule: Relaxed) -> list[int]:
    """The longest run of nearest neighbours whose mass stays within the bound."""
    bound, total = rule.delta + (rule.lam - 1.0) * p[token], 0.0
    found: list[int] = []
    for other in list(rule.neighbours[token])[: rule.k] if rule.k else []:
        total += p[other]
        if total > bound:
            break
        found.append(other)
    return found


def cluster(p: Probs, token: int, rule: Relaxed) -> list[int]:
    """The token, and those close to it in rank, in probability and in embedding, as published.

    In rising order `order[i - ranks : i + ranks]`, of which nothing is left where i is below ranks.
    """
    ranks, gap, most = rule.limits
    order = sorted(range(len(p)), key=lambda y: (p[y], -y))
    place = order.index(token)
    if place < ranks:
        return [token]
    close = [y for y in order[place - ranks : place + ranks] if y != token]
    close = [y for y in close if abs(p[y] - p[token]) < gap]
    return [token, *(y for y in close if math.dist(rule.codes[y], rule.codes[token]) ** 2 < most)]


def raised_mass(
    p: Probs, token: int, rule: Relaxed, depth: int = 0, q: Probs | None = None
) -> float:
    """What a draft is accepted with, against its q; of a cluster the share that is the draft's own."""
    if min(rule.limits) > 0:
        together = cluster(p, token, rule)
        share = 1.0 if q is None else q[token] / sum(q[y] for y in together)
        return sum(p[y] for y in together) * share
    return rule.weight(depth) * p[token] + sum(p[other] for other in lenders(p, token, rule))


def blend(p: Probs, q: Probs | None, rule: Relaxed) -> tuple[float, float]:
    """h of h q + (1 - h) p, and the total variation between that and p."""
    if q is None:
        return 0.0, 0.0
    distance = sum(max(a - b, 0.0) for a, b in zip(p, q, strict=True))
    spent = min(distance, rule.tv, max(rule.budget, 0.0))
    return (spent / distance if distance > 0 else 0.0), spent


def normalised(values: Probs) -> Probs | None:
    total = sum(values)
    return [v / total for v in values] if total > 0 else None


def without(probs: Probs, token: int) -> Probs:
    """The probs given that it is not this token."""
    return normalised([0.0 if y == token else v for y, v in enumerate(probs)]) or [0.0] * len(probs)


def published(p: Probs, token: int, rule: Relaxed) -> list[int]:
    """The neighbours that the published code strikes: one more than k, whether they lent anything or not."""
    active = rule.k > 0 and (rule.delta > 0 or rule.lam > 1)
    lend = active and lenders(p, token, rule)
    return list(rule.neighbours[token])[: rule.k + 1] if lend else []


def residual_probs(
    p: Probs, q: Probs | None, token: int, rule: Relaxed, depth: int = 0
) -> Probs | None:
    """What is left of p once a draft was refused: one drawn from q, or one that was not drawn."""
    official, weight = rule.residual == "official", rule.weight(depth)
    if q is None:
        left = list(p)
        for other in published(p, token, rule) if official else lenders(p, token, rule):
            left[other] = 0.0
        left[token] = max(0.0, 1.0 - weight) * p[token]
        return normalised(left)
    taken = list(q)
    for other in published(p, token, rule) if official else []:
        taken[other] = 0.0
    return normalised([max(a - b, (1.0 - weight) * a, 0.0) for a, b in zip(p, taken, strict=True)])


def walk(
    tree: DraftTree,
    p: dict[int, Probs],
    q: dict[int, Probs] | None,
    tokens: Sequence[int],
    uniform: Sequence[Sequence[float]],
    rule: Relaxed,
    node: int = 0,
) -> Outcome:
    """Exact or relaxed speculative sampling from `node` downwards.

    Args:
        p, q: probs of target and drafter at each node with children; no q: the drafts were not drawn.
        tokens: token of each node. uniform: [D][C], the number for each level and sibling.
    """
    if not tree.children[node]:
        return Outcome(node, None)
    left, depth = list(p[node]), tree.depths[node]
    drawn = list(q[node]) if q is not None else None
    share, spent = blend(left, drawn, rule)
    rule = replace(rule, budget=rule.budget - spent)
    for rank, child in enumerate(tree.children[node]):
        token = tokens[child]
        chance = 1.0 if drawn is None else drawn[token]
        if chance > 0:
            bar = uniform[depth][rank] * chance
            mass = raised_mass(left, token, rule, depth, drawn)
            spent += max(min(1.0, mass / chance) - min(1.0, left[token] / chance), 0.0)
            if rank == 0:  # with a chance of `share` whatever the target says
                mass = max(mass, share * chance + (1.0 - share) * mass)
            if bar < mass:
                after = walk(tree, p, q, tokens, uniform, rule, child)
                relaxed = [not bar < left[token], *after.relaxed]
                return Outcome(after.node, after.residual, relaxed, [spent, *after.spent])
            left = residual_probs(left, drawn, token, rule, depth) or list(p[node])
        drawn = without(drawn, token) if drawn is not None else None
    return Outcome(node, left, [], [spent])


def traverse(
    tree: DraftTree,
    p: dict[int, Probs],
    q: dict[int, Probs],
    tokens: Sequence[int],
    uniform: Sequence[float],
    rule: Relaxed,
    node: int = 0,
    weight: float = 1.0,
) -> Outcome | None:
    """Drafts verified together: where the walk stops at or behind `node`, or None if nothing here is kept.

    Block verification (arXiv 2403.10444), of trees traversal verification (arXiv 2505.12398): deepest drafts first,
    first children first; a node is kept only if nothing behind it was.

    Args:
        uniform: [M - 1], that of node n at n - 1. rule: exact, or a blend.
        weight: the chance that the node is kept, as far as the path to it decides.
    """
    left, drawn, spent = None, None, []
    if tree.children[node]:
        share, cost = blend(p[node], q[node], rule)
        left = [a + share * (b - a) for a, b in zip(p[node], q[node], strict=True)]
        drawn, spent, rule = list(q[node]), [cost], replace(rule, budget=rule.budget - cost)
    for rank, child in enumerate(tree.children[node]):
        assert left is not None and drawn is not None
        token = tokens[child]
        chance = drawn[token]
        if chance > 0:
            kept = min(1.0, weight * left[token] / chance)
            after = traverse(tree, p, q, tokens, uniform, rule, child, kept)
            if after is not None:
                bar = uniform[child - 1] / (after.chance if after.node == child else 1.0)
                raised = rank == 0 and spent[0] > 0
                helped = raised and bar >= p[node][token] / min(left[token], chance)
                relaxed = [helped, *after.relaxed]
                return replace(after, relaxed=relaxed, spent=[*spent, *after.spent])
            rest = [max(weight * a - b, 0.0) for a, b in zip(left, drawn, strict=True)]
            left = normalised(rest) or list(p[node])
            refused = sum(rest) + 1.0 - weight
            weight = sum(rest) / refused if refused > 0 else 1.0
        drawn = without(drawn, token)
    if node == 0 or uniform[node - 1] < weight:
        return Outcome(node, left, [], spent, weight)
    return None


def wins(probs: Probs, token: int, rule: Relaxed, depth: int = 0) -> bool:
    """Whether a draft is the argmax of the probs, or becomes it with what relaxation adds; ties go to the lower."""
    raised = raised_mass(probs, token, rule, depth)
    rivals = [(v, y) for y, v in enumerate(probs) if y != token]
    beaten = all(raised > v or (raised == v and token < y) for v, y in rivals)
    return beaten or all(probs[token] > v or (probs[token] == v and token < y) for v, y in rivals)


def greedy_walk(
    tree: DraftTree, p: dict[int, Probs], tokens: Sequence[int], rule: Relaxed, node: int = 0
) -> list[int]:
    """The longest path, first in sibling order, whose drafts all win the argmax of p."""
    best: list[int] = [node]
    for child in tree.children[node]:
        if wins(p[node], tokens[child], rule, tree.depths[node]):
            path = [node, *greedy_walk(tree, p, tokens, rule, child)]
            best = path if len(path) > len(best) else best
    return best


def dynamic_tree(
    probs: Callable[[tuple[int, ...]], Probs], top_k: int, expansions: int, drafts: int
) -> list[tuple[int, ...]]:
    """EAGLE-2's tree as the tokens on the path to each draft, in the order of their numbers.

    Args:
        probs: the drafter's probs after the root and these tokens.

    Equal scores are decided by age: what was found earlier stays.
    """

    def grown(path: tuple[int, ...], score: float) -> list[tuple[float, tuple[int, ...]]]:
        after = probs(path)
        best = sorted(range(len(after)), key=lambda t: -after[t])[:top_k]
        return [(score + logarithm(after[t]), (*path, t)) for t in best]

    found = newest = grown((), 0.0)
    for _ in range(expansions):
        frontier = sorted(newest, key=lambda c: -c[0])[:top_k]  # sorting keeps the order of equals
        newest = [child for score, path in frontier for child in grown(path, score)]
        found = found + newest
    kept = sorted(range(len(found)), key=lambda i: -found[i][0])[:drafts]
    return [found[i][1] for i in sorted(kept)]


def logarithm(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf
