"""Draft trees drawn with lines, as the reference shows the named ones.

python -m scripts.docs.tree_diagrams deep_7
python -m scripts.docs.tree_diagrams my_tree.json
"""

from __future__ import annotations

import argparse
import sys

from lantern_hpu.errors import exit_code
from lantern_hpu.tree import DraftTree, dotted, load_static


def as_text(tree: DraftTree) -> str:
    """A line for each node: its path of sibling ranks."""
    widths = "/".join(str(len(level)) for level in tree.levels[1:])
    rows = [
        f"{tree.name}: {tree.size - 1} drafts + root, depth {tree.depth}",
        f"drafts by depth {widths}, {len(tree.expanded)} nodes with children",
        "root",
    ]

    def draw(node: int, indent: str) -> None:
        children = tree.children[node]
        for child in children:
            last = child == children[-1]
            rows.append(f"{indent}{'└─' if last else '├─'} {dotted(tree.paths[child])}")
            draw(child, indent + ("   " if last else "│  "))

    draw(0, "")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description="Draw a draft tree with lines.")
    parser.add_argument("tree", help="a named tree, or a .json file")
    args = parser.parse_args()
    return exit_code(lambda: print(as_text(load_static(args.tree))))


if __name__ == "__main__":
    sys.exit(main())
