"""A drafter for GLM-Image: trained by the command on its own pictures, tiny, and drafting for it in another size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lantern_hpu.commands.train import main
from lantern_hpu.models.families.glm_image import GLM_IMAGE
from lantern_hpu.pipeline import LanternPipeline

pytest.importorskip("transformers.models.glm_image")


@pytest.mark.slow
def test_a_drafter_is_trained_and_drafts(
    public: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact drafting leaves greedy pictures as they are."""
    folder = str(public / "glm-image")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"{a} {b}" for a in ("red", "blue", "old") for b in "abcd"))
    with monkeypatch.context() as patch:  # pictures of a few codes behind the preview
        for name, value in {"grid": (2, 3), "prefix": 64, "prefixes": ()}.items():
            patch.setitem(GLM_IMAGE.sizes, name, value)
        options = "--steps 6 --samples 8 --batch 4 --measure-every 3 --measured 2 --lr 0.01"
        where = ["--model", folder, "--data", str(prompts), "--output", str(tmp_path / "drafter")]
        device = ["--device", "cpu", "--dtype", "float32"]
        assert main(["drafter", *where, *device, *options.split()]) == 0
    report = json.loads((tmp_path / "drafter" / "report.json").read_text())
    assert report["eagle"]["tokens_per_step"] > 1
    pipeline = LanternPipeline.from_pretrained(
        folder,
        device="cpu",
        dtype="float32",
        drafter=str(tmp_path / "drafter"),
        pictures=False,
    )
    how = {"height": 96, "width": 64, "temperature": 0.0, "output_type": "tokens"}
    drafted, plain = (
        pipeline("red a", method=method, **how)  # type: ignore[arg-type]
        for method in ("eagle", "ar")
    )
    assert (drafted.tokens == plain.tokens).all()
    assert drafted.records[0].steps < plain.records[0].steps
