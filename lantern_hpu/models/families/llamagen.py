"""LlamaGen: the names and sizes of its published files.

Its prefix is a caption through an MLP, or one class label. Names and shapes are those of FoundationVision's `.pt`
files and of the Hugging Face copies; both hold the same tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lantern_hpu.core import Sampling
from lantern_hpu.errors import WeightsError
from lantern_hpu.files import some_names
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families.base import Family, Files, agreed_size, llama_block, square
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, Source
from lantern_hpu.models.files.names import CODE_PIXELS

CAPTION_SLOTS = 120
HEAD_WIDTH, LARGE_HEAD_WIDTH = 64, 100  # the second is that of the 3B model, 3200 wide
SIZES = (256, 384, 512)
# Of the published models, by width and number of codes: B, L, XL, XXL, 3B
LAYERS = {
    (width, 16384): n for width, n in ((768, 12), (1024, 24), (1280, 36), (1536, 48), (3200, 24))
}
LABELS = "cls_embedding.embedding_table.weight"


def pt_block(ours: str, theirs: str) -> Recipe:
    """One layer by the names of the `.pt` files."""
    attention, ffn = f"{theirs}attention.", f"{theirs}feed_forward."
    return {
        f"{ours}attention.qkv.weight": Source.of(f"{attention}wqkv.weight"),
        f"{ours}attention.out.weight": Source.of(f"{attention}wo.weight"),
        f"{ours}attention_norm.weight": Source.of(f"{theirs}attention_norm.weight"),
        f"{ours}ffn_norm.weight": Source.of(f"{theirs}ffn_norm.weight"),
        f"{ours}ffn.gate_up.weight": Source.of(f"{ffn}w1.weight", f"{ffn}w3.weight"),
        f"{ours}ffn.down.weight": Source.of(f"{ffn}w2.weight"),
    }


def llamagen_recipe(family: Family, files: Files, config: TransformerConfig) -> dict[str, Source]:
    """Recipe of `target.*` and of the condition, `condition.*` or `classes.*`."""
    embed, head, block = "tok_embeddings", "output", pt_block
    if "embed_tokens.weight" in files.checkpoint:
        embed, head, block = "embed_tokens", "lm_head", llama_block
    recipe = {
        "target.embed.weight": Source.of(f"{embed}.weight"),
        "target.norm.weight": Source.of("norm.weight"),
        "target.head.weight": Source.of(f"{head}.weight"),
    }
    for i in range(config.layers):
        recipe |= block(f"target.layers.{i}.", f"layers.{i}.")
    if LABELS in files.checkpoint:
        return recipe | {"classes.weight": Source.of(LABELS)}
    return recipe | {
        "condition.fc1.weight": Source.of("cls_embedding.cap_proj.fc1.weight"),
        "condition.fc2.weight": Source.of("cls_embedding.cap_proj.fc2.weight"),
        "condition.uncond": Source.of("cls_embedding.uncond_embedding"),
    }


def llamagen_config(family: Family, files: Files) -> TransformerConfig:
    """Sizes of a target, from its tensors, its config.json, its file's name, and the image size if that was given."""
    checkpoint, hf_config = files.checkpoint, files.hf_config
    vocabulary, dim = embedding_shape(checkpoint)
    layers = layers_of(checkpoint, hf_config, dim)
    gates = "layers.0.feed_forward.w1.weight", "layers.0.mlp.gate_proj.weight"
    ffn = next((checkpoint.shapes[name][0] for name in gates if name in checkpoint), 0)
    if not layers or not ffn:
        names = some_names(sorted(checkpoint.shapes))
        raise WeightsError(f"{checkpoint.path} holds no layers", names)
    return TransformerConfig(
        vocab_size=vocabulary,
        dim=dim,
        layers=layers,
        heads=heads_of(checkpoint, hf_config, dim),
        ffn_dim=ffn,
        prefix=prefix_of(checkpoint),
        grid=square(agreed_size(files, stated_sizes(files), SIZES)),
        # What the Hub's copies say of it was never confirmed; the code that trained the weights has 1e-5.
        norm_eps=float(hf_config.get("rms_norm_eps", 1e-5)),
        rope_base=float(hf_config.get("rope_base", 10000.0)),
    )


def layers_of(checkpoint: Checkpoint, hf_config: Mapping[str, Any], dim: int) -> int:
    """How many layers there should be; those that the file lacks are then missed by name."""
    if "num_hidden_layers" in hf_config:
        return int(hf_config["num_hidden_layers"])
    present = checkpoint.count("layers.")
    # The published sizes have one width each; a smaller copy of one says its layers in config.json.
    published = LAYERS.get((dim, embedding_shape(checkpoint)[0]), present)
    return max(published, present)


def embedding_shape(checkpoint: Checkpoint) -> tuple[int, int]:
    for name in ("tok_embeddings.weight", "embed_tokens.weight"):
        if name in checkpoint:
            vocabulary, dim = checkpoint.shapes[name]
            return vocabulary, dim
    result = some_names(sorted(checkpoint.shapes))
    raise WeightsError(f"{checkpoint.path} holds no token embedding", f"it holds {result}")


def prefix_of(checkpoint: Checkpoint) -> int:
    """Slots of the condition: a label takes one."""
    if LABELS in checkpoint:
        return 1
    shape = checkpoint.shapes.get("cls_embedding.uncond_embedding")
    return shape[0] if shape else CAPTION_SLOTS


def heads_of(checkpoint: Checkpoint, hf_config: Mapping[str, Any], dim: int) -> int:
    """Number of heads, which no tensor's shape tells."""
    if "num_attention_heads" in hf_config:
        return int(hf_config["num_attention_heads"])
    width = LARGE_HEAD_WIDTH if dim == 3200 or dim % HEAD_WIDTH else HEAD_WIDTH
    if dim % width:
        why = f"its width is {dim}, which neither {HEAD_WIDTH} nor {LARGE_HEAD_WIDTH} divides"
        hint = f'"num_attention_heads" in a config.json next to {checkpoint.path.name}'
        raise WeightsError(f"the number of heads of {checkpoint.path} is unknown", why, hint)
    return dim // width


def stated_sizes(files: Files) -> dict[str, int]:
    """Pixels of an image's side, by what states them."""
    checkpoint = files.checkpoint
    known: dict[str, int] = {}
    if files.parts.image_size is not None:
        known["what was asked for or is known of it"] = files.parts.image_size
    if "block_size" in files.hf_config:
        block = int(files.hf_config["block_size"])
        known[f"block_size {block} of its config.json"] = math.isqrt(block) * CODE_PIXELS
    named = re.search(r"_(256|384|512)$", checkpoint.path.stem)
    if named:
        known[f"the file's name {checkpoint.path.name}"] = int(named[1])
    for name, shape in checkpoint.shapes.items():
        if name.endswith("freqs_cis"):
            side = math.isqrt(shape[0] - prefix_of(checkpoint))
            known["its table of positions"] = side * CODE_PIXELS
    return known


def labels_of(family: Family, checkpoint: Checkpoint) -> ConditionConfig:
    """One row of the table is of no class."""
    return ConditionConfig("classes", classes=checkpoint.shapes[LABELS][0] - 1)


def captions_of(family: Family, checkpoint: Checkpoint) -> ConditionConfig:
    width = checkpoint.shapes["cls_embedding.cap_proj.fc1.weight"][1]
    return ConditionConfig("t5", dim=width)


CLASS = Family(
    "llamagen-c2i",
    Sampling(4.0, 1.0, 2000, 1.0),  # sample_c2i.py; sample_c2i_ddp.py has 1.5 and 0
    marker=LABELS,
    # The Hugging Face copies lay the modules in `model.`, all but the head
    rename=((r"^(model\.)+", ""),),
    # Buffers that some files hold and that are computed here
    ignored=("freqs_cis", "causal_mask", "rotary_emb.inv_freq"),
    vq="vq_ds16_*.pt",
    normalized_codes=True,
    config=llamagen_config,
    recipe=llamagen_recipe,
    condition=labels_of,
)
TEXT = replace(
    CLASS,
    name="llamagen-t2i",
    sampling=Sampling(7.5, 1.0, 1000, 1.0),
    marker="cls_embedding.",
    condition=captions_of,
)
FAMILIES = (CLASS, TEXT)
