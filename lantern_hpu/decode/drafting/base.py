"""The contract of a drafting, and what drafting with an EAGLE drafter has in common for all trees.

The drafter's entry i is made from the target's feature at cache position i and token i + 1, so its last committed
entry, L - 1, already holds the root; L = P + t is the number of committed positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.decode.positions import Positions
from lantern_hpu.decode.sampler import Sampler
from lantern_hpu.decode.spec import Spec, capacity
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.buffers import additive_mask, prefix_mask
from lantern_hpu.ops.kv_cache import KVCache, LayerCache, ScratchCache
from lantern_hpu.ops.sampling import gather_rows


@dataclass
class Committed:
    """What a step added to the images."""

    hidden: Tensor  # [R, M, F] the target's features at all nodes, F = `Drafter.feature_width`
    path: Tensor  # [B, D + 1] the accepted nodes, from the root; the last one repeated
    tokens: Tensor  # [B, D + 1] the tokens after each of them: accepted drafts, then the bonus token repeated
    added: Tensor  # [B] how many of those are new, at least 1
    probs: Tensor  # [B, I, V] the target's, at the nodes that are judged
    uniform: Tensor | None = None  # what `Drafts` kept of the uniforms


class Drafting(nn.Module, ABC):
    """Makes the trees of a step.

    Attributes:
        aux_layers: of the target, whose outputs it wants behind the last features.
    """

    aux_layers: tuple[int, ...] = ()

    @abstractmethod
    def allocate(self, dtype: torch.dtype, device: torch.device, by_head: bool = False) -> Any:
        """A dataclass of preallocated tensors, which becomes `DecodeState.drafting`.

        Args:
            by_head: see `KVCache.allocate`.
        """

    @abstractmethod
    def begin(self, hidden: Tensor, root: Tensor, rows: Tensor, state: DecodeState) -> None:
        """The images of `state.entry` begin, and nothing of the others may change.

        Args:
            hidden: [RA, P, F], the prefixes' features. root: [A], first tokens. rows: [RA] of the batch.
        """

    @abstractmethod
    def draft(
        self, length: Tensor, uniform: Tensor, state: DecodeState
    ) -> Iterator[tuple[str, Any]]:
        """The stages by name, and what each made; the last makes the `Drafts`.

        Args:
            length: [R] committed positions. uniform: [B, draws], this step's.
        """

    @abstractmethod
    def absorb(self, committed: Committed, state: DecodeState) -> None:
        """Take note of a step; `state.root` is still that of before."""

    def redraw(self, probs: Tensor, state: DecodeState) -> Tensor | None:
        """What the places after the root draw from the target's probabilities [B, W + 1, V]: [B, W + 1].

        None where drafts are verified against the distributions that they were drawn from.
        """
        return None


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
        self.positions = Positions(target.config, spec)
        self.sampler = Sampler(target, spec)
        self.width = spec.tree.depth + 1
        self.aux_layers = drafter.aux_layers

    def allocate(
        self, dtype: torch.dtype, device: torch.device, by_head: bool = False
    ) -> EagleState:
        config, spec = self.config, self.spec
        sizes = (1, spec.rows, capacity(config, spec.tree), config.kv, config.head_dim)
        shape = (spec.images, self.width)
        return EagleState(
            KVCache.allocate(*sizes, dtype, device, by_head),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(
                spec.rows, self.width, self.drafter.feature_width, dtype=dtype, device=device
            ),
            torch.zeros(spec.images, dtype=torch.int32, device=device),
        )

    def begin(self, hidden: Tensor, root: Tensor, rows: Tensor, state: DecodeState) -> None:
        """Entries 0 .. P-2 carry the prefix's features beside its words, or the filler token 0."""
        kept: EagleState = state.drafting
        entry, width, drafter = state.entry, self.config.prefix - 1, self.drafter
        slot = entry.slot.long()
        if width:
            mask = self.positions.causal[:width, :width].expand(len(rows), -1, -1)
            if not drafter.sees_pads:
                mask = prefix_mask(entry.valid[:, :width], mask)
            words = entry.prefix_tokens[:, drafter.shift :][:, :width]
            position = (self.positions.arange[:width] + 1).expand(len(rows), -1)
            rope = self.positions.rope(position, entry)
            index, mask = (
                self.positions.entry_index(rows, width),
                additive_mask(mask, hidden.dtype),
            )
            cache = kept.kv_cache.written(index, len(rows)).layers[0]
            drafter(words, hidden[:, :-1], rope, mask, cache, index)
        # The drafter owes the pair (feature of the last prefix position, root).
        owed = root if drafter.shift else entry.prefix_tokens[: len(root), -1]
        tokens, last = owed[:, None].expand(-1, self.width), hidden[:, -1:]
        kept.pending_tokens.index_copy_(0, slot, tokens)
        kept.pending_features.index_copy_(0, rows.long(), last.expand(-1, self.width, -1))
        kept.pending_count.index_fill_(0, slot, 1)

    def absorb(self, committed: Committed, state: DecodeState) -> None:
        """The path's features and the tokens after them are what the drafter has to catch up with."""
        kept: EagleState = state.drafting
        path, tokens = self.positions.per_row(committed.path), committed.tokens
        kept.pending_features.copy_(gather_rows(committed.hidden, path))
        if not self.drafter.shift:
            tokens = torch.cat([state.root[:, None], tokens[:, :-1]], 1)
        kept.pending_tokens.copy_(tokens)
        kept.pending_count.copy_(committed.added)

    def run(
        self,
        tokens: Tensor,  # [B, T]
        features: Tensor,  # [R, T, F], or guesses [R, T, H]
        position: Tensor,  # [R, T] that the guess is used at
        mask: Tensor,  # [R, T, S]
        cache: LayerCache,
        index: Tensor,  # [R * T] of the cache
        state: DecodeState,
    ) -> Tensor:
        """One pass of the drafter: guessed features [R, T, H]."""
        if not self.drafter.sees_pads:
            mask = mask & state.valid[:, None]
        rope, rows = self.positions.rope(position, state), self.positions.per_row(tokens)
        return self.drafter(rows, features, rope, additive_mask(mask, features.dtype), cache, index)

    def catch_up(self, length: Tensor, state: DecodeState) -> Tensor:
        """Add the pairs of the last step; entries past the real ones are overwritten. -> [R, 1, H]"""
        kept: EagleState = state.drafting
        pending = self.positions.per_row(kept.pending_count)  # [R]
        start = length - pending
        position = start[:, None] + 1 + self.positions.arange[: self.width]
        mask = self.positions.mask(start, self.positions.causal[: self.width, : self.width])
        index = self.positions.cache_index(start, self.width)
        cache = kept.kv_cache.layers[0]
        guess = self.run(
            kept.pending_tokens, kept.pending_features, position, mask, cache, index, state
        )
        return gather_rows(guess, (pending - 1)[:, None])

    def scratch(self, state: DecodeState) -> ScratchCache:
        """What the passes over this step's drafts write; the next step writes what was accepted of them."""
        return ScratchCache.beside(state.drafting.kv_cache.layers[0])
