"""Known cards: published figures, and by these the least and the projected time of a step; nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from lantern_hpu.files import ASSETS, reading
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.models.model import EmptyModel
from lantern_hpu.tree import Tree

BROKEN = "install the package again"


class Accelerator(NamedTuple):
    """A card of which figures are known.

    Attributes:
        device: what runs it. memory: in bytes; None: that of the machine.
        bandwidth, rate: bytes and operations a second. source: of these figures.
        measured: reports in benchmarks/results by model, whose steps were measured on it.
        copied: bytes a second that were measured. launch: seconds of a captured kernel besides its bytes, by a fit.
        speeds: file in assets with published speeds of other models on it.
    """

    name: str
    title: str
    device: str
    memory: float | None
    bandwidth: float
    rate: float
    source: str
    measured: dict[str, str] = {}
    copied: float | None = None
    launch: float | None = None
    speeds: str | None = None


@cache
def accelerators() -> dict[str, Accelerator]:
    """The known ones by name."""
    with reading(ASSETS / "accelerators.json", BROKEN) as data:
        return {each["name"]: Accelerator(**each) for each in data["accelerators"]}


# ------------------------------------------------------------------------------------ least times


class Rates(NamedTuple):
    """What a device can do in one number format."""

    bandwidth: float  # bytes a second
    rate: float  # operations a second
    number_bytes: int = 2  # of the format: bfloat16
    # Of a number in a matrix, where it is not kept in that format
    weight_bytes: float | None = None


def least_seconds(
    model: ModelConfig, rates: Rates, rows: int, tokens: int, logits: int, drafter: bool = False
) -> tuple[float, float]:
    """Least seconds to read what a pass needs, and to multiply it: a bound of any implementation, not a timing.

    A pass of the target or the drafter reads each weight once, and the keys and values of the committed positions as
    there are in the middle of an image; it multiplies each weight with each token. The longer of the two is its bound.

    Args:
        rows: with guidance, two an image. tokens: of a row in this pass. logits: of these, how many the head is over.
    """
    config, empty = model.target, EmptyModel.of(model)
    context = config.prefix + config.tokens / 2
    layers = 1 if drafter else config.layers
    parameters = empty.drafting if drafter else empty.body
    head = empty.head if logits else 0
    cached = rows * context * layers * 2 * config.kv_width
    # A multiplication with its addition counts as two
    matrices = 2 * (tokens * parameters + logits * head)
    attention = 4 * tokens * context * layers * config.width
    weights_read = (parameters + head) * (rates.weight_bytes or rates.number_bytes)
    read = weights_read + cached * rates.number_bytes
    return read / rates.bandwidth, rows * (matrices + attention) / rates.rate


# ------------------------------------------------------------------------------------ projected times


class PublishedSpeed(NamedTuple):
    """A dense model's published speed on a card in bfloat16, each step one graph, of so many rows at a time."""

    name: str
    parameters: float
    layers: int
    tokens_per_s: float
    rows: int = 1

    def seconds(self, bandwidth: float) -> float:
        """Of a step besides reading the parameters at so many bytes a second."""
        return self.rows / self.tokens_per_s - 2 * self.parameters / bandwidth


@cache
def published_speeds(file: str) -> tuple[list[PublishedSpeed], PublishedSpeed]:
    """Those of a file in assets: of models that draw one row at a time, and of one that draws many."""
    with reading(ASSETS / file, BROKEN) as data:
        return [PublishedSpeed(**each) for each in data["one_row"]], PublishedSpeed(
            **data["many_rows"]
        )


def fit_speeds(alone: Sequence[PublishedSpeed], many: PublishedSpeed) -> tuple[Rates, float]:
    """What steps reach, and seconds of a layer besides its bytes, each to two digits.

    Bandwidth, then a layer's cost at it, by least squares over the steps of one row; the rate by the step of many rows.
    """
    sizes = np.array([(2 * each.parameters, each.layers) for each in alone])
    steps = np.array([1 / each.tokens_per_s for each in alone])
    bandwidth = two_digits(1 / np.linalg.lstsq(sizes, steps, rcond=None)[0][0])
    layers = sizes[:, 1]
    layer = two_digits(layers @ [each.seconds(bandwidth) for each in alone] / (layers @ layers))
    multiplying = many.seconds(bandwidth) - many.layers * layer
    return Rates(bandwidth, two_digits(2 * many.parameters * (many.rows - 1) / multiplying)), layer


def two_digits(value: float) -> float:
    return float(f"{value:.2g}")


def projected_ms(
    card: Accelerator, model: ModelConfig, tree: Tree, rows: int
) -> tuple[float, float]:
    """Milliseconds of a step of one image in bfloat16, from and to, on a card of which speeds are published.

    A step reads, has a cost for each layer, and multiplies its drafts, one after the other; a drafter adds a pass for
    each level. A layer costs as by the fit, or as in the published model whose layers are most alike in size.

    Args:
        rows: of the image; with guidance two.
    """
    assert card.speeds is not None
    alone, many = published_speeds(card.speeds)
    rates, usual = fit_speeds(alone, many)
    empty, layers = EmptyModel.of(model), model.target.layers
    size = (empty.body + empty.head) / layers
    alike = min(alone, key=lambda each: abs(each.parameters / each.layers - size))
    read, multiply = least_seconds(model, rates, rows, tree.size, tree.size)
    seconds = read + multiply * (tree.size - 1) / tree.size
    if tree.needs_drafter:
        seconds += tree.depth * least_seconds(model, rates, rows, 1, 1, drafter=True)[0]
        layers += tree.depth
    first, last = sorted((usual, alike.seconds(rates.bandwidth) / alike.layers))
    return 1000 * (seconds + layers * first), 1000 * (seconds + layers * last)
