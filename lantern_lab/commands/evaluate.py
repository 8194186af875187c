"""What a method costs in pictures: draw a set of prompts with many settings, score them, put them in one table.

    lantern-hpu evaluate --model builtin --output evaluation
    lantern-hpu evaluate --model llamagen-t2i-256 --preset lantern --prompts-file captions_val2017.json \
        --reference val2017 --output evaluation
    lantern-hpu evaluate --config protocol.toml --output evaluation

A run that was stopped is resumed; a further setting, or another metric, is added to what is there.
docs/evaluation.md has the protocols.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields, replace

from lantern_hpu.backends import DeviceOptions, prepare
from lantern_hpu.commands import options
from lantern_hpu.commands.options import Parser, add_fields, from_args, given_fields
from lantern_hpu.core import Sampling
from lantern_hpu.errors import Arg, OptionError, choices, exit_code, listed, words
from lantern_hpu.models.files.names import PartOverrides
from lantern_lab.evaluate.metrics import PUBLISHED
from lantern_lab.evaluate.options import (
    PRESETS,
    SCENES,
    SCENES_ROWS,
    EvaluateRequest,
    Library,
    PaintedOptions,
    folders_of,
    preset_of,
)
from lantern_lab.evaluate.sets import export

NO_METRIC = "none"
# A small form, for a first look: what is not given
QUICK = {"method": "ar,lantern++", "num_images": 80, "panels": 4, "fresh": 400, "rounds": 50}


# Keys of a configuration file, which makes a protocol one's own: no options of the command line
KEYS = (
    *("prompts", "metrics", "inception", "vgg", "clip", "hps", "any_weights", "rounds", "no_floor"),
    *("panels", "fresh", "folder", "export", "seed"),
    *("cfg_scale", "temperature", "top_k", "top_p"),
    *("drafter", "vq", "text_encoder", "image_size", "graphs", "quantize"),
)


def make_parser() -> Parser:
    more = f"Keys of --config alone: {', '.join(KEYS)} (docs/evaluation.md)."
    about = "Compare the image quality of methods: FID, KID, CLIP score and others."
    parser = Parser("lantern-hpu evaluate", description=about, epilog=more)
    add = parser.add_argument
    add_fields(parser, EvaluateRequest, "model")
    add_fields(parser, PartOverrides)
    protocols = ", ".join([SCENES, *PRESETS])
    add("--preset", help=f"protocol: {protocols} ({SCENES} for the embedded model)")
    add_fields(parser, Library)
    options.add_method_options(parser, f"the preset's; of {SCENES}: {SCENES_ROWS}")
    images = f"number of images, from the first prompts of the set (all if not set); for {SCENES}"
    add_fields(parser, PaintedOptions, num_images=images)
    add_fields(parser, EvaluateRequest, "seed", "batch_size", "rounds", "places")
    small = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in QUICK.items())
    look = f"for {SCENES}: a first look, of {small}"
    add("--quick", action="store_true", default=None, help=look)
    add("--no-floor", action="store_true")
    add("--folder", action="append", default=[])
    add("--metrics")
    options.add_image_params(parser, *(part.name for part in fields(Sampling)))
    options.add_device_options(parser)
    add_fields(parser, DeviceOptions, "threads", "quantize")
    add_fields(parser, EvaluateRequest, "workers", "export")
    where = "output folder; an interrupted run in it is resumed"
    add("--output", type=options.file_path, required=True, metavar="FOLDER", help=where)
    parser.only_keys(*KEYS)
    return parser


# ------------------------------------------------------------------------------------ what is asked for


def preset_for(args: argparse.Namespace) -> str:
    name = args.preset or (SCENES if args.model in (None, "builtin") else None)
    if name is None:
        why, hint = "figures of two protocols cannot be compared", choices([SCENES, *PRESETS])
        raise OptionError(words(Arg("preset"), "is missing"), why, hint)
    if name != SCENES:
        preset_of(name)
    library = "prompts prompts_file metrics reference inception vgg clip hps export"
    others = (library if name == SCENES else "fresh panels quick").split()
    given = [option for option in others if getattr(args, option) is not None]
    if given:
        what = words(Arg(given[0]), "has no meaning for", Arg("preset", name))
        raise OptionError(what)
    return str(name)


def library_of(args: argparse.Namespace, preset: str) -> Library:
    metrics: tuple[str, ...] | None = None
    if args.metrics == NO_METRIC:
        metrics = ()
    elif args.metrics is not None:
        metrics = tuple(listed(args.metrics, "metrics", "metric", PUBLISHED))
    return from_args(Library, args, preset=preset_of(preset), metrics=metrics)


def evaluate_request(args: argparse.Namespace) -> EvaluateRequest:
    preset = preset_for(args)
    if args.quick:
        given = {name: value for name, value in vars(args).items() if value is not None}
        args = argparse.Namespace(**vars(args) | QUICK | given)
    library = None if preset == SCENES else library_of(args, preset)
    rows = SCENES_ROWS if library is None else library.preset.rows
    made = {
        "settings": options.settings_of(args, rows),
        "library": library,
        "painted": from_args(PaintedOptions, args) if library is None else PaintedOptions(),
        "floor": not args.no_floor,
        "sampling": given_fields(Sampling, args),
        "given": from_args(PartOverrides, args),
        "device": from_args(DeviceOptions, args),
        "folders": folders_of(args.folder),
    }
    return from_args(EvaluateRequest, args, **made)


# ------------------------------------------------------------------------------------ the run


def evaluate(wanted: EvaluateRequest, argv: Sequence[str]) -> str:
    """Draw, score and write. -> the table"""
    library, device = wanted.library, wanted.device
    if wanted.workers is not None:  # what cards there are is for those who draw
        device = device.on_host()
    prepare(device.device, device.graphs)  # before torch is imported
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_lab.evaluate.evaluation import Evaluation, Scorer
    from lantern_lab.evaluate.scorer_builtin import PaintedScorer
    from lantern_lab.evaluate.scorer_published import LibraryScorer
    from lantern_lab.measure.reports import heading

    # What a protocol lacks is an error before the model is loaded.
    scorer: Scorer | None = None
    if library is not None:
        scorer = LibraryScorer(library, wanted.images, wanted.output)
    loaded = LanternPipeline.from_pretrained(wanted.model, given=wanted.given, **vars(device))
    with closing(loaded) as pipeline:
        model = pipeline.model
        preset = {} if library is None else library.preset.sampling_for(model.name)
        model.sampling = replace(model.sampling, **preset | dict(wanted.sampling))
        scorer = scorer or PaintedScorer(wanted.painted, pipeline, wanted.output)
        about = heading("lantern_hpu.evaluate", pipeline, argv)
        evaluation = Evaluation(pipeline, scorer, wanted, about)
        table = evaluation.run()
        if wanted.export and library is not None and library.prompts_file is not None:
            for column in evaluation.columns:
                places = evaluation.drawing.folder_of(column).places
                copies, source = wanted.export / column.slug, library.prompts_file
                export(str(library.prompts), scorer.items, places, source, copies)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    args = parser.parse_args(given)

    def command() -> None:
        print(evaluate(evaluate_request(args), given))
        print(f"wrote {args.output / 'evaluation.json'}, .md and the plots")

    return exit_code(command, parser.spell)
