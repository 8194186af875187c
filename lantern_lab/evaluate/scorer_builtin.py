"""The embedded model's own protocol: captions, fresh pictures and attributes are its generator's; no download.

    frechet     distance of the drawn pictures from fresh ones, in the features of `attributes.Classifier`, in per cent
                of the fresh pictures' variance
    agreement   share of the attributes named in the captions that the classifier predicts
    diversity   root mean square distance of two pictures of one caption, over that of two of the generator's

Next to the methods are the generator's own pictures of the same captions, which is what the classifier's own error
and the number of pictures leave, and the same through the model's tokenizer, which no method can better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from PIL import Image
from tqdm import tqdm

from lantern_hpu.decode.pixels import to_images
from lantern_hpu.files import sha256
from lantern_hpu.models.vq import VQModel
from lantern_hpu.pipeline import LanternPipeline
from lantern_lab.evaluate.attributes import (
    ATTRIBUTES,
    SIDE,
    WEIGHTS,
    Classifier,
    Pixels,
    small,
    to_network,
)
from lantern_lab.evaluate.drawing import Cache, read_picture, stamps
from lantern_lab.evaluate.metrics import Array, Rows, agreement_rows, built_in, within
from lantern_lab.evaluate.options import SCENES, PaintedOptions
from lantern_lab.evaluate.sets import Item, digest
from lantern_lab.scenes import Noise, Scene, caption_of, paint_picture, render_scene, sample_scene

GENERATOR, TOKENIZER = "the generator", "its tokenizer"
SHARE = "of "  # before the name of an attribute whose agreement is kept
# Numbers of the generator's pictures; those of trainings lie below
CAPTIONS, REFERENCE, PANELS = 2 * 10**9, 3 * 10**9, 4 * 10**9
PAINTED_SIDES = (SIDE, 2 * SIDE)
REPEATS = 4  # pictures of each caption whose diversity is measured


def scene_of(number: int) -> tuple[Scene, Generator]:
    """A scene, and the random numbers for a caption of it."""
    rng = np.random.default_rng(number)
    return sample_scene(rng), rng


def as_classified(pixels: Pixels) -> Pixels:
    """A picture [S, S, 3] as the network reads it, [SIDE, SIDE, 3]."""
    return small(Image.fromarray(pixels))


class PaintedScorer:
    """Captions of the generator, and what is made of pictures of them."""

    name = SCENES

    def __init__(self, sizes: PaintedOptions, pipeline: LanternPipeline, folder: Path) -> None:
        self.sizes, self.pipeline, self.classifier = sizes, pipeline, Classifier.load()
        # Painted in the size of the model's pictures, where its tokenizer can encode them
        self.side = encoded_side(pipeline) or SIDE
        self.noise = Noise(2 * self.side)
        # Captions that leave things out, as users' do, then panels of complete ones
        single = [
            Item(f"{i:06d}", caption_of(*scene_of(CAPTIONS + i))) for i in range(sizes.images)
        ]
        panels = [caption_of(*scene_of(PANELS + p), terse=0.0) for p in range(sizes.panels)]
        copies = range(REPEATS)
        self.items = single + [
            Item(f"panel-{p:04d}-{k}", text) for p, text in enumerate(panels) for k in copies
        ]
        self.cache = Cache(folder, [sha256(WEIGHTS), digest(self.items), self.side])

    def prepare(self) -> None:
        """Paint what the drawn pictures are compared with."""
        fresh = self.cache.rows("reference", self.sizes.fresh, lambda: {"features": self.fresh()})
        self.metrics = built_in(fresh["features"])
        self.generator = self.cache.rows("generator", 0, self.of_generator)

    @cached_property
    def generated(self) -> Pixels:
        """The generator's pictures of the items, [n, side, side, 3]; in a panel several of one scene."""
        singles = [(CAPTIONS + i, 0) for i in range(self.sizes.images)]
        panels = [(PANELS + p, k) for p in range(self.sizes.panels) for k in range(REPEATS)]
        painted = [
            render_scene(scene_of(number)[0], np.random.default_rng((number, k)), self.noise)
            for number, k in tqdm([*singles, *panels], desc="painting captions", unit="picture")
        ]
        return np.stack(painted)

    def fresh(self) -> Array:
        """Features of the reference pictures [fresh, FEATURES]."""
        numbers = tqdm(range(self.sizes.fresh), desc="painting reference", unit="picture")
        pictures = (as_classified(paint_picture(REFERENCE + i, self.noise).pixels) for i in numbers)
        result = []
        while batch := list(islice(pictures, 64)):
            result.append(self.classifier.classify(np.stack(batch)).features)
        return np.concatenate(result).astype(np.float64)

    def of_generator(self) -> Rows:
        pixels = np.stack([as_classified(one) for one in self.generated])
        distances = within(pixels[self.sizes.images :], self.sizes.panels)
        return self.rows_of(pixels, distances) | {"distances": distances}

    def rows_of(self, pixels: Pixels, distances: Array) -> dict[str, Array]:
        """Of pictures of the items [n, SIDE, SIDE, 3]; and the agreement of each attribute alone.

        Args:
            distances: [panels], within the generator's panels.
        """
        images = self.sizes.images
        predicted = self.classifier.classify(pixels[:images])
        matches = predicted.matches([item.prompt for item in self.items[:images]])
        by_attribute = {
            name: [one[name] for one in matches if name in one] for name in sorted(ATTRIBUTES)
        }
        shares = {f"{SHARE}{n}": np.asarray(np.mean(h)) for n, h in by_attribute.items() if h}
        return {
            "frechet": predicted.features.astype(np.float64),
            "agreement": agreement_rows(matches),
            "diversity": np.stack([within(pixels[images:], self.sizes.panels), distances], 1),
            **shares,
        }

    def rows(self, name: str, files: Sequence[Path]) -> Rows:
        def make() -> Rows:
            read = tqdm(files, desc="reading", unit="picture", leave=False)
            pixels = np.stack([small(read_picture(file)) for file in read])
            return self.rows_of(pixels, self.generator["distances"])

        return self.cache.rows(name, stamps(files), make)

    def baselines(self) -> dict[str, Rows]:
        """By name: the generator's own pictures of the captions, and these through the tokenizer."""
        result: dict[str, Rows] = {GENERATOR: self.generator}
        if encoded_side(self.pipeline) == self.side:

            def make() -> Rows:
                pixels = np.stack(list(through_tokenizer(self.pipeline, self.generated)))
                return self.rows_of(pixels, self.generator["distances"])

            result[TOKENIZER] = self.cache.rows("tokenizer", self.pipeline.model.files, make)
        return result

    def protocol(self) -> str:
        sizes = self.sizes
        return (
            f"Protocol `{SCENES}`: {sizes.images} captions of the generator once each and {sizes.panels} {REPEATS} "
            f"times each; {sizes.fresh} fresh pictures as reference."
        )

    def notes(self) -> list[str]:
        right, side = self.classifier.about["accuracy"]["clean"]["all"], self.side
        averaged = f" averaged to {SIDE} x {SIDE}" if side != SIDE else ""
        return [
            "Frechet distance: per cent of the reference's variance, in the features of a small network trained on "
            f"the generator, of pictures of {side} x {side} pixels{averaged}; it cannot be compared with figures of "
            "other networks.",
            f"That network classifies {100 * right:.1f} % of the attributes of fresh pictures right; `{GENERATOR}` is "
            "how it scores the generator's own pictures of the captions.",
        ]


def extra_of(rows: Rows) -> dict[str, dict[str, float]]:
    """Shares that have no interval."""
    shares = {n.removeprefix(SHARE): float(v) for n, v in rows.items() if n.startswith(SHARE)}
    return {"agreement_of": shares} if shares else {}


def encoded_side(pipeline: LanternPipeline) -> int | None:
    """Pixels of a side of the pictures that its tokenizer reads, if they can be painted in that size."""
    vq, (rows, columns) = pipeline.model.vq, pipeline.model.target.config.grid
    if not isinstance(vq, VQModel) or rows != columns:
        return None
    side = rows * vq.config.downsample
    return side if side in PAINTED_SIDES else None


@torch.no_grad()
def through_tokenizer(pipeline: LanternPipeline, pixels: Pixels) -> Iterator[Pixels]:
    """Pictures as the model's tokenizer gives them back, one at a time."""
    vq, grid = pipeline.model.vq, pipeline.model.target.config.grid
    assert isinstance(vq, VQModel)
    weight = vq.quant_conv.weight
    for start in tqdm(range(0, len(pixels), 8), desc="tokenizer", unit="batch"):
        floats = to_network(pixels[start : start + 8]).to(weight.device, weight.dtype)
        codes = vq.encode(floats).flatten(1)
        rows, sides = vq.draw(codes, grid), (side * vq.config.downsample for side in grid)
        yield from map(small, to_images(rows, *sides)[0])
