"""Draw images from prompts.

    python -m lantern_hpu.generate --prompt "a red apple" --output apple.png

The options, the job that they ask for, the drawing, and what is printed. torch is imported only once everything that
can be refused without it has been refused.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu import __version__
from lantern_hpu.backends import DeviceOptions, host, is_host, prepare
from lantern_hpu.commands import options
from lantern_hpu.core import Request, Sampling, check_prompt, check_text, size_of
from lantern_hpu.decode.spec import batch_size_for
from lantern_hpu.errors import (
    Arg,
    InvalidImageError,
    LanternError,
    OptionError,
    OutputError,
    WeightsError,
    exit_code,
    require,
    words,
)
from lantern_hpu.fields import IMAGE_PARAMS, MAX_IMAGES, check_seed, given_params, only
from lantern_hpu.files import clear_temporary, some_of
from lantern_hpu.methods.setting import AUTO, WINDOWS, Resolved, Setting, lacks_drafter
from lantern_hpu.models.files.names import PartOverrides
from lantern_hpu.models.text.frames import check_sources, no_negative, takes_negative
from lantern_hpu.results.images import drawn_otherwise, is_cut_off, read_png
from lantern_hpu.results.prompts import numbered_prompts
from lantern_hpu.results.sources import read_picture

if TYPE_CHECKING:
    from lantern_hpu.core import SourcePicture
    from lantern_hpu.models.files.load import OpenedModel
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.images import GenerationResult
    from lantern_hpu.results.outputs import Outputs
    from lantern_hpu.results.progress import Bar

# ----------------------------------------------------------------------------------------- options

# Keys of a configuration file, or variables: what few runs need, and no option of the command line
KEYS = ("image_size", "kernels", "layout", "keep_text", "logprobs", "preview_every", "verbose")


def make_parser() -> options.Parser:
    more = f"Keys of --config alone, or variables LANTERN_HPU_...: {', '.join(KEYS)} (docs/reference/environment.md)."
    about = "Draw images from prompts."
    parser = options.Parser("lantern-hpu generate", description=about, epilog=more)
    add_what(parser.add_argument_group("what to draw"))
    add_where(parser.add_argument_group("where it goes"))
    how = parser.add_argument_group("how it runs")
    models = "`builtin`, a name of `lantern-hpu models`, a Hub id, a folder or a weights file"
    how.add_argument("--model", help=f"{models} (builtin)")
    options.add_fields(how, PartOverrides)
    options.add_device_options(how)
    options.add_running_options(how)
    many = "Ray processes that generate, one per card (default: generate in this process)"
    how.add_argument("--workers", type=int, metavar="N", help=many)
    groups = {group.title: group for group in parser._action_groups}
    for param in IMAGE_PARAMS.values():
        group = groups.get(param.group) or parser.add_argument_group(param.group)
        groups[param.group] = group
        options.add_image_params(group, param.name)
    chosen = "print the chosen number format, layout and threads, with reasons"
    parser.add_argument("--verbose", action="store_true", help=chosen)
    parser.add_argument("--version", action="version", version=f"lantern_hpu {__version__}")
    parser.only_keys(*KEYS)
    return parser


def add_what(group: argparse._ArgumentGroup) -> None:
    add, path = group.add_argument, options.file_path
    text = "text to draw, or of a class-conditional model a class of ImageNet by name or index; repeat it for several"
    add("--prompt", action="append", default=[], help=text)
    listed = ".txt (one a line), .tsv, .csv, .json or .jsonl; - reads lines of standard input"
    add("--prompts-file", type=path, metavar="FILE", help=listed)
    edited = "picture to draw from, for models that read some; repeat it for several of each image"
    add("--image", type=path, action="append", default=[], metavar="FILE", help=edited)
    again = "regenerate the image of a PNG from its metadata"
    add("--from-png", type=path, metavar="FILE", help=again)


def add_where(group: argparse._ArgumentGroup) -> None:
    add, path = group.add_argument, options.file_path
    add("--output", type=options.output_path, default="out", help="a .png file, or a folder (out)")
    add("--force", action="store_true", help="replace existing files")
    add("--resume", action="store_true", help="keep existing images and generate the missing ones")
    add("--grid", action="store_true", help="also write one sheet with all images")
    report = "write acceptance, timing, graph statistics and settings"
    add("--report", type=path, metavar="FILE.json", help=report)
    tokens = "the image tokens, also of a model without its VQ tokenizer; `lantern-hpu pixels` makes pictures of them"
    add("--save-tokens", type=path, metavar="FILE.npz", help=tokens)
    states = "tokens and final hidden states of prompt and image, for diffusion models that read them (MammothModa2)"
    add("--save-states", type=path, metavar="FILE.safetensors", help=states)
    every = "write a preview every ROWS rows of the image"
    add("--preview-every", type=int, default=0, metavar="ROWS", help=every)


# --------------------------------------------------------------------------------------------- job


@dataclass(frozen=True)
class GenerateJob:
    """What to draw, with what; all of it checked as far as it can be without the model."""

    prompts: dict[int, str]  # one an image, by its number
    seed: int
    model: str
    given: PartOverrides
    device: DeviceOptions
    batch_size: int | None = None
    negative: str | None = None
    size: tuple[int, int] | None = None
    sources: tuple[SourcePicture, ...] = ()
    setting: Setting = field(default_factory=Setting)  # resolved once the model is loaded
    sampling: dict[str, Any] = field(default_factory=dict)  # given in place of the model's own
    png: Path | None = None  # an image to draw again,
    known: dict[str, Any] | None = None  # and its settings
    tokens: bool = False  # whether those are enough, of which pictures can be made later, or
    states: bool = False  # hidden states
    logprobs: bool = False  # whether the report has those

    def __post_init__(self) -> None:
        for prompt in dict.fromkeys(self.prompts.values()):
            check_prompt(prompt)
        if self.negative is not None:
            check_text(Arg("negative_prompt"), self.negative)
        check_seed(self.seed + max(self.prompts))

    @property
    def slots(self) -> int:
        """Images that are decoded together."""
        return batch_size_for(len(self.prompts), self.batch_size)

    def requests(self, pipeline: LanternPipeline) -> tuple[Resolved, list[Request]]:
        """The setting, and a request an image with a seed of its own; of an image to draw again they are its own."""
        model = pipeline.model
        if self.png is not None and self.known is not None:
            setting, sampling = settings_again(self.png, self.known, self.model, model.files)
        else:
            setting = pipeline.resolve(self.setting, self.slots)
            sampling = replace(model.sampling, **self.sampling)
        size = self.size or model.size_of_sources(self.sources)
        more = sampling, setting.relaxation, self.negative, size, self.sources, self.logprobs
        return setting, [Request(text, self.seed + n, *more) for n, text in self.prompts.items()]

    def check_model(self, opened: OpenedModel) -> None:
        """Refuse what a model cannot draw, before its weights are read."""
        condition, name = opened.config.condition, opened.name
        if self.negative is not None and not takes_negative(condition):
            raise no_negative(name)
        if self.sources:
            check_sources(opened.config, name, len(self.sources))
        setting = self.setting if self.known is None else Setting(self.known["method"])
        if opened.config.drafter is None and setting.needs_drafter:
            raise lacks_drafter(name, Arg("method", setting.method))
        if not (self.tokens or self.states):
            opened.check_pictures()
        if self.states and (condition.kind != "tokens" or condition.rows):
            why = f"{name} does not read prompts as tokens of its own table"
            raise OptionError("--save-states cannot be used", why, "--save-tokens")
        if self.states and self.sources:
            why = "states are of a prompt of words alone"
            raise OptionError("--save-states cannot be used with --image", why, "--save-tokens")


def read_job(args: argparse.Namespace) -> GenerateJob:
    """What the options ask for."""
    require(args.preview_every >= 0, "preview_every", args.preview_every, "0 (off) or more")
    if args.resume and (args.force or args.grid or args.save_tokens or args.save_states):
        why = "it keeps the images that are there, and only their pixels"
        raise OptionError("--resume excludes --force, --grid, --save-tokens and --save-states", why)
    if args.logprobs and not args.report:
        why = "the report has them"
        raise OptionError("logprobs cannot be used alone", why, Arg("report", "FILE.json"))
    asked = given_params(vars(args), "command")
    return job_of_png(args, asked) if args.from_png else new_job(args, asked)


def new_job(args: argparse.Namespace, asked: Mapping[str, Any]) -> GenerateJob:
    """A job of the arguments of an image, `asked`, and the other options."""
    prompts = {number: prompt.strip() for number, prompt in enumerate(args.prompt)}
    first, listed = len(prompts), numbered_prompts(args.prompts_file) if args.prompts_file else {}
    prompts |= {first + number: prompt for number, prompt in listed.items()}
    if not prompts:
        raise OptionError("nothing to draw", "no prompt was given", '--prompt "a red apple"')
    count = asked.get("num_images", 1)
    most = MAX_IMAGES // len(prompts)
    require(count <= most, "num_images", count, f"1 to {most}")
    setting = Setting.parse(asked.get("method", AUTO))
    if args.drafter is not None and setting.method in WINDOWS:
        why = "its drafts are the last step's own draws"
        raise OptionError(f"--drafter has no use for {setting.method}", why, "leave --drafter out")
    return GenerateJob(
        prompts={n * count + i: text for n, text in prompts.items() for i in range(count)},
        seed=asked.get("seed", 0),
        model=args.model or "builtin",
        given=options.from_args(PartOverrides, args),
        device=options.from_args(DeviceOptions, args),
        batch_size=args.batch_size,
        negative=asked.get("negative_prompt"),
        size=size_of(args.height, args.width),
        sources=tuple(map(read_picture, args.image)),
        setting=setting,
        sampling=only(Sampling, asked),
        tokens=args.save_tokens is not None,
        states=args.save_states is not None,
        logprobs=bool(args.logprobs),
    )


# Options that say what an image to draw again says already; what is no part of the image stays free
SAID = {"prompt", "prompts_file", "dtype", "quantize"} | IMAGE_PARAMS.keys() - {
    "batch_size",
    "logprobs",
}


def job_of_png(args: argparse.Namespace, asked: Mapping[str, Any]) -> GenerateJob:
    """The image to draw again: it says what to draw, with which weights and settings."""
    given = {*asked, *(name for name, value in vars(args).items() if value)}
    if both := SAID & given:
        names = ", ".join("--" + name.replace("_", "-") for name in sorted(both))
        why = "the image says what to draw"
        raise OptionError(f"--from-png and {names} exclude each other", why)
    data = read_png(args.from_png)
    config: dict[str, Any] = data["config"]
    if name := config.get("stretch"):
        what = f"{args.from_png} is of a model stretched to {name}, which is a folder now"
        hint = f"lantern-hpu models stretch {name} --output FOLDER, then --model FOLDER with --prompt and --seed"
        raise OptionError(what, hint=hint)
    # Images of a processor that do not name them were drawn by the plain kernels, or by others with the same bits
    kernels = "plain" if is_host(config.get("device")) else "auto"
    device = {
        "dtype": config["dtype"],
        "quantize": config.get("quantize") or None,
        "layout": args.layout or config.get("layout", "plain"),
        "kernels": args.kernels or config.get("kernels", kernels),
        "threads": threads_again(args, data),
    }
    parts, stored = options.from_args(PartOverrides, args), config.get("parts", {})
    # By name: metadata is not trusted, so known fields alone are read.
    parts_of = {f.name: getattr(parts, f.name) or stored.get(f.name) for f in fields(PartOverrides)}
    return GenerateJob(
        prompts={0: data["prompt"]},
        seed=data["seed"],
        model=args.model or config["model"],
        given=PartOverrides(**parts_of),
        device=replace(options.from_args(DeviceOptions, args), **device),
        batch_size=args.batch_size,
        negative=config.get("negative"),
        size=tuple(size) if (size := config.get("size")) else None,
        sources=sources_again(args, config),
        png=args.from_png,
        known=config,
        tokens=args.save_tokens is not None,
        states=args.save_states is not None,
        logprobs=bool(args.logprobs),
    )


def sources_again(args: argparse.Namespace, config: dict[str, Any]) -> tuple[SourcePicture, ...]:
    """The pictures that an image was drawn from, which are given again, in their order."""
    sources, stored = tuple(map(read_picture, args.image)), config.get("sources", [])
    drawn = [one.get("digest") if isinstance(one, dict) else None for one in stored]
    if drawn == [source.digest for source in sources]:
        return sources
    if not drawn:
        why = f"{args.from_png} was drawn from words alone"
        raise OptionError(words(Arg("image"), "cannot be used"), why, "leave it out")
    what = f"{args.from_png} was drawn from {len(drawn)} pictures"
    why = f"{len(sources)} are given" if len(sources) != len(drawn) else "these are others"
    raise OptionError(
        words(what, "and", Arg("image"), "has to give them"), why, "the same, in order"
    )


def threads_again(args: argparse.Namespace, data: dict[str, Any]) -> int:
    """Those of the processor that drew an image, by `read_png`, where there are as many and no others are asked for."""
    stored = data["threads"] if is_host(data["config"].get("device")) else 0
    usable = 0 < stored <= (os.cpu_count() or 1)
    threads: int = args.threads or (stored if usable else 0)
    if stored not in (0, threads):
        drawn = f"note: {args.from_png} was drawn with --threads {stored}"
        otherwise = "with others pixels may differ by a level, and in the plain layout tokens"
        print(f"{drawn}: {otherwise}", file=sys.stderr)
    return threads


def settings_again(
    file: Path, known: dict[str, Any], model: str, weights: Mapping[str, str]
) -> tuple[Resolved, Sampling]:
    """What an image was drawn with by its metadata `known`, to draw it again with `weights` of the model's files."""
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


def other_weights(
    file: Path, model: str, weights: dict[str, str], others: Sequence[str]
) -> WeightsError:
    """Why an image drawn with `weights` cannot be drawn again with a model of which `others` are different."""
    data = read_png(file)
    width, height = data["size"]
    drawn = f"lantern_hpu {data['version']} drew it at {width} x {height} pixels"
    marks = ", ".join(f"{name} {str(weights[name])[:8]}" for name in others)
    why = f"{drawn}, with other weights than {model} has now ({marks})"
    again = f"--prompt and --seed {data['seed']} given again"
    hint = f"that version, --model with the weights that drew it, or {again}: another image"
    if all("drafter" in name for name in others):
        hint = "--drafter with the folder that was used"
    elif all(name.startswith("vq") for name in others):
        hint = f"that version, or {again}: the same tokens, other pixels"
    return WeightsError(f"{file} cannot be drawn again", why, hint)


# ------------------------------------------------------------------------------------------- draw

ONE_BY_ONE = "note: ar draws several images together; --batch-size 1 draws one after the other, with speculation"


def draw(args: argparse.Namespace) -> GenerationResult | None:
    """The command after parsing; None if every image was there already."""
    job = read_job(args)
    outputs = outputs_of(args, job.prompts)
    began = time.perf_counter()
    prepare(job.device.device, job.device.graphs)
    import lantern_hpu.pipeline  # noqa: F401  its import is timed
    from lantern_hpu.results.outputs import save_outputs
    from lantern_hpu.results.progress import Bar

    imported = time.perf_counter() - began
    with closing(open_pipeline(job)) as pipeline:
        show_model(pipeline, job.size)
        outputs = outputs_for(pipeline, outputs)
        if args.verbose:
            show_decided(pipeline, "dtype", "layout")
        setting, requests = job.requests(pipeline)
        if is_slower_together(pipeline, job, setting):
            print(ONE_BY_ONE, file=sys.stderr)
        missing = missing_images(args, pipeline, setting, dict(enumerate(requests)), outputs.images)
        if not missing:
            return None
        slow = partial(warm_up_note, pipeline)
        with closing(Bar(outputs.preview, args.preview_every, slow)) as bar:
            result, invalid = draw_images(args, pipeline, setting, missing, outputs.images, bar)
        if args.verbose:
            show_decided(pipeline, "threads")
        result.timing.import_s = imported
        show_warm_up(result)
        several = 1 < (args.num_images or 1) < len(result.images)
        if result.drawn:
            save_outputs(result, outputs, args.num_images if several else 1, args.force)
        if invalid is not None:
            raise invalid
        if outputs.states:
            pipeline.save_states(result, outputs.states, args.force)
    return result


def open_pipeline(job: GenerateJob) -> LanternPipeline:
    """The model of a job on its device."""
    from lantern_hpu.pipeline import LanternPipeline

    return LanternPipeline.from_pretrained(
        job.model,
        given=job.given,
        pictures=not (job.tokens or job.states),
        size=job.size,
        check=job.check_model,
        **vars(job.device),
    )


def missing_images(
    args: argparse.Namespace,
    pipeline: LanternPipeline,
    setting: Resolved,
    requests: Mapping[int, Request],
    files: Sequence[Path],
) -> dict[int, Request]:
    """Those of the requests, by the numbers of their images, whose files are not there yet."""
    here = {
        number: request
        for number, request in requests.items()
        if files and not args.force and files[number].exists()
    }
    kept = kept_images(pipeline, here, setting, files)
    missing = {number: request for number, request in requests.items() if number not in kept}
    for prompt, note in pipeline.notes([*missing.values()]):  # what the model cannot do with them
        print(f"warning: {prompt!r}: {note}", file=sys.stderr)
    return missing


def draw_images(
    args: argparse.Namespace,
    pipeline: LanternPipeline,
    setting: Resolved,
    requests: Mapping[int, Request],
    files: Sequence[Path],
    bar: Bar | None = None,
) -> tuple[GenerationResult, InvalidImageError | None]:
    """Draw the images of some numbers, each into its file. -> the result, and the error of those that are invalid"""
    from lantern_hpu.results.outputs import keep_image

    own = [files[number] for number in requests] if files else []
    keep = partial(keep_image, own, args.force, args.resume) if own else None
    try:
        with pipeline.backend.errors():
            return pipeline.draw([*requests.values()], setting, args.batch_size, bar, keep), None
    except InvalidImageError as error:
        return error.result, error


def is_slower_together(pipeline: LanternPipeline, job: GenerateJob, setting: Resolved) -> bool:
    """Whether `auto` speculates with one image at a time, and not with this batch."""
    if job.slots == 1 or not setting.why or setting.drafts:
        return False
    return pipeline.resolve(job.setting).drafts


def outputs_of(args: argparse.Namespace, prompts: Mapping[int, str]) -> Outputs:
    """The files of a run."""
    from lantern_hpu.results.outputs import Outputs

    return Outputs.of(
        args.output,
        prompts,
        sheet=args.grid,
        previews=bool(args.preview_every),
        report=args.report,
        tokens=args.save_tokens,
        states=args.save_states,
        resume=args.resume,
        force=args.force,
    )


def outputs_for(pipeline: LanternPipeline, outputs: Outputs) -> Outputs:
    """Those that this model can make: without a tokenizer of pictures, tokens alone."""
    if pipeline.model.vq is not None:
        return outputs
    if not pipeline.diffusion:
        outputs = outputs.of_tokens(pipeline.model.name)
    if outputs.preview:
        what = "preview_every cannot be used"
        raise OptionError(what, "no tokenizer makes pictures of some rows", "leave it out")
    return outputs


def kept_images(
    pipeline: LanternPipeline,
    requests: Mapping[int, Request],
    setting: Resolved,
    files: Sequence[Path],
) -> set[int]:
    """Numbers of the images that stay, of the requests whose files are there; one that was cut off while it was written
    is removed.

    Raises:
        OutputError: some are not those that would be drawn.
    """
    described = pipeline.describe(setting)
    whole = [number for number in requests if not is_cut_off(files[number])]
    others: dict[Path, list[str]] = {}
    for number in whole:
        mine = described | requests[number].settings
        if names := drawn_otherwise(read_png(files[number]), mine, requests[number]):
            others[files[number]] = names
    if others:
        differing = dict.fromkeys(name for names in others.values() for name in names)
        why = f"{', '.join(differing)} differ from what is asked for"
        raise OutputError(f"{some_of([*others])} is another image", why, "another --output")
    for number in set(requests) - set(whole):
        print(f"{files[number]} is cut off, and is drawn again", file=sys.stderr)
        files[number].unlink(missing_ok=True)
    clear_temporary(files)
    return set(whole)


# ----------------------------------------------------------------------------------------- workers


def draw_with_workers(args: argparse.Namespace) -> int:
    """Draw the images of one process in several, one a card, through Ray. -> how many were drawn"""
    from lantern_hpu.results.progress import ProgressBar
    from lantern_hpu.workers import pieces, share_work

    job = read_job(args)
    require(1 <= args.workers <= 4096, "workers", args.workers, "1 to 4096")
    saved = args.save_tokens or args.save_states
    if args.grid or args.report or saved or args.preview_every or args.from_png:
        what = "--workers excludes --grid, --report, --save-tokens, --save-states, --from-png and preview_every"
        raise OptionError(what, "workers write each image to its own file")
    args.output = os.path.join(os.getcwd(), args.output)  # workers may run elsewhere
    files = outputs_of(args, job.prompts).images
    work = pieces(len(files), args.workers, job.slots)
    opener = f"{open_worker.__module__}:open_worker"
    drawn = 0
    invalid = list[str]()
    with closing(ProgressBar(len(files), "image")) as bar:
        for numbers, (count, errors) in share_work(
            opener, [args], work, args.workers, job.device.device
        ):
            drawn += count
            invalid += errors
            bar.update(len(numbers))
    if invalid:
        raise InvalidImageError(f"some of {len(files)} images are invalid", "; ".join(invalid))
    if lost := sum(not file.is_file() for file in files):
        what = f"{lost} of {len(files)} images are not in {args.output}"
        why = "the folder went away, or not all machines share it"
        raise OutputError(what, why, "--resume draws them")
    return drawn


def open_worker(args: argparse.Namespace) -> Callable[[list[int]], tuple[int, list[str]]]:
    """What draws the images of some numbers that are not there yet. -> how many it drew, which are invalid"""
    job = read_job(args)
    prepare(job.device.device, job.device.graphs)
    from lantern_hpu.results.outputs import image_files

    pipeline = open_pipeline(job)
    setting, requests = job.requests(pipeline)
    files, _ = image_files(args.output, job.prompts, False)

    def draw_piece(numbers: list[int]) -> tuple[int, list[str]]:
        piece = {number: requests[number] for number in numbers}
        missing = missing_images(args, pipeline, setting, piece, files)
        if not missing:
            return 0, []
        result, invalid = draw_images(args, pipeline, setting, missing, files)
        return len(result.drawn), [str(invalid.why)] if invalid else []

    return draw_piece


# ----------------------------------------------------------------------------------------- messages


def show_model(pipeline: LanternPipeline, size: tuple[int, int] | None = None) -> None:
    """Say what a checkpoint draws, of the size that is asked for."""
    model = pipeline.model
    for note in model.notes:
        print(f"note: {note}", file=sys.stderr)
    if model.source == "builtin":
        return
    height, width = size or model.config.image_size
    rows, columns = model.sized(size).grid
    drafter = "with a drafter" if model.drafter else "no drafter"
    pixels = f"{width} x {height} pixels"
    if not model.makes_pictures:
        pixels = "no VQ tokenizer, so no pictures"
    print(f"{model.name}: {pixels}, {columns} x {rows} tokens, {drafter}", file=sys.stderr)


def show_decided(pipeline: LanternPipeline, *what: str) -> None:
    """Say what a processor took where that was left to it; a card has little to choose."""
    decided = pipeline.fit.decided
    details = [f"{name} {decided[name]}" for name in what if name in decided]
    if details and pipeline.backend.is_host:
        print("; ".join(details), file=sys.stderr)


def show_warm_up(result: GenerationResult) -> None:
    """Say what recording the graphs took, if any were recorded."""
    graph, peak = result.graph, result.environment["peak_memory_bytes"]
    memory = f", {peak / 2**20:,.0f} MiB at most" if peak else ""
    took = f"warm-up {result.timing.warmup_s:.1f} s: {graph['captures']} captures"
    if graph["captures"]:
        print(f"{took} by {graph['runner']}{memory}", file=sys.stderr)


def warm_up_note(pipeline: LanternPipeline) -> str:
    """What a warm-up that takes long says."""
    return ": ".join(filter(None, ["warming up", busy_note(pipeline)]))


def busy_note(pipeline: LanternPipeline) -> str:
    """What slows a processor down that others use, and what helps; empty where nothing does."""
    if not pipeline.backend.is_host or pipeline.options.threads or not host.is_busy():
        return ""
    return f"load {host.load():.0f} on {os.cpu_count()} cores: --threads 1 is faster now"


def summary(result: GenerationResult, output: str | Path) -> str:
    """One line for the user."""
    from lantern_hpu.results.images import mean_tv, tokens_per_step

    records = result.records
    setting = result.environment["decided"].get("method") or Resolved.read(result.config)
    seeds = records[0].seed if len(records) == 1 else f"{records[0].seed} to {records[-1].seed}"
    tv = mean_tv(records)
    cost = f"TV {tv:.3f} a token, " if tv else ""
    return (
        f"{len(records)} image(s), seed {seeds}, {setting}, {tokens_per_step(records):.2f} tokens a step, {cost}"
        f"{result.timing.generate_s:.1f} s -> {output}"
    )


# ----------------------------------------------------------------------------------------- command


def main(argv: Sequence[str] | None = None) -> int:
    """The `generate` command; returns the exit code."""
    parser = make_parser()
    args = parser.parse_args(argv)

    def command() -> None:
        if args.workers is not None:
            print(f"{draw_with_workers(args)} image(s) drawn -> {args.output}")
            return
        result = draw(args)
        saved = args.save_tokens or args.save_states
        where = args.output if not result or result.images else saved
        print(summary(result, where) if result else f"every image is in {where}")

    try:
        return exit_code(command, parser.spell)
    except KeyboardInterrupt:
        print("interrupted: what was drawn is kept, --resume draws the rest", file=sys.stderr)
        return 130
