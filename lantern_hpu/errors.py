"""Errors a user can act on: each says what is wrong, why, and what to try."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager


class LanternError(Exception):
    """Base of every error this package raises on purpose; commands print it and exit with code 2."""

    def __init__(self, what: str, why: str = "", hint: str = "") -> None:
        self.what, self.why, self.hint = what, why, hint
        super().__init__(what)

    def __str__(self) -> str:
        text = self.what if not self.why else f"{self.what}: {self.why}"
        return text if not self.hint else f"{text}\n  try: {self.hint}"


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


def exit_code(command: Callable[[], object]) -> int:
    """Run a command; 0, or 2 after printing what a LanternError has to say."""
    try:
        command()
    except LanternError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def needing(package: str, purpose: str, extra: str = "models") -> Iterator[None]:
    """Around imports of an optional package: where they fail, say what it does here and which extra has it.

    Raises:
        OptionError: instead of an ImportError.
    """
    try:
        yield
    except ImportError as error:
        why, hint = f"{purpose} ({error})", f'pip install -e ".[{extra}]"'
        raise OptionError(f"{package} is not installed", why, hint) from error


def choices(names: Iterable[str]) -> str:
    """The allowed values of an option, for the end of an error message."""
    return "one of " + ", ".join(names)


def require(holds: bool, name: str, value: object, allowed: str) -> None:
    """Raise an OptionError that names the option, its value and the allowed ones."""
    if not holds:
        raise OptionError(f"{name} is {value}", f"allowed: {allowed}")


def listed(text: str, option: str, what: str = "", allowed: Collection[str] = ()) -> list[str]:
    """The parts of a comma-separated option.

    Args:
        what: each of them is. allowed: anything, if empty.

    Raises:
        OptionError: it is empty, or one part is unknown or there twice.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise OptionError(f"{option} is empty")
    for part in parts:
        if allowed and part not in allowed:
            raise OptionError(f"unknown {what} {part!r}", option, choices(allowed))
        if parts.count(part) > 1:
            raise OptionError(f"{option} names {part} twice", "each row is measured once")
    return parts
