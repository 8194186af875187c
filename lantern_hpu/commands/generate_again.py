"""`generate --from-png` and `--resume`: an image that is there says what to draw, or is held to what is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import HOST
from lantern_hpu.commands import options
from lantern_hpu.commands.generate_job import GenerateJob
from lantern_hpu.errors import OptionError, OutputError
from lantern_hpu.methods.relaxation import RelaxationOptions
from lantern_hpu.methods.request import Request, Sampling
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.models.files.parts import Given

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline

# What an image to draw again already says; giving one of these beside it is a contradiction.
SETTLED = (
    *"prompt negative_prompt class_label prompts_file num_images height width seed dtype quantize stretch".split(),
    *"method tree window window_tree commit".split(),
    *options.dests(RelaxationOptions).values(),
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
    settled = {"dtype": config["dtype"]} | {n: config.get(n) for n in ("quantize", "stretch")}
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
