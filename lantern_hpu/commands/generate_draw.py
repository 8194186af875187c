"""What `generate` does once its options are parsed: check, load, resolve, draw and keep.

torch is imported only once everything that can be refused without it has been refused.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from lantern_hpu.backends import HOST, prepare
from lantern_hpu.commands.generate_again import check_kept
from lantern_hpu.commands.generate_job import (
    GenerateJob,
    job_of,
    outputs_of,
    requests_of,
    resolve_job,
)
from lantern_hpu.errors import OptionError
from lantern_hpu.methods.request import Request
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.methods.table import AUTO

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.images import GenerationResult
    from lantern_hpu.results.outputs import Keeper, Outputs
    from lantern_hpu.results.progress import Bar

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
    from lantern_hpu.results.outputs import save_outputs

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
    """Those that this model can make: without a tokenizer of pictures, tokens alone.

    Raises:
        OptionError: a sheet or previews are asked for, and nothing makes them.
    """
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
    from lantern_hpu.results.outputs import Keeper
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
    if model.source == "builtin" and model.stretched is None:
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
