"""A small model widened to the sizes of a large one, so that it computes what it computed before.

Features and heads are repeated, and whatever reads repeated features has its weights divided by how often; where sizes
do not divide, zeros follow. A norm over repeated features is the norm of the features; zeros among them lower the mean
square by a share that the norm's weights and epsilon make up for. Layers are added whose output projections are zero:
they are computed like any other and add nothing. Codes that only the large vocabulary has are computed too, and a bias
of the head forbids them. The text side stays small, and padding makes the prefix as long as the large model's.

So drafts, acceptance and pictures are the small model's, while bytes and operations of a step are the large one's.
Function-preserving widening is Net2Net's idea (arXiv 1511.05641).
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from lantern_hpu.errors import OptionError, choices
from lantern_hpu.models.config import ModelConfig, TransformerConfig
from lantern_hpu.models.files.checkpoint import shapes_only
from lantern_hpu.models.files.load import Opened
from lantern_hpu.models.files.names import Given
from lantern_hpu.models.model import ImageModel, Placement
from lantern_hpu.models.text.prefix import Conditioner, FixedPrefix, Prefix, wordless
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.ops.grammar import NEVER
from lantern_hpu.zoo import registry
from lantern_hpu.zoo.registry import KnownModel

# ------------------------------------------------------------------------------------------- sizes

# Known models for their sizes alone, by short names. Needs no torch.

LLAMAGEN = {
    "llamagen-b": "llamagen-c2i-b-256",
    "llamagen-l": "llamagen-c2i-l-256",
    "llamagen-xl": "llamagen-t2i-256",
    "llamagen-xxl": "llamagen-c2i-xxl-384",
    "llamagen-3b": "llamagen-c2i-3b-384",
}


def stretch_sizes(name: str, given: Given = Given()) -> KnownModel:
    """The known model that `--stretch` means.

    Args:
        given: parts in place of the model's own.
    """
    result = registry.find_model_by_name(LLAMAGEN.get(name, name))
    if result is None or not result.family.startswith("llamagen"):
        why = (
            "no sizes are known of it" if result is None else f"it is of the family {result.family}"
        )
        raise OptionError(f"--stretch is {name!r}", why, choices(LLAMAGEN))
    if given.drafter is not None:
        why = "the model's own drafter is widened with it"
        raise OptionError("--stretch and --drafter exclude each other", why, "leave --drafter out")
    return result


# ----------------------------------------------------------------------------------------- stretch

# What must be alike for one model to compute what the other does
VARIANTS = (
    "rope qk_norm kv_heads embed_rows code_dim head_hidden row_ends spare_codes head_dim".split()
)
SIZES = {"layers": "layers", "dim": "width", "ffn_dim": "FFN width", "vocab_size": "codes"}
GROUPS = {"qkv": 3, "gate_up": 2}  # matrices that hold several, one under another
PARTS = {"fc": 2}  # matrices that read several inputs, one beside another
SILENT = ("out", "down")  # what an added layer writes with


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
    longer = max(small.prefix, large.prefix)
    target = replace(
        small,
        vocab_size=large.vocab_size,
        dim=large.dim,
        layers=large.layers,
        heads=large.heads,
        ffn_dim=large.ffn_dim,
        # A drafter that attends to pads would attend to more padding
        prefix=small.prefix if drafter is not None and drafter.sees_pads else longer,
        norm_eps=small.norm_eps * share,
        spare_codes=large.vocab_size - small.vocab_size,
    )
    return replace(config, target=target, drafter=drafter)


def check_fits(small: TransformerConfig, name: str, large: TransformerConfig) -> None:
    """Raise an OptionError unless a model, or its drafter's block, can be widened to these sizes."""
    what = f"this model cannot be stretched to {name}"
    others = [v for v in VARIANTS if getattr(small, v) != getattr(large, v)]
    if others:
        differing = ", ".join(f"{v} {getattr(small, v)} and {getattr(large, v)}" for v in others)
        hint = "--model builtin --stretch llamagen-xl"
        raise OptionError(what, f"they differ in kind: {differing}", hint)
    less = [
        f"{word} {getattr(large, field)} of {getattr(small, field)}"
        for field, word in SIZES.items()
        if getattr(large, field) < getattr(small, field)
    ]
    if less:
        hint = "--stretch with a larger one, such as llamagen-xl"
        raise OptionError(what, "it is smaller: " + ", ".join(less), hint)


def kept_share(small: TransformerConfig, large: TransformerConfig) -> float:
    """How much of the large width copies of the small one fill; a mean square is that share of the small one's."""
    return large.dim // small.dim * small.dim / large.dim


# ------------------------------------------------------------------------------------ weights


def repeated(x: Tensor, size: int, groups: int = 1) -> Tensor:
    """Rows of x [g n, ..] as often as they fit into [size, ..], each of the g groups by itself; then zeros."""
    parts, each = x.unflatten(0, (groups, -1)), size // groups  # [g, n, ..]
    widened = torch.cat([parts] * (each // parts.shape[1]), 1)
    zeros = widened.new_zeros(groups, each - widened.shape[1], *x.shape[1:])
    return torch.cat([widened, zeros], 1).flatten(0, 1)


def divided(weight: Tensor, inputs: int, parts: int = 1) -> Tensor:
    """Columns of a matrix [o, p i] for inputs that are repeated: [o, inputs]."""
    copies = inputs // weight.shape[1]
    return repeated(weight.T, inputs, parts).T / copies


def widened(name: str, old: Tensor, shape: Sequence[int], share: float) -> Tensor:
    """A parameter over more features, in float32; a table of codes keeps its rows.

    Args:
        name: its own, in the module. share: see `kept_share`.
    """
    *_, layer, leaf = name.split(".")
    old = old.float()
    if layer == "embed":
        return repeated(old.T, shape[1]).T
    if layer == "head":
        return divided(old, shape[1])
    rows = repeated(old, shape[0], GROUPS.get(layer, 1))
    if old.dim() == 2:
        return divided(rows, shape[1], PARTS.get(layer, 1))
    return rows if leaf == "bias" else rows * share**0.5


def noise(name: str, shape: Sequence[int]) -> Tensor:
    """Random numbers of the scale that keeps features at theirs; the same for a name on every device."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(*shape).normal_(std=shape[-1] ** -0.5, generator=generator)


def added(name: str, shape: Sequence[int]) -> Tensor:
    """A parameter of a layer that adds nothing."""
    layer = name.split(".")[-2]
    if layer in SILENT:
        return torch.zeros(*shape)
    return torch.ones(*shape) if len(shape) == 1 else noise(name, shape)


def never(shape: Sequence[int], allowed: int, dtype: torch.dtype) -> Tensor:
    """A head's bias [V] that leaves the first codes alone."""
    bias = torch.full(tuple(shape), max(NEVER, torch.finfo(dtype).min))
    bias[:allowed] = 0
    return bias


def fill_stretched(new: nn.Module, old: nn.Module, share: float, bar: tqdm[None]) -> None:
    """Give a module that lies on `meta` what it is made of, one tensor at a time, on the old one's device."""
    known = dict(old.named_parameters())
    like = next(iter(known.values()))
    for name, goal in list(new.named_parameters()):
        shape, source = tuple(goal.shape), known.get(name)
        if name == "head.bias":
            made = never(shape, len(known["head.weight"]), like.dtype)
        elif source is None:
            made = added(name, shape)
        else:
            made = widened(name, source, shape, share)
            if len(made) < shape[0]:  # codes that the small vocabulary lacks
                spare = noise(name, (shape[0] - len(made), shape[1]))
                made = torch.cat([made, spare.to(made.device)])
        place, _, leaf = name.rpartition(".")
        weight = made.to(like.device, like.dtype).contiguous()
        new.get_submodule(place)._parameters[leaf] = nn.Parameter(weight, requires_grad=False)
        bar.update()
    new.requires_grad_(False).eval()


# ------------------------------------------------------------------------------------ models


class StretchedCondition(FixedPrefix):
    """A small model's prefix, its features repeated, behind more padding."""

    def __init__(self, small: Conditioner, config: TransformerConfig) -> None:
        self.small, self.config = small, config
        self.takes_classes = small.takes_classes
        self.prepare, self.notes, self.parts = small.prepare, small.notes, small.parts

    def rows(self, prompts: Sequence[str], guidance: bool) -> Prefix:
        embeddings, valid, _ = self.small.rows(prompts, guidance)  # [R, p, h], [R, p]
        pads = self.config.prefix - valid.shape[1]
        widened = repeated(embeddings.movedim(-1, 0), self.config.dim).movedim(0, -1)  # [R, p, H]
        return wordless(F.pad(widened, (0, 0, pads, 0)), F.pad(valid, (pads, 0), value=False))


@dataclass
class Stretched:
    """An opened model that is widened as it is loaded; both of the same `config` and `load`."""

    opened: Opened
    name: str  # of the known model
    config: ModelConfig

    @classmethod
    def of(cls, opened: Opened, name: str, large: TransformerConfig) -> Stretched:
        return cls(opened, name, stretched_config(opened.config, name, large))

    def load(self, placement: Placement) -> ImageModel:
        """The large model. Its defaults are the small one's, so that the same options draw the same picture."""
        base, config, drafter = self.opened.load(placement), self.config, None
        with shapes_only():
            target = Target(config.target, placement.kernels)
            if config.drafter is not None:
                drafter = Drafter(config.target, config.drafter, placement.kernels)
        share = kept_share(base.target.config, config.target)
        pairs: list[tuple[nn.Module, nn.Module]] = [(target, base.target)]
        if drafter is not None and base.drafter is not None:
            pairs.append((drafter, base.drafter))
        total = sum(len(list(new.parameters())) for new, _ in pairs)
        with tqdm(total=total, desc="stretching", file=sys.stderr, leave=False) as bar:
            for new, old in pairs:
                fill_stretched(new, old, share, bar)
        return replace(
            base,
            name=f"{base.name} stretched to {self.name}",
            config=config,
            fingerprint=f"{base.fingerprint} stretched to {self.name}",
            target=target,
            drafter=drafter,
            condition=StretchedCondition(base.condition, config.target),
            stretched=self.name,
            base=base,
            _near={},
        )
