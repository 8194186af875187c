"""SimpleAR: names and sizes of the files.

A plain Qwen2 with one table of 215,672 tokens: words, then the 64,000 codes of NVIDIA's Cosmos tokenizer. Ours begins
with the codes; pictures are squares without row ends, whose size no token says.
"""

from __future__ import annotations

from typing import Any

from lantern_hpu.core import Sampling
from lantern_hpu.errors import OptionError
from lantern_hpu.models.config import ConditionConfig
from lantern_hpu.models.families.base import QWEN2, Family, Published, llama_config, llama_recipe
from lantern_hpu.models.files.checkpoint import Checkpoint
from lantern_hpu.models.files.names import CODE_PIXELS, Parts
from lantern_hpu.models.text.frames import SimpleArFrame

TOKENS, CODES = 215672, 64000  # rows of the table; a plain Qwen2 has other ones
HEAD = 64  # width of a head of the 0.5B, where no config.json says the heads
SIZES = (1024, 512)  # pixels of a side that were trained; the first unless asked
SAMPLING = {"simplear": Sampling(6.0, 1.0, 0, 1.0)}
HEAD_WEIGHT = "lm_head.weight"
EMBED, BIAS = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"


def is_simplear(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    return BIAS in checkpoint and checkpoint.shapes.get(EMBED, (0,))[0] == TOKENS


def read_simplear(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    size = parts.image_size
    if size not in (None, *SIZES):
        why = "SimpleAR was trained for 512 and 1024"
        raise OptionError(f"no SimpleAR draws {size} pixels", why, "--image-size 512 or 1024")
    side = (size or SIZES[0]) // CODE_PIXELS
    config = llama_config(
        checkpoint,
        about,
        "model.",
        HEAD,
        vocab_size=CODES,
        grid=(side, side),
        norm_eps=1e-6,
        rope_base=1e6,
        qkv_bias=True,
    )
    tied = HEAD_WEIGHT not in checkpoint and about.get("tie_word_embeddings", True)
    head = EMBED if tied else HEAD_WEIGHT
    recipe = llama_recipe(config, "model.", SimpleArFrame.order, head)
    condition = ConditionConfig("tokens", frame="simplear")
    return Published("simplear", config, condition, checkpoint, recipe)


FAMILY = Family(is_simplear, read_simplear, SAMPLING, keys=QWEN2)
