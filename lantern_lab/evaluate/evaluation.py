"""One evaluation from prompts to the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lantern_hpu.errors import OptionError
from lantern_hpu.files import parse_json, write_file
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.progress import ProgressBar
from lantern_lab.evaluate.drawing import (
    AGAIN,
    Column,
    Drawing,
    open_evaluation,
    pictures_in,
    settings_columns,
    share_with_workers,
)
from lantern_lab.evaluate.metrics import Rows, figures
from lantern_lab.evaluate.options import EvaluateRequest
from lantern_lab.evaluate.quality_rows import (
    NOISE,
    PACE,
    SECONDS,
    SPENT,
    STEPS,
    QualityRow,
    compare_with_ar,
    pace,
    plot,
    quality_table,
)
from lantern_lab.evaluate.scorer_builtin import PaintedScorer, extra_of
from lantern_lab.evaluate.scorer_published import LibraryScorer
from lantern_lab.evaluate.sets import digest
from lantern_lab.measure.fidelity import fidelity_rows, images_total
from lantern_lab.measure.options import FidelityOptions
from lantern_lab.measure.plots import in_style
from lantern_lab.measure.reports import write_report

SIDE_BY_SIDE = (
    "Workers drew the pictures, side by side: seconds an image are those of one of them, and the device named here is "
    "that of the process that scored."
)


# Turns pictures into rows, and knows what is made of them
Scorer = PaintedScorer | LibraryScorer


class Evaluation:
    """A model, settings and a protocol, and the folder of all that comes of them."""

    def __init__(
        self,
        pipeline: LanternPipeline,
        scorer: Scorer,
        request: EvaluateRequest,
        about: Mapping[str, Any],
    ) -> None:
        """
        Args:
            about: the run, for reports.
        """
        self.pipeline, self.scorer, self.request, self.about = pipeline, scorer, request, about
        self.settings, self.output = request.settings, request.output
        self.sampling, size = pipeline.model.sampling, request.batch_size
        self.drawing = Drawing(
            pipeline, scorer.items, self.sampling, request.seed, size, self.output
        )
        self.columns = settings_columns(pipeline, request)

    def run(self) -> str:
        """Draw what is missing, score everything, write all files; returns the table."""
        with in_style("evaluate"):  # matplotlib is there
            pass
        request, items = self.request, self.scorer.items
        outside = {name: self.outside(folder) for name, folder in request.folders.items()}
        identity = self.identity()
        open_evaluation(self.output, identity)
        share = None
        if request.workers is not None:
            share = share_with_workers(request, items, self.sampling, request.workers)
        self.drawing.draw(self.columns, share)
        self.scorer.prepare()
        moved = self.fidelity()
        rows = [
            self.score(column, moved.get(column.name, {}))
            for column in tqdm(self.columns, desc="scoring", unit="setting")
        ]
        rows += [
            self.row(name, self.scorer.rows(f"folder-{name}", files))
            for name, files in outside.items()
        ]
        names = ("batch_size", "rounds", "places", "floor")
        sizes = {name: getattr(request, name) for name in names}
        rows = compare_with_ar(rows, next((row for row in rows if row.name == AGAIN), None))
        return self.write(identity | sizes, rows)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        return {
            "protocol": self.scorer.name,
            "model": self.pipeline.model.name,
            "weights": self.pipeline.model.files,
            "prompts": digest(self.scorer.items),
            "sampling": asdict(self.sampling),
            "seed": self.request.seed,
        }

    def outside(self, folder: Path) -> list[Path]:
        """The pictures of a folder, in the order of the items."""
        places, wanted = dict[str, Path](), {item.id for item in self.scorer.items}
        for file in pictures_in(folder):
            other = places.setdefault(file.stem, file)
            if other != file and file.stem in wanted:
                why = f"{other} and {file}: two runs, or one picture twice"
                raise OptionError(
                    f"{folder} holds {file.stem} more than once", why, "a folder of one run"
                )
        missing = [item.id for item in self.scorer.items if item.id not in places]
        if missing:
            some = ", ".join(f"{name}.png" for name in missing[:3])
            why = f"{len(missing)} of {len(self.scorer.items)} are missing, first {some}"
            raise OptionError(f"{folder} does not hold the pictures of these prompts", why)
        return [places[item.id] for item in self.scorer.items]

    def score(self, column: Column, extra: Mapping[str, Any]) -> QualityRow:
        """Figures of a setting."""
        pictures = self.drawing.folder_of(column)
        lines, files = pictures.drawn(), list(pictures.places.values())
        paces = pace([lines[item.id] for item in self.scorer.items])
        row = self.row(column.name, self.scorer.rows(column.slug, files), paces)
        return replace(row, about=column.about(), extra={**row.extra, **extra})

    def row(self, name: str, rows: Rows, paces: Rows | None = None) -> QualityRow:
        """Figures of the rows of pictures; `paces` are those of drawing them, where they are known."""
        metrics = [*(PACE if paces else ()), *self.scorer.metrics]
        result = figures(metrics, {**rows, **(paces or {})}, self.request.rounds)
        return QualityRow(name, {}, result, extra_of(rows))

    def fidelity(self) -> dict[str, dict[str, Any]]:
        """By setting, how far it moves the distribution of the next token."""
        if not self.request.places:
            return {}
        chosen = self.request
        options = FidelityOptions(chosen.places, draws=64, timed=1, seed=chosen.seed)
        file = self.output / "fidelity.json"
        key = json.loads(json.dumps([asdict(options), asdict(self.sampling)]))
        known: dict[str, Any] = {}
        if file.exists():
            data = parse_json(file.read_text(encoding="utf-8"))
            known = data["rows"] if data["key"] == key else {}
        missing = [setting for setting in self.settings if str(setting) not in known]
        if missing:
            images = images_total(self.pipeline, missing, options)
            with ProgressBar(images, "image", desc="fidelity") as bar:
                for row in fidelity_rows(self.pipeline, missing, options, bar):
                    known[row["row"]] = {name: row[name] for name in ("tv", "tv_interval")}
            write_file(file, json.dumps({"key": key, "rows": known}).encode(), force=True)
        return known

    def write(self, settings: Mapping[str, Any], rows: Sequence[QualityRow]) -> str:
        """All files of the result; returns the table."""
        baselines = [self.row(name, made) for name, made in self.scorer.baselines().items()]
        everything, metrics = [*rows, *baselines], self.scorer.metrics
        about = {
            **self.about,
            "protocol": f"{self.scorer.protocol()} {self.request.batch_size} images a batch.",
            "notes": [
                f"± is half of a 95 % interval: bootstrap over pictures, {self.request.rounds} rounds at most.",
                f"{NOISE}: no farther from `ar` than `ar` with other seeds is, or the interval of the difference "
                "holds 0.",
                *self.scorer.notes(),
                *([] if self.request.workers is None else [SIDE_BY_SIDE]),
            ],
        }
        document = {
            **about,
            "settings": settings,
            "rows": [row.as_json() for row in rows],
            "baselines": [row.as_json() for row in baselines],
        }
        timed = [row for row in rows if row.about]
        axes = {"quality-tokens": STEPS, "quality-seconds": SECONDS} if metrics else {}
        metered = [row for row in timed if SPENT.name in row.figures]
        if any(row.figures[SPENT.name].value for row in metered):
            axes |= {"quality-tv": SPENT} if metrics else {}
        files = {f"{n}.png": plot(timed, baselines, metrics, axis) for n, axis in axes.items()}
        if "quality-tv" in axes:
            files["tokens-tv.png"] = plot(metered, [], [STEPS, SECONDS], SPENT)
        table = quality_table(everything, metrics)
        names = [name.removesuffix(".png") for name in files]
        page = "\n\n".join(
            [
                f"# What a method costs in pictures: {about['model']}",
                str(about["protocol"]),
                table.markdown(),
                "\n".join(f"- {note}" for note in about["notes"]),
                *(f"![{name}]({name}.png)" for name in names),
                f"Made on {about['date']} with `{about['command']}`\n",
            ]
        )
        write_report(self.output / "evaluation.json", document, force=True)
        for name, data in {**files, "evaluation.md": page.encode()}.items():
            write_file(self.output / name, data, force=True)
        return table.markdown()
