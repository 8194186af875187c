"""ComfyUI's nodes draw what the server draws, show its progress and its errors, and stop where ComfyUI is interrupted.

`COMFYUI=/path/to/ComfyUI pytest -n 0 tests/test_comfyui.py` runs this with its own classes, where its requirements are.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lantern_hpu.decode.batch import Batch
from lantern_hpu.files import VERSION
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.serve.options import ServeOptions
from scripts.house import parsed
from tests.comfyui_host import FOLDER, Host, loaded
from tests.test_edits import CAT, DOG, files, offered, send
from tests.test_edits import loaded as loaded_for_edits
from tests.test_serve import Running, pixels, served

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytest.importorskip("aiohttp")

VALUES = {
    "prompt": "red cat",
    "seed": 7,
    "batch_size": 1,
    "previews": 2,
    "server": "",
    "api_key": "",
}
OPTIONAL = {
    "method": "auto",
    "size": "auto",
    "negative_prompt": "",
    "cfg_scale": -1,
    "temperature": -1.0,
}


@pytest.fixture
def comfyui() -> Iterator[tuple[Host, ModuleType]]:
    with loaded() as both:
        yield both


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    with served(ServeOptions(str(model), methods=("ar",), slots=3, api_key="secret")) as running:
        yield running


@pytest.fixture(scope="module")
def edits_server(public: Path) -> Iterator[Running]:
    pytest.importorskip("transformers.models.glm_image")
    pytest.importorskip("diffusers")
    with served(offered(public / "glm-image", 2), loaded_for_edits) as running:
        yield running


def nodes_of(module: ModuleType) -> dict[str, Any]:
    async def listed() -> list[Any]:
        extension = await module.comfy_entrypoint()
        await extension.on_load()
        return list(await extension.get_node_list())

    return {node.define_schema().node_id: node for node in asyncio.run(listed())}


def execute(comfyui: tuple[Host, ModuleType], node: str, **values: Any) -> tuple[Any, Any]:
    """The outputs of a node: images [B, H, W, 3], and its report."""
    host, module = comfyui

    async def run() -> Any:
        with host.context():
            return await nodes_of_run[node].execute(**{**VALUES, **OPTIONAL, **values})

    nodes_of_run = nodes_of(module)
    images, report = asyncio.run(run()).result
    return images, json.loads(report)


def bytes_of(images: torch.Tensor) -> Any:
    assert images.dtype == torch.float32 and images.min() >= 0 and images.max() <= 1
    return (images * 255).round().to(torch.uint8).numpy()


def test_the_folder_has_both_nodes_and_their_workflows(comfyui: tuple[Host, ModuleType]) -> None:
    """Each workflow has a value for each field, in its place, and links what fits."""
    nodes = nodes_of(comfyui[1])
    assert set(nodes) == {"LanternTextToImage", "LanternImageEdit"}
    used = set()
    for file in (FOLDER / "example_workflows").iterdir():
        workflow = json.loads(file.read_text())
        (placed,) = [node for node in workflow["nodes"] if node["type"] in nodes]
        used.add(placed["type"])
        schema = nodes[placed["type"]].define_schema()
        schema.validate()
        fields = [part for part in schema.inputs if part.io_type != "IMAGE"]
        values = list(placed["widgets_values"])
        seed = [part.id for part in fields].index("seed")
        assert values.pop(seed + 1) == "randomize"  # what ComfyUI's page does with it after a run
        assert {part.id for part in fields} == VALUES.keys() | OPTIONAL.keys()
        assert all(part.optional == (part.id in OPTIONAL) for part in fields)
        for part, value in zip(fields, values, strict=True):
            assert part.id == "prompt" or part.default == value or part.id == "seed"
        pictures = [part.id for part in schema.inputs if part.io_type == "IMAGE"]
        assert [socket["name"] for socket in placed["inputs"]] == pictures
        assert [socket["name"] for socket in placed["outputs"]] == [o.id for o in schema.outputs]
        sockets = {node["id"]: node for node in workflow["nodes"]}
        for link, source, slot, goal, place, kind in workflow["links"]:
            assert link in sockets[source]["outputs"][slot]["links"]
            assert sockets[source]["outputs"][slot]["type"] == kind
            assert sockets[goal]["inputs"][place]["link"] == link
    assert used == set(nodes)


def test_a_prompt_becomes_the_images_of_generate_and_progress(
    comfyui: tuple[Host, ModuleType], server: Running, pipeline: LanternPipeline
) -> None:
    images, report = execute(
        comfyui, "LanternTextToImage", batch_size=2, server=f"{server.url}/v1/", api_key="secret"
    )
    drawn = [np.asarray(pipeline("red cat", seed=seed, method="ar").images[0]) for seed in (7, 8)]
    assert np.array_equal(bytes_of(images), np.stack(drawn))
    assert [one["seed"] for one in report] == [7, 8] and report[0]["metrics"]["steps"] > 0
    values, most, pictures = zip(*comfyui[0].progress, strict=True)
    assert list(values) == sorted(values) and values[-1] == 6 and set(most) == {6}
    assert all(picture.size == drawn[0].shape[1::-1] for picture in pictures)


def test_an_edit_is_that_of_the_server(
    comfyui: tuple[Host, ModuleType], edits_server: Running
) -> None:
    """Pictures of two sizes, as ComfyUI holds them; what is set is sent."""
    host, _ = comfyui
    pictures = [np.asarray(Image.open(BytesIO(file))) for file in (CAT, DOG)]
    batches = [torch.tensor(picture[None]).float() / 255 for picture in pictures]
    images, report = execute(
        comfyui, "LanternImageEdit", image=batches[0], image_2=batches[1],
        server=edits_server.url, seed=3, size="96x64", temperature=0.5, previews=0,
    )  # fmt: skip
    answer = send(edits_server, files(CAT, DOG, name="image[]"), size="96x64", temperature="0.5")
    assert np.array_equal(bytes_of(images)[0], pixels(answer.json()["data"][0]["b64_json"]))
    assert report[0]["seed"] == 3 and host.progress[-1][:2] == (1, 1)


def test_refusals_are_the_servers_sentences(
    comfyui: tuple[Host, ModuleType], server: Running
) -> None:
    refused: dict[str, dict[str, Any]] = {
        "method is 'eagle9'; allowed: auto, ar": {"method": "eagle9"},
        "prompt": {"prompt": ""},
        "wrong or missing API key": {"api_key": "wrong"},
        "draws prompts": {"node": "LanternImageEdit", "image": torch.zeros(1, 16, 16, 3)},
        "is `lantern-hpu serve` running there?": {"server": "http://127.0.0.1:9"},
        "no answer from pictures": {"server": "pictures"},
    }
    for sentence, values in refused.items():
        given: dict[str, Any] = {
            "node": "LanternTextToImage",
            "server": server.url,
            "api_key": "secret",
            **values,
        }
        with pytest.raises(RuntimeError, match=re.escape(sentence)):
            execute(comfyui, given.pop("node"), batch_size=2, **given)
    assert not comfyui[0].progress


ANSWERS = {
    "before the image was done": "200 OK\r\n\r\n: waiting\n\n",
    "the device is gone": '200 OK\r\n\r\ndata: {"type": "error", "error": {"message": "the device is gone"}}\n\n',
    "answered 404 Not Found: <html>": "404 Not Found\r\n\r\n<html>",
    "answered 307 Moved": "307 Moved\r\nLocation: http://127.0.0.1:9/\r\n\r\n",
    "no answer from": "no HTTP",
}


@pytest.mark.parametrize("sentence", ANSWERS)
def test_what_is_no_answer_of_ours_is_an_error(
    comfyui: tuple[Host, ModuleType], sentence: str
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {ANSWERS[sentence]}".encode())
        writer.close()

    async def run() -> None:
        other = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        node = nodes["LanternTextToImage"]
        async with other:
            with comfyui[0].context():
                await node.execute(**{**VALUES, "server": f"http://127.0.0.1:{port}"})

    nodes = nodes_of(comfyui[1])
    with pytest.raises(RuntimeError, match=re.escape(sentence)):
        asyncio.run(run())


def test_an_interruption_ends_the_node_and_frees_the_servers_slots(
    comfyui: tuple[Host, ModuleType], server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _ = comfyui
    advance = Batch.advance

    def interrupted(self: Batch, until_first_done: bool = False) -> None:
        """Each host read takes a while, and ComfyUI's user cancels in the first one."""
        host.interrupt()
        time.sleep(0.1)
        advance(self, until_first_done)

    monkeypatch.setattr(Batch, "advance", interrupted)
    with pytest.raises(host.Interrupted):
        execute(comfyui, "LanternTextToImage", batch_size=3, server=server.url, api_key="secret")
    assert len(host.progress) < 9  # of three images in three parts
    server.until(lambda: server.metric("num_requests_running") == 0)


def test_the_key_of_the_environment_is_sent_to_the_server_of_the_environment_alone(
    comfyui: tuple[Host, ModuleType],
) -> None:
    """A workflow of somebody else can name any server."""
    of = sys.modules[f"{comfyui[1].__name__}.client"].Server.of
    here, there = "http://127.0.0.1:8000", "https://there"
    key, both = {"LANTERN_HPU_API_KEY": "k"}, {"LANTERN_HPU_API_KEY": "k", "LANTERN_HPU_URL": there}
    for given, environ, wanted in (
        (("", ""), {}, (here, "")),
        (("", ""), key, (here, "k")),
        ((f"{here}/v1", ""), key, (here, "k")),
        ((there, ""), key, (there, "")),
        ((there, "mine"), key, (there, "mine")),
        (("", ""), both, (there, "k")),
        ((here, ""), both, (here, "")),
        ((f" {there}/ ", "mine"), both, (there, "mine")),
    ):
        assert of(*given, environ) == wanted, (given, environ)


def test_the_folder_stands_alone_and_fits_the_registry() -> None:
    """It imports what ComfyUI has, and none of our packages; it is no part of the wheel."""
    has = sys.stdlib_module_names | {"aiohttp", "comfy", "comfy_api", "numpy", "PIL", "torch"}
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(parsed(file)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= has, file
    about = tomllib.loads((FOLDER / "pyproject.toml").read_text())
    assert about["project"]["version"] == VERSION
    assert "comfyui" not in about["project"]["name"].lower()
    assert about["tool"]["comfy"].keys() == {"PublisherId", "DisplayName"}
    ours = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())
    assert not [name for name in ours["tool"]["setuptools"]["packages"] if "comfyui" in name]
