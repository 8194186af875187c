"""The contract of a drafting."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.decode.state import DecodeState


@dataclass
class Committed:
    """What a step added to the images."""

    hidden: Tensor  # [R, M, F] the target's features at all nodes, F = `Drafter.feature_width`
    path: Tensor  # [B, D + 1] the accepted nodes, from the root; the last one repeated
    tokens: Tensor  # [B, D + 1] the tokens after each of them: accepted drafts, then the bonus token repeated
    added: Tensor  # [B] how many of those are new, at least 1
    before: Tensor  # [B] image tokens in the cache before the step
    root: Tensor  # [B] token before those
    probs: Tensor  # [B, J, V] the target's, at the nodes that are judged
    uniform: Tensor | None = None  # what `Drafts` kept of the uniforms


class Drafting(nn.Module, ABC):
    """Makes the trees of a step; behind the last features it wants those of the target's `aux_layers`."""

    aux_layers: tuple[int, ...] = ()

    @abstractmethod
    def allocate(self, dtype: torch.dtype, device: torch.device, by_head: bool = False) -> Any:
        """A dataclass of preallocated tensors: `DecodeState.drafting`. For `by_head` see `KVCache.allocate`."""

    @abstractmethod
    def begin(self, hidden: Tensor, root: Tensor, rows: Tensor, state: DecodeState) -> None:
        """The images of `state.prefill` begin, and nothing of the others may change.

        `hidden` [RA, P, F] are the prefixes' features, `root` [A] first tokens, `rows` [RA] those of the batch.
        """

    @abstractmethod
    def draft(
        self, length: Tensor, uniform: Tensor, state: DecodeState
    ) -> Iterator[tuple[str, Any]]:
        """The stages by name, and what each made; the last makes the `Drafts`.

        `length` [B] is of committed positions, `uniform` [B, draws] this step's.
        """

    @abstractmethod
    def absorb(self, committed: Committed, state: DecodeState) -> None:
        """Take note of a step, which the state has counted."""

    def redraw(self, probs: Tensor, state: DecodeState) -> Tensor | None:
        """What the places after the root draw from the target's probabilities [B, W + 1, V]: [B, W + 1].

        None where drafts are verified against the distributions that they were drawn from.
        """
        return None
