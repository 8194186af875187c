"""Draw images from prompts.

    python -m lantern_hpu.generate --prompt "a red apple" --output apple.png

Options, one call and what is printed; the call is `commands/generate_draw.py`, which hands over to `LanternPipeline`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu import __version__
from lantern_hpu.backends import HOST, prepare
from lantern_hpu.commands import options
from lantern_hpu.decode.spec import batch_size_for
from lantern_hpu.errors import (
    LanternError,
    OptionError,
    OutputError,
    WeightsError,
    exit_code,
    require,
)
from lantern_hpu.methods.request import MAX_IMAGES, Request, Sampling, size_of
from lantern_hpu.methods.setting import AUTO, WINDOWS, Resolved, Setting, lacks_drafter
from lantern_hpu.models.files.names import Given
from lantern_hpu.models.options import DeviceOptions
from lantern_hpu.models.text.frames import no_negative, takes_negative
from lantern_hpu.results.images import read_png
from lantern_hpu.results.tables import read_prompts

if TYPE_CHECKING:
    from lantern_hpu.models.files.load import Opened
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.images import GenerationResult, Keeper, Outputs
    from lantern_hpu.results.progress import Bar

# ------------------------------------------------------------------------------------------- again

# Draw an image again: its PNG file says with which weights and settings.


def other_weights(
    file: Path, model: str, weights: dict[str, str], others: Sequence[str]
) -> WeightsError:
    """Why an image drawn with `weights` cannot be drawn again with a model of which `others` are different."""
    data = read_png(file)
    width, height = data["size"]
    drawn = f"lantern_hpu {data['version']} drew it at {width} x {height} pixels"
    marks = ", ".join(f"{name} {str(weights[name])[:8]}" for name in others)
    why = f"{drawn}, with other weights than {model} has now ({marks})"
    anew = f"--prompt and --seed {data['seed']} anew"
    hint = f"that version, --model with the weights that drew it, or {anew}: another image"
    if all("drafter" in name for name in others):
        hint = "--drafter with the folder that was used"
    elif all(name.startswith("vq") for name in others):
        hint = f"that version, or {anew}: the same tokens, other pixels"
    return WeightsError(f"{file} cannot be drawn again", why, hint)


def settings_again(
    file: Path, known: dict[str, Any], model: str, weights: Mapping[str, str]
) -> tuple[Resolved, Sampling]:
    """What an image was drawn with, to draw it again.

    Args:
        known: what `read_png` found. model: its name for messages. weights: of the files it has.
    """
    try:
        setting, sampling = Resolved.read(known), Sampling(**known["sampling"])
        others = [name for name, mark in known["weights"].items() if mark != weights.get(name)]
    except (LanternError, KeyError, ValueError, TypeError, AttributeError) as error:
        what = f"{file} cannot be drawn again"
        raise OptionError(what, "another version of this package or an editor wrote it") from error
    if not setting.needs_drafter:
        others = [name for name in others if "drafter" not in name]
    if others:
        raise other_weights(file, model, known["weights"], others)
    return setting, sampling


# ----------------------------------------------------------------------------------- generate draw

# What `generate` does once its options are parsed: check, load, resolve, draw and keep.
#
# torch is imported only once everything that can be refused without it has been refused.

ONE_TOKEN = (
    "note: auto draws several images together one token a step, as that was measured to be fastest on this device; "
    "--batch-size 1 draws one after the other, with speculation"
)


def draw_job(args: argparse.Namespace) -> GenerationResult | None:
    """The whole command after parsing; None if every image was there already."""
    job = job_of(args)
    outputs = outputs_of(args, job.prompts)
    began = time.perf_counter()
    prepare(job.device.device, job.device.graphs, job.device.emulate)
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.images import save_outputs

    imported = time.perf_counter() - began
    pipeline = LanternPipeline.from_pretrained(
        job.model,
        given=job.given,
        pictures=not outputs.tokens,
        size=job.size,
        check=job.check_model,
        **vars(job.device),
    )
    with closing(pipeline):
        show_geometry(pipeline, job.size)
        outputs = outputs_for(pipeline, outputs)
        result = draw_missing(pipeline, job, outputs, args)
    if result is None:
        return None
    if line := warm_up_line(result):
        print(line, file=sys.stderr)
    result.timing.import_s = imported
    columns = args.num_images if 1 < (args.num_images or 1) < len(result.images) else None
    save_outputs(result, outputs, columns, args.force)
    return result


def outputs_for(pipeline: LanternPipeline, outputs: Outputs) -> Outputs:
    """Those that this model can make: without a tokenizer of pictures, tokens alone."""
    if pipeline.model.vq is not None:
        return outputs
    if not pipeline.diffusion:
        outputs = outputs.of_tokens(pipeline.model.name)
    if outputs.preview:
        what = "--preview-every cannot be used"
        raise OptionError(what, "no tokenizer makes pictures of some rows", "leave it out")
    return outputs


def draw_missing(
    pipeline: LanternPipeline, job: GenerateJob, outputs: Outputs, args: argparse.Namespace
) -> GenerationResult | None:
    """Resolve the method and draw the images that are not there yet; None if all are."""
    from lantern_hpu.results.images import Keeper
    from lantern_hpu.results.progress import Bar

    if args.verbose:
        show_decided(pipeline, "dtype", "layout")
    chosen, sampling = resolve_job(job, pipeline, args)
    requests = requests_of(job, chosen, sampling)
    if job.setting.method == AUTO and chosen.method == "ar" and len(requests) > 1:
        print(ONE_TOKEN, file=sys.stderr)
    numbers = range(len(requests))
    left = [i for i in numbers if not args.resume or not outputs.images[i].exists()]
    if kept := set(numbers) - set(left):
        check_kept(pipeline, requests, chosen, outputs.images, kept)
    if not left:
        return None
    bar = Bar(outputs.preview, args.preview_every)
    keep = Keeper(left, outputs.images, args.force)
    result = draw_shown(pipeline, [requests[i] for i in left], chosen, job.batch_size, bar, keep)
    if args.verbose:
        show_decided(pipeline, "threads", "invariant")
    return result


def draw_shown(
    pipeline: LanternPipeline,
    requests: Sequence[Request],
    chosen: Resolved,
    batch_size: int | None,
    bar: Bar,
    keep: Keeper,
) -> GenerationResult:
    """Draw with a progress bar; warnings about prompts come first."""
    for prompt, note in pipeline.notes(requests):
        print(f"warning: {prompt!r}: {note}", file=sys.stderr)
    with closing(bar), pipeline.backend.errors():
        return pipeline.draw(requests, chosen, batch_size, bar, keep)


def show_geometry(pipeline: LanternPipeline, size: tuple[int, int] | None = None) -> None:
    """Say what a checkpoint draws, of the size that is asked for."""
    from lantern_hpu.models.model import grid_by_size

    model = pipeline.model
    for note in model.notes:
        print(f"note: {note}", file=sys.stderr)
    if model.source == "builtin":
        return
    height, width = size or model.config.image_size
    grid = grid_by_size(model.target.config, size, model.name)
    rows, columns = grid or model.target.config.grid
    drafter = "with a drafter" if model.drafter else "no drafter"
    pixels = f"{width} x {height} pixels"
    if not model.makes_pictures:
        pixels = "no VQ tokenizer, so no pictures"
    print(f"{model.name}: {pixels}, {columns} x {rows} tokens, {drafter}", file=sys.stderr)


def show_decided(pipeline: LanternPipeline, *what: str) -> None:
    """Say what a processor took where that was left to it; a card has little to choose."""
    decided = pipeline.backend.tuning.decided
    details = [f"{name} {decided[name]}" for name in what if name in decided]
    if details and pipeline.backend.name == HOST:
        print("; ".join(details), file=sys.stderr)


def warm_up_line(result: GenerationResult) -> str:
    """What recording the graphs took, if any were recorded."""
    graph, peak = result.graph, result.environment["peak_memory_bytes"]
    if not graph["captures"]:
        return ""
    memory = f", {peak / 2**20:,.0f} MiB at most" if peak else ""
    seconds = result.timing.warmup_s
    return f"warm-up {seconds:.1f} s: {graph['captures']} captures by {graph['runner']}{memory}"


# ------------------------------------------------------------------------------------ generate job

# What `generate` is to draw, and with what: checked as far as it can be before torch is imported.


@dataclass(frozen=True)
class GenerateJob:
    """What to draw, with what; all of it checked as far as it can be without torch.

    Attributes:
        prompts: one an image. labels: whether some are class labels.
        setting: as asked for; resolved once the model is loaded.
        known: settings of the image that is to be drawn again.
    """

    prompts: list[str]
    seed: int
    model: str
    given: Given
    device: DeviceOptions
    batch_size: int | None = None
    labels: bool = False
    negative: str | None = None
    size: tuple[int, int] | None = None
    setting: Setting = field(default_factory=Setting)
    known: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        batch_size_for(len(self.prompts), self.batch_size)
        for index, prompt in enumerate(self.prompts):
            Request(prompt, self.seed + index, size=self.size)

    def check_model(self, opened: Opened) -> None:
        """Refuse what a model cannot draw, before its weights are read."""
        condition, name = opened.config.condition, opened.name
        if self.labels and condition.kind != "classes":
            why = f"{name} draws from text"
            raise OptionError("--class-label cannot be used", why, "--prompt")
        if self.negative is not None and not takes_negative(condition):
            raise no_negative(name)
        setting = self.setting if self.known is None else Setting(self.known["method"])
        if opened.config.drafter is None and setting.needs_drafter:
            raise lacks_drafter(name, f"--method {setting.method}")


def job_of(args: argparse.Namespace) -> GenerateJob:
    """What the options ask for."""
    require(args.preview_every >= 0, "--preview-every", args.preview_every, "0 (off) or more")
    if args.resume and (args.force or args.grid or args.save_tokens):
        why = "it keeps the images that are there, and only their pixels"
        raise OptionError("--resume excludes --force, --grid and --save-tokens", why)
    if args.from_png:
        return job_again(args)
    return new_job(args)


def new_job(args: argparse.Namespace) -> GenerateJob:
    listed = read_prompts(args.prompts_file) if args.prompts_file else []
    prompts = [*(prompt.strip() for prompt in args.prompt), *args.class_label, *listed]
    if not prompts:
        raise OptionError("nothing to draw", "no prompt was given", '--prompt "a red apple"')
    count = 1 if args.num_images is None else args.num_images
    most = MAX_IMAGES // len(prompts)
    require(1 <= count <= most, "--num-images", count, f"1 to {most}")
    for label in args.class_label:
        from lantern_hpu.models.text.prefix import class_index

        class_index(label)
    setting = options.setting_of(args)
    if args.drafter is not None and setting.method in WINDOWS:
        why = "its drafts are the last step's own draws"
        raise OptionError(f"--drafter has no use for {setting.method}", why, "leave --drafter out")
    job = GenerateJob(
        prompts=[prompt for prompt in prompts for _ in range(count)],
        seed=args.seed or 0,
        model=args.model or "builtin",
        given=options.given_parts(args),
        device=options.device_options(args),
        batch_size=args.batch_size,
        labels=bool(args.class_label),
        negative=args.negative_prompt,
        size=size_of(args.height, args.width),
        setting=setting,
    )
    options.sampling_options(args, Sampling())
    return job


def outputs_of(args: argparse.Namespace, prompts: Sequence[str]) -> Outputs:
    """The files of a run."""
    from lantern_hpu.results.images import Outputs

    return Outputs.of(
        args.output,
        prompts,
        sheet=args.grid,
        previews=bool(args.preview_every),
        report=args.report,
        tokens=args.save_tokens,
        resume=args.resume,
        force=args.force,
    )


def resolve_job(
    job: GenerateJob, pipeline: LanternPipeline, args: argparse.Namespace
) -> tuple[Resolved, Sampling]:
    """What was left to the model and the device, or is that of the image to draw again."""
    if job.known is not None:
        return settings_again(args.from_png, job.known, job.model, pipeline.model.files)
    setting = pipeline.resolve(job.setting, batch_size_for(len(job.prompts), job.batch_size))
    return setting, options.sampling_options(args, pipeline.model.sampling)


def requests_of(job: GenerateJob, chosen: Resolved, sampling: Sampling) -> list[Request]:
    """One an image, each with the next seed."""
    shared = (sampling, chosen.relaxation, job.negative, job.size)
    return [Request(p, job.seed + i, *shared) for i, p in enumerate(job.prompts)]


# ---------------------------------------------------------------------------------- generate again

# `generate --from-png` and `--resume`: an image that is there says what to draw, or is held to what is asked for.

# What an image to draw again already says; giving one of these beside it is a contradiction.
SETTLED = (
    *"prompt negative_prompt class_label prompts_file num_images height width seed dtype quantize".split(),
    *"method tree window relax".split(),
    *options.dests(Sampling).values(),
)


def job_again(args: argparse.Namespace) -> GenerateJob:
    """The image to draw again: it says what to draw, with which weights and settings."""
    from lantern_hpu.results.images import read_png

    given = [name for name in SETTLED if getattr(args, name) not in (None, [])]
    if given:
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        raise OptionError(
            f"--from-png and {names} exclude each other", "the image says what to draw"
        )
    data = read_png(args.from_png)
    config: dict[str, Any] = data["config"]
    if name := config.get("stretch"):
        what = f"{args.from_png} is of a model stretched to {name}, which is a folder now"
        hint = f"lantern-hpu stretch {name} --output FOLDER, then --model FOLDER with --prompt and --seed"
        raise OptionError(what, hint=hint)
    settled = {"dtype": config["dtype"], "quantize": config.get("quantize")}
    settled["layout"] = args.layout or config.get("layout", "plain")
    settled["invariant"] = args.invariant or config.get("invariant", "off")
    # Images of a processor that do not name them were drawn by the plain kernels, or by others with the same bits
    usual = "plain" if config.get("device") == HOST else "auto"
    settled["kernels"] = args.kernels or config.get("kernels", usual)
    kept, parts_given = config.get("parts", {}), options.given_parts(args)
    # By name: a picture of a stranger may hold anything.
    parts = {f.name: getattr(parts_given, f.name) or kept.get(f.name) for f in fields(Given)}
    return GenerateJob(
        prompts=[data["prompt"]],
        seed=data["seed"],
        model=args.model or config["model"],
        given=Given(**parts),
        device=replace(options.device_options(args), **settled),
        batch_size=args.batch_size,
        negative=config.get("negative"),
        size=tuple(size) if (size := config.get("size")) else None,
        known=config,
    )


def check_kept(
    pipeline: LanternPipeline,
    requests: Sequence[Request],
    chosen: Resolved,
    files: Sequence[Path],
    kept: Iterable[int],
) -> None:
    """Raise an OutputError if an image that is there is not the one that would be drawn."""
    from lantern_hpu.pipeline import settings_of
    from lantern_hpu.results.images import REPLAYED, read_png

    described = pipeline.describe(chosen)
    for index in kept:
        file, request = files[index], requests[index]
        there, mine = read_png(file), described | settings_of(request)
        details = there["config"]
        others = [
            n for n in (*REPLAYED, "stretch", "negative", "size") if details.get(n) != mine.get(n)
        ]
        others += [name for name in ("prompt", "seed") if there[name] != getattr(request, name)]
        if others:
            why = f"{', '.join(others)} differ from what is asked for"
            raise OutputError(f"{file} is another image", why, "another --output")


# ---------------------------------------------------------------------------------------- generate


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.generate",
        description="Draw images from prompts.",
    )
    add_what(parser.add_argument_group("what to draw"))
    add_where(parser.add_argument_group("where it goes"))
    how = parser.add_argument_group("how it runs")
    models = "a name of `lantern-hpu models`, a Hub id, a folder or a weights file"
    how.add_argument("--model", help=f"`builtin`, {models} (builtin)")
    options.add_part_options(how)
    options.add_device_options(how)
    options.add_running_options(how)
    many = "Ray processes that generate, one per card (default: generate in this process)"
    how.add_argument("--workers", type=int, metavar="N", help=many)
    how.add_argument("--batch-size", type=int, help="images per batch (at most 8 if not set)")
    options.add_method_options(parser.add_argument_group("method"))
    options.add_sampling_options(parser.add_argument_group("sampling (default: the model's own)"))
    chosen = "print the chosen number format, layout and threads, with reasons"
    parser.add_argument("--verbose", action="store_true", help=chosen)
    parser.add_argument("--version", action="version", version=f"lantern_hpu {__version__}")
    return parser


def add_what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    label = "ImageNet class by name or index, for class-conditional models; repeat for several"
    add(
        "--prompt",
        action="append",
        default=[],
        help="text to draw; repeat the option for several prompts",
    )
    negative = "negative prompt, for models that support one (Emu3)"
    add("--negative-prompt", metavar="TEXT", help=negative)
    add("--class-label", action="append", default=[], metavar="LABEL", help=label)
    add(
        "--prompts-file",
        type=options.file_path,
        metavar="FILE",
        help=".txt (one a line), .tsv or .json",
    )
    add(
        "--from-png",
        type=options.file_path,
        metavar="FILE",
        help="regenerate the image of a PNG from its metadata",
    )
    add("--num-images", type=int, help="images per prompt (1)")
    pixels = (
        "height in pixels, for models with variable sizes; without --width a square (model default)"
    )
    add("--height", type=int, metavar="PIXELS", help=pixels)
    add("--width", type=int, metavar="PIXELS", help="see --height")
    add("--seed", type=int, help="seed of the first image; image i uses seed + i (0)")


def add_where(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    every = "write a preview every ROWS rows of the image"
    add(
        "--output",
        type=options.file_path,
        default=Path("out"),
        help="a .png file, or a folder (out)",
    )
    add("--force", action="store_true", help="replace existing files")
    add("--resume", action="store_true", help="keep existing images and generate the missing ones")
    add("--grid", action="store_true", help="also write one sheet with all images")
    add(
        "--report",
        type=options.file_path,
        metavar="FILE.json",
        help="write acceptance, timing, graph statistics and settings",
    )
    tokens = "the image tokens, also of a model without its VQ tokenizer; `lantern-hpu pixels` makes pictures of them"
    add("--save-tokens", type=options.file_path, metavar="FILE.npz", help=tokens)
    add("--preview-every", type=int, default=0, metavar="ROWS", help=every)


def generate_summary(result: GenerationResult, output: Path) -> str:
    """One line for the user."""
    from lantern_hpu.results.images import mean_tv, tokens_per_step

    records, setting = result.records, Resolved.read(result.config)
    seeds = records[0].seed if len(records) == 1 else f"{records[0].seed} to {records[-1].seed}"
    tv = mean_tv(records)
    cost = f"TV {tv:.3f} a token, " if tv else ""
    return (
        f"{len(records)} image(s), seed {seeds}, {setting}, {tokens_per_step(records):.2f} tokens a step, {cost}"
        f"{result.timing.generate_s:.1f} s -> {output}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The `generate` command; returns the exit code."""
    args = options.parse_args(make_parser(), argv)

    def command() -> None:
        if args.workers is not None:
            from lantern_hpu.commands.generate_workers import draw_with_workers

            print(f"{draw_with_workers(args)} image(s) drawn -> {args.output}")
            return
        result = draw_job(args)
        where = args.output if not result or result.images else args.save_tokens
        print(generate_summary(result, where) if result else f"every image is in {where}")

    try:
        return exit_code(command)
    except KeyboardInterrupt:
        print("interrupted: what was drawn is kept, --resume draws the rest", file=sys.stderr)
        return 130
