"""What it costs that an image does not depend on its batch: at load, in the warm-up, and in each step.

    python -m scripts.invariance_costs --layouts plain,packed,half --methods ar,scd@16 --batch-sizes 1,8

The same model is loaded with `--invariant on` and `off`, and both draw by turns. Times are of the processor, one thread
of it, so that they mean something on a machine that others use; a ratio is the median over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

from lantern_hpu.decode.engine import Engine
from lantern_hpu.errors import exit_code
from lantern_hpu.methods.request import Request
from lantern_hpu.methods.setting import Setting
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.tables import markdown, usual_prompts

COLUMNS = ("layout", "method", "images", "", "load s", "warm-up s", "step ms", "of off")


class Timed:
    """A pipeline that holds rows, or one that does not, with what it took so far."""

    def __init__(self, **how: Any) -> None:
        self.held = how["invariant"]
        self.pipeline, self.load = spent(lambda: LanternPipeline.from_pretrained(threads=1, **how))
        self.warm_up, self.steps = 0.0, list[float]()

    def prepare(self, method: str, images: int) -> None:
        pipeline, self.steps = self.pipeline, []
        setting = pipeline.resolve(Setting.of(method))
        prompt = usual_prompts(pipeline.model.condition.takes_classes)[0]
        self.requests = [
            Request(prompt, seed, pipeline.model.sampling, setting.relaxation)
            for seed in range(images)
        ]
        spec = pipeline.spec(self.requests, setting.tree, images)
        self.engine: Engine = pipeline.engines.get(spec)
        _, self.warm_up = spent(lambda: pipeline.warm_up(self.engine, self.requests[0]))

    def draw(self, steps: int) -> None:
        """So many steps, or fewer if the images are done."""
        stream = self.pipeline.stream(self.engine, self.requests, most=steps)
        _, seconds = spent(lambda: list(stream))
        self.steps.append(seconds / steps)


def spent(action: Callable[[], Any]) -> tuple[Any, float]:
    """What an action returns, and its seconds of the processor."""
    began = time.process_time()
    result = action()
    return result, time.process_time() - began


def measure(asked: argparse.Namespace) -> list[list[str]]:
    torch.set_num_threads(1)
    rows = []
    for layout in asked.layouts.split(","):
        how = {"model": asked.model, "device": "cpu", "layout": layout}
        LanternPipeline.from_pretrained(threads=1, **how)  # files are in memory, code is imported
        both = [Timed(invariant=held, **how) for held in ("on", "off")]
        for method in asked.methods.split(","):
            for size in map(int, asked.batch_sizes.split(",")):
                for one in both:
                    one.prepare(method, size)
                for _ in tqdm(range(asked.turns), desc=f"{layout} {method} {size}"):
                    for one in both:
                        one.draw(asked.steps)
                share = statistics.median(
                    a / b for a, b in zip(both[0].steps, both[1].steps, strict=True)
                )
                for one in both:
                    times = [f"{one.load:.2f}", f"{one.warm_up:.2f}"]
                    step = f"{statistics.median(one.steps) * 1000:.1f}"
                    of_off = f"{share:.3f}" if one.held == "on" else ""
                    rows.append([layout, method, str(size), one.held, *times, step, of_off])
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("scripts.invariance_costs", description=__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--layouts", default="plain,packed,half")
    parser.add_argument("--methods", default="ar,scd@16", help="settings, comma-separated")
    parser.add_argument("--batch-sizes", default="1,8")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=24)
    asked = parser.parse_args(argv)
    return exit_code(lambda: print(markdown(COLUMNS, measure(asked))))


if __name__ == "__main__":
    sys.exit(main())
