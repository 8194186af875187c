"""The second captured function, the step: draft, verify, accept, commit.

A function of one `DecodeState`: no host read, no shape that depends on data, no Python value that varies between
calls. Autoregressive decoding is the step with the one-node tree.

Words: L = P + t is the number of committed positions; the root (token t) is certain but not yet in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.decode.accept import Acceptance, Clusters, Verdict
from lantern_hpu.decode.drafting import Committed, Drafting, Drafts
from lantern_hpu.decode.drafting.base import Watch, unwatched
from lantern_hpu.decode.positions import Positions
from lantern_hpu.decode.sampler import Sampler
from lantern_hpu.decode.spec import Spec, token_columns
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.decode.tree_tables import StaticTables, rows_at
from lantern_hpu.models.transformer import Target
from lantern_hpu.ops.buffers import additive_mask, arange32, constant, prefix_mask
from lantern_hpu.ops.sampling import gather, gather_rows
from lantern_hpu.tree import DraftTree

# ------------------------------------------------------------------------------------------- admit

# What begins images: the condition through the target, and the first image token, in slots that the host names.
#
# Like the step it is a function of one `DecodeState`: no host read, no shape that depends on data, no Python value
# that varies between calls. Two recordings of it exist: for all slots at once, and for one slot while the others go
# on; what lies in other slots is neither read nor written.


class Admit(nn.Module):
    """Begins the A images of `state.entry`."""

    def __init__(self, target: Target, drafting: Drafting | None, spec: Spec) -> None:
        super().__init__()
        self.target, self.drafting, self.spec = target, drafting, spec
        self.positions, self.sampler = Positions(target.config, spec), Sampler(target, spec)
        columns = token_columns(target.config, spec.tree)
        self.first = constant(arange32(spec.images) * columns)  # [B] each image's token 0
        self.aux_layers = drafting.aux_layers if drafting is not None else ()

    def forward(self, state: DecodeState) -> Tensor:
        """Returns how many tokens of each image are known [B]."""
        entry = state.entry
        rows, slot = self.positions.rows_of(entry.slot), entry.slot.long()
        hidden = self.read_prefix(rows, state)  # [RA, P, F]
        probs = self.sampler(hidden[:, -1:], entry, 0)[:, 0]  # [A, V]
        root = self.sampler.token(probs, probs, entry.first_uniform, entry)  # [A]
        if self.drafting is not None:
            self.drafting.begin(hidden, root, rows, state)
        for goal, news in entry.by_row(state):
            goal.index_copy_(0, rows.long(), news)
        for goal, news in entry.by_slot(state):
            goal.index_copy_(0, slot, news)
        if state.moves is not None:
            places = self.positions.arange[: self.spec.tree.depth]
            idle = self.positions.idle(torch.zeros_like(entry.slot), places)
            state.moves.source.index_copy_(0, slot, idle)
            state.moves.goal.index_copy_(0, slot, idle)
        for counter in state.counters:
            counter.index_fill_(0, slot, 0)
        state.tokens.index_copy_(0, self.first[entry.slot].long(), root)
        state.root.index_copy_(0, slot, root)
        return state.known.copy_(state.count + 1)

    def read_prefix(self, rows: Tensor, state: DecodeState) -> Tensor:
        """The target over the prefixes, each of which attends to itself alone: features [RA, P, F]."""
        entry, width = state.entry, self.target.config.prefix
        causal = self.positions.causal[:width, :width]
        mask = additive_mask(prefix_mask(entry.valid[:, :width], causal), entry.dtype)
        position = self.positions.arange[:width].expand(len(rows), -1)
        index = self.positions.entry_index(rows, width)
        cache = state.kv_cache.written(index, len(rows))
        rope = self.positions.rope(position, entry)
        return self.target(entry.prefix, rope, mask, cache, index, aux_layers=self.aux_layers)


# -------------------------------------------------------------------------------------------- step


@dataclass
class Accepted:
    """What verification let through."""

    # [B, I, V] float32, the target's at nodes with children, or at the root if it has none; a window's: at all nodes,
    # the spine's first
    probs: Tensor
    node: Tensor  # [B] int32, where the walk stopped
    bonus: Tensor  # [B] int32, the token after it
    relaxed: Tensor  # [B, D] bool, which drafts of its path passed only thanks to relaxation
    spent: Tensor | None = None  # [B, D] float32, see `Verdict`


class Step(nn.Module):
    """One decode step for a batch of images, each at its own length."""

    def __init__(
        self,
        target: Target,
        drafting: Drafting | None,
        spec: Spec,
        neighbours: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> None:
        """
        Args:
            drafting: None where the root is the whole tree.
            neighbours: [V, K] int32 for relaxed acceptance. codes: [V, dim] float32 for clusters.
        """
        super().__init__()
        self.target, self.drafting, self.spec = target, drafting, spec
        self.positions, self.sampler = Positions(target.config, spec), Sampler(target, spec)
        tree, config = spec.tree, target.config
        self.prefix, self.tokens, self.depth = config.prefix, config.tokens, tree.depth
        self.acceptance = None
        if drafting is not None:
            rule = neighbours, spec.residual, spec.annealed, target.kernels.walk
            clusters = Clusters(codes, spec.ranks) if codes is not None else None
            self.acceptance = Acceptance(tree, *rule, clusters, spec.metered, spec.blended)
        self.aux_layers = drafting.aux_layers if drafting is not None else ()
        self.alone = StaticTables(DraftTree.root_only())
        # [I] nodes whose children may be tried; which they are is not known of a dynamic tree
        judged = tree.judged if isinstance(tree, DraftTree) else None
        self.judged = None if judged is None else constant(judged, torch.int32)
        # [M] which of the judged nodes' distributions is a node's, where all nodes are judged
        whole = judged is not None and len(judged) == tree.size
        ranks = {node: rank for rank, node in enumerate(judged or ())}
        self.rank = constant([ranks[n] for n in range(tree.size)]) if whole else None
        self.inner = len(tree.expanded) if isinstance(tree, DraftTree) else tree.size  # I
        self.first = constant(arange32(spec.images) * token_columns(config, tree))  # [B]

    def forward(self, state: DecodeState) -> Tensor:
        """Returns how many tokens of each image are known [B]."""
        return self.finish(state, *self.propose(state))

    @property
    def parts(self) -> tuple[Callable[..., Any], ...]:
        """Two halves, for a device that cannot record the whole as one graph."""
        return self.propose, self.finish

    def propose(self, state: DecodeState, done: Watch = unwatched) -> tuple[Tensor, Tensor, Drafts]:
        """This step's uniforms for acceptance [B, D * C + 1], committed positions [R], and trees."""
        uniform, length = self.inputs(state)
        draws = self.spec.tree.draws
        return uniform[:, draws:], length, self.draft(length, uniform[:, :draws], state, done)

    def finish(self, state: DecodeState, uniform: Tensor, length: Tensor, drafts: Drafts) -> Tensor:
        """Verify, accept and commit. -> [B] tokens known"""
        return self.finish_traced(state, uniform, length, drafts)[1]

    def finish_traced(
        self,
        state: DecodeState,
        uniform: Tensor,
        length: Tensor,
        drafts: Drafts,
        done: Watch = unwatched,
    ) -> tuple[Accepted, Tensor]:
        """`finish`, with what was accepted."""
        hidden = self.verify(drafts, length, state)
        done("verify")
        accepted = self.accept(hidden, drafts, uniform, state)
        done("accept")
        known = self.commit(hidden, drafts, accepted, state)
        done("commit")
        return accepted, known

    def inputs(self, state: DecodeState) -> tuple[Tensor, Tensor]:
        """This step's uniforms [B, draws], and how many positions of each row are committed [R]."""
        uniform = state.uniforms.index_select(0, state.cursor)[0]
        state.cursor.add_(1)
        return uniform, self.positions.per_row(state.count) + self.prefix

    def draft(
        self, length: Tensor, uniform: Tensor, state: DecodeState, done: Watch = unwatched
    ) -> Drafts:
        """The trees to verify."""
        if self.drafting is not None:
            return self.drafting.draft(length, uniform, state, done)
        alone = Drafts(state.root[:, None], None, self.alone(len(state.root)))
        done("draft")
        return alone

    def verify(self, drafts: Drafts, length: Tensor, state: DecodeState) -> Tensor:
        """The target over the whole tree in one pass: features [R, M, F]."""
        per_row, tables = self.positions.per_row, drafts.tables
        rope = self.positions.rope(length[:, None] + per_row(tables.depth), state)
        mask = self.positions.mask(length, per_row(tables.ancestors)) & state.valid[:, None]
        index, source = self.positions.cache_index(length, drafts.tokens.shape[1]), None
        if state.moves is not None:
            index, source = self.positions.with_moves(index, state.moves)
        x = self.target.embed(per_row(drafts.tokens))
        mask = additive_mask(mask, x.dtype)
        return self.target(x, rope, mask, state.kv_cache, index, source, self.aux_layers)

    def accept(
        self, hidden: Tensor, drafts: Drafts, uniform: Tensor, state: DecodeState
    ) -> Accepted:
        """Which drafts stay, and what comes after them."""
        if self.acceptance is None:
            probs = self.sampler(hidden, state, 0)  # [B, 1, V]
            bonus = self.sampler.token(probs[:, 0], probs[:, 0], uniform[:, 0], state)
            none = torch.zeros_like(state.accepted, dtype=torch.bool)  # [B, 0]: nothing to relax
            return Accepted(probs, torch.zeros_like(state.root), bonus, none)
        judged, depth = hidden, drafts.tables.depth
        if self.judged is not None:
            # Not by brackets: an index beside a full dimension leaves the graph of some compilers.
            judged, depth = (x.index_select(1, self.judged) for x in (hidden, depth))
        p = self.sampler(judged, state, depth)  # [B, I, V]
        assert self.drafting is not None
        drawn = self.drafting.redraw(p, state)
        if drawn is not None:
            return self.accept_redrawn(self.acceptance, p, drawn, drafts)
        verdict = self.judge(self.acceptance, p[:, : self.inner], drafts, uniform, state)
        if self.rank is None:
            stop = self.positions.per_row(verdict.node)[:, None]  # [R, 1]
            deep = gather(drafts.tables.depth, 1, verdict.node[:, None])  # [B, 1]
            fresh = self.sampler(gather_rows(hidden, stop), state, deep)[:, 0]  # [B, V]
        else:
            fresh = rows_at(p, self.rank[verdict.node])
        inside = rows_at(drafts.tables.child, verdict.node)[:, :1] > 0  # [B, 1]
        probs = torch.where(inside, verdict.residual, fresh)
        bonus = self.sampler.token(probs, fresh, uniform[:, -1], state)
        return Accepted(p, verdict.node, bonus, verdict.relaxed, verdict.spent)

    def accept_redrawn(
        self, acceptance: Acceptance, p: Tensor, drawn: Tensor, drafts: Drafts
    ) -> Accepted:
        """Drafts that are what their places drew [B, W + 1] stay, and the first other draw does too."""
        node = acceptance.repeated(drawn, drafts.tokens, drafts.tables)
        bonus = gather(drawn, 1, node[:, None])[:, 0]
        return Accepted(p, node, bonus, torch.zeros_like(drawn[:, 1:], dtype=torch.bool))

    def judge(
        self,
        acceptance: Acceptance,
        p: Tensor,
        drafts: Drafts,
        uniform: Tensor,
        state: DecodeState,
    ) -> Verdict:
        """The sampled walk, the greedy one, or each for its images."""
        tokens, tables = drafts.tokens, drafts.tables
        if not self.spec.use_sampled:
            return acceptance.greedy(p, tokens, tables, state.bounds)
        tries = uniform[:, :-1].unflatten(1, (self.depth, -1))  # [B, D, C]
        sampled = acceptance.sampled(p, drafts.q, tokens, tables, tries, state.bounds)
        if not self.spec.use_greedy:
            return sampled
        best = acceptance.greedy(p, tokens, tables, state.bounds)
        greedy = state.sampling.greedy
        node = torch.where(greedy, best.node, sampled.node)
        relaxed = torch.where(greedy[:, None], best.relaxed, sampled.relaxed)
        spent = sampled.spent
        if spent is not None and best.spent is not None:
            spent = torch.where(greedy[:, None], best.spent, spent)
        return Verdict(node, sampled.residual, relaxed, spent)

    def commit(
        self, hidden: Tensor, drafts: Drafts, accepted: Accepted, state: DecodeState
    ) -> Tensor:
        """Keep the accepted path and the bonus token; everything else is overwritten later.

        The path's keys and values are moved together by the next step, along with what it writes itself.
        """
        path = rows_at(drafts.tables.path, accepted.node)  # [B, D + 1]
        taken = gather(drafts.tables.depth, 1, accepted.node[:, None])[:, 0]  # [B]
        order = self.positions.arange[: self.depth + 1]  # [D + 1]
        # Token t + 1 + i is draft i + 1 of the path, or the bonus token after the last of them.
        drafted = gather(drafts.tokens, 1, torch.cat([path[:, 1:], path[:, -1:]], 1))
        news = torch.where(order < taken[:, None], drafted, accepted.bonus[:, None])  # [B, D + 1]
        index = (self.first + state.count + 1)[:, None] + order
        state.tokens.index_copy_(0, index.flatten().long(), news.flatten())
        count = (state.count + taken + 1).clamp(max=self.tokens - 1)
        if self.drafting is not None:
            if state.moves is not None:
                source, goal = self.positions.moves(path, state.count, count)
                state.moves.source.copy_(source)
                state.moves.goal.copy_(goal)
            # A finished image adds nothing; one pair keeps its catch-up within its own row.
            added = (count - state.count).clamp(min=1)
            committed = Committed(hidden, path, news, added, accepted.probs, drafts.uniform)
            self.drafting.absorb(committed, state)
        self.tally(taken, accepted, order, state)
        state.root.copy_(accepted.bonus)
        state.count.copy_(count)
        return state.known.copy_(count + 1)

    def tally(self, taken: Tensor, accepted: Accepted, order: Tensor, state: DecodeState) -> None:
        """Count the step for images that are not done, and only what lies within the image."""
        last = self.tokens - 1
        state.steps.add_(state.count < last)
        if self.depth:
            depth = order[1:]  # 1 .. D
            inside = state.count[:, None] + depth <= last
            counted = (depth <= taken[:, None]) & inside
            state.accepted.add_(counted)
            state.relaxed.add_((accepted.relaxed & counted).sum(1, dtype=torch.int32))
            if state.meter is not None and accepted.spent is not None:
                tried = (depth <= taken[:, None] + 1) & inside  # the draft that was refused, too
                spent = accepted.spent * tried
                state.meter.add(spent)
                if state.bounds.budget is not None:
                    state.bounds.budget.sub_(spent.sum(1))
