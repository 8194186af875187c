"""Janus-Pro: names and sizes of the files.

A Llama beside which everything about pictures is separate: codes have embeddings 8 wide that an MLP widens, and a
head of two matrices draws the next one; the tokenizer is LlamaGen's VQ-16, in the same file. Names are those of the
authors' files, or of transformers' JanusForConditionalGeneration; the former are used here.
"""

from __future__ import annotations

from typing import Any

from lantern_hpu.core import Sampling
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families.base import LLAMA, Family, Published, llama_config, within
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, llama_block, take
from lantern_hpu.models.files.names import Parts

GRID = (24, 24)  # 384 pixels, where no config.json says more
HEAD = 128  # width of a head in both sizes
SAMPLING = {"janus": Sampling(5.0, 1.0, 0, 1.0)}
LANGUAGE = "language_model.model."
DRAWING = (LANGUAGE, "gen_embed.", "gen_aligner.", "gen_head.")
TOKENIZER = "gen_vision_model."
# From transformers' names to the authors'
NAMES = (
    (r"^model\.language_model\.", LANGUAGE),
    (r"^model\.generation_embeddings\.", "gen_embed."),
    (r"^model\.generation_aligner\.fc1\.", "gen_aligner.layers.0."),
    (r"^model\.generation_aligner\.hidden_layers\.0\.", "gen_aligner.layers.2."),
    (r"^model\.generation_head\.proj_out\.", "gen_head.output_mlp_projector."),
    (r"^model\.generation_head\.", "gen_head."),
    (r"^model\.vqmodel\.", TOKENIZER),
    (r"^(gen_vision_model\.(?:en|de)coder)\.(?:down|up)\.(\d+)\.block", r"\1.conv_blocks.\2.res"),
    (r"^(gen_vision_model\.(?:en|de)coder)\.(?:down|up)\.", r"\1.conv_blocks."),
    (r"^(gen_vision_model\..*mid)\.block_1\.", r"\1.0."),
    (r"^(gen_vision_model\..*mid)\.attn_1\.", r"\1.1."),
    (r"^(gen_vision_model\..*mid)\.block_2\.", r"\1.2."),
)


def is_janus(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    return any(
        name.endswith(("gen_embed.weight", ".generation_embeddings.weight"))
        for name in checkpoint.shapes
    )


def janus_config(checkpoint: Checkpoint, about: dict[str, Any]) -> TransformerConfig:
    language = about.get("language_config") or about.get("text_config") or {}
    codes, code_dim = checkpoint.shapes["gen_embed.weight"]
    return llama_config(
        checkpoint,
        language,
        LANGUAGE,
        HEAD,
        vocab_size=codes,
        grid=grid_of(about),
        norm_eps=1e-6,
        rope_base=10000.0,
        embed_rows=None,  # words have a table of their own
        code_dim=code_dim,
        head_hidden=checkpoint.shapes["gen_head.output_mlp_projector.weight"][0],
    )


def grid_of(about: dict[str, Any]) -> tuple[int, int]:
    """Codes of a picture: as many as the picture that the model reads has patches."""
    vision = about.get("vision_config") or {}
    vision = vision.get("params") or vision
    side = int(vision.get("image_size", GRID[0] * 16)) // int(vision.get("patch_size", 16))
    return side, side


def janus_recipe(config: TransformerConfig) -> Recipe:
    """Recipe of `target.*`, and of `words`, the language model's table."""
    recipe = {
        "words.weight": take(f"{LANGUAGE}embed_tokens.weight"),
        "target.norm.weight": take(f"{LANGUAGE}norm.weight"),
        "target.embed.table.weight": take("gen_embed.weight"),
    }
    for part in ("weight", "bias"):
        recipe |= {
            f"target.embed.fc1.{part}": take(f"gen_aligner.layers.0.{part}"),
            f"target.embed.fc2.{part}": take(f"gen_aligner.layers.2.{part}"),
            f"target.head.fc1.{part}": take(f"gen_head.output_mlp_projector.{part}"),
            f"target.head.fc2.{part}": take(f"gen_head.vision_head.{part}"),
        }
    for i in range(config.layers):
        recipe |= llama_block(f"target.layers.{i}.", f"{LANGUAGE}layers.{i}.")
    return recipe


def read_janus(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    """The language model's own head, and what reads pictures, is left aside."""
    named = checkpoint.rewritten(NAMES)
    drawing = named.only(lambda name: name.startswith(DRAWING))
    config = janus_config(drawing, about)
    words = ConditionConfig(
        "tokens", frame="janus", rows=drawing.shapes[f"{LANGUAGE}embed_tokens.weight"][0]
    )
    inside = named.under(TOKENIZER)
    tokenizer = inside if inside.shapes else None
    return Published("janus", config, words, drawing, janus_recipe(config), tokenizer)


KEYS = {
    **within("language_config", LLAMA),
    **within("text_config", LLAMA),
    "vq_config.hidden_act": "gelu",
    "gen_aligner_config.params.projector_type": "mlp_gelu",
}
FAMILY = Family(is_janus, read_janus, SAMPLING, normalized_codes=True, keys=KEYS)
