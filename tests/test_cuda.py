"""CUDA: what can be checked without a card is; the rest runs where there is one (marker `cuda`)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lantern_hpu.backends import DEVICE_VARIABLE, card_of
from lantern_hpu.backends.base import DevicePlan, get_backend
from lantern_hpu.backends.cuda.backend import CUDABackend
from lantern_hpu.decode.engine import Engine, upload_prefix
from lantern_hpu.errors import CaptureError, DeviceError
from lantern_hpu.graphs.cuda import CUDAGraphRunner
from lantern_hpu.methods.relaxation import Multiplicative
from lantern_hpu.pipeline import LanternPipeline
from lantern_hpu.tree import load_static
from tests.tiny import draw, make_engine, request, ring, spec_for, tiny_models

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")


# ------------------------------------------------------------------------------------ without a card


@dataclass
class Counter:
    """A state with a small tensor that counts, and a large one that is not copied."""

    count: Tensor
    cache: Tensor

    def tensors(self) -> dict[str, Tensor]:
        return {"count": self.count, "cache": self.cache}

    def restorable(self) -> dict[str, Tensor]:
        return {"count": self.count}


class Add(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, state: Counter) -> Tensor:
        self.calls += 1
        state.count.add_(1)
        state.cache.index_fill_(0, state.count.long(), 7)
        return state.count + 0


class Graph:
    """A stand-in for a CUDA graph: recording changes nothing, a replay runs what was recorded."""

    def __init__(self) -> None:
        self.recorded: Any = None

    def replay(self) -> None:
        self.recorded()


class Memory:
    """What torch's allocator and cuBLAS do with graphs: a workspace is of a stream, and lies where it was made."""

    clears = True  # since pytorch 175276: a graph that goes takes its stream's workspace with it

    def __init__(self) -> None:
        self.streams: list[Any] = []  # the last one is current
        self.workspaces: dict[Any, Any] = {}  # of a stream: the pool it lies in, or None
        self.pools: dict[Any, int] = {}  # how many live graphs each has

    def pool(self) -> Any:
        handle = (0, len(self.pools) + 1)
        self.pools[handle] = 0
        return handle

    def work(self, stream: Any, pool: Any = None) -> None:
        self.workspaces.setdefault(stream, pool)

    def capture(self, graph: Graph, pool: Any, stream: Any, first: bool) -> None:
        if not first and not self.pools[pool] and pool in self.workspaces.values():
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")  # before it
        self.work(stream, pool)
        self.pools[pool] += 1
        weakref.finalize(graph, self.gone, pool, stream)

    def gone(self, pool: Any, stream: Any) -> None:
        self.pools[pool] -= 1
        if self.clears:
            self.workspaces.pop(stream, None)


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> list[str]:
    """torch.cuda's recording, on the processor; the list notes what was asked for."""
    asked: list[str] = []
    state: dict[str, Any] = {}
    used: set[Any] = set()

    @contextmanager
    def graph(made: Graph, pool: Any, stream: Any = None) -> Iterator[None]:
        asked.append("capture")
        memory.streams.append(stream)
        runner = state["runner"]
        kept = {name: tensor.clone() for name, tensor in runner.state.tensors().items()}
        try:
            yield
        except ValueError:  # the end of the capture raises, before its stream is left
            raise RuntimeError("operation failed due to a previous error during capture")  # noqa: B904
        memory.streams.pop()
        memory.capture(made, pool, stream, pool not in used)
        used.add(pool)
        for name, tensor in runner.state.tensors().items():
            tensor.copy_(kept[name])  # a capture does not execute
        made.recorded = lambda: runner.output.copy_(runner.function(runner.state))

    class Stream:
        def __init__(self, priority: int = 0) -> None:
            self.priority = priority

        def wait_stream(self, other: Any) -> None:
            asked.append("wait")

    @contextmanager
    def stream(aside: Stream) -> Iterator[None]:
        memory.streams.append(aside)
        memory.work(aside)
        yield
        memory.streams.pop()

    memory.streams.append(Stream())
    fakes = {
        "CUDAGraph": Graph,
        "graph": graph,
        "Stream": Stream,
        "stream": stream,
        "current_stream": lambda: memory.streams[-1],
        "set_stream": memory.streams.append,
        "synchronize": lambda: None,
        "set_sync_debug_mode": lambda mode: asked.append(f"sync {mode}"),
        "graph_pool_handle": memory.pool,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        CUDAGraphRunner,
        "capture",
        lambda self, inner=CUDAGraphRunner.capture: (state.update(runner=self), inner(self))[1],
    )
    return asked


def test_first_call_counts_once_though_it_ran_before_the_capture(card: list[str]) -> None:
    state = Counter(torch.zeros(1, dtype=torch.int32), torch.zeros(5))
    runner = CUDAGraphRunner(Add(), state, CUDABackend())
    assert runner().tolist() == [1] and state.count.tolist() == [1]
    assert runner().tolist() == [2] and state.count.tolist() == [2]
    assert state.cache.tolist() == [0, 7, 7, 0, 0]
    assert (runner.stats.captures, runner.stats.replays) == (1, 2)
    assert card.count("capture") == 1
    # Waiting for the device is an error while the function is tried out, and allowed again after.
    assert card.index("sync error") < card.index("sync default") < card.index("capture")


def test_a_function_that_cannot_be_recorded_is_named(card: list[str]) -> None:
    class Reads(nn.Module):
        def forward(self, state: Counter) -> Tensor:
            raise RuntimeError("called a synchronizing CUDA operation\nat ...")

    state = Counter(torch.zeros(1), torch.zeros(1))
    with pytest.raises(CaptureError, match="Reads cannot be captured: called a synchronizing"):
        CUDAGraphRunner(Reads(), state, CUDABackend())()
    assert card[-1] == "sync default"


def recorded(backend: CUDABackend) -> CUDAGraphRunner:
    state = Counter(torch.zeros(1, dtype=torch.int32), torch.zeros(5))
    runner = CUDAGraphRunner(Add(), state, backend)
    runner()
    return runner


@pytest.mark.parametrize("clears", [False, True])
def test_graphs_come_and_go_without_taking_what_others_address(
    card: list[str], memory: Memory, clears: bool
) -> None:
    """Older torch enters no pool again that is not empty; newer frees a workspace with any graph of its stream."""
    memory.clears = clears
    mine, other = CUDABackend(), CUDABackend()
    kept, leaving, elsewhere = recorded(mine), recorded(mine), recorded(other)
    assert set(memory.pools.values()) == {2, 1}
    elsewhere.close()
    leaving.close()
    assert mine.capture_stream in memory.workspaces, "the graph that lives addresses it"
    assert mine.capture_stream.priority < 0  # timings take streams of the usual one, in turn
    kept.close()
    assert set(memory.pools.values()) == {0}
    recorded(mine)  # the pool's second life is another pool
    assert len(memory.pools) == 3


def test_a_capture_that_is_invalidated_names_its_cause_and_leaves_its_stream(
    card: list[str], memory: Memory
) -> None:
    class Fails(Add):
        def forward(self, state: Counter) -> Tensor:
            if self.calls:
                raise ValueError("a tensor of the host")
            return super().forward(state)

    state = Counter(torch.zeros(1, dtype=torch.int32), torch.zeros(5))
    backend, main = CUDABackend(), memory.streams[-1]
    try:
        raise KeyError("an earlier row")
    except KeyError:  # what was being handled before is not the cause
        with pytest.raises(CaptureError, match="Fails cannot be captured: a tensor of the host"):
            CUDAGraphRunner(Fails(), state, backend)()
    assert memory.streams[-1] is main
    recorded(backend)


def test_what_graphs_keep_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def segment(pool: tuple[int, int], allocated: int, device: int = 0) -> dict[str, Any]:
        sizes = {"total_size": 100, "allocated_size": allocated}
        return {"device": device, "segment_pool_id": pool, **sizes}

    segments = [segment((0, 0), 30), segment((0, 1), 10), segment((0, 0), 0, device=1)]
    fakes: dict[str, Any] = {"mem_get_info": lambda: (1000, 9000)}
    fakes |= {"current_device": lambda: 0, "max_memory_allocated": lambda: 7}
    fakes |= {"memory_snapshot": lambda: segments}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    assert CUDABackend().memory().free == 1000 + 70


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an NVIDIA GPU")
def test_without_a_card_the_reason_is_given() -> None:
    with pytest.raises(DeviceError, match=r"CUDA|NVIDIA"):
        get_backend("cuda")


def test_old_cards_draw_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "old")
    for capability, best in (((7, 5), torch.float16), ((8, 6), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda c=capability: c)
        backend = CUDABackend()
        assert backend.available() == (True, "old")
        assert backend.number_format("auto")[0] == best


def test_tests_draw_on_the_processor_where_there_is_a_card(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable says so, which commands that tests start hear too; without it `auto` is the card."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(CUDABackend, "available", lambda self: (True, "a card"))
    assert get_backend().name == card_of("auto", {"CPU": 2.0, "GPU": 1.0}).lower() == "cpu"
    assert LanternPipeline.from_pretrained(str(model)).device.type == "cpu"
    assert get_backend("cuda").name == "cuda"
    monkeypatch.delenv(DEVICE_VARIABLE)
    assert get_backend().name == "cuda" and card_of("auto", {"CPU": 2.0, "GPU": 1.0}) == "GPU"
    monkeypatch.setenv(DEVICE_VARIABLE, "toaster")
    with pytest.raises(DeviceError, match=f"{DEVICE_VARIABLE} names the unknown device 'toaster'"):
        get_backend()


def test_too_little_memory_says_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 24 * 10**9))
    with (
        pytest.raises(DeviceError, match=r"1\.0 of 24\.0 GB are free"),
        CUDABackend().errors(),
    ):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


# ------------------------------------------------------------------------------------ on a card


def on_card(tree: str, mode: str, requests: list[Any]) -> Engine:
    target, drafter = tiny_models()
    spec = spec_for(load_static(tree), requests)
    near = ring(target.config.vocab_size).cuda() if spec.neighbours else None
    return Engine(
        target.cuda(),
        drafter.cuda(),
        spec,
        DevicePlan(get_backend("cuda"), target.dtype, mode),
        near,
    )


@needs_card
@pytest.mark.cuda
@pytest.mark.parametrize("tree", ["chain", "mc_sim_7b_63"])
def test_captured_equals_eager(tree: str) -> None:
    relaxed = Multiplicative(6, lam=4.0)
    requests = [request("abcd", 1, relaxation=relaxed), request("xy", 2, top_k=6)]
    captured, eager = (draw(on_card(tree, m, requests), requests) for m in ("cuda_graph", "eager"))
    assert captured.tokens.tolist() == eager.tokens.tolist()
    assert captured.accepted == eager.accepted


@needs_card
@pytest.mark.cuda
def test_two_images_equal_each_alone() -> None:
    both = [request("abcd", 1, temperature=0.7), request("xy", 2, top_k=6)]
    together = draw(on_card("chain", "cuda_graph", both), both).tokens.tolist()
    alone = [draw(on_card("chain", "cuda_graph", [r]), [r]).tokens.tolist()[0] for r in both]
    assert together == alone


@needs_card
@pytest.mark.cuda
def test_card_draws_the_processors_tokens() -> None:
    requests = [request("abcd", 1)]
    card = draw(on_card("chain", "cuda_graph", requests), requests)
    spec = spec_for(load_static("chain"), requests)
    assert card.tokens.tolist() == draw(make_engine(tiny_models(), spec), requests).tokens.tolist()


@needs_card
@pytest.mark.cuda
def test_prompts_go_up_without_waiting_for_the_card(model: Path) -> None:
    """Images that run are not held up by the prompt of one that is let in beside them."""
    pipeline = LanternPipeline.from_pretrained(str(model), device="cuda")
    prompts = [request("abcd", 1), request("xy", 2)]
    setting = pipeline.resolve("ar")
    engine = pipeline.engines.get(pipeline.spec(prompts, setting.tree, 2))
    with torch.no_grad():
        first = pipeline.prefix(engine, prompts)
    torch.cuda.set_sync_debug_mode("error")  # a copy from pageable memory raises
    try:
        with torch.no_grad():
            again = pipeline.prefix(engine, prompts)
            upload_prefix(engine, again, engine.state.prefill)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(first[:3], again[:3], strict=True))
