"""A whole text-to-image model in memory, and where its weights go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.methods.request import Request, Sampling
from lantern_hpu.models import neighbours
from lantern_hpu.models.config import ModelConfig, TransformerConfig, VQConfig
from lantern_hpu.models.drafter import Drafter
from lantern_hpu.models.emu3_vq import Emu3VQ
from lantern_hpu.models.text.prefix import Conditioner
from lantern_hpu.models.transformer import Target
from lantern_hpu.models.vq import VQModel
from lantern_hpu.ops.buffers import ToDevice, to_device
from lantern_hpu.ops.kernels import PLAIN, Kernels


@dataclass(frozen=True)
class Placement:
    """Where weights go, and what runs them."""

    dtype: torch.dtype | None = torch.float32  # None: as stored
    device: torch.device | None = None
    kernels: Kernels = PLAIN
    keep_text: str = "host"  # where the text encoder stays once prompts are encoded
    to_device: ToDevice = to_device  # how prompts go up


Tokenizer = VQModel | Emu3VQ  # of pictures


def make_vq(config: VQConfig) -> Tokenizer:
    """A tokenizer of its kind."""
    return Emu3VQ(config) if config.kind == "video" else VQModel(config)


def grid_by_size(
    config: TransformerConfig, size: tuple[int, int] | None, name: str
) -> tuple[int, int] | None:
    """Rows and columns of codes of a picture of this height and width in pixels; None: as the model has them.

    Raises:
        OptionError: the model does not draw it.
    """
    if size is None:
        return None
    pixels, (height, width) = config.code_pixels, size
    asked = f"--height {height} --width {width}"
    if not pixels:
        raise OptionError(f"{asked} cannot be drawn", f"{name} draws one size", "leave them out")
    if min(size) < pixels or height % pixels or width % pixels:
        raise OptionError(asked, f"allowed: multiples of {pixels}", f"--height {32 * pixels}")
    grid = height // pixels, width // pixels
    try:
        config.of_grid(grid)
    except ValueError as error:
        raise OptionError(
            f"{asked} cannot be drawn", str(error), f"--height {32 * pixels}"
        ) from error
    return grid


@dataclass(kw_only=True)
class ImageModel:
    """The parts that turn prompts into images."""

    name: str
    source: str  # what `--model` takes to find it again
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
    neighbour_table: Path | None = None  # a published one; otherwise one is computed
    vq_fingerprint: str = ""  # of the tokenizer, the same in any container; empty without one
    code_vectors_alone: Tensor | None = None  # [codes, dim], where there is no tokenizer beside
    pixels_by: Path | None = None  # a pipeline of diffusers that makes pictures of its codes
    notes: list[str] = field(default_factory=list)  # what a user should know of its parts
    stretched: str | None = None  # to the sizes of which known model: see `models/stretch.py`
    base: ImageModel | None = None  # what it was before, which computes the same
    _near: dict[int, Tensor] = field(default_factory=dict, repr=False)  # by number of neighbours

    @property
    def makes_pictures(self) -> bool:
        """Whether its tokens become pictures."""
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
        """The target's for these requests: of the grid that they ask for, and the shortest prefix for their prompts.

        Raises:
            OptionError: a size that the model does not draw, two sizes, or a prompt that is too long.
        """
        config = self.target.config
        grids = {grid_by_size(config, request.size, self.name) for request in requests}
        if len(grids) > 1:
            why = "a batch has one size of picture"
            raise OptionError(f"{len(grids)} sizes are asked for", why, "a call for each size")
        words = max(self.condition.length(r.prompt) for r in requests) if config.prefixes else 0
        return config.of_grid(grids.pop(), words)

    @property
    def codebook(self) -> Tensor:
        """[V, code_dim]

        Raises:
            WeightsError: there is no tokenizer.
        """
        if self.code_vectors_alone is not None:  # used at length 1
            return F.normalize(self.code_vectors_alone.float(), dim=-1)
        if self.vq is None:
            why, hint = "there is no VQ tokenizer", "--vq, --neighbours, or an exact method"
            raise WeightsError("which codes are neighbours is not known", why, hint)
        return self.vq.quantize.embedding.weight

    @property
    def listed_neighbours(self) -> int:
        """How many neighbours of a code can be had."""
        if self.neighbour_table is None:
            return self.codes - 1
        return neighbours.open_table(self.neighbour_table).shape[1]

    def code_tables(self, neighbours: int, ranks: int) -> tuple[Tensor | None, Tensor | None]:
        """What a relaxed step knows of the codes: the `nearest` and the `code_vectors`, each if it needs them."""
        table = self.nearest(neighbours) if neighbours else None
        return table, self.code_vectors if ranks else None

    @property
    def code_vectors(self) -> Tensor:
        """The codes as the tokenizer looks them up, on the target's device: [V, code_dim] float32."""
        vectors = self.codebook.detach().float()
        if isinstance(self.vq, VQModel):
            vectors = self.vq.quantize.project(vectors)
        return self.of_vocabulary(vectors)

    def nearest(self, k: int) -> Tensor:
        """The k nearest other codes of each code, on the target's device: [V, k] int32."""
        if k not in self._near:
            if self.neighbour_table is None:
                table = neighbours.kept_nearest(self.codebook, k)
            else:
                table = neighbours.read_table(self.neighbour_table, k)
            self._near[k] = self.of_vocabulary(table)
        return self._near[k]

    def of_vocabulary(self, rows: Tensor) -> Tensor:
        """Rows of the codes [codes, ...] as rows of all tokens, on the target's device: [V, ...].

        What closes a row stands alone in its place, and spare codes stand nowhere: whoever is listed as their neighbour
        has no mass there, so any row serves.
        """
        return rows[torch.arange(self.vocabulary) % self.codes].to(self.target.device)
