"""The one decoder-only transformer: LlamaGen, Chameleon and the drafter are configurations of it.

Pre-norm blocks of attention and SwiGLU, rotary positions as real-valued tables, keys and values in a
static cache. The module reads no Python value that varies between calls, so a graph can record it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.cache import KVCache
from lantern_hpu.kernels import PLAIN, Kernels, rotate_into


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and variants of a decoder; the values are the checkpoint's, never the user's."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    prefix: int  # P, condition slots before the first image token
    grid: tuple[int, int]  # rows, columns of image tokens
    kv_heads: int | None = None  # None: as many as heads
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    rope: Literal["2d", "1d"] = "2d"  # by grid row and column (LlamaGen), or by slot (Chameleon)
    # Which features form a pair: (0, 1), (2, 3), ... as in LlamaGen's files, or (0, hd/2), ... as in
    # Chameleon's. "half" reads memory in order; the two differ by a permutation of q and k features.
    rope_pairs: Literal["interleaved", "half"] = "interleaved"
    # LlamaGen's condition slots have cos = sin = 0, so their queries and keys vanish; "identity"
    # leaves them unrotated, and image tokens can look at single words.
    rope_prefix: Literal["zero", "identity"] = "zero"
    qk_norm: bool = False  # Chameleon normalises each head's queries and keys
    # Rows of the embedding where it knows more than image tokens: those come first, words follow (Chameleon).
    embed_rows: int | None = None

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.dim, self.layers, self.heads, self.ffn_dim, self.prefix)
        if min(*sizes, *self.grid) < 1 or self.dim % self.heads:
            why = f"{self.heads} heads of width {self.dim}, {self.layers} layers, grid {self.grid}"
            raise ValueError(f"sizes that no model has: {why}")

    @property
    def tokens(self) -> int:
        """N, image tokens of one image."""
        return self.grid[0] * self.grid[1]

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kv(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads


def rope_table(config: TransformerConfig, positions: int) -> Tensor:
    """Cosines and sines for `positions` sequence slots.

    2-D (LlamaGen): half of the angles turn with the grid row, half with the column, row-major after
    the prefix; slots past the grid are zero. 1-D (Chameleon): the usual angles of the slot number.

    Returns [positions, 2, head_dim / 2] float32: cosines, then sines.
    """
    if config.rope == "1d":
        pairs = config.head_dim // 2
        frequency = config.rope_base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
        return torch.stack([angles.cos(), angles.sin()], 1).float()
    half = config.head_dim // 2
    frequency = config.rope_base ** (
        -torch.arange(0, half, 2, dtype=torch.float64)[: half // 2] / half
    )
    rows, columns = config.grid
    row = torch.arange(rows, dtype=torch.float64).repeat_interleave(columns)
    column = torch.arange(columns, dtype=torch.float64).repeat(rows)
    angles = torch.cat([row[:, None] * frequency, column[:, None] * frequency], 1)  # [N, half]
    table = torch.zeros(positions, 2, half)
    end = min(positions, config.prefix + config.tokens)
    table[config.prefix : end, 0] = angles.cos().float()[: end - config.prefix]
    table[config.prefix : end, 1] = angles.sin().float()[: end - config.prefix]
    if config.rope_prefix == "identity":
        table[: config.prefix, 0] = 1.0
    return table


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever the model's dtype."""

    def __init__(self, dim: int, eps: float, kernels: Kernels = PLAIN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.kernels = eps, kernels

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)


def norm(config: TransformerConfig, kernels: Kernels) -> RMSNorm:
    return RMSNorm(config.dim, config.norm_eps, kernels)


class HeadNorm(nn.Module):
    """LayerNorm over each head's features with weights of its own (Chameleon's query-key norm)."""

    def __init__(self, heads: int, head_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [R, T, heads, hd]
        normed = F.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed * self.weight.float() + self.bias.float()).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention over the cache (or over its own keys when there is none)."""

    def __init__(self, config: TransformerConfig, kernels: Kernels) -> None:
        super().__init__()
        self.heads, self.kv, self.head_dim = config.heads, config.kv, config.head_dim
        self.interleaved = config.rope_pairs == "interleaved"
        self.kernels = kernels
        self.rotate_into = kernels.rotate_into or partial(rotate_into, turn=kernels.rotate)
        self.qkv = nn.Linear(config.dim, (self.heads + 2 * self.kv) * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)
        if config.qk_norm:
            self.q_norm: nn.Module = HeadNorm(self.heads, self.head_dim)
            self.k_norm: nn.Module = HeadNorm(self.kv, self.head_dim)
        else:
            self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(
        self,
        x: Tensor,  # [R, T, H]
        rope: Tensor,  # [R, T, 2, hd / 2]
        mask: Tensor,  # [R, 1, T, S] additive
        layer: int,
        cache: KVCache | None,
        slots: Tensor | None,  # [R * T], rows of the layer's cache to write
    ) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv, self.kv], dim=2)
        q, k, how = self.q_norm(q), self.k_norm(k), (rope, self.interleaved)
        if cache is None or slots is None:
            q, k = self.kernels.rotate(q, *how), self.kernels.rotate(k, *how)
        else:
            q = self.rotate_into(q, k, v, *how, cache.k, cache.v, slots, cache.start(layer))
            k, v = cache.read(layer)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = self.kernels.attention(q, k, v, mask)  # [R, heads, T, hd]
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU with gate and up projection in one matrix."""

    def __init__(self, dim: int, ffn_dim: int, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_up = nn.Linear(dim, 2 * ffn_dim, bias=False)
        self.down = nn.Linear(ffn_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.kernels.swiglu(self.gate_up(x)))


class Block(nn.Module):
    """One layer. The LlamaGen drafter's has no norm before its attention."""

    def __init__(
        self, config: TransformerConfig, kernels: Kernels, input_norm: bool = True
    ) -> None:
        super().__init__()
        self.attention_norm = norm(config, kernels) if input_norm else nn.Identity()
        self.attention = SelfAttention(config, kernels)
        self.ffn_norm = norm(config, kernels)
        self.ffn = FeedForward(config.dim, config.ffn_dim, kernels)

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor,
        layer: int = 0,
        cache: KVCache | None = None,
        slots: Tensor | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, mask, layer, cache, slots)
        return x + self.ffn(self.ffn_norm(x))


class Target(nn.Module):
    """The model whose images we want: token embedding, decoder, final norm, head."""

    def __init__(self, config: TransformerConfig, kernels: Kernels = PLAIN) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        self.embed = nn.Embedding(config.embed_rows or config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, kernels) for _ in range(config.layers))
        self.norm = norm(config, kernels)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self,
        x: Tensor,  # [R, T, H] embeddings
        rope: Tensor,  # [R, T, 2, hd / 2]
        mask: Tensor,  # [R, 1, T, S] additive
        cache: KVCache | None = None,
        slots: Tensor | None = None,  # [R * T]
    ) -> Tensor:
        """Final-normed hidden states [R, T, H]: the drafter's features and the head's input."""
        for layer, block in enumerate(self.layers):
            x = block(x, rope, mask, layer, cache, slots)
        return self.norm(x)


def prefix_mask(valid: Tensor, causal: Tensor) -> Tensor:
    """Which key slots each query of a left-padded sequence may see.

    A real token sees real tokens before it; a pad sees the pads before it, so that no row is empty and
    the drafter reads the same pad features on every device.

    Args:
        valid: [R, S] bool, False at pads; S = T, or the slots of a cache whose first T are the queries.
        causal: [T, S] or [R, T, S] bool, what each query sees but for pads.

    Returns [R, T, S] bool.
    """
    return causal & (valid[:, None] | ~valid[:, : causal.shape[-2], None])


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Boolean mask [R, T, S] as the additive one [R, 1, T, S] that attention takes.

    The floor is finite: a row with nothing to see must not become NaN.
    """
    floor = torch.finfo(dtype).min
    return (~mask).to(dtype).mul(floor).unsqueeze(1)
