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
from torch import Tensor
from tqdm import tqdm

from lantern_hpu.config import Request, Sampling, in_turn
from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results import write_file
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
    """What samples depend on: samples of another target or other settings would train the wrong law."""
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
    whole = (
        -(-count // batch) * batch
    )  # every file is full, so that more samples can be asked for later
    requests = in_turn(prompts, range(whole), seed, sampling)
    files = {folder / f"{start:06d}.npz": start for start in range(0, count, batch)}
    stamp = key(pipeline, prompts, sampling, seed)
    # Shared out before looking what is there: all processes must see the same list.
    share = list(files)[accelerator.process_index :: accelerator.num_processes]
    mine = [file for file in share if not file.exists()]
    shown = tqdm(mine, desc="samples", unit="batch", disable=not accelerator.is_main_process)
    for file in shown:
        part = requests[files[file] : files[file] + batch]
        tokens = draw_batch(pipeline, part, batch)
        content = io.BytesIO()
        np.savez(content, tokens=tokens.astype(np.int32), key=np.array(stamp))
        write_file(file, content.getvalue())
    accelerator.wait_for_everyone()
    rows = []
    for file in files:
        with np.load(file) as saved:
            if str(saved["key"]) != stamp:
                why = "it was drawn by another target, or from other prompts or settings"
                raise WeightsError(f"{file} cannot be used", why, "another --output")
            rows.append(saved["tokens"].astype(np.int64))
    drawn = torch.from_numpy(np.concatenate(rows)[:count])
    return Samples(drawn, [r.prompt for r in requests[:count]])


def draw_batch(pipeline: LanternPipeline, part: list[Request], size: int) -> np.ndarray:
    """Tokens [b, N] of these requests."""
    engine, _ = pipeline.engine(part, DraftTree.root_only(), size)
    pipeline.warm_up(engine, part[0])
    return pipeline.draw_batch(engine, part, size).tokens[: len(part)]
