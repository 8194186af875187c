"""What is fixed when a step is built, and what its parts share: positions, masks, and laws from features."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lantern_hpu.config import Residual, Sampling
from lantern_hpu.constants import Constants, count_up
from lantern_hpu.models.transformer import Target, rope_table
from lantern_hpu.sampling import Settings, choose, choose_distinct, gather, laws, likeliest
from lantern_hpu.state import DecodeState, Shapes, capacity


@dataclass(frozen=True)
class Plan:
    """What is fixed when a step is built; a different plan is a different graph."""

    shapes: Shapes
    max_top_k: int = 0  # 0: no image uses top-k
    use_top_p: bool = False
    use_greedy: bool = False  # some image is greedy
    use_sampled: bool = True  # some image is sampled
    neighbours: int = 0  # K, neighbours kept; 0: no image lends their mass
    annealed: bool = False  # some image weighs its drafts by depth
    residual: Residual = "sound"


def settings_of(sampling: Sequence[Sampling], vocabulary: int) -> Settings:
    """Each image's settings as tensors [B] on the host; a filter that is off keeps everything."""

    def each(values: Iterable[float], dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(list(values), dtype=dtype)

    return Settings(
        each(s.cfg_scale for s in sampling),
        each(s.temperature or 1.0 for s in sampling),
        each((vocabulary if s.greedy else s.top_k or vocabulary for s in sampling), torch.int32),
        each(1.0 if s.greedy else s.top_p for s in sampling),
        each((s.greedy for s in sampling), torch.bool),
    )


class Slots(Constants):
    """Positions and masks of the cache, as constants on the device."""

    rope: Tensor
    slot: Tensor
    row_start: Tensor
    below: Tensor
    wide: Tensor

    def __init__(self, target: Target, shapes: Shapes) -> None:
        super().__init__()
        config, tree = target.config, shapes.tree
        self.rows, self.guidance = shapes.rows, shapes.guidance
        self.skips_pads = config.rope == "1d"
        size = capacity(config, tree)
        width = max(config.prefix, tree.depth + 1)
        self.constant("rope", rope_table(config, config.prefix + config.tokens + tree.depth + 1))
        self.constant("slot", count_up(size))  # [S]
        self.constant("row_start", count_up(shapes.rows) * size)  # [R]
        self.constant("below", torch.ones(width, width, dtype=torch.bool).tril())
        self.constant("wide", count_up(max(width, tree.size, tree.max_children)))

    def per_row(self, x: Tensor) -> Tensor:
        """[B, ...] -> [R, ...]: an image's rows always hold the same tokens at the same positions."""
        return torch.cat([x, x]) if self.guidance else x

    def turn(self, slot: Tensor, state: DecodeState) -> Tensor:
        """Rotations of slots [R, T]: [R, T, 2, hd / 2]. By slot in a grid; where text is 1-D, pads do not count."""
        if self.skips_pads:
            slot = (slot - state.pads[:, None]).clamp(min=0)
        return self.rope[slot].to(state.prefix.dtype)

    def flat(self, start: Tensor, width: int) -> Tensor:
        """Storage rows of `width` slots from start [R]: [R * width]."""
        return (self.row_start + start)[:, None].add(self.wide[:width]).flatten()

    def sees(self, start: Tensor, table: Tensor) -> Tensor:
        """What queries that follow `start` committed slots may see: those slots, and each other by table.

        Args:
            start: [R]. table: [T, X] bool, or one a row [R, T, X]; column x is slot start + x.

        Returns [R, T, S] bool.
        """
        offset = self.slot - start[:, None]  # [R, S]
        inside = (offset >= 0) & (offset < table.shape[-1])
        column = offset.clamp(0, table.shape[-1] - 1)
        table = table.expand(len(start), -1, -1)
        local = gather(table, 2, column[:, None].expand(-1, table.shape[1], -1))
        return (offset < 0)[:, None] | (local & inside[:, None])


class Sampler(nn.Module):
    """Hidden states to laws: the target's head, guidance and the sampling settings."""

    def __init__(self, target: Target, plan: Plan) -> None:
        super().__init__()
        self.head, self.plan = target.head, plan
        kernels = target.kernels
        self.laws, self.choose = kernels.law or laws, kernels.choose or choose
        self.choose_distinct = kernels.choose_distinct or choose_distinct

    def forward(self, hidden: Tensor, state: DecodeState) -> Tensor:
        """[R, T, H] -> [B, T, V] float32."""
        plan, logits = self.plan, self.head(hidden)
        guidance, filters = plan.shapes.guidance, (plan.max_top_k, plan.use_top_p)
        return self.laws(logits, state.settings, guidance, *filters)

    def token(
        self, laws: Tensor, greedy_laws: Tensor, uniform: Tensor, state: DecodeState
    ) -> Tensor:
        """One token an image [B]: drawn from laws [B, V], or the likeliest of greedy_laws [B, V]."""
        if not self.plan.use_greedy:
            return self.choose(laws, uniform)
        best = likeliest(greedy_laws, 1)[..., 0]
        if not self.plan.use_sampled:
            return best
        return torch.where(state.settings.greedy, best, self.choose(laws, uniform))

    def distinct(self, laws: Tensor, uniform: Tensor, state: DecodeState) -> Tensor:
        """Children of each node [B, w, c] from laws [B, w, V]: drawn, or the likeliest if greedy."""
        if not self.plan.use_greedy:
            return self.choose_distinct(laws, uniform)
        best = likeliest(laws, uniform.shape[-1])
        if not self.plan.use_sampled:
            return best
        drawn = self.choose_distinct(laws, uniform)
        return torch.where(state.settings.greedy[:, None, None], best, drawn)
