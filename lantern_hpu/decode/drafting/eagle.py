"""Drafts of an EAGLE drafter.

The drafter's entry i is made from the target's feature at cache position i and token i + 1, so its last committed
entry, L - 1, already holds the root; L = P + t is the number of committed positions.

Static trees: children are drawn without replacement from the drafter's probabilities at their parent. Dynamic trees:
the most probable drafts are kept (EAGLE-2, arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.decode.common import Drafts, DynamicTables, Positions, Sampler, StaticTables
from lantern_hpu.decode.drafting.base import Committed, Drafting
from lantern_hpu.decode.spec import Spec, capacity
from lantern_hpu.decode.state import DecodeState, int_zeros
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.buffers import Choice, additive_mask, arange32, constant, prefix_mask
from lantern_hpu.ops.kv_cache import KVCache, LayerCache, ScratchCache
from lantern_hpu.ops.sampling import gather, gather_rows, topk_tokens
from lantern_hpu.tree import DraftTree, DynamicTree


@dataclass
class EagleState:
    """What an EAGLE drafter keeps from step to step."""

    kv_cache: KVCache
    pending_tokens: Tensor  # [B, D + 1] int32, tokens the drafter has not seen
    pending_features: Tensor  # [R, D + 1, F], the target's features before them
    pending_count: Tensor  # [B] int32, how many of them are real


class EagleDrafting(Drafting):
    """One drafter for all trees: it catches up with the accepted tokens, then drafts."""

    def __init__(self, target: Target, drafter: Drafter, spec: Spec) -> None:
        super().__init__()
        self.config, self.drafter, self.spec = target.config, drafter, spec
        self.positions = Positions(target.config, spec, target.kernels.place)
        self.sampler = Sampler(target, spec)
        self.width = spec.tree.depth + 1
        self.aux_layers = drafter.aux_layers
        self.writes_often = drafter.block.attention.kernels.attend is not None

    def allocate(
        self, dtype: torch.dtype, device: torch.device, by_head: bool = False
    ) -> EagleState:
        config, spec = self.config, self.spec
        sizes = (1, spec.rows, capacity(config, spec.tree), config.kv, config.head_dim)
        shape = (spec.rows, self.width, self.drafter.feature_width)
        return EagleState(
            KVCache.allocate(*sizes, dtype, device, by_head),
            int_zeros(device, spec.images, self.width),
            torch.zeros(shape, dtype=dtype, device=device),
            int_zeros(device, spec.images),
        )

    def begin(self, hidden: Tensor, root: Tensor, rows: Tensor, state: DecodeState) -> None:
        """Entries 0 .. P-2 carry the prefix's features with its words, or the filler token 0."""
        kept: EagleState = state.drafting
        entry, width, drafter = state.prefill, self.config.prefix - 1, self.drafter
        slot = entry.slot.long()
        if width:
            mask = self.positions.causal[:width, :width].expand(len(rows), -1, -1)
            if not drafter.sees_pads:
                mask = prefix_mask(entry.valid[:, :width], mask)
            words = entry.prefix_tokens[:, drafter.shift :][:, :width]
            rope = self.positions.prefix_rope(entry, 1, width)
            index = self.positions.entry_index(rows, width)
            cache = kept.kv_cache.written(index, len(rows)).layers[0]
            mask = additive_mask(mask, hidden.dtype)
            drafter(words, hidden[:, :-1], rope, mask, cache, index)
        # The drafter owes the pair (feature of the last prefix position, root).
        owed = root if drafter.shift else entry.prefix_tokens[: len(root), -1]
        tokens, last = owed[:, None].expand(-1, self.width), hidden[:, -1:]
        kept.pending_tokens.index_copy_(0, slot, tokens)
        kept.pending_features.index_copy_(0, rows.long(), last.expand(-1, self.width, -1))
        kept.pending_count.index_copy_(0, slot, torch.ones_like(entry.slot))

    def absorb(self, committed: Committed, state: DecodeState) -> None:
        """The path's features and the tokens after them are what the drafter has to catch up with."""
        kept: EagleState = state.drafting
        path, tokens = self.positions.per_row(committed.path), committed.tokens
        kept.pending_features.copy_(gather_rows(committed.hidden, path))
        if not self.drafter.shift:
            tokens = torch.cat([committed.root[:, None], tokens[:, :-1]], 1)
        kept.pending_tokens.copy_(tokens)
        kept.pending_count.copy_(committed.added)

    def run(
        self,
        tokens: Tensor,  # [B, T]
        features: Tensor,  # [R, T, F], or guesses [R, T, H]
        start: Tensor,  # [B] committed positions
        offset: Tensor,  # [T], how far behind those the guess is used
        column: Tensor,  # [T], its position in the cache
        table: Tensor,  # [T, X] or [B, T, X], what of the positions from there on it attends to
        cache: LayerCache,
        state: DecodeState,
    ) -> Tensor:
        """One pass of the drafter: guessed features [R, T, H]."""
        valid = None if self.drafter.sees_pads else state.valid
        rope, mask, index = self.positions.place(start, offset, column, table, state, valid)
        return self.drafter(self.positions.per_row(tokens), features, rope, mask, cache, index)

    def catch_up(self, length: Tensor, state: DecodeState) -> Tensor:
        """Add the pairs of the last step; entries past the real ones are overwritten. -> [R, 1, H]"""
        kept: EagleState = state.drafting
        order, width = self.positions.positions, self.width
        where = (order[1 : width + 1], order[:width], self.positions.causal[:width, :width])
        start, cache = length - kept.pending_count, kept.kv_cache.layers[0]
        pairs = (kept.pending_tokens, kept.pending_features)
        guess = self.run(*pairs, start, *where, cache, state)
        return gather_rows(guess, self.positions.per_row(kept.pending_count - 1)[:, None])

    def ahead(self, depth: int, width: int) -> Tensor:
        """Offsets [w] of the guesses for one depth."""
        return self.positions.positions[depth : depth + 1].expand(width)

    def scratch(self, state: DecodeState) -> LayerCache:
        """What the passes over this step's drafts write; the next step writes what was accepted of them.

        Copies, as a recording may keep one write by index alone; a device's own kernel may write as often as it likes.
        """
        cache: LayerCache = state.drafting.kv_cache.layers[0]
        return cache if self.writes_often else ScratchCache(**vars(cache))


def expand(probs: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most probable children of each node, from probs [B, w, V] and log-probabilities of the paths to them [B, w].

    Returns their tokens [B, w * count] int32 and scores [B, w * count].
    """
    tokens = topk_tokens(probs, count)  # [B, w, count]
    result = scores[..., None] + gather(probs, -1, tokens).log()
    return tokens.flatten(1), result.flatten(1)


class DynamicDrafting(EagleDrafting):
    """Takes the best children of the best nodes, and keeps the best of all: as many as the tree holds."""

    def __init__(self, target: Target, drafter: Drafter, spec: Spec) -> None:
        super().__init__(target, drafter, spec)
        tree = spec.tree
        assert isinstance(tree, DynamicTree)
        self.tree, self.tables = tree, DynamicTables(tree)
        k = tree.top_k
        # Places in one level: which node of the level before a candidate hangs from
        self.origin = constant(arange32(k * k) // k)  # [k * k]
        itself = torch.eye(tree.scratch, dtype=torch.bool).unflatten(0, (tree.expansions, k))
        self.itself = constant(itself)  # [E, k, E * k], node itself in the cache

    def draft(
        self, length: Tensor, uniform: Tensor, state: DecodeState
    ) -> Iterator[tuple[str, Any]]:
        """Nothing is drawn: the uniforms are [B, 0]."""
        tokens, scores, parents = self.grow(length, state)
        yield "draft", tokens
        chosen, tables = self.tables(scores, parents)
        drafts = gather(tokens, 1, chosen)
        yield "tables", Drafts(torch.cat([state.root[:, None], drafts], 1), None, tables)

    def grow(self, length: Tensor, state: DecodeState) -> tuple[Tensor, Tensor, Tensor]:
        """All that the drafter guesses, n an image, in the order of their making.

        Returns their tokens [B, n] int32, log-probabilities of their paths [B, n] float32, and their parents' numbers
        plus 1 [B, n] int32; 0 is the root.
        """
        k, guess = self.tree.top_k, self.catch_up(length, state)  # [R, 1, H]
        probs = self.sampler(guess, state, 0)  # [B, 1, V]
        new, score = expand(probs, torch.zeros_like(probs[..., 0]), k)  # [B, k]
        tokens, scores, parents = [new], [score], [torch.zeros_like(new)]
        # The frontier: its places among the newest candidates, where those hang, and what its nodes attend to
        place = self.positions.arange[:k].expand_as(new)
        origin, first, frontier = torch.zeros_like(new), 1, state.root[:, None]
        mask = torch.zeros_like(self.itself[:1])  # [1, k, E * k], nothing yet
        cache = self.scratch(state)
        for level in range(self.tree.expansions):
            above = gather_rows(mask.expand(len(new), -1, -1), origin)
            mask = above | self.itself[level]  # [B, k, E * k]
            guess = gather_rows(guess, self.positions.per_row(origin))
            before, frontier = frontier, gather(new, 1, place)  # [B, k] tokens
            read = frontier if self.drafter.shift else gather(before, 1, origin)
            column = self.positions.positions[level * k : level * k + k]
            where = (length, self.ahead(level + 1, k), column, mask)
            guess = self.run(read, guess, *where, cache, state)  # [R, k, H]
            parent = place + first  # numbers of the frontier, plus 1
            first = first + new.shape[1]
            probs = self.sampler(guess, state, level + 1)  # [B, k, V]
            new, score = expand(probs, gather(score, 1, place), k)  # [B, k * k]
            tokens.append(new)
            scores.append(score)
            parents.append(gather(parent, 1, self.origin.expand_as(new)))
            place = topk_tokens(score, k)
            origin = self.origin[place]
        return torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1)


class TreeLevel(nn.Module):
    """Tables of one drafting level: nodes at this depth that have children."""

    def __init__(self, tree: DraftTree, depth: int) -> None:
        super().__init__()
        frontier, self.depth = tree.frontiers[depth], depth
        most = max(len(tree.children[node]) for node in frontier)
        # Uniform of each child is that of its node; where a node has fewer children the draw is unused.
        table = [
            [max(child - 1, 0) for child in tree.children[node]]
            + [0] * (most - len(tree.children[node]))
            for node in frontier
        ]
        self.width, self.most = len(frontier), most  # w, c
        self.draws = Choice([number for row in table for number in row])  # w * c
        row = {node: i for i, node in enumerate(frontier)}
        next_level = tree.levels[depth + 1]
        pick = [row[tree.parent[n]] * most + tree.paths[n][-1] for n in next_level]
        self.pick = Choice(pick)  # nodes at depth + 1
        grown = tree.frontiers[depth + 1] if depth + 1 < tree.depth else ()
        self.grown = len(grown)
        self.expand = Choice([next_level.index(n) for n in grown])
        self.parent = Choice([row[tree.parent[n]] for n in grown])
        # The drafter keeps the tree's entries behind its committed ones, in the order of expansion.
        inner = tree.expanded[1:]
        mask = [[tree.ancestors[n][other] for other in inner] for n in grown]
        self.mask = constant(mask, torch.bool)  # [grown, I - 1]
        self.scratch = constant([inner.index(n) for n in grown], torch.int32)


class StaticDrafting(EagleDrafting):
    """Down the tree, level by level."""

    levels: Sequence[TreeLevel]  # an nn.ModuleList

    def __init__(self, target: Target, drafter: Drafter, spec: Spec) -> None:
        super().__init__(target, drafter, spec)
        tree = spec.tree
        assert isinstance(tree, DraftTree)
        self.tables = StaticTables(tree)
        self.levels = nn.ModuleList(TreeLevel(tree, depth) for depth in range(tree.depth))  # type: ignore[assignment]

    def draft(
        self, length: Tensor, uniform: Tensor, state: DecodeState
    ) -> Iterator[tuple[str, Any]]:
        """The uniforms are [B, M - 1], one a draft."""
        guess = self.catch_up(length, state)  # [R, w, H]
        frontier = state.root[:, None]  # [B, w] tokens of this level's nodes
        tokens, probs, cache = [frontier], [], self.scratch(state)
        for level in self.levels:
            q = self.sampler(guess, state, level.depth)  # [B, w, V]
            each = level.draws(uniform).unflatten(1, (level.width, level.most))  # [B, w, c]
            draws = self.sampler.distinct(q, each, state)
            drafts = level.pick(draws.flatten(1))  # [B, nodes at the next depth]
            probs.append(q)
            tokens.append(drafts)
            if level.grown:
                ahead = self.ahead(level.depth + 1, level.grown)
                above, frontier = frontier, level.expand(drafts)
                read = frontier if self.drafter.shift else level.parent(above)
                source = level.parent(guess)
                where = (length, ahead, level.scratch, level.mask)
                guess = self.run(read, source, *where, cache, state)
        found = torch.cat(tokens, 1)  # [B, M]
        yield "draft", Drafts(found, torch.cat(probs, 1), self.tables(len(found)))
