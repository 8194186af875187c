"""What Prometheus may ask, under the names that vLLM uses, and speculation's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lantern_hpu.errors import needing

with needing("prometheus_client", "the server counts with it", "serve"):
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TV = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1)
STEP = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """Counters of one server; each has the label `model_name`."""

    def __init__(self, model: str) -> None:
        self.registry, self.model = CollectorRegistry(), model

        def counter(name: str, about: str, *labels: str) -> Counter:
            names = ("model_name", *labels)
            return Counter(f"lantern:{name}", about, names, registry=self.registry)

        def histogram(name: str, about: str, buckets: Sequence[float], *labels: str) -> Histogram:
            names = ("model_name", *labels)
            made = Histogram(
                f"lantern:{name}", about, names, buckets=buckets, registry=self.registry
            )
            return made

        self.success = counter("request_success", "Images that were drawn", "method")
        self.failed = counter("request_failure", "Requests without images", "status")
        self.cancelled = counter("request_cancelled", "Images whose client went away")
        self.tokens = counter("generation_tokens", "Image tokens of finished images", "method")
        self.drafts = counter("spec_decode_num_drafts", "Trees that were verified", "method")
        drafted = "Drafts that were verified"
        self.draft_tokens = counter("spec_decode_num_draft_tokens", drafted, "method")
        accepted = "Drafts that were accepted"
        self.accepted = counter("spec_decode_num_accepted_tokens", accepted, "method")
        each = f"{accepted}, by depth in the tree from 0"
        name = "spec_decode_num_accepted_tokens_per_pos"
        self.per_pos = counter(name, each, "method", "position")
        relaxed = "Drafts accepted only thanks to relaxation"
        self.relaxed = counter("spec_decode_num_relaxed_tokens", relaxed, "method")
        spent = "Total variation that relaxation cost, summed over the tokens of finished images"
        self.tv = counter("spec_decode_tv", spent, "method")
        mean = "Total variation of a token, mean of an image"
        self.tv_mean = histogram("tv_mean", mean, TV, "method")
        self.tv_max = histogram("tv_max", "The largest of an image's tokens", TV, "method")
        queue = "From arrival to a slot, text included"
        self.queue = histogram("request_queue_time_seconds", queue, SECONDS)
        latency = "From arrival to the picture"
        self.latency = histogram("e2e_request_latency_seconds", latency, SECONDS)
        about = {"text": "Text of an image", "prefill": "Its prefill"}
        about |= {"decode": "Its steps", "pixels": "Its pixels, without waiting for them"}
        self.stages = [
            histogram(f"request_{stage}_time_seconds", text, SECONDS)
            for stage, text in about.items()
        ]
        self.step = histogram("step_time_seconds", "One step of all slots", STEP, "method")

    def watch(self, name: str, about: str, value: Callable[[], float]) -> None:
        """A gauge that is read when it is asked for."""
        gauge = Gauge(f"lantern:{name}", about, ("model_name",), registry=self.registry)
        gauge.labels(self.model).set_function(value)

    def took(self, whole: float, *stages: float) -> None:
        """Seconds of an image, and of its text, prefill, steps and pixels."""
        for kept, seconds in zip([self.latency, *self.stages], [whole, *stages], strict=True):
            kept.labels(self.model).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
