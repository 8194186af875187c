"""Every tensor that decoding changes, allocated once.

A step writes these tensors in place, with indices it computes on the device; their addresses, shapes and
dtypes never change, which is what lets a graph be recorded once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.decode.accept import Bounds
from lantern_hpu.decode.spec import Spec, capacity, token_columns
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.ops.kv_cache import KVCache
from lantern_hpu.ops.sampling import SamplingParams


@dataclass
class DecodeState:
    """The state of one batch. Image token t has cache position P + t."""

    # Set by the host before a batch
    prefix: Tensor  # [R, P, H] condition embeddings
    prefix_tokens: (
        Tensor  # [R, P] int32, what a drafter reads there: words, or 0 where there are none
    )
    valid: Tensor  # [R, S] bool, False at padded prefix positions
    pads: Tensor  # [R] int32, how many those are
    sampling: SamplingParams
    bounds: Bounds
    first_uniform: Tensor  # [B] float32, for the token that prefill draws
    uniforms: Tensor  # [block, B, draws] float32
    # Changed by prefill and step
    cursor: Tensor  # [1] int32, which of `uniforms` is next
    count: Tensor  # [B] int32, t: image tokens whose keys and values are in the cache
    tokens: Tensor  # [B * (N + D + 1)] int32, flat; tokens 0 .. t of each image are final
    root: Tensor  # [B] int32, token t, not yet in the cache
    kv_cache: KVCache  # the target's
    drafting: Any  # a dataclass of what the drafting keeps from step to step; None where nothing is drafted
    # Statistics, kept on the device so that they cost no host read
    steps: Tensor  # [B] int32, steps until the image was done
    accepted: Tensor  # [B, D] int32, steps that accepted a draft at depth d + 1
    relaxed: Tensor  # [B] int32, drafts accepted only thanks to relaxation

    @classmethod
    def allocate(
        cls,
        config: TransformerConfig,
        spec: Spec,
        dtype: torch.dtype,
        device: torch.device,
        drafting: Any = None,
    ) -> DecodeState:
        """Zeros everywhere, with room for the batches of a spec.

        Args:
            drafting: the state that the spec's drafting allocated.
        """
        b, r, depth = spec.images, spec.rows, spec.tree.depth
        s = capacity(config, spec.tree)

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        def real(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        sizes = (config.layers, r, s, config.kv, config.head_dim)
        no = torch.zeros(b, dtype=torch.bool, device=device)
        return cls(
            prefix=real(r, config.prefix, config.dim).to(dtype),
            prefix_tokens=whole(r, config.prefix),
            valid=torch.ones(r, s, dtype=torch.bool, device=device),
            pads=whole(r),
            sampling=SamplingParams(real(b), real(b), whole(b), real(b), no),
            bounds=Bounds(whole(b), real(b), real(b), real(b, depth)),
            first_uniform=real(b),
            uniforms=real(spec.block, b, spec.draws),
            cursor=whole(1),
            count=whole(b),
            tokens=whole(b * token_columns(config, spec.tree)),
            root=whole(b),
            kv_cache=KVCache.allocate(*sizes, dtype, device),
            drafting=drafting,
            steps=whole(b),
            accepted=whole(b, depth),
            relaxed=whole(b),
        )

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by dotted name, those of nested dataclasses included."""
        return dict(walk_tensors("", self))

    def restorable(self) -> dict[str, Tensor]:
        """What must be put back after a run that is not to count: all but the caches.

        Those are large, and whatever a run writes there is written again by the next one, at the same positions.
        """
        return dict(walk_tensors("", self, lambda part: not isinstance(part, KVCache)))


def walk_tensors(
    prefix: str, value: object, enter: Callable[[object], bool] = lambda part: True
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a dataclass and of those dataclasses inside it that are to be entered."""
    for field in fields(value):  # type: ignore[arg-type]
        part = getattr(value, field.name)
        if isinstance(part, Tensor):
            yield prefix + field.name, part
        elif hasattr(part, "__dataclass_fields__") and enter(part):
            yield from walk_tensors(f"{prefix}{field.name}.", part, enter)
