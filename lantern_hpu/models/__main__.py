"""The `models` command: which models there are, which are here, and how to get one. Needs no torch.

python -m lantern_hpu.models
python -m lantern_hpu.models llamagen-t2i-256
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

from lantern_hpu.errors import OptionError, choices, exit_code
from lantern_hpu.hub import ASSETS, CONFIG, reading
from lantern_hpu.registry import (
    Entry,
    Located,
    Part,
    draw_command,
    entries,
    find,
    get,
    locate,
    size,
    sources,
)

BUILTIN = ASSETS / "builtin"
WIDTH = 100
Facts = dict[str, Any]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern_hpu.models", description="The known models, and which of them are here."
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="show one model with its files")
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    return parser


# ------------------------------------------------------------------------------------ facts


def builtin() -> Facts:
    """The embedded model as its folder has it.

    Raises:
        WeightsError: its configuration is unreadable.
    """
    with reading(BUILTIN / CONFIG, "install the package again") as config:
        files = {name: (BUILTIN / name) for name in config["files"]}
        rows, columns = config["target"]["grid"]
        pixels = rows << (len(config["vq"]["multipliers"]) - 1)
        sampling, prefix = config["sampling"], config["target"]["prefix"]
    lacking = [name for name, file in files.items() if not file.is_file()]
    return {
        "name": "builtin",
        "title": "the embedded model: small pictures of familiar things",
        "family": "llamagen-t2i",
        "image_size": pixels,
        "grid": [rows, columns],
        "prefix": prefix,
        "licence": "Apache-2.0",
        "note": "Trained on openly licensed icons: see NOTICE.",
        "bytes": sum(f.stat().st_size for f in files.values() if f.is_file()),
        "here": not lacking,
        "missing": lacking,
        "sampling": sampling,
        "parts": [{"part": "all", "path": str(BUILTIN), "files": list(files)}],
        "get": "pip install lantern-hpu",
        "draw": 'python -m lantern_hpu.generate --prompt "a red apple"',
    }


def facts_of(entry: Entry) -> Facts:
    """What there is to say of a known model."""
    located = locate(entry)
    needed = entry.needed()
    return {
        "name": entry.name,
        "title": entry.title,
        "family": entry.family,
        "image_size": entry.image_size,
        "grid": list(entry.grid),
        "prefix": entry.prefix,
        "licence": entry.licence,
        "note": entry.note,
        "bytes": sum(part.bytes or 0 for part in needed),
        "here": not located.missing(),
        "missing": [part.role for part in located.missing()],
        "sampling": dict(entry.sampling),
        "parameters": {
            "target": entry.geometry.target_parameters,
            "drafter": entry.geometry.drafter_parameters,
            "vq": entry.geometry.vq_parameters,
            "text": entry.geometry.text_parameters,
        },
        "parts": [facts_of_part(part, located) for part in entry.parts.values()],
        "get": f"python -m lantern_hpu.download {entry.handle}",
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


# ------------------------------------------------------------------------------------ text


def table(models: Sequence[Facts]) -> str:
    """One line a model, in columns."""
    rows = [("model", "image", "family", "size", "licence", "on this machine")]
    for model in models:
        here = "missing: " + ", ".join(model["missing"])
        if model["here"]:
            here = "yes"
        elif model["missing"] == ["drafter"]:
            here = "yes, but no drafter"
        image = f"{model['image_size']} px"
        rows.append(
            (
                model["name"],
                image,
                model["family"],
                size(model["bytes"]),
                model["licence"].replace(" (label)", "*"),
                here,
            )
        )
    wide = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = [
        "  ".join(f"{text:<{width}}" for text, width in zip(row, wide, strict=True)) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


ADVICE = """
get one        python -m lantern_hpu.download NAME
see one        python -m lantern_hpu.models NAME
what it needs  python -m lantern_hpu.plan NAME --memory 24GB

The size is that of all files it draws with, the licence its target's: a part may have another.
* as its page is labelled; see the model's note."""


def describe(model: Facts) -> str:
    """One model: what it is, its parts, its settings, and the commands."""
    side, grid = model["image_size"], model["grid"]
    rows = [
        (
            "image",
            f"{side} x {side} px, {grid[0]} x {grid[1]} tokens, prefix of {model['prefix']}",
        ),
        ("family", model["family"]),
        ("size", size(model["bytes"])),
        ("licence", model["licence"]),
        ("sampling", options(model["sampling"])),
        ("note", model["note"]),
    ]
    lines = [f"{model['name']}: {model['title']}"]
    for name, text in rows:
        lines += paragraph(name, text)
    for part in model["parts"]:
        lines += ["", *describe_part(part, model)]
    lines += ["", *paragraph("get it", model["get"]), *paragraph("draw", model["draw"])]
    if model["name"] != "builtin":
        lines += paragraph("memory", f"python -m lantern_hpu.plan {model['name']} --memory 24GB")
    return "\n".join(lines)


def describe_part(part: Facts, model: Facts) -> list[str]:
    """A part's lines; the embedded model has one, which is a folder."""
    if "repo" not in part:
        return paragraph("files", ", ".join(part["files"])) + paragraph("in", part["path"])
    count = model["parameters"].get(part["part"])
    weights = f", {count / 1e6:,.1f} M parameters in use" if count else ""
    needed = {"always": "always", "optional": "optional"}.get(
        part["needed_for"], f"for {part['needed_for']}"
    )
    head = f"{part['repo']}  {size(part['bytes'])}{weights}, licence {part['licence']}, {needed}"
    lines = paragraph(part["part"], head)
    lines += paragraph("", "files " + ", ".join(part["files"]))
    if part["path"]:
        lines.append(f"{'':<14}here  {part['path']}")  # a path is never broken
    else:
        lacks = "" if part["missing"] == part["files"] else ": " + ", ".join(part["missing"])
        lines += paragraph("", f"missing{lacks}")
    for other in part["instead"]:
        lines += paragraph("", f"or    {other}")
    lines += [] if part["confirmed"] else paragraph("", "not confirmed by a public page")
    return lines + (paragraph("", part["note"]) if part["note"] else [])


def paragraph(name: str, text: str) -> list[str]:
    """A name and its text, wrapped under itself; nothing where there is no text."""
    indent = f"  {name:<12}"
    return wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )


def options(sampling: Mapping[str, float]) -> str:
    """Sampling settings as the options that set them."""
    said = [f"--{name.replace('_', '-')} {value:g}" for name, value in sampling.items()]
    return " ".join(text + " (all)" if text == "--top-k 0" else text for text in said)


# ------------------------------------------------------------------------------------ the command


def chosen(name: str) -> Facts:
    """One model by name or Hub id.

    Raises:
        OptionError: there is none of that name, or several lie under that id.
    """
    if name == "builtin":
        return builtin()
    if find(name) is None and not sources(name):
        raise OptionError(f"unknown model {name!r}", hint=choices(["builtin", *entries()]))
    return facts_of(get(name))


def run(args: argparse.Namespace) -> None:
    if args.name is not None:
        model = chosen(args.name)
        print(json.dumps(model, indent=2) if args.json else describe(model))
        return
    models = [builtin(), *(facts_of(entry) for entry in entries().values())]
    print(json.dumps(models, indent=2) if args.json else table(models) + "\n" + ADVICE)


def main(argv: Sequence[str] | None = None) -> int:
    """The `models` command; returns the exit code."""
    args = make_parser().parse_args(argv)
    return exit_code(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
