"""The `models` command: which models there are, which are here, and how to get one. Needs no torch.

    lantern-hpu models
    lantern-hpu models llamagen-t2i-256

`models plan`, `models download`, `models convert` and `models stretch` are commands of their own (`cli.py`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from lantern_hpu.commands.options import Parser
from lantern_hpu.errors import exit_code
from lantern_hpu.files import amount, reading
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.models.files.names import BUILTIN, CONFIG
from lantern_hpu.results.tables import aligned, paragraph
from lantern_hpu.zoo.find import Located, draw_command
from lantern_hpu.zoo.registry import KnownModel, Part, entries, get

Facts = dict[str, Any]
ADVICE = """
show one      lantern-hpu models NAME
its memory    lantern-hpu models plan NAME --memory 24GB
download it   lantern-hpu models download NAME

The size is that of all files it draws with, the licence its target's: a part may have another.
* as its page is labelled; see the model's note."""

USAGE = "lantern-hpu models [NAME] [--json]"
OTHERS = """commands for one model, each with its own --help:
  lantern-hpu models plan [NAME]           count the memory that it needs
  lantern-hpu models download NAME         fetch it from the Hugging Face Hub
  lantern-hpu models convert NAME FOLDER   write its checkpoints as one model folder
  lantern-hpu models stretch NAME          write a small model at the sizes of a large one"""


def builtin_facts() -> Facts:
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
        "get": "pip install -c constraints.txt -e .",
        "draw": 'python -m lantern_hpu.generate --prompt "a red apple"',
    }


def detailed_facts(entry: KnownModel) -> Facts:
    """With the number of its parameters, which loads torch."""
    from lantern_hpu.models.model import parameters_of

    return model_facts(entry) | {"parameters": parameters_of(entry.config)}


def model_facts(entry: KnownModel) -> Facts:
    located = Located(entry)
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
        "parts": [part_facts(part, located) for part in entry.parts.values()],
        "get": f"lantern-hpu models download {entry.handle}",
        "draw": draw_command(entry),
    }


def part_facts(part: Part, located: Located) -> Facts:
    path = located[part.role]
    known = "repo page files bytes sha256 licence needed_for confirmed instead note".split()
    return {
        "part": part.role,
        **{name: getattr(part, name) for name in known},
        "instead": [source.repo for source in part.instead],
        "path": None if path is None else str(path),
        "missing": located.absent.get(part.role, ()),
    }


def models_table(models: Sequence[Facts]) -> str:
    rows = [("model", "pixels", "family", "size", "licence", "on this machine")]
    for model in models:
        here = "yes" if model["here"] else "missing: " + ", ".join(model["missing"])
        if model["missing"] == ["drafter"]:
            here = "yes, but no drafter"
        image, size = str(model["image_size"]), amount(model["bytes"])
        licence = model["licence"].replace(" (label)", "*")
        rows.append((model["name"], image, model["family"], size, licence, here))
    return aligned(rows)


def model_text(model: Facts) -> str:
    """One model: what it is, its parts, its settings, and the commands."""
    side, grid = model["image_size"], model["grid"]
    image = f"{side} x {side} px, {grid[0]} x {grid[1]} tokens, prefix of {model['prefix']}"
    said = {
        "image": image,
        "family": model["family"],
        "size": amount(model["bytes"]),
        "licence": model["licence"],
        "sampling": sampling_text(model["sampling"]),
        "note": model["note"],
    }
    lines = [f"{model['name']}: {model['title']}"]
    lines += [line for name, text in said.items() for line in paragraph(name, text)]
    for part in model["parts"]:
        lines += ["", *part_lines(part, model)]
    lines += ["", *paragraph("get it", model["get"]), *paragraph("draw", model["draw"])]
    if model["name"] != "builtin":
        lines += paragraph("memory", f"lantern-hpu models plan {model['name']} --memory 24GB")
    return "\n".join(lines)


def part_lines(part: Facts, model: Facts) -> list[str]:
    """A part; the embedded model has one, which is a folder."""
    if "repo" not in part:
        return paragraph("files", ", ".join(part["files"])) + paragraph("in", part["path"])
    count = model["parameters"].get(part["part"])
    weights = f", {count / 1e6:,.1f} M parameters in use" if count else ""
    needed = part["needed_for"]
    needed = needed if needed in ("always", "optional") else f"for {needed}"
    head = f"{part['repo']}  {amount(part['bytes'])}{weights}, licence {part['licence']}, {needed}"
    lines = paragraph(part["part"], head) + paragraph("", "files " + ", ".join(part["files"]))
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


def sampling_text(sampling: Mapping[str, float]) -> str:
    given = [f"--{name.replace('_', '-')} {value:g}" for name, value in sampling.items()]
    return " ".join(text + " (all)" if text == "--top-k 0" else text for text in given)


def make_parser() -> argparse.ArgumentParser:
    about = "List known models and which of them are on this machine, or show one."
    parser = Parser("lantern-hpu models", usage=USAGE, description=about, epilog=OTHERS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="show details and files of one model")
    add("--json", action="store_true", help="print everything as JSON")
    return parser


def print_models(name: str | None, as_json: bool) -> None:
    if name is not None:
        shown = builtin_facts() if name == "builtin" else detailed_facts(get(name))
        print(json.dumps(shown, indent=2) if as_json else model_text(shown))
        return
    facts = detailed_facts if as_json else model_facts
    models = [builtin_facts(), *map(facts, entries().values())]
    print(json.dumps(models, indent=2) if as_json else models_table(models) + "\n" + ADVICE)


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    return exit_code(lambda: print_models(args.name, args.json))
