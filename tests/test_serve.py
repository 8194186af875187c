"""The server, over a real port and with the official client: pictures, streams, refusals, its end."""

from __future__ import annotations

import base64
import gzip
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import h11
import httpx
import jsonschema
import numpy as np
import openai
import pytest
import torch
import uvicorn
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from numpy.typing import NDArray
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from starlette._utils import get_route_path
from starlette.datastructures import Headers

from lantern_hpu import cli
from lantern_hpu.backends import host
from lantern_hpu.backends.cpu.backend import CPUBackend, threads_set
from lantern_hpu.commands.serve import main
from lantern_hpu.console import KEPT, NonBlockingStream, log_to_stderr
from lantern_hpu.core import Request, Sampling
from lantern_hpu.decode import batch
from lantern_hpu.decode.batch import Batch
from lantern_hpu.decode.engine import Engine
from lantern_hpu.errors import CaptureError, DeviceError, OptionError, as_option
from lantern_hpu.files import VERSION
from lantern_hpu.methods.relaxation import EXACT
from lantern_hpu.models.text.prefix import WordConditioner
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import read_png
from lantern_hpu.serve import app as middleware
from lantern_hpu.serve import process
from lantern_hpu.serve.app import make_app, own_path
from lantern_hpu.serve.decoder import DecodeThread, specs_to_capture
from lantern_hpu.serve.options import MAX_BODY, ServeOptions
from lantern_hpu.serve.process import Protocol, Server
from lantern_hpu.serve.protocol import ONE_SHAPE, ApiError, ImagesRequest
from lantern_hpu.serve.queue import Done, FairShare, Job, JobQueue, Partial
from scripts.serving import serving
from tests.marks import mostly_slow

DEFAULT_TIMEOUT_CONFIG.read = DEFAULT_TIMEOUT_CONFIG.connect = 120.0  # a busy machine is no failure

ROOT = Path(__file__).parent.parent
METHODS = ("lantern++", "ar", "eagle2", "jacobi")
PATH = "/v1/images/generations"
SAMPLING = Sampling(cfg_scale=2.0, temperature=1.0, top_k=0, top_p=1.0)  # of the tiny model


class Running:
    """A server on a port of its own."""

    def __init__(self, decoder: DecodeThread, url: str, app: Any) -> None:
        self.decoder, self.url, self.app = decoder, url, app

    def post(self, **fields: Any) -> httpx.Response:
        return httpx.post(self.url + PATH, json=fields, timeout=300)

    def metric(self, name: str, **labels: str) -> float:
        text = httpx.get(self.url + "/metrics", timeout=300).text
        found = [
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"lantern:{name}" and labels.items() <= sample.labels.items()
        ]
        return sum(found)

    def until(self, holds: Any) -> None:
        end = time.monotonic() + 300
        while not holds():
            assert time.monotonic() < end, "it never happened"
            time.sleep(0.01)


def plainly_loaded(options: ServeOptions) -> DecodeThread:
    """A decode loop that has not begun."""
    return DecodeThread(LanternPipeline.from_pretrained(options.model), options)


def decoder_of(model: Path, slots: int = 2) -> DecodeThread:
    return plainly_loaded(ServeOptions(str(model), methods=("ar",), slots=slots))


@contextmanager
def served(
    options: ServeOptions, load: Callable[[ServeOptions], DecodeThread] = plainly_loaded
) -> Iterator[Running]:
    decoder = load(options)
    app = make_app(options, lambda: decoder)
    listening = process.listen("127.0.0.1", 0)
    port = listening.getsockname()[1]
    how: dict[str, Any] = {"lifespan": "on", "http": Protocol, "loop": "asyncio"}
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, log_level="warning", **how))
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    running = Running(decoder, f"http://127.0.0.1:{port}", app)
    try:
        running.until(lambda: decoder.ready or decoder.failure)
        yield running
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Running]:
    options = ServeOptions(str(model), methods=METHODS, slots=3, queue=12, allow=("greedy",))
    with served(options) as running:
        yield running


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host read takes a while, so that something can happen meanwhile."""
    real = Batch.advance

    def advance(self: Batch, until_first_done: bool = False) -> None:
        time.sleep(0.1)
        real(self, until_first_done)

    monkeypatch.setattr(Batch, "advance", advance)


def pixels(b64: str) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(b64))))


def drawn(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def picture_of(answer: httpx.Response) -> NDArray[np.uint8]:
    return pixels(drawn(answer)["data"][0]["b64_json"])


def wanted(pipeline: LanternPipeline, prompt: str, seed: int, method: str) -> NDArray[np.uint8]:
    return np.asarray(pipeline(prompt, seed=seed, method=method).images[0])


def new_job(
    seed: int = 0,
    method: str = "ar",
    *,
    prompt: str = "cat",
    seconds: float = 300,
    shows: tuple[int, ...] = (),
    send: Any = None,
) -> tuple[Job, list[Any]]:
    """A job of the tiny model, and what it hears."""
    heard: list[Any] = []
    deadline = time.monotonic() + seconds
    return Job(
        Request(prompt, seed, SAMPLING), method, deadline, shows, send or heard.append
    ), heard


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


# Pictures


@pytest.mark.parametrize("method", METHODS)
def test_the_openai_client_draws_what_generate_draws(
    server: Running, client: openai.OpenAI, pipeline: LanternPipeline, method: str
) -> None:
    extra = {"seed": 7, "method": method}
    answer = client.images.generate(
        prompt="red cat", model=server.decoder.served.name, n=2, size="auto", extra_body=extra
    )
    assert answer.data is not None and len(answer.data) == 2
    for i, image in enumerate(answer.data):
        assert image.b64_json is not None
        assert np.array_equal(pixels(image.b64_json), wanted(pipeline, "red cat", 7 + i, method))
    assert answer.usage is not None and answer.usage.output_tokens == 2 * 16
    assert answer.output_format == "png"


def test_the_answer_says_how_to_draw_it_again(server: Running, model: Path, tmp_path: Path) -> None:
    answer = server.post(prompt="apple", method="ar", cfg_scale=3.5, temperature=0.5).json()
    fields = ("seed", "method", "cfg_scale", "temperature", "top_k", "top_p")
    again = server.post(prompt="apple", **{name: answer[name] for name in fields}).json()
    first, second = (pixels(each["data"][0]["b64_json"]) for each in (answer, again))
    assert np.array_equal(first, second)
    file = tmp_path / "x.png"
    file.write_bytes(base64.b64decode(answer["data"][0]["b64_json"]))
    assert read_png(file)["seed"] == answer["seed"]
    from lantern_hpu.commands.generate import main as generate

    assert generate(["--from-png", str(file), "--output", str(tmp_path / "y.png")]) == 0
    assert np.array_equal(np.asarray(Image.open(tmp_path / "y.png")), first)
    metrics = answer["data"][0]["metrics"]
    assert metrics["steps"] == 15 and metrics["tokens_per_step"] == 1
    assert metrics["queue_s"] >= 0 and metrics["steps_s"] > 0 and metrics["text_s"] >= 0


def test_partial_pictures_come_before_the_whole_one(
    client: openai.OpenAI, pipeline: LanternPipeline
) -> None:
    extra = {"seed": 3, "method": "ar"}
    events = list(
        client.images.generate(prompt="blue", stream=True, partial_images=3, extra_body=extra)
    )
    assert [event.type for event in events[:-1]] == ["image_generation.partial_image"] * 3
    assert [getattr(event, "partial_image_index", None) for event in events[:-1]] == [0, 1, 2]
    assert events[-1].type == "image_generation.completed"
    whole = wanted(pipeline, "blue", 3, "ar")
    assert np.array_equal(pixels(events[-1].b64_json), whole)
    first = pixels(events[0].b64_json)
    assert (first[-2:] == 200).all() and not (first[:2] == 200).all()  # the end is not known yet
    assert events[-1].usage.output_tokens == 16


def test_an_image_that_comes_alone_is_drawn_in_a_single_slot(server: Running) -> None:
    lone, many = (slots.engine.step.stats for slots in server.decoder.engines["ar", ONE_SHAPE])
    before = (lone.replays, many.replays)
    assert server.post(prompt="cat", method="ar").status_code == 200
    assert lone.replays > before[0] and many.replays == before[1]


def test_an_image_that_began_alone_begins_again_among_others(
    server: Running, pipeline: LanternPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the same, and no partial picture comes twice."""
    real, waited = DecodeThread.join, list[bool]()

    def join(self: DecodeThread) -> None:
        if self.running and not waited:  # its first partial picture brings the other
            while not self.queue.waiting:
                self.tasks.do_here()
            waited.append(True)
        real(self)

    monkeypatch.setattr(DecodeThread, "join", join)
    other, answers = new_job()
    heard: list[Any] = []

    def tell(event: Any) -> None:
        if not heard:
            server.decoder.submit([other])
        heard.append(event)

    many = server.decoder.engines["ar", ONE_SHAPE][-1].batch.engine.step.stats
    before, queued = many.replays, server.metric("request_queue_time_seconds_count")
    server.decoder.submit([new_job(shows=(1, 2), send=tell)[0]])
    server.until(lambda: answers and not server.decoder.queue.open_jobs)
    assert server.metric("request_queue_time_seconds_count") == queued + 2
    assert many.replays > before
    assert [event.rows for event in heard if isinstance(event, Partial)] == [1, 2]
    for done in (heard[-1], answers[-1]):
        assert isinstance(done, Done) and done.drawn.image is not None
        assert np.array_equal(np.asarray(done.drawn.image), wanted(pipeline, "cat", 0, "ar"))


# Errors of one image

BAD_SEED = 666
PLANTED: dict[str, list[tuple[Any, str, Any]]] = {
    "text": [(WordConditioner, "split", lambda prompt: "bad" in prompt)],
    "admit": [
        (Engine, name, lambda self, prefix, asked, *_: f"seed={BAD_SEED}," in repr(asked))
        for name in ("prefill_batch", "prefill_slot")
    ],
    "step": [(Engine, "run_steps_and_read", lambda self, seeds, *_: BAD_SEED in seeds)],
    "result": [(batch, "read_records", lambda engine, done: f"seed={BAD_SEED}," in repr(done))],
    "pixels": [(LanternPipeline, "picture", lambda self, record: record.seed == BAD_SEED)],
    "send": [],
}


def method_of(function: Any) -> Any:
    """A partial binds to no instance, a function does."""
    return lambda *args: function(*args)


@pytest.mark.parametrize("stage", PLANTED)
def test_an_error_of_one_image_fails_it_alone(
    server: Running,
    pipeline: LanternPipeline,
    stage: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever is raised for one of 21, the others are what `generate` draws, and the server goes on."""

    def planted(real: Any, hits: Any, *args: Any) -> Any:
        if hits(*args):
            raise RuntimeError("planted")
        return real(*args)

    for owner, name, hits in PLANTED[stage]:
        made = partial(planted, getattr(owner, name), hits)
        plain = name == "split"
        monkeypatch.setattr(owner, name, staticmethod(made) if plain else method_of(made))
    decoder, heard = server.decoder, dict[int, Any]()

    def job(seed: int) -> Job:
        def send(event: Any) -> None:
            if stage == "send" and seed == BAD_SEED and isinstance(event, Done):
                raise RuntimeError("planted")
            heard[seed] = event

        return new_job(seed, prompt="bad cat" if seed == BAD_SEED else "cat", send=send)[0]

    seeds = range(20)
    monkeypatch.setattr(decoder, "options", replace(decoder.options, queue=21))
    if stage == "text":  # it is read again for the batch, so that the stage before must stop it
        monkeypatch.setattr(WordConditioner, "prepare", lambda self, ps: list(map(self.split, ps)))
    server.until(lambda: not decoder.queue.open_jobs)
    decoder.submit([*map(job, seeds[:9]), job(BAD_SEED), *map(job, seeds[9:])])
    server.until(lambda: not decoder.queue.open_jobs)
    assert heard[BAD_SEED].status_code == 500 and "err-" in str(heard[BAD_SEED])
    assert "bad cat" not in caplog.text and heard[BAD_SEED].message[-20:] in caplog.text
    assert decoder.failure is None and decoder.ready
    monkeypatch.undo()
    want = pipeline("cat", num_images_per_prompt=20, seed=0, method="ar").images
    assert all(np.array_equal(heard[i].drawn.image, want[i]) for i in seeds)


def test_only_a_device_that_draws_nothing_ends_the_process(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/health` says so before the clients are answered."""
    with served(ServeOptions(str(model), methods=("ar",), slots=2)) as running:

        def broken(*_: Any) -> None:
            raise RuntimeError("the device is gone")

        heard: list[tuple[str, Any]] = []

        def send(event: Any) -> None:
            heard.append((httpx.get(running.url + "/health").json()["status"], event))

        monkeypatch.setattr(Engine, "run_steps_and_read", broken)
        running.decoder.submit([new_job(send=send)[0] for _ in range(3)])
        running.until(lambda: len(heard) == 3)
        assert {status for status, _ in heard} == {"failed"}
        assert all(event.status_code == 500 for _, event in heard)
        assert isinstance(running.decoder.failure, RuntimeError)


# Text and pixels beside the steps


@pytest.fixture
def held_pixels(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, list[int]]]:
    """Pixels are not made before the event, also on one core; the seeds of those that were begun."""
    go, begun, real = threading.Event(), list[int](), LanternPipeline.picture

    def picture(self: LanternPipeline, record: Any) -> Any:
        begun.append(record.seed)
        assert go.wait(100)
        return real(self, record)

    monkeypatch.setattr(LanternPipeline, "picture", picture)
    monkeypatch.setattr(CPUBackend, "overlaps", True)
    yield go, begun
    go.set()


@contextmanager
def decoding(model: Path, slots: int = 2) -> Iterator[DecodeThread]:
    """A decode loop without HTTP."""
    decoder = decoder_of(model, slots=slots)
    decoder.start(wait=True)
    yield decoder
    decoder.stop()


def test_places_are_those_that_starlette_routes() -> None:
    """What a proxy's path is cut from: a guard that sees another path than the router guards nothing."""
    paths = ("/v1/images", "/v/v1/images", "/v", "/v/", "/", "/vv/v1/images", "//v1/images")
    for path in paths:
        for root in ("", "/v", "/v1", "/v/v1"):
            scope = {"path": path, "root_path": root}
            assert own_path(scope) == get_route_path(scope), scope


AZURE = "/openai/deployments/{}/images/generations?api-version=2025-04-01-preview"
# Paths that clients make of a base address, with the status of their answer
BASES = {
    "/v1/images/generations": 200,
    "/v1//images/generations": 200,
    "//v1/images/generations/": 200,
    "/v1/v1/images/generations": 200,
    "/images/generations": 200,
    "/openai/v1/images/generations": 200,
    AZURE.format("of/mine"): 200,
    AZURE.format("dall-e-3"): 404,
    "/v2/images/generations": 404,
    "/v1/images": 404,
}


@pytest.mark.parametrize("path", mostly_slow(BASES, *list(BASES)[2:4]))
@pytest.mark.parametrize("place", ["", "/own"])
def test_base_addresses_are_taken_as_clients_write_them(
    path: str, place: str, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slashes doubled or at the end, /v1 twice or not at all, Azure's paths; and no redirection."""
    options = replace(server.app.state.options, root_path=place)
    monkeypatch.setitem(server.app.state._state, "options", options)
    served = server.decoder.served
    monkeypatch.setattr(server.decoder, "served", replace(served, names=(*served.names, "of/mine")))
    answer = httpx.post(server.url + place + path, json={"prompt": "cat", "seed": 1}, timeout=300)
    assert answer.status_code == BASES[path], answer.text


def until(holds: Any) -> None:
    Running.until(None, holds)  # type: ignore[arg-type]


def seeded(count: int) -> tuple[list[Job], list[int], dict[int, Any]]:
    """Jobs of seeds from 0 on; the seeds in the order of the answers, and the answers."""
    order, heard = list[int](), dict[int, Any]()

    def send(seed: int, event: Any) -> None:
        heard[seed] = event
        order.append(seed)

    jobs = [new_job(seed, send=partial(send, seed))[0] for seed in range(count)]
    return jobs, order, heard


def test_images_go_on_while_the_pixels_of_one_are_made(
    model: Path, pipeline: LanternPipeline, held_pixels: tuple[threading.Event, list[int]]
) -> None:
    """As many as two batches; no others begin then. Answers come in the order in which tokens were there."""
    go, begun = held_pixels
    with decoding(model) as decoder:
        jobs, order, heard = seeded(12)
        decoder.submit(jobs)
        until(lambda: decoder.unpainted >= 4 and not decoder.running)
        time.sleep(0.1)
        assert 4 <= decoder.unpainted <= 6 and begun == [0] and not heard
        assert decoder.queue.queued == 12 - decoder.unpainted
        go.set()
        until(lambda: not decoder.queue.open_jobs)
    assert order == begun and sorted(order) == list(range(12))
    want = pipeline("cat", num_images_per_prompt=12, seed=0, method="ar").images
    assert all(np.array_equal(heard[i].drawn.image, want[i]) for i in range(12))
    for event in heard.values():
        stages = event.text_s + event.prefill_s + event.steps_s + event.decode_s
        assert 0 <= event.queue_s < 100 and event.decode_s > 0 and stages > 0


def test_draining_waits_for_pixels_and_what_is_left_is_answered(
    model: Path, held_pixels: tuple[threading.Event, list[int]]
) -> None:
    go, begun = held_pixels
    with decoding(model) as decoder:
        (job,), _, heard = seeded(1)
        decoder.submit([job])
        until(lambda: begun)
        threading.Timer(0.3, go.set).start()
        assert decoder.stop(60) == 0 and isinstance(heard[0], Done) and not decoder.alive
    go.clear()
    with decoding(model) as decoder:
        jobs, _, heard = seeded(2)
        decoder.submit(jobs)
        until(lambda: len(begun) == 2)
        assert decoder.stop(0.1, wait=0) == 2 and decoder.alive
        assert {event.status_code for event in heard.values()} == {503}
        go.set()
        until(lambda: not decoder.alive)
    assert len(begun) == 2  # the other's pixels were not made for nobody


def test_text_and_pixels_of_clients_that_left_are_not_made(
    model: Path, held_pixels: tuple[threading.Event, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = held_pixels
    read, wait, real = list[str](), threading.Event(), WordConditioner.prepare

    def prepare(self: WordConditioner, prompts: Any) -> None:
        read.extend(prompts)
        if prompts == ["slow"]:
            assert wait.wait(100)
        real(self, prompts)

    with decoding(model) as decoder:
        jobs, _, heard = seeded(3)
        decoder.submit(jobs)
        until(lambda: decoder.unpainted == 3)
        monkeypatch.setattr(WordConditioner, "prepare", prepare)
        texts = [new_job(prompt=prompt)[0] for prompt in ("slow", "never")]
        for text in texts:
            decoder.submit([text])
        until(lambda: read)
        decoder.cancel([*jobs[1:], *texts])
        go.set()
        wait.set()
        until(lambda: not decoder.queue.open_jobs and not decoder.queue.queued)
        assert begun == [0] and list(heard) == [0] and read == ["slow"]
        assert decoder.has_room


def test_pixels_have_the_threads_of_generate_whatever_a_step_takes(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another number of threads rounds otherwise; and an idle thread would slow the steps down."""
    seen, real = list[int](), LanternPipeline.picture

    def picture(self: LanternPipeline, record: Any) -> Any:
        seen.append(torch.get_num_threads())
        return real(self, record)

    monkeypatch.setattr(LanternPipeline, "picture", picture)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        with decoding(model) as decoder:
            with threads_set(1):  # what new threads would begin with
                jobs, *_ = seeded(3)
                decoder.submit(jobs)
                until(lambda: not decoder.queue.open_jobs)
            until(lambda: decoder.alive == [decoder.thread])
    finally:
        torch.set_num_threads(before)
    assert seen == [3, 3, 3]


# Refusals

KIND = {"Content-Type": "application/json"}
DIGITS = "9" * 5000


def post_body(server: Running, body: str | bytes, **headers: str) -> httpx.Response:
    return httpx.post(server.url + PATH, content=body, headers=KIND | headers, timeout=300)


def refusal(server: Running, **fields: Any) -> dict[str, Any]:
    """The error that a request is answered with; JSON spells what httpx would not, such as NaN."""
    answer = post_body(server, json.dumps(fields))
    assert answer.status_code in (400, 404), fields
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert "--" not in error["message"].replace("has --", ""), (fields, error)
    return error


# Of each field of a request; a relaxation's text may hold the name of another field
BAD_VALUES: dict[str, list[Any]] = {
    "prompt": ["", "\u0001", "  \n", "x" * 100_000, "a\x00b", "a\ud800b", 7, ["a"]],
    "negative_prompt": ["x", 5],
    "model": ["foo"],
    "n": [0, 11, 1000, "a", True, 1.5],
    "size": ["5x5", "1024x1024"],
    "seed": [-2, 2**63 - 1, 2**63, 2**80],
    "stream": ["yes"],
    "partial_images": [1, -1],
    "response_format": ["x"],
    "output_format": ["gif", "tiff"],
    "output_compression": [50, 101],
    "quality": ["x", ["high"]],
    "style": ["x"],
    "background": ["x", "transparent"],
    "moderation": ["x"],
    "method": ["eagle", "foo", "\ud800", *(f"eagle2@{tree}" for tree in ("broad_7", "x.json", DIGITS))],
    "relaxation": [
        *("foo", "odd", "seed", "tree", "top_k", "delta-0.2", "tv=9", "tv=2", "tv=0.1", "lambda=1e300"),
        *("omega=1:k=4", "k=4096", "k=-1", "gsd", "gsd:ranks=99", "gsd:ranks=1.5", "gap=0.1"),
        *("delta=0.1:k=1000", "lambda=1:k=2147483648", "lambda=0.1", "lambda=2:delta=0.1"),
        *("tv=0.1:budget=-1", "omega=0.5"),
    ],
    "cfg_scale": [0.5, 1000, "much"],
    "temperature": [50, -1, float("nan"), 10**400],
    "top_k": [-1, 5, 10**9, 2**40],
    "top_p": [2, 0, 0.5, 7, 1e-46],
    "logprobs": [True, "yes", 1],
}  # fmt: skip


@pytest.mark.parametrize("method", mostly_slow(["lantern++", "ar", "eagle2"], "ar"))
def test_every_refusal_names_the_field_that_was_sent(server: Running, method: str) -> None:
    unread = {"user"}
    assert BAD_VALUES.keys() - {"relaxation"} == ImagesRequest.model_fields.keys() - unread
    for field, values in BAD_VALUES.items():
        for value in values:
            sent = {field: value} if field != "relaxation" else {"method": f"{method}:{value}"}
            error = refusal(server, **{"prompt": "cat", "method": method} | sent)
            assert error["param"] == next(iter(sent)), (value, error)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "prompt"),
        ({"prompt": "cat", "n": 2, "stream": True}, "1 while streaming"),
        ({"prompt": "cat", "size": "1024x1024"}, "auto or 8x8"),
        ({"prompt": "cat", "response_format": "url", "stream": True}, "b64_json"),
        ({"prompt": "cat", "method": "magic"}, "lantern++, ar, eagle2"),
        ({"prompt": "cat", "method": "lantern++@chain"}, "chain_2, which lantern++ serves"),
        ({"prompt": "cat", "method": "lantern++@/etc/x.json"}, "chain_2, which lantern++ serves"),
        ({"prompt": "cat", "tree": "chain"}, 'method "auto@chain"'),
        ({"prompt": "cat", "window": 8, "relax": "tv"}, 'method "scd:tv@8"'),
        ({"prompt": "cat", "commit": 4}, "unknown field 'commit'"),
        ({"prompt": "cat", "guidance_scale": 4}, "'guidance_scale'; try cfg_scale"),
        ({"prompt": "cat", "num_inference_steps": 4}, "'num_inference_steps'; try method"),
        ({"prompt": "cat", "num_images": 4}, "'num_images'; try n; allowed"),
        ({"prompt": "cat", "temprature": 1}, "'temprature'; try temperature"),
        ({"prompt": "cat", "top_k": 5}, "where the server has --allow top_k"),
        ({"prompt": "cat", "method": "lantern++:k=31"}, "allowed: k of 0 to"),
        ({"prompt": "cat", "method": "lantern++:residual=official"}, "sound"),
        ({"prompt": "cat", "method": "ar:lambda=2"}, "exact"),
        ({"prompt": "cat", "method": f"eagle2@{DIGITS}"}, "allowed: the tree dynamic"),
        ({"prompt": "cat", "\ud800": 1}, "unicode"),
        ({"prompt": "cat"} | {f"f{i}": 0 for i in range(9_000)}, "more than 64 fields"),
        ({"prompt": "cat", "model": "dall-e-3"}, "allowed: "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_refusal_says_what_is_allowed(server: Running, fields: dict[str, Any], says: str) -> None:
    assert says in refusal(server, **fields)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b" " * (3 << 20),
        b"[1]",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 9000 + b"}",
    ],
    ids=lambda body: repr(body[:9]),
)
def test_what_is_not_an_object_of_json_is_refused(server: Running, body: bytes) -> None:
    answer = post_body(server, body)
    found = answer.status_code, answer.json()["error"]["code"]
    assert found == ((413, "too_large") if len(body) > MAX_BODY else (400, "invalid_json"))


@contextmanager
def connection(server: Running, *lines: str, buffer: int = 0) -> Iterator[socket.socket]:
    """A connection on which some lines of a request were sent, with a buffer for what it does not read."""
    with socket.socket() as made:
        if buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        made.settimeout(300)
        made.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        made.sendall("\r\n".join(lines).encode())
        yield made


def exchange(server: Running, *lines: str) -> bytes:
    """What is answered until the connection is closed."""
    with connection(server, *lines) as made:
        return b"".join(iter(lambda: made.recv(4096), b""))


HEAD = (f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json")
HALF = (*HEAD, "Content-Length: 100", "", "{")


def test_a_client_that_leaves_with_a_second_request_waiting_is_noticed(
    server: Running, slow: None
) -> None:
    """Its images are given up, as without one; more than some kilobytes of further requests are not kept."""
    body = json.dumps({"prompt": "cat", "n": 10, "method": "ar"})
    ask = "\r\n".join((*HEAD, f"Content-Length: {len(body)}", "", body))
    server.until(lambda: not server.decoder.queue.open_jobs)
    with connection(server, ask + "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        server.until(lambda: server.decoder.queue.open_jobs)
    server.until(lambda: not server.decoder.queue.open_jobs)
    drawn = server.metric("request_success_total")
    with connection(server, ask, "") as made, suppress(OSError):
        server.until(lambda: server.decoder.queue.open_jobs)
        for _ in range(64):
            made.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        assert made.recv(1) == b""
    server.until(lambda: not server.decoder.queue.open_jobs)
    assert server.metric("request_success_total") < drawn + 10


def test_a_client_that_does_not_read_is_dropped_and_one_that_reads_is_not(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system's buffers are small, so that they are soon full."""
    real = Protocol.connection_made

    def with_small_buffers(self: Protocol, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        real(self, transport)

    monkeypatch.setattr(Protocol, "connection_made", with_small_buffers)
    monkeypatch.setattr(process, "READ_SECONDS", 0.4)
    page = "GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n"
    pages = [page, page, page + "Connection: close\r\n", ""]
    with connection(server, *pages, buffer=4096) as idle:
        with connection(server, *pages, buffer=4096) as reader:
            got = b""
            while part := reader.recv(4000):  # for longer than the other has
                got += part
                time.sleep(0.06)
        assert got.count(b"HTTP/1.1 200") == 3 and got.endswith(b"}")
        for _ in range(100):  # its system is told when it sends
            time.sleep(0.05)
            try:
                idle.sendall(b"\r\n")
            except ConnectionError:
                return
    pytest.fail("it was not dropped")


def test_a_body_in_tiny_chunks_costs_no_more_than_one_of_a_proper_size(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in events of h11, whatever else has come already; and the answer says why."""
    events, real = list[Any](), h11.Connection.next_event

    def next_event(self: h11.Connection) -> Any:
        events.append(real(self))
        return events[-1]

    monkeypatch.setattr(h11.Connection, "next_event", next_event)
    head, chunk = (*HEAD, "Transfer-Encoding: chunked", "", ""), "1\r\n \r\n"
    with connection(server, *head) as made:
        made.sendall(chunk.encode() * 30_000)
        answer = b""
        with suppress(ConnectionResetError):  # what it did not read was on its way
            while part := made.recv(4096):
                answer += part
    assert len(events) <= process.CHUNKS + 3
    assert sum(isinstance(event, h11.Data) for event in events) == process.CHUNKS + 1
    answer = exchange(server, *head[:-1], chunk * (process.CHUNKS + 1))
    start, _, content = answer.partition(b"\r\n\r\n")
    error = json.loads(content)["error"]  # in OpenAI's form, from below the application too
    assert start.startswith(b"HTTP/1.1 400") and "more than 256 chunks" in error["message"]
    body = json.dumps({"prompt": "cat", "n": 0}).ljust(process.CHUNKS)
    for _ in range(2):  # they are counted for each body
        answers = httpx.post(
            server.url + PATH, content=iter([c.encode() for c in body]), headers=KIND
        )
        assert "greater than" in answers.json()["error"]["message"]


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed(server: Running) -> None:
    """What a proxy takes for its body is no request of its own."""
    inner = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for path in (HEAD[0], "GET /livez HTTP/1.1", "POST /nothing HTTP/1.1"):
        head = (path, *HEAD[1:], f"Content-Length: {5 + len(inner)}", "Transfer-Encoding: chunked")
        answer = exchange(server, *head, "", "0", "", inner)
        assert answer.count(b"HTTP/1.1 ") == 1 and answer.startswith(b"HTTP/1.1 400")
        assert b'"invalid_framing"' in answer


def test_answers_are_sent_at_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once the client has acknowledged the head, which it puts off for 40 ms."""
    seen, real = list[int](), Protocol.connection_made

    def connection_made(self: Protocol, transport: Any) -> None:
        connected = transport.get_extra_info("socket")
        seen.append(connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        real(self, transport)

    monkeypatch.setattr(Protocol, "connection_made", connection_made)
    assert httpx.get(server.url + "/livez").status_code == 200 and seen == [1]


def test_answers_say_what_browsers_may_do_with_them_and_405_what_is_allowed(
    server: Running,
) -> None:
    for path in ("/", "/page.js", "/livez", "/nothing"):
        headers = httpx.get(server.url + path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
    assert httpx.get(server.url + "/v1/nothing").json()["error"]["message"]
    refused = httpx.get(server.url + PATH)
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"
    assert server.app.openapi() is server.app.openapi()


@pytest.mark.parametrize("lines", [(), ("GET / HTTP/1.1", "Host: localhost"), HALF])
def test_a_request_whose_head_or_body_does_not_come_is_dropped(
    server: Running, monkeypatch: pytest.MonkeyPatch, lines: tuple[str, ...]
) -> None:
    monkeypatch.setattr(process, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.2)
    answer = exchange(server, *lines)
    assert answer[:12] == (b"HTTP/1.1 408" if lines is HALF else b"")


def test_a_client_that_leaves_in_the_middle_of_a_body_leaves_one_line(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        with connection(server, *HALF) as made:
            time.sleep(0.2)
            made.close()
        server.until(lambda: caplog.records)
        time.sleep(0.2)
    lines = [r for r in caplog.records if not r.name.startswith(("httpx", "asyncio"))]
    assert [json.loads(line.message)["status"] for line in lines] == [499]


def test_what_a_browser_sends_for_a_foreign_page_draws_nothing(server: Running) -> None:
    """Content types that need no preflight, and names that were pointed here."""
    before = server.metric("request_success_total")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = post_body(server, b'{"prompt": "cat"}', **{"Content-Type": kind})
        assert answer.status_code == 415, kind
        assert answer.json()["error"]["code"] == "unsupported_media_type"
    answer = post_body(server, b'{"prompt": "cat"}', Host="evil.example:8000")
    assert answer.status_code == 403 and "allow_host" in answer.json()["error"]["message"]
    assert httpx.get(server.url, headers={"Host": "evil.example"}).status_code == 403
    assert server.metric("request_success_total") == before


# Of a Host header, and the names that were allowed
KNOWN = ("localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.0.0.7")
UNKNOWN = ("pictures.example", "localhost, localhost", "")  # the second: two of them
NAMED = ("pictures.example:443", "PICTURES.example", "localhost")


def test_hosts_are_addresses_localhost_and_what_was_allowed() -> None:
    assert all(middleware.known_host(header, ()) for header in KNOWN)
    assert not any(middleware.known_host(header, ()) for header in UNKNOWN)
    assert all(middleware.known_host(header, ("pictures.example",)) for header in NAMED)
    assert not middleware.known_host("other.example", ("pictures.example",))
    assert middleware.known_host("other.example", ("*",))


def test_more_images_than_may_wait_are_told_to_come_again(server: Running, slow: None) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.post(prompt="cat", n=10), range(4)))
    statuses = [answer.status_code for answer in answers]
    assert 429 in statuses and 200 in statuses and set(statuses) == {200, 429}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert 1 <= int(refused.headers["Retry-After"]) <= 60
    assert refused.json()["error"]["code"] == "queue_full"


def test_retry_after_is_about_when_there_is_room(server: Running, slow: None) -> None:
    """Twelve wait and three are drawn: a thirteenth has room when the first of those three is done."""
    decoder = server.decoder
    server.until(lambda: not decoder.queue.open_jobs)
    jobs = [new_job()[0] for _ in range(15)]
    decoder.submit(jobs[:3])
    server.until(lambda: decoder.running == 3)
    decoder.submit(jobs[3:])
    with pytest.raises(ApiError) as refused:
        decoder.submit([new_job()[0]])
    began, promised = time.monotonic(), int((refused.value.headers or {})["Retry-After"])
    server.until(lambda: len(decoder.queue.waiting) < 12)
    assert promised <= 1 + 4 * (time.monotonic() - began) + 1
    decoder.cancel(jobs)
    server.until(lambda: not decoder.queue.open_jobs)


@pytest.mark.parametrize(("one", "other"), [(1.0, 16.0), (3.0, 1.0), (1.0, 1.0)])
def test_engines_share_the_time_whatever_a_turn_of_theirs_takes(one: float, other: float) -> None:
    """They are never further apart than the longest turn, and one that was idle has nothing saved up."""
    share, takes = FairShare(), {"one": one, "other": other, "late": 1.0}
    assert share.choose([]) is None
    for turn in range(200):
        busy = ["one", "other"] if turn < 100 else list(takes)
        chosen = share.choose(busy)
        assert chosen is not None
        share.spent[chosen] += takes[chosen]
        spent = [share.spent[name] for name in busy]
        assert max(spent) - min(spent) <= max(takes.values())


def test_jobs_begin_in_their_order_where_there_is_room() -> None:
    queue, cancelled = JobQueue(1.0, lambda: None), new_job(2)[0]
    jobs = [*(new_job(seed)[0] for seed in range(2)), cancelled, new_job(3, "scd")[0]]
    queue.add(jobs)
    queue.text_is_done(jobs)
    cancelled.cancelled = True
    room = {"ar": 1, "scd": 0}
    assert queue.next_jobs(lambda job: job.method, lambda method: room[method]) == {"ar": jobs[:1]}
    assert list(queue.waiting) == [jobs[1], jobs[3]] and cancelled not in queue.open_jobs
    queue.wait_first(jobs[:1])
    found = queue.next_jobs(lambda job: job.method, lambda method: 9)
    assert found == {"ar": jobs[:2], "scd": jobs[3:]} and not queue.waiting


def test_greedy_and_weaker_relaxations_share_the_graph(
    server: Running, pipeline: LanternPipeline
) -> None:
    first, second = (
        picture_of(server.post(prompt="cat", temperature=0, seed=seed, method="ar"))
        for seed in (1, 2)
    )
    assert np.array_equal(first, second)
    exact = picture_of(server.post(prompt="cat", seed=4, method="lantern++:lambda=1"))
    assert np.array_equal(exact, wanted(pipeline, "cat", 4, "eagle:verify=token"))
    assert server.metric("recompiles_after_readiness") == 0


def test_relaxations_that_were_allowed_are_drawn_and_bound_what_tokens_cost(
    model: Path, pipeline: LanternPipeline
) -> None:
    options = ServeOptions(str(model), methods=("scd",), slots=2, allow=("tv", "gsd", "lambda-5"))
    with served(options) as server:
        for asked in ("scd:gsd", "scd:lambda-5", "scd:tv=0.2:budget=0.9"):
            answer = server.post(prompt="cat", method=asked, seed=3)
            result = pipeline("cat", seed=3, method=asked)
            assert np.array_equal(picture_of(answer), np.asarray(result.images[0]))
            assert answer.json()["method"] == asked
        metrics, record = answer.json()["data"][0]["metrics"], result.records[0]
        assert [metrics[n] for n in ("tv_mean", "tv_max", "tv_sum")] == pytest.approx(
            [record.tv_mean, record.tv_max, record.tv_sum]
        )
        assert 0 < metrics["tv_max"] < 0.2001 < metrics["tv_sum"] < 0.9001
        spent, count = server.metric("spec_decode_tv_total"), server.metric("tv_mean_count")
        exact = server.post(prompt="cat", method="scd:tv=0", seed=3).json()["data"][0]
        assert exact["metrics"]["tv_sum"] == 0 and spent >= metrics["tv_sum"]
        assert server.metric("spec_decode_tv_total") == pytest.approx(spent)
        assert server.metric("tv_mean_count") == count + 1
        for asked, field in (("scd:budget=2", "budget"), ("scd:omega-2", "omega")):
            refused = server.post(prompt="cat", method=asked)
            assert refused.status_code == 400 and field in refused.json()["error"]["message"]
        assert server.metric("recompiles_after_readiness") == 0
    with pytest.raises(OptionError, match="gsd cannot be allowed"):
        DecodeThread(pipeline, ServeOptions(str(model), methods=("eagle2", "ar"), allow=("gsd",)))


def test_log_probabilities_that_were_allowed_are_in_each_image(
    model: Path, pipeline: LanternPipeline, server: Running
) -> None:
    options = ServeOptions(
        str(model), methods=("scd", "lantern++"), slots=2, allow=("logprobs", "tv")
    )
    with served(options) as allowing:
        images = allowing.post(prompt="cat", seed=3, n=2, logprobs=True).json()["data"]
        for number, image in enumerate(images):
            (record,) = pipeline("cat", seed=3 + number, method="scd", logprobs=True).records
            assert image["logprobs"] == record.listed_logprobs()["logprobs"]
            assert image["model_logprobs"] == record.listed_logprobs()["model_logprobs"]
        asked = {"prompt": "cat", "seed": 3, "logprobs": True, "stream": True}
        with httpx.stream("POST", allowing.url + PATH, json=asked, timeout=60) as answer:
            (event,) = [json.loads(x[5:]) for x in answer.iter_lines() if x.startswith("data")]
        assert event["logprobs"] == images[0]["logprobs"]
        assert allowing.post(prompt="cat").json()["data"][0]["logprobs"] is None
        for method in ("lantern++", "scd:tv=0.1"):
            error = allowing.post(prompt="cat", logprobs=True, method=method).json()["error"]
            assert (
                error["param"] == "logprobs" and "no distribution that is known" in error["message"]
            )
    error = server.post(prompt="cat", logprobs=True, method="ar").json()["error"]
    assert error["param"] == "logprobs" and "--allow logprobs" in error["message"]


# Those who leave, and those who wait too long


def test_a_client_that_goes_away_frees_its_slot(server: Running, slow: None) -> None:
    before = server.metric("request_cancelled_total")
    fields = {"prompt": "cat", "method": "ar", "stream": True, "partial_images": 3}
    with httpx.stream("POST", server.url + PATH, json=fields, timeout=300) as answer:
        assert next(answer.iter_lines()) == "event: image_generation.partial_image"
        assert server.decoder.running == 1
    server.until(lambda: server.decoder.running == 0)
    soon = httpx.Timeout(60, read=0.05)  # no image is done that soon
    with pytest.raises(httpx.TimeoutException):
        httpx.post(server.url + PATH, json={"prompt": "cat", "method": "ar"}, timeout=soon)
    server.until(lambda: server.metric("request_cancelled_total") == before + 2)
    server.until(lambda: not server.decoder.queue.open_jobs)


def test_an_image_past_its_deadline_is_given_up(server: Running) -> None:
    late, heard = new_job(seconds=-1)
    server.decoder.submit([late])
    server.until(lambda: heard)
    assert isinstance(heard[0], ApiError) and heard[0].status_code == 504
    server.until(lambda: not server.decoder.queue.open_jobs)


# How it is


def test_metrics_count_what_the_answers_said(server: Running) -> None:
    names = {
        "steps": "spec_decode_num_drafts_total",
        "accepted": "spec_decode_num_accepted_tokens_total",
        "images": "request_success_total",
        "tokens": "generation_tokens_total",
    }
    label = {"method": "lantern++"}
    before = {each: server.metric(name, **label) for each, name in names.items()}
    first = server.metric("spec_decode_num_accepted_tokens_per_pos_total", position="0", **label)
    metrics = server.post(prompt="cat", method="lantern++", seed=5).json()["data"][0]["metrics"]
    after = {each: server.metric(name, **label) for each, name in names.items()}
    assert after["steps"] - before["steps"] == metrics["steps"]
    assert after["accepted"] - before["accepted"] == sum(metrics["accepted_by_depth"])
    assert after["images"] - before["images"] == 1 and after["tokens"] - before["tokens"] == 16
    position = server.metric("spec_decode_num_accepted_tokens_per_pos_total", position="0", **label)
    assert position - first == metrics["accepted_by_depth"][0]
    histogram = metrics["speculative_decoding"]["acceptance_histogram"]
    accepted = sum(length * count for length, count in enumerate(histogram))
    assert sum(histogram) == metrics["speculative_decoding"]["num_spec_steps"] == metrics["steps"]
    assert accepted == sum(metrics["accepted_by_depth"]) > 0
    mean = metrics["speculative_decoding"]["mean_acceptance_length"]
    assert mean == pytest.approx(1 + accepted / metrics["steps"], abs=1e-4)
    plain = server.post(prompt="cat", method="ar").json()["data"][0]["metrics"]
    assert plain["speculative_decoding"] is None
    for name in ("num_requests_running", "num_requests_waiting", "slots_in_use_ratio"):
        assert server.metric(name) == 0
    assert server.metric("build_info", version=VERSION, torch=torch.__version__, device="cpu") == 1
    assert "_created" not in httpx.get(server.url + "/metrics").text
    drawn = server.metric("request_success_total")
    for stage in ("text", "prefill", "decode", "pixels"):
        assert server.metric(f"request_{stage}_time_seconds_count") == drawn
    assert server.metric("request_pixels_time_seconds_sum") > 0
    assert server.metric("request_queue_time_seconds_count") >= 1
    assert server.metric("step_time_seconds_count", **label) >= 1


def test_the_dashboard_asks_for_metrics_that_exist(server: Running) -> None:
    board = json.loads((ROOT / "docker" / "grafana.json").read_text())
    text = httpx.get(server.url + "/metrics", timeout=300).text
    # A counter without labels shows its name in the help line alone until it counts
    known = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    for target in (t for panel in board["panels"] for t in panel["targets"]):
        asked = re.findall(r"lantern:\w+", target["expr"])
        assert asked
        for name in asked:
            assert name in known or name.removesuffix("_bucket") in known, name


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of a server's log; a line is written once its answer is sent."""
    return [r.message for r in caplog.records if r.name == "lantern_hpu.serve"]


def test_each_request_leaves_one_line_in_the_log(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"prompt": "cat", "method": "ar", "seed": 5})
    with caplog.at_level("INFO", "lantern_hpu.serve"):
        answer = post_body(server, body, **{"X-Request-Id": "mine"})
        server.post(prompt="cat", n=0)
        server.until(lambda: len(lines_of(caplog)) == 2)
    good, bad = map(json.loads, lines_of(caplog))
    assert answer.headers["X-Request-Id"] == "mine" == good["id"]
    assert (good["status"], good["method"], good["seed"], good["steps"]) == (200, "ar", 5, 15)
    assert bad["status"] == 400 and "greater than" in bad["error"]
    caplog.clear()
    with caplog.at_level("INFO", "lantern_hpu.serve"):
        assert server.post(prompt="a secret \x07").status_code == 400
        server.until(lambda: lines_of(caplog))
    assert "secret" not in caplog.text and "prompt: invalid_value" in caplog.text


def test_it_is_alive_before_it_is_ready_and_says_what_it_serves(server: Running) -> None:
    assert httpx.get(server.url + "/livez").json()["status"] == "alive"
    for path in ("/readyz", "/health"):
        assert httpx.get(server.url + path).status_code == 200
    models = httpx.get(server.url + "/v1/models").json()["data"]
    assert models[0]["id"] == server.decoder.served.name and list(models[0]["methods"]) == [
        *METHODS
    ]
    assert openai.OpenAI(base_url=server.url + "/v1", api_key="x").models.list().data
    assert httpx.get(server.url + "/version").json()["version"]
    methods = models[0]["methods"]
    assert methods["jacobi"]["relaxation"]["rule"] == "lossless"
    assert not methods["ar"]["relaxations"] and models[0]["edits"] == 0
    assert "lambda-5" in methods["lantern++"]["relaxations"]  # served, so the page offers it
    page = httpx.get(server.url + "/").text
    assert "page.js" in page and "fetch(" in httpx.get(server.url + "/page.js").text


def test_answers_and_errors_are_those_of_the_openapi_schema(server: Running) -> None:
    """Each answer has just the fields that `/openapi.json` names, and each status is one it lists."""
    schema = httpx.get(server.url + "/openapi.json").json()
    page = httpx.get(server.url + "/docs")
    policy = page.headers["content-security-policy"]
    for address in re.findall(r"https://[\w.]+", page.text):  # a browser may load them
        assert address in policy
    assert "/openapi.json" in page.text and "'unsafe-inline'" in policy
    operation = schema["paths"][PATH]["post"]

    def check(answer: httpx.Response) -> None:
        stated = operation["responses"][str(answer.status_code)]["content"]["application/json"]
        jsonschema.validate(answer.json(), stated["schema"] | {"components": schema["components"]})

    jsonschema.validate(
        {"prompt": "cat", "seed": 1},
        operation["requestBody"]["content"]["application/json"]["schema"]
        | {"components": schema["components"]},
    )
    assert "422" not in operation["responses"]
    good = server.post(prompt="cat", method="lantern++", n=2)
    assert good.status_code == 200
    check(good)
    for fields in ({"n": 0}, {"model": "x"}, {"what": 1}):
        check(server.post(**{"prompt": "cat", **fields}))
    events = schema["components"]["schemas"]
    with httpx.stream("POST", server.url + PATH, json={"prompt": "a", "stream": True}) as answer:
        event = json.loads(next(x for x in answer.iter_lines() if x.startswith("data:"))[5:])
    jsonschema.validate(event, events["CompletedImage"] | {"components": schema["components"]})


def test_the_examples_of_the_pages_run(model: Path, tmp_path: Path) -> None:
    """As they stand, but for the port and the model, on a server with default methods."""
    page = (ROOT / "docs" / "serving.md").read_text()
    code, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)  # the second: test_edits.py
    requests = re.findall(r"curl http://127\.0\.0\.1:8000(\S+) --json '(.*?)'", page)
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    pattern = r"curl -s http://127\.0\.0\.1:8000(\S+) .*?-d '(.*?)'.*?python3 -c \"(.*?)\"\n"
    ((path, body, script),) = re.findall(pattern, tutorial, re.DOTALL)
    kind = {"Content-Type": "application/json", "Accept": "application/json"}
    with served(ServeOptions(str(model), slots=2)) as server:
        names: dict[str, Any] = {}
        exec(code.replace("http://127.0.0.1:8000", server.url), names)
        assert names["answer"].data[0].b64_json
        for place, content in (*requests, (path, body)):
            answer = httpx.post(server.url + place, content=content, headers=kind, timeout=300)
            assert answer.status_code == 200, answer.text
    command = [sys.executable, "-c", script]
    subprocess.run(command, input=answer.text, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "served.png").read_bytes().startswith(b"\x89PNG")


def test_what_auto_chose_is_served_with_its_tree_and_each_setting_as_written(model: Path) -> None:
    """Also for a single slot, where another tree can be the fastest."""
    pipeline = LanternPipeline.from_pretrained(str(model), device="cpu")
    pipeline.model.fastest = {"cpu:1": ("scd", "scd:3"), "cpu": ("eagle", "flat_4")}

    def trees(*methods: str, slots: int = 3) -> dict[str, str]:
        options = ServeOptions(str(model), methods=methods, slots=slots)
        served_model = DecodeThread(pipeline, options).served
        return {name: served.setting.tree.name for name, served in served_model.methods.items()}

    assert trees("auto", slots=1) == {"scd": "scd:3"}
    assert trees("auto", "ar") == {"eagle": "flat_4", "ar": "root"}
    assert trees("scd@4", "eagle@chain") == {"scd": "scd:4", "eagle": "chain"}
    model_of_defaults = DecodeThread(pipeline, ServeOptions(pipeline.model.name)).served
    assert {"scd", "ar"} <= set(model_of_defaults.methods)  # speculation is offered unasked
    assert model_of_defaults.methods["scd"].setting.relaxation == EXACT
    with pytest.raises(OptionError, match="method has eagle twice"):
        trees("eagle@chain", "eagle@flat_4")


def test_nothing_is_taken_before_readiness_or_while_draining(model: Path) -> None:
    decoder = decoder_of(model)
    with pytest.raises(ApiError, match="not ready yet"):
        decoder.submit([new_job()[0]])
    decoder.ready = True
    taken, heard = new_job()
    decoder.submit([taken])
    decoder.stop()
    with pytest.raises(ApiError, match="about to stop"):
        decoder.submit([new_job()[0]])
    assert isinstance(heard[0], ApiError) and heard[0].status_code == 503


def test_a_recording_that_draws_other_tokens_never_gets_ready(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Engine.run_steps_and_read

    def wrong(self: Engine, *args: Any, **options: Any) -> list[int]:
        known = real(self, *args, **options)
        self.state.tokens.add_(1).remainder_(32)
        return known

    monkeypatch.setattr(Engine, "run_steps_and_read", wrong)
    decoder = decoder_of(model, slots=1)
    decoder.start()
    decoder.thread.join()
    assert isinstance(decoder.failure, CaptureError) and not decoder.ready
    assert "other tokens" in str(decoder.failure)


def test_a_key_is_asked_for_where_there_is_one(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    keyed = replace(server.app.state.options, api_key="secret")
    monkeypatch.setitem(server.app.state._state, "options", keyed)
    wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="guess", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.images.generate(prompt="cat")
    right = openai.OpenAI(base_url=server.url + "/v1", api_key="secret")
    assert right.images.generate(prompt="cat").data
    for sent, status in (("secret", 200), ("guess", 401)):  # as Azure's clients do
        headers = {"api-key": sent}
        assert httpx.get(server.url + "/v1/models", headers=headers).status_code == status
    assert httpx.get(server.url + "/readyz").status_code == 200  # probes have no key
    assert httpx.get(server.url + "/v1/models").status_code == 401
    with connection(server, *HALF) as made:  # who has none is not waited for
        assert made.recv(4096).startswith(b"HTTP/1.1 401")


# The process


def test_a_port_in_use_is_an_error_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["--port", str(taken.getsockname()[1])]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize("key", [None, "secret"])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "::", "gpu-7"])
def test_a_server_that_others_can_use_without_a_key_warns(
    host: str, key: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    warned = key is None and host in ("0.0.0.0", "::", "gpu-7")
    process.warn_if_open(host, key)
    shown = caplog.text
    assert (f"--host {host} is open" in shown) is warned is ("WARNING" in shown)
    assert ("LANTERN_HPU_API_KEY" in shown) is warned


def taken(url: str) -> float:
    """Images that a server draws or has waiting."""
    lines = httpx.get(url + "/metrics").text.splitlines()
    return sum(float(x.split()[-1]) for x in lines if x.startswith("lantern:num_requests_"))


SERVE = [sys.executable, "-m", "lantern_hpu", "serve", "--method", "ar"]


def asked_at_once(pool: ThreadPoolExecutor, child: Any, url: str, count: int, images: int) -> Any:
    """Requests of several images each, of which at least forty images are taken."""
    fields = {"prompt": "cat", "n": images}
    asked = [pool.submit(httpx.post, url + PATH, json=fields, timeout=300) for _ in range(count)]
    while taken(url) < 40:
        assert child.poll() is None
    return asked


@pytest.mark.slow
def test_a_signal_in_the_middle_of_ten_requests_loses_none(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving([*SERVE, "--model", str(model), "--slots", "2"], log, cwd=ROOT) as (url, child):
        with ThreadPoolExecutor(10) as pool:
            asked = asked_at_once(pool, child, url, 10, 6)
            child.send_signal(signal.SIGTERM)
            statuses = [each.result().status_code for each in asked]
        assert child.wait(300) == 0
    # Whoever was taken got a picture; later ones were refused, none was cut off.
    assert set(statuses) <= {200, 503} and statuses.count(200) >= 7
    written = log.read_text()
    assert "SIGTERM: no more requests" in written and "stopped" in written
    assert "Traceback" not in written


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once_and_answers_waiting_requests(tmp_path: Path) -> None:
    """Before any image of the embedded model, which takes many steps, is done."""
    log = tmp_path / "log"
    with (
        serving([*SERVE, "--slots", "2"], log, cwd=ROOT) as (url, child),
        ThreadPoolExecutor(6) as pool,
    ):
        asked = asked_at_once(pool, child, url, 6, 8)
        child.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert child.poll() is None  # it draws what it has taken
        child.send_signal(signal.SIGTERM)
        assert child.wait(300) == 1
        answers = [each.result() for each in asked]
    assert {answer.status_code for answer in answers} == {503}
    assert all(answer.json()["error"]["type"] == "server_error" for answer in answers)
    assert "Traceback" not in log.read_text() and "stopped" in log.read_text()


@contextmanager
def logged_to(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> Iterator[None]:
    """Let the log of a server be a stream's."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        with log_to_stderr():
            yield


@pytest.mark.parametrize("terminal", [False, True])
def test_all_lines_of_the_log_have_one_form(
    server: Running, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a library says, too; a terminal has the same as text."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    with logged_to(monkeypatch, stream):
        process.warn_if_open("0.0.0.0", None)
        logging.getLogger("uvicorn.error").warning("Exceeded %d", 3)
        server.post(prompt="cat", n=0)
        server.until(lambda: stream.getvalue().count("\n") == 3)
    lines = stream.getvalue().splitlines()
    if terminal:
        form = r"\d{4}-\d\d-\d\dT[\d:]{8}\.\d{3}Z (warning|info) (--host|Exceeded 3|\{\"event\")"
        assert all(re.match(form, line) for line in lines), lines
        return
    opened, library, request = map(json.loads, lines)
    assert (opened["level"], library["level"], request["level"]) == ("warning", "warning", "info")
    assert opened["message"].startswith("--host 0.0.0.0 is open")
    assert library["message"] == "Exceeded 3"
    assert (request["status"], request["client"]) == (400, "127.0.0.1")
    assert all(re.fullmatch(r"[\d-]{10}T[\d:.]{12}Z", each["time"]) for each in (opened, request))


def test_a_server_whose_stderr_is_gone_ends_when_it_is_asked(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(io.StringIO):
        def write(self, *_: Any) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(DecodeThread, "stop", lambda *_, **__: 0)
    ending = Server(uvicorn.Config(server.app, log_config=None), server.decoder, 1.0)
    with logged_to(monkeypatch, Gone()):
        ending.drain(signal.SIGTERM)
    assert ending.should_exit


@pytest.mark.slow
def test_what_nobody_reads_on_stderr_holds_no_answer_up(model: Path) -> None:
    """Nor the end, nor does a stdout that is closed. A pipe takes 64 KiB."""
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *SERVE, "--port", "0", "--model", str(model)]
    with subprocess.Popen(shell, cwd=ROOT, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        said = (json.loads(line)["message"] for line in child.stderr)
        url = next(line for line in said if line.startswith("http://")).split()[0]
        try:
            with httpx.Client(timeout=30) as client:
                for _ in range(600):
                    answer = client.post(url + PATH, json={"prompt": "x", "n": 0})
                    assert answer.status_code == 400
            child.send_signal(signal.SIGTERM)
            assert child.wait(30) == 0
        finally:
            child.kill()
        unread = child.stderr.read()
    assert len(unread) > 60_000 and unread.count(b"\n") < 600


def test_texts_for_stderr_wait_for_a_reader_and_are_bounded() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb") as reader, open(writing, "wb", 0) as pipe:
        stream = NonBlockingStream(pipe.fileno(), "ascii")
        for i in range(10_000):
            assert stream.write(f"{i} \u00e4".ljust(99) + "\n") == 100
            stream.flush()
        assert stream.waiting.qsize() <= KEPT
        read = [reader.readline() for _ in range(KEPT // 2)]  # so that there is room
        stream.write("later\n")
        while read[-1] != b"later\n":
            read.append(reader.readline())
        stream.close()
        assert not stream.waiting.unfinished_tasks and stream.write("never") == 0
    lost = [int(json.loads(line)["message"].split()[0]) for line in read if b"are lost" in line]
    numbers = [int(line.split()[0]) for line in read if b" \\xe4 " in line]
    assert numbers == sorted(set(numbers)) and numbers[0] == 0
    assert sum(lost) == 10_000 - len(numbers) > 0 and len(numbers) >= KEPT


def test_the_first_process_of_a_container_ends_at_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for pid, its_own in ((7, False), (1, True)):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        try:
            assert cli.main(["--version"]) == 0
            assert (signal.getsignal(signal.SIGTERM) is not before) == its_own
        finally:
            signal.signal(signal.SIGTERM, before)


def test_images_that_are_not_done_in_time_are_told_so(model: Path, slow: None) -> None:
    decoder = decoder_of(model, slots=1)
    decoder.start()
    decoder.start(wait=True)
    (first, _), (late, heard) = (new_job() for _ in range(2))
    decoder.submit([first, late])  # one slot, so the second waits
    server = Server(uvicorn.Config(make_app(decoder.options, lambda: decoder)), decoder, 0.0)
    server.drain(signal.SIGTERM)
    assert server.lost and server.should_exit
    assert isinstance(heard[0], ApiError) and heard[0].status_code == 503


def test_engines_that_do_not_fit_together_are_refused_before_anything_is_captured(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for the engines of one method, or of both with fewer slots: the refusal says which."""
    pipeline = LanternPipeline.from_pretrained(str(model))
    options = ServeOptions(str(model), methods=("scd", "ar"), slots=6)
    served_model = DecodeThread(pipeline, options).served
    scd, both = (
        [*chain(*specs_to_capture(dict(list(served_model.methods.items())[:n]), 6).values())]
        for n in (1, 2)
    )
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    one, two = pipeline.engines.lacking(scd), pipeline.engines.lacking(both)
    monkeypatch.setattr(host, "available_bytes", lambda: (one + two) // 2)
    with pytest.raises(DeviceError, match="scd, ar with 6 slots do not fit together") as refused:
        DecodeThread(pipeline, options)
    assert not pipeline.engines.engines
    slots, methods = (arg.value for arg in refused.value.hint.args)
    assert isinstance(slots, int) and 1 <= slots < 6 and methods == "scd"
    monkeypatch.setattr(host, "available_bytes", lambda: 0)
    with pytest.raises(DeviceError) as refused:
        DecodeThread(pipeline, options)
    assert refused.value.text(as_option).endswith(
        "--method ar --slots 1, or lantern-hpu models plan --slots 8"
    )
    monkeypatch.setattr(host, "available_bytes", lambda: (one + two) // 2)
    DecodeThread(pipeline, replace(options, slots=slots))
    DecodeThread(pipeline, replace(options, methods=("scd",)))


def test_lanes_hold_their_engines_as_long_as_the_thread_runs(model: Path) -> None:
    decoder = decoder_of(model, slots=2)
    decoder.start(wait=True)
    pipeline = decoder.pipeline
    engines = list(pipeline.engines.engines.values())
    assert not pipeline.engines.shrink(0) and all(engine.pins for engine in engines)
    decoder.stop()
    assert pipeline.engines.shrink(0) and len(engines) == 2


# Behind others: probes, proxies, and clients of other endpoints

GETS = ["/", "/page.js", "/docs", "/openapi.json", "/livez", "/readyz", "/health", "/version"]


@pytest.mark.parametrize("path", [*GETS, "/metrics", "/v1/models", "/v1/models/tiny", "/nothing"])
def test_head_answers_as_get_does_without_a_body(server: Running, path: str) -> None:
    whole, bare = (httpx.request(verb, server.url + path) for verb in ("GET", "HEAD"))
    assert bare.status_code == whole.status_code and bare.content == b""
    assert bare.headers["content-type"] == whole.headers["content-type"]
    allowed = httpx.delete(server.url + path).headers.get("allow", "GET, HEAD")
    assert {*allowed.split(", ")} == {"GET", "HEAD"}


@pytest.mark.parametrize(
    ("path", "status"),
    [("/health", 200), ("/livez", 200), ("/readyz", 200), ("/v1/models", 403), ("/", 403)],
)
def test_probes_of_http_1_0_need_no_host(server: Running, path: str, status: int) -> None:
    answer = exchange(server, f"GET {path} HTTP/1.0", "", "")
    assert answer.startswith(f"HTTP/1.1 {status}".encode())


def test_idle_connections_stay_as_long_as_the_option_says(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dict[str, Any]()

    def config(app: Any, **how: Any) -> None:
        seen.update(how)
        raise KeyboardInterrupt

    monkeypatch.setattr(uvicorn, "Config", config)
    monkeypatch.setattr(process, "load_decoder", lambda options: None)
    for options in (ServeOptions(str(model)), ServeOptions(str(model), keep_alive=12)):
        with pytest.raises(KeyboardInterrupt):
            process.serve(options, "127.0.0.1", 0)
        assert seen["timeout_keep_alive"] == options.keep_alive
    assert ServeOptions().keep_alive == 75


def test_a_stream_that_waits_sends_comments_and_no_proxy_holds_it_back(
    server: Running, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client of OpenAI's API skips them."""
    monkeypatch.setattr(middleware, "SILENT", 0.02)
    body = {"prompt": "red cat", "seed": 7, "stream": True, "method": "ar"}
    with httpx.stream("POST", server.url + PATH, json=body, timeout=300) as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        lines = [*answer.iter_lines()]
    assert lines.count(": waiting") > 1 and lines.count("event: image_generation.completed") == 1
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    extra = {"seed": 7, "method": "ar"}
    events = [*client.images.generate(prompt="red cat", stream=True, extra_body=extra)]
    assert [event.type for event in events] == ["image_generation.completed"]


def url_of(server: Running, headers: dict[str, str]) -> str:
    body = {"prompt": "cat", "method": "ar", "response_format": "url"}
    answer = httpx.post(server.url + PATH, json=body, headers=headers, timeout=300)
    return str(answer.json()["data"][0]["url"] if answer.is_success else answer.json()["error"])


HOST, OVER, AT = "X-Forwarded-Host", "X-Forwarded-Proto", "X-Forwarded-Prefix"
PROXIED: dict[
    str, tuple[dict[str, str], str]
] = {  # headers, and how the address begins, or what is said
    "nothing": ({}, "http://127.0.0.1"),
    "TLS": ({OVER: "https"}, "https://127.0.0.1"),
    "a host": ({HOST: "pics.example.com"}, "http://pics.example.com/v1/"),
    "a host and a port": ({HOST: "pics.example.com:8443"}, "http://pics.example.com:8443/v1/"),
    "a path": ({HOST: "h", AT: "/lantern"}, "http://h/lantern/v1/"),
    "a path with a slash": ({HOST: "h", AT: "/a/b/"}, "http://h/a/b/v1/"),
    "no path": ({HOST: "h", AT: "/"}, "http://h/v1/"),
    "two proxies": ({HOST: "h, inner", AT: "/a, /b", OVER: "https, http"}, "https://h/a/v1/"),
    "an address": ({HOST: "[2001:db8::1]:80"}, "http://[2001:db8::1]:80/v1/"),
    "an odd scheme": ({OVER: "javascript"}, "X-Forwarded-Proto is 'javascript'"),
    "an odd host": ({HOST: "h/../x"}, "X-Forwarded-Host is 'h/../x'"),
    "an odd path": ({AT: "//evil.example"}, "X-Forwarded-Prefix is '//evil.example'"),
}


@pytest.mark.parametrize("kind", PROXIED)
def test_addresses_in_answers_are_those_of_the_proxy(server: Running, kind: str) -> None:
    headers, wanted = PROXIED[kind]
    assert wanted in url_of(server, headers)


@pytest.mark.parametrize(
    ("peer", "named", "believed"),
    [
        ("127.0.0.1", (), True),
        ("::1", (), True),
        ("192.0.2.2", (), True),  # the server's own address: the proxy is on this machine
        ("10.1.2.3", (), False),
        ("10.1.2.3", ("10.0.0.0/8",), True),
        ("::ffff:10.1.2.3", ("10.0.0.0/8",), True),
        ("10.1.2.3", ("10.1.2.4", "fd00::/8"), False),
        ("10.1.2.3", ("*",), True),
        ("gateway", ("10.0.0.0/8",), False),
    ],
)
def test_headers_of_proxies_that_are_not_named_are_not_believed(
    peer: str, named: tuple[str, ...], believed: bool
) -> None:
    scope = {"client": (peer, 9), "server": ("192.0.2.2", 80), "headers": [(b"host", b"h")]}
    sent = Headers({HOST: "pics.example.com", AT: "/x", OVER: "https"})
    options = ServeOptions(forwarded_allow_ips=named, root_path="/own")
    scope |= {"scheme": "http", "path": "/"}
    seen = middleware.as_public(scope, sent, options)
    found = (seen["scheme"], dict(seen["headers"])[b"host"], seen["root_path"])
    assert found == (("https", b"pics.example.com", "/x") if believed else ("http", b"h", "/own"))
    assert scope["scheme"] == "http"


def test_a_server_at_a_path_answers_there_and_its_page_asks_nothing_of_the_root(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = replace(server.app.state.options, root_path="/l")
    monkeypatch.setitem(server.app.state._state, "options", moved)
    for path in ("/health", "/l/health", "/l/v1/models"):
        assert httpx.get(server.url + path).status_code == 200
    address = url_of(server, {HOST: "pics.example.com"})
    assert address.startswith("http://pics.example.com/l/v1/images/files/")
    assert (
        httpx.get(server.url + address.removeprefix("http://pics.example.com")).status_code == 200
    )
    page, script = (httpx.get(server.url + path).text for path in ("/l/", "/l/page.js"))
    assert not re.search(r"""(src|href|fetch)[=(]["'`]/""", page + script)
    for bad in ("l", "/l/", "//x", "/a b"):
        with pytest.raises(OptionError, match="root_path"):
            ServeOptions(root_path=bad)
    with pytest.raises(OptionError, match="forwarded_allow_ips"):
        ServeOptions(forwarded_allow_ips=("proxy.example.com",))


@pytest.mark.parametrize("coding", ["gzip", "br", None])
def test_a_body_that_came_compressed_is_called_so(
    server: Running, coding: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """In the answer and in the log."""
    body = gzip.compress(json.dumps({"prompt": "cat"}).encode())
    headers = KIND | ({"Content-Encoding": coding} if coding else {})
    with caplog.at_level("INFO", "lantern_hpu.serve"):
        answer = httpx.post(server.url + PATH, content=body, headers=headers)
        server.until(lambda: any("error" in line for line in caplog.messages))
    assert answer.status_code == 415
    assert (coding or "gzip") in answer.json()["error"]["message"]
    assert (coding or "gzip") in next(line for line in caplog.messages if "error" in line)


def test_a_seed_of_minus_one_is_random_on_every_surface(
    server: Running, pipeline: LanternPipeline, model: Path, tmp_path: Path
) -> None:
    seeds = [server.post(prompt="cat", seed=-1, method="ar").json()["seed"] for _ in range(2)]
    seeds += [pipeline("cat", seed=-1, method="ar").records[0].seed for _ in range(2)]
    for name in ("a.png", "b.png"):
        words = ["generate", "--model", str(model), "--prompt", "cat", "--method", "ar"]
        assert cli.main([*words, "--seed", "-1", "--output", str(tmp_path / name)]) == 0
        seeds.append(read_png(tmp_path / name)["seed"])
    assert len(set(seeds)) == 6 and min(seeds) >= 0


@pytest.mark.parametrize("size", [10, MAX_BODY + 1, 4 << 20])
def test_edits_are_answered_as_what_is_not_served(client: openai.OpenAI, size: int) -> None:
    """Also where the picture is larger than any body that is read."""
    picture = ("a.png", bytes(size), "image/png")
    asked: dict[str, Callable[[], Any]] = {
        "edit images": lambda: client.images.edit(image=picture, prompt="a red apple"),
        "make variations": lambda: client.images.create_variation(image=picture),
    }
    for what, ask in asked.items():
        with pytest.raises(openai.BadRequestError, match=f"does not {what}") as refused:
            ask()
        assert refused.value.code == "unsupported_operation"


def test_other_endpoints_say_which_one_there_is(client: openai.OpenAI) -> None:
    for ask in (
        lambda: client.embeddings.create(model="x", input="a"),
        lambda: client.audio.transcriptions.create(model="x", file=("a.wav", bytes(99))),
        lambda: client.chat.completions.create(model="x", messages=[]),
    ):
        with pytest.raises(openai.NotFoundError, match=f"images are: POST {PATH}"):
            ask()
