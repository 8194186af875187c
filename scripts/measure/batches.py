"""Does an image depend on how it is drawn? Counted, by processor form and method.

    python -m scripts.measure.batches --layouts native,plain --method ar,scd@16 --num-images 40 --output counted.json
    python -m scripts.measure.batches --layouts native --ways closed-1,workers-2,threads-2 --output counted.json
    python -m gaudi_emulator -m scripts.measure.batches --device hpu --num-images 2 --output counted.json

The images of the first way, batches of one, are drawn again in the others:

    closed-4    batches of four images that begin and end together
    open-8      eight slots; an image takes the slot of one that is done
    server-8    eight slots of `serve`, whose requests come at random: one begins alone, and again among others
    workers-2   two worker processes of Ray, as `generate --workers 2` has them
    threads-2   batches of eight by two threads

Counted are images of which a token differs, a pixel, or one bit of a key or a value in the cache of any layer. The
last is the strictest question, as most differences of rounding change no token; it is asked in closed batches alone.
The file keeps a digest of each image, so a run that was broken off goes on where it was, and one with more ways or
images adds to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from lantern_hpu.core import ImageRecord, Request
from lantern_hpu.decode.engine import Engine
from lantern_hpu.errors import OptionError, exit_code
from lantern_hpu.files import write_file
from lantern_hpu.methods.setting import Resolved, Setting
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.tables import markdown
from lantern_hpu.serve.decoder import DecodeThread
from lantern_hpu.serve.engines import EngineSlots
from lantern_hpu.serve.options import ServeOptions
from lantern_hpu.serve.queue import Job
from lantern_hpu.workers import pieces, share_work
from lantern_lab.fidelity import prompts_of

CHUNK = 24  # images that each way draws before the next way does: what a run that is broken off loses at most
KINDS = ("closed", "open", "server", "workers", "threads")
BATCH = 8  # images at a time, where a way does not say it
PATIENCE = 36000.0  # seconds of an image in the server, on a machine that has other work
FIRST = "closed-1"
WAYS = "closed-1,closed-2,closed-4,closed-8,open-8,server-8"
COLUMNS = ("layout", "method", "way", "images", "tokens_differ", "pixels_differ", "bits_differ")


# Digests of an image's tokens, its pixels, and the cache; None where another image has taken its slot since
Digests = tuple[str, str, "str | None"]
Images = dict[int, Digests]  # by number, which is the seed


def parse_way(text: str) -> tuple[str, int]:
    kind, _, size = text.partition("-")
    if kind not in KINDS or not size.isdigit():
        raise OptionError(f"--ways has {text!r}", hint=", ".join(f"{k}-N" for k in KINDS))
    return kind, int(size)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def digests(pipeline: LanternPipeline, done: ImageRecord, bits: str | None = None) -> Digests:
    picture = pipeline.picture(done)
    assert picture is not None
    return digest(str(done.token_ids.tolist()).encode()), digest(picture.tobytes()), bits


def cache_bits(engine: Engine, slot: int) -> str:
    """Of the committed keys and values of a slot's rows, without those that are still to be moved."""
    config, spec = engine.target.config, engine.spec
    end = config.prefix + config.tokens - 2 * engine.spec.max_step_tokens
    rows = [slot, slot + spec.images] if spec.guidance else [slot]
    parts = [
        part.cpu()[rows, :end] for layer in engine.state.kv_cache.layers for part in layer.read()
    ]
    return digest(b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts))


class Server(DecodeThread):
    """The decode loop of `serve`, which also keeps the digests of what it drew."""

    def __init__(self, pipeline: LanternPipeline, options: ServeOptions) -> None:
        super().__init__(pipeline, options)
        self.drawn: Images = {}
        self.start(wait=True)

    def finish(self, slots: EngineSlots, job: Job, done: ImageRecord) -> None:
        self.drawn[job.request.seed] = digests(self.pipeline, done)
        super().finish(slots, job, done)


class Drawer:
    """A loaded model and a method: images by their number, one way or another."""

    def __init__(self, how: dict[str, Any], method: str) -> None:
        """
        Args:
            how: arguments of `LanternPipeline.from_pretrained`.
        """
        self.how, self.method = how, method
        self.pipeline = LanternPipeline.from_pretrained(**how)
        self.setting: Resolved = self.pipeline.resolve(Setting.of(method))
        self.servers: dict[int, Server] = {}
        self.by_threads: dict[int, Drawer] = {}

    def request(self, number: int) -> Request:
        prompts = prompts_of(self.pipeline)
        prompt, sampling = prompts[number % len(prompts)], self.pipeline.model.sampling
        return Request(prompt, number, sampling, self.setting.relaxation)

    def draw(self, way: str, numbers: Sequence[int]) -> Iterator[tuple[int, Digests]]:
        """Each image with its number, in the order in which they are done."""
        kind, size = parse_way(way)
        if kind == "server":
            return self.by_server(size, numbers)
        if kind == "workers":
            return self.by_workers(size, numbers)
        if kind != "threads":
            return self.by_engine(size, kind == "open", numbers)
        if size not in self.by_threads:
            self.by_threads[size] = Drawer(self.how | {"threads": size}, self.method)
        return self.by_threads[size].by_engine(BATCH, False, numbers)

    def by_engine(
        self, size: int, is_open: bool, numbers: Sequence[int]
    ) -> Iterator[tuple[int, Digests]]:
        torch.set_num_threads(self.how["threads"])
        requests = [self.request(number) for number in numbers]
        spec = self.pipeline.spec(requests, self.setting.tree, size)
        engine = self.pipeline.engines.get(replace(spec, open=is_open))
        self.pipeline.warm_up(engine, requests[0])
        step = len(numbers) if is_open else size
        for first in range(0, len(numbers), step):
            for index, done in self.pipeline.stream(engine, requests[first : first + step]):
                # A closed batch fills its slots in order
                bits = None if is_open else cache_bits(engine, index)
                yield numbers[first + index], digests(self.pipeline, done, bits)

    def by_server(self, slots: int, numbers: Sequence[int]) -> Iterator[tuple[int, Digests]]:
        """Requests come as the queue empties: one image of them first, then up to five together."""
        if slots not in self.servers:
            options = ServeOptions(methods=(self.method,), slots=slots, timeout=PATIENCE)
            pipeline = LanternPipeline.from_pretrained(**self.how)
            self.servers[slots] = Server(pipeline, options)
        server, rng = self.servers[slots], random.Random(numbers[0])
        waiting, missing, count = list(numbers), set(numbers), 1
        while missing:
            if server.failure is not None:
                raise server.failure
            if waiting and not server.queue.waiting:
                some, waiting, count = waiting[:count], waiting[count:], rng.randint(1, 5)
                server.submit([self.job(number) for number in some])
            for number in missing & server.drawn.keys():
                missing.remove(number)
                yield number, server.drawn[number]
            time.sleep(rng.choice((0.01, 0.1)))

    def job(self, number: int) -> Job:
        until = time.monotonic() + PATIENCE
        return Job(self.request(number), self.setting.method, until, (), lambda event: None)

    def by_workers(self, workers: int, numbers: Sequence[int]) -> Iterator[tuple[int, Digests]]:
        work = [[numbers[i] for i in piece] for piece in pieces(len(numbers), workers, BATCH)]
        maker, args = "scripts.measure.batches:piece_drawer", (self.how, self.method)
        for _, images in share_work(maker, args, work, workers):
            yield from images.items()

    def close(self) -> None:
        for server in self.servers.values():
            server.stop()
            server.pipeline.close()
        for other in self.by_threads.values():
            other.close()
        self.pipeline.close()


def piece_drawer(how: dict[str, Any], method: str) -> Callable[[list[int]], Images]:
    """What draws a piece, in a worker process."""
    drawer = Drawer(how, method)
    return lambda numbers: dict(drawer.draw(f"closed-{BATCH}", numbers))


class Record:
    """The images that were drawn so far, in a file."""

    def __init__(self, path: Path | None, how: dict[str, Any]) -> None:
        self.path, self.about = path, {"how": how}
        self.images: dict[str, dict[str, dict[str, Any]]] = {}  # by case, way and number
        if path is not None and path.exists():
            content = json.loads(path.read_text(encoding="utf-8"))
            self.about, self.images = content["about"], content["images"]
            if self.about["how"] != how:
                raise OptionError(f"{path} is of {self.about['how']}", hint="another --output")

    def rows(self) -> list[dict[str, Any]]:
        """How many images of each way were compared with those of the first, and how many differ."""
        result = []
        for case, ways in self.images.items():
            for way, images in ways.items():
                pairs = [(ways[FIRST][number], image) for number, image in images.items()]
                tokens, pixels, bits = (sum(a[i] != b[i] for a, b in pairs) for i in range(3))
                whole = all(image[2] for image in images.values())
                differ = tokens, pixels, bits if whole else None
                row = (*case.split(" ", 1), way, len(pairs), *differ)
                result.append(dict(zip(COLUMNS, row, strict=True)))
        return result

    def write(self) -> None:
        if self.path is not None:
            content = {"about": self.about, "rows": self.rows(), "images": self.images}
            # One image a line would be ten thousand lines
            write_file(self.path, json.dumps(content).encode(), force=True)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """By layout and method: images, the ways of drawing them, and in how many drawings something differs."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["layout"], row["method"]), []).append(row)
    lines = []
    for case, ways in cases.items():
        differ = [sum(row[name] or 0 for row in ways) for name in COLUMNS[4:]]
        images, names = {row["images"] for row in ways}, ", ".join(row["way"] for row in ways)
        lines.append([*case, " to ".join(map(str, sorted(images))), names, *map(str, differ)])
    return markdown(
        ["layout", "method", "images", "ways", "tokens differ", "pixels", "bits"], lines
    )


def count(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Draw what the file lacks. -> rows of `COLUMNS`"""
    names = ("model", "device", "dtype", "threads")
    how = {name: getattr(args, name) for name in names}
    record = Record(args.output, how)
    ways = list(dict.fromkeys([FIRST, *args.ways.split(",")]))
    for layout in args.layouts.split(","):
        for method in args.method.split(","):
            drawer = Drawer(how | {"layout": layout}, method)
            draw_case(drawer, ways, args.num_images, record)
            drawer.close()
    return record.rows()


def draw_case(drawer: Drawer, ways: Sequence[str], images: int, record: Record) -> None:
    case = f"{drawer.pipeline.fit.layout} {drawer.setting}"
    drawn = record.images.setdefault(case, {})
    with tqdm(total=len(ways) * images, desc=case, file=sys.stderr) as bar:
        for first in range(0, images, CHUNK):
            chunk = range(first, min(first + CHUNK, images))
            for way in ways:
                known = drawn.setdefault(way, {})
                missing = [number for number in chunk if str(number) not in known]
                bar.update(len(chunk) - len(missing))
                found: Images = {}
                for number, image in drawer.draw(way, missing) if missing else ():
                    found[number] = image
                    bar.update()
                known |= {str(number): image for number, image in sorted(found.items())}
                record.about["environment"] = drawer.pipeline.environment()
                record.write()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts.measure.batches", description=__doc__)
    add = parser.add_argument
    add("--model", default="builtin")
    add("--device", default="cpu")
    add("--dtype", default="auto")
    add("--layouts", default="auto")
    add("--method", default="ar,scd@16", help="settings, comma-separated")
    add("--ways", default=WAYS, help=f"comma-separated ({WAYS})")
    add("--threads", type=int, default=1, help="of all ways but threads-N (1)")
    add("--num-images", type=int, default=40)
    add("--output", type=Path)
    args = parser.parse_args(argv)

    def command() -> int:
        rows = count(args)
        print(table(rows))
        return int(any(row["tokens_differ"] or row["pixels_differ"] for row in rows))

    return exit_code(command)


if __name__ == "__main__":
    sys.exit(main())
