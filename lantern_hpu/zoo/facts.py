"""Known models as plain values: sizes, licences, files, and which of them are here. Needs no torch."""

from __future__ import annotations

from typing import Any

from lantern_hpu.files import reading
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.models.files.names import BUILTIN, CONFIG
from lantern_hpu.zoo.located import Located, draw_command, locate_model
from lantern_hpu.zoo.registry import KnownModel, Part, entries, get

Facts = dict[str, Any]


def all_facts() -> list[Facts]:
    """The embedded model and every known one."""
    return [builtin(), *(model_facts(entry) for entry in entries().values())]


def facts_by_name(name: str) -> Facts:
    """
    Raises:
        OptionError: no model of that name is known.
    """
    return builtin() if name == "builtin" else model_facts(get(name))


def builtin() -> Facts:
    """The embedded model as its folder has it.

    Raises:
        WeightsError: its configuration is unreadable.
    """
    with reading(BUILTIN / CONFIG, "install the package again") as config:
        files, sampling = list(config["files"]), config["sampling"]
        sizes = ModelConfig.from_json(config)
    lacking = [name for name in files if not (BUILTIN / name).is_file()]
    return {
        "name": "builtin",
        "title": "the embedded model: small pictures of familiar things",
        "family": "llamagen-t2i",
        "image_size": sizes.image_size[0],
        "grid": list(sizes.target.grid),
        "prefix": sizes.target.prefix,
        "licence": "Apache-2.0",
        "note": "Trained on scenes painted by lantern_hpu.lab.scenes.",
        "bytes": sum((BUILTIN / name).stat().st_size for name in files if name not in lacking),
        "here": not lacking,
        "missing": lacking,
        "sampling": sampling,
        "parts": [{"part": "all", "path": str(BUILTIN), "files": files}],
        "get": "pip install lantern-hpu",
        "draw": 'python -m lantern_hpu.generate --prompt "a red apple"',
    }


def model_facts(entry: KnownModel) -> Facts:
    """What there is to say of a known model."""
    located = locate_model(entry)
    return {
        "name": entry.name,
        "title": entry.title,
        "family": entry.family,
        "image_size": entry.image_size,
        "grid": list(entry.config.target.grid),
        "prefix": entry.config.target.prefix,
        "licence": entry.licence,
        "note": entry.note,
        "bytes": sum(part.bytes or 0 for part in entry.needed()),
        "here": not located.missing(),
        "missing": [part.role for part in located.missing()],
        "sampling": dict(entry.sampling),
        "parameters": entry.config.parameters,
        "parts": [facts_of_part(part, located) for part in entry.parts.values()],
        "get": f"lantern-hpu download {entry.handle}",
        "draw": draw_command(entry),
    }


def facts_of_part(part: Part, located: Located) -> Facts:
    path = located[part.role]
    return {
        "part": part.role,
        "repo": part.repo,
        "page": part.page,
        "files": list(part.files),
        "bytes": part.bytes,
        "sha256": dict(part.sha256),
        "licence": part.licence,
        "needed_for": part.needed_for,
        "confirmed": part.confirmed,
        "instead": [source.repo for source in part.instead],
        "note": part.note,
        "path": None if path is None else str(path),
        "missing": list(located.absent.get(part.role, ())),
    }
