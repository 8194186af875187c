"""Trees as tensors: a static one says what the tree says, a dynamic one what plain Python builds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from lantern_hpu.decode.common import Drafts, StaticTables
from lantern_hpu.decode.drafting.eagle import DynamicDrafting
from lantern_hpu.decode.spec import Spec
from lantern_hpu.decode.state import DecodeState
from lantern_hpu.ops.kv_cache import KVCache, LayerCache
from lantern_hpu.tree import DynamicTree, load_static
from tests.marks import mostly_slow
from tests.reference import dynamic_tree
from tests.tiny import NAMES, tiny_config, tiny_models

V, IMAGES = 6, 400
Path = tuple[int, ...]


@pytest.mark.parametrize("name", NAMES)
def test_static_tables_are_those_of_the_tree(name: str) -> None:
    tree = load_static(name)
    tables = StaticTables(tree)(2)
    for image in range(2):
        assert tables.parent[image].tolist() == list(tree.parent)
        assert tables.depth[image].tolist() == list(tree.depths)
        assert tables.path[image].tolist() == [list(row) for row in tree.path_table]
        assert tables.ancestors[image].tolist() == [list(row) for row in tree.ancestors]
        for node, below in enumerate(tree.children):
            assert [n for n in tables.child[image, node].tolist() if n] == list(below)
            if below:
                assert tree.expanded[int(tables.row[image, node])] == node


class MadeUp(nn.Module):
    """Made-up probabilities: a feature is the number of a path, and they are looked up by image and number.

    In float64, so that sums of logarithms are equal where those of plain Python are.
    """

    def __init__(self, tree: DynamicTree, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        numbers = sum((V + 1) ** d for d in range(tree.depth))
        # Whole logits make many probabilities and sums of logarithms equal; some tokens have no mass at all.
        logits = torch.randint(-2, 3, (IMAGES, numbers, V), generator=generator).double()
        none = torch.rand(logits.shape, generator=generator) < 0.1 * (seed % 3)
        self.table = logits.masked_fill(none, -1e30).softmax(-1)  # [B, numbers, V]

    def forward(self, features: Tensor, state: Any, depth: Any) -> Tensor:
        return self.table[torch.arange(IMAGES)[:, None], features[..., 0].long()]

    def at(self, image: int, path: Path) -> list[float]:
        number = 0
        for token in path:
            number = number * (V + 1) + token + 1
        probs: list[float] = self.table[image, number].tolist()
        return probs


def grow(tree: DynamicTree, made_up: MadeUp) -> Drafts:
    """The product's drafting with made-up probabilities in place of the networks."""
    target, drafter = tiny_models(tiny_config(vocab_size=V))
    drafting = DynamicDrafting(target, drafter, Spec(IMAGES, False, tree, block=1))
    drafting.sampler = cast(Any, made_up)

    def run(tokens: Tensor, features: Tensor, *_: Any) -> Tensor:
        return features * (V + 1) + tokens[..., None] + 1

    made: Any = drafting
    made.run, made.catch_up = run, lambda *_: torch.zeros(IMAGES, 1, 1)
    root = torch.zeros(IMAGES, dtype=torch.int32)
    cache = KVCache(
        (LayerCache(torch.zeros(0), torch.zeros(0), 0),)
    )  # the faked passes write nothing
    state = SimpleNamespace(root=root, drafting=SimpleNamespace(kv_cache=cache))
    stages = drafting.draft(torch.zeros(IMAGES), torch.zeros(0), cast(DecodeState, state))
    return cast(Drafts, dict(stages)["tables"])


@pytest.mark.parametrize("seed", mostly_slow(range(2), 0))
@pytest.mark.parametrize("sizes", [(3, 2, 8), (2, 3, 14), (4, 1, 5), (1, 2, 2), (5, 0, 3)], ids=str)
def test_dynamic_tables_equal_plain_python(sizes: tuple[int, int, int], seed: int) -> None:
    tree = DynamicTree(*sizes)
    made_up = MadeUp(tree, seed)
    drafts = grow(tree, made_up)
    tables = drafts.tables
    for image in range(IMAGES):
        found = [(), *slow(tree, made_up, image)]
        number = {path: node for node, path in enumerate(found)}
        assert drafts.tokens[image].tolist()[1:] == [path[-1] for path in found[1:]]
        assert tables.parent[image].tolist() == [number[path[:-1]] for path in found]
        assert tables.depth[image].tolist() == [len(path) for path in found]
        for node, path in enumerate(found):
            way = [number[path[:length]] for length in range(len(path) + 1)]
            assert tables.path[image, node].tolist() == way + [node] * (tree.depth - len(path))
            assert tables.ancestors[image, node].nonzero().flatten().tolist() == sorted(way)
            below = [n for n, other in enumerate(found) if other and other[:-1] == path]
            room = tree.top_k - len(below)
            assert tables.child[image, node].tolist() == below + [0] * room


def slow(tree: DynamicTree, made_up: MadeUp, image: int) -> list[Path]:
    return dynamic_tree(
        lambda path: made_up.at(image, path), tree.top_k, tree.expansions, tree.drafts
    )


def test_every_kept_draft_has_its_parent() -> None:
    tree = DynamicTree(3, 3, 12)
    tables = grow(tree, MadeUp(tree, 2)).tables
    node = torch.arange(tree.size)
    assert (tables.parent[:, 1:] < node[1:]).all()
    assert (tables.depth[:, 1:] == tables.depth.gather(1, tables.parent[:, 1:].long()) + 1).all()
