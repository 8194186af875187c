"""Draw one prompt with several settings, one after the other, and show them side by side at their speeds.

    lantern-hpu race --output race

By default at LlamaGen-XL's sizes: the embedded model is widened to them once, and kept in the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing

from lantern_hpu import __version__
from lantern_hpu.backends import BACKENDS, DeviceOptions, prepare
from lantern_hpu.commands import options
from lantern_hpu.commands.generate import busy_note
from lantern_hpu.errors import Arg, OutputError, exit_code, shell
from lantern_hpu.files import ASSETS, own_cache, sha256
from lantern_hpu.methods.setting import Setting
from lantern_hpu.results.tables import aligned
from lantern_lab.commands.stretch import LLAMAGEN, StretchRequest, stretch
from lantern_lab.measure.options import RaceRequest
from lantern_lab.measure.reports import heading

SETTINGS = (
    "ar,auto,lantern++:tv=0.1"  # the reference, the fastest lossless one, one of bounded cost
)


def make_parser() -> options.Parser:
    about = "Draw one prompt with several settings, one after the other: a table, a GIF and a PNG of them side by side."
    parser = options.Parser("lantern-hpu race", description=about)
    options.add_fields(parser, RaceRequest)
    options.add_method_options(parser, SETTINGS)
    options.add_fields(
        parser, DeviceOptions, "device", "threads", device=f"auto, {', '.join(BACKENDS)}"
    )
    return parser


def model_of(name: str) -> str:
    """The model that is meant: sizes are those of a folder in the cache, which is written the first time."""
    if name not in LLAMAGEN:
        return name
    mark = sha256(ASSETS / "builtin" / "model.json")[:12]
    folder = own_cache("stretched") / f"{name}-{__version__}-{mark}"
    if not folder.exists():
        print(f"the embedded model at the sizes of {name}, once: {folder}", file=sys.stderr)
        stretch(StretchRequest(name, folder))
    return str(folder)


def run_race(
    asked: RaceRequest, settings: Sequence[Setting], device: DeviceOptions, argv: Sequence[str]
) -> str:
    """Draw and write. -> the table"""
    if asked.output.exists():
        why = "existing files are not overwritten"
        raise OutputError(f"{asked.output} exists", why, "another --output, or remove it")
    prepare(device.device, device.graphs)  # before torch is imported
    from lantern_hpu.models.files.load import staged
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_lab.measure import race

    model = model_of(asked.model)
    loaded = LanternPipeline.from_pretrained(model, **vars(device))
    with closing(loaded) as pipeline, staged(asked.output) as folder:
        resolved = list(dict.fromkeys(pipeline.resolve(setting) for setting in settings))
        if busy := busy_note(pipeline):
            print(f"note: other programs slow this race down: {busy}", file=sys.stderr)
        runs = race.race(pipeline, resolved, asked.prompt, asked.seed, asked.turns)
        rows = [run.row.as_json() for run in runs]
        about = {"prompt": asked.prompt, "seed": asked.seed, "turns": asked.turns, "rows": rows}
        race.write_race(folder, runs, heading("lantern_hpu.race", pipeline, argv) | about)
    found = race.table(rows)
    text = aligned([[c.replace("`", "") for c in line] for line in (found.head, *found.lines)])
    doubts = "".join(
        f"\nin doubt: {row['setting']}: {row['doubt']}" for row in rows if "doubt" in row
    )
    tune = shell("tune", Arg("method", "scd"), Arg("model", model))
    return f"{text}{doubts}\n\nto find the fastest window of this model on this machine:\n  {tune}"


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(given)

    def command() -> None:
        asked = options.from_args(RaceRequest, args)
        settings = options.settings_of(args, SETTINGS)
        print(run_race(asked, settings, options.from_args(DeviceOptions, args), given))
        print(f"wrote race.gif, race.png and race.json into {asked.output}")

    return exit_code(command)
