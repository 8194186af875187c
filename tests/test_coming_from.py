"""The page for people who know diffusers, transformers or vLLM: what its right columns say is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lantern_hpu import LanternPipeline

PAGE = Path(__file__).parent.parent / "docs" / "guides" / "coming-from.md"
ROWS = re.findall(r"^\| (?!here|---)(.+) \| (.+) \|$", PAGE.read_text("utf-8"), re.M)
RIGHT = [code for _, here in ROWS for code in re.findall(r"`([^`]+)`", here)]
PYTHON = [code for code in RIGHT if "pipe" in code.lower() and not code.startswith("lantern-hpu")]
ABSENT = ('"cuda"', '"hpu"')  # devices that a machine may lack


def test_the_page_has_rows_of_each_library() -> None:
    assert len(ROWS) > 30 and len(PYTHON) > 25
    assert sum(code.startswith("lantern-hpu") for code in RIGHT) >= 6  # parsed by test_pages.py


@pytest.mark.parametrize("code", dict.fromkeys(PYTHON))
def test_python_of_the_page_runs(code: str, pipeline: LanternPipeline, tmp_path: Path) -> None:
    if any(device in code for device in ABSENT):
        pytest.skip("another device")
    name = pipeline.model.source
    names: dict[str, Any] = {"pipe": pipeline, "torch": torch, "folder": tmp_path / "folder"}
    names |= {"LanternPipeline": LanternPipeline, "name": name, "drafter": name}
    if "load_drafter" in code:
        assert callable(pipeline.load_drafter)  # see test_train.py
        return
    exec(code, names | {"f": lambda pipe, step, tokens, kwargs: None})
