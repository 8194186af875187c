"""Every method of a model, warmed up and drawn with on an emulated card."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import gaudi_emulator
from gaudi_emulator.graphs import rehearse
from gaudi_emulator.lint import Ended, TimeOver, limited
from gaudi_emulator.torch_calls import replaced, wrapped
from lantern_hpu.backends.hpu.backend import HPUBackend
from lantern_hpu.core import Event, Request, RunStats
from lantern_hpu.graphs.hpu import HPUGraphRunner
from lantern_hpu.methods.setting import METHODS, Setting
from lantern_hpu.pipeline import LanternPipeline

if TYPE_CHECKING:
    from gaudi_emulator.device import Device

THREADED = 100_000_000  # parameters from which an operator is worth several threads
EVERY = 10.0  # seconds between two lines of progress
PROMPTS = ("a red apple", "a blue fish")


def lint_model(
    model: str = "builtin",
    methods: Sequence[str] = tuple(METHODS),
    graphs: str = "auto",
    dtype: str = "auto",
    timeout: float = 600.0,
    show: Callable[[str], object] = lambda line: None,
    release: str | None = None,
) -> tuple[list[Device], Ended]:
    """Warm-up and two images by each method; one of many whose drafter the model lacks is left out.

    Args:
        methods: written as settings, such as `scd@16:commit=4`.
        timeout: seconds that each method may take: a broken step may never finish an image.
        show: is given what is being done.

    Returns: the cards, and what ended a method if something did.
    """
    cards: list[Device] = []
    ended: Ended = None
    for method in methods:
        said = partial(progress, show, method)
        with gaudi_emulator.emulate(release) as card, rehearsed_captures(card, said):
            pipeline = LanternPipeline.from_pretrained(
                model, device="hpu", dtype=dtype, graphs=graphs
            )
            needs_drafter = METHODS[Setting.parse(method).drafting].needs_drafter
            if needs_drafter and pipeline.model.drafter is None and len(methods) > 1:
                said(f"left out, {pipeline.model.name} has no drafter")
                continue
            cards.append(card)
            try:
                with limited(timeout), threads_for(pipeline):
                    draw_two(pipeline, method, said)
            except (Exception, TimeOver) as error:  # what was found before it counts all the same
                said(f"ended with {type(error).__name__}: {error}")
                ended = error
    return cards, ended


def progress(show: Callable[[str], object], method: str, phase: str) -> None:
    show(f"{method}: {phase}")


@contextmanager
def rehearsed_captures(
    card: Device, said: Callable[[str], object] = lambda phase: None
) -> Iterator[None]:
    """What of a step a capture would bake in is told before each capture."""

    def rehearsed(capture: Callable[..., Tensor], runner: HPUGraphRunner) -> Tensor:
        said(f"rehearsal and capture of {type(runner.function).__name__}")
        rehearse(card, runner.run, runner.state.tensors)
        return capture(runner)

    card.differential = True
    # A compiled step tells by its guards what varies, so that they are never left out
    guarded = replaced(HPUBackend, "skips_guards", lambda before: False)
    with wrapped(HPUGraphRunner, "capture", rehearsed), guarded:
        yield


@contextmanager
def threads_for(pipeline: LanternPipeline) -> Iterator[None]:
    """One thread for a small model, whose operators are shorter than waking up the others."""
    before = torch.get_num_threads()
    if sum(weight.numel() for weight in pipeline.model.target.parameters()) < THREADED:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw_two(pipeline: LanternPipeline, method: str, said: Callable[[str], object]) -> None:
    """Of the model's own size, or of few codes where sizes are free; a diffusion model is not ours to check."""
    chosen, sampling = pipeline.resolve(method), pipeline.model.sampling
    config = pipeline.model.target.config
    pixels, step = config.code_pixels, config.grid_step
    # Longer than the usual window
    size = (pixels * 4, pixels * (6 + 6 % step)) if pixels else None
    requests = [
        Request(p, i, sampling, chosen.relaxation, size=size) for i, p in enumerate(PROMPTS)
    ]
    spec = replace(pipeline.spec(requests, chosen.tree, 1), open=True)
    said("warm-up")
    pipeline.prepare(pipeline.engines.get(spec), requests, RunStats())
    gaudi_emulator.warmed_up()
    pipeline.draw(requests, chosen, 1, Steps(said), decode=pipeline.diffusion is None)


class Steps:
    """Says how far the images are, every EVERY seconds."""

    def __init__(self, said: Callable[[str], object]) -> None:
        self.said, self.next = said, 0.0

    def __call__(self, event: Event) -> None:
        if time.monotonic() < self.next:
            return
        self.next = time.monotonic() + EVERY
        image = 1 + event.rows * len(PROMPTS) // event.total_rows
        where = f"image {min(image, len(PROMPTS))} of {len(PROMPTS)}"
        self.said(f"{where}, {event.steps} steps, {event.rows} of {event.total_rows} rows of both")
