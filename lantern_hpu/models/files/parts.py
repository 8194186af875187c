"""Where the parts of a model lie, and those that a user named in their place. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lantern_hpu.errors import OptionError, option

CODE_PIXELS = 16  # along a code, in every published model


@dataclass(frozen=True)
class Parts:
    """Where the parts of a model lie; None where there is none.

    Attributes:
        spared: parts that may be missing: `vq` where no pictures are wanted, `text` where no prompts are read.
    """

    name: str
    source: str  # what `--model` takes to find it again
    target: Path  # a file, or a folder
    drafter: Path | None = None
    vq: Path | None = None
    text: Path | None = None  # text encoder, or tokenizer
    neighbours: Path | None = None
    pixels: Path | None = None  # a pipeline of diffusers that makes pictures of tokens
    image_size: int | None = None
    sampling: dict[str, Any] | None = None
    spared: tuple[str, ...] = ()


@dataclass(frozen=True)
class Given:
    """Parts that the user named on their own."""

    drafter: str | None = option(
        None, "path of a drafter: published, from `lantern-hpu train`, or in the speculators layout"
    )
    vq: str | None = option(None, "path of the VQ image tokenizer", metavar="FILE")
    text: str | None = option(
        None,
        "path of the T5 encoder, of T5 features (.npy, .safetensors, a folder of .npy), or of the text tokenizer",
        name="--text-encoder",
        metavar="PATH",
    )
    neighbours: str | None = option(
        None, "path of a table of the nearest codes of each code", metavar="FILE.npy"
    )
    image_size: int | None = option(
        None, "image size in pixels, for checkpoints that do not state it"
    )

    def __post_init__(self) -> None:
        size = self.image_size
        if size is not None and (size <= 0 or size % CODE_PIXELS):
            why = f"allowed: multiples of {CODE_PIXELS}"
            raise OptionError(f"--image-size is {size}", why, "256, 384 or 512")

    def resolved(self) -> Given:
        """The same parts by paths that hold from anywhere."""
        paths = {n: str(Path(p).resolve()) for n in OPTIONS if (p := getattr(self, n)) is not None}
        return replace(self, **paths)  # type: ignore[arg-type]


OPTIONS = {
    "drafter": "--drafter",
    "vq": "--vq",
    "text": "--text-encoder",
    "neighbours": "--neighbours",
}
