"""Do an image's bits depend on its batch? Counted, by processor form and method.

    python -m scripts.batches --images 500 --methods ar,scd
    python -m scripts.batches --images 40 --layouts plain,packed,half --invariant off --output off.json
    ONEDNN_MAX_CPU_ISA=AVX2 python -m scripts.batches --images 40

The images of batches of one are drawn again in batches of other sizes, in closed batches (all begin together) and in
open slots (an image takes the slot of the one that is done). Counted are images of which a token differs, and those of
which one bit of a key or a value differs in the cache of any layer: the latter is the stricter question, as most
differences of rounding change no token. `--threads 1,2` draws all of it again with other numbers of threads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import torch
from tqdm import tqdm

from lantern_hpu.decode.engine import Engine
from lantern_hpu.lab.fidelity import prompts_of
from lantern_hpu.methods.request import Request
from lantern_hpu.methods.setting import Resolved, Setting
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.tables import markdown


@dataclass
class Image:
    """What is compared of an image."""

    tokens: list[int]
    digests: list[int]  # of each layer's keys and values; empty where its slot was taken by another


@dataclass
class Counted:
    """Images of one way to draw them, held against batches of one by one number of threads."""

    layout: str
    method: str
    images: int
    batch_size: int
    slots: str
    threads: int
    tokens_differ: int
    bits_differ: int | None  # None: caches are not compared in open slots
    held: str  # what the report says


def digest(values: torch.Tensor) -> int:
    """Of a tensor's bits, each weighed by its place."""
    whole = {2: torch.int16, 4: torch.int32}[values.element_size()]
    bits = values.contiguous().flatten().view(whole).long()
    place = torch.arange(len(bits)) * 2654435761 + 97
    return int((bits * place).sum())


def digests(engine: Engine, slot: int) -> list[int]:
    """Of the committed keys and values of a slot's rows, without those that are still to be moved."""
    config, spec = engine.target.config, engine.spec
    end = config.prefix + config.tokens - 2 * engine.longest
    rows = [slot, slot + spec.images] if spec.guidance else [slot]
    caches = engine.state.kv_cache.layers
    return [digest(part[rows, :end]) for cache in caches for part in cache.read()]


def drawn(
    pipeline: LanternPipeline, engine: Engine, requests: Sequence[Request]
) -> Iterator[tuple[int, Image]]:
    for number, done in pipeline.stream(engine, requests):
        kept = [] if engine.spec.open else digests(engine, done.slot)
        yield number, Image(done.tokens.tolist(), kept)


def draw(
    pipeline: LanternPipeline,
    setting: Resolved,
    requests: Sequence[Request],
    size: int,
    is_open: bool,
) -> list[Image]:
    """All images, `size` at a time."""
    spec = replace(pipeline.spec(requests, setting.tree, size), open=is_open)
    engine = pipeline.engines.get(spec)
    pipeline.warm_up(engine, requests[0])
    step = len(requests) if is_open else size
    images = dict[int, Image]()
    with tqdm(total=len(requests), desc=f"{setting} x{size}", file=sys.stderr) as bar:
        for first in range(0, len(requests), step):
            some = requests[first : first + step]
            for number, image in drawn(pipeline, engine, some):
                images[first + number] = image
                bar.update()
    return [images[number] for number in range(len(requests))]


def count(arguments: argparse.Namespace) -> Iterator[Counted]:
    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    threads = [int(number) for number in arguments.threads.split(",")]
    for layout in arguments.layouts.split(","):
        pipelines = [
            LanternPipeline.from_pretrained(
                arguments.model,
                device=arguments.device,
                emulate=arguments.emulate,
                dtype=arguments.dtype,
                layout=layout,
                invariant=arguments.invariant,
                threads=number,
                pictures=False,
            )
            for number in threads
        ]
        for method in arguments.methods.split(","):
            alone: list[Image] = []
            for pipeline, number in zip(pipelines, threads, strict=True):
                torch.set_num_threads(number)
                setting = pipeline.resolve(Setting.of(method))
                prompts, sampling = prompts_of(pipeline), pipeline.model.sampling
                requests = [
                    Request(prompts[i % len(prompts)], i, sampling, setting.relaxation)
                    for i in range(arguments.images)
                ]
                ways = [(1, False)] + [
                    (size, way) for size in sizes if size > 1 for way in (False, True)
                ]
                for size, is_open in ways:
                    images = draw(pipeline, setting, requests, size, is_open)
                    alone = alone or images
                    pairs = list(zip(alone, images, strict=True))
                    decided = pipeline.backend.tuning.decided
                    yield Counted(
                        layout=f"{layout}: {pipeline.layout}",
                        method=str(setting),
                        images=len(images),
                        batch_size=size,
                        slots="open" if is_open else "closed",
                        threads=number,
                        tokens_differ=sum(a.tokens != b.tokens for a, b in pairs),
                        bits_differ=None
                        if is_open
                        else sum(a.digests != b.digests for a, b in pairs),
                        held=decided.get("invariant", "off"),
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--layouts", default="auto")
    parser.add_argument("--invariant", default="on", choices=("on", "off"))
    parser.add_argument("--methods", default="ar,scd", help="settings, comma-separated")
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--batch-sizes", default="1,2,4,8")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows, names = [], [part.name for part in fields(Counted) if part.name != "held"]
    print(markdown(names, []))
    for row in count(arguments):
        rows.append(asdict(row))
        print(f"| {' | '.join(str(rows[-1][name]) for name in names)} |", flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(rows, indent=1))
    print(*{row["layout"]: row["held"] for row in rows}.values(), sep="\n")


if __name__ == "__main__":
    main()
