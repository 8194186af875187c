"""One stage, in a process that holds the device: its questions are answered one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import cached_property
from typing import Any

import torch

from lantern_hpu.backends import HOST, get_backend
from lantern_hpu.backends.base import Backend
from lantern_hpu.backends.hpu import errors as hpu_errors
from lantern_hpu.decode.engine import GraphReport
from lantern_hpu.decode.memory import Device, Setup, largest_phase, total
from lantern_hpu.errors import LanternError
from lantern_hpu.lab.speed.cases import Wanted
from lantern_hpu.lab.speed.run import run as run_bench
from lantern_hpu.lab.verify.items import Question, Result, Stage, State
from lantern_hpu.methods.request import Request
from lantern_hpu.methods.setting import Setting
from lantern_hpu.ops.kernels import PLAIN
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.plan.report import Counted, setup_of
from lantern_hpu.results.images import RunTiming

PROMPT = "a red apple"
SEED = 7
EMULATED_STEPS = (
    16  # whose tokens are compared on the emulator: it is slow, and its arithmetic the CPU's
)
Answer = tuple[State, str, dict[str, Any]]


class Asked:
    """A device in one graph mode, opened when the first question needs it."""

    def __init__(self, stage: Stage, device: str, emulate: bool, model: str) -> None:
        self.stage, self.device, self.emulate, self.model = stage, device, emulate, model
        self.stack = ExitStack()

    @cached_property
    def backend(self) -> Backend:
        made = get_backend(self.device, self.stage.graphs, self.emulate)
        return self.stack.enter_context(closing(made))

    @cached_property
    def pipeline(self) -> LanternPipeline:
        """The model on the device, in float32: only so are tokens to be compared."""
        made = LanternPipeline.from_pretrained(
            self.model,
            device=self.device,
            dtype="float32",
            graphs=self.stage.graphs,
            emulate=self.emulate,
        )
        return self.stack.enter_context(closing(made))

    @cached_property
    def host(self) -> LanternPipeline:
        """The model on the CPU, with the plain step."""
        made = LanternPipeline.from_pretrained(
            self.model, device=HOST, dtype="float32", graphs="eager", kernels="plain"
        )
        return self.stack.enter_context(closing(made))

    def expected(self, method: str) -> list[int]:
        """The tokens of the plain step on the CPU."""
        with self.without_emulator():
            return self.drawn(self.host, method)[0]

    def drawn(self, pipeline: LanternPipeline, method: str) -> tuple[list[int], int, GraphReport]:
        """The tokens of one image, or of its beginning on the emulator; steps; what the runners did."""
        chosen, timing = pipeline.resolve(method), RunTiming()
        request = Request(PROMPT, SEED, pipeline.model.sampling, chosen.relaxation)
        engine = pipeline.engines.get(pipeline.spec([request], chosen.tree, 1))
        pipeline.prepare(engine, [request], timing)
        most = EMULATED_STEPS if self.emulate else None
        with pipeline.backend.errors(), torch.no_grad():
            list(pipeline.stream(engine, [request], timing, most=most))
            assert engine.known is not None
            known = engine.read(engine.known)[0]
            return engine.partial()[0, :known].tolist(), timing.steps, engine.report()

    def without_emulator(self) -> AbstractContextManager[None]:
        """An open emulator checks every operator, also those of the CPU."""
        opened = vars(self).get("pipeline")
        card = getattr(opened.backend, "card", None) if opened is not None else None
        return nullcontext() if card is None else card.aside()

    def hardware(self) -> dict[str, Any] | None:
        """What was opened."""
        opened = vars(self)
        backend = opened["pipeline"].backend if "pipeline" in opened else opened.get("backend")
        return None if backend is None else dict(backend.describe())

    def answer(self, item: str) -> Answer:
        return {
            "facts": self.fact,
            "kernels": self.kernel,
            "methods": self.method,
            "bench": self.bench,
        }[self.stage.kind](item)

    # Facts

    def fact(self, item: str) -> Answer:
        from lantern_hpu.backends.hpu.facts import ask_fact

        return *ask_fact(item, self.backend), {}

    # Kernels

    def kernel(self, item: str) -> Answer:
        backend = self.backend
        chosen = backend.kernels("auto", torch.float32)
        kernel, plain = getattr(chosen, item), getattr(PLAIN, item)
        name = chosen.names()[item]
        if kernel is None or name == "plain":
            return "confirmed", "the plain one is used", {}
        inputs = EXAMPLES[item](torch.Generator().manual_seed(SEED))
        with torch.no_grad():
            want = plain(*inputs)
            got = kernel(
                *(x.to(backend.device) if isinstance(x, torch.Tensor) else x for x in inputs)
            )
            apart = float((got.cpu() - want).abs().max())
        state: State = "confirmed" if apart < 2e-2 else "refuted"
        return state, f"{name} is {apart:.1e} apart", {"largest difference": apart}

    # Methods

    def method(self, item: str) -> Answer:
        want, pipeline = self.expected(item), self.pipeline
        pipeline.backend.memory(reset_peak=True)
        got, steps, report = self.drawn(pipeline, item)
        other = [i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b]
        numbers: dict[str, Any] = {
            "steps": steps,
            "capture seconds": round(report.capture_seconds, 3),
            "recompiles after warm-up": report.recompiles_after_warmup,
            **self.memory(pipeline, item),
        }
        if numbers["recompiles after warm-up"]:
            return "refuted", "something was compiled after the warm-up", numbers
        if other:
            what = f"{len(other)} of {len(want)} tokens differ, the first is number {other[0]}"
            return "refuted", what, numbers
        part = "first " if len(want) < pipeline.model.target.config.tokens else ""
        return "confirmed", f"the CPU's {part}{len(want)} tokens", numbers

    def memory(self, pipeline: LanternPipeline, method: str) -> dict[str, Any]:
        """Bytes at the peak, and those that `plan` counts."""
        peak, backend = pipeline.backend.memory().peak, pipeline.backend
        counted = Device(None, "", "float32", (), backend.name == HOST)
        how = {"batch_size": 1, "guidance": True, "quantize": None, "keep_text": "host"}
        setup: Setup = setup_of(
            Counted(pipeline.model.config), counted, "float32", method, None, **how
        )
        planned = total(largest_phase(pipeline.model.config, setup)[1])
        return {"peak bytes": peak, "planned bytes": planned}

    # Benchmark

    def bench(self, item: str) -> Answer:
        if self.emulate:
            return "unanswered", "an emulator's speed says nothing of a card", {}
        wanted = Wanted(
            model=self.model,
            device=self.device,
            settings=[Setting("ar"), Setting("lantern++")],
            modes=["auto"],
            batches=[1],
            images=1,
        )
        report = run_bench(wanted, [], 0.0)
        rows = [
            {
                n: row[n]
                for n in ("method", "graphs", "seconds_per_image", "ms_per_step", "tokens_per_step")
                if n in row
            }
            for row in report["rows"]
        ]
        return "confirmed", "; ".join(report["notes"]), {"rows": rows}


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


EXAMPLES: dict[str, Callable[[torch.Generator], tuple[Any, ...]]] = {
    "attention": lambda g: (
        *(
            randn(g, 2, 4, 3, 64),
            randn(g, 2, 4, 8, 64),
            randn(g, 2, 4, 8, 64),
            randn(g, 2, 1, 3, 8),
        ),
    ),
    "rms_norm": lambda g: (randn(g, 2, 3, 64), randn(g, 64), 1e-5),
    "rotate": lambda g: (randn(g, 2, 3, 4, 64), randn(g, 2, 3, 2, 32), True),
    "swiglu": lambda g: (randn(g, 2, 3, 128),),
}


def explained(error: BaseException) -> str:
    """An error in one line, in plain words where it is a known one."""
    if isinstance(error, LanternError):
        return f"{error.what}: {error.why}" if error.why else error.what
    known = hpu_errors.explain(error) if isinstance(error, Exception) else None
    if known is not None:
        return f"{known.what} ({known.hint})"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def answer_all(
    stage: Stage,
    device: str,
    emulate: bool,
    model: str,
    questions: Sequence[Question],
    send: Callable[[Question | Result | dict[str, Any]], None],
) -> None:
    """Answer the questions of a stage.

    Args:
        send: is called with each question, with its result, and last with what the hardware is.
    """
    asked = Asked(stage, device, emulate, model)
    with asked.stack:
        for question in questions:
            send(question)
            began = time.perf_counter()
            try:
                state, detail, numbers = asked.answer(question.item)
            except Exception as error:  # whatever a device's software raises is the answer
                state, detail, numbers = "unanswered", explained(error), {}
            seconds = round(time.perf_counter() - began, 2)
            send(
                Result(stage.name, question.item, state, detail, question.source, seconds, numbers)
            )
        if (hardware := asked.hardware()) is not None:
            send(hardware)
