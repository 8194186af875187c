"""What a method costs in pictures: draw a set of prompts with many settings, score them, put them in one table.

    lantern-hpu evaluate --model builtin --output evaluation
    lantern-hpu evaluate --model llamagen-t2i-256 --preset lantern --prompts-file captions_val2017.json \
        --reference val2017 --output evaluation

A run that was stopped goes on where it was; a further setting, or another metric, is added to what is there.
docs/evaluation.md has the protocols.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lantern_hpu.backends import HOST, prepare
from lantern_hpu.commands import options
from lantern_hpu.commands.options import taken
from lantern_hpu.errors import OptionError, choices, exit_code, listed, require
from lantern_hpu.lab.pictures.options import EvaluateOptions, PaintedOptions
from lantern_hpu.lab.pictures.protocols import NEEDS, PRESETS, SCENES, Library, preset_of
from lantern_hpu.lab.pictures.sets import SETS, export
from lantern_hpu.lab.pictures.workers import Order, Workers
from lantern_hpu.methods.relaxation import PRESETS as RELAXATIONS
from lantern_hpu.methods.request import Sampling
from lantern_hpu.methods.setting import Setting
from lantern_hpu.methods.table import AUTO

if TYPE_CHECKING:
    from lantern_hpu.lab.pictures.run import Scorer
    from lantern_hpu.pipeline import LanternPipeline

SCENES_ROWS = (
    "ar,eagle,eagle2,lantern:delta-0.1,lantern:delta-0.2,lantern:delta-0.4,"
    "lantern++:lambda=2,lantern++:lambda-5,lantern++:lambda-20"
)
NO_METRIC = "none"
EXPORTED = ("geneval", "dpg")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu evaluate", description="What a method costs in pictures."
    )
    what = parser.add_argument_group("what is drawn")
    add_drawn(what)
    options.add_sampling_options(
        parser.add_argument_group("sampling (default: the preset's, else the model's own)")
    )
    add_scores(parser.add_argument_group("how it is scored"))
    how = parser.add_argument_group("how it runs")
    options.add_device_options(how)
    options.add_running_options(how)
    many = "processes that draw, one a card, through Ray; this one scores (none: this one draws)"
    how.add_argument("--workers", type=int, metavar="N", help=many)
    how.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="also to go on")
    return parser


def add_drawn(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    protocols = ", ".join([SCENES, *PRESETS])
    form = "comma-separated METHOD, METHOD:PRESET or METHOD:NAME=VALUE:..., of lambda, delta, omega, nu, mu, k and"
    add("--model", default="builtin", help="as for `generate` (builtin)")
    options.add_part_options(group)
    add("--preset", help=f"protocol: {protocols} ({SCENES} for the embedded model)")
    add("--prompts", help=f"{', '.join(SETS)} (the preset's)")
    add("--prompts-file", type=Path, metavar="FILE", help="what you have of the set")
    add(
        "--rows", help=f"{form} {', '.join(RELAXATIONS)} (the preset's; of {SCENES}: {SCENES_ROWS})"
    )
    add("--tree", help="comma-separated, each for the methods that draft such a tree (their own)")
    add("--images", type=int, help=f"of the set's first prompts (all; of {SCENES} 400)")
    add("--panels", type=int, help=f"of {SCENES}: captions that are drawn four times (25)")
    add("--seed", type=int, help="of the first picture (0)")
    add("--no-floor", action="store_true", help="draw `ar` with one set of seeds alone")
    add("--batch-size", type=int, help="images decoded together (8)")
    again = "score pictures drawn elsewhere too, named by the prompts' ids; repeat for several"
    add("--folder", action="append", default=[], metavar="NAME=FOLDER", help=again)


def add_scores(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    probs = "places where the distribution of the next token is measured, as by `fidelity`; 0 leaves it out (0)"
    add("--metrics", help=f"comma-separated, of {', '.join(NEEDS)}; or {NO_METRIC} (the preset's)")
    add(
        "--reference", type=Path, metavar="PATH", help="folder of pictures, or a .npz of statistics"
    )
    add("--fresh", type=int, help=f"of {SCENES}: fresh pictures of the generator (4000)")
    add("--rounds", type=int, help="of the bootstrap (200)")
    add("--places", type=int, help=probs)
    for name in ("inception", "vgg", "clip", "hps"):
        add(f"--{name}", type=Path, metavar="PATH", help="weights, where no cache has them")
    add("--any-weights", action="store_true", help="take weights that are not the published ones")
    add("--export", type=Path, metavar="FOLDER", help="copies as GenEval or DPG-Bench reads them")


# ------------------------------------------------------------------------------------ what is asked for


def preset_for(args: argparse.Namespace) -> str:
    """
    Raises:
        OptionError: none was given for a model that has no own, or options of another one.
    """
    name = args.preset or (SCENES if args.model == "builtin" else None)
    if name is None:
        hint = choices([SCENES, *PRESETS])
        raise OptionError(
            "--preset is missing", "figures of two protocols cannot be compared", hint
        )
    if name != SCENES:
        preset_of(name)
    others = {
        True: "prompts prompts_file metrics reference inception vgg clip hps export".split(),
        False: "fresh panels".split(),
    }[name == SCENES]
    given = [option for option in others if getattr(args, option) is not None]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise OptionError(f"{option} has no meaning for --preset {name}")
    return str(name)


def check_workers(args: argparse.Namespace) -> None:
    """
    Raises:
        OptionError: too many, or an option that only the process which draws can serve.
    """
    if args.workers is None:
        return
    require(1 <= args.workers <= 4096, "--workers", args.workers, "1 to 4096")
    if args.places or args.tree == AUTO:
        why = "the process that scores does not draw"
        hint = "the same command without --workers goes on with what was drawn"
        raise OptionError(f"--workers excludes --places and --tree {AUTO}", why, hint)


def library_of(args: argparse.Namespace, preset: str) -> Library:
    """
    Raises:
        OptionError: an unknown metric.
    """
    found = Library(
        **{name: value for name, value in taken(Library, args).items() if name not in CHOSEN},
        preset=preset_of(preset),
    )
    if args.metrics is None:
        return found
    none = args.metrics == NO_METRIC
    named = [] if none else listed(args.metrics, "--metrics", "metric", tuple(NEEDS))
    return replace(found, metrics=tuple(named))


CHOSEN = ("preset", "metrics")


def folders_of(args: argparse.Namespace) -> dict[str, Path]:
    """
    Raises:
        OptionError: not of the form NAME=FOLDER, twice, or no folder.
    """
    found: dict[str, Path] = {}
    for text in args.folder:
        name, equals, place = text.partition("=")
        if not equals or not name or name in found:
            raise OptionError(f"--folder is {text}", "a new NAME=FOLDER was expected")
        if not Path(place).is_dir():
            raise OptionError(f"--folder is {text}", f"{place} is no folder")
        found[name] = Path(place)
    return found


# ------------------------------------------------------------------------------------ all of it


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Check the options, draw, score, print and write."""
    preset = preset_for(args)
    library = None if preset == SCENES else library_of(args, preset)
    rows = args.rows or (SCENES_ROWS if library is None else library.preset.rows)
    settings = [Setting.parse(text) for text in listed(rows, "--rows")]
    chosen = EvaluateOptions(**taken(EvaluateOptions, args), floor=not args.no_floor)
    painted = PaintedOptions(**taken(PaintedOptions, args)) if library is None else None
    options.sampling_options(args, Sampling())
    folders, given = folders_of(args), options.given_parts(args)
    device = options.device_options(args)
    if args.export and (library is None or library.prompts not in EXPORTED):
        raise OptionError(
            "--export needs the prompts of a benchmark", hint="--prompts geneval, or dpg"
        )
    check_workers(args)
    if args.workers is not None:  # what cards there are is for those who draw
        device = replace(device, device=HOST, dtype="auto", graphs="auto", emulate=False)
    prepare(device.device, device.graphs, device.emulate)  # before torch is imported
    from lantern_hpu.lab.pictures.run import Evaluation
    from lantern_hpu.lab.rows import heading
    from lantern_hpu.pipeline import LanternPipeline

    # Whatever a protocol lacks is said before the model is loaded.
    scorer = None if library is None else literature(library, args)
    with closing(
        LanternPipeline.from_pretrained(args.model, given=given, **vars(device))
    ) as pipeline:
        sampling = pipeline.model.sampling
        if library is not None:
            sampling = replace(sampling, **library.preset.sampling_for(pipeline.model.name))
        sampling = pipeline.model.sampling = options.sampling_options(args, sampling)
        about = heading("lantern_hpu.evaluate", pipeline, argv)
        scorer = scorer or own(painted or PaintedOptions(), pipeline, args.output)
        workers = None
        if args.workers is not None:
            folder, drawing = args.output.resolve(), options.device_options(args)
            given = given.resolved()
            order = Order(
                args.model, given, drawing, scorer.items, settings, sampling, chosen, folder
            )
            workers = Workers(args.workers, order)
        evaluation = Evaluation(
            pipeline, scorer, settings, chosen, sampling, args.output, folders, about, workers
        )
        print(evaluation.run())
        if args.export and library is not None and library.prompts_file is not None:
            for name, places in evaluation.places().items():
                file = library.prompts_file
                export(
                    str(library.prompts), evaluation.scorer.items, places, file, args.export / name
                )
    print(f"wrote {args.output / 'evaluation.json'}, .md and the plots beside them")


def literature(library: Library, args: argparse.Namespace) -> Scorer:
    from lantern_hpu.lab.pictures.library import LibraryScorer

    return LibraryScorer(library, args.images, args.output)


def own(chosen: PaintedOptions, pipeline: LanternPipeline, output: Path) -> Scorer:
    from lantern_hpu.lab.pictures.painted import Painted, PaintedScorer, drawn_side

    painted = Painted(chosen.images, chosen.panels, chosen.fresh, drawn_side(pipeline))
    return PaintedScorer(painted, pipeline, output)


def main(argv: Sequence[str] | None = None) -> int:
    """The `evaluate` command; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)
    return exit_code(lambda: run(args, given))
