"""Bounded load on a server of this machine: images a second and latencies, against closed batches in the same run.

    python -m scripts.measure.load --num-images 64 --slots 8

The server runs in a process of its own, on the loopback address, with a model of this machine. Measured are, one
after the other so that none disturbs the other: closed batches of as many images as there are slots; single images
with `generate`'s pipeline; then the server with one client, and with requests that arrive at random (a Poisson
process) faster than it can answer. Only ratios mean something on a machine that others use.

    python -m scripts.measure.load --soak --minutes 20 --method ar,scd@16

sends mixed requests instead, 32 at a time, of which every third is hostile (`scripts/measure/hostile.py`). It compares
images with those of `generate`, counts answers and their shapes, holds the server's counters against them, and says
what the server held of memory, descriptors and threads when it was ready, after a quarter, and in the end.

    python -m scripts.measure.load --clients 4 --num-images 32 --model FOLDER [--checkout OTHER]

keeps clients waiting for an image each, and says how many images a second they have. `--checkout` has the code of
another version serve, so that the two can be compared.

    python -m scripts.measure.load --fair --seconds 60

asks the decode loop for two methods all the time, without HTTP, with a partial picture of each row as the start page
has it, and counts the processor's time that each of them has. That means something on a machine that others use.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from PIL import Image

from lantern_hpu.core import ImageRecord, Request
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.prompts import usual_prompts
from lantern_hpu.serve.decoder import DecodeThread
from lantern_hpu.serve.engines import EngineSlots
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.queue import Job
from scripts import ROOT
from scripts.measure.hostile import CLIENTS, PATH, Visit, note
from scripts.serving import serving

PATIENT: dict[str, Any] = {"timeout": 3600, "limits": httpx.Limits(max_connections=256)}


@contextmanager
def server(
    model: str, slots: int, method: str, queue: int, more: str = "", checkout: Path = ROOT
) -> Iterator[tuple[str, int]]:
    """The address and the process of a server, of this code or another."""
    options = f"serve --model {model} --slots {slots} --method {method} --queue {queue} {more}"
    command = [sys.executable, "-m", "lantern_hpu", *options.split()]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    with (
        tempfile.NamedTemporaryFile() as log,
        serving(command, Path(log.name), env=environment, cwd=checkout) as (url, process),
    ):
        yield url, process.pid


def processor_s(pid: int) -> float:
    """Seconds of the processor that a process has had."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


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


GOOD = 64  # images that are compared with those of `generate`
WAYS: list[dict[str, Any]] = [
    {"temperature": t, "cfg_scale": c} for t in (0.5, 1.0) for c in (1.5, 3.0)
]


def good_images(pipeline: LanternPipeline, setting: str) -> dict[tuple[str, int], bytes]:
    """The pixels of `GOOD` images by method and seed; sixteen of each of `WAYS`."""
    result, each = {}, GOOD // len(WAYS)
    for number, way in enumerate(WAYS):
        drawn = pipeline(
            "a red apple",
            method=setting,
            seed=number * each,
            num_images_per_prompt=each,
            batch_size=8,
            temperature=way["temperature"],
            guidance_scale=way["cfg_scale"],
        )
        for record, image in zip(drawn.records, drawn.images, strict=True):
            result[setting.partition("@")[0], record.seed] = image.tobytes()
    return result


def good(
    client: httpx.Client, url: str, rng: random.Random, wanted: Mapping[tuple[str, int], bytes]
) -> Counter[str]:
    """A request that is answered, whose images are compared; a full queue is asked again."""
    asked, count = Counter[str](), rng.randint(1, 3)
    method, seed = rng.choice([key for key in wanted if key[1] % 16 <= 16 - count])
    fields = {"prompt": "a red apple", "n": count, "seed": seed, "method": method}
    while True:
        answer = client.post(url + PATH, json=fields | WAYS[seed // 16])
        note(asked, answer)
        if answer.status_code != 429:
            break
        time.sleep(float(answer.headers["Retry-After"]))
    for image in answer.json()["data"] if answer.status_code == 200 else ():
        picture = Image.open(io.BytesIO(base64.b64decode(image["b64_json"])))
        asked.update({f"image {method} {image['seed']}": 1})
        asked["differ"] += picture.tobytes() != wanted[method, image["seed"]]
    return asked


def mixed(
    client: httpx.Client,
    url: str,
    number: int,
    wanted: Mapping[tuple[str, int], bytes],
    patience: float,
) -> Counter[str]:
    """One request of a soak; every third is hostile."""
    rng = random.Random(number)
    if number % 3:
        return good(client, url, rng, wanted)
    chosen = CLIENTS[number // 3 % len(CLIENTS)]
    visit = Visit(client, url, rng, patience, Counter({f"client {chosen.__name__}": 1}))
    chosen(visit)
    return visit.asked


def counter(client: httpx.Client, url: str, name: str) -> float:
    """The sum of one of the server's counters over its labels."""
    lines = client.get(url + "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"lantern:{name}{{"))


class Held(NamedTuple):
    """What a process holds."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Held:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        return cls(int(status["VmRSS"].split()[0]) * 1024, descriptors, int(status["Threads"]))


def when_quiet(client: httpx.Client, url: str, pid: int, before: Held | None = None) -> Held:
    """What a server holds once all is drawn and the connections have ended, as before or for a minute."""
    while counter(client, url, "num_requests_running") + counter(
        client, url, "num_requests_waiting"
    ):
        time.sleep(0.1)
    until = time.monotonic() + 60
    while before and Held.of(pid).descriptors > before.descriptors and time.monotonic() < until:
        time.sleep(0.5)
    return Held.of(pid)


def crowd(
    pool: ThreadPoolExecutor,
    one: Callable[[int], Counter[str]],
    numbers: Iterator[int],
    until: float,
    last: float,
) -> Counter[str]:
    """What 32 clients find, each with one request after the other, until a time or a number."""

    def work() -> Counter[str]:
        found = Counter[str]()
        for number in numbers:
            if time.monotonic() > until or number > last:
                break
            found += one(number)
        return found

    several = [pool.submit(work) for _ in range(32)]
    return sum((each.result() for each in several), Counter[str]())


def soak(
    model: str, settings: str, slots: int, requests: int, minutes: float = 0, patience: float = 75
) -> dict[str, Any]:
    """Mixed requests, 32 at a time, and whether the server stays as it was and counts what it answered.

    Args:
        requests: how many, or `minutes` in their place. A quarter of either warms up.
        patience: of `Visit`; below a minute a client that reads nothing is not waited for.
    """
    pipeline, wanted = LanternPipeline.from_pretrained(model), dict[tuple[str, int], bytes]()
    for setting in settings.split(","):
        wanted |= good_images(pipeline, setting)
    pipeline.close()
    asked, held, numbers = Counter[str](), list[Held](), count()
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=0)
    client = httpx.Client(timeout=3600, limits=limits)
    running = server(model, slots, settings, 64, "--allow greedy,top_k,top_p")
    with client, running as (url, pid), ThreadPoolExecutor(32) as pool:
        ask(client, url, "a red apple", 0)  # what the first request alone does
        held.append(when_quiet(client, url, pid))
        one = partial(mixed, client, url, wanted=wanted, patience=patience)
        for share in (0.25, 0.75):
            until = time.monotonic() + 60 * minutes * share
            last = math.inf if minutes else next(numbers) + requests * share
            asked += crowd(pool, one, numbers, until if minutes else math.inf, last)
            held.append(when_quiet(client, url, pid, held[0]))
        drawn = counter(client, url, "request_success_total") - 1
        failed = counter(client, url, "request_failure_total")
        recompiled = counter(client, url, "recompiles_after_readiness")
    images, left, leavers = asked["images"], asked["left"], asked["leavers"]
    answers = {status: n for status, n in sorted(asked.items()) if status.isdigit()}
    refused = sum(n for status, n in answers.items() if status != "200")
    add_up = images <= drawn <= images + left and refused <= failed <= refused + leavers
    compared = {name: n for name, n in asked.items() if name.startswith("image ")}
    return {
        "model": model,
        "methods": settings,
        "slots": slots,
        "minutes": minutes,
        "requests": sum(answers.values()) + leavers,
        "answers": answers,
        "hostile": {n.split()[1]: c for n, c in sorted(asked.items()) if n.startswith("client ")},
        "connections_to_drop": asked["to_drop"],
        "connections_dropped": asked["dropped"],
        "clients_that_left": leavers,
        "answers_of_another_shape": asked["shapeless"],
        "images": images,
        "different_images": len(compared),
        "images_compared": sum(compared.values()),
        "images_that_differ": asked["differ"],
        "metrics_add_up": add_up,
        "recompiles_after_readiness": recompiled,
        "held": {
            when: each._asdict()
            for when, each in zip(("ready", "after a quarter", "end"), held, strict=True)
        },
        "memory_grown_after_a_quarter": round(held[2].memory / held[1].memory - 1, 4),
    }


class Shares(DecodeThread):
    """The decode loop of `serve`, which also counts what each method has of the processor."""

    def __init__(self, pipeline: LanternPipeline, options: ServeOptions) -> None:
        self.used, self.drawn = defaultdict[str, float](float), Counter[str]()
        super().__init__(pipeline, options)

    @contextmanager
    def counting(self, slots: EngineSlots) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.used[slots.served.setting.method] += time.thread_time() - began

    def admit(self, slots: EngineSlots, jobs: list[Job]) -> None:
        with self.counting(slots):
            super().admit(slots, jobs)

    def advance(self, slots: EngineSlots) -> None:
        with self.counting(slots):
            super().advance(slots)

    def finish(self, slots: EngineSlots, job: Job, done: ImageRecord) -> None:
        super().finish(slots, job, done)
        self.drawn[job.method] += 1

    def keep_busy(self, seconds: float, seeds: Iterator[int]) -> None:
        """As many images of each method as it has slots, and partial pictures of each row."""
        shows, until = tuple(range(1, self.served.rows)), time.monotonic() + seconds
        takes_classes = self.pipeline.model.condition.takes_classes
        prompt, sampling = usual_prompts(takes_classes)[0], self.served.sampling
        while time.monotonic() < until and self.failure is None:
            there = Counter(job.method for job in list(self.queue.open_jobs))
            for method, served in self.served.methods.items():
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
    spent = {name: loop.used[name] - used.get(name, 0.0) for name in loop.served.methods}
    images = {name: loop.drawn[name] - drawn[name] for name in loop.served.methods}
    loop.stop()
    total = sum(spent.values())
    return {
        "model": model,
        "methods": {name: str(served.setting) for name, served in loop.served.methods.items()},
        "slots": slots,
        "seconds": seconds,
        "processor_s": {name: round(time, 3) for name, time in spent.items()},
        "images": images,
        "times_an_equal_share": {
            name: round(len(spent) * time / total, 4) for name, time in spent.items()
        },
    }


def by_clients(
    model: str, method: str, slots: int, images: int, clients: int, more: str, checkout: Path
) -> dict[str, Any]:
    """Images a second of clients that each wait for one image and then ask for the next."""
    client = httpx.Client(**PATIENT)
    with (
        client,
        server(model, slots, method, images, more, checkout) as (url, pid),
        ThreadPoolExecutor(clients) as pool,
    ):
        list(pool.map(lambda seed: ask(client, url, "a red apple", seed), range(2 * clients)))
        used, began = processor_s(pid), time.perf_counter()
        seconds = list(pool.map(lambda seed: ask(client, url, "a cat", seed), range(images)))
        took, used = time.perf_counter() - began, processor_s(pid) - used
    return {
        "model": model,
        "checkout": str(checkout),
        "method": method,
        "slots": slots,
        "clients": clients,
        "images": images,
        "images_per_s": round(images / took, 4),
        "processor_s_per_image": round(used / images, 4),
        "latency_s": spread(seconds),
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
        before = Held.of(pid).memory
        rate, seconds = at_random(client, url, 4 * together, images, prompts)
        recompiled = counter(client, url, "recompiles_after_readiness")
        grown = Held.of(pid).memory / before - 1
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
    add("--num-images", type=int, default=64, help="of each measurement")
    add("--soak", action="store_true", help="mixed requests instead, 32 at a time")
    add("--minutes", type=float, default=0, help="of --soak, in place of --num-images")
    add("--fair", action="store_true", help="two methods at the same time instead")
    add("--seconds", type=float, default=40.0, help="of each part of --fair (40)")
    add("--clients", type=int, help="clients that each wait for their image, instead")
    add("--options", default="", help="of `serve`, for --clients: '--sizes 256x256'")
    add("--checkout", type=Path, default=ROOT, help="the code that serves --clients (this)")
    args = parser.parse_args(argv)
    if Path(args.model).exists():  # the server may run in another folder
        args.model = str(Path(args.model).resolve())
    if args.clients:
        asked = (args.model, args.method, args.slots, args.num_images, args.clients, args.options)
        found = by_clients(*asked, args.checkout.resolve())
    elif args.fair:
        settings = args.method if "," in args.method else "ar,scd@16"
        found = fair(args.model, settings, args.slots, args.seconds)
    elif args.soak:
        found = soak(args.model, args.method, args.slots, args.num_images, args.minutes)
    else:
        found = measure(args.model, args.method, args.slots, args.num_images)
    print(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
