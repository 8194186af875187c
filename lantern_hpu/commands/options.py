"""Options that several commands have: how they are declared, and what they mean. Needs no torch."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_origin

from lantern_hpu.backends import BACKENDS, DeviceOptions
from lantern_hpu.commands.config import PREFIX, words_of
from lantern_hpu.errors import Arg, as_option, listed, part_of_setting
from lantern_hpu.fields import IMAGE_PARAMS, Param, argument_name, params_of
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.methods.relaxation import PRESETS
from lantern_hpu.methods.setting import (
    AUTO,
    DEFAULT_WINDOW,
    FORM,
    METHODS,
    Setting,
)
from lantern_hpu.tree import DYNAMIC, NAMED

PROCESSOR = ("layout", "threads")  # measured there unless given
T = TypeVar("T")
# Options of other programs, by what they are here
RENAMED_OPTIONS = {
    "--steps": "--method; the number of steps follows from its window or tree",
    "--num-inference-steps": "--method; the number of steps follows from its window or tree",
    "--guidance-scale": "--cfg-scale",
    "--overwrite": "--force",
    "--class-label": "--prompt",
    "--images": "--num-images",
    "--methods": "--method",
    "--rows": "--method",
    "--settings": "--method",
    "--trees": "--method",
}
Group = argparse._ActionsContainer  # a parser, or a group of one


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with what was probably meant, as all errors of the commands are.

    Attributes:
        keys: options that only a file or a variable gives, by the name that a command line would have.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.keys: dict[str, str] = {}
        about = "TOML file with values of options, by their names with underscores"
        self.add_argument("--config", metavar="FILE", help=about)

    def only_keys(self, *names: str) -> None:
        """Take options off the command line and its help: `--config` and variables give them."""
        self.keys = {"--" + name.replace("_", "-"): name for name in names}
        for action in self._actions:
            if action.option_strings and action.option_strings[-1] in self.keys:
                action.help = argparse.SUPPRESS

    def spell(self, arg: Arg) -> str:
        """An argument as this command takes it: an option, or a key."""
        if arg.name in self.keys.values():
            return arg.name if arg.value is None else f"{arg.name} = {arg.value}"
        return as_option(arg)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = [*(sys.argv[1:] if args is None else args)]
        for key in (
            self.keys[word] for one in given if (word := one.partition("=")[0]) in self.keys
        ):
            hint = f"{key} in the file of --config, or {PREFIX}{key.upper()}"
            self.exit(
                2, f"error: {as_option(Arg(key))} is no option of the command line\n  try: {hint}\n"
            )
        if self._subparsers is None:
            try:
                given = words_of(self, self.before_program(given)) + given
            except ValueError as error:
                self.exit(2, f"error: {error}\n")
        found, unknown = super().parse_known_args(given, namespace)
        if "config" in found:
            del found.config  # it has been read
        return found, unknown

    def before_program(self, given: list[str]) -> list[str]:
        """The words before a program that the command runs, which has words of its own."""
        rests = [action.dest for action in self._actions if action.nargs == argparse.REMAINDER]
        if not rests:
            return given
        found, _ = super().parse_known_args(given)
        return given[: len(given) - sum(len(getattr(found, name) or ()) for name in rests)]

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        given, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return given
        if error := part_of_setting(vars(given) | values_of(unknown)):
            self.exit(2, f"error: {error.text(as_option)}\n")
        words = list(takewhile(lambda word: not word.startswith("-"), unknown)) or unknown[:1]
        word = " ".join(words)
        self.error(f"unknown option {word}", self.nearest(word))

    def error(self, message: str, hint: str = "") -> NoReturn:
        self.exit(2, f"error: {message}\n  try: {hint or f'{self.prog} --help'}\n")

    def nearest(self, word: str) -> str:
        """The option that a word was probably meant as; empty if none is like it."""
        known, name = self._option_string_actions, word.partition("=")[0]
        if not word.startswith("-"):
            taken = next((o for o in ("--prompt", "--model") if o in known), "")
            return f"{taken} {shlex.quote(word)}" if taken else ""
        if renamed := RENAMED_OPTIONS.get(name):
            return renamed
        return next(iter(difflib.get_close_matches(name, known, 1, 0.6)), "")


def values_of(words: Sequence[str]) -> dict[str, str]:
    """What follows each option that a parser does not know, by the option's name without dashes."""
    following = [*words[1:], ""]
    pairs = [word.partition("=") for word in words]
    return {
        name[2:]: value if equals else after
        for (name, equals, value), after in zip(pairs, following, strict=True)
        if name.startswith("--")
    }


def add_fields(group: Group, kind: type[Any], *names: str, **helps: str) -> None:
    """Declare the fields of a dataclass as options, with what `fields.option` says of them.

    A command's options are a dataclass whose fields are made by `fields.option(default, help, low=, high=)`:

        add_fields(parser, TuneOptions)  # --method, --batch-size, ...: type, default and range in the help
        from_args(TuneOptions, args)  # what was given; the dataclass fills in and checks the rest

    What was not given is None in `args`, so that `given_fields` can leave it to the dataclass. A bool is a switch.

    Args:
        names: of the fields; all that have a help if none are given.
        helps: by an argument's name, in place of its own help, where that is known to the command alone.
    """
    for param in params_of(kind, *names):
        add_param(group, param, helps.get(param.name, ""))


def add_image_params(group: Group, *names: str) -> None:
    """Declare arguments of an image as options, by their names in the table."""
    for name in names:
        add_param(group, IMAGE_PARAMS[name], LONG_HELPS.get(name, ""))


def add_param(group: Group, param: Param, help: str = "") -> None:
    """Declare an argument as an option."""
    what = replace(param, help=help or param.help).about
    if param.kind is bool:
        group.add_argument(param.option, action="store_true", default=None, help=what)
        return
    value = next(
        iter(get_args(param.kind)), param.kind
    )  # of `int | None` and `tuple[int, ...]`: int
    more: dict[str, Any] = {}
    if value in (int, float):
        more["type"] = value
    if value is Path:
        more["type"] = file_path
    required = param.default is MISSING
    if get_origin(param.kind) is tuple:
        more["nargs"] = "+" if required else "*"
    elif param.positional and not required:
        more["nargs"] = "?"
    if required and not param.positional:
        more["required"] = True
    name = param.name if param.positional else param.option
    group.add_argument(name, metavar=param.metavar, help=what, **more)


def file_path(text: str) -> Path:
    """A path of the command line, for `type=`; an empty one would be the folder that one is in."""
    return Path(output_path(text))


def output_path(text: str) -> str:
    """The same as it was written: a slash at its end means a folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty")
    return os.path.expanduser(text)


def given_fields(kind: type[Any], args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a dataclass that a command has options for and that were given."""
    given = {part.name: getattr(args, argument_name(part), None) for part in fields(kind)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
        if value is not None
    }


def from_args(kind: type[T], args: argparse.Namespace, **made: Any) -> T:
    """A dataclass of what was given, and what the command made of it."""
    return kind(**given_fields(kind, args) | made)


# ------------------------------------------------------------------------------------ model and device


def add_device_options(group: Group, graphs: bool = True) -> None:
    """`--device`, `--dtype`, and `--graphs` unless a command settles it."""
    names = ["device", "dtype", *(["graphs"] if graphs else [])]
    helps = {"device": f"auto, {', '.join(BACKENDS)}", "graphs": f"auto, {', '.join(RUNNERS)}"}
    add_fields(group, DeviceOptions, *names, **helps)


def add_running_options(group: Group) -> None:
    """What else decides how a model runs."""
    add_fields(group, DeviceOptions, "keep_text", "kernels", *PROCESSOR, "quantize")


# ------------------------------------------------------------------------------------ method and sampling

_ABOUT_METHODS = "; ".join(f"{name}: {method.about}" for name, method in METHODS.items())
LONG_HELPS = {  # with the names that are known
    "method": "METHOD[:RELAXATION][@TREE]. auto: the fastest lossless method measured on the device; "
    f"{_ABOUT_METHODS}. "
    f"RELAXATION: {', '.join(PRESETS)}, or values: lambda=5:k=10, delta=0.2:k=1000, tv=0.1:budget=10, "
    "omega=2:nu=0.2:mu=0, distance=0.5:ranks=7:gap=0.15, residual=official, verify=token (the method's own). "
    f"TREE of eagle and lantern++: {', '.join(NAMED)}, a .json file, or {AUTO}: the one that `lantern-hpu tune` found "
    f"for this model and device (each device has its own default); of eagle2 and lantern {DYNAMIC}, or "
    f"{DYNAMIC}:KxExN for top-k K, E expansions and N drafts ({DYNAMIC}:10x4x58); of a window method W drafts a step "
    f"({DEFAULT_WINDOW}; on Gaudi 24, on processors 2 or 5), W:KxD for K candidates at each of the first D "
    "positions (sjd-pac; 3x3), or W:commit=C to accept the first C drafts in every step: a fixed number of steps, "
    "lossless only for C = 1. docs/methods.md",
}


def add_method_options(group: Group, several: str = "") -> None:
    """`--method`; of a command that takes `several`, which are those unless given."""
    about = f"comma-separated, {FORM} ({several})" if several else LONG_HELPS["method"]
    add_param(group, replace(IMAGE_PARAMS["method"], default=None), about)


def names(text: str | None, option: str) -> tuple[str, ...]:
    """A comma-separated option; nothing if it was not given."""
    return () if text is None else tuple(listed(text, option))


def settings_of(args: argparse.Namespace, usual: str) -> list[Setting]:
    """The settings of `--method`, else the usual ones."""
    return [Setting.parse(text) for text in listed(args.method or usual, "method")]
