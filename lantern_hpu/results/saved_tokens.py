"""Files of image tokens: written for other programs, and read to decode or to train with."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lantern_hpu.core import check_text
from lantern_hpu.errors import OptionError
from lantern_hpu.files import check_content, check_regular, parse_json
from lantern_hpu.results.images import GenerationResult
from lantern_hpu.results.png import CONFIG_KINDS, KINDS, check_kinds


def tokens_file(result: GenerationResult) -> bytes:
    """Arrays tokens [images, N] int32, without those of a preview, grid [2], seeds [images] int64,
    prompts and metadata [images] str.
    """
    records, buffer = result.records, io.BytesIO()
    np.savez_compressed(
        buffer,
        tokens=result.tokens[:, result.preview_tokens :].astype(np.int32),
        grid=np.asarray(result.code_grid, dtype=np.int32),
        tokenizer=np.asarray(result.tokenizer),
        seeds=np.asarray([record.seed for record in records], dtype=np.int64),
        prompts=np.asarray([record.prompt for record in records]),
        metadata=np.asarray([json.dumps(one.metadata()) for one in result.drawn]),
    )
    return buffer.getvalue()


@dataclass(frozen=True)
class SavedTokens:
    """What `tokens_file` wrote, or another program: tokens [images, N], and for each image what it carries.

    Attributes:
        metadata: what draws each image again; empty where the file does not say it.
        tokenizer: fingerprint of the VQ tokenizer of the model that drew them; empty where the file does not say it.
        grid: rows and columns of a picture's codes; empty where the file does not say it.
        seeds: of the images; empty where the file does not say it.
    """

    tokens: NDArray[np.int64]
    prompts: list[str]
    metadata: list[dict[str, Any]]
    tokenizer: str = ""
    grid: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npz by name, or the one of a .npy as `tokens`.

    Raises:
        OptionError, WeightsError: it cannot be read.
    """
    check_regular(path)
    check_content(path)
    try:
        with open(path, "rb") as file:
            loaded = np.load(file, allow_pickle=False)
            return {"tokens": loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except Exception as error:  # damaged zip files and headers raise many kinds
        raise OptionError(f"cannot read tokens from {path}", str(error) or repr(error)) from error


def read_saved_tokens(path: Path, held: Mapping[str, NDArray[Any]] | None = None) -> SavedTokens:
    """A .npz with `tokens` [images, N], `prompts` and `metadata` if it has them; or a .npy of tokens alone.

    Args:
        held: its arrays, if they were read.
    """
    held = read_arrays(path) if held is None else held
    try:
        tokens = np.atleast_2d(held["tokens"])
        prompts = [str(text) for text in held.get("prompts", [""] * len(tokens))]
        metadata = [parse_json(str(text)) for text in held.get("metadata", ["{}"] * len(tokens))]
        tokenizer = str(held.get("tokenizer", ""))
        grid, seeds = (tuple(int(n) for n in held.get(name, ())) for name in ("grid", "seeds"))
        for one in metadata:
            if not isinstance(one, dict) or (one and not {"prompt", "seed"} <= one.keys()):
                raise ValueError("its metadata are no objects with a prompt and a seed")
            check_kinds(one, KINDS)
            check_kinds(one.get("config", {}), CONFIG_KINDS)
            check_text(f"cannot read tokens from {path}: a prompt", one.get("prompt", ""))
    except KeyError as error:
        raise OptionError(f"cannot read tokens from {path}", "it holds no `tokens`") from error
    except (ValueError, TypeError, ArithmeticError) as error:
        raise OptionError(f"cannot read tokens from {path}", str(error)) from error
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or not tokens.size:
        why = f"they are {list(tokens.shape)} of {tokens.dtype}, expected a row of whole numbers an image"
        raise OptionError(f"cannot use the tokens in {path}", why)
    if not len(tokens) == len(prompts) == len(metadata):
        raise OptionError(f"cannot use the tokens in {path}", "not each image has a prompt")
    return SavedTokens(tokens.astype(np.int64), prompts, metadata, tokenizer, grid, seeds)
