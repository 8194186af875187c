"""Trees that were tuned on this machine: what `METHOD@auto` takes.

One file for each situation - model, drafter, device, format, graph mode, method and batch size - in the user's
cache. It is a tree file that also holds what it was tuned for and whether drafting pays there at all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lantern_hpu.errors import Arg, LanternError, OptionError, TreeError, shell
from lantern_hpu.files import own_cache, parse_json, write_file
from lantern_hpu.tree import MOST_CHILDREN, DraftTree, Rule, Window, load_static

Situation = dict[str, Any]  # what a tree was tuned for, `batch_size` among it


@dataclass(frozen=True)
class TunedTree:
    """The fastest tree that was measured, and how many times as fast as one token a step it was in the same run."""

    tree: DraftTree
    times_ar: float

    @property
    def ar_wins(self) -> bool:
        return self.times_ar <= 1


def file_of(situation: Situation) -> Path:
    """Where the tree of a situation is kept."""
    digest = hashlib.sha256(json.dumps(situation, sort_keys=True).encode()).hexdigest()
    return own_cache("trees") / f"{digest[:32]}.json"


def tree_file(tree: DraftTree, about: dict[str, Any] | None = None) -> bytes:
    """A tree as `load_static` reads it."""
    data = {"name": tree.name, "paths": [list(path) for path in tree.paths[1:]], **(about or {})}
    return json.dumps(data).encode()


def save_tree(situation: Situation, tuned: TunedTree) -> Path:
    """Keep a tree in place of an earlier one. -> its file"""
    file = file_of(situation)
    about = {"times_ar": tuned.times_ar, "tuned_for": situation}
    write_file(file, tree_file(tuned.tree, about), force=True)
    return file


def find_tree(situation: Situation) -> TunedTree:
    file = file_of(situation)
    if not file.is_file():
        method = situation["method"]
        batch = situation["batch_size"]
        why = f"none was tuned for {method} and batches of {batch} on this device"
        sizes = ", ".join(map(str, sorted(batch_sizes(situation))))
        if sizes:
            why += f"; there is one for batches of {sizes}"
        hint = shell("tune", Arg("method", method), Arg("batch_size", batch))
        what = f"{method}@auto found no tuned tree"
        raise OptionError(what, why, f"{hint}, with the same model and device")
    tree = load_static(str(file), MOST_CHILDREN)
    if tree.name.partition(":")[0] in get_args(Rule):
        tree = Window.parse(tree.name)  # whose name says all there is to know
    try:
        return TunedTree(tree, float(parse_json(file.read_text())["times_ar"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "delete it, and tune again"
        raise TreeError(f"{file} is damaged", f"it lacks {error}", hint) from error


def tuned_methods(situation: Situation, methods: Iterable[str]) -> dict[str, TunedTree]:
    """By method, of those that were tuned in a situation."""
    tuned = {}
    for method in methods:
        here = situation | {"method": method}
        # These were not asked for: what is damaged, or kept where others may write, is ignored
        with suppress(LanternError):
            if file_of(here).is_file():
                tuned[method] = find_tree(here)
    return tuned


def batch_sizes(situation: Situation) -> Iterator[int]:
    """Batch sizes that were tuned in a situation that is the same otherwise."""
    for file in own_cache("trees").glob("*.json"):
        try:
            other = parse_json(file.read_text())["tuned_for"]
            if other | {"batch_size": None} == situation | {"batch_size": None}:
                yield other["batch_size"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, or not ours
