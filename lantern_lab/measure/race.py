"""One prompt drawn by several settings, each alone: figures, and an animation of them side by side at their speeds.

A setting warms up, and then draws while nothing else runs. The times at which tokens become known are recorded, and
the animation shows the finished picture as far as it was known at each time.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from lantern_hpu.core import Request
from lantern_hpu.files import write_file
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import encode
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.results.tables import Table, figure, ratio
from lantern_lab.measure.meter import WARM_STEPS, Meter, TimedBatch, take_turns
from lantern_lab.measure.rows import Case, Row, doubtful_step

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
    """A setting with its fastest batch of one; `columns` are the tokens of a picture's row."""

    row: Row
    batch: TimedBatch
    columns: int

    @property
    def tokens(self) -> int:
        return self.batch.records[0].tokens

    def known(self, seconds: float) -> int:
        """Tokens that were known at a time; all of them once the pixels were there too."""
        if seconds >= self.batch.seconds:
            return self.tokens
        return max((tokens for when, tokens, *_ in self.batch.reads if when <= seconds), default=0)


def race(
    pipeline: LanternPipeline, settings: Sequence[Resolved], prompt: str, seed: int, turns: int
) -> list[Run]:
    """Each setting's fastest run of so many, which settings take in turns: all of them draw the same picture.

    Turns whose times cannot be of a quiet machine are followed by as many again, once.
    """
    meters = []
    with ProgressBar(turns * len(settings), "picture") as bar:
        for setting in settings:
            bar.set_description(f"{setting}, warming up")
            request = Request(prompt, seed, pipeline.model.sampling, setting.relaxation)
            case = Case(setting, pipeline.fit.graphs, 1)
            # The same picture in each turn
            meters.append(
                Meter(pipeline, case, [request] * 2 * turns, WARM_STEPS, bar.set_postfix_str)
            )
        take_turns(meters, turns, bar)
        runs = runs_of(meters)
        if any("doubt" in run.row.figures for run in runs):
            bar.total *= 2
            take_turns(meters, turns, bar)
            runs = runs_of(meters)
    return runs


def runs_of(meters: Sequence[Meter]) -> list[Run]:
    """With speeds against the run of `ar`, unless that is in doubt."""
    fastest = [min(meter.batches, key=lambda batch: batch.seconds) for meter in meters]
    ar = next(
        (b for m, b in zip(meters, fastest, strict=True) if m.case.setting.method == "ar"), None
    )
    result = []
    for meter, batch in zip(meters, fastest, strict=True):
        setting, (record,) = meter.case.setting, batch.records
        step = batch.stats.ms_per_step
        doubt = ""
        if ar is not None and batch is not ar:
            doubt = doubtful_step(setting.tree.size, step, ar.stats.ms_per_step)
        figures = {
            "setting": str(setting),
            "lossless": not setting.relaxation.active and setting.commit < 2,
            "seconds": round(batch.seconds, 4),
            "ms_per_step": step,
            "tokens_per_step": record.tokens_per_step,
            "times_ar": None if doubt or not ar else round(ar.seconds / batch.seconds, 4),
            **({"doubt": doubt} if doubt else {}),
            "tv_per_token": record.tv_mean,
            "times": [[round(when, 4), tokens] for when, tokens, *_ in batch.reads],
        }
        columns = meter.pipeline.model.target.config.grid[1]
        result.append(Run(Row.of(meter.case, figures), batch, columns))
    return result


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


def frame(runs: Sequence[Run], seconds: float) -> Image.Image:
    """What is known of each picture at a time; of finished ones with what they gained and cost."""
    page = Image.new("RGB", (len(runs) * (SIDE + GAP) + GAP, SIDE + HEAD + GAP), "white")
    pen = ImageDraw.Draw(page)
    font = ImageFont.load_default(17)
    small = ImageFont.load_default(13)
    for index, run in enumerate(runs):
        row = run.row.figures
        left = GAP + index * (SIDE + GAP)
        page.paste(partly(run, run.known(seconds)), (left, HEAD))
        clock = f"{min(seconds, run.batch.seconds):.1f} s"
        kind = "lossless" if row["lossless"] else f"relaxed, TV {cost(row['tv_per_token'])} a token"
        pen.text((left, 4), row["setting"], "black", fitting(row["setting"], SIDE - 60))
        pen.text((left + SIDE, 4), clock, "black", font, anchor="ra")
        pen.text((left, 25), f"{row['tokens_per_step']:.2f} tokens a step", "dimgrey", small)
        pen.text((left, 42), kind, "dimgrey", small)
        if seconds >= run.batch.seconds and (row["times_ar"] or "doubt" in row):
            gain = "in doubt" if "doubt" in row else f"{row['times_ar']:.2f} x ar"
            pen.text((left + SIDE, 25), gain, "black", small, anchor="ra")
    return page


def fitting(text: str, width: int) -> Any:
    """The largest font in which a text is no wider than so many pixels."""
    fonts = [ImageFont.load_default(size) for size in range(17, 6, -1)]
    return next((font for font in fonts if font.getlength(text) <= width), fonts[-1])


def partly(run: Run, known: int) -> Image.Image:
    """The picture with what is not known yet in grey: whole rows of tokens, and the part of one."""
    picture = run.batch.pictures[0].resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    rows = run.tokens // run.columns
    columns = run.columns
    row, column = divmod(known, columns)
    pen = ImageDraw.Draw(picture)
    if known < run.tokens:
        top = row * SIDE // rows
        under = (row + 1) * SIDE // rows
        pen.rectangle((column * SIDE // columns, top, SIDE, under), GREY)
        pen.rectangle((0, under, SIDE, SIDE), GREY)
    return picture


def animation(runs: Sequence[Run], comment: str) -> bytes:
    """A GIF at the speed of the runs that repeats; only what changes between frames is kept."""
    last = max(run.batch.seconds for run in runs)
    tick = max(TICK, round(last / FRAMES, 2))
    frames = [frame(runs, i * tick) for i in range(int(last / tick) + 2)]
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
    content = json.dumps(report, indent=1).encode()
    last = frame(runs, max(run.batch.seconds for run in runs))
    write_file(folder / f"{NAME}.json", content)
    write_file(folder / f"{NAME}.gif", animation(runs, mark_of(content)))
    write_file(folder / f"{NAME}.png", encode(last))
