"""A short soak of the server, and a few kills; `docs/reliability.md` has the figures of longer ones."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from lantern_hpu.results.tables import markdown
from tests.hostile import CLIENTS
from tests.kills import COMMANDS, HELD, kill_often
from tests.soak import soak

ROOT = Path(__file__).parent.parent


def test_the_page_names_what_is_killed_and_the_night_runs_what_it_says() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith("| SIGKILL"))
    counts = {name: int(count) for name, count in re.findall(r"`([a-z-]+)` (\d+)", row)}
    assert set(counts) == set(COMMANDS) and sum(counts.values()) >= 20
    night = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert "pip-audit --no-deps --disable-pip -r constraints.txt" in night
    for ran in ("tests/test_ray.py", "tests/test_properties.py tests/test_reliability.py"):
        assert ran in night


def table(rows: list[dict[str, Any]]) -> str:
    """By layout and method: images, the ways of drawing them, and in how many drawings something differs."""
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault((row["layout"], row["method"]), []).append(row)
    lines = []
    for case, ways in cases.items():
        names = ("tokens_differ", "pixels_differ", "bits_differ")
        differ = [str(sum(row[name] or 0 for row in ways)) for name in names]
        images = " to ".join(map(str, sorted({row["images"] for row in ways})))
        lines.append([*case, images, ", ".join(row["way"] for row in ways), *differ])
    return markdown(["layout", "method", "images", "ways", "tokens", "pixels", "bits"], lines)


def test_the_page_counts_the_images_that_were_compared() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    results = ROOT / "benchmarks" / "results"
    for file in ("batches.json", "batches-workers.json", "batches-threads.json"):
        record = json.loads((results / file).read_text())
        for row in table(record["rows"]).splitlines()[2:]:
            assert row in page, f"{file}: {row}"
    rows = json.loads((results / "batches.json").read_text())["rows"]
    images = {(row["layout"], row["method"]): row["images"] for row in rows}
    assert f"**{sum(images.values()):,} images**" in page


@pytest.mark.slow
def test_a_soak_leaves_the_server_as_it_was(model: Path) -> None:
    """All kinds of hostile clients; in a short soak those that read nothing are not waited for until they are dropped.

    `SOAK_MINUTES=20` asks the embedded model for so long.
    """
    if minutes := float(os.environ.get("SOAK_MINUTES", 0)):
        found = soak("builtin", "ar,scd@16", 8, 0, minutes, patience=75)
    else:
        found = soak(str(model), "ar,scd@4", 4, 120, 0, patience=15)
    asked, hostile = found.asked, found.named("client ")
    assert found.adds_up() and asked["shapeless"] == 0
    assert found.recompiled == asked["differ"] == 0
    assert not [name for name in asked if re.fullmatch("5..", name) and not minutes]
    assert asked["200"] >= 70 and sum(found.named("image ").values()) > 70
    assert set(hostile) == {client.__name__ for client in CLIENTS}
    assert asked["dropped"] >= asked["to_drop"] - hostile["read_nothing"]
    before, quarter, after = found.held
    assert after.descriptors <= before.descriptors
    assert not minutes or after.memory < 1.02 * quarter.memory


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_loses_nothing(model: Path, name: str) -> None:
    """`KILLS=5` kills each as often; the two that run longest are killed each night."""
    times = int(os.environ.get("KILLS", 0 if name in ("train", "evaluate") else 1))
    if not times:
        pytest.skip("asked for by KILLS=1")
    assert kill_often(name, str(model), times, 1) == {HELD: times}
