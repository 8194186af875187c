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
    dtype: str = option(
        "auto",
        "number format of the weights: auto, bfloat16, float16, float32, as the device supports",
    )
    graphs: str = option("auto", "auto")
    kernels: str = option("auto", "auto: the device's fused ones; plain: torch's")
    keep_text: str = option(
        "host", f"where to keep the text encoder after encoding the prompts: {', '.join(KEEP_TEXT)}"
    )
    quantize: str | None = option(None, "quantize the weights of the target model", metavar="int8")
    layout: str = option("auto", f"of the matrices: {LAYOUTS}")
    invariant: str = option("on", "batch-invariant results on CPUs: on, or off for speed")
    threads: int = option(0, "CPU threads; 0 selects the fastest number", metavar="N")

    def __post_init__(self) -> None:
        if self.keep_text not in KEEP_TEXT:
            raise OptionError(f"--keep-text is {self.keep_text}", hint=choices(KEEP_TEXT))
        if self.invariant not in SWITCH:
            raise OptionError(f"--invariant is {self.invariant!r}", hint=choices(SWITCH))
