"""A small model widened to the sizes of a large one, so that it computes what it computed before.

Features and heads are repeated, and what reads repeated features has its weights divided by how often; where sizes
do not divide, zeros follow. A norm over repeated features is the norm of the features; zeros among them lower the mean
square by a share that the norm's weights and epsilon make up for. Layers are added whose output projections are zero:
they are computed like any other and add nothing. Codes that only the large vocabulary has are computed too, and a bias
of the head forbids them. The text side stays small, and padding makes the prefix as long as the large model's.

So drafts, acceptance and pictures are the small model's, while bytes and operations of a step are the large one's.
Function-preserving widening is Net2Net's idea (arXiv 1511.05641).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.errors import OptionError
from lantern_hpu.models.config import ModelConfig, TransformerConfig
from lantern_hpu.models.files.checkpoint import shapes_only
from lantern_hpu.models.files.load import OpenedModel
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.models.text.prefix import (
    CaptionConditioner,
    CaptionProjection,
    ClassConditioner,
    Conditioner,
    WordConditioner,
)
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.sampling import NEVER

# What must be alike for one model to compute what the other does
VARIANTS = "rope qk_norm kv_heads embed_rows code_dim head_hidden row_ends spare_codes head_dim word_layers".split()
SIZES = {"layers": "layers", "dim": "width", "ffn_dim": "FFN width", "vocab_size": "codes"}
GROUPS = {"qkv": 3, "gate_up": 2}  # matrices that hold several, one under another
PARTS = {"fc": 2}  # matrices that read several inputs, concatenated
SILENT = ("out", "down")  # what an added layer writes with
NOTE = (
    "{small} at the sizes of {large}: features and heads are repeated, and of added layers the output projections "
    "are zero, so it draws what {small} draws, each step at the larger model's cost"
)


# ------------------------------------------------------------------------------------ sizes


def stretched_config(config: ModelConfig, name: str, large: TransformerConfig) -> ModelConfig:
    """A model's sizes once it is widened; the grid stays.

    Args:
        name: of the known model, for messages. large: its sizes.
    """
    small, drafter = config.target, config.drafter
    check_fits(small, name, large)
    if drafter is not None:
        check_fits(drafter.sizes(small), name, large)
    share = kept_share(small, large)
    if drafter is not None:
        eps = None if drafter.norm_eps is None else drafter.norm_eps * share
        drafter = replace(drafter, ffn_dim=None, norm_eps=eps)
    condition, prefix = config.condition, max(small.prefix, large.prefix)
    # A label is one position; a drafter that attends to pads would attend to more of them
    if condition.kind == "classes" or (drafter is not None and drafter.sees_pads):
        prefix = small.prefix
    if condition.kind == "words":
        condition = replace(condition, positions=condition.positions or small.prefix)
    target = replace(
        small,
        vocab_size=large.vocab_size,
        dim=large.dim,
        layers=large.layers,
        heads=large.heads,
        ffn_dim=large.ffn_dim,
        prefix=prefix,
        norm_eps=small.norm_eps * share,
        spare_codes=large.vocab_size - small.vocab_size,
    )
    return replace(config, target=target, drafter=drafter, condition=condition)


def check_fits(small: TransformerConfig, name: str, large: TransformerConfig) -> None:
    """Raise an OptionError unless a model, or its drafter's block, can be widened to these sizes."""
    what = f"this model cannot be stretched to {name}"
    others = [v for v in VARIANTS if getattr(small, v) != getattr(large, v)]
    if others:
        differing = ", ".join(f"{v} {getattr(small, v)} and {getattr(large, v)}" for v in others)
        hint = "lantern-hpu models stretch llamagen-xl"
        raise OptionError(what, f"they differ in kind: {differing}", hint)
    less = [
        f"{word} {getattr(large, field)} of {getattr(small, field)}"
        for field, word in SIZES.items()
        if getattr(large, field) < getattr(small, field)
    ]
    if less:
        hint = "a larger one, such as llamagen-xl"
        raise OptionError(what, "it is smaller: " + ", ".join(less), hint)


def kept_share(small: TransformerConfig, large: TransformerConfig) -> float:
    """How much of the large width copies of the small one fill; a mean square is that share of the small one's."""
    return large.dim // small.dim * small.dim / large.dim


# ------------------------------------------------------------------------------------ weights


def repeat(x: Tensor, size: int, groups: int = 1) -> Tensor:
    """Rows of x [g n, ..] as often as they fit into [size, ..], each of the g groups by itself; then zeros."""
    parts, each = x.unflatten(0, (groups, -1)), size // groups  # [g, n, ..]
    copies = torch.cat([parts] * (each // parts.shape[1]), 1)
    zeros = copies.new_zeros(groups, each - copies.shape[1], *x.shape[1:])
    return torch.cat([copies, zeros], 1).flatten(0, 1)


def divide(weight: Tensor, inputs: int, parts: int = 1) -> Tensor:
    """Columns of a matrix [o, p i] for inputs that are repeated: [o, inputs]."""
    copies = inputs // weight.shape[1]
    return repeat(weight.T, inputs, parts).T / copies


def widen(name: str, old: Tensor, shape: Sequence[int], share: float) -> Tensor:
    """A parameter over more features, in float32; a table of codes keeps its rows.

    Args:
        name: its own, in the module. share: see `kept_share`.
    """
    *_, layer, leaf = name.split(".")
    old = old.float()
    if layer == "embed":
        return repeat(old.T, shape[1]).T
    if layer == "head":
        return divide(old, shape[1])
    rows = repeat(old, shape[0], GROUPS.get(layer, 1))
    if old.dim() == 2:
        return divide(rows, shape[1], PARTS.get(layer, 1))
    return rows if leaf == "bias" else rows * share**0.5


def random_weight(name: str, shape: Sequence[int]) -> Tensor:
    """Random numbers of the scale that keeps features at theirs; the same for a name on every device."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(*shape).normal_(std=shape[-1] ** -0.5, generator=generator)


def fill_layer(name: str, shape: Sequence[int]) -> Tensor:
    """A parameter of a layer that adds nothing."""
    layer = name.split(".")[-2]
    if layer in SILENT:
        return torch.zeros(*shape)
    return torch.ones(*shape) if len(shape) == 1 else random_weight(name, shape)


def forbid(shape: Sequence[int], allowed: int, dtype: torch.dtype) -> Tensor:
    """A head's bias [V] that leaves the first codes alone."""
    bias = torch.full(tuple(shape), max(NEVER, torch.finfo(dtype).min))
    bias[:allowed] = 0
    return bias


def fill_module(new: nn.Module, old: nn.Module, share: float, progress: Any) -> None:
    """Replace the parameters of a module on `meta`, one at a time, by the old one's widened."""
    known = dict(old.named_parameters())
    like = next(iter(known.values()))
    for name, goal in list(new.named_parameters()):
        shape, source = tuple(goal.shape), known.get(name)
        if name == "head.bias":
            result = forbid(shape, len(known["head.weight"]), like.dtype)
        elif source is None:
            result = fill_layer(name, shape)
        else:
            result = widen(name, source, shape, share)
            if len(result) < shape[0]:  # codes that the small vocabulary lacks
                spare = random_weight(name, (shape[0] - len(result), shape[1]))
                result = torch.cat([result, spare])
        place, _, leaf = name.rpartition(".")
        weight = result.to(like.dtype).contiguous()
        new.get_submodule(place)._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
        progress.update()
    new.requires_grad_(False).eval()


# ------------------------------------------------------------------------------------ models


def widen_condition(small: Conditioner, config: ModelConfig) -> Conditioner:
    """The same with features repeated, behind more padding."""
    dim, prefix = config.target.dim, config.target.prefix
    if isinstance(small, ClassConditioner):
        return ClassConditioner(nn.Embedding.from_pretrained(repeat(small.table.weight.T, dim).T))
    assert isinstance(small, CaptionConditioner)
    old, text = small.projection, small.text
    projection = CaptionProjection(old.uncond.shape[1], dim, prefix).to(old.uncond.dtype)
    weights = {
        "fc1.weight": repeat(old.fc1.weight, dim),
        "fc2.weight": divide(repeat(old.fc2.weight, dim), dim),
        "uncond": F.pad(old.uncond, (0, 0, prefix - len(old.uncond), 0)),
    }
    projection.load_state_dict(weights)
    if isinstance(text, WordConditioner):
        words = WordConditioner(config.condition, prefix)
        words.load_state_dict(text.state_dict())
        text = words.to(text.table.weight.dtype)
    return CaptionConditioner(text, projection.requires_grad_(False))


def stretch_model(
    opened: OpenedModel,
    name: str,
    large: TransformerConfig,
    dtype: torch.dtype | None,
    progress: Any,
) -> ImageModel:
    """The large model. Its defaults are the small one's, so that the same options draw the same picture.

    Args:
        name: of the known model. large: its sizes. dtype: None: as stored.
        progress: a bar of tqdm; each tensor is a step of it.
    """
    if opened.quantize:
        why = f"its matrices are {opened.quantize}"
        raise OptionError(f"{opened.name} cannot be widened", why, "the model as published")
    config = stretched_config(opened.config, name, large)
    small = opened.load(Placement(dtype))
    with torch.no_grad(), shapes_only():
        target = Target(config.target)
        drafter = Drafter(config.target, config.drafter) if config.drafter is not None else None
    share = kept_share(small.target.config, config.target)
    pairs = [(target, small.target), (drafter, small.drafter)]
    progress.reset(sum(len(list(new.parameters())) for new, _ in pairs if new is not None))
    for new, old in pairs:
        if new is not None and old is not None:
            fill_module(new, old, share, progress)
    title = f"{small.name} stretched to {name}"
    return replace(
        small,
        name=title,
        source=title,
        config=config,
        fingerprint=f"{small.fingerprint} stretched to {name}",
        target=target,
        drafter=drafter,
        fastest={},  # was measured at the small sizes
        condition=widen_condition(small.condition, config),
        notes=[*small.notes, NOTE.format(small=small.name, large=name)],
        _near={},
    )
