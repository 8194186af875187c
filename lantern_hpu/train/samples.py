"""What a drafter learns from: images that the target itself draws at its sampling settings."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from lantern_hpu.config import Request, Sampling, in_turn
from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.files import write_file
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DraftTree

FEWEST = 10  # different prompts: some are held out
HELD_OUT = 0.1  # share of the prompts


@dataclass
class Samples:
    """Images as tokens, with their prompts."""

    tokens: Tensor  # [n, N] int64
    prompts: list[str]  # [n]


def split(prompts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Prompts to learn from, and prompts to measure with: by the prompt itself, whatever their order.

    Raises:
        OptionError: too few different prompts.
    """
    different = sorted(set(prompts), key=lambda text: hashlib.sha256(text.encode()).digest())
    if len(different) < FEWEST:
        why = f"{len(different)} different ones; {FEWEST} are needed, as some are held out"
        raise OptionError("too few prompts", why, "--data with more of them")
    held = max(1, round(HELD_OUT * len(different)))
    return different[held:], different[:held]


def key(pipeline: LanternPipeline, prompts: Sequence[str], sampling: Sampling, seed: int) -> str:
    """What samples depend on: samples of another target or other settings would teach the wrong probabilities."""
    files = {name: digest for name, digest in pipeline.model.files.items() if "drafter" not in name}
    what = [files, list(prompts), asdict(sampling), seed]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def draw(
    pipeline: LanternPipeline,
    prompts: Sequence[str],
    count: int,
    folder: Path,
    accelerator: Accelerator,
    batch: int = 8,
    seed: int = 0,
) -> Samples:
    """`count` images of these prompts in turn, drawn without drafts; kept in `folder`, a file a batch.

    Files of an interrupted run are used again; several processes share the batches.

    Raises:
        WeightsError: the folder holds samples of another target, of other prompts or settings.
    """
    sampling = pipeline.model.sampling
    # Every file is full, so that more samples can be asked for later.
    whole = -(-count // batch) * batch
    requests = in_turn(prompts, range(whole), seed, sampling)
    files = {folder / f"{start:06d}.npz": start for start in range(0, count, batch)}
    stamp = key(pipeline, prompts, sampling, seed)
    # Shared out before looking what is there: all processes must see the same list.
    share = list(files)[accelerator.process_index :: accelerator.num_processes]
    mine = [file for file in share if not file.exists()]
    shown = tqdm(mine, desc="samples", unit="batch", disable=not accelerator.is_main_process)
    for file in shown:
        tokens = draw_batch(pipeline, requests[files[file] : files[file] + batch])
        content = io.BytesIO()
        np.savez(content, tokens=tokens.astype(np.int32), key=np.array(stamp))
        write_file(file, content.getvalue())
    accelerator.wait_for_everyone()
    rows = np.concatenate([read(file, stamp) for file in files])
    return Samples(torch.from_numpy(rows[:count]), [r.prompt for r in requests[:count]])


def read(file: Path, stamp: str) -> NDArray[np.int64]:
    """Tokens [b, N] of a file with this key."""
    with np.load(file) as saved:
        if str(saved["key"]) != stamp:
            why = "it was drawn by another target, or from other prompts or settings"
            raise WeightsError(f"{file} cannot be used", why, "another --output")
        return saved["tokens"].astype(np.int64)


def draw_batch(pipeline: LanternPipeline, part: list[Request]) -> NDArray[np.int64]:
    """Tokens [b, N] of these requests."""
    engine = pipeline.engines.get(pipeline.spec(part, DraftTree.root_only(), len(part)))
    pipeline.warm_up(engine, part[0])
    return np.stack([done.tokens for done in pipeline.draw_batch(engine, part)])
