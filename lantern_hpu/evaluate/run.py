"""One evaluation from prompts to the page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from lantern_hpu.config import Sampling
from lantern_hpu.evaluate.attributes import SIDE, WEIGHTS, Pixels, small, to_network
from lantern_hpu.evaluate.drawing import AGAIN, Column, Drawing, columns
from lantern_hpu.evaluate.fidelity import measure, total
from lantern_hpu.evaluate.folder import (
    keep_rows,
    kept_rows,
    open_folder,
    read_picture,
    stamps,
)
from lantern_hpu.evaluate.options import EvaluateOptions, FidelityOptions, Setting
from lantern_hpu.evaluate.painted import Painted, within
from lantern_hpu.evaluate.plots import plot
from lantern_hpu.evaluate.report import NOISE, PACE, Row, judged, pace, page, table
from lantern_hpu.evaluate.sets import Item, digest
from lantern_hpu.evaluate.statistics import Array, Metric, figures
from lantern_hpu.files import sha256, write_file
from lantern_hpu.pictures import to_images
from lantern_hpu.pipeline import LanternPipeline

GENERATOR, TOKENIZER = "the generator", "its tokenizer"


@dataclass
class Scoring:
    """Pictures of the painted protocol to rows of its metrics, which are kept beside the pictures."""

    protocol: Painted
    items: Sequence[Item]
    folder: Path

    def __post_init__(self) -> None:
        self.network = sha256(WEIGHTS)
        fresh = self.kept("reference", [self.protocol.reference], self._reference)["features"]
        self.metrics: list[Metric] = self.protocol.metrics(fresh)

    def _reference(self) -> dict[str, Array]:
        return {"features": self.protocol.fresh()}

    def kept(self, name: str, key: object, make: Any) -> dict[str, Array]:
        """Rows of this name that were kept, or made now."""
        file, full = (
            self.folder / "features" / f"{name}.npz",
            [self.network, digest(self.items), key],
        )
        found = kept_rows(file, json.loads(json.dumps(full)))
        if found is None:
            found = make()
            keep_rows(file, full, found)
        return found

    def of_pixels(self, pixels: Pixels, distances: Array) -> dict[str, Array]:
        rows = dict(self.protocol.rows(self.items, pixels, distances))
        told = self.protocol.by_attribute(self.items, pixels)
        return rows | {f"of {name}": np.asarray(share) for name, share in told.items()}


def pixels_of(files: Sequence[Path]) -> Pixels:
    """[n, SIDE, SIDE, 3]"""
    return np.stack(
        [small(read_picture(file)) for file in tqdm(files, desc="reading", leave=False)]
    )


@torch.no_grad()
def through_tokenizer(pipeline: LanternPipeline, pixels: Pixels) -> Iterator[Pixels]:
    """Pictures as the model's tokenizer gives them back, one at a time."""
    model = pipeline.model
    assert model.vq is not None
    weight = model.vq.quant_conv.weight
    for start in tqdm(range(0, len(pixels), 8), desc="tokenizer", unit="batch"):
        floats = to_network(pixels[start : start + 8]).to(weight.device, weight.dtype)
        codes = model.vq.encode(floats).flatten(1)
        yield from map(small, to_images(model.vq.decode_codes(codes, model.target.config.grid)))


def encodes(pipeline: LanternPipeline) -> bool:
    """Whether its tokenizer takes pictures of the generator's size."""
    vq = pipeline.model.vq
    if vq is None:
        return False
    factor = 2 ** (len(vq.config.multipliers) - 1)
    return pipeline.model.target.config.grid == (SIDE // factor, SIDE // factor)


def evaluate(
    pipeline: LanternPipeline,
    settings: Sequence[Setting],
    chosen: EvaluateOptions,
    sampling: Sampling,
    output: Path,
    about: Mapping[str, Any],
) -> str:
    """Draw what is missing, score everything, write all files; returns the table.

    Raises:
        LanternError: the folder holds something else, a picture is broken, or the model cannot draw this.
    """
    protocol = Painted(chosen.images, chosen.panels, chosen.reference)
    items = protocol.items()
    identity = {
        "protocol": protocol.name,
        "model": pipeline.model.name,
        "weights": pipeline.model.files,
        "prompts": digest(items),
        "sampling": asdict(sampling),
        "seed": chosen.seed,
    }
    open_folder(output, identity)
    drawing = Drawing(pipeline, items, sampling, chosen.seed, chosen.batch_size, output)
    wanted = columns(pipeline, settings, chosen.tree, chosen.batch_size, chosen.floor)
    drawing.draw(wanted)
    scoring = Scoring(protocol, items, output)
    baselines, distances = baseline_rows(pipeline, scoring, chosen.rounds)
    laws = law(pipeline, settings, chosen, output)
    rows = [
        row_of(drawing, scoring, column, distances, chosen.rounds, laws.get(column.name, {}))
        for column in tqdm(wanted, desc="scoring", unit="setting")
    ]
    again = next((row for row in rows if row.name == AGAIN), None)
    rows = judged(rows, again)
    return write(output, about, identity | asdict(chosen), rows, baselines, scoring.metrics)


def row_of(
    drawing: Drawing,
    scoring: Scoring,
    column: Column,
    distances: Array,
    rounds: int,
    extra: Mapping[str, Any],
) -> Row:
    """Figures of a setting's pictures."""
    shelf = drawing.shelf(column)
    drawn, files = shelf.drawn(), list(shelf.places.values())
    rows = scoring.kept(
        column.slug, stamps(files), lambda: scoring.of_pixels(pixels_of(files), distances)
    )
    told = attributes_of(rows)
    paces = pace([drawn[item.id] for item in drawing.items])
    found = figures([*PACE, *scoring.metrics], rows | paces, rounds)
    return Row(column.name, column.about(), found, {"agreement_of": told, **extra})


def attributes_of(rows: Mapping[str, Array]) -> dict[str, float]:
    return {n.removeprefix("of "): float(v) for n, v in rows.items() if n.startswith("of ")}


def baseline_rows(
    pipeline: LanternPipeline, scoring: Scoring, rounds: int
) -> tuple[list[Row], Array]:
    """The generator's own pictures of the captions, and these through the tokenizer; the distances in its panels."""
    protocol = scoring.protocol
    painted: list[Pixels] = []

    def own() -> Pixels:
        if not painted:
            painted.append(protocol.own())
        return painted[0]

    def generator() -> dict[str, Array]:
        distances = within(own()[protocol.images :], protocol.panels)
        return scoring.of_pixels(own(), distances) | {"distances": distances}

    rows = scoring.kept("generator", 0, generator)
    distances = rows["distances"]
    found = [(GENERATOR, rows)]
    if encodes(pipeline):

        def tokenizer() -> dict[str, Array]:
            through = np.stack(list(through_tokenizer(pipeline, own())))
            return scoring.of_pixels(through, distances)

        found.append((TOKENIZER, scoring.kept("tokenizer", pipeline.model.files, tokenizer)))
    return [
        Row(name, {}, figures(scoring.metrics, rows, rounds), {"agreement_of": attributes_of(rows)})
        for name, rows in found
    ], distances


def law(
    pipeline: LanternPipeline, settings: Sequence[Setting], chosen: EvaluateOptions, output: Path
) -> dict[str, dict[str, Any]]:
    """By setting, how far it moves the law of the next token."""
    if not chosen.places:
        return {}
    options = FidelityOptions(images=chosen.places, timed=1, seed=chosen.seed)
    file = output / "law.json"
    key = [asdict(options), pipeline.model.files]
    known: dict[str, Any] = {}
    if file.exists():
        data = json.loads(file.read_text())
        known = data["rows"] if data["key"] == json.loads(json.dumps(key)) else {}
    missing = [setting for setting in settings if setting.name not in known]
    if missing:
        with tqdm(total=total(missing, options), desc="law", unit="image") as bar:
            for row in measure(pipeline, missing, options, bar):
                known[row["row"]] = {name: row[name] for name in ("tv", "tv_interval")}
        write_file(file, json.dumps({"key": key, "rows": known}).encode(), force=True)
    return known


def write(
    output: Path,
    about: Mapping[str, Any],
    settings: Mapping[str, Any],
    rows: Sequence[Row],
    baselines: Sequence[Row],
    metrics: Sequence[Metric],
) -> str:
    """All files of the result; returns the table."""
    told = {
        "protocol": (
            f"Protocol `scenes`: {settings['images']} captions of the generator once each and {settings['panels']} "
            f"four times; {settings['reference']} fresh pictures as reference; {settings['batch_size']} images "
            "a batch."
        ),
        "notes": [
            "± is half of a 95 % interval (bootstrap over images).",
            f"{NOISE}: no farther from `ar` than `ar` with other seeds is, or the interval of the difference holds 0.",
            "Frechet distance: per cent of the reference's variance, in the features of a small network trained on "
            "the generator; it cannot be compared with figures of other networks.",
        ],
    }
    everything = [*rows, *baselines]
    document = {
        **about,
        "settings": settings,
        **told,
        "rows": [row.as_json() for row in rows],
        "baselines": [row.as_json() for row in baselines],
    }
    named = {"quality-tokens": PACE[0], "quality-seconds": PACE[1]}
    files = {f"{n}.png": plot(rows, baselines, metrics, axis) for n, axis in named.items()}
    files["evaluation.json"] = json.dumps(document, indent=1).encode()
    files["evaluation.md"] = page({**about, **told}, everything, metrics).encode()
    for name, data in files.items():
        write_file(output / name, data, force=True)
    return table(everything, metrics)
