"""Every method of a model, warmed up and drawn with on an emulated card."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

import gaudi_emulator
from gaudi_emulator.graphs import rehearse
from gaudi_emulator.lint import Ended, TimeOver, limited
from gaudi_emulator.torch_calls import replaced, wrapped
from lantern_hpu.backends.hpu.backend import HPUBackend
from lantern_hpu.core import Request, RunStats
from lantern_hpu.graphs.hpu import HPUGraphRunner
from lantern_hpu.methods.setting import METHODS, Setting
from lantern_hpu.pipeline import LanternPipeline

if TYPE_CHECKING:
    from gaudi_emulator.device import Device

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
        with gaudi_emulator.emulate(release) as card, rehearsed_captures(card):
            pipeline = LanternPipeline.from_pretrained(
                model, device="hpu", dtype=dtype, graphs=graphs
            )
            needs_drafter = METHODS[Setting.parse(method).drafting].needs_drafter
            if needs_drafter and pipeline.model.drafter is None and len(methods) > 1:
                show(f"{method}: left out, {pipeline.model.name} has no drafter")
                continue
            show(f"{method}: warm-up and {len(PROMPTS)} images")
            cards.append(card)
            try:
                with limited(timeout):
                    draw_two(pipeline, method)
            except (Exception, TimeOver) as error:  # what was found before it counts all the same
                ended = error
    return cards, ended


@contextmanager
def rehearsed_captures(card: Device) -> Iterator[None]:
    """What of a step a capture would bake in is told before each capture."""

    def rehearsed(capture: Callable[..., Tensor], runner: HPUGraphRunner) -> Tensor:
        rehearse(card, runner.run, runner.state.tensors)
        return capture(runner)

    card.differential = True
    # A compiled step tells by its guards what varies, so that they are never left out
    guarded = replaced(HPUBackend, "skips_guards", lambda before: False)
    with wrapped(HPUGraphRunner, "capture", rehearsed), guarded:
        yield


def draw_two(pipeline: LanternPipeline, method: str) -> None:
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
    pipeline.prepare(pipeline.engines.get(spec), requests, RunStats())
    gaudi_emulator.warmed_up()
    pipeline.draw(requests, chosen, batch_size=1, decode=pipeline.diffusion is None)
