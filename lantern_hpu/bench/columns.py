"""The columns of the benchmark: fields of `SpeedRow`, and which of them a terminal shows. Needs no torch.

`measure.RunMeter` fills the fields, `assets/bench.schema.json` says what each of them means, and a test holds the two
together. `lantern_hpu.lab.compare` shows the same columns.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.errors import OptionError, needing
from lantern_hpu.files import ASSETS, parse_json, write_file
from lantern_hpu.results.tables import Columns, Table, figure, percent, ratio

if TYPE_CHECKING:
    from lantern_hpu.pipeline import LanternPipeline

# ----------------------------------------------------------------------------------- report schema

# Reports of `lantern-hpu bench`: read one, and say clearly why it cannot be used. Needs no torch.
#
# `assets/bench.schema.json` is the contract, a JSON Schema of the draft 2020-12.

SCHEMA = ASSETS / "bench.schema.json"
KIND, VERSION = "lantern_hpu.bench", 2
SHOWN = 3  # problems that an error lists
LONGEST = 120  # characters of one
AGAIN = "measure again: lantern-hpu bench --output FILE.json"
Report = dict[str, Any]


@cache
def schema() -> dict[str, Any]:
    """The schema of a report."""
    result: dict[str, Any] = json.loads(SCHEMA.read_text())
    return result


def schema_errors(data: Any) -> list[str]:
    """What in a report breaks the schema, each with its place."""
    with needing("jsonschema", "it checks reports", "compare"):
        from jsonschema import Draft202012Validator
    result = []
    for error in Draft202012Validator(schema()).iter_errors(data):
        place = error.json_path.removeprefix("$").removeprefix(".")
        text = f"{place or 'the report'}: {error.message}"
        result.append(text if len(text) <= LONGEST else text[: LONGEST - 3] + "...")
    return result


def check_report(data: Any, name: str) -> Report:
    """A report, if it is one of this version."""
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind != KIND:
        why = f"its kind is {kind!r}, not {KIND!r}" if kind else "it does not say so"
        raise OptionError(f"{name} is not a report of {KIND}", why, AGAIN)
    version = data.get("version", 1)
    if version != VERSION:
        what = f"{name} is a report of version {version!r}, and this program reads {VERSION}"
        newer = isinstance(version, int) and version > VERSION
        hint = "a newer lantern_hpu, as wrote it" if newer else AGAIN
        raise OptionError(what, "a newer program wrote it" if newer else "it is too old", hint)
    result = schema_errors(data)
    if result:
        more = f"; and {len(result) - SHOWN} more" if len(result) > SHOWN else ""
        raise OptionError(f"{name} is damaged", "; ".join(result[:SHOWN]) + more, AGAIN)
    return dict(data)


def refuse_constant(name: str) -> Any:
    """JSON has no NaN and no infinity, whatever Python's reader takes."""
    raise ValueError(f"{name} is no number of JSON")


def read_report(path: Path) -> Report:
    """The report in a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot read {path}", error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not a report of {KIND}", "it is not text", AGAIN) from error
    if not text.strip():
        raise OptionError(f"{path} is empty", "its run was cut off, or wrote elsewhere", AGAIN)
    try:
        data = parse_json(text, parse_constant=refuse_constant)
    except ValueError as error:
        raise OptionError(f"{path} is cut off, or is not JSON", str(error), AGAIN) from error
    return check_report(data, str(path))


# ----------------------------------------------------------------------------------------- columns

EAGER = "eager"
PARTS = ("draft", "tables", "verify", "accept", "commit", "host")  # of a step


@dataclass(frozen=True, kw_only=True)
class SpeedRow:
    """A method with its tree in one graph mode and batch size.

    The fields are those of a row of `assets/bench.schema.json`, which says what each of them means.
    Those of whole images are None, 0 or empty where steps alone were timed.
    """

    method: str
    tree: str
    relaxation: dict[str, Any]
    graphs: str
    batch_size: int
    # Whole images
    images: int = 0
    batch_seconds: list[float] = field(default_factory=list)
    seconds_per_image: float | None = None
    p50_seconds_per_image: float | None = None
    p95_seconds_per_image: float | None = None
    p50_batch_s: float | None = None
    p95_batch_s: float | None = None
    images_per_second: float | None = None
    prefill_s_per_image: float
    steps_s_per_image: float | None = None
    vq_decode_s_per_image: float | None = None
    # What was accepted
    tokens_per_step: float | None = None
    accepted_per_step: float | None = None
    accepted_by_depth: list[float] = field(default_factory=list)
    accept_rate_by_depth: list[float | None] = field(default_factory=list)
    relaxed_accepts_per_image: float | None = None
    tv_per_token: float | None = None
    # Steps
    steps: int
    ms_per_step: float
    p50_ms_per_step: float
    p95_ms_per_step: float
    step_alone_ms: float
    host_share: float
    eager_step_ms: dict[str, float]
    step_passes: dict[str, Any]
    floor_ms: float
    floor_ratio: float
    verify_floor_ms: float
    verify_floor_ratio: float
    floor_bound: str
    # The host and the recording
    host_reads: int
    host_reads_per_image: float | None = None
    graph_replays: int
    recompiles_after_warmup: int
    warmup_s: float
    capture_s: float
    startup_s: float
    state_bytes: int
    peak_memory_bytes: int | None
    # Beside the other rows: see `with_speeds`
    speed_against_ar: float | None = None
    speed_against_eager: float | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SpeedRow:
        """What `as_json` wrote; fields of earlier programs that mean nothing now are left out."""
        known = {item.name for item in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def draft(self) -> tuple[str, str, int]:
        """What rows of one method in several graph modes share: method, tree, batch size."""
        return self.method, self.tree, self.batch_size

    @property
    def unit(self) -> str:
        """Of `cost`."""
        return "ms a step" if self.seconds_per_image is None else "s an image"

    @property
    def cost(self) -> float:
        """What rows are compared by: seconds an image, or milliseconds of a step where steps alone were timed."""
        return self.ms_per_step if self.seconds_per_image is None else self.seconds_per_image


def with_speeds(rows: Sequence[SpeedRow]) -> list[SpeedRow]:
    """Rows with their speed against `ar` of the same graph mode and batch, and against their eager runs.

    Either is None where that was not measured. Of steps alone there is no speed against `ar`: it depends on the
    tokens a step.
    """
    base = {(row.graphs, row.batch_size): row.cost for row in rows if row.method == "ar"}
    eager = {row.draft: row.cost for row in rows if row.graphs == EAGER}
    result = []
    for row in rows:
        against = base.get((row.graphs, row.batch_size)) if row.images else None
        unrecorded = eager.get(row.draft)
        result.append(
            replace(
                row,
                speed_against_ar=against and against / row.cost,
                speed_against_eager=unrecorded and unrecorded / row.cost,
            )
        )
    return result


# ------------------------------------------------------------------------------------ what a terminal shows

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
    "TV a token": lambda row: figure(row.tv_per_token),
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


# ------------------------------------------------------------------------------------------ tables

# A report in a terminal: Markdown tables. Needs no torch.


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
    """The model, and the device's measured rates."""
    rates, dtype = report["rates"], report["dtype"]
    rates_shown = [f"copies {rates['copy_bytes_per_s'] / 1e9:.3g} GB/s (read and written)"]
    matrices = {"bfloat16": rates["bf16_operations_per_s"], dtype: rates["operations_per_s"]}
    rates_shown += [f"{name} matrices {v / 1e12:.3g} TFLOP/s" for name, v in matrices.items() if v]
    return f"{report['model']}, {dtype}, {report['device_title']}: {'; '.join(rates_shown)}"


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


def heading(kind: str, pipeline: LanternPipeline, argv: Sequence[str]) -> dict[str, Any]:
    """The fields that every report begins with.

    Args:
        kind: of the report, `lantern_hpu.` and the command's name. argv: the command's arguments.
    """
    from lantern_hpu.backends.base import dtype_name

    return {
        "kind": kind,
        "date": datetime.date.today().isoformat(),
        "command": f"lantern-hpu {kind.partition('.')[2]} " + " ".join(argv),
        "model": pipeline.model.name,
        "dtype": dtype_name(pipeline.model.target.dtype),
        "environment": pipeline.environment(),
    }


def write_rows(file: Path, report: Mapping[str, Any], force: bool = False) -> None:
    """Write a report as JSON."""
    write_file(file, json.dumps(report, indent=1).encode(), force)


def show_report(report: Mapping[str, Any], text: str, output: Path | None, force: bool) -> None:
    """Print the tables of a report, and write it where a file is named.

    Args:
        force: whether an existing file is replaced.
    """
    print(text)
    if output:
        write_rows(output, report, force)
        print(f"wrote {output}")
