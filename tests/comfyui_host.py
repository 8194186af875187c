"""ComfyUI as nodes see it: its own classes from the folder that COMFYUI names, else a stand-in of its public interface
(https://docs.comfy.org/custom-nodes/v3_migration), which refuses arguments that ComfyUI's classes do not have."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

OWN = os.environ.get("COMFYUI", "")
FOLDER = Path(__file__).parent.parent / "comfyui"
NODE = "7"  # its number in a workflow


@dataclass
class Input:
    id: str
    optional: bool = False
    tooltip: str | None = None


@dataclass
class Widget(Input):
    default: Any = None


@dataclass
class Text(Widget):
    multiline: bool = False
    dynamic_prompts: bool | None = None


@dataclass
class Number(Widget):
    min: float | None = None
    max: float | None = None
    step: float | None = None


@dataclass
class Whole(Number):
    control_after_generate: bool | None = None


@dataclass
class Output:
    id: str
    tooltip: str | None = None


def kind(name: str, given: type[Input]) -> Any:
    """A type of ComfyUI's, whose inputs and outputs know its name."""
    parts = {"Input": given, "Output": Output}
    return SimpleNamespace(
        **{part: type(part, (c,), {"io_type": name}) for part, c in parts.items()}
    )


@dataclass
class Schema:
    node_id: str
    display_name: str
    category: str
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    description: str = ""

    def validate(self) -> None:
        twice = [
            name for name, n in Counter(p.id for p in self.inputs + self.outputs).items() if n > 1
        ]
        if twice:
            raise ValueError(f"ids must be unique: {twice}")


class NodeOutput:
    def __init__(self, *args: Any) -> None:
        self.result = args


class ComfyNode:
    define_schema: Callable[[], Schema]


class ComfyExtension:
    async def on_load(self) -> None:
        pass


class InterruptProcessingException(Exception):
    pass


class Host:
    """What a test does with ComfyUI: load nodes, execute them, interrupt, and read their progress."""

    def __init__(self) -> None:
        self.progress: list[tuple[float, float, Any]] = []  # value, most, picture
        self.interrupted = False
        self.Interrupted: type[Exception] = InterruptProcessingException
        self.context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def interrupt(self) -> None:
        self.interrupted = True

    def throw(self) -> None:
        if self.interrupted:
            self.interrupted = False
            raise InterruptProcessingException

    async def set_progress(
        self,
        value: float,
        max_value: float,
        node_id: str | None = None,
        preview_image: Any = None,
        ignore_size_limit: bool = False,
    ) -> None:
        self.progress.append((value, max_value, preview_image))

    def modules(self) -> dict[str, ModuleType]:
        """By their names, of which a node imports some."""
        kinds = {"String": ("STRING", Text), "Int": ("INT", Whole), "Float": ("FLOAT", Number)}
        kinds["Image"] = ("IMAGE", Input)
        made = {name: kind(*about) for name, about in kinds.items()}
        io = {"ComfyNode": ComfyNode, "Schema": Schema, "NodeOutput": NodeOutput, **made}
        execution = SimpleNamespace(set_progress=self.set_progress)
        api = SimpleNamespace(Execution=lambda: execution)
        latest = {"io": SimpleNamespace(**io), "ComfyAPI": api}
        management = {"throw_exception_if_processing_interrupted": self.throw}
        content: dict[str, dict[str, Any]] = {
            "comfy": {"model_management": SimpleNamespace(**management)},
            "comfy_api": {},
            "comfy_api.latest": {**latest, "ComfyExtension": ComfyExtension},
        }
        return {name: with_content(name, **parts) for name, parts in content.items()}


def with_content(name: str, **parts: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(parts)
    return module


def own_host() -> Host:
    """ComfyUI's own classes, on the processor."""
    sys.path.insert(0, OWN)
    from comfy.cli_args import args

    args.cpu = True
    from comfy import model_management
    from comfy_execution.progress import ProgressRegistry
    from comfy_execution.utils import CurrentNodeContext

    host = Host()
    host.Interrupted = model_management.InterruptProcessingException
    host.interrupt = model_management.interrupt_current_processing  # type: ignore[method-assign]
    host.context = lambda: CurrentNodeContext("prompt", NODE)

    def update(self: Any, node_id: str, value: float, max_value: float, image: Any) -> None:
        assert node_id == NODE
        host.progress.append((value, max_value, image[1]))

    ProgressRegistry.update_progress = update
    return host


@contextmanager
def loaded() -> Iterator[tuple[Host, ModuleType]]:
    """ComfyUI with the folder of nodes loaded as it loads one, under a name that is a path."""
    host = own_host() if OWN else Host()
    replaced = {} if OWN else host.modules()
    name = str(FOLDER).replace(".", "_x_")
    before = dict(sys.modules)
    sys.modules.update(replaced)
    spec = importlib.util.spec_from_file_location(name, FOLDER / "__init__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield host, module
    finally:
        for added in [key for key in sys.modules if key.startswith(name) or key in replaced]:
            del sys.modules[added]
        sys.modules.update({key: before[key] for key in replaced if key in before})
