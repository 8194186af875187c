"""From the parts of a model to a model: our own folder, or checkpoints as their authors published them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.files import reported_as
from lantern_hpu.methods.request import Sampling
from lantern_hpu.models.config import ConditionConfig, ModelConfig
from lantern_hpu.models.families import family_of
from lantern_hpu.models.families.drafters import OpenedDrafter, open_drafter
from lantern_hpu.models.files.checkpoint import (
    Stored,
    Weights,
    fingerprint,
    folder_of,
    open_checkpoint,
    settings_beside,
    shapes_only,
    take,
)
from lantern_hpu.models.files.folder import ModelFolder
from lantern_hpu.models.files.names import CONFIG, DRAFTER_WEIGHTS, TARGET, VQ, Parts, with_text
from lantern_hpu.models.files.tokenizers import check_vq, open_vq
from lantern_hpu.models.model import (
    ImageModel,
    Placement,
    Tokenizer,
    check_table,
    grid_by_size,
    make_vq,
    table_digest,
)
from lantern_hpu.models.text.features import SavedFeatures, is_saved
from lantern_hpu.models.text.frames import FRAMES
from lantern_hpu.models.text.prefix import (
    CaptionConditioner,
    CaptionProjection,
    ClassConditioner,
    Conditioner,
    WordConditioner,
)
from lantern_hpu.models.text.t5 import T5Conditioner
from lantern_hpu.models.text.tokens import TokenConditioner, load_tokenizer, splitter
from lantern_hpu.models.transformer import Drafter, Target

VQ_MISSING = "the VQ tokenizer (--vq; FoundationVision/LlamaGen vq_ds16_*.pt; Anole: vqgan.ckpt)"
DIFFUSION_MISSING = "the diffusion model (the whole pipeline's folder; --save-tokens needs none)"
TEXT_MISSING = "the text encoder (--text-encoder; google/flan-t5-xl)"


class PublishedModel:
    """Published checkpoints, opened; no weight is read yet."""

    def __init__(self, parts: Parts) -> None:
        about = settings_beside(parts.target)
        stored = open_checkpoint(parts.target).within("module.")
        with reported_as(f"{parts.target} does not describe a model"):
            family = family_of(stored, about, parts)
            result = family.read(stored, about, parts)
        tokenizer = open_checkpoint(parts.vq) if parts.vq else result.tokenizer
        absent = {
            "vq": (tokenizer is None and not result.diffusion, VQ_MISSING),
            "pixels": (result.diffusion and parts.pixels is None, DIFFUSION_MISSING),
            "text": (result.condition.kind == "t5" and parts.text is None, TEXT_MISSING),
        }
        missing = [
            said for part, (lacks, said) in absent.items() if lacks and part not in parts.spared
        ]
        if missing:
            hint = "name them, or lay them beside the target"
            raise WeightsError(f"parts are missing for {parts.target}", "; ".join(missing), hint)
        self.name, self.code_pixels = parts.name, family.code_pixels
        self.vq, self.pixels = None, parts.pixels
        self.config = ModelConfig(result.config, result.condition, codebook=result.codebook)
        if tokenizer is not None:
            vq, self.vq = open_vq(tokenizer, family.normalized_codes)
            check_vq(vq, result.config, family.code_pixels, tokenizer.path)
            self.config = replace(self.config, vq=vq)
        self.target = Stored(result.checkpoint, result.recipe, family.ignored)
        published, usual = parts.sampling, result.sampling or family.sampling[result.kind]
        self.sampling = Sampling(**published) if published else usual
        self.fastest: dict[str, tuple[str, str | None]] = {}

    def weights(self) -> Weights:
        return Weights(self.target, self.vq)


@dataclass
class Opened:
    """What parts make: its sizes are known, and it can be loaded."""

    parts: Parts
    config: ModelConfig
    source: ModelFolder | PublishedModel
    drafter: OpenedDrafter | None  # in place of the source's own

    def load(self, placement: Placement) -> ImageModel:
        parts, config, drafter = self.parts, self.config, None
        weights = self.source.weights()
        with reported_as(f"{parts.target} does not describe a model"), shapes_only():
            target = Target(config.target, placement.kernels)
            if config.drafter is not None:
                drafter = Drafter(config.target, config.drafter, placement.kernels)
        folder = parts.text or folder_of(parts.target)
        condition = make_condition(config.condition, target, folder, placement)
        main = nn.ModuleDict({**condition.parts(), "target": target})
        vectors: nn.Embedding | None = None
        if config.codebook:
            with shapes_only():
                main["codebook"] = vectors = nn.Embedding(config.target.codes, config.codebook)
        dtype, device = placement.dtype, placement.device
        digest = weights.target.fill(main, dtype, device)
        vq, files, vq_fingerprint = None, {TARGET: digest}, ""
        if config.vq is not None and weights.vq is not None:
            vq, files[VQ] = self.load_vq(weights, device)
            vq_fingerprint = weights.vq.fingerprint(vq)
        model = ImageModel(
            name=self.source.name,
            source=parts.source,
            config=config,
            files={**weights.files, **files, **text_digest(condition)},
            fingerprint=weights.fingerprint or digest,
            target=target,
            drafter=drafter,
            condition=condition,
            vq=vq,
            sampling=self.source.sampling,
            fastest=self.source.fastest,
            neighbour_table=parts.neighbours or weights.neighbours,
            vq_fingerprint=vq_fingerprint,
            code_vectors_alone=vectors.weight if vectors else None,
            pixels_by=self.source.pixels,
        )
        self.fill_drafter(model, weights, placement)
        if model.neighbour_table is not None:
            check_neighbours(model)
        return model

    def fill_drafter(self, model: ImageModel, weights: Weights, placement: Placement) -> None:
        """Read the drafter's weights, if there is one: its own file's, or those beside the target."""
        drafter, dtype = model.drafter, placement.dtype
        if drafter is not None and self.drafter is not None:
            model.files[DRAFTER_WEIGHTS] = self.drafter.fill(drafter, model, dtype)
        elif drafter is not None and weights.drafter is not None:
            weights.drafter.fill(drafter, dtype, placement.device)

    def load_vq(self, weights: Weights, device: torch.device | None) -> tuple[Tokenizer, str]:
        """The image tokenizer, and its digest."""
        assert self.config.vq is not None and weights.vq is not None
        with shapes_only():
            vq = make_vq(self.config.vq)
        return vq, weights.vq.fill(vq, torch.float32, device)


def check_neighbours(model: ImageModel) -> None:
    """Hold a model's table of neighbours against its codebook, and take its digest."""
    assert model.neighbour_table is not None
    note = "neighbours were not held against a codebook: there is no tokenizer"
    if model.vq is not None:
        note = check_table(model.neighbour_table, model.codebook) or ""
    model.notes += [note] if note else []
    model.files["neighbours"] = table_digest(model.neighbour_table)


def open_model(parts: Parts) -> Opened:
    """What these parts make."""
    ours = (parts.target / CONFIG).is_file()
    source = ModelFolder(parts) if ours else PublishedModel(parts)
    config, drafter = with_text(source.config, parts.text), None
    height, width = (side * source.code_pixels for side in config.target.grid)
    if parts.image_size and config.target.code_pixels:
        grid = grid_by_size(config.target, (parts.image_size, parts.image_size), parts.name)
        config = replace(config, target=config.target.of_grid(grid))
    elif parts.image_size not in (None, height):
        why = f"{parts.name} draws {width} x {height} pixels"
        raise OptionError(f"--image-size is {parts.image_size}", why, "leave it out")
    if parts.drafter is not None:
        drafter = open_drafter(parts.drafter, config.target)
        config = replace(config, drafter=drafter.config)
    return Opened(parts, config, source, drafter)


# ------------------------------------------------------------------------------------ conditions


def make_condition(
    config: ConditionConfig, target: Target, folder: Path, placement: Placement
) -> Conditioner:
    """What reads prompts; its `parts` are still to be filled.

    Args:
        folder: where a tokenizer lies.
    """
    dim, prefix, up = target.config.dim, target.config.prefix, placement.to_device
    if config.kind == "tokens":
        tokenizer = load_tokenizer(folder)
        words, vocabulary = splitter(tokenizer), tokenizer.get_vocab()
        frame = FRAMES[config.frame](words, vocabulary, target.config, folder)
        with shapes_only():
            word_table = nn.Embedding(config.rows, dim) if config.rows else None
        return TokenConditioner(tokenizer, frame, target.embed, word_table, up)
    with shapes_only():
        if config.kind == "classes":
            return ClassConditioner(nn.Embedding(config.classes + 1, dim), up)
        projection = CaptionProjection(config.dim, dim, prefix)
        if config.kind == "words":
            words = WordConditioner(config.words, config.dim, prefix, up)
            return CaptionConditioner(words, projection)
    return CaptionConditioner(text_encoder(config, prefix, placement), projection)


def text_encoder(
    config: ConditionConfig, prefix: int, placement: Placement
) -> T5Conditioner | SavedFeatures:
    """A T5 from where it lies, or what one said."""
    dtype, keep = placement.dtype or torch.float32, placement.keep_text
    where = placement.device, placement.to_device
    if config.text is not None and is_saved(Path(config.text)):
        return SavedFeatures(Path(config.text), prefix, config.dim, dtype, *where)
    if config.text is None or not Path(config.text).is_dir():
        what = "the text encoder is missing" + (f" ({config.text})" if config.text else "")
        raise WeightsError(what, "prompts cannot be read", "--text-encoder FOLDER")
    text = T5Conditioner(Path(config.text), prefix, dtype, *where, keep=keep)
    if text.width != config.dim:
        why = f"its features are {text.width} wide, the target reads {config.dim}"
        raise WeightsError(f"the text encoder {text.folder} is for another target", why)
    return text


def text_digest(condition: Conditioner) -> dict[str, str]:
    """Which text encoder reads the prompts, for the record of an image; nothing where none of its own does."""
    text = getattr(condition, "text", None)
    if isinstance(text, SavedFeatures):
        return {"text": text.digest()}
    if not isinstance(text, T5Conditioner):
        return {}
    stored = open_checkpoint(text.folder)
    return {"text": fingerprint(stored, {name: take(name) for name in stored.shapes})}
