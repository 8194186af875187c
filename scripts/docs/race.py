"""An animation of methods at the speed that they have: each draws alone, and all are shown side by side.

    lantern-hpu stretch llamagen-xl --output xl
    python -m scripts.docs.race --model xl --output docs/images/race.gif

Each method warms up and then draws while nothing else runs. The times at which tokens become known are recorded, and
the animation shows the finished picture as far as it was known at each time.
"""

from __future__ import annotations

import argparse
import io
import time
from pathlib import Path
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from lantern_hpu import LanternPipeline
from lantern_hpu.core import Event
from lantern_hpu.files import write_file

RATE = 10  # frames a second
REST = 2.0  # seconds that the end is shown
GREY = (224, 224, 224)
HEAD = 44  # pixels above a picture


class Run(NamedTuple):
    """A picture, and how much of it was known when."""

    label: str
    picture: Image.Image
    tokens: int
    tokens_per_step: float
    times: list[tuple[float, int]]  # seconds since the start, tokens known

    def known(self, seconds: float) -> int:
        """Tokens that were known at a time."""
        return max((tokens for when, tokens in self.times if when <= seconds), default=0)

    @property
    def seconds(self) -> float:
        return self.times[-1][0]


def draw(pipe: LanternPipeline, method: str, prompt: str, seed: int) -> Run:
    """Draw once to warm up and once to be timed."""
    pipe(prompt, seed=seed, method=method)
    times: list[tuple[float, int]] = []
    began = time.perf_counter()

    def note(pipe: LanternPipeline, step: int, tokens: int, more: dict[str, Event]) -> None:
        times.append((time.perf_counter() - began, tokens))

    result = pipe(prompt, seed=seed, method=method, callback_on_step_end=note)
    rate = result.records[0].tokens_per_step
    return Run(method, result.images[0], result.tokens.size, rate, times)


def frame(runs: list[Run], seconds: float, scale: int, columns: int) -> Image.Image:
    """What is known of each picture at a time."""
    side = scale * runs[0].picture.width
    page = Image.new("RGB", (len(runs) * (side + 8) + 8, side + HEAD + 8), "white")
    pen, font, small = ImageDraw.Draw(page), ImageFont.load_default(17), ImageFont.load_default(13)
    for index, run in enumerate(runs):
        left = 8 + index * (side + 8)
        page.paste(partly(run, run.known(seconds), side, columns), (left, HEAD))
        clock = f"{min(seconds, run.seconds):.1f} s"
        pen.text((left, 4), run.label, "black", font)
        pen.text((left + side, 4), clock, "black", font, anchor="ra")
        pen.text((left, 25), f"{run.tokens_per_step:.2f} tokens a step", "dimgrey", small)
    return page


def partly(run: Run, known: int, side: int, columns: int) -> Image.Image:
    """The picture with what is not known yet in grey: whole rows of tokens, and the part of one."""
    picture = run.picture.resize((side, side), Image.Resampling.LANCZOS)
    cell, (row, column) = side // columns, divmod(known, columns)
    pen = ImageDraw.Draw(picture)
    if known < run.tokens:
        pen.rectangle((column * cell, row * cell, side, (row + 1) * cell), GREY)
        pen.rectangle((0, (row + 1) * cell, side, side), GREY)
    return picture


def animation(frames: list[Image.Image]) -> bytes:
    """A GIF that repeats; only what changes between frames is kept."""
    both = Image.new("RGB", (frames[0].width, 2 * frames[0].height))
    both.paste(frames[0], (0, 0))
    both.paste(frames[-1], (0, frames[0].height))
    palette = both.quantize(255, dither=Image.Dither.NONE)
    pages = [f.quantize(palette=palette, dither=Image.Dither.NONE) for f in frames]
    times = [1000 // RATE] * (len(pages) - 1) + [int(1000 * REST)]
    content = io.BytesIO()
    options = {"save_all": True, "append_images": pages[1:], "duration": times, "loop": 0}
    pages[0].save(content, "GIF", optimize=True, **options)
    return content.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw an animation of methods, side by side.")
    add = parser.add_argument
    add("--model", default="builtin")
    add("--prompt", default="a lighthouse at sunset")
    add("--seed", type=int, default=3)
    add("--method", default="ar,eagle@chain,lantern++@chain")
    add("--scale", type=int, default=2, help="of a picture's pixels")
    add("--output", type=Path, default=Path("race.gif"))
    add("--force", action="store_true")
    args = parser.parse_args()
    pipe = LanternPipeline.from_pretrained(args.model, device="cpu")
    columns = pipe.model.target.config.columns
    runs = [draw(pipe, method, args.prompt, args.seed) for method in args.method.split(",")]
    last = max(run.seconds for run in runs)
    moments = [i / RATE for i in range(int(last * RATE) + 2)]
    frames = [frame(runs, moment, args.scale, columns) for moment in moments]
    write_file(args.output, animation(frames), args.force)
    print(", ".join(f"{run.label} {run.seconds:.2f} s" for run in runs), "->", args.output)


if __name__ == "__main__":
    main()
