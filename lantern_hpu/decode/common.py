"""What the step and the draftings share: trees as tensors, positions in the cache, and how tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lantern_hpu.core import Sampling
from lantern_hpu.decode.spec import Spec, capacity
from lantern_hpu.decode.state import DecodeState, Moves, PrefillInput
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.transformer import Rotary, Target
from lantern_hpu.ops.buffers import Choice, arange32, causal_mask, constant
from lantern_hpu.ops.kernels import Placed, place_tokens
from lantern_hpu.ops.sampling import RowEnds, SamplingParams, gather, gather_rows, topk_tokens
from lantern_hpu.tree import DraftTree, DynamicTree, Tree

# ------------------------------------------------------------------------------------------- trees


@dataclass
class TreeTables:
    """One tree an image: M nodes, at most D deep, at most C children of a node."""

    parent: Tensor  # [B, M] int32, the root is its own
    depth: Tensor  # [B, M] int32
    child: Tensor  # [B, M, C] int32 in sibling order, 0 where there is none
    path: Tensor  # [B, M, D + 1] int32, nodes from the root to each node, then the node itself repeated
    ancestors: Tensor  # [B, M, M] bool, whether the second node is the first or above it
    row: Tensor  # [B, M] int32, which distribution is a node's; means nothing at leaves


@dataclass
class Drafts:
    """The tree of each image, with its tokens."""

    tokens: Tensor  # [B, M] int32, the root's first
    # [B, I, V] float32, the probabilities that children were drawn with; None: they were not drawn
    q: Tensor | None
    tables: TreeTables
    uniform: Tensor | None = None  # [B, n] of the step's uniforms, those that `absorb` takes


def rows_at(table: Tensor, node: Tensor) -> Tensor:
    """Rows of a table [B, M, X] at node [B]: [B, X]."""
    return gather_rows(table, node[:, None])[:, 0]


class StaticTables(nn.Module):
    """The tables of a static tree, as constants on the device."""

    def __init__(self, tree: DraftTree) -> None:
        super().__init__()
        table = [list(c) + [0] * (tree.max_children - len(c)) for c in tree.children]
        expanded = {node: row for row, node in enumerate(tree.expanded)}
        rows = [expanded.get(node, 0) for node in range(tree.size)]
        self.parent = constant([tree.parent])  # [1, M]
        self.depth = constant([tree.depths])  # [1, M]
        self.child = constant([table], torch.int32)  # [1, M, C]
        self.path = constant([tree.path_table])  # [1, M, D + 1]
        self.ancestors = constant([tree.ancestors])  # [1, M, M]
        self.row = constant([rows])  # [1, M]

    def forward(self, images: int) -> TreeTables:
        tables: Iterable[Tensor]
        tables = (self.parent, self.depth, self.child, self.path, self.ancestors, self.row)
        if images > 1:
            tables = (table.expand(images, *table.shape[1:]) for table in tables)
        return TreeTables(*tables)


class JudgedNodes(nn.Module):
    """The nodes whose distributions a step computes: those with children; a chain's and a window's all.

    Of a dynamic tree all are, since which have children is not known.
    """

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        judged = tree.judged if isinstance(tree, DraftTree) else None
        self.whole = judged is not None and len(judged) == tree.size  # all nodes are judged
        order = range(tree.size) if judged is None else judged
        self.node = Choice(order)  # J
        ranks = {node: rank for rank, node in enumerate(order)}
        # [M] which of the judged nodes' distributions is a node's, where that is not its number
        moved = self.whole and list(order) != sorted(order)
        self.rank = constant([ranks[n] for n in range(tree.size)]) if moved else None
        self.inner = len(tree.expanded) if isinstance(tree, DraftTree) else tree.size  # I

    def forward(self, x: Tensor) -> Tensor:
        """Of all nodes [A, M, ...] those that are judged [A, J, ...]."""
        selected: Tensor = self.node(x)
        return selected

    def at(self, probs: Tensor, node: Tensor) -> Tensor:
        """A node's distribution [B, V] of those judged [B, J, V], where all are; node [B]."""
        return rows_at(probs, node if self.rank is None else self.rank[node])


class DynamicTables(nn.Module):
    """Keeps the most probable candidates and links them to trees.

    Candidates are numbered as they come: `top_k` children of the root, then for each expansion the children
    of its `top_k` nodes. A child never scores more than its parent and has a higher number; so with ties going
    to the lower number, a candidate that is kept has its parent kept.
    """

    def __init__(self, tree: DynamicTree) -> None:
        super().__init__()
        self.tree = tree
        k = tree.top_k
        count = tree.candidates
        first = torch.ones(k, dtype=torch.int32)
        deeper = arange32(tree.expansions).repeat_interleave(k * k) + 2
        earlier = torch.ones(count, count, dtype=torch.bool).tril(-1)
        self.earlier = constant(earlier)  # [n, n], the second comes before the first
        self.depth_of = constant(torch.cat([first, deeper]))  # [n]
        self.rank_of = constant(arange32(count) % k)  # [n] place among its siblings
        self.node = constant(arange32(tree.size))  # [M]
        self.order = constant(arange32(tree.depth + 1))  # [D + 1]

    def forward(self, scores: Tensor, parents: Tensor) -> tuple[Tensor, TreeTables]:
        """
        Args:
            scores: [B, n] float32, log-probability of the path to each candidate.
            parents: [B, n] int32, the parent's number plus 1; 0 is the root.

        Returns the candidates behind nodes 1 .. M-1 [B, M - 1] int32, and the trees.
        """
        chosen, number = self.keep(scores)
        zero = torch.zeros_like(chosen[:, :1])
        nodes = torch.cat([zero, number], 1)  # [B, n + 1] node of a candidate, by its number plus 1
        parent = torch.cat([zero, gather(nodes, 1, gather(parents, 1, chosen))], 1)
        depth = torch.cat([zero, self.depth_of[chosen]], 1)
        path = self.paths(parent, depth)
        ancestors = (path[:, :, None] == self.node[:, None]).any(-1)
        child = self.link(parent, self.rank_of[chosen])
        every = self.node.expand(len(scores), -1)
        return chosen, TreeTables(parent, depth, child, path, ancestors, every)

    def keep(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The kept candidates in their order [B, M - 1], and how many are kept up to each candidate [B, n]."""
        mine = scores[..., None]
        other = scores[:, None]
        before = (other > mine) | ((other == mine) & self.earlier)  # [B, n, n]
        kept = before.sum(-1) < self.tree.drafts  # [B, n]
        number = kept.cumsum(-1, dtype=torch.int32)
        wanted = self.node[1:].expand(len(scores), -1).contiguous()
        return torch.searchsorted(number, wanted, out_int32=True), number

    def paths(self, parent: Tensor, depth: Tensor) -> Tensor:
        """[B, M, D + 1]: climb from every node at once, then turn the ways round."""
        way = [self.node.expand_as(parent)]
        for _ in range(self.tree.depth):
            way.append(gather(parent, 1, way[-1]))
        up = torch.stack(way, -1)  # [B, M, D + 1], the node, its parent, ...
        return gather(up, 2, (depth[..., None] - self.order).clamp(min=0))

    def link(self, parent: Tensor, rank: Tensor) -> Tensor:
        """The children of each node [B, M, C] from parents [B, M] and the drafts' ranks [B, M - 1]."""
        k = self.tree.top_k
        place = parent[:, 1:] * k + rank
        empty = torch.zeros_like(parent)[..., None].expand(-1, -1, k).flatten(1)
        drafts = self.node[1:].expand_as(place)
        return empty.scatter(1, place.long(), drafts).unflatten(1, (-1, k))


# --------------------------------------------------------------------------------------- positions


class Positions(nn.Module):
    """Cache positions, rotary angles and masks, as constants on the device."""

    def __init__(
        self, config: TransformerConfig, spec: Spec, place: Callable[..., Placed] = place_tokens
    ) -> None:
        super().__init__()
        tree = spec.tree
        self.place_in_rows = place
        size = capacity(config, tree)
        self.images = spec.images
        self.guidance = spec.guidance
        self.prefix = config.prefix
        self.size = size
        self.nodes = tree.size
        self.depth = tree.depth
        width = max(config.prefix, tree.depth + 1)
        last = config.prefix + config.tokens + tree.depth
        self.rotary = Rotary(config, last + 1)
        self.positions = constant(arange32(size))  # [S]
        self.row_start = constant(arange32(spec.rows) * size)  # [R]
        self.causal = constant(causal_mask(width))
        self.arange = constant(arange32(max(width, tree.size, tree.max_children)))

    def per_row(self, x: Tensor) -> Tensor:
        """[B, ...] -> [R, ...]: an image's rows always hold the same tokens at the same positions."""
        return torch.cat([x, x]) if self.guidance else x

    def rows_of(self, slot: Tensor) -> Tensor:
        """The rows of slots [A]: [RA], those with the condition first."""
        return torch.cat([slot, slot + self.images]) if self.guidance else slot

    def rope(self, position: Tensor, state: DecodeState | PrefillInput) -> Tensor:
        """Cosines and sines at cache positions [R, T]: [R, T, 2, hd / 2]."""
        return self.rotary(position, state.pads).to(state.dtype)

    def prefix_rope(self, entry: PrefillInput, first: int, width: int) -> Tensor:
        """The same at positions of prefixes, from a first one on: [RA, T, 2, hd / 2]."""
        places = slice(first, first + width)
        if entry.axes is not None:
            return self.rotary.at(entry.axes[:, :, places]).to(entry.dtype)
        position = self.arange[places].expand(len(entry.pads), -1)
        return self.rope(position, entry)

    def place(
        self,
        start: Tensor,
        offset: Tensor,
        column: Tensor,
        table: Tensor,
        state: DecodeState,
        valid: Tensor | None,
    ) -> Placed:
        """Where T new tokens are behind `start` [B] committed positions; see `ops.kernels.place_tokens`.

        `offset` is [T] or [B, T], `table` [T, X] or [B, T, X].
        """
        images = len(start)
        rotary = self.rotary
        offset = offset if offset.dim() == 2 else offset.expand(images, -1)
        table = table if table.dim() == 3 else table.expand(images, -1, -1)
        pads = None if rotary.counts_pads else state.pads
        angles = rotary.table
        what = (start, offset, column, table, valid, pads, angles, self.positions, self.row_start)
        return self.place_in_rows(*what, state.dtype, rotary.axes, rotary.sections)

    def entry_index(self, rows: Tensor, width: int) -> Tensor:
        """Storage indices of the first `width` positions of some rows [RA]: [RA * width]."""
        return self.row_start[rows][:, None].add(self.arange[:width]).flatten()

    # -- the accepted path

    def moves(self, path: Tensor, before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """How the keys of an accepted path come to lie together, behind the committed ones.

        Args:
            path: [B, D + 1], its nodes from the root on, the last one repeated.
            before, after: [B] image tokens in the cache (t) before and after the step.

        Returns cache positions, where from and where to: [B, D] each, no goal twice. What does not belong to the path
        stays where it is, at positions that the next step does not write.
        """
        start, order = (self.prefix + before)[:, None], self.arange[: self.depth]  # [B, 1], [D]
        # [B] drafts that stay; of an image that is done fewer than were accepted
        kept = (after - before - 1).clamp(min=0)
        place = order - kept[:, None]  # [B, D] negative for those
        idle = self.idle(after, place.clamp(min=0))
        source = torch.where(place < 0, start + path[:, 1:], idle)
        return source, torch.where(place < 0, start + order + 1, idle)

    def idle(self, count: Tensor, place: Tensor) -> Tensor:
        """Cache positions that a step of images with `count` [B] tokens does not write: [B, D].

        They follow its nodes, and go on at the front of the row; `place` [B, D] or [D] says which of them.
        """
        position = (self.prefix + count + self.nodes)[:, None] + place
        return torch.where(position < self.size, position, position - self.size)

    def with_moves(self, index: Tensor, moves: Moves) -> tuple[Tensor, Tensor]:
        """Storage indices of a step's one write: of what moves and of its new nodes [R * M]; and where the former is.

        Returns [R * (D + M)] and [R * D].
        """
        start = self.row_start[:, None]
        rows = len(self.row_start)
        goal, source = start + self.per_row(moves.goal), start + self.per_row(moves.source)
        return torch.cat([goal, index.unflatten(0, (rows, -1))], 1).flatten(), source.flatten()


# ---------------------------------------------------------------------------------------- sampling


def sampling_params(
    sampling: Sequence[Sampling], vocabulary: int, device: torch.device | None = None
) -> SamplingParams:
    """Each image's parameters as tensors [B]; a filter that is off keeps everything."""

    def each(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype, device=device)

    return SamplingParams(
        each(s.cfg_scale for s in sampling),
        each(s.temperature or 1.0 for s in sampling),
        each((vocabulary if s.greedy else s.top_k or vocabulary for s in sampling), torch.int32),
        each(1.0 if s.greedy else s.top_p for s in sampling),
        each((s.greedy for s in sampling), torch.bool),
    )


def make_grammar(config: TransformerConfig) -> RowEnds | None:
    """What decides which tokens a place may hold; None where every place may hold all."""
    return RowEnds(config.grid[1], config.tokens, config.vocab_size) if config.row_ends else None


class Sampler(nn.Module):
    """Everything after the last hidden state, for the images of one spec.

    What a picture's grammar forbids at a place gets no probability, of the target and of any drafter alike.
    """

    def __init__(self, target: Target, spec: Spec) -> None:
        super().__init__()
        self.head = target.head
        self.kernels = target.kernels
        self.spec = spec
        self.grammar = make_grammar(target.config)
        self.top_p_first = target.config.top_p_first
        self.width = target.config.dim

    def forward(
        self, hidden: Tensor, state: DecodeState | PrefillInput, depth: Tensor | int
    ) -> Tensor:
        """Probabilities of what comes after each feature: [R, T, H] -> [B, T, V] float32.

        Args:
            hidden: only its first H numbers are read; outputs of lower layers follow them.
            depth: [B, T] int32, or one for all: how far below the root each feature's token is; of images that begin,
                below the last token of their prefix.
        """
        spec = self.spec
        logits = self.head(hidden[..., : self.width])
        if self.grammar is not None:
            first = state.slot * 0 if isinstance(state, PrefillInput) else state.count + 1  # [B]
            place = (first[:, None] + depth).expand(-1, hidden.shape[1])  # [B, T]
            logits = self.grammar(logits, torch.cat([place, place]) if spec.guidance else place)
        filters = (spec.guidance, spec.max_top_k, spec.use_top_p, self.top_p_first)
        return self.kernels.probs(logits, state.sampling, *filters)

    def token(
        self,
        probs: Tensor,
        greedy_probs: Tensor,
        uniform: Tensor,
        state: DecodeState | PrefillInput,
    ) -> Tensor:
        """One token an image [B]: drawn from probs [B, V], or the most probable of greedy_probs [B, V]."""
        if not self.spec.use_greedy:
            return self.kernels.sample(probs, uniform)
        best = topk_tokens(greedy_probs, 1)[..., 0]
        if not self.spec.use_sampled:
            return best
        return torch.where(state.sampling.greedy, best, self.kernels.sample(probs, uniform))

    def logprobs(
        self, probs: Tensor, hidden: Tensor, tokens: Tensor, state: DecodeState | PrefillInput
    ) -> Tensor:
        """Log-probabilities of tokens [B, n]: as they were drawn, and of the model's own distribution, [B, n, 2].

        Args:
            probs: [B, n] of each token, where it was drawn; a greedy image has but one choice.
            hidden: [B, n, F], the features before them, of the rows with the condition.
        """
        drawn = probs.log()
        if self.spec.use_greedy:
            drawn = drawn.masked_fill(state.sampling.greedy[:, None], 0.0)
        own = self.head(hidden[..., : self.width]).float().log_softmax(-1)
        return torch.stack([drawn, gather(own, 2, tokens[..., None])[..., 0]], -1)

    def distinct(self, probs: Tensor, uniform: Tensor, state: DecodeState) -> Tensor:
        """Children of each node [B, w, c] from probs [B, w, V]: drawn, or the most probable if greedy."""
        if not self.spec.use_greedy:
            return self.kernels.sample_distinct(probs, uniform)
        best = topk_tokens(probs, uniform.shape[-1])
        if not self.spec.use_sampled:
            return best
        drawn = self.kernels.sample_distinct(probs, uniform)
        return torch.where(state.sampling.greedy[:, None, None], best, drawn)
