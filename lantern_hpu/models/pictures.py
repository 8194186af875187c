"""Pictures around the transformer: sources as codes in a prompt, and GLM-Image's codes as pictures.

What is made of a source before a model that draws from it reads its words; and the diffusion model that is published
with GLM-Image, which diffusers draws with.
"""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from lantern_hpu.core import MOST_ASPECT, SourcePicture
from lantern_hpu.errors import Arg, InvalidImageError, OptionError, WeightsError, needing, words
from lantern_hpu.models.config import TransformerConfig, VisionConfig
from lantern_hpu.models.files.checkpoint import shapes_only
from lantern_hpu.models.vq import VQModel
from lantern_hpu.ops.buffers import ToDevice

KEPT = 64  # sources whose codes are kept


class Reader(ABC):
    """Makes codes of sources; those of the last ones are kept by their digests, without the pictures."""

    code_pixels: int  # of what the model sees of a source, along a code

    def __init__(self, up: ToDevice, weight: Tensor) -> None:
        """Args: up: how pictures get to the device of a weight."""
        self.up, self.device = up, weight.device
        self.kept: OrderedDict[str, Tensor] = OrderedDict()
        self.lock = threading.Lock()  # a server reads while others draw

    @abstractmethod
    def size(self, source: SourcePicture) -> tuple[int, int]:
        """Height and width of what the model sees of a source; what is drawn has the same, if no size is asked for."""

    @abstractmethod
    def prepared(self, source: SourcePicture) -> Image.Image:
        """What the model sees of a source."""

    @abstractmethod
    def encode(self, picture: Image.Image) -> Tensor:
        """Codes of what the model sees: [h, w], on its device."""

    def grid(self, source: SourcePicture) -> tuple[int, int]:
        """Rows and columns of a source's codes, which are not needed for it."""
        height, width = self.size(source)
        return height // self.code_pixels, width // self.code_pixels

    @torch.no_grad()
    def codes(self, source: SourcePicture) -> Tensor:
        """[h, w] int64, on the host."""
        with self.lock:
            if source.digest not in self.kept:
                self.kept[source.digest] = self.encode(self.prepared(source)).long().cpu()
            self.kept.move_to_end(source.digest)
            if len(self.kept) > KEPT:
                self.kept.popitem(last=False)
            return self.kept[source.digest]

    def pixels(self, picture: Image.Image) -> Tensor:
        """A picture on the device: [1, 3, H, W] float32 in -1 to 1."""
        values = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]  # [1, 3, H, W] uint8
        return self.up(values.float() / 127.5 - 1, self.device)


# ------------------------------------------------------------------------------------- GLM-Image


class VisionBlock(nn.Module):
    """Attention over all patches of one picture, and an MLP; norms in front of both."""

    whole = (
        "forward",
    )  # what may be compiled by itself, once for all blocks and each number of patches

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        dim, self.heads = config.dim, config.heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, 1e-6), nn.LayerNorm(dim, 1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(dim, 3 * dim), "proj": nn.Linear(dim, dim)})
        inner = config.ffn_dim
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, inner), "fc2": nn.Linear(inner, dim)})

    def forward(self, x: Tensor) -> Tensor:  # [1, h w, C]
        heads = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)  # [1, heads, h w, hd]
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.attn["proj"](mixed)
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


def bilinear_rows(count: int, side: int) -> Tensor:
    """Weights of a table of `side` rows at the middles of `count` equal parts of it: [count, side] float32.

    As torch's `grid_sample` without aligned corners, and with its border repeated.
    """
    at = ((torch.arange(count) + 0.5) * side / count - 0.5).clamp(0, side - 1)  # [count]
    distance = (at[:, None] - torch.arange(side)).abs()  # [count, side]
    return (1 - distance).clamp(min=0)


class VisionTower(nn.Module):
    """GLM-Image's vision transformer, without a last norm, and the projection onto vectors of codes.

    Names are those of the published files, of `model.visual.` and `model.vqmodel.`.
    """

    whole = ("embed", "project")  # with its blocks, whose number makes no other graph

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        dim, patch, self.side = config.dim, config.patch, config.side
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, dim, patch, patch)})
        table = nn.Embedding(config.side**2, dim)
        self.embeddings = nn.ModuleDict({"position_embedding": table})
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.layers))
        self.quant_conv = nn.Conv2d(dim, config.code_dim, 1)

    def forward(self, pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """
        Args:
            pixels: [1, 3, H, W]. rows: [h, side] of `bilinear_rows`. columns: [w, side].

        Returns [h, w, code_dim].
        """
        x = self.embed(pixels, rows, columns)
        for block in self.blocks:
            x = block(x)
        return self.project(x, len(rows))

    def embed(self, pixels: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Patches, and where they are: [1, h w, C]."""
        table: Tensor = self.embeddings["position_embedding"].weight  # type: ignore[assignment]
        patches = self.patch_embed["proj"](pixels.to(table.dtype))[0]  # [C, h, w]
        square = table.float().unflatten(0, (self.side, -1))  # [side, side, C]
        down = (rows @ square.flatten(1)).unflatten(1, (self.side, -1))  # [h, side, C]
        places = (columns @ down).to(table.dtype)  # [h, w, C]
        return (patches.permute(1, 2, 0) + places).flatten(0, 1)[None]

    def project(self, x: Tensor, rows: int) -> Tensor:
        """[1, h w, C] to [h, w, code_dim]."""
        grid = x[0].T.unflatten(1, (rows, -1))[None]  # [1, C, h, w]
        found: Tensor = self.quant_conv(grid)[0].permute(1, 2, 0)
        return found


class GlmImageReader(Reader):
    """Sources as the codes that GLM-Image draws with, one for 32 x 32 of their pixels.

    A source is brought between the least and the largest side first, and to whole codes, so that the diffusion model,
    which reads its pixels, has a cell for each code. The tower's weights are read when a first source comes.
    """

    def __init__(
        self,
        config: VisionConfig,
        fill: Callable[[nn.Module], object],
        vectors: Tensor,
        up: ToDevice,
    ) -> None:
        """
        Args:
            fill: reads the weights of a `VisionTower` that was made on `meta`. vectors: of the codes [V, code_dim].
        """
        super().__init__(up, vectors)
        self.config, self.fill, self.vectors = config, fill, vectors
        self.code_pixels = config.step
        self.tower: VisionTower | None = None

    def size(self, source: SourcePicture) -> tuple[int, int]:
        least, most, step = self.config.least, self.config.most, self.config.step
        short, long = sorted(source.size)
        scale = min(max(1, least / short), most / long)
        height, width = (round(side * scale / step) * step for side in source.size)
        return min(max(height, least), most), min(max(width, least), most)

    def prepared(self, source: SourcePicture) -> Image.Image:
        height, width = self.size(source)
        return source.picture.resize((width, height), Image.Resampling.LANCZOS)

    def loaded(self) -> VisionTower:
        if self.tower is None:
            with shapes_only():
                tower = VisionTower(self.config)
            self.fill(tower)
            self.tower = tower
        return self.tower

    def encode(self, picture: Image.Image) -> Tensor:
        half = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BICUBIC)
        return self.nearest(self.features(self.pixels(half)))

    def features(self, pixels: Tensor) -> Tensor:
        """Of what the model sees, halved [1, 3, H, W]: [h, w, code_dim]."""
        sides = (side // self.config.patch for side in pixels.shape[2:])
        places = [self.up(bilinear_rows(n, self.config.side), self.device) for n in sides]
        return self.loaded()(pixels, *places)

    def nearest(self, features: Tensor) -> Tensor:
        """Codes [..] of features [.., code_dim]."""
        table = F.normalize(self.vectors.float(), dim=-1)  # [V, code_dim]
        return (F.normalize(features.float(), dim=-1) @ table.T).argmax(-1)


# ---------------------------------------------------------------------------------------- Lumina


class LuminaReader(Reader):
    """Sources as codes of the model's own tokenizer of pictures, cropped to the size that is nearest in aspect."""

    def __init__(self, vq: VQModel, config: TransformerConfig, up: ToDevice) -> None:
        """`config` is of the target: a source has at most as many codes as its own size."""
        super().__init__(up, vq.quant_conv.weight)
        self.vq, self.code_pixels = vq, config.code_pixels
        self.step = config.code_pixels * config.grid_step
        self.cells = prod(config.grid) // config.grid_step**2

    def size(self, source: SourcePicture) -> tuple[int, int]:
        height, width = source.size
        cells = self.cells
        fitting = [  # those to which no row or no column can be added
            (rows, columns)
            for columns in range(1, cells + 1)
            for rows in range(max(1, cells // (columns + 1)), cells // columns + 1)
            if max(rows, columns) <= MOST_ASPECT * min(rows, columns)
        ]

        def likeness(cells: tuple[int, int]) -> float:
            down, across = cells[0] / height, cells[1] / width
            return min(down, across) / max(down, across)

        rows, columns = max(fitting, key=likeness)
        return rows * self.step, columns * self.step

    def prepared(self, source: SourcePicture) -> Image.Image:
        """Halved while it is twice too large, brought over the size, and cut around its middle."""
        height, width = self.size(source)
        picture = source.picture
        while picture.width >= 2 * width and picture.height >= 2 * height:
            halves = (picture.width // 2, picture.height // 2)
            picture = picture.resize(halves, Image.Resampling.BOX)
        scale = max(width / picture.width, height / picture.height)
        sides = (round(picture.width * scale), round(picture.height * scale))
        picture = picture.resize(sides, Image.Resampling.BICUBIC)
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        return picture.crop((left, top, left + width, top + height))

    def encode(self, picture: Image.Image) -> Tensor:
        return self.vq.encode(self.pixels(picture))[0]


# ------------------------------------------------------------------------------ GLM-Image's pixels


FIRST, LAST = (0, 41), (0, 42)  # releases of diffusers whose pipeline takes ready codes as here
# A folder's model_index.json may name others, of modules in the folder or in the working folder, and is not read
PARTS = {
    "tokenizer": ("transformers", "ByT5Tokenizer"),
    "text_encoder": ("transformers", "T5EncoderModel"),
    "transformer": ("diffusers", "GlmImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
}


def check_diffusers(version: str | None = None) -> None:
    """Raise an OptionError unless diffusers, of this version or as it is installed, takes codes as they are given."""
    if version is None:
        with needing("diffusers", "it makes pictures of GLM-Image's codes", "glm"):
            import diffusers

            version = diffusers.__version__
    release = tuple(int(part) for part in version.split(".")[:2])
    if FIRST <= release <= LAST:
        return
    known = f"{FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}"
    why = f"{known} are known to take codes as they are given here"
    hint = words('pip install "lantern-hpu[glm]", or', Arg("save_tokens", "FILE.npz"))
    raise OptionError(f"diffusers {version} is refused", why, hint)


def prior_token_ids(tokens: NDArray[np.int64], grid: tuple[int, int]) -> Tensor:
    """The `prior_token_ids` of diffusers' `GlmImagePipeline`: each code of the picture doubled both ways.

    From [B, N], with or without the preview's, to [B, 4 * rows * columns] int64.
    """
    rows, columns = grid
    codes = torch.as_tensor(tokens[:, -rows * columns :]).long().unflatten(1, grid)
    return codes.repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


class DiffusionPixels:
    """diffusers' pipeline without its language model; `options` are those of its call."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device, **options: Any
    ) -> None:
        check_diffusers()
        check_diffusion_folder(folder)
        with needing("diffusers", "it makes pictures of GLM-Image's codes", "glm"):
            pipeline: Any = import_module("diffusers").GlmImagePipeline
        parts: dict[str, Any] = {"vision_language_encoder": None, "processor": None}
        try:
            with warnings.catch_warnings():  # newer releases call it `dtype`
                warnings.filterwarnings("ignore", ".*torch_dtype", FutureWarning)
                for name, (module, kind) in PARTS.items():
                    how: dict[str, Any] = {"local_files_only": True}
                    if name in ("text_encoder", "transformer", "vae"):
                        how |= {"torch_dtype": dtype, "use_safetensors": True}
                    made = getattr(import_module(module), kind)
                    parts[name] = made.from_pretrained(folder / name, **how)
                self.pipe: Any = pipeline(**parts)
        except MemoryError:
            raise
        except Exception as error:  # libraries raise anything for settings of another type
            what, why = f"the diffusion model in {folder} cannot be read", str(error) or repr(error)
            raise WeightsError(what, why.splitlines()[0], "download it again") from error
        self.pipe.to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.options = options

    @torch.no_grad()
    def __call__(
        self,
        tokens: NDArray[np.int64],
        config: TransformerConfig,
        prompts: Sequence[str],
        seeds: Sequence[int],
        sources: Sequence[tuple[Image.Image, Tensor]] = (),
    ) -> list[Image.Image]:
        """Pictures of tokens [B, N], one at a time; of prompts, quoted text is read.

        Args:
            sources: of each picture that all are drawn from what the model saw of it, and its codes [h, w].
        """
        height, width = (config.code_pixels * side for side in config.grid)
        read = source_arguments(sources, self.pipe.device) if sources else {}
        found: list[Image.Image] = []
        for row, prompt, seed in zip(tokens, prompts, seeds, strict=True):
            pixels = self.pipe(
                output_type="np",
                prompt=prompt,
                height=height,
                width=width,
                prior_token_ids=prior_token_ids(row[None], config.grid).to(self.pipe.device),
                generator=torch.Generator().manual_seed(seed),
                **read,
                **self.options,
            ).images  # [1, H, W, 3] in 0 to 1
            found += self.pipe.image_processor.numpy_to_pil(np.nan_to_num(pixels))
            if not np.isfinite(pixels).all():
                raise InvalidImageError.of_pixels(found[-1:])
        return found


def source_arguments(
    sources: Sequence[tuple[Image.Image, Tensor]], device: torch.device
) -> dict[str, Any]:
    """What diffusers' pipeline takes of one picture's sources: pixels, codes doubled both ways, and their grids."""
    codes, grids = [], []
    for _, own in sources:
        rows, columns = own.shape
        codes.append(prior_token_ids(own.flatten()[None].numpy(), (rows, columns))[0])
        grids.append([1, 2 * rows, 2 * columns])
    return {
        "image": [picture for picture, _ in sources],
        "prior_token_image_ids": [torch.cat(codes).to(device)],
        "source_image_grid_thw": [torch.tensor(grids, device=device)],
    }


def check_diffusion_folder(folder: Path) -> None:
    """Raise a WeightsError unless all parts of a pipeline that make pixels have a folder."""
    missing = [name for name in PARTS if not (folder / name).is_dir()]
    if missing:
        hint = words("download it again, or", Arg("save_tokens", "FILE.npz"))
        raise WeightsError(f"folders are missing in {folder}", ", ".join(missing), hint)
