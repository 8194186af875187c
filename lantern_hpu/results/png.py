"""PNG files that carry what draws their image again."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from lantern_hpu.core import Request
from lantern_hpu.errors import OptionError
from lantern_hpu.files import parse_json

METADATA = "lantern_hpu"  # key of the text chunk with everything needed to draw the image again
SIGNATURE = b"\x89PNG\r\n\x1a\n"
END = b"IEND\xaeB`\x82"
REPLAYED = ("model", "weights", "method", "tree", "tree_paths", "sampling", "relaxation", "dtype")
# Types of what is stored, where it is there
KINDS = {"prompt": str, "seed": int, "config": dict, "environment": dict}
CONFIG_KINDS: dict[str, type | UnionType] = {
    **dict.fromkeys(("model", "method", "tree", "dtype", "layout", "kernels", "device"), str),
    **dict.fromkeys(("weights", "parts", "sampling", "relaxation"), dict),
    **dict.fromkeys(("quantize", "negative", "stretch"), str | None),
    **dict.fromkeys(("tree_paths", "sources"), list),
    "size": list | None,
}


def with_metadata(image: Image.Image, metadata: Mapping[str, Any]) -> bytes:
    """A PNG file that carries what draws it again."""
    info = PngInfo()
    info.add_itxt("prompt", metadata["prompt"])
    info.add_text("seed", str(metadata["seed"]))
    info.add_itxt(METADATA, json.dumps(metadata))  # ASCII: paths in it may not be UTF-8
    return encode(image, pnginfo=info)


def encode(image: Image.Image, kind: str = "png", **how: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **how)
    return buffer.getvalue()


def check_kinds(values: Mapping[str, Any], kinds: Mapping[str, type | UnionType]) -> None:
    """Raise a ValueError for a value of stored metadata that is of another type."""
    for name, kind in kinds.items():
        if name in values and not isinstance(values[name], kind):
            raise ValueError(f"{name} is {str(values[name])[:60]!r}")


def read_png(path: Path) -> dict[str, Any]:
    """Metadata of an image that this package drew."""
    try:
        with Image.open(path) as image:
            text = dict(getattr(image, "text", {}))
            data: dict[str, Any] = parse_json(text[METADATA])
            config = dict(data["config"])
            check_kinds(data, KINDS)
            check_kinds(config, CONFIG_KINDS)
            missing = [name for name in REPLAYED if name not in config]
            if missing:
                raise OptionError(f"{path} cannot be drawn again", f"it lacks {', '.join(missing)}")
            environment = data.get("environment", {})
            check_kinds(environment, {"threads": int})
            return {
                "prompt": data["prompt"],
                "seed": data["seed"],
                "config": config,
                "size": image.size,
                "version": environment.get("lantern_hpu", "another version"),
                "threads": environment.get("threads", 0),
            }
    except KeyError as error:
        why = "it carries no settings: a sheet, drawn elsewhere, or stripped by an editor"
        raise OptionError(f"{path} cannot be drawn again", why) from error
    except (OSError, ValueError, TypeError, Image.DecompressionBombError) as error:
        raise OptionError(f"cannot read {path}", str(error)) from error


def is_cut_off(path: Path) -> bool:
    """Whether it is a PNG that is not whole, as of a copy that broke off; not whether it is one of ours."""
    data = path.read_bytes()
    if not SIGNATURE.startswith(data[: len(SIGNATURE)]):
        return False
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return True
    return not data.endswith(END)


def drawn_otherwise(
    there: Mapping[str, Any], settings: Mapping[str, Any], request: Request
) -> list[str]:
    """In what an image that is there, as `read_png` reads it, is not the one of a request with these settings."""
    names = (*REPLAYED, "stretch", "negative", "size", "sources")
    others = [name for name in names if there["config"].get(name) != settings.get(name)]
    return others + [name for name in ("prompt", "seed") if there[name] != getattr(request, name)]
