"""The embedded model's own protocol: captions, fresh pictures and attributes are its generator's; no download.

    frechet     distance of the drawn pictures from fresh ones, in the features of `attributes.Classifier`, in per cent
                of the fresh pictures' variance
    agreement   share of the attributes named in the captions that the classifier predicts
    diversity   root mean square distance of two pictures of one caption, over that of two of the generator's

Beside the methods stand the generator's own pictures of the same captions, which is what the classifier's own error
and the number of pictures leave, and the same through the model's tokenizer, which no method can better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from lantern_lab.evaluate.folder import Cache, read_picture, stamps
from lantern_lab.evaluate.metrics import BUILTIN
from lantern_lab.evaluate.metrics.captions import agreement_rows
from lantern_lab.evaluate.metrics.diversity import within
from lantern_lab.evaluate.options import PaintedOptions
from lantern_lab.evaluate.protocols import SCENES
from lantern_lab.evaluate.quality_rows import QualityRow
from lantern_lab.evaluate.sets import Item, digest
from lantern_lab.evaluate.statistics import (
    Array,
    Rows,
    figures,
)
from lantern_lab.scenes import (
    Noise,
    Scene,
    caption_of,
    paint_picture,
    render_scene,
    sample_scene,
)

GENERATOR, TOKENIZER = "the generator", "its tokenizer"
SHARE = "of "  # before the name of an attribute whose agreement is kept
# Numbers of the generator's pictures; those of trainings lie below
CAPTIONS, REFERENCE, PANELS = 2 * 10**9, 3 * 10**9, 4 * 10**9
PAINTED_SIDES = (SIDE, 2 * SIDE)
REPEATS = 4  # pictures of each caption whose diversity is measured


class Painted:
    """Captions of the generator, and what to make of pictures of them."""

    def __init__(self, sizes: PaintedOptions, side: int = SIDE) -> None:
        """
        Args:
            side: pixels in which they are painted, before they are averaged to what the network reads.
        """
        self.images, self.panels, self.reference = sizes.images, sizes.panels, sizes.fresh
        self.side, self.noise, self.classifier = side, Noise(2 * side), Classifier.load()

    def items(self) -> list[Item]:
        """What is to be drawn: captions that leave things out, as users' do, then panels of complete ones."""
        single = [Item(f"{i:06d}", caption_of(*scene_of(CAPTIONS + i))) for i in range(self.images)]
        panels = [caption_of(*scene_of(PANELS + p), terse=0.0) for p in range(self.panels)]
        copies = range(REPEATS)
        return single + [
            Item(f"panel-{p:04d}-{k}", text) for p, text in enumerate(panels) for k in copies
        ]

    def painted(self) -> Iterator[Pixels]:
        """Of each caption's scene; in a panel several of one."""
        singles = [(CAPTIONS + i, 0) for i in range(self.images)]
        panels = [(PANELS + p, k) for p in range(self.panels) for k in range(REPEATS)]
        for number, k in tqdm([*singles, *panels], desc="painting captions", unit="picture"):
            scene, _ = scene_of(number)
            yield render_scene(scene, np.random.default_rng((number, k)), self.noise)

    def fresh(self) -> Array:
        """Features of the reference pictures [reference, FEATURES]."""
        numbers, result = tqdm(range(self.reference), desc="painting reference", unit="picture"), []
        batch: list[Pixels] = []
        for i in numbers:
            batch.append(as_classified(paint_picture(REFERENCE + i, self.noise).pixels))
            if len(batch) == 64 or i == self.reference - 1:
                result.append(self.classifier.classify(np.stack(batch)).features)
                batch = []
        return np.concatenate(result).astype(np.float64)

    def rows(self, items: Sequence[Item], pixels: Pixels, distances: Array) -> dict[str, Array]:
        """Of pictures of the items [n, SIDE, SIDE, 3]; and the agreement of each attribute alone.

        Args:
            distances: [panels], within the generator's panels.
        """
        predicted = self.classifier.classify(pixels[: self.images])
        matches = predicted.matches([item.prompt for item in items[: self.images]])
        by_attribute = {
            name: [one[name] for one in matches if name in one] for name in sorted(ATTRIBUTES)
        }
        panels = within(pixels[self.images :], self.panels)
        return {
            "frechet": predicted.features.astype(np.float64),
            "agreement": agreement_rows(matches),
            "diversity": np.stack([panels, distances], 1),
            **{
                f"{SHARE}{n}": np.asarray(np.mean(hits)) for n, hits in by_attribute.items() if hits
            },
        }


def scene_of(number: int) -> tuple[Scene, Generator]:
    """A scene, and the random numbers for a caption of it."""
    rng = np.random.default_rng(number)
    return sample_scene(rng), rng


def as_classified(pixels: Pixels) -> Pixels:
    """A picture [S, S, 3] as the network reads it, [SIDE, SIDE, 3]."""
    return small(Image.fromarray(pixels))


class PaintedScorer:
    name = SCENES

    def __init__(self, sizes: PaintedOptions, pipeline: LanternPipeline, folder: Path) -> None:
        # In the size of the model's pictures, where its tokenizer can encode painted ones
        side = encoded_side(pipeline) or SIDE
        self.painted, self.pipeline = Painted(sizes, side), pipeline
        self.items = self.painted.items()
        self.cache = Cache(folder, [sha256(WEIGHTS), digest(self.items), side])
        self._generated: Pixels | None = None

    def prepare(self) -> None:
        """Paint what the drawn pictures are compared with."""
        reference = self.cache.rows(
            "reference", self.painted.reference, lambda: {"features": self.painted.fresh()}
        )
        self.metrics = [make(reference["features"]) for make in BUILTIN.values()]
        self.generator = self.cache.rows("generator", 0, self.of_generator)

    @property
    def generated(self) -> Pixels:
        """The generator's pictures of the items, painted when first asked for."""
        if self._generated is None:
            self._generated = np.stack(list(self.painted.painted()))
        return self._generated

    def of_generator(self) -> Rows:
        pixels = np.stack([as_classified(one) for one in self.generated])
        distances = within(pixels[self.painted.images :], self.painted.panels)
        return self.painted.rows(self.items, pixels, distances) | {"distances": distances}

    def rows(self, name: str, files: Sequence[Path]) -> Rows:
        def made() -> Rows:
            read = tqdm(files, desc="reading", unit="picture", leave=False)
            pixels = np.stack([small(read_picture(file)) for file in read])
            return self.painted.rows(self.items, pixels, self.generator["distances"])

        return self.cache.rows(name, stamps(files), made)

    def baselines(self, rounds: int) -> list[QualityRow]:
        """The generator's own pictures of the captions, and these through the tokenizer."""
        result = {GENERATOR: self.generator}
        if encoded_side(self.pipeline) == self.painted.side:

            def through() -> Rows:
                pixels = np.stack(list(through_tokenizer(self.pipeline, self.generated)))
                return self.painted.rows(self.items, pixels, self.generator["distances"])

            files = self.pipeline.model.files
            result[TOKENIZER] = self.cache.rows("tokenizer", files, through)
        return [
            QualityRow(name, {}, figures(self.metrics, rows, rounds), extra_of(rows))
            for name, rows in result.items()
        ]

    def protocol(self) -> str:
        sizes = self.painted
        return (
            f"Protocol `{SCENES}`: {sizes.images} captions of the generator once each and {sizes.panels} {REPEATS} "
            f"times each; {sizes.reference} fresh pictures as reference."
        )

    def notes(self) -> list[str]:
        right = self.painted.classifier.about["accuracy"]["clean"]["all"]
        side = self.painted.side
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
        yield from map(small, to_images(vq.decode_codes(codes, grid)))
