"""Draft trees drawn as text and as SVG pictures. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lantern_hpu.tree import DraftTree, dotted


def title(tree: DraftTree) -> str:
    return f"{tree.name}: {tree.size - 1} drafts + root, depth {tree.depth}"


def as_text(tree: DraftTree, labels: Sequence[str] | None = None) -> str:
    """The tree drawn with lines, one node a row; with a label for each node if given."""
    widths = "/".join(str(len(level)) for level in tree.levels[1:])
    rows = [
        title(tree),
        f"drafts by depth {widths}, {len(tree.expanded)} nodes with children",
        "root",
    ]

    def draw(node: int, indent: str) -> None:
        children = tree.children[node]
        for child in children:
            last = child == children[-1]
            said = f"  {labels[child]}" if labels else ""
            rows.append(f"{indent}{'└─' if last else '├─'} {dotted(tree.paths[child])}{said}")
            draw(child, indent + ("   " if last else "│  "))

    draw(0, "")
    return "\n".join(rows)


def columns_of(tree: DraftTree) -> list[float]:
    """A horizontal place for each node: leaves in path order, parents above the middle of their children."""
    place = [0.0] * tree.size
    leaves = sorted((p, n) for n, p in enumerate(tree.paths) if not tree.children[n])
    for column, (_, node) in enumerate(leaves):
        place[node] = float(column)
    for node in reversed(range(tree.size)):
        if children := tree.children[node]:
            place[node] = (place[children[0]] + place[children[-1]]) / 2
    return place


def as_svg(tree: DraftTree, step: int = 30, margin: int = 24) -> str:
    """The tree as an SVG picture: each circle shows its sibling rank.

    Args:
        step: pixels between two leaves.
    """
    leaves = sum(not children for children in tree.children)
    width = max(340, 2 * margin + step * (leaves - 1))
    height = 2 * margin + 2 * step * tree.depth + 26
    shift = (width - step * (leaves - 1)) / 2
    place = zip(columns_of(tree), tree.depths, strict=True)
    spots = [(shift + step * column, 44.0 + 2 * step * depth) for column, depth in place]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{margin}" y="20" font-size="13">{escape(title(tree))}</text>'
        f'<g stroke="#99a" stroke-width="1.2">{svg_lines(tree, spots)}</g>{svg_nodes(tree, spots)}</svg>\n'
    )


def svg_lines(tree: DraftTree, spots: Sequence[tuple[float, float]]) -> str:
    """From each parent to its children."""
    pairs = ((spots[tree.parent[node]], spots[node]) for node in range(1, tree.size))
    return "".join(
        f'<line x1="{px:.1f}" y1="{py:.1f}" x2="{x:.1f}" y2="{y:.1f}"/>'
        for (px, py), (x, y) in pairs
    )


def svg_nodes(tree: DraftTree, spots: Sequence[tuple[float, float]]) -> str:
    """A circle each, dark where there are children."""
    circles = []
    for node, (x, y) in enumerate(spots):
        label = tree.paths[node][-1] if node else "r"
        fill = "#1b6ca8" if tree.children[node] else "#7fb4d9"
        circles.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="10" fill="{fill}"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="#fff">{label}</text>'
        )
    return "".join(circles)
