"""What hypothesis makes up: values of JSON, and bodies that look like requests. Settings of its runs."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

# Each example takes as long as it takes, and nothing is kept between runs, so that they are alike.
HEALTH = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
SHARED: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": "HYPOTHESIS_SEED" not in os.environ,
    "suppress_health_check": HEALTH,
}


def examples(count: int) -> settings:
    """So many of them."""
    return settings(max_examples=count, **SHARED)


any_text = st.text(st.characters(exclude_categories=()), max_size=20)  # lone surrogates as well
numbers = st.integers() | st.floats() | st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400])
leaves = st.none() | st.booleans() | numbers | any_text
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
    max_leaves=6,
)
