"""lantern_hpu: fast drawing with visual autoregressive models on Gaudi, NVIDIA and plain CPUs.

    from lantern_hpu import LanternPipeline
    LanternPipeline.from_pretrained("builtin")("a red apple").images[0].save("apple.png")

Importing the package loads no torch: some devices read their flags when torch is imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline

__version__ = "0.3.0"
__all__ = ["LanternPipeline", "__version__"]

# A checkout whose file system has no symbolic links: `backends` and `graphs` lie one folder up.
if not (Path(__file__).parent / "backends").is_dir():
    __path__.append(str(Path(__file__).parent.parent))


def __getattr__(name: str) -> Any:
    if name == "LanternPipeline":
        from lantern_hpu.backends import prepare

        prepare("auto")  # flags that a device reads while torch is imported
        from lantern_hpu.pipeline import LanternPipeline

        return LanternPipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
