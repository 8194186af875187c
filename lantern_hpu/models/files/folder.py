"""A model folder: all parts of a text-to-image model in our own files, the embedded one among them.

model.json          sizes, kind of condition, default sampling, fastest methods, sha256 of each file
target.safetensors  target.*, and what turns a prompt into its prefix: words.*, condition.*, classes.*
drafter.safetensors if there is one
vq.safetensors
model.npy      if a published table was converted with it
tokenizer.json      if prompts are read as tokens

Written by `lantern_hpu.commands.convert` and `scripts/embedded_model/export.py`; mapped into memory and read once.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from glob import escape
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import nn

from lantern_hpu.errors import OutputError, WeightsError
from lantern_hpu.files import lock_file, reported_as, sha256
from lantern_hpu.methods.request import Sampling
from lantern_hpu.models.files.checkpoint import Stored, Weights, open_checkpoint
from lantern_hpu.models.files.names import (
    CONFIG,
    DRAFTER_WEIGHTS,
    NEIGHBOURS,
    TARGET,
    TOKENIZER,
    VQ,
    Parts,
    check_sums,
    read_config,
)
from lantern_hpu.models.files.tokenizers import check_vq, open_vq
from lantern_hpu.models.model import CACHED_NEIGHBOURS, ImageModel, read_table
from lantern_hpu.models.text.tokens import TokenConditioner

# ------------------------------------------------------------------------------------------ staged

# A new folder that takes its name when all of it is written, so that a killed run leaves none that is half.

UNFINISHED = ".converting"  # ends the name of a folder that is being written


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A lock on a folder that ends with its process, however that ends; where there are no such locks, none."""
    if os.name != "posix":  # a folder can be neither opened nor locked there
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        lock_file(opened)
        yield
    finally:
        os.close(opened)


def clear_killed(output: Path) -> None:
    """Remove what runs that were killed left beside an output; folders that another run still fills are held."""
    for folder in output.parent.glob(f".{escape(output.name)}.*{UNFINISHED}"):
        with suppress(OSError), held(folder):
            shutil.rmtree(folder)


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A new folder beside the output, which takes its name when all is written, and is removed otherwise."""
    from safetensors import SafetensorError

    folder = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        clear_killed(output)
        folder = Path(tempfile.mkdtemp(UNFINISHED, f".{output.name}.", output.parent))
        with held(folder):
            yield folder
        mask = os.umask(0)
        os.umask(mask)
        folder.chmod(0o777 & ~mask)
        for file in folder.iterdir():  # some libraries write for their user alone
            file.chmod(0o666 & ~mask)
        os.replace(folder, output)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"cannot write {output}", why, "another folder or disk") from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


# ------------------------------------------------------------------------------------------ folder


class ModelFolder:
    """A folder of ours, opened; no weight is read yet."""

    def __init__(self, parts: Parts) -> None:
        self.path, self.vq = parts.target, None
        self.about, self.config = read_config(self.path)
        with reported_as(f"cannot read {self.path / CONFIG}"):
            self.name = self.about.get("name", self.path.name)
            self.sampling = Sampling(**self.about["sampling"])
            fastest = self.about["fastest"].items()
            self.fastest = {device: (method, tree) for device, (method, tree) in fastest}
        pixels = self.about.get("pixels")
        self.pixels = parts.pixels or (Path(pixels) if pixels else None)
        config = self.config.vq
        if config is None and not self.config.target.code_pixels:
            raise WeightsError(f"cannot read {self.path / CONFIG}", "vq is missing")
        self.code_pixels = config.downsample if config else self.config.target.code_pixels
        if parts.vq is not None and config is not None:
            vq, self.vq = open_vq(open_checkpoint(parts.vq), config.normalize_codebook)
            check_vq(vq, self.config.target, config.downsample, parts.vq)
            self.config = replace(self.config, vq=vq)

    def weights(self) -> Weights:
        """Of all parts; the files are checked first."""
        check_sums(self.path, self.about)
        files = self.about["files"]

        def stored(name: str) -> Stored:
            return Stored(open_checkpoint(self.path / name), digest=files.get(name))

        return Weights(
            stored(TARGET),
            self.vq or (stored(VQ) if self.config.vq else None),
            stored(DRAFTER_WEIGHTS) if self.config.drafter else None,
            files,
            self.about.get("fingerprint"),
            self.path / NEIGHBOURS if NEIGHBOURS in files else None,
        )


# ------------------------------------------------------------------------------------ writing


def write_model(model: ImageModel, folder: Path, progress: Any) -> None:
    """Write a model's parts and `model.json` into an empty folder.

    Args:
        progress: a bar of tqdm; each part is a step of it.
    """
    main = nn.ModuleDict({**model.condition.parts(), "target": model.target})
    if model.code_vectors_alone is not None:
        main["codebook"] = nn.Embedding.from_pretrained(model.code_vectors_alone)
    parts: dict[str, nn.Module] = {TARGET: main}
    if model.vq is not None:
        parts[VQ] = model.vq
    if model.drafter is not None:
        parts[DRAFTER_WEIGHTS] = model.drafter
    for name, module in parts.items():
        progress.set_description_str(name)
        tensors = {key: tensor.contiguous() for key, tensor in module.state_dict().items()}
        save_file(tensors, folder / name)
        progress.update()
    if model.neighbour_table is not None:
        width = min(model.listed_neighbours, CACHED_NEIGHBOURS)
        table = read_table(model.neighbour_table, width)
        np.save(folder / NEIGHBOURS, table.numpy())
    if isinstance(model.condition, TokenConditioner):
        text = model.condition.tokenizer.backend_tokenizer.to_str()
        (folder / TOKENIZER).write_text(text)
    files = {file.name: sha256(file) for file in sorted(folder.iterdir())}
    (folder / CONFIG).write_text(json.dumps(model_json(model, files), indent=1))


def model_json(model: ImageModel, files: dict[str, str]) -> dict[str, Any]:
    """`model.json` of a model whose files have these checksums."""
    config = model.config
    return {
        "name": model.name,
        "files": files,
        "fingerprint": model.fingerprint,
        "target": asdict(config.target),
        "condition": config.condition.as_json(),
        "drafter": config.drafter.as_json() if config.drafter else None,
        "vq": asdict(config.vq) if config.vq else None,
        **({"codebook": config.codebook} if config.codebook else {}),
        **({"pixels": str(model.pixels_by.resolve())} if model.pixels_by else {}),
        "sampling": asdict(model.sampling),
        "fastest": {name: list(value) for name, value in model.fastest.items()},
    }
