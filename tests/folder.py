"""Folders of tests: a model with tiny random weights, in the format of the embedded one; what is made once."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file
from torch import nn

from lantern_hpu.models.config import ConditionConfig, VQConfig
from lantern_hpu.models.text.prefix import CaptionProjection, WordConditioner
from lantern_hpu.models.vq import VQModel
from tests.tiny import CONFIG, tiny_config, tiny_models

VQ = VQConfig(
    channels=8,
    multipliers=(1, 1),
    res_blocks=1,
    z_channels=8,
    code_dim=4,
    codebook_size=CONFIG.vocab_size,
    groups=4,
)
WORDS = ["apple", "blue", "cat", "on", "red"]
CAPTION_DIM = 16


def write_folder(
    folder: Path,
    seed: int = 0,
    prefix: int = CONFIG.prefix,
    codes: int = CONFIG.vocab_size,
    grid: tuple[int, int] = CONFIG.grid,
) -> Path:
    """Write the folder and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = tiny_config(prefix=prefix, vocab_size=codes, grid=grid)
    vq = replace(VQ, codebook_size=codes)
    target, drafter = tiny_models(shape, seed)
    torch.manual_seed(3)
    parts = nn.ModuleDict(
        {
            "words": WordConditioner(
                ConditionConfig("words", CAPTION_DIM, words=tuple(WORDS)), prefix
            ),
            "condition": CaptionProjection(CAPTION_DIM, CONFIG.dim, prefix),
            "target": target,
        }
    )
    files = {}
    for name, module in {"target": parts, "drafter": drafter, "vq": VQModel(vq)}.items():
        file = folder / f"{name}.safetensors"
        save_file({n: t.contiguous() for n, t in module.state_dict().items()}, file)
        files[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    config = {
        "name": str(folder),
        "files": files,
        "target": asdict(shape),
        "condition": {"kind": "words", "dim": CAPTION_DIM, "words": WORDS},
        "drafter": {"input_norm": False, "sees_pads": False},
        "vq": asdict(vq),
        "sampling": {"cfg_scale": 2.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
        "fastest": {},
    }
    (folder / "model.json").write_text(json.dumps(config))
    return folder


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that takes seconds to make: one worker makes it, and all read it."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make(unfinished := root / f"{name}.unfinished")
            unfinished.rename(folder)
    return folder


def config_file(file: Path, **keys: object) -> list[str]:
    """The option that gives these keys of a command; a JSON value of a key is one of TOML, too."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    file.write_text("\n".join(lines))
    return ["--config", str(file)]
