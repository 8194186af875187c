"""A model on the emulated card, and what the card did for one draw after the warm-up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from gaudi_emulator import emulate, warmed_up
from gaudi_emulator.device import Device
from gaudi_emulator.lint import lint_counts
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.images import GenerationResult


@contextmanager
def emulated(
    model: Path, graphs: str = "auto", release: str | None = None, **options: Any
) -> Iterator[tuple[LanternPipeline, Device]]:
    """In float32 unless said otherwise: only so are tokens the CPU's."""
    with emulate(release) as card:
        options = {"device": "hpu", "dtype": "float32", **options}
        made = LanternPipeline.from_pretrained(str(model), graphs=graphs, **options)
        with closing(made):
            yield made, card


def draw_warm(
    pipeline: LanternPipeline, card: Device, *args: Any, **options: Any
) -> tuple[GenerationResult, dict[str, int]]:
    """The same images drawn twice: what the card did, and what it had to say, the second time."""
    card.warm = False
    pipeline(*args, **options)
    warmed_up()
    before = counted(card)
    result = pipeline(*args, **options)
    return result, {name: count - before[name] for name, count in counted(card).items()}


def counted(card: Device) -> dict[str, int]:
    hits = card.findings.hits
    return lint_counts([card]) | {"errors": hits("error"), "warnings": hits("warn")}


def rules(card: Device, *severities: str) -> set[str]:
    """The rules that were broken: those of errors, unless severities are named."""
    wanted = severities or ("error",)
    return {found.rule.id for found in card.findings.sorted() if found.severity in wanted}
