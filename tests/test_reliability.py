"""A short soak of the server, and a few kills; `docs/reliability.md` has the figures of longer ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.measure.batches import table
from scripts.measure.hostile import CLIENTS
from scripts.measure.kills import COMMANDS, kill_often
from scripts.measure.load import fair, soak

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
    """All kinds of hostile clients; those that read nothing are not waited for until they are dropped."""
    found = soak(str(model), "ar,scd@4", 4, 120, patience=15)
    assert found["answers_of_another_shape"] == 0 and found["metrics_add_up"]
    assert found["recompiles_after_readiness"] == found["images_that_differ"] == 0
    assert not [status for status in found["answers"] if status.startswith("5")]
    assert found["answers"]["200"] >= 70 and found["images_compared"] > 70
    assert set(found["hostile"]) == {client.__name__ for client in CLIENTS}
    dropped, patient = found["connections_dropped"], found["hostile"]["read_nothing"]
    assert dropped >= found["connections_to_drop"] - patient
    before, _, after = found["held"].values()
    assert after["descriptors"] <= before["descriptors"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["generate", "convert", "evaluate", "download", "download-cache"])
def test_a_killed_command_loses_nothing(model: Path, name: str) -> None:
    times = 1 if name == "evaluate" else 2  # it takes the longest
    assert kill_often(str(model), times, [name], 1)["found"] == {f"{name}: held": times}


@pytest.mark.slow
def test_two_methods_have_an_equal_share_of_the_processor(model: Path) -> None:
    found = fair(str(model), "ar,scd@4", 2, 6.0)
    assert set(found["times_an_equal_share"]) == {"ar", "scd"}
    assert max(found["times_an_equal_share"].values()) <= 1.3, found
