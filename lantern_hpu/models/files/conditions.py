"""The kinds of conditions that a model may be stored with, made of what is known before weights are read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lantern_hpu.errors import WeightsError
from lantern_hpu.models.config import ConditionConfig
from lantern_hpu.models.files.checkpoint import open_checkpoint
from lantern_hpu.models.files.recipe import fingerprint, shapes_only, take
from lantern_hpu.models.model import Placement
from lantern_hpu.models.text.features import SavedFeatures, is_saved
from lantern_hpu.models.text.frames import FRAMES
from lantern_hpu.models.text.prefix import (
    CaptionConditioner,
    CaptionProjection,
    ClassConditioner,
    Conditioner,
)
from lantern_hpu.models.text.t5 import T5Conditioner
from lantern_hpu.models.text.tokens import TokenConditioner, load_tokenizer, splitter
from lantern_hpu.models.text.words import WordConditioner
from lantern_hpu.models.transformer import Target


def make_condition(
    config: ConditionConfig, target: Target, folder: Path, placement: Placement
) -> Conditioner:
    """What reads prompts; its `parts` are still to be filled.

    Args:
        folder: where a tokenizer lies.

    Raises:
        WeightsError: the tokenizer or the text encoder is missing, or is for another target.
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
    """A T5 from where it lies, or what one said.

    Raises:
        WeightsError: it is not there, or of another width.
    """
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
