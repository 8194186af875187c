"""LlamaGen: the names and sizes of its published files.

Its prefix is a caption through an MLP, or one class label. Names and shapes are those of FoundationVision's `.pt`
files and of the Hugging Face copies; both hold the same tensors.
"""

from __future__ import annotations

import math
import re
from typing import Any

from lantern_hpu.core import Sampling
from lantern_hpu.errors import WeightsError
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families.base import LLAMA, Family, Published
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, llama_block, some_names, take
from lantern_hpu.models.files.names import CODE_PIXELS, Parts

CAPTION_SLOTS = 120
HEAD, LARGE_HEAD = 64, 100  # width of a head; the second is that of the 3B model, 3200 wide
SIZES = (256, 384, 512)
# Of the published models, by width and number of codes: B, L, XL, XXL, 3B
LAYERS = {
    (width, 16384): n for width, n in ((768, 12), (1024, 24), (1280, 36), (1536, 48), (3200, 24))
}
CLASSES = 1000  # of ImageNet, for which labels are known
SAMPLING = {
    "llamagen-t2i": Sampling(7.5, 1.0, 1000, 1.0),
    "llamagen-c2i": Sampling(4.0, 1.0, 2000, 1.0),  # sample_c2i.py; sample_c2i_ddp.py has 1.5 and 0
}
# Buffers that some files hold and that are computed here
BUFFERS = ("freqs_cis", "causal_mask", "rotary_emb.inv_freq")


def is_llamagen(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    return any("cls_embedding." in name for name in checkpoint.shapes)


def by_class(checkpoint: Checkpoint) -> bool:
    return "cls_embedding.embedding_table.weight" in checkpoint


def pt_block(goal: str, old: str) -> Recipe:
    """One layer by the names of the `.pt` files."""
    attention, ffn = f"{old}attention.", f"{old}feed_forward."
    return {
        f"{goal}attention.qkv.weight": take(f"{attention}wqkv.weight"),
        f"{goal}attention.out.weight": take(f"{attention}wo.weight"),
        f"{goal}attention_norm.weight": take(f"{old}attention_norm.weight"),
        f"{goal}ffn_norm.weight": take(f"{old}ffn_norm.weight"),
        f"{goal}ffn.gate_up.weight": take(f"{ffn}w1.weight", f"{ffn}w3.weight"),
        f"{goal}ffn.down.weight": take(f"{ffn}w2.weight"),
    }


def llamagen_recipe(checkpoint: Checkpoint, layers: int) -> Recipe:
    """Recipe of `target.*` and of the condition, `condition.*` or `classes.*`."""
    embed, head, block = "tok_embeddings", "output", pt_block
    if "embed_tokens.weight" in checkpoint:
        embed, head, block = "embed_tokens", "lm_head", llama_block
    recipe = {
        "target.embed.weight": take(f"{embed}.weight"),
        "target.norm.weight": take("norm.weight"),
        "target.head.weight": take(f"{head}.weight"),
    }
    for i in range(layers):
        recipe |= block(f"target.layers.{i}.", f"layers.{i}.")
    if by_class(checkpoint):
        return recipe | {"classes.weight": take("cls_embedding.embedding_table.weight")}
    return recipe | {
        "condition.fc1.weight": take("cls_embedding.cap_proj.fc1.weight"),
        "condition.fc2.weight": take("cls_embedding.cap_proj.fc2.weight"),
        "condition.uncond": take("cls_embedding.uncond_embedding"),
    }


def llamagen_config(
    checkpoint: Checkpoint, about: dict[str, Any], size: int | None
) -> TransformerConfig:
    """Sizes of a target, from its tensors, its config.json, its file's name, and the image size if that was given."""
    vocabulary, dim = embedding_shape(checkpoint)
    layers = layers_of(checkpoint, about, dim)
    up = "layers.0.feed_forward.w1.weight", "layers.0.mlp.gate_proj.weight"
    ffn = next((checkpoint.shapes[name][0] for name in up if name in checkpoint), 0)
    if not layers or not ffn:
        names = some_names(sorted(checkpoint.shapes))
        raise WeightsError(f"{checkpoint.path} holds no layers", names)
    side = grid_side(checkpoint, about, size)
    return TransformerConfig(
        vocab_size=vocabulary,
        dim=dim,
        layers=layers,
        heads=heads_of(checkpoint, about, dim),
        ffn_dim=ffn,
        prefix=prefix_of(checkpoint),
        grid=(side, side),
        # What the Hub's copies say of it was never confirmed; the code that trained the weights has 1e-5.
        norm_eps=float(about.get("rms_norm_eps", 1e-5)),
        rope_base=float(about.get("rope_base", 10000.0)),
    )


def layers_of(checkpoint: Checkpoint, about: dict[str, Any], dim: int) -> int:
    """How many layers there should be; those that the file lacks are then missed by name."""
    if "num_hidden_layers" in about:
        return int(about["num_hidden_layers"])
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
    if by_class(checkpoint):
        return 1
    shape = checkpoint.shapes.get("cls_embedding.uncond_embedding")
    return shape[0] if shape else CAPTION_SLOTS


def heads_of(checkpoint: Checkpoint, about: dict[str, Any], dim: int) -> int:
    """Number of heads, which no tensor's shape tells."""
    if "num_attention_heads" in about:
        return int(about["num_attention_heads"])
    width = LARGE_HEAD if dim == 3200 or dim % HEAD else HEAD
    if dim % width:
        why = f"its width is {dim}, which neither {HEAD} nor {LARGE_HEAD} divides"
        hint = f'"num_attention_heads" in a config.json beside {checkpoint.path.name}'
        raise WeightsError(f"the number of heads of {checkpoint.path} is unknown", why, hint)
    return dim // width


def grid_side(checkpoint: Checkpoint, about: dict[str, Any], size: int | None) -> int:
    """Codes along an image's side; all sources that state it must agree."""
    known: dict[str, int] = {}
    if size is not None:
        known["what was asked for or is known of it"] = size // CODE_PIXELS
    if "block_size" in about:
        block = int(about["block_size"])
        known[f"block_size {block} of its config.json"] = math.isqrt(block)
    named = re.search(r"_(256|384|512)$", checkpoint.path.stem)
    if named:
        known[f"the file's name {checkpoint.path.name}"] = int(named[1]) // CODE_PIXELS
    for name, shape in checkpoint.shapes.items():
        if name.endswith("freqs_cis"):
            known["its table of positions"] = math.isqrt(shape[0] - prefix_of(checkpoint))
    if len(set(known.values())) > 1:
        says = "; ".join(f"{who} means {side * CODE_PIXELS} pixels" for who, side in known.items())
        hint = "leave --image-size out, or the file under its published name"
        raise WeightsError(f"the image size of {checkpoint.path} is contradictory", says, hint)
    if not known:
        hint = "--image-size " + " or ".join(map(str, SIZES))
        why = "neither its name nor a config.json says it"
        raise WeightsError(f"the image size of {checkpoint.path} is unknown", why, hint)
    return next(iter(known.values()))


def read_llamagen(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    # The Hugging Face copies lay the modules in `model.`, all but the head.
    bare = checkpoint.rewritten([(r"^(model\.)+", "")])
    config = llamagen_config(bare, about, parts.image_size)
    recipe = llamagen_recipe(bare, config.layers)
    if by_class(bare):
        classes = bare.shapes["cls_embedding.embedding_table.weight"][0] - 1
        if classes != CLASSES:
            why = f"it knows {classes} classes, labels are known for {CLASSES}"
            raise WeightsError(f"{parts.target} is of an unknown model family", why)
        labels = ConditionConfig("classes", classes=classes)
        return Published("llamagen-c2i", config, labels, bare, recipe)
    width = bare.shapes["cls_embedding.cap_proj.fc1.weight"][1]
    return Published("llamagen-t2i", config, ConditionConfig("t5", dim=width), bare, recipe)


FAMILY = Family(is_llamagen, read_llamagen, SAMPLING, BUFFERS, normalized_codes=True, keys=LLAMA)
