"""Which codes are close to a code: the neighbours that may lend their mass."""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_hpu.errors import OptionError


def nearest(codebook: Tensor, k: int, chunk: int = 1024) -> Tensor:
    """The k nearest other codes of each code, by L2 distance of the raw rows, nearest first.

    Distances are computed in float64 and equal ones ordered by code, so that every device gets the same
    table.

    Args:
        codebook: [V, dim].
        k: 1 to V - 1.

    Returns [V, k] int32; no code is its own neighbour.

    Raises:
        OptionError: k is out of range.
    """
    size = len(codebook)
    if not 0 < k < size:
        raise OptionError(
            f"{k} neighbours were asked for", f"a codebook of {size} allows 1 to {size - 1}"
        )
    rows = codebook.detach().cpu().double()
    found = []
    for start in range(0, size, chunk):
        part = rows[start : start + chunk]
        distance = torch.cdist(part, rows, compute_mode="donot_use_mm_for_euclid_dist")
        own = torch.arange(start, start + len(part))
        distance[torch.arange(len(part)), own] = float("inf")
        found.append(distance.sort(dim=-1, stable=True).indices[:, :k])
    return torch.cat(found).int()
