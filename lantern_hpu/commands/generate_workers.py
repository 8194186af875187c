"""`generate --workers`: the images of a job, drawn by other processes, one a card, through Ray."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import closing
from functools import partial

from lantern_hpu.backends import prepare
from lantern_hpu.commands.generate import kept_images, outputs_of, read_job, show_notes
from lantern_hpu.errors import InvalidImageError, OptionError, OutputError, require


def draw_with_workers(args: argparse.Namespace) -> int:
    """The whole command, drawn by other processes; the images are those of one process. -> how many were drawn"""
    from lantern_hpu.results.progress import ProgressBar
    from lantern_hpu.workers import pieces, share_work

    job = read_job(args)
    require(1 <= args.workers <= 4096, "workers", args.workers, "1 to 4096")
    saved = args.save_tokens or args.save_states
    if args.grid or args.report or saved or args.preview_every or args.from_png:
        what = "--workers excludes --grid, --report, --save-tokens, --save-states, --preview-every and --from-png"
        raise OptionError(what, "workers write each image to its own file")
    args.output = os.path.join(os.getcwd(), args.output)  # workers may run elsewhere
    files, count = outputs_of(args, job.prompts).images, len(job.prompts)
    work = pieces(count, args.workers, job.slots)
    opener, device = "lantern_hpu.commands.generate_workers:open_job_worker", job.device
    bar, drawn, invalid = ProgressBar(count, "image"), 0, list[str]()
    with closing(bar):
        for numbers, new in share_work(opener, [args], work, args.workers, device.device):
            drawn += new[0]
            invalid += new[1]
            bar.update(len(numbers))
    if invalid:
        raise InvalidImageError(f"some of {count} images are invalid", "; ".join(invalid))
    lost = sum(not file.is_file() for file in files)
    if lost:
        what, hint = f"{lost} of {count} images are not in {args.output}", "--resume draws them"
        raise OutputError(what, "the folder went away, or not all machines share it", hint)
    return drawn


def open_job_worker(args: argparse.Namespace) -> Callable[[list[int]], tuple[int, list[str]]]:
    """What a worker does: the images of these numbers that are not there yet. -> how many it drew, which are invalid"""
    job = read_job(args)
    prepare(job.device.device, job.device.graphs)
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.outputs import image_files, keep_image

    pipeline = LanternPipeline.from_pretrained(
        job.model, given=job.given, size=job.size, check=job.check_model, **vars(job.device)
    )
    chosen, sampling = job.resolve(pipeline)
    files, _ = image_files(args.output, job.prompts, False)
    requests, again = job.requests(pipeline.model, sampling, chosen.relaxation), set[int]()

    def draw_piece(numbers: list[int]) -> tuple[int, list[str]]:
        """With `--force`, what was there before is drawn again, but not what this worker has drawn."""
        here = [i for i in numbers if files[i].exists() and (not args.force or i in again)]
        kept = kept_images(pipeline, requests, chosen, files, here)
        left = [i for i in numbers if i not in kept]
        again.update(left)
        if left:
            with pipeline.backend.errors():
                news = [requests[i] for i in left]
                show_notes(pipeline, news)
                keep = partial(keep_image, [files[i] for i in left], args.force, args.resume)
                try:
                    pipeline.draw(news, chosen, job.slots, None, keep)
                except InvalidImageError as error:
                    return len(error.result.drawn), [str(error.why)]
        return len(left), []

    return draw_piece
