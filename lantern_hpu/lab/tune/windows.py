"""Which widths of a window are drawn with, to keep the one with the least time a token. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence

from lantern_hpu.methods.table import METHODS
from lantern_hpu.tree import Window

WIDTHS = (8, 16, 32, 64)
# On a device that has little arithmetic to spare, as processors
SMALL_WIDTHS = (2, 4, 8, 16)


def measured_windows(method: str, tokens: int, widths: Sequence[int] = WIDTHS) -> list[Window]:
    """Those that are measured for images of so many tokens: the widths that fit, or the longest that does."""
    rule, most = METHODS[method].rule, tokens - 1
    assert rule is not None
    fitting = [width for width in widths if width <= most] or [most]
    return [Window.of(rule, width) for width in fitting]
