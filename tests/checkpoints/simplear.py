"""A small random SimpleAR, and NVIDIA's Cosmos decoder of pictures as the network of three dimensions that it is."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.checkpoints.files import fill
from tests.checkpoints.language_models import write_words

VOCABULARY, FIRST = 215672, 151672
TOKENS = {"<|endoftext|>": 151643, "<|t2i|>": 151665, "<|soi|>": 151667, "<|eoi|>": 151668}
LEVELS = (8, 8, 8, 5, 5, 5)
CHANNELS, MULTIPLIERS, BLOCKS, LATENT, PATCHES = 4, (2, 4, 4), 1, 16, 192


class Causal(nn.Module):
    """A convolution over time, rows and columns; the first frame is repeated before itself."""

    def __init__(self, inputs: int, outputs: int, time: int = 1, space: int = 1) -> None:
        super().__init__()
        self.before, self.around = time - 1, space // 2
        self.conv3d = nn.Conv3d(inputs, outputs, (time, space, space))

    def forward(self, x: Tensor) -> Tensor:  # [B, C, T, H, W]
        x = F.pad(x, (0, 0, 0, 0, self.before, 0), mode="replicate")
        return self.conv3d(F.pad(x, (self.around,) * 4))


class Norm(nn.Module):
    """Each frame over all its features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(1, channels, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.norm(frame) for frame in x.unbind(2)], 2)


def pair(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(Causal(inputs, outputs, space=3), Causal(outputs, outputs, time=3))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = Norm(inputs), pair(inputs, outputs)
        self.norm2, self.conv2 = Norm(outputs), pair(outputs, outputs)
        self.nin_shortcut = Causal(inputs, outputs) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return h + self.nin_shortcut(x)


class Attention(nn.Module):
    """Over the pixels of a frame, or over the frames of a pixel up to its own."""

    def __init__(self, channels: int, time: bool) -> None:
        super().__init__()
        self.time, self.norm = time, Norm(channels)
        self.q, self.k, self.v, self.proj_out = (Causal(channels, channels) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        # [B, C, T, H, W] to [B, HW, T, C] or [B, T, HW, C]
        order = (0, 3, 2, 1) if self.time else (0, 2, 3, 1)
        q, k, v = (f(h).flatten(3).permute(order) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.time)
        back = mixed.permute(0, 3, 2, 1) if self.time else mixed.permute(0, 3, 1, 2)
        return x + self.proj_out(back.unflatten(3, x.shape[3:]))


class Upsample(nn.Module):
    def __init__(self, channels: int, time: bool) -> None:
        super().__init__()
        self.time = time
        self.conv1 = Causal(channels, channels, time=3)
        self.conv2 = Causal(channels, channels, space=3)
        self.conv3 = Causal(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        if self.time:
            factor = 2 if x.shape[2] > 1 else 1
            x = x.repeat_interleave(factor, 2)[:, :, factor - 1 :]
            x = self.conv1(x) + x
        x = x.repeat_interleave(2, 3).repeat_interleave(2, 4)
        return self.conv3(self.conv2(x) + x)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [CHANNELS * m for m in MULTIPLIERS]
        width = widths[-1]
        self.conv_in = pair(LATENT, width)
        self.mid: Any = nn.Module()
        self.mid.block_1 = Block(width, width)
        self.mid.attn_1 = nn.Sequential(Attention(width, False), Attention(width, True))
        self.mid.block_2 = Block(width, width)
        self.up: Any = nn.ModuleList()
        for level in reversed(range(len(widths))):
            up: Any = nn.Module()
            inputs = [width] + [widths[level]] * BLOCKS
            up.block = nn.ModuleList(Block(before, widths[level]) for before in inputs)
            width = widths[level]
            if level:  # time is doubled from the second change of resolution on, once
                up.upsample = Upsample(width, level == len(widths) - 2)
            self.up.insert(0, up)
        self.norm_out, self.conv_out = Norm(width), pair(width, PATCHES)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid.block_2(self.mid.attn_1(self.mid.block_1(self.conv_in(z))))
        for up in reversed(self.up):
            for block in up.block:
                x = block(x)
            x = up.upsample(x) if hasattr(up, "upsample") else x
        x = self.conv_out(F.silu(self.norm_out(x)))
        for _ in range(2):
            x = inverse_haar(x)
        return x[:, :, 3:]


def inverse_haar(x: Tensor) -> Tensor:
    """[B, 8 C, T, H, W], bands by time, row and column, to [B, C, 2 T, 2 H, 2 W]."""
    low, high = x.new_tensor([1, 1]), x.new_tensor([1, -1])
    bands = [
        torch.einsum("a,b,c->abc", t, h, w)
        for t in (low, high)
        for h in (low, high)
        for w in (low, high)
    ]
    kernel = torch.stack(bands)[:, None]  # [8, 1, 2, 2, 2]
    colours = x.unflatten(1, (8, -1)).unbind(2)
    return torch.cat([F.conv_transpose3d(c, kernel, stride=2) for c in colours], 1)


class Codes(nn.Module):
    """Codes [B, T, h, w] to their digits [B, 6, T, h, w] in -1 .. 1."""

    _levels: Tensor
    _basis: Tensor
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("_levels", torch.tensor(LEVELS, dtype=torch.int32))
        self.register_buffer(
            "_basis", torch.tensor([1, 8, 64, 512, 2560, 12800], dtype=torch.int32)
        )

    def forward(self, codes: Tensor) -> Tensor:
        half = self._levels // 2
        digits = codes[..., None] // self._basis % self._levels
        return ((digits - half) / half).movedim(-1, 1).to(self.dtype)


def cosmos_decoder(generator: Generator) -> Any:
    """What `decoder.jit` is traced of, small."""
    parts: dict[str, nn.Module] = {
        "inv_quant": nn.Sequential(OrderedDict(quantizer=Codes())),
        "post_quant_conv": Causal(len(LEVELS), LATENT),
        "decoder": Decoder(),
    }
    whole = nn.Sequential(OrderedDict(parts))
    fill(whole, generator)
    return whole.eval()


def write_simplear(folder: Path, generator: Generator) -> None:
    """SimpleAR as transformers saves it, head and embedding tied, and the decoder as NVIDIA publishes it."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
    rope: dict[str, Any] = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    model: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **sizes, **heads, **rope))
    fill(model, generator)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3)  # distributions far from flat
    model.save_pretrained(folder)
    write_words(folder, TOKENS, {})
    decoder = cosmos_decoder(generator)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tracing, which replaced scripts have
        traced: Any = torch.jit.trace(
            decoder, torch.zeros(1, 1, 2, 2, dtype=torch.int32), check_trace=False
        )
    traced.save(str(folder / "decoder.jit"))
