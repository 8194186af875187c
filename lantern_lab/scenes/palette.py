"""Colours of skies, lands and things. RGB, 0 to 255; light is a factor a channel."""

from __future__ import annotations

from typing import NamedTuple

Colour = tuple[float, float, float]


class Look(NamedTuple):
    """A sky from the zenith to the horizon, the light on the land, and clouds where they are lit and shaded."""

    top: Colour
    mid: Colour
    low: Colour
    light: Colour
    lit: Colour
    shade: Colour


# fmt: off
SKIES = {
    "dawn": Look(
        (104, 132, 196), (226, 178, 196), (255, 222, 178), (0.98, 0.84, 0.84), (255, 226, 214), (190, 150, 180)
    ),
    "day": Look((52, 124, 216), (112, 180, 240), (206, 232, 246), (1.0, 1.0, 0.97), (255, 255, 255), (190, 206, 224)),
    "sunset": Look((84, 54, 122), (232, 98, 82), (255, 200, 92), (0.86, 0.58, 0.52), (255, 168, 112), (140, 62, 96)),
    "night": Look((8, 12, 40), (20, 34, 84), (52, 76, 130), (0.28, 0.35, 0.54), (70, 84, 124), (22, 28, 60)),
}
STORMS = {
    "rain": Look((40, 48, 66), (80, 96, 114), (186, 190, 176), (0.62, 0.66, 0.68), (128, 134, 144), (38, 42, 54)),
    "snow": Look((118, 128, 146), (158, 166, 180), (206, 210, 216),
                 (0.80, 0.83, 0.88), (196, 202, 212), (126, 134, 150)),
    "sand": Look((112, 82, 58), (176, 130, 84), (222, 178, 118), (0.88, 0.74, 0.56), (206, 164, 112), (124, 88, 60)),
}
# fmt: on
GRASS: dict[str, tuple[Colour, ...]] = {
    "summer": ((86, 152, 64), (112, 172, 70), (70, 134, 78)),
    "autumn": ((184, 132, 56), (168, 110, 46), (150, 138, 66)),
    "winter": ((232, 238, 246), (220, 230, 242), (240, 242, 244)),
}
LEAVES: dict[str, tuple[Colour, ...]] = {
    "summer": ((50, 116, 52), (70, 140, 56), (44, 104, 66)),
    "autumn": ((214, 96, 34), (226, 150, 40), (178, 52, 38)),
    "winter": ((214, 224, 236), (196, 210, 226), (150, 160, 172)),
}
PINE: dict[str, Colour] = {"summer": (34, 84, 54), "autumn": (48, 84, 48), "winter": (96, 124, 124)}
SAND: tuple[Colour, ...] = ((232, 186, 112), (222, 164, 96), (214, 142, 90), (238, 204, 142))
STONE: tuple[Colour, ...] = ((112, 106, 112), (126, 108, 96), (92, 104, 124))
WOOD: tuple[Colour, ...] = ((150, 98, 58), (122, 76, 46), (176, 128, 84))
SNOW: Colour = (246, 249, 255)
DYES: dict[str, Colour] = {
    "red": (212, 48, 44),
    "orange": (242, 138, 40),
    "yellow": (246, 208, 62),
    "green": (74, 160, 80),
    "blue": (52, 104, 204),
    "purple": (136, 76, 176),
    "white": (242, 240, 234),
    "pink": (244, 150, 180),
}


def scaled(colour: Colour, by: float) -> Colour:
    return (min(255.0, colour[0] * by), min(255.0, colour[1] * by), min(255.0, colour[2] * by))
