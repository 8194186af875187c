"""Bounded load on a server of this machine: images a second and latencies, against closed batches in the same run.

    python -m scripts.load --images 64 --slots 8

The server runs in a process of its own, on the loopback address, with a model of this machine. Measured are, one
after the other so that none disturbs the other: closed batches of as many images as there are slots; single images
with `generate`'s pipeline; then the server with one client, and with requests that arrive at random (a Poisson
process) faster than it can answer. Only ratios mean something on a machine that others use.

    python -m scripts.load --soak --images 200

sends mixed requests instead, 32 at a time: settings of all kinds, clients that leave, fields that cannot be honoured.
It counts the answers, and how the server's memory grew after the first quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.prompts import usual_prompts

MOST = 2000  # images of one run
ROOT = Path(__file__).parent.parent
PATH = "/v1/images/generations"


@contextmanager
def server(model: str, slots: int, method: str, queue: int) -> Iterator[tuple[str, int]]:
    """A server of this machine alone: its address, and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"--model": model, "--slots": slots, "--methods": method, "--queue": queue}
    options["--port"] = port
    flat = [str(part) for pair in options.items() for part in pair]
    command = [sys.executable, "-m", "lantern_hpu", "serve", *flat]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, "the server ended"
            try:
                if httpx.get(url + "/readyz", timeout=60).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(120)


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


def mixed(client: httpx.Client, url: str, number: int) -> str:
    """One request of a soak: the status of its answer, or `left`."""
    rng = random.Random(number)
    fields: dict[str, Any] = {"prompt": "a red apple", "seed": number, "n": rng.randint(1, 3)}
    fields["temperature"] = rng.choice([0.5, 1.0, 1.3])
    fields["cfg_scale"] = rng.choice([1.5, 3.0])
    kind = rng.random()
    if kind < 0.2:
        fields |= rng.choice(
            [{"n": 0}, {"size": "3x3"}, {"prompt": "\0"}, {"method": "none"}, {"x": 1}]
        )
    elif kind < 0.35:
        try:
            client.post(url + PATH, json=fields, timeout=rng.uniform(0.01, 0.5))
        except httpx.TimeoutException:
            return "left"
    while True:
        answer = client.post(url + PATH, json=fields)
        if answer.status_code != 429:
            return str(answer.status_code)
        time.sleep(float(answer.headers["Retry-After"]))


def soak(model: str, method: str, slots: int, requests: int) -> dict[str, Any]:
    """Mixed requests, and whether the server stays as it was."""
    client = httpx.Client(timeout=3600, limits=httpx.Limits(max_connections=256))
    with client, server(model, slots, method, 64) as (url, pid), ThreadPoolExecutor(32) as pool:
        first = [pool.submit(mixed, client, url, number) for number in range(requests // 4)]
        answers = [each.result() for each in first]
        before = resident(pid)
        rest = [pool.submit(mixed, client, url, n) for n in range(requests // 4, requests)]
        answers += [each.result() for each in rest]
        grown = resident(pid) / before - 1
        metrics = client.get(url + "/metrics").text
    again = [line for line in metrics.splitlines() if line.startswith("lantern:recompiles")]
    return {
        "model": model,
        "answers": dict(sorted(Counter(answers).items())),
        "recompiles_after_readiness": float(again[0].split()[-1]),
        "memory_grown_after_a_quarter": round(grown, 4),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Percentiles."""
    cuts = statistics.quantiles([*seconds, *seconds], n=100, method="inclusive")
    return {f"p{p}": round(cuts[p - 1], 4) for p in (50, 90, 99)}


def measure(model: str, method: str, slots: int, images: int) -> dict[str, Any]:
    pipeline = LanternPipeline.from_pretrained(model)
    prompts = usual_prompts(pipeline.model.condition.takes_classes)
    together, single = closed(pipeline, method, slots, images), alone(pipeline, method, slots)
    pipeline.close()
    client = httpx.Client(timeout=3600, limits=httpx.Limits(max_connections=256))
    with client, server(model, slots, method, images + 1) as (url, pid):
        ask(client, url, prompts[0], 0)  # whatever the first request alone does
        lone = [ask(client, url, prompts[seed % len(prompts)], seed) for seed in range(slots)]
        before = resident(pid)
        rate, seconds = at_random(client, url, 4 * together, images, prompts)
        metrics = httpx.get(url + "/metrics").text
        grown = resident(pid) / before - 1
    again = [line for line in metrics.splitlines() if line.startswith("lantern:recompiles")]
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
        "recompiles_after_readiness": float(again[0].split()[-1]),
        "memory_grown": round(grown, 4),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts.load", description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--method", default="ar")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument(
        "--images", type=int, default=64, help=f"of each measurement, at most {MOST}"
    )
    parser.add_argument("--soak", action="store_true", help="mixed requests instead, 32 at a time")
    args = parser.parse_args(argv)
    if not (1 <= args.images <= MOST and 1 <= args.slots <= 64):
        parser.error(f"--images is 1 to {MOST}, --slots 1 to 64")
    what = soak if args.soak else measure
    print(json.dumps(what(args.model, args.method, args.slots, args.images), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
