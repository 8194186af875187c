"""Pictures of one's own as codes of a model's tokenizer, for `train drafter --tokens`.

Two layouts are read, those of LlamaGen's `extract_codes_c2i.py` and `extract_codes_t2i.py`: a folder a class, and lines
of JSON with `image_path` and `text`. A picture is resized and cropped around its middle to the model's size.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from lantern_hpu.backends.base import get_backend
from lantern_hpu.commands.pixels import picture_rows
from lantern_hpu.errors import Arg, OptionError
from lantern_hpu.files import parse_json, read_text, write_file
from lantern_hpu.models.files.load import OpenedModel, load_vq, open_model
from lantern_hpu.models.text.prefix import class_index
from lantern_hpu.models.vq import VQModel
from lantern_hpu.results.progress import ProgressBar
from lantern_hpu.results.prompts import NAMES
from lantern_hpu.results.sources import read_picture
from lantern_hpu.zoo.find import find_parts
from lantern_lab.evaluate.drawing import pictures_in
from lantern_lab.train.options import CodesRequest

TOGETHER = 8  # pictures that are encoded at a time
LAYOUTS = "a folder with a folder of pictures for each class, or .jsonl with image_path and text"


def captioned(data: Path, classes: int) -> Iterator[tuple[Path, str]]:
    """Each picture with its caption, which is a label where the model has `classes`."""
    if data.is_dir():
        yield from of_folders(data, classes)
    elif data.suffix.lower() == ".jsonl":
        yield from of_lines(data)
    else:
        raise OptionError(f"cannot read pictures from {data}", f"expected {LAYOUTS}")


def of_folders(data: Path, classes: int) -> Iterator[tuple[Path, str]]:
    """Of a folder a class: as many as the model has are numbered by name, as torchvision's `ImageFolder` does; fewer
    have names or numbers of its classes. A model that reads texts has the folder's name as the caption."""
    files = pictures_in(data)
    alone = [file for file in files if file.parent == data]
    if alone or not files:
        why = f"{alone[0].name} is in no folder of a class" if alone else "there are none"
        raise OptionError(f"cannot read pictures from {data}", why, LAYOUTS)
    names = sorted({file.relative_to(data).parts[0] for file in files})
    labels = dict(zip(names, names, strict=True))
    if classes and len(names) == classes:
        labels = {name: str(number) for number, name in enumerate(names)}
    elif classes:
        labels = {name: str(class_index(name, classes)) for name in names}
    for file in files:
        yield file, labels[file.relative_to(data).parts[0]]


def of_lines(data: Path) -> Iterator[tuple[Path, str]]:
    """Of lines of JSON; a relative path is one from the file's folder."""
    for number, line in enumerate(read_text(data).split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry: Any = parse_json(line)
        except ValueError as error:
            raise OptionError(f"line {number} of {data} is no JSON", str(error)) from error
        held = entry if isinstance(entry, dict) else {}
        text = next((held[name] for name in NAMES if isinstance(held.get(name), str)), None)
        if text is None or not isinstance(held.get("image_path"), str):
            why = f"it is {json.dumps(entry)[:100]}"
            raise OptionError(f"line {number} of {data} has no image_path and text", why)
        yield data.parent / held["image_path"], text


def fitted(file: Path, size: tuple[int, int]) -> NDArray[np.uint8]:
    """A picture at (height, width), resized and cropped around its middle: [height, width, 3]."""
    picture = read_picture(file, str(file)).picture
    return np.asarray(ImageOps.fit(picture, size[::-1], Image.Resampling.BICUBIC))


def encoder_of(opened: OpenedModel, device: torch.device) -> VQModel:
    """The model's tokenizer; an OptionError where it makes no codes of pictures."""
    stored, config = opened.weights().vq, opened.config
    if stored is None or config.vq is None or config.vq.kind != "image" or config.vision:
        why = "it has no tokenizer of one step that encodes them"
        raise OptionError(f"{opened.name} makes no codes of pictures", why, Arg("model", "builtin"))
    made, _ = load_vq(config.vq, stored, device)
    assert isinstance(made, VQModel)
    return made


@torch.no_grad()
def encoded(vq: VQModel, files: Sequence[Path], size: tuple[int, int]) -> NDArray[np.int64]:
    """Codes [pictures, rows, columns]."""
    weight, parts = vq.quant_conv.weight, []
    with ProgressBar(len(files), "picture", desc="codes") as bar:
        for start in range(0, len(files), TOGETHER):
            pixels = np.stack([fitted(file, size) for file in files[start : start + TOGETHER]])
            x = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(weight) / 127.5 - 1
            parts.append(vq.encode(x).cpu().numpy())
            bar.update(len(pixels))
    return np.concatenate(parts)


def write_codes(wanted: CodesRequest) -> str:
    """Write the file that `train drafter --tokens` reads. -> what it holds"""
    opened = open_model(find_parts(wanted.model, wanted.given, optional=("text",)))
    config = opened.config
    pairs = list(captioned(wanted.data, config.condition.classes))
    if not pairs:
        raise OptionError(f"{wanted.data} names no pictures", hint=LAYOUTS)
    files, captions = zip(*pairs, strict=True)
    backend = get_backend(wanted.device.device, "eager")
    with backend.errors():
        codes = encoded(encoder_of(opened, backend.device), files, config.image_size)
    tokens = picture_rows(codes, config.target)
    if tokens is None or config.target.preview_tokens:
        what = f"codes {list(codes.shape[1:])} are no image of {opened.name}"
        raise OptionError(what, f"its images have {config.target.tokens} tokens")
    content = io.BytesIO()
    np.savez(content, tokens=tokens.astype(np.int32), captions=np.array(captions))
    write_file(wanted.output, content.getvalue())
    different = f"{len(set(captions))} captions"
    return f"{len(tokens)} pictures of {different} -> {wanted.output}: train drafter --tokens"
