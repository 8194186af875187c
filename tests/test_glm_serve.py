"""GLM-Image behind the server: sizes by request, prompts of any length, pixels by diffusers."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from lantern_hpu.commands import serve
from lantern_hpu.models.files.load import OpenedModel
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.serve.app import make_app
from lantern_hpu.serve.decoder import DecodeThread
from lantern_hpu.serve.options import ServeOptions

pytest.importorskip("transformers.models.glm_image")
pytest.importorskip("diffusers")

SIZES = ((64, 96), (96, 64))  # height, width


@pytest.fixture(scope="module")
def folder(public: Path) -> Path:
    return public / "glm-image"


@pytest.fixture(scope="module")
def decoder(folder: Path) -> DecodeThread:
    pipeline = LanternPipeline.from_pretrained(str(folder), device="cpu", dtype="float32")
    assert pipeline.diffusion is not None
    pipeline.diffusion.options = {"num_inference_steps": 1}
    return DecodeThread(
        pipeline, ServeOptions(str(folder), methods=("ar", "scd@4"), sizes=SIZES, slots=2)
    )


@pytest.fixture(scope="module")
def client(decoder: DecodeThread) -> Iterator[TestClient]:
    app = make_app(decoder.options, lambda: decoder)
    with TestClient(app, base_url="http://localhost") as client:
        decoder.start(wait=True)
        assert decoder.failure is None
        yield client


def post(client: TestClient, **fields: Any) -> httpx.Response:
    answer: Any = client.post("/v1/images/generations", json=fields)
    return answer


def captures(decoder: DecodeThread) -> list[int]:
    return [slots.engine.captures for slots in decoder.all_slots]


@pytest.mark.slow
def test_the_server_draws_what_the_pipeline_draws_in_each_size(
    client: TestClient, decoder: DecodeThread
) -> None:
    """Ten prompts of ten lengths in two sizes and two methods, without a capture once it is ready."""
    before = captures(decoder)
    assert len(before) == 2 * 2 * 3 * 2  # methods, sizes, prefixes, and one slot or all
    for i in range(10):
        (height, width), method = SIZES[i % 2], ("ar", "scd")[i // 2 % 2]
        prompt, size = "apple " * (3 + 28 * i), f"{width}x{height}"
        answer = post(client, prompt=prompt, size=size, seed=i, method=method)
        assert answer.status_code == 200, answer.text
        got = Image.open(io.BytesIO(base64.b64decode(answer.json()["data"][0]["b64_json"])))
        assert answer.json()["size"] == size and got.size == (width, height)
        if i in (0, 3, 5):
            own = "scd@4" if method == "scd" else "ar"
            result = decoder.pipeline(prompt, height=height, width=width, seed=i, method=own)
            assert got.tobytes() == result.images[0].tobytes()
    assert captures(decoder) == before


@pytest.mark.slow
def test_usage_is_of_the_size_and_the_length(client: TestClient) -> None:
    usage = [
        post(client, prompt="apple " * words, size=size).json()["usage"]
        for words, size in ((3, "auto"), (300, "64x96"))
    ]
    assert [u["input_tokens"] for u in usage] == [64, 1024]
    # previews of int(16 sqrt(2/3)) x int(16 sqrt(3/2)), and pictures of 2 x 3
    assert [u["output_tokens"] for u in usage] == [13 * 19 + 6, 19 * 13 + 6]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value"), [("size", "128x128"), ("prompt", "zq" * 600), ("image", "source.png")]
)
def test_what_cannot_be_drawn_is_refused_by_its_field(
    client: TestClient, field: str, value: Any
) -> None:
    """Sizes that are not served, prompts that are too long, and pictures as input."""
    answer = post(client, **{"prompt": "apple", field: value})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field or (field == "prompt" and "prompt" in error["message"])


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ("100x100", "multiples of 32"),
        ("96000x3200", "positions"),
        ("square", "width x height"),
        ("0x64", "width x height"),
    ],
)
def test_sizes_that_cannot_be_served_end_the_command_before_weights_are_read(
    folder: Path,
    sizes: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OpenedModel, "load", lambda *_: pytest.fail("weights were read"))
    assert serve.main(["--model", str(folder), "--sizes", sizes, "--port", "0"]) == 2
    assert why in capsys.readouterr().err


def test_a_model_of_one_size_has_no_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenedModel, "load", lambda *_: pytest.fail("weights were read"))
    assert serve.main(["--sizes", "64x64", "--port", "0"]) == 2
    assert "generates one size" in capsys.readouterr().err
