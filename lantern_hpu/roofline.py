"""The least time that a step can take: bytes over bandwidth, operations over rate. Arithmetic alone, no torch.

A pass of the target must read each of its weights and the keys and values of the committed slots once, and
multiply each weight with each token. What is counted is what no implementation can avoid, so masks, activations
and unused slots are not. Whichever takes longer, reading or multiplying, is the floor of a pass; passes of a step
wait for each other, so their floors add up. The cache is taken as it is in the middle of an image.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from lantern_hpu.errors import OptionError, choices
from lantern_hpu.hub import ASSETS
from lantern_hpu.tree import DynamicTree, Tree

FILE = ASSETS / "accelerators.json"
BFLOAT16 = 2  # bytes


@dataclass(frozen=True)
class Sizes:
    """A model as a roofline sees it; counts of numbers unless said otherwise.

    Attributes:
        body: parameters of the target's blocks. head: of its head. drafter: of the drafter without its
            embedding, 0 without a drafter.
        width: of all query heads together. kv_width: of all key heads together.
        rows_per_image: 2 with guidance.
        number_bytes: bytes of a number.
    """

    body: int
    head: int
    drafter: int
    layers: int
    width: int
    kv_width: int
    prefix: int
    tokens: int
    rows_per_image: int
    number_bytes: int

    @property
    def context(self) -> float:
        """Committed slots in the middle of an image."""
        return self.prefix + self.tokens / 2


@dataclass(frozen=True)
class Rates:
    """What a device can do: bytes a second, operations a second."""

    bandwidth: float
    rate: float


@dataclass(frozen=True)
class Pass:
    """One pass of the target or the drafter over some tokens a row, the head over some of them."""

    tokens: int
    laws: int


@dataclass(frozen=True)
class Shape:
    """The passes of a step: the drafter's one after the other, then the target's over all nodes."""

    draft: tuple[Pass, ...]
    verify: Pass

    @classmethod
    def of(cls, tree: Tree) -> Shape:
        """Of a draft tree; the drafter's first pass catches up with one token."""
        if not tree.depth:
            return cls((), Pass(1, 1))
        catch_up = Pass(1, 1)
        if isinstance(tree, DynamicTree):
            grow = (Pass(tree.top_k, tree.top_k),) * tree.expansions
            return cls((catch_up, *grow), Pass(tree.size, tree.size + 1))
        levels = tuple(Pass(len(level), len(level)) for level in tree.frontiers[1:])
        # Laws at the nodes with children, and at the one where the walk stops.
        return cls((catch_up, *levels), Pass(tree.size, len(tree.expanded) + 1))

    def as_json(self) -> dict[str, Any]:
        """`[tokens, laws]` of each pass."""
        verify = [self.verify.tokens, self.verify.laws]
        return {"draft": [[p.tokens, p.laws] for p in self.draft], "verify": verify}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Shape:
        """What `as_json` wrote."""
        return cls(tuple(Pass(*p) for p in values["draft"]), Pass(*values["verify"]))


@dataclass(frozen=True)
class Floor:
    """Least seconds of a step's two parts, and what bounds the larger one."""

    draft: float
    verify: float
    bound: str  # "bandwidth" or "arithmetic", of the verification

    @property
    def step(self) -> float:
        return self.draft + self.verify


def bytes_read(sizes: Sizes, weights: int, layers: int, rows: int) -> float:
    """Bytes that a pass has to read."""
    cached = rows * sizes.context * layers * 2 * sizes.kv_width
    return (weights + cached) * sizes.number_bytes


def operations(sizes: Sizes, body: int, layers: int, rows: int, what: Pass) -> float:
    """Operations of a pass; a multiplication with its addition counts as two."""
    matrices = 2 * (what.tokens * body + what.laws * sizes.head)
    attention = 4 * what.tokens * sizes.context * layers * sizes.width
    return rows * (matrices + attention)


def pass_seconds(
    sizes: Sizes, rates: Rates, body: int, layers: int, rows: int, what: Pass
) -> tuple[float, float]:
    """Least seconds to read what a pass needs, and to multiply it."""
    weights = body + (sizes.head if what.laws else 0)
    return (
        bytes_read(sizes, weights, layers, rows) / rates.bandwidth,
        operations(sizes, body, layers, rows, what) / rates.rate,
    )


def floor(sizes: Sizes, shape: Shape, images: int, rates: Rates) -> Floor:
    """The floor of a step over a batch of so many images."""
    rows = images * sizes.rows_per_image
    drafts = [pass_seconds(sizes, rates, sizes.drafter, 1, rows, what) for what in shape.draft]
    read, multiply = pass_seconds(sizes, rates, sizes.body, sizes.layers, rows, shape.verify)
    bound = "bandwidth" if read >= multiply else "arithmetic"
    return Floor(sum(max(pair) for pair in drafts), max(read, multiply), bound)


# ------------------------------------------------------------------------------------ projections


@dataclass(frozen=True)
class Accelerator:
    """Published peaks of a card; see `assets/accelerators.json`."""

    name: str
    title: str
    bandwidth: float
    rate: float
    source: str
    cards: tuple[str, ...]

    @property
    def rates(self) -> Rates:
        return Rates(self.bandwidth, self.rate)


@cache
def accelerators() -> dict[str, Accelerator]:
    """The known accelerators by name."""
    listed = json.loads(FILE.read_text())["accelerators"]
    return {a["name"]: Accelerator(**{**a, "cards": tuple(a["cards"])}) for a in listed}


def find_accelerators(names: Sequence[str]) -> list[Accelerator]:
    """Accelerators by name.

    Raises:
        OptionError: an unknown name, or one given twice.
    """
    known = accelerators()
    for name in names:
        if name not in known:
            raise OptionError(f"unknown accelerator {name!r}", hint=choices(known))
        if names.count(name) > 1:
            raise OptionError(f"--project names {name} twice")
    return [known[name] for name in names]


def published(card: str) -> Accelerator | None:
    """The published peaks of a card that a report names, if they are known."""
    return next((a for a in accelerators().values() if card in a.cards), None)


def projected_ms(
    measured_ms: float,
    sizes: Sizes,
    shape: Shape,
    images: int,
    measured: Rates,
    accelerator: Accelerator,
) -> float:
    """A step on an accelerator that nobody measured: its floor, missed as far as the measured one was.

    Args:
        measured_ms: of a step on the calibrating device.
        measured: rates of that device, of the same kind - published or reached - as are to be compared.

    The accelerator computes in bfloat16, whatever the measured device did.
    """
    own = floor(sizes, shape, images, measured).step
    other = floor(replace(sizes, number_bytes=BFLOAT16), shape, images, accelerator.rates).step
    return measured_ms * other / own
