"""Load on a server of this machine: mixed requests of which a third is hostile."""

from __future__ import annotations

import base64
import io
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from PIL import Image

from lantern_hpu.pipeline import LanternPipeline
from scripts import ROOT
from scripts.serving import serving
from tests.hostile import CLIENTS, PATH, Visit, note


@contextmanager
def server(model: str, slots: int, methods: str) -> Iterator[tuple[str, int]]:
    """The address and the process of a server."""
    options = f"serve --model {model} --slots {slots} --method {methods} --queue 64 --allow greedy,top_k,top_p"
    command = [sys.executable, "-m", "lantern_hpu", *options.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        tempfile.NamedTemporaryFile() as log,
        serving(command, Path(log.name), env=environment, cwd=ROOT) as (url, process),
    ):
        yield url, process.pid


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


class Found(NamedTuple):
    """What a soak found.

    Attributes:
        asked: answers by status, what came of hostile clients, and the images that were compared.
        held: by the server when it was ready, after a quarter, and in the end.
        drawn, failed, recompiled: the server's own counters.
    """

    asked: Counter[str]
    held: list[Held]
    drawn: float
    failed: float
    recompiled: float

    def named(self, prefix: str) -> dict[str, int]:
        """Counts whose names begin so."""
        found = {name: n for name, n in self.asked.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): n for name, n in found.items()}

    def adds_up(self) -> bool:
        """Whether the counters are those of the answers; of clients that left they may be anything between."""
        images, left, leavers = (self.asked[name] for name in ("images", "left", "leavers"))
        answers = {name: n for name, n in self.asked.items() if name.isdigit()}
        refused = sum(n for status, n in answers.items() if status != "200")
        return images <= self.drawn <= images + left and refused <= self.failed <= refused + leavers


def soak(
    model: str, methods: str, slots: int, requests: int, minutes: float, patience: float
) -> Found:
    """Mixed requests, 32 at a time.

    Args:
        requests: how many, or `minutes` in their place. A quarter of either warms up.
        patience: of `Visit`; below a minute a client that reads nothing is not waited for.
    """
    wanted = dict[tuple[str, int], bytes]()
    with closing(LanternPipeline.from_pretrained(model)) as pipeline:
        for method in methods.split(","):
            wanted |= good_images(pipeline, method)
    asked, held, numbers = Counter[str](), list[Held](), count()
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=0)
    client = httpx.Client(timeout=3600, limits=limits)
    running = server(model, slots, methods)
    with client, running as (url, pid), ThreadPoolExecutor(32) as pool:
        # What the first request alone does
        client.post(url + PATH, json={"prompt": "a red apple"}).raise_for_status()
        held.append(when_quiet(client, url, pid))
        one = partial(mixed, client, url, wanted=wanted, patience=patience)
        for share in (0.25, 0.75):
            until = time.monotonic() + 60 * minutes * share
            last = math.inf if minutes else next(numbers) + requests * share
            asked += crowd(pool, one, numbers, until if minutes else math.inf, last)
            held.append(when_quiet(client, url, pid, held[0]))
        drawn = counter(client, url, "request_success_total") - 1
        failed = counter(client, url, "request_failure_total")
        return Found(asked, held, drawn, failed, counter(client, url, "recompiles_after_readiness"))
