"""A model folder: all parts of a text-to-image model in our own files, the embedded one among them.

model.json          sizes, kind of condition, default sampling, fastest methods, sha256 of each file
target.safetensors  target.*, and what turns a prompt into its prefix: words.*, condition.*, classes.*
drafter.safetensors if there is one
vq.safetensors
neighbours.npy      if a published table was converted with it
tokenizer.json      if prompts are read as tokens

`lantern_hpu.convert` writes it, `scripts/export_model.py` too. Files are mapped into memory and read once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lantern_hpu.config import Sampling
from lantern_hpu.errors import WeightsError
from lantern_hpu.hub import CONFIG, read_config, reading, sha256, source
from lantern_hpu.kernels import PLAIN, Kernels
from lantern_hpu.models.chameleon import TokenConditioner, check_image_tokens, load_tokenizer
from lantern_hpu.models.condition import CaptionConditioner, ClassConditioner, Conditioner
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.llamagen import CaptionProjection
from lantern_hpu.models.t5 import T5Conditioner
from lantern_hpu.models.text import TextConditioner, WordConditioner
from lantern_hpu.models.transformer import Target, TransformerConfig
from lantern_hpu.models.vq import VQConfig, VQModel
from lantern_hpu.models.weights import (
    describing,
    fingerprint,
    open_checkpoint,
    pour,
    shapes_only,
    take,
)

TARGET, DRAFTER_WEIGHTS, VQ = "target.safetensors", "drafter.safetensors", "vq.safetensors"
DRAFTER = "drafter.json"  # beside the weights of a drafter that lies alone
NEIGHBOURS = "neighbours.npy"
TOKENIZER = "tokenizer.json"


@dataclass
class ImageModel:
    """The parts that turn prompts into images."""

    name: str
    source: str  # what `--model` takes to find it again
    files: dict[str, str]  # digest of each part: which weights these are
    fingerprint: str  # which target this is: a drafter belongs to one
    target: Target
    drafter: Drafter | None
    condition: Conditioner
    about_condition: dict[str, Any]  # what `model.json` says of it
    vq: VQModel
    sampling: Sampling  # default settings
    # Device name to [method, tree or None]: the fastest that was measured there
    fastest: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    neighbours: Path | None = None  # a published table; otherwise one is computed

    @property
    def codebook(self) -> Tensor:
        """[V, code_dim]"""
        return self.vq.quantize.embedding.weight

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        rows, columns = self.target.config.grid
        return rows * self.vq.config.downsample, columns * self.vq.config.downsample


@dataclass(frozen=True)
class Placement:
    """Where weights go, and what runs them."""

    dtype: torch.dtype | None = torch.float32  # None: as stored
    device: torch.device | None = None
    kernels: Kernels = PLAIN
    text: Path | None = None  # the text encoder or tokenizer, where a model does not hold it
    keep_text: str = "host"  # where the text encoder stays once prompts are encoded

    @property
    def place(self) -> torch.device:
        return self.device if self.device is not None else torch.empty(0).device


def transformer_config(values: dict[str, Any]) -> TransformerConfig:
    """The configuration as JSON holds it."""
    return TransformerConfig(**{**values, "grid": tuple(values["grid"])})


def load_folder(folder: Path, placement: Placement = Placement()) -> ImageModel:
    """Read a model folder; its files are checked first.

    Raises:
        WeightsError: files are missing or damaged, or tensors do not fit the configuration.
    """
    about = read_config(folder)
    with describing(folder / CONFIG):
        with shapes_only():
            sizes = transformer_config(about["target"])
            target = Target(sizes, placement.kernels)
            options = about["drafter"]
            drafter = options and make_drafter(options, sizes, placement.kernels)
            vq = VQModel(VQConfig(**about["vq"]))
            stored, finish = make_condition(about["condition"], sizes, folder)
        sampling = Sampling(**about["sampling"])
        fastest = {name: (method, tree) for name, (method, tree) in about["fastest"].items()}
    main = nn.ModuleDict({**stored, "target": target})
    dtype, device = placement.dtype, placement.device
    pour(main, open_checkpoint(folder / TARGET), None, dtype, device)
    pour(vq, open_checkpoint(folder / VQ), None, torch.float32, device)
    if drafter is not None:
        pour(drafter, open_checkpoint(folder / DRAFTER_WEIGHTS), None, dtype, device)
    condition, kind = finish(target, placement), about["condition"]
    if placement.text is not None and kind["kind"] == "t5":
        kind = kind | {"text": str(placement.text.resolve())}
    return ImageModel(
        about.get("name", folder.name),
        source(folder),
        about["files"] | text_digest(condition),
        about.get("fingerprint") or about["files"][TARGET],
        target,
        drafter,
        condition,
        kind,
        vq,
        sampling,
        fastest,
        folder / NEIGHBOURS if NEIGHBOURS in about["files"] else None,
    )


# ------------------------------------------------------------------------------------ conditions

Finish = Callable[[Target, Placement], Conditioner]


def make_condition(
    about: dict[str, Any], config: TransformerConfig, folder: Path
) -> tuple[dict[str, nn.Module], Finish]:
    """Modules to fill, and what makes a conditioner of them.

    Raises:
        ValueError: a kind that this version does not know.
    """
    kind = about["kind"]
    if kind == "classes":
        table = nn.Embedding(about["classes"] + 1, config.dim)
        return {"classes": table}, lambda target, placement: ClassConditioner(table)
    if kind == "tokens":
        return {}, lambda target, placement: token_conditioner(target, placement.text or folder)
    projection = CaptionProjection(about["dim"], config.dim, config.prefix)
    if kind == "words":
        words = WordConditioner(about["words"], about["dim"], config.prefix)
        parts: dict[str, nn.Module] = {"words": words, "condition": projection}
        return parts, lambda target, placement: CaptionConditioner(words, projection)
    if kind == "t5":

        def captions(target: Target, placement: Placement) -> Conditioner:
            text = text_encoder(placement, about.get("text"), config.prefix, about["dim"])
            return CaptionConditioner(text, projection)

        return {"condition": projection}, captions
    raise ValueError(f"unknown kind of condition {kind!r}")


def token_conditioner(target: Target, folder: Path) -> Conditioner:
    """Prompts through the tokenizer in a folder.

    Raises:
        WeightsError: there is none, or its image tokens lie elsewhere.
    """
    tokenizer = load_tokenizer(folder)
    check_image_tokens(tokenizer.get_vocab(), target.config.vocab_size, folder)
    return TokenConditioner(tokenizer, target.embed, target.config.prefix)


def text_digest(condition: Conditioner) -> dict[str, str]:
    """Which text encoder reads the prompts, for the record of an image; nothing where none of its own does."""
    text = getattr(condition, "text", None)
    if not isinstance(text, T5Conditioner):
        return {}
    stored = open_checkpoint(text.folder)
    return {"text": fingerprint(stored, {name: take(name) for name in stored.shapes})}


def text_encoder(
    placement: Placement, known: str | None, prefix: int, width: int
) -> TextConditioner:
    """T5 from where the user says it lies, else from where it lay when the model was converted.

    Raises:
        WeightsError: it is not there, or of another width.
    """
    folder = placement.text or (Path(known) if known else None)
    if folder is None or not folder.is_dir():
        what = (
            f"the text encoder is missing ({folder})" if folder else "the text encoder is missing"
        )
        raise WeightsError(what, "prompts cannot be read", "--text-encoder FOLDER")
    text = T5Conditioner(
        folder,
        prefix,
        placement.dtype or torch.float32,
        placement.place,
        keep=placement.keep_text,  # type: ignore[arg-type]
    )
    if text.width != width:
        why = f"its features are {text.width} wide, the target reads {width}"
        raise WeightsError(f"the text encoder {folder} is for another target", why)
    return text


# ------------------------------------------------------------------------------------ drafters


def make_drafter(about: dict[str, Any], config: TransformerConfig, kernels: Kernels) -> Drafter:
    """A drafter as `describe_drafter` wrote it down, for a target of this configuration."""
    own = dict(about)
    sizes = {name: own.pop(name) for name in DRAFTER_SIZES if name in own}
    return Drafter(replace(config, **sizes), **own, kernels=kernels)


DRAFTER_SIZES = ("norm_eps", "ffn_dim", "qk_norm")  # that may differ from the target's


def describe_drafter(drafter: Drafter | None, config: TransformerConfig) -> dict[str, Any]:
    """What a drafter of the same kind is built with; the kind our training makes if there is none."""
    if drafter is None:
        return {"input_norm": False, "sees_pads": False}
    differs = {
        name: getattr(drafter.config, name)
        for name in DRAFTER_SIZES
        if getattr(drafter.config, name) != getattr(config, name)
    }
    plain = isinstance(drafter.block.attention_norm, nn.Identity)
    shift = {} if drafter.shift == 1 else {"shift": drafter.shift}
    return {"input_norm": not plain, "sees_pads": drafter.sees_pads} | shift | differs


def use_drafter(model: ImageModel, folder: Path) -> None:
    """Put in the drafter that `lantern_hpu.train` left in a folder.

    Raises:
        WeightsError: unreadable, or trained for another target.
    """
    with reading(folder / DRAFTER) as about:
        options, target = about["options"], about["target"]
    with describing(folder / DRAFTER), shapes_only():
        drafter = make_drafter(options, model.target.config, model.target.kernels)
    if target != model.fingerprint:
        why = f"it was trained for another target than {model.name}"
        raise WeightsError(f"the drafter in {folder} does not fit", why, "--model")
    head = model.target.head.weight
    file = folder / DRAFTER_WEIGHTS
    pour(drafter, open_checkpoint(file), None, head.dtype, head.device)
    model.drafter = drafter
    model.files = model.files | {file.name: sha256(file)}


# ------------------------------------------------------------------------------------ writing


def describe(model: ImageModel, files: dict[str, str]) -> dict[str, Any]:
    """`model.json` of a model whose files have these checksums."""
    sizes = model.target.config
    drafter = None if model.drafter is None else describe_drafter(model.drafter, sizes)
    return {
        "name": model.name,
        "files": files,
        "fingerprint": model.fingerprint,
        "target": asdict(sizes),
        "condition": model.about_condition,
        "drafter": drafter,
        "vq": asdict(model.vq.config),
        "sampling": asdict(model.sampling),
        "fastest": {name: list(value) for name, value in model.fastest.items()},
    }
