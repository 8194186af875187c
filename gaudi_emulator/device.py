"""The emulated card: operators run at once on CPU tensors, and the books are kept as the bridge keeps them.

In lazy mode operators gather until something ends the graph (`flush`): the sequence of operators, shapes
and constants is the key of a recipe, a key not seen before is a compilation. Outside lazy mode each
operator runs by itself. While a capture is open every operator is also recorded (`graphs.Recording`).
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, inference_mode
from torch.random import fork_rng, manual_seed

from gaudi_emulator import ops
from gaudi_emulator.lint import checks
from gaudi_emulator.lint.rules import Findings, Severity, call_site
from gaudi_emulator.releases import Release
from gaudi_emulator.tensor import Args, HPUTensor, Kwargs, flat
from lantern_hpu.backends.hpu.env import LAZY_MODE

if TYPE_CHECKING:
    from gaudi_emulator.graphs import Recording
    from gaudi_emulator.rehearsal import Run
    from gaudi_emulator.tracing import Compiler

LIMIT = int(94.62 * 2**30)  # bytes that software sees of a Gaudi 2
CREDIT = 16  # host reads for setting up and for results; each launch earns one more
LOOPED = 3  # reads of a value by one line, beyond which it stands in a loop if each launch has one
UPLOADS = 16  # uploads between two launches that are not reported
VARIANTS = 4  # recipes that differ by a constant alone, beyond which they are reported
SIZES = 8  # recipes that differ by shapes and are used once, beyond which they are reported
GATHERED = 6_000  # operators without an end
STAGE = 10  # operators in the first graph after a shape was read back; the limit doubles until one of ENDS
ENDS = ("mark_step", "capture begin", "replay")
# Operators whose constants or shapes are worth a look at who called them
SITED = frozenset(
    "slice select narrow arange topk roll constant_pad_nd view expand cat stack as_strided".split()
)


@dataclass
class Counts:
    """What the device did."""

    recipes: int = 0  # compilations
    hits: int = 0
    launches: int = 0
    flushes: Counter[str] = field(default_factory=Counter)  # by reason
    host_syncs: Counter[str] = field(default_factory=Counter)  # by reason
    uploads: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)  # by operator
    graphs: Counter[str] = field(default_factory=Counter)  # captured, replayed, bypassed, evicted
    cuts: Counter[str] = field(default_factory=Counter)  # by operator, of compiled graphs
    whole_copies: int = 0  # of tensors that compiled graphs write by index
    recompiles: int = 0  # compilations after warm-up


class Lease:
    """Lives as long as a tensor's memory is referenced."""


class Device:
    """One emulated card."""

    def __init__(self, release: Release, lazy: bool | None = None) -> None:
        """
        Args:
            lazy: None for the mode of the flag when the bridge is loaded.
        """
        self.release, self.asked = release, lazy
        self.flags: dict[str, str] = {}
        wanted = self.read_flags()
        self.lazy = wanted if lazy is None else lazy
        self.counts = Counts()
        self.recording: Recording | None = None
        self.findings = Findings(lambda: self.recording is not None, self.release.name)
        self.pending: list[tuple[Any, ...]] = []
        self.sites: list[tuple[str, int] | None] = []
        self.written: set[int] = set()  # storages with pending results
        self.recipes: set[tuple[Any, ...]] = set()
        self.variants: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
        self.again: Counter[tuple[str, ...]] = Counter()  # uses of recipes after their first
        self.blamed: dict[tuple[str, ...], tuple[str, int] | None] = {}  # None: reported
        self.generator = torch.Generator().manual_seed(0)
        self.warm = self.inside = False
        self.credit, self.uploaded = CREDIT, 0
        self.earned = self.values_read = 0
        self.read_at: Counter[tuple[str, int]] = Counter()  # single values, by line
        self.threads = threading.local()  # torch's modes are of one thread each
        self.loaded = False  # whether the bridge was imported, which is when it reads its flags
        self.compiler: Compiler | None = None  # of a user's program
        self.traced = False  # whether dynamo has the word
        self.differential = False  # whether functions are rehearsed before they are captured
        self.rehearsed: Run | None = None
        self.warned: set[str] = set()  # functions that said once that they do nothing
        self.in_use = self.peak = 0

    def read_flags(self) -> bool:
        """As the bridge does while it is imported. -> the mode that they ask for"""
        environ = os.environ.items()
        self.flags |= {n: v for n, v in environ if n.startswith(("PT_", "HABANA_", "WORLD_SIZE"))}
        self.most = int(self.flags.get("PT_HPU_MAX_COMPOUND_OP_SIZE", 0)) or 2**63
        self.staged = self.most  # operators that a graph may gather now
        self.dynamic_shapes = flag(self.flags, "PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES")
        wanted = os.environ.get(LAZY_MODE)
        return self.release.lazy_by_default if wanted is None else wanted != "0"

    def load(self) -> None:
        """The bridge is imported."""
        self.loaded, lazy = True, self.read_flags()
        if self.asked is None:
            self.lazy = lazy
            vars(self).pop("modules", None)
        elif lazy != self.lazy and LAZY_MODE in os.environ:
            self.findings.hit("H080", f"{LAZY_MODE}={lazy:d}, and this is the other mode")

    @cached_property
    def modules(self) -> dict[str, ModuleType]:
        """`habana_frameworks` and all below it, by their full names."""
        from gaudi_emulator.habana import modules

        return modules(self)

    @property
    def autoloads(self) -> bool:
        """Whether `import torch` loads the bridge."""
        kept_away = self.lazy or os.environ.get("PT_HPU_AUTOLOAD") == "0"
        return self.release.autoloads and not kept_away

    # Operators

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """One operator with a device tensor among its arguments, or a factory on the device."""
        op = ops.op_of(func, self.release)
        if op.packet in ops.MADE_LIKE:  # shape and format of a tensor are read, not its numbers
            like, *rest = args
            if kwargs.get("device") == torch.device("cpu"):
                return func(like.raw, *rest, **kwargs)
            args = (like if isinstance(like, HPUTensor) else HPUTensor(like.detach()), *rest)
        if op.packet in SPECIAL:
            return SPECIAL[op.packet](self, op, func, args, kwargs)
        return self.operate(op, func, args, kwargs)

    def operate(self, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """Check, run on the CPU tensors, book, record, wrap."""
        checks.before(self, op, args, kwargs)
        held: dict[int, HPUTensor] = {}
        raw_args = tuple(self.unwrap(op, value, held) for value in args)
        raw_kwargs = {name: self.unwrap(op, value, held) for name, value in kwargs.items()}
        if raw_kwargs.get("device") is not None:
            raw_kwargs["device"] = torch.device("cpu")
        if why := checks.falls_back(self, op, args, kwargs):
            self.fall_back(op, why)
        for target in ops.written_arguments(op, raw_args, raw_kwargs):
            if self.rehearsed is not None:
                self.rehearsed.keep(target)
            if self.recording is not None:
                self.recording.keep(target)
                if op.packet in checks.INDEX_WRITES and self.recording.write_by_index(target):
                    # Right in lazy mode; the same function under hpu_backend would be a chain.
                    self.findings.hit("H092", f"{op.name}; lazy mode keeps both", "info")
        seed = self.next_seed(kwargs.get("generator")) if op.random else None
        result = self.compute(op, func, raw_args, raw_kwargs, seed)
        if self.lazy:
            self.book(op, args, kwargs)
        else:
            self.counts.launches += 1
        if self.rehearsed is not None:
            self.rehearsed.note(op, raw_args, raw_kwargs, result)
        if self.recording is not None:
            self.recording.add(op, func, raw_args, raw_kwargs, result)
        if result is None:  # no result brings a new shape of what was written
            for target in flat(ops.written_arguments(op, args, kwargs)):
                if isinstance(target, HPUTensor):
                    target.synced()
        return self.wrap(op, args, result, held)

    def compute(self, op: ops.Op, func: Any, args: Args, kwargs: Kwargs, seed: int | None) -> Any:
        """An operator on CPU tensors, with its results stored as the device stores them."""
        try:
            result = execute(func, args, kwargs, seed)
        except (IndexError, RuntimeError) as error:
            if op.packet not in checks.INDEXED:
                raise
            if "single memory location" in str(error):  # a tensor written from itself
                args = (args[0], *(a.clone() if isinstance(a, Tensor) else a for a in args[1:]))
            else:
                # The device does not check bounds. It was reported; here the nearest element is taken.
                args = checks.clamped(op, args)
            result = execute(func, args, kwargs, seed)
        if op.view_of is None:
            checks.narrow(self, op, (result, *ops.written_arguments(op, args, kwargs)))
        return result

    def unwrap(self, op: ops.Op, value: Any, held: dict[int, HPUTensor]) -> Any:
        if isinstance(value, HPUTensor):
            if value.stale is not None:
                self.findings.hit(value.stale, op.name)
            held[id(value.raw)] = value
            return value.raw
        if isinstance(value, Tensor):
            checks.foreign(self, op, value)
            if self.recording is not None and id(value) not in self.recording.rebound:
                return value.clone()  # baked in
        if isinstance(value, (list, tuple)):
            return [self.unwrap(op, item, held) for item in value]
        return value

    def wrap(
        self, op: ops.Op, args: tuple[Any, ...], result: Any, held: dict[int, HPUTensor]
    ) -> Any:
        if isinstance(result, (list, tuple)):
            return type(result)(self.wrap(op, args, item, held) for item in result)
        if not isinstance(result, Tensor):
            return result
        if id(result) in held:
            return held[id(result)].synced()
        if op.view_of is not None:
            source = args[op.view_of]
            base = source.base if source.base is not None else source
            named = op.packet in ("detach", "alias") and base is source
            # A view of an ordinary tensor is an ordinary one, also under inference_mode
            with inference_mode(source.is_inference()):
                made = HPUTensor(result, None if named else base)
            if named:  # another name, as `.data` makes it; not a view
                made.lease = source.lease
            return made
        return self.new(result)

    def new(self, raw: Tensor) -> HPUTensor:
        """A tensor with storage of its own."""
        checks.known_format(raw.dtype)
        made = HPUTensor(raw)
        self.allocate(made, checks.stored_size(self, raw))
        if self.recording is not None:
            self.recording.follow(made)
        return made

    def allocate(self, owner: HPUTensor, size: int) -> None:
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        owner.lease = Lease()  # it goes where the numbers go, also if two tensors are swapped
        weakref.finalize(owner.lease, self.free, size).atexit = False

    def free(self, size: int) -> None:
        self.in_use -= size

    # Graphs of lazy mode

    def book(self, op: ops.Op, args: Args, kwargs: Kwargs) -> None:
        """Add an operator to the graph that is being gathered."""
        self.pending.append(ops.recipe_key(op, args, kwargs))
        self.sites.append(call_site() if op.packet in SITED and self.recording is None else None)
        for target in ops.written_arguments(op, args, kwargs):
            if isinstance(target, HPUTensor):
                self.written.add(target.raw.untyped_storage().data_ptr())
        if len(self.pending) == GATHERED:
            self.findings.hit("H083", f"{GATHERED} operators")
        if len(self.pending) >= self.staged:
            self.flush("size")

    def flush(self, reason: str) -> None:
        """End the gathered graph: look its recipe up, compile it if it is new, launch it."""
        if reason in ENDS:
            self.staged = self.most
        if reason == "mark_step":
            self.earn()
        if not self.lazy or not self.pending:
            return
        self.staged = min(2 * self.staged, self.most)
        self.counts.flushes[reason] += 1
        self.counts.launches += 1
        recipe = tuple(self.pending)
        if recipe in self.recipes:
            self.counts.hits += 1
            self.again[tuple(op[0] for op in recipe)] += 1
        else:
            self.compile(recipe)
        if self.recording is not None and not reason.startswith("capture"):
            self.findings.hit("H065", reason, "info" if reason == "mark_step" else None)
            self.recording.segments += 1
        self.pending, self.sites, self.written = [], [], set()

    def compile(self, recipe: tuple[Any, ...]) -> None:
        self.recipes.add(recipe)
        self.counts.recipes += 1
        if self.warm:
            self.counts.recompiles += 1
            self.findings.hit("H020", f"{len(recipe)} operators from {recipe[0][0]}")
        if self.recording is None:
            self.blame(recipe)

    def blame(self, recipe: tuple[Any, ...]) -> None:
        """If this recipe differs from an earlier one by a constant or a length alone, name the operator."""
        names = tuple(op[0] for op in recipe)
        earlier = self.variants.setdefault(names, [])
        earlier.append(recipe)
        if len(earlier) < 2 or (len(earlier) <= VARIANTS and not self.warm):
            return
        self.blamed.setdefault(names, call_site())
        changed = [
            (now[0], site)
            for now, then, site in zip(recipe, earlier[-2], self.sites, strict=True)
            if now != then and site is not None
        ]
        grown = [(name, site) for name, site in changed if name.startswith(("cat", "stack"))]
        for name, site in (grown or changed)[:1]:
            detail = f"{name} seen with {len(earlier)} shapes or values"
            severity: Severity | None = "error" if self.warm else None
            self.findings.hit("H013" if grown else "H014", detail, severity, site)
            self.blamed[names] = None

    def end(self) -> None:
        """The program ends: graphs that it compiled for one size after the other and did not use again are named."""
        self.flush("exit")
        for names, site in self.blamed.items():
            sizes = len(self.variants[names])
            if site is not None and self.again[names] < sizes > SIZES:
                self.findings.hit("H016", f"{sizes} sizes", None, site)

    def launch(self, parts: int, whole_copies: int) -> None:
        """A call of a compiled function."""
        self.counts.launches += parts
        self.counts.graphs["launches"] += parts
        self.counts.whole_copies += whole_copies
        self.earn()

    def earn(self) -> None:
        """A launched step pays for a host read, and uploads are counted anew."""
        self.credit += 1
        self.earned += 1
        self.uploaded = 0

    # Between host and device

    def tracing(self) -> bool:
        """Whether torch's tracers are at work, and not the program."""
        return self.traced and torch._guards.CompileContext.try_get() is not None

    def sync(self, reason: str, rule: str) -> None:
        """A host read: ends the graph and waits. What the tracers read for themselves is none of the program's."""
        if self.tracing():
            return
        self.credit -= 1
        graphs = self.lazy or self.counts.graphs["launches"]
        within = self.credit >= 0 or not graphs
        bad = not within or self.recording is not None
        self.values_read += rule == "H001"
        site = call_site()
        self.read_at[site] += rule == "H001"
        looped = self.read_at[site] > max(LOOPED, self.earned - 1)
        each = rule == "H001" and (looped or self.values_read > max(CREDIT, self.earned - 1))
        detail = reason if within else f"{reason}: more than one read for each launched step"
        self.findings.hit(rule, detail, "error" if bad else "warn" if each else "info", site)
        self.wait(reason)

    def wait(self, reason: str) -> None:
        """The host waits for the device. After a shape was read back, lazy mode submits in small pieces for a while
        (habana_lazy/hpu_stage_submission.h, mode 2); after other reads it does not."""
        self.flush(reason)
        self.counts.host_syncs[reason] += 1
        if reason == "dynamic shape" and flag(self.flags, "PT_HPU_ENABLE_STAGE_SUBMISSION", True):
            self.staged = min(
                int(self.flags.get("PT_HPU_MAX_COMPOUND_OP_SIZE_SS", STAGE)), self.most
            )

    def read(self, tensor: HPUTensor, reason: str, rule: str = "H002") -> Tensor:
        """The numbers of a tensor, on the host."""
        if self.tracing():
            return tensor.raw
        self.sync(reason, rule)
        if tensor.stale is not None:
            self.findings.hit(tensor.stale, reason)
        return tensor.raw

    def upload(self, values: Tensor) -> HPUTensor:
        """A CPU tensor as a new device tensor."""
        raw = self.accept(values).detach().clone()
        checks.stored(self, raw)
        return self.new(raw)

    def accept(self, values: Tensor) -> Tensor:
        """Book an upload."""
        checks.upload(self, values)
        self.counts.uploads += 1
        self.uploaded += 1
        if self.recording is not None:
            self.findings.hit("H061", "an upload inside a capture is baked in")
            self.findings.hit("H084", "inside a capture")
        elif self.lazy and self.warm and self.uploaded > UPLOADS:
            self.findings.hit("H084", f"{self.uploaded} uploads since the last launch")
        return values

    def fall_back(self, op: ops.Op, why: str) -> None:
        """The operator runs on the host."""
        self.counts.fallbacks[op.name] += 1
        self.findings.hit("H040", f"{op.name}: {why}")
        allowed = self.flags.get("PT_HPU_PLACE_ON_CPU", "")
        if allowed and op.packet not in allowed.split(","):
            raise RuntimeError(f"{op.name} is not yet supported on HPU.")
        if self.recording is not None:
            raise RuntimeError(
                f"cpu fallback is not supported during hpu graph capturing ({op.name})"
            )
        self.wait("fallback")

    # Random numbers

    def next_seed(self, generator: torch.Generator | None = None) -> int:
        """The seed of one random operator: one draw of the host's generator, or of one that was passed."""
        self.findings.hit("H071")
        return self.draw_seed(generator)

    def draw_seed(self, generator: torch.Generator | None = None) -> int:
        return int(torch.randint(2**31, (), generator=generator or self.generator))

    # Modes of torch that lead here

    @contextmanager
    def heard(self) -> Iterator[None]:
        """What this thread calls reaches the card."""
        from gaudi_emulator.modes import Functions, Operators, allocators

        allocators()
        self.threads.modes = Functions(self), Operators(self)
        self.listen()
        try:
            yield
        finally:
            self.deaf()

    def listen(self) -> None:
        """Enter the modes that catch torch's calls."""
        for mode in getattr(self.threads, "modes", ()):
            mode.__enter__()

    def deaf(self) -> None:
        for mode in reversed(getattr(self.threads, "modes", ())):
            mode.__exit__(None, None, None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Leave torch to itself for a while."""
        self.deaf()
        try:
            yield
        finally:
            self.listen()

    def note_failure(self, error: BaseException) -> None:
        """An exception that ended a program: it may be a rule's way of showing."""
        reserved = ("bypass_hpu_graphs", "warmup_mode", "cache_tensors_list")
        if isinstance(error, TypeError) and any(name in str(error) for name in reserved):
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            site = (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else None
            self.findings.hit("H080", "a reserved argument reached a plain forward", "error", site)

    # Warm-up

    def warmed_up(self) -> None:
        """From here on a new recipe is a recompilation."""
        self.flush("warm-up")
        self.warm, self.credit = True, max(self.credit, CREDIT)  # what the warm-up read is paid


def flag(flags: Mapping[str, str], name: str, default: bool = False) -> bool:
    """A flag as the bridge reads it."""
    value = flags.get(name)
    return default if value is None else value.lower() in ("1", "true")


def execute(func: Any, args: Args, kwargs: Kwargs, seed: int | None) -> Any:
    """Run an operator on CPU tensors; a random one from its own seed."""
    func = STAND_INS.get(func._schema.name, func)
    if func in BYTE_BY_BYTE and args[0].dtype in ops.FLOAT8:
        return moved_as_bytes(func, args, kwargs)
    if seed is None:
        return func(*args, **kwargs)
    with fork_rng(devices=[]):
        manual_seed(seed)
        return func(*args, **{n: None if n == "generator" else v for n, v in kwargs.items()})


def moved_as_bytes(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """An operator that only moves numbers of one byte, for which the CPU has no kernel."""
    first, eights = args[0], (isinstance(a, Tensor) and a.dtype in ops.FLOAT8 for a in args)
    plain = [a.view(torch.uint8) if is8 else a for a, is8 in zip(args, eights, strict=True)]
    made = func(*plain, **kwargs)
    return first if made is plain[0] else made.view(first.dtype)


def batch_norm(
    x: Tensor,  # [N, C, ...]
    weight: Tensor | None,  # [C], also in a lower format than the statistics
    bias: Tensor | None,
    mean: Tensor | None,  # [C], and so is var
    *rest: Any,
) -> Any:
    if mean is not None and mean.dtype == torch.float32:
        weight, bias = (None if t is None else t.float() for t in (weight, bias))
    return torch.native_batch_norm(x, weight, bias, mean, *rest)


def batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor | None, *rest: Any
) -> Any:
    lower = weight is not None and mean is not None and weight.dtype != mean.dtype == torch.float32
    made = torch.ops.aten.native_batch_norm_backward(
        grad, x, weight.float() if lower and weight is not None else weight, mean, *rest
    )
    if not lower or weight is None:
        return made
    return (made[0], *(None if t is None else t.to(weight.dtype) for t in made[1:]))


def take(x: Tensor, index: Tensor) -> Tensor:
    return torch.take(x, index.long())


# Operators that the device has in more number formats than the CPU
STAND_INS: dict[str, Callable[..., Any]] = {
    "aten::take": take,
    "aten::native_batch_norm": batch_norm,
    "aten::native_batch_norm_backward": batch_norm_backward,
}

BYTE_BY_BYTE = frozenset(
    getattr(torch.ops.aten, name).default for name in ("index_copy", "index_copy_", "gather")
)

# Operators that move data or read it


def read_scalar(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return func(device.read(args[0], "item", "H001"))


def compare_on_host(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    device.sync(op.packet, "H004")
    checks.no_bare_meta(args, op.name)
    return func(*(a.raw if isinstance(a, HPUTensor) else a for a in args), **kwargs)


def to_copy(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Another dtype or another device."""
    goal = kwargs.get("device")
    rest = {name: value for name, value in kwargs.items() if name != "device"}
    (source,) = args
    if not isinstance(source, HPUTensor):
        return device.upload(func(source, **rest))
    if goal is not None and torch.device(goal).type == "cpu":
        return func(device.read(source, "copy to the host"), **rest)
    return device.operate(op, func, args, rest)


def copy(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`copy_` within the device, up or down."""
    goal, source = args[:2]
    checks.no_bare_meta((goal, source), op.name)
    if not isinstance(goal, HPUTensor):
        return func(goal, device.read(source, "copy to the host"))
    if isinstance(source, HPUTensor):
        return device.operate(op, func, args, kwargs)
    if source.dim() == 0 and goal.dim() > 0:  # a 0-dimensional CPU tensor is a scalar
        return device.operate(op, func, (goal, source), kwargs)
    if goal.raw.untyped_storage().data_ptr() in device.written:
        device.flush("upload into a pending tensor")
    checks.view_write(device, op, goal)
    if device.rehearsed is not None:
        device.rehearsed.keep(goal.raw)
    goal.raw.copy_(device.accept(source))
    return goal


def stay(device: Device, op: ops.Op, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """torch's own bookkeeping of tensors that Python numbers became: no operator of the device."""
    return args[0]


SPECIAL = {
    "_local_scalar_dense": read_scalar,
    "equal": compare_on_host,
    "_to_copy": to_copy,
    "copy_": copy,
    "lift_fresh": stay,
}

# The card in use

_cards: list[Device] = []


def current() -> Device:
    """The installed card."""
    if not _cards:
        raise RuntimeError("an emulated tensor outlived its emulator: no card is installed")
    return _cards[-1]


def listening() -> bool:
    """Whether a card is installed."""
    return bool(_cards)


@contextmanager
def as_current(device: Device) -> Iterator[Device]:
    _cards.append(device)
    try:
        yield device
    finally:
        _cards.remove(device)
