"""What captions say and pictures show: the reader against the generator, the network against fresh pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from lantern_hpu.errors import WeightsError
from lantern_lab.embedded.train_attributes import spoil
from lantern_lab.evaluate.attributes import (
    ATTRIBUTES,
    SIDE,
    SPOILT,
    WEIGHTS,
    Classifier,
    caption_attributes,
    scene_attributes,
)
from lantern_lab.evaluate.scorer_builtin import CAPTIONS
from lantern_lab.scenes import Noise, Picture, caption_of, paint_picture, sample_scene


def test_captions_say_what_the_scene_shows() -> None:
    rng = np.random.default_rng(0)
    named = dict.fromkeys(ATTRIBUTES, 0)
    for _ in range(3000):
        scene = sample_scene(rng)
        found = caption_attributes(caption_of(scene, rng))
        assert found.items() <= scene_attributes(scene).items()
        for name in found:
            named[name] += 1
    assert min(named.values()) > 300


@pytest.mark.parametrize(
    ("caption", "want"),
    [
        ("a red apple", {"thing": "apple", "colour": "red"}),
        ("an orange", {"thing": "orange"}),
        ("an orange cup on a table", {"thing": "cup", "colour": "orange", "terrain": "table"}),
        ("two green apples", {"thing": "apple", "colour": "green"}),
        ("pine trees by a snowy mountain lake", {"thing": "pine trees", "terrain": "lake", "season": "winter"}),
        ("green hills on a foggy morning", {"terrain": "hills", "season": "summer", "time": "dawn", "weather": "fog"}),
        ("the sea under a red sky", {"terrain": "sea", "time": "sunset"}),
        ("a palm tree in the desert in a sandstorm", {"thing": "palm tree", "terrain": "desert", "weather": "storm"}),
        ("a white house on hills", {"thing": "house", "colour": "white", "terrain": "hills"}),
        ("a house on green hills", {"thing": "house", "terrain": "hills", "season": "summer"}),
    ],
)  # fmt: skip
def test_captions_are_read_word_by_word(caption: str, want: dict[str, str]) -> None:
    assert caption_attributes(caption) == want


@pytest.fixture(scope="module")
def pictures() -> list[Picture]:
    noise = Noise(2 * SIDE)
    return [paint_picture(CAPTIONS + 10**6 + i, noise) for i in range(160)]


@pytest.mark.slow
@pytest.mark.parametrize("how", SPOILT)
def test_the_network_knows_fresh_pictures_also_spoilt_ones(
    pictures: list[Picture], how: str
) -> None:
    rng = np.random.default_rng(0)
    pixels = np.stack([spoil(picture.pixels, how, rng) for picture in pictures])
    seen = Classifier.load().classify(pixels)
    pairs = [pair for p, s in zip(pictures, seen.values, strict=True) for pair in hits(p, s)]
    assert np.mean(pairs) > 0.8
    matches = seen.matches([picture.caption for picture in pictures])
    assert np.mean([hit for one in matches for hit in one.values()]) > 0.8


def hits(picture: Picture, seen: dict[str, str]) -> list[bool]:
    return [seen[name] == value for name, value in scene_attributes(picture.scene).items()]


def test_its_own_error_is_stored_with_it() -> None:
    about = Classifier.load().about
    assert set(about["accuracy"]) == set(SPOILT)
    assert {*ATTRIBUTES, "all"} == set(about["accuracy"]["clean"])
    assert WEIGHTS.stat().st_size < 2e6


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.safetensors"
    for content in (save({"weight": np.zeros(3)}, {"about": "{}"}), b"half a fi"):
        file.write_bytes(content)
        with pytest.raises(WeightsError, match=r"cannot read .*other"):
            Classifier.load(file)
