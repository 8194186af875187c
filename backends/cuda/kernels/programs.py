"""What the Triton kernels share: how large a program is, and how it rounds."""

from __future__ import annotations

from torch import Tensor

# Elements a thread should hold: more spill from its registers, fewer leave it waiting for the others.
A_THREAD, WARP = 16, 32
# Sums and products keep their roundings apart, as in torch: ties of the plain forms stay ties.
EXACTLY = {"enable_fp_fusion": False}


def block_of(size: int) -> int:
    """The power of two that a program's vector of `size` entries takes."""
    return 1 << (size - 1).bit_length()


def warps(block: int) -> int:
    """Warps of a program that holds vectors of `block` entries."""
    return min(32, max(4, block // (A_THREAD * WARP)))


def packed(x: Tensor) -> Tensor:
    """x [B, ...] with each image's part in one piece; images may share theirs (`expand`)."""
    return x if x[0].is_contiguous() else x.contiguous()
