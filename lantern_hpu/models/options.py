"""Where and how a model runs, as options. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from lantern_hpu.errors import OptionError, choices

KEPT = ("device", "host", "free")  # where a text encoder stays: see `lantern_hpu.models.text.t5`


@dataclass(frozen=True)
class DeviceOptions:
    """Where and how a model runs; the arguments of `LanternPipeline.from_pretrained`."""

    device: str = "auto"
    dtype: str = "auto"
    graphs: str = "auto"
    kernels: str = "auto"
    emulate: bool = False
    keep_text: str = "host"
    quantize: str | None = None
    stretch: str | None = None
    layout: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        if self.keep_text not in KEPT:
            raise OptionError(f"--keep-text is {self.keep_text}", hint=choices(KEPT))
