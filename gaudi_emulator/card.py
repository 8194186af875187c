"""The books of the emulated card, kept as the bridge keeps them.

In lazy mode operators gather until something ends the graph (`flush`): the sequence of operators, shapes
and constants is the key of a recipe, a key not seen before is a compilation. Outside lazy mode each
operator runs by itself. While a capture is open every operator is also recorded (`recording.Recording`).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gaudi_emulator import ops
from gaudi_emulator.recording import Recording, Run
from gaudi_emulator.releases import LAZY_MODE, Release, operators
from gaudi_emulator.rules import Findings, Severity, call_site
from gaudi_emulator.tensor import Args, HPUTensor, Kwargs

CREDIT = 16  # host reads for setting up and for results; each launch earns one more
LOOPED = 3  # reads of a value by one line, beyond which it stands in a loop if each launch has one
UPLOADS = 16  # uploads between two launches that are not reported
VARIANTS = 4  # recipes that differ by a constant alone, beyond which they are reported
SIZES = 8  # recipes that differ by shapes and are used once, beyond which they are reported
GATHERED = 6_000  # operators without an end
STAGE = 10  # operators in the first graph after a shape was read back; the limit doubles until one of ENDS
ENDS = ("mark_step", "capture begin", "replay")
# Operators whose constants or shapes are worth a look at who called them
SITED = operators("sited")


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


class Card:
    """The state of one emulated card, and what it has done."""

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
        self.modules: dict[str, ModuleType] = {}  # `habana_frameworks` and all below, by name
        self.recording: Recording | None = None
        self.findings = Findings(lambda: self.recording is not None, self.release.name)
        self.pending: list[tuple[Any, ...]] = []
        self.sites: list[tuple[str, int] | None] = []
        self.written: set[int] = set()  # storages with pending results
        self.recipes: set[tuple[Any, ...]] = set()
        self.generator = torch.Generator().manual_seed(0)
        self.inside = False
        self.threads = threading.local()  # torch's modes are of one thread each
        self.loaded = False  # whether the bridge was imported, which is when it reads its flags
        self.compiler: Any = None  # `compiler.Compiler` of a user's program
        self.traced = False  # whether dynamo has the word
        self.differential = False  # whether functions are rehearsed before they are captured
        self.rehearsed: Run | None = None
        self.warned: set[str] = set()  # functions that said once that they do nothing
        self.in_use = self.peak = self.largest = 0  # bytes; the largest of one tensor
        self.allocs = self.frees = 0
        self.counted_from = 0, 0  # of both, when the program last reset them
        self.switches = {"recompute_sdp"}  # of `torch.hpu`, those that are on
        self.begin()

    def begin(self) -> None:
        """A program begins, or a test among others: what was warmed up or repeated so far is forgotten."""
        self.variants: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
        self.again: Counter[tuple[str, ...]] = Counter()  # uses of recipes after their first
        self.blamed: dict[tuple[str, ...], tuple[str, int] | None] = {}  # None: reported
        self.read_at: Counter[tuple[str, int]] = Counter()  # single values, by line
        self.warm = False
        self.credit, self.uploaded = CREDIT, 0
        self.earned = self.values_read = 0

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
        elif lazy != self.lazy and LAZY_MODE in os.environ:
            self.findings.hit("H080", f"{LAZY_MODE}={lazy:d}, and this is the other mode")

    @property
    def autoloads(self) -> bool:
        """Whether `import torch` loads the bridge."""
        kept_away = self.lazy or os.environ.get("PT_HPU_AUTOLOAD") == "0"
        return self.release.autoloads and not kept_away

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

    def book_upload(self) -> None:
        """A CPU tensor goes to the device."""
        self.counts.uploads += 1
        self.uploaded += 1
        if self.recording is not None:
            self.findings.hit("H061", "an upload inside a capture is baked in")
            self.findings.hit("H084", "inside a capture")
        elif self.lazy and self.warm and self.uploaded > UPLOADS:
            self.findings.hit("H084", f"{self.uploaded} uploads since the last launch")

    def note_failure(self, error: BaseException) -> None:
        """An exception that ended a program: it may be a rule's way of showing."""
        reserved = ("bypass_hpu_graphs", "warmup_mode", "cache_tensors_list")
        if isinstance(error, TypeError) and any(name in str(error) for name in reserved):
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            site = (trace.tb_frame.f_code.co_filename, trace.tb_lineno) if trace else None
            self.findings.hit("H080", "a reserved argument reached a plain forward", "error", site)

    def warmed_up(self) -> None:
        """From here on a new recipe is a recompilation."""
        self.flush("warm-up")
        self.warm, self.credit = True, max(self.credit, CREDIT)  # what the warm-up read is paid


def flag(flags: Mapping[str, str], name: str, default: bool = False) -> bool:
    """A flag as the bridge reads it."""
    value = flags.get(name)
    return default if value is None else value.lower() in ("1", "true")
