"""Number formats on an NVIDIA GPU; `auto` takes the first that the card has."""

from __future__ import annotations

AMPERE = (8, 0)  # compute capability from which bfloat16 is native
DTYPES = {
    "bfloat16": "half the bytes to read a token, with float32's range",
    "float16": "half the bytes; for cards before Ampere",
    "float32": "for exact comparisons",
}


def dtypes_of(capability: tuple[int, int]) -> dict[str, str]:
    """Those that a card of this compute capability multiplies natively."""
    native = capability >= AMPERE
    return {name: why for name, why in DTYPES.items() if native or name != "bfloat16"}
