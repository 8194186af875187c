"""The autoregressive stage of SGLang Diffusion: what its client posts is drawn, and is what `generate` draws.

The client itself is tested where the environment variable SGLANG_WHEEL names its wheel, of which one file is read:

    pip download sglang==0.5.23 --no-deps --dest wheels
    SGLANG_WHEEL=wheels/sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl pytest tests/test_sglang.py
"""

from __future__ import annotations

import enum
import importlib.util
import json
import logging
import os
import sys
import types
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fastapi.testclient import TestClient

from lantern_hpu.commands import serve
from lantern_hpu.core import Sampling
from lantern_hpu.errors import OptionError
from lantern_hpu.models.files.load import OpenedModel
from lantern_hpu.serve.app import make_app
from lantern_hpu.serve.decoder import DecodeThread
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.process import load_decoder
from lantern_hpu.serve.sglang import read_framed
from tests.test_serve import Running, served

pytest.importorskip("transformers.models.glm_image")

HEIGHT, WIDTH = 64, 96
PROMPTS = ("a red apple", "apple " * 60)  # of two lengths of prefix
AS_ASKED = {"guidance_scale": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


@pytest.fixture(scope="module")
def folder(public: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The autoregressive stage alone: what makes pixels is on another machine."""
    stage = tmp_path_factory.mktemp("stage") / "glm-image"
    stage.mkdir()
    for part in ("vision_language_encoder", "processor", "model_index.json"):
        (stage / part).symlink_to(public / "glm-image" / part)
    return stage


def options(folder: Path, **more: Any) -> ServeOptions:
    usual = ServeOptions(
        str(folder), methods=("scd@4",), sizes=((HEIGHT, WIDTH),), slots=1, sglang=True
    )
    return replace(usual, **more)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with served(options(folder), load_decoder) as running:
        assert running.decoder.failure is None
        yield running


@cache
def processor(folder: Path) -> Any:
    from transformers import GlmImageProcessor

    return GlmImageProcessor.from_pretrained(folder / "processor")


def posted(folder: Path, prompt: str, seed: int | None = 5) -> dict[str, Any]:
    """A body as SGLang's client posts it: framed by transformers' processor, three settings, and a seed if there is
    one."""
    inputs = processor(folder).apply_chat_template(
        [{"role": "user", "content": [{"type": "text", "text": prompt}]}],
        tokenize=True,
        target_h=HEIGHT,
        target_w=WIDTH,
        return_dict=True,
        return_tensors="pt",
    )
    grids = inputs["image_grid_thw"].tolist()
    count = sum(height * width for _, height, width in grids) + 1
    params = {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True}
    if seed is not None:
        params["sampling_seed"] = seed
    return {
        "input_ids": inputs["input_ids"][0].tolist(),
        "image_data": [{"image_grid_thw": grids}],
        "sampling_params": params,
    }


def several(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: [body[name] for body in bodies] for name in bodies[0]}


def post(server: Running, body: Any, place: str = "/generate") -> httpx.Response:
    return httpx.post(server.url + place, json=body, timeout=300)


@cache
def drawn_here(server: Running, prompt: str, seed: int) -> list[int]:
    """Preview and picture as the pipeline draws them, and what ends them."""
    pipeline = server.decoder.pipeline
    how: dict[str, Any] = {"method": "scd@4", "height": HEIGHT, "width": WIDTH, **AS_ASKED}
    result = pipeline(prompt, seed=seed, output_type="tokens", **how)
    return [*result.tokens[0].tolist(), pipeline.model.codes + 1]


def test_one_prompt_is_drawn_as_generate_draws_it(server: Running, folder: Path) -> None:
    body = posted(folder, PROMPTS[0])
    answer = post(server, body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["output_ids"] == drawn_here(server, PROMPTS[0], 5)
    about = found["meta_info"]
    assert about["prompt_tokens"] == len(body["input_ids"])
    assert about["completion_tokens"] == body["sampling_params"]["max_new_tokens"]
    assert about["completion_tokens"] == len(found["output_ids"])
    assert max(found["output_ids"][:-1]) < server.decoder.pipeline.model.codes
    assert 0 < about["spec_verify_ct"] < about["completion_tokens"]
    slashed = post(server, body, "//generate")  # an address that ends in a slash
    assert slashed.json()["output_ids"] == found["output_ids"]


@pytest.mark.slow
def test_several_prompts_are_a_list_in_their_order(server: Running, folder: Path) -> None:
    bodies = [posted(folder, prompt, 5 + i) for i, prompt in enumerate(PROMPTS)]
    answer = post(server, several(bodies))
    assert answer.status_code == 200, answer.text
    found = [one["output_ids"] for one in answer.json()]
    assert found == [drawn_here(server, prompt, 5 + i) for i, prompt in enumerate(PROMPTS)]
    assert len(post(server, several(bodies[:1])).json()) == 1


@pytest.mark.slow
def test_without_a_seed_pictures_differ(server: Running, folder: Path) -> None:
    bodies = [posted(folder, "dog", None)] * 2
    first, second = post(server, several(bodies)).json()
    assert first["output_ids"] != second["output_ids"]
    again = posted(folder, "dog", first["meta_info"]["sampling_seed"])
    assert post(server, again).json()["output_ids"] == first["output_ids"]


def test_the_law_is_the_one_asked_for_or_the_models(server: Running, folder: Path) -> None:
    whole = several([posted(folder, "dog")])
    (asked,) = read_framed(whole, server.decoder).requests
    assert asked.sampling == Sampling(1.0, 1.0, 0, 1.0)
    assert not any(slots.engine.spec.use_top_p for slots in server.decoder.all_slots)
    pipeline = server.decoder.pipeline
    other = DecodeThread(pipeline, options(folder, model_sampling=True))
    (own,) = read_framed(whole, other).requests
    assert own.sampling == pipeline.model.sampling != asked.sampling
    allowing = DecodeThread(pipeline, options(folder, allow=("top_p",)))
    body = posted(folder, "dog")
    body["sampling_params"] |= {"top_p": 0.75, "top_k": -1}
    assert read_framed(several([body]), allowing).requests[0].sampling.top_p == 0.75


@pytest.mark.slow
def test_an_error_is_one_of_the_server(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.decoder.pipeline, "drawn", lambda *_, **__: 1 / 0)
    failed = post(server, posted(folder, PROMPTS[0]))
    assert failed.status_code == 500 and "the image failed" in failed.text


def test_it_says_that_it_is_healthy_and_draws_no_pictures(server: Running) -> None:
    assert httpx.get(server.url + "/health").status_code == 200
    refused = server.post(prompt="a red apple")
    assert refused.status_code == 404 and "POST /generate" in refused.text
    for place, status in (("/v1/images/edits", 400), ("/v1/embeddings", 404)):
        other = httpx.post(server.url + place, json={})
        assert other.status_code == status and "POST /generate" in other.text


def test_no_more_prompts_are_read_than_may_wait(server: Running) -> None:
    """They are counted before any is looked at."""
    count = server.decoder.options.queue + 1
    body = {"input_ids": [[-1]] * count, "image_data": [[]] * count}
    body["sampling_params"] = [{"max_new_tokens": 1}] * count
    answer = post(server, body)
    assert answer.status_code == 400 and "up to 64 prompts" in answer.text


BAD: dict[str, tuple[str, Any, str]] = {
    "no prompt": ("input_ids", [], "input_ids"),
    "no list": ("input_ids", "apple", "input_ids"),
    "words": ("input_ids", ["apple"], "input_ids"),
    "a token that is not there": ("input_ids", "-1", "input_ids"),
    "a token behind the table": ("input_ids", "1024", "input_ids"),
    "no size at its end": ("input_ids", [1, 2, 3], "input_ids"),
    "too long": ("input_ids", "long", "input_ids"),
    "no picture": ("image_data", [], "image_data"),
    "a size that is not served": ("grid", [[1, 4, 4], [1, 16, 16]], "image_data"),
    "another preview": ("grid", [[1, 2, 3], [1, 13, 18]], "image_data"),
    "a picture to edit": ("grid", [[1, 2, 3], [1, 2, 3], [1, 13, 19]], "image_data"),
    "half a grid": ("grid", [[1, 2]], "image_data"),
    "pixels": ("image_data", [{"pixel_values": [0.5]}], "image_data"),
    "addresses": ("image_data", ["http://127.0.0.1/a.png"], "image_data"),
    "another count": ("max_new_tokens", 12, "max_new_tokens"),
    "no count": ("max_new_tokens", None, "sampling_params"),
    "a filter that is not recorded": ("top_p", 0.5, "top_p"),
    "greedy": ("temperature", 0.0, "temperature"),
    "a temperature out of range": ("temperature", 1e9, "temperature"),
    "no number": ("temperature", float("nan"), "temperature"),
    "a negative seed": ("sampling_seed", -1, "sampling_params"),
    "too large a seed": ("sampling_seed", 2**70, "sampling_params"),
    "an unknown setting": ("min_p", 0.1, "sampling_params"),
    "an unknown field": ("text", "a red apple", "text"),
    "a list and one": ("sampling_params", [], "image_data"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_would_be_another_picture_is_refused(case: str, server: Running, folder: Path) -> None:
    field, value, param = BAD[case]
    body = posted(folder, "dog")
    ids = body["input_ids"]
    if field == "grid":
        body["image_data"] = [{"image_grid_thw": value}]
    elif field in ("input_ids", "image_data", "text"):
        of_ids = {"-1": [-1, *ids], "1024": [1024, *ids], "long": [*ids[:1] * 1024, *ids]}
        body[field] = of_ids.get(value, value) if isinstance(value, str) else value
    elif field == "sampling_params":
        body = several([body, body]) | {field: [body[field]]}
    elif value is None:
        del body["sampling_params"][field]
    else:
        body["sampling_params"][field] = value
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(server.url + "/generate", content=json.dumps(body), headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and len(error["message"]) < 500


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b"null", b"[1]", b'"a"', b"\xff"])
def test_what_is_no_json_object_is_refused(body: bytes, server: Running) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(server.url + "/generate", content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    plain = httpx.post(server.url + "/generate", content=body)
    assert plain.status_code == 415  # as a web page may send it


def test_the_route_is_off_unless_asked_for(model: Path) -> None:
    app = make_app(ServeOptions(str(model)), lambda: pytest.fail("it was loaded"))
    client = TestClient(app, base_url="http://localhost")
    assert client.post("/generate", json={}).status_code == 404


def test_it_is_served_to_this_machine_alone_and_without_a_key(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OpenedModel, "load", lambda *_: pytest.fail("weights were read"))
    assert serve.make_parser().parse_args(["--sglang"]).host == "127.0.0.1"
    assert serve.main(["--model", str(folder), "--port", "0"]) == 2  # for pictures
    assert "diffusion" in capsys.readouterr().err
    with pytest.raises(OptionError, match="SGLang sends no key"):
        replace(options(folder), api_key="secret")


# ------------------------------------------------------------------------------- SGLang's own client

CLIENT = "multimodal_gen/runtime/pipelines_core/stages/model_specific_stages/glm_image.py"


class Stage:
    """In place of SGLang's stages."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def _component_stage_name(self, name: str) -> str:
        return name


def stubs() -> dict[str, dict[str, Any]]:
    """What that file imports of SGLang, by module."""

    def up(size: int) -> int:
        return max(32, (size + 31) // 32 * 32)

    run = "runtime."
    platform = types.SimpleNamespace(get_local_torch_device=lambda: torch.device("cpu"))
    kinds: Any = enum.Enum("kinds", "MAIN_RANK_ONLY_AND_SEND_TO_OTHERS REPLICATED")
    stages = "runtime.pipelines_core.stages."
    return {
        "configs.sample.glmimage": {
            "GLM_IMAGE_RESOLUTION_ALIGNMENT": 32,
            "align_glm_image_resolution": lambda width, height: (up(width), up(height)),
        },
        run + "managers.forward_context": {"set_forward_context": None},
        run + "managers.memory_managers.component_manager": {"ComponentUse": None},
        run + "models.dits.glm_image": {"GlmImageKVCache": None},
        run + "pipelines_core.schedule_batch": {"OutputBatch": object, "Req": object},
        stages + "base": {"PipelineStage": Stage, "StageParallelismType": kinds},
        stages + "decoding": {"DecodingStage": Stage},
        run + "platforms": {"current_platform": platform},
        run + "server_args": {"ServerArgs": object},
        run + "utils.logging_utils": {"init_logger": logging.getLogger},
        run + "utils.precision": dict.fromkeys(
            ("align_tensor_to_module_dtype", "get_module_dtype")
        ),
        run + "utils.vision": {"load_image": None},
    }


@pytest.fixture
def client(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's class that posts, with the tiny processor."""
    wheel = os.environ.get("SGLANG_WHEEL")
    if wheel is None:
        pytest.skip("SGLANG_WHEEL names no wheel of sglang 0.5.23")
    pytest.importorskip("requests")
    made = {"sglang": dict[str, Any](), "sglang.multimodal_gen": dict[str, Any]()}
    made |= {f"sglang.multimodal_gen.{name}": values for name, values in stubs().items()}
    for name, values in made.items():
        module = types.ModuleType(name)
        module.__dict__.update(values, __path__=[])
        monkeypatch.setitem(sys.modules, name, module)
    file = tmp_path / "glm_image.py"
    with zipfile.ZipFile(wheel) as archive:
        file.write_bytes(archive.read(f"sglang/{CLIENT}"))
    spec = importlib.util.spec_from_file_location("sglang_glm_image", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def asked_by_client(client: Any, url: str, folder: Path, prompt: str, **more: Any) -> Any:
    """What SGLang's stage makes of a request to a server at an address."""
    args = types.SimpleNamespace(
        srt_encoder_url=url, srt_encoder_connect_timeout=3.05, srt_encoder_timeout=100
    )
    usual: dict[str, Any] = {
        "height": HEIGHT,
        "width": WIDTH,
        "image_path": None,
        "seed": 5,
        "extra": {},
    }
    asked = types.SimpleNamespace(prompt=prompt, **{"num_outputs_per_prompt": 1} | usual | more)
    return client.GlmImageAR(processor(folder), url).forward(asked, args)


@pytest.mark.parametrize(("count", "slash"), [(1, "/"), (2, "")])
def test_sglangs_own_client_reads_the_answers(
    count: int, slash: str, client: Any, server: Running, folder: Path
) -> None:
    """Its codes are ours, each twice in both directions; its usage is of the whole prompt and of all tokens."""
    several = {"num_outputs_per_prompt": count}
    batch = asked_by_client(client, server.url + slash, folder, PROMPTS[0], **several)
    wanted = [drawn_here(server, PROMPTS[0], 5 + i) for i in range(count)]
    pictures = torch.tensor(wanted)[:, -7:-1].view(count, 2, 3)
    doubled = pictures.repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert torch.equal(batch.prior_token_id, doubled.view(count, -1))
    assert batch.usage["completion_tokens"] == sum(map(len, wanted))


def test_sglangs_own_client_shows_why_a_request_is_refused(
    client: Any, server: Running, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import requests

    with pytest.raises(requests.HTTPError):
        asked_by_client(client, server.url, folder, "dog", height=128, width=128)
    assert f"{WIDTH}x{HEIGHT}" in caplog.text and "--sizes" in caplog.text
