"""GLM-Image's autoregressive stage: names and sizes of the files.

A GLM with grouped queries, biases, norms around both parts of a block, and rotary positions of three axes. One table
begins with the codes, then come special tokens, then words; the head has the rows of the first two. It draws a small
preview, then the picture; pixels are made by the diffusion model that is published with it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.core import Sampling
from lantern_hpu.errors import WeightsError
from lantern_hpu.files import reading
from lantern_hpu.models.config import TransformerConfig, VisionConfig
from lantern_hpu.models.families.base import (
    HEAD,
    Family,
    Files,
    check_keys,
    llama_config,
    llama_recipe,
)
from lantern_hpu.models.files.checkpoint import Source, Stored
from lantern_hpu.models.files.names import settings_beside
from lantern_hpu.ops.sampling import NEVER

TEXT = "model.language_model."
PROCESSOR = "GlmImageProcessor"  # whose rule for the preview's size is known
VISUAL, QUANT = "model.visual.", "model.vqmodel.quant_conv."
# Of config.json and of the settings of pictures, the known values of those that change what is read
VISION_KEYS = {
    "vision_config.hidden_act": "gelu",
    "vision_config.attention_bias": True,
    "vision_config.layer_norm_eps": 1e-6,
    "vision_config.spatial_merge_size": 1,
}
PICTURES = {
    "patch_size": 16,
    "temporal_patch_size": 1,
    "merge_size": 1,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "resample": 3,
}
# Least and most pixels: in published files, in newer ones under "size", and where neither has them
PIXELS = ("min_pixels", "shortest_edge", 512**2), ("max_pixels", "longest_edge", 2048**2)
SOURCE_PREFIXES = (1536, 2560, 4608, 8704)  # of up to four sources of 1024 x 1024 and 512 words
SPARE = "spare"  # the head's bias that forbids special tokens, which is in no file


def glm_image_config(family: Family, files: Files) -> TransformerConfig:
    check_processor(files.parts.text)
    checkpoint = files.checkpoint
    text: dict[str, Any] = files.hf_config["text_config"]
    rope = text["rope_parameters"]
    codes = int(files.hf_config["vq_config"]["num_embeddings"])
    vocabulary = checkpoint.shapes[HEAD][0]
    sizes = {"image_start_token_id": codes, "text_config.vision_vocab_size": vocabulary}
    check_keys(checkpoint, files.hf_config, sizes)
    head_dim = checkpoint.shapes[HEAD][1] // int(text["num_attention_heads"])
    positions = int(text["max_position_embeddings"])
    rotated = float(rope.get("partial_rotary_factor", 1.0))
    config = llama_config(
        family,
        files,
        vocab_size=vocabulary,
        norm_eps=float(text["rms_norm_eps"]),
        rope_base=float(rope["rope_theta"]),
        spare_codes=vocabulary - codes,
        qkv_bias=f"{TEXT}layers.0.self_attn.q_proj.bias" in checkpoint,
        rotary_dim=int(head_dim * rotated),
        rope_sections=tuple(rope["mrope_section"]),
        max_positions=positions,
        source_prefixes=tuple(p for p in SOURCE_PREFIXES if p < positions),
    )
    own = {"attention_bias": config.qkv_bias, "partial_rotary_factor": rotated}
    check_keys(checkpoint, text, own)
    return config


def check_processor(folder: Path | None) -> None:
    """Raise a WeightsError where another program frames prompts, and so sizes previews by a rule of its own."""
    file = None if folder is None else folder / "processor_config.json"
    if file is None or not file.is_file():
        return
    with reading(file, "download it again") as stated:
        kind = stated.get("processor_class", PROCESSOR)
    if kind != PROCESSOR:
        why = f"processor_class is {kind}, where {PROCESSOR} is known"
        raise WeightsError(f"the preview's size is not known for {folder}", why)


def paired_rows(config: TransformerConfig) -> tuple[tuple[int, int], ...]:
    """Rows of queries, keys and values one under another, such that feature i of a head pairs with i + hd / 2.

    In the files i pairs with i + rotated / 2, and the features behind the rotated ones stay as they are. Here those
    form pairs too, whose angle is 0, so that every kernel that rotates whole heads serves.
    """
    size, half = config.head_dim, config.rotated // 2
    middle = half + size // 2
    rows = []
    for head in range(config.heads + config.kv):
        start = head * size
        pieces = (0, half), (2 * half, middle), (half, 2 * half), (middle, size)
        rows += [(start + a, start + b) for a, b in pieces if a < b]
    end = (config.heads + config.kv) * size
    return (*rows, (end, end + config.kv_width))


def vision_tower(files: Files) -> tuple[VisionConfig | None, Stored | None]:
    """What reads pictures, and its weights; None where the files lack it."""
    part = files.checkpoint.only(lambda name: name.startswith((VISUAL, QUANT)))
    part = part.renamed(lambda name: name.removeprefix(VISUAL).replace(QUANT, "quant_conv."))
    shapes = part.shapes
    if "patch_embed.proj.weight" not in shapes:
        return None, None
    patches = shapes["patch_embed.proj.weight"]
    stated: dict[str, Any] = files.hf_config["vision_config"]
    check_keys(files.checkpoint, files.hf_config, VISION_KEYS)
    settings = image_processor(files.parts.text)
    wrong = [name for name, value in PICTURES.items() if settings.get(name) != value]
    problem = ""
    if not settings:
        problem = "preprocessor_config.json, which says how pictures are read, is missing"
    elif wrong:
        problem = f"preprocessor_config.json has other values than known: {', '.join(wrong)}"
    named = settings.get("size") or {}
    limits = [
        math.isqrt(int(settings.get(old) or named.get(new) or usual)) for old, new, usual in PIXELS
    ]
    config = VisionConfig(
        dim=patches[0],
        layers=files.checkpoint.count(f"{VISUAL}blocks."),
        heads=int(stated["num_heads"]),
        ffn_dim=shapes["blocks.0.mlp.fc1.weight"][0],
        patch=patches[-1],
        side=math.isqrt(shapes["embeddings.position_embedding.weight"][0]),
        code_dim=shapes["quant_conv.weight"][0],
        least=limits[0],
        most=limits[1],
        problem=problem,
    )
    return config, Stored(part)


def image_processor(folder: Path | None) -> dict[str, Any]:
    """Settings of pictures, from a file of their own or, in newer folders, from the processor's; empty without both."""
    if folder is None:
        return {}
    settings = settings_beside(folder, "preprocessor_config.json")
    return settings or settings_beside(folder, "processor_config.json").get("image_processor", {})


def glm_image_recipe(family: Family, files: Files, config: TransformerConfig) -> dict[str, Source]:
    recipe = llama_recipe(family, files, config)
    recipe["target.head.bias"] = Source.of(SPARE)
    rows = paired_rows(config)
    for i in range(config.layers):
        ours, theirs = f"target.layers.{i}.", f"{TEXT}layers.{i}."
        for kind in ("weight", "bias")[: 1 + config.qkv_bias]:
            name = f"{ours}attention.qkv.{kind}"
            recipe[name] = replace(recipe[name], rows=rows)
        recipe[f"{ours}ffn.gate_up.weight"] = Source.of(f"{theirs}mlp.gate_up_proj.weight")
        for part, name in (("attention", "post_self_attn"), ("ffn", "post_mlp")):
            recipe[f"{ours}{part}_post_norm.weight"] = Source.of(f"{theirs}{name}_layernorm.weight")
    return recipe


def spare_bias(config: TransformerConfig) -> dict[str, Tensor]:
    bias = torch.zeros(config.vocab_size)
    bias[config.codes :] = NEVER
    return {SPARE: bias}


GLM_IMAGE = Family(
    "glm-image",
    Sampling(1.0, 0.9, 50, 0.75),
    marker="post_mlp_layernorm.weight",
    frame="glm-image",
    model=TEXT,
    ignored=("model.visual.", "model.vqmodel."),  # which read pictures
    normalized_codes=True,
    codebook="model.vqmodel.quantize.embedding.weight",
    sections=("text_config",),
    keys={
        "hidden_act": "silu",
        "rope_parameters.rope_type": "default",
        "layer_types": "full_attention",
    },
    sizes={
        "rope": "mrope",
        # Tokens of a framed prompt: at most, and classes of shorter ones
        "prefix": 1024,
        "prefixes": (64, 256),
        "grid": (32, 32),  # 1024 x 1024 pixels, where no size is asked for
        "preview": 16,  # codes along the preview of a square picture
        "code_pixels": 32,
        "sandwich_norms": True,
    },
    config=glm_image_config,
    recipe=glm_image_recipe,
    computed=spare_bias,
    generation="generation_config.json",
    diffusion=True,
    vision=vision_tower,
)
FAMILIES = (GLM_IMAGE,)
