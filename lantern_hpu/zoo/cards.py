"""Model cards for the Hugging Face Hub (README.md of a folder): of what `train` and `convert` write.

Figures come from the folder's own report or are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_hpu.console import Console
from lantern_hpu.errors import Arg, as_option, shell
from lantern_hpu.files import write_file
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.zoo.registry import find_model_by_name

LICENCES = {"MIT": "mit", "Apache-2.0": "apache-2.0"}  # by the Hub's identifiers; others are named
TAGS = ("image-generation", "speculative-decoding")
# Methods in a trained drafter's report; the second where neighbours are known
MEASURED = ("eagle", "lantern++")

DRAFTER = """# EAGLE drafter for {model}

One transformer layer that drafts image tokens for speculative decoding. Method `eagle` is lossless:
images, of {tokens} tokens each, come from the distribution of {model} itself. The drafter
belongs to the target with fingerprint `{fingerprint}`.
"""
FOLDER = """# {model}, converted for lantern_hpu

The parts of {model} as safetensors files, {drafts} a drafter: {width} x {height} pixels,
{tokens} tokens an image. `model.json` has sizes, default sampling and the checksum
of each file. A text encoder is not included.
"""
USAGE = """
```bash
pip install "lantern-hpu[models]"
{command} {result}
```

"""
FIGURES = """Measured on {held_out_prompts} held-out prompts, after step {kept_step}:

| method | tokens a step | share accepted, by depth |
|---|---|---|
"""


@dataclass(frozen=True)
class Subject:
    """What a card is about: a model, or the drafter of one; `fingerprint` is of the target's weights."""

    model: str
    config: ModelConfig
    fingerprint: str

    def metadata(self, tags: Sequence[str]) -> str:
        """What the Hub reads, as YAML: the target's repository and licence, where they are known."""
        from huggingface_hub import ModelCardData

        entry = find_model_by_name(self.model)
        target = entry.parts["target"] if entry else None
        said = "Apache-2.0" if self.model == "builtin" else target.licence if target else ""
        said = "" if said == "not stated" else said
        licence = LICENCES.get(said, "other") if said else "unknown"
        name = re.sub(r"[^a-z0-9.]+", "-", said.lower()).strip("-")
        data = ModelCardData(
            license=licence,
            license_name=name if licence == "other" else None,
            base_model=target.repo if target else None,
            library_name="lantern-hpu",
            pipeline_tag="text-to-image",
            tags=[*TAGS, *tags],
        )
        return str(data.to_yaml())

    def card(self, text: str, options: Sequence[Arg], end: str, *tags: str) -> str:
        """A text of what it is, the command that draws with it by these options, and what was measured."""
        height, width = self.config.image_size
        prompt = Arg("prompt", "a red apple")
        if self.config.condition.kind == "classes":
            prompt = Arg("class_label", "goldfish")
        body = (text + USAGE).format(
            model=self.model,
            tokens=self.config.target.tokens,
            fingerprint=self.fingerprint[:12],
            drafts="with" if self.config.drafter else "without",
            width=width,
            height=height,
            command=shell("generate", *options, prompt),
            result=as_option(self.config.result),
        )
        return f"---\n{self.metadata(tags)}\n---\n\n{body}{end}\n"


def drafter_card(subject: Subject, folder: str, report: Mapping[str, Any]) -> str:
    """The card of a trained drafter, with what its training measured."""
    options = Arg("model", subject.model), Arg("drafter", folder), Arg("method", "eagle")
    rows = []
    for method in (name for name in MEASURED if name in report):
        depths = ", ".join(f"{share:.2f}" for share in report[method]["by_depth"])
        rows.append(f"| `{method}` | {report[method]['tokens_per_step']:.2f} | {depths} |")
    return subject.card(DRAFTER, options, FIGURES.format(**report) + "\n".join(rows), "eagle")


def folder_card(subject: Subject, folder: str) -> str:
    end = "Speed and quality were not measured when this folder was written."
    return subject.card(FOLDER, [Arg("model", folder)], end)


def write_card(folder: Path, make: Any, *what: Any) -> None:
    """Write README.md, unless `huggingface_hub` is missing: then a line on stderr says so."""
    try:
        text = make(*what)
    except ImportError:
        hint = 'pip install "lantern-hpu[models]"'
        said = f"no model card was written: huggingface_hub is missing ({hint})"
        print(said, file=Console(sys.stderr))
        return
    write_file(folder / "README.md", text.encode(), force=True)
