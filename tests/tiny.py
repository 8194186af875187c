"""A tiny random target with a drafter that resembles it, and how to draw with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lantern_hpu.backends.base import DevicePlan, get_backend
from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode.batch import Batch
from lantern_hpu.decode.engine import Engine, read_records
from lantern_hpu.decode.spec import Spec
from lantern_hpu.methods.relaxation import EXACT, Relaxation
from lantern_hpu.models.config import DrafterConfig, TransformerConfig
from lantern_hpu.models.text.prefix import Prefix, wordless
from lantern_hpu.models.transformer import Drafter, Target
from lantern_hpu.tree import DraftTree, Tree, load_static

Models = tuple[Target, Drafter]

CONFIG = TransformerConfig(
    vocab_size=32,
    dim=64,
    layers=2,
    heads=2,
    ffn_dim=96,
    prefix=4,
    grid=(4, 4),
    rope_prefix="identity",
)
SMALL_TREE = DraftTree.from_paths("small", [[0], [1], [0, 0], [0, 1]])
NAMES = (
    "naive_extend_57",
    "mc_sim_7b_63",
    "mc_sim_7b_63_balanced",
    "reverse_balanced_25",
    "medusa_2_7b_63",
    "chain",
    "chain_2",
    "flat_4",
    "broad_7",
    "deep_7",
)


def random_tree(seed: int) -> DraftTree:
    """A tree of random shape, at most four levels deep."""
    rng = random.Random(seed)
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for _ in range(rng.randint(1, 4)):
        counts = [rng.choice([0, 0, 1, 2, 3]) for _ in level]
        counts[rng.randrange(len(counts))] += 1
        level = [
            (*path, r) for path, count in zip(level, counts, strict=True) for r in range(count)
        ]
        paths += level
    rng.shuffle(paths)
    return DraftTree.from_paths(f"random {seed}", paths)


def tiny_config(**changes: Any) -> TransformerConfig:
    return replace(CONFIG, **changes)


def tiny_models(
    config: TransformerConfig = CONFIG, seed: int = 0, likeness: float = 1.0, **options: Any
) -> Models:
    """A seeded random model.

    Args:
        likeness: 1 for a drafter that copies the target's embedding and last block, 0 for an unrelated one.
        options: of the drafter.
    """
    torch.manual_seed(seed)
    target, drafter = Target(config), Drafter(config, DrafterConfig(**options))
    with torch.no_grad():
        for block in [*target.layers, drafter.block]:
            block.attention.qkv.weight.mul_(2)  # so that the context matters
            block.attention.out.weight.mul_(2)
        target.head.weight.mul_(2)  # and distributions are far from flat
        if likeness:
            drafter.embed.weight.copy_(target.embed.weight)
            eye = torch.eye(config.dim)
            drafter.fc.weight.copy_(torch.cat([eye, 0.2 * eye], 1) * likeness)
            drafter.fc.bias.zero_()
            known = target.layers[-1].state_dict()
            drafter.block.load_state_dict({n: known[n] for n in drafter.block.state_dict()})
    return target.requires_grad_(False).eval(), drafter.requires_grad_(False).eval()


def condition(config: TransformerConfig, prompts: Sequence[str], guidance: bool = True) -> Prefix:
    """One slot a letter, padded with zeros on the left; the drafter reads zeros."""
    generator = torch.Generator().manual_seed(7)
    letters = torch.randn(256, config.dim, generator=generator)
    nothing = torch.randn(config.prefix, config.dim, generator=generator)
    rows, masks = [], []
    for prompt in prompts:
        word = prompt.strip()[: config.prefix]
        pads = config.prefix - len(word)
        rows.append(torch.cat([torch.zeros(pads, config.dim), letters[[ord(c) for c in word]]]))
        masks.append(torch.arange(config.prefix) >= pads)
    prefix, valid = torch.stack(rows), torch.stack(masks)
    if not guidance:
        return wordless(prefix, valid)
    empty = nothing * valid[..., None]
    return wordless(torch.cat([prefix, empty]), torch.cat([valid, valid]))


def spec_for(tree: Tree, requests: Sequence[Request], **changes: Any) -> Spec:
    """A spec that serves these requests."""
    config = CONFIG if "config" not in changes else changes.pop("config")
    return replace(Spec.of(requests, tree, len(requests), config), **{"block": 4, **changes})


def ring(vocabulary: int) -> Tensor:
    """Neighbour table [V, V - 1] of codes on a ring: +1, -1, +2, -2, ..."""
    steps = [s for i in range(1, vocabulary) for s in (i, -i)][: vocabulary - 1]
    return (torch.arange(vocabulary)[:, None] + torch.tensor(steps)) % vocabulary


def circle(vocabulary: int) -> Tensor:
    """Vectors [V, 2] of codes on a circle; those that are close have numbers far apart."""
    angle = torch.arange(vocabulary) * 2.1
    return torch.stack([angle.cos(), angle.sin()], -1)


def make_engine(models: Models, spec: Spec, mode: str = "eager") -> Engine:
    target, drafter = models
    size = target.config.vocab_size
    near = ring(size) if spec.neighbours else None
    codes = circle(size) if spec.ranks else None
    fit = DevicePlan(get_backend("cpu"), target.dtype, mode)
    return Engine(target, drafter, spec, fit, near, codes)


@dataclass
class Decoded:
    """The tokens and counts of n images."""

    tokens: NDArray[np.int64]  # [n, N]
    steps: list[int]  # [n]
    accepted: list[list[int]]  # [n][D]
    relaxed: list[int]  # [n]
    spent: list[tuple[float, float]] | None  # [n] sum and largest of `Meter`; None: not metered


def decoded(engine: Engine, requests: Sequence[Request]) -> Decoded:
    """What the first slots of an engine hold."""
    records = read_records(engine, dict(enumerate(requests)))
    spent = [(one.tv_sum or 0.0, one.tv_max or 0.0) for one in records]
    return Decoded(
        np.stack([one.token_ids for one in records]),
        [one.steps for one in records],
        [one.accepted_by_depth for one in records],
        [one.relaxed_accepts for one in records],
        None if engine.state.meter is None else spent,
    )


def draw(engine: Engine, requests: Sequence[Request]) -> Decoded:
    """Run a batch to its end."""
    batch = Batch(engine, partial(prefix_for, engine))
    batch.admit(requests)
    while batch.running:
        batch.advance()
    return decoded(engine, requests)


def prefix_for(engine: Engine, requests: Sequence[Request]) -> Prefix:
    """The condition of a batch of an engine."""
    prompts = [request.prompt for request in requests]
    return condition(engine.target.config, prompts, engine.spec.guidance)


def sample(
    models: Models, tree: Tree | str, requests: Sequence[Request], **changes: Any
) -> Decoded:
    """Draw these requests with a fresh engine."""
    chosen = load_static(tree) if isinstance(tree, str) else tree
    mode = changes.pop("mode", "eager")
    spec = spec_for(chosen, requests, config=models[0].config, **changes)
    return draw(make_engine(models, spec, mode), requests)


def advance(engine: Engine, requests: Sequence[Request], steps: int) -> None:
    """Prefill and so many steps, so that a test can look at the state in the middle of an image."""
    engine.prefill_batch(prefix_for(engine, requests), requests)
    with torch.no_grad():
        for number in range(steps):
            engine.run_steps_and_read([r.seed for r in requests], number + 1, 1)


def request(
    prompt: str = "abcd",
    seed: int = 0,
    cfg_scale: float = 2.0,
    relaxation: Relaxation | None = None,
    **sampling: Any,
) -> Request:
    """A request with its sampling options given flat."""
    return Request(prompt, seed, Sampling(cfg_scale, **sampling), relaxation or EXACT)
