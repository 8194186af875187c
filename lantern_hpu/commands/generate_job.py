"""What `generate` does once its options are parsed: check, load, resolve, draw and keep, here or in workers.

torch is imported only once everything that can be refused without it has been refused.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import HOST, prepare
from lantern_hpu.commands import options
from lantern_hpu.decode.spec import together
from lantern_hpu.errors import OptionError, OutputError, require
from lantern_hpu.methods.request import Request, Sampling, size_of
from lantern_hpu.methods.setting import Resolved, Setting, check_drafter
from lantern_hpu.methods.table import AUTO
from lantern_hpu.models.files.parts import Given
from lantern_hpu.models.options import DeviceOptions
from lantern_hpu.models.text.classes import class_index
from lantern_hpu.results.prompts import read_prompts
from lantern_hpu.zoo.sizes import stretch_sizes

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.images import GenerationResult
    from lantern_hpu.results.outputs import Keeper, Outputs
    from lantern_hpu.results.progress import Bar

# What an image to draw again already says; giving one of these beside it is a contradiction.
SETTLED = (
    "prompt negative_prompt class_label prompts_file num_images height width seed dtype quantize stretch method "
    "tree window window_tree relax relax_k relax_delta relax_lambda relax_omega relax_nu relax_mu relax_distance "
    "relax_ranks relax_gap residual cfg_scale temperature top_k top_p"
).split()


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
        together(len(self.prompts), self.batch_size)
        for index, prompt in enumerate(self.prompts):
            Request(prompt, self.seed + index, size=self.size)


def job_of(args: argparse.Namespace) -> GenerateJob:
    """What the options ask for.

    Raises:
        LanternError: they contradict each other, or one is out of range.
    """
    require(args.preview_every >= 0, "--preview-every", args.preview_every, "0 (off) or more")
    if args.resume and (args.force or args.grid or args.save_tokens):
        why = "it keeps the images that are there, and only their pixels"
        raise OptionError("--resume excludes --force, --grid and --save-tokens", why)
    return job_again(args) if args.from_png else new_job(args)


def new_job(args: argparse.Namespace) -> GenerateJob:
    listed = read_prompts(args.prompts_file) if args.prompts_file else []
    prompts = [*args.prompt, *args.class_label, *listed]
    if not prompts:
        raise OptionError("nothing to draw", "no prompt was given", '--prompt "a red apple"')
    count = 1 if args.num_images is None else args.num_images
    require(count >= 1, "--num-images", count, "1 or more")
    for label in args.class_label:
        class_index(label)
    setting = options.setting_of(args)
    check_drafter(setting.method, args.drafter)
    if args.stretch is not None:
        stretch_sizes(args.stretch, options.given_parts(args))
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
    settled = {"dtype": config["dtype"]} | {n: config.get(n) for n in ("quantize", "stretch")}
    settled["layout"] = args.layout or config.get("layout", "plain")
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


def settled_job(
    job: GenerateJob, pipeline: LanternPipeline, args: argparse.Namespace
) -> tuple[Resolved, Sampling]:
    """What was left to the model and the device, or is that of the image to draw again.

    Raises:
        WeightsError: the image was drawn with other weights.
    """
    if job.known is not None:
        from lantern_hpu.results.again import settings_again

        return settings_again(args.from_png, job.known, job.model, pipeline.model.files)
    setting = pipeline.resolve(job.setting, together(len(job.prompts), job.batch_size))
    return setting, options.sampling_options(args, pipeline.model.sampling)


def outputs_of(args: argparse.Namespace, prompts: Sequence[str]) -> Outputs:
    """The files of a run.

    Raises:
        OutputError, OptionError: some could not be written later.
    """
    from lantern_hpu.results.outputs import Outputs

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


# ------------------------------------------------------------------------------------ drawing


def draw_job(args: argparse.Namespace) -> GenerationResult | None:
    """The whole command after parsing; None if every image was there already."""
    job = job_of(args)
    outputs = outputs_of(args, job.prompts)
    began = time.perf_counter()
    prepare(job.device.device, job.device.graphs, job.device.emulate)
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.outputs import Keeper, save_outputs
    from lantern_hpu.results.progress import Bar

    imported = time.perf_counter() - began
    pipeline = LanternPipeline.from_pretrained(
        job.model,
        given=job.given,
        pictures=not outputs.tokens,
        size=job.size,
        **vars(job.device),
    )
    with closing(pipeline):
        show_geometry(pipeline)
        if pipeline.model.vq is None:
            outputs = outputs.of_tokens(pipeline.model.name)
        if args.verbose:
            show_decided(pipeline, "dtype", "layout")
        if job.labels and not pipeline.model.condition.takes_classes:
            why = f"{pipeline.model.name} draws from text"
            raise OptionError("--class-label cannot be used", why, "--prompt")
        chosen, sampling = settled_job(job, pipeline, args)
        requests = requests_of(job, chosen, sampling)
        if job.setting.method == AUTO and chosen.method == "ar" and len(requests) > 1:
            print(ONE_TOKEN, file=sys.stderr)
        left = [
            i for i in range(len(requests)) if not args.resume or not outputs.images[i].exists()
        ]
        kept = set(range(len(requests))) - set(left)
        check_kept(pipeline, requests, chosen, outputs.images, kept)
        if not left:
            return None
        bar = Bar(outputs.preview, args.preview_every)
        keep = Keeper(left, outputs.images, args.force)
        result = draw_shown(
            pipeline, [requests[i] for i in left], chosen, job.batch_size, bar, keep
        )
        if args.verbose:
            show_decided(pipeline, "threads")
    if line := warm_up_line(result):
        print(line, file=sys.stderr)
    result.timing.import_s = imported
    columns = args.num_images if 1 < (args.num_images or 1) < len(result.images) else None
    save_outputs(result, outputs, columns, args.force)
    return result


def draw_with_workers(args: argparse.Namespace) -> int:
    """The whole command, drawn by other processes; the images are those of one process. -> how many were drawn"""
    from tqdm import tqdm

    from lantern_hpu.workers import pieces, share_work

    job = job_of(args)
    require(1 <= args.workers <= 4096, "--workers", args.workers, "1 to 4096")
    if args.grid or args.report or args.save_tokens or args.preview_every or args.from_png:
        what = "--workers excludes --grid, --report, --save-tokens, --preview-every and --from-png"
        raise OptionError(what, "workers leave images, each a file of its own")
    args.output = args.output.resolve()  # workers may run elsewhere
    outputs_of(args, job.prompts)
    count = len(job.prompts)
    work = pieces(count, args.workers, together(count, job.batch_size))
    opener, device = "lantern_hpu.commands.generate_job:open_job_worker", job.device
    bar, drawn = tqdm(total=count, unit="image", file=sys.stderr, dynamic_ncols=True), 0
    with closing(bar):
        for numbers, new in share_work(
            opener, [args], work, args.workers, device.device, device.emulate
        ):
            drawn += new
            bar.update(len(numbers))
    return drawn


def open_job_worker(args: argparse.Namespace) -> Callable[[list[int]], int]:
    """What a worker does: the images of these numbers that are not there yet. -> how many it drew"""
    job = job_of(args)
    prepare(job.device.device, job.device.graphs, job.device.emulate)
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.images import image_files
    from lantern_hpu.results.outputs import Keeper

    pipeline = LanternPipeline.from_pretrained(
        job.model, given=job.given, size=job.size, **vars(job.device)
    )
    chosen, sampling = settled_job(job, pipeline, args)
    files, _ = image_files(args.output, job.prompts, False)
    requests, again = requests_of(job, chosen, sampling), set[int]()
    size = together(len(requests), job.batch_size)

    def draw_piece(numbers: list[int]) -> int:
        """With `--force`, what was there before is drawn anew, but what this worker left is not."""
        kept = [i for i in numbers if files[i].exists() and (not args.force or i in again)]
        check_kept(pipeline, requests, chosen, files, kept)
        left = [i for i in numbers if i not in set(kept)]
        again.update(left)
        if left:
            with pipeline.backend.errors():
                news = [requests[i] for i in left]
                keep = Keeper(left, files, args.force)
                pipeline.draw(news, chosen, size, None, keep)
        return len(left)

    return draw_piece


ONE_TOKEN = (
    "note: auto draws several images together one token a step, as that was measured to be fastest on this device; "
    "--batch-size 1 draws one after the other, with speculation"
)


def show_geometry(pipeline: LanternPipeline) -> None:
    """Say what a checkpoint draws: its size is its own, no option changes it."""
    model = pipeline.model
    for note in model.notes:
        print(f"note: {note}", file=sys.stderr)
    if model.source == "builtin" and model.stretched is None:
        return
    (height, width), (rows, columns) = model.config.image_size, model.target.config.grid
    drafter = "with a drafter" if model.drafter else "no drafter"
    pixels = f"{width} x {height} pixels" if model.vq else "no VQ tokenizer, so no pictures"
    print(f"{model.name}: {pixels}, {columns} x {rows} tokens, {drafter}", file=sys.stderr)


def show_decided(pipeline: LanternPipeline, *what: str) -> None:
    """Say what a processor took where that was left to it; a card has little to choose."""
    decided = pipeline.backend.tuning.decided
    details = [f"{name} {decided[name]}" for name in what if name in decided]
    if details and pipeline.backend.name == HOST:
        print("; ".join(details), file=sys.stderr)


def requests_of(job: GenerateJob, chosen: Resolved, sampling: Sampling) -> list[Request]:
    """One an image, each with the next seed."""
    shared = (sampling, chosen.relaxation, job.negative, job.size)
    return [Request(p, job.seed + i, *shared) for i, p in enumerate(job.prompts)]


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


def warm_up_line(result: GenerationResult) -> str:
    """What recording the graphs took, if any were recorded."""
    graph, peak = result.graph, result.environment["peak_memory_bytes"]
    if not graph["captures"]:
        return ""
    memory = f", {peak / 2**20:,.0f} MiB at most" if peak else ""
    seconds = result.timing.warmup_s
    return f"warm-up {seconds:.1f} s: {graph['captures']} captures by {graph['runner']}{memory}"
