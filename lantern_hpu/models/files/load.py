"""From the parts of a model to a model, and its folder: our own, or checkpoints as their authors published them.

A folder of ours has all parts of a text-to-image model:

model.json          sizes, kind of condition, default sampling, fastest methods, sha256 of each file
target.safetensors  target.*, and what turns a prompt into its prefix: words.*, condition.*, classes.*
drafter.safetensors if there is one
vq.safetensors
vision.safetensors  what makes codes of pictures to draw from, where that is no tokenizer
tokenizer.json      if prompts are read as tokens; tokenizer_config.json where the frame depends on it
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from lantern_hpu.core import Sampling
from lantern_hpu.errors import Arg, OptionError, OutputError, WeightsError, words
from lantern_hpu.files import lock_file, reported_as, sha256, some_names
from lantern_hpu.methods.setting import METHODS
from lantern_hpu.models.config import ConditionConfig, ModelConfig, VQConfig, is_of
from lantern_hpu.models.families import family_of
from lantern_hpu.models.families.base import Files
from lantern_hpu.models.families.eagle import OpenedDrafter, open_drafter
from lantern_hpu.models.files.checkpoint import (
    Checkpoint,
    Source,
    Stored,
    Weights,
    fingerprint,
    open_as_stored,
    open_checkpoint,
    shapes_only,
)
from lantern_hpu.models.files.names import (
    CONFIG,
    DRAFTER_WEIGHTS,
    QUANTIZED_AS,
    TARGET,
    TOKENIZER,
    VISION,
    VQ,
    Parts,
    adapters_in,
    check_sums,
    folder_of,
    quantized_in,
    read_config,
    settings_beside,
    with_text,
)
from lantern_hpu.models.files.tokenizers import check_vq, open_vq
from lantern_hpu.models.model import TOKENIZERS, ImageModel, Placement, of_size
from lantern_hpu.models.pictures import GlmImageReader, LuminaReader, Reader
from lantern_hpu.models.text.frames import FRAMES, Frame, reads_pictures
from lantern_hpu.models.text.prefix import (
    CaptionConditioner,
    ClassConditioner,
    Conditioner,
    FramedConditioner,
    TokenConditioner,
    condition_modules,
    load_tokenizer,
    splitter,
)
from lantern_hpu.models.text.t5 import T5Conditioner
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.models.vq import Tokenizer, VQModel
from lantern_hpu.ops.quantized import (
    QuantizedLinear,
    matrix_layers,
    put,
    quantized_layer,
    replace_layers,
)

DIFFUSION_MISSING = words(
    "the diffusion model (in the whole pipeline's folder;", Arg("save_tokens"), "needs none)"
)
# Of a model that was saved as a part of another: published files have their heads outside
INNER_HEADS = ("model.lm_head.", "model.gen_head.", "model.text_model.lm_head.")
UNDESCRIBED = (
    "the model's config.json next to it; of DeepSpeed's states zero_to_fp32.py makes weights"
)
# Values of `model.json` in addition to those of the configs
DESCRIBED = {
    **dict.fromkeys(("name", "fingerprint", "pixels"), str | None),
    "notes": tuple[str, ...] | None,
}
TEXT_MISSING = words("the text encoder (given by", Arg("text_encoder"), "; google/flan-t5-xl)")


@dataclass(frozen=True)
class OpenedModel:
    """A model of known sizes; its weights are not read yet.

    Attributes:
        code_pixels: along a code. pixels: a pipeline of diffusers that makes its pictures.
        fastest, notes: see `ImageModel`. drafter: in place of the one in `weights`.
    """

    parts: Parts
    name: str
    config: ModelConfig
    code_pixels: int
    sampling: Sampling
    weights: Callable[[], Weights]
    pixels: Path | None
    fastest: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    drafter: OpenedDrafter | None = None
    quantize: str | None = None  # the format of its files' matrices, where that is smaller

    def matrix_format(self, asked: str | None) -> str | None:
        """The smaller format of its matrices as they are loaded, if there is one.

        Raises:
            OptionError: they are in another one than is asked for.
        """
        if self.quantize and asked not in (None, self.quantize):
            why = f"matrices of {self.name} are {self.quantize} already"
            hint = "leave it out, or take the model that it was made of"
            raise OptionError(words(Arg("quantize", asked), "cannot be used"), why, hint)
        return asked or self.quantize

    def check_pictures(self) -> None:
        """Raise an OptionError for a model whose tokens nothing here makes pictures of."""
        if self.config.vq is None and self.pixels is None:
            why = "nothing here decodes its tokens; another program may read its hidden states"
            states = Arg("save_states", "FILE.safetensors")
            tokens = Arg("save_tokens", "FILE.npz")
            hint = words("generate with", states, ", or", tokens)
            raise OptionError(f"{self.name} makes no pictures", why, hint)

    def load(self, placement: Placement, framed: bool = False) -> ImageModel:
        """Read the weights.

        Args:
            framed: prompts come framed and split, so that no tokenizer is needed.
        """
        config, dtype, device = self.config, placement.dtype, placement.device
        weights, drafter, vectors, vq = self.weights(), None, None, None
        with reported_as(f"{self.parts.target} does not describe a model"), shapes_only():
            target = Target(config.target, placement.kernels)
            if config.drafter is not None:
                drafter = Drafter(config.target, config.drafter, placement.kernels)
            if config.codebook:
                vectors = nn.Embedding(config.target.codes, config.codebook)
        if quantize := placement.quantize or self.quantize:
            small = partial(quantized_layer, form=quantize)
            if not weights.target.quantized:
                replace_layers(target, nn.Linear, small)
            if drafter is not None and (self.drafter or not weights.target.quantized):
                replace_layers(drafter, nn.Linear, small)
        folder = None if framed else self.parts.text or folder_of(self.parts.target)
        condition = make_condition(config.condition, target, folder, placement)
        main = nn.ModuleDict({**condition.parts(), "target": target})
        if vectors is not None:
            main["codebook"] = vectors
        digest = weights.target.fill(main, dtype, device)
        files = {**weights.files, TARGET: digest}
        if isinstance(text := getattr(condition, "text", None), T5Conditioner):
            stored = open_as_stored(text.folder)
            files["text"] = fingerprint(stored, {name: Source.of(name) for name in stored.shapes})
        if config.vq is not None and weights.vq is not None:
            vq, files[VQ] = load_vq(config.vq, weights.vq, device)
        for module in filter(None, (vq, *condition.parts().values())):
            placement.compile_parts(module)
        if config.condition.kind == "tokens" and reads_pictures(config):
            condition.reader = make_reader(config, weights.vision, vectors, vq, placement)
        small_layers = matrix_layers(target, QuantizedLinear) if quantize else ()
        model = ImageModel(
            name=self.name,
            source=self.parts.source,
            config=config,
            files=files,
            fingerprint=weights.fingerprint or digest,
            target=target,
            drafter=drafter,
            condition=condition,
            vq=vq,
            sampling=self.sampling,
            fastest=self.fastest,
            vq_fingerprint=weights.vq.fingerprint(vq) if vq and weights.vq else "",
            code_vectors_alone=vectors.weight if vectors else None,
            pixels_by=self.pixels,
            quantize=quantize,
            groups={name: layer.group for name, layer in small_layers},
            notes=[*self.notes],
        )
        if drafter is not None and self.drafter is not None:
            files[DRAFTER_WEIGHTS] = self.drafter.fill(drafter, model, dtype)
        elif drafter is not None and weights.drafter is not None:
            weights.drafter.fill(drafter, dtype, device)
        return model


def open_model(parts: Parts) -> OpenedModel:
    ours = (parts.target / CONFIG).is_file()
    opened = open_folder(parts) if ours else open_published(parts)
    config = with_text(opened.config, parts.text)
    drafter = None
    height, width = (side * opened.code_pixels for side in config.target.grid)
    if parts.image_size and config.target.code_pixels:
        size = parts.image_size, parts.image_size
        config = replace(config, target=of_size(config, size, parts.name))
    elif parts.image_size not in (None, height):
        why = f"{parts.name} draws {width} x {height} pixels"
        what = words(Arg("image_size"), f"is {parts.image_size}")
        raise OptionError(what, why, "leave it out")
    if parts.drafter is not None:
        drafter = open_drafter(parts.drafter, config.target)
        config = replace(config, drafter=drafter.config)
        if drafter.note:
            opened = replace(opened, notes=(*opened.notes, drafter.note))
    return replace(opened, config=config, drafter=drafter)


def open_folder(parts: Parts) -> OpenedModel:
    """A folder of ours: see the head of this file."""
    path = parts.target
    description, config = read_config(path)
    files = description["files"]
    with reported_as(f"cannot read {path / CONFIG}"):
        for key, kind in DESCRIBED.items():
            if not is_of(description.get(key), kind):
                raise ValueError(f"{key} is {repr(description[key])[:60]}")
        if config.condition.frame not in FRAMES:
            raise ValueError(f"frame is {config.condition.frame!r}")
        sampling = Sampling(**description["sampling"])
        fastest = {
            device: (method, tree) for device, (method, tree) in description["fastest"].items()
        }
        for method, tree in fastest.values():
            if method not in METHODS or not is_of(tree, str | None):
                raise ValueError(f"fastest names {method!r} with the tree {tree!r}")
        if config.vq is None and not config.target.code_pixels:
            raise KeyError("vq")
    code_pixels = config.vq.downsample if config.vq else config.target.code_pixels
    own_vq = None
    if parts.vq is not None and config.vq is not None:
        vq, own_vq = open_vq(open_checkpoint(parts.vq), config.vq.normalize_codebook)
        config = replace(config, vq=vq)
    if config.vq is not None:
        check_vq(config.vq, config.target, code_pixels, parts.vq or path / VQ)

    quantize = quantized_in(path, description)

    def stored(name: str) -> Stored:
        small = bool(quantize) and name != VQ
        return Stored(open_checkpoint(path / name), digest=files.get(name), quantized=small)

    def weights() -> Weights:
        check_sums(path, description)
        return Weights(
            stored(TARGET),
            own_vq or (stored(VQ) if config.vq else None),
            stored(DRAFTER_WEIGHTS) if config.drafter else None,
            files,
            description.get("fingerprint"),
            stored(VISION) if config.vision else None,
        )

    pixels = description.get("pixels")
    return OpenedModel(
        parts=parts,
        name=description.get("name") or path.name,
        config=config,
        code_pixels=code_pixels,
        sampling=sampling,
        weights=weights,
        pixels=parts.pixels or (Path(pixels) if pixels else None),
        fastest=fastest,
        notes=tuple(description.get("notes") or ()),
        quantize=quantize,
    )


def open_published(parts: Parts) -> OpenedModel:
    checkpoint = open_checkpoint(parts.target)
    if any(name.startswith(INNER_HEADS) for name in checkpoint.shapes):
        checkpoint = checkpoint.within("model.")
    opened = open_files(Files(checkpoint, settings_beside(parts.target), parts))
    if not adapters_in(folder_of(parts.target)):
        return opened
    note = "the LoRA adapter next to the weights is not applied: merge it into them"
    return replace(opened, notes=(*opened.notes, note))


def open_files(files: Files) -> OpenedModel:
    """A published model by its tensors and settings, which need not lie in files."""
    parts = files.parts
    hint = "" if files.hf_config else UNDESCRIBED
    with reported_as(f"{parts.target} does not describe a model", hint):
        family = family_of(files)
        config, sampling, weights = family.read(files)
    if parts.vq is not None:
        weights = weights._replace(vq=Stored(open_checkpoint(parts.vq)))
    vq_missing = words("the VQ tokenizer (given by", Arg("vq"), f"; {family.vq})")
    absent = {
        "vq": (weights.vq is None and not (family.diffusion or family.states), vq_missing),
        "pixels": (family.diffusion and parts.pixels is None, DIFFUSION_MISSING),
        "text": (config.condition.kind == "t5" and parts.text is None, TEXT_MISSING),
    }
    missing: list[str] = []
    for part, (lacks, what) in absent.items():
        if lacks and part not in parts.optional:
            missing += [";", what] if missing else [what]
    if missing:
        hint = "name them, or put them next to the target"
        raise WeightsError(f"parts are missing for {parts.target}", words(*missing), hint)
    notes = [one.checkpoint.note for one in weights[:2] if one is not None]
    if weights.vq is not None:
        path = weights.vq.checkpoint.path
        vq, stored = open_vq(weights.vq.checkpoint, family.normalized_codes)
        check_vq(vq, config.target, family.code_pixels, path)
        config = replace(config, vq=vq)
        weights = weights._replace(vq=stored)
    return OpenedModel(
        parts=parts,
        name=parts.name,
        config=config,
        code_pixels=family.code_pixels,
        sampling=Sampling(**parts.sampling) if parts.sampling else sampling,
        weights=lambda: weights,
        pixels=parts.pixels,
        notes=tuple(filter(None, notes)),
        quantize="int4" if weights.target.quantized else None,
    )


def load_vq(config: VQConfig, stored: Stored, device: torch.device | None) -> tuple[Tokenizer, str]:
    """The image tokenizer, and its digest."""
    with shapes_only():
        vq: Tokenizer = TOKENIZERS[config.kind](config)
    return vq, stored.fill(vq, torch.float32, device)


def make_reader(
    config: ModelConfig,
    vision: Stored | None,
    vectors: nn.Embedding | None,
    vq: Tokenizer | None,
    placement: Placement,
) -> Reader | None:
    """What makes codes of sources; None without the weights for it."""
    up = placement.to_device
    if config.vision is not None and vision is not None and vectors is not None:

        def fill(tower: nn.Module) -> None:
            vision.fill(tower, placement.dtype, placement.device)
            placement.compile_parts(tower)

        return GlmImageReader(config.vision, fill, vectors.weight, up)
    return LuminaReader(vq, config.target, up) if isinstance(vq, VQModel) else None


def make_condition(
    config: ConditionConfig, target: Target, folder: Path | None, placement: Placement
) -> Conditioner:
    """What reads prompts; its `parts` are still to be filled.

    Args:
        folder: of the tokenizer; None where prompts come framed and split.
    """
    up = placement.to_device
    with shapes_only():
        stored = condition_modules(config, target.config, up)
    if folder is None:
        table = stored.get("words")
        return FramedConditioner(FRAMES[config.frame], target.config, target.embed, table, up)
    if config.kind == "tokens":
        tokenizer = load_tokenizer(folder, FRAMES[config.frame].tokenizer)
        words, vocabulary = splitter(tokenizer), tokenizer.get_vocab()
        frame = Frame(FRAMES[config.frame], words, vocabulary, target.config, folder)
        return TokenConditioner(tokenizer, frame, target.embed, stored.get("words"), up)
    if config.kind == "classes":
        return ClassConditioner(stored["classes"], up)
    if config.kind == "words":
        return CaptionConditioner(stored["words"], stored["condition"])
    text = text_encoder(config, target.config.prefix, placement)
    return CaptionConditioner(text, stored["condition"])


def text_encoder(config: ConditionConfig, prefix: int, placement: Placement) -> T5Conditioner:
    if config.text is None or not os.path.isdir(config.text):
        what = "the text encoder is missing" + (f" ({config.text})" if config.text else "")
        raise WeightsError(what, "prompts cannot be read", Arg("text_encoder", "FOLDER"))
    dtype, where = placement.dtype or torch.float32, (placement.device, placement.to_device)
    how = (placement.keep_text, placement.compile_parts)
    text = T5Conditioner(Path(config.text), prefix, dtype, *where, *how)
    if text.width != config.dim:
        why = f"its features are {text.width} wide, the target reads {config.dim}"
        raise WeightsError(f"the text encoder {text.folder} is for another target", why)
    return text


@torch.no_grad()
def target_of(model: ImageModel, weights: Mapping[str, Tensor]) -> tuple[Target, str]:
    """A plain target of a model's sizes and number formats with other weights, and their digest.

    Raises:
        WeightsError: names are missing or unknown, or shapes differ.
    """
    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise WeightsError("state_dict does not fit", f"{some_names(others)} are no tensors")
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with shapes_only():
        target = Target(model.config.target)
    for name, layer in matrix_layers(target, nn.Linear):
        if name in model.groups:
            put(target, name, QuantizedLinear(layer, model.groups[name]))
    stored = Stored(Checkpoint(Path("state_dict"), shapes, weights.__getitem__))
    return target, stored.fill(target, model.target.dtype, None)


# ----------------------------------------------------------------------------------------- writing


UNFINISHED = ".converting"  # ends the name of a folder that is being written


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """A lock on a folder that ends with its process, however that ends; where there are no such locks, none."""
    if os.name != "posix":  # a folder can be neither opened nor locked there
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        lock_file(opened)
        yield
    finally:
        os.close(opened)


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A new folder next to the output, which takes its name when all is written, and is removed otherwise.

    What killed runs left next to the output is removed first; a folder that another run still fills is locked.
    """
    folder = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for old in output.parent.glob(f".{escape(output.name)}.*{UNFINISHED}"):
            with suppress(OSError), folder_lock(old):
                shutil.rmtree(old)
        folder = Path(tempfile.mkdtemp(UNFINISHED, f".{output.name}.", output.parent))
        with folder_lock(folder):
            yield folder
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)
        for file in folder.iterdir():  # some libraries write for their user alone
            file.chmod(0o666 & ~mask)
        os.replace(folder, output)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"cannot write {output}", why, "another folder or disk") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def write_model(model: ImageModel, folder: Path, progress: Any) -> None:
    """Write a model's parts and `model.json` into an empty folder.

    Args:
        progress: a bar of tqdm; each part is a step of it.
    """
    main = nn.ModuleDict({**model.condition.parts(), "target": model.target})
    if model.code_vectors_alone is not None:
        main["codebook"] = nn.Embedding.from_pretrained(model.code_vectors_alone)
    parts: dict[str, nn.Module | None]
    parts = {TARGET: main, VQ: model.vq, DRAFTER_WEIGHTS: model.drafter}
    if isinstance(model.condition.reader, GlmImageReader):
        parts[VISION] = model.condition.reader.loaded()
    for name, module in parts.items():
        if module is None:
            continue
        progress.set_description_str(name)
        tensors = {key: tensor.contiguous() for key, tensor in module.state_dict().items()}
        if spoiled := [key for key, tensor in tensors.items() if not is_finite(tensor)]:
            why = f"NaN or infinite numbers are in {some_names(spoiled)}"
            raise WeightsError(f"{model.name} is damaged", why, "another copy of its weights")
        save_file(tensors, folder / name)
        progress.update()
    if isinstance(model.condition, TokenConditioner):
        text = model.condition.tokenizer.backend_tokenizer.to_str()
        (folder / TOKENIZER).write_text(text)
        frame = model.condition.frame
        settings = frame.entry.settings
        if settings and (frame.where / settings).is_file():
            shutil.copyfile(frame.where / settings, folder / settings)
    files = {file.name: sha256(file) for file in sorted(folder.iterdir())}
    (folder / CONFIG).write_text(json.dumps(model_json(model, files), indent=1))


def is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    values = tensor.float() if tensor.element_size() == 1 else tensor
    return all(bool(end.isfinite()) for end in values.aminmax())  # to which NaN carries over


def model_json(model: ImageModel, files: dict[str, str]) -> dict[str, Any]:
    config = model.config
    return {
        "name": model.name,
        "files": files,
        "fingerprint": model.fingerprint,
        "target": asdict(config.target),
        "condition": config.condition.as_json(),
        "drafter": config.drafter.as_json() if config.drafter else None,
        "vq": asdict(config.vq) if config.vq else None,
        **({"codebook": config.codebook} if config.codebook else {}),
        **({"pixels": str(model.pixels_by.resolve())} if model.pixels_by else {}),
        **({"vision": asdict(config.vision)} if config.vision and VISION in files else {}),
        **({"notes": model.notes} if model.notes else {}),
        **({"quantized": QUANTIZED_AS[model.quantize]} if model.quantize else {}),
        "sampling": asdict(model.sampling),
        "fastest": {name: list(value) for name, value in model.fastest.items()},
    }
