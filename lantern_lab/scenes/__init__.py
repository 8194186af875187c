"""Endless little paintings with captions: landscapes and still lifes, no two alike.

`paint_picture(seed, noise)` gives picture number `seed`: `scene.sample_scene` draws what is to be seen,
`land.paint_scene` paints it, and `scene.caption_of` says it. One scene has endlessly many pictures, as shapes,
places, colours, clouds, waves and brush strokes are drawn again each time: nothing can be learnt by heart, and any
number of unseen pictures can be had for measuring. The embedded model learnt from them, and is measured by them. Only
numpy and Pillow are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from lantern_lab.scenes import land
from lantern_lab.scenes.canvas import Canvas, Noise
from lantern_lab.scenes.scene import Scene, caption_of, sample_scene

__all__ = [
    "Noise",
    "Picture",
    "Scene",
    "caption_of",
    "paint_picture",
    "render_scene",
    "sample_scene",
]


@dataclass(frozen=True)
class Picture:
    pixels: NDArray[np.uint8]  # [S, S, 3]
    caption: str
    scene: Scene


def render_scene(scene: Scene, rng: Generator, noise: Noise) -> NDArray[np.uint8]:
    """One of the scene's pictures, [S, S, 3] with S half of the noise's side."""
    canvas = Canvas(scene, rng, noise)
    land.paint_scene(canvas)
    return canvas.finished()


def paint_picture(seed: int, noise: Noise) -> Picture:
    rng = np.random.default_rng(seed)
    scene = sample_scene(rng)
    return Picture(render_scene(scene, rng, noise), caption_of(scene, rng), scene)
