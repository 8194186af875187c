"""Where and how a model runs, as options. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lantern_hpu.errors import OptionError, choices, option

KEEP_TEXT = (
    "device",
    "host",
    "free",
)  # where a text encoder stays: see `lantern_hpu.models.text.t5`
SWITCH = ("on", "off")

LAYOUTS = "packed once for the processor, half (float16, packed), plain, or auto: the fastest"


@dataclass(frozen=True)
class DeviceOptions:
    """Where and how a model runs; the arguments of `LanternPipeline.from_pretrained`."""

    device: str = option("auto", "auto")
    dtype: str = option("auto", "auto, or one the device offers")
    graphs: str = option("auto", "auto")
    kernels: str = option("auto", "auto: the device's fused ones; plain: torch's")
    emulate: bool = option(
        False, "with --device hpu: an emulator of its contract, for machines without one"
    )
    keep_text: str = option(
        "host", f"where a text encoder stays once the prompts are encoded: {', '.join(KEEP_TEXT)}"
    )
    quantize: str | None = option(None, "the target's weights in 8 bits", metavar="int8")
    stretch: str | None = option(
        None,
        "widen the model and its drafter to a known one's sizes: the same pictures at its cost (llamagen-xl)",
        metavar="NAME",
    )
    layout: str = option("auto", f"of the matrices: {LAYOUTS}")
    invariant: str = option(
        "on", "on: on a processor an image's bits do not depend on its batch; off: speed alone"
    )
    threads: int = option(0, "of the processor; 0 for the fastest number", metavar="N")

    def __post_init__(self) -> None:
        if self.keep_text not in KEEP_TEXT:
            raise OptionError(f"--keep-text is {self.keep_text}", hint=choices(KEEP_TEXT))
        if self.invariant not in SWITCH:
            raise OptionError(f"--invariant is {self.invariant!r}", hint=choices(SWITCH))
