"""Painted scenes: endless, the same for the same number, and captions that name only what is there."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from lantern_hpu.models.text.prefix import WordConditioner
from lantern_lab.scenes import (
    Noise,
    Scene,
    caption_of,
    paint_picture,
    render_scene,
    sample_scene,
)
from lantern_lab.scenes.scene import DYES, LANDS, SEASONS, STILL, THINGS, TIMES, WEATHERS

SIDE = 64


@pytest.fixture(scope="module")
def noise() -> Noise:
    return Noise(2 * SIDE)


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    rng = np.random.default_rng(1)
    return [sample_scene(rng) for _ in range(4000)]


def pictures(scene: Scene, count: int, noise: Noise) -> NDArray[np.float32]:
    """[count, S, S, 3]"""
    drawn = [render_scene(scene, np.random.default_rng(seed), noise) for seed in range(count)]
    return np.stack(drawn).astype(np.float32)


def test_a_number_is_one_picture(noise: Noise) -> None:
    one, other = paint_picture(7, noise), paint_picture(7, Noise(2 * SIDE))
    assert np.array_equal(one.pixels, other.pixels) and one.caption == other.caption
    assert one.pixels.shape == (SIDE, SIDE, 3) and one.pixels.dtype == np.uint8
    assert not np.array_equal(one.pixels, paint_picture(8, noise).pixels)


def test_everything_occurs(scenes: list[Scene]) -> None:
    assert {s.land for s in scenes} == {*LANDS, "table"}
    assert {s.time for s in scenes} == set(TIMES) and {s.weather for s in scenes} == set(WEATHERS)
    assert {s.season for s in scenes} == {*SEASONS, None}
    assert {s.thing for s in scenes} == {*THINGS, *STILL, None}
    assert {s.storm for s in scenes} == {"rain", "snow", "sand", None}
    for thing in (name for name, thing in THINGS.items() if thing.dyed):
        assert {s.colour for s in scenes if s.thing == thing} == set(DYES)


def test_things_stand_where_they_belong(scenes: list[Scene]) -> None:
    for scene in scenes:
        if scene.land == "table":
            assert scene.colour in STILL[str(scene.thing)]
        elif scene.thing is not None:
            assert scene.land in THINGS[scene.thing].places


def test_captions_name_only_what_is_there(scenes: list[Scene]) -> None:
    """Of each attribute: its words are in a caption only if the scene has it."""
    rng, said = np.random.default_rng(2), Counter[str]()
    for scene in scenes:
        words = set(WordConditioner.split(caption_of(scene, rng)))
        true = {scene.land, scene.colour, scene.wall, *str(scene.thing).split()}
        true |= {scene.season} if scene.season else set()
        true |= {"snow" if scene.season == "winter" else ""}
        for word in words & {*LANDS, *SEASONS, *DYES, *THINGS, *STILL, "two"}:
            natural = {"green": scene.season == "summer", "blue": scene.time == "day"}
            natural |= {"red": scene.time == "sunset", "two": scene.count == 2}
            known = word in true or natural.get(word, False)
            assert known, f"{word} of {scene}"
            said[word] += 1
        assert ("night" in words) <= (scene.time == "night")
        assert ("foggy" in words) <= (scene.weather == "fog")
        assert ("snowstorm" in words) <= (scene.storm == "snow")
    assert len(said) > 25


def test_captions_leave_things_out(scenes: list[Scene]) -> None:
    rng, scene = np.random.default_rng(3), Scene("sea", "night", thing="sailboat", colour="red")
    captions = {caption_of(scene, rng) for _ in range(200)}
    assert {"a red sailboat on the sea at night", "a sailboat on the sea"} <= captions
    assert "" not in {caption_of(s, rng, terse=1.0) for s in scenes}


def test_one_scene_has_endless_pictures(noise: Noise) -> None:
    """Two of a scene are as far apart as brightness alone cannot make them."""
    for scene in (Scene("sea", "sunset", thing="sailboat", colour="white"), still("red")):
        drawn = pictures(scene, 6, noise)
        drawn -= drawn.mean((1, 2), keepdims=True)
        apart = [np.abs(a - b).mean() for i, a in enumerate(drawn) for b in drawn[:i]]
        assert min(apart) > 8


def still(colour: str) -> Scene:
    return Scene("table", thing="apple", colour=colour, wall="white")


@pytest.mark.parametrize("colour", STILL["apple"])
def test_an_apple_has_its_colour(noise: Noise, colour: str) -> None:
    """Against the same table with another apple, the picture's middle has moved towards the colour."""
    other = {"red": "green", "green": "red", "yellow": "green"}[colour]
    middle = np.s_[:, 28:52, 16:48]
    mine = pictures(still(colour), 24, noise)[middle].mean((0, 1, 2))
    theirs = pictures(still(other), 24, noise)[middle].mean((0, 1, 2))
    direction = np.subtract(DYES[colour], DYES[other])
    assert (mine - theirs) @ direction / np.linalg.norm(direction) > 10


def test_light_and_air_follow_time_and_weather(noise: Noise) -> None:
    def bright(time: str) -> float:
        return float(pictures(Scene("hills", time, season="summer"), 8, noise).mean())

    def rough(weather: str) -> float:
        drawn = pictures(Scene("mountains", "day", weather, "summer"), 8, noise)
        return float(drawn.std((1, 2)).mean())

    assert bright("night") < 0.5 * bright("day")
    assert rough("fog") < 0.8 * rough("clear")


def test_a_snowy_land_is_white(noise: Noise) -> None:
    winter, summer = (
        pictures(Scene("hills", season=s), 8, noise)[:, 48:] for s in ("winter", "summer")
    )
    assert winter.mean() > summer.mean() + 60


@pytest.mark.slow
def test_a_picture_is_the_same_at_twice_the_size(noise: Noise) -> None:
    """Averaged over 2 x 2 pixels the larger one is the smaller one, but for grain; no other picture is as close."""
    larger = Noise(4 * SIDE)
    small = [paint_picture(seed, noise) for seed in range(16)]
    large = [paint_picture(seed, larger) for seed in range(16)]
    assert [p.caption for p in small] == [p.caption for p in large]
    assert large[0].pixels.shape == (2 * SIDE, 2 * SIDE, 3)
    shrunk = [p.pixels.reshape(SIDE, 2, SIDE, 2, 3).mean((1, 3)) for p in large]
    apart = np.array([[np.square(a - b.pixels).mean() ** 0.5 for b in small] for a in shrunk])
    assert apart.diagonal().max() < 12 < (apart + 1000 * np.eye(16)).min()
