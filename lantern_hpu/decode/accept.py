"""Which drafts of a verified tree are accepted: exact speculative sampling and its relaxations.

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

Exact or blended drafts of a static tree may be verified together (`Traversal`): more of them are accepted, and the
distribution is the same.

Relaxed by clusters (GSD, arXiv 2508.07747): x is accepted with the chance of its cluster, min(1, p(G) / q(G)).

`tests/reference.py` is the same in plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lantern_hpu.decode.common import Drafts, TreeTables, rows_at
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import Bounds
from lantern_hpu.errors import Arg, OptionError
from lantern_hpu.methods.relaxation import Residual
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.kernels import Traverse, Walk
from lantern_hpu.ops.sampling import gather, gather_rows, topk_tokens
from lantern_hpu.tree import DraftTree, Window

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


# ------------------------------------------------------------------------------------------- rules


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
            raise OptionError("no clusters with this codebook", why, Arg("relax", "lambda-5"))
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


def postorder(tree: DraftTree) -> list[int]:
    """[M] nodes, each after all that is behind it, first children and their nodes first."""
    ranked = [(*path, tree.size) for path in tree.paths]
    return sorted(range(tree.size), key=ranked.__getitem__)


class TraversalLevel(nn.Module):
    """The n nodes of a depth, w of them with up to c children, as `Traversal` comes to them."""

    def __init__(self, tree: DraftTree, depth: int) -> None:
        super().__init__()
        nodes, inner, most = tree.levels[depth], tree.frontiers[depth], tree.widest[depth]
        table = [[*tree.children[n], *[0] * (most - len(tree.children[n]))] for n in inner]
        self.child = constant(table)  # [w, c], 0 where there is none
        self.row = constant([tree.expanded.index(n) for n in inner])  # [w] of p and q
        self.inner = constant([nodes.index(n) for n in inner])  # [w] which of the n they are
        below = [i for i, child in enumerate(chain.from_iterable(table)) if child]
        self.below = constant(below)  # [nodes of the next depth] which of the w * c
        found = {n: len(nodes) + i for i, n in enumerate(inner)}
        self.found = constant([found.get(n, i) for i, n in enumerate(nodes)])  # [n] of the n + w

    def next_level(self, x: Tensor) -> Tensor:
        """What the w nodes have for each child [B, w, c]: of the nodes of the next depth [B, m]."""
        return x.flatten(1).index_select(1, self.below)

    def chances(self, weight: Tensor, left: Tensor) -> Tensor:
        """Of all n nodes [B, n], whose weights are [B, n]; those with children have [B, w] left of theirs."""
        return torch.cat([weight, left], 1).index_select(1, self.found)


class Traversal(nn.Module):
    """Drafts of a static tree verified together: exactly, or by blending.

    Block verification (Sun et al., arXiv 2403.10444), of trees traversal verification (arXiv 2505.12398). The root has
    the weight 1, and child x of a node of weight c the weight min(1, c p(x) / q(x)). Leaves are kept with the chance of
    their weight. The deepest are asked first, and first children before their siblings; where nothing behind a child
    is kept, with r = [c p - q]+ and its sum s, its parent goes on with p = r / s, c = s / (s + 1 - c), and q without x.
    A node is kept with the chance c that is left once nothing behind it was, and the next token drawn from the p that
    is left there. What a node's chance is depends on no uniform: so all are computed, a depth at a time.
    """

    levels: Sequence[TraversalLevel]  # an nn.ModuleList

    def __init__(self, tree: DraftTree, walk: Traverse | None = None) -> None:
        """`walk` is the device's own form."""
        super().__init__()
        self.walk = walk
        self.levels = nn.ModuleList(TraversalLevel(tree, depth) for depth in range(tree.depth))  # type: ignore[assignment]
        order = postorder(tree)
        self.order = constant(order)  # [M]
        self.priority = constant([tree.size - order.index(n) for n in range(tree.size)])
        self.depth = constant(arange32(tree.depth))  # [D]

    def forward(
        self,
        p: Tensor,  # [B, I, V]
        q: Tensor,  # [B, I, V]
        drafts: Drafts,
        uniform: Tensor,  # [B, M - 1], one a draft
        tv: Tensor | None,  # [B]; None: no image blends
        budget: Tensor | None,  # [B]
    ) -> Verdict:
        tables, tokens = drafts.tables, drafts.tokens
        if self.walk is not None:
            tree = (tokens, tables.child, tables.row, self.order, len(self.levels))
            return Verdict(*self.walk(p, q, *tree, uniform, tv, budget))
        weight = torch.ones_like(p[:, :1, 0])  # [B, n] of the nodes of a depth
        left = None if budget is None else budget[:, None]  # [B, n]
        chances: list[Tensor] = []
        rests: list[Tensor] = []
        blends: list[Blend] = []
        for level in self.levels:
            here, drawn = p.index_select(1, level.row), q.index_select(1, level.row)  # [B, w, V]
            inner, target = weight.index_select(1, level.inner), here
            if tv is not None and left is not None:
                left = left.index_select(1, level.inner)  # [B, w]
                distance = (here - drawn).clamp(min=0).sum(-1)
                most = torch.minimum(distance, tv[:, None])
                blends.append(Blend.of(distance, torch.minimum(most, left.clamp(min=0))))
                target = here + blends[-1].share[..., None] * (drawn - here)
                left = (left - blends[-1].spent)[..., None].expand(-1, -1, level.child.shape[1])
                left = level.next_level(left)
            children, rest, chance = self.siblings(level, target, drawn, inner, here, tokens)
            chances.append(level.chances(weight, chance))
            rests.append(rest)
            weight = level.next_level(children)
        chance = torch.cat([*chances, weight], 1)  # [B, M]
        kept = torch.cat([torch.ones_like(chance[:, :1]).bool(), uniform < chance[:, 1:]], 1)
        node_at = (
            (kept * self.priority).argmax(-1).int()
        )  # [B] of all that are kept the first asked
        residual = rows_at(torch.cat(rests, 1), gather(tables.row, 1, node_at[:, None])[:, 0])
        relaxed, spent = self.costs(p, q, drafts, uniform, chance, node_at, blends)
        return Verdict(node_at, residual, relaxed, spent)

    def siblings(
        self,
        level: TraversalLevel,
        p: Tensor,  # [B, w, V], blended
        q: Tensor,  # [B, w, V]
        weight: Tensor,  # [B, w]
        whole: Tensor,  # [B, w, V] p as it was
        tokens: Tensor,  # [B, M]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The children of w nodes in turn.

        Returns the children's weights [B, w, c]; and where nothing behind them was kept, what is left of the nodes' p
        [B, w, V] and of their weights [B, w], with which they are kept.
        """
        weights = []
        for rank in range(level.child.shape[1]):
            child = level.child[:, rank]  # [w]
            token = tokens.index_select(1, child)[..., None]  # [B, w, 1]
            own, drawn = gather(p, 2, token)[..., 0], gather(q, 2, token)[..., 0]
            exists = (child > 0) & (drawn > 0)  # else the draws ran out before it
            weights.append((weight * own / drawn.clamp(min=TINY)).clamp(max=1) * exists)
            left = (weight[..., None] * p - q).clamp(min=0)
            mass = left.sum(-1)  # [B, w]
            missing = mass + (1 - weight)
            left = torch.where((mass > 0)[..., None], left / mass[..., None], whole)
            p = torch.where(exists[..., None], left, p)
            chance = (mass / missing).masked_fill(missing <= 0, 1.0)
            weight = torch.where(exists, chance, weight)
            q = remove_token(q, token)
        return torch.stack(weights, 2), p, weight

    def costs(
        self,
        p: Tensor,
        q: Tensor,
        drafts: Drafts,
        uniform: Tensor,
        chance: Tensor,  # [B, M]
        node: Tensor,  # [B] where the walk stops
        blends: Sequence[Blend],  # [B, w] of each depth; none where no image blends
    ) -> tuple[Tensor, Tensor]:
        """Which drafts of the path were kept thanks to relaxation, and what its nodes spent: both [B, D].

        A first child is kept with the mass min(p', q), of which min(p, q) is not due to blending.
        """
        tables, path = drafts.tables, rows_at(drafts.tables.path, node)  # [B, D + 1]
        parent, child = path[:, :-1], path[:, 1:]
        if not blends:
            zero = torch.zeros_like(uniform[:, :1]).expand_as(child)
            return zero > 0, zero
        row, first = gather(tables.row, 1, parent), gather(tables.child[..., 0], 1, parent)
        share, spent = (gather(torch.cat(x, 1), 1, row) for x in zip(*blends, strict=True))
        depth = gather(tables.depth, 1, node[:, None])  # [B, 1]
        spent = spent * ((first > 0) & (self.depth <= depth))
        at = row * p.shape[-1] + gather(drafts.tokens, 1, child)
        own, drawn = gather(p.flatten(1), 1, at), gather(q.flatten(1), 1, at)
        raised = torch.minimum(own + share * (drawn - own), drawn)
        # The last draft of the path was kept as its uniform is less than its chance; the others whatever theirs is
        last = gather(chance, 1, child).masked_fill(self.depth != depth - 1, 1.0)
        bar = gather(uniform, 1, (child - 1).clamp(min=0)) / last
        relaxed = (first == child) & (spent > 0) & (self.depth < depth)
        return relaxed & (bar >= own / raised.clamp(min=TINY)), spent


# ------------------------------------------------------------------------------------------ accept


class Acceptance(nn.Module):
    """The acceptance rules for trees of one kind."""

    def __init__(
        self,
        spec: Spec,
        neighbours: Tensor | None = None,
        codes: Tensor | None = None,
        walk: Walk | None = None,
        traverse: Traverse | None = None,
    ) -> None:
        """
        Args:
            spec: whose tree has at least one draft.
            neighbours: [V, K] int32, other codes by rising distance; None leaves their mass out.
            codes: [V, H], the tokens' embedding; None leaves clusters out.
            walk, traverse: the device's own forms of `walk_sampled` and `Traversal`, for what they serve.
        """
        super().__init__()
        tree, sound = spec.tree, spec.residual == "sound" or neighbours is None
        self.spec = spec
        # A budget is metered. Under the official residual the meter means nothing
        self.metered = spec.metered or spec.blended
        self.neighbours = None if neighbours is None else Neighbours(neighbours, spec.residual)
        self.clusters = None if codes is None else Clusters(codes, spec.ranks)
        self.walk = walk if sound and codes is None else None
        self.traversal: Traversal | None = None
        if spec.together:
            assert isinstance(tree, DraftTree)
            self.traversal = Traversal(tree, traverse)
        # Most children of a node at each depth: no walk tries more there
        self.widest = tree.widest
        # Of a window: [W + 1] nodes, the root and the first children
        self.spine = constant(tree.spine) if isinstance(tree, Window) else None
        # The deepest node wins; at equal depth the lower number does.
        self.priority = constant(tree.size - 1 - arange32(tree.size))  # [M]
        self.depth = constant(arange32(tree.depth))  # [D]

    # -- one draft

    def blend(self, p: Tensor, q: Tensor | None, bounds: Bounds) -> Blend | None:
        """Of n places in a row that are all tried if the last one is; p and q [B, n, V]."""
        if not self.spec.blended or q is None:
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
        mass = mass * node.weight if self.spec.annealed else mass
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
            if self.spec.annealed:
                left = left.scatter(1, token.long(), prob * (1 - node.weight).clamp(min=0))
        else:
            left = (p - (q if keep is None else q * keep)).clamp(min=0)
            if self.spec.annealed:
                left = torch.maximum(left, p * (1 - node.weight).clamp(min=0))
            q = remove_token(q, token)
        total, first = left.sum(-1, keepdim=True), p if node.p_at_node is None else node.p_at_node
        return replace(node, p=torch.where(total > 0, left / total, first), q=q, p_at_node=first)

    # -- a node and its children

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

    # -- a tree

    def forward(
        self, p: Tensor, drafts: Drafts, uniform: Tensor, bounds: Bounds, greedy: Tensor
    ) -> Verdict:
        """The sampled walk, the greedy one, or each for its images.

        Args:
            p: [B, I, V] the target's probabilities at nodes with children.
            uniform: [B, D, C]; of drafts that are verified together [B, M - 1].
            greedy: [B] bool, whose walk it is.
        """
        if not self.spec.use_sampled:
            return self.walk_greedy(p, drafts, bounds)
        sampled = self.walk_sampled(p, drafts, uniform, bounds)
        if not self.spec.use_greedy:
            return sampled
        best = self.walk_greedy(p, drafts, bounds)
        node = torch.where(greedy, best.node, sampled.node)
        relaxed = torch.where(greedy[:, None], best.relaxed, sampled.relaxed)
        spent = sampled.spent
        if spent is not None and best.spent is not None:
            spent = torch.where(greedy[:, None], best.spent, spent)
        return Verdict(node, sampled.residual, relaxed, spent)

    def walk_sampled(self, p: Tensor, drafts: Drafts, uniform: Tensor, bounds: Bounds) -> Verdict:
        """Walk from the root, one level at a time, to the last accepted node, or find it among all."""
        if self.traversal is not None and drafts.q is not None:
            tv, budget = (bounds.tv, bounds.budget) if self.spec.blended else (None, None)
            return self.traversal(p, drafts.q, drafts, uniform, tv, budget)
        if self.walk is not None and drafts.q is not None:
            tables = drafts.tables
            table = None if self.neighbours is None else self.neighbours.table
            tried = (p, drafts.q, drafts.tokens, tables.child, tables.row, uniform, table)
            each = (bounds.k, bounds.delta, bounds.factor, bounds.weight)
            blended = (bounds.tv, bounds.budget) if self.spec.blended else (None, None)
            return Verdict(*self.walk(*tried, *each, *blended))
        if self.spine is not None and drafts.q is not None:
            return self.walk_spine(self.spine, p, drafts.q, drafts, uniform, bounds)
        return self.walk_levels(p, drafts, uniform, bounds)

    def walk_spine(
        self, spine: Tensor, p: Tensor, q: Tensor, drafts: Drafts, uniform: Tensor, bounds: Bounds
    ) -> Verdict:
        """`walk_levels` where first children alone have children: those, a spine [W + 1], are all tried at once.

        Only where the first of them is refused are its siblings tried as well. q is [B, I, V], the drafter's.
        """
        tables, tokens = drafts.tables, drafts.tokens.index_select(1, spine[1:])  # [B, W]
        prob, drawn = (gather(x, 2, tokens[..., None])[..., 0] for x in (p, q))
        nodes = Node(p, q, bounds.weight, bounds)
        unblended, _ = self.accept_mass(nodes, tokens, prob)
        blend = self.blend(p, q, bounds)
        mass = unblended if blend is None else blend.accept_mass(unblended, drawn)
        bar = uniform[..., 0] * drawn
        passed = (drawn > 0) & (bar < mass)
        taken = ((~passed).cumsum(1) == 0).sum(1, dtype=torch.int32)  # [B]
        stop = taken.clamp(max=tokens.shape[1] - 1)
        node = spine[taken]
        children = rows_at(tables.child, node)  # [B, C]
        weight = gather(bounds.weight, 1, stop[:, None])
        chosen, rest, stop_relaxed, stop_spent = self.siblings(
            Node(rows_at(p, stop), rows_at(q, stop), weight, bounds),
            gather(drafts.tokens, 1, children),
            children > 0,
            rows_at(uniform, stop),
            None if blend is None else blend.at(stop),
        )
        node = torch.where(chosen.any(1), (children * chosen).sum(1, dtype=torch.int32), node)
        level = tables.depth.index_select(1, spine[1:])  # [B, W] 1 .. W
        here = level > taken[:, None]
        relaxed = torch.where(here, stop_relaxed[:, None], ~(bar < prob))
        if stop_spent is None:
            return Verdict(node, rest, relaxed)
        spent = tv_cost(unblended, prob, drawn)
        spent = spent if blend is None else spent + blend.spent
        spent = torch.where(here, stop_spent[:, None], spent) * (level <= taken[:, None] + 1)
        return Verdict(node, rest, relaxed, spent)

    def walk_levels(self, p: Tensor, drafts: Drafts, uniform: Tensor, bounds: Bounds) -> Verdict:
        """`walk_sampled` in torch, for any tree."""
        tables, tokens, q = drafts.tables, drafts.tokens, drafts.q
        node, residual = torch.zeros_like(tokens[:, 0]), p[:, 0]
        walking = torch.ones_like(node, dtype=torch.bool)
        relaxed, spent, left = [], [], bounds
        for depth, width in enumerate(self.widest):
            children = rows_at(tables.child, node)[:, :width]  # [B, c]
            walking = walking & (children[:, 0] > 0)
            row = gather(tables.row, 1, node[:, None])[:, 0]
            here, drawn = rows_at(p, row), None if q is None else rows_at(q, row)  # [B, V]
            passed, rest, level_relaxed, level_spent = self.siblings(
                Node(here, drawn, bounds.weight[:, depth : depth + 1], left),
                gather(tokens, 1, children),
                (children > 0) & walking[:, None],
                uniform[:, depth, :width],
                self.blend(here[:, None], None if drawn is None else drawn[:, None], left),
            )
            residual = torch.where(walking[:, None], rest, residual)
            walking = walking & passed.any(1)
            node = torch.where(walking, (children * passed).sum(1, dtype=torch.int32), node)
            relaxed.append(level_relaxed)
            if level_spent is not None:
                spent.append(level_spent)
                if left.budget is not None:
                    left = replace(left, budget=left.budget - level_spent)
        cost = torch.stack(spent, 1) if spent else None
        return Verdict(node, residual, torch.stack(relaxed, 1), cost)

    def walk_greedy(self, p: Tensor, drafts: Drafts, bounds: Bounds) -> Verdict:
        """The longest path of drafts that each win the argmax of p [B, I, V], or do with what relaxation adds to them.

        No filter was applied to p.
        """
        tables, tokens = drafts.tables, drafts.tokens[:, 1:]  # [B, M - 1]
        row = gather(tables.row, 1, tables.parent[:, 1:])  # [B, M - 1]
        prob = gather(p.flatten(1), 1, row * p.shape[-1] + tokens)  # [B, M - 1]
        top, best = gather(p.amax(-1), 1, row), gather(topk_tokens(p, 1)[..., 0], 1, row)
        wins, mass = tokens == best, prob
        if self.neighbours is not None or self.spec.annealed or self.clusters is not None:
            weight = gather(bounds.weight, 1, tables.depth[:, 1:] - 1)
            nodes = Node(gather_rows(p, row), None, weight, bounds)
            mass, _ = self.accept_mass(nodes, tokens, prob)
        wins_relaxed = (mass > top) | ((mass == top) & (tokens < best))
        node = self.deepest(~(wins | wins_relaxed), tables)
        on_path = rows_at(tables.path, node)[:, 1:]  # [B, D]
        relaxed = gather(
            wins_relaxed & ~wins, 1, (on_path - 1).clamp(min=0)
        )  # past `node`: not counted
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

    def match_draws(self, drawn: Tensor, drafts: Drafts) -> Tensor:
        """Where the drafts stop being what their places draw anyway, drawn [B, I]: [B] int32."""
        tables = drafts.tables
        row = gather(tables.row, 1, tables.parent[:, 1:])
        return self.deepest(drafts.tokens[:, 1:] != gather(drawn, 1, row), tables)


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
