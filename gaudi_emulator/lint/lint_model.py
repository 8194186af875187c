"""Every method of a model, warmed up and drawn with on an emulated card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from gaudi_emulator.lint import Ended, TimeOver, limited
from lantern_hpu.backends import EMULATED
from lantern_hpu.methods.request import Request
from lantern_hpu.methods.setting import METHODS, Setting
from lantern_hpu.pipeline import LanternPipeline

if TYPE_CHECKING:
    from gaudi_emulator.lint import Device

PROMPTS = ("a red apple", "a blue fish")


def lint_model(
    model: str = "builtin",
    methods: Sequence[str] = tuple(METHODS),
    graphs: str = "auto",
    dtype: str = "auto",
    timeout: float = 600.0,
    show: Callable[[str], object] = lambda line: None,
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
        pipeline = LanternPipeline.from_pretrained(
            model, device=EMULATED, dtype=dtype, graphs=graphs, emulate=True
        )
        with closing(pipeline):
            needs_drafter = METHODS[Setting.parse(method).drafting].needs_drafter
            lacks_drafter = needs_drafter and pipeline.model.drafter is None
            if lacks_drafter and len(methods) > 1:
                show(f"{method}: left out, {pipeline.model.name} has no drafter")
                continue
            show(f"{method}: warm-up and {len(PROMPTS)} images")
            card: Device = pipeline.backend.card  # type: ignore[attr-defined]
            card.differential = True
            cards.append(card)
            try:
                with limited(timeout):
                    draw_two(pipeline, method)
            except (Exception, TimeOver) as error:  # what was found before it counts all the same
                ended = error
    return cards, ended


def draw_two(pipeline: LanternPipeline, method: str) -> None:
    """Of the model's own size, or of few codes where sizes are free; a diffusion model is not ours to check."""
    chosen, sampling = pipeline.resolve(method), pipeline.model.sampling
    pixels = pipeline.model.target.config.code_pixels
    size = (2 * pixels, 3 * pixels) if pixels else None
    requests = [
        Request(p, i, sampling, chosen.relaxation, size=size) for i, p in enumerate(PROMPTS)
    ]
    pipeline.draw(requests, chosen, batch_size=1, decode=pipeline.diffusion is None)
