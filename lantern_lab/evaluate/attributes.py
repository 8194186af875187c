"""Attributes of painted pictures: of a scene, as its caption names them, and as a small network classifies pixels.

`python -m lantern_lab.embedded.train_attributes` trains the network on the generator of `lantern_lab.scenes`; its
weights and error are in `assets/attributes.safetensors`. The 64 numbers before its heads are the features by which
drawn pictures are compared with fresh ones: the network also classifies how a picture was spoilt (blur, noise,
compression, misplaced patches), so the features depend on finish as well as content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lantern_hpu.files import ASSETS, reported_as
from lantern_lab.scenes import Scene
from lantern_lab.scenes.scene import (
    CLOUDY,
    DYES,
    FOGGY,
    LANDS,
    MOONLIT,
    SEASONS,
    STILL,
    STORMY,
    THINGS,
    TIMES,
    WEATHERS,
    WHEN,
)

SIDE = 64  # pixels, of the network's input
FEATURES = 64
WEIGHTS = ASSETS / "attributes.safetensors"
RETRAIN = "python -m lantern_lab.embedded.train_attributes"
NOTHING = "nothing"
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "terrain": (*LANDS, "table"),
    "time": TIMES,
    "weather": WEATHERS,
    "season": SEASONS,
    "thing": (NOTHING, *THINGS, *STILL),
    "colour": tuple(DYES),  # of the thing
}
SPOILT = ("clean", "blurred", "noisy", "compressed", "misplaced")

Values = dict[str, str]  # attribute -> value
Pixels = NDArray[np.uint8]

# ------------------------------------------------------------------------------------ scenes and captions


def scene_attributes(scene: Scene) -> Values:
    if scene.land == "table":
        known = {"terrain": scene.land, "thing": scene.thing, "colour": scene.colour}
    else:
        known = {
            "terrain": scene.land,
            "time": None if scene.weather == "storm" else scene.time,
            "weather": scene.weather,
            "season": scene.season,
            "thing": scene.thing or NOTHING,
            "colour": scene.colour,
        }
    return {name: value for name, value in known.items() if value is not None}


def phrases() -> dict[str, Values]:
    """Time and weather, by the phrases at the ends of captions."""
    result: dict[str, Values] = {"in the fog": {"weather": "fog"}}
    result |= {phrase: {"time": time} for time, known in WHEN.items() for phrase in known}
    result |= {phrase: {"time": "night"} for phrase in MOONLIT}
    result |= {phrase: {"weather": "storm"} for known in STORMY.values() for phrase in known}
    for weather, known in {"cloudy": CLOUDY, "fog": FOGGY}.items():
        result |= {phrase: {"time": time, "weather": weather} for time, phrase in known.items()}
    return result


def alternatives(names: Sequence[str]) -> str:
    return "|".join(sorted(names, key=len, reverse=True))


PHRASES = phrases()
LOOKS = {"snowy": "winter", "autumn": "autumn", "green": "summer"}
THING = re.compile(
    rf"(?:an? |two )?(?:(?P<colour>{alternatives(tuple(DYES))}) )?(?P<thing>{alternatives((*THINGS, *STILL))})s?\b"
)
LAND = re.compile(
    rf"\b(?:(?P<look>{alternatives(tuple(LOOKS))}) )?(?:mountain )?(?P<land>{alternatives(LANDS)})\b"
)
END = re.compile(rf"\b({alternatives(tuple(PHRASES))})$")


def caption_attributes(caption: str) -> Values:
    """The attributes that a caption of the generator names; of what it leaves out nothing is known."""
    result: Values = {}
    if thing := THING.match(caption):
        result |= {name: value for name, value in thing.groupdict().items() if value}
    if land := LAND.search(caption):
        result["terrain"] = land["land"]
        if land["look"]:
            result["season"] = LOOKS[land["look"]]
    elif " on a table" in caption:
        result["terrain"] = "table"
    if end := END.search(caption):
        result |= PHRASES[end[1]]
    return result


# ------------------------------------------------------------------------------------ the network


class ConvStage(nn.Module):
    """Half the side, then a residual block."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(inside, outside, 3, 2, 1, bias=False)
        self.down_norm = nn.BatchNorm2d(outside)
        self.conv = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        """[B, inside, H, W] -> [B, outside, H / 2, W / 2]"""
        x = F.relu(self.down_norm(self.down(x)))
        return F.relu(x + self.norm(self.conv(x)))


class AttributeNet(nn.Module):
    """Pixels [B, 3, SIDE, SIDE] in [-1, 1] to features [B, FEATURES] and a head for each attribute."""

    def __init__(self, widths: Sequence[int] = (64, 96, 128)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 2, 1)
        inside = (32, *widths)
        self.stages = nn.ModuleList(map(ConvStage, inside, widths))
        self.features = nn.Linear(sum(widths) + widths[-1], FEATURES)
        heads = {name: len(values) for name, values in ATTRIBUTES.items()} | {"spoilt": len(SPOILT)}
        self.heads = nn.ModuleDict({name: nn.Linear(FEATURES, n) for name, n in heads.items()})

    def forward(self, pixels: Tensor) -> Tensor:
        """The features: the mean of each stage, so that texture counts, and the last one's largest."""
        x, pooled = F.relu(self.stem(pixels)), []
        for stage in self.stages:
            x = stage(x)
            pooled.append(x.mean((2, 3)))
        return self.features(torch.cat([*pooled, x.amax((2, 3))], -1))

    def logits(self, features: Tensor) -> dict[str, Tensor]:
        """[B, FEATURES] -> by head [B, values]."""
        active = F.gelu(features)
        return {name: head(active) for name, head in self.heads.items()}


def to_network(pixels: Pixels) -> Tensor:
    """[B, SIDE, SIDE, 3] uint8 -> [B, 3, SIDE, SIDE] float32 in [-1, 1]."""
    floats = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    return floats.contiguous(memory_format=torch.channels_last)


def small(image: Image.Image) -> Pixels:
    """A picture as the network's input, [SIDE, SIDE, 3]; larger ones are averaged over areas."""
    rgb = image.convert("RGB")
    if rgb.size != (SIDE, SIDE):
        rgb = rgb.resize((SIDE, SIDE), Image.Resampling.BOX)
    return np.asarray(rgb)


@dataclass(frozen=True)
class Predictions:
    """What the network makes of some pictures."""

    features: NDArray[np.float32]  # [n, FEATURES]
    values: list[Values]

    def matches(self, captions: Sequence[str]) -> list[dict[str, bool]]:
        """By picture, of each attribute that its caption names, whether it was predicted."""
        return [
            {name: value == predicted[name] for name, value in caption_attributes(caption).items()}
            for caption, predicted in zip(captions, self.values, strict=True)
        ]


class Classifier:
    def __init__(self, net: AttributeNet, about: dict[str, Any]) -> None:
        self.net, self.about = net.eval().requires_grad_(False), about

    @classmethod
    def load(cls, file: Path = WEIGHTS) -> Classifier:
        net = AttributeNet()
        with reported_as(f"cannot read {file}", RETRAIN):
            try:
                with safe_open(file, "pt") as data:
                    about = json.loads(data.metadata()["about"])
                    tensors = {name: data.get_tensor(name) for name in data.keys()}  # noqa: SIM118
                net.load_state_dict(tensors)
            except (RuntimeError, SafetensorError) as error:
                raise ValueError(str(error)) from error
        return cls(net.to(memory_format=torch.channels_last), about)  # type: ignore[call-overload]

    @torch.no_grad()
    def classify(self, pixels: Pixels) -> Predictions:
        """
        Args:
            pixels: [n, SIDE, SIDE, 3].
        """
        parts = [self.net(to_network(p)) for p in np.split(pixels, range(64, len(pixels), 64))]
        features = torch.cat(parts)  # [n, FEATURES]
        best = {name: x.argmax(-1).tolist() for name, x in self.net.logits(features).items()}
        values = [
            {name: known[best[name][i]] for name, known in ATTRIBUTES.items()}
            for i in range(len(features))
        ]
        return Predictions(features.numpy(), values)
