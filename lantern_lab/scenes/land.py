"""Skies, lands, water and tables: everything but the things in them."""

from __future__ import annotations

import numpy as np

from lantern_lab.scenes import things
from lantern_lab.scenes.canvas import Array, Canvas, mix, rgb, smooth
from lantern_lab.scenes.scene import DYES, GRASS, SAND, SNOW, STILL, STONE, WOOD, Colour

MIRRORED = ("pine trees", "house", "balloon")  # stand behind a lake; the others float on it


def paint_scene(c: Canvas) -> None:
    {
        "mountains": mountains,
        "hills": hills,
        "desert": desert,
        "sea": sea,
        "lake": lake,
        "table": still_life,
    }[c.scene.land](c)
    if c.scene.storm:
        falling(c, c.scene.storm)
    if c.scene.weather == "fog":
        fog(c, 0.25)


# Lands


def mountains(c: Canvas) -> None:
    horizon, season = c.between(0.58, 0.72), str(c.scene.season)
    sky(c, horizon)
    snow = snow_line(c)
    if c.chance(0.7):
        range_(c, horizon, c.between(0.22, 0.4), c.between(0.4, 0.6), snow)
    range_(c, horizon + 0.08, c.between(0.28, 0.46), c.between(0.05, 0.25), snow)
    haze(c, horizon)
    line = hill(c, c.between(0.76, 0.86), c.between(0.03, 0.1), 0.05, c.pick(GRASS[season]))
    thing(c, line)


def hills(c: Canvas) -> None:
    horizon, colours = c.between(0.5, 0.66), GRASS[str(c.scene.season)]
    sky(c, horizon)
    count = int(c.rng.integers(2, 5))
    line = np.zeros(c.side, np.float32)
    for k in range(count):
        share = k / (count - 1)
        base = horizon + 0.05 + share * c.between(0.2, 0.3)
        line = hill(c, base, c.between(0.06, 0.16), 0.45 * (1 - share), c.pick(colours))
        if share < 1:
            haze(c, float(line.mean()))
    thing(c, line)


def desert(c: Canvas) -> None:
    horizon, sand = c.between(0.5, 0.64), c.pick(SAND)
    sky(c, horizon)
    dune(c, horizon - 0.02, 0.35, sand)
    haze(c, horizon)
    if c.scene.thing == "pyramid":
        for _ in range(int(c.rng.integers(1, 4))):
            things.pyramid(
                c, c.between(0.15, 0.85), horizon + c.between(0.06, 0.14), c.between(0.4, 0.75)
            )
    dune(c, horizon + c.between(0.06, 0.12), 0.12, sand)
    dune(c, c.between(0.74, 0.86), 0.0, sand)
    if c.scene.thing == "cactus":
        for _ in range(int(c.rng.integers(1, 4))):
            things.cactus(c, c.between(0.15, 0.85), c.between(0.84, 0.96), c.between(0.4, 0.62))
    elif c.scene.thing == "palm tree":
        for _ in range(int(c.rng.integers(1, 3))):
            things.palm(c, c.between(0.22, 0.78), c.between(0.84, 0.96), c.between(0.52, 0.74))
    elif c.scene.thing == "balloon":
        airborne(c)


def sea(c: Canvas) -> None:
    level = c.between(0.48, 0.62)
    sky(c, level)
    if c.chance(0.25) and c.scene.thing != "island":
        range_(c, level + 0.02, c.between(0.08, 0.16), 0.5, -1)
    haze(c, level)
    water(c, level, 0.15 if c.scene.storm else c.between(0.45, 0.85))
    x, foot = c.between(0.26, 0.74), level + c.between(0.08, 0.18)
    if c.scene.thing == "sailboat":
        things.sailboat(c, x, foot + 0.04, c.between(0.42, 0.62))
    elif c.scene.thing == "lighthouse":
        things.rock(c, x, foot, c.between(0.22, 0.36), (92, 84, 80))
        things.lighthouse(c, x, foot - 0.03, c.between(0.5, 0.64))
    elif c.scene.thing == "island":
        things.rock(c, x, foot, c.between(0.26, 0.4), (226, 200, 144))
        for _ in range(int(c.rng.integers(1, 4))):
            things.palm(c, x + c.rng.normal(0, 0.08), foot - 0.015, c.between(0.4, 0.58))
    elif c.scene.thing == "birds":
        things.birds(c)


def lake(c: Canvas) -> None:
    level, colours = c.between(0.56, 0.68), GRASS[str(c.scene.season)]
    sky(c, level)
    range_(c, level + 0.02, c.between(0.28, 0.44), c.between(0.1, 0.4), snow_line(c))
    haze(c, level)
    line = hill(c, level - 0.015, c.between(0.02, 0.06), 0.1, c.pick(colours))
    if c.scene.thing in MIRRORED:
        thing(c, line, 0.75)
    water(c, level, c.between(0.8, 0.98))
    if c.scene.thing == "sailboat":
        things.sailboat(
            c, c.between(0.22, 0.78), level + c.between(0.08, 0.2), c.between(0.38, 0.56)
        )
    elif c.chance(0.4):
        shore(c, c.between(0.8, 0.9), c.pick(colours))


def still_life(c: Canvas) -> None:
    """A wall, a table, a thing or two on it, lit from one side."""
    kind, edge = str(c.scene.thing), c.between(0.56, 0.68)
    wall = (
        rgb(c.shaken(tuple(mix(DYES[c.scene.wall or "white"], (150, 140, 130), 0.5).tolist()), 10))
        * c.light
    )
    fall = (0.8 - c.x if c.from_left else c.x - 0.2)[..., None] * 0.45  # of the light, [1, S, 1]
    c.pixels[:] = c.textured(wall, "cloud", 0.06) * (1 + fall)
    line = np.full(c.side, edge, np.float32)
    c.fill(c.below(line), c.textured(c.dim(c.pick(WOOD)), "wave", 0.12) * (1.05 + fall * 0.6))
    colour = DYES[c.scene.colour or STILL[kind][0]]
    foot, size, x = edge + c.between(0.16, 0.26), c.between(0.4, 0.56), c.between(0.38, 0.62)
    if c.scene.count == 2:
        size *= 0.8
        aside = c.pick((-1, 1)) * c.between(0.2, 0.26)
        things.still(c, kind, x + aside, foot - 0.05, size * 0.88, colour)
        x -= aside
    things.still(c, kind, x, foot, size, colour)


# Things in lands


def thing(c: Canvas, line: Array, scale: float = 1.0) -> None:
    """The scene's thing on a line [S], or above it."""
    kind = c.scene.thing
    if kind == "balloon":
        airborne(c)
    elif kind == "birds":
        things.birds(c)
    elif kind == "pine trees":
        things.pines(c, line, int(c.rng.integers(5, 12)), scale * c.between(0.28, 0.44))
    elif kind is not None:
        draw, low, high = {
            "house": (things.house, 0.38, 0.54),
            "windmill": (things.windmill, 0.5, 0.66),
            "tree": (things.tree, 0.52, 0.72),
        }[kind]
        x, size = c.between(0.24, 0.76), scale * c.between(low, high)
        sunk = 0.2 * size if kind == "house" and scale == 1 else c.between(0.02, 0.08)
        draw(c, x, float(line[int(x * c.side)]) + sunk, size)


def airborne(c: Canvas) -> None:
    things.balloon(c, c.between(0.24, 0.76), c.between(0.5, 0.66), c.between(0.42, 0.58))


# Skies and weather


def sky(c: Canvas, horizon: float) -> None:
    """Gradient, stars, sun or moon, clouds."""
    t = np.clip(c.y / horizon + 0.06 * c.noise("soft"), 0, 1)[..., None]
    bend = c.between(0.5, 0.75)
    upper, lower = np.minimum(t / bend, 1), np.maximum((t - bend) / (1 - bend), 0)
    top, mid, low = c.sky
    c.pixels[:] = top + (mid - top) * upper + (low - mid) * lower
    if c.scene.time == "night" and c.scene.weather == "clear":
        stars(c, horizon)
    if c.scene.weather == "clear" or (
        c.scene.weather == "cloudy" and c.scene.time in ("dawn", "sunset")
    ):
        sun_or_moon(c, horizon)
    if c.scene.weather != "fog":
        clouds(c, horizon)


def stars(c: Canvas, horizon: float) -> None:
    count = int(c.rng.integers(30, 90))
    rows = (c.rng.random(count) ** 1.3 * horizon * c.side).astype(int)
    columns = c.rng.integers(c.side - 1, size=count)
    bright = c.rng.uniform(0.3, 1, count).astype(np.float32)[:, None]
    for dy, dx in np.ndindex(c.unit, 2 * c.unit):  # so that at least a pixel of the picture is left
        at = np.minimum(rows + dy, c.side - 1), np.minimum(columns + dx, c.side - 1)
        c.pixels[at] += bright * (255 - c.pixels[at])


def sun_or_moon(c: Canvas, horizon: float) -> None:
    time = c.scene.time
    if (time == "night" and not c.scene.moon) or (time == "day" and c.chance(0.4)):
        return
    low = time in ("dawn", "sunset")
    x = c.between(0.12, 0.88)
    y = horizon * (c.between(0.62, 0.98) if low else c.between(0.12, 0.45))
    radius = c.between(0.06, 0.09) if low else c.between(0.055, 0.08)
    away = np.hypot(c.x - x, c.y - y)
    suns: dict[str, Colour] = {
        "dawn": (255, 244, 214),
        "sunset": (255, 222, 130),
        "day": (255, 250, 220),
    }
    colour: Colour | Array = suns.get(time, (238, 238, 224))
    c.fill(np.exp(-((away / (0.34 if low else 0.2)) ** 2) * 2) * (0.6 if low else 0.4), colour)
    disc = np.clip((radius - away) * c.side + 0.5, 0, 1)
    if time == "night":
        if c.chance(0.5):  # a crescent
            bite = np.hypot(c.x - x - c.pick((-1, 1)) * radius * 0.6, c.y - y + radius * 0.2)
            disc = disc * np.clip((bite - radius * 0.85) * c.side + 0.5, 0, 1)
        colour = rgb(colour) - 14 * np.maximum(c.noise("rock"), 0)[..., None]
    c.fill(disc, colour)
    c.lamp, c.from_left = (x, y), x < 0.5


def clouds(c: Canvas, horizon: float) -> None:
    dense = c.scene.weather != "clear"
    cover = {
        "clear": c.between(0.9, 2.2),
        "cloudy": c.between(-0.1, 0.35),
        "storm": c.between(-0.5, 0.1),
    }[c.scene.weather]
    body = c.noise("cloud") + 0.25 * c.noise("rock")
    # Clouds thin out towards the zenith or the horizon, and are darker below
    height = c.between(0.1, 0.8) * horizon
    body = body - 1.2 * np.abs(c.y - height) / horizon * (0.3 if dense else 1)
    mask = smooth(body, cover, cover + c.between(0.5, 1.1)) * c.between(0.7, 1)
    under = np.roll(body, int(0.05 * c.side), 0)
    light = np.clip(0.55 + 0.5 * (body - under), 0, 1)[..., None]
    shade, lit = rgb(c.look.shade), rgb(c.look.lit)
    c.fill(mask, shade + (lit - shade) * light)


def haze(c: Canvas, horizon: float) -> None:
    """On a foggy day what is far is hidden: called before what is near is painted."""
    if c.scene.weather == "fog":
        fog(c, 0.75, horizon)


def fog(c: Canvas, amount: float, horizon: float | None = None) -> None:
    """A pale veil, over all or thickest at the horizon."""
    drift = 1 + 0.25 * c.noise("cloud")
    near = 1.0 if horizon is None else 0.4 + 0.6 * np.exp(-(((c.y - horizon) / 0.3) ** 2))
    c.fill(np.clip(amount * drift * near, 0, 0.95), mix(c.sky[2], 205 * c.light, 0.75))


def falling(c: Canvas, kind: str) -> None:
    """Rain with lightning, snow, or sand in the wind."""
    if kind == "snow":
        count = int(c.rng.integers(50, 130))
        rows, columns = c.rng.integers(c.side - 1, size=(2, count))
        for dy, dx in np.ndindex(2 * c.unit, 2 * c.unit):
            at = np.minimum(rows + dy, c.side - 1), np.minimum(columns + dx, c.side - 1)
            c.pixels[at] += 0.75 * (rgb((250, 251, 255)) - c.pixels[at])
        return
    if kind == "sand":
        c.fill(np.clip(0.3 + 0.2 * c.noise("wave"), 0, 0.8), mix(c.sky[1], c.sky[2], 0.5))
        return
    if c.chance(0.35):
        x, bolt = c.between(0.1, 0.9), []
        for y in np.linspace(0.0, c.between(0.3, 0.5), 7):
            bolt.append((x, float(y)))
            x += c.rng.normal(0, 0.05)
        pen = c.pen(1, 1)
        pen.stroke(bolt, 0.012, (250, 250, 255))
        c.put(pen, 0.5, 1, glow=True)
    veil = np.maximum(c.noise("wave").T - 0.3, 0) * c.between(0.04, 0.14)
    c.fill(veil.astype(np.float32), (190, 198, 208))


# Ground and water


def snow_line(c: Canvas) -> float:
    """How far down from the peaks snow lies, in heights of the range."""
    low, high = {"summer": (-0.2, 0.35), "autumn": (-0.1, 0.3), "winter": (0.6, 1.2)}[
        str(c.scene.season)
    ]
    return c.between(low, high)


def range_(c: Canvas, base: float, height: float, distance: float, snow: float) -> None:
    """Mountains: peaks with a lit and a shaded side, and snow down to a share of their height."""
    count = int(c.rng.integers(3, 6))
    where = (np.arange(count) + c.rng.uniform(0.1, 0.9, count)) / count * 1.2 - 0.1
    tall, slope = height * c.rng.uniform(0.45, 1, count), c.rng.uniform(0.7, 1.3, count)
    flank = tall[:, None] - slope[:, None] * np.abs(c.x - where[:, None]) * (
        height / 0.32
    )  # [peaks, S]
    line = base - np.maximum(flank.max(0), 0.12 * height)
    line = line + 0.012 * c.wander("rock") + 0.006 * c.wander("leaf")
    rough = c.noise("rock")
    side = (c.x - where[flank.argmax(0)][None]) / 0.05 + 1.1 * rough + 0.4
    lit = smooth(-side if c.from_left else side, -0.5, 0.5)[..., None]
    paint = c.dim(c.pick(STONE)) * (0.62 + 0.5 * lit) * (1 + 0.10 * rough[..., None])
    if snow > 0:
        deep = (c.y - line[None]) / height
        white = smooth(snow - deep + 0.13 * rough, -0.04, 0.05)[..., None]
        paint = paint + white * (c.dim(SNOW, 3) * (0.66 + 0.36 * lit) - paint)
    c.fill(c.below(line), c.far(paint, distance))


def hill(c: Canvas, base: float, height: float, distance: float, colour: Colour) -> Array:
    """One rolling hill; returns its line [S]."""
    angle = 2 * np.pi * c.between(0.5, 1.4) * c.x[0] + c.between(0, 2 * np.pi)
    line = base - height * (0.5 + 0.5 * np.sin(angle)) + 0.006 * c.wander("rock")
    lit = 1 + 0.14 * np.sin(angle + (1.2 if c.from_left else -1.2))[None, :, None]
    fade = 1.1 - 0.5 * np.clip(c.y - line[None], 0, 0.5)[..., None]
    c.fill(c.below(line), c.far(c.textured(c.dim(colour), "stroke", 0.10) * lit * fade, distance))
    return line


def dune(c: Canvas, base: float, distance: float, colour: Colour) -> None:
    """A crest with a lit and a shaded flank, and ripples."""
    top, steep = c.between(0.1, 0.9), c.between(0.35, 0.7)
    line = base + 0.26 * np.abs(c.x[0] - top) ** 1.3 * steep + 0.01 * c.wander()
    crest = c.x - top - 0.55 * (c.y - line[None]) * c.pick((-1, 1)) - 0.03 * c.noise("soft")
    lit = smooth(-crest if c.from_left else crest, -0.015, 0.015)[..., None]
    sand = c.textured(c.dim(colour), "wave", 0.05) * (0.7 + 0.36 * lit)
    c.fill(c.below(line), c.far(sand, distance))


def water(c: Canvas, level: float, calm: float) -> None:
    """Everything above the level is mirrored below it, broken by waves; `calm` is 0 to 1."""
    side, row = c.side, int(level * c.side)
    wave, depth = c.noise("wave")[row:], np.arange(side - row)  # [S - row, S], [S - row]
    rows = np.clip(
        row - 1 - depth[:, None] + (wave * (1 + 7 * (1 - calm)) * c.unit).astype(int), 0, row - 1
    )
    mirror = c.pixels[rows, np.arange(side)[None]]
    tint = c.dim((40, 96, 170) if c.scene.time == "night" else (28, 92, 132), 12)
    share = np.linspace(0.25, 0.62, side - row)[:, None, None] + 0.25 * (1 - calm)
    near = np.linspace(0.35, 1.0, side - row)[:, None]
    paint = mirror * (1 - share) + tint * share
    paint = paint * (1 + 0.10 * wave * near)[..., None]
    crests = np.clip(np.maximum(wave - 0.6, 0) * near * (0.10 + 0.35 * (1 - calm)), 0, 0.8)
    paint += crests[..., None] * (c.sky[2] * 0.5 + 120 * c.light - paint)
    if c.lamp is not None:  # its path of light
        path = np.exp(-(((c.x - c.lamp[0]) / (0.03 + 0.10 * near)) ** 2)) * np.clip(
            0.35 + 0.5 * wave, 0, 1
        )
        paint += path[..., None] * (rgb((255, 236, 190)) - paint) * 0.8
    c.pixels[row:] = paint


def shore(c: Canvas, top: float, colour: Colour) -> None:
    """Land in the foreground, from one corner."""
    run = c.x[0] if c.chance(0.5) else 1 - c.x[0]
    line = top + c.between(0.1, 0.5) * run**1.4 + 0.012 * c.wander("rock")
    c.fill(c.below(line), c.textured(c.dim(colour), "stroke", 0.12))
