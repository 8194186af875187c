"""What a drafter learns from: images that the target itself draws at its sampling settings, and pictures as tokens."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from lantern_hpu.errors import OptionError, WeightsError
from lantern_hpu.files import sha256, write_file
from lantern_hpu.methods.request import Request, Sampling, in_turn
from lantern_hpu.models.config import TransformerConfig
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import DraftTree

FEWEST = 10  # different prompts: some are held out
HELD_OUT = 0.1  # share of the prompts


@dataclass
class Samples:
    """Images as tokens, with their prompts.

    Attributes:
        file: checksum of the file that some came from, if any did.
    """

    tokens: Tensor  # [n, N] int64
    prompts: list[str]  # [n]
    file: str = ""

    def __add__(self, other: Samples) -> Samples:
        tokens = torch.cat([self.tokens, other.tokens])
        return Samples(tokens, self.prompts + other.prompts, self.file or other.file)


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


def samples_key(
    pipeline: LanternPipeline, prompts: Sequence[str], sampling: Sampling, seed: int
) -> str:
    """What samples depend on: samples of another target or other settings would teach the wrong probabilities."""
    files = {name: digest for name, digest in pipeline.model.files.items() if "drafter" not in name}
    what = [files, list(prompts), asdict(sampling), seed]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def draw_samples(
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
    stamp = samples_key(pipeline, prompts, sampling, seed)
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
    none = np.zeros((0, pipeline.model.target.config.tokens), np.int64)
    rows = np.concatenate([none, *(read_samples(file, stamp) for file in files)])
    return Samples(torch.from_numpy(rows[:count]), [r.prompt for r in requests[:count]])


def read_samples(file: Path, stamp: str) -> NDArray[np.int64]:
    """Tokens [b, N] of a file with this key."""
    with np.load(file) as saved:
        if str(saved["key"]) != stamp:
            why = "it was drawn by another target, or from other prompts or settings"
            raise WeightsError(f"{file} cannot be used", why, "another --output")
        return saved["tokens"].astype(np.int64)


def read_encoded(file: Path, config: TransformerConfig, held_out: Sequence[str]) -> Samples:
    """Captioned pictures as the model's tokenizer encodes them, without those of held-out captions.

    Args:
        file: .npz with `tokens` [n, N] integers and `captions` [n] strings.

    Raises:
        OptionError: it is no such file, or of another model.
    """
    try:
        with np.load(file, allow_pickle=False) as saved:
            tokens, captions = saved["tokens"], [str(caption) for caption in saved["captions"]]
    except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
        hint = "an .npz with tokens [n, N] and captions [n]"
        raise OptionError(f"cannot read tokens from {file}", repr(error), hint) from error
    shape, codes = (len(captions), config.tokens), config.vocab_size
    if tokens.shape != shape or tokens.dtype.kind not in "iu":
        why = f"{tokens.dtype} {list(tokens.shape)} for {len(captions)} captions"
        raise OptionError(f"{file} does not fit the model", why, f"integers {list(shape)}")
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < codes:
        why = f"tokens from {tokens.min()} to {tokens.max()}"
        raise OptionError(f"{file} does not fit the model", why, f"0 to {codes - 1}")
    kept = [i for i, caption in enumerate(captions) if caption not in held_out]
    rows = torch.from_numpy(tokens[kept].astype(np.int64))
    return Samples(rows, [captions[i] for i in kept], sha256(file))


def draw_batch(pipeline: LanternPipeline, part: list[Request]) -> NDArray[np.int64]:
    """Tokens [b, N] of these requests."""
    engine = pipeline.engines.get(pipeline.spec(part, DraftTree.root_only(), len(part)))
    pipeline.warm_up(engine, part[0])
    return np.stack([done.tokens for done in pipeline.draw_batch(engine, part)])
