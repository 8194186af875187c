"""Emu3's picture decoder: a video decoder of which a picture is the first frame.

Parameter names are those of BAAI/Emu3-VisionTokenizer and of transformers' Emu3VQVAE. Codes go through causal
convolutions over time, which make four frames of one; as frames meet nowhere else, only the first is decoded. Norms are
scaled and shifted by the codes themselves (MoVQ, arXiv 2209.09002). What encodes pictures is left out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.vq import Upsample

TIME_BLOCKS = 2  # doublings of time: log2 of four frames a code


class CausalConv(nn.Module):
    """A convolution over time and space that looks back alone."""

    def __init__(self, inputs: int, outputs: int, side: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, (3, side, side))
        self.pad = (side // 2,) * 4 + (2, 0)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, T, h, w]
        return self.conv(F.pad(x, self.pad))


class FixedNorm(nn.Module):
    """A batch norm with the statistics of its training."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.ones(channels)),
            nn.Parameter(torch.zeros(channels)),
        )
        self.running_mean = nn.Parameter(torch.zeros(channels))
        self.running_var = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=1e-5
        )


class TimeBlock(nn.Module):
    """norm, swish, convolution over time, twice, around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = FixedNorm(channels), FixedNorm(channels)
        self.conv1, self.conv2 = (
            CausalConv(channels, channels, 3),
            CausalConv(channels, channels, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


class TimeUpsample(nn.Module):
    """Each frame twice, then a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = CausalConv(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.repeat_interleave(2, 2))


class CodeNorm(nn.Module):
    """A group norm whose scale and shift come from the codes at each place."""

    def __init__(self, config: VQConfig, channels: int) -> None:
        super().__init__()
        self.norm_layer = nn.GroupNorm(config.groups, channels, eps=1e-6)
        self.conv_y = nn.Conv2d(config.code_dim, channels, 1)
        self.conv_b = nn.Conv2d(config.code_dim, channels, 1)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:  # [B, C, H, W], [B, code_dim, h, w]
        codes = F.interpolate(codes, size=x.shape[-2:], mode="nearest")
        return self.norm_layer(x) * self.conv_y(codes) + self.conv_b(codes)


class CodeBlock(nn.Module):
    """norm, swish, conv, twice, around a shortcut."""

    def __init__(self, config: VQConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = CodeNorm(config, inputs), CodeNorm(config, outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x, codes)))
        h = self.conv2(F.silu(self.norm2(h, codes)))
        return h + self.nin_shortcut(x)


class PixelAttention(nn.Module):
    """Single-head self-attention over the pixels of a feature map."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.v_proj, self.out_proj = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(2).transpose(1, 2)  # [B, HW, C]
        q, k, v = self.q_proj(flat), self.k_proj(flat), self.v_proj(flat)
        mixed = self.out_proj(F.scaled_dot_product_attention(q, k, v))
        return mixed.transpose(1, 2).reshape(x.shape)


class Middle(nn.Module):
    """Two blocks around an attention, at the coarsest level."""

    def __init__(self, config: VQConfig, channels: int) -> None:
        super().__init__()
        self.block_1, self.block_2 = (CodeBlock(config, channels, channels) for _ in range(2))
        self.attn_1, self.attn_norm = PixelAttention(channels), CodeNorm(config, channels)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        x = self.block_1(x, codes)
        return self.block_2(x + self.attn_1(self.attn_norm(x, codes)), codes)


class VideoLevel(nn.Module):
    """The blocks at one resolution, with attention if any, then twice the resolution if it is not the last."""

    def __init__(
        self, config: VQConfig, inputs: int, outputs: int, attends: bool, last: bool
    ) -> None:
        super().__init__()
        widths = [inputs, *[outputs] * (config.res_blocks + 1)]
        self.block = nn.ModuleList(
            CodeBlock(config, a, b) for a, b in zip(widths[:-1], widths[1:], strict=True)
        )
        count = len(self.block) if attends else 0
        self.attn = nn.ModuleList(PixelAttention(outputs) for _ in range(count))
        self.attn_norms = nn.ModuleList(CodeNorm(config, outputs) for _ in range(count))
        self.upsample = nn.Identity() if last else Upsample(outputs)

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        for index, block in enumerate(self.block):
            x = block(x, codes)
            if len(self.attn):
                x = x + self.attn[index](self.attn_norms[index](x, codes))
        return self.upsample(x)


class Levels(nn.Module):
    """From the coarsest level to the finest, which the files count as the first."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in config.multipliers]
        before = [*widths[1:], widths[-1]]  # of the level that comes before each
        deepest = len(widths) - 1
        self.up = nn.ModuleList(
            VideoLevel(config, before[i], widths[i], config.attention and i == deepest, i == 0)
            for i in range(len(widths))
        )

    def forward(self, x: Tensor, codes: Tensor) -> Tensor:
        for level in reversed(self.up):
            x = level(x, codes)
        return x


class VideoDecoder(nn.Module):
    """Code vectors to pictures."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        z, finest = config.z_channels, config.channels * config.multipliers[0]
        deepest = config.channels * config.multipliers[-1]
        self.time_res_stack = nn.ModuleList(TimeBlock(z) for _ in range(config.res_blocks))
        self.time_conv = nn.ModuleList(TimeUpsample(z) for _ in range(TIME_BLOCKS))
        self.conv_in = nn.Conv2d(z, deepest, 3, padding=1)
        self.middle_block, self.up_block = Middle(config, deepest), Levels(config)
        self.norm_out = CodeNorm(config, finest)
        self.conv_out = nn.Conv2d(finest, 3, 3, padding=1)

    def first_frame(self, x: Tensor) -> Tensor:
        """[B, z, 1, h, w] through time: [B, z, h, w]."""
        for block in self.time_res_stack:
            x = block(x)
        for grow in self.time_conv:
            x = F.silu(grow(x))
        return x[:, :, 0]

    def forward(self, latents: Tensor, codes: Tensor) -> Tensor:
        """Latents and code vectors, both [B, z, 1, h, w], to images [B, 3, H, W]."""
        x, codes = self.first_frame(latents), self.first_frame(codes)
        x = self.up_block(self.middle_block(self.conv_in(x), codes), codes)
        return self.conv_out(F.silu(self.norm_out(x, codes)))


class CodeTable(nn.Module):
    """The codes, under the name that the files give them."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.codebook_size, config.code_dim)


class Emu3VQ(nn.Module):
    """What of a tokenizer turns codes into pictures."""

    def __init__(self, config: VQConfig) -> None:
        super().__init__()
        self.config, self.quantize = config, CodeTable(config)
        self.post_quant_conv = CausalConv(config.code_dim, config.z_channels, 1)
        self.decoder = VideoDecoder(config)

    def decode_codes(self, codes: Tensor, grid: tuple[int, int]) -> Tensor:
        """Codes [B, N] int, row by row on a grid of h rows and w columns, to images [B, 3, H, W] in [-1, 1]."""
        vectors: Tensor = self.quantize.embedding(codes.reshape(-1, *grid))  # [B, h, w, code_dim]
        z = vectors.permute(0, 3, 1, 2)[:, :, None]  # [B, code_dim, 1, h, w]
        return self.decoder(self.post_quant_conv(z), z).float().clamp(-1, 1)
