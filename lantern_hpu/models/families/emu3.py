"""Emu3-Gen: names and sizes of the files.

A Llama with grouped queries, and one table of 184,622 tokens for words, signs and the 32,768 codes of a tokenizer of
its own. Ours begins with the codes, then what closes a row. Names are the authors' (`model.layers`), or transformers'
of any version; the former are used here.
"""

from __future__ import annotations

import math
import re
from typing import Any

from lantern_hpu.methods.request import Sampling
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families.base import Family, Published
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, llama_block, take
from lantern_hpu.models.files.names import Parts
from lantern_hpu.models.text.frames import Emu3Frame
from lantern_hpu.models.text.tokens import PROMPT_POSITIONS

TOKENS = 184622
CODES = 32768
AREA = 720 * 720  # pixels of a picture, where config.json does not say it
PIXELS = 8  # along a code
HEAD = 128  # width of a head
SAMPLING = {"emu3": Sampling(3.0, 1.0, 2048, 1.0)}
TOKENIZER = "vqmodel."


def emu3_name(name: str) -> str:
    name = re.sub(r"^(model\.text_model\.|text_model\.model\.)", "model.", name)
    return re.sub(r"^text_model\.lm_head\.", "lm_head.", name).replace("model.vqmodel.", TOKENIZER)


def is_emu3(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    return any(
        emu3_name(name) == "model.embed_tokens.weight" and shape[0] == TOKENS
        for name, shape in checkpoint.shapes.items()
    )


def emu3_config(checkpoint: Checkpoint, about: dict[str, Any]) -> TransformerConfig:
    language = about.get("text_config") or about
    rope = language.get("rope_parameters") or {}
    rows, dim = checkpoint.shapes["model.embed_tokens.weight"]
    keys = checkpoint.shapes["model.layers.0.self_attn.k_proj.weight"][0]
    heads = int(language.get("num_attention_heads", dim // HEAD))
    side = round(math.sqrt(int(about.get("image_area", AREA))) / PIXELS)
    return TransformerConfig(
        vocab_size=CODES + 1,
        dim=dim,
        layers=int(language.get("num_hidden_layers", 0)) or checkpoint.count("model.layers."),
        heads=heads,
        kv_heads=keys * heads // dim,
        ffn_dim=checkpoint.shapes["model.layers.0.mlp.gate_proj.weight"][0],
        prefix=PROMPT_POSITIONS,
        grid=(side, side),
        norm_eps=float(language.get("rms_norm_eps", 1e-5)),
        rope_base=float(language.get("rope_theta", rope.get("rope_theta", 1e6))),
        rope="1d",
        rope_pairs="half",
        rope_prefix="identity",
        embed_rows=rows,
        row_ends=True,
        code_pixels=PIXELS,
    )


def emu3_recipe(config: TransformerConfig) -> Recipe:
    order = Emu3Frame.order
    table = order.stretches(config.embed_rows or 0)
    recipe = {
        "target.embed.weight": take("model.embed_tokens.weight", rows=table),
        "target.norm.weight": take("model.norm.weight"),
        "target.head.weight": take("lm_head.weight", rows=order.first),
    }
    for i in range(config.layers):
        recipe |= llama_block(f"target.layers.{i}.", f"model.layers.{i}.")
    return recipe


def read_emu3(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    named = checkpoint.renamed(emu3_name)
    network = named.only(lambda name: not name.startswith(TOKENIZER))
    config, inside = emu3_config(network, about), named.under(TOKENIZER)
    tokenizer = inside if inside.shapes else None
    condition = ConditionConfig("tokens", frame="emu3")
    return Published("emu3", config, condition, network, emu3_recipe(config), tokenizer)


FAMILY = Family(
    recognises=is_emu3,
    read=read_emu3,
    ignored=("rotary_emb.inv_freq",),
    sampling=SAMPLING,
    normalized_codes=False,
    code_pixels=PIXELS,
)
