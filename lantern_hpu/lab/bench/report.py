"""Reports of `lantern_hpu.lab.bench` and their rows: read one, and say clearly why it cannot be used. Needs no torch.

`assets/bench.schema.json` is the contract, a JSON Schema of the draft 2020-12.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from lantern_hpu.errors import OptionError, needing
from lantern_hpu.files import ASSETS

SCHEMA = ASSETS / "bench.schema.json"
KIND, VERSION = "lantern_hpu.bench", 2
SHOWN = 3  # problems that an error lists
LONGEST = 120  # characters of one
AGAIN = "measure again: lantern-hpu bench --output FILE.json"
Report = dict[str, Any]
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


# ------------------------------------------------------------------------------------ reading


@cache
def schema() -> dict[str, Any]:
    """The schema of a report."""
    result: dict[str, Any] = json.loads(SCHEMA.read_text())
    return result


def schema_errors(data: Any) -> list[str]:
    """What in a report breaks the schema, each with its place.

    Raises:
        OptionError: jsonschema is not installed.
    """
    with needing("jsonschema", "it checks reports", "compare"):
        from jsonschema import Draft202012Validator
    result = []
    for error in Draft202012Validator(schema()).iter_errors(data):
        place = error.json_path.removeprefix("$").removeprefix(".")
        text = f"{place or 'the report'}: {error.message}"
        result.append(text if len(text) <= LONGEST else text[: LONGEST - 3] + "...")
    return result


def check_report(data: Any, name: str) -> Report:
    """A report, if it is one of this version.

    Raises:
        OptionError: of another kind or version, or against the schema.
    """
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind != KIND:
        why = f"its kind is {kind!r}, not {KIND!r}" if kind else "it does not say so"
        raise OptionError(f"{name} is no report of {KIND}", why, AGAIN)
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
    """The report in a file.

    Raises:
        OptionError: unreadable, empty, cut off, or see `check_report`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot read {path}", error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is no report of {KIND}", "it is not text", AGAIN) from error
    if not text.strip():
        raise OptionError(f"{path} is empty", "its run was cut off, or wrote elsewhere", AGAIN)
    try:
        data = json.loads(text, parse_constant=refuse_constant)
    except ValueError as error:
        raise OptionError(f"{path} is cut off, or is not JSON", str(error), AGAIN) from error
    return check_report(data, str(path))
