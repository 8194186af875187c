"""What Gaudi forbids or punishes, as data, and the record of who did it where.

The rules are facts of the public PyTorch bridge (releases 1.24 and 1.19) and of Habana's documentation. A rule has a
severity outside and inside a graph capture: what merely costs time outside can be wrong for good inside.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import FrameType
from typing import Literal, cast

import torch

from gaudi_emulator.releases import DEFAULT, RELEASES
from lantern_hpu.backends.hpu.errors import text_rows

Severity = Literal["error", "warn", "info"]
ORDER: tuple[Severity, ...] = ("error", "warn", "info")


@dataclass(frozen=True)
class Rule:
    """One line of the contract.

    Attributes:
        why: the reason in every release; `reasons` has those of rules that differ.
        captured: the severity inside a capture.
    """

    id: str
    name: str
    why: str
    instead: str
    severity: Severity
    captured: Severity

    @property
    def title(self) -> str:
        return f"{self.id} {self.name}"

    @property
    def releases(self) -> tuple[str, ...]:
        """Releases that have the rule."""
        return tuple(BY_RELEASE.get(self.id, RELEASES))

    def reason(self, releases: Sequence[str]) -> str:
        """Why, in these releases."""
        texts = {name: BY_RELEASE.get(self.id, {}).get(name, self.why) for name in releases}
        if len(set(texts.values())) == 1:
            return next(iter(texts.values()))
        return "; ".join(f"{name}: {text}" for name, text in texts.items())


def rule_table(text: str) -> dict[str, Rule]:
    """By id, of rows: id, name, severities outside and inside a capture; why; what instead."""
    table = {}
    for head, why, instead in (row for row in text_rows(text) if not row[0].startswith("#")):
        id, name, severity, captured = head.split()
        table[id] = Rule(id, name, why, instead, cast(Severity, severity), cast(Severity, captured))
    return table


RULES = rule_table(
    """
# Host reads
H001 sync-item warn error
    a value read on the host ends the graph and waits; inside a capture the first value is baked in
    keep the value on the device (where, masks, index_select); read rarely, outside the graph
H002 sync-copy-to-host warn error
    a copy to the host ends the graph and waits
    copy once, after the last step
H003 sync-event info error
    recording or waiting for an event or stream ends the graph, so a timing probe moves the cuts
    time whole batches from outside
H004 sync-equal warn error
    equal, allclose and is_nonzero read a value back
    compare with eq and reduce on the device

# Shapes that depend on data
H010 dynamic-nonzero error error
    the shape of the result depends on data: read-back and recompilation
    where(mask, a, b), masked_fill, or an index into a padded buffer
H011 dynamic-unique error error
    the shape of the result depends on data: read-back and recompilation
    a table of fixed size; repeat_interleave with output_size
H012 bool-assign warn error
    x[mask] = v becomes a padded nonzero, a scatter and a copy of the whole tensor
    masked_fill_ or where
H013 shape-growth error error
    cat makes a new shape at each turn, and each shape is compiled anew
    a preallocated buffer and index_copy_ at a position kept on the device
H014 varying-python-int warn error
    a Python number that reaches an operator is a constant of the graph: each value is a new recipe
    keep it in a tensor on the device
H015 symbolic-size warn warn
    a size that varied became a symbol: hpu_backend then compiles ranges of shapes, or anew inside
    torch.compile(..., dynamic=False), and inputs padded to a few sizes
H016 size-per-input warn warn
    graphs that differ by their shapes alone, most of them run once: seconds of compilation for each input
    inputs padded to a few sizes, each of them warmed up

# Recipes and wrapped graphs
H020 recompile error error
    a graph that the warm-up had not seen: seconds of stall
    warm up every shape, and keep shapes and constants fixed
H021 key-explosion error error
    wrap_in_hpu_graph keys Python numbers and strings by value: one graph each
    pass varying numbers as tensors
H022 key-alias error error
    the key compares hashes only (1, 1.0 and True; -1 and -2): the wrong graph runs
    keep dtypes and Python values of arguments fixed; a runner with keys of its own
H023 max-graphs warn warn
    the graph cache is full: calls run without a graph, silently
    fewer shapes, or a larger max_graphs
H024 guard-failure warn warn
    a guard of torch.compile failed, so the function is compiled once more: seconds each time
    keep sizes, number formats and Python values of what a compiled function reads fixed

# Number formats
H030 int64-range error error
    in lazy mode int64 is stored as int32, and an upload out of its range raises
    int32 on the host
H031 int64-wrap error error
    in lazy mode int64 arithmetic wraps at 32 bits without a word
    numbers that fit int32
H032 int64-payload warn warn
    int64 data (not indices) in gather, scatter, argmax or topk has failed to compile on some releases
    int32 data; int64 for indices alone
H033 float64 warn warn
    float64 is narrowed to float32 without a word
    float32
H034 complex error error
    complex numbers are no device type: torch.complex returns a CPU tensor, the rest falls back
    pairs of real numbers

# Operators
H040 cpu-fallback warn error
    the operator has no device kernel: inputs go to the host and results come back; fatal in a capture
    an operator from the native list
H041 stable-sort warn error
    sort(stable=True) falls back beyond 37 elements or along dimension 0
    an unstable sort, or topk
H042 bool-reduce warn error
    argmax and argmin over bool and int16 fall back
    cast to int32 or float32 first
H043 int-matmul warn error
    matrix products of integers fall back
    float, or a gather
H044 big-sort info info
    sort becomes a topk over everything: slow beyond 1024 elements
    topk with a fixed k
H045 index-rank error error
    advanced reads take at most 5 dimensions, advanced writes 8
    flatten, then index one dimension
H046 multinomial-16-bit warn warn
    multinomial declares 16-bit results for bfloat16 and half distributions over more than 32767 categories
    float32, or a cumulative sum and uniforms from the host
H047 index-with-none info info
    x[:, i] expands the missing dimensions into index lists
    index_select along the dimension

# Indices
H050 negative-index error error
    reading kernels do not support negative elements in an index tensor
    point unused entries at a real row and mask the result
H051 index-out-of-range error error
    the device does not check bounds: garbage or a zero row comes back
    clamp, or point at a row kept for it
H052 duplicate-index error error
    which of two writes to one place wins is undefined
    indices without duplicates
H053 scatter-alias error error
    scatter of a tensor into itself gives wrong numbers
    clone the source
H054 whole-copy-write warn warn
    index_put_, index_add_ and scatter_add_ copy the whole destination (here over 1 MiB)
    index_copy_

# Graph capture
H060 view-write info error
    a write into a view is unsupported in a capture
    index_copy_ or copy_ on the base tensor
H061 cpu-tensor error error
    a CPU tensor meets device tensors: lazy mode uploads it each time; inside a capture it is baked
    buffers made before, on the device
H062 view-input info info
    a wrapped function got a view or a non-contiguous tensor: each chain of views is a key of its own
    contiguous base tensors
H063 stale-output error error
    a replay returns the same storage each time: this result was overwritten
    clone what is kept
H064 input-clobber warn warn
    the tensors of the first call are the static inputs: a later call overwrote one that still lives
    pass tensors made for it
H065 capture-split warn warn
    the graph was cut inside a capture: one more launch a replay
    nothing that ends the graph, unless the cut is meant
H066 capture-order error error
    nested, unfinished or moved captures and replays inside one are fatal
    try/finally around capture_end, one capture at a time, on one stream
H067 dry-run-read error error
    a dry-run capture computes nothing: this result is garbage until a replay
    replay first
H068 baked-value error error
    a second run from equal state does something else: the capture keeps the first run's Python values
    keep what varies in tensors of the state, and nothing in attributes from call to call
H069 state-bound-anew error error
    a tensor of the state was replaced by another one, which replays do not see
    write into it: copy_, index_copy_

# Random numbers
H070 host-random error error
    random numbers of the host inside a capture are baked in
    a static buffer of uniforms filled before each replay
H071 device-random info info
    the device's random numbers are not those of a CPU or another card with the same seed
    uniforms from the host where runs are compared

# Process
H080 wrong-mode error error
    HPU graphs work in lazy mode alone, hpu_backend outside it alone
    PT_HPU_LAZY_MODE=1 for HPU graphs, 0 for torch.compile
H081 late-flag error error
    flags are read while habana_frameworks is imported: this one came too late
    set it before the import
H086 other-device error error
    inductor has no code for hpu, and autocast('cuda') leaves hpu in the format that it was in
    torch.compile(..., backend='hpu_backend'), torch.autocast('hpu')
H082 fork error error
    a fork after the device started hangs
    spawn processes
H083 missing-mark-step warn warn
    thousands of operators gathered without an end: one huge graph, compiled late
    mark_step() at the end of each turn
H084 upload-in-loop warn error
    uploads at each step drain the launch thread
    one upload for several steps, into a buffer that nothing pending writes
H085 lazy-collectives error error
    several cards with HPU graphs need PT_HPU_ENABLE_LAZY_COLLECTIVES=true
    set it before the import

# torch.compile
H090 graph-break warn warn
    torch.compile cuts the function here: one launch more, and Python in between
    tensors instead of what cannot be traced; fullgraph=True makes it an error at once
H091 eager-cut warn warn
    hpu_backend does not compile this operator: the graph is cut, and state crosses from part to part
    another operator; PT_HPU_USE_EAGER_FALLBACK=0 makes each cut an error at once;
        PT_HPU_ENABLE_SYNAPSE_INPUT_REUSE=0 (from 1.24 on) keeps state right
H092 index-write-chain warn warn
    two writes by index into one tensor: compile mode copies the whole tensor for each
    a tensor for each write, or one index_copy_ of all rows
H093 shared-state error error
    tensors of the state share a storage: compile mode takes one for the other (vllm-gaudi 1563)
    each tensor of the state allocated by itself
"""
)

# Rules that one release alone has, or that differ: rule -> release -> why
BY_RELEASE: dict[str, dict[str, str]] = {
    "H022": {
        "1.19": "the key leaves out dtypes and compares hashes only (1, 1.0 and True; -1 and -2): the wrong graph runs",
        "1.24": RULES["H022"].why,
    },
    "H032": {"1.19": RULES["H032"].why},
    "H041": {"1.19": RULES["H041"].why},
    "H042": {"1.19": "max, min, argmax and argmin over bool fall back", "1.24": RULES["H042"].why},
    "H091": {
        "1.19": RULES["H091"].why,
        "1.24": f"{RULES['H091'].why}, where reused memory has overwritten it (vllm-gaudi 1753)",
    },
    "H092": {
        "1.19": "two writes by index into one tensor: in compile mode the first alone lasts",
        "1.24": RULES["H092"].why,
    },
}

EMULATOR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
SKIPPED = (EMULATOR, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, "<frozen")


def call_site() -> tuple[str, int]:
    """File and line of the nearest caller outside torch and the emulator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(SKIPPED) and "contextlib" not in file:
            return file, frame.f_lineno
        frame = frame.f_back
    return "unknown", 0


Place = tuple[str, str, int, Severity]  # rule, file, line, severity


@dataclass
class Finding:
    """A rule that was hit at one place, and the releases that it was hit under."""

    rule: Rule
    severity: Severity
    file: str
    line: int
    detail: str
    captured: bool
    releases: tuple[str, ...]
    count: int = 1

    @property
    def place(self) -> Place:
        return self.rule.id, self.file, self.line, self.severity

    def as_dict(self) -> dict[str, object]:
        return {
            "rule": self.rule.id,
            "name": self.rule.name,
            "severity": self.severity,
            "file": self.file,
            "line": self.line,
            "detail": self.detail,
            "in_capture": self.captured,
            "count": self.count,
            "releases": list(self.releases),
            "why": self.rule.reason(self.releases),
            "instead": self.rule.instead,
        }


@dataclass
class Findings:
    """All findings, one for each rule, place and severity."""

    captured: Callable[[], bool]
    release: str = DEFAULT.name
    found: dict[Place, Finding] = field(default_factory=dict)
    muted: bool = False

    def hit(
        self,
        rule_id: str,
        detail: str = "",
        severity: Severity | None = None,
        site: tuple[str, int] | None = None,
    ) -> None:
        """Note that a rule that the release has was hit here, with its own severity unless one is given."""
        rule, captured = RULES[rule_id], self.captured()
        if self.muted or self.release not in rule.releases:
            return
        severity = severity or (rule.captured if captured else rule.severity)
        file, line = site or call_site()
        known = self.found.get((rule_id, file, line, severity))
        if known:
            known.count += 1
            return
        self.found[rule_id, file, line, severity] = Finding(
            rule, severity, file, line, detail, captured, (self.release,)
        )

    def sorted(self) -> list[Finding]:
        """Errors first, then by rule and place; a baked value that another error explains is left out."""
        explained = {
            (f.file, f.line)
            for f in self.found.values()
            if f.severity == "error" and f.rule.id not in ("H068", "H020")
        }
        return in_order(
            f
            for f in self.found.values()
            if f.rule.id != "H068" or (f.file, f.line) not in explained
        )

    def add(self, other: Findings) -> None:
        """Take over the findings of another run."""
        for key, finding in other.found.items():
            count = self.found[key].count if key in self.found else 0
            self.found[key] = replace(finding, count=finding.count + count)

    def hits(self, severity: Severity) -> int:
        """How often rules were hit with this severity."""
        return sum(f.count for f in self.found.values() if f.severity == severity)

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.sorted() if finding.severity == "error"]


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then by rule and place."""
    return sorted(findings, key=lambda f: (ORDER.index(f.severity), f.rule.id, f.file, f.line))


def joined_over_releases(runs: Iterable[Iterable[Finding]]) -> list[Finding]:
    """Findings of the same program under several releases, each place once, with all releases that it holds for."""
    together: dict[Place, Finding] = {}
    for finding in chain.from_iterable(runs):
        known = together.get(finding.place, replace(finding, releases=(), count=0))
        releases = tuple(dict.fromkeys((*known.releases, *finding.releases)))
        count = max(known.count, finding.count)
        together[finding.place] = replace(known, releases=releases, count=count)
    return in_order(together.values())
