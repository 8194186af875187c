"""What the Triton kernels share: how large a program is, and how it rounds."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

# Elements a thread should hold: more spill from its registers, fewer leave it waiting for the others.
A_THREAD, WARP = 16, 32
LARGEST = 65536  # vocabulary that one program holds; for larger ones plain forms serve
# Sums and products keep their roundings apart, as in torch: ties of the plain forms stay ties.
EXACTLY = {"enable_fp_fusion": False}


class Form(NamedTuple):
    """How a kernel multiplies: columns and depth of a program's block of the matrix, and for how many rows."""

    kernel: str  # of `products.py`
    rows: range
    columns: int
    depth: int
    warps: int
    stages: int = 1


FEW, MORE = range(1, 9), range(9, 65)
FORMS = {
    "multiply_add 2x256": Form("multiply_add", FEW, 2, 256, 4),
    "multiply_add 2x512": Form("multiply_add", FEW, 2, 512, 4),
    "multiply_add 4x256": Form("multiply_add", FEW, 4, 256, 4),
    "dot 16x128": Form("dot", MORE, 16, 128, 2, 5),
    "dot 32x128": Form("dot", MORE, 32, 128, 4, 4),
}


def block_of(size: int) -> int:
    """The power of two that a program's vector of `size` entries takes."""
    return 1 << (size - 1).bit_length()


def warps(block: int) -> int:
    """Warps of a program that holds vectors of `block` entries."""
    return min(32, max(4, block // (A_THREAD * WARP)))


def packed(x: Tensor) -> Tensor:
    """x [B, ...] with each image's part in one piece; images may share theirs (`expand`)."""
    return x if x[0].is_contiguous() else x.contiguous()
