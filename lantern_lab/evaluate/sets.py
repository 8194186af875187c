"""What is drawn: prompts with the names that their pictures go by. Needs no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from lantern_hpu.core import check_text
from lantern_hpu.errors import Arg, OptionError, choices, words
from lantern_hpu.files import parse_json, read_text, write_file
from lantern_hpu.results.images import encode, grid
from lantern_hpu.results.prompts import numbered_prompts


@dataclass(frozen=True)
class Item:
    """A picture that is to be drawn.

    Attributes:
        id: its file's name without the ending; unique.
    """

    id: str
    prompt: str


def digest(items: Sequence[Item]) -> str:
    """Of all ids and prompts: two lists are one set or not."""
    text = json.dumps([[item.id, item.prompt] for item in items])
    return hashlib.sha256(text.encode()).hexdigest()


# ------------------------------------------------------------------------------------ prompt sets


COCO_HINT = "captions_val2017.json of https://cocodataset.org (2017 Train/Val annotations)"


def coco(file: Path, rule: str, count: int | None = None) -> list[Item]:
    """A caption of each picture of a COCO annotation file, by ascending id of the picture.

    Args:
        rule: "longest" (the first of the longest), or "first". count: pictures, all if not given.
    """
    by_picture: dict[int, list[str]] = {}
    where = "the file"  # that is read
    try:
        for number, entry in enumerate(parse_json(read_text(file))["annotations"]):
            where = f"annotation {number}"
            by_picture.setdefault(int(entry["image_id"]), []).append(str(entry["caption"]).strip())
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{where} has no {error}" if isinstance(error, KeyError) else f"{where}: {error}"
        raise OptionError(f"cannot read captions from {file}", why, COCO_HINT) from error
    chosen = sorted(by_picture)[:count]
    if not chosen:
        raise OptionError(f"{file} holds no captions", hint=COCO_HINT)
    pick = (lambda texts: max(texts, key=len)) if rule == "longest" else (lambda texts: texts[0])
    return [Item(f"{number:012d}", pick(by_picture[number])) for number in chosen]


def plain(file: Path) -> list[Item]:
    """Prompts of a file, named by their place."""
    return [Item(f"{i:06d}", text) for i, text in numbered_prompts(file).items()]


def classes(each: int) -> list[Item]:
    """n pictures of each class of ImageNet, a round of all classes at a time."""
    return [Item(f"{label:04d}-{k:02d}", str(label)) for k in range(each) for label in range(1000)]


def lines_of(file: Path) -> list[str]:
    return [line for line in read_text(file).split("\n") if line.strip()]


def geneval(file: Path) -> list[Item]:
    """Four pictures of each prompt of GenEval's evaluation_metadata.jsonl."""
    try:
        prompts = [str(parse_json(line)["prompt"]) for line in lines_of(file)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"cannot read prompts from {file}", str(error), WHERE["geneval"]
        ) from error
    return [Item(f"{i:05d}-{k:04d}", text) for i, text in enumerate(prompts) for k in range(4)]


def dpg(folder: Path) -> list[Item]:
    """Four pictures of each prompt of DPG-Bench's folder of text files."""
    files = sorted(file for file in folder.glob("*.txt") if not file.name.startswith("."))
    if not files:
        hint = "dpg_bench/prompts of https://github.com/TencentQQGYLab/ELLA"
        raise OptionError(f"{folder} holds no .txt files", "a prompt each was expected", hint)
    try:
        texts = {file.stem: read_text(file).strip() for file in files}
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read prompts from {folder}", str(error)) from error
    return [Item(f"{name}-{k}", text) for name, text in texts.items() for k in range(4)]


def compbench(file: Path) -> list[Item]:
    """Ten pictures of each prompt of a file of T2I-CompBench, numbered through."""
    texts = [text for text in numbered_prompts(file).values() for _ in range(10)]
    return [Item(f"{i:06d}", text) for i, text in enumerate(texts)]


# Readers of sets, and where the user gets what they read
READERS: dict[str, Callable[[Path], list[Item]]] = {
    "parti": plain,
    "file": plain,
    "geneval": geneval,
    "dpg": dpg,
    "t2i-compbench": compbench,
}
WHERE = {
    "coco-val2017": COCO_HINT,
    "coco-val2014-30k": "captions_val2014.json of https://cocodataset.org (2014 Train/Val annotations)",
    "parti": "PartiPrompts.tsv of https://github.com/google-research/parti",
    "geneval": "evaluation_metadata.jsonl of https://github.com/djghosh13/geneval",
    "dpg": "the folder dpg_bench/prompts of https://github.com/TencentQQGYLab/ELLA",
    "t2i-compbench": "a file of examples/dataset of https://github.com/Karine-Huang/T2I-CompBench",
    "file": ".txt, .tsv, .csv, .json or .jsonl",
}
SETS = ("coco-val2017", "coco-val2014-30k", "imagenet-50k", *READERS)


def read_set(name: str, file: Path | None, rule: str, count: int | None) -> list[Item]:
    """A set of prompts.

    Args:
        file: what the user has of it. count: of its first pictures, all if not given.
    """
    if name not in SETS:
        raise OptionError(f"unknown prompts {name!r}", hint=choices(SETS))
    if name == "imagenet-50k":
        return classes(50)[:count]
    if file is None:
        why = f"the prompts of {name} do not come with this package"
        hint = words(Arg("prompts_file", "FILE"), f"; {WHERE[name]}")
        raise OptionError(words(Arg("prompts_file"), "is missing"), why, hint)
    if name.startswith("coco"):
        most = 30_000 if name.endswith("30k") else None
        result = coco(file, rule, most)
    else:
        result = READERS[name](file)
    for item in result[:count]:
        check_text(f"prompt {item.id} of {file}", item.prompt)
    return result[:count]


def export(
    name: str, items: Sequence[Item], places: Mapping[str, Path], source: Path, to: Path
) -> None:
    """Pictures in the layout that a benchmark reads.

    GenEval: NUMBER/metadata.jsonl and NUMBER/samples/0000.png to 0003.png. DPG: NAME.png, a sheet of 2 x 2.
    T2I-CompBench: samples/PROMPT_000000.png, numbered through.

    Args:
        name: "geneval", "dpg" or "t2i-compbench". places: pictures by the items' ids. source: the set's own file.
        to: an empty or new folder.
    """
    if name == "geneval":
        lines = lines_of(source)
        for item in items:
            prompt, _, sample = item.id.partition("-")
            folder = to / prompt
            write_file(folder / "metadata.jsonl", lines[int(prompt)].encode() + b"\n", force=True)
            write_file(
                folder / "samples" / f"{sample}.png", places[item.id].read_bytes(), force=True
            )
        return
    if name == "t2i-compbench":
        for item in items:
            if "/" in item.prompt:
                raise OptionError(f"{item.prompt!r} names no file", "it has a slash")
            file = to / "samples" / f"{item.prompt}_{item.id}.png"
            write_file(file, places[item.id].read_bytes(), force=True)
        return
    by_name: dict[str, list[Image.Image]] = {}
    for item in items:
        by_name.setdefault(item.id.rpartition("-")[0], []).append(Image.open(places[item.id]))
    for stem, pictures in by_name.items():
        write_file(to / f"{stem}.png", encode(grid(pictures, 2, gap=0)), force=True)
