"""Facts of Gaudi's contract, as small programs that a real card and the emulated one can both answer.

Each is named, says from which file of the bridge (HabanaAI/gaudi-pytorch-bridge, of every release in
`releases.RELEASES` unless the fact is of one alone) it is known, and uses nothing but the vendor's own interface. On
the emulator all hold; a card confirms or refutes them.
"""

from __future__ import annotations

import copy
import inspect
import io
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gaudi_emulator.releases import RELEASES, ROOT, plugin_version

INT64 = torch.int64
Answer = Literal["confirmed", "refuted", "unanswered"]
Pair = namedtuple("Pair", "double triple")


class Refuted(AssertionError):
    """The device does something else."""


class Unanswered(Exception):
    """This device cannot tell."""


def expect(got: object, want: object, what: str = "") -> None:
    if got != want:
        raise Refuted(f"{what}{': ' if what else ''}got {got}, the contract says {want}")


@contextmanager
def refused(message: str = "", kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """What the contract says raises this error, with these words."""
    try:
        yield
    except kind as error:
        if message not in str(error):
            raise Refuted(f"raised {error}, the contract says {message!r}") from error
    else:
        raise Refuted("it went through")


@dataclass(frozen=True)
class Fact:
    """One line of the contract."""

    name: str
    source: str
    lazy: bool  # whether it is one of lazy mode, or of the other
    check: Callable[[Card], None]
    only: str | None = None  # the one release that it holds for


FACTS: list[Fact] = []


def fact(
    source: str, lazy: bool = True, only: str | None = None
) -> Callable[[Callable[[Card], None]], None]:
    """Adds a function to the facts; its name is the fact."""

    def add(check: Callable[[Card], None]) -> None:
        FACTS.append(Fact(check.__name__.replace("_", " "), source, lazy, check, only))

    return add


def release_facts(release: str, lazy: bool) -> list[Fact]:
    return [fact for fact in FACTS if fact.lazy == lazy and fact.only in (None, release)]


def stands_in(device: str) -> bool:
    """Whether the Gaudi of this process is emulated; known before its software is loaded."""
    return device == Card.device.type and "emulated" in plugin_version()


@torch.no_grad()
def ask_fact(name: str) -> tuple[Answer, str]:
    """Whether a fact holds on the card whose software is loaded, real or emulated, and why not."""
    (fact,) = (fact for fact in FACTS if fact.name == name)
    try:
        fact.check(Card())
    except Refuted as error:
        return "refuted", str(error)
    except Unanswered as error:
        return "unanswered", str(error)
    return "confirmed", ""


class Card:
    """The vendor's interface to one device, real or emulated."""

    device = torch.device("hpu")

    def part(self, name: str) -> ModuleType:
        """A module of habana_frameworks.torch."""
        try:
            return import_module(f"{ROOT}.torch.{name}")
        except ImportError as error:
            raise Unanswered(f"this release has no {name}") from error

    @property
    def hpu(self) -> ModuleType:
        return self.part("hpu")

    def mark_step(self) -> None:
        self.part("core").mark_step()

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(*shape, dtype=dtype, device=self.device)

    def tensor(self, values: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def total(self, metric: str) -> int:
        """How often something happened since the start, by the bridge's own metrics."""
        self.hpu.synchronize()
        found = self.part("hpu.metrics").metric_global(metric)
        if found is None:
            raise Unanswered(f"this release has no metric {metric}")
        return int(found.stats()[0][1])

    def during(self, metric: str, body: Callable[[], object]) -> int:
        before = self.total(metric)
        body()
        return self.total(metric) - before

    def falls_back(self, body: Callable[[], object]) -> bool:
        return self.during("cpu_fallback", body) > 0

    def compiled(self, body: Callable[[], object]) -> int:
        """Recipes made by a body and the step mark after it."""

        def marked() -> None:
            body()
            self.mark_step()

        self.mark_step()
        return self.during("graph_compilation", marked)

    def captured(self, body: Callable[[], Any], dry_run: bool = False) -> tuple[Any, Any]:
        """A graph and what its capture returned; the capture always ends."""
        graph = self.hpu.HPUGraph()
        with self.hpu.stream(self.hpu.Stream()):
            graph.capture_begin(dry_run)
            try:
                result = body()
            finally:
                graph.capture_end()
        return graph, result

    def wrapped(self, **options: Any) -> nn.Module:
        made: nn.Module = self.hpu.wrap_in_hpu_graph(Scaled(), **options)
        return made


class Scaled(nn.Module):
    def forward(self, x: Tensor, factor: Any = 2) -> Tensor:
        return x * factor


# HPU graphs


@fact("tests/pytest_working/lazy/test_capture_replay_inplace.py")
def a_capture_executes(card: Card) -> None:
    x = card.ones(2) * 0
    graph, _ = card.captured(lambda: x.add_(1))
    expect(x.cpu().tolist(), [1, 1], "after the capture")
    graph.replay()
    expect(x.cpu().tolist(), [2, 2], "after a replay")


@fact("backend/habana_device/HPUGraph.cpp")
def a_replay_reads_the_recorded_storages(card: Card) -> None:
    x, scale = card.ones(2), 3.0
    graph, out = card.captured(lambda: x * scale)
    scale = 5.0
    x.fill_(2)
    graph.replay()
    expect(out.cpu().tolist(), [6, 6])


@fact("tests/pytest_working/lazy/test_inplace_output_handling.py:37")
def a_step_mark_in_a_capture_is_legal(card: Card) -> None:
    def body() -> Tensor:
        y = card.ones(2) + 1
        card.mark_step()
        return y * 2

    graph, out = card.captured(body)
    graph.replay()
    expect(out.cpu().tolist(), [4, 4])


@fact("tests/pytest_working/lazy/test_inplace_output_handling.py:102")
def a_cache_is_written_by_index_copy_in_a_graph(card: Card) -> None:
    cache, place = card.ones(4, 2) * 0, card.tensor([0])
    graph, _ = card.captured(lambda: cache.index_copy_(0, place, card.ones(1, 2)))
    place.fill_(2)
    graph.replay()
    expect(cache.cpu()[:, 0].tolist(), [1, 0, 1, 0])


@fact("habana_lazy/hpu_lazy_tensors.cpp:1525")
def random_numbers_are_fresh_in_each_replay(card: Card) -> None:
    graph, out = card.captured(lambda: torch.rand(8, device=card.device))
    seen = {tuple(out.cpu().tolist())}
    for _ in range(3):
        graph.replay()
        seen.add(tuple(out.cpu().tolist()))
    expect(len(seen), 4, "different rows of numbers")


@fact("hpu/graphs.py, habana_lazy/hpu_lazy_tensors.cpp:978")
def a_dry_run_computes_nothing_until_a_replay(card: Card) -> None:
    x = card.ones(2) * 0
    card.mark_step()

    def body() -> Tensor:
        x.add_(1)
        return x * 2

    graph, out = card.captured(body, dry_run=True)
    expect(x.cpu().tolist(), [0, 0], "after the capture")
    graph.replay()
    expect(out.cpu().tolist(), [2, 2], "after a replay")


@fact("hpu_ops/cpu_fallback.cpp:100")
def a_fallback_in_a_capture_raises(card: Card) -> None:
    x = card.ones(4)
    with refused("cpu fallback is not supported during hpu graph capturing"):
        card.captured(lambda: torch.i0(x))


# wrap_in_hpu_graph


@fact("hpu/graphs.py:488")
def a_tensor_of_no_dimensions_is_no_key_and_a_number_is(card: Card) -> None:
    model, x = card.wrapped(), card.ones(2)
    for value in (1.0, 2.0, 3.0):
        expect(model(x, card.tensor(value)).cpu().tolist(), [value, value])
    for number in (5, 6):
        expect(model(x, number).cpu().tolist(), [number, number])


@fact("hpu/graphs.py:488", only="1.19")
def the_key_leaves_the_format_out(card: Card) -> None:
    model = card.wrapped()
    model(card.ones(2))
    expect(model(card.ones(2, dtype=torch.bfloat16)).dtype, torch.float32)


@fact("hpu/graphs.py, input_hash", only="1.24")
def the_key_has_the_format(card: Card) -> None:
    model = card.wrapped()
    model(card.ones(2))
    expect(model(card.ones(2, dtype=torch.bfloat16)).dtype, torch.bfloat16)


@fact("hpu/graphs.py, replay_with_inputs", only="1.24")
def a_scalar_of_the_host_is_that_of_each_call(card: Card) -> None:
    model, x = card.wrapped(), card.ones(2)
    for value in (2.0, 3.0, 4.0):
        expect(model(x, torch.tensor(value)).cpu().tolist(), [value, value])


@fact("hpu/graphs.py:488")
def minus_one_and_minus_two_share_a_key(card: Card) -> None:
    model, x = card.wrapped(), card.ones(2)
    model(x, -1)
    expect(model(x, -2).cpu().tolist(), [-1, -1])


@fact("hpu/graphs.py:502")
def the_first_callers_tensors_are_the_static_inputs(card: Card) -> None:
    model, first = card.wrapped(), card.ones(2)
    model(first)
    model(card.ones(2) * 7)
    expect(first.cpu().tolist(), [7, 7])


@fact("hpu/graphs.py:656")
def outputs_share_one_storage(card: Card) -> None:
    model = card.wrapped()
    model(card.ones(2))
    kept = model(card.ones(2))
    model(card.ones(2) * 7)
    expect(kept.cpu().tolist(), [14, 14])


@fact("hpu/graphs.py:656")
def outputs_keep_their_kind(card: Card) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Pair:
            return Pair(x * 2, x * 3)

    model = card.hpu.wrap_in_hpu_graph(Both())
    for value in (1, 5):
        found = model(card.ones(1) * value)
        expect(type(found), Pair)
        expect([found.double.item(), found.triple.item()], [2 * value, 3 * value])


@fact("hpu/graphs.py:647")
def without_the_tensor_cache_live_inputs_are_bound_anew(card: Card) -> None:
    class Cache(nn.Module):
        def forward(self, cache: Tensor, place: Tensor) -> Tensor:
            cache.index_copy_(0, place, card.ones(1, 2))
            return cache.relu_()

    model = card.hpu.wrap_in_hpu_graph(Cache(), disable_tensor_cache=True)
    caches = [-card.ones(3, 2) for _ in range(3)]
    for place, cache in enumerate(caches):
        model(cache, card.tensor([place]))
    found = [cache.cpu()[:, 0].tolist() for cache in caches]
    expect(found, [[1, 0, 0], [0, 1, 0], [0, 0, 1]])


@fact("hpu/graphs.py:617")
def a_dry_run_of_the_wrapper_gives_numbers(card: Card) -> None:
    expect(card.wrapped(dry_run=True)(card.ones(2)).cpu().tolist(), [2, 2])


@fact("hpu/graphs.py:734")
def a_wrapped_forward_keeps_its_signature(card: Card) -> None:
    expect(list(inspect.signature(card.wrapped().forward).parameters), ["x", "factor"])


@fact("hpu/graphs.py:602")
def beyond_max_graphs_calls_run_plainly(card: Card) -> None:
    model = card.wrapped(max_graphs=1)
    model(card.ones(2))
    expect(model(card.ones(3)).cpu().tolist(), [2, 2, 2])


@fact("hpu/graphs.py:553")
def warm_up_mode_replays_nothing(card: Card) -> None:
    model, x = card.wrapped(), card.ones(2)
    model(x)
    x.fill_(5)
    expect(model(x, warmup_mode=True).cpu().tolist(), [2, 2])
    expect(model(x, bypass_hpu_graphs=True).cpu().tolist(), [10, 10])


@fact("hpu/graphs.py:502")
def copy_to_is_cut_to_the_shorter_sequence(card: Card) -> None:
    one, two = card.ones(1), card.ones(1)
    card.hpu.graphs.copy_to([one, two], [card.ones(1) * 5])
    expect([one.item(), two.item()], [5, 1])


# Lazy graphs


@fact("habana_lazy/lazy_graph_hash_builder.cpp")
def one_sequence_of_operators_is_one_recipe(card: Card) -> None:
    def step() -> None:
        (card.ones(11) * 2 + 1).relu()

    expect([card.compiled(step) for _ in range(3)][1:], [0, 0], "recipes of the later turns")


@fact("scripts/hpu_op.yaml, scalar_ids")
def the_value_of_a_scalar_makes_no_recipe(card: Card) -> None:
    x = card.ones(13)
    expect([card.compiled(lambda f=f: x * f) for f in (2.5, 3.5, 4.5)][1:], [0, 0])  # type: ignore[misc]


@fact("habana_lazy/lazy_graph_hash_builder.cpp")
def a_slice_bound_makes_a_recipe(card: Card) -> None:
    x = card.ones(17)
    expect([card.compiled(lambda n=n: x[:n] + 1) for n in (3, 4, 5)], [1, 1, 1])  # type: ignore[misc]


@fact("habana_lazy/hpu_stage_submission.h")
def a_read_of_a_number_starts_no_stages_and_one_of_a_shape_does(card: Card) -> None:
    def forty(width: int, read: Callable[[], object]) -> int:
        def adds() -> None:
            read()
            x = torch.zeros(width, device=card.device)
            for _ in range(40):
                x = x + 1

        for _ in range(2):  # what it compiles itself is known then
            read()
        return card.compiled(adds)

    x = card.ones(3)
    expect(forty(19, lambda: x.sum().item()), 1, "recipes after a read of a number")
    expect(forty(23, lambda: x.nonzero()), 3, "recipes after a read of a shape")


@fact("habana_lazy/lazy_kernels.h:1459")
def a_cpu_tensor_among_device_tensors_is_uploaded(card: Card) -> None:
    expect((card.ones(3) + torch.ones(3)).cpu().tolist(), [2, 2, 2])


# Numbers


@fact("scripts/env_flags.yaml:624")
def int64_is_stored_as_int32(card: Card) -> None:
    top = card.tensor([2**31 - 1], INT64)
    expect((top + 1).cpu().tolist(), [-(2**31)])
    expect(top.add_(1).cpu().tolist(), [-(2**31)])


@fact("habana_kernels/lazy_kernels.cpp:233")
def an_upload_beyond_int32_raises(card: Card) -> None:
    with refused("trying to cast Long to Int"):
        card.tensor([2**40], INT64)
        card.mark_step()


@fact("habana_kernels/lazy_kernels.cpp:233")
def float64_is_stored_as_float32(card: Card) -> None:
    third = torch.tensor([1 / 3], dtype=torch.float64)
    expect(third.to(card.device).cpu().tolist(), third.float().tolist())


@fact("habana_kernels/lazy_kernels.cpp:2038")
def complex_numbers_come_back_as_a_cpu_tensor(card: Card) -> None:
    expect(torch.complex(card.ones(2), card.ones(2)).device.type, "cpu")


# Operators


def native(name: str, body: Callable[[Card], object], since: str | None, source: str) -> None:
    """Facts for an operator: it falls back before the release that has it, if one has, and is native from then on."""

    def add(is_native: bool, only: str | None) -> None:
        def check(card: Card) -> None:
            expect(card.falls_back(lambda: body(card)), not is_native, "falls back")

        check.__name__ = f"{name}_{'is_native' if is_native else 'falls_back'}"
        fact(source, only=only)(check)

    first, last = RELEASES
    if since == last:
        add(False, first)
        add(True, last)
    else:
        add(since is not None, None)


YAML = "scripts/hpu_op.yaml"
FORMATS = "hpu_ops/supported_dtypes.cpp:49"
SORT = "hpu_ops/backend/sort_gen.cpp"
native("histc", lambda c: torch.histc(c.ones(4), 3), "1.24", YAML)
native("digamma", lambda c: c.ones(2).digamma(), "1.24", YAML)
native("the_inverse_of_a_matrix", lambda c: torch.linalg.inv(c.ones(1, 1)), None, YAML)
native("i0", lambda c: torch.i0(c.ones(2)), None, YAML)
native("gcd", lambda c: torch.gcd(c.tensor([4]), c.tensor([6])), None, YAML)
native("lgamma", lambda c: c.ones(2).lgamma(), "1.19", YAML)
native("index_copy", lambda c: c.ones(2).index_copy_(0, c.tensor([1]), c.ones(1)), "1.19", YAML)
native("a_sum_of_int16", lambda c: c.ones(4, dtype=torch.int16).sum(), "1.24", YAML)
native("nan_to_num_of_float16", lambda c: c.ones(4, dtype=torch.float16).nan_to_num(), "1.24", YAML)
native("roll_of_int64", lambda c: c.ones(4, dtype=INT64).roll(1), "1.19", FORMATS)
native("a_stable_sort_of_37", lambda c: c.ones(2, 37).sort(dim=-1, stable=True), "1.19", SORT)
native("a_stable_sort_of_38", lambda c: c.ones(2, 38).sort(dim=-1, stable=True), "1.24", SORT)
native(
    "an_embedding_that_counts_frequencies",
    lambda c: F.embedding(c.tensor([0, 1]), c.ones(4, 2), scale_grad_by_freq=True),
    None,
    "hpu_ops/embedding_gen.cpp",
)
native("an_embedding", lambda c: F.embedding(c.tensor([0, 1]), c.ones(4, 2)), "1.19", YAML)
native("a_topk", lambda c: c.ones(2, 64).topk(5), "1.19", YAML)
native("cumsum", lambda c: c.ones(2, 64).cumsum(-1), "1.19", YAML)


# Tensors, autograd, random numbers, files


@fact("tests/pytest_working/lazy/test_hpu_graph.py")
def data_is_the_same_storage(card: Card) -> None:
    x = card.ones(2)
    x.data += 1
    expect(x.cpu().tolist(), [2, 2])
    layer = nn.Linear(2, 2).to(card.device)
    layer.weight.data = torch.zeros(2, 2, device=card.device)
    expect(layer.weight.abs().sum().item(), 0)


@fact("scripts/hpu_op.yaml: t_, unsqueeze_, set_, resize_")
def shapes_change_in_place(card: Card) -> None:
    x, other = card.ones(2, 3), card.ones(5) * 4
    expect(tuple(x.t_().shape), (3, 2))
    expect(tuple(x.unsqueeze_(0).shape), (1, 3, 2))
    expect(x.set_(other).cpu().tolist(), [4] * 5)  # type: ignore[call-overload]


@fact("torch: autograd over devices")
def gradients_flow_through_a_move(card: Card) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.enable_grad():
        (x.to(card.device) * 3).cpu().sum().backward()
    expect(None if x.grad is None else x.grad.tolist(), [3, 3])


@fact("torch: training on a device")
def a_layer_learns_what_it_learns_on_the_cpu(card: Card) -> None:
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    model, x = copy.deepcopy(twin).to(card.device), torch.randn(16, 4)
    with torch.enable_grad():
        for one, data in ((twin, x), (model, x.to(card.device))):
            learner = torch.optim.SGD(one.parameters(), 0.1)
            for _ in range(3):
                learner.zero_grad()
                one(data).square().mean().backward()
                learner.step()
                card.mark_step()
    apart = max(
        float((a.detach().cpu() - b.detach()).abs().max())
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    if not apart < 1e-2:
        raise Refuted(f"weights are {apart:.2e} apart after three steps")


@fact("tests/pytest_working/any_mode/test_hpu_rng_state.py")
def one_seed_reaches_host_and_device(card: Card) -> None:
    one_seed_reaches_the_device(card)
    state = card.hpu.get_rng_state()
    first = torch.rand(4, device=card.device).cpu().tolist()
    card.hpu.set_rng_state(state)
    expect(torch.rand(4, device=card.device).cpu().tolist(), first, "from the same state")


@fact("docs.habana.ai, PyTorch Mixed Precision")
def autocast_lowers_products_and_keeps_exponentials(card: Card) -> None:
    layer, x = nn.Linear(2, 2).to(card.device), card.ones(1, 2)
    with torch.autocast(card.device.type, dtype=torch.bfloat16):
        low = layer(x)
        expect((low.dtype, low.exp().dtype), (torch.bfloat16, torch.float32))


@fact("core/torch_overwrites.py")
def checkpoints_hold_cpu_tensors(card: Card) -> None:
    file = io.BytesIO()
    torch.save({"x": card.ones(2) * 3}, file)
    file.seek(0)
    expect(torch.load(file, weights_only=True)["x"].device.type, "cpu")
    file.seek(0)
    found = torch.load(file, map_location=card.device.type, weights_only=True)["x"]
    expect((found.device.type, found.cpu().tolist()), (card.device.type, [3, 3]))


@fact("torch: copies of modules")
def a_deep_copy_has_a_storage_of_its_own(card: Card) -> None:
    layer = nn.Linear(2, 2).to(card.device)
    twin = copy.deepcopy(layer)
    twin.weight.data.zero_()
    expect(layer.weight.abs().sum().item() > 0, True)


@fact("torch: Module.to keeps parameter objects")
def weights_that_two_modules_share_stay_shared(card: Card) -> None:
    table, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = table.weight
    nn.ModuleList([table, head]).to(card.device)
    expect(head.weight is table.weight, True)


# The vendor's interface


@fact("hpu/metrics/metrics.py")
def metrics_are_read_by_position_and_an_unknown_one_is_none(card: Card) -> None:
    metrics = card.part("hpu.metrics")
    expect(
        [row[0] for row in metrics.metric_global("graph_compilation").stats()[:1]], ["TotalNumber"]
    )
    expect(metrics.metric_global("no_such_metric"), None)


@fact("hpu/metrics/metrics.py, DevMemMetric", only="1.24")
def the_metric_of_memory_is_a_dictionary(card: Card) -> None:
    expect(type(card.part("hpu.metrics").metric_global("device_memory").stats()), dict)


@fact("hpu/metrics/metrics.py, get_local_metric", only="1.24")
def an_unknown_local_metric_raises(card: Card) -> None:
    metrics = card.part("hpu.metrics")
    kind = metrics.MetricNotFoundError
    expect(issubclass(kind, Exception), True, "it is an error")
    with refused("no_such_metric", kind):
        metrics.metric_localcontext("no_such_metric").__enter__()


@fact("utils/internal.py")
def the_bridge_says_its_mode(card: Card) -> None:
    expect(card.part("utils.internal").is_lazy(), True)


@fact("hpex/kernels/FusedSDPA.py")
def fused_attention_takes_lengths_and_modes_of_any_case(card: Card) -> None:
    fused = card.part("hpex.kernels").FusedSDPA
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 2, 4, 16) for _ in range(3))
    lengths = torch.tensor([3, 3], dtype=torch.int32).to(card.device)
    inputs = [t.to(card.device) for t in (q, k, v)]
    for mode, padding, kept in (("Fast", "right", slice(0, 3)), ("none", "left", slice(1, 4))):
        want = F.scaled_dot_product_attention(
            q[..., kept, :], k[..., kept, :], v[..., kept, :], is_causal=True
        )
        got = fused.apply(*inputs, None, 0.0, True, None, mode, True, lengths, padding)
        close(got.cpu()[..., kept, :], want)


@fact("hpu/memory.py:32")
def memory_has_its_keys(card: Card) -> None:
    expect(list(card.hpu.memory_stats())[:3], ["Limit", "InUse", "MaxInUse"])
    free, total = card.hpu.mem_get_info()
    expect(0 < free <= total, True, "free and total")


@fact("hpex/kernels/FusedSDPA.py, tests/pytest_working/any_mode/test_hpu_sdpa.py:357")
def fused_attention_takes_three_dimensions_and_masks_of_booleans(card: Card) -> None:
    fused = card.part("hpex.kernels").FusedSDPA
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 16) for _ in range(3))
    mask = torch.ones(4, 4).tril().bool()
    want = F.scaled_dot_product_attention(q, k, v, mask)
    got = fused.apply(*(t.to(card.device) for t in (q, k, v, mask))).cpu()
    close(got, want)


@fact("hpex/kernels/RotaryPosEmbeddingHelper.py:28")
def the_rotary_kernel_takes_positions_and_other_formats(card: Card) -> None:
    kernels = card.part("hpex.kernels")
    torch.manual_seed(1)
    x, angles = torch.randn(1, 2, 3, 8), torch.rand(10, 8)
    ids = torch.tensor([[4, 5, 6]])
    cos, sin = angles.cos()[ids][:, None], angles.sin()[ids][:, None]  # [1, 1, T, 8]
    first, second = x.chunk(2, -1)
    want = x * cos + torch.cat([-second, first], -1) * sin
    tables = [t.to(card.device)[None, None] for t in (angles.cos(), angles.sin())]
    got = kernels.apply_rotary_pos_emb(
        x.bfloat16().float().to(card.device), tables[0], tables[1], ids.to(card.device)
    )
    close(got.cpu(), want)


@fact("hpex/normalization")
def the_fused_norm_is_a_root_mean_square_norm(card: Card) -> None:
    norm = card.part("hpex.normalization").FusedRMSNorm
    x = torch.randn(3, 16)
    want = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    close(norm.apply(x.to(card.device), card.ones(16), 1e-5).cpu(), want)


def close(got: Tensor, want: Tensor) -> None:
    apart = float((got.float() - want.float()).abs().max())
    if not apart < 2e-2:  # the card multiplies in lower precision inside
        raise Refuted(f"{apart:.2e} apart from plain arithmetic")


# Outside lazy mode


@fact("hpu/graphs.py", lazy=False, only="1.24")
def the_graphs_interface_is_named_and_raises_outside_lazy_mode(card: Card) -> None:
    for name, arguments in (("HPUGraph", ()), ("graph", (None,))):
        with refused("is available in lazy mode only"):
            getattr(card.hpu, name)(*arguments)


@fact("utils/internal.py", lazy=False)
def the_bridge_says_its_mode_outside_lazy_mode(card: Card) -> None:
    expect(card.part("utils.internal").is_lazy(), False)


@fact("hpu/__init__.py:45", lazy=False, only="1.19")
def the_graphs_interface_is_missing_outside_lazy_mode(card: Card) -> None:
    expect([hasattr(card.hpu, name) for name in ("HPUGraph", "wrap_in_hpu_graph")], [False, False])


@fact("core/step_closure.py", lazy=False)
def a_step_mark_outside_lazy_mode_is_nothing(card: Card) -> None:
    expect(card.part("core").mark_step(), None)


@fact("scripts/env_flags.yaml:624", lazy=False)
def int64_is_int64_outside_lazy_mode(card: Card) -> None:
    expect((card.tensor([2**40], INT64) + 1).cpu().tolist(), [2**40 + 1])


@fact("habana_eager/eager_op.cpp:93", lazy=False)
def a_cpu_tensor_among_device_tensors_is_refused_outside_lazy_mode(card: Card) -> None:
    with refused():
        card.ones(3) + torch.ones(3)


@fact("core/torch_overwrites.py", lazy=False)
def one_seed_reaches_the_device_outside_lazy_mode(card: Card) -> None:
    one_seed_reaches_the_device(card)


def one_seed_reaches_the_device(card: Card) -> None:
    rows = []
    for _ in range(2):
        torch.manual_seed(3)
        rows.append(torch.rand(4, device=card.device).cpu().tolist())
    expect(rows[0], rows[1])
