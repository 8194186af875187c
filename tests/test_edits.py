"""Edits over HTTP: forms as clients send them, what is drawn of their pictures, and forms that are meant to do harm."""

from __future__ import annotations

import asyncio
import base64
import copy
import gc
import io
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from starlette.datastructures import UploadFile

from lantern_hpu.commands import generate
from lantern_hpu.core import Request, SourcePicture
from lantern_hpu.decode import batch, engine
from lantern_hpu.decode.pixels import UNKNOWN
from lantern_hpu.errors import OptionError
from lantern_hpu.models.pictures import DiffusionPixels
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import read_png
from lantern_hpu.results.sources import MOST_PIXELS, OpenPicture, open_picture, read_picture
from lantern_hpu.serve import edits, picture_process, process
from lantern_hpu.serve.app import make_app
from lantern_hpu.serve.decoder import DecodeThread, source_prefixes
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.protocol import ApiError, check_graph, read_size
from lantern_hpu.serve.queue import Metrics
from tests.marks import mostly_slow
from tests.published import LUMINA, with_settings
from tests.test_serve import ROOT, Running, connection, drawn, lines_of, served
from tests.test_sources import encoded, header, picture, profile

pytest.importorskip("python_multipart")

PATH = "/v1/images/edits"
FORM_HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
CAT, DOG = (encoded(picture(height, width), "PNG") for height, width in ((32, 48), (40, 40)))


SIZE = (64, 96)  # height and width


def loaded(options: ServeOptions) -> DecodeThread:
    pipeline = LanternPipeline.from_pretrained(options.model, device="cpu", dtype="float32")
    if pipeline.diffusion is not None:
        pipeline.diffusion.options = {"num_inference_steps": 1}
    return DecodeThread(pipeline, options)


def offered(folder: Path, sources: int, **more: Any) -> ServeOptions:
    """Of a server that draws one size from pictures, under the name of `tiny`."""
    usual = ServeOptions(str(folder), served_model_name=("tiny",), methods=("ar",), sizes=(SIZE,))
    return replace(usual, slots=1, sources=sources, **more)


@pytest.fixture(scope="module")
def folder(public: Path) -> Path:
    pytest.importorskip("transformers.models.glm_image")
    pytest.importorskip("diffusers")
    return public / "glm-image"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with served(offered(folder, 2, upload_mib=1), loaded) as running:
        assert running.decoder.failure is None
        yield running


@pytest.fixture(scope="module")
def omni(public: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model whose pictures are seen as they are drawn."""
    goal = tmp_path_factory.mktemp("omni") / "lumina-omni"
    with_settings(public / LUMINA, goal, _name_or_path="Alpha-VLLM/Lumina-mGPT-7B-512-Omni")
    with served(offered(goal, 1), loaded) as running:
        assert running.decoder.failure is None
        yield running


def files(*several: Any, name: str = "image") -> list[tuple[str, Any]]:
    """Parts of a form, as httpx takes them: bytes are a file without a type."""
    return [(name, one if isinstance(one, tuple) else ("upload", one)) for one in several]


def send(server: Running, parts: Any, **fields: Any) -> httpx.Response:
    form = {"prompt": "red cat", "seed": "3", **fields}
    return httpx.post(server.url + PATH, data=form, files=parts, timeout=300)


def failing(error: Exception) -> Callable[..., None]:
    """Raises an error like this one: the same one would keep the frames that it passed."""

    def fail(*_: Any, **more: Any) -> None:
        raise copy.copy(error)

    return fail


def nothing_arrives(server: Running) -> bool:
    return not server.app.state.uploads.arrived


def metadata(b64: str) -> dict[str, Any]:
    with Image.open(io.BytesIO(base64.b64decode(b64))) as image:
        text: Any = getattr(image, "text", {})
    return dict(json.loads(text["lantern_hpu"]))


def digests(answer: dict[str, Any]) -> list[str]:
    known = metadata(answer["data"][0]["b64_json"])
    return [source["digest"] for source in known["config"]["sources"]]


DIGESTS = [read_picture(one).digest for one in (CAT, DOG)]
PNG = {"filename": "image.png", "type": "image/png"}
# Forms as the programs send them, from their sources: fields, the name of the files, and how many
CLIENTS: dict[str, tuple[dict[str, str], str, tuple[Any, ...]]] = {
    "openai, one": ({"n": "1"}, "image", (CAT,)),
    "openai, two": ({"model": "tiny"}, "image[]", (CAT, DOG)),
    "openai for Node": ({}, "image", (("unknown_file", CAT, "application/octet-stream"),)),
    "Open WebUI": (
        {"model": "tiny", "n": "1", "size": "96x64", "response_format": "b64_json"},
        "image[]",
        (("image.png", CAT, "image/png"),),
    ),
    "LibreChat": (
        {"model": "tiny", "quality": "auto", "size": "auto"},
        "image[]",
        (("cat.webp", CAT, "image/webp"), ("dog.png", DOG, "image/png")),
    ),
    "LiteLLM": (
        {"input_fidelity": "high", "quality": "high", "user": "me", "background": "opaque"},
        "image[]",
        (("image.png", CAT, "image/png"),),
    ),
    "images": ({}, "images", (CAT, DOG)),
    "images[]": ({}, "images[]", (CAT, DOG)),
}
# Parts that are none of a list
ODD_NAMES: dict[str, list[tuple[str, Any]]] = {
    "numbered, in another order": [("image[1]", ("b", DOG)), ("image[0]", ("a", CAT))],
    "empty inputs": [*files(CAT, DOG), *files(("", b""), name="mask"), *files(("", b""))],
}


@pytest.mark.parametrize(
    "client", mostly_slow(CLIENTS, "Open WebUI", "LibreChat", "LiteLLM", "images")
)
def test_forms_of_programs_are_drawn(client: str, server: Running) -> None:
    fields, name, pictures = CLIENTS[client]
    answer = drawn(send(server, files(*pictures, name=name), **fields))
    assert digests(answer) == DIGESTS[: len(pictures)]
    given = {name for name, value in fields.items() if value != "auto"}
    idle = given & {"input_fidelity", "quality", "user", "background"}
    assert len(answer["warnings"]) == bool(idle)
    assert all(name in said for said in answer["warnings"] for name in idle)
    assert answer["seed"] == 3


URL = "data:image/png;base64," + base64.b64encode(CAT).decode()
# Bodies of JSON: pictures, and the status and words of their answers
JSON_EDITS: dict[str, tuple[dict[str, Any], int, str]] = {
    "objects": ({"images": [{"image_url": URL}, {"image_url": URL}]}, 200, ""),
    "a text": ({"image": URL}, 200, ""),
    "texts": ({"image": [URL]}, 200, ""),
    "none": ({}, 400, "images is missing; send data URLs"),
    "both": ({"image": URL, "images": [{"image_url": URL}]}, 400, "exclude each other"),
    "an address": ({"images": [{"image_url": "http://127.0.0.1:1/x.png"}]}, 400, "^data:"),
    "a file of OpenAI's": ({"images": [{"file_id": "x"}]}, 400, "image_url"),
    "no base64": ({"image": "data:image/png;base64,%%"}, 400, "cannot be read"),
    "text in a URL": ({"image": "data:text/plain,cat"}, 400, "it is not base64"),
    "no picture": ({"image": "data:image/png;base64,AAAA"}, 400, "it is not PNG"),
    "a mask": ({"image": URL, "mask": URL}, 400, "mask"),
    "another type": ({"image": URL, "n": "2"}, 400, "n is"),
}


@pytest.mark.parametrize("case", mostly_slow(JSON_EDITS, "objects", "an address"))
def test_edits_are_sent_as_json(case: str, server: Running) -> None:
    """As OpenAI's API takes them besides forms, and gateways send them."""
    pictures, status, why = JSON_EDITS[case]
    body = {"prompt": "red cat", "seed": 3, **pictures}
    answer = httpx.post(server.url + PATH, json=body, timeout=300)
    assert answer.status_code == status and why in answer.text, answer.text
    if status == 200:
        sent = len(pictures["images"]) if "images" in pictures else 1
        assert digests(answer.json()) == DIGESTS[:1] * sent
    assert nothing_arrives(server)


def test_a_name_that_is_only_in_its_extended_form_is_a_name(server: Running) -> None:
    head = b'--b\r\nContent-Disposition: form-data; name="'
    named = b"image\"; filename*=UTF-8''%e7%8c%ab.png\r\n\r\n"
    body = head + b'prompt"\r\n\r\nred cat\r\n' + head + named + CAT + b"\r\n--b--\r\n"
    for name in ("multipart/form-data", "Multipart/Form-Data"):
        kind = {"Content-Type": f"{name}; boundary=b"}
        answer = httpx.post(server.url + PATH, content=body, headers=kind, timeout=300)
        assert digests(drawn(answer)) == DIGESTS[:1]


@pytest.mark.parametrize("case", ODD_NAMES)
def test_pictures_have_odd_names(case: str, server: Running) -> None:
    assert digests(drawn(send(server, ODD_NAMES[case]))) == DIGESTS


def test_the_official_client_edits(server: Running, omni: Running) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    one = client.images.edit(image=CAT, prompt="red cat", extra_body={"seed": 7})
    two = client.images.edit(
        image=[io.BytesIO(CAT), ("dog.png", DOG)], prompt="red cat", n=2, size="auto"
    )
    assert one.data and one.data[0].b64_json and two.data and len(two.data) == 2
    known = metadata(one.data[0].b64_json)
    assert known["seed"] == 7 and known["prompt"] == "red cat"
    assert [s["digest"] for s in known["config"]["sources"]] == DIGESTS[:1]
    assert two.usage and two.usage.input_tokens_details.image_tokens == 2 * (6 + 4)
    other = openai.OpenAI(base_url=omni.url + "/v1", api_key="none")
    events = list(other.images.edit(image=CAT, prompt="cat", stream=True, partial_images=1))
    assert [event.type for event in events] == ["image_edit.partial_image", "image_edit.completed"]
    assert isinstance(events[0], openai.types.ImageEditPartialImageEvent)
    with Image.open(io.BytesIO(base64.b64decode(events[0].b64_json))) as half:
        assert half.size == SIZE[::-1] and half.getpixel((5, 60)) == UNKNOWN != half.getpixel(
            (5, 5)
        )
    completed = events[-1]
    assert isinstance(completed, openai.types.ImageEditCompletedEvent)
    assert metadata(completed.b64_json)["config"]["sources"][0]["digest"] == DIGESTS[0]
    for field in ("mask", "background"):
        wrong: Any = {"mask": CAT, "background": "transparent"}
        with pytest.raises(openai.BadRequestError) as caught:
            client.images.edit(image=CAT, prompt="cat", **{field: wrong[field]})
        assert caught.value.param == field


def test_the_example_of_the_page_runs(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "serving.md").read_text()
    _, code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "cat.png").write_bytes(CAT)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code.replace("http://127.0.0.1:8000", server.url), names)
    assert names["answer"].data[0].b64_json


def test_pictures_on_their_way_have_the_size_that_is_drawn(omni: Running) -> None:
    """Of a prompt without pictures too."""
    client = openai.OpenAI(base_url=omni.url + "/v1", api_key="none")
    first, *_ = client.images.generate(prompt="cat", stream=True, partial_images=3)
    assert first.type == "image_generation.partial_image" and first.size == "96x64"
    with Image.open(io.BytesIO(base64.b64decode(first.b64_json))) as quarter:
        assert quarter.size == SIZE[::-1] and quarter.getpixel((5, 20)) == UNKNOWN


def test_the_picture_is_the_one_that_python_draws(server: Running) -> None:
    """Of the size of `--sizes` that is nearest; Python's own default is the picture's size."""
    answer = drawn(send(server, files(CAT, DOG, name="image[]")))
    sources = [Image.open(io.BytesIO(data)) for data in (CAT, DOG)]
    pipeline = server.decoder.pipeline
    how: dict[str, Any] = {"height": SIZE[0], "width": SIZE[1], "method": "ar", "seed": 3}
    result = pipeline("red cat", image=sources, **how)
    with Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))) as got:
        assert got.tobytes() == result.images[0].tobytes()
    assert result.images[0].tobytes() != pipeline("red cat", **how).images[0].tobytes()


@pytest.mark.parametrize(
    ("size", "nearest"), [((32, 48), (64, 96)), ((96, 32), (96, 64)), ((40, 40), (64, 64))]
)
def test_the_usual_size_is_the_nearest_in_proportions(
    size: tuple[int, int], nearest: tuple[int, int], folder: Path, server: Running
) -> None:
    sizes = ((64, 64), (96, 64), (64, 96))
    menu = replace(server.decoder.served, sizes=sizes)
    source = read_picture(picture(*size))
    assert read_size({}, menu, (source,)) == nearest
    assert read_size({}, menu, ()) == sizes[0]


def test_models_say_how_many_pictures_they_read(server: Running) -> None:
    assert httpx.get(server.url + "/v1/models").json()["data"][0]["edits"] == 2
    varied = httpx.post(server.url + "/v1/images/variations", files=files(CAT))
    assert varied.status_code == 400 and "does not make variations" in varied.text


@pytest.mark.parametrize(("sources", "count"), [(0, 0), (1, 3), (2, 3), (3, 3), (4, 4), (16, 4)])
def test_the_largest_photograph_fits_into_what_is_captured(
    sources: int, count: int, server: Running
) -> None:
    """Of GLM-Image as it is published: a photograph of 2048 x 1536 has 3072 codes."""
    config, published = server.decoder.pipeline.model.config, (1536, 2560, 4608, 8704)
    assert config.vision is not None
    vision = replace(config.vision, patch=16, least=512, most=2048)
    target = replace(config.target, source_prefixes=published)
    config = replace(config, target=target, vision=vision)
    assert source_prefixes(config, sources) == published[:count]


def test_pictures_that_do_not_fit_are_refused_with_both_lengths(server: Running) -> None:
    (method,) = server.decoder.served.methods.values()
    need = replace(method.spec, prefix=4608)
    with pytest.raises(ApiError, match=r"4608 tokens, at most 2560 here.*--sources") as caught:
        check_graph(need, method, {})
    assert caught.value.param == "image"


def test_the_schema_has_the_form_where_there_are_edits(server: Running) -> None:
    schema = httpx.get(server.url + "/openapi.json").json()
    body = schema["paths"][PATH]["post"]["requestBody"]
    assert body["required"] and list(body["content"]) == ["multipart/form-data", "application/json"]
    form = schema["components"]["schemas"]["EditsRequest"]
    file = {"type": "string", "format": "binary"}
    assert form["properties"]["image"] == file == form["properties"]["image[]"]["items"]
    for given, count in ((["image"], 0), (["image[]"], 0), ([], 1), (["image", "image[]"], 1)):
        sent = {"prompt": "cat"} | {name: "" if name == "image" else [""] for name in given}
        checked = jsonschema.Draft202012Validator(form | {"components": schema["components"]})
        assert len(list(checked.iter_errors(sent))) == count, given
    off = make_app(
        replace(server.decoder.options, sources=0, upload_mib=64), lambda: server.decoder
    )
    assert PATH not in off.openapi()["paths"] and "EditsRequest" not in str(off.openapi())


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device")])
def test_a_machine_that_is_full_is_no_damaged_form(
    error: Exception, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, method in ((UploadFile, "write"), (Image.Image, "paste")):
        with monkeypatch.context() as patched:
            patched.setattr(kind, method, failing(error))
            assert send(server, files(CAT)).status_code == 500
    assert not server.app.state.uploads.arrived and server.decoder.failure is None


@contextmanager
def sending(server: Running, data: bytes) -> Iterator[None]:
    """A connection on which an edit was sent, and that is closed in the end."""
    request = httpx.Request("POST", server.url + PATH, data={"prompt": "cat"}, files=files(data))
    size, kind = len(request.read()), request.headers["content-type"]
    head = (FORM_HEAD + kind, f"Content-Length: {size}", "", "")
    with connection(server, *head) as made:
        made.sendall(request.read())
        yield


def leave_soon(server: Running) -> None:
    """While its image is drawn."""
    taken = len(server.decoder.queue.open_jobs)
    with sending(server, CAT):
        server.until(lambda: len(server.decoder.queue.open_jobs) > taken)


def fail_to_draw(server: Running) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DiffusionPixels, "__call__", failing(RuntimeError("no")))
        assert send(server, files(CAT)).status_code == 500


HELD: dict[str, Callable[[Running], Any]] = {
    "an image": lambda server: drawn(send(server, files(CAT, DOG, name="image[]"))),
    "several images": lambda server: drawn(send(server, files(CAT), n="2")),
    "a stream": lambda server: send(server, files(CAT), stream="true").raise_for_status(),
    "a refusal": lambda server: send(server, files(CAT), top_k="999999"),
    "a damaged picture": lambda server: send(server, files(CAT, CAT[:900], name="image[]")),
    "an image that fails": fail_to_draw,
    "a client that leaves": leave_soon,
}


@pytest.mark.parametrize("case", mostly_slow(HELD, "an image"))
def test_no_picture_is_held_once_its_request_is_answered(case: str, server: Running) -> None:
    """Nor until the collector of cycles runs, which a server of few objects and large pictures may never see."""
    gc.collect()
    gc.disable()
    pictures = server.app.state.uploads.pictures
    pictures.clear()  # earlier ones may be in an error that was logged meanwhile
    try:
        HELD[case](server)
        server.until(lambda: nothing_arrives(server) and not pictures)
    finally:
        gc.enable()


REFUSED: dict[str, tuple[dict[str, Any], list[tuple[str, Any]], int, str | None]] = {
    "no picture": ({}, [("other", (None, "x"))], 400, "image"),
    "both": ({}, [*files(CAT), *files(DOG, name="image[]")], 400, "image"),
    "three of two": ({}, files(CAT, DOG, CAT), 400, "image"),
    "17 files": ({}, files(*[CAT] * 17, name="image[]"), 400, None),
    "an address": ({"image": "http://127.0.0.1/cat.png"}, [("x", (None, ""))], 400, "image"),
    "an address and a file": ({"image[]": "file:///etc/passwd"}, files(CAT), 400, "image[]"),
    "url": ({"url": "http://127.0.0.1/cat.png"}, files(CAT), 400, "url"),
    "a mask": ({}, [*files(CAT), *files(CAT, name="mask")], 400, "mask"),
    "markup": ({"markup": "a circle"}, files(CAT), 400, "markup"),
    "a foreign file": ({}, [*files(CAT), *files(CAT, name="depth")], 400, "depth"),
    "a file as a prompt": ({}, [*files(CAT), ("prompt", ("a", b"cat"))], 400, "prompt"),
    "svg": ({"output_format": "svg"}, files(CAT), 400, "output_format"),
    "transparent": ({"background": "transparent"}, files(CAT), 400, "background"),
    "no number": ({"n": "two"}, files(CAT), 400, "n"),
    "too many": ({"n": "11"}, files(CAT), 400, "n"),
    "not finite": ({"temperature": "nan"}, files(CAT), 400, "temperature"),
    "a size": ({"size": "9x9"}, files(CAT), 400, "size"),
    "an unknown field": ({"strength": "0.5"}, files(CAT), 400, "strength"),
    "a nested field": ({"svg[precision]": "1"}, files(CAT), 400, "svg[precision]"),
    "no prompt": ({"prompt": ""}, files(CAT), 400, "prompt"),
    "a long field": ({"user": "x" * 100_000}, files(CAT), 400, None),
    "many fields": ({f"x{i}": "1" for i in range(99)}, files(CAT), 400, None),
    "text": ({}, files(b"a red apple"), 400, "image"),
    "nothing": ({}, files(b""), 400, "image"),
    "cut off": ({}, files(encoded(picture(200, 200), "PNG")[:9000]), 400, "image"),
    "a bomb": ({}, files(header(9000, 9000)), 400, "image"),
    "a gif": ({}, files(encoded(picture(), "GIF")), 400, "image"),
    "a small side": ({}, files(encoded(picture(15, 40), "PNG")), 400, "image"),
    "a long side": ({}, files(encoded(picture(20, 81), "PNG")), 400, "image"),
    "a prompt twice": ({"prompt": ["a", "b"]}, files(CAT), 400, "prompt"),
    "a seed twice": ({"seed": ["1", "1"]}, files(CAT), 400, "seed"),
    "a model twice": ({"model": ["tiny", "tiny"]}, files(CAT), 400, "model"),
    "a form above its limit": ({}, files(encoded(picture(700, 700), "PNG")), 413, None),
    "a name": ({}, [("image", ("../../\0\u202e" + "x" * 999, b"no"))], 400, "image"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_forms_that_cannot_be_drawn_are_refused_by_their_field(case: str, server: Running) -> None:
    fields, parts, status, param = REFUSED[case]
    answer = send(server, parts, **fields)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and len(error["message"]) < 1500
    assert not server.decoder.queue.open_jobs


ORIGINS: dict[str, tuple[dict[str, str], bool]] = {
    "a program": ({}, True),
    "our page": ({"Origin": "{url}", "Sec-Fetch-Site": "same-origin"}, True),
    "our page in an old browser": ({"Origin": "{url}"}, True),
    "typed by the user": ({"Sec-Fetch-Site": "none"}, True),
    "our page behind a proxy": (
        {"Origin": "https://a.example", "X-Forwarded-Host": "a.example"},
        True,
    ),
    "another page": ({"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}, False),
    "a page that hides": ({"Origin": "null"}, False),
    "no origin": ({"Sec-Fetch-Site": "cross-site"}, False),
    "another port": ({"Origin": "http://127.0.0.1:9", "Sec-Fetch-Site": "same-site"}, False),
    "an old browser": ({"Origin": "http://evil.example"}, False),
    "a name that begins like ours": ({"Origin": "{url}.evil.example"}, False),
    "a user's name": ({"Origin": "http://{host}@evil.example"}, False),
    "a broken origin": ({"Origin": "http://["}, False),
    "another host": ({"Host": "evil.example", "Origin": "http://evil.example"}, False),
}


@pytest.mark.parametrize("case", ORIGINS)
def test_pages_of_other_origins_cannot_send_forms(case: str, server: Running) -> None:
    """A browser sends a form to any host without asking it first; its headers tell where the page is from."""
    headers, taken = ORIGINS[case]
    host = server.url.removeprefix("http://")
    sent = {name: value.format(url=server.url, host=host) for name, value in headers.items()}
    form = {"prompt": "red cat", "n": "0"}  # which is refused later
    answer = httpx.post(server.url + PATH, data=form, files=files(CAT), headers=sent)
    assert answer.status_code == (400 if taken else 403), answer.text


def test_uploads_under_way_are_bounded_together(server: Running) -> None:
    uploads, local = server.app.state.uploads, "127.0.0.1"
    held = {
        "too many uploads in progress": {
            "10.0.0.1": uploads.most // 2,
            "10.0.0.2": uploads.most // 2,
        },
        "too many uploads of this client": {local: uploads.most // 2 - 100},
    }
    for why, arrived in held.items():
        uploads.arrived.update(arrived)
        try:
            answer = send(server, files(CAT))
        finally:
            uploads.arrived.clear()
        assert answer.status_code == 429 and why in answer.text
        assert answer.headers["Retry-After"]
    send(server, files(b"no"))
    assert nothing_arrives(server)


def test_a_form_without_the_key_is_not_read(folder: Path) -> None:
    app = make_app(offered(folder, 1, api_key="secret"), lambda: pytest.fail("it was loaded"))
    app.state.decoder = SimpleNamespace(metrics=Metrics("tiny", {}))
    client = TestClient(app, base_url="http://localhost")
    answer = client.post(PATH, data={"prompt": "cat"}, files=files(CAT))
    assert answer.status_code == 401 and not app.state.uploads.arrived


def test_what_is_no_form_is_refused(server: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = httpx.post(server.url + PATH, content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 415 and "multipart/form-data" in answer.text


def test_large_pictures_are_bounded_together(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edits, "MOST_PIXELS", 32 * 48 + 40 * 40 - 1)
    answer = send(server, files(CAT, DOG, name="image[]"))
    assert answer.status_code == 400 and "pixels together" in answer.text
    monkeypatch.setattr(edits, "MOST_PIXELS", MOST_PIXELS)
    monkeypatch.setattr(edits, "HELD_PIXELS", 32 * 48 - 1)
    full = send(server, files(CAT))
    assert full.status_code == 429 and full.headers["Retry-After"]
    monkeypatch.setattr(edits, "HELD_PIXELS", 2 * 32 * 48)
    mine = Image.new("RGB", (48, 32))
    server.app.state.uploads.pictures["127.0.0.1", 0] = mine
    full = send(server, files(CAT))
    assert full.status_code == 429 and "of this client in memory" in full.text
    server.app.state.uploads.pictures.clear()
    server.app.state.uploads.pictures["10.0.0.1", 0] = mine
    assert drawn(send(server, files(CAT)))
    server.app.state.uploads.pictures.clear()


def test_clients_are_told_apart_behind_a_proxy(server: Running) -> None:
    """One that holds its half of all uploads keeps nobody else from uploading."""
    uploads = server.app.state.uploads
    uploads.arrived["10.0.0.1"] = uploads.most // 2
    try:
        for client, status in (
            (["10.0.0.1"], 429),
            (["6.6.6.6, 10.0.0.1"], 429),
            (["6.6.6.6", "10.0.0.1"], 429),
            (["10.0.0.1:4567"], 429),
            (["10.0.0.2"], 400),
        ):
            headers = [("X-Forwarded-For", each) for each in client]
            form = {"prompt": "cat", "n": "0"}
            answer = httpx.post(server.url + PATH, data=form, files=files(CAT), headers=headers)
            assert answer.status_code == status, client
    finally:
        uploads.arrived.clear()


def test_bodies_that_do_not_come_shut_nobody_out(server: Running) -> None:
    """However many are announced: what counts is what arrived."""
    head = (FORM_HEAD + "multipart/form-data; boundary=b", "Content-Length: 1048576", "", "--b", "")
    with ExitStack() as held:
        for _ in range(9):
            held.enter_context(connection(server, *head))
        server.until(lambda: server.app.state.uploads.arrived)
        assert drawn(send(server, files(CAT)))
    server.until(lambda: nothing_arrives(server))


def test_processes_that_read_are_few(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many uploads come at once: each waits for its turn with its file alone."""
    real, running, most = picture_process.picture_reader, [0], [0]

    @asynccontextmanager
    async def counted(names: Any) -> AsyncIterator[Any]:
        running[0] += 1
        most[0] = max(most[0], running[0])
        async with real(names) as reader:
            yield reader
        running[0] -= 1

    monkeypatch.setattr(edits, "picture_reader", counted)
    wrong = {"prompt": "cat", "seed": "3", "top_k": "999999"}  # which is refused once they are read
    with ThreadPoolExecutor(12) as pool:
        answers = [*pool.map(lambda _: send(server, files(CAT), **wrong), range(12))]
    assert {answer.status_code for answer in answers} == {400}
    assert 1 < most[0] <= edits.READERS_OF_CLIENT


def test_promise_a_server_that_stops_waits_for_no_upload(folder: Path) -> None:
    """Neither for one that stalls nor for pictures that are being read."""
    with served(offered(folder, 1, upload_timeout=300.0), loaded) as stopping:
        with pytest.MonkeyPatch.context() as patched, ThreadPoolExecutor() as pool:
            patched.setattr(picture_process, "START", "import time; time.sleep(300)")
            reading = pool.submit(send, stopping, files(CAT))
            stopping.until(lambda: stopping.app.state.uploads.arrived)
            began = time.monotonic()
            stopping.decoder.draining = True
            answer = reading.result()
            assert answer.status_code == 503 and time.monotonic() - began < 30
        stopping.decoder.draining = False


def test_a_client_that_leaves_ends_the_process_that_reads(server: Running) -> None:
    """Behind pixels that nobody takes any more, too."""
    uploads = server.app.state.uploads
    large = encoded(Image.new("RGB", (3000, 2900)), "PNG")
    gate = asyncio.Event()
    with pytest.MonkeyPatch.context() as patched:

        async def fill(*_: Any) -> None:
            await gate.wait()

        patched.setattr(picture_process.PictureReader, "fill", fill)
        with sending(server, large):
            server.until(lambda: uploads.readers._value < edits.READERS)
        server.until(lambda: uploads.readers._value == edits.READERS)
    server.until(lambda: nothing_arrives(server))


ENDED = {
    "time": (
        "import sys; limit('RLIMIT_CPU', 1)\nwhile True: pass",
        "more than 3 s of a processor",
    ),
    "a crash": ("import os; os.kill(os.getpid(), 11)", "its decoder ended with code -11"),
    "a fault of ours": ("raise KeyError", "the server failed"),
    "memory": ("raise MemoryError", "to decode it takes more than 250 MB"),
}


@pytest.mark.parametrize("case", ENDED)
def test_a_decoder_that_ends_is_an_answer(
    case: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its own process it ends nothing else."""
    code, why = ENDED[case]
    start = f"""
import json, sys
sys.path = json.loads(sys.argv[1])
from lantern_hpu.serve import picture_process
from lantern_hpu.serve.picture_process import limit
def misbehave(given):
    exec({code!r}, {{"limit": limit}})
picture_process.open_picture = misbehave
picture_process.main()
"""
    monkeypatch.setattr(picture_process, "START", start.replace("{", "{{").replace("}", "}}"))
    answer = send(server, files(CAT))
    assert answer.status_code == (500 if case == "a fault of ours" else 400) and why in answer.text
    server.until(lambda: not server.app.state.uploads.arrived)


def test_pictures_that_take_much_memory_are_refused_before_they_are_decoded() -> None:
    def opened(data: bytes) -> OpenPicture:
        return open_picture(data)

    picture_process.check_decoder(opened(CAT))
    for given in (
        encoded(Image.new("RGB", (4500, 4500)), "WEBP", method=0, quality=1),
        encoded(Image.new("RGB", (6600, 6600)), "JPEG", progressive=True, subsampling=0),
    ):
        with pytest.raises(OptionError) as caught:
            picture_process.check_decoder(opened(given))
        assert "more than 250 MB" in str(caught.value)


def test_a_process_reads_what_read_picture_reads(server: Running) -> None:
    """Bit for bit: of every kind, turned, with a profile, transparent; several of one request."""
    many = [encoded(picture(40, 50, mode), "PNG") for mode in ("L", "RGBA", "RGB")]
    many += [encoded(picture(70, 40), kind) for kind in ("JPEG", "WEBP")]
    many.append(encoded(picture(), "PNG", icc_profile=profile()))

    async def read() -> tuple[SourcePicture, ...]:
        async with picture_process.picture_reader([""] * len(many)) as reader:
            sizes = await reader.sizes([io.BytesIO(one) for one in many])
            return await reader.fill([Image.new("RGB", size, None) for size in sizes])

    for mine, data in zip(asyncio.run(read()), many, strict=True):
        theirs = read_picture(data)
        assert mine == theirs and mine.picture.tobytes() == theirs.picture.tobytes()


@pytest.mark.parametrize("charset", ["GBK", "windows-1251", "ISO-8859-1", "utf-8"])
def test_a_form_is_utf_8_or_refused(charset: str, server: Running) -> None:
    """With 200 another text would be drawn."""
    text = {"GBK": "\u7ea2\u732b", "windows-1251": "\u043a\u043e\u0442"}.get(charset, "caf\u00e9")
    kind = f"text/plain; charset={charset}"
    parts = [("prompt", (None, text.encode(charset), kind)), ("seed", (None, "3")), *files(CAT)]
    answer = httpx.post(server.url + PATH, files=parts, timeout=300)
    if charset != "utf-8":
        assert answer.status_code == 400 and "prompt is not valid UTF-8" in answer.text
        return
    assert metadata(drawn(answer)["data"][0]["b64_json"])["prompt"] == text


def test_fewer_partial_pictures_than_asked_for_are_a_warning(server: Running) -> None:
    """OpenAI says that fewer may come; of pictures that are made whole there are none."""
    answer = send(server, files(CAT), stream="true", partial_images="2")
    assert answer.status_code == 200 and answer.text.count("event:") == 1
    assert "partial_images is 2; the model makes 0 of them" in answer.text


def test_notes_of_a_prompt_count_its_picture(omni: Running) -> None:
    """A long instruction has other room than a long prompt, which stands in a sentence about the size."""
    conditioner = omni.decoder.pipeline.model.condition
    source = (read_picture(CAT),)
    for words in (5, 400, 3000):
        request = Request("cat " * words, sources=source)
        frame = conditioner.sourced.frame  # type: ignore[attr-defined]
        blank = [[[0] * columns] * rows for rows, columns in conditioner.grids(request)]
        kept = len(frame.ids(request.prompt, blank)) - len(frame.ids("", blank))
        whole = len(frame.words(f"{request.prompt} ")) - len(frame.words(" "))
        notes = conditioner.request_notes(request)
        assert bool(notes) == (kept < whole), words
        assert (
            not notes
            or f"those past {len(frame.words(request.prompt)) - (whole - kept)}" in notes[0]
        )


SPOILED = {
    "the target": ("target", "probabilities were NaN in"),
    "the pixel decoder": ("pixels", "its pixels are NaN or infinite"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_image_is_an_error_with_its_reason(
    case: str, omni: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, streamed or not; the next one is drawn."""
    part, why = SPOILED[case]
    model = omni.decoder.pipeline.model
    if part == "pixels":
        assert model.vq is not None
        real = model.vq.decode_codes
        monkeypatch.setattr(model.vq, "decode_codes", lambda *given: real(*given) * torch.nan)
    else:
        real_read = engine.read_records
        monkeypatch.setattr(batch, "read_records", lambda *given: spoil(real_read(*given), why))
    answer = send(omni, files(CAT))
    assert answer.status_code == 500 and f"the image is invalid: {why}" in answer.text
    assert answer.json()["error"]["code"] == "image_invalid"
    streamed = send(omni, files(CAT), stream="true")
    assert "event: error" in streamed.text and why in streamed.text
    monkeypatch.undo()
    assert drawn(send(omni, files(CAT)))


def spoil(records: list[Any], why: str) -> list[Any]:
    return [replace(record, invalid=why) for record in records]


def test_a_stream_of_chunks_may_be_long(server: Running) -> None:
    """As of a client that knows no length: more chunks than a short body may have, if they are not small."""
    request = httpx.Request("POST", server.url, data={"prompt": "cat"}, files=files(CAT))
    body = request.read()
    padding = b"--%b\r\n" % request.headers["content-type"].partition("boundary=")[2].encode()
    padding += b'Content-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    whole = padding + b"x" * (1000 * 1000) + b"\r\n" + body

    def chunks(size: int) -> Iterator[bytes]:
        yield from (whole[i : i + size] for i in range(0, len(whole), size))

    headers = {"Content-Type": request.headers["content-type"]}
    for size in (3500, 2048):
        answer = httpx.post(server.url + PATH, content=chunks(size), headers=headers)
        assert len(whole) / size > process.CHUNKS
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "image"


def hostile(rng: random.Random) -> tuple[bytes, str]:
    """A form that is damaged in one of many ways, and its type."""
    pictures = [CAT, DOG, encoded(picture(), "JPEG"), encoded(picture(), "WEBP")]
    data = bytearray(rng.choice([*pictures, header(60000, 60000)]))
    for _ in range(rng.choice([0, 0, 1, 3])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    names = ["image", "image[]", "mask", "img", "", "image\r\nX: 1", '"', "\0", "prompt"]
    parts = [
        (rng.choice(names[:1] * 20 + names), (rng.choice(["a.png", "", "\r\n"]), bytes(data)))
        for _ in range(rng.choice([0, 1, 1, 1, 2, 17]))
    ]
    values = ["red cat", "", "\ud7ff", "1" * 5000, "{}", "\0", "-1", "1e999", "null"]
    fields = {"prompt": rng.choice(values[:1] * 3 + values)}
    if rng.random() < 0.3:
        fields |= {rng.choice(["n", "seed", "size", "top_k", "x", "relax"]): rng.choice(values)}
    request = httpx.Request("POST", "http://localhost", data=fields, files=parts or {"x": b""})
    body, kind = bytearray(request.read()), request.headers["content-type"]
    for _ in range(rng.choice([0, 0, 0, 1, 4])):
        body[rng.randrange(len(body))] = rng.randrange(256)
    if rng.random() < 0.2:
        del body[rng.randrange(len(body)) :]
    ends = [
        "",
        "",
        "",
        "; charset=utf-7",
        "; charset=hex",
        "; boundary=b",
        ", x",
        "; charset=undefined",
    ]
    kind = kind + rng.choice(ends) if rng.random() < 0.9 else "multipart/form-data"
    return bytes(body), kind


def test_no_form_is_an_error_of_the_server(
    server: Running,
) -> None:
    """Eighty damaged forms: some are drawn, all others refused, none of them is anybody else's trouble."""
    rng, statuses = random.Random(0), list[int]()
    with httpx.Client(timeout=300) as client:
        for _ in range(80):
            body, kind = hostile(rng)
            answer = client.post(server.url + PATH, content=body, headers={"Content-Type": kind})
            statuses.append(answer.status_code)
            assert answer.status_code < 500, (answer.text, body[:300])
    assert {200, 400} <= set(statuses) <= {200, 400, 413, 415}
    assert drawn(send(server, files(CAT)))
    server.until(lambda: not server.decoder.queue.open_jobs)
    assert server.decoder.failure is None


def test_the_log_has_a_line_without_the_prompt(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lantern_hpu.serve"):
        drawn(send(server, files(CAT), prompt="secret cat"))
        send(server, files(b"no", name="image[]"))
        refused = send(server, files(("secret.png", b"no")))
        server.until(lambda: len(lines_of(caplog)) >= 3)
    assert "secret.png" in refused.text
    statuses = [json.loads(line)["status"] for line in lines_of(caplog)]
    assert statuses[-3:] == [200, 400, 400]  # behind those of earlier requests, which may be late
    assert "secret" not in caplog.text


# --------------------------------------------------------------------- sizes and lengths of prompts


@pytest.fixture(scope="module")
def sized(folder: Path) -> Iterator[Running]:
    """Two sizes and two methods, without pictures to draw from."""
    options = offered(folder, 0, methods=("ar", "scd@4"), sizes=(SIZE, SIZE[::-1]))
    with served(replace(options, slots=2), loaded) as running:
        assert running.decoder.failure is None
        yield running


@pytest.mark.slow
def test_the_server_draws_what_the_pipeline_draws_in_each_size(sized: Running) -> None:
    """Six prompts of six lengths in two sizes and two methods, without a capture once it is ready."""
    slots = sized.decoder.all_slots
    assert len(slots) == 2 * 2 * 3 * 2  # methods, sizes, prefixes, and one slot or all
    before = [each.engine.captures for each in slots]
    for i in range(6):
        (height, width), method = (SIZE, SIZE[::-1])[i % 2], ("ar", "scd@4")[i // 2 % 2]
        prompt, size = "apple " * (3 + 50 * i), f"{width}x{height}"
        asked = {"prompt": prompt, "size": size, "seed": i, "method": method.partition("@")[0]}
        answer = drawn(sized.post(**asked))
        got = Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))
        assert answer["size"] == size and got.size == (width, height)
        if i in (0, 3, 5):
            how: dict[str, Any] = {"height": height, "width": width, "seed": i, "method": method}
            result = sized.decoder.pipeline(prompt, **how)
            assert got.tobytes() == result.images[0].tobytes()
    assert [each.engine.captures for each in slots] == before


@pytest.mark.slow
def test_usage_is_of_the_size_and_the_length(sized: Running) -> None:
    usage = [
        drawn(sized.post(prompt="apple " * words, size=size))["usage"]
        for words, size in ((3, "auto"), (300, "64x96"))
    ]
    assert [u["input_tokens"] for u in usage] == [64, 1024]
    # previews of int(16 sqrt(2/3)) x int(16 sqrt(3/2)), and pictures of 2 x 3
    assert [u["output_tokens"] for u in usage] == [13 * 19 + 6, 19 * 13 + 6]
    for fields in ({"size": "128x128"}, {"prompt": "zq" * 600}, {"image": "source.png"}):
        refused = sized.post(**{"prompt": "apple", **fields})
        assert refused.status_code == 400
        assert all(name in refused.json()["error"]["message"] for name in fields)


# ------------------------------------------------------------------------------- on the command line


@pytest.fixture
def cats(tmp_path: Path) -> tuple[str, str]:
    for name, data in (("cat.png", CAT), ("dog.png", DOG)):
        (tmp_path / name).write_bytes(data)
    return str(tmp_path / "cat.png"), str(tmp_path / "dog.png")


def test_an_image_is_drawn_again_from_the_same_pictures_alone(
    folder: Path,
    cats: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a size it is as large as the first picture, in the model's steps."""

    def pixels(_: DiffusionPixels, tokens: Any, *more: Any, **also: Any) -> list[Image.Image]:
        return [Image.frombytes("L", (tokens.shape[1], 1), bytes(tokens[0].tolist()))]

    monkeypatch.setattr(DiffusionPixels, "__call__", pixels)
    first, again = tmp_path / "first.png", tmp_path / "again.png"
    words = ["--model", str(folder), "--method", "ar", "--prompt", "red cat"]
    pictures = ["--image", cats[0], "--image", cats[1]]
    assert generate.main([*words, *pictures, "--output", str(first)]) == 0
    stored = read_png(first)["config"]
    assert [source["digest"] for source in stored["sources"]] == DIGESTS
    assert stored["size"] == [64, 96]
    words = ["--from-png", str(first), "--output", str(again)]
    wrong = {
        (): "0 are given",
        (cats[0],): "1 are given",
        (cats[1], cats[0]): "these are others",
    }
    for given, why in wrong.items():
        others = [part for file in given for part in ("--image", file)]
        assert generate.main([*words, *others]) == 2
        message = capsys.readouterr().err
        assert why in message and "--image" in message and not again.exists()
    assert generate.main([*words, *pictures]) == 0
    assert Image.open(again).tobytes() == Image.open(first).tobytes()
    resume = ["--model", str(folder), "--method", "ar", "--prompt", "red cat", "--resume"]
    assert generate.main([*resume, "--image", cats[0], "--output", str(first)]) == 2
    assert "sources differ" in capsys.readouterr().err
