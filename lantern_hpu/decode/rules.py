"""The rules by which a draft is accepted: exact speculative sampling and its relaxations.

Exact, static tree: children of a node were drawn without replacement from q; child x is accepted with
probability min(1, p(x) / q(x)), and after a rejection p becomes [p - q]+ and q loses x (Leviathan et al. 2023,
with SpecInfer's siblings). Exact, dynamic tree: children are the most probable ones, not drawn, i.e. q puts
all its mass on x: accepted with probability p(x), and after a rejection p loses x. The distribution of the image does
not change.

Relaxed by neighbours (LANTERN, arXiv 2410.03355; LANTERN++, arXiv 2502.06352): x also stands for its nearest
codes. Going through its neighbours from the nearest, their mass is added to p(x) as long as the sum stays
within a bound: delta (additive) or (lambda - 1) p(x) (multiplicative).

Relaxed by depth (annealed; Cool-SD, arXiv 2601.09212): x is accepted with probability min(1, w p(x) / q(x)), where
w falls with depth; the residual is [p - min(q, w p)]+. It is exact as long as w is at most 1.

Relaxed by blending: the next token follows h q + (1 - h) p, where h is the largest that keeps its total variation from
p, which is h sum [p - q]+, within a bound. So the first child of a node, drawn from q, is accepted with h + (1 - h)
min(1, p / q); after a rejection all is as in the exact rule. An image may have a budget: once its tokens have spent it
together, h is 0.

Exact or blended drafts of a static tree may be verified together (`traversal.py`): more of them are accepted, and the
distribution is the same.

Relaxed by clusters (GSD, arXiv 2508.07747): x is accepted with the chance of its cluster, min(1, p(G) / q(G)).

`tests/reference.py` is the same in plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import Bounds
from lantern_hpu.errors import OptionError
from lantern_hpu.methods.relaxation import Residual
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.sampling import gather

TINY = torch.finfo(torch.float32).tiny
MOST_CODES = 46_340  # whose square fits int32


@dataclass
class Node:
    """A node of each image, as its next child finds it.

    With p and q [B, n, V] it is n nodes of each image, and of n tokens each is tried at its own.
    """

    p: Tensor  # [B, V] the target's probabilities, or what refused siblings left of them
    q: Tensor | None  # [B, V] the drafter's without those siblings; None: children were not drawn
    weight: Tensor  # [B, 1] or [B, n] w at its depth
    bounds: Bounds
    p_at_node: Tensor | None = None  # [B, V] p before any refusal; None: there was none yet


@dataclass
class Trial:
    """A child of a node, when it is its turn to be tried."""

    prob: Tensor  # [B, 1] its probability
    drawn: Tensor | None  # [B, 1] the drafter's; None: it was not drawn
    mass: Tensor  # [B, 1] what it is accepted with, relaxation included
    cost: Tensor | None  # [B, 1] see `tv_cost`, without what a blend costs; None: it is not metered
    rest: Node  # the node once it is refused

    def really_drawn(self, exists: Tensor) -> Tensor:
        """Of the children that exist [B]: one without drafter mass is skipped, as the draws ran out before it."""
        return exists if self.drawn is None else exists & (self.drawn[:, 0] > 0)


@dataclass
class Verdict:
    """Where the walk down the tree stopped."""

    node: Tensor  # [B] int32, last accepted node
    # [B, V] float32, what the next token is drawn from if `node` has children (all were rejected)
    residual: Tensor
    # [B, D] bool, the draft at depth d+1 was accepted only thanks to relaxation; means nothing for
    # depths past `node`
    relaxed: Tensor
    # [B, D] float32, total variation spent at each depth, see `tv_cost`; 0 where nothing was tried, of no meaning for
    # depths past that of `node`. None: it is not metered
    spent: Tensor | None = None


class NeighbourMass(NamedTuple):
    """What the nearest codes of n tokens lend them."""

    mass: Tensor  # [B, n] float32, the largest sum within the bound
    codes: Tensor  # [B, n, K] int32, nearest first
    lends: Tensor  # [B, n, K] bool


class Neighbours(nn.Module):
    """Mass that the nearest codes of a draft lend it."""

    def __init__(self, table: Tensor, residual: Residual) -> None:
        """
        Args:
            table: [V, K] int32, other codes by rising distance.
            residual: what a rejection leaves. "sound": of a static tree [p - q]+, of a dynamic one p without x and the
                neighbours that lent. "official": as published, the first k + 1 neighbours are zeroed in q, or p for a
                dynamic tree.
        """
        super().__init__()
        self.table, self.official = constant(table), residual == "official"
        self.rank = constant(arange32(table.shape[1]))  # [K]

    def forward(self, node: Node, token: Tensor, prob: Tensor) -> NeighbourMass:
        """
        Args:
            token: [B, n]. prob: [B, n], p(token).
        """
        bounds, codes = node.bounds, self.table[token]  # [B, n, K]
        p = node.p if node.p.dim() == 3 else node.p[:, None].expand(-1, token.shape[1], -1)
        sums = gather(p, -1, codes).cumsum(-1)
        bound = bounds.delta[:, None] + bounds.factor[:, None] * prob
        lends = (sums <= bound[..., None]) & (self.rank < bounds.k[:, None, None])
        return NeighbourMass((sums * lends).amax(-1), codes, lends)

    def keep_mask(self, node: Node, lent: NeighbourMass) -> Tensor:
        """Which entries of p stay when its token, one an image, is refused: [B, V] bool.

        "sound" strikes the neighbours that lent mass; "official" the first k + 1, if the nearest lent any.
        Where the bound itself is zero nothing is struck, so that it is exact under this residual too.
        """
        bounds, struck = node.bounds, lent.lends[:, 0]  # [B, K]
        if self.official:
            active = (bounds.k > 0) & (bounds.delta + bounds.factor > 0)
            struck = (self.rank <= bounds.k[:, None]) & struck[:, :1] & active[:, None]
        every = torch.ones_like(node.p, dtype=torch.bool)
        return every.scatter(1, lent.codes[:, 0].long(), ~struck)


class Clusters(nn.Module):
    """The mass that drafts are accepted with when their clusters are tried (GSD).

    A draft's cluster G are the codes that are close to it three times over: in the order of probability (7 places
    down and 6 up, as published), in probability, and in the target's embedding. Where fewer than 7 codes are less
    probable it is the draft alone. What is kept is the draft itself. The residual stays [p - q]+, so the token's
    distribution moves, and nothing bounds by how much. Codes of probability 0 can be members, and be accepted.
    """

    def __init__(self, codes: Tensor, ranks: int) -> None:
        """Codes are [V, H], rows of the target's embedding; a cluster reaches `ranks` places down, one less up."""
        super().__init__()
        if len(codes) > MOST_CODES:
            why = f"{len(codes)} codes, and their order is kept in int32 for up to {MOST_CODES}"
            raise OptionError(
                "no clusters with this codebook", why, "another relaxation, such as lambda-5"
            )
        self.codes = constant(codes)
        self.token = constant(arange32(len(codes)))  # [V]
        self.offset = constant(arange32(2 * ranks) - ranks + 1)  # [2 ranks]

    def forward(self, p: Tensor, q: Tensor | None, token: Tensor, limits: Tensor) -> Tensor:
        """q(x) p(G) / q(G) of each token x [B, n], which over q(x) is the chance that it is accepted.

        Where limits leave x alone in its cluster this is p(x), to the last bit. Without a q it is p(G).

        Args:
            p, q: [B, V] probabilities, or [B, n, V] with one distribution per token.
            token: [B, n]. limits: [B, 3], see `Relaxation.limits`.
        """
        code, inside = self.members(p, token, limits)
        mass = (of_each(p, code) * inside).sum(-1)
        if q is None:
            return mass
        drawn = of_each(q, token[..., None])[..., 0]
        return mass * (drawn / (of_each(q, code) * inside).sum(-1).clamp(min=TINY))

    def members(self, p: Tensor, token: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
        """Codes [B, n, 2 ranks] around each token in the order of probability, and which are of its cluster."""
        order = descending(p)  # as p
        places = torch.zeros_like(order).scatter(-1, order.long(), self.token.expand_as(order))
        mine_at = of_each(places, token[..., None])  # [B, n, 1]
        place = mine_at + self.offset  # [B, n, 2 ranks]
        code = of_each(order, place.clamp(min=0, max=p.shape[-1] - 1))
        ranks, gap, distance = limits[:, :, None, None].unbind(1)  # [B, 1, 1] each
        mine, mass = of_each(p, token[..., None]), of_each(p, code)
        apart = (self.codes[code].float() - self.codes[token][:, :, None].float()).square().sum(-1)
        near = (self.offset <= ranks) & (self.offset > -ranks)
        close = near & ((mass - mine).abs() < gap) & (apart < distance)
        there = (place >= 0) & (mine_at + ranks < p.shape[-1])
        return code, (close & there) | (self.offset == 0)


def descending(p: Tensor) -> Tensor:
    """Tokens [..., V] int32 by falling probability; of equal ones, common in 16 bits, the lower token comes first.

    A stable sort is not native on every device, so ties are put in order by a second sort, of distinct numbers.
    """
    values, order = p.sort(-1, descending=True)
    step = (values[..., 1:] != values[..., :-1]).cumsum(-1, dtype=torch.int32)
    group = torch.cat([torch.zeros_like(step[..., :1]), step], -1) * p.shape[-1]  # up to MOST_CODES
    return (group + order.int()).sort(-1).values - group


def of_each(table: Tensor, index: Tensor) -> Tensor:
    """What a table [B, n, V], or one [B, V] for all n, has at index [B, n, m]: [B, n, m]."""
    if table.dim() == 2:
        table = table[:, None].expand(-1, index.shape[1], -1)
    return gather(table, 2, index)


class Blend(NamedTuple):
    """How much of the drafter's distribution the tokens of n places take on."""

    share: Tensor  # [B, n] h
    spent: Tensor  # [B, n] the total variation that it costs

    @classmethod
    def of(cls, distance: Tensor, spent: Tensor) -> Blend:
        return cls(spent / distance.clamp(min=TINY), spent)

    def accept_mass(self, mass: Tensor, drawn: Tensor) -> Tensor:
        """What first children are accepted with, from their own mass and the drafter's; all [B, n]."""
        return mass + self.share * (drawn - mass).clamp(min=0)

    def at(self, place: Tensor) -> Blend:
        """Of one place an image [B]."""
        return Blend(*(gather(x, 1, place[:, None]) for x in self))


class Rules(nn.Module):
    """How the children of one node are tried, under what the images of a spec relax."""

    def __init__(
        self, spec: Spec, neighbours: Tensor | None = None, codes: Tensor | None = None
    ) -> None:
        """
        Args:
            neighbours: [V, K] int32, other codes by rising distance; None leaves their mass out.
            codes: [V, H], the tokens' embedding; None leaves clusters out.
        """
        super().__init__()
        self.annealed, self.blended = spec.annealed, spec.blended
        # A budget is metered. Under the official residual the meter means nothing
        self.metered = spec.metered or spec.blended
        self.neighbours = None if neighbours is None else Neighbours(neighbours, spec.residual)
        self.clusters = None if codes is None else Clusters(codes, spec.ranks)

    @property
    def changes_mass(self) -> bool:
        """Whether a draft may be accepted with another mass than its own probability, but for a blend."""
        return self.neighbours is not None or self.annealed or self.clusters is not None

    def blend(self, p: Tensor, q: Tensor | None, bounds: Bounds) -> Blend | None:
        """Of n places in a row that are all tried if the last one is; p and q [B, n, V]."""
        if not self.blended or q is None:
            return None
        assert bounds.tv is not None and bounds.budget is not None
        distance = (p - q).clamp(min=0).sum(-1)  # [B, n]
        most = torch.minimum(distance, bounds.tv[:, None])
        before = most.cumsum(1) - most  # as long as the budget lasts; after that it is no less
        left = (bounds.budget[:, None] - before).clamp(min=0)
        return Blend.of(distance, torch.minimum(most, left))

    def accept_mass(
        self, node: Node, token: Tensor, prob: Tensor
    ) -> tuple[Tensor, NeighbourMass | None]:
        """Mass [B, n] that tokens [B, n] with probabilities `prob` [B, n] are accepted with, but for a blend.

        Returns what is lent to them as well, which is part of it.
        """
        mass = prob
        if self.clusters is not None:
            assert node.bounds.limits is not None
            mass = self.clusters(node.p, node.q, token, node.bounds.limits)
        mass = mass * node.weight if self.annealed else mass
        if self.neighbours is None:
            return mass, None
        lent: NeighbourMass = self.neighbours(node, token, prob)
        return mass + lent.mass, lent

    def rest(self, node: Node, token: Tensor, prob: Tensor, lent: NeighbourMass | None) -> Node:
        """The node once token [B, 1] was refused.

        Where nothing is left of p, by rounding or under the official residual, it is p at the node before any refusal.
        """
        p, q, rule = node.p, node.q, self.neighbours
        keep = None
        if rule is not None and lent is not None and (q is None or rule.official):
            keep = rule.keep_mask(node, lent)
        if q is None:
            left = p.scatter(1, token.long(), 0.0)
            left = left if keep is None else left * keep
            if self.annealed:
                left = left.scatter(1, token.long(), prob * (1 - node.weight).clamp(min=0))
        else:
            left = (p - (q if keep is None else q * keep)).clamp(min=0)
            if self.annealed:
                left = torch.maximum(left, p * (1 - node.weight).clamp(min=0))
            q = remove_token(q, token)
        total, first = left.sum(-1, keepdim=True), p if node.p_at_node is None else node.p_at_node
        return replace(node, p=torch.where(total > 0, left / total, first), q=q, p_at_node=first)

    def trial(self, node: Node, token: Tensor, blend: Blend | None = None) -> Trial:
        """A child [B, 1] that all siblings before it left to be tried; `blend` is of the node, for its first child."""
        prob = gather(node.p, 1, token)
        drawn = None if node.q is None else gather(node.q, 1, token)
        mass, lent = self.accept_mass(node, token, prob)
        cost = tv_cost(mass, prob, drawn) if self.metered else None
        if blend is not None and drawn is not None:
            mass = blend.accept_mass(mass, drawn)
        return Trial(prob, drawn, mass, cost, self.rest(node, token, prob, lent))

    def siblings(
        self,
        node: Node,
        tokens: Tensor,  # [B, c] the children's in the order they are tried
        exists: Tensor,  # [B, c] bool
        uniform: Tensor,  # [B, c]
        blend: Blend | None = None,  # of the node
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Try the children of one node, one after the other.

        Returns which was accepted [B, c] bool (at most one), what is left of p if none was [B, V], whether the
        accepted one needed the relaxation [B] bool, and the total variation spent on those tried [B].
        """
        waiting = torch.ones_like(exists[:, 0])
        relaxed, accepted = torch.zeros_like(waiting), []
        if blend is None:
            spent = torch.zeros_like(node.p[:, 0])
        else:
            spent = blend.spent[:, 0] * exists[:, 0]
        for child in range(tokens.shape[1]):
            token, bar = tokens[:, child : child + 1], uniform[:, child : child + 1]
            trial = self.trial(node, token, blend if child == 0 else None)
            bar = bar if trial.drawn is None else bar * trial.drawn
            tried = trial.really_drawn(exists[:, child]) & waiting
            # Strictly below: a token of probability 0 is not accepted even with u = 0.
            passed = tried & (bar < trial.mass)[:, 0]
            relaxed = relaxed | (passed & ~(bar < trial.prob)[:, 0])
            spent = spent if trial.cost is None else spent + trial.cost[:, 0] * tried
            left = torch.where((tried & ~passed)[:, None], trial.rest.p, node.p)
            node, waiting = replace(trial.rest, p=left), waiting & ~passed
            accepted.append(passed)
        return torch.stack(accepted, 1), node.p, relaxed, spent if self.metered else None


def tv_cost(mass: Tensor, prob: Tensor, drawn: Tensor | None) -> Tensor:
    """How much more often than by the exact rule drafts are accepted: the total variation that it costs, on average.

    A drawn draft x is accepted with min(1, m / q), exactly with min(1, p / q). What is added, min(q, m) - min(q, p),
    goes to codes with q > p and comes from those with p > q, so that its sum over all codes is the total variation
    between the token's distribution and p: the mean over x drawn from q of what this returns. A draft that was not
    drawn is one with all of q on x. Of several children the sum over those tried is on average no less than the total
    variation.

    Args:
        mass, prob, drawn: [B, n] m(x), p(x) and q(x); no q: it was not drawn.
    """
    if drawn is None:
        return (mass.clamp(max=1) - prob).clamp(min=0)
    more = torch.minimum(mass, drawn) - torch.minimum(prob, drawn)
    return more.clamp(min=0) / drawn.clamp(min=TINY)


def remove_token(q: Tensor, token: Tensor) -> Tensor:
    """The drafter's probabilities [..., V] given that it is not token [..., 1], which was tried."""
    q = q.scatter(-1, token.long(), 0.0)
    return q / q.sum(-1, keepdim=True).clamp(min=1e-30)
