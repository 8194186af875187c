"""Which drafts of a verified tree are accepted: exact speculative sampling and its relaxations.

Exact, static tree: children of a node were drawn without replacement from q; child x is accepted with
probability min(1, p(x) / q(x)), and after a rejection p becomes [p - q]+ and q loses x (Leviathan et al. 2023,
with SpecInfer's siblings). Exact, dynamic tree: children are the most probable ones, not drawn, which is the same with
all of q on x: accepted with probability p(x), and after a rejection p loses x. The distribution of the image does
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

Relaxed by clusters (GSD, arXiv 2508.07747): x is accepted with the chance of its cluster, min(1, p(G) / q(G)); see
`decode/clusters.py`.

`tests/reference.py` is the same in plain Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.decode.tree_tables import TreeTables, rows_at
from lantern_hpu.errors import OptionError
from lantern_hpu.methods.relaxation import Relaxation, Residual
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.kernels import Walk
from lantern_hpu.ops.sampling import gather, gather_rows, topk_tokens
from lantern_hpu.tree import Tree, Window

# ---------------------------------------------------------------------------------------- clusters

# Clusters of codes that stand for one another when a draft is tried (GSD, arXiv 2508.07747).
#
# A draft's cluster G are the codes that are close to it three times over: in the order of probability, in probability,
# and in the codebook. It is accepted with probability min(1, p(G) / q(G)), and what is kept is the draft itself. The
# residual stays [p - q]+, so the token's distribution moves, and nothing bounds by how much.
#
# Codes without probability are of no cluster, so that a filter that removed them holds. `tests/reference.py` is the
# same in plain Python.

TINY = torch.finfo(torch.float32).tiny
MOST_CODES = 46_340  # whose square fits int32


class Clusters(nn.Module):
    """The mass that drafts are accepted with when their clusters are tried."""

    def __init__(self, codes: Tensor, ranks: int) -> None:
        """
        Args:
            codes: [V, dim] float32, the codes' vectors.
            ranks: most places up and down that a cluster may reach.
        """
        super().__init__()
        if len(codes) > MOST_CODES:
            why = f"{len(codes)} codes, and their order is kept in int32 for up to {MOST_CODES}"
            raise OptionError("no clusters with this codebook", why, "--relax lambda-5")
        self.codes = constant(codes)
        self.token = constant(arange32(len(codes)))  # [V]
        self.offset = constant(arange32(2 * ranks + 1) - ranks)  # [2 ranks + 1]

    @property
    def width(self) -> int:
        """Numbers that are gathered for each draft."""
        return len(self.offset) * self.codes.shape[1]

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
        """Codes [B, n, 2 ranks + 1] around each token in the order of probability, and which are of its cluster.

        Args:
            p: [B, V] or [B, n, V]. token: [B, n]. limits: [B, 3].
        """
        order = descending(p)  # as p
        places = torch.zeros_like(order).scatter(-1, order.long(), self.token.expand_as(order))
        place = of_each(places, token[..., None]) + self.offset  # [B, n, 2 ranks + 1]
        code = of_each(order, place.clamp(min=0, max=p.shape[-1] - 1))
        ranks, gap, distance = limits[:, :, None, None].unbind(1)  # [B, 1, 1] each
        mine, mass = of_each(p, token[..., None]), of_each(p, code)
        apart = (self.codes[code] - self.codes[token][:, :, None]).square().sum(-1)
        close = (self.offset.abs() <= ranks) & ((mass - mine).abs() < gap) & (apart < distance)
        there = (place >= 0) & (place < p.shape[-1]) & (torch.minimum(mine, mass) > 0)
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


# ------------------------------------------------------------------------------------------ accept


@dataclass
class Bounds:
    """How far acceptance is relaxed, one value per image; k = 0, weight = 1 and no clusters are exact."""

    k: Tensor  # [B] int32, neighbours that may lend their mass
    delta: Tensor  # [B] float32, additive bound (0 under other rules)
    factor: Tensor  # [B] float32, lambda - 1 (0 under other rules)
    weight: Tensor  # [B, D] float32, w at each depth (1 under other rules)
    # [B, 3] float32, what keeps clusters small (0 under other rules); None where no image has any
    limits: Tensor | None = None
    tv: Tensor | None = (
        None  # [B] float32, total variation of a token (0 under other rules); None as above
    )
    budget: Tensor | None = None  # [B] float32, what is left of it for the tokens to come

    @classmethod
    def of(
        cls, relaxations: Sequence[Relaxation], depth: int, device: torch.device | None = None
    ) -> Bounds:
        """One of each image, for trees so deep."""

        def each(values: Iterable[Any], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        return cls(
            each((r.k for r in relaxations), torch.int32),
            each(r.delta for r in relaxations),
            each(r.factor for r in relaxations),
            each(r.weights(depth) for r in relaxations),
            each(r.limits for r in relaxations),
            each(r.tv for r in relaxations),
            each(math.inf if r.budget is None else r.budget for r in relaxations),
        )

    def weight_at(self, depth: int | Tensor) -> Tensor:
        """[B, 1] of the drafts at this depth, or at each image's [B]."""
        if isinstance(depth, int):
            return self.weight[:, depth : depth + 1]
        return gather(self.weight, 1, depth[:, None])


@dataclass
class Verdict:
    """Where the walk down the tree stopped."""

    node: Tensor  # [B] int32, last accepted node
    # [B, V] float32, what the next token is drawn from if `node` has children (all were rejected)
    residual: Tensor
    # [B, D] bool, the draft at depth d+1 was accepted only thanks to relaxation; means nothing for
    # depths past `node`
    relaxed: Tensor
    # [B, D] float32, total variation spent at each depth, see `gain`; 0 where nothing was tried, of no meaning for
    # depths past that of `node`. None: it is not metered
    spent: Tensor | None = None


@dataclass
class Lenders:
    """The nearest codes of each of n tokens, and what they lend it."""

    neighbours: Tensor  # [B, n, K] int32, nearest first
    sums: Tensor  # [B, n, K] float32, their mass up to each
    inside: Tensor  # [B, n, K] bool, which of them lend

    @property
    def lent(self) -> Tensor:
        """[B, n] float32, the largest sum within the bound."""
        return (self.sums * self.inside).amax(-1)


@dataclass
class Blend:
    """How much of the drafter's distribution the tokens of n places take on."""

    share: Tensor  # [B, n] h
    spent: Tensor  # [B, n] the total variation that it costs

    def raised(self, mass: Tensor, drawn: Tensor) -> Tensor:
        """What first children are accepted with, from their own mass and the drafter's; all [B, n]."""
        return mass + self.share * (drawn - mass).clamp(min=0)

    def at(self, place: Tensor) -> Blend:
        """Of one place an image [B]."""
        return Blend(*(gather(x, 1, place[:, None]) for x in (self.share, self.spent)))


@dataclass
class Trial:
    """One child of a node, when it is its turn to be tried."""

    exists: Tensor  # [B] bool, False where there is none, or it was not really drawn
    prob: Tensor  # [B, 1] its probability
    drawn: Tensor | None  # [B, 1] the drafter's; None: it was not drawn
    mass: Tensor  # [B, 1] what it is accepted with, relaxation included
    cost: Tensor | None  # [B, 1] see `gain`, without what a blend costs; None: it is not metered
    rest: Tensor  # [B, V] what is left of p once it is refused
    others: Tensor | None  # [B, V] the drafter's probabilities without it


class Acceptance(nn.Module):
    """The acceptance rules for trees of one kind."""

    def __init__(
        self,
        tree: Tree,
        neighbours: Tensor | None = None,
        residual: Residual = "sound",
        annealed: bool = False,
        walk: Walk | None = None,
        clusters: Clusters | None = None,
        metered: bool = False,
        blended: bool = False,
    ) -> None:
        """
        Args:
            tree: at least one draft.
            neighbours: [V, K] int32, other codes by rising distance; None leaves lent mass out.
            residual: what a rejection leaves where neighbours lent mass. "sound": of a static tree
                [p - q]+, of a dynamic one p without x and the neighbours that lent. "official": as
                published, the first k + 1 neighbours are zeroed in q, or p for a dynamic tree.
            annealed: whether weights other than 1 are ever given.
            walk: the device's own form of `sampled`, for what it serves.
            clusters: None leaves them out.
            metered: whether the verdict says what relaxation cost; it means nothing under the official residual.
            blended: whether total variations other than 0 are ever given.
        """
        super().__init__()
        self.residual, self.annealed, self.clusters = residual, annealed, clusters
        self.metered, self.blended = metered or blended, blended  # a budget is metered
        served = clusters is None and (residual == "sound" or neighbours is None)
        self.walk = walk if served else None
        # Most children of a node at each depth: no walk tries more there
        self.widest = tree.widest
        # Of a window: [W + 1] nodes, the root and the first children
        self.spine = constant(tree.spine) if isinstance(tree, Window) else None
        # The deepest node wins; at equal depth the lower number does.
        self.priority = constant(tree.size - 1 - arange32(tree.size))  # [M]
        self.depth = constant(arange32(tree.depth))  # [D]
        self.neighbours = None if neighbours is None else constant(neighbours)
        kept = 0 if neighbours is None else neighbours.shape[1]
        self.nearness = constant(arange32(kept))  # [K]

    @property
    def width(self) -> int:
        """Numbers that are gathered for each draft that is tried."""
        neighbours = 0 if self.neighbours is None else self.neighbours.shape[1]
        return max(1, neighbours, self.clusters.width if self.clusters is not None else 0)

    # -- one draft

    def blend(self, p: Tensor, q: Tensor | None, bounds: Bounds) -> Blend | None:
        """Of n places in a row that are all tried if the last one is; p and q [B, n, V]."""
        if not self.blended or q is None:
            return None
        assert bounds.tv is not None and bounds.budget is not None
        distance = (p - q).clamp(min=0).sum(-1)  # [B, n]
        most = torch.minimum(distance, bounds.tv[:, None])
        before = most.cumsum(1) - most  # as long as the budget lasts; after that it is no less
        left = (bounds.budget[:, None] - before).clamp(min=0)
        spent = torch.minimum(most, left)
        return Blend(spent / distance.clamp(min=TINY), spent)

    def lenders(self, p: Tensor, token: Tensor, prob: Tensor, bounds: Bounds) -> Lenders | None:
        """Who lends to each token, within the bound; None without a table.

        Args:
            p: [B, V] probabilities, or [B, n, V] with one distribution per token.
            token: [B, n].
            prob: [B, n], p(token).
        """
        if self.neighbours is None:
            return None
        neighbours = self.neighbours[token]  # [B, n, K]
        source = p if p.dim() == 3 else p[:, None].expand(-1, token.shape[1], -1)
        sums = gather(source, -1, neighbours).cumsum(-1)
        bound = bounds.delta[:, None] + bounds.factor[:, None] * prob
        inside = (sums <= bound[..., None]) & (self.nearness < bounds.k[:, None, None])
        return Lenders(neighbours, sums, inside)

    def raised(
        self,
        p: Tensor,
        q: Tensor | None,
        token: Tensor,
        prob: Tensor,
        weight: Tensor,
        lenders: Lenders | None,
        bounds: Bounds,
    ) -> Tensor:
        """Mass that tokens are accepted with.

        Args:
            p, q: [B, V] probabilities, or [B, n, V] with one distribution per token; no q: nothing was drawn.
            token: [B, n]. prob: [B, n], p(token). weight: [B, n] of their depth.
        """
        mass = prob
        if self.clusters is not None:
            assert bounds.limits is not None
            mass = self.clusters(p, q, token, bounds.limits)
        mass = mass * weight if self.annealed else mass
        return mass if lenders is None else mass + lenders.lent

    def kept(self, p: Tensor, lenders: Lenders, bounds: Bounds) -> Tensor:
        """Which entries of p stay when its token, one an image, is refused: [B, V] bool.

        "sound" strikes the neighbours that lent mass; "official" the first k + 1, if the nearest lent any.
        Where the bound itself is zero nothing is struck, so that it is exact under this residual too.
        """
        neighbours, inside = lenders.neighbours[:, 0], lenders.inside[:, 0]  # [B, K]
        if self.residual == "official":
            active = (bounds.k > 0) & (bounds.delta + bounds.factor > 0)
            inside = (self.nearness <= bounds.k[:, None]) & inside[:, :1] & active[:, None]
        return torch.ones_like(p, dtype=torch.bool).scatter(1, neighbours.long(), ~inside)

    def rest(
        self,
        p: Tensor,
        q: Tensor | None,
        token: Tensor,
        prob: Tensor,
        weight: Tensor,
        lenders: Lenders | None,
        bounds: Bounds,
        whole: Tensor,
    ) -> Tensor:
        """What is left of p [B, V] once token [B, 1] was refused.

        Where nothing is left, by rounding or because the official residual strikes it all, it is `whole`, p
        at the node before any refusal.
        """
        if q is None:
            left = p.scatter(1, token.long(), 0.0)
            if lenders is not None:
                left = left * self.kept(p, lenders, bounds)
            if self.annealed:
                left = left.scatter(1, token.long(), prob * (1 - weight).clamp(min=0))
        else:
            taken = q
            if lenders is not None and self.residual == "official":
                taken = q * self.kept(p, lenders, bounds)
            left = (p - taken).clamp(min=0)
            if self.annealed:
                left = torch.maximum(left, p * (1 - weight).clamp(min=0))
        total = left.sum(-1, keepdim=True)
        return torch.where(total > 0, left / total, whole)

    # -- a node and its children

    def trial(
        self,
        p: Tensor,  # [B, V] what the refused siblings before it left of the target's probabilities
        q: Tensor | None,  # [B, V] the drafter's without those siblings; None: nothing was drawn
        token: Tensor,  # [B, 1] the child's
        exists: Tensor,  # [B] bool
        whole: Tensor,  # [B, V] p at the node before any refusal
        bounds: Bounds,
        depth: int | Tensor,
        blend: Blend | None = None,
    ) -> Trial:
        """One child of a node, `depth` drafts below the root, that all siblings before it left to be tried.

        Args:
            blend: of the node, for its first child.
        """
        prob, weight = gather(p, 1, token), bounds.weight_at(depth)  # [B, 1]
        drawn = None if q is None else gather(q, 1, token)  # [B, 1]
        if drawn is not None:
            # A token without drafter mass was not really drawn (the draws ran out) and is skipped.
            exists = exists & (drawn[:, 0] > 0)
        lenders = self.lenders(p, token, prob, bounds)
        mass = self.raised(p, q, token, prob, weight, lenders, bounds)
        rest = self.rest(p, q, token, prob, weight, lenders, bounds, whole)
        cost = gain(mass, prob, drawn) if self.metered else None
        if blend is not None and drawn is not None:
            mass = blend.raised(mass, drawn)
        others = None if q is None else without(q, token)
        return Trial(exists, prob, drawn, mass, cost, rest, others)

    def siblings(
        self,
        p: Tensor,  # [B, V] the target's probabilities at a node
        q: Tensor | None,  # [B, V] the drafter's; None: the children were not drawn
        tokens: Tensor,  # [B, c] the children's tokens in the order they are tried
        exists: Tensor,  # [B, c] bool
        uniform: Tensor,  # [B, c]
        bounds: Bounds,
        depth: int | Tensor,  # of the node, or of each image's [B]
        blend: Blend | None = None,  # of the node
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Try the children of one node, `depth` drafts below the root, one after the other.

        Returns which was accepted [B, c] bool (at most one), what is left of p if none was [B, V], whether the
        accepted one needed the relaxation [B] bool, and the total variation spent on those tried [B].
        """
        whole, waiting = p, torch.ones_like(exists[:, 0])
        relaxed = torch.zeros_like(waiting)
        spent = torch.zeros_like(p[:, 0]) if blend is None else blend.spent[:, 0] * exists[:, 0]
        accepted = []
        for child in range(tokens.shape[1]):
            token, bar = tokens[:, child : child + 1], uniform[:, child : child + 1]
            first = blend if child == 0 else None
            trial = self.trial(p, q, token, exists[:, child], whole, bounds, depth, first)
            if trial.drawn is not None:
                bar = bar * trial.drawn
            tried = trial.exists & waiting
            # Strictly below: a token of probability 0 is never accepted, whatever u.
            passed = tried & (bar < trial.mass)[:, 0]
            relaxed = relaxed | (passed & ~(bar < trial.prob)[:, 0])
            if trial.cost is not None:
                spent = spent + trial.cost[:, 0] * tried
            p, q = torch.where((tried & ~passed)[:, None], trial.rest, p), trial.others
            waiting = waiting & ~passed
            accepted.append(passed)
        return torch.stack(accepted, 1), p, relaxed, spent if self.metered else None

    def expectation(
        self,
        p: Tensor,  # [B, V] the target's probabilities at a node
        q: Tensor | None,  # [B, V] the drafter's; None: the children were not drawn
        tokens: Tensor,  # [B, c] the children's tokens in the order they are tried
        exists: Tensor,  # [B, c] bool
        bounds: Bounds,
        depth: int,
    ) -> Tensor:
        """`siblings` averaged over its uniforms: probabilities of the token after the node [B, V]."""
        whole, result = p, torch.zeros_like(p)
        left = torch.ones_like(p[:, :1])  # [B, 1] chance that every child so far was refused
        blend = self.blend(p[:, None], None if q is None else q[:, None], bounds)
        for child in range(tokens.shape[1]):
            token = tokens[:, child : child + 1]
            first = blend if child == 0 else None
            trial = self.trial(p, q, token, exists[:, child], whole, bounds, depth, first)
            mass = trial.mass if trial.drawn is None else trial.mass / trial.drawn
            tried = trial.exists[:, None]
            chance = mass.clamp(max=1).where(tried, 0.0)  # [B, 1]
            result = result.scatter_add(1, token.long(), left * chance)
            left = left * (1 - chance)
            p, q = torch.where(tried, trial.rest, p), trial.others
        return result + left * p

    # -- a tree

    def sampled(
        self,
        p: Tensor,  # [B, I, V] the target's probabilities at nodes with children
        q: Tensor | None,  # [B, I, V] the drafter's; None: the drafts were not drawn
        tokens: Tensor,  # [B, M]
        tables: TreeTables,
        uniform: Tensor,  # [B, D, C]
        bounds: Bounds,
    ) -> Verdict:
        """Walk from the root, one level at a time, to the last accepted node."""
        if self.walk is not None and q is not None:
            tried = (p, q, tokens, tables.child, tables.row, uniform, self.neighbours)
            each = (bounds.k, bounds.delta, bounds.factor, bounds.weight)
            blended = (bounds.tv, bounds.budget) if self.blended else (None, None)
            return Verdict(*self.walk(*tried, *each, *blended))
        if self.spine is not None and q is not None:
            return self.along_spine(self.spine, p, q, tokens, tables, uniform, bounds)
        return self.by_level(p, q, tokens, tables, uniform, bounds)

    def along_spine(
        self,
        spine: Tensor,  # [W + 1]
        p: Tensor,
        q: Tensor,
        tokens: Tensor,
        tables: TreeTables,
        uniform: Tensor,
        bounds: Bounds,
    ) -> Verdict:
        """`by_level` where first children alone have children: those are all tried at once.

        Only where the first of them is refused are its siblings tried as well.
        """
        drafts = tokens.index_select(1, spine[1:])  # [B, W]
        prob, drawn = (gather(x, 2, drafts[..., None])[..., 0] for x in (p, q))
        lenders = self.lenders(p, drafts, prob, bounds)
        own = self.raised(p, q, drafts, prob, bounds.weight, lenders, bounds)
        blend = self.blend(p, q, bounds)
        mass = own if blend is None else blend.raised(own, drawn)
        bar = uniform[..., 0] * drawn
        passed = (drawn > 0) & (bar < mass)
        taken = ((~passed).cumsum(1) == 0).sum(1, dtype=torch.int32)  # [B]
        stop = taken.clamp(max=drafts.shape[1] - 1)
        node = spine[taken]
        children = rows_at(tables.child, node)  # [B, C]
        chosen, rest, helped, paid = self.siblings(
            rows_at(p, stop),
            rows_at(q, stop),
            gather(tokens, 1, children),
            children > 0,
            rows_at(uniform, stop),
            bounds,
            stop,
            None if blend is None else blend.at(stop),
        )
        node = torch.where(chosen.any(1), (children * chosen).sum(1, dtype=torch.int32), node)
        level = tables.depth.index_select(1, spine[1:])  # [B, W] 1 .. W
        here = level > taken[:, None]
        relaxed = torch.where(here, helped[:, None], ~(bar < prob))
        if paid is None:
            return Verdict(node, rest, relaxed)
        spent = gain(own, prob, drawn)
        spent = spent if blend is None else spent + blend.spent
        spent = torch.where(here, paid[:, None], spent) * (level <= taken[:, None] + 1)
        return Verdict(node, rest, relaxed, spent)

    def by_level(
        self,
        p: Tensor,
        q: Tensor | None,
        tokens: Tensor,
        tables: TreeTables,
        uniform: Tensor,
        bounds: Bounds,
    ) -> Verdict:
        """`sampled` in torch, whatever the tree."""
        node = torch.zeros_like(tokens[:, 0])
        residual = p[:, 0]
        walking = torch.ones_like(node, dtype=torch.bool)
        relaxed, spent, left = [], [], bounds
        for depth, width in enumerate(self.widest):
            children = rows_at(tables.child, node)[:, :width]  # [B, c]
            walking = walking & (children[:, 0] > 0)
            row = gather(tables.row, 1, node[:, None])[:, 0]
            here, drawn = rows_at(p, row), None if q is None else rows_at(q, row)  # [B, V]
            blend = self.blend(here[:, None], None if drawn is None else drawn[:, None], left)
            passed, rest, helped, paid = self.siblings(
                here,
                drawn,
                gather(tokens, 1, children),
                (children > 0) & walking[:, None],
                uniform[:, depth, :width],
                bounds,
                depth,
                blend,
            )
            residual = torch.where(walking[:, None], rest, residual)
            walking = walking & passed.any(1)
            node = torch.where(walking, (children * passed).sum(1, dtype=torch.int32), node)
            relaxed.append(helped)
            spent += [] if paid is None else [paid]
            if paid is not None and left.budget is not None:
                left = replace(left, budget=left.budget - paid)
        cost = torch.stack(spent, 1) if spent else None
        return Verdict(node, residual, torch.stack(relaxed, 1), cost)

    def greedy(self, p: Tensor, tokens: Tensor, tables: TreeTables, bounds: Bounds) -> Verdict:
        """The longest path of drafts that each win the argmax, with what relaxation adds to them.

        Args:
            p: [B, I, V] the target's unfiltered probabilities; tokens: [B, M].
        """
        drafts = tokens[:, 1:]  # [B, M - 1]
        row = gather(tables.row, 1, tables.parent[:, 1:])  # [B, M - 1]
        prob = gather(p.flatten(1), 1, row * p.shape[-1] + drafts)  # [B, M - 1]
        top, best = gather(p.amax(-1), 1, row), gather(topk_tokens(p, 1)[..., 0], 1, row)
        wins = drafts == best
        raised = prob
        if self.neighbours is not None or self.annealed or self.clusters is not None:
            weight, probs = gather(bounds.weight, 1, tables.depth[:, 1:] - 1), gather_rows(p, row)
            lenders = self.lenders(probs, drafts, prob, bounds)
            raised = self.raised(probs, None, drafts, prob, weight, lenders, bounds)
        helped = (raised > top) | ((raised == top) & (drafts < best))
        node = self.deepest(~(wins | helped), tables)
        on_path = rows_at(tables.path, node)[:, 1:]  # [B, D]
        relaxed = gather(helped & ~wins, 1, (on_path - 1).clamp(min=0))  # past `node`: not counted
        if not self.metered:
            return Verdict(node, p[:, 0], relaxed)
        # Nothing is drawn: where another token than the argmax is taken, all mass has moved
        reached = gather(tables.depth, 1, node[:, None])  # [B, 1]
        spent = (relaxed & (self.depth < reached)).to(p.dtype)
        return Verdict(node, p[:, 0], relaxed, spent)

    def deepest(self, failed: Tensor, tables: TreeTables) -> Tensor:
        """The last node [B] int32 of the longest path without a draft that failed [B, M - 1]."""
        reached = ~(failed[:, None] & tables.ancestors[:, :, 1:]).any(-1)  # [B, M]
        priority = tables.depth * reached.shape[1] + self.priority
        return (reached * priority).argmax(-1).int()

    def repeated(self, drawn: Tensor, tokens: Tensor, tables: TreeTables) -> Tensor:
        """Where the drafts stop being what their places draw anyway: [B] int32.

        Args:
            drawn: [B, I], a draw from each distribution. tokens: [B, M].
        """
        row = gather(tables.row, 1, tables.parent[:, 1:])
        return self.deepest(tokens[:, 1:] != gather(drawn, 1, row), tables)


def gain(mass: Tensor, prob: Tensor, drawn: Tensor | None) -> Tensor:
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


def without(q: Tensor, token: Tensor) -> Tensor:
    """The drafter's probabilities [B, V] given that it is not token [B, 1], which was tried."""
    q = q.scatter(1, token.long(), 0.0)
    return q / q.sum(-1, keepdim=True).clamp(min=1e-30)
