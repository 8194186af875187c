"""Draw an image again: its PNG file says with which weights and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lantern_hpu.errors import LanternError, OptionError, WeightsError
from lantern_hpu.methods.request import Sampling
from lantern_hpu.methods.setting import Resolved
from lantern_hpu.results.images import read_png


def other_weights(
    file: Path, model: str, weights: dict[str, str], others: Sequence[str]
) -> WeightsError:
    """Why an image drawn with `weights` cannot be drawn again with a model of which `others` are different."""
    data = read_png(file)
    width, height = data["size"]
    drawn = f"lantern_hpu {data['version']} drew it at {width} x {height} pixels"
    marks = ", ".join(f"{name} {str(weights[name])[:8]}" for name in others)
    why = f"{drawn}, with other weights than {model} has now ({marks})"
    anew = f"--prompt and --seed {data['seed']} anew"
    hint = f"that version, --model with the weights that drew it, or {anew}: another image"
    if all("drafter" in name for name in others):
        hint = "--drafter with the folder that was used"
    elif all(name.startswith("vq") for name in others):
        hint = f"that version, or {anew}: the same tokens, other pixels"
    return WeightsError(f"{file} cannot be drawn again", why, hint)


def settings_again(
    file: Path, known: dict[str, Any], model: str, weights: Mapping[str, str]
) -> tuple[Resolved, Sampling]:
    """What an image was drawn with, to draw it again.

    Args:
        known: what `read_png` found. model: its name for messages. weights: of the files it has.

    Raises:
        WeightsError: the image was drawn with other weights.
        OptionError: another version drew it, or its settings were changed.
    """
    try:
        setting, sampling = Resolved.read(known), Sampling(**known["sampling"])
        others = [name for name, mark in known["weights"].items() if mark != weights.get(name)]
    except (LanternError, KeyError, ValueError, TypeError, AttributeError) as error:
        what = f"{file} cannot be drawn again"
        raise OptionError(what, "another version of this package or an editor wrote it") from error
    if not setting.needs_drafter:
        others = [name for name in others if "drafter" not in name]
    if others:
        raise other_weights(file, model, known["weights"], others)
    return setting, sampling
