"""Published EAGLE drafters: their names, their kinds, and whether they belong to a target.

llamagen_drafter and llamagen2_drafter have neither an input norm nor query-key norms; anole_drafter has both. A
drafter holds no head: it uses its target's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lantern_hpu.errors import WeightsError
from lantern_hpu.models.chameleon import FIRST_IMAGE_TOKEN
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.transformer import Target, TransformerConfig
from lantern_hpu.models.weights import (
    Checkpoint,
    Recipe,
    describing,
    fingerprint,
    llama_block,
    open_checkpoint,
    pour,
    settings_beside,
    shapes_only,
    take,
)

BLOCK_SIZES = {"t2i": 256, "t2i2": 1024, "c2i": 576}  # `input_type` of their config.json
EPS = 1e-6
FITTING = "the one that was published with this target"
SAMPLED_ROWS = 64  # rows of the embedding compared with the target's


def open_drafter(path: Path) -> tuple[Checkpoint, dict[str, Any]]:
    """A drafter's tensors and its config.json."""
    return open_checkpoint(path).within("module."), settings_beside(path)


def recipe_of(config: TransformerConfig, input_norm: bool) -> Recipe:
    """By our names. Where the table holds words too, image tokens come first: see `chameleon`."""
    holds_words = config.embed_rows is not None
    first = FIRST_IMAGE_TOKEN if holds_words else 0
    return {
        "embed.weight": take("embed_tokens.weight", roll=first),
        "fc.weight": take("fc.weight"),
        "fc.bias": take("fc.bias"),
        **llama_block("block.", "layers.0.", input_norm, config.qk_norm),
    }


def load_drafter(
    path: Path, target: Target, dtype: torch.dtype | None = None
) -> tuple[Drafter, str]:
    """A published drafter for this target, and its fingerprint.

    Args:
        dtype: None keeps the file's.

    Raises:
        WeightsError: unreadable, misshapen, or trained for another target.
    """
    checkpoint, about = open_drafter(path)
    with describing(path):
        config = check_kind(checkpoint, about, target.config)
    head = target.head.weight
    input_norm = "layers.0.input_layernorm.weight" in checkpoint
    with shapes_only():
        drafter = Drafter(
            config,
            input_norm=input_norm,
            # A LlamaGen drafter was trained without a mask for pads.
            sees_pads=config.rope == "2d",
            shift=shift_of(about, path),
            kernels=target.kernels,
        )
    recipe = recipe_of(config, input_norm)
    pour(drafter, checkpoint, recipe, dtype, head.device)
    if not about.get("trusted"):
        check_family(drafter, target, path)
    return drafter, fingerprint(checkpoint, recipe)


def shift_of(about: dict[str, Any], path: Path) -> int:
    """`drafter_shift` of a drafter's config.json: see `Drafter`. EAGLE's, where it says nothing."""
    shift = about.get("drafter_shift", 1)
    if shift not in (0, 1):
        raise WeightsError(
            f"the drafter {path} cannot be used", f"drafter_shift is {shift}", "0 or 1"
        )
    return int(shift)


def check_kind(
    checkpoint: Checkpoint, about: dict[str, Any], config: TransformerConfig
) -> TransformerConfig:
    """The drafter's configuration, if its width, norms and number of tokens are those of the target."""
    mine, theirs = checkpoint.shapes.get("fc.weight"), (config.dim, 2 * config.dim)
    if mine != theirs:
        why = f"its fc.weight is {list(mine or ())}, the target needs {list(theirs)}"
        raise WeightsError(f"the drafter {checkpoint.path} is for another target", why, FITTING)
    block = about.get("block_size", BLOCK_SIZES.get(str(about.get("input_type"))))
    if block is not None and int(block) != config.tokens:
        why = f"it drafts images of {block} tokens, the target draws {config.tokens}"
        raise WeightsError(f"the drafter {checkpoint.path} is for another target", why, FITTING)
    gate = checkpoint.shapes.get("layers.0.mlp.gate_proj.weight")
    return replace(
        config,
        norm_eps=float(about.get("rms_norm_eps", EPS)),
        ffn_dim=gate[0] if gate else config.ffn_dim,
        qk_norm="layers.0.self_attn.q_norm.weight" in checkpoint,
    )


def check_family(drafter: Drafter, target: Target, path: Path) -> None:
    """A published drafter's embedding is a copy of its target's, or of its target's head, and never trained.

    Raises:
        WeightsError: it is neither.
    """
    mine = drafter.embed.weight
    rows = torch.linspace(0, target.config.vocab_size - 1, SAMPLED_ROWS, device=mine.device).long()
    for table in (target.embed.weight, target.head.weight):
        if torch.allclose(mine[rows].float(), table[rows].float(), rtol=0.02, atol=1e-3):
            return
    why = "its embedding is neither the target's embedding nor the target's head"
    hint = 'the one published with this target; or "trusted": true in its config.json, if you know better'
    raise WeightsError(f"the drafter {path} is for another target", why, hint)
