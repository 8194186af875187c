"""The `models` command: which models there are, which are here, and how to get one. Needs no torch.

lantern-hpu models
lantern-hpu models llamagen-t2i-256
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lantern_hpu.commands.options import add_fields, filled
from lantern_hpu.errors import exit_code, option
from lantern_hpu.files import reading
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.models.files.names import BUILTIN, CONFIG
from lantern_hpu.results.tables import aligned, amount, paragraph
from lantern_hpu.zoo.find import Located, draw_command, locate_model
from lantern_hpu.zoo.registry import KnownModel, Part, entries, get

# ------------------------------------------------------------------------------------------- facts

# Known models as plain values: sizes, licences, files, and which of them are here. Needs no torch.

Facts = dict[str, Any]


def all_facts() -> list[Facts]:
    """The embedded model and every known one."""
    return [builtin(), *(model_facts(entry) for entry in entries().values())]


def facts_by_name(name: str) -> Facts:
    return builtin() if name == "builtin" else model_facts(get(name))


def builtin() -> Facts:
    """The embedded model as its folder has it."""
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
        "note": "Trained on scenes painted by lantern_lab.scenes.",
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


# ------------------------------------------------------------------------------------------ models


@dataclass(frozen=True)
class ModelsRequest:
    """Which models, and for whom."""

    name: str | None = option(
        None, "show details and files of one model", metavar="NAME", positional=True
    )
    json: bool = option(False, "print everything as JSON")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu models",
        description="List known models, and which of them are on this machine.",
    )
    add_fields(parser, ModelsRequest)
    return parser


# ------------------------------------------------------------------------------------ text


def models_table(models: Sequence[Facts]) -> str:
    """One line a model, in columns."""
    rows = [("model", "pixels", "family", "size", "licence", "on this machine")]
    for model in models:
        here = "missing: " + ", ".join(model["missing"])
        if model["here"]:
            here = "yes"
        elif model["missing"] == ["drafter"]:
            here = "yes, but no drafter"
        image, size = str(model["image_size"]), amount(model["bytes"])
        licence = model["licence"].replace(" (label)", "*")
        rows.append((model["name"], image, model["family"], size, licence, here))
    return aligned(rows)


ADVICE = """
get one        lantern-hpu download NAME
see one        lantern-hpu models NAME
what it needs  lantern-hpu plan NAME --memory 24GB

The size is that of all files it draws with, the licence its target's: a part may have another.
* as its page is labelled; see the model's note."""


def model_text(model: Facts) -> str:
    """One model: what it is, its parts, its settings, and the commands."""
    side, grid = model["image_size"], model["grid"]
    image = f"{side} x {side} px, {grid[0]} x {grid[1]} tokens, prefix of {model['prefix']}"
    lines = [f"{model['name']}: {model['title']}", *paragraph("image", image)]
    lines += paragraph("family", model["family"]) + paragraph("size", amount(model["bytes"]))
    lines += paragraph("licence", model["licence"])
    lines += paragraph("sampling", options(model["sampling"]))
    lines += paragraph("note", model["note"])
    for part in model["parts"]:
        lines += ["", *describe_part(part, model)]
    lines += ["", *paragraph("get it", model["get"]), *paragraph("draw", model["draw"])]
    if model["name"] != "builtin":
        lines += paragraph("memory", f"lantern-hpu plan {model['name']} --memory 24GB")
    return "\n".join(lines)


def describe_part(part: Facts, model: Facts) -> list[str]:
    """A part's lines; the embedded model has one, which is a folder."""
    if "repo" not in part:
        return paragraph("files", ", ".join(part["files"])) + paragraph("in", part["path"])
    count = model["parameters"].get(part["part"])
    weights = f", {count / 1e6:,.1f} M parameters in use" if count else ""
    needed = part["needed_for"]
    needed = needed if needed in ("always", "optional") else f"for {needed}"
    head = f"{part['repo']}  {amount(part['bytes'])}{weights}, licence {part['licence']}, {needed}"
    lines = paragraph(part["part"], head)
    lines += paragraph("", "files " + ", ".join(part["files"]))
    if part["path"]:
        lines.append(f"{'':<14}here  {part['path']}")  # a path is never broken
    else:
        lacks = "" if part["missing"] == part["files"] else ": " + ", ".join(part["missing"])
        lines += paragraph("", f"missing{lacks}")
    for other in part["instead"]:
        lines += paragraph("", f"or    {other}")
    if not part["confirmed"]:
        lines += paragraph("", "not confirmed by a public page")
    return lines + paragraph("", part["note"])


def options(sampling: Mapping[str, float]) -> str:
    """Sampling settings as the options that set them."""
    given = [f"--{name.replace('_', '-')} {value:g}" for name, value in sampling.items()]
    return " ".join(text + " (all)" if text == "--top-k 0" else text for text in given)


# ------------------------------------------------------------------------------------ the command


def print_models(asked: ModelsRequest) -> None:
    if asked.name is not None:
        model = facts_by_name(asked.name)
        print(json.dumps(model, indent=2) if asked.json else model_text(model))
        return
    models = all_facts()
    print(json.dumps(models, indent=2) if asked.json else models_table(models) + "\n" + ADVICE)


def main(argv: Sequence[str] | None = None) -> int:
    """The `models` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: print_models(filled(ModelsRequest, args)))
