"""Choose the embedded model's default sampling: figures of each setting, and a sheet to look at.

    python -m scripts.choose_sampling --model data/model --settings 3:0.9,4:0.8,3:0.8:0.95 --output sampling.png

draws the same captions and seeds with `ar` for each CFG:TEMPERATURE or CFG:TEMPERATURE:TOP_P, and prints Frechet
distance, caption agreement and diversity as `evaluate` measures them. The sheet has a row for each setting, and two
seeds of each prompt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from tqdm import tqdm

from lantern_hpu import LanternPipeline
from lantern_hpu.files import write_file
from lantern_hpu.methods.request import Request, Sampling
from lantern_hpu.results.images import Drawn, encode
from lantern_hpu.results.tables import markdown
from lantern_lab.evaluate.attributes import small
from lantern_lab.evaluate.metrics.diversity import within
from lantern_lab.evaluate.scorer_builtin import Painted, as_classified, drawn_side
from lantern_lab.evaluate.statistics import figures
from scripts.readme_pictures import PROMPTS, sheet

SEEDS = (0, 1)


def setting(text: str) -> Sampling:
    """CFG:TEMPERATURE[:TOP_P]."""
    scale, temperature, top_p = [*map(float, text.split(":")), 1.0][:3]
    return Sampling(scale, temperature, 0, top_p)


def draw(pipeline: LanternPipeline, requests: Sequence[Request], title: str) -> list[Image.Image]:
    """Their pictures, by `ar`."""
    ar = pipeline.resolve("ar")
    with tqdm(total=len(requests), desc=title, unit="image") as bar:

        def count(index: int, drawn: Drawn) -> None:
            bar.update()

        return pipeline.draw(requests, ar, 8, keep=count).images


def main() -> None:
    parser = argparse.ArgumentParser(description="Choose the embedded model's default sampling.")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--settings", default="3:0.8,3:0.9,3:1,4:0.8,4:0.9,5:0.9")
    parser.add_argument("--images", type=int, default=64, help="captions drawn once")
    parser.add_argument("--panels", type=int, default=8, help="captions drawn four times")
    parser.add_argument("--fresh", type=int, default=2000, help="pictures of the generator")
    parser.add_argument("--output", type=Path, default=Path("sampling.png"))
    arguments = parser.parse_args()
    pipeline = LanternPipeline.from_pretrained(arguments.model, device="cpu")
    painted = Painted(arguments.images, arguments.panels, arguments.fresh, drawn_side(pipeline))
    items, metrics = painted.items(), painted.metrics(painted.fresh())
    limit = within(
        np.stack([as_classified(p) for p in painted.generated()[arguments.images :]]),
        arguments.panels,
    )
    lines, rows = [], {}
    for text in arguments.settings.split(","):
        chosen = setting(text)
        asked = [Request(item.prompt, seed, chosen) for seed, item in enumerate(items)]
        pixels = np.stack([small(image) for image in draw(pipeline, asked, text)])
        found = figures(metrics, painted.rows(items, pixels, limit), 0)
        lines.append((text, *(f"{found[metric.name].value:.3f}" for metric in metrics)))
        print(*lines[-1], file=sys.stderr)
        shown = [Request(prompt, seed, chosen) for prompt in PROMPTS for seed in SEEDS]
        rows[text] = draw(pipeline, shown, "sheet")
    prompts = tuple(prompt for prompt in PROMPTS for _ in SEEDS)
    write_file(arguments.output, encode(sheet(rows, prompts, 106)), force=True)
    print(markdown(("guidance:temperature", *(metric.title for metric in metrics)), lines))
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
