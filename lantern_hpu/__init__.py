"""lantern_hpu: fast drawing with visual autoregressive models on Gaudi, NVIDIA and plain CPUs.

    from lantern_hpu import LanternPipeline
    LanternPipeline.from_pretrained("builtin")("a red apple").images[0].save("apple.png")

Importing the package loads no torch: some devices read their flags when torch is imported.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.files import VERSION as __version__

if TYPE_CHECKING:
    from lantern_hpu.core import Event, ImageRecord, Request, Sampling
    from lantern_hpu.errors import LanternError
    from lantern_hpu.methods.relaxation import (
        Additive,
        Annealed,
        Clustered,
        Multiplicative,
        Relaxation,
    )
    from lantern_hpu.methods.setting import Setting
    from lantern_hpu.models.files.names import PartOverrides
    from lantern_hpu.pipeline import LanternPipeline
    from lantern_hpu.results.images import GenerationResult
    from lantern_hpu.tree import load_tree

# Where each public name is defined; imported when it is first asked for
_DEFINED_IN = {
    "LanternPipeline": "pipeline",
    "GenerationResult": "results.images",
    "ImageRecord": "core",
    "Event": "core",
    "Setting": "methods.setting",
    "Request": "core",
    "Sampling": "core",
    "Relaxation": "methods.relaxation",
    "Multiplicative": "methods.relaxation",
    "Additive": "methods.relaxation",
    "Annealed": "methods.relaxation",
    "Clustered": "methods.relaxation",
    "load_tree": "tree",
    "PartOverrides": "models.files.names",
    "LanternError": "errors",
}
__all__ = [
    "Additive",
    "Annealed",
    "Clustered",
    "Event",
    "GenerationResult",
    "ImageRecord",
    "LanternError",
    "LanternPipeline",
    "Multiplicative",
    "PartOverrides",
    "Relaxation",
    "Request",
    "Sampling",
    "Setting",
    "__version__",
    "load_tree",
]

# A checkout whose file system has no symbolic links: `backends` and `graphs` lie one folder up.
if not (Path(__file__).parent / "backends").is_dir():
    __path__.append(str(Path(__file__).parent.parent))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _DEFINED_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "LanternPipeline":
        from lantern_hpu.backends import prepare

        prepare("auto")  # flags that a device reads while torch is imported
    return getattr(import_module(f"{__name__}.{_DEFINED_IN[name]}"), name)
