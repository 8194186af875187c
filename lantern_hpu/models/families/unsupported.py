"""Relatives of the known families, which are not drawn with here: refused by name, not by a missing tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lantern_hpu.errors import WeightsError
from lantern_hpu.models.families.base import called
from lantern_hpu.models.files.checkpoint import Checkpoint
from lantern_hpu.models.files.names import Parts

CHAMELEON_TOKENS = 65536


@dataclass(frozen=True)
class Unsupported:
    """One relative of a known family.

    Attributes:
        is_it: by its tensors and its names. why: it is not drawn with. instead: what is.
    """

    name: str
    is_it: Callable[[Checkpoint, str], bool]
    why: str
    instead: str


def holds(checkpoint: Checkpoint, *parts: str) -> bool:
    """Whether some tensor's name has one of these in it."""
    return any(part in name for name in checkpoint.shapes for part in parts)


def of_another_chameleon(checkpoint: Checkpoint) -> bool:
    """Whether it is like Chameleon, with another vocabulary."""
    table = checkpoint.shapes.get("model.embed_tokens.weight")
    normed = holds(checkpoint, "self_attn.q_norm.")
    return normed and table is not None and table[0] != CHAMELEON_TOKENS


UNSUPPORTED = (
    Unsupported(
        "JanusFlow",
        lambda checkpoint, said: holds(checkpoint, "vision_gen_enc", "vision_gen_dec"),
        "it draws by rectified flow, not token by token",
        "janus-pro-1b",
    ),
    # Its tensors have the names and shapes of Janus-Pro-1B's, so that its name alone gives it away.
    Unsupported(
        "Janus 1.3B",
        lambda checkpoint, said: "janus-1.3b" in said,
        "it is the model before Janus-Pro, and was not held to its authors' code here",
        "janus-pro-1b",
    ),
    # As with Janus 1.3B: tensors of the same names and shapes as Emu3-Gen's.
    Unsupported(
        "Emu3-Chat or Emu3-Stage1",
        lambda checkpoint, said: "emu3-chat" in said or "emu3-stage1" in said,
        "it was not taught to draw 720 x 720 pixels",
        "emu3-gen",
    ),
    Unsupported(
        "Lumina-mGPT 2.0",
        lambda checkpoint, said: "lumina-mgpt-2" in said or of_another_chameleon(checkpoint),
        "it has a vocabulary and an image tokenizer of its own",
        "lumina-mgpt-7b-768",
    ),
)


def check_supported(checkpoint: Checkpoint, about: dict[str, Any], parts: Parts) -> None:
    """Raise a WeightsError for a relative."""
    said = called(about, parts)
    for model in UNSUPPORTED:
        if model.is_it(checkpoint, said):
            what = f"{checkpoint.path} is {model.name}"
            raise WeightsError(what, model.why, f"--model {model.instead}")
