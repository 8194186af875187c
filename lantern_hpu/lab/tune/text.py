"""What tuning found, in words and tables. Needs no torch."""

from __future__ import annotations

from lantern_hpu.decode.counts import KINDS
from lantern_hpu.lab.tables import Table
from lantern_hpu.lab.tune.costs import Costs
from lantern_hpu.lab.tune.expectation import ChanceTable, estimate
from lantern_hpu.lab.tune.result import Tuning

HEAD = "expected -> measured, nodes, depth, tokens a step, ms a step, ms a token, x ar".split(", ")


def summary(tuning: Tuning) -> str:
    """All of it."""
    chances = chances_text(estimate(tuning.counts))
    return "\n\n".join([costs_text(tuning.costs), chances, table(tuning), verdict(tuning)])


def table(tuning: Tuning) -> str:
    """The rows as a Markdown table; every figure as expected, then as measured."""
    ar, tuned, *_ = tuning.rows
    lines = []
    for row in tuning.rows:
        pairs = [*row.pairs, row.times_as_fast(ar), tuned.times_as_fast(row)]
        cells = [f"{before:.2f} -> {after:.2f}" for before, after in pairs]
        lines.append([row.name, str(row.tree.size), str(row.tree.depth), *cells])
    return Table([*HEAD, f"{tuned.name} is x"], lines).markdown()


def costs_text(costs: Costs) -> str:
    """What steps cost."""
    measured = zip(costs.widths, costs.verify, strict=True)
    verify = ", ".join(f"{ms:.2f} ({width})" for width, ms in measured)
    return (
        f"ms of a step: {costs.alone:.2f} for ar; with drafts {verify} nodes verified,\n"
        f"and {costs.level:.2f} each level, {costs.node:.2f} each node with children, "
        f"{costs.child:.2f} each child tried in turn"
    )


def chances_text(chances: ChanceTable) -> str:
    """Acceptance by depth and rank."""
    lines = ["chance of each child, once its parent was accepted:"]
    for depth, rows in enumerate(chances, 1):
        for name, row in zip(KINDS, rows, strict=True):
            if depth > 1 or name == KINDS[0]:
                parent = "the root" if depth == 1 else f"a {name} child"
                shown = " ".join(f"{chance:.2f}" for chance in row)
                lines.append(f"  depth {depth}, of {parent}: {shown}")
    return "\n".join(lines)


def verdict(tuning: Tuning) -> str:
    """Which tree is fastest, and whether `ar` is faster still."""
    ar, tuned, *_ = tuning.rows
    best = tuning.best
    hoped, gain = best.times_as_fast(ar)
    figures = f"{gain:.2f} times as fast"
    if tuning.ar_wins:
        said = f"ar wins: the fastest tree, {best.name}, draws {figures} (expected {hoped:.2f})"
    else:
        said = f"{best.name} draws {figures} as ar (expected {hoped:.2f})"
    if best is not tuned:
        _, lead = best.times_as_fast(tuned)
        said += f"\n{best.name} was measured {lead:.2f} times as fast as {tuned.name}, the best expected"
    return said
