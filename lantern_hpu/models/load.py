"""From the parts of a model to a model: our own folder, or checkpoints as their authors published them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lantern_hpu import codebook
from lantern_hpu.config import Sampling
from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.hub import CONFIG
from lantern_hpu.models import chameleon, eagle, llamagen
from lantern_hpu.models.folder import (
    DRAFTER,
    DRAFTER_WEIGHTS,
    TARGET,
    VQ,
    ImageModel,
    Placement,
    load_folder,
    make_condition,
    text_digest,
    use_drafter,
)
from lantern_hpu.models.transformer import Target, TransformerConfig
from lantern_hpu.models.vq import VQConfig, VQModel
from lantern_hpu.models.weights import (
    Checkpoint,
    Recipe,
    describing,
    fingerprint,
    folder_of,
    open_checkpoint,
    plain,
    pour,
    settings_beside,
    shapes_only,
)
from lantern_hpu.parts import CODE_PIXELS, OPTIONS, Parts
from lantern_hpu.registry import usual_sampling

CLASSES = 1000  # of ImageNet, for which labels are known


def load(parts: Parts, placement: Placement) -> ImageModel:
    """The model that these parts make.

    Raises:
        WeightsError: parts are missing (all are listed), damaged, or do not belong together.
    """
    placement = replace(placement, text=parts.text or placement.text)
    ours = (parts.target / CONFIG).is_file()
    model = load_folder(parts.target, placement) if ours else load_published(parts, placement)
    if ours and parts.vq is not None:
        put_vq(model, parts.vq, placement)
    if ours and parts.image_size not in (None, model.image_size[0]):
        why = f"{model.name} draws {model.image_size[1]} x {model.image_size[0]} pixels"
        raise OptionError(f"--image-size is {parts.image_size}", why, "leave it out")
    if parts.drafter is not None:
        put_drafter(model, parts.drafter, placement.dtype)
    if parts.neighbours is not None:
        model.neighbours = parts.neighbours
    if model.neighbours is not None:
        codebook.check_table(model.neighbours, model.codebook)
        model.files = model.files | {"neighbours": codebook.table_digest(model.neighbours)}
    return model


def put_drafter(model: ImageModel, path: Path, dtype: torch.dtype | None) -> None:
    """A drafter of our own training, or a published one."""
    if (path / DRAFTER).is_file():
        use_drafter(model, path)
    else:
        model.drafter, digest = eagle.load_drafter(path, model.target, dtype)
        model.files = model.files | {DRAFTER_WEIGHTS: digest}


def put_vq(model: ImageModel, path: Path, placement: Placement) -> None:
    """Another tokenizer for a model of ours."""
    old = model.vq.config
    model.vq, digest = load_vq(open_checkpoint(path), old.normalize_codebook, placement)
    check_vq(model.vq.config, model.target.config, old.downsample, path)
    model.files = model.files | {VQ: digest}


def check_vq(config: VQConfig, target: TransformerConfig, pixels: int, path: Path) -> None:
    """Raise a WeightsError unless a tokenizer has the target's codes, of so many pixels."""
    if config.codebook_size != target.vocab_size:
        why = f"it has {config.codebook_size} codes, the target draws {target.vocab_size}"
        raise WeightsError(f"the tokenizer {path} is for another target", why, "--vq with its own")
    if config.downsample != pixels:
        why = f"a code of it is {config.downsample} pixels wide, the target's are {pixels}"
        raise WeightsError(f"the tokenizer {path} is for another target", why, "--vq with its own")


# ------------------------------------------------------------------------------------ published files


@dataclass
class Family:
    """What a published target turned out to be."""

    name: str  # as the list of known models has it
    config: TransformerConfig
    recipe: Recipe
    ignored: Callable[[str], bool]
    about_condition: dict[str, Any]  # see `folder.make_condition`
    needs: tuple[str, ...] = ("vq",)  # parts that it cannot draw without


def recognise(checkpoint: Checkpoint, parts: Parts) -> tuple[Family, Checkpoint]:
    """The family of a target, and its tensors by the names that the family's recipe uses.

    Raises:
        WeightsError: of no known family, or its sizes cannot be told.
    """
    about = settings_beside(parts.target)
    checkpoint = checkpoint.within("module.")
    if chameleon.is_chameleon(checkpoint):
        return anole(checkpoint, about, parts), checkpoint
    if llamagen.is_llamagen(checkpoint):
        bare = llamagen.bare_names(checkpoint)
        return llamagen_family(bare, about, parts), bare
    why = "it is neither a LlamaGen (cls_embedding.*) nor a Chameleon (q_norm) checkpoint"
    raise WeightsError(f"{parts.target} is of no known family", why, "python -m lantern_hpu.models")


def llamagen_family(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Family:
    config = llamagen.config_of(checkpoint, about, parts.image_size)
    recipe = llamagen.target_recipe(checkpoint, config.layers)
    if llamagen.by_class(checkpoint):
        classes = checkpoint.shapes["cls_embedding.embedding_table.weight"][0] - 1
        if classes != CLASSES:
            why = f"it knows {classes} classes, labels are known for {CLASSES}"
            raise WeightsError(f"{parts.target} is of no known family", why)
        labels = {"kind": "classes", "classes": classes}
        return Family("llamagen-c2i", config, recipe, llamagen.ignored, labels)
    width = checkpoint.shapes["cls_embedding.cap_proj.fc1.weight"][1]
    captions = {"kind": "t5", "dim": width, "text": parts.text and str(parts.text.resolve())}
    return Family("llamagen-t2i", config, recipe, llamagen.ignored, captions, ("vq", "text"))


def anole(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> Family:
    config = chameleon.config_of(checkpoint, about)
    chameleon.check_draws(checkpoint, about, config)
    side = config.grid[0] * CODE_PIXELS
    if parts.image_size not in (None, side):
        why = f"Anole draws {side} x {side} pixels"
        raise OptionError(f"--image-size is {parts.image_size}", why, "leave it out")
    recipe = chameleon.target_recipe(config)
    return Family("chameleon", config, recipe, chameleon.ignored, {"kind": "tokens"})


WHERE = {  # part: what it is, where it is to be had
    "vq": ("the VQ tokenizer", "FoundationVision/LlamaGen vq_ds16_*.pt; Anole: vqgan.ckpt"),
    "text": ("the text encoder", "google/flan-t5-xl"),
}


def check_parts(family: Family, parts: Parts, inside: set[str]) -> None:
    """Raise a WeightsError that lists every part that is missing; `inside`: parts that the target holds."""
    absent = [name for name in family.needs if getattr(parts, name) is None]
    missing = [name for name in absent if name not in inside]
    if missing:
        lines = [f"{WHERE[name][0]} ({OPTIONS[name]}; {WHERE[name][1]})" for name in missing]
        hint = "name them, or lay them beside the target"
        raise WeightsError(f"parts are missing for {parts.target}", "; ".join(lines), hint)


def load_published(parts: Parts, placement: Placement) -> ImageModel:
    """A model from published checkpoints."""
    stored = open_checkpoint(parts.target)
    with describing(parts.target):
        family, checkpoint = recognise(stored, parts)
    # Anole's Hugging Face copy holds the whole tokenizer, decoder included.
    inside = checkpoint.below("model.vqmodel.")
    whole = "decoder.conv_in.weight" in inside
    check_parts(family, parts, {"vq"} if whole else set())
    tokenizer = inside if parts.vq is None else open_checkpoint(parts.vq)
    # LlamaGen uses its codes at length 1.
    vq, vq_digest = load_vq(tokenizer, not chameleon.is_chameleon(checkpoint), placement)
    check_vq(vq.config, family.config, CODE_PIXELS, tokenizer.path)
    about, beside = family.about_condition, folder_of(parts.target)
    with shapes_only():
        target = Target(family.config, placement.kernels)
        modules, finish = make_condition(about, family.config, beside)
    main = nn.ModuleDict({**modules, "target": target})
    pour(main, checkpoint, family.recipe, placement.dtype, placement.device, family.ignored)
    digest = fingerprint(checkpoint, family.recipe)
    condition = finish(target, placement)
    return ImageModel(
        parts.name,
        parts.source,
        {TARGET: digest, VQ: vq_digest} | text_digest(condition),
        digest,
        target,
        None,
        condition,
        about,
        vq,
        Sampling(**(parts.sampling or usual_sampling(family.name))),
    )


# ------------------------------------------------------------------------------------ tokenizers


def vq_config(checkpoint: Checkpoint, normalised: bool) -> VQConfig:
    """A tokenizer's sizes, from the shapes of its tensors by our names."""

    def width(name: str) -> int:
        return checkpoint.shapes[name][0]

    levels = checkpoint.count("encoder.conv_blocks.")
    channels = width("encoder.conv_in.weight")
    each = [width(f"encoder.conv_blocks.{i}.res.0.conv1.weight") for i in range(levels)]
    codes, code_dim = checkpoint.shapes["quantize.embedding.weight"]
    return VQConfig(
        channels,
        tuple(w // channels for w in each),
        checkpoint.count("encoder.conv_blocks.0.res."),
        checkpoint.shapes["quant_conv.weight"][1],
        code_dim,
        codes,
        normalize_codebook=normalised,
        attention=f"encoder.conv_blocks.{levels - 1}.attn.0.norm.weight" in checkpoint,
    )


def training_only(name: str) -> bool:
    """A counter and losses, which only training reads."""
    return name.startswith(("quantize.codebook_used", "loss."))


def load_vq(checkpoint: Checkpoint, normalised: bool, placement: Placement) -> tuple[VQModel, str]:
    """LlamaGen's VQ-16 or VQ-8, or the VQGAN of Chameleon with its decoder, in float32; and its fingerprint.

    Args:
        normalised: whether codes are used at length 1, as LlamaGen's are.

    Raises:
        WeightsError: unreadable, without a decoder, or of another kind.
    """
    path = checkpoint.path
    if any(".mid.block_1." in name for name in checkpoint.shapes):
        checkpoint = chameleon.as_vq(checkpoint)
    if "decoder.conv_in.weight" not in checkpoint:
        why = "it has no decoder, so codes cannot become pictures"
        raise WeightsError(f"{path} is not a whole VQ tokenizer", why, "--vq with a whole one")
    with describing(path):
        config = vq_config(checkpoint, normalised)
    with shapes_only():
        model = VQModel(config)
    recipe = plain(model)
    pour(model, checkpoint, recipe, torch.float32, placement.device, training_only)
    return model, fingerprint(checkpoint, recipe)
