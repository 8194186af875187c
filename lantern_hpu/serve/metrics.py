"""What Prometheus may ask, under the names that vLLM uses, and speculation's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lantern_hpu.core import ImageRecord
from lantern_hpu.errors import needing
from lantern_hpu.methods.setting import METHODS, Resolved

with needing("prometheus_client", "the server counts with it", "serve"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TV = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
ACCEPTED, OF_A_TOKEN = "Drafts that were accepted", "Total variation of a token, mean of an image"
COST = "Total variation that relaxation cost, summed over the tokens of finished images"
# By name: what it is, its labels besides `model_name`, and a histogram's buckets
METRICS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "request_success": ("Images that were drawn", "method", ()),
    "request_failure": ("Requests without images", "status", ()),
    "request_cancelled": ("Images whose client went away", "", ()),
    "generation_tokens": ("Image tokens of finished images", "method", ()),
    "spec_decode_num_drafts": ("Trees that were verified", "method", ()),
    "spec_decode_num_draft_tokens": ("Drafts that were verified", "method", ()),
    "spec_decode_num_accepted_tokens": (ACCEPTED, "method", ()),
    "spec_decode_num_accepted_tokens_per_pos": (f"{ACCEPTED}, by depth", "method position", ()),
    "spec_decode_num_relaxed_tokens": ("Drafts accepted only thanks to relaxation", "method", ()),
    "spec_decode_tv": (COST, "method", ()),
    "tv_mean": (OF_A_TOKEN, "method", TV),
    "tv_max": ("The largest of an image's tokens", "method", TV),
    "request_queue_time_seconds": ("From arrival to a slot, text included", "", SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the picture", "", SECONDS),
    "request_text_time_seconds": ("Text of an image", "", SECONDS),
    "request_prefill_time_seconds": ("Its prefill", "", SECONDS),
    "request_decode_time_seconds": ("Its steps", "", SECONDS),
    "request_pixels_time_seconds": ("Its pixels, without waiting for them", "", SECONDS),
    "step_time_seconds": ("One step of all slots", "method", STEP),
}


class Metrics:
    """What one server counts and measures; each metric has the label `model_name`."""

    def __init__(self, model: str) -> None:
        self.registry, self.model = CollectorRegistry(), model
        self.known: dict[str, Counter | Histogram] = {}
        for name, (about, labels, buckets) in METRICS.items():
            kind = partial(Histogram, buckets=buckets) if buckets else Counter
            names = ("model_name", *labels.split())
            self.known[name] = kind(f"lantern:{name}", about, names, registry=self.registry)

    def add(self, name: str, value: float, *labels: str) -> None:
        """Count a number, or observe a number of seconds."""
        metric = self.known[name].labels(self.model, *labels)
        metric.inc(value) if isinstance(metric, Counter) else metric.observe(value)

    def count_image(self, setting: Resolved, record: ImageRecord) -> None:
        """What an image adds to the counters of its method."""
        values = {"request_success": 1.0, "generation_tokens": record.tokens}
        if METHODS[setting.method].drafts:
            values["spec_decode_num_drafts"] = record.steps
            values["spec_decode_num_draft_tokens"] = record.steps * (setting.tree.size - 1)
            values["spec_decode_num_accepted_tokens"] = sum(record.accepted_by_depth)
            values["spec_decode_num_relaxed_tokens"] = record.relaxed_accepts
            if record.tv_sum is not None and record.tv_mean is not None:
                values |= {"spec_decode_tv": record.tv_sum, "tv_mean": record.tv_mean}
                values["tv_max"] = record.tv_max or 0.0
            for position, count in enumerate(record.accepted_by_depth):
                name = "spec_decode_num_accepted_tokens_per_pos"
                self.add(name, count, setting.method, str(position))
        for name, value in values.items():
            self.add(name, value, setting.method)

    def watch(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        gauge = Gauge(f"lantern:{name}", about, ("model_name",), registry=self.registry)
        gauge.labels(self.model).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)
