"""An evaluation from its options to its tables. Torch is loaded once they are checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import HOST, prepare
from lantern_hpu.errors import OptionError, check_ranges, option
from lantern_hpu.methods.request import Sampling
from lantern_hpu.methods.setting import AUTO, Setting
from lantern_hpu.models.files.names import Given
from lantern_hpu.models.options import DeviceOptions
from lantern_lab.evaluate.options import EvaluateOptions, PaintedOptions
from lantern_lab.evaluate.protocols import Library
from lantern_lab.evaluate.sets import export
from lantern_lab.evaluate.workers import Order, Workers

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_lab.evaluate.evaluation import Scorer

EXPORTED = ("geneval", "dpg")


@dataclass(frozen=True)
class EvaluateRequest:
    """What is drawn, by which protocol it is scored, and where it goes.

    Attributes:
        library: of a protocol of the literature; None is the embedded model's, of which `painted` says how much.
        sampling: in place of the protocol's and the model's.
        images: of the set's first prompts; None is all.
        folders: pictures drawn elsewhere, by the names of their rows.
    """

    output: Path
    settings: Sequence[Setting]
    library: Library | None = None
    painted: PaintedOptions = field(default_factory=PaintedOptions)
    options: EvaluateOptions = field(default_factory=EvaluateOptions)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    given: Given = field(default_factory=Given)
    device: DeviceOptions = field(default_factory=DeviceOptions)
    folders: Mapping[str, Path] = field(default_factory=dict)
    images: int | None = None
    model: str = option("builtin", "model name, Hub id, folder or weights file")
    workers: int | None = option(
        None,
        "Ray processes that generate, one per card; this process scores (default: generate in this process)",
        metavar="N",
        low=1,
        high=4096,
    )
    export: Path | None = option(
        None, "also copy the images in the layout of GenEval or DPG-Bench", metavar="FOLDER"
    )

    def __post_init__(self) -> None:
        check_ranges(self)
        Sampling(**self.sampling)
        if self.export and (self.library is None or self.library.prompts not in EXPORTED):
            hint = "--prompts geneval, or dpg"
            raise OptionError("--export needs the prompts of a benchmark", hint=hint)
        if self.workers is not None and (self.options.places or self.options.tree == AUTO):
            why = "the process that scores does not draw"
            hint = "the same command without --workers goes on with what was drawn"
            raise OptionError(f"--workers excludes --places and --tree {AUTO}", why, hint)


def evaluate(wanted: EvaluateRequest, argv: Sequence[str]) -> str:
    """Draw, score and write. -> the table"""
    library, device = wanted.library, wanted.device
    if wanted.workers is not None:  # what cards there are is for those who draw
        device = replace(device, device=HOST, dtype="auto", graphs="auto", emulate=False)
    prepare(device.device, device.graphs, device.emulate)  # before torch is imported
    from lantern_hpu.bench.report import heading
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_lab.evaluate.evaluation import Evaluation
    from lantern_lab.evaluate.scorer_published import LibraryScorer

    # Whatever a protocol lacks is an error before the model is loaded.
    scorer: Scorer | None = None
    if library is not None:
        scorer = LibraryScorer(library, wanted.images, wanted.output)
    with closing(
        LanternPipeline.from_pretrained(wanted.model, given=wanted.given, **vars(device))
    ) as pipeline:
        sampling = pipeline.model.sampling
        if library is not None:
            sampling = replace(sampling, **library.preset.sampling_for(pipeline.model.name))
        sampling = pipeline.model.sampling = replace(sampling, **wanted.sampling)
        scorer = scorer or painted_scorer(pipeline, wanted)
        evaluation = Evaluation(
            pipeline,
            scorer,
            wanted.settings,
            wanted.options,
            sampling,
            wanted.output,
            wanted.folders,
            heading("lantern_hpu.evaluate", pipeline, argv),
            workers_for(wanted, scorer, sampling),
        )
        table = evaluation.run()
        if wanted.export and library is not None and library.prompts_file is not None:
            for name, places in evaluation.places().items():
                copies = wanted.export / name
                export(str(library.prompts), scorer.items, places, library.prompts_file, copies)
    return table


def painted_scorer(pipeline: LanternPipeline, wanted: EvaluateRequest) -> Scorer:
    """Of the embedded model's protocol."""
    from lantern_lab.evaluate.scorer_builtin import Painted, PaintedScorer, drawn_side

    sizes = wanted.painted
    painted = Painted(sizes.images, sizes.panels, sizes.fresh, drawn_side(pipeline))
    return PaintedScorer(painted, pipeline, wanted.output)


def workers_for(wanted: EvaluateRequest, scorer: Scorer, sampling: Sampling) -> Workers | None:
    """The other processes that draw, if any."""
    if wanted.workers is None:
        return None
    order = Order(
        wanted.model,
        wanted.given.resolved(),
        wanted.device,
        scorer.items,
        wanted.settings,
        sampling,
        wanted.options,
        wanted.output.resolve(),
    )
    return Workers(wanted.workers, order)


def folders_of(texts: Sequence[str]) -> dict[str, Path]:
    """Folders of pictures by their names, of options of the form NAME=FOLDER."""
    folders: dict[str, Path] = {}
    for text in texts:
        name, equals, place = text.partition("=")
        if not equals or not name or name in folders:
            raise OptionError(f"--folder is {text}", "a new NAME=FOLDER was expected")
        if not Path(place).is_dir():
            raise OptionError(f"--folder is {text}", f"{place} is no folder")
        folders[name] = Path(place)
    return folders
