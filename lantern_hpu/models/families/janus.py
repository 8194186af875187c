"""Janus-Pro: names and sizes of the files.

A Llama with separate parts for all that concerns pictures: codes have embeddings 8 wide that an MLP widens, and a
head of two matrices draws the next one; the tokenizer is LlamaGen's VQ-16, in the same file. Names are those of the
authors' files, or of transformers' JanusForConditionalGeneration; the former are used here.
"""

from __future__ import annotations

from lantern_hpu.core import Sampling
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families.base import Family, Files, llama_config, llama_recipe, square
from lantern_hpu.models.files.checkpoint import Checkpoint, Source

LANGUAGE = "language_model.model."


def janus_config(family: Family, files: Files) -> TransformerConfig:
    """A picture has as many codes as the picture that the model reads has patches."""
    shapes = files.checkpoint.shapes
    codes, code_dim = shapes["gen_embed.weight"]
    vision = files.hf_config.get("vision_config") or {}
    vision = vision.get("params") or vision
    return llama_config(
        family,
        files,
        vocab_size=codes,
        grid=square(int(vision.get("image_size", 384)), int(vision.get("patch_size", 16))),
        code_dim=code_dim,
        head_hidden=shapes["gen_head.output_mlp_projector.weight"][0],
    )


def janus_recipe(family: Family, files: Files, config: TransformerConfig) -> dict[str, Source]:
    """Recipe of `target.*`, and of `words`, the language model's table."""
    recipe = llama_recipe(family, files, config)
    del recipe["target.head.weight"]
    recipe["words.weight"] = recipe.pop("target.embed.weight")
    recipe["target.embed.table.weight"] = Source.of("gen_embed.weight")
    for part in ("weight", "bias"):
        recipe |= {
            f"target.embed.fc1.{part}": Source.of(f"gen_aligner.layers.0.{part}"),
            f"target.embed.fc2.{part}": Source.of(f"gen_aligner.layers.2.{part}"),
            f"target.head.fc1.{part}": Source.of(f"gen_head.output_mlp_projector.{part}"),
            f"target.head.fc2.{part}": Source.of(f"gen_head.vision_head.{part}"),
        }
    return recipe


def janus_condition(family: Family, checkpoint: Checkpoint) -> ConditionConfig:
    rows = checkpoint.shapes[f"{LANGUAGE}embed_tokens.weight"][0]
    return ConditionConfig("tokens", frame=family.frame, rows=rows)


JANUS = Family(
    "janus",
    Sampling(5.0, 1.0, 0, 1.0),
    marker="gen_embed.weight",
    frame="janus",
    rename=(
        (r"^model\.language_model\.", LANGUAGE),
        (r"^model\.generation_embeddings\.", "gen_embed."),
        (r"^model\.generation_aligner\.fc1\.", "gen_aligner.layers.0."),
        (r"^model\.generation_aligner\.hidden_layers\.0\.", "gen_aligner.layers.2."),
        (r"^model\.generation_head\.proj_out\.", "gen_head.output_mlp_projector."),
        (r"^model\.generation_head\.", "gen_head."),
        (r"^model\.vqmodel\.", "gen_vision_model."),
        (r"^(gen_vision_model\.(en|de)coder)\.(down|up)\.(\d+)\.block", r"\1.conv_blocks.\4.res"),
        (r"^(gen_vision_model\.(en|de)coder)\.(down|up)\.", r"\1.conv_blocks."),
        (r"^(gen_vision_model\..*mid)\.block_1\.", r"\1.0."),
        (r"^(gen_vision_model\..*mid)\.attn_1\.", r"\1.1."),
        (r"^(gen_vision_model\..*mid)\.block_2\.", r"\1.2."),
    ),
    model=LANGUAGE,
    # Neither the language model's own head, nor what reads pictures
    reads=(LANGUAGE, "gen_embed.", "gen_aligner.", "gen_head."),
    tokenizer="gen_vision_model.",
    normalized_codes=True,
    sections=("language_config", "text_config"),
    other_keys={
        "vq_config.hidden_act": "gelu",
        "gen_aligner_config.params.projector_type": "mlp_gelu",
    },
    sizes={"norm_eps": 1e-6, "embed_rows": None},  # words have a table of their own
    config=janus_config,
    recipe=janus_recipe,
    condition=janus_condition,
)
