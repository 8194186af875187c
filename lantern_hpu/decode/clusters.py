"""Clusters of codes that stand for one another when a draft is tried (GSD, arXiv 2508.07747).

A draft's cluster G are the codes that are close to it three times over: in the order of probability, in probability,
and in the codebook. It is accepted with probability min(1, p(G) / q(G)), and what is kept is the draft itself. The
residual stays [p - q]+, so the token's distribution moves, and nothing bounds by how much.

Codes without probability are of no cluster, so that a filter that removed them holds. `tests/reference.py` is the same
in plain Python.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lantern_hpu.errors import OptionError
from lantern_hpu.ops.buffers import arange32, constant
from lantern_hpu.ops.sampling import gather

TINY = torch.finfo(torch.float32).tiny
MOST_CODES = 46_340  # whose square fits int32


class Clusters(nn.Module):
    """The mass that drafts are accepted with when their clusters are tried."""

    def __init__(self, codes: Tensor, ranks: int) -> None:
        """
        Args:
            codes: [V, dim] float32, the codes' vectors.
            ranks: most places up and down that a cluster may reach.

        Raises:
            OptionError: there are more codes than `descending` can number.
        """
        super().__init__()
        if len(codes) > MOST_CODES:
            why = f"{len(codes)} codes, and their order is kept in int32 for up to {MOST_CODES}"
            raise OptionError("no clusters with this codebook", why, "--relax lambda-5")
        self.codes = constant(codes)
        self.token = constant(arange32(len(codes)))  # [V]
        self.offset = constant(arange32(2 * ranks + 1) - ranks)  # [2 ranks + 1]

    @property
    def width(self) -> int:
        """Numbers that are gathered for each draft."""
        return len(self.offset) * self.codes.shape[1]

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
        """Codes [B, n, 2 ranks + 1] around each token in the order of probability, and which are of its cluster.

        Args:
            p: [B, V] or [B, n, V]. token: [B, n]. limits: [B, 3].
        """
        order = descending(p)  # as p
        places = torch.zeros_like(order).scatter(-1, order.long(), self.token.expand_as(order))
        place = of_each(places, token[..., None]) + self.offset  # [B, n, 2 ranks + 1]
        code = of_each(order, place.clamp(min=0, max=p.shape[-1] - 1))
        ranks, gap, distance = limits[:, :, None, None].unbind(1)  # [B, 1, 1] each
        mine, mass = of_each(p, token[..., None]), of_each(p, code)
        apart = (self.codes[code] - self.codes[token][:, :, None]).square().sum(-1)
        close = (self.offset.abs() <= ranks) & ((mass - mine).abs() < gap) & (apart < distance)
        there = (place >= 0) & (place < p.shape[-1]) & (torch.minimum(mine, mass) > 0)
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
