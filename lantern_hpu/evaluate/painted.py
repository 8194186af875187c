"""The embedded model's own protocol: captions, fresh pictures and attributes are its generator's; no download.

    frechet     distance of the drawn pictures from fresh ones, in the features of `attributes.Classifier`, in per cent
                of the fresh pictures' variance
    agreement   share of the attributes named in the captions that the classifier sees in the pictures
    diversity   root mean square distance of two pictures of one caption, over that of two of the generator's

Beside the methods stand the generator's own pictures of the same captions, which is what the classifier's own error
and the number of pictures leave, and the same through the model's tokenizer, which no method can better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from tqdm import tqdm

from lantern_hpu.evaluate.attributes import SIDE, Classifier, Pixels
from lantern_hpu.evaluate.sets import Item
from lantern_hpu.evaluate.statistics import Array, Metric, Rows, frechet_metric, ratio_metric
from lantern_hpu.scenes import Noise, Scene, describe, paint, render, sample

# Numbers of the generator's pictures; those of trainings lie below
CAPTIONS, REFERENCE, PANELS = 2 * 10**9, 3 * 10**9, 4 * 10**9
REPEATS = 4  # pictures of each caption whose diversity is measured


class Painted:
    """Captions of the generator, and what to make of pictures of them."""

    name = "scenes"

    def __init__(self, images: int, panels: int, reference: int) -> None:
        """
        Args:
            images: captions that are drawn once each. panels: captions drawn `REPEATS` times.
            reference: fresh pictures.
        """
        self.images, self.panels, self.reference = images, panels, reference
        self.noise, self.classifier = Noise(2 * SIDE), Classifier.load()

    @property
    def settings(self) -> dict[str, int]:
        """What fixes the pictures."""
        return {"images": self.images, "panels": self.panels, "reference": self.reference}

    def items(self) -> list[Item]:
        """What is to be drawn: captions that leave things out, as users' do, then panels of complete ones."""
        single = [Item(f"{i:06d}", describe(*scene_of(CAPTIONS + i))) for i in range(self.images)]
        panels = [describe(*scene_of(PANELS + p), terse=0.0) for p in range(self.panels)]
        copies = range(REPEATS)
        return single + [
            Item(f"panel-{p:04d}-{k}", text) for p, text in enumerate(panels) for k in copies
        ]

    def own(self) -> Pixels:
        """The generator's own pictures of the items, [n, SIDE, SIDE, 3]."""
        return np.stack(list(self.painted()))

    def painted(self) -> Iterator[Pixels]:
        """Of each caption's scene; in a panel several of one."""
        singles = [(CAPTIONS + i, 0) for i in range(self.images)]
        panels = [(PANELS + p, k) for p in range(self.panels) for k in range(REPEATS)]
        for number, k in tqdm([*singles, *panels], desc="painting captions", unit="picture"):
            scene, _ = scene_of(number)
            yield render(scene, np.random.default_rng((number, k)), self.noise)

    def fresh(self) -> Array:
        """Features of the reference pictures [reference, FEATURES]."""
        numbers, found = tqdm(range(self.reference), desc="painting reference", unit="picture"), []
        batch: list[Pixels] = []
        for i in numbers:
            batch.append(paint(REFERENCE + i, self.noise).pixels)
            if len(batch) == 64 or i == self.reference - 1:
                found.append(self.classifier.see(np.stack(batch)).features)
                batch = []
        return np.concatenate(found).astype(np.float64)

    def metrics(self, fresh: Array) -> list[Metric]:
        """
        Args:
            fresh: features of reference pictures.
        """
        return [
            frechet_metric(fresh),
            ratio_metric("agreement", "caption agreement", "higher"),
            ratio_metric("diversity", "diversity", "higher", 2),
        ]

    def rows(self, items: Sequence[Item], pixels: Pixels, distances: Array) -> Rows:
        """Of pictures of the items [n, SIDE, SIDE, 3].

        Args:
            distances: [panels], within the generator's panels.
        """
        seen = self.classifier.see(pixels[: self.images])
        captions = [item.prompt for item in items[: self.images]]
        hits = [[hit for _, hit in one] for one in seen.by_picture(captions)]
        panels = within(pixels[self.images :], self.panels)
        return {
            "frechet": seen.features.astype(np.float64),
            "agreement": np.asarray([(sum(one), len(one)) for one in hits], np.float64),
            "diversity": np.stack([panels, distances], 1),
        }

    def by_attribute(self, items: Sequence[Item], pixels: Pixels) -> dict[str, float]:
        """The agreement of each attribute alone."""
        seen = self.classifier.see(pixels[: self.images])
        found: dict[str, list[bool]] = {}
        for name, hit in seen.agreement([item.prompt for item in items[: self.images]]):
            found.setdefault(name, []).append(hit)
        return {name: float(np.mean(hits)) for name, hits in sorted(found.items())}


def scene_of(number: int) -> tuple[Scene, Generator]:
    """A scene, and the random numbers for a caption of it."""
    rng = np.random.default_rng(number)
    return sample(rng), rng


def within(pixels: NDArray[np.uint8], panels: int) -> Array:
    """[panels] root mean square distances of the pairs in each panel, of pixels [panels * REPEATS, ...]."""
    groups = pixels.reshape(panels, -1, *pixels.shape[1:]).astype(np.float64)
    pairs = list(combinations(range(groups.shape[1]), 2))
    each = [np.square(groups[:, a] - groups[:, b]).mean((1, 2, 3)) ** 0.5 for a, b in pairs]
    return np.asarray(np.mean(each, 0))
