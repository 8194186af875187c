"""What Gaudi would say to this code, on a machine without one.

    lantern-hpu lint --strict                 the embedded model, every method
    lantern-hpu lint --script my_model.py     your own code

Code runs on the emulated card, `backends/hpu/emulator`; `rules.py` there has the rules. Each that is broken is printed
with the line that broke it, why it matters, and what to write instead. A script may `import habana_frameworks.torch`
and call `lantern_hpu.commands.lint.warmed_up()` once every shape has been seen: from then on a compilation is an
error.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lantern_hpu.backends import EMULATED
from lantern_hpu.backends.hpu.env import LAZY_MODE
from lantern_hpu.backends.hpu.releases import choose, emulated
from lantern_hpu.commands.options import add_bridge_option
from lantern_hpu.errors import LanternError, OptionError, choices, exit_code, require
from lantern_hpu.graphs import RUNNERS
from lantern_hpu.methods.methods import METHODS, Request

if TYPE_CHECKING:
    from lantern_hpu.backends.hpu.emulator import Device, Finding
    from lantern_hpu.pipeline import LanternPipeline

RECOMPILING = ("H013", "H014", "H021", "H024")
PROFILES = ("lazy", "compile")
PROMPTS = ("a red apple", "a blue fish")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "lantern-hpu lint",
        description="Run code on an emulated Gaudi and name every rule that it breaks.",
    )
    parser.add_argument("--model", default="builtin", help="`builtin`, or a model folder (builtin)")
    parser.add_argument("--method", default="all", help=f"all, {', '.join(METHODS)} (all)")
    parser.add_argument("--graphs", default="auto", help=f"auto, {', '.join(RUNNERS)} (auto)")
    parser.add_argument("--dtype", default="auto", help="auto, or one the device offers (auto)")
    parser.add_argument("--script", type=Path, metavar="FILE.py", help="a program of your own")
    parser.add_argument("--args", nargs="*", default=[], help="what the program gets")
    profile = "`lazy` mode with HPU graphs, or `compile`: PT_HPU_LAZY_MODE=0 and torch.compile"
    parser.add_argument("--profile", default="lazy", help=f"{profile} (lazy)")
    add_bridge_option(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        help="seconds that the program, or each method, may take (600)",
    )
    strict = "exit code 1 on any error, and on any warning that means a compilation for each input"
    parser.add_argument("--strict", action="store_true", help=strict)
    parser.add_argument("--all", action="store_true", help="show what is merely worth knowing too")
    parser.add_argument("--json", action="store_true", help="findings and counts, for programs")
    return parser


def warmed_up() -> None:
    """For a script: every shape has been seen, so that a new recipe is a fault. Without the emulator: nothing."""
    from lantern_hpu.backends.hpu.emulator import current

    try:
        card = current()
    except RuntimeError:
        return
    card.warmed_up()


Ended = BaseException | None


def lint_model(args: argparse.Namespace) -> tuple[list[Device], Ended]:
    """Warm-up and two images by each method; the cards that they ran on, and what ended a method if something did."""
    if args.method not in ("all", *METHODS):
        raise OptionError(f"unknown method {args.method!r}", hint=choices(["all", *METHODS]))
    from lantern_hpu.pipeline import LanternPipeline

    compiles = args.graphs == "auto" and args.profile == "compile"
    graphs = "compile" if compiles else args.graphs
    cards: list[Device] = []
    ended: Ended = None
    for method in METHODS if args.method == "all" else [args.method]:
        pipeline = LanternPipeline.from_pretrained(
            args.model, device=EMULATED, dtype=args.dtype, graphs=graphs, emulate=True
        )
        with closing(pipeline):
            if args.method == "all" and lacks_drafter(pipeline, method):
                print(f"{method}: left out, {pipeline.model.name} has no drafter", file=sys.stderr)
                continue
            print(f"{method}: warm-up and {len(PROMPTS)} images", file=sys.stderr)
            card: Device = pipeline.backend.card  # type: ignore[attr-defined]
            card.differential = True
            cards.append(card)
            try:
                chosen, settings = pipeline.choose(method), pipeline.model.sampling
                requests = [
                    Request(p, i, settings, chosen.relaxation) for i, p in enumerate(PROMPTS)
                ]
                with limited(args.timeout):  # a broken step may never finish an image
                    pipeline.draw(requests, chosen.tree, method, batch_size=1)
            except (Exception, TimeOver) as error:  # what was found before it counts all the same
                ended = error
    return cards, ended


def lacks_drafter(pipeline: LanternPipeline, method: str) -> bool:
    return METHODS[method].needs_drafter and pipeline.model.drafter is None


class TimeOver(BaseException):
    """The program ran longer than it may; no handler of its own is to catch that."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TimeOver in a program that goes on for too long."""

    def stop(*_: object) -> None:
        raise TimeOver(f"it was stopped after {seconds:g} seconds (--timeout)")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def lint_script(
    file: Path, args: Sequence[str], lazy: bool, timeout: float = 600.0
) -> tuple[Device, Ended]:
    """Run a program on an emulated card; also gives the exception that ended it, if one did.

    What the program prints goes to the error stream: the other one has the findings.
    """
    from lantern_hpu.backends.hpu.emulator import emulate

    if not file.is_file():
        raise OptionError(f"there is no {file}", hint="the path of a Python program")
    ended: Ended = None
    argv, sys.argv = sys.argv, [str(file), *args]
    path, sys.path = sys.path, [str(file.parent), *sys.path]
    mode = os.environ.get(LAZY_MODE)
    os.environ[LAZY_MODE] = "1" if lazy else "0"
    flags = {n: v for n, v in os.environ.items() if n.startswith(("PT_", "WORLD_SIZE"))}
    try:
        with emulate(lazy, flags, importable=True) as card:
            card.differential = True
            try:
                with redirect_stdout(sys.stderr), limited(timeout):
                    runpy.run_path(str(file), run_name="__main__")
            except SystemExit as stop:
                ended = stop if stop.code else None
            except (Exception, TimeOver) as error:
                ended = error
                card.note_failure(error)
            card.flush("exit")
    finally:
        sys.argv, sys.path = argv, path
        os.environ.pop(LAZY_MODE, None)
        if mode is not None:
            os.environ[LAZY_MODE] = mode
    return card, ended


def merged(cards: Iterable[Device]) -> list[Finding]:
    """Findings of several runs, each rule and place once."""
    from lantern_hpu.backends.hpu.emulator.rules import Findings

    together = Findings(lambda: False)
    for card in cards:
        together.add(card.findings)
    return together.sorted()


def text(findings: Sequence[Finding]) -> str:
    """One paragraph a finding."""
    blocks = []
    for finding in findings:
        file = os.path.relpath(finding.file) if os.path.isabs(finding.file) else finding.file
        where = f"{file}:{finding.line}"
        captured = " in a capture" if finding.captured else ""
        often = f", {finding.count} times" if finding.count > 1 else ""
        detail = f" ({finding.detail}{often})" if finding.detail else often
        blocks.append(
            f"{where}: {finding.severity} {finding.rule.title}{captured}{detail}\n"
            f"    why: {finding.rule.why}\n    instead: {finding.rule.instead}"
        )
    return "\n".join(blocks)


def summary(cards: Sequence[Device]) -> dict[str, Any]:
    """Counts over all runs."""
    counts = [card.counts for card in cards]
    return {
        "recompiles_after_warmup": sum(c.recompiles for c in counts),
        "cpu_fallbacks": sum(c.fallbacks.total() for c in counts),
        "recipes": sum(c.recipes for c in counts),
        "launches": sum(c.launches for c in counts),
        "graph_launches": sum(c.graphs["launches"] for c in counts),
        "host_syncs": sum(c.host_syncs.total() for c in counts),
        "uploads": sum(c.uploads for c in counts),
    }


def run(args: argparse.Namespace) -> bool:
    """Print what was found; whether it is clean."""
    if args.script:
        card, ended = lint_script(args.script, args.args, args.profile == "lazy", args.timeout)
        cards = [card]
    else:
        cards, ended = lint_model(args)
    findings = merged(cards)
    errors = sum(f.severity == "error" for f in findings)
    shown = [f for f in findings if args.all or f.severity != "info"]
    counts = summary(cards)
    if args.json:
        release = emulated().name
        rows = [f.as_dict() for f in findings]
        print(json.dumps({"release": release, "findings": rows, "counts": counts}, indent=2))
    else:
        if shown:
            print(text(shown))
        warnings = sum(f.severity == "warn" for f in findings)
        notes = len(findings) - errors - warnings
        print(f"{errors} errors, {warnings} warnings, {notes} notes ({emulated()})")
        print(", ".join(f"{value} {name.replace('_', ' ')}" for name, value in counts.items()))
    if ended is not None:
        # Without the hint of an error of ours: it may advise to run the lint.
        said = f"{ended.what}: {ended.why}" if isinstance(ended, LanternError) else str(ended)
        print(f"the program ended with {type(ended).__name__}: {said}", file=sys.stderr)
    recompiling = any(f.rule.id in RECOMPILING and f.severity == "warn" for f in findings)
    return not errors and not recompiling and ended is None


def main(argv: Sequence[str] | None = None) -> int:
    """The `lint` command: 0, 1 with `--strict` and an error found, 2 for bad options."""
    args = make_parser().parse_args(argv)
    clean = True

    def work() -> None:
        nonlocal clean
        require(args.timeout > 0, "--timeout", args.timeout, "more than 0")
        require(args.profile in PROFILES, "--profile", args.profile, choices(PROFILES))
        choose(args.bridge)
        clean = run(args)

    code = exit_code(work)
    return code or (1 if args.strict and not clean else 0)
