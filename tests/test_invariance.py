"""An image does not depend on its batch: products and kernels that would make it so are caught, whatever they are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor, nn

from lantern_hpu.backends import DeviceOptions
from lantern_hpu.backends.base import Backend
from lantern_hpu.backends.cpu import layouts
from lantern_hpu.backends.cpu.backend import CPUBackend
from lantern_hpu.backends.cpu.layouts import (
    SAMPLED,
    UNIT,
    PlainLinear,
    Plan,
    RowPlans,
    independent,
    lay_out,
)
from lantern_hpu.commands.generate import main
from lantern_hpu.ops.kernels import PLAIN
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import METADATA, read_png
from scripts.measure import batches
from tests.marks import mostly_slow
from tests.tiny import CONFIG, tiny_models

WIDTH = 48
Rounds = Callable[
    [int, int], bool
]  # whether a product of so many rows by so many threads is another one

PLANTED: dict[str, Rounds] = {
    "few rows": lambda rows, threads: rows < 4,
    "from 16 rows on": lambda rows, threads: rows >= UNIT,
    "past 16 rows": lambda rows, threads: rows > UNIT,
    "odd rows": lambda rows, threads: rows % 2 == 1,
    "many rows": lambda rows, threads: rows > 40,
    "two threads": lambda rows, threads: threads > 1,
    "all but 16": lambda rows, threads: rows != UNIT,
}


def planted(rounds: Rounds, error: float) -> Callable[[PlainLinear, Tensor], Tensor]:
    """In place of `PlainLinear.multiply`: rows are independent, but for some numbers of them all are off."""

    def multiply(self: PlainLinear, x: Tensor) -> Tensor:
        y = (x[..., None, :] * self.plain.weight).sum(-1)  # [.., out]
        y = y if self.plain.bias is None else y + self.plain.bias
        off = rounds(x.numel() // self.in_features, torch.get_num_threads())
        return y * (1 + error) if off else y

    return multiply


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.parametrize("name", PLANTED)
def test_a_row_has_the_bits_that_it_has_among_sixteen(
    monkeypatch: pytest.MonkeyPatch, threads: None, name: str
) -> None:
    """In products of any size and at any place, by any number of threads; the error planted is one of rounding."""
    monkeypatch.setattr(PlainLinear, "multiply", planted(PLANTED[name], 2**-22))
    torch.manual_seed(0)
    layer, plans = PlainLinear(nn.Linear(WIDTH, 40)), RowPlans(WIDTH, torch.float32)
    x = torch.randn(300, WIDTH)
    want = Plan(UNIT, alone=True).apply(layer.multiply, x)
    for count in (1, 2):
        torch.set_num_threads(count)
        for rows in (1, 2, 3, 5, 15, 16, 17, 34, 101, 270):
            for first in (0, 30):
                got = plans(layer.multiply, x[None, first : first + rows])
                assert torch.equal(got[0], want[first : first + rows])
    assert plans.cut, "nothing was planted"


@torch.no_grad()
@pytest.mark.parametrize("form", ["plain", *layouts.FORMS])
def test_the_forms_of_this_processor_keep_their_rows(threads: None, form: str) -> None:
    """As they are used: whatever the library does with numbers of rows."""
    plain = nn.Linear(320, 896)
    if why := form in layouts.FORMS and layouts.obstacle(layouts.FORMS[form], [plain]):
        pytest.skip(str(why))
    layer = layouts.made(form, plain, layouts.Plans())
    x = torch.randn(272, 320)
    whole = layer(x)
    for count in (1, 2):
        torch.set_num_threads(count)
        for rows in (1, 2, 3, 4, 7, 16, 17, 34, 68, 136):
            for first in (0, 5):
                assert torch.equal(layer(x[first : first + rows]), whole[first : first + rows])


def tokens_by_batch(model: Path, **how: Any) -> dict[int, list[list[int]]]:
    """Of six images, by how many are drawn together; those of `lantern++` and of a window."""
    result = {}
    for size in (1, 2, 6):
        pipeline = LanternPipeline.from_pretrained(str(model), device="cpu", layout="plain", **how)
        images = [
            pipeline("a red cat", num_images_per_prompt=6, method=method, batch_size=size).tokens
            for method in ("ar", "lantern++@broad_7", "scd@scd:4")
        ]
        result[size] = [image.tolist() for image in images]
    return result


@pytest.mark.parametrize(
    "name", mostly_slow(["few rows", "from 16 rows on", "many rows"], "from 16 rows on")
)
def test_a_product_that_depends_on_its_rows_changes_no_image(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The planted error is so large that other tokens are drawn where it is not caught."""
    monkeypatch.setattr(PlainLinear, "multiply", planted(PLANTED[name], 0.5))
    tokens = tokens_by_batch(model)
    assert all(each == tokens[1] for each in tokens.values())
    monkeypatch.setattr(RowPlans, "trial", lambda self, product, rows: None)
    missed = tokens_by_batch(model)
    assert any(each != missed[1] for each in missed.values()), "the plant is too small"


def off_in_company(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel whose results depend on how many rows it is given."""

    def wrong(x: Tensor, *others: Any) -> Tensor:
        y = kernel(x, *others)
        return y if len(x) <= 2 else (y * 1.5 if y.is_floating_point() else (y + 1) % 3)

    return wrong


@pytest.mark.parametrize(
    "name", mostly_slow(["attention", "rms_norm", "swiglu", "probs", "sample"], "attention")
)
def test_a_kernel_that_depends_on_its_rows_changes_no_image(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is called for each row by itself, and the report says so."""
    wrong = off_in_company(getattr(PLAIN, name))
    kernels = replace(PLAIN, **{name: wrong})  # type: ignore[arg-type]
    monkeypatch.setattr(CPUBackend, "kernels", lambda self, choice, dtype: kernels)
    tokens = tokens_by_batch(model)
    assert all(each == tokens[1] for each in tokens.values())
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    assert "at a time" in pipeline.model.target.kernels.names()[name]


def test_plain_kernels_are_left_alone(model: Path) -> None:
    config = LanternPipeline.from_pretrained(str(model), device="cpu").model.target.config
    assert independent(PLAIN, config, torch.float32) == PLAIN


def test_off_takes_products_as_they_come() -> None:
    models = tiny_models()
    assert lay_out(models, "plain") == ("plain", "asked for")
    assert type(models[0].head) is nn.Linear


def test_reports_and_pictures_say_what_is_held(model: Path, tmp_path: Path) -> None:
    """An image is drawn again as it was drawn: without that field, by products as they come."""
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    here = ["--model", str(model), "--device", "cpu"]
    asked = ["--prompt", "a red cat", "--method", "ar", "--output", str(first), "--force"]
    for value in ("off", "on"):
        assert main([*here, *asked, "--invariant", value]) == 0
        assert read_png(first)["config"]["invariant"] == value
        assert main([*here, "--from-png", str(first), "--output", str(again), "--force"]) == 0
        assert read_png(again)["config"]["invariant"] == value
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    said = pipeline("a red cat", method="ar").environment["decided"]["invariant"]
    assert "each row keeps its bits in products of" in said and " 2" in said


def test_resuming_at_another_batch_size_gives_the_same_files(model: Path, tmp_path: Path) -> None:
    """`--resume` draws what lacks; pictures are those of one run."""
    here = [
        "--model",
        str(model),
        "--device",
        "cpu",
        "--prompt",
        "a red cat",
        "--method",
        "ar",
        "--num-images",
        "5",
    ]
    assert main([*here, "--output", str(tmp_path / "one"), "--batch-size", "5"]) == 0
    assert main([*here, "--output", str(tmp_path / "two"), "--batch-size", "2"]) == 0
    files = sorted((tmp_path / "two").glob("*.png"))
    for file in files[1:4]:
        file.unlink()
    assert main([*here, "--output", str(tmp_path / "two"), "--batch-size", "1", "--resume"]) == 0
    for file in files:
        pixels = [
            read_pixels(folder / file.name) for folder in (tmp_path / "one", tmp_path / "two")
        ]
        assert pixels[0] == pixels[1]


def read_pixels(file: Path) -> bytes:
    from PIL import Image

    with Image.open(file) as image:
        return image.tobytes()


def test_devices_that_hold_nothing_say_so() -> None:
    class Card(CPUBackend):
        fit = Backend.fit

    fit = Card().fit(CONFIG, DeviceOptions(kernels="plain"))
    fit.lay_out([])
    assert not fit.invariant and fit.layout == "plain" and "invariant" not in fit.decided
    assert fit.kernels is PLAIN


def test_a_switch_that_is_neither_is_one_error(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", str(model), "--prompt", "a red cat", "--invariant", "perhaps"]
    assert main(asked) == 2
    assert "one of on, off" in capsys.readouterr().err


WAYS = "closed-2,open-2,server-2"


def test_images_are_counted_however_they_are_drawn(model: Path, tmp_path: Path) -> None:
    """And drawn once: a second run adds what lacks."""
    file = tmp_path / "counted.json"
    asked = ["--model", str(model), "--layouts", "plain", "--methods", "ar,scd@2", "--output"]
    assert batches.main([*asked, str(file), "--images", "3", "--ways", "closed-2"]) == 0
    first = json.loads(file.read_text())["images"]["plain ar"]["closed-2"]
    assert batches.main([*asked, str(file), "--images", "4", "--ways", WAYS]) == 0
    found = json.loads(file.read_text())
    assert {row["way"] for row in found["rows"]} == {"closed-1", *WAYS.split(",")}
    assert len(found["rows"]) == 8
    for row in found["rows"]:
        assert row["images"] == 4 and row["tokens_differ"] == row["pixels_differ"] == 0
        assert row["bits_differ"] == (0 if row["way"].startswith("closed") else None)
    drawn = found["images"]["plain ar"]["closed-2"]
    assert {number: drawn[number] for number in first} == first and len(drawn) == 4


def test_images_that_differ_are_counted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainLinear, "multiply", planted(PLANTED["few rows"], 0.5))
    monkeypatch.setattr(RowPlans, "trial", lambda self, product, rows: None)
    file = tmp_path / "counted.json"
    asked = ["--model", str(model), "--layouts", "plain", "--methods", "ar", "--images", "4"]
    assert batches.main([*asked, "--ways", "closed-4,server-4", "--output", str(file)]) == 1
    alone, *others = json.loads(file.read_text())["rows"]
    assert alone["bits_differ"] == 0
    assert all(row["tokens_differ"] and row["pixels_differ"] for row in others)
    assert others[0]["bits_differ"] == 4
    other = [*asked, "--invariant", "off", "--output", str(file)]
    assert batches.main(other) == 2, "a file of images that were drawn otherwise was added to"


def test_few_rows_are_padded_where_more_take_less_time() -> None:
    """A library that is slow for fewer than six rows; without matrices that no cache holds, no clock is asked."""

    def slow(x: Tensor) -> Tensor:
        if len(x) < 6:
            time.sleep(2e-3)
        return 2 * x

    x, timed, untimed = torch.randn(2, 8), RowPlans(8, torch.float32), RowPlans(8, torch.float32)
    timed.add(slow, SAMPLED)
    for plans in (timed, untimed):
        assert torch.equal(plans(slow, x), 2 * x)
    assert {rows for rows, _ in timed.plans} == {2} and timed.cut[2].size in (6, 8)
    assert untimed.cut == {}


def test_a_picture_that_names_no_kernels_is_drawn_again_by_the_plain_ones(
    model: Path, tmp_path: Path
) -> None:
    """One token a row is attended to in float32 now, whatever the dtype; older images were not."""
    first, older, again = (tmp_path / f"{name}.png" for name in ("first", "older", "again"))
    here = ["--model", str(model), "--device", "cpu"]
    for name in ("plain", "auto"):
        asked = ["--prompt", "a red cat", "--kernels", name, "--output", str(first), "--force"]
        assert main([*here, *asked, "--method", "ar", "--dtype", "bfloat16"]) == 0
        assert read_png(first)["config"]["kernels"] == name
        assert main([*here, "--from-png", str(first), "--output", str(again), "--force"]) == 0
        assert read_png(again)["config"]["kernels"] == name
    with Image.open(first) as image:
        known, info = json.loads(image.text[METADATA]), PngInfo()
        del known["config"]["kernels"]
        info.add_itxt(METADATA, json.dumps(known))
        image.save(older, pnginfo=info)
    assert main([*here, "--from-png", str(older), "--output", str(again), "--force"]) == 0
    assert read_png(again)["config"]["kernels"] == "plain"
