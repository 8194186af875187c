"""`torch.compile` with static shapes, and a count of what it compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from inspect import isgeneratorfunction
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lantern_hpu.backends.base import Backend
from lantern_hpu.errors import Arg, CaptureError
from lantern_hpu.graphs.base import Function, Runner, State

SHOWN = 4  # lines of a compiler's error
set_stance: Any = getattr(torch.compiler, "set_stance", None)  # from torch 2.6 on
KEPT = 256  # compiled parts of a model that are kept, each for its shapes
WARM = 2  # calls of a warm-up: the one that compiles, and one that finds what was compiled


class CompiledRunner(Runner):
    """The device's compiler over the whole function in one graph; a part it cannot compile is an error."""

    mode = "compile"

    def __init__(self, function: Function, state: State, backend: Backend) -> None:
        super().__init__(function, state, backend)
        self.compiled = self.compile()

    def compile(self) -> Callable[[State], Tensor]:
        """What a call runs."""
        whole = self.backend.compile(own_code(type(self.function).forward))
        return partial(whole, self.function)

    def __call__(self) -> Tensor:
        before, began = counters["stats"]["unique_graphs"], time.perf_counter()
        stance = without_guards() if self.unguarded else nullcontext()
        with compiler_errors(type(self.function), self.backend), stance:
            result = self.compiled(self.state)
        if made := counters["stats"]["unique_graphs"] - before:
            self.stats.captures += made
            self.stats.capture_seconds += time.perf_counter() - began
        self.stats.replays += 1
        return result

    @property
    def unguarded(self) -> bool:
        """Whether guards over weights and state, which cost time in each step, are left out: on devices that do so,
        after the warm-up.

        Right because the code is the runner's own: there is one graph to choose from, and a state is never replaced.
        """
        warm = self.stats.replays >= WARM and self.stats.captures == 1
        return self.backend.skips_guards and warm and set_stance is not None


class CompiledLayersRunner(CompiledRunner):
    """Each layer by itself, compiled once for all that are alike, as vllm-gaudi does; so are the stages around them,
    where a stage has no layer of the target in it. What is left runs operator by operator.

    Smaller graphs: for a step that a device's compiler fails on as a whole, or needs too long for.
    """

    mode = "compile_layers"

    def compile(self) -> Callable[[State], Tensor]:
        function, compiled = self.function, self.backend.compile
        lists = (part for part in function.modules() if isinstance(part, nn.ModuleList))
        layers = [layer for part in lists for layer in part]
        parts = {(type(part), name) for part in (function, *layers) for name in wholes(part)}
        made = {
            (kind, name): compiled(own_code(returning_list(getattr(kind, name))))
            for kind, name in parts
        }
        places = [
            (part, name, partial(made[type(part), name], part))
            for part in (function, *layers)
            for name in wholes(part)
        ]

        def call(state: State) -> Tensor:
            # Only meanwhile: others run the same layers uncompiled, to compare
            for owner, name, part in places:
                vars(owner)[name] = part
            try:
                result: Tensor = function(state)
            finally:
                for owner, name, _ in places:
                    del vars(owner)[name]
            return result

        return call


class PartCompiler:
    """Compiles the methods that `whole` names, each by itself: of modules that run outside of the step.

    Modules that are alike share what was made for the shapes of one; other shapes, as of another picture's size, are
    compiled when they first come.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.compiled = lru_cache(KEPT)(self.compile)

    def __call__(self, module: nn.Module) -> None:
        """From now on those of this module and of the modules in it run compiled."""
        for part in module.modules():
            for name in wholes(part):
                vars(part)[name] = partial(self.run, part, name)

    def run(self, part: nn.Module, name: str, *given: Any, **named: Any) -> Any:
        values = (*given, *named.values())
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in values)
        with compiler_errors(type(part), self.backend):
            kind: Any = type(part)
            return self.compiled(kind, name, key)(part, *given, **named)

    def compile(self, kind: Any, name: str, key: object) -> Callable[..., Any]:
        """What is called for arguments of one key."""
        return self.backend.compile(own_code(getattr(kind, name)))


@contextmanager
def compiler_errors(kind: type, backend: Backend) -> Iterator[None]:
    """Raises a CaptureError where a compiler fails on a method of a class, and the device's errors as it words them."""
    try:
        with backend.errors():
            yield
    except torch._dynamo.exc.TorchDynamoException as error:
        what = f"{kind.__name__} cannot be compiled"
        raise CaptureError(what, reason(error), Arg("graphs", "eager")) from error


def wholes(part: nn.Module) -> tuple[str, ...]:
    """The methods of a module that may each be compiled by itself."""
    names: tuple[str, ...] = getattr(part, "whole", ())
    return names


def without_guards() -> AbstractContextManager[object]:
    stance: AbstractContextManager[object] = set_stance(skip_guard_eval_unsafe=True)
    return stance


def own_code(function: Any) -> Any:
    """The same function with a code object of its own. torch's compiler keeps what it made by code object, so that one
    engine's graphs are not looked for among the others', and go with it."""
    own = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def returning_list(function: Any) -> Any:
    """A generator function as one that returns a list, which can be compiled by itself; others as they are."""
    if not isgeneratorfunction(function):
        return function

    def whole(*args: Any) -> list[Any]:
        return list(function(*args))

    return whole


def reason(error: Exception) -> str:
    """A compiler's own words, shortened: the first line names the stage, the last ones the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    advice = next((i for i, line in enumerate(lines) if line.startswith("Set TORCH")), len(lines))
    lines = lines[:advice] or [type(error).__name__]
    return " ... ".join(lines if len(lines) <= SHOWN else [lines[0], *lines[1 - SHOWN :]])
