"""Bounded load on a server of this machine: images a second and latencies, against closed batches in the same run.

    python -m scripts.measure.load --images 64 --slots 8

The server runs in a process of its own, on the loopback address, with a model of this machine. Measured are, one
after the other so that none disturbs the other: closed batches of as many images as there are slots; single images
with `generate`'s pipeline; then the server with one client, and with requests that arrive at random (a Poisson
process) faster than it can answer. Only ratios mean something on a machine that others use.

    python -m scripts.measure.load --soak --images 200

sends mixed requests instead, 32 at a time, of which every third is hostile: senseless bodies, other hosts, clients that
leave. It counts the answers and their shapes, holds the server's counters against them, and says how much its memory
grew after the first quarter.

    python -m scripts.measure.load --fair --seconds 60

asks the decode loop for two methods all the time, without HTTP, with a partial picture of each row as the start page
has it, and counts the processor's time that each of them has. That means something on a machine that others use.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from lantern_hpu.methods.request import Request
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import ImageRecord
from lantern_hpu.results.tables import usual_prompts
from lantern_hpu.serve.decoder import DecodeThread, Job, Lane
from lantern_hpu.serve.options import ServeOptions
from scripts import ROOT
from scripts.serving import serving

PATH = "/v1/images/generations"
PATIENT: dict[str, Any] = {"timeout": 3600, "limits": httpx.Limits(max_connections=256)}


@contextmanager
def server(model: str, slots: int, method: str, queue: int) -> Iterator[tuple[str, int]]:
    """The address and the process of a server."""
    options = f"serve --model {model} --slots {slots} --methods {method} --queue {queue}"
    command = [sys.executable, "-m", "lantern_hpu", *options.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        tempfile.NamedTemporaryFile() as log,
        serving(command, Path(log.name), env=environment) as (url, process),
    ):
        yield url, process.pid


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def ask(client: httpx.Client, url: str, prompt: str, seed: int) -> float:
    """Seconds until a picture is there; a full queue is asked again."""
    began = time.perf_counter()
    while True:
        answer = client.post(url + PATH, json={"prompt": prompt, "seed": seed})
        if answer.status_code == 200:
            return time.perf_counter() - began
        assert answer.status_code == 429, answer.text
        time.sleep(float(answer.headers["Retry-After"]))


def closed(pipeline: LanternPipeline, method: str, slots: int, images: int) -> float:
    """Images a second of closed batches, from prompt to PNG."""
    prompts = usual_prompts(pipeline.model.condition.takes_classes)
    several = [prompts[i % len(prompts)] for i in range(slots)]
    pipeline(several, seed=1000, method=method, batch_size=slots)  # warm
    began, batches = time.perf_counter(), max(images // slots, 1)
    for number in range(batches):
        result = pipeline(several, seed=number * slots, method=method, batch_size=slots)
        for index in range(slots):
            result.png(index)
    return batches * slots / (time.perf_counter() - began)


def alone(pipeline: LanternPipeline, method: str, images: int) -> list[float]:
    """Seconds of single images."""
    prompts = usual_prompts(pipeline.model.condition.takes_classes)
    pipeline(prompts[0], method=method)
    seconds = []
    for seed in range(images):
        began = time.perf_counter()
        pipeline(prompts[seed % len(prompts)], seed=seed, method=method).png(0)
        seconds.append(time.perf_counter() - began)
    return seconds


def at_random(
    client: httpx.Client, url: str, rate: float, images: int, prompts: Sequence[str]
) -> tuple[float, Any]:
    """Images a second where requests arrive at a rate, and their latencies.

    The beginning, until the slots fill, and the end, as they empty, count as well.
    """
    rng = random.Random(0)
    with ThreadPoolExecutor(min(images, 256)) as pool:
        began, asked = time.perf_counter(), []
        for seed in range(images):
            asked.append(pool.submit(ask, client, url, prompts[seed % len(prompts)], seed))
            time.sleep(rng.expovariate(rate))
        seconds = [each.result() for each in asked]
    return images / (time.perf_counter() - began), seconds


HOSTILE: list[tuple[bytes, dict[str, str]]] = [
    (b'{"prompt": "a red apple", "n": 0}', {}),
    (b'{"prompt": "a red apple", "size": "3x3"}', {}),
    (b'{"prompt": "\\u0000"}', {}),
    (b'{"prompt": "\\ud800"}', {}),
    (b'{"prompt": null}', {}),
    (b'{"prompt": "a red apple", "method": "none"}', {}),
    (b'{"prompt": "a red apple", "x": 1}', {}),
    (b'{"prompt": "a red apple"', {}),
    (b"[" * 100_000, {}),
    (b"\xff\xfe", {}),
    (b"", {}),
    (b'{"prompt": "a red apple"}', {"Content-Type": "text/plain"}),
    (b'{"prompt": "a red apple"}', {"Host": "evil.example"}),
    (b'{"prompt": "' + b"x" * 2_000_000 + b'"}', {}),
]
SHAPE = {"message", "type", "param", "code"}


def note(asked: Counter[str], answer: httpx.Response) -> None:
    """Count an answer by its status, its images, and whether it has OpenAI's shape."""
    content = answer.json() if "json" in answer.headers.get("content-type", "") else {}
    images = len(content.get("data", []))
    shaped = images if answer.status_code == 200 else set(content.get("error", {})) == SHAPE
    asked.update({str(answer.status_code): 1, "images": images, "shapeless": not shaped})


def mixed(client: httpx.Client, url: str, number: int) -> Counter[str]:
    """One request of a soak; every third is hostile: senseless, or its client disconnects."""
    rng, asked = random.Random(number), Counter[str]()
    headers = {"Content-Type": "application/json"}
    if number % 3 == 0 and rng.random() < 0.8:
        body, more = rng.choice(HOSTILE)
        note(asked, client.post(url + PATH, content=body, headers=headers | more))
        return asked
    fields: dict[str, Any] = {"prompt": "a red apple", "seed": number, "n": rng.randint(1, 3)}
    fields["temperature"] = rng.choice([0.5, 1.0, 1.3])
    fields["cfg_scale"] = rng.choice([1.5, 3.0])
    if number % 3 == 0:
        try:
            note(asked, client.post(url + PATH, json=fields, timeout=rng.uniform(0.01, 0.5)))
        except httpx.TimeoutException:
            asked.update({"left": fields["n"], "leavers": 1})
        return asked
    while True:
        answer = client.post(url + PATH, json=fields)
        note(asked, answer)
        if answer.status_code != 429:
            return asked
        time.sleep(float(answer.headers["Retry-After"]))


def counter(client: httpx.Client, url: str, name: str) -> float:
    """The sum of one of the server's counters over its labels."""
    lines = client.get(url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"lantern:{name}{{"))


def soak(model: str, method: str, slots: int, requests: int) -> dict[str, Any]:
    """Mixed requests, 32 at a time, and whether the server stays as it was and counts what it answered."""
    client, asked = httpx.Client(**PATIENT), Counter[str]()
    with client, server(model, slots, method, 64) as (url, pid), ThreadPoolExecutor(32) as pool:
        for numbers in (range(requests // 4), range(requests // 4, requests)):
            before = resident(pid)  # the second time, after a quarter
            for found in pool.map(lambda number: mixed(client, url, number), numbers):
                asked.update(found)
        while counter(client, url, "num_requests_running"):
            time.sleep(0.1)
        grown = resident(pid) / before - 1
        drawn = counter(client, url, "request_success_total")
        failed = counter(client, url, "request_failure_total")
        recompiled = counter(client, url, "recompiles_after_readiness")
    images, left, leavers = asked["images"], asked["left"], asked["leavers"]
    answers = {status: n for status, n in sorted(asked.items()) if status.isdigit()}
    refused = sum(n for status, n in answers.items() if status != "200")
    add_up = images <= drawn <= images + left and refused <= failed <= refused + leavers
    return {
        "model": model,
        "requests": requests,
        "answers": answers,
        "clients_that_left": leavers,
        "answers_of_another_shape": asked["shapeless"],
        "images": images,
        "metrics_add_up": add_up,
        "recompiles_after_readiness": recompiled,
        "memory_grown_after_a_quarter": round(grown, 4),
    }


class Shares(DecodeThread):
    """The decode loop of `serve`, which also counts what each method has of the processor."""

    def __init__(self, pipeline: LanternPipeline, options: ServeOptions) -> None:
        self.used, self.drawn = defaultdict[str, float](float), Counter[str]()
        super().__init__(pipeline, options)

    @contextmanager
    def counting(self, lane: Lane) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.used[lane.served.setting.method] += time.thread_time() - began

    def admit(self, lane: Lane, jobs: list[Job]) -> None:
        with self.counting(lane):
            super().admit(lane, jobs)

    def advance(self, lane: Lane) -> None:
        with self.counting(lane):
            super().advance(lane)

    def finish(self, lane: Lane, job: Job, done: ImageRecord) -> None:
        super().finish(lane, job, done)
        self.drawn[job.method] += 1

    def keep_busy(self, seconds: float, seeds: Iterator[int]) -> None:
        """As many images of each method as it has slots, and partial pictures of each row."""
        shows, until = tuple(range(1, self.menu.rows)), time.monotonic() + seconds
        takes_classes = self.pipeline.model.condition.takes_classes
        prompt, sampling = usual_prompts(takes_classes)[0], self.menu.sampling
        while time.monotonic() < until and self.failure is None:
            there = Counter(job.method for job in list(self.open_jobs))
            for method, served in self.menu.methods.items():
                for _ in range(self.options.slots - there[method]):
                    request = Request(prompt, next(seeds), sampling, served.setting.relaxation)
                    self.submit([Job(request, method, math.inf, shows, lambda event: None)])
            time.sleep(0.02)


def fair(model: str, settings: str, slots: int, seconds: float) -> dict[str, Any]:
    """What each of several methods has of the processor's time while all are asked for; threads: one."""
    options = ServeOptions(model, methods=tuple(settings.split(",")), slots=slots)
    loop = Shares(LanternPipeline.from_pretrained(model, threads=1), options)
    loop.start(wait=True)
    seeds = count()
    loop.keep_busy(seconds / 4, seeds)  # so that all are there
    used, drawn = dict(loop.used), Counter(loop.drawn)
    loop.keep_busy(seconds, seeds)
    spent = {name: loop.used[name] - used.get(name, 0.0) for name in loop.menu.methods}
    images = {name: loop.drawn[name] - drawn[name] for name in loop.menu.methods}
    loop.stop()
    total = sum(spent.values())
    return {
        "model": model,
        "methods": {name: str(served.setting) for name, served in loop.menu.methods.items()},
        "slots": slots,
        "seconds": seconds,
        "processor_s": {name: round(time, 3) for name, time in spent.items()},
        "images": images,
        "times_an_equal_share": {
            name: round(len(spent) * time / total, 4) for name, time in spent.items()
        },
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles([*seconds, *seconds], n=100, method="inclusive")
    return {f"p{p}": round(cuts[p - 1], 4) for p in (50, 90, 99)}


def measure(model: str, method: str, slots: int, images: int) -> dict[str, Any]:
    pipeline = LanternPipeline.from_pretrained(model)
    prompts = usual_prompts(pipeline.model.condition.takes_classes)
    together, single = closed(pipeline, method, slots, images), alone(pipeline, method, slots)
    pipeline.close()
    client = httpx.Client(**PATIENT)
    with client, server(model, slots, method, images + 1) as (url, pid):
        ask(client, url, prompts[0], 0)  # what the first request alone does
        lone = [ask(client, url, prompts[seed % len(prompts)], seed) for seed in range(slots)]
        before = resident(pid)
        rate, seconds = at_random(client, url, 4 * together, images, prompts)
        recompiled = counter(client, url, "recompiles_after_readiness")
        grown = resident(pid) / before - 1
    return {
        "model": model,
        "method": method,
        "slots": slots,
        "images": images,
        "closed_images_per_s": round(together, 4),
        "served_images_per_s": round(rate, 4),
        "served_to_closed": round(rate / together, 4),
        "alone_s": spread(single),
        "served_alone_s": spread(lone),
        "served_alone_to_alone_p50": round(statistics.median(lone) / statistics.median(single), 4),
        "saturated_s": spread(seconds),
        "recompiles_after_readiness": recompiled,
        "memory_grown": round(grown, 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts.measure.load", description=__doc__)
    add = parser.add_argument
    add("--model", default="builtin")
    add("--method", default="ar")
    add("--slots", type=int, default=8)
    add("--images", type=int, default=64, help="of each measurement")
    add("--soak", action="store_true", help="mixed requests instead, 32 at a time")
    add("--fair", action="store_true", help="two methods beside each other instead")
    add("--seconds", type=float, default=40.0, help="of each part of --fair (40)")
    args = parser.parse_args(argv)
    if args.fair:
        settings = args.method if "," in args.method else "ar,scd@16"
        found = fair(args.model, settings, args.slots, args.seconds)
    else:
        what = soak if args.soak else measure
        found = what(args.model, args.method, args.slots, args.images)
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
