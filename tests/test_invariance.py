"""An image does not depend on its batch, its slot, or the threads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from lantern_hpu.backends.cpu import native
from lantern_hpu.commands.generate import main
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import read_png
from scripts.measure import batches
from tests.marks import mostly_slow

needs_library = pytest.mark.skipif(not native.isa(), reason=native.open_library()[1])


@needs_library
@pytest.mark.parametrize("threads", mostly_slow([1, 2], 2))
def test_batches_of_any_size_draw_the_same_images(model: Path, threads: int) -> None:
    """Of `ar`, a relaxed tree and a window; alone by one thread, together by one or two."""
    drawn: dict[int, list[list[list[int]]]] = {}
    before = torch.get_num_threads()
    for size in (1, 2, 6):
        taken = 1 if size == 1 else threads
        pipeline = LanternPipeline.from_pretrained(str(model), device="cpu", threads=taken)
        drawn[size] = [
            pipeline(
                "a red cat", num_images_per_prompt=6, method=method, batch_size=size
            ).tokens.tolist()
            for method in ("ar", "lantern++@broad_7", "scd@scd:4")
        ]
    torch.set_num_threads(before)
    assert drawn[2] == drawn[1] and drawn[6] == drawn[1]


def test_resuming_at_another_batch_size_gives_the_same_files(model: Path, tmp_path: Path) -> None:
    """`--resume` draws what lacks; pictures are those of one run."""
    here = ["--model", str(model), "--device", "cpu", "--method", "ar"]
    here += ["--prompt", "a red cat", "--num-images", "5"]
    assert main([*here, "--output", str(tmp_path / "one"), "--batch-size", "5"]) == 0
    assert main([*here, "--output", str(tmp_path / "two"), "--batch-size", "2"]) == 0
    files = sorted((tmp_path / "two").glob("*.png"))
    for file in files[1:4]:
        file.unlink()
    assert main([*here, "--output", str(tmp_path / "two"), "--batch-size", "1", "--resume"]) == 0
    for file in files:
        one, two = (Image.open(tmp_path / name / file.name) for name in ("one", "two"))
        assert one.tobytes() == two.tobytes()


WAYS = "closed-2,open-2,server-2"


@needs_library
def test_images_are_counted_however_they_are_drawn(model: Path, tmp_path: Path) -> None:
    """And drawn once: a second run adds what lacks."""
    file = tmp_path / "counted.json"
    asked = ["--model", str(model), "--layouts", "native", "--method", "ar,scd@2", "--output"]
    assert batches.main([*asked, str(file), "--num-images", "3", "--ways", "closed-2"]) == 0
    first = json.loads(file.read_text())["images"]["native ar"]["closed-2"]
    assert batches.main([*asked, str(file), "--num-images", "4", "--ways", WAYS]) == 0
    found = json.loads(file.read_text())
    assert {row["way"] for row in found["rows"]} == {"closed-1", *WAYS.split(",")}
    assert len(found["rows"]) == 8
    for row in found["rows"]:
        assert row["images"] == 4 and row["tokens_differ"] == row["pixels_differ"] == 0
        assert row["bits_differ"] == (0 if row["way"].startswith("closed") else None)
    drawn = found["images"]["native ar"]["closed-2"]
    assert {number: drawn[number] for number in first} == first and len(drawn) == 4


def test_a_picture_is_drawn_again_by_its_kernels(model: Path, tmp_path: Path) -> None:
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    here = ["--model", str(model), "--device", "cpu"]
    for name in ("plain", "auto"):
        asked = ["--prompt", "a red cat", "--kernels", name, "--output", str(first), "--force"]
        assert main([*here, *asked, "--method", "ar", "--dtype", "bfloat16"]) == 0
        assert read_png(first)["config"]["kernels"] == name
        assert main([*here, "--from-png", str(first), "--output", str(again), "--force"]) == 0
        assert read_png(again)["config"]["kernels"] == name
