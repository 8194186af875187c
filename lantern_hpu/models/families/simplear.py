"""SimpleAR: names and sizes of the files.

A plain Qwen2 with one table of 215,672 tokens: words, then the 64,000 codes of NVIDIA's Cosmos tokenizer. Ours begins
with the codes; pictures are squares without row ends, whose size no token says.
"""

from __future__ import annotations

from typing import Any

from lantern_hpu.errors import OptionError
from lantern_hpu.methods.request import Sampling
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families.base import Family, Published
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, llama_block, take
from lantern_hpu.models.files.names import CODE_PIXELS, Parts
from lantern_hpu.models.text.frames import SimpleArFrame
from lantern_hpu.models.text.tokens import PROMPT_POSITIONS

TOKENS, CODES = 215672, 64000  # rows of the table; a plain Qwen2 has other ones
HEAD = 64  # width of a head of the 0.5B, where no config.json says the heads
SIZES = (1024, 512)  # pixels of a side that were trained; the first unless asked
SAMPLING = {"simplear": Sampling(6.0, 1.0, 0, 1.0)}
EMBED, LAYER = "model.embed_tokens.weight", "model.layers.{}."


def is_simplear(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    biased = LAYER.format(0) + "self_attn.q_proj.bias" in checkpoint
    return biased and checkpoint.shapes.get(EMBED, (0,))[0] == TOKENS


def simplear_config(
    checkpoint: Checkpoint, about: dict[str, Any], size: int | None
) -> TransformerConfig:
    if size not in (None, *SIZES):
        why = "SimpleAR was trained for 512 and 1024"
        raise OptionError(f"no SimpleAR draws {size} pixels", why, "--image-size 512 or 1024")
    rope, (rows, dim) = about.get("rope_parameters") or {}, checkpoint.shapes[EMBED]
    heads = int(about.get("num_attention_heads", dim // HEAD))
    side = (size or SIZES[0]) // CODE_PIXELS
    return TransformerConfig(
        vocab_size=CODES,
        dim=dim,
        layers=int(about.get("num_hidden_layers", 0)) or checkpoint.count("model.layers."),
        heads=heads,
        kv_heads=checkpoint.shapes[LAYER.format(0) + "self_attn.k_proj.weight"][0] * heads // dim,
        ffn_dim=checkpoint.shapes[LAYER.format(0) + "mlp.gate_proj.weight"][0],
        prefix=PROMPT_POSITIONS,
        grid=(side, side),
        norm_eps=float(about.get("rms_norm_eps", 1e-6)),
        rope_base=float(about.get("rope_theta", rope.get("rope_theta", 1e6))),
        rope="1d",
        rope_pairs="half",
        rope_prefix="identity",
        embed_rows=rows,
        qkv_bias=True,
    )


def simplear_recipe(checkpoint: Checkpoint, config: TransformerConfig) -> Recipe:
    order = SimpleArFrame.order
    head = "lm_head.weight" if "lm_head.weight" in checkpoint else EMBED  # tied
    recipe = {
        "target.embed.weight": take(EMBED, rows=order.stretches(config.embed_rows or 0)),
        "target.norm.weight": take("model.norm.weight"),
        "target.head.weight": take(head, rows=order.first),
    }
    for i in range(config.layers):
        goal, old = f"target.layers.{i}.", LAYER.format(i)
        biases = (f"{old}self_attn.{part}_proj.bias" for part in "qkv")
        recipe |= {**llama_block(goal, old), f"{goal}attention.qkv.bias": take(*biases)}
    return recipe


def read_simplear(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    config = simplear_config(checkpoint, about, parts.image_size)
    condition = ConditionConfig("tokens", frame="simplear")
    return Published("simplear", config, condition, checkpoint, simplear_recipe(checkpoint, config))


FAMILY = Family(
    recognises=is_simplear,
    read=read_simplear,
    ignored=("rotary_emb.inv_freq",),
    sampling=SAMPLING,
    normalized_codes=False,
)
