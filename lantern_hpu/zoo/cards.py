"""Model cards for the Hugging Face Hub (README.md of a folder): of what `train` and `models convert` write.

Figures come from the folder's own report or are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lantern_hpu.console import Console
from lantern_hpu.errors import Arg, as_option, shell
from lantern_hpu.files import write_file
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.zoo.registry import find_model_by_name

LICENCES = {"MIT": "mit", "Apache-2.0": "apache-2.0"}  # by the Hub's identifiers; others are named
# Methods in a trained drafter's report; the second where neighbours are known
MEASURED = ("eagle", "lantern++")

CARD = """---
{metadata}
---

# {title}

{about} An image of {model} has {width} x {height} pixels of {tokens} tokens.
The target's fingerprint is `{fingerprint}`.

```bash
pip install "lantern-hpu[models]"
{command} {result}
```

{measured}
"""
DRAFTER = """One transformer layer that drafts image tokens for speculative decoding. Method `eagle` is lossless:
images come from the distribution of {model} itself."""
FOLDER = """The parts of {model} as safetensors files, {drafts} a drafter. `model.json` has sizes, default sampling and
the checksum of each file. A text encoder is not included."""
FIGURES = """Measured on {held_out_prompts} held-out prompts, after step {kept_step}:

| method | tokens a step | share accepted, by depth |
|---|---|---|
"""


def card(
    model: str,
    config: ModelConfig,
    fingerprint: str,
    folder: str,
    report: Mapping[str, Any] | None = None,
) -> str:
    """The card of a converted folder; of a trained drafter where there is the `report` of its training.

    Args:
        model: name of the target. fingerprint: of its weights. folder: that the command names.
    """
    options, title = [Arg("model", folder)], f"{model}, converted for lantern_hpu"
    about, tags, measured = FOLDER, [], "Speed and quality were not measured."
    if report is not None:
        options = [Arg("model", model), Arg("drafter", folder), Arg("method", "eagle")]
        title, about, tags = f"EAGLE drafter for {model}", DRAFTER, ["eagle"]
        measured = FIGURES.format(**report) + "\n".join(figures(report))
    classes = config.condition.kind == "classes"
    prompt = Arg("class_label", "goldfish") if classes else Arg("prompt", "a red apple")
    height, width = config.image_size
    return CARD.format(
        metadata=card_metadata(model, tags),
        title=title,
        about=about.format(model=model, drafts="with" if config.drafter else "without"),
        model=model,
        width=width,
        height=height,
        tokens=config.target.tokens,
        fingerprint=fingerprint[:12],
        command=shell("generate", *options, prompt),
        result=as_option(config.result),
        measured=measured,
    )


def figures(report: Mapping[str, Any]) -> list[str]:
    """Rows of a table of what a drafter's training measured."""
    rows = []
    for method in (name for name in MEASURED if name in report):
        depths = ", ".join(f"{share:.2f}" for share in report[method]["by_depth"])
        rows.append(f"| `{method}` | {report[method]['tokens_per_step']:.2f} | {depths} |")
    return rows


def card_metadata(model: str, tags: Sequence[str]) -> str:
    """What the Hub reads, as YAML: the target's repository and licence, where they are known."""
    from huggingface_hub import ModelCardData

    entry = find_model_by_name(model)
    target = entry.parts["target"] if entry else None
    said = "Apache-2.0" if model == "builtin" else target.licence if target else "not stated"
    licence = "unknown" if said == "not stated" else LICENCES.get(said, "other")
    name = re.sub(r"[^a-z0-9.]+", "-", said.lower()).strip("-")
    data = ModelCardData(
        license=licence,
        license_name=name if licence == "other" else None,
        base_model=target.repo if target else None,
        library_name="lantern-hpu",
        pipeline_tag="text-to-image",
        tags=["image-generation", "speculative-decoding", *tags],
    )
    return str(data.to_yaml())


def write_card(folder: Path, *about: Any) -> None:
    """Write README.md by `card`, unless `huggingface_hub` is missing: then a line on stderr says so."""
    try:
        text = card(*about)
    except ImportError:
        hint = 'pip install "lantern-hpu[models]"'
        said = f"no model card was written: huggingface_hub is missing ({hint})"
        print(said, file=Console(sys.stderr))
        return
    write_file(folder / "README.md", text.encode(), force=True)
