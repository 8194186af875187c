"""What the Triton kernels share: how large a program is, and how it rounds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Elements a thread should hold: more spill from its registers, fewer leave it waiting for the others.
A_THREAD, WARP = 16, 32
# Compute capability from which bfloat16 is native, and `tl.dot` multiplies by units
AMPERE = (8, 0)
# Vocabulary that one program holds; larger ones are shared out, or plain forms serve
LARGEST = 65536
PART = 16384  # tokens of one of several programs
# Sums and products keep their roundings apart, as in torch: ties of the plain forms stay ties.
EXACTLY = {"enable_fp_fusion": False}


class Form(NamedTuple):
    """How a kernel multiplies.

    Attributes:
        kernel: of `products.py`.
        rows, small_rows: that it serves, with a matrix of the model's number format and with one of 8 or 4 bits.
        columns, depth: of a program's block of the matrix. most_rows: of a program.
        stages: that a loop over blocks has, of which all but one lie in shared memory.
    """

    kernel: str
    rows: range
    small_rows: range
    columns: int
    depth: int
    warps: int
    stages: int = 1
    most_rows: int = 64

    def sized(self, rows: int, x_bytes: int, column_bytes: int) -> Form:
        """For so many rows, in numbers of so many bytes; column_bytes: of all matrices' numbers in a column.

        `dot` halves rows and depth for numbers of 4 bytes, and has as many stages as any card's shared memory takes.
        """
        if self.kernel != "dot":
            return self._replace(most_rows=block_of(rows))
        wide = x_bytes // 2
        block = max(FEWEST, min(block_of(rows), self.most_rows // wide))
        stage = self.depth // wide * (block * x_bytes + self.columns * column_bytes)
        stages = min(self.stages, 1 + SHARED // stage)
        return self._replace(depth=self.depth // wide, most_rows=block, stages=stages)


FEWEST = 16  # rows or columns that a product of matrices takes
# Bytes for blocks under way, of the 99 KB that a program has on the smallest card
SHARED = 90 * 1024
FEW, MORE, NONE = range(1, 9), range(9, 65), range(0)
# One of 8 or 4 bits has no form of cuBLAS's: in a step it would be widened first, five bytes a number
SMALL_ROWS = 256
# A thread of `multiply_add` holds 8 numbers of a block: else rows and columns pass through shared memory
FORMS = {
    "multiply_add 2x256": Form("multiply_add", FEW, FEW, 2, 256, 2),
    "multiply_add 2x512": Form("multiply_add", FEW, FEW, 2, 512, 4),
    "multiply_add 4x256": Form("multiply_add", FEW, FEW, 4, 256, 4),
    "dot 16x128": Form("dot", MORE, MORE, 16, 128, 2, 5),
    "dot 32x128": Form("dot", MORE, range(9, 129), 32, 128, 4, 4),
    "dot 64x64": Form("dot", NONE, range(33, SMALL_ROWS + 1), 64, 64, 8, 4, 128),
    "dot 128x64": Form("dot", NONE, range(65, SMALL_ROWS + 1), 128, 64, 8, 3, 128),
}


def has_matrix_units(device: torch.device) -> bool:
    """Whether `tl.dot` multiplies by them."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= AMPERE


def block_of(size: int) -> int:
    """The power of two that a program's vector of `size` entries takes."""
    return 1 << (size - 1).bit_length()


def warps(block: int) -> int:
    """Warps of a program that holds vectors of `block` entries."""
    return min(32, max(4, block // (A_THREAD * WARP)))


def packed(x: Tensor) -> Tensor:
    """x [B, ...] with each image's part in one piece; images may share theirs (`expand`)."""
    return x if x[0].is_contiguous() else x.contiguous()
