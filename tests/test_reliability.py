"""A short soak of the server, and a few kills; `docs/reliability.md` has the figures of longer ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.kills import kill_often
from scripts.load import soak

pytestmark = pytest.mark.slow


def test_a_soak_leaves_the_server_as_it_was(model: Path) -> None:
    found = soak(str(model), "ar", 4, 120)
    assert found["answers_of_another_shape"] == 0 and found["metrics_add_up"]
    assert found["recompiles_after_readiness"] == 0
    assert not [status for status in found["answers"] if status.startswith("5")]
    assert found["answers"]["200"] >= 80 and found["images"] > 80


@pytest.mark.parametrize("name", ["generate", "convert", "evaluate", "download", "download-cache"])
def test_a_killed_command_loses_nothing(model: Path, name: str) -> None:
    assert kill_often(str(model), 2, [name], 1)["found"] == {f"{name}: held": 2}
