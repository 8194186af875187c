"""Which of many like cases run each time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """Parameters of a test: `quick` ones as they are, the others with the marker `slow`."""

    def slow(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=pytest.mark.slow)

    return [case if case in quick else slow(case) for case in cases]
