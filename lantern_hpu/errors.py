"""Errors a user can act on: each says what is wrong, why, and what to try."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from lantern_hpu.console import replace_unshown

P = ParamSpec("P")
T = TypeVar("T")

# Arguments of diffusers and transformers, by what they are called here
RENAMED = {
    "cfg_scale": "guidance_scale",
    "num_inference_steps": "method=; the number of steps follows from its window or tree",
    "use_safetensors": "leave it out: safetensors are preferred, and pickles are read without running code",
    "trust_remote_code": "leave it out: no code of a checkpoint is run",
    "device_map": "device=",
    "variant": "dtype=",
    "scheduler": "method=, such as 'eagle' or 'scd@16'",
}
# Parts of a setting that had arguments of their own, by the mark in front of them in `method`
PARTS = {"relax": ":", "tree": "@", "window": "@"}


@dataclass(frozen=True)
class Arg:
    """An argument that an error names; each surface spells it in its own way.

    Attributes:
        name: of a field of a request, or of an option, with underscores: `cfg_scale`.
        value: that it has, or should have; None names the argument alone, and True is a switch.
        python: its name in Python, if it has another one there.
    """

    name: str
    value: object = None
    python: str = ""

    def __str__(self) -> str:
        return as_keyword(self)


class Words(str):
    """A text that names arguments: a string in Python's words, which other surfaces spell in theirs.

    Its parts are joined by spaces, but for one that starts with punctuation.
    """

    parts: tuple[str | Arg, ...]

    def __new__(cls, *parts: str | Arg) -> Words:
        self = super().__new__(cls, joined(parts, as_keyword))
        self.parts = parts
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Words, self.parts  # a pickle for another process keeps them

    @property
    def args(self) -> list[Arg]:
        """The arguments that it names, in their order."""
        nested = [part.args if isinstance(part, Words) else [part] for part in self.parts]
        return [arg for args in nested for arg in args if isinstance(arg, Arg)]


def words(*parts: str | Arg) -> Words:
    """`words(Arg("height"), "and", Arg("width"), "for all")`."""
    return Words(*parts)


def joined(parts: Iterable[str | Arg], spell: Callable[[Arg], str]) -> str:
    texts = [spelled(part, spell) for part in parts]
    return "".join(
        text if not index or text[:1] in ",;:)" else f" {text}" for index, text in enumerate(texts)
    )


def spelled(text: str | Arg, spell: Callable[[Arg], str]) -> str:
    """A text in the words of a surface, which writes an argument by `spell`."""
    if isinstance(text, Arg):
        return spell(text)
    return joined(text.parts, spell) if isinstance(text, Words) else text


def as_keyword(arg: Arg) -> str:
    """In Python: `guidance_scale=0`, `method="scd@8"`."""
    name = arg.python or arg.name
    if arg.value is None:
        return name
    value = f'"{arg.value}"' if isinstance(arg.value, str) else str(arg.value)
    return f"{name}={value}"


def as_option(arg: Arg) -> str:
    """On a command line: `--cfg-scale 0`, `--method scd@8`."""
    name = "--" + arg.name.replace("_", "-")
    if arg.value is None or arg.value is True:
        return name
    value = str(arg.value)
    return f'{name} "{value}"' if " " in value else f"{name} {value}"


def shell(command: str, *rest: str | Arg) -> str:
    """A command to type, the same on every surface: `shell("tune", Arg("method", "scd"))`."""
    return joined([f"lantern-hpu {command}", *rest], as_option)


class LanternError(Exception):
    """Base of every error this package raises on purpose; commands print it and exit with code 2.

    Its text names arguments as data, so that the command line, Python and HTTP each use their own words: `str` has
    Python's, `text(as_option)` the command line's.
    """

    exit_code = 2  # of a command

    def __init__(
        self,
        what: str | Arg,
        why: str | Arg = "",
        hint: str | Arg = "",
        field: str = "",
    ) -> None:
        """`field` is the argument that is refused, if it is not the first that `what` names."""
        self.what, self.why, self.hint = words(what), words(why), words(hint)
        self.field = field or next((arg.name for arg in self.what.args), "")
        super().__init__(what)

    @property
    def reason(self) -> Words:
        """Its text without the hint."""
        return words(self.what, ":", self.why) if self.why else self.what

    def text(self, spell: Callable[[Arg], str], knows: Callable[[str], bool] | None = None) -> str:
        """In the words of a surface.

        Args:
            spell: how it writes an argument.
            knows: whether it has an argument of a name; a hint that names another one is left out.
        """
        text = spelled(self.reason, spell)
        unknown = knows and not all(knows(arg.name) for arg in self.hint.args)
        return text if unknown or not self.hint else f"{text}\n  try: {spelled(self.hint, spell)}"

    def __str__(self) -> str:
        return self.text(as_keyword)


class OptionError(LanternError):
    """An option, prompt or setting is out of range or contradicts another one."""


class TreeError(LanternError):
    """A draft tree is malformed or asks for more than the drafter draws."""


class WeightsError(LanternError):
    """A model's files are missing, damaged or do not fit each other."""


class DeviceError(LanternError):
    """A device or a graph mode is unknown or cannot be used here."""


class CaptureError(LanternError):
    """A function breaks a rule that graph capture needs, or would have to be captured again."""


class OutputError(LanternError):
    """A result cannot be written where the user asked for it."""


class TrainingError(LanternError):
    """A training run cannot go on."""


class InvalidImageError(LanternError):
    """Images were computed with NaN or infinite numbers.

    Attributes:
        result: the `GenerationResult` of the other images; None where an error is not of a run.
        images: the invalid pictures of PIL, where there are some.
    """

    exit_code = 1
    result: Any = None
    images: Sequence[Any] = ()

    @classmethod
    def of_pixels(cls, images: Sequence[Any]) -> InvalidImageError:
        error = cls("an image is invalid", "its pixels are NaN or infinite", "other weights")
        error.images = images
        return error


def exit_code(command: Callable[[], int | None], spell: Callable[[Arg], str] = as_option) -> int:
    """Run a command; the code it returns, 0 if none, or that of a LanternError, 2 of most, after printing what it says.

    A file that the system refuses, for example because its name is too long, is an error of the user's as well. What a
    console cannot show is replaced.
    """
    replace_unshown(sys.stdout)
    replace_unshown(sys.stderr)
    try:
        return command() or 0
    except LanternError as error:
        print(f"error: {error.text(spell)}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        print(f"error: cannot use {error.filename}: {error.strerror}", file=sys.stderr)
        return 2


@contextmanager
def needing(package: str, purpose: str, extra: str = "models") -> Iterator[None]:
    """Around imports of an optional package that may be missing, or not load next to a torchvision of another torch."""
    try:
        yield
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        misfit = torchvision_misfit()
        if isinstance(error, ImportError) and (error.name or not misfit):
            why, hint = f"{purpose} ({error})", f'pip install "lantern-hpu[{extra}]"'
            raise OptionError(f"{package} is not installed", why, hint) from error
        hint = "pip uninstall torchvision" if misfit else f'pip install "lantern-hpu[{extra}]"'
        why = f"{purpose} ({misfit or error})"
        raise OptionError(f"{package} does not load", why, hint) from error


def torchvision_misfit() -> str:
    """What is wrong with a torchvision that was built for another torch; empty if nothing is.

    transformers imports it wherever it is there, and fails with "operator torchvision::nms does not exist".
    """
    try:
        asked = importlib.metadata.requires("torchvision") or []
        torch, vision = map(importlib.metadata.version, ("torch", "torchvision"))
    except importlib.metadata.PackageNotFoundError:
        return ""
    wanted = next((m[1] for line in asked if (m := re.match(r"torch\s*\(?==([\d.]+)", line))), "")
    if not wanted or torch.partition("+")[0] == wanted:
        return ""
    return f"torchvision {vision} is built for torch {wanted}, and torch is {torch}"


def choices(names: Iterable[str], asked: object = "") -> str:
    """The allowed values of an option, for the end of an error message; first the one that is like what was asked."""
    known = list(names)
    allowed = "one of " + ", ".join(known)
    close = difflib.get_close_matches(str(asked), known, 1, 0.6)
    return f"{close[0]}, or {allowed}" if close else allowed


def part_of_setting(given: Mapping[str, Any]) -> OptionError | None:
    """Why parts of a setting cannot be given by names of their own, with the form that holds them; None without any."""
    parts = {name: str(given[name])[:200] for name in PARTS if given.get(name) is not None}
    if not parts:
        return None
    method = given.get("method") or ("scd" if "window" in parts else "auto")
    form = str(method) + "".join(f"{PARTS[name]}{text}" for name, text in parts.items())
    name, text = next(iter(parts.items()))
    what = words(Arg(name, text), "is a part of", Arg("method"))
    return OptionError(what, "a setting has one written form", Arg("method", form), name)


def nearest_keyword(function: Callable[P, T]) -> Callable[P, T]:
    """A function of the Python API: unknown keyword arguments are refused with the name that was probably meant."""
    parameters = inspect.signature(function).parameters
    known = [name for name in parameters if name not in ("self", "cls")]
    places = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters.values())

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if len(args) > places:
            what = f"{function.__name__}() takes {args[places]!r:.60} by its name alone"
            raise OptionError(what, hint=" or ".join(f"{name}=..." for name in known[1:4]))
        for name in kwargs:
            if name not in known:
                if name in PARTS and (error := part_of_setting(kwargs)):
                    raise error
                close = difflib.get_close_matches(name, known, 1, 0.5) or [", ".join(known)]
                what = f"{function.__name__}() has no argument {name!r}"
                raise OptionError(what, hint=RENAMED.get(name, close[0]))
        return function(*args, **kwargs)

    return checked


def require(holds: bool, name: str | Words, value: object, allowed: str) -> None:
    """Raise an OptionError that names an argument, its value and the allowed ones."""
    if not holds:
        argument = name if isinstance(name, Words) else Arg(name)
        raise OptionError(words(argument, f"is {value}"), f"allowed: {allowed}")


def listed(text: str, name: str, what: str = "", allowed: Collection[str] = ()) -> list[str]:
    """The parts of a comma-separated argument, each a `what`; any are allowed if none are named."""
    arg = Arg(name)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise OptionError(words(arg, "is empty"))
    for part in parts:
        if allowed and part not in allowed:
            raise OptionError(f"unknown {what} {part!r}", arg, choices(allowed, part), arg.name)
        if parts.count(part) > 1:
            raise OptionError(words(arg, f"names {part} twice"), "each is taken once")
    return parts
