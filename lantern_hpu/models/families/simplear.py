"""SimpleAR: names and sizes of the files.

A plain Qwen2 with one table of 215,672 tokens: words, then the 64,000 codes of NVIDIA's Cosmos tokenizer. Ours begins
with the codes; pictures are squares without row ends, whose size no token says.
"""

from __future__ import annotations

from lantern_hpu.core import Sampling
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.models.families.base import (
    QWEN2,
    Family,
    Files,
    check_trained,
    llama_config,
    square,
)

SIZES = (512, 1024)  # pixels of a side that were trained; the last unless asked


def simplear_config(family: Family, files: Files) -> TransformerConfig:
    size = files.parts.image_size or SIZES[-1]
    check_trained(size, "SimpleAR", SIZES)
    return llama_config(family, files, grid=square(size))


SIMPLEAR = Family(
    "simplear",
    Sampling(6.0, 1.0, 0, 1.0),
    marker="q_proj.bias",
    rows=215672,  # a plain Qwen2 has others
    frame="simplear",
    keys=QWEN2,
    head_dim=64,  # of the 0.5B
    sizes={"norm_eps": 1e-6, "rope_base": 1e6, "qkv_bias": True},
    config=simplear_config,
    tied=True,
)
