"""What is painted on: noise, masks, light, and a pen for small drawings.

Lengths are shares of the picture's side, y grows downwards. S is the canvas's side in pixels, twice the picture's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from lantern_lab.scenes.scene import SKIES, STORMS, Colour, Look, Scene

Array = NDArray[np.floating[Any]]
Points = Sequence[tuple[float, float]]
T = TypeVar("T")
UNIT = 128  # side of the canvas in whose pixels the finest marks are measured


class Noise:
    """Tiles of fractal noise that go on at their edges; a crop of one is a fresh piece of texture.

    On a canvas larger than `UNIT` the tiles are those of the smaller one with finer detail added, so that
    a picture is the same picture at both sizes.
    """

    KINDS = {  # falloff of the spectrum, how much wider than high
        "cloud": (1.7, 2.2),
        "soft": (2.0, 1.0),
        "rock": (1.35, 0.8),
        "wave": (1.15, 7.0),
        "stroke": (0.9, 3.0),
        "leaf": (0.9, 1.0),
    }

    def __init__(self, side: int, seed: int = 0, tiles: int = 6) -> None:
        """`side`: pixels of a crop; tiles are four times as large."""
        self.side, self.size = side, 4 * side
        coarse = 4 * min(side, UNIT)  # pixels of a tile before detail is added
        rng, fine = np.random.default_rng(seed), np.random.default_rng((seed, self.size))
        self.tiles: dict[str, list[Array]] = {}
        for kind, (falloff, width) in self.KINDS.items():
            low, high = (spectrum(size, falloff, width) for size in (coarse, self.size))
            self.tiles[kind] = []
            for _ in range(tiles):
                waves = np.fft.rfft2(rng.standard_normal((coarse, coarse))) * low
                tile = np.fft.irfft2(waves)
                scale = tile.std()
                if self.size > coarse:
                    tile = np.fft.irfft2(detailed(waves, high, fine))
                self.tiles[kind].append((tile / scale).astype(np.float32))

    def crop(self, kind: str, rng: Generator) -> Array:
        """[S, S], mean about 0, deviation about 1."""
        tile = self.tiles[kind][rng.integers(len(self.tiles[kind]))]
        y, x = rng.integers(self.size - self.side, size=2)
        part = tile[y : y + self.side, x : x + self.side]
        return part[:, ::-1] if rng.random() < 0.5 else part


def spectrum(size: int, falloff: float, width: float) -> Array:
    """The amplitudes [size, size / 2 + 1] of a tile's waves."""
    fx, fy = np.meshgrid(np.fft.rfftfreq(size) * size, np.fft.fftfreq(size) * size)
    radius = np.hypot(fx * width, fy)
    radius[radius < 3] = np.inf  # nothing coarser than a crop
    return np.asarray(radius**-falloff)


def detailed(
    waves: NDArray[np.complexfloating[Any]], high: Array, rng: Generator
) -> NDArray[np.complexfloating[Any]]:
    """The waves [n, n / 2 + 1] of a tile as those of a larger one, of amplitudes `high` [N, N / 2 + 1].

    Waves shorter than the tile had are new, of the strength that the spectrum goes on with.
    """
    n, size = len(waves), len(high)
    gain = size / n
    larger = np.fft.rfft2(rng.standard_normal((size, size))) * high * gain  # [N, N / 2 + 1]
    half = n // 2  # its own wave has no direction on the small grid
    for ours, theirs in ((np.s_[:half], np.s_[:half]), (np.s_[1 - half :], np.s_[1 - half :])):
        larger[theirs, :half] = waves[ours, :half] * gain**2
    return larger


def smooth(x: Array, low: float, high: float) -> Array:
    """0 below `low`, 1 above `high`, a smooth step between."""
    t = np.clip((x - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def rgb(colour: Colour | Array) -> Array:
    return np.asarray(colour, np.float32)


def mix(a: Colour | Array, b: Colour | Array, share: float) -> Array:
    return rgb(a) * (1 - share) + rgb(b) * share


class Canvas:
    """Pixels, the light on them, and the random numbers of one picture."""

    def __init__(self, scene: Scene, rng: Generator, noise: Noise) -> None:
        self.scene, self.rng, self.tiles, self.side = scene, rng, noise, noise.side
        self.unit = max(1, self.side // UNIT)  # pixels as wide as the finest marks
        look = STORMS[scene.storm] if scene.storm else SKIES[scene.time]
        shift = rgb(rng.normal(0, 7, 3) + rng.normal(0, 5))  # this day's weather
        self.sky = [rgb(np.clip(rgb(c) + shift + rng.normal(0, 5, 3), 0, 255)) for c in look[:3]]
        self.light = rgb(look.light) * rng.uniform(0.92, 1.06)
        # Eyes open in the dark: a thing at night is more than a silhouette
        self.thing_light = np.maximum(self.light, 0.25 + 0.55 * self.light)
        self.look = Look(*look[:4], *((rgb(c) + shift / 2) for c in look[4:]))  # type: ignore[arg-type]
        self.lamp: tuple[float, float] | None = None  # where sun or moon stands
        self.y = (np.arange(self.side, dtype=np.float32)[:, None] + 0.5) / self.side  # [S, 1]
        self.x = (np.arange(self.side, dtype=np.float32)[None, :] + 0.5) / self.side  # [1, S]
        self.from_left = bool(rng.random() < 0.5)
        self.pixels = np.zeros((self.side, self.side, 3), np.float32)

    # Chance

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def between(self, low: float, high: float) -> float:
        return float(self.rng.uniform(low, high))

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self.rng.integers(len(options)))]

    def noise(self, kind: str) -> Array:
        """[S, S], mean about 0, deviation about 1."""
        return self.tiles.crop(kind, self.rng)

    def wander(self, kind: str = "soft") -> Array:
        """A random line [S], mean about 0, deviation about 1."""
        return self.noise(kind)[self.rng.integers(self.side)]

    def shaken(self, colour: Colour, spread: float = 10) -> Colour:
        """A colour a little different each time."""
        value = rgb(colour) + self.rng.normal(0, spread, 3) + self.rng.normal(0, spread)
        red, green, blue = np.clip(value, 0, 255).tolist()
        return (red, green, blue)

    # Paint

    def dim(self, colour: Colour, spread: float = 8) -> Array:
        """A colour in this light, a little different each time."""
        return rgb(self.shaken(colour, spread)) * self.light

    def textured(self, colour: Array, kind: str, amount: float) -> Array:
        """[S, S, 3], a colour with lighter and darker strokes."""
        return colour * (1 + amount * self.noise(kind))[..., None]

    def far(self, colour: Array, distance: float) -> Array:
        """A colour seen through air: towards the horizon's."""
        return mix(colour, self.sky[2] * 0.85 + self.light * 25, distance)

    def below(self, line: Array) -> Array:
        """The mask [S, S] of what lies below a line [S], soft by a pixel."""
        return np.clip((self.y - line[None, :]) * self.side + 0.5, 0, 1)

    def fill(self, mask: Array, colour: Colour | Array) -> None:
        """Paint an opacity [S, S] with a colour, or a map of colours [S, S, 3]."""
        rows = np.flatnonzero(mask.max(1) > 0)
        if len(rows):
            part = slice(rows[0], rows[-1] + 1)
            paint = rgb(colour)
            paint = paint[part] if paint.ndim == 3 else paint
            self.pixels[part] += mask[part, :, None] * (paint - self.pixels[part])

    # Drawings

    def pen(self, width: float, height: float) -> Pen:
        """A box to draw in, as large as this on the canvas."""
        return Pen(max(2, round(width * self.side)), max(2, round(height * self.side)))

    def put(self, pen: Pen, x: float, y: float, glow: bool = False, mirror: float = 0.0) -> None:
        """Paste a drawing, its foot's middle at (x, y), in this light; `mirror` is its reflection's opacity."""
        art = np.asarray(pen.image.reduce(2), np.float32)  # [h, w, 4]
        h, w = art.shape[:2]
        left, top = round(x * self.side - w / 2), round(y * self.side - h)
        self._blend(art, left, top, 1.0, glow)
        if mirror:
            self._blend(art[::-1], left, top + h, mirror, glow)

    def _blend(self, art: Array, left: int, top: int, opacity: float, glow: bool) -> None:
        h, w = art.shape[:2]
        y0, x0 = max(top, 0), max(left, 0)
        y1, x1 = min(top + h, self.side), min(left + w, self.side)
        if y0 >= y1 or x0 >= x1:
            return
        part = art[y0 - top : y1 - top, x0 - left : x1 - left]
        alpha = part[..., 3:] / 255 * opacity
        colour = part[..., :3] * (1 if glow else self.thing_light)
        grain = 1 + 0.05 * self.noise("leaf")[: y1 - y0, : x1 - x0, None]
        self.pixels[y0:y1, x0:x1] += alpha * (colour * grain - self.pixels[y0:y1, x0:x1])

    def finished(self) -> NDArray[np.uint8]:
        """The picture [S / 2, S / 2, 3]: the canvas with the grain of paint, averaged over 2 x 2 pixels."""
        p = self.pixels * (1 + 0.018 * self.noise("stroke"))[..., None]
        p = (p[::2, ::2] + p[1::2, ::2] + p[::2, 1::2] + p[1::2, 1::2]) / 4
        return np.clip(p + 0.5, 0, 255).astype(np.uint8)


class Pen:
    """Draws in a box of its own, coordinates from 0 to 1; twice as large as what is pasted."""

    def __init__(self, width: int, height: int) -> None:
        self.w, self.h = 2 * width, 2 * height
        self.image = Image.new("RGBA", (self.w, self.h))
        self.draw = ImageDraw.Draw(self.image)

    def _at(self, points: Points) -> list[tuple[float, float]]:
        return [(x * self.w, y * self.h) for x, y in points]

    def shape(self, points: Points, colour: Colour) -> None:
        self.draw.polygon(self._at(points), fill=_ink(colour))

    def box(self, x0: float, y0: float, x1: float, y1: float, colour: Colour) -> None:
        self.draw.rectangle((x0 * self.w, y0 * self.h, x1 * self.w, y1 * self.h), fill=_ink(colour))

    def oval(self, x: float, y: float, rx: float, ry: float, colour: Colour) -> None:
        (x0, y0), (x1, y1) = self._at([(x - rx, y - ry), (x + rx, y + ry)])
        self.draw.ellipse((x0, y0, x1, y1), fill=_ink(colour))

    def stroke(self, points: Points, width: float, colour: Colour) -> None:
        """A line with round ends; `width` is a share of the box's width."""
        thick = max(1, round(width * self.w))
        path = self._at(points)
        self.draw.line(path, fill=_ink(colour), width=thick, joint="curve")
        if thick > 3:
            r = thick / 2
            for x, y in (path[0], path[-1]):
                self.draw.ellipse((x - r, y - r, x + r, y + r), fill=_ink(colour))


def _ink(colour: Colour) -> tuple[int, int, int, int]:
    return (int(colour[0]), int(colour[1]), int(colour[2]), 255)
