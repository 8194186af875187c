"""What may be asked of an image, each argument declared once: its type, default, range, help and names.

`ImageParams` is the table. From a line of it come a keyword argument of `LanternPipeline`'s call, an option of
`lantern-hpu generate`, a field of a request over HTTP, and a row of docs/reference/generated/image-parameters.md.
Needs no torch.
"""

import dataclasses
import inspect
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_type_hints

from lantern_hpu.errors import PYTHON_NAMES, require

F = TypeVar("F", bound=Callable[..., Any])

UNSAID = (None, dataclasses.MISSING, (), "", False)  # defaults that a help does not name
MAX_SEED = 2**63 - 1
RANDOM = -1  # as a seed
MAX_IMAGES = 100_000  # of one run, each with a request of its own
MOST = 10**9  # of what has no largest meaningful value: int32 and products in float32 hold it


@dataclass(frozen=True)
class Param:
    """An argument.

    Attributes:
        kind: of its value as text or JSON.
        default: None leaves it to the model or the method.
        low, high: the least and the largest value. marks: what a value at an end of the range means.
        zero: what 0 means, where it is allowed below `low`.
        metavar: of its value in the help of a command.
        group: of the options that it is listed with.
        name: with underscores; of `ImageParams`, filled in by `IMAGE_PARAMS`.
        http: its name over HTTP; "" if it has none there.
        positional: it is given by its place on a command line, without a name.
        several: in Python a list has one value for each prompt, or for each image.
    """

    kind: Any
    help: str
    default: Any = None
    low: float | None = None
    high: float | None = None
    marks: Mapping[float, str] = field(default_factory=dict)
    zero: str = ""
    metavar: str | None = None
    group: str = "what to draw"
    name: str = ""
    http: str | None = None
    positional: bool = False
    several: bool = False

    @property
    def field(self) -> str:
        """Its name over HTTP; empty if it has none."""
        return self.name if self.http is None else self.http

    @property
    def python(self) -> str:
        """Its name in Python."""
        return PYTHON_NAMES.get(self.name, self.name)

    @property
    def option(self) -> str:
        """Its name on a command line: `--cfg-scale`."""
        return "--" + self.name.replace("_", "-")

    @property
    def range(self) -> str:
        """In words: `1 (off) to 100`, `0 (exact) or more`; empty if it has none."""
        if self.low is None:
            return "" if self.high is None else f"at most {self.high:g}"
        if self.zero:
            return f"0 ({self.zero}), or {self.low:g} to {self.high:g}"
        words = [self.marked(self.low), self.marked(self.high or 0)]
        return f"{words[0]} or more" if self.high is None else f"{words[0]} to {words[1]}"

    def marked(self, end: float) -> str:
        number = str(end) if isinstance(end, int) else f"{end:g}"
        return f"{number} ({self.marks[end]})" if end in self.marks else number

    @property
    def about(self) -> str:
        """Its help, with its range and its default where it has them."""
        details = [self.range] if self.low is not None else []
        details += [] if self.default in UNSAID else [str(self.default)]
        return f"{self.help} ({'; '.join(details)})" if details else self.help

    def check(self, value: object) -> None:
        """Raise an OptionError for what is not a number where one is needed, or out of range."""
        if self.zero and value == 0:
            return
        fits = is_number(value, self.kind)
        allowed = self.range or "a number"
        if not fits and self.kind is int:
            allowed = f"a whole number, {self.range}" if self.range else "a whole number"
        fits = fits and (self.low is None or value >= self.low)  # type: ignore[operator]
        fits = fits and (self.high is None or value <= self.high)  # type: ignore[operator]
        require(fits, self.name, repr(value) if isinstance(value, str) else value, allowed)


def is_number(value: object, kind: object) -> bool:
    """Whether a value is a number where `kind` is one, and a whole one where that is whole; else anything is."""
    number = {int: Integral, float: Real}.get(kind)  # type: ignore[call-overload]
    return number is None or (isinstance(value, number) and not isinstance(value, bool))


def plain_number(value: Any) -> Any:
    """A number of another library as one of Python, which JSON holds; anything else as it is."""
    if isinstance(value, int | float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


# ----------------------------------------------------------------------------------- fields of dataclasses


def option(default: Any, help: str, *, name: str = "", **more: Any) -> Any:
    """A dataclass field that is a command's option as well, so that default, range and help stand once.

    `commands.options.add_fields` declares it; `check_ranges` holds it to its range.

    Args:
        default: `dataclasses.MISSING` where it must be given.
        name: with underscores, if it is not the field's. more: further attributes of its `Param`.
    """
    param = Param(Any, help, default, name=name, **more)
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
            replace(param, name=argument_name(part), kind=type(part.default)).check(value)


# ------------------------------------------------------------------------------------------ of an image

SAMPLING = "sampling (default: the model's own)"
METHOD = "method"


class ImageParams(TypedDict, total=False):
    """What a call, a command and a request may say of the images to generate, besides their prompts."""

    negative_prompt: Annotated[
        "str | Sequence[str] | None",
        Param(
            str,
            "negative prompt, for models that support one (Emu3)",
            metavar="TEXT",
            several=True,
        ),
    ]
    num_images_per_prompt: Annotated[
        int, Param(int, "images per prompt", 1, low=1, high=MAX_IMAGES, http="n")
    ]
    height: Annotated[
        "int | None",
        Param(
            int,
            "height in pixels, for models with variable sizes; without a width a square (model default)",
            low=1,
            metavar="PIXELS",
            http="",
        ),
    ]
    width: Annotated[
        "int | None",
        Param(int, "width in pixels; without a height a square", low=1, metavar="PIXELS", http=""),
    ]
    seed: Annotated[
        "int | Sequence[int] | None",
        Param(
            int,
            "seed of the first image; image i uses seed + i",
            low=RANDOM,
            high=MAX_SEED,
            marks={RANDOM: "random"},
            several=True,
        ),
    ]
    method: Annotated[
        "str | Any",  # or a `methods.setting.Setting`
        Param(
            str, "decoding method, or a setting METHOD[:RELAXATION][@TREE]", "auto", group=METHOD
        ),
    ]
    guidance_scale: Annotated[
        "float | None",
        Param(
            float,
            "classifier-free guidance scale; 1 turns it off",
            low=1,
            high=100,
            marks={1: "off"},
            group=SAMPLING,
        ),
    ]
    temperature: Annotated[
        "float | None",
        Param(
            float,
            "sampling temperature",
            low=0.01,  # below, float32 would overflow on the way to what greedy says exactly
            high=10,
            zero="greedy",
            group=SAMPLING,
        ),
    ]
    top_k: Annotated[
        "int | None",
        Param(
            int,
            "sample from the K most probable tokens; 0 turns it off",
            low=0,
            high=MOST,
            marks={0: "off"},
            group=SAMPLING,
        ),
    ]
    top_p: Annotated[
        "float | None",
        Param(
            float,
            "nucleus sampling: smallest set of tokens with this probability; 1 turns it off",
            low=1e-6,  # less may be 0 in float32, which leaves no token
            high=1,
            marks={1: "off"},
            group=SAMPLING,
        ),
    ]
    batch_size: Annotated[
        "int | None",
        Param(
            int,
            "images per batch; it does not change the images (at most 8 if not set)",
            low=1,
            group="how it runs",
            http="",
        ),
    ]


def _image_params() -> dict[str, Param]:
    names = {python: name for name, python in PYTHON_NAMES.items()}
    params = {}
    for python, hint in ImageParams.__annotations__.items():
        name = names.get(python, python)
        params[name] = replace(hint.__metadata__[0], name=name)
    return params


IMAGE_PARAMS = _image_params()  # by name


def declared(name: str, default: Any) -> Any:
    """A dataclass field that is an argument of the table, with a default of its own; `check_ranges` holds it."""
    param = replace(IMAGE_PARAMS[name], default=default)
    return dataclasses.field(default=default, metadata={"param": param})


Surface = Literal["name", "python", "field"]  # whose names: of options, of Python, of HTTP


def given_params(params: Mapping[str, Any], surface: Surface) -> dict[str, Any]:
    """The arguments that were given and are not None, by their names in the table.

    Raises:
        OptionError: a number is out of range.
    """
    given = {}
    for param in IMAGE_PARAMS.values():
        value = params.get(getattr(param, surface))
        if value is None:
            continue
        if not (param.several and isinstance(value, list | tuple)):
            param.check(value)
            if param.name == "seed" and value == RANDOM:
                value = secrets.randbelow(1 << 53)  # which every reader of JSON holds exactly
        given[param.name] = plain_number(value)
    return given


def check_seed(seed: int) -> None:
    """Raise an OptionError for what is no seed of an image: a random one was drawn before."""
    replace(IMAGE_PARAMS["seed"], low=0, marks={}).check(seed)


def only(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that are fields of a dataclass."""
    names = [part.name for part in fields(kind)]
    return {name: value for name, value in given.items() if name in names}


def takes_image_params(call: F) -> F:
    """A function whose `**params` are `ImageParams`: its signature and its docstring name each of them."""
    signature = inspect.signature(call)
    own = list(signature.parameters.values())
    places = [one for one in own if one.kind is one.POSITIONAL_OR_KEYWORD]
    names = [one for one in own if one.kind is one.KEYWORD_ONLY]
    table = []
    for param in IMAGE_PARAMS.values():
        hint = ImageParams.__annotations__[param.python].__origin__
        kind = inspect.Parameter.KEYWORD_ONLY
        listed = inspect.Parameter(param.python, kind, default=param.default)
        table.append(listed.replace(annotation=getattr(hint, "__forward_arg__", hint)))
    whole = signature.replace(parameters=[*places, *table, *names])
    call.__signature__ = whole  # type: ignore[attr-defined]
    lines = [f"{param.python}: {param.about}." for param in IMAGE_PARAMS.values()]
    call.__doc__ = inspect.cleandoc(call.__doc__ or "").replace("{params}", "\n    ".join(lines))
    return call
