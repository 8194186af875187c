"""Things that stand, float or fly in a land. Each is drawn with its foot's middle at (x, y)."""

from __future__ import annotations

import numpy as np

from lantern_lab.scenes.canvas import Array, Canvas, rgb, smooth
from lantern_lab.scenes.scene import DYES, LEAVES, PINE, Colour, scaled

BROWN: Colour = (84, 56, 40)


def pine(c: Canvas, x: float, y: float, size: float) -> None:
    pen, season = c.pen(size * 0.55, size), c.scene.season or "summer"
    colour = c.shaken(PINE[season])
    pen.box(0.44, 0.85, 0.56, 1, (70, 48, 36))
    for top, half in ((0.45, 0.5), (0.22, 0.4), (0.0, 0.28)):
        foot = top + 0.45
        pen.shape([(0.5, top), (0.5 - half, foot), (0.5 + half, foot)], colour)
        dark = (0.5 + half, foot) if c.from_left else (0.5 - half, foot)
        pen.shape([(0.5, top), (0.5, foot), dark], scaled(colour, 0.75))
        if season == "winter":
            snow = [(0.5, top), (0.5 - half / 2, top + 0.2), (0.5 + half / 2, top + 0.2)]
            pen.shape(snow, (240, 244, 250))
    c.put(pen, x, y)


def pines(c: Canvas, line: Array, count: int, size: float) -> None:
    """Here and there on a line [S]."""
    for x in c.rng.uniform(0, 1, count):
        foot = float(line[min(int(x * c.side), c.side - 1)])
        pine(c, float(x), foot + c.between(0.01, 0.05), size * c.between(0.6, 1.15))


def tree(c: Canvas, x: float, y: float, size: float) -> None:
    pen = c.pen(size * 0.9, size)
    pen.shape([(0.45, 0.5), (0.55, 0.5), (0.58, 1), (0.42, 1)], c.shaken((88, 60, 42)))
    leaf = c.shaken(c.pick(LEAVES[c.scene.season or "summer"]))
    for shade, spread in ((0.72, 0.0), (1.0, -0.05), (1.2, -0.1)):
        aside = spread if c.from_left else -spread
        for _ in range(9):
            angle, away = c.between(0, 2 * np.pi), 0.26 * np.sqrt(c.rng.random())
            at = (0.5 + away * np.cos(angle) + aside, 0.36 + away * np.sin(angle) + spread)
            pen.oval(*at, c.between(0.08, 0.16), c.between(0.07, 0.13), scaled(leaf, shade))
    c.put(pen, x, y)


def palm(c: Canvas, x: float, y: float, size: float) -> None:
    pen, lean = c.pen(size, size), c.between(-0.18, 0.18)
    trunk = [(0.5 + lean * t**2, 1 - 0.65 * t) for t in np.linspace(0, 1, 8)]
    pen.stroke(trunk, 0.055, c.shaken((120, 86, 54)))
    leaf = c.shaken((56, 130, 60))
    for angle in np.linspace(-0.35, np.pi + 0.35, 8) + c.rng.normal(0, 0.12, 8):
        reach = c.between(0.32, 0.44)
        arc = [
            (
                0.5 + lean + reach * t * np.cos(angle),
                0.35 - reach * t * np.sin(angle) * 0.75 + 0.22 * t * t,
            )
            for t in np.linspace(0, 1, 7)
        ]
        pen.stroke(arc, 0.05, scaled(leaf, c.between(0.75, 1.2)))
    c.put(pen, x, y)


def cactus(c: Canvas, x: float, y: float, size: float) -> None:
    pen, colour = c.pen(size * 0.7, size), c.shaken((62, 128, 72))
    pen.stroke([(0.5, 1), (0.5, 0.08)], 0.2, colour)
    for sign in (-1, 1):
        if c.chance(0.85):
            low, tip, reach = c.between(0.45, 0.72), c.between(0.15, 0.4), 0.5 + sign * 0.34
            pen.stroke([(0.5, low), (reach, low), (reach, tip)], 0.14, colour)
    gleam = 0.46 if c.from_left else 0.54
    pen.stroke([(gleam, 0.95), (gleam, 0.12)], 0.04, scaled(colour, 1.25))
    c.put(pen, x, y)


def pyramid(c: Canvas, x: float, y: float, size: float) -> None:
    pen, sand = c.pen(size, size * 0.62), c.shaken((216, 172, 104))
    split = c.between(0.5, 0.68) if c.from_left else c.between(0.32, 0.5)
    pen.shape([(0.5, 0), (0, 1), (1, 1)], sand)
    pen.shape([(0.5, 0), (split, 1), (1 if c.from_left else 0, 1)], scaled(sand, 0.66))
    c.put(pen, x, y)


def house(c: Canvas, x: float, y: float, size: float) -> None:
    pen = c.pen(size, size * 0.9)
    wall, roof = c.shaken(DYES[c.scene.colour or "white"]), c.shaken((112, 66, 54))
    pen.box(0.12, 0.45, 0.88, 1, wall)
    pen.box(*((0.5, 0.45, 0.88, 1) if c.from_left else (0.12, 0.45, 0.5, 1)), scaled(wall, 0.82))
    pen.box(0.68, 0.08, 0.78, 0.3, scaled(roof, 0.7))
    pen.shape([(0.02, 0.48), (0.25, 0.1), (0.75, 0.1), (0.98, 0.48)], roof)
    if c.scene.season == "winter":
        pen.shape([(0.08, 0.36), (0.25, 0.08), (0.75, 0.08), (0.92, 0.36)], (244, 247, 252))
    door = c.between(0.42, 0.52)
    pen.box(door, 0.68, door + 0.14, 1, BROWN)
    c.put(pen, x, y)
    lamp = c.pen(size, size * 0.9)
    glows = c.scene.time in ("night", "sunset") or bool(c.scene.storm)
    for left in (0.2, 0.68):
        lamp.box(left, 0.6, left + 0.14, 0.8, (255, 214, 110) if glows else (96, 120, 140))
    c.put(lamp, x, y, glow=glows)


def windmill(c: Canvas, x: float, y: float, size: float) -> None:
    pen, tower = c.pen(size, size * 1.1), c.shaken((226, 214, 196))
    pen.shape([(0.42, 0.4), (0.58, 0.4), (0.66, 1), (0.34, 1)], tower)
    lee = [(0.5, 0.4), (0.58, 0.4), (0.66, 1), (0.5, 1)]
    lee = lee if c.from_left else [(1 - px, py) for px, py in lee]
    pen.shape(lee, scaled(tower, 0.8))
    pen.shape([(0.39, 0.42), (0.5, 0.27), (0.61, 0.42)], c.shaken((150, 62, 50)))
    pen.box(0.46, 0.82, 0.54, 1, BROWN)
    turn = c.between(0, np.pi / 2)
    for k in range(4):
        angle = turn + k * np.pi / 2
        u, v = np.cos(angle) * 0.42, np.sin(angle) * 0.38
        near, tip = (0.5 + 0.25 * u, 0.4 + 0.25 * v), (0.5 + u, 0.4 + v)
        pen.stroke([(0.5, 0.4), tip], 0.03, (92, 70, 56))
        cloth = [
            near,
            tip,
            (tip[0] - 0.18 * v, tip[1] + 0.18 * u),
            (near[0] - 0.18 * v, near[1] + 0.18 * u),
        ]
        pen.shape(cloth, (240, 232, 214))
    c.put(pen, x, y)


def lighthouse(c: Canvas, x: float, y: float, size: float) -> None:
    pen, band = c.pen(size * 0.5, size), c.shaken(DYES[c.pick(("red", "red", "blue"))])
    for k in range(5):
        top, low = 0.24 + k * 0.152, 0.24 + (k + 1) * 0.152
        a, b = 0.16 + 0.14 * (top - 0.24), 0.16 + 0.14 * (low - 0.24)
        colour = (244, 242, 236) if k % 2 else band
        pen.shape([(0.5 - a, top), (0.5 + a, top), (0.5 + b, low), (0.5 - b, low)], colour)
        sign = 1 if c.from_left else -1
        dark = [(0.5, top), (0.5 + sign * a, top), (0.5 + sign * b, low), (0.5, low)]
        pen.shape(dark, scaled(colour, 0.8))
    pen.box(0.28, 0.215, 0.72, 0.25, (60, 60, 66))
    pen.shape([(0.32, 0.11), (0.5, 0.0), (0.68, 0.11)], band)
    c.put(pen, x, y)
    shines = c.scene.time in ("night", "sunset") or bool(c.scene.storm)
    if shines:
        spread = np.abs(c.y - (y - 0.83 * size)) / (np.abs(c.x - x) * 0.16 + 0.012)
        ahead = (c.x > x) if c.from_left else (c.x < x)
        beam = np.clip(1 - spread, 0, 1) * np.exp(-np.abs(c.x - x) * 2.2)
        c.fill(beam * np.where(ahead, 0.75, 0.25), (255, 240, 180))
    lamp = c.pen(size * 0.5, size)
    lamp.box(0.38, 0.11, 0.62, 0.215, (255, 236, 150) if shines else (190, 214, 226))
    c.put(lamp, x, y, glow=shines)


def sailboat(c: Canvas, x: float, y: float, size: float) -> None:
    pen, sail = c.pen(size * 0.9, size), c.shaken(DYES[c.scene.colour or "white"])
    wind = c.pick((-1, 1))
    pen.stroke([(0.5, 0.85), (0.5, 0.02)], 0.03, (90, 64, 46))
    pen.shape(
        [(0.5 + wind * 0.03, 0.04), (0.5 + wind * 0.40, 0.74), (0.5 + wind * 0.03, 0.76)], sail
    )
    jib = [(0.5 - wind * 0.04, 0.14), (0.5 - wind * 0.30, 0.74), (0.5 - wind * 0.04, 0.76)]
    pen.shape(jib, scaled(sail, 0.82))
    pen.shape([(0.08, 0.82), (0.92, 0.82), (0.78, 1), (0.22, 1)], c.shaken((112, 66, 44)))
    c.put(pen, x, y, mirror=0.35)


def balloon(c: Canvas, x: float, y: float, size: float) -> None:
    pen, colour = c.pen(size * 0.8, size), c.shaken(DYES[c.scene.colour or "red"])
    pen.shape([(0.14, 0.5), (0.86, 0.5), (0.58, 0.82), (0.42, 0.82)], colour)
    pen.oval(0.5, 0.37, 0.44, 0.36, colour)
    stripe = scaled(colour, 0.72) if c.chance(0.5) else c.shaken((246, 240, 226))
    if c.chance(0.5):
        gore = (
            (0.08, 0.03),
            (0.27, 0.25),
            (0.27, 0.52),
            (0.06, 0.82),
            (0.03, 0.82),
            (0.13, 0.52),
            (0.13, 0.25),
        )
        for sign in (-1, 1):
            pen.shape([(0.5 + sign * px, py) for px, py in gore], stripe)
    pen.oval(0.36 if c.from_left else 0.64, 0.24, 0.09, 0.1, scaled(colour, 1.3))
    for sign in (-1, 1):
        pen.stroke([(0.5 + sign * 0.07, 0.8), (0.5 + sign * 0.05, 0.92)], 0.015, (80, 60, 44))
    pen.box(0.42, 0.9, 0.58, 1, (124, 82, 48))
    c.put(pen, x, y, glow=c.scene.time == "night" and c.chance(0.5))


def birds(c: Canvas) -> None:
    x, y = c.between(0.25, 0.75), c.between(0.14, 0.34)
    ink: Colour = (240, 240, 244) if c.scene.time == "night" or c.scene.storm else (40, 40, 52)
    for _ in range(int(c.rng.integers(3, 7))):
        size, lift = c.between(0.10, 0.17), c.between(0.2, 0.55)
        pen = c.pen(size, size * 0.6)
        wings = [(0.02, lift), (0.28, 0.12), (0.5, 0.75), (0.72, 0.12), (0.98, lift)]
        pen.stroke(wings, 0.11, ink)
        c.put(pen, x + c.rng.normal(0, 0.16), y + c.rng.normal(0, 0.08), glow=True)


def rock(c: Canvas, x: float, y: float, half: float, colour: Colour) -> None:
    """A low islet around (x, y)."""
    dome = np.sqrt(np.clip(1 - ((c.x[0] - x) / half) ** 2, 0, 1))
    mask = c.below(y + 0.06 - 0.11 * dome + 0.012 * c.wander("rock"))
    mask = mask * np.clip((y + 0.045 + 0.008 * c.wander()[None] - c.y) * c.side, 0, 1)
    c.fill(mask * (np.abs(c.x - x) < half), c.textured(c.dim(colour), "rock", 0.16))


# Fruit and vessels: solids of revolution


PROFILES = {  # half the width from foot to top, as shares of the size; what is not here is a ball
    "apple": (0.20, 0.33, 0.41, 0.46, 0.49, 0.50, 0.50, 0.48, 0.44, 0.36, 0.20),
    "pear": (0.16, 0.32, 0.39, 0.42, 0.42, 0.39, 0.33, 0.25, 0.20, 0.18, 0.16, 0.12, 0.03),
    "vase": (0.16, 0.22, 0.29, 0.34, 0.36, 0.36, 0.33, 0.28, 0.21, 0.15, 0.13, 0.13, 0.17),
    "cup": (0.28, 0.31, 0.34, 0.36, 0.38, 0.40, 0.41, 0.42, 0.42),
}
HEIGHTS = {"pear": 1.15, "lemon": 0.72, "pumpkin": 0.74, "cup": 0.8, "apple": 0.92}
WIDTHS = {"lemon": 1.12, "pumpkin": 1.1}
SHINY = ("vase", "cup", "apple", "plum", "cherries")


def still(c: Canvas, kind: str, x: float, y: float, size: float, colour: Colour) -> None:
    """A fruit or a vessel on a table."""
    if kind == "cherries":
        cherries(c, x, y, size, colour)
        return
    solid(c, kind, x, y, size, colour)
    if kind in ("apple", "pear", "plum", "pumpkin"):
        stalk(c, kind, x, y, size)
    if kind == "vase":
        flowers(c, x, y - size * 0.91, size * 0.85)


def cherries(c: Canvas, x: float, y: float, size: float, colour: Colour) -> None:
    for sign in (-1, 1):
        aside = sign * 0.325 * size
        solid(c, "cherries", x + aside, y, size * 0.5, colour)
        pen = c.pen(size, size)
        stem = [(0.5 + aside / size, 0.58), (0.5 + sign * 0.12, 0.3), (0.5, 0.05)]
        pen.stroke(stem, 0.03, (84, 110, 50))
        c.put(pen, x, y)


def stalk(c: Canvas, kind: str, x: float, y: float, size: float) -> None:
    pen, lean = c.pen(size, size), c.between(-0.1, 0.1)
    foot = 0.22 if kind == "pear" else 0.3
    pen.stroke(
        [(0.5, foot), (0.5 + lean, 0.04)], 0.08 if kind == "pumpkin" else 0.045, (92, 66, 40)
    )
    if kind in ("apple", "pear") and c.chance(0.7):
        side, root = c.pick((-1, 1)), 0.5 + lean / 2
        leaf = [
            (root, 0.18),
            (0.5 + side * 0.14, 0.02),
            (0.5 + side * 0.32, 0.08),
            (0.5 + side * 0.18, 0.19),
        ]
        pen.shape(leaf, c.shaken((84, 150, 62)))
    height = {"pear": 1.18, "pumpkin": 0.98}.get(kind, 1.08)
    c.put(pen, x, y - size * (height - 1))


def half_width(kind: str, t: Array) -> Array:
    """At each height, t from 0 (foot) to 1 (top), as a share of the size."""
    if kind in PROFILES:
        widths = PROFILES[kind]
        return np.interp(t, np.linspace(0, 1, len(widths)), widths).astype(np.float32)
    return 0.5 * np.sqrt(np.clip(1 - (2 * t - 1) ** 2, 0, 1))


def solid(c: Canvas, kind: str, x: float, y: float, size: float, colour: Colour) -> None:
    """A radius at each height, shaded by its normal, with its shadow on the table."""
    tall, fat = HEIGHTS.get(kind, 1.0) * size * 0.95, WIDTHS.get(kind, 1.0) * c.between(0.93, 1.05)
    away = 1 if c.from_left else -1  # from the light
    t = (y - c.y) / tall  # [S, 1]
    half = np.where((t >= 0) & (t <= 1), half_width(kind, np.clip(t, 0, 1)) * size * fat, 0) + 1e-6
    shadow = np.hypot(
        (c.x - x - away * 0.3 * size) / (0.62 * size), (c.y - y + 0.01) / (0.13 * size)
    )
    c.fill(smooth(-shadow, -1.1, -0.4) * 0.5, (34, 22, 20))
    mask = np.clip((half - np.abs(c.x - x)) * c.side, 0, 1) * (half > 1e-5)
    nx, ny = np.clip((c.x - x) / half, -1, 1), np.clip(2 * t - 1, -1, 1)  # the normal
    sun = np.clip(-away * nx * 0.6 + ny * 0.45 + 0.55 * np.sqrt(np.clip(1 - nx**2, 0, 1)), 0, 1.2)
    skin = rgb(c.shaken(colour, 9))
    ribs = 1 - 0.22 * np.abs(np.sin(nx * 4.2)) if kind == "pumpkin" else 1
    paint = skin * ((0.38 + 0.72 * sun) * ribs * (1 + 0.06 * c.noise("leaf")))[..., None]
    if kind == "apple" and c.chance(0.6):  # a cheek of another ripeness
        cheek = smooth(nx * c.pick((-1, 1)) + 0.5 * c.noise("soft"), 0.2, 1.0)[..., None] * 0.35
        ripe = rgb((240, 190, 70)) * (0.4 + 0.7 * sun)[..., None]
        paint = paint + cheek * (ripe - paint)
    gleam = np.exp(-(((nx + away * 0.4) / 0.2) ** 2 + ((ny - 0.42) / 0.2) ** 2))
    paint = paint + (gleam * (0.75 if kind in SHINY else 0.4))[..., None] * (255 - paint)
    c.fill(mask, paint * np.clip(c.light, 0.3, 1))
    if kind == "cup":
        rim_and_ear(c, x, y, size, fat, tall, away, mask, skin)


def rim_and_ear(
    c: Canvas,
    x: float,
    y: float,
    size: float,
    fat: float,
    tall: float,
    away: int,
    mask: Array,
    skin: Array,
) -> None:
    """What makes a cup of a solid: coffee in it and a handle."""
    rim = np.hypot((c.x - x) / (0.42 * size * fat), (c.y - y + tall) / (0.09 * size))
    c.fill(np.clip((1 - rim) * 12, 0, 1), skin * 0.8)
    c.fill(np.clip((0.82 - rim) * 12, 0, 1), (70, 44, 30))
    ear = np.hypot(
        (c.x - x + away * 0.44 * size) / (0.17 * size), (c.y - y + 0.42 * tall) / (0.21 * size)
    )
    c.fill(np.clip((0.28 - np.abs(ear - 0.82)) * 10, 0, 1) * (1 - mask), skin * 0.85)


def flowers(c: Canvas, x: float, y: float, size: float) -> None:
    dye = DYES[c.pick(("red", "yellow", "pink", "white", "purple"))]
    pen = c.pen(size * 1.3, size * 0.8)
    heads = [
        (c.between(0.15, 0.85), c.between(0.12, 0.55)) for _ in range(int(c.rng.integers(4, 8)))
    ]
    for hx, hy in heads:
        stem = [(0.5, 1), (0.5 + (hx - 0.5) * 0.6, 0.7), (hx, hy)]
        pen.stroke(stem, 0.025, c.shaken((70, 128, 60)))
    for hx, hy in heads:
        petal = c.shaken(dye, 12)
        for angle in np.linspace(0, 2 * np.pi, 6)[:5] + c.between(0, 1):
            pen.oval(hx + 0.055 * np.cos(angle), hy + 0.085 * np.sin(angle), 0.05, 0.075, petal)
        pen.oval(hx, hy, 0.03, 0.045, (236, 190, 60))
    c.put(pen, x, y)
