"""Every tensor that decoding changes, allocated once.

A step writes these tensors in place, with indices it computes on the device; their addresses, shapes and
dtypes never change, which is what lets a graph be recorded once and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from lantern_hpu.accept import Bounds
from lantern_hpu.cache import KVCache
from lantern_hpu.models.transformer import TransformerConfig
from lantern_hpu.sampling import Settings
from lantern_hpu.tree import Tree


@dataclass(frozen=True)
class Shapes:
    """What decides the shapes of a state, and with them which graph can serve it."""

    images: int  # B
    guidance: bool  # two rows an image
    tree: Tree
    block: int  # most steps between two host reads; uniforms are copied in for that many

    @property
    def rows(self) -> int:
        """R, sequences on the device."""
        return self.images * (2 if self.guidance else 1)

    @property
    def draws(self) -> int:
        """Uniforms a step takes for an image: drafts, acceptance, bonus token."""
        return self.tree.draws + self.tree.depth * self.tree.max_children + 1


@dataclass
class DecodeState:
    """The state of one batch. Position 0 is the first condition slot; image token t has slot P + t."""

    # Set by the host before a batch
    prefix: Tensor  # [R, P, H] condition embeddings
    prefix_tokens: (
        Tensor  # [R, P] int32, what the drafter reads there: words, or 0 where there are none
    )
    valid: Tensor  # [R, S] bool, False at padded condition slots
    pads: Tensor  # [R] int32, how many those are
    settings: Settings
    bounds: Bounds
    first_uniform: Tensor  # [B] float32, for the token that prefill draws
    uniforms: Tensor  # [block, B, draws] float32
    # Changed by prefill and step
    cursor: Tensor  # [1] int32, which of `uniforms` is next
    count: Tensor  # [B] int32, t: image tokens whose keys and values are in the cache
    tokens: Tensor  # [B * (N + D + 1)] int32, flat; tokens 0 .. t of each image are final
    root: Tensor  # [B] int32, token t, not yet in the cache
    target_cache: KVCache
    drafter_cache: KVCache | None
    pending_tokens: Tensor  # [B, D + 1] int32, tokens the drafter has not seen
    pending_features: Tensor  # [R, D + 1, H], the target's features before them
    pending_count: Tensor  # [B] int32, how many of them are real
    # Statistics, kept on the device so that they cost no host read
    steps: Tensor  # [B] int32, steps until the image was done
    accepted: Tensor  # [B, D] int32, steps that accepted a draft at depth d + 1
    relaxed: Tensor  # [B] int32, drafts accepted only thanks to relaxation

    @classmethod
    def allocate(
        cls, config: TransformerConfig, shapes: Shapes, dtype: torch.dtype, device: torch.device
    ) -> DecodeState:
        """Zeros everywhere, with room for `shapes` of one model."""
        b, r, depth = shapes.images, shapes.rows, shapes.tree.depth
        s = capacity(config, shapes.tree)

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def real(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def cache(layers: int) -> KVCache:
            return KVCache.allocate(layers, r, s, config.kv, config.head_dim, dtype, device)

        yes = torch.zeros(b, dtype=torch.bool, device=device)
        return cls(
            prefix=real(r, config.prefix, config.dim, dtype=dtype),
            prefix_tokens=whole(r, config.prefix),
            valid=torch.ones(r, s, dtype=torch.bool, device=device),
            pads=whole(r),
            settings=Settings(real(b), real(b), whole(b), real(b), yes),
            bounds=Bounds(whole(b), real(b), real(b), real(b, depth)),
            first_uniform=real(b),
            uniforms=real(shapes.block, b, shapes.draws),
            cursor=whole(1),
            count=whole(b),
            tokens=whole(b * columns(config, shapes.tree)),
            root=whole(b),
            target_cache=cache(config.layers),
            drafter_cache=cache(1) if depth else None,
            pending_tokens=whole(b, depth + 1),
            pending_features=real(r, depth + 1, config.dim, dtype=dtype),
            pending_count=whole(b),
            steps=whole(b),
            accepted=whole(b, depth),
            relaxed=whole(b),
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by dotted name, those of nested dataclasses included."""
        return dict(walk_tensors("", self))


def walk_tensors(prefix: str, value: object) -> list[tuple[str, Tensor]]:
    """Tensors of a dataclass and the dataclasses inside it."""
    found: list[tuple[str, Tensor]] = []
    for field in fields(value):  # type: ignore[arg-type]
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            found.append((prefix + field.name, part))
        elif hasattr(part, "__dataclass_fields__"):
            found += walk_tensors(f"{prefix}{field.name}.", part)
    return found


def columns(config: TransformerConfig, tree: Tree) -> int:
    """Width of an image's row in `tokens`: the image, and scratch for what a step writes past its end."""
    return config.tokens + tree.depth + 1


def capacity(config: TransformerConfig, tree: Tree) -> int:
    """S: prefix, image and one tree beyond them, so that a finished image still writes into its own row."""
    need = config.prefix + config.tokens + max(tree.size, tree.depth + 1, tree.scratch)
    return -(-need // 64) * 64
