"""The two captured functions: `Prefill` begins images, `Step` drafts, verifies, accepts and commits.

Each is a function of one `DecodeState`: no host read, no shape that depends on data, no Python value that varies
between calls. Autoregressive decoding is the step with the one-node tree.

Words: L = P + t is the number of committed positions; the root (token t) is certain but not yet in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from lantern_hpu.decode.common import Drafts, JudgedNodes, Positions, Sampler, StaticTables, rows_at
from lantern_hpu.decode.drafting.base import Committed, Drafting
from lantern_hpu.decode.drafting.eagle import DynamicDrafting, StaticDrafting
from lantern_hpu.decode.drafting.window import ScheduledDrafting, WindowDrafting
from lantern_hpu.decode.spec import Spec, token_columns
from lantern_hpu.decode.state import DecodeState, paired
from lantern_hpu.decode.walk import Acceptance
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.buffers import additive_mask, arange32, constant, prefix_mask
from lantern_hpu.ops.sampling import gather, gather_rows, topk_tokens
from lantern_hpu.tree import DraftTree, DynamicTree, Window


class Prefill(nn.Module):
    """Begins the A images of `state.prefill`: their prefixes through the target, and their first tokens.

    Two recordings exist: for all slots at once, and for one slot while others run, which are neither read nor written.
    """

    def __init__(self, target: Target, drafting: Drafting | None, spec: Spec) -> None:
        super().__init__()
        self.target, self.drafting, self.spec = target, drafting, spec
        self.positions, self.sampler = Positions(target.config, spec), Sampler(target, spec)
        columns = token_columns(target.config, spec.tree)
        self.first = constant(arange32(spec.images) * columns)  # [B] each image's token 0
        self.aux_layers = drafting.aux_layers if drafting is not None else ()

    def forward(self, state: DecodeState) -> Tensor:
        """Returns how many tokens of each image are known [B]."""
        entry = state.prefill
        rows, slot = self.positions.rows_of(entry.slot), entry.slot.long()
        hidden = self.read_prefix(rows, state)  # [RA, P, F]
        probs = self.sampler(hidden[:, -1:], entry, 0)[:, 0]  # [A, V]
        root = self.sampler.token(probs, probs, entry.first_uniform, entry)  # [A]
        if self.drafting is not None:
            self.drafting.begin(hidden, root, rows, state)
        state.valid.index_copy_(0, rows.long(), entry.valid)
        state.pads.index_copy_(0, rows.long(), entry.pads)
        for value, goal in paired(entry.sampling, state.sampling):
            goal.index_copy_(0, slot, value)
        if entry.bounds is not None:
            for value, goal in paired(entry.bounds, state.bounds):
                goal.index_copy_(0, slot, value)
        if state.moves is not None:
            places = self.positions.arange[: self.spec.tree.depth]
            idle = self.positions.idle(torch.zeros_like(entry.slot), places)
            state.moves.source.index_copy_(0, slot, idle)
            state.moves.goal.index_copy_(0, slot, idle)
        for counter in state.counters:
            none = torch.zeros_like(entry.slot, dtype=counter.dtype)  # [A]
            if counter.dim() > 1:
                none = none[:, None].expand(-1, counter.shape[1])
            counter.index_copy_(0, slot, none)
        first = self.first[entry.slot].long()
        state.tokens.index_copy_(0, first, root)
        if state.logprobs is not None:
            drawn, before = root[:, None], hidden[: len(slot), -1:]  # [A, 1], [A, 1, F]
            found = self.sampler.logprobs(gather(probs, 1, drawn), before, drawn, entry)
            state.logprobs.index_copy_(0, first, found[:, 0])
        state.root.index_copy_(0, slot, root)
        return state.known.copy_(state.count + 1)

    def read_prefix(self, rows: Tensor, state: DecodeState) -> Tensor:
        """The target over the prefixes, each of which attends to itself alone: features [RA, P, F]."""
        entry, width = state.prefill, self.target.config.prefix
        causal = self.positions.causal[:width, :width]
        mask = additive_mask(prefix_mask(entry.valid[:, :width], causal), entry.dtype)
        index = self.positions.entry_index(rows, width)
        cache = state.kv_cache.written(index, len(rows))
        rope = self.positions.prefix_rope(entry, 0, width)
        aux, words = self.aux_layers, self.target.words(entry.prefix_tokens)
        return self.target(entry.prefix, rope, mask, cache, index, aux_layers=aux, words=words)


@dataclass
class Accepted:
    """What verification let through."""

    # [B, J, V] float32, the target's at the judged nodes, see `JudgedNodes`; a window's: the spine's first
    probs: Tensor
    node: Tensor  # [B] int32, where the walk stopped
    bonus: Tensor  # [B] int32, the token after it
    relaxed: Tensor  # [B, D] bool, which drafts of its path passed only thanks to relaxation
    spent: Tensor | None = None  # [B, D] float32, see `Verdict`
    tokens: Tensor | None = None  # [B, C + W] drawn on a fixed schedule, from `probs`
    # [B, V] float32, the target's at `node`, before any refusal; None where `probs` has those of all nodes
    fresh: Tensor | None = None


class Step(nn.Module):
    """One decode step for a batch of images, each at its own length.

    Attributes:
        whole: methods that may each be compiled by itself; all but the target's layers is in them.
    """

    whole = ("inputs", "draft", "arrange", "accept", "commit")

    def __init__(
        self,
        target: Target,
        drafting: Drafting | None,
        spec: Spec,
        neighbours: Tensor | None = None,
        codes: Tensor | None = None,
    ) -> None:
        """Without a drafting the root is the whole tree; for neighbours and codes see `Acceptance`."""
        super().__init__()
        self.target, self.drafting, self.spec = target, drafting, spec
        self.positions = Positions(target.config, spec, target.kernels.place)
        self.sampler = Sampler(target, spec)
        tree, config = spec.tree, target.config
        self.prefix, self.tokens, self.depth = config.prefix, config.tokens, tree.depth
        self.acceptance: Acceptance | None = None
        if drafting is not None:
            kernels = target.kernels
            self.acceptance = Acceptance(spec, neighbours, codes, kernels.walk, kernels.traverse)
        self.aux_layers = drafting.aux_layers if drafting is not None else ()
        self.alone, self.judged = StaticTables(DraftTree.root_only()), JudgedNodes(tree)
        self.first = constant(arange32(spec.images) * token_columns(config, tree))  # [B]

    def forward(self, state: DecodeState) -> Tensor:
        """Returns how many tokens of each image are known [B]."""
        *_, (_, known) = self.stages(state)
        return cast(Tensor, known)

    def stages(self, state: DecodeState) -> Iterator[tuple[str, Any]]:
        """The stages of a step by name, and what each made; the last makes what `forward` returns."""
        uniform, length = self.inputs(state)
        draws = self.spec.tree.draws
        for stage, drafts in self.draft(length, uniform[:, :draws], state):
            yield stage, drafts
        hidden = self.verify(drafts, length, state)
        yield "verify", hidden
        accepted = self.accept(hidden, drafts, uniform[:, draws:], state)
        yield "accept", accepted
        yield "commit", self.commit(hidden, drafts, accepted, state)

    def inputs(self, state: DecodeState) -> tuple[Tensor, Tensor]:
        """This step's uniforms [B, draws], and how many positions of each image are committed [B]."""
        uniform = state.uniforms.index_select(0, state.cursor)[0]
        state.cursor.add_(1)
        return uniform, state.count + self.prefix

    def draft(
        self, length: Tensor, uniform: Tensor, state: DecodeState
    ) -> Iterator[tuple[str, Any]]:
        """The stages that make the trees to verify."""
        if self.drafting is not None:
            yield from self.drafting.draft(length, uniform, state)
        else:
            root = state.root[:, None].clone()  # no part of the state, which `commit` writes
            yield "draft", Drafts(root, None, self.alone(len(state.root)))

    def verify(self, drafts: Drafts, length: Tensor, state: DecodeState) -> Tensor:
        """The target over the whole tree in one pass: features [R, M, F]."""
        x, rope, mask, index, source = self.arrange(drafts, length, state)
        return self.target(x, rope, mask, state.kv_cache, index, source, self.aux_layers)

    def arrange(
        self, drafts: Drafts, length: Tensor, state: DecodeState
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """What `Target.forward` is given for the tree, but for the caches."""
        per_row, tables, valid = self.positions.per_row, drafts.tables, state.valid
        if self.target.decoder is not None and self.spec.images > 1:
            # It leaves out rows that attend to nothing: of images that are done
            valid = valid & per_row(length < self.prefix + self.tokens - 1)[:, None]
        column = self.positions.arange[: drafts.tokens.shape[1]]
        what = (length, tables.depth, column, tables.ancestors, state, valid)
        rope, mask, index = self.positions.place(*what)
        source = None
        if state.moves is not None:
            index, source = self.positions.with_moves(index, state.moves)
        x = self.target.embed(per_row(drafts.tokens))
        return x, rope, mask, index, source

    def accept(
        self, hidden: Tensor, drafts: Drafts, uniform: Tensor, state: DecodeState
    ) -> Accepted:
        """Which drafts stay, and what comes after them, by uniforms [B, D * C + 1], or [B, M] where drafts are verified
        together."""
        if self.drafting is None or self.acceptance is None:
            probs = self.sampler(hidden, state, 0)  # [B, 1, V]
            bonus = self.sampler.token(probs[:, 0], probs[:, 0], uniform[:, 0], state)
            none = torch.zeros_like(state.accepted, dtype=torch.bool)  # [B, 0]: nothing to relax
            return Accepted(probs, torch.zeros_like(state.root), bonus, none)
        depth = drafts.tables.depth
        p = self.sampler(self.judged(hidden), state, self.judged(depth))  # [B, J, V]
        drawn = self.drafting.redraw(p, state)
        if drawn is not None:  # drafts that are what their places drew stay, and the next draw
            node = self.acceptance.match_draws(drawn, drafts)
            bonus = gather(drawn, 1, node[:, None])[:, 0]
            return Accepted(p, node, bonus, torch.zeros_like(drawn[:, 1:], dtype=torch.bool))
        assert state.bounds is not None
        tries = uniform[:, :-1]  # [B, M - 1]
        if not self.spec.together:
            tries = tries.unflatten(1, (self.depth, -1))  # [B, D, C]
        greedy, inner = state.sampling.greedy, p[:, : self.judged.inner]  # [B, I, V]
        verdict = self.acceptance(inner, drafts, tries, state.bounds, greedy)
        if not self.judged.whole:
            stop = self.positions.per_row(verdict.node)[:, None]  # [R, 1]
            ruled = self.sampler.grammar is not None  # where the place matters
            deep = gather(depth, 1, verdict.node[:, None]) if ruled else 0  # [B, 1]
            fresh = self.sampler(gather_rows(hidden, stop), state, deep)[:, 0]  # [B, V]
        else:
            fresh = self.judged.at(p, verdict.node)
        inside = rows_at(drafts.tables.child, verdict.node)[:, :1] > 0  # [B, 1]
        probs = torch.where(inside, verdict.residual, fresh)
        bonus = self.sampler.token(probs, fresh, uniform[:, -1], state)
        return Accepted(p, verdict.node, bonus, verdict.relaxed, verdict.spent, fresh=fresh)

    def commit(
        self, hidden: Tensor, drafts: Drafts, accepted: Accepted, state: DecodeState
    ) -> Tensor:
        """Keep the accepted path and the bonus token; everything else is overwritten later.

        The path's keys and values are moved together by the next step, along with what it writes itself.
        """
        if state.meter is not None and accepted.spent is not None:
            self.spend(
                accepted.spent, gather(drafts.tables.depth, 1, accepted.node[:, None]), state
            )
        path, news, added, before = self.keep(drafts, accepted, state)
        if state.logprobs is not None:
            probs = self.drawn_probs(drafts, accepted, path, news)
            self.note_logprobs(probs, gather_rows(hidden[: len(path)], path), news, before, state)
        if self.drafting is not None:
            root, probs = drafts.tokens[:, 0], accepted.probs
            committed = Committed(hidden, path, news, added, before, root, probs, drafts.uniform)
            self.drafting.absorb(committed, state)
        return state.known

    def keep(
        self, drafts: Drafts, accepted: Accepted, state: DecodeState
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Write and count the new tokens.

        Returns of each image the nodes of the path [B, D + 1] and the tokens behind them [B, D + 1], how many of those
        are new [B], and how many there were [B], all as `Committed` has them.
        """
        if self.target.kernels.commit is not None:
            kept = [state.tokens, state.count, state.root, state.known, state.steps]
            kept += [state.accepted, state.relaxed, state.spoiled]
            kept += [] if state.moves is None else [state.moves.source, state.moves.goal]
            walked = (accepted.node, accepted.bonus, accepted.relaxed, accepted.probs)
            tree = (drafts.tables.path, drafts.tables.depth, drafts.tokens)
            sizes = (self.prefix, self.tokens - 1, self.positions.size)
            return self.target.kernels.commit(*walked, *tree, kept, *sizes)
        path = rows_at(drafts.tables.path, accepted.node)  # [B, D + 1]
        taken = gather(drafts.tables.depth, 1, accepted.node[:, None])[:, 0]  # [B]
        order = self.positions.arange[: self.depth + 1]  # [D + 1]
        # Token t + 1 + i is draft i + 1 of the path, or the bonus token after the last of them.
        drafted = gather(drafts.tokens, 1, torch.cat([path[:, 1:], path[:, -1:]], 1))
        news = torch.where(order < taken[:, None], drafted, accepted.bonus[:, None])  # [B, D + 1]
        index = (self.first + state.count + 1)[:, None] + order
        state.tokens.index_copy_(0, index.flatten().long(), news.flatten())
        before = state.count.clone()
        count = (before + taken + 1).clamp(max=self.tokens - 1)
        if state.moves is not None:
            source, goal = self.positions.moves(path, before, count)
            state.moves.source.copy_(source)
            state.moves.goal.copy_(goal)
        self.note_spoiled(accepted, state)
        self.tally(taken, accepted, order, state)
        self.end(accepted, count, state)
        # A finished image adds nothing; one pair keeps its catch-up within its own row.
        return path, news, (count - before).clamp(min=1), before

    def drawn_probs(self, drafts: Drafts, accepted: Accepted, path: Tensor, news: Tensor) -> Tensor:
        """The target's probabilities of the tokens behind the nodes of a path, all [B, D + 1].

        A lossless method draws by no other: the bonus token too, of what refused drafts left and those together.
        """
        p, node = accepted.probs, accepted.node
        fresh = self.judged.at(p, node) if accepted.fresh is None else accepted.fresh
        row = gather(drafts.tables.row, 1, path)  # where a node has children
        drafted = gather(p.flatten(1), 1, row * p.shape[-1] + news)
        taken = gather(drafts.tables.depth, 1, node[:, None])  # [B, 1]
        order = self.positions.arange[: self.depth + 1]
        return torch.where(order < taken, drafted, gather(fresh, 1, news))

    def note_logprobs(
        self, probs: Tensor, hidden: Tensor, tokens: Tensor, before: Tensor, state: DecodeState
    ) -> None:
        """Keep those of the n tokens [B, n] after t, `before` [B]; for the others see `Sampler.logprobs`."""
        assert state.logprobs is not None
        found = self.sampler.logprobs(probs, hidden, tokens, state)
        index = (self.first + before + 1)[:, None] + self.positions.arange[: tokens.shape[1]]
        state.logprobs.index_copy_(0, index.flatten().long(), found.flatten(0, 1))

    def note_spoiled(self, accepted: Accepted, state: DecodeState) -> None:
        bad = accepted.probs[..., 0].isnan().any(1)  # [B], as a softmax of one NaN is all NaN
        state.spoiled.add_(bad & (state.count < self.tokens - 1))

    def end(self, accepted: Accepted, count: Tensor, state: DecodeState) -> Tensor:
        """The next step begins after the bonus token. -> [B] tokens known"""
        state.root.copy_(accepted.bonus)
        state.count.copy_(count)
        return state.known.copy_(count + 1)

    def tally(self, taken: Tensor, accepted: Accepted, order: Tensor, state: DecodeState) -> None:
        """Count the step for images that are not done, and only what is within the image."""
        last = self.tokens - 1
        state.steps.add_(state.count < last)
        if self.depth:
            depth = order[1:]  # 1 .. D
            inside = state.count[:, None] + depth <= last
            counted = (depth <= taken[:, None]) & inside
            state.accepted.add_(counted)
            state.relaxed.add_((accepted.relaxed & counted).sum(1, dtype=torch.int32))

    def spend(self, spent: Tensor, taken: Tensor, state: DecodeState) -> None:
        """Meter what the drafts that were tried have spent [B, D]; `taken` [B, 1] were accepted."""
        assert state.meter is not None
        depth = self.positions.arange[1 : self.depth + 1]
        tried = (depth <= taken + 1) & (state.count[:, None] + depth <= self.tokens - 1)
        spent = spent * tried  # of the draft that was refused, too
        state.meter.add(spent)
        if state.bounds is not None and state.bounds.budget is not None:
            state.bounds.budget.sub_(spent.sum(1))


class ScheduledStep(Step):
    """On a fixed schedule each image gains C tokens: verify, draw, make the first C places final."""

    drafting: ScheduledDrafting

    @property
    def final(self) -> int:
        """C, tokens that a step makes final."""
        return self.drafting.final

    def inputs(self, state: DecodeState) -> tuple[Tensor, Tensor]:
        """This step's uniforms [B, draws], and how many positions of each image are in the cache [B]."""
        uniform, length = super().inputs(state)
        return uniform, length - self.drafting.lag(state)

    def accept(
        self, hidden: Tensor, drafts: Drafts, uniform: Tensor, state: DecodeState
    ) -> Accepted:
        """Sample all places again, from the target's distributions given what was before them."""
        lag = self.drafting.lag(state)
        p = self.sampler(hidden, state, drafts.tables.depth - lag[:, None])  # [B, C + W, V]
        assert drafts.uniform is not None
        tokens, probs = self.drafting.draw_all(p, drafts.uniform, state)
        bonus, node = tokens[:, self.final - 1], lag + (self.final - 1)
        relaxed = torch.zeros_like(tokens[:, 1:], dtype=torch.bool)
        return Accepted(probs, node, bonus, relaxed, self.spent(p, drafts.tokens, state), tokens)

    def spent(self, p: Tensor, tokens: Tensor, state: DecodeState) -> Tensor | None:
        """Total variation between what the last final tokens were drawn from and what they should have been.

        Args:
            p: [B, C + W, V], the target's after each node. tokens: [B, C + W].

        Returns [B, C - 1]; 0 where no token was made final yet. The first of them was drawn as it should be.
        """
        final: Tensor | None = state.drafting.final
        if final is None:
            return None
        today = p[:, : final.shape[1]]
        cost = (final - today).clamp(min=0).sum(-1)
        if self.spec.use_greedy:
            other = topk_tokens(today, 1)[..., 0] != tokens[:, 1 : self.final]
            cost = torch.where(state.sampling.greedy[:, None], other.to(cost.dtype), cost)
        return cost * (state.count > 0)[:, None]

    def commit(
        self, hidden: Tensor, drafts: Drafts, accepted: Accepted, state: DecodeState
    ) -> Tensor:
        """Keep the first C tokens; the next step writes their keys."""
        assert accepted.tokens is not None
        self.note_spoiled(accepted, state)
        index = (self.first + state.count + 1)[:, None] + self.positions.arange[: self.final]
        news = accepted.tokens[:, : self.final]
        state.tokens.index_copy_(0, index.flatten().long(), news.flatten())
        if state.logprobs is not None:  # of a schedule of one token a step
            probs, before = gather(accepted.probs[:, 0], 1, news), hidden[: len(news), :1]
            self.note_logprobs(probs, before, news, state.count, state)
        count = (state.count + self.final).clamp(max=self.tokens - 1)
        self.drafting.keep_drawn(accepted.tokens, accepted.probs, state)
        self.tally_final(accepted.spent, state)
        return self.end(accepted, count, state)

    def tally_final(self, spent: Tensor | None, state: DecodeState) -> None:
        """Count the step for images that are not done; what it made final after its first token counts as accepted.

        What was spent [B, C - 1] is of the tokens of the step before.
        """
        last, depth = self.tokens - 1, self.positions.arange[1 : self.depth + 1]
        running = state.count < last
        state.steps.add_(running)
        state.accepted.add_((depth < self.final) & (state.count[:, None] + depth <= last))
        if state.meter is not None and spent is not None:
            state.meter.add(spent * running[:, None])


def make_drafting(target: Target, drafter: Drafter | None, spec: Spec) -> Drafting | None:
    """What drafts a spec's tree; None where the root is the whole tree."""
    if isinstance(spec.tree, Window):
        return ScheduledDrafting(target, spec) if spec.tree.commit else WindowDrafting(target, spec)
    if not spec.tree.depth:
        return None
    assert drafter is not None, "a tree of drafts needs a drafter"
    kind = DynamicDrafting if isinstance(spec.tree, DynamicTree) else StaticDrafting
    return kind(target, drafter, spec)
