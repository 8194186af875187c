"""What a picture shows and in which colours, and how a caption says it. Nothing here paints.

Colours are RGB, 0 to 255; light is a factor a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from numpy.random import Generator

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


T = TypeVar("T")

LANDS = ("mountains", "hills", "desert", "sea", "lake")
TIMES = tuple(SKIES)  # dawn, day, sunset, night
WEATHERS = ("clear", "cloudy", "fog", "storm")
SEASONS = ("summer", "autumn", "winter")
SEASONED = ("mountains", "hills", "lake")


@dataclass(frozen=True)
class Thing:
    """What may be in a picture, and how a caption names its place in each land."""

    places: dict[str, str]  # land -> preposition
    dyed: bool = False  # in any of the colours
    plural: bool = False


THINGS = {
    "pine trees": Thing({"mountains": "before", "hills": "on", "lake": "by"}, plural=True),
    "tree": Thing({"hills": "on"}),
    "palm tree": Thing({"desert": "in"}),
    "cactus": Thing({"desert": "in"}),
    "pyramid": Thing({"desert": "in"}),
    "house": Thing({"hills": "on", "mountains": "before", "lake": "by"}, dyed=True),
    "windmill": Thing({"hills": "on"}),
    "lighthouse": Thing({"sea": "by"}),
    "island": Thing({"sea": "in"}),
    "sailboat": Thing({"sea": "on", "lake": "on"}, dyed=True),
    "balloon": Thing(
        {"mountains": "over", "hills": "over", "desert": "over", "lake": "over"}, dyed=True
    ),
    "birds": Thing({"mountains": "over", "hills": "over", "sea": "over"}, plural=True),
}
# What stands on a table, and the colours it may have; one colour alone need not be said.
STILL = {
    "apple": ("red", "green", "yellow"),
    "orange": ("orange",),
    "lemon": ("yellow",),
    "pear": ("green", "yellow"),
    "plum": ("purple", "blue"),
    "pumpkin": ("orange",),
    "cherries": ("red",),
    "cup": tuple(DYES),
    "vase": tuple(DYES),
}
PAIRED = ("apple", "orange", "lemon", "pear", "plum")  # may lie there in twos
WALLS = tuple(colour for colour in DYES if colour != "orange")

WHEN = {
    "dawn": ("at dawn", "at sunrise", "in the morning"),
    "day": ("at noon", "by day", "under a blue sky", "on a sunny day"),
    "sunset": ("at sunset", "in the evening", "under a red sky"),
    "night": ("at night", "under the stars", "by night"),
}
MOONLIT = ("in the moonlight", "under the moon")
PARTS = {"dawn": "morning", "day": "day", "sunset": "evening", "night": "night"}
CLOUDY = {time: f"on a cloudy {part}" for time, part in PARTS.items()}
FOGGY = {time: f"on a foggy {part}" for time, part in PARTS.items()}
STORMY = {
    "rain": ("in a storm", "in the rain", "under dark clouds"),
    "snow": ("in a snowstorm", "in falling snow"),
    "sand": ("in a sandstorm",),
}


@dataclass(frozen=True)
class Scene:
    land: str  # one of LANDS, or "table"
    time: str = "day"
    weather: str = "clear"
    season: str | None = None
    thing: str | None = None
    colour: str | None = None  # of the thing
    count: int = 1  # of a thing on a table
    moon: bool = False
    wall: str | None = None  # colour of the wall behind a table

    @property
    def storm(self) -> str | None:
        """What comes down, if anything."""
        if self.weather != "storm":
            return None
        return "sand" if self.land == "desert" else "snow" if self.season == "winter" else "rain"


def sample_scene(rng: Generator, still: float = 0.25) -> Scene:
    """A scene; a share of `still` are still lifes."""
    if rng.random() < still:
        thing = _pick(rng, tuple(STILL))
        colour = _pick(rng, STILL[thing])
        wall = _pick(rng, WALLS) if rng.random() < 0.6 else None
        count = 2 if thing in PAIRED and rng.random() < 0.25 else 1
        return Scene("table", thing=thing, colour=colour, count=count, wall=wall)
    land, time = _pick(rng, LANDS), _pick(rng, TIMES)
    weather = str(rng.choice(WEATHERS, p=(0.5, 0.2, 0.12, 0.18)))
    time = "day" if weather == "storm" else time  # a storm looks alike at all times
    season = _pick(rng, SEASONS) if land in SEASONED else None
    known = [name for name, thing in THINGS.items() if land in thing.places]
    thing_name = _pick(rng, known) if rng.random() < 0.85 else None
    colour_name = _pick(rng, tuple(DYES)) if thing_name and THINGS[thing_name].dyed else None
    moon = time == "night" and weather == "clear" and rng.random() < 0.5
    return Scene(land, time, weather, season, thing_name, colour_name, moon=bool(moon))


def caption_of(scene: Scene, rng: Generator, terse: float = 0.15) -> str:
    """A caption; each part of it is left out with probability `terse`, but never all of them."""

    def say() -> bool:
        return bool(rng.random() >= terse)

    if scene.land == "table":
        return _still_life(scene, rng, say(), say())
    land = _land(scene, rng, say())
    when = _when(scene, rng) if say() else ""
    if scene.thing is None:
        return f"{land} {when}".strip()
    noun = _noun(scene.thing, scene.colour if say() else None, THINGS[scene.thing].plural)
    where = f" {THINGS[scene.thing].places[scene.land]} {land}" if say() else ""
    return f"{noun}{where} {when}".strip()


def _still_life(scene: Scene, rng: Generator, say_colour: bool, say_wall: bool) -> str:
    thing = str(scene.thing)
    only = STILL[thing] == (scene.colour,)
    colour = scene.colour if say_colour and not (only and rng.random() < 0.8) else None
    if scene.count == 2:
        noun = " ".join(filter(None, ("two", colour, f"{thing}s")))
    else:
        noun = _noun(thing, colour, thing == "cherries")
    if thing == "vase":
        noun += " with flowers" if rng.random() < 0.6 else ""
    noun += " on a table" if rng.random() < 0.4 else ""
    return noun + (f" before a {scene.wall} wall" if scene.wall and say_wall else "")


def _land(scene: Scene, rng: Generator, say_look: bool) -> str:
    if scene.land in ("sea", "desert"):
        return f"the {scene.land}"
    name = "mountain lake" if scene.land == "lake" and rng.random() < 0.4 else scene.land
    look = {"winter": "snowy", "autumn": "autumn", "summer": "green"}[str(scene.season)]
    if say_look and not (look == "green" and rng.random() < 0.5):
        name = f"{look} {name}"
    return _with_article(name) if scene.land == "lake" else name


def _when(scene: Scene, rng: Generator) -> str:
    if scene.storm:
        return _pick(rng, STORMY[scene.storm])
    if scene.weather == "cloudy":
        return CLOUDY[scene.time]
    if scene.weather == "fog":
        return FOGGY[scene.time] if rng.random() < 0.7 else "in the fog"
    if scene.moon and rng.random() < 0.7:
        return _pick(rng, MOONLIT)
    return _pick(rng, WHEN[scene.time])


def _noun(thing: str, colour: str | None, plural: bool) -> str:
    noun = f"{colour} {thing}" if colour else thing
    return noun if plural else _with_article(noun)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _pick(rng: Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]
