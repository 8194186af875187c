"""What the Triton kernels share: how they become operators of torch, and how large a program is.

An operator is one call that compilers and recordings need not look into. Its results are new tensors; only
`rotate_into` writes into its arguments, as its schema says. It has no backward: the plain forms of
`lantern_hpu.kernels` serve where a gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

LIBRARY = Library("lantern_hpu", "FRAGMENT")
# Elements a thread should hold: more spill from its registers, fewer leave it waiting for the others.
A_THREAD, WARP = 16, 32
# Sums and products keep their roundings apart, as in torch: ties of the plain forms stay ties.
EXACTLY = {"enable_fp_fusion": False}


def operator(schema: str, shaped: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Make the decorated function the operator `lantern_hpu::NAME`.

    Args:
        schema: name, arguments and results, in torch's notation.
        shaped: the same for tensors without storage; it says what the results look like.
    """
    name = schema.partition("(")[0]

    def register(function: Callable[..., Any]) -> Any:
        LIBRARY.define(schema)
        LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        LIBRARY.impl(name, shaped, "Meta")
        return getattr(torch.ops.lantern_hpu, name).default

    return register


def block_of(size: int) -> int:
    """The power of two that a program's vector of `size` entries takes."""
    return 1 << (size - 1).bit_length()


def warps(block: int) -> int:
    """Warps of a program that holds vectors of `block` entries."""
    return min(32, max(4, block // (A_THREAD * WARP)))


def packed(x: Tensor) -> Tensor:
    """x [B, ...] with each image's part in one piece; images may share theirs (`expand`)."""
    return x if x[0].is_contiguous() else x.contiguous()
