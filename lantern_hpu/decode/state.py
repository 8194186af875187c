"""Every tensor that decoding changes, allocated once.

A step writes these tensors in place, with indices it computes on the device; their addresses, shapes and
dtypes never change, which is what lets a graph be recorded once and replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.decode.spec import Spec, capacity, token_columns
from lantern_hpu.methods.relaxation import Relaxation
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.ops.kv_cache import KVCache
from lantern_hpu.ops.sampling import ROUNDS, SamplingParams
from lantern_hpu.tree import Window


@dataclass
class Bounds:
    """How far acceptance is relaxed, one value per image; k = 0, weight = 1 and no clusters are exact."""

    k: Tensor  # [B] int32, neighbours that may lend their mass
    delta: Tensor  # [B] float32, additive bound (0 under other rules)
    factor: Tensor  # [B] float32, lambda - 1 (0 under other rules)
    weight: Tensor  # [B, D] float32, w at each depth (1 under other rules)
    # [B, 3] float32, what keeps clusters small (0 under other rules); None where no image has any
    limits: Tensor | None = None
    # [B] float32, total variation of a token (0 under other rules); None as above
    tv: Tensor | None = None
    budget: Tensor | None = None  # [B] float32, what is left of it for the tokens to come

    @classmethod
    def of(
        cls, relaxations: Sequence[Relaxation], depth: int, device: torch.device | None = None
    ) -> Bounds:
        """One of each image, for trees so deep."""

        def each(values: Iterable[Any], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(list(values), dtype=dtype, device=device)

        return cls(
            each((r.k for r in relaxations), torch.int32),
            each(r.delta for r in relaxations),
            each(r.factor for r in relaxations),
            each(r.weights(depth) for r in relaxations),
            each(r.limits for r in relaxations),
            each(r.tv for r in relaxations),
            each(math.inf if r.budget is None else r.budget for r in relaxations),
        )


@dataclass
class PrefillInput:
    """A images that are to begin, RA rows; set by the host before each admission."""

    slot: Tensor  # [A] int32, where each goes
    prefix: Tensor  # [RA, P, H] condition embeddings
    # [RA, P] int32, what a drafter reads there: words, or 0 where there are none
    prefix_tokens: Tensor
    valid: Tensor  # [RA, S] bool, False at padded prefix positions
    pads: Tensor  # [RA] int32, positions of the prefix that are none of the rotary embedding's
    axes: Tensor | None  # [RA, 3, P] int32, see `Prefix`; None where no prompt holds pictures
    sampling: SamplingParams  # [A]
    bounds: Bounds | None  # [A]; None where nothing is drafted
    first_uniform: Tensor  # [A] float32, for the token that admission draws
    keys: Tensor | None  # [A, N, ROUNDS] int32, of the fixed noise of windows; None for other trees

    @classmethod
    def allocate(
        cls,
        config: TransformerConfig,
        spec: Spec,
        images: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PrefillInput:
        """Room for n images, which take the first slots."""
        a, r = images, images * spec.rows // spec.images
        s, keys = capacity(config, spec.tree), None
        if isinstance(spec.tree, Window):
            keys = int_zeros(device, a, config.tokens, ROUNDS)
        return cls(
            slot=torch.arange(a, dtype=torch.int32).to(device),
            prefix=torch.zeros(r, config.prefix, config.dim, dtype=dtype, device=device),
            prefix_tokens=int_zeros(device, r, config.prefix),
            valid=torch.ones(r, s, dtype=torch.bool, device=device),
            pads=int_zeros(device, r),
            axes=int_zeros(device, r, 3, config.prefix) if config.has_axes else None,
            sampling=no_sampling(a, config.vocab_size, device),
            bounds=no_bounds(a, spec, device),
            first_uniform=float_zeros(device, a),
            keys=keys,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's features."""
        return self.prefix.dtype


def int_zeros(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def float_zeros(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32, device=device)


def no_sampling(images: int, vocabulary: int, device: torch.device) -> SamplingParams:
    """No filter, for slots before the first admission: what runs there must stay finite."""
    # No arithmetic: on `meta`, where memory is counted, it would load torch's compiler
    ones = torch.ones(images, dtype=torch.float32, device=device)
    every = torch.full((images,), vocabulary, dtype=torch.int32, device=device)
    return SamplingParams(ones, ones.clone(), every, ones.clone(), int_zeros(device, images).bool())


def no_bounds(images: int, spec: Spec, device: torch.device) -> Bounds | None:
    if not spec.tree.depth:
        return None
    return Bounds(
        k=int_zeros(device, images),
        delta=float_zeros(device, images),
        factor=float_zeros(device, images),
        weight=float_zeros(device, images, spec.tree.depth),
        limits=float_zeros(device, images, 3) if spec.ranks else None,
        tv=float_zeros(device, images) if spec.blended else None,
        budget=float_zeros(device, images) if spec.blended else None,
    )


@dataclass
class Moves:
    """Cache positions of the last accepted path, which the next step moves together as it writes its own."""

    source: Tensor  # [B, D] int32
    goal: Tensor  # [B, D] int32, none of them twice


@dataclass
class Meter:
    """The total variation that relaxation has spent on each image, summed over its tokens, and the most on one."""

    total: Tensor  # [B] float32
    largest: Tensor  # [B] float32

    def add(self, spent: Tensor) -> None:
        """What a step spent at each of its places [B, D]."""
        self.total.add_(spent.sum(1))
        self.largest.copy_(torch.maximum(self.largest, spent.amax(1)))


@dataclass
class DecodeState:
    """The state of B slots. Image token t has cache position P + t.

    A slot whose image is finished or gone runs on by itself.
    """

    prefill: PrefillInput
    # Set by the host
    uniforms: Tensor  # [block, B, draws] float32
    # Set by admission
    valid: Tensor  # [R, S] bool, False at padded prefix positions
    pads: Tensor  # [R] int32, how many those are
    sampling: SamplingParams
    bounds: Bounds | None
    # Changed by admission and step
    cursor: Tensor  # [1] int32, which of `uniforms` is next
    count: Tensor  # [B] int32, t: image tokens whose keys and values are in the cache
    tokens: Tensor  # [B * (N + D + 1)] int32, flat; tokens 0 .. t of each image are final
    root: Tensor  # [B] int32, token t, not yet in the cache
    kv_cache: KVCache  # the target's
    moves: Moves | None  # what the next step moves in it; None: an accepted path is in place
    drafting: Any  # a dataclass of what the drafting keeps from step to step; None where nothing is drafted
    # [B] int32, tokens known: what admission and step return. It is here and not in a recording's memory, which the
    # next recording may use again before the host has read it.
    known: Tensor
    # Statistics, kept on the device so that they cost no host read
    steps: Tensor  # [B] int32, steps until the image was done
    accepted: Tensor  # [B, D] int32, steps that accepted a draft at depth d + 1
    relaxed: Tensor  # [B] int32, drafts accepted only thanks to relaxation
    spoiled: Tensor  # [B] int32, steps whose probabilities were NaN
    meter: Meter | None  # what that cost; None where it is not metered
    # [B * (N + D + 1), 2] float32, of each of `tokens`: see `Sampler.logprobs`; None where no image keeps them
    logprobs: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        config: TransformerConfig,
        spec: Spec,
        dtype: torch.dtype,
        device: torch.device,
        drafting: Any = None,
        by_head: bool = False,
    ) -> DecodeState:
        """Zeros, with room for the batches of a spec, and what the spec's drafting allocated.

        For `by_head` see `KVCache.allocate`.
        """
        b, r, depth = spec.images, spec.rows, spec.tree.depth
        s = capacity(config, spec.tree)
        sizes = (config.layers, r, s, config.kv, config.head_dim)
        moves = meter = logprobs = None
        columns = b * token_columns(config, spec.tree)
        if not spec.tree.is_chain:
            moves = Moves(int_zeros(device, b, depth), int_zeros(device, b, depth))
        if spec.metered:
            meter = Meter(float_zeros(device, b), float_zeros(device, b))
        if spec.logprobs:
            logprobs = float_zeros(device, columns, 2)
        return cls(
            prefill=PrefillInput.allocate(config, spec, b, dtype, device),
            uniforms=float_zeros(device, spec.block, b, spec.draws),
            valid=torch.ones(r, s, dtype=torch.bool, device=device),
            pads=int_zeros(device, r),
            sampling=no_sampling(b, config.vocab_size, device),
            bounds=no_bounds(b, spec, device),
            cursor=int_zeros(device, 1),
            count=int_zeros(device, b),
            tokens=int_zeros(device, columns),
            root=int_zeros(device, b),
            kv_cache=KVCache.allocate(*sizes, dtype, device, by_head),
            moves=moves,
            drafting=drafting,
            known=int_zeros(device, b),
            steps=int_zeros(device, b),
            accepted=int_zeros(device, b, depth),
            relaxed=int_zeros(device, b),
            spoiled=int_zeros(device, b),
            meter=meter,
            logprobs=logprobs,
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the model's features."""
        return self.prefill.dtype

    @property
    def counters(self) -> list[Tensor]:
        """What begins at zero with each image: [B, ..]."""
        result = [self.count, self.steps, self.relaxed, self.spoiled]
        metered = [] if self.meter is None else [self.meter.total, self.meter.largest]
        return [*result, *metered, *([self.accepted] if self.accepted.shape[1] else [])]

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by dotted name, those of nested dataclasses included."""
        return dict(walk_tensors("", self))

    def restorable(self) -> dict[str, Tensor]:
        """What must be put back after a run that is not to count: all but the caches.

        Those are large, and what a run writes there is written again by the next one, at the same positions. So nothing
        may be pending in `moves`: see `rewinds`.
        """
        return dict(walk_tensors("", self, lambda part: not isinstance(part, KVCache)))

    def rewinds(self) -> Iterator[None]:
        """Puts all but the caches back each time: for steps whose results are not used."""
        self.cursor.zero_()
        if self.moves is not None:
            self.moves.source.copy_(self.moves.goal)
        tensors = self.restorable()
        begun = {name: tensor.clone() for name, tensor in tensors.items()}
        while True:
            for name, tensor in tensors.items():
                tensor.copy_(begun[name])
            yield


def paired(values: SamplingParams | Bounds, kept: object) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of a dataclass with those of the same names of another, where that has them."""
    for field in fields(values):
        value = getattr(values, field.name)
        goal = getattr(kept, field.name)
        if value is not None and goal is not None:
            yield value, goal


def walk_tensors(
    prefix: str, value: object, enter: Callable[[object], bool] = lambda part: True
) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a dataclass and of those dataclasses inside it that are to be entered."""
    for field in fields(value):  # type: ignore[arg-type]
        part, name = getattr(value, field.name), prefix + field.name
        if isinstance(part, Tensor):
            yield name, part
        elif isinstance(part, tuple):
            for number, item in enumerate(part):
                yield from walk_tensors(f"{name}.{number}.", item, enter)
        elif hasattr(part, "__dataclass_fields__") and enter(part):
            yield from walk_tensors(f"{name}.", part, enter)
