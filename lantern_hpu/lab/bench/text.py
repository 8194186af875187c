"""A report in a terminal: Markdown tables. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lantern_hpu.lab.bench.report import PARTS, SpeedRow
from lantern_hpu.lab.tables import Columns, Table, ratio
from lantern_hpu.results.tables import figure, percent

NAMES: Columns = {
    "method": lambda row: row.method,
    "tree": lambda row: row.tree,
    "graphs": lambda row: row.graphs,
    "batch": lambda row: str(row.batch_size),
}
FLOOR: Columns = {
    "host": lambda row: percent(row.host_share),
    "floor ms": lambda row: figure(row.floor_ms),
    "reached": lambda row: percent(row.floor_ratio),
}
OF_IMAGES: Columns = {
    "s an image": lambda row: figure(row.seconds_per_image),
    "p50": lambda row: figure(row.p50_seconds_per_image),
    "p95": lambda row: figure(row.p95_seconds_per_image),
    "images/s": lambda row: figure(row.images_per_second),
    "tokens a step": lambda row: ratio(row.tokens_per_step),
    "ms a step": lambda row: figure(row.ms_per_step),
    "x ar": lambda row: ratio(row.speed_against_ar),
    "x eager": lambda row: ratio(row.speed_against_eager),
    **FLOOR,
    "host reads": lambda row: figure(row.host_reads_per_image),
}
OF_STEPS: Columns = {
    "ms a step": lambda row: figure(row.ms_per_step),
    "p50": lambda row: figure(row.p50_ms_per_step),
    "p95": lambda row: figure(row.p95_ms_per_step),
    "x eager": lambda row: ratio(row.speed_against_eager),
    **FLOOR,
}


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
