"""One prompt drawn by several settings, each alone: figures, and an animation of them side by side at their speeds.

A setting warms up, and then draws while nothing else runs. The times at which tokens become known are recorded, and
the animation shows the finished picture as far as it was known at each time.
"""

from __future__ import annotations

import hashlib
import io
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from lantern_hpu.core import Event, Request
from lantern_hpu.files import write_file
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import GenerationResult, encode
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.results.tables import Table, figure, ratio
from lantern_lab.evaluate.drawing import seconds_of
from lantern_lab.tune.result import doubtful_step

WARM_STEPS = 16  # before a setting is timed
FRAMES = 100  # of an animation, about
TICK = 0.05  # seconds of a frame, at least
REST = 2.5  # seconds that the end is shown
GREY = (224, 224, 224)
SIDE = 256  # pixels of a picture in the animation
GAP = 8
HEAD = 62  # pixels above a picture
NAME = "race"  # of the files


@dataclass(frozen=True)
class Run:
    """A picture, and how much of it was known when.

    Attributes:
        columns: tokens of a row. seconds: from prompt to pixels.
        tv: a token's total variation to the model's distribution, mean; None where it is not metered.
        times: seconds since the start, and tokens known then.
    """

    setting: Resolved
    picture: Image.Image
    tokens: int
    columns: int
    seconds: float
    ms_per_step: float
    tokens_per_step: float
    tv: float | None
    times: Sequence[tuple[float, int]]

    def known(self, seconds: float) -> int:
        """Tokens that were known at a time; all of them once the pixels were there too."""
        if seconds >= self.seconds:
            return self.tokens
        return max((tokens for when, tokens in self.times if when <= seconds), default=0)

    def doubt(self, ar: Run | None) -> str:
        """Why its times, or those of `ar`, cannot be of a quiet machine; empty where they can."""
        if ar is None or ar is self:
            return ""
        return doubtful_step(self.setting.tree.size, self.ms_per_step, ar.ms_per_step)

    def as_json(self, ar: Run | None) -> dict[str, Any]:
        """Its line in the report, with its speed against the run of `ar`, unless that is in doubt."""
        doubt = self.doubt(ar)
        return {
            "setting": str(self.setting),
            "lossless": not self.setting.relaxation.active and self.setting.commit < 2,
            "seconds": round(self.seconds, 4),
            "tokens_per_step": self.tokens_per_step,
            "times_ar": None if doubt or not ar else round(ar.seconds / self.seconds, 4),
            **({"doubt": doubt} if doubt else {}),
            "tv_per_token": self.tv,
            "times": [[round(when, 4), tokens] for when, tokens in self.times],
        }


# ------------------------------------------------------------------------------------ drawing


def warm_up(pipeline: LanternPipeline, setting: Resolved, request: Request) -> None:
    """Build and record what the setting needs, and take a few steps, which find the number of threads."""
    engine = pipeline.engines.get(pipeline.spec([request], setting.tree, 1))
    pipeline.warm_up(engine, request)
    list(pipeline.stream(engine, [request], most=WARM_STEPS))


def draw_runs(
    pipeline: LanternPipeline, settings: Sequence[Resolved], prompt: str, seed: int, turns: int
) -> list[Run]:
    """Each setting's fastest run of so many, which settings take in turns: all of them draw the same picture.

    Turns whose times cannot be of a quiet machine are followed by as many again, once.
    """
    fastest: dict[Resolved, Run] = {}
    for number in range(2 * turns):
        if number == turns and not any(run.doubt(ar_of(fastest)) for run in fastest.values()):
            break
        for setting in settings:
            run = draw_run(pipeline, setting, prompt, seed, setting not in fastest)
            if setting not in fastest or run.seconds < fastest[setting].seconds:
                fastest[setting] = run
    return list(fastest.values())


def ar_of(runs: Mapping[Resolved, Run]) -> Run | None:
    return next((run for setting, run in runs.items() if setting.method == "ar"), None)


def draw_run(
    pipeline: LanternPipeline, setting: Resolved, prompt: str, seed: int, is_first: bool
) -> Run:
    """Draw once, with a line that shows how far it is."""
    request = Request(prompt, seed, pipeline.model.sampling, setting.relaxation)
    total = pipeline.model.target.config.tokens
    times = list[tuple[float, int]]()
    with ProgressBar(total, "token", desc=str(setting)) as bar:
        if is_first:
            bar.set_description_str(f"{setting}, warming up")
            warm_up(pipeline, setting, request)
            bar.set_description_str(str(setting))

        def note(event: Event) -> None:
            times.append((time.perf_counter(), event.tokens))
            bar.set_postfix_str(f"{event.tokens_per_step:.2f} tokens a step", refresh=False)
            bar.update(event.tokens - bar.n)

        result = pipeline.draw([request], setting, 1, note)
    return run_of(result, setting, times)


def run_of(result: GenerationResult, setting: Resolved, times: Sequence[tuple[float, int]]) -> Run:
    """What was drawn; `times` are of the clock, when so many tokens were known."""
    record = result.records[0]
    began = times[-1][0] - result.timing.text_s - result.timing.generate_s
    return Run(
        setting,
        result.images[0],
        record.tokens,
        result.code_grid[1],
        seconds_of(result.timing),
        result.timing.ms_per_step,
        record.tokens_per_step,
        record.tv_mean,
        [(when - began, tokens) for when, tokens in times],
    )


# ------------------------------------------------------------------------------------ what is shown


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Of the lines of a report."""
    columns = {
        "setting": lambda row: f"`{row['setting']}`",
        "lossless": lambda row: "yes" if row["lossless"] else "no",
        "s an image": lambda row: figure(row["seconds"]),
        "tokens a step": lambda row: ratio(row["tokens_per_step"]),
        "TV a token": lambda row: cost(row["tv_per_token"]),
        "speed against `ar`": lambda row: "in doubt" if "doubt" in row else ratio(row["times_ar"]),
    }
    return Table.of(columns, rows)


def cost(tv: float | None) -> str:
    """A token's total variation to the model's distribution."""
    if tv is None:
        return "not metered"
    return f"{tv:.3f}" if tv else "0"


def frame(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], seconds: float) -> Image.Image:
    """What is known of each picture at a time; of finished ones with what they gained and cost."""
    page = Image.new("RGB", (len(runs) * (SIDE + GAP) + GAP, SIDE + HEAD + GAP), "white")
    pen, font, small = ImageDraw.Draw(page), ImageFont.load_default(17), ImageFont.load_default(13)
    for index, (run, row) in enumerate(zip(runs, rows, strict=True)):
        left = GAP + index * (SIDE + GAP)
        page.paste(partly(run, run.known(seconds)), (left, HEAD))
        clock = f"{min(seconds, run.seconds):.1f} s"
        kind = "lossless" if row["lossless"] else f"relaxed, TV {cost(row['tv_per_token'])} a token"
        pen.text((left, 4), row["setting"], "black", fitting(row["setting"], SIDE - 60))
        pen.text((left + SIDE, 4), clock, "black", font, anchor="ra")
        pen.text((left, 25), f"{run.tokens_per_step:.2f} tokens a step", "dimgrey", small)
        pen.text((left, 42), kind, "dimgrey", small)
        if seconds >= run.seconds and (row["times_ar"] or "doubt" in row):
            gain = "in doubt" if "doubt" in row else f"{row['times_ar']:.2f} x ar"
            pen.text((left + SIDE, 25), gain, "black", small, anchor="ra")
    return page


def fitting(text: str, width: int) -> Any:
    """The largest font in which a text is no wider than so many pixels."""
    fonts = [ImageFont.load_default(size) for size in range(17, 6, -1)]
    return next((font for font in fonts if font.getlength(text) <= width), fonts[-1])


def partly(run: Run, known: int) -> Image.Image:
    """The picture with what is not known yet in grey: whole rows of tokens, and the part of one."""
    picture = run.picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    rows, columns = run.tokens // run.columns, run.columns
    row, column = divmod(known, columns)
    pen = ImageDraw.Draw(picture)
    if known < run.tokens:
        top, under = row * SIDE // rows, (row + 1) * SIDE // rows
        pen.rectangle((column * SIDE // columns, top, SIDE, under), GREY)
        pen.rectangle((0, under, SIDE, SIDE), GREY)
    return picture


def animation(runs: Sequence[Run], rows: Sequence[Mapping[str, Any]], comment: str) -> bytes:
    """A GIF at the speed of the runs that repeats; only what changes between frames is kept."""
    last = max(run.seconds for run in runs)
    tick = max(TICK, round(last / FRAMES, 2))
    frames = [frame(runs, rows, i * tick) for i in range(int(last / tick) + 2)]
    both = Image.new("RGB", (frames[0].width, 2 * frames[0].height))
    both.paste(frames[0], (0, 0))
    both.paste(frames[-1], (0, frames[0].height))
    palette = both.quantize(255, dither=Image.Dither.NONE)
    pages = [each.quantize(palette=palette, dither=Image.Dither.NONE) for each in frames]
    durations = [round(1000 * tick)] * (len(pages) - 1) + [round(1000 * REST)]
    content = io.BytesIO()
    options = {"save_all": True, "append_images": pages[1:], "duration": durations, "loop": 0}
    pages[0].save(content, "GIF", optimize=True, comment=comment.encode(), **options)
    return content.getvalue()


def mark_of(report: bytes) -> str:
    """What the animation says of the report that it shows."""
    return f"{NAME}.json {hashlib.sha256(report).hexdigest()}"


def write_race(folder: Path, runs: Sequence[Run], report: Mapping[str, Any]) -> None:
    """Write race.json, race.gif, which names it in its comment, and race.png, the last frame, into a folder."""
    rows = report["rows"]
    content = json.dumps(report, indent=1).encode()
    last = frame(runs, rows, max(run.seconds for run in runs))
    write_file(folder / f"{NAME}.json", content)
    write_file(folder / f"{NAME}.gif", animation(runs, rows, mark_of(content)))
    write_file(folder / f"{NAME}.png", encode(last))
