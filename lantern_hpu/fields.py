"""What may be asked of an image, each argument declared once: its type, default, range, help and names.

`IMAGE_PARAMS` is the table. From a line of it come a keyword argument of `LanternPipeline`'s call, an option of
`lantern-hpu generate`, a field of a request over HTTP, and a row of docs/reference/generated/image-parameters.md.
Needs no torch.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Any, Literal, get_type_hints

from lantern_hpu.errors import Arg, require

UNSAID = (None, dataclasses.MISSING, (), "", False)  # defaults that a help does not name
MAX_SEED = 2**63 - 1
RANDOM = -1  # as a seed
MAX_IMAGES = 100_000  # of one run, each with a request of its own
Surface = Literal["command", "python", "http"]
MOST = 10**9  # of what has no largest meaningful value: int32 and products in float32 hold it


@dataclass(frozen=True)
class Param:
    """An argument.

    Attributes:
        name: with underscores, of its option.
        kind: of its value as text or JSON.
        default: None leaves it to the model or the method.
        low, high: the least and the largest value. marks: what a value at an end of the range means.
        zero: what 0 means, where it is allowed below `low`.
        metavar: of its value in the help of a command.
        group: of the options that it is listed with.
        python: its name in Python, if it has another one there.
        http: its name over HTTP, if it has another one; "" if it has none.
        positional: it is given by its place on a command line, without a name.
        several: in Python a list has one value for each prompt, or for each image.
    """

    name: str
    kind: Any
    help: str
    default: Any = None
    low: float | None = None
    high: float | None = None
    marks: Mapping[float, str] = field(default_factory=dict)
    zero: str = ""
    metavar: str | None = None
    group: str = "what to draw"
    python: str = ""
    http: str | None = None
    positional: bool = False
    several: bool = False

    @property
    def option(self) -> str:
        """Its name on a command line: `--cfg-scale`."""
        return "--" + self.name.replace("_", "-")

    def name_for(self, surface: Surface) -> str:
        """What a surface calls it; empty where it has none."""
        if surface == "python":
            return self.python or self.name
        return self.name if surface == "command" or self.http is None else self.http

    def named(self, value: object = None) -> Arg:
        """It as errors name it, which each surface spells."""
        return Arg(self.name, value, self.python)

    @property
    def range(self) -> str:
        """In words: `1 (off) to 100`, `0 (exact) or more`; empty if it has none."""
        if self.low is None:
            return "" if self.high is None else f"at most {self.high:g}"
        if self.zero:
            return f"0 ({self.zero}), or {self.low:g} to {self.high:g}"
        least = self.marked(self.low)
        return f"{least} or more" if self.high is None else f"{least} to {self.marked(self.high)}"

    def marked(self, end: float) -> str:
        number = str(end) if isinstance(end, int) else f"{end:g}"
        return f"{number} ({self.marks[end]})" if end in self.marks else number

    @property
    def about(self) -> str:
        """Its help, with its range and its default where it has them."""
        details = [self.range] if self.low is not None else []
        details += [] if self.default in UNSAID else [str(self.default)]
        return f"{self.help} ({'; '.join(details)})" if details else self.help

    def check(self, value: object, name: str = "") -> None:
        """Raise an OptionError for what is not a number where one is needed, or out of range; it says `name`."""
        if self.zero and value == 0:
            return
        fits = is_number(value, self.kind)
        allowed = self.range or ("true or false" if self.kind is bool else "a number")
        if not fits and self.kind is int:
            allowed = f"a whole number, {self.range}" if self.range else "a whole number"
        fits = fits and (self.low is None or value >= self.low)  # type: ignore[operator]
        fits = fits and (self.high is None or value <= self.high)  # type: ignore[operator]
        shown = repr(value) if isinstance(value, str) else value
        require(fits, name or self.name, shown, allowed)


def is_number(value: object, kind: object) -> bool:
    """Whether a value is a number where `kind` is one, whole where that is, and no number where that is bool."""
    if kind is bool:
        return isinstance(value, bool)
    number = {int: Integral, float: Real}.get(kind)  # type: ignore[call-overload]
    return number is None or (isinstance(value, number) and not isinstance(value, bool))


def plain_number(value: Any) -> Any:
    """A number of another library as one of Python, which JSON holds; anything else as it is."""
    if isinstance(value, int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


# ------------------------------------------------------------------------------------------ of an image

SAMPLING = "sampling (default: the model's own)"
_PARAMS = [
    Param(
        "negative_prompt",
        str,
        "negative prompt, for models that support one (Emu3)",
        metavar="TEXT",
        several=True,
    ),
    Param(
        "num_images",
        int,
        "images per prompt",
        1,
        low=1,
        high=MAX_IMAGES,
        python="num_images_per_prompt",
        http="n",
    ),
    Param(
        "height",
        int,
        "height in pixels, for models with variable sizes; without a width a square (model default)",
        low=1,
        metavar="PIXELS",
        http="",
    ),
    Param(
        "width", int, "width in pixels; without a height a square", low=1, metavar="PIXELS", http=""
    ),
    Param(
        "seed",
        int,
        "seed of the first image; image i uses seed + i",
        low=RANDOM,
        high=MAX_SEED,
        marks={RANDOM: "random"},
        several=True,
    ),
    Param(
        "method",
        str,
        "decoding method, or a setting METHOD[:RELAXATION][@TREE]",
        "auto",
        group="method",
    ),
    Param(
        "cfg_scale",
        float,
        "classifier-free guidance scale; 1 turns it off",
        low=1,
        high=100,
        marks={1: "off"},
        group=SAMPLING,
        python="guidance_scale",
    ),
    # Below 0.01 float32 would overflow on the way to what greedy says exactly
    Param(
        "temperature",
        float,
        "sampling temperature",
        low=0.01,
        high=10,
        zero="greedy",
        group=SAMPLING,
    ),
    Param(
        "top_k",
        int,
        "sample from the K most probable tokens; 0 turns it off",
        low=0,
        high=MOST,
        marks={0: "off"},
        group=SAMPLING,
    ),
    # Less than 1e-6 may be 0 in float32, which leaves no token
    Param(
        "top_p",
        float,
        "nucleus sampling: smallest set of tokens with this probability; 1 turns it off",
        low=1e-6,
        high=1,
        marks={1: "off"},
        group=SAMPLING,
    ),
    Param(
        "logprobs",
        bool,
        "keep the log-probability of each token, of lossless methods",
        False,
        group="where it goes",
    ),
    Param(
        "batch_size",
        int,
        "images per batch; it does not change the images (at most 8 if not set)",
        low=1,
        group="how it runs",
        http="",
    ),
]
IMAGE_PARAMS = {param.name: param for param in _PARAMS}


def given_params(given: Mapping[str, Any], surface: Surface) -> dict[str, Any]:
    """The arguments that were given and are not None, by the names of their options.

    Args:
        surface: whose names `given` has, and errors say.

    Raises:
        OptionError: a number is out of range.
    """
    result = {}
    for param in IMAGE_PARAMS.values():
        name = param.name_for(surface)
        value = given.get(name)
        if value is None:
            continue
        if not (param.several and isinstance(value, list | tuple)):
            param.check(value, name)
            if param.name == "seed" and value == RANDOM:
                value = secrets.randbelow(1 << 53)  # which every reader of JSON holds exactly
        result[param.name] = plain_number(value)
    return result


def check_seed(seed: int) -> None:
    """Raise an OptionError for what is no seed of an image: a random one was drawn before."""
    replace(IMAGE_PARAMS["seed"], low=0, marks={}).check(seed)


def only(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that are fields of a dataclass."""
    names = [part.name for part in fields(kind)]
    return {name: value for name, value in given.items() if name in names}


# ----------------------------------------------------------------------------------- fields of dataclasses


def option(default: Any, help: str, *, name: str = "", **more: Any) -> Any:
    """A dataclass field that is a command's option as well, so that default, range and help stand once.

    `commands.options.add_fields` declares it; `check_ranges` holds it to its range.

    Args:
        default: `dataclasses.MISSING` where it must be given.
        name: with underscores, if it is not the field's. more: further attributes of its `Param`.
    """
    param = Param(name, Any, help, default, **more)
    return dataclasses.field(default=default, metadata={"param": param})


def declared(name: str, default: Any) -> Any:
    """A dataclass field that is an argument of the table, with a default of its own; `check_ranges` holds it."""
    param = replace(IMAGE_PARAMS[name], default=default)
    return dataclasses.field(default=default, metadata={"param": param})


def params_of(kind: type[Any], *names: str) -> list[Param]:
    """The arguments that a dataclass declares by `option`; those of some names, if any are given."""
    types = get_type_hints(kind)
    return [
        replace(part.metadata["param"], name=argument_name(part), kind=types[part.name])
        for part in fields(kind)
        if "param" in part.metadata and (not names or part.name in names)
    ]


def argument_name(part: Field[Any]) -> str:
    """What the argument of a field is called."""
    param = part.metadata.get("param")
    return param.name if param is not None and param.name else part.name


def check_ranges(values: Any) -> None:
    """Raise an OptionError for a field of a dataclass that is not a number where its default is one, or out of
    the range which `option` gave it; None is in where it is the default."""
    for part in fields(values):
        value = getattr(values, part.name)
        param = part.metadata.get("param")
        if param is not None and (value is not None or type(part.default) in (int, float)):
            replace(param, kind=type(part.default)).check(value, argument_name(part))
