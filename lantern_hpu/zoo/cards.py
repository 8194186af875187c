"""Model cards for the Hugging Face Hub (README.md of a folder): of what `train` and `models convert` write.

Figures come from the folder's own report or are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lantern_hpu.core import IMAGENET_CLASSES
from lantern_hpu.errors import Arg, as_option, shell
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.zoo.registry import find_model_by_name

# The Hub's identifiers; other licences are named
LICENCES = {"MIT": "mit", "Apache-2.0": "apache-2.0", "not stated": "unknown"}
# Methods in a trained drafter's report; the second where neighbours are known
MEASURED = ("eagle", "lantern++")

CARD = """---
{metadata}
---

# {title}

{about} An image of {model} has {width} x {height} pixels of {tokens} tokens.
The target's fingerprint is `{fingerprint}`.

```bash
pip install -c constraints.txt -e ".[models]"  # in a clone of lantern_hpu: no package index has it yet
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
) -> bytes:
    """README.md of a converted folder; of a trained drafter where there is the `report` of its training.

    Args:
        model: name of the target. fingerprint: of its weights. folder: that the command names.
    """
    options, title = [Arg("model", folder)], f"{model}, converted for lantern_hpu"
    about, tags, measured = FOLDER, [], "Speed and quality were not measured."
    if report is not None:
        options = [Arg("model", model), Arg("drafter", folder), Arg("method", "eagle")]
        title, about, tags = f"EAGLE drafter for {model}", DRAFTER, ["eagle"]
        measured = FIGURES.format(**report) + "\n".join(figures(report))
    named = {0: "a red apple", IMAGENET_CLASSES: "goldfish"}
    prompt = Arg("prompt", named.get(config.condition.classes, "0"))
    height, width = config.image_size
    text = CARD.format(
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
    return text.encode()


def figures(report: Mapping[str, Any]) -> list[str]:
    """Rows of a table of what a drafter's training measured."""
    rows = []
    for method in (name for name in MEASURED if name in report):
        depths = ", ".join(f"{share:.2f}" for share in report[method]["by_depth"])
        rows.append(f"| `{method}` | {report[method]['tokens_per_step']:.2f} | {depths} |")
    return rows


def card_metadata(model: str, tags: Sequence[str]) -> str:
    """What the Hub reads, as YAML: the target's repository and licence, where they are known."""
    entry = find_model_by_name(model)
    target = entry.parts["target"] if entry else None
    stated = "Apache-2.0" if model == "builtin" else target.licence if target else "not stated"
    licence = LICENCES.get(stated, "other")
    lines = [f"license: {licence}"]
    if licence == "other":
        lines.append("license_name: " + re.sub(r"[^a-z0-9.]+", "-", stated.lower()).strip("-"))
    if target:
        lines.append(f"base_model: {target.repo}")
    tags = ["image-generation", "speculative-decoding", *tags]
    lines += ["library_name: lantern-hpu", "pipeline_tag: text-to-image"]
    return "\n".join([*lines, f"tags: [{', '.join(tags)}]"])
