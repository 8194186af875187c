"""The embedded model's training, all stages at toy size: icons to codes, a target, a folder, a picture."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

ROOT = Path(__file__).parent.parent
# Two kept out of training by their names, and two that are learned in all compositions
NAMES = ("exploding head", "smiling face with halo", "bird", "fish", "rocket", "pizza")
STAGES = (
    "train_tokenizer.py --steps 2 --warm-up 1 --batch 4",
    "encode_icons.py --variants 16",
    "train_target.py --minutes 0.02 --dim 64 --layers 1 --batch 4",
    "train_target.py --minutes 0.04 --dim 64 --layers 1 --batch 4 --resume",
    "export_model.py --output model",
)


def draw_icons(file: Path) -> None:
    """Icons as `scripts/icons.py` keeps them: a disc of one colour with an eye."""
    images = []
    for number in range(len(NAMES)):
        image = Image.new("RGBA", (128, 128), (0, 0, 0, 0))
        pen = ImageDraw.Draw(image)
        pen.ellipse((8, 8 + 4 * number, 120, 120), (220, 40 + 20 * number, 60, 255))
        pen.ellipse((40, 50, 52, 62), (20, 20, 20, 255))
        images.append(np.asarray(image))
    styles = np.array(["fluent-emoji-flat"] * len(NAMES))
    np.savez(file, images=np.stack(images), names=np.array(NAMES), styles=styles)


def run(folder: Path, *command: str) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch before 2.9")
def test_all_stages_run_one_after_the_other(tmp_path: Path) -> None:
    draw_icons(tmp_path / "icons.npz")
    for stage in STAGES:
        script, *options = stage.split()
        run(tmp_path, str(ROOT / "scripts" / script), "--data-dir", ".", *options)
    assert "bird" in (tmp_path / "prompts.txt").read_text()
    what = ["--model", "model", "--prompt", "a blue bird", "--output", "bird.png"]
    run(tmp_path, "-m", "lantern_hpu.generate", *what)
    assert Image.open(tmp_path / "bird.png").size == (64, 64)
