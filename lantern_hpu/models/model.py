"""A whole text-to-image model in memory: its parts, where its weights go, and the neighbours of its codes."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.core import Request, Sampling, SourcePicture
from lantern_hpu.errors import Arg, OptionError, OutputError, WeightsError, words
from lantern_hpu.files import check_regular, own_cache, write_file
from lantern_hpu.models.config import ModelConfig, TransformerConfig, VisionConfig, VQConfig
from lantern_hpu.models.files.checkpoint import shapes_only
from lantern_hpu.models.files.names import TARGET
from lantern_hpu.models.pictures import VisionTower
from lantern_hpu.models.text.frames import check_sources
from lantern_hpu.models.text.prefix import Conditioner, condition_modules
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.models.vq import CosmosVQ, Emu3VQ, MoVQ, Tokenizer, VQModel, count_decoder
from lantern_hpu.ops.buffers import ToDevice, leave, to_device
from lantern_hpu.ops.kernels import PLAIN, Kernels
from lantern_hpu.ops.quantized import matrix_layers

CACHED_NEIGHBOURS = 1024  # neighbours kept in the cache: no published setting uses more than 1000
COMPARED = 1024  # codes compared with all others at a time
CHECKED_ROWS = 16  # rows of a kept table that are computed again


@dataclass(frozen=True)
class Placement:
    """Where weights go, and what runs them."""

    dtype: torch.dtype | None = torch.float32  # None: as stored
    device: torch.device | None = None
    kernels: Kernels = PLAIN
    keep_text: str = "host"  # where the text encoder stays once prompts are encoded
    to_device: ToDevice = to_device  # how prompts go up
    quantize: str | None = None  # the smaller format that matrices are turned into
    # What is done to a module that runs outside of the step, once it has its weights
    compile_parts: Callable[[nn.Module], None] = leave


TOKENIZERS = {"image": VQModel, "video": Emu3VQ, "movq": MoVQ, "cosmos": CosmosVQ}  # of pictures


def count_numbers(*modules: nn.Module | None) -> int:
    """Of the parameters of modules."""
    return sum(p.numel() for module in modules if module for p in module.parameters())


def count_tokenizer(config: VQConfig | None) -> int:
    """Numbers of an image tokenizer."""
    if config is None:
        return 0
    kind = TOKENIZERS[config.kind]
    with shapes_only():
        return count_decoder(config) if issubclass(kind, Emu3VQ) else count_numbers(kind(config))


@lru_cache(64)
def count_vision(config: VisionConfig | None) -> int:
    """Numbers of what makes codes of pictures where no tokenizer does; it is read when a first picture comes."""
    if config is None:
        return 0
    with shapes_only():
        return count_numbers(VisionTower(config))


@dataclass(frozen=True)
class EmptyModel:
    """The modules of a model as they are before its weights are read: what it takes is counted on them."""

    config: ModelConfig
    target: Target
    drafter: Drafter | None
    stored: dict[str, Any]  # modules of the condition

    @classmethod
    @lru_cache(64)
    def of(cls, config: ModelConfig) -> EmptyModel:
        drafter = None
        with shapes_only():
            target = Target(config.target)
            if config.drafter is not None:
                drafter = Drafter(config.target, config.drafter)
            stored = condition_modules(config.condition, config.target)
        return cls(config, target, drafter, stored)

    @property
    def body(self) -> int:
        """Numbers that an image token is multiplied with, but for the head."""
        layers: Any = self.target.layers
        return count_numbers(layers) - count_numbers(*(layer.word_ffn for layer in layers))

    @property
    def head(self) -> int:
        """Numbers of the head."""
        return count_numbers(self.target.head)

    @property
    def drafting(self) -> int:
        """Numbers that a pass of the drafter reads: all but its embedding."""
        if self.drafter is None:
            return 0
        return count_numbers(self.drafter) - count_numbers(self.drafter.embed)

    @property
    def matrices(self) -> tuple[list[Tensor], list[Tensor]]:
        """Of target and drafter: those that may be kept in a smaller format."""
        target, drafter = (
            [layer.weight for *_, layer in matrix_layers(module, nn.Linear)]
            for module in (self.target, self.drafter or nn.Module())
        )
        return target, drafter


def parameters_of(config: ModelConfig) -> dict[str, int]:
    """Numbers that each part of a model holds; 0 where there is none."""
    empty = EmptyModel.of(config)
    vectors = config.target.codes * config.codebook
    return {
        "target": count_numbers(empty.target, *empty.stored.values()) + vectors,
        "drafter": count_numbers(empty.drafter),
        "vq": count_tokenizer(config.vq),
        "text": config.text.parameters if config.text else 0,
    }


def of_size(model: ModelConfig, size: tuple[int, int], name: str) -> TransformerConfig:
    """The target's config for pictures of this height and width in pixels.

    Raises:
        OptionError: the model of this name has no such size.
    """
    height, width = size
    config, own = model.target, model.image_size
    pixels = config.code_pixels
    asked = words(Arg("height", height), Arg("width", width))
    if not pixels and size == own:
        return config
    if not pixels:
        why = f"{name} generates one size, {own[1]} x {own[0]} pixels"
        raise OptionError(words(asked, "cannot be used"), why, "leave them out")
    trained = [(rows * pixels, columns * pixels) for rows, columns in config.grids]
    if trained and size not in trained:
        why = f"allowed, height x width: {', '.join(f'{h} x {w}' for h, w in trained)}"
        first = words(Arg("height", trained[0][0]), Arg("width", trained[0][1]))
        raise OptionError(asked, why, first)
    usual = Arg("height", 32 * pixels)
    step = pixels * config.grid_step
    if min(size) < step or height % step or width % step:
        raise OptionError(asked, f"allowed: multiples of {step}", usual)
    try:
        return config.of_grid((height // pixels, width // pixels))
    except ValueError as error:
        raise OptionError(words(asked, "cannot be used"), str(error), usual) from error


@dataclass(kw_only=True)
class ImageModel:
    """The parts that turn prompts into images."""

    name: str
    source: str  # what `model` takes to find it again
    config: ModelConfig
    files: dict[str, str]  # digest of each part: which weights these are
    fingerprint: str  # which target this is: a drafter belongs to one
    target: Target
    drafter: Drafter | None
    condition: Conditioner
    vq: Tokenizer | None  # None: its tokens become no pictures
    sampling: Sampling  # default settings
    # Device name, or `cpu:1` for one image at a time, to [method, tree or None]: the fastest that was measured there
    fastest: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    vq_fingerprint: str = ""  # of the tokenizer, the same in any container; empty without one
    code_vectors_alone: Tensor | None = None  # [codes, dim], where there is no tokenizer
    pixels_by: Path | None = None  # a pipeline of diffusers that makes pictures of its codes
    quantize: str | None = None  # the smaller format of the matrices of target and drafter
    groups: dict[str, int] = field(default_factory=dict)  # of each such layer of the target
    notes: list[str] = field(default_factory=list)  # what a user should know of its parts
    updated: bool = False  # whether the target has other weights than the files
    _near: dict[int, Tensor] = field(default_factory=dict, repr=False)  # by number of neighbours

    def note_update(self, digest: str) -> None:
        """Its target has other weights now; their digest is of a few numbers, which may be as they were."""
        both = f"{self.files[TARGET]} {digest}"
        digest = hashlib.sha256(both.encode()).hexdigest()
        self.files = self.files | {TARGET: digest}  # results that are there keep the former ones
        self.updated = True

    def size_of_sources(self, sources: Sequence[SourcePicture]) -> tuple[int, int] | None:
        """Height and width of what is drawn where none are asked for: the first source's, as the model has sizes."""
        reader = self.condition.reader
        return reader.size(sources[0]) if sources and reader is not None else None

    @property
    def makes_pictures(self) -> bool:
        return self.vq is not None or self.pixels_by is not None

    @property
    def stepping(self) -> list[nn.Module]:
        """What a step multiplies by."""
        return [self.target, *([self.drafter] if self.drafter is not None else [])]

    @property
    def vocabulary(self) -> int:
        """V, image tokens."""
        return self.target.config.vocab_size

    @property
    def codes(self) -> int:
        """Image tokens that are codes of the tokenizer."""
        return self.target.config.codes

    def sizes(self, requests: Sequence[Request]) -> TransformerConfig:
        """The target's for these requests: of the grid that they ask for, and the shortest prefix for their prompts."""
        sizes = {request.size for request in requests}
        if len(sizes) > 1:
            why = "a batch has one size of picture, and sources of unequal shapes have one each"
            hint = words(Arg("height"), "and", Arg("width"), "for all, or a call for each size")
            raise OptionError(f"these would be pictures of {len(sizes)} sizes", why, hint)
        config = self.sized(sizes.pop())
        if pictures := max(len(r.sources) for r in requests):
            check_sources(self.config, self.name, pictures)
        sourced = {bool(self.condition.grids(request)) for request in requests}
        if len(sourced) > 1:
            why = "of a batch all images have pictures to draw from, or none has"
            raise OptionError(words(Arg("image"), "is missing"), why, "a call for each kind")
        if not config.prefixes and True not in sourced:
            return config
        longest = max(self.condition.length(r) for r in requests)
        return config.of_grid(config.grid, longest, True in sourced)

    def sized(self, size: tuple[int, int] | None) -> TransformerConfig:
        """The target's for pictures of a height and width in pixels; None: as the model has them."""
        config = self.target.config
        return config if size is None else of_size(self.config, size, self.name)

    @property
    def knows_neighbours(self) -> bool:
        """Whether codes are known to be near each other, which relaxation by neighbours needs."""
        return self.vq is not None or self.code_vectors_alone is not None

    @property
    def codebook(self) -> Tensor:
        """[V, code_dim]"""
        if self.code_vectors_alone is not None:  # used at length 1
            return F.normalize(self.code_vectors_alone.float(), dim=-1)
        if self.vq is None:
            hint = words(Arg("vq"), ", or an exact method")
            why = "there is no VQ tokenizer"
            raise WeightsError("which codes are neighbours is not known", why, hint)
        return self.vq.quantize.embedding.weight

    @torch.no_grad()
    def code_tables(self, neighbours: int, ranks: int) -> tuple[Tensor | None, Tensor | None]:
        """What a relaxed step knows of the codes: the `nearest`, and what the target reads of each token, [V, H] in
        its number format; each if it needs them."""
        tokens = torch.arange(self.vocabulary, device=self.target.device)
        table = self.nearest(neighbours) if neighbours else None
        return table, self.target.embed(tokens) if ranks else None

    def nearest(self, k: int) -> Tensor:
        """The k nearest other codes of each code, on the target's device: [V, k] int32."""
        if k not in self._near:
            rows = cached_nearest(self.codebook, k)  # [codes, k]
            # No code has mass where a row's end is drawn, and spare codes are never drawn: any row serves for those
            every = rows[torch.arange(self.vocabulary) % self.codes]
            self._near[k] = every.to(self.target.device)
        return self._near[k]


def nearest_codes(codebook: Tensor, k: int) -> Tensor:
    """The k nearest other codes of each code, by L2 distance of the raw rows, nearest first.

    Distances are computed in float64 and equal ones ordered by code, so that every device gets the same table.

    From [V, dim] to [V, k] int32, k < V; no code is its own neighbour.
    """
    size = len(codebook)
    if not 0 < k < size:
        why = f"a codebook of {size} allows 1 to {size - 1}"
        raise OptionError(f"{k} neighbours were asked for", why)
    rows = codebook.detach().cpu().double()
    parts = (code_distances(rows, part) for part in torch.arange(size).split(COMPARED))
    return torch.cat([part.sort(dim=-1, stable=True).indices[:, :k] for part in parts]).int()


def code_distances(codebook: Tensor, index: Tensor) -> Tensor:
    """L2 distance of some codes [n] to all others, infinite to themselves: [n, V]."""
    exact = "donot_use_mm_for_euclid_dist"
    result = torch.cdist(codebook[index], codebook, compute_mode=exact)  # [n, V]
    result[torch.arange(len(index)), index] = float("inf")
    return result


def cached_nearest(codebook: Tensor, k: int) -> Tensor:
    """`nearest_codes`, kept in the user's cache by the codebook's digest, where that can be written."""
    rows = codebook.detach().cpu().float().contiguous()
    width = min(max(k, CACHED_NEIGHBOURS), len(rows) - 1)
    digest = hashlib.sha256(rows.numpy().tobytes()).hexdigest()[:32]
    try:
        file = own_cache("neighbours") / f"{digest}-{width}.npy"
    except OutputError:
        return nearest_codes(rows, k)
    if os.path.lexists(file):
        try:
            return read_kept(file, rows, width)[:, :k].contiguous()
        except WeightsError as error:
            warnings.warn(f"{error.reason}; it is made again", stacklevel=2)
            with suppress(OSError):
                file.unlink()
    table = nearest_codes(rows, width)
    content = io.BytesIO()
    np.save(content, table.numpy(), allow_pickle=False)
    with suppress(OutputError):
        write_file(file, content.getvalue(), force=True)
    return table[:, :k].contiguous()


def read_kept(file: Path, codebook: Tensor, width: int) -> Tensor:
    """A table [V, width] int32 of the user's cache.

    All of it is checked, as what reads tables checks no index, and some rows are computed again.

    Raises:
        WeightsError: it cannot be read, or is of another codebook.
    """
    check_regular(file)
    try:
        table = np.load(file, allow_pickle=False)
    except Exception as error:  # a damaged header may raise anything
        raise WeightsError(f"cannot read the neighbours in {file}", str(error)) from error
    size = len(codebook)
    index = torch.linspace(0, size - 1, min(CHECKED_ROWS, size)).long()
    order = code_distances(codebook.double(), index).sort(dim=-1, stable=True).indices
    is_table = table.shape == (size, width) and table.dtype == np.int32
    in_range = is_table and table.min() >= 0 and table.max() < size
    if not in_range or not np.array_equal(table[index.numpy()], order[:, :width]):
        raise WeightsError(f"cannot use the neighbours in {file}", "it is of another codebook")
    return torch.from_numpy(table)
