"""The one decoder-only transformer: all families and the drafter are configurations of it.

Pre-norm blocks of attention and SwiGLU, rotary positions as real-valued tables, keys and values in a
static cache. The module reads no Python value that varies between calls, so a graph can record it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hpu.models.config import DrafterConfig, TransformerConfig
from lantern_hpu.ops.buffers import constant
from lantern_hpu.ops.kernels import (
    PLAIN,
    CacheWrite,
    HeadNorms,
    Kernels,
    angles_at,
    head_norm,
    rotate_into,
)
from lantern_hpu.ops.kv_cache import GrowingCache, KVCache, LayerCache, WrittenCache


def rope_table(config: TransformerConfig, positions: int) -> Tensor:
    """Cosines and sines for the first `positions` of a sequence.

    2-D (LlamaGen): half of the angles go with the grid row, half with the column, row-major after
    the prefix; positions past the grid are zero. Else (Chameleon): the usual angles of the position.

    Returns [positions, 2, head_dim / 2] float32: cosines, then sines.
    """
    if config.rope != "2d":
        pairs = config.rotated // 2
        frequency = config.rope_base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
        # Pairs behind the rotated ones have angle 0
        frequency = F.pad(frequency, (0, config.head_dim // 2 - pairs))
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
        return torch.stack([angles.cos(), angles.sin()], 1).float()
    half = config.head_dim // 2
    steps = torch.arange(0, half, 2, dtype=torch.float64)[: half // 2]
    frequency = config.rope_base ** (-steps / half)
    place = torch.cartesian_prod(*map(torch.arange, config.grid))  # [N, 2], row and column
    angles = (place[..., None] * frequency).flatten(1)  # [N, half]
    table = torch.zeros(positions, 2, half)
    end = min(positions, config.prefix + config.tokens)
    codes = torch.stack([angles.cos(), angles.sin()], 1).float()
    table[config.prefix : end] = codes[: end - config.prefix]
    if config.rope_prefix == "identity":
        table[: config.prefix, 0] = 1.0
    return table


def rope_axes(config: TransformerConfig, positions: int) -> Tensor:
    """Coordinates of the first `positions` of a sequence on the axes of "mrope", counted from the prompt's end.

    Words have their place on all three. The codes of the preview and then of the picture have its start, their row and
    their column; what follows begins behind the longer side.

    Returns [3, positions] int32.
    """
    prefix, base = config.prefix, 0
    axes = [torch.arange(-prefix, 0).expand(3, -1)]
    for rows, columns in (config.preview_grid, config.grid):
        code = torch.arange(rows * columns)
        side = max(columns, 1)
        axes.append(base + torch.stack([0 * code, code // side, code % side]))
        base += max(rows, columns)
    behind = max(positions - prefix - config.tokens, 0)
    axes.append((base + torch.arange(behind)).expand(3, -1))
    return torch.cat(axes, 1)[:, :positions].int()


class Rotary(nn.Module):
    """Cosines and sines at the first `positions` of left-padded sequences; where text is 1-D, pads do not count."""

    def __init__(self, config: TransformerConfig, positions: int) -> None:
        super().__init__()
        self.counts_pads = config.rope == "2d"
        axes = None
        self.sections: tuple[int, ...] = ()  # pairs of features that go with each axis
        if config.rope == "mrope":
            axes = rope_axes(config, positions) + config.prefix
            positions = int(axes.max()) + 1
            first, second, _ = config.rope_sections
            self.sections = (first, second, config.head_dim // 2 - first - second)
        # [3, positions], of a prompt without pads
        self.axes = None if axes is None else constant(axes)
        self.table = constant(rope_table(config, positions))

    def forward(self, position: Tensor, pads: Tensor) -> Tensor:
        """[R, T] of rows with `pads` [R]: [R, T, 2, hd / 2] float32."""
        counted = None if self.counts_pads else pads
        return angles_at(self.table, position, counted, self.axes, self.sections)

    def at(self, axes: Tensor) -> Tensor:
        """At places on the axes of "mrope" [R, 3, T]: [R, T, 2, hd / 2] float32."""
        parts = zip(self.table.split(self.sections, -1), axes.unbind(1), strict=True)
        return torch.cat([part[at] for part, at in parts], -1)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 in any dtype of the model."""

    def __init__(
        self, config: TransformerConfig, kernels: Kernels, width: int | None = None
    ) -> None:
        """`width`: features that it takes; None: the model's."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width or config.dim))
        self.eps, self.kernels = config.norm_eps, kernels

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, more: Unnormed) -> tuple[Tensor, Tensor]:
        """x + more, and its norm."""
        if self.kernels.add_norm is None:
            x = x + finished(more)
            return x, self(x)
        if isinstance(more, Sandwiched):
            given = x, more.features, self.weight, self.eps, more.norm.weight
            return self.kernels.add_norm(*given)
        return self.kernels.add_norm(x, more, self.weight, self.eps)


class Sandwiched(NamedTuple):
    """What a part of a block returns, before the norm behind it: the next norm takes both and the sum at once."""

    features: Tensor  # [R, T, H]
    norm: RMSNorm


Unnormed = Tensor | Sandwiched


def finished(more: Unnormed) -> Tensor:
    """With the norm behind it, where it has one."""
    return more.norm(more.features) if isinstance(more, Sandwiched) else more


def unnormed(norm: nn.Module, features: Tensor) -> Unnormed:
    return Sandwiched(features, norm) if isinstance(norm, RMSNorm) else features


class HeadNorm(nn.Module):
    """LayerNorm over each head's features with weights of its own (Chameleon's query-key norm)."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:  # [R, T, heads, hd]
        return head_norm(x, self.weight, self.bias, self.eps)


def make_head_norm(config: TransformerConfig, kernels: Kernels, heads: int) -> Any:
    """What queries or keys [R, T, heads, hd] pass before they are rotated."""
    if config.qk_norm == "rms":
        return RMSNorm(config, kernels, config.head_dim)
    return HeadNorm(heads, config.head_dim) if config.qk_norm else nn.Identity()


class SelfAttention(nn.Module):
    """Grouped-query attention over the cache (or over its own keys when there is none)."""

    def __init__(self, config: TransformerConfig, kernels: Kernels) -> None:
        super().__init__()
        self.heads, self.kv, self.head_dim = config.heads, config.kv, config.head_dim
        self.interleaved = config.rope_pairs == "interleaved"
        self.kernels = kernels
        rows = (self.heads + 2 * self.kv) * self.head_dim
        self.qkv = nn.Linear(config.dim, rows, bias=config.qkv_bias)
        self.out = nn.Linear(self.heads * self.head_dim, config.dim, bias=False)
        self.q_norm = make_head_norm(config, kernels, self.heads)
        self.k_norm = make_head_norm(config, kernels, self.kv)

    def forward(
        self,
        x: Tensor,  # [R, T, H]
        rope: Tensor,  # [R, T, 2, hd / 2]
        mask: Tensor,  # [R, 1, T, S] additive
        cache: LayerCache | GrowingCache | None,
        index: Tensor | None,  # [R * (D + T)], where in the cache to write
        source: Tensor | None,  # [R * D], what moves there meanwhile
    ) -> Tensor:
        return self.out(self.mix(self.qkv(x), rope, mask, cache, index, source))

    def mix(
        self,
        heads: Tensor,  # [R, T, (h + 2 kv) hd], queries, keys and values
        rope: Tensor,
        mask: Tensor,
        cache: LayerCache | GrowingCache | None,
        index: Tensor | None,
        source: Tensor | None,
    ) -> Tensor:
        """What is between the two products: [R, T, h hd]."""
        heads = heads.unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv, self.kv], dim=2)
        how, attend = (rope, self.interleaved), self.kernels.attend
        own_keys = isinstance(cache, WrittenCache)  # a prefix attends to itself alone
        if attend and isinstance(cache, LayerCache) and index is not None and not own_keys:
            write = CacheWrite(*cache.prepare_write(), index, source)
            mixed = attend(q, k, v, *how, write, mask, self.norms())
            return mixed.transpose(1, 2).flatten(2)
        q, k = self.q_norm(q), self.k_norm(k)
        if not isinstance(cache, LayerCache) or index is None:
            q, k = self.kernels.rotate(q, *how), self.kernels.rotate(k, *how)
            if isinstance(cache, GrowingCache):
                k, v = cache.append(k, v)
        else:
            write = CacheWrite(*cache.prepare_write(), index, source)
            q = rotate_into(q, k, v, *how, write, self.kernels.rotate)
            k, v = cache.read()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mixed = self.kernels.attention(q, k, v, mask)  # [R, heads, T, hd]
        return mixed.transpose(1, 2).flatten(2)

    def norms(self) -> HeadNorms | None:
        """Those of each head's queries and keys."""
        q, k = self.q_norm, self.k_norm
        if isinstance(q, nn.Identity):
            return None
        biases = getattr(q, "bias", None), getattr(k, "bias", None)
        return HeadNorms(q.weight, k.weight, *biases, q.eps)


class FeedForward(nn.Module):
    """SwiGLU with gate and up projection in one matrix."""

    def __init__(self, config: TransformerConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_up = nn.Linear(config.dim, 2 * config.ffn_dim, bias=False)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.kernels.swiglu(self.gate_up(x)))


class Block(nn.Module):
    """One layer. The LlamaGen drafter's has no norm before its attention, GLM's has norms behind both parts too, large
    Chameleons' behind them alone.

    Late ones of MammothModa2's have two SwiGLUs: `ffn` for image tokens, which alone a step has, `word_ffn` for words.
    """

    whole = ("residual",)  # what may be compiled by itself, once for all layers

    def __init__(
        self,
        config: TransformerConfig,
        kernels: Kernels,
        input_norm: bool = True,
        words_apart: bool = False,
    ) -> None:
        super().__init__()
        self.eps = config.norm_eps  # of its norms
        norm: Any = partial(RMSNorm, config, kernels)
        before: Any = norm if config.input_norms else nn.Identity
        behind: Any = norm if config.sandwich_norms else nn.Identity
        self.attention_norm = before() if input_norm else nn.Identity()
        self.attention = SelfAttention(config, kernels)
        self.ffn_norm = before()
        self.ffn = FeedForward(config, kernels)
        self.word_ffn = FeedForward(config, kernels) if words_apart else None
        self.attention_post_norm, self.ffn_post_norm = behind(), behind()
        self.fused: Any = None  # a device's own form, for as many rows as it serves

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor,
        cache: LayerCache | GrowingCache | None = None,
        index: Tensor | None = None,
        source: Tensor | None = None,
        words: Tensor | None = None,  # [R, T] bool; None: all are image tokens
    ) -> Tensor:
        x, more = self.residual(x, None, rope, mask, cache, index, source, words=words)
        return x if more is None else x + finished(more)

    def residual(
        self, x: Tensor, more: Unnormed | None, *attended: Any, words: Tensor | None
    ) -> tuple[Tensor, Unnormed | None]:
        """`forward` of x + more, as two tensors whose sum it is: the next norm adds them."""
        if self.fused is not None and words is None and self.fused.serves(x):
            result: tuple[Tensor, Tensor | None] = self.fused(self, x, more, *attended)
            return result
        x, normed = norm_of_sum(self.attention_norm, x, more)
        mixed = self.attention(normed, *attended)
        x, normed = norm_of_sum(self.ffn_norm, x, unnormed(self.attention_post_norm, mixed))
        fed = self.ffn(normed)
        if self.word_ffn is not None and words is not None:
            fed = torch.where(words[..., None], self.word_ffn(normed), fed)
        return x, unnormed(self.ffn_post_norm, fed)


def norm_of_sum(norm: nn.Module, x: Tensor, more: Unnormed | None) -> tuple[Tensor, Tensor]:
    """x + more, and its norm, which may be none."""
    if more is not None and isinstance(norm, RMSNorm):
        return norm.add(x, more)
    x = x if more is None else x + finished(more)
    return x, norm(x)


class CodeEmbedding(nn.Module):
    """Narrow embeddings of codes, brought to the model's width by an MLP (Janus)."""

    def __init__(self, codes: int, code_dim: int, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(codes, code_dim)
        self.fc1, self.fc2 = nn.Linear(code_dim, dim), nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:  # [..] int -> [.., H]
        return self.fc2(F.gelu(self.fc1(self.table(tokens))))


class MLPHead(nn.Module):
    """A head of two matrices (Janus)."""

    def __init__(self, dim: int, hidden: int, codes: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, codes)

    def forward(self, x: Tensor) -> Tensor:  # [.., H] -> [.., V]
        return self.fc2(F.gelu(self.fc1(x)))


class Target(nn.Module):
    """The model whose images we want: token embedding, decoder, final norm, head."""

    def __init__(self, config: TransformerConfig, kernels: Kernels = PLAIN) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        # A device's own form of the layers and the norm, with the arguments of `forward`
        self.decoder: Any = None
        self.embed: Any = (  # a table, or a narrow one and what widens it
            nn.Embedding(config.embed_rows or config.vocab_size, config.dim)
            if config.code_dim is None
            else CodeEmbedding(config.vocab_size, config.code_dim, config.dim)
        )
        first = config.layers - config.word_layers
        self.layers = nn.ModuleList(
            Block(config, kernels, words_apart=i >= first) for i in range(config.layers)
        )
        self.norm = RMSNorm(config, kernels)
        self.head: Any = (
            nn.Linear(config.dim, config.vocab_size, bias=config.spare_codes > 0)
            if config.head_hidden is None
            else MLPHead(config.dim, config.head_hidden, config.vocab_size)
        )

    def sized(self, config: TransformerConfig) -> Target:
        """The same weights for pictures and prefixes of other sizes."""
        if config == self.config:
            return self
        other = copy.copy(self)  # which shares modules
        other.config = config
        return other

    @property
    def dtype(self) -> torch.dtype:
        """Of features and caches; that of a norm, which no smaller format of the matrices changes."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def words(self, tokens: Tensor) -> Tensor | None:
        """Which tokens [R, T] are words, where those have layers of their own: [R, T] bool."""
        first, config = self.config.vocab_size, self.config
        if not config.word_layers:
            return None
        return (tokens >= first) & (tokens < first + config.word_rows)

    def forward(
        self,
        x: Tensor,  # [R, T, H] embeddings
        rope: Tensor,  # [R, T, 2, hd / 2]
        mask: Tensor,  # [R, 1, T, S] additive
        cache: KVCache | None = None,
        index: Tensor | None = None,  # [R * (D + T)], where in each layer's cache to write
        source: Tensor | None = None,  # [R * D], what moves to the first D of each row meanwhile
        aux_layers: Sequence[int] = (),
        words: Tensor | None = None,  # what `words` returns, where some of these tokens are words
    ) -> Tensor:
        """Final-normed hidden states, followed by the outputs of `aux_layers`: [R, T, H * (1 + n)]."""
        if self.decoder is not None and cache is not None:
            return self.decoder(x, rope, mask, cache, index, source, aux_layers, words)
        aux, more = [], None
        blocks: Any = self.layers
        for layer, block in enumerate(blocks):
            kept = None if cache is None else cache.layers[layer]
            x, more = block.residual(x, more, rope, mask, kept, index, source, words=words)
            if layer in aux_layers:
                x, more = x if more is None else x + finished(more), None
                aux.append(x)
        _, normed = norm_of_sum(self.norm, x, more)
        return torch.cat([normed, *aux], -1) if aux else normed


class AuxInput(nn.Module):
    """What the outputs of one lower layer of the target add to its last features."""

    def __init__(self, config: TransformerConfig, kernels: Kernels) -> None:
        super().__init__()
        self.norm = RMSNorm(config, kernels)
        self.linear = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [R, T, H] -> [R, T, H]
        return self.linear(self.norm(x))


class Drafter(nn.Module):
    """The EAGLE drafter (arXiv 2401.15077): one block that predicts the target's next feature, without a head.

    Entry i of its sequence is made of the target's feature of position i and the embedding of token i + 1; the target's
    head turns the feature it predicts into a distribution of token i + 2. Outputs of lower layers (EAGLE-3, arXiv
    2503.01840) are normalised, projected and added to the feature.
    """

    def __init__(
        self,
        target: TransformerConfig,
        drafter_config: DrafterConfig = DrafterConfig(),
        kernels: Kernels = PLAIN,
    ) -> None:
        super().__init__()
        self.drafter_config, self.config = drafter_config, drafter_config.sizes(target)
        self.sees_pads, self.shift = drafter_config.sees_pads, drafter_config.shift
        self.aux_layers = drafter_config.aux_layers
        self.decoder: Any = None  # a device's own form of the block
        self.embed = nn.Embedding(target.embed_rows or target.vocab_size, target.dim)
        self.fc = nn.Linear(2 * target.dim, target.dim)
        self.block = Block(self.config, kernels, drafter_config.input_norm)
        self.aux = nn.ModuleList(AuxInput(self.config, kernels) for _ in self.aux_layers)

    @property
    def feature_width(self) -> int:
        """H * (1 + n): of the target's features, with the outputs of n lower layers behind the last ones."""
        return self.config.dim * (1 + len(self.aux_layers))

    def forward(
        self,
        tokens: Tensor,  # [R, T] int, token i + shift of each entry i
        # [R, T, H * (1 + n)], feature i of the target with n lower layers; [R, T, H], the parent's guess in the tree
        features: Tensor,
        rope: Tensor,  # [R, T, 2, hd / 2], of the target's position i + 1
        mask: Tensor,  # [R, 1, T, S] additive
        cache: LayerCache | GrowingCache | None = None,
        index: Tensor | None = None,  # [R * T], where in the cache to write
    ) -> Tensor:
        """Predicted features [R, T, H] of the next position, in the head's input space."""
        features, *aux = features.split(self.config.dim, -1)
        for read, x in zip(self.aux, aux, strict=False):  # a guess has none
            features = features + read(x)
        x = self.fc(torch.cat([self.embed(tokens), features], -1))
        if self.decoder is not None and isinstance(cache, LayerCache):
            return self.decoder(x, rope, mask, KVCache((cache,)), index)
        return self.block(x, rope, mask, cache, index)
