"""Which keys a query may attend to: boolean masks, and the additive form that attention takes."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(width: int) -> Tensor:
    """[width, width] bool: a query attends to what comes before it, and to itself."""
    return torch.ones(width, width, dtype=torch.bool).tril()


def prefix_mask(valid: Tensor, mask: Tensor) -> Tensor:
    """A causal mask over a left-padded sequence.

    A real token attends to real tokens before it; a pad to the pads before it, so that no row is empty and
    the drafter reads the same pad features on every device.

    Args:
        valid: [R, S] bool, False at pads; S = T, or the positions of a cache whose first T are the queries.
        mask: [T, S] or [R, T, S] bool, what each query attends to but for pads.

    Returns [R, T, S] bool.
    """
    return mask & (valid[:, None] | ~valid[:, : mask.shape[-2], None])


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean mask [R, T, S] as the additive one [R, 1, T, S] that attention takes.

    The floor is finite: a row that attends to nothing must not become NaN.
    """
    floor = torch.finfo(dtype).min
    return (~mask).to(dtype).mul(floor).unsqueeze(1)
