"""Checkpoint files of every container: named tensors, read when asked for."""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lantern_hpu.errors import WeightsError
from lantern_hpu.files import file_in, reading
from lantern_hpu.models.files.names import PICKLES, SAFE, weights_files

SINGLES = ("model.safetensors", "pytorch_model.bin")  # in transformers' order
INDEXES = tuple(f"{name}.index.json" for name in SINGLES)
# Keys under which training frameworks put the weights
CONTAINERS = ("model", "module", "state_dict")
# In what torch says of a pickle that names a function or class to call
CODE = ("GLOBAL", "Unsupported global", "Unsupported class")
SHOWN = 8  # names listed of each kind of mistake before "and n more"


@dataclass
class Checkpoint:
    """The named tensors of a file or folder, read when asked for."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def renamed(self, change: Callable[[str], str]) -> Checkpoint:
        """The same tensors by other names."""
        old = {change(name): name for name in self.shapes}
        shapes = {name: self.shapes[before] for name, before in old.items()}
        return Checkpoint(self.path, shapes, lambda name: self.read(old[name]))

    def under(self, prefix: str) -> Checkpoint:
        """Only the tensors whose names begin with a prefix, without it."""
        names = {name for name in self.shapes if name.startswith(prefix)}
        shapes = {name.removeprefix(prefix): self.shapes[name] for name in names}
        return Checkpoint(self.path, shapes, lambda name: self.read(prefix + name))

    def beside(self, name: str, tensor: Tensor) -> Checkpoint:
        """With one more tensor."""

        def read(wanted: str) -> Tensor:
            return tensor if wanted == name else self.read(wanted)

        return Checkpoint(self.path, {**self.shapes, name: tuple(tensor.shape)}, read)

    def only(self, wanted: Callable[[str], bool]) -> Checkpoint:
        """Only the tensors whose names are wanted."""
        shapes = {name: shape for name, shape in self.shapes.items() if wanted(name)}
        return Checkpoint(self.path, shapes, self.read)

    def within(self, prefix: str) -> Checkpoint:
        """Names without a prefix that all of them may have."""
        if not self.shapes or not all(name.startswith(prefix) for name in self.shapes):
            return self
        return self.renamed(lambda name: name.removeprefix(prefix))

    def count(self, prefix: str) -> int:
        """How many layers there are by the highest number that follows a prefix, lacking ones included."""
        rest = [n.removeprefix(prefix).split(".")[0] for n in self.shapes if n.startswith(prefix)]
        return 1 + max((int(number) for number in rest if number.isdigit()), default=-1)


# ------------------------------------------------------------------------------------ reading files


def open_checkpoint(path: Path) -> Checkpoint:
    """A weights file, or a folder that holds one or an index of several.

    Raises:
        WeightsError: nothing there, unreadable, cut off, or a pickle that wants to run code.
    """
    if path.is_dir():
        return open_weights_folder(path)
    if not path.is_file():
        raise WeightsError(f"{path} does not exist")
    if path.suffix == SAFE:
        return open_safetensors(path)
    if path.suffix in PICKLES:
        return open_pickle(path)
    why = f"expected {', '.join((SAFE, *PICKLES))}"
    raise WeightsError(f"{path} is not a weights file", why)


def open_weights_folder(folder: Path) -> Checkpoint:
    """The weights of a folder in the Hugging Face layout, or its only weights file."""
    for name in INDEXES:
        if (folder / name).is_file():
            return open_shards(folder, folder / name)
    for name in SINGLES:
        if (folder / name).is_file():
            return open_checkpoint(folder / name)
    files = weights_files(folder)
    if len(files) == 1:
        return open_checkpoint(files[0])
    result = ", ".join(file.name for file in files) or "nothing"
    raise WeightsError(f"{folder} holds no weights that can be distinguished", f"found {result}")


def open_shards(folder: Path, index: Path) -> Checkpoint:
    """Several files and the index that says which tensor lies where."""
    with reading(index, "download it again") as about:
        places = {str(name): str(file) for name, file in about["weight_map"].items()}
    missing = sorted({name for name in places.values() if not file_in(folder, name).is_file()})
    if missing:
        raise WeightsError(f"files are missing in {folder}", ", ".join(missing), "download again")
    parts = {name: open_checkpoint(folder / name) for name in sorted(set(places.values()))}
    lost = sorted(name for name, file in places.items() if name not in parts[file])
    more = sorted(n for file, part in parts.items() for n in part.shapes if places.get(n) != file)
    if lost or more:
        why = f"not there: {some_names(lost) or 'none'}; not named: {some_names(more) or 'none'}"
        raise WeightsError(f"{index} and its files differ", why, "download them again")
    shapes = {name: parts[file].shapes[name] for name, file in places.items()}
    return Checkpoint(folder, shapes, lambda name: parts[places[name]].read(name))


def open_safetensors(path: Path) -> Checkpoint:
    """One safetensors file, mapped into memory."""
    try:
        file = safe_open(path, "pt")
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise WeightsError(f"cannot read {path}", error.strerror or str(error)) from error
    except SafetensorError as error:
        why = f"damaged or cut off ({error})"
        raise WeightsError(f"cannot read {path}", why, "download it again") from error
    return Checkpoint(path, shapes, file.get_tensor)


def open_pickle(path: Path) -> Checkpoint:
    """One file of torch.save: weights under `model`, `module` or `state_dict`, or alone."""
    content = load_pickle(path)
    within = [content[key] for key in CONTAINERS if isinstance(content.get(key), dict)]
    holder = within[0] if within else content
    tensors = {str(name): value for name, value in holder.items() if isinstance(value, Tensor)}
    if not tensors:
        keys = some_names(sorted(map(str, content)))
        raise WeightsError(f"{path} holds no weights", f"its keys are {keys}")
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return Checkpoint(path, shapes, tensors.__getitem__)


def load_pickle(path: Path) -> dict[str, Any]:
    """The dictionary of a file of torch.save; nothing in it may run code."""
    hint = "a safetensors file, or a copy from its publisher"
    # On the host, whatever device saved it
    read = partial(torch.load, path, map_location=lambda storage, _: storage, weights_only=True)
    try:
        # Training scripts of LlamaGen store their arguments beside the weights; a Namespace is only a record.
        with torch.serialization.safe_globals([argparse.Namespace]):
            try:
                content = read(mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):  # files of torch before 1.6 cannot be mapped
                    raise
                content = read()
    except pickle.UnpicklingError as error:
        if any(word in str(error) for word in CODE):
            why = "it holds more than weights and would run code when loaded"
            raise WeightsError(f"{path} is refused", why, hint) from error
        raise WeightsError(f"cannot read {path}", guess_content(path), hint) from error
    except PermissionError as error:
        raise WeightsError(f"cannot read {path}", error.strerror or str(error)) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise WeightsError(f"cannot read {path}", guess_content(path), hint) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds no weights", f"it is a {type(content).__name__}")
    return content


def guess_content(path: Path) -> str:
    """What a file that is no pickle may be."""
    with path.open("rb") as file:
        start = file.read(64).lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return "it is a pointer of git-lfs, not the file it points to"
    if start.startswith((b"<!doctype", b"<html")):
        return "it is a web page, not the file"
    return "damaged, cut off, or no file of torch.save"


def folder_of(path: Path) -> Path:
    """A checkpoint's folder, whether it is the folder or a file in it."""
    return path if path.is_dir() else path.parent


def settings_beside(path: Path) -> dict[str, Any]:
    """The config.json in a checkpoint's folder; empty where there is none.

    Raises:
        WeightsError: it is there and cannot be read.
    """
    file = folder_of(path) / "config.json"
    if not file.is_file():
        return {}
    with reading(file) as result:
        return result


def some_names(names: Iterable[str]) -> str:
    """Some names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - SHOWN} more" if len(every) > SHOWN else ""
    return ", ".join(every[:SHOWN]) + more
