"""Requests as the clients of other servers send them: fixed names, formats and fields that change nothing here."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import read_png
from lantern_hpu.serve import app as answers
from lantern_hpu.serve.decoder import make_served_model
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.protocol import ImagesRequest, read_call
from tests.test_serve import Running, drawn, lines_of, served

NAMES = ("dall-e-3", "gpt-image-1", "org/own-model")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    options = ServeOptions(str(model), served_model_name=NAMES, methods=("ar",), slots=2)
    with served(options) as running:
        yield running


def opened(data: dict[str, Any]) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data["b64_json"])))


# Bodies as the programs send them: from their sources
CLIENTS: dict[str, dict[str, Any]] = {
    "n8n": {"model": "dall-e-3", "n": 1, "size": "SIZE", "quality": "hd", "style": "natural"},
    "n8n, gpt-image": {"model": "gpt-image-1", "n": 1, "size": "SIZE", "quality": "high"},
    "Open WebUI": {"model": "dall-e-3", "n": 1, "size": "SIZE", "response_format": "b64_json"},
    "LibreChat": {"model": "dall-e-3", "quality": "standard", "style": "vivid", "size": "SIZE", "n": 1},
    "agents": {"model": "gpt-image-1", "moderation": "low", "background": "opaque", "user": "me"},
    "nulls": {"model": None, "style": None, "output_format": None, "negative_prompt": None},
}  # fmt: skip


@pytest.mark.parametrize("client", CLIENTS)
def test_what_programs_send_is_drawn_and_what_has_no_effect_is_named(
    client: str, server: Running
) -> None:
    body = {"prompt": "red cat", **CLIENTS[client]}
    if body.get("size"):
        body["size"] = httpx.get(server.url + "/v1/models").json()["data"][0]["size"]
    answer = drawn(server.post(**body))
    idle = {"quality", "style", "moderation", "background", "user"}
    named = [name for name in idle if body.get(name)]
    assert all(any(name in said for said in answer["warnings"]) for name in named)
    assert len(answer["warnings"]) == bool(named) and answer["model"] == "dall-e-3"
    assert opened(answer["data"][0]).size == (8, 8)


def test_the_model_goes_by_all_of_its_names(server: Running) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    assert [card.id for card in client.models.list().data] == list(NAMES)
    for name in NAMES:
        assert client.models.retrieve(name).id == name
        assert client.images.generate(prompt="cat", model=name).data
    with pytest.raises(openai.NotFoundError, match="dall-e-3, gpt-image-1"):
        client.models.retrieve("dall-e-2")


@pytest.mark.parametrize(("kind", "format"), [("png", "PNG"), ("jpeg", "JPEG"), ("webp", "WEBP")])
def test_pictures_come_in_the_format_that_is_asked_for(
    kind: str, format: str, server: Running, tmp_path: Path
) -> None:
    plain = opened(drawn(server.post(prompt="cat", seed=3))["data"][0])
    answer = drawn(server.post(prompt="cat", seed=3, output_format=kind))
    picture = opened(answer["data"][0])
    assert picture.format == format and answer["output_format"] == kind
    off = np.abs(np.asarray(picture).astype(int) - np.asarray(plain))
    assert off.max() == 0 if kind == "png" else off.mean() < 24
    if kind != "png":
        small = drawn(server.post(prompt="cat", seed=3, output_format=kind, output_compression=1))
        assert len(small["data"][0]["b64_json"]) < len(answer["data"][0]["b64_json"])
    file = tmp_path / "again.png"
    file.write_bytes(base64.b64decode(drawn(server.post(prompt="cat"))["data"][0]["b64_json"]))
    assert read_png(file)["prompt"] == "cat"


def test_a_picture_has_an_address_for_a_while(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    answer = client.images.generate(prompt="cat", response_format="url", extra_body={"seed": 3})
    assert answer.data is not None and answer.data[0].b64_json is None
    address = answer.data[0].url
    assert address is not None and address.startswith(server.url)
    fetched = httpx.get(address)
    assert fetched.headers["content-type"] == "image/png"
    whole = drawn(server.post(prompt="cat", seed=3, response_format="b64_json"))["data"][0]
    assert base64.b64decode(whole["b64_json"]) == fetched.content and whole["url"] is None
    both = drawn(server.post(prompt="cat", seed=3))["data"][0]
    assert both["b64_json"] and httpx.get(both["url"]).content == fetched.content
    monkeypatch.setattr(answers, "KEPT_FILES", 1)
    last = drawn(server.post(prompt="cat", n=2, response_format="url"))["data"]
    assert httpx.get(last[1]["url"]).status_code == 200
    for gone in (address, last[0]["url"], server.url + "/v1/images/files/x.png"):
        assert httpx.get(gone).status_code == 404
    monkeypatch.setattr(answers, "KEPT_SECONDS", -1.0)
    assert httpx.get(last[1]["url"]).status_code == 404
    monkeypatch.setitem(server.app.state._state, "files", None)  # as replicas have it
    refused = server.post(prompt="cat", response_format="url")
    assert refused.status_code == 400 and "b64_json" in refused.text
    assert drawn(server.post(prompt="cat"))["data"][0]["url"] is None


def test_a_negative_prompt_is_drawn_away_from(public: Path) -> None:
    pipeline = LanternPipeline.from_pretrained(str(public / "emu3"))
    served_model = make_served_model(pipeline, ServeOptions(str(public / "emu3"), methods=("ar",)))
    asked = ImagesRequest.model_validate({"prompt": "cat", "negative_prompt": "dog", "seed": 1})
    (request,) = read_call(asked, served_model).requests
    assert request.negative == "dog"
    other = replace(request, negative=None)
    setting = served_model.methods["ar"].setting
    first, second = (pipeline.draw([one], setting, decode=False) for one in (request, other))
    assert not np.array_equal(first.tokens, second.tokens)


def test_a_default_beyond_the_codebook_is_all_of_it(pipeline: LanternPipeline) -> None:
    model = pipeline.model
    model.sampling, usual = replace(model.sampling, top_k=100_000), model.sampling
    try:
        served_model = make_served_model(pipeline, ServeOptions("tiny", methods=("ar",)))
        asked = ImagesRequest.model_validate({"prompt": "cat"})
        (request,) = read_call(asked, served_model).requests
        assert request.sampling.top_k == model.vocabulary
    finally:
        model.sampling = usual


def test_a_cut_prompt_is_in_the_answer_and_counted_in_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lantern_hpu.serve"):
        answer = drawn(server.post(prompt="a red cat on blue apple zebra", style="vivid"))
        server.until(lambda: lines_of(caplog))
    (line,) = map(json.loads, lines_of(caplog))
    assert "left out: 'apple zebra'" in " ".join(answer["warnings"])
    assert line["warnings"] == len(answer["warnings"]) and "zebra" not in caplog.text
