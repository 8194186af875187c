"""The columns of the benchmark: fields of `SpeedRow`, and which of them a terminal shows. Needs no torch.

`measure.RunMeter` fills the fields, `assets/bench.schema.json` says what each of them means, and a test holds the two
together. `lantern_hpu.lab.compare` shows the same columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from lantern_hpu.results.tables import Columns, figure, percent, ratio

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
