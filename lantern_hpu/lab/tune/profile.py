"""Acceptance counts that an earlier run left in its report. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from lantern_hpu.decode.child_counts import ChildCounts
from lantern_hpu.errors import OptionError
from lantern_hpu.files import parse_json
from lantern_hpu.tree import tuned_trees


def read_profile(file: Path) -> tuple[ChildCounts, tuned_trees.Situation]:
    """The counts of an earlier run, from its report, and what they hold for.

    Raises:
        OptionError: unreadable, or without counts.
    """
    try:
        profile = parse_json(file.read_text(encoding="utf-8"))["profile"]
        return ChildCounts.from_json(profile), dict(profile["situation"])
    except OSError as error:
        raise OptionError(f"cannot read {file}", str(error)) from error
    except (ValueError, KeyError, TypeError) as error:
        why = "expected the --report of an earlier run"
        raise OptionError(f"{file} holds no profile", why) from error


def check_profile(
    situation: tuned_trees.Situation, here: tuned_trees.Situation, file: Path
) -> None:
    """Raise an OptionError unless a profile is of this model, drafter and method."""
    for name in ("target", "drafter", "method"):
        if situation.get(name) != here[name]:
            raise OptionError(f"the profile in {file} cannot be used", f"it is of another {name}")
