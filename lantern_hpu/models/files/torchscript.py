"""Tensors of a TorchScript file by the names of its modules; nothing of its code is read or run."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lantern_hpu.errors import WeightsError


class Inert:
    """What stands for every class and function that the file names: it keeps a state and does nothing."""

    state: Any = None

    def __new__(cls, *args: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


def rebuild(storage: Tensor, offset: int, size: Any, stride: Any, *rest: Any) -> Tensor:
    return torch.as_strided(storage, size, stride, offset)


class TensorReader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{root}data.pkl")))
        self.archive, self.root, self.storages = archive, root, dict[str, Tensor]()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return rebuild
        # `torch.HalfStorage` is of `torch.half`; of what a name leads to nothing else is used
        dtype = getattr(torch, name.removesuffix("Storage").lower(), None)
        return dtype if module == "torch" and isinstance(dtype, torch.dtype) else Inert

    def persistent_load(self, pid: Any) -> Tensor:
        _, dtype, key, *_ = pid
        if key not in self.storages:
            content = bytearray(self.archive.read(f"{self.root}data/{key}"))
            self.storages[key] = torch.frombuffer(content, dtype=dtype)
        return self.storages[key]


def named_tensors(module: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in (module.state if isinstance(module.state, dict) else {}).items():
        if isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Inert):
            yield from named_tensors(value, f"{prefix}{name}.")


def read_torchscript(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            (data,) = (n for n in archive.namelist() if n.endswith("/data.pkl"))
            return dict(named_tensors(TensorReader(archive, data.removesuffix("data.pkl")).load()))
    except PermissionError as error:
        raise WeightsError(f"cannot read {path}", error.strerror or str(error)) from error
    except Exception as error:  # a damaged pickle may raise anything
        why = "damaged, cut off, or no TorchScript file"
        raise WeightsError(f"cannot read {path}", why, "download it again") from error
