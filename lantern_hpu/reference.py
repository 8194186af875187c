"""The acceptance rule as a textbook would write it: one image, plain Python, float64, recursive.

Slow and obvious on purpose. Tests hold `accept.py` to it on thousands of random trees; nothing else uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lantern_hpu.tree import DraftTree

Law = list[float]


@dataclass
class Relaxed:
    """A relaxation for one image: k neighbours, and either bound; the other keeps its neutral value."""

    neighbours: Sequence[Sequence[int]] = ()
    k: int = 0
    delta: float = 0.0
    lam: float = 1.0
    residual: str = "sound"


@dataclass
class Outcome:
    """The last accepted node, the law of the next token if all its children were rejected, and counts."""

    node: int
    law: Law | None
    relaxed: list[bool] = field(default_factory=list)


def lent_mass(p: Law, token: int, rule: Relaxed) -> float:
    """Mass of the longest run of nearest neighbours that stays within the bound."""
    bound = rule.delta + (rule.lam - 1.0) * p[token]
    lent = total = 0.0
    for other in list(rule.neighbours[token])[: rule.k] if rule.k else []:
        total += p[other]
        if total > bound:
            break
        lent = total
    return lent


def normalised(values: Law) -> Law | None:
    total = sum(values)
    return [v / total for v in values] if total > 0 else None


def without(law: Law, token: int) -> Law:
    """The law given that it is not this token."""
    return normalised([0.0 if y == token else v for y, v in enumerate(law)]) or [0.0] * len(law)


def residual_law(p: Law, q: Law, token: int, rule: Relaxed) -> Law | None:
    """What is left of p once a draft drawn from q was refused."""
    taken = list(q)
    active = rule.k > 0 and (rule.delta > 0 or rule.lam > 1)
    bound = rule.delta + (rule.lam - 1.0) * p[token]
    if rule.residual == "official" and active and p[rule.neighbours[token][0]] <= bound:
        for other in list(rule.neighbours[token])[: rule.k + 1]:
            taken[other] = 0.0
    return normalised([max(a - b, 0.0) for a, b in zip(p, taken, strict=True)])


def walk(
    tree: DraftTree,
    p: dict[int, Law],
    q: dict[int, Law],
    tokens: Sequence[int],
    uniform: Sequence[Sequence[float]],
    rule: Relaxed,
    node: int = 0,
) -> Outcome:
    """Exact or relaxed speculative sampling from `node` downwards.

    Args:
        p, q: laws of target and drafter at each node with children.
        tokens: token of each node. uniform: [D][C], the number for each level and sibling.
    """
    if not tree.children[node]:
        return Outcome(node, None)
    left, drawn = list(p[node]), list(q[node])
    for rank, child in enumerate(tree.children[node]):
        token = tokens[child]
        if drawn[token] > 0:
            lent = lent_mass(left, token, rule)
            bar = uniform[tree.depths[node]][rank] * drawn[token]
            if bar < left[token] + lent:
                below = walk(tree, p, q, tokens, uniform, rule, child)
                return Outcome(below.node, below.law, [not bar < left[token], *below.relaxed])
            left = residual_law(left, drawn, token, rule) or list(p[node])
        drawn = without(drawn, token)
    return Outcome(node, left)


def greedy_walk(
    tree: DraftTree, p: dict[int, Law], tokens: Sequence[int], rule: Relaxed, node: int = 0
) -> list[int]:
    """The longest path, first in sibling order, whose drafts all win the argmax of p."""
    best: list[int] = [node]
    for child in tree.children[node]:
        token, law = tokens[child], p[node]
        raised = law[token] + lent_mass(law, token, rule)
        if all(y == token or raised > v or (raised == v and token < y) for y, v in enumerate(law)):
            path = [node, *greedy_walk(tree, p, tokens, rule, child)]
            best = path if len(path) > len(best) else best
    return best
