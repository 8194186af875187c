"""Emu3's picture decoder: transformers' video decoder, of which a picture is the first frame.

Codes go through causal convolutions over time, which make four frames of one; as frames meet nowhere else, only the
first is decoded. What encodes pictures is left out. Names are those of BAAI/Emu3-VisionTokenizer and of transformers.
MoVQGAN, which draws Lumina-mGPT 2.0's codes, is the same without time.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.errors import needing
from lantern_hpu.models.config import VQConfig
from lantern_hpu.models.vq import Codebook, Decoder, Tokenizer


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
