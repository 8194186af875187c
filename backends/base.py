"""The contract of a backend: what a device can do, never which device it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lantern_hpu.errors import DeviceError, choices


@dataclass(frozen=True)
class Memory:
    """Bytes; None where the device does not tell."""

    total: int | None
    free: int | None
    peak: int | None


class Backend(ABC):
    """A device. Everything above asks it for what it needs instead of asking for its name.

    Attributes:
        name: the value of `--device`.
        device: where tensors live.
        dtypes: supported number formats, best first, each with the reason for its place.
        graph_modes: ways to record a function, best first, each with the reason for its place; `eager` is one.
    """

    name: str
    device: torch.device
    dtypes: dict[str, str]
    graph_modes: dict[str, str]

    @abstractmethod
    def available(self) -> tuple[bool, str]:
        """Whether the device can be used here, and why (not)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything asked for so far is done."""

    @abstractmethod
    def memory(self) -> Memory:
        """Bytes in total, free, and at the peak of this process."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q [R, h, T, hd], k and v [R, kv, S, hd], additive mask [R, 1, T, S] -> [R, h, T, hd]."""
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

    @abstractmethod
    def describe(self) -> dict[str, object]:
        """Hardware and versions, for reports."""

    def dtype(self, name: str = "auto") -> torch.dtype:
        """The number format of that name, or the best one.

        Raises:
            DeviceError: the device does not offer it.
        """
        if name == "auto":
            name = next(iter(self.dtypes))
        if name not in self.dtypes:
            raise DeviceError(
                f"{self.name} does not offer dtype {name!r}", hint=choices(self.dtypes)
            )
        found: torch.dtype = getattr(torch, name)
        return found
