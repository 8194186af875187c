"""The contract of a runner: built from a function and its state, and called once per replay; and the plain runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from lantern_hpu.backends.base import Backend


class State(Protocol):
    """A dataclass of preallocated tensors."""

    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        ...

    def restorable(self) -> dict[str, Tensor]:
        """Those that must be put back after a run that is not to count."""
        ...


# A module whose `forward(state)` changes the state in place and returns one tensor. It may have `stages(state)`, which
# yields a name and what was made, stage by stage, and last what `forward` returns.
Function = nn.Module


@dataclass
class RunnerStats:
    """What a runner did. A capture after warm-up is a recompile, which a caller should treat as an error."""

    mode: str
    captures: int = 0
    replays: int = 0
    capture_seconds: float = 0.0


class Runner(ABC):
    """Records `function(state)` and replays it.

    The returned tensor is the runner's own storage and is valid until the next call: read it or copy it.
    """

    mode: str

    def __init__(self, function: Function, state: State, backend: Backend) -> None:
        self.function, self.state, self.backend = function, state, backend
        self.stats = RunnerStats(self.mode)

    @abstractmethod
    def __call__(self) -> Tensor:
        """Run the function once on the state as it is now."""

    def close(self) -> None:  # noqa: B027 - most recordings hold nothing but their tensors
        """Give back what the device holds for the recording; it is not called again."""


class EagerRunner(Runner):
    """Records nothing and calls the function; every device can do this."""

    mode = "eager"

    def __call__(self) -> Tensor:
        self.stats.replays += 1
        result: Tensor = self.function(self.state)
        return result
