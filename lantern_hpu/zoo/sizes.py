"""Known models for their sizes alone, by short names. Needs no torch."""

from __future__ import annotations

from lantern_hpu.errors import OptionError, choices
from lantern_hpu.models.files.parts import Given
from lantern_hpu.zoo import registry
from lantern_hpu.zoo.registry import KnownModel

LLAMAGEN = {
    "llamagen-b": "llamagen-c2i-b-256",
    "llamagen-l": "llamagen-c2i-l-256",
    "llamagen-xl": "llamagen-t2i-256",
    "llamagen-xxl": "llamagen-c2i-xxl-384",
    "llamagen-3b": "llamagen-c2i-3b-384",
}


def stretch_sizes(name: str, given: Given = Given()) -> KnownModel:
    """The known model that `--stretch` means.

    Args:
        given: parts in place of the model's own.

    Raises:
        OptionError: there is none of that name, it is of another family, or a drafter is given that would have to be
            widened too.
    """
    result = registry.find_model_by_name(LLAMAGEN.get(name, name))
    if result is None or not result.family.startswith("llamagen"):
        why = (
            "no sizes are known of it" if result is None else f"it is of the family {result.family}"
        )
        raise OptionError(f"--stretch is {name!r}", why, choices(LLAMAGEN))
    if given.drafter is not None:
        why = "the model's own drafter is widened with it"
        raise OptionError("--stretch and --drafter exclude each other", why, "leave --drafter out")
    return result
