"""The picture decoder of NVIDIA's Cosmos video tokenizer (DV8x16x16) for one frame: a network of two dimensions.

Of one frame, repeated before itself, a convolution over time is the sum of its taps, and attention over time passes
its values on. Names are those of `decoder.jit` without its wrappers; `files/tokenizers.py` sums the taps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.vq import AttnBlock, Codebook, ResBlock, Tokenizer

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
