"""Model cards of the Hugging Face Hub for what `train` and `convert` write: README.md of the folder.

Figures come from the folder's own report or are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lantern_hpu.files import reading, write_file
from lantern_hpu.models.config import ModelConfig
from lantern_hpu.zoo.registry import find_model_by_name

CARD, REPORT = "README.md", "report.json"
LICENCES = {"MIT": "mit", "Apache-2.0": "apache-2.0"}  # by the Hub's identifiers; others are named
TAGS = ("image-generation", "speculative-decoding")
REPORT_KIND = "lantern_hpu.train drafter"


@dataclass(frozen=True)
class Subject:
    """What a card is about.

    Attributes:
        model: its name, or that of the drafter's target. config: of the model. fingerprint: of the target's weights.
        part: of a known model, whose licence holds.
    """

    model: str
    config: ModelConfig
    fingerprint: str
    part: str = "target"

    @property
    def repository(self) -> str | None:
        """Of the target's weights on the Hub; None if it is not a known one."""
        entry = find_model_by_name(self.model)
        return entry.parts["target"].repo if entry else None

    @property
    def licence(self) -> str:
        """Of the weights, as their page states it; empty if none is known."""
        if self.model == "builtin":
            return "Apache-2.0"
        entry = find_model_by_name(self.model)
        part = entry.parts.get(self.part, entry.parts["target"]) if entry else None
        return part.licence if part and part.licence != "not stated" else ""

    def command(self, options: str) -> str:
        classes = self.config.condition.kind == "classes"
        what = "--class-label goldfish" if classes else '--prompt "a red apple"'
        return f"lantern-hpu generate {options} {what} --output picture.png"


def drafter_card(
    subject: Subject, folder: str, report: Mapping[str, Any] | None, *tags: str
) -> str:
    """The card of a drafter.

    Args:
        folder: its name. report: of its training; None where it is not known.
    """
    sizes = subject.config.target
    use = subject.command(f"--model {subject.model} --drafter {folder} --method eagle")
    lines = [
        f"# EAGLE drafter for {subject.model}",
        "",
        "One transformer layer that drafts image tokens for speculative decoding. Method `eagle` is lossless:",
        f"images, of {sizes.tokens} tokens each, come from the distribution of {subject.model} itself. The drafter",
        f"belongs to the target with fingerprint `{subject.fingerprint[:12]}`.",
        "",
        *usage(use),
        *drafter_figures(report),
    ]
    return card(subject, lines, ("eagle", *tags))


def folder_card(subject: Subject, folder: str) -> str:
    """The card of a converted model folder."""
    height, width = subject.config.image_size
    drafts = "with" if subject.config.drafter else "without"
    lines = [
        f"# {subject.model}, converted for lantern_hpu",
        "",
        f"The parts of {subject.model} as safetensors files, {drafts} a drafter: {width} x {height} pixels,",
        f"{subject.config.target.tokens} tokens an image. `model.json` has sizes, default sampling and the checksum",
        "of each file. A text encoder is not included.",
        "",
        *usage(subject.command(f"--model {folder}")),
        "Speed and quality were not measured when this folder was written.",
    ]
    return card(subject, lines, ())


def usage(command: str) -> Sequence[str]:
    return ("```bash", 'pip install "lantern-hpu[models]"', command, "```", "")


def drafter_figures(report: Mapping[str, Any] | None) -> list[str]:
    """What its training measured, as a table; or that nothing is known."""
    if report is None:
        return ["Its acceptance was not measured when this folder was written."]
    head = [
        f"Measured on {report['held_out_prompts']} held-out prompts, after step {report['kept_step']}:",
        "",
        "| method | tokens a step | share accepted, by depth |",
        "|---|---|---|",
    ]
    rows = []
    for method in ("eagle", "lantern++"):
        depths = ", ".join(f"{share:.2f}" for share in report[method]["by_depth"])
        rows.append(f"| `{method}` | {report[method]['tokens_per_step']:.2f} | {depths} |")
    return [*head, *rows]


def card(subject: Subject, lines: Sequence[str], tags: Sequence[str]) -> str:
    """The whole text, with the metadata that the Hub reads."""
    from huggingface_hub import ModelCard, ModelCardData

    licence, name = LICENCES.get(subject.licence, "other"), None
    if licence == "other":
        name = re.sub(r"[^a-z0-9.]+", "-", subject.licence.lower()).strip("-")
    data = ModelCardData(
        license=licence if subject.licence else "unknown",
        license_name=name or None,
        base_model=subject.repository,
        library_name="lantern-hpu",
        pipeline_tag="text-to-image",
        tags=[*TAGS, *tags],
    )
    content = "\n".join(["---", data.to_yaml(), "---", "", *lines, ""])
    return str(ModelCard(content))


def report_of(folder: Path) -> dict[str, Any] | None:
    """The report that a training left in a folder; None if there is none."""
    if not (folder / REPORT).is_file():
        return None
    with reading(folder / REPORT) as report:
        return report if report.get("kind") == REPORT_KIND else None


def write_card(folder: Path, make: Any, *what: Any) -> None:
    """Write README.md, unless `huggingface_hub` is missing: then a line on stderr says so."""
    try:
        text = make(*what)
    except ImportError:
        hint = 'pip install "lantern-hpu[models]"'
        print(f"no model card was written: huggingface_hub is missing ({hint})", file=sys.stderr)
        return
    write_file(folder / CARD, text.encode(), force=True)
