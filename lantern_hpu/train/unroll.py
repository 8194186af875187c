"""The loss: how far the drafter's laws are from the target's, several drafts deep.

The target runs over a finished image once, with guidance both rows of it; its features h and its law p at every
token are what the drafter is to guess. Pass 1 of the drafter reads the target's features, pass d reads the
guesses of pass d - 1 wherever an image token stands. (In a tree only the last d - 1 entries are guesses; the pass is
one for all places at once.) What counts is the share of drafts that get accepted,
which for a drawn draft is sum min(p, q) (Leviathan et al. 2023); its gradient is poor where p and q do not meet, so
cross-entropy and the distance of the features help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.config import Sampling
from lantern_hpu.models.builtin import ImageModel
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.transformer import additive, prefix_mask, rope_table

CROSS, FEATURE = 0.3, 0.2  # weights of cross-entropy and feature distance beside 1 - overlap


class Lesson:
    """A batch of images seen by the target: what the drafter reads, and what it is to guess.

    N tokens, P condition slots; entry i of P + N - 2 holds the feature of slot i and the token of slot i + 1.
    """

    def __init__(self, model: ImageModel, prompts: Sequence[str], tokens: Tensor) -> None:
        """
        Args:
            tokens: [B, N] int64.
        """
        target, sampling = model.target, model.sampling
        config, self.sampling = target.config, sampling
        self.guidance = sampling.cfg_scale != 1
        prefix, valid = model.prefix(prompts, self.guidance)  # [R, P, H], [R, P]
        rows = tokens.repeat(2, 1) if self.guidance else tokens  # [R, N]
        length = config.prefix + config.tokens - 1
        seen = F.pad(valid, (0, length - valid.shape[1]), value=True)
        below = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        rope = rope_table(config, length).to(tokens.device, prefix.dtype)
        with torch.no_grad():
            x = torch.cat([prefix, target.embed(rows[:, :-1])], 1)
            mask = additive(prefix_mask(seen, below), x.dtype)
            self.hidden = target(x, rope.expand(len(x), -1, -1, -1), mask)  # [R, P + N - 1, H]
            self.first = (
                config.prefix - 1
            )  # the entry that holds token 0, from which the loss counts
            logits = target.head(self.hidden[:, self.first + 1 :])
            self.p = law(logits, sampling, self.guidance)  # [B, N - 1, V] of tokens 1 ..
        self.valid = seen[:, :-1]  # [R, T], T = P + N - 2 entries of the drafter
        self.below = below[:-1, :-1]  # [T, T]
        filler = rows.new_zeros(len(rows), config.prefix - 1)
        self.tokens = torch.cat([filler, rows[:, :-1]], 1)  # [R, T]
        self.rope = rope[1:].expand(len(rows), -1, -1, -1)  # [R, T, 2, hd / 2]

    def mask(self, drafter: Drafter) -> Tensor:
        """[R, 1, T, T] what the drafter's entries see."""
        everything = self.below.expand(len(self.valid), -1, -1)
        seen = everything if drafter.sees_pads else prefix_mask(self.valid, self.below)
        return additive(seen, self.hidden.dtype)


def logits_of(logits: Tensor, sampling: Sampling, guidance: bool) -> Tensor:
    """Logits [R, T, V] after guidance and temperature: [B, T, V] float32."""
    logits = logits.float()
    if guidance:
        conditional, unconditional = logits.chunk(2)
        logits = unconditional + sampling.cfg_scale * (conditional - unconditional)
    return logits / (sampling.temperature or 1.0)


def law(logits: Tensor, sampling: Sampling, guidance: bool) -> Tensor:
    """The law that tokens are drawn from [B, T, V], top-k and top-p included."""
    from lantern_hpu.sampling import beyond_top_k, beyond_top_p

    ready = logits_of(logits, sampling, guidance)
    each = torch.ones(len(ready), device=ready.device)
    if sampling.top_p < 1:
        ready = ready.masked_fill(
            beyond_top_p(ready.softmax(-1), each * sampling.top_p), float("-inf")
        )
    if 0 < sampling.top_k < ready.shape[-1]:
        ready = ready.masked_fill(
            beyond_top_k(ready, (each * sampling.top_k).int(), sampling.top_k), float("-inf")
        )
    return ready.softmax(-1)


class Unrolled(nn.Module):
    """The drafter with its loss, as one module: several processes then share its gradients."""

    def __init__(self, drafter: Drafter, head: nn.Linear, depth: int) -> None:
        """
        Args:
            head: the target's; it is not trained.
            depth: passes.
        """
        super().__init__()
        self.drafter, self.depth = drafter, depth
        self.head: Callable[[Tensor], Tensor] = head.forward  # not a submodule: its weights stay

    def forward(self, lesson: Lesson) -> tuple[Tensor, Tensor]:
        """The loss [], and the overlap of each pass [depth]."""
        mask, source = lesson.mask(self.drafter), lesson.hidden[:, :-1]
        losses, overlaps = [], []
        for level in range(self.depth):
            guess = self.drafter(lesson.tokens, source, lesson.rope, mask)
            loss, overlap = self.compare(guess, lesson, level)
            losses.append(loss)
            overlaps.append(overlap)
            # The condition is always read as the target has it; a tree begins after it.
            known = lesson.first + 1
            source = torch.cat([lesson.hidden[:, :known], guess[:, lesson.first : -1]], 1)
        return torch.stack(losses).mean(), torch.stack(overlaps).detach()

    def compare(self, guess: Tensor, lesson: Lesson, level: int) -> tuple[Tensor, Tensor]:
        """Loss and overlap [] of one pass; its entries rest on `level` true tokens after a true feature."""
        first = lesson.first + level
        logits = logits_of(self.head(guess[:, first:]), lesson.sampling, lesson.guidance)
        log_q, p = logits.log_softmax(-1), lesson.p[:, level:]
        overlap = torch.minimum(p, log_q.exp()).sum(-1).mean()
        cross = -(p * log_q).sum(-1).mean()
        goal = lesson.hidden[:, first + 1 :]
        near = F.smooth_l1_loss(guess[:, first:].float(), goal.float())
        return CROSS * cross + (1 - overlap) + FEATURE * near, overlap
