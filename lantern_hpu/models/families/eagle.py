"""EAGLE drafters, published and of our own training: their kinds, and whether they belong to a target.

Of the published ones llamagen_drafter and llamagen2_drafter have neither an input norm nor query-key norms;
anole_drafter has both. A drafter holds no head: it uses its target's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lantern_hpu.errors import Arg, WeightsError, shell, words
from lantern_hpu.files import reading, reported_as, sha256
from lantern_hpu.models.config import DrafterConfig, TransformerConfig
from lantern_hpu.models.families.base import LLAMA, check_keys, head_norms, llama_block
from lantern_hpu.models.files.checkpoint import Checkpoint, Source, Stored, open_checkpoint
from lantern_hpu.models.files.names import DRAFTER, DRAFTER_WEIGHTS, settings_beside
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.text.frames import FRAMES
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.quantized import QuantizedLinear

BLOCK_SIZES = {"t2i": 256, "t2i2": 1024, "c2i": 576}  # `input_type` of their config.json
EPS = 1e-6
FITTING = "the one that was published with this target"
SPECULATORS = "speculators_model_type"  # in config.json of a drafter of that package
BUFFERS = ("rotary_emb.inv_freq",)
# Drafters of other kinds, by a tensor that only they have
OTHERS = {"EAGLE-3": r"^(midlayer\.|d2t$|t2d$)", "Medusa": r"^(medusa_heads?\.)?\d+\.\d+\."}
SAMPLED_ROWS = 64  # rows of the embedding compared with the target's
QUANTIZED_BY = {8: 0.02, 4: 0.2}  # of a row's length, what these bits change at most
ROUNDED = 0.005  # of their length: bfloat16 differs by 0.002 at most, a target tuned for another size by more


def open_drafter(path: Path, target: TransformerConfig) -> OpenedDrafter:
    return TrainedDrafter(path) if (path / DRAFTER).is_file() else PublishedDrafter(path, target)


class TrainedDrafter:
    """A drafter that `train` wrote; no weight is read yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.note = path, ""
        with reading(path / DRAFTER) as description:
            self.config = DrafterConfig(**description["options"])
            self.fingerprint = description["target"]

    def fill(self, drafter: Drafter, model: ImageModel, dtype: torch.dtype | None) -> str:
        """Read its weights, in the file's dtype if None is given. -> their digest"""
        if self.fingerprint != model.fingerprint:
            why = f"it was trained for another target than {model.name}"
            raise WeightsError(f"the drafter in {self.path} does not fit", why, Arg("model"))
        file = self.path / DRAFTER_WEIGHTS
        stored = Stored(open_checkpoint(file), digest=sha256(file))
        return stored.fill(drafter, dtype, model.target.device)


class PublishedDrafter:
    """A published drafter for a target of these sizes; no weight is read yet."""

    def __init__(self, path: Path, target: TransformerConfig) -> None:
        self.path, self.hf_config = path, settings_beside(path)
        self.checkpoint = open_checkpoint(path).renamed(lambda name: name.removeprefix("model."))
        self.note = self.checkpoint.note
        if SPECULATORS in self.hf_config:
            self.checkpoint = of_speculators(self.checkpoint, self.hf_config)
            self.hf_config = self.hf_config["transformer_layer_config"] | self.hf_config
        fc = self.checkpoint.shapes.get("fc.weight")
        biased = self.hf_config.get("bias", SPECULATORS not in self.hf_config)
        if fc and not biased and "fc.bias" not in self.checkpoint:
            self.checkpoint = self.checkpoint.with_tensor("fc.bias", torch.zeros(fc[0]))
        with reported_as(f"{path} does not describe a model"):
            self.config = eagle_config(self.checkpoint, self.hf_config, target)

    def fill(self, drafter: Drafter, model: ImageModel, dtype: torch.dtype | None) -> str:
        """Read its weights, in the file's dtype if None is given. -> their digest"""
        sizes, frame = drafter.config, FRAMES[model.config.condition.frame]
        # Image tokens come first in ours: see `chameleon`
        order = frame.order if sizes.embed_rows else None
        table = order.stretches(sizes.embed_rows or 0) if order else None
        recipe = {
            "embed.weight": Source.of("embed_tokens.weight", rows=table),
            "fc.weight": Source.of("fc.weight"),
            "fc.bias": Source.of("fc.bias"),
            **llama_block("block.", "layers.0."),
        }
        if not self.config.input_norm:
            del recipe["block.attention_norm.weight"]
        recipe |= head_norms("block.", "layers.0.", self.checkpoint, sizes)
        checkpoint = self.checkpoint
        if "embed_tokens.weight" not in checkpoint:  # speculators leaves out what is the target's
            own = model.target.embed(torch.arange(len(drafter.embed.weight)))
            checkpoint = checkpoint.with_tensor("embed_tokens.weight", own)
            recipe["embed.weight"] = Source.of("embed_tokens.weight")
        digest = Stored(checkpoint, recipe, BUFFERS).fill(drafter, dtype, model.target.device)
        if not self.hf_config.get("trusted"):
            check_family(drafter, model.target, self.path)
        return digest


OpenedDrafter = TrainedDrafter | PublishedDrafter


def of_speculators(checkpoint: Checkpoint, hf_config: dict[str, Any]) -> Checkpoint:
    """A drafter of the `speculators` package by EAGLE's own names; its type `eagle` is that of versions 0.1 to 0.4."""
    kind = hf_config[SPECULATORS]
    if kind != "eagle" or hf_config.get("layernorms"):
        kind = kind if kind != "eagle" else "eagle with layernorms"
        why = f"it is of the type {kind!r}; of the speculators package `eagle` without layernorms is read, which its"
        why += " versions 0.1 to 0.4 write; dflash, eagle3, mtp and peagle draft otherwise"
        raise WeightsError(f"the drafter {checkpoint.path} cannot be used", why, "an EAGLE drafter")

    kept = checkpoint.only(lambda name: not name.startswith(("lm_head.", "rotary_emb.")))
    return kept.rewritten([(r"^transformer\.", "layers.0."), (r"^fusion_fc\.", "fc.")])


def check_family(drafter: Drafter, target: Target, path: Path) -> None:
    """Raise a WeightsError unless a published drafter's embedding is that of its target, or its head."""
    mine = drafter.embed.weight
    rows = torch.linspace(0, target.config.vocab_size - 1, SAMPLED_ROWS, device=mine.device).long()
    tables = [(target.embed(rows), ROUNDED)]
    head = target.head
    if isinstance(head, nn.Linear):
        tables.append((head.weight[rows], ROUNDED))
    if isinstance(head, QuantizedLinear):
        tables.append((head.dequantized(mine.dtype, rows), QUANTIZED_BY[head.bits]))
    for table, rounded in tables:
        if bool((mine[rows].float() - table.float()).norm() <= rounded * table.float().norm()):
            return
    why = "its embedding is neither the target's embedding nor the target's head"
    hint = 'the one published with this target; or "trusted": true in its config.json, if you know better'
    raise WeightsError(f"the drafter {path} is for another target", why, hint)


def eagle_config(
    checkpoint: Checkpoint, hf_config: dict[str, Any], target: TransformerConfig
) -> DrafterConfig:
    """A published drafter's kind, if its width and number of tokens are those of the target."""
    unusable = f"the drafter {checkpoint.path} cannot be used"
    foreign = f"the drafter {checkpoint.path} is for another target"
    for kind, pattern in OTHERS.items():
        if any(re.search(pattern, name) for name in checkpoint.shapes):
            why = f"these are the tensors of {kind}, which drafts otherwise"
            raise WeightsError(unusable, why, "an EAGLE drafter")
    if target.sandwich_norms:
        why = "its target has norms behind attention and SwiGLU, which no published drafter has"
        hint = words(Arg("method", "scd"), f", or a drafter of `{shell('train drafter')}`")
        raise WeightsError(unusable, why, hint)
    mine, theirs = checkpoint.shapes.get("fc.weight"), (target.dim, 2 * target.dim)
    if mine != theirs:
        why = f"its fc.weight is {list(mine or ())}, the target needs {list(theirs)}"
        raise WeightsError(foreign, why, FITTING)
    block = hf_config.get("block_size", BLOCK_SIZES.get(str(hf_config.get("input_type"))))
    if block is not None and int(block) != target.tokens:
        why = f"it drafts images of {block} tokens, the target draws {target.tokens}"
        raise WeightsError(foreign, why, FITTING)
    check_keys(checkpoint, hf_config, LLAMA)
    # EAGLE's, where the file has none; but Lumina-mGPT's was trained on unshifted tokens: see `DrafterConfig`
    norm = checkpoint.shapes.get("layers.0.self_attn.q_norm.weight", ())
    shift = hf_config.get("drafter_shift", int(len(norm) < 2 or norm[0] == target.heads))
    if shift not in (0, 1):
        raise WeightsError(unusable, f"drafter_shift is {shift}", "0 or 1")
    gate = checkpoint.shapes.get("layers.0.mlp.gate_proj.weight")
    sizes = {
        "norm_eps": float(hf_config.get("rms_norm_eps", EPS)),
        "ffn_dim": gate[0] if gate else target.ffn_dim,
        "qk_norm": "rms" if len(norm) == 1 else bool(norm),
    }
    changed: dict[str, Any] = {n: size for n, size in sizes.items() if size != getattr(target, n)}
    # A LlamaGen drafter was trained without a mask for pads.
    input_norm, sees_pads = "layers.0.input_layernorm.weight" in checkpoint, target.rope == "2d"
    return DrafterConfig(input_norm, sees_pads, 1 if shift else 0, **changed)
