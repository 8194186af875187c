"""The tokenizers of pictures: images to a grid of codes and back.

LlamaGen's (vq_ds16, vq_ds8) and Chameleon's are `VQModel`; of Emu3's, MoVQGAN and NVIDIA's Cosmos only the decoders are
here. Parameter names are those of the published files, or of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.errors import needing
from lantern_hpu.models.config import VQConfig

# Vectors compared with the codebook at a time: the table of scores stays in a processor's cache.
SEARCH_ROWS = 512


def _norm(channels: int, groups: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, channels, eps=1e-6)


def _conv3(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


class ResBlock(nn.Module):
    """norm, swish, conv, twice, around a shortcut."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.norm1 = _norm(inputs, groups)
        self.conv1: nn.Module = _conv3(inputs, outputs)
        self.norm2 = _norm(outputs, groups)
        self.conv2: nn.Module = _conv3(outputs, outputs)
        # Where the width stays the same the checkpoints have no shortcut weight.
        self.nin_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))  # [B, outputs, H, W]
        h = self.conv2(F.silu(self.norm2(h)))  # [B, outputs, H, W]
        return h + self.nin_shortcut(x)


class AttnBlock(nn.Module):
    """Single-head self-attention over the pixels of a feature map."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = _norm(channels, groups)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)  # [B, C, H, W]
        q, k, v = (f(h).flatten(2).transpose(1, 2) for f in (self.q, self.k, self.v))  # [B, HW, C]
        h = F.scaled_dot_product_attention(q, k, v)  # [B, HW, C], scaled by C ** -0.5
        return x + self.proj_out(h.transpose(1, 2).reshape(x.shape))


class Downsample(nn.Module):
    """Halve the grid with a strided convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        # The checkpoints were trained with padding on the right and the bottom only.
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Double the grid: nearest neighbour, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = _conv3(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """The blocks at one resolution, with attention if any, then a change of resolution if any."""

    def __init__(
        self, inputs: int, outputs: int, blocks: int, groups: int, attention: bool
    ) -> None:
        super().__init__()
        widths = [inputs] + [outputs] * blocks
        self.res = nn.ModuleList(
            ResBlock(a, b, groups) for a, b in zip(widths[:-1], widths[1:], strict=True)
        )
        count = blocks if attention else 0
        self.attn = nn.ModuleList(AttnBlock(outputs, groups) for _ in range(count))
        self.downsample: nn.Module = nn.Identity()
        self.upsample: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[index](x)
        return self.upsample(self.downsample(x))


def _middle(channels: int, groups: int) -> nn.ModuleList:
    first, attention = ResBlock(channels, channels, groups), AttnBlock(channels, groups)
    return nn.ModuleList([first, attention, ResBlock(channels, channels, groups)])


class Encoder(nn.Module):
    """Images to continuous latents."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.shrink = 1 << config.decoder_only
        widths = [config.channels * m for m in config.multipliers[config.decoder_only :]]
        width, last = widths[0], len(widths) - 1
        self.conv_in = _conv3(3, width)
        self.conv_blocks = nn.ModuleList()
        for index, outputs in enumerate(widths):
            attention = config.attention and index == last
            level = Level(width, outputs, config.res_blocks, config.groups, attention)
            width = outputs
            if index != last:
                level.downsample = Downsample(width)
            self.conv_blocks.append(level)
        self.mid = _middle(width, config.groups)
        self.norm_out = _norm(width, config.groups)
        self.conv_out = _conv3(width, config.z_channels)

    def forward(self, images: Tensor) -> Tensor:
        if self.shrink > 1:
            images = F.avg_pool2d(images, self.shrink)
        h = self.conv_in(images)  # [B, width, H, W]
        for block in (*self.conv_blocks, *self.mid):
            h = block(h)
        return self.conv_out(F.silu(self.norm_out(h)))  # [B, z_channels, h, w]


class Decoder(nn.Module):
    """Quantised latents to images: the encoder mirrored, with one block more a level."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        last = len(config.multipliers) - 1
        width = config.channels * config.multipliers[last]
        self.conv_in = _conv3(config.z_channels, width)
        self.mid = _middle(width, config.groups)
        self.conv_blocks = nn.ModuleList()
        for index in range(last, -1, -1):
            outputs = config.channels * config.multipliers[index]
            attention = config.attention and index == last
            level = Level(width, outputs, config.res_blocks + 1, config.groups, attention)
            width = outputs
            if index != 0:
                level.upsample = Upsample(width)
            self.conv_blocks.append(level)
        self.norm_out = _norm(width, config.groups)
        self.conv_out = _conv3(width, 3)

    def forward(self, z: Tensor) -> Tensor:
        h = self.conv_in(z)  # [B, deepest width, h, w]
        for block in (*self.mid, *self.conv_blocks):
            h = block(h)
        return self.conv_out(F.silu(self.norm_out(h)))  # [B, 3, H, W]


class Codebook(nn.Module):
    """The table of codes, under the name the checkpoints give it."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.normalize = config.normalize_codebook
        self.embedding = nn.Embedding(config.codebook_size, config.code_dim)

    def project(self, vectors: Tensor) -> Tensor:
        """Onto the sphere the codes live on, where the codebook is normalised."""
        return F.normalize(vectors, dim=-1) if self.normalize else vectors

    def nearest(self, z: Tensor) -> Tensor:
        """The code nearest to each vector: [..., code_dim] to [...] int64."""
        # Never in bfloat16: neighbouring codes of a large codebook are closer than its rounding.
        with torch.autocast(z.device.type, enabled=False):
            table = self.project(self.embedding.weight.float())  # [V, code_dim]
            # |z - e|^2 without the |z|^2 that all codes share, negated and halved.
            bias = -0.5 * table.square().sum(-1)  # [V]
            flat = self.project(z.float()).reshape(-1, table.shape[1])  # [n, code_dim]
            parts = flat.split(SEARCH_ROWS)
            codes = [torch.addmm(bias, part, table.T).argmax(-1) for part in parts]
            return torch.cat(codes).reshape(z.shape[:-1])

    def look_up(self, codes: Tensor) -> Tensor:
        """The vectors of the codes: [...] int to [..., code_dim]."""
        return self.project(self.embedding(codes))


def as_bytes(pixels: Tensor) -> Tensor:
    """Pixels [B, 3, H, W] in [-1, 1] as bytes, and behind them whether all numbers are finite: [B, H * W * 3 + 1]."""
    scaled = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    rows = scaled.permute(0, 2, 3, 1).flatten(1)  # [B, H * W * 3]
    finite = pixels.abs().flatten(1).amax(1, keepdim=True) < math.inf  # [B, 1]; of NaN it is false
    return torch.cat([rows, finite.to(torch.uint8)], 1)


class Tokenizer(nn.Module):
    """Turns codes into pictures."""

    whole: tuple[str, ...] = ("draw",)  # what may be compiled by itself, as of a `Block`
    config: VQConfig
    quantize: Codebook
    post_quant_conv: nn.Conv2d
    decoder: Any

    def decode_latents(self, z: Tensor) -> Tensor:
        """Code vectors [B, h, w, code_dim] to images [B, 3, H, W], not clamped."""
        weight = self.post_quant_conv.weight
        z = z.permute(0, 3, 1, 2).to(weight.dtype)  # [B, code_dim, h, w]
        return cast(Tensor, self.decoder(self.post_quant_conv(z)))

    def decode_codes(self, codes: Tensor, grid: tuple[int, int]) -> Tensor:
        """Codes [B, N] int, row by row on a grid of h rows and w columns, to images [B, 3, H, W] in [-1, 1]."""
        z = self.quantize.look_up(codes.reshape(-1, *grid))  # [B, h, w, code_dim]
        return self.decode_latents(z).float().clamp(-1, 1)

    def draw(self, codes: Tensor, grid: tuple[int, int]) -> Tensor:
        """The same as `as_bytes` has it."""
        return as_bytes(self.decode_codes(codes, grid))


class VQModel(Tokenizer):
    """LlamaGen's tokenizer, which encodes images as well."""

    whole = ("draw", "encode")

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = Codebook(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.code_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.code_dim, config.z_channels, 1)

    def latents(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] to latents before quantisation, [B, h, w, code_dim]."""
        z = self.quant_conv(self.encoder(images))  # [B, code_dim, h, w]
        return self.quantize.project(z.permute(0, 2, 3, 1).float())

    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in [-1, 1] to codes [B, h, w] int64."""
        return self.quantize.nearest(self.latents(images))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A training pass: images drawn [B, 3, H, W], latents [B, h, w, code_dim], codes [B, h, w].

        The decoder reads the codes' vectors, and their gradient goes to the latents (straight-through).
        """
        z = self.latents(images)  # [B, h, w, code_dim]
        with torch.no_grad():
            codes = self.quantize.nearest(z)  # [B, h, w]
        chosen = self.quantize.look_up(codes)  # [B, h, w, code_dim]
        return self.decode_latents(z + (chosen - z).detach()), z, codes


# -------------------------------------------------------------------------------- Emu3 and MoVQGAN


class Emu3VQ(Tokenizer):
    """The parts of a tokenizer that turn codes into pictures."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        with needing("transformers", "it makes pictures of Emu3's codes"):
            from transformers.models.emu3 import configuration_emu3, modeling_emu3
        theirs: Any = modeling_emu3
        coarsest = len(config.multipliers) - 1
        sizes: Any = configuration_emu3.Emu3VQVAEConfig(
            embed_dim=config.code_dim,
            latent_channels=config.z_channels,
            base_channels=config.channels,
            channel_multiplier=list(config.multipliers),
            num_res_blocks=config.res_blocks,
            attn_resolutions=[coarsest] if config.attention else [],
            hidden_size=config.channels * config.multipliers[-1],
        )
        sizes._attn_implementation = "sdpa"
        self.config, self.quantize = config, Codebook(config)
        self.post_quant_conv = theirs.Emu3VQVAEConv3d(
            config.code_dim, config.z_channels, kernel_size=(3, 1, 1), stride=(1, 1, 1)
        )
        self.decoder = theirs.Emu3VQVAEDecoder(sizes)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm3d):  # a counter of its training
                module.num_batches_tracked = None

    def frames(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """What the decoder reads, and what scales its norms, of the codes' vectors [B, code_dim, h, w]."""
        z = vectors[:, :, None]  # [B, code_dim, 1, h, w]
        return self.first_frame(self.post_quant_conv(z)), self.first_frame(z)

    def first_frame(self, x: Tensor) -> Tensor:
        """[B, z, 1, h, w] through time: [B, z, h, w]."""
        for block in self.decoder.time_res_stack:
            x = block(x)
        for double in self.decoder.time_conv:
            x = F.silu(double(x))
        return x[:, :, 0]

    def decode_latents(self, z: Tensor) -> Tensor:
        x, scales = self.frames(z.permute(0, 3, 1, 2))  # [B, z, h, w], [B, code_dim, h, w]
        decoder = self.decoder
        x = decoder.middle_block(decoder.conv_in(x), scales)
        x = F.silu(decoder.norm_out(decoder.up_block(x, scales), scales))
        return decoder.conv_out(x)


class MoVQ(Emu3VQ):
    """Of MoVQGAN's parts those that turn codes into pictures."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__(config)
        self.post_quant_conv = nn.Conv2d(config.code_dim, config.z_channels, 1)
        del self.decoder.time_res_stack, self.decoder.time_conv

    def frames(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return self.post_quant_conv(vectors), vectors


def count_decoder(config: VQConfig) -> int:
    """Numbers of an `Emu3VQ` or `MoVQ`, counted without transformers, which takes seconds to load.

    They are those of our own decoder, of norms that the codes scale, and of Emu3's convolutions over time.
    """
    decoder, z, code = Decoder(config), config.z_channels, config.code_dim
    norms = [module for module in decoder.modules() if isinstance(module, nn.GroupNorm)]
    scales = 2 * (code + 1) * sum(norm.num_channels for norm in norms)
    total = sum(p.numel() for p in decoder.parameters())
    total += scales + config.codebook_size * code + (code + 1) * z
    if config.kind == "movq":
        return total
    over_time = (27 * z + 1) * z  # over three frames
    return total + 2 * code * z + config.res_blocks * 2 * (4 * z + over_time) + 2 * over_time


# ------------------------------------------------------------------------------------------ Cosmos


PATCH = 64  # channels a colour: the Haar transform twice over time, rows and columns


def fsq_table(levels: Sequence[int]) -> Tensor:
    """The codes' vectors [V, len(levels)] of a finite scalar quantiser: digits of the code, the first the lowest."""
    code, columns = torch.arange(int(torch.tensor(levels).prod())), []
    for count in levels:
        columns.append((code % count - count // 2) / (count // 2))
        code = code // count
    return torch.stack(columns, 1)


def pair(inputs: int, outputs: int) -> nn.Sequential:
    """A convolution over space, then one over time."""
    space = nn.Conv2d(inputs, outputs, 3, padding=1)
    return nn.Sequential(space, nn.Conv2d(outputs, outputs, 1))


def inverse_haar(x: Tensor) -> Tensor:
    """The last frame of the inverse transform: [B, 8 C, H, W], bands by time, row, column, to [B, C, 2 H, 2 W]."""
    early, late = x.chunk(2, 1)
    ll, lh, hl, hh = (early - late).chunk(4, 1)  # [B, C, H, W]
    top = torch.stack([ll + lh + hl + hh, ll - lh + hl - hh], -1)  # [B, C, H, W, 2]
    bottom = torch.stack([ll + lh - hl - hh, ll - lh - hl + hh], -1)
    return torch.stack([top, bottom], 3).flatten(4).flatten(2, 3)


class PairBlock(ResBlock):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 1)
        self.conv1 = pair(inputs, outputs)
        self.conv2 = pair(outputs, outputs)


class FrameAttention(nn.Module):
    """Attention over time of one frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels, eps=1e-6)
        self.v, self.proj_out = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj_out(self.v(self.norm(x)))


class Doubling(nn.Module):
    """Twice the rows and columns; of the levels that double time too, `conv1` is over time."""

    def __init__(self, channels: int, time: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 1) if time else None
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv3 = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.conv1 is None else x + self.conv1(x)
        x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv3(x + self.conv2(x))


class CosmosDecoder(nn.Module):
    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in config.multipliers]
        width, last = widths[-1], len(widths) - 1
        self.conv_in = pair(config.z_channels, width)
        attention = nn.Sequential(AttnBlock(width, 1), FrameAttention(width))
        parts = {"block_1": PairBlock(width, width), "attn_1": attention}
        self.mid = nn.ModuleDict({**parts, "block_2": PairBlock(width, width)})
        self.up = nn.ModuleList()
        for level in range(last, -1, -1):
            inputs = [width] + [widths[level]] * config.res_blocks
            width = widths[level]
            block = nn.Sequential(*(PairBlock(before, width) for before in inputs))
            after = Doubling(width, time=level == last - 1) if level else nn.Identity()
            self.up.insert(0, nn.ModuleDict({"block": block, "upsample": after}))
        self.norm_out = nn.GroupNorm(1, width, eps=1e-6)
        self.conv_out = pair(width, 3 * PATCH)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)  # [B, deepest width, h, w]
        for part in (self.mid, *reversed(self.up)):  # in the order of their names
            for module in part.children():
                x = module(x)
        x = self.conv_out(F.silu(self.norm_out(x)))  # [B, 192, 4 h, 4 w]
        return inverse_haar(inverse_haar(x))  # [B, 3, 16 h, 16 w]


class CosmosVQ(Tokenizer):
    """The parts of the tokenizer that turn codes into pictures."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config, self.quantize = config, Codebook(config)
        self.post_quant_conv = nn.Conv2d(config.code_dim, config.z_channels, 1)
        self.decoder = CosmosDecoder(config)
