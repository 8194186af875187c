"""Writing a model folder: all parts of a text-to-image model in our own files. `load.py` reads it.

model.json          sizes, kind of condition, default sampling, fastest methods, sha256 of each file
target.safetensors  target.*, and what turns a prompt into its prefix: words.*, condition.*, classes.*
drafter.safetensors if there is one
vq.safetensors
vision.safetensors  what makes codes of pictures to draw from, where that is no tokenizer
tokenizer.json      if prompts are read as tokens; tokenizer_config.json where the frame depends on it
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from glob import escape
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from lantern_hpu.errors import OutputError, WeightsError
from lantern_hpu.files import lock_file, sha256, some_names
from lantern_hpu.models.files.names import (
    CONFIG,
    DRAFTER_WEIGHTS,
    QUANTIZED_AS,
    TARGET,
    TOKENIZER,
    VISION,
    VQ,
)
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.reading import GlmImageReader
from lantern_hpu.models.text.tokens import TokenConditioner

UNFINISHED = ".converting"  # ends the name of a folder that is being written


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
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


@contextmanager
def staged(output: Path) -> Iterator[Path]:
    """A new folder next to the output, which takes its name when all is written, and is removed otherwise.

    What killed runs left next to the output is removed first; a folder that another run still fills is locked.
    """
    folder = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for old in output.parent.glob(f".{escape(output.name)}.*{UNFINISHED}"):
            with suppress(OSError), folder_lock(old):
                shutil.rmtree(old)
        folder = Path(tempfile.mkdtemp(UNFINISHED, f".{output.name}.", output.parent))
        with folder_lock(folder):
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


def write_model(model: ImageModel, folder: Path, progress: Any) -> None:
    """Write a model's parts and `model.json` into an empty folder.

    Args:
        progress: a bar of tqdm; each part is a step of it.
    """
    main = nn.ModuleDict({**model.condition.parts(), "target": model.target})
    if model.code_vectors_alone is not None:
        main["codebook"] = nn.Embedding.from_pretrained(model.code_vectors_alone)
    parts: dict[str, nn.Module | None]
    parts = {TARGET: main, VQ: model.vq, DRAFTER_WEIGHTS: model.drafter}
    if isinstance(model.condition.reader, GlmImageReader):
        parts[VISION] = model.condition.reader.loaded()
    for name, module in parts.items():
        if module is None:
            continue
        progress.set_description_str(name)
        tensors = {key: tensor.contiguous() for key, tensor in module.state_dict().items()}
        if spoiled := [key for key, tensor in tensors.items() if not is_finite(tensor)]:
            why = f"NaN or infinite numbers are in {some_names(spoiled)}"
            raise WeightsError(f"{model.name} is damaged", why, "another copy of its weights")
        save_file(tensors, folder / name)
        progress.update()
    if isinstance(model.condition, TokenConditioner):
        text = model.condition.tokenizer.backend_tokenizer.to_str()
        (folder / TOKENIZER).write_text(text)
        frame = model.condition.frame
        settings = frame.entry.settings
        if settings and (frame.where / settings).is_file():
            shutil.copyfile(frame.where / settings, folder / settings)
    files = {file.name: sha256(file) for file in sorted(folder.iterdir())}
    (folder / CONFIG).write_text(json.dumps(model_json(model, files), indent=1))


def is_finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    values = tensor.float() if tensor.element_size() == 1 else tensor
    return all(bool(end.isfinite()) for end in values.aminmax())  # to which NaN carries over


def model_json(model: ImageModel, files: dict[str, str]) -> dict[str, Any]:
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
        **({"vision": asdict(config.vision)} if config.vision and VISION in files else {}),
        **({"notes": model.notes} if model.notes else {}),
        **({"quantized": QUANTIZED_AS} if model.quantize else {}),
        "sampling": asdict(model.sampling),
        "fastest": {name: list(value) for name, value in model.fastest.items()},
    }
