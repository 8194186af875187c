"""Pictures and captions made of the icons: recoloured, moved and resized, on a background, and called so.

`make_variants` is deterministic: the same icons and seed give the same pixels and captions. What a
caption says is drawn, and most of what is drawn is said, so that words can be combined: `small blue
bird at the left on a yellow background`. Two kinds of things stay unseen in training: whole concepts,
and pairs of a colour and a thing.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from icons import PACKS, Icons
from numpy.typing import NDArray
from PIL import Image
from tqdm import tqdm

SIZE = 64  # pixels of a finished picture
STEP = 4  # pixels of a code: a picture moved by whole codes has the same codes, moved

WHITE = (255, 255, 255)
COLOURS = {
    "red": (222, 72, 72),
    "orange": (250, 142, 60),
    "yellow": (255, 218, 106),
    "green": (110, 190, 110),
    "blue": (84, 150, 230),
    "purple": (150, 104, 196),
    "pink": (255, 170, 200),
    "brown": (132, 84, 62),
    "grey": (164, 168, 172),
    "black": (26, 26, 30),
}
# Few, so that a small model sees each of them on each of those often enough to learn shape and colour apart.
DYES = ("red", "yellow", "green", "blue", "purple", "pink")
GROUNDS = ("yellow", "blue", "green", "pink")
_COLOUR_WORD = re.compile(rf"\b({'|'.join(COLOURS)}) ")
# Where a small thing may lie, as a caption says it: steps from the middle.
PLACES = {
    "at the left": (-3, 0),
    "at the right": (3, 0),
    "at the top": (0, -3),
    "at the bottom": (0, 3),
}

FEWER = 16  # a thing that is not composed has so many times fewer pictures
# Pairs of the README's examples, which training may see whatever their hash says.
SHOWN = {"blue bird"}

# Other names for the same picture, so that a prompt need not know the official one.
SYNONYMS = {
    "grinning cat": ["smiling cat face", "smiling cat", "happy cat"],
    "grinning cat with smiling eyes": ["smiling cat face", "laughing cat face"],
    "cat face": ["cat head"],
    "pouting cat": ["angry cat face"],
    "crying cat": ["sad cat face"],
    "cat with tears of joy": ["laughing cat"],
    "smiling cat with heart eyes": ["cat in love"],
    "slightly smiling face": ["smiling face", "smile"],
    "grinning face": ["happy face", "smiley"],
    "angry face": ["angry smiley"],
    "crying face": ["sad face"],
    "face with tears of joy": ["laughing face"],
    "smiling face with sunglasses": ["cool face"],
    "smiling face with heart eyes": ["face in love"],
    "thinking face": ["thoughtful face"],
    "sleeping face": ["tired face asleep"],
    "nauseated face": ["sick face"],
    "automobile": ["car"],
    "sport utility vehicle": ["jeep", "big car"],
    "delivery truck": ["truck", "lorry"],
    "pickup truck": ["pickup"],
    "fire engine": ["fire truck"],
    "locomotive": ["steam train"],
    "airplane": ["plane", "aeroplane"],
    "bicycle": ["bike"],
    "motorcycle": ["motorbike"],
    "sailboat": ["boat", "sailing boat"],
    "passenger ship": ["cruise ship"],
    "flying saucer": ["ufo"],
    "red apple": ["apple"],
    "hot pepper": ["chili", "red chili"],
    "ear of corn": ["corn", "maize"],
    "eggplant": ["aubergine"],
    "doughnut": ["donut"],
    "hamburger": ["burger", "cheeseburger"],
    "french fries": ["chips", "fries"],
    "soft ice cream": ["ice cream cone", "ice cream"],
    "birthday cake": ["cake"],
    "cheese wedge": ["cheese"],
    "hot beverage": ["cup of coffee", "cup of tea", "coffee"],
    "beer mug": ["beer"],
    "wine glass": ["glass of wine", "wine"],
    "tropical drink": ["cocktail"],
    "glass of milk": ["milk"],
    "honeybee": ["bee"],
    "lady beetle": ["ladybird", "ladybug"],
    "rooster": ["cock"],
    "baby chick": ["chick"],
    "spouting whale": ["blue whale"],
    "cow face": ["cow head"],
    "t rex": ["dinosaur", "tyrannosaurus"],
    "two hump camel": ["camel with two humps"],
    "rabbit face": ["bunny", "bunny face"],
    "evergreen tree": ["fir tree", "pine tree"],
    "deciduous tree": ["tree"],
    "sunflower": ["yellow flower"],
    "cherry blossom": ["pink flower"],
    "four leaf clover": ["clover"],
    "droplet": ["drop of water", "water drop"],
    "high voltage": ["lightning", "flash"],
    "glowing star": ["shining star"],
    "cloud with rain": ["rain cloud", "rain"],
    "sun behind cloud": ["sun and cloud"],
    "crescent moon": ["moon"],
    "globe showing europe africa": ["earth", "globe"],
    "globe showing americas": ["earth", "globe"],
    "ringed planet": ["saturn", "planet"],
    "fire": ["flame"],
    "soccer ball": ["football ball", "football"],
    "wrapped gift": ["present", "gift"],
    "money bag": ["bag of money"],
    "gem stone": ["diamond", "jewel"],
    "mobile phone": ["phone", "smartphone"],
    "laptop": ["computer", "notebook computer"],
    "desktop computer": ["screen", "monitor"],
    "television": ["tv"],
    "light bulb": ["lamp", "bulb"],
    "locked": ["lock", "padlock"],
    "old key": ["antique key"],
    "wrench": ["spanner"],
    "gear": ["cog"],
    "magnifying glass tilted left": ["magnifying glass"],
    "eyes": ["pair of eyes"],
    "closed book": ["book"],
    "high heeled shoe": ["high heel"],
    "running shoe": ["sneaker", "shoe"],
    "mans shoe": ["leather shoe"],
    "t shirt": ["shirt"],
    "womans hat": ["sun hat"],
    "eyeglasses": ["glasses"],
    "pile of poo": ["poo"],
    "jack o lantern": ["halloween pumpkin", "pumpkin"],
    "robot": ["robot face"],
    "ghost": ["spook"],
    "alarm clock": ["clock"],
    "potted plant": ["plant"],
}


def things() -> dict[str, bool]:
    """Names of the icons that the target learns, and which of them it learns in all compositions."""
    text = Path(__file__).with_name("things.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    names = [name.strip() for line in lines for name in line.split(":")[1].split(";")]
    return {name.removesuffix("*"): name.endswith("*") for name in names}


@dataclass(frozen=True)
class Variant:
    """One picture to train on."""

    image: NDArray[np.uint8]  # [64, 64, 3]
    caption: str
    icon: int  # which icon of Icons it shows
    pair_held_out: bool  # the colour was never seen on this thing


@dataclass(frozen=True)
class Body:
    """The part of an icon that has its main colour."""

    mask: NDArray[np.bool_]  # [128, 128]
    mean: NDArray[np.float32]  # [3], its mean colour
    colour: str | None  # the name of that colour, where one fits


def held_out(name: str, per_mille: int = 30) -> bool:
    """Whether a name is kept out of training: by the name, so that all its pictures go together.

    The concepts of the README's examples happen to be in training.
    """
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 1000 < per_mille


def words_of(text: str) -> list[str]:
    """A caption's words as the model counts them."""
    return [
        word for word in re.findall(r"[a-z0-9]+", text.lower()) if word not in {"a", "an", "the"}
    ]


# ---------------------------------------------------------------------------------------- colours


def body_of(render: NDArray[np.uint8]) -> Body | None:
    """The pixels of an icon's main hue, or of its grey, if they are most of it.

    Args:
        render: [128, 128, 4], straight alpha.
    """
    opaque = render[..., 3] > 128
    hsv = np.asarray(Image.fromarray(render[..., :3]).convert("HSV")).astype(np.float32)
    hue, saturation, value = hsv[..., 0], hsv[..., 1], hsv[..., 2]
    vivid = opaque & (saturation > 70) & (value > 60)
    counts = np.bincount(hue[vivid].astype(np.int64), minlength=256)
    around = np.convolve(np.tile(counts, 3), np.ones(41), "same")[256:512]
    distance = np.abs((hue - around.argmax() + 128) % 256 - 128)
    dull = opaque & (saturation <= 70)
    mask = max(vivid & (distance <= 24), dull, key=np.count_nonzero)
    if mask.sum() < 0.4 * opaque.sum():
        return None
    mean = render[mask][:, :3].astype(np.float32).mean(0)
    away = {c: float(np.abs(mean - np.array(rgb)).sum()) for c, rgb in COLOURS.items()}
    nearest = min(away, key=lambda name: away[name])
    # What is nearly white has no colour of these, though pink may be nearest.
    fits = away[nearest] < min(120, float(np.abs(mean - np.array(WHITE)).sum()))
    return Body(mask, mean, nearest if fits else None)


def recolour(render: NDArray[np.uint8], body: Body, colour: str) -> NDArray[np.uint8]:
    """The icon with its main colour replaced; lighter and darker parts stay lighter and darker."""
    weights = np.array([0.3, 0.59, 0.11], dtype=np.float32)
    shade = (render[..., :3] @ weights) / max(1.0, float(body.mean @ weights))  # [128, 128]
    dyed = np.minimum(255, np.array(COLOURS[colour]) * shade[..., None])
    found = render.copy()
    found[..., :3][body.mask] = dyed[body.mask]
    return found


# --------------------------------------------------------------------------------------- pictures


def compose(
    render: NDArray[np.uint8], background: tuple[int, int, int], side: int, dx: int, dy: int
) -> NDArray[np.uint8]:
    """One picture, [64, 64, 3] uint8: the icon `side` pixels large, off the middle by (dx, dy)."""
    icon = Image.fromarray(render).resize((side, side), Image.Resampling.LANCZOS)
    canvas = Image.new("RGBA", (SIZE, SIZE), (*background, 255))
    layer = Image.new("RGBA", (SIZE, SIZE), (0, 0, 0, 0))
    corner = (SIZE - side) // 2
    layer.paste(icon, (corner + dx, corner + dy))
    return np.asarray(Image.alpha_composite(canvas, layer).convert("RGB"))


class Variants:
    """Draws the variants of each icon."""

    def __init__(self, icons: Icons, per_icon: int, seed: int, composed: Container[str]) -> None:
        self.icons, self.per_icon, self.seed, self.composed = icons, per_icon, seed, composed
        self.names = set(icons.names)
        self.say_style = len(set(icons.styles)) > 1

    def of(self, icon: int) -> Iterator[Variant]:
        """The variants of one icon: most of them recoloured where it is to be composed."""
        name, style = self.icons.names[icon], self.icons.styles[icon]
        rng = random.Random(f"{self.seed}/{style}/{name}")
        body = body_of(self.icons.images[icon])
        composed = name in self.composed
        for index in range(self.per_icon if composed else max(1, self.per_icon // FEWER)):
            dyed = composed and index % 4 > 0
            colour = rng.choice(self.other_colours(name, body)) if dyed else None
            yield self.one(icon, body, colour, rng)

    def other_colours(self, name: str, body: Body | None) -> list[str | None]:
        """Colours that the thing can be given."""
        if body is None or "light blue" in name:
            return [None]
        thing = _COLOUR_WORD.sub("", name)
        taken = {colour for colour in DYES if f"{colour} {thing}" in self.names}
        return [c for c in DYES if c != body.colour and c not in taken] or [None]

    def one(self, icon: int, body: Body | None, colour: str | None, rng: random.Random) -> Variant:
        """One picture and its caption; `colour` is the new one of the thing, None for its own."""
        name, style = self.icons.names[icon], self.icons.styles[icon]
        render, thing = self.icons.images[icon], name
        if rng.random() < 0.3:
            thing = rng.choice([name, *SYNONYMS.get(name, [])])
        pair = False
        if body is not None and colour is not None:
            render = recolour(render, body, colour)
            thing = f"{colour} {_COLOUR_WORD.sub('', thing)}"
            said_so = f"{colour} {_COLOUR_WORD.sub('', name)}"
            pair = said_so not in SHOWN and held_out(said_so, 100)
        elif body is not None and body.colour:
            colour = body.colour
            if rng.random() < 0.3 and not _COLOUR_WORD.search(thing):
                thing = f"{colour} {thing}"
        said = thing
        if self.say_style and rng.random() < 0.5:
            said += f", {PACKS[style].word} style"
        side, dx, dy = round(SIZE * PACKS[style].scale), 0, 0
        if name in self.composed and rng.random() < 0.12:
            side //= 2
            place = rng.choice([*PLACES, None])
            said = f"small {said}" if place is None else f"small {said} {place}"
            dx, dy = (0, 0) if place is None else PLACES[place]
        ground = WHITE
        if rng.random() < (0.6 if name in self.composed else 0.3):
            background = rng.choice([c for c in GROUNDS if c != colour])
            ground = COLOURS[background]
            if rng.random() < 0.9:
                said += f" on a {background} background"
        return Variant(compose(render, ground, side, STEP * dx, STEP * dy), said, icon, pair)


def make_variants(
    icons: Icons, per_icon: int = 8, seed: int = 0, composed: Container[str] | None = None
) -> list[Variant]:
    """Every variant of every icon, icon by icon.

    Args:
        composed: names of the icons that are dyed and moved about; of the others there are `FEWER` times fewer
            variants. None for all.
    """
    variants = Variants(icons, per_icon, seed, set(icons.names) if composed is None else composed)
    found: list[Variant] = []
    for icon in tqdm(range(len(icons)), desc="variants", unit="icon"):
        found.extend(variants.of(icon))
    return found
