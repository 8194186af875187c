"""Images drawn by the trained target, without the package's front door: for measuring."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm
from train_target import TextToImage

from lantern_hpu.backends import get_backend
from lantern_hpu.config import Request, Sampling
from lantern_hpu.engine import Engine
from lantern_hpu.models.builtin import transformer_config
from lantern_hpu.plan import Plan
from lantern_hpu.state import Shapes
from lantern_hpu.tree import DraftTree

BATCH = 16  # images drawn together


def load_target(data_dir: Path) -> TextToImage:
    """The trained target, ready to draw."""
    config = transformer_config(json.loads((data_dir / "target.json").read_text()))
    model = TextToImage(config, json.loads((data_dir / "words.json").read_text()))
    model.load_state_dict(load_file(data_dir / "target.safetensors"))
    return model.eval().requires_grad_(False)


@torch.no_grad()
def draw(model: TextToImage, ids: Tensor, sampling: Sampling) -> Tensor:
    """Codes [n, N] int64 of one image for each row of word ids [n, P]."""
    engine = Engine(
        model.target,
        None,
        Plan(Shapes(BATCH, True, DraftTree.root_only(), 64)),
        get_backend("cpu"),
        "eager",
    )
    found = []
    for start in tqdm(range(0, len(ids), BATCH), desc="draw", unit="batch"):
        words = ids[start : start + BATCH]
        count = len(words)
        caption = model.words(torch.cat([words, words[-1:].expand(BATCH - count, -1)]))
        prefix, valid = model.condition.rows(caption.features, caption.valid, guidance=True)
        requests = [Request("drawn", start + i, sampling) for i in range(BATCH)]
        for _ in engine.run(prefix, valid, requests):
            pass
        found.append(torch.from_numpy(engine.result().tokens)[:count].long())
    return torch.cat(found)
