"""GLM-Image's autoregressive stage: names and sizes of the files.

A GLM with grouped queries, biases, norms around both parts of a block, and rotary positions of three axes. One table
begins with the codes, then come special tokens, then words; the head has the rows of the first two. It draws a small
preview, then the picture; pixels are made by the diffusion model that is published with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lantern_hpu.core import Sampling
from lantern_hpu.errors import WeightsError
from lantern_hpu.files import reading
from lantern_hpu.models.config import ConditionConfig, TransformerConfig
from lantern_hpu.models.families.base import (
    Family,
    Published,
    check_keys,
    check_known,
    check_sizes,
    llama_recipe,
    within,
)
from lantern_hpu.models.files.checkpoint import Checkpoint, Recipe, folder_of, take
from lantern_hpu.models.files.names import Parts
from lantern_hpu.ops.grammar import NEVER

SAMPLING = {"glm-image": Sampling(1.0, 0.9, 50, 0.75)}
PIXELS = 32  # along a code
GRID = (32, 32)  # 1024 x 1024 pixels, where no size is asked for
PREVIEW = 16  # codes along the preview of a square picture
# Tokens of a framed prompt: at most, and classes of shorter ones
PREFIX, PREFIXES = 1024, (64, 256)
TEXT = "model.language_model."
LAYER = TEXT + "layers.{}."
CODEBOOK = "model.vqmodel.quantize.embedding.weight"
GENERATION = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}  # transformers' defaults
PROCESSOR = "GlmImageProcessor"  # whose rule for the preview's size is known
SPARE = "spare"  # the head's bias that forbids special tokens, which is in no file


def is_glm_image(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> bool:
    return LAYER.format(0) + "post_mlp_layernorm.weight" in checkpoint


def glm_image_config(checkpoint: Checkpoint, about: dict[str, Any]) -> TransformerConfig:
    text = about["text_config"]
    rope, first = text["rope_parameters"], LAYER.format(0)
    codes, heads = int(about["vq_config"]["num_embeddings"]), int(text["num_attention_heads"])
    rows, dim = checkpoint.shapes[TEXT + "embed_tokens.weight"]
    head_dim = dim // heads
    vocabulary = checkpoint.shapes["lm_head.weight"][0]
    check_known(
        checkpoint,
        ("image_start_token_id", int(about["image_start_token_id"]), codes),
        ("text_config.vision_vocab_size", text.get("vision_vocab_size", vocabulary), vocabulary),
    )
    config = TransformerConfig(
        vocab_size=vocabulary,
        dim=dim,
        layers=int(text["num_hidden_layers"]),
        heads=heads,
        kv_heads=checkpoint.shapes[first + "self_attn.k_proj.weight"][0] // head_dim,
        ffn_dim=checkpoint.shapes[first + "mlp.down_proj.weight"][1],
        prefix=PREFIX,
        grid=GRID,
        norm_eps=float(text["rms_norm_eps"]),
        rope_base=float(rope["rope_theta"]),
        rope="mrope",
        rope_pairs="half",
        rope_prefix="identity",
        embed_rows=rows,
        spare_codes=vocabulary - codes,
        qkv_bias=first + "self_attn.q_proj.bias" in checkpoint,
        sandwich_norms=True,
        rotary_dim=int(head_dim * float(rope.get("partial_rotary_factor", 1.0))),
        rope_sections=tuple(rope["mrope_section"]),
        preview=PREVIEW,
        code_pixels=PIXELS,
        prefixes=PREFIXES,
        max_positions=int(text["max_position_embeddings"]),
    )
    check_sizes(checkpoint, text, config)
    rotated = rope.get("partial_rotary_factor", 1.0)
    own = {"attention_bias": config.qkv_bias, "partial_rotary_factor": rotated}
    check_keys(checkpoint, text, own)
    return config


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


def glm_image_recipe(config: TransformerConfig) -> Recipe:
    recipe = llama_recipe(config, TEXT) | {"target.head.bias": take(SPARE)}
    rows = paired_rows(config)
    for i in range(config.layers):
        goal, old = f"target.layers.{i}.", LAYER.format(i)
        for kind in ("weight", "bias")[: 1 + config.qkv_bias]:
            names = (f"{old}self_attn.{p}_proj.{kind}" for p in "qkv")
            recipe[f"{goal}attention.qkv.{kind}"] = take(*names, rows=rows)
        recipe[f"{goal}ffn.gate_up.weight"] = take(f"{old}mlp.gate_up_proj.weight")
        post = {"attention": "post_self_attn", "ffn": "post_mlp"}
        for part, name in post.items():
            recipe[f"{goal}{part}_post_norm.weight"] = take(f"{old}{name}_layernorm.weight")
    return recipe


def read_glm_image(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Published:
    check_processor(parts.text)
    config = glm_image_config(checkpoint, about)
    spare = torch.zeros(config.vocab_size)
    spare[config.codes :] = NEVER
    condition, recipe = ConditionConfig("tokens", frame="glm-image"), glm_image_recipe(config)
    codebook = checkpoint.shapes.get(CODEBOOK, (0, 0))[1]
    if codebook:
        recipe = {**recipe, "codebook.weight": take(CODEBOOK)}
    return Published(
        "glm-image",
        config,
        condition,
        checkpoint.beside(SPARE, spare),
        recipe,
        codebook=codebook,
        sampling=generation_sampling(parts.target),
        diffusion=True,
    )


def check_processor(folder: Path | None) -> None:
    """Raise a WeightsError where another program frames prompts, and so sizes previews by a rule of its own."""
    file = None if folder is None else folder / "processor_config.json"
    if file is None or not file.is_file():
        return
    with reading(file, "download it again") as said:
        kind = said.get("processor_class", PROCESSOR)
    if kind != PROCESSOR:
        why = f"processor_class is {kind}, where {PROCESSOR} is known"
        raise WeightsError(f"the preview's size is not known for {folder}", why)


def generation_sampling(
    folder: Path, name: str = "generation_config.json", guidance: float = 1.0
) -> Sampling | None:
    """Of the generation_config.json beside the weights; None where there is none.

    What it leaves out is as transformers has it, and so diffusers' pipeline: the most probable 50.
    """
    file = folder_of(folder) / name
    if not file.is_file():
        return None
    with reading(file, "download it again") as said:
        usual = GENERATION | {name: said[name] for name in GENERATION if said.get(name) is not None}
        if not said.get("do_sample", False):
            usual["temperature"] = 0.0
        temperature, top_p = float(usual["temperature"]), float(usual["top_p"])
        return Sampling(guidance, temperature, int(usual["top_k"]), top_p)


IGNORED = ("model.visual.", "model.vqmodel.")  # which read pictures
KEYS = {
    "hidden_act": "silu",
    "rope_parameters.rope_type": "default",
    "layer_types": "full_attention",
}
FAMILY = Family(
    is_glm_image, read_glm_image, SAMPLING, IGNORED, True, PIXELS, within("text_config", KEYS)
)
