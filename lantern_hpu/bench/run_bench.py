"""A benchmark from its options to its report."""

from __future__ import annotations

import copy
import os
import platform
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lantern_hpu.backends import get_backend
from lantern_hpu.backends.base import Backend, dtype_name
from lantern_hpu.backends.host import processor_name
from lantern_hpu.bench.cases import (
    BenchRequest,
    Case,
    cases_of,
    has_long_steps,
    measurable_modes,
)
from lantern_hpu.bench.columns import EAGER, KIND, VERSION, SpeedRow, heading, with_speeds
from lantern_hpu.bench.measure import BRIEF_WARM_UP, WARM_UP, Rates, RunMeter, measure_rates, sizes
from lantern_hpu.decode.memory import check_room
from lantern_hpu.errors import DeviceError
from lantern_hpu.graphs import check_mode
from lantern_hpu.methods.request import Sampling, in_turn
from lantern_hpu.methods.setting import AUTO
from lantern_hpu.models.config import (
    ConditionConfig,
    DrafterConfig,
    ModelConfig,
    TransformerConfig,
)
from lantern_hpu.models.files.checkpoint import shapes_only
from lantern_hpu.models.model import ImageModel
from lantern_hpu.models.text.prefix import Prefix, wordless
from lantern_hpu.models.transformer import Drafter, HeadNorm, RMSNorm, Target
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.results.tables import usual_prompts
from lantern_hpu.zoo.registry import KnownModel

# ---------------------------------------------------------------------------------- random weights

# Known models with random weights: their real sizes without their files, for timing steps.
#
# How long a step takes does not depend on the numbers in it. What the drafter is worth does, and so do pictures:
# neither can be had from these. Weights are made on the device in its number format, with no copy on the host.

SPREAD = 0.02  # standard deviation of a weight
LLAMAGENS = DrafterConfig(sees_pads=True)  # the kind of drafter made where none is published


class RandomCondition:
    """A prefix of random embeddings for any prompt, all of its positions real."""

    takes_classes = False

    def __init__(self, config: TransformerConfig, dtype: torch.dtype, device: torch.device) -> None:
        # [P, H]
        self.prefix = torch.empty(config.prefix, config.dim, dtype=dtype, device=device).normal_()

    def sized(self, config: TransformerConfig) -> RandomCondition:
        """Its first positions."""
        other = copy.copy(self)
        other.prefix = self.prefix[: config.prefix]
        return other

    def length(self, prompt: str) -> int:
        return len(prompt.split())

    def prepare(self, prompts: Sequence[str]) -> None:
        """Nothing: there is no text encoder."""

    def rows(self, prompts: Sequence[str], guidance: bool) -> Prefix:
        rows = len(prompts) * (2 if guidance else 1)
        prefix = self.prefix.expand(rows, -1, -1)  # [R, P, H]
        valid = torch.ones(prefix.shape[:2], dtype=torch.bool, device=prefix.device)  # [R, P]
        return wordless(prefix, valid)

    def notes(self, prompt: str) -> list[str]:
        return []

    def parts(self) -> dict[str, nn.Module]:
        return {}


@dataclass(kw_only=True)
class RandomModel(ImageModel):
    """Its tokens mean nothing and become no pictures."""

    def nearest(self, k: int) -> Tensor:
        """Neighbours that lie scattered, as real ones do: looking them up takes as long. -> [V, k] int32"""
        codes = torch.arange(self.vocabulary, device=self.target.device)
        away = codes[torch.randperm(len(codes) - 1)[:k] + 1]  # [k]; no code is its own neighbour
        return ((codes[:, None] + away) % len(codes)).int()


def step_sizes(entry: KnownModel) -> ModelConfig:
    """What a step needs of a known model; rows for words are left out of the embedding, as it only looks rows up."""
    return ModelConfig(
        replace(entry.config.target, embed_rows=None),
        ConditionConfig("tokens"),
        entry.config.drafter or LLAMAGENS,
    )


def fill_randomly(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Give a module that lies on `meta` random weights on the device."""
    module.to(dtype).to_empty(device=device)
    for part in module.modules():
        norm = isinstance(part, RMSNorm | HeadNorm)
        for name, weight in part.named_parameters(recurse=False):
            if name == "bias":
                nn.init.zeros_(weight)
            elif norm:
                nn.init.ones_(weight)
            else:
                nn.init.normal_(weight, std=SPREAD)
    module.requires_grad_(False).eval()


def make_model(
    entry: KnownModel,
    backend: Backend,
    dtype: str = "auto",
    kernels: str = "auto",
    seed: int = 0,
) -> ImageModel:
    """A known model's sizes with random weights on a device."""
    config, device = step_sizes(entry), backend.device
    number = backend.tuning.dtype(dtype, config.target.parameters)
    assert config.drafter is not None
    check_room(entry.name, config, backend, dtype_name(number), mapped=False)
    chosen = backend.kernels(kernels, number)
    torch.manual_seed(seed)
    with shapes_only():
        target = Target(config.target, chosen)
        drafter = Drafter(config.target, config.drafter, chosen)
    for module in (target, drafter):
        fill_randomly(module, number, device)
    name = f"{entry.name}, random weights"
    return RandomModel(
        name=name,
        source=name,
        config=config,
        files={},
        fingerprint=f"random {entry.name} {seed}",
        target=target,
        drafter=drafter,
        condition=RandomCondition(config.target, number, device),
        vq=None,
        sampling=Sampling(**dict[str, Any](entry.sampling)),
    )


# --------------------------------------------------------------------------------------- run bench


def run_bench(wanted: BenchRequest, argv: Sequence[str], import_s: float) -> dict[str, Any]:
    """The report.

    Args:
        argv: what the command was given. import_s: seconds that imports took.
    """
    with closing(open_pipeline(wanted)) as pipeline:
        modes, notes = measurable_modes(pipeline.backend, wanted.modes, wanted.by_name)
        cases = cases_of(pipeline, wanted, modes)
        dtype = pipeline.model.target.dtype
        measured = measure_rates(pipeline.backend, dtype)
        rates = Rates(
            measured.copy_bytes_per_s,
            measured.operations_per_s,
            dtype.itemsize,
            pipeline.backend.tuning.weight_bytes(pipeline.layout, dtype),
        )
        startup = {"import_s": import_s, "load_s": pipeline.load_seconds}
        rows, missed = measure_all(pipeline, wanted, cases, rates, sum(startup.values()))
        if not rows:
            hint = "a smaller --batch-sizes"
            raise DeviceError("nothing could be measured", "; ".join(missed), hint)
        report = heading(KIND, pipeline, argv) | about(pipeline, wanted)
        best = check_mode(pipeline.backend, AUTO)
        notes += missed + silences(pipeline, wanted)
    peaks = [row.peak_memory_bytes for row in rows if row.peak_memory_bytes is not None]
    report["environment"]["peak_memory_bytes"] = max(peaks, default=None)
    return report | {
        "version": VERSION,
        "rates": asdict(measured),
        "startup": startup,
        "graphs": {"asked": wanted.modes, "measured": modes, "best": best},
        "notes": notes,
        "rows": [row.as_json() for row in with_speeds(rows)],
    }


def open_pipeline(wanted: BenchRequest) -> LanternPipeline:
    """The model on its device."""
    if wanted.entry is None:
        return LanternPipeline.from_pretrained(
            wanted.model,
            device=wanted.device,
            dtype=wanted.dtype,
            graphs=wanted.mode,
            kernels=wanted.kernels,
            layout=layout_of(wanted),
            invariant="off" if "compile" in wanted.modes else wanted.invariant,
            threads=wanted.threads,
        )
    began = time.perf_counter()
    backend = get_backend(wanted.device, wanted.mode)
    try:
        with backend.errors(), torch.no_grad():
            backend.tuning.check_layout(wanted.layout)
            backend.tuning.use_threads(wanted.threads)
            model = make_model(wanted.entry, backend, wanted.dtype, wanted.kernels)
            held = backend.tuning.holds_rows(wanted.invariant == "on", wanted.modes)
            layout = backend.tuning.lay_out(model.stepping, wanted.layout, wanted.modes, held)
        pipeline = LanternPipeline(model, backend, wanted.mode, layout=layout)
    except BaseException:
        backend.close()
        raise
    pipeline.load_seconds = time.perf_counter() - began
    return pipeline


def layout_of(wanted: BenchRequest) -> str:
    """Of the matrices; one that all graph modes can run, unless another is asked for."""
    compiled = "compile" in wanted.modes and wanted.layout == AUTO
    return "plain" if compiled else wanted.layout


def measure_all(
    pipeline: LanternPipeline,
    wanted: BenchRequest,
    cases: Sequence[Case],
    rates: Rates,
    startup_s: float,
) -> tuple[list[SpeedRow], list[str]]:
    """All rows, with a line of progress, and what to say about those that the device refused."""
    rows: list[SpeedRow] = []
    missed: list[str] = []
    total = sum(case.timed_batches(wanted) for case in cases)
    with tqdm(total=total, unit="batch", file=sys.stderr) as bar:
        for mode, of_mode in groupby(cases, lambda case: case.mode):
            # Recorded graphs share memory, which must not go with the last of them while another is to come: so
            # the first engine stays until the mode is done, a small one as batch sizes grow.
            first: LanternPipeline | None = None
            for group in groups([*of_mode], wanted.interleave):
                pairs = [
                    (LanternPipeline(pipeline.model, pipeline.backend, mode), case)
                    for case in group
                ]
                measured, refused = measure_group(pairs, wanted, rates, startup_s, bar)
                rows += measured
                missed += refused
                for drawing, _ in pairs:
                    if first is None and mode != EAGER and drawing.engines.engines:
                        first = drawing
                    else:
                        drawing.engines.shrink(0)
            if first is not None:
                first.engines.shrink(0)
    return rows, missed


def groups(cases: Sequence[Case], interleave: bool) -> list[list[Case]]:
    """What is measured together: one by one, or those of a batch size in turns."""
    if not interleave:
        return [[case] for case in cases]
    return [[*group] for _, group in groupby(cases, lambda case: case.batch)]


def measure_group(
    pairs: Sequence[tuple[LanternPipeline, Case]],
    wanted: BenchRequest,
    rates: Rates,
    startup_s: float,
    bar: tqdm[Any],
) -> tuple[list[SpeedRow], list[str]]:
    """The rows of a group, and what to say about refused ones: all are warmed up, then each draws a batch in turn.

    Args:
        pairs: each with a pipeline of its own, all of one graph mode and batch size.
    """
    rows: list[SpeedRow] = []
    missed: list[str] = []
    waiting = deque[RunMeter]()
    count = pairs[0][1].timed_batches(wanted)
    until = bar.n + count * len(pairs)
    pairs[0][0].backend.memory(reset_peak=True)
    for pipeline, case in pairs:
        bar.set_description(str(case))
        with refusals(pipeline, case, missed):
            meter = open_meter(pipeline, wanted, case, rates, startup_s, bar.set_postfix_str)
            waiting.append(meter)
    for _ in range(count):
        for _ in range(len(waiting)):
            meter = waiting.popleft()  # of one that is refused nothing is held
            bar.set_description(str(meter.case))
            with refusals(meter.pipeline, meter.case, missed):
                if wanted.entry:
                    meter.run_steps(wanted.steps)
                else:
                    meter.draw()
                waiting.append(meter)
            bar.update()
    for meter in waiting:
        with refusals(meter.pipeline, meter.case, missed):
            rows.append(meter.row() if wanted.entry else meter.images())
    bar.update(until - bar.n)
    return rows, missed


@contextmanager
def refusals(pipeline: LanternPipeline, case: Case, missed: list[str]) -> Iterator[None]:
    """A device that refuses a row, for lack of memory, may do for others: note it, and give back its engines."""
    try:
        with pipeline.backend.errors(), torch.no_grad():
            yield
    except DeviceError as error:
        missed.append(f"not measured: {case}: {error.what}: {error.why}")
        pipeline.engines.shrink(0)


def open_meter(
    pipeline: LanternPipeline,
    wanted: BenchRequest,
    case: Case,
    rates: Rates,
    startup_s: float,
    show: Callable[[str], object] = str,
) -> RunMeter:
    """The meter of a row, warmed up, with whole batches of requests."""
    model, images = pipeline.model, case.timed_batches(wanted) * case.batch
    prompts = usual_prompts(model.condition.takes_classes)
    requests = in_turn(prompts, range(images), wanted.seed, model.sampling, case.setting.relaxation)
    return RunMeter(pipeline, case, requests, rates, startup_s, show)


# ------------------------------------------------------------------------------------ what else a report says


def about(pipeline: LanternPipeline, wanted: BenchRequest) -> dict[str, Any]:
    """Which weights, which machine, which settings."""
    model, processor = pipeline.model, processor_name()
    digests = [digest for name, digest in model.files.items() if "drafter" in name]
    modules = [model.target, *([model.drafter] if model.drafter else [])]
    guidance = model.sampling.cfg_scale != 1
    return {
        "device_title": device_title(pipeline.environment(), processor),
        "host": {
            "processor": processor,
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "random_weights": wanted.entry.name if wanted.entry else None,
        "weights": {"target": model.fingerprint, "drafter": digests[0] if digests else None},
        "weights_bytes": sum(p.nbytes for module in modules for p in module.parameters()),
        "settings": {
            "sampling": asdict(model.sampling),
            "seed": wanted.seed,
            "prompts": list(usual_prompts(model.condition.takes_classes)),
            "images": None if wanted.entry else wanted.images,
            "steps": wanted.steps if wanted.entry else None,
            "kernels": wanted.kernels,
            "warm_up": BRIEF_WARM_UP if has_long_steps(pipeline) else WARM_UP,
        },
        "sizes": sizes(model.config, guidance, model.target.dtype.itemsize),
    }


def device_title(environment: Mapping[str, Any], processor: str) -> str:
    """What a reader calls the device: the card, or the processor and how many of its threads were used."""
    card = environment.get("card")
    if card:
        return str(card)
    plain = re.sub(r"\s+", " ", re.sub(r"\((R|TM)\)", "", processor)).strip()
    threads = environment.get("threads")
    name = plain or str(environment["device"])
    return f"{name}, {threads} thread{'s' * (threads != 1)}" if threads else name


def silences(pipeline: LanternPipeline, wanted: BenchRequest) -> list[str]:
    """What the figures leave out."""
    result = []
    if wanted.entry is not None:
        result.append(
            "random weights: steps were timed; images and tokens a step mean nothing, so none are given, and "
            "text encoding and pixels were left out"
        )
        if wanted.entry.config.drafter is None:
            result.append(
                f"no drafter is published for {wanted.entry.name}: one of LlamaGen's kind was made, at its width"
            )
    result += pipeline.model.notes
    if wanted.interleave:
        result.append(
            "rows of a graph mode and batch size took turns, a batch of images each, so that a drift of the machine's "
            "speed affects all alike; the parts of a step and the host's share were taken afterwards, and peaks of "
            "memory are of all of them together"
        )
    if pipeline.backend.memory().peak is None:
        result.append("the device does not tell its peak of memory")
    return result
