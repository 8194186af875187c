"""What one image is asked for, checked where it is made, and what became of it. Needs no torch."""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lantern_hpu.errors import Arg, InvalidImageError, OptionError, words
from lantern_hpu.fields import check_ranges, check_seed, declared
from lantern_hpu.methods.relaxation import EXACT, Relaxation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

IMAGENET_CLASSES = 1000  # whose names are known
MOST_ASPECT = 4  # of a source: the longer side to the shorter one
REPORTED = (
    *"file prompt seed tokens steps tokens_per_step accepted_by_depth relaxed_accepts".split(),
    *"tv_sum tv_mean tv_max".split(),
)


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled from the target's logits.

    Attributes:
        cfg_scale: guidance strength s in u + s (c - u); 1 switches guidance off.
        temperature: 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the most probable tokens up to this mass; 1 keeps all.
    """

    cfg_scale: float = declared("cfg_scale", 3.0)
    temperature: float = declared("temperature", 1.0)
    top_k: int = declared("top_k", 0)
    top_p: float = declared("top_p", 1.0)

    def __post_init__(self) -> None:
        check_ranges(self)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def check_text(what: str | Arg, text: str) -> None:
    """Raise an OptionError for what no model reads and no file holds: half a character, or a control character."""
    for mark in text:
        if "\ud800" <= mark <= "\udfff":
            why = f"it holds {mark!r}, half of a character or a byte of another encoding"
            raise OptionError(words(what, "is not valid text"), why, "the same in UTF-8")
        if unicodedata.category(mark) == "Cc" and not mark.isspace():
            why = f"it holds the control character {mark!r}"
            raise OptionError(words(what, "is not valid text"), why, "leave it out")


def check_prompt(prompt: str) -> None:
    """Raise an OptionError for a prompt that says nothing, or is not valid text."""
    if not prompt.strip():
        hint = Arg("prompt", "a red apple")
        raise OptionError("the prompt is empty", "there is nothing to draw", hint, field="prompt")
    check_text("the prompt", prompt)


@dataclass(frozen=True)
class SourcePicture:
    """A picture that an image is drawn from; `results.sources.read_picture` makes one.

    Attributes:
        picture: RGB, upright, without transparency.
        digest: sha256 of its size and pixels: sources of one digest are the same.
    """

    picture: Image.Image = field(compare=False, repr=False)
    digest: str

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.picture.height, self.picture.width


@dataclass(frozen=True)
class Request:
    """One image to generate.

    Attributes:
        negative: what guidance leads away from, for models that read one; None: the model's own.
        size: height and width in pixels, for models that have several; None: the model's own.
        sources: pictures to draw from, in their order, for models that read some.
        logprobs: whether the log-probabilities of its tokens are kept; its tokens are the same.
    """

    prompt: str
    seed: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    relaxation: Relaxation = EXACT
    negative: str | None = None
    size: tuple[int, int] | None = None
    sources: tuple[SourcePicture, ...] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        check_prompt(self.prompt)
        if self.negative is not None:
            check_text(Arg("negative_prompt"), self.negative)
        check_seed(self.seed)

    @property
    def settings(self) -> dict[str, Any]:
        """What an image's metadata hold of its own settings."""
        result: dict[str, Any] = {
            "sampling": asdict(self.sampling),
            "relaxation": self.relaxation.as_json(),
        }
        if self.negative is not None:
            result["negative"] = self.negative
        if self.size is not None:
            result["size"] = list(self.size)
        if self.sources:
            result["sources"] = [
                {"digest": source.digest, "size": list(source.size)} for source in self.sources
            ]
        return result


def size_of(height: int | None, width: int | None) -> tuple[int, int] | None:
    """Height and width of a picture; one alone is both, and neither is the model's own size."""
    height = width if height is None else height
    width = height if width is None else width
    return None if height is None or width is None else (height, width)


@dataclass
class ImageRecord:
    """How one image was generated.

    Attributes:
        token_ids: [N].
        tokens, tokens_per_step: bonus token included; prefill and what is past the image excluded.
        accepted_by_depth: entry d counts steps that accepted a draft at depth d + 1.
        relaxed_accepts: drafts accepted only thanks to relaxation.
        tv_sum: total variation between the tokens' distributions and the target's, summed over the tokens; 0 where
            nothing was relaxed, None where it was and what that cost is not metered.
        tv_max: the same of the token where it was largest. tv_mean: of a token after the first.
        file: where it was written.
        invalid: which of its numbers were NaN or infinite; empty where none was.
        logprobs: [N] float32, of each token in the distribution that it was drawn from: after guidance, temperature,
            filters and what the picture's grammar forbids; 0 where a greedy image has one choice. None: not asked for.
        model_logprobs: [N] float32, of each token by the model alone: temperature 1, no guidance, no filter.
    """

    request: Request
    token_ids: NDArray[np.int64]
    steps: int
    accepted_by_depth: list[int]
    relaxed_accepts: int
    tv_sum: float | None = 0.0
    tv_max: float | None = 0.0
    file: str | None = None
    invalid: str = ""
    logprobs: NDArray[np.float32] | None = None
    model_logprobs: NDArray[np.float32] | None = None

    @property
    def prompt(self) -> str:
        return self.request.prompt

    @property
    def seed(self) -> int:
        return self.request.seed

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def tokens_per_step(self) -> float:
        return round((self.tokens - 1) / max(self.steps, 1), 4)

    @property
    def tv_mean(self) -> float | None:
        return None if self.tv_sum is None else self.tv_sum / max(self.tokens - 1, 1)

    @property
    def tv(self) -> dict[str, float | None]:
        """By name, for what does not hold the rest."""
        return {"mean": self.tv_mean, "max": self.tv_max, "sum": self.tv_sum}

    @property
    def settings(self) -> dict[str, Any]:
        return self.request.settings

    def as_json(self) -> dict[str, Any]:
        """The image's line in the report."""
        result = {name: getattr(self, name) for name in REPORTED}
        return result | self.listed_logprobs() | ({"invalid": self.invalid} if self.invalid else {})

    def listed_logprobs(self) -> dict[str, Any]:
        """By name, for JSON; nothing where they were not asked for."""
        both = {name: getattr(self, name) for name in ("logprobs", "model_logprobs")}
        return {name: values.tolist() for name, values in both.items() if values is not None}


def check_valid(records: Sequence[ImageRecord], result: Any = None) -> None:
    """Raise an InvalidImageError for images that were computed with NaN; it has the `result` of the others."""
    invalid = [record for record in records if record.invalid]
    if invalid:
        seeds = ", ".join(f"seed {record.seed}: {record.invalid}" for record in invalid[:3])
        more = f" and {len(invalid) - 3} more" if len(invalid) > 3 else ""
        hint = words(Arg("dtype", "float32"), ",", Arg("kernels", "plain"), ", or other weights")
        what = f"{len(invalid)} of {len(records)} images are invalid"
        error = InvalidImageError(what, f"{seeds}{more}", hint)
        error.result = result
        raise error


@dataclass
class RunStats:
    """What a run took: seconds of its phases, and how many steps `steps_s` are the seconds of."""

    import_s: float = 0.0
    load_s: float = 0.0
    warmup_s: float = 0.0
    text_s: float = 0.0
    generate_s: float = 0.0
    decode_s: float = 0.0
    prefill_s: float = 0.0
    steps_s: float = 0.0
    steps: int = 0

    @contextmanager
    def adding(self, name: str) -> Iterator[None]:
        """What is done inside is added to the seconds of this name."""
        began = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + time.perf_counter() - began)

    @property
    def ms_per_step(self) -> float:
        return 1000 * self.steps_s / max(self.steps, 1)

    def as_json(self) -> dict[str, float]:
        result = asdict(self) | {"ms_per_step": self.ms_per_step}
        return {name: round(value, 4) for name, value in result.items()}


@dataclass
class Event:
    """A progress event, for a callback.

    Attributes:
        rows, total_rows: image rows known, of all images of the run.
        running: images that are being generated.
        tokens_per_step: of an image, mean so far.
        steps: decode steps of the batch so far. tokens: known so far, of all images.
        preview: the images as far as they are known, grey where nothing is; a host read.
    """

    rows: int
    total_rows: int
    running: int
    tokens_per_step: float
    steps: int
    tokens: int
    preview: Callable[[], list[Image.Image]]
