"""Draw images from prompts.

    python -m lantern_hpu.generate --prompt "a red apple" --output apple.png

A thin command: it parses, checks where results will go, and hands over to `LanternPipeline`. torch is
imported only once everything that can be refused without it has been refused.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu import __version__
from lantern_hpu.backends import BACKENDS, prepare
from lantern_hpu.config import (
    AUTO,
    DEFAULT_TREE,
    GROWING,
    KEPT,
    METHODS,
    PRESETS,
    Relaxation,
    Request,
    Sampling,
    check_tunable,
    choose_method,
    complete,
    require,
)
from lantern_hpu.errors import OptionError, WeightsError, choices, exit_code
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.models.classes import class_index
from lantern_hpu.parts import Given
from lantern_hpu.tree import DYNAMIC, NAMED, DraftTree, DynamicTree, Tree, load_tree

if TYPE_CHECKING:
    from lantern_hpu.pipeline import Event, LanternPipeline
    from lantern_hpu.results import GenerationResult


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.generate",
        description="Draw images from prompts.",
    )
    what = parser.add_argument_group("what to draw")
    what.add_argument("--prompt", action="append", default=[], help="repeat for several")
    what.add_argument(
        "--class-label",
        action="append",
        default=[],
        metavar="LABEL",
        help="ImageNet class by name or index, for models that draw classes; repeat for several",
    )
    what.add_argument(
        "--prompts-file", type=Path, metavar="FILE", help=".txt (one a line), .tsv or .json"
    )
    what.add_argument("--from-png", type=Path, metavar="FILE", help="draw the same image again")
    what.add_argument("--num-images", type=int, default=None, help="images of each prompt (1)")
    what.add_argument(
        "--seed",
        type=int,
        default=None,
        help="of the first image; the next take the next numbers (0)",
    )
    where = parser.add_argument_group("where it goes")
    where.add_argument(
        "--output", type=Path, default=Path("out"), help="a .png file, or a folder (out)"
    )
    where.add_argument("--force", action="store_true", help="replace existing files")
    where.add_argument("--grid", action="store_true", help="one sheet of all images")
    where.add_argument(
        "--report", type=Path, metavar="FILE.json", help="acceptance, timing, graph, settings"
    )
    where.add_argument("--save-tokens", type=Path, metavar="FILE.npz", help="the image tokens")
    where.add_argument(
        "--preview-every",
        type=int,
        default=0,
        metavar="ROWS",
        help="write a preview each ROWS image rows",
    )
    how = parser.add_argument_group("how it runs")
    how.add_argument(
        "--model",
        default=None,
        help="`builtin`, a name of `python -m lantern_hpu.models`, a Hub id, a folder or a weights file (builtin)",
    )
    add_part_options(how)
    how.add_argument(
        "--keep-text",
        default="host",
        help=f"where a text encoder stays once the prompts are encoded: {', '.join(KEPT)} (host)",
    )
    how.add_argument("--device", default="auto", help=f"auto, {', '.join(BACKENDS)} (auto)")
    how.add_argument("--graphs", default="auto", help=f"auto, {', '.join(RUNNERS)} (auto)")
    how.add_argument(
        "--emulate",
        action="store_true",
        help="with --device hpu: an emulator of its contract, for machines without one",
    )
    how.add_argument(
        "--kernels", default="auto", help="auto: the device's fused ones; plain: torch's (auto)"
    )
    how.add_argument("--dtype", default=None, help="auto, or one the device offers (auto)")
    how.add_argument(
        "--quantize", default=None, metavar="int8", help="the target's weights in 8 bits"
    )
    how.add_argument(
        "--batch-size", type=int, default=None, help="images decoded together (8 at most if unset)"
    )
    method = parser.add_argument_group("method")
    method.add_argument(
        "--method",
        default=None,
        help="auto: the fastest measured on the device; "
        + "; ".join(f"{name}: {text}" for name, text in METHODS.items())
        + " (auto)",
    )
    method.add_argument(
        "--tree",
        default=None,
        help=f"{', '.join(NAMED)}, a .json file, or {AUTO}: the one that lantern_hpu.tune found for this model "
        f"and device ({DEFAULT_TREE}); for eagle2 and lantern {DYNAMIC}, or "
        f"{DYNAMIC}:KxExN for top-k K, E expansions and N drafts ({DynamicTree().name})",
    )
    method.add_argument("--relax", default=None, metavar="PRESET", help=", ".join(PRESETS))
    method.add_argument(
        "--relax-k",
        type=int,
        default=None,
        help="neighbours that may stand in (lantern: 1000, lantern++: 10)",
    )
    method.add_argument(
        "--relax-delta", type=float, default=None, help="additive bound, 0 to 1 (lantern: 0.2)"
    )
    method.add_argument(
        "--relax-lambda",
        type=float,
        default=None,
        help="multiplicative bound, 1 or more (lantern++: 5)",
    )
    method.add_argument(
        "--relax-omega",
        type=float,
        default=None,
        help="annealed: weight OMEGA exp(-NU i - MU) of a draft i below the first; exact where that is at most 1",
    )
    method.add_argument("--relax-nu", type=float, default=None, metavar="NU", help="see omega (0)")
    method.add_argument("--relax-mu", type=float, default=None, metavar="MU", help="see omega (0)")
    method.add_argument(
        "--residual",
        default=None,
        help="law after a relaxed rejection: sound, or official as published (sound)",
    )
    sampling = parser.add_argument_group("sampling (default: the model's own)")
    sampling.add_argument("--cfg-scale", type=float, default=None, help="guidance; 1 is off")
    sampling.add_argument("--temperature", type=float, default=None, help="0 is greedy")
    sampling.add_argument("--top-k", type=int, default=None, help="0 is off")
    sampling.add_argument("--top-p", type=float, default=None, help="1 is off")
    parser.add_argument("--version", action="version", version=f"lantern_hpu {__version__}")
    return parser


def add_part_options(group: argparse._ArgumentGroup) -> None:
    """Parts in place of the model's own, under the names that `Given` has for them."""
    group.add_argument(
        "--drafter", default=None, help="a published one, or one of lantern_hpu.train"
    )
    group.add_argument("--vq", default=None, metavar="FILE", help="the VQ tokenizer")
    group.add_argument("--text-encoder", dest="text", metavar="FOLDER", help="T5, or the tokenizer")
    group.add_argument("--neighbours", default=None, metavar="FILE.npy", help="nearest codes")
    group.add_argument(
        "--image-size",
        type=int,
        default=None,
        help="pixels, where a checkpoint does not say its own",
    )


def given_parts(args: argparse.Namespace) -> Given:
    """Parts named on the command line."""
    return Given(**{part.name: getattr(args, part.name) for part in fields(Given)})


def read_prompts(file: Path) -> list[str]:
    """Prompts of a text file (one a line), a TSV (column `prompt`/`Prompt`, else the first) or a JSON list.

    Raises:
        OptionError: unreadable, of another kind, or without prompts.
    """
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            data = json.loads(text)
            rows = [row["prompt"] if isinstance(row, dict) else row for row in data]
        elif file.suffix == ".tsv":
            lines = list(csv.reader(text.splitlines(), delimiter="\t"))
            head = [cell.strip().lower() for cell in lines[0]] if lines else []
            column = head.index("prompt") if "prompt" in head else 0
            rows = [line[column] for line in lines[1 if "prompt" in head else 0 :] if line]
        elif file.suffix == ".txt":
            rows = text.splitlines()
        else:
            raise OptionError(f"{file} is of an unknown kind", "expected .txt, .tsv or .json")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise OptionError(f"cannot read prompts from {file}", str(error)) from error
    prompts = [str(row).strip() for row in rows if str(row).strip()]
    if not prompts:
        raise OptionError(f"{file} holds no prompts")
    return prompts


def relaxation_of(args: argparse.Namespace) -> Relaxation | None:
    """The relaxation asked for; None leaves it to the method."""
    return complete(
        drawn_by(args.method),
        args.relax_k,
        args.relax_delta,
        args.relax_lambda,
        args.relax_omega,
        args.relax_nu,
        args.relax_mu,
        args.residual,
        args.relax,
    )


def drawn_by(method: str) -> str:
    """The method that options are meant for: `auto` with any of them is `lantern++`."""
    return "lantern++" if method == AUTO else method


def sampling_of(args: argparse.Namespace, default: Sampling) -> Sampling:
    """The model's settings with the ones that were given put in."""

    def pick(value: Any, other: Any) -> Any:
        return other if value is None else value

    return Sampling(
        pick(args.cfg_scale, default.cfg_scale),
        pick(args.temperature, default.temperature),
        pick(args.top_k, default.top_k),
        pick(args.top_p, default.top_p),
    )


def result_files(
    output: Path, prompts: Sequence[str], as_grid: bool
) -> tuple[list[Path], Path | None]:
    """Where each image goes, and the sheet.

    A `.png` output is the image, or with `--grid` the sheet; anything else is a folder.

    Raises:
        OptionError: one file for several images.
    """
    from lantern_hpu.results import slug

    if output.suffix.lower() == ".png":
        if as_grid:
            return [], output
        if len(prompts) > 1:
            why = f"there are {len(prompts)} images"
            raise OptionError(f"--output {output} names one file", why, "a folder, or --grid")
        return [output], None
    if output.suffix and not output.is_dir():
        raise OptionError(
            f"cannot write {output}", "images are PNG files", "a name ending in .png, or a folder"
        )
    files = [output / f"{index:03d}-{slug(text)}.png" for index, text in enumerate(prompts)]
    return files, output / "grid.png" if as_grid else None


def preview_file(output: Path) -> Path:
    png = output.suffix.lower() == ".png"
    return output.with_suffix(".preview.png") if png else output / "preview.png"


class Bar:
    """Progress in image rows, and previews on the way."""

    def __init__(self, args: argparse.Namespace) -> None:
        from tqdm import tqdm

        self.every, self.file = args.preview_every, preview_file(args.output)
        self.batch, self.shown = 0, 0  # of the last preview
        self.bar = tqdm(total=0, unit="row", file=sys.stderr, dynamic_ncols=True, leave=True)
        self.bar.set_description_str("warming up")

    def __call__(self, event: Event) -> None:
        self.bar.set_description_str("drawing", refresh=False)
        self.bar.total = event.total_rows * event.batches
        self.bar.n = event.batch * event.total_rows + event.rows
        self.bar.set_postfix_str(f"{event.tokens_per_step:.2f} tokens a step", refresh=False)
        self.bar.refresh()
        if event.batch != self.batch:
            self.batch, self.shown = event.batch, 0
        if self.every and event.rows - self.shown >= self.every:
            from lantern_hpu.results import encode, grid, write_file

            self.shown = event.rows
            write_file(self.file, encode(grid(event.preview())), force=True)

    def close(self) -> None:
        self.bar.close()


# What an image to draw again already says; giving one of these beside it is a contradiction.
SETTLED = (
    "prompt class_label prompts_file num_images seed dtype quantize method tree relax relax_k relax_delta relax_lambda "
    "relax_omega relax_nu relax_mu residual cfg_scale temperature top_k top_p"
).split()


def again(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of the image to draw again; what `args` can hold of them is put there."""
    from lantern_hpu.results import read_png

    given = [name for name in SETTLED if getattr(args, name) not in (None, [])]
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise OptionError(
            f"--from-png and {names} exclude each other", "the image says what to draw"
        )
    data = read_png(args.from_png)
    config: dict[str, Any] = data["config"]
    args.prompt, args.seed = [data["prompt"]], data["seed"]
    args.model, args.dtype = args.model or config["model"], config["dtype"]
    kept = config.get("parts", {})
    for part in (field.name for field in fields(Given)):
        setattr(args, part, getattr(args, part) or kept.get(part))
    args.method, args.quantize = config["method"], config.get("quantize")
    return config


def check(args: argparse.Namespace, known: dict[str, Any] | None) -> list[str]:
    """Fill in defaults, and refuse what can be refused before torch is loaded.

    Returns one prompt an image.
    """
    for name, value in {"num_images": 1, "seed": 0, "dtype": "auto", "method": AUTO}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    prompts = [
        *args.prompt,
        *args.class_label,
        *(read_prompts(args.prompts_file) if args.prompts_file else []),
    ]
    if not prompts:
        raise OptionError("nothing to draw", "no prompt was given", '--prompt "a red apple"')
    require(args.num_images >= 1, "--num-images", args.num_images, "1 or more")
    require(args.preview_every >= 0, "--preview-every", args.preview_every, "0 (off) or more")
    if args.keep_text not in KEPT:
        raise OptionError(f"--keep-text is {args.keep_text}", hint=choices(KEPT))
    for label in args.class_label:
        class_index(label)
    size = args.batch_size
    require(size is None or size >= 1, "--batch-size", size, "1 or more")
    if known is None:
        method, tuned = drawn_by(args.method), args.tree == AUTO
        choose_method(method, None if tuned else args.tree, relaxation_of(args))
        if tuned:
            check_tunable(method)
        sampling_of(args, Sampling())
    wanted = [prompt for prompt in prompts for _ in range(args.num_images)]
    for index, prompt in enumerate(wanted):
        Request(prompt, args.seed + index)
    return wanted


def settings_of(
    pipeline: LanternPipeline, args: argparse.Namespace, known: dict[str, Any] | None, count: int
) -> tuple[str, Tree, Relaxation, Sampling]:
    """Method, tree, relaxation and sampling: asked for, or those of the image to draw again.

    Args:
        known: of the image to draw again. count: images that are asked for.

    Raises:
        WeightsError: the image was drawn with other weights.
    """
    if known is None:
        size = pipeline.together(count, args.batch_size)
        method, tree, relaxation = pipeline.choose(
            args.method, args.tree, relaxation_of(args), size
        )
        if args.relax_k is None:  # a published number of neighbours, not the user's
            relaxation = pipeline.fitted(relaxation)
        return method, tree, relaxation, sampling_of(args, pipeline.model.sampling)
    mine = pipeline.model.files
    others = [name for name in known["weights"] if known["weights"][name] != mine.get(name)]
    if others:
        what, hint = f"{args.from_png} cannot be drawn again", "--model"
        if all("drafter" in name for name in others):
            hint = "--drafter with the folder that was used"
        raise WeightsError(what, f"it was drawn with other weights than {args.model} has", hint)
    name, paths = known["tree"], known["tree_paths"]
    grows = known["method"] in GROWING
    tree = load_tree(name) if grows else DraftTree.from_paths(name, paths)
    try:
        relaxation = Relaxation(**known["relaxation"])
    except TypeError as error:
        what = f"{args.from_png} cannot be drawn again"
        raise OptionError(what, "another version of this package drew it") from error
    return known["method"], tree, relaxation, Sampling(**known["sampling"])


def draw(args: argparse.Namespace) -> GenerationResult:
    """The whole command after parsing."""
    known = again(args) if args.from_png else None
    wanted = check(args, known)
    from lantern_hpu.results import check_free

    files, sheet = result_files(args.output, wanted, args.grid)
    preview = preview_file(args.output) if args.preview_every else None
    others = [sheet, preview, args.report, args.save_tokens]
    check_free([*files, *(path for path in others if path is not None)], args.force)
    began = time.perf_counter()
    prepare(args.device, args.graphs, args.emulate)
    from lantern_hpu.pipeline import LanternPipeline

    imported = time.perf_counter() - began
    pipeline = LanternPipeline.from_pretrained(
        args.model or "builtin",
        args.device,
        args.dtype,
        args.graphs,
        args.kernels,
        args.emulate,
        given_parts(args),
        args.keep_text,
        args.quantize,
    )
    with closing(pipeline):
        show_geometry(pipeline)
        if args.class_label and not pipeline.model.condition.takes_classes:
            why = f"{pipeline.model.name} draws from text"
            raise OptionError("--class-label cannot be used", why, "--prompt")
        args.method, tree, relaxation, sampling = settings_of(pipeline, args, known, len(wanted))
        requests = [Request(p, args.seed + i, sampling, relaxation) for i, p in enumerate(wanted)]
        result = run(pipeline, args, requests, tree)
    if line := warm_up_line(result):
        print(line, file=sys.stderr)
    result.timing["import_s"] = round(imported, 4)
    save(result, args, files, sheet)
    return result


def show_geometry(pipeline: LanternPipeline) -> None:
    """Say what a checkpoint draws: its size is its own, no option changes it."""
    model = pipeline.model
    if model.source == "builtin":
        return
    (height, width), (rows, columns) = model.image_size, model.target.config.grid
    drafter = "with a drafter" if model.drafter else "no drafter"
    size = f"{width} x {height} pixels, {columns} x {rows} tokens"
    print(f"{model.name}: {size}, {drafter}", file=sys.stderr)


def run(
    pipeline: LanternPipeline, args: argparse.Namespace, requests: list[Request], tree: Tree
) -> GenerationResult:
    """Draw with a progress bar; warnings about prompts come first."""
    for prompt, note in pipeline.notes(requests):
        print(f"warning: {prompt!r}: {note}", file=sys.stderr)
    bar = Bar(args)
    try:
        with pipeline.backend.errors():
            return pipeline.draw(requests, tree, args.method, args.batch_size, bar)
    finally:
        bar.close()


def save(
    result: GenerationResult, args: argparse.Namespace, files: list[Path], sheet: Path | None
) -> None:
    """Write images, sheet, tokens and report, in this order."""
    from lantern_hpu.results import encode, grid, tokens_file, write_file

    for index, file in enumerate(files):
        result.records[index].file = str(file)
        write_file(file, result.png(index), args.force)
    if sheet:
        columns = args.num_images if 1 < args.num_images < len(result.images) else None
        write_file(sheet, encode(grid(result.images, columns)), args.force)
    if args.save_tokens:
        write_file(args.save_tokens, tokens_file(result), args.force)
    if args.report:
        write_file(args.report, json.dumps(result.report(), indent=2).encode(), args.force)


def warm_up_line(result: GenerationResult) -> str:
    """What recording the graphs took, if any were recorded."""
    graph, peak = result.graph, result.environment["peak_memory_bytes"]
    if not graph["captures"]:
        return ""
    memory = f", {peak / 2**20:,.0f} MiB at most" if peak else ""
    seconds = result.timing["warmup_s"]
    return f"warm-up {seconds:.1f} s: {graph['captures']} captures by {graph['runner']}{memory}"


def summary(result: GenerationResult, args: argparse.Namespace) -> str:
    """One line for the user."""
    from lantern_hpu.results import tokens_per_step

    records, timing = result.records, result.timing
    seeds = records[0].seed if len(records) == 1 else f"{records[0].seed} to {records[-1].seed}"
    return (
        f"{len(records)} image(s), seed {seeds}, {args.method}, {tokens_per_step(records):.2f} tokens a step, "
        f"{timing['generate_s']:.1f} s -> {args.output}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The `generate` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: print(summary(draw(args), args)))


if __name__ == "__main__":
    sys.exit(main())
