"""Dynamic trees: the most probable drafts, as many as the tree holds (EAGLE-2, arXiv 2406.16858)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lantern_hpu.decode.drafting.base import Drafts, EagleDrafting
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.decode.tree_tables import DynamicTables
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.transformer import Target
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.kv_cache import ScratchCache
from lantern_hpu.ops.sampling import gather, gather_rows, topk_tokens
from lantern_hpu.tree import DynamicTree


@dataclass
class Candidates:
    """All that the drafter guessed, n an image, in the order of their making."""

    tokens: Tensor  # [B, n] int32
    scores: Tensor  # [B, n] float32, log-probability of the path
    parents: Tensor  # [B, n] int32, the parent's number plus 1; 0 is the root


def expand(probs: Tensor, scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The most probable children of each node.

    Args:
        probs: [B, w, V] float32. scores: [B, w] float32, log-probability of the path to each node.

    Returns their tokens [B, w * count] int32 and scores [B, w * count].
    """
    tokens = topk_tokens(probs, count)  # [B, w, count]
    result = scores[..., None] + gather(probs, -1, tokens).log()
    return tokens.flatten(1), result.flatten(1)


class DynamicDrafting(EagleDrafting):
    """Takes the best children of the best nodes, and keeps the best of all."""

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

    def grow(self, length: Tensor, uniform: Tensor, state: DecodeState) -> Candidates:
        """
        Args:
            length: [R] committed positions. uniform: [B, 0], as nothing is drawn.
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
            guess = self.pass_on(level, read, guess, mask, cache, length, state)
            parent = place + first  # numbers of the frontier, plus 1
            first = first + new.shape[1]
            probs = self.sampler(guess, state, level + 1)  # [B, k, V]
            new, score = expand(probs, gather(score, 1, place), k)  # [B, k * k]
            tokens.append(new)
            scores.append(score)
            parents.append(gather(parent, 1, self.origin.expand_as(new)))
            place = topk_tokens(score, k)
            origin = self.origin[place]
        return Candidates(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1))

    def pass_on(
        self,
        level: int,
        tokens: Tensor,
        features: Tensor,
        mask: Tensor,
        cache: ScratchCache,
        length: Tensor,
        state: DecodeState,
    ) -> Tensor:
        """The frontier through the drafter: tokens [B, k], features [R, k, H] -> guesses [R, k, H]."""
        k = self.tree.top_k
        position = (length + level + 1)[:, None].expand(-1, k)
        index = self.positions.cache_index(length + level * k, k)
        full = self.positions.mask(length, self.positions.per_row(mask))
        return self.run(tokens, features, position, full, cache, index, state)

    def link(self, grown: Candidates, state: DecodeState) -> Drafts:
        chosen, tables = self.tables(grown.scores, grown.parents)
        drafts = gather(grown.tokens, 1, chosen)
        return Drafts(torch.cat([state.root[:, None], drafts], 1), None, tables)
