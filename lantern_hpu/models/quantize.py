"""The target's weights as 8-bit integers, through torchao: half of bfloat16's bytes to hold and to read."""

from __future__ import annotations

import logging

from lantern_hpu.errors import needing
from lantern_hpu.models.transformer import Target


def quantize_target(target: Target, kind: str) -> None:
    """Turn the matrices of the blocks into `int8` with a scale for each row; products stay in the model's dtype.

    Embedding, norms and head stay as they are, and the drafter, which the head serves too.

    Raises:
        OptionError: torchao is missing.
    """
    assert kind == "int8", kind
    logging.disable(logging.WARNING)  # it tells of kernels that only other devices have
    try:
        with needing("torchao", "it holds the 8-bit matrices", "quantize"):
            from torchao.quantization import Int8WeightOnlyConfig, quantize_
    finally:
        logging.disable(logging.NOTSET)
    quantize_(target.layers, Int8WeightOnlyConfig())
