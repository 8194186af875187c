"""A report in a terminal: Markdown tables. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lantern_hpu.lab.bench.columns import NAMES, OF_IMAGES, OF_STEPS, PARTS, SpeedRow
from lantern_hpu.results.tables import Columns, Table, figure, percent, ratio


def rows_table(rows: Sequence[SpeedRow]) -> str:
    """All rows."""
    columns = {**NAMES, **(OF_IMAGES if rows[0].images else OF_STEPS)}
    return Table.of(columns, rows).markdown()


def square_table(rows: Sequence[SpeedRow]) -> str:
    """{ar, method} x {eager, recorded}: what each costs, and how much faster than the first mode the others are."""
    modes = list(dict.fromkeys(row.graphs for row in rows))
    if len(modes) < 2:
        return ""
    cells = {(row.draft, row.graphs): row.cost for row in rows}
    head = ["method", "tree", "batch", *(f"{mode}, {rows[0].unit}" for mode in modes)]
    head += [f"{mode} x {modes[0]}" for mode in modes[1:]]
    lines = []
    for key in dict.fromkeys(row.draft for row in rows):
        costs = [cells.get((key, mode)) for mode in modes]
        gains = [ratio(costs[0] / other if costs[0] and other else None) for other in costs[1:]]
        lines.append([*map(str, key), *map(figure, costs), *gains])
    return Table(head, lines).markdown()


def split_table(rows: Sequence[SpeedRow]) -> str:
    """Where the time of an eager step goes; each row once, whatever its graphs."""

    def share(part: str) -> Callable[[SpeedRow], str]:
        return lambda row: percent(row.eager_step_ms[part] / sum(row.eager_step_ms.values()))

    columns: Columns = {
        **{name: NAMES[name] for name in ("method", "tree", "batch")},
        "eager step, ms": lambda row: figure(sum(row.eager_step_ms.values())),
        **{part: share(part) for part in PARTS},
        "verify floor, ms": lambda row: figure(row.verify_floor_ms),
        "reached": lambda row: percent(row.verify_floor_ratio),
    }
    return Table.of(columns, {row.draft: row for row in rows}.values()).markdown()


def reference_lines(report: Mapping[str, Any]) -> str:
    """The device's measured rates, and the model where it is not as it comes."""
    rates, dtype = report["rates"], report["dtype"]
    rates_shown = [f"copies {rates['copy_bytes_per_s'] / 1e9:.3g} GB/s (read and written)"]
    matrices = {"bfloat16": rates["bf16_operations_per_s"], dtype: rates["operations_per_s"]}
    rates_shown += [f"{name} matrices {v / 1e12:.3g} TFLOP/s" for name, v in matrices.items() if v]
    model = f"{report['model']}, {dtype}, " if report.get("stretched") else ""
    return f"{model}{report['device_title']}: {'; '.join(rates_shown)}"


def tables(report: Mapping[str, Any]) -> str:
    """All that is printed."""
    rows = [SpeedRow.from_json(row) for row in report["rows"]]
    notes = "\n".join(f"note: {note}" for note in report["notes"])
    parts = [
        reference_lines(report),
        rows_table(rows),
        square_table(rows),
        split_table(rows),
        notes,
    ]
    return "\n\n".join(part for part in parts if part)
