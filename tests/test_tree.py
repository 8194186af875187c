"""Draft trees: the named ones are the published ones, derived tables are what they say, bad files are refused."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from lantern_hpu.errors import TreeError
from lantern_hpu.tree import NAMED, DraftTree, DynamicTree, Window, load_static, load_tree
from scripts.docs.tree_diagrams import as_text
from tests.tiny import NAMES, random_tree

# Child counts of nodes that have any, in the order of their numbers.
CHILD_COUNTS = {
    "naive_extend_57": [5, 4, 3, 3, 2, 1, 4, 3, 3, 2, 2, 1, 1, 4, 3, 2, 1, 2, 1, 1, 3, 2, 2, 1, 1],
    "mc_sim_7b_63": [4, 3, 2, 2, 1, 3, 2, 2, 1, 3, 2],
    "mc_sim_7b_63_balanced": [3, 3, 3, 2, 3, 2, 2, 2, 3, 2],
    "reverse_balanced_25": [3, 2, 1, 1, 3, 2, 1, 3, 2, 4, 3],
    "medusa_2_7b_63": [10, 10, 5, 2, 2, 1, 1, 1, 1, 9, 4, 2, 1, 1, 1, 3, 1, 1, 4, 1, 1, 1],
    "chain": [1, 1, 1, 1, 1],
    "chain_2": [1, 1],
    "flat_4": [4],
    "broad_7": [4, 2, 1],
    "deep_7": [2, 2, 1, 1, 1],
}
# The one node list that counts alone would not pin down: depth 3 of the default tree.
DEFAULT_DEPTH_3 = "000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200"


TREES = [*map(load_tree, NAMES), *map(random_tree, range(40))]


def test_named_trees_are_the_published_ones() -> None:
    assert set(NAMED) == set(NAMES) == set(CHILD_COUNTS)
    for name, counts in CHILD_COUNTS.items():
        tree = load_static(name)
        assert [len(tree.children[node]) for node in tree.expanded] == counts
    third = [tree_path for tree_path in load_static("naive_extend_57").paths if len(tree_path) == 3]
    assert ["".join(map(str, path)) for path in third] == DEFAULT_DEPTH_3.split()


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_tables_match_their_definitions(tree: DraftTree) -> None:
    paths = tree.paths
    assert paths[0] == () and list(paths) == sorted(paths, key=lambda p: (len(p), p))
    for node, path in enumerate(paths):
        prefixes = [path[:n] for n in range(len(path) + 1)]
        assert tree.depths[node] == len(path)
        assert paths[tree.parent[node]] == path[:-1]
        assert {n for n, seen in enumerate(tree.ancestors[node]) if seen} == set(
            map(paths.index, prefixes)
        )
        assert [paths[n] for n in tree.children[node]] == [p for p in paths[1:] if p[:-1] == path]
        walk = [paths[n] for n in tree.path_table[node]]
        assert walk == prefixes + [path] * (tree.depth - len(path))
    parents = sorted({paths.index(path[:-1]) for path in paths[1:]})
    assert list(tree.expanded) == parents
    assert [n for level in tree.frontiers for n in level] == parents
    assert all(tree.depths[n] == depth for depth, level in enumerate(tree.frontiers) for n in level)
    assert [n for level in tree.levels for n in level] == list(range(tree.size))


def test_order_of_listed_paths_does_not_matter() -> None:
    tree = load_static("mc_sim_7b_63")
    assert DraftTree.from_paths(tree.name, [*reversed(tree.paths)]) == tree


def test_user_tree_loads_from_either_json_form(tmp_path: Path) -> None:
    paths = [[1], [0], [0, 0]]
    bare, named = tmp_path / "mine.json", tmp_path / "other.json"
    bare.write_text(json.dumps(paths))
    named.write_text(json.dumps({"name": "ours", "paths": paths}))
    assert load_static(str(bare)).name == "mine"
    assert load_static(str(named)).name == "ours"
    assert load_static(str(bare)).paths == load_static(str(named)).paths == ((), (0,), (1,), (0, 0))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[[0], [0, 0], [0]]", "lists node 0 twice"),
        ("[[0], [1, 0]]", "has node 1.0: but not its parent 1"),
        ("[[0], [2]]", "has node 2: but not the sibling 1 before it"),
        ("[[-1]]", "ranks are whole numbers from 0"),
        ("[[0.5]]", "ranks are whole numbers from 0"),
        ('[["0"]]', "ranks are whole numbers from 0"),
        ("[]", "holds no tree"),
        ("[[]]", "holds no tree"),
        ("{}", "holds no tree"),
        ("[[0], 1]", "holds no tree"),
        ("3", "holds no tree"),
        ("[[0], ", "cannot read the tree"),
        (json.dumps([[rank] for rank in range(11)]), "rank 10 at node 10: the drafter draws 10"),
    ],
)
def test_malformed_tree_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(TreeError, match=complaint):
        load_static(str(file))


@pytest.mark.parametrize("tree", TREES[:12], ids=lambda tree: tree.name)
def test_text_drawing_shows_every_node_once(tree: DraftTree) -> None:
    title, _, root, *rows = as_text(tree).split("\n")
    assert (
        title == f"{tree.name}: {tree.size - 1} drafts + root, depth {tree.depth}"
        and root == "root"
    )
    shown = [row.split("─ ")[1] for row in rows]
    assert sorted(shown) == sorted(".".join(map(str, path)) for path in tree.paths[1:])


@pytest.mark.parametrize(
    ("name", "sizes"), [("dynamic", (10, 4, 58)), ("dynamic:3x0x2", (3, 0, 2))]
)
def test_dynamic_tree_by_name(name: str, sizes: tuple[int, int, int]) -> None:
    tree = load_tree(name)
    assert tree == DynamicTree(*sizes) and load_tree(tree.name) == tree
    _, expansions, drafts = sizes
    assert (tree.size, tree.depth) == (drafts + 1, expansions + 1)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("dynamic:3x2", "expected top-k, expansions and drafts"),
        ("dynamic:axbxc", "expected top-k, expansions and drafts"),
        ("dynamic:0x1x1", "top-k is 1 to 64, the depth 0 to 16"),
        ("dynamic:3x17x9", "top-k is 1 to 64, the depth 0 to 16"),
        ("dynamic:64x2x58", "8256 candidates"),
        ("dynamic:3x1x13", "there are 12 candidates"),
        ("dynamic:3x1x0", "there are 12 candidates"),
    ],
)
def test_dynamic_tree_that_cannot_be_grown_is_refused(name: str, why: str) -> None:
    with pytest.raises(TreeError, match=why):
        load_tree(name)


def test_a_tree_too_large_to_draw_with_is_refused_before_it_is_built() -> None:
    """Its paths may be a stranger's: those of a PNG are not trusted."""
    levels = [path for depth in range(1, 5) for path in product(range(10), repeat=depth)]
    assert len(levels) == 11_110
    for paths in (levels, [(0,) * 10**6], [(0,)] * 10**6):
        with pytest.raises(TreeError, match="512 drafts at most"):
            DraftTree.from_paths("wide", paths)
    with pytest.raises(TreeError, match="512 drafts at most"):
        Window.parse("sjd-pac:256:64x256")
    assert DraftTree.from_paths("wide", levels[:512]).size == 513
    assert Window.parse("sjd-pac:256:3x3").size == 263
