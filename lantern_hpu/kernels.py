"""The three functions of a transformer that devices have faster forms of, in plain torch.

A backend hands out a `Kernels` with its own forms; each has its plain twin here and must agree with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [R, h, T, hd], k and v [R, kv, S, hd], additive mask [R, 1, T, S] -> [R, h, T, hd]."""
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 whatever the dtype."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def rotate(x: Tensor, rope: Tensor, interleaved: bool) -> Tensor:
    """Turn each pair of features by its angle.

    Args:
        x: [R, T, heads, hd].
        rope: [R, T, 2, hd / 2], cosines and sines of these tokens' positions.
        interleaved: pairs are (0, 1), (2, 3), ... (LlamaGen) or (0, hd/2), (1, hd/2 + 1), ... (Llama).
    """
    cos, sin = rope[:, :, None, 0], rope[:, :, None, 1]  # [R, T, 1, hd / 2]
    if interleaved:
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass(frozen=True)
class Kernels:
    """What the transformer calls."""

    attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = attention
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    rotate: Callable[[Tensor, Tensor, bool], Tensor] = rotate

    def names(self) -> dict[str, str]:
        """Each kernel and the function that serves it, for reports."""
        return {f.name: describe(getattr(self, f.name)) for f in fields(self)}


def describe(function: Callable[..., Tensor]) -> str:
    """`plain`, or the name of a device's own form."""
    return "plain" if function.__module__ == __name__ else function.__name__


PLAIN = Kernels()
